//! Error messages: what they tell the people who have to act on them.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, Error, ErrorKind, Lease, MIN_LEASE, TimeoutPhase};
use dlock_memory::{Call, Fault, Faults, MemoryConfig, MemoryDriver, MemoryStore};
use std::{sync::Arc, time::Duration};

/// Two clients of one store, and the faults of the first.
fn clients() -> (Client, Faults, Client) {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let connect = || MemoryDriver::connect(&store, MemoryConfig::default());
    let client = |driver| {
        let builder = Client::builder(Arc::new(driver));
        builder.clock(clock.clone()).build().unwrap()
    };
    let driver = connect();
    let faults = driver.faults().clone();
    (client(driver), faults, client(connect()))
}

#[track_caller]
fn says(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    let words = error.to_string();
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in {words:?}");
    }
}

const REQUEST: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Request,
};

const WAIT: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Wait,
};

/// A round trip of 20 ms, and the shortest lease: a renewal has a sixth of it, and the store refuses later
/// ones.
#[tokio::test(start_paused = true)]
async fn a_lease_too_short_for_its_store_is_lost_and_says_why() {
    let (client, faults, _) = clients();
    let lock = client.lock("x").unwrap().lease(Lease::renewed(MIN_LEASE));
    faults.always_all(Fault::Delayed(Duration::from_millis(20)));
    let guard = lock.acquire().await.unwrap();
    guard.lost().await;
    let parts = [
        "this 100 ms lease had 17 ms to be answered",
        "needs a longer lease",
        "stop the work",
    ];
    says(&guard.check().unwrap_err(), ErrorKind::Lost, &parts);
    let words = guard.check().unwrap_err().to_string();
    assert!(!words.contains("runtime"), "{words}");
    says(&guard.release().await.unwrap_err(), ErrorKind::Lost, &parts);
    // A lease that is long enough for its store is over for other reasons.
    let guard = client.lock("y").unwrap().acquire().await.unwrap();
    faults.always(Call::Renew, Fault::Never);
    guard.lost().await;
    let words = guard.check().unwrap_err().to_string();
    assert!(!words.contains("longer lease"), "{words}");
}

#[tokio::test(start_paused = true)]
async fn a_store_slower_than_a_third_of_the_lease_is_told_with_that_time() {
    let (client, faults, _) = clients();
    faults.always_all(Fault::Never);
    let short = client.lock("x").unwrap().lease(Lease::renewed(MIN_LEASE));
    let third = "within 33 ms (a third of the lease: a longer one leaves it more)";
    let tried = short.try_acquire().await.unwrap_err();
    says(&tried, REQUEST, &["not acquired within 33 ms", third]);
    let waited = short.acquire_timeout(Duration::from_millis(500)).await;
    let parts = ["not acquired within 500 ms", third];
    says(&waited.unwrap_err(), REQUEST, &parts);
    says(
        &short.acquire().await.unwrap_err(),
        ErrorKind::Unavailable,
        &[third],
    );
    // Here the lease was not too short.
    let long = client.lock("x").unwrap();
    let waited = long.acquire_timeout(Duration::from_millis(1)).await;
    let parts = [
        "not acquired within 1 ms",
        "answers within 1 ms;",
        "being given back",
    ];
    says(&waited.unwrap_err(), REQUEST, &parts);
    let tried = long.try_acquire().await.unwrap_err();
    says(&tried, REQUEST, &["answers within 5.0 s;"]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_of_no_time_reports_the_holder() {
    let (client, _, other) = clients();
    let guard = other.lock("x").unwrap().acquire().await.unwrap();
    let lock = client.lock("x").unwrap();
    let holder = format!("held by owner #{}", guard.owner());
    let tried = lock.acquire_timeout(Duration::ZERO).await.unwrap_err();
    says(&tried, WAIT, &["not acquired at once", &holder]);
    let waited = lock.acquire_timeout(Duration::from_secs(1)).await;
    let parts = ["not acquired within 1.0 s", &holder];
    says(&waited.unwrap_err(), WAIT, &parts);
    guard.release().await.unwrap();
    // The waiter that gave up has left the queue.
    while client.pending_cleanups() > 0 {
        tokio::task::yield_now().await;
    }
    let own = lock.acquire_timeout(Duration::ZERO).await.unwrap();
    let tried = lock.acquire_timeout(Duration::ZERO).await.unwrap_err();
    says(&tried, WAIT, &["not acquired at once", "waits for itself"]);
    drop(own);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_gives_up_is_told_how_many_stand_before_it() {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let locks = std::array::from_fn::<_, 4, _>(|_| {
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        let client = Client::builder(Arc::new(driver)).clock(clock.clone());
        client.build().unwrap().lock("x").unwrap()
    });
    let guard = locks[0].acquire().await.unwrap();
    let limits = [30, 20, 10].map(Duration::from_millis);
    let [first, second, third] = std::array::from_fn(|i| locks[i + 1].acquire_timeout(limits[i]));
    let (first, second, third) = tokio::join!(first, second, third);
    let first = first.unwrap_err();
    assert!(!first.to_string().contains("before this one"), "{first}");
    let parts = ["1 waiter stands before this one"];
    says(&second.unwrap_err(), WAIT, &parts);
    let parts = ["2 waiters stand before this one"];
    says(&third.unwrap_err(), WAIT, &parts);
    drop(guard);
}

/// No request was sent, so the store has not failed.
#[tokio::test]
async fn a_wait_of_next_to_no_time_does_not_report_the_failure_of_another() {
    let store = MemoryStore::new(Clock::boot());
    let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    let faults = driver.faults().clone();
    let client = Client::new(driver).unwrap();
    let lock = client.lock("x").unwrap();
    let guard = lock.acquire().await.unwrap();
    faults.always(Call::Acquire, Fault::ErrorBefore);
    // Long enough for one request on a busy machine.
    let failed = lock.acquire_timeout(Duration::from_secs(3)).await;
    says(&failed.unwrap_err(), REQUEST, &[]);
    faults.clear();
    let asked = faults.made(Call::Acquire);
    let waited = lock.acquire_timeout(Duration::from_nanos(1)).await;
    says(&waited.unwrap_err(), WAIT, &["waits for itself"]);
    assert_eq!(faults.made(Call::Acquire), asked);
    drop(guard);
}

/// Waiting for another task is not a self-deadlock.
#[tokio::test(start_paused = true)]
async fn only_the_task_that_holds_the_lock_is_told_that_it_waits_for_itself() {
    let (client, _, _) = clients();
    let lock = client.lock("x").unwrap();
    let limits = [Duration::ZERO, Duration::from_secs(1)];
    let guard = lock.acquire().await.unwrap();
    let elsewhere = lock.clone();
    let told = tokio::spawn(async move {
        let mut told = Vec::new();
        for limit in limits {
            told.push(elsewhere.acquire_timeout(limit).await.unwrap_err());
        }
        told
    });
    for error in told.await.unwrap() {
        says(
            &error,
            WAIT,
            &["another task of this client acquired at", file!()],
        );
        assert!(!error.to_string().contains("itself"), "{error}");
    }
    for limit in limits {
        let error = lock.acquire_timeout(limit).await.unwrap_err();
        says(
            &error,
            WAIT,
            &["this very task acquired at", "waits for itself"],
        );
    }
    drop(guard);
    let within = tokio::spawn(async move {
        let _guard = lock.acquire().await.unwrap();
        lock.acquire_timeout(Duration::from_secs(1))
            .await
            .unwrap_err()
    });
    says(
        &within.await.unwrap(),
        WAIT,
        &["this very task", "waits for itself"],
    );
}
