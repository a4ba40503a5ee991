//! Waiting loop: one for stores that queue and notify, that only notify, and that only answer.
//!
//! Waiters of a client stand in a local queue, first in, first out. Only its head talks to the store. It
//! attempts with the queue's ticket when a wake-up came or the poll time is reached, whichever is first,
//! and sleeps in between. A wake-up only ever triggers a poll, so one that is lost, late or wrong costs
//! time and nothing else. A waiter that leaves passes head and ticket on.

use super::{
    closing, gone,
    pending::{Answer, Pending},
    trouble::Trouble,
};
use crate::{
    book::{Queue, Seat, Waiter},
    caller::Caller,
    clock::Instant,
    driver::{Held, Wake},
    error::{Error, about},
    flaw::Flaw,
    guard::Guard,
    hold::Hold,
    identity::Ticket,
    inner::Inner,
    lease::Lease,
    name::LockName,
};
use std::{sync::Arc, time::Duration};

/// The longest time between two polls, even on a store that notifies: the most that a lost wake-up costs.
const LOOK_AT_MOST: Duration = Duration::from_secs(2);

/// How long a store may fail while a task waits without a limit: one lease, within these bounds.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

pub(super) struct Wait {
    pending: Pending,
    place: Place,
    given: bool,
    end: Instant,
    began: Instant,
    interval: Duration,
    trouble: Trouble,
    /// When a given owner, which may hold the lock through another client, asks again past the queue.
    ask_at: Instant,
    /// The log has said once that this very task is the holder.
    told: bool,
    /// The store's last refusal, if any.
    last: Option<Held>,
}

/// A waiter's place in the queue of its lock.
#[derive(Default)]
struct Place {
    waiter: Arc<Waiter>,
    /// Set while the waiter is in the queue.
    seat: Option<Seat>,
}

enum Step {
    Attempt {
        line: Option<Ticket>,
        next: Option<Ticket>,
        look: bool,
    },
    Sleep(Instant),
}

impl Wait {
    pub(super) fn new(pending: Pending, given: bool, lease: Lease, end: Instant) -> Self {
        let length = lease.length();
        let within = pending.attempt_within();
        Self {
            pending,
            place: Place::default(),
            given,
            end,
            began: Instant::ORIGIN,
            interval: (length / 3).min(LOOK_AT_MOST),
            trouble: Trouble::new(length.clamp(PATIENCE.0, PATIENCE.1), within),
            ask_at: Instant::ORIGIN,
            told: false,
            last: None,
        }
    }

    pub(super) async fn granted(
        &mut self,
        inner: &Arc<Inner>,
        name: &LockName,
    ) -> Result<Guard, Error> {
        let mut now = inner.clock.now();
        self.began = now;
        loop {
            if inner.is_closing() {
                return Err(closing());
            }
            if now >= self.end {
                return Err(self.timeout(inner, name));
            }
            match self.step(inner, name, now) {
                Step::Sleep(until) => {
                    tokio::select! {
                        biased;
                        () = self.place.waiter.wake.notified() => {}
                        () = inner.shutting_down() => {}
                        () = inner.clock.sleep_until(until.min(self.end)) => {}
                    }
                }
                Step::Attempt { line, next, look } => {
                    let answer = tokio::select! {
                        biased;
                        answer = self.pending.attempt((line, next), look, now, self.end) => answer,
                        () = inner.shutting_down_meanwhile() => return Err(closing()),
                    };
                    if let Some(guard) = self.judge(inner, name, answer, line, next)? {
                        return Ok(guard);
                    }
                }
            }
            now = inner.clock.now();
        }
    }

    /// Decides the next step.
    fn step(&mut self, inner: &Arc<Inner>, name: &LockName, now: Instant) -> Step {
        let past = Step::Attempt {
            line: None,
            next: None,
            look: false,
        };
        if self.given && self.place.seat.is_none() {
            // A given owner makes its first attempt past every queue.
            return if now >= self.ask_at {
                past
            } else {
                Step::Sleep(self.ask_at)
            };
        }
        let mut book = inner.book();
        let queue = &mut book.page(name).queue;
        self.place.enter(queue, inner.flawed(Flaw::LastInFirstOut));
        if !self.place.is_head(queue) {
            return match self.given {
                true if inner.flawed(Flaw::OwnerAsksOnce) => Step::Sleep(Instant::FAR),
                true if now >= self.ask_at => past,
                true => Step::Sleep(self.ask_at),
                false => Step::Sleep(Instant::FAR),
            };
        }
        let at = if queue.poked {
            Instant::ORIGIN
        } else {
            queue.look_at
        };
        let at = at.max(queue.not_before);
        if now < at {
            return Step::Sleep(at);
        }
        queue.poked = false;
        let others = queue.len() > 1 && !inner.flawed(Flaw::NextStandsLate);
        Step::Attempt {
            line: Some(*queue.ticket.get_or_insert_with(|| inner.ticket())),
            next: others.then(|| *queue.next.get_or_insert_with(|| inner.ticket())),
            look: queue.looks > 0,
        }
    }

