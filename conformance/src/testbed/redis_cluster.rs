//! A Redis Cluster: masters, each with a replica.

use super::{
    RedisServer,
    process::poll,
    redis::{Aof, PROGRAM, RedisOptions},
    server::{ServerError, ServerProcess},
};
use std::{io, net::TcpListener, time::Duration};

/// Masters that share the slots evenly, and one replica of each.
#[derive(Debug)]
pub struct RedisCluster {
    /// The masters, then the replica of each.
    nodes: Vec<RedisServer>,
    /// The port over which the other nodes reach each.
    buses: Vec<String>,
}

impl RedisCluster {
    /// Starts this number of masters, and a replica of each where that is wanted.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn start(masters: usize, has_replicas: bool) -> Result<Self, ServerError> {
        let count = masters * (1 + usize::from(has_replicas));
        let buses = (0..count).map(|_| free_port());
        let buses: Vec<_> = buses
            .collect::<io::Result<_>>()
            .map_err(ServerError::system(PROGRAM, "find a port"))?;
        let nodes = buses.iter().map(|bus| RedisServer::start(options(bus)));
        let cluster = Self {
            nodes: nodes.collect::<Result<_, _>>()?,
            buses,
        };
        cluster
            .form(masters)
            .map_err(ServerError::system(PROGRAM, "form a cluster"))?;
        Ok(cluster)
    }

    /// Starts a cluster of one master, which has all slots.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn single() -> Result<RedisServer, ServerError> {
        Ok(Self::start(1, false)?.nodes.remove(0))
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
        let id = self.nodes[node].command(&["CLUSTER", "MYID"])?;
        Ok(id.text().unwrap_or_default())
    }

    /// Waits until that node says that it is a master, or none.
    ///
    /// # Errors
    /// When that does not happen within a minute.
    pub fn becomes(&self, node: usize, role: &str) -> io::Result<()> {
        let line = format!("role:{role}");
        self.until("the role", || {
            let info = self.nodes[node].command(&["INFO", "replication"]).ok()?;
            info.text()?.lines().any(|it| it == line).then_some(())
        })
    }

    fn form(&self, masters: usize) -> io::Result<()> {
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
        self.until("all slots", || self.all("cluster_slots_ok", SLOTS))?;
        for at in masters..self.nodes.len() {
            self.until("a replica in step", || {
                let info = self.nodes[at].command(&["INFO", "replication"]).ok()?;
                info.text()?.contains("master_link_status:up").then_some(())
            })?;
        }
        Ok(())
    }

    /// Whether all nodes have that number in `CLUSTER INFO`, and call the cluster sound where slots are counted.
    fn all(&self, field: &str, wanted: usize) -> Option<()> {
        let line = format!("{field}:{wanted}");
        let sound = field == "cluster_slots_ok";
        self.nodes.iter().try_for_each(|node| {
            let info = node.command(&["CLUSTER", "INFO"]).ok()?.text()?;
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

/// Settings of a node that calls another one down within seconds, and is reached by the others over that port.
fn options(bus: &str) -> RedisOptions {
    let words = "--cluster-enabled yes --cluster-node-timeout 2000 --cluster-announce-ip 127.0.0.1 \
                 --cluster-require-full-coverage no --cluster-replica-validity-factor 0";
    let words = words.split_whitespace().chain(["--cluster-port", bus]);
    RedisOptions {
        aof: Aof::EverySec,
        extra_args: words.map(str::to_owned).collect(),
        ..RedisOptions::default()
    }
}

/// A port for the other nodes. By default it is so far above the one for clients that it may not exist.
fn free_port() -> io::Result<String> {
    let free = TcpListener::bind("127.0.0.1:0")?;
    Ok(free.local_addr()?.port().to_string())
}

const SLOTS: usize = 16_384;
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
