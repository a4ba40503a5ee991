//! `late`: a request that the store executes long after its sender gave up takes nothing that lasts.

use super::{
    gate::{Fate, Step},
    peer::{Peer, frees, held, left_untouched, stays_held},
    task::polled,
};
use crate::{Ctx, Result, case::cases, ensure, same};
use dlock_core::{Instant, LockName};
use std::time::Duration;

cases! {
    [Clause::Late]
    a_copy_that_revives_a_released_hold_is_settled;
    a_copy_that_revives_a_lost_hold_is_settled;
    a_cancelled_acquire_executed_later_is_settled;
    an_acquire_executed_after_its_give_up_takes_nothing_that_lasts;
    a_settling_release_that_was_slow_is_followed_by_another;
    a_late_acquire_leaves_no_waiter;
    a_late_renewal_changes_nothing;
}

async fn a_copy_that_revives_a_released_hold_is_settled(ctx: Ctx) -> Result {
    for drops in [false, true] {
        let peer = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        // Well before its give-up, a third of the lease after it was sent.
        let late = ctx.kept() / 5;
        peer.gate.once(Step::Acquire, Fate::Late(late));
        let begun = ctx.now();
        let guard = peer.take(&peer.kept(&name)?).await?;
        if drops {
            drop(guard);
        } else {
            frees(&ctx, guard).await?;
        }
        lasts_no_longer(&ctx, &peer, &name, begun + late, begun + ctx.kept() / 3).await?;
    }
    Ok(())
}

async fn a_copy_that_revives_a_lost_hold_is_settled(ctx: Ctx) -> Result {
    // After the first renewal, which finds the hold lost.
    let late = ctx.kept() / 2;
    let last = late + ctx.kept() / 3;
    // Its user gives up before the copy arrives, and after it has arrived.
    for kept_for in [Duration::ZERO, last + ctx.rounding()] {
        let peer = Peer::later_than_the_store(&ctx, late).await?;
        let other = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        peer.gate.once(Step::Acquire, Fate::Late(late));
        let begun = ctx.now();
        // Revived for long enough to be visible.
        let guard = peer.take(&peer.kept(&name)?).await?;
        other.breaks(&name).await?;
        ctx.within("it is lost", ctx.kept() / 2, guard.lost())
            .await?;
        ctx.sleep_until(begun + kept_for).await;
        drop(guard);
        lasts_no_longer(&ctx, &peer, &name, begun + late, begun + last).await?;
    }
    Ok(())
}

async fn a_cancelled_acquire_executed_later_is_settled(ctx: Ctx) -> Result {
    for (fate, waits) in [(true, true), (true, false), (false, true), (false, false)] {
        let peer = Peer::new(&ctx).await?;
        let name = ctx.name()?;
        let late = ctx.kept() / 5;
        let fate = if fate {
            Fate::Late(late)
        } else {
            Fate::Mute(late)
        };
        peer.gate.once(Step::Acquire, fate);
        peer.gate.always(Step::Acquire, Fate::ErrorBefore);
        let begun = ctx.now();
        let lock = peer.kept(&name)?;
        let finished = if waits {
            polled(lock.acquire(), 2).await.is_some()
        } else {
            polled(lock.try_acquire(), 2).await.is_some()
        };
        same("it is at its end", finished, false)?;
        peer.gate.clear();
        lasts_no_longer(&ctx, &peer, &name, begun + late, begun + ctx.kept() / 3).await?;
    }
    Ok(())
}

async fn an_acquire_executed_after_its_give_up_takes_nothing_that_lasts(ctx: Ctx) -> Result {
    let late = ctx.short() / 3;
    let give_up = ctx.short() / 3;
    for after in [late / 2, late * 2] {
        // One copy that may come late, and one that comes later than the store may execute it.
        let peer = Peer::later_than_the_store(&ctx, late).await?;
        let name = ctx.name()?;
        peer.gate.always(Step::Acquire, Fate::Mute(give_up + after));
        let begun = ctx.now();
        let lock = peer.short(&name)?;
        same(
            "try_acquire is granted",
            lock.try_acquire().await.is_ok(),
            false,
        )?;
        peer.gate.clear();
        let last = begun + give_up + late;
        lasts_no_longer(&ctx, &peer, &name, begun + give_up + after, last).await?;
    }
    Ok(())
}

