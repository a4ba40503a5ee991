//! `dlock-conformance storm` and `soak`: attacks on a store, with a checker that shares no code with dlock.

mod soak;
mod storm;

use clap::{Parser, Subcommand};
use dlock_conformance::testbed::worker;
use std::{error::Error, process::ExitCode};

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

#[derive(Debug, Parser)]
#[command(name = "dlock-conformance")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Kills and stops worker processes, their server and their network at random, and checks what
    /// every holder believed.
    Storm(storm::Options),
    /// One pattern of use by many processes for some time, some of them killed or stopped: how long each waits,
    /// and what every holder believed.
    Soak(soak::Options),
}

#[tokio::main(worker_threads = 2)]
async fn main() -> ExitCode {
    let done = match worker::entry() {
        Some(job) if job.name == soak::JOB => soak::work(&job).await.map(|()| true),
        Some(job) => storm::work(&job).await.map(|()| true),
        None => match Arguments::parse().command {
            Command::Storm(options) => storm::run(options).await,
            Command::Soak(options) => soak::run(options).await,
        },
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the storm could not be run: {error}");
            ExitCode::from(2)
        }
    }
}
