//! Cluster: sends each request to the master that has the slot of its lock.
//!
//! A request that a node refuses because it does not have the slot had no effect, and goes to the node that it names.
//! Every request is built anew for its node, because each has a clock of its own. No request is sent again after a
//! failure that leaves its effect unknown: the core decides that. It is why the native client's cluster connection is
//! not used, which sends requests again after any error of a connection, and tells nothing of the node.

use crate::{
    commands,
    config::RedisConfig,
    connection::{Connection, Link, Request},
    dialer::{self, Dialer, ShortestLease},
    error,
    listener::Inbox,
    node::{Answer, Call, Node},
    slots::{Map, NodeAddr, slot_of},
};
use dlock_core::{
    DEFAULT_LEASE, Effect, RetryClass,
    driver::{
        DriverError, Finding, Result, WakeUp,
        kit::{in_runtime, log_findings},
    },
};
use futures_util::{
    FutureExt,
    future::{join_all, select_ok},
};
use parking_lot::Mutex;
use redis::{ConnectionAddr, Value};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, OnceCell, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

/// The masters of a cluster, and what the client knows of their slots.
#[derive(Debug)]
pub(crate) struct Cluster {
    config: RedisConfig,
    inbox: Inbox,
    shortest: ShortestLease,
    map: watch::Sender<Map>,
    nodes: Mutex<BTreeMap<NodeAddr, Arc<OnceCell<Arc<Node>>>>>,
    /// A node refused a request for a slot, or failed.
    stale: Arc<Notify>,
    closed: AtomicBool,
    /// That of the client. Requests connect to new masters, and their runtimes may end before.
    runtime: Handle,
}

impl Cluster {
    pub(crate) async fn open(
        config: RedisConfig,
        inbox: Inbox,
        shortest: ShortestLease,
    ) -> Result<Arc<Self>> {
        let cluster = Arc::new(Self {
            config,
            inbox,
            shortest,
            map: watch::Sender::default(),
            nodes: Mutex::default(),
            stale: Arc::default(),
            closed: AtomicBool::new(false),
            runtime: Handle::current(),
        });
        cluster.refresh().await?;
        let masters = cluster.masters().into_iter();
        let opened = join_all(masters.map(|addr| cluster.node(addr))).await;
        let is_up = opened.iter().any(Result::is_ok);
        let mut failed = opened.into_iter().filter_map(Result::err);
        // A master may be away, but all have to let the client in.
        if let Some(error) = failed.find(|it| !is_up || it.retry() == RetryClass::Never) {
            return Err(error);
        }
        log_findings("redis", &cluster.diagnose().await);
        // The first node may have been mistaken. All are asked next.
        cluster.stale.notify_one();
        let stale = Arc::clone(&cluster.stale);
        tokio::spawn(follow(Arc::downgrade(&cluster), stale));
        Ok(cluster)
    }

    /// Runs a script at the master of the slot, and at the next one where that refuses and another one has the slot.
    pub(crate) async fn eval(
        &self,
        call: Call<'_>,
        build: &(impl Fn(&Link) -> Request + Send + Sync),
    ) -> Result<Answer> {
        let slot = call.keys.first().map_or(0, |keys| slot_of(keys.record()));
        let (mut next, mut hops, mut pauses) = (None, 0, 0);
        loop {
            let owner = self.owner(slot);
            let is_named = next.is_some();
            let Some((addr, asking)) = next.take().or(owner.map(|owner| (owner, false))) else {
                self.stale.notify_one();
                return Err(error::uncovered());
            };
            let sent = AtomicBool::new(false);
            let building = |link: &Link| {
                sent.store(true, Relaxed);
                build(link)
            };
            let answer = async {
                let node = self.node(addr.clone()).await?;
                node.eval(&call, asking, &building).await
            };
            let answer = tokio::select! {
                biased;
                answer = answer => answer,
                () = self.left(slot, &addr), if !is_named => Err(error::superseded(sent.load(Relaxed))),
            };
            let Err(error) = answer else {
                return answer;
            };
            next = redirect(&error, &addr).map(|(to, asks)| (self.map.borrow().known_as(to), asks));
            self.stale.notify_one();
            let is_split = error::native(&error).is_some_and(|it| it.code() == Some("TRYAGAIN"));
            // The node may have closed its connection because it is a master no more.
            let moved =
                error.effect() == Effect::None && self.owner(slot).is_some_and(|it| it != addr);
            match next.is_some() || moved {
                // The node to which the slot is being moved is no owner yet, and it is where the other keys come.
                _ if is_split => {
                    pauses += 1;
                    next = asking.then_some((addr, asking));
                    sleep(SPLIT).await;
                }
                true => hops += 1,
                false => return Err(error),
            }
            if hops == MOST_HOPS || pauses == MOST_PAUSES {
                return Err(error);
            }
        }
    }

