//! `indeterminate`: an unanswered request is repeated with the same hold or cleaned up, never leaked
//! and never counted twice.

use super::{
    gated_driver::{CallOutcome, Step},
    task::polled,
    test_client::{ONE_LEFT, TestClient, fails, frees, held, stays_held},
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
    too_many_pending_cleanups_refuse_new_acquires_until_they_end needs(Jump);
}

async fn an_acquire_whose_answer_was_lost_is_one_hold(ctx: Ctx) -> Result {
    // After `Never`, nothing is left of the time of `try_acquire`.
    for (outcome, tries) in [
        (CallOutcome::ErrorAfter, true),
        (CallOutcome::ErrorAfter, false),
        (CallOutcome::Never, false),
    ] {
        let ([client], name) = TestClient::several(&ctx).await?;
        client.gate.once(Step::Acquire, outcome);
        let lock = client.kept(&name)?;
        let guard = if tries {
            client.take(&lock).await?
        } else {
            let acquiring = ctx.within("it is acquired", ctx.kept(), lock.acquire());
            acquiring.await??
        };
        ctx.sees_holds(&name, 1).await?;
        let asked = client.gate.seen(Step::Acquire, &name);
        let holds: BTreeSet<_> = asked.iter().map(|seen| seen.hold).collect();
        same("the number of hold ids", holds.len(), 1)?;
        ensure(asked.len() > 1, "it was repeated")?;
        stays_held(&ctx, &guard).await?;
        frees(&ctx, guard).await?;
        ctx.sees_free(&name).await?;
        client.cleans_up(ctx.kept()).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_wait_whose_answers_are_lost_is_one_hold(ctx: Ctx) -> Result {
    let ([_other, client], name, first) = held(&ctx, TestClient::lock).await?;
    client.gate.always(Step::Acquire, CallOutcome::ErrorAfter);
    let waiting = ctx.spawn(client.kept(&name)?.acquire());
    client.sends(Step::Acquire, 3).await?;
    frees(&ctx, first).await?;
    ctx.until_granted(&name).await?;
    client.gate.clear();
    let guard = waiting.done(ctx.answer()).await??;
    ctx.sees_holds(&name, 1).await?;
    frees(&ctx, guard).await?;
    client.cleans_up(ctx.answer()).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_join_whose_answer_was_lost_is_one_hold(ctx: Ctx) -> Result {
    let ([_client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    other.gate.once(Step::Acquire, CallOutcome::ErrorAfter);
    other.gate.once(Step::Acquire, CallOutcome::Never);
    let joining = other.kept(&name)?.join(&guard.pass()?);
    let joined = ctx.within("it joins", ctx.kept(), joining).await??;
    ctx.sees_holds(&name, 2).await?;
    same("the first release", guard.release().await?, ONE_LEFT)?;
    frees(&ctx, joined).await?;
    other.cleans_up(ctx.kept()).await?;
    ctx.sees_free(&name).await
}

async fn a_renewal_whose_answer_was_lost_is_a_renewal(ctx: Ctx) -> Result {
    for outcome in [CallOutcome::ErrorAfter, CallOutcome::Never] {
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        client.gate.once(Step::Renew, outcome);
        client.gate.once(Step::Renew, outcome);
        ctx.time_passes(ctx.kept() * 2).await;
        stays_held(&ctx, &guard).await?;
        ctx.sees_holds(&name, 1).await?;
        frees(&ctx, guard).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn a_release_whose_answer_was_lost_is_a_release(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    client.gate.once(Step::Release, CallOutcome::ErrorAfter);
    client.gate.once(Step::Release, CallOutcome::ErrorAfter);
    frees(&ctx, guard).await?;
    ctx.sees_free(&name).await?;
    client.cleans_up(ctx.answer()).await?;
    // Two holds: the first one is not counted twice.
    let guard = client.acquire(&name).await?;
    let joined = other.join(&name, &guard.pass()?).await?;
    client.gate.once(Step::Release, CallOutcome::ErrorAfter);
    guard.release().await?;
    ctx.sees_holds(&name, 1).await?;
    stays_held(&ctx, &joined).await?;
    frees(&ctx, joined).await
}

async fn a_release_that_is_never_answered_says_so_and_goes_on(ctx: Ctx) -> Result {
    for outcome in [CallOutcome::Never, CallOutcome::Unsent] {
        let ([client], name, guard) = held(&ctx, TestClient::short).await?;
        client.gate.always(Step::Release, outcome);
        let bound = ctx.short() + Duration::from_secs(1);
        let released = ctx.within("release ends", bound, guard.release()).await?;
        let error = fails(ErrorKind::Indeterminate, released)?;
        same("the effect", error.effect(), Effect::Unknown)?;
        ensure(
            client.inner.pending_cleanups() > 0,
            "it goes on being released",
        )?;
        client.gate.clear();
        // A request that hangs is repeated within the time that one request may take.
        client.cleans_up(Duration::from_secs(6)).await?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

async fn an_acquire_that_is_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    for outcome in NO_ANSWER {
        let (client, name) = unanswered(&ctx, outcome).await?;
        let trying = client.short(&name)?.try_acquire();
        let error = match ctx.within("it ends", ctx.short() / 2, trying).await? {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            other => fails(TIMEOUT, other)?,
        };
        same("the retry class", error.retry(), RetryClass::Later)?;
        let effect = match outcome {
            CallOutcome::ErrorBefore => Effect::None,
            _ => Effect::Unknown,
        };
        same(
            format!("the effect after {outcome:?}"),
            error.effect(),
            effect,
        )?;
        client.gate.clear();
        client.cleans_up(ctx.short()).await?;
        ctx.sees_free(&name).await?;
        let next = client.acquire(&name).await?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn a_wait_that_was_never_answered_leaves_nothing(ctx: Ctx) -> Result {
    for outcome in NO_ANSWER {
        let (client, name) = unanswered(&ctx, outcome).await?;
        let waiting = client.short(&name)?.acquire_timeout(ctx.short());
        fails(TIMEOUT, waiting.await)?;
        client.gate.clear();
        client.cleans_up(ctx.short()).await?;
        ctx.left_untouched(&name, ctx.answer()).await?;
    }
    Ok(())
}

/// Each grant comes when its lease is almost over.
async fn a_grant_that_is_worth_nothing_is_given_back(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client.gate.set_worthless(true);
    let lock = client.short(&name)?;
    fails(TIMEOUT, lock.acquire_timeout(ctx.short()).await)?;
    // Until the cleanup has released its last grant, a try is refused.
    client.cleans_up(ctx.short()).await?;
    fails(TIMEOUT, lock.try_acquire().await)?;
    let calls = client.gate.calls(Step::Acquire);
    let most = usize::try_from(ctx.short().as_millis() / 10)?;
    ensure(
        calls <= most,
        format!("{calls} attempts, {most} are enough"),
    )?;
    client.gate.set_worthless(false);
    client.cleans_up(ctx.short()).await?;
    ctx.left_untouched(&name, ctx.answer()).await?;
    let guard = client.take(&lock).await?;
    frees(&ctx, guard).await
}

/// The store queued the next waiter's ticket when it granted the first; then that waiter stopped
/// waiting.
async fn the_ticket_of_a_lost_grant_stays_nowhere(ctx: Ctx) -> Result {
    let ([client], name, held) = held(&ctx, TestClient::lock).await?;
    // Answered, not only sent: a first acquire that is sent while the lock is being released is granted
    // without a next one.
    let first = client.waits(client.lock(&name)?).await?;
    // It queues behind the first and sends no request to the store.
    let second = ctx.begin(client.lock(&name)?.acquire()).await;
    client.gate.always(Step::Acquire, CallOutcome::ErrorAfter);
    frees(&ctx, held).await?;
    ctx.until_granted(&name).await?;
    drop(second);
    // The requests of its end meet the same outcome.
    ctx.time_passes(Duration::from_millis(1)).await;
    client.gate.clear();
    let guard = first.done(ctx.answer()).await??;
    client.cleans_up(ctx.answer()).await?;
    ctx.sees_waiters(&name, 0).await?;
    frees(&ctx, guard).await
}

async fn too_many_pending_cleanups_refuse_new_acquires_until_they_end(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client.gate.all(CallOutcome::Unsent);
    let lock = client.lock(&name)?;
    for _ in 0..CAPACITY {
        drop(polled(lock.try_acquire(), 2).await);
    }
    let error = fails(ErrorKind::Overloaded, lock.try_acquire().await)?;
    same("the retry class", error.retry(), RetryClass::Later)?;
    fails(ErrorKind::Overloaded, lock.acquire().await)?;
    client.gate.clear();
    client.cleans_up(Duration::from_secs(30)).await?;
    for name in [ctx.name()?, name] {
        let guard = client.acquire(&name).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

/// A client whose acquires meet this outcome, and a name.
async fn unanswered(ctx: &Ctx, outcome: CallOutcome) -> Result<(TestClient, LockName)> {
    let ([client], name) = TestClient::several(ctx).await?;
    client.gate.always(Step::Acquire, outcome);
    Ok((client, name))
}

const NO_ANSWER: [CallOutcome; 4] = [
    CallOutcome::Never,
    CallOutcome::Unsent,
    CallOutcome::ErrorAfter,
    CallOutcome::ErrorBefore,
];
const TIMEOUT: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Request,
};
/// How many acquisitions may await cleanup.
const CAPACITY: usize = 10_000;
