//! Peers: other lock crates, each used as its documentation shows.

use crate::{Result, work::Contender};
use rslock::{Lock, LockManager};
use std::time::Duration;

/// One name of rslock: Redlock over one server, 30 s, retried every 0 to 200 ms.
pub(super) struct Rslock {
    manager: LockManager,
    name: String,
}

/// One manager, and so one connection, for all names.
pub(super) fn rslock(url: &str, names: &[String]) -> Vec<Result<Rslock>> {
    let manager = LockManager::new(vec![url]);
    let one = |name: &String| Rslock {
        manager: manager.clone(),
        name: format!("rslock:{name}"),
    };
    names.iter().map(|name| Ok(one(name))).collect()
}

/// A manager of its own.
pub(super) fn rslock_of(url: &str, name: &str) -> Result<Rslock> {
    Ok(Rslock {
        manager: LockManager::new(vec![url]),
        name: format!("rslock:{name}"),
    })
}

impl Contender for Rslock {
    type Held = Lock;

    async fn acquire(&self) -> Result<Lock> {
        let name = self.name.as_bytes();
        Ok(self.manager.acquire_no_guard(name, LEASE).await?)
    }

    async fn release(&self, held: Lock) -> Result {
        self.manager.unlock(&held).await;
        Ok(())
    }
}

const LEASE: Duration = Duration::from_secs(30);
