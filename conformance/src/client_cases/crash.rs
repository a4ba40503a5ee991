//! `crash`: a dead client costs its lease, or its turn, and no more.

use super::test_client::{OUT_OF_TIME, POLL, TestClient, fails, frees, held, stays_held};
use crate::{Ctx, Result, case::cases, in_time};
use futures_util::future::join_all;
use std::{future::IntoFuture, io, time::Duration};
use tokio::{
    runtime::{self, Runtime},
    task::spawn_blocking,
};

cases! {
    [Clause::Crash]
    the_lock_of_a_dead_client_is_free_within_its_lease;
    dead_waiters_delay_no_client;
    a_client_that_dies_while_it_is_served_costs_its_turn;
    // Simulated time has one runtime.
    a_caller_whose_runtime_ends_takes_no_hold_along needs(Processes);
    a_caller_whose_runtime_ends_takes_no_wake_up_along needs(Processes, Push);
}

async fn the_lock_of_a_dead_client_is_free_within_its_lease(ctx: Ctx) -> Result {
    for connected in [false, true] {
        let ([dead, client], name, _guard) = held(&ctx, TestClient::short).await?;
        ctx.time_passes(ctx.short() / 2).await;
        if connected {
            dead.gate.freeze();
        } else {
            dead.gate.kill().await;
        }
        // No cleanup or destructor runs on its way out: the guard lives on.
        let died = ctx.now();
        // It waits for a lease of its own, so its polls are two seconds apart unless it was told the
        // end.
        let bound = ctx.short() + POLL;
        let next = ctx
            .spawn(client.lock(&name)?.acquire())
            .done(bound)
            .await??;
        let after = ctx.now().since(died);
        in_time(after <= bound + ctx.slack(), format!("after {after:?}"))?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn dead_waiters_delay_no_client(ctx: Ctx) -> Result {
    let ([_holder, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let (dead, _) = TestClient::several::<3>(&ctx).await?;
    let mut waiting = Vec::new();
    for waiter in dead.iter().chain([&client]) {
        // Not before the answer: an acquire in flight may be granted, and the process then dies as a
        // holder.
        waiting.push(waiter.waits(waiter.lock(&name)?).await?);
    }
    ctx.time_passes(READ).await;
    for waiter in &dead {
        waiter.gate.kill().await;
    }
    frees(&ctx, guard).await?;
    // A store that pushes notifies the living; other clients poll, and no entry stands before them.
    let living = waiting.remove(3);
    living.served(Duration::from_millis(250)).await?;
    ctx.left_untouched(&name, ENTRY).await
}

async fn a_client_that_dies_while_it_is_served_costs_its_turn(ctx: Ctx) -> Result {
    let ([_holder, dead, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let served = dead.waits(dead.short(&name)?).await?;
    let waiting = client.waits(client.short(&name)?).await?;
    ctx.time_passes(READ).await;
    // It stops between the notification of its turn and its acquire.
    dead.gate.freeze();
    frees(&ctx, guard).await?;
    dead.gate.kill().await;
    // Its accept lease is at most a third of its lease; then the waiter behind it polls.
    let taken = waiting.done(ctx.short() * 2 / 3).await??;
    drop(served);
    frees(&ctx, taken).await
}

async fn a_caller_whose_runtime_ends_takes_no_hold_along(ctx: Ctx) -> Result {
    let ([client, other], _) = TestClient::several(&ctx).await?;
    let (mut guards, mut idle) = (Vec::new(), Vec::new());
    for ends in [false, true] {
        // Their requests may open connections, or a session that their locks depend on.
        let mut acquires = Vec::new();
        for _ in 0..4 {
            let lock = client.kept(&ctx.name()?)?;
            acquires.push(async move { lock.acquire().await });
        }
        let begun = ctx.now();
        let (granted, runtime) = elsewhere(join_all(acquires)).await?;
        // No answer comes over a connection of a runtime that runs nothing: a request waits for a second and is repeated.
        let took = ctx.now().since(begun);
        in_time(
            took < Duration::from_millis(900),
            format!("acquired after {took:?}"),
        )?;
        for guard in granted {
            guards.push(guard?);
        }
        match ends {
            true => drop(runtime),
            false => idle.push(runtime),
        }
    }
    ctx.time_passes(ctx.kept() * 3 / 2).await;
    for guard in guards {
        stays_held(&ctx, &guard).await?;
        other.refused(guard.name()).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

async fn a_caller_whose_runtime_ends_takes_no_wake_up_along(ctx: Ctx) -> Result {
    let ([_holder, client], name, guard) = held(&ctx, TestClient::lock).await?;
    // The first wait of a client may open what its wake-ups come through.
    let waiting = client.lock(&name)?.acquire_timeout(ctx.short() / 5);
    let (waited, runtime) = elsewhere(waiting).await?;
    drop(runtime);
    fails(OUT_OF_TIME, waited)?;
    let waiting = client.waits(client.lock(&name)?).await?;
    ctx.time_passes(READ).await;
    frees(&ctx, guard).await?;
    waiting.served(Duration::from_millis(250)).await
}

/// The output of a future, and the runtime of its own that it ran in.
async fn elsewhere<T: Send + 'static>(
    future: impl IntoFuture<Output = T, IntoFuture: Send> + Send + 'static,
) -> Result<(T, Idle)> {
    let future = future.into_future();
    let run = move || {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let output = runtime.block_on(future);
        io::Result::Ok((output, Idle(Some(runtime))))
    };
    Ok(spawn_blocking(run).await??)
}

/// A runtime that is there and runs nothing; dropped, it ends, also inside another one.
struct Idle(Option<Runtime>);

impl Drop for Idle {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// By then a waiter has read its answer and sleeps.
const READ: Duration = Duration::from_millis(10);

/// The longest entry deadline.
const ENTRY: Duration = Duration::from_secs(6);
