//! Figures over PostgreSQL: durable, one row per name, woken by LISTEN and NOTIFY.

use super::{
    cycle::{Cycles, Of, Role, names},
    renewals::Renewals,
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::postgres::{Advisory, Hop, Leases, Over, TwoStatements, database, listeners, prepare},
    measure::Plan,
    report::{Limit, Table},
    work::{Probe, idle},
};
use dlock_conformance::testbed::PostgresServer;
use dlock_core::{Client, driver::DistributedLock};
use dlock_postgres::PostgresDriver;
use std::sync::Arc;

/// The driver's two statements and nothing else, on one connection.
pub(super) async fn cycle(mut plan: Plan) -> Result<Table> {
    plan.repetitions *= TURNS;
    let (server, pid) = server().await?;
    let url = server.url();
    let over = (Over::one(&url).await?, "one connection");
    let cycles = cycles(&url, &names(1), over).await?;
    let title = "acquire + release over PostgreSQL, one spawned task, log flushed at each commit";
    let named = ("postgres-cycle", title);
    let mut done = cycles.run(&plan, &[pid], named, Of::Latency, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ the two statements", ratio, Limit::AtMost(1.15));
    Ok(done.table)
}

/// Many tasks, each with its own lock.
pub(super) async fn throughput(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let over = (Over::pool(&url, 16).await?, "sqlx::Pool of 16");
    let cycles = cycles(&url, &names(128), over).await?;
    let title = "acquire + release over PostgreSQL, 128 tasks with 128 names, one client";
    let named = ("postgres-throughput", title);
    let mut done = cycles
        .run(&plan, &[pid], named, Of::Throughput, &[])
        .await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("cycles/s ÷ pool", ratio, Limit::AtLeast(2.0));
    Ok(done.table)
}

/// The driver's statements, advisory locks, the driver alone, and the driver with the core: one task for
/// each name.
async fn cycles(url: &str, names: &[String], (over, which): (Over, &str)) -> Result<Cycles> {
    prepare(url).await?;
    let mut cycles = Cycles::default();
    let floor = names.iter().map(|name| Ok(TwoStatements::new(&over, name)));
    cycles.enter(
        Role::Floor,
        format!("the two statements alone, {which}"),
        floor,
    )?;
    let mut advisory = Vec::new();
    for name in names {
        advisory.push(Advisory::new(url, name).await);
    }
    let name = "sqlx's PgAdvisoryLock, a session each";
    cycles.enter(Role::Beside, name, advisory)?;
    cycles.ours("postgres", driver(url).await?, driver(url).await?, names)?;
    Ok(cycles)
}

/// By notification, also in a database with many listeners.
pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let crowded = database(&url, "crowded").await?;
    let _listeners = listeners(&crowded, 100).await?;
    let mut ring = Ring::default();
    let client = Client::new(driver(&url).await?)?;
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    let asked = CallCounts::default();
    let probe = Probe {
        servers: vec![pid],
        polls: Some(Arc::clone(&asked.polls)),
        ..Probe::default()
    };
    let name = "one client, 2 waiting tasks";
    let at = ring.enter(name, among(&vec![client.lock(name)?; 3], &probe));
    ring.over(at, &[alone]);
    for (url, beside) in [(&url, ""), (&crowded, ", 100 idle listeners")] {
        prepare(url).await?;
        let commit = Arc::new(TwoStatements::new(&Over::one(url).await?, "idle"));
        let commit = ring.enter(format!("idle commit{beside}"), move |span| {
            idle(Arc::clone(&commit), span)
        });
        let hop = Arc::new(Hop::open(url).await?);
        let hop = ring.enter(format!("idle notify hop{beside}"), move |span| {
            let hop = Arc::clone(&hop);
            async move { hop.idle(span).await }
        });
        for waiters in [2, 64] {
            let name = format!("{waiters} waiting clients{beside}");
            let mut locks = Vec::new();
            for _ in 0..=waiters {
                let driver = Counted::new(driver(url).await?, &asked);
                locks.push(Client::new(driver)?.lock(&name)?);
            }
            let at = ring.enter(&name, among(&locks, &probe));
            ring.within(at, &[commit, hop], 2.0);
            let mut advisory = Vec::new();
            for _ in 0..=waiters {
                advisory.push(Advisory::new(url, &name).await?);
            }
            let at = ring.enter(format!("PgAdvisoryLock, {name}"), among(&advisory, &probe));
            ring.over(at, &[commit, hop]);
        }
    }
    let title = "hold 3–8 ms; floor: idle commit + idle notify hop";
    let (table, _) = ring.run(&plan, &[pid], ("postgres-handoff", title)).await?;
    Ok(table)
}

pub(super) async fn renewals(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let driver_alone = driver(&url).await?;
    let size = driver_alone.capabilities().renew_batch;
    let leases = Arc::new(Leases::take(&url, plan.locks, size, CONNECTIONS).await?);
    let asked = CallCounts::default();
    let ours = Renewals {
        driver: driver_alone,
        client: Client::new(Counted::new(driver(&url).await?, &asked))?,
        asked,
        servers: vec![pid],
        most: 2.0,
    };
    let named = (
        "postgres-renewals",
        "bare statement, batches of the driver's size, 4 connections",
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
    super::share::run(&plan, &[pid], ("postgres-share", "PostgreSQL"), clients).await
}

/// A server on a disk, started for the figure, and its process id. The testbed's default is not to flush.
async fn server() -> Result<(Arc<PostgresServer>, u32)> {
    let start = || PostgresServer::start(&["fsync=on"]);
    let server = tokio::task::spawn_blocking(start).await??;
    let process = server.process().ok_or("a server without a process")?;
    let pid = process.pid();
    Ok((Arc::new(server), pid))
}

async fn driver(url: &str) -> Result<PostgresDriver> {
    Ok(PostgresDriver::connect(url).await?)
}

/// As over MySQL, turns are short and many.
const TURNS: usize = 8;
/// As many as the driver has for renewals.
const CONNECTIONS: usize = 4;
