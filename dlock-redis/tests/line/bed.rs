//! Testbed: a server, clients over it, and a referee that judges the holders' reports.

use dlock_conformance::testbed::{
    RedisServer, ServerProcess,
    redis::{Aof, RedisOptions, Reply},
    worker::{self, Job, Worker},
};
use dlock_core::{Client, Guard, Lease, Lock, driver::DistributedLock};
use dlock_redis::RedisDriver;
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{
    error::Error,
    fmt::{self, Write},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::task::JoinHandle;

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MILLI: Duration = Duration::from_millis(1);
pub(crate) const NAME: &str = "a";
/// How long a turn is reserved for a client that does not take it, with leases of three seconds and
/// more.
pub(crate) const ACCEPT: Duration = SECOND;
/// The lease of the clients in a [`Storm`].
pub(crate) const STORM_LEASE: Duration = Duration::from_secs(3);
/// The allowance for a machine that is busy with other things.
pub(crate) const MARGIN: Duration = Duration::from_millis(600);
/// Reached only by a test that hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Fails with a message that is built only then.
macro_rules! ensure {
    ($holds:expr, $($said:tt)*) => {
        if !$holds {
            return Err(format!($($said)*).into());
        }
    };
}
pub(crate) use ensure;

/// The error of a test that missed a bound: the program is wrong, or the machine stalled.
#[derive(Debug)]
pub(crate) struct Late(pub(crate) String);

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Late {}

/// As [`ensure`], for what fails also where the machine stalls: the error is [`Late`].
macro_rules! in_time {
    ($holds:expr, $($said:tt)*) => {
        if !$holds {
            return Err($crate::bed::Late(format!($($said)*)).into());
        }
    };
}
pub(crate) use in_time;

pub(crate) struct Bed {
    pub(crate) server: RedisServer,
}

impl Bed {
    pub(crate) fn start() -> Outcome<Self> {
        Self::keeping(Aof::Off)
    }

    pub(crate) fn keeping(aof: Aof) -> Outcome<Self> {
        let options = RedisOptions {
            aof,
            ..RedisOptions::default()
        };
        Ok(Self {
            server: RedisServer::start(options)?,
        })
    }

    pub(crate) fn process(&self) -> &ServerProcess {
        self.server.process().unwrap()
    }

    pub(crate) async fn client(&self, lease: Duration) -> Outcome<Client> {
        connect(&self.server.url(), lease).await
    }

    pub(crate) async fn clients(&self, count: usize, lease: Duration) -> Outcome<Vec<Client>> {
        connect_all(&self.server.url(), count, lease).await
    }

    pub(crate) fn say(&self, words: &[&str]) -> Outcome<i64> {
        match self.server.command(words)? {
            Reply::Int(number) => Ok(number),
            other => Err(format!("{words:?}: {other:?}").into()),
        }
    }

    pub(crate) fn standing(&self) -> Outcome<i64> {
        self.say(&["ZCARD", "dlock:{a}:line"])
    }

    /// The ticket at the head of the queue.
    pub(crate) fn first(&self) -> Outcome<Option<String>> {
        match self
            .server
            .command(&["ZRANGE", "dlock:{a}:line", "0", "0"])?
        {
            Reply::Array(tickets) => Ok(tickets.first().and_then(Reply::text)),
            other => Err(format!("{other:?}").into()),
        }
    }

    /// Waits until the queue has that many tickets.
    pub(crate) async fn until_standing(&self, count: i64) -> Outcome {
        let began = Instant::now();
        loop {
            let standing = self.standing()?;
            if standing == count {
                return Ok(());
            }
            ensure!(
                began.elapsed() < LIMIT,
                "{standing} are queued, not {count}"
            );
            tokio::time::sleep(MILLI).await; // between two polls
        }
    }

    /// Starts a process with that many clients, each of which waits in the queue.
    pub(crate) async fn waiters(&self, count: i64, lease: Duration) -> Outcome<Worker> {
        let before = self.standing()?;
        let worker = self.worker(count, lease, Duration::ZERO).await?;
        self.until_standing(before + count).await?;
        Ok(worker)
    }

    /// Starts a process with a client that acquires the lock and keeps it.
    pub(crate) async fn holder(&self, lease: Duration) -> Outcome<Worker> {
        let worker = self.worker(1, lease, LIMIT * 100).await?;
        // It may report that it holds the lock before it reports that it asked.
        let began = Instant::now();
        while self.say(&["EXISTS", "dlock:{a}"])? == 0 {
            ensure!(began.elapsed() < LIMIT, "it does not get in");
            tokio::time::sleep(MILLI).await; // between two polls
        }
        Ok(worker)
    }

    async fn worker(&self, count: i64, lease: Duration, stay: Duration) -> Outcome<Worker> {
        let [lease, stay] = [lease, stay].map(|span| span.as_millis().to_string());
        let (url, count) = (self.server.url(), count.to_string());
        let args = [
            ("url", &*url),
            ("count", &*count),
            ("lease", &*lease),
            ("stay", &*stay),
        ];
        let mut worker = Worker::spawn("wait", &args)?;
        worker.expect("asked", LIMIT).await?;
        Ok(worker)
    }

    /// Starts a task that waits at the end of the queue and reports when it got the lock.
    pub(crate) async fn stand(
        &self,
        client: &Client,
    ) -> Outcome<JoinHandle<Outcome<(Guard, Instant)>>> {
        let before = self.standing()?;
        let lock = client.lock(NAME)?;
        let waiting = tokio::spawn(async move {
            let guard = lock.acquire_timeout(LIMIT).await?;
            Ok((guard, Instant::now()))
        });
        self.until_standing(before + 1).await?;
        Ok(waiting)
    }

    pub(crate) fn flush(&self) -> Outcome {
        self.server.command(&["FLUSHALL"])?;
        Ok(())
    }
}

pub(crate) async fn connect(url: &str, lease: Duration) -> Outcome<Client> {
    over(Arc::new(RedisDriver::connect(url).await?), lease)
}

pub(crate) fn over(driver: Arc<dyn DistributedLock>, lease: Duration) -> Outcome<Client> {
    Ok(Client::builder(driver)
        .lease(Lease::renewed(lease))
        .build()?)
}

async fn connect_all(url: &str, count: usize, lease: Duration) -> Outcome<Vec<Client>> {
    stream::iter(0..count)
        .map(|_| connect(url, lease))
        .buffered(16)
        .try_collect()
        .await
}

/// The main function of a worker process.
pub(crate) async fn work(job: &Job) -> Outcome {
    let lease = Duration::from_millis(job.arg("lease")?.parse()?);
    let stay = Duration::from_millis(job.arg("stay")?.parse()?);
    let count = job.arg("count")?.parse()?;
    let clients = connect_all(job.arg("url")?, count, lease).await?;
    for client in &clients {
        let lock = client.lock(NAME)?;
        drop(tokio::spawn(async move {
            while let Ok(guard) = lock.acquire().await {
                let inside = worker::say("inside");
                tokio::time::sleep(stay).await; // its work
                let released = guard.release().await;
                let outside = worker::say("outside");
                if inside.is_err() || outside.is_err() || released.is_err() {
                    return;
                }
            }
        }));
    }
    worker::say("asked")?;
    let mut commands = worker::commands();
    while commands.recv().await.is_some() {}
    Ok(())
}

/// One span in which a client held the lock.
#[derive(Clone, Copy, Debug)]
struct Turn {
    client: usize,
    /// When it was asked for, or earlier.
    sent: Instant,
    from: Instant,
    to: Instant,
    token: u64,
    /// The lease was not lost before the end of the span.
    held: bool,
}

/// Clients that hold for some milliseconds and queue again at once.
pub(crate) struct Storm {
    turns: Arc<Mutex<Vec<Turn>>>,
    errors: Arc<Mutex<Vec<String>>>,
    running: Vec<JoinHandle<()>>,
    clients: usize,
    began: Instant,
    until: Instant,
}

/// The result of the referee.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) grants: usize,
    /// The longest time without a holder.
    pub(crate) free: Duration,
    /// The fewest grants of one client.
    pub(crate) fewest: usize,
    pub(crate) errors: Vec<String>,
}

