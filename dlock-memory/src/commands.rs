//! What the server does: one function per request, executed whole under the server's lock, by the server's clock.
//!
//! A function sees the state, the time and the request, and leaves what it wants sent in [`Peers::pushes`].

use crate::{
    config::{LONGEST_LOOK, Terms},
    error::MemoryError,
    hints::{ClientId, Line, Peers, Place, Reservation, Served, Standee},
    store::State,
};
use dlock_core::{
    Acquire, Acquired, Broken, Cursor, FencingToken, Grant, Held, HoldId, Holder, Holds, LockName,
    MAX_HOLDS, Note, Owner, Page, Release, Released, Renew, Renewed, Snapshot, Ticket, Wake,
};
use std::{num::NonZeroU32, ops::Bound, sync::Arc, time::Duration};

/// One name. Times are the server's, since the Unix epoch.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// The last token given out; survives every incarnation.
    token: u64,
    inside: Option<Incarnation>,
    /// Kept shut until then by an incarnation that is over.
    shut_until: Duration,
    reserved: Option<Reservation>,
    line: Line,
    /// When the last of everything above but the token was over, or will be if nobody comes.
    busy_until: Duration,
}

/// From the first hold to the last.
#[derive(Debug)]
struct Incarnation {
    owner: Owner,
    since: Duration,
    /// The longest `at_least_for` that a release brought.
    keep_until: Duration,
    /// Never empty; at most [`MAX_HOLDS`].
    holds: Vec<Hold>,
}

#[derive(Debug)]
struct Hold {
    id: HoldId,
    end: Duration,
    note: Arc<Note>,
}

/// An acquire on its way.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) req: Acquire,
    pub(crate) client: ClientId,
    pub(crate) terms: Terms,
    /// Where the ticket stood before; `None`: at the end, if it does not stand yet.
    pub(crate) place: Option<Place>,
    /// The server's time after which it must do nothing.
    pub(crate) not_after: Duration,
}

/// The answer to an [`Ask`], and where its tickets stand now.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) acquired: Acquired,
    /// Of `req.line`, refused.
    pub(crate) place: Option<Place>,
    /// Of `req.next`, granted.
    pub(crate) next: Option<Place>,
}

impl Asked {
    fn gone() -> Self {
        Self {
            acquired: Acquired::Gone,
            place: None,
            next: None,
        }
    }
}

/// Acquires. Twice: the second finds its own hold and changes nothing.
pub(crate) fn acquire(state: &mut State, now: Duration, ask: &Ask) -> Result<Asked, MemoryError> {
    in_time(now, ask.not_after)?;
    let req = &ask.req;
    match state.names.get_mut(&req.name) {
        Some(entry) => entry.acquire(&mut state.peers, now, ask),
        None if req.join.is_some() => Ok(Asked::gone()),
        None => {
            let mut entry = Entry::default();
            let asked = entry.take(&mut state.peers, now, ask);
            state.names.insert(req.name.clone(), entry);
            state.sweep(now);
            Ok(asked)
        }
    }
}

/// Takes a ticket out, or hands on what was reserved for it. Twice: the second finds nothing.
pub(crate) fn leave(
    state: &mut State,
    now: Duration,
    name: &LockName,
    client: ClientId,
    ticket: Ticket,
) {
    let Some(entry) = state.names.get_mut(name) else {
        return;
    };
    entry.settle(now);
    let whose = Standee { client, ticket };
    let stood = entry.line.forget(whose);
    let reserved = entry
        .reserved
        .is_some_and(|reserved| reserved.whose == whose);
    if reserved {
        entry.reserved = None;
    }
    if reserved || stood {
        entry.open(&mut state.peers, name, now);
    }
}

/// Prolongs one hold. Twice: it lasts from the second on.
pub(crate) fn renew(state: &mut State, now: Duration, entry: &Renew) -> Renewed {
    let Some(held) = state.names.get_mut(&entry.name) else {
        return Renewed::NotHeld;
    };
    held.settle(now);
    let hold = held
        .inside
        .as_mut()
        .filter(|inside| inside.owner == entry.owner)
        .and_then(|inside| inside.holds.iter_mut().find(|hold| hold.id == entry.hold));
    let Some(hold) = hold else {
        return Renewed::NotHeld;
    };
    if let Some(lease) = entry.lease {
        hold.end = hold.end.max(now.saturating_add(lease));
        held.busy_until = held.busy_until.max(hold.end);
    }
    Renewed::Until {
        valid_for: hold.end - now,
    }
}

