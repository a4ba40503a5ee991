//! ZooKeeper ensemble of several servers.

use super::{
    super::{
        process::poll,
        server::{ServerError, ServerProcess, Service, Site, free_port},
    },
    CONFIG, Java, SERVER, ZooKeeperOptions, ask, write_config,
};
use std::{fmt::Write as _, fs, io, net::SocketAddr, process::Command, time::Duration};

/// An ensemble of servers on loopback. Dropping it ends them.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    servers: Vec<ServerProcess>,
}

impl ZooKeeperEnsemble {
    /// Starts three servers and waits until all of them serve.
    ///
    /// # Errors
    /// [`ServerError`]: without Java or the jars, when one ends, or when they do not agree in time.
    pub fn start(options: &ZooKeeperOptions) -> Result<Self, ServerError> {
        Self::of(3, options)
    }

    /// The same with this number of servers.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn of(size: usize, options: &ZooKeeperOptions) -> Result<Self, ServerError> {
        Self::form(size, options, |_, _, own| Ok(own))
    }

    /// Three servers that reach each other's data ports at other addresses, such as proxies:
    /// `seen_as` gets the connecting server, the target, and the port on which the target listens.
    /// Elections bypass it.
    ///
    /// # Errors
    /// As [`start`](Self::start), and any error of `seen_as`.
    pub fn start_seen_as(
        options: &ZooKeeperOptions,
        seen_as: impl FnMut(usize, usize, u16) -> io::Result<u16>,
    ) -> Result<Self, ServerError> {
        Self::form(3, options, seen_as)
    }

    fn form(
        size: usize,
        options: &ZooKeeperOptions,
        mut seen_as: impl FnMut(usize, usize, u16) -> io::Result<u16>,
    ) -> Result<Self, ServerError> {
        let failed = ServerError::system(SERVER, "find ports for");
        let java = Java::find()?;
        let mut links = Vec::new();
        for _ in 0..size {
            links.push((free_port().map_err(&failed)?, free_port().map_err(&failed)?));
        }
        let mut members = Vec::new();
        for id in 0..size {
            let mut seen = links.clone();
            for (other, (data, _)) in seen.iter_mut().enumerate().filter(|(at, _)| *at != id) {
                *data = seen_as(id, other, *data).map_err(&failed)?;
            }
            members.push(Member {
                java: java.clone(),
                options: options.clone(),
                id,
                links: seen,
            });
        }
        let servers = ServerProcess::start_all(members.into_iter())?;
        let ensemble = Self { servers };
        ensemble.until("all of them serve", |modes| {
            modes.iter().all(|mode| !mode.is_empty())
        })?;
        Ok(ensemble)
    }

    /// The address of all of them for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts = self.servers.iter().map(|server| server.addr().to_string());
        let hosts: Vec<_> = hosts.collect();
        format!("zk://{}", hosts.join(","))
    }

    /// One server's process.
    ///
    /// # Panics
    /// When there is no such server; they are counted from 0.
    #[must_use]
    pub fn server(&self, at: usize) -> &ServerProcess {
        &self.servers[at]
    }

    /// The address of one server for clients.
    #[must_use]
    pub fn addr(&self, at: usize) -> SocketAddr {
        self.servers[at].addr()
    }

    /// The index of the leader, if there is one now.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        (0..self.servers.len()).find(|at| self.mode(*at) == "leader")
    }

    /// The index of a follower.
    #[must_use]
    pub fn follower(&self) -> Option<usize> {
        (0..self.servers.len()).find(|at| self.mode(*at) == "follower")
    }

    /// Waits until there is a leader and at least one follower.
    ///
    /// # Errors
    /// When that takes longer than a minute.
    pub fn until_it_serves(&self) -> Result<(), ServerError> {
        self.until("a quorum serves", |modes| {
            let has = |wanted: &str| modes.iter().any(|mode| mode == wanted);
            has("leader") && has("follower")
        })
    }

    fn until(&self, what: &str, done: impl Fn(&[String]) -> bool) -> Result<(), ServerError> {
        let servers = 0..self.servers.len();
        let modes = || servers.clone().map(|at| self.mode(at)).collect::<Vec<_>>();
        let is_done = || done(&modes()).then_some(());
        poll(AGREE_LIMIT, POLL_INTERVAL, is_done).ok_or_else(|| {
            let logs = self.servers.iter().map(|server| last_lines(&server.log()));
            let (found, logs) = (modes(), logs.collect::<String>());
            ServerError::NotReady {
                server: SERVER,
                limit: AGREE_LIMIT,
                log: format!("waited until {what}, found {found:?}\n{logs}"),
            }
        })
    }

    /// `leader` or `follower`, by its own word; empty: it does not serve.
    fn mode(&self, at: usize) -> String {
        let text = ask(self.addr(at), "srvr").unwrap_or_default();
        let mode = text.lines().find_map(|line| line.strip_prefix("Mode: "));
        mode.unwrap_or_default().to_owned()
    }
}

fn last_lines(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    let last = &lines[lines.len().saturating_sub(20)..];
    format!("\n{}\n", last.join("\n"))
}

/// One of the child processes.
#[derive(Debug)]
struct Member {
    java: Java,
    options: ZooKeeperOptions,
    id: usize,
    links: Vec<(u16, u16)>,
}

impl Service for Member {
    fn name(&self) -> &'static str {
        SERVER
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        let mut more = String::new();
        for (id, (data, election)) in self.links.iter().enumerate() {
            let _ = writeln!(more, "server.{}=127.0.0.1:{data}:{election}", id + 1);
        }
        write_config(site, &self.options, &more)?;
        fs::write(site.dir.join("data/myid"), (self.id + 1).to_string())
    }

    fn command(&self, site: &Site) -> Command {
        let mut options = self.options.clone();
        options.java_args.push(QUICK.to_owned());
        self.java.command(&options, &site.dir.join(CONFIG))
    }

    fn ready(&self, site: &Site, _: u32) -> bool {
        // It answers before there is a quorum; the ensemble checks whether it serves.
        ask(site.addr(), "ruok").is_ok_and(|text| text == "imok")
    }
}

/// Elections take some hundred milliseconds on an idle machine.
const AGREE_LIMIT: Duration = Duration::from_secs(60);
/// A poll is a connection to each of them, and a line in its log.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A server that gets no vote asks again after twice the time, by default up to a minute: on a busy
/// machine an election takes that long.
const QUICK: &str = "-Dzookeeper.fastleader.maxNotificationInterval=1000";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_one_leads_when_the_leader_was_killed() {
        let ensemble = ZooKeeperEnsemble::start(&ZooKeeperOptions::default()).unwrap();
        let leader = ensemble.leader().expect("one leads");
        ensemble.server(leader).kill().unwrap();
        ensemble.until_it_serves().unwrap();
        assert_ne!(ensemble.leader(), Some(leader));
        ensemble.server(leader).restart().unwrap();
    }
}
