//! Short soaks of holders with a presence of 3 s and leases of 60 s. No verdict depends on the speed of this machine:
//! a take-over may take half of the lease, which is far longer than a presence.

#![cfg(feature = "storm")]

use std::{process::Command, thread};

/// Stores behind a network; SQLite is a file.
const SERVERS: [&str; 5] = ["redis", "postgres", "etcd", "mysql", "mongo"];

#[test]
fn killed_holders_over_each_store_are_followed_when_their_presence_is_over() {
    thread::scope(|scope| {
        for store in SERVERS.into_iter().chain(["sqlite"]) {
            scope.spawn(move || soak(store, "killed,killed,killed", "{Killed: 3}"));
        }
    });
}

#[test]
fn holders_that_are_stopped_cut_off_or_lossy_know_before_another_holds_the_lock() {
    let says = "{Stopped: 1, CutOff: 1, Lossy: 1}";
    thread::scope(|scope| {
        for store in SERVERS {
            scope.spawn(move || soak(store, "stopped,cut-off,lossy", says));
        }
        scope.spawn(|| soak("sqlite", "stopped", "{Stopped: 1}"));
    });
}

/// The soak does these harms to its holders and finds nothing.
fn soak(store: &str, harms: &str, says: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-conformance"))
        .args(["soak", "presence", "--untimed", "--seed", "1"])
        .args(["--store", store, "--harms", harms])
        .output()
        .expect("the command starts");
    let told = String::from_utf8_lossy(&output.stdout);
    let is_good = output.status.success() && told.ends_with("no finding\n") && told.contains(says);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(is_good, "{store}, {says} and no finding:\n{told}{errors}");
}
