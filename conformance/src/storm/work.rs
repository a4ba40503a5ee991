//! Worker process: it acquires, waits, gives up, enters by passes, holds, and logs what it believes.

use super::log::{Grant, Log, now};
use crate::Result;
use dlock::{Client, Error, ErrorKind, Guard, Lease, Lock, Pass, ReleaseOutcome};
use dlock_conformance::testbed::worker::{self, Job};
use fastrand::Rng;
use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

/// The longest lease that workers ask for.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// How many names they contend for.
pub(crate) const NAMES: usize = 3;

/// How many permits a name has where it is a semaphore: fewer than those who contend for it.
const PERMITS: u32 = 2;
/// How many tasks of a process contend.
const TASKS: usize = 3;
/// The pause after a failure, so that an unavailable store is not polled in a tight loop.
const PAUSE: Duration = Duration::from_millis(20);

/// The name of this number in this run.
pub(crate) fn name(run: &str, number: usize) -> String {
    format!("storm.{run}.{number}")
}

/// Runs until the parent process closes the input.
pub(crate) async fn work(job: &Job) -> Result {
    let ends = ending();
    let log = Log::create(Path::new(job.arg("log")?))?;
    let client = loop {
        match dlock::connect(job.arg("url")?).await {
            Ok(client) => break client,
            Err(error) => failed(&log, &word(&error)).await?,
        }
        if *ends.borrow() {
            return Ok(());
        }
    };
    let shared = Arc::new(SharedState {
        client,
        log,
        run: job.arg("run")?.to_owned(),
        passes: job.arg("passes")?.into(),
        ends,
    });
    let seed: u64 = job.arg("seed")?.parse()?;
    let tasks: Vec<_> = (0..TASKS as u64)
        .map(|task| {
            let (shared, rng) = (
                Arc::clone(&shared),
                Rng::with_seed(seed * TASKS as u64 + task),
            );
            tokio::spawn(async move { shared.turns(rng).await })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    drop(shared.client.shutdown(LEASE).await);
    Ok(())
}

/// Is true once the parent process has closed the input.
pub(crate) fn ending() -> watch::Receiver<bool> {
    let (ending, ends) = watch::channel(false);
    tokio::spawn(async move {
        let mut commands = worker::commands();
        while commands.recv().await.is_some() {}
        ending.send_replace(true);
    });
    ends
}

/// What the tasks of a worker share.
struct SharedState {
    client: Client,
    log: Log,
    run: String,
    /// A folder with the latest pass of each name.
    passes: PathBuf,
    ends: watch::Receiver<bool>,
}

impl SharedState {
    async fn turns(&self, mut rng: Rng) -> Result {
        while !*self.ends.borrow() {
            self.turn(&mut rng).await?;
        }
        Ok(())
    }

    async fn turn(&self, rng: &mut Rng) -> Result {
        let name = name(&self.run, rng.usize(..NAMES));
        let (lock, sharers) = match rng.u8(..6) {
            0 | 1 => (self.client.rw_lock(&name)?.read(), Some("read".to_owned())),
            2 => (
                self.client.semaphore(&name, PERMITS)?,
                Some(format!("of-{PERMITS}")),
            ),
            _ => (self.client.lock(&name)?, None),
        };
        let least = match rng.u8(..8) {
            0 if sharers.is_none() => millis(rng, 50..400),
            _ => Duration::ZERO,
        };
        let shortest = *self.client.capabilities().leases.start();
        let lock = terms(lock, least, shortest, rng);
        let asked = now();
        let mut family = format!("{}-{asked}", std::process::id());
        let took = match rng.u8(..10) {
            0 | 1 => lock.try_acquire().await,
            2..=6 => lock.acquire_timeout(millis(rng, 1..3_000)).await.map(Some),
            7 => match timeout(millis(rng, 1..300), lock.acquire()).await {
                Ok(took) => took.map(Some),
                Err(_) => return failed(&self.log, "cancelled").await,
            },
            _ => match self.latest_pass(&name).filter(|_| sharers.is_none()) {
                Some((of, pass)) => {
                    family = of;
                    lock.join(&pass).await.map(Some)
                }
                None => return Ok(()),
            },
        };
        match took {
            Ok(Some(guard)) => {
                if let Some(sharers) = &sharers {
                    family = format!("{sharers}-{}", guard.token());
                }
                let grant = Grant {
                    family: &family,
                    least,
                    asked,
                };
                self.hold(guard, &grant, sharers.is_none(), rng).await
            }
            Ok(None) => failed(&self.log, "held").await,
            Err(error) => failed(&self.log, &word(&error)).await,
        }
    }

    async fn hold(&self, guard: Guard, grant: &Grant<'_>, has_pass: bool, rng: &mut Rng) -> Result {
        let (hold, got) = self.log.took(&guard, grant)?;
        if has_pass && rng.u8(..3) == 0 {
            self.publish(&guard, grant.family, hold)?;
        }
        // Mostly short, so that there are many grants; sometimes longer than a lease.
        let longest = match rng.u8(..10) {
            0 => 3_000_000_000,
            1 => 400_000_000,
            _ => 20_000_000,
        };
        let until = got + rng.u64(..longest);
        let how = loop {
            if !self.log.believes(&guard, hold)? {
                break "lost";
            }
            if now() >= until {
                break "done";
            }
            sleep(millis(rng, 1..15)).await;
        };
        let how = if how == "lost" || rng.u8(..8) == 0 {
            drop(guard);
            how.to_owned()
        } else {
            released(guard.release().await)
        };
        Ok(self.log.write(format_args!("ended {hold} {how}"))?)
    }

    /// Atomic, even if this process is killed.
    fn publish(&self, guard: &Guard, family: &str, hold: u64) -> io::Result<()> {
        let draft = self.passes.join(format!("{}.{hold}", std::process::id()));
        let pass = guard.pass().map_err(io::Error::other)?;
        fs::write(&draft, format!("{family} {}", pass.expose()))?;
        fs::rename(draft, self.passes.join(guard.name().as_str()))
    }

    fn latest_pass(&self, name: &str) -> Option<(String, Pass)> {
        let text = fs::read_to_string(self.passes.join(name)).ok()?;
        let (family, pass) = text.split_once(' ')?;
        Some((family.to_owned(), pass.parse().ok()?))
    }
}

/// A lock with one of the leases, none below the shortest that the store offers.
fn terms(lock: Lock, least: Duration, shortest: Duration, rng: &mut Rng) -> Lock {
    let short = |rng| millis(rng, 500..1_500).max(shortest);
    let lock = match rng.u8(..4) {
        0 => lock.lease(Lease::fixed(short(rng))),
        1 => renewed(lock, LEASE).max_hold(short(rng)),
        2 => renewed(lock, LEASE / 2),
        _ => renewed(lock, LEASE),
    };
    lock.min_hold(least)
}

/// A store whose renewed leases have one fixed length keeps that length.
pub(crate) fn renewed(lock: Lock, length: Duration) -> Lock {
    let asked = lock.clone().lease(Lease::renewed(length));
    if asked.effective_lease().is_ok() {
        asked
    } else {
        lock
    }
}

pub(crate) async fn failed(log: &Log, how: &str) -> Result {
    log.write(format_args!("failed {how}"))?;
    sleep(PAUSE).await;
    Ok(())
}

/// How a release ended.
pub(crate) fn released(outcome: Result<ReleaseOutcome, Error>) -> String {
    match outcome {
        Ok(ReleaseOutcome::MinHold { .. }) => "kept".to_owned(),
        Ok(ReleaseOutcome::StillHeld { .. }) => "still".to_owned(),
        Ok(_) => "released".to_owned(),
        Err(error) => word(&error),
    }
}

/// The kind of an error, without blanks.
pub(crate) fn word(error: &Error) -> String {
    match error.kind() {
        ErrorKind::Timeout { phase } => format!("Timeout:{phase:?}"),
        kind => format!("{kind:?}"),
    }
}

/// A time of so many milliseconds.
pub(crate) fn millis(rng: &mut Rng, range: Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}
