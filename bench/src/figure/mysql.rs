//! Figures over MariaDB: durable, one row per name, no push.

use super::{
    cycle::{Cycled, Cycles, Of, Role, names},
    renewals::Renewals,
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::mysql::{Leases, Over, Statements, TwoStatements, connect, prepare, questions},
    measure::{Plan, Sample},
    report::{Cell, Limit, Table},
    work::{Contender, Probe},
};
use dlock_conformance::testbed::mariadb::{MariadbOptions, MariadbServer};
use dlock_core::Client;
use dlock_mysql::MysqlDriver;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{sync::Mutex, task::JoinSet};

/// The driver's two statements and nothing else, on one connection.
pub(super) async fn cycle(mut plan: Plan) -> Result<Table> {
    plan.repetitions *= TURNS;
    let (server, pid) = server().await?;
    let url = server.url();
    let names = names(1);
    prepare(&url, &names).await?;
    let connections = [Over::one(&url).await?, Over::one(&url).await?];
    let cycles = cycles(&url, &names, "one connection", connections).await?;
    let title = "acquire + release over MariaDB, one spawned task, log flushed at each commit";
    let named = ("mysql-cycle", title);
    let mut done = cycles.run(&plan, &[pid], named, Of::Latency, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ the two statements", ratio, Limit::AtMost(1.05));
    note_thin(&mut done, |one| one.p50);
    let each = statements_of_a_cycle(&url).await?;
    for (limit, sign) in [(Limit::AtMost(2.0), "most"), (Limit::AtLeast(2.0), "least")] {
        let what = format!("statements per cycle, at {sign}");
        done.table.goal(what, each, limit);
    }
    Ok(done.table)
}

/// As the server counts them.
async fn statements_of_a_cycle(url: &str) -> Result<f64> {
    let lock = Client::new(driver(url).await?)?.lock("counted")?;
    let cycles = async |count: u32| -> Result {
        for _ in 0..count {
            let held = Contender::acquire(&lock).await?;
            Contender::release(&lock, held).await?;
        }
        Ok(())
    };
    cycles(20).await?; // creates the table, the row and the connections
    let counter = Mutex::new(connect(url).await?);
    let mut least = u64::MAX;
    // A sweep in the background begins at one grant in 1,024: into most of these it does not fall.
    for _ in 0..3 {
        let before = questions(&counter).await?;
        cycles(COUNTED).await?;
        least = least.min(questions(&counter).await? - before - 1);
    }
    Ok(least as f64 / f64::from(COUNTED))
}

/// Many tasks, each with its own lock.
pub(super) async fn throughput(plan: Plan, tasks: usize) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let names = names(tasks);
    prepare(&url, &names).await?;
    let pools = [Over::pool(&url, 16).await?, Over::pool(&url, 16).await?];
    let cycles = cycles(&url, &names, "sqlx::Pool of 16", pools).await?;
    let title = format!("acquire + release over MariaDB, {tasks} tasks with names of their own");
    let name = match tasks {
        16 => "mysql-throughput-16",
        _ => "mysql-throughput",
    };
    let mut done = cycles
        .run(&plan, &[pid], (name, &title), Of::Throughput, &[])
        .await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("cycles/s ÷ pool", ratio, Limit::AtLeast(1.4));
    note_thin(&mut done, |one| one.per_second);
    Ok(done.table)
}

/// The driver's statements, the thin ones, the driver alone, and the driver with the core: one task for
/// each name.
async fn cycles(url: &str, names: &[String], over: &str, ways: [Over; 2]) -> Result<Cycles> {
    let mut cycles = Cycles::default();
    let kinds = [
        (Role::Floor, "the two statements alone", Statements::Same),
        (Role::Beside, "thin ones", Statements::Thin),
    ];
    for ((role, which, statements), way) in kinds.into_iter().zip(ways) {
        let each = names
            .iter()
            .map(|name| Ok(TwoStatements::new(&way, name, statements)));
        cycles.enter(role, format!("{which}, {over}"), each)?;
    }
    cycles.ours("mysql", driver(url).await?, driver(url).await?, names)?;
    Ok(cycles)
}

/// The cost of dlock compared with the least that such a lock could be: dlock is the last contestant,
/// the thin statements are the second.
fn note_thin(done: &mut Cycled, number: fn(&Sample) -> f64) {
    let ratio = done.runs.ratio(DLOCK, number, |of| number(&of(THIN)));
    done.table.note(format!(
        "dlock ÷ the thin statements: {}",
        Cell::from(ratio)
    ));
}

