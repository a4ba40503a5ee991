//! Shared locks over any store: what a reader pays, how readers enter together, and how long a writer waits.

use crate::{
    Result,
    measure::{Contestant, Plan, Sample, interleave},
    report::{Cell, Limit, Table},
    work::{Work, alone, nanos},
};
use dlock_core::Client;
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{sync::Barrier, task::JoinSet, time::sleep};

/// Eight clients of one store.
pub(super) async fn run(
    plan: &Plan,
    servers: &[u32],
    (name, store): (&'static str, &str),
    clients: Vec<Client>,
) -> Result<Table> {
    let clients: Arc<[Client]> = clients.into();
    let first = clients.first().ok_or("no client")?;
    let exclusive = Arc::new(first.lock("cycle")?);
    let read = Arc::new(first.rw_lock("shared cycle")?.read());
    let all = Arc::clone(&clients);
    let beside = Arc::clone(&clients);
    let contestants = [
        Contestant::new("exclusive cycle", move |span| {
            alone(Arc::clone(&exclusive), span)
        }),
        Contestant::new("read cycle", move |span| alone(Arc::clone(&read), span)),
        Contestant::new(
            format!("until one of {READERS} readers is in"),
            move |span| enter_together(Arc::clone(&all), span),
        ),
        Contestant::new("a writer's wait among 16 readers of 5 ms", move |span| {
            write_among_readers(Arc::clone(&beside), span)
        }),
    ];
    let runs = interleave(plan, servers, &contestants).await?;
    let title = format!("shared locks over {store}");
    let mut table = Table::new(name, &title, &COLUMNS);
    let mut violations = 0;
    for (at, contestant) in contestants.iter().enumerate() {
        violations += runs.sum(at, |one| one.violations);
        table.row([
            Cell::text(&contestant.name),
            runs.of(at, p50).into(),
            runs.of(at, |one| one.p99).into(),
            runs.ratio(at, p50, |of| of(0).p50).into(),
            Cell::Count(runs.sum(at, |one| one.operations)),
        ]);
    }
    let ratio = runs.ratio(1, p50, |of| of(0).p50).median;
    table.goal("read ÷ exclusive cycle, p50", ratio, Limit::AtMost(1.15));
    let p99 = |one: &Sample| one.p99;
    let last = runs.ratio(2, p99, |of| of(0).p50 * READERS as f64).median;
    let cycles = "the last reader ÷ as many exclusive cycles";
    table.goal(cycles, last, Limit::AtMost(1.0));
    if name == "redis-share" {
        let last = runs.of(2, p99).median;
        table.goal("the last reader, µs", last, Limit::AtMost(5_000.0));
    }
    table.goal(
        "a writer beside others",
        violations as f64,
        Limit::AtMost(0.0),
    );
    table.quiet(runs.quiet());
    Ok(table)
}

/// Readers of all clients wait behind a writer: the time from its release until each is inside, while all stay.
async fn enter_together(clients: Arc<[Client]>, span: Duration) -> Result<Work> {
    let mut work = Work::default();
    let began = Instant::now();
    while began.elapsed() < span || work.operations == 0 {
        let writer = clients[0].lock("behind a writer")?.acquire().await?;
        let (released, inside) = (Arc::new(OnceLock::new()), Arc::new(Barrier::new(READERS)));
        let mut readers = JoinSet::new();
        for at in 0..READERS {
            let lock = clients[at % clients.len()]
                .rw_lock("behind a writer")?
                .read();
            let (released, inside) = (Arc::clone(&released), Arc::clone(&inside));
            readers.spawn(async move {
                let guard = lock.acquire().await?;
                // `None`: beside the writer.
                let took = released.get().map(Instant::elapsed);
                inside.wait().await; // all of them hold the lock now
                let held = took.is_some() && guard.check().is_ok();
                let took = took.unwrap_or_default();
                guard.release().await?;
                Ok::<_, dlock_core::Error>((took, held))
            });
        }
        sleep(QUEUED).await;
        released.get_or_init(Instant::now);
        writer.release().await?;
        while let Some(reader) = readers.join_next().await {
            let (took, held) = reader??;
            work.latencies.push(nanos(took));
            work.operations += 1;
            work.violations += u64::from(!held);
        }
    }
    Ok(work)
}

/// Sixteen readers in loops, and one writer: how long it waits.
async fn write_among_readers(clients: Arc<[Client]>, span: Duration) -> Result<Work> {
    let mut work = Work::default();
    let (inside, is_over) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut readers = JoinSet::new();
    for at in 0..16 {
        let lock = clients[at % clients.len()].rw_lock("looped")?.read();
        let (inside, is_over) = (Arc::clone(&inside), Arc::clone(&is_over));
        readers.spawn(async move {
            while !is_over.load(SeqCst) {
                let guard = lock.acquire().await?;
                inside.fetch_add(1, SeqCst);
                sleep(READ).await;
                inside.fetch_sub(1, SeqCst);
                guard.release().await?;
            }
            Ok::<_, dlock_core::Error>(())
        });
    }
    let lock = clients[0].rw_lock("looped")?.write();
    let began = Instant::now();
    while began.elapsed() < span || work.operations == 0 {
        let asked = Instant::now();
        let guard = lock.acquire().await?;
        work.latencies.push(nanos(asked.elapsed()));
        work.operations += 1;
        work.violations += u64::from(inside.load(SeqCst) > 0);
        guard.release().await?;
        sleep(READ).await;
    }
    is_over.store(true, SeqCst);
    while let Some(reader) = readers.join_next().await {
        reader??;
    }
    Ok(work)
}

fn p50(sample: &Sample) -> f64 {
    sample.p50
}

const READERS: usize = 64;
/// How long a reader reads.
const READ: Duration = Duration::from_millis(5);
/// After that all readers wait.
const QUEUED: Duration = Duration::from_millis(200);

const COLUMNS: [&str; 5] = ["work", "p50 µs", "p99 µs", "÷ exclusive", "count"];
