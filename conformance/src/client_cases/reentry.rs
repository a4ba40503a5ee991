//! `reentry`: ownership is a value, and a task that has it enters past every queue.

use super::{
    gate::Step,
    peer::{NOT_HELD, ONE_LEFT, Peer, frees, held, left_untouched, stays_held},
    task::{Task, permutations},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{ErrorKind, FencingToken, Guard, LockName, LossReason, Pass, ReleaseOutcome};
use std::time::Duration;

cases! {
    [Clause::Reentry]
    a_pass_enters_from_this_client_and_another_past_those_who_wait;
    an_owner_enters_from_this_client_and_another_past_those_who_wait;
    a_scope_enters_its_own_incarnation_and_nothing_else;
    a_task_spawned_in_a_scope_is_outside;
    joined_holds_go_in_every_order_while_others_wait;
    a_pass_of_what_is_over_is_gone_and_takes_nothing;
    a_pass_of_an_earlier_incarnation_harms_no_later_one;
    a_pass_of_another_name_or_store_is_misuse;
    a_dead_co_owner_leaves_no_ghost;
    an_owner_whose_lock_is_gone_is_told_when_it_enters_again;
    an_owner_that_waits_enters_when_its_own_hold_appears;
    an_owner_that_waits_enters_when_it_is_inside_elsewhere;
}

async fn a_pass_enters_from_this_client_and_another_past_those_who_wait(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    let waiting = [
        wait(&ctx, &peer, &name).await?,
        wait(&ctx, &other, &name).await?,
    ];
    let pass = guard.pass()?;
    let mut inside = vec![guard];
    for entrant in [&peer, &other, &peer] {
        let joined = entrant.join(entrant.lock(&name)?, &pass).await?;
        same("the token of who joined", joined.token(), pass.token())?;
        inside.push(joined);
    }
    end_one_after_the_other(&ctx, inside, waiting).await
}

async fn an_owner_enters_from_this_client_and_another_past_those_who_wait(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let guard = peer.take(&peer.lock(&name)?.with_owner(&owner)).await?;
    let waiting = [
        wait(&ctx, &peer, &name).await?,
        wait(&ctx, &other, &name).await?,
    ];
    let mut inside = vec![guard];
    for entrant in [&peer, &other] {
        let lock = entrant.lock(&name)?.with_owner(&owner);
        let entering = ctx.within("the owner enters", ctx.answer(), lock.acquire());
        let entered = entering.await??;
        same(
            "the token of who entered",
            entered.token(),
            inside[0].token(),
        )?;
        let tried = ctx.within("the owner tries", ctx.answer(), lock.try_acquire());
        inside.push(entered);
        inside.extend(tried.await??);
    }
    same("how many are inside", inside.len(), 5)?;
    end_one_after_the_other(&ctx, inside, waiting).await
}

async fn a_scope_enters_its_own_incarnation_and_nothing_else(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let (name, second) = (ctx.name()?, ctx.name()?);
    let guard = peer.take(&peer.lock(&name)?).await?;
    let elsewhere = peer.take(&peer.lock(&second)?).await?;
    let inside = guard.scope(async {
        for entrant in [&peer, &other] {
            let again = entrant.take(&entrant.lock(&name)?).await?;
            same("the token inside", again.token(), guard.token())?;
            let nested = again.scope(async { entrant.take(&entrant.lock(&name)?).await });
            same(
                "the token inside twice",
                nested.await?.token(),
                guard.token(),
            )?;
            // Not the scope's name: a fresh owner, other than the holder.
            entrant.refused(&entrant.lock(&second)?).await?;
            let third = ctx.name()?;
            let fresh = entrant.take(&entrant.lock(&third)?).await?;
            let is_scopes = fresh.owner() == guard.owner();
            same("another name has the scope's owner", is_scopes, false)?;
        }
        Ok::<_, Failure>(())
    });
    inside.await?;
    peer.refused(&peer.lock(&name)?).await?;
    drop(elsewhere);
    peer.settles(ctx.answer()).await?;
    other.settles(ctx.answer()).await?;
    frees(&ctx, guard).await
}

async fn a_task_spawned_in_a_scope_is_outside(ctx: Ctx) -> Result {
    let ([peer], name, guard) = held(&ctx, Peer::lock).await?;
    let lock = peer.lock(&name)?;
    let spawned = guard.scope(async { Task::spawn(async move { lock.try_acquire().await }) });
    let entered = spawned.await.done(&ctx, "it is answered", ctx.answer());
    let inside = matches!(entered.await?, Ok(Some(_)));
    same("a spawned task is inside", inside, false)
}

async fn joined_holds_go_in_every_order_while_others_wait(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    for order in permutations(3) {
        let name = ctx.name()?;
        let first = peer.take(&peer.lock(&name)?).await?;
        let pass = first.pass()?;
        let second = peer.join(peer.lock(&name)?, &pass).await?;
        let third = other.join(other.lock(&name)?, &pass).await?;
        let waiting = [
            wait(&ctx, &peer, &name).await?,
            wait(&ctx, &other, &name).await?,
        ];
        let mut inside = [Some(first), Some(second), Some(third)];
        let guards = order
            .into_iter()
            .filter_map(|at| inside[at].take())
            .collect();
        end_one_after_the_other(&ctx, guards, waiting).await?;
    }
    Ok(())
}

async fn a_pass_of_what_is_over_is_gone_and_takes_nothing(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let pass = guard.pass()?;
    frees(&ctx, guard).await?;
    for late in [&peer, &other] {
        let lock = late.lock(&name)?;
        late.cannot_join(lock, &pass, ErrorKind::Gone).await?;
        observer.sees_free(&name).await?;
    }
    let next = other.take(&other.lock(&name)?).await?;
    for late in [&peer, &other] {
        let lock = late.lock(&name)?;
        late.cannot_join(lock, &pass, ErrorKind::Gone).await?;
    }
    stays_held(&ctx, "the next one's state", &next).await?;
    frees(&ctx, next).await
}

async fn a_pass_of_an_earlier_incarnation_harms_no_later_one(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let lock = peer.lock(&name)?.with_owner(&owner);
    let first = peer.take(&lock).await?;
    let store = peer.client.capabilities().store.as_str();
    let pass = Pass::new(store, name.clone(), owner, first.token());
    frees(&ctx, first).await?;
    let second = peer.take(&lock).await?;
    let again = peer.lock(&name)?;
    peer.cannot_join(again, &pass, ErrorKind::Gone).await?;
    stays_held(&ctx, "the state of its present lock", &second).await?;
    frees(&ctx, second).await
}

async fn a_pass_of_another_name_or_store_is_misuse(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let (name, other) = (ctx.name()?, ctx.name()?);
    let guard = peer.take(&peer.lock(&name)?).await?;
    let pass = guard.pass()?;
    let foreign = Pass::new("elsewhere", name.clone(), *pass.owner(), pass.token());
    let calls = peer.gate.all_calls();
    for (name, pass) in [(&other, &pass), (&name, &foreign)] {
        let lock = peer.lock(name)?;
        peer.cannot_join(lock, pass, ErrorKind::Misuse).await?;
    }
    same("the number of calls made", peer.gate.all_calls(), calls)?;
    frees(&ctx, guard).await
}

async fn a_dead_co_owner_leaves_no_ghost(ctx: Ctx) -> Result {
    let ([_peer, dead], name, guard) = held(&ctx, Peer::lock).await?;
    let before = ctx.now();
    let ghost = dead.join(dead.short(&name)?, &guard.pass()?).await?;
    dead.gate.kill().await;
    let over = ghost.lost().await;
    same("what the dead one would say", over, LossReason::Deadline)?;
    ctx.sleep_until(before + ctx.short() + ctx.slack()).await;
    // Its hold is past its end, so the other's release is the last.
    frees(&ctx, guard).await?;
    let [peer, dead] = Peer::several(&ctx).await?;
    let guard = peer.take(&peer.lock(&name)?).await?;
    let ghost = dead.join(dead.short(&name)?, &guard.pass()?).await?;
    dead.gate.kill().await;
    let outcome = guard.release().await?;
    same("a release beside a living hold", outcome, ONE_LEFT)?;
    let next = peer.gets(&name, ctx.short() * 2 + ctx.slack()).await?;
    drop(ghost);
    frees(&ctx, next).await
}

async fn an_owner_whose_lock_is_gone_is_told_when_it_enters_again(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let lock = peer.lock(&name)?.with_owner(&owner);
    let first = peer.take(&lock).await?;
    other
        .client
        .admin()
        .break_lock(name.as_str(), Some(first.token()))
        .await?;
    // It believes that it is inside. The store answers that this incarnation is over, and grants a new
    // one.
    let again = ctx.within("acquire is answered", ctx.answer(), lock.acquire());
    let second = again.await??;
    ensure(
        second.token() > first.token(),
        "a new incarnation has a greater token",
    )?;
    same("its state", first.state(), NOT_HELD)?;
    drop(first);
    peer.settles(ctx.answer()).await?;
    stays_held(&ctx, "the state of the second", &second).await?;
    frees(&ctx, second).await
}

async fn an_owner_that_waits_enters_when_its_own_hold_appears(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let foreign = peer.take(&peer.lock(&name)?).await?;
    let owned = other.lock(&name)?.with_owner(&owner);
    let mut tasks = Vec::new();
    // Both wait in one queue; the one served second has the same owner as the first.
    for _ in 0..2 {
        tasks.push(Task::begun(owned.acquire()).await);
    }
    other.stands(0).await?;
    frees(&ctx, foreign).await?;
    let [first, second] = [tasks.remove(0), tasks.remove(0)];
    let first = first.done(&ctx, "the first enters", ctx.answer()).await??;
    let second = second
        .done(&ctx, "the second enters", ctx.answer())
        .await??;
    same("the token of the second", second.token(), first.token())?;
    let outcome = first.release().await?;
    same("the first release", outcome, ONE_LEFT)?;
    frees(&ctx, second).await
}

/// It waits behind another owner of its own client, which is not granted the lock.
async fn an_owner_that_waits_enters_when_it_is_inside_elsewhere(ctx: Ctx) -> Result {
    let ([_holder, peer, other], name, held) = held(&ctx, Peer::lock).await?;
    let owner = other.client.owner();
    let elsewhere = Task::spawn(other.lock(&name)?.with_owner(&owner).acquire());
    let stands = || async {
        let asked = other.gate.seen(Step::Acquire, &name);
        Ok(asked.iter().any(|seen| seen.line.is_some()) && other.gate.is_idle(Step::Acquire))
    };
    ctx.eventually("it waits elsewhere", ctx.answer(), stands)
        .await?;
    let stranger = wait(&ctx, &peer, &name).await?;
    let asked = peer.gate.calls(Step::Acquire);
    let here = Task::spawn(peer.kept(&name)?.with_owner(&owner).acquire());
    let refused =
        || async { Ok(peer.gate.calls(Step::Acquire) > asked && peer.gate.is_idle(Step::Acquire)) };
    ctx.eventually("it asks past the queue in vain", ctx.answer(), refused)
        .await?;
    // The other owner requests nothing while the lock changes hands.
    peer.gate.bar();
    frees(&ctx, held).await?;
    let inside = elsewhere
        .done(&ctx, "it gets in elsewhere", ctx.answer())
        .await??;
    peer.gate.clear();
    let again = here
        .done(&ctx, "it enters here, too", ctx.kept() / 3)
        .await??;
    same("the token", again.token(), inside.token())?;
    end_one_after_the_other(&ctx, vec![inside, again], [stranger]).await
}

type Waiting = Task<Result<FencingToken, dlock_core::Error>>;

/// A waiter of another owner that certainly has been refused once.
async fn wait(ctx: &Ctx, peer: &Peer, name: &LockName) -> Result<Waiting> {
    let asked = peer.gate.calls(Step::Acquire);
    let lock = peer.lock(name)?;
    let waiting = Task::spawn(async move {
        let guard = lock.acquire().await?;
        let token = guard.token();
        guard.release().await.map(|_| token)
    });
    ctx.until("the waiter asks the store", ctx.answer(), || {
        peer.gate.calls(Step::Acquire) > asked
    })
    .await?;
    Ok(waiting)
}

/// The holds are released one after the other; the waiter is granted after the last, not before.
async fn end_one_after_the_other<const N: usize>(
    ctx: &Ctx,
    inside: Vec<Guard>,
    waiting: [Waiting; N],
) -> Result {
    let (name, token) = match inside.first() {
        Some(guard) => (guard.name().clone(), guard.token()),
        None => return Err(Failure::new("BUG: the lock has no holder")),
    };
    let mut left = inside.len();
    for guard in inside {
        ctx.would_show_within(Duration::from_millis(5)).await;
        let in_early = waiting.iter().any(Task::is_done);
        same("a waiter was inside beside the owner", in_early, false)?;
        left -= 1;
        let outcome = ctx.within("release is answered", ctx.answer(), guard.release());
        let wanted = match u32::try_from(left)? {
            0 => ReleaseOutcome::Released,
            holds => ReleaseOutcome::StillHeld { holds },
        };
        same("release", outcome.await??, wanted)?;
    }
    for waiter in waiting {
        let turn = waiter
            .done(ctx, "a waiter has its turn", ctx.answer())
            .await;
        ensure(turn?? > token, "the next incarnation has a greater token")?;
    }
    let observer = ctx.caller().await?;
    left_untouched(ctx, &observer, &name, ctx.answer()).await
}
