//! Workloads that are the same for all contestants: cycles, alone and concurrent, and hand-offs.

use crate::{
    Result,
    clock::{Meter, Seen},
};
use dlock_core::{
    Clock, Guard, HoldId, Lease, Lock, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, Release},
};
use parking_lot::Mutex;
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, sync::watch, task::JoinSet};

/// The result of a workload.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Latency of each operation, in nanoseconds.
    pub(crate) latencies: Vec<u64>,
    pub(crate) operations: u64,
    /// The time without the lead-in and the end, where the workload knows it better than its caller.
    pub(crate) took: Option<Duration>,
    /// How often two holders were inside at once, or a holder did not have the lock.
    pub(crate) violations: u64,
    /// The requests to the server meanwhile, and the calls of a driver that were polls, where that is
    /// counted.
    pub(crate) asked: u64,
    pub(crate) polls: u64,
    /// The cost, where the workload has parts that do not count.
    pub(crate) seen: Option<Seen>,
}

/// A lock that can be acquired and released: one name of one client.
pub(crate) trait Contender: Send + Sync + 'static {
    type Held: Send + 'static;

    fn acquire(&self) -> impl Future<Output = Result<Self::Held>> + Send;

    fn release(&self, held: Self::Held) -> impl Future<Output = Result> + Send;
}

impl Contender for Lock {
    type Held = Guard;

    async fn acquire(&self) -> Result<Guard> {
        Ok(Self::acquire(self).await?)
    }

    async fn release(&self, guard: Guard) -> Result {
        guard.release().await?;
        Ok(())
    }
}

/// A driver without the core: a cycle without waiting, watchdog or cleanup.
#[derive(Debug)]
pub(crate) struct BareDriver<D> {
    pub(crate) driver: Arc<D>,
    pub(crate) name: LockName,
    pub(crate) clock: Clock,
}

impl<D: DistributedLock> BareDriver<D> {
    pub(crate) fn new(driver: Arc<D>, name: &str) -> Result<Self> {
        Ok(Self {
            driver,
            name: LockName::new(name)?,
            clock: Clock::boot(),
        })
    }
}

impl<D: DistributedLock> Contender for BareDriver<D> {
    type Held = (Owner, HoldId);

    async fn acquire(&self) -> Result<Self::Held> {
        let (owner, hold) = (
            Owner::random(&mut rand::rng()),
            HoldId::random(&mut rand::rng()),
        );
        let give_up = self.clock.now() + Duration::from_secs(5);
        let request = Acquire::new(self.name.clone(), owner, hold, Lease::default(), give_up);
        match self.driver.acquire(&request).await? {
            Acquired::Granted(_) => Ok((owner, hold)),
            _ => Err("an uncontended lock was refused".into()),
        }
    }

    async fn release(&self, (owner, hold): Self::Held) -> Result {
        self.driver
            .release(&Release::new(self.name.clone(), owner, hold))
            .await?;
        Ok(())
    }
}

/// One task, one lock, no contention: acquire and release until the time is up.
pub(crate) async fn alone<C: Contender>(contender: Arc<C>, span: Duration) -> Result<Work> {
    let mut work = Work::default();
    let began = Instant::now();
    let mut last = began;
    while last - began < span {
        let held = contender.acquire().await?;
        contender.release(held).await?;
        let now = Instant::now();
        work.latencies.push(nanos(now - last));
        work.operations += 1;
        last = now;
        if work.operations.is_multiple_of(BREATH) {
            // A store that answers at once never lets the worker's other tasks run.
            tokio::task::yield_now().await;
            last = Instant::now();
        }
    }
    work.took = Some(last - began);
    Ok(work)
}

/// Many tasks at once, each with a lock of its own.
pub(crate) async fn crowd<C: Contender>(contenders: Vec<Arc<C>>, span: Duration) -> Result<Work> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for contender in contenders {
        tasks.spawn(alone(contender, span));
    }
    let mut all = Work::default();
    while let Some(done) = tasks.join_next().await {
        let done = done??;
        all.operations += done.operations;
        all.latencies.extend(done.latencies);
    }
    all.took = Some(began.elapsed());
    Ok(all)
}

