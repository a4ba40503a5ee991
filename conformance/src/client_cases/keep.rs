//! `keep`: a minimum hold lasts, however quickly its guard is released or dropped.

use super::peer::{ONE_LEFT, Peer, frees, left_untouched};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{ErrorKind, Guard, Lease, LockName, ReleaseOutcome};
use std::time::Duration;

cases! {
    [Clause::Keep]
    a_quick_holder_leaves_the_name_shut;
    its_own_owner_is_shut_out_as_well;
    a_dropped_guard_leaves_the_name_shut;
    whoever_took_his_time_leaves_it_free;
    the_longest_of_those_inside_counts;
    what_is_shut_outlives_its_client needs(Detached);
    the_least_time_must_fit_the_most;
}

/// Acquires a name with this minimum hold.
async fn takes(peer: &Peer, name: &LockName, least: Duration) -> Result<Guard> {
    peer.take(&peer.lock(name)?.min_hold(least)).await
}

async fn a_quick_holder_leaves_the_name_shut(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let began = ctx.now();
    let guard = takes(&peer, &name, ctx.short()).await?;
    let outcome = ctx.within("release is answered", ctx.answer(), guard.release());
    let outcome = outcome.await??;
    let ReleaseOutcome::MinHold { rest } = outcome else {
        return Err(Failure::new(format!("the name is not kept: {outcome:?}")));
    };
    ensure(
        rest <= ctx.short() + ctx.rounding(),
        "it is unavailable for longer than was asked for",
    )?;
    other.refused(&other.lock(&name)?).await?;
    let next = other.lock(&name)?.acquire_timeout(ctx.long());
    let next = ctx.within("it opens", ctx.short() + ctx.slack() + ctx.answer(), next);
    let next = next.await??;
    ensure(
        ctx.now() + ctx.rounding() >= began + ctx.short(),
        "another client got in before the minimum hold was over",
    )?;
    frees(&ctx, next).await
}

async fn its_own_owner_is_shut_out_as_well(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let lock = peer.lock(&name)?.with_owner(&owner).min_hold(ctx.short());
    let guard = peer.take(&lock).await?;
    ctx.within("release is answered", ctx.answer(), guard.release())
        .await??;
    peer.refused(&lock).await
}

async fn a_dropped_guard_leaves_the_name_shut(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let observer = ctx.caller().await?;
    let name = ctx.name()?;
    drop(takes(&peer, &name, ctx.short()).await?);
    let shut = || async {
        let seen = observer.inspect(&name).await?;
        Ok(seen.holders.is_empty() && seen.unavailable_for.is_some())
    };
    ctx.eventually(
        "the name is unavailable without a holder",
        ctx.answer(),
        shut,
    )
    .await?;
    other.refused(&other.lock(&name)?).await?;
    let bound = ctx.short() + ctx.slack() + ctx.answer();
    left_untouched(&ctx, &observer, &name, bound).await
}

async fn whoever_took_his_time_leaves_it_free(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let least = ctx.short() / 2;
    let guard = takes(&peer, &name, least).await?;
    ctx.time_passes(least + ctx.rounding()).await;
    ensure(
        guard.min_hold_remaining().is_zero(),
        "the minimum hold should be over",
    )?;
    frees(&ctx, guard).await?;
    let next = other.take(&other.lock(&name)?).await?;
    frees(&ctx, next).await
}

async fn the_longest_of_those_inside_counts(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    for longest_goes_last in [false, true] {
        let name = ctx.name()?;
        let kept = takes(&peer, &name, ctx.short()).await?;
        let joined = other.join(other.lock(&name)?, &kept.pass()?).await?;
        let (first, last) = if longest_goes_last {
            (joined, kept)
        } else {
            (kept, joined)
        };
        let outcome = first.release().await?;
        same("the first release", outcome, ONE_LEFT)?;
        let outcome = last.release().await?;
        ensure(
            matches!(outcome, ReleaseOutcome::MinHold { .. }),
            format!("the last release should leave it unavailable, answered {outcome:?}"),
        )?;
        other.refused(&other.lock(&name)?).await?;
    }
    Ok(())
}

async fn what_is_shut_outlives_its_client(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let began = ctx.now();
    takes(&peer, &name, ctx.short()).await?.release().await?;
    peer.gate.kill().await;
    drop(peer);
    other.refused(&other.lock(&name)?).await?;
    let next = other.short(&name)?.acquire_timeout(ctx.short() * 2);
    let next = next.await?;
    ensure(
        ctx.now() + ctx.rounding() >= began + ctx.short(),
        "another client got in before the minimum hold was over",
    )?;
    frees(&ctx, next).await
}

async fn the_least_time_must_fit_the_most(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let lock = peer.lock(&ctx.name()?)?.min_hold(ctx.short() * 2);
    let fixed = lock.clone().lease(Lease::fixed(ctx.short()));
    for refused in [lock.max_hold(ctx.short()), fixed] {
        let kind = refused.try_acquire().await.err().map(|error| error.kind());
        ensure(
            kind == Some(ErrorKind::Misuse),
            format!("a minimum hold beyond the maximum should be misuse, is {kind:?}"),
        )?;
    }
    Ok(())
}
