//! Tests over connections of the application, and of the names by which an operator finds dlock's own.

use crate::bed::{SECOND, connection};
use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
use dlock_core::{Client, ErrorKind, Lease, driver::DistributedLock};
use dlock_redis::{RedisConfig, RedisDriver};
use redis::{
    ProtocolVersion, RedisConnectionInfo,
    aio::{ConnectionManager, MultiplexedConnection},
};
use std::{collections::BTreeMap, sync::Arc};

struct Server(RedisServer);

impl Server {
    fn start() -> Self {
        Self(RedisServer::start(RedisOptions::default()).unwrap())
    }

    async fn probe(&self) -> MultiplexedConnection {
        connection(&self.client(ProtocolVersion::RESP2)).await
    }

    fn client(&self, protocol: ProtocolVersion) -> redis::Client {
        let info: redis::ConnectionInfo = self.0.url().parse().unwrap();
        let settings = RedisConnectionInfo::default().set_protocol(protocol);
        redis::Client::open(info.set_redis_settings(settings)).unwrap()
    }
}

/// How many connections have each name.
async fn names(probe: &mut MultiplexedConnection) -> BTreeMap<String, usize> {
    let list = redis::cmd("CLIENT").arg("LIST").query_async(probe).await;
    let list: String = list.unwrap();
    let mut names = BTreeMap::new();
    for line in list.lines() {
        if let Some((_, rest)) = line.split_once(" name=") {
            let name = rest.split(' ').next().unwrap_or_default();
            *names.entry(name.to_owned()).or_default() += 1;
        }
    }
    names
}

/// Waiting, waking, renewing and releasing, between that driver and one with connections of its own.
async fn locks_through(server: &Server, driver: RedisDriver) {
    let ours = Client::new(driver).unwrap();
    let theirs = Client::new(RedisDriver::connect(&server.0.url()).await.unwrap()).unwrap();
    let lease = Lease::renewed(SECOND * 3);
    let lock = ours.lock("orders").unwrap().lease(lease);
    ours.ping().await.unwrap();
    let guard = lock.acquire().await.unwrap();
    let waiting = tokio::spawn(theirs.lock("orders").unwrap().acquire());
    assert_eq!(
        tokio::time::timeout(SECOND * 6, guard.lost()).await.ok(),
        None,
        "renewed"
    );
    guard.release().await.unwrap();
    let other = waiting.await.unwrap().unwrap();
    let waiting = tokio::spawn(lock.acquire());
    while other.check().is_ok()
        && theirs.admin().inspect("orders").await.unwrap().waiters != Some(1)
    {
        tokio::task::yield_now().await;
    }
    other.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_taken_over_a_multiplexed_connection_of_either_protocol() {
    let server = Server::start();
    for protocol in [ProtocolVersion::RESP2, ProtocolVersion::RESP3] {
        let client = server.client(protocol);
        let theirs = connection(&client).await;
        let driver = RedisDriver::from_connection(theirs, RedisConfig::from(&client)).await;
        locks_through(&server, driver.unwrap()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_taken_over_a_connection_manager() {
    let server = Server::start();
    let client = server.client(ProtocolVersion::RESP2);
    let manager = ConnectionManager::new(client.clone()).await.unwrap();
    let driver = RedisDriver::from_connection(manager, RedisConfig::from(&client)).await;
    locks_through(&server, driver.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connections_of_dlock_have_names_and_no_other_is_opened() {
    let server = Server::start();
    let mut probe = server.probe().await;
    let own = RedisDriver::connect(&server.0.url()).await.unwrap();
    let mut expected = BTreeMap::from([
        (String::new(), 1),
        ("dlock".to_owned(), 1),
        ("dlock-wake-ups".to_owned(), 1),
    ]);
    assert_eq!(names(&mut probe).await, expected);

    let client = server.client(ProtocolVersion::RESP3);
    let theirs = connection(&client).await;
    let driver = RedisDriver::from_connection(theirs, RedisConfig::from(&client)).await;
    let shared = driver.unwrap();
    expected.insert(String::new(), 2);
    expected.insert("dlock-wake-ups".to_owned(), 2);
    assert_eq!(names(&mut probe).await, expected);
    own.close().await;
    shared.close().await;
}

/// Clients that connect by the config's URL would not see its locks.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_another_database_than_the_config_names_is_refused() {
    let server = Server::start();
    for protocol in [ProtocolVersion::RESP2, ProtocolVersion::RESP3] {
        let info: redis::ConnectionInfo = server.0.url().parse().unwrap();
        let settings = RedisConnectionInfo::default().set_protocol(protocol);
        let third = info.set_redis_settings(settings.set_db(3));
        let third = redis::Client::open(third).unwrap();
        let config = RedisConfig::from(&server.client(protocol));
        let error = RedisDriver::from_connection(connection(&third).await, config).await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.to_string().contains("database 3"), "{error}");
        let config = RedisConfig::from(&third);
        let driver = RedisDriver::from_connection(connection(&third).await, config).await;
        Client::new(driver.unwrap()).unwrap().ping().await.unwrap();
    }
}

/// It does not come back, and the application learns why.
#[tokio::test(flavor = "multi_thread")]
async fn a_multiplexed_connection_that_ended_is_an_error_that_says_so() {
    let server = Server::start();
    let client = server.client(ProtocolVersion::RESP3);
    let theirs = connection(&client).await;
    let driver = RedisDriver::from_connection(theirs, RedisConfig::from(&client)).await;
    let driver: Arc<dyn DistributedLock> = Arc::new(driver.unwrap());
    let locks = Client::builder(driver).build().unwrap();
    locks.ping().await.unwrap();
    let mut kill = redis::cmd("CLIENT");
    kill.arg("KILL").arg("TYPE").arg("normal");
    let _: u64 = kill.query_async(&mut server.probe().await).await.unwrap();
    let lock = locks.lock("orders").unwrap().lease(Lease::renewed(SECOND));
    while lock.try_acquire().await.is_ok() {}
    let error = lock.acquire_timeout(SECOND * 2).await.unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::Timeout { .. } | ErrorKind::Unavailable
        ),
        "{error}"
    );
    assert!(error.to_string().contains("application"), "{error}");
}
