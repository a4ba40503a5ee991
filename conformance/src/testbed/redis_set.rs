//! Redis with replicas and sentinels: a set that fails over.

use super::{
    RedisServer,
    process::{on_path, poll},
    redis::{MISSING, PROGRAM, RedisOptions, Reply, client_at, run},
    server::{ServerError, ServerProcess, Service, Site},
};
use ::redis::{FromRedisValue, Value};
use std::{
    collections::HashMap, fs, io, net::SocketAddr, path::PathBuf, process::Command, time::Duration,
};

/// A master, its replicas and three sentinels that agree on a failover within seconds.
#[derive(Debug)]
pub struct RedisSet {
    nodes: Vec<RedisServer>,
    sentinels: Vec<SentinelServer>,
}

/// A sentinel.
#[derive(Debug)]
pub struct SentinelServer(ServerProcess);

impl RedisSet {
    /// Starts a master with this number of replicas, all with these settings, and three sentinels.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn start(replicas: usize, options: &RedisOptions) -> Result<Self, ServerError> {
        let nodes = (0..=replicas).map(|_| RedisServer::start(options.clone()));
        let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
        let master = nodes[0].addr();
        for replica in &nodes[1..] {
            follow(replica, master).map_err(ServerError::system(PROGRAM, "replicate"))?;
        }
        let sentinels = (0..SENTINELS).map(|_| SentinelServer::start(master, DOWN_AFTER, QUORUM));
        let sentinels = sentinels.collect::<Result<_, _>>()?;
        let set = Self { nodes, sentinels };
        set.settled()
            .map_err(ServerError::system(PROGRAM, "settle"))?;
        Ok(set)
    }

    /// The URL of the set for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let sentinels = self.sentinels.iter().map(|it| it.addr().to_string());
        let sentinels: Vec<_> = sentinels.collect();
        format!("redis+sentinel://{}/{NAME}", sentinels.join(","))
    }

    /// The master and its replicas, in the order of their first start.
    #[must_use]
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[SentinelServer] {
        &self.sentinels
    }

    /// The process of a node, to stop and kill.
    #[must_use]
    pub fn process(&self, node: usize) -> Option<&ServerProcess> {
        self.nodes[node].process()
    }

    /// The node that most of the sentinels that answer call the master.
    ///
    /// # Errors
    /// When none answers, or they disagree.
    pub fn master(&self) -> io::Result<usize> {
        let said = self.sentinels.iter().filter_map(|it| it.master().ok());
        let said: Vec<_> = said.collect();
        let is_master = |node: &RedisServer| {
            2 * said.iter().filter(|addr| **addr == node.addr()).count() > said.len()
        };
        let found = self.nodes.iter().position(is_master);
        found.ok_or_else(|| io::Error::other(format!("the sentinels disagree: {said:?}")))
    }

    /// Waits until another node than `old` is the master; returns it.
    ///
    /// # Errors
    /// When that does not happen within a minute.
    pub fn failed_over(&self, old: usize) -> io::Result<usize> {
        let other = || self.master().ok().filter(|node| *node != old);
        let late = || io::Error::other("no failover within a minute");
        poll(SETTLE_LIMIT, POLL_INTERVAL, other).ok_or_else(late)
    }

    /// Makes a node that was killed or stopped a replica of the present master.
    ///
    /// # Errors
    /// [`ServerError`]; the node is then not running.
    pub fn rejoin(&self, node: usize) -> Result<(), ServerError> {
        let failed = |error| ServerError::system(PROGRAM, "rejoin")(error);
        let master = self.nodes[self.master().map_err(failed)?].addr();
        if let Some(process) = self.process(node) {
            process.restart()?;
        }
        follow(&self.nodes[node], master).map_err(failed)
    }

    /// Waits until every node and sentinel takes part, so that the next failover can begin.
    ///
    /// # Errors
    /// When that does not happen within a minute.
    pub fn settled(&self) -> io::Result<()> {
        let late = || io::Error::other("the set does not settle within a minute");
        poll(SETTLE_LIMIT, POLL_INTERVAL, || {
            self.is_settled().ok()?.then_some(())
        })
        .ok_or_else(late)
    }

    fn is_settled(&self) -> io::Result<bool> {
        let replicas = self.nodes.len() - 1;
        let info: String = self.nodes[self.master()?].ask(&["INFO", "replication"])?;
        if info.matches(",state=online,").count() != replicas || !info.contains("role:master") {
            return Ok(false);
        }
        for sentinel in &self.sentinels {
            let known: Vec<Fields> = sentinel.ask(&["SENTINEL", "REPLICAS", NAME])?;
            let has = |of: &Fields, name: &str, is: &str| of.get(name).is_some_and(|it| it == is);
            let fits = known
                .iter()
                .filter(|it| has(it, "flags", "slave") && has(it, "master-link-status", "ok"));
            let others: Vec<Fields> = sentinel.ask(&["SENTINEL", "SENTINELS", NAME])?;
            if fits.count() != replicas || others.len() != SENTINELS - 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl SentinelServer {
    /// Starts a sentinel that monitors this master as `locks` and calls it down after that time without an
    /// answer. `quorum` sentinels begin a failover.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn start(
        master: SocketAddr,
        down_after: Duration,
        quorum: usize,
    ) -> Result<Self, ServerError> {
        let program = on_path(PROGRAM).ok_or(MISSING)?;
        ServerProcess::start(Sentinel {
            program,
            master,
            down_after,
            quorum,
        })
        .map(Self)
    }

    /// The address where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.0.addr()
    }

    /// Its process.
    #[must_use]
    pub const fn process(&self) -> &ServerProcess {
        &self.0
    }

    /// Runs one command on a connection of its own.
    ///
    /// # Errors
    /// As [`RedisServer::command`], after half a second.
    pub fn command(&self, words: &[&str]) -> io::Result<Reply> {
        self.ask::<Value>(words).map(Reply::from)
    }

    /// The address of the master by its word.
    fn master(&self) -> io::Result<SocketAddr> {
        let asked = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
        let (host, port): (String, String) = self.ask(&asked)?;
        format!("{host}:{port}").parse().map_err(io::Error::other)
    }

    fn ask<T: FromRedisValue>(&self, words: &[&str]) -> io::Result<T> {
        run(&client_at(self.addr()), words, ANSWER_LIMIT)
    }
}

