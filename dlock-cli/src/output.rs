//! Output: messages for people, and JSON for programs.

use crate::{
    args::{Cli, Command},
    exit::Exit,
};
use dlock::{Error, ErrorKind, HolderInfo, Mode, Snapshot};
use rustix::fs::{FileType, OFlags};
use serde_json::{Value, json};
use std::{
    error::Error as _,
    fs,
    io::{self, Write},
    os::unix::fs::MetadataExt,
    time::Duration,
};
use tracing_subscriber::filter::LevelFilter;

#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    quiet: bool,
    verbose: u8,
    /// Standard output belongs to the child.
    child: bool,
    /// The `--lease` that was typed.
    lease: Option<Duration>,
}

impl Output {
    pub(crate) fn new(cli: &Cli) -> Self {
        Self {
            json: cli.json,
            quiet: cli.quiet,
            verbose: cli.verbose,
            child: matches!(cli.command, Command::Exec(_) | Command::Lead(_)),
            lease: cli.command.lease(),
        }
    }

    /// Whether a message says that another owner holds a lock.
    pub(crate) fn tells_busy(&self) -> bool {
        self.json || !self.quiet
    }

    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// For errors of the command line itself, before it is parsed.
    pub(crate) fn unread(json: bool) -> Self {
        Self {
            json,
            quiet: false,
            verbose: 0,
            child: true,
            lease: None,
        }
    }

    /// Sends the library's log to standard error. dlock reports the library's warnings itself, in words for
    /// people.
    pub(crate) fn log(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::OFF,
            (_, 0) => LevelFilter::ERROR,
            (_, 1) => LevelFilter::INFO,
            _ => LevelFilter::DEBUG,
        };
        let lines = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(io::stderr)
            .with_ansi(false);
        if self.verbose < 2 {
            lines.without_time().with_target(false).init();
        } else {
            lines.init();
        }
    }

    /// Prints a message for people.
    pub(crate) fn say(&self, message: &str) {
        drop(writeln!(io::stderr(), "dlock: {message}")); // there is no other output left
    }

    /// Prints a message that -q suppresses.
    pub(crate) fn warn(&self, message: &str) {
        if !self.quiet {
            self.say(message);
        }
    }

    /// Prints what happens, with -v.
    pub(crate) fn note(&self, message: &str) {
        if self.verbose > 0 {
            self.say(message);
        }
    }

    /// Whether there is an output to print to. A closed descriptor has become `/dev/null`, open in both
    /// directions.
    pub(crate) fn can_print(&self) -> bool {
        let out = io::stdout();
        let null = fs::metadata("/dev/null").map(|null| null.rdev());
        let is_null = rustix::fs::fstat(&out).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && null.is_ok_and(|null| null == stat.st_rdev)
        });
        let both = rustix::fs::fcntl_getfl(&out)
            .is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDWR);
        !(is_null && both)
    }

    /// Prints a result, for programs or for people.
    pub(crate) fn result(&self, object: &Value, words: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{object}")?;
        } else {
            writeln!(out, "{words}")?;
        }
        out.flush()
    }

    /// Prints a result; the exit code says if that failed.
    pub(crate) fn print(&self, object: &Value, words: &str, exit: Exit) -> Exit {
        match self.result(object, words) {
            Ok(()) => exit,
            Err(_) => Exit::OUTPUT,
        }
    }

    /// Prints an error and returns the code.
    pub(crate) fn fail(&self, error: &Error, exit: Exit) -> Exit {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !message.contains(&cause_text) {
                message.push_str(": ");
                message.push_str(&cause_text);
            }
            source = cause.source();
        }
        // To the library a presence is a lease, too.
        message = message.replace("presence: the lease (", "dlock.presence (");
        if let Some(lease) = self.lease {
            // To the library it is the lease, and to ZooKeeper the session that we asked for.
            for word in ["the lease", "dlock.session"] {
                let (said, typed) = (
                    format!("{word} ({lease:?})"),
                    format!("--lease ({})", span(lease)),
                );
                message = message.replace(&said, &typed);
            }
        }
        if error.kind() == ErrorKind::Unsupported {
            // Only the URL can have asked for another one.
            message = message.replace("the lease (", "dlock.lease (");
        }
        let name = error.name().map(ToString::to_string);
        self.problem(&kind(error), &message, error.backend(), name.as_deref());
        exit
    }

    /// Prints a wrong use.
    pub(crate) fn misuse(&self, message: &str) {
        self.problem("Misuse", message, "", None);
    }

    /// Prints that another owner holds the lock. This is no error, so -q suppresses it where only people
    /// would read it.
    pub(crate) fn busy(&self, message: &str, backend: &str, name: &str) {
        if self.json {
            self.problem("Timeout", message, backend, Some(name));
        } else {
            self.warn(message);
        }
    }

    /// Prints a failure.
    pub(crate) fn problem(&self, kind: &str, message: &str, backend: &str, name: Option<&str>) {
        if !self.json {
            return self.say(message);
        }
        let backend = Some(backend).filter(|backend| !backend.is_empty());
        let object = json!({"error": {
            "kind": kind, "message": message, "backend": backend, "name": name,
        }});
        let written = if self.child {
            writeln!(io::stderr(), "{object}")
        } else {
            writeln!(io::stdout(), "{object}")
        };
        drop(written); // there is no other output left
    }
}

