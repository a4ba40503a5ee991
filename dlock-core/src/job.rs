//! Scheduled job: one of several replicas runs it at each tick.
//!
//! Every replica tries the lock at the tick by its own clock. The lock stays unavailable until shortly before
//! the next tick, so a replica whose clock is late does not run the tick again.

use crate::{
    client::Client,
    election::{Led, Term},
    engine::metrics::JobEnd,
    error::{Error, LossReason},
    guard::Guard,
    lease::{Lease, MAX_LEASE, readable},
    lock::Lock,
    name::LockName,
};
use std::{
    convert::Infallible,
    error::Error as StdError,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

impl Client {
    /// Returns the job of this name, to be run at regular times by one of the replicas that schedule it. It
    /// does no I/O. The lock of the same name is the job's, so a holder of that lock, an
    /// election of the same name, say, keeps it from running.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal: see [`LockName`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), dlock_core::Error> {
    /// # let store = dlock_memory::MemoryStore::new(dlock_core::Clock::simulated());
    /// # let config = dlock_memory::MemoryConfig::new(dlock_core::driver::Wake::Queue);
    /// # let driver = std::sync::Arc::new(dlock_memory::MemoryDriver::connect(&store, config));
    /// # let client = dlock_core::Client::builder(driver).clock(store.clock().clone()).build()?;
    /// use dlock_core::Term;
    /// use std::time::Duration;
    ///
    /// async fn report(term: Term) -> Result<(), String> {
    ///     println!("written with fencing token {}", term.token());
    ///     Ok(())
    /// }
    /// let hourly = client.job("report")?.every(Duration::from_secs(3600));
    /// tokio::spawn(hourly.run(report)); // on every replica
    /// # tokio::time::sleep(Duration::from_secs(7300)).await;
    /// # Ok(()) }
    /// ```
    pub fn job(&self, name: impl AsRef<str>) -> Result<Job, Error> {
        Ok(Job {
            lock: self.lock(name)?,
            period: Duration::ZERO,
            offset: Duration::ZERO,
            clock_difference: None,
            callback: None,
        })
    }
}

/// A job that one of several replicas runs at each tick: from [`Client::job`].
///
/// The ticks are the multiples of the period since 1970-01-01 00:00 UTC, plus the offset, by the wall clock
/// of each replica. All replicas need the same period and offset.
///
/// At a tick each replica asks for the lock, once. One gets it and runs the job; for the others the tick is
/// over. The lock is unavailable until the clock difference before the next tick, or until the job ends,
/// whichever is later. A job that takes longer than a period thus skips ticks, and never runs twice at a
/// time. A tick is not caught up: a replica that notices it later than the clock difference skips it. When a replica dies during a run, the lock is held until its lease
/// ends: with a [`lease`](Self::lease) shorter than the period, the next tick is the next run.
///
/// To stop, call [`Client::shutdown`](crate::Client::shutdown) beside it and await [`run`](Self::run): a run under way
/// has the grace to end. Dropping the future of `run` drops a run under way, and its lock is released in the
/// background.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// # async fn report() -> Result<(), String> { Ok(()) }
/// use std::time::Duration;
///
/// const HOUR: Duration = Duration::from_secs(3600);
/// let nightly = client.job("report")?.every(24 * HOUR).offset(3 * HOUR); // at 03:00 UTC
/// nightly.run(|_term| report()).await?; // ends with an error only
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Job {
    lock: Lock,
    period: Duration,
    offset: Duration,
    clock_difference: Option<Duration>,
    callback: Option<Arc<Callback>>,
}

type Callback = dyn Fn(&JobReport) + Send + Sync;

/// What became of one tick on this replica.
///
/// # Examples
/// ```
/// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
/// use dlock_core::JobReport;
///
/// let job = job.on_report(|report| match report {
///     JobReport::Failed(error) => println!("failed, and runs again at the next tick: {error}"),
///     other => println!("{other:?}"),
/// });
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum JobReport {
    /// The job ran to its end.
    Ran,
    /// Another replica ran it, or still runs it. The store refuses the lock to this one in either case.
    Skipped,
    /// This replica noticed the tick later than the [clock difference](Job::clock_difference) and did not ask for the
    /// lock. Another one may have run it.
    Late,
    /// The job returned this error.
    Failed(Box<dyn StdError + Send + Sync>),
    /// The lock was lost while the job ran. The future of the job was dropped, unless it had just ended.
    Lost(LossReason),
    /// The store did not say whether another replica runs it, so this one did not.
    Unavailable(Error),
}

impl Job {
    /// The name of the job and of its lock.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// assert_eq!(client.job("report")?.name().as_str(), "report");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.lock.name()
    }

    /// Sets the period: the time from tick to tick, at least 1 s and at most a year. It has no default, and
    /// [`run`](Self::run) refuses another one.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let job = client.job("report")?.every(Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn every(mut self, period: Duration) -> Self {
        self.period = period;
        self
    }

    /// Moves all ticks: a period of a day and an offset of three hours is 03:00 UTC.
    ///
    /// # Examples
    /// ```
    /// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let job = job.offset(Duration::from_secs(3 * 3600));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn offset(mut self, offset: Duration) -> Self {
        self.offset = offset;
        self
    }

    /// Sets how far the wall clocks of two replicas may differ, with the time of a request to the store
    /// added. The default is a tenth of the period, at most a minute; half of the period is the most.
    ///
    /// The lock of a tick is unavailable for the period minus this time, counted from the tick. If the
    /// clocks differ by more, a tick may be skipped.
    ///
    /// # Examples
    /// ```
    /// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let job = job.clock_difference(Duration::from_secs(5));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn clock_difference(mut self, time: Duration) -> Self {
        self.clock_difference = Some(time);
        self
    }

    /// Sets the lease of a run, instead of the client's: see [`Lock::lease`]. A renewed lease that is shorter than twice
    /// the [clock difference](Self::clock_difference) is lengthened to that: if a replica dies in its run, the lock must
    /// not be free before the tick is over on every replica, whose clock and notice may both be late. On ZooKeeper a
    /// lease is at most a session, and a replica that is later than that then runs the tick again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let job = job.lease(dlock_core::Lease::renewed(Duration::from_secs(10)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Counts the lock under `class` in the metrics: see [`Lock::class`]. The counter of ticks has no class.
    ///
    /// # Examples
    /// ```
    /// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
    /// let job = job.class("orders");
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        self.lock = self.lock.class(class);
        self
    }

    /// Calls this with what became of each tick. It must not block. The log has the same, under
    /// `dlock::job`.
    ///
    /// # Examples
    /// ```
    /// # async fn example(job: dlock_core::Job) -> Result<(), dlock_core::Error> {
    /// let job = job.on_report(|report| println!("{report:?}"));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn on_report(mut self, callback: impl Fn(&JobReport) + Send + Sync + 'static) -> Self {
        self.callback = Some(Arc::new(callback));
        self
    }

    /// Runs `work` at each tick that this replica gets, until the client shuts down. The first tick is the
    /// next one. The future of `work` is dropped when the lock is lost.
    ///
    /// # Errors
    /// `Misuse` when the period is not between 1 s and a year, or the clock difference exceeds half of it.
    /// `ShuttingDown`, and every other error of a [`try_acquire`](Lock::try_acquire) that repeating does not
    /// help.
    ///
    /// # Cancel safety
    /// Dropping the future drops the future of `work`, and then the lock, which is released in the
    /// background: no other replica runs that tick.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # async fn report(_: dlock_core::FencingToken) -> Result<(), String> { Ok(()) }
    /// # use std::time::Duration;
    /// let hourly = client.job("report")?.every(Duration::from_secs(3600));
    /// hourly.run(|term| async move { report(term.token()).await }).await?;
    /// # Ok(()) }
    /// ```
    /// What `work` captures, it clones for each run:
    /// ```
    /// # async fn example(hourly: dlock_core::Job, bills: std::sync::Arc<String>) -> Result<(), dlock_core::Error> {
    /// # use std::sync::Arc;
    /// hourly.run(|term| {
    ///     let bills = Arc::clone(&bills); // `async move` takes it away
    ///     async move {
    ///         println!("{bills} with token {}", term.token());
    ///         Ok::<_, std::io::Error>(())
    ///     }
    /// }).await?;
    /// # Ok(()) }
    /// ```
    pub fn run<E, F, W>(
        &self,
        mut work: W,
    ) -> impl Future<Output = Result<Infallible, Error>> + use<E, F, W>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
        F: Future<Output = Result<(), E>>,
        W: FnMut(Term) -> F,
    {
        let mut job = self.clone();
        async move {
            let difference = job.checked()?;
            job.lock = job.outlasting(difference)?;
            loop {
                let late = job.tick().await;
                // Later, another replica may have run it and died since.
                let rest = match late <= difference.max(PROMPT) {
                    true => job.period.saturating_sub(difference + late),
                    false => Duration::ZERO,
                };
                let report = match job.attempt(rest).await {
                    Ok(Some(guard)) => Led::under(guard, &mut work).await.reported().await,
                    Ok(None) if rest.is_zero() => JobReport::Late,
                    Ok(None) => JobReport::Skipped,
                    Err(error) if error.is_retryable() => JobReport::Unavailable(error),
                    Err(error) => return Err(error),
                };
                job.report(&report);
            }
        }
    }

    /// The clock difference, once the times fit together.
    fn checked(&self) -> Result<Duration, Error> {
        let period = self.period;
        if !(SHORTEST..=MAX_LEASE).contains(&period) {
            return Err(Error::misuse(format!(
                "the period ({}) must be between {SHORTEST:?} and {}: give one to every()",
                readable(&period),
                readable(&MAX_LEASE)
            )));
        }
        let difference = self.clock_difference.unwrap_or((period / 10).min(MINUTE));
        if difference > period / 2 {
            return Err(Error::misuse(format!(
                "the clock difference ({difference:?}) must not exceed half of the period ({period:?})"
            )));
        }
        Ok(difference)
    }

    /// The lock, whose lease outlasts the tick on the other replicas, whose clocks and notice may both be late: only a
    /// release leaves a minimum hold, and a replica may die in its run.
    fn outlasting(&self, difference: Duration) -> Result<Lock, Error> {
        let lease = self.lock.effective_lease()?;
        let longer = (difference * 2).min(*self.lock.engine.caps.leases.end());
        if lease.is_renewed() && lease.length() < longer {
            return Ok(self.lock.clone().lease(Lease::renewed(longer)));
        }
        Ok(self.lock.clone())
    }

    /// Waits for the next tick, and returns how late it is noticed. A shutdown is a tick: the lock then
    /// says so.
    async fn tick(&self) -> Duration {
        let clock = &self.lock.engine.clock;
        let mut next = self.after(self.wall());
        loop {
            let now = self.wall();
            if now >= next {
                return now - next;
            }
            if next - now > self.period {
                next = self.after(now); // the clock was set back
            }
            tokio::select! {
                biased;
                () = self.lock.engine.shutting_down() => return Duration::ZERO,
                () = clock.sleep_until(clock.now() + (next - now).min(MINUTE)) => {}
            }
        }
    }

    /// The first tick after that time.
    fn after(&self, now: Duration) -> Duration {
        let (period, offset) = (self.period.as_nanos(), self.offset.as_nanos());
        let since = (now.as_nanos() + period - offset % period) % period;
        // At most a year.
        now + Duration::from_nanos(u64::try_from(period - since).unwrap_or(u64::MAX))
    }

    /// The time since 1970. The wall clock is read again and again, because it may be set.
    fn wall(&self) -> Duration {
        let clock = &self.lock.engine.clock;
        if clock.is_simulated() {
            return Duration::from_nanos(clock.now().as_nanos());
        }
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap_or_default()
    }

    /// Tries to get this tick, whose lock is to stay unavailable for `rest`.
    async fn attempt(&self, rest: Duration) -> Result<Option<Guard>, Error> {
        if rest.is_zero() && !self.lock.engine.is_closing() {
            return Ok(None);
        }
        self.lock.clone().min_hold(rest).try_acquire().await
    }

    fn report(&self, report: &JobReport) {
        let (job, backend) = (self.name(), self.lock.engine.caps.backend);
        self.lock.engine.classes.store.job(match report {
            JobReport::Ran => JobEnd::Ran,
            JobReport::Skipped => JobEnd::Skipped,
            JobReport::Late => JobEnd::Late,
            JobReport::Failed(_) => JobEnd::Failed,
            JobReport::Lost(_) => JobEnd::Lost,
            JobReport::Unavailable(_) => JobEnd::Unavailable,
        });
        match report {
            JobReport::Ran | JobReport::Skipped => {
                tracing::debug!(target: "dlock::job", lock = %job, backend, ?report, "tick");
            }
            _ => tracing::warn!(target: "dlock::job", lock = %job, backend, ?report, "tick"),
        }
        if let Some(callback) = &self.callback {
            callback(report);
        }
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> Led<Result<(), E>> {
    /// Releases the lock, and says what became of the tick.
    async fn reported(self) -> JobReport {
        let report = match self.worked {
            Ok(Ok(())) => JobReport::Ran,
            Ok(Err(error)) => JobReport::Failed(error.into()),
            Err(reason) => return JobReport::Lost(reason),
        };
        let released = match self.guard {
            Some(guard) => guard.release().await.map(drop),
            None => Ok(()),
        };
        let loss = released.err().and_then(|error| error.loss());
        match (loss, report) {
            (Some(reason), JobReport::Ran) => JobReport::Lost(reason),
            (_, report) => report,
        }
    }
}

/// A tick that is noticed within this time is in time.
const PROMPT: Duration = Duration::from_millis(100);

/// The shortest period. Clocks and stores are not exact enough for less.
const SHORTEST: Duration = Duration::from_secs(1);

/// The most of the default clock difference, and how often the wall clock is read.
const MINUTE: Duration = Duration::from_secs(60);

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("lock", &self.lock)
            .field("period", &self.period)
            .field("offset", &self.offset)
            .field("clock_difference", &self.clock_difference)
            .finish_non_exhaustive()
    }
}
