//! Redis floor: the textbook lock, `SET key token NX PX` and compare-and-delete, on the driver's client
//! crate.
//!
//! It has no fencing, holds, not-after, re-entry or waiting: every lock over Redis pays at least for
//! these two commands.

use crate::{
    Result,
    home::Home,
    work::{Contender, Work, hold_time, nanos},
};
use redis::{
    AsyncConnectionConfig, Client, IntoConnectionInfo, Pipeline, PushInfo, PushKind, Script, Value,
    aio::MultiplexedConnection, io::tcp::TcpSettings,
};
use std::{
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};
use tokio::sync::{Mutex, mpsc};

/// Settings of the client crate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    /// The crate's defaults.
    Default,
    /// With `TCP_NODELAY`.
    NoDelay,
}

/// One name of the textbook lock.
#[derive(Clone)]
pub(crate) struct Textbook {
    connection: MultiplexedConnection,
    key: String,
}

/// `KEYS`: the lock; `ARGV`: the token that it must have.
static COMPARE_AND_DELETE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
    )
});

/// `KEYS`: the locks; `ARGV`: the lease, then the token that each must have.
static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local out = {} \
         for i, key in ipairs(KEYS) do \
         if redis.call('GET', key) == ARGV[i + 1] then out[i] = redis.call('PEXPIRE', key, ARGV[1]) \
         else out[i] = 0 end end return out",
    )
});

pub(crate) async fn connect(url: &str, setting: Setting) -> Result<MultiplexedConnection> {
    let tcp = match setting {
        Setting::Default => TcpSettings::default(),
        Setting::NoDelay => TcpSettings::default().set_nodelay(true),
    };
    let client = Client::open(url.into_connection_info()?.set_tcp_settings(tcp))?;
    Ok(client.get_multiplexed_async_connection().await?)
}

impl Textbook {
    pub(crate) async fn load(connection: &mut MultiplexedConnection) -> Result {
        for script in [&*COMPARE_AND_DELETE, &*RENEW] {
            script.prepare_invoke().load_async(connection).await?;
        }
        Ok(())
    }

    pub(crate) fn new(connection: &MultiplexedConnection, name: &str) -> Self {
        Self {
            connection: connection.clone(),
            key: format!("floor:{name}"),
        }
    }

    /// Acquires the lock for this lease if it is free.
    pub(crate) async fn take(&self, lease: Duration) -> Result<Option<String>> {
        let token = format!("{:032x}", fastrand::u128(..));
        let mut set = redis::cmd("SET");
        set.arg(&self.key).arg(&token).arg("NX");
        set.arg("PX").arg(u64::try_from(lease.as_millis())?);
        let taken: Option<String> = set.query_async(&mut self.connection.clone()).await?;
        Ok(taken.map(|_| token))
    }

    pub(crate) async fn end(&self) -> Result<Duration> {
        end_of(&mut self.connection.clone(), &self.key).await
    }
}

impl Contender for Textbook {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        let taken = self.take(LEASE).await?;
        taken.ok_or_else(|| "an uncontended lock was refused".into())
    }

    async fn release(&self, token: String) -> Result {
        let mut delete = redis::cmd("EVALSHA");
        delete
            .arg(COMPARE_AND_DELETE.get_hash())
            .arg(1)
            .arg(&self.key)
            .arg(&token);
        let deleted: i64 = delete.query_async(&mut self.connection.clone()).await?;
        match deleted {
            1 => Ok(()),
            _ => Err("a lock that was held was not there".into()),
        }
    }
}

/// When a key ends, by the server's wall clock.
pub(crate) async fn end_of(connection: &mut MultiplexedConnection, key: &str) -> Result<Duration> {
    let end: i64 = redis::cmd("PEXPIRETIME")
        .arg(key)
        .query_async(connection)
        .await?;
    let end = u64::try_from(end).map_err(|_| format!("{key} is not there, or has no end"))?;
    Ok(Duration::from_millis(end))
}

/// Two clients, each on a thread of its own: one sends commands and publishes, the other subscribes.
pub(crate) struct Hop {
    here: (Home, MultiplexedConnection),
    _there: (Home, MultiplexedConnection),
    /// When each message arrived.
    arrived: Mutex<mpsc::UnboundedReceiver<Instant>>,
}

