//! Wire: the layer between one client and the store. It translates times, counts calls, and sees every
//! request before the store does.
//!
//! The model store reads a `give_up` on its own clock. A client whose clock has jumped reads another time,
//! so a real driver translates, as [`ServerClock`](dlock_core::driver::kit::ServerClock) does; so does this layer.
//! `late` covers what a jump does to requests in flight: a client may believe that more time has passed for
//! the store than has.

use crate::judge::Judge;
use async_trait::async_trait;
use dlock_core::{
    Broken, Clock, FencingToken, Holds, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Lane, Page, Release, Released,
        Renew, Renewed, Result, Ticket, WakeUp,
    },
};
use dlock_memory::MemoryDriver;
use futures_core::stream::BoxStream;
use std::{
    fmt::Debug,
    sync::{Arc, OnceLock},
    time::Duration,
};

#[derive(Debug)]
pub(crate) struct Wire {
    driver: MemoryDriver,
    caps: Capabilities,
    clock: Clock,
    client: usize,
    judge: Arc<Judge>,
    /// When the driver was closed, in true time.
    closed: OnceLock<Duration>,
}

impl Wire {
    pub(crate) fn new(
        driver: MemoryDriver,
        late: Duration,
        clock: Clock,
        client: usize,
        judge: Arc<Judge>,
    ) -> Self {
        let mut caps = driver.capabilities().clone();
        caps.late = late;
        caps.renew_batch = 2;
        Self {
            driver,
            caps,
            clock,
            client,
            judge,
            closed: OnceLock::new(),
        }
    }

    /// The same instant on the store's clock.
    fn there(&self, at: Instant) -> Instant {
        self.driver.store().clock().now() + at.since(self.clock.now())
    }

    async fn counted<T: Debug>(
        &self,
        what: impl Debug,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if !self.judge.called() {
            return std::future::pending().await; // it would never end
        }
        let before = self.judge.now();
        let client = self.client;
        self.judge
            .detail(format_args!("client {client} asks {what:?}"));
        let answer = call.await;
        self.judge.detail(format_args!(
            "client {client} hears {answer:?} from {before:?}"
        ));
        if answer.is_ok() && self.judge.now() == before {
            self.judge.answered_at_once();
        }
        answer
    }
}

#[async_trait]
impl DistributedLock for Wire {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.driver.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.judge.asks(self.client, req.owner.fingerprint());
        let give_up = req.give_up;
        let mut req = req.clone();
        req.give_up = self.there(req.give_up);
        let answer = self.counted(&req, self.driver.acquire(&req)).await;
        let now = self.clock.now();
        if answer.is_ok() && now < give_up {
            self.judge.answers(self.client, &req.name, now);
        }
        answer
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.counted(("leave", name, ticket), self.driver.leave(name, ticket))
            .await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        // A batch that was being sent at that very moment meets a closed driver.
        let now = self.judge.now();
        if self.closed.get().is_some_and(|closed| *closed < now) {
            self.judge.breach(format_args!("renewed after shutdown"));
        }
        self.judge.renews(self.client, batch, self.caps.renew_batch);
        let give_up = self.there(give_up);
        self.counted(("renew", batch), self.driver.renew(lane, batch, give_up))
            .await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        if let Holds::One(hold) = req.holds {
            self.judge.releases(self.client, hold);
        }
        self.counted(req, self.driver.release(req)).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.driver.wake_ups()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.counted(("inspect", name), self.driver.inspect(name))
            .await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.counted("list", self.driver.list(prefix, from, limit))
            .await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.counted(("break", name), self.driver.break_lock(name, only))
            .await
    }

    async fn close(&self) {
        let _ = self.closed.set(self.judge.now()); // the first time counts
        self.driver.close().await;
    }
}
