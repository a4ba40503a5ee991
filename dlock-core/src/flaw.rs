//! Core mutants: deliberately wrong cores, to prove that the suite notices them.
//!
//! Without the feature `mutants` no client has one, and every check for one is `false` at compile time.

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
    /// An acquire that was cancelled in flight is not cleaned up.
    NothingSettled,
    /// The first answered release settles a hold, though a copy of its acquire is still in flight.
    SettledTooEarly,
    /// Local waiters are served last in, first out.
    LastInFirstOut,
    /// A ticket without a waiter stays in the queue.
    NeverLeaves,
    /// Wake-ups are ignored.
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
    /// A fixed lease is trusted until its end.
    FixedUnproven,
    /// `min_hold` is not sent to the store.
    KeepForgotten,
    /// `max_hold` ends nothing.
    MaxHoldIgnored,
    /// A detached hold stays with the watchdog.
    DetachedIsRenewed,
    /// All acquisitions without a given owner have one and the same, as if the process were the owner.
    OneOwner,
    /// The store is asked for ten times the lease.
    LeaseTooLong,
    /// A refused waiter polls again at once.
    EagerLooks,
    /// A renewal that is answered after its give-up proves nothing.
    LateAnswersDropped,
    /// A hold whose owner has the lock under another token is trusted until its next renewal.
    StaleHoldsBelieved,
    /// A lost hold is not released, though a copy of its acquire may yet revive it.
    RevivableForgotten,
    /// The waiters of this client are not notified when its hold is lost.
    LossWakesNobody,
    /// A waiting owner asks past the queue only once.
    OwnerAsksOnce,
    /// The next waiter of this client enters the store's queue only when it has become the head.
    NextStandsLate,
    /// Each waiter counts the store's failures on its own instead of sharing the limit of the queue.
    PatienceNotShared,
}
