//! The driver: what is decided in one statement, what is read first, and what the answers mean.

use crate::{
    commands::{self, RENEW_BATCH, WAITERS},
    config::{SqliteConfig, WakeBy},
    connection::{Connection, Place, Turn},
    error,
    hints::{Ear, Hints},
    machine::{Machine, Moment},
    record::{Record, Standing, Step, unsigned},
};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, DriverError, FencingToken,
    Grant, Held, Hint, Holds, Instant, Lane, LockName, Page, Release, Released, Renew, Renewed,
    Result, Snapshot, Ticket, Wake,
};
use futures_core::stream::BoxStream;
use std::{num::NonZeroU32, time::Duration};

/// Locks in a file of this machine.
#[derive(Debug)]
pub struct SqliteDriver {
    capabilities: Capabilities,
    connection: Connection,
    hints: Hints,
    machine: Machine,
}

impl SqliteDriver {
    /// Opens the file of a URL: see [`SqliteConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL or one of its settings cannot be read, or the file is somebody else's; `Unsupported` on a file system that
    /// several machines can see, or a newer schema; `Unavailable` when the file cannot be made, read or written.
    ///
    /// # Cancel safety
    /// Dropped, it may leave an empty lock file behind.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Opens a file with settings made in code. Inside a tokio runtime with timers and I/O.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        Self::open_on(config, Machine::here()?).await
    }

    async fn open_on(config: SqliteConfig, machine: Machine) -> Result<Self> {
        let wake = config.wake;
        let place = tokio::task::spawn_blocking(move || Place::prepare(&config));
        let place = place.await.map_err(|_| error::closed())??;
        let mut capabilities = Capabilities::new("sqlite", place.store());
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        capabilities.wake = match wake {
            WakeBy::Hints => Wake::Hints,
            WakeBy::Poll => Wake::Poll,
        };
        Ok(Self {
            capabilities,
            hints: Hints::new(&place.path, wake == WakeBy::Hints),
            connection: Connection::open(place).await?,
            machine,
        })
    }

    /// The time for one statement; a request that is past its give-up does nothing.
    fn in_time(&self, give_up: Instant) -> Result<Moment<'_>> {
        self.machine.moment_before(give_up).ok_or_else(error::late)
    }

    async fn standing(
        &self,
        turn: &mut Turn<'_>,
        name: &LockName,
        at: &Moment<'_>,
    ) -> Result<Standing> {
        let found = commands::look(turn.native(), name).await;
        match Standing::of(turn.heard(found)?, at) {
            Standing::Foreign(record) => Err(self.foreign(&record, at)),
            standing => Ok(standing),
        }
    }

    /// Whoever is inside, or what keeps it shut.
    async fn closed(
        &self,
        turn: &mut Turn<'_>,
        name: &LockName,
        at: &Moment<'_>,
    ) -> Result<Option<Record>> {
        Ok(match self.standing(turn, name, at).await? {
            Standing::Closed(record) => Some(record),
            _ => None,
        })
    }

    fn foreign(&self, record: &Record, at: &Moment<'_>) -> DriverError {
        error::other_kernel(&self.connection.place().path, &record.boot, at.boot)
    }

    /// Takes a name that is free, in one statement.
    async fn take(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        at: &Moment<'_>,
    ) -> Result<Option<Grant>> {
        let taken = commands::take(turn.native(), req, at).await;
        if !turn.heard(taken)? {
            return Ok(None);
        }
        self.sweep(turn, &req.name, at).await;
        let token = Some(FencingToken(unsigned(at.wall)));
        Ok(Some(Grant::new(token, NonZeroU32::MIN, req.lease.length())))
    }

    /// What to do about a name that could not be taken, or was to be looked at first.
    async fn consider(&self, turn: &mut Turn<'_>, req: &Acquire, at: &Moment<'_>) -> Result<Step> {
        match self.standing(turn, &req.name, at).await? {
            Standing::Closed(record) => record.refuse_or_enter(req, at),
            _ if req.join.is_some() => Ok(Step::Answer(Acquired::Gone)),
            Standing::Free(record) if record.token >= at.wall => Ok(record.begin_again(req, at)),
            _ => Ok(Step::Take),
        }
    }

    async fn swap(&self, turn: &mut Turn<'_>, name: &LockName, record: Record) -> Result<bool> {
        let swapped = commands::swap(turn.native(), name, record).await;
        turn.heard(swapped)
    }

    /// Lets the record say that somebody waits, where that is news; nothing when the name is free by then.
    async fn stand(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        (record, at): (&Record, &Moment<'_>),
    ) -> Result<Option<Held>> {
        let ear = req.line.map(|ticket| self.hints.listen(&req.name, ticket));
        let news = match ear {
            Some(Ear::New) => true,
            Some(Ear::Open) => record.waiters < at.after(WAITERS / 2),
            Some(Ear::Deaf) | None => false,
        };
        if news {
            let stands = commands::await_release(turn.native(), &req.name, at).await;
            if !turn.heard(stands)? {
                return Ok(None);
            }
        }
        let rest = at.until(record.until);
        let mut held = Held::default();
        held.by = record.holder(at);
        held.look_in = Some(match self.capabilities.wake {
            Wake::Poll => rest,
            _ if ear == Some(Ear::Deaf) => rest.min(SOON),
            _ => rest.min(LOOK),
        });
        Ok(Some(held))
    }

    /// Its ticket is used up. The next one first, so that a name that is still waited on keeps its watch.
    fn waits_no_more(&self, req: &Acquire) {
        if let Some(next) = req.next {
            self.hints.listen(&req.name, next);
        }
        if let Some(ticket) = req.line {
            self.hints.forget(&req.name, ticket);
        }
    }

    /// Forgets names that have long been free, now and then, behind the name that was taken or from the beginning.
    async fn sweep(&self, turn: &mut Turn<'_>, name: &LockName, at: &Moment<'_>) {
        if fastrand::u32(..SWEEP_EVERY) == 0 {
            let after = if fastrand::bool() { name.as_str() } else { "" };
            let purged = commands::purge(turn.native(), after.as_bytes(), at).await;
            if let Err(error) = turn.heard(purged) {
                tracing::debug!(%error, "sqlite: sweeping");
            }
        }
    }

    /// A hold that is one of several, or only to be proven.
    async fn renew_one(&self, entry: &Renew, give_up: Instant) -> Result<Renewed> {
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.in_time(give_up)?;
            let Some(mut record) = self.closed(&mut turn, &entry.name, &at).await? else {
                return Ok(Renewed::NotHeld);
            };
            let renewed = record.prolong(entry, &at);
            let done = renewed == Renewed::NotHeld || entry.lease.is_none();
            if done || self.swap(&mut turn, &entry.name, record).await? {
                return Ok(renewed);
            }
        }
        Err(error::contended())
    }
}

