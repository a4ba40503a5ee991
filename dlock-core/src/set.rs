//! Lock set: several locks that are acquired all together or not at all.
//!
//! Every set is acquired in the order of its names, so sets that overlap cannot wait for each other in a
//! circle.

use crate::{
    client::Client,
    clock::Instant,
    engine::release::ReleaseOutcome,
    error::{Error, LossReason, TimeoutPhase, about},
    guard::Guard,
    lease::Lease,
    lock::{Lock, sure},
    name::LockName,
    options::WaitPolicy,
    token::FencingToken,
};
use futures_util::{
    FutureExt,
    future::{join_all, pending, select_all},
};
use std::{panic::Location, time::Duration};

impl Client {
    /// Returns the set of the locks of these names, to be acquired all together. It does no I/O.
    ///
    /// Names that are given twice count once.
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
    /// let transfer = client.lock_all(["account:7", "account:3"])?;
    /// let guard = transfer.acquire().await?; // both, or neither
    /// guard.check()?;
    /// println!("fenced by {:?} and {:?}", guard.token("account:3"), guard.token("account:7"));
    /// for (name, outcome) in guard.release().await {
    ///     println!("{name}: {:?}", outcome?);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn lock_all<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<LockSet, Error> {
        let mut locks = distinct(self, names)?;
        locks.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        Ok(LockSet(locks))
    }
}

/// Several locks that are acquired all together or not at all: from [`Client::lock_all`].
///
/// The locks are acquired one after another, in the order of their names. Sets that overlap therefore never
/// wait for each other in a circle. A task that holds a lock of its own while it acquires a set still can:
/// put that lock into the set.
///
/// A set has no minimum hold, because a lock that is given back while the rest is held by another would be
/// unavailable for that long.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// let set = client.lock_all(["orders:42", "stock:7"])?;
/// match set.try_acquire().await? {
///     Some(guard) => guard.run(async { /* needs both */ }).await?,
///     None => println!("one of them is held by another"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LockSet(Vec<Lock>); // at least one

/// The locks of a [`LockSet`], all held. It is held for as long as [`check`](Self::check) says so: the loss
/// of one lock is the loss of the set.
///
/// Dropping it releases the locks in the background, as dropping a [`Guard`] does. Write `let _guard`,
/// never `let _`.
///
/// # Examples
/// ```
/// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
/// let guard = set.acquire().await?;
/// guard.run(async { /* dropped when one of the locks is lost */ }).await?;
/// for (name, outcome) in guard.release().await {
///     println!("{name}: {:?}", outcome?);
/// }
/// # Ok(()) }
/// ```
#[must_use = "the locks are released when the guard is dropped"]
#[clippy::has_significant_drop]
#[derive(Debug)]
pub struct SetGuard {
    guards: Vec<Guard>,
}

impl LockSet {
    /// The names, sorted and each of them once.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let set = client.lock_all(["b", "a", "b"])?;
    /// assert_eq!(set.names().map(|name| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    /// # Ok(()) }
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &LockName> {
        self.0.iter().map(Lock::name)
    }

