//! Client: one driver, and the state that all its locks share.

use crate::{
    clock::Clock,
    driver::{Capabilities, DistributedLock, HolderInfo, kit::Deadlines},
    engine::{
        Engine,
        call::CallContext,
        cleanup::Cleanup,
        listen,
        metrics::Classes,
        presence::Presences,
        watchdog::{self, Watchdog},
    },
    error::{Effect, Error},
    lease::Lease,
    lock::{Lock, RwLock},
    name::LockName,
    owner::{MAX_SHARERS, Mode, Owner},
    random::Random,
    runtime,
    shutdown::Shutdown,
};
use parking_lot::Mutex;
use std::{
    fmt,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// The default poll interval: the longest pause between two polls of a store without wake-ups
/// ([`Wake::Poll`](crate::driver::Wake::Poll)) while a task waits.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Client, DEFAULT_POLL_INTERVAL};
/// use std::sync::Arc;
///
/// let driver = dlock_memory::MemoryDriver::from_url("memory:polled?dlock.wake=poll")?;
/// let client = Client::builder(Arc::new(driver)).poll_interval(DEFAULT_POLL_INTERVAL / 10).build()?;
/// # Ok(()) }
/// ```
pub const DEFAULT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A handle to the locks in one store. Cheap to clone. All clones share one watchdog, one local queue per
/// lock name, and one driver.
///
/// # Runtimes
/// A client belongs to the tokio runtime in which it was built: renewals and cleanup run there, and over SQL stores and
/// MongoDB every request. Nothing is renewed when that runtime is dropped, when it is current-thread and not polled, or when all its workers
/// are blocked. The store then ends the leases. Every guard notices on its own, because
/// [`Guard::check`](crate::Guard::check), [`remaining`](crate::Guard::remaining) and
/// [`lost`](crate::Guard::lost) read the clock in the caller's thread. No guard claims the lock for longer
/// than the store holds it. A guard dropped at that point is not released early: its lease runs out.
///
/// # Examples
/// ```
/// # async fn example(driver: impl dlock_core::driver::DistributedLock) -> Result<(), dlock_core::Error> {
/// let client = dlock_core::Client::new(driver)?;
/// let lock = client.lock("orders:42")?;
/// let guard = lock.acquire().await?;
/// // … what must not be done twice at once, fenced by guard.token() …
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) engine: Arc<Engine>,
}

/// Builder of a [`Client`].
///
/// # Examples
/// ```
/// # async fn example(driver: impl dlock_core::driver::DistributedLock) -> Result<(), dlock_core::Error> {
/// use dlock_core::{Client, Lease};
/// use std::{sync::Arc, time::Duration};
///
/// let client = Client::builder(Arc::new(driver))
///     .lease(Lease::renewed(Duration::from_secs(10)))
///     .poll_interval(Duration::from_millis(50))
///     .build()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ClientBuilder {
    driver: Arc<dyn DistributedLock>,
    clock: Clock,
    lease: Option<Lease>,
    poll_interval: Duration,
    info: HolderInfo,
    seed: Option<u64>,
    presence: Option<Duration>,
}

impl Client {
    /// Builds a client over a driver, with the defaults of [`builder`](Self::builder). Call it inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// `Misuse` outside a runtime, and on one without timers.
    ///
    /// # Examples
    /// ```
    /// # async fn example(driver: impl dlock_core::driver::DistributedLock) -> Result<(), dlock_core::Error> {
    /// let client = dlock_core::Client::new(driver)?;
    /// # Ok(()) }
    /// ```
    pub fn new(driver: impl DistributedLock) -> Result<Self, Error> {
        Self::builder(Arc::new(driver)).build()
    }

