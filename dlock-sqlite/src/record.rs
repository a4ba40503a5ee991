//! One row: what it means to this boot, and what a request makes of it. Nothing here reads or writes a file.

use crate::{commands::WAITERS, error, machine::Moment};
use dlock_core::{
    Acquire, Acquired, FencingToken, Fingerprint, Grant, HoldSet, Holder, Holds, LockName, Note,
    Owner, Release, Released, Renew, Renewed, Result, Snapshot,
};
use std::{num::NonZeroU32, time::Duration};

/// A row as it was read; see `commands` for the columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: Option<String>,
    pub(crate) token: i64,
    pub(crate) holds: HoldSet,
    pub(crate) until: i64,
    pub(crate) keep: i64,
    pub(crate) boot: String,
    pub(crate) written: i64,
    pub(crate) since: i64,
    pub(crate) note: String,
    pub(crate) waiters: i64,
    pub(crate) version: i64,
}

/// What a name is at one moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// There is no row.
    Unknown,
    /// Nobody is inside and nothing keeps it shut, whatever the row still says.
    Free(Record),
    /// Somebody is inside, or it is shut.
    Closed(Record),
    /// A machine that booted at another time wrote it after this one booted.
    Foreign(Record),
}

/// What an acquire does about a name that it did not get.
#[derive(Debug)]
pub(crate) enum Step {
    /// It is free by now.
    Take,
    /// That is the answer.
    Answer(Acquired),
    /// The row becomes this one if it is still the same; then that is the answer.
    Swap(Record, Grant),
    /// Somebody is inside, or it is shut.
    Wait(Record),
}

impl Standing {
    pub(crate) fn of(found: Option<Record>, at: &Moment<'_>) -> Self {
        let Some(record) = found else {
            return Self::Unknown;
        };
        if record.boot != at.boot {
            return if record.written < at.booted() {
                Self::Free(record) // its holders ended with their boot
            } else {
                Self::Foreign(record)
            };
        }
        if record.until > at.now {
            Self::Closed(record)
        } else {
            Self::Free(record)
        }
    }
}

impl Record {
    pub(crate) fn token(&self) -> FencingToken {
        FencingToken(unsigned(self.token))
    }

    /// Whoever is inside.
    pub(crate) fn holder(&self, at: &Moment<'_>) -> Option<Holder> {
        let mut holder = Holder::new(Fingerprint::of(self.owner.as_ref()?.as_bytes()));
        holder.token = Some(self.token());
        holder.rest = Some(at.until(self.until));
        holder.note = Note::parse(&self.note);
        Some(holder)
    }

    pub(crate) fn snapshot(&self, name: LockName, at: &Moment<'_>) -> Snapshot {
        let mut shown = Snapshot::free(name);
        shown.holders = self.holder(at).into_iter().collect();
        if shown.holders.is_empty() {
            shown.shut = Some(at.until(self.until));
        } else {
            shown.holds = self.holds.clone().living(unsigned(at.now)).len();
            shown.age = Some(Duration::from_micros(unsigned(at.now - self.since)));
        }
        shown
    }

    /// What to do about a closed name.
    pub(crate) fn refuse_or_enter(mut self, req: &Acquire, at: &Moment<'_>) -> Result<Step> {
        let ours = self.is_of(&req.owner) && req.join.is_none_or(|token| token == self.token());
        if !ours {
            return Ok(match req.join {
                Some(_) => Step::Answer(Acquired::Gone),
                None => Step::Wait(self),
            });
        }
        self.prune(at);
        let token = Some(self.token());
        if let Some(end) = self.holds.end_of(req.hold) {
            let grant = Grant::new(token, self.counted()?, rest(end, at));
            return Ok(Step::Answer(Acquired::Granted(grant)));
        }
        let end = at.after(req.lease.length());
        if !self.holds.insert(req.hold, unsigned(end)) {
            return Err(error::full());
        }
        self.until = self.until.max(end);
        self.written = at.wall;
        if req.next.is_some() {
            self.waiters = self.waiters.max(at.after(WAITERS));
        }
        let grant = Grant::new(token, self.counted()?, req.lease.length());
        Ok(Step::Swap(self, grant))
    }

    /// A free name whose last token is not behind the wall clock, which was set back: the next token goes on from the last.
    pub(crate) fn begin_again(self, req: &Acquire, at: &Moment<'_>) -> Step {
        let end = at.after(req.lease.length());
        let next = Self {
            owner: Some(written(&req.owner)),
            token: self.token.saturating_add(1),
            holds: HoldSet::one(req.hold, unsigned(end)),
            until: end,
            keep: 0,
            boot: at.boot.to_owned(),
            written: at.wall,
            since: at.now,
            note: req.note.to_string(),
            waiters: at.after(WAITERS),
            version: self.version,
        };
        let grant = Grant::new(Some(next.token()), NonZeroU32::MIN, req.lease.length());
        Step::Swap(next, grant)
    }

