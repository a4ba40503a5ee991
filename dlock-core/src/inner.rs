//! What a client's locks share: the state behind it, and what begins and ends a hold.

use crate::{
    book::{Book, Queue},
    call::Adrift,
    clock::{Clock, Instant},
    driver::{Capabilities, DistributedLock, Hint, Note},
    error::{Error, ErrorKind, LossReason},
    flaw::Flaw,
    guard::Guard,
    hold::{Hold, Start},
    identity::{HoldId, Owner, Ticket},
    janitor::{Janitor, Job},
    lease::Lease,
    name::LockName,
    watchdog::{Renewal, Watchdog, Watched},
};
use futures_util::StreamExt;
use rand::{RngExt, rngs::StdRng};
use std::{
    collections::HashMap,
    fmt,
    future::poll_fn,
    num::NonZeroU64,
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::{sync::Notify, task::JoinHandle};

pub(crate) struct Inner {
    pub(crate) driver: Arc<dyn DistributedLock>,
    pub(crate) caps: Capabilities,
    pub(crate) store: Arc<str>,
    pub(crate) clock: Clock,
    pub(crate) adrift: Arc<Adrift>,
    pub(crate) note: Arc<Note>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) janitor: Janitor,
    pub(crate) look_cap: Duration,
    pub(crate) closing: AtomicBool,
    /// Holds that were detached here and not attached again.
    pub(crate) detached: Mutex<HashMap<HoldId, Instant>>,
    /// Notified when the client begins to shut down.
    pub(crate) revoked: Notify,
    /// The driver is closed: nothing can be undone any more.
    pub(crate) closed: AtomicBool,
    /// Acquires and releases under way, which a shutdown waits for.
    pub(crate) active: AtomicUsize,
    /// Notified, while shutting down, when something came to its end.
    pub(crate) quieter: Notify,
    pub(crate) lease: Lease,
    pub(crate) book: Mutex<Book>,
    pub(crate) rng: Mutex<StdRng>,
    pub(crate) tickets: AtomicU64,
    pub(crate) tasks: Mutex<Vec<JoinHandle<()>>>,
    pub(crate) flaw: Option<Flaw>,
}

/// Hears the store's hints until the driver is closed or the client gone.
pub(crate) async fn listen(client: Weak<Inner>) {
    let Some(mut hints) = client.upgrade().map(|inner| inner.driver.hints()) else {
        return;
    };
    while let Some(hint) = hints.next().await {
        let Some(inner) = client.upgrade() else {
            return;
        };
        inner.heard(hint);
    }
}

impl Inner {
    fn heard(self: &Arc<Self>, hint: Hint) {
        if self.flawed(Flaw::HintsIgnored) {
            return;
        }
        tracing::trace!(target: "dlock::hint", backend = self.caps.backend, ?hint);
        let now = self.clock.now();
        let wanted = self.book().hint(&hint, now);
        match hint {
            // Whoever stands behind a turn that nobody wants should not wait for its accept lease.
            Hint::Turn { name, ticket } if !wanted => self.leave_line(&name, ticket),
            Hint::Over(lane) => self.watchdog.over(lane, now),
            _ => {}
        }
    }

