//! `renew`: the watchdog renews held locks, and nothing else.

use super::{
    gated_driver::{CallOutcome, Step},
    loss::within_the_stores_end,
    test_client::{TestClient, ends, frees, held, not_lost, stays_held},
};
use crate::{Ctx, Result, case::cases, same};
use dlock_core::{Guard, GuardState};
use tokio::sync::Mutex;

cases! {
    [Clause::Renew]
    a_kept_lock_is_kept_past_many_leases;
    one_failed_renewal_is_not_the_end;
    a_store_away_for_most_of_a_lease_costs_nothing;
    a_renewal_answered_after_its_give_up_counts_from_its_send;
    nothing_renews_after_a_release;
}

async fn a_kept_lock_is_kept_past_many_leases(ctx: Ctx) -> Result {
    let ([_client, other], name, guard) = held(&ctx, TestClient::kept).await?;
    let leases = if ctx.is_simulated() { 20 } else { 3 };
    let end = ctx.now() + ctx.kept() * leases;
    while ctx.now() < end {
        ctx.time_passes(ctx.kept() / 5).await;
        stays_held(&ctx, &guard).await?;
        other.refused(&name).await?;
    }
    frees(&ctx, guard).await
}

/// The `indeterminate` cases try those whose answer is lost.
async fn one_failed_renewal_is_not_the_end(ctx: Ctx) -> Result {
    for outcome in [CallOutcome::ErrorBefore, CallOutcome::Unsent] {
        let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
        client.gate.once(Step::Renew, outcome);
        ctx.time_passes(ctx.kept() * 2).await;
        stays_held(&ctx, &guard).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

async fn a_store_away_for_most_of_a_lease_costs_nothing(ctx: Ctx) -> Result {
    // A machine shared with other tests may sleep through a tenth of a short lease.
    let away = if ctx.is_simulated() {
        ctx.kept() * 9 / 10
    } else {
        ctx.kept() * 3 / 4
    };
    for outcome in [CallOutcome::ErrorBefore, CallOutcome::Barred] {
        let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
        renewed_once(&ctx, &guard).await?;
        client.gate.all(outcome);
        let in_doubt = || guard.state() == GuardState::Uncertain;
        if ctx.is_session_bound() {
            // The time for which a session is certain is less than a lease, and varies.
            ctx.until("it is in doubt", away, in_doubt).await?;
        } else {
            ctx.time_passes(away).await;
        }
        not_lost(&guard)?;
        same("it is in doubt", in_doubt(), true)?;
        client.gate.clear();
        ctx.time_passes(ctx.kept()).await;
        stays_held(&ctx, &guard).await?;
        frees(&ctx, guard).await?;
    }
    Ok(())
}

/// Each renewal is given up after a sixth of the lease, and its answer comes well before the deadline.
async fn a_renewal_answered_after_its_give_up_counts_from_its_send(ctx: Ctx) -> Result {
    let ([client], _, guard) = held(&ctx, TestClient::kept).await?;
    let slow = ctx.promised(ctx.kept()) / 2;
    client.gate.always(Step::Renew, CallOutcome::Slow(slow));
    let end = ctx.now() + ctx.kept() * 3;
    while ctx.now() < end {
        not_lost(&guard)?;
        within_the_stores_end(&ctx, &guard).await?;
        ctx.time_passes(ctx.kept() / 20).await;
    }
    client.gate.clear();
    frees(&ctx, guard).await
}

async fn nothing_renews_after_a_release(ctx: Ctx) -> Result {
    for (drops, late) in [(false, false), (true, false), (false, true)] {
        let ([client], name, guard) = held(&ctx, TestClient::kept).await?;
        renewed_once(&ctx, &guard).await?;
        if late {
            // This one reaches the store when the lock has long been free.
            let renewals = client.gate.calls(Step::Renew);
            client
                .gate
                .once(Step::Renew, CallOutcome::Mute(ctx.kept() / 6));
            client.sends(Step::Renew, renewals + 1).await?;
        }
        ends(&ctx, guard, drops).await?;
        let renewals = client.gate.calls(Step::Renew);
        ctx.left_untouched(&name, ctx.answer()).await?;
        ctx.would_show_within(ctx.kept()).await;
        let after = client.gate.calls(Step::Renew);
        same("the number of renewals a lease later", after, renewals)?;
        ctx.sees_free(&name).await?;
    }
    Ok(())
}

/// Waits for a successful renewal: only that increases the time left.
async fn renewed_once(ctx: &Ctx, guard: &Guard) -> Result {
    let last = Mutex::new(guard.remaining());
    let renewed = || async {
        let mut last = last.lock().await;
        let before = std::mem::replace(&mut *last, guard.remaining());
        Ok(*last > before)
    };
    let bound = ctx.kept() * 2;
    ctx.eventually("it is renewed", bound, renewed).await
}