async fn a_settling_release_that_was_slow_is_followed_by_another(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    peer.gate.once(Step::Acquire, Fate::Late(ctx.short() / 5));
    let begun = ctx.now();
    let guard = peer.take(&peer.short(&name)?).await?;
    frees(&ctx, guard).await?;
    // Each release may have been executed before the copy that it should clean up.
    let slow = Duration::from_millis(1_100);
    peer.gate.always(Step::Release, Fate::Slow(slow));
    ctx.sleep_until(begun + ctx.short() / 3 + slow * 3).await;
    same("how much is settled", peer.client.unsettled(), 1)?;
    let releases = peer.gate.calls(Step::Release);
    peer.gate.clear();
    peer.settles(slow * 2).await?;
    ensure(
        peer.gate.calls(Step::Release) > releases,
        "it was settled by a release that was slow",
    )?;
    let observer = ctx.caller().await?;
    observer.sees_free(&name).await
}

async fn a_late_acquire_leaves_no_waiter(ctx: Ctx) -> Result {
    let ([_other, peer], name, guard) = held(&ctx, Peer::lock).await?;
    let observer = ctx.caller().await?;
    let late = ctx.short() / 5;
    peer.gate.always(Step::Acquire, Fate::Mute(late));
    let begun = ctx.now();
    let waited = polled(peer.short(&name)?.acquire(), 2).await;
    same("it is at its end", waited.is_some(), false)?;
    ctx.sleep_until(begun + ctx.short() / 3).await;
    peer.settles(ctx.short()).await?;
    let waiters = observer.inspect(&name).await?.waiters;
    same("the number of queued waiters", waiters.unwrap_or(0), 0)?;
    frees(&ctx, guard).await?;
    left_untouched(&ctx, &observer, &name, ctx.answer()).await
}

async fn a_late_renewal_changes_nothing(ctx: Ctx) -> Result {
    let [peer, other] = Peer::several(&ctx).await?;
    let observer = ctx.caller().await?;
    for taken in [false, true] {
        let name = ctx.name()?;
        let guard = peer.take(&peer.short(&name)?).await?;
        peer.gate.always(Step::Renew, Fate::Mute(ctx.short() / 10));
        ctx.until("it is renewed", ctx.short(), || {
            !peer.gate.seen(Step::Renew, &name).is_empty()
        })
        .await?;
        frees(&ctx, guard).await?;
        let next = if taken {
            Some(other.take(&other.fixed(&name)?).await?)
        } else {
            None
        };
        ctx.time_passes(ctx.short() / 3).await;
        match next {
            Some(next) => {
                let left = next.remaining();
                let seen = observer.inspect(&name).await?;
                let rest = seen.holders.first().and_then(|holder| holder.rest);
                stays_held(&ctx, "the next one's state", &next).await?;
                let bound = left + ctx.short() / 50 + ctx.slack();
                ensure(
                    rest.unwrap_or_default() <= bound,
                    "another's lease was prolonged",
                )?;
                frees(&ctx, next).await?;
            }
            None => observer.sees_free(&name).await?,
        }
        peer.gate.clear();
    }
    Ok(())
}

/// When the last copy is executed at the last possible moment, nothing is left one round trip later.
async fn lasts_no_longer(
    ctx: &Ctx,
    peer: &Peer,
    name: &LockName,
    executed: Instant,
    last: Instant,
) -> Result {
    let observer = ctx.caller().await?;
    ctx.sleep_until(executed.max(last) + Duration::from_millis(5))
        .await;
    peer.settles(ctx.short()).await?;
    observer.sees_free(name).await?;
    let next = peer.take(&peer.lock(name)?).await?;
    frees(ctx, next).await?;
    left_untouched(ctx, &observer, name, Duration::ZERO).await
}
