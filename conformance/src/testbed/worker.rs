//! Worker process: a part of a test in a process of its own, to be suspended and killed.
//!
//! A test binary with its own `main` (`harness = false`) starts itself again:
//!
//! ```no_run
//! use std::time::Duration;
//! use dlock_conformance::testbed::worker::{self, Worker};
//!
//! #[tokio::main]
//! async fn main() -> std::io::Result<()> {
//!     if let Some(job) = worker::entry() {
//!         return worker::say(&format!("held {}", job.arg("url")?));
//!     }
//!     let mut holder = Worker::spawn("hold", &[("url", "redis://127.0.0.1/")])?;
//!     assert_eq!(holder.expect("held ", Duration::from_secs(5)).await?, "redis://127.0.0.1/");
//!     holder.kill_9().await?;
//!     Ok(())
//! }
//! ```

use super::process;
use rustix::process::Pid;
use std::{
    collections::{BTreeMap, VecDeque},
    env,
    io::{self, BufRead, Write},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    sync::mpsc,
    time::timeout,
};

/// The job that a worker process was started for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The name given to [`Worker::spawn`].
    pub name: String,
    args: BTreeMap<String, String>,
}

impl Job {
    /// The value of an argument.
    ///
    /// # Errors
    /// When the job has no such argument.
    pub fn arg(&self, key: &str) -> io::Result<&str> {
        let missing = || invalid(format!("the job {} needs an argument {key}", self.name));
        self.args.get(key).map(String::as_str).ok_or_else(missing)
    }
}

/// The job of this process, if it is a worker. Call it first in `main`.
#[must_use]
pub fn entry() -> Option<Job> {
    job_of(
        env::vars_os()
            .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?))),
    )
}

fn job_of(variables: impl Iterator<Item = (String, String)>) -> Option<Job> {
    let mut name = None;
    let mut args = BTreeMap::new();
    for (key, value) in variables {
        if key == JOB {
            name = Some(value);
        } else if let Some(key) = key.strip_prefix(ARG) {
            args.insert(key.to_ascii_lowercase(), value);
        }
    }
    Some(Job { name: name?, args })
}

/// In a worker: sends one line to the process that started it.
///
/// # Errors
/// When that process is gone.
pub fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// In a worker: the lines that its parent process sends. The channel closes when the parent is gone;
/// the worker should then end.
#[must_use]
pub fn commands() -> mpsc::Receiver<String> {
    let (feed, lines) = mpsc::channel(COMMANDS);
    // Reading standard input cannot be cancelled, so no task of a runtime may do it: the runtime would never end.
    thread::spawn(move || {
        let read = io::stdin().lock().lines().map_while(Result::ok);
        read.take_while(|line| feed.blocking_send(line.clone()).is_ok())
            .for_each(drop);
    });
    lines
}

/// A process that runs one job of this same binary. Dropping it kills it.
#[derive(Debug)]
pub struct Worker {
    job: String,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    commands: Option<ChildStdin>,
}

