//! Figures over ZooKeeper: one server, which writes every change to its disk before it answers.

use super::{
    cycle::{Cycles, Of, Role, names},
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::zk::{Bare, Hop, Recipe, connect},
    measure::Plan,
    report::{Limit, Table},
    work::Probe,
};
use dlock_conformance::testbed::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use dlock_core::Client;
use dlock_zk::ZkDriver;
use std::sync::Arc;

pub(super) async fn cycle(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let names = names(1);
    let client = connect(&server.addr().to_string()).await?;
    let floor = [Ok(Bare::new(&client, &names[0]).await?)];
    let mut cycles = Cycles::default();
    cycles.enter(Role::Floor, "pipelined create + list, delete", floor)?;
    cycles.ours(
        "zk",
        driver(&server, "").await?,
        driver(&server, "").await?,
        &names,
    )?;
    let title = "acquire + release over ZooKeeper, one spawned task, forced sync";
    let named = ("zk-cycle", title);
    let mut done = cycles.run(&plan, &[pid], named, Of::Latency, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ create + list, delete", ratio, Limit::AtMost(1.05));
    Ok(done.table)
}

pub(super) async fn throughput(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let names = names(128);
    let client = connect(&server.addr().to_string()).await?;
    let (mut recipes, mut bare) = (Vec::new(), Vec::new());
    for name in &names {
        recipes.push(Ok(Recipe::new(&client, name).await?));
        bare.push(Ok(Bare::new(&client, name).await?));
    }
    let mut cycles = Cycles::default();
    cycles.enter(
        Role::Floor,
        "the crate's Client::lock, one session",
        recipes,
    )?;
    cycles.enter(Role::Beside, "create + list, delete, one session", bare)?;
    let four = "?dlock.sessions=4";
    let (alone, whole) = (driver(&server, four).await?, driver(&server, four).await?);
    cycles.ours("zk, 4 sessions", alone, whole, &names)?;
    let title = "acquire + release over ZooKeeper, 128 tasks with 128 names, forced sync";
    let named = ("zk-throughput", title);
    let mut done = cycles
        .run(&plan, &[pid], named, Of::Throughput, &[])
        .await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("cycles/s ÷ the crate's recipe", ratio, Limit::AtLeast(1.35));
    Ok(done.table)
}

pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let asked = CallCounts::default();
    let counted = Arc::clone(&server);
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new(move || {
            let server = Arc::clone(&counted);
            Box::pin(async move {
                let packets = move || server.figure("zk_packets_received");
                Ok(tokio::task::spawn_blocking(packets).await??)
            })
        })),
        polls: Some(Arc::clone(&asked.polls)),
    };
    let mut ring = Ring::default();
    let client = Client::new(driver(&server, "").await?)?;
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    let name = "one client, 2 waiting tasks";
    let at = ring.enter(name, among(&vec![client.lock(name)?; 3], &probe));
    ring.over(at, &[alone]);
    let hop = Arc::new(Hop::open(&server.addr().to_string()).await?);
    let hop = ring.enter("idle delete + watch event + list", move |span| {
        let hop = Arc::clone(&hop);
        async move { hop.idle(span).await }
    });
    for waiters in [2, 64] {
        let name = format!("{waiters} waiting clients");
        let mut locks = Vec::new();
        for _ in 0..=waiters {
            let driver = Counted::new(driver(&server, "").await?, &asked);
            locks.push(Client::new(driver)?.lock(&name)?);
        }
        let at = ring.enter(name, among(&locks, &probe));
        ring.within(at, &[hop], 1.05);
    }
    let title = "hold 3–8 ms, forced sync; asked: packets, with pings and sessions' proofs";
    let (table, _) = ring.run(&plan, &[pid], ("zk-handoff", title)).await?;
    Ok(table)
}

/// Shared locks: see [`share`](super::share).
pub(super) async fn share(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(Client::new(driver(&server, "").await?)?);
    }
    super::share::run(&plan, &[pid], ("zk-share", "ZooKeeper"), clients).await
}

/// A server on a disk, started for the figure, and its process id.
async fn server() -> Result<(Arc<ZooKeeperServer>, u32)> {
    let start = || {
        ZooKeeperServer::start(ZooKeeperOptions {
            force_sync: true,
            ..ZooKeeperOptions::default()
        })
    };
    let server = tokio::task::spawn_blocking(start).await??;
    let process = server.process().ok_or("a server without a process")?;
    let pid = process.pid();
    Ok((Arc::new(server), pid))
}

async fn driver(server: &ZooKeeperServer, settings: &str) -> Result<ZkDriver> {
    Ok(ZkDriver::connect(&format!("{}{settings}", server.url())).await?)
}
