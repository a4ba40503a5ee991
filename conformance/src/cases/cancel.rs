//! `cancel`: a cancelled request leaves no hold and no waiter.

use super::held;
use crate::{Ctx, Result, case::cases, client_cases::task::polled, ensure, same};
use dlock_core::{
    Lease,
    driver::{Acquire, Release},
};
use futures_util::future::join_all;

cases! {
    [Clause::Cancel]
    refused_without_a_ticket_leaves_no_trace bullet("refused without");
    a_ticket_that_left_is_not_served needs(Line)
        bullet("afterwards the ticket is not served, and delays no other");
    a_turn_that_is_left_is_handed_on needs(Line)
        bullet("afterwards the ticket is not served, and delays no other");
    a_turn_that_nobody_else_waits_for_is_left_free needs(Line)
        bullet("afterwards the ticket is not served, and delays no other");
    tickets_of_two_clients_are_two needs(Line)
        bullet("afterwards the ticket is not served, and delays no other");
    leaving_with_an_unknown_ticket_changes_nothing bullet("an unknown ticket, or one used up");
    leaving_with_a_ticket_used_up_ends_no_hold bullet("an unknown ticket, or one used up");
    an_acquire_dropped_anywhere_is_settled_by_a_release;
    a_wait_dropped_anywhere_is_settled_by_leaving needs(Line);
    a_driver_works_on_after_any_call_was_dropped;
}

