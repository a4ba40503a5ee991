//! What a client counts: each call once, and nothing is left in a gauge.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, Error, ErrorKind, GuardState, Lease, driver::Wake};
use dlock_memory::{Call, Fault, Faults, MemoryConfig, MemoryDriver, MemoryStore, WakeUpFault};
use metrics_util::{
    MetricKind,
    debugging::{DebugValue, DebuggingRecorder, Snapshotter},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{task::yield_now, time};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(3);

/// A store, and what the clients count that are made by [`client`](Self::client).
struct Bench {
    store: MemoryStore,
    recorder: DebuggingRecorder,
}

impl Bench {
    fn new() -> Self {
        Self {
            store: MemoryStore::new(Clock::simulated()),
            recorder: DebuggingRecorder::new(),
        }
    }

    fn client(&self) -> (Client, Faults) {
        let config = MemoryConfig::new(Wake::Queue);
        let driver = Arc::new(MemoryDriver::connect(&self.store, config));
        let faults = driver.faults().clone();
        let builder = Client::builder(driver)
            .clock(self.store.clock().clone())
            .lease(Lease::renewed(LEASE));
        let client = metrics::with_local_recorder(&self.recorder, || builder.build());
        (client.unwrap(), faults)
    }

    fn counts(&self) -> Counts {
        Counts::of(&self.recorder.snapshotter())
    }
}

/// Counters and gauges that are not 0 and the lengths of histograms, by name and labels. To count them begins anew
/// with each reading.
#[derive(Debug)]
struct Counts(BTreeMap<String, f64>);

impl Counts {
    fn of(snapshotter: &Snapshotter) -> Self {
        let mut counts = BTreeMap::new();
        for (key, _, _, value) in snapshotter.snapshot().into_vec() {
            let labels: Vec<_> = key.key().labels().map(|label| label.value()).collect();
            let labels = labels.join(" ");
            let value = match value {
                DebugValue::Counter(count) => f64::from(u32::try_from(count).unwrap()),
                DebugValue::Gauge(value) => value.into_inner(),
                DebugValue::Histogram(values) => f64::from(u32::try_from(values.len()).unwrap()),
            };
            let kind = match key.kind() {
                MetricKind::Gauge => "gauge ",
                _ => "",
            };
            if value != 0.0 {
                counts.insert(format!("{kind}{} {labels}", key.key().name()), value);
            }
        }
        Self(counts)
    }

    /// All that begin with this, without it, each with its count.
    fn under(&self, prefix: &str) -> Vec<(&str, f64)> {
        let found = self.0.iter().filter_map(|(key, value)| {
            let rest = key.strip_prefix(prefix)?;
            Some((rest.trim_start(), *value))
        });
        found.collect()
    }

    fn nothing_is_in_a_gauge(&self) {
        assert_eq!(self.under("gauge "), [], "{self:#?}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_acquire_is_counted_once_with_its_outcome() -> Result<(), Error> {
    let bench = Bench::new();
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let lock = client.lock("orders:42")?;

    let guard = lock.acquire().await?;
    assert!(lock.try_acquire().await?.is_none());
    lock.acquire_timeout(SECOND).await.unwrap_err();
    let cut = time::timeout(SECOND, lock.acquire()).await;
    assert!(cut.is_err(), "cancelled while it waits");
    drop(lock.acquire()); // never polled: it did nothing
    let refused = client
        .lock("orders:42")?
        .lease(Lease::fixed(Duration::ZERO));
    refused.acquire().await.unwrap_err();
    lock.join(&guard.pass()?).await?.release().await?;
    let pass = guard.pass()?;
    guard.release().await?;
    lock.join(&pass).await.unwrap_err();
    faults.always(Call::Acquire, Fault::ErrorBefore);
    lock.try_acquire().await.unwrap_err();
    faults.clear();
    client.shutdown(SECOND).await?;
    lock.acquire().await.unwrap_err();
    drop(other);

    let counts = bench.counts();
    let acquires = counts.under("dlock_acquire_total memory ");
    let one = |outcome| (outcome, 1.0);
    assert_eq!(
        acquires,
        [
            ("acquired", 2.0),
            one("cancelled"),
            one("gone"),
            one("held"),
            one("refused"),
            one("shutting_down"),
            one("store_timeout"),
            one("timeout"),
        ]
    );
    assert_eq!(counts.under("dlock_acquire_seconds memory"), [("", 2.0)]);
    assert_eq!(counts.under("dlock_wait_seconds memory"), [("", 2.0)]);
    counts.nothing_is_in_a_gauge();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn every_tick_of_a_job_is_counted_on_each_replica() -> Result<(), Error> {
    let bench = Bench::new();
    let ((client, _), (other, faults)) = (bench.client(), bench.client());
    for (client, fails) in [(&client, false), (&other, true)] {
        let job = client.job("report")?.every(60 * SECOND);
        tokio::spawn(job.run(move |_term| async move {
            match fails {
                true => Err("it fails"),
                false => Ok(()),
            }
        }));
    }
    time::sleep((3 * 60 + 30) * SECOND).await;
    faults.always_all(Fault::ErrorBefore);
    time::sleep(2 * 60 * SECOND).await;

    let counts = bench.counts();
    let ticks = counts.under("dlock_job_total memory ");
    let all: f64 = ticks.iter().map(|(_, count)| count).sum();
    let of = |outcome| ticks.iter().find(|(name, _)| *name == outcome);
    assert!((all - 10.0).abs() < 0.1, "{ticks:?}");
    assert_eq!(of("unavailable"), Some(&("unavailable", 2.0)));
    let [ran, failed] =
        ["ran", "failed"].map(|outcome| of(outcome).map_or(0.0, |(_, count)| *count));
    assert!((ran + failed - 5.0).abs() < 0.1, "{ticks:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn every_hold_is_counted_once_with_its_end() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, faults) = bench.client();
    let lock = client.lock("orders:42")?;

    lock.acquire().await?.release().await?;
    drop(lock.acquire().await?);
    yield_now().await;
    let guard = lock.acquire().await?;
    client.admin().break_lock("orders:42", None).await?;
    guard.release().await.unwrap_err(); // found out by the release
    let guard = lock.acquire().await?;
    faults.always(Call::Renew, Fault::NeverExecuted);
    guard.lost().await;
    time::sleep(SECOND).await;
    drop(guard);
    faults.clear();
    time::sleep(LEASE + SECOND * 60).await; // the renewal is abandoned
    let detached = lock.acquire().await?.detach().unwrap();
    client.attach(detached).await.unwrap().release().await?;
    let held = lock.acquire().await?;
    time::sleep(LEASE * 2).await; // renewed meanwhile
    held.release().await?;
    client.shutdown(SECOND).await?;

    let counts = bench.counts();
    assert_eq!(
        counts.under("dlock_held_seconds memory "),
        [("detached", 1.0), ("lost", 2.0), ("released", 4.0)]
    );
    assert_eq!(
        counts.under("dlock_lost_total memory "),
        [("deadline", 1.0), ("not_held", 1.0)]
    );
    assert_eq!(
        counts.under("dlock_release_total memory "),
        [("dropped", 1.0), ("lost", 2.0), ("released", 3.0)]
    );
    let renewals = counts.under("dlock_renew_total memory ");
    let of = |outcome| {
        renewals
            .iter()
            .find(|(of, _)| *of == outcome)
            .map(|(_, n)| *n)
    };
    assert_eq!(of("uncertain"), Some(1.0));
    assert!(of("renewed") >= Some(4.0), "{renewals:?}");
    let requests = counts.under("dlock_request_seconds memory ");
    assert!(requests.contains(&("release ok", 6.0)), "{requests:?}");
    let unknown = requests.iter().find(|(of, _)| *of == "renew unknown");
    let unknown = unknown.map(|(_, count)| ("", *count));
    assert_eq!(
        counts.under("dlock_abandoned_calls_total memory"),
        [unknown.unwrap()]
    );
    counts.nothing_is_in_a_gauge();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn every_release_is_counted_once_with_its_outcome() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, faults) = bench.client();
    let lock = client.lock("orders:42")?;

    let outer = lock.acquire().await?;
    lock.join(&outer.pass()?).await?.release().await?;
    outer.release().await?;
    let nightly = client.lock("nightly")?.min_hold(SECOND);
    nightly.acquire().await?.release().await?;
    drop(lock.acquire().await?);
    time::sleep(SECOND).await;
    let guard = lock.acquire().await?;
    client.admin().break_lock("orders:42", None).await?;
    guard.release().await.unwrap_err();
    let guard = lock.acquire().await?;
    faults.always(Call::Release, Fault::NeverExecuted);
    let unanswered = guard.release().await.unwrap_err();
    assert_eq!(unanswered.kind(), ErrorKind::Indeterminate);
    faults.clear();
    time::sleep(LEASE * 5).await; // it goes on in the background

    let counts = bench.counts();
    let outcomes = [
        "dropped",
        "indeterminate",
        "lost",
        "min_hold",
        "released",
        "still_held",
    ];
    assert_eq!(
        counts.under("dlock_release_total memory "),
        outcomes.map(|outcome| (outcome, 1.0))
    );
    counts.nothing_is_in_a_gauge();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_uncertain_in_the_gauge_until_it_is_renewed_or_over() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, faults) = bench.client();
    let guards = [
        client.lock("a")?.acquire().await?,
        client.lock("b")?.acquire().await?,
    ];
    // By how much the gauge has changed when no guard is in this state any more.
    let change_after = async |state: GuardState| {
        while guards.iter().any(|guard| guard.state() == state) {
            time::sleep(SECOND / 100).await;
        }
        let counts = bench.counts();
        let change = counts.under("gauge dlock_uncertain memory");
        change.first().map(|(_, change)| *change)
    };

    faults.always(Call::Renew, Fault::ErrorBefore);
    assert_eq!(change_after(GuardState::Held).await, Some(2.0));
    faults.clear();
    assert_eq!(change_after(GuardState::Uncertain).await, Some(-2.0));
    assert!(guards.iter().all(|guard| guard.state() == GuardState::Held));
    faults.always(Call::Renew, Fault::ErrorBefore);
    assert_eq!(change_after(GuardState::Held).await, Some(2.0));
    let [released, lost] = guards;
    released.release().await?;
    lost.lost().await;
    let counts = bench.counts();
    assert_eq!(counts.under("gauge dlock_uncertain memory"), [("", -2.0)]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_poll_is_counted_with_its_cause_and_a_wake_up_with_its_kind() -> Result<(), Error> {
    let bench = Bench::new();
    let ((holder, _), (waiter, faults)) = (bench.client(), bench.client());
    let guard = holder.lock("orders:42")?.acquire().await?;
    faults.wake_ups(WakeUpFault::Lose);
    let waiting = tokio::spawn(waiter.lock("orders:42")?.acquire());
    time::sleep(LEASE * 7 / 6).await; // between two polls
    let counts = bench.counts();
    let polls = counts.under("dlock_poll_total memory ");
    assert!(
        matches!(polls[..], [("timer", count)] if count > 1.0),
        "{polls:?}"
    );

    faults.wake_ups(WakeUpFault::Deliver);
    guard.release().await?;
    waiting.await.unwrap()?.release().await?;
    let counts = bench.counts();
    let polls = counts.under("dlock_poll_total memory ");
    assert!(polls.contains(&("wake_up", 1.0)), "{polls:?}");
    assert_eq!(counts.under("dlock_wake_up_total memory "), [("turn", 1.0)]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_cleanup_is_counted_once_with_its_end() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, faults) = bench.client();
    let lock = client.lock("orders:42")?;

    drop(lock.acquire().await?);
    time::sleep(SECOND).await;
    let guard = lock.acquire().await?;
    faults.always(Call::Release, Fault::ErrorBefore);
    drop(guard);
    time::sleep(LEASE * 5).await;

    let counts = bench.counts();
    assert_eq!(
        counts.under("dlock_cleanup_total memory "),
        [("confirmed", 1.0), ("left", 1.0)]
    );
    counts.nothing_is_in_a_gauge();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_is_attached_again_keeps_its_class() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, _) = bench.client();
    let lock = metrics::with_local_recorder(&bench.recorder, || {
        client.lock("orders:42").map(|lock| lock.class("orders"))
    })?;
    let detached = lock.acquire().await?.detach().unwrap();
    client.attach(detached).await.unwrap().release().await?;
    let counts = bench.counts();
    assert_eq!(
        counts.under("dlock_held_seconds memory "),
        [("orders detached", 1.0), ("orders released", 1.0)]
    );
    counts.nothing_is_in_a_gauge();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn sets_elections_and_jobs_are_counted_under_their_class() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, _) = bench.client();
    let (set, any, election, job) = metrics::with_local_recorder(&bench.recorder, || {
        Ok::<_, Error>((
            client.lock_all(["a", "b"])?.class("set"),
            client.lock_any(["c", "d"])?.class("any"),
            client.election("e")?.class("election"),
            client.job("f")?.every(60 * SECOND).class("job"),
        ))
    })?;
    for (_, outcome) in set.acquire().await?.release().await {
        outcome?;
    }
    let taken = any.acquire().await?;
    any.acquire().await?.release().await?; // the other one
    taken.release().await?;
    election.resign(election.campaign().await?).await?;
    let a_tick = time::timeout(90 * SECOND, job.run(|_term| async { Ok::<_, Error>(()) }));
    a_tick.await.unwrap_err();

    let counts = bench.counts();
    assert_eq!(
        counts.under("dlock_acquire_total memory "),
        [
            ("any acquired", 2.0),
            ("any held", 1.0),
            ("election acquired", 1.0),
            ("job acquired", 1.0),
            ("set acquired", 2.0),
        ]
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_hold_and_a_waiter_stand_in_the_gauges_and_no_name_in_a_label() -> Result<(), Error> {
    let bench = Bench::new();
    let (client, _) = bench.client();
    let name = "canary:4711";
    let lock = metrics::with_local_recorder(&bench.recorder, || {
        client.lock(name).map(|lock| lock.class("orders"))
    })?;
    let guard = lock.acquire().await?;
    let waiters = [(); 2].map(|()| tokio::spawn(lock.acquire()));
    time::sleep(SECOND).await;

    let counts = bench.counts();
    assert_eq!(counts.under("gauge dlock_holds memory "), [("orders", 1.0)]);
    assert_eq!(
        counts.under("gauge dlock_waiting memory "),
        [("orders", 2.0)]
    );
    assert!(
        counts.0.keys().all(|key| !key.contains("canary")),
        "{counts:#?}"
    );
    guard.release().await?;
    for waiter in waiters {
        waiter.await.unwrap()?.release().await?;
    }
    Ok(())
}
