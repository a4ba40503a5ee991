//! What is shown of locks: notes, tables, metrics files, and what is installed beside dlock.

use crate::bed::{
    DLOCK, Desk, at, beside, dlock, name, ran, run, server, start, until, until_held,
};
use nix::{
    pty::{Winsize, openpty},
    sys::signal::Signal,
};
use std::{
    fs::{self, File},
    io::Read,
    net::TcpListener,
    os::unix::fs::symlink,
    process::{Command, Stdio},
};

#[test]
fn a_note_is_shown_with_the_holder() {
    let lock = name("note");
    ran(&["acquire", "--note", "nightly, by hand", &lock]).expect(0);
    let seen = ran(&["inspect", &lock]).expect(0).stdout;
    assert!(seen.contains("\"nightly, by hand\""), "{seen}");
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    assert_eq!(seen["metadata"]["note"], "nightly, by hand");
    let refused = ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
    assert!(refused.stderr.contains("nightly, by hand"), "{refused:?}");
    let lock = name("note");
    let text = format!("'{DLOCK}' inspect '{lock}'");
    let args = ["exec", "--pass-url", "--note", "a job", &lock, "-c", &text];
    let seen = ran(&args).expect(0).stdout;
    assert!(seen.contains("\"a job\""), "{seen}");
}

#[test]
fn several_names_are_inspected_in_their_order() {
    let (held, free) = (name("held"), name("free"));
    ran(&["acquire", &held]).expect(0);
    let seen = ran(&["inspect", &free, &held]).expect(0).stdout;
    let lines: Vec<_> = seen.lines().collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0], format!("{free}\tfree"));
    assert!(
        lines[1].starts_with(&format!("{held}\theld by #")),
        "{seen}"
    );
    let seen = ran(&["--json", "inspect", &free, &held]).expect(0).stdout;
    assert_eq!(seen.lines().count(), 2);
}

#[test]
fn list_is_a_table_with_a_header_and_says_when_it_is_empty() {
    let prefix = name("table");
    let empty = ran(&["list", &prefix]).expect(0);
    assert_eq!(empty.stdout, "");
    assert!(empty.stderr.contains("no lock is held"), "{empty:?}");
    let quiet = ran(&["-q", "list", &prefix]).expect(0);
    assert_eq!(quiet.stderr, "");
    let lock = format!("{prefix}/a name");
    ran(&["acquire", "--lease", "90", &lock]).expect(0);
    let shown = ran(&["list", &prefix]).expect(0).stdout;
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 2, "{shown}");
    assert!(lines[0].starts_with("HELD BY"), "{shown}");
    let column = lines[0].find("NAME").unwrap();
    assert_eq!(&lines[1][column..], lock);
    let holder = format!("{} on ", std::process::id());
    assert!(
        lines[1].starts_with(&holder) && lines[1].contains("1m"),
        "{shown}"
    );
}

