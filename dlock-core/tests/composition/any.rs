//! Any of several names, some of which fail: the store of each name is its own.

use super::SECOND;
use async_trait::async_trait;
use dlock_core::{
    Broken, Client, Clock, FencingToken, Instant, Lease, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, Wake, WakeUp,
    },
};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use futures_core::stream::BoxStream;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};
use tokio::time;

/// While `away`, no name that begins with `away` can be acquired.
#[derive(Debug)]
struct Sharded {
    driver: MemoryDriver,
    away: Arc<AtomicBool>,
}

#[async_trait]
impl DistributedLock for Sharded {
    fn capabilities(&self) -> &Capabilities {
        self.driver.capabilities()
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.driver.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        if self.away.load(SeqCst) && req.name.as_str().starts_with("away") {
            return Err(DriverError::unavailable("this shard is away"));
        }
        self.driver.acquire(req).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.driver.leave(name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.driver.renew(lane, batch, give_up).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.driver.release(req).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.driver.wake_ups()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.driver.inspect(name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.driver.list(prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.driver.break_lock(name, only).await
    }

    async fn close(&self) {
        self.driver.close().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_whose_shard_was_away_for_long_is_waited_for_again() {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let away = Arc::new(AtomicBool::new(false));
    let client = || {
        let driver = Sharded {
            driver: MemoryDriver::connect(&store, MemoryConfig::new(Wake::Queue)),
            away: Arc::clone(&away),
        };
        let builder = Client::builder(Arc::new(driver)).clock(clock.clone());
        builder.lease(Lease::renewed(SECOND * 6)).build().unwrap()
    };
    let (holder, waiter) = (client(), client());
    let guard = holder.lock("away").unwrap().acquire().await.unwrap();
    let _held = holder.lock("there").unwrap().acquire().await.unwrap();
    let any = waiter.lock_any(["away", "there"]).unwrap();
    let waiting = tokio::spawn(async move { any.acquire().await });
    time::sleep(SECOND).await;
    away.store(true, SeqCst);
    time::sleep(SECOND * 20).await; // longer than an acquire waits for its store
    away.store(false, SeqCst);
    guard.release().await.unwrap();
    let free = time::timeout(SECOND * 3, waiting).await.expect("soon");
    assert_eq!(free.unwrap().unwrap().name().as_str(), "away");
}
