//! Waiting loop: one for stores that queue and notify, that only notify, and that only answer.
//!
//! Waiters of a client wait in a local queue, first in, first out. Only its head talks to the store, and sharers
//! behind it once, while the store's queue has room for them. The head
//! attempts with the queue's ticket when a wake-up came or the poll time is reached, whichever is first,
//! and sleeps in between. A wake-up only ever triggers a poll, so one that is lost, late or wrong costs
//! time and nothing else. A waiter that leaves passes head and ticket on.

use super::{
    attempt::{Answer, Attempt},
    refusal::{closing, describe_own_holder, gone},
    retry::RetryState,
};
use crate::{
    clock::Instant,
    driver::{Held, Ticket, Wake},
    engine::{
        Engine,
        call::ATTEMPT_LIMIT,
        caller::Caller,
        lock_table::{Granted, Queue, Seat, Tickets, Waiter},
    },
    error::Error,
    guard::Guard,
    name::LockName,
    owner::{HoldId, Mode},
    token::FencingToken,
};
use std::{sync::Arc, time::Duration};

/// The longest time between two polls, even on a store that notifies: the most that a lost wake-up costs.
const POLL_INTERVAL_AT_MOST: Duration = Duration::from_secs(2);

/// How long a store may fail while a task waits without a limit: one lease, within these bounds.
const STORE_MAY_FAIL: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

pub(super) struct Wait {
    attempt: Attempt,
    position: LocalPosition,
    end: Instant,
    began: Instant,
    interval: Duration,
    retry: RetryState,
    /// When a given owner, which may hold the lock through another client, asks again past the queue.
    ask_at: Instant,
    /// The log has said once that this very task is the holder.
    told: bool,
    /// The store's last refusal, if any.
    last: Option<Held>,
    /// When it began to wait.
    waits_since: Option<Instant>,
    /// The incarnation that refused it and the presence on which that depends, until they were looked at.
    dependence: Option<(FencingToken, HoldId)>,
    /// When to look at the presence of that incarnation next.
    look_at: Option<(FencingToken, Instant)>,
}

/// A waiter's position in the queue of its lock.
struct LocalPosition {
    waiter: Arc<Waiter>,
    /// Set while the waiter is in the queue.
    seat: Option<Seat>,
}

enum Step {
    Attempt { tickets: Tickets, retry: bool },
    Sleep(Instant),
}

impl Wait {
    pub(super) fn new(attempt: Attempt, end: Instant) -> Self {
        let length = attempt.lease().length();
        let within = attempt.attempt_limit();
        let position = LocalPosition::of(attempt.shares());
        Self {
            attempt,
            position,
            end,
            began: Instant::ORIGIN,
            interval: (length / 3).min(POLL_INTERVAL_AT_MOST),
            retry: RetryState::new(length.clamp(STORE_MAY_FAIL.0, STORE_MAY_FAIL.1), within),
            ask_at: Instant::ORIGIN,
            told: false,
            last: None,
            waits_since: None,
            dependence: None,
            look_at: None,
        }
    }

    pub(super) async fn until_granted(&mut self, engine: &Arc<Engine>) -> Result<Guard, Error> {
        let mut now = engine.clock.now();
        self.began = now;
        loop {
            if engine.is_closing() {
                return Err(closing());
            }
            if now >= self.end {
                return Err(self.timeout());
            }
            match self.step(engine, now) {
                Step::Sleep(until) => {
                    tokio::select! {
                        biased;
                        () = self.position.waiter.wake.notified() => {}
                        () = engine.shutting_down() => {}
                        () = engine.clock.sleep_until(until.min(self.end)) => {}
                    }
                }
                Step::Attempt { tickets, retry } => {
                    let answer = tokio::select! {
                        biased;
                        answer = self.attempt.send(tickets, retry, now, self.end) => answer,
                        () = engine.shutting_down_meanwhile() => return Err(closing()),
                    };
                    now = engine.clock.now();
                    if let Some(guard) = self.judge(engine, answer, tickets, now)? {
                        return Ok(guard);
                    }
                    if let Some(dependence) = self.dependence.take() {
                        let waiter = Arc::clone(&self.position.waiter);
                        tokio::select! {
                            biased;
                            () = Box::pin(self.look(engine, dependence, now)) => {}
                            () = waiter.wake.notified() => {} // the queue knows why
                            () = engine.shutting_down_meanwhile() => return Err(closing()),
                        }
                    }
                }
            }
            now = engine.clock.now();
        }
    }

