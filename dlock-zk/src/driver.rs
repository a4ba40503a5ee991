//! The driver: every call is bounded from outside, and answers what the servers said.

use crate::{
    commands::{Line, Taken, look, look_now, read, remove_all},
    config::{ZkConfig, decode},
    connection::{Lanes, Session},
    error::{contended, failed, is_open, late},
    hints::Of,
    seats::{Mine, Phase},
};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, DriverError, ErrorKind,
    FencingToken, Hint, HoldId, Holds, Instant, Lane, LockName, MIN_LEASE, Owner, Page, Release,
    Released, Renew, Renewed, Result, Snapshot, Ticket, Wake,
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, future::join_all, stream};
use std::{num::NonZeroU32, sync::Arc, time::Duration};
use zookeeper_client::{Client, Error as Native};

/// Locks in ZooKeeper: a seat each, and a watch on the one ahead.
///
/// A hold lives as long as its session; each has its own end besides, at which this client removes it. `Debug` shows no password.
#[derive(Debug)]
pub struct ZkDriver {
    lanes: Lanes,
    caps: Capabilities,
}

impl ZkDriver {
    /// Connects to the servers of a URL: see [`ZkConfig`].
    ///
    /// # Errors
    /// `Misuse` for a URL that cannot work, `Unavailable` when no server serves.
    ///
    /// # Cancel safety
    /// Dropped early, a session without anything on it is left to run out.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::Result<()> {
    /// let driver = dlock_zk::ZkDriver::connect("zk://127.0.0.1:2181/dlock?dlock.session=10s").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects as configured. The first session is opened, and its time-out read; others are when names need them.
    ///
    /// # Errors
    /// `Unavailable` when no server serves.
    ///
    /// # Cancel safety
    /// Dropped early, a session without anything on it is left to run out.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::Result<()> {
    /// use dlock_zk::{ZkConfig, ZkDriver};
    /// let driver = ZkDriver::open(ZkConfig::new("127.0.0.1:2181").with_sessions(4)?).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(config: ZkConfig) -> Result<Self> {
        Self::over(config, None).await
    }

    /// Works on the application's own connection, whose session then is the only one: when it ends, whoever holds it ends it, or the servers do,
    /// all locks end with it and no new ones are had. Of the settings root and ACL count. Takes half a session's time-out to prove it.
    ///
    /// # Errors
    /// `Unavailable` when the session is over or not answered for.
    ///
    /// # Cancel safety
    /// Dropped early, nothing is left but a node of the session.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: dlock_zk::zookeeper_client::Client) -> dlock_core::Result<()> {
    /// use dlock_zk::{ZkConfig, ZkDriver};
    /// let driver = ZkDriver::from_client(client, ZkConfig::new("a.internal:2181")).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn from_client(client: Client, config: ZkConfig) -> Result<Self> {
        Self::over(config, Some(client)).await
    }

    async fn over(config: ZkConfig, given: Option<Client>) -> Result<Self> {
        let store = config.store();
        let proves = given.is_some();
        let lanes = Lanes::new(config, given);
        let session = lanes.session(Lane(0)).await?;
        if proves {
            session.prove_twice().await?;
        }
        let mut caps = Capabilities::new("zookeeper", store);
        caps.wake = Wake::Line;
        caps.leases = MIN_LEASE.min(session.timeout)..=session.timeout;
        caps.late = session.timeout;
        caps.session_bound = true;
        Ok(Self { lanes, caps })
    }

    async fn session(&self, name: &LockName) -> Result<Arc<Session>> {
        self.lanes.session(self.lanes.lane(name)).await
    }
}

