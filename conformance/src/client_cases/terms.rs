//! Locks with a maximum hold, and locks held without a guard.

use super::{
    gated_driver::Step,
    test_client::{TestClient, fails, frees, held, not_lost},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Detached, Error, ErrorKind, Guard, LossReason};
use std::time::Duration;

cases! {
    [Clause::Loss]
    a_longest_hold_ends_though_it_is_renewed;
    [Clause::Renew]
    nothing_renews_what_is_detached needs(Detached);
    what_is_attached_again_is_kept needs(Detached);
    [Clause::Owner]
    what_is_over_cannot_be_attached needs(Detached);
    what_has_a_guard_is_not_attached_twice needs(Detached);
    [Clause::Shutdown]
    what_is_detached_is_not_touched needs(Detached);
}

async fn a_longest_hold_ends_though_it_is_renewed(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let most = ctx.kept() * 2;
    let began = ctx.now();
    let guard = client.take(&client.kept(&name)?.max_hold(most)).await?;
    ctx.time_passes(ctx.kept() * 3 / 2).await;
    not_lost(&guard)?; // past its lease, so it was renewed
    let lost = ctx.within("it ends", most, guard.lost()).await?;
    same("the reason", lost, LossReason::Deadline)?;
    let over = began + most + ctx.answer();
    ensure(ctx.now() <= over, "it was held for too long")?;
    let next = other.lock(&name)?.acquire_timeout(ctx.long());
    let bound = ctx.kept() + ctx.slack() + ctx.answer();
    let next = ctx.within("the next one gets in", bound, next).await??;
    fails(ErrorKind::Lost, guard.check())?;
    frees(&ctx, next).await
}

/// A guard turned into a value.
fn detach(guard: Guard) -> Result<Detached> {
    guard.detach().map_err(|not| Failure::new(not.error))
}

async fn attach(
    ctx: &Ctx,
    client: &TestClient,
    detached: Detached,
) -> Result<Result<Guard, Error>> {
    let attached = ctx.answered(client.inner.attach(detached)).await?;
    Ok(attached.map_err(|not| not.error))
}

async fn nothing_renews_what_is_detached(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::kept).await?;
    let detached = detach(guard)?;
    let renewals = client.gate.calls(Step::Renew);
    other.refused(&name).await?;
    let bound = ctx.kept() + ctx.slack() + ctx.answer();
    ctx.left_untouched(&name, bound).await?;
    same("renewals of it", client.gate.calls(Step::Renew), renewals)?;
    drop(detached);
    Ok(())
}

async fn what_is_attached_again_is_kept(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::kept).await?;
    let token = guard.token();
    let attached = attach(&ctx, &other, detach(guard)?).await??;
    same("the token", attached.token(), token)?;
    ctx.time_passes(ctx.kept() * 2).await;
    not_lost(&attached)?;
    client.refused(&name).await?;
    frees(&ctx, attached).await
}

async fn what_is_over_cannot_be_attached(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    let detached = detach(guard)?;
    client.breaks(&name, None).await?;
    let next = other.acquire(&name).await?;
    fails(ErrorKind::Gone, attach(&ctx, &client, detached).await?)?;
    next.check()?;
    frees(&ctx, next).await
}

async fn what_has_a_guard_is_not_attached_twice(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::lock).await?;
    let detached = detach(guard)?;
    let copy = Detached::new(detached.pass()?.clone(), detached.hold(), detached.lease());
    let attached = attach(&ctx, &client, detached).await??;
    fails(ErrorKind::Misuse, attach(&ctx, &client, copy).await?)?;
    attached.check()?;
    frees(&ctx, attached).await
}

async fn what_is_detached_is_not_touched(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    let detached = detach(guard)?;
    let report = client.shut_down(Duration::ZERO).done(ctx.long()).await??;
    same("locks reported", report.locks, Vec::new())?;
    same("what is detached", report.detached, 1)?;
    other.refused(&name).await?;
    let attached = attach(&ctx, &other, detached).await??;
    frees(&ctx, attached).await
}
