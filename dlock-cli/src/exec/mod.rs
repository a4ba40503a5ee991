//! `dlock exec`: runs a command under a lock.
//!
//! The command is a child process in a process group of its own. Signals are forwarded to it, job control
//! works through dlock, and dlock returns its exit code. The command ends before another owner can have the
//! lock: dlock kills it when the lock is lost, and the kernel kills it when dlock dies.

mod child;
mod passes;
mod stage;
mod watch;

pub(crate) use stage::Stage;

use crate::{
    args::{Exec, OnLost},
    by_hand::{held, within},
    cleanup::{until, withdraw},
    exit::Exit,
    output::{Output, span},
    signals::{Ended as Signalled, Signals},
    store::{self, Store},
};
use child::Child;
use dlock::{
    Client, Error, ErrorKind, Guard, Lease, Lock, ReleaseOutcome, TimeoutPhase, driver::DriverError,
};
use passes::Passes;
use std::{ffi::OsString, time::Duration};
use tokio::time::{Instant, timeout};
use watch::{Ended, Watch};

pub(crate) async fn run(
    client: &Client,
    store: &Store,
    args: Exec,
    signals: &mut Signals,
    output: &Output,
) -> Exit {
    let busy = Exit(args.conflict_exit_code);
    let job = match Job::new(client, store, args, output) {
        Ok(job) => job,
        Err(error) => return output.fail(&error, Exit::of(&error, busy)),
    };
    let began = Instant::now();
    let exit = match signals.unless(job.enter()).await {
        Ok(Ok(Some(guard))) => {
            output.note(&format!(
                "acquired {:?} after {}, token {}",
                job.args.name,
                span(began.elapsed()),
                guard.token()
            ));
            job.hold(guard, signals).await
        }
        Ok(Ok(None)) => held(client, &job.args.name, None, output, busy).await,
        Ok(Err(error)) if is_busy(&error) => {
            held(client, &job.args.name, Some(&error), output, busy).await
        }
        Ok(Err(error)) => output.fail(&error, Exit::of(&error, busy)),
        Err(Signalled(number)) => Exit::signal(number),
    };
    withdraw(client, &job.lock, output).await;
    exit
}

fn is_busy(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Timeout {
            phase: TimeoutPhase::Wait
        }
    )
}

struct Job<'a> {
    client: &'a Client,
    store: &'a Store,
    lock: Lock,
    passes: Passes,
    grace: Duration,
    args: Exec,
    output: &'a Output,
}

impl<'a> Job<'a> {
    fn new(
        client: &'a Client,
        store: &'a Store,
        args: Exec,
        output: &'a Output,
    ) -> Result<Self, Error> {
        let lock = terms(client, &args)?;
        let grace = grace(&lock, args.kill_grace)?;
        Ok(Self {
            client,
            store,
            lock,
            passes: Passes::inherited(),
            grace,
            args,
            output,
        })
    }

    /// Acquires, or enters the incarnation that an outer `dlock exec` of the same name holds.
    async fn enter(&self) -> Result<Option<Guard>, Error> {
        let store = &self.client.capabilities().store;
        let limit = self.args.wait_args.limit();
        // A pass that is over never becomes an acquire of its own: the holder of the outer lock has lost
        // it.
        let Some(pass) = self.passes.of(store, self.lock.name()) else {
            return within(&self.lock, limit).await;
        };
        let joining = self.lock.join(pass);
        let joined = match limit {
            None => joining.await,
            Some(limit) => {
                let limit = if limit.is_zero() { ANSWER } else { limit };
                match timeout(limit, joining).await {
                    Ok(joined) => joined,
                    Err(_) => return Err(unanswered(limit)),
                }
            }
        };
        joined.map(Some)
    }

    /// Runs the command while the lock is held.
    async fn hold(&self, guard: Guard, signals: &mut Signals) -> Exit {
        let most = self.args.max_hold;
        let most = most.map(|most| (most, Instant::now() + most));
        let child = Child::start(
            &command(&self.args),
            self.variables(&guard),
            (self.args.foreground, self.output.is_json()),
        );
        let child = match child {
            Ok(child) => child,
            Err(error) => {
                let message = format!(
                    "the command could not be started: {error}: is /proc mounted, and a process or descriptor left (ulimit -u, -n)?"
                );
                let backend = self.client.capabilities().backend;
                self.output
                    .problem("Exec", &message, backend, Some(&self.args.name));
                self.give_back(guard, signals).await;
                return Exit::NOT_EXECUTABLE;
            }
        };
        let watch = Watch {
            guard: &guard,
            backend: self.client.capabilities().backend,
            kill: self.args.on_lost == OnLost::Kill,
            grace: self.grace,
            most,
            output: self.output,
        };
        let Ended { exit, lost } = watch.until_ended(child, signals).await;
        if lost {
            drop(guard); // `withdraw` releases the lock, if it is not over
            return Exit::LOST;
        }
        if self.give_back(guard, signals).await {
            exit
        } else {
            Exit::LOST
        }
    }

