//! The client: one driver, and everything that its locks share.

use crate::{
    book::Book,
    call::Adrift,
    clock::{Clock, Instant},
    driver::{Capabilities, DistributedLock, Hint, Note},
    error::{Error, ErrorKind, LossReason},
    flaw::Flaw,
    guard::Guard,
    hold::{Hold, Start},
    identity::{HoldId, Owner, Ticket},
    janitor::{Janitor, Job},
    lease::Lease,
    lock::Lock,
    name::LockName,
    shutdown::Shutdown,
    watchdog::{self, Renewal, Watchdog, Watched},
};
use futures_util::StreamExt;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    collections::HashSet,
    fmt,
    num::NonZeroU64,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::Notify, task::JoinHandle};

/// How often a store that only answers is asked at most while somebody waits.
pub const DEFAULT_LOOK_CAP: Duration = Duration::from_millis(100);

/// Locks in one store. Cheap to clone; all clones share one watchdog, one line per name and one connection's worth of traffic.
///
/// # Runtimes
/// A client belongs to the tokio runtime it was made in: renewals and clean-up run there. When that runtime is dropped, or is
/// current-thread and not polled, or all its workers are blocked, nothing is renewed: the store ends the leases, and every guard says
/// so by itself, because [`Guard::check`](crate::Guard::check), [`remaining`](crate::Guard::remaining) and
/// [`lost`](crate::Guard::lost) read the clock in the caller's own thread. Nothing is held longer than the store holds it. A guard
/// dropped then is not released early: its lease runs out.
///
/// # Examples
/// ```
/// # async fn example(driver: impl dlock_core::DistributedLock) -> Result<(), dlock_core::Error> {
/// let client = dlock_core::Client::new(driver)?;
/// let lock = client.lock("orders:42")?;
/// let guard = lock.acquire().await?;
/// // … what must not be done twice at once, fenced by guard.token() …
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

/// How a [`Client`] is made.
#[derive(Debug)]
pub struct ClientBuilder {
    driver: Arc<dyn DistributedLock>,
    clock: Clock,
    lease: Option<Lease>,
    look_cap: Duration,
    seed: Option<u64>,
    flaw: Option<Flaw>,
}

pub(crate) struct Inner {
    pub(crate) driver: Arc<dyn DistributedLock>,
    pub(crate) caps: Capabilities,
    pub(crate) store: Arc<str>,
    pub(crate) clock: Clock,
    pub(crate) adrift: Adrift,
    pub(crate) note: Arc<Note>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) janitor: Janitor,
    pub(crate) look_cap: Duration,
    pub(crate) closing: AtomicBool,
    /// Holds that were detached here and not attached again.
    detached: Mutex<HashSet<HoldId>>,
    /// Notified when the client begins to shut down.
    pub(crate) revoked: Notify,
    /// The driver is closed: nothing can be undone any more.
    pub(crate) closed: AtomicBool,
    /// Acquires and releases under way, which a shutdown waits for.
    active: AtomicUsize,
    /// Notified, while shutting down, when something came to its end.
    pub(crate) quieter: Notify,
    lease: Lease,
    book: Mutex<Book>,
    rng: Mutex<StdRng>,
    tickets: AtomicU64,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    flaw: Option<Flaw>,
}

impl Client {
    /// A client over a driver, with the defaults of [`builder`](Self::builder). Call it inside a tokio runtime.
    ///
    /// # Errors
    /// `Misuse` outside a runtime.
    pub fn new(driver: impl DistributedLock) -> Result<Self, Error> {
        Self::builder(Arc::new(driver)).build()
    }

    /// A client with settings of its own.
    #[must_use]
    pub fn builder(driver: Arc<dyn DistributedLock>) -> ClientBuilder {
        ClientBuilder {
            driver,
            clock: Clock::boot(),
            lease: None,
            look_cap: DEFAULT_LOOK_CAP,
            seed: None,
            flaw: None,
        }
    }

