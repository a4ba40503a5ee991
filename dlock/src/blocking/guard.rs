//! Guards for blocking callers.

use super::runtime::{Runtime, is_async};
use crate::{Error, LockName, LossReason, ReleaseOutcome};
use std::{ops::Deref, sync::Arc, time::Duration};

/// A held lock, for as long as `check()` says so. It dereferences to [`dlock::Guard`](crate::Guard) for all that does
/// not wait: `check`, `remaining`, `state`, `token`, `pass`.
///
/// Dropping it releases the lock and waits for the store's answer, for at most 5 s, without telling the outcome.
/// [`release`](Self::release) tells it. Write `let _guard`, never `let _`, which drops at once.
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-guard")?;
/// let guard = client.lock("report")?.acquire()?;
/// guard.check()?; // still held: now write, with guard.token()
/// guard.release()?;
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[must_use = "the lock is released when the guard is dropped"]
#[clippy::has_significant_drop]
#[derive(Debug)]
pub struct Guard {
    /// Taken by a release.
    guard: Option<crate::Guard>,
    runtime: Arc<Runtime>,
}

impl Deref for Guard {
    type Target = crate::Guard;

    fn deref(&self) -> &crate::Guard {
        let guard = self.guard.as_ref();
        guard.expect("only what consumes the guard takes it")
    }
}

impl Guard {
    pub(super) fn new(guard: crate::Guard, runtime: &Arc<Runtime>) -> Self {
        Self {
            guard: Some(guard),
            runtime: Arc::clone(runtime),
        }
    }

    /// Releases the lock and reports the outcome.
    ///
    /// # Errors
    /// As [`dlock::Guard::release`](crate::Guard::release). `Misuse` on a thread that runs a tokio runtime; the lock
    /// is then released in the background.
    pub fn release(self) -> Result<ReleaseOutcome, Error> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.into_async().release())?
    }

    /// Waits until the lock can no longer be trusted, for at most `limit`: a pause that ends early with the reason
    /// when the lock is lost. `None` when it is still held.
    ///
    /// # Errors
    /// `Misuse` on a thread that runs a tokio runtime.
    ///
    /// # Examples
    /// ```
    /// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::blocking::connect("memory:blocking-lost")?;
    /// use std::time::Duration;
    ///
    /// let guard = client.lock("report")?.acquire()?;
    /// let lost = guard.wait_lost(Duration::from_millis(10))?;
    /// assert_eq!(lost, None);
    /// # Ok(()) }
    /// # #[cfg(not(feature = "memory"))] fn main() {}
    /// ```
    pub fn wait_lost(&self, limit: Duration) -> Result<Option<LossReason>, Error> {
        let lost = async { tokio::time::timeout(limit, self.lost()).await.ok() };
        self.runtime.block_on(lost)
    }

    /// The guard of the async API, which holds the lock from here on. Its runtime is the client's: keep the client.
    #[expect(
        clippy::missing_panics_doc,
        reason = "only what consumes the guard takes it"
    )]
    pub fn into_async(mut self) -> crate::Guard {
        let guard = self.guard.take();
        guard.expect("only what consumes the guard takes it")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take()
            && !is_async()
        {
            drop(self.runtime.block_on(guard.release()));
        }
    }
}

/// Several held locks, as [`dlock::SetGuard`](crate::SetGuard). Dropping it is like dropping a [`Guard`].
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-guards")?;
/// let guards = client.lock_all(["account:1", "account:2"])?.acquire()?;
/// for (name, released) in guards.release()? {
///     println!("{name}: {released:?}");
/// }
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[must_use = "the locks are released when the guard is dropped"]
#[clippy::has_significant_drop]
#[derive(Debug)]
pub struct SetGuard {
    /// Taken by a release.
    guards: Option<crate::SetGuard>,
    runtime: Arc<Runtime>,
}

impl Deref for SetGuard {
    type Target = crate::SetGuard;

    fn deref(&self) -> &crate::SetGuard {
        let guards = self.guards.as_ref();
        guards.expect("only a release takes them")
    }
}

impl SetGuard {
    pub(super) fn new(guards: crate::SetGuard, runtime: &Arc<Runtime>) -> Self {
        Self {
            guards: Some(guards),
            runtime: Arc::clone(runtime),
        }
    }

    /// Releases all locks and reports the outcome of each.
    ///
    /// # Errors
    /// `Misuse` on a thread that runs a tokio runtime; the locks are then released in the background.
    #[expect(
        clippy::type_complexity,
        reason = "the outcomes as the async API has them"
    )]
    pub fn release(mut self) -> Result<Vec<(LockName, Result<ReleaseOutcome, Error>)>, Error> {
        let guards = self.guards.take();
        let released = guards.map(crate::SetGuard::release);
        let released = async {
            match released {
                Some(released) => released.await,
                None => Vec::new(),
            }
        };
        self.runtime.block_on(released)
    }
}

impl Drop for SetGuard {
    fn drop(&mut self) {
        if let Some(guards) = self.guards.take()
            && !is_async()
        {
            drop(self.runtime.block_on(guards.release()));
        }
    }
}
