//! Row state: what a row that was read means, and how a request changes it.
//!
//! It does no I/O, so every decision can be tested without a server.

use crate::error;
use dlock_core::{
    Acquire, Acquired, FencingToken, Fingerprint, Grant, HoldId, HoldSet, Holder, HolderInfo,
    Holds, LockName, Owner, Release, Released, Renew, Renewed, Result, Snapshot,
};
use std::{num::NonZeroU32, time::Duration};

/// A row, and the server's time when it was read; see `commands` for the columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: Option<String>,
    pub(crate) token: i64,
    pub(crate) holds: HoldSet,
    pub(crate) expires: i64,
    pub(crate) keep_until: i64,
    pub(crate) began: i64,
    pub(crate) changed: i64,
    pub(crate) note: String,
    pub(crate) version: i64,
    pub(crate) now: i64,
}

/// What an acquire does about a lock that is held or unavailable.
#[derive(Debug)]
pub(crate) enum Step {
    /// Answer this; write nothing.
    Answer(Acquired),
    /// Write this row if the stored one is unchanged and still held; the grant is then the answer.
    Swap(Record, Grant),
    /// Another owner holds the lock, or it is unavailable.
    Wait(Record),
}

impl Record {
    /// Whether the lock is held or unavailable; otherwise it is free, whatever else the row says.
    pub(crate) fn is_closed(&self) -> bool {
        self.expires > self.now
    }

    /// The time left of its last hold or of its minimum hold.
    pub(crate) fn rest(&self) -> Duration {
        self.until(self.expires)
    }

    /// The current incarnation's token; none while the lock is only unavailable.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.owner.as_ref()?;
        Some(token(self.token))
    }

    pub(crate) fn holder(&self) -> Option<Holder> {
        let mut holder = Holder::new(Fingerprint::of(self.owner.as_ref()?.as_bytes()));
        holder.token = self.token();
        holder.rest = Some(self.rest());
        holder.note = HolderInfo::parse(&self.note);
        Some(holder)
    }

    pub(crate) fn snapshot(self, name: LockName) -> Snapshot {
        let mut shown = Snapshot::free(name);
        if !self.is_closed() {
            return shown;
        }
        match self.holder() {
            Some(holder) => {
                shown.holders.push(holder);
                shown.age = Some(Duration::from_micros(unsigned(
                    self.now.saturating_sub(self.began),
                )));
                shown.holds = self.living().holds.len();
            }
            None => shown.shut = Some(self.rest()),
        }
        shown
    }

    /// The step for an acquire that found the lock held or unavailable.
    pub(crate) fn enter(self, req: &Acquire) -> Result<Step> {
        let inside = self.is_of(&req.owner);
        match req.join {
            Some(join) if !inside || self.token() != Some(join) => {
                return Ok(Step::Answer(Acquired::Gone));
            }
            None if !inside => return Ok(Step::Wait(self)),
            _ => {}
        }
        let mut next = self.living();
        let lease = req.lease.length();
        if let Some(end) = next.holds.end_of(req.hold) {
            let left = next.until(signed(end));
            let grant = Grant::new(token(next.token), next.counted()?, left);
            return Ok(Step::Answer(Acquired::Granted(grant)));
        }
        let end = next.after(lease);
        if !next.holds.insert(req.hold, unsigned(end)) {
            return Err(error::full());
        }
        next.expires = next.expires.max(end);
        let grant = Grant::new(token(next.token), next.counted()?, lease);
        Ok(Step::Swap(next, grant))
    }

    /// The row after a release, and the answer; `None`: the row has no such hold.
    pub(crate) fn without(self, req: &Release) -> Option<(Self, Released)> {
        if !self.is_of(&req.owner) {
            return None;
        }
        let mut next = self.living();
        match req.holds {
            Holds::All => next.holds = HoldSet::default(),
            Holds::One(hold) => next.holds.remove(hold).then_some(())?,
        }
        if let Some(keep) = req.keep {
            next.keep_until = next.keep_until.max(next.after(keep));
        }
        if let Some(holds) = NonZeroU32::new(next.holds.len()) {
            next.expires = next.latest();
            return Some((next, Released::StillHeld { holds }));
        }
        next.owner = None;
        next.note.clear();
        let kept = next.keep_until > next.now;
        next.expires = if kept { next.keep_until } else { 0 };
        let answer = if kept {
            Released::Kept { rest: next.rest() }
        } else {
            Released::Freed
        };
        Some((next, answer))
    }

    /// The row with one hold renewed, and the answer; `None`: the row has no such hold.
    pub(crate) fn prolonged(self, entry: &Renew) -> Option<(Self, Renewed)> {
        if !self.is_closed() || !self.is_of(&entry.owner) {
            return None;
        }
        let mut next = self.living();
        let end = next.after(entry.lease.unwrap_or_default());
        if !next.holds.prolong(entry.hold, unsigned(end)) {
            return None;
        }
        next.expires = next.latest();
        let end = next.holds.end_of(entry.hold).map_or(end, signed);
        let valid_for = next.until(end);
        Some((next, Renewed::Until { valid_for }))
    }

    fn is_of(&self, owner: &Owner) -> bool {
        self.owner.as_deref() == Some(&*written(owner))
    }

    fn living(mut self) -> Self {
        self.holds = self.holds.living(unsigned(self.now));
        self
    }

    fn latest(&self) -> i64 {
        self.holds.latest().map_or(0, signed)
    }

    fn until(&self, time: i64) -> Duration {
        Duration::from_micros(unsigned(time.saturating_sub(self.now)))
    }

    fn after(&self, span: Duration) -> i64 {
        self.now.saturating_add(micros(span))
    }

    /// The number of holds. A held lock has at least one: dlock writes no row that says otherwise.
    fn counted(&self) -> Result<NonZeroU32> {
        NonZeroU32::new(self.holds.len()).ok_or_else(error::garbled)
    }
}

