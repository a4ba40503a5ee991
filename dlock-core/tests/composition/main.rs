//! What is composed of locks, over the memory driver in simulated time: several locks at once, elections,
//! jobs.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod election;
mod job;
mod several;

use dlock_core::{Client, Clock, driver::Wake};
use dlock_memory::{Faults, MemoryConfig, MemoryDriver, MemoryStore};
use std::{sync::Arc, time::Duration};

const SECOND: Duration = Duration::from_secs(1);

/// Long enough for every request that is not delayed.
const MOMENT: Duration = Duration::from_millis(10);

/// One store, with its way to wake waiters.
struct Bench {
    store: MemoryStore,
    wake: Wake,
}

impl Bench {
    fn new(wake: Wake) -> Self {
        let store = MemoryStore::new(Clock::simulated());
        Self { store, wake }
    }

    /// A client, and the faults between it and the store.
    fn client(&self) -> (Client, Faults) {
        let driver = MemoryDriver::connect(&self.store, MemoryConfig::new(self.wake));
        let faults = driver.faults().clone();
        let client = Client::builder(Arc::new(driver)).clock(self.store.clock().clone());
        (client.build().unwrap(), faults)
    }
}
