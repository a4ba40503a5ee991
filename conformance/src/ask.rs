//! Acquire requests of cases, and the holds that they were granted.

use dlock_core::{FencingToken, HoldId, HolderInfo, Instant, LockName, Owner, driver::Ticket};
use std::{sync::Arc, time::Duration};

/// An acquire request as data: the fields of [`Acquire`](dlock_core::driver::Acquire) without its instants,
/// which are filled in when it is sent.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The lock to acquire.
    pub name: LockName,
    /// The owner that acquires.
    pub owner: Owner,
    /// The identity of this hold.
    pub hold: HoldId,
    /// The lease that it asks for.
    pub lease: Duration,
    /// The ticket to queue with when refused.
    pub line: Option<Ticket>,
    /// The ticket to put at the end of the queue when granted.
    pub next: Option<Ticket>,
    /// Re-enter this incarnation, and acquire nothing else.
    pub join: Option<FencingToken>,
    /// When the sender gives up; `None`: long after the answer must have come.
    pub give_up: Option<Instant>,
    /// The holder info to store.
    pub note: Arc<HolderInfo>,
}

impl Ask {
    pub(crate) fn new(name: LockName, owner: &str, lease: Duration) -> Self {
        Self {
            name,
            owner: Owner::from_seed(owner),
            hold: fresh_hold(),
            lease,
            line: None,
            next: None,
            join: None,
            give_up: None,
            note: Arc::default(),
        }
    }

    /// The same owner's request for one more hold, without tickets.
    #[must_use]
    pub fn again(&self) -> Self {
        Self {
            hold: fresh_hold(),
            line: None,
            next: None,
            give_up: None,
            ..self.clone()
        }
    }

    /// With this lease.
    #[must_use]
    pub fn lasting(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Queues with this ticket when refused.
    #[must_use]
    pub fn in_line(mut self, ticket: Ticket) -> Self {
        self.line = Some(ticket);
        self
    }

    /// With another waiter of the same client behind it.
    #[must_use]
    pub fn then(mut self, next: Ticket) -> Self {
        self.next = Some(next);
        self
    }

    /// Re-enters this incarnation only.
    #[must_use]
    pub fn joining(mut self, token: FencingToken) -> Self {
        self.join = Some(token);
        self
    }

    /// With this holder info.
    #[must_use]
    pub fn noting(mut self, note: HolderInfo) -> Self {
        self.note = Arc::new(note);
        self
    }

    /// Given up at this instant.
    #[must_use]
    pub fn until(mut self, give_up: Instant) -> Self {
        self.give_up = Some(give_up);
        self
    }
}

/// A fresh owner; cases need nothing else of it.
fn fresh_hold() -> HoldId {
    HoldId::from_bits(fastrand::u64(..))
}

/// A hold that was granted.
#[derive(Clone, Debug)]
pub struct Hold {
    /// The request.
    pub ask: Ask,
    /// The incarnation's fencing token.
    pub token: FencingToken,
    /// The number of holds after the grant.
    pub holds: u32,
    /// The lease that the store promised, counted from `before`.
    pub valid_for: Duration,
    /// The instant before the request was sent: the lease ends at the earliest `lease` after it.
    pub before: Instant,
    /// The instant after the answer: the lease ends at the latest `lease` after it.
    pub after: Instant,
}

impl Hold {
    /// The earliest instant at which the hold can be over.
    #[must_use]
    pub fn over_from(&self) -> Instant {
        self.before + self.ask.lease
    }

    /// The latest instant at which the hold can still exist if it is never renewed.
    #[must_use]
    pub fn over_by(&self) -> Instant {
        self.after + self.ask.lease
    }
}
