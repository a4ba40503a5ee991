//! `late`: a request that the store executes long after its sender gave up takes nothing that lasts.

use super::{
    gated_driver::{CallOutcome, Step},
    task::polled,
    test_client::{TestClient, ends, frees, held, stays_held},
};
use crate::{Ctx, Result, case::cases, ensure, same};
use dlock_core::{Instant, LockName};
use std::time::Duration;

cases! {
    [Clause::Late]
    a_copy_that_revives_a_released_hold_is_cleaned_up;
    a_copy_that_revives_a_lost_hold_is_cleaned_up;
    a_cancelled_acquire_executed_later_is_cleaned_up;
    an_acquire_executed_after_its_give_up_takes_nothing_that_lasts;
    a_cleanup_release_that_was_slow_is_followed_by_another;
    a_late_acquire_leaves_no_waiter;
    a_late_renewal_changes_nothing;
}

async fn a_copy_that_revives_a_released_hold_is_cleaned_up(ctx: Ctx) -> Result {
    for drops in [false, true] {
        let ([client], name) = TestClient::several(&ctx).await?;
        // Well before its give-up, a third of the lease after it was sent.
        let late = ctx.kept() / 5;
        client.gate.once(Step::Acquire, CallOutcome::Late(late));
        let begun = ctx.now();
        let guard = client.take(&client.kept(&name)?).await?;
        ends(&ctx, guard, drops).await?;
        lasts_no_longer(&ctx, &client, &name, begun + ctx.kept() / 3).await?;
    }
    Ok(())
}

async fn a_copy_that_revives_a_lost_hold_is_cleaned_up(ctx: Ctx) -> Result {
    // After the first renewal, which finds the hold lost.
    let late = ctx.kept() / 2;
    let last = late + ctx.kept() / 3;
    // Its user gives up before the copy arrives, and after it has arrived.
    for kept_for in [Duration::ZERO, last + ctx.rounding()] {
        let client = TestClient::later_than_the_store(&ctx, late).await?;
        let ([other], name) = TestClient::several(&ctx).await?;
        client.gate.once(Step::Acquire, CallOutcome::Late(late));
        let begun = ctx.now();
        // Revived for long enough to be visible.
        let guard = client.take(&client.kept(&name)?).await?;
        other.breaks(&name, None).await?;
        let lost = ctx.within("it is lost", ctx.kept() / 2, guard.lost());
        lost.await?;
        ctx.sleep_until(begun + kept_for).await;
        drop(guard);
        lasts_no_longer(&ctx, &client, &name, begun + last).await?;
    }
    Ok(())
}

async fn a_cancelled_acquire_executed_later_is_cleaned_up(ctx: Ctx) -> Result {
    let late = ctx.kept() / 5;
    for outcome in [CallOutcome::Late(late), CallOutcome::Mute(late)] {
        for waits in [true, false] {
            let ([client], name) = TestClient::several(&ctx).await?;
            client.gate.once(Step::Acquire, outcome);
            client.gate.always(Step::Acquire, CallOutcome::ErrorBefore);
            let begun = ctx.now();
            let lock = client.kept(&name)?;
            let finished = if waits {
                polled(lock.acquire(), 2).await.is_some()
            } else {
                polled(lock.try_acquire(), 2).await.is_some()
            };
            same("it is at its end", finished, false)?;
            client.gate.clear();
            lasts_no_longer(&ctx, &client, &name, begun + ctx.kept() / 3).await?;
        }
    }
    Ok(())
}

async fn an_acquire_executed_after_its_give_up_takes_nothing_that_lasts(ctx: Ctx) -> Result {
    let late = ctx.short() / 3;
    let give_up = ctx.short() / 3;
    for after in [late / 2, late * 2] {
        // One copy that may come late, and one that comes later than the store may execute it.
        let (client, name) = (
            TestClient::later_than_the_store(&ctx, late).await?,
            ctx.name()?,
        );
        let executed = give_up + after;
        client
            .gate
            .always(Step::Acquire, CallOutcome::Mute(executed));
        let begun = ctx.now();
        let tried = client.short(&name)?.try_acquire().await;
        same("try_acquire is answered", tried.is_ok(), false)?;
        client.gate.clear();
        let last = begun + executed.max(give_up + late);
        lasts_no_longer(&ctx, &client, &name, last).await?;
    }
    Ok(())
}

async fn a_cleanup_release_that_was_slow_is_followed_by_another(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client
        .gate
        .once(Step::Acquire, CallOutcome::Late(ctx.kept() / 5));
    let begun = ctx.now();
    let guard = client.take(&client.kept(&name)?).await?;
    frees(&ctx, guard).await?;
    // Each release may have been executed before the copy that it should clean up.
    let slow = Duration::from_millis(1_100);
    client.gate.always(Step::Release, CallOutcome::Slow(slow));
    ctx.sleep_until(begun + ctx.kept() / 3 + slow * 3).await;
    same(
        "how many cleanups are pending",
        client.inner.pending_cleanups(),
        1,
    )?;
    let releases = client.gate.calls(Step::Release);
    client.gate.clear();
    client.cleans_up(slow * 2).await?;
    let more = client.gate.calls(Step::Release) > releases;
    ensure(more, "it was cleaned up by a release that was slow")?;
    ctx.sees_free(&name).await
}

async fn a_late_acquire_leaves_no_waiter(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let late = CallOutcome::Mute(ctx.short() / 5);
    client.gate.always(Step::Acquire, late);
    let begun = ctx.now();
    let waited = polled(client.short(&name)?.acquire(), 2).await;
    same("it is at its end", waited.is_some(), false)?;
    ctx.sleep_until(begun + ctx.short() / 3).await;
    client.cleans_up(ctx.short()).await?;
    ctx.sees_waiters(&name, 0).await?;
    frees(&ctx, guard).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

/// It reaches the store when another client holds the lock, for a fixed lease.
async fn a_late_renewal_changes_nothing(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::short).await?;
    client
        .gate
        .always(Step::Renew, CallOutcome::Mute(ctx.short() / 10));
    client.sends(Step::Renew, 1).await?;
    frees(&ctx, guard).await?;
    let lock = other.fixed(&name)?;
    let next = other.take(&lock).await?;
    let granted = ctx.now();
    ctx.time_passes(ctx.short() / 3).await;
    // By the store's account, which began with the grant at the latest, and not with the request.
    let lease = lock.effective_lease()?.length();
    let left = lease.saturating_sub(ctx.now().since(granted));
    let seen = ctx.observer().await?.inspect(&name).await?;
    let rest = seen.holders.first().and_then(|holder| holder.rest);
    stays_held(&ctx, &next).await?;
    let bound = left + ctx.short() / 50 + ctx.slack();
    let kept = rest.unwrap_or_default() <= bound;
    ensure(kept, "another's lease was prolonged")?;
    frees(&ctx, next).await
}

/// When the last copy has been executed, at the last possible moment, nothing is left one round trip
/// later.
async fn lasts_no_longer(ctx: &Ctx, client: &TestClient, name: &LockName, last: Instant) -> Result {
    ctx.sleep_until(last + Duration::from_millis(5)).await;
    client.cleans_up(ctx.short()).await?;
    ctx.sees_free(name).await?;
    let next = client.acquire(name).await?;
    frees(ctx, next).await?;
    ctx.left_untouched(name, Duration::ZERO).await
}
