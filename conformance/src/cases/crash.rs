//! `crash`: a dead process costs its lease and no more.

use super::{held, held_for};
use crate::{
    Ask, Ctx, Keeps, Result, TestDriver,
    case::cases,
    ensure, job, same,
    testbed::worker::{self, Job},
};
use dlock_core::{
    Clock, HoldId, Instant, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock},
};
use std::time::Duration;

cases! {
    [Clause::Crash]
    a_killed_holder_is_gone_with_its_lease needs(Processes);
    waiters_of_a_closed_client_delay_no_client_for_long needs(Queue);
    any_number_of_dead_waiters_costs_one_entry_deadline needs(Queue);
    a_turn_not_taken_passes_on needs(Queue);
    a_killed_server_finds_what_it_keeps needs(Server);
    what_a_closed_client_held_outlives_it_by_its_lease
        bullet("what it held outlives it by no more than its leases");
}

async fn a_killed_holder_is_gone_with_its_lease(ctx: Ctx) -> Result {
    let ([other], name) = ctx.test_drivers().await?;
    // Where a session ends the holds of a dead process, no lease is longer than the session.
    let lease = if ctx.is_session_bound() {
        ctx.short()
    } else {
        ctx.short() * 2
    };
    let mut holder = job::spawn(&ctx, HOLD, &name, lease, &[])?;
    let sent = holder.expect("held since ", ctx.answer()).await?;
    holder.kill_9().await?;
    // One clock for all processes of a machine.
    let before = Instant::from_nanos(sent.parse()?);
    let latest = ctx.dead_for(lease);
    let next = other.take_within(&ctx.ask(&name), latest).await?;
    let over = next.after >= before + lease;
    ensure(
        over,
        "a killed holder lost its lock before its lease was over",
    )
}

async fn what_a_closed_client_held_outlives_it_by_its_lease(ctx: Ctx) -> Result {
    let ([driver, other], _, first) = held_for(&ctx, ctx.short()).await?;
    let last = driver.take(&first.ask.again()).await?;
    driver.inner().close().await;
    let (ask, bound) = (ctx.ask(&last.ask.name), ctx.dead_for(ctx.until_over(&last)));
    other.take_within(&ask, bound).await.map(drop)
}

async fn waiters_of_a_closed_client_delay_no_client_for_long(ctx: Ctx) -> Result {
    let ([holder, closed, living], name, hold) = held(&ctx).await?;
    waits(&closed, &name).await?;
    let behind = waits(&living, &name).await?;
    closed.inner().close().await;
    holder.frees(&hold).await?;
    let bound = accept_lease(ctx.short());
    living.take_within(&behind, bound).await.map(drop)
}

async fn any_number_of_dead_waiters_costs_one_entry_deadline(ctx: Ctx) -> Result {
    let ([holder, other], name, hold) = held(&ctx).await?;
    for _ in 0..40 {
        let dead = ctx.test_driver().await?;
        waits(&dead, &name).await?;
        dead.inner().close().await;
    }
    holder.frees(&hold).await?;
    let bound = entry_deadline(ctx.short());
    other.take_within(&ctx.ask(&name), bound).await.map(drop)
}

async fn a_turn_not_taken_passes_on(ctx: Ctx) -> Result {
    let ([holder, stopped, living], name, hold) = held(&ctx).await?;
    waits(&stopped, &name).await?;
    let behind = waits(&living, &name).await?;
    holder.frees(&hold).await?;
    // The one ahead is alive and was notified, and does not take its turn.
    let turn = living
        .take_within(&behind, accept_lease(ctx.short()))
        .await?;
    same("the number of holds", turn.holds, 1)?;
    living.frees(&turn).await
}

async fn a_killed_server_finds_what_it_keeps(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    let stopped = ctx.now();
    ctx.server()?.restart().await?;
    let away = ctx.now().since(stopped);
    // Drivers reconnect by themselves; the contract does not say how soon.
    let what = "the client reaches the new server";
    ctx.eventually(what, ctx.answer(), || async {
        Ok(driver.inner().inspect(&name).await.is_ok())
    })
    .await?;
    let other = ctx.test_driver().await?;
    match ctx.server()?.keeps() {
        // The machine was so busy that the start took longer than half a session. The contract does not
        // say whether the session then survives. If it does, its holder can release the hold.
        Keeps::Everything if ctx.is_session_bound() && away > ctx.short() / 2 => {
            drop(driver.release(&hold, None).await);
            let bound = ctx.dead_for(Duration::ZERO);
            other.take_within(&ctx.ask(&name), bound).await.map(drop)
        }
        Keeps::Everything => {
            other.refused(&ctx.ask(&name)).await?;
            driver.renews(&hold, ctx.long()).await?;
            driver.frees(&hold).await
        }
        Keeps::Nothing => other.take(&ctx.ask(&name)).await.map(drop),
    }
}

/// Queues with a request whose accept lease and entry deadline are short.
async fn waits(driver: &TestDriver, name: &LockName) -> Result<Ask> {
    let ask = driver.ctx.ask(name).lasting(driver.ctx.short());
    let ask = ask.in_line(driver.ticket());
    driver.refused(&ask).await?;
    Ok(ask)
}

/// The longest time that a turn stays reserved for a request with this lease.
fn accept_lease(lease: Duration) -> Duration {
    (lease / 3).min(Duration::from_secs(1))
}

/// The longest time that a queue entry counts without a poll: three poll intervals.
fn entry_deadline(lease: Duration) -> Duration {
    (lease / 3).min(Duration::from_secs(2)) * 3
}

/// The job of a process that a case starts in order to kill it.
pub(crate) const HOLD: &str = "hold";

/// Acquires the lock, and then does nothing until this process is killed.
pub(crate) async fn hold(job: &Job, driver: &dyn DistributedLock) -> Result {
    let lease = Lease::renewed(Duration::from_millis(job.arg("lease")?.parse()?));
    let owner = Owner::from_seed(&format!("worker {}", std::process::id()));
    let hold = HoldId::from_bits(fastrand::u64(..));
    let now = Clock::boot().now();
    let give_up = now + Duration::from_secs(5);
    let request = Acquire::new(job.arg("name")?.parse()?, owner, hold, lease, give_up);
    let answer = driver.acquire(&request).await?;
    let granted = matches!(answer, Acquired::Granted(_));
    ensure(granted, format!("a free lock answered {answer:?}"))?;
    worker::say(&format!("held since {}", now.as_nanos()))?;
    let wake_ups = driver.wake_ups();
    // The process is killed here; the channel closes when its parent is gone.
    while worker::commands().recv().await.is_some() {}
    drop(wake_ups);
    Ok(())
}
