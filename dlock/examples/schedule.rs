// ci: run
//! A scheduler of your own, on every replica: one replica runs the job at each tick.
//!
//! `once` wraps a job as schedulers take it: a closure that returns a boxed future. With
//! tokio-cron-scheduler it is `Job::new_async("0 0 3 * * *", move |_, _| tick())?`. Without a scheduler,
//! `client.job` needs no wrapper.

use dlock::{Client, Error, FencingToken};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time::sleep};

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
async fn main() -> Result<(), Error> {
    let runs = Arc::new(AtomicU32::new(0));
    let mut replicas = JoinSet::new();
    for replica in 0..3 {
        let client = dlock::connect("memory:schedule").await?;
        let counted = Arc::clone(&runs);
        let tick = once(&client, "report", Duration::from_secs(60), move |token| {
            let counted = Arc::clone(&counted);
            async move {
                counted.fetch_add(1, SeqCst);
                println!("replica {replica} writes the report, fenced by {token}");
            }
        })?;
        // The scheduler: clocks differ, so each replica is a little later than the one before.
        replicas.spawn(async move {
            sleep(Duration::from_millis(50) * replica).await;
            tick().await;
        });
    }
    replicas.join_all().await;
    assert_eq!(runs.load(SeqCst), 1);
    Ok(())
}
