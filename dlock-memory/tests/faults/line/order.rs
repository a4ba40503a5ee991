//! Order of the queue under random events.

use super::{INTERVAL, Waiter, name};
use dlock_core::{
    Clock, Instant,
    driver::{Released, Wake},
};
use dlock_memory::MemoryStore;
use std::{collections::VecDeque, time::Duration};

/// Whatever is released, left, killed or tried in between: waiters that are still there are served in the
/// order of their arrival.
#[tokio::test(start_paused = true)]
async fn the_queue_is_first_come_first_served() {
    for seed in 0..60 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let store = MemoryStore::new(Clock::simulated());
        let mut holder = Waiter::new(&store, 0, Wake::Queue);
        assert!(holder.takes());
        let mut waiting = VecDeque::new();
        for number in 1..300 {
            match rng.u8(0..10) {
                0..4 => {
                    let waiter = Waiter::new(&store, number, Wake::Queue);
                    assert_eq!(waiter.ahead().unwrap() as usize, store.tickets(&name()) - 1);
                    waiting.push_back(waiter);
                }
                4 if !waiting.is_empty() => {
                    let mut waiter: Waiter = waiting.remove(rng.usize(..waiting.len())).unwrap();
                    if rng.bool() {
                        waiter.leaves();
                    }
                }
                5 if !waiting.is_empty() => {
                    assert!(waiting[rng.usize(..waiting.len())].polls().is_some());
                }
                6 => assert!(!Waiter::new(&store, number, Wake::Queue).takes()),
                _ => {
                    let Some(mut next) = waiting.pop_front() else {
                        continue;
                    };
                    holder.releases(None);
                    assert_eq!(next.heard().last(), Some(&next.turn()), "seed {seed}");
                    assert!(waiting.iter().all(|other| other.polls().is_some()));
                    assert!(next.polls().is_none(), "seed {seed}");
                    holder = next;
                }
            }
        }
    }
}

/// Whatever lapses, is lost or is stopped for a while: a waiter that goes on polling gets the lock, one at
/// a time.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_goes_on_polling_gets_the_lock() {
    for seed in 0..60 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let clock = Clock::simulated();
        let store = MemoryStore::new(clock.clone());
        let mut waiters: Vec<_> = (0..8)
            .map(|at| Waiter::new(&store, at, Wake::Queue))
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
                    if waiters[at].polls().is_none() {
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
                let granted = waiter.polls().is_none();
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