/// Removes holds. Never late. Twice: the second finds nothing.
pub(crate) fn release(state: &mut State, now: Duration, req: &Release) -> Released {
    let Some(entry) = state.names.get_mut(&req.name) else {
        return Released::NotHeld { by: None };
    };
    entry.settle(now);
    let found = entry.inside.as_mut().filter(|inside| {
        inside.owner == req.owner
            && match req.holds {
                Holds::One(id) => inside.holds.iter().any(|hold| hold.id == id),
                Holds::All => true,
            }
    });
    let Some(inside) = found else {
        return Released::NotHeld {
            by: entry.holder(now),
        };
    };
    match req.holds {
        Holds::One(id) => inside.holds.retain(|hold| hold.id != id),
        Holds::All => inside.holds.clear(),
    }
    if let Some(keep) = req.keep {
        inside.keep_until = inside.keep_until.max(now.saturating_add(keep));
    }
    if let Some(holds) = count(&inside.holds) {
        return Released::StillHeld { holds };
    }
    let keep_until = inside.keep_until;
    entry.end(now);
    if keep_until > now {
        entry.shut(&mut state.peers, &req.name, now, keep_until);
        return Released::Kept {
            rest: keep_until - now,
        };
    }
    entry.open(&mut state.peers, &req.name, now);
    Released::Freed
}

/// Frees the name. Twice: without a token the second ends whatever came in between, with one it finds another.
pub(crate) fn break_lock(
    state: &mut State,
    now: Duration,
    name: &LockName,
    only: Option<FencingToken>,
) -> Broken {
    let Some(entry) = state.names.get_mut(name) else {
        return Broken::WasFree;
    };
    entry.settle(now);
    if entry.inside.is_none() && entry.reserved.is_none() && entry.shut_until <= now {
        return Broken::WasFree;
    }
    let token = entry.inside.as_ref().map(|_| FencingToken(entry.token));
    if only.is_some() && only != token {
        return Broken::Changed { token };
    }
    entry.end(now);
    entry.open(&mut state.peers, name, now);
    Broken::Freed { token }
}

/// Shows one name; changes nothing, not even what is past its end.
pub(crate) fn inspect(state: &State, now: Duration, name: &LockName, wake: Wake) -> Snapshot {
    match state.names.get(name) {
        Some(entry) => entry.snapshot(&state.peers, now, name, wake),
        None => {
            let mut free = Snapshot::free(name.clone());
            free.waiters = (wake == Wake::Line).then_some(0);
            free
        }
    }
}

/// One step over the names in their order: looks at no more of them than the page may have.
pub(crate) fn list(
    state: &State,
    now: Duration,
    wake: Wake,
    (prefix, from, limit): (&str, Option<&Cursor>, usize),
) -> Result<Page, MemoryError> {
    let from = match from.map(name_of).transpose()? {
        Some(name) if name >= prefix => Bound::Excluded(name),
        _ => Bound::Included(prefix),
    };
    let mut found = Vec::new();
    let mut next = None;
    let names = state.names.range::<str, _>((from, Bound::Unbounded));
    let under = names.take_while(|(name, _)| name.as_str().starts_with(prefix));
    for (seen, (name, entry)) in under.enumerate() {
        if seen == limit.clamp(1, LONGEST_PAGE) {
            return Ok(Page::new(found, next));
        }
        let shown = entry.snapshot(&state.peers, now, name, wake);
        if !shown.holders.is_empty() || shown.shut.is_some() {
            found.push(shown);
        }
        next = Some(cursor_at(name));
    }
    Ok(Page::new(found, None))
}

/// The time when a request may do something, or the error that it came too late. Nothing waits between this and the effect.
pub(crate) fn in_time(now: Duration, not_after: Duration) -> Result<(), MemoryError> {
    if now > not_after {
        Err(MemoryError::Late { now, not_after })
    } else {
        Ok(())
    }
}

impl Ask {
    fn ticket(&self) -> Option<Standee> {
        let client = self.client;
        self.req.line.map(|ticket| Standee { client, ticket })
    }
}