#[async_trait]
impl DistributedLock for ZkDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.lanes.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let entered = self.lanes.clock.now();
        if entered >= req.give_up {
            return Err(late());
        }
        let session = self.session(&req.name).await?;
        session.acquire(req, entered).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        // A ticket stands in the session of its name, or nowhere.
        let Some(session) = self.lanes.current(self.lanes.lane(name)) else {
            return Ok(());
        };
        let _gate = session.gate(name).await;
        let stands = |mine: &Mine| mine.ticket == Some(ticket) && mine.held_until().is_none();
        match session.seats.find(name, stands) {
            Some(mine) => session.remove(&mine).await.map_err(failed),
            None => Ok(()),
        }
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let entered = self.lanes.clock.now();
        if entered >= give_up {
            return Err(late());
        }
        let Some(session) = self.lanes.current(lane) else {
            return Ok(batch.iter().map(|_| Ok(Renewed::NotHeld)).collect());
        };
        session.still_there(batch).await?;
        if session.is_over() {
            return Ok(batch.iter().map(|_| Ok(Renewed::NotHeld)).collect());
        }
        Ok(batch
            .iter()
            .map(|entry| session.renew(entry, entered))
            .collect())
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let session = self.session(&req.name).await?;
        if let Holds::One(hold) = req.holds {
            let is = |mine: &Mine| mine.hold == hold && mine.owner == req.owner;
            if let Some(mine) = session.seats.find(&req.name, is) {
                return session.release(&mine, req.keep).await;
            }
        }
        let hold = match req.holds {
            Holds::One(hold) => Some(hold),
            Holds::All => None,
        };
        session.release_elsewhere(&req.name, req.owner, hold).await
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        self.lanes.hints.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let session = self.session(name).await?;
        let line = look_now(&session.client, &session.root.folder(name))
            .await
            .map_err(failed)?;
        session.snapshot(name, &line).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let session = self.lanes.session(Lane(0)).await?;
        let after = match from {
            None => String::new(),
            Some(Cursor(bytes)) => std::str::from_utf8(bytes)
                .ok()
                .and_then(|text| text.strip_prefix(CURSOR))
                .map(str::to_owned)
                .ok_or_else(|| {
                    DriverError::new(ErrorKind::Misuse, "that is no cursor of this driver")
                })?,
        };
        session.page(prefix, &after, limit.max(1)).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let session = self.session(name).await?;
        let folder = session.root.folder(name);
        for _ in 0..ATTEMPTS {
            let line = look_now(&session.client, &folder).await.map_err(failed)?;
            if line.is_empty() {
                return Ok(Broken::WasFree);
            }
            let taken = read(&session.client, &folder, line.inside())
                .await
                .map_err(failed)?;
            let holder = taken.iter().find(|taken| session.lives(name, taken));
            let token = holder.and_then(Taken::token);
            if only.is_some() && only != token {
                return Ok(if token.is_some() {
                    Broken::Changed { token }
                } else {
                    Broken::WasFree
                });
            }
            // Nothing that was not read goes: a seat that changed in between is read again.
            if !taken.is_empty() && remove_all(&session.client, &folder, &taken).await? {
                return Ok(Broken::Freed { token });
            }
        }
        Err(contended())
    }

    async fn close(&self) {
        let sessions = self.lanes.open_ones();
        let waiting = sessions.iter().map(|session| session.leave_all());
        drop(tokio::time::timeout(LEAVING, join_all(waiting)).await);
        self.lanes.close();
    }
}

impl Drop for ZkDriver {
    fn drop(&mut self) {
        self.lanes.close();
    }
}

impl Session {
    /// Whether the holds of a batch are there is known from watches. Those that have none get one; for the others one read is enough, because the
    /// server tells of what it has done before it answers.
    async fn still_there(&self, batch: &[Renew]) -> Result<()> {
        let mut asked = Vec::new();
        for entry in batch {
            let is = |mine: &Mine| {
                mine.hold == entry.hold && mine.own.is_none() && mine.held_until().is_some()
            };
            if let Some((mine, node)) = self
                .seats
                .find(&entry.name, is)
                .and_then(|mine| Some((mine.id, mine.node?)))
            {
                asked.push((mine, node, self.root.folder(&entry.name)));
            }
        }
        // No such node is ever made: what counts is that it is answered, and after what.
        let barrier = self.client.check_stat(&self.root.beside("renew"));
        let mut asking = stream::iter(asked)
            .map(|(id, node, folder)| async move {
                let path = format!("{folder}/{}", node.file);
                let found = self.client.check_and_watch_stat(&path).await;
                (id, node, found)
            })
            .buffered(AT_ONCE);
        while let Some((id, node, found)) = asking.next().await {
            match found {
                Ok((Some(stat), watcher)) if stat.ephemeral_owner == self.client.session_id().0 => {
                    self.watch(id, Of::Own, &node.file, watcher);
                }
                Ok(_) => {
                    self.seats.remove(id);
                }
                Err(error) => return Err(failed(error)),
            }
        }
        barrier.await.map_err(failed)?;
        // What the server told of before is heard before this goes on.
        tokio::task::yield_now().await;
        Ok(())
    }

