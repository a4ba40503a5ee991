//! Record store: what a [`RecordDriver`](super::RecordDriver) needs of a store that keeps one record per name.

use super::record::{DamagedRecord, Record, StoreTime};
use crate::{
    clock::Instant,
    driver::{Acquire, Capabilities, Finding, Release, Renew, Renewed, Result, Ticket, WakeUp},
    error::DriverError,
    name::LockName,
    owner::HoldId,
    token::FencingToken,
};
use async_trait::async_trait;
use futures_core::stream::BoxStream;
use std::{collections::HashMap, fmt::Debug, time::Duration};

/// A store that keeps one [`Record`] per name and can replace a record that is unchanged since it was read.
///
/// Every time in a record, and every not-after, is the store's own. [`write`](Self::write) is given its
/// not-after; a fast path makes one of its `give_up`, with a [`ServerClock`](super::ServerClock).
///
/// # Fast paths
/// [`take`](Self::take), [`free`](Self::free) and [`extend`](Self::extend) do nothing by default. A store
/// that has them decides in one step what [`Record`] would decide for the common case, and leaves every other
/// case alone. Each write also adds one to `version`; the condition is judged by the store's time at the
/// moment at which the record is changed, after any wait for it.
///
/// | step | when | what it leaves |
/// |---|---|---|
/// | `take` | `unavailable_until` is not in the future, the record is not damaged, its `holds` have no [claim](super::HoldSet::claim) and its token is below `i64::MAX` | `owner`; one hold that ends a lease from now, as `unavailable_until` does; `token`: the greater of the last one plus one and `wall`; `began`: now; `min_hold_until`: 0; `holder_info`: `req.info`; `waiters_until` as it was, later with `req.next_ticket` |
/// | `take` | there is no record | the same; `token` and `version`: `wall`, so that they exceed those of a record that was forgotten; `waiters_until`: 0, later with `req.next_ticket` |
/// | `free` | that owner's only hold is the one, and lives; `min_hold_until` is not in the future | no owner, no holds, no `holder_info`; `unavailable_until` and `min_hold_until`: 0; the rest as it was |
/// | `extend` | that owner's only hold is the one, and lives; the entry has a lease | the end of the hold and `unavailable_until`: the greater of the end and a lease from now; the rest as it was |
///
/// # Versions
/// A store with revisions of its own compares those: `read` shows the revision as the record's `version`, and `write`
/// ignores the `version` of its record. A revision must not come back for the same name; where a marker is left of
/// a deleted record, show an empty record with the marker's revision.
///
/// # Late writes
/// `write` may be executed long after it was sent: it lay in a connection, or in a server that was stopped. Ways to
/// make it harmless, the first that the store has:
///
/// - The write's condition compares the server's time with the not-after.
/// - The server stamps what it stores. The write then stores its not-after, the new record and the one that it
///   replaces. Every reader takes the new one if the stamp is not after the not-after, else the old one. The answer
///   is [`Written::Written`] once the server's time is known to be before the not-after, else the stamp decides.
/// - The write depends on something that ends by the server's clock, such as a session or a key with a lifetime; what
///   it may end later than asked for is part of [`Capabilities::late`].
///
/// # Tests
/// The suite loses and delays single requests, which it finds by a mark on the wire: see `Backend::request`
/// of the suite. Mark every `write` by [`Call::class`]: acquire, renewal, and release for any other. Mark `take` as
/// acquire, `free` as release and `extend` as renew. Reads have no mark.
///
/// # Secrets
/// [`RecordDriver`](super::RecordDriver) shows the store in its `Debug`. Options with a password need a
/// `Debug` by hand.
///
/// # Cancel safety
/// A dropped future gives up at most the connection it used; what it asked for may still happen until `not_after`.
#[async_trait]
pub trait RecordStore: Debug + Send + Sync + 'static {
    /// What the store can do. [`Capabilities::wake`] says whether [`waiters`](Self::waiters) are woken.
    fn capabilities(&self) -> &Capabilities;

    /// Reads the records of `names`, in their order, and the store's time in the same step or before it.
    ///
    /// - A record that is read was written completely; what cannot be read is [`Stored::Damaged`].
    /// - The time is not later than the state that the records show. With a later one a hold that was just
    ///   renewed would look over, and `NotHeld` needs no write that could fail. A SQL server may read its
    ///   clock after it fixed what a statement sees: use the time at which the statement arrived.
    /// - Every write that was answered before this call is seen.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn read(&self, names: &[LockName], call: Call) -> Result<Read>;

    /// Reads one record for an acquire, in less time than [`read`](Self::read) where that has a price: what
    /// it shows may be outdated, or undone later. The driver refuses by it, or writes where it shows no
    /// record. It writes over no record that it shows, because another record may get the version of one that
    /// was undone. Default: nothing, and the driver reads.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn glance(&self, _name: &LockName, _call: Call) -> Result<Option<Read>> {
        Ok(None)
    }

    /// Replaces records: one answer per entry, in order, each judged alone.
    ///
    /// - Compare and write are one atomic step: of two writes that expect the same record one is [`Written::Changed`].
    /// - Executed after [`Write::not_after`] by the store's time: [`Written::Late`], nothing changed.
    ///
    /// # Errors
    /// For the whole batch when the store did not answer; [`Written::Failed`] for one entry when only that one failed.
    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>>;

    /// Whether what was read or written is still the store that other clients use: asked after an acquire was
    /// decided, before it is answered.
    ///
    /// # Errors
    /// Where it was replaced, such as a file of which another one has the name.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Up to `limit` records in the order of their names, of names that begin with `prefix` and whose bytes
    /// come after `after`.
    ///
    /// - Free and damaged records are listed too.
    /// - A page should cost what it shows, not what the store has: the suite asks for four names a page beside
    ///   thousands. A store that can only list all keys may keep their names from the page that begins a walk,
    ///   whose `after` is empty, for those that follow.
    ///
    /// It has no give-up; the core limits its time.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed>;

    /// Deletes the records that [`Record::is_forgettable`] among the next names whose bytes come after
    /// `after`, a bounded number of them. Answers where these end; `None`: no name is behind them. Called in
    /// the background, once in [`grants_per_sweep`](Self::grants_per_sweep) grants. A store whose records have a
    /// lifetime of their own answers `None` at once: each write gives its record one that ends a day or more after
    /// `unavailable_until` and `token`, the later of the two.
    ///
    /// # Errors
    /// When the store did not answer. The driver goes on from `after` the next time.
    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Grants of a client per call of [`forget`](Self::forget), which should look at several times as many names.
    fn grants_per_sweep(&self) -> u32 {
        GRANTS_PER_SWEEP
    }

    /// Whether a step that failed like this did nothing because other clients were in its way: the driver
    /// repeats it after a pause.
    fn is_contention(&self, _error: &DriverError) -> bool {
        false
    }

    /// Removes the cause of an error of effect none where the store can, such as a table that is missing.
    /// Answers whether it did: the driver then repeats the step.
    async fn repair(&self, _error: &DriverError, _give_up: Instant) -> bool {
        false
    }

    /// As [`DistributedLock::diagnose`](crate::driver::DistributedLock::diagnose).
    ///
    /// # Errors
    /// When the store did not answer.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Fast path: takes a lock that is available in one step, and answers its token. `None`: nothing was
    /// done, and the driver reads, decides and writes. Called first for a request that is not likely to be
    /// refused; never with `req.join` or `req.floor`. With `req.next_ticket`, another task of the client waits: a store
    /// whose waiters mark the record does so here, for [`WAITERS_MARK`](super::WAITERS_MARK), or leaves the
    /// request alone.
    ///
    /// # Errors
    /// As [`write`](Self::write); past `req.give_up` nothing is done.
    async fn take(&self, _req: &Acquire) -> Result<Option<FencingToken>> {
        Ok(None)
    }

    /// Fast path: releases a lock whose only hold this is, if no minimum hold keeps it. Called only without
    /// `req.min_hold`, for the one hold of `req.holds`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    async fn free(&self, _req: &Release, _hold: HoldId) -> Result<Freed> {
        Ok(Freed::Undecided)
    }

    /// Fast path: renews holds that are alone in their records; one answer per entry. `None`: the driver
    /// reads, decides and writes that one.
    ///
    /// # Errors
    /// For the whole batch when the store did not answer; for one entry when only that one failed. Past
    /// `give_up` nothing is done.
    async fn extend(
        &self,
        batch: &[Renew],
        _give_up: Instant,
    ) -> Result<Vec<Option<Result<Renewed>>>> {
        Ok(batch.iter().map(|_| None).collect())
    }

    /// What wakes the waiters of this client; `None`: nothing, and they poll.
    fn waiters(&self) -> Option<&dyn Waiters> {
        None
    }

    /// Whether waiters mark the record, and a release that finds the mark calls [`notify`](Self::notify). Not
    /// where the store itself tells of releases.
    fn marks(&self) -> bool {
        true
    }

    /// Wakes the waiters of a name in every client. Called after a release, if the record is marked.
    /// A failure is not reported: waiters poll as well.
    async fn notify(&self, _name: &LockName) {}

    /// Gives the connections back; ends the wake-ups.
    async fn close(&self);
}