/// Hand-offs by polling between clients, and locally inside one client.
pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let asked = CallCounts::default();
    let counter = Arc::new(Mutex::new(connect(&url).await?));
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new(move || {
            let counter = Arc::clone(&counter);
            Box::pin(async move { questions(&counter).await })
        })),
        polls: Some(Arc::clone(&asked.polls)),
    };
    let mut ring = Ring::default();
    let client = Client::new(driver(&url).await?)?;
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    for waiters in [2, 16] {
        let name = format!("one client, {waiters} waiting tasks");
        let locks = vec![client.lock(&name)?; waiters + 1];
        let at = ring.enter(name, among(&locks, &probe));
        ring.within(at, &[alone], 1.1);
    }
    for waiters in [2, 64] {
        let name = format!("{waiters} waiting clients, polling");
        let mut locks = Vec::new();
        for _ in 0..=waiters {
            let driver = Counted::new(driver(&url).await?, &asked);
            locks.push(Client::new(driver)?.lock(&name)?);
        }
        let at = ring.enter(name, among(&locks, &probe));
        ring.over(at, &[alone]);
        ring.within_millis(at, POLL_CAP.as_secs_f64() * 1e3 * 0.6);
    }
    let title = "hold 3–8 ms; asked: statements; poll cap 100 ms";
    let (mut table, _) = ring.run(&plan, &[pid], ("mysql-handoff", title)).await?;
    let polls = polls_per_second(&url, plan.seconds / 20).await?;
    table.goal(
        "polls a second of one client with 16 waiting tasks",
        polls,
        Limit::AtMost(2.0 / POLL_CAP.as_secs_f64()),
    );
    Ok(table)
}

/// However many tasks of a client wait for one name, one of them polls: on average after three quarters
/// of the poll interval, at the earliest after half of it.
async fn polls_per_second(url: &str, span: Duration) -> Result<f64> {
    let asked = CallCounts::default();
    let client = Client::new(Counted::new(driver(url).await?, &asked))?;
    let held = Client::new(driver(url).await?)?.lock("polled")?;
    let held = held.acquire().await?;
    let mut waiting = JoinSet::new();
    for _ in 0..16 {
        waiting.spawn(client.lock("polled")?.acquire());
    }
    tokio::time::sleep(POLL_CAP * 5).await; // past the first quick polls
    let (before, began) = (asked.polls.load(Relaxed), Instant::now());
    tokio::time::sleep(span.max(POLL_CAP * 4)).await;
    let polls = (asked.polls.load(Relaxed) - before) as f64 / began.elapsed().as_secs_f64();
    waiting.shutdown().await;
    held.release().await?;
    Ok(polls)
}

pub(super) async fn renewals(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let leases = Arc::new(Leases::take(&url, plan.locks, A_STATEMENT, CONNECTIONS).await?);
    let asked = CallCounts::default();
    let ours = Renewals {
        driver: driver(&url).await?,
        client: Client::new(Counted::new(driver(&url).await?, &asked))?,
        asked,
        servers: vec![pid],
        most: 2.0,
    };
    let named = (
        "mysql-renewals",
        "bare statement, 512 leases each, 4 connections",
    );
    ours.run(&plan, named, move || {
        let leases = Arc::clone(&leases);
        async move { leases.renew().await }
    })
    .await
}

/// Shared locks: see [`share`](super::share).
pub(super) async fn share(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(Client::new(driver(&server.url()).await?)?);
    }
    super::share::run(&plan, &[pid], ("mysql-share", "MariaDB"), clients).await
}

/// A server on a disk, started for the figure, and its process id.
async fn server() -> Result<(Arc<MariadbServer>, u32)> {
    let start = || MariadbServer::start(MariadbOptions::default());
    let server = tokio::task::spawn_blocking(start).await??;
    let process = server.process().ok_or("a server without a process")?;
    let pid = process.pid();
    Ok((Arc::new(server), pid))
}

async fn driver(url: &str) -> Result<MysqlDriver> {
    Ok(MysqlDriver::connect(url).await?)
}

const COUNTED: u32 = 200;
/// A disk flushes the log in one time or in twice that, for seconds on end. The more turns there are,
/// the shorter they are, so that both times affect every contestant.
const TURNS: usize = 8;
/// Indices of the contestants of a cycle.
const THIN: usize = 1;
const DLOCK: usize = 3;
/// The default of `dlock.poll`.
const POLL_CAP: Duration = Duration::from_millis(100);
/// How much the driver sends in one statement, and over how many connections at most: the floor does
/// the same.
const A_STATEMENT: usize = 512;
const CONNECTIONS: usize = 4;