    fn judge(
        &mut self,
        inner: &Arc<Inner>,
        name: &LockName,
        answer: Answer,
        line: Option<Ticket>,
        next: Option<Ticket>,
    ) -> Result<Option<Guard>, Error> {
        let now = inner.clock.now();
        match answer {
            Answer::Granted(grant, sent) => {
                let arrival = Arrival {
                    as_head: line.is_some(),
                    next: next.is_some(),
                    open: self.pending.is_open(),
                    // A store without wake-ups gains nothing from being asked now.
                    stands: inner.caps.wake == Wake::Poll,
                    look_at: now + self.interval,
                    now,
                };
                let mut unwanted = [None, None];
                let guard = self.pending.succeed(grant, (sent, now), line, |queue| {
                    unwanted = self.place.arrive(queue, &arrival);
                })?;
                if let Some(guard) = guard {
                    for ticket in unwanted.into_iter().flatten() {
                        inner.leave_line(name, ticket);
                    }
                    return Ok(Some(guard));
                }
                inner.store_answers(name);
                if let (Some(line), Some(page)) = (line, inner.book().find(name)) {
                    // A worthless grant used the ticket up.
                    let queue = &mut page.queue;
                    if queue.ticket == Some(line) {
                        queue.ticket = queue.next.take().filter(|_| next.is_some());
                    }
                }
                self.trouble.too_late(now)?;
                self.again_after_trouble(inner, name, line.is_some(), now);
            }
            Answer::Held(held) => {
                inner.store_answers(name);
                self.trouble.over();
                self.refused(inner, name, held, line.is_some(), now);
            }
            Answer::Gone => {
                inner.store_answers(name);
                if !self.pending.unjoin() {
                    return Err(gone());
                }
            }
            Answer::Failed(error) => {
                self.share_trouble(inner, name, now);
                self.trouble.failed(error, now)?;
                self.again_after_trouble(inner, name, line.is_some(), now);
            }
            Answer::Unanswered => {
                self.share_trouble(inner, name, now);
                self.trouble.unanswered(now)?;
                self.again_after_trouble(inner, name, line.is_some(), now);
            }
        }
        Ok(None)
    }

    /// Another owner holds the lock: sets when to poll again.
    fn refused(
        &mut self,
        inner: &Arc<Inner>,
        name: &LockName,
        held: Held,
        as_head: bool,
        now: Instant,
    ) {
        let own = {
            let mut book = inner.book();
            let page = book.page(name);
            let own = page.live(&inner.clock);
            if as_head && self.place.is_head(&page.queue) {
                let pause = match inner.caps.wake {
                    _ if inner.flawed(Flaw::EagerLooks) => SHORTEST,
                    // This client holds the lock, so the store is not polled often: its release wakes the
                    // queue.
                    Wake::Poll if own.is_some() => self.interval,
                    Wake::Poll => inner.poll_pause(page.queue.looks, held.poll_in),
                    _ => held
                        .poll_in
                        .map_or(self.interval, |rest| rest.min(self.interval)),
                };
                page.queue.looks = page.queue.looks.saturating_add(1);
                page.queue.look_at = now + pause.max(SHORTEST);
            }
            self.place
                .enter(&mut page.queue, inner.flawed(Flaw::LastInFirstOut));
            own
        };
        self.last = Some(held);
        self.ask_at = now + self.interval;
        if let Some(own) = own
            && own.by == Caller::current()
            && !self.told
        {
            self.told = true;
            tracing::info!(
                target: "dlock::acquire", lock = %name, backend = inner.caps.backend,
                "waiting for a lock that {}", itself(&own, now)
            );
        }
    }

    /// The store fails, whatever waiter is the head: the queue has one failure limit, not one for each
    /// waiter.
    fn share_trouble(&mut self, inner: &Arc<Inner>, name: &LockName, now: Instant) {
        if inner.flawed(Flaw::PatienceNotShared) {
            return;
        }
        if let Some(page) = inner
            .book()
            .find(name)
            .filter(|page| self.place.is_head(&page.queue))
        {
            self.trouble.inherit(*page.queue.failing.get_or_insert(now));
        }
    }

    fn again_after_trouble(
        &mut self,
        inner: &Arc<Inner>,
        name: &LockName,
        as_head: bool,
        now: Instant,
    ) {
        let again = now + self.trouble.pause(inner.jitter());
        self.ask_at = again;
        if as_head && let Some(page) = inner.book().find(name) {
            page.queue.look_at = again;
            page.queue.not_before = again;
        }
    }

    fn timeout(&mut self, inner: &Arc<Inner>, name: &LockName) -> Error {
        let now = inner.clock.now();
        let failing = (inner.book().find(name)).is_some_and(|page| page.queue.failing.is_some());
        // One poll that only the end of the wait cut short says nothing about the store.
        let cut = self.last.is_some() && self.trouble.attempts() <= 1;
        if (self.trouble.attempts() > 0 || failing) && !cut {
            return self.trouble.timeout(now.since(self.began));
        }
        inner.not_acquired(name, now.since(self.began), self.last.as_ref())
    }

