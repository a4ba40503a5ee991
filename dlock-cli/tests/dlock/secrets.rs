//! Passwords and holds: where they are read from, and which processes do not get them.

use crate::bed::{DLOCK, Desk, at, dlock, is_free, is_held, name, ran, run, server};
use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command};

/// A file of the test's with this text, and this mode.
fn file(desk: &Desk, text: &str, mode: u32) -> String {
    let path: PathBuf = desk.path("secret");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_command_gets_no_url_unless_it_is_passed_on() {
    let (lock, url) = (name("url"), server().url());
    let text = "echo \"[$DLOCK_URL]\"";
    for options in [&[][..], &["--no-pass"]] {
        let args = [&["exec"], options, &[&lock, "-c", text]].concat();
        assert_eq!(ran(&args).expect(0).stdout, "[]\n");
    }
    let passed = format!("[{url}]\n");
    let args = ["exec", "--pass-url", &lock, "-c", text];
    assert_eq!(ran(&args).expect(0).stdout, passed);
    let args = ["--url", &url, args[0], args[1], args[2], args[3], args[4]];
    assert_eq!(run(at("", &args)).expect(0).stdout, passed);
}

#[test]
fn a_dlock_inside_that_has_no_url_does_not_lock_in_the_default_file() {
    let (lock, desk) = (name("inside"), Desk::new());
    let inner = format!("'{DLOCK}' exec -n inner -- echo ran");
    let mut command = dlock(&["exec", &lock, "-c", &inner]);
    command.env("XDG_STATE_HOME", desk.path("state"));
    let out = run(command).expect(64);
    assert_eq!(out.stdout, "");
    assert!(out.stderr.contains("--pass-url"), "{out:?}");
    assert!(!desk.path("state").exists());
}

#[test]
fn the_url_may_be_in_a_file_or_on_standard_input() {
    let (lock, desk) = (name("url-file"), Desk::new());
    ran(&["acquire", &lock]).expect(0);
    for end in ["", "\n", "\r\n"] {
        let path = file(&desk, &format!("{}{end}", server().url()), 0o600);
        for source in [path.as_str(), "-"] {
            let mut command = at("redis://127.0.0.1:1/", &["--url-file", source]);
            command.args(["--json", "inspect", &lock]);
            command.stdin(fs::File::open(&path).unwrap());
            let out = run(command).expect(0);
            assert_eq!(out.json()["held"], true);
            assert_eq!(out.stderr, "");
        }
    }
}

#[test]
fn a_blank_beside_a_url_is_no_part_of_it() {
    let desk = Desk::new();
    let url = format!("sqlite:{}", desk.text("locks.db"));
    run(at(&url, &["acquire", "--lease", "10m", "x"])).expect(0);
    let exec = ["exec", "-n", "x", "--", "true"];
    for beside in [format!("{url} "), format!(" {url}\n")] {
        run(at(&beside, &exec)).expect(1);
        let by_option = [&["--url", &beside][..], &exec].concat();
        run(at("", &by_option)).expect(1);
    }
    assert!(run(at(" ", &exec)).expect(64).stderr.contains("is empty"));
}

#[test]
fn a_hold_may_be_in_a_file_or_on_standard_input() {
    let (lock, desk) = (name("hold-file"), Desk::new());
    for source in ["secret", "-"] {
        let taken = ran(&["acquire", &lock]).expect(0);
        let path = file(&desk, &taken.stdout, 0o600);
        let source = if source == "-" { "-" } else { &path };
        for change in ["renew", "release"] {
            let mut command = dlock(&[change, "--hold-file", source, &lock]);
            command.stdin(fs::File::open(&path).unwrap());
            assert_eq!(run(command).expect(0).stderr, "");
        }
        is_free(&lock);
    }
}

#[test]
fn a_file_that_has_no_secret_gives_64_and_says_why() {
    let (lock, desk) = (name("no-secret"), Desk::new());
    for (text, words) in [("", "one line"), ("a\nb\n", "one line"), ("\n", "one line")] {
        let path = file(&desk, text, 0o600);
        for args in [
            &["--url-file", &path, "inspect", &lock][..],
            &["release", &lock, "--hold-file", &path],
        ] {
            let out = ran(args).expect(64);
            assert!(out.stderr.contains(words), "{text:?}: {out:?}");
            assert!(out.stderr.contains(&path), "{text:?}: {out:?}");
        }
    }
    let out = ran(&["--url-file", &desk.text("missing"), "inspect", &lock]).expect(64);
    assert!(out.stderr.contains("No such file"), "{out:?}");
    let both = ["--url-file", "-", "release", &lock, "--hold-file", "-"];
    let out = ran(&both).expect(64);
    assert!(out.stderr.contains("cannot both"), "{out:?}");
}

#[test]
fn a_file_that_every_user_can_read_is_warned_of() {
    let (lock, desk) = (name("open-file"), Desk::new());
    for (mode, warned) in [(0o644, true), (0o640, false), (0o600, false)] {
        let path = file(&desk, &server().url(), mode);
        let out = ran(&["--url-file", &path, "inspect", &lock]).expect(0);
        assert_eq!(out.stderr.contains("chmod o-r"), warned, "{out:?}");
    }
}

#[test]
fn a_password_that_leaves_the_machine_unencrypted_is_warned_of() {
    // The native client refuses this address before it sends anything.
    let url = "redis://:canary@0.0.0.0:1/";
    let out = run(at(url, &["inspect", "x"]));
    assert!(out.stderr.contains("use rediss://"), "{out:?}");
    assert!(!out.stderr.contains("canary"), "{out:?}");
    let out = run(at("redis://:canary@127.0.0.1:1/", &["inspect", "x"])).expect(69);
    assert!(!out.stderr.contains("rediss"), "{out:?}");
}

#[test]
fn zookeeper_is_reached_over_tls_too() {
    let desk = Desk::new();
    let store = desk.text("key.p12");
    let keytool = |args: &[&str]| {
        let mut keytool = Command::new("keytool");
        keytool
            .args(args)
            .args(["-alias", "ca", "-keystore", &store]);
        keytool.args(["-storepass", "secret"]);
        run(keytool).expect(0);
    };
    keytool(&["-genkeypair", "-keyalg", "EC", "-dname", "CN=dlock"]);
    keytool(&["-exportcert", "-rfc", "-file", &desk.text("ca.pem")]);
    let url = format!("zk+tls://127.0.0.1:1/?dlock.ca={}", desk.text("ca.pem"));
    // Nothing listens there; a driver, its authority and a TLS provider are.
    run(at(&url, &["inspect", "x"])).expect(69);
}

#[test]
fn a_store_that_excludes_no_other_process_gives_64() {
    for args in [
        &["exec", "x", "--", "true"][..],
        &["acquire", "x"],
        &["list"],
    ] {
        for url in ["memory:", "memory:jobs", "MEMORY:x?dlock.lease=9s"] {
            let out = run(at(url, args)).expect(64);
            assert!(out.stderr.contains("one process"), "{out:?}");
        }
    }
}

#[test]
fn a_file_in_a_directory_that_is_not_there_gives_64_and_makes_none() {
    let desk = Desk::new();
    let exec = ["exec", "x", "--", "true"];
    let url = format!("sqlite:{}", desk.text("tpyo/locks.db"));
    let out = run(at(&url, &exec)).expect(64);
    assert!(out.stderr.contains(&desk.text("tpyo")), "{out:?}");
    assert!(!desk.path("tpyo").exists());
    run(at(&url.replace("/tpyo", ""), &exec)).expect(0);
    assert!(desk.path("locks.db").exists());
}

#[test]
fn a_file_of_a_relative_path_gives_64_and_the_path_in_full() {
    let desk = Desk::new();
    for url in [
        "sqlite:a%25b.db",
        "sqlite://./a%25b.db",
        "SQLite:a%25b.db?mode=rwc",
    ] {
        let mut command = at(url, &["exec", "x", "--", "true"]);
        command.current_dir(desk.path(""));
        let out = run(command).expect(64);
        let (_, full) = out.stderr.trim().rsplit_once("write ").unwrap();
        // As it stands there, it is right.
        run(at(full, &["exec", "x", "--", "true"])).expect(0);
        assert!(desk.path("a%b.db").exists(), "{full}");
    }
}

#[test]
fn a_parameter_of_ours_without_its_prefix_gives_64_and_the_right_name() {
    let lock = name("prefix");
    for (query, wanted) in [("lease=1s", "dlock.lease=1s"), ("prefix=a", "dlock.prefix")] {
        let url = format!("{}?{query}", server().url());
        let out = run(at(&url, &["acquire", &lock])).expect(64);
        assert!(out.stderr.contains(wanted), "{out:?}");
    }
    assert!(!is_held(&lock));
}
