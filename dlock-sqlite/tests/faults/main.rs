//! Faults that only a file has: its names, its neighbours, its disk, and the processes that share it.
//!
//! This binary starts itself again as other processes, and inside namespaces of its own, so it has a `main` of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

/// A row of a table of tests: the function's name is the test's.
macro_rules! tests {
    ($kind:ident: $($name:ident),* $(,)?) => { [$($kind(stringify!($name), || $name())),*] };
}

mod bed;
mod calls;
mod file;
mod kernel;
mod processes;

use dlock_conformance::testbed::worker::{self, Job};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};
use tokio::runtime::Runtime;

const SECOND: Duration = Duration::from_secs(1);
/// Far longer than any step takes on a busy machine: only a test that hangs meets it.
const LIMIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        return work(&job);
    }
    let trials = [
        file::trials(),
        processes::trials(),
        calls::trials(),
        kernel::trials(),
    ];
    let trials = trials.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type Outcome = Result<(), Failed>;

fn trial<F: Future<Output = ()> + Send>(
    name: &str,
    body: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        runtime().block_on(async {
            let done = tokio::time::timeout(LIMIT, body());
            done.await.map_err(|_| Failed::from("it hangs"))
        })
    })
}

/// A test that needs a kernel to itself, which the namespaces of one process are as good as.
fn isolated(name: &str, body: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        let able = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "true"])
            .output();
        match able {
            Ok(output) if output.status.success() => body().map(|()| Completion::Completed),
            refused => {
                let why = "needs unshare (util-linux) and the right to make user namespaces";
                if std::env::var_os("DLOCK_TEST_UNPRIVILEGED").is_some_and(|set| set == "1") {
                    return Ok(Completion::ignored_with(why));
                }
                Err(format!("{why}, or DLOCK_TEST_UNPRIVILEGED=1: {refused:?}").into())
            }
        }
    })
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// What a process of its own does.
fn work(job: &Job) -> ExitCode {
    let path = PathBuf::from(job.arg("file").unwrap());
    runtime().block_on(async {
        match job.name.as_str() {
            "count" => processes::count(&path, job.arg("times").unwrap().parse().unwrap()).await,
            "open" => drop(bed::open(&path).await),
            "hold" => processes::hold(&path).await,
            "write" => processes::write(&path).await,
            "wait" => processes::wait(&path).await,
            "full" => kernel::full(&path).await,
            "readonly" => kernel::readonly(&path).await,
            "deaf" => kernel::deaf(&path).await,
            "elsewhen" => kernel::elsewhen(&path).await,
            "mounted" => kernel::mounted(&path).await,
            other => panic!("no job {other}"),
        }
    });
    ExitCode::SUCCESS
}

/// Runs one job of this binary after a script, in namespaces that end with it.
fn alone(namespaces: &[&str], script: &str, job: &str, file: &Path) -> Outcome {
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user"])
        .args(namespaces)
        .args(["sh", "-ec", &format!("{script}\nexec \"$0\"")])
        .arg(std::env::current_exe().unwrap())
        .env("DLOCK_WORKER", job)
        .env("DLOCK_WORKER_FILE", file)
        .env("FOLDER", file.parent().unwrap())
        .output()
        .unwrap();
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(said.into())
}
