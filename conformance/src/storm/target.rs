//! The store under attack: a server that this program starts, or one that runs elsewhere.

use super::{
    judge::{Kind as Found, Verdict},
    work::{LEASE, renewed},
};
use crate::Result;
use clap::{Args, ValueEnum};
use dlock::{Client, ErrorKind, Lock};
use dlock_conformance::testbed::{
    EtcdServer, ManagedServer, MariadbServer, MongoServer, PostgresServer, Proxy, RedisServer,
    Running, ZooKeeperServer,
    mariadb::MariadbOptions,
    mongo::Deployment,
    redis::{Aof, RedisOptions},
    zookeeper::ZooKeeperOptions,
};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

/// Which store.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The URL of a running store: its server and its network are left alone.
    #[arg(long, required_unless_present = "store")]
    url: Option<String>,
    /// The kind of a store to start; a storm kills, stops, restarts and cuts off its server, too.
    #[arg(long, conflicts_with = "url")]
    store: Option<Store>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Store {
    Redis,
    Sqlite,
    Mysql,
    Postgres,
    Mongo,
    Etcd,
    Zk,
}

/// The store, as its workers and its checker reach it.
pub(crate) struct Target {
    /// The URL that the workers use.
    pub(super) through: String,
    pub(crate) direct: String,
    pub(super) server: Option<Server>,
}

/// A server that the storm started, and the network in front of it.
pub(super) struct Server {
    running: Running<()>,
    pub(super) proxy: Proxy,
}

impl Server {
    pub(super) fn managed(&self) -> Result<&dyn ManagedServer> {
        self.running
            .managed()
            .ok_or_else(|| "the server is not ours".into())
    }
}

impl Target {
    pub(crate) async fn of(place: Place, folder: &TempDir) -> Result<Self> {
        let Some(store) = place.store else {
            let url = place.url.ok_or("neither a URL nor a store")?;
            if url.starts_with("memory:") {
                return Err(
                    "a memory store lives in one process, and the workers are several".into(),
                );
            }
            return Ok(Self::at(url));
        };
        let running = match store {
            Store::Sqlite => {
                let file = folder.path().join("locks.db");
                return Ok(Self::at(format!("sqlite:{}", file.display())));
            }
            // Each of these keeps every answered change when its process is killed.
            Store::Redis => RedisServer::start(RedisOptions {
                aof: Aof::Always,
                ..RedisOptions::default()
            })?
            .of_any_kind(),
            Store::Mysql => MariadbServer::start(MariadbOptions::default())?.of_any_kind(),
            Store::Postgres => PostgresServer::start(&[])?.of_any_kind(),
            Store::Mongo => MongoServer::start(Deployment::ReplicaSet)?.of_any_kind(),
            Store::Etcd => EtcdServer::start(&[])?.of_any_kind(),
            Store::Zk => ZooKeeperServer::start(ZooKeeperOptions::default())?.of_any_kind(),
        };
        let proxy = Proxy::start(running.addr()).await?;
        let url = |addr| match store {
            Store::Zk => format!("{}/workers?dlock.session={:?}", running.url_at(addr), LEASE),
            _ => running.url_at(addr),
        };
        Ok(Self {
            through: url(proxy.addr()),
            direct: url(running.addr()),
            server: Some(Server { running, proxy }),
        })
    }

    /// A network for one worker alone, and its URL; none in front of a file.
    pub(crate) async fn network(&self) -> Result<(String, Option<Proxy>)> {
        let Some(Server { running, .. }) = &self.server else {
            return Ok((self.direct.clone(), None));
        };
        let proxy = Proxy::start(running.addr()).await?;
        Ok((running.url_at(proxy.addr()), Some(proxy)))
    }

    fn at(url: String) -> Self {
        Self {
            through: url.clone(),
            direct: url,
            server: None,
        }
    }
}

/// When all leases are over, every name must be available, and free afterwards.
pub(crate) async fn look_for_leftovers(
    target: &Target,
    names: impl IntoIterator<Item = String>,
    verdict: &mut Verdict,
) -> Result {
    let client = dlock::connect(&target.direct).await?;
    let locks = names
        .into_iter()
        .map(|name| client.lock(name).map(|lock| renewed(lock, LEASE)));
    let locks = locks.collect::<Result<Vec<_>, _>>()?;
    let first = locks.first().ok_or("BUG: no name")?;
    let longest = first.effective_lease()?.length();
    let longest = longest.clamp(LEASE, LONGEST_SESSION);
    sleep(longest + client.capabilities().late).await;
    for lock in locks {
        if let Some(words) = leftover(&client, &lock, longest).await? {
            verdict.find(Found::Leftover, words);
        }
    }
    drop(client.shutdown(END).await);
    Ok(())
}

/// Why this name is not free when no client uses it any more.
async fn leftover(client: &Client, lock: &Lock, longest: Duration) -> Result<Option<String>> {
    let (name, mut before) = (lock.name(), None);
    let end = Instant::now() + END;
    // A dead client that was first in the queue may cost the time reserved for its turn.
    loop {
        let error = match timeout(END, acquired(lock, longest)).await {
            Ok(Ok(())) => break,
            Ok(Err(error)) => error,
            Err(_) => return Ok(Some(format!("{name} was not acquired within {END:?}"))),
        };
        if !matches!(error.kind(), ErrorKind::Timeout { .. }) {
            return Err(error.into());
        }
        let seen = client.admin().inspect(name.as_str()).await?;
        let held = seen.holders.first().map(|holder| holder.token);
        // A machine that stood still makes an acquire late as well; what is left over has the same token again.
        if (held.is_some() && held == before) || Instant::now() > end {
            return Ok(Some(format!("{name} cannot be acquired: {seen:?}")));
        }
        before = held;
    }
    let seen = client.admin().inspect(name.as_str()).await?;
    Ok((!seen.holders.is_empty()).then(|| format!("{name} is held: {seen:?}")))
}

async fn acquired(lock: &Lock, limit: Duration) -> Result<(), dlock::Error> {
    loop {
        match lock.acquire_timeout(limit).await {
            Ok(guard) => return guard.release().await.map(drop),
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                sleep(Duration::from_millis(100)).await
            }
            Err(error) => return Err(error),
        }
    }
}

/// Far longer than any call takes: only a hang reaches it.
pub(crate) const END: Duration = Duration::from_secs(60);
/// The longest wait for a store whose leases are sessions.
const LONGEST_SESSION: Duration = Duration::from_secs(40);