/// An owner in the form of the row.
pub(crate) fn written(owner: &Owner) -> String {
    owner.expose().hyphenated().to_string()
}

/// An owner and a hold id in the form of the row. Every request needs them, so they are written without a
/// formatter or an allocation.
pub(crate) fn inside(owner: &Owner, hold: HoldId) -> ([u8; 36], [u8; 16]) {
    let (mut whose, mut id) = ([0; 36], [0; 16]);
    owner.expose().hyphenated().encode_lower(&mut whose);
    for (pair, byte) in id.chunks_exact_mut(2).zip(hold.to_bits().to_be_bytes()) {
        pair.copy_from_slice(&[
            DIGITS[usize::from(byte >> 4)],
            DIGITS[usize::from(byte & 15)],
        ]);
    }
    (whose, id)
}

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// A token from its form in the row.
pub(crate) fn token(bits: i64) -> FencingToken {
    FencingToken(unsigned(bits))
}

/// A span in the unit of the row's times.
pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// A time or token from the row; dlock writes none below zero.
pub(crate) fn unsigned(time: i64) -> u64 {
    u64::try_from(time).unwrap_or(0)
}

fn signed(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Record, Step, written};
    use dlock_core::{
        Acquire, Acquired, ErrorKind, FencingToken, HoldId, HoldSet, Holds, Instant, Lease,
        LockName, MAX_HOLDS, Owner, Release, Released, Renew, Renewed,
    };
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);
    const NOW: i64 = 1_000_000_000;

    /// One hold of `us` with ten seconds to go.
    fn row() -> Record {
        let end = NOW + 10_000_000;
        Record {
            owner: Some(written(&Owner::from_seed("us"))),
            token: 7,
            holds: HoldSet::one(HoldId::from_bits(1), super::unsigned(end)),
            expires: end,
            now: NOW,
            version: 3,
            ..Record::default()
        }
    }

    #[test]
    fn an_owner_and_a_hold_are_written_as_they_are_shown() {
        for (seed, bits) in [("us", 0), ("them", 0x0123_4567_89ab_cdef), ("", u64::MAX)] {
            let (owner, hold) = (Owner::from_seed(seed), HoldId::from_bits(bits));
            let (whose, id) = super::inside(&owner, hold);
            assert_eq!(whose, *written(&owner).as_bytes());
            assert_eq!(id, *hold.to_string().as_bytes());
        }
    }

    fn two() -> Record {
        let mut two = row();
        two.expires = NOW + 30_000_000;
        let end = super::unsigned(two.expires);
        assert!(two.holds.insert(HoldId::from_bits(2), end));
        two
    }

    fn acquire(owner: &str, hold: u64) -> Acquire {
        let lease = Lease::fixed(SECOND * 30);
        let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(hold));
        Acquire::new(
            LockName::new("a").unwrap(),
            owner,
            hold,
            lease,
            Instant::FAR,
        )
    }

    fn release(hold: u64, keep: Option<Duration>) -> Release {
        let asked = acquire("us", hold);
        let mut release = Release::new(asked.name, asked.owner, asked.hold);
        release.keep = keep;
        release
    }

    #[test]
    fn strangers_wait_and_a_wrong_join_is_gone() {
        let step = row().enter(&acquire("them", 2)).unwrap();
        assert!(matches!(step, Step::Wait(same) if same == row()));
        for (owner, token) in [("us", 8), ("them", 7)] {
            let mut join = acquire(owner, 2);
            join.join = Some(FencingToken(token));
            let step = row().enter(&join).unwrap();
            assert!(matches!(step, Step::Answer(Acquired::Gone)), "{step:?}");
        }
        let shut = Record {
            owner: None,
            ..row()
        };
        let step = shut.enter(&acquire("us", 2)).unwrap();
        assert!(matches!(step, Step::Wait(_)), "{step:?}");
    }

    #[test]
    fn the_same_hold_is_found_and_another_one_added() {
        let Step::Answer(Acquired::Granted(same)) = row().enter(&acquire("us", 1)).unwrap() else {
            panic!("the hold is inside");
        };
        assert_eq!((same.holds.get(), same.valid_for), (1, SECOND * 10));
        let Step::Swap(next, grant) = row().enter(&acquire("us", 2)).unwrap() else {
            panic!("the hold is new");
        };
        assert_eq!((grant.holds.get(), grant.valid_for), (2, SECOND * 30));
        assert_eq!(grant.token, FencingToken(7));
        assert_eq!((next.expires, next.version), (NOW + 30_000_000, 3));
        let mut full = row();
        for hold in 2..=u64::from(MAX_HOLDS) {
            assert!(full.holds.insert(HoldId::from_bits(hold), u64::MAX));
        }
        let error = full.enter(&acquire("us", 99)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overloaded);
    }

    #[test]
    fn what_is_over_counts_for_nobody() {
        let mut late = two();
        late.now = NOW + 20_000_000;
        let Step::Swap(next, grant) = late.clone().enter(&acquire("us", 3)).unwrap() else {
            panic!("a hold lives");
        };
        assert_eq!((grant.holds.get(), next.holds.len()), (2, 2));
        assert!(late.clone().without(&release(1, None)).is_none());
        late.now = NOW + 30_000_000;
        assert!(!late.is_closed());
        let free = late.snapshot(LockName::new("a").unwrap());
        assert!(free.holders.is_empty() && free.shut.is_none());
    }

    #[test]
    fn a_release_leaves_what_others_asked_for_or_what_is_kept() {
        let (left, answer) = two().without(&release(2, Some(SECOND * 50))).unwrap();
        assert!(matches!(answer, Released::StillHeld { holds } if holds.get() == 1));
        assert_eq!(left.expires, NOW + 10_000_000);
        let (shut, answer) = left.without(&release(1, Some(SECOND))).unwrap();
        assert!(matches!(answer, Released::Kept { rest } if rest == SECOND * 50));
        assert_eq!(
            (shut.owner.as_ref(), shut.expires),
            (None, NOW + 50_000_000)
        );
        assert_eq!(shut.token(), None);
        let mut all = release(0, None);
        all.holds = Holds::All;
        let (free, answer) = two().without(&all).unwrap();
        assert!(matches!(answer, Released::Freed));
        assert_eq!((free.expires, free.token), (0, 7));
        assert!(free.without(&all).is_none());
    }

    #[test]
    fn no_number_in_a_row_is_too_great_or_too_small() {
        for number in [i64::MIN, -1, 0, i64::MAX] {
            let mut odd = row();
            (odd.token, odd.keep_until, odd.began) = (number, number, number);
            odd.expires = i64::MAX;
            for hold in [2, 3] {
                let end = super::unsigned(number);
                assert!(odd.holds.insert(HoldId::from_bits(hold), end));
            }
            let shown = odd.clone().snapshot(LockName::new("a").unwrap());
            assert_eq!(shown.holders.len(), 1);
            for hold in [1, 9] {
                odd.clone().enter(&acquire("us", hold)).unwrap();
                odd.clone().without(&release(hold, Some(Duration::MAX)));
                let asked = acquire("us", hold);
                let entry = Renew::new(asked.name, asked.owner, asked.hold, Some(Duration::MAX));
                odd.clone().prolonged(&entry);
            }
        }
    }

    #[test]
    fn a_hold_is_never_shortened_and_never_made() {
        let renew = |owner: &str, hold, lease| {
            let asked = acquire(owner, hold);
            let entry = Renew::new(asked.name, asked.owner, asked.hold, lease);
            row()
                .prolonged(&entry)
                .map(|(next, renewed)| (next.expires, renewed))
        };
        let lasts = |seconds: u32| Renewed::Until {
            valid_for: SECOND * seconds,
        };
        let (ten, thirty) = (NOW + 10_000_000, NOW + 30_000_000);
        assert_eq!(renew("us", 1, Some(SECOND * 30)), Some((thirty, lasts(30))));
        assert_eq!(renew("us", 1, Some(SECOND)), Some((ten, lasts(10))));
        assert_eq!(renew("us", 1, None), Some((ten, lasts(10))));
        assert_eq!(renew("us", 2, Some(SECOND)), None);
        assert_eq!(renew("them", 1, Some(SECOND)), None);
    }
}
