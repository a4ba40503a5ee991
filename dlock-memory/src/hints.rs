//! Who waits for a name, who is told, and how it gets there.

use crate::{
    config::Terms,
    connection::Places,
    fault::{FaultPlan, HintFault},
};
use dlock_core::{Hint, LockName, Ticket, Wake};
use futures_core::Stream;
use std::{
    collections::{BTreeMap, VecDeque},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

/// Who waits for one name: tickets in line, and clients that only want to hear of it.
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

/// Where a ticket belongs: the server's time when it first stood there, and a number for tickets of one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(Duration, u64);

#[derive(Clone, Copy, Debug)]
struct Standing {
    place: Place,
    whose: Standee,
    /// Counts as dead from then on, unless it looks.
    deadline: Duration,
    accept: Duration,
    interval: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Watcher {
    whose: Standee,
    deadline: Duration,
}

/// Who was served.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Served {
    /// The one who asked.
    Me,
    /// The first in line, who has the name to itself for a while.
    Next(Reservation),
    /// Nobody is left in line.
    Nobody,
}

/// The name is free, but only for this ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reservation {
    pub(crate) whose: Standee,
    pub(crate) until: Duration,
}

impl Line {
    /// Lets a ticket wait as its driver is woken; says where it stands in line, if it does. One that stands already stays
    /// where it is, and its deadline is moved.
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

    /// How many tickets stand before that place.
    pub(crate) fn ahead(&self, place: Place) -> usize {
        self.standing.partition_point(|other| other.place < place)
    }

    /// Whether nobody stands in line, not even a dead ticket.
    pub(crate) fn is_empty(&self) -> bool {
        self.standing.is_empty()
    }

    /// A ticket is over. Says whether it stood in line.
    pub(crate) fn forget(&mut self, whose: Standee) -> bool {
        let stood = self.standing.len();
        self.standing.retain(|standing| standing.whose != whose);
        self.watchers.retain(|watcher| watcher.whose != whose);
        self.standing.len() < stood
    }

    /// Hands a free name to the first in line who is still there. Whoever is taken out on the way is forgotten: its client
    /// knows its place, and its next look puts it back.
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
            // The one behind it hears first: if the grantee is dead after all, it costs its accept lease and no more.
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

    /// Tells the first in line that it is, and when to look at the latest. Takes out dead ones before it.
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
                look_in: rest.min(first.interval),
            };
            peers.pushes.push((first.whose.client, hint));
        }
    }

    /// Tells every client that wants to hear of it, once, that the name is free.
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

    /// How many stand in line and may be served.
    pub(crate) fn waiters(&self, peers: &Peers, now: Duration) -> usize {
        self.standing
            .iter()
            .filter(|one| one.lives(peers, now))
            .count()
    }

    /// How many tickets are kept, dead ones included.
    pub(crate) fn tickets(&self) -> usize {
        self.standing.len() + self.watchers.len()
    }

    /// Whether no ticket has looked in time.
    pub(crate) fn is_over(&self, now: Duration) -> bool {
        self.standing.iter().all(|one| one.deadline <= now)
            && self.watchers.iter().all(|one| one.deadline <= now)
    }
}

impl Standing {
    /// Whether it may be served: it looked in time, and its client would hear of it.
    fn lives(&self, peers: &Peers, now: Duration) -> bool {
        self.deadline > now && peers.listens(self.whose.client)
    }
}

/// Who is connected, and what is to be sent to them after the step.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pub(crate) inboxes: BTreeMap<ClientId, Arc<Inbox>>,
    pub(crate) pushes: Vec<(ClientId, Hint)>,
    /// Tells places of one instant apart.
    placed: u64,
    connected: u64,
}

impl Peers {
    /// A new client, whose hints go there.
    pub(crate) fn connect(&mut self, inbox: Arc<Inbox>) -> ClientId {
        self.connected += 1;
        let client = ClientId(self.connected);
        self.inboxes.insert(client, inbox);
        client
    }

    /// Every client may have missed something.
    pub(crate) fn tell_all_to_look(&mut self) {
        let Self {
            inboxes, pushes, ..
        } = self;
        pushes.extend(inboxes.keys().map(|client| (*client, Hint::LookAgain)));
    }

    /// Whether a push to that client would find a receiver.
    fn listens(&self, client: ClientId) -> bool {
        self.inboxes
            .get(&client)
            .is_some_and(|inbox| inbox.listens())
    }
}

/// One driver, as the server knows it. Tickets of two clients differ by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientId(u64);

/// Where the server puts one client's hints. Bounded: what does not fit is dropped, and one [`Hint::LookAgain`] says so.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    hints: VecDeque<Hint>,
    /// Something was dropped since the last `LookAgain`.
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

    /// A hint from the server, which may be lost on the way.
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

    /// A hint that has arrived.
    pub(crate) fn put(&self, hint: Hint) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        if hint == Hint::LookAgain || queue.hints.len() >= CAPACITY {
            queue.missed = true;
        } else {
            queue.hints.push_back(hint);
        }
        wake(queue);
    }

    pub(crate) fn set_fault(&self, fault: HintFault) {
        let before = std::mem::replace(&mut self.lock().fault, fault);
        if before == HintFault::Cut && fault != HintFault::Cut {
            self.put(Hint::LookAgain);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.lock().plan = plan;
    }

    /// Nobody listens any more; the stream ends after what has arrived.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        wake(queue);
    }

    /// The stream, once.
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

/// Wakes the reader when the lock is given back: what it runs may want the inbox, or drop it.
fn wake(mut queue: MutexGuard<'_, Queue>) {
    let waker = queue.waker.take();
    drop(queue);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The stream of one client. Dropping it leaves the client without receivers: its tickets are taken out of every line.
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
            return Poll::Ready(Some(Hint::LookAgain));
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

/// How many hints may lie unread: several turns for each of the names a busy client waits for.
pub(crate) const CAPACITY: usize = 1024;