#[async_trait]
impl DistributedLock for SqliteDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// One file, one connection: all names share their fate.
    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let mut looks_first = req.look || req.join.is_some();
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            self.connection.place().still_there()?;
            if !looks_first {
                let at = self.in_time(req.give_up)?;
                if let Some(grant) = self.take(&mut turn, req, &at).await? {
                    self.waits_no_more(req);
                    return Ok(Acquired::Granted(grant));
                }
            }
            // What was to be joined may be over by the next try.
            looks_first = req.join.is_some();
            let at = self.in_time(req.give_up)?;
            let answer = match self.consider(&mut turn, req, &at).await? {
                Step::Take => None,
                Step::Answer(answer) => Some(answer),
                Step::Swap(record, grant) => {
                    let swapped = self.swap(&mut turn, &req.name, record).await?;
                    swapped.then_some(Acquired::Granted(grant))
                }
                Step::Wait(record) => {
                    let held = self.stand(&mut turn, req, (&record, &at)).await?;
                    held.map(Acquired::Held)
                }
            };
            if let Some(answer) = answer {
                if matches!(answer, Acquired::Granted(_)) {
                    self.waits_no_more(req);
                }
                return Ok(answer);
            }
        }
        Err(error::contended())
    }

    /// There is no line: a ticket is only a watch of ours.
    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.hints.forget(name, ticket);
        Ok(())
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        if self.connection.place().is_replaced() {
            // Whoever comes next opens what has the name now, and finds nobody inside.
            tracing::warn!(place = ?self.connection, "sqlite: the lock file was moved, deleted or replaced: the locks held in it are over");
            return Ok(batch.iter().map(|_| Ok(Renewed::NotHeld)).collect());
        }
        let mut answers = Vec::with_capacity(batch.len());
        for some in batch.chunks(RENEW_BATCH) {
            let prolonged: Vec<_> = some
                .iter()
                .filter_map(|entry| Some((entry, entry.lease?)))
                .collect();
            let mut turn = self.connection.turn().await?;
            let at = self.in_time(give_up)?;
            let ends = commands::renew(turn.native(), &prolonged, &at).await;
            let ends = turn.heard(ends)?;
            drop(turn);
            for entry in some {
                answers.push(match ends.get(entry.name.as_str().as_bytes()) {
                    Some(end) => Ok(Renewed::Until {
                        valid_for: at.until(*end),
                    }),
                    None => self.renew_one(entry, give_up).await,
                });
            }
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        // Where we wait ourselves the row says so, and asking for a row that does not would be in vain.
        let waited_for = self.hints.hears(&req.name);
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.machine.moment();
            if let (Holds::One(hold), None) = (req.holds, req.keep) {
                let which = (&req.name, &req.owner, hold);
                let waiters = waited_for || attempt > 0;
                let freed = commands::free(turn.native(), which, waiters, &at).await;
                if turn.heard(freed)? {
                    if waiters {
                        self.hints.wake(&req.name);
                    }
                    return Ok(Released::Freed);
                }
            }
            let Some(mut record) = self.closed(&mut turn, &req.name, &at).await? else {
                return Ok(Released::NotHeld { by: None });
            };
            let (by, waiters) = (record.holder(&at), record.waiters);
            let Some(released) = record.give_back(req, &at) else {
                return Ok(Released::NotHeld { by });
            };
            if self.swap(&mut turn, &req.name, record).await? {
                drop(turn);
                if matches!(released, Released::Freed) && waiters > at.now {
                    self.hints.wake(&req.name);
                }
                return Ok(released);
            }
        }
        Err(error::contended())
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        self.hints.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let mut turn = self.connection.turn().await?;
        let at = self.machine.moment();
        Ok(match self.closed(&mut turn, name, &at).await? {
            Some(record) => record.snapshot(name.clone(), &at),
            None => Snapshot::free(name.clone()),
        })
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = from.map(read_cursor).transpose()?.unwrap_or_default();
        let limit = limit.clamp(1, LONGEST_PAGE);
        let mut turn = self.connection.turn().await?;
        let at = self.machine.moment();
        let rows = commands::list(turn.native(), (prefix, after), limit).await;
        let rows = turn.heard(rows)?;
        drop(turn);
        let next = rows.last().filter(|_| rows.len() == limit);
        let next = next.map(|(name, _)| Cursor(name.clone()));
        let mut found = Vec::new();
        for (name, record) in rows {
            match Standing::of(Some(record), &at) {
                Standing::Closed(record) => {
                    let name = read_name(name).ok_or_else(error::garbled)?;
                    found.push(record.snapshot(name, &at));
                }
                Standing::Foreign(record) => return Err(self.foreign(&record, &at)),
                Standing::Free(_) | Standing::Unknown => {}
            }
        }
        Ok(Page::new(found, next))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.machine.moment();
            let Some(record) = self.closed(&mut turn, name, &at).await? else {
                return Ok(Broken::WasFree);
            };
            let token = record.owner.as_ref().map(|_| record.token());
            if only.is_some() && only != token {
                return Ok(Broken::Changed { token });
            }
            let broken = commands::break_lock(turn.native(), name, record.token, &at).await;
            if turn.heard(broken)? {
                self.hints.wake(name);
                return Ok(Broken::Freed { token });
            }
        }
        Err(error::contended())
    }

    /// A statement under way is answered; no more are taken.
    async fn close(&self) {
        self.hints.close();
        self.connection.close().await;
    }
}

