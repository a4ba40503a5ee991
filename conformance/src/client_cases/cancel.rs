//! `cancel`: a future dropped at any of its awaits leaves no hold and no waiter.
//!
//! Each case is a product: a future, the outcome of its calls, the call that meets it, and the number of
//! polls before the drop.

use super::{
    gated_driver::{CallOutcome, Step},
    task::polled,
    test_client::{TestClient, frees, held, stays_held},
    test_lock::TestLock,
};
use crate::{Ctx, Result, case::cases, in_time, same};
use dlock_core::{Lease, LockName, LossReason};
use futures_util::{StreamExt, TryStreamExt, future::ready, stream};
use std::{future::IntoFuture, time::Duration};

cases! {
    [Clause::Cancel]
    try_acquire_dropped_anywhere_leaves_nothing;
    acquire_of_a_free_lock_dropped_anywhere_leaves_nothing;
    acquire_of_a_held_lock_dropped_anywhere_leaves_nothing;
    acquire_by_an_owner_dropped_anywhere_leaves_nothing;
    a_set_dropped_anywhere_leaves_nothing;
    any_lock_of_several_dropped_anywhere_leaves_nothing;
    join_dropped_anywhere_leaves_the_others_alone;
    release_dropped_anywhere_goes_on_in_the_background;
    a_guard_dropped_is_released_in_the_background;
    run_and_lost_dropped_anywhere_change_nothing;
    shutdown_dropped_anywhere_leaves_nothing_held_for_good;
    a_waiter_cancelled_at_the_head_delays_no_other_waiter;
    a_client_dropped_with_everything_under_way_leaves_nothing;
}

async fn try_acquire_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let tries = |lock: TestLock| async move { matches!(lock.try_acquire().await, Ok(Some(_))) };
    acquires(&ctx, &[Step::Acquire, Step::Release], tries).await
}

async fn acquire_of_a_free_lock_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Release, Step::Leave];
    let acquiring = |lock: TestLock| async move { lock.acquire().await.is_ok() };
    acquires(&ctx, &steps, acquiring).await
}

async fn acquire_by_an_owner_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let owner = TestClient::new(&ctx).await?.inner.owner();
    let acquiring = |lock: TestLock| async move { lock.with_owner(&owner).acquire().await.is_ok() };
    acquires(&ctx, &[Step::Acquire, Step::Release], acquiring).await
}

async fn acquire_of_a_held_lock_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Leave];
    product(&ctx, &steps, |ctx, case| async move {
        let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
        let finished = case.cuts(&client, client.kept(&name)?.acquire()).await;
        case.cleans_up(&ctx, &client).await?;
        frees(&ctx, guard).await?;
        nothing_is_left(&ctx, &client, &name, Duration::ZERO).await?;
        Ok(finished)
    })
    .await
}

async fn a_set_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Release, Step::Leave];
    product(&ctx, &steps, |ctx, case| async move {
        let ([client], first) = TestClient::several(&ctx).await?;
        let names = [first, ctx.name()?];
        let set = client
            .inner
            .lock_all(names.each_ref().map(LockName::as_str))?;
        let set = set.lease(Lease::renewed(ctx.kept()));
        let finished = case.cuts(&client, set.acquire()).await;
        for name in &names {
            nothing_is_left(&ctx, &client, name, case.free_within(&ctx)).await?;
        }
        Ok(finished)
    })
    .await
}

async fn any_lock_of_several_dropped_anywhere_leaves_nothing(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Leave];
    product(&ctx, &steps, |ctx, case| async move {
        let ([_other, client], first, guard) = held(&ctx, TestClient::lock).await?;
        let second = ctx.name()?;
        let other = client.acquire(&second).await?;
        let any = client.inner.lock_any([first.as_str(), second.as_str()])?;
        let any = any.lease(Lease::renewed(ctx.kept()));
        let finished = case.cuts(&client, any.acquire()).await;
        case.cleans_up(&ctx, &client).await?;
        for (name, guard) in [(&first, guard), (&second, other)] {
            frees(&ctx, guard).await?;
            nothing_is_left(&ctx, &client, name, Duration::ZERO).await?;
        }
        Ok(finished)
    })
    .await
}

async fn join_dropped_anywhere_leaves_the_others_alone(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Release];
    product(&ctx, &steps, |ctx, case| async move {
        let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
        let pass = guard.pass()?;
        let finished = case.cuts(&client, client.kept(&name)?.join(&pass)).await;
        case.cleans_up(&ctx, &client).await?;
        stays_held(&ctx, &guard).await?;
        ctx.sees_holds(&name, 1).await?;
        frees(&ctx, guard).await?;
        Ok(finished)
    })
    .await
}

