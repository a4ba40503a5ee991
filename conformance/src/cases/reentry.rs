//! `reentry`: while one of its holds lives, the same owner acquires again at once, past every queue,
//! from any client.

use super::{ORDERS, held, held_for};
use crate::{Ctx, Hold, Result, TestDriver, case::cases, same};
use dlock_core::FencingToken;

cases! {
    [Clause::Reentry]
    a_join_enters_the_incarnation_that_it_names;
    [Clause::Reentry bullet("a hold of `req.owner` lives")]
    the_owner_enters_again_with_one_hold_more;
    the_token_is_that_of_the_incarnation;
    the_owner_enters_from_another_client;
    the_owner_enters_past_every_waiter;
    [Clause::Reentry bullet("free only when the last hold is gone")]
    free_when_the_last_hold_is_gone_in_whatever_order;
    [Clause::Reentry bullet("`req.join` is given and that incarnation is over")]
    a_join_of_a_released_incarnation_is_gone;
    a_join_of_a_lapsed_incarnation_is_gone;
    a_join_is_gone_though_its_owner_is_back;
    a_join_of_anothers_incarnation_is_gone;
    a_join_of_an_incarnation_kept_shut_is_gone;
    a_join_that_is_gone_is_not_queued needs(Queue);
}

async fn the_owner_enters_again_with_one_hold_more(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let mut holds = vec![first.clone()];
    for count in 2..=4 {
        let hold = driver.take(&first.ask.again()).await?;
        same("the number of holds", hold.holds, count)?;
        holds.push(hold);
    }
    other.sees_holds(&name, 4).await?;
    for left in (1..=3).rev() {
        driver.leaves(&holds.swap_remove(0), left).await?;
        other.refused(&ctx.ask(&name)).await?;
    }
    driver.frees(&holds[0]).await
}

async fn the_token_is_that_of_the_incarnation(ctx: Ctx) -> Result {
    let ([driver, other], _, first) = held(&ctx).await?;
    let second = driver.take(&first.ask.again()).await?;
    let third = other.take(&first.ask.again()).await?;
    same("the token of a re-entry", second.token, first.token)?;
    // The hold that began the incarnation is gone; the incarnation lives on.
    driver.leaves(&first, 2).await?;
    let fourth = driver.take(&first.ask.again()).await?;
    same("the token of a re-entry", third.token, first.token)?;
    same("the token of a re-entry", fourth.token, first.token)
}

async fn the_owner_enters_from_another_client(ctx: Ctx) -> Result {
    let ([here, there], name, first) = held(&ctx).await?;
    let second = there.take(&first.ask.again()).await?;
    same("the number of holds", second.holds, 2)?;
    here.leaves(&first, 1).await?;
    here.refused(&ctx.ask(&name)).await?;
    there.renews(&second, ctx.long()).await?;
    there.frees(&second).await
}

async fn the_owner_enters_past_every_waiter(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, first) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    other.queues(&name).await?;
    let second = holder.take(&first.ask.again()).await?;
    let third = other.take(&first.ask.again()).await?;
    same("the number of holds", third.holds, 3)?;
    waiter.refused(&waiting).await?;
    other.leaves(&third, 2).await?;
    holder.leaves(&first, 1).await?;
    waiter.refused(&waiting).await?;
    holder.frees(&second).await?;
    waiter.take(&waiting).await.map(drop)
}

async fn free_when_the_last_hold_is_gone_in_whatever_order(ctx: Ctx) -> Result {
    let ([holder, waiter], _) = ctx.test_drivers().await?;
    for order in ORDERS {
        let name = ctx.name()?;
        let first = holder.take(&ctx.ask(&name)).await?;
        let second = holder.take(&first.ask.again()).await?;
        let third = holder.take(&first.ask.again()).await?;
        let holds = [first, second, third];
        let waiting = waiter.queues(&name).await?;
        let [one, two, last] = order.map(|at| &holds[at]);
        holder.leaves(one, 2).await?;
        waiter.refused(&waiting).await?;
        holder.leaves(two, 1).await?;
        waiter.refused(&waiting).await?;
        holder.renews(last, ctx.long()).await?;
        holder.frees(last).await?;
        waiter.take(&waiting).await?;
    }
    Ok(())
}

async fn a_join_enters_the_incarnation_that_it_names(ctx: Ctx) -> Result {
    let ([here, there, waiter], name, first) = held(&ctx).await?;
    waiter.queues(&name).await?;
    let joined = there.take(&first.ask.again().joining(first.token)).await?;
    same("the number of holds", joined.holds, 2)?;
    same("the token", joined.token, first.token)?;
    here.leaves(&first, 1).await?;
    let again = here.take(&first.ask.again().joining(first.token)).await?;
    there.leaves(&joined, 1).await?;
    here.frees(&again).await
}

async fn a_join_of_a_released_incarnation_is_gone(ctx: Ctx) -> Result {
    let ([driver], name, past) = held(&ctx).await?;
    driver.frees(&past).await?;
    cannot_join(&driver, &past).await?;
    driver.sees_free(&name).await?;
    let held = driver.take(&ctx.ask(&name)).await?;
    cannot_join(&driver, &past).await?;
    driver.sees_holds(&name, 1).await?;
    driver.frees(&held).await
}

async fn a_join_of_a_lapsed_incarnation_is_gone(ctx: Ctx) -> Result {
    let ([driver], name, past) = held_for(&ctx, ctx.short()).await?;
    ctx.sleep_past(&past).await;
    cannot_join(&driver, &past).await?;
    driver.sees_free(&name).await
}

async fn a_join_is_gone_though_its_owner_is_back(ctx: Ctx) -> Result {
    let ([driver], name, past) = held(&ctx).await?;
    driver.frees(&past).await?;
    let back = driver.take(&past.ask.again()).await?;
    cannot_join(&driver, &past).await?;
    driver.sees_holds(&name, 1).await?;
    driver.frees(&back).await
}

async fn a_join_of_anothers_incarnation_is_gone(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    other.gone(&ctx.ask(&name).joining(hold.token)).await?;
    let next = FencingToken(hold.token.0 + 1);
    other.gone(&hold.ask.again().joining(next)).await?;
    other.sees_holds(&name, 1).await?;
    driver.frees(&hold).await
}

async fn a_join_of_an_incarnation_kept_shut_is_gone(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    driver.release(&hold, Some(ctx.long())).await?;
    cannot_join(&driver, &hold).await?;
    driver.sees_holds(&name, 0).await
}

async fn a_join_that_is_gone_is_not_queued(ctx: Ctx) -> Result {
    let ([driver, other], name, past) = held(&ctx).await?;
    driver.frees(&past).await?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    let late = past.ask.again().joining(past.token).in_line(other.ticket());
    other.gone(&late).await?;
    driver.frees(&hold).await?;
    driver.take(&ctx.ask(&name)).await.map(drop)
}

async fn cannot_join(driver: &TestDriver, past: &Hold) -> Result {
    driver.gone(&past.ask.again().joining(past.token)).await
}
