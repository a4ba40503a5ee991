//! Scheduled jobs: each tick is run once, whatever the replicas' clocks say.

use super::{Bench, MOMENT, SECOND};
use dlock_core::{Client, ErrorKind, Job, JobReport, LossReason, driver::Wake};
use dlock_memory::{Call, Fault};
use std::{
    future::pending,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time};

const PERIOD: Duration = Duration::from_secs(60);

fn job(client: &Client) -> Job {
    client.job("tick").unwrap().every(PERIOD)
}

/// A store at half of a period.
async fn bench(wake: Wake) -> Bench {
    let bench = Bench::new(wake);
    time::sleep(PERIOD / 2).await;
    bench
}

/// The reports so far, as words.
#[derive(Clone, Default)]
struct Reports(Arc<Mutex<Vec<String>>>);

impl Reports {
    fn of(&self, job: Job) -> Job {
        let reports = Arc::clone(&self.0);
        job.on_report(move |report| {
            let word = match report {
                JobReport::Failed(error) => format!("failed: {error}"),
                JobReport::Lost(reason) => format!("lost: {reason:?}"),
                JobReport::Unavailable(_) => "unavailable".to_owned(),
                other => format!("{other:?}"),
            };
            reports.lock().unwrap().push(word);
        })
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[tokio::test(start_paused = true)]
async fn each_tick_is_run_once_though_the_clocks_of_the_replicas_differ() {
    for wake in [Wake::Queue, Wake::Notify, Wake::Poll] {
        let bench = bench(wake).await;
        let runs = Arc::new(Mutex::new(Vec::new()));
        let mut replicas = JoinSet::new();
        for late in [0, 5, 1, 3, 2] {
            let (client, _) = bench.client();
            // A clock that is late, which the offset stands for. The difference allowed is 6 s.
            let job = job(&client).offset(SECOND * late);
            let (runs, clock) = (Arc::clone(&runs), bench.store.clock().clone());
            replicas.spawn(job.run(move |_term| {
                runs.lock()
                    .unwrap()
                    .push(clock.now().as_nanos() / 60_000_000_000);
                async { Ok::<_, String>(()) }
            }));
        }
        let began = bench.store.clock().now().as_nanos() / 60_000_000_000;
        time::sleep(100 * PERIOD).await;
        replicas.abort_all();
        let expected: Vec<_> = (began + 1..=began + 100).collect();
        assert_eq!(*runs.lock().unwrap(), expected, "{wake:?}");
    }
}

/// The replica whose clock is first has died, then lives again.
#[tokio::test(start_paused = true)]
async fn another_replica_runs_the_ticks_of_a_dead_one() {
    let bench = bench(Wake::Queue).await;
    let ((first, faults), (second, _)) = (bench.client(), bench.client());
    let ran = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    for (at, client) in [&first, &second].into_iter().enumerate() {
        let ran = Arc::clone(&ran[at]);
        let job = job(client).offset(SECOND * u32::try_from(at).unwrap());
        tokio::spawn(job.run(move |_term| {
            ran.fetch_add(1, SeqCst);
            async { Ok::<_, String>(()) }
        }));
    }
    let counts = || ran.each_ref().map(|ran| ran.load(SeqCst));
    time::sleep(10 * PERIOD).await;
    assert_eq!(counts(), [10, 0]);
    faults.always_all(Fault::NeverExecuted);
    time::sleep(10 * PERIOD).await;
    assert_eq!(counts(), [10, 10]);
    faults.clear();
    time::sleep(10 * PERIOD).await;
    assert_eq!(counts(), [20, 10]);
}

#[tokio::test(start_paused = true)]
async fn a_job_longer_than_its_period_skips_ticks_and_never_runs_twice_at_a_time() {
    let bench = bench(Wake::Queue).await;
    let ((first, _), (second, _)) = (bench.client(), bench.client());
    let (running, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let reports = [Reports::default(), Reports::default()];
    for (client, reports) in [&first, &second].into_iter().zip(&reports) {
        let (running, runs) = (Arc::clone(&running), Arc::clone(&runs));
        tokio::spawn(reports.of(job(client)).run(move |_term| {
            assert_eq!(running.fetch_add(1, SeqCst), 0, "two run it");
            let (running, runs) = (Arc::clone(&running), Arc::clone(&runs));
            async move {
                time::sleep(PERIOD * 5 / 2).await;
                running.fetch_sub(1, SeqCst);
                runs.fetch_add(1, SeqCst);
                Ok::<_, String>(())
            }
        }));
    }
    time::sleep(30 * PERIOD + PERIOD / 4).await;
    // A run takes the tick at which it begins and the two during it.
    assert_eq!(runs.load(SeqCst), 10);
    let words = reports.each_ref().map(Reports::take).concat();
    assert_eq!(words.iter().filter(|word| *word == "Ran").count(), 10);
    assert!(words.iter().all(|word| word == "Ran" || word == "Skipped"));
}

#[tokio::test(start_paused = true)]
async fn what_became_of_each_tick_is_reported() {
    let bench = bench(Wake::Queue).await;
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let reports = Reports::default();
    let dropped = Arc::new(AtomicUsize::new(0));
    let mut turn = 0;
    let counted = Arc::clone(&dropped);
    let running = tokio::spawn(reports.of(job(&client)).run(move |term| {
        turn += 1;
        let (turn, counted) = (turn, Arc::clone(&counted));
        async move {
            term.check().unwrap();
            match turn {
                1 => Ok(()),
                2 => Err("no paper"),
                _ => {
                    let _counts = OnDrop(counted);
                    pending().await
                }
            }
        }
    }));
    time::sleep(PERIOD).await;
    assert_eq!(reports.take(), ["Ran"]);
    time::sleep(PERIOD).await;
    assert_eq!(reports.take(), ["failed: no paper"]);
    time::sleep(PERIOD).await;
    other.admin().break_lock("tick", None).await.unwrap();
    // It is lost at a renewal, within the period.
    let held = other.lock("tick").unwrap().acquire().await.unwrap();
    time::sleep(PERIOD / 2).await;
    let lost = format!("lost: {:?}", LossReason::NotHeld);
    assert_eq!((reports.take(), dropped.load(SeqCst)), (vec![lost], 1));
    time::sleep(PERIOD / 2).await;
    assert_eq!(reports.take(), ["Skipped"]);
    faults.always(Call::Acquire, Fault::ErrorBefore);
    time::sleep(PERIOD).await;
    assert_eq!(reports.take(), ["unavailable"]);
    drop(held);
    client.shutdown(Duration::ZERO).await.unwrap();
    let ended = time::timeout(MOMENT, running).await.unwrap().unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ShuttingDown);
}

struct OnDrop(Arc<AtomicUsize>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// The lock would else be unavailable beyond the next tick.
#[tokio::test(start_paused = true)]
async fn a_tick_that_is_noticed_late_does_not_cost_the_next_one() {
    let bench = bench(Wake::Queue).await;
    let (client, _) = bench.client();
    let reports = Reports::default();
    let _running = tokio::spawn(
        reports
            .of(job(&client))
            .run(|_term| async { Ok::<_, String>(()) }),
    );
    time::sleep(PERIOD * 3 / 4).await;
    assert_eq!(reports.take(), ["Ran"]);
    // The machine sleeps through the tick: by less than the clock difference of 6 s, and by more.
    for (late, report) in [(4 * SECOND, "Ran"), (8 * SECOND, "Late")] {
        bench.store.clock().jump(PERIOD * 3 / 4 + late);
        time::sleep(2 * SECOND).await;
        assert_eq!(reports.take(), [report], "{late:?}");
        time::sleep(PERIOD - late).await;
        assert_eq!(reports.take(), ["Ran"], "in time, after {late:?}");
        time::sleep(PERIOD / 4 - 2 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_dropped_while_it_runs_is_run_by_another_at_the_next_tick() {
    let bench = bench(Wake::Queue).await;
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let running = tokio::spawn(job(&client).run(|_term| pending::<Result<(), String>>()));
    time::sleep(PERIOD / 2 + SECOND).await;
    running.abort();
    let reports = Reports::default();
    tokio::spawn(
        reports
            .of(job(&other))
            .run(|_term| async { Ok::<_, String>(()) }),
    );
    time::sleep(PERIOD - 2 * SECOND).await;
    assert_eq!(reports.take(), [""; 0], "its tick is over");
    time::sleep(2 * SECOND).await;
    assert_eq!(reports.take(), ["Ran"]);
}

/// The clocks differ by more than the lease, and by less than they may. The later replica's machine stands still besides.
#[tokio::test(start_paused = true)]
async fn a_tick_whose_replica_died_is_run_by_no_other() {
    const HOUR: Duration = Duration::from_secs(3600);
    let bench = bench(Wake::Queue).await;
    time::sleep(PERIOD).await; // both wait for the next hour
    let ((first, faults), (second, _)) = (bench.client(), bench.client());
    let began = Arc::new(AtomicUsize::new(0));
    for (client, late) in [(&first, 0), (&second, 40)] {
        let job = job(client).every(HOUR).offset(SECOND * late);
        let (faults, began) = (faults.clone(), Arc::clone(&began));
        let run = job.run(move |_term| {
            began.fetch_add(1, SeqCst);
            if late == 0 {
                faults.always_all(Fault::NeverExecuted);
            }
            async { Ok::<_, String>(()) }
        });
        tokio::spawn(async move {
            let mut run = pin!(run);
            if late > 0 {
                time::timeout(HOUR - PERIOD, &mut run).await.unwrap_err();
                time::sleep(PERIOD).await; // past its tick
            }
            run.await
        });
    }
    time::sleep(HOUR + PERIOD).await;
    assert_eq!(began.load(SeqCst), 1);
    time::sleep(HOUR).await;
    assert_eq!(began.load(SeqCst), 2, "the next tick");
}

#[tokio::test(start_paused = true)]
async fn times_that_do_not_fit_together_are_refused() {
    let (client, _) = Bench::new(Wake::Queue).client();
    let plain = client.job("tick").unwrap();
    for (job, said) in [
        (plain.clone(), "the period (0ns) must be between 1s and"),
        (plain.clone().every(SECOND / 2), "the period (500ms)"),
        (plain.clone().every(Duration::MAX), "the period ("),
        (
            plain.every(PERIOD).clock_difference(31 * SECOND),
            "the clock difference (31s) must not exceed half of the period (60s)",
        ),
    ] {
        let refused = job.run(|_term| async { Ok::<_, String>(()) }).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Misuse);
        assert!(refused.to_string().starts_with(said), "{refused}");
    }
}
