//! The command as a child: signals, groups, ends.

use crate::bed::{
    DLOCK, Desk, Net, Running, at, beside, dlock, is_alive, is_free, leader, name, program, ran,
    run, server, start, state, until,
};
use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
use nix::sys::signal::Signal;
use std::{
    fs,
    net::TcpListener,
    time::{Duration, Instant},
};

/// A command that says when it is there and then waits, in steps so short that a trap runs soon.
const WAITS: &str = "echo ready; while :; do sleep 0.02; done";

fn waiting(lock: &str, options: &[&str], before: &str) -> Running {
    let text = format!("{before} {WAITS}");
    let mut args = vec!["exec"];
    args.extend(options);
    args.extend([lock, "-c", &text]);
    let running = start(dlock(&args));
    running.says("ready");
    running
}

#[test]
fn signals_are_forwarded_to_the_command() {
    let traps: String = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH"]
        .map(|signal| format!("trap 'echo got {signal}.' {signal};"))
        .concat();
    let running = waiting(&name("forward"), &[], &traps);
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGWINCH,
    ] {
        running.signal(signal);
        running.says(&format!("got {}.", &signal.as_str()[3..]));
    }
    running.signal(Signal::SIGKILL);
}

#[test]
fn a_forwarded_signal_ends_the_command_and_its_code_is_128_and_the_number() {
    for options in [&[][..], &["--foreground"]] {
        let lock = name("end");
        let running = waiting(&lock, options, "");
        running.signal(Signal::SIGTERM);
        running.wait().expect(143);
        is_free(&lock);
    }
}

#[test]
fn a_signal_reaches_the_whole_group_of_the_command() {
    let (lock, desk) = (name("group"), Desk::new());
    let before = format!("sleep 600 & echo $! >'{}';", desk.text("grandchild"));
    let running = waiting(&lock, &[], &before);
    let grandchild = desk.line("grandchild");
    assert!(is_alive(&grandchild));
    running.signal(Signal::SIGTERM);
    running.wait().expect(143);
    until("the grandchild to end", || !is_alive(&grandchild));
}

#[test]
fn the_command_has_a_group_of_its_own_unless_it_is_in_the_foreground() {
    let text = "cut -d' ' -f5 /proc/$$/stat; echo $$; cut -d' ' -f5 /proc/$PPID/stat";
    let lines = |options: &[&str]| -> Vec<String> {
        let lock = name("pgrp");
        let mut args = vec!["exec"];
        args.extend(options);
        args.extend([lock.as_str(), "-c", text]);
        ran(&args)
            .expect(0)
            .stdout
            .lines()
            .map(str::to_owned)
            .collect()
    };
    let own = lines(&[]);
    assert!(own[0] == own[1] && own[0] != own[2], "{own:?}");
    let ours = lines(&["--foreground"]);
    assert!(ours[0] != ours[1] && ours[0] == ours[2], "{ours:?}");
}

#[test]
fn when_dlock_is_killed_the_command_dies_too() {
    for options in [&[][..], &["--foreground"]] {
        let (lock, desk) = (name("killed"), Desk::new());
        let before = format!("echo $$ >'{}'; trap '' TERM HUP INT;", desk.text("pid"));
        let running = waiting(&lock, options, &before);
        let pid = desk.line("pid");
        running.signal(Signal::SIGKILL);
        running.wait().expect(137);
        until("the command to die", || !is_alive(&pid));
    }
}

#[test]
fn the_command_starts_with_default_signals_and_none_blocked() {
    let out = ran(&[
        "exec",
        &name("mask"),
        "--",
        "grep",
        "^Sig[BI]",
        "/proc/self/status",
    ])
    .expect(0);
    assert_eq!(masks(&out.stdout), [("SigBlk", 0), ("SigIgn", inherited())]);
}

/// The signals that these tests were started to ignore, and that their children ignore too. Not those that
/// `program` resets, nor SIGPIPE, which Rust ignores here and not there.
fn inherited() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = masks(&status).into_iter().find(|(key, _)| *key == "SigIgn");
    ignored.unwrap().1 & !(1 << 12 | 0b111)
}

/// The masks of `/proc/PID/status`, without the two that the C library keeps to itself.
fn masks(status: &str) -> Vec<(&str, u64)> {
    let lines = status.lines().filter_map(|line| line.split_once(":\t"));
    lines
        .filter(|(key, _)| ["SigBlk", "SigIgn"].contains(key))
        .map(|(key, mask)| (key, u64::from_str_radix(mask, 16).unwrap() & 0x7fff_ffff))
        .collect()
}

#[test]
fn a_parent_that_blocks_the_signal_of_children_does_not_hide_the_end_of_the_command() {
    let lock = name("blocked");
    let command = dlock(&["exec", &lock, "--", "sh", "-c", "sleep 0.1; exit 3"]);
    let mut blocking = beside(&command, "env");
    blocking.args(["--block-signal=CHLD", DLOCK]);
    blocking.args(command.get_args().skip(2)); // of `env`
    start(blocking).wait().expect(3);
}

