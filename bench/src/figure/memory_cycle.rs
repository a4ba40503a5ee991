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
    let contestants = vec![
        Contestant::new("tokio::sync::Mutex", move |span| {
            alone(Arc::clone(&mutex), span)
        }),
        Contestant::new("memory driver alone", move |span| {
            alone(Arc::clone(&bare), span)
        }),
        Contestant::new("dlock over memory", move |span| {
            alone(Arc::clone(&whole), span)
        }),
        #[cfg(feature = "metrics")]
        {
            let counted = Arc::new(recorder::counted(lock)?);
            Contestant::new("dlock, counted", move |span| {
                alone(Arc::clone(&counted), span)
            })
        },
    ];
    let runs = interleave(&plan, &[], &contestants).await?;
    let counted = vec![
        tokio::task::spawn_blocking(|| allocations(async || Ok(Arc::new(Mutex::new(())))))
            .await??,
        tokio::task::spawn_blocking(|| {
            allocations(async || BareDriver::new(Arc::new(driver()), NAME))
        })
        .await??,
        tokio::task::spawn_blocking(|| allocations(async || lock())).await??,
        #[cfg(feature = "metrics")]
        tokio::task::spawn_blocking(|| allocations(async || recorder::counted(lock))).await??,
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
    if cfg!(feature = "metrics") {
        let cost = runs.ratio(COUNTED, |one| one.client, |of| of(DLOCK).client);
        let what = "CPU with a recorder of metrics ÷ without";
        table.goal(what, cost.median, Limit::AtMost(1.03));
        let more = counted[COUNTED] - counted[DLOCK];
        table.goal("allocations that metrics add", more, Limit::AtMost(0.0));
    }
    table.quiet(runs.quiet());
    table
}

fn driver() -> MemoryDriver {
    MemoryDriver::connect(&MemoryStore::new(Clock::boot()), MemoryConfig::default())
}

fn lock() -> Result<Lock> {
    Ok(Client::new(driver())?.lock(NAME)?)
}

/// The least that an exporter does: atomics for counters and gauges, and for histograms fixed buckets.
#[cfg(feature = "metrics")]
mod recorder {
    use metrics::{
        Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString,
        Unit,
    };
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    };

    /// What is made inside counts here.
    pub(super) fn counted<T>(make: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&Atomics, make)
    }

    struct Atomics;

    impl Recorder for Atomics {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::new(AtomicU64::new(0)))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(Arc::new(AtomicU64::new(0)))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::new(Buckets::default()))
        }
    }

    #[derive(Default)]
    struct Buckets([AtomicU64; BOUNDS.len() + 1]);

    /// Seconds.
    const BOUNDS: [f64; 9] = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1000.0];

    impl HistogramFn for Buckets {
        fn record(&self, value: f64) {
            let place = BOUNDS.partition_point(|bound| *bound < value);
            self.0[place].fetch_add(1, Relaxed);
        }
    }
}

const NAME: &str = "orders:42";
/// Indices of the contestants.
const DRIVER: usize = 1;
const DLOCK: usize = 2;
const COUNTED: usize = 3;
