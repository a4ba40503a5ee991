//! PostgreSQL: a server to test against.

use super::{
    Kind, Running, ServerProcess, Station,
    server::{ServerError, Service, Site},
};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};
use url::Url;

/// A PostgreSQL server: one that the testbed starts, or the one that [`DLOCK_TEST_POSTGRES_URL`](VARIABLE) names.
///
/// A started server has the empty database `postgres` and the superuser `postgres` without a password.
pub type PostgresServer = Running<Postgres>;

/// The state that only this kind of server has: none.
#[derive(Clone, Copy, Debug)]
pub struct Postgres;

/// Names a server to use instead of starting one, as `postgres://user[:password]@host[:port]/database`. Tests destroy dlock's table there.
pub const VARIABLE: &str = "DLOCK_TEST_POSTGRES_URL";

impl PostgresServer {
    /// Starts the newest `postgres` on `PATH`, or where Debian has it. Root starts it as a user without rights, because the server refuses root.
    ///
    /// # Errors
    ///
    /// [`ServerError::Missing`] when there is none, else the error of the start.
    pub fn start(options: &[&str]) -> Result<Self, ServerError> {
        let missing = ServerError::Missing {
            server: PROGRAM,
            remedy: "install PostgreSQL (Debian: apt-get install postgresql), or name a server with DLOCK_TEST_POSTGRES_URL",
        };
        let programs = programs().ok_or(missing)?;
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let server = Processes(ServerProcess::start(Program { programs, options })?);
        Ok(Self::ours(Postgres, server, |addr| {
            format!("postgres://postgres@{addr}/postgres")
        }))
    }
}

impl Kind for Postgres {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let url = Url::parse(value).map_err(|error| error.to_string())?;
        let addrs = url
            .socket_addrs(|| Some(5432))
            .map_err(|error| error.to_string())?;
        let addr = *addrs.first().ok_or("it names no address")?;
        Ok((Self, url, addr))
    }
}

/// The server and its processes, one for each connection: to stop or kill only the first would leave the connections served.
#[derive(Debug)]
struct Processes(ServerProcess);

impl Processes {
    /// Sends a signal to the processes of the server's connections and tasks. Only the first process makes new ones.
    fn signal(&self, signal: Signal) -> io::Result<()> {
        for pid in children(self.0.pid())? {
            // One that has ended needs no signal.
            let _sent = kill_process(pid, signal);
        }
        Ok(())
    }
}

