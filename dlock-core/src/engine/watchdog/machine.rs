//! Watchdog state machine: a pure function (state, event, now) → (state, actions). It has no I/O, no clock
//! and no mutex.
//!
//! Every hold has one entry and every entry one timer: its next renewal, the give-up of the one in flight,
//! or its deadline. A deadline is the instant *before* a request was given to the driver, plus what the
//! store then granted, less the margin (the validity of the Redlock description, counted from the send). No
//! reply can therefore make a hold last longer than the store has it.

use crate::{
    clock::Instant,
    driver::{Lane, Renewed},
    engine::spread::SpreadMap,
    error::LossReason,
    lease::Lease,
    name::LockName,
};
use std::{
    collections::{BTreeSet, HashSet, hash_map::Entry as Slot},
    time::Duration,
};

/// How much earlier than the deadline its timer is set. Timers are a millisecond coarse and round up, and
/// `lost()` has to resolve at or before the deadline.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// The id of a hold's entry in the watchdog. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(u64);

/// The id of a batch in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BatchId(u64);

/// A hold to watch, and how.
#[derive(Clone, Debug)]
pub(crate) struct Watched<T> {
    /// The value by which actions name the hold.
    pub(crate) what: T,
    pub(crate) name: LockName,
    pub(crate) lane: Lane,
    /// When the request that was granted was given to the driver.
    pub(crate) sent: Instant,
    pub(crate) deadline: Instant,
    pub(crate) renewal: Renewal,
    /// Where a fixed lease or the maximum hold ends, however often it is proven.
    pub(crate) end: Option<Instant>,
}

impl<T> Watched<T> {
    /// Whether its deadline has reached its end already: it can then only be proven.
    fn is_complete(&self) -> bool {
        self.end.is_some_and(|end| self.deadline >= end)
    }

    /// When to renew again after a request sent at `sent`: a third of its lease later, and earlier where
    /// less was proven, unless no more can be.
    fn due(&self, sent: Instant) -> Instant {
        let every = Lease::renew_every(self.renewal.length);
        if self.is_complete() {
            return sent + every;
        }
        sent + every.min(self.deadline.since(sent) / 2)
    }
}

/// How a hold is renewed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewal {
    /// The lease to ask the store for; `None` only proves that the hold is there, as for a fixed lease.
    pub(crate) ask: Option<Duration>,
    /// The length from which interval, time limits and margin are derived.
    pub(crate) length: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action<T> {
    Send(Batch<T>),
    /// A renewal failed or is overdue: held until the deadline, but uncertain.
    Doubt(T),
    /// The key lets the shell forget the entry when the user has given up on the hold meanwhile.
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

/// The answer for one entry of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Renewed(Renewed),
    Failed,
}

#[derive(Debug)]
pub(crate) struct Machine<T> {
    pub(super) entries: SpreadMap<Key, Entry<T>>,
    pub(super) timers: BTreeSet<(Instant, Key)>,
    batches: SpreadMap<BatchId, Flight>,
    limit: usize,
    count: u64,
}

#[derive(Debug)]
pub(super) struct Entry<T> {
    watched: Watched<T>,
    pub(super) timer: Instant,
    under_way: Option<BatchId>,
    failures: u32,
    over: bool,
}

/// What may share a batch: one lane; leases of similar length, because a batch is given up with the
/// shortest of them; and either renewals or proofs, because stores answer a uniform batch in one step.
type Group = (Lane, u32, bool);

#[derive(Debug)]
struct Flight {
    keys: Vec<Key>,
    sent: Instant,
}

impl<T: Clone> Machine<T> {
    /// Builds a machine whose batches have at most `limit` entries.
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

    /// Removes a hold that is released or lost. Nothing renews it from here on, and answers in flight are
    /// ignored.
    pub(crate) fn forget(&mut self, key: Key) {
        if let Some(entry) = self.entries.remove(&key) {
            self.timers.remove(&(entry.timer, key));
        }
    }

    /// When `tick` next has something to do.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// A session ended: its holds are renewed at once.
    pub(crate) fn over(&mut self, lane: Lane, now: Instant) {
        for (key, entry) in &mut self.entries {
            // A repeated event does not ask a second time.
            let asked = entry.over && entry.under_way.is_some();
            if entry.watched.lane == lane && !asked {
                self.timers.remove(&(entry.timer, *key));
                entry.over = true;
                entry.under_way = None;
                entry.timer = now;
                self.timers.insert((now, *key));
            }
        }
    }

    /// Time advanced: deadlines that passed are losses, give-ups that passed are doubts, and what is due is
    /// sent.
    pub(crate) fn tick(
        &mut self,
        now: Instant,
        jitter: &mut impl FnMut() -> f64,
    ) -> Vec<Action<T>> {
        let mut actions = Vec::new();
        let mut due = Vec::new();
        while let Some((at, key)) = self.timers.first().copied() {
            if at > now {
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
                // Its give-up passed. The answer still counts when it comes, but the entry no longer waits
                // for it.
                actions.push(Action::Doubt(entry.watched.what.clone()));
                entry.failures += 1;
                let after = pause(entry.watched.renewal.length, 1, jitter());
                self.set(key, now + after, now);
            } else {
                due.push(key);
            }
        }
        self.add_nearly_due(&mut due, now);
        self.send(due, now, &mut actions);
        actions
    }

