//! Connections: the stores of a quorum, each with a task that connects it, and finds out when it answers again.

use crate::{
    capabilities::{common, fits},
    config::{QuorumConfig, Store},
    error::slow,
    holds::Holds,
    votes::most,
};
use dlock_core::{
    Clock, Effect, Error, ErrorKind, LockName, RetryClass,
    driver::{
        Capabilities, DistributedLock, DriverError, Finding, Result, Wake,
        kit::{Backoff, WakeUps, log_findings},
    },
};
use futures_util::{StreamExt, future::join_all};
use parking_lot::Mutex;
use std::{
    future::poll_fn,
    mem,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};

/// The stores of a quorum.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) nodes: Vec<Node>,
    pub(crate) capabilities: Capabilities,
    pub(crate) clock: Clock,
    pub(crate) wake_ups: WakeUps,
    pub(crate) holds: Holds,
    /// What runs on after its caller was answered, and until when a close waits for it.
    background: Mutex<(JoinSet<()>, Instant)>,
    closed: AtomicBool,
}

/// One store.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) label: String,
    store: Store,
    driver: OnceLock<Arc<dyn DistributedLock>>,
    /// It failed, or did not answer, and has not answered since.
    down: AtomicBool,
    /// Why it is not connected.
    why: Mutex<String>,
    failed: Arc<Notify>,
}

impl Stores {
    /// Connects to all stores, and begins when a quorum is there.
    pub(crate) async fn connect(config: QuorumConfig) -> Result<Arc<Self>, Error> {
        let nodes: Vec<_> = config.stores.into_iter().map(Node::new).collect();
        let connecting = join_all(nodes.iter().map(Node::dial)).await;
        let (mut connected, mut failures) = (Vec::new(), Vec::new());
        for (node, dialed) in nodes.iter().zip(connecting) {
            match dialed {
                Ok(driver) => connected.push((node, driver)),
                Err(error) if !is_passing(&error) => return Err(error),
                Err(error) => failures.push(format!("{}: {error}", node.label)),
            }
        }
        let (quorum, failures) = (nodes.len() / 2 + 1, failures.join("; "));
        if connected.len() < quorum {
            let message = format!(
                "{} of {} stores can be reached, {quorum} have to: {failures}",
                connected.len(),
                nodes.len()
            );
            return Err(DriverError::unavailable(message).into());
        }
        if !failures.is_empty() {
            tracing::warn!(target: "dlock::quorum", "a store cannot be reached yet, and is tried again: {failures}");
        }
        let mut labels: Vec<_> = nodes.iter().map(|node| node.label.as_str()).collect();
        labels.sort_unstable();
        let each: Vec<_> = connected.iter().map(|(_, it)| it.capabilities()).collect();
        let capabilities = common(format!("quorum:{}", labels.join(" ")), &each)?;
        for (node, driver) in connected {
            node.admit(driver, &capabilities, &nodes)
                .map_err(Error::misuse)?;
        }
        let stores = Arc::new(Self {
            nodes,
            capabilities,
            clock: config.clock,
            wake_ups: WakeUps::new(),
            holds: Holds::default(),
            background: Mutex::new((JoinSet::new(), Instant::now())),
            closed: AtomicBool::new(false),
        });
        log_findings("quorum", &Ok(stores.shared_host().into_iter().collect()));
        (0..stores.nodes.len()).for_each(|at| stores.attend(at));
        Ok(stores)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Runs a task that no caller awaits. Without a runtime it is dropped.
    pub(crate) fn in_background(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Ok(runtime) = Handle::try_current() {
            let (tasks, until) = &mut *self.background.lock();
            while tasks.try_join_next().is_some() {}
            tasks.spawn_on(task, &runtime);
            *until = Instant::now() + RUNS_ON;
        }
    }

    /// Waits a moment for what runs on: a release that a quorum has answered may not have reached the other stores, which
    /// then have the hold until its lease ends.
    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let until = self.background.lock().1;
        let next = || poll_fn(|cx| self.background.lock().0.poll_join_next(cx));
        let ended = async { while next().await.is_some() {} };
        let _in_time = timeout_at(until, ended).await;
        let drivers = self.nodes.iter().filter_map(|node| node.driver.get());
        join_all(drivers.map(|driver| driver.close())).await;
        self.wake_ups.close();
    }