async fn release_dropped_anywhere_goes_on_in_the_background(ctx: Ctx) -> Result {
    product(&ctx, &[Step::Release], |ctx, case| async move {
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        let finished = case.cuts(&client, guard.release()).await;
        nothing_is_left(&ctx, &client, &name, case.free_within(&ctx)).await?;
        if !case.hangs() {
            let what = "the dropped call is driven to its end";
            let idle = || client.gate.is_idle(Step::Release);
            ctx.until(what, case.free_within(&ctx), idle).await?;
        }
        Ok(finished)
    })
    .await
}

async fn a_guard_dropped_is_released_in_the_background(ctx: Ctx) -> Result {
    for outcome in outcomes(&ctx) {
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        client.gate.once(Step::Release, outcome);
        drop(guard);
        let case = Drop::at_once(Step::Release, outcome);
        nothing_is_left(&ctx, &client, &name, case.free_within(&ctx)).await?;
    }
    Ok(())
}

async fn run_and_lost_dropped_anywhere_change_nothing(ctx: Ctx) -> Result {
    product(&ctx, &[Step::Renew], |ctx, case| async move {
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        client.gate.once(case.step, case.outcome);
        let work = ctx.time_passes(ctx.kept() / 2);
        let ran = polled(guard.run(work), case.polls).await.is_some();
        let lost = polled(guard.lost(), case.polls.min(2)).await;
        // On a busy machine a lease of two seconds may end before its renewal is answered.
        let is_in_time = lost != Some(LossReason::Deadline);
        in_time(is_in_time, "it was lost by time alone")?;
        same("it was lost", lost, None)?;
        guard.check()?;
        frees(&ctx, guard).await?;
        nothing_is_left(&ctx, &client, &name, Duration::ZERO).await?;
        Ok(ran)
    })
    .await
}

async fn shutdown_dropped_anywhere_leaves_nothing_held_for_good(ctx: Ctx) -> Result {
    product(&ctx, &[Step::Release], |ctx, case| async move {
        if case.hangs() {
            return Ok(true); // left to its lease: `shutdown` tests that
        }
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        client.gate.once(case.step, case.outcome);
        let shutdown = client.inner.shutdown(ctx.kept() / 4).force().into_future();
        let finished = polled(shutdown, case.polls).await.is_some();
        drop(guard);
        let bound = ctx.kept() / 4 + case.free_within(&ctx);
        ctx.left_untouched(&name, bound).await?;
        Ok(finished)
    })
    .await
}

async fn a_waiter_cancelled_at_the_head_delays_no_other_waiter(ctx: Ctx) -> Result {
    let steps = [Step::Acquire, Step::Leave];
    product(&ctx, &steps, |ctx, case| async move {
        let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
        let (head, second) = (client.kept(&name)?, client.kept(&name)?);
        client.gate.always(case.step, case.outcome);
        let mut head = Box::pin(head.acquire());
        // The first poll queues it, before the second.
        let mut finished = polled(&mut head, case.polls.min(1)).await.is_some();
        let second = ctx.spawn(second.acquire());
        if !finished && case.polls > 1 {
            finished = polled(&mut head, case.polls - 1).await.is_some();
        }
        drop(head);
        client.gate.clear();
        frees(&ctx, guard).await?;
        // One accept lease and one poll more than the call that hangs.
        second
            .served(case.free_within(&ctx) + ctx.kept() * 2 / 3)
            .await?;
        case.cleans_up(&ctx, &client).await?;
        nothing_is_left(&ctx, &client, &name, Duration::ZERO).await?;
        Ok(finished)
    })
    .await
}

async fn a_client_dropped_with_everything_under_way_leaves_nothing(ctx: Ctx) -> Result {
    for outcome in outcomes(&ctx) {
        let ([_other, client], waited, held) = held(&ctx, TestClient::lock).await?;
        let name = ctx.name()?;
        client.gate.always(Step::Acquire, outcome);
        drop(polled(client.kept(&name)?.acquire(), 2).await);
        drop(polled(client.kept(&waited)?.acquire(), 2).await);
        client.gate.clear();
        drop(client);
        let bound = Drop::at_once(Step::Acquire, outcome).free_within(&ctx);
        ctx.left_untouched(&name, bound).await?;
        frees(&ctx, held).await?;
        ctx.left_untouched(&waited, bound).await?;
    }
    Ok(())
}

/// One member of the product.
#[derive(Clone, Copy, Debug)]
struct Drop {
    step: Step,
    outcome: CallOutcome,
    polls: usize,
}

impl Drop {
    const fn at_once(step: Step, outcome: CallOutcome) -> Self {
        let polls = 0;
        Self {
            step,
            outcome,
            polls,
        }
    }

    /// Drops the future after its polls, while the calls of its step meet the outcome; returns whether it
    /// completed before.
    async fn cuts(&self, client: &TestClient, future: impl Future) -> bool {
        client.gate.always(self.step, self.outcome);
        let finished = polled(future, self.polls).await.is_some();
        client.gate.clear();
        finished
    }

