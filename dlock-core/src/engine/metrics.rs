//! Metrics: what a client counts and measures, through the facade of the [`metrics`](https://docs.rs/metrics) crate.
//!
//! The instruments of a class of locks are registered once per client, so a cycle neither looks up labels nor
//! allocates. No label holds the name of a lock. Without the feature `metrics` the types are empty.
//!
//! Only the core counts. It has no gauge of connections, because a driver opens several, when it needs them: failed
//! requests and the wake-up `resync` show that the store was away. Acquires have no label for re-entry, which would
//! double the time series of each class. Only grants are timed: a refusal takes one request, and a timeout the limit
//! that the caller chose. Ticks of jobs have no class: their outcomes would be more time series of each class, also of
//! those without a job.
//!
//! A class is named where a lock is made, and no function makes one from a name: it would run for every lock, and might
//! return the name.

use crate::{
    clock::{Clock, Instant},
    driver::WakeUp,
    error::{DriverError, Error, ErrorKind, LossReason, TimeoutPhase},
};
use std::time::Duration;
#[cfg(feature = "metrics")]
use {
    crate::error::Effect,
    metrics::{
        Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge,
        describe_histogram, gauge, histogram,
    },
    parking_lot::Mutex,
    std::{collections::HashMap, sync::Arc},
};

/// The instruments of one class of locks.
#[derive(Clone, Debug)]
pub(crate) struct Class(#[cfg(feature = "metrics")] Arc<Instruments>);

/// The outcome of an acquire, in the order of [`ACQUIRE`].
#[derive(Clone, Copy)]
pub(crate) enum AcquireOutcome {
    Acquired,
    Held,
    Timeout,
    StoreTimeout,
    Gone,
    Unavailable,
    Overloaded,
    ShuttingDown,
    Refused,
    Cancelled,
}

/// How the holding of a lock ended for its client.
#[derive(Clone, Copy)]
pub(crate) enum HoldEnd {
    Released,
    Lost(
        #[cfg_attr(
            not(feature = "metrics"),
            expect(dead_code, reason = "only the instruments read it")
        )]
        LossReason,
    ),
    Detached,
}

/// The outcome of a release, in the order of [`RELEASE`].
#[derive(Clone, Copy)]
pub(crate) enum ReleaseEnd {
    Released,
    StillHeld,
    MinHold,
    Lost,
    Indeterminate,
    Dropped,
}

/// How a cleanup job ended, in the order of [`CLEANUP`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum CleanupEnd {
    Confirmed,
    Left,
}

/// What became of a tick of a job, in the order of [`JOB`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum JobEnd {
    Ran,
    Skipped,
    Late,
    Failed,
    Lost,
    Unavailable,
}

/// A request of the engine to its driver, in the order of [`REQUEST`].
#[derive(Clone, Copy)]
pub(crate) enum Op {
    Acquire,
    Renew,
    Release,
}

/// The instruments of a client for its store.
#[derive(Clone, Debug)]
pub(crate) struct StoreMetrics(#[cfg(feature = "metrics")] Arc<StoreInstruments>);

/// An acquire in progress; counted as cancelled when it is dropped without an outcome.
pub(crate) struct CountedAcquire {
    class: Class,
    outcome: AcquireOutcome,
}

impl CountedAcquire {
    pub(crate) fn new(class: Class) -> Self {
        Self {
            class,
            outcome: AcquireOutcome::Cancelled,
        }
    }

    /// The outcome: acquired after this time, held by another, or an error.
    pub(crate) fn ended(mut self, outcome: Result<Option<Duration>, &Error>) {
        self.outcome = match outcome {
            Ok(Some(within)) => {
                self.class.acquired(within);
                AcquireOutcome::Acquired
            }
            Ok(None) => AcquireOutcome::Held,
            Err(error) => AcquireOutcome::of(error),
        };
    }
}

impl Drop for CountedAcquire {
    fn drop(&mut self) {
        self.class.acquire(self.outcome);
    }
}

#[cfg(not(feature = "metrics"))]
#[allow(
    clippy::unused_self,
    clippy::needless_pass_by_value,
    reason = "the same calls with and without the feature"
)]
mod off {
    use super::{
        AcquireOutcome, Class, CleanupEnd, Clock, DriverError, Duration, HoldEnd, Instant, JobEnd,
        Op, ReleaseEnd, StoreMetrics, WakeUp,
    };

    const _: () = assert!(size_of::<(Class, StoreMetrics, super::Classes)>() == 0);

