//! `lease`: each hold has its own end; nothing shortens what remains, and releasing one hold leaves the
//! others what they asked for.

use super::held_for;
use crate::{Ctx, Hold, Result, TestDriver, case::cases, expect::is_left};
use std::time::Duration;

cases! {
    [Clause::Lease]
    renewing_a_shorter_hold_leaves_the_longest;
    no_grant_promises_more_than_its_lease;
    [Clause::Lease bullet("the record then lasts until the latest end of its living holds")]
    reentry_with_a_shorter_lease_never_shortens;
    reentry_with_a_longer_lease_prolongs;
    [Clause::Lease bullet("other holds stay, and the record lasts until the latest end among them")]
    releasing_the_longest_hold_leaves_what_the_others_asked_for;
    releasing_a_shorter_hold_leaves_the_longest;
}

async fn reentry_with_a_shorter_lease_never_shortens(ctx: Ctx) -> Result {
    let ([_caller, other], [longer, _]) = two(&ctx, ctx.short() * 2, ctx.short()).await?;
    other.takes_over(&longer).await.map(drop)
}

async fn reentry_with_a_longer_lease_prolongs(ctx: Ctx) -> Result {
    let ([_caller, other], [_, longer]) = two(&ctx, ctx.short(), ctx.short() * 2).await?;
    other.takes_over(&longer).await.map(drop)
}

async fn releasing_the_longest_hold_leaves_what_the_others_asked_for(ctx: Ctx) -> Result {
    let ([driver, other], [longest, shorter]) = two(&ctx, ctx.long(), ctx.kept()).await?;
    driver.leaves(&longest, 1).await?;
    other.takes_over(&shorter).await?;
    let ([driver, other], [shorter, longest]) = two(&ctx, ctx.kept(), ctx.long()).await?;
    driver.leaves(&longest, 1).await?;
    other.takes_over(&shorter).await.map(drop)
}

async fn releasing_a_shorter_hold_leaves_the_longest(ctx: Ctx) -> Result {
    let ([driver, other], [longest, shorter]) = two(&ctx, ctx.kept() * 2, ctx.kept()).await?;
    driver.leaves(&shorter, 1).await?;
    other.takes_over(&longest).await.map(drop)
}

async fn renewing_a_shorter_hold_leaves_the_longest(ctx: Ctx) -> Result {
    let ([driver, other], [longest, shorter]) = two(&ctx, ctx.short() * 2, ctx.short()).await?;
    driver.renew_one(&shorter, Some(ctx.short() / 2)).await?;
    other.takes_over(&longest).await.map(drop)
}

/// Two client processes, and two holds of the first one's owner with these leases.
async fn two(ctx: &Ctx, first: Duration, second: Duration) -> Result<([TestDriver; 2], [Hold; 2])> {
    let (drivers, _, first) = held_for(ctx, first).await?;
    let second = drivers[0].take(&first.ask.again().lasting(second)).await?;
    Ok((drivers, [first, second]))
}

async fn no_grant_promises_more_than_its_lease(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let ask = ctx.ask(&ctx.name()?);
    for lease in [ctx.long(), ctx.short(), ctx.short() * 2] {
        let hold = driver.take(&ask.again().lasting(lease)).await?;
        is_left(hold.valid_for, lease)?;
    }
    Ok(())
}
