//! `dlock-conformance storm`: a random attack on a store, with a checker that shares no code with dlock.

mod storm;

use clap::{Parser, Subcommand};
use dlock_conformance::testbed::worker;
use std::process::ExitCode;

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
}

#[tokio::main(worker_threads = 2)]
async fn main() -> ExitCode {
    let done = match worker::entry() {
        Some(job) => storm::work(&job).await.map(|()| true),
        None => match Arguments::parse().command {
            Command::Storm(options) => storm::run(options).await,
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
