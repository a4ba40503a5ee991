//! Record driver: the driver contract over any [`RecordStore`].
//!
//! A request reads the record, lets [`Record`] decide, and writes the record if it is unchanged. A client
//! that lost the race reads again after a contention backoff. Waiters poll, or are woken where the store can:
//! a waiter marks the record, a release that finds the mark notifies.

use super::{
    backoff::Backoff,
    batch::again,
    in_runtime::in_runtime,
    record::{Decision, Record, StoreTime},
    record_store::{Call, Class, Expected, Freed, Read, RecordStore, Stored, Write, Written},
    subscriptions::hash_of,
    sweep::Sweeps,
};
use crate::{
    clock::{Clock, Instant},
    driver::{
        Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, Finding, Grant, Holds,
        Lane, Page, Release, Released, Renew, Renewed, Result, Snapshot, Ticket, Wake, WakeUp,
    },
    error::{DriverError, Effect, ErrorKind, RetryClass},
    name::LockName,
    owner::Mode,
    token::FencingToken,
};
use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use std::{
    fmt::Debug,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::Mutex};
use tracing::Instrument as _;

/// A driver over a store that keeps one record per name.
///
/// Its requests run in tasks of the runtime in which it was made. A caller that is kept without being polled, as by a
/// `select!` that went elsewhere, so keeps no connection and no gate from the other requests of the client.
#[derive(Debug)]
pub struct RecordDriver<S> {
    requests: Arc<Requests<S>>,
    runtime: Handle,
}

/// What the requests of a driver share.
#[derive(Debug)]
struct Requests<S> {
    store: Arc<S>,
    clock: Clock,
    sweeps: Sweeps,
    repeats: AtomicU64,
    /// A request that lost a race for a record repeats its step while it has the gate of the name, so that requests of this client
    /// do not lose one race after the other to each other: many of them share one name.
    gates: [Mutex<()>; GATES],
}

impl<S: RecordStore> RecordDriver<S> {
    /// A driver over `store`, by the machine's clock.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self {
            requests: Arc::new(Requests {
                store: Arc::new(store),
                clock: Clock::boot(),
                sweeps: Sweeps::new(),
                repeats: AtomicU64::new(0),
                gates: std::array::from_fn(|_| Mutex::default()),
            }),
            runtime: Handle::current(),
        }
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.requests.store
    }

    /// How many attempts were repeated because another client was faster, or because of what the store said of an error
    /// ([`is_contention`](RecordStore::is_contention), [`repair`](RecordStore::repair)).
    pub fn repeats(&self) -> u64 {
        self.requests.repeats.load(Ordering::Relaxed)
    }

    /// Runs a request in a task; where the client's runtime had ended before, in place.
    async fn run<T: Send + 'static, F>(&self, request: impl Fn(Arc<Requests<S>>) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let begun = Arc::new(AtomicBool::new(false));
        let running = {
            let (begins, running) = (Arc::clone(&begun), request(Arc::clone(&self.requests)));
            let running = async move {
                begins.store(true, Ordering::Relaxed);
                running.await
            };
            in_runtime(&self.runtime, running.in_current_span())
        };
        match running.await {
            Some(answer) => answer,
            None if begun.load(Ordering::Relaxed) => Err(DriverError::unanswered(
                "the request did not come to its end: the runtime of the client ended, or it panicked",
            )),
            None => Box::pin(request(Arc::clone(&self.requests))).await,
        }
    }
}

impl<S: RecordStore> Requests<S> {
    fn gate(&self, name: &LockName) -> &Mutex<()> {
        let hash = hash_of(name.as_str());
        &self.gates[usize::try_from(hash % GATES as u64).unwrap_or(0)]
    }

