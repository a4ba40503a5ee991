//! `presence`: the locks of a client whose presence is over are free for others, and it knew before.

use super::{
    gated_driver::{CallOutcome, Step},
    test_client::{ABSENT, TestClient, fails, frees, stays_held},
    test_lock::TestLock,
};
use crate::{Ctx, Failure, Result, case::cases, ctx::several, ensure, same};
use dlock_core::{DEFAULT_POLL_INTERVAL, ErrorKind, Lease, LockName, LossReason, Owner, Snapshot};
use futures_util::TryStreamExt;
use std::{sync::Arc, time::Duration};

cases! {
    [Clause::Presence]
    whoever_is_evicted_knew_before needs(Detached);
    a_client_that_lives_keeps_its_locks needs(Detached);
    a_revived_client_has_lost_its_guards needs(Detached);
    an_eviction_names_the_incarnation needs(Detached);
    without_a_proof_nothing_is_broken needs(Detached);
    a_presence_that_is_granted_late_counts_from_its_request needs(Detached);
    a_try_takes_over_too needs(Detached);
    all_locks_of_a_client_are_lost_and_free_at_once needs(Detached);
    a_presence_ends_with_its_client needs(Detached);
    a_presence_that_is_broken_is_a_loss needs(Detached);
    a_lock_that_may_outlive_its_client_does_not_depend_on_its_presence needs(Detached);
    what_depends_on_a_presence_is_not_handed_on needs(Detached);
    a_re_entry_depends_on_the_same_presence needs(Detached);
    presences_are_no_locks_of_users needs(Detached);
}

/// The longest that a dead client's locks may be held: its presence, and two polls.
fn recovery(ctx: &Ctx) -> Duration {
    ctx.dead_for(ctx.kept()) + 2 * DEFAULT_POLL_INTERVAL + ctx.slack()
}

/// A client with a presence, others without, and a fresh name.
async fn beside<const N: usize>(ctx: &Ctx) -> Result<(TestClient, [TestClient; N], LockName)> {
    let present = TestClient::with_presence(ctx).await?;
    let others = several(|| TestClient::new(ctx)).await?;
    Ok((present, others, ctx.name()?))
}