    /// A lock of this name. No I/O: whether it is held is found out by acquiring it.
    ///
    /// # Errors
    /// `Misuse` when the name is not one: see [`LockName`].
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock, Error> {
        let name = LockName::new(name)?;
        Ok(Lock::new(Arc::clone(&self.inner), name, self.inner.lease))
    }

    /// What the store can do.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.caps
    }

    /// A fresh random owner, for [`Lock::owned_by`].
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.inner.fresh_owner()
    }

    /// Shuts down: refuses new acquires, cancels waiters, resolves [`Guard::revoked`](crate::Guard::revoked), and keeps renewing for
    /// `grace`, so that who holds a lock can finish. Then it stops renewing, marks what is left lost, and **leaves it to its lease**:
    /// releasing under running code would be a double hold made by us. See [`Shutdown::force`] for those who know better.
    ///
    /// Await it: nothing happens before.
    #[must_use = "nothing is shut down until it is awaited"]
    pub fn shutdown(&self, grace: Duration) -> Shutdown {
        Shutdown::new(Arc::clone(&self.inner), grace)
    }

    /// How many requests were never answered, not even long after they were given up.
    #[must_use]
    pub fn abandoned_calls(&self) -> u64 {
        self.inner.adrift.abandoned()
    }

    /// How many acquisitions and releases the janitor is still settling.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.inner.janitor.len()
    }
}

impl ClientBuilder {
    /// The clock behind which everything runs; the boot clock unless a simulation says otherwise.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// The lease of locks that name none: 30 s, or what the session lasts on a store where holds are bound to one.
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.lease = Some(lease);
        self
    }

    /// How often a store that only answers is asked at most while somebody waits; at least 1 ms.
    #[must_use]
    pub fn look_cap(mut self, cap: Duration) -> Self {
        self.look_cap = cap.max(Duration::from_millis(1));
        self
    }

    /// Makes owners, holds and jitter repeatable. For tests and simulation only: owners are then no secrets.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Makes the client wrong on purpose, for the suite that proves it would notice.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    #[must_use]
    pub fn flaw(mut self, flaw: Flaw) -> Self {
        self.flaw = Some(flaw);
        self
    }

    /// Makes the client and starts its two tasks.
    ///
    /// # Errors
    /// `Misuse` outside a tokio runtime; `Unsupported` when the store cannot give the default lease.
    pub fn build(self) -> Result<Client, Error> {
        let handle = Handle::try_current().map_err(|error| {
            Error::misuse("a client is made inside the tokio runtime that is to renew its locks")
                .with_source(error)
        })?;
        let caps = self.driver.capabilities().clone();
        let lease = match self.lease {
            Some(lease) => lease.on(&caps)?,
            None => Lease::default()
                .no_longer_than(*caps.leases.end())
                .at_least(&caps),
        };
        let inner = Arc::new(Inner {
            watchdog: Arc::new(Watchdog::new(caps.renew_batch)),
            store: caps.store.as_str().into(),
            adrift: Adrift::new(handle.clone(), self.clock.clone()),
            note: Arc::new(Note::here()),
            janitor: Janitor::default(),
            look_cap: self.look_cap,
            closing: AtomicBool::new(false),
            detached: Mutex::default(),
            closed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            revoked: Notify::new(),
            quieter: Notify::new(),
            lease,
            book: Mutex::default(),
            rng: Mutex::new(
                self.seed
                    .map_or_else(|| StdRng::from_rng(&mut rand::rng()), StdRng::seed_from_u64),
            ),
            tickets: AtomicU64::new(1),
            tasks: Mutex::default(),
            flaw: self.flaw,
            driver: self.driver,
            clock: self.clock,
            caps,
        });
        let renewing = handle.spawn(watchdog::run(Arc::downgrade(&inner)));
        let listening = handle.spawn(listen(Arc::downgrade(&inner)));
        inner.tasks().extend([renewing, listening]);
        Ok(Client { inner })
    }
}

