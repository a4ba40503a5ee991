//! What it costs to keep many locks alive.

use super::{redis_client, redis_server};
use crate::{
    Result,
    clock::Meter,
    floor::redis::{Leases, Setting, Textbook, calls_of, connect},
    measure::{Contestant, Plan, interleave},
    report::{Cell, Limit, Table},
    work::{Work, nanos},
};
use dlock_core::{
    Acquire, Acquired, Client, Clock, DistributedLock, Guard, HoldId, Lane, Lease, LockName, Owner,
    Renew, Renewed,
};
use dlock_redis::RedisDriver;
use redis::aio::MultiplexedConnection;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = redis_server().await?;
    let url = server.url();
    let mut connection = connect(&url, Setting::Default).await?;
    Textbook::load(&mut connection).await?;
    let leases = Arc::new(Leases::take(connection.clone(), plan.locks).await?);
    let driver = Arc::new(RedisDriver::connect(&url).await?);
    let holds = Arc::new(held(&driver, plan.locks).await?);
    let client = redis_client(&url).await?;
    let locks = plan.locks;
    let contestants = [
        Contestant::new("bare script, 100 leases each", move |span| {
            let leases = Arc::clone(&leases);
            rounds(span, locks, move || {
                let leases = Arc::clone(&leases);
                async move { leases.renew(A_SCRIPT, IN_FLIGHT).await }
            })
        }),
        Contestant::new("redis driver, the core's batches", move |span| {
            let (driver, holds) = (Arc::clone(&driver), Arc::clone(&holds));
            rounds(span, locks, move || {
                renew(Arc::clone(&driver), Arc::clone(&holds))
            })
        }),
        Contestant::new("dlock: the watchdog's renewals", move |span| {
            kept(client.clone(), connection.clone(), pid, locks, span)
        }),
    ];
    let runs = interleave(&plan, Some(pid), &contestants).await?;
    let columns = [
        "renewals",
        "ms a round",
        "÷ floor",
        "leases/s",
        "client CPU µs",
        "server CPU µs",
        "lost",
    ];
    let title = format!("{locks} held locks; CPU is of one lease");
    let mut table = Table::new("renewals", title, &columns);
    let mut lost = 0;
    for (at, contestant) in contestants.iter().enumerate() {
        let by_round = at != WATCHDOG;
        let round = runs.of(at, |one| one.p50 / 1e3);
        let ratio = runs.ratio(at, |one| one.p50, |of| of(0).p50);
        lost += runs.sum(at, |one| one.violations);
        table.row([
            Cell::text(&contestant.name),
            if by_round { round.into() } else { Cell::None },
            if by_round { ratio.into() } else { Cell::None },
            if by_round {
                Cell::Number(runs.of(at, |one| one.per_second).median)
            } else {
                Cell::None
            },
            runs.of(at, |one| one.client).into(),
            runs.of(at, |one| one.server).into(),
            Cell::Count(runs.sum(at, |one| one.violations)),
        ]);
    }
    let cpu = runs.ratio(WATCHDOG, |one| one.server, |of| of(0).server);
    table.note(format!(
        "server CPU of the watchdog's renewals ÷ bare script: {}",
        Cell::from(cpu)
    ));
    table.goal("locks lost", lost as f64, Limit::AtMost(0.0));
    table.quiet(runs.quiet());
    Ok(table)
}

/// Renews all of them again and again; an operation is one lease.
async fn rounds<F, R>(span: Duration, locks: u32, round: F) -> Result<Work>
where
    F: Fn() -> R + Send,
    R: Future<Output = Result> + Send,
{
    let mut work = Work::default();
    let began = Instant::now();
    while began.elapsed() < span {
        let start = Instant::now();
        round().await?;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += u64::from(locks);
    }
    work.took = Some(began.elapsed());
    Ok(work)
}

