//! Shutting down without two holders.

use crate::{
    error::{Error, ErrorKind, LossReason},
    flaw::Flaw,
    hold::{Hold, State},
    inner::Inner,
    janitor::Job,
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

/// A shutdown to be awaited: see [`Client::shutdown`](crate::Client::shutdown).
///
/// # Cancel safety
/// Once awaited it goes on by itself: dropping the future loses the report and nothing else.
#[must_use = "nothing is shut down until it is awaited"]
pub struct Shutdown {
    inner: Arc<Inner>,
    grace: Duration,
    force: bool,
}

/// What became of the locks that were held when the shutdown began.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Each lock and its fate, in the order of names.
    pub locks: Vec<(LockName, Fate)>,
    /// Requests whose effect is still unknown: the store did not answer within the grace, the leases end what they may have left.
    pub unknown: Vec<LockName>,
    /// How many holds were detached by this client and not taken up again by it: no guards, so untouched.
    pub detached: usize,
}

/// What became of one lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fate {
    /// It was given back, and the store confirmed it.
    Released,
    /// Its user still had it: nobody else gets it for about this long from now, when its lease is over.
    Left {
        /// What its lease had left; a renewal that was under way may add a lease to it.
        rest: Duration,
    },
    /// It was lost before the shutdown came to it.
    Lost(LossReason),
    /// Its release was sent and not confirmed.
    Unknown,
}

/// How long what was cancelled by the end of the grace may take to be undone, and a forced release to be confirmed, while the store answers.
const TAIL: Duration = Duration::from_secs(2);

impl Shutdown {
    pub(crate) fn new(inner: Arc<Inner>, grace: Duration) -> Self {
        Self {
            inner,
            grace,
            force: false,
        }
    }

    /// Releases what is still held when the grace is over, instead of leaving it to its lease. Code that still runs under such a lock
    /// **runs beside its next holder**: only for a process that is certain to have stopped that code.
    pub fn force(mut self) -> Self {
        self.force = true;
        self
    }

    /// Refuses new acquires from here on.
    fn begin(&self) -> Result<Vec<Arc<Hold>>, Error> {
        let held = {
            // Under the book's lock: whatever enters it later finds the flag set.
            let book = self.inner.book();
            if self.inner.closing.swap(true, SeqCst) {
                return Err(Inner::closed());
            }
            book.holds()
        };
        self.inner.revoked.notify_waiters();
        self.inner.adrift.alarms.shake();
        Ok(held)
    }

    async fn finish(self, held: Vec<Arc<Hold>>) -> Report {
        let Self {
            inner,
            grace,
            force,
        } = self;
        let force = force || inner.flawed(Flaw::ShutdownReleases);
        inner.quiet_by(grace).await;
        let mut locks: Vec<_> = held
            .iter()
            .filter(|hold| !hold.is_detached())
            .map(|hold| (hold.name.clone(), inner.take_away(hold, force)))
            .collect();
        inner.watchdog.stop();
        // Whoever was cancelled may have something under way; a store that does not answer is not waited for long.
        inner.quiet_by(TAIL).await;
        let reported = held.iter().filter(|hold| !hold.is_detached());
        for ((_, fate), hold) in locks.iter_mut().zip(reported) {
            if *fate == Fate::Unknown && hold.is_released() {
                *fate = Fate::Released;
            }
        }
        let unknown = inner.janitor.names();
        inner.closed.store(true, SeqCst);
        tokio::select! {
            biased;
            () = inner.driver.close() => {}
            () = inner.clock.sleep_until(inner.clock.now() + TAIL) => {}
        }
        Report {
            locks,
            unknown,
            detached: inner.detached_living(),
        }
    }
}

impl Inner {
    /// Waits until nothing is held, under way or being settled, at most that long.
    async fn quiet_by(&self, limit: Duration) {
        let end = self.clock.now() + limit;
        let quiet = async {
            loop {
                let quieter = self.quieter.notified();
                let mut quieter = std::pin::pin!(quieter);
                quieter.as_mut().enable();
                if self.is_quiet() {
                    return;
                }
                quieter.await;
            }
        };
        tokio::select! {
            biased;
            () = quiet => {}
            () = self.clock.sleep_until(end) => {}
        }
    }

    /// The grace is over: what is held is lost to its user, and left to its lease unless forced.
    fn take_away(self: &Arc<Self>, hold: &Arc<Hold>, force: bool) -> Fate {
        if hold.is_released() {
            return Fate::Released;
        }
        let end = hold.deadline() + Lease::margin(hold.lease().length());
        let rest = end.since(self.clock.now());
        match hold.state(&self.clock) {
            State::Held | State::Uncertain => {
                self.lose(hold, LossReason::Shutdown);
                if !force {
                    return Fate::Left { rest };
                }
                self.settle(Job::of(hold));
                Fate::Unknown
            }
            State::Lost(_) if hold.is_given_up() => Fate::Unknown,
            State::Lost(reason) => Fate::Lost(reason),
        }
    }
}

impl IntoFuture for Shutdown {
    type Output = Result<Report, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let held = self.begin()?;
            let handle = self.inner.adrift.handle.clone();
            handle.spawn(self.finish(held)).await.map_err(|error| {
                let message = "the client's runtime is gone: nothing is renewed any more, the leases end what was held";
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
