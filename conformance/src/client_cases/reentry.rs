//! `reentry`: ownership is a value, and a task that has it enters past every queue.

use super::{
    gated_driver::{CallOutcome, Step},
    test_client::{NOT_HELD, ONE_LEFT, TestClient, Waiter, frees, held, stays_held},
};
use crate::{Ctx, Failure, Result, case::cases, cases::ORDERS, ensure, same};
use dlock_core::{ErrorKind, FencingToken, Guard, LockName, LossReason, Pass, ReleaseOutcome};
use std::time::Duration;

cases! {
    [Clause::Reentry]
    an_owner_enters_from_this_client_and_another_past_those_who_wait;
    a_scope_enters_its_own_incarnation_and_nothing_else;
    a_task_spawned_in_a_scope_is_outside;
    joined_holds_go_in_every_order_while_others_wait;
    a_pass_of_what_is_over_is_gone_and_takes_nothing;
    a_pass_of_another_name_or_store_is_misuse;
    a_dead_co_owner_leaves_no_ghost;
    an_owner_whose_lock_is_gone_is_told_when_it_enters_again;
    an_owner_that_waits_enters_when_its_own_hold_appears;
    an_owner_that_waits_enters_when_it_is_inside_elsewhere;
}

async fn an_owner_enters_from_this_client_and_another_past_those_who_wait(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let owner = client.inner.owner();
    let guard = client.take(&client.lock(&name)?.with_owner(&owner)).await?;
    let token = guard.token();
    let waiting = [
        wait(&ctx, &client, &name).await?,
        wait(&ctx, &other, &name).await?,
    ];
    let mut inside = vec![guard];
    for entrant in [&client, &other] {
        let lock = entrant.lock(&name)?.with_owner(&owner);
        inside.push(ctx.answered(lock.acquire()).await??);
        inside.push(entrant.take(&lock).await?);
    }
    let tokens: Vec<_> = inside.iter().map(Guard::token).collect();
    same("the tokens of those inside", tokens, vec![token; 5])?;
    end_one_after_the_other(&ctx, inside, waiting).await
}

async fn a_scope_enters_its_own_incarnation_and_nothing_else(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let second = ctx.name()?;
    let guard = client.acquire(&name).await?;
    let elsewhere = client.acquire(&second).await?;
    let inside = guard.scope(async {
        for entrant in [&client, &other] {
            let again = entrant.acquire(&name).await?;
            same("the token inside", again.token(), guard.token())?;
            let nested = again.scope(entrant.acquire(&name)).await?;
            same("the token inside twice", nested.token(), guard.token())?;
            // Not the scope's name: a fresh owner, other than the holder.
            entrant.refused(&second).await?;
            let fresh = entrant.acquire(&ctx.name()?).await?;
            let is_scopes = fresh.owner() == guard.owner();
            same("another name has the scope's owner", is_scopes, false)?;
        }
        Ok::<_, Failure>(())
    });
    inside.await?;
    client.refused(&name).await?;
    drop(elsewhere);
    client.cleans_up(ctx.answer()).await?;
    other.cleans_up(ctx.answer()).await?;
    frees(&ctx, guard).await
}

async fn a_task_spawned_in_a_scope_is_outside(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
    let lock = client.lock(&name)?;
    let spawned = guard.scope(async { ctx.spawn(async move { lock.try_acquire().await }) });
    let entered = spawned.await.done(ctx.answer()).await?;
    let inside = matches!(entered, Ok(Some(_)));
    same("a spawned task is inside", inside, false)
}

async fn joined_holds_go_in_every_order_while_others_wait(ctx: Ctx) -> Result {
    let ([client, other], _) = TestClient::several(&ctx).await?;
    for order in ORDERS {
        let name = ctx.name()?;
        let first = client.acquire(&name).await?;
        let pass = first.pass()?;
        let waiting = [
            wait(&ctx, &client, &name).await?,
            wait(&ctx, &other, &name).await?,
        ];
        let second = client.join(&name, &pass).await?;
        let third = other.join(&name, &pass).await?;
        same("the token of who joined", third.token(), pass.token())?;
        let mut inside = [first, second, third].map(Some);
        let guards = order.into_iter().filter_map(|at| inside[at].take());
        end_one_after_the_other(&ctx, guards.collect(), waiting).await?;
    }
    Ok(())
}

async fn a_pass_of_what_is_over_is_gone_and_takes_nothing(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    let pass = guard.pass()?;
    frees(&ctx, guard).await?;
    for late in [&client, &other] {
        late.cannot_join(&name, &pass, ErrorKind::Gone).await?;
        ctx.sees_free(&name).await?;
    }
    let next = other.acquire(&name).await?;
    for late in [&client, &other] {
        late.cannot_join(&name, &pass, ErrorKind::Gone).await?;
    }
    stays_held(&ctx, &next).await?;
    frees(&ctx, next).await
}

async fn a_pass_of_another_name_or_store_is_misuse(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
    let (other, pass) = (ctx.name()?, guard.pass()?);
    let foreign = Pass::new("elsewhere", name.clone(), *pass.owner(), pass.token());
    let calls = client.gate.all_calls();
    for (name, pass) in [(&other, &pass), (&name, &foreign)] {
        client.cannot_join(name, pass, ErrorKind::Misuse).await?;
    }
    same("the number of calls made", client.gate.all_calls(), calls)?;
    frees(&ctx, guard).await
}

