//! Between the start of the command and its end.

use crate::{
    exec::{
        child::{Change, Child},
        signals::{Heard, Signals, stop_ourselves},
    },
    exit::Exit,
    output::Output,
};
use dlock::{Guard, State};
use nix::sys::signal::Signal;
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct Watch<'a> {
    pub(super) guard: &'a Guard,
    pub(super) kill: bool,
    pub(super) grace: Duration,
    pub(super) output: &'a Output,
}

/// How the command ended.
pub(super) struct Ended {
    pub(super) exit: Exit,
    /// The lock was lost, or about to be, while it ran.
    pub(super) lost: bool,
}

/// Where it stands with the lock.
enum Course {
    Safe,
    /// TERM was sent; KILL follows then.
    Ending(Instant),
    /// Nothing more to be done but to wait for the end.
    Done,
}

impl Watch<'_> {
    pub(super) async fn until_ended(&self, child: Child, signals: &mut Signals) -> Ended {
        let mut course = Course::Safe;
        let mut lost = false;
        loop {
            // Asked each time round, so that a change is never missed between two signals.
            match child.change() {
                Change::Ended(exit) => {
                    return Ended {
                        exit,
                        lost: lost || self.guard.check().is_err(),
                    };
                }
                Change::Stopped if child.is_job() => self.stopped(&child),
                Change::Stopped | Change::Nothing => {}
            }
            tokio::select! {
                biased;
                heard = signals.next() => forward(&child, heard),
                () = self.danger(), if matches!(course, Course::Safe) => {
                    lost = true;
                    course = self.in_danger(&child);
                }
                () = until(&course) => {
                    child.signal(Signal::SIGKILL);
                    course = Course::Done;
                }
            }
        }
    }

    /// Resolves when the lock is lost, or so near to it that the command has to end now.
    async fn danger(&self) {
        let margin = if self.kill {
            self.grace
        } else {
            Duration::ZERO
        };
        loop {
            let remaining = self.guard.remaining();
            if remaining <= margin {
                return;
            }
            tokio::select! {
                biased;
                _ = self.guard.lost() => return,
                // Renewals move the end: look again when it would have come, and often enough for a machine that slept.
                () = tokio::time::sleep((remaining - margin).min(Duration::from_secs(1))) => {}
            }
        }
    }

    fn in_danger(&self, child: &Child) -> Course {
        let name = self.guard.name();
        let why = match self.guard.state() {
            State::Lost(reason) => format!("the lock {name:?} is lost: {reason}"),
            _ => format!(
                "the lock {name:?} ends in {:?} and could not be kept",
                self.guard.remaining()
            ),
        };
        if !self.kill {
            self.output.say(&format!(
                "{why}; the command runs on beside the next holder"
            ));
            return Course::Done;
        }
        self.output.say(&format!("{why}; the command is ended"));
        child.terminate();
        // What is left until another may have it, less a little for the kernel; all of the grace, if it is too late for that anyway.
        let rest = self.guard.remaining();
        let wait = if rest.is_zero() {
            self.grace
        } else {
            rest.mul_f64(0.9)
        };
        Course::Ending(Instant::now() + wait)
    }

    /// The command was stopped: so is the job, until the shell continues it. The lock is not kept alive meanwhile.
    fn stopped(&self, child: &Child) {
        child.take_terminal();
        self.output.warn(&format!(
            "stopped: the lock {:?} is not kept alive, and the command will be ended if it comes back after {:?}",
            self.guard.name(),
            self.guard.remaining()
        ));
        stop_ourselves();
        // First the clock, then the command: after its lease it must not run another step.
        if self.guard.check().is_ok() || !self.kill {
            child.resume();
        } else {
            child.signal(Signal::SIGKILL);
        }
    }
}

fn forward(child: &Child, heard: Heard) {
    match heard {
        Heard::End(number) => {
            if let Ok(signal) = Signal::try_from(number) {
                child.signal(signal);
            }
        }
        Heard::Forward(signal) => child.signal(signal),
        // What stops the command stops the job; see `stopped`.
        Heard::Stop => child.signal(Signal::SIGTSTP),
        Heard::Continue => child.signal(Signal::SIGCONT),
        Heard::Child => {}
    }
}

async fn until(course: &Course) {
    match course {
        Course::Ending(at) => tokio::time::sleep_until(*at).await,
        Course::Safe | Course::Done => std::future::pending().await,
    }
}
