//! Concurrency: many threads, many guards, one watchdog.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{
    Client, ClientBuilder, Clock, Detached, Error, ErrorKind, Guard, GuardState, Lease, Lock,
    LockName, LossReason, NotAttached, NotDetached, Owner, Pass, ReleaseOutcome, Shutdown,
    ShutdownReport, driver::Lane,
};
use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
use futures_util::{StreamExt, future::ready};
use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time};

fn travels<T: Send + Sync + 'static>() {}

fn is_sent<T: Send + 'static>(work: T) -> T {
    work
}

#[test]
fn everything_a_user_holds_travels_between_threads() {
    travels::<(
        Client,
        ClientBuilder,
        Lock,
        Guard,
        Error,
        Shutdown,
        ShutdownReport,
    )>();
    travels::<(
        Detached,
        NotDetached,
        NotAttached,
        Pass,
        Owner,
        Lease,
        Clock,
    )>();
    travels::<(GuardState, ReleaseOutcome, LossReason, ErrorKind, LockName)>();
}

#[tokio::test(start_paused = true)]
async fn every_future_is_sent_to_another_thread() {
    let (client, _) = simulated(1);
    let lock = client.lock("x").unwrap();
    // The futures borrow nothing: the lock and the client may be dropped first.
    let all = (
        is_sent(lock.acquire()),
        is_sent(lock.acquire_timeout(Duration::from_secs(1))),
        is_sent(lock.try_acquire()),
    );
    drop(all);
    let guard = lock.acquire().await.unwrap();
    let pass = guard.pass().unwrap();
    drop(is_sent(lock.join(&pass)));
    let (shared, other) = (Arc::new(guard), client.clone());
    let watching = tokio::spawn({
        let guard = Arc::clone(&shared);
        async move { guard.run(guard.scope(guard.lost())).await }
    });
    let asking = tokio::spawn(async move {
        other.admin().inspect("x").await.unwrap();
        assert!(
            other
                .admin()
                .list("")
                .all(|shown| ready(shown.is_ok()))
                .await
        );
        other.admin().break_lock("x", None).await.unwrap();
    });
    asking.await.unwrap();
    assert!(watching.await.unwrap().is_err(), "broken");
    let guard = Arc::into_inner(shared).unwrap();
    is_sent(guard.release()).await.unwrap_err();
    let detached = lock.acquire().await.unwrap().detach().unwrap();
    let guard = is_sent(client.attach(detached)).await.unwrap();
    drop(guard);
    let down = is_sent(client.shutdown(Duration::ZERO).into_future());
    tokio::spawn(down).await.unwrap().unwrap();
}

/// A client in simulated time, with its store.
fn simulated(lanes: u32) -> (Client, MemoryStore) {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let mut config = MemoryConfig::default();
    config.lanes = NonZeroU32::new(lanes).unwrap();
    let driver = Arc::new(MemoryDriver::connect(&store, config));
    (Client::builder(driver).clock(clock).build().unwrap(), store)
}

const LEASE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn ten_thousand_guards_are_renewed_in_time_and_in_batches() {
    const GUARDS: u64 = 10_000;
    let (client, store) = simulated(1);
    let mut guards = Vec::new();
    for number in 0..GUARDS {
        let lock = client.lock(format!("lock {number}")).unwrap();
        guards.push(lock.acquire().await.unwrap());
    }
    // Ten leases, so thirty renewals of each; and `remaining` is never less than a renewal's time before it
    // is due.
    let leases = 10;
    for _ in 0..leases * 6 {
        time::sleep(LEASE / 6).await;
        for guard in &guards {
            assert_eq!(guard.state(), GuardState::Held);
            assert!(guard.remaining() >= LEASE / 2, "{:?}", guard.remaining());
        }
    }
    time::sleep(Duration::from_millis(100)).await;
    let batches = store.executed(Call::Renew);
    let size = u64::try_from(client.capabilities().renew_batch).unwrap();
    assert_eq!(batches, leases * 3 * GUARDS.div_ceil(size));
    for guard in guards {
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    }
    time::sleep(LEASE).await;
    assert_eq!(
        store.executed(Call::Renew),
        batches,
        "nothing renews after release"
    );
}

