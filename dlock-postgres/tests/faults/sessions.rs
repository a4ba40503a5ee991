//! Sessions that an administrator ends, and a server that is killed or shut down.

use super::{
    SECOND,
    bed::{Testbed, run},
};
use dlock_conformance::under_test::ended_sessions_are_replaced;
use dlock_core::{
    Effect, ErrorKind,
    driver::{Acquired, DistributedLock},
};
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_session_is_replaced_whatever_it_was_for() {
    let t = Testbed::start(&[]).await;
    ended_sessions_are_replaced(&t, async || t.end_all().await).await;
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
    let t = Testbed::start(&[]).await;
    let crowd = t.crowd(16, 30).await;
    for round in ["sessions", "kill", "sessions", "shutdown", "sessions"] {
        crowd.goes_on(200).await;
        match round {
            "sessions" => t.end_all().await,
            "kill" => {
                tokio::task::block_in_place(|| t.server.managed().unwrap().restart()).unwrap()
            }
            _ => tokio::task::block_in_place(|| {
                t.server.shut_down().unwrap();
                t.server.managed().unwrap().restart()
            })
            .unwrap(),
        }
    }
    crowd.ends().await;
}
