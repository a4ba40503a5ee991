//! `wait`: one queue per client, one waiter per client in the store; a wake-up is only a reason to
//! poll.

use super::{
    gated_driver::Step,
    test_client::{OUT_OF_TIME, POLL, TestClient, Waiter, ends, fails, frees, held},
    test_lock::TestLock,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, in_time, same};
use dlock_core::{
    ErrorKind, LockName,
    driver::{Lane, Ticket, Wake, WakeUp},
};
use parking_lot::Mutex;
use std::{collections::BTreeSet, num::NonZeroU64, sync::Arc, time::Duration};

cases! {
    [Clause::Wait]
    tasks_of_one_client_are_served_in_order;
    clients_are_served_in_order_where_the_store_keeps_one needs(Queue);
    the_store_sees_one_waiter_of_a_client;
    a_long_wait_asks_the_store_seldom;
    a_release_is_pushed_to_the_next needs(Push);
    a_lost_wake_up_costs_a_poll_interval;
    a_local_release_wakes_the_next_without_the_store;
    wrong_wake_ups_fail_nothing;
    a_turn_that_no_waiter_wants_is_handed_on needs(Push);
    a_wait_that_is_too_long_says_so_and_who_holds_it;
    a_wait_for_oneself_says_where_the_lock_was_acquired;
    a_waiter_out_of_time_passes_its_position_on;
    a_wait_ends_when_the_lease_of_the_holder_does;
    a_loss_wakes_who_waits_in_the_same_client;
    the_second_waiter_is_queued_when_the_first_is_granted needs(Queue);
}

async fn tasks_of_one_client_are_served_in_order(ctx: Ctx) -> Result {
    let ([client, other], _) = TestClient::several(&ctx).await?;
    for holder in [&client, &other] {
        let name = ctx.name()?;
        let guard = holder.acquire(&name).await?;
        let mut order = Order::default();
        for number in 0..6 {
            order.wait(&ctx, client.lock(&name)?, number).await;
        }
        frees(&ctx, guard).await?;
        order.is(&ctx, (0..6).collect()).await?;
    }
    Ok(())
}

async fn clients_are_served_in_order_where_the_store_keeps_one(ctx: Ctx) -> Result {
    let (clients, name) = TestClient::several::<4>(&ctx).await?;
    let guard = clients[0].acquire(&name).await?;
    let mut order = Order::default();
    for (number, client) in clients.iter().enumerate() {
        let asked = client.gate.answered(Step::Acquire);
        order.wait(&ctx, client.lock(&name)?, number).await;
        client.stands(asked).await?;
        // Queue positions that are times differ.
        ctx.time_passes(Duration::from_millis(5)).await;
    }
    frees(&ctx, guard).await?;
    order.is(&ctx, (0..4).collect()).await
}

