//! `indeterminate`: an unanswered request is repeated with the same hold or cleaned up, never leaked
//! and never counted twice.

use super::{
    gate::{Fate, Step},
    peer::{ONE_LEFT, Peer, fails, frees, held, stays_held},
    task::polled,
};
use crate::{Ctx, Result, case::cases, ensure, same};
use dlock_core::{Effect, ErrorKind, LockName, RetryClass, TimeoutPhase};
use std::{collections::BTreeSet, time::Duration};

cases! {
    [Clause::Indeterminate]
    an_acquire_whose_answer_was_lost_is_one_hold;
    a_wait_whose_answers_are_lost_is_one_hold;
    a_join_whose_answer_was_lost_is_one_hold;
    a_renewal_whose_answer_was_lost_is_a_renewal;
    a_release_whose_answer_was_lost_is_a_release;
    a_release_that_is_never_answered_says_so_and_goes_on;
    an_acquire_that_is_never_answered_leaves_nothing;
    a_wait_that_was_never_answered_leaves_nothing;
    a_grant_that_is_worth_nothing_is_given_back;
    the_ticket_of_a_lost_grant_stays_nowhere;
    too_much_unsettled_refuses_new_acquires_until_it_is_settled needs(Jump);
}

async fn an_acquire_whose_answer_was_lost_is_one_hold(ctx: Ctx) -> Result {
    // After `Never`, nothing is left of the time of `try_acquire`.
    for (fate, tries) in [
        (Fate::ErrorAfter, true),
        (Fate::ErrorAfter, false),
        (Fate::Never, false),
    ] {
        let ([peer], name) = Peer::several(&ctx).await?;
        peer.gate.once(Step::Acquire, fate);
        let lock = peer.kept(&name)?;
        let guard = if tries {
            peer.take(&lock).await?
        } else {
            let acquiring = ctx.within("it is acquired", ctx.kept(), lock.acquire());
            acquiring.await??
        };
        ctx.sees_holds(&name, 1).await?;
        let asked = peer.gate.seen(Step::Acquire, &name);
        let holds: BTreeSet<_> = asked.iter().map(|seen| seen.hold).collect();
        same("the number of hold ids", holds.len(), 1)?;
        ensure(asked.len() > 1, "it was repeated")?;
        stays_held(&ctx, &guard).await?;
        frees(&ctx, guard).await?;
        ctx.sees_free(&name).await?;
        peer.settles(ctx.kept()).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_wait_whose_answers_are_lost_is_one_hold(ctx: Ctx) -> Result {
    let ([_other, peer], name, first) = held(&ctx, Peer::lock).await?;
    peer.gate.always(Step::Acquire, Fate::ErrorAfter);
    let waiting = ctx.spawn(peer.kept(&name)?.acquire());
    peer.sends(Step::Acquire, 3).await?;
    frees(&ctx, first).await?;
    ctx.until_granted(&name).await?;
    peer.gate.clear();
    let guard = waiting.done(ctx.answer()).await??;
    ctx.sees_holds(&name, 1).await?;
    frees(&ctx, guard).await?;
    peer.settles(ctx.answer()).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_join_whose_answer_was_lost_is_one_hold(ctx: Ctx) -> Result {
    let ([_peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    other.gate.once(Step::Acquire, Fate::ErrorAfter);
    other.gate.once(Step::Acquire, Fate::Never);
    let joining = other.kept(&name)?.join(&guard.pass()?);
    let joined = ctx.within("it joins", ctx.kept(), joining).await??;
    ctx.sees_holds(&name, 2).await?;
    same("the first release", guard.release().await?, ONE_LEFT)?;
    frees(&ctx, joined).await?;
    other.settles(ctx.kept()).await?;
    ctx.sees_free(&name).await
}

async fn a_renewal_whose_answer_was_lost_is_a_renewal(ctx: Ctx) -> Result {
    for fate in [Fate::ErrorAfter, Fate::Never] {
        let ([peer], name, guard) = held(&ctx, Peer::kept).await?;
        peer.gate.once(Step::Renew, fate);
        peer.gate.once(Step::Renew, fate);
        ctx.time_passes(ctx.kept() * 2).await;
        stays_held(&ctx, &guard).await?;
        ctx.sees_holds(&name, 1).await?;
        frees(&ctx, guard).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_release_whose_answer_was_lost_is_a_release(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    frees(&ctx, guard).await?;
    ctx.sees_free(&name).await?;
    peer.settles(ctx.answer()).await?;
    // Two holds: the first one is not counted twice.
    let guard = peer.acquire(&name).await?;
    let joined = other.join(&name, &guard.pass()?).await?;
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    guard.release().await?;
    ctx.sees_holds(&name, 1).await?;
    stays_held(&ctx, &joined).await?;
    frees(&ctx, joined).await
}

async fn a_release_that_is_never_answered_says_so_and_goes_on(ctx: Ctx) -> Result {
    for fate in [Fate::Never, Fate::Unsent] {
        let ([peer], name, guard) = held(&ctx, Peer::short).await?;
        peer.gate.always(Step::Release, fate);
        let bound = ctx.short() + Duration::from_secs(1);
        let released = ctx.within("release ends", bound, guard.release()).await?;
        let error = fails(ErrorKind::Indeterminate, released)?;
        same("the effect", error.effect(), Effect::Unknown)?;
        ensure(peer.client.unsettled() > 0, "it goes on being released")?;
        peer.gate.clear();
        // A request that hangs is repeated within the time that one request may take.
        peer.settles(Duration::from_secs(6)).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn an_acquire_that_is_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    for fate in NO_ANSWER {
        let (peer, name) = unanswered(&ctx, fate).await?;
        let trying = peer.short(&name)?.try_acquire();
        let error = match ctx.within("it ends", ctx.short() / 2, trying).await? {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            other => fails(TIMEOUT, other)?,
        };
        same("the retry class", error.retry(), RetryClass::Later)?;
        let effect = match fate {
            Fate::ErrorBefore => Effect::None,
            _ => Effect::Unknown,
        };
        same(format!("the effect after {fate:?}"), error.effect(), effect)?;
        peer.gate.clear();
        peer.settles(ctx.short()).await?;
        ctx.sees_free(&name).await?;
        let next = peer.acquire(&name).await?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn a_wait_that_was_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    for fate in NO_ANSWER {
        let (peer, name) = unanswered(&ctx, fate).await?;
        let waiting = peer.short(&name)?.acquire_timeout(ctx.short());
        fails(TIMEOUT, waiting.await)?;
        peer.gate.clear();
        peer.settles(ctx.short()).await?;
        ctx.left_untouched(&name, ctx.answer()).await?;
    }
    Ok(())
}

/// Each grant comes when its lease is almost over.
async fn a_grant_that_is_worth_nothing_is_given_back(ctx: Ctx) -> Result {
    let ([peer], name) = Peer::several(&ctx).await?;
    peer.gate.set_worthless(true);
    let lock = peer.short(&name)?;
    fails(TIMEOUT, lock.acquire_timeout(ctx.short()).await)?;
    // Until the cleanup has released its last grant, a try is refused.
    peer.settles(ctx.short()).await?;
    fails(TIMEOUT, lock.try_acquire().await)?;
    let calls = peer.gate.calls(Step::Acquire);
    let most = usize::try_from(ctx.short().as_millis() / 10)?;
    ensure(
        calls <= most,
        format!("{calls} attempts, {most} are enough"),
    )?;
    peer.gate.set_worthless(false);
    peer.settles(ctx.short()).await?;
    ctx.left_untouched(&name, ctx.answer()).await?;
    let guard = peer.take(&lock).await?;
    frees(&ctx, guard).await
}

/// The store queued the next waiter's ticket when it granted the first; then that waiter stopped
/// waiting.
async fn the_ticket_of_a_lost_grant_stays_nowhere(ctx: Ctx) -> Result {
    let ([peer], name, held) = held(&ctx, Peer::lock).await?;
    // Answered, not only sent: a first acquire that is sent while the lock is being released is granted
    // without a next one.
    let first = peer.waits(peer.lock(&name)?).await?;
    // It queues behind the first and sends no request to the store.
    let second = ctx.begin(peer.lock(&name)?.acquire()).await;
    peer.gate.always(Step::Acquire, Fate::ErrorAfter);
    frees(&ctx, held).await?;
    ctx.until_granted(&name).await?;
    drop(second);
    // The requests of its end meet the same fate.
    ctx.time_passes(Duration::from_millis(1)).await;
    peer.gate.clear();
    let guard = first.done(ctx.answer()).await??;
    peer.settles(ctx.answer()).await?;
    ctx.sees_waiters(&name, 0).await?;
    frees(&ctx, guard).await
}

async fn too_much_unsettled_refuses_new_acquires_until_it_is_settled(ctx: Ctx) -> Result {
    let ([peer], name) = Peer::several(&ctx).await?;
    peer.gate.all(Fate::Unsent);
    let lock = peer.lock(&name)?;
    for _ in 0..CAPACITY {
        drop(polled(lock.try_acquire(), 2).await);
    }
    let error = fails(ErrorKind::Overloaded, lock.try_acquire().await)?;
    same("the retry class", error.retry(), RetryClass::Later)?;
    fails(ErrorKind::Overloaded, lock.acquire().await)?;
    peer.gate.clear();
    peer.settles(Duration::from_secs(30)).await?;
    for name in [ctx.name()?, name] {
        let guard = peer.acquire(&name).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

/// A client whose acquires meet this fate, and a name.
async fn unanswered(ctx: &Ctx, fate: Fate) -> Result<(Peer, LockName)> {
    let ([peer], name) = Peer::several(ctx).await?;
    peer.gate.always(Step::Acquire, fate);
    Ok((peer, name))
}

const NO_ANSWER: [Fate; 4] = [
    Fate::Never,
    Fate::Unsent,
    Fate::ErrorAfter,
    Fate::ErrorBefore,
];
const TIMEOUT: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Request,
};
/// How many acquisitions may await cleanup.
const CAPACITY: usize = 10_000;
