//! `exec --shared` and `exec --permits`: commands that hold one lock at once.

use crate::bed::{DLOCK, Desk, Running, dlock, is_free, name, ran, start};
use std::fs;

/// A command under the lock, which runs until the file `go` is there: when it has begun.
fn holding(desk: &Desk, number: u32, options: &[&str], lock: &str) -> Running {
    let told = format!("told{number}");
    let text = format!(
        "echo $$ >'{}'; while [ ! -e '{}' ]; do sleep 0.01; done",
        desk.text(&told),
        desk.text("go")
    );
    let running = start(dlock(&[&["exec"], options, &[lock, "-c", &text]].concat()));
    desk.line(&told);
    running
}

#[test]
fn readers_run_together_and_a_writer_alone() {
    let (lock, desk) = (name("shared"), Desk::new());
    let readers = [1, 2].map(|number| holding(&desk, number, &["--shared"], &lock));
    ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
    ran(&["exec", "-n", "-s", &lock, "--", "true"]).expect(0);
    let seen = ran(&["inspect", &lock]).expect(0);
    assert!(seen.stdout.contains("shared by 2"), "{seen:?}");
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    assert_eq!(
        (&seen["mode"], &seen["holds"]),
        (&"shared".into(), &2.into())
    );
    fs::write(desk.path("go"), "").unwrap();
    for reader in readers {
        reader.wait().expect(0);
    }
    is_free(&lock);
    let desk = Desk::new();
    let writer = holding(&desk, 1, &[], &lock);
    ran(&["exec", "-n", "-s", &lock, "--", "true"]).expect(1);
    fs::write(desk.path("go"), "").unwrap();
    writer.wait().expect(0);
}

#[test]
fn as_many_run_as_there_are_permits() {
    let (lock, desk) = (name("permits"), Desk::new());
    let holders = [1, 2].map(|number| holding(&desk, number, &["--permits", "2"], &lock));
    ran(&["exec", "-n", "--permits", "2", &lock, "--", "true"]).expect(1);
    let seen = ran(&["inspect", &lock]).expect(0);
    assert!(seen.stdout.contains("2 of 2 permits held"), "{seen:?}");
    let seen = ran(&["--json", "list"]).expect(0);
    assert!(seen.stdout.contains("\"permits\":2"), "{seen:?}");
    // Who names another number is told, and does not wait.
    let other = ran(&["exec", "--permits", "3", &lock, "--", "true"]).expect(64);
    assert!(other.stderr.contains("2 permits"), "{other:?}");
    for wrong in ["0", "1025"] {
        ran(&["exec", "--permits", wrong, &lock, "--", "true"]).expect(64);
    }
    ran(&["exec", "--permits", "2", "--shared", &lock, "--", "true"]).expect(64);
    fs::write(desk.path("go"), "").unwrap();
    for holder in holders {
        holder.wait().expect(0);
    }
}

#[test]
fn a_reader_inside_a_writer_enters_and_a_reader_has_no_pass() {
    let lock = name("inside");
    let exec = |options: &str| format!("'{DLOCK}' exec {options} '{lock}' -- true");
    ran(&["exec", "--pass-url", &lock, "-c", &exec("-s")]).expect(0);
    // Another reader, not the same one; and a writer that is refused as any other.
    ran(&["exec", "--pass-url", "-s", &lock, "-c", &exec("-n -s")]).expect(0);
    ran(&["exec", "--pass-url", "-s", &lock, "-c", &exec("-n")]).expect(1);
    for option in ["--also=other", "--min-hold=1"] {
        for mode in ["--shared", "--permits=2"] {
            ran(&["exec", mode, option, &lock, "--", "true"]).expect(64);
        }
    }
}
