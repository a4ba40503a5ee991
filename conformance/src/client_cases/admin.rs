//! `admin` and `fencing` as a client shows them.

use super::test_client::{TestClient, frees, held, stays_held};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Broken, Effect, FencingToken, LockName, Snapshot};
use futures_util::TryStreamExt;
use std::time::Duration;

cases! {
    [Clause::Fencing]
    guards_one_after_the_other_have_growing_tokens;
    [Clause::Admin]
    a_client_shows_who_holds_a_lock_and_changes_nothing;
    a_client_breaks_the_incarnation_that_was_named;
    a_ping_is_answered_and_changes_nothing;
    a_ping_of_a_store_that_is_away_is_an_error_in_time needs(Network);
}

async fn guards_one_after_the_other_have_growing_tokens(ctx: Ctx) -> Result {
    let (clients, name) = TestClient::several::<2>(&ctx).await?;
    let mut last = FencingToken(0);
    for client in clients.iter().cycle().take(8) {
        let guard = client.acquire(&name).await?;
        let token = guard.token();
        ensure(token > last, format!("token {token} came after {last}"))?;
        last = token;
        let joined = client.join(&name, &guard.pass()?).await?;
        same("the token of who joined", joined.token(), last)?;
        guard.release().await?;
        frees(&ctx, joined).await?;
    }
    Ok(())
}

async fn a_client_shows_who_holds_a_lock_and_changes_nothing(ctx: Ctx) -> Result {
    let ([_client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    for _ in 0..2 {
        let seen = other.inner.admin().inspect(name.as_str()).await?;
        let owners: Vec<_> = seen.holders.iter().map(|holder| holder.owner).collect();
        same("who is inside", owners, vec![guard.owner()])?;
        same("the number of holds", seen.holds, 1)?;
        let listed = other.inner.admin().list(name.as_str());
        let listed: Vec<LockName> = listed.map_ok(|shown| shown.name).try_collect().await?;
        same("what is listed", &listed, &vec![name.clone()])?;
    }
    stays_held(&ctx, &guard).await?;
    frees(&ctx, guard).await
}

async fn a_client_breaks_the_incarnation_that_was_named(ctx: Ctx) -> Result {
    let ([_client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    let token = Some(guard.token());
    let wrong = FencingToken(guard.token().0.wrapping_add(1));
    let broken = other.breaks(&name, Some(wrong)).await?;
    same(
        "break with another token",
        broken,
        Broken::Changed { token },
    )?;
    guard.check()?;
    let broken = other.breaks(&name, token).await?;
    same("break", broken, Broken::Freed { token })?;
    let next = other.acquire(&name).await?;
    ensure(next.token() > guard.token(), "the token counter survives")?;
    frees(&ctx, next).await?;
    drop(guard);
    let broken = other.breaks(&name, None).await?;
    same("break of a free lock", broken, Broken::WasFree)
}

async fn a_ping_is_answered_and_changes_nothing(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
    for _ in 0..2 {
        ctx.answered(client.inner.ping()).await??;
    }
    let listed = client.inner.admin().list("dlock.ping");
    let listed: Vec<Snapshot> = listed.try_collect().await?;
    same("what the ping left", listed.len(), 0)?;
    same("the lock of a ping", guard.name(), &name)?;
    frees(&ctx, guard).await
}

async fn a_ping_of_a_store_that_is_away_is_an_error_in_time(ctx: Ctx) -> Result {
    let (client, network) = TestClient::behind_a_network(&ctx).await?;
    ctx.answered(client.inner.ping()).await??;
    network.down().await?;
    let limit = Duration::from_secs(5) + ctx.answer();
    let pinged = ctx.within("it is given up", limit, client.inner.ping());
    let error = pinged.await?.err();
    let error = error.ok_or_else(|| Failure::new("a store that is away answered"))?;
    ensure(error.is_retryable(), format!("{error:?}"))?;
    same("the effect", error.effect(), Effect::None)?;
    network.up().await?;
    let answers = || async { Ok(client.inner.ping().await.is_ok()) };
    ctx.eventually("it is answered again", limit, answers).await
}
