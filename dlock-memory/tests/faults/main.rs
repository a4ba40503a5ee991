//! Faults between a driver and its store, each one proven; then the queue and the records under random
//! events.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, which clippy takes for code"
)]

mod calls;
mod line;
mod model;
mod server;

use dlock_core::{
    Clock, Effect, ErrorKind, HoldId, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Release},
};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

/// A store under a simulated clock, and one client of it.
struct Bench {
    clock: Clock,
    store: MemoryStore,
    driver: MemoryDriver,
}

impl Bench {
    fn new() -> Self {
        let clock = Clock::simulated();
        let store = MemoryStore::new(clock.clone());
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        Self {
            clock,
            store,
            driver,
        }
    }

    /// An acquire that gives up in five seconds.
    fn ask(&self, owner: &str) -> Acquire {
        let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(1));
        let give_up = self.clock.now() + 5 * SECOND;
        Acquire::new(name(), owner, hold, Lease::default(), give_up)
    }

    async fn acquire(&self, owner: &str) -> Result<bool, DriverError> {
        let acquired = self.driver.acquire(&self.ask(owner)).await?;
        Ok(matches!(acquired, Acquired::Granted(_)))
    }

    /// How many holds the store has, seen past the faults of the driver.
    async fn holds(&self) -> u32 {
        let observer = MemoryDriver::connect(&self.store, MemoryConfig::default());
        let shown = observer.inspect(&name()).await;
        shown.expect("the observer has no faults").holds
    }
}

fn name() -> LockName {
    "orders:42".parse().expect("it is a legal name")
}

fn release(owner: &str) -> Release {
    Release::new(name(), Owner::from_seed(owner), HoldId::from_bits(1))
}

fn is_none(error: &DriverError) -> bool {
    (error.kind(), error.effect()) == (ErrorKind::Unavailable, Effect::None)
}

fn is_unknown(error: &DriverError) -> bool {
    (error.kind(), error.effect()) == (ErrorKind::Unavailable, Effect::Unknown)
}