    /// The outcome of an attempt, repeated while it changes nothing (`None`, or contention) and there is time.
    async fn settled<T, F>(
        &self,
        name: &LockName,
        give_up: Instant,
        attempt: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>> + Send,
    {
        let mut backoff = Backoff::new(SHORTEST_PAUSE, LONGEST_PAUSE);
        let mut gate = None;
        loop {
            let began = self.clock.now();
            let (error, is_locked) = match attempt().await {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => (contended(), false),
                Err(error) if self.is_repeatable(&error, give_up).await => (error, true),
                Err(error) => return Err(error),
            };
            self.repeats.fetch_add(1, Ordering::Relaxed);
            let now = self.clock.now();
            if now >= give_up {
                return Err(error);
            }
            if is_locked && now.since(began) >= A_WAIT {
                // For what others have locked: the names that share its gate must not wait with it.
                gate = None;
                tokio::time::sleep(backoff.pause()).await;
                continue;
            }
            match gate {
                None => tokio::select! {
                    biased;
                    held = self.gate(name).lock() => gate = Some(held),
                    // The request that has it may wait for a store that does not answer.
                    () = self.clock.sleep_until(give_up.min(now + AT_THE_GATE)) => {}
                },
                Some(_) => tokio::time::sleep(backoff.pause()).await,
            }
        }
    }

    async fn is_repeatable(&self, error: &DriverError, give_up: Instant) -> bool {
        self.store.is_contention(error) || self.store.repair(error, give_up).await
    }

    /// A step of a renewal, repeated once if the store removed what it failed of. Under contention the core
    /// repeats it: a batch waits for none of its entries.
    async fn repaired<T, F>(
        &self,
        give_up: Instant,
        step: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
    {
        match step().await {
            Err(error) if self.store.repair(&error, give_up).await => {
                self.repeats.fetch_add(1, Ordering::Relaxed);
                step().await
            }
            done => done,
        }
    }

    /// One attempt: reads, decides and writes. `None`: another client was faster, or what the decision relied
    /// on is over.
    async fn attempt<A>(
        &self,
        name: &LockName,
        call: Call,
        decide: impl Fn(Stored, StoreTime) -> Result<Decision<A>> + Send,
    ) -> Result<Option<A>> {
        let read = self.store.read(std::slice::from_ref(name), call).await;
        let read = read.map_err(|error| error.with_effect(Effect::None))?;
        self.attempt_on(read, name, call, decide).await
    }

    /// The rest of an attempt, after its read.
    async fn attempt_on<A>(
        &self,
        read: Read,
        name: &LockName,
        call: Call,
        decide: impl Fn(Stored, StoreTime) -> Result<Decision<A>> + Send,
    ) -> Result<Option<A>> {
        let not_after = not_after(call, read.time, self.clock.now())?;
        let stored = one(read.records)?;
        let expected = Expected::of(&stored);
        let decision = decide(stored, read.time)?;
        let Some(record) = decision.write else {
            return Ok(Some(decision.answer));
        };
        let not_after = not_after.min(decision.not_after);
        let write = replacing(name, expected, record, read.time, not_after);
        let written = self.store.write(std::slice::from_ref(&write), call).await?;
        match one(written)? {
            Written::Written => Ok(Some(decision.answer)),
            Written::Changed | Written::Late => Ok(None),
            Written::Failed(error) => Err(error),
        }
    }

    /// The ticket of a granted request is used up; the next one first, so that a name that is still waited
    /// for keeps its wake-ups.
    async fn waits_no_more(&self, req: &Acquire) {
        if let Some(next) = req.next_ticket {
            self.listen(&req.name, next).await;
        }
        if let (Some(waiters), Some(ticket)) = (self.store.waiters(), req.ticket) {
            waiters.forget(&req.name, ticket);
        }
    }

    async fn serve_acquire(self: Arc<Self>, req: Acquire) -> Result<Acquired> {
        let acquired = self
            .settled(&req.name, req.give_up, || self.try_acquire(&req))
            .await?;
        if matches!(acquired, Acquired::Granted(_)) {
            self.waits_no_more(&req).await;
            self.sweeps.granted(&self.store, &req.name);
        }
        Ok(acquired)
    }

    async fn try_acquire(&self, req: &Acquire) -> Result<Option<Acquired>> {
        let likely_refused = req.retry || !is_plain(req);
        if !likely_refused && let Some(token) = self.store.take(req).await? {
            return Ok(Some(granted(token, req)));
        }
        // Boxed, to keep the future of a request that is granted at once small.
        Box::pin(self.decide_acquire(req)).await
    }

    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        match self.store.waiters() {
            Some(waiters) => waiters.listen(name, ticket).await,
            None => false,
        }
    }

    fn wakes(&self) -> bool {
        self.store.capabilities().wake != Wake::Poll
    }

    /// Acquires by reading, deciding and writing.
    async fn decide_acquire(&self, req: &Acquire) -> Result<Option<Acquired>> {
        let wakes = self.wakes();
        let listens = match req.ticket {
            Some(ticket) if wakes => self.listen(&req.name, ticket).await,
            _ => false,
        };
        let call = Call {
            class: Class::Acquire,
            give_up: req.give_up,
        };
        let marks = wakes && self.store.marks();
        let decide = |stored: Stored, time: StoreTime| {
            let record = stored.record()?;
            let mut decision = record.acquire(req, time)?;
            let waits = match decision.answer {
                Acquired::Held(_) => marks && listens,
                Acquired::Granted(_) => marks && req.next_ticket.is_some(),
                Acquired::Gone => false,
            };
            if waits {
                mark(&mut decision, &record, time);
            }
            if let Acquired::Held(_) = decision.answer {
                let attempt = req.give_up.since(self.clock.now());
                let claimed = decision
                    .write
                    .as_ref()
                    .unwrap_or(&record)
                    .claimed(req, time, attempt);
                decision.write = claimed.or(decision.write);
            }
            Ok(decision)
        };
        let acquired = self.glance_or_attempt(req, call, decide).await?;
        let effect = match acquired {
            Some(Acquired::Granted(_)) => Effect::Unknown,
            _ => Effect::None,
        };
        let checked = self.store.check();
        checked.map_err(|error| error.with_effect(effect))?;
        Ok(match acquired {
            Some(Acquired::Held(mut held)) if wakes => {
                let unheard = req.ticket.is_some() && !listens;
                let longest = if unheard { POLL_UNHEARD } else { LONGEST_POLL };
                held.poll_in = held.poll_in.map(|rest| rest.min(longest));
                Some(Acquired::Held(held))
            }
            acquired => acquired,
        })
    }

    /// Uses a cheap read first, if the store has one. What that shows may be undone later, and a version with
    /// it, so no record is written over one that it shows: it refuses, or the store itself decides by
    /// [`RecordStore::take`], or a record is made where there is none.
    async fn glance_or_attempt(
        &self,
        req: &Acquire,
        call: Call,
        decide: impl Fn(Stored, StoreTime) -> Result<Decision<Acquired>> + Send + Sync,
    ) -> Result<Option<Acquired>> {
        let name = &req.name;
        let glance = self.store.glance(name, call).await;
        if let Some(read) = glance.map_err(|error| error.with_effect(Effect::None))? {
            if self.clock.now() >= call.give_up {
                return Err(late());
            }
            if req.join.is_none() && matches!(read.records[..], [Stored::Absent]) {
                return self.attempt_on(read, name, call, decide).await;
            }
            match decide(one(read.records)?, read.time) {
                Ok(Decision {
                    write: None,
                    answer: Acquired::Held(held),
                    ..
                }) => return Ok(Some(Acquired::Held(held))),
                Ok(_) if is_plain(req) => {
                    if let Some(token) = self.store.take(req).await? {
                        return Ok(Some(granted(token, req)));
                    }
                }
                _ => {}
            }
        }
        self.attempt(name, call, decide).await
    }

    async fn serve_renew(
        self: Arc<Self>,
        batch: Vec<Renew>,
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let extended = self.repaired(give_up, || self.store.extend(&batch, give_up));
        let extended = extended.await?;
        let rest: Vec<_> = batch
            .iter()
            .zip(&extended)
            .filter(|(_, extended)| extended.is_none())
            .map(|(entry, _)| entry.clone())
            .collect();
        let decided = self.renew_all(&rest, give_up).await;
        // What was extended is told, whatever became of the rest.
        let decided = match decided {
            Err(error) if rest.len() == batch.len() => return Err(error),
            Err(error) => rest.iter().map(|_| Err(again(&error))).collect(),
            Ok(decided) => decided,
        };
        let mut decided = decided.into_iter();
        let answers = extended.into_iter().map(|extended| match extended {
            Some(renewed) => renewed,
            None => one(decided.next().into_iter().collect()).and_then(|renewed| renewed),
        });
        Ok(answers.collect())
    }

    /// A batch of renewals in two steps; entries that lost a race go on one by one.
    async fn renew_all(&self, batch: &[Renew], give_up: Instant) -> Result<Vec<Result<Renewed>>> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<_> = batch.iter().map(|entry| entry.name.clone()).collect();
        let call = Call {
            class: Class::Renewal,
            give_up,
        };
        let read = self.repaired(give_up, || self.store.read(&names, call));
        let read = read.await?;
        let not_after = not_after(call, read.time, self.clock.now())?;
        let mut answers = Vec::with_capacity(batch.len());
        let (mut writes, mut written_for) = (Vec::new(), Vec::new());
        for (at, (entry, stored)) in batch.iter().zip(read.records).enumerate() {
            let expected = Expected::of(&stored);
            answers.push(stored.record().map(|record| {
                let decision = record.renew(entry, read.time);
                if let Some(record) = decision.write {
                    let not_after = not_after.min(decision.not_after);
                    writes.push(replacing(
                        &entry.name,
                        expected,
                        record,
                        read.time,
                        not_after,
                    ));
                    written_for.push(at);
                }
                decision.answer
            }));
        }
        if writes.is_empty() {
            return Ok(answers);
        }
        let mut written = match self.store.write(&writes, call).await {
            Ok(written) => written.into_iter(),
            Err(error) if writes.len() == batch.len() => return Err(error),
            // What needed no write is told.
            Err(error) => {
                for at in written_for {
                    answers[at] = Err(again(&error));
                }
                return Ok(answers);
            }
        };
        for at in written_for {
            match one(written.next().into_iter().collect()) {
                Ok(Written::Written) => {}
                Ok(Written::Changed | Written::Late) => {
                    let entry = &batch[at];
                    let decide = |stored: Stored, time: StoreTime| -> Result<_> {
                        Ok(stored.record()?.renew(entry, time))
                    };
                    let renewed = self.settled(&entry.name, give_up, || {
                        self.attempt(&entry.name, call, decide)
                    });
                    answers[at] = renewed.await;
                }
                Ok(Written::Failed(error)) | Err(error) => answers[at] = Err(error),
            }
        }
        Ok(answers)
    }

