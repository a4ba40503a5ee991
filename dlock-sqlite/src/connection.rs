//! Connection to the lock file: how the file and its one connection are opened, and what happens when they
//! fail.
//!
//! SQLite runs on a thread of its own, one statement at a time, so a client needs only one connection: the
//! connections of a pool would wait for each other's write lock. A request that has the [`Checkout`] uses the
//! connection; the others queue for it.

use crate::{
    commands::{self, APPLICATION_ID, SCHEMA_VERSION},
    config::SqliteConfig,
    error,
    machine::shared_file_system,
};
use dlock_core::driver::{
    DriverError, Finding, Result,
    kit::{Backoff, Class},
};
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, Stat, StatxAttributes, StatxFlags, access, mknodat, stat,
    statfs, statx,
};
use rustix::io::Errno;
use sqlx::{
    ConnectOptions, Connection as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteSynchronous},
};
use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::Instant,
};

/// A lock file, by whatever name it was reached.
#[derive(Clone, Debug)]
pub(crate) struct LockFile {
    /// Without symlinks.
    pub(crate) path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
}

impl LockFile {
    /// Finds or makes the file. Blocks.
    pub(crate) fn prepare(config: &SqliteConfig) -> Result<Self> {
        let path = std::path::absolute(&config.path)
            .map_err(|cause| error::no_file("no such path:", &config.path, cause))?;
        suits_locks(&path)?;
        let found = match path.canonicalize() {
            Ok(found) => found,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound && config.create => make(&path)?,
            Err(cause) => return Err(error::no_file("cannot find the lock file", &path, cause)),
        };
        // The name may have led to another file system.
        suits_locks(&found)?;
        let status = stat(&found).map_err(|cause| unreadable(&found, cause.into()))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(error::unfit(&found, "it is no regular file"));
        }
        if status.st_nlink > 1 {
            let why = "it has hard links, and each of its names would have a write-ahead log of its own: remove all but one";
            return Err(error::unfit(&found, why));
        }
        if is_mounted(&found) {
            let why = "it is mounted as a single file, so its write-ahead log would stand in this folder and not beside the file: mount its folder instead";
            return Err(error::unfit(&found, why));
        }
        let folder = found.parent().unwrap_or(Path::new("/"));
        for path in [&found, folder] {
            access(path, Access::READ_OK | Access::WRITE_OK)
                .map_err(|cause| unreadable(path, cause.into()))?;
        }
        Ok(Self {
            id: (status.st_dev, status.st_ino),
            path: found,
        })
    }

    /// The same for every name of the file: passes are matched by it.
    pub(crate) fn store(&self) -> String {
        let (device, inode) = self.id;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        format!("sqlite:{major}:{minor}/{inode}")
    }

    /// Refuses when the path now leads to another file, or to none: a new client would not see what is
    /// written to this one.
    pub(crate) fn still_there(&self) -> Result<()> {
        match stat(&self.path) {
            Ok(status) if (status.st_dev, status.st_ino) == self.id => Ok(()),
            _ => Err(error::replaced(&self.path)),
        }
    }

    /// Whether the path now leads to another file, or to none. A folder that cannot be read does not count.
    pub(crate) fn is_replaced(&self) -> bool {
        match stat(&self.path) {
            Ok(status) => (status.st_dev, status.st_ino) != self.id,
            Err(error) => matches!(error, Errno::NOENT | Errno::NOTDIR),
        }
    }

    /// What the file and its folder mean for a lock. What cannot be used is refused when the file is opened.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let (file, path) = (stat(&self.path), self.path.display());
        let folder = self.path.parent().map(stat);
        let others = |status: &Stat, bits: u32| status.st_mode & bits != 0;
        let mut found = vec![Finding::ok(
            "the file is in write-ahead mode, on a file system of this machine alone",
        )];
        found.push(match file {
            Ok(file) if others(&file, 0o002) => Finding::warning(
                format!("every user may write {path}, and change its locks"),
                "chmod o-w, and let one group write it",
            ),
            _ => Finding::ok(format!("not every user may write {path}")),
        });
        found.push(match folder {
            // In a sticky folder only the owner of a file deletes it.
            Some(Ok(folder)) if others(&folder, 0o002) && !others(&folder, 0o1000) => {
                Finding::warning(
                    format!("every user may delete {path}, whose locks would then be held twice"),
                    "chmod o-w its directory",
                )
            }
            _ => Finding::ok(format!("not every user may delete {path}")),
        });
        found
    }

    /// Refuses an empty file beside a write-ahead log with content: the file was deleted or emptied, and a
    /// process that had it open may still hold locks in it.
    fn has_its_log(&self) -> Result<()> {
        let mut log = self.path.as_os_str().to_owned();
        log.push("-wal");
        // In this order: a process that makes the file writes it before its log.
        let logged = stat(&log).is_ok_and(|log| log.st_size > 0);
        if logged && stat(&self.path).is_ok_and(|file| file.st_size == 0) {
            let why = "it is empty and its -wal is not, so it was deleted or emptied while in use, and locks may still be held in it: \
                       stop all processes that use it, delete its -wal and -shm, and start again";
            return Err(error::unfit(&self.path, why));
        }
        Ok(())
    }

    async fn open(&self) -> Result<SqliteConnection> {
        self.still_there()?;
        self.has_its_log()?;
        let unopened = |cause| error::unopened(&self.path, cause);
        let options = SqliteConnectOptions::new()
            .filename(&self.path)
            .busy_timeout(BUSY)
            .synchronous(SqliteSynchronous::Normal)
            // A statement that answers with more rows than this keeps the file locked until the program reads them.
            .row_buffer_size(commands::RENEW_BATCH + 1)
            .thread_name(|_| "dlock-sqlite".to_owned())
            .disable_statement_logging();
        let mut native = options.connect().await.map_err(unopened)?;
        let found = commands::identify(&mut native).await.map_err(unopened)?;
        match found {
            (0, 0, 0) => {}
            (APPLICATION_ID, SCHEMA_VERSION, _) => {}
            (APPLICATION_ID, schema, _) => {
                let why = format!(
                    "it has schema {schema}, and this dlock knows {SCHEMA_VERSION}: update dlock, or name another file"
                );
                return Err(error::unsupported(&self.path, &why));
            }
            _ => {
                let why = "it is another application's database, and was left as it is: name another file";
                return Err(error::unfit(&self.path, why));
            }
        }
        let mode = commands::journal(&mut native).await.map_err(unopened)?;
        if mode != "wal" {
            let why = format!(
                "its journal mode stays {mode:?}, as its file system lacks what a write-ahead log needs"
            );
            return Err(error::unsupported(&self.path, &why));
        }
        if found == (0, 0, 0) {
            commands::create(&mut native).await.map_err(unopened)?;
        }
        self.still_there()?;
        Ok(native)
    }
}

