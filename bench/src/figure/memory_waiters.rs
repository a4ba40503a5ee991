//! The cost of many waiting tasks of one client: each enters the queue of one name, and leaves it
//! without the lock.

use crate::{
    Result,
    clock::Meter,
    measure::{Contestant, Plan, interleave},
    report::{Cell, Limit, Table},
    work::{Work, nanos},
};
use dlock_core::{Client, Clock, Lease, Lock};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{sync::Mutex, task::JoinSet, time::timeout};

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let store = MemoryStore::new(Clock::boot());
    let client = Client::new(MemoryDriver::connect(&store, MemoryConfig::default()))?;
    let held = client.lock(NAME)?.acquire().await?;
    let mutex = Arc::new(Mutex::new(()));
    let inside = Arc::clone(&mutex).lock_owned().await;
    let mut contestants = Vec::new();
    for waiters in [plan.waiters / 100, plan.waiters / 10, plan.waiters] {
        for leave in [Leave::AtTheLimit, Leave::Dropped] {
            let mutex = Arc::clone(&mutex);
            let name = format!("tokio::sync::Mutex, {waiters} {leave:?}");
            contestants.push(Contestant::new(name, move |span| {
                let mutex = Arc::clone(&mutex);
                crowd(waiters, leave, span, move |limit| {
                    let mutex = Arc::clone(&mutex);
                    async move { drop(timeout(limit, mutex.lock_owned()).await) }
                })
            }));
            let (name, client) = (format!("dlock, {waiters} {leave:?}"), client.clone());
            contestants.push(Contestant::new(name, move |span| {
                beside_a_kept_lock(client.clone(), waiters, leave, span)
            }));
        }
    }
    let runs = interleave(&plan, &[], &contestants).await?;
    let columns = [
        "waiting tasks",
        "CPU µs of each",
        "÷ tokio",
        "p99 late ms",
        "lost",
    ];
    let title = "enter a queue, and leave it without the lock";
    let mut table = Table::new("memory-waiters", title, &columns);
    let mut lost = 0;
    for (at, contestant) in contestants.iter().enumerate() {
        let floor = at - at % 2;
        let late = match contestant.name.ends_with("Dropped") {
            true => Cell::None,
            false => runs.of(at, |one| one.p99 / 1e3).into(),
        };
        lost += runs.sum(at, |one| one.violations);
        table.row([
            Cell::text(&contestant.name),
            runs.of(at, |one| one.client).into(),
            runs.ratio(at, |one| one.client, |of| of(floor).client)
                .into(),
            late,
            Cell::Count(runs.sum(at, |one| one.violations)),
        ]);
    }
    // A hundred times as many waiters may cost each the caches, but not a walk over the others.
    for (what, few, many) in [("at the limit", 1, 9), ("dropped", 3, 11)] {
        let growth = runs.ratio(many, |one| one.client, |of| of(few).client);
        let what = format!("CPU of one in the largest crowd ÷ one in the smallest, {what}");
        table.goal(what, growth.median, Limit::AtMost(4.0));
    }
    table.goal(
        "locks lost beside the crowd",
        lost as f64,
        Limit::AtMost(0.0),
    );
    table.quiet(runs.quiet());
    drop(inside);
    held.release().await?;
    Ok(table)
}

/// The result for one crowd.
#[derive(Clone, Copy, Debug)]
enum Leave {
    AtTheLimit,
    Dropped,
}

/// The client holds a lock of another name meanwhile, which must not be lost.
async fn beside_a_kept_lock(
    client: Client,
    waiters: usize,
    leave: Leave,
    span: Duration,
) -> Result<Work> {
    let kept = client
        .lock("beside")?
        .lease(Lease::renewed(LEASE))
        .acquire()
        .await?;
    let lock = client.lock(NAME)?;
    let mut work = crowd(waiters, leave, span, move |limit| wait(lock.clone(), limit)).await?;
    work.violations = u64::from(kept.release().await.is_err());
    Ok(work)
}

async fn wait(lock: Lock, limit: Duration) {
    drop(lock.acquire_timeout(limit).await);
}

/// Lets this number of tasks wait. An operation is one waiter; its latency is the time from its limit
/// to its answer.
async fn crowd<F, W>(waiters: usize, leave: Leave, span: Duration, wait: F) -> Result<Work>
where
    F: Fn(Duration) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let limit = match leave {
        Leave::AtTheLimit => span.min(LIMIT),
        Leave::Dropped => FOREVER,
    };
    let meter = Meter::start(&[]);
    let entered = Arc::new(AtomicUsize::new(0));
    let mut crowd = JoinSet::new();
    for _ in 0..waiters {
        let (waiting, entered) = (wait(limit), Arc::clone(&entered));
        crowd.spawn(async move {
            let end = Instant::now() + limit;
            let mut waiting = pin!(waiting);
            let mut first = true;
            poll_fn(|cx| {
                let polled = waiting.as_mut().poll(cx);
                entered.fetch_add(usize::from(std::mem::take(&mut first)), SeqCst);
                polled
            })
            .await;
            nanos(Instant::now().saturating_duration_since(end))
        });
    }
    if matches!(leave, Leave::Dropped) {
        while entered.load(SeqCst) < waiters {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        crowd.abort_all();
    }
    let mut work = Work::default();
    while let Some(left) = crowd.join_next().await {
        match left {
            Ok(late) => work.latencies.push(late),
            Err(error) if error.is_cancelled() => {}
            Err(error) => return Err(error.into()),
        }
    }
    work.operations = u64::try_from(waiters)?;
    work.seen = Some(meter.stop());
    Ok(work)
}

const NAME: &str = "crowded";
/// How long each task waits.
const LIMIT: Duration = Duration::from_secs(1);
const FOREVER: Duration = Duration::from_secs(3_600);
/// The lease of the lock that the client holds beside them.
const LEASE: Duration = Duration::from_millis(1_500);
