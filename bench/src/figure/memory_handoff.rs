//! From the release of one task to the acquisition of the next, without a request to a store.

use super::ring::{Ring, among, by_oneself};
use crate::{Result, measure::Plan, report::Table, work::Probe};
use dlock_core::{Client, Clock};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use std::sync::Arc;
use tokio::sync::Mutex;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let store = MemoryStore::new(Clock::boot());
    let client = Client::new(MemoryDriver::connect(&store, MemoryConfig::default()))?;
    let mut ring = Ring::default();
    let unobserved = Probe::default();
    let mutex = Arc::new(Mutex::new(()));
    ring.enter(
        "tokio::sync::Mutex, 2 waiters",
        among(&vec![mutex; 3], &unobserved),
    );
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(client.lock("alone")?),
    );
    for waiters in WAITERS {
        let name = format!("one client, {waiters} waiting tasks");
        let locks = vec![client.lock(&name)?; waiters + 1];
        let at = ring.enter(name, among(&locks, &unobserved));
        ring.over(at, &[alone]);
    }
    let title = "hold 3–8 ms";
    let (table, _) = ring.run(&plan, &[], ("memory-handoff", title)).await?;
    Ok(table)
}

const WAITERS: [usize; 2] = [2, 16];
