//! Storms and soaks of a few seconds: the command runs, attacks and judges. Its verdict does not depend on
//! the speed of this machine.

use std::process::Command;

/// What the command says; it has found nothing.
fn no_finding(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-conformance"))
        .args(args)
        .args(["--seed", "1"])
        .output()
        .expect("the command is built");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && told.ends_with("no finding\n"),
        "{told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    told
}

fn storm(store: &str) {
    let told = no_finding(&["storm", "--store", store, "--for", "6s"]);
    assert!(told.contains("workers killed"), "{told}");
}

fn soak(pattern: &str, store: &str, span: &str) -> String {
    no_finding(&[
        "soak",
        pattern,
        "--store",
        store,
        "--for",
        span,
        "--untimed",
    ])
}

#[test]
fn a_short_storm_over_redis_finds_nothing() {
    storm("redis");
}

#[test]
fn a_short_storm_over_sqlite_finds_nothing() {
    storm("sqlite");
}

#[test]
fn a_short_storm_over_postgres_finds_nothing() {
    storm("postgres");
}

#[test]
fn a_short_storm_over_etcd_finds_nothing() {
    storm("etcd");
}

#[test]
fn readers_and_a_writer_over_redis_keep_apart() {
    let told = soak("readers", "redis", "3s");
    assert!(told.contains("the writer's longest wait"), "{told}");
}

#[test]
fn permits_over_redis_come_back_when_half_of_a_hundred_processes_are_killed() {
    let told = soak("permits", "redis", "4s");
    assert!(told.contains("100 processes, 50 killed"), "{told}");
}

#[test]
fn leaders_over_postgres_that_are_killed_or_stopped_are_followed_by_one() {
    let told = soak("election", "postgres", "6s");
    assert!(told.contains("until another leads"), "{told}");
}

#[test]
fn sets_over_sqlite_never_deadlock() {
    let told = soak("sets", "sqlite", "6s");
    assert!(told.contains("1 killed"), "{told}");
}
