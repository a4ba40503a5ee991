//! A Redis Cluster: masters, each with a replica.

use super::{
    Kind, ManagedServer, RedisServer, Running,
    process::poll,
    redis::{Aof, PROGRAM, RedisOptions, client_at},
    server::{ServerError, ServerProcess, free_port},
};
use ::redis::{Connection, Pipeline, cmd, pipe};
use std::{
    io,
    net::SocketAddr,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};
use url::Url;

/// Masters that share the slots evenly, and one replica of each.
#[derive(Debug)]
pub struct RedisCluster {
    /// The masters, then the replica of each.
    nodes: Vec<RedisServer>,
    /// The port over which the other nodes reach each.
    buses: Vec<String>,
    masters: usize,
}

impl RedisCluster {
    /// Starts this number of masters, and a replica of each where that is wanted. A node that is silent for the
    /// time-out has failed.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn start(
        masters: usize,
        has_replicas: bool,
        timeout: Duration,
    ) -> Result<Self, ServerError> {
        let count = masters * (1 + usize::from(has_replicas));
        let nodes = (0..count).map(|_| node(timeout));
        let nodes: Vec<_> = nodes.collect::<Result<_, ServerError>>()?;
        let (nodes, buses) = nodes.into_iter().unzip();
        let cluster = Self {
            nodes,
            buses,
            masters,
        };
        cluster
            .form()
            .map_err(ServerError::system(PROGRAM, "form a cluster"))?;
        Ok(cluster)
    }

    /// The URL of the cluster for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let nodes = self.nodes.iter().map(|node| node.addr().to_string());
        let nodes: Vec<_> = nodes.collect();
        format!("redis+cluster://{}/", nodes.join(","))
    }

    /// The masters in the order of their slots, then the replica of each: as it was at the start.
    #[must_use]
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The process of a node, to stop and kill.
    #[must_use]
    pub fn process(&self, node: usize) -> Option<&ServerProcess> {
        self.nodes[node].process()
    }

    /// The id by which the nodes know a node.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn id(&self, node: usize) -> io::Result<String> {
        self.nodes[node].ask(&["CLUSTER", "MYID"])
    }

    /// Waits until that node says that it is a master, or none.
    ///
    /// # Errors
    /// When that does not happen within a minute.
    pub fn becomes(&self, node: usize, role: &str) -> io::Result<()> {
        self.until("the role", || self.has_role(node, role))
    }

    fn has_role(&self, node: usize, role: &str) -> Option<()> {
        let line = format!("role:{role}");
        let info: String = self.nodes[node].ask(&["INFO", "replication"]).ok()?;
        info.lines().any(|it| it == line).then_some(())
    }

    /// Makes a replica the master of its shard. A failover that is not over after five seconds is given up by Redis;
    /// it is then asked for again.
    ///
    /// # Errors
    /// When the node is no master within a minute.
    pub fn fail_over_to(&self, node: usize) -> io::Result<()> {
        let mut asked = None;
        self.until("the role after a failover", || {
            if asked.is_none_or(|at: Instant| at.elapsed() > FAILOVER_LIMIT) {
                // Refused as long as the replica has lost its master.
                drop(self.nodes[node].command(&["CLUSTER", "FAILOVER"]));
                asked = Some(Instant::now());
            }
            self.has_role(node, "master")
        })
    }

    /// The slot of a key.
    ///
    /// # Errors
    /// When no node answers.
    pub fn slot(&self, key: &str) -> io::Result<u16> {
        self.nodes[0].ask(&["CLUSTER", "KEYSLOT", key])
    }

    /// Moves slots from one master to another while both serve, some at a time, as `redis-cli --cluster reshard` does.
    ///
    /// # Errors
    /// When a node refuses, such as one that is no master.
    pub fn move_slots(&self, from: usize, to: usize, slots: Range<u16>) -> io::Result<()> {
        for first in slots.clone().step_by(usize::from(AT_ONCE)) {
            let some = first..slots.end.min(first.saturating_add(AT_ONCE));
            self.begin_move(from, to, some.clone())?;
            self.move_keys(from, to, some.clone())?;
            self.end_move(to, some)?;
        }
        Ok(())
    }

    /// Announces the move of slots: from now on the keys that are not at the one master are sought at the other one.
    ///
    /// # Errors
    /// As [`move_slots`](Self::move_slots).
    pub fn begin_move(&self, from: usize, to: usize, slots: Range<u16>) -> io::Result<()> {
        for (at, state, other) in [(to, "IMPORTING", from), (from, "MIGRATING", to)] {
            self.set_slots(at, slots.clone(), state, &self.id(other)?)?;
        }
        Ok(())
    }

    /// Moves the keys of slots whose move was announced.
    ///
    /// # Errors
    /// As [`move_slots`](Self::move_slots).
    pub fn move_keys(&self, from: usize, to: usize, slots: Range<u16>) -> io::Result<()> {
        let (mut native, to) = (self.connection(from)?, self.nodes[to].addr());
        let mut ask = pipe();
        for slot in slots.clone() {
            ask.cmd("CLUSTER").arg("COUNTKEYSINSLOT").arg(slot);
        }
        let counts: Vec<u32> = ask.query(&mut native).map_err(io::Error::other)?;
        for (slot, _) in slots.zip(counts).filter(|(_, count)| *count > 0) {
            loop {
                let mut keys = cmd("CLUSTER");
                keys.arg("GETKEYSINSLOT").arg(slot).arg(100);
                let keys: Vec<String> = keys.query(&mut native).map_err(io::Error::other)?;
                if keys.is_empty() {
                    break;
                }
                let mut migrate = cmd("MIGRATE");
                migrate.arg(to.ip().to_string()).arg(to.port());
                migrate.arg(&["", "0", "5000", "REPLACE", "KEYS"]).arg(keys);
                migrate.exec(&mut native).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }

    /// Makes a master the owner of slots, with all masters.
    ///
    /// # Errors
    /// As [`move_slots`](Self::move_slots).
    pub fn end_move(&self, to: usize, slots: Range<u16>) -> io::Result<()> {
        let id = self.id(to)?;
        let others = (0..self.masters).filter(|it| *it != to);
        for at in [to].into_iter().chain(others) {
            self.set_slots(at, slots.clone(), "NODE", &id)?;
        }
        Ok(())
    }

    fn set_slots(&self, at: usize, slots: Range<u16>, state: &str, id: &str) -> io::Result<()> {
        let mut all = Pipeline::new();
        for slot in slots {
            all.cmd("CLUSTER")
                .arg("SETSLOT")
                .arg(slot)
                .arg(state)
                .arg(id)
                .ignore();
        }
        all.exec(&mut self.connection(at)?)
            .map_err(io::Error::other)
    }

    fn connection(&self, at: usize) -> io::Result<Connection> {
        let native = client_at(self.nodes[at].addr()).get_connection();
        native.map_err(io::Error::other)
    }

    /// Waits until that node is a replica in step with its master.
    ///
    /// # Errors
    /// When that does not happen within a minute.
    pub fn is_settled(&self, replica: usize) -> io::Result<()> {
        self.until("a replica in step", || {
            let info: String = self.nodes[replica].ask(&["INFO", "replication"]).ok()?;
            info.contains("master_link_status:up").then_some(())
        })
    }

    fn form(&self) -> io::Result<()> {
        let masters = self.masters;
        for (at, node) in self.nodes[..masters].iter().enumerate() {
            let (from, to) = (SLOTS * at / masters, SLOTS * (at + 1) / masters - 1);
            let (from, to) = (from.to_string(), to.to_string());
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &from, &to])?;
            let epoch = (at + 1).to_string();
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch])?;
        }
        for (node, bus) in self.nodes.iter().zip(&self.buses).skip(1) {
            let (ip, port) = (node.addr().ip().to_string(), node.addr().port().to_string());
            self.nodes[0].command(&["CLUSTER", "MEET", &ip, &port, bus])?;
        }
        self.until("all nodes", || {
            self.all("cluster_known_nodes", self.nodes.len())
        })?;
        for (at, replica) in self.nodes[masters..].iter().enumerate() {
            let id = self.id(at)?;
            let replicates = || replica.command(&["CLUSTER", "REPLICATE", &id]).ok();
            self.until("a replica", replicates)?;
        }
        self.is_whole()?;
        (masters..self.nodes.len()).try_for_each(|at| self.is_settled(at))
    }

    fn is_whole(&self) -> io::Result<()> {
        self.until("all slots", || self.all("cluster_slots_ok", SLOTS))
    }

    /// Whether all nodes have that number in `CLUSTER INFO`, and call the cluster sound where slots are counted.
    fn all(&self, field: &str, wanted: usize) -> Option<()> {
        let line = format!("{field}:{wanted}");
        let sound = field == "cluster_slots_ok";
        self.nodes.iter().try_for_each(|node| {
            let info: String = node.ask(&["CLUSTER", "INFO"]).ok()?;
            let fits =
                info.lines().any(|it| it == line) && (!sound || info.contains("cluster_state:ok"));
            fits.then_some(())
        })
    }

    fn until<T>(&self, what: &str, done: impl FnMut() -> Option<T>) -> io::Result<T> {
        let late = || io::Error::other(format!("no {what} within a minute"));
        poll(SETTLE_LIMIT, POLL_INTERVAL, done).ok_or_else(late)
    }
}

