//! Server process: a real server of any kind, as a child process.

mod error;

use super::process;
use parking_lot::Mutex;
use rustix::process::Pid;
use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

pub use error::ServerError;

/// The description of a kind of server that [`ServerProcess`] runs.
pub trait Service: fmt::Debug + Send + Sync + 'static {
    /// The program, for messages and folder names.
    fn name(&self) -> &'static str;

    /// Fills the empty folder before the first start: configuration files, a copied template.
    ///
    /// # Errors
    /// Any error of that.
    fn prepare(&self, site: &Site) -> io::Result<()> {
        let _ = site;
        Ok(())
    }

    /// The command that runs the server in the foreground, on the port and in the folder of the site.
    ///
    /// Called at each start. Its output goes to the log.
    fn command(&self, site: &Site) -> Command;

    /// Whether **this** process answers; called every 5 ms, so it must not wait long.
    ///
    /// Another server may have taken the port in the same instant: compare `pid`, or another property
    /// that tells them apart.
    fn ready(&self, site: &Site, pid: u32) -> bool;

    /// How long a start may take; on an overloaded machine a start takes far longer than usual.
    fn start_limit(&self) -> Duration {
        Duration::from_secs(60)
    }
}

/// The place of a server: a loopback port and a folder of its own.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Site {
    /// On 127.0.0.1.
    pub port: u16,
    /// Removed with the server. It is in memory where the machine has `/dev/shm`, unless [`on_disk`]
    /// was called: it survives `kill -9`, but not a reboot.
    pub dir: PathBuf,
}

impl Site {
    /// The address where the server listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), self.port)
    }

    fn log(&self) -> PathBuf {
        self.dir.join("server.log")
    }
}

/// A running server. Dropping it kills it, waits for its end and removes its folder.
///
/// It is one process: [`stop`](Self::stop) and [`kill`](Self::kill) signal that one only. A server with a
/// process per connection would go on answering. Such a server needs a
/// [`ManagedServer`](super::ManagedServer) that also signals the others.
///
/// All methods block for milliseconds; [`start`](Self::start) and [`restart`](Self::restart) block
/// until the server is ready. In async code call those two through `spawn_blocking`.
#[derive(Debug)]
pub struct ServerProcess {
    service: Box<dyn Service>,
    site: Site,
    child: Mutex<Child>,
    _dir: TempDir,
}

impl ServerProcess {
    /// Starts a server and waits until it is ready. If another process took the port in the meantime,
    /// it tries another port.
    ///
    /// # Errors
    /// [`ServerError`], with the server's log where there is one.
    pub fn start(service: impl Service) -> Result<Self, ServerError> {
        let mut attempt = 1;
        loop {
            let (site, dir) = new_site(&service)?;
            match launch(&service, &site) {
                Err(ServerError::Ended { .. }) if attempt < START_ATTEMPTS => attempt += 1,
                Err(error) => return Err(error),
                Ok(child) => {
                    let (service, child) = (Box::new(service), Mutex::new(child));
                    return Ok(Self {
                        service,
                        site,
                        child,
                        _dir: dir,
                    });
                }
            }
        }
    }

    /// Starts several at once: members of a cluster may not be ready before others are there.
    pub(in crate::testbed) fn start_all<S: Service>(
        services: impl Iterator<Item = S>,
    ) -> Result<Vec<Self>, ServerError> {
        let starts: Vec<_> = services
            .map(|service| thread::spawn(move || Self::start(service)))
            .collect();
        starts
            .into_iter()
            .map(|start| start.join().expect("BUG: a start panicked"))
            .collect()
    }

    /// The port and the folder of the server.
    #[must_use]
    pub const fn site(&self) -> &Site {
        &self.site
    }

    /// The address where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.site.addr()
    }

    /// The process id of the latest start.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.lock().id()
    }

    /// The last 16 KiB of its output, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        read_log(&self.site)
    }

    /// Suspends it (SIGSTOP); returns once it is stopped. Connections stay open, and no request is
    /// answered.
    ///
    /// # Errors
    /// When it is not running.
    pub fn stop(&self) -> io::Result<()> {
        process::stop(running(&mut self.child.lock())?)
    }

    /// Resumes it (SIGCONT).
    ///
    /// # Errors
    /// When it is not running.
    pub fn cont(&self) -> io::Result<()> {
        process::cont(running(&mut self.child.lock())?)
    }

    /// Whether it has not ended, suspended or not.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.child.lock().try_wait(), Ok(None))
    }

    /// Kills it (SIGKILL), suspended or not, and waits for its end. Its folder stays. A second call
    /// does nothing.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn kill(&self) -> io::Result<ExitStatus> {
        end(&mut self.child.lock())
    }

    /// Starts it again on the same port and in the same folder; if it still runs, kills it first.
    ///
    /// # Errors
    /// [`ServerError`]; the server is then not running.
    pub fn restart(&self) -> Result<(), ServerError> {
        let mut child = self.child.lock();
        end(&mut child).map_err(ServerError::system(self.service.name(), "kill"))?;
        *child = launch(&*self.service, &self.site)?;
        Ok(())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.kill());
    }
}