    fn renew(&self, entry: &Renew, entered: Instant) -> Result<Renewed> {
        let is = |mine: &Mine| {
            mine.hold == entry.hold && mine.owner == entry.owner && mine.held_until().is_some()
        };
        let Some(mine) = self.seats.find(&entry.name, is) else {
            return Ok(Renewed::NotHeld);
        };
        let proven = self.rest(entered);
        if proven.is_zero() {
            return Err(DriverError::unavailable(
                "the session was not proven to live in time",
            ));
        }
        let now = self.clock.now();
        let end = self.seats.change(mine.id, |mine| {
            let end = mine.held_until().filter(|end| *end > now)?;
            let end = entry.lease.map_or(end, |lease| end.max(entered + lease));
            mine.phase = Phase::Held(end);
            Some(end)
        });
        Ok(match end.flatten() {
            Some(end) => Renewed::Until {
                valid_for: end.since(entered).min(proven),
            },
            None => Renewed::NotHeld,
        })
    }

    /// Gives back a seat of ours.
    async fn release(&self, mine: &Mine, keep: Option<Duration>) -> Result<Released> {
        let Some(end) = mine.held_until() else {
            let _gate = self.gate(&mine.name).await;
            return match self.seats.get(mine.id).map(|mine| mine.phase) {
                // Its turn to be settled: a request whose answer was lost, or a removal.
                Some(Phase::Asked(_) | Phase::Doomed(_)) => {
                    self.remove(mine).await.map_err(failed)?;
                    Ok(Released::NotHeld { by: None })
                }
                // Granted while this waited for the gate.
                Some(Phase::Held(_)) => Err(contended()),
                _ => Ok(Released::NotHeld { by: None }),
            };
        };
        let now = self.clock.now();
        if end <= now {
            return Ok(Released::NotHeld { by: None });
        }
        // Given up unanswered it is removed all the same, as a request on its way would.
        let mut undo = Undo::new(self, mine.id, keep.is_none());
        let answer = self.release_held(mine, keep, now).await;
        undo.armed = false;
        answer
    }