/// The waiters of one client, and what wakes them, such as [`Subscriptions`](super::Subscriptions).
#[async_trait]
pub trait Waiters: Send + Sync {
    /// The wake-ups: [`WakeUp::Free`] for a name that [`notify`](RecordStore::notify) was called for,
    /// [`WakeUp::Resync`] after a gap. Taken once; after that it is empty.
    fn stream(&self) -> BoxStream<'static, WakeUp>;

    /// Begins to listen for wake-ups of a name, for that ticket. Called before the record is read and marked,
    /// so that no release is missed. Answers whether wake-ups can be expected; where they cannot, the waiter
    /// polls. A dropped future leaves the ticket registered.
    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool;

    /// That ticket waits no more.
    fn forget(&self, name: &LockName, ticket: Ticket);
}

/// What a request may use of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// What the request is for.
    pub class: Class,
    /// Until then it may wait for a connection. About then the core drops the future.
    pub give_up: Instant,
}

/// What a request is for. A store with several connections keeps some for renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A renewal: it must not wait behind other requests.
    Renewal,
    /// An acquire: of these there may be many.
    Acquire,
    /// Any other request.
    Work,
}

/// What [`RecordStore::read`] answers.
#[derive(Clone, Debug)]
pub struct Read {
    /// The store's time.
    pub time: StoreTime,
    /// One entry per name asked for, in order.
    pub records: Vec<Stored>,
}

