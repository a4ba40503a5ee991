//! PostgreSQL: a server to test against.

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    Kind, ManagedServer, Running, ServerProcess, pgbouncer,
    process::{poll, succeeds},
    running::located,
    server::{ServerError, Service, Site},
};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::Duration,
};
#[cfg(feature = "containers")]
use std::{
    io::{Read, Write},
    net::TcpStream,
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

/// What a server that the testbed starts begins with.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    /// Settings such as `wal_level=logical`; a later one counts more than an earlier one.
    pub settings: Vec<String>,
    /// Files in its data directory, as name and text: `pg_hba.conf`, `server.key`.
    pub files: Vec<(&'static str, String)>,
    /// What is executed before the first start, a statement a line: roles, tables.
    pub script: String,
    /// The user of the URL, who needs no password; without one `postgres`.
    pub user: Option<&'static str>,
    /// The server that it follows as a standby, at this address of the server or of a proxy before it.
    pub primary: Option<SocketAddr>,
}

impl PostgresServer {
    /// Starts the newest `postgres` on `PATH`, or where Debian has it. Root starts it as a user without rights, because the server refuses root.
    ///
    /// # Errors
    /// [`ServerError::Missing`] when there is none, else the error of the start.
    pub fn start(settings: &[&str]) -> Result<Self, ServerError> {
        let settings = settings.iter().map(|&one| one.to_owned()).collect();
        Self::start_with(PostgresOptions {
            settings,
            ..PostgresOptions::default()
        })
    }

    /// Starts it with files of its own, or as a standby. A standby gets its data from the primary and answers reads when this returns.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(options: PostgresOptions) -> Result<Self, ServerError> {
        let user = options.user;
        Ok(Self::ours(Postgres, Processes::start(options)?, |addr| {
            url(user, addr)
        }))
    }

    /// Starts it behind a PgBouncer in transaction mode, which shares its few connections to the server among all clients. The URL and the
    /// address are PgBouncer's; only the server is stopped and killed. Users who may connect are `postgres` and
    /// [`LOCKER`](Postgres::LOCKER).
    ///
    /// # Errors
    /// As [`start`](Self::start), and [`ServerError::Missing`] when there is no PgBouncer.
    pub fn behind_pgbouncer(options: PostgresOptions) -> Result<Self, ServerError> {
        let user = options.user;
        let server = Processes::start(options)?;
        let bouncer = pgbouncer::start(server.addr())?;
        Ok(Self::ours(Postgres, Pooled { bouncer, server }, |addr| {
            url(user, addr)
        }))
    }

    /// Ends a server that the testbed started in order (a fast shutdown), as an administrator does before a [restart](ManagedServer::restart):
    /// returns when it has ended.
    ///
    /// # Errors
    /// When it is not ours, or does not end.
    pub fn shut_down(&self) -> io::Result<()> {
        let process = self.process();
        let process = process.ok_or_else(|| io::Error::other("the server is not ours"))?;
        let pid = i32::try_from(process.pid()).ok().and_then(Pid::from_raw);
        kill_process(
            pid.ok_or_else(|| io::Error::other("it has no pid"))?,
            Signal::INT,
        )?;
        let has_ended = || (!process.is_running()).then_some(());
        let late = || io::Error::other("the server did not shut down");
        poll(SHUTDOWN_LIMIT, POLL_INTERVAL, has_ended).ok_or_else(late)
    }

    /// Starts `postgres:15` in a container.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container() -> Result<Self, ServerError> {
        let container = Container::start(Image::postgres())?;
        Ok(Self::ours(Postgres, container, |addr| url(None, addr)))
    }
}

impl Postgres {
    /// The name of a user that a script may make.
    pub const LOCKER: &str = "locker";
}

fn url(user: Option<&str>, addr: SocketAddr) -> String {
    format!("postgres://{}@{addr}/postgres", user.unwrap_or("postgres"))
}

impl Kind for Postgres {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (url, addr) = located(value, 5432)?;
        Ok((Self, url, addr))
    }
}

/// The server and its processes, one for each connection: to stop or kill only the first would leave the connections served.
#[derive(Debug)]
struct Processes(ServerProcess);

impl Processes {
    fn start(options: PostgresOptions) -> Result<Self, ServerError> {
        let programs = programs().ok_or(ServerError::Missing {
            server: PROGRAM,
            remedy: "install PostgreSQL (Debian: apt-get install postgresql), or name a server with DLOCK_TEST_POSTGRES_URL",
        })?;
        Ok(Self(ServerProcess::start(Program { programs, options })?))
    }

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
        let has_ended = || state(pid).is_none_or(|(state, _)| state == "Z");
        poll(ORPHANS_END, POLL_INTERVAL, || has_ended().then_some(()));
    }
}

impl ManagedServer for Processes {
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

    /// The others first, while the first process makes no new ones. A second call does nothing.
    fn kill(&self) -> io::Result<()> {
        if self.0.is_running() {
            self.0.stop()?;
            self.signal(Signal::KILL)?;
        }
        self.0.kill().map(drop)
    }

