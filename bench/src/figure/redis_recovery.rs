//! From the end of a killed holder's lease, as the server has it, to the acquisition of the next.
//!
//! The holder is a process that is killed with -9 at any moment of its renewals; the waiter is another
//! process. Both report the wall clock of this machine, which the server uses too. The floor knows the
//! end and sleeps until then.

use super::redis::{client, server};
use crate::{
    Result,
    clock::Meter,
    floor::redis::{Setting, Textbook, connect, end_of},
    measure::{Plan, percentile},
    report::{Cell, Limit, Table},
};
use dlock_conformance::testbed::worker::{self, Job, Worker};
use redis::aio::MultiplexedConnection;
use std::time::{Duration, SystemTime};
use tokio::task::JoinSet;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, _) = server().await?;
    Textbook::load(&mut connect(&server.url(), Setting::Default).await?).await?;
    let mut lanes = JoinSet::new();
    let kills = plan.kills.div_ceil(LANES);
    for lane in 0..LANES.min(plan.kills) {
        lanes.spawn(kill_again_and_again(
            server.url(),
            format!("orders:{lane}"),
            kills,
        ));
    }
    let (mut recoveries, mut stolen) = (Vec::new(), 0);
    while let Some(lane) = lanes.join_next().await {
        for recovery in lane?? {
            if recovery.steal > MOST_STEAL {
                stolen += 1;
            } else {
                recoveries.push(recovery);
            }
        }
    }
    Ok(table(&recoveries, stolen))
}

/// The cost of one kill, in microseconds.
struct Recovery {
    /// From the end of the record to the acquisition of the next; a negative value would mean two
    /// holders.
    ours: i64,
    /// The same for the floor, right after.
    floor: i64,
    /// From the kill.
    since_kill: u64,
    steal: f64,
}

fn table(recoveries: &[Recovery], stolen: usize) -> Table {
    let columns = [
        "from the record's end",
        "p50 ms",
        "p99 ms",
        "most ms",
        "kills",
    ];
    let title = format!(
        "kill -9 of a holder with a renewed lease of {} ms",
        LEASE.as_millis()
    );
    let mut table = Table::new("redis-recovery", title, &columns);
    let mut ours = Vec::new();
    for (name, of) in [
        (
            "textbook lock, end known",
            (|one| one.floor) as fn(&Recovery) -> i64,
        ),
        ("dlock, waiting in another process", |one| one.ours),
    ] {
        ours = recoveries
            .iter()
            .map(|one| u64::try_from(of(one)).unwrap_or(0))
            .collect();
        row(&mut table, name, &mut ours);
    }
    let mut since: Vec<u64> = recoveries.iter().map(|one| one.since_kill).collect();
    row(&mut table, "dlock, from the kill", &mut since);
    let millis = |permille| percentile(&ours, permille) as f64 / 1e3;
    table.goal("p50 in ms after the lease", millis(500), Limit::AtMost(3.0));
    table.goal(
        "p99 in ms after the lease",
        millis(990),
        Limit::AtMost(20.0),
    );
    let early = recoveries.iter().filter(|one| one.ours < 0).count();
    table.goal("acquired before the end", early as f64, Limit::AtMost(0.0));
    table.note(format!(
        "left out for more than {:.0} % steal: {stolen} of {}",
        MOST_STEAL * 100.0,
        stolen + recoveries.len()
    ));
    table
}

fn row(table: &mut Table, name: &str, micros: &mut [u64]) {
    micros.sort_unstable();
    let millis = |permille| Cell::Number(percentile(micros, permille) as f64 / 1e3);
    let kills = Cell::Count(u64::try_from(micros.len()).unwrap_or_default());
    table.row([
        Cell::text(name),
        millis(500),
        millis(990),
        millis(1000),
        kills,
    ]);
}

