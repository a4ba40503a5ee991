//! Waiters: what wakes them, and what does not.

use super::{
    SECOND,
    bed::{Testbed, connected, run},
};
use dlock_conformance::testbed::{PostgresServer, postgres::PostgresOptions};
use dlock_core::{
    Client, Error, Guard, Lease,
    driver::{DistributedLock, Wake, kit::hash_of},
};
use dlock_postgres::sqlx::{self, AssertSqlSafe, PgConnection, postgres::PgListener};
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

/// The channel on which the waiter listens, as the statement names it.
async fn channel(t: &Testbed) -> String {
    let listening = format!("SELECT query FROM pg_stat_activity WHERE {LISTENS}");
    let listening: String = sqlx::query_scalar(AssertSqlSafe(listening))
        .fetch_one(&mut t.native().await)
        .await
        .unwrap();
    listening.trim_start_matches("LISTEN ").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_notifies_only_where_a_client_waits_and_shows_no_name() {
    let t = Testbed::start(&[]).await;
    let (other, held, waiter) = waited_for(&t).await;
    let named = channel(&t).await;
    let named = named.trim_matches('"');
    let (table, _) = named.rsplit_once('_').unwrap();
    let channels: Vec<String> = (0..64).map(|at| format!("{table}_{at:02x}")).collect();
    let mut all = PgListener::connect(&t.server.url()).await.unwrap();
    all.listen_all(channels.iter().map(String::as_str))
        .await
        .unwrap();
    for name in ["b", "c", "d"] {
        let guard = other.lock(name).unwrap().acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    held.release().await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    // Notices come in the order of their commits: there was none of the three.
    let first = all.recv().await.unwrap();
    assert_eq!(first.channel(), named);
    assert_eq!(first.payload(), format!("{:016x}", hash_of("a")));
    next.release().await.unwrap();
    t.until("no session listens", async |t: &Testbed| {
        t.sessions(LISTENS).await == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_role_notifies_takes_nothing() {
    let t = Testbed::start(&[]).await;
    t.admin("CREATE ROLE stranger LOGIN").await;
    let (_other, held, waiter) = waited_for(&t).await;
    let channel = channel(&t).await;
    let url = t.server.url().replace("postgres@", "stranger@");
    let mut stranger = <PgConnection as sqlx::Connection>::connect(&url)
        .await
        .unwrap();
    let right = format!("{:016x}", hash_of("a"));
    for payload in ["", "0", "ffffffffffffffff", "no number", "-1", &right] {
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
