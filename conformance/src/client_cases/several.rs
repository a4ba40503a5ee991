//! Several locks at once, over each store: all of a set, or any of them.

use super::{
    gated_driver::Step,
    test_client::{OUT_OF_TIME, TestClient, fails, frees},
};
use crate::{
    Ctx, Result,
    case::cases,
    expect::{Expected, seen_from_here},
    same,
};
use dlock_core::{Client, Error, LockName, SetGuard};
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use std::{collections::BTreeSet, sync::Arc};

cases! {
    [Clause::Mutex]
    a_set_is_held_whole_or_not_at_all;
    sets_in_any_order_never_wait_in_a_circle;
    [Clause::Wait]
    any_lock_of_several_waits_for_whichever_comes_first;
    [Clause::Loss]
    the_loss_of_one_lock_is_the_loss_of_its_set;
}

async fn a_set_is_held_whole_or_not_at_all(ctx: Ctx) -> Result {
    let ([client, other], names) = (TestClient::several(&ctx).await?.0, names(&ctx)?);
    let set = client.inner.lock_all(texts(&names))?;
    let held = other.acquire(&names[1]).await?;
    let tried = ctx.answered(set.try_acquire()).await?;
    same("a set with a held lock is granted", tried?.is_some(), false)?;
    let error = fails(OUT_OF_TIME, set.acquire_timeout(ctx.short()).await)?;
    same("the held lock", error.name(), Some(&names[1]))?;
    for name in [&names[0], &names[2]] {
        ctx.left_untouched(name, ctx.answer()).await?;
    }
    frees(&ctx, held).await?;
    let guard = ctx.answered(set.acquire()).await??;
    for name in &names {
        other.refused(name).await?;
    }
    guard.check()?;
    released(&ctx, guard).await?;
    for name in &names {
        ctx.left_untouched(name, ctx.answer()).await?;
    }
    Ok(())
}

async fn sets_in_any_order_never_wait_in_a_circle(ctx: Ctx) -> Result {
    let (clients, names) = (TestClient::several::<3>(&ctx).await?.0, names(&ctx)?);
    let inside = Inside::default();
    let tasks = clients.iter().cycle().take(6).map(|client| {
        let (client, names) = (client.inner.clone(), names.clone());
        tokio::spawn(takes_turns(client, names, Arc::clone(&inside)))
    });
    let done = ctx.within("all have had a turn", ctx.answer() * 3, try_join_all(tasks));
    done.await??.into_iter().collect::<Result>()?;
    for name in &names {
        ctx.left_untouched(name, ctx.answer()).await?;
    }
    Ok(())
}

/// Acquires two or three of the names a few times, in random order.
async fn takes_turns(client: Client, mut names: [LockName; 3], inside: Inside) -> Result {
    for turn in 0..TURNS {
        fastrand::shuffle(&mut names);
        let set = client.lock_all(texts(&names[turn % 2..]))?;
        let guard = set.acquire().await?;
        let all = || inside.lock();
        for name in set.names() {
            same("it is alone", all().insert(name.clone()), true)?;
        }
        tokio::task::yield_now().await;
        guard.check()?;
        all().retain(|name| set.names().all(|own| own != name));
        for (_, outcome) in guard.release().await {
            outcome?;
        }
    }
    Ok(())
}

/// The names that are held.
type Inside = Arc<Mutex<BTreeSet<LockName>>>;

async fn any_lock_of_several_waits_for_whichever_comes_first(ctx: Ctx) -> Result {
    let ([client, other], names) = (TestClient::several(&ctx).await?.0, names(&ctx)?);
    let any = client.inner.lock_any(texts(&names))?;
    let guard = ctx.answered(any.acquire()).await??;
    same("the first free one", guard.name(), &names[0])?;
    let rest = other.inner.lock_all(texts(&names[1..]))?;
    let rest = ctx.answered(rest.acquire()).await??;
    let before = client.gate.answered(Step::Acquire);
    let waiting = ctx.spawn(any.acquire());
    // It has asked for all, and then queued for all.
    let asked = || client.gate.answered(Step::Acquire) >= before + 2 * names.len();
    ctx.until("it waits for all", ctx.answer(), asked).await?;
    frees(&ctx, guard).await?;
    let guard = waiting.done(ctx.answer()).await??;
    same("the one that came", guard.name(), &names[0])?;
    let waiting = ctx.spawn(any.acquire());
    released(&ctx, rest).await?;
    // Both may be granted at once: one is kept, the other given back.
    let second = waiting.done(ctx.answer()).await??;
    for name in &names {
        if name != guard.name() && name != second.name() {
            ctx.left_untouched(name, ctx.answer()).await?;
        }
    }
    frees(&ctx, guard).await?;
    frees(&ctx, second).await?;
    for name in &names {
        ctx.left_untouched(name, ctx.answer()).await?;
    }
    Ok(())
}

async fn the_loss_of_one_lock_is_the_loss_of_its_set(ctx: Ctx) -> Result {
    let ([client, other], names) = (TestClient::several(&ctx).await?.0, names(&ctx)?);
    let set = client.inner.lock_all(texts(&names))?;
    let set = set.lease(dlock_core::Lease::renewed(ctx.kept()));
    let guard = ctx.answered(set.acquire()).await??;
    same("the names", guard.guards().len(), names.len())?;
    other.breaks(&names[1], guard.token(&names[1])).await?;
    let lost = ctx.within("the set is lost", ctx.kept(), guard.lost());
    let (name, reason) = lost.await?;
    same("the lost lock", &name, &names[1])?;
    same(
        "the checked lock",
        guard.check().err().as_ref().and_then(Error::name),
        Some(&name),
    )?;
    for (released, outcome) in ctx.answered(guard.release()).await? {
        let loss = outcome.err().and_then(|error| error.loss());
        same("the release", loss, (released == name).then_some(reason))?;
    }
    Ok(())
}

/// Releases a set that is held.
fn released(ctx: &Ctx, guard: SetGuard) -> Expected<'_> {
    seen_from_here(async move {
        for (_, outcome) in ctx.answered(guard.release()).await? {
            outcome?;
        }
        Ok(())
    })
}

/// Fresh names, in their order.
fn names(ctx: &Ctx) -> Result<[LockName; 3]> {
    let prefix = ctx.text();
    let [a, b, c] = ["a", "b", "c"].map(|letter| LockName::new(format!("{prefix}{letter}")));
    Ok([a?, b?, c?])
}

fn texts(names: &[LockName]) -> Vec<&str> {
    names.iter().map(LockName::as_str).collect()
}

const TURNS: usize = 4;
