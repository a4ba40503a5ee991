//! Floors, drivers and peers on the same work, as ratios of one run. See `README.md`.

// A lean build does not use the code for other stores; the full build must use everything.
#![cfg_attr(
    not(all(
        feature = "redis",
        feature = "sqlite",
        feature = "mysql",
        feature = "postgres",
        feature = "mongo",
        feature = "zk",
        feature = "etcd"
    )),
    allow(dead_code, reason = "a part of the stores alone")
)]

mod clock;
#[cfg(feature = "compare")]
mod compare;
mod counted;
mod figure;
mod floor;
mod home;
mod measure;
#[cfg(feature = "redis")]
mod placement;
mod report;
mod work;

use clap::{Parser, builder::PossibleValuesParser};
#[cfg(feature = "compare")]
use compare::failovers;
use dlock_conformance::testbed::{server, worker};
use figure::Figure;
use measure::Plan;
use report::Report;
use std::{error::Error, path::PathBuf, process::ExitCode, time::Duration};

/// Any error of the benchmark: its reader is a person.
type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// Measures dlock against floors and peers on this machine, over loopback, and prints ratios of one run.
///
/// `dlock-bench compare --help`: the same work over every store and by other lock libraries, as a report.
/// `dlock-bench failovers --help`: what holders are told when their Redis master dies.
#[derive(Debug, Parser)]
#[command(name = "dlock-bench")]
struct Arguments {
    /// What to measure.
    #[arg(value_parser = PossibleValuesParser::new(figure::names()))]
    what: String,
    /// How long each figure may measure; without it every figure has its own default.
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Repetitions of each figure: all contestants once, in another order each time.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    /// How many holders `redis-recovery` kills.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..))]
    kills: u16,
    /// How many locks `renewals` holds.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    locks: u32,
    /// How many processes `sqlite-handoff` lets wait.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(2..))]
    processes: u16,
    /// The largest crowd of `memory-waiters`; the others are a tenth and a hundredth of it.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..))]
    waiters: u32,
    /// The command that `cli-exec` runs; without it the `dlock` beside this program.
    #[arg(long, value_name = "PATH")]
    dlock: Option<PathBuf>,
    /// Also writes all results as JSON to this file; `-`: to standard output instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Tokio's worker threads, here and in every worker process: a constant, so that runs compare.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    let done = match worker::entry() {
        Some(job) => runtime().and_then(|runtime| runtime.block_on(figure::job(&job))),
        #[cfg(feature = "compare")]
        None if std::env::args().nth(1).as_deref() == Some(compare::JOB) => compare_all(),
        #[cfg(feature = "compare")]
        None if std::env::args().nth(1).as_deref() == Some(failovers::COMMAND) => fail_over(),
        None => run(&Arguments::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dlock-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "compare")]
fn compare_all() -> Result {
    let arguments = compare::Arguments::parse_from(std::env::args_os().skip(1));
    say_what_counts();
    runtime()?.block_on(compare::run(arguments))
}

#[cfg(feature = "compare")]
fn fail_over() -> Result {
    let arguments = failovers::Arguments::parse_from(std::env::args_os().skip(1));
    say_what_counts();
    runtime()?.block_on(failovers::run(arguments))
}

fn say_what_counts() {
    if cfg!(debug_assertions) {
        eprintln!("dlock-bench: not a release build, the numbers mean nothing");
    } else {
        server::on_disk(); // durable stores are measured with the cost of durability
    }
}

fn run(arguments: &Arguments) -> Result {
    say_what_counts();
    let runtime = runtime()?;
    let to_stdout = arguments
        .json
        .as_deref()
        .is_some_and(|path| path.as_os_str() == "-");
    let mut report = Report::new(WORKERS);
    for figure in figure::all() {
        if !arguments.wants(&figure) {
            continue;
        }
        let plan = arguments.plan(&figure);
        let table = runtime.block_on(async { tokio::spawn((figure.run)(plan)).await? })?;
        if !to_stdout {
            println!("{table}");
        }
        report.add(table);
    }
    match &arguments.json {
        Some(_) if to_stdout => println!("{}", report.json()),
        Some(path) => std::fs::write(path, report.json())?,
        None => {}
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, figure: &Figure) -> bool {
        self.what == figure::ALL || self.what == figure.name
    }

    fn plan(&self, figure: &Figure) -> Plan {
        let seconds = self.seconds.map_or(figure.seconds, |seconds| {
            Duration::try_from_secs_f64(seconds).unwrap_or(figure.seconds)
        });
        Plan {
            seconds,
            repetitions: usize::from(self.repetitions),
            kills: usize::from(self.kills),
            locks: self.locks,
            processes: usize::from(self.processes),
            waiters: usize::try_from(self.waiters).unwrap_or(usize::MAX),
            dlock: self.dlock.clone(),
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()?)
}
