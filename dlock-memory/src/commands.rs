//! Server commands: one function per request, executed whole under the server's lock, by the server's clock.
//!
//! [`Record`] decides what a request makes of a lock. Here is what this store has beyond it: the queue, the turn that
//! is reserved for its first ticket, and the wake-ups, which a command leaves in [`Clients::pushes`].

use crate::{
    error::MemoryError,
    line::{ClientTicket, Clients, Command, Line, QueuePosition, Terms, Turn},
    store::State,
};
use dlock_core::{
    Broken, FencingToken, LockName, Mode, Snapshot,
    driver::{
        Acquire, Acquired, Cursor, Held, Page, Release, Released, Renew, Renewed, Result, Wake,
        kit::{Decision, Record, StoreTime},
    },
};
use std::{ops::Bound, time::Duration};

/// What the server keeps of one name.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    record: Record,
    /// The lock is available, but only to that ticket.
    turn: Option<Turn>,
    pub(crate) line: Line,
}

/// An acquire in progress.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) req: Acquire,
    /// `req.ticket` and `req.next_ticket`, as the server knows them.
    pub(crate) line: Option<ClientTicket>,
    pub(crate) next: Option<ClientTicket>,
    pub(crate) terms: Terms,
    /// Where `line` was in the queue before; `None`: at the end, if it is not queued.
    pub(crate) position: Option<QueuePosition>,
}

/// The answer to an [`Attempt`], and where its tickets are in the queue now.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) acquired: Acquired,
    /// The position of `line`, refused.
    pub(crate) position: Option<QueuePosition>,
    /// The position of `next`, granted.
    pub(crate) next: Option<QueuePosition>,
}

impl From<Acquired> for Answer {
    fn from(acquired: Acquired) -> Self {
        Self {
            acquired,
            position: None,
            next: None,
        }
    }
}

/// Acquires. Run twice, the second run finds its own hold and changes nothing.
pub(crate) fn acquire(state: &mut State, now: Duration, attempt: &Attempt) -> Result<Answer> {
    let name = &attempt.req.name;
    if let Some((entry, mut command)) = state.settled(name, now) {
        return entry.acquire(&mut command, attempt);
    }
    let (mut entry, clients) = (Entry::default(), &mut state.clients);
    let answer = entry.acquire(&mut Command { name, now, clients }, attempt)?;
    if let Acquired::Granted(_) = answer.acquired {
        state.names.insert(name.clone(), entry);
        state.sweep(now);
    }
    Ok(answer)
}

/// Removes a ticket, or passes its turn on. Run twice, the second run finds nothing.
pub(crate) fn leave(state: &mut State, now: Duration, name: &LockName, ticket: ClientTicket) {
    if let Some((entry, mut command)) = state.settled(name, now) {
        let queued = entry.line.forget(ticket);
        let reserved = entry.turn.take_if(|turn| turn.ticket == ticket).is_some();
        if queued || reserved {
            entry.open(&mut command);
            let owner = entry.record.owner;
            if owner.is_some_and(|owner| owner.mode() != Mode::Exclusive) {
                entry.offer(&mut command);
            }
        }
    }
}

/// Renews one hold. Run twice, the lease counts from the second run.
pub(crate) fn renew(state: &mut State, now: Duration, renew: &Renew) -> Renewed {
    match state.settled(&renew.name, now) {
        Some((entry, _)) => entry.write(entry.record.renew(renew, time(now))),
        None => Renewed::NotHeld,
    }
}

/// Removes holds. A release is never late. Run twice, the second run finds nothing.
pub(crate) fn release(state: &mut State, now: Duration, req: &Release) -> Released {
    let Some((entry, mut command)) = state.settled(&req.name, now) else {
        return Released::NotHeld { by: None };
    };
    let released = entry.write(entry.record.release(req, time(now)));
    match released {
        Released::Freed => entry.open(&mut command),
        // The first in the queue is told until when the lock is unavailable.
        Released::MinHold { rest } => entry.line.tell_first(&mut command, rest),
        Released::StillHeld { .. } if matches!(req.owner.mode(), Mode::Permit { .. }) => {
            entry.offer(&mut command);
        }
        _ => {}
    }
    released
}

