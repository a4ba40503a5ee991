//! The figures over MongoDB: a replica set of one, every write confirmed by its majority and journal.

use super::{
    cycle::{Cycles, Of, Role, names},
    renewals::Renewals,
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{Asked, Counted},
    floor::mongo::{Hop, Leases, TwoCommands, commands, connect, idle_writes},
    measure::Plan,
    report::{Limit, Table},
    work::Probe,
};
use dlock_conformance::testbed::mongo::{Deployment, MongoServer};
use dlock_core::{Client, DistributedLock};
use dlock_mongo::MongoDriver;
use std::sync::Arc;

pub(super) async fn cycle(plan: Plan) -> Result<Table> {
    let title = "acquire + release over MongoDB, one spawned task, majority and journal";
    let mut done = cycles(&plan, 1, ("mongo-cycle", title), Of::Latency).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ two bare commands", ratio, Limit::AtMost(1.05));
    Ok(done.table)
}

pub(super) async fn throughput(plan: Plan) -> Result<Table> {
    let title = "acquire + release over MongoDB, 128 tasks with 128 names, one client";
    let mut done = cycles(&plan, 128, ("mongo-throughput", title), Of::Throughput).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("cycles/s ÷ two bare commands", ratio, Limit::AtLeast(0.95));
    Ok(done.table)
}

async fn cycles(
    plan: &Plan,
    tasks: usize,
    named: (&'static str, &str),
    of: Of,
) -> Result<super::cycle::Cycled> {
    let (server, pid) = server().await?;
    let url = server.url();
    let names = names(tasks);
    let mut cycles = Cycles::default();
    for (pool, shown) in [(None, "pool of 10"), (Some(100), "pool of 100")] {
        let database = connect(&url, pool).await?;
        let floor = names
            .iter()
            .map(|name| Ok(TwoCommands::new(&database, name)));
        cycles.enter(Role::Floor, format!("two bare commands, {shown}"), floor)?;
    }
    cycles.ours("mongo", driver(&url).await?, driver(&url).await?, &names)?;
    cycles.run(plan, &[pid], named, of, &[]).await
}

/// By change stream, and by looking beside it.
pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let asked = Asked::default();
    let counter = connect(&url, None).await?;
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new(move || {
            let counter = counter.clone();
            Box::pin(async move { commands(&counter).await })
        })),
        looks: Some(Arc::clone(&asked.looks)),
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
    let writer = connect(&url, None).await?;
    let write = ring.enter("idle majority write", move |span| {
        idle_writes(writer.clone(), span)
    });
    let hop = Arc::new(Hop::open(&url).await?);
    let hop = ring.enter("idle change-stream hop", move |span| {
        let hop = Arc::clone(&hop);
        async move { hop.idle(span).await }
    });
    for (waiters, deaf) in [(2, false), (64, false), (2, true), (64, true)] {
        let how = if deaf { ", looking" } else { "" };
        let name = format!("{waiters} waiting clients{how}");
        let mut locks = Vec::new();
        for _ in 0..=waiters {
            let driver = Counted::new(driver(&url).await?, &asked);
            let driver = if deaf { driver.deaf() } else { driver };
            locks.push(Client::new(driver)?.lock(&name)?);
        }
        let at = ring.enter(name, among(&locks, &probe));
        if deaf {
            ring.over(at, &[hop, write]);
        } else {
            ring.within(at, &[hop, write], 1.1);
        }
    }
    let title = "hold 3–8 ms; asked: findAndModify, update and find; floor: idle change-stream hop + idle majority write";
    let (table, _) = ring.run(&plan, &[pid], ("mongo-handoff", title)).await?;
    Ok(table)
}

pub(super) async fn renewals(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let driver_alone = driver(&url).await?;
    let size = driver_alone.capabilities().renew_batch;
    let leases = Leases::take(connect(&url, None).await?, plan.locks, size).await?;
    let leases = Arc::new(leases);
    let asked = Asked::default();
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

/// A server of our own on a disk, and its process id.
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