    /// What a request without a give-up of its own may use.
    fn default_call(&self) -> Call {
        Call {
            class: Class::Work,
            give_up: self.clock.now() + PATIENCE,
        }
    }

    async fn serve_release(self: Arc<Self>, req: Release) -> Result<Released> {
        let call = self.default_call();
        self.settled(&req.name, call.give_up, || self.try_release(&req, call))
            .await
    }

    async fn try_release(&self, req: &Release, call: Call) -> Result<Option<Released>> {
        let freed = match (req.holds, req.min_hold) {
            (Holds::One(hold), None) => self.store.free(req, hold).await?,
            _ => Freed::Undecided,
        };
        match freed {
            Freed::Free => Ok(Some(Released::Freed)),
            Freed::WaitedFor => {
                self.store.notify(&req.name).await;
                Ok(Some(Released::Freed))
            }
            Freed::Undecided => Box::pin(self.decide_release(req, call)).await,
        }
    }

    /// Releases by reading, deciding and writing.
    async fn decide_release(&self, req: &Release, call: Call) -> Result<Option<Released>> {
        let decide = |stored: Stored, time: StoreTime| {
            let record = stored.record()?;
            let waited_for = record.may_have_waiters(time);
            Ok(record.release(req, time).with(waited_for))
        };
        let released = self.attempt(&req.name, call, decide);
        let Some((released, waited_for)) = released.await? else {
            return Ok(None);
        };
        // A permit that was given back is of use to a waiter.
        let is_of_use = match released {
            Released::StillHeld { .. } => matches!(req.owner.mode(), Mode::Permit { .. }),
            Released::Freed => true,
            _ => false,
        };
        if waited_for && is_of_use {
            self.store.notify(&req.name).await;
        }
        Ok(Some(released))
    }

