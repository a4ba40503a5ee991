//! Figures over etcd: one member, which writes every change to its disk before it answers.

use super::{
    cycle::{Cycles, Of, Role, names},
    renewals::Renewals,
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::etcd::{Api, Hop, Leases, TwoTransactions, connect, lease},
    measure::Plan,
    report::{Limit, Table},
    work::{Probe, idle},
};
use dlock_conformance::testbed::EtcdServer;
use dlock_core::Client;
use dlock_etcd::EtcdDriver;
use std::sync::Arc;

/// The driver's two transactions and nothing else.
pub(super) async fn cycle(mut plan: Plan) -> Result<Table> {
    plan.repetitions *= TURNS;
    let title = "acquire + release over etcd, one spawned task";
    let goal = ("p50 ÷ the two transactions", Limit::AtMost(1.2));
    cycles(&plan, 1, ("etcd-cycle", title), Of::Latency, goal).await
}

/// Many tasks, each with its own lock.
pub(super) async fn throughput(plan: Plan) -> Result<Table> {
    let title = "acquire + release over etcd, 128 tasks with 128 names, one client";
    let goal = ("cycles/s ÷ the two transactions", Limit::AtLeast(1.0));
    let named = ("etcd-throughput", title);
    cycles(&plan, 128, named, Of::Throughput, goal).await
}

async fn cycles(
    plan: &Plan,
    tasks: usize,
    named: (&'static str, &str),
    of: Of,
    (goal, limit): (&str, Limit),
) -> Result<Table> {
    let (server, pid) = server().await?;
    let client = connect(&server.addr().to_string()).await?;
    let lease = lease(&client).await?;
    let names = names(tasks);
    let mut cycles = Cycles::default();
    let bare = names
        .iter()
        .map(|name| Ok(TwoTransactions::new(&client, lease, name)));
    cycles.enter(
        Role::Floor,
        "the two transactions alone, one connection",
        bare,
    )?;
    let mut api = Vec::new();
    for name in &names {
        api.push(Api::new(&client, name).await);
    }
    cycles.enter(Role::Beside, "the server's lock API, one connection", api)?;
    cycles.ours(
        "etcd",
        driver(&server).await?,
        driver(&server).await?,
        &names,
    )?;
    let mut done = cycles.run(plan, &[pid], named, of, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table.goal(goal, ratio, limit);
    Ok(done.table)
}

/// By watch.
pub(super) async fn handoff(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let addr = server.addr().to_string();
    let asked = CallCounts::default();
    let probe = Probe {
        servers: vec![pid],
        polls: Some(Arc::clone(&asked.polls)),
        ..Probe::default()
    };
    let mut ring = Ring::default();
    let client = Client::new(driver(&server).await?)?;
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    let name = "one client, 2 waiting tasks";
    let at = ring.enter(name, among(&vec![client.lock(name)?; 3], &probe));
    ring.over(at, &[alone]);
    let hop = Arc::new(Hop::open(&addr).await?);
    let transaction = Arc::new(hop.from.clone());
    let hop = ring.enter("idle delete to watch event", move |span| {
        let hop = Arc::clone(&hop);
        async move { hop.idle(span).await }
    });
    let transaction = ring.enter("idle transaction", move |span| {
        idle(Arc::clone(&transaction), span)
    });
    for waiters in [2, 64] {
        let name = format!("{waiters} waiting clients");
        let (mut locks, mut api) = (Vec::new(), Vec::new());
        for _ in 0..=waiters {
            let driver = Counted::new(driver(&server).await?, &asked);
            locks.push(Client::new(driver)?.lock(&name)?);
            api.push(Api::new(&connect(&addr).await?, &name).await?);
        }
        let at = ring.enter(&name, among(&locks, &probe));
        ring.within(at, &[hop, transaction], 1.3);
        let at = ring.enter(format!("the lock API, {name}"), among(&api, &probe));
        ring.over(at, &[hop, transaction]);
    }
    let title = "hold 3–8 ms; floor: idle delete to watch event + idle transaction";
    let (table, _) = ring.run(&plan, &[pid], ("etcd-handoff", title)).await?;
    Ok(table)
}

pub(super) async fn renewals(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let client = connect(&server.addr().to_string()).await?;
    let leases = Arc::new(Leases::take(&client, plan.locks).await?);
    let asked = CallCounts::default();
    let ours = Renewals {
        driver: driver(&server).await?,
        client: Client::new(Counted::new(driver(&server).await?, &asked))?,
        asked,
        servers: vec![pid],
        most: 2.0,
    };
    let named = ("etcd-renewals", "bare stream of keep-alives");
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
        clients.push(Client::new(driver(&server).await?)?);
    }
    super::share::run(&plan, &[pid], ("etcd-share", "etcd"), clients).await
}

/// A server on a disk, started for the figure with etcd's own time-outs, and its process id.
async fn server() -> Result<(Arc<EtcdServer>, u32)> {
    let own = ["--heartbeat-interval", "100", "--election-timeout", "1000"];
    let server = tokio::task::spawn_blocking(move || EtcdServer::start(&own)).await??;
    let process = server.process().ok_or("a server without a process")?;
    let pid = process.pid();
    Ok((Arc::new(server), pid))
}

async fn driver(server: &EtcdServer) -> Result<EtcdDriver> {
    Ok(EtcdDriver::connect(&server.url()).await?)
}

/// As over MySQL, turns are short and many.
const TURNS: usize = 8;
