//! One acquisition as the guard, the watchdog and the book share it: a few atomics that anybody may read without a lock.

use crate::{
    clock::{Clock, Instant},
    error::LossReason,
    identity::{FencingToken, HoldId, Owner, Ticket},
    lease::Lease,
    name::LockName,
    terms::Terms,
    watchdog::Key,
};
use std::{
    future::poll_fn,
    panic::Location,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::sync::Notify;

/// How far a lock can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Held, and renewals go well.
    Held,
    /// Held until the deadline, but a renewal is failing or overdue.
    Uncertain,
    /// Not to be trusted any more. Terminal.
    Lost(LossReason),
}

#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) id: HoldId,
    pub(crate) token: Option<FencingToken>,
    pub(crate) terms: Terms,
    pub(crate) since: Instant,
    /// When the request that was granted was given to the driver.
    pub(crate) sent: Instant,
    /// Where the caller acquired it, for the error that explains a self-deadlock.
    pub(crate) at: &'static Location<'static>,
    /// Until when an unanswered copy of its acquire may still take hold: a release before then does not settle it.
    pub(crate) unsettled: Option<Instant>,
    /// What that copy would put in line again.
    pub(crate) ticket: Option<Ticket>,
    key: OnceLock<Key>,
    phase: AtomicU8,
    confirmed: AtomicBool,
    deadline: AtomicU64,
    lost: Notify,
}

/// When a hold was first asked for, and when it was first had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    pub(crate) sent: Instant,
    pub(crate) since: Instant,
}

/// What a hold starts from: a grant, or one that was taken up again.
pub(crate) struct Start {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) id: HoldId,
    pub(crate) token: Option<FencingToken>,
    pub(crate) terms: Terms,
    /// The instant before the request was given to the driver, and what the store then had to run.
    pub(crate) sent: Instant,
    pub(crate) valid_for: Duration,
    /// When it was first asked for and first had, if it was taken up again: what `max_hold` and `at_least_for` count from.
    pub(crate) first: Option<First>,
    pub(crate) at: &'static Location<'static>,
    pub(crate) unsettled: Option<Instant>,
    /// The ticket that was used up by the grant.
    pub(crate) ticket: Option<Ticket>,
}

const HELD: u8 = 0;
const UNCERTAIN: u8 = 1;
const RELEASING: u8 = 2;
const DETACHED: u8 = 3;
const LOST: u8 = 4; // and up: LOST + the reason's place in REASONS

const NOT_HELD: u8 = LOST + 1;
const SHUT_DOWN: u8 = LOST + 3;

const REASONS: [LossReason; 4] = [
    LossReason::Deadline,
    LossReason::NotHeld,
    LossReason::Session,
    LossReason::Shutdown,
];

/// How much earlier than the deadline a timer that watches it is set: timers are a millisecond coarse and round up,
/// and `lost()` has to resolve at or before the deadline, not after it.
pub(crate) const TICK: Duration = Duration::from_millis(1);

impl Hold {
    pub(crate) fn new(start: &Start, now: Instant, deadline: Instant) -> Self {
        let First { sent, since } = start.first.unwrap_or(First {
            sent: start.sent,
            since: now,
        });
        Self {
            name: start.name.clone(),
            owner: start.owner,
            id: start.id,
            token: start.token,
            terms: start.terms,
            since,
            sent,
            at: start.at,
            unsettled: start.unsettled,
            ticket: start.ticket.filter(|_| start.unsettled.is_some()),
            key: OnceLock::new(),
            phase: AtomicU8::new(HELD),
            confirmed: AtomicBool::new(false),
            deadline: AtomicU64::new(deadline.as_nanos()),
            lost: Notify::new(),
        }
    }

    /// Its entry in the watchdog, once it has one.
    pub(crate) fn key(&self) -> Option<Key> {
        self.key.get().copied()
    }

    pub(crate) fn watched_as(&self, key: Key) {
        let _ = self.key.set(key); // set once, by whoever made it
    }

    pub(crate) fn lease(&self) -> Lease {
        self.terms.lease()
    }

    /// Until when the name is to stay shut, though it be released before.
    pub(crate) fn keep(&self) -> Option<Instant> {
        self.terms.least().map(|least| self.since + least)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::from_nanos(self.deadline.load(SeqCst))
    }

    /// A renewal went well. The deadline never moves back. Says whether anybody still counts on it: who was told that it is
    /// lost is not to hold it any longer.
    pub(crate) fn renewed(&self, deadline: Instant) -> bool {
        self.deadline.fetch_max(deadline.as_nanos(), SeqCst);
        let before = self
            .phase
            .compare_exchange(UNCERTAIN, HELD, SeqCst, SeqCst)
            .unwrap_or_else(|phase| phase);
        matches!(before, HELD | UNCERTAIN)
    }

