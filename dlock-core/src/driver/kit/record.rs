//! Lock record: what a record store keeps of one name, and the pure functions that decide what a request makes of it.
//!
//! Every store that keeps one record per name needs the same decisions; here they are once, without I/O and
//! without a clock.

use super::hold_set::HoldSet;
use crate::{
    driver::{
        Acquire, Acquired, Broken, Grant, Held, Holder, HolderInfo, Holds, Release, Released,
        Renew, Renewed, Result, Snapshot,
    },
    error::{DriverError, ErrorKind, RetryClass, micros},
    name::LockName,
    owner::{HoldId, MAX_HOLDS, Mode, Owner},
    token::FencingToken,
};
use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

/// What a store keeps of one name. All times are the store's, in microseconds.
///
/// A name is available when [`unavailable_until`](Self::unavailable_until) is not in the future, whatever
/// else the record says.
///
/// # Examples
/// ```
/// use dlock_core::{Clock, HoldId, Lease, Owner, driver::{Acquire, Acquired, kit::{Record, StoreTime}}};
///
/// let give_up = Clock::boot().now();
/// let acquire = Acquire::new("orders:42".parse()?, Owner::from_seed("me"), HoldId::from_bits(1), Lease::default(), give_up);
/// let free = Record::default();
/// let decision = free.acquire(&acquire, StoreTime::wall(1_700_000_000_000_000))?;
/// assert!(matches!(decision.answer, Acquired::Granted(_)));
/// assert!(decision.write.is_some(), "write it over the one that was read, if that is unchanged");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The fencing token given last; 0: none was given.
    pub token: u64,
    /// Who holds the lock; `None`: it is free, or unavailable for its minimum hold.
    pub owner: Option<Owner>,
    /// The holds of that owner, each with its own end.
    pub holds: HoldSet,
    /// When the last hold ends, or the minimum hold when no hold is left; 0: available.
    pub unavailable_until: u64,
    /// The end of the longest minimum hold that a release of this incarnation asked for; 0: none did.
    pub min_hold_until: u64,
    /// When the current incarnation began.
    pub began: u64,
    /// Until then clients may be waiting: a release notifies only before this time.
    pub waiters_until: u64,
    /// What the first holder said of itself.
    pub holder_info: HolderInfo,
    /// One more with every write; a new record begins at the store's wall clock, beyond the version of one
    /// that was deleted before. 0: the name has no record.
    pub version: u64,
}

/// The store's time, read in the same step as the records.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::StoreTime;
/// use std::time::Duration;
///
/// let time = StoreTime::wall(1_700_000_000_000_000);
/// assert_eq!(time.after(Duration::from_secs(1)), 1_700_000_001_000_000);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreTime {
    /// What leases are judged by, in microseconds.
    pub now: u64,
    /// Microseconds since 1970: the least that a new token is. Differs from `now` where leases are counted
    /// from the boot.
    pub wall: u64,
}

impl StoreTime {
    /// The time of a store whose leases are judged by its wall clock, in microseconds since 1970.
    #[must_use]
    pub const fn wall(micros: u64) -> Self {
        Self {
            now: micros,
            wall: micros,
        }
    }

    /// The time `span` from now.
    #[must_use]
    pub fn after(self, span: Duration) -> u64 {
        self.now.saturating_add(micros(span))
    }

    fn until(self, end: u64) -> Duration {
        Duration::from_micros(end.saturating_sub(self.now))
    }
}

/// What a request comes to: an answer, and the record to write first if it changes anything.
#[derive(Clone, Debug)]
pub struct Decision<A> {
    /// The record to write over the one that was read; `None`: nothing changes.
    pub write: Option<Record>,
    /// The answer once that is written.
    pub answer: A,
    /// The last moment, in the store's `now`, at which the write may happen: a decision about a hold that
    /// lives is void at its end.
    pub not_after: u64,
}

impl<A> Decision<A> {
    fn keep(answer: A) -> Self {
        Self {
            write: None,
            answer,
            not_after: u64::MAX,
        }
    }

    /// The same decision with something more to tell.
    pub(super) fn with<B>(self, more: B) -> Decision<(A, B)> {
        Decision {
            write: self.write,
            answer: (self.answer, more),
            not_after: self.not_after,
        }
    }

