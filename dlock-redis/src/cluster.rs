//! Cluster driver: sends each lock to the master that has its slot.
//!
//! Every master has a driver of its own, with its connections and a subscription. All subscribe to the one channel of
//! this client: a script notifies those that listen at its own node, and counts only them. The nodes pass messages on
//! to each other, so the client takes a notification from the master of the slot alone.

use crate::{
    commands,
    config::RedisConfig,
    connection::Connection,
    dialer::{self, Dialer},
    driver::{RedisDriver, capabilities},
    error,
    listener::Inbox,
    slots::{Map, NodeAddr, Slots, slot_of},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Effect, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Finding, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, WakeUp, check_runtime,
        kit::{again, log_findings},
    },
};
use futures_core::stream::BoxStream;
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all, select_ok},
};
use redis::{Cmd, ConnectionAddr, Value};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::OnceCell, task::JoinHandle};

/// The driver for locks on a Redis Cluster.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let url = "redis+cluster://n1.internal:6379,n2.internal:6379/";
/// let driver = dlock_redis::ClusterDriver::connect(url).await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ClusterDriver {
    capabilities: Capabilities,
    cluster: Arc<Cluster>,
    refreshing: JoinHandle<()>,
}

#[derive(Debug)]
struct Cluster {
    config: RedisConfig,
    inbox: Inbox,
    slots: Arc<Slots>,
    nodes: Mutex<HashMap<NodeAddr, Arc<OnceCell<Node>>>>,
}

/// A master.
#[derive(Debug)]
struct Node {
    driver: Arc<RedisDriver>,
    /// The same, for slots that are being moved to it.
    asking: Arc<RedisDriver>,
}

impl ClusterDriver {
    /// Connects to the cluster of which the URL names some nodes: see [`RedisConfig`].
    ///
    /// # Errors
    /// - `Misuse` when the URL or one of its settings cannot be read, or TLS is requested without a
    ///   crypto provider.
    /// - `Unavailable` when none of the nodes of the URL or no master can be reached, or they refuse the
    ///   log-in or a right that waiting needs.
    /// - `Unsupported` when the servers are too old or no nodes of a cluster.
    ///
    /// # Cancel safety
    /// A dropped call leaves nothing behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let url = "redis+cluster://n1.internal:6379,n2.internal:6379/";
    /// let driver = dlock_redis::ClusterDriver::connect(url).await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with settings made in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_redis::{ClusterDriver, RedisConfig};
    ///
    /// let config: RedisConfig = "redis+cluster://n1.internal,n2.internal/".parse()?;
    /// let driver = ClusterDriver::open(config.with_prefix("ops".parse()?)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: RedisConfig) -> Result<Self> {
        check_runtime()?;
        if config.seeds.is_empty() {
            return Err(error::no_seeds());
        }
        #[cfg(feature = "tls")]
        config.check_tls()?;
        let capabilities = capabilities(&config);
        let cluster = Arc::new(Cluster {
            inbox: Inbox::new(config.prefix())?,
            config,
            slots: Arc::new(Slots::new()),
            nodes: Mutex::default(),
        });
        cluster.refresh().await?;
        let masters = cluster.addrs().into_iter();
        let opened = join_all(masters.map(async |addr| cluster.node(addr).await.map(drop))).await;
        if !opened.iter().any(Result::is_ok) {
            return Err(opened
                .into_iter()
                .find_map(Result::err)
                .unwrap_or_else(error::uncovered));
        }
        log_findings("redis", &cluster.findings().await);
        let refreshing = tokio::spawn(follow(Arc::clone(&cluster)));
        Ok(Self {
            capabilities,
            cluster,
            refreshing,
        })
    }
}

