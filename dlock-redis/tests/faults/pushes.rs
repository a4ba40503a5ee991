//! The connection for pushes, and what is said over it.

use crate::bed::{SECOND, Testbed, ticket};
use dlock_core::{DistributedLock, Effect, ErrorKind, Hint};
use futures_util::StreamExt;
use redis::AsyncCommands;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_has_one_channel_whatever_it_waits_for() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    assert!(t.driver.hints().next().await.is_none(), "taken once");
    assert_eq!(t.listeners().await, 1, "before any ticket");
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        let holder = t.acquire(name, SECOND * 30);
        t.granted(&holder).await;
        let waiter = t.in_line(name, SECOND * 30, at as u64 + 1);
        assert_eq!(t.held(&waiter).await.ahead, Some(0));
        t.release(&holder).await;
        let (name, ticket) = (t.name(name), ticket(at as u64 + 1));
        assert_eq!(hints.next().await, Some(Hint::Turn { name, ticket }));
        t.granted(&waiter).await;
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.close().await;
    assert_eq!(hints.next().await, None);
    t.until(async || t.listeners().await == 0).await;
    let error = t.driver.acquire(&t.acquire("c", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::ShuttingDown, Effect::None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stopped_reading_hints_is_given_no_turns() {
    let t = Testbed::start().await;
    let hints = t.driver.hints();
    drop(hints);
    t.until(async || t.listeners().await == 0).await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    t.held(&t.in_line("a", SECOND * 30, 1)).await;
    t.release(&holder).await;
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_look_again_when_their_connection_was_cut() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    for _ in 0..3 {
        t.kill("pubsub").await;
        assert_eq!(hints.next().await, Some(Hint::LookAgain));
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.break_lock(&holder.name, None).await.unwrap();
    let (name, ticket) = (t.name("a"), ticket(1));
    assert_eq!(hints.next().await, Some(Hint::Turn { name, ticket }));
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_that_nobody_reads_are_bounded_and_end_in_one_look() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    let channel = t.channel().await;
    let mut raw = t.raw().await;
    for ticket in 1..=3_000 {
        let said = format!("T{ticket} dlock:{{a}}");
        let _: u64 = raw.publish(&channel, said).await.unwrap();
    }
    // Neither what nobody understands nor a name that nobody has ends the connection.
    for said in [
        "",
        "T",
        "Tx dlock:{a}",
        "T0 dlock:{a}",
        "T1 other",
        "F1 x dlock:{a}",
        "Z1 1 1",
        "\u{e9}1 2",
    ] {
        let heard: u64 = raw.publish(&channel, said).await.unwrap();
        assert_eq!(heard, 1);
    }
    t.sleep(200).await;
    assert_eq!(hints.next().await, Some(Hint::LookAgain));
    let mut read = 0;
    while let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(100), hints.next()).await {
        read += 1;
    }
    assert!(read <= 1_100, "{read}");
    assert_eq!(t.listeners().await, 1);
}
