//! Clients behind a network that breaks: the faults that the gate simulates, on the wire.

use super::{
    gated_driver::Step,
    test_client::{ABSENT, EXPIRED, TestClient, frees, held, not_lost},
};
use crate::{Call, Ctx, Result, case::cases, ensure, same};

cases! {
    [Clause::Renew]
    a_broken_connection_costs_no_lock needs(Network);
    [Clause::Loss]
    a_network_that_is_down_for_a_lease_is_a_loss_in_time needs(Network);
    [Clause::Presence]
    a_client_that_is_cut_off_knows_before_its_locks_are_free needs(Network, Detached);
    [Clause::Indeterminate]
    replies_lost_on_the_wire_count_nothing_twice needs(Network);
    [Clause::Wait]
    a_broken_connection_costs_a_waiter_a_poll_at_most needs(Network);
    [Clause::Late]
    a_request_held_back_on_the_wire_takes_nothing_that_lasts needs(Network);
    [Clause::Renew]
    a_server_that_stands_still_for_half_a_lease_costs_no_lock needs(Server);
}

async fn a_broken_connection_costs_no_lock(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    let ([other], name) = TestClient::several(&ctx).await?;
    let guard = client.take(&client.kept(&name)?).await?;
    for _ in 0..4 {
        network.cut().await?;
        ctx.time_passes(ctx.kept() / 2).await;
        not_lost(&guard)?;
        other.refused(&name).await?;
    }
    frees(&ctx, guard).await
}

async fn a_network_that_is_down_for_a_lease_is_a_loss_in_time(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    let ([other], name) = TestClient::several(&ctx).await?;
    let guard = client.take(&client.short(&name)?).await?;
    network.down().await?;
    let limit = ctx.short() * 2 + ctx.slack();
    let next = other.short(&name)?.acquire_timeout(limit).await?;
    same("the state once another is inside", guard.state(), EXPIRED)?;
    network.up().await?;
    drop(guard);
    frees(&ctx, next).await?;
    // The client reconnects by itself.
    let again = client.gets(&name, ctx.answer()).await?;
    frees(&ctx, again).await?;
    client.cleans_up(ctx.answer()).await
}

async fn a_client_that_is_cut_off_knows_before_its_locks_are_free(ctx: Ctx) -> Result {
    let (client, network) = TestClient::present_behind_a_network(&ctx).await?;
    let ([other], name) = TestClient::several(&ctx).await?;
    let guard = client.acquire(&name).await?;
    network.down().await?;
    let limit = ctx.dead_for(ctx.kept() * 2) + ctx.slack();
    let next = other.gets(&name, limit).await?;
    same("the state once another is inside", guard.state(), ABSENT)?;
    network.up().await?;
    drop(guard);
    client.cleans_up(ctx.answer()).await?;
    not_lost(&next)?;
    frees(&ctx, next).await?;
    // With the next presence it may hold locks again.
    let again = client.gets(&name, ctx.answer()).await?;
    frees(&ctx, again).await
}

async fn replies_lost_on_the_wire_count_nothing_twice(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    let name = ctx.name()?;
    network.lose_reply(Call::Acquire).await?;
    let guard = client.gets(&name, ctx.answer()).await?;
    ctx.sees_holds(&name, 1).await?;
    network.lose_reply(Call::Release).await?;
    frees(&ctx, guard).await?;
    client.cleans_up(ctx.answer()).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_broken_connection_costs_a_waiter_a_poll_at_most(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    let ([_other], name, guard) = held(&ctx, TestClient::lock).await?;
    let waiting = ctx.spawn(client.kept(&name)?.acquire());
    client.sends(Step::Acquire, 1).await?;
    network.cut().await?;
    frees(&ctx, guard).await?;
    waiting.served(ctx.kept() / 3 + ctx.slack()).await
}

async fn a_request_held_back_on_the_wire_takes_nothing_that_lasts(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    let name = ctx.name()?;
    // The request arrives long after the third of the lease that an attempt may take.
    let late = ctx.short() * 2 / 3;
    network.hold_back(Call::Acquire, late).await?;
    let begun = ctx.now();
    if let Ok(Some(guard)) = client.short(&name)?.try_acquire().await {
        // A repeat on another connection was granted: the late copy must not revive the hold.
        frees(&ctx, guard).await?;
    }
    ctx.sleep_until(begun + late + ctx.short() / 3).await;
    client.cleans_up(ctx.short()).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_server_that_stands_still_for_half_a_lease_costs_no_lock(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
    // Half of the lease that is certain at any time, where that is less than the lease.
    let still = if ctx.is_session_bound() {
        ctx.promised(ctx.kept()) / 2
    } else {
        ctx.kept() / 2
    };
    for _ in 0..2 {
        ctx.server()?.stop().await?;
        ctx.time_passes(still).await;
        ctx.server()?.cont().await?;
        ctx.time_passes(ctx.kept() / 2).await;
        not_lost(&guard)?;
    }
    ensure(client.gate.calls(Step::Renew) > 0, "it was renewed")?;
    frees(&ctx, guard).await
}
