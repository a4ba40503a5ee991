//! The queue: which waiter is served, which one is notified, and what dead waiters cost.

mod order;
mod wake_ups;

use dlock_core::{
    Clock, HoldId, Instant, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, Held, Release, Released, Ticket, Wake, WakeUp},
};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use std::{num::NonZeroU64, time::Duration};

const ACCEPT: Duration = Duration::from_secs(1);
/// How many wake-ups one client may leave unread.
const CAPACITY: usize = 1024;
const INTERVAL: Duration = Duration::from_secs(2);

fn name() -> LockName {
    "n".parse().unwrap()
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}

/// A client with at most one hold and one ticket. Its calls must be done when polled once: the store never
/// makes them wait.
struct Waiter {
    driver: MemoryDriver,
    wake_ups: BoxStream<'static, WakeUp>,
    owner: Owner,
    next: u64,
    lease: Lease,
}

impl Waiter {
    fn new(store: &MemoryStore, number: u64, wake: Wake) -> Self {
        let driver = MemoryDriver::connect(store, MemoryConfig::new(wake));
        Self {
            wake_ups: driver.wake_ups(),
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

    /// Takes the lock without queueing.
    fn takes(&self) -> bool {
        matches!(self.acquire(&self.ask()), Acquired::Granted(_))
    }

    /// Polls with its ticket: `None` is granted.
    fn polls(&self) -> Option<Held> {
        let mut req = self.ask();
        req.ticket = Some(ticket(self.next));
        match self.acquire(&req) {
            Acquired::Granted(_) => None,
            Acquired::Held(held) => Some(held),
            Acquired::Gone => panic!("nothing was joined"),
            other => panic!("{other:?}"),
        }
    }

    fn ahead(&self) -> Option<u32> {
        self.polls().and_then(|held| held.ahead)
    }

    fn leaves(&mut self) {
        let name = name();
        let left = self.driver.leave(&name, ticket(self.next));
        left.now_or_never().unwrap().unwrap();
        self.next += 1;
    }

    fn releases(&mut self, keep: Option<Duration>) -> Released {
        let mut req = Release::new(name(), self.owner, HoldId::from_bits(self.next));
        req.min_hold = keep;
        self.next += 1;
        self.driver.release(&req).now_or_never().unwrap().unwrap()
    }

    fn heard(&mut self) -> Vec<WakeUp> {
        let mut heard = Vec::new();
        while let Some(Some(wake_up)) = self.wake_ups.next().now_or_never() {
            heard.push(wake_up);
        }
        heard
    }

    fn turn(&self) -> WakeUp {
        let (name, ticket) = (name(), ticket(self.next));
        WakeUp::Turn { name, ticket }
    }

    fn first(&self, poll_in: Duration) -> WakeUp {
        let (name, ticket) = (name(), ticket(self.next));
        WakeUp::First {
            name,
            ticket,
            poll_in,
        }
    }
}

/// A store where the first client holds the name and the others are queued in their order.
fn line<const N: usize>() -> (Clock, MemoryStore, [Waiter; N]) {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let waiters = std::array::from_fn(|at| {
        let at = u32::try_from(at).unwrap();
        let waiter = Waiter::new(&store, at.into(), Wake::Queue);
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
        (shown.holds, shown.unavailable_for, shown.waiters),
        (0, Some(ACCEPT), Some(1))
    );
    assert!(!a.takes(), "no client barges");
    let held = c.polls().unwrap();
    assert_eq!((held.ahead, held.poll_in), (Some(0), Some(ACCEPT)));
    assert!(b.polls().is_none());
    assert_eq!(store.tickets(&name()), 1);
    // The rest of the lease is far away, so it polls at its interval.
    assert_eq!(c.polls().unwrap().poll_in, Some(INTERVAL));
}

#[tokio::test(start_paused = true)]
async fn clients_that_are_gone_are_passed_over_at_once() {
    let (_clock, _store, [mut a, b, c, mut d, e]) = line();
    drop((b, c));
    e.driver.close().await;
    a.releases(None);
    assert_eq!(d.heard(), [d.turn()]);
    assert!(d.polls().is_none());
    d.releases(None);
    // Only dead waiters are left in the queue.
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
async fn a_plain_acquire_of_a_lapsed_lock_serves_the_queue() {
    let (clock, store, [a, mut b]) = line();
    clock.jump(a.lease.length() - Duration::from_secs(1));
    b.polls();
    clock.jump(Duration::from_secs(1));
    let late = Waiter::new(&store, 9, Wake::Poll);
    assert!(!late.takes());
    assert_eq!(b.heard(), [b.turn()]);
    assert!(b.polls().is_none());
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
async fn a_poll_of_a_free_name_goes_by_its_old_position() {
    let (clock, _store, [mut a, b, c]) = line();
    a.releases(None);
    clock.jump(ACCEPT);
    assert!(b.polls().is_none(), "it polled before c did");
    assert_eq!(c.ahead(), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_a_free_name_serves_the_next() {
    let (clock, _store, [a, mut b, mut c]) = line();
    clock.jump(a.lease.length() - Duration::from_secs(1));
    assert!(b.polls().is_some() && c.polls().is_some());
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
    assert!(d.polls().is_some(), "the one before it is served first");
    assert_eq!(c.heard(), [c.first(ACCEPT), c.turn()]);
    assert_eq!(b.ahead(), Some(0), "back at its old place");
    assert_eq!(d.ahead(), Some(1));
    assert!(c.polls().is_none());
    c.releases(None);
    assert_eq!(b.heard(), [b.turn()]);
    clock.jump(ACCEPT);
    assert!(d.polls().is_none(), "b is in no line until it polls");
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
    while last.polls().is_some() {
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
    assert!(c.polls().is_none());
    assert_eq!(store.tickets(&name()), 0);
}

#[tokio::test(start_paused = true)]
async fn a_turn_outlives_the_search_for_unused_records() {
    let (day, clock) = (Duration::from_secs(24 * 60 * 60), Clock::simulated());
    let store = MemoryStore::new(clock.clone());
    let [mut a, b, mut c] = [0, 1, 2].map(|at| Waiter::new(&store, at, Wake::Queue));
    a.lease = Lease::fixed(2 * day);
    assert!(a.takes());
    clock.jump(day);
    assert_eq!(b.ahead(), Some(0));
    a.releases(None);
    // Each new name lets the search visit two.
    for name in ["o", "p"] {
        let mut req = c.ask();
        req.name = name.parse().unwrap();
        assert!(matches!(c.acquire(&req), Acquired::Granted(_)));
        c.next += 1;
    }
    assert!(!c.takes(), "no client barges");
    assert!(b.polls().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_grant_uses_up_the_ticket_and_puts_the_next_at_the_end() {
    let (_clock, _store, [mut a, mut b, mut c]) = line();
    a.releases(None);
    let mut req = b.ask();
    (req.ticket, req.next_ticket) = (Some(ticket(1)), Some(ticket(2)));
    assert!(matches!(b.acquire(&req), Acquired::Granted(_)));
    assert!(matches!(b.acquire(&req), Acquired::Granted(_)), "a repeat");
    b.releases(None);
    assert_eq!(c.heard().last(), Some(&c.turn()));
    assert_eq!(b.heard().last(), Some(&b.first(ACCEPT)));
    assert!(c.polls().is_none());
    assert_eq!(b.ahead(), Some(0));
}

#[tokio::test(start_paused = true)]
async fn reentry_goes_past_the_queue() {
    let (_clock, store, [mut a, b]) = line();
    a.next += 1;
    assert!(a.polls().is_none());
    assert_eq!(b.ahead(), Some(0));
    // Its own ticket may be queued there too, and is used up then.
    let mut strange = a.ask();
    strange.owner = Owner::from_seed("another of the same client");
    strange.ticket = Some(ticket(7));
    assert!(matches!(a.acquire(&strange), Acquired::Held(_)));
    assert_eq!(store.tickets(&name()), 2);
    a.next = 7;
    assert!(a.polls().is_none());
    assert_eq!(store.tickets(&name()), 1);
}

#[tokio::test(start_paused = true)]
async fn a_release_with_a_minimum_hold_tells_the_head_when_to_poll() {
    let (clock, _store, [mut a, mut b]) = line();
    let keep = Duration::from_millis(1500);
    assert!(matches!(a.releases(Some(keep)), Released::MinHold { rest } if rest == keep));
    assert_eq!(b.heard(), [b.first(keep)]);
    assert!(!a.takes(), "its last owner is shut out too");
    clock.jump(keep - Duration::from_nanos(1));
    assert!(b.polls().is_some());
    clock.jump(Duration::from_nanos(1));
    assert!(b.polls().is_none());
    assert!(a.polls().is_some());
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
    assert!(c.polls().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_flushed_queue_comes_back_with_the_polls() {
    let (_clock, store, [a, b, c]) = line();
    store.flush();
    assert!(b.polls().is_none(), "the first waiter to poll has it");
    assert_eq!(c.ahead(), Some(0));
    assert!(a.polls().is_some());
}