    async fn serve_inspect(self: Arc<Self>, name: LockName) -> Result<Snapshot> {
        let (names, call) = (std::slice::from_ref(&name), self.default_call());
        let read = self.store.read(names, call).await?;
        let record = one(read.records)?.record()?;
        Ok(record.snapshot(name, read.time))
    }

    async fn serve_list(
        self: Arc<Self>,
        prefix: String,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<Page> {
        let after = from.as_ref().map(read_cursor).transpose()?;
        let (after, limit) = (after.unwrap_or_default(), limit.clamp(1, LONGEST_PAGE));
        let page = self.store.list(&prefix, after, limit).await?;
        let next = page.next.map(|name| Cursor([CURSOR, &name].concat()));
        let mut found = Vec::new();
        for (name, stored) in page.records {
            match stored {
                Stored::Absent => {}
                Stored::Damaged(why) => found.push(Snapshot::damaged(name, why.to_string())),
                Stored::Record(record) if record.is_unavailable(page.time) => {
                    found.push(record.snapshot(name, page.time));
                }
                Stored::Record(_) => {}
            }
        }
        Ok(Page::new(found, next))
    }

    async fn serve_break_lock(
        self: Arc<Self>,
        name: LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        let call = self.default_call();
        let decide = |stored: Stored, time: StoreTime| -> Result<_> {
            let (record, only) = match stored {
                Stored::Damaged(damaged) if only.is_none_or(|only| only.0 == damaged.token) => {
                    (Record::damaged(damaged, time), None)
                }
                stored => (stored.record()?, only),
            };
            let waited_for = record.may_have_waiters(time);
            Ok(record.break_lock(only, time).with(waited_for))
        };
        let broken = self.settled(&name, call.give_up, || self.attempt(&name, call, decide));
        let (broken, waited_for) = broken.await?;
        if waited_for && matches!(broken, Broken::Freed { .. }) {
            self.store.notify(&name).await;
        }
        Ok(broken)
    }
}

/// A driver made of a [`RecordDriver`]: implementing this is all that its type needs.
pub trait RecordBacked: Debug + Send + Sync + 'static {
    /// The store.
    type Store: RecordStore;

