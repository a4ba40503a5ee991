//! Leases: how long a hold lasts, and whether the watchdog renews it.

use crate::error::Error;
use std::{fmt, time::Duration};

/// The lease of a lock that sets none.
///
/// # Examples
/// ```
/// use dlock_core::{DEFAULT_LEASE, Lease};
///
/// assert_eq!(Lease::default(), Lease::renewed(DEFAULT_LEASE));
/// ```
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// The shortest lease. Below it, the margin and one round trip leave no usable time.
///
/// # Examples
/// ```
/// use dlock_core::{Lease, MIN_LEASE};
///
/// assert!(Lease::fixed(MIN_LEASE).checked().is_ok());
/// assert!(Lease::fixed(MIN_LEASE / 2).checked().is_err());
/// ```
pub const MIN_LEASE: Duration = Duration::from_millis(100);

/// The longest lease: a year. Longer values are unit mistakes, and overflow the counters of some stores.
///
/// # Examples
/// ```
/// use dlock_core::{Lease, MAX_LEASE};
///
/// assert!(Lease::fixed(MAX_LEASE).checked().is_ok());
/// assert!(Lease::fixed(MAX_LEASE * 2).checked().is_err());
/// ```
pub const MAX_LEASE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How long a hold lasts, between [`MIN_LEASE`] and [`MAX_LEASE`], and whether the watchdog renews it.
///
/// # Examples
/// ```
/// use dlock_core::Lease;
/// use std::time::Duration;
///
/// let lease = Lease::default();
/// assert!(lease.is_renewed());
/// assert_eq!(lease.length(), Duration::from_secs(30));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    length: Duration,
    renewed: bool,
}

impl Lease {
    /// A lease that the watchdog renews every third of its length for as long as the guard lives.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert!(Lease::renewed(Duration::from_secs(10)).is_renewed());
    /// ```
    #[must_use]
    pub const fn renewed(length: Duration) -> Self {
        Self {
            length,
            renewed: true,
        }
    }

    /// A lease that ends by itself. The watchdog does not renew it; it only checks every third of its
    /// length that the hold is still there.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert!(!Lease::fixed(Duration::from_secs(10)).is_renewed());
    /// ```
    #[must_use]
    pub const fn fixed(length: Duration) -> Self {
        Self {
            length,
            renewed: false,
        }
    }

    /// The same lease, if its length is between [`MIN_LEASE`] and [`MAX_LEASE`]. Acquiring checks it too.
    ///
    /// # Errors
    /// [`LeaseError`] when the length is out of bounds.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert!(Lease::fixed(Duration::from_secs(10)).checked().is_ok());
    /// assert!(Lease::fixed(Duration::from_millis(10)).checked().is_err());
    /// ```
    pub fn checked(self) -> Result<Self, LeaseError> {
        if (MIN_LEASE..=MAX_LEASE).contains(&self.length) {
            Ok(self)
        } else {
            Err(LeaseError {
                length: self.length,
            })
        }
    }

    pub(crate) fn no_longer_than(self, most: Duration) -> Self {
        Self {
            length: self.length.min(most).max(MIN_LEASE),
            ..self
        }
    }

    /// The length of the lease.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert_eq!(Lease::fixed(Duration::from_secs(10)).length(), Duration::from_secs(10));
    /// ```
    #[must_use]
    pub const fn length(self) -> Duration {
        self.length
    }

    /// Whether the watchdog renews it.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert!(Lease::default().is_renewed());
    /// ```
    #[must_use]
    pub const fn is_renewed(self) -> bool {
        self.renewed
    }

    /// The part of a lease that the core gives up, so that it stops before the server does: a hundredth, at
    /// least 2 ms.
    ///
    /// A hundredth covers clocks whose rates differ by 1 %: quartz stays far below, and so does an NTP daemon that slews by
    /// 500 ppm, as ntpd and systemd-timesyncd do. chrony slews by up to 8.3 % unless `maxslewrate` says less. 2 ms cover a
    /// timer's granularity.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Lease;
    /// use std::time::Duration;
    ///
    /// assert_eq!(Lease::margin(Duration::from_secs(30)), Duration::from_millis(300));
    /// ```
    #[must_use]
    pub fn margin(length: Duration) -> Duration {
        (length / 100).max(Duration::from_millis(2))
    }

    /// The time between two renewals of a renewed lease of that length.
    #[must_use]
    pub(crate) fn renew_every(length: Duration) -> Duration {
        length / 3
    }

    /// The most one attempt to renew may take.
    #[must_use]
    pub(crate) fn renew_within(length: Duration) -> Duration {
        length / 6
    }
}

impl Default for Lease {
    fn default() -> Self {
        Self::renewed(DEFAULT_LEASE)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.renewed { "Renewed" } else { "Fixed" };
        write!(f, "{kind}({:?})", self.length)
    }
}

/// A lease that is too short or too long.
///
/// # Examples
/// ```
/// use dlock_core::Lease;
/// use std::time::Duration;
///
/// let error = Lease::fixed(Duration::ZERO).checked().unwrap_err();
/// assert!(error.to_string().starts_with("the lease (0ns) must be between"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease ({}) must be between {MIN_LEASE:?} and {}", readable(.length), readable(&MAX_LEASE))]
pub struct LeaseError {
    length: Duration,
}

impl From<LeaseError> for Error {
    fn from(error: LeaseError) -> Self {
        Self::misuse(error.to_string())
    }
}

/// A span for people: from two days on in days.
pub(crate) fn readable(span: &Duration) -> String {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    if *span < 2 * DAY {
        return format!("{span:?}");
    }
    let tenths = (span.as_secs_f64() / DAY.as_secs_f64() * 10.0).round();
    format!("{} days", tenths / 10.0)
}

#[cfg(test)]
mod tests {
    use super::{Lease, MAX_LEASE, MIN_LEASE};
    use std::time::Duration;

    #[test]
    fn bounds_are_inclusive_and_named_in_the_message() {
        for length in [MIN_LEASE, MAX_LEASE] {
            assert_eq!(Lease::renewed(length).checked().unwrap().length(), length);
            assert_eq!(Lease::fixed(length).checked().unwrap().length(), length);
        }
        let short = Lease::renewed(Duration::from_millis(99))
            .checked()
            .unwrap_err();
        assert!(
            short
                .to_string()
                .starts_with("the lease (99ms) must be between 100ms")
        );
        let long = Lease::fixed(MAX_LEASE * 2).checked().unwrap_err();
        assert_eq!(
            long.to_string(),
            "the lease (730 days) must be between 100ms and 365 days"
        );
        Lease::fixed(MAX_LEASE + Duration::from_nanos(1))
            .checked()
            .unwrap_err();
        Lease::renewed(Duration::ZERO).checked().unwrap_err();
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
