//! etcd: a server to test against.

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    Kind, Running, ServerProcess,
    process::{fetched, on_path},
    running::located,
    server::{ServerError, Service, Site, free_port},
};
use std::{
    env,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
    time::Duration,
};
use url::Url;

/// An etcd server: one that the testbed starts, or the one that [`DLOCK_TEST_ETCD_URL`](VARIABLE) names.
///
/// A started server is a cluster of one whose shortest lease is a second.
pub type EtcdServer = Running<Etcd>;

/// The state that only this kind of server has: none.
#[derive(Clone, Copy, Debug)]
pub struct Etcd;

/// Names a server to use instead of starting one, as `etcd://host:port`: without authentication. Tests destroy what is below `/dlock`.
pub const VARIABLE: &str = "DLOCK_TEST_ETCD_URL";
/// Names the program, where it is neither on `PATH` nor where `cargo xtask test` builds it.
pub const PROGRAM_VARIABLE: &str = "ETCD";

impl EtcdServer {
    /// Starts a server, with more arguments on its command line.
    ///
    /// # Errors
    /// [`ServerError::Missing`] when there is no `etcd`, else the error of the start.
    pub fn start(options: &[&str]) -> Result<Self, ServerError> {
        let program = program()?;
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let server = ServerProcess::start(Program {
            program,
            options,
            cluster: None,
        })?;
        Ok(Self::ours(Etcd, server, |addr| format!("etcd://{addr}")))
    }

    /// Starts `etcd:3.6` in a container.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container() -> Result<Self, ServerError> {
        let container = Container::start(Image::etcd())?;
        Ok(Self::ours(Etcd, container, |addr| format!("etcd://{addr}")))
    }

    /// Sends a request to the JSON gateway, such as `auth/user/add`, without authentication.
    ///
    /// # Errors
    /// When the server cannot be reached, does not answer within 30 s, or refuses (its answer).
    pub fn call(&self, what: &str, json: &str) -> io::Result<()> {
        post(self.addr(), what, json, CALL_LIMIT).map(drop)
    }
}

impl Kind for Etcd {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (url, addr) = located(value, 2379)?;
        Ok((Self, url, addr))
    }
}

/// How the process is run.
#[derive(Debug)]
struct Program {
    program: PathBuf,
    options: Vec<String>,
    /// This member, and the peer ports of all.
    cluster: Option<(usize, Vec<u16>)>,
}

impl Program {
    fn is_secure(&self) -> bool {
        self.options.iter().any(|option| option == "--cert-file")
    }

    /// A name that no other server has.
    fn member(&self, site: &Site) -> String {
        match &self.cluster {
            Some((at, ports)) => format!("member-{}", ports[*at]),
            None => {
                let dir = site.dir.file_name().unwrap_or_default();
                dir.to_string_lossy().into_owned()
            }
        }
    }
}

impl Service for Program {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn command(&self, site: &Site) -> Command {
        let scheme = if self.is_secure() { "https" } else { "http" };
        let url = format!("{scheme}://{}", site.addr());
        let mut command = Command::new(&self.program);
        command.arg("--data-dir").arg(site.dir.join("data"));
        command.args(["--name", &self.member(site)]);
        command.args(["--listen-client-urls", &url]);
        command.args(["--advertise-client-urls", &url]);
        match &self.cluster {
            None => command
                .args(["--listen-peer-urls", "http://127.0.0.1:0"])
                .args(OPTIONS.split(' ')),
            Some((at, ports)) => {
                let peer = format!("http://127.0.0.1:{}", ports[*at]);
                let all = ports
                    .iter()
                    .map(|port| format!("member-{port}=http://127.0.0.1:{port}"));
                let all = all.collect::<Vec<_>>().join(",");
                command
                    .args(["--listen-peer-urls", &peer])
                    .args(["--initial-advertise-peer-urls", &peer])
                    .args(["--initial-cluster", &all])
                    .args(CLUSTER_OPTIONS.split(' '))
            }
        };
        command.args(&self.options);
        command
    }

