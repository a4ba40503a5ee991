//! Without a URL: a file in the user's state directory.

use crate::bed::{DLOCK, Desk, Out, Running, program, run, start, until};
use std::{env, fs, os::unix::fs::PermissionsExt, process::Command};

/// `dlock` with this state directory and nothing else to go by.
fn home(desk: &Desk, args: &[&str]) -> Command {
    let mut command = program(DLOCK);
    for (key, _) in env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("DLOCK_")) {
        command.env_remove(key);
    }
    command.args(args).env("XDG_STATE_HOME", desk.path("state"));
    command
}

fn ran(desk: &Desk, args: &[&str]) -> Out {
    run(home(desk, args))
}

#[test]
fn the_default_store_is_a_file_that_only_its_user_can_read() {
    let desk = Desk::new();
    let out = ran(
        &desk,
        &["exec", "nightly", "-c", "echo $DLOCK_BACKEND $DLOCK_TOKEN"],
    )
    .expect(0);
    assert!(
        out.stdout.starts_with("sqlite ") && out.stderr.is_empty(),
        "{out:?}"
    );
    let mode = |path: &str| fs::metadata(desk.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("state/dlock"), 0o700);
    assert_eq!(mode("state/dlock/locks.db"), 0o600);
}

#[test]
fn without_xdg_state_home_it_is_below_the_home_directory() {
    let desk = Desk::new();
    let mut command = home(&desk, &["acquire", "x"]);
    command
        .env_remove("XDG_STATE_HOME")
        .env("HOME", desk.path("me"));
    run(command).expect(0);
    assert!(desk.path("me/.local/state/dlock/locks.db").exists());
}

#[test]
fn a_home_that_is_another_in_each_directory_is_refused() {
    let desk = Desk::new();
    let mut command = home(&desk, &["acquire", "x"]);
    command.env("XDG_STATE_HOME", "state").env("HOME", ".");
    let out = run(command).expect(64);
    assert!(out.stderr.contains("set $DLOCK_URL"), "{out:?}");
}

#[test]
fn a_url_out_of_its_place_is_refused_and_not_taken_for_the_default_file() {
    let desk = Desk::new();
    let url = "redis://:canary@127.0.0.1:1/";
    let exec = |name| ["exec", name, "--", "echo", "ran"];
    let refused = |command, words: &str| {
        let out = run(command).expect(64);
        assert!(out.stderr.contains(words), "{out:?}");
        assert!(!out.stderr.contains("canary"), "{out:?}");
        assert!(out.stdout.is_empty() && !desk.path("state").exists());
    };
    let quorum = format!("quorum:{url} redis://b redis://c");
    for name in [url, &quorum, "SQLite:/x"] {
        refused(home(&desk, &exec(name)), "--url URL");
    }
    refused(home(&desk, &["lead", url, "--", "true"]), "--url URL");
    refused(home(&desk, &["acquire", url]), "--url URL");
    refused(home(&desk, &["inspect", "x", url]), "--url URL");
    refused(home(&desk, &["break", "--force", url]), "--url URL");
    refused(home(&desk, &["list", url]), "--url URL");
    refused(
        home(&desk, &["exec", "--also", url, "x", "--", "echo", "ran"]),
        "--url URL",
    );
    let long = format!("{url}{}", "x".repeat(600));
    refused(home(&desk, &exec(&long)), "<NAME>");
    for variable in ["DLOCK_URI", "DLOCKURL", "dlock_url", "DLOCK_URL_FILE"] {
        let mut command = home(&desk, &exec("x"));
        command.env(variable, url);
        let words = format!("dlock does not read ${variable}: name the store in $DLOCK_URL");
        refused(command, &words);
    }
    // A name may have a colon, and a store that is named makes any name right.
    ran(&desk, &exec("redis:cache")).expect(0);
    let file = format!("sqlite:{}", desk.text("locks.db"));
    let mut command = home(&desk, &["--url", &file, "exec", url, "--", "true"]);
    command.env("DLOCK_URI", url);
    run(command).expect(0);
}

#[test]
fn schema_makes_no_file() {
    let desk = Desk::new();
    ran(&desk, &["schema"]).expect(0);
    assert!(!desk.path("state").exists());
}

#[test]
fn processes_of_this_machine_exclude_each_other_and_hand_over() {
    let desk = Desk::new();
    let text = format!(
        "echo in >'{}'; while [ ! -e '{}' ]; do sleep 0.01; done",
        desk.text("in"),
        desk.text("go")
    );
    let holder: Running = start(home(&desk, &["exec", "x", "-c", &text]));
    desk.line("in");
    ran(&desk, &["exec", "-n", "x", "--", "true"]).expect(1);
    let waiter = start(home(&desk, &["exec", "x", "--", "echo", "mine"]));
    let nested = format!("'{DLOCK}' exec -n y -- echo inside");
    assert_eq!(
        ran(&desk, &["exec", "y", "-c", &nested]).expect(0).stdout,
        "inside\n"
    );
    fs::write(desk.path("go"), "").unwrap();
    holder.wait().expect(0);
    assert_eq!(waiter.wait().expect(0).stdout, "mine\n");
}

#[test]
fn a_killed_holder_frees_the_name_within_its_lease() {
    let desk = Desk::new();
    let text = format!("echo $$ >'{}'; exec sleep 600", desk.text("pid"));
    let holder = start(home(&desk, &["exec", "--lease", "3s", "x", "-c", &text]));
    let pid = desk.line("pid");
    holder.signal(nix::sys::signal::Signal::SIGKILL);
    holder.wait().expect(137);
    until("the command to die", || !crate::bed::is_alive(&pid));
    ran(&desk, &["exec", "-w", "20", "x", "--", "true"]).expect(0);
}

#[test]
fn a_lock_whose_file_was_deleted_is_lost_long_before_its_lease_is_over() {
    let desk = Desk::new();
    let text = format!("echo $$ >'{}'; exec sleep 600", desk.text("pid"));
    let holder = start(home(&desk, &["exec", "--lease", "15s", "x", "-c", &text]));
    desk.line("pid");
    fs::remove_dir_all(desk.path("state")).unwrap();
    let out = holder.wait().expect(75);
    // By a renewal, and not because none was answered.
    assert!(out.stderr.contains("no longer has it"), "{out:?}");
}
