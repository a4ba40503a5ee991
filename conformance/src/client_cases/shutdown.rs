//! `shutdown`: nothing is released under code that still runs, and nothing runs afterwards.

use super::{
    gated_driver::{CallOutcome, Step},
    task::polled,
    test_client::{EXPIRED, SHUT_DOWN, TestClient, fails, frees, held, is_lost, stays_held},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, in_time, same};
use dlock_core::{
    ErrorKind::{Lost, ShuttingDown},
    LockName, LossReason, ShutdownOutcome as Part, ShutdownReport,
};
use std::{future::IntoFuture, sync::Arc, time::Duration};

cases! {
    [Clause::Shutdown]
    new_acquires_are_refused_and_waiters_cancelled;
    a_waiter_whose_request_hangs_is_cancelled_at_once;
    holders_are_told_and_keep_their_locks_for_the_grace;
    what_is_given_back_in_time_is_reported_released;
    what_was_lost_before_is_reported_lost;
    a_holder_that_ignores_it_is_left_to_its_lease;
    what_is_left_is_not_released_by_its_guard_either;
    nothing_renews_afterwards;
    forced_it_releases_what_is_held;
    an_acquire_under_way_ends_without_a_lock;
    a_store_that_does_not_answer_delays_it_no_longer_than_the_grace;
    without_locks_it_is_done_at_once_and_only_once;
    dropped_once_it_has_begun_it_goes_on;
}

