//! `dlock exec`: a command under a lock.
//!
//! The command runs as a child of ours, in a process group of its own; signals are forwarded to it, job control goes through, its exit
//! code is ours. It ends before another can have the lock, whatever becomes of us: when the lock is lost it is killed, and when
//! we are, the kernel kills it.

mod child;
mod passes;
mod signals;
mod stage;
mod watch;

pub(crate) use stage::Stage;

use crate::{
    args::{Exec, OnLost},
    exit::Exit,
    output::{Output, span},
    simple::{held, within},
};
use child::Child;
use dlock::{Client, Error, ErrorKind, Guard, Lock, Outcome};
use passes::Passes;
use signals::{Heard, Signals};
use std::{ffi::OsString, time::Duration};
use watch::{Ended, Watch};

pub(crate) async fn run(client: &Client, args: Exec, output: &Output) -> Exit {
    let busy = Exit(args.conflict_exit_code);
    let lock = match terms(client, &args) {
        Ok(lock) => lock,
        Err(error) => return output.fail(&error, Exit::of(&error, busy)),
    };
    let mut signals = match Signals::listen() {
        Ok(signals) => signals,
        Err(error) => {
            output.say(&format!("signals cannot be listened to: {error}"));
            return Exit::BUG;
        }
    };
    let passes = Passes::inherited();
    let guard = match enter(client, &lock, &passes, &args, &mut signals).await {
        Entered::Held(guard) => guard,
        Entered::Busy => return held(&args.name, output, busy),
        Entered::Failed(error) => {
            let exit = output.fail(&error, Exit::of(&error, busy));
            withdraw(client, output).await;
            return exit;
        }
        Entered::Signalled(number) => {
            withdraw(client, output).await;
            return Exit::signal(number);
        }
    };
    let exit = hold(client, guard, &passes, &args, &mut signals, output).await;
    withdraw(client, output).await;
    exit
}

/// The lock as the options want it.
fn terms(client: &Client, args: &Exec) -> Result<Lock, Error> {
    let mut lock = client.lock(&args.name)?;
    if let Some(lease) = args.lease {
        lock = lock.kept_lease(lease)?;
    }
    if let Some(most) = args.max_hold {
        lock = lock.max_hold(most)?;
    }
    if let Some(least) = args.min_hold {
        lock = lock.at_least_for(least)?;
    }
    Ok(lock)
}

enum Entered {
    Held(Guard),
    Busy,
    Failed(Error),
    Signalled(i32),
}

/// Acquires, or enters the incarnation that an outer `dlock exec` of the same name holds. A signal meanwhile withdraws.
async fn enter(
    client: &Client,
    lock: &Lock,
    passes: &Passes,
    args: &Exec,
    signals: &mut Signals,
) -> Entered {
    let store = &client.capabilities().store;
    let acquiring = async {
        match passes.of(store, lock.name()) {
            // One that is over never becomes an acquire of its own: whoever holds the outer one has lost it.
            Some(pass) => lock.join(pass).await.map(Some),
            None => within(lock, args.patience.limit()).await,
        }
    };
    let mut acquiring = std::pin::pin!(acquiring);
    loop {
        tokio::select! {
            biased;
            acquired = &mut acquiring => return match acquired {
                Ok(Some(guard)) => Entered::Held(guard),
                Ok(None) => Entered::Busy,
                Err(error) if matches!(error.kind(), ErrorKind::Timeout { phase: dlock::Phase::Wait }) => Entered::Busy,
                Err(error) => Entered::Failed(error),
            },
            heard = signals.next() => match heard {
                Heard::End(number) => return Entered::Signalled(number),
                Heard::Stop => signals::stop_ourselves(),
                Heard::Child | Heard::Forward(_) | Heard::Continue => {}
            },
        }
    }
}

/// Runs the command while the lock is held.
async fn hold(
    client: &Client,
    guard: Guard,
    passes: &Passes,
    args: &Exec,
    signals: &mut Signals,
    output: &Output,
) -> Exit {
    let pass = (!args.no_pass && client.capabilities().fencing).then(|| guard.pass());
    let variables = variables(client, &guard, passes.with(pass.as_ref()));
    let child = match Child::start(&command(args), variables, args.foreground) {
        Ok(child) => child,
        Err(error) => {
            output.say(&format!("the command could not be started: {error}"));
            give_back(client, guard, output).await;
            return Exit::NOT_EXECUTABLE;
        }
    };
    let watch = Watch {
        guard: &guard,
        kill: args.on_lost == OnLost::Kill,
        grace: args
            .kill_grace
            .unwrap_or_else(|| default_grace(client, args)),
        output,
    };
    let Ended { exit, lost } = watch.until_ended(child, signals).await;
    if lost {
        drop(guard);
        return Exit::LOST;
    }
    if give_back(client, guard, output).await {
        exit
    } else {
        Exit::LOST
    }
}

/// 2 s, at most a fifth of the lease.
fn default_grace(client: &Client, args: &Exec) -> Duration {
    let caps = client.capabilities();
    let mut lease = args.lease.unwrap_or(dlock::DEFAULT_LEASE);
    if caps.session_bound {
        lease = *caps.leases.end();
    }
    let lease = args.max_hold.map_or(lease, |most| lease.min(most));
    (lease / 5).min(Duration::from_secs(2))
}

/// Releases; says whether the lock was held to the end.
async fn give_back(client: &Client, guard: Guard, output: &Output) -> bool {
    let rest = guard.shut_after();
    let bound = client.capabilities().session_bound;
    match guard.release().await {
        Ok(Outcome::Kept { rest }) => {
            tracing::info!("released; shut for {}", span(rest));
            true
        }
        Ok(_) => {
            if bound {
                tokio::time::sleep(rest).await; // there it is our session that keeps the name shut
            }
            true
        }
        Err(error) if matches!(error.kind(), ErrorKind::Lost | ErrorKind::NotHeld) => {
            output.fail(&error, Exit::LOST);
            false
        }
        Err(error) => {
            output.fail(&error, Exit::UNKNOWN);
            true
        }
    }
}

fn command(args: &Exec) -> Vec<OsString> {
    match &args.command_text {
        Some(text) => vec!["sh".into(), "-c".into(), text.clone()],
        None => args.command.clone(),
    }
}

fn variables(
    client: &Client,
    guard: &Guard,
    passes: Option<String>,
) -> Vec<(&'static str, Option<String>)> {
    vec![
        ("DLOCK_HELD", Some("1".to_owned())),
        ("DLOCK_NAME", Some(guard.name().to_string())),
        ("DLOCK_TOKEN", Some(guard.token().to_string())),
        (
            "DLOCK_BACKEND",
            Some(client.capabilities().backend.to_owned()),
        ),
        (passes::VARIABLE, passes),
    ]
}

/// Sees to it that nothing is left behind, as far as the store answers within two seconds.
async fn withdraw(client: &Client, output: &Output) {
    let report = match client.shutdown(Duration::ZERO).await {
        Ok(report) => report,
        Err(error) => {
            output.fail(&error, Exit::UNKNOWN);
            return;
        }
    };
    for name in report.unknown {
        output.warn(&format!(
            "the store did not confirm that {name:?} is free: what it may have of us ends with its lease"
        ));
    }
}
