//! `expiry`: a holder that stops renewing loses the lock within its lease; of its incarnation, only the
//! token counter is used again.

use super::{held, held_for};
use crate::{Ctx, Result, TestDriver, case::cases, ensure, same};
use dlock_core::{LockName, MAX_HOLDS};
use std::time::Duration;

cases! {
    [Clause::Expiry bullet("a hold past its end is gone")]
    a_holder_that_stops_renewing_loses_the_lock_within_its_lease;
    a_lapsed_hold_counts_nowhere;
    lapsed_holds_make_room_for_as_many;
    the_former_owner_starts_a_new_incarnation;
    nothing_of_a_lapsed_holder_is_shown;
    the_first_hold_may_lapse_and_the_incarnation_goes_on;
}

async fn a_holder_that_stops_renewing_loses_the_lock_within_its_lease(ctx: Ctx) -> Result {
    let ([_holder, other], _, lapses) = held_for(&ctx, ctx.short()).await?;
    let next = other.follows(&lapses).await?;
    same("the number of holds", next.holds, 1)
}

async fn a_lapsed_hold_counts_nowhere(ctx: Ctx) -> Result {
    let ([driver, other], name, lapses) = held_for(&ctx, ctx.short()).await?;
    let lives = driver.take(&lapses.ask.again().lasting(ctx.long())).await?;
    ctx.sleep_past(&lapses).await;
    shows_in_time(&ctx, &other, &name, 1).await?;
    let more = driver.take(&lives.ask.again()).await?;
    same("the number of holds", more.holds, 2)?;
    driver.leaves(&lives, 1).await?;
    driver.frees(&more).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

/// Waits for that number of holds. One of several stores may have got a request late, and end its hold later than the
/// others.
async fn shows_in_time(ctx: &Ctx, driver: &TestDriver, name: &LockName, holds: u32) -> Result {
    ctx.eventually("no lapsed hold counts", Duration::ZERO, || async {
        Ok(driver.inspect(name).await?.holds == holds)
    })
    .await
}

async fn lapsed_holds_make_room_for_as_many(ctx: Ctx) -> Result {
    let ([driver], _, lives) = held(&ctx).await?;
    let mut last = lives.clone();
    for _ in 1..MAX_HOLDS {
        last = driver.take(&lives.ask.again().lasting(ctx.short())).await?;
    }
    ctx.sleep_past(&last).await;
    for count in 2..=MAX_HOLDS {
        let hold = driver.take(&lives.ask.again()).await?;
        same("the number of holds", hold.holds, count)?;
    }
    Ok(())
}

async fn the_former_owner_starts_a_new_incarnation(ctx: Ctx) -> Result {
    let ([driver], _, old) = held_for(&ctx, ctx.short()).await?;
    ctx.sleep_past(&old).await;
    let new = driver.take(&old.ask.again()).await?;
    same("the number of holds", new.holds, 1)?;
    let (old, new) = (old.token, new.token);
    ensure(new != old, format!("token {old} is given again"))
}

async fn nothing_of_a_lapsed_holder_is_shown(ctx: Ctx) -> Result {
    let ([holder, other], name, lapses) = held_for(&ctx, ctx.short()).await?;
    ctx.sleep_past(&lapses).await;
    shows_in_time(&ctx, &other, &name, 0).await?;
    other.sees_free(&name).await?;
    let listed = other.list(name.as_str(), 10).await?;
    same("what is listed", listed.len(), 0)?;
    let next = other.take(&ctx.ask(&name)).await?;
    holder.sees_holder(&next).await
}

async fn the_first_hold_may_lapse_and_the_incarnation_goes_on(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held_for(&ctx, ctx.kept()).await?;
    let second = driver.take(&first.ask.again().lasting(ctx.long())).await?;
    ctx.sleep_past(&first).await;
    other.refused(&ctx.ask(&name)).await?;
    let third = driver.take(&first.ask.again().joining(first.token)).await?;
    same("the number of holds", third.holds, 2)?;
    driver.leaves(&second, 1).await?;
    driver.frees(&third).await
}
