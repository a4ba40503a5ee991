//! `lead`: a command that runs whenever its dlock leads.

use crate::bed::{
    DLOCK, Desk, Net, Running, at, dlock, is_alive, is_free, is_held, looks, name, ran, run,
    shows_life, start, until, was_alone,
};
use nix::sys::signal::Signal;
use std::fs;

/// A command that appends its term and its process id to a file, and runs on.
fn leads(desk: &Desk) -> String {
    format!("echo $DLOCK_TOKEN $$ >>'{}'; {WAITS}", desk.text("terms"))
}

const WAITS: &str = "while :; do sleep 0.02; done";

/// A lease that a loaded machine can renew, and whose loss is seen in a second.
const LEASE: [&str; 2] = ["--lease", "3s"];

fn candidate(lock: &str, text: &str) -> Running {
    start(dlock(
        &[&["lead"], &LEASE[..], &[lock, "-c", text]].concat(),
    ))
}

/// The terms so far, once there are this many: token and process id.
#[track_caller]
fn terms(desk: &Desk, count: usize) -> Vec<(u64, String)> {
    let read = || fs::read_to_string(desk.path("terms")).unwrap_or_default();
    until(&format!("term {count}"), || {
        read().matches('\n').count() >= count
    });
    let text = read();
    let terms = text.lines().map(|line| line.split_once(' ').unwrap());
    terms
        .map(|(token, pid)| (token.parse().unwrap(), pid.to_owned()))
        .collect()
}

#[test]
fn a_term_that_is_lost_ends_the_command_which_is_started_again_in_the_next() {
    let (lock, desk) = (name("again"), Desk::new());
    let running = candidate(&lock, &leads(&desk));
    let first = terms(&desk, 1)[0].clone();
    ran(&["break", "--force", &lock]).expect(0);
    let next = terms(&desk, 2)[1].clone();
    assert!(next.0 > first.0, "{next:?} after {first:?}");
    assert!(!is_alive(&first.1));
    assert!(running.stderr().contains("is lost"), "{}", running.stderr());
    running.signal(Signal::SIGTERM);
    running.wait().expect(143);
    is_free(&lock);
}

#[test]
fn term_ends_the_command_resigns_and_lets_another_lead() {
    let (lock, desk) = (name("resigns"), Desk::new());
    let text = format!(
        "trap 'exit 7' TERM; echo $DLOCK_TOKEN $$ >>'{}'; {WAITS}",
        desk.text("terms")
    );
    let leader = candidate(&lock, &text);
    terms(&desk, 1);
    let other = candidate(&lock, &text);
    other.listens();
    leader.signal(Signal::SIGTERM);
    leader.wait().expect(7);
    let all = terms(&desk, 2);
    assert!(all[1].0 > all[0].0, "{all:?}");
    other.signal(Signal::SIGKILL);
}

#[test]
fn a_signal_while_another_leads_withdraws_the_candidate() {
    let (lock, desk) = (name("withdraws"), Desk::new());
    let leader = candidate(&lock, &leads(&desk));
    terms(&desk, 1);
    let other = candidate(&lock, &leads(&desk));
    other.listens();
    other.signal(Signal::SIGTERM);
    other.wait().expect(143);
    assert!(is_held(&lock));
    leader.signal(Signal::SIGINT);
    leader.wait().expect(130);
    is_free(&lock);
    assert_eq!(terms(&desk, 1).len(), 1);
}

#[test]
fn a_command_that_ends_by_itself_resigns_and_is_started_again_later() {
    let (lock, desk) = (name("ends"), Desk::new());
    let text = format!("echo $DLOCK_TOKEN $$ >>'{}'; exit 3", desk.text("terms"));
    let running = candidate(&lock, &text);
    let all = terms(&desk, 3);
    assert!(all[0].0 < all[1].0 && all[1].0 < all[2].0, "{all:?}");
    let said = running.stderr();
    assert!(said.contains("ended by itself, with 3"), "{said}");
    // It waits, or it is about to start the command once more.
    running.signal(Signal::SIGTERM);
    let code = running.wait().code();
    assert!([3, 143].contains(&code), "{code}");
    is_free(&lock);
}

#[test]
fn what_a_key_or_the_end_of_the_terminal_sends_to_the_command_alone_ends_dlock_too() {
    for (signal, code) in [("INT", 130), ("QUIT", 131), ("HUP", 129)] {
        let lock = name("key");
        let text = format!("kill -{signal} $$; {WAITS}");
        candidate(&lock, &text).wait().expect(code);
        is_free(&lock);
    }
}

#[test]
fn a_command_that_cannot_be_executed_ends_dlock() {
    let lock = name("missing");
    ran(&["lead", &lock, "--", "/nonexistent"]).expect(127);
    ran(&["lead", &lock, "--", "/"]).expect(126);
    is_free(&lock);
}

#[test]
fn when_the_store_is_cut_off_the_command_is_dead_before_the_next_leader_begins() {
    let (lock, desk, net) = (name("cut"), Desk::new(), Net::new());
    let stubborn = format!("{}; trap '' TERM; {}", shows_life(&desk), leads(&desk));
    let args = ["lead", "--lease", "10s", &lock, "-c", &stubborn];
    let first = start(at(&net.url(), &args));
    terms(&desk, 1);
    let next = candidate(&lock, &format!("{}; kill -INT $$", looks(&desk)));
    next.listens();
    net.break_off();
    let next = next.wait().expect(130);
    until("the loss to be told", || {
        first.stderr().contains("; the command")
    });
    was_alone(&next, &first.stderr());
    // It goes on to campaign, until it is told to end.
    first.signal(Signal::SIGTERM);
    first.wait().expect(143);
}

#[test]
fn the_command_enters_the_lock_of_its_term_and_cannot_be_a_candidate_itself() {
    let lock = name("inside");
    let text = format!(
        "'{DLOCK}' exec -n '{lock}' -- echo inside; '{DLOCK}' lead '{lock}' -- true; echo $?; kill -INT $$"
    );
    let args = ["lead", "--pass-url", &lock, "-c", &text];
    let out = run(dlock(&args)).expect(130);
    assert_eq!(out.stdout, "inside\n64\n");
    assert!(out.stderr.contains("choose another name"), "{out:?}");
}
