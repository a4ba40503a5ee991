//! Context of a case.

use crate::{
    Result,
    ask::{Ask, Hold},
    counts::Counts,
    expect::{Expected, seen_from_here},
    failure::{Failure, ensure, in_time},
    fixture::{Faults, Fixture, MakeFixture, Records, Server, StoreTime},
    mutants::Mutation,
    pace::Pace,
    test_driver::TestDriver,
};
use dlock_core::{
    Clock, Instant, LockName,
    driver::{DistributedLock, DriverError},
};
use futures_util::{
    TryFutureExt,
    future::{join_all, ready},
};
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::OnceCell;

/// A store, fresh names, the clock, and callers: drivers that each stand for one client process.
#[derive(Clone)]
pub(crate) struct Ctx(Arc<Inner>);

struct Inner {
    maker: Arc<dyn MakeFixture>,
    fixture: Arc<dyn Fixture>,
    mutation: Option<Arc<dyn Mutation>>,
    pace: Pace,
    clock: Clock,
    prefix: String,
    count: AtomicU64,
    opened: Mutex<Vec<Arc<dyn DistributedLock>>>,
    observer: OnceCell<Arc<dyn DistributedLock>>,
    counts: Counts,
}

impl Ctx {
    pub(crate) fn new(
        case: &str,
        maker: Arc<dyn MakeFixture>,
        fixture: Arc<dyn Fixture>,
        mutation: Option<Arc<dyn Mutation>>,
        pace: Pace,
    ) -> Self {
        let clock = fixture.clock();
        Self(Arc::new(Inner {
            maker,
            fixture,
            mutation,
            pace,
            clock,
            // Cases run side by side on one server, and again on the same server.
            prefix: format!("{case}.{:08x}", fastrand::u32(..)),
            count: AtomicU64::new(0),
            opened: Mutex::default(),
            observer: OnceCell::new(),
            counts: Counts::new(),
        }))
    }

    /// A client process with a driver of its own.
    pub(crate) async fn test_driver(&self) -> Result<TestDriver> {
        Ok(TestDriver::new(self.driver().await?, self.clone()))
    }

    /// Several client processes, and a fresh name.
    pub(crate) async fn test_drivers<const N: usize>(&self) -> Result<([TestDriver; N], LockName)> {
        Ok((several(|| self.test_driver()).await?, self.name()?))
    }

    /// A client process that only inspects. All observers of a case share its connections.
    pub(crate) async fn observer(&self) -> Result<TestDriver> {
        let driver = self.0.observer.get_or_try_init(|| self.driver()).await?;
        Ok(TestDriver::new(Arc::clone(driver), self.clone()))
    }

    /// A client process behind a network that fails on demand.
    pub(crate) async fn faulty(&self) -> Result<(TestDriver, Box<dyn Faults>)> {
        let (driver, faults) = self.faulty_driver().await?;
        Ok((TestDriver::new(driver, self.clone()), faults))
    }

