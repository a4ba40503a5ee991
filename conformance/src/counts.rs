//! What the clients of a case count: each thing once, as its caller saw it, and no lock's name in a label.

use crate::{Result, ensure, same};
use metrics::Label;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use parking_lot::{Mutex, MutexGuard};
use std::{collections::BTreeMap, fmt};

/// The class of the locks whose acquires the suite notes.
pub(crate) const NOTED: &str = "noted";

/// The instruments of the clients of one case, and what the callers of those clients saw.
pub(crate) struct Counts {
    recorder: DebuggingRecorder,
    read: Mutex<Reading>,
    callers: Mutex<Callers>,
}

/// Sums over the classes of locks, by the name and the last label, if it has one of its own. A reading takes away what
/// was counted since the one before.
#[derive(Debug, Default)]
struct Reading {
    gauges: BTreeMap<String, f64>,
    /// Counters, and how many values each histogram was given.
    counts: BTreeMap<String, u64>,
    /// Acquires of the class [`NOTED`], by their outcome.
    noted: BTreeMap<String, u64>,
    labels: Vec<String>,
}

/// The noted acquires, as their callers saw them.
#[derive(Debug, Default)]
struct Callers {
    under_way: usize,
    /// Those that ended, by their outcome.
    ended: BTreeMap<String, u64>,
}

/// A noted acquire under way; when it is dropped, it ends as cancelled.
pub(crate) struct Noted<'a> {
    counts: &'a Counts,
    outcome: &'static str,
}

impl Reading {
    fn gauge(&self, name: &str) -> f64 {
        self.gauges.get(name).copied().unwrap_or_default()
    }

    /// The sum of all whose names begin so.
    fn sum(&self, prefix: &str) -> u64 {
        let all = self.counts.iter();
        let all = all.filter(|(name, _)| name.starts_with(prefix));
        all.map(|(_, count)| count).sum()
    }
}

impl Noted<'_> {
    pub(crate) fn ended(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        let mut callers = self.counts.callers.lock();
        callers.under_way -= 1;
        *callers.ended.entry(self.outcome.to_owned()).or_default() += 1;
    }
}

impl Counts {
    pub(crate) fn new() -> Self {
        Self {
            recorder: DebuggingRecorder::new(),
            read: Mutex::default(),
            callers: Mutex::default(),
        }
    }

