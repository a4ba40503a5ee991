//! The clauses of the contract.

use std::fmt;

/// A clause of the contract. Cases are grouped by clause; `GUARANTEES.md` and the trait's docs use the
/// same ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Clause {
    /// At most one owner holds a name.
    Mutex,
    /// Only a hold renews or releases itself.
    Owner,
    /// The same owner enters again at once, past every queue.
    Reentry,
    /// Sharers enter beside each other up to their number, and past no other owner who waits.
    Share,
    /// A holder that stops renewing loses the lock within its lease.
    Expiry,
    /// Nothing shortens what a hold asked for.
    Lease,
    /// Renewal prolongs what is there and creates nothing.
    Renew,
    /// Each incarnation has a token greater than every earlier one.
    Fencing,
    /// A holder learns in time that it lost the lock.
    Loss,
    /// An unanswered request is repeated or cleaned up, never counted twice.
    Indeterminate,
    /// A cancelled request leaves nothing behind.
    Cancel,
    /// The order of waiters, and their wake-ups.
    Wait,
    /// A request that is executed long after its sender gave up takes nothing that lasts.
    Late,
    /// A dead process costs its lease and no more.
    Crash,
    /// The locks of a client whose presence is over are free for others, and it knew before.
    Presence,
    /// A lock released early stays unavailable for its minimum hold.
    Keep,
    /// Inspecting changes nothing; breaking frees only the named lock.
    Admin,
    /// Contention is a value; an error says what it may have done.
    Error,
    /// Names that differ in a byte are different locks.
    Name,
    /// Closing ends connections, not holds.
    Shutdown,
}

impl Clause {
    /// Its id.
    #[must_use]
    pub const fn id(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::Owner => "owner",
            Self::Reentry => "reentry",
            Self::Share => "share",
            Self::Expiry => "expiry",
            Self::Lease => "lease",
            Self::Renew => "renew",
            Self::Fencing => "fencing",
            Self::Loss => "loss",
            Self::Indeterminate => "indeterminate",
            Self::Cancel => "cancel",
            Self::Wait => "wait",
            Self::Late => "late",
            Self::Crash => "crash",
            Self::Presence => "presence",
            Self::Keep => "keep",
            Self::Admin => "admin",
            Self::Error => "error",
            Self::Name => "name",
            Self::Shutdown => "shutdown",
        }
    }
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}
