//! PostgreSQL driver: the record driver over the table.

use crate::{PostgresConfig, store::Table};
use dlock_core::driver::{
    Result, check_runtime,
    kit::{RecordBacked, RecordDriver},
};

/// A driver that keeps its locks in one table of a PostgreSQL server.
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
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(PostgresConfig::from_url(url)?).await
    }

    /// Connects with these settings, and makes the table if it is missing.
    ///
    /// # Errors
    /// When the server cannot be reached or used, or the table is not dlock's.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn open(config: PostgresConfig) -> Result<Self> {
        check_runtime()?;
        Ok(Self(RecordDriver::new(Table::open(config).await?)))
    }

    /// How many attempts were repeated because another client was faster, or because a row or the table was locked.
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
