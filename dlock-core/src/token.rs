//! Fencing token: the number of an incarnation of a lock.

use std::fmt;

/// A number that grows with every new incarnation of a lock. Send it with each write to the protected
/// resource, and let the resource refuse a token smaller than one it has seen.
///
/// It increases strictly per name and may skip numbers. Re-entry repeats the token of the incarnation it
/// enters. Every store keeps it below 2^63, for a column of type `BIGINT`.
///
/// # Examples
/// ```
/// use dlock_core::FencingToken;
///
/// let (late, newest) = (FencingToken(6), FencingToken(7));
/// assert!(late < newest); // refuse the late write
/// assert_eq!(i64::try_from(newest.0), Ok(7)); // as SQL and BSON take it
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(pub u64);

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
