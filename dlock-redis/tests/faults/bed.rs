//! Testbed: a server, a driver over it, and helpers for requests.

use dlock_conformance::testbed::{RedisServer, ServerProcess, redis::RedisOptions};
use dlock_core::{
    Broken, Clock, FencingToken, HoldId, Lease, LockName, Owner, Snapshot,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Held, Lane, Release, Released,
        Renew, Renewed, Ticket,
    },
};
use dlock_redis::RedisDriver;
use redis::{AsyncCommands, AsyncConnectionConfig, aio::MultiplexedConnection};
use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Reached only by a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);

/// A server of its own, and a driver over it.
pub(crate) struct Testbed {
    pub(crate) driver: Arc<RedisDriver>,
    pub(crate) server: RedisServer,
    drawn: AtomicU64,
}

impl Testbed {
    pub(crate) async fn start() -> Self {
        let server = RedisServer::start(RedisOptions::default()).unwrap();
        let driver = Arc::new(RedisDriver::connect(&server.url()).await.unwrap());
        Self {
            driver,
            server,
            drawn: AtomicU64::new(1),
        }
    }

    pub(crate) fn process(&self) -> &ServerProcess {
        self.server.process().unwrap()
    }

    pub(crate) fn name(&self, name: &str) -> LockName {
        name.parse().unwrap()
    }

    pub(crate) fn soon(&self) -> dlock_core::Instant {
        Clock::boot().now() + SECOND * 5
    }

    pub(crate) fn ends(&self, req: &mut Acquire, millis: u64) {
        req.give_up = Clock::boot().now() + Duration::from_millis(millis);
    }

    pub(crate) fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn acquire(&self, name: &str, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        Acquire::new(
            self.name(name),
            owner,
            HoldId::from_bits(self.draw()),
            Lease::fixed(lease),
            self.soon(),
        )
    }

    /// An acquire that waits in the queue.
    pub(crate) fn in_line(&self, name: &str, lease: Duration, number: u64) -> Acquire {
        let mut req = self.acquire(name, lease);
        req.ticket = Some(ticket(number));
        req
    }

    /// The next hold of the same owner.
    pub(crate) fn again(&self, of: &Acquire, lease: Duration) -> Acquire {
        let hold = HoldId::from_bits(self.draw());
        Acquire::new(
            of.name.clone(),
            of.owner,
            hold,
            Lease::fixed(lease),
            self.soon(),
        )
    }

    pub(crate) async fn granted(&self, req: &Acquire) -> Grant {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn held(&self, req: &Acquire) -> Held {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn release_of(&self, req: &Acquire) -> Release {
        Release::new(req.name.clone(), req.owner, req.hold)
    }

    pub(crate) async fn release(&self, req: &Acquire) -> Released {
        self.driver.release(&self.release_of(req)).await.unwrap()
    }

    pub(crate) async fn renew(&self, held: &[&Acquire]) -> Vec<Option<Renewed>> {
        let entries: Vec<_> = held
            .iter()
            .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 5)))
            .collect();
        let answers: Vec<Result<Renewed, DriverError>> = self
            .driver
            .renew(Lane(0), &entries, self.soon())
            .await
            .unwrap();
        answers.into_iter().map(Result::ok).collect()
    }

    pub(crate) async fn breaks(&self, name: &str, only: Option<u64>) -> Broken {
        let only = only.map(FencingToken);
        let broken = self.driver.break_lock(&self.name(name), only).await;
        broken.unwrap()
    }

    pub(crate) async fn inspect(&self, name: &str) -> Snapshot {
        self.driver.inspect(&self.name(name)).await.unwrap()
    }

    pub(crate) async fn list(&self, prefix: &str, limit: usize) -> Vec<String> {
        let (mut found, mut from) = (Vec::new(), None);
        loop {
            let page = self
                .driver
                .list(prefix, from.as_ref(), limit)
                .await
                .unwrap();
            found.extend(page.found.into_iter().map(|shown| shown.name.to_string()));
            from = page.next;
            if from.is_none() {
                found.sort();
                found.dedup();
                return found;
            }
        }
    }

    pub(crate) async fn raw(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.server.url()).unwrap();
        connection(&client).await
    }

    pub(crate) async fn exists(&self, key: &str) -> bool {
        self.raw().await.exists(key).await.unwrap()
    }

    pub(crate) async fn rest(&self, name: &str) -> Duration {
        let rest: u64 = self
            .raw()
            .await
            .pttl(format!("dlock:{{{name}}}"))
            .await
            .unwrap();
        Duration::from_millis(rest)
    }

    /// The record, its remaining time and the token.
    pub(crate) async fn dump(&self, name: &str) -> (Vec<(String, String)>, u64, String) {
        let (mut raw, key) = (self.raw().await, format!("dlock:{{{name}}}"));
        let fields: Vec<(String, String)> = raw.hgetall(&key).await.unwrap();
        (
            fields,
            raw.pexpire_time(&key).await.unwrap(),
            raw.get(format!("{key}:token")).await.unwrap(),
        )
    }

    pub(crate) async fn channels(&self) -> Vec<String> {
        let mut raw = self.raw().await;
        let mut asked = redis::cmd("PUBSUB");
        asked.arg("CHANNELS").arg("dlock:c:*");
        asked.query_async(&mut raw).await.unwrap()
    }

    /// The channel of the only client.
    pub(crate) async fn channel(&self) -> String {
        let mut channels = self.channels().await;
        assert_eq!(channels.len(), 1);
        channels.remove(0)
    }

    pub(crate) async fn listeners(&self) -> usize {
        self.channels().await.len()
    }

    /// The ids of the subscribed connections, as the server numbers them.
    pub(crate) fn listening(&self) -> Vec<String> {
        let list = ["CLIENT", "LIST", "TYPE", "pubsub"];
        let text = self.server.command(&list).unwrap().text().unwrap();
        let number = |line: &str| line.split(' ').next().map(str::to_owned);
        text.lines().filter_map(number).collect()
    }

    pub(crate) async fn kill(&self, kind: &str) {
        let killed: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("TYPE")
            .arg(kind)
            .query_async(&mut self.raw().await)
            .await
            .unwrap();
        assert!(killed > 0);
    }

    pub(crate) async fn until(&self, condition: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !condition().await {
            assert!(began.elapsed() < LIMIT, "it never comes about");
            tokio::time::sleep(Duration::from_millis(1)).await; // between two polls
        }
    }

    /// For leases and not-afters to run out on the server, whose clock a test cannot pause.
    pub(crate) async fn sleep(&self, millis: u64) {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
}

pub(crate) async fn connection(client: &redis::Client) -> MultiplexedConnection {
    // The default is half a second, which a busy machine may exceed.
    let patient = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(SECOND * 20))
        .set_response_timeout(Some(SECOND * 20));
    let connected = client.get_multiplexed_async_connection_with_config(&patient);
    connected.await.unwrap()
}

pub(crate) fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}
