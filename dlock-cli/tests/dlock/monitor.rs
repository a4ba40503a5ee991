//! `dlock monitor`: what is freed, and what is not.

use crate::bed::{DLOCK, Desk, Running, dlock, is_held, name, ran, start, until, until_held};
use nix::sys::signal::Signal;
use std::{fs, os::unix::fs::PermissionsExt};

/// A monitor of locks that begin so, which needs two looks.
fn monitor(witness: &str, prefix: &str) -> Running {
    let every = ["monitor", "--every", "0.1", "--misses", "2", "--delay", "0"];
    start(dlock(
        &[&every[..], &["--witness", witness, prefix]].concat(),
    ))
}

/// A lock of this name with a lease of an hour, whose dlock runs on.
fn holding(lock: &str) -> Running {
    let holder = start(dlock(&[
        "exec", "--lease", "1h", lock, "--", "sleep", "600",
    ]));
    until_held(lock);
    holder
}

#[test]
fn a_lock_whose_process_has_ended_is_freed_and_one_whose_process_lives_is_not() {
    let prefix = name("same-host");
    let (dead, lives) = (format!("{prefix}/dead"), format!("{prefix}/lives"));
    let (victim, living) = (holding(&dead), holding(&lives));
    let by_hand = format!("{prefix}/by-hand");
    ran(&["acquire", "--lease", "1h", &by_hand]).expect(0);
    let monitor = monitor("same-host", &prefix);
    victim.signal(Signal::SIGKILL);
    victim.wait().expect(137);
    until("the dead one's lock to be free", || !is_held(&dead));
    let freed = || monitor.stderr().contains(&format!("freed {dead:?}"));
    until("the monitor to say so", freed);
    // It has looked at the others as often.
    assert!(is_held(&lives) && is_held(&by_hand));
    monitor.signal(Signal::SIGTERM);
    let said = monitor.wait().expect(143).stderr;
    assert_eq!(said.matches("freed").count(), 1, "{said}");
    living.signal(Signal::SIGTERM);
    living.wait().expect(143);
}

/// The holder that the store shows is the one that came first.
#[test]
fn a_lock_that_another_process_has_entered_is_not_freed() {
    let prefix = name("entered");
    let (entered, alone) = (format!("{prefix}/entered"), format!("{prefix}/alone"));
    let inner = format!("'{DLOCK}' exec -n '{entered}' -- sleep 600");
    let outer = [
        "exec",
        "--pass-url",
        "--lease",
        "1h",
        &entered,
        "-c",
        &inner,
    ];
    let outer = start(dlock(&outer));
    let two = || {
        ran(&["inspect", "--json", &entered])
            .stdout
            .contains("\"holds\":2")
    };
    until("both to be inside", two);
    ran(&["acquire", "--lease", "1h", &alone]).expect(0);
    let monitor = monitor("exit 1", &prefix);
    until("the other lock to be free", || !is_held(&alone));
    assert!(is_held(&entered));
    monitor.signal(Signal::SIGTERM);
    monitor.wait().expect(143);
    outer.signal(Signal::SIGTERM);
    outer.wait().expect(143);
}

#[test]
fn only_the_exit_code_1_of_a_witness_frees_a_lock() {
    let desk = Desk::new();
    for (witness, frees) in [
        ("exit 0", false),
        ("exit 2", false),
        ("no-such-command", false),
        ("exit 1", true),
    ] {
        let lock = name("witness");
        ran(&["acquire", "--lease", "1h", &lock]).expect(0);
        let asked = desk.text("asked");
        let words = "$DLOCK_NAME $DLOCK_PID $DLOCK_TOKEN $DLOCK_URL";
        let monitor = monitor(&format!("echo \"{words}\" >>'{asked}'; {witness}"), &lock);
        let looks = || fs::read_to_string(&asked).unwrap_or_default();
        if frees {
            until("the lock to be free", || !is_held(&lock));
        } else {
            until("the witness to be asked", || looks().lines().count() >= 4);
            assert!(is_held(&lock), "{witness}");
        }
        let line = format!("{lock} {} ", std::process::id());
        assert!(looks().starts_with(&line), "{}", looks());
        assert!(!looks().contains("redis:"), "the witness got the URL");
        fs::remove_file(&asked).unwrap();
        monitor.signal(Signal::SIGTERM);
        monitor.wait().expect(143);
    }
}

#[test]
fn a_holder_that_is_dead_only_now_and_then_is_not_freed() {
    let (lock, desk) = (name("now-and-then"), Desk::new());
    ran(&["acquire", "--lease", "1h", &lock]).expect(0);
    // Dead, alive, dead, alive.
    let turns = desk.text("turns");
    let witness = format!("echo x >>'{turns}'; exit $(($(wc -l <'{turns}') % 2))");
    let monitor = monitor(&witness, &lock);
    let looks = || {
        fs::read_to_string(&turns)
            .unwrap_or_default()
            .lines()
            .count()
    };
    until("it to be asked often", || looks() >= 8);
    assert!(is_held(&lock));
    monitor.signal(Signal::SIGTERM);
    monitor.wait().expect(143);
}

#[test]
fn a_pod_is_dead_when_it_has_succeeded_or_failed_and_not_when_it_is_not_found() {
    let desk = Desk::new();
    let kubectl = "#!/bin/sh\necho \"$*\" >>asked\nread phase <phase && echo \"$phase\"\n";
    fs::write(desk.path("kubectl"), kubectl).unwrap();
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(desk.path("kubectl"), executable).unwrap();
    for (phase, frees) in [
        ("Running\n", false),
        ("Unknown\n", false),
        ("", false),
        ("Failed\n", true),
        ("Succeeded\n", true),
    ] {
        let lock = name("pod");
        ran(&["acquire", "--lease", "1h", &lock]).expect(0);
        fs::write(desk.path("phase"), phase).unwrap();
        fs::write(desk.path("asked"), "").unwrap();
        let every = ["monitor", "--every", "0.1", "--misses", "2", "--delay", "0"];
        let mut command = dlock(&[&every[..], &["--witness", "kubernetes", &lock]].concat());
        let path = format!("{}:{}", desk.text(""), std::env::var("PATH").unwrap());
        command.env("PATH", path).current_dir(desk.path(""));
        let monitor = start(command);
        let looks = || {
            fs::read_to_string(desk.path("asked"))
                .unwrap()
                .lines()
                .count()
        };
        if frees {
            until("the lock to be free", || !is_held(&lock));
        } else {
            until("kubectl to be asked", || looks() >= 4);
            assert!(is_held(&lock), "{phase}");
        }
        monitor.signal(Signal::SIGTERM);
        monitor.wait().expect(143);
    }
}
