//! Between the start of the command and its end.

use crate::{
    exec::child::{Change, Child},
    exit::Exit,
    output::{Output, span},
    signals::{Heard, Signals},
};
use dlock::{Guard, LossReason, State};
use nix::{
    sys::signal::Signal,
    unistd::{getpid, getsid},
};
use std::{
    io::{self, IsTerminal},
    time::Duration,
};
use tokio::time::Instant;

pub(super) struct Watch<'a> {
    pub(super) guard: &'a Guard,
    pub(super) backend: &'static str,
    pub(super) kill: bool,
    pub(super) grace: Duration,
    /// When `--max-hold` ends it.
    pub(super) most: Option<(Duration, Instant)>,
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
        let lost = |course: &Course| !matches!(course, Course::Safe) || self.guard.check().is_err();
        loop {
            // Asked each time round, so that a change is never missed between two signals.
            match child.change(|| self.kill && lost(&course)) {
                Change::Ended(exit) => {
                    let lost = lost(&course);
                    return Ended { exit, lost };
                }
                Change::Stopped(by) => self.stopped(&child, by, signals, &mut course),
                Change::Nothing => {}
            }
            tokio::select! {
                biased;
                heard = signals.next() => match heard {
                    Ok(Heard::Signal(number, all)) => self.heard(&child, number, all, signals, &mut course),
                    Ok(Heard::Child) => {}
                    // Without signals there is no telling when it ends but to ask.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                },
                () = self.danger(), if matches!(course, Course::Safe) => course = self.in_danger(&child),
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
        if !self.kill {
            self.lost("the command runs on beside the next holder");
            return Course::Done;
        }
        self.lost("the command is ended");
        child.terminate();
        // What is left until another may have it, less a quarter: a loaded machine takes its time to run us, and to end the command.
        // All of the grace, if it is too late for that anyway.
        let rest = self.guard.remaining();
        let wait = if rest.is_zero() {
            self.grace
        } else {
            rest * 3 / 4
        };
        Course::Ending(Instant::now() + wait)
    }

    fn lost(&self, so: &str) {
        let name = self.guard.name();
        let remaining = self.guard.remaining();
        // Whose renewals are well has come to no other end. Its end is a little early, as every lease's is.
        let well = matches!(self.guard.state(), State::Held);
        let planned = self
            .most
            .filter(|(most, end)| well || *end <= Instant::now() + remaining + *most / 50 + SLACK);
        let why = match (self.guard.state(), planned) {
            (
                State::Held | State::Uncertain | State::Lost(LossReason::Deadline),
                Some((most, _)),
            ) => {
                format!(
                    "the lock {name:?} has come to its --max-hold of {}",
                    span(most)
                )
            }
            (State::Lost(reason), _) => format!("the lock {name:?} is lost: {reason}"),
            _ => format!(
                "the lock {name:?} ends in {} and could not be kept: the store does not answer",
                span(remaining)
            ),
        };
        let message = format!("{why}; {so}");
        self.output
            .problem("Lost", &message, self.backend, Some(name.as_str()));
    }

    /// The command was stopped: so is the job, until the shell continues it. The lock is not kept alive meanwhile.
    fn stopped(&self, child: &Child, by: Signal, signals: &mut Signals, course: &mut Course) {
        if child.is_in_our_group() || !io::stdin().is_terminal() {
            return; // the shell sees what the group got; or no shell looks: it stays stopped, and the lock is kept alive
        }
        // It wanted the terminal, and meanwhile we were brought to the foreground.
        if matches!(by, Signal::SIGTTIN | Signal::SIGTTOU) && child.give_terminal() {
            child.signal(Signal::SIGCONT);
            return;
        }
        child.take_terminal();
        self.output.warn(&format!(
            "stopped: the lock {:?} is not kept alive, and the command is killed if it is continued after {}",
            self.guard.name(),
            span(self.guard.remaining())
        ));
        if !signals.stop(true) {
            return; // no shell after all
        }
        self.continued(child, course);
    }

    /// First the clock, then the command: after its lease it must not run another step.
    fn continued(&self, child: &Child, course: &mut Course) {
        if self.kill && self.guard.check().is_err() {
            self.lost("the command is killed");
            child.signal(Signal::SIGKILL);
            *course = Course::Done;
            return;
        }
        child.give_terminal();
        child.signal(Signal::SIGCONT);
    }

    fn heard(
        &self,
        child: &Child,
        number: Signal,
        all: bool,
        signals: &mut Signals,
        course: &mut Course,
    ) {
        let has_it = all && child.is_in_our_group() && !meant_for_leaders(number);
        match number {
            // Continued, perhaps after a stop that nobody told us of: its clock comes first.
            Signal::SIGCONT => self.continued(child, course),
            Signal::SIGTSTP if child.is_in_our_group() => {
                if !has_it {
                    child.signal(Signal::SIGTSTP);
                }
                if signals.stop(false) {
                    self.continued(child, course);
                }
            }
            // What stops the command stops the job; see `stopped`.
            number if !has_it => child.signal(number),
            _ => {}
        }
    }
}

/// A terminal that goes away tells the leader of its session alone; whoever else got a HUP of the kernel got it with the whole group.
fn meant_for_leaders(number: Signal) -> bool {
    number == Signal::SIGHUP && getsid(None).is_ok_and(|leader| leader == getpid())
}

async fn until(course: &Course) {
    match course {
        Course::Ending(at) => tokio::time::sleep_until(*at).await,
        Course::Safe | Course::Done => std::future::pending().await,
    }
}

/// Of a clock that is read after the deed.
const SLACK: Duration = Duration::from_millis(50);
