//! Tests of the connection for notifications, and of the messages on it.

use crate::bed::{SECOND, Testbed, ticket};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Fault, Trigger},
};
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, WakeUp},
};
use dlock_redis::RedisDriver;
use futures_util::StreamExt;
use redis::AsyncCommands;
use std::{sync::Arc, time::Duration};

#[tokio::test(flavor = "multi_thread")]
async fn a_client_has_one_channel_whatever_it_waits_for() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    assert_eq!(t.listeners().await, 1, "before any ticket");
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        let holder = t.acquire(name, SECOND * 30);
        t.granted(&holder).await;
        let waiter = t.in_line(name, SECOND * 30, at as u64 + 1);
        assert_eq!(t.held(&waiter).await.ahead, Some(0));
        t.release(&holder).await;
        let (name, ticket) = (t.name(name), ticket(at as u64 + 1));
        assert_eq!(wake_ups.next().await, Some(WakeUp::Turn { name, ticket }));
        t.granted(&waiter).await;
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.close().await;
    assert_eq!(wake_ups.next().await, None);
    t.until(async || t.listeners().await == 0).await;
    let error = t.driver.acquire(&t.acquire("c", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::ShuttingDown, Effect::None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_has_one_connection_for_commands_and_one_for_pushes() {
    let t = Testbed::start().await;
    for number in 1..=20 {
        let name = format!("n{number}");
        t.granted(&t.acquire(&name, SECOND * 30)).await;
        t.held(&t.in_line(&name, SECOND * 30, number)).await;
    }
    t.until(async || {
        let listed = t.server.command(&["CLIENT", "LIST"]).unwrap();
        let text = listed.text().unwrap();
        // Not counting the connection that lists.
        let of = |what| text.lines().filter(|line| line.contains(what)).count();
        (text.lines().count(), of(" sub=1 "), of(" sub=0 ")) == (3, 1, 2)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stopped_reading_wake_ups_is_given_no_turns() {
    let t = Testbed::start().await;
    let wake_ups = t.driver.wake_ups();
    drop(wake_ups);
    t.until(async || t.listeners().await == 0).await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    t.held(&t.in_line("a", SECOND * 30, 1)).await;
    t.release(&holder).await;
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_again_when_their_connection_was_cut() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    for _ in 0..3 {
        t.kill("pubsub").await;
        assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.break_lock(&holder.name, None).await.unwrap();
    let (name, ticket) = (t.name("a"), ticket(1));
    assert_eq!(wake_ups.next().await, Some(WakeUp::Turn { name, ticket }));
}

#[tokio::test(flavor = "multi_thread")]
async fn wake_ups_that_no_task_reads_are_bounded_and_end_in_one_poll() {
    let t = Testbed::start().await;
    let mut wake_ups = t.driver.wake_ups();
    let channel = t.channel().await;
    let mut raw = t.raw().await;
    let mut said = 0;
    while !format!("{:?}", t.driver).contains("some missed") {
        said += 1;
        let turn = format!("T{said} dlock:{{a}}");
        let _: u64 = raw.publish(&channel, turn).await.unwrap();
    }
    // Neither an unknown message nor an impossible lock name ends the connection.
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
    let (mut read, mut resyncs) = (0, 0);
    while let Ok(Some(wake_up)) =
        tokio::time::timeout(Duration::from_millis(100), wake_ups.next()).await
    {
        read += 1;
        resyncs += u32::from(wake_up == WakeUp::Resync);
    }
    assert!(read <= said && resyncs == 1, "{read} of {said}, {resyncs}");
    assert_eq!(t.listeners().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_over_one_driver_are_told_so() {
    let t = Testbed::start().await;
    let wake_ups = t.driver.wake_ups();
    t.granted(&t.in_line("a", SECOND * 30, 1)).await;
    // Both clients draw tickets from 1 on, so the first would receive the turns of the second.
    assert!(t.driver.wake_ups().next().await.is_none(), "taken once");
    let waiter = t.in_line("a", SECOND * 30, 1);
    let error = t.driver.acquire(&waiter).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Misuse, RetryClass::Never, Effect::None)
    );
    assert!(error.to_string().contains("one client"), "{error}");
    assert_eq!(t.inspect("a").await.waiters, Some(0));
    drop(wake_ups);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_that_has_left_is_not_remembered_again() {
    let mut t = Testbed::start().await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    let url = t.server.url_at(proxy.addr());
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let kept = || format!("{:?}", t.driver);
    // Granted, but answered only after the next ticket was given up.
    let mut req = t.in_line("a", SECOND * 30, 1);
    req.next_ticket = Some(ticket(2));
    let armed = proxy.on_next(Trigger::on("EVALSHA"), Fault::HoldRequest);
    let (driver, asked) = (t.driver.clone(), req.clone());
    let asking = tokio::spawn(async move { driver.acquire(&asked).await });
    armed.struck().await;
    assert!(kept().contains("Listener(2 tickets,"), "{}", kept());
    let (driver, name) = (t.driver.clone(), req.name.clone());
    let leaving = tokio::spawn(async move { driver.leave(&name, ticket(2)).await });
    t.until(async || kept().contains("Listener(1 tickets,"))
        .await;
    armed.release();
    assert!(matches!(
        asking.await.unwrap().unwrap(),
        Acquired::Granted(_)
    ));
    leaving.await.unwrap().unwrap();
    assert!(kept().contains("Listener(0 tickets,"), "{}", kept());
    // After a refusal the next ticket is not in the queue.
    let mut refused = t.in_line("a", SECOND * 30, 3);
    refused.next_ticket = Some(ticket(4));
    t.held(&refused).await;
    assert!(kept().contains("Listener(1 tickets,"), "{}", kept());
    t.driver.leave(&refused.name, ticket(3)).await.unwrap();
    assert!(kept().contains("Listener(0 tickets,"), "{}", kept());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_doubted_for_nothing_is_kept() {
    let t = Testbed::start().await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    assert_eq!(t.held(&waiter).await.ahead, Some(0));
    let listens = t.listening();
    // Another holder gets in before the first waiter, which was not told: a lost turn or a flush looks
    // like this.
    for key in ["dlock:{a}", "dlock:{a}:line", "dlock:{a}:ends"] {
        t.server.command(&["DEL", key]).unwrap();
    }
    t.granted(&t.acquire("a", SECOND * 30)).await;
    t.server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    let said = || {
        let stats = t.server.command(&["INFO", "commandstats"]).unwrap();
        stats.text().unwrap().contains("cmdstat_publish:calls=1,")
    };
    assert_eq!(t.held(&waiter).await.ahead, Some(0));
    t.until(async || said()).await;
    // Longer than the driver waits for its echo.
    t.sleep(700).await;
    assert_eq!(t.listening(), listens);
    assert!(said(), "once");
}
