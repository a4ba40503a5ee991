//! `keep`: a lock released early stays unavailable to all owners for its minimum hold.

use super::{held, held_for};
use crate::{
    Ask, Ctx, Failure, Hold, Result, TestDriver,
    case::cases,
    ensure,
    expect::{is_free, is_left},
    same,
};
use dlock_core::{Broken, Instant, driver::Released};
use std::time::Duration;

cases! {
    [Clause::Keep]
    its_last_owner_is_refused_too bullet("in its minimum hold: `Held`, for its last owner too");
    inspect_and_list_say_unavailable bullet("in its minimum hold: `Held`, for its last owner too");
    breaking_opens_it bullet("frees what was unavailable");
    it_outlives_the_client needs(Detached);
    a_repeat_of_the_release_leaves_it_unavailable;
    after_a_lapse_the_lease_alone_decides bullet("ends with the incarnation: after a lapse");
    a_new_incarnation_knows_nothing_of_it bullet("ends with the incarnation: after a lapse");
    [Clause::Keep bullet("with `req.min_hold` and no hold left the name stays unavailable")]
    a_name_stays_unavailable_to_every_client_for_its_minimum_hold;
    the_longest_counts_when_it_goes_first;
    the_longest_counts_when_it_goes_last;
    a_name_is_not_unavailable_while_a_hold_is_left;
}

async fn a_name_stays_unavailable_to_every_client_for_its_minimum_hold(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&driver, &hold, ctx.short()).await?;
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn its_last_owner_is_refused_too(ctx: Ctx) -> Result {
    let ([driver], _, hold) = held(&ctx).await?;
    let shut = shuts(&driver, &hold, ctx.short()).await?;
    opens_then(&ctx, &driver, &hold.ask.again(), &shut).await
}

async fn the_longest_counts_when_it_goes_first(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    for second_keep in [None, Some(ctx.short() / 10)] {
        let name = ctx.name()?;
        let first = driver.take(&ctx.ask(&name)).await?;
        let second = driver.take(&first.ask.again()).await?;
        let shut = leaves_others(&driver, &second, ctx.kept()).await?;
        let answer = driver.release(&first, second_keep).await?;
        let kept = matches!(answer, Released::MinHold { .. });
        ensure(kept, format!("release: {answer:?}"))?;
        opens_then(&ctx, &other, &ctx.ask(&name), &shut).await?;
    }
    Ok(())
}