impl Storm {
    pub(crate) fn begin(clients: &[Client], lasts: Duration) -> Outcome<Self> {
        let began = Instant::now();
        let mut storm = Self {
            turns: Arc::default(),
            errors: Arc::default(),
            running: Vec::new(),
            clients: clients.len(),
            began,
            until: began + lasts,
        };
        for (number, client) in clients.iter().enumerate() {
            let (turns, errors) = (storm.turns.clone(), storm.errors.clone());
            let (lock, until) = (client.lock(NAME)?, storm.until);
            storm.running.push(tokio::spawn(async move {
                while Instant::now() < until {
                    if let Err(error) = turn(&lock, number, &turns).await {
                        errors.lock().unwrap().push(error.to_string());
                        // An acquire over a server that is gone fails at once, again and again.
                        tokio::time::sleep(MILLI * 10).await;
                    }
                }
            }));
        }
        Ok(storm)
    }

    /// Repeats an attack until shortly before the end, with a pause after each. Returns the number of
    /// attacks.
    pub(crate) async fn attack(
        &self,
        pause: Duration,
        mut attack: impl AsyncFnMut() -> Outcome,
    ) -> Outcome<usize> {
        let mut attacks = 0;
        while Instant::now() + pause < self.until {
            tokio::time::sleep(pause).await; // the interval between attacks
            attack().await?;
            attacks += 1;
        }
        Ok(attacks)
    }

