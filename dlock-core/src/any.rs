//! Any-of lock: the first of several locks that is free.

use crate::{
    client::Client,
    clock::Instant,
    error::{Error, TimeoutPhase, about},
    guard::Guard,
    lease::Lease,
    lock::{Lock, sure},
    name::LockName,
    options::WaitPolicy,
    set::distinct,
};
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use std::{collections::BTreeMap, panic::Location, time::Duration};

impl Client {
    /// Returns a lock that any of these names satisfies: one of several machines, licences or slots. It does
    /// no I/O.
    ///
    /// Each name has a fencing token of its own. Names that are given twice count once.
    ///
    /// # Errors
    /// `Misuse` without a name, with more than 64, and when a name is not legal.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
    /// # let store = dlock_memory::MemoryStore::new(dlock_core::Clock::boot());
    /// # let config = dlock_memory::MemoryConfig::new(dlock_core::driver::Wake::Queue);
    /// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::connect(&store, config))?;
    /// let printer = client.lock_any(["printer:1", "printer:2"])?;
    /// let (first, second) = (printer.acquire().await?, printer.acquire().await?);
    /// assert_eq!((first.name().as_str(), second.name().as_str()), ("printer:1", "printer:2"));
    /// assert!(printer.try_acquire().await?.is_none()); // both are held
    /// # Ok(()) }
    /// ```
    pub fn lock_any<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<AnyLock, Error> {
        distinct(self, names).map(AnyLock)
    }
}

/// The first of several locks that is free: from [`Client::lock_any`].
///
/// It asks for one after another, in the order given. When all are held, it waits for all at once and keeps
/// the one that comes first; it leaves the other queues, and a lock that was granted at the same moment is
/// released in the background. [`Guard::name`] says which it is.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// let slot = client.lock_any((0..4).map(|number| format!("slot:{number}")))?;
/// let guard = slot.acquire().await?; // at most four at once
/// println!("in {}", guard.name());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct AnyLock(Vec<Lock>); // at least one

impl AnyLock {
    /// The names, in the order in which they are asked for.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let any = client.lock_any(["b", "a", "b"])?;
    /// assert_eq!(any.names().map(|name| name.as_str()).collect::<Vec<_>>(), ["b", "a"]);
    /// # Ok(()) }
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &LockName> {
        self.0.iter().map(Lock::name)
    }

