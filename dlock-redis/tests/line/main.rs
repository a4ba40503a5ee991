//! Tests of the queue under attack: real servers, real clients, and processes that are killed and
//! stopped while they wait.
//!
//! Two leases overlap in none of these tests. Each test says how long the lock may stay free while a
//! client waits. The bounds leave room for a machine that does other things at the same time. A test that
//! misses one runs once more, with no other beside it: a machine that stalled once seldom stalls again.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod bed;
mod clients;
mod network;
mod reconnect;
mod server;
mod unheard;

use bed::{Late, Outcome};
use dlock_conformance::testbed::worker;
use libtest_mimic::{Arguments, Failed, Trial};
use parking_lot::RwLock;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        return match runtime().block_on(bed::work(&job)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("worker {}: {error}", job.name);
                ExitCode::FAILURE
            }
        };
    }
    let trials = [
        clients::trials(),
        network::trials(),
        reconnect::trials(),
        server::trials(),
        unheard::trials(),
    ];
    let arguments = Arguments::from_args();
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit_code()
}

/// Read-locked by each running test, write-locked by one that runs again.
static RUNNING: RwLock<()> = RwLock::new(());

fn trial<F: Future<Output = Outcome>>(name: &str, test: impl Fn() -> F + Send + 'static) -> Trial {
    let its = name.to_owned();
    Trial::test(name, move || {
        let run = || runtime().block_on(test());
        let beside_others = RUNNING.read();
        let first = run();
        drop(beside_others);
        let outcome = match first {
            Err(error) if error.is::<Late>() => {
                let _alone = RUNNING.write();
                println!("{its} runs again, alone: {error}");
                run()
            }
            first => first,
        };
        outcome.map_err(|error| Failed::from(error.to_string()))
    })
}

/// The same for hours, in a much larger size.
fn soak<F: Future<Output = Outcome>>(name: &str, test: impl Fn() -> F + Send + 'static) -> Trial {
    trial(name, test).with_ignored_flag(true).with_kind("soak")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}
