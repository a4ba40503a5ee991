//! The client: one driver, and everything that its locks share.

use crate::{
    alarm::Alarms,
    call::Adrift,
    clock::Clock,
    driver::{Capabilities, DistributedLock, Note},
    error::{Error, ErrorKind},
    flaw::Flaw,
    identity::Owner,
    inner::{Inner, listen},
    janitor::Janitor,
    lease::Lease,
    lock::Lock,
    name::LockName,
    shutdown::Shutdown,
    watchdog::{self, Watchdog},
};
use rand::{
    SeedableRng,
    rngs::{StdRng, SysRng},
};
use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::Notify};

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

    /// Makes the client and starts its three tasks.
    ///
    /// # Errors
    /// `Misuse` outside a tokio runtime; `Unsupported` when the store cannot give the default lease; `Unavailable` when the operating
    /// system gives no random numbers.
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
        let rng = match self.seed {
            Some(seed) => StdRng::seed_from_u64(seed),
            // Not from the thread's own source: after a fork two processes have the same one, and would be one owner.
            None => StdRng::try_from_rng(&mut SysRng).map_err(|error| {
                let message =
                    "the operating system gives no random numbers, which owners are made of";
                Error::new(ErrorKind::Unavailable, message).with_source(error)
            })?,
        };
        let (alarms, ringing) = Alarms::start(&self.clock, &handle);
        let inner = Arc::new(Inner {
            watchdog: Arc::new(Watchdog::new(caps.renew_batch)),
            store: caps.store.as_str().into(),
            adrift: Arc::new(Adrift::new(handle.clone(), self.clock.clone(), alarms)),
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
            rng: Mutex::new(rng),
            tickets: AtomicU64::new(1),
            tasks: Mutex::default(),
            flaw: self.flaw,
            driver: self.driver,
            clock: self.clock,
            caps,
        });
        let renewing = handle.spawn(watchdog::run(Arc::downgrade(&inner)));
        let listening = handle.spawn(listen(Arc::downgrade(&inner)));
        inner.tasks().extend([ringing, renewing, listening]);
        Ok(Client { inner })
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
