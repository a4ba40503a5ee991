//! Mutual exclusion: one owner holds a lock at a time, tokens grow, and what a guard reports is true in the
//! store.

use super::{Facts, Judge, Record};
use crate::rig::Rig;
use dlock_core::{
    Clock, Fingerprint, Guard, HoldId, Instant, LockName, Mode, Snapshot,
    driver::{DistributedLock, Wake},
};
use futures_util::FutureExt;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

/// A guard as its user knows it.
pub(crate) struct Entry {
    pub(super) id: u64,
    /// When it was asked for.
    pub(super) since: Duration,
    pub(super) client: usize,
    clock: Clock,
    pub(super) name: LockName,
    token: u64,
    pub(super) owner: Fingerprint,
    guard: Weak<Guard>,
    /// It is detached from watchdog and drop: no guard reports any more how long it lasts.
    pub(super) is_detached: bool,
    /// It was entered from outside, so it takes up a permit.
    takes_part: bool,
    /// An event happened that ends holds, or lets another owner in, by declaration.
    pub(super) void: bool,
    /// The time at which it must be lost, in true time.
    ends: Option<Duration>,
    /// The latest end that it ever reported, on its client's clock.
    pub(super) promised: Instant,
}

/// How a guard came to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// When it was asked for.
    pub(crate) since: Duration,
    /// It may be another hold of an owner that already holds the lock.
    pub(crate) is_shared: bool,
    /// It was entered through a guard that holds the lock.
    pub(crate) is_within: bool,
    /// After an early release, the name stays unavailable.
    pub(crate) is_keeping: bool,
    /// It must be lost after that time at the latest.
    pub(crate) most: Option<Duration>,
    /// Its number in its client's queue.
    pub(crate) queued: Option<u64>,
}

impl Grant {
    /// For another hold of an owner that already holds the lock.
    pub(crate) fn shared(since: Duration) -> Self {
        Self {
            since,
            is_shared: true,
            is_within: true,
            is_keeping: false,
            most: None,
            queued: None,
        }
    }
}

impl Judge {
    /// A task enters its client's queue for a name.
    pub(crate) fn queues(&self, client: usize, name: &LockName) -> u64 {
        let mut facts = self.facts();
        facts.queued += 1;
        let place = facts.queued;
        let queue = facts.waiting.entry((client, name.clone())).or_default();
        queue.push(place);
        place
    }

    /// A task left the queue, with the lock or without.
    pub(crate) fn leaves(&self, client: usize, name: &LockName, place: u64) {
        let mut facts = self.facts();
        if let Some(queue) = facts.waiting.get_mut(&(client, name.clone())) {
            queue.retain(|other| *other != place);
        }
    }

    /// A guard was given to its user. Returns its number.
    pub(crate) fn granted(&self, rig: &Rig, guard: &Arc<Guard>, grant: Grant) -> u64 {
        let (name, token) = (guard.name().clone(), guard.token().0);
        let owner = guard.owner();
        let mut facts = self.facts();
        facts.entered += 1;
        facts.grants += 1;
        let id = facts.entered;
        let entry = Entry {
            id,
            since: grant.since,
            client: rig.id,
            clock: rig.clock.clone(),
            name,
            token,
            owner,
            guard: Arc::downgrade(guard),
            is_detached: false,
            takes_part: !grant.is_within,
            ends: grant.most.map(|most| facts.log.now() + most),
            void: facts.voided.is_some_and(|voided| voided >= grant.since),
            promised: rig.clock.now() + guard.remaining(),
        };
        facts.log.put(format_args!(
            "#{id} client {} inside {:?} token {token} owner {owner} for {:?}{}",
            rig.id,
            entry.name,
            guard.remaining(),
            if entry.void { " (void)" } else { "" }
        ));
        if guard.check().is_err() {
            facts.breach(format_args!("#{id} was lost when it was given out"));
        }
        facts.compare(&entry);
        facts.compare_tokens(&entry, grant);
        facts.compare_queue(&entry, grant);
        if grant.is_keeping {
            facts.record(&entry.name).keeping = Some(entry.token);
        }
        self.compare_promptness(&mut facts, &entry, grant);
        facts.entries.push(entry);
        self.compare_with_store(&mut facts);
        id
    }