/// Before a step is repeated that others were faster at: from half a millisecond doubling, so that one of them gets through.
async fn pause(attempt: u32) {
    if attempt > 1 {
        let most = SHORTEST_PAUSE * (1 << attempt);
        tokio::time::sleep(most.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

fn read_name(name: Vec<u8>) -> Option<LockName> {
    LockName::new(String::from_utf8(name).ok()?).ok()
}

/// A cursor is the last name that was seen.
fn read_cursor(cursor: &Cursor) -> Result<Vec<u8>> {
    match read_name(cursor.0.clone()) {
        Some(name) => Ok(name.as_str().into()),
        None => Err(error::bad_cursor()),
    }
}

/// Time is read before a statement waits for the file: its busy time-out, and the write.
const LATE: Duration = Duration::from_secs(1);
/// A lost wake-up costs at most this long.
const LOOK: Duration = Duration::from_secs(2);
/// Looking without being woken: what the core does on stores that only answer.
const SOON: Duration = Duration::from_millis(100);
/// How often a step is tried that reads before it writes.
const ATTEMPTS: u32 = 8;
const SHORTEST_PAUSE: Duration = Duration::from_micros(250);
/// Rows of one page: some 2 ms, in which only this client waits.
const LONGEST_PAGE: usize = 1_000;
/// Grants per sweep of a page of names.
const SWEEP_EVERY: u32 = 256;

#[cfg(test)]
mod tests {
    use super::SqliteDriver;
    use crate::{config::SqliteConfig, machine::Machine};
    use dlock_core::{
        Acquire, Acquired, Clock, DistributedLock, HoldId, Lease, LockName, Owner, Release,
    };
    use std::{path::Path, time::Duration};

    const SECOND: Duration = Duration::from_secs(1);
    const DAY: Duration = Duration::from_secs(86_400);

    async fn on(machine: Machine, folder: &Path) -> SqliteDriver {
        let config = SqliteConfig::new(folder.join("locks.db"));
        SqliteDriver::open_on(config, machine).await.unwrap()
    }

    fn acquire(name: &str, lease: Duration) -> Acquire {
        let (name, lease) = (LockName::new(name).unwrap(), Lease::fixed(lease).unwrap());
        let owner = Owner::from_seed(&fastrand::u64(..).to_string());
        let (hold, give_up) = (HoldId::from_bits(7), Clock::boot().now() + SECOND * 60);
        Acquire::new(name, owner, hold, lease, give_up)
    }

    async fn token(driver: &SqliteDriver, req: &Acquire) -> u64 {
        match driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant.token.unwrap().0,
            other => panic!("{other:?}"),
        }
    }

    async fn names(driver: &SqliteDriver) -> i64 {
        let mut turn = driver.connection.turn().await.unwrap();
        let names = sqlx::query_scalar("SELECT count(*) FROM locks");
        names.fetch_one(turn.native()).await.unwrap()
    }

    #[tokio::test]
    async fn names_long_free_are_forgotten_and_their_tokens_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let today = on(Machine::here().unwrap(), folder.path()).await;
        let free = acquire("free", SECOND);
        let last = token(&today, &free).await;
        let freed = Release::new(free.name.clone(), free.owner, free.hold);
        today.release(&freed).await.unwrap();
        token(&today, &acquire("lapsed", SECOND)).await;
        token(&today, &acquire("held", DAY * 9)).await;
        let tomorrow = Machine::here().unwrap().later(DAY + SECOND * 2);
        let tomorrow = on(tomorrow, folder.path()).await;
        // Now and then: after some hundred grants.
        let mut grants = 0;
        while names(&tomorrow).await > 1 + grants {
            token(&tomorrow, &acquire(&format!("used {grants}"), SECOND)).await;
            grants += 1;
            assert!(grants < 10_000, "it is swept");
        }
        assert!(token(&tomorrow, &acquire("free", SECOND)).await > last);
        let held = tomorrow.inspect(&LockName::new("held").unwrap()).await;
        assert_eq!(held.unwrap().holds, 1);
    }
}