async fn kill_again_and_again(url: String, name: String, kills: usize) -> Result<Vec<Recovery>> {
    let arguments = [("url", url.as_str()), ("name", name.as_str())];
    let mut connection = connect(&url, Setting::Default).await?;
    let floor = Textbook::new(&connection, &name);
    let mut waiter = Worker::spawn(WAIT, &arguments)?;
    waiter.expect(READY, PATIENCE).await?;
    let mut holder = Worker::spawn(HOLD, &arguments)?;
    let mut recoveries = Vec::new();
    for _ in 0..kills {
        holder.expect(READY, PATIENCE).await?;
        holder.send("go").await?;
        holder.expect(HELD, PATIENCE).await?;
        waiter.send("go").await?;
        // At any moment between two renewals, with the waiter in the queue.
        tokio::time::sleep(LEASE / 3 + LEASE.mul_f64(fastrand::f64() / 3.0)).await;
        let (killed, meter) = (wall(), Meter::start(&[]));
        holder.kill_9().await?;
        let end = settled_end(&mut connection, &format!("dlock:{{{name}}}")).await?;
        holder = Worker::spawn(HOLD, &arguments)?; // the next one starts while the others wait
        let got: u64 = waiter.expect(GOT, PATIENCE).await?.trim().parse()?;
        let got = Duration::from_micros(got);
        waiter.expect(FREE, PATIENCE).await?;
        recoveries.push(Recovery {
            ours: micros_after(got, end)?,
            since_kill: u64::try_from(got.saturating_sub(killed).as_micros())?,
            steal: meter.stop().steal,
            floor: floor_recovery(&floor).await?,
        });
    }
    Ok(recoveries)
}

/// A renewal in flight when its sender was killed may still arrive: the end is read after that.
async fn settled_end(connection: &mut MultiplexedConnection, record: &str) -> Result<Duration> {
    tokio::time::sleep(IN_FLIGHT).await;
    end_of(connection, record).await
}

/// A lock without renewals: a waiter sleeps until its end and takes it.
async fn floor_recovery(floor: &Textbook) -> Result<i64> {
    let end = loop {
        let taken = floor.take(FLOOR_LEASE).await?;
        taken.ok_or("the floor's lock was not free")?;
        // On a busy machine the lock may be over by now.
        if let Ok(end) = floor.end().await {
            break end;
        }
    };
    tokio::time::sleep(end.saturating_sub(wall())).await;
    let token = loop {
        if let Some(token) = floor.take(FLOOR_LEASE).await? {
            break token;
        }
    };
    let got = wall();
    // The same here: then nothing is left to release.
    drop(crate::work::Contender::release(floor, token).await);
    micros_after(got, end)
}

fn micros_after(got: Duration, end: Duration) -> Result<i64> {
    Ok(i64::try_from(got.as_micros())? - i64::try_from(end.as_micros())?)
}

fn wall() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// The job of a worker process.
pub(super) async fn job(job: &Job) -> Result {
    let dlock = client(job.arg("url")?).await?;
    let lock = dlock
        .lock(job.arg("name")?)?
        .lease(dlock_core::Lease::renewed(LEASE));
    let mut commands = worker::commands();
    worker::say(READY)?;
    while commands.recv().await.is_some() {
        let guard = lock.acquire().await?;
        if job.name == HOLD {
            worker::say(HELD)?;
            guard.lost().await; // until the kill
            return Err("a holder lost its lock".into());
        }
        worker::say(&format!("{GOT}{}", wall().as_micros()))?;
        guard.release().await?;
        worker::say(FREE)?;
    }
    Ok(())
}

/// Longer in a debug build, whose numbers mean nothing: no stall of the machine may end it.
const LEASE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 4 } else { 1 });
const FLOOR_LEASE: Duration = Duration::from_millis(300);
const IN_FLIGHT: Duration = Duration::from_millis(10);
/// Concurrent kills, each of another name: they spend their time waiting.
const LANES: usize = 3;
const MOST_STEAL: f64 = 0.15;
const PATIENCE: Duration = Duration::from_secs(20);

/// The jobs, and the prefixes of their reports.
pub(super) const HOLD: &str = "hold";
pub(super) const WAIT: &str = "wait";
const READY: &str = "ready";
const HELD: &str = "held";
const GOT: &str = "got ";
const FREE: &str = "free";
