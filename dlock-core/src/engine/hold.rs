//! Hold: one acquisition, shared by the guard, the watchdog and the lock table. It is a few atomics that
//! any task can read without a lock.

use crate::{
    clock::{Clock, Instant},
    driver::{HolderInfo, Ticket},
    engine::{
        caller::Caller,
        metrics::Class,
        watchdog::machine::{Key, TICK},
    },
    error::LossReason,
    lease::Lease,
    name::LockName,
    options::Terms,
    owner::{HoldId, Owner},
    token::FencingToken,
};
use std::{
    future::poll_fn,
    panic::Location,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::sync::Notify;

/// How far a lock can be trusted.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:guard-state")?)?;
/// use dlock_core::GuardState;
///
/// let guard = client.lock("orders:42")?.acquire().await?;
/// assert_eq!(guard.state(), GuardState::Held);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GuardState {
    /// Held, and renewals go well.
    Held,
    /// Held until the deadline, but a renewal is failing or overdue.
    Uncertain,
    /// No longer to be trusted. Terminal.
    Lost(LossReason),
}

#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    /// The owner may own other locks, too: no pass of this hold shows it.
    pub(crate) reusable: bool,
    pub(crate) id: HoldId,
    pub(crate) token: FencingToken,
    pub(crate) terms: Terms,
    pub(crate) since: Instant,
    /// When the request that was granted was given to the driver.
    pub(crate) sent: Instant,
    /// Where the caller acquired it, for the message that explains a self-deadlock.
    pub(crate) at: &'static Location<'static>,
    /// The task that acquired it.
    pub(crate) by: Caller,
    /// Until when an unanswered copy of its acquire may still take the lock: a release before then does not
    /// clean it up.
    pub(crate) indeterminate_until: Option<Instant>,
    /// The ticket that such a copy would put in the queue again.
    pub(crate) ticket: Option<Ticket>,
    pub(crate) class: Class,
    /// The presence without which it is lost.
    pub(crate) presence: Option<Arc<Presence>>,
    key: OnceLock<Key>,
    phase: AtomicU8,
    confirmed: AtomicBool,
    /// The watchdog ran too late to tell whether the store would have renewed it in time.
    stalled: AtomicBool,
    /// The log was told that it is uncertain.
    told: AtomicBool,
    /// Its deadline came while the watchdog did not run.
    unattended: AtomicBool,
    deadline: AtomicU64,
    lost: Notify,
}

/// A presence that was granted.
#[derive(Debug)]
pub(crate) struct Presence {
    pub(crate) hold: Arc<Hold>,
    /// The holder info of the holds that depend on it.
    pub(crate) info: Arc<HolderInfo>,
}

/// When a hold was first requested, and when it was first granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    pub(crate) sent: Instant,
    pub(crate) since: Instant,
}

/// The origin of a hold: a grant, or a detached hold that is attached again.
pub(crate) struct Start {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) reusable: bool,
    pub(crate) id: HoldId,
    pub(crate) token: FencingToken,
    pub(crate) terms: Terms,
    /// The instant before the request was given to the driver, and the validity that the store then
    /// granted.
    pub(crate) sent: Instant,
    pub(crate) valid_for: Duration,
    /// When it was first requested and granted, if it was detached before: `max_hold` and `min_hold` count
    /// from there.
    pub(crate) first: Option<First>,
    pub(crate) at: &'static Location<'static>,
    pub(crate) indeterminate_until: Option<Instant>,
    /// The ticket that was used up by the grant.
    pub(crate) ticket: Option<Ticket>,
    pub(crate) class: Class,
    /// The presence that the request named.
    pub(crate) presence: Option<Arc<Presence>>,
}

const HELD: u8 = 0;
const UNCERTAIN: u8 = 1;
const RELEASING: u8 = 2;
const DETACHED: u8 = 3;
const LOST: u8 = 4; // and up: LOST + the reason

const NOT_HELD: u8 = LOST + LossReason::NotHeld as u8;
const SHUT_DOWN: u8 = LOST + LossReason::Shutdown as u8;

impl Hold {
    pub(crate) fn new(start: &Start, now: Instant, deadline: Instant) -> Self {
        let First { sent, since } = start.first.unwrap_or(First {
            sent: start.sent,
            since: now,
        });
        Self {
            name: start.name.clone(),
            owner: start.owner,
            reusable: start.reusable,
            id: start.id,
            token: start.token,
            terms: start.terms,
            since,
            sent,
            at: start.at,
            by: Caller::current(),
            indeterminate_until: start.indeterminate_until,
            ticket: start.ticket.filter(|_| start.indeterminate_until.is_some()),
            class: start.class.clone(),
            presence: start.presence.clone(),
            key: OnceLock::new(),
            phase: AtomicU8::new(HELD),
            confirmed: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            told: AtomicBool::new(false),
            unattended: AtomicBool::new(false),
            deadline: AtomicU64::new(deadline.as_nanos()),
            lost: Notify::new(),
        }
    }

