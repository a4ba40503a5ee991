//! `mutex`: at any instant at most one owner holds a name, its lease unexpired by the server's clock.

use super::{held, held_for};
use crate::{Ctx, Failure, Result, case::cases, ensure, expect::is_left, same};
use futures_util::future::{join_all, try_join_all};
use std::sync::atomic::{AtomicU32, Ordering};

cases! {
    [Clause::Mutex]
    a_free_name_is_granted_at_once;
    one_of_many_contenders_wins bullet("held by another owner");
    never_two_inside_while_many_take_turns bullet("held by another owner");
    [Clause::Mutex bullet("held by another owner, its lease unexpired")]
    held_by_another_owner_is_refused_and_nothing_changes;
    no_client_acquires_before_the_lease_is_over;
}

async fn a_free_name_is_granted_at_once(ctx: Ctx) -> Result {
    let ([driver], name, hold) = held(&ctx).await?;
    same("the number of holds", hold.holds, 1)?;
    is_left(hold.valid_for, ctx.long())?;
    driver.frees(&hold).await?;
    driver.sees_free(&name).await
}

async fn held_by_another_owner_is_refused_and_nothing_changes(ctx: Ctx) -> Result {
    let ([holder, other], name, hold) = held(&ctx).await?;
    for contender in [&holder, &other] {
        contender.refused(&ctx.ask(&name)).await?;
        other.sees_holder(&hold).await?;
        other.sees_holds(&name, 1).await?;
    }
    holder.renews(&hold, ctx.long()).await?;
    holder.frees(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn one_of_many_contenders_wins(ctx: Ctx) -> Result {
    let (drivers, _) = ctx.test_drivers::<4>().await?;
    for _ in 0..8 {
        let name = ctx.name()?;
        let asks: Vec<_> = (0..16).map(|_| ctx.ask(&name)).collect();
        let tries = asks.iter().zip(drivers.iter().cycle());
        let taken = try_join_all(tries.map(|(ask, driver)| driver.try_take(ask))).await?;
        same("the number of winners", taken.iter().flatten().count(), 1)?;
    }
    Ok(())
}

async fn no_client_acquires_before_the_lease_is_over(ctx: Ctx) -> Result {
    let ([_holder, other], name, first) = held_for(&ctx, ctx.short()).await?;
    let second = other.take_within(&ctx.ask(&name), ctx.short() * 2).await?;
    let after = second.after.since(first.before);
    let (promised, lease) = (first.valid_for, first.ask.lease);
    ensure(
        after >= promised && after >= lease,
        format!("granted after {after:?} of {lease:?}, promised were {promised:?}"),
    )
}

async fn never_two_inside_while_many_take_turns(ctx: Ctx) -> Result {
    let (drivers, name) = ctx.test_drivers::<4>().await?;
    let inside = AtomicU32::new(0);
    let turns = drivers.iter().map(|driver| async {
        for _ in 0..8 {
            let hold = driver.take_within(&ctx.ask(&name), ctx.answer()).await?;
            let others = inside.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            same("the number of others inside", others, 0)?;
            driver.frees(&hold).await?;
        }
        Ok::<_, Failure>(())
    });
    join_all(turns).await.into_iter().collect()
}
