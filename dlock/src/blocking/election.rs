//! Elections and jobs for blocking callers: the loops of the async API, with the work on the caller's thread.

use super::{guard::Guard, runtime::Runtime};
use crate::{Error, JobReport, Lease, ReleaseOutcome, Term};
use std::{
    convert::Infallible,
    error::Error as StdError,
    ops::{ControlFlow, Deref},
    sync::Arc,
    time::Duration,
};

/// An election, as [`dlock::Election`](crate::Election).
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-election")?;
/// use std::ops::ControlFlow;
///
/// let terms = client.election("scheduler")?.run(|term| match term.check() {
///     Ok(()) => ControlFlow::Break(1), // led, and done
///     Err(_) => ControlFlow::Continue(()), // lost: campaigns again
/// })?;
/// assert_eq!(terms, 1);
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Election {
    election: crate::Election,
    runtime: Arc<Runtime>,
}

impl Deref for Election {
    type Target = crate::Election;

    fn deref(&self) -> &crate::Election {
        &self.election
    }
}

impl Election {
    pub(super) fn new(election: crate::Election, runtime: &Arc<Runtime>) -> Self {
        let runtime = Arc::clone(runtime);
        Self { election, runtime }
    }

    /// Sets the lease of a term: see [`dlock::Election::lease`](crate::Election::lease).
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.election = self.election.lease(lease);
        self
    }

    /// Counts the lock under `class` in the metrics: see [`dlock::Lock::class`](crate::Lock::class).
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        self.election = self.election.class(class);
        self
    }

    /// Waits until this process leads.
    ///
    /// # Errors
    /// As [`dlock::Election::campaign`](crate::Election::campaign), and `Misuse` on a thread that runs a tokio
    /// runtime.
    #[track_caller]
    pub fn campaign(&self) -> Result<Guard, Error> {
        let term = self.runtime.block_on(self.election.campaign())??;
        Ok(Guard::new(term, &self.runtime))
    }

    /// Ends a term early, and lets the others lead first.
    ///
    /// # Errors
    /// As [`dlock::Election::resign`](crate::Election::resign), and `Misuse` on a thread that runs a tokio runtime.
    pub fn resign(&self, term: Guard) -> Result<ReleaseOutcome, Error> {
        let resigned = self.election.resign(term.into_async());
        self.runtime.block_on(resigned)?
    }

    /// Campaigns and leads, again and again, until `lead` breaks. It runs on this thread and cannot be stopped from
    /// outside: check the term before each step. A term that was lost while `lead` ran is followed by another
    /// campaign, whatever `lead` returned.
    ///
    /// # Errors
    /// As [`dlock::Election::run`](crate::Election::run), and `Misuse` on a thread that runs a tokio runtime.
    pub fn run<T: Send + 'static>(
        &self,
        mut lead: impl FnMut(&Term) -> ControlFlow<T>,
    ) -> Result<T, Error> {
        let run = |asks: super::runtime::Asks<Term, ControlFlow<T>>| {
            self.election.run(move |term| asks.ask(term))
        };
        self.runtime.serve(run, |term| lead(&term))?
    }
}

/// A scheduled job, as [`dlock::Job`](crate::Job).
///
/// # Examples
/// ```no_run
/// # #[cfg(feature = "memory")] fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::blocking::connect("memory:blocking-job")?;
/// use std::{convert::Infallible, time::Duration};
///
/// let job = client.job("nightly")?.every(Duration::from_secs(24 * 3600));
/// job.run(|term| {
///     println!("run of token {}", term.token());
///     Ok::<_, Infallible>(())
/// })?;
/// # Ok(()) }
/// # #[cfg(not(feature = "memory"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Job {
    job: crate::Job,
    runtime: Arc<Runtime>,
}

impl Deref for Job {
    type Target = crate::Job;

    fn deref(&self) -> &crate::Job {
        &self.job
    }
}

impl Job {
    pub(super) fn new(job: crate::Job, runtime: &Arc<Runtime>) -> Self {
        let runtime = Arc::clone(runtime);
        Self { job, runtime }
    }

    /// Sets the time between two ticks: see [`dlock::Job::every`](crate::Job::every).
    #[must_use]
    pub fn every(self, period: Duration) -> Self {
        self.with(|job| job.every(period))
    }

    /// Moves the ticks: see [`dlock::Job::offset`](crate::Job::offset).
    #[must_use]
    pub fn offset(self, offset: Duration) -> Self {
        self.with(|job| job.offset(offset))
    }

    /// Sets how much the clocks of the replicas may differ: see
    /// [`dlock::Job::clock_difference`](crate::Job::clock_difference).
    #[must_use]
    pub fn clock_difference(self, time: Duration) -> Self {
        self.with(|job| job.clock_difference(time))
    }

    /// Sets the lease of a run: see [`dlock::Job::lease`](crate::Job::lease).
    #[must_use]
    pub fn lease(self, lease: Lease) -> Self {
        self.with(|job| job.lease(lease))
    }

    /// Counts the lock under `class` in the metrics: see [`dlock::Job::class`](crate::Job::class).
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(self, class: &str) -> Self {
        self.with(|job| job.class(class))
    }

    /// Calls back after each tick, on the client's thread: see [`dlock::Job::on_report`](crate::Job::on_report).
    #[must_use]
    pub fn on_report(self, callback: impl Fn(&JobReport) + Send + Sync + 'static) -> Self {
        self.with(|job| job.on_report(callback))
    }

    fn with(mut self, set: impl FnOnce(crate::Job) -> crate::Job) -> Self {
        self.job = set(self.job);
        self
    }

    /// Runs `work` on this thread at each tick that falls to this replica, until the client is shut down. It cannot
    /// be stopped from outside: check the term before each step.
    ///
    /// # Errors
    /// As [`dlock::Job::run`](crate::Job::run), and `Misuse` on a thread that runs a tokio runtime.
    pub fn run<E>(&self, mut work: impl FnMut(&Term) -> Result<(), E>) -> Result<Infallible, Error>
    where
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        let run = |asks: super::runtime::Asks<Term, Result<(), E>>| {
            self.job.run(move |term| asks.ask(term))
        };
        self.runtime.serve(run, |term| work(&term))?
    }
}
