//! Counters of a proxy: connections, bytes, occurrences of a needle.

use super::link::Direction;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Notify, watch};

/// A snapshot of a proxy's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Connections accepted since the start, refused ones not counted.
    pub accepted: u64,
    /// Connections closed at accept.
    pub refused: u64,
    /// Connections open now.
    pub open: u64,
    /// Bytes that clients have sent.
    pub from_clients: u64,
    /// Bytes delivered to the server.
    pub to_server: u64,
    /// Bytes that the server has sent.
    pub from_server: u64,
    /// Bytes delivered to clients.
    pub to_clients: u64,
    /// Bytes that the proxy dropped on demand, in either direction.
    pub swallowed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    accepted: AtomicU64,
    refused: AtomicU64,
    closed: AtomicU64,
    read: [AtomicU64; 2],
    delivered: [AtomicU64; 2],
    swallowed: AtomicU64,
    changed: Notify,
}

impl Tally {
    pub(super) fn accepted(&self) {
        self.add(&self.accepted, 1);
    }

    pub(super) fn refused(&self) {
        self.add(&self.refused, 1);
    }

    pub(super) fn closed(&self) {
        self.add(&self.closed, 1);
    }

    pub(super) fn read(&self, direction: Direction, bytes: usize) {
        self.add(&self.read[direction as usize], bytes as u64);
    }

    pub(super) fn delivered(&self, direction: Direction, bytes: usize) {
        self.add(&self.delivered[direction as usize], bytes as u64);
    }

    pub(super) fn swallowed(&self, bytes: usize) {
        self.add(&self.swallowed, bytes as u64);
    }

    pub(super) fn counters(&self) -> Counters {
        // `closed` first: read later, it could count a connection that `accepted` has not seen yet.
        let closed = self.closed.load(Ordering::SeqCst);
        let accepted = self.accepted.load(Ordering::SeqCst);
        let [from_clients, from_server] = self.read.each_ref().map(|n| n.load(Ordering::SeqCst));
        let [to_server, to_clients] = self.delivered.each_ref().map(|n| n.load(Ordering::SeqCst));
        Counters {
            accepted,
            refused: self.refused.load(Ordering::SeqCst),
            open: accepted - closed,
            from_clients,
            to_server,
            from_server,
            to_clients,
            swallowed: self.swallowed.load(Ordering::SeqCst),
        }
    }

    pub(super) async fn until(&self, condition: impl Fn(&Counters) -> bool + Send) {
        loop {
            // Subscribed before the check: a change after the check wakes this task.
            let changed = self.changed.notified();
            if condition(&self.counters()) {
                return;
            }
            changed.await;
        }
    }

    fn add(&self, counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::SeqCst);
        self.changed.notify_waiters();
    }
}

/// Counts the occurrences of a needle since it was made, or since its last [`mark`](Self::mark).
///
/// Bytes are counted when they reach the proxy. To assert "no renewal after this point", first await
/// that the client has reached the point, then call `mark`.
#[derive(Debug)]
pub struct Watch {
    pub(super) seen: watch::Receiver<u64>,
    pub(super) mark: u64,
}

impl Watch {
    /// Occurrences since the mark.
    #[must_use]
    pub fn seen(&self) -> u64 {
        *self.seen.borrow() - self.mark
    }

    /// Counts from zero again.
    pub fn mark(&mut self) {
        self.mark = *self.seen.borrow();
    }

    /// Waits until there have been `n` occurrences since the mark; for ever if the proxy ends before.
    ///
    /// # Cancel safety
    /// Dropped early, nothing is lost.
    pub async fn reaches(&self, n: u64) {
        let mut seen = self.seen.clone();
        let goal = self.mark + n;
        if seen.wait_for(|seen| *seen >= goal).await.is_err() {
            std::future::pending().await
        }
    }
}
