//! A lock that is held.

use crate::{
    call::ATTEMPT,
    clock::Instant,
    detach::{Detached, NotDetached},
    driver::{Release, Released},
    error::{Effect, Error, ErrorKind, LossReason, Retry},
    flaw::Flaw,
    hold::{Hold, State},
    identity::FencingToken,
    inner::{Active, Inner},
    janitor::{Job, PROMPT},
    name::LockName,
    pass::Pass,
    scope,
};
use std::{fmt, future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

/// A lock that is held, as long as [`check`](Self::check) says so.
///
/// **Dropping it does not release it at once, and does not tell whether it was released**: the release is sent in the background, on the
/// runtime of the client, and if that is gone the lease has to run out. [`release`](Self::release) is the only way to know.
/// Write `let _guard`, never `let _`, which drops at once and which `must_use` does not catch.
///
/// No lock service can stop code that does not ask: a process that was paused may write after its lease is over. Ask with
/// [`check`](Self::check) before a write, run cancellable work under [`run`](Self::run), and where a late write costs money send
/// [`token`](Self::token) along and let the resource refuse a smaller one than it has seen.
#[must_use = "the lock is released when the guard is dropped"]
#[clippy::has_significant_drop]
pub struct Guard {
    inner: Arc<Inner>,
    hold: Arc<Hold>,
    done: bool,
}

/// What a release did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The name is free, or the next one's.
    Released,
    /// Other holds of the same incarnation are left.
    StillHeld {
        /// How many; 1 also where a lost answer leaves only the fact.
        holds: u32,
    },
    /// Nobody is inside, and the name stays shut.
    Kept {
        /// For how long.
        rest: Duration,
    },
}

impl Outcome {
    /// What a release did that found what it was to release.
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

    /// The fencing token: send it with every write to the protected resource. 0 on a store that has none
    /// ([`Capabilities::fencing`](crate::Capabilities::fencing)), which every resource that has seen a token refuses.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.hold.token.unwrap_or(FencingToken(0))
    }

    /// How far the lock can be trusted now. Compares clocks, no I/O.
    #[must_use]
    pub fn state(&self) -> State {
        self.hold.state(&self.inner.clock)
    }

    /// Whether the lock is still held: after any pause or suspend, of any length, it says `Lost` before the next line runs. Compares
    /// clocks in the caller's own thread, no I/O: it does not depend on the watchdog having run.
    ///
    /// # Errors
    /// `Lost` with the reason.
    pub fn check(&self) -> Result<(), Error> {
        match self.state() {
            State::Held | State::Uncertain => Ok(()),
            State::Lost(reason) => Err(self.lost_error(reason)),
        }
    }

    /// How long the lock is certain to be held from now, if no renewal succeeded any more; zero when it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.state() {
            State::Lost(_) => Duration::ZERO,
            _ => self.hold.deadline().since(self.inner.clock.now()),
        }
    }

    /// How long the name would stay shut if the lock were released now: what is left of [`Lock::at_least_for`](crate::Lock::at_least_for).
    #[must_use]
    pub fn shut_after(&self) -> Duration {
        self.inner.rest(self.hold.keep()).unwrap_or_default()
    }

    /// Resolves when the lock can no longer be trusted: at or before its deadline, also while a renewal hangs.
    ///
    /// # Cancel safety
    /// Nothing is lost when it is dropped; it may be called again.
    pub async fn lost(&self) -> LossReason {
        self.hold.lost(&self.inner.clock).await
    }

    /// Resolves when the client begins to shut down: finish and release, the lock is kept for the grace period only.
    ///
    /// # Cancel safety
    /// Nothing is lost when it is dropped.
    pub async fn revoked(&self) {
        self.inner.revoked().await;
    }

    /// Runs `work` while the lock is held and drops it the moment the lock is lost.
    ///
    /// # Errors
    /// `Lost` when it was, also when the work came to its end in the very moment.
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

    /// Runs `work` in the scope of this lock. **Branches of one scope are not excluded from each other**: inside, an acquire of this
    /// lock's name, through any client of the same store, re-enters this very incarnation at once; two branches that both
    /// acquire it run side by side. All other names get fresh owners, and tasks spawned inside are outside.
    ///
    /// # Cancel safety
    /// Dropping it drops the work.
    pub async fn scope<F: Future>(&self, work: F) -> F::Output {
        scope::enter(&self.inner.store, &self.hold, work).await
    }

    /// The right to enter this incarnation, as a value: see [`Lock::join`](crate::Lock::join). A bearer secret.
    #[must_use]
    pub fn pass(&self) -> Pass {
        let token = self.token();
        Pass::new(
            Arc::clone(&self.inner.store),
            self.hold.name.clone(),
            self.hold.owner,
            token,
        )
    }

    /// Gives the lock back and says what came of it.
    ///
    /// # Errors
    /// `Lost` when it was not held any more, with the reason: what ran under it last may have run beside another holder.
    /// `Indeterminate` when the store did not answer before the lease was over or within 5 s: it goes on being released in the background.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background, as dropping the guard does.
    pub async fn release(mut self) -> Result<Outcome, Error> {
        self.done = true;
        match self.stop() {
            (State::Lost(reason), _releasing) => Err(self.lost_error(reason)), // the rest is the drop's
            (_, mut releasing) => releasing.answered().await,
        }
    }

    /// Takes the hold out of drop, watchdog and shutdown, as a plain value: it lasts what its lease has left, unless
    /// [`Client::attach`](crate::Client::attach) takes it up again, in this process or another one. Dropping the value gives nothing back.
    ///
    /// # Errors
    /// [`NotDetached`] gives the guard back: where holds are bound to the client's session (`Unsupported`), or when it is lost.
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
        // Nobody tells the waiters of this client when it is given back.
        self.inner.poke(&self.hold.name);
        Ok(Detached::of(&self.hold, self.pass()))
    }

    /// Stops renewing, first of all: whatever comes of the release, nothing is renewed after it.
    fn stop(&self) -> (State, Releasing) {
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
            lease.is_kept() && lease.length() < HURRIED && self.hold.terms.end().is_none();
        let error = match reason {
            LossReason::Deadline if hurried => Error::lost_in_a_hurry(lease.length()),
            _ => Error::lost(reason),
        };
        error.at(self.inner.caps.backend, &self.hold.name)
    }
}

