//! `error`: contention is a value, an error says what it may have done, and no output shows a secret.

use super::{
    gate::{Fate, Step},
    peer::{Peer, fails, frees, held},
    task::Task,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{
    Effect, Error, ErrorKind, Lease, MAX_HOLDS, MAX_LEASE, MIN_LEASE, Owner, Pass, RetryClass,
    TimeoutPhase,
};
use std::time::Duration;

cases! {
    [Clause::Error]
    contention_is_a_value;
    whoever_has_no_time_to_wait_is_told_who_holds_the_lock;
    a_store_that_is_away_is_an_error_with_its_class_and_its_place;
    a_wait_outlasts_a_store_that_is_away_for_a_while;
    a_store_that_stays_away_is_told_to_all_who_wait_at_once needs(Jump);
    what_can_never_work_is_misuse_and_asks_nobody;
    too_many_holds_of_a_name_are_refused;
    nothing_shows_an_owner;
}

async fn contention_is_a_value(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    for contender in [&peer, &other] {
        let tried = contender.lock(&name)?.try_acquire().await?;
        same("a held lock is granted", tried.is_some(), false)?;
    }
    frees(&ctx, guard).await
}

async fn whoever_has_no_time_to_wait_is_told_who_holds_the_lock(ctx: Ctx) -> Result {
    let ([_other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let lock = peer.lock(&name)?;
    let at_once = || {
        let trying = lock.acquire_timeout(Duration::ZERO);
        ctx.within("it is asked once", ctx.answer(), trying)
    };
    let phase = TimeoutPhase::Wait;
    let error = fails("the wait", at_once().await?, ErrorKind::Timeout { phase })?;
    same("the number of calls made", peer.gate.all_calls(), 1)?;
    let (words, holder) = (error.to_string(), guard.owner());
    ensure(
        words.contains(&holder.to_string()),
        format!("who holds it is not in {words:?}"),
    )?;
    frees(&ctx, guard).await?;
    let taken = at_once().await?;
    frees(&ctx, taken?).await
}

async fn a_store_that_is_away_is_an_error_with_its_class_and_its_place(ctx: Ctx) -> Result {
    let ([peer], name, before) = held(&ctx, Peer::lock).await?;
    frees(&ctx, before).await?;
    peer.gate.all(Fate::ErrorBefore);
    let tried = peer.short(&name)?.try_acquire().await;
    let Err(error) = tried else {
        return Err(Failure::new("acquired from a store that is away"));
    };
    same("the retry class", error.retry(), RetryClass::Later)?;
    same("the effect", error.effect(), Effect::None)?;
    same("the name", error.name(), Some(&name))?;
    same(
        "the backend",
        error.backend(),
        peer.client.capabilities().backend,
    )?;
    let told = std::error::Error::source(&error).is_some();
    ensure(told, format!("the source is missing in {error:?}"))
}

async fn a_wait_outlasts_a_store_that_is_away_for_a_while(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.all(Fate::ErrorBefore);
    let waiting = Task::spawn(peer.lock(&name)?.acquire());
    let span = Duration::from_secs(2);
    ctx.time_passes(span).await;
    same("the wait is over", waiting.is_done(), false)?;
    let asked = peer.gate.calls(Step::Acquire);
    ensure(asked <= 20, format!("{asked} attempts in {span:?}"))?;
    peer.gate.clear();
    // The longest pause between two attempts.
    let bound = Duration::from_secs(1);
    waiting.served(&ctx, "it is acquired", bound).await
}

async fn a_store_that_stays_away_is_told_to_all_who_wait_at_once(ctx: Ctx) -> Result {
    // A wait without a limit outlasts failures for a lease, at least five seconds.
    let patience = Duration::from_secs(5);
    for fate in [Fate::ErrorBefore, Fate::Unsent] {
        let peer = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        peer.gate.all(fate);
        let lock = peer.short(&name)?;
        let begun = ctx.now();
        let waiting = [(); 4].map(|()| Task::spawn(lock.acquire()));
        // The first one's last pause or attempt, then one attempt of each waiter behind it.
        let bound = match fate {
            Fate::Unsent => patience + ctx.short() * 5 / 3,
            _ => patience + Duration::from_secs(1),
        };
        for waiter in waiting {
            let rest = (begun + bound).since(ctx.now());
            let waited = waiter.done(&ctx, "the wait ends", rest).await?;
            let error = fails("the wait", waited, ErrorKind::Unavailable)?;
            same("the retry class", error.retry(), RetryClass::Later)?;
            ensure(ctx.now().since(begun) >= patience, "it ended early")?;
        }
    }
    Ok(())
}

async fn what_can_never_work_is_misuse_and_asks_nobody(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    for wrong in ["", "a\0b", &"x".repeat(513)] {
        fails(
            "lock() of no name",
            peer.client.lock(wrong),
            ErrorKind::Misuse,
        )?;
    }
    let lock = peer.lock(&ctx.name()?)?;
    for length in [
        Duration::ZERO,
        MIN_LEASE / 2,
        MAX_LEASE + Duration::from_secs(1),
    ] {
        for lease in [Lease::fixed(length), Lease::renewed(length)] {
            let taken = lock.clone().lease(lease).try_acquire().await;
            fails("a lease out of bounds", taken, ErrorKind::Misuse)?;
        }
    }
    same("the number of calls made", peer.gate.all_calls(), 0)
}

async fn too_many_holds_of_a_name_are_refused(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    let lock = peer.lock(&name)?;
    let first = peer.take(&lock).await?;
    let pass = first.pass()?;
    let mut guards = vec![first];
    for _ in 1..MAX_HOLDS {
        guards.push(peer.join(lock.clone(), &pass).await?);
    }
    let many = ErrorKind::Overloaded;
    peer.cannot_join(lock.clone(), &pass, many).await?;
    guards
        .pop()
        .ok_or_else(|| Failure::new("BUG: no guard"))?
        .release()
        .await?;
    guards.push(peer.join(lock, &pass).await?);
    Ok(())
}

async fn nothing_shows_an_owner(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = Owner::from_seed(&ctx.text());
    let lock = peer.lock(&name)?.with_owner(&owner);
    let guard = peer.take(&lock).await?;
    let store = peer.client.capabilities().store.as_str();
    let pass = Pass::new(store, name.clone(), owner, guard.token());
    let stranger = other.client.owner();
    let others = other.lock(&name)?.with_owner(&stranger);
    let timed_out = refused(others.acquire_timeout(Duration::from_millis(1)).await)?;
    other.gate.always(Step::Acquire, Fate::ErrorAfter);
    let unanswered = refused(
        other
            .short(&name)?
            .with_owner(&stranger)
            .try_acquire()
            .await,
    )?;
    other.gate.clear();
    let misused = refused(peer.lock(&ctx.name()?)?.join(&pass).await)?;
    let mut shown = vec![
        format!(
            "{:?} {:?} {lock:?} {guard:?} {pass:?} {pass}",
            peer.client,
            peer.client.lock("x")?
        ),
        format!("{:?} {others:?}", other.client),
        format!("{:?}", peer.client.admin().inspect(name.as_str()).await?),
    ];
    other.breaks(&name).await?;
    let gone = refused(peer.lock(&name)?.join(&pass).await)?;
    let lost = refused(guard.release().await)?;
    for error in [timed_out, unanswered, misused, gone, lost] {
        shown.push(format!("{error} {error:?}"));
    }
    for owner in [owner, stranger] {
        let uuid = owner.expose();
        for secret in [uuid.hyphenated().to_string(), uuid.simple().to_string()] {
            let telling = shown.iter().find(|shown| shown.contains(&secret[..12]));
            ensure(telling.is_none(), format!("an owner is in {telling:?}"))?;
        }
    }
    Ok(())
}

fn refused<T>(answer: Result<T, Error>) -> Result<Error> {
    answer
        .err()
        .ok_or_else(|| Failure::new("this should have been refused"))
}
