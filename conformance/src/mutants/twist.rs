//! Interface of a wrong driver: the calls that it gets wrong.

use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Hint, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket,
    },
};
use futures_core::stream::BoxStream;
use std::{fmt::Debug, sync::Arc};

/// One mistake: it overrides the calls that it gets wrong; all others pass through.
#[async_trait]
pub trait Twist: Debug + Send + Sync + 'static {
    /// See [`DistributedLock::acquire`].
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        inner.acquire(req).await
    }

    /// See [`DistributedLock::leave`].
    async fn leave(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        ticket: Ticket,
    ) -> Result<()> {
        inner.leave(name, ticket).await
    }

    /// See [`DistributedLock::renew`].
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        inner.renew(lane, batch, give_up).await
    }

    /// See [`DistributedLock::release`].
    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        inner.release(req).await
    }

    /// See [`DistributedLock::hints`].
    fn hints(&self, inner: &dyn DistributedLock) -> BoxStream<'static, Hint> {
        inner.hints()
    }

    /// See [`DistributedLock::inspect`].
    async fn inspect(&self, inner: &dyn DistributedLock, name: &LockName) -> Result<Snapshot> {
        inner.inspect(name).await
    }

    /// See [`DistributedLock::list`].
    async fn list(
        &self,
        inner: &dyn DistributedLock,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page> {
        inner.list(prefix, from, limit).await
    }

    /// See [`DistributedLock::break_lock`].
    async fn break_lock(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        inner.break_lock(name, only).await
    }

    /// See [`DistributedLock::close`].
    async fn close(&self, inner: &dyn DistributedLock) {
        inner.close().await;
    }
}

/// The driver with this mistake.
pub(crate) fn twisted(
    inner: Arc<dyn DistributedLock>,
    twist: Arc<dyn Twist>,
) -> Arc<dyn DistributedLock> {
    Arc::new(Twisted { inner, twist })
}

#[derive(Debug)]
struct Twisted {
    inner: Arc<dyn DistributedLock>,
    twist: Arc<dyn Twist>,
}

#[async_trait]
impl DistributedLock for Twisted {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.inner.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.twist.acquire(&*self.inner, req).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.twist.leave(&*self.inner, name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.twist.renew(&*self.inner, lane, batch, give_up).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.twist.release(&*self.inner, req).await
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        self.twist.hints(&*self.inner)
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.twist.inspect(&*self.inner, name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.twist.list(&*self.inner, prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.twist.break_lock(&*self.inner, name, only).await
    }

    async fn close(&self) {
        self.twist.close(&*self.inner).await;
    }
}