/// Hears the store's hints until the driver is closed or the client gone.
async fn listen(client: Weak<Inner>) {
    let Some(mut hints) = client.upgrade().map(|inner| inner.driver.hints()) else {
        return;
    };
    while let Some(hint) = hints.next().await {
        let Some(inner) = client.upgrade() else {
            return;
        };
        inner.heard(hint);
    }
}

impl Inner {
    fn heard(self: &Arc<Self>, hint: Hint) {
        if self.flawed(Flaw::HintsIgnored) {
            return;
        }
        tracing::trace!(target: "dlock::hint", backend = self.caps.backend, ?hint);
        let now = self.clock.now();
        let wanted = self.book().hint(&hint, now);
        match hint {
            // Whoever stands behind a turn that nobody wants should not wait for its accept lease.
            Hint::Turn { name, ticket } if !wanted => self.leave_line(&name, ticket),
            Hint::Over(lane) => self.watchdog.over(lane, now),
            _ => {}
        }
    }

    /// Makes a guard of what the store granted; `None`: it is worth nothing, because it is over already or the client is shutting down.
    pub(crate) fn begin(self: &Arc<Self>, start: Start) -> Option<Guard> {
        let now = self.clock.now();
        let (sent, length) = (start.sent, start.terms.lease().length());
        let counted = if self.flawed(Flaw::DeadlineFromReply) {
            now
        } else {
            sent
        };
        let first = start.first.map_or(sent, |first| first.sent);
        let end = start.terms.end().map(|end| first + end);
        let deadline = (counted + start.valid_for.min(length) - Lease::margin(length))
            .min(end.unwrap_or(Instant::FAR));
        if deadline <= now {
            return None;
        }
        let shown = if self.flawed(Flaw::ClockIgnored) {
            Instant::FAR
        } else {
            deadline
        };
        let hold = Arc::new(Hold::new(&start, now, shown));
        if !self.enter(&hold) {
            return None;
        }
        let key = self.watchdog.watch(Watched {
            what: Arc::clone(&hold),
            name: start.name.clone(),
            lane: self.driver.lane(&start.name),
            sent,
            deadline,
            renewal: self.renews(hold.lease()),
            end,
        });
        hold.watched_as(key);
        Some(Guard::new(Arc::clone(self), hold))
    }

    fn renews(&self, lease: Lease) -> Option<Renewal> {
        let length = lease.length();
        if lease.is_kept() {
            return (!self.flawed(Flaw::NeverRenews)).then_some(Renewal {
                ask: Some(length),
                length,
            });
        }
        // A fixed lease on a session store lasts no longer than its session, which has to be proven.
        self.caps.session_bound.then(|| Renewal {
            ask: None,
            length: *self.caps.leases.end(),
        })
    }

    /// A hold begins, unless the client is shutting down or it is in the book already. Of two holds of one owner with two tokens, the
    /// one with the smaller is a hold that the store has forgotten.
    fn enter(self: &Arc<Self>, hold: &Arc<Hold>) -> bool {
        let mut stale = Vec::new();
        {
            let mut book = self.book();
            if self.is_closing() {
                return false;
            }
            let page = book.page(&hold.name);
            for other in page.holds.iter().filter(|other| other.owner == hold.owner) {
                if other.id == hold.id || other.token > hold.token {
                    return false;
                }
                if other.token < hold.token {
                    stale.push(Arc::clone(other));
                }
            }
            page.holds.push(Arc::clone(hold));
        }
        for other in stale {
            self.lose(&other, LossReason::NotHeld);
        }
        true
    }

    /// A hold is over for us, whatever the store says: out of the book, and who waits here may look.
    pub(crate) fn leave_book(&self, hold: &Arc<Hold>) {
        self.book().strike(hold);
        self.is_quieter();
    }

