//! Setup that all figures over SQLite share.

use crate::{Result, measure::Plan, report::Table};
use dlock_core::Client;
use dlock_sqlite::{SqliteConfig, SqliteDriver};
use std::path::PathBuf;
use tempfile::TempDir;

/// A folder of lock files, removed when it is dropped.
#[derive(Debug)]
pub(super) struct Files(TempDir);

impl Files {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(
            tempfile::Builder::new().prefix("dlock-bench.").tempdir()?,
        ))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) async fn driver(&self, name: &str) -> Result<SqliteDriver> {
        driver(self.path(name)).await
    }

    /// A client with a connection of its own.
    pub(super) async fn client(&self, name: &str) -> Result<Client> {
        Ok(Client::new(self.driver(name).await?)?)
    }
}

pub(super) async fn driver(path: impl Into<PathBuf>) -> Result<SqliteDriver> {
    Ok(SqliteDriver::open(SqliteConfig::new(path)).await?)
}

/// Shared locks: see [`share`](super::share).
pub(super) async fn share(plan: Plan) -> Result<Table> {
    let files = Files::new()?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(files.client("shared").await?);
    }
    super::share::run(&plan, &[], ("sqlite-share", "SQLite"), clients).await
}
