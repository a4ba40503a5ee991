//! Waiters: what wakes them, and what does not.

use super::{
    SECOND,
    bed::{Testbed, connected, run},
};
use dlock_conformance::testbed::{PostgresServer, postgres::PostgresOptions};
use dlock_core::{
    Client, Error, Guard, Lease,
    driver::{DistributedLock, Wake},
};
use dlock_postgres::sqlx::{self, AssertSqlSafe, PgConnection};
use tokio::task::JoinHandle;

const LISTENS: &str = "query LIKE 'LISTEN %'";

/// A holder, and a task of another client that waits and listens.
async fn waited_for(t: &Testbed) -> (Client, Guard, JoinHandle<Result<Guard, Error>>) {
    let lease = Lease::renewed(SECOND * 60);
    let client = Client::new(connected(&t.server.url()).await).unwrap();
    let held = client.lock("a").unwrap().lease(lease);
    let held = held.acquire().await.unwrap();
    let other = Client::new(connected(&t.server.url()).await).unwrap();
    let lock = other.lock("a").unwrap().lease(lease);
    let waiter = tokio::spawn(async move { lock.acquire_timeout(SECOND * 60).await });
    t.until("the waiter listens", async |t: &Testbed| {
        t.sessions(LISTENS).await == 1
    })
    .await;
    (other, held, waiter)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_gets_in_though_its_listening_session_is_ended() {
    let t = Testbed::start(&[]).await;
    assert_eq!(t.driver.capabilities().wake, Wake::Notify);
    let (_other, held, waiter) = waited_for(&t).await;
    t.admin(&format!(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'dlock' AND {LISTENS}"
    ))
    .await;
    assert!(!waiter.is_finished());
    let token = held.token();
    held.release().await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_role_notifies_takes_nothing() {
    let t = Testbed::start(&[]).await;
    t.admin("CREATE ROLE stranger LOGIN").await;
    let (_other, held, waiter) = waited_for(&t).await;
    let listening = format!("SELECT query FROM pg_stat_activity WHERE {LISTENS}");
    let listening: String = sqlx::query_scalar(AssertSqlSafe(listening))
        .fetch_one(&mut t.native().await)
        .await
        .unwrap();
    let channel = listening.trim_start_matches("LISTEN ").to_owned();
    let url = t.server.url().replace("postgres@", "stranger@");
    let mut stranger = <PgConnection as sqlx::Connection>::connect(&url)
        .await
        .unwrap();
    for payload in ["", "0", "ffffffffffffffff", "no number", "-1"] {
        run(&mut stranger, &format!("NOTIFY {channel}, '{payload}'")).await;
    }
    held.check().unwrap();
    assert!(!waiter.is_finished());
    assert_eq!(t.inspect("a").await.holders[0].token, Some(held.token()));
    held.release().await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pool_waiters_poll() {
    let start = || PostgresServer::behind_pgbouncer(PostgresOptions::default());
    let server = tokio::task::spawn_blocking(start).await.unwrap().unwrap();
    let mut clients = Vec::new();
    for _ in 0..2 {
        let driver = connected(&server.url()).await;
        assert_eq!(driver.capabilities().wake, Wake::Poll);
        clients.push(Client::new(driver).unwrap());
    }
    let held = clients[0].lock("a").unwrap().acquire().await.unwrap();
    let lock = clients[1].lock("a").unwrap();
    let (next, released) = tokio::join!(lock.acquire_timeout(SECOND * 60), held.release());
    released.unwrap();
    next.unwrap().release().await.unwrap();
}
