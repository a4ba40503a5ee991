//! The watchdog's decisions: a pure state machine, (state, event, now) → (state, actions). No I/O, no clock, no lock.
//!
//! Every hold has one entry and every entry one timer: its next renewal, the give-up of the one under way, or its deadline.
//! A deadline is the instant *before* a request was given to the driver plus what the store then granted, less the margin
//! (the validity of the Redlock description, counted from the send), so no reply can make a hold last longer than the store has it.

use crate::{
    clock::Instant,
    driver::{Lane, Renewed},
    error::LossReason,
    hold::TICK,
    lease::Lease,
    name::LockName,
    spread::SpreadMap,
};
use std::{
    collections::{BTreeSet, HashSet, hash_map::Entry as Slot},
    time::Duration,
};

/// One hold's entry in the watchdog. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(u64);

/// One batch on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BatchId(u64);

/// How a hold wants to be watched.
#[derive(Clone, Debug)]
pub(crate) struct Watched<T> {
    /// What the actions name it by.
    pub(crate) what: T,
    pub(crate) name: LockName,
    pub(crate) lane: Lane,
    /// When the request that was granted was given to the driver.
    pub(crate) sent: Instant,
    pub(crate) deadline: Instant,
    pub(crate) renewal: Option<Renewal>,
    /// Where a fixed lease ends, however often its session is proven.
    pub(crate) end: Option<Instant>,
}

impl<T> Watched<T> {
    /// Whether it lasts to its very end already.
    fn is_complete(&self) -> bool {
        self.end.is_some_and(|end| self.deadline >= end)
    }

    /// When it is asked for again after a request of `sent`: a third of its lease later, and earlier where less was proven.
    fn due(&self, sent: Instant) -> Instant {
        match self.renewal {
            Some(renewal) if !self.is_complete() => {
                let proven = self.deadline.since(sent);
                sent + Lease::renew_every(renewal.length).min(proven / 2)
            }
            _ => self.deadline,
        }
    }
}

/// How a hold is renewed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewal {
    /// What the store is asked for; `None` only proves that the hold is there.
    pub(crate) ask: Option<Duration>,
    /// The length that pace, bounds and margin are derived from.
    pub(crate) length: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action<T> {
    Send(Batch<T>),
    /// A renewal failed or is overdue: held until the deadline, but in doubt.
    Doubt(T),
    /// The key is for whoever finds that its user has given up on it meanwhile.
    Renewed(Key, T, Instant),
    Lost(T, LossReason),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Batch<T> {
    pub(crate) id: BatchId,
    pub(crate) lane: Lane,
    pub(crate) entries: Vec<(T, Option<Duration>)>,
    pub(crate) give_up: Instant,
}

/// What became of one entry of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Renewed(Renewed),
    Failed,
}

#[derive(Debug)]
pub(crate) struct Machine<T> {
    entries: SpreadMap<Key, Entry<T>>,
    timers: BTreeSet<(Instant, Key)>,
    batches: SpreadMap<BatchId, Flight>,
    limit: usize,
    count: u64,
}

#[derive(Debug)]
struct Entry<T> {
    watched: Watched<T>,
    timer: Instant,
    under_way: Option<BatchId>,
    failures: u32,
    over: bool,
}

/// What goes in one batch: one lane, and leases of like length, because a batch is given up with the shortest of them.
type Group = (Lane, u32);

#[derive(Debug)]
struct Flight {
    keys: Vec<Key>,
    sent: Instant,
}