impl Read {
    /// What the rows that were found, in any order, say of `names`.
    pub fn of(
        time: StoreTime,
        names: &[LockName],
        rows: impl IntoIterator<Item = (Vec<u8>, Stored)>,
    ) -> Self {
        let mut found: HashMap<_, _> = rows.into_iter().collect();
        let mut take = |name: &LockName| found.remove(name.as_str().as_bytes());
        let records = names
            .iter()
            .map(|name| take(name).unwrap_or(Stored::Absent));
        Self {
            time,
            records: records.collect(),
        }
    }
}

/// What a store has of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// No record: never used, or deleted after a day of disuse.
    Absent,
    /// A record.
    Record(Record),
    /// Something that is no record of ours.
    Damaged(DamagedRecord),
}

impl Stored {
    /// The record, an empty one where there is none.
    ///
    /// # Errors
    /// Where the record is damaged.
    pub fn record(self) -> Result<Record> {
        match self {
            Self::Absent => Ok(Record::default()),
            Self::Record(record) => Ok(record),
            Self::Damaged(damaged) => Err(damaged.into()),
        }
    }
}

/// What a write may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// There is no record.
    Absent,
    /// The record has this version.
    Version(u64),
    /// What is there cannot be read: `break` replaces it. It carries no version, which may be what is
    /// damaged: where the store cannot parse a record, its condition for "damaged" has to hold for exactly
    /// the rows that [`RecordStore::read`] shows as [`Stored::Damaged`].
    Damaged,
}

impl Expected {
    /// That nothing has changed since this was read.
    #[must_use]
    pub fn of(stored: &Stored) -> Self {
        match stored {
            Stored::Absent => Self::Absent,
            Stored::Record(record) => Self::Version(record.version),
            Stored::Damaged(_) => Self::Damaged,
        }
    }
}

/// One record to be replaced.
#[derive(Clone, Debug)]
pub struct Write {
    /// Whose record.
    pub name: LockName,
    /// What must be there now.
    pub expected: Expected,
    /// What takes its place, with its new version.
    pub record: Record,
    /// The last moment, in the store's `now`, at which this may happen; [`u64::MAX`]: any.
    pub not_after: u64,
}

/// What became of a [`Write`].
#[derive(Debug)]
pub enum Written {
    /// The record is the new one.
    Written,
    /// It had another version: nothing was done.
    Changed,
    /// It came too late: nothing was done.
    Late,
    /// It failed by itself; the others of the batch did not.
    Failed(DriverError),
}

/// One step of a walk over the records.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The store's time.
    pub time: StoreTime,
    /// Names and their records, in the order of the names.
    pub records: Vec<(LockName, Stored)>,
    /// The last name that was looked at; `None`: the walk is at its end.
    pub next: Option<Vec<u8>>,
}

impl Listed {
    /// A page of at most `limit` rows, in the order of their names. A row whose name is none of dlock's is no lock.
    #[must_use]
    pub fn of(time: StoreTime, rows: Vec<(Vec<u8>, Stored)>, limit: usize) -> Self {
        let next = rows.last().filter(|_| rows.len() == limit);
        let next = next.map(|(name, _)| name.clone());
        let records = rows.into_iter().filter_map(|(name, stored)| {
            let name = LockName::new(String::from_utf8(name).ok()?).ok()?;
            Some((name, stored))
        });
        Self {
            time,
            records: records.collect(),
            next,
        }
    }
}

/// The answers of [`RecordStore::extend`] where these names were renewed, each with what is left.
#[must_use]
pub fn renewed(
    batch: &[Renew],
    rests: &HashMap<Vec<u8>, Duration>,
) -> Vec<Option<Result<Renewed>>> {
    let renewed = batch.iter().map(|entry| {
        let valid_for = *rests.get(entry.name.as_str().as_bytes())?;
        Some(Ok(Renewed::Until { valid_for }))
    });
    renewed.collect()
}

/// What [`RecordStore::free`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// Nothing was done: the driver reads, decides and writes.
    Undecided,
    /// The lock is free, and no client waits for it.
    Free,
    /// The lock is free, and clients may be waiting.
    WaitedFor,
}

/// Grants of a client per call of [`RecordStore::forget`], unless the store says otherwise.
const GRANTS_PER_SWEEP: u32 = 64;
