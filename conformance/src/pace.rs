//! Time spans of a suite.

use crate::{fixture::Time, testbed::Home};
use dlock_core::driver::Capabilities;
use std::time::Duration;

/// The time spans that cases derive their bounds from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A lease short enough that a case waits for its end.
    pub(crate) short: Duration,
    /// A lease that is renewed in time even if other tests use the machine for half a second, and short
    /// enough to wait for its end.
    pub(crate) kept: Duration,
    /// A lease that does not end during a case.
    pub(crate) long: Duration,
    /// The allowance for a busy machine in an upper bound. Lower bounds need none: they are proven from
    /// instants around calls.
    pub(crate) slack: Duration,
    /// The precision with which a store ends a lease.
    pub(crate) rounding: Duration,
    /// How late the store ends the hold of a client that is gone.
    pub(crate) lapse: Duration,
    /// The session of a holder, where holds end with it: a crash costs that much, however short the
    /// lease.
    pub(crate) session: Option<Duration>,
    /// How long a server may take a killed process for a live one: an unused turn, and the next poll of
    /// the waiter behind it.
    pub(crate) unheard: Duration,
    /// The interval between two checks of a condition.
    pub(crate) step: Duration,
    /// The most that one call may take in a case without faults.
    pub(crate) answer: Duration,
    /// The most that a case may take.
    pub(crate) limit: Duration,
}

impl Pace {
    /// The time spans for this store.
    pub(crate) fn of(home: Home, time: Time, store: &Capabilities) -> Self {
        let shortest = *store.leases.start();
        let mut pace = Self::by(
            time,
            match home {
                Home::Process => shortest,
                // The store writes to the machine's disk, which everything else shares.
                Home::Container => shortest.max(Duration::from_secs(1)),
            },
        );
        if home == Home::Container {
            // The engine forwards the port of the server, and closes the connection some time after the
            // process is gone.
            pace.unheard = pace.kept / 3 + Duration::from_secs(2);
        }
        if !store.lapse.is_zero() {
            // A client that lives ends its holds by requests.
            (pace.lapse, pace.rounding) = (store.lapse, pace.slack / 4);
            pace.kept = Duration::from_secs(2).max(shortest);
        }
        if !store.session_bound {
            // A case that drops at each step waits each time until the cleanup of what it dropped is
            // done.
            pace.limit += store.late * 20;
            return pace;
        }
        // The session is the renewed lease, so the shortest session is the shortest lease whose end
        // means anything.
        let session = *store.leases.end();
        Self {
            short: pace.short.max(session),
            kept: pace.short.max(session),
            // The client ends a hold by a request.
            rounding: pace.slack / 4,
            session: Some(session),
            limit: pace.limit * 3,
            ..pace
        }
    }

    fn by(time: Time, shortest: Duration) -> Self {
        let real = Self {
            short: Duration::from_millis(500).max(shortest),
            kept: Duration::from_millis(500).max(shortest) * 4,
            rounding: Duration::from_millis(2),
            lapse: Duration::ZERO,
            session: None,
            unheard: Duration::ZERO,
            long: Duration::from_secs(30),
            slack: Duration::from_millis(500),
            step: Duration::from_millis(10),
            answer: Duration::from_secs(5),
            limit: Duration::from_secs(60),
        };
        match time {
            Time::Real => real,
            Time::Simulated => Self {
                short: Duration::from_secs(3).max(shortest),
                kept: Duration::from_secs(3).max(shortest),
                long: Duration::from_secs(60),
                slack: Duration::from_millis(50),
                answer: Duration::from_secs(30),
                limit: Duration::from_secs(600),
                ..real
            },
        }
    }
}
