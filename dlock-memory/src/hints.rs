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

#[cfg(test)]
mod tests {
    use super::CAPACITY;
    use crate::{MemoryConfig, MemoryDriver, MemoryStore};
    use dlock_core::{
        Acquire, Acquired, Clock, DistributedLock, Held, Hint, HoldId, Instant, Lease, LockName,
        Owner, Release, Released, Ticket, Wake,
    };
    use futures_core::stream::BoxStream;
    use futures_util::{FutureExt, StreamExt};
    use std::{collections::VecDeque, num::NonZeroU64, time::Duration};

    const ACCEPT: Duration = Duration::from_secs(1);
    const INTERVAL: Duration = Duration::from_secs(2);

    fn name() -> LockName {
        "n".parse().unwrap()
    }

    fn ticket(number: u64) -> Ticket {
        Ticket(NonZeroU64::new(number).unwrap())
    }

    /// A client with at most one hold and one ticket. Its calls must be done when polled once: the store never makes them wait.
    struct Waiter {
        driver: MemoryDriver,
        hints: BoxStream<'static, Hint>,
        owner: Owner,
        next: u64,
        lease: Lease,
    }

    impl Waiter {
        fn new(store: &MemoryStore, number: u64, wake: Wake) -> Self {
            let driver = MemoryDriver::connect(store, MemoryConfig::new(wake));
            Self {
                hints: driver.hints(),
                driver,
                owner: Owner::from_seed(&number.to_string()),
                next: 1,
                lease: Lease::default(),
            }
        }

        fn ask(&self) -> Acquire {
            let hold = HoldId::from_bits(self.next);
            Acquire::new(name(), self.owner, hold, self.lease, Instant::FAR)
        }

        fn acquire(&self, req: &Acquire) -> Acquired {
            self.driver.acquire(req).now_or_never().unwrap().unwrap()
        }

        /// Takes it without standing in line.
        fn takes(&self) -> bool {
            matches!(self.acquire(&self.ask()), Acquired::Granted(_))
        }

        /// Looks with its ticket: `None` is granted.
        fn looks(&self) -> Option<Held> {
            let mut req = self.ask();
            req.line = Some(ticket(self.next));
            match self.acquire(&req) {
                Acquired::Granted(_) => None,
                Acquired::Held(held) => Some(held),
                Acquired::Gone => panic!("nothing was joined"),
                other => panic!("{other:?}"),
            }
        }

        fn ahead(&self) -> Option<u32> {
            self.looks().and_then(|held| held.ahead)
        }

        fn leaves(&mut self) {
            let name = name();
            let left = self.driver.leave(&name, ticket(self.next));
            left.now_or_never().unwrap().unwrap();
            self.next += 1;
        }

        fn releases(&mut self, keep: Option<Duration>) -> Released {
            let mut req = Release::new(name(), self.owner, HoldId::from_bits(self.next));
            req.keep = keep;
            self.next += 1;
            self.driver.release(&req).now_or_never().unwrap().unwrap()
        }

        fn heard(&mut self) -> Vec<Hint> {
            let mut heard = Vec::new();
            while let Some(Some(hint)) = self.hints.next().now_or_never() {
                heard.push(hint);
            }
            heard
        }

        fn turn(&self) -> Hint {
            let (name, ticket) = (name(), ticket(self.next));
            Hint::Turn { name, ticket }
        }

        fn first(&self, look_in: Duration) -> Hint {
            let (name, ticket) = (name(), ticket(self.next));
            Hint::First {
                name,
                ticket,
                look_in,
            }
        }
    }

