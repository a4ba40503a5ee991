//! A server that forgets, stops, restarts or refuses, and ways to it that die.

use crate::bed::{SECOND, Testbed};
use dlock_core::{Acquired, DistributedLock, Effect, ErrorKind, Lane, Released, Renew, Retry};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_were_flushed_are_loaded_again_unseen() {
    let t = Testbed::start().await;
    for _ in 0..3 {
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        let req = t.acquire("a", SECOND);
        t.granted(&req).await;
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced_before_the_next_request() {
    let t = Testbed::start().await;
    for _ in 0..5 {
        t.kill("normal").await;
        let req = t.acquire("a", SECOND);
        // The kill may be noticed only with this request on its way; then nobody knows, and the repeat tells.
        if let Err(error) = t.driver.acquire(&req).await {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::Unknown),
                "{error:?}"
            );
        }
        t.granted(&req).await;
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_restarted_server_until_its_give_up() {
    let t = Testbed::start().await;
    t.process().kill().unwrap();
    let mut hasty = t.acquire("a", SECOND);
    t.ends(&mut hasty, 200);
    // The first may still find the old connection; the second finds none.
    t.driver.acquire(&hasty).await.unwrap_err();
    t.ends(&mut hasty, 200);
    let error = t.driver.acquire(&hasty).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None),
        "{error:?}"
    );
    let mut patient = t.acquire("a", SECOND);
    t.ends(&mut patient, 10_000);
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let (driver, req) = (t.driver.clone(), patient.clone());
            tokio::spawn(async move { driver.acquire(&req).await })
        })
        .collect();
    t.process().restart().unwrap();
    for waiting in waiting {
        assert!(matches!(
            waiting.await.unwrap().unwrap(),
            Acquired::Granted(_)
        ));
    }
    let clients: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    // Beside the one for pushes, which comes back in its own time.
    let commands = clients.lines().filter(|line| line.contains(" sub=0 "));
    assert_eq!(commands.count(), 2, "one reconnect for all:\n{clients}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lay_in_a_stopped_server_is_refused_when_it_goes_on() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a", SECOND * 30);
    let held = t.acquire("b", SECOND * 2);
    t.granted(&held).await;
    t.process().stop().unwrap();
    t.ends(&mut req, 100);
    let entry = [Renew::new(
        held.name.clone(),
        held.owner,
        held.hold,
        Some(SECOND * 30),
    )];
    let acquired = tokio::time::timeout(Duration::from_millis(150), t.driver.acquire(&req));
    let renewed = tokio::time::timeout(
        Duration::from_millis(150),
        t.driver.renew(Lane(0), &entry, req.give_up),
    );
    let (acquired, renewed) = tokio::join!(acquired, renewed);
    assert!(acquired.is_err() && renewed.is_err());
    t.sleep(200).await;
    t.process().cont().unwrap();
    // Answers come in the order of requests, so both are over when this one is.
    t.inspect("a").await;
    assert!(!t.exists("dlock:{a}").await && !t.exists("dlock:{a}:token").await);
    assert!(t.rest("b").await <= SECOND * 2);
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deaf_connection_is_left_and_a_stopped_server_goes_on() {
    let t = Testbed::start().await;
    t.process().stop().unwrap();
    let mut req = t.acquire("a", SECOND * 30);
    t.ends(&mut req, 1_200);
    tokio::time::timeout(Duration::from_millis(1_200), t.driver.acquire(&req))
        .await
        .unwrap_err();
    t.process().cont().unwrap();
    t.granted(&t.acquire("b", SECOND)).await;
    t.granted(&t.acquire("c", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_refuses_without_effect_until_it_is_a_master_again() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let () = redis::cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(1)
        .query_async(&mut raw)
        .await
        .unwrap();
    for _ in 0..3 {
        let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, Retry::Later, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains("replica"), "{error}");
    }
    let () = redis::cmd("REPLICAOF")
        .arg("NO")
        .arg("ONE")
        .query_async(&mut raw)
        .await
        .unwrap();
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_without_effect() {
    let t = Testbed::start().await;
    let () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory")
        .arg(1)
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None),
        "{error:?}"
    );
    assert!(error.to_string().contains("maxmemory"), "{error}");
}