impl Cluster {
    /// Asks the nodes for the slots: the known masters, or if none answers the nodes of the URL. Returns whether all
    /// answered.
    async fn refresh(&self) -> Result<bool> {
        let known = self.opened();
        let asked = join_all(known.iter().map(async |(addr, node)| {
            let nodes = cluster_nodes(&node_of(node)?.server.connection);
            let answer = tokio::time::timeout(ANSWERS_WITHIN, nodes)
                .await
                .ok()?
                .ok()?;
            Some((host(addr).to_owned(), answer))
        }));
        let mut answers: Vec<_> = asked.await.into_iter().flatten().collect();
        let all = answers.len() == known.len();
        if answers.is_empty() {
            let seeds = self.config.seeds.iter().cloned();
            let others = known.iter().map(|(addr, _)| self.addr_of(addr));
            let asks = seeds.chain(others).map(|addr| self.ask(addr).boxed());
            answers.push(select_ok(asks).await?.0);
        }
        let is_tls = matches!(self.config.server.addr(), ConnectionAddr::TcpTls { .. });
        let map = Map::read(&answers, is_tls);
        if map.is_empty() {
            return Err(error::uncovered());
        }
        let mut nodes = self.nodes();
        nodes.retain(|addr, _| map.masters.contains(addr));
        for addr in &map.masters {
            nodes.entry(Arc::clone(addr)).or_default();
        }
        drop(nodes);
        self.slots.learn(&map);
        Ok(all)
    }

    /// Asks one node over a connection of its own.
    async fn ask(&self, addr: ConnectionAddr) -> Result<(String, String)> {
        let host = host(&addr.to_string()).to_owned();
        let dialer = Dialer::new(&self.config_at(addr)).map_err(|cause| error::failed(cause).error);
        let slots = Some(Arc::clone(&self.slots));
        let connection = Connection::open(Arc::new(dialer?.of_cluster(slots))).await?;
        Ok((host, cluster_nodes(&connection).await?))
    }

    fn addr_of(&self, addr: &str) -> ConnectionAddr {
        let port = addr.rsplit(':').next().and_then(|port| port.parse().ok());
        dialer::at(
            self.config.server.addr(),
            host(addr),
            port.unwrap_or_default(),
        )
    }

    fn config_at(&self, addr: ConnectionAddr) -> RedisConfig {
        let server = self.config.server.clone().set_addr(addr);
        self.config.clone().at(server)
    }

    /// The driver of that master; connects where there is none yet.
    async fn node(&self, addr: NodeAddr) -> Result<Arc<OnceCell<Node>>> {
        let cell = Arc::clone(self.nodes().entry(Arc::clone(&addr)).or_default());
        let open = async || {
            let config = self.config_at(self.addr_of(&addr));
            let slots = Some(Arc::clone(&self.slots));
            let driver = RedisDriver::start(config, self.inbox.clone(), slots).await?;
            let asking = Arc::new(driver.asking());
            let driver = Arc::new(driver);
            Ok::<_, DriverError>(Node { driver, asking })
        };
        cell.get_or_try_init(open).await?;
        Ok(cell)
    }

