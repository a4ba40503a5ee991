//! Processes that share a file: what they do to it, and how they notify each other.

use super::bed::{Bed, acquire, frees, granted, held, name, native, open, ticket};
use super::{LIMIT, SECOND, trial};
use dlock_conformance::testbed::worker::{self, Worker};
use dlock_core::{
    Client, Clock, Effect, ErrorKind, RetryClass,
    driver::{DistributedLock, Wake, WakeUp},
};
use dlock_sqlite::SqliteDriver;
use futures_util::{FutureExt, StreamExt, future::join_all};
use libtest_mimic::Trial;
use std::{fs, path::Path, sync::Arc, time::SystemTime};

pub(super) fn trials() -> Vec<Trial> {
    Vec::from(tests! { trial:
        processes_take_turns_at_an_unprotected_file,
        processes_that_open_a_new_file_at_once_all_can,
        a_killed_holder_is_gone_with_its_lease,
        a_writer_killed_in_mid_transaction_is_rolled_back,
        a_writer_that_stands_still_makes_writes_fail_and_looks_succeed,
        a_release_touches_a_file_only_for_a_name_with_a_waiter,
        every_release_wakes_a_waiter_that_asked_once,
        a_waiter_in_another_process_is_woken,
        without_wake_ups_waiters_poll_and_leave_no_files,
    })
}

/// Adds to a number in a file that nothing but the lock protects.
pub(super) async fn count(file: &Path, times: u32) {
    let client = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let lock = client.lock("counter").unwrap();
    let counter = file.with_extension("counter");
    let mut last = 0;
    for _ in 0..times {
        let guard = lock.acquire().await.unwrap();
        let token = guard.token().0;
        assert!(token > last);
        last = token;
        let number: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
        tokio::task::yield_now().await;
        fs::write(&counter, (number + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
    worker::say("done").unwrap();
}

async fn processes_take_turns_at_an_unprotected_file() {
    let bed = Bed::new();
    fs::write(bed.file.with_extension("counter"), "0").unwrap();
    let mut workers: Vec<_> = (0..4)
        .map(|_| bed.worker("count", &[("times", "50")]))
        .collect();
    join_all(
        workers
            .iter_mut()
            .map(|worker| worker.expect("done", LIMIT)),
    )
    .await
    .into_iter()
    .for_each(|done| drop(done.unwrap()));
    let counter = fs::read_to_string(bed.file.with_extension("counter"));
    assert_eq!(counter.unwrap(), "200");
}

async fn processes_that_open_a_new_file_at_once_all_can() {
    let bed = Bed::new();
    let mut workers: Vec<_> = (0..12).map(|_| bed.worker("open", &[])).collect();
    for ended in join_all(workers.iter_mut().map(Worker::wait)).await {
        assert!(ended.unwrap().success());
    }
}

pub(super) async fn hold(file: &Path) {
    let driver = open(file).await;
    granted(&driver, &acquire("a", SECOND * 6)).await;
    worker::say("held").unwrap();
    std::future::pending().await
}

async fn a_killed_holder_is_gone_with_its_lease() {
    let bed = Bed::new();
    // With wake-ups it would be told to poll after two seconds at most.
    let url = format!("sqlite:{}?dlock.wake=poll", bed.file.display());
    let driver = SqliteDriver::connect(&url).await.unwrap();
    let mut holder = bed.worker("hold", &[]);
    holder.expect("held", LIMIT).await.unwrap();
    holder.kill_9().await.unwrap();
    let refusal = held(&driver, &acquire("a", SECOND)).await;
    // The dead holder's lease runs out, and the waiter was told to poll then.
    tokio::time::sleep(refusal.poll_in.unwrap()).await;
    granted(&driver, &acquire("a", SECOND)).await;
}

/// Holds the file's one write lock, half-way through.
pub(super) async fn write(file: &Path) {
    let mut native = native(file).await;
    let half = "BEGIN IMMEDIATE; UPDATE locks SET owner = 'half', token = token + 1000, version = version + 1";
    sqlx::raw_sql(half).execute(&mut native).await.unwrap();
    worker::say("half-way").unwrap();
    std::future::pending().await
}

async fn a_writer_killed_in_mid_transaction_is_rolled_back() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    let token = granted(&driver, &first).await.token;
    let mut writer = bed.worker("write", &[]);
    writer.expect("half-way", LIMIT).await.unwrap();
    writer.kill_9().await.unwrap();
    let shown = driver.inspect(&first.name).await.unwrap();
    assert_eq!(shown.holders[0].token, Some(token));
    assert_eq!(shown.holders[0].owner, first.owner.fingerprint());
    frees(&driver, &first).await;
    granted(&driver, &acquire("a", SECOND)).await;
}

async fn a_writer_that_stands_still_makes_writes_fail_and_looks_succeed() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut writer = bed.worker("write", &[]);
    writer.expect("half-way", LIMIT).await.unwrap();
    writer.stop().unwrap();
    let began = Clock::boot().now();
    let error = driver.acquire(&acquire("b", SECOND)).await.unwrap_err();
    let waited = Clock::boot().now().since(began);
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Later, Effect::None)
    );
    assert!(error.to_string().contains("busy"), "{error}");
    assert!(waited > SECOND / 2 && waited < SECOND * 3, "{waited:?}");
    let mut poll = acquire("a", SECOND);
    poll.retry = true;
    held(&driver, &poll).await;
    assert_eq!(driver.inspect(&first.name).await.unwrap().holds, 1);
    writer.kill_9().await.unwrap();
    granted(&driver, &acquire("b", SECOND)).await;
}