    fn write(record: Record, answer: A, not_after: u64) -> Self {
        Self {
            write: Some(record),
            answer,
            not_after,
        }
    }
}

impl Record {
    /// What takes the place of a damaged record while it is broken: unavailable, so that `break_lock` frees
    /// it. Its last token is the present, or that of the damaged record where it can be read and is greater.
    #[must_use]
    pub fn damaged(damaged: DamagedRecord, time: StoreTime) -> Self {
        let known = Some(damaged.token).filter(|token| *token < LAST_TOKEN);
        Self {
            token: known.map_or(time.wall, |token| token.max(time.wall)),
            unavailable_until: u64::MAX,
            ..Self::default()
        }
    }

    /// The record of a lock whose holders are over for a reason of the store's, such as a reboot: available,
    /// its token and version kept.
    #[must_use]
    pub fn lapsed(&self) -> Self {
        Self {
            token: self.token,
            version: self.version,
            ..Self::default()
        }
    }

    /// Whether the lock is held, or unavailable for its minimum hold.
    #[must_use]
    pub fn is_unavailable(&self, time: StoreTime) -> bool {
        self.unavailable_until > time.now
    }

    /// Whether a release has to wake waiters.
    #[must_use]
    pub fn may_have_waiters(&self, time: StoreTime) -> bool {
        self.waiters_until > time.now
    }

    /// Whether the record can be deleted: the lock is available and its last token a day old, so that only a
    /// wall clock set back by more than a day could give that token again.
    #[must_use]
    pub fn is_forgettable(&self, time: StoreTime) -> bool {
        !self.is_unavailable(time) && self.token.saturating_add(UNUSED) <= time.wall
    }

    /// Takes a lock that is available, or enters one of the same owner. A repeat with a greater floor raises the token
    /// of its sole hold.
    ///
    /// A sharer is refused while the lock is [claimed](HoldSet::claim), and waits until the claim or a hold ends.
    ///
    /// # Errors
    /// `Overloaded` when the owner is one holder with [`MAX_HOLDS`] holds; `Misuse` for a floor after which no token
    /// could follow.
    pub fn acquire(&self, req: &Acquire, time: StoreTime) -> Result<Decision<Acquired>> {
        let floor = req.floor.map(|floor| floor.0);
        if floor.is_some_and(|floor| floor >= LAST_TOKEN) {
            return Err(DriverError::new(
                ErrorKind::Misuse,
                "the floor of the token is the last one or beyond: no token could follow it",
            ));
        }
        let (share, claimed_until) = (req.share(), self.holds.claimed_until());
        let is_claimed = share.is_some() && claimed_until > time.now;
        if !self.is_unavailable(time) {
            return Ok(match req.join {
                Some(_) if !req.restores() => Decision::keep(Acquired::Gone),
                _ if is_claimed => {
                    Decision::keep(Acquired::Held(self.refusal(claimed_until, time)))
                }
                _ => self.begin(req, time)?,
            });
        }
        let inside = self.owner == Some(req.owner);
        match req.join {
            Some(token) if !inside || (self.token != token.0 && !req.restores()) => {
                return Ok(Decision::keep(Acquired::Gone));
            }
            None if !inside => {
                let held = self.refusal(self.unavailable_until, time);
                return Ok(Decision::keep(Acquired::Held(held)));
            }
            _ => {}
        }
        let mut next = self.living(time);
        if let Some(end) = next.holds.end_of(req.hold) {
            let left = time.until(end);
            let alone = next.holds.len() == 1;
            return Ok(match floor.filter(|floor| alone && *floor > self.token) {
                None => Decision::keep(next.granted(left)),
                Some(floor) => {
                    next.token = floor;
                    let answer = next.granted(left);
                    Decision::write(next, answer, before(end))
                }
            });
        }
        let holds = next.holds.len();
        if share.is_some_and(|most| holds >= most || is_claimed) {
            let end = match is_claimed {
                true => claimed_until,
                false => next.holds.earliest().unwrap_or(self.unavailable_until),
            };
            return Ok(Decision::keep(Acquired::Held(self.refusal(end, time))));
        }
        if share.is_none() && holds >= MAX_HOLDS {
            return Err(too_many_holds());
        }
        let end = time.after(req.lease.length());
        next.holds.insert(req.hold, end);
        next.unavailable_until = next.unavailable_until.max(end);
        let answer = next.granted(req.lease.length());
        Ok(Decision::write(
            next,
            answer,
            before(self.unavailable_until),
        ))
    }

