//! The command: how it is started under locks, and what it is told of them.

use crate::{
    args,
    exec::{
        child::Child,
        held::Held,
        passes::{self, Passes},
        terminator::Terminator,
        tokens,
        watch::{Ended, Watch},
    },
    exit::Exit,
    output::Output,
    signals::Signals,
    store::{self, Store},
};
use dlock::{Client, Error, Lock, Pass};
use nix::sys::signal::Signal;
use std::{ffi::OsString, io, sync::Arc, time::Duration};
use tokio::time::Instant;

pub(super) struct Command<'a> {
    pub(super) client: &'a Client,
    pub(super) store: &'a Store,
    pub(super) args: &'a args::Run,
    pub(super) passes: Passes,
    pub(super) output: &'a Output,
    pub(super) grace: Duration,
    /// Whether it is ended when a lock is lost.
    pub(super) kill: bool,
    pub(super) max_hold: Option<Duration>,
}

impl<'a> Command<'a> {
    /// A command that is ended before another owner can have this lock.
    pub(super) fn new(
        client: &'a Client,
        store: &'a Store,
        args: &'a args::Run,
        lock: &Lock,
        output: &'a Output,
    ) -> Result<Self, Error> {
        Ok(Self {
            client,
            store,
            args,
            passes: Passes::inherited(),
            output,
            grace: grace(lock, args.kill_grace)?,
            kill: true,
            max_hold: None,
        })
    }

    /// Runs it to its end while the locks are held. Returns them too.
    ///
    /// # Errors
    /// The exit code when it could not be started. The reason is printed.
    pub(super) async fn run(
        &self,
        held: Held,
        signals: &mut Signals,
    ) -> (Held, Result<Ended, Exit>) {
        let held = Arc::new(held);
        let ended = self.run_under(&held, signals).await;
        let held = Arc::into_inner(held).expect("the terminator has ended, and had the only clone");
        (held, ended)
    }

    async fn run_under(&self, held: &Arc<Held>, signals: &mut Signals) -> Result<Ended, Exit> {
        let watch = Watch {
            held,
            backend: self.client.capabilities().backend,
            kill: self.kill,
            most: self.max_hold.map(|most| (most, Instant::now() + most)),
            output: self.output,
        };
        if !held.are_held() {
            watch.lost("the command is not started");
            return Ok(Ended {
                exit: Exit::LOST,
                lost: true,
                told: false,
            });
        }
        let child = Child::start(
            &self.words(),
            self.variables(held),
            (self.args.foreground, self.output.is_json()),
        );
        let child = child.map_err(|error| self.not_started(&error))?;
        // With a presence the locks last less than their lease. It was renewed just now, or will be in time.
        let grace = self.grace.min(held.remaining() / 2);
        let grace = self.kill.then_some(grace);
        let terminator = Terminator::start(Arc::clone(held), child.target().clone(), grace);
        let terminator = terminator.map_err(|error| {
            child.signal(Signal::SIGKILL);
            self.not_started(&error)
        })?;
        Ok(watch.until_ended(child, &terminator, signals).await)
    }

    fn not_started(&self, error: &io::Error) -> Exit {
        let message = format!(
            "the command could not be started: {error}: is /proc mounted, and a process, thread or descriptor left (ulimit -u, -n)?"
        );
        let backend = self.client.capabilities().backend;
        self.output
            .problem("Exec", &message, backend, Some(&self.args.name));
        Exit::NOT_EXECUTABLE
    }

    fn words(&self) -> Vec<OsString> {
        match &self.args.command_text {
            Some(text) => vec!["sh".into(), "-c".into(), text.clone()],
            None => self.args.command.clone(),
        }
    }

    fn variables(&self, held: &Held) -> Vec<(&'static str, Option<String>)> {
        let caps = self.client.capabilities();
        let own: Result<Vec<Pass>, Error> = held.guards().map(|guard| guard.pass()).collect();
        let passes = match own {
            Ok(own) if !self.args.no_pass => Some(self.passes.with(&own)),
            _ => {
                let names: Vec<_> = held.guards().map(|guard| guard.name()).collect();
                self.passes.without(&caps.store, &names)
            }
        };
        let url = self.args.pass_url.then(|| self.store.url.clone());
        let withheld = url.is_none() && !self.store.is_default;
        vec![
            (store::URL, url),
            (store::WITHHELD, withheld.then(|| "1".to_owned())),
            ("DLOCK_HELD", Some("1".to_owned())),
            ("DLOCK_NAME", Some(held.main().name().to_string())),
            ("DLOCK_TOKEN", Some(held.main().token().to_string())),
            (tokens::VARIABLE, Some(tokens::list(held.guards()))),
            ("DLOCK_BACKEND", Some(caps.backend.to_owned())),
            (passes::VARIABLE, passes),
        ]
    }
}

/// How long before the end the command gets TERM: the option, else 2 s or a fifth of the lease.
fn grace(lock: &Lock, asked: Option<Duration>) -> Result<Duration, Error> {
    let lease = lock.effective_lease().unwrap_or_default().length();
    match asked {
        Some(grace) if grace > lease / 2 => Err(Error::misuse(args::grace_too_long(grace, lease))),
        Some(grace) => Ok(grace),
        None => Ok((lease / 5).min(Duration::from_secs(2))),
    }
}
