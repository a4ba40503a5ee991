//! `crash`: a dead client costs its lease, or its turn, and no more.

use super::{
    peer::{Peer, frees, held, left_untouched},
    task::Task,
};
use crate::{Ctx, Result, case::cases, in_time};
use std::time::Duration;

cases! {
    [Clause::Crash]
    the_lock_of_a_dead_client_is_free_within_its_lease;
    dead_waiters_delay_nobody;
    stopped_waiters_delay_others_by_one_entry_deadline_together;
    a_client_that_dies_while_it_is_served_costs_its_turn;
}

async fn the_lock_of_a_dead_client_is_free_within_its_lease(ctx: Ctx) -> Result {
    for connected in [false, true] {
        let ([dead, peer], name, guard) = held(&ctx, Peer::short).await?;
        ctx.time_passes(ctx.short() / 2).await;
        if connected {
            dead.gate.freeze();
        } else {
            dead.gate.kill().await;
        }
        let died = ctx.now();
        // No cleanup or destructor runs on its way out.
        std::mem::forget(guard);
        let next = peer.lock(&name)?.acquire();
        // It waits for a lease of its own, so its polls are two seconds apart unless it was told the
        // end.
        let next = ctx
            .within("the next one gets it", ctx.short() + LOOK, next)
            .await??;
        let after = ctx.now().since(died);
        in_time(
            after <= ctx.short() + LOOK + ctx.slack(),
            format!("after {after:?}"),
        )?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn dead_waiters_delay_nobody(ctx: Ctx) -> Result {
    let ([_holder, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let mut dead = Vec::new();
    for waiter in Peer::several::<3>(&ctx).await? {
        let waiting = waits(&ctx, &waiter, waiter.lock(&name)?.acquire()).await?;
        dead.push((waiter, waiting));
    }
    let waiting = waits(&ctx, &peer, peer.lock(&name)?.acquire()).await?;
    for (waiter, _) in &dead {
        waiter.gate.kill().await;
    }
    frees(&ctx, guard).await?;
    // A store that pushes notifies the living; other clients poll, and no entry stands before them.
    let bound = Duration::from_millis(250);
    waiting
        .served(&ctx, "the living one gets it", bound)
        .await?;
    left_untouched(&ctx, &observer, &name, ENTRY).await
}

async fn stopped_waiters_delay_others_by_one_entry_deadline_together(ctx: Ctx) -> Result {
    let ([_holder, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let mut stopped = Vec::new();
    for waiter in Peer::several::<3>(&ctx).await? {
        let waiting = waits(&ctx, &waiter, waiter.short(&name)?.acquire()).await?;
        stopped.push((waiter, waiting));
    }
    let waiting = waits(&ctx, &peer, peer.short(&name)?.acquire()).await?;
    for (waiter, _) in &stopped {
        waiter.gate.freeze();
    }
    frees(&ctx, guard).await?;
    // Its entry deadline is three polls of a third of the short lease each; one more poll notices it.
    let bound = ctx.short() + ctx.short() / 3;
    waiting
        .served(&ctx, "the living one gets it", bound)
        .await?;
    for (waiter, _) in &stopped {
        waiter.gate.kill().await;
    }
    Ok(())
}

async fn a_client_that_dies_while_it_is_served_costs_its_turn(ctx: Ctx) -> Result {
    let ([_holder, dead, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let served = waits(&ctx, &dead, dead.short(&name)?.acquire()).await?;
    let waiting = waits(&ctx, &peer, peer.short(&name)?.acquire()).await?;
    // It stops between the notification of its turn and its acquire.
    dead.gate.freeze();
    frees(&ctx, guard).await?;
    dead.gate.kill().await;
    // Its accept lease is at most a third of its lease; then the waiter behind it polls.
    let bound = ctx.short() * 2 / 3;
    let taken = waiting.done(&ctx, "the next one gets it", bound).await??;
    drop(served);
    frees(&ctx, taken).await
}

/// A waiter that has been refused once.
async fn waits<T: Send + 'static>(
    ctx: &Ctx,
    peer: &Peer,
    acquiring: impl Future<Output = T> + Send + 'static,
) -> Result<Task<T>> {
    let waiting = Task::spawn(acquiring);
    // Not before: an acquire in flight may be granted, and the process then dies as a holder.
    peer.stands(0).await?;
    // By then it has read the answer and sleeps.
    ctx.time_passes(Duration::from_millis(10)).await;
    Ok(waiting)
}

/// The longest poll interval.
const LOOK: Duration = Duration::from_secs(2);

/// The longest entry deadline.
const ENTRY: Duration = Duration::from_secs(6);