/// Makes the file, and its folder if it is missing, for this user alone. Another process may be making it
/// too.
///
/// The file is made without being opened: closing a file ends every lock that this process has on it,
/// including those of another client.
fn make(path: &Path) -> Result<PathBuf> {
    let failed = |cause: io::Error| error::no_file("cannot make the lock file", path, cause);
    if let Some(folder) = path.parent() {
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(failed)?;
    }
    match mknodat(
        CWD,
        path,
        FileType::RegularFile,
        Mode::from_raw_mode(0o600),
        0,
    ) {
        Ok(()) | Err(Errno::EXIST) => path.canonicalize().map_err(failed),
        Err(cause) => Err(failed(cause.into())),
    }
}

/// Whether that path is a mount of the file alone. A kernel before 5.8 does not tell.
fn is_mounted(path: &Path) -> bool {
    let status = statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE);
    status.is_ok_and(|status| {
        (status.stx_attributes & status.stx_attributes_mask).contains(StatxAttributes::MOUNT_ROOT)
    })
}

/// Refuses file systems that other kernels see too, judged by the nearest existing folder.
fn suits_locks(path: &Path) -> Result<()> {
    let Some(kind) = path.ancestors().find_map(|path| statfs(path).ok()) else {
        return Ok(());
    };
    #[allow(
        clippy::useless_conversion,
        reason = "it has another width on other processors"
    )]
    let kind: i64 = kind.f_type.into();
    match shared_file_system(kind) {
        Some(name) => {
            let why = format!(
                "it is on {name}, which other machines can write too, and a file's locks hold within one: use a disk of this machine, or a server"
            );
            Err(error::unsupported(path, &why))
        }
        None => Ok(()),
    }
}

