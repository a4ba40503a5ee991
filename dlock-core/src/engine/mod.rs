//! Engine of a client: what all its locks share, and the code that begins and ends a hold.

pub(crate) mod acquire;
pub(crate) mod call;
pub(crate) mod caller;
pub(crate) mod cleanup;
pub(crate) mod hold;
pub(crate) mod lock_table;
pub(crate) mod metrics;
pub(crate) mod presence;
pub(crate) mod release;
pub(crate) mod scope;
pub(crate) mod spread;
pub(crate) mod watchdog;

use crate::{
    clock::{Clock, Instant},
    driver::{Capabilities, DistributedLock, HolderInfo, Ticket, WakeUp},
    engine::{
        call::CallContext,
        cleanup::{Cleanup, CleanupJob},
        hold::{GuardState, Hold, Start},
        lock_table::{Granted, LockTable},
        metrics::{Classes, HoldEnd},
        presence::Presences,
        watchdog::Watchdog,
    },
    error::{Error, ErrorKind, LossReason, UNATTENDED, micros},
    lease::Lease,
    name::LockName,
    owner::HoldId,
    random::Random,
    runtime,
};
use futures_util::StreamExt;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    future::poll_fn,
    num::NonZeroU64,
    ops::Deref,
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::{runtime::Handle, sync::Notify, task::JoinHandle};

pub(crate) struct Engine {
    pub(crate) driver: Arc<dyn DistributedLock>,
    pub(crate) caps: Capabilities,
    pub(crate) store: Arc<str>,
    pub(crate) clock: Clock,
    pub(crate) calls: Arc<CallContext>,
    pub(crate) info: Arc<HolderInfo>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) cleanup: Cleanup,
    pub(crate) poll_interval: Duration,
    pub(crate) presences: Option<Presences>,
    pub(crate) closing: AtomicBool,
    /// Holds that this client detached and did not attach again.
    pub(crate) detached: Mutex<HashMap<HoldId, Instant>>,
    /// Notified when the client begins to shut down.
    pub(crate) shutting_down: Notify,
    /// The driver is closed: nothing more can be undone.
    pub(crate) closed: AtomicBool,
    /// Acquires and releases in flight, which a shutdown waits for.
    pub(crate) active: AtomicUsize,
    /// Notified during a shutdown when a hold, a request or a cleanup job ends.
    pub(crate) quieter: Notify,
    pub(crate) lease: Lease,
    pub(crate) table: Mutex<LockTable>,
    pub(crate) random: Random,
    pub(crate) tickets: AtomicU64,
    pub(crate) classes: Classes,
    pub(crate) tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Reads the store's wake-ups until the driver is closed or the client dropped.
pub(crate) async fn listen(client: Weak<Engine>) {
    let Some(mut wake_ups) = client.upgrade().map(|engine| engine.driver.wake_ups()) else {
        return;
    };
    while let Some(wake_up) = wake_ups.next().await {
        let Some(engine) = client.upgrade() else {
            return;
        };
        engine.heard(wake_up);
    }
}

impl Engine {
    fn heard(self: &Arc<Self>, wake_up: WakeUp) {
        tracing::trace!(target: "dlock::wake_up", backend = self.caps.backend, ?wake_up);
        self.classes.store.wake_up(&wake_up);
        let now = self.clock.now();
        let wanted = self.table().wake_up(&wake_up, now);
        match wake_up {
            // The waiters behind an unwanted turn should not have to wait until its accept lease ends.
            WakeUp::Turn { name, ticket } if !wanted => self.leave_queue(&name, ticket),
            WakeUp::Over(lane) => self.watchdog.over(lane, now),
            WakeUp::Resync => self.poll_all(),
            _ => {}
        }
    }

    /// Makes the head of every queue poll at once. The lock table is not locked for the whole walk.
    fn poll_all(&self) {
        let mut waited = self.table().waited_for();
        waited.sort_unstable(); // the order must not depend on hashing
        for name in waited {
            if let Some(entry) = self.table().find(&name) {
                entry.queue.wake();
            }
        }
    }