impl<T: Clone> Machine<T> {
    /// A machine whose batches have at most `limit` entries.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            entries: SpreadMap::default(),
            timers: BTreeSet::new(),
            batches: SpreadMap::default(),
            limit: limit.max(1),
            count: 0,
        }
    }

    pub(crate) fn watch(&mut self, watched: Watched<T>) -> Key {
        self.count += 1;
        let key = Key(self.count);
        let timer = watched.due(watched.sent).min(watched.deadline - TICK);
        self.timers.insert((timer, key));
        self.entries.insert(
            key,
            Entry {
                watched,
                timer,
                under_way: None,
                failures: 0,
                over: false,
            },
        );
        key
    }

    /// The hold is given back or lost: nothing renews it from here on, and answers still under way are ignored.
    pub(crate) fn forget(&mut self, key: Key) {
        if let Some(entry) = self.entries.remove(&key) {
            self.timers.remove(&(entry.timer, key));
        }
    }

    /// When `tick` has something to do.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// A session ended: its holds are asked for at once.
    pub(crate) fn over(&mut self, lane: Lane, now: Instant) {
        for (key, entry) in &mut self.entries {
            // Told twice, it still is asked for once.
            let asked = entry.over && entry.under_way.is_some();
            if entry.watched.lane == lane && entry.watched.renewal.is_some() && !asked {
                self.timers.remove(&(entry.timer, *key));
                entry.over = true;
                entry.under_way = None;
                entry.timer = now;
                self.timers.insert((now, *key));
            }
        }
    }

    /// Time went on: deadlines that passed are losses, give-ups that passed are doubts, what is due is sent.
    pub(crate) fn tick(
        &mut self,
        now: Instant,
        jitter: &mut impl FnMut() -> f64,
    ) -> Vec<Action<T>> {
        let mut actions = Vec::new();
        let mut due = Vec::new();
        while let Some((at, key)) = self.timers.first().copied() {
            if at > now && !self.may_join(key, now, due.len()) {
                break;
            }
            self.timers.pop_first();
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            if now + TICK >= entry.watched.deadline {
                actions.push(Action::Lost(
                    entry.watched.what.clone(),
                    LossReason::Deadline,
                ));
                self.entries.remove(&key);
            } else if entry.under_way.take().is_some() {
                // Its give-up passed. The answer still counts when it comes, but nobody waits for it.
                actions.push(Action::Doubt(entry.watched.what.clone()));
                entry.failures += 1;
                self.set(
                    key,
                    now + pause(entry_length(&self.entries[&key]), 1, jitter()),
                    now,
                );
            } else if entry.wants_renewal() {
                due.push(key);
            } else {
                let deadline = entry.watched.deadline;
                self.set(key, deadline, now);
            }
        }
        self.send(due, now, &mut actions);
        actions
    }

    /// A batch was answered, in time or late.
    pub(crate) fn answered(
        &mut self,
        id: BatchId,
        answers: impl IntoIterator<Item = Answer>,
        now: Instant,
        jitter: &mut impl FnMut() -> f64,
    ) -> Vec<Action<T>> {
        let Some(flight) = self.batches.remove(&id) else {
            return Vec::new();
        };
        let mut actions = Vec::new();
        let mut answers = answers.into_iter();
        for key in flight.keys {
            let answer = answers.next().unwrap_or(Answer::Failed);
            let Slot::Occupied(mut slot) = self.entries.entry(key) else {
                continue;
            };
            let current = slot.get().under_way == Some(id);
            let what = slot.get().watched.what.clone();
            match answer {
                // Whoever asked the clock meanwhile was told so: no answer makes it held again.
                Answer::Renewed(Renewed::Until { .. }) | Answer::Failed
                    if now + TICK >= slot.get().watched.deadline =>
                {
                    let entry = slot.remove();
                    self.timers.remove(&(entry.timer, key));
                    actions.push(Action::Lost(what, LossReason::Deadline));
                }
                Answer::Renewed(Renewed::Until { valid_for }) => {
                    let entry = slot.get_mut();
                    let deadline = entry.proven(flight.sent, valid_for);
                    if deadline <= entry.watched.deadline && !current {
                        continue;
                    }
                    entry.watched.deadline = entry.watched.deadline.max(deadline);
                    entry.failures = 0;
                    // An answer from before the session ended says nothing of its end.
                    entry.over &= !current;
                    entry.under_way = None;
                    let deadline = entry.watched.deadline;
                    let next = entry.watched.due(flight.sent);
                    actions.push(Action::Renewed(key, what, deadline));
                    self.set(key, next, now);
                }
                Answer::Renewed(Renewed::NotHeld) => {
                    let reason = if slot.get().over {
                        LossReason::Session
                    } else {
                        LossReason::NotHeld
                    };
                    let entry = slot.remove();
                    self.timers.remove(&(entry.timer, key));
                    actions.push(Action::Lost(what, reason));
                }
                Answer::Failed if current => {
                    let entry = slot.get_mut();
                    entry.failures += 1;
                    entry.under_way = None;
                    let after = pause(entry_length(entry), entry.failures, jitter());
                    actions.push(Action::Doubt(what));
                    self.set(key, now + after, now);
                }
                Answer::Failed => {}
            }
        }
        actions
    }

    /// Everything is given up, for shutdown.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.timers.clear();
        self.batches.clear();
        let mut left: Vec<_> = self.entries.drain().collect();
        left.sort_by_key(|(key, _)| *key);
        left.into_iter()
            .map(|(_, entry)| entry.watched.what)
            .collect()
    }

    /// What is nearly due goes along with what is due, so that holds taken one after the other share a batch.
    fn may_join(&self, key: Key, now: Instant, gathered: usize) -> bool {
        if gathered == 0 || gathered >= self.limit {
            return false;
        }
        self.entries.get(&key).is_some_and(|entry| {
            let idle = entry.under_way.is_none() && entry.failures == 0;
            idle && entry.wants_renewal()
                && entry.watched.renewal.is_some_and(|renewal| {
                    entry.timer.since(now) <= Lease::renew_every(renewal.length) / 8
                })
        })
    }

    fn send(&mut self, due: Vec<Key>, now: Instant, actions: &mut Vec<Action<T>>) {
        let mut open: Vec<(Group, HashSet<LockName>, Vec<Key>)> = Vec::new();
        let mut full = Vec::new();
        for key in due {
            let watched = &self.entries[&key].watched;
            let group = (
                watched.lane,
                entry_length(&self.entries[&key]).as_millis().max(1).ilog2(),
            );
            let limit = self.limit;
            // A name stands once in a batch: two holds of one lock go in two.
            let place = open.iter().position(|(other, names, keys)| {
                *other == group && keys.len() < limit && !names.contains(&watched.name)
            });
            match place {
                Some(place) => {
                    open[place].1.insert(watched.name.clone());
                    open[place].2.push(key);
                    if open[place].2.len() == limit {
                        full.push(open.remove(place));
                    }
                }
                None => open.push((group, HashSet::from([watched.name.clone()]), vec![key])),
            }
        }
        for (group, _, keys) in full.into_iter().chain(open) {
            self.send_batch(group.0, keys, now, actions);
        }
    }

    fn send_batch(
        &mut self,
        lane: Lane,
        keys: Vec<Key>,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) {
        self.count += 1;
        let id = BatchId(self.count);
        let mut batch_end = Instant::FAR;
        let mut entries = Vec::with_capacity(keys.len());
        for key in &keys {
            let Some(entry) = self.entries.get_mut(key) else {
                continue;
            };
            let give_up =
                (now + Lease::renew_within(entry_length(entry))).min(entry.watched.deadline);
            entry.under_way = Some(id);
            batch_end = batch_end.min(give_up);
            let ask = entry.ask(now);
            entries.push((entry.watched.what.clone(), ask));
        }
        for key in &keys {
            self.set(*key, batch_end, now);
        }
        self.batches.insert(id, Flight { keys, sent: now });
        actions.push(Action::Send(Batch {
            id,
            lane,
            entries,
            give_up: batch_end,
        }));
    }

    /// Nobody will answer this batch any more.
    pub(crate) fn abandon(&mut self, id: BatchId) {
        self.batches.remove(&id);
    }

    /// Sets an entry's timer: never after its deadline, and never before now.
    fn set(&mut self, key: Key, at: Instant, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&key) {
            self.timers.remove(&(entry.timer, key));
            entry.timer = at.min(entry.watched.deadline - TICK).max(now);
            self.timers.insert((entry.timer, key));
        }
    }
}

