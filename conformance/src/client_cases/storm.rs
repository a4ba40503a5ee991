//! All at once: clients that acquire, wait, give up, die on the way and miss wake-ups, and a counter
//! that must come out right.

use super::{
    gate::{Fate, Step},
    peer::{Peer, left_untouched},
    task::Task,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Guard, Lock};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

cases! {
    [Clause::Mutex]
    a_storm_lets_nobody_in_beside_another;
    [Clause::Wait]
    a_storm_of_cancelled_waiters_forgets_nobody;
}

async fn a_storm_lets_nobody_in_beside_another(ctx: Ctx) -> Result {
    let name = ctx.name()?;
    let inside = Inside::default();
    let (mut peers, mut tasks) = (Vec::new(), Vec::new());
    for number in 0..3 {
        let peer = Peer::new(&ctx).await?;
        // One client's calls are slow, another's answers are lost now and then.
        match number {
            0 => peer
                .gate
                .always(Step::Acquire, Fate::Slow(ctx.short() / 100)),
            1 => {
                for step in [Step::Acquire, Step::Release, Step::Renew] {
                    for fate in [
                        Fate::Ok,
                        Fate::ErrorAfter,
                        Fate::ErrorBefore,
                        Fate::Late(ctx.short() / 50),
                    ] {
                        peer.gate.once(step, fate);
                    }
                }
            }
            _ => peer.gate.set_deaf(true),
        }
        for _ in 0..4 {
            let lock = peer.short(&name)?;
            let turns = turns(ctx.clone(), lock, Arc::clone(&inside));
            tasks.push(Task::spawn(turns));
        }
        peers.push(peer);
    }
    for task in tasks {
        // The turns of deaf clients cost others an accept lease or a poll each: together more than ten
        // seconds where leases are sessions.
        let bound = ctx.answer() * 6;
        task.done(&ctx, "all have had their turns", bound).await??;
    }
    for peer in &peers {
        peer.settles(ctx.short()).await?;
    }
    let observer = ctx.caller().await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await
}

/// A few turns, with acquires cancelled in between.
async fn turns(ctx: Ctx, lock: Lock, inside: Inside) -> Result {
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
    {
        let mut inside = inside.lock().unwrap_or_else(PoisonError::into_inner);
        // A task whose lock is lost may not have checked its guard yet.
        let others = inside.iter().filter(|other| other.check().is_ok());
        same("how many others are inside", others.count(), 0)?;
        inside.push(Arc::clone(&guard));
    }
    ctx.time_passes(span).await;
    let held = guard.check().is_ok();
    {
        let mut inside = inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.retain(|other| !Arc::ptr_eq(other, &guard));
    }
    // A slow or unavailable store may cost the lock, and then the guard says so.
    ensure(held || !ctx.is_simulated(), "it was lost")?;
    // Unconfirmed, the release goes on in the background.
    let guard = Arc::into_inner(guard);
    let guard = guard.ok_or_else(|| Failure::new("BUG: nothing else has the guard"))?;
    drop(guard.release().await);
    Ok(())
}

async fn a_storm_of_cancelled_waiters_forgets_nobody(ctx: Ctx) -> Result {
    let peers = Peer::several::<2>(&ctx).await?;
    let observer = ctx.caller().await?;
    let name = ctx.name()?;
    let rounds = if ctx.is_simulated() { 40 } else { 4 };
    for round in 0..rounds {
        let holder = &peers[round % 2];
        let guard = holder.take(&holder.lock(&name)?).await?;
        let mut waiting = Vec::new();
        for number in 0..8 {
            let lock = peers[number % 2].lock(&name)?;
            waiting.push(Task::spawn(async move {
                let guard = lock.acquire().await?;
                guard.release().await.map(drop)
            }));
        }
        ctx.time_passes(ctx.rounding()).await;
        // Each round chooses anew which tasks are cancelled, and when: before the release, or in the
        // middle of the hand-off.
        let (before, survivors): (Vec<_>, Vec<_>) = waiting
            .into_iter()
            .enumerate()
            .partition(|(number, _)| (round * 7 + number * 5) % 3 == 0);
        let mut after = Vec::new();
        for (number, waiter) in before {
            if number % 2 == 0 {
                drop(waiter);
            } else {
                after.push(waiter);
            }
        }
        drop(guard);
        for _ in 0..round % 5 {
            tokio::task::yield_now().await;
        }
        drop(after);
        // A task cancelled during its turn may cost its accept lease and a poll; not every one does.
        let end = ctx.now() + Duration::from_secs(4);
        for (_, waiter) in survivors {
            let what = "a waiter that stayed has its turn";
            waiter.done(&ctx, what, end.since(ctx.now())).await??;
        }
        for peer in &peers {
            peer.settles(ctx.answer()).await?;
        }
        left_untouched(&ctx, &observer, &name, ctx.answer()).await?;
    }
    Ok(())
}
