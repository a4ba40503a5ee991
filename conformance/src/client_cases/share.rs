//! `share`: readers, writers and holders of permits, as clients have them.

use super::{
    test_client::{POLL, TestClient, Waiter, fails},
    test_lock::TestLock,
};
use crate::{Ctx, Result, case::cases, ensure, same};
use dlock_core::{ErrorKind, Guard, LockName, Mode, driver::Wake};
use std::{
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

cases! {
    [Clause::Share]
    readers_and_a_writer_take_turns needs(Shares);
    readers_that_wait_enter_together needs(Shares);
    never_more_inside_than_permits needs(Shares);
    a_reader_behind_a_writer_that_gives_up_enters_at_once needs(Shares, Queue);
    who_disagree_about_the_permits_are_told needs(Shares);
    a_reader_neither_enters_again_nor_becomes_a_writer needs(Shares);
}

async fn readers_and_a_writer_take_turns(ctx: Ctx) -> Result {
    let ([here, there], name) = TestClient::several(&ctx).await?;
    let (one, two) = (read(&here, &name).await?, read(&there, &name).await?);
    same("the tokens", one.token(), two.token())?;
    let shown = here.inner.admin().inspect(name.as_str()).await?;
    let mode = shown.holders.first().map(|holder| holder.owner.mode());
    same(
        "the mode and the holds",
        (mode, shown.holds),
        (Some(Mode::Shared), 2),
    )?;
    let writer = there.waits(writing(&there, &name)?).await?;
    let late = reading(&here, &name)?.try_acquire().await?;
    ensure(late.is_none(), "a reader passed a writer who waits")?;
    drop(one);
    two.release().await?;
    let writer = writer.done(ctx.answer() + POLL).await??;
    let reader = here.waits(reading(&here, &name)?).await?;
    writer.release().await?;
    reader.served(ctx.answer() + POLL).await
}

async fn readers_that_wait_enter_together(ctx: Ctx) -> Result {
    let ([here, there], name) = TestClient::several(&ctx).await?;
    let writer = here.acquire(&name).await?;
    let mut waiting: Vec<Waiter> = Vec::new();
    for client in [&there, &here, &there, &here, &there] {
        waiting.push(ctx.spawn(reading(client, &name)?.acquire()));
    }
    ctx.would_show_within(Duration::from_millis(10)).await; // they are queued
    writer.release().await?;
    // Where the store has a queue, far less than a poll.
    let bound = match here.inner.capabilities().wake {
        Wake::Queue => POLL / 4 + ctx.slack(),
        _ => ctx.answer() + POLL,
    };
    let mut inside: Vec<Guard> = Vec::new();
    for reader in waiting {
        inside.push(reader.done(bound).await??);
    }
    // All of them are inside at once.
    for reader in &inside {
        reader.check()?;
    }
    here.refused(&name).await
}

async fn a_reader_behind_a_writer_that_gives_up_enters_at_once(ctx: Ctx) -> Result {
    let ([here, there], _) = TestClient::several(&ctx).await?;
    for behind in [&here, &there] {
        let name = ctx.name()?;
        let inside = read(&there, &name).await?;
        let writer = here.waits(writing(&here, &name)?).await?;
        let reader = ctx.spawn(reading(behind, &name)?.acquire());
        ctx.would_show_within(Duration::from_millis(10)).await; // the reader is behind it
        drop(writer);
        // Far less than a poll.
        drop(reader.done(POLL / 4 + ctx.slack()).await??);
        drop(inside);
    }
    Ok(())
}

async fn never_more_inside_than_permits(ctx: Ctx) -> Result {
    const PERMITS: u32 = 3;
    let ([here, there], name) = TestClient::several(&ctx).await?;
    let inside = std::sync::Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for task in 0..8 {
        let lock = permit(if task % 2 == 0 { &here } else { &there }, &name, PERMITS)?;
        let inside = std::sync::Arc::clone(&inside);
        tasks.push(ctx.spawn(async move {
            for _ in 0..5 {
                let guard = lock.acquire().await?;
                let count = inside.fetch_add(1, SeqCst) + 1;
                ensure(count <= PERMITS, format!("{count} are inside"))?;
                tokio::task::yield_now().await;
                inside.fetch_sub(1, SeqCst);
                guard.release().await?;
            }
            Ok::<_, crate::Failure>(())
        }));
    }
    for task in tasks {
        task.done(ctx.answer() * 20).await??;
    }
    ctx.sees_free(&name).await
}

async fn who_disagree_about_the_permits_are_told(ctx: Ctx) -> Result {
    let ([here, there], name) = TestClient::several(&ctx).await?;
    let _held = here.take(&permit(&here, &name, 2)?).await?;
    let other = permit(&there, &name, 3)?;
    fails(ErrorKind::Misuse, ctx.answered(other.acquire()).await?)?;
    fails(ErrorKind::Misuse, ctx.answered(other.try_acquire()).await?)?;
    Ok(())
}

async fn a_reader_neither_enters_again_nor_becomes_a_writer(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let (reads, writes) = (reading(&client, &name)?, writing(&client, &name)?);
    let reader = reads.acquire().await?;
    let upgraded = ctx.answered(reader.scope(writes.acquire())).await?;
    fails(ErrorKind::Misuse, upgraded)?;
    // Its incarnation may outlive its own hold, so it is not entered by it either.
    let again = ctx.answered(reader.scope(reads.acquire())).await?;
    fails(ErrorKind::Misuse, again)?;
    fails(ErrorKind::Misuse, reader.pass())?;
    let kept = reads.clone().min_hold(ctx.short());
    fails(ErrorKind::Misuse, ctx.answered(kept.acquire()).await?)?;
    let none = reads.clone().min_hold(Duration::ZERO);
    drop(ctx.answered(none.acquire()).await??);
    reader.release().await?;
    let writer = ctx.answered(writes.acquire()).await??;
    let inside = ctx.answered(writer.scope(reads.acquire())).await??;
    same("the token", inside.token(), writer.token())
}

async fn read(client: &TestClient, name: &LockName) -> Result<Guard> {
    client.take(&reading(client, name)?).await
}

fn reading(client: &TestClient, name: &LockName) -> Result<TestLock> {
    Ok(client.noted(client.inner.rw_lock(name)?.read()))
}

fn writing(client: &TestClient, name: &LockName) -> Result<TestLock> {
    Ok(client.noted(client.inner.rw_lock(name)?.write()))
}

fn permit(client: &TestClient, name: &LockName, of: u32) -> Result<TestLock> {
    Ok(client.noted(client.inner.semaphore(name, of)?))
}
