//! What a client knows of each name: its live holds, and the local queue of those who wait.
//!
//! However many tasks of a client wait for a name, the store sees one waiter: the head of the queue, who has the ticket and does the looking.

use crate::{
    clock::{Clock, Instant},
    driver::Hint,
    hold::Hold,
    identity::{Owner, Ticket},
    name::LockName,
    spread::SpreadMap,
};
use std::{
    collections::{VecDeque, hash_map::Entry},
    sync::Arc,
};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Book {
    pages: SpreadMap<LockName, Page>,
    /// Pages that were torn out, for their buffers: locks that come and go allocate none.
    spare: Vec<Page>,
}

/// One name.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) holds: Vec<Arc<Hold>>,
    pub(crate) queue: Queue,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiters: VecDeque<Arc<Waiter>>,
    /// What the head stands in the store's line with.
    pub(crate) ticket: Option<Ticket>,
    /// What the next one will, once the head is granted.
    pub(crate) next: Option<Ticket>,
    /// When the head looks again.
    pub(crate) look_at: Instant,
    /// Looks since the last grant, for polling stores whose pause doubles.
    pub(crate) looks: u32,
    /// A wake-up came that no attempt has answered yet.
    pub(crate) poked: bool,
    /// One came for `next` before the answer that puts it in line.
    pub(crate) poked_next: bool,
    /// Not even a wake-up makes the head ask before then: the store failed.
    pub(crate) not_before: Instant,
    /// Since when the store has failed whoever was the head.
    pub(crate) failing: Option<Instant>,
}

/// One waiting task.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// It became the head, or the head has something to do.
    pub(crate) wake: Notify,
}

impl Book {
    pub(crate) fn page(&mut self, name: &LockName) -> &mut Page {
        let page = self.pages.entry(name.clone());
        page.or_insert_with(|| self.spare.pop().unwrap_or_default())
    }

    pub(crate) fn find(&mut self, name: &LockName) -> Option<&mut Page> {
        self.pages.get_mut(name)
    }

    /// Forgets a name that nobody holds or waits for.
    pub(crate) fn tidy(&mut self, name: &LockName) {
        self.change(name, |_| {});
    }

    pub(crate) fn strike(&mut self, hold: &Arc<Hold>) {
        self.change(&hold.name, |page| {
            page.holds.retain(|other| !Arc::ptr_eq(other, hold));
        });
    }

    /// Changes a page that is there, and tears it out if nothing is on it then.
    fn change(&mut self, name: &LockName, change: impl FnOnce(&mut Page)) {
        if let Entry::Occupied(mut found) = self.pages.entry(name.clone()) {
            change(found.get_mut());
            if found.get().is_empty() {
                let page = found.remove();
                if self.spare.len() < SPARE_PAGES {
                    self.spare.push(page.blank());
                }
            }
        }
    }

    /// Every live hold, in an order that does not depend on hashing.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let mut holds: Vec<_> = self
            .pages
            .values()
            .flat_map(|page| page.holds.clone())
            .collect();
        holds.sort_by(|a, b| (&a.name, a.since, a.id).cmp(&(&b.name, b.since, b.id)));
        holds
    }

    pub(crate) fn is_unheld(&self) -> bool {
        self.pages.values().all(|page| page.holds.is_empty())
    }

    /// Whether the hint found somebody who wants it.
    pub(crate) fn hint(&mut self, hint: &Hint, now: Instant) -> bool {
        match hint {
            Hint::Turn { name, ticket } => {
                let Some(page) = self.pages.get_mut(name) else {
                    return false;
                };
                let queue = &mut page.queue;
                if queue.ticket == Some(*ticket) && !queue.waiters.is_empty() {
                    queue.poke();
                    true
                } else {
                    let early = queue.next == Some(*ticket) && queue.waiters.len() > 1;
                    queue.poked_next |= early;
                    early
                }
            }
            Hint::First {
                name,
                ticket,
                look_in,
            } => {
                if let Some(page) = self.pages.get_mut(name)
                    && page.queue.ticket == Some(*ticket)
                {
                    page.queue.look_by(now + *look_in);
                }
                true
            }
            Hint::Free(name) => {
                if let Some(page) = self.pages.get_mut(name) {
                    page.queue.poke();
                }
                true
            }
            Hint::LookAgain => {
                // In the order of names: what happens does not depend on hashing.
                let mut waited: Vec<_> = self.pages.iter_mut().collect();
                waited.sort_unstable_by_key(|(name, _)| *name);
                for (_, page) in waited {
                    page.queue.poke();
                }
                true
            }
            Hint::Over(_) => true,
        }
    }
}