    /// How many stores have to agree.
    pub(crate) fn quorum(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// Whether so many stores are more than those without which a quorum is left.
    pub(crate) fn outweighs(&self, stores: usize) -> bool {
        stores > self.nodes.len() - self.quorum()
    }

    /// The stores to ask, in their order: those that answered last, or all if these are too few.
    pub(crate) fn candidates(&self) -> Vec<usize> {
        let numbers = 0..self.nodes.len();
        let connected = numbers.filter(|at| self.nodes[*at].driver.get().is_some());
        let connected: Vec<_> = connected.collect();
        let mut up = connected.clone();
        up.retain(|at| !self.nodes[*at].is_down());
        match up.len() >= self.quorum() {
            true => up,
            false => connected,
        }
    }

    /// What each store finds of itself, and what they have in common.
    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asking = self
            .nodes
            .iter()
            .map(|node| node.answer(async { node.driver()?.diagnose().await }));
        let mut found: Vec<_> = self.shared_host().into_iter().collect();
        for (node, answer) in self.nodes.iter().zip(join_all(asking).await) {
            let remedy = "repair it: until then one failure more ends the quorum";
            let its =
                answer.unwrap_or_else(|error| vec![Finding::warning(error.to_string(), remedy)]);
            found.extend(its.into_iter().map(|mut finding| {
                finding.what = format!("{}: {}", node.label, finding.what);
                finding
            }));
        }
        Ok(found)
    }

    /// A host that several stores share.
    fn shared_host(&self) -> Option<Finding> {
        let hosts = self.nodes.iter().filter_map(|node| host(&node.label));
        let hosts: Vec<_> = hosts.collect();
        let (host, count) = most(&hosts)?;
        let what = format!(
            "{count} of {} stores are on the host {host}, and fail with it",
            self.nodes.len()
        );
        (count > 1).then(|| Finding::warning(what, "put each store on a machine of its own"))
    }

    /// The task of one store. It ends with the driver.
    fn attend(self: &Arc<Self>, at: usize) {
        let (stores, failed) = (Arc::downgrade(self), Arc::clone(&self.nodes[at].failed));
        tokio::spawn(async move {
            let mut backoff = Backoff::new(RETRY.0, RETRY.1);
            let mut hears = false;
            while let Some(stores) = stores.upgrade().filter(|stores| !stores.is_closed()) {
                let node = &stores.nodes[at];
                if node.driver.get().is_none() {
                    node.connect_again(&stores).await;
                }
                if node.driver.get().is_some() && !mem::replace(&mut hears, true) {
                    stores.listen(at);
                }
                let works = !node.is_down() || node.probe().await;
                drop(stores);
                if works {
                    backoff = Backoff::new(RETRY.0, RETRY.1);
                    let _failed = timeout(LOOK_EVERY, failed.notified()).await;
                }
                sleep(backoff.pause()).await;
            }
        });
    }

    /// Passes on the wake-ups of one store.
    fn listen(self: &Arc<Self>, at: usize) {
        let wakes = self.capabilities.wake != Wake::Poll;
        let Some(driver) = self.nodes[at].driver.get().filter(|_| wakes) else {
            return;
        };
        let (mut stream, stores) = (driver.wake_ups(), Arc::downgrade(self));
        tokio::spawn(async move {
            while let Some(wake_up) = stream.next().await
                && let Some(stores) = stores.upgrade()
            {
                stores.wake_ups.send(wake_up);
            }
        });
    }
}

