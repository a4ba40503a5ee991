//! `wait`: local hand-offs between users of one client, without a request to the store.

use super::{
    gated_driver::Step,
    test_client::{TestClient, frees, held},
};
use crate::{Ctx, Result, case::cases, in_time, same};
use std::{collections::BTreeSet, time::Duration};

cases! {
    [Clause::Wait]
    a_loss_wakes_who_waits_in_the_same_client;
    the_second_waiter_is_queued_when_the_first_is_granted needs(Queue);
}

async fn a_loss_wakes_who_waits_in_the_same_client(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::fixed).await?;
    let waiting = client.waits(client.lock(&name)?).await?;
    // Its polls are two seconds apart, whenever the lease ends.
    let taken = waiting.done(guard.remaining() + ctx.short() / 50).await??;
    drop(guard);
    frees(&ctx, taken).await
}

async fn the_second_waiter_is_queued_when_the_first_is_granted(ctx: Ctx) -> Result {
    let ([other, client], name, held) = held(&ctx, TestClient::lock).await?;
    let first = client.waits(client.lock(&name)?).await?;
    let second = ctx.begin(client.lock(&name)?.acquire()).await;
    frees(&ctx, held).await?;
    let guard = first.done(ctx.answer()).await??;
    ctx.would_show_within(Duration::from_millis(20)).await;
    let waiters = ctx.observer().await?.inspect(&name).await?.waiters;
    // A request of the first that was on its way when the second came names no next one.
    in_time(
        waiters.unwrap_or(1) == 1,
        format!("{waiters:?} waiters are queued, should be 1"),
    )?;
    let asked = client.gate.seen(Step::Acquire, &name);
    let asked: BTreeSet<_> = asked.iter().map(|seen| seen.line).collect();
    same("the number of tickets that asked", asked.len(), 1)?;
    // A later waiter comes after it.
    let third = other.waits(other.lock(&name)?).await?;
    frees(&ctx, guard).await?;
    let guard = second.done(ctx.answer()).await??;
    same("the third is inside", third.is_done(), false)?;
    frees(&ctx, guard).await?;
    third.served(ctx.answer()).await
}
