//! `indeterminate`: an unanswered request is repeated with the same hold or cleaned up, never leaked
//! and never counted twice.

use super::{
    gate::{Fate, Step},
    peer::{ONE_LEFT, Peer, fails, frees, held, left_untouched, stays_held},
    task::{Task, polled},
};
use crate::{Caller, Ctx, Result, case::cases, ensure, same};
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
    let observer = ctx.caller().await?;
    for fate in [Fate::ErrorAfter, Fate::Never] {
        for tries in [true, false] {
            if tries && fate == Fate::Never {
                continue; // nothing is left of its time then
            }
            let peer = Peer::new(&ctx).await?;
            let name = ctx.name()?;
            peer.gate.once(Step::Acquire, fate);
            let lock = peer.kept(&name)?;
            let guard = if tries {
                peer.take(&lock).await?
            } else {
                let acquiring = ctx.within("it is acquired", ctx.kept(), lock.acquire());
                acquiring.await??
            };
            observer.sees_holds(&name, 1).await?;
            let asked = peer.gate.seen(Step::Acquire, &name);
            let holds: BTreeSet<_> = asked.iter().map(|seen| seen.hold).collect();
            same("the number of hold ids", holds.len(), 1)?;
            ensure(asked.len() > 1, "it was repeated")?;
            stays_held(&ctx, "its state", &guard).await?;
            frees(&ctx, guard).await?;
            observer.sees_free(&name).await?;
            peer.settles(ctx.kept()).await?;
            observer.sees_free(&name).await?;
        }
    }
    Ok(())
}

async fn a_wait_whose_answers_are_lost_is_one_hold(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let ([_other, peer], name, first) = held(&ctx, Peer::lock).await?;
    peer.gate.always(Step::Acquire, Fate::ErrorAfter);
    let waiting = Task::spawn(peer.kept(&name)?.acquire());
    ctx.until("it asks again", ctx.answer(), || {
        peer.gate.calls(Step::Acquire) > 2
    })
    .await?;
    frees(&ctx, first).await?;
    granted(&ctx, &observer, &name).await?;
    peer.gate.clear();
    let guard = waiting.done(&ctx, "it is acquired", ctx.answer()).await??;
    observer.sees_holds(&name, 1).await?;
    frees(&ctx, guard).await?;
    peer.settles(ctx.answer()).await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await
}

