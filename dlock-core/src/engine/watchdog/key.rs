//! Watchdog key: how a hold names its entry in the watchdog.

/// The id of a hold's entry in the watchdog. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(pub(super) u64);
