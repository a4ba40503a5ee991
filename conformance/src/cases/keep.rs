//! `keep`: a lock released early stays unavailable to all owners for its minimum hold.

use super::{held, held_for};
use crate::{Ask, Caller, Ctx, Failure, Hold, Result, case::cases, ensure, expect::is_left, same};
use dlock_core::{Broken, Instant, driver::Released};
use std::time::Duration;

cases! {
    [Clause::Keep]
    its_last_owner_is_refused_too bullet("in its minimum hold: `Held`, for its last owner too");
    inspect_and_list_say_shut bullet("in its minimum hold: `Held`, for its last owner too");
    breaking_opens_it bullet("frees what was unavailable");
    it_outlives_the_client needs(Detached);
    a_repeat_of_the_release_leaves_it_shut;
    after_a_lapse_the_lease_alone_decides bullet("ends with the incarnation: after a lapse");
    a_new_incarnation_knows_nothing_of_it bullet("ends with the incarnation: after a lapse");
    [Clause::Keep bullet("with `req.min_hold` and no hold left the name stays unavailable")]
    a_name_stays_shut_for_everybody_as_long_as_was_asked;
    the_longest_counts_when_it_goes_first;
    the_longest_counts_when_it_goes_last;
    a_name_is_not_shut_while_a_hold_is_left;
}

async fn a_name_stays_shut_for_everybody_as_long_as_was_asked(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&caller, &hold, ctx.short()).await?;
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn its_last_owner_is_refused_too(ctx: Ctx) -> Result {
    let ([caller], _, hold) = held(&ctx).await?;
    let shut = shuts(&caller, &hold, ctx.short()).await?;
    opens_then(&ctx, &caller, &hold.ask.again(), &shut).await
}

async fn the_longest_counts_when_it_goes_first(ctx: Ctx) -> Result {
    let ([caller, other], _) = ctx.callers().await?;
    for second_keep in [None, Some(ctx.short() / 10)] {
        let name = ctx.name()?;
        let first = caller.take(&ctx.ask(&name)).await?;
        let second = caller.take(&first.ask.again()).await?;
        let shut = leaves_others(&caller, &second, ctx.short()).await?;
        let answer = caller.release(&first, second_keep).await?;
        let kept = matches!(answer, Released::MinHold { .. });
        ensure(kept, format!("release: {answer:?}"))?;
        opens_then(&ctx, &other, &ctx.ask(&name), &shut).await?;
    }
    Ok(())
}