impl Entry {
    /// Drops what is over: done first by everything that writes, so that nothing past its end is ever used.
    fn settle(&mut self, now: Duration) {
        if let Some(inside) = &mut self.inside {
            inside.holds.retain(|hold| hold.end > now);
            if inside.holds.is_empty() {
                // Run out, so the lease alone decides: what an early release asked to keep goes with it.
                self.inside = None;
            }
        }
        if self.reserved.is_some_and(|reserved| reserved.until <= now) {
            self.reserved = None;
        }
        if self.shut_until <= now {
            self.shut_until = Duration::ZERO;
        }
    }

    fn acquire(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        ask: &Ask,
    ) -> Result<Asked, MemoryError> {
        self.settle(now);
        let (me, join) = (ask.ticket(), ask.req.join);
        match (&self.inside, self.reserved) {
            (Some(inside), _) if inside.owner == ask.req.owner => {
                return self.reenter(peers, now, ask);
            }
            _ if join.is_some() => return Ok(Asked::gone()),
            (Some(_), _) => return Ok(self.refuse(peers, now, ask)),
            (None, Some(reserved)) if Some(reserved.whose) != me => {
                return Ok(self.refuse(peers, now, ask));
            }
            (None, Some(_)) => return Ok(self.take(peers, now, ask)),
            (None, None) if self.shut_until > now => return Ok(self.refuse(peers, now, ask)),
            (None, None) if self.line.is_empty() => return Ok(self.take(peers, now, ask)),
            (None, None) => {}
        }
        // Free, with a line: whoever asks stands in it first, so that its old place counts, and serves it.
        self.stand(peers, now, ask);
        match self.line.serve(peers, &ask.req.name, now, me) {
            Served::Me | Served::Nobody => Ok(self.take(peers, now, ask)),
            Served::Next(reservation) => {
                self.reserved = Some(reservation);
                Ok(self.refuse(peers, now, ask))
            }
        }
    }

