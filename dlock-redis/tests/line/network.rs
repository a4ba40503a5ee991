//! Tests with cut, silent or slow connections, lost turns, and runtimes that end under a driver.

use crate::{
    bed::{
        ACCEPT, Bed, LIMIT, Late, MARGIN, MILLI, NAME, Outcome, SECOND, Storm, connect, ensure,
        in_time, over,
    },
    runtime, soak, trial,
};
use async_trait::async_trait;
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Direction, Flow, Reach},
    redis::Reply,
};
use dlock_core::{
    Broken, Clock, FencingToken, HoldId, Lease, LockName, Owner, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Ticket, WakeUp,
    },
};
use dlock_redis::RedisDriver;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, future, stream};
use libtest_mimic::Trial;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

pub(crate) fn trials() -> Vec<Trial> {
    let usual = SECOND * 3;
    vec![
        trial(
            "subscriptions_cut_again_and_again_cost_a_turn_at_most",
            move || cut(&["TYPE", "pubsub"], MILLI * 200, usual),
        ),
        trial(
            "command_connections_cut_again_and_again_cost_a_turn_at_most",
            move || cut(&["TYPE", "normal", "SKIPME", "yes"], MILLI * 150, usual),
        ),
        trial(
            "any_connection_killed_at_any_time_costs_a_turn_at_most",
            move || one_by_one(usual),
        ),
        trial(
            "one_turn_in_twenty_lost_costs_its_accept_lease",
            move || lost_turns(usual),
        ),
        trial(
            "a_turn_lost_with_its_connection_is_taken_at_the_reconnect",
            lost_with_its_connection,
        ),
        trial("a_slow_client_gets_its_turn_once", slow),
        trial(
            "a_deaf_connection_is_replaced_while_a_short_request_waits",
            || deaf(MILLI * 150),
        ),
        trial(
            "a_deaf_connection_is_replaced_while_a_long_request_waits",
            || deaf(SECOND * 20),
        ),
        trial(
            "wake_ups_outlive_the_runtime_that_waited_first",
            other_runtime,
        ),
        trial(
            "a_release_over_the_dead_outlives_the_runtime_that_released",
            short_runtime,
        ),
        trial(
            "ten_thousand_holds_are_renewed_several_scripts_at_once",
            || renewals(10_000),
        ),
        trial(
            "a_script_of_renewals_goes_out_before_the_one_before_it_is_answered",
            renewed_unanswered,
        ),
        soak("soak_subscriptions_cut", || {
            cut(&["TYPE", "pubsub"], MILLI * 200, SECOND * 600)
        }),
        soak("soak_command_connections_cut", || {
            cut(
                &["TYPE", "normal", "SKIPME", "yes"],
                MILLI * 150,
                SECOND * 600,
            )
        }),
        soak("soak_any_connection_killed", || one_by_one(SECOND * 600)),
        soak("soak_lost_turns", || lost_turns(SECOND * 600)),
    ]
}

async fn cut(whose: &[&str], pause: Duration, lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let clients = bed.clients(8, SECOND * 3).await?;
    let storm = Storm::begin(&clients, lasts)?;
    let words = [&["CLIENT", "KILL"], whose].concat();
    let mut killed = 0;
    let times = storm
        .attack(pause, async || {
            killed += bed.say(&words)?;
            Ok(())
        })
        .await?;
    ensure!(killed > i64::try_from(times)?, "only {killed} were cut");
    storm
        .end(&[])
        .await?
        .within(&words.join(" "), times, ACCEPT * 2 + MARGIN)
}

async fn one_by_one(lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let clients = bed.clients(8, SECOND * 3).await?;
    let clients = [clients.clone(), clients].concat();
    let storm = Storm::begin(&clients, lasts)?;
    let times = storm
        .attack(MILLI * 20, async || {
            if let Some(id) = fastrand::choice(&connections(&bed)?) {
                // The connection may have ended by itself meanwhile.
                let id = id.to_string();
                drop(bed.server.command(&["CLIENT", "KILL", "ID", &id]));
            }
            Ok(())
        })
        .await?;
    storm
        .end(&[])
        .await?
        .within("CLIENT KILL ID", times, ACCEPT * 2 + MARGIN)
}

