//! What is said about each command and option.

use crate::bed::{
    Desk, at, beside, dlock, is_free, is_held, name, ran, run, server, start, until, until_held,
};
use std::{collections::BTreeSet, fs, io::Write, process::Stdio};

#[test]
fn the_url_comes_from_the_option_then_from_the_environment() {
    let lock = name("url");
    ran(&["acquire", &lock]).expect(0);
    let url = server().url();
    let out = run(at(
        "redis://127.0.0.1:1/",
        &["--url", &url, "inspect", &lock],
    ))
    .expect(0);
    assert!(out.stdout.contains("held by #"), "{out:?}");
    run(at("redis://127.0.0.1:1/", &["inspect", &lock])).expect(69);
}

#[test]
fn a_password_in_the_option_is_warned_of_and_not_shown() {
    let url = server().url().replace("redis://", "redis://:canary@");
    let args = ["--url", &url, "inspect", "x"];
    let out = ran(&args);
    assert!(
        out.stderr.contains("$DLOCK_URL") && !out.stderr.contains("canary"),
        "{out:?}"
    );
    let quiet = ran(&["-q", args[0], args[1], args[2], args[3]]);
    assert!(!quiet.stderr.contains("$DLOCK_URL"), "{quiet:?}");
    let unwarned = run(at(&url, &["inspect", "x"]));
    assert!(!unwarned.stderr.contains("$DLOCK_URL"), "{unwarned:?}");
}

#[test]
fn the_command_learns_what_it_holds_and_nothing_inherited_survives() {
    let lock = name("variables");
    let text = r#"echo "$DLOCK_HELD|$DLOCK_NAME|$DLOCK_TOKEN|$DLOCK_BACKEND|$DLOCK_PASS""#;
    let mut command = dlock(&["exec", &lock, "-c", text]);
    for key in ["HELD", "NAME", "TOKEN", "BACKEND"] {
        command.env(format!("DLOCK_{key}"), "inherited");
    }
    let out = run(command).expect(0);
    let fields: Vec<_> = out.stdout.trim().split('|').collect();
    assert_eq!(
        (fields[0], fields[1], fields[3]),
        ("1", lock.as_str(), "redis")
    );
    assert!(fields[2].parse::<u64>().unwrap() > 0, "{out:?}");
    assert!(
        fields[4].starts_with("1:") && fields[4].ends_with(&lock),
        "{out:?}"
    );
    assert_eq!(out.stderr, "");
}

#[test]
fn the_three_streams_are_the_command_s_own() {
    let mut command = dlock(&[
        "--json",
        "exec",
        &name("streams"),
        "-c",
        "cat; echo err >&2",
    ]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"in\n").unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(
        (out.stdout.as_slice(), out.stderr.as_slice()),
        (&b"in\n"[..], &b"err\n"[..])
    );
}

#[test]
fn a_stream_that_is_closed_does_not_hinder_a_command() {
    let lock = name("closed");
    let d = crate::bed::DLOCK;
    for closed in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        let mut shell = beside(&dlock(&[]), "sh");
        let line = format!("'{d}' exec -n '{lock}' -c 'exit 7' {closed}");
        shell.args(["-c", &line]);
        run(shell).expect(7);
        is_free(&lock);
    }
}

#[test]
fn a_name_may_have_blanks_and_breaks_and_is_shown_on_one_line() {
    for odd in ["a b", "a\tb", "a\nb", "it's"] {
        let lock = format!("{}/{odd}", name("odd"));
        let hold = ran(&["acquire", &lock]).expect(0).stdout;
        ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
        let shown = ran(&["inspect", &lock]).expect(0).stdout;
        assert_eq!(shown.lines().count(), 1, "{shown}");
        let shown = ran(&["list", &lock]).expect(0).stdout;
        assert_eq!(shown.lines().count(), 2, "{shown}");
        ran(&["release", &lock, hold.trim()]).expect(0);
        is_free(&lock);
    }
}

#[test]
fn the_same_name_inside_enters_again_and_other_names_do_not() {
    let (lock, other) = (name("nested"), name("other"));
    let d = crate::bed::DLOCK;
    let inner =
        format!("'{d}' exec -n --pass-url '{other}' -- '{d}' exec -n '{lock}' -- echo inside");
    let out = ran(&["exec", "--pass-url", &lock, "-c", &inner]).expect(0);
    assert_eq!(out.stdout, "inside\n");
    let deep = (0..20).fold("echo deep".to_owned(), |inner, _| {
        format!("'{d}' exec -n --pass-url '{lock}' -- {inner}")
    });
    assert_eq!(
        ran(&["exec", "--pass-url", &lock, "-c", &deep])
            .expect(0)
            .stdout,
        "deep\n"
    );
    is_free(&lock);
}