    /// A new incarnation. Only where nobody is inside.
    fn take(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Asked {
        let micros = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        self.token = micros.max(self.token.saturating_add(1));
        self.reserved = None;
        self.inside = Some(Incarnation {
            owner: ask.req.owner,
            since: now,
            keep_until: Duration::ZERO,
            holds: Vec::with_capacity(1),
        });
        self.enter(peers, now, ask)
    }

    /// Enters the incarnation that is this owner's already.
    fn reenter(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        ask: &Ask,
    ) -> Result<Asked, MemoryError> {
        if ask.req.join.is_some_and(|token| token.0 != self.token) {
            return Ok(Asked::gone());
        }
        let holds = self.holds();
        if let Some(hold) = holds.iter().find(|hold| hold.id == ask.req.hold) {
            return Ok(self.grant(hold.end - now));
        }
        if holds.len() >= MAX_HOLDS as usize {
            return Err(MemoryError::TooManyHolds);
        }
        Ok(self.enter(peers, now, ask))
    }

    /// One hold more; the ticket is used up, and the client's next one stands at the end.
    fn enter(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Asked {
        let lease = ask.req.lease.length();
        let end = now.saturating_add(lease);
        self.busy_until = self.busy_until.max(end);
        if let Some(inside) = &mut self.inside {
            inside.holds.push(Hold {
                id: ask.req.hold,
                end,
                note: Arc::clone(&ask.req.note),
            });
        }
        if let Some(used) = ask.ticket() {
            self.line.forget(used);
        }
        let mut granted = self.grant(lease);
        if let Some(ticket) = ask.req.next {
            let whose = Standee {
                client: ask.client,
                ticket,
            };
            granted.next = self.line.put(peers, now, whose, (ask.terms, None));
        }
        granted
    }

    fn grant(&self, valid_for: Duration) -> Asked {
        let token = Some(FencingToken(self.token));
        let holds = count(self.holds()).unwrap_or(NonZeroU32::MIN);
        Asked {
            acquired: Acquired::Granted(Grant::new(token, holds, valid_for)),
            place: None,
            next: None,
        }
    }

    /// Refuses, and keeps the ticket in line.
    fn refuse(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Asked {
        let place = self.stand(peers, now, ask);
        let ahead = place.map(|place| self.line.ahead(place));
        let rest = self.closed_until(now).saturating_sub(now);
        let interval = ask.terms.interval;
        let mut held = Held::default();
        held.by = self.holder(now);
        held.look_in = Some(match ask.terms.wake {
            Wake::Line if ahead == Some(0) => rest.min(interval),
            Wake::Line => interval,
            Wake::Hints => rest.min(LONGEST_LOOK),
            _ => rest,
        });
        held.ahead = ahead.and_then(|ahead| u32::try_from(ahead).ok());
        Asked {
            acquired: Acquired::Held(held),
            place,
            next: None,
        }
    }

    /// Lets the ticket wait, where it stood before if it knows.
    fn stand(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Option<Place> {
        self.line
            .put(peers, now, ask.ticket()?, (ask.terms, ask.place))
    }

    /// Nobody is inside any more, and nothing keeps it.
    fn end(&mut self, now: Duration) {
        self.inside = None;
        self.reserved = None;
        self.shut_until = Duration::ZERO;
        self.busy_until = now;
    }

    /// Stays shut; the first in line is told until when.
    fn shut(&mut self, peers: &mut Peers, name: &LockName, now: Duration, until: Duration) {
        self.shut_until = until;
        self.busy_until = until;
        self.line.tell_first(peers, name, now, until - now);
    }

    /// If the name is free: serves the line, or tells whoever wanted to hear of it.
    fn open(&mut self, peers: &mut Peers, name: &LockName, now: Duration) {
        if self.closed_until(now) > now {
            return;
        }
        match self.line.serve(peers, name, now, None) {
            Served::Next(reservation) => self.reserved = Some(reservation),
            Served::Me | Served::Nobody => self.line.tell_watchers(peers, name, now),
        }
    }

    /// When the latest living hold, the keep or the reservation ends; not in the future: free.
    fn closed_until(&self, now: Duration) -> Duration {
        let held = self.holds().iter().map(|hold| hold.end).max();
        let reserved = self.reserved.map(|reserved| reserved.until);
        held.into_iter()
            .chain(reserved)
            .chain([self.shut_until])
            .max()
            .unwrap_or(now)
    }

    /// The holds of the incarnation, also those past their end that nothing has settled yet.
    fn holds(&self) -> &[Hold] {
        self.inside.as_ref().map_or(&[], |inside| &inside.holds)
    }

    fn living(&self, now: Duration) -> impl Iterator<Item = &Hold> {
        self.holds().iter().filter(move |hold| hold.end > now)
    }

    /// Who is inside: its first living hold speaks for it, the last one to end says how long.
    fn holder(&self, now: Duration) -> Option<Holder> {
        let owner = &self.inside.as_ref()?.owner;
        let first = self.living(now).next()?;
        let end = self.living(now).map(|hold| hold.end).max()?;
        let mut holder = Holder::new(owner.fingerprint());
        holder.token = Some(FencingToken(self.token));
        holder.rest = Some(end - now);
        holder.note = Note::clone(&first.note);
        Some(holder)
    }

    fn snapshot(&self, peers: &Peers, now: Duration, name: &LockName, wake: Wake) -> Snapshot {
        let mut shown = Snapshot::free(name.clone());
        shown.holders.extend(self.holder(now));
        shown.holds = self.living(now).map(|_| 1).sum();
        if shown.holds == 0 {
            let until = self
                .reserved
                .map_or(self.shut_until, |one| one.until.max(self.shut_until));
            shown.shut = until.checked_sub(now).filter(|rest| !rest.is_zero());
        } else if let Some(inside) = &self.inside {
            shown.age = Some(now.saturating_sub(inside.since));
        }
        if wake == Wake::Line {
            shown.waiters = u32::try_from(self.line.waiters(peers, now)).ok();
        }
        shown
    }

    /// Whether a day has passed since it was last busy, and since its token was the present: a server's clock that is set
    /// back by less than that still gives greater tokens than the one forgotten.
    pub(crate) fn is_forgettable(&self, now: Duration) -> bool {
        let issued = Duration::from_micros(self.token);
        let idle = self.busy_until.max(issued).saturating_add(TOKEN_KEPT);
        idle <= now && self.line.is_over(now)
    }

    pub(crate) fn tickets(&self) -> usize {
        self.line.tickets()
    }
}

/// How many holds; `None` is none.
fn count(holds: &[Hold]) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(holds.len()).ok()?)
}

fn cursor_at(name: &LockName) -> Cursor {
    Cursor([CURSOR, name.as_str().as_bytes()].concat())
}

fn name_of(cursor: &Cursor) -> Result<&str, MemoryError> {
    let name = cursor.0.strip_prefix(CURSOR).ok_or(MemoryError::Cursor)?;
    std::str::from_utf8(name).map_err(|_| MemoryError::Cursor)
}

/// How long a token counter outlives its name, at least: what a server's clock may be set back.
const TOKEN_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The most names one step of a walk looks at.
const LONGEST_PAGE: usize = 1000;

/// What the bytes of a cursor begin with; the name it stands behind follows.
const CURSOR: &[u8] = b"after:";

#[cfg(test)]
mod tests {
    use super::{
        Ask, LONGEST_PAGE, TOKEN_KEPT, acquire, break_lock, inspect, list, release, renew,
    };
    use crate::{
        config::MemoryConfig,
        error::MemoryError,
        hints::{ClientId, Inbox},
        store::State,
    };
    use dlock_core::{
        Acquire, Acquired, Broken, Cursor, FencingToken, HoldId, Holds, Instant, Lease, LockName,
        Owner, Release, Released, Renew, Renewed, Wake,
    };
    use proptest::{collection::vec, option, prelude::*};
    use std::{collections::BTreeSet, sync::Arc, time::Duration};

    const START: Duration = Duration::from_secs(1_700_000_000);

    fn name(number: usize) -> LockName {
        format!("n{number:05}").parse().unwrap()
    }

    fn ask(client: ClientId, req: Acquire) -> Ask {
        Ask {
            client,
            terms: MemoryConfig::default().terms(req.lease),
            place: None,
            not_after: Duration::MAX,
            req,
        }
    }

    fn wanted(number: usize, owner: u8, hold: u64, lease: Duration) -> Acquire {
        let (owner, hold) = (
            Owner::from_seed(&owner.to_string()),
            HoldId::from_bits(hold),
        );
        let lease = Lease::fixed(lease).unwrap();
        Acquire::new(name(number), owner, hold, lease, Instant::FAR)
    }

    fn take(state: &mut State, now: Duration, number: usize) -> u64 {
        let client = state.peers.connect(Arc::<Inbox>::default());
        let req = wanted(number, 0, 0, Duration::from_secs(1));
        match acquire(state, now, &ask(client, req)).unwrap().acquired {
            Acquired::Granted(grant) => grant.token.unwrap().0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_is_late_only_after_its_not_after() {
        let mut state = State::default();
        let client = state.peers.connect(Arc::<Inbox>::default());
        let mut late = ask(client, wanted(0, 0, 0, Duration::from_secs(1)));
        late.not_after = START;
        let moment = Duration::from_nanos(1);
        let error = acquire(&mut state, START + moment, &late).unwrap_err();
        assert!(matches!(error, MemoryError::Late { .. }));
        assert!(state.names.is_empty());
        acquire(&mut state, START, &late).unwrap();
    }

    #[test]
    fn a_token_counter_is_forgotten_a_day_after_its_name_was_last_busy() {
        let mut state = State::default();
        take(&mut state, START, 0);
        let freed = START + Duration::from_secs(1);
        // The walk looks at two names for each new one.
        for number in 1..10 {
            take(
                &mut state,
                freed + TOKEN_KEPT - Duration::from_nanos(1),
                number,
            );
        }
        assert!(state.names.contains_key(&name(0)));
        for number in 10..20 {
            take(&mut state, freed + TOKEN_KEPT, number);
        }
        assert!(!state.names.contains_key(&name(0)));
        assert_eq!(state.names.len(), 19);
    }

    #[test]
    fn a_token_ahead_of_the_clock_is_not_forgotten() {
        let mut state = State::default();
        let token = take(&mut state, START, 0);
        let back = START - 10 * TOKEN_KEPT;
        let (owner, hold) = (Owner::from_seed("0"), HoldId::from_bits(0));
        let released = release(&mut state, back, &Release::new(name(0), owner, hold));
        assert!(matches!(released, Released::Freed));
        for number in 1..10 {
            take(&mut state, back + 2 * TOKEN_KEPT, number);
        }
        assert_eq!(take(&mut state, back + 2 * TOKEN_KEPT, 0), token + 1);
    }

    #[test]
    fn names_are_bounded_by_those_of_about_a_day() {
        let mut state = State::default();
        let apart = TOKEN_KEPT / 100;
        for number in 0..2_000 {
            take(
                &mut state,
                START + apart * u32::try_from(number).unwrap(),
                number,
            );
            assert!(
                state.names.len() <= 400,
                "{} at {number}",
                state.names.len()
            );
        }
    }

    #[test]
    fn a_walk_shows_each_held_name_once_in_bounded_steps() {
        let mut state = State::default();
        for number in 0..25 {
            take(&mut state, START, number);
        }
        let walk = |prefix: &str, limit| {
            let (mut seen, mut from) = (Vec::new(), None::<Cursor>);
            loop {
                let page = list(&state, START, Wake::Line, (prefix, from.as_ref(), limit)).unwrap();
                assert!(page.found.len() <= limit.clamp(1, LONGEST_PAGE));
                seen.extend(page.found.into_iter().map(|shown| shown.name));
                let Some(next) = page.next else { return seen };
                from = Some(next);
            }
        };
        for limit in [0, 1, 7, 25, usize::MAX] {
            assert_eq!(walk("", limit), (0..25).map(name).collect::<Vec<_>>());
            assert_eq!(walk("n0002", limit), (20..25).map(name).collect::<Vec<_>>());
        }
        let later = START + Duration::from_secs(1);
        let over = list(&state, later, Wake::Line, ("", None, 25)).unwrap();
        assert!(over.found.is_empty());
        let stranger = Cursor(b"n00003".to_vec());
        let error = list(&state, START, Wake::Line, ("", Some(&stranger), 25)).unwrap_err();
        assert_eq!(error, MemoryError::Cursor);
        // Of another walk: bytes before the prefix are skipped, not walked.
        let other = Cursor(b"after:a".to_vec());
        let page = list(&state, START, Wake::Line, ("n0002", Some(&other), 25)).unwrap();
        assert_eq!(page.found.len(), 5);
    }

    /// What is done to one name. Owners, holds and leases are few, so that they meet.
    #[derive(Clone, Debug)]
    enum Op {
        Acquire {
            owner: u8,
            hold: u64,
            lease: u64,
            join: Option<u64>,
        },
        Renew {
            owner: u8,
            hold: u64,
            lease: Option<u64>,
        },
        Release {
            owner: u8,
            hold: Option<u64>,
            keep: Option<u64>,
        },
        Break {
            back: Option<u64>,
        },
        Pass {
            millis: u64,
        },
    }

    fn op() -> impl Strategy<Value = Op> {
        let lease = || 100..400_u64;
        prop_oneof![
            6 => (0..2_u8, 0..4_u64, lease(), option::weighted(0.2, 0..2_u64))
                .prop_map(|(owner, hold, lease, join)| Op::Acquire { owner, hold, lease, join }),
            2 => (0..2_u8, 0..4_u64, option::of(lease()))
                .prop_map(|(owner, hold, lease)| Op::Renew { owner, hold, lease }),
            4 => (0..2_u8, option::weighted(0.9, 0..4_u64), option::weighted(0.3, 0..500_u64))
                .prop_map(|(owner, hold, keep)| Op::Release { owner, hold, keep }),
            1 => option::of(0..2_u64).prop_map(|back| Op::Break { back }),
            4 => (0..250_u64).prop_map(|millis| Op::Pass { millis }),
        ]
    }

    /// A hold that was ever taken, in a log from which everything else is computed.
    #[derive(Debug)]
    struct Taken {
        token: u64,
        owner: u8,
        hold: u64,
        end: Duration,
        given_back: bool,
        keep: Duration,
    }

    /// The other implementation: it deletes nothing, and knows what is true by looking through all that ever happened.
    #[derive(Debug, Default)]
    struct Log {
        taken: Vec<Taken>,
        /// The incarnation whose keep counts, since its last hold was given back; broken open: none.
        kept: Option<u64>,
    }

    impl Log {
        fn living(&self, now: Duration) -> impl Iterator<Item = &Taken> {
            self.taken
                .iter()
                .filter(move |one| !one.given_back && one.end > now)
        }

        fn token(&self) -> u64 {
            self.taken.last().map_or(0, |one| one.token)
        }

        fn shut_until(&self) -> Duration {
            let kept = self.taken.iter().filter(|one| Some(one.token) == self.kept);
            kept.map(|one| one.keep).max().unwrap_or_default()
        }

        fn find(&mut self, now: Duration, owner: u8, hold: u64) -> Option<&mut Taken> {
            let lives = |one: &&mut Taken| !one.given_back && one.end > now;
            let mut named = self
                .taken
                .iter_mut()
                .filter(|one| (one.owner, one.hold) == (owner, hold));
            named.find(lives)
        }

        fn acquire(&mut self, now: Duration, ask: (u8, u64, Duration, Option<u64>)) -> String {
            let (owner, hold, lease, join) = ask;
            let holds = self.living(now).count();
            let inside = self.living(now).next().map(|one| (one.owner, one.token));
            let token = match inside {
                Some((holder, token))
                    if holder == owner && join.is_none_or(|join| join == token) =>
                {
                    token
                }
                _ if join.is_some() => return "gone".to_owned(),
                Some(_) => return "held".to_owned(),
                None if self.shut_until() > now => return "held".to_owned(),
                None => u64::try_from(now.as_micros())
                    .unwrap()
                    .max(self.token() + 1),
            };
            if let Some(again) = self.find(now, owner, hold) {
                return format!("granted {token} {holds} {:?}", again.end - now);
            }
            let (end, keep) = (now + lease, Duration::ZERO);
            self.taken.push(Taken {
                token,
                owner,
                hold,
                end,
                given_back: false,
                keep,
            });
            format!("granted {token} {} {lease:?}", holds + 1)
        }

        fn renew(
            &mut self,
            now: Duration,
            owner: u8,
            hold: u64,
            lease: Option<Duration>,
        ) -> String {
            let Some(one) = self.find(now, owner, hold) else {
                return "not held".to_owned();
            };
            one.end = one.end.max(now + lease.unwrap_or_default());
            format!("until {:?}", one.end - now)
        }

        fn release(
            &mut self,
            now: Duration,
            owner: u8,
            hold: Option<u64>,
            keep: Duration,
        ) -> String {
            let token = self.token();
            let mut found = false;
            for one in &mut self.taken {
                let named = one.owner == owner && hold.is_none_or(|hold| one.hold == hold);
                if named && !one.given_back && one.end > now {
                    (one.given_back, one.keep, found) = (true, now + keep, true);
                }
            }
            match self.living(now).count() {
                _ if !found => return "not held".to_owned(),
                0 => self.kept = Some(token),
                holds => return format!("still held {holds}"),
            }
            match self.shut_until().saturating_sub(now) {
                Duration::ZERO => "freed".to_owned(),
                rest => format!("kept {rest:?}"),
            }
        }

        fn break_lock(&mut self, now: Duration, only: Option<u64>) -> String {
            let token = self.living(now).next().map(|one| one.token);
            if token.is_none() && self.shut_until() <= now {
                return "was free".to_owned();
            }
            if only.is_some() && only != token {
                return format!("changed {token:?}");
            }
            self.taken.iter_mut().for_each(|one| one.given_back = true);
            self.kept = None;
            format!("freed {token:?}")
        }

        fn look(&self, now: Duration) -> String {
            let holds = self.living(now).count();
            let rest = self.living(now).map(|one| one.end - now).max();
            let shut = Some(self.shut_until().saturating_sub(now))
                .filter(|rest| holds == 0 && !rest.is_zero());
            let token = rest.map(|_| self.token());
            format!("{holds} {token:?} {rest:?} {shut:?}")
        }
    }

    /// The same operations on the store, in the same words.
    struct Store {
        state: State,
        client: ClientId,
    }

    impl Store {
        fn acquire(
            &mut self,
            now: Duration,
            (owner, hold, lease, join): (u8, u64, Duration, Option<u64>),
        ) -> String {
            let mut req = wanted(0, owner, hold, lease);
            req.join = join.map(FencingToken);
            match acquire(&mut self.state, now, &ask(self.client, req))
                .unwrap()
                .acquired
            {
                Acquired::Granted(grant) => {
                    format!(
                        "granted {} {} {:?}",
                        grant.token.unwrap(),
                        grant.holds,
                        grant.valid_for
                    )
                }
                Acquired::Held(_) => "held".to_owned(),
                other => format!("{other:?}").to_lowercase(),
            }
        }

        fn renew(
            &mut self,
            now: Duration,
            owner: u8,
            hold: u64,
            lease: Option<Duration>,
        ) -> String {
            let owner = Owner::from_seed(&owner.to_string());
            let entry = Renew::new(name(0), owner, HoldId::from_bits(hold), lease);
            match renew(&mut self.state, now, &entry) {
                Renewed::Until { valid_for } => format!("until {valid_for:?}"),
                _ => "not held".to_owned(),
            }
        }

        fn release(
            &mut self,
            now: Duration,
            owner: u8,
            hold: Option<u64>,
            keep: Option<Duration>,
        ) -> String {
            let owner = Owner::from_seed(&owner.to_string());
            let mut req = Release::new(name(0), owner, HoldId::from_bits(0));
            req.holds = hold.map_or(Holds::All, |hold| Holds::One(HoldId::from_bits(hold)));
            req.keep = keep;
            match release(&mut self.state, now, &req) {
                Released::Freed => "freed".to_owned(),
                Released::StillHeld { holds } => format!("still held {holds}"),
                Released::Kept { rest } => format!("kept {rest:?}"),
                _ => "not held".to_owned(),
            }
        }

        fn break_lock(&mut self, now: Duration, only: Option<u64>) -> String {
            let number = |token: Option<FencingToken>| token.map(|token| token.0);
            match break_lock(&mut self.state, now, &name(0), only.map(FencingToken)) {
                Broken::Freed { token } => format!("freed {:?}", number(token)),
                Broken::Changed { token } => format!("changed {:?}", number(token)),
                _ => "was free".to_owned(),
            }
        }

        fn look(&self, now: Duration) -> String {
            let shown = inspect(&self.state, now, &name(0), Wake::Line);
            let holder = shown.holders.first();
            let token = holder.and_then(|holder| holder.token).map(|token| token.0);
            let rest = holder.and_then(|holder| holder.rest);
            format!("{} {token:?} {rest:?} {:?}", shown.holds, shown.shut)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn answers_are_those_of_a_log_of_all_that_ever_happened(ops in vec(op(), 1..120)) {
            let mut store = Store { state: State::default(), client: ClientId::default() };
            let (mut log, mut now) = (Log::default(), START);
            for op in ops {
                let (told, true_) = match op.clone() {
                    Op::Pass { millis } => {
                        now += Duration::from_millis(millis);
                        (String::new(), String::new())
                    }
                    Op::Acquire { owner, hold, lease, join } => {
                        // The present incarnation's token, or the one after it, which nobody has.
                        let join = join.map(|off| log.token() + off);
                        let ask = (owner, hold, Duration::from_millis(lease), join);
                        (store.acquire(now, ask), log.acquire(now, ask))
                    }
                    Op::Renew { owner, hold, lease } => {
                        let lease = lease.map(Duration::from_millis);
                        (store.renew(now, owner, hold, lease), log.renew(now, owner, hold, lease))
                    }
                    Op::Release { owner, hold, keep } => {
                        let keep = keep.map(Duration::from_millis);
                        let true_ = log.release(now, owner, hold, keep.unwrap_or_default());
                        (store.release(now, owner, hold, keep), true_)
                    }
                    Op::Break { back } => {
                        let only = back.map(|back| log.token().saturating_sub(back));
                        (store.break_lock(now, only), log.break_lock(now, only))
                    }
                };
                prop_assert_eq!(told, true_, "{:?}", op);
                prop_assert_eq!(store.look(now), log.look(now), "after {:?}", op);
                let owners: BTreeSet<_> = log.living(now).map(|one| one.owner).collect();
                prop_assert!(owners.len() <= 1);
            }
        }

        #[test]
        fn tokens_grow_though_the_clock_is_set_back(steps in vec((0..2_000_000_i64).prop_map(|by| by - 1_000_000), 1..60)) {
            let mut state = State::default();
            let (mut now, mut last) = (START, 0);
            for step in steps {
                let by = Duration::from_millis(step.unsigned_abs());
                now = if step < 0 { now - by } else { now + by };
                break_lock(&mut state, now, &name(0), None);
                let token = take(&mut state, now, 0);
                prop_assert!(token > last);
                last = token;
            }
        }
    }
}