/// The ids of the clients' connections, as the server numbers them.
fn connections(bed: &Bed) -> Outcome<Vec<u64>> {
    let list = bed.server.command(&["CLIENT", "LIST"])?.text();
    let list = list.unwrap_or_default();
    let theirs = list.lines().filter(|line| !line.contains("cmd=client"));
    let ids = theirs.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    Ok(ids.map(str::parse).collect::<Result<_, _>>()?)
}

async fn lost_turns(lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let lost = Arc::new(AtomicUsize::new(0));
    let turns = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    for _ in 0..8 {
        let inner = RedisDriver::connect(&bed.server.url()).await?;
        let (lost, turns) = (lost.clone(), turns.clone());
        clients.push(over(
            Arc::new(Forgetful {
                inner,
                lost,
                turns,
                wholly: false,
            }),
            SECOND * 3,
        )?);
    }
    let report = Storm::begin(&clients, lasts)?.end(&[]).await?;
    let lost = lost.load(Ordering::Relaxed);
    ensure!(lost > 0, "no turn was lost: {report:?}");
    // No two turns in a row are lost.
    report.unharmed()?;
    report.within("lost turns", lost, ACCEPT * 2 + MARGIN)
}

/// Loses one turn in twenty after it has arrived, so that the server has counted a receiver; or loses
/// every notification.
#[derive(Debug)]
pub(crate) struct Forgetful {
    inner: RedisDriver,
    lost: Arc<AtomicUsize>,
    /// The turns that have arrived.
    turns: Arc<AtomicUsize>,
    wholly: bool,
}

impl Forgetful {
    pub(crate) fn wholly(inner: RedisDriver) -> Self {
        Self {
            inner,
            lost: Arc::default(),
            turns: Arc::default(),
            wholly: true,
        }
    }
}

type Answer<T> = Result<T, DriverError>;

