//! The command as a process: its group, the terminal, its states.

use crate::{exec::stage::Stage, exit::Exit};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp},
};
use std::{
    ffi::OsString,
    io::{self, IsTerminal},
    os::unix::process::CommandExt,
};

pub(super) struct Child {
    pid: Pid,
    /// It shares our group.
    foreground: bool,
    /// Its group has the terminal while it runs.
    terminal: bool,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Ended(Exit),
    Stopped,
    Nothing,
}

impl Child {
    /// Starts the command through the stage, in a group of its own unless it is to share ours. With a terminal of which we have the
    /// foreground it takes that over.
    pub(super) fn start(
        command: &[OsString],
        variables: Vec<(&'static str, Option<String>)>,
        foreground: bool,
    ) -> io::Result<Self> {
        let terminal = !foreground && in_front();
        let mut stage = Stage::of(command, terminal);
        for (key, value) in variables {
            match value {
                Some(value) => stage.env(key, value),
                None => stage.env_remove(key),
            };
        }
        if !foreground {
            stage.process_group(0);
        }
        let pid = stage.spawn()?.id();
        let pid = i32::try_from(pid).map_err(io::Error::other)?;
        Ok(Self {
            pid: Pid::from_raw(pid),
            foreground,
            terminal,
        })
    }

    /// Sends a signal to its group; to it alone where that is ours too.
    pub(super) fn signal(&self, signal: Signal) {
        // It may have ended, which its state will tell.
        let _ = if self.foreground {
            kill(self.pid, signal)
        } else {
            killpg(self.pid, signal)
        };
    }

    /// Ends it, in whatever state.
    pub(super) fn terminate(&self) {
        self.signal(Signal::SIGTERM);
        self.signal(Signal::SIGCONT); // one that is stopped would hear nothing
    }

    /// What changed since it was asked last.
    pub(super) fn change(&self) -> Change {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        match waitpid(self.pid, Some(flags)) {
            Ok(WaitStatus::Exited(_, code)) => {
                Change::Ended(Exit(u8::try_from(code & 0xff).unwrap_or(u8::MAX)))
            }
            Ok(WaitStatus::Signaled(_, signal, _)) => Change::Ended(Exit::signal(signal as i32)),
            Ok(WaitStatus::Stopped(..)) => Change::Stopped,
            Err(Errno::ECHILD) => Change::Ended(Exit::BUG), // nobody else reaps it
            _ => Change::Nothing,
        }
    }

    /// Takes the terminal back, when the command had it.
    pub(super) fn take_terminal(&self) {
        if self.terminal {
            let _ = tcsetpgrp(io::stdin(), getpgrp()); // it may be gone
        }
    }

    /// Goes on after a stop: with the terminal again if we were brought to the foreground.
    pub(super) fn resume(&self) {
        if self.terminal && in_front() {
            let _ = tcsetpgrp(io::stdin(), self.pid);
        }
        self.signal(Signal::SIGCONT);
    }

    /// Whether stopping it stops the job, as the shell sees it.
    pub(super) fn is_job(&self) -> bool {
        !self.foreground
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.take_terminal();
    }
}

/// Whether standard input is a terminal whose foreground is ours.
fn in_front() -> bool {
    let stdin = io::stdin();
    stdin.is_terminal() && tcgetpgrp(&stdin).is_ok_and(|front| front == getpgrp())
}