    impl Class {
        pub(super) fn acquire(&self, _: AcquireOutcome) {}
        pub(super) fn acquired(&self, _: Duration) {}
        pub(crate) fn waits(&self) {}
        pub(crate) fn waited(&self, _: Instant, _: &Clock) {}
        pub(crate) fn polls(&self, _: bool) {}
        pub(crate) fn begun(&self) {}
        pub(crate) fn ended(&self, _: HoldEnd, _: Duration) {}
        pub(crate) fn renewed(&self, _: Instant, _: Duration, _: &Clock) {}
        pub(crate) fn uncertain(&self) {}
        pub(crate) fn certain(&self) {}
        pub(crate) fn release(&self, _: ReleaseEnd) {}
    }

    impl StoreMetrics {
        pub(crate) fn cleanup_begun(&self) {}
        pub(crate) fn cleanup_ended(&self, _: CleanupEnd) {}
        pub(crate) fn job(&self, _: JobEnd) {}
        pub(crate) fn wake_up(&self, _: &WakeUp) {}
        pub(crate) fn abandoned(&self) {}
        pub(crate) fn request_ends<T>(
            &self,
            _: Op,
            _: Option<&Result<T, DriverError>>,
            _: Instant,
            _: &Clock,
        ) {
        }
    }
}

#[cfg(feature = "metrics")]
const ACQUIRE: [&str; 10] = [
    "acquired",
    "held",
    "timeout",
    "store_timeout",
    "gone",
    "unavailable",
    "overloaded",
    "shutting_down",
    "refused",
    "cancelled",
];

/// Why a waiter asks again.
#[cfg(feature = "metrics")]
const POLL: [&str; 2] = ["timer", "wake_up"];

/// The ends of a [`HoldEnd`].
#[cfg(feature = "metrics")]
const HELD: [&str; 3] = ["released", "lost", "detached"];

#[cfg(feature = "metrics")]
const RELEASE: [&str; 6] = [
    "released",
    "still_held",
    "min_hold",
    "lost",
    "indeterminate",
    "dropped",
];

#[cfg(feature = "metrics")]
#[derive(Debug)]
struct Instruments {
    acquire: [Counter; ACQUIRE.len()],
    acquire_seconds: Histogram,
    waiting: Gauge,
    wait_seconds: Histogram,
    polls: [Counter; POLL.len()],
    holds: Gauge,
    held_seconds: [Histogram; HELD.len()],
    lost: [Counter; LossReason::ALL.len()],
    renewed: Counter,
    doubted: Counter,
    uncertain: Gauge,
    slack: Histogram,
    release: [Counter; RELEASE.len()],
}

impl AcquireOutcome {
    fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Timeout {
                phase: TimeoutPhase::Wait,
            } => Self::Timeout,
            ErrorKind::Timeout { .. } => Self::StoreTimeout,
            ErrorKind::Gone | ErrorKind::NotHeld | ErrorKind::Lost => Self::Gone,
            ErrorKind::Unavailable | ErrorKind::Indeterminate => Self::Unavailable,
            ErrorKind::Overloaded => Self::Overloaded,
            ErrorKind::ShuttingDown => Self::ShuttingDown,
            ErrorKind::Misuse | ErrorKind::Unsupported => Self::Refused,
        }
    }
}

#[cfg(feature = "metrics")]
impl Class {
    fn new(backend: &'static str, class: &str) -> Self {
        let labels = || [("backend", backend.to_owned()), ("class", class.to_owned())];
        let with = |key, value: &str| {
            let [backend, class] = labels();
            [backend, class, (key, value.to_owned())]
        };
        let renew = |outcome| counter!("dlock_renew_total", &with("outcome", outcome));
        Self(Arc::new(Instruments {
            acquire: ACQUIRE.map(|it| counter!("dlock_acquire_total", &with("outcome", it))),
            acquire_seconds: histogram!("dlock_acquire_seconds", &labels()),
            waiting: gauge!("dlock_waiting", &labels()),
            wait_seconds: histogram!("dlock_wait_seconds", &labels()),
            polls: POLL.map(|it| counter!("dlock_poll_total", &with("cause", it))),
            holds: gauge!("dlock_holds", &labels()),
            held_seconds: HELD.map(|it| histogram!("dlock_held_seconds", &with("end", it))),
            lost: LossReason::ALL
                .map(|it| counter!("dlock_lost_total", &with("reason", it.as_str()))),
            renewed: renew("renewed"),
            doubted: renew("uncertain"),
            uncertain: gauge!("dlock_uncertain", &labels()),
            slack: histogram!("dlock_renew_slack_ratio", &labels()),
            release: RELEASE.map(|it| counter!("dlock_release_total", &with("outcome", it))),
        }))
    }

