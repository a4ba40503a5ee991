//! The suite over the record driver: the tutorial's store, a directory of files, in real time; once
//! polled, once with wake-ups.

#[path = "../../dlock-core/examples/directory.rs"]
#[allow(dead_code)] // its `main`
mod directory;

use async_trait::async_trait;
use directory::Directory;
use dlock_conformance::{
    Failure, Fixture, MakeFixture, Mutants, Network, Records, Server, StoreTime, Time, Unsupported,
    main as suite,
};
use dlock_core::{
    LockName,
    driver::{
        Capabilities, DistributedLock, Ticket, Wake, WakeUp,
        kit::{Call, Listed, Read, RecordDriver, RecordStore, Waiters, Write, Written},
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use std::{
    fs,
    process::ExitCode,
    sync::{Arc, OnceLock},
};
use tempfile::TempDir;
use tokio::sync::broadcast::{self, error::RecvError};

fn main() -> ExitCode {
    let polled = Files { woken: false };
    let woken = Files { woken: true };
    suite(vec![Box::new(polled), Box::new(woken)], Mutants::Off)
}

#[derive(Clone, Copy)]
struct Files {
    woken: bool,
}

#[async_trait]
impl MakeFixture for Files {
    fn name(&self) -> &str {
        if self.woken {
            "directory-woken"
        } else {
            "directory"
        }
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let folder = tempfile::tempdir()?;
        Ok(Arc::new(Folder {
            folder,
            files: *self,
        }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        let directory = Directory::open(url)?;
        Ok(if self.woken {
            Arc::new(RecordDriver::new(Woken::new(directory)))
        } else {
            Arc::new(RecordDriver::new(directory))
        })
    }
}

struct Folder {
    folder: TempDir,
    files: Files,
}

#[async_trait]
impl Fixture for Folder {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        self.files
            .connect(&self.folder.path().to_string_lossy())
            .await
    }

    fn url(&self) -> Result<String, Unsupported> {
        Ok(self.folder.path().to_string_lossy().into_owned())
    }

    fn network(&self) -> Result<&dyn Network, Unsupported> {
        Err(Unsupported(
            "nothing stands between the driver and its files",
        ))
    }

    fn server(&self) -> Result<&dyn Server, Unsupported> {
        Err(Unsupported("there is no server"))
    }

    fn records(&self) -> Result<&dyn Records, Unsupported> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, Unsupported> {
        Err(Unsupported("it reads the machine's clock"))
    }
}

#[async_trait]
impl Records for Folder {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        fs::remove_file(Directory::open(self.folder.path())?.file(name))?;
        Ok(())
    }

    async fn flush(&self) -> Result<(), Failure> {
        fs::remove_dir_all(self.folder.path().join("records"))?;
        Ok(())
    }
}

/// The same store; releases wake the waiters of this process, and other processes poll.
#[derive(Debug)]
struct Woken {
    directory: Directory,
    capabilities: Capabilities,
    /// The wake-ups for this driver's waiters; dropped when it is closed.
    heard: std::sync::Mutex<Option<broadcast::Receiver<LockName>>>,
    closed: Arc<tokio::sync::Notify>,
}

impl Woken {
    fn new(directory: Directory) -> Self {
        let mut capabilities = directory.capabilities().clone();
        capabilities.wake = Wake::Notify;
        Self {
            directory,
            capabilities,
            heard: std::sync::Mutex::new(Some(freed().subscribe())),
            closed: Arc::default(),
        }
    }
}

/// The names that this process has released. Names are fresh for each case, so one channel serves all
/// directories.
fn freed() -> &'static broadcast::Sender<LockName> {
    static FREED: OnceLock<broadcast::Sender<LockName>> = OnceLock::new();
    FREED.get_or_init(|| broadcast::channel(64).0)
}

#[async_trait]
impl RecordStore for Woken {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> dlock_core::driver::Result<Read> {
        self.directory.read(names, call).await
    }

    async fn write(
        &self,
        writes: &[Write],
        call: Call,
    ) -> dlock_core::driver::Result<Vec<Written>> {
        self.directory.write(writes, call).await
    }

    async fn list(
        &self,
        prefix: &str,
        after: &[u8],
        limit: usize,
    ) -> dlock_core::driver::Result<Listed> {
        self.directory.list(prefix, after, limit).await
    }

    async fn forget(&self, after: &[u8]) -> dlock_core::driver::Result<Option<Vec<u8>>> {
        self.directory.forget(after).await
    }

    fn waiters(&self) -> Option<&dyn Waiters> {
        Some(self)
    }

    async fn notify(&self, name: &LockName) {
        drop(freed().send(name.clone())); // an error: no driver listens
    }

    async fn close(&self) {
        self.closed.notify_one();
    }
}

#[async_trait]
impl Waiters for Woken {
    async fn listen(&self, _: &LockName, _: Ticket) -> bool {
        true
    }

    fn forget(&self, _: &LockName, _: Ticket) {}

    fn stream(&self) -> BoxStream<'static, WakeUp> {
        let heard = self.heard.lock().expect("no test panics with it").take();
        let closed = Arc::clone(&self.closed);
        stream::unfold(heard, move |heard| {
            let closed = Arc::clone(&closed);
            async move {
                let mut heard = heard?;
                let wake_up = tokio::select! {
                    () = closed.notified() => return None,
                    freed = heard.recv() => match freed {
                        Ok(name) => WakeUp::Free(name),
                        Err(RecvError::Lagged(_)) => WakeUp::Resync,
                        Err(RecvError::Closed) => return None,
                    },
                };
                Some((wake_up, Some(heard)))
            }
        })
        .boxed()
    }
}
