//! `dlock lead`: runs a command whenever this process leads.
//!
//! Each term is a lock that is held. The command ends before another process can lead, as that of
//! `dlock exec` ends before another owner can have the lock, and is started again with the next term.

use crate::{
    args::Lead,
    exec::{command::Command, held::Held, watch::Ended},
    exit::Exit,
    output::{Output, span},
    signals::{Ended as Signalled, Signals},
    store::Store,
    withdraw::withdraw,
};
use dlock::{Client, Election, Error, ErrorKind, Guard, Lease, Lock};
use nix::sys::signal::Signal;
use std::{ops::ControlFlow, slice, time::Duration};
use tokio::time::{Instant, sleep};

pub(crate) async fn run(
    client: &Client,
    store: &Store,
    args: Lead,
    signals: &mut Signals,
    output: &Output,
) -> Exit {
    let (lock, candidate) = match Candidate::new(client, store, &args, output) {
        Ok(new) => new,
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    let exit = loop {
        if let ControlFlow::Break(exit) = candidate.campaign(signals).await {
            break exit;
        }
    };
    withdraw(client, slice::from_ref(&lock), output).await;
    exit
}

struct Candidate<'a> {
    election: Election,
    command: Command<'a>,
    /// How long it waits after an error of the store.
    pause: Duration,
    output: &'a Output,
}

impl<'a> Candidate<'a> {
    fn new(
        client: &'a Client,
        store: &'a Store,
        args: &'a Lead,
        output: &'a Output,
    ) -> Result<(Lock, Self), Error> {
        let (mut lock, mut election) = (
            client.lock(&args.run.name)?,
            client.election(&args.run.name)?,
        );
        if let Some(lease) = args.run.lease.map(Lease::renewed) {
            (lock, election) = (lock.lease(lease), election.lease(lease));
        }
        let command = Command::new(client, store, &args.run, &lock, output)?;
        let around = command.passes.of(&client.capabilities().store, lock.name());
        if around.is_some() {
            let name = lock.name();
            return Err(Error::misuse(format!(
                "the dlock around this one holds {name:?}, so this one would wait for it for ever: choose another name"
            )));
        }
        let pause = lock.effective_lease()?.length() / 3;
        let candidate = Self {
            election,
            command,
            pause,
            output,
        };
        Ok((lock, candidate))
    }

    /// Waits until it leads, and runs the command for that term.
    async fn campaign(&self, signals: &mut Signals) -> ControlFlow<Exit> {
        let began = Instant::now();
        match signals.unless(self.election.campaign()).await {
            Ok(Ok(term)) => {
                let (name, token) = (self.election.name(), term.token());
                let after = span(began.elapsed());
                self.output
                    .note(&format!("leads {name:?} after {after}, term {token}"));
                self.lead(term, signals).await
            }
            Ok(Err(error)) if error.is_retryable() => {
                self.output.fail(&error, Exit::UNREACHABLE);
                match signals.unless(sleep(self.pause)).await {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(Signalled(number)) => ControlFlow::Break(Exit::signal(number)),
                }
            }
            Ok(Err(error)) => {
                ControlFlow::Break(self.output.fail(&error, Exit::of(&error, Exit::HELD)))
            }
            Err(Signalled(number)) => ControlFlow::Break(Exit::signal(number)),
        }
    }

    async fn lead(&self, term: Guard, signals: &mut Signals) -> ControlFlow<Exit> {
        let (mut held, ended) = self.command.run(Held::one(term), signals).await;
        let Some(term) = held.single.pop() else {
            return ControlFlow::Break(Exit::BUG);
        };
        let (exit, told) = match ended {
            Ok(Ended {
                lost: true, told, ..
            }) => {
                drop(term); // what may be left of it is released in the background
                return next(told, Exit::LOST);
            }
            Ok(Ended { exit, told, .. }) => (exit, told || ends(exit)),
            Err(exit) => (exit, true),
        };
        if !told {
            self.output.warn(&format!(
                "the command ended by itself, with {}: {:?} is resigned, to campaign again later",
                exit.0,
                term.name()
            ));
        }
        match signals.unless(self.election.resign(term)).await {
            Ok(Ok(_)) => {
                self.output
                    .note(&format!("resigned {:?}", self.election.name()));
                next(told, exit)
            }
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Lost | ErrorKind::NotHeld) => {
                self.output.fail(&error, Exit::LOST);
                next(told, Exit::LOST)
            }
            // The client goes on with the release.
            Ok(Err(error)) => {
                self.output.fail(&error, Exit::UNKNOWN);
                next(told, exit)
            }
            Err(Signalled(_)) if told => ControlFlow::Break(exit),
            Err(Signalled(number)) => ControlFlow::Break(Exit::signal(number)),
        }
    }
}

/// Campaigns again, unless dlock was told to end.
fn next(told: bool, exit: Exit) -> ControlFlow<Exit> {
    match told {
        true => ControlFlow::Break(exit),
        false => ControlFlow::Continue(()),
    }
}

/// Whether the end of the command is the end of dlock. A key of the terminal, and its end, reach the command
/// alone. A command that cannot be executed now cannot be later.
fn ends(exit: Exit) -> bool {
    let by_terminal = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP];
    by_terminal
        .map(|signal| Exit::signal(signal as i32))
        .contains(&exit)
        || [Exit::NOT_EXECUTABLE, Exit::NOT_FOUND].contains(&exit)
}