#[cfg(test)]
impl<T> Machine<T> {
    /// Every entry with its timer, of which it must have exactly one.
    pub(super) fn timers(&self) -> SpreadMap<Key, Instant> {
        assert_eq!(self.timers.len(), self.entries.len(), "one timer each");
        let timers: SpreadMap<_, _> = self.timers.iter().map(|(at, key)| (*key, *at)).collect();
        for (key, entry) in &self.entries {
            assert_eq!(timers[key], entry.timer);
        }
        timers
    }
}

impl<T> Entry<T> {
    /// Whether the store is to be asked for it: what lasts to its end already is asked for only when its session is said to be over.
    fn wants_renewal(&self) -> bool {
        self.watched.renewal.is_some() && (self.over || !self.watched.is_complete())
    }

    /// What the store is asked for: not much beyond the end, where there is one.
    fn ask(&self, now: Instant) -> Option<Duration> {
        let renewal = self.watched.renewal?;
        let ask = renewal.ask?;
        Some(self.watched.end.map_or(ask, |end| {
            ask.min(end.since(now) + Lease::margin(renewal.length))
        }))
    }

    /// The deadline that a renewal sent at `sent` proves.
    fn proven(&self, sent: Instant, valid_for: Duration) -> Instant {
        let renewal = self.watched.renewal;
        let length = entry_length(self);
        let granted = match renewal.and_then(|renewal| renewal.ask) {
            Some(ask) => valid_for.min(ask),
            None => valid_for,
        };
        let proven = sent + granted - Lease::margin(length);
        self.watched.end.map_or(proven, |end| proven.min(end))
    }
}

fn entry_length<T>(entry: &Entry<T>) -> Duration {
    entry
        .watched
        .renewal
        .map_or(crate::lease::DEFAULT_LEASE, |renewal| renewal.length)
}

/// The pause before the next attempt: a hundredth of the lease for each failure so far, at most 200 ms, jittered 50–100 %.
fn pause(length: Duration, failures: u32, jitter: f64) -> Duration {
    let most = (length / 100)
        .saturating_mul(failures.max(1))
        .min(Duration::from_millis(200))
        .max(TICK);
    most.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}
