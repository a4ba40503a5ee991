//! The janitor: whoever cancelled, ran out of time or got no answer may leave; what the store may still have of him is undone here.
//!
//! A repeat of an acquire is harmless only while its hold is wanted, and a late copy revives a hold that was released. So a hold with
//! an unanswered attempt is *settled* only by a release that was sent after `give_up + late` and answered; earlier answers free it,
//! they do not settle it. Nothing is ever dropped: the queue is bounded, and when it is full new acquires are refused.

use crate::{
    call::Call,
    client::Inner,
    clock::Instant,
    driver::{Acquired, Release, Released},
    error::{DriverError, Effect},
    flaw::Flaw,
    identity::{HoldId, Owner, Ticket},
    name::LockName,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;

/// The most jobs at a time: each is one small task, and more of them than this mean that the store has been away for long.
pub(crate) const CAPACITY: usize = 10_000;

/// The most one request of the janitor may take before it is repeated.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A settling release answered slower than this may not have run in time, and is followed by another one.
const PROMPT: Duration = Duration::from_secs(1);

/// The pause between attempts: doubling from the first to the last, jittered.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

#[derive(Debug, Default)]
pub(crate) struct Janitor {
    jobs: Mutex<Jobs>,
    idle: Notify,
}

#[derive(Debug, Default)]
struct Jobs {
    open: BTreeMap<u64, LockName>,
    count: u64,
}

/// An acquire that was asked for.
pub(crate) type Asked = Call<Result<Acquired, DriverError>>;

/// Something to undo.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) name: LockName,
    /// The hold that must not stay.
    pub(crate) hold: Option<(Owner, HoldId)>,
    /// Until when an unanswered copy of its acquire may still take hold.
    pub(crate) unsettled: Option<Instant>,
    /// Not to be begun before then.
    pub(crate) after: Instant,
    /// Until when the name is to stay shut.
    pub(crate) keep: Option<Instant>,
    /// Tickets that must not stay in line.
    pub(crate) tickets: Vec<Ticket>,
}

impl Job {
    pub(crate) fn release(name: LockName, owner: Owner, hold: HoldId) -> Self {
        Self {
            name,
            hold: Some((owner, hold)),
            unsettled: None,
            after: Instant::ORIGIN,
            keep: None,
            tickets: Vec::new(),
        }
    }

    pub(crate) fn leave(name: LockName, ticket: Ticket) -> Self {
        Self {
            name,
            hold: None,
            unsettled: None,
            after: Instant::ORIGIN,
            keep: None,
            tickets: vec![ticket],
        }
    }
}

impl Janitor {
    pub(crate) fn is_full(&self) -> bool {
        self.len() >= CAPACITY
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs().open.len()
    }

    /// The names it still works on.
    pub(crate) fn names(&self) -> Vec<LockName> {
        self.jobs().open.values().cloned().collect()
    }

    /// Resolves when it has nothing to do.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            idle.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn jobs(&self) -> std::sync::MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, name: &LockName) -> u64 {
        let mut jobs = self.jobs();
        jobs.count += 1;
        let id = jobs.count;
        jobs.open.insert(id, name.clone());
        id
    }

    fn close(&self, id: u64) {
        let mut jobs = self.jobs();
        jobs.open.remove(&id);
        if jobs.open.is_empty() {
            self.idle.notify_waiters();
        }
    }
}

impl Inner {
    /// Takes a job over. It runs in a task of the client's runtime; if that is gone, the lease ends what is left.
    pub(crate) fn settle(self: &Arc<Self>, job: Job) {
        self.settle_after(job, None);
    }

    /// Takes a job over whose acquire is still under way.
    pub(crate) fn settle_after(self: &Arc<Self>, job: Job, under_way: Option<Asked>) {
        if self.flawed(Flaw::NothingSettled) {
            return;
        }
        let id = self.janitor.open(&job.name);
        let inner = Arc::clone(self);
        self.adrift.handle.spawn(async move {
            inner.run_job(job, under_way).await;
            inner.janitor.close(id);
        });
    }

