//! Wake-ups: the change stream, and polling without one.

use crate::{
    testbed::{SECOND, Testbed},
    warnings,
};
use dlock_core::{
    Effect, ErrorKind,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, WakeUp},
};
use dlock_mongo::MongoDriver;
use futures_util::StreamExt;
use mongodb::bson::doc;

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_a_release_and_by_a_break_and_not_by_a_renewal() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    assert!(t.driver.wake_ups().next().await.is_none(), "taken once");
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.waits("a", 1).await;
    let free = WakeUp::Free("a".parse().unwrap());
    t.renew(&[&holder]).await;
    t.granted(&t.acquire("elsewhere", SECOND)).await;
    let quiet = tokio::time::timeout(SECOND / 3, wake_ups.next()).await;
    assert!(
        quiet.is_err(),
        "nor because a stream was opened while it is held: {quiet:?}"
    );
    t.release(&holder).await;
    assert_eq!(wake_ups.next().await, Some(free.clone()));
    t.granted(&waiter).await;
    t.waits("a", 2).await;
    t.driver.break_lock(&waiter.name, None).await.unwrap();
    assert_eq!(
        wake_ups.next().await,
        Some(free),
        "the name was heard of still"
    );
    t.driver.close().await;
    assert_eq!(wake_ups.next().await, None);
    let error = t.driver.acquire(&waiter).await.map(drop).unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::ShuttingDown, Effect::None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_again_when_the_change_stream_was_lost() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    t.waits("a", 1).await;
    for lost in [286, 280] {
        t.fail("getMore", doc! { "errorCode": lost }).await;
        assert_eq!(wake_ups.next().await, Some(WakeUp::Resync), "{lost}");
    }
    t.release(&holder).await;
    assert_eq!(
        wake_ups.next().await,
        Some(WakeUp::Free("a".parse().unwrap()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn while_no_stream_can_be_opened_waiters_poll_often() {
    warnings::listen();
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    t.granted(&t.acquire("a", SECOND * 30)).await;
    t.fail_times("aggregate", 1_000, doc! { "errorCode": 13 })
        .await;
    t.waits("a", 1).await;
    let polls = async || t.held(&t.asks("a", 1)).await.poll_in.unwrap();
    t.until(async || polls().await <= SECOND / 10).await;
    // A second attempt fails like the first.
    t.until(async || t.failed().await >= 2).await;
    let said = ["no change stream for now", "lacks a right"];
    assert_eq!(warnings::count(said), 1, "said once");
    t.heal().await;
    assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
    assert_eq!(polls().await, SECOND * 2);
    assert_eq!(warnings::count(said), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_between_the_refusal_and_the_stream_is_heard() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let blocked = doc! { "blockConnection": true, "blockTimeMS": 1_000 };
    t.fail("aggregate", blocked).await;
    t.waits("a", 1).await;
    t.release(&holder).await;
    // The poll interval would be two seconds, so this is a wake-up.
    assert_eq!(
        wake_ups.next().await,
        Some(WakeUp::Free("a".parse().unwrap()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poll_that_no_release_woke_takes_nothing() {
    let t = Testbed::start().await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let mut polls = t.waits("a", 1).await;
    polls.retry = true;
    // Every command that could take the lock fails, so the answer comes from a read.
    t.fail_all_of(&["findAndModify", "update"], doc! { "errorCode": 11600 })
        .await;
    let held = t.held(&polls).await;
    assert_eq!(held.by.unwrap().owner, holder.owner.fingerprint());
    t.heal().await;
    t.release(&holder).await;
    t.granted(&polls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loser_of_many_races_hears_of_a_release_that_no_other_waiter_wants() {
    let t = Testbed::start().await;
    let rival = MongoDriver::connect(&t.server.url()).await.unwrap();
    let takes = async || {
        let req = t.acquire("a", SECOND * 30);
        let answer = rival.acquire(&req).await.unwrap();
        assert!(matches!(answer, Acquired::Granted(_)), "{answer:?}");
        req
    };
    let gives = async |req: Acquire| {
        let release = Release::new(req.name, req.owner, req.hold);
        let answer = rival.release(&release).await.unwrap();
        assert!(matches!(answer, Released::Freed), "{answer:?}");
    };
    let mut wake_ups = t.driver.wake_ups();
    for round in 1..=3 {
        let mut inside = takes().await;
        let mut waiter = t.waits("a", round).await;
        waiter.retry = true;
        for _ in 0..10 {
            gives(inside).await;
            inside = takes().await;
            // Before there is a stream, no notification arrives. The waiter then polls, as it would in the
            // core.
            drop(tokio::time::timeout(SECOND * 2, wake_ups.next()).await);
            waiter.give_up = t.soon();
            t.held(&waiter).await;
        }
        // The waiter may pause just now, and the rival does not come back.
        gives(inside).await;
        let wake_up = tokio::time::timeout(SECOND * 20, wake_ups.next()).await;
        wake_up.expect("a rest is over within a second").unwrap();
        waiter.give_up = t.soon();
        t.granted(&waiter).await;
        t.release(&waiter).await;
    }
}

/// Open cursors on the server.
async fn open(t: &Testbed) -> i64 {
    t.counted(&["cursor", "open", "total"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn many_names_have_one_stream() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    let streams = async || t.counted(&["commands", "aggregate", "total"]).await;
    let before = streams().await;
    let names: Vec<_> = (1..=40).map(|at| (format!("n{at}"), at)).collect();
    let mut held = Vec::new();
    for (name, ticket) in &names {
        held.push(t.acquire(name, SECOND * 600));
        t.granted(&held[held.len() - 1]).await;
        t.waits(name, *ticket).await;
    }
    // It opens with the first waiter, and a new name opens no other. The cursor of the stream that the driver tried
    // when it connected may be closed late.
    t.until(async || open(&t).await == 1 && streams().await == before + 1)
        .await;
    for req in held.iter().rev() {
        t.release(req).await;
        // A monitor that a busy machine delays makes all waiters poll.
        while wake_ups.next().await.unwrap() != WakeUp::Free(req.name.clone()) {}
    }
    t.until(async || open(&t).await == 1).await;
}
