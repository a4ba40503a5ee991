//! The cost of renewing many locks, over any store.

use crate::{
    Result,
    clock::Meter,
    counted::CallCounts,
    measure::{Contestant, Plan, interleave},
    report::{Cell, Limit, Table},
    work::{Work, nanos},
};
use dlock_core::{
    Client, Clock, ErrorKind, Guard, HoldId, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, Lane, Renew, Renewed},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// One side of the comparison.
pub(super) struct Renewals<D> {
    pub(super) driver: D,
    /// Over a driver that counts renewals in [`CallCounts`].
    pub(super) client: Client,
    pub(super) asked: CallCounts,
    pub(super) servers: Vec<u32>,
    /// The most that the driver's round may take, in rounds of the floor.
    pub(super) most: f64,
}

impl<D: DistributedLock> Renewals<D> {
    /// `floor` renews as many leases once, in the simplest way.
    pub(super) async fn run<F, R>(
        self,
        plan: &Plan,
        (name, floor_name): (&'static str, &str),
        floor: F,
    ) -> Result<Table>
    where
        F: Fn() -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result> + Send + 'static,
    {
        let Self {
            client,
            asked,
            servers,
            most,
            driver,
        } = self;
        let driver = Arc::new(driver);
        let holds = Arc::new(held(&driver, plan.locks).await?);
        let least = *driver.capabilities().leases.start();
        let (locks, watched) = (plan.locks, servers.clone());
        let contestants = [
            Contestant::new(floor_name, move |span| rounds(span, locks, floor.clone())),
            Contestant::new("the driver, in the core's batches", move |span| {
                let (driver, holds) = (Arc::clone(&driver), Arc::clone(&holds));
                rounds(span, locks, move || {
                    renew(Arc::clone(&driver), Arc::clone(&holds))
                })
            }),
            Contestant::new("dlock: the watchdog's renewals", move |_| {
                kept(
                    client.clone(),
                    asked.clone(),
                    watched.clone(),
                    locks,
                    INTERVAL.max(least),
                )
            }),
        ];
        let runs = interleave(plan, &servers, &contestants).await?;
        let title = format!("{locks} held locks; CPU is of one lease");
        let mut table = Table::new(name, title, &COLUMNS);
        let mut lost = 0;
        for (at, contestant) in contestants.iter().enumerate() {
            let of_a_round = |cell: Cell| if at == WATCHDOG { Cell::None } else { cell };
            lost += runs.sum(at, |one| one.violations);
            table.row([
                Cell::text(&contestant.name),
                of_a_round(runs.of(at, |one| one.p50 / 1e3).into()),
                of_a_round(runs.ratio(at, |one| one.p50, |of| of(0).p50).into()),
                of_a_round(Cell::Number(runs.of(at, |one| one.per_second).median)),
                runs.of(at, |one| one.client).into(),
                runs.of(at, |one| one.server).into(),
                Cell::Count(runs.sum(at, |one| one.violations)),
            ]);
        }
        let round = runs.ratio(DRIVER, |one| one.p50, |of| of(0).p50).median;
        table.goal("one round ÷ floor", round, Limit::AtMost(most));
        let cpu = runs.ratio(WATCHDOG, |one| one.server, |of| of(0).server);
        table.note(format!(
            "server CPU of the watchdog's renewals ÷ floor: {}",
            Cell::from(cpu)
        ));
        table.goal("locks lost", lost as f64, Limit::AtMost(0.0));
        table.quiet(runs.quiet());
        Ok(table)
    }
}

/// Renews all leases repeatedly; an operation is one lease.
async fn rounds<F, R>(span: Duration, locks: u32, round: F) -> Result<Work>
where
    F: Fn() -> R + Send,
    R: Future<Output = Result> + Send,
{
    let mut work = Work::default();
    let began = Instant::now();
    while work.operations == 0 || began.elapsed() < span {
        let start = Instant::now();
        round().await?;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += u64::from(locks);
    }
    work.took = Some(began.elapsed());
    Ok(work)
}

/// Holds of the driver alone, without contention.
async fn held<D: DistributedLock>(driver: &Arc<D>, locks: u32) -> Result<Vec<Renew>> {
    let lease = Lease::fixed(LONG);
    let mut holds = Vec::new();
    let mut acquiring = JoinSet::new();
    for at in 0..locks {
        let driver = Arc::clone(driver);
        let name = LockName::new(format!("driver:lease:{at}"))?;
        let (owner, hold) = (
            Owner::random(&mut rand::rng()),
            HoldId::random(&mut rand::rng()),
        );
        acquiring.spawn(async move {
            // As the core does: an unanswered acquire is repeated for the same hold.
            let mut attempts = 1;
            loop {
                let give_up = Clock::boot().now() + Duration::from_secs(10);
                let request = Acquire::new(name.clone(), owner, hold, lease, give_up);
                match driver.acquire(&request).await {
                    Ok(Acquired::Granted(_)) => {
                        return Ok(Renew::new(name, owner, hold, Some(LONG)));
                    }
                    Ok(_) => return Err("an uncontended lock was refused".into()),
                    Err(_) if attempts < ATTEMPTS => attempts += 1,
                    Err(error) => return Result::<Renew>::Err(error.into()),
                }
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

/// One round in batches as the core makes them, lane by lane, all in flight at the same time.
async fn renew<D: DistributedLock>(driver: Arc<D>, holds: Arc<Vec<Renew>>) -> Result {
    let size = driver.capabilities().renew_batch.max(1);
    let mut lanes: BTreeMap<Lane, Vec<Renew>> = BTreeMap::new();
    for hold in &*holds {
        let lane = driver.lane(&hold.name);
        lanes.entry(lane).or_default().push(hold.clone());
    }
    let mut batches = JoinSet::new();
    for (lane, holds) in lanes {
        for batch in holds.chunks(size) {
            let (driver, batch) = (Arc::clone(&driver), batch.to_vec());
            batches.spawn(async move {
                let give_up = Clock::boot().now() + Duration::from_secs(10);
                driver.renew(lane, &batch, give_up).await
            });
        }
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

/// Holds all locks through a client and measures its watchdog for a whole renewal interval.
async fn kept(
    client: Client,
    asked: CallCounts,
    servers: Vec<u32>,
    locks: u32,
    interval: Duration,
) -> Result<Work> {
    let guards = guards(&client, locks, interval * 3).await?;
    tokio::time::sleep(interval).await; // until each hold was renewed in its turn
    let (renewed, meter) = (asked.renewed.load(Relaxed), Meter::start(&servers));
    tokio::time::sleep(interval).await;
    let seen = meter.stop();
    let renewed = asked.renewed.load(Relaxed) - renewed;
    let (mut lost, mut releasing) = (0, JoinSet::new());
    for guard in guards {
        if releasing.len() >= AT_ONCE
            && let Some(released) = releasing.join_next().await
        {
            lost += released??;
        }
        releasing.spawn(async {
            match guard.release().await.map_err(|error| (error.kind(), error)) {
                Err((ErrorKind::Lost | ErrorKind::NotHeld, _)) => Ok(1),
                // A slow disk is not what this measures: the renewal goes on, and the next repetition
                // waits for it.
                Ok(_) | Err((ErrorKind::Indeterminate, _)) => Ok(0),
                Err((_, error)) => Err(error),
            }
        });
    }
    while let Some(released) = releasing.join_next().await {
        lost += released??;
    }
    Ok(Work {
        operations: renewed,
        took: Some(seen.took),
        violations: lost,
        seen: Some(seen),
        ..Work::default()
    })
}

async fn guards(client: &Client, locks: u32, lease: Duration) -> Result<Vec<Guard>> {
    let mut guards = Vec::new();
    let mut acquiring = JoinSet::new();
    for at in 0..locks {
        let lock = client
            .lock(format!("core:lease:{at}"))?
            .lease(Lease::renewed(lease));
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

const COLUMNS: [&str; 7] = [
    "renewals",
    "ms a round",
    "÷ floor",
    "leases/s",
    "client CPU µs",
    "server CPU µs",
    "lost",
];
/// Acquisitions in flight at a time.
const AT_ONCE: usize = 128;
/// How often an acquire is tried on a machine that is busy with other work.
const ATTEMPTS: u32 = 10;
/// Longer than the whole figure.
const LONG: Duration = Duration::from_secs(3_000);
/// The watchdog's renewal interval, where the store's shortest lease is no longer. Longer in a debug build, whose
/// numbers mean nothing: no stall of the machine may end a lease.
const INTERVAL: Duration = Duration::from_secs(if cfg!(debug_assertions) { 2 } else { 1 });
/// Indices of the contestants.
const DRIVER: usize = 1;
const WATCHDOG: usize = 2;
