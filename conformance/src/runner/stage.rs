//! Execution of cases: stores, runtimes and time limits.

use crate::{
    case::Case,
    ctx::Ctx,
    failure::Failure,
    fixture::{Fixture, MakeFixture, Need, Time, Unsupported},
    mutants::Mutation,
    pace::Pace,
    testbed::is_unprivileged,
};
use dlock_core::driver::Capabilities;
use futures_util::FutureExt;
use parking_lot::Mutex as StdMutex;
use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
};
use tokio::{
    runtime::{self, Runtime},
    sync::{Mutex, OnceCell, RwLock, RwLockWriteGuard},
};

/// The environment of one fixture; in real time, with the server and the runtime that its cases share.
pub(crate) struct Stage {
    maker: Arc<dyn MakeFixture>,
    shared: Mutex<Option<Arc<dyn Fixture>>>,
    /// What the store of real time can do. Asking costs a driver.
    store: OnceCell<Capabilities>,
    runtime: OnceLock<std::io::Result<Runtime>>,
    late: StdMutex<Vec<String>>,
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It passed.
    Passed,
    /// It could not run.
    Ignored(Unsupported),
    /// It failed, with this message.
    Failed(String),
    /// Its answers were right, but one came after its bound.
    Late(String),
    /// It did not end within the limit.
    Hung,
}

