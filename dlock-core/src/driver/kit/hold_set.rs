//! Hold set: the holds of one incarnation as SQL stores keep them, in one text column of fixed-width
//! entries.

use crate::owner::HoldId;
use std::{fmt, str::FromStr};

/// A set of (hold, end): the holds of a lock, each with its own end in the store's time, in microseconds
/// since the store's epoch.
///
/// Its text has fixed-width entries of lower-case hex, 16 digits of hold and 16 of end, in the order in
/// which the holds came. SQL can thus tell the simple cases apart by length alone: 32 characters are one
/// hold, and an empty text is a free name.
///
/// [`prolong`](Self::prolong) never moves an end back. [`living`](Self::living) drops the holds past their
/// end, so that the next writer prunes them.
///
/// A client that waits to hold a shared lock alone leaves a [claim](Self::claim): an entry of its own at the end,
/// of which the hold is all ones. It is no hold, and outlives the holds beside it.
///
/// # Examples
/// ```
/// use dlock_core::{HoldId, driver::kit::HoldSet};
///
/// let mut holds = HoldSet::one(HoldId::from_bits(7), 1_000);
/// holds.prolong(HoldId::from_bits(7), 2_000);
/// assert_eq!(holds.to_string(), "000000000000000700000000000007d0");
/// assert!(holds.living(2_000).is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldSet(Vec<(HoldId, u64)>);

/// The entry of a claim has this in the place of a hold.
const CLAIM: HoldId = HoldId::from_bits(u64::MAX);

/// The width of an entry in characters.
const HOLD_WIDTH: usize = 32;

impl HoldSet {
    /// Builds a set of one hold.
    #[must_use]
    pub fn one(hold: HoldId, end: u64) -> Self {
        Self(vec![(hold, end)])
    }

    /// Drops the holds whose end is not after `now`.
    #[must_use]
    pub fn living(mut self, now: u64) -> Self {
        self.0.retain(|(_, end)| *end > now);
        self
    }

    /// The end of a hold, if it is in the set.
    #[must_use]
    pub fn end_of(&self, hold: HoldId) -> Option<u64> {
        self.entry(hold).filter(|_| hold != CLAIM)
    }

    fn entry(&self, hold: HoldId) -> Option<u64> {
        let found = self.0.iter().find(|(other, _)| *other == hold);
        found.map(|(_, end)| *end)
    }

    /// The hold that came first.
    #[must_use]
    pub fn first(&self) -> Option<HoldId> {
        let first = self.0.first().map(|(hold, _)| *hold);
        first.filter(|hold| *hold != CLAIM)
    }

    /// Adds an entry that is not in the set.
    pub fn insert(&mut self, hold: HoldId, end: u64) {
        self.0.push((hold, end));
        self.0.sort_by_key(|(hold, _)| *hold == CLAIM);
    }

    /// Until when a client may be waiting to hold the lock alone; 0: none is.
    #[must_use]
    pub fn claimed_until(&self) -> u64 {
        self.entry(CLAIM).unwrap_or(0)
    }

    /// Claims the lock until then for a client that waits to hold it alone: no sharer enters before.
    pub fn claim(&mut self, until: u64) {
        let until = until.max(self.claimed_until());
        self.0.retain(|(hold, _)| *hold != CLAIM);
        self.0.push((CLAIM, until));
    }

    /// Removes all holds. A claim stays.
    pub fn clear(&mut self) {
        self.0.retain(|(hold, _)| *hold == CLAIM);
    }

    /// Moves the end of a hold forward, never back. Returns whether it is in the set.
    #[must_use]
    pub fn prolong(&mut self, hold: HoldId, end: u64) -> bool {
        match self.0.iter_mut().find(|(other, _)| *other == hold) {
            Some((_, until)) if hold != CLAIM => {
                *until = end.max(*until);
                true
            }
            _ => false,
        }
    }

    /// Removes a hold. Returns whether it was in the set.
    #[must_use]
    pub fn remove(&mut self, hold: HoldId) -> bool {
        let before = self.0.len();
        self.0.retain(|(other, _)| *other != hold || hold == CLAIM);
        self.0.len() < before
    }

