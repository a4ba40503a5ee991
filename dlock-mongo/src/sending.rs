//! Admission: concurrency limits for each class of request.
//!
//! The native client's pool serves requests as they arrive. A thousand polling waiters would delay a renewal
//! there. So requests wait here instead, and some connections are reserved for what keeps locks alive.

use crate::{error, renewals::ALONE};
use dlock_core::driver::{Result, kit::Class};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The permits for the connections of a pool.
pub(crate) struct PermitPools {
    acquiring: Arc<Semaphore>,
    /// For all requests but renewals.
    sending: Arc<Semaphore>,
    /// For renewals that are sent alone because their batch is held up. Many such batches mean that the
    /// server may be overloaded.
    alone: Arc<Semaphore>,
    unanswered: AtomicUsize,
}

/// The permits of one request. They are held until all of its commands are answered.
pub(crate) struct RequestPermits {
    pools: Arc<PermitPools>,
    permits: Vec<OwnedSemaphorePermit>,
}

impl PermitPools {
    pub(crate) fn new(connections: u32) -> Arc<Self> {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        let kept = (connections / SHARE).max(1);
        let sending = connections.saturating_sub(STREAMS + kept).clamp(1, MOST);
        let acquiring = sending.saturating_sub(kept).max(1);
        Arc::new(Self {
            acquiring: Arc::new(Semaphore::new(acquiring)),
            sending: Arc::new(Semaphore::new(sending)),
            alone: Arc::new(Semaphore::new(ALL_ALONE)),
            unanswered: AtomicUsize::new(0),
        })
    }

    /// Waits for the permits of one request. A batch of renewals needs none and does not wait.
    pub(crate) async fn one(self: &Arc<Self>, class: Class) -> Result<RequestPermits> {
        let both = [&self.acquiring, &self.sending];
        let wanted = match class {
            Class::Acquire => &both[..],
            Class::Work => &both[1..],
            Class::Renewal => &[],
        };
        self.of(wanted).await
    }

    /// Waits for the permit to renew by itself an entry whose batch was held up.
    pub(crate) async fn alone(self: &Arc<Self>) -> Result<RequestPermits> {
        self.of(&[&self.alone]).await
    }

    async fn of(self: &Arc<Self>, wanted: &[&Arc<Semaphore>]) -> Result<RequestPermits> {
        let before = self.unanswered.fetch_add(1, Ordering::Relaxed);
        let mut reserved = RequestPermits {
            pools: Arc::clone(self),
            permits: Vec::new(),
        };
        if before >= UNANSWERED {
            return Err(error::crowded(UNANSWERED));
        }
        for from in wanted {
            let permit = Arc::clone(from).acquire_owned().await;
            reserved.permits.extend(permit.ok());
        }
        Ok(reserved)
    }

    pub(crate) fn unanswered(&self) -> usize {
        self.unanswered.load(Ordering::Relaxed)
    }
}

impl Drop for RequestPermits {
    fn drop(&mut self) {
        self.pools.unanswered.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that hangs holds a connection or waits for one, so more requests than this only add load.
const UNANSWERED: usize = 20_000;
/// Change streams at a time: one, and the one that replaces it.
const STREAMS: usize = 2;
/// One connection in this many is reserved for renewals, and as many again for all but acquires.
const SHARE: usize = 8;
/// The permits for a pool without a limit.
const MOST: usize = 1 << 16;
/// Renewals that are sent alone, of all batches together: enough for two batches at a time.
const ALL_ALONE: usize = 2 * ALONE;
