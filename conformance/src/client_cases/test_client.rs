//! A client process as client-level cases see it.

use super::{
    gated_driver::{GatedDriver, Step},
    task::Task,
    test_lock::TestLock,
};
use crate::{
    Ctx, Failure, Faults, Result,
    ctx::several,
    expect::{Expected, seen_from_here},
    failure::is_late,
    same,
};
use dlock_core::{
    Broken, Client, Error, ErrorKind, FencingToken, Guard, GuardState, Lease, Lock, LockName,
    LossReason, Pass, ReleaseOutcome, ShutdownReport, TimeoutPhase, driver::DistributedLock,
};
use std::{fmt, future::IntoFuture, sync::Arc, time::Duration};

/// A client that reaches its store through a [`GatedDriver`]. Each has owners and tickets of its own.
pub(crate) struct TestClient {
    pub(crate) inner: Client,
    pub(crate) gate: Arc<GatedDriver>,
    ctx: Ctx,
}

/// A waiter, and a shutdown, in tasks of their own.
pub(crate) type Waiter<T = Guard> = Task<Result<T, Error>>;
pub(crate) type Closing = Task<Result<ShutdownReport, Error>>;

impl TestClient {
    pub(crate) async fn new(ctx: &Ctx) -> Result<Self> {
        Self::later_than_the_store(ctx, Duration::ZERO).await
    }

    /// Over a store that may execute an acquire this much later.
    pub(crate) async fn later_than_the_store(ctx: &Ctx, late: Duration) -> Result<Self> {
        Self::over(ctx, ctx.driver().await?, late, None)
    }

    /// With a presence of [`Ctx::kept`].
    pub(crate) async fn with_presence(ctx: &Ctx) -> Result<Self> {
        Self::over(ctx, ctx.driver().await?, Duration::ZERO, Some(ctx.kept()))
    }

    /// Behind a network that fails on demand.
    pub(crate) async fn behind_a_network(ctx: &Ctx) -> Result<(Self, Box<dyn Faults>)> {
        let (driver, faults) = ctx.faulty_driver().await?;
        Ok((Self::over(ctx, driver, Duration::ZERO, None)?, faults))
    }

    /// The same, with a presence.
    pub(crate) async fn present_behind_a_network(ctx: &Ctx) -> Result<(Self, Box<dyn Faults>)> {
        let (driver, faults) = ctx.faulty_driver().await?;
        let client = Self::over(ctx, driver, Duration::ZERO, Some(ctx.kept()))?;
        Ok((client, faults))
    }

    fn over(
        ctx: &Ctx,
        driver: Arc<dyn DistributedLock>,
        late: Duration,
        presence: Option<Duration>,
    ) -> Result<Self> {
        let gate = Arc::new(GatedDriver::new(driver, ctx.clock().clone(), late));
        let mut builder = Client::builder(Arc::<GatedDriver>::clone(&gate))
            .clock(ctx.clock().clone())
            .lease(Lease::renewed(ctx.long()));
        if let Some(seed) = ctx.seed() {
            builder = builder.seed(seed);
        }
        if let Some(presence) = presence {
            builder = builder.presence(presence);
        }
        Ok(Self {
            inner: ctx.counts().count(|| builder.build())?,
            gate,
            ctx: ctx.clone(),
        })
    }

    /// Several clients, and a fresh name.
    pub(crate) async fn several<const N: usize>(ctx: &Ctx) -> Result<([Self; N], LockName)> {
        Ok((several(|| Self::new(ctx)).await?, ctx.name()?))
    }

    /// A lock with a renewed lease that does not end during a case.
    pub(crate) fn lock(&self, name: &LockName) -> Result<TestLock> {
        Ok(self.noted(self.inner.lock(name.as_str())?))
    }

    /// A lock whose acquires are noted.
    pub(crate) fn noted(&self, lock: Lock) -> TestLock {
        TestLock::new(lock, &self.ctx)
    }

    /// A lock with a short renewed lease.
    pub(crate) fn short(&self, name: &LockName) -> Result<TestLock> {
        Ok(self.lock(name)?.lease(Lease::renewed(self.ctx.short())))
    }

    /// A lock with a lease that is certainly renewed in time: see [`Ctx::kept`].
    pub(crate) fn kept(&self, name: &LockName) -> Result<TestLock> {
        Ok(self.lock(name)?.lease(Lease::renewed(self.ctx.kept())))
    }

