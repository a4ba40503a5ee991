//! `loss`: a holder learns in time that it lost the lock. The driver's part is to tell the truth at the
//! next renewal.

use super::held;
use crate::{Ctx, Result, case::cases};

cases! {
    [Clause::Loss]
    a_hold_whose_record_was_lost_is_not_held needs(Records);
    a_flushed_store_holds_nothing needs(Flush);
    a_hold_that_was_broken_and_taken_is_not_held;
}

async fn a_hold_whose_record_was_lost_is_not_held(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let (name, beside) = (ctx.name()?, ctx.name()?);
    let lost = driver.take(&ctx.ask(&name)).await?;
    let stays = driver.take(&ctx.ask(&beside)).await?;
    ctx.records()?.delete(&name).await?;
    driver.cannot_renew(&lost).await?;
    other.sees_free(&name).await?;
    let next = other.take(&ctx.ask(&name)).await?;
    driver.cannot_renew(&lost).await?;
    other.frees(&next).await?;
    driver.frees(&stays).await
}

async fn a_flushed_store_holds_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name, lost) = held(&ctx).await?;
    ctx.records()?.flush().await?;
    driver.cannot_renew(&lost).await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await?;
    driver.cannot_renew(&lost).await
}

async fn a_hold_that_was_broken_and_taken_is_not_held(ctx: Ctx) -> Result {
    let ([driver, other], name, lost) = held(&ctx).await?;
    other.breaks(&name, None).await?;
    let next = other.take(&ctx.ask(&name)).await?;
    driver.cannot_renew(&lost).await?;
    other.renews(&next, ctx.long()).await?;
    other.frees(&next).await
}
