//! Conformance suite: runs all cases over a real Redis server.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, main as suite,
    testbed::{
        Home, RedisServer,
        proxy::{Fault, Trigger},
        redis::{self, Aof, RedisOptions},
        redis_cluster::{RedisCluster, RedisClusterServer},
        redis_set::{NAME, SentinelServer},
        server::ServerError,
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_redis::{
    RedisConfig, RedisDriver,
    redis::{Client, aio::ConnectionManager},
};
use std::{
    collections::HashMap,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

fn main() -> ExitCode {
    let mut fixtures = Remote::everywhere(Redis);
    fixtures.push(Box::new(Remote::processes(Sentinel)));
    fixtures.push(Box::new(Remote::processes(Manager)));
    fixtures.push(Box::new(Remote::processes(Cluster)));
    let code = suite(fixtures, Mutants::Listed);
    SENTINELS.lock().expect("no start panicked").clear();
    code
}

#[derive(Clone, Copy)]
struct Redis;

#[async_trait]
impl Backend for Redis {
    type Kind = redis::Redis;

    fn name(&self) -> &'static str {
        "redis"
    }

    fn start(&self, home: Home) -> Result<RedisServer, ServerError> {
        let options = options();
        match home {
            Home::Container => RedisServer::in_container(options),
            Home::Process => RedisServer::from_env_or(|| RedisServer::start(options)),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(RedisDriver::connect(url).await?))
    }

    fn is_proxied(&self) -> bool {
        true
    }

    /// Every call is one script, and a case aims at the next call that it makes.
    fn request(&self, _: Call, _: Fault) -> Trigger {
        Trigger::on("EVALSHA")
    }

    async fn delete(&self, server: &RedisServer, name: &LockName) -> Result<(), Failure> {
        // Names in cases are letters, digits and dots, which the encoding leaves unchanged.
        server.command(&["DEL", &format!("dlock:{{{name}}}")])?;
        Ok(())
    }

    async fn flush(&self, server: &RedisServer) -> Result<(), Failure> {
        server.command(&["FLUSHALL"])?;
        Ok(())
    }
}

/// A fast fsync, and this one is in memory, means that the file is written before each answer: what was
/// answered survives a kill of the process.
fn options() -> RedisOptions {
    RedisOptions {
        aof: Aof::EverySec,
        ..RedisOptions::default()
    }
}

/// The same server, which a sentinel names. Failovers have tests of their own.
#[derive(Clone, Copy)]
struct Sentinel;

/// One for each address by which clients reach a server. They end with the suite.
static SENTINELS: LazyLock<Mutex<HashMap<String, SentinelServer>>> = LazyLock::new(Mutex::default);
/// Longer than any case stops its server.
const DOWN_AFTER: Duration = Duration::from_secs(600);

#[async_trait]
impl Backend for Sentinel {
    type Kind = redis::Redis;

    fn name(&self) -> &'static str {
        "redis-sentinel"
    }

    fn start(&self, _: Home) -> Result<RedisServer, ServerError> {
        RedisServer::start(options())
    }

    fn url(&self, server: String, _: Home) -> String {
        let mut sentinels = SENTINELS.lock().expect("no start panicked");
        let sentinel = sentinels.entry(server).or_insert_with_key(|server| {
            let addr = server.trim_start_matches("redis://").trim_end_matches('/');
            let addr = addr.parse().expect("a started server has no log-in");
            SentinelServer::start(addr, DOWN_AFTER, 1).expect("a sentinel starts")
        });
        format!("redis+sentinel://{}/{NAME}", sentinel.addr())
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Redis.connect(url).await
    }

    fn is_proxied(&self) -> bool {
        true
    }

    fn is_short(&self) -> bool {
        true
    }

    fn request(&self, of: Call, fault: Fault) -> Trigger {
        Redis.request(of, fault)
    }

    async fn delete(&self, server: &RedisServer, name: &LockName) -> Result<(), Failure> {
        Redis.delete(server, name).await
    }

    async fn flush(&self, server: &RedisServer) -> Result<(), Failure> {
        Redis.flush(server).await
    }
}

/// The same server, with the requests over the connection manager of an application.
#[derive(Clone, Copy)]
struct Manager;

#[async_trait]
impl Backend for Manager {
    type Kind = redis::Redis;

    fn name(&self) -> &'static str {
        "redis-manager"
    }

    fn start(&self, _: Home) -> Result<RedisServer, ServerError> {
        RedisServer::start(options())
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        let client = Client::open(url).map_err(Failure::new)?;
        let config = RedisConfig::from(&client);
        let manager = ConnectionManager::new(client).await;
        let manager = manager.map_err(Failure::new)?;
        Ok(Arc::new(
            RedisDriver::from_connection(manager, config).await?,
        ))
    }

    fn is_proxied(&self) -> bool {
        true
    }

    fn is_short(&self) -> bool {
        true
    }

    fn request(&self, of: Call, fault: Fault) -> Trigger {
        Redis.request(of, fault)
    }

    async fn delete(&self, server: &RedisServer, name: &LockName) -> Result<(), Failure> {
        Redis.delete(server, name).await
    }

    async fn flush(&self, server: &RedisServer) -> Result<(), Failure> {
        Redis.flush(server).await
    }
}

/// Three masters, each with a replica. Failovers and moving slots have tests of their own.
#[derive(Clone, Copy)]
struct Cluster;

#[async_trait]
impl Backend for Cluster {
    type Kind = Arc<RedisCluster>;

    fn name(&self) -> &'static str {
        "redis-cluster"
    }

    fn start(&self, _: Home) -> Result<RedisClusterServer, ServerError> {
        RedisClusterServer::start()
    }

    fn addrs(&self, server: &RedisClusterServer) -> Vec<SocketAddr> {
        server
            .kind()
            .nodes()
            .iter()
            .map(RedisServer::addr)
            .collect()
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Redis.connect(url).await
    }

    fn is_proxied(&self) -> bool {
        true
    }

    fn request(&self, of: Call, fault: Fault) -> Trigger {
        Redis.request(of, fault)
    }

    async fn delete(&self, server: &RedisClusterServer, name: &LockName) -> Result<(), Failure> {
        server.command(&["DEL", &format!("dlock:{{{name}}}")])?;
        Ok(())
    }

    async fn flush(&self, server: &RedisClusterServer) -> Result<(), Failure> {
        server.command(&["FLUSHALL"])?;
        Ok(())
    }
}
