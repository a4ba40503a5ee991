//! Presence: what it costs, and who waits for it.

use super::{Bench, SECOND};
use dlock_core::{Client, Lease, driver::Wake};
use dlock_memory::{Call, Fault};
use futures_util::FutureExt;
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::time;

#[tokio::test(start_paused = true)]
async fn a_thousand_holds_with_a_presence_cost_little_more_than_one() {
    let bench = Bench::new(Wake::Poll);
    let clock = bench.store.clock().clone();
    let client = Client::builder(Arc::new(bench.driver()))
        .clock(clock.clone())
        .lease(Lease::renewed(60 * SECOND))
        .presence(3 * SECOND)
        .build()
        .unwrap();
    let mut guards = Vec::new();
    for number in 0..1_000 {
        let lock = client.lock(format!("order:{number}")).unwrap();
        guards.push(lock.acquire().await.unwrap());
        clock.sleep_until(clock.now() + SECOND / 200).await;
    }
    let executed = || -> u64 {
        Call::ALL
            .iter()
            .map(|call| bench.store.executed(*call))
            .sum()
    };
    let before = executed();
    let span = Duration::from_secs(1_200);
    clock.sleep_until(clock.now() + span).await;
    let commands = executed() - before;
    assert!(guards.iter().all(|guard| guard.check().is_ok()));
    let a_second = commands as f64 / span.as_secs_f64();
    assert!(a_second <= 1.1, "{a_second} commands a second");
    // One renewal of the presence each third of it, and those of the holds.
    assert!(a_second >= 1.0, "{a_second} commands a second");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_not_polled_any_more_keeps_no_other_from_the_presence() {
    let bench = Bench::new(Wake::Queue);
    let driver = Arc::new(bench.driver());
    let faults = driver.faults().clone();
    let client = Client::builder(driver)
        .clock(bench.store.clock().clone())
        .lease(Lease::renewed(600 * SECOND))
        .presence(3 * SECOND)
        .build()
        .unwrap();
    faults.once(Call::Acquire, Fault::Slow(SECOND / 10));
    let mut asleep = pin!(client.lock("x").unwrap().acquire());
    assert!(asleep.as_mut().now_or_never().is_none());
    let lock = client.lock("y").unwrap();
    let other = time::timeout(SECOND, lock.acquire()).await;
    other
        .expect("within a second")
        .unwrap()
        .release()
        .await
        .unwrap();
    drop(asleep.await.unwrap());
}
