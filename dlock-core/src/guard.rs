//! Guard: a held lock, and its release.

use crate::{
    call::ATTEMPT,
    clock::Instant,
    detach::{Detached, NotDetached},
    driver::{Release, Released},
    error::{Effect, Error, ErrorKind, LossReason, RetryClass},
    flaw::Flaw,
    hold::{GuardState, Hold},
    identity::{FencingToken, Fingerprint},
    inner::{Active, Inner},
    janitor::{Job, PROMPT},
    name::LockName,
    pass::Pass,
    scope,
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
#[must_use = "the lock is released when the guard is dropped"]
#[clippy::has_significant_drop]
pub struct Guard {
    inner: Arc<Inner>,
    hold: Arc<Hold>,
    done: bool,
}

/// The outcome of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The name is free, or was handed to the next waiter.
    Released,
    /// Other holds of the same incarnation are left.
    StillHeld {
        /// How many. It is 1, too, when a lost answer leaves only the fact that some are left.
        holds: u32,
    },
    /// No hold is left, and the lock stays unavailable for its minimum hold.
    Kept {
        /// For how long.
        rest: Duration,
    },
}

impl ReleaseOutcome {
    /// The outcome of a release that found its hold.
    pub(crate) fn of(released: &Released) -> Self {
        match released {
            Released::StillHeld { holds } => Self::StillHeld { holds: holds.get() },
            Released::Kept { rest } => Self::Kept { rest: *rest },
            Released::Freed | Released::NotHeld { .. } => Self::Released,
        }
    }
}

impl Guard {
    pub(crate) fn new(inner: Arc<Inner>, hold: Arc<Hold>) -> Self {
        Self {
            inner,
            hold,
            done: false,
        }
    }

