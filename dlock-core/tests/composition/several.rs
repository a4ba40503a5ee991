//! Several locks at once: all of a set, or any of them.

use super::{Bench, MOMENT, SECOND};
use dlock_core::{Client, ErrorKind, Lease, LossReason, TimeoutPhase, driver::Wake};
use dlock_memory::{Call, Fault};
use futures_util::TryStreamExt;
use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::{task::JoinSet, time};

const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
const OUT_OF_TIME: ErrorKind = ErrorKind::Timeout {
    phase: TimeoutPhase::Wait,
};

#[tokio::test(start_paused = true)]
async fn sets_in_random_orders_neither_deadlock_nor_leave_anything() {
    for (seed, wake) in [Wake::Queue, Wake::Notify, Wake::Poll]
        .into_iter()
        .enumerate()
    {
        let bench = Bench::new(wake);
        let inside = Arc::new(NAMES.map(|_| AtomicBool::new(false)));
        let mut users = JoinSet::new();
        for user in 0..16 {
            let (client, inside) = (bench.client().0, Arc::clone(&inside));
            let mut random = fastrand::Rng::with_seed(seed as u64 * 16 + user);
            users.spawn(async move {
                for _ in 0..25 {
                    let chosen =
                        random.choose_multiple(0..NAMES.len(), 1 + random.clone().usize(..8));
                    let set = client.lock_all(chosen.iter().map(|at| NAMES[*at])).unwrap();
                    let guard = set.acquire().await.unwrap();
                    assert!(chosen.iter().all(|at| !inside[*at].swap(true, SeqCst)));
                    time::sleep(MOMENT * random.u32(..3)).await;
                    assert!(chosen.iter().all(|at| inside[*at].swap(false, SeqCst)));
                    if random.bool() {
                        drop(guard);
                        continue;
                    }
                    let released = guard.release().await;
                    assert!(released.iter().all(|(_, outcome)| outcome.is_ok()));
                }
            });
        }
        let all = time::timeout(3600 * SECOND, users.join_all()).await;
        all.expect("no deadlock");
        nothing_is_left(&bench.client().0).await;
    }
}

/// Every name is free within a moment, and no record says otherwise.
async fn nothing_is_left(client: &Client) {
    time::sleep(MOMENT).await;
    let listed: Vec<_> = client.admin().list("").try_collect().await.unwrap();
    assert!(listed.is_empty(), "{listed:?}");
    let set = client.lock_all(NAMES).unwrap();
    drop(set.try_acquire().await.unwrap().expect("all are free"));
    time::sleep(MOMENT).await;
}

