//! How connections are opened, and how soon again.

use crate::config::RedisConfig;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ProtocolVersion, PushInfo, RedisResult,
    aio::MultiplexedConnection,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

/// Opens connections, always in the same way.
#[derive(Debug)]
pub(crate) struct Dialer {
    client: Client,
    within: Duration,
    /// The shortest lease that was asked for, in ms.
    shortest: AtomicU64,
    /// Attempts in a row that came to nothing.
    failed: AtomicU32,
}

impl Dialer {
    pub(crate) fn new(config: &RedisConfig) -> RedisResult<Self> {
        let resp3 = config
            .server
            .redis_settings()
            .clone()
            .set_protocol(ProtocolVersion::RESP3);
        let server = config
            .server
            .clone()
            .set_redis_settings(resp3)
            .set_tcp_settings(tcp(config.server.tcp_settings().nodelay()));
        Ok(Self {
            client: Client::open(server)?,
            within: config.connect_within,
            shortest: AtomicU64::new(u64::MAX),
            failed: AtomicU32::new(0),
        })
    }

    pub(crate) fn addr(&self) -> &ConnectionAddr {
        self.client.get_connection_info().addr()
    }

    /// A lease that is in use from now on: a connection that is lost has to be back before it is over.
    pub(crate) fn keeps(&self, lease: Duration) {
        let millis = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        if millis < self.shortest.load(Ordering::Relaxed) {
            self.shortest.fetch_min(millis, Ordering::Relaxed);
        }
    }

    fn shortest(&self) -> Duration {
        Duration::from_millis(self.shortest.load(Ordering::Relaxed))
    }

    /// How long an attempt may take: a third of the shortest lease, so that another one is in time where the first met silence. Each that
    /// fails doubles it, so that a slow way is not given up for ever.
    pub(crate) fn within(&self) -> Duration {
        let patient = (self.shortest() / 3).max(LEAST_WITHIN);
        let failed = self.failed.load(Ordering::Relaxed).min(MOST_DOUBLED);
        self.within.min(patient.saturating_mul(1 << failed))
    }

    /// What came of an attempt.
    pub(crate) fn tried(&self, worked: bool) {
        if worked {
            self.failed.store(0, Ordering::Relaxed);
        } else {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The next pause of a row: from 10 ms doubling to a second, or to an eighth of the shortest lease.
    pub(crate) fn longer(&self, pause: Duration) -> Duration {
        let longest = (self.shortest() / 8).clamp(LEAST_LONGEST, LONGEST_PAUSE);
        (pause * 2).clamp(SHORTEST_PAUSE, longest)
    }

    /// Opens one; `pushed` runs inside the connection's task and must not wait.
    pub(crate) async fn dial(
        &self,
        pushed: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.within()))
            // The core bounds every call. A second bound here would only make timers.
            .set_response_timeout(None)
            .set_push_sender(move |push| -> Result<(), redis::aio::SendError> {
                pushed(push);
                Ok(())
            });
        self.client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }
}

/// Nagle's algorithm stays on unless the application's client has it off: it does the coalescing that the native client
/// does not. Off, 128 tasks got 0.77 to 0.84 of the cycles, and one task alone the same latency. Its price is a wait of at
/// most a round trip for a request that follows another one before that is acknowledged.
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

/// 50 to 100 % of it, so that the clients of a restarted server do not come all at once.
pub(crate) fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause is never shorter: a server that is down for hours is not asked more often for the sake of very short leases.
const LEAST_LONGEST: Duration = Duration::from_millis(50);
/// Nor is an attempt: one over a slow way takes several round trips.
const LEAST_WITHIN: Duration = Duration::from_secs(1);
/// A thousand times the least.
const MOST_DOUBLED: u32 = 10;
/// Having lived that long a connection is replaced at once: one that is cut again and again must not be without one for long.
pub(crate) const STEADY: Duration = Duration::from_millis(100);
/// When the kernel gives up a peer that acknowledges nothing: a third of the default lease leaves time to renew elsewhere.
const DEAF: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::Dialer;
    use std::time::Duration;

    #[test]
    fn who_keeps_short_leases_is_back_before_they_are_over() {
        let dialer = Dialer::new(&"redis://localhost".parse().unwrap()).unwrap();
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
            // The shortest counts.
            (30_000, 50, 1_000),
        ] {
            dialer.keeps(Duration::from_millis(lease));
            assert_eq!(longest(), pause, "{lease}");
            assert_eq!(dialer.within().as_millis(), within, "{lease}");
        }
        // A way that takes longer is not given up for ever.
        for within in [1_000, 2_000, 4_000, 5_000, 5_000] {
            assert_eq!(dialer.within().as_millis(), within);
            dialer.tried(false);
        }
        dialer.tried(true);
        assert_eq!(dialer.within().as_millis(), 1_000);
    }
}
