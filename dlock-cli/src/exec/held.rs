//! Held locks: all that a command runs under, as one. The loss of one of them is the loss of all.

use dlock::{Error, Guard, GuardState, LockName, LossReason, ReleaseOutcome, SetGuard};
use futures_util::{FutureExt, future::select_all};
use std::time::Duration;

pub(super) struct Held {
    /// The one that the command line names first.
    main: LockName,
    pub(super) single: Vec<Guard>,
    pub(super) set: Option<SetGuard>,
}

impl Held {
    /// None yet.
    pub(super) fn new(main: &LockName) -> Self {
        Self {
            main: main.clone(),
            single: Vec::new(),
            set: None,
        }
    }

    pub(super) fn one(guard: Guard) -> Self {
        let mut held = Self::new(guard.name());
        held.single.push(guard);
        held
    }

    /// All of them, the main one first.
    pub(super) fn guards(&self) -> impl Iterator<Item = &Guard> {
        let main = self.all().filter(|guard| *guard.name() == self.main);
        main.chain(self.all().filter(|guard| *guard.name() != self.main))
    }

    fn all(&self) -> impl Iterator<Item = &Guard> {
        let set = self.set.iter().flat_map(|set| set.guards());
        self.single.iter().chain(set)
    }

    pub(super) fn main(&self) -> &Guard {
        self.guards()
            .next()
            .expect("a command runs under the lock that its command line names first")
    }

    pub(super) fn are_held(&self) -> bool {
        self.all().all(|guard| guard.check().is_ok())
    }

    /// Whether the lease of one of them ended, or the presence that it depends on.
    pub(super) fn are_over(&self) -> bool {
        use LossReason::{Deadline, Presence};
        self.all()
            .any(|guard| matches!(guard.state(), GuardState::Lost(Deadline | Presence)))
    }

    /// The one that is lost, or ends first.
    pub(super) fn weakest(&self) -> &Guard {
        self.guards()
            .min_by_key(|guard| guard.remaining())
            .unwrap_or_else(|| self.main())
    }

    /// How long all of them are certainly held.
    pub(super) fn remaining(&self) -> Duration {
        self.weakest().remaining()
    }

    /// Resolves when one of them is lost.
    pub(super) async fn lost(&self) {
        select_all(self.all().map(|guard| guard.lost().boxed())).await;
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
