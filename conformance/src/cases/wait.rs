//! `wait`: the order of waiters and their wake-ups. The core has queues of its own; these cases test
//! what a store owes them.

use super::{held, held_for};
use crate::{Ask, Ctx, Hold, Result, case::cases, ensure, same};
use dlock_core::driver::WakeUp;
use futures_util::StreamExt;

cases! {
    [Clause::Wait]
    a_release_wakes_the_queued_waiter needs(Push)
        bullet("a client that was refused with `req.ticket` is listening");
    the_next_ticket_hears_what_another_client_releases needs(Push);
    a_turn_is_refused_to_every_other_request needs(Queue) bullet("reserved for another ticket");
    a_turn_is_taken_without_having_heard_of_it needs(Queue);
    the_next_waiter_is_told_when_to_poll needs(Queue, NextNotified);
    a_name_past_its_minimum_hold_goes_to_the_head_of_the_queue needs(Queue);
    wake_ups_are_taken_once;
    a_waiter_that_polls_needs_no_wake_up;
    no_client_passes_the_queue_when_the_holder_lapsed needs(Queue)
        bullet("free while others are queued");
    after_a_gap_a_resync_is_sent needs(Push, Network)
        bullet("wake-ups may be lost, late, doubled or wrong");
    a_store_that_only_answers_has_no_wake_ups needs(Poll)
        bullet("stores that only answer: an empty stream");
    [Clause::Wait bullet("refused with `req.ticket`")]
    turns_come_in_the_order_of_the_queue needs(Queue);
    polling_again_keeps_the_position needs(Queue);
    the_number_ahead_is_right_where_it_is_told needs(Queue);
    [Clause::Wait bullet("granted: `req.ticket` is used up")]
    a_granted_ticket_is_used_up needs(Queue);
    the_next_ticket_is_queued_at_the_end needs(Queue);
    the_next_ticket_is_queued_though_no_other_is needs(Queue);
}