/// Frees the name. Run twice: without a token the second run ends any incarnation that came in between; with a token it
/// finds another.
pub(crate) fn break_lock(
    state: &mut State,
    now: Duration,
    name: &LockName,
    only: Option<FencingToken>,
) -> Broken {
    let Some((entry, mut command)) = state.settled(name, now) else {
        return Broken::WasFree;
    };
    let mut broken = entry.write(entry.record.break_lock(only, time(now)));
    if broken == Broken::WasFree && entry.turn.is_some() {
        broken = match only {
            Some(_) => Broken::Changed { token: None },
            None => Broken::Freed { token: None },
        };
    }
    if let Broken::Freed { .. } = broken {
        entry.turn = None;
        entry.open(&mut command);
    }
    broken
}

/// Shows one name; changes nothing, not even what is past its end.
pub(crate) fn inspect(state: &State, now: Duration, name: &LockName, wake: Wake) -> Snapshot {
    match state.names.get(name) {
        Some(entry) => entry.snapshot(&state.clients, now, name, wake),
        None => Entry::default().snapshot(&state.clients, now, name, wake),
    }
}

/// One step over the names in their order: visits no more names than the page may have.
pub(crate) fn list(
    state: &State,
    now: Duration,
    wake: Wake,
    (prefix, from, limit): (&str, Option<&Cursor>, usize),
) -> Result<Page> {
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
        let shown = entry.snapshot(&state.clients, now, name, wake);
        if !shown.is_free() {
            found.push(shown);
        }
        next = Some(Cursor([CURSOR, name.as_str().as_bytes()].concat()));
    }
    Ok(Page::new(found, None))
}

impl Entry {
    /// Ends for good what is over, though the server's clock be set back later. Every command that writes does this
    /// first.
    pub(crate) fn settle(&mut self, now: Duration) {
        let (record, time) = (&mut self.record, time(now));
        let holds = std::mem::take(&mut record.holds).living(time.now);
        if !record.is_unavailable(time) {
            *record = record.lapsed();
        }
        record.holds = holds; // none, or a claim, of a lock that is available
        self.turn.take_if(|turn| turn.until <= now);
    }

    fn acquire(&mut self, command: &mut Command<'_>, attempt: &Attempt) -> Result<Answer> {
        let time = time(command.now);
        let decision = self.record.acquire(&attempt.req, time)?;
        let granted = match decision.answer {
            Acquired::Granted(_) => decision.answer,
            Acquired::Held(held) => return Ok(self.refuse(command, attempt, held)),
            gone => return Ok(gone.into()),
        };
        let Some(record) = decision.write else {
            return Ok(granted.into());
        };
        let share = attempt.req.share();
        let is_admitted = match self.record.is_unavailable(time) {
            false => attempt.req.restores() || self.admits(command, attempt),
            // A re-entry passes the queue, a sharer does not.
            true => share.is_none() || self.line.is_first(command, attempt.line),
        };
        if !is_admitted {
            let mut held = Held::default();
            held.by = self.record.holder(time);
            return Ok(self.refuse(command, attempt, held));
        }
        self.record = record;
        self.turn = None;
        if let Some(used) = attempt.line {
            self.line.forget(used);
        }
        let mut answer = Answer::from(granted);
        if let Some(ticket) = attempt.next {
            answer.next = self.line.put(command, ticket, attempt.terms, None);
        }
        if share.is_some_and(|most| self.record.holds.len() < most) {
            self.offer(command);
        }
        Ok(answer)
    }