    /// A new incarnation.
    fn begin(&self, req: &Acquire, time: StoreTime) -> Result<Decision<Acquired>> {
        if self.token >= LAST_TOKEN {
            return Err(DamagedRecord::new("token").into());
        }
        let end = time.after(req.lease.length());
        let least = self.token.saturating_add(u64::from(
            !req.restores() || req.floor < Some(FencingToken(self.token)),
        ));
        let next = Self {
            token: least.max(req.floor.map_or(time.wall, |it| it.0)),
            owner: Some(req.owner),
            holds: HoldSet::one(req.hold, end),
            unavailable_until: end,
            min_hold_until: 0,
            began: time.now,
            waiters_until: self.waiters_until,
            holder_info: HolderInfo::clone(&req.info),
            version: self.version,
        };
        let answer = next.granted(req.lease.length());
        Ok(Decision::write(next, answer, u64::MAX))
    }

    /// Moves the end of one hold forward, never back; an entry without a lease only proves that the hold is there.
    #[must_use]
    pub fn renew(&self, entry: &Renew, time: StoreTime) -> Decision<Renewed> {
        let mut next = self.living(time);
        let end = entry.lease.map_or(0, |lease| time.after(lease));
        if self.owner != Some(entry.owner) || !next.holds.prolong(entry.hold, end) {
            return Decision::keep(Renewed::NotHeld);
        }
        next.unavailable_until = next.holds.latest().unwrap_or(0);
        let end = next.holds.end_of(entry.hold).unwrap_or(end);
        let answer = Renewed::Until {
            valid_for: time.until(end),
        };
        match entry.lease {
            Some(_) => Decision::write(next, answer, self.last_moment_of(entry.hold)),
            None => Decision::keep(answer),
        }
    }

    /// Removes one hold of an owner, or all.
    #[must_use]
    pub fn release(&self, req: &Release, time: StoreTime) -> Decision<Released> {
        let mut next = self.living(time);
        let held = self.owner == Some(req.owner) && !next.holds.is_empty();
        let first = next.holds.first();
        let removed = match req.holds {
            Holds::One(hold) => next.holds.remove(hold),
            Holds::All => {
                next.holds.clear();
                true
            }
        };
        if !held || !removed {
            return Decision::keep(Released::NotHeld {
                by: self.holder(time),
            });
        }
        if let Some(rest) = req.min_hold {
            next.min_hold_until = next.min_hold_until.max(time.after(rest));
        }
        let answer = if let Some(holds) = NonZeroU32::new(next.holds.len()) {
            next.unavailable_until = next.holds.latest().unwrap_or(0);
            next.forget_who_left(first);
            Released::StillHeld { holds }
        } else {
            next.owner = None;
            next.holder_info = HolderInfo::default();
            if next.min_hold_until > time.now {
                next.unavailable_until = next.min_hold_until;
                Released::MinHold {
                    rest: time.until(next.min_hold_until),
                }
            } else {
                next.unavailable_until = 0;
                Released::Freed
            }
        };
        let not_after = match req.holds {
            Holds::One(hold) => self.last_moment_of(hold),
            Holds::All => before(self.unavailable_until),
        };
        Decision::write(next, answer, not_after)
    }

    /// Ends the incarnation, or the minimum hold, whichever owner has it; with a token only that incarnation.
    #[must_use]
    pub fn break_lock(&self, only: Option<FencingToken>, time: StoreTime) -> Decision<Broken> {
        let exhausted = self.token >= LAST_TOKEN;
        if !self.is_unavailable(time) && !exhausted {
            return Decision::keep(Broken::WasFree);
        }
        let token = self.owner.map(|_| FencingToken(self.token));
        if only.is_some() && only != token {
            return Decision::keep(Broken::Changed { token });
        }
        let next = Self {
            token: if exhausted { time.wall } else { self.token },
            owner: None,
            holds: HoldSet::default(),
            unavailable_until: 0,
            min_hold_until: 0,
            holder_info: HolderInfo::default(),
            ..self.clone()
        };
        Decision::write(next, Broken::Freed { token }, u64::MAX)
    }

