//! Client for blocking callers.

use super::{
    election::{Election, Job},
    guard::Guard,
    lock::{AnyLock, Lock, LockSet, RwLock},
    runtime::{Runtime, refuse_async},
};
use crate::{Detached, Error, NotAttached, ShutdownReport};
use std::{ops::Deref, sync::Arc, time::Duration};

/// Connects to the store of a URL, as [`dlock::connect`](crate::connect) does.
///
/// # Errors
/// As [`dlock::connect`](crate::connect). `Misuse` on a thread that runs a tokio runtime. `Unavailable` when the
/// system gives no thread.
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// let client = dlock::blocking::connect("memory:orders?dlock.lease=10s")?;
/// # drop(client); Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
pub fn connect(url: &str) -> Result<Client, Error> {
    build(crate::connect(url))
}

/// Makes a client of a future, which runs on the client's own runtime: with settings of the builder, or over the
/// application's own connections.
///
/// # Errors
/// Those of the future, and as [`connect`].
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::blocking::build(async {
///     let builder = dlock::builder("memory:orders").await?;
///     builder.poll_interval(Duration::from_millis(250)).build()
/// })?;
/// # drop(client); Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
pub fn build(client: impl Future<Output = Result<crate::Client, Error>>) -> Result<Client, Error> {
    let runtime = Arc::new(Runtime::start()?);
    let client = runtime.block_on(client)??;
    Ok(Client { client, runtime })
}

/// A handle to the locks in one store, for blocking callers. Cheap to clone.
///
/// Its thread ends when the last clone, lock and guard of it is dropped.
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// let client = dlock::blocking::connect("memory:orders")?;
/// std::thread::scope(|scope| {
///     for _ in 0..2 {
///         scope.spawn(|| -> Result<(), dlock::Error> {
///             let _guard = client.lock("orders:42")?.acquire()?; // one thread at a time
///             Ok(())
///         });
///     }
/// });
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    client: crate::Client,
    runtime: Arc<Runtime>,
}

impl Deref for Client {
    type Target = crate::Client;

    fn deref(&self) -> &crate::Client {
        &self.client
    }
}

impl Client {
    /// Returns the lock of this name. It does no I/O.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal.
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock, Error> {
        Ok(Lock::new(self.client.lock(name)?, &self.runtime))
    }

    /// Returns the lock of this name, to be held by many readers or one writer. It does no I/O.
    ///
    /// # Errors
    /// As [`dlock::Client::rw_lock`](crate::Client::rw_lock).
    pub fn rw_lock(&self, name: impl AsRef<str>) -> Result<RwLock, Error> {
        Ok(RwLock::new(&self.client.rw_lock(name)?, &self.runtime))
    }

    /// Returns the lock of this name, to be held by up to `permits` at once. It does no I/O.
    ///
    /// # Errors
    /// As [`dlock::Client::semaphore`](crate::Client::semaphore).
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock, Error> {
        let semaphore = self.client.semaphore(name, permits)?;
        Ok(Lock::new(semaphore, &self.runtime))
    }

    /// Returns these locks, to be acquired all together or not at all. It does no I/O.
    ///
    /// # Errors
    /// As [`dlock::Client::lock_all`](crate::Client::lock_all).
    pub fn lock_all<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<LockSet, Error> {
        Ok(LockSet::new(self.client.lock_all(names)?, &self.runtime))
    }

    /// Returns these locks, of which the first that is free is acquired. It does no I/O.
    ///
    /// # Errors
    /// As [`dlock::Client::lock_any`](crate::Client::lock_any).
    pub fn lock_any<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<AnyLock, Error> {
        Ok(AnyLock::new(self.client.lock_any(names)?, &self.runtime))
    }

    /// Returns the election of this name. It does no I/O.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal.
    pub fn election(&self, name: impl AsRef<str>) -> Result<Election, Error> {
        Ok(Election::new(self.client.election(name)?, &self.runtime))
    }

    /// Returns the job of this name. It does no I/O.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal.
    pub fn job(&self, name: impl AsRef<str>) -> Result<Job, Error> {
        Ok(Job::new(self.client.job(name)?, &self.runtime))
    }

    /// Turns a detached hold into a guard again: see [`dlock::Client::attach`](crate::Client::attach).
    ///
    /// # Errors
    /// As [`dlock::Client::attach`](crate::Client::attach), and `Misuse` on a thread that runs a tokio runtime.
    ///
    /// # Examples
    /// ```
    /// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::blocking::connect("memory:blocking-attach")?;
    /// let guard = client.lock("report")?.acquire()?;
    /// let detached = guard.into_async().detach()?; // held for the rest of its lease, and not renewed
    /// let guard = client.attach(detached)?;
    /// guard.release()?;
    /// # Ok(()) }
    /// # #[cfg(not(feature = "memory"))] fn main() {}
    /// ```
    #[expect(
        clippy::result_large_err,
        reason = "the error returns the hold, as that of the async API does"
    )]
    #[track_caller]
    pub fn attach(&self, detached: Detached) -> Result<Guard, NotAttached> {
        let attached = match refuse_async() {
            Ok(()) => self.runtime.wait(self.client.attach(detached)),
            Err(error) => Err(NotAttached::new(detached, error)),
        };
        Ok(Guard::new(attached?, &self.runtime))
    }

    /// Asks the store for an answer, for a health check: see [`dlock::Client::ping`](crate::Client::ping).
    ///
    /// # Errors
    /// As [`dlock::Client::ping`](crate::Client::ping), and `Misuse` on a thread that runs a tokio runtime.
    pub fn ping(&self) -> Result<(), Error> {
        self.runtime.block_on(self.client.ping())?
    }

    /// Shuts the client down: see [`dlock::Client::shutdown`](crate::Client::shutdown). Waits at most for `grace` and
    /// a few seconds.
    ///
    /// # Errors
    /// `ShuttingDown` when it was shut down before. `Misuse` on a thread that runs a tokio runtime.
    pub fn shutdown(&self, grace: Duration) -> Result<ShutdownReport, Error> {
        self.block_on(self.client.shutdown(grace))?
    }

    /// Waits for a future of the async API on this thread.
    ///
    /// # Errors
    /// `Misuse` on a thread that runs a tokio runtime.
    ///
    /// # Examples
    /// ```
    /// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
    /// let client = dlock::blocking::connect("memory:orders")?;
    /// let shown = client.block_on(client.admin().inspect("orders:42"))??;
    /// assert_eq!(shown.holds, 0);
    /// # Ok(()) }
    /// # #[cfg(not(feature = "memory"))] fn main() {}
    /// ```
    pub fn block_on<F: IntoFuture>(&self, future: F) -> Result<F::Output, Error> {
        self.runtime.block_on(future.into_future())
    }
}