impl Node {
    fn new(store: Store) -> Self {
        Self {
            label: store.label.clone(),
            store,
            driver: OnceLock::new(),
            down: AtomicBool::new(true),
            why: Mutex::new("it is not connected yet".to_owned()),
            failed: Arc::default(),
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    pub(crate) fn driver(&self) -> Result<&Arc<dyn DistributedLock>> {
        let down = || DriverError::unavailable(format!("not asked: {}", self.why.lock()));
        self.driver.get().ok_or_else(down)
    }

    /// The answer of a call, which shows whether the store works.
    pub(crate) async fn answer<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        let answer = timeout(ABANDON_AFTER, call).await;
        let answer = answer.unwrap_or_else(|_| Err(slow()));
        match &answer {
            Err(error) if is_failure(error) => self.failed(error),
            _ => self.down.store(false, Ordering::Relaxed),
        }
        answer
    }

    /// It failed: it is asked again once it answered a probe.
    pub(crate) fn failed(&self, error: &DriverError) {
        if !self.down.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "dlock::quorum", store = self.label, %error, "a store of the quorum fails");
            self.failed.notify_one();
        }
    }

    async fn dial(&self) -> Result<Arc<dyn DistributedLock>, Error> {
        let connected = timeout(CONNECT_WITHIN, (self.store.connect)()).await;
        connected.unwrap_or_else(|_| Err(slow().into()))
    }

    async fn connect_again(&self, stores: &Stores) {
        let admitted = match self.dial().await {
            Ok(driver) => self.admit(driver, &stores.capabilities, &stores.nodes),
            Err(error) => Err(error.to_string()),
        };
        if stores.is_closed()
            && let Some(driver) = self.driver.get()
        {
            driver.close().await;
        }
        if let Err(why) = admitted {
            tracing::debug!(target: "dlock::quorum", store = self.label, why, "no connection yet");
            *self.why.lock() = why;
        }
    }

    /// Takes a connected store in, if the quorum keeps what it promised without it.
    fn admit(
        &self,
        driver: Arc<dyn DistributedLock>,
        promised: &Capabilities,
        all: &[Self],
    ) -> Result<(), String> {
        let store = |node: &Self| Some(node.driver.get()?.capabilities().store.clone());
        let its = driver.capabilities();
        if let Some(other) = all.iter().find(|it| store(it).as_ref() == Some(&its.store)) {
            return Err(format!("{} and {} are one store", self.label, other.label));
        }
        if !fits(promised, its) {
            return Err(format!(
                "{} can do less than the stores that were there first",
                self.label
            ));
        }
        if self.driver.set(driver).is_ok() {
            self.down.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Asks whether it answers again.
    async fn probe(&self) -> bool {
        let name = LockName::new(PROBED).expect("it is short and has no NUL");
        let asked = self.answer(async { self.driver()?.inspect(&name).await });
        let answers = matches!(timeout(RETRY.1, asked).await, Ok(Ok(_)));
        if answers {
            tracing::info!(target: "dlock::quorum", store = self.label, "a store of the quorum answers again");
        }
        answers
    }
}

/// Whether an error says that the store does not work, rather than something about one request.
fn is_failure(error: &DriverError) -> bool {
    error.kind() == ErrorKind::Unavailable
        && (error.retry() == RetryClass::Later || error.effect() == Effect::Unknown)
}

/// Whether time may help: not against bad settings, nor a store that is not built in.
fn is_passing(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Misuse | ErrorKind::Unsupported)
}

/// The host in a label that is a URL.
fn host(label: &str) -> Option<&str> {
    let (_, rest) = label.split_once("://")?;
    let end = rest.find(['/', ':', '?']).unwrap_or(rest.len());
    Some(&rest[..end]).filter(|host| !host.is_empty())
}

/// One attempt to connect; a store that takes longer is tried again in the background.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The pauses before a store that failed is asked whether it answers again. Meanwhile no acquire waits for it.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How often a task looks whether its driver is still in use.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long after the last of them a close still waits for requests that no caller awaits: less than the two seconds that
/// a shutdown gives it.
const RUNS_ON: Duration = Duration::from_secs(1);
/// No store's client keeps a request longer.
pub(crate) const ABANDON_AFTER: Duration = Duration::from_secs(30);
/// A name that a probe may read.
const PROBED: &str = "dlock-quorum-probe";
