//! Lock table: per lock name, the client's live holds and its local queue of waiters.
//!
//! However many tasks of a client wait for a name, the store sees one waiter. It is the head of the queue,
//! which has the ticket and does the polling. Sharers behind it ask, too, while the lock has room for them.

use crate::{
    clock::{Clock, Instant},
    driver::{Ticket, WakeUp},
    engine::{hold::Hold, spread::SpreadMap},
    name::LockName,
    owner::Owner,
};
use std::{
    collections::{BTreeMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct LockTable {
    entries: SpreadMap<LockName, LockEntry>,
    /// The buffers of removed entries: locks that come and go allocate none.
    spare: Vec<Vec<Arc<Hold>>>,
}

/// The entry of one name.
#[derive(Debug, Default)]
pub(crate) struct LockEntry {
    pub(crate) holds: Vec<Arc<Hold>>,
    pub(crate) queue: Queue,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Kept apart from the map, so that a lock with one waiter needs no map.
    head: Option<(Seat, Arc<Waiter>)>,
    /// Keyed by seat, so that any of many waiters can leave without a walk past the others.
    behind: BTreeMap<Seat, Arc<Waiter>>,
    /// How many seats were given out.
    seats: i64,
    /// How many of the waiters want the lock alone.
    pub(crate) alone: usize,
    /// How many sharers behind the head may ask at once, past the queue: the lock had room for them when one was
    /// granted it last, and none was refused since.
    pub(crate) beside: u32,
    /// The head's ticket in the store's queue.
    pub(crate) ticket: Option<Ticket>,
    /// The ticket of the next head, once this head is granted.
    pub(crate) next: Option<Ticket>,
    /// When the head polls again.
    pub(crate) poll_at: Instant,
    /// By when the head was told to poll, since its last attempt. The answer to that may be older.
    pub(crate) told: Option<Instant>,
    /// Polls since the last grant, for polling stores whose pause doubles.
    pub(crate) polls: u32,
    /// A wake-up came, and no attempt has followed it yet.
    pub(crate) woken: bool,
    /// A wake-up for `next` came before the answer that puts it in the queue.
    pub(crate) next_woken: bool,
    /// The ticket with which the last waiter was granted the lock: its turn needs no attempt any more.
    used: Option<Ticket>,
    /// The head's attempt was sent right behind a release, whose answer it does not wait for.
    behind_release: bool,
    /// Such an attempt was refused: other clients wait, too.
    contended: bool,
    /// The head does not ask before this time, even after a wake-up: the store failed.
    pub(crate) not_before: Instant,
    /// Since when the store has failed, for whatever head of the queue.
    pub(crate) failing: Option<Instant>,
}

/// A position in a queue: the smallest seat behind the head becomes the next head. No seat is given twice
/// while the queue has a waiter.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), derive(PartialEq, Eq, PartialOrd, Ord))]
pub(crate) struct Seat(i64);

/// The tickets that an attempt names: the waiter's place in the store's queue, and the next head's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tickets {
    pub(crate) current: Option<Ticket>,
    pub(crate) next: Option<Ticket>,
}

/// A waiter that was granted the lock, as its queue has to know it.
pub(crate) struct Granted {
    /// Its seat, unless it asked past the queue.
    pub(crate) seat: Option<Seat>,
    /// The tickets of the attempt that was granted.
    pub(crate) tickets: Tickets,
    /// An attempt before it was not answered.
    pub(crate) open: bool,
    /// The next head need not ask at once.
    pub(crate) queued: bool,
    /// It shares the lock: what woke it while it asked concerns the next head, too.
    pub(crate) shares: bool,
    /// The lock has room for the next head, too, if that is another sharer.
    pub(crate) has_room: bool,
    /// How many waiters behind the next head may ask at once, too.
    pub(crate) beside: u32,
    pub(crate) poll_at: Instant,
    pub(crate) now: Instant,
}

/// One waiting task.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// It wants to share the lock.
    pub(crate) shares: bool,
    /// Notified when the task became the head, or when the head has something to do.
    pub(crate) wake: Notify,
}

impl LockTable {
    pub(crate) fn entry(&mut self, name: &LockName) -> &mut LockEntry {
        let entry = self.entries.entry(name.clone());
        entry.or_insert_with(|| LockEntry {
            holds: self.spare.pop().unwrap_or_default(),
            queue: Queue::default(),
        })
    }

