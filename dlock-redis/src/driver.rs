//! Redis driver: implements the contract of `DistributedLock` with one script a step.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    commands::{Acquisition, KEYS_OF_A_LOCK, Record, Refusal, Releasing},
    config::RedisConfig,
    connection::Shared,
    error,
    listener::{POLL_INTERVAL, poll_at_end},
    requests::{Acquires, POLICY, Releases},
    server::{MOST_ROUNDS, Server},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Fingerprint, Holder, HolderInfo, Holds, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Finding, Held, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, Wake, WakeUp, check_runtime,
        kit::{BatchPolicy, Batcher, again},
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, stream};
use redis::aio::ConnectionLike;
use std::{sync::Arc, time::Duration};

/// The driver for locks on a Redis server, on the master that sentinels name, or on a cluster.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_redis::RedisDriver::connect("redis://cache.internal/").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct RedisDriver {
    capabilities: Capabilities,
    server: Arc<Server>,
    acquires: Batcher<Acquires>,
    releases: Batcher<Releases>,
}

impl RedisDriver {
    /// Connects to the server that the URL names: see [`RedisConfig`].
    ///
    /// # Errors
    /// - `Misuse` when the URL or one of its settings cannot be read, or TLS is requested without a
    ///   crypto provider.
    /// - `Unavailable` when the server cannot be reached, or refuses the log-in or a right that waiting
    ///   needs.
    /// - `Unsupported` when the server is too old, or a node of a cluster and the URL names none, or the other way
    ///   round.
    ///
    /// There is one attempt and no retry, so that an application learns of an error at its start.
    ///
    /// # Cancel safety
    /// A dropped call leaves nothing behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_redis::RedisDriver::connect("redis://cache.internal/").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with settings made in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_redis::{RedisConfig, RedisDriver};
    ///
    /// let config: RedisConfig = "redis://cache.internal/".parse()?;
    /// let driver = RedisDriver::open(config.with_prefix("ops".parse()?)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: RedisConfig) -> Result<Self> {
        Self::over(config, None).await
    }

    async fn over(config: RedisConfig, shared: Option<Shared>) -> Result<Self> {
        check_runtime()?;
        #[cfg(feature = "tls")]
        config.check_tls()?;
        let capabilities = capabilities(&config);
        // A script of a cluster has one slot, and few locks share one.
        let alone = match config.is_cluster() {
            true => usize::MAX,
            false => POLICY.alone,
        };
        let policy = BatchPolicy { alone, ..POLICY };
        let server = Arc::new(Server::open(config, shared).await?);
        Ok(Self {
            capabilities,
            acquires: Batcher::new(Acquires(Arc::clone(&server)), policy),
            releases: Batcher::new(Releases(Arc::clone(&server)), policy),
            server,
        })
    }

    /// Connects with the server, log-in and TLS settings of the application's own client.
    ///
    /// The connections are dlock's own and speak RESP3, whatever the client speaks. The server in
    /// `config` is ignored; its other settings apply.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: redis::Client) -> dlock_core::driver::Result<()> {
    /// let config = "redis://cache.internal/".parse()?;
    /// let driver = dlock_redis::RedisDriver::from_client(&client, config).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_client(client: &redis::Client, config: RedisConfig) -> Result<Self> {
        Self::open(config.at(client.get_connection_info().clone())).await
    }

    /// Sends its requests over a connection of the application: a `ConnectionManager`, a `MultiplexedConnection`, or
    /// another one that can be cloned.
    ///
    /// The server of `config` must be the one of that connection, and its log-in and database the same: one more
    /// connection, named `dlock-wake-ups`, listens there for wake-ups. Where `dlock.replicas` or `dlock.fsync` is set, acquires and
    /// renewals have a connection each, too, because what is to be confirmed makes the others wait.
    ///
    /// What sharing costs:
    /// - A request stands behind what the application sent before it. Behind a large reply, or a command that blocks
    ///   such as `BLPOP`, a renewal may come too late, and the lock is lost.
    /// - The time limit of the connection holds for dlock, too: 500 ms unless it was set. A request that meets it may
    ///   have been executed, and is cleaned up.
    /// - A `MultiplexedConnection` that ended stays so, and all locks are then lost. A `ConnectionManager` reconnects.
    ///
    /// # Errors
    /// As [`connect`](Self::connect). `Misuse` also where the connection has another database selected than `config`
    /// names; that it leads to the same server is not checked.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: redis::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_redis::{RedisConfig, RedisDriver};
    ///
    /// let connection = client.get_multiplexed_async_connection().await?;
    /// let config = RedisConfig::from(&client);
    /// let driver = RedisDriver::from_connection(connection.clone(), config).await?; // the application keeps its own
    /// # Ok(()) }
    /// ```
    pub async fn from_connection<C>(connection: C, config: RedisConfig) -> Result<Self>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let clone = move || Box::new(connection.clone()) as Box<dyn ConnectionLike + Send>;
        Self::over(config, Some(Arc::new(clone))).await
    }

    async fn snapshot(&self, name: LockName) -> Result<Snapshot> {
        let (record, waiters) = self.server.inspect(&name).await?;
        let inside = Incarnation::of(&record);
        let mut shown = Snapshot::free(name);
        shown.waiters = waiters;
        if inside.holder.is_some() {
            shown.holds = inside.holds;
            shown.age = inside.began.map(|began| record.now.saturating_sub(began));
        } else {
            shown.unavailable_for = record.rest;
        }
        shown.holders.extend(inside.holder);
        Ok(shown)
    }
}

