//! `presence`: a waiter learns on what the holder depends.

use crate::{Ctx, Failure, Result, case::cases, same};
use dlock_core::{HolderInfo, driver::Acquired};

cases! {
    [Clause::Presence]
    a_refusal_shows_the_holder_and_its_presence
        bullet("held by another owner: `by` is that holder");
}

async fn a_refusal_shows_the_holder_and_its_presence(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let info = HolderInfo::parse("42 a-host ~00000000000000ff a job");
    let hold = driver.take(&ctx.ask(&name).noting(info.clone())).await?;
    for _ in 0..2 {
        let Acquired::Held(held) = other.acquire(&ctx.ask(&name)).await? else {
            return Err(Failure::new("it was not refused"));
        };
        let by = held
            .by
            .ok_or_else(|| Failure::new("the refusal names no holder"))?;
        same("the owner", by.owner, hold.ask.owner.fingerprint())?;
        same("the token", by.token, Some(hold.token))?;
        same("the info", &by.info, &info)?;
        same("the presence", by.info.presence().is_some(), true)?;
    }
    driver.frees(&hold).await
}
