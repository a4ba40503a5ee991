//! Leader election: a lock whose holder leads, again and again.
//!
//! A term is a held lock and nothing else: it is checked against its lease, never believed because of an
//! event. The code of a term has ended before the lock is released.

use crate::{
    admin::Admin,
    client::Client,
    clock::Instant,
    driver::Holder,
    engine::release::ReleaseOutcome,
    error::{Error, LossReason},
    guard::Guard,
    lease::{DEFAULT_LEASE, Lease},
    lock::Lock,
    name::LockName,
    owner::Fingerprint,
    token::FencingToken,
};
use futures_util::stream::{self, BoxStream, StreamExt};
use std::{
    convert::Infallible,
    fmt,
    ops::{ControlFlow, Deref},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::sync::mpsc;

impl Client {
    /// Returns the election of this name. It does no I/O. The lock of the same name is the election's: its
    /// holder leads.
    ///
    /// # Errors
    /// `Misuse` when the name is not legal: see [`LockName`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
    /// # let store = dlock_memory::MemoryStore::new(dlock_core::Clock::boot());
    /// # let config = dlock_memory::MemoryConfig::new(dlock_core::driver::Wake::Queue);
    /// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::connect(&store, config))?;
    /// use std::ops::ControlFlow;
    ///
    /// let election = client.election("billing")?;
    /// let bills = election.run(|term| async move {
    ///     term.check().ok(); // still the leader: now write, with term.token()
    ///     ControlFlow::Break(42) // `Continue(())` resigns, and campaigns again
    /// });
    /// assert_eq!(bills.await?, 42);
    /// # Ok(()) }
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Result<Election, Error> {
        Ok(Election {
            lock: self.lock(name)?,
            rest_until: Arc::default(),
        })
    }
}

/// An election: from [`Client::election`]. Cheap to clone; clones share the pause after a resignation.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// use std::time::Duration;
///
/// // How soon another leads when this process dies.
/// let election = client.election("billing")?.lease(dlock_core::Lease::renewed(Duration::from_secs(10)));
/// let term = election.campaign().await?; // a guard
/// term.run(async { /* lead; dropped when the term is lost */ }).await?;
/// election.resign(term).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Election {
    lock: Lock,
    /// Until when this client lets others come first, in nanoseconds of the clock.
    rest_until: Arc<AtomicU64>,
}

