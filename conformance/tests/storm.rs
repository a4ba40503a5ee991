//! A storm of a few seconds: the command runs, attacks and judges. Its verdict does not depend on the
//! speed of this machine.

use std::process::Command;

fn storm(store: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-conformance"))
        .args(["storm", "--store", store, "--for", "6s", "--seed", "1"])
        .output()
        .expect("the command is built");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        told.contains("workers killed") && told.ends_with("no finding\n"),
        "{told}"
    );
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