#[tokio::test(start_paused = true)]
async fn guards_taken_one_after_the_other_share_batches() {
    let (client, store) = simulated(1);
    let mut guards = Vec::new();
    for number in 0..50 {
        let lock = client.lock(format!("lock {number}")).unwrap();
        guards.push(lock.acquire().await.unwrap());
        time::sleep(Duration::from_millis(20)).await;
    }
    time::sleep(LEASE).await;
    // Taken within a second, renewed every ten: one batch each time, and one for the holds taken in
    // between.
    let batches = store.executed(Call::Renew);
    assert!((2..=4).contains(&batches), "{batches} batches");
    assert!(guards.iter().all(|guard| guard.check().is_ok()));
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_stalls_delays_no_other() {
    let (client, store) = simulated(4);
    let mut guards = Vec::new();
    for number in 0..200 {
        let lock = client.lock(format!("lock {number}")).unwrap();
        guards.push(lock.acquire().await.unwrap());
    }
    let driver = MemoryDriver::connect(&store, lanes(4));
    let stalled =
        |guard: &Guard| dlock_core::driver::DistributedLock::lane(&driver, guard.name()) == Lane(2);
    let count = guards.iter().filter(|guard| stalled(guard)).count();
    assert!((1..200).contains(&count), "{count} of 200");
    store.stall_lane(Lane(2));
    for _ in 0..20 {
        time::sleep(LEASE / 6).await;
        for guard in guards.iter().filter(|guard| !stalled(guard)) {
            assert_eq!(guard.state(), GuardState::Held);
            assert!(guard.remaining() >= LEASE / 2);
        }
    }
    for guard in &guards {
        let expected = match stalled(guard) {
            true => GuardState::Lost(LossReason::Deadline),
            false => GuardState::Held,
        };
        assert_eq!(guard.state(), expected);
    }
}

fn lanes(count: u32) -> MemoryConfig {
    let mut config = MemoryConfig::default();
    config.lanes = NonZeroU32::new(count).unwrap();
    config
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_never_answered_delays_no_other_renewal() {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let driver = Arc::new(MemoryDriver::connect(&store, MemoryConfig::default()));
    let faults = driver.faults().clone();
    let client = Client::builder(driver).clock(clock).build().unwrap();
    let slow = client.lock("slow").unwrap().acquire().await.unwrap();
    time::sleep(LEASE * 8 / 36).await;
    let other = client.lock("other").unwrap().acquire().await.unwrap();
    // The first renewal of the first hold hangs; the other hold's is sent meanwhile.
    faults.once(Call::Renew, Fault::Never);
    time::sleep(LEASE * 13 / 36).await;
    assert_eq!(other.state(), GuardState::Held);
    assert!(
        other.remaining() > LEASE * 8 / 10,
        "{:?}",
        other.remaining()
    );
    time::sleep(LEASE / 2).await;
    assert_eq!(slow.state(), GuardState::Held, "the repeat came through");
}

/// Where each of two threads that share a name records what it does.
#[derive(Default)]
struct Shop {
    is_taken: AtomicBool,
    last: AtomicU64,
}

impl Shop {
    /// Enters, with a token greater than all before; no other thread may be inside.
    fn enter(&self, guard: &Guard) {
        assert!(!self.is_taken.swap(true, SeqCst), "two inside");
        let last = self.last.swap(guard.token().0, SeqCst);
        assert!(last < guard.token().0);
    }

    fn leave(&self) {
        assert!(self.is_taken.swap(false, SeqCst));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_on_all_threads_exclude_each_other_however_they_end() {
    let store = MemoryStore::new(Clock::boot());
    let shop = Arc::new(Shop::default());
    let mut tasks = JoinSet::new();
    for client in 0..2 {
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        let client = (client, Client::new(driver).unwrap());
        for task in 0..4 {
            let (lock, shop) = (client.1.lock("shop").unwrap(), Arc::clone(&shop));
            let number = client.0 * 4 + task;
            tasks.spawn(async move {
                for round in 0..250 {
                    visit(&lock, &shop, round + number).await;
                }
            });
        }
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
}

async fn visit(lock: &Lock, shop: &Shop, round: u32) {
    if round.is_multiple_of(5) {
        // Cancelled at whatever step it has reached.
        let cut = time::timeout(Duration::from_micros(50), lock.acquire()).await;
        return drop(cut);
    }
    let guard = lock.acquire().await.unwrap();
    shop.enter(&guard);
    if round.is_multiple_of(3) {
        tokio::task::yield_now().await;
    }
    shop.leave();
    match round % 4 {
        0 => drop(guard),
        1 => drop(tokio::spawn(guard.release())),
        _ => assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn release_drop_and_break_race_the_watchdog_and_leave_nothing() {
    let store = MemoryStore::new(Clock::boot());
    let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    let client = Client::new(driver).unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..8_u32 {
        let client = client.clone();
        tasks.spawn(async move {
            // The shortest lease: a renewal is due 33 ms after the grant, which is when the lock is
            // released.
            let name = format!("lock {task}");
            let lock = client.lock(&name).unwrap();
            let lock = lock.lease(Lease::renewed(Duration::from_millis(100)));
            for round in 0..25 {
                let guard = lock.acquire().await.unwrap();
                time::sleep(Duration::from_micros(
                    32_800 + u64::from(round * 37 % 9) * 100,
                ))
                .await;
                match (round + task) % 3 {
                    0 => drop(guard),
                    1 => drop(guard.release().await),
                    _ => {
                        client.admin().break_lock(&name, None).await.unwrap();
                        drop(guard);
                    }
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    while client.pending_cleanups() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(client.admin().list("").next().await.is_none());
    // A renewal that was sent before a release may be executed after it; no other follows.
    let mut renewed = None;
    for _ in 0..100 {
        let executed = store.executed(Call::Renew);
        if renewed.replace(executed) == Some(executed) {
            return;
        }
        time::sleep(Duration::from_millis(150)).await;
    }
    panic!("something is still renewed");
}
