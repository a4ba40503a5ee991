//! Answers: what a driver returns to the core.

use crate::{
    driver::request::{HolderInfo, Lane, Ticket},
    name::LockName,
    owner::{Fingerprint, HoldId},
    token::FencingToken,
};
use std::{num::NonZeroU32, ops::RangeInclusive, time::Duration};

/// The answer to an [`Acquire`](crate::driver::Acquire).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Acquired {
    /// The lock was taken.
    Granted(Grant),
    /// Refused: the lock is held, unavailable for its minimum hold, or reserved for another ticket.
    Held(Held),
    /// The incarnation to re-enter is over.
    Gone,
}

/// A granted acquire.
///
/// # Examples
/// ```
/// use dlock_core::{FencingToken, driver::Grant};
/// use std::{num::NonZeroU32, time::Duration};
///
/// let grant = Grant::new(FencingToken(7), NonZeroU32::MIN, Duration::from_secs(30));
/// assert_eq!(grant.token, FencingToken(7));
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Grant {
    /// The token of the incarnation.
    pub token: FencingToken,
    /// How many holds the incarnation has now.
    pub holds: NonZeroU32,
    /// How long the hold is valid, counted from the instant *before* the request was given to the driver:
    /// the lease, the rest of it that a repeat found, or the proven rest of a session.
    pub valid_for: Duration,
}

impl Grant {
    /// Builds a grant.
    #[must_use]
    pub fn new(token: FencingToken, holds: NonZeroU32, valid_for: Duration) -> Self {
        Self {
            token,
            holds,
            valid_for,
        }
    }
}

/// A refused acquire, with what the store told.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Held {
    /// The holder.
    pub by: Option<Holder>,
    /// Poll again after this time at the latest, even without a wake-up; `None`: after the core's own
    /// interval.
    pub poll_in: Option<Duration>,
    /// How many tickets are queued before this one; the error of a wait that timed out says it.
    pub ahead: Option<u32>,
    /// Refused, but a part of the store may have the hold, or take it until `give_up + late`: the core hands it to the
    /// cleanup, and asks again with another hold.
    pub doubt: bool,
}

impl Held {
    /// The incarnation that holds the lock, and the presence that it depends on.
    pub(crate) fn dependence(&self) -> Option<(FencingToken, HoldId)> {
        let by = self.by.as_ref()?;
        by.token.zip(by.info.presence())
    }
}

/// A holder of a lock.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:holder")?)?;
/// let guard = client.lock("orders:42")?.acquire().await?;
/// let shown = client.admin().inspect("orders:42").await?;
/// let holder = &shown.holders[0];
/// assert_eq!((holder.owner, holder.token), (guard.owner(), Some(guard.token())));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// The driver hashes it from the stored owner: no answer carries a secret.
    pub owner: Fingerprint,
    /// Its token.
    pub token: Option<FencingToken>,
    /// The rest of its lease.
    pub rest: Option<Duration>,
    /// The holder info that it sent with its acquire.
    pub info: HolderInfo,
}

impl Holder {
    /// Builds a holder of which only the owner is known.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Holder, Owner};
    ///
    /// let mut holder = Holder::new(Owner::from_seed("me").fingerprint());
    /// holder.rest = Some(std::time::Duration::from_secs(30));
    /// ```
    #[must_use]
    pub fn new(owner: Fingerprint) -> Self {
        Self {
            owner,
            token: None,
            rest: None,
            info: HolderInfo::default(),
        }
    }
}

/// The answer for one entry of a batch of renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// The hold is there and lasts.
    Until {
        /// How long it lasts, counted like [`Grant::valid_for`].
        valid_for: Duration,
    },
    /// The hold is not there.
    NotHeld,
}

/// The answer to a [`Release`](crate::driver::Release).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Released {
    /// The name is free, or the queue was served.
    Freed,
    /// Other holds of the incarnation are left.
    StillHeld {
        /// How many.
        holds: NonZeroU32,
    },
    /// No hold is left, and the lock stays unavailable for its minimum hold.
    MinHold {
        /// For how long.
        rest: Duration,
    },
    /// The hold was not there.
    NotHeld {
        /// The current holder, if the store told.
        by: Option<Holder>,
    },
}

/// A wake-up from the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WakeUp {
    /// The lock is reserved for this ticket: acquire with it, or leave.
    Turn {
        /// The lock.
        name: LockName,
        /// The ticket that it is reserved for.
        ticket: Ticket,
    },
    /// This ticket is now first in the queue: poll after `poll_in`.
    First {
        /// The lock.
        name: LockName,
        /// The ticket.
        ticket: Ticket,
        /// The time by which the hold before it must be over.
        poll_in: Duration,
    },
    /// The lock may be free.
    Free(LockName),
    /// A session ended. The core renews its lane at once; a `NotHeld` answer is then a loss with reason
    /// `Session`.
    Over(Lane),
    /// Any wake-up may have been missed.
    Resync,
}

/// The answer to [`break_lock`](crate::driver::DistributedLock::break_lock).
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:broken")?)?;
/// use dlock_core::Broken;
///
/// let guard = client.lock("orders:42")?.acquire().await?;
/// let token = Some(guard.token());
/// assert_eq!(client.admin().break_lock("orders:42", token).await?, Broken::Freed { token });
/// assert_eq!(client.admin().break_lock("orders:42", None).await?, Broken::WasFree);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broken {
    /// The name was held or unavailable, and is now free.
    Freed {
        /// The token that it had, if it was held.
        token: Option<FencingToken>,
    },
    /// The name has another token than the one given: nothing was done.
    Changed {
        /// The token that it has.
        token: Option<FencingToken>,
    },
    /// The name was neither held nor unavailable.
    WasFree,
}

