//! Storms and soaks of a few seconds: the command runs, attacks and judges. Its verdict does not depend on
//! the speed of this machine.

use libtest_mimic::{Arguments, Failed, Trial};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // A storm sleeps most of the time, so more of them run at once than there are processors.
    arguments.test_threads.get_or_insert(AT_ONCE);
    let storms = STORMS.map(|store| {
        let name = format!("a_short_storm_over_{store}_finds_nothing");
        Trial::test(name, move || storm(store))
    });
    let soaks = SOAKS.map(|(name, soak, says)| Trial::test(name, move || expect(soak, says)));
    let trials = soaks.into_iter().chain(storms).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Workers that read, write, hold permits and pass locks on, and are killed and stopped, with their server.
fn storm(store: &str) -> Result<(), Failed> {
    let storm = format!("storm --store {store} --for 6s");
    expect(&storm, "workers killed")
}

/// The command finds nothing, and says that.
fn expect(command: &str, says: &str) -> Result<(), Failed> {
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-conformance"))
        .args(command.split(' '))
        .args(["--seed", "1"])
        .output()?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() && told.ends_with("no finding\n") && told.contains(says) {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("expected {says:?} and no finding:\n{told}{errors}").into())
}

const AT_ONCE: usize = 6;

const STORMS: [&str; 7] = [
    "redis", "sqlite", "postgres", "etcd", "mysql", "mongo", "zk",
];

/// Name, command, and what it says.
const SOAKS: [(&str, &str, &str); 4] = [
    (
        "readers_and_a_writer_over_redis_keep_apart",
        "soak readers --store redis --for 3s --untimed",
        "the writer's longest wait",
    ),
    (
        "permits_over_redis_come_back_when_half_of_a_hundred_processes_are_killed",
        "soak permits --store redis --for 4s --untimed",
        "100 processes, 50 killed",
    ),
    (
        "leaders_over_postgres_that_are_killed_or_stopped_are_followed_by_one",
        "soak election --store postgres --for 6s --untimed",
        "until another leads",
    ),
    (
        "sets_over_sqlite_never_deadlock",
        "soak sets --store sqlite --for 6s --untimed",
        "1 killed",
    ),
];
