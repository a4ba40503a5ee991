//! The driver: what is decided in one statement, what is read first, and what the answers mean.

use crate::{
    commands::{self, RENEW_BATCH, Record, unsigned},
    config::{SqliteConfig, WakeBy},
    connection::{Connection, Place, Turn},
    error,
    hints::Hints,
    machine::{Machine, Moment},
};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, FencingToken, Grant, Held,
    Hint, HoldSet, Holds, Instant, Lane, LockName, Page, Release, Released, Renew, Renewed, Result,
    Snapshot, Ticket, Wake,
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

/// What an acquire does about a record that stands in its way.
enum Step {
    /// Nothing does.
    Take,
    /// It has been answered already, or cannot be.
    Answer(Acquired),
    /// Written if nobody was faster.
    Swap(Record, Grant),
    /// Somebody is inside, or it is shut.
    Wait(Record),
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
    fn in_time(&self, give_up: Instant) -> Result<Moment> {
        self.machine.moment_before(give_up).ok_or_else(error::late)
    }

    /// A row as this boot sees it: nothing where the name is free.
    fn closed(&self, record: Option<Record>, at: &Moment) -> Result<Option<Record>> {
        let Some(record) = record else {
            return Ok(None);
        };
        if record.boot == self.machine.boot() {
            Ok((record.until > at.now).then_some(record))
        } else if record.written < at.booted() {
            Ok(None) // its holders ended with their boot
        } else {
            let path = &self.connection.place().path;
            Err(error::other_kernel(path, &record.boot, self.machine.boot()))
        }
    }

    async fn look(&self, turn: &mut Turn<'_>, name: &LockName) -> Result<Option<Record>> {
        let found = commands::look(turn.native(), name).await;
        turn.heard(found)
    }

    async fn take(&self, turn: &mut Turn<'_>, req: &Acquire, at: &Moment) -> Result<bool> {
        let waiters = req.next.map_or(0, |_| at.after(WAITERS));
        let taken = commands::take(turn.native(), req, (self.machine.boot(), at, waiters)).await;
        turn.heard(taken)
    }

    async fn swap(&self, turn: &mut Turn<'_>, name: &LockName, record: Record) -> Result<bool> {
        let swapped = commands::swap(turn.native(), name, record).await;
        turn.heard(swapped)
    }

    /// What to do about the row that refused.
    fn consider(&self, req: &Acquire, found: Option<Record>, at: &Moment) -> Result<Step> {
        let last = found
            .as_ref()
            .map(|row| (row.token, row.version, row.waiters));
        let Some(mut record) = self.closed(found, at)? else {
            return Ok(match last {
                _ if req.join.is_some() => Step::Answer(Acquired::Gone),
                Some((token, version, waiters)) if token >= at.wall => {
                    self.behind(req, at, (token, version, waiters))
                }
                _ => Step::Take,
            });
        };
        let ours = record.owner.as_deref() == Some(&*commands::owner(&req.owner));
        if !ours || req.join.is_some_and(|token| token != record.token()) {
            return Ok(match req.join {
                Some(_) => Step::Answer(Acquired::Gone),
                None => Step::Wait(record),
            });
        }
        record.holds = record.holds.living(unsigned(at.now));
        let token = Some(record.token());
        if let Some(end) = record.holds.end_of(req.hold) {
            let rest = Duration::from_micros(end - unsigned(at.now));
            let grant = Grant::new(token, counted(&record.holds)?, rest);
            return Ok(Step::Answer(Acquired::Granted(grant)));
        }
        let end = at.after(req.lease.length());
        if !record.holds.insert(req.hold, unsigned(end)) {
            return Err(error::full());
        }
        record.until = record.until.max(end);
        record.written = at.wall;
        if req.next.is_some() {
            record.waiters = record.waiters.max(at.after(WAITERS));
        }
        let grant = Grant::new(token, counted(&record.holds)?, req.lease.length());
        Ok(Step::Swap(record, grant))
    }

