//! Holds: detach and attach, scopes, and how a loss is recorded.

use super::{Bench, SECOND, at_first_event};
use dlock_core::{GuardState, Lease, LossReason, driver::Wake};
use dlock_memory::{Call, Fault};
use futures_util::FutureExt;
use std::{sync::Arc, time::Duration};
use tokio::{runtime::Handle, time};

const LOST: GuardState = GuardState::Lost(LossReason::Deadline);

/// One batch renews both. The clock jumps when the first entry of the answer has been recorded, and then
/// the user of the second hold checks it.
#[tokio::test(start_paused = true)]
async fn a_hold_that_its_user_finds_lost_as_its_renewal_arrives_is_given_up_by_the_client() {
    let bench = Bench::new(Wake::Queue);
    let (client, _) = bench.client();
    let [first, second] = ["a", "b"].map(|name| client.lock(name).unwrap());
    let first = first.acquire().await.unwrap();
    let second = Arc::new(second.acquire().await.unwrap());
    let (clock, user) = (bench.store.clock().clone(), Arc::clone(&second));
    let _log = at_first_event("dlock::renew", move || {
        clock.jump(25 * SECOND);
        user.check().unwrap_err();
    });
    time::sleep(11 * SECOND).await;
    assert_eq!((first.state(), second.state()), (GuardState::Held, LOST));
    let report = client.shutdown(Duration::ZERO).await.unwrap();
    let names: Vec<_> = report.locks.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a"]);
}

/// The guard's own timer would check the state once a second, and not at the time of the renewal.
#[tokio::test(start_paused = true)]
async fn a_task_that_awaits_the_loss_is_woken_when_a_renewal_finds_nothing() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let guard = client.lock("x").unwrap().acquire().await.unwrap();
    let acquired = time::Instant::now();
    other.admin().break_lock("x", None).await.unwrap();
    time::sleep(SECOND / 2).await;
    assert_eq!(guard.lost().await, LossReason::NotHeld);
    let lost = acquired.elapsed();
    assert!(lost < 10 * SECOND + SECOND / 10, "{lost:?}");
}

#[tokio::test(start_paused = true)]
async fn minimum_and_maximum_hold_of_an_attached_hold_count_from_its_first_acquisition() {
    let (client, _) = Bench::new(Wake::Queue).client();
    let lock = client.lock("x").unwrap().max_hold(40 * SECOND);
    let lock = lock.min_hold(20 * SECOND);
    let guard = lock.acquire().await.unwrap();
    let acquired = time::Instant::now();
    time::sleep(10 * SECOND).await;
    let guard = client.attach(guard.detach().unwrap()).await.unwrap();
    let shut = guard.min_hold_remaining();
    assert!(shut <= 10 * SECOND, "{shut:?}");
    assert_eq!(guard.lost().await, LossReason::Deadline);
    let held = acquired.elapsed();
    assert!(held > 39 * SECOND && held <= 40 * SECOND, "{held:?}");
}

#[tokio::test(start_paused = true)]
async fn an_attached_hold_is_no_longer_reported_as_detached() {
    let (client, _) = Bench::new(Wake::Queue).client();
    let guard = client.lock("x").unwrap().acquire().await.unwrap();
    let guard = client.attach(guard.detach().unwrap()).await.unwrap();
    guard.release().await.unwrap();
    let report = client.shutdown(Duration::ZERO).await.unwrap();
    assert_eq!(report.detached, 0);
}

#[tokio::test(start_paused = true)]
async fn a_scope_does_not_re_enter_its_lock_name_in_another_store() {
    let [here, there] = [(); 2].map(|()| Bench::new(Wake::Queue).client().0);
    let guard = here.lock("x").unwrap().acquire().await.unwrap();
    let elsewhere = there.lock("x").unwrap();
    let acquired = guard.scope(elsewhere.try_acquire()).await;
    assert!(acquired.unwrap().is_some(), "it is free there");
}

#[tokio::test(start_paused = true)]
async fn a_release_whose_caller_is_gone_is_polled_until_it_is_abandoned() {
    let (client, faults) = Bench::new(Wake::Queue).client();
    let guard = client.lock("x").unwrap().acquire().await.unwrap();
    faults.once(Call::Release, Fault::Never);
    let before = tasks();
    assert!(guard.release().now_or_never().is_none());
    // Its give-up is 5 s after it was sent, and it is abandoned 30 s later.
    time::sleep(34 * SECOND).await;
    assert_eq!((client.pending_cleanups(), tasks()), (0, before + 1));
    time::sleep(2 * SECOND).await;
    assert_eq!(tasks(), before);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_comes_after_the_end_of_the_lease_does_not_say_that_another_ended_it() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("x").unwrap().lease(Lease::fixed(SECOND));
    for (late, broken) in [(SECOND, false), (SECOND / 10, true)] {
        let guard = lock.acquire().await.unwrap();
        if broken {
            other.admin().break_lock("x", None).await.unwrap();
        }
        faults.once(Call::Release, Fault::Delayed(late));
        let error = guard.release().await.unwrap_err();
        let reason = match broken {
            true => LossReason::NotHeld,
            false => LossReason::Deadline,
        };
        assert_eq!(error.loss(), Some(reason), "{error}");
    }
}

/// How many tasks this test's runtime runs.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}
