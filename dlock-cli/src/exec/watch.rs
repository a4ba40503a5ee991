//! Watching the command: from its start to its end.

use crate::{
    exec::{
        child::{Change, Child, terminal},
        held::Held,
        terminator::Terminator,
    },
    exit::Exit,
    output::{Output, span},
    signals::{Heard, SignalEvent, Signals},
};
use dlock::{GuardState, LossReason};
use nix::{
    sys::signal::Signal,
    unistd::{getpid, getsid},
};
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct Watch<'a> {
    pub(super) held: &'a Held,
    pub(super) backend: &'static str,
    pub(super) kill: bool,
    /// When `--max-hold` ends it.
    pub(super) most: Option<(Duration, Instant)>,
    pub(super) output: &'a Output,
}

/// How the command ended.
pub(super) struct Ended {
    pub(super) exit: Exit,
    /// The lock was lost, or about to be lost, while the command ran.
    pub(super) lost: bool,
    /// dlock got INT, TERM or QUIT meanwhile.
    pub(super) told: bool,
}

/// The state of the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Safe,
    /// The terminator ends the command.
    Ending,
    /// It runs on without the lock, or was killed before it could.
    Done,
}

impl Watch<'_> {
    pub(super) async fn until_ended(
        &self,
        mut child: Child,
        terminator: &Terminator,
        signals: &mut Signals,
    ) -> Ended {
        let (mut course, mut told, mut looked) = (Course::Safe, false, false);
        let lost = |course: Course| {
            course != Course::Safe || terminator.is_ending() || !self.held.are_held()
        };
        loop {
            // Asked in each round, so that a change between two signals is never missed.
            match child.change(|| self.kill && lost(course)) {
                Change::Ended(exit) => {
                    let lost = lost(course);
                    if lost && course == Course::Safe {
                        self.lost("the command has ended");
                    }
                    if lost && self.kill {
                        child.group_is_gone().await;
                    }
                    self.say_if_late(course);
                    return Ended { exit, lost, told };
                }
                Change::Stopped(by) => self.stopped(&mut child, by, signals, &mut course),
                Change::Nothing => {}
            }
            tokio::select! {
                biased;
                event = signals.next() => match event {
                    Ok(SignalEvent::Signal(heard)) => {
                        told |= TOLD.contains(&heard.number);
                        self.on_signal(&child, heard, signals, &mut course);
                    }
                    Ok(SignalEvent::Child) => {}
                    // Without signals only polling shows when the command ends.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                },
                () = terminator.danger(), if course == Course::Safe => course = self.in_danger(),
                () = self.held.lost(), if !looked => {
                    looked = true;
                    terminator.look();
                }
            }
        }
    }

    fn in_danger(&self) -> Course {
        if self.kill {
            self.lost("the command is ended");
            Course::Ending
        } else {
            self.lost("the command runs on beside the next holder");
            Course::Done
        }
    }

    /// A machine that ran neither dlock nor the command in time cannot keep the promise.
    fn say_if_late(&self, course: Course) {
        if course == Course::Ending && self.held.are_over() {
            self.output.warn(&format!(
                "the command ended after the lock {:?}: it may have run beside the next holder, because this machine did not run dlock in time",
                self.held.weakest().name()
            ));
        }
    }

    pub(super) fn lost(&self, so: &str) {
        let guard = self.held.weakest();
        let (name, remaining) = (guard.name(), guard.remaining());
        // The renewals succeed, so only `--max-hold` can end the lock. Its end is a little early, as every
        // lease's is.
        let well = matches!(guard.state(), GuardState::Held);
        let planned = self
            .most
            .filter(|(most, end)| well || *end <= Instant::now() + remaining + *most / 50 + SLACK);
        let why = match (guard.state(), planned) {
            (
                GuardState::Held | GuardState::Uncertain | GuardState::Lost(LossReason::Deadline),
                Some((most, _)),
            ) => {
                format!(
                    "the lock {name:?} has come to its --max-hold of {}",
                    span(most)
                )
            }
            (GuardState::Lost(reason), _) => format!("the lock {name:?} is lost: {reason}"),
            _ => format!(
                "the lock {name:?} ends in {} and could not be kept: the store does not answer",
                span(remaining)
            ),
        };
        let message = format!("{why}; {so}");
        self.output
            .problem("Lost", &message, self.backend, Some(name.as_str()));
    }

    /// The command was stopped. The job stops too, until the shell continues it. The lock is not renewed
    /// meanwhile.
    fn stopped(&self, child: &mut Child, by: Signal, signals: &mut Signals, course: &mut Course) {
        // The shell sees a stop of the whole group. Without a terminal no shell watches: the command stays
        // stopped, and the lock is renewed.
        if child.is_in_our_group() || terminal().is_err() {
            return;
        }
        // A key that stops reached dlock's group too, unless the command had the terminal.
        let group = child.wants_terminal();
        // The command wanted the terminal, and dlock has it.
        if matches!(by, Signal::SIGTTIN | Signal::SIGTTOU) {
            child.ask_for_terminal();
            if child.give_terminal() {
                child.signal(Signal::SIGCONT);
                return;
            }
        }
        child.take_terminal();
        self.output.warn(&format!(
            "stopped: the lock {:?} is not renewed, and the command is killed if it is continued after {}",
            self.held.weakest().name(),
            span(self.held.remaining())
        ));
        if !signals.stop(group) {
            return; // no shell watches this job
        }
        self.continued(child, course);
    }

    /// First the clock, then the command: after its lease the command must not run another step.
    fn continued(&self, child: &Child, course: &mut Course) {
        if self.kill && !self.held.are_held() {
            self.lost("the command is killed");
            child.signal(Signal::SIGKILL);
            *course = Course::Done;
            return;
        }
        child.give_terminal();
        child.signal(Signal::SIGCONT);
    }

    fn on_signal(&self, child: &Child, heard: Heard, signals: &mut Signals, course: &mut Course) {
        let number = heard.number;
        let has_it = heard.by_all && child.is_in_our_group() && !meant_for_leaders(number);
        match number {
            // Continued, perhaps after a stop that dlock did not see: its clock comes first.
            Signal::SIGCONT => self.continued(child, course),
            Signal::SIGTSTP if child.is_in_our_group() => {
                if !has_it {
                    child.signal(Signal::SIGTSTP);
                }
                if signals.stop(false) {
                    self.continued(child, course);
                }
            }
            // A signal that stops the command stops the job; see `stopped`.
            number if !has_it => child.signal(number),
            _ => {}
        }
    }
}

/// A terminal that goes away sends HUP to the leader of its session alone; if another process got a HUP
/// from the kernel, the whole group got it.
fn meant_for_leaders(number: Signal) -> bool {
    number == Signal::SIGHUP && getsid(None).is_ok_and(|leader| leader == getpid())
}

/// The signals that tell dlock to end. A command may read HUP as "read your settings again".
const TOLD: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT];

/// The margin of a clock that is read after the event.
const SLACK: Duration = Duration::from_millis(50);
