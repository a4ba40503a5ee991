//! `owner`: only a hold renews or releases itself; any other request gets `NotHeld` and changes
//! nothing.

use super::{held, held_for};
use crate::{Ctx, Hold, Result, TestDriver, case::cases, ensure, same};
use dlock_core::driver::{Released, Renewed};
use futures_util::future::try_join_all;

cases! {
    [Clause::Owner]
    a_batch_answers_each_entry_alone_and_in_order
        bullet("a hold that is not there, is another owner's or is past its end: `NotHeld`, nothing changed; others");
    the_largest_batch_is_served_whole;
    [Clause::Owner bullet("a hold that is not there, is another owner's or is past its end")]
    another_owner_neither_renews_nor_releases;
    another_hold_of_the_owner_neither_renews_nor_releases;
    a_second_release_ends_no_other_hold;
    an_owner_that_came_back_has_lost_its_old_hold;
    a_hold_past_its_end_is_not_held;
    a_hold_taken_over_after_its_end_is_not_held;
    a_hold_past_its_end_is_not_held_though_another_lives;
    a_hold_is_good_for_its_own_name_only;
    releasing_all_takes_the_holds_of_that_owner_only;
}

async fn another_owner_neither_renews_nor_releases(ctx: Ctx) -> Result {
    let ([holder, stranger], name, hold) = held(&ctx).await?;
    let mut stolen = hold.clone();
    stolen.ask.owner = ctx.ask(&name).owner;
    for driver in [&stranger, &holder] {
        driver.cannot_renew(&stolen).await?;
        driver.cannot_release(&stolen).await?;
    }
    stranger.sees_holds(&name, 1).await?;
    holder.frees(&hold).await?;
    // Nor does it prolong anything.
    let hold = holder.take(&ctx.ask(&name).lasting(ctx.short())).await?;
    stolen.ask.hold = hold.ask.hold;
    stranger.cannot_renew(&stolen).await?;
    stranger.follows(&hold).await.map(drop)
}

async fn another_hold_of_the_owner_neither_renews_nor_releases(ctx: Ctx) -> Result {
    let ([driver], _, hold) = held(&ctx).await?;
    let mut unknown = hold.clone();
    unknown.ask = hold.ask.again();
    not_held(&driver, &unknown).await?;
    lives(&driver, &hold).await
}

/// The hold is neither renewed nor released.
async fn not_held(driver: &TestDriver, hold: &Hold) -> Result {
    driver.cannot_renew(hold).await?;
    driver.cannot_release(hold).await
}

/// The hold is renewed, and released as the last one.
async fn lives(driver: &TestDriver, hold: &Hold) -> Result {
    driver.renews(hold, driver.ctx.long()).await?;
    driver.frees(hold).await
}

async fn a_second_release_ends_no_other_hold(ctx: Ctx) -> Result {
    let ([first, second], name, before) = held(&ctx).await?;
    first.frees(&before).await?;
    first.cannot_release(&before).await?;
    let after = second.take(&ctx.ask(&name)).await?;
    first.cannot_release(&before).await?;
    first.cannot_renew(&before).await?;
    first.refused(&ctx.ask(&name)).await?;
    second.frees(&after).await
}

async fn an_owner_that_came_back_has_lost_its_old_hold(ctx: Ctx) -> Result {
    let ([first, second], _, old) = held(&ctx).await?;
    first.frees(&old).await?;
    let new = second.take(&old.ask.again()).await?;
    not_held(&first, &old).await?;
    lives(&second, &new).await
}

