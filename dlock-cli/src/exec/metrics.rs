//! Metrics file: what one `dlock exec` did, for a collector that reads files.

use crate::{
    args::{Command, Exec},
    exit::Exit,
    output::Output,
};
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

/// What a run did, until its end.
pub(crate) struct Record {
    /// The file, and the lock that it is about.
    target: Option<(PathBuf, String)>,
    began: Instant,
    acquired: Option<Acquired>,
    pub(super) lost: bool,
}

struct Acquired {
    at: SystemTime,
    since: Instant,
}

impl Record {
    /// A command without `--metrics-file` has no file.
    pub(crate) fn begin(command: &Command) -> Self {
        let target = match command {
            Command::Exec(Exec {
                metrics_file: Some(path),
                run,
                ..
            }) => Some((path.clone(), run.name.clone())),
            _ => None,
        };
        Self {
            target,
            began: Instant::now(),
            acquired: None,
            lost: false,
        }
    }

    pub(super) fn acquired(&mut self) {
        self.acquired = Some(Acquired {
            at: SystemTime::now(),
            since: Instant::now(),
        });
    }

    /// Replaces the file by what this run did.
    pub(crate) fn write(&self, exit: Exit, output: &Output) {
        if let Some((path, lock)) = &self.target
            && let Err(error) = replace(path, &self.text(lock, exit))
        {
            let path = path.display();
            output.say(&format!(
                "--metrics-file {path} could not be written: {error}"
            ));
        }
    }

    fn text(&self, lock: &str, exit: Exit) -> String {
        let (end, now) = (Instant::now(), SystemTime::now());
        let acquired = self.acquired.as_ref();
        let waited = acquired.map_or(end, |acquired| acquired.since) - self.began;
        let held = acquired.map_or(Duration::ZERO, |acquired| end - acquired.since);
        let mut gauges = vec![
            ("end_timestamp_seconds", "When dlock ended", unix(now)),
            (
                "acquired",
                "Whether the lock was acquired",
                f64::from(u8::from(acquired.is_some())),
            ),
            (
                "lost",
                "Whether the lock was lost while the command ran",
                f64::from(u8::from(self.lost)),
            ),
            ("exit_code", "What dlock ended with", f64::from(exit.0)),
            (
                "waited_seconds",
                "How long it waited for the store and the lock",
                waited.as_secs_f64(),
            ),
            (
                "held_seconds",
                "How long it held the lock",
                held.as_secs_f64(),
            ),
        ];
        if let Some(acquired) = acquired {
            gauges.push((
                "acquired_timestamp_seconds",
                "When the lock was acquired",
                unix(acquired.at),
            ));
        }
        let lock = label(lock);
        gauges
            .into_iter()
            .map(|(name, help, value)| {
                format!(
                    "# HELP dlock_exec_{name} {help}\n# TYPE dlock_exec_{name} gauge\n\
                     dlock_exec_{name}{{lock=\"{lock}\"}} {value}\n"
                )
            })
            .collect()
    }
}

/// Readers see the whole file, the old or the new.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let part = folder.join(format!(".dlock-{}", std::process::id()));
    let written = fs::File::create(&part).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        fs::rename(&part, path)
    });
    if written.is_err() {
        drop(fs::remove_file(&part)); // it may not exist
    }
    written
}

fn unix(at: SystemTime) -> f64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// The value of a label, escaped as the exposition format wants it.
fn label(text: &str) -> String {
    text.replace('\\', r"\\")
        .replace('"', r#"\""#)
        .replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::{Record, label};
    use crate::{args::Command, exit::Exit};

    #[test]
    fn a_label_is_escaped() {
        assert_eq!(label("a\\b\"c\nd"), r#"a\\b\"c\nd"#);
    }

    #[test]
    fn a_run_without_a_lock_has_no_time_of_its_acquire() {
        let mut run = Record::begin(&Command::Schema);
        let text = run.text("nightly", Exit::HELD);
        assert!(
            text.contains("dlock_exec_acquired{lock=\"nightly\"} 0\n"),
            "{text}"
        );
        assert!(
            text.contains("dlock_exec_exit_code{lock=\"nightly\"} 1\n"),
            "{text}"
        );
        assert!(!text.contains("acquired_timestamp"), "{text}");
        run.acquired();
        let text = run.text("nightly", Exit::DONE);
        assert!(
            text.contains("dlock_exec_acquired{lock=\"nightly\"} 1\n"),
            "{text}"
        );
        assert!(
            text.contains("dlock_exec_acquired_timestamp_seconds{"),
            "{text}"
        );
    }
}
