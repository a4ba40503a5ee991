//! Redis driver: implements the contract of `DistributedLock` with one script a step.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    commands::{self, Acquisition, Record, Refusal, Releasing},
    config::{Keys, RedisConfig},
    connection::{Connection, Link},
    dialer::Dialer,
    error,
    gather::Request,
    hints::{Hints, LOOK, look_at_end},
    scripts::{self, Lua},
    tickets::Stand,
};
use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Fingerprint, Holder, HolderInfo, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Grant, Held, Hint, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, Wake, check_runtime,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, stream};
use redis::Value;
use std::{num::NonZeroU32, sync::Arc, time::Duration};

/// The driver for locks on one Redis server.
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
    config: RedisConfig,
    capabilities: Capabilities,
    connection: Arc<Connection>,
    hints: Hints,
}

impl RedisDriver {
    /// Connects to the server that the URL names: see [`RedisConfig`].
    ///
    /// # Errors
    /// - `Misuse` when the URL or one of its settings cannot be read, or TLS is requested without a
    ///   crypto provider.
    /// - `Unavailable` when the server cannot be reached, or refuses the log-in or a right that waiting
    ///   needs.
    /// - `Unsupported` when the server is too old or a node of a cluster.
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
        check_runtime()?;
        config.check_tls()?;
        let dialer = Dialer::new(&config).map_err(|cause| error::failed(cause).error);
        let dialer = Arc::new(dialer?);
        let hints = Hints::new(dialer.clone(), config.prefix().clone())?;
        let connection = Connection::open(dialer).await?;
        connection.warn_of_settings().await;
        hints.ready(&connection).await?;
        let mut capabilities = Capabilities::new("redis", config.store());
        capabilities.wake = Wake::Line;
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        Ok(Self {
            config,
            capabilities,
            connection: Arc::new(connection),
            hints,
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

    fn keys(&self, name: &LockName) -> Keys {
        self.config.prefix().keys(name)
    }

    /// The server's time at `give_up`. A request carries it, so that it takes nothing when it runs
    /// later.
    fn not_after(link: &Link, give_up: Instant) -> Duration {
        // The greeting of every connection reads the server's time, so it is known.
        link.server.at(give_up).unwrap_or_default()
    }

    async fn renew_some(
        &self,
        entries: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let entries: Vec<_> = entries
            .iter()
            .map(|entry| (self.keys(&entry.name), entry))
            .collect();
        let (answer, link) = self
            .connection
            .eval(&scripts::RENEW, give_up, |link| {
                commands::renew(&entries, Self::not_after(link, give_up)).into()
            })
            .await?;
        let (in_time, now, rests) = commands::read_renew(answer).ok_or_else(error::garbled)?;
        link.server.observe(now, self.connection.now());
        if !in_time {
            return Err(error::late());
        }
        let renewed = |rest: Option<Duration>| match rest {
            Some(valid_for) => Renewed::Until { valid_for },
            None => Renewed::NotHeld,
        };
        Ok(rests
            .into_iter()
            .map(|rest| rest.map(renewed).map_err(|text| error::failed_entry(&text)))
            .collect())
    }

    async fn look(&self, name: LockName) -> Result<Snapshot> {
        let keys = self.keys(&name);
        let inspect = |_: &Link| commands::inspect(&keys).into();
        let answer = self.run(&scripts::INSPECT, inspect).await?;
        let (record, waiters) = commands::read_inspect(answer).ok_or_else(error::garbled)?;
        let mut shown = snapshot(name, &record);
        shown.waiters = waiters;
        Ok(shown)
    }

    /// Sends one acquire with the place of its ticket, and records in the tickets what the answer says.
    async fn ask(&self, keys: &Keys, req: &Acquire, stand: Stand) -> Result<Acquisition> {
        let (answer, link) = self
            .connection
            .eval(&scripts::ACQUIRE, req.give_up, |link| {
                let not_after = Self::not_after(link, req.give_up);
                let line = (self.hints.channel(), stand.0, stand.1);
                commands::acquire(keys, req, line, not_after).into()
            })
            .await?;
        let (acquisition, now) =
            commands::read_acquire(answer, req.lease.length()).ok_or_else(error::garbled)?;
        link.server.observe(now, self.connection.now());
        let unheard = match (&acquisition, req.line) {
            (Acquisition::Granted { behind, .. }, line) => {
                if let (Some(next), Some(place)) = (req.next, *behind) {
                    self.hints.tickets().stands(next, place);
                }
                line.is_some_and(|ticket| self.hints.tickets().taken(ticket, req.hold))
            }
            (Acquisition::Held(refusal), Some(ticket)) => {
                let token = Incarnation::of(&refusal.record).token;
                let stands = (refusal.place, refusal.ahead);
                self.hints.tickets().refused(ticket, stands, token, &link)
            }
            _ => false,
        };
        if unheard {
            self.hints.doubt(&self.connection);
        }
        Ok(acquisition)
    }

    async fn end(&self, keys: &Keys, req: &Release) -> Result<Releasing> {
        let turns = self.hints.tickets().brought(req.holds);
        let release = |_: &Link| Request::new(commands::release(keys, req), turns);
        let answer = self.run(&scripts::RELEASE, release).await?;
        commands::read_release(answer).ok_or_else(error::garbled)
    }

    async fn open_up(&self, keys: &Keys, only: Option<FencingToken>) -> Result<(Broken, bool)> {
        let free = |_: &Link| commands::break_lock(keys, only).into();
        let answer = self.run(&scripts::BREAK, free).await?;
        commands::read_break(answer).ok_or_else(error::garbled)
    }

    /// Runs a script without a give-up of its own.
    async fn run(&self, lua: &Lua, build: impl Fn(&Link) -> Request + Send) -> Result<Value> {
        let patience = self.connection.patience();
        Ok(self.connection.eval(lua, patience, build).await?.0)
    }

    /// Continues to serve the queue after a script spent its budget on dead tickets while the lock is
    /// free, until the lock is reserved or the queue is empty. It runs in the background, because the
    /// release is done. If it stops early, the next poll of a waiter serves the queue.
    fn go_on(&self, keys: Keys) {
        let connection = Arc::clone(&self.connection);
        self.connection.spawn(async move {
            for _ in 0..MOST_ROUNDS {
                let patience = connection.patience();
                let leave = |_: &Link| commands::leave(&keys, None).into();
                let leave = connection.eval(&scripts::LEAVE, patience, leave);
                match leave.await.map(|(answer, _)| commands::read_leave(answer)) {
                    Ok(Some(false)) => {}
                    _ => return,
                }
            }
        });
    }
}

#[async_trait]
impl DistributedLock for RedisDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// There is one server and one connection: all locks share one lane.
    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.connection.keeps(req.lease.length());
        let keys = self.keys(&req.name);
        let tickets = self.hints.tickets();
        let mut stand = Stand::default();
        if let Some(ticket) = req.line {
            if self.hints.serve_two() {
                return Err(error::two_clients());
            }
            self.hints.allowed()?;
            stand = tickets.enters(ticket);
        }
        let _next = req.next.map(|ticket| tickets.awaits(ticket));
        let mut answer = self.ask(&keys, req, stand).await?;
        for _ in 0..MOST_ROUNDS {
            match &answer {
                // The lock is free and this script took nothing: ask again instead of waiting.
                Acquisition::Held(refusal) if refusal.unserved => {
                    answer = self.ask(&keys, req, tickets.place(req.line)).await?;
                }
                _ => break,
            }
        }
        match answer {
            Acquisition::Granted {
                token, holds, rest, ..
            } => Ok(Acquired::Granted(Grant::new(token, counted(holds)?, rest))),
            Acquisition::Held(refusal) => Ok(Acquired::Held(held(&refusal, req))),
            Acquisition::Gone => Ok(Acquired::Gone),
            Acquisition::Late => Err(error::late()),
            Acquisition::Full => Err(error::full()),
        }
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.hints.tickets().forget(ticket);
        let keys = self.keys(name);
        let left = Some((self.hints.channel(), ticket));
        let leave = |_: &Link| commands::leave(&keys, left).into();
        let answer = self.run(&scripts::LEAVE, leave).await?;
        if !commands::read_leave(answer).ok_or_else(error::garbled)? {
            self.go_on(keys);
        }
        Ok(())
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let scripts = batch.chunks(A_SCRIPT);
        let scripts: Vec<_> = scripts.map(|it| self.renew_some(it, give_up)).collect();
        let outcomes: Vec<_> = stream::iter(scripts).buffered(IN_FLIGHT).collect().await;
        if outcomes.iter().all(Result::is_err) {
            let first = outcomes.into_iter().next();
            return first.unwrap_or_else(|| Ok(Vec::new()));
        }
        // A script that failed fails its own entries, and no entry that another script renewed.
        let mut answers = Vec::with_capacity(batch.len());
        for (some, outcome) in batch.chunks(A_SCRIPT).zip(outcomes) {
            match outcome {
                Ok(renewed) => answers.extend(renewed),
                Err(error) => answers.extend(some.iter().map(|_| Err(error::again(&error)))),
            }
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let keys = self.keys(&req.name);
        let mut releasing = self.end(&keys, req).await;
        if releasing.as_ref().is_err_and(error::is_foreign) {
            // A foreign key in the place of the queue is met only after the hold has ended; one in the
            // place of the record is met first, in the repeat too.
            releasing = self.end(&keys, req).await.map(ended_before);
        }
        Ok(match releasing? {
            Releasing::Freed => Released::Freed,
            Releasing::Unserved => {
                self.go_on(keys);
                Released::Freed
            }
            Releasing::Left(holds) => Released::StillHeld {
                holds: counted(holds)?,
            },
            Releasing::Kept(rest) => Released::Kept { rest },
            Releasing::NotHeld(record) => Released::NotHeld {
                by: Incarnation::of(&record).holder(),
            },
        })
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        self.hints.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.look(name.clone()).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let from = from
            .map_or(Some(0), read_cursor)
            .ok_or_else(error::bad_cursor)?;
        let scan = commands::scan(
            from,
            &self.config.prefix().pattern(prefix),
            limit.saturating_mul(KEYS_OF_A_NAME).clamp(1, MOST_SCANNED),
        );
        let (next, found) =
            commands::read_scan(self.connection.command(scan).await?).ok_or_else(error::garbled)?;
        let names = found
            .iter()
            .filter_map(|key| self.config.prefix().name(key));
        let looks: Vec<_> = names.map(|name| self.look(name)).collect();
        let shown: Vec<Snapshot> = stream::iter(looks).buffered(A_SCRIPT).try_collect().await?;
        let shown = shown
            .into_iter()
            .filter(|name| !name.holders.is_empty() || name.shut.is_some());
        Ok(Page::new(
            shown.collect(),
            (next != 0).then(|| Cursor(next.to_string().into_bytes())),
        ))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let keys = self.keys(name);
        let mut broken = self.open_up(&keys, only).await;
        if broken.as_ref().is_err_and(error::is_foreign) {
            // A break can meet a foreign queue key in the same way as a release.
            broken = self.open_up(&keys, only).await.map(|again| match again {
                (Broken::WasFree, unserved) => (Broken::Freed { token: only }, unserved),
                other => other,
            });
        }
        let (broken, unserved) = broken?;
        if unserved {
            self.go_on(keys);
        }
        Ok(broken)
    }

    /// Requests in flight keep their connection until they are answered; new requests are refused.
    async fn close(&self) {
        self.connection.close();
        self.hints.close().await;
    }
}

/// The outcome of a release that failed after its hold had ended, read from the answer to its repeat.
fn ended_before(repeat: Releasing) -> Releasing {
    match repeat {
        Releasing::NotHeld(record) => {
            let shut = record.fields.iter().any(|(field, _)| field == b"~k");
            record
                .rest
                .filter(|_| shut)
                .map_or(Releasing::Freed, Releasing::Kept)
        }
        other => other,
    }
}

fn held(refusal: &Refusal, req: &Acquire) -> Held {
    let interval = (req.lease.length() / 3).min(LOOK);
    let rest = refusal.record.rest.map_or(LOOK, look_at_end);
    let mut held = Held::default();
    held.by = Incarnation::of(&refusal.record).holder();
    held.ahead = refusal.ahead;
    held.poll_in = Some(match (req.line, refusal.ahead) {
        // A waiter behind others need not poll at the end of a lease: the first waiter does, and each is
        // notified when it becomes first.
        (Some(_), Some(1..)) => interval,
        (Some(_), _) => rest.min(interval),
        (None, _) => rest,
    });
    held
}

fn snapshot(name: LockName, record: &Record) -> Snapshot {
    let inside = Incarnation::of(record);
    let mut shown = Snapshot::free(name);
    match inside.holder() {
        Some(holder) => {
            shown.holders.push(holder);
            shown.holds = inside.holds;
            shown.age = inside.began.map(|began| record.now.saturating_sub(began));
        }
        None => shown.shut = record.rest,
    }
    shown
}

/// The holder that a record describes.
#[derive(Default)]
struct Incarnation {
    owner: Option<Fingerprint>,
    holds: u32,
    token: Option<FencingToken>,
    began: Option<Duration>,
    /// Of the first living hold.
    note: HolderInfo,
    rest: Option<Duration>,
}

impl Incarnation {
    fn of(record: &Record) -> Self {
        let mut inside = Self {
            rest: record.rest,
            ..Self::default()
        };
        let (mut living, mut foreign) = (0, 0_u32);
        for (field, value) in &record.fields {
            match &field[..] {
                b"~t" => inside.token = value.parse().ok().map(FencingToken),
                b"~s" => inside.began = value.parse().ok().map(Duration::from_micros),
                [b'~', b'h', b':', ..] => {
                    let (end, note) = value.split_once(' ').unwrap_or((value, ""));
                    if end == "="
                        || end
                            .parse()
                            .is_ok_and(|end| Duration::from_millis(end) > record.now)
                    {
                        living += 1;
                        if living == 1 {
                            inside.note = HolderInfo::parse(note);
                        }
                    }
                }
                [b'~', ..] => {}
                // An owner of dlock is hashed as the core hashes it. A foreign owner's field is hashed
                // as a whole.
                owner => {
                    inside.owner =
                        Some(Fingerprint::of(owner.strip_suffix(b":0").unwrap_or(owner)));
                    foreign = foreign.saturating_add(value.parse().unwrap_or(1));
                }
            }
        }
        inside.holds = if inside.token.is_some() {
            living
        } else {
            foreign
        };
        inside.began = inside
            .began
            .or(inside.token.map(|token| Duration::from_micros(token.0)));
        inside
    }

