//! What the core asks.

use crate::{
    clock::Instant,
    identity::{FencingToken, HoldId, Owner, Ticket},
    lease::Lease,
    name::LockName,
};
use std::{
    fmt,
    sync::{Arc, LazyLock},
    time::Duration,
};

/// Names that share a fate: a session, a shard, a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane(pub u32);

/// A request to take a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Acquire {
    /// The lock.
    pub name: LockName,
    /// Who wants it.
    pub owner: Owner,
    /// The identity of this acquisition, repeated when the request is.
    pub hold: HoldId,
    /// How long it is to last.
    pub lease: Lease,
    /// The ticket to stand in line with when it is refused; `None`: leave no trace.
    pub line: Option<Ticket>,
    /// The ticket with which this client's further local waiters stand in line when this one is granted.
    pub next: Option<Ticket>,
    /// Only re-enter this incarnation.
    pub join: Option<FencingToken>,
    /// Not the first attempt, so probably refused: a polling store reads before it writes.
    pub look: bool,
    /// When the core stops waiting for the answer; the driver turns it into its server's time ([`ServerClock`](crate::ServerClock) helps).
    pub give_up: Instant,
    /// What `inspect` shows of the holder; vanishes with the hold.
    pub note: Arc<Note>,
}

impl Acquire {
    /// A first attempt that leaves no trace when it is refused.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId, lease: Lease, give_up: Instant) -> Self {
        // Shared, because the core sets its own at once.
        static NOTHING: LazyLock<Arc<Note>> = LazyLock::new(Arc::default);
        Self {
            name,
            owner,
            hold,
            lease,
            line: None,
            next: None,
            join: None,
            look: false,
            give_up,
            note: Arc::clone(&NOTHING),
        }
    }
}

/// What a holder says of itself for people to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Note {
    /// The name of its machine, at most 64 bytes.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
}

impl Note {
    /// The note of this process.
    #[must_use]
    pub fn here() -> Self {
        let uname = rustix::system::uname();
        Self::new(uname.nodename().to_string_lossy(), std::process::id())
    }

    /// A note; the host is cut to 64 bytes and loses its control characters and blanks.
    #[must_use]
    pub fn new(host: impl AsRef<str>, pid: u32) -> Self {
        let mut kept = String::new();
        for c in host.as_ref().chars() {
            if kept.len() + c.len_utf8() > 64 {
                break;
            }
            if !c.is_control() && !c.is_whitespace() {
                kept.push(c);
            }
        }
        Self { host: kept, pid }
    }

    /// Reads what `Display` wrote; whatever else stands there gives an empty note.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.split_once(' ').map(|(pid, host)| (pid.parse(), host)) {
            Some((Ok(pid), host)) => Self::new(host, pid),
            _ => Self::default(),
        }
    }
}

/// `PID HOST`, one line, as stores keep it.
impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.host)
    }
}

/// One entry of a batch of renewals.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renew {
    /// The lock.
    pub name: LockName,
    /// Its owner.
    pub owner: Owner,
    /// The hold to prolong.
    pub hold: HoldId,
    /// How long it is to last from now; `None` only proves that it is still there (a fixed lease on a session store).
    pub lease: Option<Duration>,
}

impl Renew {
    /// An entry.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId, lease: Option<Duration>) -> Self {
        Self {
            name,
            owner,
            hold,
            lease,
        }
    }
}

/// A request to give a lock back.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Release {
    /// The lock.
    pub name: LockName,
    /// Its owner.
    pub owner: Owner,
    /// Which of its holds.
    pub holds: Holds,
    /// What is left of an `at_least_for`: with no hold left the name stays shut that long.
    pub keep: Option<Duration>,
}

impl Release {
    /// Gives one hold back.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId) -> Self {
        Self {
            name,
            owner,
            holds: Holds::One(hold),
            keep: None,
        }
    }
}

/// Which holds of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// This one.
    One(HoldId),
    /// All of them, for the command line; guards elsewhere learn it at their next renewal.
    All,
}
