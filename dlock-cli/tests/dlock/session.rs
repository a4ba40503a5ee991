//! A store whose locks end with the session of their client: ZooKeeper.

use crate::bed::{DLOCK, Desk, at, run, start, until};
use dlock_conformance::testbed::{ZooKeeperServer, zookeeper::ZooKeeperOptions};
use nix::sys::signal::Signal;
use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

/// The server that all tests share.
pub(crate) fn url() -> String {
    static SERVER: OnceLock<ZooKeeperServer> = OnceLock::new();
    let server = SERVER.get_or_init(|| ZooKeeperServer::start(long_sessions()).unwrap());
    server.url()
}

/// Sessions may last as long as the leases that `doctor` is asked about.
pub(crate) fn long_sessions() -> ZooKeeperOptions {
    ZooKeeperOptions {
        extra_lines: vec!["maxSessionTimeout=600000".to_owned()],
        ..ZooKeeperOptions::default()
    }
}

#[test]
fn min_hold_keeps_dlock_there_and_the_name_is_open_when_it_ends() {
    let began = Instant::now();
    let held = ["-v", "exec", "--min-hold", "2s", "min-hold", "--", "true"];
    let out = run(at(&url(), &held)).expect(0);
    assert!(began.elapsed() >= Duration::from_secs(2), "{out:?}");
    assert!(out.stderr.contains("unavailable until"), "{out:?}");
    // The session would have lasted 30 s.
    run(at(&url(), &["exec", "-w", "10", "min-hold", "--", "true"])).expect(0);
}

#[test]
fn a_signal_while_the_name_is_kept_shut_ends_dlock_which_says_until_when() {
    let desk = Desk::new();
    let text = format!("echo in >'{}'", desk.text("in"));
    let held = ["-v", "exec", "--min-hold", "60s", "signalled", "-c", &text];
    let running = start(at(&url(), &held));
    desk.line("in");
    until("the lock to be unavailable", || {
        running.stderr().contains("unavailable until")
    });
    running.signal(Signal::SIGTERM);
    let out = running.wait().expect(0);
    assert!(out.stderr.contains("until our session is over"), "{out:?}");
}

#[test]
fn the_lease_is_that_of_the_session() {
    let desk = Desk::new();
    let text = format!("echo in >'{}'; exec sleep 600", desk.text("in"));
    let held = ["exec", "--lease", "5s", "lease", "-c", &text];
    let holder = start(at(&url(), &held));
    desk.line("in");
    holder.signal(Signal::SIGKILL);
    holder.wait().expect(137);
    run(at(&url(), &["exec", "-w", "20", "lease", "--", "true"])).expect(0);
}

#[test]
fn a_lease_that_is_shorter_than_the_session_is_refused_as_it_was_typed() {
    let url = format!("{}?dlock.session=10s", url());
    let by_url = format!("{url}&dlock.lease=5s");
    for (url, lease, typed) in [
        (&url, &["--lease", "5s"][..], "--lease"),
        (&by_url, &[], "dlock.lease"),
    ] {
        let args = [&["exec"][..], lease, &["short", "--", "true"]].concat();
        let out = run(at(url, &args)).expect(64);
        let words = format!("{typed} (5s) must be at least the session (10s)");
        assert!(out.stderr.contains(&words), "{out:?}");
    }
}

#[test]
fn a_hold_that_would_not_outlive_us_is_refused() {
    let out = run(at(&url(), &["acquire", "refused"])).expect(64);
    assert!(out.stderr.contains("use dlock exec"), "{out:?}");
}

#[test]
fn the_same_name_inside_enters_again_by_a_session_of_its_own() {
    let inner = format!("'{DLOCK}' exec -n nested -- echo inside");
    let out = run(at(&url(), &["exec", "--pass-url", "nested", "-c", &inner])).expect(0);
    assert_eq!(out.stdout, "inside\n");
    run(at(&url(), &["exec", "-w", "10", "nested", "--", "true"])).expect(0);
}