    /// Begins to hold what was granted. `None` when the grant is worthless, because it is over already or the
    /// client is shutting down. The waiter leaves its local queue under the same mutex under which the
    /// hold enters the table, so no other user of the table sees only one of the two.
    pub(crate) fn begin(
        self: &Arc<Self>,
        start: Start,
        now: Instant,
        waiter: Option<Granted>,
    ) -> Option<Arc<Hold>> {
        let (sent, length) = (start.sent, start.terms.lease().length());
        let first = start.first.map_or(sent, |first| first.sent);
        let end = start.terms.end().map(|end| first + end);
        let deadline = (sent + start.valid_for.min(length) - Lease::margin(length))
            .min(end.unwrap_or(Instant::FAR));
        // A fixed lease ends there, whatever a renewal proves. Only a session has to be proven to last that
        // long.
        let is_set = !start.terms.lease().is_renewed() && !self.caps.session_bound;
        let end = if is_set { Some(deadline) } else { end };
        if deadline <= now {
            return None;
        }
        let hold = Arc::new(Hold::new(&start, now, deadline));
        if !hold.is_live(&self.clock) {
            return None; // the presence that it depends on is over
        }
        let unwanted = self.enter(&hold, waiter)?;
        hold.class.begun();
        for ticket in unwanted {
            self.leave_queue(&hold.name, ticket);
        }
        self.watch(&hold, sent, end);
        if let GuardState::Lost(reason @ LossReason::Presence) = hold.state(&self.clock) {
            self.lose(&hold, reason); // it entered the table after those that were lost with it
        }
        Some(hold)
    }

    /// Enters a hold in the lock table, unless the client is shutting down or the table has it already. If
    /// one owner has two holds with different tokens, the store has forgotten the one with the smaller
    /// token. Returns the tickets that no waiter wants any more.
    fn enter(self: &Arc<Self>, hold: &Arc<Hold>, waiter: Option<Granted>) -> Option<Vec<Ticket>> {
        let mut stale = Vec::new();
        let unwanted = {
            let mut table = self.table();
            if self.is_closing() {
                return None;
            }
            let entry = table.entry(&hold.name);
            for other in entry.holds.iter().filter(|other| other.owner == hold.owner) {
                if other.id == hold.id {
                    return None;
                }
                if other.token > hold.token {
                    return None;
                }
                if other.token < hold.token {
                    stale.push(Arc::clone(other));
                }
            }
            entry.holds.push(Arc::clone(hold));
            waiter.map_or_else(Vec::new, |waiter| entry.queue.granted(&waiter))
        };
        for other in stale {
            self.lose(&other, LossReason::NotHeld);
        }
        Some(unwanted)
    }

    /// Removes a hold that is over for this client, whatever the store says.
    /// Returns whether the table had it.
    pub(crate) fn leave_table(&self, hold: &Arc<Hold>, end: HoldEnd) -> bool {
        let struck = self.strike(hold);
        if struck {
            hold.class.ended(end, hold.held_for(&self.clock));
        }
        struck
    }

    /// The same without the count of how it ended. Returns whether it was there.
    pub(crate) fn strike(&self, hold: &Arc<Hold>) -> bool {
        let struck = self.table().strike(hold);
        self.is_quieter();
        struck
    }

    pub(crate) fn lose(self: &Arc<Self>, hold: &Arc<Hold>, reason: LossReason) {
        // The guard may have noticed the deadline first, or nothing has yet.
        let is_news = hold.lose(reason);
        if hold.is_given_up() || hold.is_detached() {
            return; // what has begun to release or detach it counts how it ends
        }
        let struck = self.leave_table(hold, HoldEnd::Lost(reason));
        self.stop_renewing(hold);
        self.lose_dependents(hold);
        if is_news || struck {
            self.tell_lost(hold, reason); // else its release did
        }
        if let Some(end) = hold.terms.end()
            && reason == LossReason::Deadline
            && self.caps.session_bound
        {
            // The session would hold it beyond its end. A release ends it, at its full end and not before.
            let mut job = CleanupJob::of(hold);
            job.after = hold.sent + end + Lease::margin(hold.lease().length());
            self.clean_up(job);
        }
        self.wake(&hold.name);
    }

