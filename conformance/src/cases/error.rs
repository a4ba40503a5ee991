//! `error`: contention is a value; an error has a kind, a retry class, and a truthful effect.

use super::held;
use crate::{Call, Ctx, Failure, Result, case::cases, ensure, expect::is_left, same};
use dlock_core::{
    Effect, ErrorKind, MAX_HOLDS, RetryClass,
    driver::{Acquired, Cursor, DriverError},
};

cases! {
    [Clause::Error]
    one_hold_too_many_is_overloaded_and_changes_nothing bullet("more than [`MAX_HOLDS`]");
    a_refusal_tells_the_truth_about_the_holder;
    a_request_that_came_too_late_is_unavailable_without_effect;
    a_cursor_that_no_list_returned_is_misuse;
    no_answer_and_no_debug_shows_an_owner;
    what_was_executed_is_not_said_to_have_had_no_effect needs(Network);
    a_store_that_is_away_is_unavailable_and_comes_back needs(Network);
}

async fn one_hold_too_many_is_overloaded_and_changes_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let mut last = first.clone();
    for count in 2..=MAX_HOLDS {
        last = driver.take(&first.ask.again()).await?;
        same("the number of holds", last.holds, count)?;
    }
    let more = first.ask.again();
    let answer = driver.acquire(&more).await;
    failed(answer, ErrorKind::Overloaded, Effect::None)?;
    other.sees_holds(&name, MAX_HOLDS).await?;
    driver.leaves(&last, MAX_HOLDS - 1).await?;
    let holds = driver.take(&more).await?.holds;
    same("the number of holds", holds, MAX_HOLDS)
}

/// The error of an acquire, which must be of this kind.
fn failed(
    answer: Result<Acquired, DriverError>,
    kind: ErrorKind,
    effect: Effect,
) -> Result<DriverError> {
    match answer {
        Ok(answer) => Err(Failure::new(format!("{kind:?} was due, got {answer:?}"))),
        Err(error) => {
            same("the kind", error.kind(), kind)?;
            same("the effect", error.effect(), effect)?;
            Ok(error)
        }
    }
}

async fn a_refusal_tells_the_truth_about_the_holder(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let held = other.refused(&ctx.ask(&name)).await?;
    if let Some(by) = held.by {
        same("who holds it", by.owner, hold.ask.owner.fingerprint())?;
        let token = by.token.unwrap_or(hold.token);
        same("its token", token, hold.token)?;
        by.rest.map_or(Ok(()), |rest| is_left(rest, ctx.long()))?;
    }
    // Not before the lease can be over, and never later than it can last.
    held.poll_in
        .map_or(Ok(()), |poll_in| is_left(poll_in, ctx.long()))?;
    driver.frees(&hold).await
}

async fn a_request_that_came_too_late_is_unavailable_without_effect(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    let past = ctx.now() - driver.late() - ctx.short();
    let answer = driver.acquire(&ctx.ask(&name).until(past)).await;
    let error = failed(answer, ErrorKind::Unavailable, Effect::None)?;
    let may_repeat = error.retry() != RetryClass::Never;
    ensure(may_repeat, "a repeat may well succeed")
}

async fn a_cursor_that_no_list_returned_is_misuse(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let prefix = ctx.text();
    for bytes in [&b"\xff\xfe no cursor"[..], b""] {
        let cursor = Cursor(bytes.to_vec());
        match driver.inner().list(&prefix, Some(&cursor), 10).await {
            Err(error) => same("the kind", error.kind(), ErrorKind::Misuse)?,
            Ok(page) => return Err(Failure::new(format!("no cursor got {page:?}"))),
        }
    }
    Ok(())
}

async fn no_answer_and_no_debug_shows_an_owner(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let shown = [
        format!("{:?}", other.refused(&ctx.ask(&name)).await?),
        format!("{:?}", other.inspect(&name).await?),
        format!("{:?}", other.list(name.as_str(), 10).await?),
        format!("{:?}", other.release_all(&ctx.ask(&name)).await?),
        format!("{:?} {:?}", driver.inner(), driver.inner().capabilities()),
    ];
    let secret = hold.ask.owner.expose();
    for secret in [secret.to_string(), secret.simple().to_string()] {
        for text in &shown {
            let shows = text.contains(&secret);
            ensure(!shows, format!("an owner is shown: {text}"))?;
        }
    }
    driver.frees(&hold).await
}

async fn what_was_executed_is_not_said_to_have_had_no_effect(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let ask = ctx.ask(&name);
    faults.lose_reply(Call::Acquire).await?;
    let acquire = ctx.unanswered(driver.acquire(&ask)).await?;
    let hold = other.take(&ask).await?;
    faults.lose_reply(Call::Renew).await?;
    let give_up = ctx.now() + ctx.answer();
    let renew = driver.renew_until(&hold, ctx.long(), give_up);
    let renew = ctx.unanswered(renew).await?;
    faults.lose_reply(Call::Release).await?;
    let release = ctx.unanswered(driver.release_as(&ask)).await?;
    for (call, error) in [("acquire", acquire), ("renew", renew), ("release", release)] {
        if let Some(error) = error {
            let effect = format!("the effect of {call}");
            same(effect, error.effect(), Effect::Unknown)?;
            let kind = format!("the kind of {call}");
            same(kind, error.kind(), ErrorKind::Unavailable)?;
        }
    }
    Ok(())
}

async fn a_store_that_is_away_is_unavailable_and_comes_back(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let name = ctx.name()?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    faults.down().await?;
    for _ in 0..2 {
        // No answer is allowed, too: the core bounds every call.
        if let Some(error) = ctx.unanswered(driver.acquire(&ctx.ask(&name))).await? {
            same("the kind", error.kind(), ErrorKind::Unavailable)?;
            let may_repeat = error.retry() != RetryClass::Never;
            ensure(may_repeat, "a store that is away may come back")?;
        }
    }
    faults.up().await?;
    ctx.eventually("the store is reached again", ctx.answer(), || async {
        let again = tokio::time::timeout(ctx.short(), driver.inner().inspect(&name)).await;
        Ok(matches!(again, Ok(Ok(_))))
    })
    .await?;
    if ctx.is_session_bound() {
        // The server was away for longer than a session lasts.
        driver.cannot_renew(&hold).await?;
        return driver.take_soon(&ctx.ask(&name)).await.map(drop);
    }
    driver.renews(&hold, ctx.long()).await?;
    driver.frees(&hold).await
}
