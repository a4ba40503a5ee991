//! Lock handle: a name and its options, before it is acquired.

use crate::{
    engine::{
        Engine,
        acquire::acquire,
        metrics::{Class, CountedAcquire},
        presence::RESERVED,
    },
    error::{Error, ErrorKind},
    guard::Guard,
    lease::Lease,
    name::LockName,
    options::{AcquireOptions, Terms, WaitPolicy},
    owner::{Mode, Owner},
    pass::Pass,
};
use futures_util::FutureExt;
use std::{fmt, panic::Location, sync::Arc, time::Duration};
use tracing::Instrument;

/// A lock in a store: a name and options. It does no I/O and is cheap to clone. Acquiring it gives a
/// [`Guard`].
///
/// Waiters of one client are served first in, first out. Between clients, waiting is as fair as the store
/// ([`Wake`](crate::driver::Wake)). A lock is **not** re-entered by the task that holds it, because ownership is a
/// value. A second `acquire` by the same task waits, and logs that it does. [`Guard::scope`],
/// [`join`](Self::join) and [`with_owner`](Self::with_owner) re-enter.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// let lock = client.lock("orders:42")?; // no I/O
/// if let Some(guard) = lock.try_acquire().await? {
///     println!("held, with token {}", guard.token());
///     guard.release().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Lock {
    pub(crate) engine: Arc<Engine>,
    name: LockName,
    terms: Terms,
    owner: Option<Owner>,
    mode: Mode,
    class: Class,
}

impl Lock {
    /// A lock that is acquired in this mode.
    ///
    /// # Errors
    /// `Unsupported` when the store cannot share locks.
    pub(crate) fn new(engine: Arc<Engine>, name: LockName, mode: Mode) -> Result<Self, Error> {
        if mode != Mode::Exclusive && !engine.caps.shares {
            let message = "this store has no shared locks and no permits: use an exclusive lock here, or another store";
            let error = Error::new(ErrorKind::Unsupported, message);
            return Err(error.at(engine.caps.backend, &name));
        }
        if name.as_str().starts_with(RESERVED) {
            let message = format!(
                "names that begin with {RESERVED:?} are reserved for the presences of clients"
            );
            return Err(Error::misuse(message).at(engine.caps.backend, &name));
        }
        Ok(Self {
            terms: engine.lease.into(),
            class: engine.classes.unnamed(),
            engine,
            name,
            owner: None,
            mode,
        })
    }

