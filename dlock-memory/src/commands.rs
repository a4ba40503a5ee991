//! Server commands: one function per request, executed whole under the server's lock, by the server's
//! clock.
//!
//! A function gets the state, the time and the request. It leaves what is to be sent in [`Peers::pushes`].

use crate::{
    config::{LONGEST_LOOK, Terms},
    error::MemoryError,
    hints::{ClientId, Line, Peers, Place, Reservation, Served, Standee},
    store::State,
};
use dlock_core::{
    Broken, FencingToken, HoldId, Holder, HolderInfo, Holds, LockName, MAX_HOLDS, Owner, Snapshot,
    driver::{
        Acquire, Acquired, Cursor, Grant, Held, Page, Release, Released, Renew, Renewed, Ticket,
        Wake,
    },
};
use std::{num::NonZeroU32, ops::Bound, sync::Arc, time::Duration};

/// The record of one name. Times are the server's, since the Unix epoch.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// The last token given out; survives every incarnation.
    token: u64,
    inside: Option<Incarnation>,
    /// The minimum hold of an incarnation that is over: the lock is unavailable until then.
    shut_until: Duration,
    reserved: Option<Reservation>,
    pub(crate) line: Line,
    /// When the last of everything above but the token was over, or will be if no request comes.
    busy_until: Duration,
}

/// From the first hold to the last.
#[derive(Debug)]
struct Incarnation {
    owner: Owner,
    since: Duration,
    /// The longest `min_hold` that a release brought.
    keep_until: Duration,
    /// Never empty; at most [`MAX_HOLDS`].
    holds: Vec<Hold>,
}

#[derive(Debug)]
struct Hold {
    id: HoldId,
    end: Duration,
    note: Arc<HolderInfo>,
}

/// An acquire in progress.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) req: Acquire,
    pub(crate) client: ClientId,
    pub(crate) terms: Terms,
    /// Where the ticket stood before; `None`: at the end, if it is not in the queue yet.
    pub(crate) place: Option<Place>,
    /// The request's not-after: later than this server time it must do nothing.
    pub(crate) not_after: Duration,
}

/// The answer to an [`Ask`], and where its tickets are in the queue now.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) acquired: Acquired,
    /// The place of `req.line`, refused.
    pub(crate) place: Option<Place>,
    /// The place of `req.next`, granted.
    pub(crate) next: Option<Place>,
}

impl Asked {
    fn only(acquired: Acquired) -> Self {
        Self {
            acquired,
            place: None,
            next: None,
        }
    }
}

/// Acquires. Run twice, the second run finds its own hold and changes nothing.
pub(crate) fn acquire(state: &mut State, now: Duration, ask: &Ask) -> Result<Asked, MemoryError> {
    in_time(now, ask.not_after)?;
    match state.names.get_mut(&ask.req.name) {
        Some(entry) => entry.acquire(&mut state.peers, now, ask),
        None if ask.req.join.is_some() => Ok(Asked::only(Acquired::Gone)),
        None => {
            let mut entry = Entry::default();
            let asked = entry.take(&mut state.peers, now, ask);
            state.names.insert(ask.req.name.clone(), entry);
            state.sweep(now);
            Ok(asked)
        }
    }
}

/// Removes a ticket, or hands on what was reserved for it. Run twice, the second run finds nothing.
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
    let reserved = entry.reserved.is_some_and(|one| one.whose == whose);
    if reserved {
        entry.reserved = None;
    }
    if reserved || stood {
        entry.open(&mut state.peers, name, now);
    }
}

/// Renews one hold. Run twice, the lease counts from the second run.
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

/// Removes holds. A release is never late. Run twice, the second run finds nothing.
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

/// Frees the name. Run twice: without a token the second run ends any incarnation that came in between;
/// with a token it finds another.
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
    let free = Entry::default();
    let entry = state.names.get(name).unwrap_or(&free);
    entry.snapshot(&state.peers, now, name, wake)
}