#[test]
fn a_metrics_file_says_what_happened() {
    let (lock, desk) = (name("metrics"), Desk::new());
    let file = desk.text("job.prom");
    let exec = ["exec", "-n", "--metrics-file", &file, &lock, "-c"];
    let gauge = |name: &str| {
        let text = fs::read_to_string(&file).unwrap();
        let start = format!("dlock_exec_{name}{{lock=\"{lock}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.and_then(|value| value.parse::<f64>().ok())
    };
    ran(&[&exec[..], &["sleep 0.2; exit 7"]].concat()).expect(7);
    assert_eq!(gauge("acquired"), Some(1.0));
    assert_eq!(gauge("lost"), Some(0.0));
    assert_eq!(gauge("exit_code"), Some(7.0));
    assert!(gauge("held_seconds").unwrap() >= 0.2);
    assert!(gauge("acquired_timestamp_seconds").unwrap() > 1.7e9);
    ran(&["acquire", &lock]).expect(0);
    ran(&[&exec[..], &["true"]].concat()).expect(1);
    assert_eq!(gauge("acquired"), Some(0.0));
    assert_eq!(gauge("exit_code"), Some(1.0));
    assert_eq!(gauge("acquired_timestamp_seconds"), None);
    let left = fs::read_dir(desk.path(".")).unwrap().count();
    assert_eq!(left, 1, "only the file itself is left");
}

#[test]
fn a_metrics_file_says_that_the_lock_was_lost() {
    let (lock, desk) = (name("metrics-lost"), Desk::new());
    let file = desk.text("job.prom");
    let mut args = vec!["exec", "--lease", "3s", "--metrics-file", &file];
    args.extend([&lock, "--", "sleep", "60"]);
    let running = start(dlock(&args));
    until_held(&lock);
    ran(&["break", "--force", &lock]).expect(0);
    running.wait().expect(75);
    let text = fs::read_to_string(&file).unwrap();
    assert!(
        text.contains(&format!("dlock_exec_lost{{lock=\"{lock}\"}} 1\n")),
        "{text}"
    );
}

#[test]
fn a_metrics_file_replaces_no_link_or_device() {
    let desk = Desk::new();
    fs::write(desk.path("target"), "kept").unwrap();
    symlink(desk.path("target"), desk.path("link")).unwrap();
    let exec = [
        "exec",
        "--metrics-file",
        &desk.text("link"),
        "x",
        "--",
        "echo",
        "ran",
    ];
    let out = run(dlock(&exec)).expect(64);
    assert!(out.stderr.contains("link is no regular file"), "{out:?}");
    assert_eq!(out.stdout, "");
    assert_eq!(fs::read_to_string(desk.path("link")).unwrap(), "kept");
    assert!(desk.path("link").is_symlink());
}

#[test]
fn a_metrics_file_says_that_nothing_was_run() {
    let (lock, desk) = (name("metrics-away"), Desk::new());
    let file = desk.text("job.prom");
    let exec = ["exec", "--metrics-file", &file, &lock, "--", "true"];
    let short = format!("{}?dlock.lease=10s", server().url());
    let no_room = [&exec[..1], &["--kill-grace", "9s"], &exec[1..]].concat();
    for (url, args, code) in [
        ("redis://127.0.0.1:1/", &exec[..], 69),
        (short.as_str(), &no_room[..], 64),
        ("", &exec[..], 64),
    ] {
        // What the job before left there.
        ran(&exec).expect(0);
        run(at(url, args)).expect(code);
        says_not_run(&file, code);
    }
}

#[test]
fn a_metrics_file_says_that_a_signal_came_before_there_was_a_connection() {
    let (lock, desk) = (name("metrics-signal"), Desk::new());
    let file = desk.text("job.prom");
    // A server that never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let url = format!("redis://{}/", silent.local_addr().unwrap());
    let exec = ["exec", "--metrics-file", &file, &lock, "--", "true"];
    let running = start(at(&url, &exec));
    let mut connection = None;
    until("dlock to connect", || {
        connection = silent.accept().ok();
        connection.is_some()
    });
    running.signal(Signal::SIGTERM);
    running.wait().expect(143);
    says_not_run(&file, 143);
}

/// Fails unless the metrics are those of a run that acquired nothing and ended so.
#[track_caller]
fn says_not_run(file: &str, code: i32) {
    let text = fs::read_to_string(file).unwrap();
    let value = |gauge: &str| {
        let line = text.lines().find(|line| line.starts_with(gauge));
        line.and_then(|line| line.rsplit(' ').next())
    };
    assert_eq!(
        value("dlock_exec_exit_code{"),
        Some(code.to_string().as_str())
    );
    assert_eq!(value("dlock_exec_acquired{"), Some("0"));
}

#[test]
fn watch_prints_one_table_after_the_other_where_there_is_no_terminal() {
    let lock = name("watch");
    let watching = start(dlock(&["watch", "--every", "0.1", &lock]));
    watching.says("0 locks, 0 waiting");
    ran(&["acquire", &lock]).expect(0);
    watching.says("1 lock, 0 waiting");
    watching.says(&format!("  {lock}\n\n"));
    watching.signal(Signal::SIGTERM);
    watching.wait().expect(143);
}

#[test]
fn watch_counts_no_waiters_where_the_store_does_not_know_them() {
    let desk = Desk::new();
    let url = format!("sqlite:{}", desk.text("locks.db"));
    run(at(&url, &["acquire", "x"])).expect(0);
    let watching = start(at(&url, &["watch", "--every", "0.1"]));
    watching.says(" 1 lock\n");
    watching.signal(Signal::SIGTERM);
    watching.wait().expect(143);
}

#[test]
fn watch_stays_in_its_place_in_a_terminal_until_q_or_ctrl_c() {
    let lock = name("watch-tty");
    ran(&["acquire", &lock]).expect(0);
    for key in ["q", "\x03"] {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(&size, None).unwrap();
        let terminal = || Stdio::from(pty.slave.try_clone().unwrap());
        let command = dlock(&["watch", "--every", "0.1", &lock]);
        let mut inside = beside(&command, "setsid");
        inside.args(["--ctty", DLOCK, "watch", "--every", "0.1", &lock]);
        inside
            .stdin(terminal())
            .stdout(terminal())
            .stderr(terminal());
        let mut child = inside.spawn().unwrap();
        let mut keys = File::from(pty.master);
        let shown = read_until(&mut keys, &lock);
        assert!(shown.contains("1 lock, 0 waiting"), "{shown:?}");
        std::io::Write::write_all(&mut keys, key.as_bytes()).unwrap();
        let shown = read_until(&mut keys, "\x1b[?1049l");
        assert!(shown.contains("\x1b[?25h"), "the cursor is back: {shown:?}");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

/// Reads a terminal until this text has come.
fn read_until(terminal: &mut File, text: &str) -> String {
    let mut shown = String::new();
    let mut buffer = [0; 4096];
    while !shown.contains(text) {
        let read = terminal.read(&mut buffer).unwrap();
        shown.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    shown
}

#[test]
fn extras_are_installed_where_man_and_each_shell_look() {
    let desk = Desk::new();
    let prefix = desk.text("usr");
    let out = run(at("", &["install-extras", "--prefix", &prefix])).expect(0);
    assert_eq!(out.stdout.lines().count(), 4, "{out:?}");
    let read = |path: &str| fs::read_to_string(desk.path("usr/share").join(path)).unwrap();
    let page = read("man/man1/dlock-exec.1");
    assert!(
        page.contains(".TH dlock-exec 1") && page.contains("min\\-hold"),
        "{page}"
    );
    assert!(read("man/man1/dlock.1").contains("install\\-extras"));
    let bash = read("bash-completion/completions/dlock.bash");
    assert!(bash.contains("--min-hold"));
    assert!(read("zsh/site-functions/_dlock").starts_with("#compdef dlock"));
    assert!(read("fish/vendor_completions.d/dlock.fish").contains("min-hold"));
}

#[test]
fn bash_completes_commands_and_options() {
    let desk = Desk::new();
    run(at("", &["install-extras", "--prefix", &desk.text("usr")])).expect(0);
    let file = desk.text("usr/share/bash-completion/completions/dlock.bash");
    for (words, wanted) in [("dlock ins", "inspect"), ("dlock exec --min", "--min-hold")] {
        let last = words.rsplit(' ').next().unwrap();
        let script = format!(
            ". '{file}'; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _dlock dlock '{last}' dlock; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let out = Command::new("bash").args(["-c", &script]).output().unwrap();
        let shown = String::from_utf8_lossy(&out.stdout);
        assert!(shown.lines().any(|line| line == wanted), "{words}: {out:?}");
    }
}
