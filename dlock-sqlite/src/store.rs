//! Record store: one row per name in a file, read and written over one connection.

use crate::{
    commands::{self, RENEW_BATCH, Row},
    config::{SqliteConfig, WakeBy},
    connection::{Checkout, Connection, LockFile},
    error,
    listener::Listener,
    machine::{Machine, Moment},
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Capabilities, Finding, Release, Renew, Renewed, Result, Wake, check_runtime,
        kit::{
            Call, Class, Expected, Freed, Listed, Read, RecordStore, StoreTime, Stored, Waiters,
            Write, Written, log_findings, renewed,
        },
    },
};
use std::{collections::HashMap, time::Duration};

/// The rows of a lock file on this machine.
#[derive(Debug)]
pub struct SqliteStore {
    capabilities: Capabilities,
    pub(crate) connection: Connection,
    wake_ups: Listener,
    machine: Machine,
}

impl SqliteStore {
    pub(crate) async fn open_on(config: SqliteConfig, machine: Machine) -> Result<Self> {
        check_runtime()?;
        let wake = config.wake;
        let lock_file = tokio::task::spawn_blocking(move || LockFile::prepare(&config));
        let lock_file = lock_file.await.map_err(|_| error::closed())??;
        let mut capabilities = Capabilities::new("sqlite", lock_file.store());
        capabilities.shares = true;
        capabilities.raises = true;
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        capabilities.wake = match wake {
            WakeBy::Notify => Wake::Notify,
            WakeBy::Poll => Wake::Poll,
        };
        let store = Self {
            capabilities,
            wake_ups: Listener::new(&lock_file.path, wake == WakeBy::Notify),
            connection: Connection::open(lock_file).await?,
            machine,
        };
        log_findings("sqlite", &store.diagnose().await);
        Ok(store)
    }

    /// The time for one statement; a request past its give-up does nothing.
    fn in_time(&self, give_up: Instant) -> Result<Moment<'_>> {
        self.machine.moment_before(give_up).ok_or_else(error::late)
    }

    /// What a row means to this boot.
    ///
    /// Times in a row are those of the boot that wrote it. The holds of an earlier boot ended with that
    /// boot. A row that another boot wrote after this one began comes from another kernel, and then nothing
    /// can be trusted.
    fn stored(&self, row: Row, at: &Moment<'_>) -> Result<Stored> {
        let is_of_this_boot = row.boot == at.boot;
        if !is_of_this_boot && row.written >= at.booted() {
            let lock_file = &self.connection.lock_file.path;
            return Err(error::other_kernel(lock_file, &row.boot, at.boot));
        }
        Ok(match row.record {
            Ok(record) if is_of_this_boot => Stored::Record(record),
            Ok(record) => Stored::Record(record.lapsed()),
            Err(damaged) => Stored::Damaged(damaged),
        })
    }

    async fn replace(&self, checkout: &mut Checkout<'_>, write: &Write) -> Result<Written> {
        let at = self.machine.moment();
        if unsigned(at.now) > write.not_after {
            return Ok(Written::Late);
        }
        let version = match write.expected {
            Expected::Absent => None,
            Expected::Version(version) => Some(signed(version)),
            Expected::Damaged => {
                let found = commands::find(checkout.native(), &write.name).await;
                match checkout.settle(found)? {
                    Some(row) if row.record.is_err() => Some(row.version),
                    _ => return Ok(Written::Changed),
                }
            }
        };
        let changed = match version {
            None => commands::insert(checkout.native(), write, &at).await,
            Some(version) => commands::swap(checkout.native(), write, version, &at).await,
        };
        Ok(match checkout.settle(changed)? {
            true => Written::Written,
            false => Written::Changed,
        })
    }
}

#[async_trait]
impl RecordStore for SqliteStore {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> Result<Read> {
        let mut checkout = self.connection.checkout(call.class).await?;
        let at = self.machine.moment();
        let mut records = Vec::with_capacity(names.len());
        for name in names {
            let found = commands::find(checkout.native(), name).await;
            records.push(match checkout.settle(found)? {
                Some(row) => self.stored(row, &at)?,
                None => Stored::Absent,
            });
        }
        let time = time(&at);
        Ok(Read { time, records })
    }

    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>> {
        let mut written = Vec::with_capacity(writes.len());
        for write in writes {
            // One checkout each: a statement that fails may take the connection with it.
            let one = match self.connection.checkout(call.class).await {
                Ok(mut checkout) => self.replace(&mut checkout, write).await,
                Err(error) => Err(error),
            };
            written.push(one.unwrap_or_else(Written::Failed));
        }
        Ok(written)
    }