    /// What is built in there counts here.
    pub(crate) fn count<T>(&self, build: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&self.recorder, build)
    }

    /// The caller of a noted acquire begins to wait for it.
    pub(crate) fn began(&self) -> Noted<'_> {
        self.callers.lock().under_way += 1;
        Noted {
            counts: self,
            outcome: "cancelled",
        }
    }

    /// Whether no acquire, no waiter, no hold and no guard is left.
    pub(crate) fn are_at_rest(&self) -> bool {
        let read = self.read();
        let gauges = ["dlock_waiting", "dlock_holds", "dlock_uncertain"];
        let gauges = gauges.map(|of| read.gauge(of));
        // Each guard is released or dropped, or was detached.
        let guards = read.sum("dlock_held_seconds ") - read.sum("dlock_held_seconds detached");
        gauges == [0.0; 3]
            && guards == read.sum("dlock_release_total ")
            && self.callers.lock().under_way == 0
    }

    /// Whether the counters agree with each other and with what the callers saw, at rest.
    pub(crate) fn agree(&self, prefix: &str) -> Result {
        let read = self.read();
        same(
            "the count of acquires by outcome",
            &read.noted,
            &self.callers.lock().ended,
        )?;
        let acquired = read.sum("dlock_acquire_total acquired");
        same(
            "acquires, and their times",
            read.sum("dlock_acquire_seconds"),
            acquired,
        )?;
        let held = read.sum("dlock_held_seconds ");
        let detached = read.sum("dlock_held_seconds detached");
        // A hold that was detached may be attached again, once, without another acquire.
        ensure(
            (acquired..=acquired + detached).contains(&held),
            format!(
                "{acquired} acquires, and {held} holds that ended, {detached} of them detached"
            ),
        )?;
        let lost = read.sum("dlock_held_seconds lost");
        same("lost locks by reason", read.sum("dlock_lost_total "), lost)?;
        same(
            "releases of lost locks",
            read.sum("dlock_release_total lost"),
            lost,
        )?;
        // A cleanup may go on for as long as its lease.
        ensure(read.gauge("dlock_cleanups") >= 0.0, "a cleanup ended twice")?;
        let named = read.labels.iter().find(|label| label.contains(prefix));
        ensure(
            named.is_none(),
            format!("{named:?} is a label with a lock's name"),
        )
    }

    fn read(&self) -> MutexGuard<'_, Reading> {
        let mut read = self.read.lock();
        read.labels.clear();
        for (key, _, _, value) in self.recorder.snapshotter().snapshot().into_vec() {
            let key = key.key();
            let own = key
                .labels()
                .filter(|it| !["backend", "class", "op"].contains(&it.key()));
            let own: Vec<_> = own.map(Label::value).collect();
            let name = [&[key.name()], &own[..]].concat().join(" ");
            read.labels
                .extend(key.labels().map(|it| it.value().to_owned()));
            let count = match value {
                DebugValue::Gauge(value) => {
                    *read.gauges.entry(name).or_default() += *value;
                    continue;
                }
                DebugValue::Counter(count) => count,
                DebugValue::Histogram(of) => u64::try_from(of.len()).unwrap_or(u64::MAX),
            };
            let is_noted = key.labels().any(|it| it.value() == NOTED);
            if key.name() == "dlock_acquire_total" && is_noted && count > 0 {
                *read.noted.entry(own.concat()).or_default() += count;
            }
            *read.counts.entry(name).or_default() += count;
        }
        read
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, callers) = (self.read(), self.callers.lock());
        write!(f, "{:?} {:?} {callers:?}", read.gauges, read.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, NOTED};
    use metrics::{counter, gauge, histogram};

    fn acquired() {
        counter!("dlock_acquire_total", "outcome" => "acquired", "class" => "c").increment(1);
        histogram!("dlock_acquire_seconds").record(0.1);
        gauge!("dlock_holds", "class" => "c").increment(1.0);
    }

    fn ended(end: &'static str) {
        histogram!("dlock_held_seconds", "end" => end).record(0.1);
        gauge!("dlock_holds", "class" => "c").decrement(1.0);
    }

    fn released(outcome: &'static str) {
        counter!("dlock_release_total", "outcome" => outcome).increment(1);
    }

    #[test]
    fn what_is_left_or_counted_twice_is_found() {
        let counts = Counts::new();
        counts.count(acquired);
        assert!(!counts.are_at_rest(), "a hold is left");
        counts.count(|| ended("released"));
        assert!(!counts.are_at_rest(), "a guard is left");
        counts.count(|| released("still_held"));
        assert!(counts.are_at_rest() && counts.agree("case.1").is_ok());
        counts.count(|| released("dropped"));
        assert!(!counts.are_at_rest(), "a release counted twice");
        counts.count(acquired);
        counts.count(|| ended("lost"));
        assert!(counts.agree("case.1").is_err(), "a loss without a reason");
        counts.count(|| counter!("dlock_lost_total", "reason" => "session").increment(1));
        assert!(counts.agree("case.1").is_err(), "released as if not lost");
        counts.count(|| released("lost"));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(acquired);
        assert!(counts.agree("case.1").is_err(), "a grant without a hold");
        counts.count(|| ended("detached"));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| ended("released"));
        assert!(counts.agree("case.1").is_ok(), "attached again: {counts}");
        counts.count(|| ended("released"));
        assert!(counts.agree("case.1").is_err(), "a hold ended twice");
    }

    #[test]
    fn an_acquire_counts_once_with_the_outcome_that_its_caller_saw() {
        let counted = |outcome: &'static str| {
            counter!("dlock_acquire_total", "outcome" => outcome, "class" => NOTED).increment(1);
        };
        let counts = Counts::new();
        let noted = counts.began();
        assert!(!counts.are_at_rest(), "it is under way");
        noted.ended("held");
        assert!(counts.are_at_rest());
        assert!(counts.agree("case.1").is_err(), "it is not counted");
        counts.count(|| counted("held"));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| counted("held"));
        assert!(counts.agree("case.1").is_err(), "it counts twice");
        drop(counts.began());
        counts.count(|| counted("cancelled"));
        assert!(counts.agree("case.1").is_err(), "it still counts twice");
        counts.began().ended("held");
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.began().ended("gone");
        counts.count(|| counted("refused"));
        assert!(counts.agree("case.1").is_err(), "another outcome");
    }

    #[test]
    fn a_name_in_a_label_and_a_cleanup_that_ends_twice_are_found() {
        let counts = Counts::new();
        counts.count(|| counter!("dlock_poll_total", "class" => "case.1.7").increment(1));
        assert!(counts.agree("case.2").is_ok(), "{counts}");
        assert!(counts.agree("case.1").is_err());
        let counts = Counts::new();
        counts.count(|| gauge!("dlock_cleanups").decrement(1.0));
        assert!(counts.agree("case.1").is_err());
    }
}