    fn acquire(&self, outcome: AcquireOutcome) {
        self.0.acquire[outcome as usize].increment(1);
    }

    fn acquired(&self, within: Duration) {
        self.0.acquire_seconds.record(within);
    }

    /// A task begins to wait for a lock that another owner holds.
    pub(crate) fn waits(&self) {
        self.0.waiting.increment(1.0);
    }

    /// A task waits no more, whatever the outcome.
    pub(crate) fn waited(&self, since: Instant, clock: &Clock) {
        self.0.waiting.decrement(1.0);
        self.0.wait_seconds.record(clock.now().since(since));
    }

    /// The head of a queue asks the store again, because it was woken or because its poll interval is over.
    pub(crate) fn polls(&self, woken: bool) {
        self.0.polls[usize::from(woken)].increment(1);
    }

    pub(crate) fn begun(&self) {
        self.0.holds.increment(1.0);
    }

    /// A hold ended for its client after it had lasted for `held`.
    pub(crate) fn ended(&self, end: HoldEnd, held: Duration) {
        let place = match end {
            HoldEnd::Released => 0,
            HoldEnd::Lost(_) => 1,
            HoldEnd::Detached => 2,
        };
        self.0.held_seconds[place].record(held);
        if let HoldEnd::Lost(reason) = end {
            self.0.lost[reason as usize].increment(1);
        }
        self.0.holds.decrement(1.0);
    }

    /// A renewal was answered, of a hold that without it had ended at `deadline`.
    pub(crate) fn renewed(&self, deadline: Instant, lease: Duration, clock: &Clock) {
        self.0.renewed.increment(1);
        let rest = deadline.since(clock.now());
        self.0
            .slack
            .record(rest.as_secs_f64() / lease.as_secs_f64());
    }

    /// A renewal of a hold failed, or is overdue.
    pub(crate) fn uncertain(&self) {
        self.0.doubted.increment(1);
        self.0.uncertain.increment(1.0);
    }

    /// Such a hold was renewed, or is over.
    pub(crate) fn certain(&self) {
        self.0.uncertain.decrement(1.0);
    }

    pub(crate) fn release(&self, outcome: ReleaseEnd) {
        self.0.release[outcome as usize].increment(1);
    }
}

#[cfg(feature = "metrics")]
const CLEANUP: [&str; 2] = ["confirmed", "left"];

#[cfg(feature = "metrics")]
const JOB: [&str; 6] = ["ran", "skipped", "late", "failed", "lost", "unavailable"];

#[cfg(feature = "metrics")]
const WAKE_UP: [&str; 5] = ["turn", "first", "free", "session_over", "resync"];

#[cfg(feature = "metrics")]
const REQUEST: [&str; 3] = ["acquire", "renew", "release"];

#[cfg(feature = "metrics")]
const EFFECT: [&str; 3] = ["ok", "none", "unknown"];

#[cfg(feature = "metrics")]
#[derive(Debug)]
struct StoreInstruments {
    cleanups: Gauge,
    cleanup: [Counter; CLEANUP.len()],
    jobs: [Counter; JOB.len()],
    wake_ups: [Counter; WAKE_UP.len()],
    abandoned: Counter,
    requests: [[Histogram; EFFECT.len()]; REQUEST.len()],
}

#[cfg(feature = "metrics")]
impl StoreMetrics {
    fn new(backend: &'static str) -> Self {
        let with = |key, value| [("backend", backend), (key, value)];
        let request = |op| {
            EFFECT.map(|effect| {
                let labels = [("backend", backend), ("op", op), ("effect", effect)];
                histogram!("dlock_request_seconds", &labels)
            })
        };
        Self(Arc::new(StoreInstruments {
            cleanups: gauge!("dlock_cleanups", "backend" => backend),
            cleanup: CLEANUP.map(|it| counter!("dlock_cleanup_total", &with("outcome", it))),
            jobs: JOB.map(|it| counter!("dlock_job_total", &with("outcome", it))),
            wake_ups: WAKE_UP.map(|it| counter!("dlock_wake_up_total", &with("kind", it))),
            abandoned: counter!("dlock_abandoned_calls_total", "backend" => backend),
            requests: REQUEST.map(request),
        }))
    }

    pub(crate) fn cleanup_begun(&self) {
        self.0.cleanups.increment(1.0);
    }

    pub(crate) fn cleanup_ended(&self, end: CleanupEnd) {
        self.0.cleanups.decrement(1.0);
        self.0.cleanup[end as usize].increment(1);
    }

    pub(crate) fn job(&self, end: JobEnd) {
        self.0.jobs[end as usize].increment(1);
    }

