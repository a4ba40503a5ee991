//! `keep`: a minimum hold lasts, however quickly its guard is released or dropped.

use super::test_client::{ONE_LEFT, TestClient, fails, frees};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{ErrorKind, Guard, Lease, LockName, ReleaseOutcome};
use std::time::Duration;

cases! {
    [Clause::Keep]
    a_quick_holder_leaves_the_name_unavailable;
    its_own_owner_is_refused_as_well;
    a_dropped_guard_leaves_the_name_unavailable;
    a_hold_past_its_minimum_leaves_the_name_free;
    the_longest_of_those_inside_counts;
    the_least_time_must_fit_the_most;
}

/// Acquires a name with this minimum hold.
async fn takes(client: &TestClient, name: &LockName, least: Duration) -> Result<Guard> {
    client.take(&client.lock(name)?.min_hold(least)).await
}

async fn a_quick_holder_leaves_the_name_unavailable(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let began = ctx.now();
    let guard = takes(&client, &name, ctx.kept()).await?;
    let outcome = ctx.answered(guard.release()).await??;
    let ReleaseOutcome::MinHold { rest } = outcome else {
        return Err(Failure::new(format!("the name is not kept: {outcome:?}")));
    };
    let bound = ctx.kept() + ctx.rounding();
    ensure(
        rest <= bound,
        "it is unavailable for longer than was asked for",
    )?;
    other.refused(&name).await?;
    let next = other.lock(&name)?.acquire_timeout(ctx.long());
    let bound = ctx.kept() + ctx.slack() + ctx.answer();
    let next = ctx.within("it opens", bound, next).await??;
    let over = ctx.now() + ctx.rounding() >= began + ctx.kept();
    ensure(
        over,
        "another client got in before the minimum hold was over",
    )?;
    frees(&ctx, next).await
}

async fn its_own_owner_is_refused_as_well(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let owner = client.inner.owner();
    let lock = client.lock(&name)?.with_owner(&owner).min_hold(ctx.long());
    let guard = client.take(&lock).await?;
    ctx.answered(guard.release()).await??;
    let again = ctx.answered(lock.try_acquire()).await?;
    same("its owner is inside", matches!(again, Ok(Some(_))), false)
}

async fn a_dropped_guard_leaves_the_name_unavailable(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let observer = ctx.observer().await?;
    drop(takes(&client, &name, ctx.kept()).await?);
    let shut = || async {
        let seen = observer.inspect(&name).await?;
        Ok(seen.holders.is_empty() && seen.unavailable_for.is_some())
    };
    let what = "the name is unavailable without a holder";
    ctx.eventually(what, ctx.answer(), shut).await?;
    other.refused(&name).await?;
    let bound = ctx.kept() + ctx.slack() + ctx.answer();
    ctx.left_untouched(&name, bound).await
}

async fn a_hold_past_its_minimum_leaves_the_name_free(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let least = ctx.short() / 2;
    let guard = takes(&client, &name, least).await?;
    ctx.time_passes(least + ctx.rounding()).await;
    same("the rest of it", guard.min_hold_remaining(), Duration::ZERO)?;
    frees(&ctx, guard).await?;
    let next = other.acquire(&name).await?;
    frees(&ctx, next).await
}

async fn the_longest_of_those_inside_counts(ctx: Ctx) -> Result {
    let ([client, other], _) = TestClient::several(&ctx).await?;
    for longest_goes_last in [false, true] {
        let name = ctx.name()?;
        let kept = takes(&client, &name, ctx.long()).await?;
        let joined = other.join(&name, &kept.pass()?).await?;
        let (first, last) = if longest_goes_last {
            (joined, kept)
        } else {
            (kept, joined)
        };
        same("the first release", first.release().await?, ONE_LEFT)?;
        let outcome = last.release().await?;
        let kept = matches!(outcome, ReleaseOutcome::MinHold { .. });
        ensure(kept, format!("the last release answered {outcome:?}"))?;
        other.refused(&name).await?;
    }
    Ok(())
}

async fn the_least_time_must_fit_the_most(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let lock = client.lock(&name)?.min_hold(ctx.short() * 2);
    let fixed = lock.clone().lease(Lease::fixed(ctx.short()));
    for lock in [lock.max_hold(ctx.short()), fixed] {
        fails(ErrorKind::Misuse, lock.try_acquire().await)?;
    }
    Ok(())
}