/// One task that holds its lock for a while, releases it and acquires it again: a hand-off to itself.
///
/// The hold leaves threads parked and the processor idle, as they are at a hand-off.
pub(crate) async fn again<C: Contender>(contender: Arc<C>, span: Duration) -> Result<Work> {
    let mut work = Work::default();
    let began = Instant::now();
    let mut held = contender.acquire().await?;
    while began.elapsed() < span {
        tokio::time::sleep(hold_time()).await;
        let start = Instant::now();
        contender.release(held).await?;
        held = contender.acquire().await?;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += 1;
    }
    contender.release(held).await?;
    Ok(work)
}

/// One acquire of a free lock after a few ms of idleness, again and again.
pub(crate) async fn idle<C: Contender>(contender: Arc<C>, span: Duration) -> Result<Work> {
    let mut work = Work::default();
    let began = Instant::now();
    while work.operations == 0 || began.elapsed() < span {
        tokio::time::sleep(hold_time()).await;
        let start = Instant::now();
        let held = contender.acquire().await?;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += 1;
        contender.release(held).await?;
    }
    Ok(work)
}

/// The counters of a workload, without its lead-in and its end.
#[derive(Clone, Default)]
pub(crate) struct Probe {
    /// The processes whose CPU counts as the server's.
    pub(crate) servers: Vec<u32>,
    /// The number of requests to the server so far.
    pub(crate) asked: Option<Counter>,
    /// The number of driver calls so far that were polls.
    pub(crate) polls: Option<Arc<AtomicU64>>,
}

pub(crate) type Counter = Arc<dyn Fn() -> Counting + Send + Sync>;
type Counting = Pin<Box<dyn Future<Output = Result<u64>> + Send>>;

/// A [`Probe`] that counts.
pub(crate) struct Probing {
    meter: Meter,
    asked: u64,
    polls: u64,
}

impl Probe {
    pub(crate) async fn begin(&self) -> Result<Probing> {
        Ok(Probing {
            asked: self.asked().await?,
            polls: self.polls(),
            meter: Meter::start(&self.servers),
        })
    }

    /// Records the cost since then.
    pub(crate) async fn end(&self, since: &Probing, work: &mut Work) -> Result {
        let seen = since.meter.stop();
        work.took = Some(seen.took);
        work.seen = Some(seen);
        work.polls = self.polls() - since.polls;
        work.asked = self.asked().await? - since.asked;
        Ok(())
    }

    async fn asked(&self) -> Result<u64> {
        match &self.asked {
            Some(asked) => asked().await,
            None => Ok(0),
        }
    }

    fn polls(&self) -> u64 {
        self.polls.as_ref().map_or(0, |polls| polls.load(SeqCst))
    }
}

/// All contend for one name: each holds it for 3 to 8 ms, releases it, and asks again when another one
/// has it.
///
/// A hand-off lasts from before the release to the moment the next one has the lock. It counts only if
/// all others wait.
pub(crate) async fn hand_off<C: Contender>(
    contenders: Vec<Arc<C>>,
    probe: Probe,
    span: Duration,
) -> Result<Work> {
    let here = Handle::current();
    let contenders = contenders.into_iter().map(|one| (one, here.clone()));
    hand_off_at_home(contenders.collect(), probe, span).await
}

/// The same, each contender in its own runtime.
pub(crate) async fn hand_off_at_home<C: Contender>(
    contenders: Vec<(Arc<C>, Handle)>,
    probe: Probe,
    span: Duration,
) -> Result<Work> {
    let arena = Arc::new(Arena::default());
    let mut tasks = JoinSet::new();
    for (contender, home) in contenders {
        tasks.spawn_on(contend(contender, Arc::clone(&arena)), &home);
    }
    tokio::time::sleep(span.mul_f64(LEAD_IN)).await;
    arena.latencies.lock().clear();
    let since = probe.begin().await?;
    tokio::time::sleep(span.mul_f64(1.0 - LEAD_IN)).await;
    let mut work = Work {
        latencies: std::mem::take(&mut *arena.latencies.lock()),
        ..Work::default()
    };
    work.operations = u64::try_from(work.latencies.len())?;
    probe.end(&since, &mut work).await?;
    arena.over.store(true, SeqCst);
    arena.turn.send_modify(|_| {});
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    work.violations = arena.violations.load(SeqCst);
    Ok(work)
}

