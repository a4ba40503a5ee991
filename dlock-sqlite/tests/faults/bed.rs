//! A file of its own, and short names for the calls of a driver.

use super::LIMIT;
use dlock_conformance::testbed::worker::Worker;
use dlock_core::{
    Clock, HoldId, Lease, LockName, Owner,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Held, Lane, Release, Released,
        Renew, Renewed, Ticket,
    },
};
use dlock_sqlite::{SqliteConfig, SqliteDriver};
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{
    fs, num::NonZeroU64, os::unix::fs::PermissionsExt, path::Path, path::PathBuf,
    sync::atomic::AtomicU64, sync::atomic::Ordering, time::Duration,
};
use tempfile::TempDir;

pub(super) struct Bed {
    pub(super) folder: TempDir,
    pub(super) file: PathBuf,
}

impl Bed {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("locks.db");
        Self { folder, file }
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) async fn driver(&self) -> SqliteDriver {
        open(&self.file).await
    }

    /// Behind the driver's back.
    pub(super) async fn sql(&self, sql: &str) {
        let mut native = native(&self.file).await;
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
        sql.execute(&mut native).await.unwrap();
        native.close().await.unwrap();
    }

    pub(super) fn worker(&self, job: &str, more: &[(&str, &str)]) -> Worker {
        let file = self.file.to_str().unwrap();
        Worker::spawn(job, &[&[("file", file)], more].concat()).unwrap()
    }
}

pub(super) async fn open(file: &Path) -> SqliteDriver {
    SqliteDriver::open(SqliteConfig::new(file)).await.unwrap()
}

pub(super) async fn refused(file: &Path) -> DriverError {
    let opened = SqliteDriver::open(SqliteConfig::new(file)).await;
    opened.unwrap_err()
}

pub(super) async fn native(file: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(file);
    options.create_if_missing(true).connect().await.unwrap()
}

pub(super) fn name(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

pub(super) fn acquire(lock: &str, lease: Duration) -> Acquire {
    static HOLDS: AtomicU64 = AtomicU64::new(1);
    let hold = HoldId::from_bits(HOLDS.fetch_add(1, Ordering::Relaxed));
    let owner = Owner::from_seed(&format!("{hold} {}", std::process::id()));
    let lease = Lease::fixed(lease);
    let give_up = Clock::boot().now() + LIMIT;
    Acquire::new(name(lock), owner, hold, lease, give_up)
}

pub(super) fn again(first: &Acquire) -> Acquire {
    let mut again = acquire(first.name.as_str(), first.lease.length());
    again.owner = first.owner;
    again
}

pub(super) async fn granted(driver: &SqliteDriver, req: &Acquire) -> Grant {
    match driver.acquire(req).await.unwrap() {
        Acquired::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

pub(super) async fn held(driver: &SqliteDriver, req: &Acquire) -> Held {
    match driver.acquire(req).await.unwrap() {
        Acquired::Held(held) => held,
        other => panic!("{other:?}"),
    }
}

pub(super) async fn release(driver: &SqliteDriver, req: &Acquire) -> Released {
    let released = Release::new(req.name.clone(), req.owner, req.hold);
    driver.release(&released).await.unwrap()
}

pub(super) async fn frees(driver: &SqliteDriver, req: &Acquire) {
    let released = release(driver, req).await;
    assert!(matches!(released, Released::Freed), "{released:?}");
}

pub(super) async fn renew(driver: &SqliteDriver, req: &Acquire) -> Result<Renewed, DriverError> {
    let lease = Some(req.lease.length());
    let entry = [Renew::new(req.name.clone(), req.owner, req.hold, lease)];
    let answers = driver.renew(Lane::default(), &entry, Clock::boot().now() + LIMIT);
    answers.await?.pop().unwrap()
}

pub(super) fn ticket() -> Ticket {
    Ticket(NonZeroU64::MIN)
}

/// All of a file and what stands beside it.
pub(super) fn bytes(file: &Path) -> Vec<u8> {
    fs::read(file).unwrap()
}

pub(super) fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}
