//! Lock handles for blocking callers.

use super::{
    guard::{Guard, SetGuard},
    runtime::Runtime,
};
use crate::{Error, Lease, Owner, Pass};
use std::{ops::Deref, sync::Arc, time::Duration};

/// A lock in a store: a name and options, as [`dlock::Lock`](crate::Lock).
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-lock")?;
/// use std::time::Duration;
///
/// let lock = client.lock("report")?.max_hold(Duration::from_secs(3600));
/// if let Some(guard) = lock.try_acquire()? {
///     guard.release()?;
/// }
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Lock {
    lock: crate::Lock,
    runtime: Arc<Runtime>,
}

impl Deref for Lock {
    type Target = crate::Lock;

    fn deref(&self) -> &crate::Lock {
        &self.lock
    }
}

impl Lock {
    pub(super) fn new(lock: crate::Lock, runtime: &Arc<Runtime>) -> Self {
        let runtime = Arc::clone(runtime);
        Self { lock, runtime }
    }

    /// Sets the lease to acquire on: see [`dlock::Lock::lease`](crate::Lock::lease).
    #[must_use]
    pub fn lease(self, lease: Lease) -> Self {
        self.with(|lock| lock.lease(lease))
    }

    /// Keeps the lock unavailable for at least `time` from its acquisition: see
    /// [`dlock::Lock::min_hold`](crate::Lock::min_hold).
    #[must_use]
    pub fn min_hold(self, time: Duration) -> Self {
        self.with(|lock| lock.min_hold(time))
    }

    /// Stops renewing `time` after the acquisition: see [`dlock::Lock::max_hold`](crate::Lock::max_hold).
    #[must_use]
    pub fn max_hold(self, time: Duration) -> Self {
        self.with(|lock| lock.max_hold(time))
    }

    /// Sets the owner to acquire as: see [`dlock::Lock::with_owner`](crate::Lock::with_owner).
    #[must_use]
    pub fn with_owner(self, owner: &Owner) -> Self {
        self.with(|lock| lock.with_owner(owner))
    }

    /// Counts this lock under `class` in the metrics: see [`dlock::Lock::class`](crate::Lock::class).
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(self, class: &str) -> Self {
        self.with(|lock| lock.class(class))
    }

    fn with(mut self, set: impl FnOnce(crate::Lock) -> crate::Lock) -> Self {
        self.lock = set(self.lock);
        self
    }

    /// Acquires the lock and waits without a limit.
    ///
    /// # Errors
    /// As [`dlock::Lock::acquire`](crate::Lock::acquire), and `Misuse` on a thread that runs a tokio runtime.
    #[track_caller]
    pub fn acquire(&self) -> Result<Guard, Error> {
        let guard = self.runtime.block_on(self.lock.acquire())??;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Acquires the lock and waits for at most `limit`.
    ///
    /// # Errors
    /// `Timeout` when the time is up; otherwise as [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_timeout(&self, limit: Duration) -> Result<Guard, Error> {
        let guard = self.runtime.block_on(self.lock.acquire_timeout(limit))??;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Acquires the lock if it is free. Returns `None` when another owner holds it.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        let guard = self.runtime.block_on(self.lock.try_acquire())??;
        Ok(guard.map(|guard| Guard::new(guard, &self.runtime)))
    }

    /// Re-enters the incarnation that a pass stands for: see [`dlock::Lock::join`](crate::Lock::join).
    ///
    /// # Errors
    /// As [`dlock::Lock::join`](crate::Lock::join), and `Misuse` on a thread that runs a tokio runtime.
    #[track_caller]
    pub fn join(&self, pass: &Pass) -> Result<Guard, Error> {
        let guard = self.runtime.block_on(self.lock.join(pass))??;
        Ok(Guard::new(guard, &self.runtime))
    }
}

/// A lock that many may hold to read, or one to write, as [`dlock::RwLock`](crate::RwLock).
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-rw")?;
/// let catalog = client.rw_lock("catalog")?;
/// let reader = catalog.read().acquire()?;
/// assert!(catalog.write().try_acquire()?.is_none());
/// # drop(reader); Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct RwLock {
    read: Lock,
    write: Lock,
}

impl RwLock {
    pub(super) fn new(lock: &crate::RwLock, runtime: &Arc<Runtime>) -> Self {
        Self {
            read: Lock::new(lock.read(), runtime),
            write: Lock::new(lock.write(), runtime),
        }
    }

    /// The lock as a reader acquires it.
    #[must_use]
    pub fn read(&self) -> Lock {
        self.read.clone()
    }