impl Hop {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let (here, there) = (Home::new()?, Home::new()?);
        let (sender, mut pushed) = mpsc::unbounded_channel();
        let to = there.run(subscribe(url.to_owned(), sender)).await?;
        let (note, arrived) = mpsc::unbounded_channel();
        there.runtime().spawn(async move {
            while pushed.recv().await.is_some() && note.send(Instant::now()).is_ok() {}
        });
        let url = url.to_owned();
        let from = async move { connect(&url, Setting::Default).await };
        let from = here.run(from).await?;
        Ok(Self {
            here: (here, from),
            _there: (there, to),
            arrived: Mutex::new(arrived),
        })
    }

    /// `PING` of a client after a few ms of idleness, as often as the time allows.
    pub(crate) async fn idle_round_trips(self: Arc<Self>, span: Duration) -> Result<Work> {
        let mut connection = self.here.1.clone();
        let asking = async move {
            let mut work = Work::default();
            let began = Instant::now();
            while began.elapsed() < span {
                tokio::time::sleep(hold_time()).await;
                let start = Instant::now();
                redis::cmd("PING").exec_async(&mut connection).await?;
                work.latencies.push(nanos(start.elapsed()));
                work.operations += 1;
            }
            Ok(work)
        };
        self.here.0.run(asking).await
    }

    /// From `PUBLISH` to push, after a few ms of idleness, as often as the time allows.
    pub(crate) async fn idle_hops(self: Arc<Self>, span: Duration) -> Result<Work> {
        let floor = Arc::clone(&self);
        let saying = async move {
            let (mut from, mut arrived) = (floor.here.1.clone(), floor.arrived.lock().await);
            let mut work = Work::default();
            let began = Instant::now();
            while began.elapsed() < span {
                tokio::time::sleep(hold_time()).await;
                let mut publish = redis::cmd("PUBLISH");
                publish.arg(CHANNEL).arg("0");
                let start = Instant::now();
                publish.exec_async(&mut from).await?;
                let arrived = arrived.recv().await.ok_or("the subscription ended")?;
                work.latencies.push(nanos(arrived - start));
                work.operations += 1;
            }
            Ok(work)
        };
        self.here.0.run(saying).await
    }
}

/// Passes each message to a task, as a client would.
async fn subscribe(
    url: String,
    sender: mpsc::UnboundedSender<()>,
) -> Result<MultiplexedConnection> {
    let heard = move |push: PushInfo| -> Result<(), redis::aio::SendError> {
        if push.kind == PushKind::Message {
            sender.send(()).map_err(|_| redis::aio::SendError)?;
        }
        Ok(())
    };
    let info = url.into_connection_info()?;
    let resp3 = info
        .redis_settings()
        .clone()
        .set_protocol(redis::ProtocolVersion::RESP3);
    let config = AsyncConnectionConfig::new().set_push_sender(heard);
    let client = Client::open(info.set_redis_settings(resp3))?;
    let mut to = client
        .get_multiplexed_async_connection_with_config(&config)
        .await?;
    to.subscribe(CHANNEL).await?;
    Ok(to)
}

/// Many leases of one holder, renewed by the least script that checks their holder.
pub(crate) struct Leases {
    connection: MultiplexedConnection,
    keys: Vec<String>,
}

impl Leases {
    pub(crate) async fn take(mut connection: MultiplexedConnection, count: u32) -> Result<Self> {
        let keys: Vec<String> = (0..count).map(|at| format!("floor:lease:{at}")).collect();
        for some in keys.chunks(1_000) {
            let mut pipe = Pipeline::new();
            for key in some {
                pipe.set(key, HOLDER).ignore();
            }
            pipe.exec_async(&mut connection).await?;
        }
        Ok(Self { connection, keys })
    }

    /// Renews each lease once: `size` leases a script, a few scripts in flight at a time.
    pub(crate) async fn renew(&self, size: usize, in_flight: usize) -> Result {
        let mut connection = self.connection.clone();
        for some in self.keys.chunks(size * in_flight) {
            let mut pipe = Pipeline::new();
            for batch in some.chunks(size) {
                let call = pipe
                    .cmd("EVALSHA")
                    .arg(RENEW.get_hash())
                    .arg(batch.len())
                    .arg(batch);
                call.arg(30_000);
                for _ in batch {
                    call.arg(HOLDER);
                }
            }
            let answers: Vec<Vec<i64>> = pipe.query_async(&mut connection).await?;
            if answers.iter().flatten().any(|renewed| *renewed != 1) {
                return Err("a lease of the floor was not there".into());
            }
        }
        Ok(())
    }
}

/// How many times each command has run.
pub(crate) async fn calls_of(connection: &mut MultiplexedConnection, command: &str) -> Result<u64> {
    let info: Value = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(connection)
        .await?;
    let info: String = redis::from_redis_value(info)?;
    let calls = info.lines().find_map(|line| {
        let stats = line.strip_prefix("cmdstat_")?.strip_prefix(command)?;
        stats
            .strip_prefix(":calls=")?
            .split(',')
            .next()?
            .parse()
            .ok()
    });
    Ok(calls.unwrap_or_default())
}

/// The memory that the server uses, in bytes.
pub(crate) async fn memory_of(connection: &mut MultiplexedConnection) -> Result<u64> {
    let info: String = redis::cmd("INFO")
        .arg("memory")
        .query_async(connection)
        .await?;
    let used = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    Ok(used.ok_or("INFO tells no memory")?.trim().parse()?)
}

const LEASE: Duration = Duration::from_secs(30);
const CHANNEL: &str = "floor:hop";
/// As long as an owner of dlock.
const HOLDER: &str = "0123456789abcdef0123456789abcdef01234567";
