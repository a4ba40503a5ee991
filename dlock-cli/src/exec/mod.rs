//! `dlock exec`: runs a command under a lock, or under several.
//!
//! The command is a child process in a process group of its own. Signals are forwarded to it, job control
//! works through dlock, and dlock returns its exit code. The command ends before another owner can have the
//! lock: dlock kills it when the lock is lost, and the kernel kills it when dlock dies.

mod child;
mod command;
mod held;
pub(crate) mod lead;
mod metrics;
mod passes;
mod stage;
mod terminator;
mod tokens;
mod watch;

pub(crate) use metrics::Record;
pub(crate) use stage::Stage;

use crate::{
    args::{Exec, OnLost},
    by_hand::{report_held, within},
    exit::Exit,
    output::{Output, span},
    signals::{Ended as Signalled, Signals},
    store::Store,
    withdraw::{until, withdraw},
};
use command::Command;
use dlock::{
    Client, Error, ErrorKind, Guard, Lease, Lock, LockSet, Pass, ReleaseOutcome, SetGuard,
    TimeoutPhase, driver::DriverError,
};
use held::Held;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use watch::Ended;

pub(crate) async fn run(
    client: &Client,
    store: &Store,
    args: Exec,
    signals: &mut Signals,
    record: &mut Record,
    output: &Output,
) -> Exit {
    let conflict = Exit(args.conflict_exit_code);
    let job = match Job::new(client, store, &args, output) {
        Ok(job) => job,
        Err(error) => return output.fail(&error, Exit::of(&error, conflict)),
    };
    let began = Instant::now();
    let exit = match signals.unless(job.enter()).await {
        Ok(Ok(Some(held))) => {
            let after = span(began.elapsed());
            for guard in held.guards() {
                output.note(&format!(
                    "acquired {:?} after {after}, token {}",
                    guard.name(),
                    guard.token()
                ));
            }
            record.acquired();
            let ended = job.hold(held, signals).await;
            record.lost = ended.lost;
            ended.exit
        }
        Ok(Ok(None)) => report_held(client, &job.locks, None, output, conflict).await,
        Ok(Err(error)) if is_busy(&error) => {
            report_held(client, &job.locks, Some(&error), output, conflict).await
        }
        Ok(Err(error)) => output.fail(&error, Exit::of(&error, conflict)),
        Err(Signalled(number)) => Exit::signal(number),
    };
    withdraw(client, &job.locks, output).await;
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
    /// The lock that the command line names first, and the others.
    locks: Vec<Lock>,
    command: Command<'a>,
    args: &'a Exec,
    output: &'a Output,
}

impl<'a> Job<'a> {
    fn new(
        client: &'a Client,
        store: &'a Store,
        args: &'a Exec,
        output: &'a Output,
    ) -> Result<Self, Error> {
        let name = &args.run.name;
        let main = match args.permits {
            Some(permits) => client.semaphore(name, permits)?,
            None if args.shared => client.rw_lock(name)?.read(),
            None => client.lock(name)?,
        };
        let mut locks = vec![terms(main, args)];
        for name in &args.also {
            let lock = terms(client.lock(name)?, args);
            if locks.iter().all(|other| other.name() != lock.name()) {
                locks.push(lock);
            }
        }
        let command = Command::new(client, store, &args.run, &locks[0], output)?;
        let command = Command {
            kill: args.on_lost == OnLost::Kill,
            max_hold: args.max_hold,
            ..command
        };
        Ok(Self {
            client,
            locks,
            command,
            args,
            output,
        })
    }

    /// Acquires all locks or none. An incarnation that an outer dlock holds is entered instead.
    async fn enter(&self) -> Result<Option<Held>, Error> {
        let store = &self.client.capabilities().store;
        let (began, limit) = (Instant::now(), self.args.wait_args.limit());
        let rest = || limit.map(|limit| limit.saturating_sub(began.elapsed()));
        let (mut held, mut free) = (Held::new(self.locks[0].name()), Vec::new());
        for lock in &self.locks {
            // A pass that is over never becomes an acquire of its own: the holder of the outer lock has
            // lost it.
            match self.command.passes.of(store, lock.name()) {
                Some(pass) => held.single.push(join(lock, pass, rest()).await?),
                None => free.push(lock),
            }
        }
        match free[..] {
            [] => {}
            [lock] => match within(lock, rest()).await? {
                Some(guard) => held.single.push(guard),
                None => return Ok(None),
            },
            _ => match all_within(&self.set(&free)?, rest()).await? {
                Some(guard) => held.set = Some(guard),
                None => return Ok(None),
            },
        }
        Ok(Some(held))
    }

