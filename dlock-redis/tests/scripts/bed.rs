//! Testbed: a server, clients without the core, and access to the server's keys.

use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
use dlock_core::{
    Clock, HoldId, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, Grant, Held, Release, Released, Ticket, WakeUp},
};
use dlock_redis::RedisDriver;
use futures_util::{StreamExt, stream::BoxStream};
use redis::{AsyncCommands, AsyncConnectionConfig, aio::MultiplexedConnection, aio::PubSub};
use std::{
    collections::{BTreeMap, HashMap},
    num::NonZeroU64,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio::sync::Mutex;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const KEY: &str = "dlock:{a}";
pub(crate) const LINE: &str = "dlock:{a}:line";
pub(crate) const ENDS: &str = "dlock:{a}:ends";

/// A server.
pub(crate) struct Testbed {
    pub(crate) server: RedisServer,
    drawn: AtomicU64,
}

/// A driver, and the notifications that it receives.
pub(crate) struct Client {
    pub(crate) driver: RedisDriver,
    /// A stream is not `Sync`, and only one task reads it.
    wake_ups: Mutex<BoxStream<'static, WakeUp>>,
}

/// A subscribed connection.
pub(crate) struct Listener(PubSub);

pub(crate) fn name() -> LockName {
    "a".parse().unwrap()
}

pub(crate) fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}

impl Client {
    /// An acquire that waits with that ticket.
    pub(crate) fn waits(&self, t: &Testbed, number: u64) -> Acquire {
        let mut req = t.acquire(SECOND * 30);
        req.ticket = Some(ticket(number));
        req
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

    pub(crate) async fn release(&self, req: &Acquire) -> Released {
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        self.driver.release(&release).await.unwrap()
    }

    /// The number of the next ticket that gets its turn.
    pub(crate) async fn turn(&self) -> u64 {
        let mut wake_ups = self.wake_ups.lock().await;
        loop {
            let wake_up = tokio::time::timeout(SECOND * 5, wake_ups.next()).await;
            if let WakeUp::Turn { ticket, .. } = wake_up.expect("a turn").expect("a stream") {
                return ticket.0.get();
            }
        }
    }
}

impl Listener {
    pub(crate) async fn hears(&mut self) -> String {
        self.hears_from().await.1
    }

    /// A message and its channel.
    pub(crate) async fn hears_from(&mut self) -> (String, String) {
        let said = tokio::time::timeout(SECOND * 5, self.0.on_message().next()).await;
        let said = said.expect("a message").unwrap();
        let channel = said.get_channel_name().to_owned();
        (channel, said.get_payload().unwrap())
    }
}

impl Testbed {
    pub(crate) fn start() -> Self {
        Self {
            server: RedisServer::start(RedisOptions::default()).unwrap(),
            drawn: AtomicU64::new(1),
        }
    }

    pub(crate) async fn client(&self) -> Client {
        let driver = RedisDriver::connect(&self.server.url()).await.unwrap();
        let wake_ups = driver.wake_ups();
        Client {
            driver,
            wake_ups: Mutex::new(wake_ups),
        }
    }

    pub(crate) async fn listener(&self, channels: &[&str]) -> Listener {
        let client = redis::Client::open(self.server.url()).unwrap();
        let mut listener = client.get_async_pubsub().await.unwrap();
        for channel in channels {
            listener.subscribe(channel).await.unwrap();
        }
        Listener(listener)
    }

    pub(crate) async fn listener_to_all(&self, pattern: &str) -> Listener {
        let mut listener = self.listener(&[]).await;
        listener.0.psubscribe(pattern).await.unwrap();
        listener
    }

    pub(crate) fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn acquire(&self, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        let hold = HoldId::from_bits(self.draw());
        let give_up = Clock::boot().now() + SECOND * 5;
        Acquire::new(name(), owner, hold, Lease::fixed(lease), give_up)
    }

    /// The next hold of the same owner.
    pub(crate) fn again(&self, of: &Acquire, lease: Duration) -> Acquire {
        let mut again = self.acquire(lease);
        again.owner = of.owner;
        again
    }

    /// Puts a ticket into the queue directly, past the driver.
    pub(crate) async fn put(&self, ticket: &str, place: u64, rest: Duration, accept: u64) {
        self.put_in_line_of(KEY, ticket, place, rest, accept).await;
    }

    /// The same for any record.
    pub(crate) async fn put_in_line_of(
        &self,
        key: &str,
        ticket: &str,
        place: u64,
        rest: Duration,
        accept: u64,
    ) {
        let mut raw = self.raw().await;
        let (seconds, micros): (u128, u128) =
            redis::cmd("TIME").query_async(&mut raw).await.unwrap();
        let deadline = seconds * 1_000 + micros / 1_000 + rest.as_millis();
        let _: () = raw
            .zadd(format!("{key}:line"), ticket, place)
            .await
            .unwrap();
        let _: () = raw
            .hset(
                format!("{key}:ends"),
                ticket,
                format!("{deadline} {accept}"),
            )
            .await
            .unwrap();
    }

    pub(crate) async fn raw(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.server.url()).unwrap();
        // The default is half a second, which a busy machine may exceed.
        let patient = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(SECOND * 20))
            .set_response_timeout(Some(SECOND * 20));
        let raw = client.get_multiplexed_async_connection_with_config(&patient);
        raw.await.unwrap()
    }

    pub(crate) async fn raw_command(&self, words: &[&str]) {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        let () = cmd.query_async(&mut self.raw().await).await.unwrap();
    }

    pub(crate) async fn record(&self) -> HashMap<String, String> {
        self.raw().await.hgetall(KEY).await.unwrap()
    }

    pub(crate) async fn line(&self) -> Vec<(String, f64)> {
        self.raw()
            .await
            .zrange_withscores(LINE, 0, -1)
            .await
            .unwrap()
    }

    pub(crate) async fn ends(&self) -> HashMap<String, String> {
        self.raw().await.hgetall(ENDS).await.unwrap()
    }

    pub(crate) async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.raw().await.keys("*").await.unwrap();
        keys.sort();
        keys
    }

    pub(crate) async fn rest(&self, key: &str) -> Duration {
        let rest: i64 = self.raw().await.pttl(key).await.unwrap();
        Duration::from_millis(u64::try_from(rest).expect("it is there and has an end"))
    }

    /// How often scripts ran each command since the last reset.
    pub(crate) async fn commands(&self) -> BTreeMap<String, u64> {
        let mut raw = self.raw().await;
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut raw)
            .await
            .unwrap();
        let counted = info.lines().filter_map(|line| {
            let (name, counts) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), counts.split(',').next()?.parse().ok()?))
        });
        let ours = |name: &str| {
            !["config", "client", "hello", "evalsha", "info"]
                .iter()
                .any(|other| name.starts_with(other))
        };
        counted.filter(|(name, _)| ours(name)).collect()
    }

    /// How often a command ran without an error: a script that the server did not know is repeated.
    pub(crate) async fn calls(&self, command: &str) -> u64 {
        let mut raw = self.raw().await;
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut raw)
            .await
            .unwrap();
        let counted = |of: &str| {
            let line = info
                .lines()
                .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
            let mut counts = line?.split(',');
            counts.find_map(|count| count.strip_prefix(of)?.parse::<u64>().ok())
        };
        counted("calls=").unwrap_or(0) - counted("failed_calls=").unwrap_or(0)
    }
}
