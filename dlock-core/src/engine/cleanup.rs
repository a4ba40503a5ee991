//! Cleanup: undoes in the background what a cancelled, timed-out or unanswered request may have left in the
//! store.
//!
//! A repeat of an acquire is harmless only while its hold is wanted, and a late copy revives a hold that
//! was released. A hold with an unanswered attempt is therefore *cleaned up* only by a release that was sent
//! after `give_up + late` and answered. Earlier answers free it but do not clean it up. A job ends when that
//! is done, or when the lease of anything that it could have left must be over. Until then nothing is
//! dropped. The number of open jobs is bounded: when there are too many, new acquires are refused.

use crate::{
    clock::Instant,
    driver::{Acquired, Release, Released, Ticket, Wake},
    engine::{
        Engine,
        call::{ATTEMPT_LIMIT, Call},
        hold::Hold,
        metrics::CleanupEnd,
    },
    error::{DriverError, Effect},
    name::LockName,
    owner::{HoldId, Owner},
};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

/// The most acquisitions with an unknown outcome at a time. Each is one small task. More than this mean
/// that the store has been down for long.
pub(crate) const CAPACITY: usize = 10_000;

/// A cleanup release that is answered slower than this may not have run in time, and is followed by
/// another one.
pub(crate) const PROMPT: Duration = Duration::from_secs(1);

/// The pause between attempts: doubling from the first value to the last, jittered. The last grows with the
/// number of jobs, so that they do not all reach a recovered store in one second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// How long a ticket can stay in a queue that no client serves: the longest entry deadline.
const QUEUED_AT_MOST: Duration = Duration::from_secs(6);

#[derive(Debug, Default)]
pub(crate) struct Cleanup {
    jobs: Mutex<OpenJobs>,
    /// How many of the open jobs have an unknown outcome. Every acquire reads it.
    unknown: AtomicUsize,
}

#[derive(Debug, Default)]
struct OpenJobs {
    open: BTreeMap<u64, OpenJob>,
    count: u64,
}

#[derive(Debug)]
struct OpenJob {
    name: LockName,
    /// Its outcome is unknown.
    unknown: bool,
}

/// An acquire in flight.
pub(crate) type AcquireCall = Call<Result<Acquired, DriverError>>;

/// A cleanup job: something to undo.
#[derive(Debug)]
pub(crate) struct CleanupJob {
    pub(crate) name: LockName,
    /// The hold that must not stay.
    pub(crate) hold: Option<Target>,
    /// The hold to mark as released when the store confirms it.
    pub(crate) held: Option<Arc<Hold>>,
    /// A release of it was sent before.
    pub(crate) sent: bool,
    /// Until when an unanswered copy of its acquire may still take hold.
    pub(crate) indeterminate_until: Option<Instant>,
    /// The job does not begin before this time.
    pub(crate) after: Instant,
    /// The end of the minimum hold, until which the lock stays unavailable.
    pub(crate) min_hold_until: Option<Instant>,
    /// Tickets that must not stay in the queue.
    pub(crate) tickets: Vec<Ticket>,
}

/// A hold to release, and the lease that ends it otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    pub(crate) lease: Duration,
}

impl CleanupJob {
    /// An empty job.
    pub(crate) fn new(name: LockName) -> Self {
        Self {
            name,
            hold: None,
            held: None,
            sent: false,
            indeterminate_until: None,
            after: Instant::ORIGIN,
            min_hold_until: None,
            tickets: Vec::new(),
        }
    }

    /// A job that releases a guard's hold.
    pub(crate) fn of(hold: &Arc<Hold>) -> Self {
        Self {
            hold: Some(Target {
                owner: hold.owner,
                hold: hold.id,
                lease: hold.lease().length(),
            }),
            held: Some(Arc::clone(hold)),
            indeterminate_until: hold.indeterminate_until,
            tickets: hold.ticket.into_iter().collect(),
            min_hold_until: hold.min_hold_until(),
            ..Self::new(hold.name.clone())
        }
    }
}

