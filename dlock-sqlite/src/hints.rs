//! Wake-ups between processes: files beside the database that a release touches and waiters watch.
//!
//! A name has one of [`FILES`] files, by a hash that every process computes alike. A waiter watches the file first and lets the record say
//! that somebody waits second, in a statement that fails when the name is free by then: so no release falls between the two. A release
//! touches the file only where the record says so. Who waits for another name of the same file looks once in vain.
//!
//! The inotify instance begins with the first who waits: a user has only some hundred, and most clients never wait.

use dlock_core::{Hint, LockName, Ticket};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use rustix::{
    fd::OwnedFd,
    fs::{
        AtFlags, CWD, FileType, Mode, Timespec, Timestamps, UTIME_NOW,
        inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
        mknodat, utimensat,
    },
    io::Errno,
};
use std::{
    collections::{HashMap, HashSet},
    fmt, fs, io,
    mem::MaybeUninit,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
    task::AbortHandle,
};

/// Who waits, and the task that hears of releases for them.
pub(crate) struct Hints {
    shared: Arc<Shared>,
    stream: Mutex<Option<mpsc::Receiver<Hint>>>,
}

/// Whether a name is listened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ear {
    /// It is not, and nobody will be woken.
    Deaf,
    /// From now on: a release just before was not heard.
    New,
    /// It was before already.
    Open,
}

struct Shared {
    /// `FILE.wake`.
    folder: PathBuf,
    /// The database's, which the files' follow: who may use it may wake and be woken.
    mode: u32,
    waiting: Mutex<Waiting>,
    /// A hint found the stream full.
    missed: AtomicBool,
}

struct Waiting {
    files: HashMap<usize, Watched>,
    names: usize,
    watcher: Option<Watcher>,
    /// It was said once that there is no watcher.
    told: bool,
    /// Gone when closed, or when nobody is to be woken.
    hints: Option<mpsc::Sender<Hint>>,
}

/// One file and who waits for its names.
struct Watched {
    watch: i32,
    names: HashMap<LockName, HashSet<Ticket>>,
}

struct Watcher {
    inotify: Arc<AsyncFd<OwnedFd>>,
    task: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Hints {
    /// For that database. With `on` false nobody is ever woken.
    pub(crate) fn new(database: &Path, on: bool) -> Self {
        let (hints, stream) = mpsc::channel(UNREAD);
        let waiting = Waiting {
            files: HashMap::new(),
            names: 0,
            watcher: None,
            told: false,
            hints: on.then_some(hints),
        };
        let mut folder = database.as_os_str().to_owned();
        folder.push(".wake");
        let mode = fs::metadata(database).map_or(0o600, |status| status.permissions().mode());
        let shared = Shared {
            folder: folder.into(),
            mode: mode & 0o666,
            waiting: Mutex::new(waiting),
            missed: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            stream: Mutex::new(Some(stream)),
        }
    }

    /// A ticket waits on a name from now on. Inside a runtime.
    pub(crate) fn listen(&self, name: &LockName, ticket: Ticket) -> Ear {
        let file = file_of(name);
        let waiting = &mut *self.shared.waiting();
        if waiting.hints.is_none() {
            return Ear::Deaf;
        }
        if let Some(watched) = waiting.files.get_mut(&file) {
            let known = watched.names.contains_key(name);
            if !known && waiting.names >= MOST {
                return Ear::Deaf;
            }
            waiting.names += usize::from(!known);
            let tickets = watched.names.entry(name.clone()).or_default();
            tickets.insert(ticket);
            return if known { Ear::Open } else { Ear::New };
        }
        let watch = match self.shared.watch(waiting, file) {
            Ok(watch) => watch,
            Err(error) => {
                if !std::mem::replace(&mut waiting.told, true) {
                    tracing::warn!(%error, "sqlite: no wake-ups from other processes, so waiters look every 100 ms; see fs.inotify in sysctl");
                }
                return Ear::Deaf;
            }
        };
        let names = HashMap::from([(name.clone(), HashSet::from([ticket]))]);
        waiting.files.insert(file, Watched { watch, names });
        waiting.names += 1;
        Ear::New
    }

    /// Whether a ticket of ours waits on a name.
    pub(crate) fn hears(&self, name: &LockName) -> bool {
        let waiting = self.shared.waiting();
        let watched = waiting.files.get(&file_of(name));
        watched.is_some_and(|watched| watched.names.contains_key(name))
    }

    /// A ticket is used up or left: with the last one of a file its watch ends.
    pub(crate) fn forget(&self, name: &LockName, ticket: Ticket) {
        let file = file_of(name);
        let mut waiting = self.shared.waiting();
        let Some(watched) = waiting.files.get_mut(&file) else {
            return;
        };
        let Some(tickets) = watched.names.get_mut(name) else {
            return;
        };
        if !tickets.remove(&ticket) || !tickets.is_empty() {
            return;
        }
        watched.names.remove(name);
        let (unwatched, watch) = (watched.names.is_empty(), watched.watch);
        waiting.names -= 1;
        if unwatched {
            waiting.files.remove(&file);
            waiting.unwatch(watch);
        }
    }

    /// Wakes whoever waits on a name that is perhaps free now.
    pub(crate) fn wake(&self, name: &LockName) {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        let path = self.shared.path(file_of(name));
        match utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW) {
            // Without the file nobody watches.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => {
                tracing::debug!(%error, path = %path.display(), "sqlite: waiters are not woken");
            }
        }
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, Hint> {
        let taken = self
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(hints) = taken else {
            return stream::empty().boxed();
        };
        let shared = Arc::downgrade(&self.shared);
        stream::unfold((hints, shared), |(mut hints, shared)| async move {
            let missed = |shared: Arc<Shared>| shared.missed.swap(false, Ordering::Relaxed);
            // What did not fit was dropped while the stream was full, so this is read before it runs dry.
            let hint = match shared.upgrade().is_some_and(missed) {
                true => Hint::LookAgain,
                false => hints.recv().await?,
            };
            Some((hint, (hints, shared)))
        })
        .boxed()
    }

