//! Connecting by URL: the scheme chooses the driver.

use dlock_core::{
    Client, ClientBuilder, Error, ErrorKind, Lease,
    driver::{DistributedLock, kit::parse_span},
};
use std::{error::Error as _, sync::Arc, time::Duration};

/// Connects to the store of a URL; the scheme chooses the driver.
///
/// | URL | feature | store |
/// |---|---|---|
/// | `memory:NAME` | `memory` (default) | inside this process, shared by all clients that use the name |
/// | `redis://…`, `redis+unix://…` | `redis` | one Redis server |
/// | `redis+sentinel://…` | `redis` | the master that Redis Sentinels name |
/// | `redis+cluster://…` | `redis` | the masters of a Redis Cluster |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | `redis-tls` | the same over TLS |
/// | `sqlite:PATH` | `sqlite` | a file, shared by the processes of one machine |
/// | `mysql://…`, `mariadb://…` | `mysql`, with TLS `mysql-tls` | a table of one MySQL or MariaDB server |
/// | `postgres://…`, `postgresql://…` | `postgres`, with TLS `postgres-tls` | a table of one PostgreSQL server |
/// | `mongodb://…` | `mongo` | a MongoDB replica set, a single server, or (not tested) a sharded cluster |
/// | `mongodb+srv://…` | `mongo-srv` | the same, found by DNS records |
/// | `etcd://…` | `etcd` | an etcd cluster |
/// | `etcd+tls://…` | `etcd-tls` | the same over TLS |
/// | `zk://…` | `zk` | a ZooKeeper server or ensemble |
/// | `zk+tls://…` | `zk-tls` | the same over TLS |
/// | `quorum:URL URL URL` | `quorum` | a majority of three, five or seven of these stores, with blanks between |
///
/// The rest of the URL is the native client's, unchanged. Query parameters that begin with `dlock.` belong
/// to dlock:
///
/// | parameter | values | default | what |
/// |---|---|---|---|
/// | `dlock.lease` | `100ms` to `365days` | `30s` | the lease of locks that name none, renewed by the watchdog |
/// | `dlock.presence` | `100ms` to `365days` | none | the [presence](ClientBuilder::presence) of the client: locks of a dead client are free after it |
/// | `dlock.poll` | `1ms` to `1m` | `100ms` | how often a waiter polls at most, on a store that cannot wake it |
///
/// A time has units, such as `500ms` or `1m30s`: a bare number is an error.
///
/// A quorum has them as words of their own: `quorum:URL URL URL dlock.lease=10s`.
///
/// Each backend has parameters of its own, listed with its config: `dlock::mysql::MysqlConfig`,
/// `dlock::memory::MemoryConfig`, `dlock::redis::RedisConfig`, `dlock::sqlite::SqliteConfig`,
/// `dlock::mongo::MongoConfig`, `dlock::postgres::PostgresConfig`, `dlock::etcd::EtcdConfig`,
/// `dlock::zk::ZkConfig`.
///
/// # Errors
/// - `Misuse` when the URL has an unknown scheme or parameter, or an illegal value: the message lists the
///   legal ones.
/// - `Misuse` on a tokio runtime without timers or I/O.
/// - `Unsupported` when the backend is not built in: the message names the feature.
/// - The backend's own error when it cannot be reached. `connect` tries once.
///
/// No error shows a password.
///
/// # Cancel safety
/// A dropped call leaves nothing behind.
///
/// # Examples
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), dlock::Error> {
/// # #[cfg(feature = "memory")] {
/// let client = dlock::connect("memory:orders?dlock.lease=10s").await?;
/// let _guard = client.lock("orders:42")?.acquire().await?;
/// # }
/// # Ok(()) }
/// ```
pub async fn connect(url: &str) -> Result<Client, Error> {
    builder(url).await?.build()
}

/// Connects like [`connect`], and returns a builder for further settings. A setting of the builder
/// overrides the URL.
///
/// # Errors
/// As [`connect`].
///
/// # Cancel safety
/// As [`connect`].
///
/// # Examples
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), dlock::Error> {
/// # #[cfg(feature = "memory")] {
/// use std::time::Duration;
/// let lease = dlock::Lease::renewed(Duration::from_secs(10));
/// let client = dlock::builder("memory:orders").await?.lease(lease).build()?;
/// let _guard = client.lock("orders:42")?.acquire().await?;
/// # }
/// # Ok(()) }
/// ```
pub async fn builder(url: &str) -> Result<ClientBuilder, Error> {
    let scheme = scheme(url)?;
    #[cfg(feature = "quorum")]
    if scheme == crate::majority::SCHEME {
        let (settings, config) = crate::majority::split(url)?;
        let driver = dlock_quorum::QuorumDriver::connect(config).await?;
        return Ok(settings.on(Client::builder(Arc::new(driver))));
    }
    let (url, settings) = Settings::split(url)?;
    let driver = driver(&scheme, &url)
        .await
        .map_err(|error| also_known(error, &url))?;
    Ok(settings.on(Client::builder(driver)))
}

#[cfg_attr(
    not(any(
        feature = "etcd",
        feature = "mongo",
        feature = "mysql",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite",
        feature = "zk"
    )),
    allow(
        clippy::unused_async,
        reason = "a backend in this process does not await"
    )
)]
#[cfg_attr(
    not(any(
        feature = "etcd",
        feature = "memory",
        feature = "mongo",
        feature = "mysql",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite",
        feature = "zk"
    )),
    allow(unused_variables, reason = "without a backend the URL is not read")
)]
pub(crate) async fn driver(scheme: &str, url: &str) -> Result<Arc<dyn DistributedLock>, Error> {
    match scheme {
        #[cfg(feature = "memory")]
        "memory" => Ok(Arc::new(dlock_memory::MemoryDriver::from_url(url)?)),
        #[cfg(feature = "redis")]
        "redis" | "redis+unix" | "redis+sentinel" | "redis+cluster" => {
            Ok(Arc::new(dlock_redis::RedisDriver::connect(url).await?))
        }
        #[cfg(feature = "redis-tls")]
        "rediss" | "rediss+sentinel" | "rediss+cluster" => {
            Ok(Arc::new(dlock_redis::RedisDriver::connect(url).await?))
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(dlock_sqlite::SqliteDriver::connect(url).await?)),
        #[cfg(feature = "mongo")]
        "mongodb" => Ok(Arc::new(dlock_mongo::MongoDriver::connect(url).await?)),
        #[cfg(feature = "mongo-srv")]
        "mongodb+srv" => Ok(Arc::new(dlock_mongo::MongoDriver::connect(url).await?)),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Arc::new(dlock_mysql::MysqlDriver::connect(url).await?)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(
            dlock_postgres::PostgresDriver::connect(url).await?,
        )),
        #[cfg(feature = "etcd")]
        "etcd" => Ok(Arc::new(dlock_etcd::EtcdDriver::connect(url).await?)),
        #[cfg(feature = "etcd-tls")]
        "etcd+tls" => Ok(Arc::new(dlock_etcd::EtcdDriver::connect(url).await?)),
        #[cfg(feature = "zk")]
        "zk" => Ok(Arc::new(dlock_zk::ZkDriver::connect(url).await?)),
        #[cfg(feature = "zk-tls")]
        "zk+tls" => Ok(Arc::new(dlock_zk::ZkDriver::connect(url).await?)),
        _ => Err(no_driver(scheme)),
    }
}

