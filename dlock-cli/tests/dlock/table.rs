//! Every row of the table of exit codes.

use crate::bed::{Desk, Net, at, dlock, name, ran, run, start, until_held};
use nix::sys::signal::Signal;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

#[test]
fn the_code_of_the_command_is_passed_through() {
    let lock = name("code");
    for code in [0, 1, 7, 64, 75, 126, 255] {
        let text = format!("exit {code}");
        ran(&["exec", &lock, "-c", &text]).expect(code);
    }
}

#[test]
fn a_signal_that_ends_the_command_gives_128_and_its_number() {
    let lock = name("signal");
    for (signal, code) in [("TERM", 143), ("KILL", 137), ("HUP", 129), ("ABRT", 134)] {
        ran(&["exec", &lock, "-c", &format!("kill -{signal} $$")]).expect(code);
    }
}

#[test]
fn a_held_lock_gives_1_or_what_e_says() {
    let lock = name("held");
    ran(&["acquire", &lock]).expect(0);
    ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
    ran(&["exec", "-n", "-E", "42", &lock, "--", "true"]).expect(42);
    ran(&["exec", "-w", "2", "-E", "0", &lock, "--", "false"]).expect(0);
    ran(&["exec", "-w", "0", "-E", "255", &lock, "--", "true"]).expect(255);
    ran(&["acquire", "-n", &lock]).expect(1);
    ran(&["acquire", "-w", "2", &lock]).expect(1);
}

#[test]
fn wrong_use_gives_64() {
    let lock = name("usage");
    let long = "x".repeat(513);
    for wrong in [
        vec!["exec", &lock],
        vec!["exec", "-n", "-w", "1", &lock, "--", "true"],
        vec!["exec", "-E", "256", &lock, "--", "true"],
        vec!["exec", "-w", "-1", &lock, "--", "true"],
        vec!["exec", "--lease", "1ms", &lock, "--", "true"],
        vec!["exec", "--kill-grace", "20s", &lock, "--", "true"],
        vec![
            "exec",
            "--min-hold",
            "9s",
            "--max-hold",
            "8s",
            &lock,
            "--",
            "true",
        ],
        vec!["exec", &long, "--", "true"],
        vec!["acquire", "-E", "3", &lock],
        vec!["release", &lock, "me"],
        vec!["renew", &lock, "7d444840-9dc0-11d1-b245-5ffdce74fad2"],
        vec!["break", &lock],
        vec!["--url", "gopher://h/", "inspect", &lock],
        vec!["frobnicate"],
    ] {
        ran(&wrong).expect(64);
    }
}

#[test]
fn a_store_out_of_reach_gives_69() {
    let url = "redis://127.0.0.1:1/";
    for args in [
        &["exec", "x", "--", "true"][..],
        &["acquire", "x"],
        &["inspect", "x"],
        &["list"],
    ] {
        run(at(url, args)).expect(69);
    }
}

#[test]
fn a_limit_of_the_machine_gives_69_and_says_which() {
    let lock = name("limit");
    for (limit, words) in [("-n 5", "ulimit -n"), ("-f 0", "ulimit -f")] {
        let desk = Desk::new();
        let text = format!(
            "ulimit {limit}; exec '{}' -q exec -n '{lock}' -- true",
            crate::bed::DLOCK
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &text]);
        shell.env("DLOCK_URL", format!("sqlite:{}", desk.text("locks.db")));
        // Not through files, which have the same limit.
        let out = shell.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(69), "{limit}: {said}");
        assert!(said.contains(words), "{limit}: {said}");
    }
}

#[test]
fn a_name_that_speaks_of_bugs_is_a_name() {
    let lock = format!("BUG: {}", name("fix"));
    ran(&["acquire", &lock]).expect(0);
    ran(&["acquire", "-w", "2", &lock]).expect(1);
    ran(&["release", &lock, "7d444840-9dc0-11d1-b245-5ffdce74fad2"]).expect(77);
}

#[test]
fn a_result_that_cannot_be_written_gives_74() {
    let mut command = dlock(&["list"]);
    let lock = name("full");
    ran(&["acquire", &lock]).expect(0);
    command.stdout(fs::File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(command.output().unwrap().status.code(), Some(74));
}

#[test]
fn what_is_not_yours_gives_77() {
    let lock = name("yours");
    let stranger = "7d444840-9dc0-11d1-b245-5ffdce74fad2";
    let hold = format!("{stranger}/00000000000000ff");
    ran(&["acquire", &lock]).expect(0);
    ran(&["release", &lock, stranger]).expect(77);
    ran(&["release", &lock, &hold]).expect(77);
    ran(&["renew", &lock, &hold]).expect(77);
    ran(&["break", &lock, "--token", "1"]).expect(77);
    ran(&["break", &name("unheld"), "--token", "1"]).expect(77);
}

#[test]
fn a_command_that_is_not_there_or_not_executable_gives_127_or_126_and_the_lock_back() {
    let (lock, desk) = (name("start"), Desk::new());
    fs::write(desk.path("plain"), "#!/bin/sh\n").unwrap();
    fs::write(desk.path("orphan"), "#!/no/such/interpreter\n").unwrap();
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(desk.path("orphan"), executable).unwrap();
    for (command, code) in [
        ("no-such-command-of-dlock", 127),
        (&desk.text("missing"), 127),
        (&desk.text("orphan"), 127),
        (&desk.text("plain"), 126),
        ("/", 126),
    ] {
        let out = ran(&["exec", "-n", &lock, "--", command]).expect(code);
        assert!(out.stderr.contains(command), "{out:?}");
    }
}

#[test]
fn a_signal_while_waiting_gives_128_and_its_number() {
    let lock = name("wait");
    ran(&["acquire", &lock]).expect(0);
    for (command, signal) in [
        (["exec", &lock, "-c", "true"].as_slice(), Signal::SIGINT),
        (&["exec", &lock, "-c", "true"], Signal::SIGTERM),
        (&["acquire", &lock], Signal::SIGHUP),
        (&["acquire", "-w", "60", &lock], Signal::SIGQUIT),
    ] {
        let waiting = start(dlock(command));
        waiting.listens();
        waiting.signal(signal);
        waiting.wait().expect(128 + signal as i32);
    }
}

#[test]
fn a_lost_lock_gives_75() {
    let lock = name("lost");
    let running = start(dlock(&[
        "exec", "--lease", "3s", &lock, "--", "sleep", "60",
    ]));
    until_held(&lock);
    ran(&["break", "--force", &lock]).expect(0);
    let out = running.wait().expect(75);
    assert!(out.stderr.contains("is lost"), "{out:?}");
}

#[test]
fn an_unconfirmed_change_gives_73() {
    let (lock, net) = (name("unknown"), Net::new());
    let hold = ran(&["acquire", &lock]).expect(0).stdout;
    let hold = hold.trim();
    let _strike = net.lose_reply_to(&lock);
    let out = run(at(&net.url(), &["release", &lock, hold])).expect(73);
    assert!(!out.stderr.is_empty(), "{out:?}");
}