/// One step over the names in their order: visits no more names than the page may have.
pub(crate) fn list(
    state: &State,
    now: Duration,
    wake: Wake,
    (prefix, from, limit): (&str, Option<&Cursor>, usize),
) -> Result<Page, MemoryError> {
    // A prefix that is no legal name is either empty, and every name matches, or no name matches.
    let first = LockName::new(prefix).map_or(Bound::Unbounded, Bound::Included);
    let from = match from.map(name_of).transpose()? {
        Some(name) if name.as_str() >= prefix => Bound::Excluded(name),
        _ => first,
    };
    let (mut found, mut next) = (Vec::new(), None);
    let names = state.names.range((from, Bound::Unbounded));
    let under = names.take_while(|(name, _)| name.as_str().starts_with(prefix));
    for (seen, (name, entry)) in under.enumerate() {
        if seen == limit.clamp(1, LONGEST_PAGE) {
            return Ok(Page::new(found, next));
        }
        let shown = entry.snapshot(&state.peers, now, name, wake);
        if !shown.holders.is_empty() || shown.shut.is_some() {
            found.push(shown);
        }
        next = Some(Cursor([CURSOR, name.as_str().as_bytes()].concat()));
    }
    Ok(Page::new(found, None))
}

/// The time at which a request may act, or the error that it came too late. Nothing waits between this
/// check and the effect.
pub(crate) fn in_time(now: Duration, not_after: Duration) -> Result<(), MemoryError> {
    if now > not_after {
        return Err(MemoryError::Late { now, not_after });
    }
    Ok(())
}

impl Ask {
    fn ticket(&self) -> Option<Standee> {
        self.req.line.map(|ticket| self.whose(ticket))
    }

    fn whose(&self, ticket: Ticket) -> Standee {
        let client = self.client;
        Standee { client, ticket }
    }
}