/// A killed server leaves shared memory behind, of which a machine has a limited number; one that ends by itself does not.
impl Drop for Processes {
    fn drop(&mut self) {
        let Some(pid) = i32::try_from(self.0.pid()).ok().and_then(Pid::from_raw) else {
            return;
        };
        // One that has ended already left nothing to do.
        let _resumed = self.cont();
        let _asked = kill_process(pid, Signal::QUIT);
        let begun = Instant::now();
        while state(pid).is_some_and(|(state, _)| state != "Z") && begun.elapsed() < ORPHANS_END {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Station for Processes {
    fn addr(&self) -> SocketAddr {
        self.0.addr()
    }

    fn stop(&self) -> io::Result<()> {
        self.0.stop()?;
        self.signal(Signal::STOP)?;
        for pid in children(self.0.pid())? {
            while state(pid).is_some_and(|(state, _)| !matches!(state.as_str(), "T" | "Z")) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn cont(&self) -> io::Result<()> {
        self.signal(Signal::CONT)?;
        self.0.cont()
    }

    fn restart(&self) -> Result<(), ServerError> {
        let killed = self.0.stop().and_then(|()| self.signal(Signal::KILL));
        killed.map_err(|source| ServerError::System {
            server: PROGRAM,
            step: "kill",
            source,
        })?;
        self.0.restart()
    }

    fn log(&self) -> String {
        self.0.log()
    }

    fn process(&self) -> Option<&ServerProcess> {
        Some(&self.0)
    }
}

fn children(parent: u32) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let pid = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(Pid::from_raw);
        found.extend(pid.filter(|&pid| state(pid).is_some_and(|(_, of)| of == parent)));
    }
    Ok(found)
}

/// The state of a process and its parent, from the fields behind the program's name, which may hold anything.
fn state(pid: Pid) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// How the first process is run.
#[derive(Debug)]
struct Program {
    /// The folder of `postgres` and `initdb`.
    programs: PathBuf,
    options: Vec<String>,
}

impl Service for Program {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        if is_root() {
            chown(&site.dir, Some(UNPRIVILEGED), Some(UNPRIVILEGED))?;
        }
        let template = template(&self.programs)?;
        succeeds(Command::new("cp").arg("-a").arg(template).arg(data(site)))
    }

    fn command(&self, site: &Site) -> Command {
        wait_for_orphans(site);
        let mut command = as_user(&self.programs.join(PROGRAM));
        command
            .arg("-D")
            .arg(data(site))
            .arg("-p")
            .arg(site.port.to_string());
        command.args(OPTIONS.iter().flat_map(|&option| ["-c", option]));
        command.args(self.options.iter().flat_map(|option| ["-c", option]));
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let state = fs::read_to_string(data(site).join("postmaster.pid")).unwrap_or_default();
        let mut lines = state.lines().map(str::trim);
        lines.next() == Some(pid.to_string().as_str()) && lines.next_back() == Some("ready")
    }
}

fn data(site: &Site) -> PathBuf {
    site.dir.join("data")
}

/// The processes of a killed server end a moment after it, and a new one refuses to start beside them: the file `postmaster.pid` names the
/// shared memory that they use.
fn wait_for_orphans(site: &Site) {
    let state = fs::read_to_string(data(site).join("postmaster.pid")).unwrap_or_default();
    let Some(memory) = state
        .lines()
        .nth(6)
        .and_then(|line| line.split_whitespace().nth(1))
    else {
        return;
    };
    let is_used = || {
        let table = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        table.lines().any(|line| {
            let mut columns = line.split_whitespace();
            columns.nth(1) == Some(memory) && columns.nth(4).is_some_and(|attached| attached != "0")
        })
    };
    let begun = Instant::now();
    while is_used() && begun.elapsed() < ORPHANS_END {
        thread::sleep(Duration::from_millis(5));
    }
}

/// A data directory made by `initdb`, once for all servers of this process and of later ones.
fn template(programs: &Path) -> io::Result<PathBuf> {
    static MADE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = MADE.get_or_init(|| make_template(programs).map_err(|error| error.to_string()));
    made.clone().map_err(io::Error::other)
}

fn make_template(programs: &Path) -> io::Result<PathBuf> {
    let version = Command::new(programs.join(PROGRAM))
        .arg("--version")
        .output()?
        .stdout;
    let version: String = String::from_utf8_lossy(&version)
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    let user = rustix::process::geteuid().as_raw();
    let folder = std::env::temp_dir().join(format!("dlock-postgres-template-{version}-{user}"));
    if folder.exists() {
        return Ok(folder);
    }
    let site = tempfile::Builder::new().prefix("dlock-initdb-").tempdir()?;
    if is_root() {
        chown(site.path(), Some(UNPRIVILEGED), Some(UNPRIVILEGED))?;
    }
    let made = site.path().join("data");
    let mut initdb = as_user(&programs.join("initdb"));
    initdb
        .args([
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
            "-D",
        ])
        .arg(&made);
    succeeds(&mut initdb)?;
    // Another process may have made it meanwhile.
    fs::rename(made, &folder).or_else(|error| if folder.exists() { Ok(()) } else { Err(error) })?;
    Ok(folder)
}

fn succeeds(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(io::Error::other(format!(
        "{:?}: {}: {words}",
        command.get_program(),
        output.status
    )))
}

/// The program, as a user that it accepts. A change of the user clears the signal that ends it with its parent, so it is set again.
fn as_user(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--clear-groups"]);
    command.args([
        format!("--reuid={UNPRIVILEGED}"),
        format!("--regid={UNPRIVILEGED}"),
    ]);
    command.arg(program).current_dir("/");
    command
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The folder of `initdb` and `postgres`: on `PATH`, else the newest of Debian's.
fn programs() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path)
        .find(|folder| folder.join("initdb").exists() && folder.join(PROGRAM).exists());
    let debian = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let newest = || {
        debian
            .map(|version| version.path().join("bin"))
            .filter(|folder| folder.join(PROGRAM).exists())
            .max()
    };
    on_path.or_else(newest)
}

const PROGRAM: &str = "postgres";

/// The user without rights on every Linux.
const UNPRIVILEGED: u32 = 65534;

/// Small and quick to start. What was answered survives `kill -9` of the server, not a crash of the machine.
const OPTIONS: &[&str] = &[
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "shared_buffers=16MB",
    "max_connections=2000",
    "fsync=off",
    "dynamic_shared_memory_type=mmap",
    "log_min_messages=log",
];

/// Longer than the processes of a killed server need to notice it.
const ORPHANS_END: Duration = Duration::from_secs(5);