    /// Its entry in the watchdog, once it has one.
    pub(crate) fn key(&self) -> Option<Key> {
        self.key.get().copied()
    }

    pub(crate) fn watched_as(&self, key: Key) {
        let _ = self.key.set(key); // set once, when the hold begins
    }

    pub(crate) fn lease(&self) -> Lease {
        self.terms.lease()
    }

    /// How long it has lasted for its user.
    pub(crate) fn held_for(&self, clock: &Clock) -> Duration {
        clock.now().since(self.since)
    }

    /// The end of its minimum hold, until which the lock stays unavailable after a release.
    pub(crate) fn min_hold_until(&self) -> Option<Instant> {
        self.terms.least().map(|least| self.since + least)
    }

    /// Until when it is held: at most as long as the presence that it depends on.
    pub(crate) fn deadline(&self) -> Instant {
        let own = self.own_deadline();
        let presence = self.presence.as_ref();
        presence.map_or(own, |presence| own.min(presence.hold.own_deadline()))
    }

    /// Until when its own lease lasts.
    pub(crate) fn own_deadline(&self) -> Instant {
        Instant::from_nanos(self.deadline.load(SeqCst))
    }

    /// Whether it is lost with this presence.
    pub(crate) fn depends_on(&self, presence: &Arc<Self>) -> bool {
        let own = self.presence.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(&own.hold, presence))
    }

    /// Records a successful renewal. The deadline never moves back. Returns whether the guard still counts
    /// on the hold: a user that was told of the loss must not hold it any longer.
    pub(crate) fn renewed(&self, deadline: Instant) -> bool {
        self.deadline.fetch_max(deadline.as_nanos(), SeqCst);
        self.told.store(false, SeqCst);
        let before = self.phase.compare_exchange(UNCERTAIN, HELD, SeqCst, SeqCst);
        if before.is_ok() {
            self.class.certain();
        }
        matches!(before, Ok(_) | Err(HELD))
    }

    /// Records whether the watchdog ran too late when it last had to judge the hold.
    pub(crate) fn stalled(&self, stalled: bool) {
        self.stalled.store(stalled, SeqCst);
    }

    /// Records a renewal that failed. Returns whether it was the first since the last one that succeeded; `None`: the
    /// hold is no longer held.
    pub(crate) fn doubt(&self) -> Option<bool> {
        match self.phase.compare_exchange(HELD, UNCERTAIN, SeqCst, SeqCst) {
            Ok(_) => {
                self.class.uncertain();
                Some(true)
            }
            Err(UNCERTAIN) => Some(false),
            Err(_) => None,
        }
    }

    /// Whether the log has not been told of the present doubt.
    pub(crate) fn is_untold(&self) -> bool {
        !self.told.swap(true, SeqCst)
    }

    /// The state by the clock: a deadline that passed while nothing ran counts, even if the watchdog has
    /// not noticed.
    pub(crate) fn state(&self, clock: &Clock) -> GuardState {
        self.state_at(clock.now())
    }

    fn state_at(&self, now: Instant) -> GuardState {
        match self.phase.load(SeqCst) {
            phase @ (HELD | UNCERTAIN) => {
                let presence = (self.presence.as_ref()).map(|presence| presence.hold.state_at(now));
                if let Some(GuardState::Lost(_)) = presence {
                    self.lose(LossReason::Presence);
                    self.state_at(now)
                } else if now >= self.own_deadline() {
                    self.lose(LossReason::Deadline);
                    self.state_at(now)
                } else if phase == HELD && presence != Some(GuardState::Uncertain) {
                    GuardState::Held
                } else {
                    GuardState::Uncertain
                }
            }
            RELEASING | DETACHED => GuardState::Lost(LossReason::NotHeld),
            lost => {
                GuardState::Lost(LossReason::ALL[usize::from(lost - LOST) % LossReason::ALL.len()])
            }
        }
    }

    /// Whether the guard still counts on it.
    pub(crate) fn is_live(&self, clock: &Clock) -> bool {
        !matches!(self.state(clock), GuardState::Lost(_))
    }

    /// Marks it lost, once. Returns whether this call did.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        let did = self.leave_for(LOST + reason as u8);
        // A running watchdog marks a hold uncertain long before its deadline.
        let due = self.lease().is_renewed() && self.end().is_none_or(|end| self.deadline() < end);
        let unseen = did == Ok(HELD) || (did == Ok(UNCERTAIN) && self.stalled.load(SeqCst));
        if unseen && reason == LossReason::Deadline && due {
            self.unattended.store(true, SeqCst);
        }
        if did.is_ok() {
            self.lost.notify_waiters();
        }
        did.is_ok()
    }

    /// Ends the phases in which it is held. Returns the phase before: as an error if it was not held any more.
    fn leave_for(&self, phase: u8) -> Result<u8, u8> {
        let before = self.phase.fetch_update(SeqCst, SeqCst, |before| {
            matches!(before, HELD | UNCERTAIN).then_some(phase)
        });
        if before == Ok(UNCERTAIN) {
            self.class.certain();
        }
        before
    }

    /// Whether it, or the presence that it depends on, was lost because nothing ran that could have renewed it.
    pub(crate) fn is_unattended(&self) -> bool {
        let presence = self.presence.as_ref();
        self.unattended.load(SeqCst)
            || presence.is_some_and(|presence| presence.hold.is_unattended())
    }

    fn end(&self) -> Option<Instant> {
        self.terms.end().map(|end| self.sent + end)
    }

    /// Begins the release of the hold, after which it can no longer be lost. Returns the state before.
    pub(crate) fn releasing(&self, now: Instant) -> GuardState {
        let before = self.state_at(now);
        let _ = self.leave_for(RELEASING);
        before
    }

    /// Records that the store confirmed the release.
    pub(crate) fn released(&self) {
        self.confirmed.store(true, SeqCst);
    }

    /// Records that the store had nothing to release: the hold was lost before, unnoticed.
    pub(crate) fn not_found(&self) {
        let _ = self.phase.fetch_update(SeqCst, SeqCst, |phase| {
            (matches!(phase, RELEASING | SHUT_DOWN) && !self.confirmed.load(SeqCst))
                .then_some(NOT_HELD)
        });
    }

    /// Whether it was released, by its user or a forced shutdown, and the store confirmed it.
    pub(crate) fn is_released(&self) -> bool {
        self.confirmed.load(SeqCst) && matches!(self.phase.load(SeqCst), RELEASING | SHUT_DOWN)
    }

    /// Detaches the hold from its guard without a release. Fails if the hold was lost before.
    pub(crate) fn detach(&self, clock: &Clock) -> Result<(), LossReason> {
        match self.state(clock) {
            GuardState::Lost(reason) => Err(reason),
            _ => self
                .leave_for(DETACHED)
                .map(drop)
                .map_err(|_| LossReason::Deadline),
        }
    }

    /// Whether it has no guard any more but is still held.
    pub(crate) fn is_detached(&self) -> bool {
        self.phase.load(SeqCst) == DETACHED
    }

    /// Whether its release was begun and is not confirmed.
    pub(crate) fn is_given_up(&self) -> bool {
        self.phase.load(SeqCst) == RELEASING
    }

    /// Resolves when it can no longer be trusted, even when nothing but the caller runs: the timer is the
    /// caller's own.
    ///
    /// The clock is read at each poll and not only when a timer fires: the first poll after a suspend
    /// notices the loss.
    pub(crate) async fn lost(&self, clock: &Clock) -> LossReason {
        let mut timed = std::pin::pin!(self.lost_by_timer(clock));
        poll_fn(|cx| match self.state(clock) {
            GuardState::Lost(reason) => Poll::Ready(reason),
            GuardState::Held | GuardState::Uncertain => timed.as_mut().poll(cx),
        })
        .await
    }

    async fn lost_by_timer(&self, clock: &Clock) -> LossReason {
        loop {
            let notified = self.lost.notified();
            let mut notified = std::pin::pin!(notified);
            notified.as_mut().enable();
            if let GuardState::Lost(reason) = self.state(clock) {
                return reason;
            }
            let watched = self.deadline();
            tokio::select! {
                biased;
                () = notified => {}
                () = clock.sleep_until(watched - TICK) => {
                    if self.deadline() == watched {
                        self.lose(match watched < self.own_deadline() {
                            true => LossReason::Presence,
                            false => LossReason::Deadline,
                        });
                    }
                }
            }
        }
    }
}

/// A presence ends with its client, also while it is uncertain.
#[cfg(feature = "metrics")]
impl Drop for Hold {
    fn drop(&mut self) {
        let _ = self.leave_for(RELEASING);
    }
}
