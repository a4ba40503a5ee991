//! What a lock is acquired on: its lease, and the least and the most time it is held.

use crate::{
    error::Error,
    lease::{Lease, MAX_LEASE, MIN_LEASE},
};
use std::time::Duration;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    lease: Lease,
    at_least: Option<Duration>,
    at_most: Option<Duration>,
}

impl From<Lease> for Terms {
    fn from(lease: Lease) -> Self {
        Self {
            lease,
            at_least: None,
            at_most: None,
        }
    }
}

impl Terms {
    pub(crate) fn with_lease(self, lease: Lease) -> Result<Self, Error> {
        Self { lease, ..self }.checked()
    }

    pub(crate) fn at_least(self, time: Duration) -> Result<Self, Error> {
        let at_least = Some(time);
        Self { at_least, ..self }.checked()
    }

    pub(crate) fn at_most(self, time: Duration) -> Result<Self, Error> {
        let at_most = Some(time);
        Self { at_most, ..self }.checked()
    }

    fn checked(self) -> Result<Self, Error> {
        let misuse = |message| Err(Error::misuse(message));
        if let Some(most) = self.at_most
            && most < MIN_LEASE
        {
            return misuse(format!(
                "max_hold ({most:?}) must be at least the shortest lease ({MIN_LEASE:?})"
            ));
        }
        for (what, time) in [("at_least_for", self.at_least), ("max_hold", self.at_most)] {
            if let Some(time) = time
                && time > MAX_LEASE
            {
                return misuse(format!("{what} ({time:?}) must not exceed {MAX_LEASE:?}"));
            }
        }
        if let (Some(least), Some(most)) = (self.at_least, self.at_most)
            && least > most
        {
            return misuse(format!(
                "at_least_for ({least:?}) must not exceed max_hold ({most:?})"
            ));
        }
        if let Some(least) = self.at_least.filter(|_| !self.lease.is_kept())
            && least > self.lease.length()
        {
            return misuse(format!(
                "at_least_for ({least:?}) must not exceed a fixed lease ({:?}): nothing keeps the lock longer",
                self.lease.length()
            ));
        }
        Ok(self)
    }

    /// The lease to ask for: one that ends with the longest hold, if that is shorter.
    pub(crate) fn lease(&self) -> Lease {
        self.at_most
            .map_or(self.lease, |most| self.lease.no_longer_than(most))
    }

    /// The least time it is held.
    pub(crate) fn least(&self) -> Option<Duration> {
        self.at_least
    }

    /// When it ends at the latest, counted from `sent`, however well it is renewed.
    pub(crate) fn end(&self) -> Option<Duration> {
        let lease = self.lease();
        let most = if lease.is_kept() {
            self.at_most?
        } else {
            lease.length()
        };
        Some(most - Lease::margin(lease.length()))
    }
}

#[cfg(test)]
mod tests {
    use super::Terms;
    use crate::lease::Lease;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn relations_are_refused_with_both_numbers() {
        let least = Terms::default().at_least(10 * SECOND).unwrap();
        let refused = least.at_most(9 * SECOND).unwrap_err().to_string();
        assert_eq!(refused, "at_least_for (10s) must not exceed max_hold (9s)");
        let refused = least.with_lease(Lease::fixed(5 * SECOND).unwrap());
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("fixed lease (5s)")
        );
        Terms::default().at_most(SECOND / 20).unwrap_err();
    }

    #[test]
    fn both_may_exceed_a_kept_lease() {
        let terms = Terms::default().at_least(60 * SECOND).unwrap();
        let terms = terms.at_most(90 * SECOND).unwrap();
        assert_eq!(terms.lease().length(), 30 * SECOND);
    }

    #[test]
    fn no_lease_outlasts_the_longest_hold() {
        let terms = Terms::default().at_most(SECOND).unwrap();
        assert_eq!(terms.lease(), Lease::kept(SECOND).unwrap());
        assert_eq!(terms.end(), Some(SECOND - SECOND / 100));
    }
}