    fn set(&self, free: &[&Lock]) -> Result<LockSet, Error> {
        let names = free.iter().map(|lock| lock.name());
        let mut set = self.client.lock_all(names)?;
        if let Some(lease) = self.args.run.lease {
            set = set.lease(Lease::renewed(lease));
        }
        if let Some(most) = self.args.max_hold {
            set = set.max_hold(most);
        }
        Ok(set)
    }

    /// Runs the command while the locks are held.
    async fn hold(&self, held: Held, signals: &mut Signals) -> Ended {
        let (held, ended) = self.command.run(held, signals).await;
        let mut ended = match ended {
            Ok(ended) if ended.lost => {
                drop(held); // `withdraw` releases what is not over
                return Ended {
                    exit: Exit::LOST,
                    ..ended
                };
            }
            Ok(ended) => ended,
            Err(exit) => {
                self.release(held, signals).await;
                return Ended {
                    exit,
                    lost: false,
                    told: false,
                };
            }
        };
        if !self.release(held, signals).await {
            (ended.exit, ended.lost) = (Exit::LOST, true);
        }
        ended
    }

    /// Releases; returns whether all locks were held to the end. A signal meanwhile leaves the release to
    /// `withdraw`.
    async fn release(&self, held: Held, signals: &mut Signals) -> bool {
        let least = held.guards().map(Guard::min_hold_remaining).max();
        let (mut whole, mut keep) = (true, None);
        let Ok(released) = signals.unless(held.release()).await else {
            return true;
        };
        for (name, outcome) in released {
            match outcome {
                Ok(outcome) => {
                    let unavailable = match outcome {
                        ReleaseOutcome::MinHold { rest } => Some(rest),
                        _ => None,
                    };
                    let until_then =
                        unavailable.map(|rest| format!("; unavailable until {}", until(rest)));
                    let until_then = until_then.unwrap_or_default();
                    self.output.note(&format!("released {name:?}{until_then}"));
                    keep = keep.max(unavailable.or(least));
                }
                Err(error) if matches!(error.kind(), ErrorKind::Lost | ErrorKind::NotHeld) => {
                    self.output.fail(&error, Exit::LOST);
                    whole = false;
                }
                // `withdraw` reports what the store did not confirm.
                Err(error) if error.kind() == ErrorKind::Indeterminate => {}
                Err(error) => {
                    self.output.fail(&error, Exit::UNKNOWN);
                }
            }
        }
        self.keep_unavailable(keep.unwrap_or_default(), signals)
            .await;
        whole
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
                let seen = self
                    .client
                    .admin()
                    .inspect(self.locks[0].name().as_str())
                    .await;
                if seen.is_ok_and(|seen| seen.unavailable_for.is_none()) {
                    return true;
                }
            }
            false
        };
        if !matches!(signals.unless(opened).await, Ok(true)) {
            let session = self.locks[0].effective_lease().unwrap_or_default().length();
            self.output.warn(&format!(
                "{:?} stays unavailable until our session is over, at {} at the latest",
                self.args.run.name,
                until(session)
            ));
        }
    }
}

/// The lock with the options applied.
fn terms(mut lock: Lock, args: &Exec) -> Lock {
    if let Some(lease) = args.run.lease {
        lock = lock.lease(Lease::renewed(lease));
    }
    if let Some(most) = args.max_hold {
        lock = lock.max_hold(most);
    }
    if let Some(least) = args.min_hold {
        lock = lock.min_hold(least);
    }
    lock
}

/// Enters an incarnation within the limit.
async fn join(lock: &Lock, pass: &Pass, limit: Option<Duration>) -> Result<Guard, Error> {
    let joining = lock.join(pass);
    let Some(limit) = limit else {
        return joining.await;
    };
    let limit = if limit.is_zero() { ANSWER } else { limit };
    let joined = timeout(limit, joining).await;
    joined.unwrap_or_else(|_| Err(unanswered(limit)))
}

async fn all_within(set: &LockSet, limit: Option<Duration>) -> Result<Option<SetGuard>, Error> {
    match limit {
        None => set.acquire().await.map(Some),
        Some(Duration::ZERO) => set.try_acquire().await,
        Some(limit) => set.acquire_timeout(limit).await.map(Some),
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