    /// Calls the master of the lock's slot, and the next one where that refuses and another one has the slot.
    async fn on<'a, T: Send>(
        &self,
        name: &LockName,
        ticket: Option<Ticket>,
        call: impl Fn(Arc<RedisDriver>) -> BoxFuture<'a, Result<T>> + Send + Sync,
    ) -> Result<T> {
        let slot = slot_of(self.config.prefix().keys(name).record());
        let (mut asked, mut hops) = (None, 0);
        loop {
            let asking = asked.is_some();
            let owner = self.slots.owner(slot);
            let Some(addr) = asked.take().or(owner) else {
                self.slots.stale.notify_one();
                return Err(error::uncovered());
            };
            let cell = self.node(Arc::clone(&addr)).await?;
            let node = cell.get().ok_or_else(error::uncovered)?;
            let driver = Arc::clone(if asking { &node.asking } else { &node.driver });
            let answer = tokio::select! {
                biased;
                answer = call(Arc::clone(&driver)) => answer,
                // Such as after a failover. It may have answered meanwhile that it has the slot no more.
                () = self.superseded(slot, &addr, asking) => Err(error::superseded()),
            };
            asked = self.slots.asked(slot);
            let moved = !asking && self.slots.owner(slot).is_some_and(|owner| owner != addr);
            hops += 1;
            match answer {
                Err(error)
                    if error.effect() == Effect::None
                        && (moved || asked.is_some())
                        && hops < MOST_HOPS =>
                {
                    if let Some(ticket) = ticket.filter(|_| moved) {
                        driver.server.wake_ups.tickets.forget(ticket);
                    }
                }
                answer => return answer,
            }
        }
    }

    async fn renew(&self, lane: Lane, entry: &Renew, give_up: Instant) -> Result<Renewed> {
        let one = std::slice::from_ref(entry);
        let renew = move |node: Arc<RedisDriver>| {
            async move { node.renew(lane, one, give_up).await }.boxed()
        };
        let answer = self.on(&entry.name, None, renew).await?.into_iter().next();
        answer.unwrap_or_else(|| Err(error::garbled()))
    }

    async fn superseded(&self, slot: u16, addr: &NodeAddr, asking: bool) {
        if asking {
            std::future::pending::<()>().await;
        }
        self.slots.left(slot, addr).await;
        tokio::time::sleep(GRACE).await;
    }

    /// What the settings of the cluster mean for a lock, where the user may read them.
    async fn findings(&self) -> Result<Vec<Finding>> {
        let known = self.opened();
        let node = known.iter().find_map(|(_, node)| node_of(node));
        let connection = &node.ok_or_else(error::uncovered)?.server.connection;
        let mut ask = redis::cmd("CONFIG");
        ask.arg("GET").arg("cluster-*");
        let answer = connection.command(ask).await?;
        let value = |key: &str| {
            let Value::Map(pairs) = &answer else {
                return None;
            };
            let pair = pairs
                .iter()
                .find(|(found, _)| commands::text(found) == Some(key));
            pair.and_then(|(_, value)| commands::text(value))
        };
        let mut found = Vec::new();
        if let Some(millis) = value("cluster-node-timeout").and_then(|it| it.parse().ok()) {
            let timeout = Duration::from_millis(millis);
            found.push(match timeout > SLOW {
                true => Finding::warning(
                    format!("cluster-node-timeout is {timeout:?}: a failover takes longer than that, and ends leases that are shorter"),
                    "set 5000, or use leases of at least three times as much",
                ),
                false => Finding::ok(format!("cluster-node-timeout is {timeout:?}")),
            });
        }
        match value("cluster-require-full-coverage") {
            Some("yes") => found.push(Finding::warning(
                "cluster-require-full-coverage is yes: the loss of one shard stops the locks of all",
                "set no",
            )),
            Some(other) => found.push(Finding::ok(format!(
                "cluster-require-full-coverage is {other}: the loss of one shard stops its own locks alone"
            ))),
            None => {}
        }
        Ok(found)
    }

    /// The masters, sorted.
    fn addrs(&self) -> Vec<NodeAddr> {
        let mut addrs: Vec<_> = self.nodes().keys().cloned().collect();
        addrs.sort();
        addrs
    }

    /// The masters to which there was a connection, sorted.
    fn opened(&self) -> Vec<(NodeAddr, Arc<OnceCell<Node>>)> {
        let nodes = self.nodes();
        let opened = nodes.iter().filter(|(_, node)| node.initialized());
        let opened: BTreeMap<_, _> = opened
            .map(|(addr, node)| (addr.clone(), node.clone()))
            .collect();
        opened.into_iter().collect()
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<NodeAddr, Arc<OnceCell<Node>>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for the slots again and again, soon where a node refused a request or did not answer. Connects to the masters
/// that are new, so that it listens there before a lock is there.
async fn follow(cluster: Arc<Cluster>) {
    let mut pause = POLL_INTERVAL;
    loop {
        drop(tokio::time::timeout(pause, cluster.slots.stale.notified()).await);
        let all = cluster.refresh().await.inspect_err(|error| {
            tracing::debug!(%error, "redis: no node says where the slots are");
        });
        let opens = cluster.addrs().into_iter().map(async |addr| {
            tokio::time::timeout(ANSWERS_WITHIN, cluster.node(addr))
                .await
                .is_ok_and(|it| it.is_ok())
        });
        let opened = join_all(opens).await.into_iter().all(|opened| opened);
        pause = match all {
            Ok(true) if opened => POLL_INTERVAL,
            _ => SOON,
        };
        // One answer serves all requests that were refused meanwhile.
        tokio::time::sleep(BETWEEN).await;
    }
}

#[async_trait]
impl DistributedLock for ClusterDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The locks of one master share a lane.
    fn lane(&self, name: &LockName) -> Lane {
        let slot = slot_of(self.cluster.config.prefix().keys(name).record());
        let owner = self.cluster.slots.owner(slot);
        let at = |owner| self.cluster.addrs().iter().position(|addr| *addr == owner);
        Lane(
            owner
                .and_then(at)
                .and_then(|at| u32::try_from(at).ok())
                .unwrap_or_default(),
        )
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let acquire = move |node: Arc<RedisDriver>| async move { node.acquire(req).await }.boxed();
        self.cluster.on(&req.name, req.ticket, acquire).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        let leave =
            move |node: Arc<RedisDriver>| async move { node.leave(name, ticket).await }.boxed();
        self.cluster.on(name, Some(ticket), leave).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let renewals = batch
            .iter()
            .map(|entry| self.cluster.renew(lane, entry, give_up));
        let outcomes = join_all(renewals.collect::<Vec<_>>()).await;
        match outcomes.first() {
            Some(Err(error)) if outcomes.iter().all(Result::is_err) => Err(again(error)),
            _ => Ok(outcomes),
        }
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let release = move |node: Arc<RedisDriver>| async move { node.release(req).await }.boxed();
        self.cluster.on(&req.name, None, release).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.cluster.inbox.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let inspect = move |node: Arc<RedisDriver>| async move { node.inspect(name).await }.boxed();
        self.cluster.on(name, None, inspect).await
    }

    /// Lists one master after the other. A cursor is that of the master, behind its address.
    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let masters = self.cluster.addrs();
        let from = from.map(|from| std::str::from_utf8(&from.0).ok()?.split_once(' '));
        let (at, its) = match from {
            None => (masters.first().cloned(), ""),
            Some(Some((addr, its))) => (Some(addr.into()), its),
            Some(None) => return Err(error::bad_cursor()),
        };
        let at = at.ok_or_else(error::uncovered)?;
        // One that is a master no more: its locks are at another one, which is listed or was.
        if !masters.contains(&at) {
            return Err(error::superseded());
        }
        let its = Some(Cursor(its.into())).filter(|its| !its.0.is_empty());
        let cell = self.cluster.node(Arc::clone(&at)).await?;
        let node = node_of(&cell).ok_or_else(error::uncovered)?;
        let mut page = node.list(prefix, its.as_ref(), limit).await?;
        let next = match page.next.take() {
            Some(next) => Some([at.as_bytes(), b" ", &next.0].concat()),
            None => masters
                .iter()
                .find(|other| **other > at)
                .map(|next| format!("{next} ").into_bytes()),
        };
        page.next = next.map(Cursor);
        Ok(page)
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let free =
            move |node: Arc<RedisDriver>| async move { node.break_lock(name, only).await }.boxed();
        self.cluster.on(name, None, free).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let mut found = self.cluster.findings().await.unwrap_or_default();
        for addr in self.cluster.addrs() {
            let cell = self.cluster.node(Arc::clone(&addr)).await?;
            let its = node_of(&cell)
                .ok_or_else(error::uncovered)?
                .diagnose()
                .await?;
            found.extend(its.into_iter().map(|mut finding| {
                finding.what = format!("{addr}: {}", finding.what);
                finding
            }));
        }
        Ok(found)
    }

    async fn close(&self) {
        self.refreshing.abort();
        let nodes = self.cluster.opened();
        let drivers = nodes.iter().filter_map(|(_, node)| node_of(node));
        join_all(drivers.map(|driver| driver.close())).await;
    }
}

