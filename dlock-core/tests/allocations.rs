//! Allocation counts of a lock cycle, on the thread that runs it.
//!
//! The numbers are measured. A change that adds an allocation fails here; a change that removes one lowers
//! the number.
//!
//! | | |
//! |---|---|
//! | acquire | the waiter, which `try_acquire` has not; the call and, inside it, the driver's boxed future; the hold |
//! | release | the call and the driver's boxed future |
//! | drop | the same, and the task they run in |
//! | in the model store | the holds and the holder info of the record: once for the acquire, once for what the release writes |

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, Lock};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use tokio::runtime::{Builder, Runtime};

/// Cycles that are counted together. An occasional allocation (a table that grows, a timer wheel) shows as
/// a fraction.
const CYCLES: u32 = 1_000;

/// A lock on the boot clock, after enough cycles for every buffer to have its final size.
fn warm(runtime: &Runtime) -> Lock {
    runtime.block_on(async {
        let store = MemoryStore::new(Clock::boot());
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        let lock = Client::new(driver).unwrap().lock("orders:42").unwrap();
        for _ in 0..CYCLES {
            released(&lock).await;
            dropped(&lock).await;
        }
        lock
    })
}

async fn released(lock: &Lock) {
    lock.acquire().await.unwrap().release().await.unwrap();
}

async fn tried(lock: &Lock) {
    let guard = lock.try_acquire().await.unwrap();
    guard.unwrap().release().await.unwrap();
}

async fn dropped(lock: &Lock) {
    drop(lock.acquire().await.unwrap());
    // The release runs in a task of its own.
    tokio::task::yield_now().await;
}

/// Allocations of one cycle, rounded to whole ones, so that occasional allocations do not count.
fn each(cycle: impl AsyncFn(&Lock)) -> u64 {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let lock = warm(&runtime);
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            for _ in 0..CYCLES {
                cycle(&lock).await;
            }
        });
    });
    assert_eq!(counted.count_current, 0, "something is kept of each cycle");
    counted.count_total / u64::from(CYCLES)
}

#[test]
fn acquire_and_release_allocate_ten_times() {
    assert_eq!(each(released), 10);
}

#[test]
fn try_acquire_and_release_allocate_nine_times() {
    // No task waits.
    assert_eq!(each(tried), 9);
}

#[test]
fn acquire_and_drop_allocate_eleven_times() {
    assert_eq!(each(dropped), 11);
}

#[cfg(feature = "metrics")]
#[test]
fn a_recorder_of_metrics_adds_no_allocation() {
    let recorder = recorder::Atomics::default();
    metrics::with_local_recorder(&recorder, || {
        acquire_and_release_allocate_ten_times();
        try_acquire_and_release_allocate_nine_times();
        acquire_and_drop_allocate_eleven_times();
    });
    // Acquires and releases, without those that warmed up.
    let least = u64::from(CYCLES) * 3 * 2;
    assert!(recorder.counts() >= (least, least), "{recorder:?}");
}

/// The least that an exporter does.
#[cfg(feature = "metrics")]
mod recorder {
    use metrics::{
        Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString,
        Unit,
    };
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    };

    #[derive(Debug, Default)]
    pub(super) struct Atomics {
        counter: Arc<AtomicU64>,
        gauge: Arc<AtomicU64>,
        histogram: Arc<Values>,
    }

    /// The number of values.
    #[derive(Debug, Default)]
    struct Values(AtomicU64);

    impl Atomics {
        /// The sum of all counters, and the number of values in all histograms.
        pub(super) fn counts(&self) -> (u64, u64) {
            (self.counter.load(Relaxed), self.histogram.0.load(Relaxed))
        }
    }

    impl HistogramFn for Values {
        fn record(&self, _: f64) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    impl Recorder for Atomics {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::clone(&self.counter))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(Arc::clone(&self.gauge))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::clone(&self.histogram))
        }
    }
}
