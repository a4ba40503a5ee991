//! All at once: clients that acquire, wait, give up, die on the way and miss wake-ups, and a counter
//! that must come out right.

use super::{
    gated_driver::{CallOutcome, Step},
    test_client::TestClient,
    test_lock::TestLock,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::Guard;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

cases! {
    [Clause::Mutex]
    a_storm_admits_one_holder_at_a_time;
    [Clause::Wait]
    a_storm_of_cancelled_waiters_forgets_no_waiter;
}

async fn a_storm_admits_one_holder_at_a_time(ctx: Ctx) -> Result {
    let ([slow, lossy, deaf], name) = TestClient::several(&ctx).await?;
    let delay = CallOutcome::Slow(ctx.short() / 100);
    slow.gate.always(Step::Acquire, delay);
    for step in [Step::Acquire, Step::Release, Step::Renew] {
        let late = CallOutcome::Late(ctx.short() / 50);
        for outcome in [
            CallOutcome::Ok,
            CallOutcome::ErrorAfter,
            CallOutcome::ErrorBefore,
            late,
        ] {
            lossy.gate.once(step, outcome);
        }
    }
    deaf.gate.set_deaf(true);
    let (inside, clients) = (Inside::default(), [slow, lossy, deaf]);
    let mut tasks = Vec::new();
    for client in clients.iter().cycle().take(12) {
        let lock = client.short(&name)?;
        tasks.push(ctx.spawn(turns(ctx.clone(), lock, Arc::clone(&inside))));
    }
    for task in tasks {
        // The turns of deaf clients cost others an accept lease or a poll each: together more than ten
        // seconds where leases are sessions.
        task.done(ctx.answer() * 6).await??;
    }
    for client in &clients {
        client.cleans_up(ctx.short()).await?;
    }
    ctx.left_untouched(&name, ctx.answer()).await
}

/// A few turns, with acquires cancelled in between.
async fn turns(ctx: Ctx, lock: TestLock, inside: Inside) -> Result {
    let step = ctx.short() / 100;
    for turn in 0..4 {
        let waiting = lock.acquire_timeout(step * (turn + 1));
        if let Ok(guard) = waiting.await {
            alone(&ctx, &inside, guard, step).await?;
        }
        if let Ok(Some(guard)) = lock.try_acquire().await {
            alone(&ctx, &inside, guard, step).await?;
        }
        let guard = lock.acquire().await?;
        alone(&ctx, &inside, guard, step).await?;
    }
    Ok(())
}

/// The guards of the present holders.
type Inside = Arc<Mutex<Vec<Arc<Guard>>>>;

async fn alone(ctx: &Ctx, inside: &Inside, guard: Guard, span: Duration) -> Result {
    let guard = Arc::new(guard);
    let all = || inside.lock();
    // A task whose lock is lost may not have checked its guard yet.
    let others = all().iter().filter(|other| other.check().is_ok()).count();
    same("how many others are inside", others, 0)?;
    all().push(Arc::clone(&guard));
    ctx.time_passes(span).await;
    let held = guard.check().is_ok();
    all().retain(|other| !Arc::ptr_eq(other, &guard));
    // A slow or unavailable store may cost the lock, and then the guard says so.
    ensure(held || !ctx.is_simulated(), "it was lost")?;
    // Unconfirmed, the release goes on in the background.
    let guard = Arc::into_inner(guard);
    let guard = guard.ok_or_else(|| Failure::new("BUG: nothing else has the guard"))?;
    drop(guard.release().await);
    Ok(())
}

async fn a_storm_of_cancelled_waiters_forgets_no_waiter(ctx: Ctx) -> Result {
    let (clients, name) = TestClient::several::<2>(&ctx).await?;
    let rounds = if ctx.is_simulated() { 40 } else { 4 };
    for round in 0..rounds {
        let guard = clients[round % 2].acquire(&name).await?;
        let mut waiting = Vec::new();
        for number in 0..8 {
            let lock = clients[number % 2].lock(&name)?;
            waiting.push(Some(ctx.spawn(async move {
                let guard = lock.acquire().await?;
                guard.release().await.map(drop)
            })));
        }
        ctx.time_passes(ctx.rounding()).await;
        // Each round chooses anew which tasks are cancelled, and when: before the release, or in the
        // middle of the hand-off.
        let cancelled = |number: &usize| (round * 7 + number * 5).is_multiple_of(3);
        let (before, after): (Vec<_>, Vec<_>) =
            (0..8).filter(cancelled).partition(|number| number % 2 == 0);
        before.into_iter().for_each(|number| waiting[number] = None);
        drop(guard);
        for _ in 0..round % 5 {
            tokio::task::yield_now().await;
        }
        after.into_iter().for_each(|number| waiting[number] = None);
        // A task cancelled during its turn may cost its accept lease and a poll; not every one does.
        let end = ctx.now() + Duration::from_secs(4);
        for waiter in waiting.into_iter().flatten() {
            waiter.done(end.since(ctx.now())).await??;
        }
        for client in &clients {
            client.cleans_up(ctx.answer()).await?;
        }
        ctx.left_untouched(&name, ctx.answer()).await?;
    }
    Ok(())
}
