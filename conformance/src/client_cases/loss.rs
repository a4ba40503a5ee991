//! `loss`: a holder learns in time that it lost the lock.

use super::{
    gate::{Fate, Step},
    peer::{
        EXPIRED, NOT_HELD, ONE_LEFT, Peer, fails, frees, held, is_lost, left_untouched, not_lost,
        stays_held,
    },
    task::{Task, polled},
};
use crate::{Caller, Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{ErrorKind, Guard, GuardState, Lock, LockName, LossReason};
use std::{
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
    after_a_pause_the_first_look_says_lost needs(Jump);
    an_answer_after_the_deadline_revives_nothing needs(Jump);
    work_is_dropped_the_moment_the_lock_is_lost;
    work_that_is_done_in_time_gives_its_result;
    doubt_comes_and_goes_and_loss_stays;
    a_broken_lock_is_lost_with_that_reason;
    a_fixed_lease_whose_record_is_gone_is_lost_within_a_third;
    a_dead_guard_does_not_share_in_its_owners_next_lock;
    a_living_guard_hears_that_its_owner_has_the_lock_anew;
    a_guard_is_lost_the_moment_its_owner_has_another_token;
    a_release_that_finds_nothing_says_lost;
    a_lost_guard_takes_nothing_from_the_next_holder;
}

async fn lost_resolves_before_another_gets_in_while_the_store_is_away(ctx: Ctx) -> Result {
    for fate in [Fate::ErrorBefore, Fate::Unsent, Fate::Barred] {
        let [peer, other] = Peer::several(&ctx).await?;
        let name = ctx.name()?;
        let before = ctx.now();
        let guard = Arc::new(peer.take(&peer.short(&name)?).await?);
        let after = ctx.now();
        if fate == Fate::Barred {
            peer.gate.bar();
        } else {
            peer.gate.all(fate);
        }
        let clock = ctx.clock().clone();
        let watched = Arc::clone(&guard);
        let watch = Task::spawn(async move { (watched.lost().await, clock.now()) });
        let next = other.gets(&name, ctx.short() * 2 + ctx.slack()).await?;
        let won = ctx.now();
        let state = EXPIRED;
        same(
            "the first one's state when the second is inside",
            guard.state(),
            state,
        )?;
        let (reason, heard) = watch.done(&ctx, "lost() resolves", ctx.answer()).await?;
        same("the reason", reason, LossReason::Deadline)?;
        ensure(heard <= won, "lost() resolved after the second got in")?;
        // A delay of a busy machine delays the waiter, too.
        let late = heard.since(after + ctx.short());
        ensure(
            late.is_zero() || !ctx.is_simulated(),
            format!("lost() resolved {late:?} after the deadline"),
        )?;
        ensure(
            heard.since(before) > ctx.short() / 2,
            "lost() resolved long before",
        )?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

async fn the_deadline_counts_from_before_the_request(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    // Half of what the acquire may take: a store that needs several commands has the other half.
    let slow = ctx.short() / 6;
    peer.gate.all(Fate::Slow(slow));
    peer.gate.always(Step::Renew, Fate::Unsent);
    let before = ctx.now();
    let guard = peer.take(&peer.short(&name)?).await?;
    ensure(
        ctx.now() + guard.remaining() <= before + ctx.short(),
        format!(
            "{:?} remain after {:?}",
            guard.remaining(),
            ctx.now().since(before)
        ),
    )?;
    let next = other.gets(&name, ctx.short() * 2).await?;
    let error = fails("the first one's check", guard.check(), ErrorKind::Lost)?;
    same("the reason", error.loss(), Some(LossReason::Deadline))?;
    frees(&ctx, next).await?;
    // A renewal counts like an acquire.
    let name = ctx.name()?;
    peer.gate.clear();
    let guard = peer.take(&peer.kept(&name)?).await?;
    // Less than half of what a renewal may take before it is given up.
    peer.gate.always(Step::Renew, Fate::Slow(ctx.kept() / 16));
    // The answer of the first renewal counts by the time that the second one is sent.
    ctx.until("it is renewed twice", ctx.kept() * 2, || {
        peer.gate.calls(Step::Renew) >= 2
    })
    .await?;
    not_lost(&guard)?;
    within_the_stores_end(&ctx, &observer, &guard).await
}

async fn what_remains_is_never_more_than_the_store_has(ctx: Ctx) -> Result {
    let observer = ctx.caller().await?;
    let ([peer], _, guard) = held(&ctx, Peer::kept).await?;
    let end = ctx.now() + ctx.kept() * 3;
    while ctx.now() < end {
        within_the_stores_end(&ctx, &observer, &guard).await?;
        ctx.time_passes(ctx.kept() / 20).await;
    }
    frees(&ctx, guard).await?;
    // When the hold is over nothing remains; the store may have lost it.
    let name = ctx.name()?;
    let guard = peer.take(&peer.fixed(&name)?).await?;
    guard.lost().await;
    left_untouched(&ctx, &observer, &name, ctx.short()).await?;
    within_the_stores_end(&ctx, &observer, &guard).await
}

/// Asked later, the store still has at least the time left minus the time passed.
pub(super) async fn within_the_stores_end(ctx: &Ctx, observer: &Caller, guard: &Guard) -> Result {
    let (remaining, before) = (guard.remaining(), ctx.now());
    let seen = observer.inspect(guard.name()).await?;
    let passed = ctx.now().since(before);
    let rest = match seen.holders.first() {
        Some(holder) => holder.rest,
        None => Some(Duration::ZERO),
    };
    // Where a hold ends with a session, no other party knows when that is.
    ensure(
        rest.is_none_or(|rest| rest + passed + ctx.rounding() >= remaining),
        format!("{remaining:?} remain, the store has {rest:?}, {passed:?} later"),
    )
}

async fn after_a_pause_the_first_look_says_lost(ctx: Ctx) -> Result {
    let lost = EXPIRED;
    for look in 0..6 {
        let ([peer], _, guard) = held(&ctx, Peer::short).await?;
        let calls = peer.gate.all_calls();
        // Nothing has run since: no task, no timer.
        ctx.clock().jump(ctx.short());
        match look {
            0 => same("state", guard.state(), lost)?,
            1 => drop(fails("check", guard.check(), ErrorKind::Lost)?),
            2 => same("what remains", guard.remaining(), Duration::ZERO)?,
            3 => same(
                "lost",
                polled(guard.lost(), 1).await,
                Some(LossReason::Deadline),
            )?,
            4 => {
                let started = AtomicBool::new(false);
                let work = async { started.store(true, SeqCst) };
                let ran = polled(guard.run(work), 1).await;
                let ran = ran.ok_or_else(|| Failure::new("run() waits"))?;
                fails("run", ran, ErrorKind::Lost)?;
                same("the work has started", started.load(SeqCst), false)?;
            }
            _ => {
                let work = async {
                    ctx.clock().jump(ctx.short());
                    "done"
                };
                let peer = Peer::new(&ctx).await?;
                let guard = peer.take(&peer.short(&ctx.name()?)?).await?;
                fails("run over a pause", guard.run(work).await, ErrorKind::Lost)?;
            }
        }
        same("the number of calls made", peer.gate.all_calls(), calls)?;
        same("its state afterwards", guard.state(), lost)?;
    }
    Ok(())
}

async fn an_answer_after_the_deadline_revives_nothing(ctx: Ctx) -> Result {
    let ([peer], _, guard) = held(&ctx, Peer::short).await?;
    // The renewal is in flight when the pause begins, and the store has prolonged the lease.
    peer.gate.always(Step::Renew, Fate::Slow(ctx.short() / 8));
    ctx.until("it is renewed", ctx.short(), || {
        peer.gate.calls(Step::Renew) > 0
    })
    .await?;
    ctx.clock().jump(ctx.short() * 7 / 10);
    let lost = EXPIRED;
    same("its state after the pause", guard.state(), lost)?;
    peer.gate.clear();
    ctx.would_show_within(ctx.short() / 4).await;
    same("its state when the answer has come", guard.state(), lost)?;
    let polled = polled(guard.lost(), 1).await;
    same("lost", polled, Some(LossReason::Deadline))
}

async fn work_is_dropped_the_moment_the_lock_is_lost(ctx: Ctx) -> Result {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let ([peer, other], name, guard) = held(&ctx, Peer::short).await?;
    peer.gate.all(Fate::Unsent);
    let dropped = Arc::new(AtomicBool::new(false));
    let inside = Dropped(Arc::clone(&dropped));
    let running = Task::spawn(async move {
        let ran = guard.run(async move {
            let _inside = inside;
            std::future::pending::<()>().await;
        });
        let ran = ran.await;
        (ran, guard)
    });
    let next = other.gets(&name, ctx.short() * 2 + ctx.slack()).await?;
    same(
        "the work is dropped when the next one is inside",
        dropped.load(SeqCst),
        true,
    )?;
    let (ran, guard) = running.done(&ctx, "run() ends", ctx.answer()).await?;
    fails("run", ran, ErrorKind::Lost)?;
    drop(guard);
    frees(&ctx, next).await
}

async fn work_that_is_done_in_time_gives_its_result(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let guard = peer.take(&peer.kept(&ctx.name()?)?).await?;
    let work = async {
        ctx.time_passes(ctx.kept() * 2).await;
        7
    };
    same("what the work gives", guard.run(work).await?, 7)?;
    frees(&ctx, guard).await
}

async fn doubt_comes_and_goes_and_loss_stays(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let guard = peer.take(&peer.kept(&ctx.name()?)?).await?;
    stays_held(&ctx, "its state at first", &guard).await?;
    peer.gate.always(Step::Renew, Fate::ErrorBefore);
    let bound = ctx.kept() / 2;
    let is = |state| move || async move { Ok(state) };
    let doubted = || is(guard.state() == GuardState::Uncertain)();
    ctx.eventually("a failed renewal is a doubt", bound, doubted)
        .await?;
    guard.check()?;
    peer.gate.clear();
    let held = || is(guard.state() == GuardState::Held)();
    ctx.eventually("a renewal ends the doubt", bound, held)
        .await?;
    // A renewal that is not answered in time is a doubt, too.
    peer.gate.always(Step::Renew, Fate::Unsent);
    let overdue = || is(guard.state() == GuardState::Uncertain)();
    ctx.eventually("an overdue renewal is a doubt", ctx.kept() * 2 / 3, overdue)
        .await?;
    is_lost(
        &ctx,
        "the doubt ends with the lease",
        ctx.kept(),
        &guard,
        LossReason::Deadline,
    )
    .await?;
    peer.gate.clear();
    ctx.would_show_within(ctx.kept()).await;
    same("its state", guard.state(), EXPIRED)
}

async fn a_broken_lock_is_lost_with_that_reason(ctx: Ctx) -> Result {
    broken(&ctx, Peer::short).await
}

/// A fixed lease is checked as often as a renewed one is renewed; so is a lease that already lasts
/// until its maximum hold.
async fn a_fixed_lease_whose_record_is_gone_is_lost_within_a_third(ctx: Ctx) -> Result {
    broken(&ctx, Peer::fixed).await?;
    broken(&ctx, |peer, name| {
        Ok(peer.short(name)?.max_hold(ctx.short()))
    })
    .await
}

/// A lock that is broken and acquired by another client is lost to its holder a third of its lease
/// later.
async fn broken(ctx: &Ctx, lock: impl Fn(&Peer, &LockName) -> Result<Lock>) -> Result {
    let [peer, other] = Peer::several(ctx).await?;
    let name = ctx.name()?;
    let guard = peer.take(&lock(&peer, &name)?).await?;
    other
        .client
        .admin()
        .break_lock(name.as_str(), Some(guard.token()))
        .await?;
    let next = other.take(&other.lock(&name)?).await?;
    is_lost(
        ctx,
        "it is lost at its next renewal or proof",
        ctx.short() / 2,
        &guard,
        LossReason::NotHeld,
    )
    .await?;
    let error = fails("release", guard.release().await, ErrorKind::Lost)?;
    same(
        "the reason of the error",
        error.loss(),
        Some(LossReason::NotHeld),
    )?;
    stays_held(ctx, "the next one's state", &next).await?;
    frees(ctx, next).await
}

async fn a_dead_guard_does_not_share_in_its_owners_next_lock(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let dead = peer.take(&peer.short(&name)?.with_owner(&owner)).await?;
    peer.gate.freeze();
    let again = other.kept(&name)?.with_owner(&owner);
    is_lost(&ctx, "it is lost", ctx.short(), &dead, LossReason::Deadline).await?;
    ctx.time_passes(ctx.slack()).await;
    let living = other.take(&again).await?;
    ensure(
        living.token() > dead.token(),
        "a new incarnation has a greater token",
    )?;
    peer.gate.thaw();
    ctx.would_show_within(ctx.short()).await;
    same("the dead one's state", dead.state(), EXPIRED)?;
    fails(
        "the dead one's release",
        dead.release().await,
        ErrorKind::Lost,
    )?;
    peer.settles(ctx.answer()).await?;
    stays_held(&ctx, "the living one's state", &living).await?;
    frees(&ctx, living).await
}

async fn a_living_guard_hears_that_its_owner_has_the_lock_anew(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let owner = peer.client.owner();
    let old = peer.take(&peer.short(&name)?.with_owner(&owner)).await?;
    other.breaks(&name).await?;
    let new = other.take(&other.kept(&name)?.with_owner(&owner)).await?;
    is_lost(
        &ctx,
        "the old one is lost at its next renewal",
        ctx.short() / 2,
        &old,
        LossReason::NotHeld,
    )
    .await?;
    drop(old);
    ctx.would_show_within(ctx.short()).await;
    stays_held(&ctx, "the new one's state", &new).await?;
    frees(&ctx, new).await
}

/// Two acquisitions of one owner with answers from two incarnations; neither knew of the other when it
/// was sent.
async fn a_guard_is_lost_the_moment_its_owner_has_another_token(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let name = ctx.name()?;
    let lock = peer.lock(&name)?.with_owner(&peer.client.owner());
    peer.gate.bar();
    let barred = Task::spawn(lock.acquire());
    ctx.until("it asks", ctx.answer(), || {
        peer.gate.calls(Step::Acquire) > 0
    })
    .await?;
    peer.gate.all(Fate::Ok);
    let old = peer.take(&lock).await?;
    other.breaks(&name).await?;
    peer.gate.open();
    let new = barred
        .done(&ctx, "the barred one is answered", ctx.answer())
        .await??;
    ensure(new.token() > old.token(), "a greater token")?;
    let lost = NOT_HELD;
    same("the old one's state at once", old.state(), lost)?;
    drop(old);
    peer.settles(ctx.answer()).await?;
    stays_held(&ctx, "the new one's state", &new).await?;
    frees(&ctx, new).await?;
    // The reverse: the answer of the older incarnation comes last, and makes no guard.
    let observer = ctx.caller().await?;
    let slow = Fate::Slow(Duration::from_secs(1));
    peer.gate.once(Step::Acquire, slow);
    let slow = Task::spawn(lock.acquire());
    let taken = || async { Ok(observer.inspect(&name).await?.holds > 0) };
    ctx.eventually("the store has it", ctx.answer(), taken)
        .await?;
    other.breaks(&name).await?;
    let new = peer.take(&lock).await?;
    let again = slow
        .done(&ctx, "the slow one gets in", ctx.answer())
        .await??;
    same("the token of who asked first", again.token(), new.token())?;
    stays_held(&ctx, "the new one's state", &new).await?;
    let outcome = again.release().await?;
    same("its release", outcome, ONE_LEFT)?;
    frees(&ctx, new).await
}

async fn a_release_that_finds_nothing_says_lost(ctx: Ctx) -> Result {
    let ([_peer, other], name, guard) = held(&ctx, Peer::lock).await?;
    other.breaks(&name).await?;
    let error = fails("release", guard.release().await, ErrorKind::Lost)?;
    same("the reason", error.loss(), Some(LossReason::NotHeld))
}

async fn a_lost_guard_takes_nothing_from_the_next_holder(ctx: Ctx) -> Result {
    for releases in [true, false] {
        let ([peer, other], name, guard) = held(&ctx, Peer::fixed).await?;
        let next = other
            .kept(&name)?
            .acquire_timeout(ctx.short() * 2 + ctx.slack());
        let next = next.await?;
        if releases {
            fails("release", guard.release().await, ErrorKind::Lost)?;
        } else {
            drop(guard);
        }
        peer.settles(ctx.answer()).await?;
        // At its next renewal.
        ctx.would_show_within(ctx.kept() / 2).await;
        stays_held(&ctx, "the next one's state", &next).await?;
        frees(&ctx, next).await?;
    }
    Ok(())
}