async fn the_longest_counts_when_it_goes_last(ctx: Ctx) -> Result {
    let ([caller, other], name, first) = held(&ctx).await?;
    let second = caller.take(&first.ask.again()).await?;
    leaves_others(&caller, &second, ctx.short() / 10).await?;
    let shut = shuts(&caller, &first, ctx.short()).await?;
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn a_name_is_not_shut_while_a_hold_is_left(ctx: Ctx) -> Result {
    let ([caller, other], name, first) = held(&ctx).await?;
    let second = caller.take(&first.ask.again()).await?;
    leaves_others(&caller, &second, ctx.short()).await?;
    let third = caller.take(&first.ask.again()).await?;
    same("the number of holds", third.holds, 2)?;
    other.refused(&ctx.ask(&name)).await?;
    caller.renews(&first, ctx.long()).await?;
    // The minimum hold counts from the release that carried it, not from the last one.
    ctx.time_passes(ctx.short() + ctx.rounding()).await;
    other.refused(&ctx.ask(&name)).await?;
    caller.leaves(&first, 1).await?;
    caller.frees(&third).await
}

async fn inspect_and_list_say_shut(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    shuts(&caller, &hold, ctx.long()).await?;
    let listed = other.list(name.as_str(), 10).await?;
    let listed = listed.into_iter().find(|seen| seen.name == name);
    let listed = listed.ok_or_else(|| Failure::new("a name with a minimum hold is not listed"))?;
    for seen in [other.inspect(&name).await?, listed] {
        let unheld = seen.holders.is_empty() && seen.holds == 0;
        ensure(unheld, format!("no holder should be shown: {seen:?}"))?;
        is_left(seen.unavailable_for.unwrap_or_default(), ctx.long())?;
    }
    Ok(())
}

async fn breaking_opens_it(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    shuts(&caller, &hold, ctx.long()).await?;
    let answer = other.breaks(&name, None).await?;
    same("break", answer, Broken::Freed { token: None })?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn it_outlives_the_client(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&caller, &hold, ctx.short()).await?;
    caller.driver().close().await;
    let shut = Shut {
        by: ctx.now() + ctx.dead_for(shut.by.since(ctx.now())),
        ..shut
    };
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn after_a_lapse_the_lease_alone_decides(ctx: Ctx) -> Result {
    let ([caller, other], name, lapses) = held_for(&ctx, ctx.short()).await?;
    let kept = caller.take(&lapses.ask.again()).await?;
    leaves_others(&caller, &kept, ctx.long()).await?;
    ctx.sleep_past(&kept).await;
    other.sees_free(&name).await?;
    other.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn a_new_incarnation_knows_nothing_of_it(ctx: Ctx) -> Result {
    let ([caller, other], name, first) = held_for(&ctx, ctx.short()).await?;
    let second = caller.take(&first.ask.again()).await?;
    caller.release(&second, Some(ctx.long())).await?;
    ctx.sleep_past(&second).await;
    // After a lapse, and after a break; for another owner, and for the same one.
    let next = other.take_soon(&ctx.ask(&name)).await?;
    other.frees(&next).await?;
    let again = || first.ask.again().lasting(ctx.long());
    caller.take(&again()).await?;
    let beside = caller.take(&again()).await?;
    caller.release(&beside, Some(ctx.long())).await?;
    other.breaks(&name, None).await?;
    let last = caller.take(&again()).await?;
    caller.frees(&last).await
}

async fn a_repeat_of_the_release_leaves_it_shut(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&caller, &hold, ctx.short()).await?;
    // Shorter, longer, and no minimum hold at all: no holder is left that could ask for it.
    for keep in [None, Some(ctx.short() / 10), Some(ctx.long())] {
        caller.release(&hold, keep).await?;
    }
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

/// The instants between which the name becomes available again.
struct Shut {
    from: Instant,
    by: Instant,
}

/// Releases a hold with this minimum hold; also returns when that is over.
async fn release(caller: &Caller, hold: &Hold, keep: Duration) -> Result<(Released, Shut)> {
    let from = caller.ctx.now() + keep;
    let answer = caller.release(hold, Some(keep)).await?;
    let by = caller.ctx.now() + keep;
    Ok((answer, Shut { from, by }))
}

/// Releases the last hold; the answer must say that the name stays unavailable.
async fn shuts(caller: &Caller, hold: &Hold, keep: Duration) -> Result<Shut> {
    match release(caller, hold, keep).await? {
        (Released::MinHold { rest }, shut) if !rest.is_zero() && rest <= keep => Ok(shut),
        (other, _) => Err(Failure::new(format!("kept for {keep:?}, got {other:?}"))),
    }
}

/// Releases one of several holds.
async fn leaves_others(caller: &Caller, hold: &Hold, keep: Duration) -> Result<Shut> {
    match release(caller, hold, keep).await? {
        (Released::StillHeld { .. }, shut) => Ok(shut),
        (other, _) => Err(Failure::new(format!("others remain, got {other:?}"))),
    }
}

/// Refused until the name becomes available, and no longer.
async fn opens_then(ctx: &Ctx, caller: &Caller, ask: &Ask, shut: &Shut) -> Result {
    let rest = shut.by.since(ctx.now()) + ctx.rounding();
    let next = caller.take_within(ask, rest).await?;
    let early = shut.from.since(next.after);
    ensure(early.is_zero(), format!("{early:?} early"))?;
    same("the number of holds", next.holds, 1)?;
    caller.frees(&next).await
}