    /// A free name whose last token is not behind the wall clock, which was set back: the next token goes on from the last.
    fn behind(&self, req: &Acquire, at: &Moment, last: (i64, i64, i64)) -> Step {
        let end = at.after(req.lease.length());
        let record = Record {
            owner: Some(commands::owner(&req.owner)),
            token: last.0.saturating_add(1),
            holds: HoldSet::one(req.hold, unsigned(end)),
            until: end,
            keep: 0,
            boot: self.machine.boot().to_owned(),
            written: at.wall,
            since: at.now,
            note: req.note.to_string(),
            waiters: last.2.min(at.after(WAITERS)),
            version: last.1,
        };
        let grant = Grant::new(Some(record.token()), NonZeroU32::MIN, req.lease.length());
        Step::Swap(record, grant)
    }

    /// Lets the record say that somebody waits, unless it does or nobody could be woken; whether it is still the one that refused.
    async fn stand(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        (record, at): (&Record, &Moment),
    ) -> Result<Option<Held>> {
        let woken = req
            .line
            .is_some_and(|ticket| self.hints.listen(&req.name, ticket));
        if woken && record.waiters < at.after(WAITERS / 2) {
            let until = at.after(WAITERS);
            let stands =
                commands::await_release(turn.native(), &req.name, (record.version, until), at)
                    .await;
            if !turn.heard(stands)? {
                return Ok(None);
            }
        }
        let rest = at.until(record.until);
        let mut held = Held::default();
        held.by = record.holder(at);
        held.look_in = Some(match self.capabilities.wake {
            Wake::Poll => rest,
            _ if req.line.is_some() && !woken => rest.min(SOON),
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

    fn granted(&self, req: &Acquire, grant: Grant) -> Acquired {
        self.waits_no_more(req);
        Acquired::Granted(grant)
    }

    /// Forgets names that have long been free, now and then, behind the name that was taken or from the beginning.
    async fn sweep(&self, turn: &mut Turn<'_>, name: &LockName, at: &Moment) {
        if fastrand::u32(..SWEEP_EVERY) == 0 {
            let after = if fastrand::bool() { name.as_str() } else { "" };
            let purged =
                commands::purge(turn.native(), after.as_bytes(), (self.machine.boot(), at)).await;
            if let Err(error) = turn.heard(purged) {
                tracing::debug!(%error, "sqlite: sweeping");
            }
        }
    }

    /// One row, for steps that read first.
    async fn renew_one(&self, entry: &Renew, give_up: Instant) -> Result<Renewed> {
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.in_time(give_up)?;
            let found = self.look(&mut turn, &entry.name).await?;
            let Some(mut record) = self.closed(found, &at)? else {
                return Ok(Renewed::NotHeld);
            };
            record.holds = record.holds.living(unsigned(at.now));
            let end = unsigned(at.after(entry.lease.unwrap_or_default()));
            let ours = record.owner.as_deref() == Some(&*commands::owner(&entry.owner));
            if !ours || !record.holds.prolong(entry.hold, end) {
                return Ok(Renewed::NotHeld);
            }
            let ends = record.holds.end_of(entry.hold).unwrap_or(end);
            let renewed = Renewed::Until {
                valid_for: Duration::from_micros(ends - unsigned(at.now)),
            };
            record.until = latest(&record.holds);
            record.written = at.wall;
            if entry.lease.is_none() || self.swap(&mut turn, &entry.name, record).await? {
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
        let mut reads_first = req.look || req.join.is_some();
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            self.connection.place().still_there()?;
            let at = self.in_time(req.give_up)?;
            if !reads_first && self.take(&mut turn, req, &at).await? {
                self.sweep(&mut turn, &req.name, &at).await;
                let token = Some(FencingToken(unsigned(at.wall)));
                let grant = Grant::new(token, NonZeroU32::MIN, req.lease.length());
                return Ok(self.granted(req, grant));
            }
            let at = self.in_time(req.give_up)?;
            let found = self.look(&mut turn, &req.name).await?;
            match self.consider(req, found, &at)? {
                Step::Take => reads_first = false,
                Step::Answer(Acquired::Granted(grant)) => return Ok(self.granted(req, grant)),
                Step::Answer(answer) => return Ok(answer),
                Step::Swap(record, grant) => {
                    if self.swap(&mut turn, &req.name, record).await? {
                        return Ok(self.granted(req, grant));
                    }
                }
                Step::Wait(record) => {
                    if let Some(held) = self.stand(&mut turn, req, (&record, &at)).await? {
                        return Ok(Acquired::Held(held));
                    }
                }
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
        self.connection.place().still_there()?;
        let mut answers = Vec::with_capacity(batch.len());
        for some in batch.chunks(RENEW_BATCH) {
            let prolonged: Vec<_> = some
                .iter()
                .filter_map(|entry| Some((entry, entry.lease?)))
                .collect();
            let mut turn = self.connection.turn().await?;
            let at = self.in_time(give_up)?;
            let ends = commands::renew(turn.native(), &prolonged, (self.machine.boot(), &at)).await;
            let ends = turn.heard(ends)?;
            drop(turn);
            for entry in some {
                answers.push(match ends.get(entry.name.as_str().as_bytes()) {
                    Some(end) => Ok(Renewed::Until {
                        valid_for: at.until(*end),
                    }),
                    // Not there, or one of several, or only to be proven.
                    None => self.renew_one(entry, give_up).await,
                });
            }
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.machine.moment();
            if let (Holds::One(hold), None, 0) = (req.holds, req.keep, attempt) {
                let which = (&req.name, &req.owner, hold);
                let freed = commands::free(turn.native(), which, (self.machine.boot(), &at)).await;
                if turn.heard(freed)? {
                    return Ok(Released::Freed);
                }
            }
            let found = self.look(&mut turn, &req.name).await?;
            let Some(mut record) = self.closed(found, &at)? else {
                return Ok(Released::NotHeld { by: None });
            };
            let (waiters, before) = (record.waiters, record.holder(&at));
            let Some(released) = give_back(&mut record, req, &at) else {
                return Ok(Released::NotHeld { by: before });
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
        let found = self.look(&mut turn, name).await?;
        Ok(match self.closed(found, &at)? {
            Some(record) => record.snapshot(name.clone(), &at),
            None => Snapshot::free(name.clone()),
        })
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = from.map(read_cursor).transpose()?.unwrap_or_default();
        let limit = limit.clamp(1, LONGEST_PAGE);
        let mut turn = self.connection.turn().await?;
        let at = self.machine.moment();
        let rows = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = commands::list(turn.native(), (prefix, &after), rows).await;
        let rows = turn.heard(rows)?;
        drop(turn);
        let full = rows.len() == limit;
        let next = rows.last().filter(|_| full);
        let next = next.map(|(name, _)| Cursor(name.clone()));
        let mut found = Vec::new();
        for (name, record) in rows {
            if let Some(record) = self.closed(Some(record), &at)? {
                let name = read_name(name).ok_or_else(error::garbled)?;
                found.push(record.snapshot(name, &at));
            }
        }
        Ok(Page::new(found, next))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        for attempt in 0..ATTEMPTS {
            pause(attempt).await;
            let mut turn = self.connection.turn().await?;
            let at = self.machine.moment();
            let found = self.look(&mut turn, name).await?;
            let Some(record) = self.closed(found, &at)? else {
                return Ok(Broken::WasFree);
            };
            let token = record.owner.as_ref().map(|_| record.token());
            if only.is_some() && only != token {
                return Ok(Broken::Changed { token });
            }
            let which = (self.machine.boot(), &at);
            let broken = commands::break_lock(turn.native(), name, record.token, which).await;
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

/// The record without what is released, and what that makes of it; `None`: that is not there.
fn give_back(record: &mut Record, req: &Release, at: &Moment) -> Option<Released> {
    if record.owner.as_deref() != Some(&*commands::owner(&req.owner)) {
        return None;
    }
    record.holds = std::mem::take(&mut record.holds).living(unsigned(at.now));
    match req.holds {
        Holds::One(hold) if !record.holds.remove(hold) => return None,
        Holds::One(_) => {}
        Holds::All => record.holds = HoldSet::default(),
    }
    record.written = at.wall;
    if let Some(keep) = req.keep {
        record.keep = record.keep.max(at.after(keep));
    }
    if let Some(holds) = NonZeroU32::new(record.holds.len()) {
        record.until = latest(&record.holds);
        return Some(Released::StillHeld { holds });
    }
    record.owner = None;
    record.note = String::new();
    if record.keep > at.now {
        record.until = record.keep;
        let rest = at.until(record.keep);
        return Some(Released::Kept { rest });
    }
    record.until = 0;
    Some(Released::Freed)
}

/// Before a step is repeated that others were faster at: from half a millisecond doubling, so that one of them gets through.
async fn pause(attempt: u32) {
    if attempt > 1 {
        let most = SHORTEST_PAUSE * (1 << attempt);
        tokio::time::sleep(most.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

fn latest(holds: &HoldSet) -> i64 {
    i64::try_from(holds.latest().unwrap_or(0)).unwrap_or(i64::MAX)
}

fn counted(holds: &HoldSet) -> Result<NonZeroU32> {
    NonZeroU32::new(holds.len()).ok_or_else(error::garbled)
}

fn read_name(name: Vec<u8>) -> Option<LockName> {
    LockName::new(String::from_utf8(name).ok()?).ok()
}

/// A cursor is the last name that was seen.
fn read_cursor(cursor: &Cursor) -> Result<Vec<u8>> {
    match read_name(cursor.0.clone()) {
        Some(_) => Ok(cursor.0.clone()),
        None => Err(error::bad_cursor()),
    }
}

/// Time is read before a statement waits for the file: its busy time-out, and the write.
const LATE: Duration = Duration::from_secs(1);
/// A lost wake-up costs at most this long.
const LOOK: Duration = Duration::from_secs(2);
/// Looking without being woken: what the core does on stores that only answer.
const SOON: Duration = Duration::from_millis(100);
/// How long a record says that somebody waits: several looks, and a release that touches a file for nobody costs a microsecond.
const WAITERS: Duration = Duration::from_secs(10);
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
        Acquire, Acquired, Clock, DistributedLock, ErrorKind, HoldId, Lease, LockName, Owner,
        Release, Released,
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
        let names = names.fetch_one(turn.native()).await;
        turn.heard(names).unwrap()
    }

    #[tokio::test]
    async fn a_record_of_an_earlier_boot_is_free_and_its_token_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let before = on(Machine::another("before"), folder.path()).await;
        let req = acquire("a", SECOND * 60);
        let first = token(&before, &req).await;
        // Another boot, which began when that was long written: its wall clock has gone on, its boot clock has not.
        let after = Machine::another("after").booted_in(DAY);
        let after = on(after, folder.path()).await;
        assert!(after.inspect(&req.name).await.unwrap().holders.is_empty());
        let again = acquire("a", SECOND);
        assert!(token(&after, &again).await > first);
        let hold = Release::new(req.name.clone(), req.owner, req.hold);
        let released = after.release(&hold).await.unwrap();
        assert!(matches!(released, Released::NotHeld { by: Some(_) }));
    }

    #[tokio::test]
    async fn a_younger_record_of_another_boot_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = on(Machine::another("theirs"), folder.path()).await;
        let req = acquire("a", SECOND);
        let _ = token(&theirs, &req).await;
        let ours = on(Machine::another("ours"), folder.path()).await;
        tokio::time::sleep(SECOND + SECOND / 10).await; // past its end by any clock
        let mut looking = acquire("a", SECOND);
        for look in [false, true] {
            looking.look = look;
            let error = ours.acquire(&looking).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            let words = error.to_string();
            assert!(
                words.contains("theirs") && words.contains("ours"),
                "{words}"
            );
        }
        let release = Release::new(req.name.clone(), looking.owner, looking.hold);
        ours.release(&release).await.unwrap_err();
        ours.break_lock(&req.name, None).await.unwrap_err();
        ours.inspect(&req.name).await.unwrap_err();
        ours.list("", None, 10).await.unwrap_err();
        // The other kernel sees its own record, now over.
        let theirs = theirs.inspect(&req.name).await.unwrap();
        assert!(theirs.holders.is_empty());
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