    /// Decides the next step.
    fn step(&mut self, engine: &Engine, now: Instant) -> Step {
        let past = Step::Attempt {
            tickets: Tickets::default(),
            retry: false,
        };
        if self.attempt.who.given && self.position.seat.is_none() {
            // A given owner makes its first attempt past every queue.
            return if now >= self.ask_at {
                past
            } else {
                Step::Sleep(self.ask_at)
            };
        }
        let mut table = engine.table();
        let queue = &mut table.entry(&self.attempt.name).queue;
        let beside = self.beside(self.attempt.most());
        self.position.enter(queue, beside);
        if !self.position.is_head(queue) {
            if beside > 0 && queue.lets_ask_beside() {
                return past;
            }
            drop(table);
            self.waits(now);
            return match self.attempt.who.given {
                true if now >= self.ask_at => past,
                true => Step::Sleep(self.ask_at),
                false => Step::Sleep(Instant::FAR),
            };
        }
        let at = if queue.woken {
            Instant::ORIGIN
        } else {
            queue.poll_at
        };
        let at = at.max(queue.not_before);
        if now < at {
            return Step::Sleep(at);
        }
        if self.waits_since.is_some() {
            self.attempt.class.polls(queue.woken);
        }
        queue.woken = false;
        queue.told = None;
        // The next reader enters beside this one at once. Until it asks, its place in the store's queue would only keep the
        // readers of other clients out.
        let readers = queue.alone == 0 && self.attempt.who.owner.mode() == Mode::Shared;
        let others = queue.len() > 1 && !(readers && engine.caps.wake == Wake::Queue);
        Step::Attempt {
            tickets: Tickets {
                current: Some(*queue.ticket.get_or_insert_with(|| engine.ticket())),
                next: others.then(|| *queue.next.get_or_insert_with(|| engine.ticket())),
            },
            retry: queue.polls > 0,
        }
    }

    /// How many waiters behind the head may ask at once where the lock has that much room. Only where the store
    /// keeps a queue: elsewhere those who share write to one record, and would hold each other up.
    fn beside(&self, room: u32) -> u32 {
        match self.attempt.engine.caps.wake {
            Wake::Queue => room.saturating_sub(1).min(BESIDE_AT_MOST),
            _ => 0,
        }
    }

    /// Counts the task as waiting, from its first refusal or from its place behind another waiter on.
    fn waits(&mut self, now: Instant) {
        if self.waits_since.is_none() {
            self.waits_since = Some(now);
            self.attempt.class.waits();
            tracing::debug!(
                target: "dlock::acquire", lock = %self.attempt.name, backend = self.attempt.engine.caps.backend,
                "waiting"
            );
        }
    }

    fn judge(
        &mut self,
        engine: &Engine,
        answer: Answer,
        tickets: Tickets,
        now: Instant,
    ) -> Result<Option<Guard>, Error> {
        let as_head = tickets.current.is_some();
        match answer {
            Answer::Granted(grant, sent) => {
                let room = self.attempt.most().saturating_sub(grant.holds.get());
                let waiter = Granted {
                    seat: self.position.seat,
                    tickets,
                    open: self.attempt.was_unanswered(),
                    // A store without wake-ups gains nothing from being asked now.
                    queued: engine.caps.wake == Wake::Poll && !self.attempt.shares(),
                    shares: self.attempt.shares(),
                    has_room: room > 0,
                    beside: self.beside(room),
                    poll_at: now + self.interval,
                    now,
                };
                if let Some(guard) = self.attempt.succeed(grant, sent, now, Some(waiter))? {
                    self.position.seat = None; // it left the queue with the grant
                    return Ok(Some(guard));
                }
                engine.store_answers(&self.attempt.name);
                if let Some(current) = tickets.current
                    && let Some(entry) = engine.table().find(&self.attempt.name)
                {
                    // A worthless grant used the ticket up.
                    let queue = &mut entry.queue;
                    if queue.ticket == Some(current) {
                        queue.ticket = queue.next.take().filter(|_| tickets.next.is_some());
                    }
                }
                self.retry.too_late(now)?;
                self.retry_later(as_head, now)?;
            }
            Answer::Held(held) => {
                engine.store_answers(&self.attempt.name);
                self.retry.over();
                self.refused(engine, held, as_head, now);
            }
            Answer::Gone => {
                engine.store_answers(&self.attempt.name);
                if !self.attempt.unjoin() {
                    return Err(gone());
                }
            }
            Answer::Failed(error) => {
                self.share_failure(now);
                self.retry.failed(error, now)?;
                self.retry_later(as_head, now)?;
            }
            Answer::Unanswered => {
                self.share_failure(now);
                self.retry.unanswered(now)?;
                self.retry_later(as_head, now)?;
            }
        }
        Ok(None)
    }