/// Every scheme, and the feature that includes its driver.
const SCHEMES: [(&str, &str); 20] = [
    ("memory", "memory"),
    ("redis", "redis"),
    ("rediss", "redis-tls"),
    ("redis+unix", "redis"),
    ("redis+sentinel", "redis"),
    ("rediss+sentinel", "redis-tls"),
    ("redis+cluster", "redis"),
    ("rediss+cluster", "redis-tls"),
    ("sqlite", "sqlite"),
    ("mongodb", "mongo"),
    ("mongodb+srv", "mongo-srv"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("postgres", "postgres"),
    ("postgresql", "postgres"),
    ("etcd", "etcd"),
    ("etcd+tls", "etcd-tls"),
    ("zk", "zk"),
    ("zk+tls", "zk-tls"),
    ("quorum", "quorum"),
];

pub(crate) fn no_driver(scheme: &str) -> Error {
    match SCHEMES.iter().find(|(known, _)| *known == scheme) {
        Some((_, feature)) => dlock_core::driver::DriverError::new(
            ErrorKind::Unsupported,
            format!(
                "{scheme}: needs the feature {feature:?}, which is off: cargo add dlock-rs --features {feature}"
            ),
        )
        .into(),
        None => Error::misuse(format!(
            "no store has the scheme {scheme:?}; there is {}",
            known_schemes()
        )),
    }
}

/// A URL without the parameters of dlock itself, as its driver reads it.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) fn without_settings(url: &str) -> Result<String, Error> {
    Settings::split(url).map(|(url, _)| url)
}

