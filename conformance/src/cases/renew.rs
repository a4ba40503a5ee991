//! `renew`: renewal prolongs an existing hold, and creates nothing.

use super::{held, held_for};
use crate::{
    Ctx, Failure, Hold, Result, TestDriver, case::cases, ensure, expect::is_left, in_time, same,
};
use dlock_core::driver::{Released, Renewed};

cases! {
    [Clause::Renew]
    a_proof_without_a_lease_prolongs_nothing
        bullet("without a lease a hold that is there keeps its end");
    a_renewal_moves_the_end_of_its_own_hold_only;
    [Clause::Renew bullet("a hold that is there lasts the lease asked for")]
    a_hold_lasts_the_lease_asked_for_from_its_renewal_on;
    a_shorter_lease_never_shortens;
    a_hold_outlives_many_leases;
    [Clause::Renew bullet("never creates a hold or a record")]
    a_name_without_a_record_gets_none;
    a_released_hold_does_not_come_back;
    a_name_kept_shut_is_not_entered;
}

async fn a_hold_lasts_the_lease_asked_for_from_its_renewal_on(ctx: Ctx) -> Result {
    let ([holder, other], _, hold) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let renewed = renew(&ctx, &holder, &hold).await?;
    let next = other.follows(&renewed).await?;
    let after = next.after.since(renewed.before);
    let (promised, lease) = (renewed.valid_for, renewed.ask.lease);
    ensure(
        after >= promised && after >= lease,
        format!("taken after {after:?} of {lease:?}, promised were {promised:?}"),
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
    let ([holder, other], name) = ctx.test_drivers().await?;
    let mut hold = holder.take(&ctx.ask(&name).lasting(ctx.kept())).await?;
    for _ in 0..6 {
        ctx.time_passes(ctx.kept() / 3).await;
        other
            .refused_until(&ctx.ask(&name), hold.over_from())
            .await?;
        hold = renew(&ctx, &holder, &hold).await?;
    }
    other.sees_holds(&name, 1).await?;
    holder.frees(&hold).await
}

async fn a_proof_without_a_lease_prolongs_nothing(ctx: Ctx) -> Result {
    let ([holder, other], _, hold) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let before = ctx.now();
    let answer = holder.renew_one(&hold, None).await?;
    in_time(ctx.now() < hold.over_from(), "the proof came late")?;
    let Renewed::Until { valid_for } = answer else {
        return Err(Failure::new("a hold that is there was not found"));
    };
    ctx.ends_with(&hold, before, valid_for)?;
    other.follows(&hold).await?;
    let answer = holder.renew_one(&hold, None).await?;
    same("renew", answer, Renewed::NotHeld)
}

async fn a_renewal_moves_the_end_of_its_own_hold_only(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let ask = ctx.ask(&ctx.name()?).lasting(ctx.short());
    let first = driver.take(&ask).await?;
    let second = driver.take(&ask.again()).await?;
    driver.renews(&second, ctx.long()).await?;
    ctx.sleep_past(&first).await;
    driver.cannot_renew(&first).await?;
    driver.frees(&second).await
}

async fn a_name_without_a_record_gets_none(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let (never, broken) = (ctx.name()?, ctx.name()?);
    let hold = driver.take(&ctx.ask(&broken)).await?;
    other.breaks(&broken, None).await?;
    driver.cannot_renew(&hold).await?;
    let mut unheard = hold.clone();
    unheard.ask.name = never.clone();
    driver.cannot_renew(&unheard).await?;
    for name in [&never, &broken] {
        other.sees_free(name).await?;
        other.take(&ctx.ask(name)).await?;
    }
    Ok(())
}

async fn a_released_hold_does_not_come_back(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let second = driver.take(&first.ask.again()).await?;
    driver.leaves(&second, 1).await?;
    driver.cannot_renew(&second).await?;
    other.sees_holds(&name, 1).await?;
    driver.frees(&first).await?;
    driver.cannot_renew(&first).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_name_kept_shut_is_not_entered(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let answer = driver.release(&hold, Some(ctx.short())).await?;
    let kept = ctx.now();
    let shut = matches!(answer, Released::MinHold { .. });
    ensure(shut, format!("release answered {answer:?}"))?;
    driver.cannot_renew(&hold).await?;
    other.sees_holds(&name, 0).await?;
    let rest = (kept + ctx.short()).since(ctx.now());
    other.take_within(&ctx.ask(&name), rest).await.map(drop)
}

/// Renews a hold for the lease that it asked for; its end then counts from this renewal.
async fn renew(ctx: &Ctx, driver: &TestDriver, hold: &Hold) -> Result<Hold> {
    let before = ctx.now();
    let valid_for = driver.renews(hold, hold.ask.lease).await?;
    is_left(valid_for, hold.ask.lease)?;
    Ok(Hold {
        valid_for,
        before,
        after: ctx.now(),
        ..hold.clone()
    })
}