#[test]
fn no_pass_leaves_it_out_also_where_it_was_inherited() {
    let lock = name("no-pass");
    let d = crate::bed::DLOCK;
    let inner = format!("test -z \"$DLOCK_PASS\" && '{d}' exec -n -E 9 '{lock}' -- true");
    ran(&["exec", "--no-pass", "--pass-url", &lock, "-c", &inner]).expect(9);
    let twice =
        format!("'{d}' exec --no-pass --pass-url '{lock}' -- '{d}' exec -n -E 9 '{lock}' -- true");
    ran(&["exec", "--pass-url", &lock, "-c", &twice]).expect(9);
}

#[test]
fn a_pass_that_is_over_gives_75_and_never_a_lock() {
    let lock = name("over");
    let out = ran(&["exec", &lock, "-c", "echo $DLOCK_PASS"]).expect(0);
    let mut command = dlock(&["exec", &lock, "--", "echo", "ran"]);
    command.env("DLOCK_PASS", out.stdout.trim());
    let out = run(command).expect(75);
    assert_eq!(out.stdout, "");
    is_free(&lock);
}

#[test]
fn a_pass_of_another_store_or_name_or_version_is_ignored() {
    let lock = name("foreign");
    let foreign = format!(
        "9:new:thing,1:7d444840-9dc0-11d1-b245-5ffdce74fad2:5:redis%3A//elsewhere:{lock},\
         1:7d444840-9dc0-11d1-b245-5ffdce74fad2:5:redis%3A//elsewhere:other"
    );
    let mut command = dlock(&["exec", "-n", &lock, "-c", "echo $DLOCK_PASS"]);
    command.env("DLOCK_PASS", &foreign);
    let out = run(command).expect(0);
    assert!(out.stdout.starts_with(&foreign), "{out:?}");
    assert_eq!(out.stdout.trim().split(',').count(), 4);
}

#[test]
fn a_wait_ends_when_the_lock_is_given_back() {
    let (lock, desk) = (name("wait"), Desk::new());
    let holder = start(dlock(&[
        "exec",
        &lock,
        "--",
        "sh",
        "-c",
        "while [ ! -e \"$0\" ]; do sleep 0.01; done",
        &desk.text("go"),
    ]));
    until_held(&lock);
    let waiter = start(dlock(&["exec", "-w", "20.5", &lock, "--", "echo", "mine"]));
    fs::write(desk.path("go"), "").unwrap();
    holder.wait().expect(0);
    assert_eq!(waiter.wait().expect(0).stdout, "mine\n");
}

#[test]
fn a_busy_lock_says_who_has_it_and_q_says_nothing() {
    let lock = name("busy");
    ran(&["acquire", &lock]).expect(0);
    let out = ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
    assert!(
        out.stderr.contains(&format!("dlock inspect {lock}")),
        "{out:?}"
    );
    let holder = format!("(process {} on ", std::process::id());
    assert!(out.stderr.contains(&holder), "{out:?}");
    assert!(out.stderr.contains("lease ends in"), "{out:?}");
    let out = ran(&["exec", "-w", "2", &lock, "--", "true"]).expect(1);
    assert!(out.stderr.contains("held by owner #"), "{out:?}");
    assert_eq!(
        ran(&["-q", "exec", "-n", &lock, "--", "true"])
            .expect(1)
            .stderr,
        ""
    );
    let out = ran(&["-v", "exec", "-n", &name("free"), "--", "true"]).expect(0);
    assert!(
        out.stderr.contains("acquired") && out.stderr.contains("released"),
        "{out:?}"
    );
}

#[test]
fn what_acquire_prints_is_the_hold_and_v_tells_the_token() {
    let lock = name("printed");
    let out = ran(&["-v", "acquire", &lock]).expect(0);
    let words = out.stdout.strip_suffix('\n').unwrap();
    assert!(!words.contains(char::is_whitespace), "{out:?}");
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    let token = format!("token {}", seen["token"].as_str().unwrap());
    assert!(out.stderr.contains(&token), "{out:?}");
    ran(&["release", &lock, words]).expect(0);
}

#[test]
fn the_holder_of_what_was_acquired_by_hand_is_the_process_that_asked_for_it() {
    let lock = name("parent");
    ran(&["acquire", &lock]).expect(0);
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    assert_eq!(seen["metadata"]["pid"], std::process::id(), "{seen}");
}

