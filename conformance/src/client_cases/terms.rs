//! Locks with a maximum hold, and locks held without a guard.

use super::{
    gate::Step,
    peer::{Peer, fails, frees, held, left_untouched, not_lost},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Detached, ErrorKind, Guard, LossReason};
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
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let most = ctx.kept() * 2;
    let began = ctx.now();
    let guard = peer.take(&peer.kept(&name)?.max_hold(most)).await?;
    ctx.time_passes(ctx.kept() * 3 / 2).await;
    not_lost(&guard)?; // past its lease, so it was renewed
    let lost = ctx.within("it ends", most, guard.lost()).await?;
    same("the reason", lost, LossReason::Deadline)?;
    ensure(
        ctx.now() <= began + most + ctx.answer(),
        "it was held for too long",
    )?;
    let next = other.lock(&name)?.acquire_timeout(ctx.long());
    let bound = ctx.kept() + ctx.slack() + ctx.answer();
    let next = ctx.within("the next one gets in", bound, next).await??;
    ensure(guard.check().is_err(), "the first one still counts on it")?;
    frees(&ctx, next).await
}

/// A guard turned into a value.
fn detach(guard: Guard) -> Result<Detached> {
    guard.detach().map_err(|not| Failure::new(not.error))
}

async fn nothing_renews_what_is_detached(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let observer = ctx.caller().await?;
    let name = ctx.name()?;
    let detached = detach(peer.take(&peer.short(&name)?).await?)?;
    let renewals = peer.gate.calls(Step::Renew);
    other.refused(&other.lock(&name)?).await?;
    let bound = ctx.short() + ctx.slack() + ctx.answer();
    left_untouched(&ctx, &observer, &name, bound).await?;
    same("renewals of it", peer.gate.calls(Step::Renew), renewals)?;
    drop(detached);
    Ok(())
}

async fn what_is_attached_again_is_kept(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::kept).await?;
    let token = guard.token();
    let attached = other.client.attach(detach(guard)?);
    let attached = ctx.within("it is attached", ctx.answer(), attached).await?;
    let attached = attached.map_err(|not| Failure::new(not.error))?;
    same("the token", attached.token(), token)?;
    ctx.time_passes(ctx.kept() * 2).await;
    not_lost(&attached)?;
    peer.refused(&peer.lock(&name)?).await?;
    frees(&ctx, attached).await
}

async fn what_is_over_cannot_be_attached(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    let detached = detach(guard)?;
    peer.breaks(&name).await?;
    let next = other.take(&other.lock(&name)?).await?;
    let attached = peer.client.attach(detached);
    let attached = ctx
        .within("attach is answered", ctx.answer(), attached)
        .await?;
    fails("attach", attached.map_err(|not| not.error), ErrorKind::Gone)?;
    next.check()?;
    frees(&ctx, next).await
}

async fn what_has_a_guard_is_not_attached_twice(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let detached = detach(peer.take(&peer.lock(&name)?).await?)?;
    let copy = Detached::new(detached.pass()?.clone(), detached.hold(), detached.lease());
    let attached = peer.client.attach(detached).await;
    let attached = attached.map_err(|not| Failure::new(not.error))?;
    let again = peer.client.attach(copy).await.map_err(|not| not.error);
    fails("a second attach", again, ErrorKind::Misuse)?;
    attached.check()?;
    frees(&ctx, attached).await
}

async fn what_is_detached_is_not_touched(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let detached = detach(peer.take(&peer.lock(&name)?).await?)?;
    let closing = peer.client.shutdown(Duration::ZERO);
    let report = ctx.within("shutdown ends", ctx.long(), async { closing.await });
    let report = report.await??;
    same("locks reported", report.locks, Vec::new())?;
    same("what is detached", report.detached, 1)?;
    other.refused(&other.lock(&name)?).await?;
    let attached = other.client.attach(detached).await;
    let attached = attached.map_err(|not| Failure::new(not.error))?;
    frees(&ctx, attached).await
}
