//! What cases ask for, and what they were granted.

use crate::failure::Failure;
use dlock_core::{FencingToken, HoldId, Instant, LockName, Note, Owner, Ticket};
use std::{sync::Arc, time::Duration};

/// A wish for a lock, as data: what [`Acquire`](dlock_core::Acquire) says, but for the instants, which are filled in when it is sent.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The lock.
    pub name: LockName,
    /// Who wants it.
    pub owner: Owner,
    /// The identity of this acquisition.
    pub hold: HoldId,
    /// How long it is to last.
    pub lease: Duration,
    /// The ticket to stand in line with.
    pub line: Option<Ticket>,
    /// The ticket that is to stand at the end of the line.
    pub next: Option<Ticket>,
    /// Only re-enter this incarnation.
    pub join: Option<FencingToken>,
    /// When its sender gives up; `None`: long after the answer must have come.
    pub give_up: Option<Instant>,
    /// What the holder says of itself.
    pub note: Arc<Note>,
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

    /// The same owner's wish for one hold more, without tickets.
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

    /// With that lease.
    #[must_use]
    pub fn lasting(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Standing in line when refused.
    #[must_use]
    pub fn in_line(mut self, ticket: Ticket) -> Self {
        self.line = Some(ticket);
        self
    }

    /// With somebody behind it in the same client.
    #[must_use]
    pub fn then(mut self, next: Ticket) -> Self {
        self.next = Some(next);
        self
    }

    /// Only into that incarnation.
    #[must_use]
    pub fn joining(mut self, token: FencingToken) -> Self {
        self.join = Some(token);
        self
    }

    /// With that said of the holder.
    #[must_use]
    pub fn noting(mut self, note: Note) -> Self {
        self.note = Arc::new(note);
        self
    }

    /// Given up at that instant.
    #[must_use]
    pub fn until(mut self, give_up: Instant) -> Self {
        self.give_up = Some(give_up);
        self
    }
}

/// Fresh for one owner, which is all that is asked of it.
fn fresh_hold() -> HoldId {
    HoldId::from_bits(fastrand::u64(..))
}

/// A hold that was granted.
#[derive(Clone, Debug)]
pub struct Hold {
    /// What was asked.
    pub ask: Ask,
    /// The incarnation's token, where the store numbers its grants.
    pub token: Option<FencingToken>,
    /// How many holds there were then.
    pub holds: u32,
    /// What the store promised, counted from `before`.
    pub valid_for: Duration,
    /// Before the request was given to the driver: its lease ends `lease` after that at the earliest.
    pub before: Instant,
    /// After the answer: its lease ends `lease` after that at the latest.
    pub after: Instant,
}

impl Hold {
    /// Its token.
    ///
    /// # Errors
    /// Without one, which the store has no right to: the case needs `Need::Fencing`.
    pub fn token(&self) -> Result<FencingToken, Failure> {
        self.token
            .ok_or_else(|| Failure::new("granted without a token"))
    }

    /// The earliest instant at which it can be over.
    #[must_use]
    pub fn over_from(&self) -> Instant {
        self.before + self.ask.lease
    }

    /// The latest instant at which it can still be there, never renewed.
    #[must_use]
    pub fn over_by(&self) -> Instant {
        self.after + self.ask.lease
    }
}