    async fn release_held(
        &self,
        mine: &Mine,
        keep: Option<Duration>,
        now: Instant,
    ) -> Result<Released> {
        let Some(node) = &mine.node else {
            return Err(DriverError::new(
                ErrorKind::Unavailable,
                "BUG: a hold has a node; please report it",
            ));
        };
        if keep.is_none()
            && mine.alone
            && mine.is_sequential()
            && let Some(version) = node.version
        {
            // Nobody came in through it, or the version is another one.
            let path = format!("{}/{}", self.root.folder(&mine.name), node.file);
            match self.client.delete(&path, Some(version)).await {
                Ok(()) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::Freed);
                }
                Err(Native::NoNode) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::NotHeld { by: None });
                }
                Err(Native::BadVersion) => {}
                Err(error) => {
                    if is_open(&error) {
                        self.doom(mine.id);
                    }
                    return Err(failed(error));
                }
            }
        }
        self.release_beside_others(mine, keep, now).await
    }

    /// The same where others may be inside beside it, or the name is to stay shut.
    async fn release_beside_others(
        &self,
        mine: &Mine,
        keep: Option<Duration>,
        now: Instant,
    ) -> Result<Released> {
        let (folder, Some(node)) = (self.root.folder(&mine.name), &mine.node) else {
            return Ok(Released::NotHeld { by: None });
        };
        for _ in 0..ATTEMPTS {
            let line = look(&self.client, &folder).await.map_err(failed)?;
            let taken = read(&self.client, &folder, line.of(node.number))
                .await
                .map_err(failed)?;
            let Some(own) = taken.iter().find(|taken| taken.seat.file == node.file) else {
                self.seats.remove(mine.id);
                return Ok(Released::NotHeld { by: None });
            };
            let others = || taken.iter().filter(|taken| taken.seat.file != node.file);
            let living = others()
                .filter(|taken| self.lives(&mine.name, taken))
                .count();
            let path = format!("{folder}/{}", node.file);
            let version = Some(own.stat.version);
            let done = match keep {
                Some(keep) => {
                    let data = mine.record(crate::commands::Use::Kept(keep)).encode();
                    self.client.set_data(&path, &data, version).await.map(drop)
                }
                None => self.client.delete(&path, version).await,
            };
            match (done, keep) {
                (Ok(()), None) => drop(self.seats.remove(mine.id)),
                (Ok(()), Some(keep)) => {
                    self.seats
                        .change(mine.id, |mine| mine.phase = Phase::Kept(now + keep));
                }
                (Err(Native::BadVersion), _) => continue,
                (Err(Native::NoNode), _) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::NotHeld { by: None });
                }
                (Err(error), keep) => {
                    if is_open(&error) && keep.is_none() {
                        self.doom(mine.id);
                    }
                    return Err(failed(error));
                }
            }
            if let Some(holds) = NonZeroU32::new(u32::try_from(living).unwrap_or(u32::MAX)) {
                return Ok(Released::StillHeld { holds });
            }
            let shut = others()
                .filter_map(|taken| self.shut(&mine.name, taken))
                .chain(keep)
                .max();
            return Ok(shut.map_or(Released::Freed, |rest| Released::Kept { rest }));
        }
        Err(contended())
    }

    /// What a seat that keeps a name shut has left.
    fn shut(&self, name: &LockName, taken: &Taken) -> Option<Duration> {
        let span = taken.kept()?;
        let of_ours = |mine: &Mine| {
            mine.node
                .as_ref()
                .is_some_and(|node| node.file == taken.seat.file)
        };
        let rest = match self.seats.find(name, of_ours).map(|mine| mine.phase) {
            Some(Phase::Kept(end)) => end.since(self.clock.now()),
            // Another client's: by the servers' clock, for people to read.
            _ => span.saturating_sub(self.since(taken.stat.mtime).unwrap_or_default()),
        };
        Some(rest.clamp(Duration::from_millis(1), span))
    }

    /// Gives back what another session of that owner holds: for the command line, and for a copy that another client was granted.
    async fn release_elsewhere(
        &self,
        name: &LockName,
        owner: Owner,
        hold: Option<HoldId>,
    ) -> Result<Released> {
        let folder = self.root.folder(name);
        for _ in 0..ATTEMPTS {
            let line = look_now(&self.client, &folder).await.map_err(failed)?;
            let taken = read(&self.client, &folder, line.inside())
                .await
                .map_err(failed)?;
            let (theirs, others): (Vec<_>, Vec<_>) = taken
                .into_iter()
                .filter(|taken| self.lives(name, taken) || taken.kept().is_some())
                .partition(|taken| {
                    let named = |record: &crate::commands::Record| {
                        record.owner == owner && hold.is_none_or(|hold| record.hold == hold)
                    };
                    taken.kept().is_none() && taken.record.as_ref().is_some_and(named)
                });
            let living: Vec<_> = others
                .iter()
                .filter(|taken| taken.kept().is_none())
                .collect();
            if theirs.is_empty() {
                let by = living.first().map(|taken| taken.holder());
                return Ok(Released::NotHeld { by });
            }
            if !remove_all(&self.client, &folder, &theirs).await? {
                continue;
            }
            let gone = |mine: &Mine| {
                mine.node
                    .as_ref()
                    .is_some_and(|node| theirs.iter().any(|taken| taken.seat.file == node.file))
            };
            for mine in self.seats.of(name).into_iter().filter(gone) {
                self.seats.remove(mine.id);
            }
            if let Some(holds) = NonZeroU32::new(u32::try_from(living.len()).unwrap_or(u32::MAX)) {
                return Ok(Released::StillHeld { holds });
            }
            let shut = others
                .iter()
                .filter_map(|taken| self.shut(name, taken))
                .max();
            return Ok(shut.map_or(Released::Freed, |rest| Released::Kept { rest }));
        }
        Err(contended())
    }

    async fn snapshot(&self, name: &LockName, line: &Line) -> Result<Snapshot> {
        let mut seen = Snapshot::free(name.clone());
        if line.is_empty() {
            return Ok(seen);
        }
        let folder = self.root.folder(name);
        let taken = read(&self.client, &folder, line.inside())
            .await
            .map_err(failed)?;
        let living: Vec<_> = taken
            .iter()
            .filter(|taken| self.lives(name, taken))
            .collect();
        seen.holds = u32::try_from(living.len()).unwrap_or(u32::MAX);
        let mut waiting = line.len() - 1;
        if let Some(first) = living.first() {
            let mut holder = first.holder();
            holder.token = taken.iter().find_map(Taken::token);
            holder.rest = living
                .iter()
                .filter_map(|taken| self.rest_of(name, taken))
                .max();
            seen.holders.push(holder);
            let began = taken.iter().map(|taken| taken.stat.ctime).min();
            seen.age = began.and_then(|began| self.since(began));
        } else {
            seen.shut = taken
                .iter()
                .filter_map(|taken| self.shut(name, taken))
                .max();
            if seen.shut.is_none() && taken.iter().any(|taken| !taken.is_held()) {
                // Reserved for the first in line, who is told.
                waiting += 1;
                seen.shut = Some(LONGEST_TURN);
            }
        }
        seen.waiters = u32::try_from(waiting).ok();
        Ok(seen)
    }

    /// What is left of a hold: of ours what was asked for, of another session's nobody knows.
    fn rest_of(&self, name: &LockName, taken: &Taken) -> Option<Duration> {
        let of_ours = |mine: &Mine| {
            mine.node
                .as_ref()
                .is_some_and(|node| node.file == taken.seat.file)
        };
        Some(
            self.seats
                .find(name, of_ours)?
                .held_until()?
                .since(self.clock.now()),
        )
    }

    /// Names in the order of their text; folders without seats are free names that the servers will clean up.
    async fn page(&self, prefix: &str, after: &str, limit: usize) -> Result<Page> {
        let synced = self.client.sync(self.root.path());
        let children = self.client.list_children(self.root.path());
        let (synced, children) = futures_util::join!(synced, children);
        let children = match synced.and(children) {
            Ok(children) => children,
            Err(Native::NoNode) => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut names: Vec<_> = children.iter().filter_map(|child| decode(child)).collect();
        names.retain(|name| name.as_str().starts_with(prefix) && name.as_str() > after);
        names.sort_unstable();
        let more = names.len() > limit;
        names.truncate(limit);
        let next = names
            .last()
            .filter(|_| more)
            .map(|name| Cursor(format!("{CURSOR}{name}").into_bytes()));
        let mut looking = stream::iter(names)
            .map(|name| async move {
                let line = look(&self.client, &self.root.folder(&name))
                    .await
                    .map_err(failed)?;
                self.snapshot(&name, &line).await
            })
            .buffered(AT_ONCE);
        let mut found = Vec::new();
        while let Some(seen) = looking.next().await {
            let seen = seen?;
            if seen.holds > 0 || seen.shut.is_some() {
                found.push(seen);
            }
        }
        Ok(Page::new(found, next))
    }

    /// Nobody waits any more.
    async fn leave_all(&self) {
        let waits = |mine: &Mine| matches!(mine.phase, Phase::Waits(_) | Phase::Asked(_));
        for mine in self.seats.all(waits) {
            let _gate = self.gate(&mine.name).await;
            if let Some(mine) = self.seats.get(mine.id).filter(waits)
                && self.remove(&mine).await.is_err()
            {
                self.doom(mine.id);
            }
        }
    }
}

/// Removes a seat when the release of it is dropped before it is answered.
struct Undo<'a> {
    session: &'a Session,
    seat: u64,
    armed: bool,
}

impl<'a> Undo<'a> {
    fn new(session: &'a Session, seat: u64, armed: bool) -> Self {
        Self {
            session,
            seat,
            armed,
        }
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.session.doom(self.seat);
        }
    }
}

/// What a cursor of this driver begins with, before the last name of the page.
const CURSOR: &str = "zk1:";
/// How often one call reads again because something changed in between.
const ATTEMPTS: usize = 8;
/// Requests of one call that are under way at a time.
const AT_ONCE: usize = 64;
/// How long closing waits for the servers to take waiters out; what is not out by then goes when they answer, or with the session.
const LEAVING: Duration = Duration::from_secs(1);
/// See [`Held`](dlock_core::Held): what a turn is kept at most.
const LONGEST_TURN: Duration = Duration::from_secs(1);
