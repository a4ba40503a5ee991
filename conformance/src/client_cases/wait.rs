//! `wait`: one queue per client, one waiter per client in the store; a wake-up is only a reason to
//! poll.

use super::{
    gate::Step,
    peer::{Peer, fails, frees, held, left_untouched},
    task::Task,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{
    ErrorKind, Lock, TimeoutPhase,
    driver::{Lane, Ticket, Wake, WakeUp},
};
use std::{
    collections::BTreeSet,
    num::NonZeroU64,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

cases! {
    [Clause::Wait]
    tasks_of_one_client_are_served_in_order;
    clients_are_served_in_order_where_the_store_keeps_one needs(Line);
    the_store_sees_one_waiter_of_a_client;
    a_long_wait_asks_the_store_seldom;
    a_release_is_pushed_to_the_next needs(Push);
    a_lost_wake_up_costs_a_look_interval;
    a_local_release_wakes_the_next_without_the_store;
    wrong_wake_ups_fail_nothing;
    a_turn_that_nobody_wants_is_handed_on needs(Push);
    a_wait_that_is_too_long_says_so_and_who_holds_it;
    a_wait_for_oneself_says_where_the_lock_was_acquired;
    a_waiter_out_of_time_passes_its_place_on;
    a_wait_ends_when_the_lease_of_the_holder_does;
}

async fn tasks_of_one_client_are_served_in_order(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    for local in [true, false] {
        let other = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        let holder = if local { &peer } else { &other };
        let guard = holder.take(&holder.lock(&name)?).await?;
        let order = Order::default();
        let mut waiting = Vec::new();
        for number in 0..6 {
            waiting.push(order.wait(&ctx, peer.lock(&name)?, number).await);
        }
        frees(&ctx, guard).await?;
        all_served(&ctx, waiting).await?;
        same("the order", order.seen(), (0..6).collect())?;
    }
    Ok(())
}

async fn clients_are_served_in_order_where_the_store_keeps_one(ctx: Ctx) -> Result {
    let peers = Peer::several::<4>(&ctx).await?;
    let name = ctx.name()?;
    let guard = peers[0].take(&peers[0].lock(&name)?).await?;
    let order = Order::default();
    let mut waiting = Vec::new();
    for (number, peer) in peers.iter().enumerate() {
        let asked = peer.gate.answered(Step::Acquire);
        waiting.push(order.wait(&ctx, peer.lock(&name)?, number).await);
        peer.stands(asked).await?;
        // Queue positions that are times differ.
        ctx.time_passes(Duration::from_millis(5)).await;
    }
    frees(&ctx, guard).await?;
    all_served(&ctx, waiting).await?;
    same("the order", order.seen(), (0..4).collect())
}

async fn the_store_sees_one_waiter_of_a_client(ctx: Ctx) -> Result {
    let ([_other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let order = Order::default();
    let mut waiting = Vec::new();
    for number in 0..10 {
        waiting.push(order.wait(&ctx, peer.lock(&name)?, number).await);
    }
    ctx.would_show_within(ctx.short() / 2).await;
    let tickets: BTreeSet<_> = peer
        .gate
        .seen(Step::Acquire, &name)
        .iter()
        .map(|seen| seen.line)
        .collect();
    same("the number of tickets in use", tickets.len(), 1)?;
    let waiters = observer.inspect(&name).await?.waiters;
    same(
        "the number of waiters in the store",
        waiters.unwrap_or(1),
        1,
    )?;
    frees(&ctx, guard).await?;
    all_served(&ctx, waiting).await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await
}

async fn a_long_wait_asks_the_store_seldom(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let (local, foreign) = (ctx.name()?, ctx.name()?);
    let own = peer.take(&peer.lock(&local)?).await?;
    let others = other.take(&other.lock(&foreign)?).await?;
    let mut waiting = Vec::new();
    for name in [&local, &foreign] {
        for _ in 0..3 {
            waiting.push(Task::spawn(peer.lock(name)?.acquire()));
        }
    }
    let span = if ctx.is_simulated() {
        ctx.long() / 2
    } else {
        Duration::from_secs(4)
    };
    ctx.time_passes(span).await;
    let interval = if ctx.is_session_bound() {
        (ctx.kept() / 3).min(LOOK)
    } else {
        LOOK
    };
    let looks = u64::try_from(span.as_millis() / interval.as_millis()).unwrap_or(u64::MAX);
    for name in [&local, &foreign] {
        let asked = peer.gate.seen(Step::Acquire, name).len();
        // A store without wake-ups is polled after 1, 2, 4 … 100 ms, jittered down to a half, unless
        // the lock is held by this client.
        let polls = peer.client.capabilities().wake == Wake::Poll && *name == foreign;
        let most = if polls {
            span.as_millis() / 50 + 8
        } else {
            u128::from(looks) + 3
        };
        ensure(
            asked as u128 <= most,
            format!("a wait of {span:?} asked {asked} times, {most} are enough"),
        )?;
        let least = usize::try_from(looks)? - 1;
        ensure(
            asked >= least,
            format!("a wait of {span:?} asked {asked} times"),
        )?;
    }
    drop(waiting);
    frees(&ctx, own).await?;
    frees(&ctx, others).await
}

async fn a_release_is_pushed_to_the_next(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    for _ in 0..3 {
        let name = ctx.name()?;
        let guard = other.take(&other.lock(&name)?).await?;
        let answered = peer.gate.answered(Step::Acquire);
        let waiting = Task::spawn(peer.lock(&name)?.acquire());
        peer.stands(answered).await?;
        // A store that pushes may begin a moment after its answer.
        ctx.time_passes(Duration::from_millis(20)).await;
        frees(&ctx, guard).await?;
        // Far less than a poll interval, which is two seconds for this lease.
        let bound = Duration::from_millis(100);
        waiting.served(&ctx, "the next one is woken", bound).await?;
    }
    Ok(())
}

async fn a_lost_wake_up_costs_a_look_interval(ctx: Ctx) -> Result {
    let ([other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let interval = ctx.short() / 3;
    let waiting = Task::spawn(peer.short(&name)?.acquire());
    peer.asks(0).await?;
    peer.gate.set_deaf(true);
    frees(&ctx, guard).await?;
    waiting.served(&ctx, "it polls by itself", interval).await?;
    // A waiter behind a deaf client waits at most for that client's accept lease, or for its own poll.
    peer.gate.set_deaf(false);
    let third = Peer::new(&ctx).await?;
    let guard = other.take(&other.lock(&name)?).await?;
    let asked = peer.gate.answered(Step::Acquire);
    let deaf = Task::spawn(peer.short(&name)?.acquire());
    peer.stands(asked).await?;
    ctx.time_passes(ctx.short() / 20).await;
    let behind = Task::spawn(third.short(&name)?.acquire());
    third.stands(0).await?;
    ctx.time_passes(ctx.short() / 20).await;
    peer.gate.freeze();
    frees(&ctx, guard).await?;
    let taken = behind
        .done(&ctx, "the one behind it gets in", interval * 2)
        .await??;
    drop(deaf);
    frees(&ctx, taken).await?;
    peer.gate.kill().await;
    left_untouched(&ctx, &observer, &name, ctx.short() + Duration::from_secs(6)).await
}

async fn a_local_release_wakes_the_next_without_the_store(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    for drops in [false, true] {
        let name = ctx.name()?;
        let guard = peer.take(&peer.lock(&name)?).await?;
        let waiting = Task::begun(peer.lock(&name)?.acquire()).await;
        // Long enough for the waiter to be asleep.
        ctx.time_passes(ctx.short() / 5).await;
        if drops {
            drop(guard);
        } else {
            frees(&ctx, guard).await?;
        }
        let bound = Duration::from_millis(100);
        waiting.served(&ctx, "the next one is woken", bound).await?;
    }
    Ok(())
}

async fn wrong_wake_ups_fail_nothing(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let (name, stranger) = (ctx.name()?, ctx.name()?);
    let guard = other.take(&other.lock(&name)?).await?;
    let waiting = Task::spawn(peer.lock(&name)?.acquire());
    peer.asks(0).await?;
    let own = peer
        .gate
        .seen(Step::Acquire, &name)
        .first()
        .and_then(|seen| seen.line);
    let own = own.ok_or_else(|| Failure::new("the head of the queue has no ticket"))?;
    for _ in 0..20 {
        for (name, ticket) in [(&name, own), (&name, ticket(77)), (&stranger, ticket(1))] {
            let name = name.clone();
            peer.gate.inject(WakeUp::Turn {
                name: name.clone(),
                ticket,
            });
            let poll_in = Duration::ZERO;
            peer.gate.inject(WakeUp::First {
                name: name.clone(),
                ticket,
                poll_in,
            });
            peer.gate.inject(WakeUp::Free(name));
        }
        peer.gate.inject(WakeUp::Resync);
        peer.gate.inject(WakeUp::Over(Lane(77)));
        ctx.would_show_within(Duration::from_millis(5)).await;
        same("the wait is over", waiting.is_done(), false)?;
    }
    frees(&ctx, guard).await?;
    waiting
        .served(&ctx, "it gets in at last", ctx.answer())
        .await
}

async fn a_turn_that_nobody_wants_is_handed_on(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.inject(WakeUp::Turn {
        name: name.clone(),
        ticket: ticket(77),
    });
    let left = || async {
        let left = peer.gate.seen(Step::Leave, &name);
        Ok(left.iter().any(|seen| seen.line == Some(ticket(77))))
    };
    ctx.eventually("the ticket is given up", Duration::from_millis(100), left)
        .await?;
    peer.settles(ctx.answer()).await
}

async fn a_wait_that_is_too_long_says_so_and_who_holds_it(ctx: Ctx) -> Result {
    let ([_other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    for limit in [Duration::ZERO, Duration::from_millis(1), ctx.short() / 2] {
        let begun = ctx.now();
        let waiting = peer.lock(&name)?.acquire_timeout(limit);
        let waited = ctx.within("the wait ends", limit, waiting).await?;
        ensure(ctx.now().since(begun) >= limit, "it ended early")?;
        if limit < Duration::from_millis(100) {
            // The store's only answer may have come too late, so the kind of the error is not checked.
            ensure(waited.is_err(), "a held lock was granted")?;
            continue;
        }
        let phase = TimeoutPhase::Wait;
        let error = fails("the wait", waited, ErrorKind::Timeout { phase })?;
        let words = error.to_string();
        let holder = guard.owner().to_string();
        ensure(
            words.contains(&holder),
            format!("who holds it is not in {words:?}"),
        )?;
        ensure(!words.contains("waits for itself"), words)?;
    }
    peer.settles(ctx.answer()).await?;
    let waiting = observer.inspect(&name).await?.waiters;
    same("the number of queued waiters", waiting.unwrap_or(0), 0)?;
    frees(&ctx, guard).await
}

async fn a_wait_for_oneself_says_where_the_lock_was_acquired(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let lock = peer.lock(&name)?;
    let (line, guard) = (line!(), lock.acquire().await?);
    let waiting = lock.acquire_timeout(ctx.short() / 2).await;
    let error = fails(
        "the wait",
        waiting,
        ErrorKind::Timeout {
            phase: TimeoutPhase::Wait,
        },
    )?;
    let (words, place) = (error.to_string(), format!("{}:{line}:", file!()));
    ensure(
        words.contains(&place),
        format!("{place} is not in {words:?}"),
    )?;
    ensure(words.contains("waits for itself"), words)?;
    frees(&ctx, guard).await
}

async fn a_waiter_out_of_time_passes_its_place_on(ctx: Ctx) -> Result {
    let ([_other, peer, third], name, guard) = held(&ctx, Peer::lock).await?;
    let (limit, order) = (ctx.short() / 2, Order::default());
    let impatient = Task::spawn(peer.lock(&name)?.acquire_timeout(limit));
    peer.stands(0).await?;
    let mut waiting = vec![order.wait(&ctx, peer.lock(&name)?, 1).await];
    ctx.time_passes(limit / 10).await;
    let in_line = peer.client.capabilities().wake == Wake::Queue;
    if in_line {
        // Behind the queue entry of the first client, whichever of its waiters uses that.
        waiting.push(order.wait(&ctx, third.lock(&name)?, 2).await);
    }
    let waited = impatient.done(&ctx, "its time is up", limit).await?;
    fails(
        "the wait",
        waited,
        ErrorKind::Timeout {
            phase: TimeoutPhase::Wait,
        },
    )?;
    ctx.time_passes(limit / 10).await;
    frees(&ctx, guard).await?;
    all_served(&ctx, waiting).await?;
    let wanted = if in_line { vec![1, 2] } else { vec![1] };
    same("the order", order.seen(), wanted)
}

async fn a_wait_ends_when_the_lease_of_the_holder_does(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    for local in [true, false] {
        let name = ctx.name()?;
        let holder = if local { &peer } else { &other };
        let begun = ctx.now();
        let guard = holder.take(&holder.fixed(&name)?).await?;
        let waiting = Task::spawn(peer.lock(&name)?.acquire());
        // The end of the lease is known where the store tells it; otherwise the next poll finds it.
        let bound = ctx.short() + LOOK;
        let taken = waiting.done(&ctx, "it gets in", bound).await??;
        ensure(
            ctx.now().since(begun) >= ctx.short(),
            "it got in before the lease was over",
        )?;
        fails("the holder's check", guard.check(), ErrorKind::Lost)?;
        drop(guard);
        frees(&ctx, taken).await?;
    }
    Ok(())
}

/// The bound holds for all of them together: a store without wake-ups serves each after a poll interval,
/// and gets no extra time for that.
async fn all_served(ctx: &Ctx, waiting: Vec<Task<Result<(), dlock_core::Error>>>) -> Result {
    let end = ctx.now() + ctx.answer();
    for waiter in waiting {
        let rest = end.since(ctx.now());
        waiter.done(ctx, "all are served", rest).await??;
    }
    Ok(())
}

/// The order in which tasks were granted the lock.
#[derive(Clone, Default)]
struct Order(Arc<Mutex<Vec<usize>>>);

impl Order {
    /// Waits for a turn in a task, which has entered the queue when this returns.
    async fn wait(
        &self,
        ctx: &Ctx,
        lock: Lock,
        number: usize,
    ) -> Task<Result<(), dlock_core::Error>> {
        let order = self.clone();
        let waiting = Task::begun(async move {
            let guard = lock.acquire().await?;
            order
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(number);
            guard.release().await.map(drop)
        })
        .await;
        // The request of its first poll is in flight.
        ctx.time_passes(Duration::from_millis(5)).await;
        waiting
    }

    fn seen(&self) -> Vec<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
}

/// The longest poll interval.
const LOOK: Duration = Duration::from_secs(2);