async fn new_acquires_are_refused_and_waiters_cancelled(ctx: Ctx) -> Result {
    let ([_other, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let own = client.acquire(&ctx.name()?).await?;
    let pass = own.pass()?;
    let lock = client.lock(&name)?;
    let mut waiting = vec![client.waits(lock.clone()).await?];
    waiting.push(ctx.spawn(lock.acquire()));
    waiting.push(ctx.spawn(lock.acquire_timeout(ctx.long())));
    let closing = client.shut_down(ctx.short());
    for waiter in waiting {
        fails(ShuttingDown, waiter.done(ctx.short() / 5).await?)?;
    }
    fails(ShuttingDown, lock.acquire().await)?;
    fails(ShuttingDown, lock.acquire_timeout(ctx.long()).await)?;
    fails(ShuttingDown, lock.try_acquire().await)?;
    client.cannot_join(own.name(), &pass, ShuttingDown).await?;
    frees(&ctx, own).await?;
    let report = closing.done(ctx.short()).await??;
    same("what is unknown", report.unknown, Vec::new())?;
    frees(&ctx, guard).await?;
    ctx.left_untouched(&name, ctx.answer()).await
}

async fn a_waiter_whose_request_hangs_is_cancelled_at_once(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    client.gate.always(Step::Acquire, CallOutcome::Never);
    let waiting = ctx.spawn(client.lock(&name)?.acquire());
    let trying = ctx.spawn(client.lock(&ctx.name()?)?.try_acquire());
    client.sends(Step::Acquire, 2).await?;
    let _closing = client.shut_down(ctx.short());
    // Far less than the request itself may take.
    let bound = Duration::from_millis(100);
    fails(ShuttingDown, waiting.done(bound).await?)?;
    fails(ShuttingDown, trying.done(bound).await?).map(drop)
}

async fn holders_are_told_and_keep_their_locks_for_the_grace(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::kept).await?;
    let guard = Arc::new(guard);
    let told = Arc::clone(&guard);
    let told = ctx.spawn(async move { told.shutting_down().await });
    ctx.would_show_within(ctx.short() / 10).await;
    same("shutting_down() has resolved before", told.is_done(), false)?;
    let grace = ctx.kept() * 2;
    let begun = ctx.now();
    let closing = client.shut_down(grace);
    told.done(ctx.short() / 10).await?;
    while ctx.now().since(begun) < grace * 9 / 10 {
        stays_held(&ctx, &guard).await?;
        other.refused(&name).await?;
        ctx.time_passes(ctx.kept() / 10).await;
    }
    let again = polled(guard.shutting_down(), 1).await;
    same("shutting_down() resolves again", again, Some(()))?;
    let guard = Arc::into_inner(guard).ok_or_else(|| Failure::new("BUG: it is shared"))?;
    frees(&ctx, guard).await?;
    let report = closing.done(grace).await??;
    same("the report", report.locks, vec![(name, Part::Released)])
}

async fn what_is_given_back_in_time_is_reported_released(ctx: Ctx) -> Result {
    let ([client], by_hand, released) = held(&ctx, TestClient::lock).await?;
    let by_drop = ctx.name()?;
    let dropped = client.acquire(&by_drop).await?;
    let begun = ctx.now();
    let closing = client.shut_down(ctx.long());
    let told = ctx.within("it is told", ctx.short() / 10, dropped.shutting_down());
    told.await?;
    drop(dropped);
    frees(&ctx, released).await?;
    let report = closing.done(ctx.short()).await??;
    ensure(ctx.now().since(begun) < ctx.long(), "it waited for nothing")?;
    same("what is unknown", &report.unknown, &Vec::new())?;
    for name in [&by_hand, &by_drop] {
        ctx.sees_free(name).await?;
    }
    reports(report, [by_hand, by_drop], Part::Released)
}

async fn what_was_lost_before_is_reported_lost(ctx: Ctx) -> Result {
    let ([client, other], first, guard) = held(&ctx, TestClient::lock).await?;
    let second = ctx.name()?;
    let guards = [guard, client.acquire(&second).await?];
    for name in [&first, &second] {
        other.breaks(name, None).await?;
    }
    let closing = client.shut_down(ctx.short());
    let told = guards[0].shutting_down();
    ctx.within("it is told", ctx.short() / 10, told).await?;
    for guard in guards {
        fails(Lost, guard.release().await)?;
    }
    let report = closing.done(ctx.short()).await??;
    reports(report, [first, second], Part::Lost(LossReason::NotHeld))
}

/// Exactly these locks are reported, all with this outcome.
fn reports(report: ShutdownReport, mut names: [LockName; 2], outcome: Part) -> Result {
    names.sort();
    let wanted = names.map(|name| (name, outcome));
    same("the report", report.locks, wanted.into())
}

async fn a_holder_that_ignores_it_is_left_to_its_lease(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::short).await?;
    // The rest is told when the grace is over; closing the connections may take any time after that.
    let told = ctx.now() + ctx.short() / 4;
    let report = client.inner.shutdown(ctx.short() / 4).await?;
    let expired = guard.state() == EXPIRED;
    in_time(!expired, "the lease was over before the grace was")?;
    same("its state", guard.state(), SHUT_DOWN)?;
    let reason = polled(guard.lost(), 1).await;
    same("lost()", reason, Some(LossReason::Shutdown))?;
    let rest = match report.locks.as_slice() {
        [(left, Part::Left { rest })] if *left == name => *rest,
        other => return Err(Failure::new(format!("it should be left, is {other:?}"))),
    };
    let words = format!("{rest:?} are left of {:?}", ctx.short());
    ensure(rest <= ctx.short(), &words)?;
    in_time(rest > ctx.short() / 2, &words)?;
    // The store keeps the hold for as long as it was granted; no other client gets in before.
    let next = other.gets(&name, ctx.short() * 2).await?;
    let after = ctx.now().since(told);
    ensure(
        after + ctx.short() / 50 + Duration::from_millis(20) >= rest,
        format!("another got in after {after:?}, {rest:?} were left"),
    )?;
    drop(guard);
    frees(&ctx, next).await
}

async fn what_is_left_is_not_released_by_its_guard_either(ctx: Ctx) -> Result {
    let ([client, other], name, dropped) = held(&ctx, TestClient::lock).await?;
    let second = ctx.name()?;
    let released = client.acquire(&second).await?;
    client.inner.shutdown(Duration::ZERO).await?;
    let releases = client.gate.calls(Step::Release);
    drop(dropped);
    let error = fails(Lost, released.release().await)?;
    same("the reason", error.loss(), Some(LossReason::Shutdown))?;
    ctx.would_show_within(ctx.short() / 5).await;
    let after = client.gate.calls(Step::Release);
    same("the number of releases", after, releases)?;
    other.refused(&name).await?;
    other.refused(&second).await
}