    /// What `inspect` and `list` show.
    #[must_use]
    pub fn snapshot(&self, name: LockName, time: StoreTime) -> Snapshot {
        let mut shown = Snapshot::free(name);
        match self.holder(time) {
            Some(holder) => {
                shown.holders.push(holder);
                shown.holds = self.living(time).holds.len();
                shown.age = Some(Duration::from_micros(time.now.saturating_sub(self.began)));
            }
            None if self.is_unavailable(time) => {
                shown.unavailable_for = Some(time.until(self.unavailable_until));
            }
            None => {}
        }
        shown
    }

    /// Who holds the lock at that time.
    #[must_use]
    pub fn holder(&self, time: StoreTime) -> Option<Holder> {
        let owner = self.owner.filter(|_| self.is_unavailable(time))?;
        let mut holder = Holder::new(owner.fingerprint());
        holder.token = Some(FencingToken(self.token));
        holder.rest = Some(time.until(self.unavailable_until));
        holder.info = self.living(time).holder_info;
        Some(holder)
    }

    fn refusal(&self, until: u64, time: StoreTime) -> Held {
        Held {
            by: self.holder(time),
            poll_in: Some(time.until(until)),
            ..Held::default()
        }
    }

    /// The record with a claim for a request that was refused, and waits to hold a shared lock alone, so that sharers
    /// that come later do not starve it; `None`: it needs no claim, or no other. For stores without a queue.
    ///
    /// The claim lasts twice as long as the attempt may take, so until past the next poll: a waiter that polls on
    /// keeps it, and that of one that is gone ends.
    #[must_use]
    pub fn claimed(&self, req: &Acquire, time: StoreTime, attempt: Duration) -> Option<Self> {
        let owner = self.owner.filter(|_| self.is_unavailable(time))?;
        let waits_alone = req.ticket.is_some() && req.owner.mode() == Mode::Exclusive;
        let span = (attempt * 2).min(LONGEST_CLAIM);
        let lasts = self.holds.claimed_until() >= time.after(span * 3 / 4);
        if owner.mode() == Mode::Exclusive || !waits_alone || lasts {
            return None;
        }
        let mut claimed = self.clone();
        claimed.holds.claim(time.after(span));
        Some(claimed)
    }

    fn granted(&self, valid_for: Duration) -> Acquired {
        let token = FencingToken(self.token);
        let holds = NonZeroU32::new(self.holds.len()).unwrap_or(NonZeroU32::MIN);
        Acquired::Granted(Grant::new(token, holds, valid_for))
    }

    /// The last moment at which that hold lives.
    fn last_moment_of(&self, hold: HoldId) -> u64 {
        self.holds.end_of(hold).map_or(u64::MAX, before)
    }

    /// The same record without the holds that are past their end.
    fn living(&self, time: StoreTime) -> Self {
        let mut living = self.clone();
        let first = living.holds.first();
        living.holds = living.holds.living(time.now);
        living.forget_who_left(first);
        living
    }

    /// The holder info is of the process that has the first hold, and others may have entered since.
    fn forget_who_left(&mut self, first: Option<HoldId>) {
        if self.holds.first() != first {
            self.holder_info = self.holder_info.of_another();
        }
    }
}

/// One line of `field=value` pairs, for stores that keep text: readable with the store's own tools, and read
/// back by `FromStr`.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = self.owner.map(|owner| owner.expose().to_string());
        write!(
            f,
            "version={} token={} owner={} holds={} unavailable_until={} min_hold_until={} began={} waiters_until={} holder={}",
            self.version,
            self.token,
            owner.as_deref().unwrap_or("-"),
            self.holds,
            self.unavailable_until,
            self.min_hold_until,
            self.began,
            self.waiters_until,
            self.holder_info,
        )
    }
}

impl FromStr for Record {
    type Err = DamagedRecord;

    fn from_str(text: &str) -> Result<Self, DamagedRecord> {
        parse(text).map_err(|field| {
            let token = text
                .split(' ')
                .find_map(|pair| pair.strip_prefix("token=")?.parse().ok());
            DamagedRecord::new(field).with_token(token.unwrap_or(0))
        })
    }
}

