//! Mistakes on the command line, one a row. Each is refused with an error that names what was typed, and its command
//! does not run.

use crate::bed::{DLOCK, Desk, Out, at, beside, name, run, server};
use dlock_conformance::testbed::RedisServer;
use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

/// A mistake: what was typed after `dlock`, the exit code, and what the error has to say.
///
/// `LOCK` is a name that nobody holds, `SERVER` the address of a Redis, `DIR` a directory of the test's.
type Row = (&'static str, i32, &'static [&'static str]);

/// Of how a command is written.
#[rustfmt::skip] // a row a line
const COMMANDS: &[Row] = &[
    ("exec LOCK echo ran", 64, &["'echo'", "dlock exec NAME -- COMMAND"]),
    ("exec -n LOCK sh -c 'echo ran'", 64, &["'sh'", "dlock exec NAME -- COMMAND"]),
    ("lead LOCK echo ran", 64, &["'echo'", "dlock lead NAME -- COMMAND"]),
    ("exec LOCK", 64, &["<COMMAND>"]),
    ("exec LOCK --", 64, &["<COMMAND>"]),
    ("lead LOCK", 64, &["<COMMAND>"]),
    ("exec -- echo ran", 64, &["<NAME>"]),
    ("exec", 64, &["<NAME>"]),
    ("exec '' -- echo ran", 64, &["<NAME>", "at least one byte"]),
    ("lead '' -- echo ran", 64, &["<NAME>", "at least one byte"]),
    ("exec LONG -- echo ran", 64, &["<NAME>", "512"]),
    ("exec -nightly -- echo ran", 64, &["-i"]),
    ("exec LOCK -c", 64, &["-c <TEXT>"]),
    ("exec LOCK -c 'echo ran' -- echo ran", 64, &["-c <TEXT>"]),
    ("exec --ttl 5 LOCK -- echo ran", 64, &["'--ttl'"]),
    ("exec --waite 5 LOCK -- echo ran", 64, &["'--waite'", "'--wait'"]),
    ("exec -x LOCK -- echo ran", 64, &["'-x'"]),
    ("exec --note 'a note that is far too long for it' LOCK -- echo ran", 64, &["--note", "32 bytes"]),
    ("exec --metrics-file DIR/none/x.prom LOCK -- echo ran", 64, &["--metrics-file", "DIR/none"]),
    ("exec --metrics-file DIR LOCK -- echo ran", 64, &["--metrics-file", "DIR is a directory"]),
    ("exec --metrics-file DIR/none/ LOCK -- echo ran", 64, &["--metrics-file", "DIR/none/ is a directory"]),
    ("exec LOCK other -- echo ran", 64, &["'other'", "--also"]),
    ("exec LOCK redis:canary@h -- echo ran", 64, &["'...@...'", "--url URL"]),
    ("exec -E redis://:canary@h/ LOCK -- echo ran", 64, &["'redis://...'", "'-E <CODE>'"]),
    ("exec -w 10 s LOCK -- echo ran", 64, &["'LOCK'", "quote a value"]),
    ("exec LOCK redis://:canary@h/ -- echo ran", 64, &["'redis://...'", "--url URL"]),
    ("-n exec LOCK -- echo ran", 64, &["'-n'"]),
    ("exec LOCK -- 'echo ran'", 127, &["echo ran: not found", "after -c"]),
    ("exec LOCK -- '/no/such program'", 127, &["/no/such program: not found", "on PATH"]),
    ("exec LOCK -- no-such-command", 127, &["no-such-command"]),
    ("exec LOCK -- /", 126, &["/"]),
    ("exec -c 'echo ran'", 64, &["<NAME>"]),
    ("exec LOCK -c echo ran", 64, &["'ran'", "dlock exec NAME -- COMMAND"]),
    ("exec LOCK --url", 64, &["--url <URL>"]),
    ("lead -n LOCK -- echo ran", 64, &["'-n'"]),
    ("acquire LOCK -- echo ran", 64, &["'echo'"]),
    ("acquire --also b LOCK", 64, &["'--also'"]),
    ("acquire -E 3 LOCK", 64, &["'-E'"]),
    ("acquire", 64, &["<NAME>"]),
    ("inspect", 64, &["<NAME>"]),
    ("inspect ''", 64, &["<NAME>", "at least one byte"]),
    ("list a b", 64, &["'b'"]),
    ("schema redis", 64, &["'redis'"]),
    ("monitor", 64, &["--witness <CMD>"]),
    ("install-extras --prefix /dev/null/x", 69, &["/dev/null/x", "Not a directory"]),
    ("lock LOCK", 64, &["'lock'"]),
    ("relase LOCK", 64, &["'relase'", "'release'"]),
    ("", 64, &["Usage"]),
    ("-q -v list", 64, &["'-q'", "'-v'"]),
];

/// Of times and numbers.
#[rustfmt::skip] // a row a line
const NUMBERS: &[Row] = &[
    ("exec -w -1 LOCK -- echo ran", 64, &["'-1'"]),
    ("exec -w soon LOCK -- echo ran", 64, &["'soon'", "'-w <DUR>'", "1m30s"]),
    ("exec -w 10parsec LOCK -- echo ran", 64, &["'10parsec'", "'-w <DUR>'"]),
    ("exec -w '' LOCK -- echo ran", 64, &["'-w <DUR>'"]),
    ("exec -n5 LOCK -- echo ran", 64, &["'-5'"]),
    ("exec -w 10S LOCK -- echo ran", 64, &["'10S'", "'-w <DUR>'", "lower case"]),
    // Five months, to the crate that reads it.
    ("exec --min-hold 5M LOCK -- echo ran", 64, &["'5M'", "--min-hold", "lower case"]),
    ("exec --max-hold 1h30 LOCK -- echo ran", 64, &["'1h30'", "--max-hold", "unit needed"]),
    ("exec --wait 01:30 LOCK -- echo ran", 64, &["'01:30'", "'--wait <DUR>'", "1m30s"]),
    ("exec --wait 1,5 LOCK -- echo ran", 64, &["'1,5'", "'--wait <DUR>'", "1m30s"]),
    ("exec --lease=-5 LOCK -- echo ran", 64, &["'-5'", "'--lease <DUR>'", "between 0"]),
    ("exec -w 5 -w 6 LOCK -- echo ran", 64, &["'-w <DUR>'", "multiple times"]),
    ("exec --wait 1e300 LOCK -- echo ran", 64, &["'--wait <DUR>'"]),
    ("exec --timeout=x LOCK -- echo ran", 64, &["'--timeout <DUR>'"]),
    ("acquire LOCK -w", 64, &["'-w <DUR>'"]),
    ("acquire --nb --wait=1 LOCK", 64, &["'--nb'", "'--wait <DUR>'"]),
    ("exec -n -w 1 LOCK -- echo ran", 64, &["'-n'", "'-w <DUR>'"]),
    ("exec --lease 1ms LOCK -- echo ran", 64, &["--lease", "100ms"]),
    ("exec --lease 0 LOCK -- echo ran", 64, &["--lease", "100ms"]),
    ("exec --lease 2y LOCK -- echo ran", 64, &["--lease", "365 days"]),
    ("exec --lease x LOCK -- echo ran", 64, &["--lease", "1m30s"]),
    ("exec --lease -- echo ran", 64, &["--lease"]),
    ("exec --max-hold 1ms LOCK -- echo ran", 64, &["--max-hold", "100ms"]),
    ("exec --max-hold 9y LOCK -- echo ran", 64, &["--max-hold", "365 days"]),
    ("exec --min-hold 9y LOCK -- echo ran", 64, &["--min-hold", "365 days"]),
    ("exec --min-hold 9 --max-hold 8 LOCK -- echo ran", 64, &["--min-hold (9s)", "--max-hold (8s)"]),
    ("exec --kill-grace 20s LOCK -- echo ran", 64, &["--kill-grace (20s)", "--lease (30s)"]),
    ("exec --lease 3 --kill-grace 2 LOCK -- echo ran", 64, &["--kill-grace (2s)", "--lease (3s)"]),
    ("lead --lease 3 --kill-grace 2 LOCK -- echo ran", 64, &["--kill-grace (2s)", "--lease (3s)"]),
    ("exec --kill-grace x LOCK -- echo ran", 64, &["--kill-grace"]),
    ("acquire --lease 1ms LOCK", 64, &["--lease", "100ms"]),
    ("renew --lease 2y LOCK x/y", 64, &["--lease", "365 days"]),
    ("doctor --lease 1ms", 64, &["--lease", "100ms"]),
    ("watch --every 0", 64, &["--every", "100ms"]),
    ("monitor --witness true --every 0", 64, &["--every", "100ms"]),
    ("monitor --witness true --misses 0", 64, &["--misses", "'0'"]),
    ("monitor --witness true --delay x", 64, &["--delay", "1m30s"]),
    ("exec -E 256 LOCK -- echo ran", 64, &["'-E <CODE>'", "256"]),
    ("exec -E busy LOCK -- echo ran", 64, &["'-E <CODE>'", "'busy'"]),
    ("exec --permits 0 LOCK -- echo ran", 64, &["--permits", "1..=1024"]),
    ("exec --permits 1025 LOCK -- echo ran", 64, &["--permits", "1..=1024"]),
    ("exec --permits 2 -s LOCK -- echo ran", 64, &["--permits", "'-s'"]),
    ("exec --permits two LOCK -- echo ran", 64, &["--permits", "'two'"]),
    ("exec --shared --also b LOCK -- echo ran", 64, &["--shared", "--also"]),
    ("exec --min-hold 1 --also b LOCK -- echo ran", 64, &["--min-hold", "--also"]),
    ("exec --also '' LOCK -- echo ran", 64, &["--also", "at least one byte"]),
    ("exec --on-lost stop LOCK -- echo ran", 64, &["--on-lost", "kill"]),
];

/// Of holds and tokens.
#[rustfmt::skip] // a row a line
const HOLDS: &[Row] = &[
    ("release LOCK", 64, &["OWNER/HOLD", "--hold-file"]),
    ("release LOCK me", 64, &["OWNER", "acquire printed"]),
    ("release LOCK 7d444840-9dc0-41d1-b245-5ffdce74fad2/12", 64, &["HOLD", "16 hex digits"]),
    ("release LOCK '#77c66d5c'", 64, &["fingerprint", "dlock break"]),
    ("release 7d444840-9dc0-41d1-b245-5ffdce74fad2/00000000000000ff LOCK", 64, &["OWNER", "acquire printed"]),
    ("release LOCK --force", 64, &["'--force'"]),
    ("release LOCK x/y --hold-file -", 64, &["--hold-file"]),
    ("release LOCK --hold-file DIR/none", 64, &["DIR/none", "No such file"]),
    ("release LOCK --hold-file DIR", 64, &["DIR", "directory"]),
    ("release LOCK 7d444840-9dc0-41d1-b245-5ffdce74fad2", 77, &["does not exist"]),
    ("release LOCK --hold-file -", 64, &["standard input", "one line"]),
    ("renew LOCK", 64, &["OWNER/HOLD", "--hold-file"]),
    ("renew LOCK 7d444840-9dc0-41d1-b245-5ffdce74fad2", 64, &["OWNER/HOLD"]),
    ("break LOCK", 64, &["--token", "--force"]),
    ("break --token 1 --force LOCK", 64, &["--token", "--force"]),
    ("break --token abc LOCK", 64, &["--token", "'abc'"]),
    ("break LOCK 5", 64, &["'5'", "--token"]),
    ("break --force", 64, &["<NAME>"]),
];

/// Of the store. These come without `$DLOCK_URL`'s server.
#[rustfmt::skip] // a row a line
const STORES: &[Row] = &[
    ("--url gopher://h/ exec LOCK -- echo ran", 64, &["gopher", "redis"]),
    ("--url 127.0.0.1:6379 exec LOCK -- echo ran", 64, &["redis"]),
    ("--url localhost exec LOCK -- echo ran", 64, &["redis"]),
    ("--url '' exec LOCK -- echo ran", 64, &["redis"]),
    ("--url '\"redis://SERVER/\"' exec LOCK -- echo ran", 64, &["begins with its scheme"]),
    ("--url exec LOCK -- echo ran", 64, &["'LOCK'", "--url took \"exec\""]),
    ("redis://:canary@SERVER/ exec LOCK -- echo ran", 64, &["'redis://...'", "--url URL"]),
    ("--url redis://SERVER/ --url redis://SERVER/1 exec LOCK -- echo ran", 64, &["'--url <URL>'", "multiple times"]),
    ("exec LOCK -- echo ran", 64, &["_URL is empty"]),
    ("--url memory: exec LOCK -- echo ran", 64, &["memory:", "one process"]),
    ("--url MEMORY:x acquire LOCK", 64, &["memory:", "one process"]),
    ("--url sqlite:DIR/none/x.db exec LOCK -- echo ran", 64, &["DIR/none", "no directory"]),
    ("--url sqlite: exec LOCK -- echo ran", 64, &["names no file"]),
    ("--url sqlite::memory: exec LOCK -- echo ran", 64, &["names no file"]),
    ("--url sqlite:x.db exec LOCK -- echo ran", 64, &["sqlite:x.db is another file", "write sqlite:/", "/x.db"]),
    ("--url sqlite://x.db exec LOCK -- echo ran", 64, &["sqlite://x.db is another file", "write sqlite:/"]),
    ("--url sqlite:none/./x.db exec LOCK -- echo ran", 64, &["write sqlite:/", "/none/x.db"]),
    ("--url 'sqlite:DIR/x.db#dlock.lease=5s' exec LOCK -- echo ran", 64, &["# in the SQLite URL", "%23"]),
    ("--url 'sqlite:DIR/x.db dlock.lease=5s' exec LOCK -- echo ran", 64, &["settings follow a ?"]),
    ("--url sqlite:DIR exec LOCK -- echo ran", 64, &["cannot be the lock file", "no regular file"]),
    ("--url 'sqlite:~/x.db' exec LOCK -- echo ran", 64, &["~"]),
    ("--url 'sqlite:DIR/none.db?mode=rw' exec LOCK -- echo ran", 69, &["cannot find the lock file DIR/none.db"]),
    // No user may make files there.
    ("--url sqlite:/sys/x.db exec LOCK -- echo ran", 69, &["cannot make the lock file /sys/x.db"]),
    ("--url 'sqlite:DIR/x.db?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url 'redis://SERVER/?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url 'mysql://127.0.0.1:1/db?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url 'mysql://127.0.0.1:1/db#dlock.lease=1s' exec LOCK -- echo ran", 64, &["# in the MySQL URL", "%23"]),
    ("--url mysql://127.0.0.1:1/ exec LOCK -- echo ran", 64, &["names no database"]),
    ("--url mysql://127.0.0.1:1/db exec LOCK -- echo ran", 69, &["127.0.0.1:1: the server could not be reached"]),
    ("--url zk://127.0.0.1:1/ exec LOCK -- echo ran", 69, &["127.0.0.1:1: none of the servers could be reached"]),
    ("--url zk://127.0.0.1:port/ exec LOCK -- echo ran", 64, &["127.0.0.1:port", "invalid address"]),
    ("--url 'zk://127.0.0.1:1/?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url zk://127.0.0.1:1/ exec --lease 2h LOCK -- echo ran", 64, &["--lease (2h)", "3600s"]),
    ("--url 'redis://SERVER/?dlock.leas=1s' exec LOCK -- echo ran", 64, &["dlock.leas"]),
    ("--url 'redis://SERVER/?dlock.lease=soon' exec LOCK -- echo ran", 64, &["dlock.lease", "soon"]),
    ("--url 'redis://SERVER/?dlock.lease=1ms' exec LOCK -- echo ran", 64, &["dlock.lease", "100ms"]),
    ("--url 'redis://SERVER/?dlock.lease=30' exec LOCK -- echo ran", 64, &["dlock.lease", "write 30s"]),
    ("--url 'redis://SERVER/?dlock.lease=5M' exec LOCK -- echo ran", 64, &["dlock.lease", "lower case"]),
    ("--url 'redis://SERVER/?dlock.lease=5s&dlock.lease=6s' exec LOCK -- echo ran", 64, &["dlock.lease", "twice"]),
    ("--url redis://localhost:port/ exec LOCK -- echo ran", 64, &["did not parse", "redis://user:password@host:6379/"]),
    ("--url redis:SERVER exec LOCK -- echo ran", 64, &["Missing hostname", "redis://user:password@host:6379/"]),
    ("--url redis://SERVER/jobs exec LOCK -- echo ran", 64, &["Invalid database number", "host:6379/DATABASE"]),
    ("--url 'redis://SERVER/ redis://SERVER/1' exec LOCK -- echo ran", 64, &["Invalid database number"]),
    ("--url redis://me:canary/x@SERVER/ exec LOCK -- echo ran", 64, &["% codes"]),
    // The native client would read a host `me` and a port 12.
    ("--url 'redis://me:12#canary@SERVER/' exec LOCK -- echo ran", 64, &["# in the Redis URL", "%23"]),
    ("--url redis://SERVER/99 exec LOCK -- echo ran", 64, &["does not have the database"]),
    ("--url rediss://SERVER/ exec LOCK -- echo ran", 69, &["does the server speak TLS", "redis://"]),
    ("--url redis://127.0.0.1:1/ exec LOCK -- echo ran", 69, &["127.0.0.1:1"]),
    ("--url 'quorum:redis://SERVER/ redis://SERVER/1' exec LOCK -- echo ran", 64, &["3, 5 or 7 stores, not 2"]),
    ("--url quorum:redis://SERVER/,redis://SERVER/1,redis://SERVER/2 exec LOCK -- echo ran", 64, &["3, 5 or 7 stores, not 1"]),
    ("--url 'quorum:redis://SERVER/ redis://SERVER/ redis://SERVER/1' exec LOCK -- echo ran", 64, &["in the quorum twice"]),
    ("--url 'quorum:memory:a memory:b memory:c' exec LOCK -- echo ran", 64, &["memory:", "one process"]),
    ("--url 'quorum:sqlite:DIR/a.db sqlite:DIR/b.db sqlite:c.db' exec LOCK -- echo ran", 64, &["sqlite:c.db is another file"]),
    ("--url 'quorum:redis://SERVER/ redis://127.0.0.1:1/ redis://127.0.0.1:2/' exec LOCK -- echo ran", 69, &["1 of 3 stores", "127.0.0.1:1", "127.0.0.1:2"]),
    ("--url redis://SERVER/ --url-file DIR/none list", 64, &["--url", "--url-file"]),
    ("--url-file DIR/none exec LOCK -- echo ran", 64, &["DIR/none", "No such file"]),
    ("--url-file DIR exec LOCK -- echo ran", 64, &["cannot read DIR", "directory"]),
    ("--url-file redis://:canary@SERVER/ exec LOCK -- echo ran", 64, &["--url-file", "as --url"]),
    ("--url-file - release --hold-file - LOCK", 64, &["--url-file", "--hold-file"]),
];

/// Of stores that are not built in by default.
#[rustfmt::skip] // a row a line
const OPTIONAL: &[Row] = &[
    ("--url 'mongodb://127.0.0.1:1/?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url 'mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200' exec LOCK -- echo ran", 69, &["no primary could be found: check", "127.0.0.1:1: "]),
    ("--url 'postgres://127.0.0.1:1/db?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
    ("--url postgres://me@127.0.0.1:1/db exec LOCK -- echo ran", 69, &["127.0.0.1:1: the server could not be reached"]),
    ("--url postgres://127.0.0.1:1/db exec LOCK -- echo ran", 64, &["a host, a user and a database"]),
    ("--url mongodb://me:x@canary@127.0.0.1:1/ exec LOCK -- echo ran", 64, &["percent-encoded"]),
    ("--url etcd://127.0.0.1:1/ exec LOCK -- echo ran", 69, &["127.0.0.1:1: no member of the etcd cluster could be reached"]),
    ("--url 'etcd://127.0.0.1:1/?lease=1s' exec LOCK -- echo ran", 64, &["dlock.lease"]),
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
#[cfg_attr(
    not(all(feature = "mongo", feature = "postgres", feature = "etcd")),
    ignore = "this dlock is built without a feature of mongo, postgres and etcd"
)]
fn mistakes_of_optional_stores_are_refused() {
    refused(OPTIONAL, "");
}

#[test]
fn a_url_that_is_no_text_is_refused() {
    let mut command = at("", &["exec", "x", "--", "echo", "ran"]);
    command.env("DLOCK_URL", OsStr::from_bytes(b"redis://\xff/"));
    let out = run(command);
    assert!(
        is_right(&out, 64, &["$DLOCK_URL is not UTF-8".to_owned()]),
        "{out:?}"
    );
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
        .filter_map(|(line, code, words)| {
            let line = told(line);
            let mut shell = beside(&at(url, &[]), "sh");
            shell.args(["-c", &format!("exec '{DLOCK}' {line}")]);
            let out = run(shell);
            let words: Vec<_> = words.iter().map(|words| told(words)).collect();
            (!is_right(&out, *code, &words)).then(|| format!("{line} {words:?}: {out:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The code, the words, no secret, nothing of Rust's debug output, no tip about `--` but where it is among the words,
/// none that makes a value of an option the command, and no command that ran.
fn is_right(out: &Out, code: i32, words: &[String]) -> bool {
    let error = &out.stderr;
    out.code() == code
        && words.iter().all(|words| error.contains(words.as_str()))
        && error.contains("comes after --") == words.iter().any(|it| it.contains("NAME -- COMMAND"))
        && [
            "canary",
            "Some(",
            "Err(",
            "Error(",
            "ResponseError",
            "InvalidClientConfig",
            "Duration",
            "labels: ",
            "Topology",
            "use '-- ",
        ]
        .iter()
        .all(|text| !error.contains(text))
        && !out.stdout.contains("ran")
}
