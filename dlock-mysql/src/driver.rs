//! MySQL driver: the record driver over the rows of a table.

use crate::{config::MysqlConfig, store::MysqlStore};
use dlock_core::driver::{
    Result,
    kit::{RecordBacked, RecordDriver},
};
use sqlx::MySqlPool;
use std::sync::atomic::Ordering;

/// Locks in a table of a MySQL or MariaDB server.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_mysql::MysqlDriver::connect("mysql://locker:secret@db.internal/orders").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MysqlDriver(RecordDriver<MysqlStore>);

impl MysqlDriver {
    /// Connects to the server that a URL names: see [`MysqlConfig`].
    ///
    /// # Errors
    /// - `Misuse`: the URL or one of its settings is invalid, or a foreign table has the table's name.
    /// - `Unavailable`: the server cannot be reached, refuses the log-in, or is read-only.
    /// - `Unsupported`: the server is too old.
    ///
    /// The driver tries once, so that a program that connects at its start learns of the failure.
    ///
    /// # Cancel safety
    /// A dropped call may leave the empty table behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_mysql::MysqlDriver::connect("mysql://locker:secret@db.internal/orders").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with a configuration built in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_mysql::{MysqlConfig, MysqlDriver};
    ///
    /// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders".parse()?;
    /// let driver = MysqlDriver::open(config.with_create(false)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: MysqlConfig) -> Result<Self> {
        Ok(Self(RecordDriver::new(MysqlStore::open(config).await?)))
    }

    /// Connects with the server, log-in and TLS settings of the application's own pool; for other settings see
    /// [`MysqlConfig`].
    ///
    /// The connections are dlock's own. A request that waits for one of the pool's, or a renewal behind the
    /// application's queries, would be late, and the lock lost; and dlock sets time limits for its sessions that the
    /// application's queries must not inherit.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(pool: dlock_mysql::sqlx::MySqlPool) -> dlock_core::driver::Result<()> {
    /// let driver = dlock_mysql::MysqlDriver::from_pool(&pool).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_pool(pool: &MySqlPool) -> Result<Self> {
        Self::open(pool.into()).await
    }

    /// How often this driver repeated an attempt because of a deadlock (1213), a locked row (1205) or a
    /// faster client.
    ///
    /// # Examples
    /// ```
    /// # async fn example(driver: dlock_mysql::MysqlDriver) -> dlock_core::driver::Result<()> {
    /// println!("{} attempts were repeated", driver.repeats());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn repeats(&self) -> u64 {
        let renewals = &self.0.store().table.repeats;
        self.0.repeats() + renewals.load(Ordering::Relaxed)
    }
}

impl RecordBacked for MysqlDriver {
    type Store = MysqlStore;

    fn record_driver(&self) -> &RecordDriver<MysqlStore> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::MysqlDriver;
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{
        HoldId, Lease, LockName, Owner,
        driver::{Acquire, DistributedLock, Release},
    };

    /// Each future is boxed and moved once. A larger one misses the allocator's caches and costs more than
    /// all our other work around a statement.
    #[tokio::test]
    async fn what_a_request_carries_with_it_is_small() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let driver = MysqlDriver::connect(&server.url()).await.unwrap();
        let name = LockName::new("n").unwrap();
        let (owner, hold) = (Owner::from_seed("us"), HoldId::from_bits(1));
        let (lease, give_up) = (
            Lease::default(),
            driver.0.store().table.connections.default_call().give_up,
        );
        let acquire = Acquire::new(name.clone(), owner, hold, lease, give_up);
        let release = Release::new(name, owner, hold);
        let (acquiring, releasing) = (driver.acquire(&acquire), driver.release(&release));
        let sizes = [size_of_val(&*acquiring), size_of_val(&*releasing)];
        assert!(sizes.iter().all(|size| *size <= 1024), "{sizes:?}");
    }
}
