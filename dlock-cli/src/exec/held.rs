//! What `dlock exec` holds: guards of single locks, and the guard of a set.

use crate::exec::locks::Locks;
use dlock::{Error, Guard, LockName, ReleaseOutcome, SetGuard};

#[derive(Default)]
pub(super) struct Held {
    pub(super) single: Vec<Guard>,
    pub(super) set: Option<SetGuard>,
}

impl Held {
    pub(super) fn guards(&self) -> impl Iterator<Item = &Guard> {
        let set = self.set.iter().flat_map(|set| set.guards());
        self.single.iter().chain(set)
    }

    /// All locks; this one is the main one.
    pub(super) fn locks(&self, main: &LockName) -> Locks<'_> {
        let (main, others): (Vec<_>, Vec<_>) =
            self.guards().partition(|guard| guard.name() == main);
        let main = main.first().copied();
        Locks {
            main: main.expect("the lock that the command line names is among those acquired"),
            others,
        }
    }

    /// Releases all.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the releases to the background.
    pub(super) async fn release(self) -> Vec<(LockName, Result<ReleaseOutcome, Error>)> {
        let mut released = Vec::new();
        for guard in self.single {
            let name = guard.name().clone();
            released.push((name, guard.release().await));
        }
        if let Some(set) = self.set {
            released.extend(set.release().await);
        }
        released
    }
}
