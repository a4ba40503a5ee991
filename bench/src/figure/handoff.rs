//! From the release of one to the lock of the next: between tasks of one client, and between clients.

use super::{redis_client, redis_server};
use crate::{
    Result,
    floor::redis::{Hop, Setting, connect, idle_round_trips},
    measure::{Contestant, Plan, Running, Runs, Sample, interleave},
    report::{Cell, Limit, Table},
    work::{Contender, Work, again, hand_off},
};
use dlock_core::{Client, Clock, Lock};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use std::{sync::Arc, time::Duration};
use tokio::sync::Mutex;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = redis_server().await?;
    let url = server.url();
    let memory_store = MemoryStore::new(Clock::boot());
    let memory = Client::new(MemoryDriver::connect(
        &memory_store,
        MemoryConfig::default(),
    ))?;
    let redis = redis_client(&url).await?;
    let mut ring = Ring::default();

    let mutex = Arc::new(Mutex::new(()));
    ring.enter(
        "tokio::sync::Mutex, 2 waiters",
        None,
        among(&vec![mutex; 3]),
    );
    let alone = ring.enter(
        "memory: release + acquire by oneself",
        None,
        by_oneself(memory.lock("memory:alone")?),
    );
    for waiters in IN_ONE {
        let name = format!("memory, one client, {waiters} waiters");
        let locks = vec![memory.lock(&name)?; waiters + 1];
        ring.enter(name, Some(Floor::One(alone)), among(&locks));
    }
    let alone = ring.enter(
        "redis: release + acquire by oneself",
        None,
        by_oneself(redis.lock("redis:alone")?),
    );
    for waiters in IN_ONE {
        let name = format!("redis, one client, {waiters} waiters");
        let locks = vec![redis.lock(&name)?; waiters + 1];
        ring.enter(name, Some(Floor::One(alone)), among(&locks));
    }

    let connection = connect(&url, Setting::Default).await?;
    let ping = ring.enter("redis: idle round trip", None, move |span| {
        idle_round_trips(connection.clone(), span)
    });
    let hop = Arc::new(Hop::open(&url).await?);
    let hop = ring.enter("redis: idle hop, publish to push", None, move |span| {
        let hop = Arc::clone(&hop);
        async move { hop.idle(span).await }
    });
    for waiters in CLIENTS {
        let name = format!("redis, {waiters} waiting clients");
        let mut locks: Vec<Lock> = Vec::new();
        for _ in 0..=waiters {
            locks.push(redis_client(&url).await?.lock(&name)?);
        }
        ring.enter(name, Some(Floor::Both(hop, ping)), among(&locks));
    }
    #[cfg(feature = "peers")]
    {
        let waiting = (0..3).map(|_| super::peer::rslock_of(&url, "hand-off").map(Arc::new));
        let waiting: Vec<_> = waiting.collect::<Result<_>>()?;
        let handing = move |span| hand_off(waiting.clone(), span);
        ring.enter(
            "rslock 0.10, 2 waiting clients",
            Some(Floor::Both(hop, ping)),
            handing,
        );
    }

    let runs = interleave(&plan, Some(pid), &ring.contestants).await?;
    Ok(ring.table(&runs))
}

/// The contestants, and what each is compared with.
#[derive(Default)]
struct Ring {
    contestants: Vec<Contestant>,
    floors: Vec<Option<Floor>>,
}

#[derive(Clone, Copy)]
enum Floor {
    One(usize),
    /// The sum of two.
    Both(usize, usize),
}

impl Ring {
    /// Says at which place.
    fn enter<F, R>(&mut self, name: impl Into<String>, floor: Option<Floor>, run: F) -> usize
    where
        F: Fn(Duration) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Work>> + Send + 'static,
    {
        self.contestants.push(Contestant::new(name, run));
        self.floors.push(floor);
        self.contestants.len() - 1
    }

    fn table(&self, runs: &Runs) -> Table {
        let columns = [
            "hand-off",
            "p50 µs",
            "p99 µs",
            "p50 ÷ floor",
            "client CPU µs",
            "server CPU µs",
            "hand-offs",
            "violations",
        ];
        let title = "hold 3–8 ms; floor: the same client's release + acquire by oneself, or idle hop + idle round trip";
        let mut table = Table::new("handoff", title, &columns);
        let mut violations = 0;
        for (at, (contestant, floor)) in self.contestants.iter().zip(&self.floors).enumerate() {
            let ratio = floor.map(|floor| runs.ratio(at, p50, |of| floor.p50(of)));
            let outside = runs.sum(at, |one| one.violations);
            violations += outside;
            table.row([
                Cell::text(&contestant.name),
                runs.of(at, p50).into(),
                runs.of(at, |one| one.p99).into(),
                ratio.map_or(Cell::None, Cell::from),
                Cell::Number(runs.of(at, |one| one.client).median),
                Cell::Number(runs.of(at, |one| one.server).median),
                Cell::Count(runs.sum(at, |one| one.operations)),
                Cell::Count(outside),
            ]);
            if let (Some(Floor::Both(..)), Some(ratio), true) =
                (floor, ratio, contestant.name.starts_with("redis"))
            {
                let what = format!("{}: p50 ÷ (idle hop + idle round trip)", contestant.name);
                table.goal(what, ratio.median, Limit::AtMost(1.25));
            }
        }
        table.goal("two inside at once", violations as f64, Limit::AtMost(0.0));
        table.quiet(runs.quiet());
        table
    }
}

impl Floor {
    fn p50(self, of: &dyn Fn(usize) -> Sample) -> f64 {
        match self {
            Self::One(floor) => of(floor).p50,
            Self::Both(one, other) => of(one).p50 + of(other).p50,
        }
    }
}

/// Hand-offs among them all.
fn among<C: Contender + Clone>(
    contenders: &[C],
) -> impl Fn(Duration) -> Running + Send + Sync + use<C> {
    let each: Vec<Arc<C>> = contenders.iter().cloned().map(Arc::new).collect();
    move |span| Box::pin(hand_off(each.clone(), span))
}

fn by_oneself(lock: Lock) -> impl Fn(Duration) -> Running + Send + Sync {
    let lock = Arc::new(lock);
    move |span| Box::pin(again(Arc::clone(&lock), span))
}

fn p50(sample: &Sample) -> f64 {
    sample.p50
}

/// Waiting tasks of one client.
const IN_ONE: [usize; 2] = [2, 16];
/// Waiting clients.
const CLIENTS: [usize; 3] = [2, 16, 64];
