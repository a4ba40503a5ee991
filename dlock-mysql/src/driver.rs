//! The driver: what is decided in one statement, what is read first, and what the answers mean.

use crate::{
    config::MysqlConfig,
    error,
    gather::ask,
    hints,
    lists::RENEW_BATCH,
    store::{Store, read_name},
};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, DriverError, FencingToken,
    Hint, Holds, Instant, Lane, LockName, Page, Release, Released, Renew, Renewed, Result,
    Snapshot, Ticket, Wake,
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
    /// Connects to the server of a URL: see [`MysqlConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL or one of its settings cannot be read, or a table of that name is somebody else's; `Unavailable` when the server
    /// cannot be reached, refuses the log-in, or is read-only; `Unsupported` when it is too old. It is tried once: whoever connects at start
    /// wants to know.
    ///
    /// # Cancel safety
    /// Dropped, it may leave the empty table behind.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with settings made in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn open(config: MysqlConfig) -> Result<Self> {
        let mut capabilities = Capabilities::new("mysql", config.store()?);
        capabilities.wake = Wake::Poll;
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        Ok(Self {
            capabilities,
            store: Arc::new(Store::open(config).await?),
        })
    }

    /// How often a statement of this driver was sent again because a deadlock (1213), a row's lock (1205) or a faster client was in its way.
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

    /// One server: all names share its fate.
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
                // What was to be joined may be over by now: whoever joins always looks.
                let again = || self.store.try_acquire(req, req.join.is_some());
                Box::pin(self.store.settled(tried, req.give_up, again)).await?
            }
        };
        if matches!(acquired, Acquired::Granted(_)) {
            Store::sweep_when_due(&self.store);
        }
        Ok(acquired)
    }

    /// There is no line: a ticket is nothing here.
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
            // They have one reason: the store did not answer.
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

    /// A statement under way is answered; no more are sent.
    async fn close(&self) {
        self.store.close().await;
    }
}

/// A cursor is the last name that was seen.
fn read_cursor(cursor: &Cursor) -> Result<Vec<u8>, DriverError> {
    match read_name(cursor.0.clone()) {
        Some(name) => Ok(name.as_str().into()),
        None => Err(error::bad_cursor()),
    }
}

/// A statement judges its time when it begins, and may then wait a second for the table, a second for the row, and run for one.
const LATE: Duration = Duration::from_secs(3);
/// Rows of one page of a walk.
const LONGEST_PAGE: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::{DistributedLock, MysqlDriver};
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{Acquire, HoldId, Lease, LockName, Owner, Release};

    /// Each is boxed and moved once: what is larger falls out of the allocator's caches, and costs more than all the rest of what we do around a statement.
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