/// Leases whose renewals have less than a second each: a store that is slow, or far away, may be the reason why one is over.
const HURRIED: Duration = Duration::from_secs(6);

/// A release under way; dropped, it goes on in the background.
struct Releasing {
    inner: Active<Arc<Inner>>,
    hold: Arc<Hold>,
    began: Instant,
    open: bool,
}

impl Releasing {
    /// What another already has, or the session took along, needs no release, unless a late copy of its acquire may yet revive it, or
    /// has while its user looked away. What shutdown left to its lease is left.
    fn unless(mut self, before: State) -> Self {
        let lease = self.hold.lease().length();
        let copy = self.hold.unsettled;
        let revivable = copy.is_some_and(|until| until + lease > self.began)
            && !self.inner.flawed(Flaw::RevivableForgotten);
        self.open = match before {
            State::Held | State::Uncertain | State::Lost(LossReason::Deadline) => true,
            State::Lost(LossReason::NotHeld | LossReason::Session) => revivable,
            State::Lost(LossReason::Shutdown) => false,
        };
        self
    }

    async fn answered(&mut self) -> Result<Outcome, Error> {
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
                    if error.retry() == Retry::Never && !unanswered {
                        return Err(Error::from(error).at(self.inner.caps.backend, &self.hold.name));
                    }
                    if error.retry() == Retry::Never || self.inner.clock.now() + pause >= end {
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
    ) -> Result<Outcome, Error> {
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
            // An earlier copy did it, and its answer was lost: what is left is known from elsewhere.
            Released::NotHeld { by: Some(by) }
                if found && by.token.is_some() && by.token == self.hold.token =>
            {
                Outcome::StillHeld { holds: 1 }
            }
            Released::NotHeld { .. } if found && self.kept().is_some() => Outcome::Kept {
                rest: self.kept().unwrap_or_default(),
            },
            Released::NotHeld { .. } if found || self.inner.flawed(Flaw::NotHeldIsReleased) => {
                Outcome::Released
            }
            Released::NotHeld { .. } => {
                tracing::warn!(
                    target: "dlock::lost", lock = %self.hold.name, backend = caps.backend,
                    owner = %self.hold.owner, "the lock was not held any more when it was released"
                );
                return Err(Error::lost(LossReason::NotHeld).at(caps.backend, &self.hold.name));
            }
            released => Outcome::of(&released),
        };
        tracing::debug!(
            target: "dlock::release", lock = %self.hold.name, backend = caps.backend,
            owner = %self.hold.owner, ?outcome, "released"
        );
        Ok(outcome)
    }

    /// An unanswered copy of the acquire may still come and revive the hold: unless this release was sent when it no longer could,
    /// and answered so fast that it ran then, a second one follows.
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
            "the store did not confirm the release: it goes on in the background, and the lease ends it at the latest",
        )
        .with_effect(Effect::Unknown)
        .with_retry(Retry::Never)
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
