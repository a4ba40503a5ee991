//! Test bed: a server, an ensemble, and their clients.

use dlock_conformance::testbed::{ZooKeeperEnsemble, ZooKeeperServer, zookeeper::ZooKeeperOptions};
use dlock_core::{Client, Guard, LossReason};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Runtime,
    task::JoinHandle,
    time::{sleep, timeout},
};

pub(crate) const SESSION: Duration = Duration::from_secs(3);

pub(crate) fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

pub(crate) async fn client(url: &str) -> Client {
    client_for(url, SESSION).await
}

/// A client whose sessions last that long.
pub(crate) async fn client_for(url: &str, session: Duration) -> Client {
    let url = format!("{url}/dlock?dlock.session={}s", session.as_secs());
    let driver = ZkDriver::connect(&url).await.expect("it connects");
    Client::builder(Arc::new(driver)).build().expect("a client")
}

pub(crate) async fn server(options: ZooKeeperOptions) -> ZooKeeperServer {
    let start = move || ZooKeeperServer::start(options).expect("a server");
    tokio::task::spawn_blocking(start).await.expect("it starts")
}

pub(crate) async fn ensemble() -> Arc<ZooKeeperEnsemble> {
    let start = || ZooKeeperEnsemble::start(&ZooKeeperOptions::default()).expect("an ensemble");
    Arc::new(tokio::task::spawn_blocking(start).await.expect("it starts"))
}

pub(crate) async fn take(client: &Client, name: &str) -> Guard {
    let lock = client.lock(name).expect("a name");
    let taken = timeout(Duration::from_secs(20), lock.acquire()).await;
    taken.expect("in time").expect("granted")
}

/// The nodes in the folder of a lock, as any client sees them.
pub(crate) async fn seats(hosts: &str, name: &str) -> Vec<String> {
    let client = native::Client::connect(hosts).await.expect("it connects");
    client
        .list_children(&format!("/dlock/{name}"))
        .await
        .unwrap_or_default()
}

/// Waits until the lock has that many seats, including the holder's.
pub(crate) async fn until_in_line(hosts: &str, name: &str, count: usize) {
    let what = format!("{count} seats of {name}");
    until(&what, SESSION * 10, || async {
        seats(hosts, name).await.len() == count
    })
    .await;
}

/// A waiter for the lock. Returns when it was granted.
pub(crate) fn waiting(client: Client, name: &'static str) -> JoinHandle<(Guard, Instant)> {
    tokio::spawn(async move { (take(&client, name).await, Instant::now()) })
}

/// A waiter for the lock of that guard. When it is granted, the guard must be lost.
pub(crate) fn waiting_behind(
    guard: &Arc<Guard>,
    client: Client,
    name: &'static str,
) -> JoinHandle<Guard> {
    let before = Arc::clone(guard);
    tokio::spawn(async move {
        let lock = client.lock(name).expect("a name");
        // Its own session may end, too, where the servers stall.
        let next = loop {
            if let Ok(next) = lock.acquire().await {
                break next;
            }
        };
        let knew = before.check().is_err();
        assert!(knew, "granted before the holder knew of its loss");
        next
    })
}

/// Waits until the guard is lost, and until the waiter behind it is granted.
pub(crate) async fn lost_before_another_holds(
    guard: &Guard,
    waiting: JoinHandle<Guard>,
) -> (LossReason, Guard) {
    let reason = timeout(SESSION * 2, guard.lost()).await;
    let reason = reason.expect("lost in time");
    let next = timeout(SESSION * 5, waiting).await;
    (reason, next.expect("the session ends").expect("a guard"))
}

/// Waits until the condition holds, within the bound.
pub(crate) async fn until<F: Future<Output = bool>>(
    what: &str,
    bound: Duration,
    mut condition: impl FnMut() -> F,
) {
    let end = Instant::now() + bound;
    while !condition().await {
        assert!(Instant::now() < end, "not within {bound:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}
