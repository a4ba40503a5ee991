//! `renew`: the watchdog renews held locks, and nothing else.

use super::{
    gate::{Fate, Step},
    loss::within_the_stores_end,
    peer::{EXPIRED, Peer, frees, held, is_lost, left_untouched, not_lost, stays_held},
};
use crate::{Ctx, Failure, Result, case::cases, ensure, same};
use dlock_core::{
    Guard, GuardState, Lease, LossReason,
    driver::{Lane, Release},
};
use tokio::sync::Mutex;

cases! {
    [Clause::Renew]
    a_kept_lock_is_kept_past_many_leases;
    a_fixed_lease_is_never_renewed;
    one_failed_renewal_is_not_the_end;
    a_store_away_for_most_of_a_lease_costs_nothing;
    a_lock_that_was_hard_to_get_is_renewed_before_its_deadline;
    a_renewal_answered_after_its_give_up_counts_from_its_send;
    nothing_renews_after_a_release;
    nothing_renews_after_a_loss;
    a_stalled_lane_delays_no_other;
    each_lock_of_a_batch_is_judged_alone;
    many_locks_are_renewed_by_few_calls;
}

async fn a_kept_lock_is_kept_past_many_leases(ctx: Ctx) -> Result {
    let ([_peer, other], name, guard) = held(&ctx, Peer::kept).await?;
    let leases = if ctx.is_simulated() { 20 } else { 3 };
    let end = ctx.now() + ctx.kept() * leases;
    while ctx.now() < end {
        ctx.time_passes(ctx.kept() / 5).await;
        stays_held(&ctx, "its state", &guard).await?;
        other.refused(&other.lock(&name)?).await?;
    }
    frees(&ctx, guard).await
}

async fn a_fixed_lease_is_never_renewed(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let observer = ctx.caller().await?;
    let name = ctx.name()?;
    let before = ctx.now();
    let guard = peer.take(&peer.fixed(&name)?).await?;
    is_lost(
        &ctx,
        "a fixed lease ends",
        ctx.short(),
        &guard,
        LossReason::Deadline,
    )
    .await?;
    ensure(ctx.now() > before + ctx.short() * 9 / 10, "it ended early")?;
    // The lease was checked meanwhile, which prolongs nothing.
    left_untouched(&ctx, &observer, &name, ctx.short() / 10).await
}

