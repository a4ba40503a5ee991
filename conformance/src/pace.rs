//! How fast a suite goes.

use crate::{fixture::Time, testbed::Home};
use dlock_core::Capabilities;
use std::time::Duration;

/// The time spans that cases derive their bounds from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A lease that a case waits to see the end of.
    pub(crate) short: Duration,
    /// A lease that is renewed in time also where other tests have the machine for half a second, and whose end a case can wait for.
    pub(crate) kept: Duration,
    /// A lease that no case sees the end of.
    pub(crate) long: Duration,
    /// What a busy machine may add to an upper bound. Lower bounds have none: they are proven from instants around calls.
    pub(crate) slack: Duration,
    /// What a store may round an end by.
    pub(crate) rounding: Duration,
    /// What a holder's session lasts, where holds end with one: a crash costs that much, however short the lease.
    pub(crate) session: Option<Duration>,
    /// How long a server may take a killed process for a living one: a turn that is not taken, and the look of who is behind it.
    pub(crate) unheard: Duration,
    /// Between two looks at a condition.
    pub(crate) step: Duration,
    /// The most that one call may take in a case that breaks nothing.
    pub(crate) answer: Duration,
    /// The most that a case may take.
    pub(crate) limit: Duration,
}

impl Pace {
    /// The pace of a suite over that store.
    pub(crate) fn of(home: Home, time: Time, store: &Capabilities) -> Self {
        let shortest = *store.leases.start();
        let mut pace = Self::by(
            time,
            match home {
                Home::Process => shortest,
                // It writes to the machine's disk, as everything else that runs then.
                Home::Container => shortest.max(Duration::from_secs(1)),
            },
        );
        if home == Home::Container {
            // The engine forwards its port, and closes the way to the server some time after the process is gone.
            pace.unheard = pace.kept / 3 + Duration::from_secs(2);
        }
        if !store.session_bound {
            // A case that drops at each step waits for what was dropped to be settled, each time.
            pace.limit += store.late * 20;
            return pace;
        }
        // A kept lease is the session, neither more nor less, so that is the shortest whose end means anything.
        let session = *store.leases.end();
        Self {
            short: pace.short.max(session),
            kept: pace.short.max(session),
            // Its client ends a hold, by a request.
            rounding: pace.slack / 4,
            session: Some(session),
            limit: pace.limit * 3,
            ..pace
        }
    }

    fn by(time: Time, shortest: Duration) -> Self {
        match time {
            Time::Simulated => Self {
                short: Duration::from_secs(3).max(shortest),
                kept: Duration::from_secs(3).max(shortest),
                rounding: Duration::from_millis(2),
                session: None,
                unheard: Duration::ZERO,
                long: Duration::from_secs(60),
                slack: Duration::from_millis(50),
                step: Duration::from_millis(10),
                answer: Duration::from_secs(30),
                limit: Duration::from_secs(600),
            },
            Time::Real => Self {
                short: Duration::from_millis(500).max(shortest),
                kept: Duration::from_millis(500).max(shortest) * 4,
                rounding: Duration::from_millis(2),
                session: None,
                unheard: Duration::ZERO,
                long: Duration::from_secs(30),
                slack: Duration::from_millis(500),
                step: Duration::from_millis(10),
                answer: Duration::from_secs(5),
                limit: Duration::from_secs(20),
            },
        }
    }
}