/// When the wake files were touched last.
fn touched(bed: &Bed) -> Vec<SystemTime> {
    let files = fs::read_dir(bed.at("locks.db.wake")).into_iter().flatten();
    files
        .map(|file| file.unwrap().metadata().unwrap().modified().unwrap())
        .collect()
}

async fn a_release_touches_a_file_only_for_a_name_with_a_waiter() {
    let bed = Bed::new();
    let (holder, waiter) = (bed.driver().await, bed.driver().await);
    let first = acquire("a", SECOND * 30);
    granted(&holder, &first).await;
    held(&waiter, &acquire("a", SECOND)).await;
    frees(&holder, &first).await;
    assert!(
        touched(&bed).is_empty(),
        "without a ticket no trace is left"
    );

    let mut wake_ups = waiter.wake_ups();
    let second = acquire("a", SECOND * 30);
    granted(&holder, &second).await;
    let mut waiting = acquire("a", SECOND);
    waiting.ticket = Some(ticket());
    assert_eq!(held(&waiter, &waiting).await.poll_in, Some(SECOND * 2));
    let before = touched(&bed);
    assert_eq!(before.len(), 1);
    assert_eq!(wake_ups.next().now_or_never(), None);
    // The times of files have the grain of a tick.
    tokio::time::sleep(SECOND / 50).await;
    frees(&holder, &second).await;
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(name("a"))));
    assert!(touched(&bed) > before);
    // A name without a waiter.
    let before = touched(&bed);
    let other = acquire("b", SECOND * 30);
    granted(&holder, &other).await;
    frees(&holder, &other).await;
    assert_eq!(touched(&bed), before);
    // What breaks it and what frees it by force wakes too.
    let third = acquire("a", SECOND * 30);
    granted(&holder, &third).await;
    holder.break_lock(&third.name, None).await.unwrap();
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(name("a"))));
    waiter.leave(&name("a"), ticket()).await.unwrap();
}

async fn every_release_wakes_a_waiter_that_asked_once() {
    let bed = Bed::new();
    let (holder, waiter) = (bed.driver().await, bed.driver().await);
    let mut wake_ups = waiter.wake_ups();
    let first = acquire("a", SECOND * 30);
    granted(&holder, &first).await;
    let mut waiting = acquire("a", SECOND);
    waiting.ticket = Some(ticket());
    held(&waiter, &waiting).await;
    frees(&holder, &first).await;
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(name("a"))));
    // Taken and given back before the waiter asks again.
    let second = acquire("a", SECOND * 30);
    granted(&holder, &second).await;
    frees(&holder, &second).await;
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(name("a"))));
}

pub(super) async fn wait(file: &Path) {
    let client = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let lock = client.lock("a").unwrap();
    worker::say("waits").unwrap();
    let guard = lock.acquire().await.unwrap();
    let at = Clock::boot().now().as_nanos();
    guard.release().await.unwrap();
    worker::say(&format!("entered {at}")).unwrap();
}

async fn a_waiter_in_another_process_is_woken() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let mut quickest = LIMIT;
    for _ in 0..5 {
        let first = acquire("a", SECOND * 30);
        granted(&driver, &first).await;
        let mut waiter = bed.worker("wait", &[]);
        waiter.expect("waits", LIMIT).await.unwrap();
        while touched(&bed).is_empty() {
            tokio::time::sleep(SECOND / 100).await;
        }
        // The file exists a moment before it is watched, and nothing shows when the watch begins.
        tokio::time::sleep(SECOND / 20).await;
        let freed = Clock::boot().now();
        frees(&driver, &first).await;
        let entered = waiter.expect("entered ", LIMIT).await.unwrap();
        let entered = dlock_core::Instant::from_nanos(entered.parse().unwrap());
        quickest = quickest.min(entered.since(freed));
    }
    // Polling alone would take two seconds.
    assert!(quickest < SECOND / 4, "{quickest:?}");
}

async fn without_wake_ups_waiters_poll_and_leave_no_files() {
    let bed = Bed::new();
    let url = format!("sqlite:{}?dlock.wake=poll", bed.file.display());
    let polling = SqliteDriver::connect(&url).await.unwrap();
    assert_eq!(polling.capabilities().wake, Wake::Poll);
    assert_eq!(polling.wake_ups().next().await, None);
    let first = acquire("a", SECOND * 30);
    granted(&polling, &first).await;
    let mut waiting = acquire("a", SECOND);
    waiting.ticket = Some(ticket());
    let rest = held(&polling, &waiting).await.poll_in.unwrap();
    assert!(rest > SECOND * 20, "{rest:?}");
    let client = Client::builder(Arc::new(polling)).build().unwrap();
    let waiter = tokio::spawn(async move { client.lock("a").unwrap().acquire().await });
    // It polls a few times in vain: a waiter that only polls leaves no trace of that.
    tokio::time::sleep(SECOND / 4).await;
    frees(&bed.driver().await, &first).await;
    let soon = tokio::time::timeout(SECOND * 10, waiter).await;
    drop(soon.unwrap().unwrap().unwrap());
    assert!(!bed.at("locks.db.wake").exists());
}