async fn refused_without_a_ticket_leaves_no_trace(ctx: Ctx) -> Result {
    let ([holder, refused, other], name, hold) = held(&ctx).await?;
    for _ in 0..3 {
        refused.refused(&ctx.ask(&name)).await?;
    }
    let waiters = other.inspect(&name).await?.waiters;
    ensure(
        waiters.unwrap_or(0) == 0,
        format!("{waiters:?} waiters are shown, but none waits"),
    )?;
    holder.frees(&hold).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_ticket_that_left_is_not_served(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let leaving = ctx.ask(&name).in_line(first.ticket());
    let waiting = ctx.ask(&name).in_line(second.ticket());
    first.refused(&leaving).await?;
    second.refused(&waiting).await?;
    if let Some(ticket) = leaving.line {
        first.leave(&name, ticket).await?;
    }
    holder.frees(&hold).await?;
    second.take(&waiting).await.map(drop)
}

async fn a_turn_that_is_left_is_handed_on(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let leaving = first.ticket();
    first.refused(&ctx.ask(&name).in_line(leaving)).await?;
    let waiting = ctx.ask(&name).in_line(second.ticket());
    second.refused(&waiting).await?;
    holder.frees(&hold).await?;
    second.refused(&waiting).await?;
    first.leave(&name, leaving).await?;
    second.take(&waiting).await.map(drop)
}

async fn a_turn_that_nobody_else_waits_for_is_left_free(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let ticket = waiter.ticket();
    waiter.refused(&ctx.ask(&name).in_line(ticket)).await?;
    holder.frees(&hold).await?;
    other.refused(&ctx.ask(&name)).await?;
    waiter.leave(&name, ticket).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn tickets_of_two_clients_are_two(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let (leaving, ticket) = (first.ticket(), second.ticket());
    same("the first tickets of two clients", leaving, ticket)?;
    let waiting = ctx.ask(&name).in_line(ticket);
    second.refused(&waiting).await?;
    first.refused(&ctx.ask(&name).in_line(leaving)).await?;
    first.leave(&name, leaving).await?;
    holder.frees(&hold).await?;
    first.refused(&ctx.ask(&name)).await?;
    second.take(&waiting).await.map(drop)
}

async fn leaving_with_an_unknown_ticket_changes_nothing(ctx: Ctx) -> Result {
    let [holder, waiter, other] = ctx.callers().await?;
    let name = ctx.name()?;
    other.leave(&name, other.ticket()).await?;
    other.sees_free(&name).await?;
    let hold = holder.take(&ctx.ask(&name)).await?;
    let waiting = ctx.ask(&name).in_line(waiter.ticket());
    waiter.refused(&waiting).await?;
    other.leave(&name, other.ticket()).await?;
    waiter.leave(&name, waiter.ticket()).await?;
    waiter.refused(&waiting).await?;
    holder.frees(&hold).await?;
    waiter.take(&waiting).await.map(drop)
}

async fn leaving_with_a_ticket_used_up_ends_no_hold(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let ticket = waiter.ticket();
    let waiting = ctx.ask(&name).in_line(ticket);
    waiter.refused(&waiting).await?;
    holder.frees(&hold).await?;
    let turn = waiter.take(&waiting).await?;
    for _ in 0..2 {
        waiter.leave(&name, ticket).await?;
    }
    other.refused(&ctx.ask(&name)).await?;
    waiter.renews(&turn, ctx.long()).await?;
    waiter.frees(&turn).await
}

async fn an_acquire_dropped_anywhere_is_settled_by_a_release(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let late = caller.driver().capabilities().late;
    let drops = (0..POLLS).map(|polls| {
        let (caller, other, ctx) = (&caller, &other, &ctx);
        async move {
            let name = ctx.name()?;
            let give_up = ctx.now() + ctx.short();
            let ask = ctx.ask(&name).until(give_up);
            polled(caller.acquire(&ask), polls).await;
            ctx.sleep_until(give_up + late).await;
            let settling = Release::new(name.clone(), ask.owner, ask.hold);
            ctx.within(
                "release is answered",
                ctx.answer(),
                caller.release_as(&settling),
            )
            .await??;
            other.sees_free(&name).await?;
            other.take(&ctx.ask(&name)).await.map(drop)
        }
    });
    join_all(drops).await.into_iter().collect()
}

async fn a_wait_dropped_anywhere_is_settled_by_leaving(ctx: Ctx) -> Result {
    let [holder, caller, other] = ctx.callers().await?;
    let late = caller.driver().capabilities().late;
    let drops = (0..POLLS).map(|polls| {
        let (holder, caller, other, ctx) = (&holder, &caller, &other, &ctx);
        async move {
            let name = ctx.name()?;
            let hold = holder.take(&ctx.ask(&name)).await?;
            let ticket = caller.ticket();
            let give_up = ctx.now() + ctx.short();
            let ask = ctx.ask(&name).in_line(ticket).until(give_up);
            polled(caller.acquire(&ask), polls).await;
            ctx.sleep_until(give_up + late).await;
            caller.leave(&name, ticket).await?;
            holder.frees(&hold).await?;
            other.take(&ctx.ask(&name)).await.map(drop)
        }
    });
    join_all(drops).await.into_iter().collect()
}

async fn a_driver_works_on_after_any_call_was_dropped(ctx: Ctx) -> Result {
    let caller = ctx.caller().await?;
    let driver = caller.driver();
    let (name, give_up) = (ctx.name()?, ctx.now() + ctx.answer());
    let beside = caller.take(&ctx.ask(&ctx.name()?)).await?;
    let entry = [crate::caller::entry(&beside, Some(ctx.long()))];
    for polls in 0..POLLS {
        let ask = ctx.ask(&name);
        let request = Acquire::new(name.clone(), ask.owner, ask.hold, Lease::default(), give_up);
        let release = Release::new(name.clone(), ask.owner, ask.hold);
        polled(driver.acquire(&request), polls).await;
        polled(
            driver.renew(driver.lane(&beside.ask.name), &entry, give_up),
            polls,
        )
        .await;
        polled(driver.release(&release), polls).await;
        polled(driver.inspect(&name), polls).await;
        polled(driver.list(name.as_str(), None, 10), polls).await;
        polled(driver.leave(&name, caller.ticket()), polls).await;
        polled(driver.break_lock(&name, None), polls).await;
    }
    let fresh = caller.take(&ctx.ask(&ctx.name()?)).await?;
    caller.renews(&beside, ctx.long()).await?;
    caller.frees(&fresh).await?;
    caller.frees(&beside).await
}

/// More than the await points of a call that waits for one answer.
const POLLS: usize = 5;