    pub(crate) fn find(&mut self, name: &LockName) -> Option<&mut LockEntry> {
        self.entries.get_mut(name)
    }

    /// Removes a name without holds and waiters.
    pub(crate) fn tidy(&mut self, name: &LockName) {
        self.change(name, |_| {});
    }

    /// Removes a hold. Returns whether it was there.
    pub(crate) fn strike(&mut self, hold: &Arc<Hold>) -> bool {
        let mut found = false;
        self.change(&hold.name, |entry| {
            let before = entry.holds.len();
            entry.holds.retain(|other| !Arc::ptr_eq(other, hold));
            found = entry.holds.len() < before;
        });
        found
    }

    /// Changes an existing entry, and removes it if it is empty afterwards.
    fn change(&mut self, name: &LockName, change: impl FnOnce(&mut LockEntry)) {
        if let Entry::Occupied(mut found) = self.entries.entry(name.clone()) {
            change(found.get_mut());
            if found.get().is_empty() {
                let LockEntry { mut holds, .. } = found.remove();
                if self.spare.len() < SPARE_BUFFERS {
                    holds.shrink_to(SPARE);
                    self.spare.push(holds);
                }
            }
        }
    }

    /// Every live hold, in an order that does not depend on hashing.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let mut holds: Vec<_> = self
            .entries
            .values()
            .flat_map(|entry| entry.holds.clone())
            .collect();
        holds.sort_by(|a, b| (&a.name, a.since, a.id).cmp(&(&b.name, b.since, b.id)));
        holds
    }

    pub(crate) fn is_unheld(&self) -> bool {
        self.entries.values().all(|entry| entry.holds.is_empty())
    }

    /// Passes a wake-up to its queue. Returns whether a waiter wants it.
    pub(crate) fn wake_up(&mut self, wake_up: &WakeUp, now: Instant) -> bool {
        match wake_up {
            // To poll now is to be woken: the answer to an earlier poll must not undo it.
            WakeUp::First {
                name,
                ticket,
                poll_in: Duration::ZERO,
            } => {
                self.wake_ticket(name, *ticket);
                true
            }
            WakeUp::Turn { name, ticket } => self.wake_ticket(name, *ticket),
            WakeUp::First {
                name,
                ticket,
                poll_in,
            } => {
                if let Some(entry) = self.entries.get_mut(name)
                    && entry.queue.ticket == Some(*ticket)
                {
                    entry.queue.poll_by(now + *poll_in);
                }
                true
            }
            WakeUp::Free(name) => {
                if let Some(entry) = self.entries.get_mut(name) {
                    entry.queue.wake();
                }
                true
            }
            // These concern no single name.
            WakeUp::Resync | WakeUp::Over(_) => true,
        }
    }

    /// Returns whether a waiter has that ticket.
    fn wake_ticket(&mut self, name: &LockName, ticket: Ticket) -> bool {
        let Some(entry) = self.entries.get_mut(name) else {
            return false;
        };
        let queue = &mut entry.queue;
        if queue.ticket == Some(ticket) && queue.len() > 0 {
            queue.wake();
            true
        } else {
            let early = queue.next == Some(ticket) && queue.len() > 1;
            queue.next_woken |= early;
            early || queue.used.take_if(|used| *used == ticket).is_some()
        }
    }

    /// The names that have a waiter, in no order.
    pub(crate) fn waited_for(&self) -> Vec<LockName> {
        let waited = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.queue.len() > 0);
        waited.map(|(name, _)| name.clone()).collect()
    }
}

/// The most spare buffers, some hundred bytes each: enough for the tasks of a busy client.
const SPARE_BUFFERS: usize = 128;

/// The capacity that a spare buffer keeps: one crowded name should not cost memory for ever.
const SPARE: usize = 16;

impl LockEntry {
    pub(crate) fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.queue.len() == 0
    }

    /// A hold of this client that is live, if the name has one.
    pub(crate) fn live(&self, clock: &Clock) -> Option<Arc<Hold>> {
        let live = self.holds.iter().find(|hold| hold.is_live(clock));
        live.map(Arc::clone)
    }

    /// The holds of an owner.
    pub(crate) fn of(&self, owner: Owner) -> impl Iterator<Item = &Arc<Hold>> {
        self.holds.iter().filter(move |hold| hold.owner == owner)
    }
}

