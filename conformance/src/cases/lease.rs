//! `lease`: each hold has its own end; nothing shortens what remains, and releasing one hold leaves the
//! others what they asked for.

use crate::{Ctx, Result, case::cases, expect::is_left};

cases! {
    [Clause::Lease]
    reentry_with_a_shorter_lease_never_shortens
        bullet("the record then lasts until the latest end of its living holds");
    reentry_with_a_longer_lease_prolongs
        bullet("the record then lasts until the latest end of its living holds");
    releasing_the_longest_hold_leaves_what_the_others_asked_for
        bullet("other holds stay, and the record lasts until the latest end among them");
    releasing_a_shorter_hold_leaves_the_longest
        bullet("other holds stay, and the record lasts until the latest end among them");
    renewing_a_shorter_hold_leaves_the_longest;
    no_grant_promises_more_than_its_lease;
}

async fn reentry_with_a_shorter_lease_never_shortens(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let ask = ctx.ask(&ctx.name()?);
    let longer = caller.take(&ask.clone().lasting(ctx.short() * 2)).await?;
    caller.take(&ask.again().lasting(ctx.short())).await?;
    other.takes_over(&longer).await.map(drop)
}

async fn reentry_with_a_longer_lease_prolongs(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let ask = ctx.ask(&ctx.name()?);
    caller.take(&ask.clone().lasting(ctx.short())).await?;
    let longer = caller.take(&ask.again().lasting(ctx.short() * 2)).await?;
    other.takes_over(&longer).await.map(drop)
}

async fn releasing_the_longest_hold_leaves_what_the_others_asked_for(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let ask = ctx.ask(&ctx.name()?);
    for longest_first in [true, false] {
        let ask = ask.again();
        let (first, second) = if longest_first {
            (ctx.long(), ctx.short())
        } else {
            (ctx.short(), ctx.long())
        };
        let first = caller.take(&ask.clone().lasting(first)).await?;
        let second = caller.take(&ask.again().lasting(second)).await?;
        let (longest, shorter) = if longest_first {
            (first, second)
        } else {
            (second, first)
        };
        caller.leaves(&longest, 1).await?;
        other.takes_over(&shorter).await?;
        other.breaks(&ask.name, None).await?;
    }
    Ok(())
}

async fn releasing_a_shorter_hold_leaves_the_longest(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let ask = ctx.ask(&ctx.name()?);
    let longest = caller.take(&ask.clone().lasting(ctx.short() * 2)).await?;
    let shorter = caller.take(&ask.again().lasting(ctx.short())).await?;
    caller.leaves(&shorter, 1).await?;
    other.takes_over(&longest).await.map(drop)
}

async fn renewing_a_shorter_hold_leaves_the_longest(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let ask = ctx.ask(&ctx.name()?);
    let longest = caller.take(&ask.clone().lasting(ctx.short() * 2)).await?;
    let shorter = caller.take(&ask.again().lasting(ctx.short())).await?;
    caller.renew_one(&shorter, Some(ctx.short() / 2)).await?;
    other.takes_over(&longest).await.map(drop)
}

async fn no_grant_promises_more_than_its_lease(ctx: Ctx) -> Result {
    let caller = ctx.caller().await?;
    let ask = ctx.ask(&ctx.name()?);
    for lease in [ctx.long(), ctx.short(), ctx.short() * 2] {
        let hold = caller.take(&ask.again().lasting(lease)).await?;
        is_left(hold.valid_for, lease)?;
    }
    Ok(())
}