async fn one_failed_renewal_is_not_the_end(ctx: Ctx) -> Result {
    for fate in [
        Fate::ErrorBefore,
        Fate::ErrorAfter,
        Fate::Never,
        Fate::Unsent,
    ] {
        let ([peer], _, guard) = held(&ctx, Peer::kept).await?;
        peer.gate.once(Step::Renew, fate);
        ctx.time_passes(ctx.kept() * 2).await;
        stays_held(&ctx, &format!("after {fate:?}"), &guard).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

async fn a_store_away_for_most_of_a_lease_costs_nothing(ctx: Ctx) -> Result {
    // A machine shared with other tests may sleep through a tenth of a short lease.
    let lease = ctx.kept();
    let away = if ctx.is_simulated() {
        lease * 9 / 10
    } else {
        lease * 3 / 4
    };
    for barred in [false, true] {
        let peer = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        let guard = peer
            .take(&peer.lock(&name)?.lease(Lease::renewed(lease)))
            .await?;
        renewed_once(&ctx, &guard).await?;
        if barred {
            peer.gate.bar();
        } else {
            peer.gate.all(Fate::ErrorBefore);
        }
        if ctx.is_session_bound() {
            // The time for which a session is certain is less than a lease, and varies.
            ctx.until("it is in doubt", away, || {
                guard.state() == GuardState::Uncertain
            })
            .await?;
        } else {
            ctx.time_passes(away).await;
        }
        not_lost(&guard)?;
        same(
            "its state while it cannot be renewed",
            guard.state(),
            GuardState::Uncertain,
        )?;
        peer.gate.clear();
        ctx.time_passes(lease).await;
        stays_held(&ctx, "its state afterwards", &guard).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

/// Two attempts of a third of the lease each went unanswered; the third one finds a third of the lease
/// left.
async fn a_lock_that_was_hard_to_get_is_renewed_before_its_deadline(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.once(Step::Acquire, Fate::Never);
    peer.gate.once(Step::Acquire, Fate::Never);
    let lock = peer.kept(&name)?;
    let acquiring = ctx.within("the third attempt is answered", ctx.kept(), lock.acquire());
    let guard = acquiring.await??;
    ensure(
        guard.remaining() < ctx.kept() / 2,
        format!("{:?} are left of it", guard.remaining()),
    )?;
    ctx.time_passes(ctx.kept()).await;
    stays_held(&ctx, "its state a lease later", &guard).await?;
    frees(&ctx, guard).await
}

/// Each renewal is given up after a sixth of the lease, and its answer comes well before the deadline.
async fn a_renewal_answered_after_its_give_up_counts_from_its_send(ctx: Ctx) -> Result {
    let ([peer], _, guard) = held(&ctx, Peer::kept).await?;
    let observer = ctx.caller().await?;
    let slow = ctx.promised(ctx.kept()) / 2;
    peer.gate.always(Step::Renew, Fate::Slow(slow));
    let end = ctx.now() + ctx.kept() * 3;
    while ctx.now() < end {
        not_lost(&guard)?;
        within_the_stores_end(&ctx, &observer, &guard).await?;
        ctx.time_passes(ctx.kept() / 20).await;
    }
    peer.gate.clear();
    frees(&ctx, guard).await
}

async fn nothing_renews_after_a_release(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let observer = ctx.caller().await?;
    for (drops, late) in [(false, false), (true, false), (false, true)] {
        let name = ctx.name()?;
        let guard = peer.take(&peer.kept(&name)?).await?;
        renewed_once(&ctx, &guard).await?;
        if late {
            // This one reaches the store when the lock has long been free.
            let renewals = peer.gate.seen(Step::Renew, &name).len();
            peer.gate.once(Step::Renew, Fate::Mute(ctx.kept() / 6));
            ctx.until("it is renewed again", ctx.kept(), || {
                peer.gate.seen(Step::Renew, &name).len() > renewals
            })
            .await?;
        }
        if drops {
            drop(guard);
        } else {
            frees(&ctx, guard).await?;
        }
        let renewals = peer.gate.seen(Step::Renew, &name).len();
        left_untouched(&ctx, &observer, &name, ctx.answer()).await?;
        ctx.would_show_within(ctx.kept()).await;
        let after = peer.gate.seen(Step::Renew, &name).len();
        same("the number of renewals a lease later", after, renewals)?;
        observer.sees_free(&name).await?;
    }
    Ok(())
}

async fn nothing_renews_after_a_loss(ctx: Ctx) -> Result {
    let ([peer, other], name, guard) = held(&ctx, Peer::short).await?;
    let observer = ctx.caller().await?;
    other.breaks(&name).await?;
    is_lost(
        &ctx,
        "it is lost at its next renewal",
        ctx.short(),
        &guard,
        LossReason::NotHeld,
    )
    .await?;
    let renewals = peer.gate.calls(Step::Renew);
    ctx.would_show_within(ctx.short()).await;
    same(
        "the number of renewals",
        peer.gate.calls(Step::Renew),
        renewals,
    )?;
    observer.sees_free(&name).await
}

async fn a_stalled_lane_delays_no_other(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let (stalled, lively) = (ctx.name()?, ctx.name()?);
    peer.gate.set_lane(&stalled, Lane(1_000_001));
    peer.gate.set_lane(&lively, Lane(1_000_002));
    let in_vain = peer.take(&peer.kept(&stalled)?).await?;
    let kept = peer.take(&peer.kept(&lively)?).await?;
    peer.gate.stall(Lane(1_000_001));
    let end = ctx.now() + ctx.kept() * 2;
    while ctx.now() < end {
        stays_held(&ctx, "the state of the other lane's", &kept).await?;
        ctx.time_passes(ctx.kept() / 50).await;
    }
    let lost = EXPIRED;
    same("the state of the stalled one", in_vain.state(), lost)?;
    for seen in peer.gate.seen(Step::Renew, &lively) {
        same("the lane it is renewed in", seen.lane, Lane(1_000_002))?;
    }
    frees(&ctx, kept).await
}

async fn each_lock_of_a_batch_is_judged_alone(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let observer = ctx.caller().await?;
    let names = ctx.names_of_one_lane(&*peer.gate, 3)?;
    let mut guards = Vec::new();
    for name in &names {
        guards.push(peer.take(&peer.kept(name)?).await?);
    }
    observer.breaks(&names[0], None).await?;
    // Released without its guard: the store has lost the hold, as after a lapse.
    let pass = guards[1].pass()?;
    let hold = peer.gate.seen(Step::Acquire, &names[1]);
    let hold = hold.first().and_then(|seen| seen.hold);
    let hold = hold.ok_or_else(|| Failure::new("BUG: it was acquired"))?;
    let behind = Release::new(names[1].clone(), *pass.owner(), hold);
    observer.release_as(&behind).await?;
    for gone in &guards[..2] {
        is_lost(
            &ctx,
            "it is lost at its next renewal",
            ctx.kept(),
            gone,
            LossReason::NotHeld,
        )
        .await?;
    }
    ctx.time_passes(ctx.kept() * 2).await;
    stays_held(&ctx, "the state of the third", &guards[2]).await?;
    for name in &names[..2] {
        observer.sees_free(name).await?;
    }
    Ok(())
}

async fn many_locks_are_renewed_by_few_calls(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let names = ctx.names_of_one_lane(&*peer.gate, 40)?;
    let mut guards = Vec::new();
    for name in &names {
        guards.push(peer.take(&peer.kept(name)?).await?);
    }
    let renewals = || {
        names
            .iter()
            .map(|name| peer.gate.seen(Step::Renew, name).len())
    };
    ctx.until("each is renewed thrice", ctx.kept() * 2, || {
        renewals().all(|renewals| renewals >= 3)
    })
    .await?;
    let (calls, rounds) = (peer.gate.calls(Step::Renew), renewals().max().unwrap_or(0));
    // One batch a round; a busy machine may split a round into several.
    let most = rounds * if ctx.is_simulated() { 2 } else { 8 };
    ensure(
        calls <= most,
        format!(
            "{} locks were renewed {rounds} times by {calls} calls",
            names.len()
        ),
    )?;
    guards.iter().try_for_each(not_lost)
}

/// Waits for a successful renewal: only that increases the time left.
async fn renewed_once(ctx: &Ctx, guard: &Guard) -> Result {
    let last = Mutex::new(guard.remaining());
    let renewed = || async {
        let mut last = last.lock().await;
        let before = std::mem::replace(&mut *last, guard.remaining());
        Ok(*last > before)
    };
    ctx.eventually("it is renewed", ctx.kept() * 2, renewed)
        .await
}
