//! Table tests of the watchdog's state machine: every state with every event.
//!
//! Time is in milliseconds from an hour after the clock's origin. A hold's payload is its number. Jitter is
//! fixed unless a test sets it.

mod answers;
mod batches;
mod random;
mod timers;

use super::machine::{Action, Answer, Batch, BatchId, Key, Machine, Renewal, Watched};
use crate::{
    clock::Instant,
    driver::{Lane, Renewed},
    error::LossReason,
    lease::Lease,
};
use std::{collections::HashMap, time::Duration};

/// The lease that most tests use: renewed every 100 ms, an attempt takes at most 50 ms, margin 3 ms.
const LEASE: Duration = Duration::from_millis(300);

/// The deadline of a hold granted at 0 with that lease.
const DEADLINE: u64 = 297;

/// When the watchdog declares that hold lost: a timer's tick before the deadline.
const LAST: u64 = DEADLINE - 1;

fn at(millis: u64) -> Instant {
    Instant::ORIGIN + Duration::from_secs(3600) + Duration::from_millis(millis)
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A hold of its own name in lane 0, granted at `sent` for the whole lease, to be renewed.
fn kept(what: u32, sent: u64) -> Watched<u32> {
    Watched {
        what,
        name: format!("lock {what}").parse().unwrap(),
        lane: Lane(0),
        sent: at(sent),
        deadline: at(sent) + LEASE - Lease::margin(LEASE),
        renewal: Renewal {
            ask: Some(LEASE),
            length: LEASE,
        },
        end: None,
    }
}

/// The same with a lease that is proven and not renewed.
fn fixed(what: u32, sent: u64) -> Watched<u32> {
    let kept = kept(what, sent);
    Watched {
        renewal: Renewal {
            ask: None,
            length: LEASE,
        },
        end: Some(kept.deadline),
        ..kept
    }
}

/// A fixed lease of that length on a store whose sessions last 300 ms: proven repeatedly, until its own
/// end.
fn proven(what: u32, sent: u64, length: Duration) -> Watched<u32> {
    let kept = kept(what, sent);
    let end = at(sent) + length - Lease::margin(length);
    Watched {
        deadline: end.min(kept.deadline),
        renewal: Renewal {
            ask: None,
            length: LEASE,
        },
        end: Some(end),
        ..kept
    }
}

/// An action without its key, which is checked to be its hold's.
#[derive(Debug, PartialEq, Eq)]
enum Did {
    Send(Batch<u32>),
    Doubt(u32),
    Renewed(u32, Instant),
    Lost(u32, LossReason),
}

/// A machine with a given jitter.
struct Bench {
    machine: Machine<u32>,
    jitter: f64,
    keys: HashMap<Key, u32>,
}

impl Bench {
    fn new() -> Self {
        Self::limited(100)
    }

    fn limited(limit: usize) -> Self {
        Self {
            machine: Machine::new(limit),
            jitter: 1.0,
            keys: HashMap::new(),
        }
    }

    fn watch(&mut self, watched: Watched<u32>) -> Key {
        let what = watched.what;
        let key = self.machine.watch(watched);
        self.keys.insert(key, what);
        key
    }

    fn did(&self, actions: Vec<Action<u32>>) -> Vec<Did> {
        let did = |action| match action {
            Action::Send(batch) => Did::Send(batch),
            Action::Doubt(what) => Did::Doubt(what),
            Action::Renewed(key, what, deadline) => {
                assert_eq!(self.keys[&key], what);
                Did::Renewed(what, deadline)
            }
            Action::Lost(what, reason) => Did::Lost(what, reason),
        };
        actions.into_iter().map(did).collect()
    }

    fn tick(&mut self, now: u64) -> Vec<Did> {
        let jitter = self.jitter;
        let actions = self.machine.tick(at(now), &mut || jitter);
        self.did(actions)
    }

    /// Ticks at a time when exactly one batch must be sent.
    fn sent(&mut self, now: u64) -> Batch<u32> {
        let mut actions = self.tick(now);
        match (actions.pop(), actions.is_empty()) {
            (Some(Did::Send(batch)), true) => batch,
            other => panic!("one batch expected at {now} ms, not {other:?} after {actions:?}"),
        }
    }

    fn answer(&mut self, id: BatchId, answers: &[Answer], now: u64) -> Vec<Did> {
        let jitter = self.jitter;
        let answers = answers.iter().copied();
        let actions = self.machine.answered(id, answers, at(now), &mut || jitter);
        self.did(actions)
    }

    /// Milliseconds from the tests' origin to the next timer.
    fn next(&self) -> Option<u64> {
        let next = self.machine.next()?;
        Some(u64::try_from(next.since(at(0)).as_millis()).unwrap())
    }
}

fn until(valid_for: u64) -> Answer {
    Answer::Renewed(Renewed::Until {
        valid_for: ms(valid_for),
    })
}

const GONE: Answer = Answer::Renewed(Renewed::NotHeld);

fn lost(what: u32, reason: LossReason) -> Vec<Did> {
    vec![Did::Lost(what, reason)]
}
