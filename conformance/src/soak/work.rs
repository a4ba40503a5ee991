//! Worker process of a soak: it does one thing in loops, and logs what it believes.

use crate::{
    Result,
    storm::{
        LEASE, ending, failed,
        log::{Grant, Log, now},
        millis, released, renewed, word,
    },
};
use dlock::{Client, Guard, Lease, ReleaseOutcome};
use dlock_conformance::testbed::worker::{self, Job};
use fastrand::Rng;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{sync::watch, time::sleep};

/// How many permits there are.
pub(crate) const PERMITS: u32 = 10;
/// The role of a process with a presence, how long that is, and the lease of its holds.
pub(super) const PRESENT: &str = "present";
pub(super) const PRESENCE: Duration = Duration::from_secs(3);
pub(super) const LONG: Duration = Duration::from_secs(60);
/// How many names a set is drawn from.
pub(crate) const NAMES: usize = 8;

pub(crate) fn name(run: &str, number: usize) -> String {
    format!("soak.{run}.{number}")
}

/// Works until the parent process closes the input, and then says how long it waited and held at most.
pub(crate) async fn work(job: &Job) -> Result {
    let ends = ending();
    let run = job.arg("run")?;
    let mut builder = dlock::builder(job.arg("url")?).await?;
    if job.arg("role")? == PRESENT {
        builder = builder.presence(PRESENCE);
    }
    let soaking = Soaking {
        client: builder.build()?,
        log: Log::create(Path::new(job.arg("log")?))?,
        names: (0..NAMES).map(|number| name(run, number)).collect(),
        ends,
        waited: AtomicU64::new(0),
        held: AtomicU64::new(0),
    };
    worker::say("ready")?;
    let mut rng = Rng::with_seed(job.arg("seed")?.parse()?);
    match job.arg("role")? {
        "candidate" => soaking.campaign().await?,
        role => {
            while !soaking.is_over() {
                soaking.turn(role, &mut rng).await?;
            }
        }
    }
    drop(soaking.client.shutdown(LEASE).await);
    let [waited, held] = [&soaking.waited, &soaking.held].map(|longest| longest.load(SeqCst));
    Ok(worker::say(&format!("longest {waited} {held}"))?)
}

struct Soaking {
    client: Client,
    log: Log,
    names: Vec<String>,
    ends: watch::Receiver<bool>,
    waited: AtomicU64,
    held: AtomicU64,
}

impl Soaking {
    fn is_over(&self) -> bool {
        *self.ends.borrow()
    }

    async fn turn(&self, role: &str, rng: &mut Rng) -> Result {
        let asked = now();
        let name = &self.names[0];
        let (lock, family, span) = match role {
            "reader" => (self.client.rw_lock(name)?.read(), "read", 10..50),
            "writer" => (self.client.rw_lock(name)?.write(), "write", 1..20),
            PRESENT => return self.keep().await,
            "permit" => {
                let permits = self.client.semaphore(name, PERMITS)?;
                (permits, PERMIT, 5..60)
            }
            _ => return self.set(rng).await,
        };
        let guard = match renewed(lock, LEASE).acquire().await {
            Ok(guard) => guard,
            Err(error) => return self.failed(&error).await,
        };
        self.waited.fetch_max(now() - asked, SeqCst);
        let family = match family {
            "write" => format!("write-{}-{asked}", std::process::id()),
            PERMIT => format!("of-{PERMITS}-{}", guard.token()),
            shared => format!("{shared}-{}", guard.token()),
        };
        self.hold(guard, &family, asked, millis(rng, span)).await?;
        if role == "writer" {
            sleep(millis(rng, 1..20)).await;
        }
        Ok(())
    }