async fn a_release_wakes_the_queued_waiter(ctx: Ctx) -> Result {
    let ([holder, waiter], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    // A driver that has just begun to listen may send `Resync`.
    waiter.passes_over_wake_ups().await;
    holder.frees(&hold).await?;
    let woken = |wake_up: &_| wakes(wake_up, &waiting);
    waiter
        .hears("the waiter is woken", ctx.short(), woken)
        .await?;
    waiter.take(&waiting).await.map(drop)
}

async fn the_next_ticket_hears_what_another_client_releases(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let next = driver.ticket();
    let hold = driver.take(&ctx.ask(&name).then(next)).await?;
    driver.passes_over_wake_ups().await;
    other.frees(&hold).await?;
    let waiting = ctx.ask(&name).in_line(next);
    let woken = |wake_up: &_| wakes(wake_up, &waiting);
    driver
        .hears("the next waiter is woken", ctx.short(), woken)
        .await?;
    driver.take(&waiting).await.map(drop)
}

/// Whether this wake-up gives a client with this request a reason to poll.
pub(super) fn wakes(wake_up: &WakeUp, waiting: &Ask) -> bool {
    match wake_up {
        WakeUp::Turn { name, ticket } => *name == waiting.name && Some(*ticket) == waiting.line,
        WakeUp::Free(name) => *name == waiting.name,
        WakeUp::Resync => true,
        _ => false,
    }
}

async fn turns_come_in_the_order_of_the_queue(ctx: Ctx) -> Result {
    let (drivers, name) = ctx.test_drivers::<4>().await?;
    let mut inside = drivers[0].take(&ctx.ask(&name)).await?;
    let mut waiting = Vec::new();
    for driver in &drivers[1..] {
        waiting.push(driver.queues(&name).await?);
    }
    for (at, driver) in drivers[1..].iter().enumerate() {
        let since = ctx.now();
        drivers[at].frees(&inside).await?;
        for (later, ask) in drivers[at + 2..].iter().zip(&waiting[at + 1..]) {
            later.refused_in_turn(ask, since).await?;
        }
        driver.hears_turn(&waiting[at]).await?;
        inside = driver.take(&waiting[at]).await?;
    }
    drivers[3].frees(&inside).await
}

async fn polling_again_keeps_the_position(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let early = first.queues(&name).await?;
    let late = second.queues(&name).await?;
    for _ in 0..3 {
        first.refused(&early).await?;
        second.refused(&late).await?;
    }
    let since = ctx.now();
    holder.frees(&hold).await?;
    second.refused_in_turn(&late, since).await?;
    let turn = first.take(&early).await?;
    first.frees(&turn).await?;
    second.take(&late).await.map(drop)
}

async fn the_number_ahead_is_right_where_it_is_told(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    for (ahead, driver) in [&waiter, &other].into_iter().enumerate() {
        let ask = ctx.ask(&name).in_line(driver.ticket());
        for _ in 0..2 {
            if let Some(told) = driver.refused(&ask).await?.ahead {
                same("how many stand before it", usize::try_from(told)?, ahead)?;
            }
        }
    }
    let waiters = holder.inspect(&name).await?.waiters;
    same("how many wait", waiters.unwrap_or(2), 2)?;
    holder.frees(&hold).await
}

async fn a_turn_is_refused_to_every_other_request(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let early = first.queues(&name).await?;
    let late = second.queues(&name).await?;
    let since = ctx.now();
    holder.frees(&hold).await?;
    // The last owner, a new client, the next waiter, and another request of the client whose turn it
    // is.
    holder.refused_in_turn(&hold.ask.again(), since).await?;
    holder.refused_in_turn(&ctx.ask(&name), since).await?;
    second.refused_in_turn(&late, since).await?;
    first.refused_in_turn(&ctx.ask(&name), since).await?;
    let seen = second.inspect(&name).await?;
    same("who is inside", seen.holders.len(), 0)?;
    let reserved = seen.unavailable_for.is_some();
    ensure(reserved, format!("it should be unavailable: {seen:?}"))?;
    // Any local waiter of that client may use the turn.
    let another = ctx.ask(&name).in_line(early.ticket()?);
    let turn = first.take(&another).await?;
    first.frees(&turn).await
}

async fn a_turn_is_taken_without_having_heard_of_it(ctx: Ctx) -> Result {
    let ([holder, waiter], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    holder.frees(&hold).await?;
    let turn = waiter.take(&waiting).await?;
    same("the number of holds", turn.holds, 1)?;
    // The reservation is over; the lease asked for counts.
    let promised = turn.valid_for;
    let enough = promised > ctx.promised(ctx.long());
    ensure(enough, format!("{promised:?} are promised"))?;
    waiter.frees(&turn).await
}

async fn no_client_passes_the_queue_when_the_holder_lapsed(ctx: Ctx) -> Result {
    let ([_holder, waiter, other], name, lapses) = held_for(&ctx, ctx.short()).await?;
    let waiting = waiter.queues(&name).await?;
    ctx.sleep_past(&lapses).await;
    // No client has polled since the lapse: the next acquire serves the head of the queue and is
    // refused.
    for _ in 0..2 {
        other
            .refused_in_turn(&ctx.ask(&name), lapses.over_by())
            .await?;
    }
    waiter.hears_turn(&waiting).await?;
    waiter.take(&waiting).await.map(drop)
}

async fn a_granted_ticket_is_used_up(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name) = ctx.test_drivers().await?;
    // Granted at its turn.
    let hold = holder.take(&ctx.ask(&name)).await?;
    let waiting = waiter.queues(&name).await?;
    holder.frees(&hold).await?;
    let turn = waiter.take(&waiting).await?;
    waiter.frees(&turn).await?;
    let hold = other.take(&ctx.ask(&name)).await?;
    // Granted at once, without ever having queued.
    other.frees(&hold).await?;
    let ask = ctx.ask(&name).in_line(waiter.ticket());
    let direct = waiter.take(&ask).await?;
    waiter.frees(&direct).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn the_next_ticket_is_queued_at_the_end(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    let early = first.queues(&name).await?;
    let late = second.queues(&name).await?;
    holder.frees(&hold).await?;
    let next = first.ticket();
    let turn = first.take(&early.then(next)).await?;
    let since = ctx.now();
    first.frees(&turn).await?;
    let again = ctx.ask(&name).in_line(next);
    first.refused_in_turn(&again, since).await?;
    let turn = second.take(&late).await?;
    let since = ctx.now();
    second.frees(&turn).await?;
    holder.refused_in_turn(&ctx.ask(&name), since).await?;
    first.hears_turn(&again).await?;
    first.take(&again).await.map(drop)
}

async fn the_next_ticket_is_queued_though_no_other_is(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let next = driver.ticket();
    let first = driver.take(&ctx.ask(&name).then(next)).await?;
    let since = ctx.now();
    driver.frees(&first).await?;
    other.refused_in_turn(&ctx.ask(&name), since).await?;
    let again = ctx.ask(&name).in_line(next);
    driver.hears_turn(&again).await?;
    let second = driver.take(&again).await?;
    driver.frees(&second).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn the_next_waiter_is_told_when_to_poll(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    first.queues(&name).await?;
    let waiting = second.queues(&name).await?;
    holder.frees(&hold).await?;
    let mut told = None;
    let next = |wake_up: &WakeUp| match wake_up {
        WakeUp::First {
            name: of,
            ticket,
            poll_in,
        } if *of == name && Some(*ticket) == waiting.line => {
            told = Some(*poll_in);
            true
        }
        _ => false,
    };
    second
        .hears("it is told that it is next", ctx.short(), next)
        .await?;
    // The turn before it lapses unused; after that a poll is enough.
    let poll_in = told.unwrap_or_default();
    ensure(poll_in <= ctx.long() / 3, format!("to poll in {poll_in:?}"))?;
    ctx.time_passes(poll_in + ctx.rounding()).await;
    second.take(&waiting).await.map(drop)
}

async fn a_name_past_its_minimum_hold_goes_to_the_head_of_the_queue(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    holder.release(&hold, Some(ctx.short())).await?;
    let opens = Hold {
        ask: hold.ask.again().lasting(ctx.short()),
        after: ctx.now(),
        ..hold
    };
    waiter.refused(&waiting).await?;
    ctx.sleep_past(&opens).await;
    other
        .refused_in_turn(&ctx.ask(&name), opens.over_by())
        .await?;
    waiter.take(&waiting).await.map(drop)
}

async fn after_a_gap_a_resync_is_sent(ctx: Ctx) -> Result {
    let (waiter, faults) = ctx.faulty().await?;
    let ([holder], first, hold) = held(&ctx).await?;
    let second = ctx.name()?;
    let waiting = waiter.queues(&first).await?;
    let held = holder.take(&ctx.ask(&second)).await?;
    waiter.queues(&second).await?;
    // After the first wake-up the client is listening, so it can miss one for the other name.
    waiter.passes_over_wake_ups().await;
    holder.frees(&hold).await?;
    let woken = |wake_up: &_| wakes(wake_up, &waiting);
    waiter
        .hears("the waiter is woken", ctx.answer(), woken)
        .await?;
    waiter.passes_over_wake_ups().await;
    faults.cut().await?;
    let again = |wake_up: &WakeUp| *wake_up == WakeUp::Resync;
    waiter
        .hears("it is told to poll", ctx.answer(), again)
        .await?;
    holder.frees(&held).await
}

async fn a_store_that_only_answers_has_no_wake_ups(ctx: Ctx) -> Result {
    let ([holder, waiter], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    holder.frees(&hold).await?;
    waiter.no_wake_up_left(ctx.short()).await?;
    waiter.take(&waiting).await.map(drop)
}

async fn wake_ups_are_taken_once(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let mut second = driver.inner().wake_ups();
    let what = "a second stream of wake-ups ends at once";
    let wake_up = ctx.within(what, ctx.short(), second.next()).await?;
    same("what a second stream gives", wake_up, None)
}

async fn a_waiter_that_polls_needs_no_wake_up(ctx: Ctx) -> Result {
    let ([_holder, waiter], name, lapses) = held_for(&ctx, ctx.short()).await?;
    let waiting = waiter.queues(&name).await?;
    let bound = ctx.until_over(&lapses);
    waiter.take_within(&waiting, bound).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::{Ask, wakes};
    use dlock_core::{LockName, driver::WakeUp};
    use std::time::Duration;

    #[test]
    fn a_gap_wakes_a_waiter_as_its_own_name_does() {
        let [own, other]: [LockName; 2] = ["a", "b"].map(|name| name.parse().unwrap());
        let waiting = Ask::new(own.clone(), "x", Duration::from_secs(1));
        assert!(wakes(&WakeUp::Resync, &waiting));
        assert!(wakes(&WakeUp::Free(own), &waiting));
        assert!(!wakes(&WakeUp::Free(other), &waiting));
    }
}