    /// The same for a client of the core.
    pub(crate) async fn faulty_driver(
        &self,
    ) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>)> {
        let network = self.0.fixture.network().map_err(Failure::new)?;
        let (driver, faults) = network.faulty_driver().await?;
        Ok((self.opened(driver), faults))
    }

    fn opened(&self, driver: Arc<dyn DistributedLock>) -> Arc<dyn DistributedLock> {
        let mut opened = self.0.opened.lock();
        opened.push(Arc::clone(&driver));
        drop(opened);
        match &self.0.mutation {
            Some(mutation) => crate::mutants::mutated(driver, Arc::clone(mutation)),
            None => driver,
        }
    }

    /// A driver for a client of the core.
    pub(crate) async fn driver(&self) -> Result<Arc<dyn DistributedLock>> {
        Ok(self.opened(self.0.fixture.driver().await?))
    }

    /// A seed that no other client of this case has, also in simulated time.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.is_simulated()
            .then(|| self.0.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether waiting takes no real time, so that a case can wait often and long.
    pub(crate) fn is_simulated(&self) -> bool {
        self.0.clock.is_simulated()
    }

    /// Fails unless another task has done this by now. In real time the failure is late: on a busy machine a
    /// task may run late.
    #[track_caller]
    pub(crate) fn has_done(&self, holds: bool, words: impl fmt::Display) -> Result {
        if self.is_simulated() {
            ensure(holds, words)
        } else {
            in_time(holds, words)
        }
    }

    /// The server, for cases that need [`Need::Server`](crate::Need::Server).
    pub(crate) fn server(&self) -> Result<&dyn Server> {
        self.0.fixture.server().map_err(Failure::new)
    }

    /// The records, for cases that need [`Need::Records`](crate::Need::Records).
    pub(crate) fn records(&self) -> Result<&dyn Records> {
        self.0.fixture.records().map_err(Failure::new)
    }

    /// The store's clock, for cases that need [`Need::StoreTime`](crate::Need::StoreTime).
    pub(crate) fn store_time(&self) -> Result<&dyn StoreTime> {
        self.0.fixture.store_time().map_err(Failure::new)
    }

    /// The URL of the store for other processes, for cases that need
    /// [`Need::Processes`](crate::Need::Processes).
    pub(crate) fn url(&self) -> Result<String> {
        self.0.fixture.url().map_err(Failure::new)
    }

    /// The name of the fixture.
    pub(crate) fn fixture(&self) -> &str {
        self.0.maker.name()
    }

    /// A name that was not used before.
    pub(crate) fn name(&self) -> Result<LockName> {
        Ok(LockName::new(self.text())?)
    }

    /// A text that was not used before, for names that a case builds itself.
    pub(crate) fn text(&self) -> String {
        let count = self.0.count.fetch_add(1, Ordering::Relaxed);
        format!("{}.{count}", self.0.prefix)
    }

    /// A request for this name with a fresh owner, a fresh hold and the long lease.
    pub(crate) fn ask(&self, name: &LockName) -> Ask {
        Ask::new(name.clone(), &self.text(), self.long())
    }

    /// A lease short enough to wait for its end.
    pub(crate) fn short(&self) -> Duration {
        self.0.pace.short
    }

    /// A lease that does not end during a case.
    pub(crate) fn long(&self) -> Duration {
        self.0.pace.long
    }

    /// The allowance for a busy machine in an upper bound.
    pub(crate) fn slack(&self) -> Duration {
        self.0.pace.slack
    }

    /// The most that a call may take where no fault is injected.
    pub(crate) fn answer(&self) -> Duration {
        self.0.pace.answer
    }

    /// The clock that the drivers use.
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// The current instant of that clock.
    pub(crate) fn now(&self) -> Instant {
        self.0.clock.now()
    }

    /// Waits while leases run, renewals come due and queue entries grow old: only time does that. For
    /// events, await the event.
    pub(crate) async fn time_passes(&self, length: Duration) {
        tokio::time::sleep(length).await;
    }

    /// Waits for as long as a mistake may take to show, where nothing may happen.
    pub(crate) async fn would_show_within(&self, length: Duration) {
        tokio::time::sleep(length).await;
    }

    /// Waits until this instant.
    pub(crate) async fn sleep_until(&self, at: Instant) {
        self.0.clock.sleep_until(at).await;
    }

    /// Waits until this hold is certainly over if it is never renewed.
    pub(crate) async fn sleep_past(&self, hold: &Hold) {
        self.sleep_until(hold.over_by() + self.rounding()).await;
    }

    /// How long from now this hold can still exist if it is never renewed.
    pub(crate) fn until_over(&self, hold: &Hold) -> Duration {
        hold.over_by().since(self.now()) + self.rounding()
    }

    /// A promise made after `before` ends with this hold, or earlier.
    #[track_caller]
    pub(crate) fn ends_with(&self, hold: &Hold, before: Instant, valid_for: Duration) -> Result {
        ensure(
            before + valid_for <= hold.over_by() + self.rounding(),
            format!("{valid_for:?} are promised, which is more than is left"),
        )
    }

    /// The precision of a lease end: that of a store that counts milliseconds, or the delay of a client
    /// that ends a hold by a request.
    pub(crate) fn rounding(&self) -> Duration {
        self.0.pace.rounding
    }

    /// A lease that is renewed in time even if other tests use the machine for half a second, and short
    /// enough to wait for its end.
    pub(crate) fn kept(&self) -> Duration {
        self.0.pace.kept
    }

    /// The most that a dead process costs, where a lease alone would cost `bound`. Where holds and
    /// queue entries end with a session, it is that session and two ticks, if that is more. Where the store
    /// ends leases late, it is that much more.
    pub(crate) fn dead_for(&self, bound: Duration) -> Duration {
        let session = self.0.pace.session.unwrap_or_default();
        bound.max(session + session / 4) + self.0.pace.lapse
    }

    /// How long a server may take a killed process for a live one that does not take its turn.
    pub(crate) fn unheard(&self) -> Duration {
        self.0.pace.unheard
    }

    /// The least lease that a grant must promise: half of the lease asked for, or a quarter where a
    /// session has to be proven.
    pub(crate) fn promised(&self, lease: Duration) -> Duration {
        self.0
            .pace
            .session
            .map_or(lease / 2, |session| session.min(lease) / 4)
    }

    /// Whether holds end with their client's session, and no other client can renew them.
    pub(crate) fn is_session_bound(&self) -> bool {
        self.0.pace.session.is_some()
    }

    /// Waits until the condition holds, at most `bound` plus the slack.
    #[track_caller]
    pub(crate) fn eventually<'a, F: Future<Output = Result<bool>> + Send + 'a>(
        &'a self,
        what: &'a str,
        bound: Duration,
        mut condition: impl FnMut() -> F + Send + 'a,
    ) -> Expected<'a> {
        let holds = move || condition().map_ok(|holds| holds.then_some(()));
        self.found(what, bound, holds)
    }

    /// Waits until there is an answer, at most `bound` plus the slack.
    #[track_caller]
    pub(crate) fn found<'a, T: Send + 'a, F: Future<Output = Result<Option<T>>> + Send + 'a>(
        &'a self,
        what: &'a str,
        bound: Duration,
        mut ask: impl FnMut() -> F + Send + 'a,
    ) -> Expected<'a, T> {
        seen_from_here(async move {
            let end = self.now() + bound + self.slack();
            loop {
                // The start of a check counts: a check that is answered late was not false until then.
                let began = self.now();
                if let Some(found) = ask().await? {
                    return Ok(found);
                }
                in_time(began < end, format!("not within {bound:?}: {what}"))?;
                tokio::time::sleep(self.0.pace.step).await;
            }
        })
    }

    /// The same for a condition that needs no answer of the store.
    #[track_caller]
    pub(crate) fn until<'a>(
        &'a self,
        what: &'a str,
        bound: Duration,
        mut condition: impl FnMut() -> bool + Send + 'a,
    ) -> Expected<'a> {
        self.eventually(what, bound, move || ready(Ok(condition())))
    }

    /// The output of the future, within the bound plus the slack.
    #[track_caller]
    pub(crate) fn within<'a, T>(
        &'a self,
        what: &'a str,
        bound: Duration,
        future: impl Future<Output = T> + Send + 'a,
    ) -> Expected<'a, T> {
        seen_from_here(async move {
            tokio::time::timeout(bound + self.slack(), future)
                .await
                .map_err(|_| Failure::late(format!("not within {bound:?}: {what}")))
        })
    }

    /// The output of the future, within the time of one answer.
    #[track_caller]
    pub(crate) fn answered<'a, T>(
        &'a self,
        future: impl Future<Output = T> + Send + 'a,
    ) -> Expected<'a, T> {
        self.within("it is answered", self.answer(), future)
    }

    /// Names of one lane, which one batch of renewals may contain.
    pub(crate) fn names_of_one_lane(
        &self,
        driver: &dyn DistributedLock,
        count: usize,
    ) -> Result<Vec<LockName>> {
        let mut names = vec![self.name()?];
        let lane = driver.lane(&names[0]);
        for _ in 0..count * 1_000 {
            if names.len() >= count {
                return Ok(names);
            }
            let name = self.name()?;
            if driver.lane(&name) == lane {
                names.push(name);
            }
        }
        Err(Failure::new(format!("no {count} names have one lane")))
    }

    /// Expects no answer to a request whose reply a fault removes: it fails, or does not return within
    /// a short lease.
    pub(crate) async fn unanswered<T: fmt::Debug>(
        &self,
        call: impl Future<Output = Result<T, DriverError>> + Send,
    ) -> Result<Option<DriverError>> {
        match tokio::time::timeout(self.short(), call).await {
            Ok(Ok(answer)) => Err(Failure::new(format!(
                "its answer was lost, yet it got {answer:?}"
            ))),
            Ok(Err(error)) => Ok(Some(error)),
            Err(_) => Ok(None),
        }
    }

    /// What the clients of this case count.
    pub(crate) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    /// Waits until those clients rest, and compares what they counted with what their callers saw. With a wrong driver
    /// they may count anything.
    pub(crate) async fn counted(&self) -> Result {
        if self.0.mutation.is_some() {
            return Ok(());
        }
        let counts = self.counts();
        let rest = self.until("its clients rest", self.answer(), || counts.are_at_rest());
        rest.await
            .and_then(|()| counts.agree(&self.0.prefix))
            .map_err(|failure| Failure::new(format!("{failure}; counted: {counts}")))
    }

    /// Closes every connection.
    pub(crate) async fn finish(&self) {
        let opened = {
            let mut opened = self.0.opened.lock();
            std::mem::take(&mut *opened)
        };
        let all = join_all(opened.iter().map(|driver| driver.close()));
        // The `shutdown` cases test a close that hangs.
        drop(tokio::time::timeout(self.answer(), all).await);
    }
}

/// As many as asked for, made one after the other.
pub(crate) async fn several<T: Send, const N: usize, F>(
    make: impl Fn() -> F + Send,
) -> Result<[T; N]>
where
    F: Future<Output = Result<T>> + Send,
{
    let mut made = Vec::with_capacity(N);
    for _ in 0..N {
        made.push(make().await?);
    }
    made.try_into()
        .map_err(|_| Failure::new("BUG: as many as asked for were made"))
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx")
            .field("fixture", &self.fixture())
            .field("prefix", &self.0.prefix)
            .finish_non_exhaustive()
    }
}
