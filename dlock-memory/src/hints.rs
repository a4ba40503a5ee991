//! Wake-ups: the waiters of a name, and how a notification reaches them.

use crate::{
    config::Terms,
    connection::Places,
    fault::{FaultPlan, HintFault},
};
use dlock_core::{
    LockName,
    driver::{Hint, Ticket, Wake},
};
use futures_core::Stream;
use std::{
    collections::{BTreeMap, VecDeque},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

/// The waiters of one name: tickets in the queue, and clients that only watch the name.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Sorted by place.
    standing: Vec<Standing>,
    /// In no order.
    watchers: Vec<Watcher>,
}

/// A ticket of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standee {
    pub(crate) client: ClientId,
    pub(crate) ticket: Ticket,
}

/// A ticket's place in the queue: the server's time when it was first queued, and a number for tickets of
/// one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(Duration, u64);

#[derive(Clone, Copy, Debug)]
struct Standing {
    place: Place,
    whose: Standee,
    /// The ticket counts as dead from then on, unless it polls.
    deadline: Duration,
    accept: Duration,
    interval: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Watcher {
    whose: Standee,
    deadline: Duration,
}

/// The waiter that was served.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Served {
    /// The requester.
    Me,
    /// The first in the queue, for which the name is reserved for a while.
    Next(Reservation),
    /// No waiter is left in the queue.
    Nobody,
}

/// The name is free, but only for this ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reservation {
    pub(crate) whose: Standee,
    pub(crate) until: Duration,
}

impl Line {
    /// Adds a waiting ticket as its driver is woken; returns its place in the queue, if it has one. A
    /// ticket that is already queued keeps its place, and its deadline is moved.
    pub(crate) fn put(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        whose: Standee,
        (terms, place): (Terms, Option<Place>),
    ) -> Option<Place> {
        let deadline = now + terms.entry;
        match terms.wake {
            Wake::Line => {}
            Wake::Hints => {
                self.watchers.retain(|watcher| watcher.whose != whose);
                self.watchers.push(Watcher { whose, deadline });
                return None;
            }
            _ => return None,
        }
        if let Some(standing) = self.standing.iter_mut().find(|one| one.whose == whose) {
            standing.deadline = deadline;
            return Some(standing.place);
        }
        let place = place.unwrap_or_else(|| {
            peers.placed += 1;
            Place(now, peers.placed)
        });
        let standing = Standing {
            place,
            whose,
            deadline,
            accept: terms.accept,
            interval: terms.interval,
        };
        self.standing.insert(self.ahead(place), standing);
        Some(place)
    }

    /// The number of tickets before that place.
    pub(crate) fn ahead(&self, place: Place) -> usize {
        self.standing.partition_point(|other| other.place < place)
    }

    /// Whether the queue is empty, without even a dead ticket.
    pub(crate) fn is_empty(&self) -> bool {
        self.standing.is_empty()
    }

    /// Removes a ticket. Returns whether it was in the queue.
    pub(crate) fn forget(&mut self, whose: Standee) -> bool {
        let stood = self.standing.len();
        self.standing.retain(|standing| standing.whose != whose);
        self.watchers.retain(|watcher| watcher.whose != whose);
        self.standing.len() < stood
    }

    /// Hands a free name to the first living ticket in the queue. Tickets that are removed on the way are
    /// forgotten: their clients know their places, and the next poll puts them back.
    pub(crate) fn serve(
        &mut self,
        peers: &mut Peers,
        name: &LockName,
        now: Duration,
        me: Option<Standee>,
    ) -> Served {
        while !self.standing.is_empty() {
            let first = self.standing.remove(0);
            if Some(first.whose) == me {
                return Served::Me;
            }
            if !first.lives(peers, now) {
                continue;
            }
            // The next ticket hears first: if the grantee is dead after all, it costs its accept lease and
            // no more.
            self.tell_first(peers, name, now, first.accept);
            let Standee { client, ticket } = first.whose;
            let name = name.clone();
            peers.pushes.push((client, Hint::Turn { name, ticket }));
            return Served::Next(Reservation {
                whose: first.whose,
                until: now + first.accept,
            });
        }
        Served::Nobody
    }

    /// Tells the first in the queue that it is first, and when to poll at the latest. Removes dead tickets
    /// before it.
    pub(crate) fn tell_first(
        &mut self,
        peers: &mut Peers,
        name: &LockName,
        now: Duration,
        rest: Duration,
    ) {
        let dead = self
            .standing
            .iter()
            .take_while(|one| !one.lives(peers, now))
            .count();
        self.standing.drain(..dead);
        if let Some(first) = self.standing.first() {
            let hint = Hint::First {
                name: name.clone(),
                ticket: first.whose.ticket,
                poll_in: rest.min(first.interval),
            };
            peers.pushes.push((first.whose.client, hint));
        }
    }

    /// Tells every watching client, once, that the name is free.
    pub(crate) fn tell_watchers(&mut self, peers: &mut Peers, name: &LockName, now: Duration) {
        self.watchers
            .retain(|watcher| watcher.deadline > now && peers.listens(watcher.whose.client));
        for (at, Watcher { whose, .. }) in self.watchers.iter().enumerate() {
            let told = &self.watchers[..at];
            if !told.iter().any(|other| other.whose.client == whose.client) {
                peers.pushes.push((whose.client, Hint::Free(name.clone())));
            }
        }
    }

