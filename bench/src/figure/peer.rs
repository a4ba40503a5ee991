//! Peers: other lock crates, each used as its documentation shows.

use crate::{Result, work::Contender};
use rslock::{Lock, LockManager};
use std::time::Duration;

/// One name of rslock: Redlock over one server, 30 s, retried every 0 to 200 ms.
pub(crate) struct Rslock {
    manager: LockManager,
    name: String,
    lease: Duration,
}

impl Rslock {
    pub(crate) fn new(manager: LockManager, name: &str, lease: Duration) -> Self {
        Self {
            manager,
            name: format!("rslock:{name}"),
            lease,
        }
    }
}

/// One manager, and so one connection, for all names.
pub(super) fn rslock(url: &str, names: &[String]) -> Vec<Result<Rslock>> {
    let manager = LockManager::new(vec![url]);
    let one = |name: &String| Rslock::new(manager.clone(), name, LEASE);
    names.iter().map(|name| Ok(one(name))).collect()
}

/// A manager of its own.
pub(super) fn rslock_of(url: &str, name: &str) -> Result<Rslock> {
    Ok(Rslock::new(LockManager::new(vec![url]), name, LEASE))
}

impl Contender for Rslock {
    type Held = Lock;

    async fn acquire(&self) -> Result<Lock> {
        let name = self.name.as_bytes();
        Ok(self.manager.acquire_no_guard(name, self.lease).await?)
    }

    async fn release(&self, held: Lock) -> Result {
        self.manager.unlock(&held).await;
        Ok(())
    }
}

const LEASE: Duration = Duration::from_secs(30);