/// A whole cluster in the place of a server.
pub type RedisClusterServer = Running<Arc<RedisCluster>>;

impl RedisClusterServer {
    /// Starts three masters with a replica each, which no silence makes another one's.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn start() -> Result<Self, ServerError> {
        let cluster = Arc::new(RedisCluster::start(3, true, NEVER)?);
        let managed = Arc::clone(&cluster);
        Ok(Self::ours(cluster, managed, |addr| {
            format!("redis+cluster://{addr}/")
        }))
    }

    /// Runs a command at each master.
    ///
    /// # Errors
    /// As [`RedisServer::command`], but for a slot that another master has.
    pub fn command(&self, words: &[&str]) -> io::Result<()> {
        let cluster = self.kind();
        for node in &cluster.nodes[..cluster.masters] {
            match node.command(words) {
                Err(error) if error.to_string().to_uppercase().contains("MOVED") => {}
                said => drop(said?),
            }
        }
        Ok(())
    }
}

impl Kind for Arc<RedisCluster> {
    const VARIABLE: &'static str = "DLOCK_TEST_REDIS_CLUSTER_URL";

    fn named(_: &str) -> Result<(Self, Url, SocketAddr), String> {
        Err("a cluster cannot be named: the testbed starts its own".to_owned())
    }
}