    /// Makes a guard of what the store granted; `None`: it is worth nothing, because it is over already or the client is shutting down.
    /// `arrive` hears of a guard before anybody else of the book.
    pub(crate) fn begin(
        self: &Arc<Self>,
        start: Start,
        now: Instant,
        arrive: impl FnOnce(&mut Queue),
    ) -> Option<Guard> {
        let (sent, length) = (start.sent, start.terms.lease().length());
        let counted = if self.flawed(Flaw::DeadlineFromReply) {
            now
        } else {
            sent
        };
        let first = start.first.map_or(sent, |first| first.sent);
        let ends = start
            .terms
            .end()
            .filter(|_| !self.flawed(Flaw::MaxHoldIgnored));
        let end = ends.map(|end| first + end);
        let deadline = (counted + start.valid_for.min(length) - Lease::margin(length))
            .min(end.unwrap_or(Instant::FAR));
        if deadline <= now {
            return None;
        }
        let shown = if self.flawed(Flaw::ClockIgnored) {
            Instant::FAR
        } else {
            deadline
        };
        let hold = Arc::new(Hold::new(&start, now, shown));
        if !self.enter(&hold, arrive) {
            return None;
        }
        let key = self.watchdog.watch(Watched {
            what: Arc::clone(&hold),
            name: start.name.clone(),
            lane: self.driver.lane(&start.name),
            sent,
            deadline,
            renewal: self.renews(hold.lease()),
            end,
        });
        hold.watched_as(key);
        Some(Guard::new(Arc::clone(self), hold))
    }

    fn renews(&self, lease: Lease) -> Option<Renewal> {
        let length = lease.length();
        if lease.is_kept() {
            return (!self.flawed(Flaw::NeverRenews)).then_some(Renewal {
                ask: Some(length),
                length,
            });
        }
        // A fixed lease on a session store lasts no longer than its session, which has to be proven.
        self.caps.session_bound.then(|| Renewal {
            ask: None,
            length: *self.caps.leases.end(),
        })
    }

    /// A hold begins, unless the client is shutting down or it is in the book already. Of two holds of one owner with two tokens, the
    /// one with the smaller is a hold that the store has forgotten.
    fn enter(self: &Arc<Self>, hold: &Arc<Hold>, arrive: impl FnOnce(&mut Queue)) -> bool {
        let mut stale = Vec::new();
        {
            let mut book = self.book();
            if self.is_closing() {
                return false;
            }
            let page = book.page(&hold.name);
            for other in page.holds.iter().filter(|other| other.owner == hold.owner) {
                if other.id == hold.id {
                    return false;
                }
                if self.flawed(Flaw::StaleHoldsBelieved) {
                    continue;
                }
                if other.token > hold.token {
                    return false;
                }
                if other.token < hold.token {
                    stale.push(Arc::clone(other));
                }
            }
            page.holds.push(Arc::clone(hold));
            arrive(&mut page.queue);
        }
        for other in stale {
            self.lose(&other, LossReason::NotHeld);
        }
        true
    }

    /// A hold is over for us, whatever the store says: out of the book, and who waits here may look.
    pub(crate) fn leave_book(&self, hold: &Arc<Hold>) {
        self.book().strike(hold);
        self.is_quieter();
    }

    pub(crate) fn lose(self: &Arc<Self>, hold: &Arc<Hold>, reason: LossReason) {
        self.leave_book(hold);
        if let Some(key) = hold.key() {
            self.watchdog.forget(key);
        }
        // The deadline may have been noticed first by the guard itself, or by nobody yet.
        hold.lose(reason);
        tracing::warn!(
            target: "dlock::lost", lock = %hold.name, backend = self.caps.backend, owner = %hold.owner,
            ?reason, "lock lost: {reason}"
        );
        if let Some(end) = hold.terms.end()
            && reason == LossReason::Deadline
            && self.caps.session_bound
        {
            // The session would keep it beyond its end: it is ended by a release, at its full end and not before.
            let mut job = Job::of(hold);
            job.after = hold.sent + end + Lease::margin(hold.lease().length());
            self.settle(job);
        }
        if !self.flawed(Flaw::LossWakesNobody) {
            self.poke(&hold.name);
        }
    }

    /// Perhaps free: whoever waits here looks. A store that keeps a line tells its head itself.
    pub(crate) fn poke(&self, name: &LockName) {
        if self.caps.wake != crate::driver::Wake::Line
            && let Some(page) = self.book().find(name)
        {
            page.queue.poke();
        }
    }

    /// Something is under way that a shutdown waits for, until the value is dropped.
    pub(crate) fn active<I: Deref<Target = Self>>(inner: I) -> Active<I> {
        inner.active.fetch_add(1, SeqCst);
        Active(inner)
    }

