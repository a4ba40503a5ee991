//! Stalled runtimes: the client's runtime is dropped, not polled, or has all workers blocked. Nothing is
//! renewed then, and every guard notices.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{
    Client, Clock, Error, ErrorKind, Guard, GuardState, HoldId, Holds, Lease, LossReason, Owner,
    ReleaseOutcome, TimeoutPhase,
};
use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
use futures_util::TryStreamExt;
use std::{
    pin::{Pin, pin},
    sync::{Arc, mpsc},
    task::{Context, Poll, Wake},
    thread,
    time::{Duration, Instant},
};
use tokio::runtime::{Builder, Runtime};

const LEASE: Duration = Duration::from_secs(1);

/// A lease that does not end during a test.
const LONG: Duration = Duration::from_secs(60);

/// The slack that a busy machine adds to an upper bound. Lower bounds have none.
const SLACK: Duration = Duration::from_secs(10);

fn store() -> MemoryStore {
    MemoryStore::new(Clock::boot())
}

/// A client over a new connection. Build it inside the runtime that it belongs to.
fn client(store: &MemoryStore) -> Client {
    let driver = MemoryDriver::connect(store, MemoryConfig::default());
    Client::new(driver).unwrap()
}

async fn acquired(client: &Client, name: &str, lease: Duration) -> Guard {
    let lock = client.lock(name).unwrap().lease(Lease::renewed(lease));
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

/// Checks two guards whose client no longer runs: they report the loss on their own, their drop does not
/// panic, and the store frees the names when the leases are over.
fn ends_by_its_lease(store: &MemoryStore, [asked, awaited]: [Guard; 2]) {
    let began = Instant::now();
    let elsewhere = current_thread();
    let left = awaited.remaining();
    assert!(left <= LEASE, "{left:?}");
    let reason = elsewhere.block_on(awaited.lost());
    assert_eq!(reason, LossReason::Deadline);
    assert!(began.elapsed() <= left + SLACK);
    // Nothing has polled this guard, and no task of its client has run: its clock shows the loss.
    thread::sleep(asked.remaining());
    assert_eq!(asked.state(), GuardState::Lost(LossReason::Deadline));
    assert_eq!(asked.check().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(asked.remaining(), Duration::ZERO);

    let tokens = [asked.token(), awaited.token()];
    let names = [asked.name().clone(), awaited.name().clone()];
    drop((asked, awaited));
    elsewhere.block_on(async {
        let fresh = client(store);
        for (name, token) in names.iter().zip(tokens) {
            let lock = fresh.lock(name.as_str()).unwrap();
            let next = lock.acquire_timeout(LEASE + SLACK).await.unwrap();
            assert!(next.token() > token);
            assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
        }
    });
}

async fn two(client: &Client, lease: Duration) -> [Guard; 2] {
    [
        acquired(client, "asked", lease).await,
        acquired(client, "awaited", lease).await,
    ]
}

#[test]
fn a_runtime_that_is_dropped_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = workers(1);
    let guards = runtime.block_on(async { two(&client(&store), LEASE).await });
    drop(runtime);
    ends_by_its_lease(&store, guards);
}

#[test]
fn a_current_thread_runtime_that_is_not_polled_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = current_thread();
    let guards = runtime.block_on(async { two(&client(&store), LEASE).await });
    ends_by_its_lease(&store, guards);
    drop(runtime);
}