#[async_trait]
impl DistributedLock for RedisDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// All locks of a server share one lane.
    fn lane(&self, name: &LockName) -> Lane {
        self.server.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let server = &self.server;
        if req.floor.is_some_and(|floor| floor.0 >= LAST_TOKEN) {
            return Err(error::beyond());
        }
        server.shortest.keeps(req.lease.length());
        let mut turned = false;
        if let Some(ticket) = req.ticket {
            server.allowed()?;
            (_, turned) = server.inbox.tickets.enters(ticket);
        }
        let _next = req
            .next_ticket
            .map(|ticket| server.inbox.tickets.awaits(ticket));
        let alone = req.next_ticket.is_some() || req.join.is_some() || req.floor.is_some();
        let mut answer = match alone || turned {
            false => self.acquires.ask(req).await?,
            _ => server.acquire(req).await?,
        };
        for _ in 0..MOST_ROUNDS {
            // Unserved: the lock has room and this script took nothing. Ask again instead of waiting.
            if !matches!(&answer, Acquisition::Held(refusal) if refusal.unserved) {
                break;
            }
            answer = server.acquire(req).await?;
        }
        match answer {
            Acquisition::Granted(grant, _) => Ok(Acquired::Granted(grant)),
            Acquisition::Held(refusal) => Ok(Acquired::Held(held(&refusal, req))),
            Acquisition::Gone => Ok(Acquired::Gone),
            Acquisition::Late => Err(error::late()),
            Acquisition::Full => Err(error::full()),
        }
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.server.inbox.tickets.forget(ticket);
        if !self.server.leave(name, Some(ticket)).await? {
            self.server.go_on(name.clone());
        }
        Ok(())
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let (a_script, in_flight) = match self.server.is_cluster() {
            true => (1, A_SCRIPT),
            false => (A_SCRIPT, IN_FLIGHT),
        };
        let scripts = batch.chunks(a_script);
        let scripts: Vec<_> = scripts.map(|it| self.server.renew(it, give_up)).collect();
        let mut outcomes: Vec<_> = stream::iter(scripts).buffered(in_flight).collect().await;
        self.server.confirm(&mut outcomes, give_up).await;
        if !outcomes.is_empty() && outcomes.iter().all(Result::is_err) {
            return outcomes.swap_remove(0).map(|it| it.entries);
        }
        // A script that failed fails its own entries, and no entry that another script renewed.
        let mut answers = Vec::with_capacity(batch.len());
        for (some, outcome) in batch.chunks(a_script).zip(outcomes) {
            let failed = |error| some.iter().map(|_| Err(again(&error))).collect();
            answers.extend(outcome.map_or_else(failed, |it| it.entries));
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let releasing = match (req.holds, req.min_hold) {
            (Holds::One(hold), None) => self.releases.ask(&(req.clone(), hold)).await?,
            _ => self.server.release(req).await?,
        };
        Ok(match releasing {
            Releasing::Freed => Released::Freed,
            Releasing::Unserved => {
                self.server.go_on(req.name.clone());
                Released::Freed
            }
            Releasing::Left(holds) => Released::StillHeld { holds },
            Releasing::Kept(rest) => Released::MinHold { rest },
            Releasing::NotHeld(record) => Released::NotHeld {
                by: Incarnation::of(&record).holder,
            },
        })
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.server.inbox.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.snapshot(name.clone()).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let keys = &self.server.prefix;
        // All keys of a lock are scanned; its counter stays for a day after the others.
        let count = limit.saturating_mul(KEYS_OF_A_LOCK.len());
        let count = count.clamp(1, MOST_SCANNED);
        let pattern = keys.pattern(prefix);
        let (found, next) = self.server.scan(from, &pattern, count).await?;
        let names = found.into_iter().filter_map(|key| keys.name(&key));
        let snapshots: Vec<_> = names.map(|name| self.snapshot(name)).collect();
        let snapshots = stream::iter(snapshots).buffered(A_SCRIPT);
        let mut shown: Vec<Snapshot> = snapshots.try_collect().await?;
        shown.retain(|name| !name.is_free());
        Ok(Page::new(shown, next))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let breaking = self.server.break_lock(name, only).await?;
        if breaking.unserved {
            self.server.go_on(name.clone());
        }
        Ok(breaking.broken)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.server.diagnose().await
    }

    /// Requests in flight keep their connection until they are answered; new requests are refused.
    async fn close(&self) {
        self.server.close().await;
    }
}

