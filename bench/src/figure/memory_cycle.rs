//! The cost of the core itself: a store that answers at once, without contention.

use crate::{
    Result,
    measure::{Contestant, Plan, Runs, interleave},
    report::{Cell, Limit, Table},
    work::{BareDriver, allocations, alone},
};
use dlock_core::{Client, Clock, Lock};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use std::sync::Arc;
use tokio::sync::Mutex;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let mutex = Arc::new(Arc::new(Mutex::new(())));
    let bare = Arc::new(BareDriver::new(Arc::new(driver()), NAME)?);
    let whole = Arc::new(lock()?);
    let contestants = [
        Contestant::new("tokio::sync::Mutex", move |span| {
            alone(Arc::clone(&mutex), span)
        }),
        Contestant::new("memory driver alone", move |span| {
            alone(Arc::clone(&bare), span)
        }),
        Contestant::new("dlock over memory", move |span| {
            alone(Arc::clone(&whole), span)
        }),
    ];
    let runs = interleave(&plan, &[], &contestants).await?;
    let counted = [
        tokio::task::spawn_blocking(|| allocations(async || Ok(Arc::new(Mutex::new(())))))
            .await??,
        tokio::task::spawn_blocking(|| {
            allocations(async || BareDriver::new(Arc::new(driver()), NAME))
        })
        .await??,
        tokio::task::spawn_blocking(|| allocations(async || lock())).await??,
    ];
    Ok(table(&contestants, &runs, &counted))
}

fn table(contestants: &[Contestant], runs: &Runs, counted: &[f64]) -> Table {
    let columns = [
        "cycle",
        "p50 µs",
        "p99 µs",
        "÷ driver",
        "client CPU µs",
        "allocations",
    ];
    let mut table = Table::new(
        "memory-cycle",
        "acquire + release, one spawned task",
        &columns,
    );
    for (at, contestant) in contestants.iter().enumerate() {
        table.row([
            Cell::text(&contestant.name),
            runs.of(at, |one| one.p50).into(),
            runs.of(at, |one| one.p99).into(),
            runs.ratio(at, |one| one.p50, |of| of(DRIVER).p50).into(),
            runs.of(at, |one| one.client).into(),
            Cell::Number(counted[at]),
        ]);
    }
    let p50 = runs.of(DLOCK, |one| one.p50).median;
    table.goal("p50 of the whole cycle in µs", p50, Limit::AtMost(5.0));
    table.quiet(runs.quiet());
    table
}

fn driver() -> MemoryDriver {
    MemoryDriver::connect(&MemoryStore::new(Clock::boot()), MemoryConfig::default())
}

fn lock() -> Result<Lock> {
    Ok(Client::new(driver())?.lock(NAME)?)
}

const NAME: &str = "orders:42";
/// Indices of the contestants.
const DRIVER: usize = 1;
const DLOCK: usize = 2;
