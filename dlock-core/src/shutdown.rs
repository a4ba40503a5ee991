//! Shutting down without two holders.

use crate::{
    client::Inner,
    error::{Error, LossReason},
    flaw::Flaw,
    hold::Hold,
    janitor::Job,
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
    /// Its user gave it back in time, and the store confirmed it.
    Released,
    /// Its user still had it: nobody else gets it before this long from now, when its lease is over.
    Left {
        /// The longest the store still has it.
        rest: Duration,
    },
    /// It was lost before the shutdown came to it.
    Lost(LossReason),
    /// Its release was sent and not confirmed.
    Unknown,
}

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

    async fn run(self) -> Result<Report, Error> {
        let Self {
            inner,
            grace,
            force,
        } = self;
        let end = inner.clock.now() + grace;
        let held = {
            // Under the book's lock: whatever enters it later finds the flag set.
            let book = inner.book();
            if inner.closing.swap(true, SeqCst) {
                return Err(Inner::closed());
            }
            book.holds()
        };
        inner.revoked.notify_waiters();
        inner.book().wake_all();
        tokio::select! {
            biased;
            () = all_given_back(&inner) => {}
            () = inner.clock.sleep_until(end) => {}
        }
        let force = force || inner.flawed(Flaw::ShutdownReleases);
        let report = Report {
            locks: held
                .iter()
                .map(|hold| (hold.name.clone(), inner.part(hold, force)))
                .collect(),
            unknown: inner.janitor.names(),
            detached: inner.detached.load(SeqCst),
        };
        inner.watchdog.stop();
        if force {
            tokio::select! {
                biased;
                () = inner.janitor.idle() => {}
                () = inner.clock.sleep_until(end + FORCED) => {}
            }
        }
        tokio::select! {
            biased;
            () = inner.driver.close() => {}
            () = inner.clock.sleep_until(inner.clock.now() + CLOSING) => {}
        }
        Ok(report)
    }
}

/// How long a forced release may take.
const FORCED: Duration = Duration::from_secs(5);

/// How long closing the connections may take: it ends no hold, so nothing is lost when it does not come to an end.
const CLOSING: Duration = Duration::from_secs(2);

async fn all_given_back(inner: &Arc<Inner>) {
    loop {
        let unheld = inner.unheld.notified();
        let mut unheld = std::pin::pin!(unheld);
        unheld.as_mut().enable();
        if inner.book().is_unheld() {
            break;
        }
        unheld.await;
    }
    inner.janitor.idle().await;
}

impl Inner {
    /// The grace is over: what is held is lost to its user, and left to its lease unless forced.
    fn part(self: &Arc<Self>, hold: &Arc<Hold>, force: bool) -> Fate {
        use crate::hold::State;
        if hold.is_released() {
            return Fate::Released;
        }
        let rest =
            (hold.deadline() + crate::Lease::margin(hold.lease().length())).since(self.clock.now());
        match hold.state(&self.clock) {
            State::Held | State::Uncertain => {
                self.lose(hold, LossReason::Shutdown);
                if force {
                    self.settle(Job::release(hold.name.clone(), hold.owner, hold.id));
                }
                Fate::Left { rest }
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
        Box::pin(self.run())
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
