//! A client process as client-level cases see it.

use super::{
    gate::{Gate, Step},
    task::Task,
};
use crate::{Caller, Ctx, Failure, Faults, Result, expect::seen_from_here, failure::is_late, same};
use dlock_core::{
    Broken, Client, Error, ErrorKind, Guard, GuardState, Lease, Lock, LockName, LossReason, Pass,
    ReleaseOutcome, Snapshot, driver::DistributedLock,
};
use std::{fmt, sync::Arc, time::Duration};

/// A client that reaches its store through a [`Gate`]. Each has owners and tickets of its own.
pub(crate) struct Peer {
    pub(crate) client: Client,
    pub(crate) gate: Arc<Gate>,
    ctx: Ctx,
}

impl Peer {
    pub(crate) async fn new(ctx: &Ctx) -> Result<Self> {
        Self::later_than_the_store(ctx, Duration::ZERO).await
    }

    /// Over a store that may execute an acquire this much later.
    pub(crate) async fn later_than_the_store(ctx: &Ctx, late: Duration) -> Result<Self> {
        Self::over(ctx, ctx.driver().await?, late)
    }

    /// Behind a network that fails on demand.
    pub(crate) async fn behind_a_network(ctx: &Ctx) -> Result<(Self, Box<dyn Faults>)> {
        let (driver, faults) = ctx.faulty_driver().await?;
        Ok((Self::over(ctx, driver, Duration::ZERO)?, faults))
    }

    fn over(ctx: &Ctx, driver: Arc<dyn DistributedLock>, late: Duration) -> Result<Self> {
        let gate = Arc::new(Gate::new(driver, ctx.clock().clone(), late));
        let mut builder = Client::builder(Arc::<Gate>::clone(&gate))
            .clock(ctx.clock().clone())
            .lease(Lease::renewed(ctx.long()));
        if let Some(seed) = ctx.seed() {
            builder = builder.seed(seed);
        }
        Ok(Self {
            client: builder.build()?,
            gate,
            ctx: ctx.clone(),
        })
    }

    pub(crate) async fn several<const N: usize>(ctx: &Ctx) -> Result<[Self; N]> {
        let mut peers = Vec::with_capacity(N);
        for _ in 0..N {
            peers.push(Self::new(ctx).await?);
        }
        peers
            .try_into()
            .map_err(|_| Failure::new("BUG: as many peers as asked for were made"))
    }

    /// A lock with a renewed lease that does not end during a case.
    pub(crate) fn lock(&self, name: &LockName) -> Result<Lock> {
        Ok(self.client.lock(name.as_str())?)
    }

    /// A lock with a short renewed lease.
    pub(crate) fn short(&self, name: &LockName) -> Result<Lock> {
        Ok(self.lock(name)?.lease(Lease::renewed(self.ctx.short())))
    }

    /// A lock with a lease that is certainly renewed in time: see [`Ctx::kept`].
    pub(crate) fn kept(&self, name: &LockName) -> Result<Lock> {
        Ok(self.lock(name)?.lease(Lease::renewed(self.ctx.kept())))
    }

    /// A lock with a short fixed lease.
    pub(crate) fn fixed(&self, name: &LockName) -> Result<Lock> {
        Ok(self.lock(name)?.lease(Lease::fixed(self.ctx.short())))
    }

    /// Acquires a free lock within the time of one answer.
    #[track_caller]
    pub(crate) fn take(&self, lock: &Lock) -> impl Future<Output = Result<Guard>> + Send {
        seen_from_here(async move {
            let what = "a free lock is acquired";
            let taken = self.ctx.within(what, self.ctx.answer(), lock.try_acquire());
            let taken = taken.await??;
            taken.ok_or_else(|| Failure::new(format!("{:?} should be free", lock.name())))
        })
    }

    /// Enters with a pass, within the time of one answer.
    #[track_caller]
    pub(crate) fn join(
        &self,
        lock: Lock,
        pass: &Pass,
    ) -> impl Future<Output = Result<Guard>> + Send {
        let joining = lock.join(pass);
        seen_from_here(async move {
            let what = "a pass enters";
            Ok(self.ctx.within(what, self.ctx.answer(), joining).await??)
        })
    }

    /// Fails to enter with a pass.
    #[track_caller]
    pub(crate) fn cannot_join(
        &self,
        lock: Lock,
        pass: &Pass,
        kind: ErrorKind,
    ) -> impl Future<Output = Result<Error>> + Send {
        let joining = lock.join(pass);
        seen_from_here(async move {
            let what = "join is answered";
            let joined = self.ctx.within(what, self.ctx.answer(), joining).await?;
            fails("join", joined, kind)
        })
    }

    /// Is not granted a lock; the `error` cases test whether that is a value.
    #[track_caller]
    pub(crate) fn refused(&self, lock: &Lock) -> impl Future<Output = Result> + Send {
        seen_from_here(async move {
            let what = "a held lock is refused";
            let taken = self.ctx.within(what, self.ctx.answer(), lock.try_acquire());
            let granted = matches!(taken.await?, Ok(Some(_)));
            same("a lock that another holds is granted", granted, false)
        })
    }

    /// Acquires a lock of long lease within this time.
    pub(crate) async fn gets(&self, name: &LockName, limit: Duration) -> Result<Guard> {
        Ok(self.lock(name)?.acquire_timeout(limit).await?)
    }

    /// Breaks a lock, whichever incarnation it is.
    pub(crate) async fn breaks(&self, name: &LockName) -> Result<Broken> {
        Ok(self.client.admin().break_lock(name.as_str(), None).await?)
    }

