//! Requests that share a script: acquires without a next ticket or a join, and releases of one hold without a
//! minimum hold.

use crate::{
    commands::{Acquisition, Releasing},
    server::Server,
};
use dlock_core::{
    HoldId, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, BatchPolicy},
    },
};
use std::{sync::Arc, time::Duration};

/// Acquires with one lease and one holder info.
pub(crate) struct Acquires(pub(crate) Arc<Server>);

impl Batch for Acquires {
    type Request = Acquire;
    type Answer = Acquisition;

    fn name(request: &Acquire) -> &LockName {
        &request.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        first.lease.length() == other.lease.length() && first.note == other.note
    }

    async fn send_one(&self, request: &Acquire) -> Result<Acquisition> {
        self.0.acquire(request).await
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Acquisition>>>> {
        self.0.acquire_all(batch).await
    }
}

/// Releases of one hold each.
pub(crate) struct Releases(pub(crate) Arc<Server>);

impl Batch for Releases {
    type Request = (Release, HoldId);
    type Answer = Releasing;

    fn name((request, _): &(Release, HoldId)) -> &LockName {
        &request.name
    }

    async fn send_one(&self, (request, _): &(Release, HoldId)) -> Result<Releasing> {
        self.0.release(request).await
    }

    async fn send(&self, batch: &[(Release, HoldId)]) -> Result<Vec<Option<Result<Releasing>>>> {
        self.0.release_all(batch).await
    }
}

/// A write of its own arrives sooner than a batch, so a few requests go alone. With few writes in flight,
/// requests wait for one of them to return, and the server and the client wait for each other; more than
/// these gain nothing, and each carries little. The server does nothing else during a script: for some
/// 0.2 ms, less than for a script of renewals, or for 1 ms where every queue is full of dead tickets (see
/// `EACH` in the scripts of several). More names gain little.
pub(crate) const POLICY: BatchPolicy = BatchPolicy {
    alone: 4,
    in_flight: 8,
    most: 32,
    waiting: 1_024,
    untaken: Duration::from_millis(500),
    unanswered: Duration::from_secs(20),
    pause: Duration::from_secs(2),
};