    pub(crate) fn tell_lost(&self, hold: &Hold, reason: LossReason) {
        let unattended = hold.is_unattended();
        let why = if unattended { UNATTENDED } else { "" };
        tracing::warn!(
            target: "dlock::lost", lock = %hold.name, backend = self.caps.backend, owner = %hold.owner,
            reason = reason.as_str(), held_us = micros(hold.held_for(&self.clock)), unattended, "lock lost: {reason}{why}"
        );
    }

    /// The lock may be free: makes this client's waiters poll. A store with a queue notifies its head
    /// itself.
    pub(crate) fn wake(&self, name: &LockName) {
        if self.caps.wake != crate::driver::Wake::Queue
            && let Some(entry) = self.table().find(name)
        {
            entry.queue.wake();
        }
    }

    /// Registers a request that a shutdown waits for, until the value is dropped.
    pub(crate) fn active<I: Deref<Target = Self>>(engine: I) -> Active<I> {
        engine.active.fetch_add(1, SeqCst);
        Active(engine)
    }

    /// Whether nothing is held, in flight or being cleaned up.
    pub(crate) fn is_quiet(&self) -> bool {
        self.active.load(SeqCst) == 0 && self.cleanup.len() == 0 && self.table().is_unheld()
    }

    /// Notifies a shutdown, which may have waited for what just ended.
    pub(crate) fn is_quieter(&self) {
        if self.is_closing() {
            self.quieter.notify_waiters();
        }
    }

    /// Resolves when the client begins to shut down.
    pub(crate) async fn shutting_down(&self) {
        until(&self.shutting_down, || self.is_closing()).await;
    }

    /// The same for a task that waits for an answer. The task is polled when the shutdown begins, so this
    /// needs no notification of its own.
    pub(crate) async fn shutting_down_meanwhile(&self) {
        poll_fn(|_| match self.is_closing() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    /// The holds that this client detached, with their deadlines. Expired ones are removed when the map is
    /// full.
    pub(crate) fn detached(&self) -> MutexGuard<'_, HashMap<HoldId, Instant>> {
        let now = self.clock.now();
        let mut detached = self.detached.lock();
        if detached.len() >= detached.capacity() {
            // A process that hands its holds on never attaches them again: forget the expired ones before
            // the map grows.
            detached.retain(|_, deadline| *deadline > now);
        }
        detached
    }

    /// How many of them have not expired.
    pub(crate) fn detached_living(&self) -> usize {
        let now = self.clock.now();
        let detached = self.detached();
        detached
            .values()
            .filter(|deadline| **deadline > now)
            .count()
    }

    pub(crate) fn has_hold(&self, name: &LockName, id: HoldId) -> bool {
        let mut table = self.table();
        let entry = table.find(name);
        entry.is_some_and(|entry| entry.holds.iter().any(|hold| hold.id == id))
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, LockTable> {
        self.table.lock()
    }

    pub(crate) fn ticket(&self) -> Ticket {
        let number = self.tickets.fetch_add(1, SeqCst);
        Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
    }

    /// Whether a call may be awaited here: the client's own runtime has timers.
    pub(crate) fn check_runtime(&self) -> Result<(), Error> {
        match Handle::try_current() {
            Ok(here) if here.id() == self.calls.handle.id() => Ok(()),
            _ => Ok(runtime::current().map(drop)?),
        }
    }

    pub(crate) fn closed() -> Error {
        Error::new(ErrorKind::ShuttingDown, "the client is already shut down")
    }
}

/// A request in flight that a shutdown waits for.
#[derive(Debug)]
pub(crate) struct Active<I: Deref<Target = Engine>>(I);

impl<I: Deref<Target = Engine>> Deref for Active<I> {
    type Target = I;

    fn deref(&self) -> &I {
        &self.0
    }
}

impl<I: Deref<Target = Engine>> Drop for Active<I> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, SeqCst);
        self.0.is_quieter();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for task in self.tasks.get_mut().drain(..) {
            task.abort();
        }
        let driver = Arc::clone(&self.driver);
        self.calls.handle.spawn(async move { driver.close().await });
    }
}

/// Waits for `done`, which may have changed whenever `notify` is notified.
pub(crate) async fn until(notify: &Notify, done: impl Fn() -> bool + Send) {
    loop {
        let mut notified = pin!(notify.notified());
        notified.as_mut().enable();
        if done() {
            return;
        }
        notified.await;
    }
}
