//! Shutdown: what it reports and stops, and what a dropped client closes.

use super::{Bench, SECOND, at_first_event};
use dlock_core::{
    ErrorKind, GuardState, LossReason, ShutdownOutcome,
    driver::{DistributedLock, Wake},
};
use dlock_memory::{Call, Fault};
use futures_util::FutureExt;
use std::{
    future::IntoFuture,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{runtime::Builder, time};

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_report_as_unknown_what_ended_in_its_grace() {
    let (client, faults) = Bench::new(Wake::Queue).client();
    let guard = client.lock("x").unwrap().acquire().await.unwrap();
    faults.once(Call::Release, Fault::Slow(SECOND));
    drop(guard);
    let report = client.shutdown(2 * SECOND).await.unwrap();
    assert_eq!(report.unknown, []);
}

/// It was broken, which no renewal has shown yet.
#[tokio::test(start_paused = true)]
async fn a_lock_that_was_lost_unnoticed_is_not_reported_as_released() {
    for force in [false, true] {
        let (client, _) = Bench::new(Wake::Queue).client();
        let guard = client.lock("x").unwrap().acquire().await.unwrap();
        client.admin().break_lock("x", None).await.unwrap();
        let report = match force {
            true => client.shutdown(Duration::ZERO).force().await.unwrap(),
            false => {
                let mut shutdown = pin!(client.shutdown(SECOND).into_future());
                assert!(shutdown.as_mut().now_or_never().is_none());
                drop(guard);
                shutdown.await.unwrap()
            }
        };
        let lost = ShutdownOutcome::Lost(LossReason::NotHeld);
        assert_eq!(report.locks, [("x".parse().unwrap(), lost)], "{force}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_heard_of_after_the_shutdown_began_is_given_back() {
    let bench = Bench::new(Wake::Queue);
    let (client, faults) = bench.client();
    faults.once(Call::Acquire, Fault::Slow(SECOND));
    let mut acquiring = pin!(client.lock("x").unwrap().acquire());
    assert!(acquiring.as_mut().now_or_never().is_none());
    // The answer has arrived when the shutdown begins, and the task has not run since.
    time::sleep(2 * SECOND).await;
    let mut shutdown = pin!(client.shutdown(SECOND).into_future());
    assert!(shutdown.as_mut().now_or_never().is_none());
    let error = acquiring.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShuttingDown);
    assert_eq!(shutdown.await.unwrap().locks, []);
    let (observer, _) = bench.client();
    assert_eq!(observer.admin().inspect("x").await.unwrap().holds, 0);
}

/// Of two grants of one owner, the newer one ends the older hold, and logs so before the watchdog gets the
/// newer one. The whole shutdown runs at that point.
#[test]
fn a_hold_that_is_entered_while_the_shutdown_ends_is_never_renewed() {
    let mut builder = Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().unwrap();
    let runtime = Arc::new(runtime);
    let _inside = runtime.enter();
    let (client, faults) = Bench::new(Wake::Queue).client();
    let lock = client.lock("x").unwrap().with_owner(&client.owner());
    faults.once(Call::Acquire, Fault::Delayed(SECOND));
    let mut newer = pin!(lock.acquire());
    assert!(newer.as_mut().now_or_never().is_none());
    let _older = runtime.block_on(async {
        let older = lock.acquire().await.unwrap();
        client.admin().break_lock("x", None).await.unwrap();
        time::sleep(2 * SECOND).await;
        older
    });
    let (within, closing) = (Arc::clone(&runtime), client.clone());
    let shutting_down = at_first_event("dlock::lost", move || {
        let shutdown = closing.shutdown(Duration::ZERO).into_future();
        within.block_on(shutdown).unwrap();
    });
    let newer = newer.now_or_never().unwrap().unwrap();
    assert_eq!(newer.state(), GuardState::Lost(LossReason::Shutdown));
    drop(shutting_down);
    let renewed = Arc::<AtomicBool>::default();
    let seen = Arc::clone(&renewed);
    let _watching = at_first_event("dlock::renew", move || seen.store(true, SeqCst));
    runtime.block_on(time::sleep(60 * SECOND));
    assert!(!renewed.load(SeqCst));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_client_closes_its_driver() {
    let bench = Bench::new(Wake::Queue);
    let driver = Arc::new(bench.driver());
    drop(bench.client_over(Arc::clone(&driver)));
    tokio::task::yield_now().await;
    let error = driver.inspect(&"x".parse().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}