    /// The number of queued tickets that may be served.
    pub(crate) fn waiters(&self, peers: &Peers, now: Duration) -> usize {
        self.standing
            .iter()
            .filter(|one| one.lives(peers, now))
            .count()
    }

    /// The number of tickets, including dead ones.
    pub(crate) fn tickets(&self) -> usize {
        self.standing.len() + self.watchers.len()
    }

    /// Whether no ticket has polled in time.
    pub(crate) fn is_over(&self, now: Duration) -> bool {
        self.standing.iter().all(|one| one.deadline <= now)
            && self.watchers.iter().all(|one| one.deadline <= now)
    }
}

impl Standing {
    /// Whether a ticket may be served: it polled in time, and its client can be notified.
    fn lives(&self, peers: &Peers, now: Duration) -> bool {
        self.deadline > now && peers.listens(self.whose.client)
    }
}

/// The connected clients, and what is to be sent to them after the step.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pub(crate) inboxes: BTreeMap<ClientId, Arc<Inbox>>,
    pub(crate) pushes: Vec<(ClientId, Hint)>,
    /// Distinguishes places of one instant.
    placed: u64,
    connected: u64,
}

impl Peers {
    /// Registers a new client, whose hints go to that inbox.
    pub(crate) fn connect(&mut self, inbox: Arc<Inbox>) -> ClientId {
        self.connected += 1;
        let client = ClientId(self.connected);
        self.inboxes.insert(client, inbox);
        client
    }

    /// Every client may have missed a hint.
    pub(crate) fn tell_all_to_look(&mut self) {
        let Self {
            inboxes, pushes, ..
        } = self;
        pushes.extend(inboxes.keys().map(|client| (*client, Hint::Resync)));
    }

    /// Whether a push to that client would find a receiver.
    fn listens(&self, client: ClientId) -> bool {
        self.inboxes
            .get(&client)
            .is_some_and(|inbox| inbox.listens())
    }
}

/// One driver, as the server knows it. It distinguishes the tickets of two clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientId(u64);

/// One client's inbox for hints. Bounded: a hint that does not fit is dropped, and one [`Hint::Resync`]
/// says so.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    hints: VecDeque<Hint>,
    /// A hint was dropped since the last `Resync`.
    missed: bool,
    /// The stream was taken.
    taken: bool,
    /// The driver is closed, or the stream was dropped: no receivers.
    closed: bool,
    fault: HintFault,
    plan: Option<FaultPlan>,
    waker: Option<Waker>,
}

impl Inbox {
    /// Whether the server would find a receiver: what `PUBLISH` counts.
    pub(crate) fn listens(&self) -> bool {
        let queue = self.lock();
        !queue.closed && queue.fault != HintFault::Cut
    }

    /// Puts a hint from the server into the inbox; the fault script may lose it.
    pub(crate) fn push(&self, hint: Hint) {
        let fault = {
            let mut queue = self.lock();
            match (queue.fault, &mut queue.plan) {
                (HintFault::Deliver, Some(plan)) => plan.draw_hint(),
                (standing, _) => standing,
            }
        };
        match fault {
            HintFault::Deliver => self.put(hint),
            HintFault::Double => {
                self.put(hint.clone());
                self.put(hint);
            }
            HintFault::Lose | HintFault::Cut => {}
        }
    }

    /// Puts a hint that has arrived into the inbox.
    pub(crate) fn put(&self, hint: Hint) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        if hint == Hint::Resync || queue.hints.len() >= CAPACITY {
            queue.missed = true;
        } else {
            queue.hints.push_back(hint);
        }
        wake(queue);
    }

    pub(crate) fn set_fault(&self, fault: HintFault) {
        let before = std::mem::replace(&mut self.lock().fault, fault);
        if before == HintFault::Cut && fault != HintFault::Cut {
            self.put(Hint::Resync);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.lock().plan = plan;
    }

    /// No client listens any more; the stream ends after the hints that have arrived.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        wake(queue);
    }

    /// The stream, which can be taken once.
    pub(crate) fn take(self: &Arc<Self>, places: &Arc<Places>) -> Option<Hints> {
        let first = !std::mem::replace(&mut self.lock().taken, true);
        first.then(|| Hints {
            inbox: Arc::clone(self),
            places: Arc::clone(places),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the reader after the lock is released: the woken code may use the inbox, or drop it.
fn wake(mut queue: MutexGuard<'_, Queue>) {
    let waker = queue.waker.take();
    drop(queue);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The stream of one client. Dropping it leaves the client without receivers: its tickets are removed from
/// every queue.
#[derive(Debug)]
pub(crate) struct Hints {
    inbox: Arc<Inbox>,
    places: Arc<Places>,
}

impl Stream for Hints {
    type Item = Hint;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Hint>> {
        let mut queue = self.inbox.lock();
        if let Some(hint) = queue.hints.pop_front() {
            drop(queue);
            if let Hint::Turn { ticket, .. } = &hint {
                self.places.turned(*ticket);
            }
            return Poll::Ready(Some(hint));
        }
        if std::mem::take(&mut queue.missed) {
            return Poll::Ready(Some(Hint::Resync));
        }
        if queue.closed {
            return Poll::Ready(None);
        }
        queue.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// The most unread hints: several turns for each of the names for which a busy client waits.
pub(crate) const CAPACITY: usize = 1024;