    /// Removes what is released, and says what that makes of it; `None`: that is not there.
    pub(crate) fn give_back(&mut self, req: &Release, at: &Moment<'_>) -> Option<Released> {
        if !self.is_of(&req.owner) {
            return None;
        }
        self.prune(at);
        match req.holds {
            Holds::One(hold) if !self.holds.remove(hold) => return None,
            Holds::One(_) => {}
            Holds::All => self.holds = HoldSet::default(),
        }
        self.written = at.wall;
        if let Some(keep) = req.keep {
            self.keep = self.keep.max(at.after(keep));
        }
        if let Some(holds) = NonZeroU32::new(self.holds.len()) {
            self.until = self.latest();
            return Some(Released::StillHeld { holds });
        }
        self.owner = None;
        self.note.clear();
        if self.keep > at.now {
            self.until = self.keep;
            let rest = at.until(self.keep);
            return Some(Released::Kept { rest });
        }
        self.until = 0;
        Some(Released::Freed)
    }

    /// Moves the end of a hold forward.
    pub(crate) fn prolong(&mut self, entry: &Renew, at: &Moment<'_>) -> Renewed {
        self.prune(at);
        let end = unsigned(at.after(entry.lease.unwrap_or_default()));
        if !self.is_of(&entry.owner) || !self.holds.prolong(entry.hold, end) {
            return Renewed::NotHeld;
        }
        self.until = self.latest();
        self.written = at.wall;
        let end = self.holds.end_of(entry.hold).unwrap_or(end);
        Renewed::Until {
            valid_for: rest(end, at),
        }
    }

    fn is_of(&self, owner: &Owner) -> bool {
        self.owner.as_deref() == Some(&*written(owner))
    }

    fn prune(&mut self, at: &Moment<'_>) {
        self.holds = std::mem::take(&mut self.holds).living(unsigned(at.now));
    }

    fn latest(&self) -> i64 {
        i64::try_from(self.holds.latest().unwrap_or(0)).unwrap_or(i64::MAX)
    }

    /// Whoever is inside has a hold: a row without one is not ours.
    fn counted(&self) -> Result<NonZeroU32> {
        NonZeroU32::new(self.holds.len()).ok_or_else(error::garbled)
    }
}

fn rest(end: u64, at: &Moment<'_>) -> Duration {
    Duration::from_micros(end.saturating_sub(unsigned(at.now)))
}

/// An owner as it stands in the store.
pub(crate) fn written(owner: &Owner) -> String {
    owner.expose().hyphenated().to_string()
}