/// Holds of the driver alone, which nobody else renews.
async fn held(driver: &Arc<RedisDriver>, locks: u32) -> Result<Vec<Renew>> {
    let lease = Lease::fixed(LONG)?;
    let mut holds = Vec::new();
    let mut acquiring = JoinSet::new();
    for at in 0..locks {
        let driver = Arc::clone(driver);
        let name = LockName::new(format!("driver:lease:{at}"))?;
        let (owner, hold) = (
            Owner::random(&mut rand::rng()),
            HoldId::random(&mut rand::rng()),
        );
        let give_up = Clock::boot().now() + Duration::from_secs(10);
        acquiring.spawn(async move {
            let request = Acquire::new(name.clone(), owner, hold, lease, give_up);
            match driver.acquire(&request).await? {
                Acquired::Granted(_) => Ok(Renew::new(name, owner, hold, Some(LONG))),
                _ => Result::<Renew>::Err("a lock that nobody else wants was refused".into()),
            }
        });
        if acquiring.len() >= AT_ONCE {
            holds.extend(acquiring.join_next().await.transpose()?.transpose()?);
        }
    }
    while let Some(hold) = acquiring.join_next().await {
        holds.push(hold??);
    }
    Ok(holds)
}

/// One round in batches as the core makes them, all on their way at once.
async fn renew(driver: Arc<RedisDriver>, holds: Arc<Vec<Renew>>) -> Result {
    let size = driver.capabilities().renew_batch.max(1);
    let mut batches = JoinSet::new();
    for batch in holds.chunks(size) {
        let (driver, batch) = (Arc::clone(&driver), batch.to_vec());
        batches.spawn(async move {
            let give_up = Clock::boot().now() + Duration::from_secs(10);
            driver.renew(Lane::default(), &batch, give_up).await
        });
    }
    while let Some(answers) = batches.join_next().await {
        for answer in answers?? {
            if !matches!(answer?, Renewed::Until { .. }) {
                return Err("a lock that was held was not there".into());
            }
        }
    }
    Ok(())
}

/// Holds them all through a client and watches what its watchdog does for a whole renewal interval.
async fn kept(
    client: Client,
    mut connection: MultiplexedConnection,
    server: u32,
    locks: u32,
    span: Duration,
) -> Result<Work> {
    let interval = span.clamp(SHORTEST, LONGEST);
    let guards = guards(&client, locks, interval * 3).await?;
    tokio::time::sleep(interval).await; // until all are renewed in turn
    let renewed = calls_of(&mut connection, RENEWS_BY).await?;
    let meter = Meter::start(Some(server));
    tokio::time::sleep(interval).await;
    let seen = meter.stop();
    let renewed = calls_of(&mut connection, RENEWS_BY).await? - renewed;
    let lost = guards.iter().filter(|guard| guard.check().is_err()).count();
    let mut releasing = JoinSet::new();
    for guard in guards {
        releasing.spawn(guard.release());
        if releasing.len() >= AT_ONCE {
            releasing.join_next().await.transpose()?.transpose()?;
        }
    }
    while let Some(released) = releasing.join_next().await {
        released??;
    }
    Ok(Work {
        operations: renewed,
        took: Some(seen.took),
        violations: u64::try_from(lost)?,
        seen: Some(seen),
        ..Work::default()
    })
}

async fn guards(client: &Client, locks: u32, lease: Duration) -> Result<Vec<Guard>> {
    let mut guards = Vec::new();
    let mut acquiring = JoinSet::new();
    for at in 0..locks {
        let lock = client.lock(format!("core:lease:{at}"))?.kept_lease(lease)?;
        acquiring.spawn(lock.acquire());
        if acquiring.len() >= AT_ONCE {
            guards.extend(acquiring.join_next().await.transpose()?.transpose()?);
        }
    }
    while let Some(guard) = acquiring.join_next().await {
        guards.push(guard??);
    }
    Ok(guards)
}

/// What the driver sends in one script, and how many on their way: the floor does the same.
const A_SCRIPT: usize = 100;
const IN_FLIGHT: usize = 4;
/// Acquisitions on their way at a time.
const AT_ONCE: usize = 128;
/// The command that the renewal script runs once for each lease, and nothing else in the meantime.
const RENEWS_BY: &str = "hmget";
/// Longer than the whole figure.
const LONG: Duration = Duration::from_secs(600);
/// Bounds of the interval of the watchdog's renewals.
const SHORTEST: Duration = Duration::from_millis(400);
const LONGEST: Duration = Duration::from_secs(1);
/// Its place in the list of contestants.
const WATCHDOG: usize = 2;