impl Election {
    /// The name of the election and of its lock.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// assert_eq!(client.election("billing")?.name().as_str(), "billing");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.lock.name()
    }

    /// Sets the lease of a term, instead of the client's: see [`Lock::lease`]. It bounds how long nobody
    /// leads after the leader died. A fixed lease bounds the term itself.
    ///
    /// # Examples
    /// ```
    /// # async fn example(election: dlock_core::Election) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let election = election.lease(dlock_core::Lease::renewed(Duration::from_secs(10)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Counts the lock under `class` in the metrics: see [`Lock::class`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(election: dlock_core::Election) -> Result<(), dlock_core::Error> {
    /// let election = election.class("orders");
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    #[must_use]
    pub fn class(mut self, class: &str) -> Self {
        self.lock = self.lock.class(class);
        self
    }

    /// Waits until this client leads. The term is a [`Guard`]: its token grows with every term, by more
    /// than one. After a resignation it first lets others come,
    /// for a third to half of the lease.
    ///
    /// # Errors
    /// As [`Lock::acquire`].
    ///
    /// # Cancel safety
    /// As [`Lock::acquire`]: dropping the future withdraws the candidate.
    ///
    /// # Examples
    /// ```
    /// # async fn example(election: dlock_core::Election) -> Result<(), dlock_core::Error> {
    /// let term = election.campaign().await?;
    /// println!("term {}", term.token());
    /// election.resign(term).await?;
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn campaign(&self) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let (engine, rest_until) = (Arc::clone(&self.lock.engine), Arc::clone(&self.rest_until));
        let acquired = self.lock.acquire();
        async move {
            let until = Instant::from_nanos(rest_until.load(SeqCst));
            tokio::select! {
                biased;
                () = engine.shutting_down() => {} // the acquire says so
                () = engine.clock.sleep_until(until) => {}
            }
            acquired.await
        }
    }

    /// Ends a term and lets others come first: this client's next campaign begins a third to half of the
    /// lease later. End the work of the term before.
    ///
    /// # Errors
    /// As [`Guard::release`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background.
    ///
    /// # Examples
    /// ```
    /// # async fn example(election: dlock_core::Election, term: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// election.resign(term).await?; // for a new version of this program, say
    /// # Ok(()) }
    /// ```
    pub async fn resign(&self, term: Guard) -> Result<ReleaseOutcome, Error> {
        self.rest();
        term.release().await
    }

    /// Campaigns, runs `lead` for as long as the term lasts, and campaigns again.
    ///
    /// When `lead` ends with `ControlFlow::Continue`, the term is resigned; with `Break`, it is resigned and
    /// this method returns the value. When the term is lost, the future of `lead` is dropped before another
    /// can lead. The lock is released after that future has ended and every clone of its [`Term`] is
    /// dropped: give a clone to each task that `lead` spawns. A future that blocks its thread cannot be
    /// dropped; such code calls [`Guard::check`].
    ///
    /// A store that is away is waited for: the next campaign begins a third to half of the lease later.
    ///
    /// # Errors
    /// Those of a campaign that repeating does not help: `ShuttingDown`, `Misuse`, `Unsupported`, or a
    /// store that refuses for good.
    ///
    /// # Cancel safety
    /// Dropping the future drops the future of `lead`, and then the term, which is released in the
    /// background.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # async fn next_bill() -> Option<u64> { None }
    /// # async fn pay(_: u64, _: dlock_core::FencingToken) {}
    /// use std::ops::ControlFlow;
    ///
    /// client.election("billing")?.run(|term| async move {
    ///     while let Some(bill) = next_bill().await {
    ///         pay(bill, term.token()).await; // the database refuses a smaller token
    ///     }
    ///     ControlFlow::Break(())
    /// }).await?;
    /// # Ok(()) }
    /// ```
    /// What `lead` captures, it clones for each term:
    /// ```
    /// # async fn example(client: dlock_core::Client, bills: std::sync::Arc<String>) -> Result<(), dlock_core::Error> {
    /// # use std::{ops::ControlFlow, sync::Arc};
    /// client.election("billing")?.run(|term| {
    ///     let bills = Arc::clone(&bills); // `async move` takes it away
    ///     async move {
    ///         println!("{bills} in term {}", term.token());
    ///         ControlFlow::Break(())
    ///     }
    /// }).await?;
    /// # Ok(()) }
    /// ```
    pub fn run<T, F, L>(&self, mut lead: L) -> impl Future<Output = Result<T, Error>> + use<T, F, L>
    where
        F: Future<Output = ControlFlow<T>>,
        L: FnMut(Term) -> F,
    {
        let election = self.clone();
        async move {
            loop {
                match election.campaign().await {
                    Ok(guard) => {
                        let led = Led::under(guard, &mut lead).await;
                        if let Some(guard) = led.guard.filter(|_| led.worked.is_ok()) {
                            // If it fails, the lease ends the term, and the log has it.
                            drop(election.resign(guard).await);
                        }
                        if let Ok(ControlFlow::Break(value)) = led.worked {
                            return Ok(value);
                        }
                    }
                    Err(error) if error.is_retryable() => election.rest(),
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// The leaders, from now on: the one of now, or `None` when nobody leads, and then each change. The
    /// store is asked every tenth of the lease, at most every poll interval and at least every 2 s, so a
    /// term shorter than that may be missed. The stream ends when the client shuts down.
    ///
    /// # Errors
    /// Each time the store does not answer. The stream goes on after an error.
    ///
    /// # Cancel safety
    /// Dropping the stream, or a future of it, loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(election: dlock_core::Election) -> Result<(), dlock_core::Error> {
    /// use futures_util::TryStreamExt;
    ///
    /// let mut leaders = election.observe();
    /// while let Some(leader) = leaders.try_next().await? {
    ///     match leader {
    ///         Some(leader) => println!("{} leads", leader.info),
    ///         None => println!("nobody leads"),
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub fn observe(&self) -> BoxStream<'static, Result<Option<Holder>, Error>> {
        let engine = Arc::clone(&self.lock.engine);
        let every = (self.term() / 10)
            .min(OBSERVE_AT_LEAST)
            .max(engine.poll_interval);
        let observer = Observer {
            admin: Client { engine }.admin(),
            name: self.name().clone(),
            every,
            next: Instant::ORIGIN,
            last: None,
        };
        let changes = stream::unfold(observer, |mut observer| async move {
            let change = observer.change().await?;
            Some((change, observer))
        });
        changes.boxed()
    }

    /// Lets other candidates come first.
    fn rest(&self) {
        let pause = (self.term() / 3).mul_f64(1.0 + self.lock.engine.random.jitter() / 2.0);
        let until = self.lock.engine.clock.now() + pause;
        self.rest_until.fetch_max(until.as_nanos(), SeqCst);
    }

    /// The length of the lease. One that the store cannot give fails the campaign.
    fn term(&self) -> Duration {
        let lease = self.lock.effective_lease();
        lease.map_or(DEFAULT_LEASE, |lease| lease.length())
    }
}

/// The lock under which code runs, lent to it by [`Election::run`]. It is a [`Guard`] that cannot be
/// released: the lock is released when every clone is dropped.
///
/// # Examples
/// ```
/// # async fn example(election: dlock_core::Election) -> Result<(), dlock_core::Error> {
/// use std::ops::ControlFlow;
///
/// election.run(|term| async move {
///     let lent = term.clone();
///     tokio::spawn(async move { lent.run(async { /* ends with the term */ }).await });
///     ControlFlow::Break(())
/// }).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Term {
    guard: Arc<Guard>,
    // Dropped after the guard: when all are, nothing else has the guard.
    _lent: mpsc::Sender<Infallible>,
}

impl Deref for Term {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}

/// The end of code that ran under a lock.
pub(crate) struct Led<T> {
    /// What it returned, unless it was dropped because the lock was lost.
    pub(crate) worked: Result<T, LossReason>,
    /// The lock. `None` when it was lost, and a task still has a clone of the term.
    pub(crate) guard: Option<Guard>,
}

impl<T> Led<T> {
    /// Runs `work` until it ends and has dropped its term, or until the lock is lost.
    pub(crate) async fn under<F>(guard: Guard, work: impl FnOnce(Term) -> F) -> Self
    where
        F: Future<Output = T>,
    {
        let guard = Arc::new(guard); // dropped after the work, also when this future is dropped
        let (lent, mut returned) = mpsc::channel(1);
        let term = Term {
            guard: Arc::clone(&guard),
            _lent: lent,
        };
        let work = async {
            let output = work(term).await;
            returned.recv().await;
            output
        };
        let worked = tokio::select! {
            biased;
            reason = guard.lost() => Err(reason),
            output = work => Ok(output),
        };
        let guard = Arc::into_inner(guard);
        Self { worked, guard }
    }
}

/// What [`Election::observe`] remembers.
struct Observer {
    admin: Admin,
    name: LockName,
    every: Duration,
    next: Instant,
    last: Option<Leader>,
}

/// What tells one leader from another.
type Leader = Option<(Fingerprint, Option<FencingToken>)>;

impl Observer {
    /// The next change, or the end.
    async fn change(&mut self) -> Option<Result<Option<Holder>, Error>> {
        let engine = &self.admin.engine;
        loop {
            tokio::select! {
                biased;
                () = engine.shutting_down() => return None,
                () = engine.clock.sleep_until(self.next) => {}
            }
            self.next = engine.clock.now() + self.every;
            let shown = match self.admin.inspect(&self.name).await {
                Ok(shown) => shown,
                Err(error) => return Some(Err(error)),
            };
            let leader = shown.holders.into_iter().next();
            let seen = leader.as_ref().map(|leader| (leader.owner, leader.token));
            if self.last.replace(seen) != Some(seen) {
                return Some(Ok(leader));
            }
        }
    }
}

/// The longest time between two looks at who leads.
const OBSERVE_AT_LEAST: Duration = Duration::from_secs(2);

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Election").field(&self.lock).finish()
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Term").field(&self.guard).finish()
    }
}
