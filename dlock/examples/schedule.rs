// ci: run memory redis
//! A scheduler of your own, on every replica: one replica runs the job at each tick.
//!
//! `once` wraps a job as schedulers take it: a closure that returns a boxed future. Here the scheduler is
//! tokio-cron-scheduler. Without one, `client.job` needs no wrapper.

use dlock::{Client, Error, FencingToken};
use std::{
    env,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::sleep;
use tokio_cron_scheduler::{Job, JobScheduler};

type Tick = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Keeps the lock of a tick unavailable for `min_hold`: longer than the clocks of the replicas differ, and
/// shorter than the period.
fn once<J, F>(
    client: &Client,
    name: &str,
    min_hold: Duration,
    job: J,
) -> Result<impl Fn() -> Tick + Send + Sync + use<J, F>, Error>
where
    J: Fn(FencingToken) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let lock = client.lock(name)?.min_hold(min_hold);
    Ok(move || -> Tick {
        let (lock, job) = (lock.clone(), job.clone());
        Box::pin(async move {
            let run = async {
                let Some(guard) = lock.try_acquire().await? else {
                    return Ok(()); // another replica runs this tick
                };
                guard.run(job(guard.token())).await?; // dropped if the lock is lost
                guard.release().await.map(drop)
            };
            if let Err(error) = run.await {
                eprintln!("{error}"); // the next tick runs the job again
            }
        })
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "memory:schedule".to_owned());
    let runs = Arc::new(AtomicU32::new(0));
    let mut replicas = Vec::new();
    for replica in 0..3 {
        let client = dlock::connect(&url).await?;
        let counted = Arc::clone(&runs);
        let tick = once(&client, "report", Duration::from_secs(50), move |token| {
            let counted = Arc::clone(&counted);
            async move {
                counted.fetch_add(1, SeqCst);
                println!("replica {replica} writes the report, fenced by {token}");
            }
        })?;
        // Each second, so that this program ends soon. `"0 0 3 * * *"` is at three, with an hour as `min_hold`, say.
        let scheduler = JobScheduler::new().await?;
        scheduler
            .add(Job::new_async("* * * * * *", move |_id, _scheduler| {
                tick()
            })?)
            .await?;
        scheduler.start().await?;
        replicas.push(scheduler);
    }
    while runs.load(SeqCst) == 0 {
        sleep(Duration::from_millis(50)).await;
    }
    sleep(Duration::from_secs(2)).await; // the others had a tick, too
    for mut replica in replicas {
        replica.shutdown().await?;
    }
    assert_eq!(runs.load(SeqCst), 1);
    Ok(())
}
