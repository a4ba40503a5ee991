//! Figures over MongoDB: a replica set of one, every write confirmed by its majority and journal.

use super::{
    cycle::{Cycles, Of, Role, names},
    renewals::Renewals,
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::mongo::{Leases, SameCommands, TwoCommands, commands, connect, idle_hops, idle_writes},
    measure::{Plan, Sample},
    report::{Cell, Limit, Table},
    work::Probe,
};
use dlock_conformance::testbed::mongo::{Deployment, MongoServer};
use dlock_core::{Client, driver::DistributedLock};
use dlock_mongo::MongoDriver;
use std::sync::Arc;

pub(super) async fn cycle(mut plan: Plan) -> Result<Table> {
    plan.repetitions *= TURNS;
    let title = "acquire + release over MongoDB, one spawned task, majority and journal";
    let goal = ("p50 ÷ two bare commands", Limit::AtMost(1.05));
    cycles(&plan, 1, ("mongo-cycle", title), Of::Latency, goal).await
}

pub(super) async fn throughput(plan: Plan) -> Result<Table> {
    let title = "acquire + release over MongoDB, 128 tasks with 128 names, one client";
    let goal = ("cycles/s ÷ two bare commands", Limit::AtLeast(0.95));
    cycles(
        &plan,
        128,
        ("mongo-throughput", title),
        Of::Throughput,
        goal,
    )
    .await
}

/// The comparison is with the driver's own two commands; the least lock stands beside them, with its
/// ratio below.
async fn cycles(
    plan: &Plan,
    tasks: usize,
    named: (&'static str, &str),
    of: Of,
    (goal, limit): (&str, Limit),
) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let names = names(tasks);
    let mut cycles = Cycles::default();
    let databases = [
        (connect(&url, None).await?, "pool of 10"),
        (connect(&url, Some(100)).await?, "pool of 100"),
    ];
    for (database, pool) in &databases {
        let mut same = Vec::new();
        for name in &names {
            same.push(SameCommands::new(database, name).await);
        }
        cycles.enter(Role::Floor, format!("the same commands bare, {pool}"), same)?;
    }
    for (database, pool) in &databases {
        let least = names
            .iter()
            .map(|name| Ok(TwoCommands::new(database, name)));
        cycles.enter(Role::Beside, format!("the least two, {pool}"), least)?;
    }
    cycles.ours("mongo", driver(&url).await?, driver(&url).await?, &names)?;
    let mut done = cycles.run(plan, &[pid], named, of, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table.goal(goal, ratio, limit);
    let to_least = match of {
        Of::Latency => done.runs.ratio(
            DLOCK,
            |one| one.p50,
            |of| of(LEAST).p50.min(of(LEAST + 1).p50),
        ),
        Of::Throughput => done.runs.ratio(
            DLOCK,
            |one| one.per_second,
            |of| of(LEAST).per_second.max(of(LEAST + 1).per_second),
        ),
    };
    done.table
        .note(format!("dlock ÷ the least two: {}", Cell::from(to_least)));
    Ok(done.table)
}

/// By change stream, with polling beside it.
pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let asked = CallCounts::default();
    let counter = connect(&url, None).await?;
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new(move || {
            let counter = counter.clone();
            Box::pin(async move { commands(&counter).await })
        })),
        polls: Some(Arc::clone(&asked.polls)),
    };
    let mut ring = Ring::default();
    let client = Client::new(driver(&url).await?)?;
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    let name = "one client, 2 waiting tasks";
    let at = ring.enter(name, among(&vec![client.lock(name)?; 3], &probe));
    ring.over(at, &[alone]);
    let alone = floor(&mut ring, &url, 0);
    let mut against_alone = Vec::new();
    for waiters in [2, 64] {
        let among_as_many = floor(&mut ring, &url, waiters);
        for deaf in [false, true] {
            let how = if deaf { ", polling" } else { "" };
            let name = format!("{waiters} waiting clients{how}");
            let mut locks = Vec::new();
            for _ in 0..=waiters {
                let driver = Counted::new(driver(&url).await?, &asked);
                let driver = if deaf { driver.deaf() } else { driver };
                locks.push(Client::new(driver)?.lock(&name)?);
            }
            let at = ring.enter(&name, among(&locks, &probe));
            if deaf {
                ring.over(at, &among_as_many);
            } else {
                ring.within(at, &among_as_many, 1.1);
                against_alone.push((at, name));
            }
        }
    }
    let title = "hold 3–8 ms; asked: findAndModify, update and find; floor: idle change-stream hop + idle majority write, beside as many streams";
    let (mut table, runs) = ring.run(&plan, &[pid], ("mongo-handoff", title)).await?;
    for (at, name) in against_alone {
        let sum = |of: &dyn Fn(usize) -> Sample| alone.iter().map(|floor| of(*floor).p50).sum();
        let ratio = runs.ratio(at, |one| one.p50, sum);
        table.note(format!(
            "{name} ÷ the same on a server with no other stream: {}",
            Cell::from(ratio)
        ));
    }
    Ok(table)
}

/// The notification and the write, beside this number of other streams: without any, only the
/// notification, or neither.
fn floor(ring: &mut Ring, url: &str, beside: usize) -> [usize; 2] {
    let among = match beside {
        0 => String::new(),
        _ => format!(", {beside} streams beside"),
    };
    let of_hops = url.to_owned();
    let hop = ring.enter(format!("idle change-stream hop{among}"), move |span| {
        idle_hops(of_hops.clone(), beside, span)
    });
    let of_writes = url.to_owned();
    let write = ring.enter(format!("idle majority write{among}"), move |span| {
        idle_writes(of_writes.clone(), beside, span)
    });
    [hop, write]
}

pub(super) async fn renewals(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let driver_alone = driver(&url).await?;
    let size = driver_alone.capabilities().renew_batch;
    let leases = Leases::take(connect(&url, None).await?, plan.locks, size).await?;
    let leases = Arc::new(leases);
    let asked = CallCounts::default();
    let ours = Renewals {
        driver: driver_alone,
        client: Client::new(Counted::new(driver(&url).await?, &asked))?,
        asked,
        servers: vec![pid],
        most: 2.0,
    };
    let named = (
        "mongo-renewals",
        "bare update, batches of the driver's size",
    );
    ours.run(&plan, named, move || Arc::clone(&leases).renew())
        .await
}

/// A disk flushes the journal in one time or in twice that, for seconds on end. As over MySQL, turns
/// are short and many.
const TURNS: usize = 8;

/// Shared locks: see [`share`](super::share).
pub(super) async fn share(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(Client::new(driver(&server.url()).await?)?);
    }
    super::share::run(&plan, &[pid], ("mongo-share", "MongoDB"), clients).await
}

/// A server on a disk, started for the figure, and its process id.
async fn server() -> Result<(Arc<MongoServer>, u32)> {
    let start = || MongoServer::start(Deployment::ReplicaSet);
    let server = tokio::task::spawn_blocking(start).await??;
    let process = server.process().ok_or("a server without a process")?;
    let pid = process.pid();
    Ok((Arc::new(server), pid))
}

async fn driver(url: &str) -> Result<MongoDriver> {
    Ok(MongoDriver::connect(url).await?)
}

/// Indices of the contestants.
const LEAST: usize = 2;
const DLOCK: usize = 5;
