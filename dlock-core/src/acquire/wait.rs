//! The one waiting loop, for stores that queue and push, that only notify, and that only answer.
//!
//! Waiters of a client stand in a local queue, first in, first out. Its head talks to the store: it attempts with the queue's ticket
//! when a wake-up came or the time to look has come, whichever is first, and sleeps in between. A wake-up is only ever a reason to
//! look, so one that is lost, late or wrong costs time and nothing else. Whoever leaves hands head and ticket on.

use super::{
    closing, gone,
    pending::{Outcome, Pending},
    trouble::Trouble,
};
use crate::{
    book::Waiter,
    client::Inner,
    clock::Instant,
    driver::{Held, Wake},
    error::{Error, ErrorKind, Phase, about},
    flaw::Flaw,
    guard::Guard,
    identity::Ticket,
    janitor::Job,
    lease::Lease,
    name::LockName,
};
use std::{panic::Location, sync::Arc, time::Duration};

/// The longest time between two looks, also where the store pushes: what a lost wake-up costs at most.
const LOOK_AT_MOST: Duration = Duration::from_secs(2);

/// How long a store may fail while somebody waits without a limit: one lease, within these.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

pub(super) struct Wait {
    pending: Pending,
    waiter: Arc<Waiter>,
    /// Queued under this name.
    queued: Option<(Arc<Inner>, LockName)>,
    given: bool,
    end: Instant,
    began: Instant,
    interval: Duration,
    trouble: Trouble,
    /// When an owner that was given, and may be inside through another client, asks again past the queue.
    ask_at: Instant,
    /// The holder in this very client, found once.
    own: Option<(&'static Location<'static>, Instant)>,
    last: Held,
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
        Self {
            pending,
            waiter: Arc::default(),
            queued: None,
            given,
            end,
            began: Instant::ORIGIN,
            interval: (length / 3).min(LOOK_AT_MOST),
            trouble: Trouble::new(length.clamp(PATIENCE.0, PATIENCE.1)),
            ask_at: Instant::ORIGIN,
            own: None,
            last: Held::default(),
        }
    }

    pub(super) async fn granted(
        mut self,
        inner: &Arc<Inner>,
        name: &LockName,
    ) -> Result<Guard, Error> {
        self.began = inner.clock.now();
        if !self.given {
            self.enter(inner, name);
        }
        loop {
            let now = inner.clock.now();
            if inner.is_closing() {
                return Err(closing());
            }
            if now >= self.end {
                return Err(self.timeout(inner));
            }
            match self.step(inner, now) {
                Step::Sleep(until) => {
                    tokio::select! {
                        biased;
                        () = self.waiter.wake.notified() => {}
                        () = inner.clock.sleep_until(until.min(self.end)) => {}
                    }
                }
                Step::Attempt { line, next, look } => {
                    let outcome = self.pending.attempt(line, next, look, self.end).await;
                    if let Some(guard) = self.judge(inner, name, outcome, line, next)? {
                        return Ok(guard);
                    }
                }
            }
        }
    }

    fn enter(&mut self, inner: &Arc<Inner>, name: &LockName) {
        let mut book = inner.book();
        let queue = &mut book.page(name).queue;
        if inner.flawed(Flaw::LastInFirstOut) {
            queue.enter_first_but_one(&self.waiter);
        } else {
            queue.enter(&self.waiter);
        }
        if queue.len() == 1 {
            queue.look_at = Instant::ORIGIN;
            queue.looks = 0;
        }
        self.queued = Some((Arc::clone(inner), name.clone()));
    }

    /// What to do now.
    fn step(&mut self, inner: &Arc<Inner>, now: Instant) -> Step {
        let past = Step::Attempt {
            line: None,
            next: None,
            look: false,
        };
        let Some((_, name)) = &self.queued else {
            // An owner that was given makes its first attempt past every queue.
            return if now >= self.ask_at {
                past
            } else {
                Step::Sleep(self.ask_at)
            };
        };
        let mut book = inner.book();
        let queue = &mut book.page(name).queue;
        if !queue.is_head(&self.waiter) {
            return match self.given {
                true if now >= self.ask_at => past,
                true => Step::Sleep(self.ask_at),
                false => Step::Sleep(Instant::FAR),
            };
        }
        if !queue.poked && now < queue.look_at {
            return Step::Sleep(queue.look_at);
        }
        queue.poked = false;
        let others = queue.len() > 1;
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
        outcome: Outcome,
        line: Option<Ticket>,
        next: Option<Ticket>,
    ) -> Result<Option<Guard>, Error> {
        let now = inner.clock.now();
        match outcome {
            Outcome::Granted(grant, sent) => {
                self.trouble.over();
                if let Some(guard) = self.pending.succeed(grant, sent) {
                    self.arrive(inner, name, line.is_some(), next);
                    return Ok(Some(guard));
                }
                self.trouble.too_late();
                if let (Some(line), Some(page)) = (line, inner.book().find(name)) {
                    // The ticket was used up by a grant that is worth nothing.
                    if page.queue.ticket == Some(line) {
                        page.queue.ticket = next.and_then(|_| page.queue.next.take());
                    }
                }
            }
            Outcome::Held(held) => {
                self.trouble.over();
                self.refused(inner, name, held, line.is_some(), now);
            }
            Outcome::Gone => return Err(gone()),
            Outcome::Failed(error) => {
                self.trouble.failed(error, now)?;
                self.again_after_trouble(inner, name, line.is_some(), now);
            }
            Outcome::Unanswered => {
                self.trouble.unanswered(now)?;
                self.again_after_trouble(inner, name, line.is_some(), now);
            }
        }
        Ok(None)
    }

    /// Out of the queue with the lock: the next one in it becomes the head.
    fn arrive(&mut self, inner: &Arc<Inner>, name: &LockName, as_head: bool, next: Option<Ticket>) {
        if self.queued.take().is_none() {
            return;
        }
        let mut book = inner.book();
        let queue = &mut book.page(name).queue;
        let was_head = queue.remove(&self.waiter);
        if !was_head {
            return; // past the queue, which waits on
        }
        let now = inner.clock.now();
        let alone = queue.len() == 0;
        if as_head {
            queue.ticket = queue.next.take().filter(|_| next.is_some());
            // Who has no ticket in line yet gets one at once; a store that only answers is told nothing by asking it now.
            let stands = queue.ticket.is_some() || inner.caps.wake == Wake::Poll;
            queue.look_at = if stands { now + self.interval } else { now };
        }
        queue.looks = 0;
        queue.poked = false;
        let unwanted = if alone { queue.ticket.take() } else { None };
        queue.wake_head();
        drop(book);
        if let Some(ticket) = unwanted {
            inner.leave(name, ticket);
        }
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
            let own = page
                .holds
                .iter()
                .find(|hold| hold.is_live(&inner.clock))
                .map(Arc::clone);
            if as_head && page.queue.is_head(&self.waiter) {
                let pause = match inner.caps.wake {
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
            own
        };
        self.last = held;
        self.ask_at = now + self.interval;
        if let (Some(own), None) = (own, self.own) {
            self.own = Some((own.at, own.since));
            tracing::info!(
                target: "dlock::acquire", lock = %name, backend = inner.caps.backend,
                "waiting for a lock that this client acquired itself at {} {} ago: if that is the same task, it \
                 waits for itself (guard.scope, or a pass, re-enters)",
                own.at, about(now.since(own.since))
            );
        }
        if self.queued.is_none() {
            self.enter(inner, name);
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
        }
    }

    fn timeout(&mut self, inner: &Arc<Inner>) -> Error {
        if self.trouble.is_on() {
            return self.trouble.timeout();
        }
        let now = inner.clock.now();
        let mut message = format!("not acquired within {}", about(now.since(self.began)));
        if let Some(by) = &self.last.by {
            message.push_str(&format!("; held by owner #{}", by.owner));
            if !by.note.host.is_empty() {
                message.push_str(&format!(" (process {} on {})", by.note.pid, by.note.host));
            }
        }
        if let Some((at, since)) = self.own {
            message.push_str(&format!(
                "; this client itself acquired it at {at}, {} ago: if that is the same task, it waits for itself \
                 (guard.scope, or a pass, re-enters)",
                about(now.since(since))
            ));
        }
        let phase = Phase::Wait;
        Error::new(ErrorKind::Timeout { phase }, message).with_retry(crate::error::Retry::Later)
    }

    /// Out of the queue without the lock: what this waiter stood in line with goes to the next one, or is given up.
    fn withdraw(&mut self) -> Vec<Ticket> {
        let Some((inner, name)) = self.queued.take() else {
            return Vec::new();
        };
        let open = self.pending.is_open();
        let mut book = inner.book();
        let Some(page) = book.find(&name) else {
            return Vec::new();
        };
        let queue = &mut page.queue;
        let mut unwanted = Vec::new();
        if queue.remove(&self.waiter) {
            if open {
                // The attempt under way may yet use the ticket up: the next head stands in line with one of its own.
                unwanted.extend(queue.ticket.take());
                queue.ticket = queue.next.take();
                queue.poked = true;
            }
            if queue.len() == 0 {
                unwanted.extend(queue.ticket.take());
                queue.next = None;
            }
            queue.wake_head();
        }
        book.tidy(&name);
        if inner.flawed(Flaw::NeverLeaves) {
            unwanted.clear();
        }
        unwanted
    }
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
    /// A store that only answers is asked after 1 ms, 2 ms, 4 ms … up to the cap, jittered 50–100 %, or when the lease it told of must be over.
    fn poll_pause(&self, looks: u32, rest: Option<Duration>) -> Duration {
        let step = SHORTEST
            .saturating_mul(1 << looks.min(20))
            .min(self.look_cap);
        let jittered = step.mul_f64(0.5 + self.jitter() / 2.0);
        rest.map_or(jittered, |rest| jittered.min(rest + SHORTEST))
    }

    fn leave(self: &Arc<Self>, name: &LockName, ticket: Ticket) {
        if !self.flawed(Flaw::NeverLeaves) {
            self.settle(Job::leave(name.clone(), ticket));
        }
    }

    /// A turn that nobody wants: whoever stands behind it should not wait for its accept lease.
    pub(crate) fn decline(self: &Arc<Self>, name: &LockName, ticket: Ticket) {
        self.leave(name, ticket);
    }
}