impl Drop for ClusterDriver {
    fn drop(&mut self) {
        self.refreshing.abort();
    }
}

async fn cluster_nodes(connection: &Arc<Connection>) -> Result<String> {
    let mut ask: Cmd = redis::cmd("CLUSTER");
    ask.arg("NODES");
    let answer = connection.command(ask).await?;
    commands::read_info(&answer)
        .map(str::to_owned)
        .ok_or_else(error::garbled)
}

fn node_of(cell: &OnceCell<Node>) -> Option<&RedisDriver> {
    cell.get().map(|node| &*node.driver)
}

fn host(addr: &str) -> &str {
    addr.rsplit_once(':').map_or(addr, |(host, _)| host)
}

/// How often the slots are asked for where nothing tells of a change.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The same where a master does not answer: a failover is under way.
const SOON: Duration = Duration::from_millis(200);
/// The least pause between two questions.
const BETWEEN: Duration = Duration::from_millis(20);
/// A node has that answer at hand.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// How long a master that has a slot no more may take to say so.
const GRACE: Duration = Duration::from_millis(200);
/// Nodes asked for one request: the owner that the client knew, the one that it named, and where that one moves it to.
const MOST_HOPS: u32 = 5;
/// A failover that takes longer ends leases of the default length before their third renewal.
const SLOW: Duration = Duration::from_secs(10);