    /// Checks that what guards report is what the store has.
    pub(crate) fn look(&self) {
        self.compare_with_store(&mut self.facts());
    }

    fn compare_with_store(&self, facts: &mut Facts) {
        if !self.looks() {
            return;
        }
        let mut seen: BTreeMap<LockName, Option<Snapshot>> = BTreeMap::new();
        let mut wrong = Vec::new();
        let now = facts.log.now();
        for entry in &mut facts.entries {
            let Some(guard) = entry.says_held() else {
                continue;
            };
            if entry.ends.is_some_and(|end| now > end) {
                wrong.push(format!("#{} is held longer than it may be", entry.id));
            }
            entry.promised = entry.promised.max(entry.clock.now() + guard.remaining());
            let shown = seen
                .entry(entry.name.clone())
                .or_insert_with(|| self.show(&entry.name));
            let Some(shown) = shown.as_ref().filter(|_| !entry.void) else {
                continue;
            };
            let is_there = shown.holders.first().is_some_and(|holder| {
                holder.owner == entry.owner
                    && holder.token.is_some_and(|token| token.0 == entry.token)
            });
            if !is_there {
                wrong.push(format!(
                    "#{} says it is held, the store has {shown:?}",
                    entry.id
                ));
            }
        }
        for wrong in wrong {
            facts.breach(format_args!("{wrong}"));
        }
    }

    /// The state of a name in the store; `None` when the store cannot be read.
    pub(crate) fn show(&self, name: &LockName) -> Option<Snapshot> {
        let shown = self
            .looks()
            .then(|| self.observer.inspect(name).now_or_never());
        shown.flatten()?.ok()
    }

    /// Without faults, a free name goes to a waiter, at once or at the next poll.
    fn compare_promptness(&self, facts: &mut Facts, entry: &Entry, grant: Grant) {
        let now = facts.log.now();
        let most = match self.wake {
            Wake::Poll => Duration::from_millis(110),
            _ => Duration::from_millis(3),
        };
        let is_first = !facts.entries.iter().any(|other| other.name == entry.name);
        let record = facts.record(&entry.name);
        let free = record.free.take();
        let (shut, since) = (record.shut, free.map(|free| free.max(grant.since)));
        if now < shut && !entry.void {
            facts.breach(format_args!(
                "#{} inside while kept shut until {shut:?}",
                entry.id
            ));
        }
        // A waiter for an unavailable name gets no wake-up when it becomes available, and polls at its own
        // pace.
        // Nor does a sharer when the claim of a waiter that has given up ends.
        let is_sharer = entry.owner.mode() != Mode::Exclusive;
        if let Some(since) =
            since.filter(|since| is_first && self.is_calm && shut < *since && !is_sharer)
            && now > since + most
        {
            facts.breach(format_args!(
                "#{} waited {:?} for a free name",
                entry.id,
                now - since
            ));
        }
    }

    /// This guard's reports no longer count: it is being released, or was lost.
    pub(crate) fn outside(&self, id: u64) -> Option<Entry> {
        let mut facts = self.facts();
        let place = facts.entries.iter().position(|entry| entry.id == id)?;
        Some(facts.entries.remove(place))
    }

    /// It was released, as far as its user knows.
    pub(crate) fn free(&self, entry: &Entry) {
        let mut facts = self.facts();
        let now = facts.log.now();
        let is_last = !facts.entries.iter().any(|other| other.name == entry.name);
        let record = facts.record(&entry.name);
        // The name is unavailable, and it is not known when it will be free.
        if is_last && record.keeping != Some(entry.token) {
            record.free = Some(now);
        }
    }

    /// The hold goes on without a guard.
    pub(crate) fn detached(&self, id: u64, hold: HoldId) {
        let mut facts = self.facts();
        let now = facts.log.now();
        facts.detached.insert(hold, now);
        if let Some(entry) = facts.entries.iter_mut().find(|entry| entry.id == id) {
            entry.is_detached = true;
        }
    }
}