    /// A lock with a short fixed lease.
    pub(crate) fn fixed(&self, name: &LockName) -> Result<TestLock> {
        Ok(self.lock(name)?.lease(Lease::fixed(self.ctx.short())))
    }

    /// Acquires a free lock, with the long lease, within the time of one answer.
    #[track_caller]
    pub(crate) fn acquire<'a>(&'a self, name: &'a LockName) -> Expected<'a, Guard> {
        seen_from_here(async move { self.take(&self.lock(name)?).await })
    }

    /// The same with the terms of this lock.
    #[track_caller]
    pub(crate) fn take<'a>(&'a self, lock: &'a TestLock) -> Expected<'a, Guard> {
        seen_from_here(async move {
            let taken = self.ctx.answered(lock.try_acquire()).await??;
            taken.ok_or_else(|| Failure::new(format!("{:?} should be free", lock.name())))
        })
    }

    /// Enters with a pass, within the time of one answer.
    #[track_caller]
    pub(crate) fn join<'a>(&'a self, name: &'a LockName, pass: &'a Pass) -> Expected<'a, Guard> {
        let joining = self.lock(name).map(|lock| lock.join(pass));
        seen_from_here(async move { Ok(self.ctx.answered(joining?).await??) })
    }

    /// Fails to enter with a pass.
    #[track_caller]
    pub(crate) fn cannot_join<'a>(
        &'a self,
        name: &'a LockName,
        pass: &'a Pass,
        kind: ErrorKind,
    ) -> Expected<'a> {
        let joining = self.lock(name).map(|lock| lock.join(pass));
        seen_from_here(async move {
            fails(kind, self.ctx.answered(joining?).await?)?;
            Ok(())
        })
    }

    /// Is not granted a lock; the `error` cases test whether that is a value.
    #[track_caller]
    pub(crate) fn refused<'a>(&'a self, name: &'a LockName) -> Expected<'a> {
        seen_from_here(async move {
            let taken = self.ctx.answered(self.lock(name)?.try_acquire()).await?;
            let granted = matches!(taken, Ok(Some(_)));
            same("a lock that another holds is granted", granted, false)
        })
    }

    /// Acquires a lock of long lease within this time.
    pub(crate) async fn gets(&self, name: &LockName, limit: Duration) -> Result<Guard> {
        Ok(self.lock(name)?.acquire_timeout(limit).await?)
    }

    /// A waiter whose first request has been answered: before that another client may come first.
    #[track_caller]
    pub(crate) fn waits(&self, lock: TestLock) -> Expected<'_, Waiter> {
        let answered = self.gate.answered(Step::Acquire);
        seen_from_here(async move {
            let waiting = self.ctx.spawn(lock.acquire());
            self.stands(answered).await?;
            Ok(waiting)
        })
    }

    /// Breaks a lock: this incarnation, or whichever it is.
    pub(crate) async fn breaks(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        Ok(self.inner.admin().break_lock(name.as_str(), only).await?)
    }

    /// Waits until the client has sent this number of requests of this kind to the store.
    #[track_caller]
    pub(crate) fn sends(&self, step: Step, count: usize) -> Expected<'_> {
        let sent = move || self.gate.calls(step) >= count;
        self.ctx.until("it asks the store", self.ctx.answer(), sent)
    }

    /// Waits until more than this number of acquires were answered.
    #[track_caller]
    pub(crate) fn stands(&self, before: usize) -> Expected<'_> {
        let answered = move || self.gate.answered(Step::Acquire) > before;
        self.ctx.until("it is queued", self.ctx.answer(), answered)
    }

    /// Waits until the cleanup has nothing to do. A store that may execute an acquire late gets that
    /// time on top.
    #[track_caller]
    pub(crate) fn cleans_up(&self, bound: Duration) -> Expected<'_> {
        let bound = bound + self.inner.capabilities().late;
        let idle = move || self.inner.pending_cleanups() == 0;
        self.ctx.until("no cleanup is pending", bound, idle)
    }

    /// Starts a shutdown.
    pub(crate) fn shut_down(&self, grace: Duration) -> Closing {
        self.ctx.spawn(self.inner.shutdown(grace).into_future())
    }
}

impl fmt::Debug for TestClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TestClient").field(&self.inner).finish()
    }
}