    /// Sets the lease of each lock, instead of the client's: see [`Lock::lease`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let set = set.lease(dlock_core::Lease::renewed(Duration::from_secs(10)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(self, lease: Lease) -> Self {
        self.each(|lock| lock.lease(lease))
    }

    /// Stops renewing each lock `time` after its own acquisition: see [`Lock::max_hold`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let set = set.max_hold(Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_hold(self, time: Duration) -> Self {
        self.each(|lock| lock.max_hold(time))
    }

    /// Counts each lock under `class` in the metrics: see [`Lock::class`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// let set = set.class("orders");
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

    /// Acquires all locks and waits without a limit. When one of those already acquired is lost while the
    /// rest is waited for (a fixed lease shorter than the wait, or a record lost by the store), it gives the
    /// others back and begins again.
    ///
    /// # Errors
    /// As [`Lock::acquire`], of the lock that the error names. No lock is held then.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the wait. The locks acquired by then are released in the background.
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// let _guard = set.acquire().await?; // never `let _ =`: that releases at once
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<SetGuard, Error>> + Send + use<> {
        let all = self.clone();
        all.all(WaitPolicy::Forever, Location::caller()).map(sure)
    }

    /// Acquires all locks within `limit`, which is one for the whole set. With [`Duration::ZERO`] it asks
    /// once for each lock.
    ///
    /// # Errors
    /// `Timeout` when the time is up, with the lock that was not acquired; the locks acquired by then are
    /// released in the background. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// match set.acquire_timeout(Duration::from_secs(5)).await {
    ///     Ok(guard) => guard.run(async { /* needs all of them */ }).await?,
    ///     Err(error) if error.is_contended() => println!("{error}"), // names the lock and its holder
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire_timeout(
        &self,
        limit: Duration,
    ) -> impl Future<Output = Result<SetGuard, Error>> + Send + use<> {
        let (all, wait) = (self.clone(), WaitPolicy::Within(limit));
        all.all(wait, Location::caller()).map(sure)
    }

    /// Acquires all locks if all are free. Returns `None` when another owner holds one of them. It waits for
    /// the store's answers only, for at most a third of the lease or 5 s a lock.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); `Timeout` when the store did not answer, or a lock was lost before the last of the
    /// set was acquired.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # async fn example(set: dlock_core::LockSet) -> Result<(), dlock_core::Error> {
    /// if let Some(guard) = set.try_acquire().await? {
    ///     guard.run(async { /* needs all of them */ }).await?;
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn try_acquire(
        &self,
    ) -> impl Future<Output = Result<Option<SetGuard>, Error>> + Send + use<> {
        self.clone().all(WaitPolicy::Try, Location::caller())
    }

    async fn all(
        self,
        wait: WaitPolicy,
        at: &'static Location<'static>,
    ) -> Result<Option<SetGuard>, Error> {
        let clock = &self.0[0].engine.clock;
        let began = clock.now();
        let end = match wait {
            WaitPolicy::Within(limit) if !limit.is_zero() => began + limit,
            _ => Instant::FAR,
        };
        loop {
            let mut set = SetGuard { guards: Vec::new() };
            let filled = match self.fill(&mut set, wait, began, at).await {
                Ok(Filled::Whole) if set.check().is_ok() => return Ok(Some(set)),
                filled => filled,
            };
            // Awaited, so that the caller does not meet its own locks when it tries again.
            tokio::select! {
                biased;
                _ = set.release() => {}
                () = clock.sleep_until(end) => {}
            }
            match (filled?, wait) {
                (Filled::Refused, _) => return Ok(None),
                (_, WaitPolicy::Try | WaitPolicy::Within(Duration::ZERO)) => {
                    return Err(self.lost_meanwhile());
                }
                _ => {}
            }
        }
    }

    /// The error of an attempt that is not repeated.
    fn lost_meanwhile(&self) -> Error {
        let why = format!(
            "a lock of this set was lost while the others were acquired: is its lease long enough for {} requests?",
            self.0.len()
        );
        let first = &self.0[0];
        Error::timeout(TimeoutPhase::Request, why).at(first.engine.caps.backend, first.name())
    }

    /// Acquires one lock after another, until one is refused or lost.
    async fn fill(
        &self,
        set: &mut SetGuard,
        wait: WaitPolicy,
        began: Instant,
        at: &'static Location<'static>,
    ) -> Result<Filled, Error> {
        for lock in &self.0 {
            let next = lock.acquire_by(rest_of(wait, began, lock)?, at);
            let taken = tokio::select! {
                biased;
                _ = set.first_lost() => return Ok(Filled::Lost),
                taken = next => taken?,
            };
            match taken {
                Some(guard) => set.guards.push(guard),
                None => return Ok(Filled::Refused),
            }
        }
        Ok(Filled::Whole)
    }
}

impl SetGuard {
    /// The guards of the single locks, in the order of the names.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// for one in guard.guards() {
    ///     println!("{} until {:?} from now", one.name(), one.remaining());
    /// }
    /// # Ok(()) }
    /// ```
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// The fencing token of one of the locks; `None` when the name is not of this set.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// if let Some(token) = guard.token("stock:7") {
    ///     println!("send {token} with every write to stock 7");
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn token(&self, name: impl AsRef<str>) -> Option<FencingToken> {
        let name = name.as_ref();
        let found = self
            .guards
            .iter()
            .find(|guard| guard.name().as_str() == name);
        found.map(Guard::token)
    }

