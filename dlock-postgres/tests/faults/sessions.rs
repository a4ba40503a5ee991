//! Sessions that an administrator ends, and a server that is killed or shut down.

use super::{
    SECOND,
    bed::{Room, Testbed, connected, lasts, named, run},
};
use dlock_core::{
    Broken, Client, Effect, ErrorKind, Lease, RetryClass,
    driver::{Acquired, DistributedLock, DriverError},
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_session_is_replaced_whatever_it_was_for() {
    let t = Testbed::start(&[]).await;
    let first = t.taken("a").await;
    let second = t.again(&first, SECOND * 60);
    let steps = [
        "join",
        "inspect",
        "renew",
        "release one",
        "release",
        "insert",
        "list",
        "break",
    ];
    for step in steps {
        t.end_all().await;
        // The one attempt that meets the closed connection reports it; repeating it is harmless, and the core does so.
        let mut tries = 0;
        loop {
            let done: Result<(), DriverError> = match step {
                "join" => t.driver.acquire(&second).await.map(|acquired| {
                    assert!(matches!(acquired, Acquired::Granted(grant) if grant.holds.get() == 2));
                }),
                "inspect" => t
                    .driver
                    .inspect(&named("a"))
                    .await
                    .map(|shown| assert_eq!(shown.holds, 2)),
                "renew" => {
                    let renewed = t.renew(std::slice::from_ref(&first), SECOND * 90).await;
                    renewed
                        .and_then(|mut one| one.remove(0))
                        .map(|renewed| assert!(lasts(&Ok(renewed), SECOND * 90), "{renewed:?}"))
                }
                "release one" => t.give_back(&second).await.map(drop),
                "release" => t.give_back(&first).await.map(drop),
                "insert" => t.driver.acquire(&t.ask("b", SECOND * 60)).await.map(drop),
                "list" => t
                    .driver
                    .list("", None, 10)
                    .await
                    .map(|page| assert_eq!(page.found.len(), 1)),
                "break" => t.driver.break_lock(&named("b"), None).await.map(|broken| {
                    assert!(matches!(broken, Broken::Freed { token: Some(_) }));
                }),
                _ => unreachable!("all steps are there"),
            };
            match done {
                Ok(()) => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{step}: {error}");
                    assert_ne!(error.retry(), RetryClass::Never, "{step}: {error}");
                }
            }
            tries += 1;
            assert!(tries < 3, "{step}: one failed attempt closes what is dead");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_ended_while_it_waits_has_done_nothing() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    for how in ["pg_cancel_backend", "pg_terminate_backend"] {
        let mut blocker = t.blocker("a").await;
        let ask = t.ask("a", SECOND * 60);
        let before = t.driver.repeats();
        let asked = tokio::spawn({
            let (driver, ask) = (Arc::clone(&t.driver), ask.clone());
            async move { driver.acquire(&ask).await }
        });
        t.until("the statement waits", async |t: &Testbed| {
            t.waiting().await == 1
        })
        .await;
        t.end_waiting(how).await;
        if how == "pg_cancel_backend" {
            // A cancelled statement is one that ran out of time: it is sent again.
            t.until("it is sent again", async |t: &Testbed| {
                t.driver.repeats() > before
            })
            .await;
            run(&mut blocker, "ROLLBACK").await;
            let acquired = asked.await.unwrap().unwrap();
            assert!(matches!(acquired, Acquired::Granted(grant) if grant.holds.get() == 1));
            t.release(&ask).await;
        } else {
            let error = asked.await.unwrap().unwrap_err();
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::Unknown),
                "{error}"
            );
            run(&mut blocker, "ROLLBACK").await;
        }
        assert!(t.inspect("a").await.holders.is_empty(), "{how}");
        t.release(&t.taken("a").await).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_never_shares_a_name_though_server_and_sessions_are_ended() {
    const NAMES: usize = 16;
    let t = Testbed::start(&[]).await;
    let rooms: Vec<_> = (0..NAMES).map(|_| Arc::new(Room::default())).collect();
    let over = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for _ in 0..3 {
        let client = Client::new(connected(&t.server.url()).await).unwrap();
        for task in 0..30 {
            let at = task % NAMES;
            let lock = client.lock(format!("n{at}")).unwrap();
            let lock = lock.lease(Lease::renewed(SECOND * 60));
            workers.push(tokio::spawn(
                Arc::clone(&rooms[at]).besiege(lock, Arc::clone(&over)),
            ));
        }
    }
    let cycles = || rooms.iter().map(|room| room.cycles()).sum::<u64>();
    for round in ["sessions", "kill", "sessions", "shutdown", "sessions"] {
        let enough = cycles() + 200;
        t.until("the locks were taken again", async |_: &Testbed| {
            cycles() >= enough
        })
        .await;
        match round {
            "sessions" => t.end_all().await,
            "kill" => {
                tokio::task::block_in_place(|| t.server.station().unwrap().restart()).unwrap()
            }
            _ => tokio::task::block_in_place(|| {
                t.server.shut_down().unwrap();
                t.server.station().unwrap().restart()
            })
            .unwrap(),
        }
    }
    over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    for at in 0..NAMES {
        t.until("no lock is held any more", async |t: &Testbed| {
            // The first attempt may meet its ended session.
            let shown = t.driver.inspect(&named(&format!("n{at}"))).await;
            shown.is_ok_and(|shown| shown.holders.is_empty())
        })
        .await;
    }
}
