//! Admin views: `inspect` and `list`.
//!
//! They show locks to operators, and no grant depends on them.

use crate::{
    commands::{Taken, Use},
    config::decode,
    connection::Session,
    error::failed,
    line::Line,
    seats::Phase,
};
use dlock_core::{
    LockName, Snapshot,
    driver::{Cursor, DriverError, Page, Result},
};
use futures_util::{StreamExt, stream};
use std::time::Duration;
use zookeeper_client::Error as Native;

/// The prefix of this driver's cursors, before the last name of the page.
const CURSOR: &str = "zk1:";

impl Session {
    pub(crate) async fn snapshot(&self, name: &LockName, line: &Line) -> Result<Snapshot, Native> {
        let mut seen = Snapshot::free(name.clone());
        if line.is_empty() {
            return Ok(seen);
        }
        let taken = self.folder(name).read(line.inside()).await?;
        let living = taken.iter().filter(|taken| self.lives(name, taken));
        let living: Vec<_> = living.collect();
        seen.holds = u32::try_from(living.len()).unwrap_or(u32::MAX);
        let mut waiting = line.len() - 1;
        if let Some(first) = living.first() {
            let mut holder = first.holder();
            holder.token = taken.iter().find_map(Taken::token);
            let rests = living.iter().filter_map(|taken| self.rest_of(name, taken));
            holder.rest = rests.max();
            seen.holders.push(holder);
            let began = taken.iter().map(|taken| taken.stat.ctime).min();
            seen.age = began.and_then(|began| self.since(began));
        } else {
            let rests = taken.iter().filter_map(|taken| self.shut(name, taken));
            seen.unavailable_for = rests.max();
            if seen.unavailable_for.is_none() && taken.iter().any(|taken| taken.used() != Use::Held)
            {
                // Reserved for the first waiter, which is being notified.
                waiting += 1;
                seen.unavailable_for = Some(self.turn_length());
            }
        }
        seen.waiters = u32::try_from(waiting).ok();
        Ok(seen)
    }

    /// The remaining lease of a hold of this client. Unknown for holds of other sessions.
    fn rest_of(&self, name: &LockName, taken: &Taken) -> Option<Duration> {
        let mine = self.seats.at(name, &taken.seat.file)?;
        Some(mine.held_until()?.since(self.clock.now()))
    }

    /// Lists lock names in the order of their text. A folder without seats is a free name that the servers
    /// will remove.
    pub(crate) async fn page(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page> {
        let after = match from {
            None => Some(""),
            Some(Cursor(bytes)) => std::str::from_utf8(bytes)
                .ok()
                .and_then(|text| text.strip_prefix(CURSOR)),
        };
        let foreign = || DriverError::misuse("the cursor is not from this driver");
        let after = after.ok_or_else(foreign)?;
        let root = self.config.root.path();
        let (synced, children) = (self.client.sync(root), self.client.list_children(root));
        let (synced, children) = futures_util::join!(synced, children);
        let children = match synced.and(children) {
            Err(Native::NoNode) => Vec::new(),
            children => children.map_err(failed)?,
        };
        let mut names: Vec<_> = children.iter().filter_map(|child| decode(child)).collect();
        names.retain(|name| name.as_str().starts_with(prefix) && name.as_str() > after);
        names.sort_unstable();
        let more = names.len() > limit;
        names.truncate(limit);
        let last = names.last().filter(|_| more);
        let next = last.map(|name| Cursor(format!("{CURSOR}{name}").into_bytes()));
        let mut listing = stream::iter(names)
            .map(|name| async move {
                let seen = async {
                    let line = self.folder(&name).list().await?;
                    self.snapshot(&name, &line).await
                };
                match seen.await {
                    // Its ACL hides this one from the user, and no other.
                    Err(error @ Native::NoAuth) => {
                        Ok(Snapshot::damaged(name.clone(), failed(error).to_string()))
                    }
                    seen => seen.map_err(failed),
                }
            })
            .buffered(AT_ONCE);
        let mut found = Vec::new();
        while let Some(seen) = listing.next().await {
            let seen = seen?;
            if !seen.is_free() {
                found.push(seen);
            }
        }
        Ok(Page::new(found, next))
    }

    /// The remaining time of a minimum hold.
    pub(crate) fn shut(&self, name: &LockName, taken: &Taken) -> Option<Duration> {
        let Use::Kept(span) = taken.used() else {
            return None;
        };
        let mine = self.seats.at(name, &taken.seat.file);
        let rest = match mine.map(|mine| mine.phase) {
            Some(Phase::Kept(end)) => end.since(self.clock.now()),
            // Another client's minimum hold: estimated by the servers' clock, for display only.
            _ => span.saturating_sub(self.since(taken.stat.mtime).unwrap_or_default()),
        };
        // While the node exists the lock is unavailable, however little time is left.
        Some(rest.min(span).max(Duration::from_millis(1)))
    }
}

/// The most names of one page that are read at a time.
const AT_ONCE: usize = 64;