    /// Checks that all locks are still held, without I/O: see [`Guard::check`].
    ///
    /// # Errors
    /// `Lost`, of the first lock in the order of the names that is lost.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// guard.check()?; // all still held: now write
    /// # Ok(()) }
    /// ```
    pub fn check(&self) -> Result<(), Error> {
        self.guards.iter().try_for_each(Guard::check)
    }

    /// Resolves when one of the locks can no longer be trusted, with its name: see [`Guard::lost`].
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing; it may be called again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// # async fn work() {}
    /// tokio::select! {
    ///     () = work() => println!("done"),
    ///     (name, reason) = guard.lost() => println!("stopped, {name} is lost: {reason}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn lost(&self) -> (LockName, LossReason) {
        let (guard, reason) = self.first_lost().await;
        (guard.name().clone(), reason)
    }

    async fn first_lost(&self) -> (&Guard, LossReason) {
        if self.guards.is_empty() {
            return pending().await;
        }
        let each = |guard| {
            Guard::lost(guard)
                .map(move |reason| (guard, reason))
                .boxed()
        };
        select_all(self.guards.iter().map(each)).await.0
    }

    /// Runs `work` while all locks are held, and drops the work the moment one is lost.
    ///
    /// # Errors
    /// `Lost`, of that lock, even if the work ended at that same moment.
    ///
    /// # Cancel safety
    /// Dropping it drops the work.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// guard.run(async { /* every await in here is a point where it may end */ }).await?;
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let output = tokio::select! {
            biased;
            (guard, reason) = self.first_lost() => return Err(guard.lost_error(reason)),
            output = work => output,
        };
        self.check().map(|()| output)
    }

    /// Releases all locks, side by side, and reports the outcome of each, in the order of the names.
    ///
    /// # Errors
    /// Each outcome is that of [`Guard::release`]: `Lost` when that lock was no longer held.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the releases to the background.
    ///
    /// # Examples
    /// ```
    /// # async fn example(guard: dlock_core::SetGuard) -> Result<(), dlock_core::Error> {
    /// for (name, outcome) in guard.release().await {
    ///     if let Err(error) = outcome {
    ///         println!("{name}: {error}");
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn release(self) -> Vec<(LockName, Result<ReleaseOutcome, Error>)> {
        let released = self.guards.into_iter().map(|guard| {
            let name = guard.name().clone();
            guard.release().map(|outcome| (name, outcome))
        });
        join_all(released).await
    }
}

/// How far an acquisition of a set came.
enum Filled {
    /// All were acquired.
    Whole,
    /// Another owner holds the next one.
    Refused,
    /// One that was acquired is lost.
    Lost,
}

/// The wait for the next lock: what the others left of the limit.
fn rest_of(wait: WaitPolicy, began: Instant, next: &Lock) -> Result<WaitPolicy, Error> {
    let WaitPolicy::Within(limit) = wait else {
        return Ok(wait);
    };
    let rest = limit.saturating_sub(next.engine.clock.now().since(began));
    if rest.is_zero() && !limit.is_zero() {
        let why = format!(
            "not acquired within {}: the locks before took all of it",
            about(limit)
        );
        let error = Error::timeout(TimeoutPhase::Wait, why);
        return Err(error.at(next.engine.caps.backend, next.name()));
    }
    Ok(WaitPolicy::Within(rest))
}

/// The locks of these names, each of them once.
pub(crate) fn distinct<N: AsRef<str>>(
    client: &Client,
    names: impl IntoIterator<Item = N>,
) -> Result<Vec<Lock>, Error> {
    let mut locks: Vec<Lock> = Vec::new();
    for name in names {
        let lock = client.lock(name)?;
        if locks.iter().all(|other| other.name() != lock.name()) {
            locks.push(lock);
        }
        if locks.len() > MOST_NAMES {
            let most =
                format!("more than {MOST_NAMES} names at once: acquire fewer, or one name for all");
            return Err(Error::misuse(most));
        }
    }
    match locks.is_empty() {
        true => Err(Error::misuse("no name was given: give at least one")),
        false => Ok(locks),
    }
}

/// The most names of a set. Each costs a round trip to acquire, and a place in a renewal.
const MOST_NAMES: usize = 64;
