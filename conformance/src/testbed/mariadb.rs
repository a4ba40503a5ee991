//! MariaDB or MySQL: a server to test against.

use std::{
    env, fs,
    io::{self, Read},
    net::{SocketAddr, TcpStream},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use url::Url;

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    process::{installed, succeeds},
    running::{Kind, Running, parsed},
    server::{ServerError, ServerProcess, Service, Site},
};

/// Settings of a server that the testbed starts.
#[derive(Clone, Debug, Default)]
pub struct MariadbOptions {
    /// Appended to the command line, such as `["--max-connections=3"]`.
    pub extra_args: Vec<String>,
}

/// A MariaDB or MySQL server: one that the testbed starts, or the one that
/// [`DLOCK_TEST_MYSQL_URL`](VARIABLE) names.
///
/// A started server has the empty database `dlock` and the user `root` without a password, from any
/// host. It writes its log at each commit, so that every answered change survives `kill -9`.
pub type MariadbServer = Running<Mariadb>;

/// The state that only this kind of server has: none.
#[derive(Clone, Copy, Debug)]
pub struct Mariadb;

/// Names a server to use instead of starting one, as `mysql://[user:password@]host[:port]/database`.
/// Tests destroy dlock's table there.
pub const VARIABLE: &str = "DLOCK_TEST_MYSQL_URL";
/// Names the program that is started instead of the `mariadbd` on `PATH`: another `mariadbd`, or a `mysqld` of MySQL.
pub const PROGRAM_VARIABLE: &str = "DLOCK_TEST_MYSQLD";

impl MariadbServer {
    /// Starts the program that [`DLOCK_TEST_MYSQLD`](PROGRAM_VARIABLE) names, else the `mariadbd` on `PATH`,
    /// or in `/usr/sbin`.
    ///
    /// # Errors
    /// [`ServerError::Missing`] when there is none, else the error of the start.
    pub fn start(options: MariadbOptions) -> Result<Self, ServerError> {
        let program = match env::var_os(PROGRAM_VARIABLE) {
            Some(named) => PathBuf::from(named),
            None => installed(PROGRAM).ok_or(MISSING)?,
        };
        let process = ServerProcess::start(Program { program, options })?;
        Ok(Self::ours(Mariadb, process, |addr| {
            format!("mysql://root@{addr}/{DATABASE}")
        }))
    }

    /// Starts `mariadb:10.11` in a container, with the empty database `dlock` too.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container(options: MariadbOptions) -> Result<Self, ServerError> {
        let container = Container::start(Image::mariadb(&options))?;
        let (password, database) = (Image::PASSWORD, Image::DATABASE);
        Ok(Self::ours(Mariadb, container, |addr| {
            format!("mysql://root:{password}@{addr}/{database}")
        }))
    }

    /// The unix socket of a started server.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let process = self.process()?;
        Some(process.site().dir.join(SOCKET))
    }
}

impl Kind for Mariadb {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (url, addr) = parsed(value, "mysql", 3306)?;
        if url.path().len() < 2 {
            return Err("it must be mysql://[user:password@]host[:port]/database".to_owned());
        }
        if !greets(addr) {
            return Err(format!("{addr} does not greet as a MySQL server"));
        }
        Ok((Self, url, addr))
    }
}

/// The child process.
#[derive(Debug)]
struct Program {
    program: PathBuf,
    options: MariadbOptions,
}

/// The two have diverged: they are initialised differently and have other options.
#[derive(Clone, Copy)]
enum Family {
    Mariadb,
    Mysql,
}

impl Family {
    fn of(version: &str) -> Self {
        if version.contains("MariaDB") {
            Self::Mariadb
        } else {
            Self::Mysql
        }
    }