impl Judge {
    /// The detached hold is being attached, to become a guard.
    pub(crate) fn attaches(&self, hold: HoldId) {
        self.facts().detached.remove(&hold);
    }
}

impl Entry {
    /// The guard, if its `check` would return `Ok` now.
    pub(super) fn says_held(&self) -> Option<Arc<Guard>> {
        self.guard.upgrade().filter(|guard| guard.check().is_ok())
    }

    /// Whether it lasted as long as it ever reported.
    pub(crate) fn kept_its_promise(&self) -> bool {
        // The core is early by a timer's tick, in order to be in time.
        self.clock.now() + Duration::from_millis(2) >= self.promised
    }

    /// Whether the store does not have it, if the store can be read.
    pub(super) fn is_missing(&self, judge: &Judge) -> bool {
        let shown = judge.show(&self.name);
        shown.is_some_and(|shown| {
            let mut holders = shown.holders.iter();
            holders.all(|holder| holder.token.is_none_or(|token| token.0 != self.token))
        })
    }
}

impl Facts {
    pub(super) fn record(&mut self, name: &LockName) -> &mut Record {
        self.names.entry(name.clone()).or_default()
    }

    /// Checks that no two owners hold the lock at once: the last one's guard is checked when the next one
    /// enters.
    fn compare(&mut self, entry: &Entry) {
        let mut wrong = Vec::new();
        for other in self.entries.iter().filter(|other| other.name == entry.name) {
            if other.says_held().is_none()
                || (other.owner, other.token) == (entry.owner, entry.token)
            {
                continue;
            }
            if !other.void && !entry.void {
                wrong.push(format!(
                    "two owners inside {:?}: #{} (token {}) and #{} (token {})",
                    entry.name, other.id, other.token, entry.id, entry.token
                ));
            }
        }
        if let Mode::Permit { of } = entry.owner.mode()
            && entry.takes_part
        {
            let inside = self.entries.iter().filter(|other| {
                other.name == entry.name
                    && other.takes_part
                    && !other.void
                    && other.says_held().is_some()
            });
            let inside = inside.count() + 1;
            if u32::try_from(inside).is_ok_and(|inside| inside > of.get()) && !entry.void {
                wrong.push(format!(
                    "{inside} hold one of {of} permits of {:?}",
                    entry.name
                ));
            }
        }
        for wrong in wrong {
            self.breach(format_args!("{wrong}"));
        }
    }

    fn compare_tokens(&mut self, entry: &Entry, grant: Grant) {
        let record = self.record(&entry.name);
        let last = record.token;
        record.token = last.max(entry.token);
        let owner = *record.owners.entry(entry.token).or_insert(entry.owner);
        if entry.token < last && !entry.void {
            self.breach(format_args!(
                "#{}: token {} after {last}",
                entry.id, entry.token
            ));
        }
        if owner != entry.owner {
            self.breach(format_args!(
                "#{}: two owners have token {}",
                entry.id, entry.token
            ));
        }
        if entry.token == last && !grant.is_shared && !entry.void {
            self.breach(format_args!(
                "#{}: token {last} again, not by re-entry",
                entry.id
            ));
        }
    }

    fn compare_queue(&mut self, entry: &Entry, grant: Grant) {
        let Some(place) = grant.queued else {
            return;
        };
        let queue = self.waiting.get(&(entry.client, entry.name.clone()));
        let earlier = queue.and_then(|queue| queue.iter().copied().find(|other| *other < place));
        if let Some(earlier) = earlier {
            self.breach(format_args!(
                "#{}: waiter {place} was served before waiter {earlier} of the same client",
                entry.id
            ));
        }
    }
}

impl Judge {
    /// Whether the store has that incarnation now.
    pub(crate) fn has(&self, guard: &Guard) -> bool {
        let shown = self.show(guard.name());
        shown.is_some_and(|shown| {
            let mut holders = shown.holders.iter();
            holders.any(|holder| holder.token == Some(guard.token()))
        })
    }
}
