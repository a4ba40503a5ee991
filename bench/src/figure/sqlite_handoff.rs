//! Hand-offs over SQLite: between tasks of one client, and between processes, which must also be idle
//! while they wait.

use super::{
    processes::Processes,
    ring::{Ring, among, by_oneself},
    sqlite::Files,
};
use crate::{
    Result,
    measure::Plan,
    report::{Limit, Table},
    work::Probe,
};
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let files = Files::new()?;
    let shared = files.path("processes.db");
    let client = files.client("tasks.db").await?;
    let mut ring = Ring::default();
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    for waiters in TASKS {
        let name = format!("one client, {waiters} waiting tasks");
        let locks = vec![client.lock(&name)?; waiters + 1];
        let at = ring.enter(name, among(&locks, &Probe::default()));
        ring.within(at, &[alone], 1.1);
    }
    let shared = shared.to_str().ok_or("a temporary folder without UTF-8")?;
    let two = Arc::new(Processes::start(2, shared, "two").await?);
    let many = Arc::new(Processes::start(plan.processes, shared, "many").await?);
    let pair = Arc::clone(&two);
    let at = ring.enter("two processes", move |span| {
        let pair = Arc::clone(&pair);
        async move { pair.hand_off(span).await }
    });
    ring.over(at, &[alone]);
    ring.within_millis(at, 3.0);
    let crowd = Arc::clone(&many);
    let name = format!("{} processes", plan.processes);
    let at = ring.enter(name, move |span| {
        let crowd = Arc::clone(&crowd);
        async move { crowd.hand_off(span).await }
    });
    ring.over(at, &[alone]);

    let pids = [two.pids(), many.pids()].concat();
    let title = "hold 3–8 ms, file without a server; server CPU: of the processes";
    let (mut table, _) = ring.run(&plan, &pids, ("sqlite-handoff", title)).await?;
    let client = files.client("processes.db").await?;
    let idle = many.idle(&client, "many", plan.seconds / 6).await?;
    table.goal(
        format!(
            "{} waiting processes, nothing happens: % of a core",
            plan.processes
        ),
        idle * 100.0,
        Limit::AtMost(2.0),
    );
    Ok(table)
}

/// Waiting tasks of one client.
const TASKS: [usize; 2] = [2, 16];
