//! Servers under comparison: started here, on a disk, or the user's own.

use crate::{Result, floor::mysql, work::Counter};
use dlock_conformance::testbed::{
    EtcdServer, Kind, MariadbServer, MongoServer, PostgresServer, RedisServer, Running,
    ZooKeeperServer, mariadb::MariadbOptions, mongo::Deployment, redis::RedisOptions,
    zookeeper::ZooKeeperOptions,
};
use mongodb::bson::doc;
use std::{
    any::Any,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::Arc,
    time::Duration,
};

/// A store, ready for its contestants.
pub(super) struct Store {
    pub(super) url: String,
    /// The processes of a server that was started here.
    pub(super) pids: Vec<u32>,
    /// What the server says that it did so far, where it was started here and says so.
    pub(super) commands: Option<Counter>,
    /// What to call it in the report.
    pub(super) version: String,
    _server: Box<dyn Any + Send + Sync>,
}

/// The stores, by the scheme of their URLs, in the order of the report.
pub(super) const STORES: [(&str, &str); 7] = [
    ("redis", "Redis"),
    ("zk", "ZooKeeper"),
    ("etcd", "etcd"),
    ("postgres", "PostgreSQL"),
    ("mysql", "MariaDB"),
    ("mongodb", "MongoDB"),
    ("sqlite", "SQLite"),
];

impl Store {
    /// The user's own: neither its CPU nor its commands are known.
    pub(super) fn of_the_user(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            pids: Vec::new(),
            commands: None,
            version: "a server of the user".to_owned(),
            _server: Box::new(()),
        }
    }

    pub(super) async fn start(scheme: &str) -> Result<Self> {
        let scheme = scheme.to_owned();
        tokio::task::spawn_blocking(move || Self::started(&scheme)).await?
    }

    fn started(scheme: &str) -> Result<Self> {
        match scheme {
            "redis" => {
                let server = Self::of(RedisServer::start(RedisOptions::default())?)?;
                // Its program may be one file with others of Redis.
                let version = server.version.replace("redis-check-rdb", "redis-server");
                let server = Self { version, ..server };
                server.counting(|addr| {
                    let stats = ask(addr, "INFO stats\r\n", "total_commands_processed:")?;
                    Ok(number_after(&stats, "total_commands_processed:"))
                })
            }
            "zk" => {
                let server = ZooKeeperServer::start(ZooKeeperOptions {
                    force_sync: true,
                    // The test bed's servers have little memory, and a compiler that begins at once.
                    java_args: ["-Xmx1g", "-XX:TieredStopAtLevel=4"]
                        .map(str::to_owned)
                        .to_vec(),
                    ..ZooKeeperOptions::default()
                })?;
                let version = server.word("srvr")?;
                let version = version.split([',', '-']).next().unwrap_or_default();
                let version = version.to_owned();
                let server = Self {
                    version,
                    ..Self::of(server)?
                };
                server.counting(|addr| {
                    let stats = ask(addr, "mntr", "")?;
                    Ok(number_after(&stats, "zk_packets_received\t"))
                })
            }
            "etcd" => {
                let server = Self::of(EtcdServer::start(&[])?)?;
                server.counting(|addr| {
                    let request = "GET /metrics HTTP/1.0\r\n\r\n";
                    let metrics = ask(addr, request, "")?;
                    let received = metrics
                        .lines()
                        .filter(|line| line.starts_with("grpc_server_msg_received_total"));
                    let counts =
                        received.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
                    let sum: f64 = counts.sum();
                    Ok(format!("{sum:.0}").parse()?)
                })
            }
            "postgres" => Self::of(PostgresServer::start(&["fsync=on"])?),
            "mysql" => {
                let server = Self::of(MariadbServer::start(MariadbOptions::default())?)?;
                let url = server.url.clone();
                let counter: Counter = Arc::new(move || {
                    let url = url.clone();
                    Box::pin(async move {
                        let connection = mysql::connect(&url).await?;
                        mysql::questions(&tokio::sync::Mutex::new(connection)).await
                    })
                });
                Ok(Self {
                    commands: Some(counter),
                    ..server
                })
            }
            "mongodb" => {
                let server = Arc::new(MongoServer::start(Deployment::ReplicaSet)?);
                let pid = server.process().ok_or("a server without a process")?.pid();
                let asked = Arc::clone(&server);
                let counter: Counter = Arc::new(move || {
                    let server = Arc::clone(&asked);
                    Box::pin(async move {
                        let ask = move || server.command("admin", doc! {"serverStatus": 1});
                        let status = tokio::task::spawn_blocking(ask).await??;
                        let requests = status.get_document("network")?.get_i64("numRequests")?;
                        Ok(u64::try_from(requests)?)
                    })
                });
                Ok(Self {
                    url: server.url(),
                    pids: vec![pid],
                    commands: Some(counter),
                    version: version_of(pid),
                    _server: Box::new(server),
                })
            }
            "sqlite" => {
                let folder = tempfile::tempdir()?;
                Ok(Self {
                    url: format!("sqlite:{}", folder.path().join("locks.db").display()),
                    version: "the SQLite in this build".to_owned(),
                    _server: Box::new(folder),
                    ..Self::of_the_user("")
                })
            }
            _ => Err(format!("no store {scheme:?}").into()),
        }
    }

    fn of<K: Kind>(server: Running<K>) -> Result<Self> {
        let pid = server.process().ok_or("a server without a process")?.pid();
        Ok(Self {
            url: server.url(),
            pids: vec![pid],
            commands: None,
            version: version_of(pid),
            _server: Box::new(server),
        })
    }

    fn counting(
        self,
        count: impl Fn(SocketAddr) -> Result<u64> + Clone + Send + Sync + 'static,
    ) -> Result<Self> {
        let address = self.url.split("://").last().unwrap_or_default();
        let address: SocketAddr = address.split('/').next().unwrap_or_default().parse()?;
        let counter: Counter = Arc::new(move || {
            let count = count.clone();
            Box::pin(async move { tokio::task::spawn_blocking(move || count(address)).await? })
        });
        Ok(Self {
            commands: Some(counter),
            ..self
        })
    }
}

/// What a program says of its version.
fn version_of(pid: u32) -> String {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let said = Command::new(program).arg("--version").output();
    let said = said.map(|output| output.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    said.lines().next().unwrap_or_default().to_owned()
}

/// Asks a server in its own plain text, and reads to the end or to a line with this word.
fn ask(address: SocketAddr, question: &str, last: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(question.as_bytes())?;
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut part)?;
        answer.extend_from_slice(&part[..read]);
        let text = String::from_utf8_lossy(&answer);
        let is_whole = !last.is_empty()
            && text
                .split_once(last)
                .is_some_and(|(_, rest)| rest.contains('\n'));
        if read == 0 || is_whole {
            return Ok(text.into_owned());
        }
    }
}

fn number_after(text: &str, key: &str) -> u64 {
    let rest = text.split_once(key).map_or("", |(_, rest)| rest);
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_default()
}

/// Resident memory of these processes and their children, in bytes.
pub(super) fn memory_of(pids: &[u32]) -> u64 {
    let resident = |pid: &str| -> u64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        number_after(line.unwrap_or_default().trim_start(), "") * 1024
    };
    let of_one = |pid: &u32| {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        let children = children.split_ascii_whitespace().map(resident);
        resident(&pid.to_string()) + children.sum::<u64>()
    };
    pids.iter().map(of_one).sum()
}
