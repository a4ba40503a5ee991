//! Server clock: an estimate of a server's time, taken from its replies.

use crate::clock::Instant;
use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

/// Converts a `give_up` into the server's time: the not-after that a request carries.
///
/// The result is the server time of the last reply plus (`give_up` − the instant at which that reply was
/// received). It therefore errs on the early side by one half of a round trip. It follows a server whose
/// clock is stepped from the next reply on. Use one per connection: forget it at reconnect, and read the
/// server's time in the handshake, so that every request carries one. Connections to one and the same server
/// may share one, if each handshake records the time.
///
/// Given the instant at which the request was sent as `received`, it errs on the late side instead: what it says
/// was answered in time, was executed in time.
///
/// An error reply without the server's time changes nothing: the last estimate stays. After a connection
/// error, or a missing reply, the next request uses another connection, with the estimate of its handshake.
///
/// # Examples
/// ```
/// use dlock_core::{Clock, driver::kit::ServerClock};
/// use std::time::Duration;
///
/// let (server, received) = (ServerClock::new(), Clock::boot().now());
/// server.observe(Duration::from_secs(1_700_000_000), received);
/// let not_after = server.at(received + Duration::from_secs(5));
/// assert_eq!(not_after, Some(Duration::from_secs(1_700_000_005)));
/// ```
#[derive(Debug)]
pub struct ServerClock(AtomicI64);

/// No estimate: three centuries before any clock's zero.
const UNKNOWN: i64 = i64::MIN;

impl ServerClock {
    /// Builds a clock without an estimate.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicI64::new(UNKNOWN))
    }

    /// Records a reply that carried the server's time (since its epoch) and was received at `received`.
    pub fn observe(&self, server: Duration, received: Instant) {
        let server = i128::try_from(server.as_nanos()).unwrap_or(i128::MAX);
        let ahead = server.saturating_sub(i128::from(received.as_nanos()));
        let fits = i64::try_from(ahead.max(i128::from(UNKNOWN + 1)));
        self.0.store(fits.unwrap_or(i64::MAX), Relaxed);
    }

    /// Forgets the estimate, because the connection is gone.
    pub fn forget(&self) {
        self.0.store(UNKNOWN, Relaxed);
    }

    /// The server's time at `at`, if there is an estimate; zero before its epoch.
    #[must_use]
    pub fn at(&self, at: Instant) -> Option<Duration> {
        let ahead = Some(self.0.load(Relaxed)).filter(|ahead| *ahead != UNKNOWN)?;
        let nanos = i128::from(at.as_nanos()) + i128::from(ahead);
        Some(Duration::from_nanos(
            u64::try_from(nanos.max(0)).unwrap_or(u64::MAX),
        ))
    }
}

impl Default for ServerClock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::ServerClock;
    use crate::clock::Instant;
    use std::time::Duration;

    #[test]
    fn a_give_up_is_counted_from_the_last_reply() {
        let clock = ServerClock::new();
        let received = Instant::from_nanos(5_000_000_000);
        assert_eq!(clock.at(received), None);
        clock.observe(Duration::from_secs(1_000), received);
        let second = Duration::from_secs(1);
        assert_eq!(
            clock.at(received + second),
            Some(Duration::from_secs(1_001))
        );
        assert_eq!(clock.at(received - second), Some(Duration::from_secs(999)));
        // A server that begins to count now, and one far ahead of all others.
        clock.observe(Duration::ZERO, received);
        assert_eq!(clock.at(received - second), Some(Duration::ZERO));
        assert_eq!(clock.at(received + second), Some(second));
        clock.observe(Duration::MAX, received);
        assert!(clock.at(received) > Some(Duration::from_secs(1 << 33)));
        clock.forget();
        assert_eq!(clock.at(received), None);
    }
}