    /// The master that has the slot of that record, as far as it is known.
    pub(crate) fn owner(&self, slot: u16) -> Option<NodeAddr> {
        self.map.borrow().owner(slot)
    }

    /// The masters, sorted.
    pub(crate) fn masters(&self) -> Vec<NodeAddr> {
        self.nodes.lock().keys().cloned().collect()
    }

    /// What is open to the master at that address; connects where there is nothing yet.
    pub(crate) async fn node(&self, addr: NodeAddr) -> Result<Arc<Node>> {
        let cell = Arc::clone(self.nodes.lock().entry(addr.clone()).or_default());
        if let Some(node) = cell.get() {
            return Ok(Arc::clone(node));
        }
        let config = self.config.of_node(self.addr_of(&addr));
        let (inbox, shortest) = (self.inbox.clone(), self.shortest.clone());
        let open = async move || {
            let node = Node::open(&config, inbox, shortest, None).await;
            node.map(Arc::new)
        };
        // In a task: a caller that is not polled any more must keep no other from it.
        let opening = async move { cell.get_or_try_init(open).await.cloned() };
        let opened = in_runtime(&self.runtime, opening).await;
        opened.unwrap_or_else(|| Err(error::closed()))
    }

    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>> {
        let ask = |addr, is_first| self.diagnose_one(addr, is_first);
        Ok(diagnose_all(self.masters(), ask).await)
    }

    async fn diagnose_one(&self, addr: NodeAddr, is_first: bool) -> Result<Vec<Finding>> {
        let connection = &self.node(addr.clone()).await?.connection;
        let mut found = connection.diagnose(&self.config.acks).await?;
        for finding in &mut found {
            finding.what = format!("{addr}: {}", finding.what);
        }
        if is_first {
            let ask = commands::words(&["CONFIG", "GET", "cluster-*"]);
            let settings = connection.command(ask).await;
            // When the client connects, no caller has asked for a lease yet.
            let lease = self.shortest.asked().unwrap_or(DEFAULT_LEASE);
            found.extend(settings.map_or_else(
                // A user that only takes locks may not read them.
                |_| vec![unread("grant +config|get to have them checked")],
                |it| findings(&it, lease),
            ));
        }
        Ok(found)
    }

    pub(crate) async fn close(&self) {
        self.closed.store(true, Relaxed);
        self.stale.notify_one();
        join_all(self.opened().iter().map(|(_, node)| node.close())).await;
    }

    /// Asks the known masters which slots each has, or the nodes of the URL where none answers. Returns whether all
    /// answered.
    async fn refresh(&self) -> Result<bool> {
        let known = self.opened();
        let answers = known.iter().map(async |(addr, node)| {
            let answer = timeout(ANSWERS_WITHIN, cluster_nodes(&node.connection)).await;
            Some((addr.clone(), answer.ok()?.ok()?))
        });
        let answers = join_all(answers).await.into_iter().flatten();
        let mut answers: Vec<_> = answers.collect();
        let is_complete = answers.len() == known.len();
        if answers.is_empty() {
            let seeds = self.config.seeds.iter().cloned();
            let others = known.iter().map(|(addr, _)| self.addr_of(addr));
            let asks = seeds.chain(others).map(|addr| self.ask(addr).boxed());
            answers.push(select_ok(asks).await?.0);
        }
        let is_tls = matches!(self.config.server.addr(), ConnectionAddr::TcpTls { .. });
        let map = Map::read(&answers, is_tls);
        if map.masters.is_empty() {
            return Err(error::uncovered());
        }
        let mut nodes = self.nodes.lock();
        nodes.retain(|addr, _| map.masters.contains(addr));
        for addr in &map.masters {
            nodes.entry(addr.clone()).or_default();
        }
        drop(nodes);
        let mut have_left = false;
        self.map.send_if_modified(|now| {
            have_left = now.masters.iter().any(|it| !map.masters.contains(it));
            let is_new = *now != map;
            *now = map;
            is_new
        });
        if have_left {
            // Their listeners are gone. Where a master that was known before has the slots, nothing else tells.
            self.inbox.wake_ups.send(WakeUp::Resync);
        }
        Ok(is_complete)
    }