async fn a_hold_past_its_end_is_not_held(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    for release in [false, true] {
        let ask = ctx.ask(&name).lasting(ctx.short());
        let hold = driver.take_soon(&ask).await?;
        ctx.sleep_past(&hold).await;
        if release {
            driver.cannot_release(&hold).await?;
        } else {
            driver.cannot_renew(&hold).await?;
        }
        driver.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_hold_taken_over_after_its_end_is_not_held(ctx: Ctx) -> Result {
    let ([first, second], name, old) = held_for(&ctx, ctx.short()).await?;
    let new = second.take_within(&ctx.ask(&name), ctx.short()).await?;
    first.cannot_renew(&old).await?;
    first.cannot_release(&old).await?;
    first.refused(&old.ask.again()).await?;
    lives(&second, &new).await
}

async fn a_hold_past_its_end_is_not_held_though_another_lives(ctx: Ctx) -> Result {
    let ([driver], _, over) = held_for(&ctx, ctx.short()).await?;
    let other = driver.take(&over.ask.again().lasting(ctx.long())).await?;
    ctx.sleep_past(&over).await;
    not_held(&driver, &over).await?;
    lives(&driver, &other).await
}

async fn a_hold_is_good_for_its_own_name_only(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let (one, other) = (ctx.name()?, ctx.name()?);
    let hold = driver.take(&ctx.ask(&one)).await?;
    let mut ask = hold.ask.again();
    ask.name = other.clone();
    let beside = driver.take(&ask).await?;
    let mut elsewhere = hold.clone();
    elsewhere.ask.name = other;
    not_held(&driver, &elsewhere).await?;
    driver.frees(&beside).await?;
    driver.frees(&hold).await
}

async fn a_batch_answers_each_entry_alone_and_in_order(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let names = ctx.names_of_one_lane(&**driver.inner(), 7)?;
    let mut holds: Vec<Hold> = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let lease = if at == LAPSED {
            ctx.short()
        } else {
            ctx.long()
        };
        holds.push(driver.take(&ctx.ask(name).lasting(lease)).await?);
    }
    ctx.sleep_past(&holds[LAPSED]).await;
    driver.frees(&holds[RELEASED]).await?;
    other.breaks(&names[BROKEN], None).await?;
    other.breaks(&names[TAKEN_OVER], None).await?;
    let thief = other.take(&ctx.ask(&names[TAKEN_OVER])).await?;
    holds[STRANGER].ask.owner = ctx.ask(&names[STRANGER]).owner;
    for (at, answer) in driver
        .renew(&holds, ctx.long())
        .await?
        .into_iter()
        .enumerate()
    {
        let lives = at == 0 || at == names.len() - 1;
        let prolonged = matches!(answer?, Renewed::Until { .. });
        same(format!("entry {at} is renewed"), prolonged, lives)?;
    }
    for free in [LAPSED, RELEASED, BROKEN] {
        other.sees_free(&names[free]).await?;
    }
    other.frees(&thief).await
}

/// Positions in the batch between two live holds.
const LAPSED: usize = 1;
const RELEASED: usize = 2;
const BROKEN: usize = 3;
const TAKEN_OVER: usize = 4;
const STRANGER: usize = 5;

async fn the_largest_batch_is_served_whole(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let most = driver.inner().capabilities().renew_batch;
    let names = ctx.names_of_one_lane(&**driver.inner(), most)?;
    let mut holds = Vec::new();
    // Some at once: one after the other, the first may be over before the last is there.
    for some in names.chunks(AT_ONCE) {
        let asked: Vec<_> = some.iter().map(|name| ctx.ask(name)).collect();
        holds.extend(try_join_all(asked.iter().map(|ask| driver.take(ask))).await?);
    }
    for (at, answer) in driver
        .renew(&holds, ctx.long())
        .await?
        .into_iter()
        .enumerate()
    {
        let renewed = matches!(answer?, Renewed::Until { .. });
        ensure(renewed, format!("entry {at} is not held"))?;
    }
    Ok(())
}

async fn releasing_all_takes_the_holds_of_that_owner_only(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    for _ in 0..2 {
        driver.take(&hold.ask.again()).await?;
    }
    let answer = other.release_all(&ctx.ask(&name)).await?;
    let refused = matches!(answer, Released::NotHeld { .. });
    ensure(refused, format!("a stranger got {answer:?}"))?;
    driver.sees_holds(&name, 3).await?;
    let answer = other.release_all(&hold.ask).await?;
    let freed = matches!(answer, Released::Freed);
    ensure(freed, format!("the owner got {answer:?}"))?;
    driver.cannot_renew(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

/// How many locks of a large batch are acquired at once.
const AT_ONCE: usize = 32;