/// What a sentinel knows of another node.
type Fields = HashMap<String, String>;

fn follow(replica: &RedisServer, master: SocketAddr) -> io::Result<()> {
    let (host, port) = (master.ip().to_string(), master.port().to_string());
    replica.command(&["REPLICAOF", &host, &port]).map(drop)
}

/// The child process of a sentinel.
#[derive(Debug)]
struct Sentinel {
    program: PathBuf,
    master: SocketAddr,
    down_after: Duration,
    quorum: usize,
}

impl Service for Sentinel {
    fn name(&self) -> &'static str {
        "redis-sentinel"
    }

    /// It rewrites its configuration, so that it knows the present master after a restart.
    fn prepare(&self, site: &Site) -> io::Result<()> {
        let (ip, port, quorum) = (self.master.ip(), self.master.port(), self.quorum);
        let (down, dir) = (self.down_after.as_millis(), site.dir.display());
        let lines = format!(
            "dir {dir}\nsentinel monitor {NAME} {ip} {port} {quorum}\n\
             sentinel down-after-milliseconds {NAME} {down}\nsentinel failover-timeout {NAME} 3000\n\
             sentinel parallel-syncs {NAME} 2\n"
        );
        fs::write(site.dir.join(CONFIG), lines)
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(site.dir.join(CONFIG)).arg("--sentinel");
        command.args(["--port", &site.port.to_string()]);
        command.args("--bind 127.0.0.1 --protected-mode no --daemonize no".split(' '));
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let info = run::<String>(&client_at(site.addr()), &["INFO", "server"], ANSWER_LIMIT);
        let line = format!("process_id:{pid}");
        info.is_ok_and(|text| text.lines().any(|found| found == line))
    }
}

/// The name under which the sentinels know the master.
pub const NAME: &str = "locks";
const CONFIG: &str = "sentinel.conf";
const SENTINELS: usize = 3;
const QUORUM: usize = 2;
/// A busy machine answers sooner.
const DOWN_AFTER: Duration = Duration::from_millis(800);
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A stopped sentinel must not hold up the question to the next one.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);
