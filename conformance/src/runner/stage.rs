//! Where cases run: the stores, the runtimes, the limits.

use crate::{
    case::Case,
    ctx::Ctx,
    failure::Failure,
    fixture::{Fixture, Gap, MakeFixture, Need, Time},
    mutants::Twist,
    pace::Pace,
    testbed::is_unprivileged,
};
use dlock_core::Capabilities;
use futures_util::FutureExt;
use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
};
use tokio::{
    runtime::{self, Runtime},
    sync::Mutex,
};

/// One fixture's place: with real time, the server and the runtime that its cases share.
pub(crate) struct Stage {
    maker: Arc<dyn MakeFixture>,
    shared: Mutex<Option<Arc<dyn Fixture>>>,
    runtime: OnceLock<std::io::Result<Runtime>>,
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As it should.
    Passed,
    /// It could not run.
    Ignored(Gap),
    /// With these words.
    Failed(String),
    /// Not at all, within the limit.
    Hung,
}

impl Stage {
    pub(crate) fn new(maker: Arc<dyn MakeFixture>) -> Self {
        Self {
            maker,
            shared: Mutex::default(),
            runtime: OnceLock::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.maker.name()
    }

    pub(crate) fn time(&self) -> Time {
        self.maker.time()
    }

    /// Runs one case to its end.
    pub(crate) fn run(&self, case: Case, twist: Option<Arc<dyn Twist>>) -> Outcome {
        let done = match self.time() {
            Time::Simulated => paused().map(|runtime| runtime.block_on(self.play(case, twist))),
            Time::Real => self
                .runtime()
                .map(|runtime| runtime.block_on(self.play(case, twist))),
        };
        done.unwrap_or_else(|failure| Outcome::Failed(failure.to_string()))
    }

    /// What the store cannot offer of this, if anything.
    pub(crate) fn lacks(&self, needs: &[Need]) -> Result<Option<Gap>, Failure> {
        let probe = async {
            let fixture = self.fixture(false).await?;
            let store = capabilities(&*fixture).await?;
            Ok(gap(needs, &*fixture, &store))
        };
        match self.time() {
            Time::Simulated => paused()?.block_on(probe),
            Time::Real => self.runtime()?.block_on(probe),
        }
    }

    /// What its store hides of some mistakes: whether holds end with their client's session, and whether what is late may take hold
    /// longer than a kept lease of the cases lasts.
    pub(crate) fn hides(&self) -> Result<(bool, bool), Failure> {
        let probe = async {
            let fixture = self.fixture(false).await?;
            let store = capabilities(&*fixture).await?;
            let slow = store.late >= Pace::of(self.maker.home(), self.time(), &store).kept;
            Ok((store.session_bound, slow))
        };
        match self.time() {
            Time::Simulated => paused()?.block_on(probe),
            Time::Real => self.runtime()?.block_on(probe),
        }
    }

    /// Runs a future in the runtime of real time.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> Result<F::Output, Failure> {
        Ok(self.runtime()?.block_on(future))
    }

    /// The same as [`run`](Self::run), inside a runtime.
    pub(crate) async fn play(&self, case: Case, twist: Option<Arc<dyn Twist>>) -> Outcome {
        match self.attempt(case, twist).await {
            Ok(outcome) => outcome,
            Err(failure) => Outcome::Failed(failure.to_string()),
        }
    }

    async fn attempt(&self, case: Case, twist: Option<Arc<dyn Twist>>) -> Result<Outcome, Failure> {
        match self.maker.home().check() {
            Err(_) if is_unprivileged() => return Ok(Outcome::Ignored(UNPRIVILEGED_GAP)),
            home => home?,
        }
        let fixture = self.fixture(case.is_exclusive()).await?;
        let store = capabilities(&*fixture).await?;
        if let Some(gap) = gap(case.needs, &*fixture, &store) {
            return Ok(Outcome::Ignored(gap));
        }
        let pace = Pace::of(self.maker.home(), self.time(), &store);
        let ctx = Ctx::new(case.name, Arc::clone(&self.maker), fixture, twist, pace);
        let run = AssertUnwindSafe((case.run)(ctx.clone())).catch_unwind();
        let outcome = match tokio::time::timeout(pace.limit, run).await {
            Ok(Ok(Ok(()))) => Outcome::Passed,
            Ok(Ok(Err(failure))) => Outcome::Failed(failure.to_string()),
            Ok(Err(panic)) => Outcome::Failed(words_of(&*panic)),
            Err(_) => Outcome::Hung,
        };
        ctx.finish().await;
        Ok(outcome)
    }

    /// The store that serves everybody, or one more.
    async fn fixture(&self, own: bool) -> Result<Arc<dyn Fixture>, Failure> {
        if own || self.time() == Time::Simulated {
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

    fn runtime(&self) -> Result<&Runtime, Failure> {
        let runtime = self.runtime.get_or_init(|| {
            runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
        });
        runtime.as_ref().map_err(Failure::new)
    }

    /// Ends what serves everybody.
    pub(crate) fn close(&self) {
        if let Some(Ok(runtime)) = self.runtime.get() {
            drop(runtime.block_on(async { self.shared.lock().await.take() }));
        }
    }
}

async fn capabilities(fixture: &dyn Fixture) -> Result<Capabilities, Failure> {
    let driver = fixture.driver().await?;
    let store = driver.capabilities().clone();
    driver.close().await;
    Ok(store)
}

fn gap(needs: &[Need], fixture: &dyn Fixture, store: &Capabilities) -> Option<Gap> {
    needs.iter().find_map(|need| need.gap(fixture, store).err())
}

fn paused() -> Result<Runtime, Failure> {
    Ok(runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?)
}

/// The reason in full is the failure of whoever did not ask for this.
const UNPRIVILEGED_GAP: Gap = Gap("no container engine answers, and DLOCK_TEST_UNPRIVILEGED is 1");

fn words_of(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", words.unwrap_or("without words"))
}
