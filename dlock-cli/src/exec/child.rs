//! Child process: the command, its process group, its terminal and its states.

use crate::{exec::stage::Stage, exit::Exit};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    },
    unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp},
};
use parking_lot::Mutex;
use std::{
    ffi::OsString,
    fs::File,
    io::{self, IsTerminal},
    os::unix::process::CommandExt,
    sync::Arc,
    time::Duration,
};

pub(super) struct Child {
    pid: Pid,
    target: Target,
    /// Whether it gets the terminal whenever dlock has it.
    wants_terminal: bool,
}

/// What gets the signals of a command: its group, or the command alone if it shares dlock's group.
#[derive(Clone)]
pub(super) struct Target {
    /// Until it is reaped: then another process may get its number.
    pid: Arc<Mutex<Option<Pid>>>,
    /// Whether it shares dlock's process group.
    foreground: bool,
}

impl Target {
    pub(super) fn signal(&self, signal: Signal) {
        // The command may have ended, which its state will show.
        let _ = match *self.pid.lock() {
            Some(pid) if self.foreground => kill(pid, signal),
            Some(pid) => killpg(pid, signal),
            None => Ok(()),
        };
    }

    /// Tells it to end, in whatever state.
    pub(super) fn terminate(&self) {
        self.signal(Signal::SIGTERM);
        self.signal(Signal::SIGCONT); // a stopped process would not act on TERM
    }
}

/// The state of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Ended(Exit),
    Stopped(Signal),
    Nothing,
}

impl Child {
    /// Starts the command through the stage, in a group of its own unless it is to share dlock's. If
    /// dlock's group is the foreground of the terminal on its standard input, the command takes over the
    /// foreground.
    pub(super) fn start(
        command: &[OsString],
        variables: Vec<(&'static str, Option<String>)>,
        (foreground, json): (bool, bool),
    ) -> io::Result<Self> {
        let wants_terminal = !foreground && io::stdin().is_terminal();
        let mut stage = Stage::of(command, wants_terminal && in_front(getpgrp()), json);
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
        let pid = Pid::from_raw(i32::try_from(pid).map_err(io::Error::other)?);
        let target = Target {
            pid: Arc::new(Mutex::new(Some(pid))),
            foreground,
        };
        Ok(Self {
            pid,
            target,
            wants_terminal,
        })
    }

    /// Whether it shares dlock's process group, and with it the signals of the terminal.
    pub(super) fn is_in_our_group(&self) -> bool {
        self.target.foreground
    }

    /// What gets its signals.
    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Sends a signal to its group; to the command alone if it shares dlock's group.
    pub(super) fn signal(&self, signal: Signal) {
        self.target.signal(signal);
    }

    /// Resolves when no process is left in its group, which was killed: a killed process may take a moment to leave, and
    /// must have left before another owner begins. After half a second it gives up, because one that no parent reaps
    /// stays.
    pub(super) async fn group_is_gone(&self) {
        for _ in 0..50 {
            if self.target.foreground || killpg(self.pid, None) == Err(Errno::ESRCH) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns what changed since the last call. When the command has ended and the lock is lost, the rest
    /// of its group is ended too. Until the command is reaped, no other group can have its number.
    pub(super) fn change(&self, lost: impl Fn() -> bool) -> Change {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        if let Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) =
            waitid(Id::Pid(self.pid), flags)
            && !self.target.foreground
            && lost()
        {
            self.signal(Signal::SIGKILL);
        }
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        let mut pid = self.target.pid.lock();
        let change = match waitpid(self.pid, Some(flags)) {
            Ok(WaitStatus::Exited(_, code)) => {
                Change::Ended(Exit(u8::try_from(code & 0xff).unwrap_or(u8::MAX)))
            }
            Ok(WaitStatus::Signaled(_, signal, _)) => Change::Ended(Exit::signal(signal as i32)),
            Ok(WaitStatus::Stopped(_, signal)) => Change::Stopped(signal),
            Err(Errno::ECHILD) => Change::Ended(Exit::BUG), // no other code reaps it
            _ => Change::Nothing,
        };
        if let Change::Ended(_) = change {
            *pid = None;
        }
        change
    }

    /// Whether it gets the terminal whenever dlock has it, and with it the keys that send signals: dlock's group
    /// then gets none of them.
    pub(super) fn wants_terminal(&self) -> bool {
        self.wants_terminal
    }

    /// The command needs the terminal, though its standard input may be none: `ssh` asks for a password there.
    pub(super) fn ask_for_terminal(&mut self) {
        self.wants_terminal = !self.target.foreground;
    }

    /// Gives the command the terminal, if it wants it and dlock has it; returns whether it did.
    pub(super) fn give_terminal(&self) -> bool {
        self.wants_terminal && in_front(getpgrp()) && bring_to_front(self.pid).is_ok()
    }

    /// Takes the terminal back, if the command has it. The shell may have given it to another group.
    pub(super) fn take_terminal(&self) {
        if !self.target.foreground && in_front(self.pid) {
            drop(bring_to_front(getpgrp())); // the terminal may be gone
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.take_terminal();
    }
}

/// The terminal of this session, whatever standard input is.
pub(super) fn terminal() -> io::Result<File> {
    File::open("/dev/tty")
}

/// Whether this group is in the foreground of the terminal.
fn in_front(group: Pid) -> bool {
    terminal().is_ok_and(|terminal| tcgetpgrp(&terminal) == Ok(group))
}

/// Makes this group the foreground of the terminal.
pub(super) fn bring_to_front(group: Pid) -> io::Result<()> {
    Ok(tcsetpgrp(terminal()?, group)?)
}
