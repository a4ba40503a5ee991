//! Holds under way: which acquires and renewals of this client have not ended at every store.
//!
//! A store may answer an acquire, or a repair, after the client has released the hold everywhere. What it then has taken
//! is released where it answered; no client asks for a released hold again.

use dlock_core::HoldId;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<HashMap<HoldId, UnderWay>>);

#[derive(Debug, Default)]
struct UnderWay {
    calls: usize,
    released: bool,
}

impl Holds {
    /// Watches a hold until the value is dropped.
    pub(crate) fn watch(self: &Arc<Self>, hold: HoldId) -> Watched {
        self.lock().entry(hold).or_default().calls += 1;
        Watched {
            holds: Arc::clone(self),
            hold,
        }
    }

    /// From now on, what a call takes for this hold has to go.
    pub(crate) fn release(&self, hold: HoldId) {
        if let Some(under_way) = self.lock().get_mut(&hold) {
            under_way.released = true;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HoldId, UnderWay>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A hold with a call under way.
#[derive(Debug)]
pub(crate) struct Watched {
    holds: Arc<Holds>,
    hold: HoldId,
}

impl Watched {
    pub(crate) fn is_released(&self) -> bool {
        self.holds
            .lock()
            .get(&self.hold)
            .is_some_and(|under_way| under_way.released)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut all = self.holds.lock();
        if let Some(under_way) = all.get_mut(&self.hold) {
            under_way.calls -= 1;
            if under_way.calls == 0 {
                all.remove(&self.hold);
            }
        }
    }
}