    fn ready(&self, site: &Site, _: u32) -> bool {
        if self.is_secure() {
            return TcpStream::connect_timeout(&site.addr(), ANSWER).is_ok();
        }
        // The name tells this server from another one that took the port.
        ask(site.addr(), "cluster/member/list")
            .is_ok_and(|members| members.contains(&self.member(site)))
    }
}

/// Servers on loopback that elect a leader. Dropping it ends them. Their shortest lease is a second.
#[derive(Debug)]
pub struct EtcdCluster {
    servers: Vec<ServerProcess>,
}

impl EtcdCluster {
    /// Starts three servers and waits until all of them serve.
    ///
    /// # Errors
    /// As [`EtcdServer::start`].
    pub fn start() -> Result<Self, ServerError> {
        Self::of(3)
    }

    /// The same with this number of servers.
    ///
    /// # Errors
    /// As [`EtcdServer::start`].
    pub fn of(members: usize) -> Result<Self, ServerError> {
        let ports = (0..members)
            .map(|_| free_port())
            .collect::<io::Result<Vec<_>>>()
            .map_err(ServerError::system(PROGRAM, "find ports for"))?;
        let program = program()?;
        let members = (0..members).map(|at| Program {
            program: program.clone(),
            options: Vec::new(),
            cluster: Some((at, ports.clone())),
        });
        let servers = ServerProcess::start_all(members)?;
        Ok(Self { servers })
    }

    /// The address of all of them for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self
            .servers
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        format!("etcd://{}", hosts.join(","))
    }

    /// One server's process.
    ///
    /// # Panics
    /// When there is no such server; they are counted from 0.
    #[must_use]
    pub fn server(&self, at: usize) -> &ServerProcess {
        &self.servers[at]
    }

    /// The index of the leader, if a member that answers knows one.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        (0..self.servers.len()).find(|at| {
            let status = ask(self.servers[*at].addr(), "maintenance/status").unwrap_or_default();
            let of = |key| {
                let (_, rest) = status.split_once(&format!("\"{key}\":\""))?;
                rest.split('"').next()
            };
            of("leader").is_some_and(|leader| leader != "0" && of("member_id") == Some(leader))
        })
    }
}

/// Sends a request without arguments; the answer is JSON. A list of members is answered when there is a leader.
fn ask(addr: SocketAddr, what: &str) -> io::Result<String> {
    post(addr, what, "{}", ANSWER)
}

/// The answer of the JSON gateway, with its headers; a refusal is an error.
fn post(addr: SocketAddr, what: &str, json: &str, limit: Duration) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    let length = json.len();
    let request = format!(
        "POST /v3/{what} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{json}"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split(' ').nth(1) {
        Some("200") => Ok(answer),
        _ => Err(io::Error::other(answer)),
    }
}

/// Whether a server there has a leader.
#[cfg(feature = "containers")]
pub(super) fn answers(addr: SocketAddr) -> bool {
    ask(addr, "cluster/member/list").is_ok_and(|answer| answer.contains("\"members\""))
}

/// The program that the environment names, else the one that `cargo xtask test` built, else the one on `PATH`, which may be too old.
pub(super) fn program() -> Result<PathBuf, ServerError> {
    let named = env::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
    let found = named
        .or_else(|| fetched("etcd-3.6.16"))
        .or_else(|| on_path(PROGRAM));
    found.ok_or(ServerError::Missing {
        server: PROGRAM,
        remedy: "run `cargo xtask test`, which builds it, install etcd 3.5.13 or newer, or set ETCD to the program or DLOCK_TEST_ETCD_URL to a server",
    })
}

const PROGRAM: &str = "etcd";

/// A short election time-out makes leases of a second possible.
pub(super) const OPTIONS: &str = "--heartbeat-interval 10 --election-timeout 100 --log-level warn";

/// Elections take half a second, so that a busy machine seldom needs one.
const CLUSTER_OPTIONS: &str = "--heartbeat-interval 50 --election-timeout 500 --log-level warn";

/// A server that starts may accept and not answer.
const ANSWER: Duration = Duration::from_millis(300);
/// Longer than any request takes: a new password is hashed slowly on purpose.
const CALL_LIMIT: Duration = Duration::from_secs(30);