    /// The lock as a writer acquires it, alone.
    #[must_use]
    pub fn write(&self) -> Lock {
        self.write.clone()
    }
}

/// Several locks that are acquired all together or not at all, as [`dlock::LockSet`](crate::LockSet).
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-set")?;
/// let guards = client.lock_all(["account:1", "account:2"])?.acquire()?;
/// guards.check()?;
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct LockSet {
    locks: crate::LockSet,
    runtime: Arc<Runtime>,
}

impl Deref for LockSet {
    type Target = crate::LockSet;

    fn deref(&self) -> &crate::LockSet {
        &self.locks
    }
}

impl LockSet {
    pub(super) fn new(locks: crate::LockSet, runtime: &Arc<Runtime>) -> Self {
        let runtime = Arc::clone(runtime);
        Self { locks, runtime }
    }

    /// Sets the lease of each lock.
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.locks = self.locks.lease(lease);
        self
    }

    /// Stops renewing each lock `time` after its acquisition.
    #[must_use]
    pub fn max_hold(mut self, time: Duration) -> Self {
        self.locks = self.locks.max_hold(time);
        self
    }

    /// Counts each lock under `class` in the metrics: see [`dlock::Lock::class`](crate::Lock::class).
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        self.locks = self.locks.class(class);
        self
    }

    /// Acquires all locks and waits without a limit.
    ///
    /// # Errors
    /// As [`dlock::LockSet::acquire`](crate::LockSet::acquire), and `Misuse` on a thread that runs a tokio runtime.
    #[track_caller]
    pub fn acquire(&self) -> Result<SetGuard, Error> {
        let guards = self.runtime.block_on(self.locks.acquire())??;
        Ok(SetGuard::new(guards, &self.runtime))
    }

    /// Acquires all locks and waits for at most `limit`.
    ///
    /// # Errors
    /// `Timeout` when the time is up; otherwise as [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_timeout(&self, limit: Duration) -> Result<SetGuard, Error> {
        let guards = self.runtime.block_on(self.locks.acquire_timeout(limit))??;
        Ok(SetGuard::new(guards, &self.runtime))
    }

    /// Acquires all locks if all are free. Returns `None` when another owner holds one of them.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn try_acquire(&self) -> Result<Option<SetGuard>, Error> {
        let guards = self.runtime.block_on(self.locks.try_acquire())??;
        Ok(guards.map(|guards| SetGuard::new(guards, &self.runtime)))
    }
}

/// Several locks, of which the first that is free is acquired, as [`dlock::AnyLock`](crate::AnyLock).
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-any")?;
/// let printer = client.lock_any(["printer:1", "printer:2"])?.acquire()?;
/// println!("printing on {}", printer.name());
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct AnyLock {
    locks: crate::AnyLock,
    runtime: Arc<Runtime>,
}

impl Deref for AnyLock {
    type Target = crate::AnyLock;

    fn deref(&self) -> &crate::AnyLock {
        &self.locks
    }
}

impl AnyLock {
    pub(super) fn new(locks: crate::AnyLock, runtime: &Arc<Runtime>) -> Self {
        let runtime = Arc::clone(runtime);
        Self { locks, runtime }
    }

    /// Sets the lease of each lock.
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.locks = self.locks.lease(lease);
        self
    }

    /// Stops renewing the lock `time` after its acquisition.
    #[must_use]
    pub fn max_hold(mut self, time: Duration) -> Self {
        self.locks = self.locks.max_hold(time);
        self
    }

    /// Counts the locks under `class` in the metrics: see [`dlock::Lock::class`](crate::Lock::class).
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        self.locks = self.locks.class(class);
        self
    }

    /// Acquires one of the locks and waits without a limit.
    ///
    /// # Errors
    /// As [`dlock::AnyLock::acquire`](crate::AnyLock::acquire), and `Misuse` on a thread that runs a tokio runtime.
    #[track_caller]
    pub fn acquire(&self) -> Result<Guard, Error> {
        let guard = self.runtime.block_on(self.locks.acquire())??;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Acquires one of the locks and waits for at most `limit`.
    ///
    /// # Errors
    /// `Timeout` when the time is up; otherwise as [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_timeout(&self, limit: Duration) -> Result<Guard, Error> {
        let guard = self.runtime.block_on(self.locks.acquire_timeout(limit))??;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Acquires the first lock that is free. Returns `None` when all are held.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        let guard = self.runtime.block_on(self.locks.try_acquire())??;
        Ok(guard.map(|guard| Guard::new(guard, &self.runtime)))
    }
}