    /// MySQL before 8.0.16 has a TLS that only equally old programs speak, and an authentication that
    /// needs TLS: the server runs without both.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Mariadb => &[
                "--innodb-temp-data-file-path=ibtmp1:1M:autoextend",
                "--aria-pagecache-buffer-size=1M",
            ],
            Self::Mysql => &[
                "--innodb-temp-data-file-path=ibtmp1:12M:autoextend",
                "--mysqlx=OFF",
                "--loose-skip-ssl",
                "--loose-default-authentication-plugin=mysql_native_password",
            ],
        }
    }
}

impl Service for Program {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        fs::create_dir(site.dir.join(TEMPORARY))?;
        copy(&template(&self.program)?, &site.dir.join("data"))
    }

    fn command(&self, site: &Site) -> Command {
        let path = |name: &str| site.dir.join(name).display().to_string();
        let mut command = Command::new(&self.program);
        command
            .arg("--no-defaults")
            .arg(format!("--datadir={}", path("data")))
            .arg(format!("--socket={}", path(SOCKET)))
            .arg(format!("--pid-file={}", path(PID)))
            .arg(format!("--tmpdir={}", path(TEMPORARY)))
            .arg(format!("--port={}", site.port))
            .args("--bind-address=127.0.0.1 --skip-name-resolve --skip-log-bin".split(' '))
            .args(user())
            .args(SMALL)
            .args(Family::of(&version(&self.program).unwrap_or_default()).options())
            .args(&self.options.extra_args);
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let ours = fs::read_to_string(site.dir.join(PID));
        ours.is_ok_and(|text| text.trim() == pid.to_string()) && greets(site.addr())
    }
}

/// Whether a server there greets in version 10 of the protocol: the fifth byte of the first packet.
pub(super) fn greets(addr: SocketAddr) -> bool {
    let hello = || -> io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&addr, HELLO_LIMIT)?;
        stream.set_read_timeout(Some(HELLO_LIMIT))?;
        let mut start = [0; 5];
        stream.read_exact(&mut start)?;
        Ok(start[4] == 10)
    };
    hello().unwrap_or(false)
}

