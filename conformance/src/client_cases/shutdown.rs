//! `shutdown`: nothing is released under code that still runs, and nothing runs afterwards.

use super::{
    gate::{Fate, Step},
    peer::{EXPIRED, Peer, SHUT_DOWN, fails, frees, held, is_lost, left_untouched, stays_held},
    task::{Task, polled},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, in_time, same};
use dlock_core::{Client, ErrorKind, LossReason, ShutdownOutcome as Part, ShutdownReport};
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
    let ([_other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let own = peer.take(&peer.lock(&ctx.name()?)?).await?;
    let pass = own.pass()?;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(Task::spawn(peer.lock(&name)?.acquire()));
    }
    waiting.push(Task::spawn(peer.lock(&name)?.acquire_timeout(ctx.long())));
    ctx.until("a waiter asks the store", ctx.answer(), || {
        peer.gate.calls(Step::Acquire) > 1
    })
    .await?;
    let closing = shut_down(&peer.client, ctx.short());
    for waiter in waiting {
        let waited = waiter.done(&ctx, "a waiter is cancelled", ctx.short() / 5);
        fails("a wait", waited.await?, ErrorKind::ShuttingDown)?;
    }
    let lock = peer.lock(&name)?;
    let refused = ErrorKind::ShuttingDown;
    fails("acquire", lock.acquire().await, refused)?;
    fails(
        "acquire_timeout",
        lock.acquire_timeout(ctx.long()).await,
        refused,
    )?;
    fails("try_acquire", lock.try_acquire().await, refused)?;
    let joining = peer.lock(own.name())?.join(&pass).await;
    fails("join", joining, refused)?;
    frees(&ctx, own).await?;
    let report = closed(&ctx, closing, ctx.short()).await?;
    same("what is unknown", report.unknown, Vec::new())?;
    frees(&ctx, guard).await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await
}

async fn a_waiter_whose_request_hangs_is_cancelled_at_once(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.always(Step::Acquire, Fate::Never);
    let waiting = Task::spawn(peer.lock(&name)?.acquire());
    let trying = Task::spawn(peer.lock(&ctx.name()?)?.try_acquire());
    ctx.until("both ask the store", ctx.answer(), || {
        peer.gate.calls(Step::Acquire) > 1
    })
    .await?;
    let _closing = shut_down(&peer.client, ctx.short());
    // Far less than the request itself may take.
    let bound = Duration::from_millis(100);
    let waited = waiting.done(&ctx, "the waiter is cancelled", bound).await?;
    fails("acquire", waited, ErrorKind::ShuttingDown)?;
    let tried = trying
        .done(&ctx, "the one who tries is cancelled", bound)
        .await?;
    fails("try_acquire", tried, ErrorKind::ShuttingDown).map(drop)
}

async fn holders_are_told_and_keep_their_locks_for_the_grace(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let guard = Arc::new(peer.take(&peer.kept(&name)?).await?);
    let told = Arc::clone(&guard);
    let told = Task::spawn(async move { told.shutting_down().await });
    ctx.would_show_within(ctx.short() / 10).await;
    same("shutting_down() has resolved before", told.is_done(), false)?;
    let grace = ctx.kept() * 2;
    let begun = ctx.now();
    let closing = shut_down(&peer.client, grace);
    told.done(&ctx, "shutting_down() resolves", ctx.short() / 10)
        .await?;
    while ctx.now().since(begun) < grace * 9 / 10 {
        stays_held(&ctx, "its state during the grace", &guard).await?;
        other.refused(&other.lock(&name)?).await?;
        ctx.time_passes(ctx.kept() / 10).await;
    }
    let again = ctx.within(
        "shutting_down() resolves again",
        Duration::ZERO,
        guard.shutting_down(),
    );
    again.await?;
    let guard = Arc::into_inner(guard).ok_or_else(|| Failure::new("BUG: it is shared"))?;
    frees(&ctx, guard).await?;
    let report = closed(&ctx, closing, grace).await?;
    same("the report", report.locks, vec![(name, Part::Released)])
}

