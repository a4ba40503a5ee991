//! Jobs of processes that a case starts.

use crate::{
    Ctx, Failure, MakeFixture, Result,
    testbed::worker::{Job, Worker},
};
use dlock_core::{LockName, driver::DistributedLock};
use std::{process::ExitCode, sync::Arc, time::Duration};

/// Starts a process for this job with a name, in the store that the case runs on.
pub(crate) fn spawn(
    ctx: &Ctx,
    job: &str,
    name: &LockName,
    lease: Duration,
    more: &[(&str, &str)],
) -> Result<Worker> {
    let (url, lease) = (ctx.url()?, lease.as_millis().to_string());
    let mut args = vec![
        ("fixture", ctx.fixture()),
        ("url", &url),
        ("name", name.as_str()),
        ("lease", &lease),
    ];
    args.extend(more);
    Ok(Worker::spawn(job, &args)?)
}

/// Runs the job to its end and reports the result to the process that started it.
pub(crate) fn done(job: &Job, work: impl Future<Output = Result>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = runtime
        .map_err(Failure::from)
        .and_then(|runtime| runtime.block_on(work));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("worker {}: {failure}", job.name);
            ExitCode::FAILURE
        }
    }
}

/// A driver of the store that the case runs on.
pub(crate) async fn driver(
    job: &Job,
    fixtures: &[Arc<dyn MakeFixture>],
) -> Result<Arc<dyn DistributedLock>> {
    let wanted = job.arg("fixture")?;
    let maker = fixtures.iter().find(|fixture| fixture.name() == wanted);
    let maker = maker.ok_or_else(|| Failure::new(format!("no fixture is called {wanted}")))?;
    maker.connect(job.arg("url")?).await
}
