//! Requests that share a statement: acquires and releases.

use crate::table::LockTable;
use dlock_core::{
    FencingToken, Instant, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, Freed},
    },
};
use std::sync::Arc;

/// Acquires; the answer is the token, or `None` where one statement cannot take the lock.
pub(crate) struct Takes(pub(crate) Arc<LockTable>);

impl Batch for Takes {
    type Request = Acquire;
    type Answer = Option<FencingToken>;

    fn name(request: &Acquire) -> &LockName {
        &request.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        first.lease.length() == other.lease.length() && first.info == other.info
    }

    fn give_up(request: &Acquire) -> Option<Instant> {
        Some(request.give_up)
    }

    async fn send_one(&self, request: &Acquire) -> Result<Option<FencingToken>> {
        self.0.take(request).await
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Option<FencingToken>>>>> {
        let taken = self.0.take_all(batch).await?.into_iter();
        Ok(taken.map(|taken| Some(Ok(taken))).collect())
    }
}

/// Releases of one hold.
pub(crate) struct Frees(pub(crate) Arc<LockTable>);

impl Batch for Frees {
    type Request = Release;
    type Answer = Freed;

    fn name(request: &Release) -> &LockName {
        &request.name
    }

    async fn send_one(&self, request: &Release) -> Result<Freed> {
        self.0.free(request).await
    }

    async fn send(&self, batch: &[Release]) -> Result<Vec<Option<Result<Freed>>>> {
        Ok(self
            .0
            .free_all(batch)
            .await?
            .into_iter()
            .map(Some)
            .collect())
    }
}