    fn check(&self) -> Result<()> {
        self.connection.lock_file.still_there()
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let mut checkout = self.connection.checkout(Class::Work).await?;
        let at = self.machine.moment();
        let rows = commands::list(checkout.native(), (prefix, after), limit).await;
        let rows = checkout.settle(rows)?;
        drop(checkout);
        let rows = rows.into_iter().map(|(name, row)| {
            // A damaged row of this boot that is past its end holds nothing.
            let free = row.boot == at.boot && row.until <= at.now;
            let stored = match self.stored(row, &at)? {
                Stored::Damaged(_) if free => Stored::Absent,
                stored => stored,
            };
            Ok((name, stored))
        });
        let rows = rows.collect::<Result<_>>()?;
        Ok(Listed::of(time(&at), rows, limit))
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut checkout = self.connection.checkout(Class::Work).await?;
        let at = self.machine.moment();
        let purged = commands::purge(checkout.native(), after, &at).await;
        checkout.settle(purged)
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let mut checkout = self.connection.checkout(Class::Work).await?;
        self.connection.lock_file.still_there()?;
        let at = self.in_time(req.give_up)?;
        let taken = commands::take(checkout.native(), req, &at).await;
        let token = FencingToken(unsigned(at.wall));
        Ok(checkout.settle(taken)?.then_some(token))
    }

    async fn free(&self, req: &Release, hold: HoldId) -> Result<Freed> {
        // If this client itself waits, the row shows a waiter; asking for a row without waiters would be in
        // vain.
        let waited_for = self.wake_ups.hears(&req.name);
        let mut checkout = self.connection.checkout(Class::Work).await?;
        let at = self.machine.moment();
        let which = (&req.name, &req.owner, hold);
        let freed = commands::free(checkout.native(), which, waited_for, &at).await;
        Ok(match (checkout.settle(freed)?, waited_for) {
            (false, _) => Freed::Undecided,
            (true, false) => Freed::Free,
            (true, true) => Freed::WaitedFor,
        })
    }

    async fn extend(
        &self,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Option<Result<Renewed>>>> {
        if self.connection.lock_file.is_replaced() {
            // The next client opens the file that has the path now, and finds no holder.
            tracing::warn!(lock_file = ?self.connection, "sqlite: the lock file was moved, deleted or replaced: the locks held in it are over");
            return Ok(batch.iter().map(|_| Some(Ok(Renewed::NotHeld))).collect());
        }
        let leases = batch.iter().filter_map(|entry| Some((entry, entry.lease?)));
        let leases: Vec<_> = leases.collect();
        if leases.is_empty() {
            return Ok(renewed(batch, &HashMap::new()));
        }
        let mut checkout = self.connection.checkout(Class::Renewal).await?;
        let at = self.in_time(give_up)?;
        let rests = commands::renew(checkout.native(), &leases, &at).await;
        Ok(renewed(batch, &checkout.settle(rests)?))
    }

    fn waiters(&self) -> Option<&dyn Waiters> {
        Some(&self.wake_ups)
    }

    async fn notify(&self, name: &LockName) {
        self.wake_ups.wake(name);
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let mut found = self.connection.lock_file.findings();
        found.push(match self.capabilities.wake {
            Wake::Notify => Finding::ok("the kernel wakes waiters"),
            _ => Finding::ok("waiters poll, as dlock.wake says"),
        });
        Ok(found)
    }

    /// A statement under way is answered; no more are accepted.
    async fn close(&self) {
        self.wake_ups.close();
        self.connection.close().await;
    }
}

fn time(at: &Moment<'_>) -> StoreTime {
    StoreTime {
        now: unsigned(at.now),
        wall: unsigned(at.wall),
    }
}

/// Times that dlock writes are never negative.
pub(crate) fn unsigned(time: i64) -> u64 {
    u64::try_from(time).unwrap_or(0)
}

pub(crate) fn signed(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

/// Time is read before a statement waits for the file: this covers its busy time-out, and the write.
const LATE: Duration = Duration::from_secs(1);
