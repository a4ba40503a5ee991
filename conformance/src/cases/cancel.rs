//! `cancel`: a cancelled request leaves no hold and no waiter.

use super::held;
use crate::{Ask, Ctx, Result, TestDriver, case::cases, client_cases::task::polled, same};
use futures_util::future::join_all;

cases! {
    [Clause::Cancel]
    refused_without_a_ticket_leaves_no_trace bullet("refused without");
    leaving_with_an_unknown_ticket_changes_nothing bullet("an unknown ticket, or one used up");
    leaving_with_a_ticket_used_up_ends_no_hold bullet("an unknown ticket, or one used up");
    an_acquire_dropped_anywhere_is_undone_by_a_release;
    a_wait_dropped_anywhere_is_undone_by_leaving needs(Queue);
    a_driver_works_on_after_any_call_was_dropped;
    a_driver_works_on_while_callers_are_not_polled;
    a_caller_that_is_not_polled_holds_the_lock_no_longer_than_its_lease;
    [Clause::Cancel bullet("afterwards the ticket is not served, and delays no other")]
    a_ticket_that_left_is_not_served needs(Queue);
    a_turn_that_is_left_is_handed_on needs(Queue);
    a_turn_that_no_other_client_waits_for_is_left_free needs(Queue);
    tickets_of_two_clients_are_two needs(Queue);
}