    /// Holds the lock until it is lost, or until the end.
    async fn keep(&self) -> Result {
        let lock = self
            .client
            .lock(&self.names[0])?
            .lease(Lease::renewed(LONG));
        let asked = now();
        let mut ends = self.ends.clone();
        let acquired = tokio::select! {
            acquired = lock.acquire() => acquired,
            ended = ends.wait_for(|is_over| *is_over) => {
                drop(ended?);
                return Ok(());
            }
        };
        let guard = match acquired {
            Ok(guard) => guard,
            Err(error) => return self.failed(&error).await,
        };
        let family = format!("keeper-{}-{asked}", std::process::id());
        let (hold, _) = self.log.took(&guard, &grant(&family, asked))?;
        while self.log.believes(&guard, hold)? && !self.is_over() {
            sleep(STEP).await;
        }
        self.ended(hold, guard.release().await)
    }

    /// Two names or more, in any order.
    async fn set(&self, rng: &mut Rng) -> Result {
        let mut names = self.names.clone();
        rng.shuffle(&mut names);
        names.truncate(rng.usize(2..=NAMES));
        let lease = renewed(self.client.lock(&names[0])?, LEASE).effective_lease()?;
        let asked = now();
        let set = self.client.lock_all(&names)?.lease(lease);
        let guard = match set.acquire().await {
            Ok(guard) => guard,
            Err(error) => return self.failed(&error).await,
        };
        self.waited.fetch_max(now() - asked, SeqCst);
        let family = format!("set-{}-{asked}", std::process::id());
        let mut logged = Vec::new();
        for guard in guard.guards() {
            let (hold, _) = self.log.took(guard, &grant(&family, asked))?;
            logged.push(hold);
        }
        sleep(millis(rng, 1..10)).await;
        for (guard, hold) in guard.guards().iter().zip(&logged) {
            self.log.believes(guard, *hold)?;
        }
        for ((_, outcome), hold) in guard.release().await.into_iter().zip(logged) {
            self.ended(hold, outcome)?;
        }
        Ok(())
    }

    async fn hold(&self, guard: Guard, family: &str, asked: u64, span: Duration) -> Result {
        let (hold, got) = self.log.took(&guard, &grant(family, asked))?;
        let until = got + u64::try_from(span.as_nanos())?;
        while self.log.believes(&guard, hold)? && now() < until {
            sleep(span.min(STEP)).await;
        }
        let outcome = guard.release().await;
        self.held.fetch_max(now() - got, SeqCst);
        self.ended(hold, outcome)
    }

    async fn failed(&self, error: &dlock::Error) -> Result {
        failed(&self.log, &word(error)).await
    }

    fn ended(&self, hold: u64, outcome: Result<ReleaseOutcome, dlock::Error>) -> Result {
        let how = released(outcome);
        Ok(self.log.write(format_args!("ended {hold} {how}"))?)
    }

    /// Leads until the term is lost, or until the end.
    async fn campaign(&self) -> Result {
        let name = &self.names[0];
        let lease = renewed(self.client.lock(name)?, LEASE).effective_lease()?;
        let election = self.client.election(name)?.lease(lease);
        let asked = Arc::new(AtomicU64::new(now()));
        let mut ends = self.ends.clone();
        let leading = election.run(|term| {
            let mut ends = self.ends.clone();
            let asked = Arc::clone(&asked);
            async move {
                let since = asked.load(SeqCst);
                let family = format!("term-{}-{since}", std::process::id());
                let taken = self.log.took(&term, &grant(&family, since));
                // The next campaign begins later than this.
                asked.store(now(), SeqCst);
                let Ok((hold, _)) = taken else {
                    return ControlFlow::Break(());
                };
                while !*ends.borrow_and_update() {
                    asked.store(now(), SeqCst);
                    // It is dropped when the term is lost.
                    if !self.log.believes(&term, hold).unwrap_or(false) {
                        return ControlFlow::Continue(());
                    }
                    sleep(STEP).await;
                }
                ControlFlow::Break(())
            }
        });
        tokio::select! {
            led = leading => led?,
            ended = ends.wait_for(|is_over| *is_over) => drop(ended?),
        }
        Ok(())
    }
}

fn grant(family: &str, asked: u64) -> Grant<'_> {
    Grant {
        family,
        least: Duration::ZERO,
        asked,
    }
}

const PERMIT: &str = "permit";
/// How often a holder says what it believes.
const STEP: Duration = Duration::from_millis(10);
