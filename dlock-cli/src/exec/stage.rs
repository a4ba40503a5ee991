//! Stage process: dlock started again in the child, to do without unsafe code what must happen between fork
//! and exec.
//!
//! The stage asks the kernel to kill it when dlock dies, takes the terminal if it is to have it, and
//! becomes the command. The process and its group stay the same throughout.

use crate::{exec::child::bring_to_front, exit::Exit, output::Output};
use nix::{
    sys::signal::SigSet,
    unistd::{Pid, getpgrp, getppid},
};
use std::{
    env,
    ffi::OsString,
    io::{self, ErrorKind},
    os::unix::process::CommandExt,
    process::Command,
};

/// The argument with which only dlock itself starts a stage.
const MARK: &str = "__dlock-stage";

pub(crate) struct Stage {
    parent: i32,
    terminal: bool,
    output: Output,
    command: Vec<OsString>,
}

impl Stage {
    /// The command line that starts the stage.
    pub(super) fn of(command: &[OsString], terminal: bool, json: bool) -> Command {
        let mut stage = Command::new("/proc/self/exe");
        let mode = if terminal { "terminal" } else { "background" };
        stage
            .arg(MARK)
            .arg(std::process::id().to_string())
            .arg(mode)
            .arg(if json { "json" } else { "words" })
            .args(command);
        stage
    }

    /// Whether this process is to be a stage.
    pub(crate) fn asked_for() -> Option<Self> {
        let mut args = env::args_os().skip(1);
        if args.next()? != MARK {
            return None;
        }
        let parent = args.next()?.to_str()?.parse().ok()?;
        let terminal = args.next()? == "terminal";
        let output = Output::unread(args.next()? == "json");
        let command = args.collect();
        Some(Self {
            parent,
            terminal,
            output,
            command,
        })
    }

    /// Becomes the command; returns only on failure.
    pub(crate) fn run(self) -> Exit {
        if let Err(error) = self.prepare() {
            return self.failed(
                &format!("the command could not be prepared: {error}"),
                Exit::NOT_EXECUTABLE,
            );
        }
        let Some((program, args)) = self.command.split_first() else {
            return Exit::USAGE;
        };
        let error = Command::new(program).args(args).exec();
        let first = program.to_string_lossy();
        let first = first.split_once(' ').map(|(first, _)| first);
        let is_text = args.is_empty() && first.is_some_and(|first| !first.contains('/'));
        let program = program.display();
        let (why, exit) = match error.kind() {
            ErrorKind::NotFound if is_text => (
                "not found (text for the shell comes after -c)".to_owned(),
                Exit::NOT_FOUND,
            ),
            ErrorKind::NotFound => (
                "not found (is it on PATH? does its interpreter exist?)".to_owned(),
                Exit::NOT_FOUND,
            ),
            ErrorKind::PermissionDenied => (
                "not executable by this user (chmod +x?)".to_owned(),
                Exit::NOT_EXECUTABLE,
            ),
            _ => (error.to_string(), Exit::NOT_EXECUTABLE),
        };
        self.failed(&format!("{program}: {why}"), exit)
    }

    /// Reports the failure as dlock would: the lock's name and store are in the environment by now.
    fn failed(&self, message: &str, exit: Exit) -> Exit {
        let set = |variable| env::var(variable).ok();
        let (backend, name) = (set("DLOCK_BACKEND"), set("DLOCK_NAME"));
        let backend = backend.unwrap_or_default();
        self.output
            .problem("Exec", message, &backend, name.as_deref());
        exit
    }

    fn prepare(&self) -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The parent may have died before the death signal was set.
        if getppid() != Pid::from_raw(self.parent) {
            return Err(io::Error::other("dlock is gone"));
        }
        if self.terminal {
            // Before the command reads from it, and with SIGTTOU still blocked, as this process was
            // started.
            bring_to_front(getpgrp())?;
        }
        Ok(SigSet::empty().thread_set_mask()?) // last: signals that came meanwhile act now
    }
}
