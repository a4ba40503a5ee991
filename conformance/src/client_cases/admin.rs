//! `admin` and `fencing` as a client shows them.

use super::test_client::{TestClient, frees, held, stays_held};
use crate::{Ctx, Result, case::cases, ensure, same};
use dlock_core::{Broken, FencingToken, LockName};
use futures_util::TryStreamExt;

cases! {
    [Clause::Fencing]
    guards_one_after_the_other_have_growing_tokens;
    [Clause::Admin]
    a_client_shows_who_holds_a_lock_and_changes_nothing;
    a_client_breaks_the_incarnation_that_was_named;
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
