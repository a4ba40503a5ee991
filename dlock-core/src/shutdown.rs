//! Shutdown: ends a client without letting two holders in.

use crate::{
    engine::{
        Engine,
        cleanup::CleanupJob,
        hold::{GuardState, Hold},
        until,
    },
    error::{Error, ErrorKind, LossReason},
    lease::Lease,
    name::LockName,
};
use std::{
    fmt,
    future::IntoFuture,
    pin::Pin,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

/// A shutdown to await: see [`Client::shutdown`](crate::Client::shutdown).
///
/// # Cancel safety
/// Once awaited, it runs to its end by itself: dropping the future loses the report and nothing else.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// # use std::time::Duration;
/// client.shutdown(Duration::from_secs(5)).await?;
/// # Ok(()) }
/// ```
#[must_use = "nothing is shut down until it is awaited"]
pub struct Shutdown {
    engine: Arc<Engine>,
    grace: Duration,
    force: bool,
}

/// The outcome for the locks that were held when the shutdown began.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// # use std::time::Duration;
/// let report = client.shutdown(Duration::from_secs(5)).await?;
/// if !report.unknown.is_empty() {
///     println!("the store did not answer for {:?}; the leases end what is left", report.unknown);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Each lock and its outcome, in the order of names.
    pub locks: Vec<(LockName, ShutdownOutcome)>,
    /// Locks with requests whose effect is still unknown, because the store did not answer in time. The
    /// leases end what they may have left.
    pub unknown: Vec<LockName>,
    /// How many holds this client detached and did not attach again. They have no guards and are left
    /// alone.
    pub detached: usize,
}

/// The outcome for one lock.
///
/// # Examples
/// ```
/// # async fn example(report: dlock_core::ShutdownReport) -> Result<(), dlock_core::Error> {
/// use dlock_core::ShutdownOutcome;
///
/// for (name, outcome) in &report.locks {
///     if let ShutdownOutcome::Left { rest } = outcome {
///         println!("{name} stays held for {rest:?}");
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShutdownOutcome {
    /// It was released, and the store confirmed it.
    Released,
    /// Its user still held it: no other owner gets it for about this long, until its lease is over.
    Left {
        /// The rest of its lease; a renewal in flight may add one lease to it.
        rest: Duration,
    },
    /// It was lost before the shutdown reached it.
    Lost(LossReason),
    /// Its release was sent and not confirmed.
    Unknown,
}

/// The time limit, after the grace, for undoing cancelled requests and for confirming forced releases.
const TAIL: Duration = Duration::from_secs(2);

impl Shutdown {
    pub(crate) fn new(engine: Arc<Engine>, grace: Duration) -> Self {
        Self {
            engine,
            grace,
            force: false,
        }
    }

    /// Releases the locks that are still held when the grace is over, instead of leaving them to their
    /// leases. Code that still runs under such a lock **runs beside its next holder**. Use it only in a
    /// process that is certain to have stopped that code.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// // Every task that worked under a lock was joined before.
    /// client.shutdown(Duration::ZERO).force().await?;
    /// # Ok(()) }
    /// ```
    pub fn force(mut self) -> Self {
        self.force = true;
        self
    }

    /// Refuses new acquires from here on.
    fn begin(&self) -> Result<Vec<Arc<Hold>>, Error> {
        let held = {
            // Under the lock table's mutex: a hold that enters it later finds the flag set.
            let table = self.engine.table();
            if self.engine.closing.swap(true, SeqCst) {
                return Err(Engine::closed());
            }
            table.holds()
        };
        self.engine.shutting_down.notify_waiters();
        self.engine.calls.deadlines.wake_all();
        Ok(held)
    }

    async fn finish(self, held: Vec<Arc<Hold>>) -> ShutdownReport {
        let Self {
            engine,
            grace,
            force,
        } = self;
        engine.quiet_by(grace).await;
        let held: Vec<_> = held.iter().filter(|hold| !hold.is_detached()).collect();
        let mut locks: Vec<_> = (held.iter())
            .map(|hold| (hold.name.clone(), engine.take_away(hold, force)))
            .collect();
        engine.watchdog.stop();
        // A cancelled waiter may have a request in flight. A store that does not answer is not waited for
        // long.
        engine.quiet_by(TAIL).await;
        for ((_, fate), hold) in locks.iter_mut().zip(held) {
            if *fate == ShutdownOutcome::Unknown {
                *fate = engine.fate(hold);
            }
        }
        let unknown = engine.cleanup.names();
        engine.closed.store(true, SeqCst);
        tokio::select! {
            biased;
            () = engine.driver.close() => {}
            () = engine.clock.sleep_until(engine.clock.now() + TAIL) => {}
        }
        ShutdownReport {
            locks,
            unknown,
            detached: engine.detached_living(),
        }
    }
}

impl Engine {
    /// Waits until nothing is held, in flight or being cleaned up, for at most `limit`.
    async fn quiet_by(&self, limit: Duration) {
        let end = self.clock.now() + limit;
        tokio::select! {
            biased;
            () = until(&self.quieter, || self.is_quiet()) => {}
            () = self.clock.sleep_until(end) => {}
        }
    }

    /// Ends one hold after the grace: its guard is lost, and the lock is left to its lease unless forced.
    fn take_away(self: &Arc<Self>, hold: &Arc<Hold>, force: bool) -> ShutdownOutcome {
        if hold.is_released() {
            return ShutdownOutcome::Released;
        }
        let end = hold.deadline() + Lease::margin(hold.lease().length());
        let rest = end.since(self.clock.now());
        match hold.state(&self.clock) {
            GuardState::Held | GuardState::Uncertain => {
                self.lose(hold, LossReason::Shutdown);
                if hold.is_given_up() {
                    return ShutdownOutcome::Unknown; // just now, by its user
                }
                if !force {
                    return ShutdownOutcome::Left { rest };
                }
                self.clean_up(CleanupJob::of(hold));
                ShutdownOutcome::Unknown
            }
            GuardState::Lost(_) if hold.is_given_up() => ShutdownOutcome::Unknown,
            GuardState::Lost(reason) => ShutdownOutcome::Lost(reason),
        }
    }

    /// What became of a hold whose release was sent.
    fn fate(&self, hold: &Hold) -> ShutdownOutcome {
        match hold.state(&self.clock) {
            _ if hold.is_released() => ShutdownOutcome::Released,
            GuardState::Lost(LossReason::NotHeld) if !hold.is_given_up() => {
                ShutdownOutcome::Lost(LossReason::NotHeld)
            }
            _ => ShutdownOutcome::Unknown,
        }
    }
}

impl IntoFuture for Shutdown {
    type Output = Result<ShutdownReport, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let held = self.begin()?;
            let handle = self.engine.calls.handle.clone();
            handle.spawn(self.finish(held)).await.map_err(|error| {
                let message = "the client's runtime is gone: nothing is renewed any more, and the leases end the holds";
                Error::new(ErrorKind::Indeterminate, message).with_source(error)
            })
        })
    }
}

impl fmt::Debug for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shutdown")
            .field("grace", &self.grace)
            .field("force", &self.force)
            .finish_non_exhaustive()
    }
}