#[test]
fn times_are_seconds_or_have_units() {
    let lock = name("times");
    let taken = ran(&["--json", "acquire", "--lease", "60", &lock]).expect(0);
    assert_eq!(taken.json()["lease_ms"], 60_000);
    ran(&["acquire", "-w", "1500ms", &lock]).expect(1);
    ran(&["acquire", "-w", "2", &lock]).expect(1);
    ran(&["acquire", "-w", "1e19", &name("times")]).expect(0);
    let long = ["exec", "--max-hold", "1e19", &lock, "--", "true"];
    ran(&long).expect(64);
}

#[test]
fn a_command_without_the_two_dashes_is_refused_with_them() {
    for args in [
        &["exec", "x", "true"][..],
        &["exec", "-n", "x", "sh", "-c", "true"],
        &["--json", "exec", "x", "true"],
    ] {
        let out = ran(args).expect(64);
        assert!(out.stderr.contains("dlock exec NAME -- COMMAND"), "{out:?}");
    }
}

#[test]
fn min_hold_keeps_the_name_shut_after_a_quick_command() {
    let lock = name("min");
    ran(&["exec", "--min-hold", "40s", &lock, "--", "true"]).expect(0);
    ran(&["exec", "-n", &lock, "--", "true"]).expect(1);
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    assert_eq!(seen["held"], false);
    let rest = seen["unavailable_ms"].as_u64().unwrap();
    assert!((30_000..=40_000).contains(&rest), "{seen}");
    ran(&["break", "--force", &lock]).expect(0);
    is_free(&lock);
}

#[test]
fn what_acquire_printed_renews_and_releases() {
    let lock = name("by-hand");
    let out = ran(&["acquire", "--lease", "20s", &lock]).expect(0);
    let hold = out.stdout.trim();
    ran(&["renew", "--lease", "60s", &lock, hold]).expect(0);
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    assert!(seen["remaining_ms"].as_u64().unwrap() > 30_000, "{seen}");
    ran(&["release", &lock, hold]).expect(0);
    ran(&["release", &lock, hold]).expect(77);
    is_free(&lock);
}

#[test]
fn the_lease_of_the_url_is_that_of_every_command_that_names_none() {
    let (lock, url) = (name("usual"), format!("{}?dlock.lease=7s", server().url()));
    let taken = run(at(&url, &["--json", "acquire", &lock]))
        .expect(0)
        .json();
    assert_eq!(taken["lease_ms"], 7000);
}

#[test]
fn an_owner_alone_releases_all_its_holds() {
    let lock = name("owner");
    let out = ran(&["acquire", &lock]).expect(0);
    let owner = out.stdout.split('/').next().unwrap();
    ran(&["release", &lock, owner]).expect(0);
    is_free(&lock);
}

#[test]
fn a_fingerprint_is_refused_with_the_line_to_use() {
    let lock = name("fingerprint");
    ran(&["acquire", &lock]).expect(0);
    let seen = ran(&["--json", "inspect", &lock]).expect(0).json();
    let fingerprint = format!("#{}", seen["owner"].as_str().unwrap());
    let out = ran(&["release", &lock, &fingerprint]).expect(64);
    let line = format!(
        "dlock break {lock} --token {}",
        seen["token"].as_str().unwrap()
    );
    assert!(out.stderr.trim().ends_with(&line), "{out:?}");
    assert!(is_held(&lock));
    let args: Vec<_> = line.split(' ').skip(1).collect();
    ran(&args).expect(0);
    is_free(&lock);
}

#[test]
fn acquire_without_a_place_to_print_leaves_no_lock() {
    let lock = name("print");
    let d = crate::bed::DLOCK;
    for redirection in [">&-", ">/dev/full"] {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("'{d}' acquire '{lock}' {redirection}")]);
        shell.env("DLOCK_URL", server().url());
        let out = run(shell).expect(74);
        assert!(!out.stderr.is_empty(), "{out:?}");
        is_free(&lock);
    }
}

#[test]
fn list_shows_what_begins_so_one_object_a_line() {
    let prefix = name("list");
    let names: Vec<_> = (0..150).map(|at| format!("{prefix}/{at}")).collect();
    for lock in &names[..3] {
        ran(&["acquire", lock]).expect(0);
    }
    let out = ran(&["--json", "list", &prefix]).expect(0);
    let mut found: Vec<String> = out
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|object| object["name"].as_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, names[..3]);
    assert_eq!(ran(&["list", &name("nothing")]).expect(0).stdout, "");
}

