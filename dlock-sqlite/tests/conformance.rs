//! The suite over a real file.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, MakeFixture, Mutants, Network, Records, Server, StoreTime,
    Time, Unsupported, main as suite,
};
use dlock_core::{
    Broken, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, WakeUp,
    },
};
use dlock_sqlite::SqliteDriver;
use futures_core::stream::BoxStream;
use parking_lot::Mutex;
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{collections::HashSet, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};
use tempfile::TempDir;

fn main() -> ExitCode {
    suite(vec![Box::new(Sqlite)], Mutants::Listed)
}

struct Sqlite;

#[async_trait]
impl MakeFixture for Sqlite {
    fn name(&self) -> &str {
        "sqlite"
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let folder = tempfile::tempdir()?;
        Ok(Arc::new(LockFolder { folder }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(SqliteDriver::connect(url).await?))
    }
}

/// One file, of which every driver has its own connection.
struct LockFolder {
    folder: TempDir,
}

impl LockFolder {
    fn address(&self) -> String {
        format!("sqlite:{}/locks.db", self.folder.path().display())
    }

    async fn native(&self) -> Result<SqliteConnection, Failure> {
        let file = self.folder.path().join("locks.db");
        let native = SqliteConnectOptions::new().filename(file).connect().await;
        native.map_err(Failure::new)
    }
}

#[async_trait]
impl Fixture for LockFolder {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        Sqlite.connect(&self.address()).await
    }

    fn url(&self) -> Result<String, Unsupported> {
        Ok(self.address())
    }

    fn network(&self) -> Result<&dyn Network, Unsupported> {
        Ok(self)
    }

    fn server(&self) -> Result<&dyn Server, Unsupported> {
        Err(Unsupported(
            "a file has no server: stopping one process stops no other",
        ))
    }

    fn records(&self) -> Result<&dyn Records, Unsupported> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, Unsupported> {
        Err(Unsupported("the boot clock cannot be set"))
    }
}

#[async_trait]
impl Records for LockFolder {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        let mut native = self.native().await?;
        let gone = "UPDATE locks SET owner = NULL, holds = '', until = 0, version = version + 1 WHERE name = ?";
        let gone = sqlx::query(gone).bind(name.as_str().as_bytes());
        gone.execute(&mut native).await.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }

    async fn flush(&self) -> Result<(), Failure> {
        let mut native = self.native().await?;
        let gone = sqlx::query("DELETE FROM locks").execute(&mut native).await;
        gone.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }
}

/// Between a program and its file there is no wire, but a queue, a thread and a disk, which can be as slow
/// and as silent.
#[async_trait]
impl Network for LockFolder {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let script = Arc::new(Mutex::new(Script::default()));
        let driver = Slow {
            inner: self.driver().await?,
            script: Arc::clone(&script),
        };
        let wake = self.folder.path().join("locks.db.wake");
        Ok((Arc::new(driver), Box::new(ScriptedFaults { script, wake })))
    }
}

#[derive(Debug, Default)]
struct Script {
    lost: Option<Call>,
    held_back: Option<(Call, Duration)>,
    down: bool,
    delay: Duration,
    /// The names that were waited for.
    waits: HashSet<LockName>,
}

struct ScriptedFaults {
    script: Arc<Mutex<Script>>,
    wake: PathBuf,
}

impl ScriptedFaults {
    fn write(&self, how: impl FnOnce(&mut Script)) -> Result<(), Failure> {
        how(&mut self.script.lock());
        Ok(())
    }
}

#[async_trait]
impl Faults for ScriptedFaults {
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        self.write(|script| script.lost = Some(of))
    }

    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        self.write(|script| script.held_back = Some((of, by)))
    }

    /// Removes the file that this driver's waiters watch, as a cleaner of old files does.
    async fn cut(&self) -> Result<(), Failure> {
        self.write(|script| {
            for name in script.waits.drain() {
                drop(std::fs::remove_file(self.wake.join(file_of(&name))));
            }
        })
    }

    async fn down(&self) -> Result<(), Failure> {
        self.write(|script| script.down = true)
    }

    async fn up(&self) -> Result<(), Failure> {
        self.write(|script| script.down = false)
    }

    async fn delay(&self, by: Duration) -> Result<(), Failure> {
        self.write(|script| script.delay = by)
    }
}

/// The file that a release of that name touches: fixed for good, so written down here once more.
fn file_of(name: &LockName) -> String {
    let hash = name
        .as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3_u64)
        });
    format!("{:03x}", (hash ^ hash >> 32) % 1_024)
}

/// A driver whose requests lie in a queue, whose answers are lost, whose disk is away.
#[derive(Debug)]
struct Slow {
    inner: Arc<dyn DistributedLock>,
    script: Arc<Mutex<Script>>,
}

impl Slow {
    /// Runs a request as the script says, to its end even if the caller is gone.
    async fn run<T: Send + 'static>(
        &self,
        call: Option<Call>,
        request: impl AsyncRequest<T>,
    ) -> Result<T> {
        let (down, wait, lost) = {
            let mut script = self.script.lock();
            let held_back = script.held_back.take_if(|(of, _)| Some(*of) == call);
            let lost = script.lost.take_if(|of| Some(*of) == call).is_some();
            let wait = held_back.map_or(script.delay, |(_, by)| by);
            (script.down, wait, lost)
        };
        if down {
            return Err(DriverError::unavailable("the disk is away"));
        }
        let inner = Arc::clone(&self.inner);
        let answer = tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            request.send(inner).await
        });
        let answer = answer.await.expect("drivers do not panic");
        if lost {
            return Err(DriverError::unanswered("the answer was lost"));
        }
        answer
    }
}

/// What a request does with a driver.
trait AsyncRequest<T>: Send + 'static {
    fn send(self, driver: Arc<dyn DistributedLock>) -> impl Future<Output = Result<T>> + Send;
}

impl<T, F, A> AsyncRequest<T> for F
where
    F: FnOnce(Arc<dyn DistributedLock>) -> A + Send + 'static,
    A: Future<Output = Result<T>> + Send,
{
    fn send(self, driver: Arc<dyn DistributedLock>) -> impl Future<Output = Result<T>> + Send {
        self(driver)
    }
}

#[async_trait]
impl DistributedLock for Slow {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.inner.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let req = req.clone();
        if req.ticket.is_some() {
            let mut script = self.script.lock();
            script.waits.insert(req.name.clone());
        }
        self.run(
            Some(Call::Acquire),
            |inner: Arc<dyn DistributedLock>| async move { inner.acquire(&req).await },
        )
        .await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.inner.leave(name, ticket).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let batch = batch.to_vec();
        self.run(
            Some(Call::Renew),
            move |inner: Arc<dyn DistributedLock>| async move {
                inner.renew(lane, &batch, give_up).await
            },
        )
        .await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let req = req.clone();
        self.run(
            Some(Call::Release),
            |inner: Arc<dyn DistributedLock>| async move { inner.release(&req).await },
        )
        .await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.inner.wake_ups()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let name = name.clone();
        self.run(None, |inner: Arc<dyn DistributedLock>| async move {
            inner.inspect(&name).await
        })
        .await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.inner.list(prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let name = name.clone();
        self.run(None, move |inner: Arc<dyn DistributedLock>| async move {
            inner.break_lock(&name, only).await
        })
        .await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
