//! `renew`: renewal prolongs an existing hold, and creates nothing.

use super::{held, held_for};
use crate::{Caller, Ctx, Failure, Hold, Result, case::cases, ensure, expect::is_left, same};
use dlock_core::driver::{Released, Renewed};

cases! {
    [Clause::Renew]
    a_hold_lasts_the_lease_asked_for_from_its_renewal_on
        bullet("a hold that is there lasts the lease asked for");
    a_shorter_lease_never_shortens bullet("a hold that is there lasts the lease asked for");
    a_hold_outlives_many_leases bullet("a hold that is there lasts the lease asked for");
    a_proof_without_a_lease_prolongs_nothing
        bullet("without a lease a hold that is there keeps its end");
    a_renewal_moves_the_end_of_its_own_hold_only;
    a_name_without_a_record_gets_none bullet("never creates a hold or a record");
    a_released_hold_does_not_come_back bullet("never creates a hold or a record");
    a_lapsed_hold_does_not_come_back bullet("never creates a hold or a record");
    a_name_kept_shut_is_not_entered bullet("never creates a hold or a record");
}

async fn a_hold_lasts_the_lease_asked_for_from_its_renewal_on(ctx: Ctx) -> Result {
    let ([holder, other], _, hold) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let renewed = renew(&ctx, &holder, &hold).await?;
    let next = other.follows(&renewed).await?;
    ensure(
        next.after >= renewed.over_from() && next.after >= renewed.before + renewed.valid_for,
        format!(
            "taken {:?} after a renewal for {:?} that promised {:?}",
            next.after.since(renewed.before),
            renewed.ask.lease,
            renewed.valid_for
        ),
    )
}

async fn a_shorter_lease_never_shortens(ctx: Ctx) -> Result {
    let ([holder, other], _, hold) = held_for(&ctx, ctx.short() * 2).await?;
    let before = ctx.now();
    let promised = holder.renews(&hold, ctx.short()).await?;
    ctx.ends_with(&hold, before, promised)?;
    other.takes_over(&hold).await.map(drop)
}

async fn a_hold_outlives_many_leases(ctx: Ctx) -> Result {
    let [holder, other] = ctx.callers().await?;
    let name = ctx.name()?;
    let mut hold = holder.take(&ctx.ask(&name).lasting(ctx.short())).await?;
    for _ in 0..6 {
        ctx.time_passes(ctx.short() / 3).await;
        other.refused(&ctx.ask(&name)).await?;
        hold = renew(&ctx, &holder, &hold).await?;
    }
    same("the number of holds", other.inspect(&name).await?.holds, 1)?;
    holder.frees(&hold).await
}

async fn a_proof_without_a_lease_prolongs_nothing(ctx: Ctx) -> Result {
    let ([holder, other], _, hold) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let before = ctx.now();
    let Renewed::Until { valid_for } = holder.renew_one(&hold, None).await? else {
        return Err(Failure::new("a hold that is there was not found"));
    };
    ctx.ends_with(&hold, before, valid_for)?;
    other.follows(&hold).await?;
    same(
        "renew",
        holder.renew_one(&hold, None).await?,
        Renewed::NotHeld,
    )
}

async fn a_renewal_moves_the_end_of_its_own_hold_only(ctx: Ctx) -> Result {
    let caller = ctx.caller().await?;
    let ask = ctx.ask(&ctx.name()?).lasting(ctx.short());
    let first = caller.take(&ask).await?;
    let second = caller.take(&ask.again()).await?;
    caller.renews(&second, ctx.long()).await?;
    ctx.sleep_past(&first).await;
    caller.cannot_renew(&first).await?;
    caller.frees(&second).await
}

async fn a_name_without_a_record_gets_none(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let (never, broken) = (ctx.name()?, ctx.name()?);
    let hold = caller.take(&ctx.ask(&broken)).await?;
    other.breaks(&broken, None).await?;
    caller.cannot_renew(&hold).await?;
    let mut unheard = hold.clone();
    unheard.ask.name = never.clone();
    caller.cannot_renew(&unheard).await?;
    for name in [&never, &broken] {
        other.sees_free(name).await?;
        other.take(&ctx.ask(name)).await?;
    }
    Ok(())
}

async fn a_released_hold_does_not_come_back(ctx: Ctx) -> Result {
    let ([caller, other], name, first) = held(&ctx).await?;
    let second = caller.take(&first.ask.again()).await?;
    caller.leaves(&second, 1).await?;
    caller.cannot_renew(&second).await?;
    same("the number of holds", other.inspect(&name).await?.holds, 1)?;
    caller.frees(&first).await?;
    caller.cannot_renew(&first).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lapsed_hold_does_not_come_back(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held_for(&ctx, ctx.short()).await?;
    ctx.sleep_past(&hold).await;
    caller.cannot_renew(&hold).await?;
    other.sees_free(&name).await?;
    other.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn a_name_kept_shut_is_not_entered(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    let answer = caller.release(&hold, Some(ctx.short())).await?;
    let kept = ctx.now();
    ensure(
        matches!(answer, Released::MinHold { .. }),
        format!("release answered {answer:?}"),
    )?;
    caller.cannot_renew(&hold).await?;
    same("the number of holds", other.inspect(&name).await?.holds, 0)?;
    let rest = (kept + ctx.short()).since(ctx.now());
    other.take_within(&ctx.ask(&name), rest).await.map(drop)
}

/// Renews a hold for the lease that it asked for; its end then counts from this renewal.
async fn renew(ctx: &Ctx, caller: &Caller, hold: &Hold) -> Result<Hold> {
    let before = ctx.now();
    let valid_for = caller.renews(hold, hold.ask.lease).await?;
    is_left(valid_for, hold.ask.lease)?;
    let (valid_for, after) = (valid_for, ctx.now());
    Ok(Hold {
        valid_for,
        before,
        after,
        ..hold.clone()
    })
}