    /// The name of the lock.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// assert_eq!(client.lock("orders:42")?.name().as_str(), "orders:42");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Sets the lease to acquire on, instead of the client's.
    ///
    /// [`Lease::renewed`]: the watchdog renews it. Its length is the time after which the lock is free when
    /// this process dies; where holds are bound to a session, no longer than the session. [`Lease::fixed`]:
    /// it is not renewed, and the hold ends by itself.
    ///
    /// The store has a third of the lease to answer an acquire, and a sixth to answer a renewal. A lease
    /// shorter than about six round trips is granted and then lost. A length out of bounds is an error of
    /// the acquire: `Misuse`, or `Unsupported` when this store cannot give it.
    ///
    /// # Examples
    /// ```
    /// # use dlock_core::{Client, Error, Lease};
    /// # use std::time::Duration;
    /// # async fn example(client: Client) -> Result<(), Error> {
    /// let lock = client.lock("report")?.lease(Lease::renewed(Duration::from_secs(10)));
    /// let _guard = lock.acquire().await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.terms = self.terms.with_lease(lease);
        self
    }

    /// Counts this lock under `class` in the metrics: the label that tells kinds of locks apart, such as `orders`.
    /// Choose one of a few fixed words, never the name of the lock: each class makes some thirty time series that
    /// last as long as the client. After a hundred classes a new one counts as none.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client, order: u64) -> Result<(), dlock_core::Error> {
    /// let guard = client.lock(format!("orders:{order}"))?.class("orders").acquire().await?;
    /// # drop(guard); Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        let Engine { classes, caps, .. } = &*self.engine;
        self.class = classes.named(caps.backend, class);
        self
    }

    /// Keeps the lock unavailable for at least `time` from its acquisition. If it is released earlier, no
    /// client gets it before then, not even the former owner. This is for jobs on many hosts whose clocks
    /// differ: a quick job would otherwise run twice. After a crash, or when a fixed lease ran out, the
    /// lease alone decides. It is `Misuse` where the lock is shared.
    ///
    /// A `time` longer than [`max_hold`](Self::max_hold) or than a fixed lease is an error of the acquire:
    /// `Misuse`, with both values.
    ///
    /// # Examples
    /// ```
    /// # use dlock_core::{Client, Error};
    /// # use std::time::Duration;
    /// # async fn example(client: Client) -> Result<(), Error> {
    /// let lock = client.lock("nightly")?.min_hold(Duration::from_secs(600));
    /// if let Some(guard) = lock.try_acquire().await? {
    ///     guard.release().await?; // unavailable to every host until the ten minutes are over
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn min_hold(mut self, time: Duration) -> Self {
        self.terms = self.terms.at_least(time);
        self
    }

    /// Stops renewing `time` after the acquisition. The guard is then lost, whatever its user does.
    ///
    /// A `time` shorter than the shortest lease or than [`min_hold`](Self::min_hold) is an error of the
    /// acquire: `Misuse`, with both values.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// // A job that hangs gives the lock up after an hour, and `run` drops its work then.
    /// let guard = client.lock("nightly")?.max_hold(Duration::from_secs(3600)).acquire().await?;
    /// guard.run(async { /* the job */ }).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_hold(mut self, time: Duration) -> Self {
        self.terms = self.terms.at_most(time);
        self
    }

    /// The lease that an acquire would use, within the limits of the store and of
    /// [`max_hold`](Self::max_hold).
    ///
    /// # Errors
    /// As an acquire: `Misuse` or `Unsupported`.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let lock = client.lock("report")?.max_hold(Duration::from_secs(10));
    /// assert_eq!(lock.effective_lease()?.length(), Duration::from_secs(10)); // the client's 30 s would be longer
    /// # Ok(()) }
    /// ```
    pub fn effective_lease(&self) -> Result<Lease, Error> {
        Ok(self.possible()?.lease())
    }

    fn possible(&self) -> Result<Terms, Error> {
        let caps = &self.engine.caps;
        self.terms
            .on(caps)
            .map_err(|error| error.at(caps.backend, &self.name))
    }

    /// Sets the owner to acquire as, instead of a fresh one. The acquire re-enters at once while any hold
    /// of that owner lives, in this client or another. Not for a reader or a permit: all who share a lock
    /// have one owner, so their acquire is then `Misuse`.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let owner = client.owner();
    /// let lock = client.lock("report")?.with_owner(&owner);
    /// let outer = lock.acquire().await?;
    /// let inner = lock.acquire().await?; // at once: the same owner
    /// assert_eq!(outer.token(), inner.token());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_owner(mut self, owner: &Owner) -> Self {
        self.owner = Some(*owner);
        self
    }

    /// Acquires the lock and waits without a limit.
    ///
    /// # Errors
    /// `Unavailable` when the store fails without a break for one lease (at least 5 s, at most 30 s), or
    /// refuses permanently. `Overloaded` and `ShuttingDown`. `Gone` when the owner's incarnation that it
    /// was to re-enter is over. `Misuse` outside a tokio runtime with timers. Contention is no error: the
    /// call waits.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the waiter's place in the queue. Nothing stays behind in the store: the
    /// cleanup undoes a request in flight in the background, one round trip after the store answers again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let _guard = client.lock("report")?.acquire().await?; // never `let _ =`: that releases at once
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        self.acquire_by(WaitPolicy::Forever, Location::caller())
            .map(sure)
    }

    /// Acquires the lock and waits for at most `limit`. With [`Duration::ZERO`] it asks once, as
    /// [`try_acquire`](Self::try_acquire) does, and its error names the holder.
    ///
    /// # Errors
    /// `Timeout` when the time is up, with the phase in which it was spent; otherwise as
    /// [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(lock: dlock_core::Lock) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// match lock.acquire_timeout(Duration::from_secs(5)).await {
    ///     Ok(guard) => drop(guard.release().await?),
    ///     Err(error) if error.is_contended() => println!("{error}"), // names the holder, where the store tells
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire_timeout(
        &self,
        limit: Duration,
    ) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        self.acquire_by(WaitPolicy::Within(limit), Location::caller())
            .map(sure)
    }

    /// Acquires the lock if it is free. Returns `None` when another owner holds it or it is reserved for
    /// another waiter. It waits for the store's answer only, for at most a third of the lease or 5 s.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); `Timeout` when the store did not answer.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(lock: dlock_core::Lock) -> Result<(), dlock_core::Error> {
    /// match lock.try_acquire().await? {
    ///     Some(guard) => drop(guard.release().await?),
    ///     None => println!("another host does it"),
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        self.acquire_by(WaitPolicy::Try, Location::caller())
    }

    /// Re-enters the incarnation that a pass stands for. It goes past every queue, and works from another
    /// process too.
    ///
    /// # Errors
    /// `Gone` when that incarnation is over. `Misuse` when the pass is for another lock or store.
    /// `Unsupported` on a store without tokens. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(lock: dlock_core::Lock, guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// let pass = guard.pass()?; // send it to another task or process
    /// let inner = lock.join(&pass).await?;
    /// assert_eq!(inner.token(), guard.token());
    /// inner.release().await?; // the outer hold is left
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn join(&self, pass: &Pass) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let options = self
            .fits(pass)
            .and_then(|()| self.options(Location::caller()));
        let options = options.map(|options| AcquireOptions {
            owner: Some(pass.owner),
            join: Some(pass.token),
            ..options
        });
        self.spanned(options, WaitPolicy::Forever).map(sure)
    }

    fn fits(&self, pass: &Pass) -> Result<(), Error> {
        let message = if pass.name != self.name {
            format!("the pass is for the lock {:?}, not for this one", pass.name)
        } else if *pass.store != *self.engine.store {
            format!(
                "the pass is for the store {}, but this client uses {}",
                pass.store, self.engine.store
            )
        } else if pass.owner.mode() != Mode::Exclusive {
            return Err(Error::shared().at(self.engine.caps.backend, &self.name));
        } else {
            return Ok(());
        };
        Err(Error::misuse(message).at(self.engine.caps.backend, &self.name))
    }

    pub(crate) fn acquire_by(
        &self,
        wait_policy: WaitPolicy,
        at: &'static Location<'static>,
    ) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        self.spanned(self.options(at), wait_policy)
    }

    fn options(&self, at: &'static Location<'static>) -> Result<AcquireOptions, Error> {
        let shares = |owner: Owner| owner.mode() != Mode::Exclusive;
        if self.mode != Mode::Exclusive && self.terms.least().is_some() {
            let message = "a lock that is shared has no minimum hold: leave `min_hold` out, or acquire the lock \
                           exclusively";
            return Err(Error::misuse(message).at(self.engine.caps.backend, &self.name));
        }
        if self.owner.is_some_and(shares) || (self.owner.is_some() && self.mode != Mode::Exclusive)
        {
            let message = "all who share a lock do so as one owner, which dlock chooses: leave `with_owner` out, \
                           or acquire the lock exclusively";
            return Err(Error::misuse(message).at(self.engine.caps.backend, &self.name));
        }
        Ok(AcquireOptions {
            name: self.name.clone(),
            terms: self.possible()?,
            owner: self.owner,
            mode: self.mode,
            join: None,
            class: self.class.clone(),
            at,
        })
    }

    fn spanned(
        &self,
        options: Result<AcquireOptions, Error>,
        wait_policy: WaitPolicy,
    ) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        let engine = Arc::clone(&self.engine);
        let span = tracing::debug_span!(
            target: "dlock::acquire", "acquire", lock = %self.name, backend = engine.caps.backend
        );
        let class = self.class.clone();
        async move {
            let (counted, began) = (CountedAcquire::new(class), engine.clock.now());
            let acquired = match options {
                Ok(options) => acquire(engine, options, wait_policy, began).await,
                Err(error) => Err(error),
            };
            let took = |guard: &Guard| guard.hold.since.since(began);
            counted.ended(acquired.as_ref().map(|guard| guard.as_ref().map(took)));
            acquired
        }
        .instrument(span)
    }
}

