//! `loss`: a holder learns in time that it lost the lock.

use super::{
    gated_driver::{CallOutcome, Step},
    task::polled,
    test_client::{
        EXPIRED, NOT_HELD, ONE_LEFT, TestClient, fails, frees, held, is_lost, not_lost, stays_held,
    },
    test_lock::TestLock,
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{Error, ErrorKind, Guard, GuardState, LockName, LossReason};
use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

cases! {
    [Clause::Loss]
    lost_resolves_before_another_gets_in_while_the_store_is_away;
    the_deadline_counts_from_before_the_request;
    what_remains_is_never_more_than_the_store_has;
    after_a_pause_the_first_check_says_lost needs(Jump);
    work_is_dropped_the_moment_the_lock_is_lost;
    work_that_is_done_in_time_gives_its_result;
    doubt_comes_and_goes_and_loss_stays;
    a_fixed_lease_whose_record_is_gone_is_lost_within_a_third;
    a_dead_guard_does_not_share_in_its_owners_next_lock;
    a_living_guard_hears_that_its_owner_has_the_lock_anew;
    a_guard_is_lost_the_moment_its_owner_has_another_token;
    a_release_that_finds_nothing_says_lost;
    a_lost_guard_takes_nothing_from_the_next_holder;
}

async fn lost_resolves_before_another_gets_in_while_the_store_is_away(ctx: Ctx) -> Result {
    for outcome in [
        CallOutcome::ErrorBefore,
        CallOutcome::Unsent,
        CallOutcome::Barred,
    ] {
        let ([client, other], name) = TestClient::several(&ctx).await?;
        let before = ctx.now();
        let guard = Arc::new(client.take(&client.short(&name)?).await?);
        let after = ctx.now();
        client.gate.all(outcome);
        let (clock, watched) = (ctx.clock().clone(), Arc::clone(&guard));
        let watch = ctx.spawn(async move { (watched.lost().await, clock.now()) });
        let next = other.gets(&name, ctx.short() * 2 + ctx.slack()).await?;
        let won = ctx.now();
        same("the state once another is inside", guard.state(), EXPIRED)?;
        let (reason, heard) = watch.done(ctx.answer()).await?;
        same("the reason", reason, LossReason::Deadline)?;
        ctx.has_done(heard <= won, "lost() resolved after the second got in")?;
        // A delay of a busy machine delays the waiter, too.
        let late = heard.since(after + ctx.short());
        let in_time = late.is_zero() || !ctx.is_simulated();
        ensure(in_time, format!("lost() was {late:?} late"))?;
        let early = heard.since(before) <= ctx.short() / 2;
        ensure(!early, "lost() resolved long before")?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn the_deadline_counts_from_before_the_request(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    // Half of what the acquire may take: a store that needs several commands has the other half.
    let slow = ctx.short() / 6;
    client.gate.all(CallOutcome::Slow(slow));
    client.gate.always(Step::Renew, CallOutcome::Unsent);
    let before = ctx.now();
    let guard = client.take(&client.short(&name)?).await?;
    let (rest, end) = (guard.remaining(), before + ctx.short());
    ensure(ctx.now() + rest <= end, format!("{rest:?} remain"))?;
    let next = other.gets(&name, ctx.short() * 2).await?;
    let error = fails(ErrorKind::Lost, guard.check())?;
    same("the reason", error.loss(), Some(LossReason::Deadline))?;
    frees(&ctx, next).await?;
    // A renewal counts like an acquire.
    let name = ctx.name()?;
    client.gate.clear();
    let guard = client.take(&client.kept(&name)?).await?;
    // Less than half of what a renewal may take before it is given up.
    let slow = CallOutcome::Slow(ctx.kept() / 16);
    client.gate.always(Step::Renew, slow);
    // The answer of the first renewal counts by the time that the second one is sent.
    let renewals = client.gate.calls(Step::Renew);
    client.sends(Step::Renew, renewals + 2).await?;
    not_lost(&guard)?;
    within_the_stores_end(&ctx, &guard).await
}

async fn what_remains_is_never_more_than_the_store_has(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
    let end = ctx.now() + ctx.kept() * 3;
    while ctx.now() < end {
        within_the_stores_end(&ctx, &guard).await?;
        ctx.time_passes(ctx.kept() / 20).await;
    }
    frees(&ctx, guard).await?;
    // When the hold is over nothing remains; the store may have lost it. A fixed lease was checked
    // meanwhile, which prolongs nothing.
    let (name, begun) = (ctx.name()?, ctx.now());
    let guard = client.take(&client.fixed(&name)?).await?;
    is_lost(&ctx, &guard, LossReason::Deadline, ctx.short()).await?;
    let early = ctx.now() <= begun + ctx.short() * 9 / 10;
    ensure(!early, "it ended early")?;
    ctx.left_untouched(&name, ctx.short() / 10).await?;
    within_the_stores_end(&ctx, &guard).await
}

/// Asked later, the store still has at least the time left minus the time passed.
pub(super) async fn within_the_stores_end(ctx: &Ctx, guard: &Guard) -> Result {
    let observer = ctx.observer().await?;
    let (remaining, before) = (guard.remaining(), ctx.now());
    let seen = observer.inspect(guard.name()).await?;
    let passed = ctx.now().since(before);
    let holder = seen.holders.first();
    // Where a hold ends with a session, no other party knows when that is.
    let rest = holder.map_or(Some(Duration::ZERO), |holder| holder.rest);
    ensure(
        rest.is_none_or(|rest| rest + passed + ctx.rounding() >= remaining),
        format!("{remaining:?} remain, the store has {rest:?}, {passed:?} later"),
    )
}

async fn after_a_pause_the_first_check_says_lost(ctx: Ctx) -> Result {
    for look in 0..6 {
        let ([client], _, guard) = held(&ctx, TestClient::short).await?;
        let calls = client.gate.all_calls();
        // Nothing has run since: no task, no timer.
        let pause = || ctx.clock().jump(ctx.short());
        if look < 5 {
            pause();
        }
        match look {
            0 => same("state", guard.state(), EXPIRED)?,
            1 => drop(fails(ErrorKind::Lost, guard.check())?),
            2 => same("what remains", guard.remaining(), Duration::ZERO)?,
            3 => {
                let lost = polled(guard.lost(), 1).await;
                same("lost", lost, Some(LossReason::Deadline))?;
            }
            4 => {
                let started = AtomicBool::new(false);
                let work = async { started.store(true, SeqCst) };
                let ran = polled(guard.run(work), 1).await;
                let ran = ran.ok_or_else(|| Failure::new("run() waits"))?;
                fails(ErrorKind::Lost, ran)?;
                same("the work has started", started.load(SeqCst), false)?;
            }
            _ => drop(fails(ErrorKind::Lost, guard.run(async { pause() }).await)?),
        }
        same("the number of calls made", client.gate.all_calls(), calls)?;
        same("its state afterwards", guard.state(), EXPIRED)?;
    }
    Ok(())
}

async fn work_is_dropped_the_moment_the_lock_is_lost(ctx: Ctx) -> Result {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let ([client, other], name, guard) = held(&ctx, TestClient::short).await?;
    client.gate.all(CallOutcome::Unsent);
    let dropped = Arc::new(AtomicBool::new(false));
    let inside = Dropped(Arc::clone(&dropped));
    let running = ctx.spawn(async move {
        let work = async move {
            let _inside = inside;
            pending::<()>().await;
        };
        let ran = guard.run(work).await;
        (ran, guard)
    });
    let next = other.gets(&name, ctx.short() * 2 + ctx.slack()).await?;
    let ended = dropped.load(SeqCst);
    ctx.has_done(ended, "the work ran on when another was inside")?;
    let (ran, guard) = running.done(ctx.answer()).await?;
    fails(ErrorKind::Lost, ran)?;
    drop(guard);
    frees(&ctx, next).await
}

async fn work_that_is_done_in_time_gives_its_result(ctx: Ctx) -> Result {
    let ([_client], _, guard) = held(&ctx, TestClient::kept).await?;
    let work = async {
        ctx.time_passes(ctx.kept() * 2).await;
        7
    };
    same("what the work gives", guard.run(work).await?, 7)?;
    frees(&ctx, guard).await
}

async fn doubt_comes_and_goes_and_loss_stays(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
    stays_held(&ctx, &guard).await?;
    client.gate.always(Step::Renew, CallOutcome::ErrorBefore);
    let bound = ctx.kept() / 2;
    let doubted = || guard.state() == GuardState::Uncertain;
    ctx.until("a failed renewal is a doubt", bound, doubted)
        .await?;
    guard.check()?;
    client.gate.clear();
    let held = || guard.state() == GuardState::Held;
    ctx.until("a renewal ends the doubt", bound, held).await?;
    // A renewal that is not answered in time is a doubt, too.
    client.gate.always(Step::Renew, CallOutcome::Unsent);
    let bound = ctx.kept() * 2 / 3;
    ctx.until("an overdue renewal is a doubt", bound, doubted)
        .await?;
    is_lost(&ctx, &guard, LossReason::Deadline, ctx.kept()).await?;
    client.gate.clear();
    ctx.would_show_within(ctx.kept()).await;
    same("its state", guard.state(), EXPIRED)
}

/// A fixed lease is checked as often as a renewed one is renewed; so is a lease that already lasts
/// until its maximum hold. After the loss nothing is renewed or checked.
async fn a_fixed_lease_whose_record_is_gone_is_lost_within_a_third(ctx: Ctx) -> Result {
    broken(&ctx, TestClient::short).await?;
    broken(&ctx, TestClient::fixed).await?;
    let longest =
        |client: &TestClient, name: &LockName| Ok(client.short(name)?.max_hold(ctx.short()));
    broken(&ctx, longest).await
}

/// A lock that is broken and acquired by another client is lost to its holder a third of its lease
/// later.
async fn broken(ctx: &Ctx, lock: impl Fn(&TestClient, &LockName) -> Result<TestLock>) -> Result {
    let ([client, other], name) = TestClient::several(ctx).await?;
    let guard = client.take(&lock(&client, &name)?).await?;
    other.breaks(&name, Some(guard.token())).await?;
    let next = other.acquire(&name).await?;
    is_lost(ctx, &guard, LossReason::NotHeld, ctx.short() / 2).await?;
    let renewals = client.gate.calls(Step::Renew);
    ctx.would_show_within(ctx.short()).await;
    let after = client.gate.calls(Step::Renew);
    same("the number of renewals a lease later", after, renewals)?;
    finds_nothing(guard.release().await)?;
    stays_held(ctx, &next).await?;
    frees(ctx, next).await
}

/// A release says that the store had lost the hold.
fn finds_nothing<T>(released: Result<T, Error>) -> Result {
    let error = fails(ErrorKind::Lost, released)?;
    same("the reason", error.loss(), Some(LossReason::NotHeld))
}

async fn a_dead_guard_does_not_share_in_its_owners_next_lock(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let owner = client.inner.owner();
    let dead = client
        .take(&client.short(&name)?.with_owner(&owner))
        .await?;
    client.gate.freeze();
    let again = other.kept(&name)?.with_owner(&owner);
    is_lost(&ctx, &dead, LossReason::Deadline, ctx.short()).await?;
    ctx.time_passes(ctx.slack()).await;
    let living = other.take(&again).await?;
    ensure(
        living.token() > dead.token(),
        "a new incarnation is greater",
    )?;
    client.gate.thaw();
    ctx.would_show_within(ctx.short()).await;
    same("the dead one's state", dead.state(), EXPIRED)?;
    fails(ErrorKind::Lost, dead.release().await)?;
    client.cleans_up(ctx.answer()).await?;
    stays_held(&ctx, &living).await?;
    frees(&ctx, living).await
}

async fn a_living_guard_hears_that_its_owner_has_the_lock_anew(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let owner = client.inner.owner();
    let old = client
        .take(&client.short(&name)?.with_owner(&owner))
        .await?;
    other.breaks(&name, None).await?;
    let new = other.take(&other.kept(&name)?.with_owner(&owner)).await?;
    is_lost(&ctx, &old, LossReason::NotHeld, ctx.short() / 2).await?;
    drop(old);
    ctx.would_show_within(ctx.short()).await;
    stays_held(&ctx, &new).await?;
    frees(&ctx, new).await
}

/// Two acquisitions of one owner with answers from two incarnations; neither knew of the other when it
/// was sent.
async fn a_guard_is_lost_the_moment_its_owner_has_another_token(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let lock = client.lock(&name)?.with_owner(&client.inner.owner());
    client.gate.all(CallOutcome::Barred);
    let barred = ctx.spawn(lock.acquire());
    client.sends(Step::Acquire, 1).await?;
    client.gate.all(CallOutcome::Ok);
    let old = client.take(&lock).await?;
    other.breaks(&name, None).await?;
    client.gate.open();
    let new = barred.done(ctx.answer()).await??;
    ensure(new.token() > old.token(), "a greater token")?;
    same("the old one's state at once", old.state(), NOT_HELD)?;
    drop(old);
    client.cleans_up(ctx.answer()).await?;
    stays_held(&ctx, &new).await?;
    frees(&ctx, new).await?;
    // The reverse: the answer of the older incarnation comes last, and makes no guard.
    client.gate.once(Step::Acquire, CallOutcome::Withheld);
    let slow = ctx.spawn(lock.acquire());
    ctx.until_granted(&name).await?;
    other.breaks(&name, None).await?;
    let new = client.take(&lock).await?;
    client.gate.open();
    let again = slow.done(ctx.answer()).await??;
    same("the token of who asked first", again.token(), new.token())?;
    stays_held(&ctx, &new).await?;
    same("its release", again.release().await?, ONE_LEFT)?;
    frees(&ctx, new).await
}

async fn a_release_that_finds_nothing_says_lost(ctx: Ctx) -> Result {
    let ([_client, other], name, guard) = held(&ctx, TestClient::lock).await?;
    other.breaks(&name, None).await?;
    finds_nothing(guard.release().await)
}

async fn a_lost_guard_takes_nothing_from_the_next_holder(ctx: Ctx) -> Result {
    for releases in [true, false] {
        let ([client, other], name, guard) = held(&ctx, TestClient::fixed).await?;
        let limit = ctx.short() * 2 + ctx.slack();
        let next = other.kept(&name)?.acquire_timeout(limit).await?;
        if releases {
            fails(ErrorKind::Lost, guard.release().await)?;
        } else {
            drop(guard);
        }
        client.cleans_up(ctx.answer()).await?;
        // At its next renewal.
        ctx.would_show_within(ctx.kept() / 2).await;
        stays_held(&ctx, &next).await?;
        frees(&ctx, next).await?;
    }
    Ok(())
}
