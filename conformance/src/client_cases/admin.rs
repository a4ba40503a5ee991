//! `admin` and `fencing` as a client shows them.

use super::peer::{Peer, frees, held, stays_held};
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
    let peers = Peer::several::<2>(&ctx).await?;
    let name = ctx.name()?;
    let mut last = FencingToken(0);
    for peer in peers.iter().cycle().take(8) {
        let guard = peer.take(&peer.lock(&name)?).await?;
        ensure(
            guard.token() > last,
            format!("token {} came after {last}", guard.token()),
        )?;
        last = guard.token();
        let joined = peer.join(peer.lock(&name)?, &guard.pass()?).await?;
        same("the token of who joined", joined.token(), last)?;
        guard.release().await?;
        frees(&ctx, joined).await?;
    }
    Ok(())
}

async fn a_client_shows_who_holds_a_lock_and_changes_nothing(ctx: Ctx) -> Result {
    let ([_peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    for _ in 0..2 {
        let seen = other.client.admin().inspect(name.as_str()).await?;
        let owners: Vec<_> = seen.holders.iter().map(|holder| holder.owner).collect();
        same("who is inside", owners, vec![guard.owner()])?;
        same("the number of holds", seen.holds, 1)?;
        same(
            "what the walk finds",
            listed(&other, &name).await?,
            vec![name.clone()],
        )?;
    }
    stays_held(&ctx, "its state", &guard).await?;
    frees(&ctx, guard).await
}

async fn a_client_breaks_the_incarnation_that_was_named(ctx: Ctx) -> Result {
    let ([_peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    let token = guard.token();
    let wrong = Some(FencingToken(token.0.wrapping_add(1)));
    let broken = other
        .client
        .admin()
        .break_lock(name.as_str(), wrong)
        .await?;
    same(
        "break with another token",
        broken,
        Broken::Changed { token: Some(token) },
    )?;
    guard.check()?;
    let broken = other
        .client
        .admin()
        .break_lock(name.as_str(), Some(token))
        .await?;
    same("break", broken, Broken::Freed { token: Some(token) })?;
    let next = other.take(&other.lock(&name)?).await?;
    ensure(next.token() > token, "the token counter survives")?;
    frees(&ctx, next).await?;
    drop(guard);
    let broken = other.breaks(&name).await?;
    same("break of a free lock", broken, Broken::WasFree)
}

/// The names that a full listing finds under this prefix.
async fn listed(peer: &Peer, prefix: &LockName) -> Result<Vec<LockName>> {
    let names = peer.client.admin().list(prefix.as_str());
    Ok(names.map_ok(|shown| shown.name).try_collect().await?)
}
