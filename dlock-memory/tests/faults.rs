//! What goes wrong between a driver and its store, each fault proven.

use dlock_core::{
    Acquire, Acquired, Clock, DistributedLock, Effect, HoldId, Lease, LockName, Owner, Snapshot,
};
use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
use std::time::Duration;

fn name() -> LockName {
    "orders:42".parse().unwrap()
}

fn ask(clock: &Clock, owner: &str, hold: u64) -> Acquire {
    let give_up = clock.now() + Duration::from_secs(5);
    Acquire::new(
        name(),
        Owner::from_seed(owner),
        HoldId::from_bits(hold),
        Lease::default(),
        give_up,
    )
}

fn connect(clock: &Clock) -> MemoryDriver {
    MemoryDriver::connect(&MemoryStore::new(clock.clone()), MemoryConfig::default())
}

async fn seen(driver: &MemoryDriver) -> Snapshot {
    driver.inspect(&name()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn error_before_executes_nothing_and_says_so() {
    let clock = Clock::simulated();
    let driver = connect(&clock);
    driver.faults().once(Call::Acquire, Fault::ErrorBefore);
    let error = driver.acquire(&ask(&clock, "a", 1)).await.unwrap_err();
    assert_eq!(error.effect(), Effect::None);
    assert_eq!(seen(&driver).await.holds, 0);
    assert!(matches!(
        driver.acquire(&ask(&clock, "a", 1)).await,
        Ok(Acquired::Granted(_))
    ));
}