impl Stage {
    pub(crate) fn new(maker: Arc<dyn MakeFixture>) -> Self {
        Self {
            maker,
            shared: Mutex::default(),
            store: OnceCell::new(),
            runtime: OnceLock::new(),
            late: StdMutex::default(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.maker.name()
    }

    pub(crate) fn time(&self) -> Time {
        self.maker.time()
    }

    /// Runs one case to its end.
    pub(crate) fn run(&self, case: Case, mutation: Option<Arc<dyn Mutation>>) -> Outcome {
        let done = self.block_on(self.play(case, mutation));
        done.unwrap_or_else(failed)
    }

    /// What this function finds of the store.
    pub(crate) fn probe<T>(
        &self,
        found: impl Fn(&dyn Fixture, &Capabilities) -> T,
    ) -> Result<T, Failure> {
        let probe = async {
            let fixture = self.fixture().await?;
            let store = self.capabilities(&*fixture).await?;
            Ok(found(&*fixture, &store))
        };
        self.block_on(probe)?
    }

    /// Runs a future in the runtime of real time, or in a paused one.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> Result<F::Output, Failure> {
        Ok(match self.time() {
            Time::Simulated => paused()?.block_on(future),
            Time::Real => self.runtime()?.block_on(future),
        })
    }

    /// The same as [`run`](Self::run), inside a runtime, concurrently with other cases.
    ///
    /// In real time, a case that missed an upper bound while other cases ran is measured again, alone, up to
    /// [`AGAIN`] times, and each time is counted. Nothing else is forgiven that way: two holders, a wrong answer,
    /// an error of the store or a hang fails at once.
    pub(crate) async fn play(&self, case: Case, mutation: Option<Arc<dyn Mutation>>) -> Outcome {
        let is_forgiven = self.time() == Time::Real && mutation.is_none();
        let mut outcome = {
            let _beside_others = HOUSE.read().await;
            let staged = self.staged(case, mutation).await;
            staged.unwrap_or_else(failed)
        };
        for _ in 0..AGAIN {
            match &outcome {
                Outcome::Late(words) if is_forgiven => {
                    let late = format!("{}::{}: {words}", self.name(), case.name);
                    self.late.lock().push(late);
                    let house = Self::alone().await;
                    outcome = self.play_in(&house, case, None).await;
                }
                _ => break,
            }
        }
        outcome
    }

    /// The cases that were measured again, and the bounds that they missed.
    pub(crate) fn measured_again(&self) -> Vec<String> {
        self.late.lock().clone()
    }

    /// Waits until no case runs, and lets none start.
    pub(crate) async fn alone() -> Alone {
        HOUSE.write().await
    }

    /// The same as [`play`](Self::play), alone except for the cases that share this exclusive access.
    pub(crate) async fn play_in(
        &self,
        _: &Alone,
        case: Case,
        mutation: Option<Arc<dyn Mutation>>,
    ) -> Outcome {
        self.staged(case, mutation).await.unwrap_or_else(failed)
    }

    async fn staged(
        &self,
        case: Case,
        mutation: Option<Arc<dyn Mutation>>,
    ) -> Result<Outcome, Failure> {
        match self.maker.home().check() {
            Err(_) if is_unprivileged() => return Ok(Outcome::Ignored(NO_ENGINE)),
            home => home?,
        }
        let mut fixture = self.fixture().await?;
        let store = self.capabilities(&*fixture).await?;
        if let Some(unsupported) = unsupported(case.needs, &*fixture, &store) {
            return Ok(Outcome::Ignored(unsupported));
        }
        if case.is_exclusive() && self.time() == Time::Real {
            fixture = self.maker.make().await?;
        }
        let pace = Pace::of(self.maker.home(), self.time(), &store);
        let ctx = Ctx::new(case.name, Arc::clone(&self.maker), fixture, mutation, pace);
        let run = async {
            (case.run)(ctx.clone()).await?;
            ctx.counted().await
        };
        let run = AssertUnwindSafe(run).catch_unwind();
        let outcome = match tokio::time::timeout(pace.limit, run).await {
            Ok(Ok(Ok(()))) => Outcome::Passed,
            Ok(Ok(Err(failure))) => failed(failure),
            Ok(Err(panic)) => Outcome::Failed(words_of(&*panic)),
            Err(_) => Outcome::Hung,
        };
        ctx.finish().await;
        Ok(outcome)
    }

    /// The shared store; in simulated time a new one.
    async fn fixture(&self) -> Result<Arc<dyn Fixture>, Failure> {
        if self.time() == Time::Simulated {
            return self.maker.make().await;
        }
        let mut shared = self.shared.lock().await;
        if let Some(fixture) = &*shared {
            return Ok(Arc::clone(fixture));
        }
        let fixture = self.maker.make().await?;
        *shared = Some(Arc::clone(&fixture));
        Ok(fixture)
    }

    async fn capabilities(&self, fixture: &dyn Fixture) -> Result<Capabilities, Failure> {
        match self.time() {
            Time::Simulated => capabilities(fixture).await,
            Time::Real => {
                let store = self.store.get_or_try_init(|| capabilities(fixture)).await;
                store.cloned()
            }
        }
    }

    fn runtime(&self) -> Result<&Runtime, Failure> {
        let runtime = self.runtime.get_or_init(|| {
            runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
        });
        runtime.as_ref().map_err(Failure::new)
    }

    /// Ends the shared store.
    pub(crate) fn close(&self) {
        if let Some(Ok(runtime)) = self.runtime.get() {
            drop(runtime.block_on(async { self.shared.lock().await.take() }));
        }
    }
}

/// No other case runs while this lives.
pub(crate) type Alone = RwLockWriteGuard<'static, ()>;

/// How often a case is measured again whose bound in time other programs on the machine may have broken.
const AGAIN: usize = 3;

/// Read-locked by cases that run concurrently, write-locked by a case that needs the machine alone.
static HOUSE: RwLock<()> = RwLock::const_new(());

fn failed(failure: Failure) -> Outcome {
    let words = failure.to_string();
    if failure.is_late() {
        Outcome::Late(words)
    } else {
        Outcome::Failed(words)
    }
}

async fn capabilities(fixture: &dyn Fixture) -> Result<Capabilities, Failure> {
    let driver = fixture.driver().await?;
    let store = driver.capabilities().clone();
    driver.close().await;
    Ok(store)
}

/// The first of these needs that the store cannot offer, if any.
pub(crate) fn unsupported(
    needs: &[Need],
    fixture: &dyn Fixture,
    store: &Capabilities,
) -> Option<Unsupported> {
    needs
        .iter()
        .find_map(|need| need.unsupported(fixture, store).err())
}

fn paused() -> Result<Runtime, Failure> {
    Ok(runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?)
}

/// Without that variable the case fails instead, and the failure has the full reason.
const NO_ENGINE: Unsupported =
    Unsupported("no container engine answers, and DLOCK_TEST_UNPRIVILEGED is 1");

fn words_of(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", words.unwrap_or("without words"))
}

#[cfg(test)]
mod tests {
    use super::{AGAIN, Outcome, Stage};
    use crate::{
        case::{Case, Run},
        clause::Clause,
        failure::{Failure, ensure, in_time},
        fixture::{Fixture, MakeFixture, Time},
        test_driver::TestDriver,
    };
    use async_trait::async_trait;
    use dlock_core::{
        Client, Clock,
        driver::{DistributedLock, DriverError, Wake, WakeUp},
    };
    use dlock_memory::{Fault, MemoryConfig, MemoryDriver, MemoryStore};
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        time::Duration,
    };

    /// A store that claims this time.
    struct Store(Time, MemoryStore);

    #[async_trait]
    impl MakeFixture for Store {
        fn name(&self) -> &str {
            "store"
        }

        fn time(&self) -> Time {
            self.0
        }