async fn contend<C: Contender>(contender: Arc<C>, arena: Arc<Arena>) -> Result {
    while !arena.over.load(SeqCst) {
        let held = contender.acquire().await?;
        let mine = arena.enter();
        if !arena.over.load(SeqCst) {
            tokio::time::sleep(hold_time()).await;
        }
        arena.leave();
        contender.release(held).await?;
        let mut turn = arena.turn.subscribe();
        turn.wait_for(|turn| *turn > mine || arena.over.load(SeqCst))
            .await?;
    }
    Ok(())
}

/// Shared state of the hand-offs: the present holder, and when the last one began its release.
#[derive(Debug)]
struct Arena {
    inside: AtomicU64,
    violations: AtomicU64,
    given_back: Mutex<Option<Instant>>,
    latencies: Mutex<Vec<u64>>,
    /// Counts an entry.
    turn: watch::Sender<u64>,
    over: AtomicBool,
}

impl Default for Arena {
    fn default() -> Self {
        Self {
            inside: AtomicU64::default(),
            violations: AtomicU64::default(),
            given_back: Mutex::default(),
            latencies: Mutex::default(),
            turn: watch::Sender::new(0),
            over: AtomicBool::default(),
        }
    }
}

impl Arena {
    fn enter(&self) -> u64 {
        let now = Instant::now();
        if self.inside.fetch_add(1, SeqCst) != 0 {
            self.violations.fetch_add(1, SeqCst);
        }
        let given_back = self.given_back.lock().take();
        if let Some(given_back) = given_back {
            self.latencies.lock().push(nanos(now - given_back));
        }
        let mut mine = 0;
        self.turn.send_modify(|turn| {
            *turn += 1;
            mine = *turn;
        });
        mine
    }

    fn leave(&self) {
        self.inside.fetch_sub(1, SeqCst);
        *self.given_back.lock() = Some(Instant::now());
    }
}

/// Allocations of one cycle, all tasks of the client and of its connection included: everything runs on
/// one thread here.
///
/// Call it where blocking is allowed.
pub(crate) fn allocations<C, F>(make: impl FnOnce() -> F + Send) -> Result<f64>
where
    C: Contender,
    F: Future<Output = Result<C>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let contender = Arc::new(runtime.block_on(make())?);
    let cycles = async |count: u32| -> Result {
        for _ in 0..count {
            let held = contender.acquire().await?;
            contender.release(held).await?;
        }
        Ok(())
    };
    runtime.block_on(cycles(COUNTED))?; // lets caches, tables and buffers grow to their size
    let mut done = Ok(());
    let seen = allocation_counter::measure(|| done = runtime.block_on(cycles(COUNTED)));
    done?;
    Ok(seen.count_total as f64 / f64::from(COUNTED))
}

pub(crate) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn hold_time() -> Duration {
    Duration::from_micros(fastrand::u64(3_000..8_000))
}

/// The part of the time of hand-offs in which all contenders enter the queue.
const LEAD_IN: f64 = 0.2;
/// Cycles between two yields.
const BREATH: u64 = 32;
/// Cycles whose allocations are counted.
const COUNTED: u32 = 500;

#[cfg(test)]
mod tests {
    use super::{Contender, Probe, Result, alone, hand_off};
    use std::{sync::Arc, time::Duration};

    /// A lock that excludes nothing.
    struct Open;

    impl Contender for Open {
        type Held = ();

        async fn acquire(&self) -> Result {
            tokio::task::yield_now().await;
            Ok(())
        }

        async fn release(&self, (): ()) -> Result {
            Ok(())
        }
    }

    #[tokio::test]
    async fn two_inside_at_once_are_violations() {
        let work = hand_off(
            vec![Arc::new(Open), Arc::new(Open)],
            Probe::default(),
            Duration::from_millis(50),
        );
        assert!(work.await.unwrap().violations > 0);
    }

    #[tokio::test]
    async fn every_cycle_has_a_latency() {
        let work = alone(Arc::new(Open), Duration::from_millis(5))
            .await
            .unwrap();
        assert_eq!(
            u64::try_from(work.latencies.len()).unwrap(),
            work.operations
        );
        assert!(work.operations > 0);
    }
}