async fn what_is_given_back_in_time_is_reported_released(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let observer = ctx.caller().await?;
    let (by_hand, by_drop) = (ctx.name()?, ctx.name()?);
    let released = peer.take(&peer.lock(&by_hand)?).await?;
    let dropped = peer.take(&peer.lock(&by_drop)?).await?;
    let begun = ctx.now();
    let closing = shut_down(&peer.client, ctx.long());
    ctx.within(
        "shutting_down() resolves",
        ctx.short() / 10,
        dropped.shutting_down(),
    )
    .await?;
    drop(dropped);
    frees(&ctx, released).await?;
    let report = closed(&ctx, closing, ctx.short()).await?;
    ensure(ctx.now().since(begun) < ctx.long(), "it waited for nothing")?;
    let mut wanted = vec![(by_hand, Part::Released), (by_drop, Part::Released)];
    wanted.sort_by(|a, b| a.0.cmp(&b.0));
    same("the report", &report.locks, &wanted)?;
    same("what is unknown", report.unknown, Vec::new())?;
    for (name, _) in &report.locks {
        observer.sees_free(name).await?;
    }
    Ok(())
}

async fn what_was_lost_before_is_reported_lost(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let (seen, unseen) = (ctx.name()?, ctx.name()?);
    let first = peer.take(&peer.lock(&seen)?).await?;
    let second = peer.take(&peer.lock(&unseen)?).await?;
    for name in [&seen, &unseen] {
        other.breaks(name).await?;
    }
    let closing = shut_down(&peer.client, ctx.short());
    ctx.within(
        "shutting_down() resolves",
        ctx.short() / 10,
        first.shutting_down(),
    )
    .await?;
    fails(
        "the release of a broken lock",
        first.release().await,
        ErrorKind::Lost,
    )?;
    fails(
        "the release of another",
        second.release().await,
        ErrorKind::Lost,
    )?;
    let report = closed(&ctx, closing, ctx.short()).await?;
    let lost = Part::Lost(LossReason::NotHeld);
    let mut wanted = vec![(seen, lost), (unseen, lost)];
    wanted.sort_by(|a, b| a.0.cmp(&b.0));
    same("the report", report.locks, wanted)
}

async fn a_holder_that_ignores_it_is_left_to_its_lease(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::short).await?;
    // The rest is told when the grace is over; closing the connections may take any time after that.
    let told = ctx.now() + ctx.short() / 4;
    let report = peer.client.shutdown(ctx.short() / 4).await?;
    same("its state", guard.state(), SHUT_DOWN)?;
    let reason = polled(guard.lost(), 1).await;
    same("lost()", reason, Some(LossReason::Shutdown))?;
    let rest = match report.locks.as_slice() {
        [(left, Part::Left { rest })] if *left == name => *rest,
        other => {
            return Err(Failure::new(format!("it should be left, is {other:?}")));
        }
    };
    ensure(
        rest > ctx.short() / 2 && rest <= ctx.short(),
        format!("{rest:?} are left of {:?}", ctx.short()),
    )?;
    // The store keeps the hold for as long as it was granted; no other client gets in before.
    other.refused(&other.lock(&name)?).await?;
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
    let [peer, other] = Peer::several(&ctx).await?;
    let (name, second) = (ctx.name()?, ctx.name()?);
    let dropped = peer.take(&peer.lock(&name)?).await?;
    let released = peer.take(&peer.lock(&second)?).await?;
    peer.client.shutdown(Duration::ZERO).await?;
    let releases = peer.gate.calls(Step::Release);
    drop(dropped);
    let error = fails("its release", released.release().await, ErrorKind::Lost)?;
    same("the reason", error.loss(), Some(LossReason::Shutdown))?;
    ctx.would_show_within(ctx.short() / 5).await;
    same(
        "the number of releases",
        peer.gate.calls(Step::Release),
        releases,
    )?;
    for name in [&name, &second] {
        other.refused(&other.lock(name)?).await?;
    }
    Ok(())
}

async fn nothing_renews_afterwards(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let guard = peer.take(&peer.short(&ctx.name()?)?).await?;
    peer.client.shutdown(ctx.short() / 2).await?;
    let calls = peer.gate.all_calls();
    ctx.would_show_within(ctx.short() * 2).await;
    same("the number of calls", peer.gate.all_calls(), calls)?;
    let state = guard.state();
    in_time(state != EXPIRED, "the lease was over before the grace was")?;
    same("its state", state, SHUT_DOWN)
}