/// The position of a listing over the names. It is the driver's own; the core only carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(pub Vec<u8>);

/// One page of a listing over the names.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Page {
    /// The names found.
    pub found: Vec<Snapshot>,
    /// The cursor to go on with; `None` is the only end.
    pub next: Option<Cursor>,
}

impl Page {
    /// Builds a page.
    #[must_use]
    pub fn new(found: Vec<Snapshot>, next: Option<Cursor>) -> Self {
        Self { found, next }
    }
}

/// The state of one name at one moment.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:snapshot")?)?;
/// let guard = client.lock("orders:42")?.acquire().await?;
/// let shown = client.admin().inspect("orders:42").await?;
/// assert_eq!((shown.holds, shown.waiters), (1, Some(0)));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The name.
    pub name: LockName,
    /// The holders; empty if the name is not held.
    pub holders: Vec<Holder>,
    /// How many live holds they have together.
    pub holds: u32,
    /// How long the name stays unavailable without a holder: for its minimum hold, or because it is
    /// reserved.
    pub unavailable_for: Option<Duration>,
    /// How many clients wait, where the store knows.
    pub waiters: Option<u32>,
    /// How long ago the incarnation began, where the store knows.
    pub age: Option<Duration>,
    /// Why its record cannot be read. The name may be held and cannot be acquired until it is broken.
    /// Nothing else is known of it.
    pub damaged: Option<String>,
}

impl Snapshot {
    /// A free name.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Snapshot;
    ///
    /// assert!(Snapshot::free("orders:42".parse()?).holders.is_empty());
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
    #[must_use]
    pub fn free(name: LockName) -> Self {
        Self {
            name,
            holders: Vec::new(),
            holds: 0,
            unavailable_for: None,
            waiters: None,
            age: None,
            damaged: None,
        }
    }

    /// Whether the lock can be acquired: a listing leaves it out.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Snapshot;
    ///
    /// assert!(Snapshot::free("orders:42".parse()?).is_free());
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.holders.is_empty() && self.unavailable_for.is_none() && self.damaged.is_none()
    }

    /// A name whose record cannot be read.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Snapshot;
    ///
    /// let shown = Snapshot::damaged("orders:42".parse()?, "its owner is no UUID");
    /// assert!(shown.damaged.is_some());
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
    #[must_use]
    pub fn damaged(name: LockName, why: impl Into<String>) -> Self {
        let mut shown = Self::free(name);
        shown.damaged = Some(why.into());
        shown
    }
}

/// The capabilities of a store.
///
/// # Examples
/// ```
/// use dlock_core::driver::{Capabilities, Wake};
/// use std::time::Duration;
///
/// let mut capabilities = Capabilities::new("mystore", "mystore://db.internal/locks");
/// capabilities.wake = Wake::Notify;
/// capabilities.late = Duration::from_secs(2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The backend, by the name of its cargo feature: `redis`, `mysql`, `zk`, ….
    pub backend: &'static str,
    /// The store, without secrets (scheme, hosts, database, prefix, layout): a [`Pass`](crate::Pass) is
    /// matched by it.
    pub store: String,
    /// How waiters are woken.
    pub wake: Wake,
    /// The leases it can give. On ZooKeeper, a renewed lease has exactly the upper end.
    pub leases: RangeInclusive<Duration>,
    /// How long after `give_up` an acquire could still take the lock, while the server runs.
    pub late: Duration,
    /// How long after its end a hold of a client that is gone may still keep the lock from others, because the
    /// store ends it late.
    pub lapse: Duration,
    /// The most entries of one batch of renewals.
    pub renew_batch: usize,
    /// Holds end with the client's session, not before. There is no detach, and the core ends a fixed lease
    /// by a release.
    pub session_bound: bool,
    /// Locks can be shared, and have permits: the driver obeys [`Acquire::share`](crate::driver::Acquire::share).
    /// Without it the core refuses both.
    pub shares: bool,
    /// The driver obeys [`Acquire::floor`](crate::driver::Acquire::floor). The core sends none.
    pub raises: bool,
    /// Requests for one name are executed in the order in which the client sends them, as a rule: behind a release
    /// the core sends the attempt of the client's next waiter without waiting for the answer.
    pub ordered: bool,
}

impl Capabilities {
    /// A store without wake-ups that gives every lease.
    #[must_use]
    pub fn new(backend: &'static str, store: impl Into<String>) -> Self {
        Self {
            backend,
            store: store.into(),
            wake: Wake::Poll,
            leases: crate::MIN_LEASE..=crate::MAX_LEASE,
            late: Duration::ZERO,
            lapse: Duration::ZERO,
            renew_batch: 100,
            session_bound: false,
            shares: false,
            raises: false,
            ordered: false,
        }
    }
}

/// How a store wakes waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wake {
    /// It keeps tickets in a queue, reserves a free name for the first one, and notifies its client
    /// ([`WakeUp::Turn`], [`WakeUp::First`]).
    Queue,
    /// It only notifies that a name may be free ([`WakeUp::Free`]): waiters race, and no name is reserved.
    Notify,
    /// It sends no wake-ups: the core polls, and tickets mean nothing.
    Poll,
}
