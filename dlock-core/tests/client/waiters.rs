//! Waiters of one client: the local queue, its tickets, and what a cancelled waiter leaves in the store's
//! queue.

use super::{Bench, SECOND};
use dlock_core::{ErrorKind, TimeoutPhase, driver::Wake};
use dlock_memory::{Call, Fault, WakeUpFault};
use std::time::Duration;
use tokio::{task::JoinSet, time};

/// Long enough for every request that is not delayed, and shorter than any poll interval.
const MOMENT: Duration = Duration::from_millis(10);

#[tokio::test(start_paused = true)]
async fn the_next_waiter_gets_the_lock_though_its_wake_up_is_lost() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("x").unwrap();
    let holder = other.lock("x").unwrap().acquire().await.unwrap();
    let [first, second] = [(); 2].map(|()| tokio::spawn(lock.acquire()));
    time::sleep(MOMENT).await;
    holder.release().await.unwrap();
    let first = first.await.unwrap().unwrap();
    faults.wake_ups(WakeUpFault::Lose);
    first.release().await.unwrap();
    let second = time::timeout(10 * SECOND, second).await;
    drop(second.expect("it polls").unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn try_acquire_does_not_overtake_a_waiter_of_its_client() {
    for wake in [Wake::Poll, Wake::Notify] {
        let bench = Bench::new(wake);
        let ((client, _), (other, _)) = (bench.client(), bench.client());
        let lock = client.lock("x").unwrap();
        let holder = other.lock("x").unwrap().acquire().await.unwrap();
        let waiter = tokio::spawn(lock.acquire());
        time::sleep(MOMENT).await;
        holder.release().await.unwrap();
        // The lock is free, and the waiter has not run since.
        assert!(lock.try_acquire().await.unwrap().is_none(), "{wake:?}");
        drop(waiter.await.unwrap().unwrap());
    }
}

/// Not that the store has failed for so long, however early in its time it began to.
#[tokio::test(start_paused = true)]
async fn try_acquire_of_a_store_that_fails_is_a_timeout() {
    let (client, faults) = Bench::new(Wake::Poll).client();
    faults.once(Call::Acquire, Fault::ErrorBefore);
    faults.once(Call::Acquire, Fault::NeverExecuted);
    let tried = client.lock("x").unwrap().try_acquire().await;
    let phase = TimeoutPhase::Request;
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::Timeout { phase });
}

/// The attempt in flight uses the first ticket up and puts the second in the queue.
#[tokio::test(start_paused = true)]
async fn the_ticket_of_an_attempt_under_way_is_not_handed_on() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("x").unwrap();
    let holder = other.lock("x").unwrap().acquire().await.unwrap();
    let [head, next, last] = [(); 3].map(|()| tokio::spawn(lock.acquire()));
    time::sleep(MOMENT).await;
    faults.once(Call::Acquire, Fault::Slow(MOMENT * 2));
    holder.release().await.unwrap();
    time::sleep(MOMENT).await;
    head.abort();
    // The grant is released as soon as it is answered, which serves the queue.
    let guard = time::timeout(MOMENT * 2, next).await;
    let guard = guard.expect("it is queued").unwrap().unwrap();
    guard.release().await.unwrap();
    drop(last.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_turn_of_the_next_waiter_that_comes_before_the_grant_it_follows_is_used() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("x").unwrap();
    let holder = other.lock("x").unwrap().acquire().await.unwrap();
    let [first, second] = [(); 2].map(|()| tokio::spawn(lock.acquire()));
    time::sleep(MOMENT).await;
    faults.once(Call::Acquire, Fault::Slow(MOMENT * 2));
    holder.release().await.unwrap();
    time::sleep(MOMENT).await;
    // The first holds the lock and does not know it yet when the queue is served again.
    other.admin().break_lock("x", None).await.unwrap();
    let _broken = first.await.unwrap().unwrap();
    let second = time::timeout(MOMENT, second).await;
    drop(second.expect("its turn has come").unwrap().unwrap());
}

/// A copy of the request that runs after the waiter has left puts its ticket in the queue again.
#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_the_queue_again_when_its_last_request_must_have_come() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let _holder = other.lock("x").unwrap().acquire().await.unwrap();
    faults.once(Call::Acquire, Fault::Late(SECOND));
    faults.always(Call::Acquire, Fault::ErrorBefore);
    let waited = time::timeout(SECOND / 2, client.lock("x").unwrap().acquire()).await;
    waited.unwrap_err();
    time::sleep(SECOND).await;
    let name = "x".parse().unwrap();
    assert_eq!(bench.store.tickets(&name), 1, "the copy has come");
    while client.pending_cleanups() > 0 {
        time::sleep(MOMENT).await;
    }
    assert_eq!(bench.store.tickets(&name), 0);
}

