//! PgBouncer: a pool of connections to a PostgreSQL server, which clients share transaction by transaction.

use super::{
    ServerProcess,
    postgres::{Postgres, as_user, give},
    process::installed,
    server::{ServerError, Service, Site},
};
use std::{
    fs, io,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
};

/// Starts the `pgbouncer` on `PATH`, or in `/usr/sbin`.
///
/// # Errors
/// [`ServerError::Missing`] when there is none, else the error of the start.
pub(super) fn start(server: SocketAddr) -> Result<ServerProcess, ServerError> {
    let program = installed(PROGRAM).ok_or(ServerError::Missing {
        server: PROGRAM,
        remedy: "install PgBouncer (Debian: apt-get install pgbouncer)",
    })?;
    ServerProcess::start(Bouncer { program, server })
}

#[derive(Debug)]
struct Bouncer {
    program: PathBuf,
    server: SocketAddr,
}

impl Service for Bouncer {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        let path = |name: &str| site.dir.join(name).display().to_string();
        let settings = [
            "[databases]".to_owned(),
            format!("* = host={} port={}", self.server.ip(), self.server.port()),
            "[pgbouncer]".to_owned(),
            "listen_addr = 127.0.0.1".to_owned(),
            format!("listen_port = {}", site.port),
            format!("auth_file = {}", path("users")),
            format!("pidfile = {}", path(PID)),
        ];
        let settings = settings.into_iter().chain(SETTINGS.map(str::to_owned));
        let settings = settings.map(|line| line + "\n").collect::<String>();
        let users = format!("\"postgres\" \"\"\n\"{}\" \"\"\n", Postgres::LOCKER);
        give(&site.dir)?;
        for (name, text) in [("users", users), (CONFIGURATION, settings)] {
            fs::write(path(name), text)?;
            give(Path::new(&path(name)))?;
        }
        Ok(())
    }

    fn command(&self, site: &Site) -> Command {
        // The file of a process that was killed.
        drop(fs::remove_file(site.dir.join(PID)));
        let mut command = as_user(&self.program);
        command.arg(site.dir.join(CONFIGURATION));
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let ours = fs::read_to_string(site.dir.join(PID));
        ours.is_ok_and(|text| text.trim() == pid.to_string())
            && TcpStream::connect(site.addr()).is_ok()
    }
}

/// Few connections, so that clients share them; a server that was away is tried again at once.
const SETTINGS: [&str; 7] = [
    "pool_mode = transaction",
    "auth_type = trust",
    "unix_socket_dir =",
    "max_client_conn = 3000",
    "default_pool_size = 16",
    "server_login_retry = 0.05",
    "log_connections = 0",
];
const PROGRAM: &str = "pgbouncer";
const CONFIGURATION: &str = "pgbouncer.ini";
const PID: &str = "pid";
