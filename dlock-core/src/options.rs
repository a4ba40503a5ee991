//! Acquire options: which lock to acquire as which owner, for how long to wait, and the terms of the hold
//! (lease, minimum hold, maximum hold).

use crate::{
    driver::Capabilities,
    engine::metrics::Class,
    error::{Error, ErrorKind},
    lease::{Lease, MAX_LEASE, MIN_LEASE, readable},
    name::LockName,
    owner::{Mode, Owner},
    token::FencingToken,
};
use std::{panic::Location, time::Duration};

/// Acquire options: what a caller asks for.
#[derive(Debug)]
pub(crate) struct AcquireOptions {
    pub(crate) name: LockName,
    pub(crate) terms: Terms,
    /// The owner to acquire as, which may hold the lock already.
    pub(crate) owner: Option<Owner>,
    /// Whether it shares the lock with others.
    pub(crate) mode: Mode,
    pub(crate) join: Option<FencingToken>,
    /// What it is counted as.
    pub(crate) class: Class,
    pub(crate) at: &'static Location<'static>,
}

/// Wait policy: how long to wait for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitPolicy {
    Try,
    Within(Duration),
    Forever,
}

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
            ..Self::default()
        }
    }
}

impl Terms {
    pub(crate) fn with_lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    pub(crate) fn at_least(self, time: Duration) -> Self {
        let at_least = Some(time).filter(|time| !time.is_zero());
        Self { at_least, ..self }
    }

    pub(crate) fn at_most(self, time: Duration) -> Self {
        let at_most = Some(time);
        Self { at_most, ..self }
    }

    /// Adapts the terms to a store, after checking its bounds and the relations between them.
    pub(crate) fn on(self, caps: &Capabilities) -> Result<Self, Error> {
        let lease = self.lease.checked()?.on(caps)?;
        Self { lease, ..self }.checked()
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
        for (what, time) in [("min_hold", self.at_least), ("max_hold", self.at_most)] {
            if let Some(time) = time
                && time > MAX_LEASE
            {
                let (time, most) = (readable(&time), readable(&MAX_LEASE));
                return misuse(format!("{what} ({time}) must not exceed {most}"));
            }
        }
        if let (Some(least), Some(most)) = (self.at_least, self.at_most)
            && least > most
        {
            return misuse(format!(
                "min_hold ({least:?}) must not exceed max_hold ({most:?})"
            ));
        }
        if let Some(least) = self.at_least.filter(|_| !self.lease.is_renewed())
            && least > self.lease.length()
        {
            return misuse(format!(
                "min_hold ({least:?}) must not exceed a fixed lease ({:?}): nothing holds the lock longer",
                self.lease.length()
            ));
        }
        Ok(self)
    }

    /// The lease to ask for, cut to the maximum hold if that is shorter.
    pub(crate) fn lease(&self) -> Lease {
        self.at_most
            .map_or(self.lease, |most| self.lease.no_longer_than(most))
    }

    /// The minimum hold.
    pub(crate) fn least(&self) -> Option<Duration> {
        self.at_least
    }

    /// The latest end, counted from `sent`, however well it is renewed.
    pub(crate) fn end(&self) -> Option<Duration> {
        let lease = self.lease();
        let most = if lease.is_renewed() {
            self.at_most?
        } else {
            lease.length()
        };
        Some(most - Lease::margin(lease.length()))
    }
}

impl Lease {
    /// Adapts the lease to a store. Where holds are bound to a session, a renewed lease *is* that session.
    pub(crate) fn on(self, caps: &Capabilities) -> Result<Self, Error> {
        let (least, most) = (*caps.leases.start(), *caps.leases.end());
        let is_session = caps.session_bound && self.is_renewed();
        let least = if is_session { most } else { least };
        if self.length() >= least && (caps.session_bound || self.length() <= most) {
            return Ok(if is_session {
                self.no_longer_than(most)
            } else {
                self
            });
        }
        let message = if caps.session_bound {
            format!(
                "the lease ({:?}) must be at least the session ({least:?}) here",
                self.length()
            )
        } else {
            format!(
                "the lease ({}) must be between {least:?} and {} here",
                readable(&self.length()),
                readable(&most)
            )
        };
        Err(Error::new(ErrorKind::Unsupported, message).of(caps.backend))
    }

    /// The default lease of a store: the usual one, cut to the store's longest, and lengthened to the session
    /// where the store has sessions, or to the store's shortest.
    pub(crate) fn default_on(caps: &Capabilities) -> Self {
        let (least, most) = (*caps.leases.start(), *caps.leases.end());
        if caps.session_bound {
            return Self::renewed(most);
        }
        Self::renewed(Self::default().no_longer_than(most).length().max(least))
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
        let refused = |terms: Terms| terms.checked().unwrap_err().to_string();
        let least = Terms::default().at_least(10 * SECOND);
        assert_eq!(
            refused(least.at_most(9 * SECOND)),
            "min_hold (10s) must not exceed max_hold (9s)"
        );
        let fixed = least.with_lease(Lease::fixed(5 * SECOND));
        assert!(refused(fixed).contains("fixed lease (5s)"));
        refused(Terms::default().at_most(SECOND / 20));
    }

    #[test]
    fn both_may_exceed_a_renewed_lease() {
        let terms = Terms::default().at_least(60 * SECOND).at_most(90 * SECOND);
        assert_eq!(terms.checked().unwrap().lease().length(), 30 * SECOND);
    }

    #[test]
    fn no_lease_outlasts_the_longest_hold() {
        let terms = Terms::default().at_most(SECOND).checked().unwrap();
        assert_eq!(terms.lease(), Lease::renewed(SECOND));
        assert_eq!(terms.end(), Some(SECOND - SECOND / 100));
    }
}