fn new_site(service: &dyn Service) -> Result<(Site, TempDir), ServerError> {
    let failed = ServerError::system(service.name(), "prepare a folder and a port for");
    let dir = new_dir(service.name()).map_err(&failed)?;
    let site = Site {
        port: free_port().map_err(&failed)?,
        dir: dir.path().to_owned(),
    };
    service.prepare(&site).map_err(failed)?;
    Ok((site, dir))
}

/// From now on the servers of this process keep their folders with other temporary files, on a disk and
/// not in memory, so that a flush takes its real time. For measurements.
pub fn on_disk() {
    ON_DISK.store(true, Ordering::Relaxed);
}

static ON_DISK: AtomicBool = AtomicBool::new(false);

/// In memory if possible: fsync makes the start of most servers slow.
fn new_dir(name: &str) -> io::Result<TempDir> {
    let prefix = format!("dlock-{name}-");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    if ON_DISK.load(Ordering::Relaxed) {
        return builder.tempdir();
    }
    builder
        .tempdir_in(Path::new("/dev/shm"))
        .or_else(|_| builder.tempdir())
}

/// A port that nothing listens on, and that no other test bed is given while this process lives: some servers bind theirs
/// only seconds after they were started.
pub(in crate::testbed) fn free_port() -> io::Result<u16> {
    static OURS: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let mut ours = OURS.lock();
    loop {
        let mut unused = ours.iter_mut().flat_map(|block| &mut block.unused);
        if let Some(port) = unused.find(is_free) {
            return Ok(port);
        }
        match Block::take() {
            Some(block) => ours.push(block),
            // All were in use once, and some are free again.
            None => {
                let mut used = ours.iter().flat_map(|block| block.ports.clone());
                let none = || io::Error::other(format!("no free port found in {PORTS:?}"));
                return used.find(is_free).ok_or_else(none);
            }
        }
    }
}

/// Ports of this process, by the lock of a file.
struct Block {
    _lock: File,
    ports: Range<u16>,
    unused: Range<u16>,
}

impl Block {
    /// The next one from a random one on; `None`: other processes and this one have them all.
    fn take() -> Option<Self> {
        let mut blocks: Vec<u16> = PORTS.step_by(BLOCK.into()).collect();
        fastrand::shuffle(&mut blocks);
        blocks.into_iter().find_map(|first| {
            let path = std::env::temp_dir().join(format!("dlock-ports-{first}"));
            // It may be that of another user.
            let file = File::create_new(&path).or_else(|_| File::open(&path));
            let file = file.ok()?;
            file.try_lock().ok()?;
            let ports = first..first + BLOCK;
            Some(Self {
                _lock: file,
                unused: ports.clone(),
                ports,
            })
        })
    }
}

fn launch(service: &dyn Service, site: &Site) -> Result<Child, ServerError> {
    let (server, limit) = (service.name(), service.start_limit());
    let mut child = spawn(service, site).map_err(ServerError::system(server, "start"))?;
    let began = Instant::now();
    loop {
        // Another process's server may answer while ours has just failed to bind: so check our process
        // after the answer.
        let ready = service.ready(site, child.id());
        match child.try_wait() {
            Ok(Some(status)) => {
                let log = read_log(site);
                return Err(ServerError::Ended {
                    server,
                    status,
                    log,
                });
            }
            Ok(None) if ready => return Ok(child),
            Ok(None) if began.elapsed() < limit => thread::sleep(READY_INTERVAL),
            Ok(None) => {
                drop(end(&mut child));
                let log = read_log(site);
                return Err(ServerError::NotReady { server, limit, log });
            }
            Err(source) => {
                drop(end(&mut child));
                return Err(ServerError::system(server, "watch")(source));
            }
        }
    }
}

fn spawn(service: &dyn Service, site: &Site) -> io::Result<Child> {
    let log: File = OpenOptions::new()
        .create(true)
        .append(true)
        .open(site.log())?;
    let mut command = process::tied(&service.command(site));
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    process::on_spawner(move || command.spawn())
}

/// The pid, as long as no other process can have got it.
fn running(child: &mut Child) -> io::Result<Pid> {
    match child.try_wait()? {
        None => Ok(Pid::from_child(child)),
        Some(status) => Err(io::Error::other(format!(
            "the server is not running, {status}"
        ))),
    }
}

fn end(child: &mut Child) -> io::Result<ExitStatus> {
    child.kill()?; // no error if it has ended already
    child.wait()
}

fn read_log(site: &Site) -> String {
    tail(&fs::read(site.log()).unwrap_or_default())
}

/// The last 16 KiB of a log.
pub(super) fn tail(log: &[u8]) -> String {
    let tail = &log[log.len().saturating_sub(LOG_TAIL)..];
    String::from_utf8_lossy(tail).into_owned()
}

/// Below the range that Linux uses for outgoing connections, so only other servers compete for these
/// ports.
const PORTS: Range<u16> = 12_000..21_000;
/// Divides them. Few processes need more.
const BLOCK: u16 = 50;
/// A lost race for a port is rare; a wrong command line fails each time and should fail fast.
const START_ATTEMPTS: u32 = 4;
const READY_INTERVAL: Duration = Duration::from_millis(5);
const LOG_TAIL: usize = 16 * 1024;
