//! `fencing`: each new incarnation of a name has a token greater than every earlier one, however the
//! earlier ones ended.

use super::held;
use crate::{Ctx, Hold, Result, TestDriver, case::cases, ensure, same};
use dlock_core::{FencingToken, LockName};
use futures_util::future::join_all;
use std::time::Duration;
use tokio::sync::Mutex;

cases! {
    [Clause::Fencing]
    the_token_grows_over_a_break
        bullet("frees what was unavailable or reserved. The token counter stays");
    [Clause::Fencing bullet("a grant that is no re-entry has a token greater")]
    the_token_grows_with_every_release;
    the_token_grows_in_the_order_of_those_who_take_turns;
    the_token_grows_over_expiry;
    the_token_grows_over_a_name_kept_shut;
    the_token_grows_over_a_turn needs(Queue);
    the_token_grows_though_the_clock_is_set_back needs(StoreTime);
    the_token_grows_over_days_of_disuse needs(StoreTime);
    [Clause::Fencing bullet("tokens grow over a lost record")]
    the_token_grows_over_a_lost_record needs(Records);
    the_token_grows_over_a_restart needs(Server);
    the_token_grows_over_a_flush_while_the_clock_goes_on needs(Flush);
    [Clause::Fencing bullet("`req.floor` is given, the grant is no re-entry")]
    the_token_is_the_floor_or_the_next_one needs(Raises);
    [Clause::Fencing bullet("`req.hold` is inside already and alone")]
    a_repeat_with_a_greater_floor_raises_the_token_of_a_lone_hold needs(Raises);
    [Clause::Fencing bullet("[`req.restores()`]")]
    a_restored_hold_has_its_token_again needs(Raises);
    a_restored_hold_passes_every_queue needs(Raises, Queue);
    [Clause::Reentry]
    a_floor_raises_no_token_of_two_holds needs(Raises);
}

async fn the_token_grows_with_every_release(ctx: Ctx) -> Result {
    let (drivers, name) = ctx.test_drivers::<2>().await?;
    let owner = ctx.ask(&name);
    let mut last = FencingToken(0);
    for turn in 0..100 {
        // Two clients, and an owner that returns as well as fresh ones.
        let driver = &drivers[turn % 2];
        let ask = if turn % 3 == 0 {
            owner.again()
        } else {
            ctx.ask(&name)
        };
        let hold = driver.take(&ask).await?;
        last = greater(last, &hold)?;
        driver.frees(&hold).await?;
    }
    Ok(())
}

async fn the_token_grows_in_the_order_of_those_who_take_turns(ctx: Ctx) -> Result {
    let (drivers, name) = ctx.test_drivers::<4>().await?;
    let last = Mutex::new(FencingToken(0));
    let turns = drivers.iter().map(|driver| async {
        for _ in 0..8 {
            let hold = driver.take_within(&ctx.ask(&name), ctx.answer()).await?;
            let mut last = last.lock().await;
            *last = greater(*last, &hold)?;
            drop(last);
            driver.frees(&hold).await?;
        }
        Ok(())
    });
    join_all(turns).await.into_iter().collect()
}

async fn the_token_grows_over_expiry(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let mut last = FencingToken(0);
    for driver in [&driver, &other] {
        let ask = ctx.ask(&name).lasting(ctx.short());
        let hold = driver.take_soon(&ask).await?;
        last = greater(last, &hold)?;
        ctx.sleep_past(&hold).await;
    }
    takes_greater(&ctx, &driver, last, &name).await
}

async fn the_token_grows_over_a_break(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let mut last = FencingToken(0);
    for _ in 0..3 {
        let hold = driver.take(&ctx.ask(&name)).await?;
        last = greater(last, &hold)?;
        other.breaks(&name, None).await?;
    }
    takes_greater(&ctx, &other, last, &name).await
}

async fn the_token_grows_over_a_name_kept_shut(ctx: Ctx) -> Result {
    let ([driver, other], name, hold) = held(&ctx).await?;
    driver.release(&hold, Some(ctx.short())).await?;
    let next = other.take_within(&ctx.ask(&name), ctx.short()).await?;
    greater(hold.token, &next).map(drop)
}

async fn the_token_grows_over_a_turn(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let waiting = other.queues(&name).await?;
    driver.frees(&first).await?;
    let second = other.take(&waiting).await?;
    greater(first.token, &second).map(drop)
}

async fn the_token_grows_over_a_lost_record(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    ctx.records()?.delete(&name).await?;
    takes_greater(&ctx, &driver, hold.token, &name).await
}

async fn the_token_grows_over_a_restart(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let (released, held) = (ctx.name()?, ctx.name()?);
    let first = driver.take(&ctx.ask(&released)).await?;
    driver.frees(&first).await?;
    let second = driver.take(&ctx.ask(&held).lasting(ctx.short())).await?;
    // Even a server without persistence does not restart within the microsecond that the last token was
    // made from.
    ctx.time_passes(ctx.rounding()).await;
    ctx.server()?.restart().await?;
    let driver = ctx.test_driver().await?;
    takes_greater(&ctx, &driver, first.token, &released).await?;
    // A server with sessions restarts their timeouts.
    let rest = ctx.until_over(&second).max(ctx.dead_for(Duration::ZERO));
    let next = driver.take_within(&ctx.ask(&held), rest).await?;
    greater(second.token, &next).map(drop)
}

