//! Wake-ups between processes: a release touches a file beside the database, and waiters watch it.
//!
//! A name has one of [`FILES`] files, by a hash that every process computes alike. A waiter first watches
//! the file, and then writes into the record that it waits. That second statement fails if the name is free
//! by then, so no release falls between the two. A release touches the file only where the record shows a
//! waiter. A waiter for another name of the same file polls once in vain.
//!
//! The inotify instance begins with the first waiter: a user has only some hundred instances, and most
//! clients never wait.

use crate::folder::Folder;
use async_trait::async_trait;
use dlock_core::{
    LockName,
    driver::{
        Ticket, WakeUp,
        kit::{Waiters, WakeUps},
    },
};
use futures_core::stream::BoxStream;
use parking_lot::Mutex;
use rustix::{
    fd::OwnedFd,
    fs::inotify::{self, CreateFlags, ReadFlags, Reader},
    io::Errno,
};
use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    mem::MaybeUninit,
    path::Path,
    sync::{Arc, Weak},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
    task::AbortHandle,
};

/// The tickets that wait, and the task that reads releases for them.
pub(crate) struct Listener(Arc<Shared>);

struct Shared {
    folder: Folder,
    waiting: Mutex<Waiting>,
    wake_ups: WakeUps,
    /// That of the client. A waiter's may end before.
    runtime: Handle,
}

struct Waiting {
    files: HashMap<usize, Watched>,
    watcher: Option<Watcher>,
    /// The warning that there is no watcher was logged.
    told: bool,
}

/// One file, and the tickets that wait for its names.
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

impl Listener {
    /// For that database. With `on` false no waiter is ever woken.
    pub(crate) fn new(database: &Path, on: bool) -> Self {
        let wake_ups = WakeUps::new();
        if !on {
            wake_ups.close();
        }
        let waiting = Waiting {
            files: HashMap::new(),
            watcher: None,
            told: false,
        };
        let shared = Shared {
            folder: Folder::of(database),
            waiting: Mutex::new(waiting),
            wake_ups,
            runtime: Handle::current(),
        };
        Self(Arc::new(shared))
    }

    /// Whether a ticket of this client waits on a name.
    pub(crate) fn hears(&self, name: &LockName) -> bool {
        self.0.waiting.lock().knows(name)
    }

    /// Wakes the waiters of a name that may be free now.
    pub(crate) fn wake(&self, name: &LockName) {
        match self.0.folder.touch(file_of(name)) {
            Ok(()) => {}
            // A file that does not exist has no watchers.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::debug!(%error, folder = ?self.0.folder, "sqlite: waiters are not woken");
            }
        }
    }

    /// Ends the stream, the watches and their task.
    pub(crate) fn close(&self) {
        let mut waiting = self.0.waiting.lock();
        self.0.wake_ups.close();
        waiting.files.clear();
        waiting.watcher = None;
    }
}

#[async_trait]
impl Waiters for Listener {
    fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.0.wake_ups.stream()
    }

    /// Call it inside a runtime.
    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        let file = file_of(name);
        let waiting = &mut *self.0.waiting.lock();
        let is_full = !waiting.knows(name) && waiting.names() >= MOST;
        if is_full || self.0.wake_ups.is_closed() {
            return false;
        }
        let watch = match waiting.files.get(&file) {
            Some(watched) => Ok(watched.watch),
            None => self.0.watch(waiting, file),
        };
        match watch {
            Ok(watch) => {
                let names = HashMap::new();
                let watched = waiting.files.entry(file);
                let watched = watched.or_insert(Watched { watch, names });
                let tickets = watched.names.entry(name.clone()).or_default();
                tickets.insert(ticket);
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut waiting.told, true) {
                    tracing::warn!(%error, "sqlite: no wake-ups from other processes, so waiters poll every 100 ms; see fs.inotify in sysctl, and the owner of FILE.wake");
                }
                false
            }
        }
    }

    /// The last ticket of a file ends its watch.
    fn forget(&self, name: &LockName, ticket: Ticket) {
        let file = file_of(name);
        let mut waiting = self.0.waiting.lock();
        let Some(watched) = waiting.files.get_mut(&file) else {
            return;
        };
        if let Some(tickets) = watched.names.get_mut(name) {
            tickets.remove(&ticket);
        }
        watched.names.retain(|_, tickets| !tickets.is_empty());
        if watched.names.is_empty() {
            let watch = watched.watch;
            waiting.files.remove(&file);
            waiting.unwatch(watch);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({} names)", self.0.waiting.lock().names())
    }
}

