//! Loss of the lock while the command runs: the command ends before another owner can have the lock.

use crate::bed::{
    Desk, Net, Out, Running, at, dlock, is_alive, is_free, leader, looks, name, ran, run,
    shows_life, start, unread, until, was_alone,
};
use std::{
    io::Read,
    time::{Duration, Instant},
};

/// A command that writes its process id and then runs on, whatever TERM it gets.
fn stubborn(desk: &Desk) -> String {
    format!(
        "{}; trap '' TERM; echo $$ >'{}'; while :; do sleep 0.02; done",
        shows_life(desk),
        desk.text("pid")
    )
}

/// A command that writes its process id, and ends when it is told to.
fn obedient(desk: &Desk) -> String {
    format!(
        "echo $$ >'{}'; while [ ! -e '{}' ]; do sleep 0.01; done; echo done",
        desk.text("pid"),
        desk.text("go")
    )
}

/// `dlock exec` with these options, of a command that writes its process id: when it has.
fn holding(desk: &Desk, lock: &str, options: &[&str], text: &str) -> (Running, String) {
    let args = [&["exec"], options, &[lock, "-c", text]].concat();
    let running = start(dlock(&args));
    (running, desk.line("pid"))
}

/// Breaks the lock, and waits until its holder has ended for that.
#[track_caller]
fn broken(lock: &str, running: Running) -> Out {
    ran(&["break", "--force", lock]).expect(0);
    running.wait().expect(75)
}

/// A lease that a loaded machine can renew, and whose loss is seen in two seconds.
const LEASE: [&str; 2] = ["--lease", "6s"];

/// The next holder, whose command looks whether the one before still runs.
fn next(desk: &Desk, lock: &str) -> Running {
    start(dlock(&["exec", lock, "-c", &looks(desk)]))
}

#[test]
fn a_broken_lock_ends_the_command_with_term() {
    let (lock, desk) = (name("broken"), Desk::new());
    let text = format!(
        "trap 'echo told; exit 3' TERM; echo $$ >'{}'; while :; do sleep 0.02; done",
        desk.text("pid")
    );
    let (running, _) = holding(&desk, &lock, &LEASE, &text);
    let out = broken(&lock, running);
    assert_eq!(out.stdout, "told\n");
    assert!(out.stderr.contains("is lost"), "{out:?}");
    is_free(&lock);
}

#[test]
fn one_that_ignores_term_is_killed() {
    let (lock, desk) = (name("stubborn"), Desk::new());
    let (running, pid) = holding(&desk, &lock, &LEASE, &stubborn(&desk));
    broken(&lock, running);
    assert!(!is_alive(&pid));
}

#[test]
fn what_the_command_left_in_its_group_is_killed_with_it() {
    let (lock, desk) = (name("tree"), Desk::new());
    let text = format!(
        "(trap '' TERM; while :; do sleep 0.02; done) & echo $! >'{0}'; \
         trap 'exit 0' TERM; echo $$ >'{1}'; while :; do sleep 0.02; done",
        desk.text("grandchild"),
        desk.text("pid")
    );
    let (running, _) = holding(&desk, &lock, &LEASE, &text);
    let grandchild = desk.line("grandchild");
    broken(&lock, running);
    until("the grandchild to die", || !is_alive(&grandchild));
}

#[test]
fn what_a_command_that_died_of_term_left_in_its_group_is_killed_too() {
    let (lock, desk) = (name("early"), Desk::new());
    let text = format!(
        "(trap '' TERM; while :; do sleep 0.02; done) & echo $! >'{}'; echo $$ >'{}'; wait",
        desk.text("grandchild"),
        desk.text("pid")
    );
    let (running, _) = holding(&desk, &lock, &["--max-hold", "2s"], &text);
    let grandchild = desk.line("grandchild");
    running.wait().expect(75);
    until("the grandchild to die", || !is_alive(&grandchild));
}

#[test]
fn a_stopped_command_is_ended_too() {
    let (lock, desk) = (name("asleep"), Desk::new());
    let text = format!("echo $$ >'{}'; kill -STOP $$; echo on", desk.text("pid"));
    let args = ["exec", "--lease", "6s", &lock, "-c", &text];
    let running = start(leader(&[], &args));
    let pid = desk.line("pid");
    until("the command to stop", || {
        crate::bed::state(nix::unistd::Pid::from_raw(pid.parse().unwrap())) == 'T'
    });
    broken(&lock, running);
    assert!(!is_alive(&pid));
}

#[test]
fn when_the_store_is_cut_off_the_command_is_dead_before_the_next_holder_begins() {
    let (lock, desk, net) = (name("cut"), Desk::new(), Net::new());
    let mut command = at(
        &net.url(),
        &["exec", "--lease", "10s", &lock, "-c", &stubborn(&desk)],
    );
    command.env("LC_ALL", "C");
    let running = start(command);
    desk.line("pid");
    let next = next(&desk, &lock);
    net.break_off();
    let out = running.wait().expect(75);
    assert!(out.stderr.contains("could not be kept"), "{out:?}");
    was_alone(&next.wait().expect(0), &out.stderr);
}