async fn a_dead_co_owner_leaves_no_ghost(ctx: Ctx) -> Result {
    let ([_client, dead], name, guard) = held(&ctx, TestClient::lock).await?;
    let before = ctx.now();
    let ghost = dead.short(&name)?.join(&guard.pass()?).await?;
    dead.gate.kill().await;
    let over = ghost.lost().await;
    same("what the dead one would say", over, LossReason::Deadline)?;
    ctx.sleep_until(before + ctx.short() + ctx.slack()).await;
    // Its hold is past its end, so the other's release is the last.
    frees(&ctx, guard).await?;
    let ([client, dead], name, guard) = held(&ctx, TestClient::lock).await?;
    let ghost = dead.kept(&name)?.join(&guard.pass()?).await?;
    dead.gate.kill().await;
    let outcome = guard.release().await?;
    same("a release beside a living hold", outcome, ONE_LEFT)?;
    let next = client.gets(&name, ctx.kept() * 2 + ctx.slack()).await?;
    drop(ghost);
    frees(&ctx, next).await
}

async fn an_owner_whose_lock_is_gone_is_told_when_it_enters_again(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let lock = client.lock(&name)?.with_owner(&client.inner.owner());
    let first = client.take(&lock).await?;
    other.breaks(&name, Some(first.token())).await?;
    // It believes that it is inside. The store answers that this incarnation is over, and grants a new
    // one.
    let second = ctx.answered(lock.acquire()).await??;
    let greater = second.token() > first.token();
    ensure(greater, "a new incarnation has a greater token")?;
    same("its state", first.state(), NOT_HELD)?;
    drop(first);
    client.cleans_up(ctx.answer()).await?;
    stays_held(&ctx, &second).await?;
    frees(&ctx, second).await
}

async fn an_owner_that_waits_enters_when_its_own_hold_appears(ctx: Ctx) -> Result {
    let ([_client, other], name, foreign) = held(&ctx, TestClient::lock).await?;
    let owned = other.lock(&name)?.with_owner(&other.inner.owner());
    // Both wait in one queue; the one served second has the same owner as the first.
    let first = ctx.begin(owned.acquire()).await;
    let second = ctx.begin(owned.acquire()).await;
    other.stands(0).await?;
    frees(&ctx, foreign).await?;
    let first = first.done(ctx.answer()).await??;
    let second = second.done(ctx.answer()).await??;
    same("the token of the second", second.token(), first.token())?;
    same("the first release", first.release().await?, ONE_LEFT)?;
    frees(&ctx, second).await
}

/// It waits behind another owner of its own client, which is not granted the lock.
async fn an_owner_that_waits_enters_when_it_is_inside_elsewhere(ctx: Ctx) -> Result {
    let ([_holder, client, other], name, held) = held(&ctx, TestClient::lock).await?;
    let owner = other.inner.owner();
    let elsewhere = ctx.spawn(other.lock(&name)?.with_owner(&owner).acquire());
    let stands = || {
        let asked = other.gate.seen(Step::Acquire, &name);
        asked.iter().any(|seen| seen.line.is_some()) && other.gate.is_idle(Step::Acquire)
    };
    ctx.until("it waits elsewhere", ctx.answer(), stands)
        .await?;
    let stranger = wait(&ctx, &client, &name).await?;
    let asked = client.gate.calls(Step::Acquire);
    let here = ctx.spawn(client.kept(&name)?.with_owner(&owner).acquire());
    let refused = || client.gate.calls(Step::Acquire) > asked && client.gate.is_idle(Step::Acquire);
    let what = "it asks past the queue in vain";
    ctx.until(what, ctx.answer(), refused).await?;
    // The other owner requests nothing while the lock changes hands.
    client.gate.all(CallOutcome::Barred);
    frees(&ctx, held).await?;
    let inside = elsewhere.done(ctx.answer()).await??;
    client.gate.clear();
    let again = here.done(ctx.kept() / 3).await??;
    same("the token", again.token(), inside.token())?;
    end_one_after_the_other(&ctx, vec![inside, again], [stranger]).await
}

/// A waiter of another owner that has sent its first request.
async fn wait(ctx: &Ctx, client: &TestClient, name: &LockName) -> Result<Waiter<FencingToken>> {
    let asked = client.gate.calls(Step::Acquire);
    let lock = client.lock(name)?;
    let waiting = ctx.spawn(async move {
        let guard = lock.acquire().await?;
        let token = guard.token();
        guard.release().await.map(|_| token)
    });
    client.sends(Step::Acquire, asked + 1).await?;
    Ok(waiting)
}

/// The holds are released one after the other; the waiter is granted after the last, not before.
async fn end_one_after_the_other<const N: usize>(
    ctx: &Ctx,
    inside: Vec<Guard>,
    waiting: [Waiter<FencingToken>; N],
) -> Result {
    let (name, token) = match inside.first() {
        Some(guard) => (guard.name().clone(), guard.token()),
        None => return Err(Failure::new("BUG: the lock has no holder")),
    };
    let mut left = u32::try_from(inside.len())?;
    for guard in inside {
        ctx.would_show_within(Duration::from_millis(5)).await;
        let in_early = waiting.iter().any(Waiter::is_done);
        same("a waiter was inside beside the owner", in_early, false)?;
        left -= 1;
        let wanted = match left {
            0 => ReleaseOutcome::Released,
            holds => ReleaseOutcome::StillHeld { holds },
        };
        same("release", ctx.answered(guard.release()).await??, wanted)?;
    }
    for waiter in waiting {
        let turn = waiter.done(ctx.answer()).await??;
        ensure(turn > token, "the next incarnation has a greater token")?;
    }
    ctx.left_untouched(&name, ctx.answer()).await
}
