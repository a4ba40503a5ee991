//! Leases: how long a hold lasts and who ends it.

use crate::{
    driver::Capabilities,
    error::{Error, ErrorKind},
};
use std::{fmt, time::Duration};

/// The lease of a lock that says nothing else.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// The shortest lease: below it the margin and one round trip leave nothing to work with.
pub const MIN_LEASE: Duration = Duration::from_millis(100);

/// The longest lease: a year. Longer ones are mistakes of unit, and overflow what some stores count in.
pub const MAX_LEASE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How long a hold lasts, between [`MIN_LEASE`] and [`MAX_LEASE`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    length: Duration,
    kept: bool,
}

impl Lease {
    /// A lease that the watchdog renews every third of its length for as long as the guard lives.
    ///
    /// # Errors
    /// [`LeaseError`] when `length` is out of bounds.
    pub fn kept(length: Duration) -> Result<Self, LeaseError> {
        Self::checked(length, true)
    }

    /// A lease that ends by itself: nobody renews it.
    ///
    /// # Errors
    /// [`LeaseError`] when `length` is out of bounds.
    pub fn fixed(length: Duration) -> Result<Self, LeaseError> {
        Self::checked(length, false)
    }

    fn checked(length: Duration, kept: bool) -> Result<Self, LeaseError> {
        if (MIN_LEASE..=MAX_LEASE).contains(&length) {
            Ok(Self { length, kept })
        } else {
            Err(LeaseError { length })
        }
    }

    pub(crate) fn no_longer_than(self, most: Duration) -> Self {
        Self {
            length: self.length.min(most).max(MIN_LEASE),
            ..self
        }
    }

    /// What a store makes of it: on one where holds are bound to a session, a kept lease *is* that session.
    pub(crate) fn on(self, caps: &Capabilities) -> Result<Self, Error> {
        let (least, most) = (*caps.leases.start(), *caps.leases.end());
        let (possible, least) = match (caps.session_bound, self.kept) {
            (true, true) => (self.length >= most, most),
            (true, false) => (self.length >= least, least),
            (false, _) => (caps.leases.contains(&self.length), least),
        };
        if possible {
            return Ok(if caps.session_bound && self.kept {
                self.no_longer_than(most)
            } else {
                self
            });
        }
        let message = if caps.session_bound {
            format!(
                "the lease ({:?}) must be at least the session ({least:?}) here",
                self.length
            )
        } else {
            format!(
                "the lease ({:?}) must be between {least:?} and {most:?} here",
                self.length
            )
        };
        Err(Error::new(ErrorKind::Unsupported, message).of(caps.backend))
    }

    /// At least what a session lasts, where there is one.
    pub(crate) fn at_least(self, caps: &Capabilities) -> Self {
        let length = if caps.session_bound {
            *caps.leases.end()
        } else {
            self.length.max(*caps.leases.start())
        };
        Self { length, ..self }
    }

    /// Its length.
    #[must_use]
    pub const fn length(self) -> Duration {
        self.length
    }

    /// Whether the watchdog keeps it alive.
    #[must_use]
    pub const fn is_kept(self) -> bool {
        self.kept
    }

    /// What the core gives up of a lease so as to be done before the server is: a hundredth, at least 2 ms.
    ///
    /// A hundredth covers clocks whose rates differ by 1 % (quartz and NTP slew stay far below); 2 ms cover a timer's granularity.
    #[must_use]
    pub fn margin(length: Duration) -> Duration {
        (length / 100).max(Duration::from_millis(2))
    }

    /// The time between two renewals of a kept lease of that length.
    #[must_use]
    pub fn renew_every(length: Duration) -> Duration {
        length / 3
    }

    /// The most one attempt to renew may take.
    #[must_use]
    pub fn renew_within(length: Duration) -> Duration {
        length / 6
    }
}

impl Default for Lease {
    fn default() -> Self {
        Self {
            length: DEFAULT_LEASE,
            kept: true,
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.kept { "Kept" } else { "Fixed" };
        write!(f, "{kind}({:?})", self.length)
    }
}

/// A lease that is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease ({length:?}) must be between {MIN_LEASE:?} and {MAX_LEASE:?}")]
pub struct LeaseError {
    length: Duration,
}

#[cfg(test)]
mod tests {
    use super::{Lease, MAX_LEASE, MIN_LEASE};
    use std::time::Duration;

    #[test]
    fn bounds_are_inclusive_and_named_in_the_message() {
        for length in [MIN_LEASE, MAX_LEASE] {
            assert_eq!(Lease::kept(length).unwrap().length(), length);
            assert_eq!(Lease::fixed(length).unwrap().length(), length);
        }
        let short = Lease::kept(Duration::from_millis(99)).unwrap_err();
        assert!(
            short
                .to_string()
                .starts_with("the lease (99ms) must be between 100ms")
        );
        Lease::fixed(MAX_LEASE + Duration::from_nanos(1)).unwrap_err();
        Lease::kept(Duration::ZERO).unwrap_err();
    }

    #[test]
    fn the_margin_is_a_hundredth_and_never_under_two_milliseconds() {
        assert_eq!(
            Lease::margin(Duration::from_secs(30)),
            Duration::from_millis(300)
        );
        assert_eq!(Lease::margin(MIN_LEASE), Duration::from_millis(2));
    }
}