fn unreadable(path: &Path, cause: io::Error) -> DriverError {
    error::no_file("cannot read and write", path, cause)
}

/// The one connection to the lock file.
pub(crate) struct Connection {
    pub(crate) lock_file: LockFile,
    state: Mutex<State>,
    /// Requests that are no renewals queue here, so that at most one of them is before a renewal.
    others: Mutex<()>,
    closed: AtomicBool,
}

struct State {
    native: Option<SqliteConnection>,
    /// The caller of a statement was dropped, and the statement may still run.
    unsettled: bool,
}

impl Connection {
    pub(crate) async fn open(lock_file: LockFile) -> Result<Self> {
        let native = opened(&lock_file).await?;
        Ok(Self {
            lock_file,
            state: Mutex::new(State {
                native: Some(native),
                unsettled: false,
            }),
            others: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Checks the connection out for one request, and reopens the file if needed.
    pub(crate) async fn checkout(&self, class: Class) -> Result<Checkout<'_>> {
        let turn = match class {
            Class::Renewal => None,
            Class::Acquire | Class::Work => Some(self.others.lock().await),
        };
        let mut state = self.state.lock().await;
        drop(turn);
        if self.closed.load(Ordering::Relaxed) {
            return Err(error::closed());
        }
        if state.unsettled {
            // Time is read when a checkout begins and may pass only while the file is busy. So the statement
            // before must be over.
            if let Some(native) = &mut state.native
                && native.ping().await.is_err()
            {
                state.native = None;
            }
            state.unsettled = false;
        }
        if state.native.is_none() {
            state.native = Some(opened(&self.lock_file).await?);
        }
        Ok(Checkout { state })
    }

    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let native = self.state.lock().await.native.take();
        if let Some(native) = native
            && let Err(error) = native.close().await
        {
            tracing::debug!(%error, "sqlite: closing");
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connection({})", self.lock_file.path.display())
    }
}

/// The right to use the connection, until it is dropped.
pub(crate) struct Checkout<'a> {
    state: MutexGuard<'a, State>,
}

impl Checkout<'_> {
    /// For one statement, whose answer goes to [`settle`](Self::settle).
    pub(crate) fn native(&mut self) -> &mut SqliteConnection {
        self.state.unsettled = true;
        let native = self.state.native.as_mut();
        native.expect(
            "a checkout begins with a connection, and ends with the error that takes it away",
        )
    }

    /// Takes the statement's answer, and drops the connection if the error says so.
    pub(crate) fn settle<T>(&mut self, answer: sqlx::Result<T>) -> Result<T> {
        self.state.unsettled = false;
        answer.map_err(|cause| {
            let failure = error::failed(cause);
            if failure.link {
                self.state.native = None;
            }
            failure.error
        })
    }
}

/// Opens the file, also while other processes make it. Changing the journal mode needs the file alone, and
/// SQLite does not wait for that.
async fn opened(lock_file: &LockFile) -> Result<SqliteConnection> {
    let until = Instant::now() + OPEN_WITHIN;
    let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
    loop {
        match lock_file.open().await {
            Err(error) if error::is_busy(&error) && Instant::now() < until => {
                tokio::time::sleep(backoff.pause()).await;
            }
            opened => return opened,
        }
    }
}

/// How long a statement waits for another process's write: this makes an acquire late. The rest of the
/// second is for the write itself.
const BUSY: Duration = Duration::from_millis(900);
/// How long a file may be busy with other processes that open it.
const OPEN_WITHIN: Duration = Duration::from_secs(5);
