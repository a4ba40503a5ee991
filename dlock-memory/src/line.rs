//! Queue of one name: the tickets that wait for it in their order, and the clients that only watch it.

use crate::{config::MemoryConfig, inbox::Inbox};
use dlock_core::{
    Lease, LockName,
    driver::{Ticket, Wake, WakeUp},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

/// The waiters of one name.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Sorted by position.
    queued: Vec<Queued>,
    /// In no order.
    watchers: Vec<Watcher>,
}

/// A ticket of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientTicket {
    pub(crate) client: ClientId,
    pub(crate) ticket: Ticket,
}

/// A ticket's position in the queue: the server's time when it was first queued, and a number for tickets of
/// one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuePosition(Duration, u64);

#[derive(Clone, Copy, Debug)]
struct Queued {
    position: QueuePosition,
    ticket: ClientTicket,
    /// The ticket counts as dead from then on, unless it polls.
    deadline: Duration,
    terms: Terms,
}

#[derive(Clone, Copy, Debug)]
struct Watcher {
    ticket: ClientTicket,
    deadline: Duration,
}

/// The lock is available, but only to this ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub(crate) ticket: ClientTicket,
    pub(crate) until: Duration,
}

/// How one ticket waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    wake: Wake,
    /// How long its turn stays reserved.
    turn: Duration,
    /// Its poll interval.
    interval: Duration,
}

impl Terms {
    pub(crate) fn new(config: &MemoryConfig, lease: Lease) -> Self {
        let third = lease.length() / 3;
        Self {
            wake: config.wake,
            turn: config.accept.max(SHORTEST_TURN).min(third),
            interval: third.min(LONGEST_INTERVAL),
        }
    }

    /// When a refused ticket polls next, with so many before it in the queue, if the lock is available after `rest`.
    pub(crate) fn poll_in(&self, rest: Duration, ahead: Option<usize>) -> Duration {
        match self.wake {
            Wake::Queue if ahead == Some(0) => rest.min(self.interval),
            Wake::Queue => self.interval,
            Wake::Notify => rest.min(LONGEST_INTERVAL),
            _ => rest,
        }
    }

    /// How long a ticket counts after a poll: three polls, so one may be lost and another late.
    fn silence(&self) -> Duration {
        self.interval * 3
    }
}

/// One command about one name: what it reads, and where its wake-ups go.
#[derive(Debug)]
pub(crate) struct Command<'a> {
    pub(crate) name: &'a LockName,
    pub(crate) now: Duration,
    pub(crate) clients: &'a mut Clients,
}

impl Command<'_> {
    fn push(&mut self, client: ClientId, wake_up: WakeUp) {
        self.clients.pushes.push((client, wake_up));
    }
}

impl Line {
    /// Adds a waiting ticket as its driver is woken; returns its position in the queue, if it has one. A ticket that is
    /// queued already keeps its position, and its deadline is moved.
    pub(crate) fn put(
        &mut self,
        command: &mut Command<'_>,
        ticket: ClientTicket,
        terms: Terms,
        position: Option<QueuePosition>,
    ) -> Option<QueuePosition> {
        let deadline = command.now + terms.silence();
        match terms.wake {
            Wake::Queue => {}
            Wake::Notify => {
                self.watchers.retain(|watcher| watcher.ticket != ticket);
                self.watchers.push(Watcher { ticket, deadline });
                return None;
            }
            _ => return None,
        }
        if let Some(queued) = self.queued.iter_mut().find(|one| one.ticket == ticket) {
            queued.deadline = deadline;
            return Some(queued.position);
        }
        let position = position.unwrap_or_else(|| command.clients.next_position(command.now));
        let queued = Queued {
            position,
            ticket,
            deadline,
            terms,
        };
        self.queued.insert(self.ahead(position), queued);
        Some(position)
    }

    /// The number of tickets before that position.
    pub(crate) fn ahead(&self, position: QueuePosition) -> usize {
        self.queued
            .partition_point(|other| other.position < position)
    }

    /// Whether the queue is empty, without even a dead ticket.
    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Removes a ticket. Returns whether it was in the queue.
    pub(crate) fn forget(&mut self, ticket: ClientTicket) -> bool {
        let before = self.queued.len();
        self.queued.retain(|queued| queued.ticket != ticket);
        self.watchers.retain(|watcher| watcher.ticket != ticket);
        self.queued.len() < before
    }

