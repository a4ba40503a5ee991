//! The streams of keep-alives and of watches: what one lease or one waiter costs the others.

use crate::bed::{
    LONG, SECOND, alone, ask, comes, driver, granted, is_refused, lease_of, leases, native,
    proxied, renewed, server, until, waiting,
};
use dlock_conformance::testbed::proxy::{Direction, Flow, Reach};
use dlock_core::driver::{DistributedLock, Renewed};
use futures_util::future::{join, join_all};
use std::{
    thread,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// The server ends no more than a thousand leases a second, and answers the keep-alive of one that is over only when it has ended it.
#[tokio::test]
async fn a_renewal_does_not_wait_for_the_lease_of_a_waiter_that_is_over() {
    let server = server(&[]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [driver(&server.url()).await, driver(&server.url()).await];
    granted(&two.acquire(&ask("x", 1, LONG, LONG)).await.unwrap());
    let holds = ask("y", 2, LONG, LONG);
    granted(&one.acquire(&holds).await.unwrap());
    renewed(&one, &holds, LONG).await.unwrap();
    let crowd = (0..8_000).map(|_| {
        let mut native = native.clone();
        async move { native.lease_grant(6, None).await.unwrap() }
    });
    join_all(crowd).await;
    assert!(is_refused(&one.acquire(&waiting("x", 3)).await.unwrap()));
    until("the crowd's leases end", async || {
        leases(&mut native).await.len() < 7_500
    })
    .await;
    // The process stands still until the waiter's lease is over, too.
    thread::sleep(SECOND * 2);
    // What was due meanwhile is done.
    for _ in 0..2 {
        one.inspect(&holds.name).await.unwrap();
    }
    let renewal = comes("the renewal", renewed(&one, &holds, LONG)).await;
    assert!(matches!(renewal, Ok(Renewed::Until { .. })), "{renewal:?}");
    let left = leases(&mut native).await.len();
    assert!(left > 1_000, "{left} leases were left");
}

/// It would delay the others, and prolong a lease that is not wanted any more.
#[tokio::test]
async fn a_keep_alive_that_was_given_up_while_it_waited_is_not_sent() {
    // The stream that another one opens serves later; or it was silent for so long that the connection is changed.
    for (give_up, serves) in [(SECOND / 50, true), (SECOND * 3, false)] {
        let (server, proxy) = proxied(&[]).await;
        let mut native = native(server.addr()).await;
        let driver = driver(&server.url_at(proxy.addr())).await;
        let holds = [ask("x", 1, LONG, LONG), ask("y", 2, LONG, LONG)];
        let mut sent = Vec::new();
        for hold in &holds {
            granted(&driver.acquire(hold).await.unwrap());
            let lease = lease_of(&mut native, &format!("/dlock/{}/h/", hold.name)).await;
            sent.push(proxy.watch(Direction::ClientToServer, alone(lease)));
        }
        proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Stall);
        let opens = renewed(&driver, &holds[0], LONG);
        let waits = async {
            comes("the first keep-alive", sent[0].reaches(1)).await;
            let asked = Instant::now();
            let error = renewed(&driver, &holds[1], give_up).await.unwrap_err();
            let took = asked.elapsed();
            assert!(error.to_string().contains("given up"), "{error}");
            proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Pass);
            took
        };
        let (opened, took) = comes("both", join(opens, waits)).await;
        // After a silence of 200 ms the connection is changed, which may be due to a stall of this process.
        if !serves || took < SECOND / 5 {
            assert_eq!(opened.is_ok(), serves, "{opened:?}");
        }
        let again = comes("the next", renewed(&driver, &holds[0], LONG)).await;
        assert!(matches!(again, Ok(Renewed::Until { .. })), "{again:?}");
        assert_eq!(sent[1].seen(), 0, "it was sent");
    }
}

#[tokio::test]
async fn a_last_waiter_that_leaves_while_the_watches_are_set_again_costs_no_connection() {
    let (server, proxy) = proxied(&[]).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    granted(&two.acquire(&ask("x", 1, LONG, LONG)).await.unwrap());
    let waits = waiting("x", 2);
    assert!(is_refused(&one.acquire(&waits).await.unwrap()));
    let before = proxy.counters().accepted;
    proxy.blackhole(Reach::New, true);
    proxy.cut();
    let connects = proxy.until(|counters| counters.accepted > before);
    comes("the next connection", connects).await;
    // The watches wait for it, too, at the latest after a pause of theirs.
    sleep(SECOND / 4).await;
    let ticket = waits.ticket.unwrap();
    let mut leaves = Box::pin(one.leave(&waits.name, ticket));
    let left = timeout(Duration::ZERO, &mut leaves).await;
    left.expect_err("the server cannot be reached");
    proxy.heal();
    comes("its end", leaves).await.unwrap();
    for _ in 0..10 {
        comes("an answer", one.inspect(&waits.name)).await.unwrap();
    }
    let connections = proxy.counters().accepted - before;
    assert_eq!(connections, 1, "{connections} connections");
}