    /// Sets the lease, instead of the client's: see [`Lock::lease`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let any = any.lease(dlock_core::Lease::renewed(Duration::from_secs(10)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(self, lease: Lease) -> Self {
        self.each(|lock| lock.lease(lease))
    }

    /// Stops renewing the lock `time` after the acquisition: see [`Lock::max_hold`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let any = any.max_hold(Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_hold(self, time: Duration) -> Self {
        self.each(|lock| lock.max_hold(time))
    }

    /// Counts the locks under `class` in the metrics: see [`Lock::class`]. Each name that is asked for, or waited for, is
    /// an acquire of its own there.
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// let any = any.class("orders");
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(self, class: &str) -> Self {
        self.each(|lock| lock.class(class))
    }

    fn each(self, change: impl FnMut(Lock) -> Lock) -> Self {
        Self(self.0.into_iter().map(change).collect())
    }

    /// Acquires the first lock that is free, and waits without a limit.
    ///
    /// # Errors
    /// As [`Lock::acquire`], when every lock failed, or one for good; the error names one of them.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the places in all queues. Nothing stays behind in the store: the cleanup
    /// undoes requests in flight in the background.
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// let guard = any.acquire().await?;
    /// println!("got {}", guard.name());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let any = self.clone();
        any.first(WaitPolicy::Forever, Location::caller()).map(sure)
    }

    /// Acquires the first lock that is free within `limit`. With [`Duration::ZERO`] it asks once for each.
    ///
    /// # Errors
    /// `Timeout` when the time is up; otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// match any.acquire_timeout(Duration::from_secs(5)).await {
    ///     Ok(guard) => drop(guard.release().await?),
    ///     Err(error) if error.is_contended() => println!("all are held: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire_timeout(
        &self,
        limit: Duration,
    ) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let (any, wait) = (self.clone(), WaitPolicy::Within(limit));
        any.first(wait, Location::caller()).map(sure)
    }

    /// Acquires the first lock that is free. Returns `None` when all are held. It waits for the store's
    /// answers only, for at most a third of the lease or 5 s a lock.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); `Timeout` when the store did not answer for one of them, and no other
    /// was free.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(any: dlock_core::AnyLock) -> Result<(), dlock_core::Error> {
    /// match any.try_acquire().await? {
    ///     Some(guard) => drop(guard.release().await?),
    ///     None => println!("all are held"),
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        self.clone().first(WaitPolicy::Try, Location::caller())
    }

    async fn first(
        self,
        wait: WaitPolicy,
        at: &'static Location<'static>,
    ) -> Result<Option<Guard>, Error> {
        let clock = &self.0[0].engine.clock;
        let limit = match wait {
            WaitPolicy::Within(limit) => limit,
            WaitPolicy::Try | WaitPolicy::Forever => Duration::MAX,
        };
        let end = clock.now() + limit;
        let free = tokio::select! {
            biased;
            free = self.free(at) => free,
            () = clock.sleep_until(end), if !limit.is_zero() => Err(self.too_late(TimeoutPhase::Request, limit)),
        };
        let wait = match (wait, free) {
            (_, Ok(Some(guard))) => return Ok(Some(guard)),
            (WaitPolicy::Try, free) => return free,
            (_, Err(error)) if !error.is_retryable() || clock.now() >= end => return Err(error),
            _ if clock.now() >= end => return Err(self.too_late(TimeoutPhase::Wait, limit)),
            (WaitPolicy::Within(_), _) => WaitPolicy::Within(end.since(clock.now())),
            (WaitPolicy::Forever, _) => wait,
        };
        // One output is taken, and a future that is dropped with a grant in it releases it.
        let waiting = |lock, wait, from| async move {
            clock.sleep_until(from).await;
            (lock, Lock::acquire_by(lock, wait, at).await)
        };
        let now = clock.now();
        let mut waits: FuturesUnordered<_> =
            (self.0.iter().map(|it| waiting(it, wait, now))).collect();
        let mut failed = BTreeMap::new();
        while let Some((lock, ended)) = waits.next().await {
            let error = match ended {
                Err(error) if error.is_retryable() => error,
                ended => return ended,
            };
            // A store may be away for some of the names only.
            let now = clock.now();
            failed.insert(lock.name(), now);
            let is_away = |since: &Instant| now.since(*since) < AWAY;
            let all_are_away = failed.len() == self.0.len() && failed.values().all(is_away);
            let again = now + AGAIN;
            if all_are_away || again >= end && waits.is_empty() {
                return Err(error);
            }
            if again < end {
                let rest = match wait {
                    WaitPolicy::Within(_) => WaitPolicy::Within(end.since(again)),
                    wait => wait,
                };
                waits.push(waiting(lock, rest, again));
            }
        }
        Err(self.too_late(TimeoutPhase::Wait, limit))
    }

    /// Asks once for each lock, until one is free.
    async fn free(&self, at: &'static Location<'static>) -> Result<Option<Guard>, Error> {
        let mut failed = None;
        for lock in &self.0 {
            match lock.acquire_by(WaitPolicy::Try, at).await {
                Ok(None) => {}
                Err(error) if error.is_retryable() => failed = Some(error),
                found => return found,
            }
        }
        failed.map_or(Ok(None), Err)
    }

    fn too_late(&self, phase: TimeoutPhase, limit: Duration) -> Error {
        let names = self.0.len();
        let why = match limit {
            Duration::ZERO => format!("none of {names} locks was free"),
            _ => format!("none of {names} locks was acquired within {}", about(limit)),
        };
        Error::timeout(phase, why).of(self.0[0].engine.caps.backend)
    }
}

/// Within this time of the last failure a store counts as away: twice the longest that an acquire waits for it.
const AWAY: Duration = Duration::from_secs(60);

/// The pause before a lock whose store failed is waited for again: it may fail at once.
const AGAIN: Duration = Duration::from_secs(1);