    /// Whether a lock that is available goes to this attempt. If not, the first in the queue has its turn.
    fn admits(&mut self, command: &mut Command<'_>, attempt: &Attempt) -> bool {
        if let Some(turn) = self.turn {
            return Some(turn.ticket) == attempt.line;
        }
        if !self.line.is_empty() {
            // Queued first, so that its old position counts.
            self.queue(command, attempt);
            self.turn = self.line.serve(command, attempt.line);
        }
        self.turn.is_none()
    }

    /// Refuses, and keeps the ticket in the queue.
    fn refuse(&mut self, command: &mut Command<'_>, attempt: &Attempt, mut held: Held) -> Answer {
        if let Some(interval) = attempt.terms.without_queue()
            && let Some(claimed) = self
                .record
                .claimed(&attempt.req, time(command.now), interval)
        {
            self.record = claimed;
        }
        let position = self.queue(command, attempt);
        let ahead = position.map(|position| self.line.ahead(position));
        let rest = held.poll_in.or(self.turn_left(command.now));
        held.poll_in = Some(attempt.terms.poll_in(rest.unwrap_or_default(), ahead));
        held.ahead = ahead.and_then(|ahead| u32::try_from(ahead).ok());
        Answer {
            position,
            ..Acquired::Held(held).into()
        }
    }

    /// Queues the ticket, where it was before if it knows.
    fn queue(&mut self, command: &mut Command<'_>, attempt: &Attempt) -> Option<QueuePosition> {
        let (ticket, position) = (attempt.line?, attempt.position);
        self.line.put(command, ticket, attempt.terms, position)
    }

    /// Gives the lock, if it is free, to the first in the queue, or notifies the clients that watch it.
    fn open(&mut self, command: &mut Command<'_>) {
        if self.turn.is_none() && !self.record.is_unavailable(time(command.now)) {
            self.turn = self.line.serve(command, None);
            if self.turn.is_none() {
                self.line.tell_watchers(command);
            }
        }
    }

    /// Tells those who wait that another sharer may enter.
    fn offer(&mut self, command: &mut Command<'_>) {
        self.line.tell_first(command, Duration::ZERO);
        self.line.tell_watchers(command);
    }

    /// Decided and written in one step of the server, so that no decision is ever too late to write.
    fn write<A>(&mut self, decision: Decision<A>) -> A {
        if let Some(record) = decision.write {
            self.record = record;
        }
        decision.answer
    }

    fn turn_left(&self, now: Duration) -> Option<Duration> {
        let left = self.turn?.until.saturating_sub(now);
        (!left.is_zero()).then_some(left)
    }

    fn snapshot(&self, clients: &Clients, now: Duration, name: &LockName, wake: Wake) -> Snapshot {
        let mut shown = self.record.snapshot(name.clone(), time(now));
        if shown.holders.is_empty() {
            shown.unavailable_for = shown.unavailable_for.or(self.turn_left(now));
        }
        if wake == Wake::Queue {
            shown.waiters = u32::try_from(self.line.waiters(clients, now)).ok();
        }
        shown
    }

    /// Whether nothing but the token counter is left, and that is no longer needed.
    pub(crate) fn is_forgettable(&self, now: Duration) -> bool {
        self.record.is_forgettable(time(now))
            && self.turn_left(now).is_none()
            && self.line.is_over(now)
    }
}

fn name_of(cursor: &Cursor) -> Result<LockName> {
    let name = cursor.0.strip_prefix(CURSOR).map(std::str::from_utf8);
    let name = name.and_then(|name| name.ok()?.parse().ok());
    name.ok_or(MemoryError::Cursor.into())
}

/// The server's time as records have it.
fn time(now: Duration) -> StoreTime {
    StoreTime::wall(u64::try_from(now.as_micros()).unwrap_or(u64::MAX))
}

/// The most names that one step of a walk visits.
const LONGEST_PAGE: usize = 1000;

/// The first bytes of a cursor; the name it stands behind follows.
const CURSOR: &[u8] = b"after:";