    /// Another owner holds the lock: sets when to poll again.
    fn refused(&mut self, engine: &Engine, held: Held, as_head: bool, now: Instant) {
        let own = {
            let mut table = engine.table();
            let entry = table.entry(&self.attempt.name);
            let own = entry.live(&engine.clock);
            if as_head && self.position.is_head(&entry.queue) {
                let pause = match engine.caps.wake {
                    // This client holds the lock, so the store is not polled often: its release wakes the
                    // queue.
                    Wake::Poll
                        if own
                            .as_ref()
                            .is_some_and(|own| own.owner.mode() == Mode::Exclusive) =>
                    {
                        self.interval
                    }
                    Wake::Poll => engine.poll_pause(entry.queue.polls, held.poll_in),
                    _ => held
                        .poll_in
                        .map_or(self.interval, |rest| rest.min(self.interval)),
                };
                entry.queue.refused();
                entry.queue.polls = entry.queue.polls.saturating_add(1);
                let poll_at = now + pause.max(SHORTEST);
                entry.queue.poll_at = entry.queue.told.map_or(poll_at, |told| told.min(poll_at));
            }
            self.position.enter(&mut entry.queue, 0);
            entry.queue.beside = 0;
            own
        };
        // No need to look at the presence of this client.
        self.dependence = held.dependence().filter(|_| own.is_none());
        self.last = Some(held);
        self.waits(now);
        self.ask_at = now + self.interval;
        if let Some(own) = own
            && own.by == Caller::current()
            && !self.told
        {
            self.told = true;
            tracing::info!(
                target: "dlock::acquire", lock = %self.attempt.name, backend = engine.caps.backend,
                "waiting for a lock that {}", describe_own_holder(&own, now)
            );
        }
    }

    /// The holder depends on its client's presence: looks at that when it is time to, and sets when to ask again.
    async fn look(&mut self, engine: &Engine, dependence: (FencingToken, HoldId), now: Instant) {
        let token = dependence.0;
        let next = match self.look_at {
            Some((of, at)) if of == token && now < at => at,
            _ => {
                let give_up = (now + ATTEMPT_LIMIT).min(self.end);
                let pause = engine.evict(&self.attempt.name, dependence, give_up).await;
                engine.clock.now() + pause.min(self.interval)
            }
        };
        self.look_at = Some((token, next));
        self.ask_at = self.ask_at.min(next);
        if let Some(entry) = engine.table().find(&self.attempt.name) {
            entry.queue.poll_by(next);
        }
    }

    /// The store fails, whatever waiter is the head: the queue has one failure limit, not one for each
    /// waiter.
    fn share_failure(&mut self, now: Instant) {
        if let Some(entry) = (self.attempt.engine.table())
            .find(&self.attempt.name)
            .filter(|entry| self.position.is_head(&entry.queue))
        {
            self.retry.inherit(*entry.queue.failing.get_or_insert(now));
        }
    }

