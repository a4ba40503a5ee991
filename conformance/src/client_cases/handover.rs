//! `wait`: what passes from one user of a client to the next without the store being asked again.

use super::{
    gate::Step,
    peer::{Peer, frees},
    task::Task,
};
use crate::{
    case::{Case, case},
    clause::Clause,
    ctx::Ctx,
    failure::{Failure, same},
    fixture::Need,
};
use std::{collections::BTreeSet, time::Duration};

pub(super) const CASES: &[Case] = &[
    case!(Clause::Wait, a_loss_wakes_who_waits_in_the_same_client),
    case!(
        Clause::Wait,
        the_second_waiter_stands_in_line_when_the_first_is_granted
    )
    .needs(&[Need::Line]),
];

async fn a_loss_wakes_who_waits_in_the_same_client(ctx: Ctx) -> Result<(), Failure> {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let guard = peer.take(&peer.fixed(&name)?).await?;
    let waiting = Task::spawn(peer.lock(&name)?.acquire());
    let asked = || async { Ok(peer.gate.calls(Step::Acquire) > 1) };
    ctx.eventually("it asks the store", ctx.answer(), asked)
        .await?;
    // Its looks are two seconds apart, whenever the lease ends.
    let bound = guard.remaining() + ctx.short() / 50;
    let taken = waiting.done(&ctx, "the next one is woken", bound).await??;
    drop(guard);
    frees(&ctx, taken).await
}

async fn the_second_waiter_stands_in_line_when_the_first_is_granted(
    ctx: Ctx,
) -> Result<(), Failure> {
    let [peer, other] = Peer::several(&ctx).await?;
    let observer = ctx.caller().await?;
    let name = ctx.name()?;
    let held = other.take(&other.lock(&name)?).await?;
    let first = Task::spawn(peer.lock(&name)?.acquire());
    let asked = || async { Ok(peer.gate.calls(Step::Acquire) > 0) };
    ctx.eventually("it asks the store", ctx.answer(), asked)
        .await?;
    let second = Task::spawn(peer.lock(&name)?.acquire());
    ctx.sleep(Duration::from_millis(5)).await;
    frees(&ctx, held).await?;
    let guard = first
        .done(&ctx, "the first gets it", ctx.answer())
        .await??;
    ctx.sleep(Duration::from_millis(20)).await;
    let waiters = observer.inspect(&name).await?.waiters;
    same("how many stand in line", waiters.unwrap_or(1), 1)?;
    let asked = peer.gate.seen(Step::Acquire, &name);
    let asked: BTreeSet<_> = asked.iter().map(|seen| seen.line).collect();
    same("the number of tickets that asked", asked.len(), 1)?;
    // Whoever comes now comes after it.
    let third = Task::spawn(other.lock(&name)?.acquire());
    let before = other.gate.calls(Step::Acquire);
    let stands = || async { Ok(other.gate.calls(Step::Acquire) > before) };
    ctx.eventually("the third asks the store", ctx.answer(), stands)
        .await?;
    frees(&ctx, guard).await?;
    let guard = second
        .done(&ctx, "the second has its turn", ctx.answer())
        .await??;
    same("the third is inside", third.is_done(), false)?;
    frees(&ctx, guard).await?;
    let guard = third
        .done(&ctx, "the third has its turn", ctx.answer())
        .await??;
    frees(&ctx, guard).await
}