    /// Starts a builder, to change the defaults. It takes an `Arc`, because a driver may have been chosen at run time,
    /// or be kept by the caller. [`new`](Self::new) takes a driver by value.
    ///
    /// # Examples
    /// ```
    /// # async fn example(driver: impl dlock_core::driver::DistributedLock) -> Result<(), dlock_core::Error> {
    /// # use std::sync::Arc;
    /// let client = dlock_core::Client::builder(Arc::new(driver)).build()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn builder(driver: Arc<dyn DistributedLock>) -> ClientBuilder {
        ClientBuilder {
            driver,
            clock: Clock::boot(),
            lease: None,
            poll_interval: DEFAULT_POLL_INTERVAL,
            info: HolderInfo::here(),
            seed: None,
            presence: None,
        }
    }

    /// Returns the lock of this name. It does no I/O: only an acquire finds out whether the lock is held.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal: see [`LockName`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let lock = client.lock(format!("orders:{}", 42))?;
    /// assert!(client.lock("").is_err()); // not a legal name
    /// # Ok(()) }
    /// ```
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock, Error> {
        let name = LockName::new(name)?;
        Lock::new(Arc::clone(&self.engine), name, Mode::Exclusive)
    }

    /// Returns the lock of this name, to be held by many readers or one writer. It does no I/O.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal: see [`LockName`]. `Unsupported` when the store cannot share locks.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let catalog = client.rw_lock("catalog")?;
    /// let reader = catalog.read().acquire().await?;
    /// # drop(reader); Ok(()) }
    /// ```
    pub fn rw_lock(&self, name: impl AsRef<str>) -> Result<RwLock, Error> {
        RwLock::new(&self.engine, LockName::new(name)?)
    }

    /// Returns the lock of this name, to be held by up to `permits` at once: 1 to [`MAX_SHARERS`]. It does no I/O.
    ///
    /// Each guard is a permit with a lease of its own: the permit of a process that dies is free again when its lease
    /// ends. All who hold a permit at the same time have the same fencing token, so a token does not tell two of
    /// them apart.
    ///
    /// All users of a name must agree on the number. One that names another number than the present holders is
    /// told `Misuse` when it acquires. While any of them holds a permit, the name is not free for
    /// [`lock`](Self::lock) and [`rw_lock`](Self::rw_lock).
    ///
    /// # Errors
    /// `Misuse` when the name or the number is not legal. `Unsupported` when the store cannot share locks.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
    /// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:permits")?)?;
    /// let uploads = client.semaphore("uploads", 2)?;
    /// let (one, two) = (uploads.acquire().await?, uploads.acquire().await?);
    /// assert!(uploads.try_acquire().await?.is_none());
    /// one.release().await?;
    /// let three = uploads.acquire().await?;
    /// # drop((two, three)); Ok(()) }
    /// ```
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock, Error> {
        let name = LockName::new(name)?;
        match NonZeroU32::new(permits).filter(|_| permits <= MAX_SHARERS) {
            Some(of) => Lock::new(Arc::clone(&self.engine), name, Mode::Permit { of }),
            None => {
                let message = format!("a semaphore has 1 to {MAX_SHARERS} permits, not {permits}");
                Err(Error::misuse(message).at(self.engine.caps.backend, &name))
            }
        }
    }

    /// The capabilities of the store.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let caps = client.capabilities();
    /// println!("{}, leases from {:?} to {:?}", caps.backend, caps.leases.start(), caps.leases.end());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.engine.caps
    }

    /// Returns a fresh random owner, for [`Lock::with_owner`].
    ///
    /// # Panics
    ///
    /// When the operating system, which gave random numbers when the client was built, gives none any more.
    /// An acquire is then an error.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let owner = client.owner();
    /// let guard = client.lock("report")?.with_owner(&owner).acquire().await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn owner(&self) -> Owner {
        let owner = self.engine.random.owner();
        owner.expect("a system that gave random numbers goes on to give them")
    }

    /// Shuts the client down. It refuses new acquires, cancels waiters and resolves
    /// [`Guard::shutting_down`](crate::Guard::shutting_down). It keeps renewing for `grace`, so that
    /// holders can finish. Then it stops renewing, marks the remaining guards lost, and **leaves their
    /// locks to the leases**: a release while the protected code still runs would let two holders in. See
    /// [`Shutdown::force`] for processes that have stopped that code.
    ///
    /// Nothing happens until it is awaited. It ends 4 s after `grace` at the latest.
    ///
    /// # Errors
    /// `ShuttingDown` when it was called before. `Indeterminate` when the client's runtime is gone, so that nothing can
    /// be waited for.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let report = client.shutdown(Duration::from_secs(5)).await?;
    /// for (name, outcome) in &report.locks {
    ///     println!("{name}: {outcome:?}");
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use = "nothing is shut down until it is awaited"]
    pub fn shutdown(&self, grace: Duration) -> Shutdown {
        Shutdown::new(Arc::clone(&self.engine), grace)
    }

    /// Asks the store for an answer, for a health check: one read-only request of at most 5 s. It reads the record
    /// of the name `dlock.ping`, which need not exist, so it needs the rights of [`Admin::inspect`](crate::Admin::inspect)
    /// and changes nothing. The store is asked in a [`shutdown`](Self::shutdown), too, until that is over.
    ///
    /// # Errors
    /// `Timeout` when the store did not answer, `Unavailable` when it cannot be reached or refuses. `Misuse` outside
    /// a tokio runtime with timers.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) {
    /// let status = match client.ping().await {
    ///     Ok(()) => 200,
    ///     Err(error) => {
    ///         eprintln!("{error}");
    ///         503
    ///     }
    /// };
    /// # let _ = status; }
    /// ```
    pub async fn ping(&self) -> Result<(), Error> {
        let name = LockName::new(PINGED)?;
        let driver = Arc::clone(&self.engine.driver);
        let asked = async move { driver.inspect(&name).await };
        let answer = self.engine.ask(Effect::None, asked).await;
        // A driver that got no answer cannot know that this request changes nothing.
        let error = |error: Error| error.of(self.engine.caps.backend).with_effect(Effect::None);
        answer.map(drop).map_err(error)
    }

    /// The number of acquisitions and releases that the cleanup still has to clean up.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// println!("{} requests of cancelled calls still to clean up", client.pending_cleanups());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn pending_cleanups(&self) -> usize {
        self.engine.cleanup.len()
    }
}

/// The name whose record a ping reads.
const PINGED: &str = "dlock.ping";