impl Cleanup {
    pub(crate) fn is_full(&self) -> bool {
        self.unknown.load(SeqCst) >= CAPACITY
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.lock().open.len()
    }

    /// The names of the open jobs.
    pub(crate) fn names(&self) -> Vec<LockName> {
        let jobs = self.jobs.lock();
        jobs.open.values().map(|job| job.name.clone()).collect()
    }
}

/// A job's slot, freed however its task ends: done, panicked, or never run because the runtime is gone.
struct Slot {
    engine: Arc<Engine>,
    id: u64,
    end: CleanupEnd,
}

impl Slot {
    fn new(engine: &Arc<Engine>, name: &LockName, unknown: bool) -> Self {
        let cleanup = &engine.cleanup;
        let mut jobs = cleanup.jobs.lock();
        jobs.count += 1;
        let id = jobs.count;
        let name = name.clone();
        jobs.open.insert(id, OpenJob { name, unknown });
        cleanup.unknown.fetch_add(usize::from(unknown), SeqCst);
        engine.classes.store.cleanup_begun();
        Self {
            engine: Arc::clone(engine),
            id,
            end: CleanupEnd::Left,
        }
    }

    fn ends(&mut self, end: CleanupEnd) {
        self.end = end;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let cleanup = &self.engine.cleanup;
            if let Some(job) = cleanup.jobs.lock().open.remove(&self.id) {
                cleanup.unknown.fetch_sub(usize::from(job.unknown), SeqCst);
            }
        }
        self.engine.classes.store.cleanup_ended(self.end);
        self.engine.is_quieter();
    }
}

impl Engine {
    /// Starts a job. It runs in a task of the client's runtime; if that runtime is gone, the lease ends
    /// what is left.
    pub(crate) fn clean_up(self: &Arc<Self>, job: CleanupJob) {
        self.clean_up_after(job, None);
    }

    /// Starts a job whose acquire is still in flight.
    pub(crate) fn clean_up_after(
        self: &Arc<Self>,
        job: CleanupJob,
        under_way: Option<AcquireCall>,
    ) {
        // The releases of guards are bounded by the guards. Everything else with an unknown outcome is
        // counted.
        let unknown =
            under_way.is_some() || job.indeterminate_until.is_some() || !job.tickets.is_empty();
        let mut slot = Slot::new(self, &job.name, unknown);
        self.calls.handle.spawn(async move {
            let end = slot.engine.run_job(job, under_way).await;
            slot.ends(end);
        });
    }

    /// Takes a ticket out of the store's queue, because no task waits with it any more.
    pub(crate) fn leave_queue(self: &Arc<Self>, name: &LockName, ticket: Ticket) {
        if self.caps.wake != Wake::Poll {
            let mut job = CleanupJob::new(name.clone());
            job.tickets.push(ticket);
            self.clean_up(job);
        }
    }

    async fn run_job(
        self: &Arc<Self>,
        mut job: CleanupJob,
        under_way: Option<AcquireCall>,
    ) -> CleanupEnd {
        let mut there = job.hold.is_some();
        self.clock.sleep_until(job.after).await;
        if let Some(mut call) = under_way {
            let late = call.give_up + self.caps.late;
            match call.answer_elsewhere().await {
                Some(Ok(Acquired::Granted(_))) => {}
                Some(Ok(Acquired::Held(held))) if held.doubt => {
                    job.indeterminate_until = job.indeterminate_until.max(Some(late));
                }
                Some(Ok(_)) => there = job.indeterminate_until.is_some(),
                Some(Err(error)) if error.effect() == Effect::None => {
                    there = job.indeterminate_until.is_some();
                }
                Some(Err(_)) | None => {
                    job.indeterminate_until = job.indeterminate_until.max(Some(late))
                }
            }
        }
        let over = self.over(&job);
        let mut confirmed = !there || self.release_hold(&job, over).await;
        confirmed &= self.leave_lines(&job, over).await;
        while let Some(until) = job.indeterminate_until.filter(|until| *until < over) {
            self.clock.sleep_until(until).await;
            let sent = self.clock.now();
            confirmed = self.release_hold(&job, over).await;
            confirmed &= self.leave_lines(&job, over).await;
            let took = self.clock.now().since(sent);
            job.indeterminate_until = (took > PROMPT).then(|| self.clock.now() + self.caps.late);
        }
        if !confirmed {
            tracing::debug!(
                target: "dlock::cleanup", lock = %job.name, backend = self.caps.backend,
                "left to its lease: the store did not confirm that it is gone"
            );
            return CleanupEnd::Left;
        }
        tracing::debug!(
            target: "dlock::cleanup", lock = %job.name, backend = self.caps.backend, "cleaned up"
        );
        CleanupEnd::Confirmed
    }