    /// Releases; returns whether the lock was held to the end. A signal meanwhile leaves the release to
    /// `withdraw`.
    async fn give_back(&self, guard: Guard, signals: &mut Signals) -> bool {
        let (name, least) = (&self.args.name, guard.min_hold_remaining());
        let released = signals.unless(guard.release()).await;
        match released {
            Ok(Ok(outcome)) => {
                let unavailable = match outcome {
                    ReleaseOutcome::MinHold { rest } => Some(rest),
                    _ => None,
                };
                let until_then =
                    unavailable.map(|rest| format!("; unavailable until {}", until(rest)));
                let until_then = until_then.unwrap_or_default();
                self.output.note(&format!("released {name:?}{until_then}"));
                self.keep_unavailable(unavailable.unwrap_or(least), signals)
                    .await;
                true
            }
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Lost | ErrorKind::NotHeld) => {
                self.output.fail(&error, Exit::LOST);
                false
            }
            // `withdraw` reports what the store did not confirm.
            Ok(Err(error)) if error.kind() == ErrorKind::Indeterminate => true,
            Ok(Err(error)) => {
                self.output.fail(&error, Exit::UNKNOWN);
                true
            }
            Err(Signalled(_)) => true,
        }
    }

    /// Where this client's session keeps the lock unavailable, dlock stays until the minimum hold ends:
    /// without dlock the lock would stay unavailable until the session is over.
    async fn keep_unavailable(&self, rest: Duration, signals: &mut Signals) {
        if !self.client.capabilities().session_bound || rest.is_zero() {
            return;
        }
        let opened = async {
            tokio::time::sleep(rest).await;
            // The driver makes the lock available now. While another owner holds it, that cannot be
            // observed.
            for _ in 0..OPENING.as_millis() / POLL_INTERVAL.as_millis() {
                tokio::time::sleep(POLL_INTERVAL).await;
                let seen = self.client.admin().inspect(self.lock.name().as_str()).await;
                if seen.is_ok_and(|seen| seen.unavailable_for.is_none()) {
                    return true;
                }
            }
            false
        };
        if !matches!(signals.unless(opened).await, Ok(true)) {
            let session = self.lock.effective_lease().unwrap_or_default().length();
            self.output.warn(&format!(
                "{:?} stays unavailable until our session is over, at {} at the latest",
                self.args.name,
                until(session)
            ));
        }
    }

    fn variables(&self, guard: &Guard) -> Vec<(&'static str, Option<String>)> {
        let caps = self.client.capabilities();
        let passes = match guard.pass() {
            Ok(pass) if !self.args.no_pass => Some(self.passes.with(&pass)),
            _ => self.passes.without(&caps.store, guard.name()),
        };
        let url = self.args.pass_url.then(|| self.store.url.clone());
        let withheld = url.is_none() && !self.store.is_default;
        vec![
            (store::URL, url),
            (store::WITHHELD, withheld.then(|| "1".to_owned())),
            ("DLOCK_HELD", Some("1".to_owned())),
            ("DLOCK_NAME", Some(guard.name().to_string())),
            ("DLOCK_TOKEN", Some(guard.token().to_string())),
            ("DLOCK_BACKEND", Some(caps.backend.to_owned())),
            (passes::VARIABLE, passes),
        ]
    }
}

/// The lock with the options applied.
fn terms(client: &Client, args: &Exec) -> Result<Lock, Error> {
    let mut lock = client.lock(&args.name)?;
    if let Some(lease) = args.lease {
        lock = lock.lease(Lease::renewed(lease));
    }
    if let Some(most) = args.max_hold {
        lock = lock.max_hold(most);
    }
    if let Some(least) = args.min_hold {
        lock = lock.min_hold(least);
    }
    Ok(lock)
}

/// How long before the end the command gets TERM: the option, else 2 s or a fifth of the lease.
fn grace(lock: &Lock, asked: Option<Duration>) -> Result<Duration, Error> {
    let lease = lock.effective_lease().unwrap_or_default().length();
    match asked {
        // A renewal is due after a third and has failed after a half: a longer grace would end commands
        // whose lock is well.
        Some(grace) if grace > lease / 2 => Err(Error::misuse(format!(
            "--kill-grace ({}) must be at most half of the lease ({})",
            span(grace),
            span(lease)
        ))),
        Some(grace) => Ok(grace),
        None => Ok((lease / 5).min(Duration::from_secs(2))),
    }
}

fn command(args: &Exec) -> Vec<OsString> {
    match &args.command_text {
        Some(text) => vec!["sh".into(), "-c".into(), text.clone()],
        None => args.command.clone(),
    }
}

fn unanswered(limit: Duration) -> Error {
    let phase = TimeoutPhase::Request;
    let message = format!("the store did not answer within {}", span(limit));
    DriverError::new(ErrorKind::Timeout { phase }, message).into()
}

/// How long the driver may take to make an unavailable lock available, and the poll interval for that.
const OPENING: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long -n waits for the store to judge a pass, as it would for an acquire.
const ANSWER: Duration = Duration::from_secs(5);
