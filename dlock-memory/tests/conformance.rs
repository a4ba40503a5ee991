//! The suite over the model store: three wake-up modes, in simulated time.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, Unsupported, main as suite,
};
use dlock_core::{
    Clock, LockName,
    driver::{DistributedLock, Wake},
};
use dlock_memory::{Fault, MemoryConfig, MemoryDriver, MemoryStore, WakeUpFault};
use std::{process::ExitCode, sync::Arc, time::Duration};

fn main() -> ExitCode {
    let memory = |name, wake, keeps| Box::new(Memory { name, wake, keeps }) as Box<dyn MakeFixture>;
    suite(
        vec![
            memory("memory-queue", Wake::Queue, Keeps::Everything),
            memory("memory-notify", Wake::Notify, Keeps::Nothing),
            memory("memory-poll", Wake::Poll, Keeps::Nothing),
        ],
        Mutants::Whole,
    )
}

/// One wake-up mode, and what a restart of its server keeps.
#[derive(Clone, Copy)]
struct Memory {
    name: &'static str,
    wake: Wake,
    keeps: Keeps,
}

#[async_trait]
impl MakeFixture for Memory {
    fn name(&self) -> &str {
        self.name
    }

    fn time(&self) -> Time {
        Time::Simulated
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let store = MemoryStore::new(Clock::simulated());
        Ok(Arc::new(Model { store, of: *self }))
    }
}

struct Model {
    store: MemoryStore,
    of: Memory,
}

impl Model {
    fn connect(&self) -> MemoryDriver {
        MemoryDriver::connect(&self.store, MemoryConfig::new(self.of.wake))
    }
}

#[async_trait]
impl Fixture for Model {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(self.connect()))
    }

    fn clock(&self) -> Clock {
        self.store.clock().clone()
    }

    fn url(&self) -> Result<String, Unsupported> {
        Err(Unsupported("the store lives inside one process"))
    }

    fn network(&self) -> Result<&dyn Network, Unsupported> {
        Ok(self)
    }

    fn server(&self) -> Result<&dyn Server, Unsupported> {
        Ok(self)
    }

    fn records(&self) -> Result<&dyn Records, Unsupported> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, Unsupported> {
        Ok(self)
    }
}

#[async_trait]
impl Network for Model {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let driver = Arc::new(self.connect());
        let script = Script(driver.faults().clone());
        Ok((driver, Box::new(script)))
    }
}

/// The driver's own fault script stands for the network.
struct Script(dlock_memory::Faults);

#[async_trait]
impl Faults for Script {
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        self.0.once(kind(of), Fault::ErrorAfter);
        Ok(())
    }

    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        self.0.once(kind(of), Fault::Late(by));
        Ok(())
    }

    async fn cut(&self) -> Result<(), Failure> {
        self.0.wake_ups(WakeUpFault::Cut);
        self.0.wake_ups(WakeUpFault::Deliver);
        Ok(())
    }

    async fn down(&self) -> Result<(), Failure> {
        self.0.always_all(Fault::ErrorBefore);
        Ok(())
    }

    async fn up(&self) -> Result<(), Failure> {
        self.0.clear();
        Ok(())
    }

    async fn delay(&self, by: Duration) -> Result<(), Failure> {
        self.0.always_all(Fault::Delayed(by));
        Ok(())
    }
}

fn kind(of: Call) -> dlock_memory::Call {
    match of {
        Call::Acquire => dlock_memory::Call::Acquire,
        Call::Renew => dlock_memory::Call::Renew,
        Call::Release => dlock_memory::Call::Release,
    }
}

#[async_trait]
impl Server for Model {
    async fn stop(&self) -> Result<(), Failure> {
        self.store.stop();
        Ok(())
    }

    async fn cont(&self) -> Result<(), Failure> {
        self.store.cont();
        Ok(())
    }

    async fn restart(&self) -> Result<(), Failure> {
        self.store.restart(self.keeps() == Keeps::Everything);
        Ok(())
    }

    fn keeps(&self) -> Keeps {
        self.of.keeps
    }
}

#[async_trait]
impl Records for Model {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        // The model has no back door of that size; a client of its own is behind the back of the others.
        self.connect().break_lock(name, None).await?;
        Ok(())
    }

    async fn flush(&self) -> Result<(), Failure> {
        self.store.flush();
        Ok(())
    }
}

#[async_trait]
impl StoreTime for Model {
    async fn forward(&self, by: Duration) -> Result<(), Failure> {
        self.store.step_clock(by);
        Ok(())
    }

    async fn back(&self, by: Duration) -> Result<(), Failure> {
        self.store.step_clock_back(by);
        Ok(())
    }
}