/// The output of `--version`: path and version.
fn version(server: &Path) -> io::Result<String> {
    let said = Command::new(server)
        .args(["--no-defaults", "--version"])
        .output()
        .map_err(|cause| io::Error::other(format!("{}: {cause}", server.display())))?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// A data directory made by `mariadb-install-db`, kept between runs: a copy takes a tenth of the time.
fn template(server: &Path) -> io::Result<PathBuf> {
    let version = version(server)?;
    let family = Family::of(&version);
    // The version follows the program's path.
    let version = version
        .split_once("Ver")
        .map_or(&*version, |(_, rest)| rest);
    let version = version.chars().filter(char::is_ascii_alphanumeric);
    let version: String = version.take(24).collect();
    let uid = rustix::process::getuid().as_raw();
    let made = env::temp_dir().join(format!("dlock-mariadb-{version}-{uid}"));
    if !made.join(DONE).exists() {
        let new = tempfile::Builder::new()
            .prefix("dlock-mariadb-")
            .tempdir()?;
        let data = new.path().join("data");
        match family {
            Family::Mysql => initialize(server, new.path(), &data)?,
            Family::Mariadb => {
                install(&data)?;
                fs::create_dir(data.join(DATABASE))?; // a database is a directory
            }
        }
        fs::write(data.join(DONE), "")?;
        // Another process may have been faster; its template is as good.
        drop(fs::rename(&data, &made));
    }
    // The name is predictable, and the directory is writable for all users.
    if fs::symlink_metadata(&made)?.uid() != uid {
        let message = format!("{} belongs to another user: remove it", made.display());
        return Err(io::Error::other(message));
    }
    Ok(made)
}

fn install(data: &Path) -> io::Result<()> {
    let program = installed(INSTALLER).ok_or_else(|| io::Error::other(MISSING.to_string()))?;
    let mut command = Command::new(program);
    command
        .args(["--no-defaults", "--auth-root-authentication-method=normal"])
        .args("--skip-test-db --skip-name-resolve --innodb-log-file-size=4M".split(' '))
        .args(user())
        .arg(format!("--datadir={}", data.display()));
    succeeds(&mut command)
}

/// The way of MySQL: the server initialises itself. Its root may connect only from `localhost`, which
/// matches no address without name resolution.
fn initialize(server: &Path, folder: &Path, data: &Path) -> io::Result<()> {
    let script = folder.join("init.sql");
    let lines = [
        "CREATE USER root@'%' IDENTIFIED BY ''",
        "GRANT ALL ON *.* TO root@'%' WITH GRANT OPTION",
        &format!("CREATE DATABASE {DATABASE}"),
    ];
    fs::write(&script, lines.map(|line| format!("{line};\n")).concat())?;
    let mut command = Command::new(server);
    command
        .args(["--no-defaults", "--initialize-insecure"])
        .args(SMALL)
        .args(Family::Mysql.options())
        .args(user())
        .arg(format!("--init-file={}", script.display()))
        .arg(format!("--datadir={}", data.display()));
    succeeds(&mut command)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// As root, the server starts only with this option.
fn user() -> Option<&'static str> {
    rustix::process::getuid().is_root().then_some("--user=root")
}

/// Small and quick to start. The log is written and flushed at each commit, which costs nothing in
/// memory.
const SMALL: [&str; 9] = [
    "--innodb-log-file-size=4M",
    "--innodb-buffer-pool-size=16M",
    "--innodb-use-native-aio=0",
    "--innodb-flush-log-at-trx-commit=1",
    "--innodb-doublewrite=0",
    "--innodb-buffer-pool-load-at-startup=0",
    "--innodb-buffer-pool-dump-at-shutdown=0",
    "--key-buffer-size=1M",
    "--performance-schema=OFF",
];
const PROGRAM: &str = "mariadbd";
const INSTALLER: &str = "mariadb-install-db";
const DATABASE: &str = "dlock";
const SOCKET: &str = "s";
const PID: &str = "pid";
/// A directory of its own: a starting server removes temporary tables that it takes for its own
/// leftovers, and so those of another server.
const TEMPORARY: &str = "tmp";
/// Written last, so that a half-made template is not used.
const DONE: &str = "dlock-template";
const HELLO_LIMIT: Duration = Duration::from_secs(1);
const MISSING: ServerError = ServerError::Missing {
    server: PROGRAM,
    remedy: "install MariaDB (Debian: apt-get install mariadb-server), or name a program with DLOCK_TEST_MYSQLD or a server with DLOCK_TEST_MYSQL_URL",
};

#[cfg(test)]
mod tests {
    use super::{MariadbOptions, MariadbServer, greets};
    use std::time::Instant;

    #[test]
    fn a_server_starts_again_with_what_it_knew_and_ends() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        assert!(greets(server.addr()) && server.socket().unwrap().exists());
        let process = server.process().unwrap();
        let first = process.pid();
        process.kill().unwrap();
        assert!(!greets(server.addr()));
        process.restart().unwrap();
        assert!(greets(server.addr()) && process.pid() != first);
        let addr = server.addr();
        drop(server);
        assert!(!greets(addr));
    }

    #[test]
    fn a_wrong_option_is_an_error_with_the_log() {
        let began = Instant::now();
        let extra_args = vec!["--no-such-option=1".to_owned()];
        let error = MariadbServer::start(MariadbOptions { extra_args }).unwrap_err();
        assert!(error.to_string().contains("no-such-option"), "{error}");
        assert!(began.elapsed().as_secs() < 20);
    }

    #[test]
    fn a_server_that_is_named_is_used_as_its_url_says() {
        let ours = MariadbServer::start(MariadbOptions::default()).unwrap();
        let url = format!("mysql://who:canary@{}/locks", ours.addr());
        let named = MariadbServer::foreign(url.clone().into()).unwrap();
        assert!(named.process().is_none() && named.url() == url && named.addr() == ours.addr());
        let elsewhere = named.url_at("127.0.0.1:7".parse().unwrap());
        assert_eq!(elsewhere, "mysql://who:canary@127.0.0.1:7/locks");
    }
}