    fn holder(&self) -> Option<Holder> {
        let mut holder = Holder::new(self.owner?);
        holder.token = self.token;
        holder.rest = self.rest;
        holder.note = self.note.clone();
        Some(holder)
    }
}

fn counted(holds: u32) -> Result<NonZeroU32> {
    NonZeroU32::new(holds).ok_or_else(error::garbled)
}

fn read_cursor(cursor: &Cursor) -> Option<u64> {
    std::str::from_utf8(&cursor.0).ok()?.parse().ok()
}

/// The script reads the time and decides in one step, even when the request waited in a stopped server.
/// So this bound only covers rounding.
const LATE: Duration = Duration::from_millis(100);
/// Consecutive scripts over a queue of dead tickets. Each script removes 32 of them, or 8 when it serves
/// several locks.
const MOST_ROUNDS: usize = 1_000;
/// Entries in one script. Such a script blocks the server for some 0.2 ms; longer scripts gain nothing.
const A_SCRIPT: usize = 100;
/// Scripts of one batch in flight: enough to hide the latency, few enough that an acquire gets in
/// between.
const IN_FLIGHT: usize = 4;
const RENEW_BATCH: usize = 10 * A_SCRIPT;
/// Keys of a lock while it is held and waited for; its counter stays for a day after. So most keys of a
/// scan are of no interest.
const KEYS_OF_A_NAME: usize = 4;
/// Buckets of one `SCAN`: about 0.3 ms of the server's time.
const MOST_SCANNED: usize = 1_000;