    /// The name of the lock.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.hold.name
    }

    /// The fencing token: send it with every write to the protected resource. It is 0 on a store without
    /// tokens ([`Capabilities::fencing`](crate::Capabilities::fencing)); a resource that has seen a token
    /// refuses 0.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.hold.token.unwrap_or(FencingToken(0))
    }

    /// How far the lock can be trusted now. It compares clocks and does no I/O.
    #[must_use]
    pub fn state(&self) -> GuardState {
        self.hold.state(&self.inner.clock)
    }

    /// Checks that the lock is still held. After a pause or suspend of any length, it returns `Lost` before
    /// the next line runs. It compares clocks in the caller's own thread and does no I/O, so it does not
    /// depend on the watchdog having run.
    ///
    /// # Errors
    /// `Lost` with the reason.
    pub fn check(&self) -> Result<(), Error> {
        match self.state() {
            GuardState::Held | GuardState::Uncertain => Ok(()),
            GuardState::Lost(reason) => Err(self.lost_error(reason)),
        }
    }

    /// How long the lock is certain to be held from now if no further renewal succeeds; zero when it is
    /// lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.state() {
            GuardState::Lost(_) => Duration::ZERO,
            _ => self.hold.deadline().since(self.inner.clock.now()),
        }
    }

    /// How long the lock would stay unavailable if it were released now: the rest of
    /// [`Lock::min_hold`](crate::Lock::min_hold).
    #[must_use]
    pub fn min_hold_remaining(&self) -> Duration {
        self.inner.rest(self.hold.keep()).unwrap_or_default()
    }

    /// Resolves when the lock can no longer be trusted: at or before its deadline, even while a renewal
    /// hangs, and on any executor.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing; it may be called again.
    pub async fn lost(&self) -> LossReason {
        self.hold.lost(&self.inner.clock).await
    }

    /// Resolves when the client begins to shut down. Finish and release then: the lease is renewed for the
    /// grace period only.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn shutting_down(&self) {
        self.inner.shutting_down().await;
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
    pub async fn scope<F: Future>(&self, work: F) -> F::Output {
        scope::enter(&self.inner.store, &self.hold, work).await
    }

    /// The fingerprint of its owner, as logs, errors and [`inspect`](crate::Client::inspect) show it.
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
    /// `with_owner`.
    pub fn pass(&self) -> Result<Pass, Error> {
        if self.hold.reusable {
            return Err(Pass::refused().at(self.inner.caps.backend, &self.hold.name));
        }
        Ok(self.credential())
    }

    fn credential(&self) -> Pass {
        let token = self.token();
        Pass::new(
            Arc::clone(&self.inner.store),
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
    pub async fn release(mut self) -> Result<ReleaseOutcome, Error> {
        self.done = true;
        match self.stop() {
            (GuardState::Lost(reason), _releasing) => Err(self.lost_error(reason)), // dropping `_releasing` does the rest
            (_, mut releasing) => {
                // If this is refused, the background releases the hold.
                let here = self.inner.check_runtime();
                here.map_err(|error| error.at(self.inner.caps.backend, &self.hold.name))?;
                releasing.answered().await
            }
        }
    }

    /// Turns the guard into a plain value, which drop, watchdog and shutdown no longer manage. The hold
    /// lasts for the rest of its lease, unless [`Client::attach`](crate::Client::attach) takes it up again,
    /// in this process or another. Dropping the value releases nothing.
    ///
    /// # Errors
    /// [`NotDetached`] returns the guard: `Unsupported` where holds are bound to the client's session,
    /// `Lost` when the lock is lost.
    pub fn detach(mut self) -> Result<Detached, NotDetached> {
        let refused = if self.inner.caps.session_bound {
            let message =
                "holds of this store end with the client's session and cannot be detached";
            let error = Error::new(ErrorKind::Unsupported, message);
            Some(error.at(self.inner.caps.backend, &self.hold.name))
        } else {
            let detached = self.hold.detach(&self.inner.clock);
            detached.err().map(|reason| self.lost_error(reason))
        };
        if let Some(error) = refused {
            return Err(NotDetached { guard: self, error });
        }
        self.done = true;
        if !self.inner.flawed(Flaw::DetachedIsRenewed) {
            self.forget();
        }
        let deadline = self.hold.deadline();
        self.inner.detached().insert(self.hold.id, deadline);
        self.inner.leave_book(&self.hold);
        // No local release will wake this client's waiters, so they poll now.
        self.inner.poke(&self.hold.name);
        Ok(Detached::of(&self.hold, self.credential()))
    }

    /// Stops renewing first: whatever the outcome of the release, nothing is renewed after it.
    fn stop(&self) -> (GuardState, Releasing) {
        let releasing = Releasing {
            inner: Inner::active(Arc::clone(&self.inner)),
            hold: Arc::clone(&self.hold),
            began: self.inner.clock.now(),
            open: true,
        };
        let before = self.hold.releasing(releasing.began);
        if !self.inner.flawed(Flaw::RenewsAfterRelease) {
            self.forget();
        }
        self.inner.leave_book(&self.hold);
        (before, releasing.unless(before))
    }

    fn forget(&self) {
        if let Some(key) = self.hold.key() {
            self.inner.watchdog.forget(key);
        }
    }

    fn lost_error(&self, reason: LossReason) -> Error {
        let lease = self.hold.lease();
        let hurried =
            lease.is_renewed() && lease.length() < HURRIED && self.hold.terms.end().is_none();
        let error = match reason {
            LossReason::Deadline if self.hold.is_unattended() => Error::lost_unattended(),
            LossReason::Deadline if hurried => Error::lost_too_short(lease.length()),
            _ => Error::lost(reason),
        };
        error.at(self.inner.caps.backend, &self.hold.name)
    }
}

/// Below this lease length, each renewal has less than a second. A slow or distant store may then be why
/// the lease expired.
const HURRIED: Duration = Duration::from_secs(6);

/// A release in flight. When it is dropped, the cleanup finishes it in the background.
struct Releasing {
    inner: Active<Arc<Inner>>,
    hold: Arc<Hold>,
    began: Instant,
    open: bool,
}

impl Releasing {
    /// Decides whether a release is needed. A hold that another owner has taken over, or that ended with
    /// its session, needs none, unless a late copy of its acquire may yet revive it, or has done so
    /// unnoticed. A hold that shutdown left to its lease is not released.
    fn unless(mut self, before: GuardState) -> Self {
        let lease = self.hold.lease().length();
        let copy = self.hold.unsettled;
        let revivable = copy.is_some_and(|until| until + lease > self.began)
            && !self.inner.flawed(Flaw::RevivableForgotten);
        self.open = match before {
            GuardState::Held | GuardState::Uncertain | GuardState::Lost(LossReason::Deadline) => {
                true
            }
            GuardState::Lost(LossReason::NotHeld | LossReason::Session) => revivable,
            GuardState::Lost(LossReason::Shutdown) => false,
        };
        self
    }

    async fn answered(&mut self) -> Result<ReleaseOutcome, Error> {
        let mut sent = self.began;
        let end = (sent + ATTEMPT).min(self.hold.deadline() + ATTEMPT / 5);
        let mut unanswered = false;
        let mut pause = Duration::from_millis(5);
        loop {
            let mut request = Release::new(self.hold.name.clone(), self.hold.owner, self.hold.id);
            request.keep = self.inner.rest(self.hold.keep());
            match self.inner.release_once(request, end).await {
                Some(Ok(released)) => return self.finish(released, unanswered, sent),
                Some(Err(error)) => {
                    unanswered |= error.effect() == Effect::Unknown;
                    if error.retry() == RetryClass::Never && !unanswered {
                        return Err(Error::from(error).at(self.inner.caps.backend, &self.hold.name));
                    }
                    if error.retry() == RetryClass::Never || self.inner.clock.now() + pause >= end {
                        return Err(self.unknown().after(error));
                    }
                }
                None => return Err(self.unknown()),
            }
            self.inner
                .clock
                .sleep_until(self.inner.clock.now() + pause)
                .await;
            pause *= 2;
            sent = self.inner.clock.now();
        }
    }

    fn finish(
        &mut self,
        released: Released,
        unanswered: bool,
        sent: Instant,
    ) -> Result<ReleaseOutcome, Error> {
        self.open = false;
        let found = unanswered || !matches!(released, Released::NotHeld { .. });
        if found {
            self.hold.released();
        } else {
            self.hold.not_found();
        }
        self.inner.poke(&self.hold.name);
        self.settle_late_copies(sent);
        let Inner { caps, .. } = &**self.inner;
        let outcome = match released {
            // An earlier copy released it and its answer was lost; `by` shows what is left.
            Released::NotHeld { by: Some(by) }
                if found && by.token.is_some() && by.token == self.hold.token =>
            {
                ReleaseOutcome::StillHeld { holds: 1 }
            }
            Released::NotHeld { .. } if found && self.kept().is_some() => ReleaseOutcome::Kept {
                rest: self.kept().unwrap_or_default(),
            },
            Released::NotHeld { .. } if found || self.inner.flawed(Flaw::NotHeldIsReleased) => {
                ReleaseOutcome::Released
            }
            Released::NotHeld { .. } => {
                tracing::warn!(
                    target: "dlock::lost", lock = %self.hold.name, backend = caps.backend,
                    owner = %self.hold.owner, "the lock was no longer held when it was released"
                );
                return Err(Error::lost(LossReason::NotHeld).at(caps.backend, &self.hold.name));
            }
            released => ReleaseOutcome::of(&released),
        };
        tracing::debug!(
            target: "dlock::release", lock = %self.hold.name, backend = caps.backend,
            owner = %self.hold.owner, ?outcome, "released"
        );
        Ok(outcome)
    }

    /// An unanswered copy of the acquire may still run and revive the hold. A second release follows,
    /// unless this one was sent when the copy no longer could run, and was answered fast enough to prove
    /// that it ran then.
    fn settle_late_copies(&self, sent: Instant) {
        let Some(until) = self.hold.unsettled else {
            return;
        };
        let now = self.inner.clock.now();
        if until > sent || now.since(sent) > PROMPT {
            let mut job = Job::of(&self.hold);
            job.unsettled = Some(until.max(now));
            self.inner.settle(job);
        }
    }

    fn kept(&self) -> Option<Duration> {
        self.inner.rest(self.hold.keep())
    }

    fn unknown(&self) -> Error {
        Error::new(
            ErrorKind::Indeterminate,
            "the store did not confirm the release: it goes on in the background, and the lease ends the hold at the latest",
        )
        .with_effect(Effect::Unknown)
        .with_retry(RetryClass::Never)
        .at(self.inner.caps.backend, &self.hold.name)
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if self.open {
            self.inner.settle(Job::of(&self.hold));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        drop(self.stop());
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
