//! Driver under test: requests, and what a driver over sessions has to survive, for fault tests of one store.
//!
//! The suite has requests of its own; these are for tests that also disturb the store as only its administrator can.

mod room;
mod sessions;

pub use room::{Crowd, Room};
pub use sessions::{ended_sessions_are_replaced, finds_the_next_holder, unknown};

use dlock_core::{
    Clock, HoldId, Instant, Lease, LockName, Owner, Snapshot,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Lane, Release, Released, Renew,
        Renewed,
    },
};
use parking_lot::Mutex;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// A driver, and requests for it.
#[derive(Debug)]
pub struct UnderTest<D> {
    /// The driver.
    pub driver: Arc<D>,
    /// The clock of the give-ups.
    pub clock: Clock,
    holds: AtomicU64,
}

impl<D: DistributedLock> UnderTest<D> {
    /// Wraps a driver.
    #[must_use]
    pub fn new(driver: D) -> Self {
        Self {
            driver: Arc::new(driver),
            clock: Clock::boot(),
            holds: AtomicU64::new(1),
        }
    }

    /// An acquire by a fresh owner.
    pub fn ask(&self, name: &str, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::from_seed(&format!("owner {hold}"));
        self.asked(name, owner, lease, hold)
    }

    /// The same with a minute until its give-up: for one that is sent long after it is made, or has to wait.
    pub fn patient(&self, name: &str, lease: Duration) -> Acquire {
        let mut ask = self.ask(name, lease);
        ask.give_up = self.clock.now() + SECOND * 60;
        ask
    }

    /// One more acquire by the owner of another.
    pub fn again(&self, first: &Acquire, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        self.asked(first.name.as_str(), first.owner, lease, hold)
    }

    fn asked(&self, name: &str, owner: Owner, lease: Duration, hold: u64) -> Acquire {
        let (hold, lease) = (HoldId::from_bits(hold), Lease::fixed(lease));
        Acquire::new(named(name), owner, hold, lease, self.give_up())
    }

    /// Far enough away for every request that gets an answer.
    pub fn give_up(&self) -> Instant {
        self.clock.now() + SECOND * 10
    }

    /// Sends an acquire that is granted.
    pub async fn granted(&self, ask: &Acquire) -> Grant {
        granted(&*self.driver, ask).await
    }

    /// Takes a free lock for [`TAKEN`].
    pub async fn taken(&self, name: &str) -> Acquire {
        let ask = self.ask(name, TAKEN);
        self.granted(&ask).await;
        ask
    }

    /// Sends a release that is answered.
    ///
    /// # Panics
    /// When it fails.
    pub async fn release(&self, ask: &Acquire) -> Released {
        let released = self.give_back(ask).await;
        released.expect("a release is answered")
    }

    /// Sends a release.
    ///
    /// # Errors
    /// The driver's.
    pub async fn give_back(&self, ask: &Acquire) -> Result<Released, DriverError> {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await
    }

    /// The entry of a hold in a batch of renewals.
    pub fn entry(&self, ask: &Acquire, lease: Duration) -> Renew {
        Renew::new(ask.name.clone(), ask.owner, ask.hold, Some(lease))
    }

    /// Sends a batch of renewals.
    ///
    /// # Errors
    /// The driver's.
    pub async fn renew(
        &self,
        asks: &[Acquire],
        lease: Duration,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        self.renew_until(asks, lease, self.give_up()).await
    }

    /// The same with a give-up of its own.
    ///
    /// # Errors
    /// The driver's.
    pub async fn renew_until(
        &self,
        asks: &[Acquire],
        lease: Duration,
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        let batch: Vec<_> = asks.iter().map(|ask| self.entry(ask, lease)).collect();
        self.driver.renew(Lane::default(), &batch, give_up).await
    }