    /// The time by which everything that the job could have left must have ended by itself.
    fn over(&self, job: &CleanupJob) -> Instant {
        let now = self.clock.now();
        let from = job.indeterminate_until.map_or(now, |until| until.max(now)) + self.caps.late;
        match job.hold {
            // Such a hold lasts as long as its session, which is this client's.
            Some(_) if self.caps.session_bound => Instant::FAR,
            Some(target) => from + target.lease.max(QUEUED_AT_MOST),
            None => from + QUEUED_AT_MOST,
        }
    }

    /// Releases until the store has answered, or there can be nothing left to release. Returns whether it has.
    async fn release_hold(self: &Arc<Self>, job: &CleanupJob, over: Instant) -> bool {
        let Some(target) = job.hold else {
            return true;
        };
        let (mut pause, mut sent) = (PAUSE.0, job.sent);
        while self.goes_on(over) {
            let mut request = Release::new(job.name.clone(), target.owner, target.hold);
            request.min_hold = self.rest(job.min_hold_until);
            let now = self.clock.now();
            match self.release_once(request, now, now + ATTEMPT_LIMIT).await {
                Some(Ok(released)) => {
                    match (&job.held, released) {
                        (Some(held), Released::NotHeld { .. }) if !sent => held.not_found(),
                        (Some(held), _) => held.released(),
                        (None, _) => {}
                    }
                    // Wakes the waiters even if the hold was no longer there: another holder may be gone by
                    // now.
                    self.wake(&job.name);
                    return true;
                }
                Some(Err(error)) => {
                    sent |= error.effect() == Effect::Unknown;
                    self.report(job, &error);
                }
                None => sent = true,
            }
            pause = self.pause(pause).await;
        }
        false
    }

    /// Gives up the tickets. Returns whether the store has answered for each.
    async fn leave_lines(self: &Arc<Self>, job: &CleanupJob, over: Instant) -> bool {
        for ticket in &job.tickets {
            let mut pause = PAUSE.0;
            loop {
                if !self.goes_on(over) {
                    return false;
                }
                let driver = Arc::clone(&self.driver);
                let (name, ticket) = (job.name.clone(), *ticket);
                let give_up = self.clock.now() + ATTEMPT_LIMIT;
                let mut call = Call::new(&self.calls, give_up, async move {
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
        true
    }

    fn goes_on(&self, over: Instant) -> bool {
        self.clock.now() < over && !self.closed.load(SeqCst)
    }

    fn report(&self, job: &CleanupJob, error: &DriverError) {
        tracing::debug!(
            target: "dlock::cleanup", lock = %job.name, backend = self.caps.backend, %error,
            "not cleaned up yet, will be repeated"
        );
    }

    async fn pause(&self, pause: Duration) -> Duration {
        let jittered = pause.mul_f64(0.5 + self.random.jitter() / 2.0);
        self.clock.sleep_until(self.clock.now() + jittered).await;
        let crowd = u32::try_from(self.cleanup.len() / 1_000).unwrap_or(u32::MAX);
        (pause * 2).min(PAUSE.1.saturating_mul(1 + crowd.min(9)))
    }
}