    /// Whether a call without an answer costs the full time of a request.
    fn hangs(&self) -> bool {
        matches!(self.outcome, CallOutcome::Never | CallOutcome::Unsent)
    }

    /// When the store answers again, nothing is left one compensating round trip later; a call that
    /// hangs is given up first.
    fn free_within(&self, ctx: &Ctx) -> Duration {
        match (self.outcome, self.step) {
            (CallOutcome::Never | CallOutcome::Unsent, Step::Acquire) => ctx.kept() / 3,
            (CallOutcome::Never | CallOutcome::Unsent, _) => Duration::from_secs(5),
            (CallOutcome::Slow(span), _) => span,
            _ => Duration::from_millis(50),
        }
    }

    /// Waits until the cleanup of the dropped future is done.
    async fn cleans_up(&self, ctx: &Ctx, client: &TestClient) -> Result {
        client
            .cleans_up(cleaned_up_within(ctx, self.free_within(ctx)))
            .await
    }
}

fn outcomes(ctx: &Ctx) -> [CallOutcome; 6] {
    let slow = CallOutcome::Slow(ctx.kept() / 20);
    let (before, after) = (CallOutcome::ErrorBefore, CallOutcome::ErrorAfter);
    [
        CallOutcome::Ok,
        before,
        after,
        slow,
        CallOutcome::Never,
        CallOutcome::Unsent,
    ]
}

/// The most await points that are tried one by one; a future with more repeats itself.
const MOST_POLLS: usize = 12;

/// The same on a real store. A driver that reads and writes in its caller's task is polled several
/// times for one request, and its work after a failed request is to be dropped as well.
const REAL_POLLS: [usize; 7] = [0, 1, 2, 3, 4, 8, 16];

/// Runs the case for each outcome of each step, and drops the future after 0, 1, 2, … polls, until it
/// completes before the drop.
async fn product<F, C>(ctx: &Ctx, steps: &[Step], case: F) -> Result
where
    F: Fn(Ctx, Drop) -> C + Send + Sync,
    C: Future<Output = Result<bool>> + Send,
{
    let members = steps
        .iter()
        .flat_map(|&step| outcomes(ctx).map(|outcome| Drop::at_once(step, outcome)));
    let told = |member: Drop| {
        let done = case(ctx.clone(), member);
        async move {
            done.await
                .map_err(|failure| failure.of(format!("{member:?}")))
        }
    };
    if ctx.is_simulated() {
        for member in members {
            for polls in 0..MOST_POLLS {
                if told(Drop { polls, ..member }).await? {
                    break;
                }
            }
        }
        return Ok(());
    }
    // A call that hangs, other than an acquire, costs the full time of a request.
    let members = members.filter(|member| !member.hangs() || member.step == Step::Acquire);
    let members = members.flat_map(|member| REAL_POLLS.map(|polls| Drop { polls, ..member }));
    let side_by_side: Vec<_> = members.map(told).collect();
    let done = stream::iter(side_by_side).buffer_unordered(AT_ONCE);
    done.try_for_each(|_| ready(Ok(()))).await
}

/// Members of a product that run concurrently on a real store: each has connections of its own.
const AT_ONCE: usize = 12;

/// The product over a future that acquires a free lock and returns whether it did.
async fn acquires<A>(
    ctx: &Ctx,
    steps: &[Step],
    acquire: impl Fn(TestLock) -> A + Copy + Send + Sync,
) -> Result
where
    A: Future<Output = bool> + Send,
{
    product(ctx, steps, |ctx, case| async move {
        let ([client], name) = TestClient::several(&ctx).await?;
        let finished = case.cuts(&client, acquire(client.kept(&name)?)).await;
        nothing_is_left(&ctx, &client, &name, case.free_within(&ctx)).await?;
        Ok(finished)
    })
    .await
}

/// The cleanup of a copy with an unknown outcome is done when the copy can no longer be executed: at
/// its give-up.
fn cleaned_up_within(ctx: &Ctx, bound: Duration) -> Duration {
    bound.max(ctx.kept() / 3)
}

/// Within the bound no client holds the lock or queues for it, and the next acquire is granted.
async fn nothing_is_left(
    ctx: &Ctx,
    client: &TestClient,
    name: &LockName,
    bound: Duration,
) -> Result {
    ctx.left_untouched(name, bound).await?;
    // It may find calls of the dropped future in flight, and comes after them.
    let lock = client.lock(name)?;
    let granted = || async { Ok(lock.try_acquire().await.ok().flatten()) };
    // The store has shown the lock free. On a busy machine a try may still go unanswered, which takes a
    // third of the lease.
    let patience = bound.max(ctx.kept() / 2);
    let next = ctx.found("the next acquire is granted", patience, granted);
    frees(ctx, next.await?).await?;
    client.cleans_up(cleaned_up_within(ctx, bound)).await?;
    ctx.left_untouched(name, Duration::ZERO).await
}