fn capabilities(config: &RedisConfig) -> Capabilities {
    let mut capabilities = Capabilities::new("redis", config.store());
    capabilities.wake = Wake::Queue;
    capabilities.shares = true;
    capabilities.raises = true;
    // What is confirmed has connections of its own, which a release does not wait for; and one that a node refuses is
    // sent again.
    capabilities.ordered = !config.acks.are_wanted() && !config.is_cluster();
    capabilities.late = LATE;
    capabilities.renew_batch = RENEW_BATCH;
    capabilities
}

fn held(refusal: &Refusal, req: &Acquire) -> Held {
    let interval = (req.lease.length() / 3).min(POLL_INTERVAL);
    let rest = refusal.record.rest.map_or(POLL_INTERVAL, poll_at_end);
    let mut held = Held::default();
    held.by = Incarnation::of(&refusal.record).holder;
    held.ahead = refusal.ahead;
    held.poll_in = Some(match (req.ticket, refusal.ahead) {
        // A waiter behind others need not poll at the end of a lease: the first waiter does, and each is
        // notified when it becomes first. At the end of a turn that was not taken it serves those before it.
        (Some(_), Some(1..)) if held.by.is_some() => interval,
        (Some(_), _) => rest.min(interval),
        (None, _) => rest,
    });
    held
}

/// What a record says of the lock's holder.
struct Incarnation {
    holder: Option<Holder>,
    holds: u32,
    began: Option<Duration>,
}

impl Incarnation {
    fn of(record: &Record) -> Self {
        let (mut owner, mut began, token) = (None, None, record.token());
        // The holder info is that of the first living hold.
        let (mut living, mut foreign, mut note) = (0, 0_u32, HolderInfo::default());
        for (field, value) in &record.fields {
            match &field[..] {
                b"~s" => began = value.parse().ok().map(Duration::from_micros),
                [b'~', b'h', b':', ..] => {
                    let (end, its) = value.split_once(' ').unwrap_or((value, ""));
                    let end = end.parse().map(Duration::from_millis);
                    if value.starts_with('=') || end.is_ok_and(|end| end > record.now) {
                        living += 1;
                        if living == 1 {
                            note = HolderInfo::parse(its);
                        }
                    }
                }
                [b'~', ..] => {}
                name => {
                    owner = Some(name);
                    foreign = foreign.saturating_add(value.parse().unwrap_or(1));
                }
            }
        }
        let holder = owner.map(|owner| {
            // An owner of dlock is hashed as the core hashes it, a foreign owner's field as a whole.
            let owner = owner.strip_suffix(b":0").unwrap_or(owner);
            let mut holder = Holder::new(Fingerprint::of(owner));
            (holder.token, holder.rest, holder.info) = (token, record.rest, note);
            holder
        });
        Self {
            holder,
            holds: if token.is_some() { living } else { foreign },
            began: began.or(token.map(|token| Duration::from_micros(token.0))),
        }
    }
}

/// The script reads the time and decides in one step, even when the request waited in a stopped server.
/// So this bound only covers rounding.
const LATE: Duration = Duration::from_millis(100);
/// Up to there Lua counts exactly.
const LAST_TOKEN: u64 = (1 << 53) - 1;
/// Entries in one script. Such a script blocks the server for some 0.2 ms; longer scripts gain nothing.
const A_SCRIPT: usize = 100;
/// Scripts of one batch in flight: enough to hide the latency, few enough that an acquire gets in
/// between.
const IN_FLIGHT: usize = 4;
const RENEW_BATCH: usize = 10 * A_SCRIPT;
/// Buckets of one `SCAN`: about 0.3 ms of the server's time.
const MOST_SCANNED: usize = 1_000;
