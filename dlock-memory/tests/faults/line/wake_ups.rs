//! Wake-ups: which client is told what, once.

use super::{CAPACITY, INTERVAL, Waiter, name};
use dlock_core::{
    Clock,
    driver::{DistributedLock, Wake, WakeUp},
};
use dlock_memory::MemoryStore;
use futures_util::{FutureExt, StreamExt};

#[tokio::test(start_paused = true)]
async fn free_is_said_once_to_each_client_that_waits() {
    let store = MemoryStore::new(Clock::simulated());
    let mut holder = Waiter::new(&store, 0, Wake::Notify);
    let mut waiters: Vec<_> = (1..4)
        .map(|at| Waiter::new(&store, at, Wake::Notify))
        .collect();
    assert!(holder.polls().is_none());
    for waiter in &mut waiters {
        assert_eq!(waiter.polls().unwrap().poll_in, Some(INTERVAL));
        waiter.next += 1;
        waiter.polls();
    }
    waiters[1].leaves();
    waiters[1].next -= 2;
    waiters[1].leaves();
    holder.releases(None);
    assert_eq!(waiters[0].heard(), [WakeUp::Free(name())]);
    assert_eq!(waiters[1].heard(), []);
    assert_eq!(waiters[2].heard(), [WakeUp::Free(name())]);
    assert_eq!(holder.heard(), []);
    assert!(waiters[2].polls().is_none(), "no queue: first to poll");
}

#[tokio::test(start_paused = true)]
async fn polling_drivers_hear_nothing_and_learn_the_rest() {
    let store = MemoryStore::new(Clock::simulated());
    let mut holder = Waiter::new(&store, 0, Wake::Poll);
    let mut waiter = Waiter::new(&store, 1, Wake::Poll);
    assert!(holder.polls().is_none());
    let held = waiter.polls().unwrap();
    assert_eq!(
        (held.poll_in, held.ahead),
        (Some(waiter.lease.length()), None)
    );
    holder.releases(None);
    assert_eq!(waiter.wake_ups.next().await, None);
    assert!(waiter.polls().is_none());
    assert_eq!(waiter.heard(), []);
}

#[tokio::test(start_paused = true)]
async fn wake_ups_are_taken_once_and_end_with_close() {
    let store = MemoryStore::new(Clock::simulated());
    let mut waiter = Waiter::new(&store, 0, Wake::Queue);
    assert_eq!(waiter.driver.wake_ups().next().await, None);
    assert_eq!(waiter.wake_ups.next().now_or_never(), None);
    waiter.driver.close().await;
    assert_eq!(waiter.wake_ups.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn wake_ups_that_do_not_fit_become_one_resync() {
    let store = MemoryStore::new(Clock::simulated());
    let mut waiter = Waiter::new(&store, 0, Wake::Queue);
    for _ in 0..CAPACITY + 5 {
        waiter.driver.faults().inject(WakeUp::Free(name()));
    }
    let heard = waiter.heard();
    assert_eq!(heard.len(), CAPACITY);
    assert_eq!(heard.last(), Some(&WakeUp::Resync));
    assert_eq!(waiter.heard(), []);
}