async fn whoever_is_evicted_knew_before(ctx: Ctx) -> Result {
    for outcome in [
        CallOutcome::ErrorBefore,
        CallOutcome::Unsent,
        CallOutcome::Barred,
    ] {
        let (client, [other], name) = beside(&ctx).await?;
        let guard = Arc::new(client.acquire(&name).await?);
        client.gate.all(outcome);
        let cut = ctx.now();
        let (clock, watched) = (ctx.clock().clone(), Arc::clone(&guard));
        let watch = ctx.spawn(async move { (watched.lost().await, clock.now()) });
        let next = other.gets(&name, recovery(&ctx)).await?;
        let won = ctx.now();
        same("the state once another is inside", guard.state(), ABSENT)?;
        let (reason, heard) = watch.done(ctx.answer()).await?;
        same("the reason", reason, LossReason::Presence)?;
        ctx.has_done(heard <= won, "lost() resolved after the second got in")?;
        ensure(
            won.since(cut) >= ctx.kept() / 2,
            "it was evicted while its presence was there",
        )?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn a_client_that_lives_keeps_its_locks(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let waiting = other.waits(other.lock(&name)?).await?;
    ctx.time_passes(ctx.kept() * 4).await;
    same("a waiter is inside, too", waiting.is_done(), false)?;
    stays_held(&ctx, &guard).await?;
    ensure(
        guard.remaining() <= ctx.kept(),
        "it promises more than its presence",
    )?;
    frees(&ctx, guard).await?;
    waiting.served(ctx.answer()).await
}

async fn a_revived_client_has_lost_its_guards(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let before = guard.token();
    client.gate.all(CallOutcome::Unsent);
    let next = other.gets(&name, recovery(&ctx)).await?;
    client.gate.clear();
    frees(&ctx, next).await?;
    // The same name, held by the same client again, with its next presence.
    let again = client.gets(&name, ctx.answer() + ctx.kept()).await?;
    ensure(again.token() > before, "the token does not grow")?;
    same("the first guard", guard.state(), ABSENT)?;
    fails(ErrorKind::Lost, guard.release().await)?;
    client.cleans_up(ctx.answer() + ctx.long()).await?;
    stays_held(&ctx, &again).await?;
    frees(&ctx, again).await
}

async fn an_eviction_names_the_incarnation(ctx: Ctx) -> Result {
    let (client, [slow, quick], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    // One waiter's break is executed when the lock has another holder already.
    let late = ctx.kept() * 2;
    slow.gate.once(Step::Break, CallOutcome::Mute(late));
    client.gate.all(CallOutcome::Unsent);
    let waiting = slow.waits(slow.lock(&name)?).await?;
    let sent = || slow.gate.calls(Step::Break) > 0;
    ctx.until("it breaks the lock", recovery(&ctx), sent)
        .await?;
    drop(waiting); // what it sent is executed all the same
    let next = quick.gets(&name, ctx.answer() + ctx.kept()).await?;
    same("the guard of the dead", guard.state(), ABSENT)?;
    ctx.would_show_within(late + ctx.kept()).await;
    stays_held(&ctx, &next).await?;
    frees(&ctx, next).await
}

async fn without_a_proof_nothing_is_broken(ctx: Ctx) -> Result {
    let (client, [other, observer], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let waiting = other.waits(other.lock(&name)?).await?;
    client.gate.all(CallOutcome::Unsent);
    for outcome in [CallOutcome::ErrorBefore, CallOutcome::Unsent] {
        // It is told who holds the lock, and learns nothing of the presence.
        other.gate.always(Step::Presence, outcome);
        let before = other.gate.calls(Step::Presence);
        ctx.time_passes(ctx.kept() * 2).await;
        let tried = other.gate.calls(Step::Presence) > before;
        ensure(tried, "it does not look at the presence")?;
        let seen = observer.inner.admin().inspect(name.as_str()).await?;
        let token = seen.holders.first().and_then(|holder| holder.token);
        same("the token", token, Some(guard.token()))?;
        same("breaks", other.gate.calls(Step::Break), 0)?;
    }
    other.gate.clear();
    waiting.served(recovery(&ctx) + ctx.answer()).await
}

async fn a_presence_that_is_granted_late_counts_from_its_request(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let late = ctx.kept() / 4;
    client.gate.once(Step::Presence, CallOutcome::Slow(late));
    client.gate.always(Step::Renew, CallOutcome::Unsent);
    let guard = client.gets(&name, late + ctx.answer()).await?;
    client.gate.all(CallOutcome::Unsent);
    ensure(
        guard.remaining() <= ctx.kept() - late,
        "it promises more than is left of its presence",
    )?;
    let next = other.gets(&name, recovery(&ctx)).await?;
    same("the state once another is inside", guard.state(), ABSENT)?;
    frees(&ctx, next).await
}

async fn a_try_takes_over_too(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    other.refused(&name).await?;
    client.gate.all(CallOutcome::Unsent);
    ctx.time_passes(recovery(&ctx)).await;
    let next = other.acquire(&name).await?;
    same("the state once another is inside", guard.state(), ABSENT)?;
    frees(&ctx, next).await
}

async fn a_presence_ends_with_its_client(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let admin = other.inner.admin();
    let presence = presence_of(&other, &name).await?;
    frees(&ctx, guard).await?;
    // It lasts as long as the client, with or without a hold.
    ctx.time_passes(ctx.kept() * 2).await;
    let seen = admin.inspect(presence.as_str()).await?;
    same("presences of a client", seen.holders.len(), 1)?;
    client.inner.shutdown(ctx.answer()).await?;
    ctx.time_passes(recovery(&ctx)).await;
    let seen = admin.inspect(presence.as_str()).await?;
    same("presences of no client", seen.holders.len(), 0)
}

/// The lock that is the presence of this lock's holder.
async fn presence_of(client: &TestClient, name: &LockName) -> Result<String> {
    let seen = client.inner.admin().inspect(name.as_str()).await?;
    let holder = seen.holders.first();
    let id = holder.and_then(|holder| holder.info.presence());
    let id = id.ok_or_else(|| Failure::new("the holder info shows no presence"))?;
    Ok(format!("~alive:{id}"))
}

async fn all_locks_of_a_client_are_lost_and_free_at_once(ctx: Ctx) -> Result {
    let (client, [other], _) = beside(&ctx).await?;
    let (mut guards, mut waiting) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let name = ctx.name()?;
        guards.push(client.acquire(&name).await?);
        waiting.push(other.waits(other.lock(&name)?).await?);
    }
    client.gate.all(CallOutcome::Unsent);
    for waiter in waiting {
        waiter.served(recovery(&ctx)).await?;
    }
    for guard in &guards {
        same("its state", guard.state(), ABSENT)?;
    }
    Ok(())
}

async fn a_presence_that_is_broken_is_a_loss(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let presence = presence_of(&other, &name).await?;
    other.inner.admin().break_lock(presence, None).await?;
    // At its next renewal, and long before the lease of the lock.
    let lost = ctx.within("the lock is lost", ctx.kept(), guard.lost());
    same("the reason", lost.await?, LossReason::Presence)?;
    let next = other.gets(&name, recovery(&ctx)).await?;
    frees(&ctx, next).await
}

async fn a_lock_that_may_outlive_its_client_does_not_depend_on_its_presence(ctx: Ctx) -> Result {
    let (client, [other], _) = beside(&ctx).await?;
    let text = ctx.text();
    let owned = |lock: TestLock| lock.with_owner(&Owner::from_seed(&text));
    let kinds: [fn(&Ctx, TestLock) -> TestLock; 2] = [
        |ctx, lock| lock.lease(Lease::fixed(ctx.long())),
        |ctx, lock| lock.min_hold(ctx.short()),
    ];
    let mut guards = Vec::new();
    for kind in kinds {
        let name = ctx.name()?;
        guards.push((client.take(&kind(&ctx, client.lock(&name)?)).await?, name));
    }
    let name = ctx.name()?;
    guards.push((client.take(&owned(client.lock(&name)?)).await?, name));
    let before: Vec<_> = guards.iter().map(|(guard, _)| guard.token()).collect();
    client.gate.all(CallOutcome::Unsent);
    ctx.time_passes(ctx.kept() * 2).await;
    for ((_, name), token) in guards.iter().zip(before) {
        other.refused(name).await?;
        let seen = other.inner.admin().inspect(name.as_str()).await?;
        let holder = seen.holders.first();
        same(
            "its token",
            holder.and_then(|holder| holder.token),
            Some(token),
        )?;
        let presence = holder.and_then(|holder| holder.info.presence());
        same("its presence", presence, None)?;
    }
    Ok(())
}

async fn what_depends_on_a_presence_is_not_handed_on(ctx: Ctx) -> Result {
    let (client, [_other], name) = beside::<1>(&ctx).await?;
    let guard = client.acquire(&name).await?;
    fails(ErrorKind::Unsupported, guard.pass())?;
    let Err(not) = guard.detach() else {
        return Err(Failure::new("it was detached"));
    };
    same("the kind", not.error.kind(), ErrorKind::Unsupported)?;
    frees(&ctx, not.guard).await
}

async fn a_re_entry_depends_on_the_same_presence(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    let lock = client.lock(&name)?;
    let inner = guard.scope(async { lock.try_acquire().await }).await?;
    let Some(inner) = inner else {
        return Err(Failure::new("the scope did not enter"));
    };
    same("its token", inner.token(), guard.token())?;
    client.gate.all(CallOutcome::Unsent);
    let next = other.gets(&name, recovery(&ctx)).await?;
    for guard in [&guard, &inner] {
        same("the state once another is inside", guard.state(), ABSENT)?;
    }
    frees(&ctx, next).await
}

async fn presences_are_no_locks_of_users(ctx: Ctx) -> Result {
    let (client, [other], name) = beside(&ctx).await?;
    let guard = client.acquire(&name).await?;
    fails(
        ErrorKind::Misuse,
        other.inner.lock("~alive:0000000000000001"),
    )?;
    let admin = other.inner.admin();
    let listed: Vec<_> = admin.list("").try_collect().await?;
    let shown = |listed: &[Snapshot], prefix: &str| {
        (listed.iter()).any(|shown| shown.name.as_str().starts_with(prefix))
    };
    same("the lock is listed", shown(&listed, name.as_str()), true)?;
    same("a presence is listed", shown(&listed, "~alive:"), false)?;
    let listed: Vec<_> = admin.list("~alive:").try_collect().await?;
    same("with its prefix", shown(&listed, "~alive:"), true)?;
    stays_held(&ctx, &guard).await?;
    frees(&ctx, guard).await
}