    fn retry_later(&mut self, as_head: bool, now: Instant) -> Result<(), Error> {
        let engine = &self.attempt.engine;
        let again = now + self.retry.pause(engine.random.jitter());
        self.ask_at = again;
        if let Some(entry) = engine.table().find(&self.attempt.name) {
            entry.queue.beside = 0;
            if as_head {
                entry.queue.poll_at = again;
                entry.queue.not_before = again;
            }
        }
        if !as_head && !self.attempt.who.given {
            // It asked beside the head, and asks again in its turn only. Until then it must not be inside, and the head
            // tells how the store does.
            self.retry.over();
            self.attempt.give_back()?;
        }
        Ok(())
    }

    fn timeout(&mut self) -> Error {
        let (engine, name) = (&self.attempt.engine, &self.attempt.name);
        let waited = self.end.since(self.began);
        let failing =
            (engine.table().find(name)).is_some_and(|entry| entry.queue.failing.is_some());
        // One poll that only the end of the wait cut short says nothing about the store.
        let cut = self.last.is_some() && self.retry.attempts <= 1;
        if (self.retry.attempts > 0 || failing) && !cut {
            return self.retry.timeout(waited);
        }
        engine.not_acquired(name, waited, self.last.as_ref())
    }

    /// Leaves the queue without the lock. This waiter's tickets go to the next one, or are returned to be
    /// given up.
    fn withdraw(&mut self) -> Vec<Ticket> {
        let Some(seat) = self.position.seat.take() else {
            return Vec::new();
        };
        let open = self.attempt.is_open();
        let (engine, name) = (&self.attempt.engine, &self.attempt.name);
        let mut table = engine.table();
        let Some(entry) = table.find(name) else {
            return Vec::new();
        };
        let queue = &mut entry.queue;
        let mut unwanted = Vec::new();
        if queue.remove(seat) {
            if open {
                // The attempt in flight may yet use the ticket up: the next head enters the store's queue
                // with its own.
                unwanted.extend(queue.ticket.take());
                queue.ticket = queue.next.take();
                queue.woken = true;
            }
            queue.head_left(&self.position.waiter);
            if queue.len() == 0 {
                unwanted.extend(queue.ticket.take());
                unwanted.extend(queue.next.take().filter(|_| open));
                queue.failing = None; // it belonged to the waiters that left
            }
            queue.wake_head();
        }
        table.tidy(name);
        if engine.caps.wake == Wake::Poll {
            unwanted.clear();
        }
        unwanted
    }
}

impl LocalPosition {
    fn of(shares: bool) -> Self {
        let waiter = Waiter {
            shares,
            ..Waiter::default()
        };
        Self {
            waiter: Arc::new(waiter),
            seat: None,
        }
    }

    /// Enters the queue.
    fn enter(&mut self, queue: &mut Queue, beside: u32) {
        if self.seat.is_some() {
            return;
        }
        self.seat = Some(queue.enter(&self.waiter));
        if queue.len() == 1 {
            queue.begin(beside);
        }
    }

    fn is_head(&self, queue: &Queue) -> bool {
        self.seat.is_some_and(|seat| queue.is_head(seat))
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(since) = self.waits_since {
            let clock = &self.attempt.engine.clock;
            self.attempt.class.waited(since, clock);
        }
        let tickets = self.withdraw();
        self.attempt.abandon(tickets);
    }
}

/// How many sharers ask beside the head: enough to hide the latency of a store, few enough that a lock without room
/// refuses no crowd.
const BESIDE_AT_MOST: u32 = 16;

/// The shortest pause between two polls without a wake-up.
const SHORTEST: Duration = Duration::from_millis(1);

impl Engine {
    /// The store answered some caller, so the failures of the waiters for that name are over.
    pub(super) fn store_answers(&self, name: &LockName) {
        if let Some(entry) = self.table().find(name) {
            entry.queue.failing = None;
        }
    }

    /// The pause before the next poll of a store without wake-ups: 1 ms, 2 ms, 4 ms … up to the poll
    /// interval, jittered 50–100 %, or until the lease that the store told of must be over.
    fn poll_pause(&self, polls: u32, rest: Option<Duration>) -> Duration {
        let step = SHORTEST
            .saturating_mul(1 << polls.min(20))
            .min(self.poll_interval);
        let jittered = step.mul_f64(0.5 + self.random.jitter() / 2.0);
        rest.map_or(jittered, |rest| jittered.min(rest.saturating_add(SHORTEST)))
    }
}
