//! Connections: the stores of a quorum, each with a task that connects it, and finds out when it answers again.

use crate::{
    config::{QuorumConfig, Store},
    error,
    holds::Holds,
};
use dlock_core::{
    Clock, Effect, Error, ErrorKind, Instant, LockName, RetryClass,
    driver::{
        Capabilities, DistributedLock, DriverError, Lane, Renew, Renewed, Result, Wake, WakeUp,
        kit::{Backoff, WakeUps, again},
    },
};
use futures_util::{StreamExt, future::join_all};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

/// The stores of a quorum.
pub(crate) struct Stores {
    pub(crate) nodes: Vec<Node>,
    pub(crate) capabilities: Capabilities,
    pub(crate) clock: Clock,
    pub(crate) wake_ups: WakeUps,
    pub(crate) holds: Arc<Holds>,
    closed: AtomicBool,
}

/// One store.
pub(crate) struct Node {
    pub(crate) label: String,
    store: Store,
    driver: OnceLock<Arc<dyn DistributedLock>>,
    /// It failed, or did not answer, and has not answered since.
    down: AtomicBool,
    /// What it failed of last.
    why: Mutex<String>,
    failed: Arc<Notify>,
}

impl Stores {
    /// Connects to all stores, and begins when a quorum is there.
    pub(crate) async fn connect(config: QuorumConfig) -> Result<Arc<Self>, Error> {
        let nodes: Vec<_> = config.stores.into_iter().map(Node::new).collect();
        let connecting = nodes.iter().map(|node| async {
            let connected = timeout(CONNECT_WITHIN, (node.store.connect)()).await;
            connected.unwrap_or_else(|_| Err(error::slow().into()))
        });
        let (mut connected, mut failures) = (Vec::new(), Vec::new());
        for (node, connected_to) in nodes.iter().zip(join_all(connecting).await) {
            match connected_to {
                Ok(driver) => connected.push((node, driver)),
                // Nothing that time changes: bad settings, or a store that is not built in.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Misuse | ErrorKind::Unsupported) =>
                {
                    return Err(error);
                }
                Err(error) => failures.push(format!("{}: {error}", node.label)),
            }
        }
        let quorum = nodes.len() / 2 + 1;
        if connected.len() < quorum {
            let message = format!(
                "{} of {} stores can be reached, {quorum} have to: {}",
                connected.len(),
                nodes.len(),
                failures.join("; ")
            );
            return Err(DriverError::unavailable(message).into());
        }
        for failure in failures {
            tracing::warn!(target: "dlock::quorum", "a store cannot be reached yet, and is tried again: {failure}");
        }
        let each: Vec<_> = connected
            .iter()
            .map(|(_, driver)| driver.capabilities())
            .collect();
        let capabilities = common(&nodes, &each)?;
        for (node, driver) in connected {
            if let Err(why) = node.admit(driver, &capabilities, &nodes) {
                return Err(Error::misuse(why));
            }
        }
        let stores = Arc::new(Self {
            nodes,
            capabilities,
            clock: config.clock,
            wake_ups: WakeUps::new(),
            holds: Arc::default(),
            closed: AtomicBool::new(false),
        });
        for at in 0..stores.nodes.len() {
            stores.attend(at);
        }
        Ok(stores)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        join_all(self.nodes.iter().map(Node::close)).await;
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
        let connected: Vec<_> = (0..self.nodes.len())
            .filter(|at| self.nodes[*at].driver.get().is_some())
            .collect();
        let up: Vec<_> = connected
            .iter()
            .copied()
            .filter(|at| !self.nodes[*at].is_down())
            .collect();
        if up.len() >= self.quorum() {
            up
        } else {
            connected
        }
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
                if node.driver.get().is_some() && !std::mem::replace(&mut hears, true) {
                    stores.listen(at);
                }
                let works = !node.is_down() || node.probe().await;
                drop(stores);
                if works {
                    backoff = Backoff::new(RETRY.0, RETRY.1);
                    drop(timeout(LOOK_EVERY, failed.notified()).await);
                }
                sleep(backoff.pause()).await;
            }
        });
    }

    /// Passes on the wake-ups of one store.
    fn listen(self: &Arc<Self>, at: usize) {
        let Some(driver) = self.nodes[at]
            .driver
            .get()
            .filter(|_| self.capabilities.wake != Wake::Poll)
        else {
            return;
        };
        let (mut stream, stores) = (driver.wake_ups(), Arc::downgrade(self));
        tokio::spawn(async move {
            while let Some(wake_up) = stream.next().await {
                let Some(stores) = stores.upgrade() else {
                    return;
                };
                stores.wake_ups.send(match wake_up {
                    WakeUp::Over(_) => WakeUp::Over(Lane::default()),
                    wake_up => wake_up,
                });
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

    pub(crate) fn why(&self) -> String {
        self.why
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn driver(&self) -> Result<&Arc<dyn DistributedLock>> {
        self.driver.get().ok_or_else(|| error::down(&self.why()))
    }

    /// The answer of a call, which shows whether the store works.
    pub(crate) async fn ask<T, F: Future<Output = Result<T>>>(
        &self,
        call: impl FnOnce(Arc<dyn DistributedLock>) -> F,
    ) -> Result<T> {
        let driver = Arc::clone(self.driver()?);
        let answer = timeout(ABANDON_AFTER, call(driver))
            .await
            .unwrap_or_else(|_| Err(error::slow()));
        match &answer {
            Err(error) if is_failure(error) => self.failed(error),
            _ => self.down.store(false, Ordering::Relaxed),
        }
        answer
    }

    /// It failed: it is asked again once it answered a probe.
    pub(crate) fn failed(&self, error: &DriverError) {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = error.to_string();
        if !self.down.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "dlock::quorum", store = self.label, %error, "a store of the quorum fails");
            self.failed.notify_one();
        }
    }

    /// Renews a batch, by the lanes of the store.
    pub(crate) async fn renew(
        &self,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let driver = self.driver()?;
        let mut lanes: BTreeMap<Lane, Vec<usize>> = BTreeMap::new();
        for (at, entry) in batch.iter().enumerate() {
            lanes.entry(driver.lane(&entry.name)).or_default().push(at);
        }
        let renewing = lanes.into_iter().map(|(lane, which)| async move {
            let some: Vec<_> = which.iter().map(|at| batch[*at].clone()).collect();
            let answers = self
                .ask(async |driver| driver.renew(lane, &some, give_up).await)
                .await;
            (which, answers)
        });
        let mut answers: Vec<_> = batch.iter().map(|_| Err(error::slow())).collect();
        for (which, renewed) in join_all(renewing).await {
            match renewed {
                Ok(renewed) => {
                    for (at, answer) in which.into_iter().zip(renewed) {
                        answers[at] = answer;
                    }
                }
                Err(error) => which
                    .into_iter()
                    .for_each(|at| answers[at] = Err(again(&error))),
            }
        }
        Ok(answers)
    }

    async fn connect_again(&self, stores: &Stores) {
        let connected = timeout(CONNECT_WITHIN, (self.store.connect)()).await;
        let refused = match connected.unwrap_or_else(|_| Err(error::slow().into())) {
            Ok(driver) => self
                .admit(driver, &stores.capabilities, &stores.nodes)
                .err(),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = refused {
            tracing::debug!(target: "dlock::quorum", store = self.label, why, "no connection yet");
            *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
        }
    }

    /// Takes a connected store in, if the quorum keeps what it promised without it.
    fn admit(
        &self,
        driver: Arc<dyn DistributedLock>,
        promised: &Capabilities,
        all: &[Self],
    ) -> Result<(), String> {
        let its = driver.capabilities();
        let same = |other: &&Self| {
            other
                .driver
                .get()
                .is_some_and(|other| other.capabilities().store == its.store)
        };
        if let Some(other) = all.iter().find(same) {
            return Err(format!("{} and {} are one store", self.label, other.label));
        }
        let fits = its.raises
            && its.late <= promised.late
            && its.lapse <= promised.lapse
            && its.leases.contains(promised.leases.start())
            && its.leases.contains(promised.leases.end())
            && its.renew_batch >= promised.renew_batch
            && weight(its.wake) >= weight(promised.wake)
            && (promised.session_bound || !its.session_bound);
        if !fits {
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
        let Ok(name) = LockName::new(PROBED) else {
            return false;
        };
        let asked = self.ask(async |driver| driver.inspect(&name).await);
        let answers = matches!(timeout(RETRY.1, asked).await, Ok(Ok(_)));
        if answers {
            tracing::info!(target: "dlock::quorum", store = self.label, "a store of the quorum answers again");
        }
        answers
    }

    async fn close(&self) {
        if let Some(driver) = self.driver.get() {
            driver.close().await;
        }
    }
}

/// What every store can do.
fn common(nodes: &[Node], each: &[&Capabilities]) -> Result<Capabilities, Error> {
    if let Some(other) = each.iter().find(|its| !its.raises) {
        return Err(DriverError::new(
            ErrorKind::Unsupported,
            format!(
                "{} cannot be in a quorum: its fencing tokens cannot be raised to those of other stores, so the tokens of the \
                 quorum would go back; an etcd or ZooKeeper cluster is a quorum by itself",
                other.backend
            ),
        )
        .into());
    }
    let mut labels: Vec<_> = nodes.iter().map(|node| node.label.as_str()).collect();
    labels.sort_unstable();
    let mut all = Capabilities::new("quorum", format!("quorum:{}", labels.join(" ")));
    all.raises = true;
    (all.wake, all.renew_batch) = (Wake::Queue, usize::MAX);
    for its in each {
        all.wake = if weight(its.wake) < weight(all.wake) {
            its.wake
        } else {
            all.wake
        };
        all.late = all.late.max(its.late);
        all.lapse = all.lapse.max(its.lapse);
        all.renew_batch = all.renew_batch.min(its.renew_batch);
        all.session_bound |= its.session_bound;
        let (start, end) = (*all.leases.start(), *all.leases.end());
        all.leases = start.max(*its.leases.start())..=end.min(*its.leases.end());
    }
    Ok(all)
}

/// A quorum wakes waiters as its weakest store does.
fn weight(wake: Wake) -> u8 {
    match wake {
        Wake::Queue => 2,
        Wake::Notify => 1,
        _ => 0,
    }
}

/// Whether an error says that the store does not work, rather than something about one request.
fn is_failure(error: &DriverError) -> bool {
    error.kind() == ErrorKind::Unavailable
        && (error.retry() == RetryClass::Later || error.effect() == Effect::Unknown)
}

impl fmt::Debug for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.nodes).finish()
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.driver.get(), self.is_down()) {
            (None, _) => "not connected",
            (_, true) => "down",
            (_, false) => "up",
        };
        write!(f, "{} ({state})", self.label)
    }
}

/// One attempt to connect; a store that takes longer is tried again in the background.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The pauses before a store that failed is asked whether it answers again. Meanwhile no acquire waits for it.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How often a task looks whether its driver is still in use.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// No store's client keeps a request longer.
const ABANDON_AFTER: Duration = Duration::from_secs(30);
/// A name that a probe may read.
const PROBED: &str = "dlock-quorum-probe";
