//! Guard: a held lock, and its release.

use crate::{
    engine::{
        Engine,
        hold::{GuardState, Hold},
        release::{ReleaseOutcome, Releasing},
        scope,
    },
    error::{Error, LossReason, UNATTENDED, about},
    lease::Lease,
    name::LockName,
    owner::{Fingerprint, Mode},
    pass::Pass,
    token::FencingToken,
};
use std::{fmt, future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

/// A held lock. It is held for as long as [`check`](Self::check) says so.
///
/// **Dropping it does not release the lock at once, and does not tell whether it was released.** The
/// release is sent in the background, on the client's runtime; if that runtime is gone, the lease has to
/// run out. Only [`release`](Self::release) reports the outcome. Write `let _guard`, never `let _`, which
/// drops at once and which `must_use` does not catch.
///
/// No lock service can stop code that does not check: a paused process may write after its lease is over.
/// Call [`check`](Self::check) before a write, and run cancellable work under [`run`](Self::run). Where a
/// late write is costly, send [`token`](Self::token) along and let the resource refuse a token smaller than
/// one it has seen.
///
/// # Examples
/// ```
/// # async fn example(lock: dlock_core::Lock) -> Result<(), dlock_core::Error> {
/// let guard = lock.acquire().await?;
/// // … some work …
/// guard.check()?; // still held: now write, with guard.token()
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "the lock is released when the guard is dropped"]
#[clippy::has_significant_drop]
pub struct Guard {
    pub(crate) engine: Arc<Engine>,
    pub(crate) hold: Arc<Hold>,
    /// The hold is released or detached: dropping the guard does nothing.
    pub(crate) done: bool,
}

impl Guard {
    pub(crate) fn new(engine: Arc<Engine>, hold: Arc<Hold>) -> Self {
        Self {
            engine,
            hold,
            done: false,
        }
    }