    fn restart(&self) -> Result<(), ServerError> {
        self.kill().map_err(ServerError::system(PROGRAM, "kill"))?;
        self.0.restart()
    }

    fn process(&self) -> Option<&ServerProcess> {
        Some(&self.0)
    }
}

/// A server, and the PgBouncer before it.
#[derive(Debug)]
struct Pooled {
    /// Dropped first: it would try to connect for ever.
    bouncer: ServerProcess,
    server: Processes,
}

impl ManagedServer for Pooled {
    fn addr(&self) -> SocketAddr {
        self.bouncer.addr()
    }

    fn stop(&self) -> io::Result<()> {
        self.server.stop()
    }

    fn cont(&self) -> io::Result<()> {
        self.server.cont()
    }

    fn kill(&self) -> io::Result<()> {
        self.server.kill()
    }

    /// PgBouncer refuses its clients after a login that failed, until one succeeds. It rests meanwhile, so that it tries none.
    fn restart(&self) -> Result<(), ServerError> {
        let at = |step| ServerError::system(PROGRAM, step);
        self.bouncer.stop().map_err(at("stop the pool"))?;
        self.server.restart()?;
        self.bouncer.cont().map_err(at("resume the pool"))
    }

    fn process(&self) -> Option<&ServerProcess> {
        self.server.process()
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
    options: PostgresOptions,
}

impl Program {
    /// Runs the script without a server. The program succeeds whatever its statements do, and tells of errors.
    fn execute(&self, site: &Site) -> io::Result<()> {
        let script = site.dir.join("script");
        fs::write(&script, &self.options.script)?;
        let mut alone = as_user(&self.programs.join(PROGRAM));
        alone
            .args(["--single", "-D"])
            .arg(data(site))
            .arg("postgres");
        let output = alone.stdin(fs::File::open(script)?).output()?;
        let words = String::from_utf8_lossy(&output.stderr);
        if output.status.success() && !words.contains("ERROR:") {
            return Ok(());
        }
        Err(io::Error::other(format!("{}: {words}", output.status)))
    }
}

impl Service for Program {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        give(&site.dir)?;
        if let Some(primary) = self.options.primary {
            let mut backup = as_user(&self.programs.join("pg_basebackup"));
            backup
                .args(["-U", "postgres", "-h", &primary.ip().to_string()])
                .args(["-p", &primary.port().to_string(), "--no-password"])
                .args(["-R", "-X", "stream", "-c", "fast", "--no-sync", "-D"])
                .arg(data(site));
            succeeds(&mut backup)?;
        } else {
            let template = template(&self.programs)?;
            succeeds(Command::new("cp").arg("-a").arg(template).arg(data(site)))?;
        }
        if !self.options.script.is_empty() {
            self.execute(site)?;
        }
        for (name, text) in &self.options.files {
            let path = data(site).join(name);
            fs::write(&path, text)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            give(&path)?;
        }
        Ok(())
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
        command.args(self.options.settings.iter().flat_map(|one| ["-c", one]));
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

/// Whether a server there lets `postgres` in; one that starts says that it does.
#[cfg(feature = "containers")]
pub(super) fn answers(addr: SocketAddr) -> bool {
    const VERSION: u32 = 196_608; // 3.0
    let words = b"user\0postgres\0database\0postgres\0\0";
    let ask = || -> io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&addr, ANSWER_LIMIT)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let length = u32::try_from(8 + words.len()).map_err(io::Error::other)?;
        let message = [&length.to_be_bytes(), &VERSION.to_be_bytes(), &words[..]].concat();
        stream.write_all(&message)?;
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        Ok(kind == *b"R")
    };
    ask().unwrap_or(false)
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
    poll(ORPHANS_END, POLL_INTERVAL, || (!is_used()).then_some(()));
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
    give(site.path())?;
    let made = site.path().join("data");
    let mut initdb = as_user(&programs.join("initdb"));
    initdb
        .args("-U postgres -A trust -E UTF8 --locale=C --no-sync -D".split(' '))
        .arg(&made);
    succeeds(&mut initdb)?;
    // Another process may have made it meanwhile.
    fs::rename(made, &folder).or_else(|error| if folder.exists() { Ok(()) } else { Err(error) })?;
    Ok(folder)
}

/// Makes the user that the programs run as the owner.
pub(super) fn give(path: &Path) -> io::Result<()> {
    if is_root() {
        chown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED))?;
    }
    Ok(())
}

/// The program, as a user that it accepts. A change of the user clears the signal that ends it with its parent, so it is set again.
pub(super) fn as_user(program: &Path) -> Command {
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
    let on_path = std::env::split_paths(&path).find(|folder| {
        ["initdb", PROGRAM, "pg_basebackup"]
            .iter()
            .all(|program| folder.join(program).exists())
    });
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
#[cfg(feature = "containers")]
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

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

/// A shutdown writes a checkpoint.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Longer than the processes of a killed server need to notice it.
const ORPHANS_END: Duration = Duration::from_secs(5);
