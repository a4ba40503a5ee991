//! PostgreSQL driver: the record driver over the table.

use crate::{PostgresConfig, store::Table};
use dlock_core::driver::{
    Result, check_runtime,
    kit::{RecordBacked, RecordDriver},
};
use sqlx::PgPool;

/// A driver that keeps its locks in one table of a PostgreSQL server.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_postgres::PostgresDriver::connect("postgres://locker:secret@db.internal/orders").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct PostgresDriver(RecordDriver<Table>);

impl PostgresDriver {
    /// Connects to the server that a URL names.
    ///
    /// # Errors
    /// `Misuse` when the URL is wrong; otherwise as [`open`](Self::open).
    ///
    /// # Cancel safety
    /// Dropped early, nothing is connected; the table may have been made.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_postgres::PostgresDriver::connect("postgres://locker:secret@db.internal/orders").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with these settings, and makes the table if it is missing.
    ///
    /// # Errors
    /// When the server cannot be reached or used, or the table is not dlock's.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_postgres::{PostgresConfig, PostgresDriver};
    ///
    /// let config: PostgresConfig = "postgres://locker:secret@db.internal/orders".parse()?;
    /// let driver = PostgresDriver::open(config.with_create(false)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: PostgresConfig) -> Result<Self> {
        check_runtime()?;
        config.check()?;
        Ok(Self(RecordDriver::new(Table::open(config).await?)))
    }

    /// Connects with the server, log-in and TLS settings of the application's own pool; for other settings see
    /// [`PostgresConfig`].
    ///
    /// The connections are dlock's own. A request that waits for one of the pool's, or a renewal behind the
    /// application's queries, would be late; and dlock must close a connection whose answer it did not read, and listen
    /// on one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(pool: dlock_postgres::sqlx::PgPool) -> dlock_core::driver::Result<()> {
    /// let driver = dlock_postgres::PostgresDriver::from_pool(&pool).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_pool(pool: &PgPool) -> Result<Self> {
        Self::open(pool.into()).await
    }

    /// How many attempts were repeated because another client was faster, or because a row or the table was locked.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_postgres::PostgresDriver::connect("postgres://locker:secret@db.internal/orders").await?;
    /// println!("{} repeats", driver.repeats());
    /// # Ok(()) }
    /// ```
    pub fn repeats(&self) -> u64 {
        self.0.repeats()
    }
}

impl RecordBacked for PostgresDriver {
    type Store = Table;

    fn record_driver(&self) -> &RecordDriver<Table> {
        &self.0
    }
}
