//! `late`: a request that the server executes long after its sender gave up takes nothing that lasts.

use super::{held, held_for};
use crate::{Call, Ctx, Result, caller::entry, case::cases, ensure, expect::is_left, same};
use dlock_core::{
    Instant,
    driver::{Acquired, Release, Renewed},
};
use std::time::Duration;

cases! {
    [Clause::Late]
    an_acquire_past_its_end_takes_nothing
        bullet("`late`: executed after `give_up + late`: nothing is taken and no ticket queued");
    a_reentry_past_its_end_takes_nothing
        bullet("`late`: executed after `give_up + late`: nothing is taken and no ticket queued");
    an_acquire_past_its_end_stands_in_no_line needs(Line)
        bullet("`late`: executed after `give_up + late`: nothing is taken and no ticket queued");
    an_acquire_held_back_past_its_end_takes_nothing needs(Network)
        bullet("`late`: executed after `give_up + late`: nothing is taken and no ticket queued");
    an_acquire_that_lay_in_a_stopped_server_takes_nothing needs(Server)
        bullet("`late`: executed after `give_up + late`: nothing is taken and no ticket queued");
    an_acquire_held_back_for_less_is_granted needs(Network);
    a_renewal_past_its_end_prolongs_nothing
        bullet("`late`: executed after `give_up + late`: nothing is prolonged");
    a_renewal_held_back_past_its_end_prolongs_nothing needs(Network)
        bullet("`late`: executed after `give_up + late`: nothing is prolonged");
    a_release_is_never_late needs(Network) bullet("never refused for being late");
}

async fn an_acquire_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let name = ctx.name()?;
    let ask = ctx
        .ask(&name)
        .until(past(&ctx, caller.driver().capabilities().late));
    granted_nothing(caller.acquire(&ask).await.ok())?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_reentry_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let ([caller], name, hold) = held(&ctx).await?;
    let ask = hold
        .ask
        .again()
        .until(past(&ctx, caller.driver().capabilities().late));
    granted_nothing(caller.acquire(&ask).await.ok())?;
    same("the number of holds", caller.inspect(&name).await?.holds, 1)?;
    caller.frees(&hold).await
}

async fn an_acquire_past_its_end_stands_in_no_line(ctx: Ctx) -> Result {
    let ([holder, caller, other], name, hold) = held(&ctx).await?;
    let ask = ctx.ask(&name).in_line(caller.ticket());
    let ask = ask.until(past(&ctx, caller.driver().capabilities().late));
    granted_nothing(caller.acquire(&ask).await.ok())?;
    holder.frees(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn an_acquire_held_back_past_its_end_takes_nothing(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let give_up = ctx.now() + ctx.short() / 4;
    let by = held_back(&ctx, caller.driver().capabilities().late);
    faults.hold_back(Call::Acquire, by).await?;
    let ask = ctx.ask(&name).until(give_up);
    let delivered = ctx.now() + by;
    let answer = tokio::time::timeout(give_up.since(ctx.now()), caller.acquire(&ask)).await;
    granted_nothing(answer.ok().and_then(Result::ok))?;
    ctx.sleep_until(delivered + ctx.slack()).await;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn an_acquire_that_lay_in_a_stopped_server_takes_nothing(ctx: Ctx) -> Result {
    let caller = ctx.caller().await?;
    let name = ctx.name()?;
    // Connects first, so that only the request itself is left to do once the server is stopped.
    caller.sees_free(&name).await?;
    ctx.server()?.stop().await?;
    let give_up = ctx.now() + ctx.short() / 4;
    let ask = ctx.ask(&name).until(give_up);
    let answer = tokio::time::timeout(give_up.since(ctx.now()), caller.acquire(&ask)).await;
    ctx.sleep_until(give_up + caller.driver().capabilities().late + ctx.slack())
        .await;
    ctx.server()?.cont().await?;
    granted_nothing(answer.ok().and_then(Result::ok))?;
    // This acquire is answered after that request, since the server executes requests in order. A new
    // client is used because an old one may have lost its session.
    let other = ctx.caller().await?;
    other
        .take_within(&ctx.ask(&name), ctx.slack())
        .await
        .map(drop)
}

async fn an_acquire_held_back_for_less_is_granted(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    faults.delay(ctx.short() / 10).await?;
    let name = ctx.name()?;
    let hold = caller.take(&ctx.ask(&name).lasting(ctx.short())).await?;
    is_left(hold.valid_for, ctx.short())
}

async fn a_renewal_past_its_end_prolongs_nothing(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held_for(&ctx, ctx.short()).await?;
    let give_up = past(&ctx, caller.driver().capabilities().late);
    let driver = caller.driver();
    let before = ctx.now();
    let answers = driver
        .renew(
            driver.lane(&name),
            &[entry(&hold, Some(ctx.long()))],
            give_up,
        )
        .await;
    for answer in answers.into_iter().flatten().flatten() {
        if let Renewed::Until { valid_for } = answer {
            ctx.ends_with(&hold, before, valid_for)?;
        }
    }
    other.follows(&hold).await.map(drop)
}

async fn a_renewal_held_back_past_its_end_prolongs_nothing(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let by = held_back(&ctx, caller.driver().capabilities().late);
    // The request is delivered while the hold still exists.
    let hold = caller
        .take(&ctx.ask(&name).lasting(by + ctx.slack() + ctx.short()))
        .await?;
    faults.hold_back(Call::Renew, by).await?;
    let give_up = ctx.now() + ctx.short() / 4;
    let (lane, batch) = (
        caller.driver().lane(&name),
        [entry(&hold, Some(ctx.long() * 2))],
    );
    let call = caller.driver().renew(lane, &batch, give_up);
    drop(tokio::time::timeout(give_up.since(ctx.now()), call).await);
    other.follows(&hold).await.map(drop)
}

async fn a_release_is_never_late(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let hold = caller.take(&ctx.ask(&name)).await?;
    let by = held_back(&ctx, caller.driver().capabilities().late);
    faults.hold_back(Call::Release, by).await?;
    let request = Release::new(name.clone(), hold.ask.owner, hold.ask.hold);
    let call = caller.release_as(&request);
    drop(tokio::time::timeout(ctx.short() / 4, call).await);
    other.refused(&ctx.ask(&name)).await?;
    other.take_within(&ctx.ask(&name), by).await.map(drop)
}

/// A give-up so far in the past that a request sent now is executed after `give_up + late`, for any
/// `late`.
fn past(ctx: &Ctx, late: Duration) -> Instant {
    ctx.now() - late - ctx.short()
}

/// A delay so long that a request is executed after its give-up, which is a quarter of a short lease
/// away.
fn held_back(ctx: &Ctx, late: Duration) -> Duration {
    ctx.short() / 2 + late
}

fn granted_nothing(answer: Option<Acquired>) -> Result {
    ensure(
        !matches!(answer, Some(Acquired::Granted(_))),
        format!("it came too late and was granted: {answer:?}"),
    )
}
