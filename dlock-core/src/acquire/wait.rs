//! The one waiting loop, for stores that queue and push, that only notify, and that only answer.
//!
//! Waiters of a client stand in a local queue, first in, first out. Its head talks to the store: it attempts with the queue's ticket
//! when a wake-up came or the time to look has come, whichever is first, and sleeps in between. A wake-up is only ever a reason to
//! look, so one that is lost, late or wrong costs time and nothing else. Whoever leaves hands head and ticket on.

use super::{
    closing, gone,
    pending::{Answer, Pending},
    trouble::Trouble,
};
use crate::{
    book::{Queue, Waiter},
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

/// The longest time between two looks, also where the store pushes: what a lost wake-up costs at most.
const LOOK_AT_MOST: Duration = Duration::from_secs(2);

/// How long a store may fail while somebody waits without a limit: one lease, within these.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

pub(super) struct Wait {
    pending: Pending,
    place: Place,
    given: bool,
    end: Instant,
    began: Instant,
    interval: Duration,
    trouble: Trouble,
    /// When an owner that was given, and may be inside through another client, asks again past the queue.
    ask_at: Instant,
    /// It was said once that the holder is this very client.
    told: bool,
    /// What the store said last, if it said anything.
    last: Option<Held>,
}

/// Where somebody stands in the queue of his name.
#[derive(Default)]
struct Place {
    waiter: Arc<Waiter>,
    queued: bool,
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
                        () = inner.revoked() => {}
                        () = inner.clock.sleep_until(until.min(self.end)) => {}
                    }
                }
                Step::Attempt { line, next, look } => {
                    let answer = tokio::select! {
                        biased;
                        answer = self.pending.attempt((line, next), look, now, self.end) => answer,
                        () = inner.revoked_meanwhile() => return Err(closing()),
                    };
                    if let Some(guard) = self.judge(inner, name, answer, line, next)? {
                        return Ok(guard);
                    }
                }
            }
            now = inner.clock.now();
        }
    }

    /// What to do now.
    fn step(&mut self, inner: &Arc<Inner>, name: &LockName, now: Instant) -> Step {
        let past = Step::Attempt {
            line: None,
            next: None,
            look: false,
        };
        if self.given && !self.place.queued {
            // An owner that was given makes its first attempt past every queue.
            return if now >= self.ask_at {
                past
            } else {
                Step::Sleep(self.ask_at)
            };
        }
        let mut book = inner.book();
        let queue = &mut book.page(name).queue;
        self.place.enter(queue, inner.flawed(Flaw::LastInFirstOut));
        if !queue.is_head(&self.place.waiter) {
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
                    // A store that only answers is told nothing by asking it now.
                    stands: inner.caps.wake == Wake::Poll,
                    look_at: now + self.interval,
                    now,
                };
                let mut unwanted = [None, None];
                let guard = self.pending.succeed(grant, (sent, now), line, |queue| {
                    unwanted = self.place.arrive(queue, &arrival);
                });
                if let Some(guard) = guard {
                    for ticket in unwanted.into_iter().flatten() {
                        inner.leave_line(name, ticket);
                    }
                    return Ok(Some(guard));
                }
                inner.store_answers(name);
                if let (Some(line), Some(page)) = (line, inner.book().find(name)) {
                    // The ticket was used up by a grant that is worth nothing.
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

    /// Held by another: when to look again.
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
            if as_head && page.queue.is_head(&self.place.waiter) {
                let pause = match inner.caps.wake {
                    _ if inner.flawed(Flaw::EagerLooks) => SHORTEST,
                    // A lock of this client is not waited for at the store: its release pokes the queue.
                    Wake::Poll if own.is_some() => self.interval,
                    Wake::Poll => inner.poll_pause(page.queue.looks, held.look_in),
                    _ => held
                        .look_in
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
            && !self.told
        {
            self.told = true;
            tracing::info!(
                target: "dlock::acquire", lock = %name, backend = inner.caps.backend,
                "waiting for a lock that {}", itself(&own, now)
            );
        }
    }

    /// The store fails whoever is the head: the patience of the queue is one, not one for each in it.
    fn share_trouble(&mut self, inner: &Arc<Inner>, name: &LockName, now: Instant) {
        if inner.flawed(Flaw::PatienceNotShared) {
            return;
        }
        if let Some(page) = inner
            .book()
            .find(name)
            .filter(|page| page.queue.is_head(&self.place.waiter))
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
        // One look that only the end of the wait cut short says nothing about the store.
        let cut = self.last.is_some() && self.trouble.attempts() <= 1;
        if (self.trouble.attempts() > 0 || failing) && !cut {
            return self.trouble.timeout(now.since(self.began));
        }
        inner.not_acquired(name, now.since(self.began), self.last.as_ref())
    }

    /// Out of the queue without the lock: what this waiter stood in line with goes to the next one, or is given up.
    fn withdraw(&mut self) -> Vec<Ticket> {
        if !std::mem::take(&mut self.place.queued) {
            return Vec::new();
        }
        let open = self.pending.is_open();
        let (inner, name) = self.pending.of();
        let mut book = inner.book();
        let Some(page) = book.find(name) else {
            return Vec::new();
        };
        let queue = &mut page.queue;
        let mut unwanted = Vec::new();
        if queue.remove(&self.place.waiter) {
            if open {
                // The attempt under way may yet use the ticket up: the next head stands in line with one of its own.
                unwanted.extend(queue.ticket.take());
                queue.ticket = queue.next.take();
                queue.poked = true;
            }
            if queue.len() == 0 {
                unwanted.extend(queue.ticket.take());
                unwanted.extend(queue.next.take().filter(|_| open));
                queue.failing = None; // the trouble of whoever waited
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

/// A grant, as the queue has to know of it.
struct Arrival {
    /// It came to the head's ticket, and with it another ticket stands.
    as_head: bool,
    next: bool,
    /// An attempt before it was not answered.
    open: bool,
    /// Whoever is next need not ask at once.
    stands: bool,
    look_at: Instant,
    now: Instant,
}

impl Place {
    /// In the queue from now on.
    fn enter(&mut self, queue: &mut Queue, second: bool) {
        if std::mem::replace(&mut self.queued, true) {
            return;
        }
        if second {
            queue.enter_first_but_one(&self.waiter);
        } else {
            queue.enter(&self.waiter);
        }
        if queue.len() == 1 {
            queue.begin();
        }
    }

    /// Out of the queue with the lock: the next one in it becomes the head. Says which tickets nobody wants any more.
    fn arrive(&mut self, queue: &mut Queue, arrival: &Arrival) -> [Option<Ticket>; 2] {
        let mut unwanted = [None, None];
        queue.failing = None;
        if !std::mem::take(&mut self.queued) || !queue.remove(&self.waiter) {
            return unwanted; // past the queue, which waits on
        }
        if arrival.as_head {
            // What an attempt that was not answered brought along may stand in line, though this one did not.
            let brought = queue.next.take();
            queue.ticket = brought.filter(|_| arrival.next);
            unwanted[0] = brought.filter(|_| !arrival.next && arrival.open);
            // Who has no ticket in line yet gets one at once.
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

/// The usual self-deadlock explains itself.
pub(super) fn itself(own: &Hold, now: Instant) -> String {
    format!(
        "this client itself acquired at {}, {} ago: if that is the same task, it waits for itself (guard.scope, or a pass, \
         re-enters)",
        own.at,
        about(now.since(own.since))
    )
}

impl Drop for Wait {
    fn drop(&mut self) {
        let tickets = self.withdraw();
        self.pending.abandon(tickets);
    }
}

/// The shortest pause between two looks that nothing woke.
const SHORTEST: Duration = Duration::from_millis(1);

impl Inner {
    /// Whoever asked: the trouble of those who wait for that name is over.
    pub(super) fn store_answers(&self, name: &LockName) {
        if let Some(page) = self.book().find(name) {
            page.queue.failing = None;
        }
    }

    /// A store that only answers is asked after 1 ms, 2 ms, 4 ms … up to the cap, jittered 50–100 %, or when the lease it told of must be over.
    fn poll_pause(&self, looks: u32, rest: Option<Duration>) -> Duration {
        let step = SHORTEST
            .saturating_mul(1 << looks.min(20))
            .min(self.look_cap);
        let jittered = step.mul_f64(0.5 + self.jitter() / 2.0);
        rest.map_or(jittered, |rest| jittered.min(rest.saturating_add(SHORTEST)))
    }
}
