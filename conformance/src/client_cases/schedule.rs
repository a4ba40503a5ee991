//! Scheduled jobs over each store.

use super::test_client::TestClient;
use crate::{Ctx, Failure, Result, case::cases, in_time, same};
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

cases! {
    [Clause::Keep]
    one_of_several_replicas_runs_a_job_at_each_tick;
}

async fn one_of_several_replicas_runs_a_job_at_each_tick(ctx: Ctx) -> Result {
    let (replicas, name) = TestClient::several::<3>(&ctx).await?;
    let (ran, mut runs) = mpsc::unbounded_channel();
    let mut running = Vec::new();
    for (replica, late) in replicas.iter().zip([0, 150, 75]) {
        let job = replica.inner.job(&name)?.every(PERIOD);
        // A clock that is late, which the offset stands for.
        let job = job.offset(Duration::from_millis(late));
        let (ran, ctx) = (ran.clone(), ctx.clone());
        running.push(ctx.clone().spawn(job.run(move |term| {
            let told = ran.send((wall(&ctx), term.token()));
            async move { told.map_err(|_| "the case is over") }
        })));
    }
    drop(ran);
    let mut before = None;
    for _ in 0..TICKS {
        let next = ctx.within("the job runs", PERIOD * 2, runs.recv());
        let (at, token) = next
            .await?
            .ok_or_else(|| Failure::new("no replica is left"))?;
        let (tick, rest) = (
            at.as_nanos() / PERIOD.as_nanos(),
            at.as_nanos() % PERIOD.as_nanos(),
        );
        // Later it could be the run of either tick.
        in_time(
            rest < PERIOD.as_nanos() / 2,
            "a run began half a period after its tick",
        )?;
        if let Some((last, lower)) = before {
            same("a tick is run again", tick == last, false)?;
            same("the tokens rise", token > lower, true)?;
            in_time(tick == last + 1, "a tick was missed")?;
        }
        before = Some((tick, token));
    }
    Ok(())
}

/// The time since 1970, as replicas read it.
fn wall(ctx: &Ctx) -> Duration {
    if ctx.is_simulated() {
        return Duration::from_nanos(ctx.now().as_nanos());
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

const PERIOD: Duration = Duration::from_secs(2);
const TICKS: usize = 3;
