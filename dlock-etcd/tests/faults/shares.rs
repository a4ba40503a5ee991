//! Sharers that meet: how many enter at once, and in which order those that wait are woken.

use crate::bed::{LONG, ask, comes, driver, granted, is_refused, server, turn, waiting};
use dlock_core::{
    Holds, Owner,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, WakeUp},
};
use dlock_etcd::EtcdDriver;
use futures_util::{future::join_all, stream::BoxStream};
use std::num::NonZeroU32;

/// A reader's request.
fn reads(mut request: Acquire) -> Acquire {
    request.owner = Owner::SHARED;
    request
}

/// A request for one of that many permits.
fn shares(mut request: Acquire, permits: u32) -> Acquire {
    request.owner = Owner::permits(NonZeroU32::new(permits).unwrap());
    request
}

async fn release(driver: &EtcdDriver, request: &Acquire) -> Released {
    let release = Release::new(request.name.clone(), request.owner, request.hold);
    driver.release(&release).await.unwrap()
}

async fn refused(driver: &EtcdDriver, request: &Acquire) {
    let answer = driver.acquire(request).await.unwrap();
    assert!(is_refused(&answer), "{answer:?}");
}

/// A driver for each waiter, and its wake-ups.
async fn waiters<const N: usize>(url: &str) -> [(EtcdDriver, BoxStream<'static, WakeUp>); N] {
    let drivers = join_all([(); N].map(|()| driver(url))).await;
    let waiters = drivers.into_iter().map(|driver| {
        let wake_ups = driver.wake_ups();
        (driver, wake_ups)
    });
    let waiters: Vec<_> = waiters.collect();
    waiters
        .try_into()
        .unwrap_or_else(|_| panic!("as many as asked"))
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_crowd_that_asks_at_once_as_many_enter_as_there_are_permits() {
    let server = server(&[]).await;
    let url = server.url();
    let drivers = join_all([(); 4].map(|()| driver(&url))).await;
    for permits in [1, 2, 8, 20] {
        let name = format!("x{permits}");
        // With a holder before them, and with none.
        for holds_first in [false, true] {
            let first = shares(ask(&name, 1, LONG, LONG), permits);
            if holds_first {
                granted(&drivers[0].acquire(&first).await.unwrap());
            }
            let crowd: Vec<_> = (2..34)
                .map(|hold| shares(ask(&name, hold, LONG, LONG), permits))
                .collect();
            let asked = crowd.iter().zip(drivers.iter().cycle());
            let answers = join_all(asked.map(|(request, driver)| driver.acquire(request))).await;
            let mut tokens = Vec::new();
            for answer in &answers {
                if let Acquired::Granted(grant) = answer.as_ref().unwrap() {
                    tokens.push(grant.token);
                }
            }
            tokens.dedup();
            assert_eq!(tokens.len(), usize::from(!holds_first || permits > 1));
            let shown = drivers[0].inspect(&first.name).await.unwrap();
            assert_eq!(shown.holds, permits, "{answers:?}");
            drivers[0].break_lock(&first.name, None).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sharers_that_wait_behind_a_writer_enter_one_after_the_other_without_a_poll() {
    let server = server(&[]).await;
    let [mut writer, one, two, last] = waiters::<4>(&server.url()).await;
    let inside = reads(ask("x", 1, LONG, LONG));
    granted(&one.0.acquire(&inside).await.unwrap());
    let writes = waiting("x", 2);
    refused(&writer.0, &writes).await;
    // The writer waits: a reader is refused, however it asks.
    refused(&one.0, &reads(ask("x", 3, LONG, LONG))).await;
    let mut readers = [one, two].map(|waiter| (waiter, None));
    for ((waiter, asks), hold) in readers.iter_mut().zip(4..) {
        let request = asks.insert(reads(waiting("x", hold)));
        refused(&waiter.0, request).await;
    }
    let writes_last = waiting("x", 6);
    refused(&last.0, &writes_last).await;
    release(&readers[0].0.0, &inside).await;
    comes("the writer's turn", turn(&mut writer.1)).await;
    let token = granted(&writer.0.acquire(&writes).await.unwrap()).token;
    release(&writer.0, &writes).await;
    for ((waiter, asks), holds) in readers.iter_mut().zip(1..) {
        comes("a reader's turn", turn(&mut waiter.1)).await;
        let answer = waiter.0.acquire(asks.as_ref().unwrap()).await.unwrap();
        let grant = granted(&answer);
        assert_eq!(grant.holds.get(), holds);
        assert!(grant.token > token);
    }
    refused(&last.0, &writes_last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharer_behind_a_waiter_that_leaves_and_behind_a_permit_that_ends_gets_its_turn() {
    let server = server(&[]).await;
    let [holder, writer, mut one, mut two] = waiters::<4>(&server.url()).await;
    let inside = shares(ask("x", 1, LONG, LONG), 2);
    granted(&holder.0.acquire(&inside).await.unwrap());
    let writes = waiting("x", 2);
    refused(&writer.0, &writes).await;
    let requests = [3, 4].map(|hold| shares(waiting("x", hold), 2));
    refused(&one.0, &requests[0]).await;
    refused(&two.0, &requests[1]).await;
    let ticket = writes.ticket.unwrap();
    writer.0.leave(&writes.name, ticket).await.unwrap();
    comes("the turn of the first", turn(&mut one.1)).await;
    granted(&one.0.acquire(&requests[0]).await.unwrap());
    // The permits are used up.
    refused(&two.0, &requests[1]).await;
    let released = release(&holder.0, &inside).await;
    assert!(matches!(released, Released::StillHeld { .. }));
    comes("the turn of the last", turn(&mut two.1)).await;
    granted(&two.0.acquire(&requests[1]).await.unwrap());
}

/// etcd refuses transactions of more than 128 operations.
#[tokio::test]
async fn all_sharers_are_released_in_one_request() {
    let server = server(&[]).await;
    let driver = driver(&server.url()).await;
    let requests: Vec<_> = (1..=150)
        .map(|hold| reads(ask("x", hold, LONG, LONG)))
        .collect();
    for request in &requests {
        granted(&driver.acquire(request).await.unwrap());
    }
    let mut all = Release::new(
        requests[0].name.clone(),
        requests[0].owner,
        requests[0].hold,
    );
    all.holds = Holds::All;
    let released = driver.release(&all).await.unwrap();
    assert!(matches!(released, Released::Freed), "{released:?}");
    let shown = driver.inspect(&all.name).await.unwrap();
    assert_eq!(shown.holds, 0);
}