    /// Gives a free lock to the first living ticket in the queue. `None`: that is the requester `me`, or no ticket is
    /// left. Tickets that are removed on the way are forgotten: their clients know their positions, and the next poll
    /// puts them back.
    pub(crate) fn serve(
        &mut self,
        command: &mut Command<'_>,
        me: Option<ClientTicket>,
    ) -> Option<Turn> {
        while !self.queued.is_empty() {
            let first = self.queued.remove(0);
            if Some(first.ticket) == me {
                return None;
            }
            if !first.lives(command.clients, command.now) {
                continue;
            }
            // The next ticket is told first: if this one is dead after all, it costs its turn and no more.
            self.tell_first(command, first.terms.turn);
            let ClientTicket { client, ticket } = first.ticket;
            let name = command.name.clone();
            command.push(client, WakeUp::Turn { name, ticket });
            return Some(Turn {
                ticket: first.ticket,
                until: command.now + first.terms.turn,
            });
        }
        None
    }

    /// Tells the first in the queue that it is first, and when to poll at the latest. Removes dead tickets before it.
    pub(crate) fn tell_first(&mut self, command: &mut Command<'_>, rest: Duration) {
        let lives = |one: &Queued| one.lives(command.clients, command.now);
        let living = self.queued.iter().position(lives);
        self.queued.drain(..living.unwrap_or(self.queued.len()));
        if let Some(first) = self.queued.first() {
            let wake_up = WakeUp::First {
                name: command.name.clone(),
                ticket: first.ticket.ticket,
                poll_in: rest.min(first.terms.interval),
            };
            command.push(first.ticket.client, wake_up);
        }
    }

    /// Tells every watching client, once, that the name is free.
    pub(crate) fn tell_watchers(&mut self, command: &mut Command<'_>) {
        self.watchers
            .retain(|one| one.deadline > command.now && command.clients.listens(one.ticket.client));
        let watching: BTreeSet<_> = self.watchers.iter().map(|one| one.ticket.client).collect();
        for client in watching {
            command.push(client, WakeUp::Free(command.name.clone()));
        }
    }

    /// The number of queued tickets that may be served.
    pub(crate) fn waiters(&self, clients: &Clients, now: Duration) -> usize {
        let living = self.queued.iter().filter(|one| one.lives(clients, now));
        living.count()
    }

    /// The number of tickets, including dead ones.
    pub(crate) fn tickets(&self) -> usize {
        self.queued.len() + self.watchers.len()
    }

    /// Whether no ticket has polled in time.
    pub(crate) fn is_over(&self, now: Duration) -> bool {
        let queued = self.queued.iter().map(|one| one.deadline);
        let mut deadlines = queued.chain(self.watchers.iter().map(|one| one.deadline));
        deadlines.all(|deadline| deadline <= now)
    }
}

impl Queued {
    /// Whether a ticket may be served: it polled in time, and its client can be notified.
    fn lives(&self, clients: &Clients, now: Duration) -> bool {
        self.deadline > now && clients.listens(self.ticket.client)
    }
}

/// The connected clients, and what is to be sent to them after the command.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    pub(crate) inboxes: BTreeMap<ClientId, Arc<Inbox>>,
    pub(crate) pushes: Vec<(ClientId, WakeUp)>,
    /// Distinguishes positions of one instant.
    placed: u64,
    connected: u64,
}

impl Clients {
    /// Registers a new client, whose wake-ups go to that inbox.
    pub(crate) fn connect(&mut self, inbox: Arc<Inbox>) -> ClientId {
        self.connected += 1;
        let client = ClientId(self.connected);
        self.inboxes.insert(client, inbox);
        client
    }

    /// Every client may have missed a wake-up.
    pub(crate) fn resync(&mut self) {
        let clients = self.inboxes.keys();
        self.pushes
            .extend(clients.map(|client| (*client, WakeUp::Resync)));
    }

    fn next_position(&mut self, now: Duration) -> QueuePosition {
        self.placed += 1;
        QueuePosition(now, self.placed)
    }

    /// Whether a push to that client would find a receiver.
    fn listens(&self, client: ClientId) -> bool {
        let inbox = self.inboxes.get(&client);
        inbox.is_some_and(|inbox| inbox.listens())
    }
}

/// One driver, as the server knows it. It distinguishes the tickets of two clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientId(u64);

/// With a shorter time no turn could be taken.
const SHORTEST_TURN: Duration = Duration::from_millis(1);

/// The longest poll interval of a waiter of a long lease: a flushed store costs it no more.
const LONGEST_INTERVAL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::Terms;
    use crate::config::MemoryConfig;
    use dlock_core::Lease;
    use std::time::Duration;

    #[test]
    fn terms_follow_the_lease_up_to_their_bounds() {
        let of = |millis| {
            let lease = Lease::renewed(Duration::from_millis(millis));
            let terms = Terms::new(&MemoryConfig::default(), lease);
            [terms.turn, terms.interval, terms.silence()].map(|span| span.as_millis())
        };
        assert_eq!(of(300), [100, 100, 300]);
        assert_eq!(of(4_500), [1_000, 1_500, 4_500]);
        assert_eq!(of(3_600_000), [1_000, 2_000, 6_000]);
    }
}