#[test]
fn a_runtime_whose_workers_are_all_blocked_leaves_guards_to_their_leases() {
    let store = store();
    let runtime = workers(2);
    let guards = runtime.block_on(async { two(&client(&store), LEASE).await });
    let blocked = Arc::new(std::sync::Barrier::new(3));
    let ends: Vec<_> = (0..2)
        .map(|_| {
            let (end, ended) = mpsc::channel::<()>();
            let blocked = Arc::clone(&blocked);
            runtime.spawn(async move {
                blocked.wait();
                // Blocks until the other end is dropped.
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
    let guards = runtime.block_on(async { two(&client(&store), LONG).await });
    drop(runtime);
    current_thread().block_on(async {
        let [first, second] = guards;
        // The waiter polls the request in place.
        assert_eq!(first.release().await.unwrap(), ReleaseOutcome::Released);
        // No task is left to send this release: the lease ends the hold.
        drop(second);
        let fresh = client(&store);
        let free = fresh.lock("asked").unwrap().try_acquire().await.unwrap();
        assert!(free.is_some());
        let held = fresh.lock("awaited").unwrap().try_acquire().await.unwrap();
        assert!(held.is_none());
    });
}

/// The driver's timers are gone with the runtime of the caller; the store's grant is released all the same.
#[test]
fn an_acquire_whose_runtime_ended_is_cleaned_up() {
    let (store, home, other) = (store(), workers(1), current_thread());
    let asking = home.block_on(async {
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        // Granted at once. The answer waits for a timer of the runtime that asks, as native clients do.
        driver.faults().once(Call::Acquire, Fault::Slow(SLACK));
        Client::new(driver).unwrap()
    });
    let lock = asking.lock("granted").unwrap();
    let lock = lock.lease(Lease::renewed(SLACK * 100));
    let given_up = other.block_on(async {
        let asked = tokio::time::timeout(Duration::from_millis(50), lock.try_acquire());
        asked.await.is_err()
    });
    assert!(given_up);
    drop(other);
    current_thread().block_on(async {
        let lock = client(&store).lock("granted").unwrap();
        let next = lock.acquire_timeout(SLACK).await.unwrap();
        assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
    });
}

#[test]
fn a_client_dropped_after_its_runtime_panics_nowhere() {
    let runtime = current_thread();
    let (client, wait) = runtime.block_on(async {
        let client = client(&store());
        let guard = acquired(&client, "held", LONG).await;
        let wait = client.lock("held").unwrap().acquire();
        let mut wait = Box::pin(wait);
        let first = tokio::time::timeout(Duration::from_millis(1), wait.as_mut()).await;
        first.unwrap_err();
        (client, (wait, guard))
    });
    drop(runtime);
    drop(wait);
    assert_eq!(
        client.pending_cleanups(),
        0,
        "what cannot be cleaned up is not counted for ever"
    );
    drop(client);
}

#[test]
fn a_client_is_made_inside_a_runtime_or_not_at_all() {
    let driver = MemoryDriver::connect(&store(), MemoryConfig::default());
    let error = Client::new(driver).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("none here"), "{error}");
}

#[test]
fn a_client_is_not_made_on_a_runtime_without_timers() {
    let driver = MemoryDriver::connect(&store(), MemoryConfig::default());
    let error = bare().block_on(async { Client::new(driver) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("enable_time"), "{error}");
}

/// The time is that of a paused runtime, in which only the waiter runs, so what it sees is exact.
#[test]
fn lost_is_timed_by_its_waiter_and_resolves_not_after_the_deadline() {
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
            let guard = lock.lease(Lease::renewed(lease)).acquire().await.unwrap();
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

/// A runtime without timers.
fn bare() -> Runtime {
    Builder::new_current_thread().build().unwrap()
}

/// Awaits on this thread, outside of any runtime.
fn driven<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Arc::new(Unpark(thread::current())).into();
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

type Refused<'a> = Pin<Box<dyn Future<Output = Error> + 'a>>;

/// Every call that asks a store.
fn calls(client: &Client, [released, detached]: [Guard; 2]) -> Vec<(&'static str, Refused<'_>)> {
    let lock = client.lock("free").unwrap();
    let (again, within) = (lock.clone(), lock.clone());
    let pass = released.pass().unwrap();
    let detached = detached.detach().unwrap();
    let (owner, hold) = (Owner::from_seed("me"), HoldId::from_bits(1));
    vec![
        (
            "acquire",
            Box::pin(async move { lock.acquire().await.unwrap_err() }),
        ),
        (
            "acquire_timeout",
            Box::pin(async move { within.acquire_timeout(LONG).await.unwrap_err() }),
        ),
        (
            "try_acquire",
            Box::pin(async move { again.try_acquire().await.unwrap_err() }),
        ),
        (
            "join",
            Box::pin(async move {
                let lock = client.lock(pass.name().as_str()).unwrap();
                lock.join(&pass).await.unwrap_err()
            }),
        ),
        (
            "attach",
            Box::pin(async move { client.attach(detached).await.unwrap_err().error }),
        ),
        (
            "inspect",
            Box::pin(async move { client.admin().inspect("x").await.unwrap_err() }),
        ),
        (
            "list",
            Box::pin(async move {
                client
                    .admin()
                    .list("")
                    .try_collect::<Vec<_>>()
                    .await
                    .unwrap_err()
            }),
        ),
        (
            "break",
            Box::pin(async move { client.admin().break_lock("x", None).await.unwrap_err() }),
        ),
        (
            "renew",
            Box::pin(async move {
                client
                    .admin()
                    .renew("x", &owner, hold, LEASE)
                    .await
                    .unwrap_err()
            }),
        ),
        (
            "end",
            Box::pin(async move {
                client
                    .admin()
                    .release("x", &owner, Holds::One(hold))
                    .await
                    .unwrap_err()
            }),
        ),
        (
            "release",
            Box::pin(async move { released.release().await.unwrap_err() }),
        ),
    ]
}

#[test]
fn whatever_is_awaited_without_timers_is_misuse_and_says_so() {
    for outside in [true, false] {
        let (store, home) = (store(), workers(1));
        let client = home.block_on(async { client(&store) });
        let guards = home.block_on(two(&client, LONG));
        let name = guards[0].name().clone();
        for (what, call) in calls(&client, guards) {
            let (error, says) = match outside {
                true => (driven(call), "none here"),
                false => (bare().block_on(call), "enable_time"),
            };
            assert_eq!(error.kind(), ErrorKind::Misuse, "{what}: {error}");
            assert!(error.to_string().contains(says), "{what}: {error}");
        }
        // The background releases what was to be released.
        let next = client.lock(name.as_str()).unwrap();
        let next = home.block_on(next.acquire_timeout(SLACK)).unwrap();
        home.block_on(next.release()).unwrap();
    }
}

#[test]
fn lost_is_timed_on_any_executor() {
    let (store, home) = (store(), current_thread());
    let [one, two] = home.block_on(async { two(&client(&store), LEASE).await });
    assert_eq!(driven(one.lost()), LossReason::Deadline);
    assert_eq!(bare().block_on(two.lost()), LossReason::Deadline);
    let late = home.block_on(async { acquired(&client(&store), "late", LEASE).await });
    drop(home);
    assert_eq!(
        driven(late.run(std::future::pending::<()>()))
            .unwrap_err()
            .kind(),
        ErrorKind::Lost
    );
}

/// It sleeps in steps of a second: the second step begins outside.
#[test]
fn a_wait_that_began_on_a_runtime_may_end_outside_of_it() {
    let (store, home) = (store(), workers(1));
    let limit = Duration::from_millis(1_200);
    let (begun, waiting, _guard) = home.block_on(async {
        let client = client(&store);
        let guard = client.lock("held").unwrap().acquire().await.unwrap();
        let mut waiting = Box::pin(client.lock("held").unwrap().acquire_timeout(limit));
        let begun = tokio::time::timeout(Duration::from_millis(1), waiting.as_mut()).await;
        (begun, waiting, guard)
    });
    let phase = TimeoutPhase::Wait;
    // On a busy machine it may end before it gets outside.
    let error = begun.unwrap_or_else(|_| driven(waiting)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout { phase }, "{error}");
}

#[test]
fn a_loss_says_whether_the_runtime_or_the_store_did_not_answer() {
    let (store, runtime) = (store(), current_thread());
    let stopped = "runtime did not run";
    let (guard, fixed, client) = runtime.block_on(async {
        let client = client(&store);
        let fixed = client.lock("fixed").unwrap().lease(Lease::fixed(LEASE));
        let fixed = fixed.acquire().await.unwrap();
        (acquired(&client, "kept", LEASE).await, fixed, client)
    });
    thread::sleep(guard.remaining());
    let error = guard.check().unwrap_err();
    assert_eq!(error.loss(), Some(LossReason::Deadline));
    assert!(error.to_string().contains(stopped), "{error}");
    assert!(!error.to_string().contains("store"), "{error}");
    // Nothing renews a fixed lease.
    thread::sleep(fixed.remaining());
    let error = fixed.check().unwrap_err();
    assert!(!error.to_string().contains(stopped), "{error}");
    drop(client);
}
