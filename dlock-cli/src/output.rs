//! What people and programs read.

use crate::{
    args::{Cli, Command},
    exit::Exit,
};
use dlock::{Error, Snapshot};
use serde_json::{Value, json};
use std::{
    error::Error as _,
    io::{self, IsTerminal, Write},
    time::Duration,
};
use tracing_subscriber::filter::LevelFilter;

#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    quiet: bool,
    verbose: u8,
    /// Standard output is the child's.
    child: bool,
}

impl Output {
    pub(crate) fn new(cli: &Cli) -> Self {
        Self {
            json: cli.json,
            quiet: cli.quiet,
            verbose: cli.verbose,
            child: matches!(cli.command, Command::Exec(_)),
        }
    }

    /// Lets the library speak, on standard error.
    pub(crate) fn log(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::OFF,
            (_, 0) => LevelFilter::ERROR,
            (_, 1) => LevelFilter::INFO,
            _ => LevelFilter::DEBUG,
        };
        tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal())
            .init();
    }

    /// Words for people.
    pub(crate) fn say(&self, message: &str) {
        drop(writeln!(io::stderr(), "dlock: {message}")); // nobody is left to tell
    }

    /// Words that may be left out.
    pub(crate) fn warn(&self, message: &str) {
        if !self.quiet {
            self.say(message);
        }
    }

    /// A result: for programs, or for people.
    pub(crate) fn result(&self, object: &Value, words: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{object}")?;
        } else {
            writeln!(out, "{words}")?;
        }
        out.flush()
    }

    /// Prints a result; the exit code tells when that failed.
    pub(crate) fn print(&self, object: &Value, words: &str, exit: Exit) -> Exit {
        match self.result(object, words) {
            Ok(()) => exit,
            Err(_) => Exit::OUTPUT,
        }
    }

    /// Prints an error and gives the code back.
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
        let name = error.name().map(ToString::to_string);
        self.error(&kind(error), &message, error.backend(), name.as_deref());
        exit
    }

    /// Prints what was wrong with the call.
    pub(crate) fn misuse(&self, message: &str) {
        self.error("Misuse", message, "", None);
    }

    fn error(&self, kind: &str, message: &str, backend: &str, name: Option<&str>) {
        if !self.json {
            return self.say(message);
        }
        let object = json!({"error": {
            "kind": kind, "message": message, "backend": backend, "name": name,
        }});
        let written = if self.child {
            writeln!(io::stderr(), "{object}")
        } else {
            writeln!(io::stdout(), "{object}")
        };
        drop(written); // nobody is left to tell
    }
}

/// The kind as one word.
fn kind(error: &Error) -> String {
    let kind = format!("{:?}", error.kind());
    kind.split([' ', '{']).next().unwrap_or_default().to_owned()
}

/// A name at one moment, for programs.
pub(crate) fn object(snapshot: &Snapshot, backend: &str) -> Value {
    let holder = snapshot.holders.first();
    let note = holder
        .map(|holder| &holder.note)
        .filter(|note| !note.host.is_empty());
    json!({
        "name": snapshot.name.as_str(),
        "held": !snapshot.holders.is_empty(),
        "owner": holder.map(|holder| holder.owner.to_string()),
        "hold": Value::Null,
        "token": holder.and_then(|holder| holder.token).map(|token| token.to_string()),
        "holds": snapshot.holds,
        "lease_ms": Value::Null,
        "remaining_ms": holder.and_then(|holder| holder.rest).map(millis),
        "shut_ms": snapshot.shut.map(millis),
        "age_ms": snapshot.age.map(millis),
        "waiters": snapshot.waiters,
        "metadata": note.map(|note| json!({"host": note.host, "pid": note.pid})),
        "backend": backend,
    })
}

/// The same for people, on one line.
pub(crate) fn words(snapshot: &Snapshot) -> String {
    let mut words = snapshot.name.as_str().escape_debug().to_string();
    let Some(holder) = snapshot.holders.first() else {
        match snapshot.shut {
            Some(rest) => words.push_str(&format!("\tshut for {}", span(rest))),
            None => words.push_str("\tfree"),
        }
        return words;
    };
    words.push_str(&format!("\theld by #{}", holder.owner));
    if !holder.note.host.is_empty() {
        let note = &holder.note;
        words.push_str(&format!(" (process {} on {})", note.pid, note.host));
    }
    if let Some(token) = holder.token {
        words.push_str(&format!(", token {token}"));
    }
    if snapshot.holds > 1 {
        words.push_str(&format!(", {} holds", snapshot.holds));
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
    words
}

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn span(span: Duration) -> String {
    humantime::format_duration(Duration::from_millis(millis(span))).to_string()
}
