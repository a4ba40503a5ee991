//! The suite over quorums of three memory stores, in simulated time: all work, or one is down, or stands still. And
//! over one of three Redis servers.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod redis;

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, main as suite,
};
use dlock_core::{
    Clock, LockName,
    driver::{DistributedLock, Wake},
};
use dlock_memory::{Fault, MemoryConfig, MemoryDriver, MemoryStore, WakeUpFault};
use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
use std::{
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

fn main() -> ExitCode {
    let quorum = |name, wake, keeps, minority| {
        Box::new(Quorum {
            name,
            wake,
            keeps,
            minority,
        }) as Box<dyn MakeFixture>
    };
    suite(
        vec![
            quorum(
                "quorum-queue",
                Wake::Queue,
                Keeps::Everything,
                Minority::Works,
            ),
            quorum("quorum-poll", Wake::Poll, Keeps::Nothing, Minority::Works),
            quorum(
                "quorum-first-down",
                Wake::Queue,
                Keeps::Everything,
                Minority::Down(0),
            ),
            quorum(
                "quorum-last-stopped",
                Wake::Notify,
                Keeps::Everything,
                Minority::Stopped(2),
            ),
            Box::new(redis::Redis),
        ],
        Mutants::Off,
    )
}

/// What one of the stores does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Minority {
    Works,
    Down(usize),
    Stopped(usize),
}

#[derive(Clone, Copy)]
struct Quorum {
    name: &'static str,
    wake: Wake,
    keeps: Keeps,
    minority: Minority,
}

#[async_trait]
impl MakeFixture for Quorum {
    fn name(&self) -> &str {
        self.name
    }

    fn time(&self) -> Time {
        Time::Simulated
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let clock = Clock::simulated();
        let stores = [(); 3].map(|()| MemoryStore::new(clock.clone()));
        for (store, ahead) in stores.iter().zip([0, 7, 3]) {
            // Servers do not agree about the time.
            store.step_clock(Duration::from_millis(ahead));
        }
        match self.minority {
            Minority::Works => {}
            Minority::Down(at) => stores[at].down(),
            Minority::Stopped(at) => stores[at].stop(),
        }
        Ok(Arc::new(Model { stores, of: *self }))
    }
}

struct Model {
    stores: [MemoryStore; 3],
    of: Quorum,
}

impl Model {
    /// A driver, and those of its stores.
    async fn connect(
        &self,
    ) -> Result<(Arc<dyn DistributedLock>, Vec<dlock_memory::Faults>), Failure> {
        let faults = Arc::new(Mutex::new(Vec::new()));
        let stores = self
            .stores
            .iter()
            .zip(["a", "b", "c"])
            .map(|(store, label)| {
                let (store, config, faults) = (
                    store.clone(),
                    MemoryConfig::new(self.of.wake),
                    Arc::clone(&faults),
                );
                Store::new(label, move || {
                    let driver = MemoryDriver::connect(&store, config.clone());
                    faults.lock().unwrap().push(driver.faults().clone());
                    async move { Ok(Arc::new(driver) as _) }
                })
            });
        let clock = self.stores[0].clock().clone();
        let config = QuorumConfig::new(stores.collect())?.with_clock(clock);
        let driver = QuorumDriver::connect(config).await?;
        let faults = std::mem::take(&mut *faults.lock().unwrap());
        Ok((Arc::new(driver), faults))
    }

    /// The stores that work.
    fn working(&self) -> impl Iterator<Item = &MemoryStore> {
        let without = match self.of.minority {
            Minority::Works => None,
            Minority::Down(at) | Minority::Stopped(at) => Some(at),
        };
        self.stores
            .iter()
            .enumerate()
            .filter(move |(at, _)| Some(*at) != without)
            .map(|(_, store)| store)
    }
}

#[async_trait]
impl Fixture for Model {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(self.connect().await?.0)
    }

    fn clock(&self) -> Clock {
        self.stores[0].clock().clone()
    }

    fn network(&self) -> Result<&dyn Network, dlock_conformance::Unsupported> {
        Ok(self)
    }

    fn server(&self) -> Result<&dyn Server, dlock_conformance::Unsupported> {
        Ok(self)
    }

    fn records(&self) -> Result<&dyn Records, dlock_conformance::Unsupported> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, dlock_conformance::Unsupported> {
        Ok(self)
    }
}

#[async_trait]
impl Network for Model {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let (driver, scripts) = self.connect().await?;
        Ok((driver, Box::new(Scripts(scripts))))
    }
}

/// The fault scripts of the drivers stand for the network, which is one for all.
struct Scripts(Vec<dlock_memory::Faults>);

#[async_trait]
impl Faults for Scripts {
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        self.0
            .iter()
            .for_each(|script| script.once(kind(of), Fault::ErrorAfter));
        Ok(())
    }

    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        self.0
            .iter()
            .for_each(|script| script.once(kind(of), Fault::Late(by)));
        Ok(())
    }

    async fn cut(&self) -> Result<(), Failure> {
        for script in &self.0 {
            script.wake_ups(WakeUpFault::Cut);
            script.wake_ups(WakeUpFault::Deliver);
        }
        Ok(())
    }

    async fn down(&self) -> Result<(), Failure> {
        self.0
            .iter()
            .for_each(|script| script.always_all(Fault::ErrorBefore));
        Ok(())
    }

    async fn up(&self) -> Result<(), Failure> {
        self.0.iter().for_each(dlock_memory::Faults::clear);
        Ok(())
    }

    async fn delay(&self, by: Duration) -> Result<(), Failure> {
        self.0
            .iter()
            .for_each(|script| script.always_all(Fault::Delayed(by)));
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
        self.working().for_each(MemoryStore::stop);
        Ok(())
    }

    async fn cont(&self) -> Result<(), Failure> {
        self.working().for_each(MemoryStore::cont);
        Ok(())
    }

    async fn restart(&self) -> Result<(), Failure> {
        self.working()
            .for_each(|store| store.restart(self.keeps() == Keeps::Everything));
        Ok(())
    }

    fn keeps(&self) -> Keeps {
        self.of.keeps
    }
}

#[async_trait]
impl Records for Model {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        for store in self.working() {
            MemoryDriver::connect(store, MemoryConfig::default())
                .break_lock(name, None)
                .await?;
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), Failure> {
        self.working().for_each(MemoryStore::flush);
        Ok(())
    }
}

#[async_trait]
impl StoreTime for Model {
    async fn forward(&self, by: Duration) -> Result<(), Failure> {
        self.stores.iter().for_each(|store| store.step_clock(by));
        Ok(())
    }

    async fn back(&self, by: Duration) -> Result<(), Failure> {
        self.stores
            .iter()
            .for_each(|store| store.step_clock_back(by));
        Ok(())
    }
}