async fn the_store_sees_one_waiter_of_a_client(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let mut order = Order::default();
    for number in 0..10 {
        order.wait(&ctx, client.lock(&name)?, number).await;
    }
    ctx.would_show_within(ctx.short() / 2).await;
    let asked = client.gate.seen(Step::Acquire, &name);
    let tickets: BTreeSet<_> = asked.iter().map(|seen| seen.line).collect();
    same("the number of tickets in use", tickets.len(), 1)?;
    ctx.sees_waiters(&name, 1).await?;
    frees(&ctx, guard).await?;
    order.is(&ctx, (0..10).collect()).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_long_wait_asks_the_store_seldom(ctx: Ctx) -> Result {
    let ([other, client], foreign, others) = held(&ctx, TestClient::lock).await?;
    let local = ctx.name()?;
    let own = client.acquire(&local).await?;
    let mut waiting = Vec::new();
    for name in [&local, &foreign, &local, &foreign] {
        waiting.push(ctx.spawn(client.lock(name)?.acquire()));
    }
    let span = if ctx.is_simulated() {
        ctx.long() / 2
    } else {
        Duration::from_secs(4)
    };
    let began = tokio::time::Instant::now();
    ctx.time_passes(span).await;
    let span = span.max(began.elapsed()); // a busy machine wakes late
    let interval = if ctx.is_session_bound() {
        (ctx.kept() / 3).min(POLL)
    } else {
        POLL
    };
    let polls = span.as_millis() / interval.as_millis();
    for name in [&local, &foreign] {
        let asked = client.gate.seen(Step::Acquire, name).len() as u128;
        // A store without wake-ups is polled after 1, 2, 4 … 100 ms, jittered down to a half, unless
        // the lock is held by this client. So is another that says it must be, for want of a watch.
        let often = span.as_millis() / 50 + 8;
        let most = if client.inner.capabilities().wake == Wake::Poll && *name == foreign {
            often
        } else {
            often.min(polls + 3 + client.gate.hastened(name, interval) as u128)
        };
        let seldom = (polls - 1..=most).contains(&asked);
        ensure(seldom, format!("a wait of {span:?} asked {asked} times"))?;
    }
    drop((waiting, other));
    frees(&ctx, own).await?;
    frees(&ctx, others).await
}

async fn a_release_is_pushed_to_the_next(ctx: Ctx) -> Result {
    for _ in 0..3 {
        let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
        let waiting = client.waits(client.lock(&name)?).await?;
        // A store that pushes may begin a moment after its answer.
        ctx.time_passes(Duration::from_millis(20)).await;
        frees(&ctx, guard).await?;
        // Far less than a poll interval, which is two seconds for this lease.
        waiting.served(Duration::from_millis(100)).await?;
    }
    Ok(())
}

/// The `crash` cases try a waiter behind one that hears nothing.
async fn a_lost_wake_up_costs_a_poll_interval(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let waiting = ctx.spawn(client.short(&name)?.acquire());
    client.sends(Step::Acquire, 1).await?;
    client.gate.set_deaf(true);
    frees(&ctx, guard).await?;
    waiting.served(ctx.short() / 3).await
}

async fn a_local_release_wakes_the_next_without_the_store(ctx: Ctx) -> Result {
    for drops in [false, true] {
        let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
        let waiting = ctx.begin(client.lock(&name)?.acquire()).await;
        // Long enough for the waiter to be asleep.
        ctx.time_passes(ctx.short() / 5).await;
        ends(&ctx, guard, drops).await?;
        waiting.served(Duration::from_millis(100)).await?;
    }
    Ok(())
}

async fn wrong_wake_ups_fail_nothing(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let stranger = ctx.name()?;
    let waiting = ctx.spawn(client.lock(&name)?.acquire());
    client.sends(Step::Acquire, 1).await?;
    let own = client.gate.seen(Step::Acquire, &name);
    let own = own.first().and_then(|seen| seen.line);
    let own = own.ok_or_else(|| Failure::new("the head of the queue has no ticket"))?;
    for _ in 0..20 {
        for (name, ticket) in [(&name, own), (&name, ticket(77)), (&stranger, ticket(1))] {
            let (name, poll_in) = (name.clone(), Duration::ZERO);
            client.gate.inject(turn(&name, ticket));
            client.gate.inject(WakeUp::Free(name.clone()));
            client.gate.inject(WakeUp::First {
                name,
                ticket,
                poll_in,
            });
        }
        client.gate.inject(WakeUp::Resync);
        client.gate.inject(WakeUp::Over(Lane(77)));
        ctx.would_show_within(Duration::from_millis(5)).await;
        same("the wait is over", waiting.is_done(), false)?;
    }
    frees(&ctx, guard).await?;
    waiting.served(ctx.answer()).await
}

async fn a_turn_that_no_waiter_wants_is_handed_on(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client.gate.inject(turn(&name, ticket(77)));
    let left = || {
        let left = client.gate.seen(Step::Leave, &name);
        left.iter().any(|seen| seen.line == Some(ticket(77)))
    };
    let bound = Duration::from_millis(100);
    ctx.until("the ticket is given up", bound, left).await?;
    client.cleans_up(ctx.answer()).await
}

async fn a_wait_that_is_too_long_says_so_and_who_holds_it(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    for limit in [Duration::ZERO, Duration::from_millis(1), ctx.short() / 2] {
        let begun = ctx.now();
        let waiting = client.lock(&name)?.acquire_timeout(limit);
        let waited = ctx.within("the wait ends", limit, waiting).await?;
        ensure(ctx.now().since(begun) >= limit, "it ended early")?;
        if limit < Duration::from_millis(100) {
            // The store's only answer may have come too late, so the kind of the error is not checked.
            ensure(waited.is_err(), "a held lock was granted")?;
            continue;
        }
        let words = fails(OUT_OF_TIME, waited)?.to_string();
        let told = words.contains(&guard.owner().to_string());
        ensure(told, format!("who holds it is not in {words:?}"))?;
        ensure(!words.contains("waits for itself"), words)?;
    }
    client.cleans_up(ctx.answer()).await?;
    ctx.sees_waiters(&name, 0).await?;
    frees(&ctx, guard).await
}

async fn a_wait_for_oneself_says_where_the_lock_was_acquired(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let lock = client.lock(&name)?;
    let (line, guard) = (line!(), lock.acquire().await?);
    let waited = lock.acquire_timeout(ctx.short() / 2).await;
    let words = fails(OUT_OF_TIME, waited)?.to_string();
    let place = format!("{}:{line}:", file!());
    ensure(
        words.contains(&place),
        format!("{place} is not in {words:?}"),
    )?;
    ensure(words.contains("waits for itself"), words)?;
    frees(&ctx, guard).await
}

async fn a_waiter_out_of_time_passes_its_position_on(ctx: Ctx) -> Result {
    let ([_other, client, third], name, guard) = held(&ctx, TestClient::lock).await?;
    let (limit, mut order) = (ctx.short() / 2, Order::default());
    let impatient = ctx.spawn(client.lock(&name)?.acquire_timeout(limit));
    client.stands(0).await?;
    order.wait(&ctx, client.lock(&name)?, 1).await;
    ctx.time_passes(limit / 10).await;
    let in_line = client.inner.capabilities().wake == Wake::Queue;
    if in_line {
        // Behind the queue entry of the first client, whichever of its waiters uses that.
        order.wait(&ctx, third.lock(&name)?, 2).await;
    }
    fails(OUT_OF_TIME, impatient.done(limit).await?)?;
    ctx.time_passes(limit / 10).await;
    frees(&ctx, guard).await?;
    order
        .is(&ctx, if in_line { vec![1, 2] } else { vec![1] })
        .await
}

async fn a_wait_ends_when_the_lease_of_the_holder_does(ctx: Ctx) -> Result {
    let ([client, other], _) = TestClient::several(&ctx).await?;
    for holder in [&client, &other] {
        let name = ctx.name()?;
        let begun = ctx.now();
        let guard = holder.take(&holder.fixed(&name)?).await?;
        // The end of the lease is known where the store tells it; otherwise the next poll finds it.
        let waiting = ctx.spawn(client.lock(&name)?.acquire());
        let taken = waiting.done(ctx.short() + POLL).await??;
        let over = ctx.now().since(begun) >= ctx.short();
        ensure(over, "it got in before the lease was over")?;
        fails(ErrorKind::Lost, guard.check())?;
        drop(guard);
        frees(&ctx, taken).await?;
    }
    Ok(())
}

async fn a_loss_wakes_who_waits_in_the_same_client(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::fixed).await?;
    let waiting = client.waits(client.lock(&name)?).await?;
    // Its polls are two seconds apart, whenever the lease ends.
    let taken = waiting.done(guard.remaining() + ctx.short() / 50).await??;
    drop(guard);
    frees(&ctx, taken).await
}