#[test]
fn max_hold_ends_the_command_before_the_next_holder_begins_and_says_so() {
    let (lock, desk) = (name("max"), Desk::new());
    let (running, _) = holding(&desk, &lock, &["--max-hold", "2s"], &stubborn(&desk));
    let began = Instant::now();
    let next = next(&desk, &lock);
    let out = running.wait().expect(75);
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(
        out.stderr.contains("--max-hold of 2s") && !out.stderr.contains("could not be kept"),
        "{out:?}"
    );
    was_alone(&next.wait().expect(0), &out.stderr);
}

#[test]
fn a_standard_error_that_no_program_reads_does_not_delay_the_end_of_the_command() {
    let (lock, desk) = (name("unread"), Desk::new());
    // The command fills the pipe, so dlock cannot say that the lock is lost.
    let text = format!("{}; trap '' TERM; exec yes >&2", shows_life(&desk));
    let (running, mut unread) = unread(
        dlock(&["exec", "--max-hold", "5s", &lock, "-c", &text]),
        false,
    );
    let next = next(&desk, &lock).wait().expect(0);
    let mut said = Vec::new();
    unread.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("--max-hold of 5s"));
    was_alone(&next, &said);
    running.wait().expect(75);
}

#[test]
fn a_lock_that_is_lost_before_the_command_starts_starts_none() {
    let (lock, desk) = (name("too-late"), Desk::new());
    let (url, ran) = (format!("sqlite:{}", desk.text("db")), desk.text("ran"));
    let args = ["-v", "exec", "--lease", "6s", &lock, "--", "touch", &ran];
    // dlock waits to say that it has acquired the lock.
    let (running, mut unread) = unread(at(&url, &args), true);
    let is_held = || run(at(&url, &["--json", "inspect", &lock])).json()["held"] == true;
    until("the lock to be held", is_held);
    until("the lease to end", || !is_held());
    let mut said = Vec::new();
    unread.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("the command is not started"), "{said}");
    running.wait().expect(75);
    assert!(!desk.path("ran").exists());
}

#[test]
fn term_comes_the_kill_grace_before_the_end() {
    let (lock, desk) = (name("grace"), Desk::new());
    let text = format!(
        "trap 'date +%s%N >\"$0\"; exit 0' TERM; date +%s%N >'{}'; while :; do sleep 0.01; done",
        desk.text("began")
    );
    let args = [
        "exec",
        "--max-hold",
        "8s",
        "--kill-grace",
        "4s",
        &lock,
        "--",
        "sh",
        "-c",
        &text,
    ];
    let ended = desk.text("ended");
    let args: Vec<&str> = args.into_iter().chain([ended.as_str()]).collect();
    run(dlock(&args)).expect(75);
    let at = |file: &str| desk.line(file).parse::<u64>().unwrap() / 1_000_000;
    let ran_for = at("ended") - at("began");
    assert!((1_500..=7_900).contains(&ran_for), "{ran_for} ms");
}

#[test]
fn a_lock_that_is_found_lost_at_its_release_gives_75() {
    let lock = name("late");
    // A lease whose first renewal is far away: the release is the first to see it.
    let text = format!("'{}' break --force '{lock}'", crate::bed::DLOCK);
    let args = ["exec", "--pass-url", "--lease", "10m", &lock, "-c", &text];
    let out = ran(&args).expect(75);
    assert_eq!(out.stdout.lines().count(), 1, "{out:?}");
}

#[test]
fn on_lost_warn_lets_it_run_and_still_says_75() {
    let (lock, desk) = (name("warn"), Desk::new());
    let options = [&LEASE[..], &["--on-lost", "warn"]].concat();
    let (running, _) = holding(&desk, &lock, &options, &obedient(&desk));
    ran(&["break", "--force", &lock]).expect(0);
    until("the warning", || running.stderr().contains("runs on"));
    std::fs::write(desk.path("go"), "").unwrap();
    assert_eq!(running.wait().expect(75).stdout, "done\n");
}

#[test]
fn the_lock_is_kept_over_many_leases() {
    let (lock, desk) = (name("kept"), Desk::new());
    let (running, _) = holding(&desk, &lock, &LEASE, &obedient(&desk));
    ran(&["exec", "-w", "19", &lock, "--", "true"]).expect(1);
    std::fs::write(desk.path("go"), "").unwrap();
    running.wait().expect(0);
}

#[test]
fn neither_a_short_lease_of_the_url_nor_a_presence_ends_a_command_that_is_well() {
    // The usual lease allows a grace of 15 s, which would begin before the presence is renewed.
    for (parameter, options) in [
        ("lease=6s", &[][..]),
        ("presence=18s", &["--kill-grace", "15s"][..]),
    ] {
        let (lock, desk) = (name("url-lease"), Desk::new());
        let url = format!("{}?dlock.{parameter}", crate::bed::server().url());
        let text = obedient(&desk);
        let args = [&["exec"], options, &[&*lock, "-c", &*text]].concat();
        let running = start(at(&url, &args));
        desk.line("pid");
        ran(&["exec", "-w", "10", &lock, "--", "true"]).expect(1);
        std::fs::write(desk.path("go"), "").unwrap();
        running.wait().expect(0);
    }
}