    /// Ends the stream, the watches and their task.
    pub(crate) fn close(&self) {
        let mut waiting = self.shared.waiting();
        waiting.hints = None;
        waiting.files.clear();
        waiting.names = 0;
        waiting.watcher = None;
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Hints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hints({} names)", self.shared.waiting().names)
    }
}

impl Waiting {
    fn unwatch(&self, watch: i32) {
        if let Some(watcher) = &self.watcher {
            // Only a file that is gone has no watch any more.
            let _ = inotify::remove_watch(&*watcher.inotify, watch);
        }
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, file: usize) -> PathBuf {
        self.folder.join(format!("{file:03x}"))
    }

    /// Watches a file, made where it is not there; the first one makes the watcher.
    fn watch(self: &Arc<Self>, waiting: &mut Waiting, file: usize) -> io::Result<i32> {
        let watcher = match &mut waiting.watcher {
            Some(watcher) => watcher,
            none => {
                let inotify = Arc::new(instance()?);
                let task = tokio::spawn(follow(Arc::downgrade(self), inotify.clone()));
                none.insert(Watcher {
                    inotify,
                    task: task.abort_handle(),
                })
            }
        };
        self.add_watch(&watcher.inotify, file)
    }

    fn add_watch(&self, inotify: &AsyncFd<OwnedFd>, file: usize) -> io::Result<i32> {
        let path = self.path(file);
        match inotify::add_watch(inotify, &path, WATCHED) {
            Err(Errno::NOENT) => {
                self.make(&path)?;
                Ok(inotify::add_watch(inotify, &path, WATCHED)?)
            }
            done => Ok(done?),
        }
    }

    /// Makes a file for whoever may use the database, whatever the umask. Others may be making it too.
    fn make(&self, path: &Path) -> io::Result<()> {
        let mode = self.mode | (self.mode & 0o444) >> 2;
        let folder = fs::DirBuilder::new().mode(mode).create(&self.folder);
        match folder {
            Ok(()) => {
                // Where the database's folder gives its group to what is made in it, this one does too.
                let passed_on = fs::metadata(&self.folder)?.permissions().mode() & 0o2000;
                let mode = fs::Permissions::from_mode(mode | passed_on);
                fs::set_permissions(&self.folder, mode)?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let mode = Mode::from_raw_mode(self.mode);
        match mknodat(CWD, path, FileType::RegularFile, mode, 0) {
            Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(self.mode)),
            Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn heard(&self, watch: i32, what: ReadFlags) {
        let mut waiting = self.waiting();
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.emit(&waiting, Hint::LookAgain);
        }
        let found = waiting.files.iter().find(|(_, it)| it.watch == watch);
        let Some((&file, watched)) = found else {
            return;
        };
        if !what.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF) {
            for name in watched.names.keys() {
                self.emit(&waiting, Hint::Free(name.clone()));
            }
            return;
        }
        // A cleaner took the file away: the next release touches the one that is made now, the last one may have touched none.
        waiting.unwatch(watch);
        let again = waiting.watcher.as_ref();
        let again = again.and_then(|watcher| self.add_watch(&watcher.inotify, file).ok());
        match (again, waiting.files.get_mut(&file)) {
            (Some(again), Some(watched)) => watched.watch = again,
            _ => {
                let lost = waiting.files.remove(&file);
                waiting.names -= lost.map_or(0, |lost| lost.names.len());
            }
        }
        self.emit(&waiting, Hint::LookAgain);
    }

    fn emit(&self, waiting: &Waiting, hint: Hint) {
        if let Some(hints) = &waiting.hints
            && hints.try_send(hint).is_err()
        {
            self.missed.store(true, Ordering::Relaxed);
        }
    }
}

#[allow(
    deprecated,
    reason = "what it warns of is a descriptor that is closed or exchanged underneath, which an owned one cannot be; its successor is unsafe"
)]
fn instance() -> io::Result<AsyncFd<OwnedFd>> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    AsyncFd::with_interest(inotify, Interest::READABLE)
}