#[tokio::test(start_paused = true)]
async fn one_round_trip_hands_the_lock_to_the_next_task_of_its_client() {
    let bench = Bench::new(Wake::Queue);
    let (client, faults) = bench.client();
    let lock = client.lock("x").unwrap();
    let mut holder = lock.acquire().await.unwrap();
    let waiters = [(); 3].map(|()| tokio::spawn(lock.acquire()));
    time::sleep(MOMENT).await;
    faults.always(Call::Acquire, Fault::Delayed(MOMENT));
    faults.always(Call::Release, Fault::Delayed(MOMENT));
    for waiter in waiters {
        let began = time::Instant::now();
        holder.release().await.unwrap();
        holder = waiter.await.unwrap().unwrap();
        let took = began.elapsed();
        assert!(
            took < MOMENT * 3 / 2,
            "{took:?} for a round trip of {MOMENT:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_whose_next_task_asked_early_does_not_overtake_another_client() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("x").unwrap();
    let holder = lock.acquire().await.unwrap();
    let elsewhere = tokio::spawn(other.lock("x").unwrap().acquire());
    time::sleep(MOMENT).await;
    let here = tokio::spawn(lock.acquire());
    time::sleep(MOMENT).await;
    faults.always(Call::Acquire, Fault::Delayed(MOMENT));
    faults.always(Call::Release, Fault::Delayed(MOMENT));
    holder.release().await.unwrap();
    let elsewhere = time::timeout(MOMENT, elsewhere).await;
    let elsewhere = elsewhere.expect("it is first").unwrap().unwrap();
    time::sleep(MOMENT * 2).await;
    assert!(!here.is_finished());
    elsewhere.release().await.unwrap();
    drop(here.await.unwrap().unwrap());
}

/// A permit was left for one. The other waiter of the client asked beside the first, was granted it, and its answer was
/// lost.
#[tokio::test(start_paused = true)]
async fn a_sharer_whose_answer_was_lost_beside_the_head_keeps_no_permit() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let _inside = other.semaphore("x", 2).unwrap().acquire().await.unwrap();
    let permits = client.semaphore("x", 2).unwrap();
    for fault in [Fault::ErrorAfter, Fault::Never] {
        faults.once(Call::Acquire, Fault::Delayed(MOMENT)); // of the head, which comes second
        faults.once(Call::Acquire, fault);
        let mut waiting = JoinSet::new();
        for _ in 0..2 {
            waiting.spawn(permits.acquire());
        }
        for _ in 0..2 {
            let inside = time::timeout(20 * SECOND, waiting.join_next()).await;
            let inside = inside.unwrap_or_else(|_| panic!("kept out after {fault:?}"));
            inside.unwrap().unwrap().unwrap().release().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_has_not_asked_yet_keeps_no_reader_of_another_client_out() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let [here, there] = [&client, &other].map(|client| client.rw_lock("x").unwrap().read());
    let writer = other.lock("x").unwrap().acquire().await.unwrap();
    let [first, second] = [(); 2].map(|()| tokio::spawn(here.acquire()));
    time::sleep(MOMENT).await;
    faults.once(Call::Acquire, Fault::Ok);
    faults.always(Call::Acquire, Fault::Delayed(SECOND)); // the request of the second one
    writer.release().await.unwrap();
    let _inside = first.await.unwrap().unwrap();
    assert!(there.try_acquire().await.unwrap().is_some());
    assert!(!second.is_finished());
    drop(second.await.unwrap().unwrap());
}

/// The one ahead does not take its turn. The second is told when that is over, before it has the answer that makes it wait.
#[tokio::test(start_paused = true)]
async fn a_time_to_poll_that_comes_before_the_answer_is_kept() {
    let bench = Bench::new(Wake::Queue);
    let ((holder, _), (gone, deaf)) = (bench.client(), bench.client());
    let (second, slow) = bench.client();
    let guard = holder.lock("x").unwrap().acquire().await.unwrap();
    deaf.wake_ups(WakeUpFault::Lose);
    let ahead = tokio::spawn(gone.lock("x").unwrap().acquire());
    time::sleep(MOMENT).await;
    slow.once(Call::Acquire, Fault::Slow(MOMENT * 2));
    let waiting = tokio::spawn(second.lock("x").unwrap().acquire());
    time::sleep(MOMENT).await;
    guard.release().await.unwrap();
    let next = time::timeout(SECOND * 3 / 2, waiting).await;
    drop(next.expect("when the turn is over").unwrap().unwrap());
    ahead.abort();
}