    pub(crate) fn doubt(&self) -> bool {
        self.phase
            .compare_exchange(HELD, UNCERTAIN, SeqCst, SeqCst)
            .is_ok()
    }

    /// The state as the clock has it: a deadline that passed while nothing ran counts, whether or not the watchdog has noticed.
    pub(crate) fn state(&self, clock: &Clock) -> State {
        self.state_at(clock.now())
    }

    fn state_at(&self, now: Instant) -> State {
        match self.phase.load(SeqCst) {
            phase @ (HELD | UNCERTAIN) => {
                if now >= self.deadline() {
                    self.lose(LossReason::Deadline);
                    self.state_at(now)
                } else if phase == HELD {
                    State::Held
                } else {
                    State::Uncertain
                }
            }
            RELEASING | DETACHED => State::Lost(LossReason::NotHeld),
            lost => State::Lost(REASONS[usize::from(lost - LOST) % REASONS.len()]),
        }
    }

    /// Whether the guard still counts on it.
    pub(crate) fn is_live(&self, clock: &Clock) -> bool {
        !matches!(self.state(clock), State::Lost(_))
    }

    /// Marks it lost, once; says whether this call did.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        let place = REASONS.iter().position(|r| *r == reason).unwrap_or(0);
        let lost = LOST + u8::try_from(place).unwrap_or(0);
        let did = self
            .phase
            .fetch_update(SeqCst, SeqCst, |phase| {
                matches!(phase, HELD | UNCERTAIN).then_some(lost)
            })
            .is_ok();
        if did {
            self.lost.notify_waiters();
        }
        did
    }

    /// The guard gives it back. From here on it is nobody's to lose; says what it was before.
    pub(crate) fn releasing(&self, now: Instant) -> State {
        let before = self.state_at(now);
        let _ = self.phase.fetch_update(SeqCst, SeqCst, |phase| {
            matches!(phase, HELD | UNCERTAIN).then_some(RELEASING)
        });
        before
    }

    /// The store confirmed that it is gone.
    pub(crate) fn released(&self) {
        self.confirmed.store(true, SeqCst);
    }

    /// The store had nothing to release: it was lost before, and nobody knew.
    pub(crate) fn not_found(&self) {
        let _ = self
            .phase
            .compare_exchange(RELEASING, NOT_HELD, SeqCst, SeqCst);
    }

    /// Whether it was given back, by its user or a forced shutdown, and the store confirmed it.
    pub(crate) fn is_released(&self) -> bool {
        self.confirmed.load(SeqCst) && matches!(self.phase.load(SeqCst), RELEASING | SHUT_DOWN)
    }

    /// The guard gives it up without giving it back; says whether it still had it.
    pub(crate) fn detach(&self, clock: &Clock) -> Result<(), LossReason> {
        match self.state(clock) {
            State::Lost(reason) => Err(reason),
            _ => self
                .phase
                .fetch_update(SeqCst, SeqCst, |phase| {
                    matches!(phase, HELD | UNCERTAIN).then_some(DETACHED)
                })
                .map(drop)
                .map_err(|_| LossReason::Deadline),
        }
    }

    /// Whether it is no guard's any more, and held all the same.
    pub(crate) fn is_detached(&self) -> bool {
        self.phase.load(SeqCst) == DETACHED
    }

    /// Whether its release was begun and not confirmed.
    pub(crate) fn is_given_up(&self) -> bool {
        self.phase.load(SeqCst) == RELEASING
    }

    /// Resolves when it can no longer be trusted, also when nothing but the caller runs: the timer is the caller's own.
    ///
    /// The clock is read at each poll and not only when a timer fires: after a suspend the first poll says so.
    pub(crate) async fn lost(&self, clock: &Clock) -> LossReason {
        let mut timed = std::pin::pin!(self.lost_by_timer(clock));
        poll_fn(|cx| match self.state(clock) {
            State::Lost(reason) => Poll::Ready(reason),
            State::Held | State::Uncertain => timed.as_mut().poll(cx),
        })
        .await
    }

    async fn lost_by_timer(&self, clock: &Clock) -> LossReason {
        loop {
            let notified = self.lost.notified();
            let mut notified = std::pin::pin!(notified);
            notified.as_mut().enable();
            if let State::Lost(reason) = self.state(clock) {
                return reason;
            }
            let watched = self.deadline();
            tokio::select! {
                biased;
                () = notified => {}
                () = clock.sleep_until(watched - TICK) => {
                    if self.deadline() == watched {
                        self.lose(LossReason::Deadline);
                    }
                }
            }
        }
    }
}