/// A lock that many may hold to read, or one to write. [`Client::rw_lock`](crate::Client::rw_lock) makes it.
///
/// Both ways give the same [`Guard`] with the same lease, renewal and loss signal as a [`Lock`], and each reader has
/// a lease of its own: one that dies frees only its own part.
///
/// - **Writers do not starve.** While a writer waits, new readers wait behind it. So a task that reads must not read
///   the same name again while it does.
/// - **Tokens.** All who read at the same time have the same fencing token, and every writer a greater one. A
///   resource that refuses a smaller token thus refuses a reader that comes after the next writer; it does not tell
///   two readers apart.
/// - **No re-entry, no upgrade.** A reader does not become a writer: two that tried would wait for each other. Inside
///   the scope of a reader ([`Guard::scope`]), every acquire of the lock is `Misuse`, and its guard gives no pass.
///   Inside the scope of a writer, to read re-enters.
/// - A writer excludes, and is, the exclusive [`Lock`] of the same name.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:rw")?)?;
/// let catalog = client.rw_lock("catalog")?;
/// let (one, two) = (catalog.read().acquire().await?, catalog.read().acquire().await?);
/// assert_eq!(one.token(), two.token());
/// assert!(catalog.write().try_acquire().await?.is_none());
///
/// one.release().await?;
/// two.release().await?;
/// let writer = catalog.write().acquire().await?;
/// assert!(catalog.read().try_acquire().await?.is_none());
/// # drop(writer); Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RwLock {
    exclusive: Lock,
    shared: Lock,
}