/// A time of ours is never negative.
pub(crate) fn unsigned(time: i64) -> u64 {
    u64::try_from(time).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{Record, Standing, Step, written};
    use crate::machine::Moment;
    use dlock_core::{
        Acquire, Acquired, ErrorKind, FencingToken, HoldId, HoldSet, Holds, Instant, Lease,
        LockName, MAX_HOLDS, Owner, Release, Released, Renew, Renewed,
    };
    use std::time::Duration;

    /// Booted at 1,000 s by the wall clock.
    const AT: Moment<'static> = Moment {
        boot: "ours",
        now: 100_000_000,
        wall: 1_100_000_000,
    };
    const SECOND: Duration = Duration::from_secs(1);

    /// One hold, with ten seconds to go.
    fn record() -> Record {
        Record {
            owner: Some(written(&Owner::from_seed("us"))),
            token: 7,
            holds: HoldSet::one(HoldId::from_bits(1), 110_000_000),
            until: 110_000_000,
            boot: "ours".to_owned(),
            written: AT.wall - 1,
            version: 3,
            ..Record::default()
        }
    }

    fn acquire(owner: &str, hold: u64) -> Acquire {
        Acquire::new(
            LockName::new("a").unwrap(),
            Owner::from_seed(owner),
            HoldId::from_bits(hold),
            Lease::fixed(SECOND * 30).unwrap(),
            Instant::FAR,
        )
    }

    fn release(hold: u64, keep: Option<Duration>) -> Release {
        let req = acquire("us", hold);
        let mut release = Release::new(req.name, req.owner, req.hold);
        release.keep = keep;
        release
    }

    #[test]
    fn whose_time_a_row_is_of_decides_what_it_is() {
        let of = |boot: &str, written, until| Record {
            boot: boot.to_owned(),
            written,
            until,
            ..record()
        };
        for (row, wanted) in [
            (of("ours", 0, AT.now + 1), "Closed"),
            (of("ours", 0, AT.now), "Free"),
            (of("ours", AT.wall, 0), "Free"),
            (of("theirs", 999_999_999, AT.now + 1), "Free"),
            (of("theirs", 1_000_000_000, AT.now + 1), "Foreign"),
            (of("theirs", AT.wall + 1, 0), "Foreign"),
        ] {
            let standing = format!("{:?}", Standing::of(Some(row), &AT));
            assert!(standing.starts_with(wanted), "{standing}");
        }
        assert_eq!(Standing::of(None, &AT), Standing::Unknown);
    }

    #[test]
    fn another_owner_waits_and_another_incarnation_is_gone() {
        let other = record().refuse_or_enter(&acquire("them", 2), &AT);
        assert!(matches!(other, Ok(Step::Wait(same)) if same == record()));
        for (owner, token) in [("us", 6), ("them", 7)] {
            let mut join = acquire(owner, 2);
            join.join = Some(FencingToken(token));
            let step = record().refuse_or_enter(&join, &AT);
            assert!(matches!(step, Ok(Step::Answer(Acquired::Gone))));
        }
        let shut = Record {
            owner: None,
            holds: HoldSet::default(),
            ..record()
        };
        let step = shut.refuse_or_enter(&acquire("us", 2), &AT);
        assert!(matches!(step, Ok(Step::Wait(_))));
    }

    #[test]
    fn a_repeat_finds_its_hold_and_a_new_one_is_added() {
        let step = record().refuse_or_enter(&acquire("us", 1), &AT).unwrap();
        let Step::Answer(Acquired::Granted(grant)) = step else {
            panic!("{step:?}");
        };
        assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 10));
        let step = record().refuse_or_enter(&acquire("us", 2), &AT).unwrap();
        let Step::Swap(row, grant) = step else {
            panic!("{step:?}");
        };
        assert_eq!((grant.holds.get(), grant.valid_for), (2, SECOND * 30));
        assert_eq!((row.until, row.version), (AT.after(SECOND * 30), 3));
        let mut full = record();
        for hold in 2..=u64::from(MAX_HOLDS) {
            assert!(full.holds.insert(HoldId::from_bits(hold), 110_000_000));
        }
        let error = full.refuse_or_enter(&acquire("us", 99), &AT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overloaded);
    }

    #[test]
    fn a_release_leaves_what_others_asked_for_or_what_is_to_be_kept() {
        let mut two = record();
        assert!(two.holds.insert(HoldId::from_bits(2), 130_000_000));
        two.until = 130_000_000;
        let left = two.give_back(&release(2, Some(SECOND * 50)), &AT);
        assert!(matches!(left, Some(Released::StillHeld { holds }) if holds.get() == 1));
        assert_eq!(two.until, 110_000_000);
        assert!(two.give_back(&release(2, None), &AT).is_none());
        let kept = two.give_back(&release(1, Some(SECOND)), &AT);
        assert!(matches!(kept, Some(Released::Kept { rest }) if rest == SECOND * 50));
        assert_eq!((two.owner, two.until), (None, 150_000_000));
        let mut all = release(0, None);
        all.holds = Holds::All;
        let mut row = record();
        assert!(matches!(row.give_back(&all, &AT), Some(Released::Freed)));
        assert_eq!((row.owner, row.until, row.token), (None, 0, 7));
    }

    #[test]
    fn a_hold_is_prolonged_and_never_shortened_and_only_its_own() {
        let renew = |owner: &str, hold, lease| {
            let req = acquire(owner, hold);
            record().prolong(&Renew::new(req.name, req.owner, req.hold, lease), &AT)
        };
        let lasts = |valid_for| Renewed::Until { valid_for };
        assert_eq!(renew("us", 1, Some(SECOND * 30)), lasts(SECOND * 30));
        assert_eq!(renew("us", 1, Some(SECOND)), lasts(SECOND * 10));
        assert_eq!(renew("us", 1, None), lasts(SECOND * 10));
        assert_eq!(renew("us", 2, None), Renewed::NotHeld);
        assert_eq!(renew("them", 1, None), Renewed::NotHeld);
    }

    #[test]
    fn a_clock_that_was_set_back_goes_on_from_the_last_token() {
        let mut free = record();
        free.token = AT.wall + 5;
        let step = free.begin_again(&acquire("us", 9), &AT);
        let Step::Swap(row, grant) = step else {
            panic!("{step:?}");
        };
        assert_eq!((row.token, row.version), (AT.wall + 6, 3));
        assert_eq!(grant.token, Some(row.token()));
    }
}
