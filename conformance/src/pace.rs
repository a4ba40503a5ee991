//! How fast a suite goes.

use crate::fixture::Time;
use std::time::Duration;

/// The time spans that cases derive their bounds from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A lease that a case waits to see the end of.
    pub(crate) short: Duration,
    /// A lease that no case sees the end of.
    pub(crate) long: Duration,
    /// What a busy machine may add to an upper bound. Lower bounds have none: they are proven from instants around calls.
    pub(crate) slack: Duration,
    /// Between two looks at a condition.
    pub(crate) step: Duration,
    /// The most that one call may take in a case that breaks nothing.
    pub(crate) answer: Duration,
    /// The most that a case may take.
    pub(crate) limit: Duration,
}

impl Pace {
    /// The pace of a suite; `shortest` is the shortest lease that the store gives.
    pub(crate) fn of(time: Time, shortest: Duration) -> Self {
        match time {
            Time::Simulated => Self {
                short: Duration::from_secs(3).max(shortest),
                long: Duration::from_secs(60),
                slack: Duration::from_millis(50),
                step: Duration::from_millis(10),
                answer: Duration::from_secs(30),
                limit: Duration::from_secs(600),
            },
            Time::Real => Self {
                short: Duration::from_millis(500).max(shortest),
                long: Duration::from_secs(30),
                slack: Duration::from_millis(500),
                step: Duration::from_millis(10),
                answer: Duration::from_secs(5),
                limit: Duration::from_secs(20),
            },
        }
    }
}