impl Queue {
    /// Resets the queue for its first waiter, which asks at once, unless the store has just failed, and as many
    /// beside it.
    pub(crate) fn begin(&mut self, beside: u32) {
        self.beside = beside;
        self.poll_at = Instant::ORIGIN;
        self.told = None;
        self.polls = 0;
        self.woken = false;
        self.next_woken = false;
        self.behind_release = false;
        self.contended = false;
        self.not_before = Instant::ORIGIN;
        self.failing = None;
    }

    /// Enters behind all others.
    pub(crate) fn enter(&mut self, waiter: &Arc<Waiter>) -> Seat {
        self.seats += 1;
        let seat = Seat(self.seats);
        let waiter = Arc::clone(waiter);
        self.alone += usize::from(!waiter.shares);
        match self.head {
            None => self.head = Some((seat, waiter)),
            Some(_) => drop(self.behind.insert(seat, waiter)),
        }
        seat
    }

    pub(crate) fn is_head(&self, seat: Seat) -> bool {
        self.head.as_ref().is_some_and(|(head, _)| *head == seat)
    }

    pub(crate) fn len(&self) -> usize {
        usize::from(self.head.is_some()) + self.behind.len()
    }

    /// Removes a waiter. Returns whether it was the head, which another waiter now is.
    pub(crate) fn remove(&mut self, seat: Seat) -> bool {
        let was_head = self.is_head(seat);
        let left = if was_head {
            let next = self.behind.pop_first();
            std::mem::replace(&mut self.head, next).map(|(_, head)| head)
        } else {
            self.behind.remove(&seat)
        };
        self.alone -= usize::from(left.is_some_and(|left| !left.shares));
        was_head
    }

    /// The waiter leaves with the lock, and the next one becomes the head. Returns the tickets that no
    /// waiter needs any more.
    pub(crate) fn granted(&mut self, waiter: &Granted) -> Vec<Ticket> {
        let mut unwanted = Vec::new();
        self.failing = None;
        if !waiter.seat.is_some_and(|seat| self.remove(seat)) {
            return unwanted; // granted past the queue, which waits on
        }
        let next_stands = waiter.tickets.next.is_some();
        if waiter.tickets.current.is_some() {
            self.used = waiter.tickets.current;
            // An unanswered attempt may have put its `next` ticket in the queue, though this one did not.
            let next = self.next.take();
            self.ticket = next.filter(|_| next_stands);
            unwanted.extend(next.filter(|_| !next_stands && waiter.open));
            // A next head without a ticket in the queue asks at once to get one.
            let queued = self.ticket.is_some() || waiter.queued;
            self.poll_at = if queued { waiter.poll_at } else { waiter.now };
        }
        self.polls = 0;
        self.behind_release = false;
        self.not_before = Instant::ORIGIN;
        let is_next_woken = std::mem::take(&mut self.next_woken) && next_stands;
        self.woken = is_next_woken || waiter.has_room || (waiter.shares && self.woken);
        if self.len() == 0 {
            unwanted.extend(self.ticket.take());
        }
        self.wake_head();
        self.beside = waiter.beside;
        if self.alone == 0 {
            let beside = usize::try_from(self.beside).unwrap_or(usize::MAX);
            let woken = self.behind.values().take(beside);
            woken.for_each(|waiter| waiter.wake.notify_one());
        }
        unwanted
    }

    /// Whether a sharer behind the head may ask at once. Each asks once.
    pub(crate) fn lets_ask_beside(&mut self) -> bool {
        let lets = self.alone == 0 && self.beside > 0;
        self.beside -= u32::from(lets);
        lets
    }

    /// Makes the head poll at once.
    pub(crate) fn wake(&mut self) {
        self.woken |= self.head.is_some();
        self.wake_head();
    }

    /// Makes the head poll right behind a release, unless that was in vain before.
    pub(crate) fn wake_behind_release(&mut self) {
        if !self.contended && self.len() > 0 {
            self.behind_release = true;
            self.wake();
        }
    }

    /// The head was refused.
    pub(crate) fn refused(&mut self) {
        self.contended |= std::mem::take(&mut self.behind_release);
    }

    /// Makes the head poll by `at`.
    pub(crate) fn poll_by(&mut self, at: Instant) {
        self.told = Some(self.told.map_or(at, |told| told.min(at)));
        if at < self.poll_at {
            self.poll_at = at;
            self.wake_head();
        }
    }