async fn the_second_waiter_is_queued_when_the_first_is_granted(ctx: Ctx) -> Result {
    let ([other, client], name, held) = held(&ctx, TestClient::lock).await?;
    let first = client.waits(client.lock(&name)?).await?;
    let second = ctx.begin(client.lock(&name)?.acquire()).await;
    frees(&ctx, held).await?;
    let guard = first.done(ctx.answer()).await??;
    ctx.would_show_within(Duration::from_millis(20)).await;
    let waiters = ctx.observer().await?.inspect(&name).await?.waiters;
    // A request of the first that was on its way when the second came names no next one.
    in_time(
        waiters.unwrap_or(1) == 1,
        format!("{waiters:?} waiters are queued, should be 1"),
    )?;
    let asked = client.gate.seen(Step::Acquire, &name);
    let asked: BTreeSet<_> = asked.iter().map(|seen| seen.line).collect();
    same("the number of tickets that asked", asked.len(), 1)?;
    // A later waiter comes after it.
    let third = other.waits(other.lock(&name)?).await?;
    frees(&ctx, guard).await?;
    let guard = second.done(ctx.answer()).await??;
    same("the third is inside", third.is_done(), false)?;
    frees(&ctx, guard).await?;
    third.served(ctx.answer()).await
}

/// Waiters, and the order in which they were granted the lock.
#[derive(Default)]
struct Order {
    granted: Arc<Mutex<Vec<usize>>>,
    waiting: Vec<Waiter<()>>,
}

impl Order {
    /// Waits for a turn in a task, which has entered the queue when this returns.
    async fn wait(&mut self, ctx: &Ctx, lock: TestLock, number: usize) {
        let granted = Arc::clone(&self.granted);
        let waiting = ctx.begin(async move {
            let guard = lock.acquire().await?;
            granted.lock().push(number);
            guard.release().await.map(drop)
        });
        self.waiting.push(waiting.await);
        // The request of its first poll is in flight.
        ctx.time_passes(Duration::from_millis(5)).await;
    }

    /// All are served, in this order. The bound holds for all of them together: a store without
    /// wake-ups serves each after a poll interval, and gets no extra time for that.
    async fn is(self, ctx: &Ctx, order: Vec<usize>) -> Result {
        let end = ctx.now() + ctx.answer();
        for waiter in self.waiting {
            waiter.done(end.since(ctx.now())).await??;
        }
        same("the order", &*self.granted.lock(), &order)
    }
}

fn turn(name: &LockName, ticket: Ticket) -> WakeUp {
    let name = name.clone();
    WakeUp::Turn { name, ticket }
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
}
