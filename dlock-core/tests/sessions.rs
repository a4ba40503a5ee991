//! Session stores as the core sees them: the model store behind a driver whose holds live and end with a
//! session.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use async_trait::async_trait;
use dlock_core::{
    Broken, Client, Clock, ErrorKind, FencingToken, GuardState, Instant, Lease, LockName,
    LossReason, RetryClass, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, WakeUp,
    },
};
use dlock_memory::{Call, Fault, Faults, MemoryConfig, MemoryDriver, MemoryStore};
use futures_core::stream::BoxStream;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time;

const SESSION: Duration = Duration::from_secs(3);

/// Holds last as long as the session, which ends in no case here. A proof of the session is valid for
/// [`SESSION`].
#[derive(Debug)]
struct Session {
    driver: MemoryDriver,
    caps: Capabilities,
    renewals: Arc<AtomicUsize>,
    /// No name that begins with `away` can be acquired, as if it were of another shard.
    away: Arc<AtomicBool>,
    /// How many requests for such a name were refused.
    refused: AtomicUsize,
}

#[async_trait]
impl DistributedLock for Session {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.driver.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        if self.away.load(SeqCst) && req.name.as_str().starts_with("away") {
            let refused = self.refused.fetch_add(1, SeqCst);
            assert!(refused < 1_000, "refused again and again");
            return Err(match req.name.as_str() {
                "away, too" => DriverError::new(ErrorKind::Overloaded, "this shard is overloaded")
                    .with_retry(RetryClass::Later),
                _ => DriverError::unavailable("this shard is away"),
            });
        }
        let mut req = req.clone();
        req.lease = Lease::fixed(SESSION * 1_000);
        let mut answer = self.driver.acquire(&req).await;
        if let Ok(Acquired::Granted(grant)) = &mut answer {
            grant.valid_for = SESSION;
        }
        answer
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.driver.leave(name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.renewals.fetch_add(1, SeqCst);
        let mut answers = self.driver.renew(lane, batch, give_up).await?;
        for answer in &mut answers {
            if let Ok(Renewed::Until { valid_for }) = answer {
                *valid_for = SESSION;
            }
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.driver.release(req).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.driver.wake_ups()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.driver.inspect(name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.driver.list(prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.driver.break_lock(name, only).await
    }

    async fn close(&self) {
        self.driver.close().await;
    }
}

/// A client of such a store, with handles for the tests.
struct Bench {
    client: Client,
    clock: Clock,
    faults: Faults,
    /// How many renewals were sent.
    renewals: Arc<AtomicUsize>,
    away: Arc<AtomicBool>,
}

impl Bench {
    fn new() -> Self {
        Self::over(&MemoryStore::new(Clock::simulated()))
    }

    fn over(store: &MemoryStore) -> Self {
        let clock = store.clock().clone();
        let driver = MemoryDriver::connect(store, MemoryConfig::default());
        let faults = driver.faults().clone();
        let mut caps = driver.capabilities().clone();
        caps.session_bound = true;
        caps.leases = *caps.leases.start()..=SESSION;
        let (renewals, away) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let session = Session {
            driver,
            caps,
            renewals: Arc::clone(&renewals),
            away: Arc::clone(&away),
            refused: AtomicUsize::new(0),
        };
        let builder = Client::builder(Arc::new(session)).clock(clock.clone());
        Self {
            client: builder.build().unwrap(),
            clock,
            faults,
            renewals,
            away,
        }
    }

    fn renewals(&self) -> usize {
        self.renewals.load(SeqCst)
    }

    async fn holds(&self, name: &str) -> u32 {
        self.client.admin().inspect(name).await.unwrap().holds
    }

    /// The client has no hold and no request left.
    async fn ends(self) {
        assert_eq!(self.client.pending_cleanups(), 0);
        let report = self.client.shutdown(Duration::ZERO).await.unwrap();
        assert!(report.locks.is_empty(), "{report:?}");
    }
}

const LOST: GuardState = GuardState::Lost(LossReason::Deadline);

#[tokio::test(start_paused = true)]
async fn a_lease_is_kept_by_proving_the_session() {
    let bench = Bench::new();
    let lock = bench.client.lock("x").unwrap();
    assert_eq!(lock.effective_lease().unwrap().length(), SESSION);
    let guard = lock.acquire().await.unwrap();
    time::sleep(SESSION * 20 + Duration::from_millis(10)).await;
    assert_eq!(guard.state(), GuardState::Held);
    assert_eq!(bench.renewals(), 60, "every third of it");
    let refused = guard.detach().unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Unsupported);
    refused.guard.release().await.unwrap();
    assert_eq!(bench.holds("x").await, 0);
    bench.ends().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_lost_at_its_deadline_is_left_alone_while_its_guard_lives() {
    let bench = Bench::new();
    let guard = bench.client.lock("x").unwrap().acquire().await.unwrap();
    bench.faults.always(Call::Renew, Fault::ErrorBefore);
    assert_eq!(guard.lost().await, LossReason::Deadline);
    bench.faults.clear();
    let asked = bench.renewals();
    time::sleep(SESSION * 5).await;
    assert_eq!(guard.state(), LOST);
    assert_eq!(bench.renewals(), asked, "nothing asks for it any more");
    // Code may still run under it: only its user may release it.
    assert_eq!(bench.holds("x").await, 1);
    drop(guard);
    time::sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.holds("x").await, 0);
    bench.ends().await;
}

#[tokio::test(start_paused = true)]
async fn a_fixed_lease_is_ended_by_a_release_at_its_full_end() {
    let bench = Bench::new();
    let length = SESSION * 5 / 2;
    let lock = bench.client.lock("x").unwrap().lease(Lease::fixed(length));
    let guard = lock.acquire().await.unwrap();
    let granted = time::Instant::now();
    assert_eq!(guard.lost().await, LossReason::Deadline);
    let lost = granted.elapsed();
    assert!(lost <= length && lost > length * 9 / 10, "{lost:?}");
    let asked = bench.renewals();
    assert!(asked >= 2, "its session was proven {asked} times");
    // The session would hold it for ever, and its guard still exists.
    time::sleep_until(granted + length - Duration::from_millis(2)).await;
    assert_eq!(bench.holds("x").await, 1);
    time::sleep_until(granted + length + Duration::from_millis(2)).await;
    assert_eq!(bench.holds("x").await, 0);
    time::sleep(SESSION * 5).await;
    assert_eq!(bench.renewals(), asked, "nothing asks for it any more");
    assert_eq!(guard.state(), LOST);
    bench.ends().await;
}

/// The clock passed the deadline while nothing ran: the guard reports it first, the watchdog later.
#[tokio::test(start_paused = true)]
async fn a_fixed_lease_that_its_guard_found_lost_is_ended_all_the_same() {
    let bench = Bench::new();
    let lock = bench
        .client
        .lock("x")
        .unwrap()
        .lease(Lease::fixed(SESSION / 2));
    let guard = lock.acquire().await.unwrap();
    bench.clock.jump(SESSION / 2);
    assert_eq!(guard.state(), LOST);
    // A timer that was set before the jump is a second late at most.
    time::sleep(Duration::from_millis(1_010)).await;
    assert_eq!(bench.holds("x").await, 0);
    drop(guard);
    time::sleep(Duration::from_millis(1)).await;
    bench.ends().await;
}

/// Of several names, one whose shard was away for longer than an acquire waits for its store.
#[tokio::test(start_paused = true)]
async fn a_name_whose_shard_was_away_for_long_is_waited_for_again() {
    let store = MemoryStore::new(Clock::simulated());
    let (holder, waiter) = (Bench::over(&store), Bench::over(&store));
    let guard = holder.client.lock("away").unwrap().acquire().await.unwrap();
    let _held = holder
        .client
        .lock("there")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let any = waiter.client.lock_any(["away", "there"]).unwrap();
    let waiting = tokio::spawn(async move { any.acquire().await });
    time::sleep(SESSION).await;
    waiter.away.store(true, SeqCst);
    time::sleep(SESSION * 7).await;
    waiter.away.store(false, SeqCst);
    guard.release().await.unwrap();
    let free = time::timeout(SESSION, waiting).await.expect("soon");
    assert_eq!(free.unwrap().unwrap().name().as_str(), "away");
}

/// It does not fail for a while only, but at once, each time.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_refused_at_once_is_asked_for_in_pauses() {
    let bench = Bench::new();
    let guard = bench.client.lock("there").unwrap().acquire().await.unwrap();
    bench.away.store(true, SeqCst);
    let any = bench.client.lock_any(["away, too", "there"]).unwrap();
    let waiting = tokio::spawn(async move { any.acquire().await });
    time::sleep(SESSION).await;
    guard.release().await.unwrap();
    let free = time::timeout(SESSION, waiting).await.expect("soon");
    assert_eq!(free.unwrap().unwrap().name().as_str(), "there");
}