    /// The head left without the lock. A sharer that waited behind one who wanted it alone may have room at once.
    pub(crate) fn head_left(&mut self, left: &Waiter) {
        if let Some((_, head)) = &self.head {
            self.woken |= head.shares && !left.shares;
        }
    }

    pub(crate) fn wake_head(&self) {
        if let Some((_, head)) = &self.head {
            head.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LockTable, Queue, Seat, Waiter};
    use crate::{
        clock::Instant,
        driver::{Ticket, WakeUp},
    };
    use std::{cell::Cell, cmp::Ordering, num::NonZeroU64, sync::Arc};

    thread_local! {
        /// How many seats were compared: the work of a queue for its waiters, independent of the machine.
        static COMPARED: Cell<u32> = const { Cell::new(0) };
    }

    impl Ord for Seat {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Seat {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl PartialEq for Seat {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other) == Ordering::Equal
        }
    }

    impl Eq for Seat {}

    #[test]
    fn a_crowd_leaves_its_queue_in_any_order_without_a_walk_past_the_others() {
        const CROWD: u32 = 20_000;
        let orders: [fn(&mut Vec<Seat>); 3] = [
            |_| {},
            |seats| seats.reverse(),
            |seats| fastrand::Rng::with_seed(14).shuffle(seats),
        ];
        for order in orders {
            COMPARED.set(0);
            let mut queue = Queue::default();
            let waiter = Arc::new(Waiter::default());
            let mut seats: Vec<_> = (0..CROWD).map(|_| queue.enter(&waiter)).collect();
            let first = seats[0];
            order(&mut seats);
            for seat in seats {
                let was_head = queue.is_head(seat);
                assert_eq!(queue.remove(seat), was_head);
            }
            assert_eq!((queue.len(), queue.is_head(first)), (0, false));
            // Entering and leaving walks the nodes of a tree of that many entries: some 60 comparisons.
            let each = COMPARED.get() / CROWD;
            assert!(each <= 100, "{each} comparisons for each waiter");
        }
    }

    #[test]
    fn the_longest_waiter_is_the_next_head_whichever_leaves() {
        let mut queue = Queue::default();
        let waiter = Arc::new(Waiter::default());
        let [a, b, c, d] = [(); 4].map(|()| queue.enter(&waiter));
        assert!(queue.is_head(a) && !queue.remove(c));
        assert!(queue.remove(a) && queue.is_head(b));
        let e = queue.enter(&waiter);
        assert!(queue.remove(b) && queue.is_head(d));
        assert!(queue.remove(d) && queue.is_head(e));
        assert!(!queue.remove(a), "it is gone already");
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn sharers_ask_beside_the_head_while_there_is_room_and_none_waits_to_be_alone() {
        let mut queue = Queue::default();
        let sharer = || {
            let shares = true;
            Arc::new(Waiter {
                shares,
                ..Waiter::default()
            })
        };
        queue.enter(&sharer());
        queue.begin(2);
        let [behind, alone] = [sharer(), Arc::default()].map(|waiter| queue.enter(&waiter));
        assert!(!queue.lets_ask_beside(), "one wants it alone");
        queue.remove(alone);
        assert!(!queue.remove(behind));
        assert!(queue.lets_ask_beside() && queue.lets_ask_beside());
        assert!(!queue.lets_ask_beside(), "no more than that");
    }

    fn ticket(number: u64) -> Ticket {
        Ticket(NonZeroU64::new(number).unwrap())
    }

    #[test]
    fn an_unwanted_turn_is_reported_also_after_one_that_came_early() {
        let name = "a".parse().unwrap();
        let mut table = LockTable::default();
        let queue = &mut table.entry(&name).queue;
        for _ in 0..2 {
            queue.enter(&Arc::new(Waiter::default()));
        }
        (queue.ticket, queue.next) = (Some(ticket(7)), Some(ticket(8)));
        let mut wanted = |number| {
            let name = name.clone();
            let ticket = ticket(number);
            table.wake_up(&WakeUp::Turn { name, ticket }, Instant::ORIGIN)
        };
        assert!(!wanted(3));
        assert!(wanted(8), "of the next one");
        assert!(!wanted(3), "no more than before");
        assert!(wanted(7));
    }
}
