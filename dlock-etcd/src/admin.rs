//! Inspecting, listing and breaking locks.

use crate::{
    commands::{Keys, Line, Taken, delete_all, made, name_in, unchanged},
    driver::Inner,
    error::contended,
};
use dlock_core::{
    Broken, FencingToken, LockName, Snapshot,
    driver::{Cursor, DriverError, Page, Result, kit::encode_segment},
};
use etcd_client::{GetOptions, Txn, TxnOp};
use std::{sync::Arc, time::Duration};

impl Inner {
    /// Shows a lock. What its holds have left takes a request for each.
    pub(crate) async fn snapshot(
        &self,
        name: &LockName,
        line: &Line,
        rests: bool,
    ) -> Result<Snapshot> {
        let mut shown = Snapshot::free(name.clone());
        let is_foreign = |taken: &Taken| taken.record.is_none() && !taken.is_min_hold();
        if line.taken.iter().any(is_foreign) {
            return Ok(Snapshot::damaged(
                name.clone(),
                "a hold of it was not written by dlock",
            ));
        }
        shown.waiters = u32::try_from(line.waiters.len()).ok();
        shown.holds = u32::try_from(line.holds().count()).unwrap_or(u32::MAX);
        if let Some(first) = line.holds().next() {
            let mut holder = first.holder();
            let mut longest = Duration::ZERO;
            for hold in line.holds().take(if rests { MOST_RESTS } else { 0 }) {
                longest = longest.max(self.connection.rest(hold.lease).await?.unwrap_or_default());
            }
            // The server tells whole seconds.
            holder.rest = rests.then(|| longest + Duration::from_secs(1));
            shown.holders.push(holder);
        }
        if let Some(min_hold) = line.taken.iter().find(|taken| taken.is_min_hold()) {
            let rest = self.connection.rest(min_hold.lease).await?;
            shown.unavailable_for = rest.map(|rest| rest.max(Duration::from_millis(1)));
        } else if line.taken.is_empty() && !line.waiters.is_empty() {
            shown.unavailable_for = Some(TURN);
        }
        Ok(shown)
    }

    pub(crate) async fn list(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page> {
        let begin = format!("{}/{}", self.root, encode_segment(prefix));
        // Keys that dlock did not write may be no text.
        let from = from.map_or(begin.as_bytes(), |cursor| cursor.0.as_ref());
        if !from.starts_with(begin.as_bytes()) {
            return Err(DriverError::misuse("the cursor is not one of this listing"));
        }
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        // No code of a name, and no rest of a key, has this character.
        let options = GetOptions::new().with_range(format!("{begin}\u{7f}"));
        let options = options.with_limit(limit);
        let got = self
            .connection
            .call(|client| async move { client.kv_client().get(from, Some(options)).await });
        let got = got.await?;
        let mut names: Vec<(LockName, Line)> = Vec::new();
        for kv in got.kvs() {
            let Some((name, rest)) = name_in(&self.root, kv.key()) else {
                continue;
            };
            if names.last().is_none_or(|(last, _)| *last != name) {
                names.push((name, Line::default()));
            }
            if let Some((_, line)) = names.last_mut() {
                line.sort(rest, kv);
            }
        }
        let mut next = None;
        if got.more() {
            let last = got.kvs().last();
            next = last.map(|last| Cursor([last.key(), b"\0"].concat()));
            // The keys of the last name may go on behind the page.
            if let Some((name, line)) = names.last_mut() {
                let keys = self.keys(name);
                *line = self.line(&keys).await?;
                next = Some(Cursor(format!("{}\u{7f}", keys.all()).into()));
            }
        }
        let mut found = Vec::new();
        for (name, line) in names {
            let shown = self.snapshot(&name, &line, false).await?;
            if !shown.is_free() {
                found.push(shown);
            }
        }
        Ok(Page::new(found, next))
    }

    pub(crate) async fn break_lock(
        self: &Arc<Self>,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        let keys = self.keys(name);
        for _ in 0..ATTEMPTS {
            let line = self.line(&keys).await?;
            let token = line.holds().find_map(Taken::token);
            if only.is_some() && only != token {
                return Ok(match token {
                    Some(_) => Broken::Changed { token },
                    None => Broken::WasFree,
                });
            }
            let Some(txn) = break_txn(&keys, &line) else {
                return Ok(Broken::WasFree);
            };
            if self.connection.txn(txn).await?.succeeded() {
                return Ok(Broken::Freed { token });
            }
        }
        Err(contended())
    }
}

/// Removes what was read: all holds, or else the waiter whose turn it is. Run twice, the second run finds it gone.
fn break_txn(keys: &Keys, line: &Line) -> Option<Txn> {
    if let Some(first) = line.taken.first() {
        let when = [first.stays(), unchanged(&keys.holds(), line.revision)];
        let then = [delete_all(&keys.holds()), delete_all(&keys.pending())];
        return Some(Txn::new().when(when).and_then(then));
    }
    let (first, created) = line.waiters.first()?;
    let when = [
        made(first.as_slice(), *created),
        unchanged(&keys.holds(), 0),
    ];
    Some(
        Txn::new()
            .when(when)
            .and_then([TxnOp::delete(first.as_slice(), None)]),
    )
}

/// Of how many holds the longest rest is looked for.
const MOST_RESTS: usize = 8;
/// How often one call reads again because something changed meanwhile.
const ATTEMPTS: usize = 16;
/// A name without a hold is reserved for its first waiter for that long, if that one lives.
const TURN: Duration = Duration::from_secs(1);
