//! A client's runtime that does not run: dropped, not polled, all workers blocked. Nothing is renewed then, and every guard knows it.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, ErrorKind, Guard, LossReason, Outcome, State};
use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};
use tokio::runtime::{Builder, Runtime};

const LEASE: Duration = Duration::from_millis(300);

/// What a busy machine may add to an upper bound. Lower bounds have none.
const SLACK: Duration = Duration::from_secs(10);

fn store() -> MemoryStore {
    MemoryStore::new(Clock::boot())
}

/// A client over a new connection. Made inside the runtime it belongs to.
fn client(store: &MemoryStore) -> Client {
    let driver = MemoryDriver::connect(store, MemoryConfig::default());
    Client::new(driver).unwrap()
}

async fn acquired(client: &Client, name: &str) -> Guard {
    let lock = client.lock(name).unwrap().kept_lease(LEASE).unwrap();
    lock.acquire().await.unwrap()
}

fn workers(count: usize) -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(count)
        .enable_time()
        .build()
        .unwrap()
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

/// Two guards whose client does not run any more: they say so by themselves, their drop does not panic, and the store frees the names
/// when the leases are over.
fn ends_by_its_lease(store: &MemoryStore, [asked, awaited]: [Guard; 2]) {
    let began = Instant::now();
    let elsewhere = current_thread();
    let left = awaited.remaining();
    assert!(left > Duration::ZERO && left <= LEASE, "{left:?}");
    let reason = elsewhere.block_on(awaited.lost());
    assert_eq!(reason, LossReason::Deadline);
    assert!(began.elapsed() <= left + SLACK);
    // Nothing has polled this one, and no task of its client has run: its clock says it.
    thread::sleep(asked.remaining());
    assert_eq!(asked.state(), State::Lost(LossReason::Deadline));
    assert_eq!(asked.check().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(asked.remaining(), Duration::ZERO);

    let tokens = [asked.token(), awaited.token()];
    let names = [asked.name().clone(), awaited.name().clone()];
    drop((asked, awaited));
    elsewhere.block_on(async {
        let fresh = client(store);
        for (name, token) in names.iter().zip(tokens) {
            let lock = fresh.lock(name.as_str()).unwrap();
            let next = lock.acquire_within(LEASE + SLACK).await.unwrap();
            assert!(next.token() > token);
            assert_eq!(next.release().await.unwrap(), Outcome::Released);
        }
    });
}

async fn two(client: &Client) -> [Guard; 2] {
    [
        acquired(client, "asked").await,
        acquired(client, "awaited").await,
    ]
}

#[test]
fn a_runtime_that_is_dropped_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = workers(1);
    let guards = runtime.block_on(async { two(&client(&store)).await });
    drop(runtime);
    ends_by_its_lease(&store, guards);
}

#[test]
fn a_current_thread_runtime_that_is_not_polled_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = current_thread();
    let guards = runtime.block_on(async { two(&client(&store)).await });
    ends_by_its_lease(&store, guards);
    drop(runtime);
}

#[test]
fn a_runtime_whose_workers_are_all_blocked_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = workers(2);
    let guards = runtime.block_on(async { two(&client(&store)).await });
    let blocked = Arc::new(std::sync::Barrier::new(3));
    let ends: Vec<_> = (0..2)
        .map(|_| {
            let (end, ended) = mpsc::channel::<()>();
            let blocked = Arc::clone(&blocked);
            runtime.spawn(async move {
                blocked.wait();
                // Until the other end is dropped.
                ended.recv().unwrap_err();
            });
            end
        })
        .collect();
    blocked.wait();
    ends_by_its_lease(&store, guards);
    drop(ends);
}

#[test]
fn a_lock_is_released_through_a_client_whose_runtime_is_gone() {
    let store = store();
    let runtime = workers(1);
    let guards = runtime.block_on(async { two(&client(&store)).await });
    drop(runtime);
    current_thread().block_on(async {
        let [first, second] = guards;
        // The request is polled in place, by whoever waits for it.
        assert_eq!(first.release().await.unwrap(), Outcome::Released);
        // Nobody is left to send this one: the lease ends it.
        drop(second);
        let fresh = client(&store);
        let free = fresh.lock("asked").unwrap().try_acquire().await.unwrap();
        assert!(free.is_some());
        let held = fresh.lock("awaited").unwrap().try_acquire().await.unwrap();
        assert!(held.is_none());
    });
}

/// What the driver waited for is gone with the runtime of whoever asked; what the store granted is given back all the same.
#[test]
fn an_acquire_whose_runtime_ended_is_settled() {
    let (store, home, other) = (store(), workers(1), current_thread());
    let asking = home.block_on(async {
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        // Granted at once; the answer is waited for by a timer of whichever runtime asks, as native clients do.
        driver.faults().once(Call::Acquire, Fault::Slow(SLACK));
        Client::new(driver).unwrap()
    });
    let lock = asking.lock("granted").unwrap();
    let lock = lock.kept_lease(SLACK * 100).unwrap();
    let given_up = other.block_on(async {
        let asked = tokio::time::timeout(Duration::from_millis(50), lock.try_acquire());
        asked.await.is_err()
    });
    assert!(given_up);
    drop(other);
    current_thread().block_on(async {
        let lock = client(&store).lock("granted").unwrap();
        let next = lock.acquire_within(SLACK).await.unwrap();
        assert_eq!(next.release().await.unwrap(), Outcome::Released);
    });
}

#[test]
fn a_client_dropped_after_its_runtime_panics_nowhere() {
    let runtime = current_thread();
    let (client, wait) = runtime.block_on(async {
        let client = client(&store());
        let guard = acquired(&client, "held").await;
        let wait = client.lock("held").unwrap().acquire();
        let mut wait = Box::pin(wait);
        let first = tokio::time::timeout(Duration::from_millis(1), wait.as_mut()).await;
        first.unwrap_err();
        (client, (wait, guard))
    });
    drop(runtime);
    drop(wait);
    assert_eq!(
        client.unsettled(),
        0,
        "what cannot be settled is not counted for ever"
    );
    drop(client);
}

#[test]
fn a_client_is_made_inside_a_runtime_or_not_at_all() {
    let driver = MemoryDriver::connect(&store(), MemoryConfig::default());
    let error = Client::new(driver).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

/// The time is a paused runtime's own, in which nothing but the one who waits runs: what it sees is exact.
#[test]
fn lost_is_timed_by_whoever_waits_and_resolves_not_after_the_deadline() {
    let paused = || {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap()
    };
    for lease in [LEASE, LEASE * 10, LEASE * 100] {
        let runtime = paused();
        let (guard, clock) = runtime.block_on(async {
            let clock = Clock::simulated();
            let driver =
                MemoryDriver::connect(&MemoryStore::new(clock.clone()), MemoryConfig::default());
            let client = Client::builder(Arc::new(driver)).clock(clock.clone());
            let lock = client.build().unwrap().lock("held").unwrap();
            let guard = lock.kept_lease(lease).unwrap().acquire().await.unwrap();
            (guard, clock)
        });
        paused().block_on(async {
            let left = guard.remaining();
            assert!(left > lease * 9 / 10, "{left:?}");
            let deadline = clock.now() + left;
            let lost = tokio::time::timeout(lease * 2, guard.lost()).await;
            assert_eq!(lost.expect("a timer of its own"), LossReason::Deadline);
            let now = clock.now();
            assert!(now <= deadline, "{:?} late", now.since(deadline));
            let early = deadline.since(now);
            assert!(early <= Duration::from_millis(2), "{early:?} early");
        });
        drop(runtime);
    }
}