impl ClientBuilder {
    /// The clock that the client uses; the boot clock unless a simulation sets another.
    ///
    /// # Examples
    /// ```
    /// # async fn example(driver: impl dlock_core::driver::DistributedLock) -> Result<(), dlock_core::Error> {
    /// # use std::sync::Arc;
    /// use dlock_core::{Client, Clock};
    ///
    /// // In a test with tokio's paused time: a lease of 30 s passes at once.
    /// let client = Client::builder(Arc::new(driver)).clock(Clock::simulated()).build()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// The lease of locks that set none. The default is 30 s, or the session's length on a store that binds
    /// holds to a session.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let client = builder.lease(dlock_core::Lease::renewed(Duration::from_secs(10))).build()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.lease = Some(lease);
        self
    }

    /// The longest pause between two polls of a store without wake-ups while a task waits; at least 1 ms.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let client = builder.poll_interval(Duration::from_millis(250)).build()?; // fewer requests, slower hand-offs
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn poll_interval(mut self, cap: Duration) -> Self {
        self.poll_interval = cap.max(Duration::from_millis(1));
        self
    }

    /// The holder info that the store shows for this client's locks; by default host and pid of this
    /// process.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// let info = dlock_core::HolderInfo::new("billing-7", std::process::id());
    /// let client = builder.holder_info(info).build()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn holder_info(mut self, info: HolderInfo) -> Self {
        self.info = info;
        self
    }

    /// Makes the client's long holds depend on one short lease, its presence, that lasts this long and is renewed
    /// while the client lives. When a client dies, waiters take its locks over once its presence is over, without
    /// waiting for their leases. Without this, a client has no presence. Legal are 100 ms to 365 days, as for a lease;
    /// [`build`](Self::build) checks it. Where holds end with a session, as on `ZooKeeper`, it is `Unsupported`.
    ///
    /// The presence is the effective lease: when it cannot be renewed in time, all guards that depend on it are lost
    /// at once, with the reason [`LossReason::Presence`](crate::LossReason::Presence).
    ///
    /// An exclusive lock depends on it if its lease is renewed, and longer than the presence. Such a guard has no
    /// [`pass`](crate::Guard::pass) and cannot be [detached](crate::Guard::detach). Shared locks and permits, fixed
    /// leases, locks [with an owner](Lock::with_owner) or a [minimum hold](Lock::min_hold), and holds entered by a
    /// pass do not depend on it.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// use dlock_core::Lease;
    ///
    /// let lease = Lease::renewed(Duration::from_secs(300)); // rarely renewed
    /// let client = builder.lease(lease).presence(Duration::from_secs(3)).build()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn presence(mut self, length: Duration) -> Self {
        self.presence = Some(length);
        self
    }

    /// Makes owners, hold ids and jitter repeatable. For tests and simulation only: the owners are then no
    /// secrets.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// let client = builder.seed(7).build()?; // tests only
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the client and starts its three tasks.
    ///
    /// # Errors
    /// `Misuse` outside a tokio runtime, and on one without timers. `Unsupported` when the store cannot
    /// give the default lease or the presence. `Unavailable` when the operating system gives no random numbers.
    ///
    /// # Examples
    /// ```
    /// # async fn example(builder: dlock_core::ClientBuilder) -> Result<(), dlock_core::Error> {
    /// let client = builder.build()?;
    /// # Ok(()) }
    /// ```
    pub fn build(self) -> Result<Client, Error> {
        let handle = runtime::current()?;
        let caps = self.driver.capabilities().clone();
        let lease = match self.lease {
            Some(lease) => lease.on(&caps)?,
            None => Lease::default_on(&caps),
        };
        let presences = self.presence.map(|length| Presences::new(length, &caps));
        let presences = presences.transpose()?;
        let (deadlines, timing) = Deadlines::start(&self.clock, &handle);
        let classes = Classes::new(caps.backend);
        let engine = Arc::new(Engine {
            watchdog: Arc::new(Watchdog::new(caps.renew_batch)),
            store: caps.store.as_str().into(),
            calls: Arc::new(CallContext {
                handle: handle.clone(),
                clock: self.clock.clone(),
                deadlines,
                metrics: classes.store.clone(),
            }),
            info: Arc::new(self.info),
            cleanup: Cleanup::default(),
            poll_interval: self.poll_interval,
            presences,
            closing: AtomicBool::new(false),
            detached: Mutex::default(),
            closed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            shutting_down: Notify::new(),
            quieter: Notify::new(),
            lease,
            table: Mutex::default(),
            random: Random::new(self.seed)?,
            tickets: AtomicU64::new(1),
            classes,
            tasks: Mutex::default(),
            driver: self.driver,
            clock: self.clock,
            caps,
        });
        let renewing = handle.spawn(watchdog::run(Arc::downgrade(&engine)));
        let listening = handle.spawn(listen(Arc::downgrade(&engine)));
        engine.tasks.lock().extend([timing, renewing, listening]);
        Ok(Client { engine })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("driver", &self.engine.driver)
            .field("clock", &self.engine.clock)
            .finish_non_exhaustive()
    }
}
