//! Holds under way: which acquires and repairs of this client have not ended at every store.
//!
//! A store may answer one of these after the client has released the hold everywhere. What it then has taken is released
//! where it answered; no client asks for a released hold again.

use dlock_core::{
    Effect, HoldId, RetryClass,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Release, Result},
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// For each hold with a call under way, whether it was released since.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<HashMap<HoldId, Weak<AtomicBool>>>);

impl Holds {
    /// Whether the hold was released, known as long as the value lives.
    pub(crate) fn watch(&self, hold: HoldId) -> Arc<AtomicBool> {
        let mut all = self.0.lock();
        let known = all.get(&hold).and_then(Weak::upgrade);
        if let Some(released) = known.filter(|released| !released.load(Ordering::SeqCst)) {
            return released;
        }
        if all.len() == all.capacity() {
            all.retain(|_, released| released.strong_count() > 0);
        }
        let released = Arc::default();
        all.insert(hold, Arc::downgrade(&released));
        released
    }

    /// From now on, what a call takes for this hold has to go.
    pub(crate) fn release(&self, hold: HoldId) {
        if let Some(released) = self.0.lock().get(&hold).and_then(Weak::upgrade) {
            released.store(true, Ordering::SeqCst);
        }
    }
}

/// Acquires at one store, and gives back what it takes of a hold that was released meanwhile: then it is an error.
pub(crate) async fn acquire(
    driver: &dyn DistributedLock,
    req: &Acquire,
    released: &AtomicBool,
) -> Result<Acquired> {
    let answer = driver.acquire(req).await;
    if matches!(answer, Ok(Acquired::Granted(_))) && released.load(Ordering::SeqCst) {
        if let Some(next) = req.next_ticket {
            // The client takes it for not queued. After an error the entry ends by itself.
            drop(driver.leave(&req.name, next).await);
        }
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        driver.release(&release).await?;
        let error = DriverError::unavailable("the hold was released meanwhile");
        return Err(error.with_retry(RetryClass::Now).with_effect(Effect::None));
    }
    answer
}