impl RwLock {
    pub(crate) fn new(engine: &Arc<Engine>, name: LockName) -> Result<Self, Error> {
        let lock = |mode| Lock::new(Arc::clone(engine), name.clone(), mode);
        Ok(Self {
            exclusive: lock(Mode::Exclusive)?,
            shared: lock(Mode::Shared)?,
        })
    }

    /// The lock as a reader acquires it, beside up to [`MAX_SHARERS`](crate::MAX_SHARERS) others.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let reader = client.rw_lock("catalog")?.read().acquire().await?;
    /// # drop(reader); Ok(()) }
    /// ```
    #[must_use]
    pub fn read(&self) -> Lock {
        self.shared.clone()
    }

    /// The lock as a writer acquires it, alone.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let catalog = client.rw_lock("catalog")?;
    /// let writer = catalog.write().acquire_timeout(Duration::from_secs(5)).await?;
    /// # drop(writer); Ok(()) }
    /// ```
    #[must_use]
    pub fn write(&self) -> Lock {
        self.exclusive.clone()
    }
}

/// A wait ends with a guard or an error.
pub(crate) fn sure<T>(acquired: Result<Option<T>, Error>) -> Result<T, Error> {
    acquired?.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            "BUG: a wait ended without lock or error",
        )
    })
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("name", &self.name)
            .field("terms", &self.terms)
            .field("owner", &self.owner)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}