    /// Whether nothing is held, under way or being settled.
    pub(crate) fn is_quiet(&self) -> bool {
        self.active.load(SeqCst) == 0 && self.janitor.len() == 0 && self.book().is_unheld()
    }

    /// Something came to its end: a shutdown may have waited for it.
    pub(crate) fn is_quieter(&self) {
        if self.is_closing() {
            self.quieter.notify_waiters();
        }
    }

    /// Resolves when the client begins to shut down.
    pub(crate) async fn revoked(&self) {
        loop {
            let revoked = self.revoked.notified();
            let mut revoked = std::pin::pin!(revoked);
            revoked.as_mut().enable();
            if self.is_closing() {
                return;
            }
            revoked.await;
        }
    }

    /// The same for whoever waits for an answer: he is polled when it begins, so this stands in no list of its own.
    pub(crate) async fn revoked_meanwhile(&self) {
        poll_fn(|_| match self.is_closing() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    /// Whether the driver was closed: what is not undone by now is left to its lease.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    /// The holds that were detached here, with their deadlines, as far as these are not over.
    pub(crate) fn detached(&self) -> MutexGuard<'_, HashMap<HoldId, Instant>> {
        let now = self.clock.now();
        let mut detached = self.detached.lock().unwrap_or_else(PoisonError::into_inner);
        if detached.len() >= detached.capacity() {
            // Whoever hands holds on to other processes never takes them back: forget what is over before there is room for more.
            detached.retain(|_, deadline| *deadline > now);
        }
        detached
    }

    /// How many of them are not over.
    pub(crate) fn detached_living(&self) -> usize {
        let now = self.clock.now();
        let detached = self.detached();
        detached
            .values()
            .filter(|deadline| **deadline > now)
            .count()
    }

    pub(crate) fn has_hold(&self, name: &LockName, id: HoldId) -> bool {
        let mut book = self.book();
        let page = book.find(name);
        page.is_some_and(|page| page.holds.iter().any(|hold| hold.id == id))
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold_id(&self) -> HoldId {
        HoldId::random(&mut *self.rng())
    }

    pub(crate) fn fresh_owner(&self) -> Owner {
        self.owner_from(&mut self.rng())
    }

    pub(crate) fn fresh_identity(&self) -> (Owner, HoldId) {
        let mut rng = self.rng();
        (self.owner_from(&mut rng), HoldId::random(&mut *rng))
    }

    fn owner_from(&self, rng: &mut StdRng) -> Owner {
        if self.flawed(Flaw::OneOwner) {
            return Owner::from_seed("one");
        }
        Owner::random(rng)
    }

    /// A number from 0 to 1.
    pub(crate) fn jitter(&self) -> f64 {
        self.rng().random()
    }

    pub(crate) fn ticket(&self) -> Ticket {
        let number = self.tickets.fetch_add(1, SeqCst);
        Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn flawed(&self, flaw: Flaw) -> bool {
        cfg!(feature = "mutants") && self.flaw == Some(flaw)
    }

    pub(crate) fn tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rng(&self) -> MutexGuard<'_, StdRng> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn closed() -> Error {
        Error::new(ErrorKind::ShuttingDown, "the client was shut down before")
    }
}

/// Something under way that a shutdown waits for.
#[derive(Debug)]
pub(crate) struct Active<I: Deref<Target = Inner>>(I);

impl<I: Deref<Target = Inner>> Deref for Active<I> {
    type Target = I;

    fn deref(&self) -> &I {
        &self.0
    }
}

impl<I: Deref<Target = Inner>> Drop for Active<I> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, SeqCst);
        self.0.is_quieter();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in self.tasks().drain(..) {
            task.abort();
        }
        let driver = Arc::clone(&self.driver);
        self.adrift
            .handle
            .spawn(async move { driver.close().await });
    }
}

// The driver prints itself without secrets; the random source would print its state.
impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}
