//! Record store: one row per name in a table of the server.

use crate::{
    commands::{GATHERED, LIST_BATCH, Row},
    config::MysqlConfig,
    connection::{rows, run},
    error,
    requests::{Frees, Takes},
    session,
    table::LockTable,
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Capabilities, DriverError, Finding, Release, Renew, Renewed, Result, Wake,
        check_runtime,
        kit::{
            BatchPolicy, Batcher, Call, Freed, Listed, Read, RecordStore, StoreTime, Stored, Write,
            Written,
        },
    },
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// The rows of a table of locks.
#[derive(Debug)]
pub struct MysqlStore {
    capabilities: Capabilities,
    pub(crate) table: Arc<LockTable>,
    pub(crate) takes: Batcher<Takes>,
    pub(crate) frees: Batcher<Frees>,
}

impl MysqlStore {
    pub(crate) async fn open(config: MysqlConfig) -> Result<Self> {
        check_runtime()?;
        let mut capabilities = Capabilities::new("mysql", config.store()?);
        capabilities.shares = true;
        capabilities.raises = true;
        // There are no wake-ups. `GET_LOCK` would need a connection per waiter, is not replicated, and is
        // refused or multiplexed away by clusters and proxies.
        capabilities.wake = Wake::Poll;
        capabilities.late = LATE;
        capabilities.renew_batch = LIST_BATCH;
        let table = Arc::new(LockTable::open(config).await?);
        Ok(Self {
            capabilities,
            takes: Batcher::new(Takes(Arc::clone(&table)), POLICY),
            frees: Batcher::new(Frees(Arc::clone(&table)), POLICY),
            table,
        })
    }
}

#[async_trait]
impl RecordStore for MysqlStore {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> Result<Read> {
        let names: Vec<&LockName> = names.iter().collect();
        let mut checkout = self.table.connections.lend(call).await?;
        let mut found = self.table.rows(&mut checkout, &names).await?;
        let records = names
            .iter()
            .map(|name| found.take(name).map_or(Stored::Absent, Row::stored));
        Ok(Read {
            records: records.collect(),
            time: found.time(),
        })
    }

    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>> {
        let mut written = Vec::with_capacity(writes.len());
        for write in writes {
            let replaced = self.table.replace(write, call).await;
            written.push(replaced.unwrap_or_else(Written::Failed));
        }
        Ok(written)
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let connections = &self.table.connections;
        let mut checkout = connections.lend(connections.default_call()).await?;
        let rows = rows(&mut checkout, self.table.sql.list(prefix, after, limit)).await?;
        drop(checkout);
        let rows: Vec<Row> = rows.iter().filter_map(Row::read).collect();
        let time = StoreTime::wall(rows.last().map_or(0, |row| row.now));
        let rows = rows.into_iter().map(|row| (row.name.clone(), row.stored()));
        Ok(Listed::of(time, rows.collect(), limit))
    }

    /// Each statement deletes one row, so a sweep never locks the row of a held lock.
    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let (connections, sql) = (&self.table.connections, &self.table.sql);
        let mut after = after.to_vec();
        for _ in 0..SWEPT_PAGES {
            let mut checkout = connections.lend(connections.default_call()).await?;
            let page = rows(&mut checkout, sql.unused(&after, SWEPT)).await?;
            let unused = page.iter().filter(|row| Row::is_unused(row));
            for name in unused.filter_map(Row::name) {
                // A row that cannot be deleted does not stop the walk.
                if let Err(error) = run(&mut checkout, sql.forget(&name)).await {
                    tracing::debug!(%error, "mysql: an unused row could not be deleted");
                    break;
                }
            }
            match page.last().and_then(Row::name) {
                Some(last) if page.len() == SWEPT => after = last,
                _ => return Ok(None),
            }
        }
        Ok(Some(after))
    }

    fn grants_per_sweep(&self) -> u32 {
        SWEEP_GRANTS
    }

    fn is_contention(&self, error: &DriverError) -> bool {
        error::is_contention(error)
    }

    /// Makes a table again that was dropped, with every lock in it.
    async fn repair(&self, error: &DriverError, give_up: Instant) -> bool {
        error::is_missing_table(error) && self.table.made_again(give_up).await
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        self.takes.ask(req).await
    }

    async fn free(&self, req: &Release, hold: HoldId) -> Result<Freed> {
        self.frees.ask(&(req.clone(), hold)).await
    }

    async fn extend(
        &self,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Option<Result<Renewed>>>> {
        let mut alike: BTreeMap<Duration, Vec<usize>> = BTreeMap::new();
        for (at, entry) in batch.iter().enumerate() {
            if let Some(lease) = entry.lease {
                alike.entry(lease).or_default().push(at);
            }
        }
        let mut answers: Vec<_> = batch.iter().map(|_| None).collect();
        for (lease, which) in alike {
            for some in which.chunks(LIST_BATCH) {
                let extending =
                    self.table
                        .extend(batch, some.to_vec(), (lease, give_up), &mut answers);
                extending.await;
            }
        }
        // All failed for one reason: the store did not answer.
        if answers.iter().all(|one| matches!(one, Some(Err(_))))
            && let Some(Some(Err(error))) = answers.first_mut().map(Option::take)
        {
            return Err(error);
        }
        Ok(answers)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let connections = &self.table.connections;
        let mut checkout = connections.lend(connections.default_call()).await?;
        let limit = checkout.limit();
        let found = session::diagnose(checkout.session());
        let found = limit.of(async { Ok(found.await) }).await;
        checkout.settle(found)
    }

    /// Statements in flight are answered; no new ones are sent.
    async fn close(&self) {
        self.table.connections.close().await;
    }
}

/// With more statements of a kind in flight each carries less; one of each kind keeps server and client busy.
/// More requests in one gain little, and lock rows for longer. A batch waits for a connection, runs a
/// statement and reads rows: at most 5 s, 4 s and 4 s.
const POLICY: BatchPolicy = BatchPolicy {
    alone: 1,
    in_flight: 1,
    most: GATHERED,
    least: Duration::ZERO,
    waiting: 1_024,
    unanswered: Duration::from_secs(20),
};
/// A statement checks its not-after time when it begins. It may then wait one second for the table, one
/// second for the row, and run for one second.
const LATE: Duration = Duration::from_secs(3);
/// Rows per page of a sweep, and pages per sweep.
pub(crate) const SWEPT: usize = 256;
pub(crate) const SWEPT_PAGES: usize = 16;
/// A sweep checks four times as many rows, so deletion keeps up even if every grant is of a new name.
const SWEEP_GRANTS: u32 = 1_024;