async fn refused_without_a_ticket_leaves_no_trace(ctx: Ctx) -> Result {
    let ([holder, refused, other], name, hold) = held(&ctx).await?;
    for _ in 0..3 {
        refused.refused(&ctx.ask(&name)).await?;
    }
    let waiters = other.inspect(&name).await?.waiters;
    same("the number of waiters", waiters.unwrap_or(0), 0)?;
    holder.frees(&hold).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_ticket_that_left_is_not_served(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let leaving = first.queues(&name).await?;
    let waiting = second.queues(&name).await?;
    first.leave(&leaving).await?;
    holder.frees(&hold).await?;
    second.take_soon(&waiting).await.map(drop)
}

async fn a_turn_that_is_left_is_handed_on(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let leaving = first.queues(&name).await?;
    let waiting = second.queues(&name).await?;
    let since = ctx.now();
    holder.frees(&hold).await?;
    second.refused_in_turn(&waiting, since).await?;
    first.leave(&leaving).await?;
    second.take_soon(&waiting).await.map(drop)
}

async fn a_turn_that_no_other_client_waits_for_is_left_free(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let leaving = waiter.queues(&name).await?;
    let since = ctx.now();
    holder.frees(&hold).await?;
    other.refused_in_turn(&ctx.ask(&name), since).await?;
    waiter.leave(&leaving).await?;
    other.sees_free(&name).await?;
    other.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn tickets_of_two_clients_are_two(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let waiting = second.queues(&name).await?;
    let leaving = first.queues(&name).await?;
    same(
        "the first tickets of two clients",
        leaving.line,
        waiting.line,
    )?;
    first.leave(&leaving).await?;
    let since = ctx.now();
    holder.frees(&hold).await?;
    first.refused_in_turn(&ctx.ask(&name), since).await?;
    second.take(&waiting).await.map(drop)
}

async fn leaving_with_an_unknown_ticket_changes_nothing(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name) = ctx.test_drivers().await?;
    let unknown = |driver: &TestDriver| ctx.ask(&name).in_line(driver.ticket());
    other.leave(&unknown(&other)).await?;
    other.sees_free(&name).await?;
    let hold = holder.take(&ctx.ask(&name)).await?;
    let waiting = waiter.queues(&name).await?;
    other.leave(&unknown(&other)).await?;
    waiter.leave(&unknown(&waiter)).await?;
    waiter.refused(&waiting).await?;
    holder.frees(&hold).await?;
    waiter.take(&waiting).await.map(drop)
}

async fn leaving_with_a_ticket_used_up_ends_no_hold(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    holder.frees(&hold).await?;
    let turn = waiter.take(&waiting).await?;
    for _ in 0..2 {
        waiter.leave(&waiting).await?;
    }
    other.refused(&ctx.ask(&name)).await?;
    waiter.renews(&turn, ctx.long()).await?;
    waiter.frees(&turn).await
}

async fn an_acquire_dropped_anywhere_is_undone_by_a_release(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let drops = (0..POLLS).map(async |polls| {
        let name = ctx.name()?;
        let give_up = ctx.now() + ctx.short();
        let ask = ctx.ask(&name).until(give_up);
        polled(driver.acquire(&ask), polls).await;
        ctx.sleep_until(give_up + driver.late()).await;
        ctx.answered(driver.release_as(&ask)).await??;
        other.sees_free(&name).await?;
        other.take(&ctx.ask(&name)).await.map(drop)
    });
    join_all(drops).await.into_iter().collect()
}

async fn a_wait_dropped_anywhere_is_undone_by_leaving(ctx: Ctx) -> Result {
    let ([holder, driver, other], _) = ctx.test_drivers().await?;
    let drops = (0..POLLS).map(async |polls| {
        let name = ctx.name()?;
        let hold = holder.take(&ctx.ask(&name)).await?;
        let give_up = ctx.now() + ctx.short();
        let ask = ctx.ask(&name).in_line(driver.ticket()).until(give_up);
        polled(driver.acquire(&ask), polls).await;
        ctx.sleep_until(give_up + driver.late()).await;
        driver.leave(&ask).await?;
        holder.frees(&hold).await?;
        // Over a quorum, the last store may not have heard of both yet.
        other.take_soon(&ctx.ask(&name)).await.map(drop)
    });
    join_all(drops).await.into_iter().collect()
}

async fn a_driver_works_on_after_any_call_was_dropped(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    let (inner, give_up) = (driver.inner(), ctx.now() + ctx.answer());
    let beside = driver.take(&ctx.ask(&ctx.name()?)).await?;
    for polls in 0..POLLS {
        let ask = ctx.ask(&name).until(give_up);
        polled(driver.acquire(&ask), polls).await;
        polled(driver.renew_until(&beside, ctx.long(), give_up), polls).await;
        polled(driver.release_as(&ask), polls).await;
        polled(inner.inspect(&name), polls).await;
        polled(inner.list(name.as_str(), None, 10), polls).await;
        polled(inner.leave(&name, driver.ticket()), polls).await;
        polled(inner.break_lock(&name, None), polls).await;
    }
    let fresh = driver.take(&ctx.ask(&ctx.name()?)).await?;
    driver.renews(&beside, ctx.long()).await?;
    driver.frees(&fresh).await?;
    driver.frees(&beside).await
}

/// As in a `select!` that went elsewhere: what such callers keep must not be what the others need.
async fn a_driver_works_on_while_callers_are_not_polled(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    let held = driver.take(&ctx.ask(&name)).await?;
    let asks: Result<Vec<_>> = (0..POLLS).map(|_| Ok(ctx.ask(&ctx.name()?))).collect();
    let asks = asks?;
    let mut kept = Vec::new();
    for (polls, ask) in asks.iter().enumerate() {
        let mut acquiring = Box::pin(driver.acquire(ask));
        if polled(&mut acquiring, polls + 1).await.is_none() {
            kept.push(acquiring);
        }
    }
    let fresh = driver.take(&ctx.ask(&ctx.name()?)).await?;
    driver.renews(&held, ctx.long()).await?;
    driver.frees(&fresh).await?;
    driver.frees(&held).await?;
    // Some may be refused as late by now.
    ctx.answered(join_all(kept)).await.map(drop)
}

/// What it was granted ends with its lease: no other request of its client waits for it to be polled.
async fn a_caller_that_is_not_polled_holds_the_lock_no_longer_than_its_lease(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let asks: Result<Vec<_>> = (0..POLLS).map(|_| Ok(ctx.ask(&ctx.name()?))).collect();
    let briefly = |ask: Ask| ask.lasting(ctx.short()).until(ctx.now() + ctx.short());
    let asks: Vec<_> = asks?.into_iter().map(briefly).collect();
    let mut kept = Vec::new();
    for (polls, ask) in asks.iter().enumerate() {
        let mut acquiring = Box::pin(driver.acquire(ask));
        if polled(&mut acquiring, polls + 1).await.is_none() {
            kept.push(acquiring);
        }
    }
    for ask in &asks {
        let bound = ctx.dead_for(ctx.short() * 2) + ctx.rounding();
        other.take_within(&ctx.ask(&ask.name), bound).await?;
    }
    // Some may be refused as late by now.
    ctx.answered(join_all(kept)).await.map(drop)
}

/// More than the await points of a call that waits for one answer.
const POLLS: usize = 5;
