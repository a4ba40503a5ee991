//! `late`: a request that the server executes long after its sender gave up takes nothing that lasts.

use super::{held, held_for};
use crate::{Call, Ctx, Result, TestDriver, case::cases, ensure, expect::is_left};
use dlock_core::{
    Instant, LockName,
    driver::{Acquired, Renewed},
};
use std::time::Duration;
use tokio::time::timeout;

cases! {
    [Clause::Late]
    an_acquire_held_back_for_less_is_granted needs(Network);
    a_release_is_never_late needs(Network) bullet("never refused for being late");
    [Clause::Late bullet("`late`: executed after `give_up + late`: nothing is taken")]
    an_acquire_past_its_end_takes_nothing;
    a_reentry_past_its_end_takes_nothing;
    a_sharer_past_its_end_takes_nothing needs(Shares);
    an_acquire_past_its_end_is_not_queued needs(Queue);
    an_acquire_held_back_past_its_end_takes_nothing needs(Network);
    an_acquire_that_lay_in_a_stopped_server_takes_nothing needs(Server);
    [Clause::Late bullet("`late`: executed after `give_up + late`: nothing is prolonged")]
    a_renewal_past_its_end_prolongs_nothing;
    a_renewal_held_back_past_its_end_prolongs_nothing needs(Network);
}

async fn an_acquire_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let ask = ctx.ask(&name).until(past(&driver));
    granted_nothing(driver.acquire(&ask).await.ok())?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_reentry_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    let ask = hold.ask.again().until(past(&driver));
    granted_nothing(driver.acquire(&ask).await.ok())?;
    driver.sees_holds(&name, 1).await?;
    driver.frees(&hold).await
}

async fn a_sharer_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    for share in [ctx.ask(&name).shared(), ctx.ask(&name).permit(3)] {
        let ask = share.again().until(past(&driver));
        granted_nothing(driver.acquire(&ask).await.ok())?;
        other.sees_free(&name).await?;
        // Nor beside another.
        let hold = other.take(&share).await?;
        let ask = share.again().until(past(&driver));
        granted_nothing(driver.acquire(&ask).await.ok())?;
        other.sees_holds(&name, 1).await?;
        other.frees(&hold).await?;
    }
    Ok(())
}

async fn an_acquire_past_its_end_is_not_queued(ctx: Ctx) -> Result {
    let ([holder, driver, other], name, hold) = held(&ctx).await?;
    let ask = ctx.ask(&name).in_line(driver.ticket()).until(past(&driver));
    granted_nothing(driver.acquire(&ask).await.ok())?;
    holder.frees(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn an_acquire_held_back_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let by = held_back(&driver);
    faults.hold_back(Call::Acquire, by).await?;
    let delivered = ctx.now() + by;
    gives_up(&driver, &name).await?;
    ctx.sleep_until(delivered + ctx.slack()).await;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn an_acquire_that_lay_in_a_stopped_server_takes_nothing(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    // Connects first, so that only the request itself is left to do once the server is stopped.
    driver.sees_free(&name).await?;
    ctx.server()?.stop().await?;
    let answer = gives_up(&driver, &name).await;
    ctx.sleep_until(ctx.now() + driver.late() + ctx.slack())
        .await;
    ctx.server()?.cont().await?;
    answer?;
    // This acquire is answered after that request, since the server executes requests in order. A new
    // client is used because an old one may have lost its session.
    let other = ctx.test_driver().await?;
    let next = ctx.ask(&name);
    other.take_within(&next, ctx.slack()).await.map(drop)
}

/// Sends an acquire that is given up after a quarter of a short lease; it may not have been granted by
/// then.
async fn gives_up(driver: &TestDriver, name: &LockName) -> Result {
    let ctx = &driver.ctx;
    let give_up = ctx.now() + ctx.short() / 4;
    let ask = ctx.ask(name).until(give_up);
    let answer = timeout(give_up.since(ctx.now()), driver.acquire(&ask)).await;
    granted_nothing(answer.ok().and_then(Result::ok))
}

async fn an_acquire_held_back_for_less_is_granted(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    faults.delay(ctx.short() / 10).await?;
    let name = ctx.name()?;
    let hold = driver.take(&ctx.ask(&name).lasting(ctx.short())).await?;
    is_left(hold.valid_for, ctx.short())
}

async fn a_renewal_past_its_end_prolongs_nothing(ctx: Ctx) -> Result {
    let ([driver, other], _, hold) = held_for(&ctx, ctx.short()).await?;
    let before = ctx.now();
    let answer = driver.renew_until(&hold, ctx.long(), past(&driver)).await;
    if let Ok(Renewed::Until { valid_for }) = answer {
        ctx.ends_with(&hold, before, valid_for)?;
    }
    other.follows(&hold).await.map(drop)
}

async fn a_renewal_held_back_past_its_end_prolongs_nothing(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let by = held_back(&driver);
    // The request is delivered while the hold still exists.
    let lease = by + ctx.slack() + ctx.short();
    let hold = driver.take(&ctx.ask(&name).lasting(lease)).await?;
    faults.hold_back(Call::Renew, by).await?;
    let limit = ctx.short() / 4;
    let call = driver.renew_until(&hold, ctx.long() * 2, ctx.now() + limit);
    drop(timeout(limit, call).await);
    other.follows(&hold).await.map(drop)
}

async fn a_release_is_never_late(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    let by = held_back(&driver) + ctx.slack() * 2;
    faults.hold_back(Call::Release, by).await?;
    drop(timeout(ctx.short() / 4, driver.release_as(&hold.ask)).await);
    other.refused(&ctx.ask(&name)).await?;
    other.take_within(&ctx.ask(&name), by).await.map(drop)
}

/// A give-up so far in the past that a request sent now is executed after `give_up + late`, for any
/// `late`.
fn past(driver: &TestDriver) -> Instant {
    driver.ctx.now() - driver.late() - driver.ctx.short()
}

/// A delay so long that a request is executed after its give-up, which is a quarter of a short lease
/// away.
fn held_back(driver: &TestDriver) -> Duration {
    driver.ctx.short() / 2 + driver.late()
}

fn granted_nothing(answer: Option<Acquired>) -> Result {
    let granted = matches!(answer, Some(Acquired::Granted(_)));
    ensure(!granted, format!("granted too late: {answer:?}"))
}