/// Several clients, a fresh name, and a lock of that name that the first of them holds.
#[track_caller]
pub(crate) fn held<const N: usize>(
    ctx: &Ctx,
    kind: fn(&TestClient, &LockName) -> Result<TestLock>,
) -> Expected<'_, ([TestClient; N], LockName, Guard)> {
    seen_from_here(async move {
        let (clients, name) = TestClient::several(ctx).await?;
        let guard = clients[0].take(&kind(&clients[0], &name)?).await?;
        Ok((clients, name, guard))
    })
}

impl Waiter {
    /// It is granted the lock within the bound, and releases it as the only holder.
    #[track_caller]
    pub(crate) fn served(self, bound: Duration) -> Expected<'static> {
        let ctx = self.ctx.clone();
        seen_from_here(async move { frees(&ctx, self.done(bound).await??).await })
    }
}

/// The guard learns within the bound that its lock is lost, for this reason.
#[track_caller]
pub(crate) fn is_lost<'a>(
    ctx: &'a Ctx,
    guard: &'a Guard,
    reason: LossReason,
    bound: Duration,
) -> Expected<'a> {
    seen_from_here(async move {
        let lost = ctx.within("the lock is lost", bound, guard.lost()).await?;
        if lost == LossReason::Deadline && reason != LossReason::Deadline {
            // On a busy machine a lease can end before anything else is noticed.
            return Err(Failure::late("its lease ended before that was noticed"));
        }
        same("the reason", lost, reason)
    })
}

/// The state of a guard whose lease is over.
pub(crate) const EXPIRED: GuardState = GuardState::Lost(LossReason::Deadline);
/// The state of a guard whose hold the store no longer has.
pub(crate) const NOT_HELD: GuardState = GuardState::Lost(LossReason::NotHeld);
/// The state of a guard whose client was shut down.
pub(crate) const SHUT_DOWN: GuardState = GuardState::Lost(LossReason::Shutdown);
/// The state of a guard whose client's presence is over.
pub(crate) const ABSENT: GuardState = GuardState::Lost(LossReason::Presence);
/// The outcome of a release beside one other hold.
pub(crate) const ONE_LEFT: ReleaseOutcome = ReleaseOutcome::StillHeld { holds: 1 };
/// The error of a wait that was too long.
pub(crate) const OUT_OF_TIME: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Wait,
};
/// The longest poll interval.
pub(crate) const POLL: Duration = Duration::from_secs(2);

/// Releases a lock that has no other hold.
#[track_caller]
pub(crate) fn frees(ctx: &Ctx, guard: Guard) -> Expected<'_> {
    seen_from_here(async move {
        let outcome = ctx.answered(guard.release()).await?;
        same(
            "release",
            outcome.map_err(overdue)?,
            ReleaseOutcome::Released,
        )
    })
}

/// Releases a lock, or drops its guard.
#[track_caller]
pub(crate) fn ends(ctx: &Ctx, guard: Guard, drops: bool) -> Expected<'_> {
    seen_from_here(async move {
        if drops {
            drop(guard);
            return Ok(());
        }
        frees(ctx, guard).await
    })
}

/// The lock is held, or in doubt until its next renewal: on a busy machine one may be late.
#[track_caller]
pub(crate) fn stays_held<'a>(ctx: &'a Ctx, guard: &'a Guard) -> Expected<'a> {
    seen_from_here(async move {
        let held = || async {
            not_lost(guard)?;
            Ok(guard.state() == GuardState::Held)
        };
        ctx.eventually("the lock is held", ctx.kept(), held).await
    })
}

/// The lock is held or in doubt.
#[track_caller]
pub(crate) fn not_lost(guard: &Guard) -> Result {
    guard.check().map_err(overdue)
}

/// A lock that was renewed too late counts as late: the case is repeated alone, which shows whether the
/// machine or the code is to blame. A lock that the store no longer has is wrong at once.
#[track_caller]
fn overdue(error: Error) -> Failure {
    match error.loss() {
        Some(LossReason::Deadline | LossReason::Presence) => Failure::late(error),
        _ => error.into(),
    }
}

/// Fails unless the answer is this error.
#[track_caller]
pub(crate) fn fails<T>(kind: ErrorKind, answer: Result<T, Error>) -> Result<Error> {
    match answer {
        Ok(_) => Err(Failure::new(format!("it should fail with {kind:?}"))),
        Err(error) if error.kind() == kind => Ok(error),
        Err(error) => {
            let words = format!("it should fail with {kind:?}, failed with {error:?}");
            Err(if is_late(&error) {
                Failure::late(words)
            } else {
                Failure::new(words)
            })
        }
    }
}