    pub(crate) fn wake_up(&self, wake_up: &WakeUp) {
        let place = match wake_up {
            WakeUp::Turn { .. } => 0,
            WakeUp::First { .. } => 1,
            WakeUp::Free(_) => 2,
            WakeUp::Over(_) => 3,
            WakeUp::Resync => 4,
        };
        self.0.wake_ups[place].increment(1);
    }

    /// The answer to a request is not awaited any more.
    pub(crate) fn abandoned(&self) {
        self.0.abandoned.increment(1);
    }

    /// A request was answered, or given up (`None`), at this moment.
    pub(crate) fn request_ends<T>(
        &self,
        op: Op,
        answer: Option<&Result<T, DriverError>>,
        sent: Instant,
        clock: &Clock,
    ) {
        let effect = match answer.map(|answer| answer.as_ref().map_err(DriverError::effect)) {
            Some(Ok(_)) => 0,
            Some(Err(Effect::None)) => 1,
            Some(Err(Effect::Unknown)) | None => 2,
        };
        self.0.requests[op as usize][effect].record(clock.now().since(sent));
    }
}

/// What exporters show beside the numbers: as `docs/telemetry.md` has it.
#[cfg(feature = "metrics")]
fn describe() {
    let counters = [
        ("dlock_acquire_total", "Acquires that ended"),
        (
            "dlock_renew_total",
            "Renewals, and those that failed or were overdue",
        ),
        (
            "dlock_lost_total",
            "Locks that were lost while they were held",
        ),
        ("dlock_release_total", "Releases"),
        (
            "dlock_poll_total",
            "Times that a waiter asked the store again",
        ),
        ("dlock_wake_up_total", "Wake-ups from the store"),
        (
            "dlock_abandoned_calls_total",
            "Requests that were never answered",
        ),
        ("dlock_cleanup_total", "Background releases that ended"),
        ("dlock_job_total", "Ticks of jobs on this replica"),
    ];
    for (name, what) in counters {
        describe_counter!(name, Unit::Count, what);
    }
    let gauges = [
        ("dlock_waiting", "Tasks that wait for a lock"),
        ("dlock_holds", "Holds now"),
        (
            "dlock_uncertain",
            "Holds whose renewals fail or are overdue",
        ),
        ("dlock_cleanups", "Background releases in progress"),
    ];
    for (name, what) in gauges {
        describe_gauge!(name, Unit::Count, what);
    }
    let times = [
        ("dlock_acquire_seconds", "From the call to the grant"),
        (
            "dlock_wait_seconds",
            "How long tasks waited, whatever the outcome",
        ),
        ("dlock_held_seconds", "How long holds lasted"),
        (
            "dlock_request_seconds",
            "Requests to the store, until answered or given up",
        ),
    ];
    for (name, what) in times {
        describe_histogram!(name, Unit::Seconds, what);
    }
    describe_histogram!(
        "dlock_renew_slack_ratio",
        "The part of the lease that was left when a renewal was answered"
    );
}

/// The most classes of a client: one word for each kind of lock. Any further one counts as unnamed.
#[cfg(feature = "metrics")]
const MOST_CLASSES: usize = 100;

/// The classes of a client.
#[derive(Debug)]
pub(crate) struct Classes {
    /// Of the locks for which no class is named.
    unnamed: Class,
    /// What the client's requests are counted by, whatever the lock.
    pub(crate) store: StoreMetrics,
    #[cfg(feature = "metrics")]
    named: Mutex<HashMap<Box<str>, Class>>,
}

impl Classes {
    #[cfg(feature = "metrics")]
    pub(crate) fn new(backend: &'static str) -> Self {
        describe();
        Self {
            unnamed: Class::new(backend, ""),
            store: StoreMetrics::new(backend),
            named: Mutex::default(),
        }
    }

    #[cfg(not(feature = "metrics"))]
    pub(crate) fn new(_: &'static str) -> Self {
        Self {
            unnamed: Class(),
            store: StoreMetrics(),
        }
    }

    pub(crate) fn unnamed(&self) -> Class {
        self.unnamed.clone()
    }

    /// The class of that name, whose instruments are registered when it is named for the first time.
    #[cfg(feature = "metrics")]
    pub(crate) fn named(&self, backend: &'static str, name: &str) -> Class {
        let mut named = self.named.lock();
        if let Some(class) = named.get(name) {
            return class.clone();
        }
        if named.len() >= MOST_CLASSES {
            return self.unnamed.clone();
        }
        let class = Class::new(backend, name);
        named.insert(name.into(), class.clone());
        class
    }
}
