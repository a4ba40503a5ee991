//! `error`: contention is a value, an error says what it may have done, and no output shows a secret.

use super::{
    gated_driver::{CallOutcome, Step},
    test_client::{TestClient, fails, frees, held},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Effect, Error, ErrorKind, Lease, MAX_LEASE, MIN_LEASE, Owner, Pass, RetryClass};
use std::{error::Error as _, time::Duration};

cases! {
    [Clause::Error]
    contention_is_a_value;
    a_store_that_is_away_is_an_error_with_its_class_and_its_place;
    a_wait_outlasts_a_store_that_is_away_for_a_while;
    a_store_that_stays_away_is_told_to_all_who_wait_at_once needs(Jump);
    what_can_never_work_is_misuse_and_sends_no_request;
    nothing_shows_an_owner;
}

async fn contention_is_a_value(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    for contender in [&client, &other] {
        let tried = contender.lock(&name)?.try_acquire().await?;
        same("a held lock is granted", tried.is_some(), false)?;
    }
    frees(&ctx, guard).await
}

async fn a_store_that_is_away_is_an_error_with_its_class_and_its_place(ctx: Ctx) -> Result {
    let ([client], name, before) = held(&ctx, TestClient::lock).await?;
    frees(&ctx, before).await?;
    client.gate.all(CallOutcome::ErrorBefore);
    let error = refused(client.short(&name)?.try_acquire().await)?;
    same("the retry class", error.retry(), RetryClass::Later)?;
    same("the effect", error.effect(), Effect::None)?;
    same("the name", error.name(), Some(&name))?;
    let backend = client.inner.capabilities().backend;
    same("the backend", error.backend(), backend)?;
    ensure(error.source().is_some(), format!("no source in {error:?}"))
}

async fn a_wait_outlasts_a_store_that_is_away_for_a_while(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client.gate.all(CallOutcome::ErrorBefore);
    let waiting = ctx.spawn(client.lock(&name)?.acquire());
    let span = Duration::from_secs(2);
    ctx.time_passes(span).await;
    same("the wait is over", waiting.is_done(), false)?;
    let asked = client.gate.calls(Step::Acquire);
    ensure(asked <= 20, format!("{asked} attempts in {span:?}"))?;
    client.gate.clear();
    // The longest pause between two attempts.
    waiting.served(Duration::from_secs(1)).await
}

async fn a_store_that_stays_away_is_told_to_all_who_wait_at_once(ctx: Ctx) -> Result {
    // A wait without a limit outlasts failures for a lease, at least five seconds.
    let patience = Duration::from_secs(5);
    for outcome in [CallOutcome::ErrorBefore, CallOutcome::Unsent] {
        let ([client], name) = TestClient::several(&ctx).await?;
        client.gate.all(outcome);
        let lock = client.short(&name)?;
        let begun = ctx.now();
        let waiting = [(); 4].map(|()| ctx.spawn(lock.acquire()));
        // The first one's last pause or attempt, then one attempt of each waiter behind it.
        let bound = match outcome {
            CallOutcome::Unsent => patience + ctx.short() * 5 / 3,
            _ => patience + Duration::from_secs(1),
        };
        for waiter in waiting {
            let waited = waiter.done((begun + bound).since(ctx.now())).await?;
            let error = fails(ErrorKind::Unavailable, waited)?;
            same("the retry class", error.retry(), RetryClass::Later)?;
            ensure(ctx.now().since(begun) >= patience, "it ended early")?;
        }
    }
    Ok(())
}

async fn what_can_never_work_is_misuse_and_sends_no_request(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    for wrong in ["", "a\0b", &"x".repeat(513)] {
        fails(ErrorKind::Misuse, client.inner.lock(wrong))?;
    }
    let too_long = MAX_LEASE + Duration::from_secs(1);
    for length in [Duration::ZERO, MIN_LEASE / 2, too_long] {
        for lease in [Lease::fixed(length), Lease::renewed(length)] {
            let taken = client.lock(&name)?.lease(lease).try_acquire().await;
            fails(ErrorKind::Misuse, taken)?;
        }
    }
    same("the number of calls made", client.gate.all_calls(), 0)
}

async fn nothing_shows_an_owner(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let owner = Owner::from_seed(&ctx.text());
    let lock = client.lock(&name)?.with_owner(&owner);
    let guard = client.take(&lock).await?;
    let store = client.inner.capabilities().store.as_str();
    let pass = Pass::new(store, name.clone(), owner, guard.token());
    let stranger = other.inner.owner();
    let others = other.lock(&name)?.with_owner(&stranger);
    let timed_out = refused(others.acquire_timeout(Duration::from_millis(1)).await)?;
    other.gate.always(Step::Acquire, CallOutcome::ErrorAfter);
    let short = other.short(&name)?.with_owner(&stranger);
    let unanswered = refused(short.try_acquire().await)?;
    other.gate.clear();
    let misused = refused(client.lock(&ctx.name()?)?.join(&pass).await)?;
    let seen = client.inner.admin().inspect(name.as_str()).await?;
    let mut shown = vec![
        format!("{lock:?} {guard:?} {pass:?} {pass} {others:?} {seen:?}"),
        format!("{:?} {:?}", client.inner, other.inner),
    ];
    other.breaks(&name, None).await?;
    let gone = refused(client.lock(&name)?.join(&pass).await)?;
    let lost = refused(guard.release().await)?;
    for error in [timed_out, unanswered, misused, gone, lost] {
        shown.push(format!("{error} {error:?}"));
    }
    for owner in [owner, stranger] {
        let uuid = owner.expose();
        for secret in [uuid.hyphenated().to_string(), uuid.simple().to_string()] {
            let telling = shown.iter().find(|shown| shown.contains(&secret[..12]));
            same("the text that shows an owner", telling, None)?;
        }
    }
    Ok(())
}

fn refused<T>(answer: Result<T, Error>) -> Result<Error> {
    let error = answer.err();
    error.ok_or_else(|| Failure::new("this should have been refused"))
}
