//! `mutex`: holders that go through a client exclude each other.

use super::{test_client::TestClient, test_lock::TestLock};
use crate::{Ctx, Result, case::cases, same};
use dlock_core::Error;
use futures_util::future::try_join_all;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::SeqCst},
};
use tokio::task::yield_now;

cases! {
    [Clause::Mutex]
    clients_never_lose_a_count;
}

async fn clients_never_lose_a_count(ctx: Ctx) -> Result {
    let (clients, name) = TestClient::several::<3>(&ctx).await?;
    let counter = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for client in &clients {
        for _ in 0..TASKS {
            tasks.push(tokio::spawn(add(client.lock(&name)?, Arc::clone(&counter))));
        }
    }
    let done = ctx.within("all have had a turn", ctx.answer() * 3, try_join_all(tasks));
    done.await??.into_iter().collect::<Result<(), _>>()?;
    same("the counter", counter.load(SeqCst), 3 * TASKS * TURNS)
}

/// Adds to a counter that only the lock protects.
async fn add(lock: TestLock, counter: Arc<AtomicU32>) -> Result<(), Error> {
    for _ in 0..TURNS {
        let guard = lock.acquire().await?;
        let before = counter.load(SeqCst);
        yield_now().await;
        counter.store(before + 1, SeqCst);
        guard.release().await?;
    }
    Ok(())
}

/// The tasks of each client: they also contend with each other.
const TASKS: u32 = 3;
const TURNS: u32 = 4;