/// The pages that are kept, some hundred bytes each: as many as there are tasks that busy a client.
const SPARE_PAGES: usize = 128;

/// The room that a spare page keeps: one name that was crowded once should not cost memory for ever.
const SPARE: usize = 16;

impl Page {
    /// The same buffers with nothing in them.
    fn blank(self) -> Self {
        let Self {
            mut holds,
            queue: Queue { mut waiters, .. },
        } = self;
        holds.clear();
        holds.shrink_to(SPARE);
        waiters.clear();
        waiters.shrink_to(SPARE);
        let queue = Queue {
            waiters,
            ..Queue::default()
        };
        Self { holds, queue }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.queue.waiters.is_empty()
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
    /// Somebody opens it: he asks at once, unless the store has just failed.
    pub(crate) fn begin(&mut self) {
        self.look_at = Instant::ORIGIN;
        self.looks = 0;
        self.poked = false;
        self.poked_next = false;
        self.not_before = Instant::ORIGIN;
        self.failing = None;
    }

    pub(crate) fn enter(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.push_back(Arc::clone(waiter));
    }

    pub(crate) fn enter_first_but_one(&mut self, waiter: &Arc<Waiter>) {
        let place = self.waiters.len().min(1);
        self.waiters.insert(place, Arc::clone(waiter));
    }

    pub(crate) fn is_head(&self, waiter: &Arc<Waiter>) -> bool {
        self.waiters
            .front()
            .is_some_and(|head| Arc::ptr_eq(head, waiter))
    }

    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Takes a waiter out; says whether it was the head.
    pub(crate) fn remove(&mut self, waiter: &Arc<Waiter>) -> bool {
        let was_head = self.is_head(waiter);
        self.waiters.retain(|other| !Arc::ptr_eq(other, waiter));
        was_head
    }

    /// The head is to look at once.
    pub(crate) fn poke(&mut self) {
        if let Some(head) = self.waiters.front() {
            self.poked = true;
            head.wake.notify_one();
        }
    }

    /// The head is to look by then.
    pub(crate) fn look_by(&mut self, at: Instant) {
        if at < self.look_at {
            self.look_at = at;
            self.wake_head();
        }
    }

    pub(crate) fn wake_head(&self) {
        if let Some(head) = self.waiters.front() {
            head.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Book, Waiter};
    use crate::{clock::Instant, driver::Hint, identity::Ticket};
    use std::{num::NonZeroU64, sync::Arc};

    fn ticket(number: u64) -> Ticket {
        Ticket(NonZeroU64::new(number).unwrap())
    }

    #[test]
    fn a_turn_that_nobody_wants_is_said_to_be_so_also_after_one_that_came_early() {
        let name = "a".parse().unwrap();
        let mut book = Book::default();
        let queue = &mut book.page(&name).queue;
        for _ in 0..2 {
            queue.enter(&Arc::new(Waiter::default()));
        }
        (queue.ticket, queue.next) = (Some(ticket(7)), Some(ticket(8)));
        let mut wanted = |number| {
            let name = name.clone();
            let ticket = ticket(number);
            book.hint(&Hint::Turn { name, ticket }, Instant::ORIGIN)
        };
        assert!(!wanted(3));
        assert!(wanted(8), "of the next one");
        assert!(!wanted(3), "no more than before");
        assert!(wanted(7));
    }
}