/// The limit that every backend declares: tokens may go back when a counter is lost while the clock is
/// behind the last token.
async fn the_token_grows_over_a_flush_while_the_clock_goes_on(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    ctx.time_passes(ctx.rounding()).await;
    ctx.records()?.flush().await?;
    takes_greater(&ctx, &driver, hold.token, &name).await
}

async fn the_token_grows_though_the_clock_is_set_back(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    driver.frees(&hold).await?;
    ctx.store_time()?.back(HOUR).await?;
    takes_greater(&ctx, &ctx.test_driver().await?, hold.token, &name).await
}

async fn the_token_grows_over_days_of_disuse(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    driver.frees(&hold).await?;
    ctx.store_time()?.forward(HOUR * 24 * 3).await?;
    takes_greater(&ctx, &ctx.test_driver().await?, hold.token, &name).await
}

async fn the_token_is_the_floor_or_the_next_one(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let mut last = FencingToken(0);
    // Far below the store's time, which the floor takes the place of.
    for (floor, token) in [
        (1_000, 1_000),
        (5_000, 5_000),
        (5_000, 5_001),
        (1_000, 5_002),
    ] {
        let hold = driver
            .take(&ctx.ask(&name).from(FencingToken(floor)))
            .await?;
        same("the token", hold.token, FencingToken(token))?;
        last = greater(last, &hold)?;
        driver.frees(&hold).await?;
    }
    takes_greater(&ctx, &other, last, &name).await
}

async fn a_repeat_with_a_greater_floor_raises_the_token_of_a_lone_hold(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let (token, floor) = (first.token, above(first.token));
    for at_most in [FencingToken(1), token] {
        let repeat = driver.take(&first.ask.clone().from(at_most)).await?;
        same("the token of a repeat without more", repeat.token, token)?;
    }
    let raised = driver.take(&first.ask.clone().from(floor)).await?;
    same("the token of the repeat", raised.token, floor)?;
    ctx.ends_with(&first, raised.before, raised.valid_for)?;
    other.breaks(&name, Some(floor)).await?;
    takes_greater(&ctx, &driver, floor, &name).await
}

async fn a_restored_hold_has_its_token_again(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let restores = |token: FencingToken| first.ask.again().from(token).joining(token);
    let stranger = ctx.ask(&name).from(first.token).joining(first.token);
    other.gone(&stranger).await?;
    // Where it is inside, whatever the token there.
    for token in [first.token, above(first.token)] {
        let beside = driver.take(&restores(token)).await?;
        driver.leaves(&beside, 1).await?;
    }
    driver.frees(&first).await?;
    let again = other.take(&restores(first.token)).await?;
    same("the token where it was lost", again.token, first.token)?;
    other.frees(&again).await?;
    let ahead = above(first.token);
    let raised = other.take(&restores(ahead)).await?;
    same(
        "the token where the last one was smaller",
        raised.token,
        ahead,
    )?;
    other.frees(&raised).await?;
    let late = other.take(&restores(first.token)).await?;
    greater(ahead, &late)?;
    other.frees(&late).await?;
    takes_greater(&ctx, &driver, late.token, &name).await
}

async fn a_restored_hold_passes_every_queue(ctx: Ctx) -> Result {
    let ([driver, first, second], name, hold) = held(&ctx).await?;
    let (waiting, behind) = (first.queues(&name).await?, second.queues(&name).await?);
    driver.frees(&hold).await?;
    // The first has its turn.
    let restores = hold.ask.again().from(hold.token).joining(hold.token);
    let restored = driver.take(&restores).await?;
    same("the token", restored.token, hold.token)?;
    first.refused(&waiting).await?;
    second.leave(&behind).await?;
    driver.frees(&restored).await?;
    let turn = first.take_soon(&waiting).await?;
    first.frees(&turn).await
}

/// Each of the holds has been told the token.
async fn a_floor_raises_no_token_of_two_holds(ctx: Ctx) -> Result {
    let ([driver, other], _, first) = held(&ctx).await?;
    let second = other.take(&first.ask.again()).await?;
    for ask in [first.ask.clone(), second.ask] {
        let repeat = driver.take(&ask.from(above(first.token))).await?;
        same("the token of two holds", repeat.token, first.token)?;
    }
    Ok(())
}

/// Ten minutes of a clock in microseconds: ahead of the store's time until the case ends.
fn above(token: FencingToken) -> FencingToken {
    FencingToken(token.0 + 600_000_000)
}

async fn takes_greater(
    ctx: &Ctx,
    driver: &TestDriver,
    last: FencingToken,
    name: &LockName,
) -> Result {
    let hold = driver.take_soon(&ctx.ask(name)).await?;
    greater(last, &hold).map(drop)
}

fn greater(last: FencingToken, hold: &Hold) -> Result<FencingToken> {
    let token = hold.token;
    ensure(token > last, format!("token {token} came after {last}"))?;
    Ok(token)
}

const HOUR: Duration = Duration::from_secs(3600);