async fn the_longest_counts_when_it_goes_last(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let second = driver.take(&first.ask.again()).await?;
    leaves_others(&driver, &second, ctx.short() / 10).await?;
    let shut = shuts(&driver, &first, ctx.short()).await?;
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn a_name_is_not_unavailable_while_a_hold_is_left(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let second = driver.take(&first.ask.again()).await?;
    leaves_others(&driver, &second, ctx.short()).await?;
    let third = driver.take(&first.ask.again()).await?;
    same("the number of holds", third.holds, 2)?;
    other.refused(&ctx.ask(&name)).await?;
    driver.renews(&first, ctx.long()).await?;
    // The minimum hold counts from the release that carried it, not from the last one.
    ctx.time_passes(ctx.short() + ctx.rounding()).await;
    other.refused(&ctx.ask(&name)).await?;
    driver.leaves(&first, 1).await?;
    driver.frees(&third).await
}

async fn inspect_and_list_say_unavailable(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    shuts(&driver, &hold, ctx.long()).await?;
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
    let ([driver, other], name, hold) = held(&ctx).await?;
    shuts(&driver, &hold, ctx.long()).await?;
    let answer = other.breaks(&name, None).await?;
    same("break", answer, Broken::Freed { token: None })?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn it_outlives_the_client(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&driver, &hold, ctx.short()).await?;
    driver.inner().close().await;
    let shut = Shut {
        by: ctx.now() + ctx.dead_for(shut.by.since(ctx.now())),
        ..shut
    };
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

async fn after_a_lapse_the_lease_alone_decides(ctx: Ctx) -> Result {
    // The hold that lapses and the minimum hold are of one client, or of two.
    for keeper in 0..2 {
        let (drivers, name, lapses) = held_for::<2>(&ctx, ctx.kept()).await?;
        let (keeper, other) = (&drivers[keeper], &drivers[1]);
        let kept = keeper.take(&lapses.ask.again()).await?;
        match leaves_others(keeper, &kept, ctx.long()).await {
            // By then the hold that lapses may have been over.
            Err(failure) if ctx.now() >= lapses.over_from() => return Err(Failure::late(failure)),
            left => left.map(drop)?,
        }
        ctx.sleep_past(&kept).await;
        let opens = || async { Ok(is_free(&other.inspect(&name).await?)) };
        ctx.eventually("the name is free", Duration::ZERO, opens)
            .await?;
        other.take_soon(&ctx.ask(&name)).await?;
    }
    Ok(())
}

async fn a_new_incarnation_knows_nothing_of_it(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held_for(&ctx, ctx.short()).await?;
    let second = driver.take(&first.ask.again()).await?;
    driver.release(&second, Some(ctx.long())).await?;
    ctx.sleep_past(&second).await;
    // After a lapse, and after a break; for another owner, and for the same one.
    let next = other.take_soon(&ctx.ask(&name)).await?;
    other.frees(&next).await?;
    let again = || first.ask.again().lasting(ctx.long());
    driver.take(&again()).await?;
    let beside = driver.take(&again()).await?;
    driver.release(&beside, Some(ctx.long())).await?;
    other.breaks(&name, None).await?;
    let last = driver.take(&again()).await?;
    driver.frees(&last).await
}

async fn a_repeat_of_the_release_leaves_it_unavailable(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    let shut = shuts(&driver, &hold, ctx.short()).await?;
    // Shorter, longer, and no minimum hold at all: no holder is left that could ask for it.
    for keep in [None, Some(ctx.short() / 10), Some(ctx.long())] {
        driver.release(&hold, keep).await?;
    }
    opens_then(&ctx, &other, &ctx.ask(&name), &shut).await
}

/// The instants between which the name becomes available again.
struct Shut {
    from: Instant,
    by: Instant,
}

/// Releases a hold with this minimum hold; also returns when that is over.
async fn release(driver: &TestDriver, hold: &Hold, keep: Duration) -> Result<(Released, Shut)> {
    let from = driver.ctx.now() + keep;
    let answer = driver.release(hold, Some(keep)).await?;
    let by = driver.ctx.now() + keep;
    Ok((answer, Shut { from, by }))
}

/// Releases the last hold; the answer must say that the name stays unavailable.
async fn shuts(driver: &TestDriver, hold: &Hold, keep: Duration) -> Result<Shut> {
    match release(driver, hold, keep).await? {
        (Released::MinHold { rest }, shut) if !rest.is_zero() && rest <= keep => Ok(shut),
        (other, _) => Err(Failure::new(format!("kept for {keep:?}, got {other:?}"))),
    }
}

/// Releases one of several holds.
async fn leaves_others(driver: &TestDriver, hold: &Hold, keep: Duration) -> Result<Shut> {
    match release(driver, hold, keep).await? {
        (Released::StillHeld { .. }, shut) => Ok(shut),
        (other, _) => Err(Failure::new(format!("others remain, got {other:?}"))),
    }
}

/// Refused until the name becomes available, and no longer.
async fn opens_then(ctx: &Ctx, driver: &TestDriver, ask: &Ask, shut: &Shut) -> Result {
    let rest = shut.by.since(ctx.now()) + ctx.rounding();
    let next = driver.take_within(ask, rest).await?;
    let early = shut.from.since(next.after);
    ensure(early.is_zero(), format!("{early:?} early"))?;
    same("the number of holds", next.holds, 1)?;
    driver.frees(&next).await
}