    /// Waits for all clients and judges their reports. The server lost its keys within each of `voids`,
    /// from before to after. A lease that was held then, or asked for before the end of it, does not count.
    pub(crate) async fn end(self, voids: &[(Instant, Instant)]) -> Outcome<Report> {
        for running in self.running {
            tokio::time::timeout(LIMIT, running).await??;
        }
        let mut turns = self.turns.lock().unwrap().clone();
        turns.sort_by_key(|turn| turn.from);
        let counted = |turn: &&Turn| {
            let lost =
                |(before, after): &(Instant, Instant)| turn.sent <= *after && *before <= turn.to;
            turn.held && !voids.iter().any(lost)
        };
        let judged: Vec<_> = turns.iter().filter(counted).collect();
        for pair in judged.windows(2) {
            let [one, other] = pair else { continue };
            ensure!(
                one.to <= other.from && one.token < other.token,
                "two inside: {one:?} and {other:?}"
            );
        }
        let mut free = Duration::ZERO;
        let mut last = self.began;
        for turn in &turns {
            free = free.max(turn.from.saturating_duration_since(last));
            last = last.max(turn.to);
        }
        let of = |client| turns.iter().filter(|turn| turn.client == client).count();
        Ok(Report {
            grants: turns.len(),
            free,
            fewest: (0..self.clients).map(of).min().unwrap_or_default(),
            errors: std::mem::take(&mut *self.errors.lock().unwrap()),
        })
    }
}

async fn turn(lock: &Lock, client: usize, turns: &Mutex<Vec<Turn>>) -> Outcome {
    let guard = lock.acquire_timeout(LIMIT).await?;
    let from = Instant::now();
    let sent = from + guard.remaining() + Lease::margin(STORM_LEASE) - STORM_LEASE;
    tokio::time::sleep(MILLI * fastrand::u32(3..=8)).await; // its work
    let held = guard.check().is_ok();
    let turn = Turn {
        client,
        sent,
        from,
        to: Instant::now(),
        token: guard.token().0,
        held,
    };
    turns.lock().unwrap().push(turn);
    guard.release().await?;
    Ok(())
}

impl Report {
    /// Fails if a client got an error.
    pub(crate) fn unharmed(&self) -> Outcome {
        ensure!(self.errors.is_empty(), "{self:?}");
        Ok(())
    }

    /// Prints the report and demands the bounds.
    pub(crate) fn within(&self, attack: &str, attacks: usize, free: Duration) -> Outcome {
        let mut said = format!(
            "{attack}: {attacks} attacks, {} grants, fewest {}, longest free {:?}",
            self.grants, self.fewest, self.free
        );
        if let Some(error) = self.errors.first() {
            write!(said, ", {} errors such as {error}", self.errors.len())?;
        }
        println!("{said}");
        in_time!(self.free <= free, "free for longer than {free:?}: {said}");
        ensure!(self.fewest > 0, "a client never had a turn: {said}");
        Ok(())
    }
}
