//! Dialer: opens connections and says how long to wait before the next attempt.

use crate::{
    commands,
    config::{RedisConfig, SentinelConfig},
    error,
    sentinel::Sentinels,
};
use dlock_core::driver::{DriverError, Finding};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ProtocolVersion, PushInfo, RedisConnectionInfo,
    RedisError, RedisResult,
    aio::MultiplexedConnection,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use std::{
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The shortest lease that a caller of a client asked for.
#[derive(Clone, Debug)]
pub(crate) struct ShortestLease(Arc<AtomicU64>);

impl ShortestLease {
    /// Records a lease that is in use from now on: a lost connection has to be back before it ends.
    pub(crate) fn keeps(&self, lease: Duration) {
        let millis = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        if millis < self.0.load(Ordering::Relaxed) {
            self.0.fetch_min(millis, Ordering::Relaxed);
        }
    }

    /// `None`: no caller has asked for any.
    pub(crate) fn asked(&self) -> Option<Duration> {
        Some(self.get()).filter(|lease| *lease < NO_LEASE)
    }

    fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

impl Default for ShortestLease {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

/// Opens all connections of a client to a server with the same settings.
#[derive(Debug)]
pub(crate) struct Dialer {
    client: Client,
    /// They say which server to dial, instead of the client.
    sentinels: Option<Sentinels>,
    /// The server is a node of a cluster.
    pub(crate) in_cluster: bool,
    /// The place of the server, for messages.
    pub(crate) at: String,
    /// Whether it is spoken to over TLS.
    tls: bool,
    within: Duration,
    shortest: ShortestLease,
    /// Consecutive failed attempts.
    failed: AtomicU32,
}

impl Dialer {
    pub(crate) fn new(config: &RedisConfig, shortest: ShortestLease) -> RedisResult<Self> {
        let server = config
            .server
            .clone()
            .set_redis_settings(quiet(config.server.redis_settings().clone()))
            .set_tcp_settings(tcp(config.server.tcp_settings().nodelay()));
        let follow = |sentinels: &SentinelConfig| {
            let server = server.clone().set_redis_settings(quiet(sentinels.login()));
            let sentinel = |addr| Client::open(server.clone().set_addr(addr));
            Sentinels::follow(sentinels, config.acks.replicas, sentinel)
        };
        let sentinels = config.sentinels.as_ref();
        Ok(Self {
            at: sentinels.map_or_else(
                || server.addr().to_string(),
                |it| format!("the master {:?}", it.name),
            ),
            sentinels: sentinels.map(follow).transpose()?,
            tls: matches!(server.addr(), ConnectionAddr::TcpTls { .. }),
            client: Client::open(server)?,
            in_cluster: config.is_cluster(),
            within: config.connect_within,
            shortest,
            failed: AtomicU32::new(0),
        })
    }

    /// A connection that could not be opened, or over which no answer came.
    pub(crate) fn unreached(&self, at: &str, cause: RedisError) -> DriverError {
        error::unreached(at, self.tls, cause)
    }

    /// How long an attempt may take: a third of the shortest lease, so that another attempt is in time
    /// when the first meets silence. Each failure doubles it, so that a slow path gets a connection in
    /// the end.
    pub(crate) fn within(&self) -> Duration {
        let patient = (self.shortest.get() / 3).max(LEAST_WITHIN);
        let failed = self.failed.load(Ordering::Relaxed).min(MOST_DOUBLED);
        self.within.min(patient.saturating_mul(1 << failed))
    }

    /// Records the outcome of an attempt.
    pub(crate) fn tried(&self, worked: bool) {
        if worked {
            self.failed.store(0, Ordering::Relaxed);
        } else {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The pause before the next attempt, after a connection that lived for so long. One that lived long
    /// is replaced at once: a client whose connection is cut repeatedly must not be without one for long.
    pub(crate) fn pause_after(&self, lived: Duration, pause: Duration) -> Duration {
        if lived > STEADY {
            return Duration::ZERO;
        }
        self.longer(pause)
    }

    /// The next pause in a series: from 10 ms, doubling to a second or to an eighth of the shortest
    /// lease.
    pub(crate) fn longer(&self, pause: Duration) -> Duration {
        let longest = (self.shortest.get() / 8).clamp(LEAST_LONGEST, LONGEST_PAUSE);
        (pause * 2).clamp(SHORTEST_PAUSE, longest)
    }

    /// What the sentinels tell of the replicas, where there are sentinels.
    pub(crate) async fn diagnose(&self) -> Option<Finding> {
        Some(self.sentinels.as_ref()?.diagnose().await)
    }

    /// Waits before the next attempt, or until the sentinels name another server.
    pub(crate) async fn rest(&self, pause: Duration) {
        let pause = jitter(pause);
        match &self.sentinels {
            Some(sentinels) => drop(tokio::time::timeout(pause, sentinels.moved()).await),
            None => tokio::time::sleep(pause).await,
        }
    }

    /// Opens a connection. `pushed` runs inside the connection's task and must not block.
    pub(crate) async fn dial(
        &self,
        pushed: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> RedisResult<MultiplexedConnection> {
        let Some(sentinels) = &self.sentinels else {
            return self.open(&self.client, pushed).await;
        };
        let pushed = Arc::new(pushed);
        let server = self.client.get_connection_info();
        let weak: Weak<dyn Fn(PushInfo) + Send + Sync> = Arc::downgrade(&pushed) as _;
        let addr = sentinels.master(server, weak, self.within()).await?;
        let elsewhere = |cause: String| io::Error::other(format!("{addr}: {cause}"));
        let client = Client::open(server.clone().set_addr(addr.clone()))?;
        let opened = self.open(&client, move |push| pushed(push)).await;
        let mut native = opened.map_err(|cause| match cause.is_io_error() {
            true => elsewhere(cause.to_string()).into(),
            false => cause,
        })?;
        // A sentinel may lag behind, or be ahead of the server that it promotes.
        let hello = redis::cmd("HELLO");
        let hello = tokio::time::timeout(self.within(), native.send_packed_command(&hello)).await;
        let why = match hello {
            Ok(Ok(hello)) if commands::hello_says(&hello, "role", "master") => return Ok(native),
            Ok(Err(cause)) => return Err(cause),
            Ok(Ok(_)) => "it is no master: a failover is under way",
            Err(_) => "no answer",
        };
        Err(elsewhere(why.to_owned()).into())
    }

    async fn open(
        &self,
        client: &Client,
        pushed: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.within()))
            // The core bounds every call. A second bound here would only add timers.
            .set_response_timeout(None)
            .set_push_sender(move |push| -> Result<(), redis::aio::SendError> {
                pushed(push);
                Ok(())
            });
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }
}

/// The address of a server that is reached like another one: over TLS or not.
pub(crate) fn at(other: &ConnectionAddr, host: &str, port: u16) -> ConnectionAddr {
    match other.clone() {
        ConnectionAddr::TcpTls {
            insecure,
            tls_params,
            ..
        } => ConnectionAddr::TcpTls {
            host: host.to_owned(),
            port,
            insecure,
            tls_params,
        },
        _ => ConnectionAddr::Tcp(host.to_owned(), port),
    }
}

/// The settings of a connection over which the client says no more than it must.
fn quiet(settings: RedisConnectionInfo) -> RedisConnectionInfo {
    let settings = settings.set_protocol(ProtocolVersion::RESP3);
    match settings.lib_name() {
        Some(_) => settings,
        // The native client reports its name with `CLIENT SETINFO`. That is not worth another right;
        // without the right the server would log each refusal.
        None => settings.set_skip_set_lib_name(),
    }
}

/// Nagle's algorithm stays on unless the application's client turns it off. It coalesces writes, which
/// the native client does not do. The price: a request that follows an unacknowledged one waits for at
/// most a round trip.
fn tcp(nodelay: bool) -> TcpSettings {
    let probes = TcpKeepalive::new()
        .with_time(DEAF / 2)
        .with_interval(DEAF / 4)
        .with_retries(2);
    let settings = TcpSettings::default()
        .set_nodelay(nodelay)
        .set_keepalive(probes);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    let settings = settings.set_user_timeout(DEAF);
    settings
}

/// 50 to 100 % of `pause`, so that the clients of a restarted server do not reconnect all at once.
pub(crate) fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Longer than any lease.
const NO_LEASE: Duration = Duration::from_millis(u64::MAX);
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The upper bound of pauses is never less than this: very short leases do not justify more attempts at
/// a server that is down for hours.
const LEAST_LONGEST: Duration = Duration::from_millis(50);
/// Nor may an attempt take less than this: over a slow path it needs several round trips.
const LEAST_WITHIN: Duration = Duration::from_secs(1);
/// Doublings of the time for an attempt: up to about a thousand times the least.
const MOST_DOUBLED: u32 = 10;
/// A connection that lives longer is no failed attempt.
const STEADY: Duration = Duration::from_millis(100);
/// When the kernel gives up a peer that acknowledges nothing. A third of the default lease leaves time
/// to renew over another connection.
const DEAF: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::{Dialer, ShortestLease};
    use std::time::Duration;

    #[test]
    fn who_keeps_short_leases_is_back_before_they_are_over() {
        let shortest = ShortestLease::default();
        let config = "redis://localhost".parse().unwrap();
        let dialer = Dialer::new(&config, shortest.clone()).unwrap();
        let longest = || {
            let mut pauses = vec![Duration::ZERO];
            while pauses.len() < 12 {
                pauses.push(dialer.longer(pauses[pauses.len() - 1]));
            }
            assert!(pauses.is_sorted(), "{pauses:?}");
            assert_eq!(pauses[1].as_millis(), 10);
            pauses[11].as_millis()
        };
        for (lease, pause, within) in [
            (30_000, 1_000, 5_000),
            (6_000, 750, 2_000),
            (1_600, 200, 1_000),
            (20, 50, 1_000),
            // The shortest lease counts.
            (30_000, 50, 1_000),
        ] {
            shortest.keeps(Duration::from_millis(lease));
            assert_eq!(longest(), pause, "{lease}");
            assert_eq!(dialer.within().as_millis(), within, "{lease}");
        }
        // A slower path gets more time after each failure.
        for within in [1_000, 2_000, 4_000, 5_000, 5_000] {
            assert_eq!(dialer.within().as_millis(), within);
            dialer.tried(false);
        }
        dialer.tried(true);
        assert_eq!(dialer.within().as_millis(), 1_000);
    }
}