impl ManagedServer for Arc<RedisCluster> {
    fn addr(&self) -> SocketAddr {
        self.nodes[0].addr()
    }

    fn stop(&self) -> io::Result<()> {
        self.each(|node| node.stop())
    }

    fn cont(&self) -> io::Result<()> {
        self.each(|node| node.cont())
    }

    fn kill(&self) -> io::Result<()> {
        self.each(|node| node.kill())
    }

    fn restart(&self) -> Result<(), ServerError> {
        self.kill().map_err(ServerError::system(PROGRAM, "kill"))?;
        for node in &self.nodes {
            node.managed().map_or(Ok(()), ManagedServer::restart)?;
        }
        self.is_whole()
            .map_err(ServerError::system(PROGRAM, "form a cluster"))
    }
}

impl RedisCluster {
    fn each(&self, what: impl Fn(&dyn ManagedServer) -> io::Result<()>) -> io::Result<()> {
        self.nodes
            .iter()
            .filter_map(RedisServer::managed)
            .try_for_each(what)
    }
}

/// Longer than any test stops its servers.
const NEVER: Duration = Duration::from_secs(600);

/// Settings of a node that is reached by the others over that port.
fn options(bus: &str, timeout: Duration) -> RedisOptions {
    let timeout = timeout.as_millis().to_string();
    let words = "--cluster-enabled yes --cluster-announce-ip 127.0.0.1 --cluster-require-full-coverage no \
                 --cluster-replica-validity-factor 0 --cluster-allow-replica-migration no";
    let more = ["--cluster-port", bus, "--cluster-node-timeout", &timeout];
    let words = words.split_whitespace().chain(more);
    RedisOptions {
        aof: Aof::EverySec,
        extra_args: words.map(str::to_owned).collect(),
        ..RedisOptions::default()
    }
}

/// Starts a node, and says by which port the others reach it: the default one is so far above the one for clients that
/// it may not exist. Where another program was faster to take the port, the node ends at once and gets another one.
fn node(timeout: Duration) -> Result<(RedisServer, String), ServerError> {
    let mut left = 3;
    loop {
        let bus = free_port().map_err(ServerError::system(PROGRAM, "find a port"))?;
        let bus = bus.to_string();
        match RedisServer::start(options(&bus, timeout)) {
            Err(ServerError::Ended { .. }) if left > 0 => left -= 1,
            started => return Ok((started?, bus)),
        }
    }
}

const SLOTS: usize = 16_384;
/// Slots that move together.
const AT_ONCE: u16 = 32;
/// Longer than Redis tries a failover by hand.
const FAILOVER_LIMIT: Duration = Duration::from_secs(6);
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