/// The record, or the field that cannot be read.
fn parse(mut text: &str) -> Result<Record, &'static str> {
    let rest = &mut text;
    Ok(Record {
        version: parsed(rest, "version")?,
        token: parsed(rest, "token")?,
        owner: match field(rest, "owner")? {
            "-" => None,
            owner => Some(owner.parse().map_err(|_| "owner")?),
        },
        holds: parsed(rest, "holds")?,
        unavailable_until: parsed(rest, "unavailable_until")?,
        min_hold_until: parsed(rest, "min_hold_until")?,
        began: parsed(rest, "began")?,
        waiters_until: parsed(rest, "waiters_until")?,
        holder_info: HolderInfo::parse(rest.strip_prefix("holder=").ok_or("holder")?),
    })
}

fn parsed<T: FromStr>(rest: &mut &str, name: &'static str) -> Result<T, &'static str> {
    field(rest, name)?.parse().map_err(|_| name)
}

/// Takes the next field, which must have that name, off the text.
fn field<'a>(rest: &mut &'a str, name: &'static str) -> Result<&'a str, &'static str> {
    let value = rest.strip_prefix(name).and_then(|it| it.strip_prefix('='));
    let (value, tail) = value.and_then(|it| it.split_once(' ')).ok_or(name)?;
    *rest = tail;
    Ok(value)
}

/// A record that something other than dlock wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "dlock did not write what stands in the record of the lock (its field `{field}` cannot be read): break the lock to replace it"
)]
pub struct DamagedRecord {
    /// The field that cannot be read.
    pub field: &'static str,
    /// The fencing token given last; 0: it cannot be read. The tokens after a break are greater.
    pub token: u64,
}

impl DamagedRecord {
    /// A record of which that field cannot be read.
    #[must_use]
    pub const fn new(field: &'static str) -> Self {
        Self { field, token: 0 }
    }

    /// The same, with the token that can be read.
    #[must_use]
    pub const fn with_token(self, token: u64) -> Self {
        Self { token, ..self }
    }
}

impl From<DamagedRecord> for DriverError {
    fn from(damaged: DamagedRecord) -> Self {
        Self::new(ErrorKind::Unavailable, damaged.to_string())
    }
}

fn too_many_holds() -> DriverError {
    let message =
        format!("the lock has {MAX_HOLDS} holds already, the most that one name can have");
    DriverError::new(ErrorKind::Overloaded, message).with_retry(RetryClass::Later)
}

/// The last moment before an end: at the end itself a hold is over.
fn before(end: u64) -> u64 {
    end.saturating_sub(1)
}

/// The greatest token: stores count in signed numbers. One that is reached was not given by dlock in this millennium.
const LAST_TOKEN: u64 = i64::MAX.unsigned_abs();

/// Three of the longest polls.
const LONGEST_CLAIM: Duration = Duration::from_secs(6);

/// How long an unused record is kept for its token: a day, in microseconds.
const UNUSED: u64 = 86_400_000_000;

#[cfg(test)]
mod tests {
    use super::{DamagedRecord, Decision, Record, StoreTime, UNUSED};
    use crate::{
        clock::Instant,
        driver::{
            Acquire, Acquired, Broken, HolderInfo, Release, Released, Renew, Renewed, Ticket,
        },
        error::ErrorKind,
        lease::Lease,
        name::LockName,
        owner::{HoldId, MAX_HOLDS, MAX_SHARERS, Owner},
        token::FencingToken,
    };
    use std::{
        num::{NonZeroU32, NonZeroU64},
        sync::Arc,
        time::Duration,
    };

    const NOW: u64 = 1_000_000_000;
    const SECOND: Duration = Duration::from_secs(1);

    /// `seconds` after the record of [`held`] was written.
    fn at(seconds: u64) -> StoreTime {
        StoreTime::wall(NOW + seconds * 1_000_000)
    }

    fn acquire(owner: &str, hold: u64) -> Acquire {
        let (name, lease) = (LockName::new("a").unwrap(), Lease::fixed(SECOND * 10));
        Acquire::new(
            name,
            Owner::from_seed(owner),
            HoldId::from_bits(hold),
            lease,
            Instant::FAR,
        )
    }

