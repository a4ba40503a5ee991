//! Interface of a wrong driver: the calls that it gets wrong.

use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Lane, Page, Release, Released,
        Renew, Renewed, Result, Ticket, WakeUp,
    },
};
use futures_core::stream::BoxStream;
use std::{fmt::Debug, sync::Arc};

/// The right driver inside.
pub(super) type Inner = dyn DistributedLock;
/// A listing: its prefix, where it goes on, and the most names.
pub(super) type Listing<'a> = (&'a str, Option<&'a Cursor>, usize);
/// The incarnation to break, or whichever it is.
pub(super) type Only = Option<FencingToken>;
/// The answers to a batch of renewals.
pub(super) type Renewals = Result<Vec<Result<Renewed>>>;

/// A batch of renewals on its way to the right driver.
pub(crate) struct Batch<'a> {
    pub(super) inner: &'a Inner,
    pub(super) entries: Vec<Renew>,
    pub(super) give_up: Instant,
    lane: Lane,
}

impl Batch<'_> {
    pub(super) async fn send(&self) -> Renewals {
        self.renew(&self.entries).await
    }

    /// The same with other entries.
    pub(super) async fn renew(&self, entries: &[Renew]) -> Renewals {
        self.inner.renew(self.lane, entries, self.give_up).await
    }
}

/// One mistake: it overrides the calls of [`DistributedLock`] that it gets wrong; all others pass through.
#[async_trait]
pub(crate) trait Mutation: Debug + Send + Sync + 'static {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        inner.acquire(req).await
    }

    async fn leave(&self, inner: &Inner, name: &LockName, ticket: Ticket) -> Result<()> {
        inner.leave(name, ticket).await
    }

    async fn renew(&self, batch: Batch<'_>) -> Renewals {
        batch.send().await
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        inner.release(req).await
    }

    fn wake_ups(&self, inner: &Inner) -> BoxStream<'static, WakeUp> {
        inner.wake_ups()
    }

    async fn inspect(&self, inner: &Inner, name: &LockName) -> Result<Snapshot> {
        inner.inspect(name).await
    }

    async fn list(&self, inner: &Inner, (prefix, from, limit): Listing<'_>) -> Result<Page> {
        inner.list(prefix, from, limit).await
    }

    async fn break_lock(&self, inner: &Inner, name: &LockName, only: Only) -> Result<Broken> {
        inner.break_lock(name, only).await
    }

    async fn close(&self, inner: &Inner) {
        inner.close().await;
    }
}

/// The driver with this mistake.
pub(crate) fn mutated(
    inner: Arc<dyn DistributedLock>,
    mutation: Arc<dyn Mutation>,
) -> Arc<dyn DistributedLock> {
    Arc::new(Mutated { inner, mutation })
}

#[derive(Debug)]
struct Mutated {
    inner: Arc<dyn DistributedLock>,
    mutation: Arc<dyn Mutation>,
}

#[async_trait]
impl DistributedLock for Mutated {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.inner.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.mutation.acquire(&*self.inner, req).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.mutation.leave(&*self.inner, name, ticket).await
    }

    async fn renew(&self, lane: Lane, batch: &[Renew], give_up: Instant) -> Renewals {
        let batch = Batch {
            inner: &*self.inner,
            entries: batch.to_vec(),
            give_up,
            lane,
        };
        self.mutation.renew(batch).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.mutation.release(&*self.inner, req).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.mutation.wake_ups(&*self.inner)
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.mutation.inspect(&*self.inner, name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.mutation
            .list(&*self.inner, (prefix, from, limit))
            .await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.mutation.break_lock(&*self.inner, name, only).await
    }

    async fn close(&self) {
        self.mutation.close(&*self.inner).await;
    }
}