    /// Leaves the queue without the lock. This waiter's tickets go to the next one, or are returned to be
    /// given up.
    fn withdraw(&mut self) -> Vec<Ticket> {
        let Some(seat) = self.place.seat.take() else {
            return Vec::new();
        };
        let open = self.pending.is_open();
        let (inner, name) = self.pending.of();
        let mut book = inner.book();
        let Some(page) = book.find(name) else {
            return Vec::new();
        };
        let queue = &mut page.queue;
        let mut unwanted = Vec::new();
        if queue.remove(seat) {
            if open {
                // The attempt in flight may yet use the ticket up: the next head enters the store's queue
                // with its own.
                unwanted.extend(queue.ticket.take());
                queue.ticket = queue.next.take();
                queue.poked = true;
            }
            if queue.len() == 0 {
                unwanted.extend(queue.ticket.take());
                unwanted.extend(queue.next.take().filter(|_| open));
                queue.failing = None; // it belonged to the waiters that left
            }
            queue.wake_head();
        }
        book.tidy(name);
        if inner.flawed(Flaw::NeverLeaves) || inner.caps.wake == Wake::Poll {
            unwanted.clear();
        }
        unwanted
    }
}

/// What the queue has to know about a grant.
struct Arrival {
    /// It came to the head's ticket.
    as_head: bool,
    /// With it, the `next` ticket entered the store's queue.
    next: bool,
    /// An attempt before it was not answered.
    open: bool,
    /// The next head need not ask at once.
    stands: bool,
    look_at: Instant,
    now: Instant,
}

impl Place {
    /// Enters the queue.
    fn enter(&mut self, queue: &mut Queue, second: bool) {
        if self.seat.is_some() {
            return;
        }
        self.seat = Some(if second {
            queue.enter_first_but_one(&self.waiter)
        } else {
            queue.enter(&self.waiter)
        });
        if queue.len() == 1 {
            queue.begin();
        }
    }

    fn is_head(&self, queue: &Queue) -> bool {
        self.seat.is_some_and(|seat| queue.is_head(seat))
    }

    /// Leaves the queue with the lock, and the next waiter becomes the head. Returns the tickets that no
    /// waiter needs any more.
    fn arrive(&mut self, queue: &mut Queue, arrival: &Arrival) -> [Option<Ticket>; 2] {
        let mut unwanted = [None, None];
        queue.failing = None;
        if !self.seat.take().is_some_and(|seat| queue.remove(seat)) {
            return unwanted; // granted past the queue, which waits on
        }
        if arrival.as_head {
            // An unanswered attempt may have put its `next` ticket in the queue, though this one did not.
            let brought = queue.next.take();
            queue.ticket = brought.filter(|_| arrival.next);
            unwanted[0] = brought.filter(|_| !arrival.next && arrival.open);
            // A next head without a ticket in the queue asks at once to get one.
            let stands = queue.ticket.is_some() || arrival.stands;
            queue.look_at = if stands { arrival.look_at } else { arrival.now };
        }
        queue.looks = 0;
        queue.not_before = Instant::ORIGIN;
        queue.poked = std::mem::take(&mut queue.poked_next) && arrival.next;
        if queue.len() == 0 {
            unwanted[1] = queue.ticket.take();
        }
        queue.wake_head();
        unwanted
    }
}

/// Says which task of this client holds the lock, which explains the usual self-deadlock.
pub(super) fn itself(own: &Hold, now: Instant) -> String {
    let (whose, hint) = if own.by == Caller::current() {
        let hint = ": unless another branch of it releases the lock, it waits for itself (guard.scope, or a pass, re-enters)";
        ("this very task", hint)
    } else {
        ("another task of this client", "")
    };
    let ago = about(now.since(own.since));
    format!("{whose} acquired at {}, {ago} ago{hint}", own.at)
}

impl Drop for Wait {
    fn drop(&mut self) {
        let tickets = self.withdraw();
        self.pending.abandon(tickets);
    }
}

/// The shortest pause between two polls without a wake-up.
const SHORTEST: Duration = Duration::from_millis(1);

impl Inner {
    /// The store answered some caller, so the failures of the waiters for that name are over.
    pub(super) fn store_answers(&self, name: &LockName) {
        if let Some(page) = self.book().find(name) {
            page.queue.failing = None;
        }
    }

    /// The pause before the next poll of a store without wake-ups: 1 ms, 2 ms, 4 ms … up to the poll
    /// interval, jittered 50–100 %, or until the lease that the store told of must be over.
    fn poll_pause(&self, looks: u32, rest: Option<Duration>) -> Duration {
        let step = SHORTEST
            .saturating_mul(1 << looks.min(20))
            .min(self.poll_interval);
        let jittered = step.mul_f64(0.5 + self.jitter() / 2.0);
        rest.map_or(jittered, |rest| jittered.min(rest.saturating_add(SHORTEST)))
    }
}
