//! `admin`: inspecting changes nothing and shows everything; breaking frees only the named lock.

use super::{held, held_for};
use crate::{Ctx, Failure, Result, TestDriver, case::cases, ensure, expect::is_left, same};
use dlock_core::{Broken, FencingToken, HolderInfo, LockName, driver::Wake};
use std::collections::BTreeSet;

cases! {
    [Clause::Admin]
    a_name_never_heard_of_is_free bullet("changes nothing. A name never heard of is a free name");
    inspect_changes_nothing bullet("changes nothing. A name never heard of is a free name");
    inspect_shows_who_is_inside bullet("no answer carries an owner");
    list_shows_every_name_held_shut_or_reserved;
    list_takes_its_prefix_literally;
    breaking_with_its_token_frees_the_incarnation;
    a_walk_finds_every_name_held_throughout bullet("`next: None` is the only end");
    list_changes_nothing bullet("`next: None` is the only end");
    breaking_with_another_token_changes_nothing bullet("another token: `Changed`");
    breaking_a_free_name_says_so bullet("a free name: `WasFree`");
    breaking_ends_every_hold bullet("holders learn it at their next `renew`");
    [Clause::Admin bullet("frees what was unavailable or reserved")]
    breaking_frees_a_reserved_name_and_the_queue_goes_on needs(Queue);
    breaking_serves_the_queue needs(Queue);
}

async fn a_name_never_heard_of_is_free(ctx: Ctx) -> Result {
    let ([driver], name) = ctx.test_drivers().await?;
    driver.sees_free(&name).await?;
    let listed = driver.list(name.as_str(), 10).await?;
    same("what is listed", listed.len(), 0)
}