    /// Asks one node over a connection of its own.
    async fn ask(&self, addr: ConnectionAddr) -> Result<(NodeAddr, String)> {
        let at = addr.to_string().into();
        let dialer = Dialer::new(&self.config.of_node(addr), self.shortest.clone());
        let dialer = dialer.map_err(|cause| error::failed(cause).error)?;
        let connection = Connection::open(Arc::new(dialer), None).await?;
        Ok((at, cluster_nodes(&connection).await?))
    }

    fn addr_of(&self, addr: &str) -> ConnectionAddr {
        let (host, port) = addr.rsplit_once(':').unwrap_or((addr, ""));
        let port = port.parse().unwrap_or_default();
        dialer::at(self.config.server.addr(), host, port)
    }

    /// Resolves some time after another node than that has the slot.
    async fn left(&self, slot: u16, addr: &NodeAddr) {
        let mut map = self.map.subscribe();
        let elsewhere = |map: &Map| map.owner(slot).is_some_and(|owner| owner != *addr);
        drop(map.wait_for(elsewhere).await);
        sleep(GRACE).await;
    }

    fn opened(&self) -> Vec<(NodeAddr, Arc<Node>)> {
        let nodes = self.nodes.lock();
        let opened = nodes.iter();
        opened
            .filter_map(|(addr, node)| Some((addr.clone(), node.get()?.clone())))
            .collect()
    }
}

/// Asks for the slots again and again, soon where a node refused a request or did not answer. Connects to masters that
/// are new.
async fn follow(cluster: Weak<Cluster>, stale: Arc<Notify>) {
    let mut pause = POLL_INTERVAL;
    // One for each master: a connection that takes longer goes on, and is not begun twice.
    let mut opening = BTreeMap::<NodeAddr, JoinHandle<bool>>::new();
    loop {
        drop(timeout(pause, stale.notified()).await);
        let Some(cluster) = cluster.upgrade().filter(|it| !it.closed.load(Relaxed)) else {
            return;
        };
        let all = cluster.refresh().await.inspect_err(|error| {
            tracing::debug!(%error, "redis: no node says where the slots are");
        });
        let masters = cluster.masters();
        opening.retain(|addr, task| {
            let stays = masters.contains(addr);
            if !stays {
                task.abort();
            }
            stays
        });
        for addr in masters {
            opening.entry(addr.clone()).or_insert_with(|| {
                let cluster = Arc::clone(&cluster);
                tokio::spawn(async move { cluster.node(addr).await.is_ok() })
            });
        }
        let opens = opening.values_mut();
        let opened = join_all(opens.map(|task| timeout(ANSWERS_WITHIN, task))).await;
        let is_whole = opened.iter().all(|it| matches!(it, Ok(Ok(true))));
        opening.retain(|_, task| !task.is_finished());
        pause = match all {
            Ok(true) if is_whole => POLL_INTERVAL,
            _ => SOON,
        };
        drop(cluster);
        // One answer serves all requests that were refused meanwhile.
        sleep(BETWEEN).await;
    }
}

/// The node that the refusal of another one names, and whether it is to be asked to serve a slot that it does not have
/// yet.
fn redirect(error: &DriverError, by: &str) -> Option<(NodeAddr, bool)> {
    let cause = error::native(error)?;
    let (addr, _) = cause.redirect_node()?;
    let (host, port) = addr.rsplit_once(':')?;
    let addr = match host {
        // The same host.
        "" => format!("{}:{port}", by.rsplit_once(':')?.0).into(),
        "?" => return None,
        _ => addr.into(),
    };
    Some((addr, cause.code() == Some("ASK")))
}