    /// Takes 40 locks, has the row of one locked, and renews them with give-ups of a second, as those of a lease of six
    /// seconds, until all others are renewed: a batch that waited for the row would be given up with all its entries. On a
    /// busy machine the time may not be enough for all others, so the rest is sent again, as a watchdog does. Returns the
    /// one that is left, and what `lock` did.
    ///
    /// # Panics
    /// When another one is not renewed in ten attempts, or that one is.
    pub async fn renews_all_but_the_locked<L>(
        &self,
        lock: impl AsyncFn(&'static str) -> L,
    ) -> (Acquire, L) {
        const LEASE: Duration = SECOND.saturating_mul(60);
        let mut asks = Vec::new();
        for at in 0..40 {
            asks.push(self.taken(&format!("n{at}")).await);
        }
        let locked = lock("n17").await;
        for _ in 0..10 {
            let renewing = self.renew_until(&asks, LEASE, self.clock.now() + SECOND);
            let Ok(Ok(renewed)) = tokio::time::timeout(SECOND, renewing).await else {
                continue;
            };
            let mut renewed = renewed.iter();
            asks.retain(|_| !renewed.next().is_some_and(|one| lasts(one, LEASE)));
            if asks.len() == 1 {
                break;
            }
        }
        let left: Vec<_> = asks.iter().map(|ask| ask.name.as_str()).collect();
        assert_eq!(left, ["n17"]);
        (asks.remove(0), locked)
    }

    /// Reads a lock.
    ///
    /// # Panics
    /// When the read fails.
    pub async fn inspect(&self, name: &str) -> Snapshot {
        let shown = self.driver.inspect(&named(name)).await;
        shown.expect("an inspect is answered")
    }

    /// How long the store holds a lock that is held.
    ///
    /// # Panics
    /// When it is not held.
    pub async fn rest(&self, name: &str) -> Duration {
        let shown = self.inspect(name).await;
        let holder = shown.holders.first().expect("it is held");
        holder.rest.expect("the store tells the rest")
    }
}

/// A name.
///
/// # Panics
/// When the text is none.
#[must_use]
pub fn named(name: &str) -> LockName {
    LockName::new(name).expect("it is a name")
}

/// Sends an acquire that is granted.
///
/// # Panics
/// When it is not.
pub async fn granted<D: DistributedLock + ?Sized>(driver: &D, ask: &Acquire) -> Grant {
    match driver.acquire(ask).await {
        Ok(Acquired::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Whether a hold was renewed for about that long.
#[must_use]
pub fn lasts(renewed: &Result<Renewed, DriverError>, lease: Duration) -> bool {
    matches!(renewed, Ok(Renewed::Until { valid_for }) if *valid_for <= lease && *valid_for + SECOND * 10 > lease)
}

/// Waits for a condition.
///
/// # Panics
/// When it does not come about for a minute.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let waiting = Waiting::new(what);
    while !holds().await {
        waiting.pause().await;
    }
}

/// A wait for a condition that is checked again after each pause.
#[derive(Debug)]
pub struct Waiting<'a> {
    what: &'a str,
    clock: Clock,
    begun: Instant,
}

impl<'a> Waiting<'a> {
    /// Begins to wait.
    #[must_use]
    pub fn new(what: &'a str) -> Self {
        let clock = Clock::boot();
        let begun = clock.now();
        Self { what, clock, begun }
    }

    /// Waits for some milliseconds.
    ///
    /// # Panics
    /// After a minute.
    pub async fn pause(&self) {
        let since = self.clock.now().since(self.begun);
        assert!(since < HANG, "{}: not soon", self.what);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Collects traces.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// For `tracing_subscriber::fmt().with_writer(log.writer())`.
    pub fn writer(&self) -> impl Fn() -> Self + Send + Sync + use<> {
        let log = self.clone();
        move || log.clone()
    }

    /// What was written so far.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = self.0.lock();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = self.0.lock();
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lease of [`UnderTest::taken`].
pub const TAKEN: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
/// Only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);
