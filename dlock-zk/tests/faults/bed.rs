//! A server, an ensemble, and clients of them.

use dlock_conformance::testbed::{ZooKeeperEnsemble, ZooKeeperServer, zookeeper::ZooKeeperOptions};
use dlock_core::{Client, Guard};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Runtime,
    time::{sleep, timeout},
};

pub(crate) const SESSION: Duration = Duration::from_secs(3);

pub(crate) fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

pub(crate) async fn client(url: &str) -> Client {
    let url = format!("{url}/dlock?dlock.session=3s");
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

/// The nodes below a name, as anybody sees them.
pub(crate) async fn seats(hosts: &str, name: &str) -> Vec<String> {
    let client = native::Client::connect(hosts).await.expect("it connects");
    client
        .list_children(&format!("/dlock/{name}"))
        .await
        .unwrap_or_default()
}

/// Within the bound the condition holds.
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