#[test]
fn every_result_has_the_same_fields_and_only_acquire_shows_an_owner_whole() {
    let lock = name("fields");
    let taken = ran(&["--json", "acquire", &lock]).expect(0).json();
    let owner = taken["owner"].as_str().unwrap().to_owned();
    let hold = format!("{owner}/{}", taken["hold"].as_str().unwrap());
    let results = [
        taken,
        ran(&["--json", "inspect", &lock]).expect(0).json(),
        ran(&["--json", "renew", &lock, &hold]).expect(0).json(),
        ran(&["--json", "release", &lock, &hold]).expect(0).json(),
        ran(&["--json", "break", "--force", &lock]).expect(0).json(),
    ];
    for result in &results {
        // In whatever order: a feature of the JSON crate decides, and any crate of the build may turn it on.
        let fields: BTreeSet<_> = result.as_object().unwrap().keys().collect();
        assert!(fields.into_iter().eq(FIELDS), "{result}");
        assert!(result["token"].is_string() || result["token"].is_null());
    }
    for result in &results[1..] {
        assert!(!result.to_string().contains(&owner), "{result}");
    }
    assert!(results[1]["metadata"]["pid"].is_u64());
}

const FIELDS: [&str; 16] = [
    "age_ms",
    "backend",
    "damaged",
    "held",
    "hold",
    "holds",
    "lease_ms",
    "metadata",
    "mode",
    "name",
    "owner",
    "permits",
    "remaining_ms",
    "token",
    "unavailable_ms",
    "waiters",
];

#[test]
fn errors_are_objects_too_and_those_of_exec_stay_off_its_output() {
    let lock = name("errors");
    ran(&["acquire", &lock]).expect(0);
    let error = ran(&["--json", "acquire", "-n", &lock]).expect(1).json()["error"].clone();
    assert_eq!(
        (&error["kind"], &error["name"]),
        (&"Timeout".into(), &lock.clone().into())
    );
    assert_eq!(error["backend"], "redis");
    let out = ran(&["--json", "exec", "-n", &lock, "--", "true"]).expect(1);
    assert_eq!(out.stdout, "");
    let error: serde_json::Value = serde_json::from_str(&out.stderr).unwrap();
    assert_eq!(error["error"]["kind"], "Timeout");
    let free = name("errors");
    let out = ran(&["--json", "exec", &free, "--", "no-such-command"]).expect(127);
    let error: serde_json::Value = serde_json::from_str(&out.stderr).unwrap();
    assert_eq!(
        (&error["error"]["kind"], &error["error"]["name"]),
        (&"Exec".into(), &free.into())
    );
    let out = ran(&["--json", "exec"]).expect(64);
    let error: serde_json::Value = serde_json::from_str(&out.stderr).unwrap();
    assert_eq!(error["error"]["kind"], "Misuse");
}

#[test]
fn schema_needs_no_store() {
    let out = run(at("redis://127.0.0.1:1/", &["schema"])).expect(0);
    assert!(out.stdout.contains("~dlock:*"), "{out:?}");
    let out = run(at("mysql://127.0.0.1:1/db?dlock.table=ops", &["schema"])).expect(0);
    assert!(out.stdout.starts_with("CREATE TABLE IF NOT EXISTS `ops`"));
    let out = run(at(
        "postgres://me@127.0.0.1:1/db?dlock.table=ops.locks",
        &["schema"],
    ));
    if cfg!(feature = "postgres") {
        let shown = out.expect(0).stdout;
        assert!(shown.starts_with("CREATE TABLE IF NOT EXISTS \"ops\".\"locks\""));
        for word in ["CREATE ROLE", "GRANT USAGE", "GRANT SELECT, INSERT"] {
            assert!(shown.contains(word), "{shown}");
        }
    } else {
        assert!(out.expect(64).stderr.contains("postgres"));
    }
    let out = run(at("zk://127.0.0.1:1/dlock", &["schema"])).expect(0);
    assert!(out.stdout.contains("setAcl /dlock"), "{out:?}");
    let out = run(at("mongodb://127.0.0.1:1/", &["schema"]));
    if cfg!(feature = "mongo") {
        assert!(out.expect(0).stdout.contains("db.createRole"));
    } else {
        assert!(out.expect(64).stderr.contains("--features mongo"));
    }
    let out = run(at("etcd://127.0.0.1:1/", &["schema"]));
    if cfg!(feature = "etcd") {
        assert!(out.expect(0).stdout.contains("etcdctl role"));
    } else {
        assert!(out.expect(64).stderr.contains("--features etcd"));
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [
        &["--help"][..],
        &["--version"],
        &["exec", "--help"],
        &["help", "acquire"],
    ] {
        let out = ran(args).expect(0);
        assert!(!out.stdout.is_empty() && out.stderr.is_empty(), "{out:?}");
    }
}

#[test]
fn an_acquire_that_waits_takes_it_when_its_lease_ends() {
    let lock = name("lease-ends");
    ran(&["acquire", "--lease", "3s", &lock]).expect(0);
    ran(&["acquire", "-w", "20", &lock]).expect(0);
    until("the second one to hold it", || is_held(&lock));
}