    /// Waits until the client has sent more than this number of acquires to the store.
    #[track_caller]
    pub(crate) fn asks(&self, before: usize) -> impl Future<Output = Result> + Send {
        self.counts("it asks the store", before, Gate::calls)
    }

    /// Waits until more than this number of acquires were answered: before that another client may come
    /// first.
    #[track_caller]
    pub(crate) fn stands(&self, before: usize) -> impl Future<Output = Result> + Send {
        self.counts("it is queued", before, Gate::answered)
    }

    #[track_caller]
    fn counts(
        &self,
        what: &'static str,
        before: usize,
        count: fn(&Gate, Step) -> usize,
    ) -> impl Future<Output = Result> + Send {
        let more = move || async move { Ok(count(&self.gate, Step::Acquire) > before) };
        self.ctx.eventually(what, self.ctx.answer(), more)
    }

    /// Waits until the cleanup has nothing to do. A store that may execute an acquire late gets that
    /// time on top.
    #[track_caller]
    pub(crate) fn settles(&self, bound: Duration) -> impl Future<Output = Result> + Send {
        seen_from_here(async move {
            let bound = bound + self.client.capabilities().late;
            let idle = || async { Ok(self.client.unsettled() == 0) };
            self.ctx
                .eventually("nothing is unsettled any more", bound, idle)
                .await
        })
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

/// Several clients, a fresh name, and a lock of that name that the first of them holds.
#[track_caller]
pub(crate) fn held<const N: usize>(
    ctx: &Ctx,
    kind: fn(&Peer, &LockName) -> Result<Lock>,
) -> impl Future<Output = Result<([Peer; N], LockName, Guard)>> + Send {
    seen_from_here(async move {
        let peers = Peer::several(ctx).await?;
        let name = ctx.name()?;
        let guard = peers[0].take(&kind(&peers[0], &name)?).await?;
        Ok((peers, name, guard))
    })
}

impl Task<Result<Guard, Error>> {
    /// It is granted the lock within the bound, and releases it as the only holder.
    #[track_caller]
    pub(crate) fn served(
        self,
        ctx: &Ctx,
        what: &str,
        bound: Duration,
    ) -> impl Future<Output = Result> + Send {
        seen_from_here(async move { frees(ctx, self.done(ctx, what, bound).await??).await })
    }
}

/// The guard learns within the bound that its lock is lost, for this reason.
#[track_caller]
pub(crate) fn is_lost(
    ctx: &Ctx,
    what: &str,
    bound: Duration,
    guard: &Guard,
    reason: LossReason,
) -> impl Future<Output = Result> + Send {
    seen_from_here(async move {
        let lost = ctx.within(what, bound, guard.lost()).await?;
        same("the reason", lost, reason)
    })
}

/// The state of a guard whose lease is over.
pub(crate) const EXPIRED: GuardState = GuardState::Lost(LossReason::Deadline);
/// The state of a guard whose hold the store no longer has.
pub(crate) const NOT_HELD: GuardState = GuardState::Lost(LossReason::NotHeld);
/// The state of a guard whose client was shut down.
pub(crate) const SHUT_DOWN: GuardState = GuardState::Lost(LossReason::Shutdown);
/// The outcome of a release beside one other hold.
pub(crate) const ONE_LEFT: ReleaseOutcome = ReleaseOutcome::StillHeld { holds: 1 };

/// Releases a lock that has no other hold.
#[track_caller]
pub(crate) fn frees(ctx: &Ctx, guard: Guard) -> impl Future<Output = Result> + Send + use<'_> {
    seen_from_here(async move {
        let outcome = ctx.within("release is answered", ctx.answer(), guard.release());
        let outcome = outcome.await?.map_err(overdue)?;
        same("release", outcome, ReleaseOutcome::Released)
    })
}

/// The lock is held, or in doubt until its next renewal: on a busy machine one may be late.
#[track_caller]
pub(crate) fn stays_held(
    ctx: &Ctx,
    what: &str,
    guard: &Guard,
) -> impl Future<Output = Result> + Send {
    seen_from_here(async move {
        let held = || async {
            not_lost(guard).map_err(|failure| failure.of(what))?;
            Ok(guard.state() == GuardState::Held)
        };
        ctx.eventually(what, ctx.kept(), held).await
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
        Some(LossReason::Deadline) => Failure::late(error),
        _ => error.into(),
    }
}

/// No client holds the lock, and none queues for it as far as the store can tell.
pub(crate) fn is_untouched(seen: &Snapshot) -> bool {
    let free = seen.holders.is_empty() && seen.holds == 0 && seen.unavailable_for.is_none();
    free && seen.waiters.unwrap_or(0) == 0
}

/// Waits until the store has nothing left of that name.
#[track_caller]
pub(crate) fn left_untouched(
    ctx: &Ctx,
    observer: &Caller,
    name: &LockName,
    bound: Duration,
) -> impl Future<Output = Result> + Send {
    seen_from_here(async move {
        let what = format!("no client holds {name:?} or waits for it");
        let untouched = || async { Ok(is_untouched(&observer.inspect(name).await?)) };
        ctx.eventually(&what, bound, untouched).await
    })
}

/// Fails unless the result is this error.
#[track_caller]
pub(crate) fn fails<T>(what: &str, answer: Result<T, Error>, kind: ErrorKind) -> Result<Error> {
    match answer {
        Ok(_) => Err(Failure::new(format!("{what} should fail with {kind:?}"))),
        Err(error) if error.kind() == kind => Ok(error),
        Err(error) => {
            let words = format!("{what} should fail with {kind:?}, failed with {error:?}");
            Err(if is_late(&error) {
                Failure::late(words)
            } else {
                Failure::new(words)
            })
        }
    }
}