    fn release(hold: u64, min_hold: Option<Duration>) -> Release {
        let asked = acquire("us", hold);
        let mut release = Release::new(asked.name, asked.owner, asked.hold);
        release.min_hold = min_hold;
        release
    }

    fn renew(owner: &str, hold: u64, lease: Option<Duration>) -> Renew {
        let asked = acquire(owner, hold);
        Renew::new(asked.name, asked.owner, asked.hold, lease)
    }

    fn written<A>(decision: Decision<A>) -> Record {
        decision.write.expect("it changes the record")
    }

    /// Hold 1 of `us`, ten seconds long.
    fn held() -> Record {
        written(Record::default().acquire(&acquire("us", 1), at(0)).unwrap())
    }

    /// The same and hold 2, which ends five seconds later.
    fn held_twice() -> Record {
        written(held().acquire(&acquire("us", 2), at(5)).unwrap())
    }

    #[test]
    fn a_process_that_has_left_is_not_shown_as_the_holder_while_another_is_inside() {
        let mut first = acquire("us", 1);
        first.info = Arc::new(HolderInfo::new("web1", 42));
        let one = written(Record::default().acquire(&first, at(0)).unwrap());
        let both = written(one.acquire(&acquire("us", 2), at(5)).unwrap());
        let shown = |record: &Record, seconds| record.holder(at(seconds)).unwrap().info.host;
        assert_eq!(
            (shown(&both, 9), shown(&both, 12)),
            ("web1".into(), String::new())
        );
        let without = |hold| written(both.release(&release(hold, None), at(6)));
        assert_eq!(
            (shown(&without(2), 6), shown(&without(1), 6)),
            ("web1".into(), String::new())
        );
        let renewed = written(both.renew(&renew("us", 2, Some(SECOND * 10)), at(12)));
        assert_eq!(shown(&renewed, 12), "");
    }

    #[test]
    fn another_owner_is_refused_until_the_lease_ends_and_then_gets_a_greater_token() {
        let refused = held().acquire(&acquire("them", 2), at(9)).unwrap();
        assert!(refused.write.is_none());
        assert!(matches!(refused.answer, Acquired::Held(held) if held.poll_in == Some(SECOND)));
        let taken = written(held().acquire(&acquire("them", 2), at(10)).unwrap());
        assert!(taken.token > held().token);
        assert_eq!(taken.owner, Some(Owner::from_seed("them")));
    }

    #[test]
    fn a_token_grows_though_the_wall_clock_was_set_back() {
        let free = written(held().release(&release(1, None), at(1)));
        let behind = StoreTime::wall(NOW / 2);
        let again = written(free.acquire(&acquire("us", 2), behind).unwrap());
        assert_eq!(again.token, held().token + 1);
        let last = Record {
            token: i64::MAX.unsigned_abs(),
            ..free
        };
        let refused = last.acquire(&acquire("us", 2), at(0));
        assert!(refused.is_err(), "no token is greater");
        let broken = written(last.break_lock(None, at(0)));
        assert_eq!(broken.token, at(0).wall, "a break begins anew");
    }