    /// The entries, in the order in which they came: the holds and their ends, and a claim.
    pub fn iter(&self) -> impl Iterator<Item = (HoldId, u64)> {
        self.0.iter().copied()
    }

    fn ends(&self) -> impl Iterator<Item = u64> {
        let holds = self.0.iter().filter(|(hold, _)| *hold != CLAIM);
        holds.map(|(_, end)| *end)
    }

    /// The latest end of a hold; `None` when the set is empty.
    #[must_use]
    pub fn latest(&self) -> Option<u64> {
        self.ends().max()
    }

    /// The earliest end of a hold; `None` when the set is empty.
    #[must_use]
    pub fn earliest(&self) -> Option<u64> {
        self.ends().min()
    }

    /// The number of holds.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.ends().count()).unwrap_or(u32::MAX)
    }

    /// Whether the set has no hold.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends().next().is_none()
    }
}

impl fmt::Display for HoldSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|(hold, end)| write!(f, "{hold}{end:016x}"))
    }
}

impl FromStr for HoldSet {
    type Err = HoldSetError;

    fn from_str(text: &str) -> Result<Self, HoldSetError> {
        let broken = || HoldSetError(text.chars().take(2 * HOLD_WIDTH).collect());
        if !text.len().is_multiple_of(HOLD_WIDTH) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(broken());
        }
        let number = |from: usize| {
            u64::from_str_radix(&text[from..from + HOLD_WIDTH / 2], 16).map_err(|_| broken())
        };
        let entries = (0..text.len()).step_by(HOLD_WIDTH).map(|at| {
            let hold = HoldId::from_bits(number(at)?);
            Ok((hold, number(at + HOLD_WIDTH / 2)?))
        });
        entries.collect::<Result<_, _>>().map(Self)
    }
}

/// A column that is not a set of holds: dlock did not write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the column of holds has {0:?}, which dlock did not write")]
pub struct HoldSetError(String);

#[cfg(test)]
mod tests {
    use super::HoldSet;
    use crate::owner::HoldId;
    use proptest::prelude::{any, prop, proptest};

    const A: HoldId = HoldId::from_bits(0xa);
    const B: HoldId = HoldId::from_bits(0xb);

    #[test]
    fn its_text_is_pinned() {
        let mut set = HoldSet::one(A, 1_000_000);
        set.insert(B, u64::MAX);
        let text = "000000000000000a00000000000f4240000000000000000bffffffffffffffff";
        assert_eq!(set.to_string(), text);
        assert_eq!(text.parse(), Ok(set));
        assert_eq!("".parse(), Ok(HoldSet::default()));
    }

    #[test]
    fn foreign_text_is_refused() {
        for text in ["0", &"g".repeat(32), &"é".repeat(16), &"0".repeat(33)] {
            text.parse::<HoldSet>().unwrap_err();
        }
    }

    #[test]
    fn an_end_never_moves_back_and_the_dead_are_forgotten() {
        let mut set = HoldSet::one(A, 50);
        assert!(set.prolong(A, 40));
        assert_eq!(set.end_of(A), Some(50));
        assert!(!set.prolong(B, 60));
        set.insert(B, 60);
        assert_eq!(set.latest(), Some(60));
        let set = set.living(50);
        assert_eq!((set.len(), set.end_of(A)), (1, None));
    }

    #[test]
    fn a_claim_is_no_hold_stays_behind_the_holds_and_ends() {
        let mut set = HoldSet::one(A, 50);
        set.claim(70);
        set.insert(B, 60);
        assert_eq!(
            (set.len(), set.earliest(), set.latest()),
            (2, Some(50), Some(60))
        );
        assert_eq!(set.iter().last().map(|(_, end)| end), Some(70));
        set.clear();
        assert!(set.is_empty());
        let read: HoldSet = set.to_string().parse().unwrap();
        assert_eq!(
            (read.claimed_until(), read.living(70).claimed_until()),
            (70, 0)
        );
    }

    proptest! {
        #[test]
        fn every_set_survives_its_text(entries in prop::collection::vec(any::<(u64, u64)>(), 0..64)) {
            let mut set = HoldSet::default();
            for (hold, end) in entries {
                set.insert(HoldId::from_bits(hold), end);
            }
            assert_eq!(set.to_string().parse(), Ok(set));
        }
    }
}