    /// The record driver over it.
    fn record_driver(&self) -> &RecordDriver<Self::Store>;
}

impl<S: RecordStore> RecordBacked for RecordDriver<S> {
    type Store = S;

    fn record_driver(&self) -> &Self {
        self
    }
}

#[async_trait]
impl<D: RecordBacked> DistributedLock for D {
    fn capabilities(&self) -> &Capabilities {
        self.record_driver().store().capabilities()
    }

    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.record_driver()
            .run(|requests| requests.serve_acquire(req.clone()))
            .await
    }

    /// There is no queue in the store: a ticket is only a wish to be woken.
    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        if let Some(waiters) = self.record_driver().store().waiters() {
            waiters.forget(name, ticket);
        }
        Ok(())
    }

    /// Here, and wherever the store has a fast path, one request is sent for all entries.
    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.record_driver()
            .run(|requests| requests.serve_renew(batch.to_vec(), give_up))
            .await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.record_driver()
            .run(|requests| requests.serve_release(req.clone()))
            .await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        let waiters = self.record_driver().store().waiters();
        waiters.map_or_else(|| stream::empty().boxed(), |waiters| waiters.stream())
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.record_driver()
            .run(|requests| requests.serve_inspect(name.clone()))
            .await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.record_driver()
            .run(|requests| requests.serve_list(prefix.to_owned(), from.cloned(), limit))
            .await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.record_driver()
            .run(|requests| requests.serve_break_lock(name.clone(), only))
            .await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let checking =
            |requests: Arc<Requests<D::Store>>| async move { requests.store.diagnose().await };
        self.record_driver().run(checking).await
    }

    async fn close(&self) {
        self.record_driver().store().close().await;
    }
}