impl Worker {
    /// Starts a worker, in which [`entry`] returns the job with these arguments.
    ///
    /// It shares the standard error of this process. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the process cannot be started, or a key is not made of `a-z`, `0-9` and `_`.
    pub fn spawn(job: &str, args: &[(&str, &str)]) -> io::Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        for (key, _) in env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with(ARG)) {
            command.env_remove(key); // a worker's own arguments are not passed on to its workers
        }
        command.env(JOB, job);
        for (key, value) in args {
            if !key
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
            {
                return Err(invalid(format!(
                    "a worker's argument cannot be named {key:?}"
                )));
            }
            command.env(format!("{ARG}{}", key.to_ascii_uppercase()), value);
        }
        Self::run(job, &command)
    }

    /// Starts another program as a worker, which reads and writes lines as a job of this binary would.
    ///
    /// It shares the standard error of this process. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn run(job: &str, command: &Command) -> io::Result<Self> {
        let mut child = start(process::tied(command))?;
        let gone = || io::Error::other("BUG: a pipe of a new worker is missing");
        let lines = BufReader::new(child.stdout.take().ok_or_else(gone)?).lines();
        let commands = child.stdin.take();
        Ok(Self {
            job: job.to_owned(),
            child,
            lines,
            commands,
        })
    }

    /// The next line of its output; `None` when it has ended and all lines have been read.
    ///
    /// # Errors
    /// When the line is not UTF-8.
    ///
    /// # Cancel safety
    /// Dropped early, no line is lost.
    pub async fn line(&mut self) -> io::Result<Option<String>> {
        self.lines.next_line().await
    }

    /// Waits for a line that begins with `prefix` and returns the rest of it. Other lines are dropped.
    ///
    /// # Errors
    /// When it ends, or the limit passes, before such a line. The message has the last lines that came
    /// instead.
    ///
    /// # Cancel safety
    /// If dropped early, the skipped lines are lost, no others.
    pub async fn expect(&mut self, prefix: &str, limit: Duration) -> io::Result<String> {
        let mut others = VecDeque::new();
        let found = timeout(limit, async {
            while let Some(line) = self.lines.next_line().await? {
                if let Some(rest) = line.strip_prefix(prefix) {
                    return Ok(Some(rest.to_owned()));
                }
                others.push_back(line);
                others.drain(..others.len().saturating_sub(LINES_SHOWN));
            }
            Ok::<_, io::Error>(None)
        });
        let (kind, why) = match found.await {
            Ok(Ok(Some(rest))) => return Ok(rest),
            Ok(Ok(None)) => (io::ErrorKind::UnexpectedEof, "before it ended".to_owned()),
            Ok(Err(error)) => return Err(error),
            Err(_) => (io::ErrorKind::TimedOut, format!("within {limit:?}")),
        };
        let message = format!(
            "worker {} did not say {prefix:?} {why}, but {others:?}",
            self.job
        );
        Err(io::Error::new(kind, message))
    }

    /// Sends it a line, which [`commands`] receives.
    ///
    /// # Errors
    /// When it has ended, or [`close`](Self::close) was called.
    ///
    /// # Cancel safety
    /// Dropped early, part of the line may have been sent.
    pub async fn send(&mut self, line: &str) -> io::Result<()> {
        let closed = || io::Error::new(io::ErrorKind::BrokenPipe, "the worker's input was closed");
        let commands = self.commands.as_mut().ok_or_else(closed)?;
        commands.write_all(format!("{line}\n").as_bytes()).await?;
        commands.flush().await
    }

    /// Closes its input: no more lines come.
    pub fn close(&mut self) {
        self.commands = None;
    }

    /// Its process id; `None` once [`wait`](Self::wait) has returned.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Suspends it (SIGSTOP); returns once it is stopped.
    ///
    /// # Errors
    /// When it has ended and been waited for.
    pub fn stop(&self) -> io::Result<()> {
        process::stop(self.running()?)
    }

    /// Resumes it (SIGCONT).
    ///
    /// # Errors
    /// When it has ended and been waited for.
    pub fn cont(&self) -> io::Result<()> {
        process::cont(self.running()?)
    }

    /// Kills it (SIGKILL), suspended or not, and waits for its end. Its earlier output can still be
    /// read.
    ///
    /// # Errors
    /// When the operating system refuses.
    ///
    /// # Cancel safety
    /// Killed by the first poll; if dropped early, it has not been waited for.
    pub async fn kill_9(&mut self) -> io::Result<ExitStatus> {
        if self.child.id().is_some() {
            self.child.start_kill()?;
        }
        self.child.wait().await
    }

    /// Waits for its end, with its input left open.
    ///
    /// # Errors
    /// When the operating system refuses.
    ///
    /// # Cancel safety
    /// Dropped early, the process runs on and can be waited for again.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        // tokio's own wait() closes the input, so `commands` keeps it apart.
        self.child.wait().await
    }

    fn running(&self) -> io::Result<Pid> {
        self.child
            .id()
            .and_then(|pid| Pid::from_raw(pid.try_into().ok()?))
            .ok_or_else(|| io::Error::other(format!("worker {} has ended", self.job)))
    }
}

fn start(mut command: Command) -> io::Result<Child> {
    let runtime = tokio::runtime::Handle::try_current().map_err(io::Error::other)?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    process::on_spawner(move || {
        let _entered = runtime.enter();
        tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()
    })
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

const JOB: &str = "DLOCK_WORKER";
const ARG: &str = "DLOCK_WORKER_";
/// Commands sent and not yet read; more fill up the sender's pipe.
const COMMANDS: usize = 64;
/// How many of the unexpected lines a failure lists.
const LINES_SHOWN: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_needs_a_name_and_has_only_its_own_variables() {
        let variable = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let args = [
            variable("DLOCK_WORKER_THE_URL", "a=b"),
            variable("DLOCK_URL", "x"),
        ];
        assert_eq!(job_of(args.clone().into_iter()), None);
        let job = job_of(args.into_iter().chain([variable("DLOCK_WORKER", "hold")])).unwrap();
        assert_eq!(
            (job.name.as_str(), job.arg("the_url").unwrap()),
            ("hold", "a=b")
        );
        assert!(job.arg("url").is_err());
    }
}