#[async_trait]
impl DistributedLock for Forgetful {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.inner.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Answer<Acquired> {
        self.inner.acquire(req).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Answer<()> {
        self.inner.leave(name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: dlock_core::Instant,
    ) -> Answer<Vec<Answer<Renewed>>> {
        self.inner.renew(lane, batch, give_up).await
    }

    async fn release(&self, req: &Release) -> Answer<Released> {
        self.inner.release(req).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        let (lost, turns, wholly) = (self.lost.clone(), self.turns.clone(), self.wholly);
        let arrives = move |wake_up: &WakeUp| {
            let is_turn = matches!(wake_up, WakeUp::Turn { .. });
            let loses = wholly || is_turn && turns.fetch_add(1, Ordering::Relaxed) % 20 == 9;
            lost.fetch_add(usize::from(loses), Ordering::Relaxed);
            future::ready(!loses)
        };
        self.inner.wake_ups().filter(arrives).boxed()
    }

    async fn inspect(&self, name: &LockName) -> Answer<Snapshot> {
        self.inner.inspect(name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Answer<Page> {
        self.inner.list(prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Answer<Broken> {
        self.inner.break_lock(name, only).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

/// The server counted a receiver, and the notification was in flight when the connection ended.
async fn lost_with_its_connection() -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let lease = SECOND * 30;
    let one = bed.client(lease).await?;
    let two = connect(&bed.server.url_at(proxy.addr()), lease).await?;
    let guard = one.lock(NAME)?.acquire().await?;
    let waiting = bed.stand(&two).await?;
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Stall);
    let began = Instant::now();
    guard.release().await?;
    let reserved = bed.say(&["HEXISTS", "dlock:{a}", "~r"])?;
    in_time!(reserved == 1, "it is not its turn");
    proxy.cut();
    let (guard, at) = waiting.await??;
    let free = at - began;
    println!("turn lost with its connection: free for {free:?}");
    // The next poll is two seconds away, the end of the turn one.
    in_time!(free < ACCEPT * 9 / 10, "free for {free:?}");
    guard.release().await?;
    Ok(())
}

/// The slow client receives its turn a second after the turn lapsed. The waiter behind it goes first
/// then, and the slow client is next.
async fn slow() -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let lease = SECOND * 30;
    let [one, two] = [bed.client(lease).await?, bed.client(lease).await?];
    let slow = connect(&bed.server.url_at(proxy.addr()), lease).await?;
    let guard = one.lock(NAME)?.acquire().await?;
    proxy.set_delay(Reach::All, Direction::ServerToClient, SECOND * 2);
    let entered = Instant::now();
    let turn = bed.stand(&slow).await?;
    let behind = bed.stand(&two).await?;
    let began = Instant::now();
    guard.release().await?;
    // The slow client polls when its refusal arrives, 2 s after it entered the queue: the turn is over
    // by then, if it began within the first of them.
    let released = entered.elapsed();
    in_time!(released < ACCEPT, "released only after {released:?}");
    let (guard, at) = behind
        .await?
        .map_err(|error| Late(format!("behind the slow one: {error}")))?;
    let free = at - began;
    in_time!(free < ACCEPT + MARGIN, "the one behind it waited {free:?}");
    // Hold the lock until the slow client has polled and been refused.
    bed.until_standing(1).await?;
    guard.release().await?;
    let began = Instant::now();
    let (guard, at) = turn
        .await?
        .map_err(|error| format!("the slow one: {error}"))?;
    println!("the slow one had it after {:?}", at - began);
    guard.check()?;
    ensure!(
        guard.remaining() > lease - SECOND * 8,
        "{:?}",
        guard.remaining()
    );
    ensure!(
        bed.say(&["HEXISTS", "dlock:{a}", "~t"])? == 1,
        "it does not hold"
    );
    let released = tokio::time::timeout(LIMIT, guard.release()).await??;
    ensure!(
        released == dlock_core::ReleaseOutcome::Released,
        "{released:?}"
    );
    // Each ticket is granted once: nothing returns within a span longer than the delay.
    tokio::time::sleep(SECOND * 3).await;
    ensure!(
        bed.say(&["EXISTS", "dlock:{a}", "dlock:{a}:line"])? == 0,
        "it left something"
    );
    Ok(())
}

/// The path dies without an error: requests over it stay unanswered, and the client opens another
/// connection for later requests.
async fn deaf(patience: Duration) -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let driver = Arc::new(RedisDriver::connect(&bed.server.url_at(proxy.addr())).await?);
    granted(&driver, "before", SECOND).await?;
    let before = connections(&bed)?.into_iter().max();
    proxy.set_flow(Reach::Existing, Direction::ClientToServer, Flow::Stall);
    let first = {
        let driver = driver.clone();
        tokio::spawn(async move { granted(&driver, "unheard", patience).await })
    };
    let began = Instant::now();
    while connections(&bed)?.into_iter().max() == before {
        ensure!(began.elapsed() < LIMIT, "no other connection is opened");
        tokio::time::sleep(MILLI).await; // between two polls
    }
    // The connection is in use after its greeting. Earlier requests wait on the first one.
    while tokio::time::timeout(MILLI * 100, granted(&driver, "after", SECOND))
        .await
        .is_err()
    {
        ensure!(began.elapsed() < LIMIT, "the other connection is not used");
    }
    ensure!(!first.is_finished(), "the deaf connection answered");
    first.abort();
    Ok(())
}

async fn granted(driver: &RedisDriver, name: &str, patience: Duration) -> Outcome {
    let req = Acquire::new(
        name.parse()?,
        Owner::from_seed(name),
        HoldId::from_bits(1),
        Lease::fixed(SECOND * 60),
        Clock::boot().now() + patience,
    );
    let acquired = tokio::time::timeout(LIMIT, driver.acquire(&req)).await??;
    ensure!(matches!(acquired, Acquired::Granted(_)), "{acquired:?}");
    Ok(())
}

/// The first wait and the first request are made in a runtime that ends. The client's own runtime
/// listens and reconnects.
async fn other_runtime() -> Outcome {
    let bed = Bed::start()?;
    let [one, two] = [
        bed.client(SECOND * 30).await?,
        bed.client(SECOND * 30).await?,
    ];
    let (held, waits) = (one.lock(NAME)?, two.lock(NAME)?);
    let guard = held.acquire().await?;
    elsewhere({
        let waits = waits.clone();
        async move { drop(waits.acquire_timeout(MILLI * 100).await) }
    })?;
    bed.server
        .command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])?;
    let waiting = bed.stand(&two).await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    let free = at - began;
    // The next poll is two seconds away.
    in_time!(free < ACCEPT, "free for {free:?}");
    guard.release().await?;
    Ok(())
}

/// The queue has more dead tickets than one script removes, and the client that released is gone.
async fn short_runtime() -> Outcome {
    let bed = Bed::start()?;
    let [one, two] = [
        bed.client(SECOND * 30).await?,
        bed.client(SECOND * 30).await?,
    ];
    let guard = one.lock(NAME)?.acquire().await?;
    let mut dead = bed.waiters(100, SECOND * 30).await?;
    let waiting = bed.stand(&two).await?;
    dead.kill_9().await?;
    let began = Instant::now();
    elsewhere(async move { drop(guard.release().await) })?;
    let (guard, at) = waiting.await??;
    let free = at - began;
    in_time!(free < ACCEPT, "free for {free:?}");
    guard.release().await?;
    Ok(())
}

/// Runs a future in a runtime that ends with it.
fn elsewhere(work: impl Future<Output = ()> + Send + 'static) -> Outcome {
    let ended = std::thread::spawn(move || runtime().block_on(work)).join();
    ensure!(ended.is_ok(), "it panicked");
    Ok(())
}

/// Held locks, as entries of a renewal that doubles their leases.
async fn held(driver: &RedisDriver, count: u64) -> Outcome<Vec<Renew>> {
    let mut entries = Vec::new();
    let asked: Vec<Acquire> = (0..count)
        .map(|number| {
            let name: LockName = format!("n{number}").parse()?;
            let owner = Owner::from_seed(&number.to_string());
            let hold = HoldId::from_bits(number + 1);
            entries.push(Renew::new(name.clone(), owner, hold, Some(LEASE * 2)));
            let lease = Lease::fixed(LEASE);
            Ok(Acquire::new(name, owner, hold, lease, soon() + LIMIT))
        })
        .collect::<Outcome<_>>()?;
    stream::iter(&asked)
        .map(|req| driver.acquire(req))
        .buffered(128)
        .try_for_each(|_| future::ready(Ok(())))
        .await?;
    Ok(entries)
}

const LEASE: Duration = SECOND.saturating_mul(60);

fn soon() -> dlock_core::Instant {
    Clock::boot().now() + SECOND * 5
}

fn renewed(answers: Vec<Answer<Renewed>>) -> Outcome<u64> {
    let mut renewed = 0;
    for answer in answers {
        let Renewed::Until { valid_for } = answer? else {
            return Err("a hold that is there was not renewed".into());
        };
        ensure!(valid_for == LEASE * 2, "renewed for {valid_for:?}");
        renewed += 1;
    }
    Ok(renewed)
}

/// Four of ten scripts are in flight while not a byte comes back.
async fn renewed_unanswered() -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let driver = RedisDriver::connect(&bed.server.url_at(proxy.addr())).await?;
    let entries = held(&driver, 1_000).await?;
    let scripts = proxy.watch(Direction::ClientToServer, "EVALSHA");
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Stall);
    let renewing = driver.renew(Lane::default(), &entries, soon() + LIMIT);
    let released = async {
        let four = tokio::time::timeout(LIMIT, scripts.reaches(4)).await;
        proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Pass);
        four
    };
    let (answers, four) = tokio::join!(renewing, released);
    ensure!(four.is_ok(), "{} without an answer", scripts.seen());
    ensure!(renewed(answers?)? == 1_000, "not all of them");
    ensure!(scripts.seen() == 10, "{} scripts", scripts.seen());
    Ok(())
}

async fn renewals(count: u64) -> Outcome {
    let bed = Bed::start()?;
    let driver = RedisDriver::connect(&bed.server.url()).await?;
    let entries = held(&driver, count).await?;
    let most = driver.capabilities().renew_batch;
    bed.server.command(&["CONFIG", "RESETSTAT"])?;
    let began = Instant::now();
    let mut done = 0;
    for batch in entries.chunks(most) {
        done += renewed(driver.renew(Lane::default(), batch, soon()).await?)?;
    }
    let took = began.elapsed();
    println!("{done} renewals in {took:?}");
    ensure!(done == count && took < SECOND * 5, "{done} in {took:?}");
    let scripts = bed.server.command(&["INFO", "commandstats"])?;
    let calls = calls_of(&scripts, "evalsha").unwrap_or_default();
    ensure!(calls == count / 100, "{calls} scripts for {count} renewals");
    Ok(())
}

fn calls_of(stats: &Reply, command: &str) -> Option<u64> {
    let text = stats.text()?;
    let line = text.lines().find_map(|line| {
        line.strip_prefix("cmdstat_")?
            .strip_prefix(command)?
            .strip_prefix(":calls=")
    })?;
    line.split(',').next()?.parse().ok()
}