    /// Handles the answer to a batch, in time or late.
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
                // A caller that checked meanwhile was told of the loss: no answer makes the hold held
                // again.
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
                    // A late answer counts if it moves the deadline, or ends the doubt about a hold that
                    // can only be proven.
                    let ends_doubt = entry.failures > 0 && entry.watched.is_complete();
                    if deadline <= entry.watched.deadline && !current && !ends_doubt {
                        continue;
                    }
                    entry.watched.deadline = entry.watched.deadline.max(deadline);
                    entry.failures = 0;
                    // An answer to a request from before the session's end says nothing about that end.
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
                    let after = pause(entry.watched.renewal.length, entry.failures, jitter());
                    actions.push(Action::Doubt(what));
                    self.set(key, now + after, now);
                }
                Answer::Failed => {}
            }
        }
        actions
    }

    /// Gives everything up, for shutdown.
    pub(crate) fn clear(&mut self) {
        self.timers.clear();
        self.batches.clear();
        self.entries.clear();
    }

    /// Fills a batch of what is due with what is due within half a renewal interval, so that holds taken one after the
    /// other share batches from then on.
    fn add_nearly_due(&self, due: &mut Vec<Key>, now: Instant) {
        let (mut groups, mut names) = (Vec::<Group>::new(), HashSet::new());
        let mut within = Duration::ZERO;
        for entry in due.iter().map(|key| &self.entries[key]) {
            names.insert(&entry.watched.name);
            let group = entry.group(now);
            // What is repeated may hang again, and would keep the others waiting.
            if entry.failures == 0 && !groups.contains(&group) {
                groups.push(group);
                within = within.max(entry.half_interval());
            }
        }
        if groups.is_empty() {
            return;
        }
        for (at, key) in &self.timers {
            let entry = &self.entries[key];
            if due.len() >= self.limit || at.since(now) > within {
                break;
            }
            let joins = at.since(now) <= entry.half_interval() && entry.may_join(now);
            // A name occurs once in a batch.
            if joins && groups.contains(&entry.group(now)) && names.insert(&entry.watched.name) {
                due.push(*key);
            }
        }
    }

    fn send(&mut self, due: Vec<Key>, now: Instant, actions: &mut Vec<Action<T>>) {
        let mut open: Vec<(Group, HashSet<LockName>, Vec<Key>)> = Vec::new();
        let mut full = Vec::new();
        for key in due {
            let entry = &self.entries[&key];
            let (watched, group) = (&entry.watched, entry.group(now));
            let limit = self.limit;
            // A name occurs once in a batch: two holds of one lock go in two batches.
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
            let give_up = (now + Lease::renew_within(entry.watched.renewal.length))
                .min(entry.watched.deadline);
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

    /// Forgets a batch that will not be answered any more.
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

impl<T> Entry<T> {
    fn group(&self, now: Instant) -> Group {
        let length = self.watched.renewal.length.as_millis().max(1).ilog2();
        (self.watched.lane, length, self.ask(now).is_some())
    }

    /// Whether it may be renewed before it is due: not while its last renewal is open or failed, and not so near its end
    /// that it would leave the batch less time for the answer.
    fn may_join(&self, now: Instant) -> bool {
        let within = Lease::renew_within(self.watched.renewal.length);
        self.under_way.is_none() && self.failures == 0 && self.watched.deadline.since(now) >= within
    }

    fn half_interval(&self) -> Duration {
        Lease::renew_every(self.watched.renewal.length) / 2
    }

    /// The lease to ask for: not much beyond the end, where there is one, and none where the deadline has
    /// reached it.
    fn ask(&self, now: Instant) -> Option<Duration> {
        let renewal = self.watched.renewal;
        let ask = renewal.ask.filter(|_| !self.watched.is_complete())?;
        Some(self.watched.end.map_or(ask, |end| {
            ask.min(end.since(now) + Lease::margin(renewal.length))
        }))
    }

    /// The deadline that a renewal sent at `sent` proves.
    fn proven(&self, sent: Instant, valid_for: Duration) -> Instant {
        let Renewal { ask, length } = self.watched.renewal;
        let granted = match ask {
            Some(ask) => valid_for.min(ask),
            None => valid_for,
        };
        let proven = sent + granted - Lease::margin(length);
        self.watched.end.map_or(proven, |end| proven.min(end))
    }
}

/// The pause before the next attempt: a hundredth of the lease for each failure so far, at most 200 ms,
/// jittered 50–100 %.
fn pause(length: Duration, failures: u32, jitter: f64) -> Duration {
    let most = (length / 100)
        .saturating_mul(failures.max(1))
        .min(Duration::from_millis(200))
        .max(TICK);
    most.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}
