//! `shutdown`: closing a driver closes its connections and ends no hold.

use super::held;
use crate::{Ctx, Result, case::cases};

cases! {
    [Clause::Shutdown]
    closing_ends_no_hold bullet("ends no hold");
    a_hold_of_a_closed_client_lives_on_elsewhere needs(Detached) bullet("ends no hold");
    closing_ends_the_wake_ups needs(Push);
    closing_twice_is_closing_once;
}

async fn closing_ends_no_hold(ctx: Ctx) -> Result {
    let ([driver, other], name, _) = held(&ctx).await?;
    ctx.answered(driver.inner().close()).await?;
    drop(driver);
    ctx.would_show_within(ctx.short() / 10).await;
    other.refused(&ctx.ask(&name)).await.map(drop)
}

async fn a_hold_of_a_closed_client_lives_on_elsewhere(ctx: Ctx) -> Result {
    let ([driver, other], _, first) = held(&ctx).await?;
    let second = driver.take(&first.ask.again()).await?;
    driver.inner().close().await;
    other.renews(&first, ctx.long()).await?;
    other.leaves(&second, 1).await?;
    other.frees(&first).await
}

async fn closing_ends_the_wake_ups(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    driver.inner().close().await;
    driver.no_wake_up_left(ctx.answer()).await
}

async fn closing_twice_is_closing_once(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    for _ in 0..2 {
        ctx.answered(driver.inner().close()).await?;
    }
    Ok(())
}