/// The scheme in lower case. A text without a scheme is not shown: it may be a password in the wrong place.
pub(crate) fn scheme(url: &str) -> Result<String, Error> {
    let legal = |scheme: &str| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    match url.split_once(':') {
        Some((scheme, _)) if legal(scheme) => Ok(scheme.to_ascii_lowercase()),
        _ => Err(Error::misuse(format!(
            "a store's URL begins with its scheme; there is {}",
            known_schemes()
        ))),
    }
}

fn known_schemes() -> String {
    SCHEMES.map(|(scheme, _)| format!("{scheme}:")).join(", ")
}

/// The parameters that every backend's URL may have.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    lease: Option<Lease>,
    presence: Option<Duration>,
    poll_interval: Option<Duration>,
}

impl Settings {
    /// Removes these parameters from a URL's query, and leaves the rest as it was, byte for byte.
    pub(crate) fn split(url: &str) -> Result<(String, Self), Error> {
        let mut settings = Self::default();
        let Some((base, query)) = url.split_once('?') else {
            return Ok((url.to_owned(), settings));
        };
        let mut rest = Vec::new();
        for pair in query.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !settings.take(key, value)? {
                rest.push(pair);
            }
        }
        let mark = if rest.is_empty() { "" } else { "?" };
        Ok((format!("{base}{mark}{}", rest.join("&")), settings))
    }

    /// Reads one parameter; `false`: it is not one of these.
    pub(crate) fn take(&mut self, key: &str, value: &str) -> Result<bool, Error> {
        let twice = match key {
            LEASE => {
                let lease = Lease::renewed(time(key, value)?)
                    .checked()
                    .map_err(|error| Error::misuse(format!("{key}={value}: {error}")))?;
                self.lease.replace(lease).is_some()
            }
            PRESENCE => {
                let presence = Lease::renewed(time(key, value)?)
                    .checked()
                    .map_err(|error| Error::misuse(format!("{key}={value}: {error}")))?;
                self.presence.replace(presence.length()).is_some()
            }
            POLL => {
                let poll_interval = time(key, value)?;
                if !(SHORTEST_POLL..=LONGEST_POLL).contains(&poll_interval) {
                    return Err(Error::misuse(format!(
                        "{key}={value}: it must be between {SHORTEST_POLL:?} and {LONGEST_POLL:?}"
                    )));
                }
                self.poll_interval.replace(poll_interval).is_some()
            }
            _ if [LEASE, PRESENCE, POLL].contains(&format!("{PREFIX}{key}").as_str()) => {
                return Err(Error::misuse(format!(
                    "{key} is no setting of any store: write {PREFIX}{key}={value}"
                )));
            }
            _ => return Ok(false),
        };
        if twice {
            return Err(Error::misuse(format!("{key} is in the URL twice")));
        }
        Ok(true)
    }

    fn on(self, mut builder: ClientBuilder) -> ClientBuilder {
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if let Some(presence) = self.presence {
            builder = builder.presence(presence);
        }
        if let Some(poll_interval) = self.poll_interval {
            builder = builder.poll_interval(poll_interval);
        }
        builder
    }
}

fn time(key: &str, value: &str) -> Result<Duration, Error> {
    parse_span(value).map_err(|error| Error::misuse(format!("{key}: {error}")))
}

/// A driver that refuses a parameter lists its own parameters. The user may have mistyped a common one, so
/// this adds those.
fn also_known(error: Error, url: &str) -> Error {
    let ours = url
        .split_once('?')
        .is_some_and(|(_, query)| query.split('&').any(|pair| pair.starts_with(PREFIX)));
    if ours && error.kind() == ErrorKind::Misuse && error.source().is_none() {
        Error::misuse(format!(
            "{error}; every backend's URL also knows {LEASE}, {PRESENCE} and {POLL}"
        ))
    } else {
        error
    }
}

const PREFIX: &str = "dlock.";
const LEASE: &str = "dlock.lease";
const PRESENCE: &str = "dlock.presence";
const POLL: &str = "dlock.poll";

/// The timers of a runtime are no finer.
const SHORTEST_POLL: Duration = Duration::from_millis(1);
/// To poll less often than once a minute, call `try_acquire` in a loop.
const LONGEST_POLL: Duration = Duration::from_secs(60);