    /// The name of the lock.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// println!("working under {}", guard.name());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.hold.name
    }

    /// The fencing token, never 0: send it with every write to the protected resource.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// let sql = "UPDATE account SET balance = ?, fence = ? WHERE id = ? AND fence <= ?";
    /// let fence = guard.token().0;
    /// # let _ = (sql, fence);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.hold.token
    }

    /// How far the lock can be trusted now. It compares clocks and does no I/O.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// use dlock_core::GuardState;
    ///
    /// match guard.state() {
    ///     GuardState::Held => {}
    ///     GuardState::Uncertain => println!("a renewal is late, {:?} left", guard.remaining()),
    ///     other => println!("{other:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn state(&self) -> GuardState {
        self.hold.state(&self.engine.clock)
    }

    /// Checks that the lock is still held. After a pause or suspend of any length, it returns `Lost` before
    /// the next line runs. It compares clocks in the caller's own thread and does no I/O, so it does not
    /// depend on the watchdog having run.
    ///
    /// # Errors
    /// `Lost` with the reason.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// for page in 0..100 {
    ///     guard.check()?; // stops the loop with `Lost`
    ///     println!("page {page}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn check(&self) -> Result<(), Error> {
        match self.state() {
            GuardState::Held | GuardState::Uncertain => Ok(()),
            GuardState::Lost(reason) => Err(self.lost_error(reason)),
        }
    }

    /// How long the lock is certain to be held from now if no further renewal succeeds; zero when it is
    /// lost.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// if guard.remaining() > Duration::from_secs(5) {
    ///     println!("time enough for a write that takes at most 5 s");
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.state() {
            GuardState::Lost(_) => Duration::ZERO,
            _ => self.hold.deadline().since(self.engine.clock.now()),
        }
    }

    /// How long the lock would stay unavailable if it were released now: the rest of
    /// [`Lock::min_hold`](crate::Lock::min_hold).
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// println!("other hosts wait {:?} after the release", guard.min_hold_remaining());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn min_hold_remaining(&self) -> Duration {
        self.engine
            .rest(self.hold.min_hold_until())
            .unwrap_or_default()
    }

    /// Resolves when the lock can no longer be trusted: at or before its deadline, even while a renewal
    /// hangs, and on any executor.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing; it may be called again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// # async fn work() {}
    /// tokio::select! {
    ///     () = work() => println!("done"),
    ///     reason = guard.lost() => println!("stopped: {reason:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn lost(&self) -> LossReason {
        self.hold.lost(&self.engine.clock).await
    }

    /// Resolves when the client begins to shut down. Finish and release then: the lease is renewed for the
    /// grace period only.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// # async fn next_item() {}
    /// loop {
    ///     tokio::select! {
    ///         () = next_item() => guard.check()?,
    ///         () = guard.shutting_down() => break,
    ///     }
    /// }
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn shutting_down(&self) {
        self.engine.shutting_down().await;
    }

    /// Runs `work` while the lock is held, and drops the work the moment the lock is lost.
    ///
    /// # Errors
    /// `Lost` when the lock was lost, even if the work ended at that same moment.
    ///
    /// # Cancel safety
    /// Dropping it drops the work.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// guard.run(async { /* every await in here is a point where it may end */ }).await?;
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let mut work = pin!(work);
        let mut lost = pin!(self.lost());
        poll_fn(|cx| {
            if let Poll::Ready(reason) = lost.as_mut().poll(cx) {
                return Poll::Ready(Err(self.lost_error(reason)));
            }
            match work.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(self.check().map(|()| output)),
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    }

    /// Runs `work` in the scope of this lock. **Branches of one scope do not exclude each other.** Inside,
    /// an acquire of this lock's name, through any client of the same store, re-enters this incarnation at
    /// once; two branches that both acquire it run side by side. All other names get fresh owners. Tasks
    /// spawned inside are outside the scope.
    ///
    /// # Cancel safety
    /// Dropping it drops the work.
    ///
    /// # Examples
    /// ```
    /// # async fn example(lock: dlock_core::Lock, guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// // A library that acquires the same name by itself gets in, instead of waiting for its caller.
    /// let inner = guard.scope(async { lock.acquire().await }).await?;
    /// assert_eq!(inner.token(), guard.token());
    /// # Ok(()) }
    /// ```
    pub async fn scope<F: Future>(&self, work: F) -> F::Output {
        scope::enter(&self.engine.store, &self.hold, work).await
    }

    /// The fingerprint of its owner, as logs, errors and [`inspect`](crate::Admin::inspect) show it.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// println!("held by {}", guard.owner()); // 8 hex digits, safe to log
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn owner(&self) -> Fingerprint {
        self.hold.owner.fingerprint()
    }

    /// Returns the right to re-enter this incarnation, as a value: see [`Lock::join`](crate::Lock::join).
    /// It is a bearer secret.
    ///
    /// # Errors
    /// `Misuse` when the owner was given by [`with_owner`](crate::Lock::with_owner), because the bearer
    /// would be that owner in every other lock, too. Hand on the owner itself, or acquire without
    /// `with_owner`. `Misuse` when the lock is shared, too: all who share it have one owner, so the pass would
    /// outlive this guard.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// let pass = guard.pass()?;
    /// let mut child = std::process::Command::new("worker");
    /// child.env("LOCK_PASS", pass.expose()); // the worker joins with it
    /// # Ok(()) }
    /// ```
    pub fn pass(&self) -> Result<Pass, Error> {
        if self.hold.reusable {
            return Err(Pass::refused().at(self.engine.caps.backend, &self.hold.name));
        }
        if self.hold.owner.mode() != Mode::Exclusive {
            return Err(Error::shared().at(self.engine.caps.backend, &self.hold.name));
        }
        if self.hold.presence.is_some() {
            return Err(Error::depends_on_presence().at(self.engine.caps.backend, &self.hold.name));
        }
        Ok(self.credential())
    }

    pub(crate) fn credential(&self) -> Pass {
        let token = self.token();
        Pass::new(
            Arc::clone(&self.engine.store),
            self.hold.name.clone(),
            self.hold.owner,
            token,
        )
    }

    /// Releases the lock and reports the outcome.
    ///
    /// # Errors
    /// `Lost`, with the reason, when the lock was no longer held: the last work under it may have run
    /// beside another holder. `Indeterminate` when the store did not answer before the lease was over or
    /// within 5 s. `Misuse` outside a tokio runtime with timers. After the latter two, the cleanup goes on
    /// releasing in the background.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background, as dropping the guard does.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// match guard.release().await {
    ///     Ok(_) => println!("done"),
    ///     Err(error) if error.is_lost() => println!("the last work may have run beside another holder"),
    ///     Err(error) => println!("the lease ends it: {error}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn release(mut self) -> Result<ReleaseOutcome, Error> {
        self.done = true;
        // When this returns early, dropping it leaves the rest to the background.
        let mut releasing = Releasing::begin(&self.engine, &self.hold);
        if let GuardState::Lost(reason) = releasing.before {
            return Err(self.lost_error(reason));
        }
        let here = self.engine.check_runtime();
        here.map_err(|error| error.at(self.engine.caps.backend, &self.hold.name))?;
        releasing.answered().await
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        let lease = self.hold.lease();
        let hurried =
            lease.is_renewed() && lease.length() < HURRIED && self.hold.terms.end().is_none();
        let error = match reason {
            LossReason::Deadline | LossReason::Presence if self.hold.is_unattended() => {
                Error::lost_because(reason, UNATTENDED)
            }
            LossReason::Deadline if hurried => {
                let why = format!(
                    " (a renewal of this {} lease had {} to be answered: a store that takes longer needs a longer lease)",
                    about(lease.length()),
                    about(Lease::renew_within(lease.length()))
                );
                Error::lost_because(reason, &why)
            }
            _ => Error::lost(reason),
        };
        error.at(self.engine.caps.backend, &self.hold.name)
    }
}

/// Below this lease length, each renewal has less than a second. A slow or distant store may then be why
/// the lease expired.
const HURRIED: Duration = Duration::from_secs(6);

impl Drop for Guard {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        drop(Releasing::begin(&self.engine, &self.hold));
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.hold.name)
            .field("owner", &self.hold.owner)
            .field("token", &self.hold.token)
            .field("state", &self.state())
            .field("remaining", &self.remaining())
            .finish()
    }
}
