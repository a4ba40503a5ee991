//! `mutex`: holders that go through a client exclude each other.

use super::peer::Peer;
use crate::{Ctx, Result, case::cases, same};
use dlock_core::{Lock, LockName};
use futures_util::future::{join_all, try_join_all};
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::SeqCst},
};
use tokio::task::yield_now;

cases! {
    [Clause::Mutex]
    tasks_of_one_client_never_lose_a_count;
    clients_never_lose_a_count;
    of_those_who_try_at_once_one_gets_it;
}

async fn tasks_of_one_client_never_lose_a_count(ctx: Ctx) -> Result {
    let peer = Peer::new(&ctx).await?;
    let name = ctx.name()?;
    counted(&ctx, &[peer], &name, 8, 4).await
}

async fn clients_never_lose_a_count(ctx: Ctx) -> Result {
    let peers = Peer::several::<3>(&ctx).await?;
    let name = ctx.name()?;
    counted(&ctx, &peers, &name, 3, 4).await
}

async fn of_those_who_try_at_once_one_gets_it(ctx: Ctx) -> Result {
    let peers = Peer::several::<2>(&ctx).await?;
    for _ in 0..4 {
        let name = ctx.name()?;
        let mut tries = Vec::new();
        for peer in peers.iter().cycle().take(8) {
            tries.push(peer.lock(&name)?.try_acquire());
        }
        let guards = join_all(tries).await;
        let won = guards.iter().filter(|guard| matches!(guard, Ok(Some(_))));
        same("the number of winners", won.count(), 1)?;
    }
    Ok(())
}

/// Tasks of these clients add to a counter that only the lock protects.
async fn counted(ctx: &Ctx, peers: &[Peer], name: &LockName, tasks: u32, turns: u32) -> Result {
    let counter = Arc::new(AtomicU32::new(0));
    let mut all = Vec::new();
    let mut wanted = 0;
    for peer in peers {
        for _ in 0..tasks {
            wanted += turns;
            let lock = peer.lock(name)?;
            all.push(tokio::spawn(add(lock, Arc::clone(&counter), turns)));
        }
    }
    let done = ctx.within("all have had a turn", ctx.answer() * 3, try_join_all(all));
    for added in done.await?? {
        added?;
    }
    same("the counter", counter.load(SeqCst), wanted)
}

async fn add(lock: Lock, counter: Arc<AtomicU32>, turns: u32) -> Result<(), dlock_core::Error> {
    for _ in 0..turns {
        let guard = lock.acquire().await?;
        let before = counter.load(SeqCst);
        yield_now().await;
        counter.store(before + 1, SeqCst);
        guard.release().await?;
    }
    Ok(())
}
