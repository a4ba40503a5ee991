//! Signals: those that end dlock, those that are forwarded to the command, and those of job control.
//!
//! Signals are blocked and read from a descriptor instead of being handled. So none is missed between two
//! steps, and each says whether it came from the terminal (then the whole group has it already). Signals
//! that were ignored at the start (`nohup`, `&`) stay ignored, and a stop has its default action when dlock
//! wants it.

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal as Number, killpg, raise},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::getpgrp,
};
use std::{collections::VecDeque, fs, io};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
};

/// The signals that are read from now on instead of being acted on. Call it before there is a second
/// thread.
pub(crate) struct Blocked(SigSet);

impl Blocked {
    pub(crate) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let mut heard = SigSet::empty();
        for number in HEARD {
            if ignored & (1 << (number as u32 - 1)) == 0 {
                heard.add(number);
            }
        }
        let mut blocked = heard;
        blocked.add(Number::SIGTTOU); // otherwise taking the terminal back from the background would stop dlock
        blocked.thread_block()?;
        // A program that reads it from a descriptor leaves it blocked, and then no end of a command is seen.
        let mut unblocked = SigSet::empty();
        unblocked.add(Number::SIGCHLD);
        unblocked.thread_unblock()?;
        Ok(Self(heard))
    }
}

/// Makes a write beyond the limit of file sizes an error, as on a full disk, instead of a signal that ends
/// dlock. The command keeps its own action.
pub(crate) fn survive_limits() -> io::Result<()> {
    let mut blocked = SigSet::empty();
    blocked.add(Number::SIGXFSZ);
    Ok(blocked.thread_block()?)
}

/// An event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SignalEvent {
    Signal(Heard),
    /// The state of a child changed.
    Child,
}

/// A signal that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard {
    pub(crate) number: Number,
    /// dlock's whole process group got it: from the terminal, not from a process that meant dlock.
    pub(crate) by_all: bool,
}

/// A signal that ends dlock came first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended(pub(crate) i32);

pub(crate) struct Signals {
    fd: AsyncFd<SignalFd>,
    early: VecDeque<Heard>,
    // With a handler: a dlock that was started with SIGCHLD ignored would get no exit codes.
    child: Signal,
}

impl Signals {
    #[expect(
        deprecated,
        reason = "its replacement is unsafe; a `SignalFd` owns its descriptor and keeps it, which is what that asks for"
    )]
    pub(crate) fn listen(blocked: &Blocked) -> io::Result<Self> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Self {
            fd: AsyncFd::new(SignalFd::with_flags(&blocked.0, flags)?)?,
            early: VecDeque::new(),
            child: signal(SignalKind::child())?,
        })
    }

    /// # Cancel safety
    /// No signal is lost when it is dropped.
    pub(crate) async fn next(&mut self) -> io::Result<SignalEvent> {
        if let Some(heard) = self.early.pop_front() {
            return Ok(SignalEvent::Signal(heard));
        }
        tokio::select! {
            biased;
            _ = self.child.recv() => Ok(SignalEvent::Child),
            read = read(&self.fd) => read.map(SignalEvent::Signal),
        }
    }

    /// Does the work unless a signal ends dlock first: then the work is dropped. Stops with the job
    /// meanwhile.
    pub(crate) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Ended> {
        let mut work = std::pin::pin!(work);
        loop {
            let heard = tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                heard = self.next() => heard,
            };
            match heard {
                Ok(SignalEvent::Signal(heard)) if ENDS.contains(&heard.number) => {
                    return Err(Ended(heard.number as i32));
                }
                Ok(SignalEvent::Signal(heard)) if heard.number == Number::SIGTSTP => {
                    self.stop(false);
                }
                Ok(_) => {} // no effect on a wait
                Err(_) => return Ok(work.await),
            }
        }
    }

    /// Whether a signal that ends dlock has come already.
    pub(crate) fn ended(&mut self) -> Option<Ended> {
        self.collect();
        let end = self.early.iter().find(|heard| ENDS.contains(&heard.number));
        end.map(|heard| Ended(heard.number as i32))
    }

    /// Stops this process, or its whole group, as the shell that started it expects of a job. Returns
    /// whether it was stopped, and continued. The kernel does not stop a job that no shell watches. No lock
    /// is renewed meanwhile.
    pub(crate) fn stop(&mut self, group: bool) -> bool {
        // Each call fails only where there is no such process, and this process exists.
        let _ = if group {
            killpg(getpgrp(), Number::SIGTSTP)
        } else {
            raise(Number::SIGTSTP)
        };
        let mut stop = SigSet::empty();
        stop.add(Number::SIGTSTP);
        let _ = stop.thread_unblock(); // the stop happens here
        let _ = stop.thread_block();
        self.collect();
        let stopped = self
            .early
            .iter()
            .any(|heard| heard.number == Number::SIGCONT);
        self.early
            .retain(|heard| !matches!(heard.number, Number::SIGCONT | Number::SIGTSTP));
        stopped
    }

    fn collect(&mut self) {
        while let Ok(Some(signal)) = take(self.fd.get_ref()) {
            self.early.push_back(signal);
        }
    }
}

async fn read(fd: &AsyncFd<SignalFd>) -> io::Result<Heard> {
    loop {
        let mut ready = fd.readable().await?;
        match take(fd.get_ref()) {
            Ok(Some(signal)) => return Ok(signal),
            Ok(None) => ready.clear_ready(),
            Err(error) => return Err(error.into()),
        }
    }
}

fn take(fd: &SignalFd) -> Result<Option<Heard>, Errno> {
    let Some(info) = fd.read_signal()? else {
        return Ok(None);
    };
    let number = i32::try_from(info.ssi_signo).map_err(|_| Errno::EINVAL)?;
    Ok(Some(Heard {
        number: Number::try_from(number)?,
        by_all: info.ssi_code == BY_KERNEL,
    }))
}

/// The signals that were ignored when dlock started, one bit each.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status)
}

fn ignored_in(status: &str) -> u64 {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or_default()
}

/// `si_code` of what the kernel sends, such as Ctrl-C of a terminal.
const BY_KERNEL: i32 = 0x80;

/// The signals that end a wait.
const ENDS: [Number; 4] = [
    Number::SIGINT,
    Number::SIGTERM,
    Number::SIGHUP,
    Number::SIGQUIT,
];

const HEARD: [Number; 9] = [
    Number::SIGINT,
    Number::SIGTERM,
    Number::SIGHUP,
    Number::SIGQUIT,
    Number::SIGUSR1,
    Number::SIGUSR2,
    Number::SIGWINCH,
    Number::SIGTSTP,
    Number::SIGCONT,
];

#[cfg(test)]
mod tests {
    use super::ignored_in;

    #[test]
    fn ignored_signals_are_read_from_the_kernel_s_table() {
        assert_eq!(
            ignored_in("Name:\tx\nSigIgn:\t0000000000001003\nSigCgt:\t1\n"),
            0x1003
        );
        assert_eq!(ignored_in(""), 0);
    }
}
