//! What a driver answers.

use crate::{
    driver::request::{Lane, Note},
    identity::{FencingToken, Fingerprint, Ticket},
    name::LockName,
};
use std::{num::NonZeroU32, ops::RangeInclusive, time::Duration};

/// The answer to an [`Acquire`](crate::Acquire).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Acquired {
    /// Taken.
    Granted(Grant),
    /// Refused: somebody holds it, or it is shut, or it is another's turn.
    Held(Held),
    /// The incarnation to be joined is over.
    Gone,
}

/// A lock taken.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Grant {
    /// `None` only where [`Capabilities::fencing`] is false.
    pub token: Option<FencingToken>,
    /// How many holds the incarnation has now.
    pub holds: NonZeroU32,
    /// What the store still had to run when it answered, counted from the instant *before* the request was given to the driver: the
    /// lease, what a repeat found left of it, a session's proven rest.
    pub valid_for: Duration,
}

impl Grant {
    /// A grant.
    #[must_use]
    pub fn new(token: Option<FencingToken>, holds: NonZeroU32, valid_for: Duration) -> Self {
        Self {
            token,
            holds,
            valid_for,
        }
    }
}

/// A refusal, with whatever is known.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Held {
    /// Who holds it.
    pub by: Option<Holder>,
    /// Look again no later than that, though no hint came; `None`: the core's own interval.
    pub look_in: Option<Duration>,
    /// How many tickets stand before this one.
    pub ahead: Option<u32>,
}

/// Somebody inside.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// Hashed by the driver from whatever stands there: no answer carries a secret.
    pub owner: Fingerprint,
    /// Its token.
    pub token: Option<FencingToken>,
    /// What its lease has left.
    pub rest: Option<Duration>,
    /// What it said of itself.
    pub note: Note,
}

impl Holder {
    /// A holder of whom only the owner is known.
    #[must_use]
    pub fn new(owner: Fingerprint) -> Self {
        Self {
            owner,
            token: None,
            rest: None,
            note: Note::default(),
        }
    }
}

/// The answer for one entry of a batch of renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// It lasts.
    Until {
        /// How long, counted like [`Grant::valid_for`].
        valid_for: Duration,
    },
    /// It is not there.
    NotHeld,
}

/// The answer to a [`Release`](crate::Release).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Released {
    /// The name is free, or the line was served.
    Freed,
    /// Other holds of the incarnation are left.
    StillHeld {
        /// How many.
        holds: NonZeroU32,
    },
    /// Nobody is inside, and the name stays shut.
    Kept {
        /// For how long.
        rest: Duration,
    },
    /// That hold was not there.
    NotHeld {
        /// Who is inside instead, if the store told.
        by: Option<Holder>,
    },
}

/// A wake-up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// The lock is reserved for this ticket: acquire with it, or leave.
    Turn {
        /// The lock.
        name: LockName,
        /// Whose turn it is.
        ticket: Ticket,
    },
    /// This ticket is now next in line: look then.
    First {
        /// The lock.
        name: LockName,
        /// The ticket.
        ticket: Ticket,
        /// When the one before it must be done.
        look_in: Duration,
    },
    /// Perhaps free.
    Free(LockName),
    /// A session ended: the core renews its lane at once, and `NotHeld` is then a loss with reason `Session`.
    Over(Lane),
    /// Anything may have been missed.
    LookAgain,
}

/// The answer to [`break_lock`](crate::DistributedLock::break_lock).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broken {
    /// It was held or shut, and is not any more.
    Freed {
        /// The token it had, if somebody was inside.
        token: Option<FencingToken>,
    },
    /// It has another token than the one named: nothing was done.
    Changed {
        /// The one it has.
        token: Option<FencingToken>,
    },
    /// Nobody held it and nothing kept it shut.
    WasFree,
}

/// Where a walk over the names goes on: the driver's own, the core only carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(pub Vec<u8>);

/// One step of a walk over the names.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Page {
    /// What was found.
    pub found: Vec<Snapshot>,
    /// Where to go on; `None` is the only end.
    pub next: Option<Cursor>,
}

impl Page {
    /// A step.
    #[must_use]
    pub fn new(found: Vec<Snapshot>, next: Option<Cursor>) -> Self {
        Self { found, next }
    }
}

/// One name at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The name.
    pub name: LockName,
    /// Who is inside; empty: nobody.
    pub holders: Vec<Holder>,
    /// How many living holds they have together.
    pub holds: u32,
    /// Nobody inside, yet closed that long: kept or reserved.
    pub shut: Option<Duration>,
    /// How many clients wait, where the store knows.
    pub waiters: Option<u32>,
    /// How long ago the incarnation began, where the store knows.
    pub age: Option<Duration>,
}

impl Snapshot {
    /// A free name.
    #[must_use]
    pub fn free(name: LockName) -> Self {
        Self {
            name,
            holders: Vec::new(),
            holds: 0,
            shut: None,
            waiters: None,
            age: None,
        }
    }
}

/// What a store can do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// `redis`, `mysql`, ….
    pub backend: &'static str,
    /// Which store, without secrets (scheme, hosts, database, prefix, layout): what a [`Pass`](crate::Pass) is matched by.
    pub store: String,
    /// How waiters are woken.
    pub wake: Wake,
    /// The leases it can give. On ZooKeeper kept ones are exactly the upper end.
    pub leases: RangeInclusive<Duration>,
    /// How long after `give_up` an acquire could still take hold, while the server runs.
    pub late: Duration,
    /// The most entries of one batch of renewals.
    pub renew_batch: usize,
    /// Whether grants carry a fencing token.
    pub fencing: bool,
    /// Holds end with the client, not before: no detach; the core ends a fixed lease by a release.
    pub session_bound: bool,
}

impl Capabilities {
    /// A store that only answers, gives every lease and numbers its grants.
    #[must_use]
    pub fn new(backend: &'static str, store: impl Into<String>) -> Self {
        Self {
            backend,
            store: store.into(),
            wake: Wake::Poll,
            leases: crate::MIN_LEASE..=crate::MAX_LEASE,
            late: Duration::ZERO,
            renew_batch: 100,
            fencing: true,
            session_bound: false,
        }
    }
}

/// How a store wakes waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wake {
    /// It keeps the order and pushes to the next.
    Line,
    /// It only notifies.
    Hints,
    /// It only answers.
    Poll,
}