impl Waiting {
    fn knows(&self, name: &LockName) -> bool {
        let watched = self.files.get(&file_of(name));
        watched.is_some_and(|watched| watched.names.contains_key(name))
    }

    fn names(&self) -> usize {
        self.files.values().map(|file| file.names.len()).sum()
    }

    fn unwatch(&self, watch: i32) {
        if let Some(watcher) = &self.watcher {
            // This fails only if the file is gone, and its watch with it.
            let _ = inotify::remove_watch(&*watcher.inotify, watch);
        }
    }
}

impl Shared {
    /// Watches a file, and makes it if it is missing; the first watch makes the watcher.
    fn watch(self: &Arc<Self>, waiting: &mut Waiting, file: usize) -> io::Result<i32> {
        let watcher = match &mut waiting.watcher {
            Some(watcher) => watcher,
            none => {
                let _entered = self.runtime.enter();
                let inotify = Arc::new(instance()?);
                let task = tokio::spawn(follow(Arc::downgrade(self), inotify.clone()));
                none.insert(Watcher {
                    inotify,
                    task: task.abort_handle(),
                })
            }
        };
        self.folder.watch(&*watcher.inotify, file)
    }

    fn heard(self: &Arc<Self>, watch: i32, what: ReadFlags) {
        let mut waiting = self.waiting.lock();
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.wake_ups.send(WakeUp::Resync);
        }
        let found = waiting.files.iter().find(|(_, it)| it.watch == watch);
        let Some((&file, watched)) = found else {
            return;
        };
        if !what.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF) {
            for name in watched.names.keys() {
                self.wake_ups.send(WakeUp::Free(name.clone()));
            }
            return;
        }
        // A cleaner removed the file. The next release touches the file that is made now; the last one may
        // have touched none.
        waiting.unwatch(watch);
        let again = self.watch(&mut waiting, file).ok();
        match (again, waiting.files.get_mut(&file)) {
            (Some(again), Some(watched)) => watched.watch = again,
            _ => drop(waiting.files.remove(&file)),
        }
        self.wake_ups.send(WakeUp::Resync);
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

/// Reads the events of touched files until the driver is closed, which ends this task.
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

/// The file of a name. Fixed for good: processes of different versions meet by it (FNV-1a).
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

/// Only files with a waiter are made. With fewer files, names that are waited for at the same time wake
/// each other.
const FILES: usize = 1_024;
/// Names waited on. Waiters of further names poll.
const MOST: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::{FILES, Listener, file_of};
    use dlock_core::{
        LockName,
        driver::{Ticket, WakeUp, kit::Waiters},
    };
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
        let wake_ups = Listener::new(&database, true);
        assert!(wake_ups.listen(&name("a"), ticket(1)).await);
        let wake = folder.path().join("locks.db.wake");
        assert_eq!(mode(&wake), 0o2770);
        assert_eq!(mode(&wake.join("0c0")), 0o660);
    }

    #[tokio::test]
    async fn a_waiter_is_woken_also_after_its_file_was_removed() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("locks.db");
        fs::write(&database, "").unwrap();
        let (waiter, releaser) = (
            Listener::new(&database, true),
            Listener::new(&database, true),
        );
        let mut wake_ups = waiter.stream();
        let orders = name("orders");
        releaser.wake(&orders); // no client listens
        assert!(waiter.listen(&orders, ticket(1)).await);
        assert!(waiter.listen(&orders, ticket(2)).await);
        let free = Some(WakeUp::Free(orders.clone()));
        releaser.wake(&orders);
        assert_eq!(wake_ups.next().await, free);
        fs::remove_dir_all(folder.path().join("locks.db.wake")).unwrap();
        // Losing its last name changes the file too.
        while wake_ups.next().await != Some(WakeUp::Resync) {}
        releaser.wake(&orders);
        assert_eq!(wake_ups.next().await, free);
        waiter.forget(&orders, ticket(1));
        releaser.wake(&orders);
        assert_eq!(wake_ups.next().await, free);
        waiter.forget(&orders, ticket(2));
        releaser.wake(&orders);
        waiter.close();
        assert_eq!(wake_ups.next().await, None);
    }

    #[tokio::test]
    async fn no_waiter_is_woken_where_wake_ups_are_off() {
        let folder = tempfile::tempdir().unwrap();
        let off = Listener::new(&folder.path().join("locks.db"), false);
        assert!(!off.listen(&name("a"), ticket(1)).await);
        assert_eq!(off.stream().next().await, None);
    }
}