async fn cluster_nodes(connection: &Arc<Connection>) -> Result<String> {
    let ask = commands::words(&["CLUSTER", "NODES"]);
    let answer = connection.command(ask).await?;
    let nodes = commands::read_info(&answer).map(str::to_owned);
    nodes.ok_or_else(error::garbled)
}

/// Asks each master; `ask` is told until the first one answers that it is to read the settings of the cluster as well.
async fn diagnose_all<F>(masters: Vec<NodeAddr>, ask: impl Fn(NodeAddr, bool) -> F) -> Vec<Finding>
where
    F: Future<Output = Result<Vec<Finding>>>,
{
    let (mut found, mut is_first) = (Vec::new(), true);
    for addr in masters {
        match ask(addr.clone(), is_first).await {
            Ok(its) => {
                is_first = false;
                found.extend(its);
            }
            Err(error) => {
                let what = format!("{addr}: {}", error.chain());
                found.push(Finding::warning(
                    what,
                    "see why this master does not answer",
                ));
            }
        }
    }
    if is_first {
        found.push(unread("no master answered"));
    }
    found
}

fn unread(why: &str) -> Finding {
    Finding::ok(format!(
        "not checked: cluster-node-timeout and cluster-require-full-coverage; {why}"
    ))
}

/// What the settings of a cluster mean for a lock of that lease.
fn findings(settings: &Value, lease: Duration) -> Vec<Finding> {
    let mut found = Vec::new();
    let timeout = commands::field(settings, "cluster-node-timeout").map(str::parse);
    if let Some(Ok(millis)) = timeout {
        let (timeout, most) = (Duration::from_millis(millis), lease / 3);
        found.push(match timeout > most {
            true => Finding::warning(
                format!(
                    "cluster-node-timeout is {timeout:?}: a failover takes longer, and ends leases that are shorter than three times that"
                ),
                format!("set {} or less, or use longer leases", most.as_millis()),
            ),
            false => Finding::ok(format!("cluster-node-timeout is {timeout:?}")),
        });
    }
    if commands::field(settings, "cluster-require-full-coverage") == Some("yes") {
        found.push(Finding::warning(
            "cluster-require-full-coverage is yes: the loss of one shard stops the locks of all",
            "set no",
        ));
    }
    found
}

/// How often the slots are asked for where nothing tells of a change.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The same where a master does not answer: a failover is under way.
const SOON: Duration = Duration::from_millis(200);
/// The least pause between two questions.
const BETWEEN: Duration = Duration::from_millis(50);
/// A node has that answer at hand.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// How long a master that lost a slot may take to answer what was sent to it before.
const GRACE: Duration = Duration::from_millis(200);
/// Nodes asked for one request: the known owner, the one that it names, and where that one moves the slot to, twice.
const MOST_HOPS: u32 = 5;
/// Some keys of a lock are at the node to which its slot is being moved, and the others not yet.
const SPLIT: Duration = Duration::from_millis(10);
/// Such pauses for one request. The core makes longer ones.
const MOST_PAUSES: u32 = 20;

#[cfg(test)]
mod tests {
    use super::{NodeAddr, diagnose_all};
    use crate::error;
    use dlock_core::driver::{Finding, Severity};

    #[tokio::test]
    async fn the_first_master_that_answers_is_asked_for_the_settings_of_the_cluster() {
        let ask = |addr: NodeAddr, is_first: bool| async move {
            match &*addr {
                "down" => Err(error::unanswered()),
                _ if is_first => Ok(vec![Finding::ok(format!("{addr} has them"))]),
                _ => Ok(Vec::new()),
            }
        };
        for (masters, wanted) in [
            (["a", "b"], "a has them"),
            (["down", "b"], "b has them"),
            (["down", "down"], "not checked"),
        ] {
            let found = diagnose_all(masters.map(NodeAddr::from).to_vec(), ask).await;
            let settings = found.iter().filter(|it| it.severity == Severity::Ok);
            let settings: Vec<_> = settings.map(|it| &*it.what).collect();
            assert!(
                settings.len() == 1 && settings[0].starts_with(wanted),
                "{masters:?}: {found:?}"
            );
        }
    }
}
