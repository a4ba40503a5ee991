//! Admission: concurrency limits for each class of request.
//!
//! The native client's pool serves requests as they arrive. A thousand polling waiters would delay a renewal
//! there. So requests wait here instead, and some connections are reserved for what keeps locks alive.

use crate::{error, renewals::ALONE};
use dlock_core::driver::{Result, kit::Class};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// The permits for the connections of a pool.
pub(crate) struct PermitPools {
    acquiring: Arc<Semaphore>,
    /// For all requests but renewals.
    sending: Arc<Semaphore>,
    /// For renewals that are sent alone because their batch is held up. Many such batches mean that the
    /// server may be overloaded.
    alone: Arc<Semaphore>,
    /// For all requests, none of which waits for it. Closed with the driver.
    unanswered: Arc<Semaphore>,
}

/// The permits of one request. They are held until all of its commands are answered.
pub(crate) type RequestPermits = Arc<Vec<OwnedSemaphorePermit>>;

impl PermitPools {
    pub(crate) fn new(connections: u32) -> Self {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        let kept = (connections / SHARE).max(1);
        let sending = connections.saturating_sub(STREAMS + kept).clamp(1, MOST);
        let acquiring = sending.saturating_sub(kept).max(1);
        let pool = |permits| Arc::new(Semaphore::new(permits));
        Self {
            acquiring: pool(acquiring),
            sending: pool(sending),
            alone: pool(ALL_ALONE),
            unanswered: pool(UNANSWERED),
        }
    }

    /// Waits for the permits of one request. A batch of renewals does not wait.
    pub(crate) async fn one(&self, class: Class) -> Result<RequestPermits> {
        let both = [&self.acquiring, &self.sending];
        let wanted = match class {
            Class::Acquire => &both[..],
            Class::Work => &both[1..],
            Class::Renewal => &[],
        };
        self.of(wanted).await
    }

    /// Waits for the permit to renew by itself an entry whose batch was held up.
    pub(crate) async fn alone(&self) -> Result<RequestPermits> {
        self.of(&[&self.alone]).await
    }

    async fn of(&self, wanted: &[&Arc<Semaphore>]) -> Result<RequestPermits> {
        let unanswered = Arc::clone(&self.unanswered).try_acquire_owned();
        let unanswered = unanswered.map_err(|refused| match refused {
            TryAcquireError::Closed => error::closed(),
            TryAcquireError::NoPermits => error::crowded(UNANSWERED),
        })?;
        let mut permits = Vec::with_capacity(1 + wanted.len());
        permits.push(unanswered);
        for from in wanted {
            let permit = Arc::clone(from).acquire_owned().await;
            permits.extend(permit.ok());
        }
        Ok(Arc::new(permits))
    }

    /// Gives no more permits.
    pub(crate) fn close(&self) {
        self.unanswered.close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.unanswered.is_closed()
    }

    pub(crate) fn unanswered(&self) -> usize {
        UNANSWERED - self.unanswered.available_permits()
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
