//! What the clients of a case count: each thing once, and no lock's name in a label.

use crate::{Result, ensure, failure::Failure, same};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use parking_lot::{Mutex, MutexGuard};
use std::{collections::BTreeMap, fmt};

/// The instruments of the clients of one case.
pub(crate) struct Counts {
    recorder: DebuggingRecorder,
    read: Mutex<Reading>,
}

/// Sums over the classes of locks, by the name and the last label, if it has one of its own.
#[derive(Debug, Default)]
struct Reading {
    /// A reading takes away what was counted since the one before.
    gauges: BTreeMap<String, f64>,
    counters: BTreeMap<String, u64>,
    /// How many values each histogram was given.
    samples: BTreeMap<String, usize>,
    labels: Vec<String>,
}

impl Reading {
    fn gauge(&self, name: &str) -> f64 {
        self.gauges.get(name).copied().unwrap_or_default()
    }
}

impl Counts {
    pub(crate) fn new() -> Self {
        let (recorder, read) = (DebuggingRecorder::new(), Mutex::default());
        Self { recorder, read }
    }

    /// What is built in there counts here.
    pub(crate) fn count<T>(&self, build: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&self.recorder, build)
    }

    /// Whether no hold and no waiter is left.
    pub(crate) fn are_at_rest(&self) -> bool {
        let read = self.read();
        ["dlock_waiting", "dlock_holds"].map(|of| read.gauge(of)) == [0.0; 2]
    }

    /// Whether the counters agree with each other, at rest.
    pub(crate) fn agree(&self, prefix: &str) -> Result {
        let read = self.read();
        let counter = |of: &str| read.counters.get(of).copied().unwrap_or_default();
        let samples = |of: &str| {
            let count = read.samples.get(of).copied().unwrap_or_default();
            u64::try_from(count).map_err(Failure::new)
        };
        let acquired = counter("dlock_acquire_total acquired");
        same(
            "acquires, and their times",
            samples("dlock_acquire_seconds")?,
            acquired,
        )?;
        let mut held = 0;
        for end in ["released", "lost", "detached"] {
            held += samples(&format!("dlock_held_seconds {end}"))?;
        }
        // A hold that was attached was acquired by another client.
        ensure(
            acquired <= held,
            format!("{acquired} acquires, and {held} holds that ended"),
        )?;
        let lost = read.counters.iter();
        let lost = lost.filter(|(name, _)| name.starts_with("dlock_lost_total "));
        let lost = lost.map(|(_, count)| count).sum();
        same(
            "lost locks, and their times",
            samples("dlock_held_seconds lost")?,
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
            let own: Vec<_> = own.map(metrics::Label::value).collect();
            let name = [&[key.name()], &own[..]].concat().join(" ");
            read.labels
                .extend(key.labels().map(|it| it.value().to_owned()));
            match value {
                DebugValue::Gauge(value) => *read.gauges.entry(name).or_default() += *value,
                DebugValue::Counter(count) => *read.counters.entry(name).or_default() += count,
                DebugValue::Histogram(of) => *read.samples.entry(name).or_default() += of.len(),
            }
        }
        read
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read = self.read();
        write!(
            f,
            "{:?} {:?} {:?}",
            read.gauges, read.counters, read.samples
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Counts;
    use metrics::{counter, gauge, histogram};

    #[test]
    fn what_is_left_or_counted_twice_is_found() {
        let counts = Counts::new();
        let acquired = || counter!("dlock_acquire_total", "outcome" => "acquired", "class" => "c");
        counts.count(|| {
            gauge!("dlock_holds", "class" => "c").increment(1.0);
            acquired().increment(1);
            histogram!("dlock_acquire_seconds").record(0.1);
            histogram!("dlock_held_seconds", "end" => "released").record(0.1);
        });
        assert!(!counts.are_at_rest());
        counts.count(|| gauge!("dlock_holds", "class" => "c").decrement(1.0));
        assert!(counts.are_at_rest());
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| histogram!("dlock_held_seconds", "end" => "lost").record(0.1));
        assert!(counts.agree("case.1").is_err(), "a loss without a reason");
        counts.count(|| counter!("dlock_lost_total", "reason" => "session").increment(1));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| acquired().increment(1));
        assert!(counts.agree("case.1").is_err(), "a grant counted twice");
        counts.count(|| histogram!("dlock_acquire_seconds").record(0.1));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| {
            acquired().increment(1);
            histogram!("dlock_acquire_seconds").record(0.1);
        });
        assert!(counts.agree("case.1").is_err(), "a grant without a hold");
        counts.count(|| histogram!("dlock_held_seconds", "end" => "detached").record(0.1));
        assert!(counts.agree("case.1").is_ok(), "{counts}");
        counts.count(|| counter!("dlock_acquire_total", "class" => "case.1.7").increment(1));
        assert!(counts.agree("case.1").is_err(), "a name in a label");
    }

    #[test]
    fn a_cleanup_that_ends_twice_is_found() {
        let counts = Counts::new();
        counts.count(|| gauge!("dlock_cleanups").decrement(1.0));
        assert!(counts.agree("case.1").is_err());
    }
}
