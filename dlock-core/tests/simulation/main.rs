//! Simulation: the core over the model store in simulated time, with faults. It runs thousands of small
//! random worlds, each watched by an independent judge.
//!
//! A seed decides everything: clients, names, the actions of their tasks, and the faults and their times.
//! The same seed gives the same world. The failure prints a command that replays its seed, with a trace of
//! all events.
//!
//! - `DLOCK_SIM_SEEDS=100000`: that many seeds instead of the usual number.
//! - `DLOCK_SIM_SEED=1234`: this one alone, traced.
//! - `DLOCK_SIM_FIRST=5000`: where to begin.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actor;
mod chaos;
mod end;
mod judge;
mod log;
mod plan;
mod rig;
mod runner;
mod stay;
mod wire;
mod world;

use plan::Plan;

/// The number of seeds that the test command runs.
const SEEDS: u64 = 2_000;

#[test]
fn no_seed_breaks_the_contract() {
    if let Some(seed) = runner::number("DLOCK_SIM_SEED") {
        return runner::replay(Plan::drawn(seed));
    }
    let seeds = runner::number("DLOCK_SIM_SEEDS").unwrap_or(SEEDS);
    let first = runner::number("DLOCK_SIM_FIRST").unwrap_or(0);
    runner::run_all(first..first + seeds);
}

#[test]
fn the_same_seed_gives_the_same_log() {
    for seed in 0..100 {
        let first = world::run(Plan::drawn(seed), false);
        let second = world::run(Plan::drawn(seed), false);
        assert_eq!(first.hash, second.hash, "seed {seed}");
        assert_eq!(first.calls, second.calls, "seed {seed}");
    }
}
