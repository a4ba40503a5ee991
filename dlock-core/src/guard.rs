//! A lock that is held.

use crate::{
    client::Inner,
    detach::{Detached, NotDetached},
    driver::{Release, Released},
    error::{Effect, Error, ErrorKind, LossReason, Retry},
    flaw::Flaw,
    hold::{Hold, State},
    identity::FencingToken,
    janitor::Job,
    name::LockName,
    pass::Pass,
    scope,
    watchdog::Key,
};
use std::{
    fmt,
    future::poll_fn,
    pin::pin,
    sync::{Arc, atomic::Ordering::SeqCst},
    task::Poll,
    time::Duration,
};

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
    key: Key,
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
        /// How many.
        holds: u32,
    },
    /// Nobody is inside, and the name stays shut.
    Kept {
        /// For how long.
        rest: Duration,
    },
}

/// The most one attempt to release may take before it is repeated.
const ATTEMPT: Duration = Duration::from_secs(5);

impl Guard {
    pub(crate) fn new(inner: Arc<Inner>, hold: Arc<Hold>, key: Key) -> Self {
        Self {
            inner,
            hold,
            key,
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
        loop {
            let revoked = self.inner.revoked.notified();
            let mut revoked = pin!(revoked);
            revoked.as_mut().enable();
            if self.inner.is_closing() {
                return;
            }
            revoked.await;
        }
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
        let before = self.stop();
        self.done = true;
        let mut releasing = Releasing {
            inner: Arc::clone(&self.inner),
            hold: Arc::clone(&self.hold),
            open: true,
        };
        match before {
            State::Lost(reason) => {
                releasing.open = reason == LossReason::Deadline;
                Err(self.lost_error(reason)) // and what the store may still have is given back by the drop
            }
            _ => releasing.answered().await,
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
        self.inner.watchdog.forget(self.key);
        self.inner.detached.fetch_add(1, SeqCst);
        self.inner.leave_book(&self.hold);
        Ok(Detached::of(&self.hold, self.pass()))
    }

    /// Stops renewing, first of all: whatever comes of the release, nothing is renewed after it.
    fn stop(&self) -> State {
        let before = self.hold.releasing(&self.inner.clock);
        if !self.inner.flawed(Flaw::RenewsAfterRelease) {
            self.inner.watchdog.forget(self.key);
        }
        self.inner.leave_book(&self.hold);
        before
    }

    fn lost_error(&self, reason: LossReason) -> Error {
        Error::lost(reason).at(self.inner.caps.backend, &self.hold.name)
    }
}

/// A release under way; dropped, it goes on in the background.
struct Releasing {
    inner: Arc<Inner>,
    hold: Arc<Hold>,
    open: bool,
}

impl Releasing {
    async fn answered(&mut self) -> Result<Outcome, Error> {
        let inner = Arc::clone(&self.inner);
        let end = (inner.clock.now() + ATTEMPT).min(self.hold.deadline() + ATTEMPT / 5);
        let mut unanswered = false;
        let mut pause = Duration::from_millis(5);
        loop {
            let mut request = Release::new(self.hold.name.clone(), self.hold.owner, self.hold.id);
            request.keep = inner.rest(self.hold.keep());
            let answer = tokio::select! {
                biased;
                answer = inner.release_once(request) => answer,
                () = inner.clock.sleep_until(end) => None,
            };
            match answer {
                Some(Ok(released)) => return self.finish(released, unanswered),
                Some(Err(error)) => {
                    unanswered |= error.effect() == Effect::Unknown;
                    if error.retry() == Retry::Never || inner.clock.now() + pause >= end {
                        return Err(self.unknown().with_source(error));
                    }
                }
                None if inner.clock.now() >= end => return Err(self.unknown()),
                None => unanswered = true,
            }
            inner.clock.sleep_until(inner.clock.now() + pause).await;
            pause *= 2;
        }
    }

    fn finish(&mut self, released: Released, unanswered: bool) -> Result<Outcome, Error> {
        self.open = false;
        self.hold.released();
        self.settle_late_copies();
        let Inner { caps, .. } = &*self.inner;
        let outcome = match released {
            Released::NotHeld { .. }
                if unanswered || self.inner.flawed(Flaw::NotHeldIsReleased) =>
            {
                Outcome::Released
            }
            Released::NotHeld { .. } => {
                tracing::warn!(
                    target: "dlock::lost", lock = %self.hold.name, backend = caps.backend,
                    owner = %self.hold.owner, "the lock was not held any more when it was released"
                );
                return Err(Error::lost(LossReason::NotHeld).at(caps.backend, &self.hold.name));
            }
            Released::StillHeld { holds } => Outcome::StillHeld { holds: holds.get() },
            Released::Kept { rest } => Outcome::Kept { rest },
            Released::Freed => Outcome::Released,
        };
        tracing::debug!(
            target: "dlock::release", lock = %self.hold.name, backend = caps.backend,
            owner = %self.hold.owner, ?outcome, "released"
        );
        self.inner.poke(&self.hold.name);
        Ok(outcome)
    }

    /// An unanswered copy of the acquire may still come and revive the hold: a second release follows when it no longer can.
    fn settle_late_copies(&self) {
        let now = self.inner.clock.now();
        if let Some(until) = self.hold.unsettled.filter(|until| *until > now) {
            let mut job = self.job();
            job.unsettled = Some(until);
            self.inner.settle(job);
        }
    }

    fn job(&self) -> Job {
        let mut job = Job::release(self.hold.name.clone(), self.hold.owner, self.hold.id);
        job.unsettled = self.hold.unsettled;
        job.keep = self.hold.keep();
        job
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
            self.inner.settle(self.job());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let before = self.stop();
        // What another already has, or the session took along, needs no release; what shutdown left to its lease is left.
        let open = !matches!(
            before,
            State::Lost(LossReason::NotHeld | LossReason::Session | LossReason::Shutdown)
        );
        drop(Releasing {
            inner: Arc::clone(&self.inner),
            hold: Arc::clone(&self.hold),
            open,
        });
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