    async fn run_job(self: &Arc<Self>, mut job: Job, under_way: Option<Asked>) {
        let mut there = job.hold.is_some();
        self.clock.sleep_until(job.after).await;
        if let Some(mut call) = under_way {
            let late = call.give_up() + self.caps.late;
            match call.answer().await {
                Some(Ok(Acquired::Granted(_))) => {}
                Some(Ok(_)) => there = job.unsettled.is_some(),
                Some(Err(error)) if error.effect() == Effect::None => {
                    there = job.unsettled.is_some();
                }
                Some(Err(_)) | None => job.unsettled = job.unsettled.max(Some(late)),
            }
        }
        if there {
            self.give_back(&job).await;
        }
        self.leave_line(&job).await;
        if self.flawed(Flaw::SettledTooEarly) {
            return;
        }
        while let Some(until) = job.unsettled {
            self.clock.sleep_until(until).await;
            let sent = self.clock.now();
            self.give_back(&job).await;
            self.leave_line(&job).await;
            let took = self.clock.now().since(sent);
            job.unsettled = (took > PROMPT).then(|| self.clock.now() + self.caps.late);
        }
        tracing::debug!(
            target: "dlock::settle", lock = %job.name, backend = self.caps.backend, "settled"
        );
    }

    /// Releases until the store has answered.
    async fn give_back(self: &Arc<Self>, job: &Job) {
        let Some((owner, hold)) = job.hold else {
            return;
        };
        let mut pause = PAUSE.0;
        loop {
            let mut request = Release::new(job.name.clone(), owner, hold);
            request.keep = self.rest(job.keep);
            match self.release_once(request).await {
                Some(Ok(released)) => {
                    if !matches!(released, Released::NotHeld { .. }) {
                        self.poke(&job.name);
                    }
                    return;
                }
                Some(Err(error)) => self.report(job, &error),
                None => {}
            }
            pause = self.pause(pause).await;
        }
    }

    async fn leave_line(self: &Arc<Self>, job: &Job) {
        for ticket in &job.tickets {
            let mut pause = PAUSE.0;
            loop {
                let driver = Arc::clone(&self.driver);
                let (name, ticket) = (job.name.clone(), *ticket);
                let give_up = self.clock.now() + ATTEMPT;
                let mut call = Call::new(&self.adrift, give_up, async move {
                    driver.leave(&name, ticket).await
                });
                match call.answer().await {
                    Some(Ok(())) => break,
                    Some(Err(error)) => self.report(job, &error),
                    None => {}
                }
                pause = self.pause(pause).await;
            }
        }
    }

    /// What is left of the time that a name is to stay shut.
    pub(crate) fn rest(&self, keep: Option<Instant>) -> Option<Duration> {
        keep.map(|until| until.since(self.clock.now()))
            .filter(|rest| !rest.is_zero())
    }

    /// One release, bounded; `None`: not answered in time.
    pub(crate) async fn release_once(
        self: &Arc<Self>,
        request: Release,
    ) -> Option<Result<Released, DriverError>> {
        let driver = Arc::clone(&self.driver);
        let give_up = self.clock.now() + ATTEMPT;
        Call::new(&self.adrift, give_up, async move {
            driver.release(&request).await
        })
        .answer()
        .await
    }

    fn report(&self, job: &Job, error: &DriverError) {
        tracing::debug!(
            target: "dlock::settle", lock = %job.name, backend = self.caps.backend, %error,
            "not settled yet, will be repeated"
        );
    }

    async fn pause(&self, pause: Duration) -> Duration {
        let jittered = pause.mul_f64(0.5 + self.jitter() / 2.0);
        self.clock.sleep_until(self.clock.now() + jittered).await;
        (pause * 2).min(PAUSE.1)
    }
}