    pub(crate) fn lose(self: &Arc<Self>, hold: &Arc<Hold>, reason: LossReason) {
        self.leave_book(hold);
        if let Some(key) = hold.key() {
            self.watchdog.forget(key);
        }
        // The deadline may have been noticed first by the guard itself, or by nobody yet.
        hold.lose(reason);
        tracing::warn!(
            target: "dlock::lost", lock = %hold.name, backend = self.caps.backend, owner = %hold.owner,
            ?reason, "lock lost: {reason}"
        );
        if let Some(end) = hold.terms.end()
            && reason == LossReason::Deadline
            && self.caps.session_bound
        {
            // The session would keep it beyond its end: it is ended by a release, at its full end and not before.
            let mut job = Job::of(hold);
            job.after = hold.sent + end + Lease::margin(hold.lease().length());
            self.settle(job);
        }
        self.poke(&hold.name);
    }

    /// Perhaps free: whoever waits here looks. A store that keeps a line tells its head itself.
    pub(crate) fn poke(&self, name: &LockName) {
        if self.caps.wake != crate::driver::Wake::Line
            && let Some(page) = self.book().find(name)
        {
            page.queue.poke();
        }
    }

    /// Something is under way that a shutdown waits for, until the value is dropped.
    pub(crate) fn active(self: &Arc<Self>) -> Active {
        self.active.fetch_add(1, SeqCst);
        Active(Arc::clone(self))
    }

    /// Whether nothing is held, under way or being settled.
    pub(crate) fn is_quiet(&self) -> bool {
        self.active.load(SeqCst) == 0 && self.janitor.len() == 0 && self.book().is_unheld()
    }

    /// Something came to its end: a shutdown may have waited for it.
    pub(crate) fn is_quieter(&self) {
        if self.is_closing() {
            self.quieter.notify_waiters();
        }
    }

    /// Resolves when the client begins to shut down.
    pub(crate) async fn revoked(&self) {
        loop {
            let revoked = self.revoked.notified();
            let mut revoked = std::pin::pin!(revoked);
            revoked.as_mut().enable();
            if self.is_closing() {
                return;
            }
            revoked.await;
        }
    }

    /// Whether the driver was closed: what is not undone by now is left to its lease.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    pub(crate) fn detached(&self) -> MutexGuard<'_, HashSet<HoldId>> {
        self.detached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_hold(&self, name: &LockName, id: HoldId) -> bool {
        let mut book = self.book();
        let page = book.find(name);
        page.is_some_and(|page| page.holds.iter().any(|hold| hold.id == id))
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold_id(&self) -> HoldId {
        HoldId::random(&mut *self.rng())
    }

    pub(crate) fn fresh_owner(&self) -> Owner {
        Owner::random(&mut *self.rng())
    }

    /// A number from 0 to 1.
    pub(crate) fn jitter(&self) -> f64 {
        self.rng().random()
    }

    pub(crate) fn ticket(&self) -> Ticket {
        let number = self.tickets.fetch_add(1, SeqCst);
        Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn flawed(&self, flaw: Flaw) -> bool {
        cfg!(feature = "mutants") && self.flaw == Some(flaw)
    }

    pub(crate) fn tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rng(&self) -> MutexGuard<'_, StdRng> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn closed() -> Error {
        Error::new(ErrorKind::ShuttingDown, "the client was shut down before")
    }
}

/// Something under way that a shutdown waits for.
#[derive(Debug)]
pub(crate) struct Active(Arc<Inner>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, SeqCst);
        self.0.is_quieter();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in self.tasks().drain(..) {
            task.abort();
        }
        let driver = Arc::clone(&self.driver);
        self.adrift
            .handle
            .spawn(async move { driver.close().await });
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("driver", &self.inner.driver)
            .field("clock", &self.inner.clock)
            .finish_non_exhaustive()
    }
}

// The driver prints itself without secrets; the random source would print its state.
impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}
