//! A server's clock, seen through its replies.

use crate::clock::Instant;
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Turns a `give_up` of ours into the server's time: the not-after that a request carries.
///
/// It is the server time of the last reply plus (give_up − the instant that reply was received), so it errs on the early
/// side by one half of a round trip, and follows a server whose clock is stepped from the next reply on. One per
/// connection: forget it at reconnect, and read the server's time in the handshake, so that no request goes without one.
#[derive(Debug, Default)]
pub struct ServerClock(Mutex<Option<(Duration, Instant)>>);

impl ServerClock {
    /// Nothing known yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A reply carried the server's time (since its epoch) and was received at `received`.
    pub fn observe(&self, server: Duration, received: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((server, received));
    }

    /// The connection is gone, and what was known of its server with it.
    pub fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The server's time at `at`, as far as known.
    #[must_use]
    pub fn at(&self, at: Instant) -> Option<Duration> {
        let (server, received) = (*self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some(if at >= received {
            server + at.since(received)
        } else {
            server.saturating_sub(received.since(at))
        })
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
        clock.forget();
        assert_eq!(clock.at(received), None);
    }
}
