//! Counting driver: it counts the calls of a client, where no server reports them.

use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Ticket, Wake, WakeUp,
    },
};
use futures_util::{StreamExt, stream::BoxStream};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The calls so far, of all drivers that share this.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallCounts {
    /// Acquires of waiters that were refused again.
    pub(crate) polls: Arc<AtomicU64>,
    /// Holds that were renewed.
    pub(crate) renewed: Arc<AtomicU64>,
}

/// The inner driver and its counters.
#[derive(Debug)]
pub(crate) struct Counted<D> {
    driver: D,
    asked: CallCounts,
    capabilities: Capabilities,
}

impl<D: DistributedLock> Counted<D> {
    pub(crate) fn new(driver: D, asked: &CallCounts) -> Self {
        Self {
            capabilities: driver.capabilities().clone(),
            asked: asked.clone(),
            driver,
        }
    }

    /// Sends no wake-ups: its waiters only poll.
    pub(crate) fn deaf(mut self) -> Self {
        self.capabilities.wake = Wake::Poll;
        self
    }
}

#[async_trait]
impl<D: DistributedLock> DistributedLock for Counted<D> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.driver.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired, DriverError> {
        let answer = self.driver.acquire(req).await;
        if req.retry && matches!(answer, Ok(Acquired::Held(_))) {
            self.asked.polls.fetch_add(1, Relaxed);
        }
        answer
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<(), DriverError> {
        self.driver.leave(name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        let answers = self.driver.renew(lane, batch, give_up).await?;
        let renewed = answers
            .iter()
            .filter(|answer| matches!(answer, Ok(Renewed::Until { .. })))
            .count();
        let renewed = u64::try_from(renewed).unwrap_or_default();
        self.asked.renewed.fetch_add(renewed, Relaxed);
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released, DriverError> {
        self.driver.release(req).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        match self.capabilities.wake {
            Wake::Poll => futures_util::stream::empty().boxed(),
            _ => self.driver.wake_ups(),
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot, DriverError> {
        self.driver.inspect(name).await
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page, DriverError> {
        self.driver.list(prefix, from, limit).await
    }

    async fn break_lock(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken, DriverError> {
        self.driver.break_lock(name, only).await
    }

    async fn close(&self) {
        self.driver.close().await;
    }
}