async fn forced_it_releases_what_is_held(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    let forced = peer.client.shutdown(ctx.short() / 5).force();
    let report = ctx
        .within("it ends", ctx.short(), forced.into_future())
        .await??;
    same(
        "the report",
        report.locks,
        vec![(name.clone(), Part::Released)],
    )?;
    same("its state", guard.state(), SHUT_DOWN)?;
    let next = other.take(&other.lock(&name)?).await?;
    drop(guard);
    frees(&ctx, next).await
}

async fn an_acquire_under_way_ends_without_a_lock(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    for tries in [true, false] {
        let peer = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        peer.gate.always(Step::Acquire, Fate::Slow(ctx.short() / 5));
        let lock = peer.short(&name)?;
        let acquiring = Task::spawn(async move {
            if tries {
                lock.try_acquire().await
            } else {
                lock.acquire().await.map(Some)
            }
        });
        peer.asks(0).await?;
        let report = closed(&ctx, shut_down(&peer.client, ctx.short()), ctx.short());
        same("the report", report.await?.locks, Vec::new())?;
        let acquired = acquiring.done(&ctx, "it is answered", ctx.short()).await?;
        fails("an acquire under way", acquired, ErrorKind::ShuttingDown)?;
        left_untouched(&ctx, &observer, &name, ctx.short()).await?;
    }
    Ok(())
}

async fn a_store_that_does_not_answer_delays_it_no_longer_than_the_grace(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let (name, dropped) = (ctx.name()?, ctx.name()?);
    let guard = peer.take(&peer.lock(&name)?).await?;
    let other = peer.take(&peer.lock(&dropped)?).await?;
    peer.gate.all(Fate::Unsent);
    drop(other);
    // Within the time for which the hold is certain.
    let grace = if ctx.is_session_bound() {
        ctx.promised(ctx.short()) / 2
    } else {
        ctx.short()
    };
    let closing = shut_down(&peer.client, grace);
    // Closing the connections has a bound of its own.
    let report = closed(&ctx, closing, grace + Duration::from_secs(2)).await?;
    let left = report
        .locks
        .iter()
        .any(|(of, part)| *of == name && matches!(part, Part::Left { .. }));
    ensure(
        left,
        format!("{name:?} should be left, the report is {report:?}"),
    )?;
    same("what is unknown", report.unknown, vec![dropped])?;
    same("its state", guard.state(), SHUT_DOWN)
}

async fn without_locks_it_is_done_at_once_and_only_once(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let guard = peer.take(&peer.lock(&ctx.name()?)?).await?;
    frees(&ctx, guard).await?;
    let report = closed(&ctx, shut_down(&peer.client, ctx.long()), ctx.short()).await?;
    same("the report", report.locks, Vec::new())?;
    let again = peer.client.shutdown(ctx.long()).await;
    fails("a second one", again, ErrorKind::ShuttingDown).map(drop)
}

async fn dropped_once_it_has_begun_it_goes_on(ctx: Ctx) -> Result {
    for polls in 0..4 {
        let ([peer], _, guard) = held(&ctx, Peer::short).await?;
        let grace = ctx.short() / 5;
        drop(polled(peer.client.shutdown(grace).into_future(), polls).await);
        let tried = peer.lock(&ctx.name()?)?.try_acquire().await;
        if polls == 0 {
            drop(tried?);
            stays_held(&ctx, "its state", &guard).await?;
            continue;
        }
        fails("try_acquire", tried, ErrorKind::ShuttingDown)?;
        is_lost(&ctx, "the grace ends", grace, &guard, LossReason::Shutdown).await?;
    }
    Ok(())
}

type Closing = Task<Result<ShutdownReport, dlock_core::Error>>;

/// Starts a shutdown.
fn shut_down(client: &Client, grace: Duration) -> Closing {
    Task::spawn(client.shutdown(grace).into_future())
}

/// The report of the shutdown.
async fn closed(ctx: &Ctx, closing: Closing, bound: Duration) -> Result<ShutdownReport> {
    Ok(closing.done(ctx, "the shutdown ends", bound).await??)
}
