//! What the server does: one function per request, executed whole under the server's lock, by the server's clock.
//!
//! A function sees the state, the time and the request, and leaves what it wants sent in [`Peers::pushes`].

use crate::{
    config::Terms,
    error::MemoryError,
    store::{ClientId, Peers, State},
};
use dlock_core::{
    Acquire, Acquired, Broken, Cursor, FencingToken, Grant, Held, Hint, HoldId, Holder, Holds,
    LockName, MAX_HOLDS, Note, Owner, Page, Release, Released, Renew, Renewed, Snapshot, Ticket,
    Wake,
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
    /// Sorted by place.
    line: Vec<Standing>,
    /// Who wants to hear when it is free, in no order.
    watchers: Vec<Watcher>,
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

/// The name is free, but only for this ticket.
#[derive(Clone, Copy, Debug)]
struct Reservation {
    whose: Standee,
    until: Duration,
}

/// A ticket of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standee {
    client: ClientId,
    ticket: Ticket,
}

/// A ticket in line.
#[derive(Clone, Copy, Debug)]
struct Standing {
    place: Place,
    whose: Standee,
    /// Counts as dead from then on, unless it looks.
    deadline: Duration,
    accept: Duration,
    interval: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Watcher {
    whose: Standee,
    deadline: Duration,
}

/// Where a ticket belongs in a line: the server's time when it first stood there, and a number for tickets of one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(Duration, u64);

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
    let (req, peers) = (&ask.req, &mut state.peers);
    let known = state.names.get_mut(&req.name);
    if known.is_none() {
        if req.join.is_some() {
            return Ok(Asked::gone());
        }
        let mut entry = Entry::default();
        let asked = entry.take(peers, now, ask);
        state.names.insert(req.name.clone(), entry);
        state.sweep(now);
        return Ok(asked);
    }
    let Some(entry) = known else {
        return Ok(Asked::gone());
    };
    entry.settle(now);
    if let Some(inside) = &entry.inside {
        return if inside.owner == req.owner {
            entry.reenter(peers, now, ask)
        } else if req.join.is_some() {
            Ok(Asked::gone())
        } else {
            Ok(entry.refuse(peers, now, ask))
        };
    }
    if req.join.is_some() {
        return Ok(Asked::gone());
    }
    let me = ask.ticket();
    if let Some(reserved) = entry.reserved {
        return Ok(if Some(reserved.whose) == me {
            entry.take(peers, now, ask)
        } else {
            entry.refuse(peers, now, ask)
        });
    }
    if entry.shut_until > now {
        return Ok(entry.refuse(peers, now, ask));
    }
    if !entry.line.is_empty() {
        entry.stand(peers, now, ask);
        if entry.serve(peers, &req.name, now, me) == Served::Another {
            return Ok(entry.refuse(peers, now, ask));
        }
    }
    Ok(entry.take(peers, now, ask))
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
    let stood = entry.line.len();
    entry.forget(whose);
    let reserved = entry
        .reserved
        .is_some_and(|reserved| reserved.whose == whose);
    if reserved {
        entry.reserved = None;
    }
    if reserved || entry.line.len() < stood {
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
    let from = match from {
        Some(cursor) => Bound::Excluded(name_of(cursor)?),
        None => Bound::Included(prefix),
    };
    let mut found = Vec::new();
    let mut next = None;
    let names = state.names.range::<str, _>((from, Bound::Unbounded));
    for (seen, (name, entry)) in names.enumerate() {
        if !name.as_str().starts_with(prefix) {
            // Names before the prefix come first when a cursor of another walk is given; those behind it are the end.
            if name.as_str() > prefix {
                break;
            }
            continue;
        }
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

/// Who was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// The one who asked.
    Me,
    /// The next one, who has it reserved now.
    Another,
    /// Nobody is left: it is free for everybody.
    Nobody,
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
            self.forget(used);
        }
        let mut granted = self.grant(lease);
        if let Some(ticket) = ask.req.next {
            let whose = Standee {
                client: ask.client,
                ticket,
            };
            granted.next = self.put(peers, now, whose, ask.terms, None);
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
        let ahead = place.map(|place| self.line.partition_point(|other| other.place < place));
        let rest = self.closed_until(now).saturating_sub(now);
        let interval = ask.terms.interval;
        let mut held = Held::default();
        held.by = self.holder(now);
        held.look_in = Some(match ask.terms.wake {
            Wake::Line if ahead == Some(0) => rest.min(interval),
            Wake::Line => interval,
            Wake::Hints => rest.min(crate::config::LONGEST_LOOK),
            _ => rest,
        });
        held.ahead = ahead.and_then(|ahead| u32::try_from(ahead).ok());
        Asked {
            acquired: Acquired::Held(held),
            place,
            next: None,
        }
    }

    /// Lets the ticket stand in line, where it stood before if it knows.
    fn stand(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Option<Place> {
        self.put(peers, now, ask.ticket()?, ask.terms, ask.place)
    }

    fn put(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        whose: Standee,
        terms: Terms,
        place: Option<Place>,
    ) -> Option<Place> {
        let deadline = now + terms.entry;
        match terms.wake {
            Wake::Line => {}
            Wake::Hints => {
                self.watchers.retain(|watcher| watcher.whose != whose);
                self.watchers.push(Watcher { whose, deadline });
                return None;
            }
            _ => return None,
        }
        if let Some(standing) = self.line.iter_mut().find(|one| one.whose == whose) {
            standing.deadline = deadline;
            return Some(standing.place);
        }
        let place = place.unwrap_or_else(|| {
            peers.placed += 1;
            Place(now, peers.placed)
        });
        let at = self.line.partition_point(|other| other.place < place);
        let standing = Standing {
            place,
            whose,
            deadline,
            accept: terms.accept,
            interval: terms.interval,
        };
        self.line.insert(at, standing);
        Some(place)
    }

    /// A ticket is over.
    fn forget(&mut self, whose: Standee) {
        self.line.retain(|standing| standing.whose != whose);
        self.watchers.retain(|watcher| watcher.whose != whose);
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
        self.tell_first(peers, name, now, until - now);
    }

    /// Serves the line if the name is free; if nobody stands there, tells whoever wanted to hear of it.
    fn open(&mut self, peers: &mut Peers, name: &LockName, now: Duration) {
        if self.closed_until(now) > now || self.serve(peers, name, now, None) == Served::Another {
            return;
        }
        self.watchers
            .retain(|watcher| watcher.deadline > now && peers.listens(watcher.whose.client));
        let mut told = Vec::new();
        for Watcher { whose, .. } in &self.watchers {
            if !told.contains(&whose.client) {
                told.push(whose.client);
                peers.pushes.push((whose.client, Hint::Free(name.clone())));
            }
        }
    }

    /// Hands a free name to the first in line who is still there. Whoever is taken out on the way is forgotten: its client
    /// knows its place, and its next look puts it back.
    fn serve(
        &mut self,
        peers: &mut Peers,
        name: &LockName,
        now: Duration,
        me: Option<Standee>,
    ) -> Served {
        while !self.line.is_empty() {
            let first = self.line.remove(0);
            if Some(first.whose) == me {
                return Served::Me;
            }
            if !first.lives(peers, now) {
                continue;
            }
            // The one behind it hears first: if the grantee is dead after all, it costs its accept lease and no more.
            self.tell_first(peers, name, now, first.accept);
            let Standee { client, ticket } = first.whose;
            let name = name.clone();
            peers.pushes.push((client, Hint::Turn { name, ticket }));
            self.reserved = Some(Reservation {
                whose: first.whose,
                until: now + first.accept,
            });
            return Served::Another;
        }
        Served::Nobody
    }

    /// Tells the first in line that it is, and when to look at the latest. Takes out dead ones before it.
    fn tell_first(&mut self, peers: &mut Peers, name: &LockName, now: Duration, rest: Duration) {
        let dead = self
            .line
            .iter()
            .take_while(|one| !one.lives(peers, now))
            .count();
        self.line.drain(..dead);
        if let Some(first) = self.line.first() {
            let hint = Hint::First {
                name: name.clone(),
                ticket: first.whose.ticket,
                look_in: rest.min(first.interval),
            };
            peers.pushes.push((first.whose.client, hint));
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
            let waiters = self.line.iter().filter(|one| one.lives(peers, now)).count();
            shown.waiters = u32::try_from(waiters).ok();
        }
        shown
    }

    /// Whether a day has passed since it was last busy, and since its token was the present: a server's clock that is set
    /// back by less than that still gives greater tokens than the one forgotten.
    pub(crate) fn is_forgettable(&self, now: Duration) -> bool {
        let issued = Duration::from_micros(self.token);
        self.busy_until.max(issued) + TOKEN_KEPT <= now
            && self.line.iter().all(|one| one.deadline <= now)
            && self.watchers.iter().all(|one| one.deadline <= now)
    }

    pub(crate) fn tickets(&self) -> usize {
        self.line.len() + self.watchers.len()
    }
}

impl Standing {
    /// Whether it may be served: it looked in time, and its client would hear of it.
    fn lives(&self, peers: &Peers, now: Duration) -> bool {
        self.deadline > now && peers.listens(self.whose.client)
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