    #[test]
    fn a_repeat_finds_its_hold_and_another_hold_is_added() {
        let repeat = held().acquire(&acquire("us", 1), at(4)).unwrap();
        assert!(repeat.write.is_none());
        let Acquired::Granted(grant) = repeat.answer else {
            panic!("{repeat:?}");
        };
        assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 6));
        assert_eq!(held_twice().token, held().token);
        let mut full = held();
        for hold in 2..=u64::from(MAX_HOLDS) {
            full = written(full.acquire(&acquire("us", hold), at(0)).unwrap());
        }
        let error = full.acquire(&acquire("us", 99), at(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overloaded);
    }

    #[test]
    fn a_join_enters_only_the_incarnation_it_names() {
        for (owner, token, when) in [("them", NOW, 0), ("us", NOW + 1, 0), ("us", NOW, 10)] {
            let mut join = acquire(owner, 2);
            join.join = Some(FencingToken(token));
            let decision = held().acquire(&join, at(when)).unwrap();
            assert!(decision.write.is_none());
            assert!(matches!(decision.answer, Acquired::Gone), "{decision:?}");
        }
    }

    fn share(owner: Owner, hold: u64) -> Acquire {
        Acquire {
            owner,
            ..acquire("us", hold)
        }
    }

    fn is_held(decision: &Decision<Acquired>) -> bool {
        matches!(decision.answer, Acquired::Held(_))
    }

    #[test]
    fn sharers_enter_up_to_their_number_and_more_than_one_owner_may() {
        let two = Owner::permits(NonZeroU32::new(2).unwrap());
        let one = written(Record::default().acquire(&share(two, 1), at(0)).unwrap());
        let full = written(one.acquire(&share(two, 2), at(5)).unwrap());
        assert_eq!(full.token, one.token);
        let refused = full.acquire(&share(two, 3), at(6)).unwrap();
        assert!(matches!(refused.answer, Acquired::Held(held) if held.poll_in == Some(SECOND * 4)));
        // The first is over: its part is free, and no more.
        let next = written(full.acquire(&share(two, 3), at(10)).unwrap());
        assert_eq!((next.holds.len(), next.token), (2, one.token));
        let mut crowd = written(
            Record::default()
                .acquire(&share(Owner::SHARED, 0), at(0))
                .unwrap(),
        );
        for hold in 1..u64::from(MAX_SHARERS) {
            crowd = written(crowd.acquire(&share(Owner::SHARED, hold), at(0)).unwrap());
        }
        assert!(is_held(
            &crowd.acquire(&share(Owner::SHARED, 9_999), at(0)).unwrap()
        ));
    }

    #[test]
    fn a_claim_keeps_new_sharers_out_until_it_ends_or_the_lock_is_taken_alone() {
        let reader = |hold| share(Owner::SHARED, hold);
        let mut writer = acquire("them", 7);
        let shared = written(Record::default().acquire(&reader(1), at(0)).unwrap());
        assert!(
            shared.claimed(&writer, at(0), SECOND).is_none(),
            "it does not wait"
        );
        writer.ticket = Some(Ticket(NonZeroU64::MIN));
        assert!(
            held().claimed(&writer, at(0), SECOND).is_none(),
            "no one shares it"
        );
        let claimed = shared.claimed(&writer, at(0), SECOND).unwrap();
        assert!(
            claimed.claimed(&writer, at(0), SECOND).is_none(),
            "it lasts"
        );
        assert!(is_held(&claimed.acquire(&reader(2), at(1)).unwrap()));
        let repeat = claimed.acquire(&reader(1), at(1)).unwrap();
        assert!(matches!(repeat.answer, Acquired::Granted(_)));
        assert!(
            !is_held(&claimed.acquire(&reader(2), at(2)).unwrap()),
            "it ended"
        );
        // It stays while the lock is free, and ends with the next owner.
        let mut last = release(1, None);
        last.owner = Owner::SHARED;
        let free = written(claimed.release(&last, at(1)));
        assert!(is_held(&free.acquire(&reader(2), at(1)).unwrap()));
        let alone = written(free.acquire(&writer, at(1)).unwrap());
        assert_eq!((alone.holds.len(), alone.holds.claimed_until()), (1, 0));
    }

    #[test]
    fn renewing_moves_one_end_forward_and_never_back_and_creates_nothing() {
        let lasts = |record: Decision<Renewed>| match record.answer {
            Renewed::Until { valid_for } => Some(valid_for),
            Renewed::NotHeld => None,
        };
        let longer = held().renew(&renew("us", 1, Some(SECOND * 30)), at(5));
        assert_eq!(longer.write.as_ref().unwrap().unavailable_until, at(35).now);
        assert_eq!(lasts(longer), Some(SECOND * 30));
        assert_eq!(
            lasts(held().renew(&renew("us", 1, Some(SECOND)), at(5))),
            Some(SECOND * 5)
        );
        let proof = held().renew(&renew("us", 1, None), at(5));
        assert!(proof.write.is_none());
        assert_eq!(lasts(proof), Some(SECOND * 5));
        for (owner, hold, when) in [("them", 1, 5), ("us", 2, 5), ("us", 1, 10)] {
            let renewed = held().renew(&renew(owner, hold, Some(SECOND)), at(when));
            assert!(renewed.write.is_none());
            assert_eq!(lasts(renewed), None);
        }
    }

    #[test]
    fn a_release_leaves_the_other_holds_and_then_the_minimum_hold() {
        let one = held_twice().release(&release(2, Some(SECOND * 20)), at(6));
        assert!(matches!(one.answer, Released::StillHeld { holds } if holds.get() == 1));
        let one = written(one);
        assert_eq!(one.unavailable_until, at(10).now);
        let gone = one.release(&release(2, None), at(6));
        assert!(gone.write.is_none() && matches!(gone.answer, Released::NotHeld { by: Some(_) }));
        let shut = one.release(&release(1, None), at(7));
        assert!(matches!(shut.answer, Released::MinHold { rest } if rest == SECOND * 19));
        let shut = written(shut);
        assert!(shut.holder(at(8)).is_none());
        let refused = shut.acquire(&acquire("us", 3), at(8)).unwrap().answer;
        assert!(matches!(refused, Acquired::Held(held) if held.by.is_none()));
        assert!(!shut.is_unavailable(at(26)));
    }

    #[test]
    fn a_decision_about_a_living_hold_is_void_at_its_end() {
        let end = at(10).now;
        let renewed = held().renew(&renew("us", 1, Some(SECOND)), at(9));
        assert_eq!(renewed.not_after, end - 1);
        assert_eq!(held().release(&release(1, None), at(9)).not_after, end - 1);
        let entered = held().acquire(&acquire("us", 2), at(9)).unwrap();
        assert_eq!(entered.not_after, end - 1);
        let taken = held().acquire(&acquire("them", 2), at(10)).unwrap();
        assert_eq!(taken.not_after, u64::MAX);
    }

    #[test]
    fn a_break_names_its_incarnation_or_none() {
        let token = FencingToken(held().token);
        let other = held().break_lock(Some(FencingToken(token.0 + 1)), at(1));
        assert!(other.write.is_none());
        assert_eq!(other.answer, Broken::Changed { token: Some(token) });
        for only in [None, Some(token)] {
            let broken = held().break_lock(only, at(1));
            assert_eq!(broken.answer, Broken::Freed { token: Some(token) });
            assert!(!written(broken).is_unavailable(at(1)));
        }
        assert_eq!(held().break_lock(None, at(10)).answer, Broken::WasFree);
    }

    #[test]
    fn a_record_is_forgotten_a_day_after_its_last_token_unless_it_is_held() {
        let day = UNUSED / 1_000_000;
        assert!(!held().is_forgettable(at(day - 1)));
        assert!(held().is_forgettable(at(day)));
        let entry = renew("us", 1, Some(SECOND * 86_400));
        let renewed = written(held().renew(&entry, at(9)));
        assert!(!renewed.is_forgettable(at(day)));
        assert!(renewed.is_forgettable(at(day + 9)));
    }

    #[test]
    fn the_text_is_read_back_and_a_damaged_field_is_named() {
        let mut record = held_twice();
        record.holder_info = HolderInfo::new("web1", 42);
        record.version = 7;
        let text = record.to_string();
        assert_eq!(text.parse(), Ok(record));
        assert_eq!(Record::default().to_string().parse(), Ok(Record::default()));
        for (field, value) in [("began", "began=x"), ("version", "version=x")] {
            let damaged = text.replace(&format!("{field}="), value);
            let damaged = damaged.parse::<Record>().unwrap_err();
            assert_eq!((damaged.field, damaged.token), (field, NOW));
        }
        let unknown = "nothing of ours".parse::<Record>().unwrap_err();
        assert_eq!((unknown.field, unknown.token), ("version", 0));
    }

    #[test]
    fn a_break_of_a_damaged_record_lowers_no_token_that_can_be_read() {
        let after = |token| {
            let damaged = DamagedRecord::new("holds").with_token(token);
            written(Record::damaged(damaged, at(0)).break_lock(None, at(0))).token
        };
        assert_eq!(after(NOW + 7), NOW + 7);
        for unusable in [0, NOW - 7, super::LAST_TOKEN, u64::MAX] {
            assert_eq!(after(unusable), at(0).wall);
        }
    }
}
