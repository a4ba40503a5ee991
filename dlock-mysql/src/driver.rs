//! Driver: maps the core's requests to steps of the [`Store`].
//!
//! It decides which requests share a statement, which go alone, and which are tried again.

use crate::{
    config::MysqlConfig,
    error,
    gather::ask,
    hints,
    lists::RENEW_BATCH,
    store::{CURSOR, Store},
};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, DriverError, FencingToken,
    Hint, Holds, Instant, Lane, LockName, Page, Release, Released, Renew, Renewed, Result,
    Snapshot, Ticket, Wake, check_runtime,
};
use futures_core::stream::BoxStream;
use std::{collections::BTreeMap, pin::pin, sync::Arc, time::Duration};

/// Locks in a table of a MySQL or MariaDB server.
#[derive(Debug)]
pub struct MysqlDriver {
    capabilities: Capabilities,
    store: Arc<Store>,
}

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
    pub async fn open(config: MysqlConfig) -> Result<Self> {
        check_runtime()?;
        let mut capabilities = Capabilities::new("mysql", config.store()?);
        capabilities.wake = Wake::Poll;
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        Ok(Self {
            capabilities,
            store: Arc::new(Store::open(config).await?),
        })
    }

    /// How often this driver sent a statement again because of a deadlock (1213), a locked row (1205) or a
    /// faster client.
    #[must_use]
    pub fn repeats(&self) -> u64 {
        self.store.repeats()
    }
}

#[async_trait]
impl DistributedLock for MysqlDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// All names share one lane, because one server serves them all.
    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let looks_first = req.look || req.join.is_some();
        let alone = pin!(self.store.try_acquire(req, looks_first));
        let tried = if looks_first {
            alone.await
        } else {
            ask(&self.store, req, alone).await
        };
        let acquired = match tried {
            Ok(Some(acquired)) => acquired,
            tried => {
                // The incarnation to join may have ended by now, so a join always reads the row first.
                let again = || self.store.try_acquire(req, req.join.is_some());
                Box::pin(self.store.settled(tried, req.give_up, again)).await?
            }
        };
        if matches!(acquired, Acquired::Granted(_)) {
            Store::sweep_when_due(&self.store, &req.name);
        }
        Ok(acquired)
    }

    /// Does nothing: MySQL keeps no queue, so there are no tickets.
    async fn leave(&self, _: &LockName, _: Ticket) -> Result<()> {
        Ok(())
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut alike: BTreeMap<Option<Duration>, Vec<usize>> = BTreeMap::new();
        for (at, entry) in batch.iter().enumerate() {
            alike.entry(entry.lease).or_default().push(at);
        }
        let mut answers: Vec<Option<Result<Renewed>>> = batch.iter().map(|_| None).collect();
        for which in alike.into_values() {
            for some in which.chunks(RENEW_BATCH) {
                self.store
                    .renew_some(batch, some.to_vec(), give_up, &mut answers)
                    .await;
            }
        }
        let answers = answers
            .into_iter()
            .map(|answer| answer.unwrap_or_else(|| Err(error::contended())));
        let answers: Vec<Result<Renewed>> = answers.collect();
        if answers.iter().all(Result::is_err) {
            // All failed for one reason: the store did not answer.
            let first = answers.into_iter().next();
            return first.map_or_else(
                || Ok(Vec::new()),
                |answer| answer.map(|renewed| vec![Ok(renewed)]),
            );
        }
        Ok(answers)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let give_up = self.store.patience();
        let alone = pin!(self.store.try_release(req, give_up));
        let tried = if req.keep.is_none() && req.holds != Holds::All {
            ask(&self.store, req, alone).await
        } else {
            alone.await
        };
        match tried {
            Ok(Some(released)) => Ok(released),
            tried => {
                let again = || self.store.try_release(req, give_up);
                Box::pin(self.store.settled(tried, give_up, again)).await
            }
        }
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        hints::none()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.store.inspect(name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = from.map(read_cursor).transpose()?.unwrap_or_default();
        let limit = limit.clamp(1, LONGEST_PAGE);
        self.store.list((prefix, after), limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let give_up = self.store.patience();
        let again = || self.store.try_break(name, only, give_up);
        self.store.settled(again().await, give_up, again).await
    }

    /// Statements in flight are answered; no new ones are sent.
    async fn close(&self) {
        self.store.close().await;
    }
}

fn read_cursor(cursor: &Cursor) -> Result<Vec<u8>, DriverError> {
    let seen = cursor.0.strip_prefix(CURSOR);
    seen.map(<[u8]>::to_vec).ok_or_else(error::bad_cursor)
}

/// A statement checks its not-after time when it begins. It may then wait one second for the table, one
/// second for the row, and run for one second.
const LATE: Duration = Duration::from_secs(3);
/// The most rows in one page of a listing.
const LONGEST_PAGE: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::{DistributedLock, MysqlDriver};
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{Acquire, HoldId, Lease, LockName, Owner, Release};

    /// Each future is boxed and moved once. A larger one misses the allocator's caches and costs more than
    /// all our other work around a statement.
    #[tokio::test]
    async fn what_a_request_carries_with_it_is_small() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let driver = MysqlDriver::connect(&server.url()).await.unwrap();
        let name = LockName::new("n").unwrap();
        let (owner, hold) = (Owner::from_seed("us"), HoldId::from_bits(1));
        let (lease, give_up) = (Lease::default(), driver.store.patience());
        let acquire = Acquire::new(name.clone(), owner, hold, lease, give_up);
        let release = Release::new(name, owner, hold);
        let (acquiring, releasing) = (driver.acquire(&acquire), driver.release(&release));
        let sizes = [size_of_val(&*acquiring), size_of_val(&*releasing)];
        assert!(sizes.iter().all(|size| *size <= 1024), "{sizes:?}");
    }
}
