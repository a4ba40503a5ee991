//! Deliberately wrong cores, for the suite that proves it would notice them.
//!
//! Without the feature `mutants` no client has one and every question below is answered `false` at compile time.

/// One thing done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[cfg_attr(not(feature = "mutants"), allow(unreachable_pub))] // exported with the feature only
pub enum Flaw {
    /// The deadline counts from the reply instead of the send.
    DeadlineFromReply,
    /// One failed renewal loses the lock.
    FailedRenewalIsLoss,
    /// `check`, `remaining` and `lost` wait for the watchdog to notice instead of reading the clock.
    ClockIgnored,
    /// A release leaves the hold with the watchdog.
    RenewsAfterRelease,
    /// An unanswered acquire is repeated as a new one.
    FreshHoldOnRepeat,
    /// An acquire that was cancelled under way is forgotten.
    NothingSettled,
    /// The first answered release settles a hold, though a copy of its acquire is still under way.
    SettledTooEarly,
    /// Local waiters are served last in, first out.
    LastInFirstOut,
    /// A ticket that nobody waits with any more stays in line.
    NeverLeaves,
    /// Wake-ups are not listened to.
    HintsIgnored,
    /// An owner that holds the lock in this client waits for itself.
    NoReentry,
    /// A release that finds nothing reports success.
    NotHeldIsReleased,
    /// Shutdown releases what its users still hold.
    ShutdownReleases,
    /// Contention is an error.
    ContentionIsError,
    /// Errors show the owner.
    OwnerShown,
    /// The watchdog renews nothing.
    NeverRenews,
    /// `at_least_for` is not told to the store.
    KeepForgotten,
    /// `max_hold` ends nothing.
    MaxHoldIgnored,
    /// A detached hold stays with the watchdog.
    DetachedIsRenewed,
    /// All acquisitions that name no owner have one and the same, as if it were the process that owns.
    OneOwner,
    /// The store is asked for ten times the lease.
    LeaseTooLong,
    /// Whoever is refused looks again at once.
    EagerLooks,
    /// A renewal that is answered after its give-up proves nothing.
    LateAnswersDropped,
    /// A hold whose owner has the lock under another token is believed until its next renewal.
    StaleHoldsBelieved,
    /// A lost hold is not given back, though a copy of its acquire may yet revive it.
    RevivableForgotten,
    /// Who waits in this client is not told that its hold was lost.
    LossWakesNobody,
    /// An owner that waits asks past the queue only once.
    OwnerAsksOnce,
    /// The next waiter of this client stands in line only when it has become the first.
    NextStandsLate,
    /// Each waiter has a patience of its own with a store that fails.
    PatienceNotShared,
}
