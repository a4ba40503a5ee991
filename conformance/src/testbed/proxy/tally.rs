//! Counters of a proxy: connections, dropped bytes, occurrences of a needle.

use tokio::sync::watch;

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
    /// Bytes that the proxy dropped on demand, in either direction.
    pub swallowed: u64,
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