async fn inspect_changes_nothing(ctx: Ctx) -> Result {
    let ([_holder, other], name, hold) = held_for(&ctx, ctx.short()).await?;
    let over = || async { Ok(other.inspect(&name).await?.holders.is_empty()) };
    let bound = ctx.until_over(&hold);
    ctx.eventually("a lease ends under its observers", bound, over)
        .await?;
    other.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn inspect_shows_who_is_inside(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let note = HolderInfo::new("a-host", 42).with_note("a job, its note");
    let hold = driver.take(&ctx.ask(&name).noting(note.clone())).await?;
    let more = driver.take(&hold.ask.again()).await?;
    let seen = other.inspect(&name).await?;
    same("the number of holds", seen.holds, 2)?;
    same("shut", seen.unavailable_for, None)?;
    let [holder] = &seen.holders[..] else {
        return Err(Failure::new(format!("not one holder: {seen:?}")));
    };
    same("the owner", holder.owner, hold.ask.owner.fingerprint())?;
    same("the token", holder.token, Some(hold.token))?;
    same("the note", &holder.info, &note)?;
    is_left(holder.rest.unwrap_or(ctx.long()), ctx.long())?;
    driver.leaves(&more, 1).await?;
    driver.frees(&hold).await?;
    other.sees_free(&name).await
}

async fn list_shows_every_name_held_shut_or_reserved(ctx: Ctx) -> Result {
    let ([driver, waiter], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let of = |kind: &str| LockName::new(format!("{base}/{kind}"));
    let (held, shut, reserved, free) = (of("held")?, of("shut")?, of("reserved")?, of("free")?);
    let hold = driver.take(&ctx.ask(&held)).await?;
    let kept = driver.take(&ctx.ask(&shut)).await?;
    driver.release(&kept, Some(ctx.long())).await?;
    let turn = driver.take(&ctx.ask(&reserved)).await?;
    waiter.queues(&reserved).await?;
    driver.frees(&turn).await?;
    let gone = driver.take(&ctx.ask(&free)).await?;
    driver.frees(&gone).await?;
    let mut wanted = BTreeSet::from([held.clone(), shut]);
    if driver.inner().capabilities().wake == Wake::Queue {
        wanted.insert(reserved);
    }
    same("the names listed", names(&waiter, &base).await?, wanted)?;
    let listed = waiter.list(held.as_str(), 10).await?;
    let owners = listed.iter().flat_map(|seen| &seen.holders);
    let owner = owners.map(|holder| holder.owner).next();
    let wanted = Some(hold.ask.owner.fingerprint());
    same("the owner listed", owner, wanted)
}

/// The names that a listing shows.
async fn names(driver: &TestDriver, prefix: &str) -> Result<BTreeSet<LockName>> {
    let listed = driver.list(prefix, 10).await?;
    Ok(listed.into_iter().map(|seen| seen.name).collect())
}

async fn a_walk_finds_every_name_held_throughout(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let name = |number: usize| LockName::new(format!("{base}/{number}"));
    let mut missing = BTreeSet::new();
    for number in 0..30 {
        driver.take(&ctx.ask(&name(number)?)).await?;
        missing.insert(name(number)?);
    }
    let (mut from, mut churn) = (None, 100);
    loop {
        let (page, next) = other.page(&base, from.as_ref(), 4).await?;
        for seen in page {
            let own = seen.name.as_str().starts_with(&base);
            ensure(own, format!("listed: {:?}", seen.name))?;
            missing.remove(&seen.name);
        }
        // Other locks come and go during the listing.
        if churn < 200 {
            churn += 1;
            let passing = driver.take(&ctx.ask(&name(churn)?)).await?;
            if churn % 2 == 0 {
                driver.frees(&passing).await?;
            }
        }
        if next.is_none() {
            break;
        }
        from = next;
    }
    same("held throughout and not found", missing, BTreeSet::new())
}

async fn list_changes_nothing(ctx: Ctx) -> Result {
    let ([_holder, other], name, hold) = held_for(&ctx, ctx.short()).await?;
    let over = || async { Ok(other.list(name.as_str(), 10).await?.is_empty()) };
    let bound = ctx.until_over(&hold);
    ctx.eventually("a lease ends while others list", bound, over)
        .await?;
    other.take_soon(&ctx.ask(&name)).await.map(drop)
}

async fn list_takes_its_prefix_literally(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    for special in ["*", "?", "[ab]", "%", "_", "\\", ".", "{", "$", "^"] {
        let prefix = format!("{base}{special}");
        let meant = LockName::new(format!("{prefix}/x"))?;
        let beside = ["a", "b", "0"].map(|other| LockName::new(format!("{base}{other}/x")));
        let hold = driver.take(&ctx.ask(&meant)).await?;
        let mut others = Vec::new();
        for name in beside {
            others.push(driver.take(&ctx.ask(&name?)).await?);
        }
        let mut names: Vec<_> = other
            .list(&prefix, 10)
            .await?
            .into_iter()
            .map(|seen| seen.name)
            .collect();
        names.dedup();
        same(format!("what begins with {prefix:?}"), names, vec![meant])?;
        for hold in others.iter().chain([&hold]) {
            driver.frees(hold).await?;
        }
    }
    Ok(())
}

async fn breaking_with_its_token_frees_the_incarnation(ctx: Ctx) -> Result {
    let ([_caller, other], name, hold) = held(&ctx).await?;
    let token = Some(hold.token);
    let answer = other.breaks(&name, token).await?;
    same("break", answer, Broken::Freed { token })?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn breaking_with_another_token_changes_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name, past) = held(&ctx).await?;
    driver.frees(&past).await?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    let token = Some(hold.token);
    let next = FencingToken(hold.token.0 + 1);
    for wrong in [past.token, next, FencingToken(0)] {
        let answer = other.breaks(&name, Some(wrong)).await?;
        same("break", answer, Broken::Changed { token })?;
        other.refused(&ctx.ask(&name)).await?;
    }
    driver.renews(&hold, ctx.long()).await?;
    driver.frees(&hold).await
}

async fn breaking_a_free_name_says_so(ctx: Ctx) -> Result {
    let driver = ctx.test_driver().await?;
    let (never, past, lapsed) = (ctx.name()?, ctx.name()?, ctx.name()?);
    let hold = driver.take(&ctx.ask(&past)).await?;
    driver.frees(&hold).await?;
    let hold = driver.take(&ctx.ask(&lapsed).lasting(ctx.short())).await?;
    ctx.sleep_past(&hold).await;
    for name in [&never, &past, &lapsed] {
        for only in [None, Some(hold.token)] {
            same("break", driver.breaks(name, only).await?, Broken::WasFree)?;
        }
        driver.take_soon(&ctx.ask(name)).await?;
    }
    Ok(())
}

async fn breaking_ends_every_hold(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    let mut holds = vec![first.clone()];
    for _ in 0..2 {
        holds.push(driver.take(&first.ask.again()).await?);
    }
    let answer = other.breaks(&name, None).await?;
    let token = Some(first.token);
    same("break", answer, Broken::Freed { token })?;
    for hold in &holds {
        driver.cannot_renew(hold).await?;
    }
    let next = other.take(&first.ask.again()).await?;
    same("the number of holds", next.holds, 1)?;
    driver.cannot_renew(&first).await?;
    other.frees(&next).await
}

async fn breaking_frees_a_reserved_name_and_the_queue_goes_on(ctx: Ctx) -> Result {
    let ([holder, first, second], name, hold) = held(&ctx).await?;
    first.queues(&name).await?;
    let waiting = second.queues(&name).await?;
    holder.frees(&hold).await?;
    let answer = holder.breaks(&name, None).await?;
    same("break", answer, Broken::Freed { token: None })?;
    // The turn is over; the next one has begun.
    second.take(&waiting).await.map(drop)
}

async fn breaking_serves_the_queue(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name) = ctx.test_drivers().await?;
    holder.take(&ctx.ask(&name)).await?;
    let waiting = waiter.queues(&name).await?;
    let since = ctx.now();
    other.breaks(&name, None).await?;
    other.refused_in_turn(&ctx.ask(&name), since).await?;
    waiter.take(&waiting).await.map(drop)
}