#[test]
fn what_dlock_was_started_to_ignore_stays_ignored() {
    let (lock, d) = (name("nohup"), DLOCK);
    ran(&["acquire", &lock]).expect(0);
    let mut shell = program("sh");
    shell.args([
        "-c",
        &format!("trap '' HUP; exec '{d}' -v exec '{lock}' -- grep SigIgn /proc/self/status"),
    ]);
    shell.env("DLOCK_URL", server().url());
    let running = start(shell);
    running.listens();
    running.signal(Signal::SIGHUP);
    ran(&["break", "--force", &lock]).expect(0);
    let out = running.wait().expect(0);
    assert_eq!(masks(&out.stdout), [("SigIgn", 1 | inherited())]);
}

#[test]
fn a_command_that_stops_itself_stays_stopped_and_keeps_the_lock() {
    let (lock, desk) = (name("stopped"), Desk::new());
    let text = format!("echo $$ >'{}'; kill -STOP $$; echo on", desk.text("pid"));
    let args = ["exec", "--lease", "6s", &lock, "-c", &text];
    let running = start(leader(&[], &args));
    let pid: i32 = desk.line("pid").parse().unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    until("the command to stop", || state(pid) == 'T');
    // Longer than the lease, which is being renewed.
    ran(&["exec", "-w", "10", &lock, "--", "true"]).expect(1);
    nix::sys::signal::kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(running.wait().expect(0).stdout, "on\n");
}

#[test]
fn ctrl_c_while_connecting_ends_at_once() {
    for args in [&["exec", "x", "--", "true"][..], &["acquire", "x"]] {
        // The server accepts and never answers.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", silent.local_addr().unwrap());
        let running = start(at(&url, args));
        let _open = silent.accept().unwrap();
        // Another process may have connected, in search of a server at this port.
        running.listens();
        running.signal(Signal::SIGINT);
        running.wait().expect(130);
    }
}

#[test]
fn ctrl_c_while_waiting_leaves_nothing_behind() {
    let lock = name("withdrawn");
    let hold = ran(&["acquire", &lock]).expect(0).stdout;
    let waiters: Vec<_> = (0..3)
        .map(|at| match at {
            0 => start(dlock(&["acquire", &lock])),
            _ => start(dlock(&["-v", "exec", &lock, "--", "true"])),
        })
        .collect();
    for waiter in waiters {
        waiter.listens();
        waiter.signal(Signal::SIGINT);
        waiter.wait().expect(130);
    }
    ran(&["release", &lock, hold.trim()]).expect(0);
    is_free(&lock);
}

#[test]
fn ctrl_c_while_the_store_hangs_ends_within_seconds_and_says_until_when() {
    let (lock, net) = (name("hangs"), Net::new());
    let armed = net.lose_reply_to(&lock);
    let waiter = start(at(
        &net.url(),
        &["exec", "--lease", "20s", &lock, "--", "true"],
    ));
    // From then on a request is under way, and the lock may be this waiter's.
    until("its request to be executed", || armed.has_struck());
    net.break_off();
    let began = Instant::now();
    waiter.signal(Signal::SIGTERM);
    let out = waiter.wait().expect(143);
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    assert!(out.stderr.contains("at the latest"), "{out:?}");
    run(at(&net.url(), &["exec", "-w", "0.1", &lock, "--", "true"])).expect(69);
}

#[test]
fn a_release_that_is_not_confirmed_says_until_when_and_keeps_the_code() {
    let server = RedisServer::start(RedisOptions::default()).unwrap();
    let desk = Desk::new();
    let text = format!(
        "echo $$ >'{0}'; while [ ! -e '{1}' ]; do sleep 0.01; done; exit 5",
        desk.text("pid"),
        desk.text("go")
    );
    let running = start(at(
        &server.url(),
        &["exec", "--lease", "9s", "x", "-c", &text],
    ));
    desk.line("pid");
    server.process().unwrap().stop().unwrap();
    fs::write(desk.path("go"), "").unwrap();
    let out = running.wait().expect(5);
    assert!(out.stderr.contains("at the latest"), "{out:?}");
    server.process().unwrap().cont().unwrap();
}

#[test]
fn job_control_signals_from_outside_stop_and_continue_both() {
    let lock = name("tstp");
    let desk = Desk::new();
    // No loop round `sleep`: a shell that is stopped while it forks may not stop.
    let text = format!("echo $$ >'{}'; exec sleep 600", desk.text("pid"));
    let running = start(dlock(&["exec", &lock, "-c", &text]));
    let pid = nix::unistd::Pid::from_raw(desk.line("pid").parse().unwrap());
    running.signal(Signal::SIGTSTP);
    until("the command to stop", || state(pid) == 'T');
    running.signal(Signal::SIGCONT);
    until("the command to go on", || state(pid) != 'T');
    running.signal(Signal::SIGTERM);
    running.wait().expect(143);
    is_free(&lock);
}
