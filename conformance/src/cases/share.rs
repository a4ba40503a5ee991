//! `share`: sharers enter beside each other up to their number, each with a lease of its own, and past no
//! other owner who waits.

use super::wait::wakes;
use crate::{Ctx, Hold, Result, TestDriver, case::cases, same};
use dlock_core::{LockName, MAX_HOLDS, driver::WakeUp};

cases! {
    [Clause::Share]
    sharers_enter_beside_each_other_with_one_token needs(Shares);
    a_sharer_and_another_owner_exclude_each_other needs(Shares);
    who_disagree_about_the_permits_exclude_each_other needs(Shares);
    a_lapsed_sharer_frees_its_part_alone needs(Shares, Detached);
    no_client_renews_a_dead_sharer needs(Shares, Detached);
    a_break_ends_all_sharers needs(Shares);
    [Clause::Share bullet("`req.share()` is a number")]
    the_last_permit_is_given_once_and_a_release_makes_room needs(Shares);
    more_share_a_lock_than_one_owner_may_enter needs(Shares);
    [Clause::Share bullet("a request of another owner waits before a sharer")]
    a_sharer_does_not_pass_one_who_waits_alone needs(Shares);
    a_repeat_of_a_sharer_is_one_hold_though_another_waits needs(Shares);
    [Clause::Share bullet("a permit is given back, others are held")]
    a_permit_that_is_given_back_wakes_who_waits needs(Shares, Push);
}

async fn sharers_enter_beside_each_other_with_one_token(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let one = here.take(&ctx.ask(&name).shared()).await?;
    let two = there.take(&ctx.ask(&name).shared()).await?;
    let three = there.take(&ctx.ask(&name).shared()).await?;
    same("the number of holds", three.holds, 3)?;
    same("the tokens", [two.token, three.token], [one.token; 2])?;
    here.leaves(&one, 2).await?;
    there.renews(&two, ctx.long()).await?;
    there.leaves(&two, 1).await?;
    there.frees(&three).await
}

async fn a_sharer_and_another_owner_exclude_each_other(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let [sharer, permit] = [ctx.ask(&name).shared(), ctx.ask(&name).permit(4)];
    let writer = ctx.ask(&name);
    for (inside, others) in [
        (&sharer, [&writer, &permit]),
        (&writer, [&sharer, &permit]),
        (&permit, [&writer, &sharer]),
    ] {
        let hold = here.take(&inside.again()).await?;
        for other in others {
            there.refused(&other.again()).await?;
        }
        there.sees_holds(&name, 1).await?;
        here.frees(&hold).await?;
    }
    Ok(())
}

async fn who_disagree_about_the_permits_exclude_each_other(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let hold = here.take(&ctx.ask(&name).permit(2)).await?;
    there.refused(&ctx.ask(&name).permit(3)).await?;
    there.take(&ctx.ask(&name).permit(2)).await?;
    here.leaves(&hold, 1).await
}

async fn a_lapsed_sharer_frees_its_part_alone(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let (long, short) = (ctx.ask(&name).permit(2), ctx.ask(&name).permit(2));
    let long = here.take(&long).await?;
    let short = there.take(&short.lasting(ctx.short())).await?;
    ctx.sleep_past(&short).await;
    here.sees_holds(&name, 1).await?;
    here.refused(&ctx.ask(&name)).await?;
    let again = there.take(&ctx.ask(&name).permit(2)).await?;
    there.leaves(&again, 1).await?;
    here.frees(&long).await
}

async fn no_client_renews_a_dead_sharer(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let dead = there
        .take(&ctx.ask(&name).shared().lasting(ctx.short()))
        .await?;
    let alive = here.take(&ctx.ask(&name).shared()).await?;
    here.renews(&alive, ctx.long()).await?;
    ctx.sleep_past(&dead).await;
    here.renews(&alive, ctx.long()).await?;
    here.sees_holds(&name, 1).await?;
    here.frees(&alive).await
}

async fn a_break_ends_all_sharers(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let one = here.take(&ctx.ask(&name).shared()).await?;
    there.take(&ctx.ask(&name).shared()).await?;
    here.breaks(&name, Some(one.token)).await?;
    there.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn the_last_permit_is_given_once_and_a_release_makes_room(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let permit = || ctx.ask(&name).permit(3);
    let mut holds = Vec::new();
    for driver in [&here, &there, &there] {
        holds.push(driver.take(&permit()).await?);
    }
    for driver in [&here, &there] {
        driver.refused(&permit()).await?;
    }
    here.leaves(&holds[0], 2).await?;
    let last = there.take(&permit()).await?;
    same("the number of holds", last.holds, 3)?;
    here.refused(&permit()).await.map(drop)
}

async fn more_share_a_lock_than_one_owner_may_enter(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    for count in 1..=MAX_HOLDS + 8 {
        let driver = if count % 2 == 0 { &here } else { &there };
        let hold = driver.take(&ctx.ask(&name).shared()).await?;
        same("the number of holds", hold.holds, count)?;
    }
    there.sees_holds(&name, MAX_HOLDS + 8).await
}

/// A sharer inside, and another owner that waits.
async fn shared_and_waited_for(ctx: &Ctx) -> Result<([TestDriver; 2], LockName, Hold)> {
    let (drivers, name) = ctx.test_drivers().await?;
    let hold = drivers[0].take(&ctx.ask(&name).shared()).await?;
    Ok((drivers, name, hold))
}

async fn a_sharer_does_not_pass_one_who_waits_alone(ctx: Ctx) -> Result {
    let ([here, there], name, hold) = shared_and_waited_for(&ctx).await?;
    let waiting = there.queues(&name).await?;
    here.refused(&ctx.ask(&name).shared()).await?;
    here.refused(&ctx.ask(&name).shared().in_line(here.ticket()))
        .await?;
    let since = ctx.now();
    here.frees(&hold).await?;
    // Nor while the lock is free, as long as it is kept for who waits.
    let late = ctx.ask(&name).shared();
    here.refused_in_turn(&late, since).await?;
    there.take(&waiting).await.map(drop)
}

async fn a_repeat_of_a_sharer_is_one_hold_though_another_waits(ctx: Ctx) -> Result {
    let ([here, there], name, hold) = shared_and_waited_for(&ctx).await?;
    there.queues(&name).await?;
    let repeat = here.take(&hold.ask).await?;
    same("the number of holds", repeat.holds, 1)?;
    here.frees(&hold).await
}

async fn a_permit_that_is_given_back_wakes_who_waits(ctx: Ctx) -> Result {
    let ([here, there], name) = ctx.test_drivers().await?;
    let one = here.take(&ctx.ask(&name).permit(2)).await?;
    let _two = here.take(&ctx.ask(&name).permit(2)).await?;
    let waiting = ctx.ask(&name).permit(2).in_line(there.ticket());
    there.refused(&waiting).await?;
    // A driver that has just begun to listen may send `Resync`.
    there.passes_over_wake_ups().await;
    here.leaves(&one, 1).await?;
    let woken = |wake_up: &_| match wake_up {
        WakeUp::First { poll_in, .. } => poll_in.is_zero(),
        wake_up => wakes(wake_up, &waiting),
    };
    there
        .hears("who waits for a permit is woken", ctx.short(), woken)
        .await?;
    there.take(&waiting).await.map(drop)
}