async fn nothing_renews_afterwards(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::short).await?;
    client.inner.shutdown(ctx.short() / 2).await?;
    let calls = client.gate.all_calls();
    ctx.would_show_within(ctx.short() * 2).await;
    same("the number of calls", client.gate.all_calls(), calls)?;
    let state = guard.state();
    in_time(state != EXPIRED, "the lease was over before the grace was")?;
    same("its state", state, SHUT_DOWN)
}

async fn forced_it_releases_what_is_held(ctx: Ctx) -> Result {
    let ([client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    let forced = client.inner.shutdown(ctx.short() / 5).force();
    let report = ctx.spawn(forced.into_future()).done(ctx.short());
    let locks = report.await??.locks;
    same("the report", locks, vec![(name.clone(), Part::Released)])?;
    same("its state", guard.state(), SHUT_DOWN)?;
    let next = other.acquire(&name).await?;
    drop(guard);
    frees(&ctx, next).await
}

async fn an_acquire_under_way_ends_without_a_lock(ctx: Ctx) -> Result {
    for tries in [true, false] {
        let ([client], name) = TestClient::several(&ctx).await?;
        client
            .gate
            .always(Step::Acquire, CallOutcome::Slow(ctx.short() / 5));
        let lock = client.short(&name)?;
        let acquiring = ctx.spawn(async move {
            if tries {
                lock.try_acquire().await
            } else {
                lock.acquire().await.map(Some)
            }
        });
        client.sends(Step::Acquire, 1).await?;
        let report = client.shut_down(ctx.short()).done(ctx.short()).await??;
        same("the report", report.locks, Vec::new())?;
        fails(ShuttingDown, acquiring.done(ctx.short()).await?)?;
        ctx.left_untouched(&name, ctx.short()).await?;
    }
    Ok(())
}

async fn a_store_that_does_not_answer_delays_it_no_longer_than_the_grace(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
    let dropped = ctx.name()?;
    let other = client.acquire(&dropped).await?;
    client.gate.all(CallOutcome::Unsent);
    drop(other);
    // Within the time for which the hold is certain.
    let grace = if ctx.is_session_bound() {
        ctx.promised(ctx.short()) / 2
    } else {
        ctx.short()
    };
    // Closing the connections has a bound of its own.
    let bound = grace + Duration::from_secs(2);
    let report = client.shut_down(grace).done(bound).await??;
    let left = |(of, part): &(LockName, Part)| *of == name && matches!(part, Part::Left { .. });
    let is_left = report.locks.iter().any(left);
    ensure(is_left, format!("{name:?} should be left: {report:?}"))?;
    same("what is unknown", report.unknown, vec![dropped])?;
    same("its state", guard.state(), SHUT_DOWN)
}

async fn without_locks_it_is_done_at_once_and_only_once(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::lock).await?;
    frees(&ctx, guard).await?;
    let report = client.shut_down(ctx.long()).done(ctx.short()).await??;
    same("the report", report.locks, Vec::new())?;
    fails(ShuttingDown, client.inner.shutdown(ctx.long()).await).map(drop)
}

async fn dropped_once_it_has_begun_it_goes_on(ctx: Ctx) -> Result {
    for polls in 0..4 {
        let ([client], _, guard) = held(&ctx, TestClient::short).await?;
        let grace = ctx.short() / 5;
        drop(polled(client.inner.shutdown(grace).into_future(), polls).await);
        let tried = client.lock(&ctx.name()?)?.try_acquire().await;
        if polls == 0 {
            drop(tried?);
            stays_held(&ctx, &guard).await?;
            continue;
        }
        fails(ShuttingDown, tried)?;
        is_lost(&ctx, &guard, LossReason::Shutdown, grace).await?;
    }
    Ok(())
}