    /// A store where the first client holds the name and the others stand in line in their order.
    fn line<const N: usize>() -> (Clock, MemoryStore, [Waiter; N]) {
        let clock = Clock::simulated();
        let store = MemoryStore::new(clock.clone());
        let waiters = std::array::from_fn(|at| {
            let at = u32::try_from(at).unwrap();
            let waiter = Waiter::new(&store, at.into(), Wake::Line);
            assert_eq!(waiter.ahead(), at.checked_sub(1));
            waiter
        });
        (clock, store, waiters)
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_reserves_for_the_head_and_tells_the_one_behind_it() {
        let (_clock, store, [mut a, mut b, mut c]) = line();
        assert!(matches!(a.releases(None), Released::Freed));
        assert_eq!(b.heard(), [b.turn()]);
        assert_eq!(c.heard(), [c.first(ACCEPT)]);
        let shown = b.driver.inspect(&name()).await.unwrap();
        assert_eq!(
            (shown.holds, shown.shut, shown.waiters),
            (0, Some(ACCEPT), Some(1))
        );
        assert!(!a.takes(), "nobody barges");
        let held = c.looks().unwrap();
        assert_eq!((held.ahead, held.look_in), (Some(0), Some(ACCEPT)));
        assert!(b.looks().is_none());
        assert_eq!(store.tickets(&name()), 1);
        // The rest of the lease is far away, so it looks at its interval.
        assert_eq!(c.looks().unwrap().look_in, Some(INTERVAL));
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_are_gone_are_passed_over_at_once() {
        let (_clock, _store, [mut a, b, c, mut d, e]) = line();
        drop((b, c));
        e.driver.close().await;
        a.releases(None);
        assert_eq!(d.heard(), [d.turn()]);
        assert!(d.looks().is_none());
        d.releases(None);
        // Only the dead are left in line.
        assert!(a.takes());
    }

    #[tokio::test(start_paused = true)]
    async fn a_plain_acquire_takes_what_only_the_dead_wait_for() {
        let (clock, store, [a, b, c]) = line();
        drop((b, c));
        clock.jump(a.lease.length());
        assert_eq!(store.tickets(&name()), 2);
        assert!(a.takes());
        assert_eq!(store.tickets(&name()), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_plain_acquire_of_a_lapsed_lock_serves_the_line() {
        let (clock, store, [a, mut b]) = line();
        clock.jump(a.lease.length() - Duration::from_secs(1));
        b.looks();
        clock.jump(Duration::from_secs(1));
        let late = Waiter::new(&store, 9, Wake::Poll);
        assert!(!late.takes());
        assert_eq!(b.heard(), [b.turn()]);
        assert!(b.looks().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_behind_is_told_past_the_dead() {
        let (_clock, store, [mut a, mut b, c, mut d]) = line();
        drop(c);
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        assert_eq!(d.heard(), [d.first(ACCEPT)]);
        assert_eq!(store.tickets(&name()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_at_a_free_name_goes_by_its_old_place() {
        let (clock, _store, [mut a, b, c]) = line();
        a.releases(None);
        clock.jump(ACCEPT);
        assert!(b.looks().is_none(), "it looked before c did");
        assert_eq!(c.ahead(), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_leaves_a_free_name_serves_the_next() {
        let (clock, _store, [a, mut b, mut c]) = line();
        clock.jump(a.lease.length() - Duration::from_secs(1));
        assert!(b.looks().is_some() && c.looks().is_some());
        clock.jump(Duration::from_secs(1));
        b.leaves();
        assert_eq!(c.heard(), [c.turn()]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_keeps_its_place_over_one_lapsed_turn_and_not_over_two() {
        let (clock, _store, [mut a, mut b, mut c, mut d]) = line();
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        clock.jump(ACCEPT);
        assert!(d.looks().is_some(), "the one before it is served first");
        assert_eq!(c.heard(), [c.first(ACCEPT), c.turn()]);
        assert_eq!(b.ahead(), Some(0), "back at its old place");
        assert_eq!(d.ahead(), Some(1));
        assert!(c.looks().is_none());
        c.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        clock.jump(ACCEPT);
        assert!(d.looks().is_none(), "b is in no line until it looks");
        assert_eq!(c.ahead(), Some(0));
        assert_eq!(b.ahead(), Some(1), "two turns lapsed");
        d.releases(None);
        assert_eq!(c.heard(), [c.turn()]);
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_clients_together_cost_one_entry_deadline() {
        let (clock, _store, [mut a, b, c, d, e, f, g, h, mut last]) = line();
        a.releases(None);
        let start = clock.now();
        while last.looks().is_some() {
            last.heard();
            clock.jump(ACCEPT);
        }
        assert_eq!(clock.now().since(start), 3 * INTERVAL);
        drop((b, c, d, e, f, g, h));
    }

    #[tokio::test(start_paused = true)]
    async fn leave_hands_on_what_was_reserved() {
        let (_clock, store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        b.leaves();
        assert_eq!(c.heard(), [c.first(ACCEPT), c.turn()]);
        b.leaves();
        assert!(c.looks().is_none());
        assert_eq!(store.tickets(&name()), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_uses_up_the_ticket_and_puts_the_next_at_the_end() {
        let (_clock, _store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        let mut req = b.ask();
        (req.line, req.next) = (Some(ticket(1)), Some(ticket(2)));
        assert!(matches!(b.acquire(&req), Acquired::Granted(_)));
        assert!(matches!(b.acquire(&req), Acquired::Granted(_)), "a repeat");
        b.releases(None);
        assert_eq!(c.heard().last(), Some(&c.turn()));
        assert_eq!(b.heard().last(), Some(&b.first(ACCEPT)));
        assert!(c.looks().is_none());
        assert_eq!(b.ahead(), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn reentry_goes_past_the_line() {
        let (_clock, store, [mut a, b]) = line();
        a.next += 1;
        assert!(a.looks().is_none());
        assert_eq!(b.ahead(), Some(0));
        // Its own ticket may stand there too, and is used up then.
        let mut strange = a.ask();
        strange.owner = Owner::from_seed("another of the same client");
        strange.line = Some(ticket(7));
        assert!(matches!(a.acquire(&strange), Acquired::Held(_)));
        assert_eq!(store.tickets(&name()), 2);
        a.next = 7;
        assert!(a.looks().is_none());
        assert_eq!(store.tickets(&name()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_kept_release_tells_the_head_when_to_look() {
        let (clock, _store, [mut a, mut b]) = line();
        let keep = Duration::from_millis(1500);
        assert!(matches!(a.releases(Some(keep)), Released::Kept { rest } if rest == keep));
        assert_eq!(b.heard(), [b.first(keep)]);
        assert!(!a.takes(), "its last owner is shut out too");
        clock.jump(keep - Duration::from_nanos(1));
        assert!(b.looks().is_some());
        clock.jump(Duration::from_nanos(1));
        assert!(b.looks().is_none());
        assert!(a.looks().is_some());
        b.releases(Some(10 * INTERVAL));
        assert_eq!(
            a.heard(),
            [a.first(INTERVAL)],
            "its entry must not run out meanwhile"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_break_opens_a_reservation_and_serves_the_next() {
        let (_clock, _store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        a.driver.break_lock(&name(), None).await.unwrap();
        assert_eq!(c.heard().last(), Some(&c.turn()));
        assert_eq!(b.ahead(), Some(0));
        assert!(c.looks().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flushed_line_comes_back_with_the_looks() {
        let (_clock, store, [a, b, c]) = line();
        store.flush();
        assert!(b.looks().is_none(), "whoever looks first has it");
        assert_eq!(c.ahead(), Some(0));
        assert!(a.looks().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn free_is_said_once_to_each_client_that_waits() {
        let store = MemoryStore::new(Clock::simulated());
        let mut holder = Waiter::new(&store, 0, Wake::Hints);
        let mut waiters: Vec<_> = (1..4)
            .map(|at| Waiter::new(&store, at, Wake::Hints))
            .collect();
        assert!(holder.looks().is_none());
        for waiter in &mut waiters {
            assert_eq!(waiter.looks().unwrap().look_in, Some(INTERVAL));
            waiter.next += 1;
            waiter.looks();
        }
        waiters[1].leaves();
        waiters[1].next -= 2;
        waiters[1].leaves();
        holder.releases(None);
        assert_eq!(waiters[0].heard(), [Hint::Free(name())]);
        assert_eq!(waiters[1].heard(), []);
        assert_eq!(waiters[2].heard(), [Hint::Free(name())]);
        assert_eq!(holder.heard(), []);
        assert!(waiters[2].looks().is_none(), "no line: whoever is first");
    }

    #[tokio::test(start_paused = true)]
    async fn polling_drivers_hear_nothing_and_learn_the_rest() {
        let store = MemoryStore::new(Clock::simulated());
        let mut holder = Waiter::new(&store, 0, Wake::Poll);
        let mut waiter = Waiter::new(&store, 1, Wake::Poll);
        assert!(holder.looks().is_none());
        let held = waiter.looks().unwrap();
        assert_eq!(
            (held.look_in, held.ahead),
            (Some(waiter.lease.length()), None)
        );
        holder.releases(None);
        assert_eq!(waiter.hints.next().await, None);
        assert!(waiter.looks().is_none());
        assert_eq!(waiter.heard(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn hints_are_taken_once_and_end_with_close() {
        let store = MemoryStore::new(Clock::simulated());
        let mut waiter = Waiter::new(&store, 0, Wake::Line);
        assert_eq!(waiter.driver.hints().next().await, None);
        assert_eq!(waiter.hints.next().now_or_never(), None);
        waiter.driver.close().await;
        assert_eq!(waiter.hints.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn hints_that_do_not_fit_become_one_look_again() {
        let store = MemoryStore::new(Clock::simulated());
        let mut waiter = Waiter::new(&store, 0, Wake::Line);
        for _ in 0..CAPACITY + 5 {
            waiter.driver.faults().inject(Hint::Free(name()));
        }
        let heard = waiter.heard();
        assert_eq!(heard.len(), CAPACITY + 1);
        assert_eq!(heard.last(), Some(&Hint::LookAgain));
        assert_eq!(waiter.heard(), []);
    }

    /// Whatever is released, left, killed or tried in between: those who are still there go in the order they came.
    #[tokio::test(start_paused = true)]
    async fn the_line_is_first_come_first_served() {
        for seed in 0..60 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let store = MemoryStore::new(Clock::simulated());
            let mut holder = Waiter::new(&store, 0, Wake::Line);
            assert!(holder.takes());
            let mut waiting = VecDeque::new();
            for number in 1..300 {
                match rng.u8(0..10) {
                    0..4 => {
                        let waiter = Waiter::new(&store, number, Wake::Line);
                        assert_eq!(waiter.ahead().unwrap() as usize, store.tickets(&name()) - 1);
                        waiting.push_back(waiter);
                    }
                    4 if !waiting.is_empty() => {
                        let mut waiter: Waiter =
                            waiting.remove(rng.usize(..waiting.len())).unwrap();
                        if rng.bool() {
                            waiter.leaves();
                        }
                    }
                    5 if !waiting.is_empty() => {
                        assert!(waiting[rng.usize(..waiting.len())].looks().is_some());
                    }
                    6 => assert!(!Waiter::new(&store, number, Wake::Line).takes()),
                    _ => {
                        let Some(mut next) = waiting.pop_front() else {
                            continue;
                        };
                        holder.releases(None);
                        assert_eq!(next.heard().last(), Some(&next.turn()), "seed {seed}");
                        assert!(waiting.iter().all(|other| other.looks().is_some()));
                        assert!(next.looks().is_none(), "seed {seed}");
                        holder = next;
                    }
                }
            }
        }
    }

    /// Whatever lapses, is lost or is stopped for a while: whoever goes on looking gets it, and one at a time.
    #[tokio::test(start_paused = true)]
    async fn whoever_goes_on_looking_gets_it() {
        for seed in 0..60 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let clock = Clock::simulated();
            let store = MemoryStore::new(clock.clone());
            let mut waiters: Vec<_> = (0..8)
                .map(|at| Waiter::new(&store, at, Wake::Line))
                .collect();
            let mut inside: Option<(usize, Instant)> = None;
            for _ in 0..400 {
                clock.jump(Duration::from_millis(rng.u64(..900)));
                let at = rng.usize(..waiters.len());
                inside = inside.filter(|(_, end)| *end > clock.now());
                let is_inside = inside.is_some_and(|(holder, _)| holder == at);
                match rng.u8(..10) {
                    0 if !is_inside => waiters[at].leaves(),
                    1 if rng.u8(..8) == 0 => {
                        store.flush();
                        inside = None;
                    }
                    2 => drop(waiters[at].heard()),
                    3..6 => {
                        let Some((holder, _)) = inside.take() else {
                            continue;
                        };
                        assert!(matches!(waiters[holder].releases(None), Released::Freed));
                    }
                    _ if is_inside => {}
                    _ => {
                        if waiters[at].looks().is_none() {
                            assert!(inside.is_none(), "seed {seed}");
                            inside = Some((at, clock.now() + waiters[at].lease.length()));
                        }
                    }
                }
            }
            if let Some((holder, _)) = inside {
                waiters[holder].releases(None);
            }
            let mut left = waiters;
            for round in 0.. {
                assert!(round < 40, "seed {seed}: {} still wait", left.len());
                clock.jump(INTERVAL);
                left.retain_mut(|waiter| {
                    waiter.heard();
                    let granted = waiter.looks().is_none();
                    if granted {
                        waiter.releases(None);
                    }
                    !granted
                });
                if left.is_empty() {
                    break;
                }
            }
        }
    }
}