/// Polls a future that many times, each time it is woken, then drops it. Whether it was done before.
async fn cut<F: Future>(future: F, polls: usize) -> bool {
    let (mut future, mut left) = (pin!(future), polls);
    poll_fn(|cx| match left {
        0 => Poll::Ready(false),
        _ => {
            left -= 1;
            match future.as_mut().poll(cx) {
                Poll::Ready(_) => Poll::Ready(true),
                Poll::Pending if left == 0 => Poll::Ready(false),
                Poll::Pending => Poll::Pending,
            }
        }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_set_dropped_at_any_await_leaves_nothing() {
    for wake in [Wake::Queue, Wake::Notify, Wake::Poll] {
        let bench = Bench::new(wake);
        let ((client, faults), (other, _)) = (bench.client(), bench.client());
        faults.always(Call::Acquire, Fault::Slow(MOMENT / 10));
        let (set, any) = (
            client.lock_all(NAMES).unwrap(),
            client.lock_any(NAMES).unwrap(),
        );
        let mut polls = 0;
        loop {
            let guard = other.lock("c").unwrap().acquire().await.unwrap();
            let freed = tokio::spawn(async move {
                time::sleep(MOMENT).await;
                guard.release().await.unwrap();
            });
            let done = cut(set.acquire(), polls).await;
            let done = cut(any.acquire(), polls).await && done;
            freed.await.unwrap();
            nothing_is_left(&other).await;
            assert_eq!(client.pending_cleanups(), 0);
            polls += 1;
            if done {
                break;
            }
        }
        assert!(
            polls > NAMES.len(),
            "{polls} polls are fewer than its awaits"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_held_costs_the_others_nothing() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let held = other.lock("c").unwrap().acquire().await.unwrap();
    let set = client.lock_all(NAMES).unwrap();
    assert!(set.try_acquire().await.unwrap().is_none());
    for limit in [Duration::ZERO, SECOND] {
        let error = set.acquire_timeout(limit).await.unwrap_err();
        assert_eq!(error.kind(), OUT_OF_TIME);
        assert_eq!(error.name().unwrap().as_str(), "c");
    }
    held.release().await.unwrap();
    nothing_is_left(&other).await;
}

/// Not one limit for each lock.
#[tokio::test(start_paused = true)]
async fn the_limit_is_one_for_the_set() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let first = other.lock("a").unwrap().acquire().await.unwrap();
    let _second = other.lock("b").unwrap().acquire().await.unwrap();
    tokio::spawn(async move {
        time::sleep(2 * SECOND).await;
        first.release().await.unwrap();
    });
    let began = time::Instant::now();
    let set = client.lock_all(NAMES).unwrap();
    let error = set.acquire_timeout(3 * SECOND).await.unwrap_err();
    assert_eq!(error.kind(), OUT_OF_TIME);
    let took = began.elapsed();
    assert!(took >= 3 * SECOND && took < 3 * SECOND + MOMENT, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_set_whose_first_lock_is_lost_meanwhile_begins_again() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let held = other.lock("b").unwrap().acquire().await.unwrap();
    let set = client.lock_all(["a", "b"]).unwrap();
    let set = set.lease(Lease::fixed(2 * SECOND));
    let waiting = tokio::spawn(set.acquire());
    time::sleep(5 * SECOND).await;
    held.release().await.unwrap();
    let guard = time::timeout(3 * SECOND, waiting).await;
    let guard = guard.expect("it goes on waiting").unwrap().unwrap();
    guard.check().unwrap();
    assert!(guard.token("a").unwrap().0 > 1, "the first grant is over");
    assert_eq!(guard.token("c"), None);
}

#[tokio::test(start_paused = true)]
async fn a_try_of_a_set_whose_first_lock_is_lost_meanwhile_is_not_repeated() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let set = client.lock_all(NAMES).unwrap().lease(Lease::fixed(SECOND));
    faults.always(Call::Acquire, Fault::Delayed(SECOND / 4));
    for limit in [None, Some(Duration::ZERO)] {
        let answer = match limit {
            None => set.try_acquire().await.map(|set| set.is_some()),
            Some(limit) => set.acquire_timeout(limit).await.map(|_| true),
        };
        let error = answer.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("lease long enough"), "{error}");
    }
    nothing_is_left(&other).await;
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_one_is_the_loss_of_the_set() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let guard = client.lock_all(NAMES).unwrap().acquire().await.unwrap();
    let work = guard.run(async {
        other.admin().break_lock("f", None).await.unwrap();
        std::future::pending::<()>().await;
    });
    let error = work.await.unwrap_err();
    assert_eq!(error.loss(), Some(LossReason::NotHeld));
    let (name, reason) = guard.lost().await;
    assert_eq!((name.as_str(), reason), ("f", LossReason::NotHeld));
    assert_eq!(guard.check().unwrap_err().name(), Some(&name));
    for (released, outcome) in guard.release().await {
        assert_eq!(outcome.is_err(), released == name, "{released}");
    }
    nothing_is_left(&other).await;
}

#[tokio::test(start_paused = true)]
async fn sets_of_no_names_or_too_many_are_refused() {
    let (client, _) = Bench::new(Wake::Queue).client();
    let names = |count| (0..count).map(|at| format!("{}", at % 65));
    assert_eq!(client.lock_all(names(64)).unwrap().names().count(), 64);
    for count in [0, 65, 1000] {
        let refused = client.lock_all(names(count)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Misuse, "{refused}");
        client.lock_any(names(count)).unwrap_err();
    }
    client.lock_all(["a", ""]).unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn whichever_lock_comes_first_is_kept_and_the_other_released() {
    for wake in [Wake::Queue, Wake::Notify, Wake::Poll] {
        let bench = Bench::new(wake);
        let ((client, _), (other, _)) = (bench.client(), bench.client());
        let held = other.lock_all(NAMES).unwrap().acquire().await.unwrap();
        let any = client.lock_any(NAMES).unwrap();
        assert!(any.try_acquire().await.unwrap().is_none());
        let waiting = tokio::spawn(any.acquire());
        time::sleep(SECOND).await;
        for (_, outcome) in held.release().await {
            outcome.unwrap();
        }
        let guard = time::timeout(SECOND, waiting).await;
        let guard = guard.expect("they are free").unwrap().unwrap();
        time::sleep(MOMENT).await;
        let listed: Vec<_> = other.admin().list("").try_collect().await.unwrap();
        let listed: Vec<_> = listed.iter().map(|shown| &shown.name).collect();
        assert_eq!(listed, [guard.name()], "{wake:?}");
        guard.release().await.unwrap();
        nothing_is_left(&other).await;
    }
}

#[tokio::test(start_paused = true)]
async fn any_of_several_keeps_its_limit_whatever_the_store_does() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let any = client.lock_any(NAMES).unwrap();
    let held = other.lock_all(NAMES).unwrap().acquire().await.unwrap();
    for (limit, fault) in [
        (Duration::ZERO, None),
        (SECOND, None),
        (SECOND, Some(Fault::Never)),
    ] {
        faults.clear();
        if let Some(fault) = fault {
            faults.always(Call::Acquire, fault);
        }
        let began = time::Instant::now();
        let error = any.acquire_timeout(limit).await.unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.is_contended(), fault.is_none(), "{error}");
        let took = began.elapsed();
        assert!(took >= limit && took < limit + MOMENT, "{took:?}");
    }
    faults.clear();
    drop(held);
    time::sleep(60 * SECOND).await;
    nothing_is_left(&other).await;
}