/// The last moment of a write in the store's time. The record was read before its answer was received, so this
/// errs on the early side.
fn not_after(call: Call, time: StoreTime, received: Instant) -> Result<u64> {
    match call.class {
        // An acquire or a renewal that is executed after the core stopped waiting takes nothing.
        Class::Acquire | Class::Renewal if received >= call.give_up => Err(late()),
        Class::Acquire | Class::Renewal => Ok(time.after(call.give_up.since(received))),
        // A release and a break are wanted at any time.
        Class::Work => Ok(u64::MAX),
    }
}

/// Marks that clients may be waiting, if the earlier mark ends soon.
fn mark<A>(decision: &mut Decision<A>, record: &Record, time: StoreTime) {
    if record.waiters_until < time.after(WAITERS_MARK / 2) {
        let marked = decision.write.get_or_insert_with(|| record.clone());
        marked.waiters_until = time.after(WAITERS_MARK);
    }
}

/// A write whose record has a version that the name never had: greater than the last one, and than any of a
/// record deleted before.
fn replacing(
    name: &LockName,
    expected: Expected,
    mut record: Record,
    time: StoreTime,
    not_after: u64,
) -> Write {
    record.version = match expected {
        Expected::Version(version) => version.saturating_add(1),
        Expected::Absent | Expected::Damaged => time.wall.max(1),
    };
    Write {
        name: name.clone(),
        expected,
        record,
        not_after,
    }
}

/// The only entry of an answer to a request of one.
fn one<T>(answers: Vec<T>) -> Result<T> {
    answers.into_iter().next().ok_or_else(|| {
        DriverError::new(
            ErrorKind::Indeterminate,
            "BUG: the store answered nothing for one entry",
        )
        .with_effect(Effect::Unknown)
    })
}

fn read_cursor(cursor: &Cursor) -> Result<&[u8]> {
    cursor
        .0
        .strip_prefix(CURSOR)
        .ok_or_else(|| DriverError::misuse("the cursor is none of this driver's"))
}

/// Whether a fast path may decide the request.
fn is_plain(req: &Acquire) -> bool {
    req.join.is_none() && req.floor.is_none()
}

/// What a request that took the lock by the fast path is told.
fn granted(token: FencingToken, req: &Acquire) -> Acquired {
    Acquired::Granted(Grant::new(token, NonZeroU32::MIN, req.lease.length()))
}

fn late() -> DriverError {
    DriverError::unavailable("the request reached the store too late and was refused")
        .with_retry(RetryClass::Now)
}

fn contended() -> DriverError {
    DriverError::unavailable("other clients changed the lock at every attempt")
        .with_retry(RetryClass::Now)
}

/// How long a release or a break is tried: as long as an attempt to acquire may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Names share gates, at the price of waiting for each other.
const GATES: usize = 64;
/// How long a request waits at a gate before it repeats without.
const AT_THE_GATE: Duration = Duration::from_secs(1);
/// An attempt that took so long has waited for a lock of another transaction.
const A_WAIT: Duration = Duration::from_millis(250);
/// The first pause after a lost race, and the longest.
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How long the mark of a waiter lasts: waiters poll more often than that, and renew it when half of it is gone.
pub const WAITERS_MARK: Duration = Duration::from_secs(10);
/// A lost wake-up costs at most this long.
const LONGEST_POLL: Duration = Duration::from_secs(2);
/// How often a waiter polls that no wake-up can reach: what the core does on stores that only answer.
const POLL_UNHEARD: Duration = Duration::from_millis(100);
/// Records of one page of a walk.
const LONGEST_PAGE: usize = 1_000;
/// What the bytes of a cursor begin with; those of the last name follow.
const CURSOR: &[u8] = b"name:";

#[cfg(test)]
mod tests;