async fn a_join_whose_answer_was_lost_is_one_hold(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let ([_peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    other.gate.once(Step::Acquire, Fate::ErrorAfter);
    other.gate.once(Step::Acquire, Fate::Never);
    let lock = other.kept(&name)?;
    let joining = ctx.within("it joins", ctx.kept(), lock.join(&guard.pass()?));
    let joined = joining.await??;
    observer.sees_holds(&name, 2).await?;
    let outcome = guard.release().await?;
    same("the first release", outcome, ONE_LEFT)?;
    frees(&ctx, joined).await?;
    other.settles(ctx.kept()).await?;
    observer.sees_free(&name).await
}

async fn a_renewal_whose_answer_was_lost_is_a_renewal(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    for fate in [Fate::ErrorAfter, Fate::Never] {
        let ([peer], name, guard) = held(&ctx, Peer::kept).await?;
        peer.gate.once(Step::Renew, fate);
        peer.gate.once(Step::Renew, fate);
        ctx.time_passes(ctx.kept() * 2).await;
        stays_held(&ctx, "its state", &guard).await?;
        observer.sees_holds(&name, 1).await?;
        frees(&ctx, guard).await?;
        observer.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_release_whose_answer_was_lost_is_a_release(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    frees(&ctx, guard).await?;
    observer.sees_free(&name).await?;
    peer.settles(ctx.answer()).await?;
    // Two holds: the first one is not counted twice.
    let guard = peer.take(&peer.lock(&name)?).await?;
    let joined = other.join(other.lock(&name)?, &guard.pass()?).await?;
    peer.gate.once(Step::Release, Fate::ErrorAfter);
    guard.release().await?;
    observer.sees_holds(&name, 1).await?;
    stays_held(&ctx, "the other's state", &joined).await?;
    frees(&ctx, joined).await
}

async fn a_release_that_is_never_answered_says_so_and_goes_on(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    for fate in [Fate::Never, Fate::Unsent] {
        let ([peer], name, guard) = held(&ctx, Peer::short).await?;
        peer.gate.always(Step::Release, fate);
        let bound = ctx.short() + Duration::from_secs(1);
        let releasing = ctx.within("release comes to an end", bound, guard.release());
        let error = fails("release", releasing.await?, ErrorKind::Indeterminate)?;
        same("the effect", error.effect(), Effect::Unknown)?;
        ensure(peer.client.unsettled() > 0, "it goes on being released")?;
        peer.gate.clear();
        // A request that hangs is repeated within the time that one request may take.
        peer.settles(Duration::from_secs(6)).await?;
        observer.sees_free(&name).await?;
    }
    Ok(())
}

async fn an_acquire_that_is_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    for fate in NO_ANSWER {
        let (peer, name) = unanswered(&ctx, fate).await?;
        let lock = peer.short(&name)?;
        let trying = ctx.within("it comes to an end", ctx.short() / 2, lock.try_acquire());
        let error = match trying.await? {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            other => fails("try_acquire", other, TIMEOUT)?,
        };
        same("the retry class", error.retry(), RetryClass::Later)?;
        let wanted = if fate == Fate::ErrorBefore {
            Effect::None
        } else {
            Effect::Unknown
        };
        same(format!("the effect after {fate:?}"), error.effect(), wanted)?;
        peer.gate.clear();
        peer.settles(ctx.short()).await?;
        observer.sees_free(&name).await?;
        let next = peer.take(&peer.lock(&name)?).await?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn a_wait_that_was_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    for fate in NO_ANSWER {
        let (peer, name) = unanswered(&ctx, fate).await?;
        let waiting = peer.short(&name)?.acquire_timeout(ctx.short());
        fails("the wait", waiting.await, TIMEOUT)?;
        peer.gate.clear();
        peer.settles(ctx.short()).await?;
        left_untouched(&ctx, &observer, &name, ctx.answer()).await?;
    }
    Ok(())
}

/// Each grant comes when its lease is almost over.
async fn a_grant_that_is_worth_nothing_is_given_back(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.set_worthless(true);
    let lock = peer.short(&name)?;
    let before = peer.gate.calls(Step::Acquire);
    let waiting = lock.acquire_timeout(ctx.short());
    fails("the wait", waiting.await, TIMEOUT)?;
    // Until the cleanup has released its last grant, a try is refused.
    peer.settles(ctx.short()).await?;
    fails("try_acquire", lock.try_acquire().await, TIMEOUT)?;
    let calls = peer.gate.calls(Step::Acquire) - before;
    let most = usize::try_from(ctx.short().as_millis() / 10)?;
    ensure(
        calls <= most,
        format!("{calls} attempts in {:?}", ctx.short() * 4 / 3),
    )?;
    peer.gate.set_worthless(false);
    peer.settles(ctx.short()).await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await?;
    let guard = peer.take(&lock).await?;
    frees(&ctx, guard).await
}

/// The store queued the next waiter's ticket when it granted the first; then that waiter stopped
/// waiting.
async fn the_ticket_of_a_lost_grant_stays_nowhere(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let ([peer], name, held) = held(&ctx, Peer::lock).await?;
    let first = Task::spawn(peer.lock(&name)?.acquire());
    // Answered, not only sent: a first acquire that is sent while the lock is being released is granted
    // without a next one.
    peer.stands(1).await?;
    // It queues behind the first and sends no request to the store.
    let second = Task::begun(peer.lock(&name)?.acquire()).await;
    peer.gate.always(Step::Acquire, Fate::ErrorAfter);
    frees(&ctx, held).await?;
    granted(&ctx, &observer, &name).await?;
    drop(second);
    // The requests of its end meet the same fate.
    ctx.time_passes(Duration::from_millis(1)).await;
    peer.gate.clear();
    let guard = first
        .done(&ctx, "the first gets it", ctx.answer())
        .await??;
    peer.settles(ctx.answer()).await?;
    let waiting = observer.inspect(&name).await?.waiters;
    same("the number of queued waiters", waiting.unwrap_or(0), 0)?;
    frees(&ctx, guard).await
}

async fn too_much_unsettled_refuses_new_acquires_until_it_is_settled(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.all(Fate::Unsent);
    let lock = peer.lock(&name)?;
    let held = ctx.name()?;
    for _ in 0..CAPACITY {
        drop(polled(lock.try_acquire(), 2).await);
    }
    let error = fails("one more", lock.try_acquire().await, ErrorKind::Overloaded)?;
    same("the retry class", error.retry(), RetryClass::Later)?;
    fails("a wait", lock.acquire().await, ErrorKind::Overloaded)?;
    peer.gate.clear();
    peer.settles(Duration::from_secs(30)).await?;
    let guard = peer.take(&peer.lock(&held)?).await?;
    frees(&ctx, guard).await?;
    let guard = peer.take(&lock).await?;
    frees(&ctx, guard).await
}

/// A client whose acquires meet this fate, and a name.
async fn unanswered(ctx: &Ctx, fate: Fate) -> Result<(Peer, LockName)> {
    let peer = Peer::new(ctx).await?;
    peer.gate.always(Step::Acquire, fate);
    Ok((peer, ctx.name()?))
}

/// Waits until the store shows a hold.
async fn granted(ctx: &Ctx, observer: &Caller, name: &LockName) -> Result {
    let taken = || async { Ok(observer.inspect(name).await?.holds > 0) };
    ctx.eventually("the store has it", ctx.answer(), taken)
        .await
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