        async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
            Ok(Arc::new(Self(self.0, self.1.clone())))
        }
    }

    #[async_trait]
    impl Fixture for Store {
        async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
            let config = MemoryConfig::new(Wake::Poll);
            Ok(Arc::new(MemoryDriver::connect(&self.1, config)))
        }
    }

    fn staged(time: Time) -> Stage {
        Stage::new(Arc::new(Store(time, MemoryStore::new(Clock::boot()))))
    }

    fn played(time: Time, case: Run) -> Outcome {
        staged(time).run(Case::new(Clause::Mutex, "one", case), None)
    }

    /// A client whose store meets each request with this fault.
    fn client(fault: Fault) -> Result<Client, Failure> {
        let store = MemoryStore::new(Clock::boot());
        let driver = MemoryDriver::connect(&store, MemoryConfig::new(Wake::Poll));
        driver.faults().always_all(fault);
        Ok(Client::new(driver)?)
    }

    /// The error of such a client after it has waited that long.
    async fn waited(fault: Fault, limit: Duration) -> Result<(), Failure> {
        let lock = client(fault)?.lock("a")?;
        drop(lock.acquire_timeout(limit).await?);
        Ok(())
    }

    /// The error of such a client for a request that is not repeated.
    async fn refused() -> Result<(), Failure> {
        client(Fault::ErrorBefore)?.admin().inspect("a").await?;
        Ok(())
    }

    #[test]
    fn what_was_late_once_is_measured_again() {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let outcome = played(Time::Real, |_| {
            Box::pin(async { in_time(RUNS.fetch_add(1, Ordering::Relaxed) > 0, "late") })
        });
        assert_eq!(outcome, Outcome::Passed);
        assert_eq!(RUNS.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn what_is_measured_again_is_counted() {
        let stage = staged(Time::Real);
        let late: Run = |_| Box::pin(async { Err(Failure::late("not within 1s")) });
        let good: Run = |_| Box::pin(async { Ok(()) });
        for case in [late, good] {
            stage.run(Case::new(Clause::Mutex, "one", case), None);
        }
        let counted = stage.measured_again();
        assert_eq!(counted.len(), AGAIN);
        assert!(
            counted[0].starts_with("store::one: not within 1s"),
            "{counted:?}"
        );
    }

    #[test]
    fn an_error_of_the_store_is_a_failure_at_once() {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let cases: [Run; 4] = [
            |_| Box::pin(async { Err(DriverError::unavailable("too many clients").into()) }),
            |_| Box::pin(async { Err(DriverError::unanswered("a syntax error").into()) }),
            |_| Box::pin(refused()),
            // The client goes on until its time is up, which is long enough for one request on a busy machine.
            |_| {
                RUNS.fetch_add(1, Ordering::Relaxed);
                Box::pin(waited(Fault::ErrorBefore, Duration::from_secs(3)))
            },
        ];
        for case in cases {
            let stage = staged(Time::Real);
            let outcome = stage.run(Case::new(Clause::Mutex, "one", case), None);
            assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
            assert_eq!(stage.measured_again(), [""; 0]);
        }
        assert_eq!(RUNS.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_store_that_does_not_answer_is_late() {
        let outcome = played(Time::Real, |_| {
            Box::pin(waited(Fault::NeverExecuted, Duration::from_millis(50)))
        });
        assert!(matches!(outcome, Outcome::Late(_)), "{outcome:?}");
    }

    #[test]
    fn a_wake_up_that_does_not_come_is_told_with_those_that_came() {
        let outcome = played(Time::Simulated, |ctx| {
            Box::pin(async move {
                let store = MemoryStore::new(ctx.clock().clone());
                let driver = MemoryDriver::connect(&store, MemoryConfig::new(Wake::Notify));
                driver.faults().inject(WakeUp::Resync);
                let caller = TestDriver::new(Arc::new(driver), ctx);
                let second = Duration::from_secs(1);
                caller.hears("a turn", second, |_| false).await.map(drop)
            })
        });
        let Outcome::Late(words) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(words.contains("[Resync]: not within 1s: a turn"), "{words}");
    }

    /// A case that fails each time, or but for the first time, is run this often.
    #[test]
    fn only_what_was_late_in_real_time_is_measured_again() {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let late: Run = |_| {
            RUNS.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Err(Failure::late("late")) })
        };
        let wrong: Run =
            |_| Box::pin(async { ensure(RUNS.fetch_add(1, Ordering::Relaxed) > 0, "two holders") });
        for (time, case, runs) in [
            (Time::Real, late, 1 + AGAIN),
            (Time::Simulated, late, 1),
            (Time::Real, wrong, 1),
        ] {
            RUNS.store(0, Ordering::Relaxed);
            let failed = match played(time, case) {
                Outcome::Late(_) => runs > AGAIN || time == Time::Simulated,
                Outcome::Failed(words) => words.starts_with("two holders"),
                _ => false,
            };
            assert!(failed);
            assert_eq!(RUNS.load(Ordering::Relaxed), runs);
        }
    }
}