/// The kind as one word.
fn kind(error: &Error) -> String {
    let kind = format!("{:?}", error.kind());
    kind.split([' ', '{']).next().unwrap_or_default().to_owned()
}

/// A result for programs. All fields are always present; `null` is what a command does not know.
pub(crate) fn result(name: &str, backend: &str, known: Value) -> Value {
    let mut object = json!({
        "name": name, "held": Value::Null, "owner": Value::Null, "hold": Value::Null, "token": Value::Null,
        "holds": Value::Null, "mode": Value::Null, "permits": Value::Null, "lease_ms": Value::Null, "remaining_ms": Value::Null, "unavailable_ms": Value::Null,
        "age_ms": Value::Null, "waiters": Value::Null, "metadata": Value::Null, "damaged": Value::Null, "backend": backend,
    });
    if let (Value::Object(object), Value::Object(known)) = (&mut object, known) {
        object.extend(known);
    }
    object
}

/// The state of a name at one moment, for programs.
pub(crate) fn object(snapshot: &Snapshot, backend: &str) -> Value {
    let holder = snapshot.holders.first();
    let note = holder
        .map(|holder| &holder.info)
        .filter(|note| !note.host.is_empty());
    let mode = holder.map(|holder| holder.owner.mode());
    let known = json!({
        "held": snapshot.damaged.is_none().then_some(!snapshot.holders.is_empty()),
        "owner": holder.map(|holder| holder.owner.to_string()),
        "token": holder.and_then(|holder| holder.token).map(|token| token.to_string()),
        "holds": snapshot.damaged.is_none().then_some(snapshot.holds),
        "mode": mode.map(|mode| match mode {
            Mode::Shared => "shared",
            Mode::Permit { .. } => "permit",
            _ => "exclusive",
        }),
        "permits": mode.and_then(|mode| match mode {
            Mode::Permit { of } => Some(of),
            _ => None,
        }),
        "remaining_ms": holder.and_then(|holder| holder.rest).map(millis),
        "unavailable_ms": snapshot.unavailable_for.map(millis),
        "age_ms": snapshot.age.map(millis),
        "waiters": snapshot.waiters,
        "damaged": snapshot.damaged,
        "metadata": note.map(|info| json!({"host": info.host, "pid": info.pid, "note": info.note})),
    });
    result(snapshot.name.as_str(), backend, known)
}

/// The state of a name on one line, for people.
pub(crate) fn words(snapshot: &Snapshot) -> String {
    let name = snapshot.name.as_str().escape_debug();
    let state = busy(snapshot).unwrap_or_else(|| "free".to_owned());
    format!("{name}	{state}")
}

/// Why a lock is not free: its holder, how long it is unavailable, or that its record cannot be read.
/// `None`: it is free.
pub(crate) fn busy(snapshot: &Snapshot) -> Option<String> {
    if let Some(why) = &snapshot.damaged {
        let why = why.escape_debug();
        return Some(format!("damaged: {why}; `dlock break` frees it"));
    }
    let Some(holder) = snapshot.holders.first() else {
        return snapshot
            .unavailable_for
            .map(|rest| format!("unavailable for {}", span(rest)));
    };
    let holds = snapshot.holds;
    let (mut words, first) = match holder.owner.mode() {
        Mode::Shared => (format!("shared by {holds}"), "the first "),
        Mode::Permit { of } => (format!("{holds} of {of} permits held"), "the first "),
        _ => (format!("held by #{}", holder.owner), ""),
    };
    if !holder.info.host.is_empty() {
        words.push_str(&format!(" ({first}process {})", process(&holder.info)));
    }
    if let Some(token) = holder.token {
        words.push_str(&format!(", token {token}"));
    }
    if holds > 1 && first.is_empty() {
        words.push_str(&format!(", {holds} holds"));
    }
    if let Some(age) = snapshot.age {
        words.push_str(&format!(", for {}", span(age)));
    }
    if let Some(rest) = holder.rest {
        words.push_str(&format!(", lease ends in {}", span(rest)));
    }
    if let Some(waiters) = snapshot.waiters.filter(|waiters| *waiters > 0) {
        words.push_str(&format!(", {waiters} waiting"));
    }
    Some(words)
}

/// A holder's process, for people.
pub(crate) fn process(info: &HolderInfo) -> String {
    let HolderInfo {
        host, pid, note, ..
    } = info;
    match note.as_str() {
        "" => format!("{pid} on {host}"),
        note => format!("{pid} on {host}, {note:?}"),
    }
}

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn span(span: Duration) -> String {
    humantime::format_duration(Duration::from_millis(millis(span))).to_string()
}