impl Entry {
    /// Drops what is over. Every command that writes does this first, so nothing past its end is ever used.
    fn settle(&mut self, now: Duration) {
        if let Some(inside) = &mut self.inside {
            inside.holds.retain(|hold| hold.end > now);
            if inside.holds.is_empty() {
                // The last hold lapsed, so the lease alone decides: a minimum hold of an earlier release
                // ends with it.
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
            _ if join.is_some() => return Ok(Asked::only(Acquired::Gone)),
            (Some(_), _) => return Ok(self.refuse(peers, now, ask)),
            (None, Some(reserved)) if Some(reserved.whose) != me => {
                return Ok(self.refuse(peers, now, ask));
            }
            (None, Some(_)) => return Ok(self.take(peers, now, ask)),
            (None, None) if self.shut_until > now => return Ok(self.refuse(peers, now, ask)),
            (None, None) if self.line.is_empty() => return Ok(self.take(peers, now, ask)),
            (None, None) => {}
        }
        // Free, with a queue: the requester is queued first, so that its old place counts, and then the
        // queue is served.
        self.stand(peers, now, ask);
        match self.line.serve(peers, &ask.req.name, now, me) {
            Served::Me | Served::Nobody => Ok(self.take(peers, now, ask)),
            Served::Next(reservation) => {
                self.reserved = Some(reservation);
                Ok(self.refuse(peers, now, ask))
            }
        }
    }

    /// Begins a new incarnation. Only for a lock that is not held.
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

    /// Enters the incarnation that this owner already has.
    fn reenter(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        ask: &Ask,
    ) -> Result<Asked, MemoryError> {
        if ask.req.join.is_some_and(|token| token.0 != self.token) {
            return Ok(Asked::only(Acquired::Gone));
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

    /// Adds one hold. The ticket is used up, and the client's next ticket goes to the end.
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
            let whose = ask.whose(ticket);
            granted.next = self.line.put(peers, now, whose, (ask.terms, None));
        }
        granted
    }

    fn grant(&self, valid_for: Duration) -> Asked {
        let token = FencingToken(self.token);
        let holds = count(self.holds()).unwrap_or(NonZeroU32::MIN);
        Asked::only(Acquired::Granted(Grant::new(token, holds, valid_for)))
    }

    /// Refuses, and keeps the ticket in the queue.
    fn refuse(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Asked {
        let place = self.stand(peers, now, ask);
        let ahead = place.map(|place| self.line.ahead(place));
        let rest = self.closed_until().saturating_sub(now);
        let mut held = Held::default();
        held.by = self.holder(now);
        held.poll_in = Some(match ask.terms.wake {
            Wake::Line if ahead == Some(0) => rest.min(ask.terms.interval),
            Wake::Line => ask.terms.interval,
            Wake::Hints => rest.min(LONGEST_LOOK),
            _ => rest,
        });
        held.ahead = ahead.and_then(|ahead| u32::try_from(ahead).ok());
        Asked {
            place,
            ..Asked::only(Acquired::Held(held))
        }
    }

    /// Queues the ticket, where it stood before if it knows.
    fn stand(&mut self, peers: &mut Peers, now: Duration, ask: &Ask) -> Option<Place> {
        self.line
            .put(peers, now, ask.ticket()?, (ask.terms, ask.place))
    }

    /// Ends an incarnation that has no hold and no minimum hold left.
    fn end(&mut self, now: Duration) {
        self.inside = None;
        self.reserved = None;
        self.shut_until = Duration::ZERO;
        self.busy_until = now;
    }

    /// Keeps the lock unavailable; the first in the queue is told until when.
    fn shut(&mut self, peers: &mut Peers, name: &LockName, now: Duration, until: Duration) {
        self.shut_until = until;
        self.busy_until = until;
        self.line.tell_first(peers, name, now, until - now);
    }

    /// If the name is free: serves the queue, or notifies the clients that watch it.
    fn open(&mut self, peers: &mut Peers, name: &LockName, now: Duration) {
        if self.closed_until() > now {
            return;
        }
        match self.line.serve(peers, name, now, None) {
            Served::Next(reservation) => self.reserved = Some(reservation),
            Served::Me | Served::Nobody => self.line.tell_watchers(peers, name, now),
        }
    }

    /// When the latest hold, the minimum hold and the reservation are over; not in the future: free.
    fn closed_until(&self) -> Duration {
        let held = self.holds().iter().map(|hold| hold.end).max();
        let reserved = self.reserved.map(|reserved| reserved.until);
        self.shut_until.max(held.max(reserved).unwrap_or_default())
    }

    /// The holds of the incarnation, including those past their end that no command has removed yet.
    fn holds(&self) -> &[Hold] {
        self.inside.as_ref().map_or(&[], |inside| &inside.holds)
    }

    fn living(&self, now: Duration) -> impl Iterator<Item = &Hold> {
        self.holds().iter().filter(move |hold| hold.end > now)
    }

    /// The holder: its first living hold speaks for it, the last one to end gives the remaining time.
    fn holder(&self, now: Duration) -> Option<Holder> {
        let owner = &self.inside.as_ref()?.owner;
        let first = self.living(now).next()?;
        let end = self.living(now).map(|hold| hold.end).max()?;
        let mut holder = Holder::new(owner.fingerprint());
        holder.token = Some(FencingToken(self.token));
        holder.rest = Some(end - now);
        holder.note = HolderInfo::clone(&first.note);
        Some(holder)
    }

    fn snapshot(&self, peers: &Peers, now: Duration, name: &LockName, wake: Wake) -> Snapshot {
        let mut shown = Snapshot::free(name.clone());
        shown.holders.extend(self.holder(now));
        shown.holds = self.living(now).map(|_| 1).sum();
        if shown.holds == 0 {
            let until = self.closed_until();
            shown.shut = until.checked_sub(now).filter(|rest| !rest.is_zero());
        } else if let Some(inside) = &self.inside {
            shown.age = Some(now.saturating_sub(inside.since));
        }
        if wake == Wake::Line {
            shown.waiters = u32::try_from(self.line.waiters(peers, now)).ok();
        }
        shown
    }

    /// Whether a day has passed since the name was last busy, and since its token was the present time. A
    /// server's clock that is set back by less than that still gives greater tokens than the forgotten one.
    pub(crate) fn is_forgettable(&self, now: Duration) -> bool {
        let issued = Duration::from_micros(self.token);
        let idle = self.busy_until.max(issued).saturating_add(TOKEN_KEPT);
        idle <= now && self.line.is_over(now)
    }
}

/// The number of holds; `None` is none.
fn count(holds: &[Hold]) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(holds.len()).ok()?)
}

fn name_of(cursor: &Cursor) -> Result<LockName, MemoryError> {
    let name = cursor.0.strip_prefix(CURSOR).map(std::str::from_utf8);
    let name = name.and_then(|name| name.ok()?.parse().ok());
    name.ok_or(MemoryError::Cursor)
}

/// How long a token counter outlives its name, at least. This bounds how far a server's clock may be set
/// back.
const TOKEN_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The most names that one step of a walk visits.
const LONGEST_PAGE: usize = 1000;

/// The first bytes of a cursor; the name it stands behind follows.
const CURSOR: &[u8] = b"after:";
