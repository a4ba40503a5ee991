//! Traffic of the clients: how many calls they make, and which they must never make.

use super::{Facts, Judge};
use dlock_core::{Fingerprint, HoldId, Instant, LockName, driver::Renew};
use std::{collections::HashSet, time::Duration};

/// More calls than this of all clients within one second mean that a task spins.
const MOST_IN_A_SECOND: u64 = 3_000;

/// More calls than this without any time passing mean that a task spins.
const MOST_AT_ONCE: u64 = 1_000;

#[derive(Default)]
pub(super) struct Traffic {
    pub(super) calls: u64,
    pub(super) busiest: u64,
    prompt: u64,
    second: (u64, u64),
    instant: (Duration, u64),
}

impl Traffic {
    /// Failed, late, or never answered.
    pub(super) fn faults(&self) -> u64 {
        self.calls - self.prompt
    }

    fn count(&mut self, now: Duration) -> u64 {
        self.calls += 1;
        let second = now.as_secs();
        self.second = match self.second {
            (same, count) if same == second => (same, count + 1),
            _ => (second, 1),
        };
        self.instant = match self.instant {
            (same, count) if same == now => (same, count + 1),
            _ => (now, 1),
        };
        self.busiest = self.busiest.max(self.second.1);
        self.instant.1
    }
}

impl Judge {
    /// Records a call. Returns whether it is allowed.
    pub(crate) fn called(&self) -> bool {
        let mut facts = self.facts();
        let now = facts.log.now();
        let at_once = facts.traffic.count(now);
        if at_once == MOST_AT_ONCE {
            facts.breach(format_args!("{at_once} calls at one instant"));
        }
        if facts.traffic.second.1 == MOST_IN_A_SECOND {
            facts.breach(format_args!("{MOST_IN_A_SECOND} calls in one second"));
        }
        at_once < MOST_AT_ONCE
    }

    pub(crate) fn answered_at_once(&self) {
        self.facts().traffic.prompt += 1;
    }

    pub(crate) fn asks(&self, client: usize, owner: Fingerprint) {
        self.facts().owners.entry(owner).or_default().insert(client);
    }

    /// Records that an acquire was answered while its client still waited for it.
    pub(crate) fn answers(&self, client: usize, name: &LockName, now: Instant) {
        self.facts().answers.insert((client, name.clone()), now);
    }

    /// When that was last the case.
    pub(crate) fn last_answer(&self, client: usize, name: &LockName) -> Instant {
        let facts = self.facts();
        let last = facts.answers.get(&(client, name.clone()));
        last.copied().unwrap_or_default()
    }

    pub(crate) fn releases(&self, client: usize, hold: HoldId) {
        let mut facts = self.facts();
        let now = facts.log.now();
        facts.releases.entry((client, hold)).or_insert(now);
    }

    pub(crate) fn renews(&self, client: usize, batch: &[Renew], limit: usize) {
        let mut facts = self.facts();
        let mut names = HashSet::new();
        for entry in batch {
            if !names.insert(&entry.name) {
                facts.breach(format_args!("{:?} stands twice in a batch", entry.name));
            }
            // A renewal that was being sent at that very moment may overtake the release.
            let released = facts.releases.get(&(client, entry.hold));
            if released.is_some_and(|released| *released < facts.log.now()) {
                facts.breach(format_args!("{:?} renewed after its release", entry.name));
            }
        }
        for entry in batch {
            let detached = facts.detached.get(&entry.hold);
            if detached.is_some_and(|detached| *detached < facts.log.now()) {
                facts.breach(format_args!("{:?} renewed though detached", entry.name));
            }
        }
        if batch.len() > limit {
            facts.breach(format_args!("a batch of {}", batch.len()));
        }
    }
}

impl Facts {
    /// Whether a client that sent requests as this owner was shut down.
    pub(super) fn is_gone(&self, owner: &Fingerprint) -> bool {
        let clients = self.owners.get(owner);
        clients.is_some_and(|clients| clients.iter().any(|client| self.gone.contains(client)))
    }
}
