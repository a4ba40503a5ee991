//! Sessions that an administrator ends, and a server that is killed or shut down.

use super::{
    SECOND,
    bed::{Testbed, run},
};
use dlock_conformance::under_test::{ended_sessions_are_replaced, unknown};
use dlock_core::{
    Effect,
    driver::{Acquired, DistributedLock},
};

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_session_is_replaced_whatever_it_was_for() {
    let t = Testbed::start(&[]).await;
    ended_sessions_are_replaced(&t, async || t.end_all().await).await;
}

/// A cancelled statement is one that ran out of time.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_cancelled_while_it_waits_is_sent_again() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    let mut blocker = t.blocker("a").await;
    let ask = t.ask("a", SECOND * 60);
    let cancelled = async {
        t.until("the statement waits", async |t: &Testbed| {
            t.waiting().await == 1
        })
        .await;
        t.end_waiting("pg_cancel_backend").await;
        t.until("it is sent again", async |t: &Testbed| {
            t.driver.repeats() > 0
        })
        .await;
        run(&mut blocker, "ROLLBACK").await;
    };
    let (acquired, ()) = tokio::join!(t.driver.acquire(&ask), cancelled);
    assert!(
        matches!(&acquired, Ok(Acquired::Granted(grant)) if grant.holds.get() == 1),
        "{acquired:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ended_in_the_middle_of_any_step_has_changed_nothing() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("free").await).await;
    let held = t.taken("held").await;
    for step in ["acquire", "renew", "release", "break"] {
        let mut blocker = match step {
            "acquire" => t.blocker("free").await,
            _ => t.blocker("held").await,
        };
        let request = async {
            match step {
                "acquire" => t
                    .driver
                    .acquire(&t.ask("free", SECOND * 600))
                    .await
                    .map(drop),
                "renew" => loop {
                    let renewed = t.renew(std::slice::from_ref(&held), SECOND * 600).await;
                    match renewed.and_then(|mut one| one.remove(0)).map(drop) {
                        // It waits for a locked row for 50 ms only, and was not ended within them.
                        Err(error) if error.effect() == Effect::None => {}
                        ended => break ended,
                    }
                },
                "release" => t.give_back(&held).await.map(drop),
                _ => t.driver.break_lock(&held.name, None).await.map(drop),
            }
        };
        let end = async {
            loop {
                t.until("it waits", async |t: &Testbed| t.waiting().await > 0)
                    .await;
                t.end_waiting("pg_terminate_backend").await;
            }
        };
        tokio::select! {
            done = request => unknown(done),
            () = end => {}
        }
        run(&mut blocker, "ROLLBACK").await;
        assert!(t.inspect("free").await.holders.is_empty(), "{step}");
        let shown = t.inspect("held").await;
        assert_eq!(shown.holders[0].owner, held.owner.fingerprint(), "{step}");
        assert!(
            shown.holders[0].rest <= Some(SECOND * 60),
            "{step}: {shown:?}"
        );
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
