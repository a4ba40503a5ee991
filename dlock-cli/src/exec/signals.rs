//! Signals: those that end us, those that the command gets, those of job control.

use nix::sys::signal::{SigSet, Signal as Number, raise};
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) struct Signals {
    ends: [(Signal, Number); 4],
    others: [(Signal, Number); 3],
    stop: Signal,
    cont: Signal,
    child: Signal,
}

/// What came.
#[derive(Clone, Copy, Debug)]
pub(super) enum Heard {
    /// A signal that would end us: the command gets it, and while there is none we withdraw.
    End(i32),
    /// A signal for the command alone.
    Forward(Number),
    /// Ctrl-Z, or somebody said so.
    Stop,
    /// We go on.
    Continue,
    /// The state of the child changed.
    Child,
}

impl Signals {
    /// Listens from here on; what would have ended us no longer does.
    pub(super) fn listen() -> io::Result<Self> {
        // Taking the terminal back from the background would stop us otherwise.
        let mut blocked = SigSet::empty();
        blocked.add(Number::SIGTTOU);
        blocked.thread_block()?;
        Ok(Self {
            ends: [
                heard(Number::SIGINT)?,
                heard(Number::SIGTERM)?,
                heard(Number::SIGHUP)?,
                heard(Number::SIGQUIT)?,
            ],
            others: [
                heard(Number::SIGUSR1)?,
                heard(Number::SIGUSR2)?,
                heard(Number::SIGWINCH)?,
            ],
            stop: heard(Number::SIGTSTP)?.0,
            cont: heard(Number::SIGCONT)?.0,
            child: heard(Number::SIGCHLD)?.0,
        })
    }

    /// # Cancel safety
    /// No signal is lost when it is dropped.
    pub(super) async fn next(&mut self) -> Heard {
        let [(int, a), (term, b), (hup, c), (quit, d)] = &mut self.ends;
        let [(usr1, e), (usr2, f), (winch, g)] = &mut self.others;
        tokio::select! {
            biased;
            _ = self.child.recv() => Heard::Child,
            _ = int.recv() => Heard::End(*a as i32),
            _ = term.recv() => Heard::End(*b as i32),
            _ = hup.recv() => Heard::End(*c as i32),
            _ = quit.recv() => Heard::End(*d as i32),
            _ = usr1.recv() => Heard::Forward(*e),
            _ = usr2.recv() => Heard::Forward(*f),
            _ = winch.recv() => Heard::Forward(*g),
            _ = self.stop.recv() => Heard::Stop,
            _ = self.cont.recv() => Heard::Continue,
        }
    }
}

fn heard(number: Number) -> io::Result<(Signal, Number)> {
    Ok((signal(SignalKind::from_raw(number as i32))?, number))
}

/// Stops this process, as the shell that started it expects of a job; returns when it is continued. Nothing renews the lock meanwhile.
pub(super) fn stop_ourselves() {
    let _ = raise(Number::SIGSTOP); // a signal to ourselves does not fail
}