/// Hears of touched files until the driver is closed, which ends this task.
async fn follow(shared: Weak<Shared>, inotify: Arc<AsyncFd<OwnedFd>>) {
    let mut buffer = [MaybeUninit::uninit(); 4_096];
    while let Ok(mut ready) = inotify.readable().await {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut events = Reader::new(&*inotify, &mut buffer);
        loop {
            match events.next() {
                Ok(event) => shared.heard(event.wd(), event.events()),
                Err(Errno::INTR) => {}
                Err(_) => break ready.clear_ready(),
            }
        }
    }
}

/// Which file a name has. Fixed for good: processes of different versions meet by it (FNV-1a).
fn file_of(name: &LockName) -> usize {
    let hash = name
        .as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3_u64)
        });
    let [low, high, ..] = (hash ^ hash >> 32).to_le_bytes();
    usize::from(u16::from_le_bytes([low, high])) % FILES
}

/// Of which only those are made that somebody waited at. With 64, names that were waited for at the same time woke each other in tests.
const FILES: usize = 1_024;
/// Touched, taken away, or moved; never through a symlink, which somebody else may have put there.
const WATCHED: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::DONT_FOLLOW);
/// Hints that the core has not read yet. More are one [`Hint::LookAgain`].
const UNREAD: usize = 1_024;
/// Names waited on. Waiters of more only look.
const MOST: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::{Ear, FILES, Hints, file_of};
    use dlock_core::{Hint, LockName, Ticket};
    use futures_util::StreamExt;
    use std::{fs, num::NonZeroU64, os::unix::fs::PermissionsExt, path::Path};

    fn name(text: &str) -> LockName {
        LockName::new(text).unwrap()
    }

    fn ticket(number: u64) -> Ticket {
        Ticket(NonZeroU64::new(number).unwrap())
    }

    #[test]
    fn the_file_of_a_name_is_pinned() {
        for (text, file) in [("a", 192), ("orders:42", 166), ("žluť", 312)] {
            assert_eq!(file_of(&name(text)), file, "{text}");
        }
        let used: std::collections::HashSet<_> = (0..20_000)
            .map(|i| file_of(&name(&i.to_string())))
            .collect();
        assert_eq!(used.len(), FILES);
    }

    #[tokio::test]
    async fn the_group_of_the_folder_is_that_of_the_wake_files_too() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o2770)).unwrap();
        let database = folder.path().join("locks.db");
        fs::write(&database, "").unwrap();
        fs::set_permissions(&database, fs::Permissions::from_mode(0o660)).unwrap();
        let hints = Hints::new(&database, true);
        assert_eq!(hints.listen(&name("a"), ticket(1)), Ear::New);
        assert_eq!(mode(&folder.path().join("locks.db.wake")), 0o2770);
        let file = hints.shared.path(file_of(&name("a")));
        assert_eq!(mode(&file), 0o660);
    }

    #[tokio::test]
    async fn whoever_waits_is_woken_also_after_its_file_was_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("locks.db");
        fs::write(&database, "").unwrap();
        let (waiter, releaser) = (Hints::new(&database, true), Hints::new(&database, true));
        let mut hints = waiter.stream();
        let orders = name("orders");
        releaser.wake(&orders); // nobody listens
        assert_eq!(waiter.listen(&orders, ticket(1)), Ear::New);
        assert_eq!(waiter.listen(&orders, ticket(2)), Ear::Open);
        let free = Some(Hint::Free(orders.clone()));
        releaser.wake(&orders);
        assert_eq!(hints.next().await, free);
        fs::remove_dir_all(folder.path().join("locks.db.wake")).unwrap();
        // To lose its last name is a change of the file too.
        while hints.next().await != Some(Hint::LookAgain) {}
        releaser.wake(&orders);
        assert_eq!(hints.next().await, free);
        waiter.forget(&orders, ticket(1));
        releaser.wake(&orders);
        assert_eq!(hints.next().await, free);
        waiter.forget(&orders, ticket(2));
        releaser.wake(&orders);
        waiter.close();
        assert_eq!(hints.next().await, None);
    }

    #[tokio::test]
    async fn nobody_is_woken_where_it_was_not_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let off = Hints::new(&folder.path().join("locks.db"), false);
        assert_eq!(off.listen(&name("a"), ticket(1)), Ear::Deaf);
        assert_eq!(off.stream().next().await, None);
    }
}
