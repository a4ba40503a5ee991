//! Acquire requests of cases, and the holds that they were granted.

use crate::{Failure, Result};
use dlock_core::{
    FencingToken, HoldId, HolderInfo, Instant, LockName, Owner,
    driver::{Release, Ticket},
};
use std::{num::NonZeroU32, sync::Arc, time::Duration};

/// An acquire request as data: the fields of [`Acquire`](dlock_core::driver::Acquire) without its instants,
/// which are filled in when it is sent.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// The lock to acquire.
    pub(crate) name: LockName,
    /// The owner that acquires.
    pub(crate) owner: Owner,
    /// The identity of this hold.
    pub(crate) hold: HoldId,
    /// The lease that it asks for.
    pub(crate) lease: Duration,
    /// The ticket to queue with when refused.
    pub(crate) line: Option<Ticket>,
    /// The ticket to put at the end of the queue when granted.
    pub(crate) next: Option<Ticket>,
    /// Re-enter this incarnation, and acquire nothing else.
    pub(crate) join: Option<FencingToken>,
    /// The least token of a new incarnation.
    pub(crate) floor: Option<FencingToken>,
    /// When the sender gives up; `None`: long after the answer must have come.
    pub(crate) give_up: Option<Instant>,
    /// The holder info to store.
    pub(crate) note: Arc<HolderInfo>,
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
            floor: None,
            give_up: None,
            note: Arc::default(),
        }
    }

    /// The same owner's request for one more hold, without tickets.
    pub(crate) fn again(&self) -> Self {
        Self {
            hold: fresh_hold(),
            line: None,
            next: None,
            give_up: None,
            ..self.clone()
        }
    }

    /// As one of all who share the lock.
    pub(crate) fn shared(mut self) -> Self {
        self.owner = Owner::SHARED;
        self
    }

    /// As one of so many who hold a permit.
    pub(crate) fn permit(mut self, of: u32) -> Self {
        self.owner = NonZeroU32::new(of).map_or(Owner::SHARED, Owner::permits);
        self
    }

    /// With this lease.
    pub(crate) fn lasting(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Queues with this ticket when refused.
    pub(crate) fn in_line(mut self, ticket: Ticket) -> Self {
        self.line = Some(ticket);
        self
    }

    /// With another waiter of the same client behind it.
    pub(crate) fn then(mut self, next: Ticket) -> Self {
        self.next = Some(next);
        self
    }

    /// Re-enters this incarnation only.
    pub(crate) fn joining(mut self, token: FencingToken) -> Self {
        self.join = Some(token);
        self
    }

    /// With a token no smaller than this.
    pub(crate) fn from(mut self, floor: FencingToken) -> Self {
        self.floor = Some(floor);
        self
    }

    /// With this holder info.
    pub(crate) fn noting(mut self, note: HolderInfo) -> Self {
        self.note = Arc::new(note);
        self
    }

    /// The ticket that it queues with.
    pub(crate) fn ticket(&self) -> Result<Ticket> {
        let none = || Failure::new("BUG: it queues without a ticket");
        self.line.ok_or_else(none)
    }

    /// The release of its hold.
    pub(crate) fn release(&self) -> Release {
        Release::new(self.name.clone(), self.owner, self.hold)
    }

    /// Given up at this instant.
    pub(crate) fn until(mut self, give_up: Instant) -> Self {
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
pub(crate) struct Hold {
    /// The request.
    pub(crate) ask: Ask,
    /// The incarnation's fencing token.
    pub(crate) token: FencingToken,
    /// The number of holds after the grant.
    pub(crate) holds: u32,
    /// The lease that the store promised, counted from `before`.
    pub(crate) valid_for: Duration,
    /// The instant before the request was sent: the lease ends at the earliest `lease` after it.
    pub(crate) before: Instant,
    /// The instant after the answer: the lease ends at the latest `lease` after it.
    pub(crate) after: Instant,
}

impl Hold {
    /// The earliest instant at which the hold can be over.
    pub(crate) fn over_from(&self) -> Instant {
        self.before + self.ask.lease
    }

    /// The latest instant at which the hold can still exist if it is never renewed.
    pub(crate) fn over_by(&self) -> Instant {
        self.after + self.ask.lease
    }
}
