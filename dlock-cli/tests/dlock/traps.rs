//! Mistakes on the command line, one a row. Each is refused with an error that names what was typed, and its command
//! does not run.

use crate::bed::{Desk, Out, at, name, run, server};
use dlock_conformance::testbed::RedisServer;

/// A mistake: the arguments, the exit code, and what the error has to say.
///
/// `LOCK` is a name that nobody holds, `SERVER` the address of a Redis, `DIR` a directory of the test's.
struct Row(&'static [&'static str], i32, &'static [&'static str]);

/// Of how a command is written.
const COMMANDS: &[Row] = &[
    Row(
        &["exec", "LOCK", "echo", "ran"],
        64,
        &["'echo'", "dlock exec NAME -- COMMAND"],
    ),
    Row(
        &["exec", "-n", "LOCK", "sh", "-c", "echo ran"],
        64,
        &["'sh'", "dlock exec NAME -- COMMAND"],
    ),
    Row(
        &["lead", "LOCK", "echo", "ran"],
        64,
        &["'echo'", "dlock lead NAME -- COMMAND"],
    ),
    Row(&["exec", "LOCK"], 64, &["<COMMAND>"]),
    Row(&["exec", "LOCK", "--"], 64, &["<COMMAND>"]),
    Row(&["lead", "LOCK"], 64, &["<COMMAND>"]),
    Row(&["exec", "--", "echo", "ran"], 64, &["<NAME>"]),
    Row(&["exec"], 64, &["<NAME>"]),
    Row(
        &["exec", "", "--", "echo", "ran"],
        64,
        &["<NAME>", "at least one byte"],
    ),
    Row(
        &["exec", "LONG", "--", "echo", "ran"],
        64,
        &["<NAME>", "512"],
    ),
    Row(&["exec", "-nightly", "--", "echo", "ran"], 64, &["-i"]),
    Row(&["exec", "LOCK", "-c"], 64, &["-c <TEXT>"]),
    Row(
        &["exec", "LOCK", "-c", "echo ran", "--", "echo", "ran"],
        64,
        &["-c <TEXT>"],
    ),
    Row(
        &["exec", "--ttl", "5", "LOCK", "--", "echo", "ran"],
        64,
        &["'--ttl'"],
    ),
    Row(
        &["exec", "--waite", "5", "LOCK", "--", "echo", "ran"],
        64,
        &["'--waite'", "'--wait'"],
    ),
    Row(&["exec", "-x", "LOCK", "--", "echo", "ran"], 64, &["'-x'"]),
    Row(
        &[
            "exec",
            "--note",
            "a note that is far too long for it",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--note", "32 bytes"],
    ),
    Row(
        &[
            "exec",
            "--metrics-file",
            "DIR/none/x.prom",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--metrics-file", "DIR/none"],
    ),
    Row(
        &["exec", "LOCK", "--", "no-such-command"],
        127,
        &["no-such-command"],
    ),
    Row(&["exec", "LOCK", "--", "/"], 126, &["/"]),
    Row(&["acquire", "LOCK", "--", "echo", "ran"], 64, &["'echo'"]),
    Row(&["acquire", "-E", "3", "LOCK"], 64, &["'-E'"]),
    Row(&["acquire"], 64, &["<NAME>"]),
    Row(&["inspect"], 64, &["<NAME>"]),
    Row(&["inspect", ""], 64, &["<NAME>", "at least one byte"]),
    Row(&["list", "a", "b"], 64, &["'b'"]),
    Row(&["lock", "LOCK"], 64, &["'lock'"]),
    Row(&["relase", "LOCK"], 64, &["'relase'", "'release'"]),
    Row(&[], 64, &["Usage"]),
    Row(&["-q", "-v", "list"], 64, &["--quiet", "--verbose"]),
];

/// Of times and numbers.
const NUMBERS: &[Row] = &[
    Row(
        &["exec", "-w", "-1", "LOCK", "--", "echo", "ran"],
        64,
        &["'-1'"],
    ),
    Row(
        &["exec", "-w", "soon", "LOCK", "--", "echo", "ran"],
        64,
        &["'soon'", "--wait", "1m30s"],
    ),
    Row(
        &["exec", "-w", "10parsec", "LOCK", "--", "echo", "ran"],
        64,
        &["'10parsec'", "--wait"],
    ),
    Row(
        &["exec", "-w", "", "LOCK", "--", "echo", "ran"],
        64,
        &["--wait"],
    ),
    Row(
        &["exec", "-w", "1e300", "LOCK", "--", "echo", "ran"],
        64,
        &["--wait"],
    ),
    Row(
        &["exec", "-n", "-w", "1", "LOCK", "--", "echo", "ran"],
        64,
        &["--nonblock", "--wait"],
    ),
    Row(
        &["exec", "--lease", "1ms", "LOCK", "--", "echo", "ran"],
        64,
        &["--lease", "100ms"],
    ),
    Row(
        &["exec", "--lease", "0", "LOCK", "--", "echo", "ran"],
        64,
        &["--lease", "100ms"],
    ),
    Row(
        &["exec", "--lease", "2y", "LOCK", "--", "echo", "ran"],
        64,
        &["--lease", "365 days"],
    ),
    Row(
        &["exec", "--lease", "x", "LOCK", "--", "echo", "ran"],
        64,
        &["--lease", "1m30s"],
    ),
    Row(&["exec", "--lease", "--", "echo", "ran"], 64, &["--lease"]),
    Row(
        &["exec", "--max-hold", "1ms", "LOCK", "--", "echo", "ran"],
        64,
        &["--max-hold", "100ms"],
    ),
    Row(
        &["exec", "--max-hold", "9y", "LOCK", "--", "echo", "ran"],
        64,
        &["--max-hold", "365 days"],
    ),
    Row(
        &["exec", "--min-hold", "9y", "LOCK", "--", "echo", "ran"],
        64,
        &["--min-hold", "365 days"],
    ),
    Row(
        &[
            "exec",
            "--min-hold",
            "9",
            "--max-hold",
            "8",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--min-hold (9s)", "--max-hold (8s)"],
    ),
    Row(
        &["exec", "--kill-grace", "20s", "LOCK", "--", "echo", "ran"],
        64,
        &["--kill-grace (20s)", "--lease (30s)"],
    ),
    Row(
        &[
            "exec",
            "--lease",
            "3",
            "--kill-grace",
            "2",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--kill-grace (2s)", "--lease (3s)"],
    ),
    Row(
        &[
            "lead",
            "--lease",
            "3",
            "--kill-grace",
            "2",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--kill-grace (2s)", "--lease (3s)"],
    ),
    Row(
        &["exec", "--kill-grace", "x", "LOCK", "--", "echo", "ran"],
        64,
        &["--kill-grace"],
    ),
    Row(
        &["acquire", "--lease", "1ms", "LOCK"],
        64,
        &["--lease", "100ms"],
    ),
    Row(
        &["renew", "--lease", "2y", "LOCK", "x/y"],
        64,
        &["--lease", "365 days"],
    ),
    Row(&["doctor", "--lease", "1ms"], 64, &["--lease", "100ms"]),
    Row(&["watch", "--every", "0"], 64, &["--every", "100ms"]),
    Row(
        &["exec", "-E", "256", "LOCK", "--", "echo", "ran"],
        64,
        &["--conflict-exit-code", "256"],
    ),
    Row(
        &["exec", "-E", "busy", "LOCK", "--", "echo", "ran"],
        64,
        &["--conflict-exit-code", "'busy'"],
    ),
    Row(
        &["exec", "--permits", "0", "LOCK", "--", "echo", "ran"],
        64,
        &["--permits", "1..=1024"],
    ),
    Row(
        &["exec", "--permits", "1025", "LOCK", "--", "echo", "ran"],
        64,
        &["--permits", "1..=1024"],
    ),
    Row(
        &[
            "exec",
            "--permits",
            "2",
            "--shared",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--permits", "--shared"],
    ),
    Row(
        &[
            "exec", "--shared", "--also", "b", "LOCK", "--", "echo", "ran",
        ],
        64,
        &["--shared", "--also"],
    ),
    Row(
        &[
            "exec",
            "--min-hold",
            "1",
            "--also",
            "b",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["--min-hold", "--also"],
    ),
    Row(
        &["exec", "--also", "", "LOCK", "--", "echo", "ran"],
        64,
        &["--also", "at least one byte"],
    ),
    Row(
        &["exec", "--on-lost", "stop", "LOCK", "--", "echo", "ran"],
        64,
        &["--on-lost", "kill"],
    ),
];

/// Of holds and tokens.
const HOLDS: &[Row] = &[
    Row(&["release", "LOCK"], 64, &["OWNER/HOLD", "--hold-file"]),
    Row(
        &["release", "LOCK", "me"],
        64,
        &["OWNER", "acquire printed"],
    ),
    Row(
        &["release", "LOCK", "7d444840-9dc0-41d1-b245-5ffdce74fad2/12"],
        64,
        &["HOLD", "16 hex digits"],
    ),
    Row(
        &["release", "LOCK", "#77c66d5c"],
        64,
        &["fingerprint", "dlock break"],
    ),
    Row(
        &["release", "LOCK", "x/y", "--hold-file", "-"],
        64,
        &["--hold-file"],
    ),
    Row(
        &["release", "LOCK", "--hold-file", "DIR/none"],
        64,
        &["DIR/none", "No such file"],
    ),
    Row(
        &["release", "LOCK", "--hold-file", "DIR"],
        64,
        &["DIR", "directory"],
    ),
    Row(
        &["release", "LOCK", "7d444840-9dc0-41d1-b245-5ffdce74fad2"],
        77,
        &["does not exist"],
    ),
    Row(
        &["renew", "LOCK", "7d444840-9dc0-41d1-b245-5ffdce74fad2"],
        64,
        &["OWNER/HOLD"],
    ),
    Row(&["break", "LOCK"], 64, &["--token", "--force"]),
    Row(
        &["break", "--token", "1", "--force", "LOCK"],
        64,
        &["--token", "--force"],
    ),
    Row(
        &["break", "--token", "abc", "LOCK"],
        64,
        &["--token", "'abc'"],
    ),
    Row(&["break", "--force"], 64, &["<NAME>"]),
];

/// Of the store. These come without `$DLOCK_URL`'s server.
const STORES: &[Row] = &[
    Row(
        &["--url", "gopher://h/", "exec", "LOCK", "--", "echo", "ran"],
        64,
        &["gopher", "redis"],
    ),
    Row(
        &[
            "--url",
            "127.0.0.1:6379",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["redis"],
    ),
    Row(
        &["--url", "localhost", "exec", "LOCK", "--", "echo", "ran"],
        64,
        &["redis"],
    ),
    Row(
        &["--url", "", "exec", "LOCK", "--", "echo", "ran"],
        64,
        &["redis"],
    ),
    Row(
        &["exec", "LOCK", "--", "echo", "ran"],
        64,
        &["_URL is empty"],
    ),
    Row(
        &["--url", "memory:", "exec", "LOCK", "--", "echo", "ran"],
        64,
        &["memory:", "one process"],
    ),
    Row(
        &["--url", "MEMORY:x", "acquire", "LOCK"],
        64,
        &["memory:", "one process"],
    ),
    Row(
        &[
            "--url",
            "sqlite:DIR/none/x.db",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["DIR/none", "no directory"],
    ),
    Row(
        &["--url", "sqlite:", "exec", "LOCK", "--", "echo", "ran"],
        64,
        &["names no file"],
    ),
    Row(
        &[
            "--url",
            "sqlite::memory:",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["names no file"],
    ),
    Row(
        &[
            "--url",
            "sqlite:~/x.db",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["~"],
    ),
    Row(
        &[
            "--url",
            "sqlite:DIR/x.db?lease=1s",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease"],
    ),
    Row(
        &[
            "--url",
            "redis://SERVER/?lease=1s",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease"],
    ),
    Row(
        &[
            "--url",
            "mysql://127.0.0.1:1/db?lease=1s",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease"],
    ),
    Row(
        &[
            "--url",
            "zk://127.0.0.1:1/?lease=1s",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease"],
    ),
    Row(
        &[
            "--url",
            "redis://SERVER/?dlock.leas=1s",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.leas"],
    ),
    Row(
        &[
            "--url",
            "redis://SERVER/?dlock.lease=soon",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease", "soon"],
    ),
    Row(
        &[
            "--url",
            "redis://SERVER/?dlock.lease=1ms",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["dlock.lease", "100ms"],
    ),
    Row(
        &[
            "--url",
            "redis://SERVER/99",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["does not have the database"],
    ),
    Row(
        &[
            "--url",
            "rediss://SERVER/",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        69,
        &["does the server speak TLS", "redis://"],
    ),
    Row(
        &[
            "--url",
            "redis://127.0.0.1:1/",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        69,
        &["127.0.0.1:1"],
    ),
    Row(
        &["--url", "redis://SERVER/", "--url-file", "DIR/none", "list"],
        64,
        &["--url", "--url-file"],
    ),
    Row(
        &[
            "--url-file",
            "DIR/none",
            "exec",
            "LOCK",
            "--",
            "echo",
            "ran",
        ],
        64,
        &["DIR/none", "No such file"],
    ),
    Row(
        &["--url-file", "-", "release", "--hold-file", "-", "LOCK"],
        64,
        &["--url-file", "--hold-file"],
    ),
];

#[test]
fn mistakes_of_commands_are_refused() {
    refused(COMMANDS, &server().url());
}

#[test]
fn mistakes_of_times_and_numbers_are_refused() {
    refused(NUMBERS, &server().url());
}

#[test]
fn mistakes_of_holds_are_refused() {
    refused(HOLDS, &server().url());
}

#[test]
fn mistakes_of_stores_are_refused() {
    refused(STORES, "");
}

#[test]
fn the_81_mistakes_of_new_users_are_among_them() {
    let rows = [COMMANDS, NUMBERS, HOLDS, STORES].map(<[Row]>::len);
    assert!(rows.iter().sum::<usize>() >= 81, "{rows:?}");
}

/// Runs every row, and shows all that are not refused as they should be.
#[track_caller]
fn refused(rows: &[Row], url: &str) {
    let (desk, lock) = (Desk::new(), name("trap"));
    let server: &RedisServer = server();
    let told = |text: &str| {
        text.replace("LOCK", &lock)
            .replace("SERVER", &server.addr().to_string())
            .replace("DIR", desk.text("").trim_end_matches('/'))
            .replace("LONG", &"x".repeat(513))
    };
    let wrong: Vec<_> = rows
        .iter()
        .filter_map(|Row(args, code, words)| {
            let args: Vec<_> = args.iter().map(|arg| told(arg)).collect();
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let out = run(at(url, &args));
            let words: Vec<_> = words.iter().map(|words| told(words)).collect();
            (!is_right(&out, *code, &words)).then(|| format!("{args:?} {words:?}: {out:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The code, the words, no secret, nothing of Rust's debug output, and no command that ran.
fn is_right(out: &Out, code: i32, words: &[String]) -> bool {
    let error = &out.stderr;
    out.code() == code
        && words.iter().all(|words| error.contains(words.as_str()))
        && ["canary", "Some(", "Err(", "ResponseError"]
            .iter()
            .all(|text| !error.contains(text))
        && !out.stdout.contains("ran")
}
