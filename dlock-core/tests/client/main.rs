//! Races of one client over the memory driver in simulated time: waiters, holds and shutdown, with one race
//! or lost answer each.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod holds;
mod presence;
mod shutdown;
mod waiters;

use dlock_core::{Client, Clock, driver::Wake};
use dlock_memory::{Faults, MemoryConfig, MemoryDriver, MemoryStore};
use std::{
    sync::{Arc, Mutex, Once},
    time::Duration,
};
use tracing::{Event, Subscriber, subscriber::DefaultGuard};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
};

const SECOND: Duration = Duration::from_secs(1);

/// One store, with its way to wake waiters.
struct Bench {
    store: MemoryStore,
    wake: Wake,
}

impl Bench {
    fn new(wake: Wake) -> Self {
        // An event that is first met by a thread without a subscriber while another thread gets one may stay off for good.
        static EVENTS_ARE_ON: Once = Once::new();
        EVENTS_ARE_ON
            .call_once(|| tracing::subscriber::set_global_default(Registry::default()).unwrap());
        let store = MemoryStore::new(Clock::simulated());
        Self { store, wake }
    }

    /// A client, and the faults between it and the store.
    fn client(&self) -> (Client, Faults) {
        let driver = Arc::new(self.driver());
        let faults = driver.faults().clone();
        (self.client_over(driver), faults)
    }

    fn driver(&self) -> MemoryDriver {
        MemoryDriver::connect(&self.store, MemoryConfig::new(self.wake))
    }

    fn client_over(&self, driver: Arc<MemoryDriver>) -> Client {
        let builder = Client::builder(driver).clock(self.store.clock().clone());
        builder.build().unwrap()
    }
}

/// Runs `action` at the first event of that target on this thread: a point between two steps that no driver
/// can observe.
fn at_first_event(target: &'static str, action: impl FnOnce() + Send + 'static) -> DefaultGuard {
    let action = Mutex::new(Some(Box::new(action) as Box<dyn FnOnce() + Send>));
    let layer = AtEvent { target, action };
    tracing::subscriber::set_default(Registry::default().with(layer))
}

struct AtEvent {
    target: &'static str,
    action: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl<S: Subscriber> Layer<S> for AtEvent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == self.target {
            let action = self.action.lock().unwrap().take();
            action.into_iter().for_each(|action| action());
        }
    }
}
