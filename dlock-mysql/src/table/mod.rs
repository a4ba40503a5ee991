//! Lock table: connects, renews, and reads and writes rows. Each step is one statement, or a statement and a read
//! of the rows that it did not change.

use crate::{
    commands::{LIST_BATCH, Row, Statements},
    config::MysqlConfig,
    connection::{Checkout, Connections, Dialer, rows, run},
    error, session,
};
use dlock_core::{
    Effect, Instant, LockName,
    driver::{
        DriverError, Renew, Renewed, Result,
        kit::{Call, Class, Expected, StoreTime, Write, Written, again, log_findings},
    },
};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The table of locks, reached over the connection pool.
pub(crate) struct LockTable {
    config: MysqlConfig,
    pub(crate) sql: Statements,
    pub(crate) connections: Connections,
    /// How often renewals were sent again because of contention.
    pub(crate) repeats: AtomicU64,
}

impl fmt::Debug for LockTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockTable")
            .field("config", &self.config)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

impl LockTable {
    /// Connects, and makes or checks the table.
    pub(crate) async fn open(config: MysqlConfig) -> Result<Self> {
        let sql = Statements::new(&config.qualified()?);
        let connections = Connections::new(
            Dialer::new(&config),
            config.table.connections as usize,
            config.connect_within,
        );
        let mut checkout = connections.first().await?;
        let session = checkout.session();
        let checking = tokio::time::timeout(config.connect_within, async {
            log_findings("mysql", &Ok(session::diagnose(session).await));
            session::check_table(&mut session.native, &config).await
        });
        match checking.await {
            Ok(checked) => checkout.settle(Ok(checked?))?,
            Err(_) => return Err(DriverError::unavailable("no answer about the table")),
        }
        drop(checkout);
        Ok(Self {
            config,
            sql,
            connections,
            repeats: AtomicU64::new(0),
        })
    }

    pub(crate) fn now(&self) -> Instant {
        self.connections.clock().now()
    }

    pub(crate) async fn lend(&self, class: Class, give_up: Instant) -> Result<Checkout<'_>> {
        self.connections.lend(Call { class, give_up }).await
    }

    /// Makes the table again if it may. It existed when the driver connected, and was dropped with every lock in it.
    pub(crate) async fn made_again(&self, give_up: Instant) -> bool {
        if !self.config.table.create {
            return false;
        }
        tracing::warn!(
            "mysql: the table {} was dropped, with every lock in it; it is made again",
            self.config.table.name
        );
        let Ok(mut checkout) = self.lend(Class::Work, give_up).await else {
            return false;
        };
        let limit = checkout.limit();
        let native = &mut checkout.session().native;
        let checked = session::check_table(native, &self.config);
        let checked = limit.of(async { Ok(checked.await) }).await;
        let made = matches!(checkout.settle(checked), Ok(Ok(())));
        if !made {
            checkout.discard(); // it is unknown which of its statements failed
        }
        made
    }

    /// Renews sole holds, and answers those that are not there. `which`: the entries, of one lease. A row
    /// that another transaction has locked fails alone: those that are not locked are found without waiting,
    /// and sent again in two halves. Where there is no time to wait for a locked row, they are found first.
    pub(crate) async fn extend(
        &self,
        all: &[Renew],
        mut which: Vec<usize>,
        (lease, give_up): (Duration, Instant),
        answers: &mut [Option<Result<Renewed>>],
    ) {
        if give_up.since(self.now()) < A_LOCK_SHOWS && which.len() > 1 {
            // If they cannot be found, the statement says why.
            let _taken = self.take_out(all, &mut which, give_up, answers).await;
            if which.is_empty() {
                return;
            }
        }
        let mut parts = vec![which];
        while let Some(mut part) = parts.pop() {
            let entries: Vec<&Renew> = part.iter().map(|at| &all[*at]).collect();
            let error = match self.extend_part(&entries, lease, give_up).await {
                Ok(extended) => {
                    for (at, extended) in part.into_iter().zip(extended) {
                        answers[at] = extended.map(Ok);
                    }
                    continue;
                }
                Err(error) => error,
            };
            if self.now() < give_up
                && error::is_contention(&error)
                && (part.len() > 1 || error::is_brief(&error))
            {
                self.repeats.fetch_add(1, Ordering::Relaxed);
                let taken = self.take_out(all, &mut part, give_up, answers).await;
                if taken.is_ok() {
                    let half = part.split_off(part.len().div_ceil(2));
                    parts.extend([half, part].into_iter().filter(|part| !part.is_empty()));
                    continue;
                }
            }
            let copies: Vec<_> = part.iter().skip(1).map(|_| again(&error)).collect();
            for (at, error) in part.into_iter().zip([error].into_iter().chain(copies)) {
                answers[at] = Some(Err(error));
            }
        }
    }

    /// One statement for the entries. The rows tell which ones it did not renew: holds that are gone, and
    /// those that are not sole.
    async fn extend_part(
        &self,
        entries: &[&Renew],
        lease: Duration,
        give_up: Instant,
    ) -> Result<Vec<Option<Renewed>>> {
        let mut checkout = self.lend(Class::Renewal, give_up).await?;
        let whole = Some(Renewed::Until { valid_for: lease });
        let mut was_refused = false;
        loop {
            let began = self.now();
            let not_after = checkout.not_after(give_up);
            let done = run(&mut checkout, self.sql.renew(entries, lease, not_after)).await?;
            if done.matched > 0 {
                checkout.observe_time(Duration::from_micros(done.number));
            }
            if done.matched == entries.len() {
                return Ok(vec![whole; entries.len()]);
            }
            let names = entries.iter().map(|entry| &entry.name).collect();
            let mut found = self.rows_after(&mut checkout, names, done.matched).await?;
            // If the server's clock was set forward, all were refused in error.
            let is_late = found.now > not_after;
            if is_late && !was_refused && self.now() < give_up {
                was_refused = true;
                continue;
            }
            let (time, seen) = (found.time(), self.now().since(began));
            let renewed = |entry: &&Renew| {
                let proof = Renew::new(entry.name.clone(), entry.owner, entry.hold, None);
                let Some(row) = found.take(&entry.name) else {
                    return Some(Renewed::NotHeld);
                };
                // A damaged row is told by the record driver.
                match row.record.ok()?.renew(&proof, time).answer {
                    // The statement wrote this end, or an earlier request asked for a longer lease.
                    Renewed::Until { valid_for } if valid_for + seen < lease => None,
                    renewed => Some(renewed),
                }
            };
            return Ok(entries.iter().map(renewed).collect());
        }
    }

    /// Takes out and answers the entries whose rows other transactions have locked, and those without a row. Waits for
    /// no lock.
    async fn take_out(
        &self,
        all: &[Renew],
        part: &mut Vec<usize>,
        give_up: Instant,
        answers: &mut [Option<Result<Renewed>>],
    ) -> Result<()> {
        let names: Vec<&LockName> = part.iter().map(|at| &all[*at].name).collect();
        let mut checkout = self.lend(Class::Renewal, give_up).await?;
        let free = rows(&mut checkout, self.sql.unlocked(&names)).await?;
        let free: HashSet<_> = free.iter().filter_map(Row::name).collect();
        let is_out = |at: &mut usize| !free.contains(all[*at].name.as_str().as_bytes());
        let out: Vec<_> = part.extract_if(.., is_out).collect();
        if out.is_empty() {
            return Ok(());
        }
        let names: Vec<&LockName> = out.iter().map(|at| &all[*at].name).collect();
        let mut found = self.rows(&mut checkout, &names).await;
        for at in out {
            let row = found.as_mut().map(|found| found.take(&all[at].name));
            answers[at] = Some(match row {
                Ok(None) => Ok(Renewed::NotHeld),
                _ => Err(error::locked()),
            });
        }
        Ok(())
    }

    /// Reads rows; locks nothing and waits for nothing.
    pub(crate) async fn rows(
        &self,
        checkout: &mut Checkout<'_>,
        names: &[&LockName],
    ) -> Result<Found> {
        let mut found = Found::default();
        for (at, some) in names.chunks(LIST_BATCH).enumerate() {
            let rows = rows(checkout, self.sql.find(some)).await?;
            // The server's time is in each row, and there is one without a name if no name has a row.
            let now = rows.first().and_then(|row| Row::time(row).ok());
            let now = now.ok_or_else(error::garbled)?;
            found.now = if at == 0 { now } else { found.now.min(now) };
            let rows = rows.iter().filter_map(Row::read);
            found.rows.extend(rows.map(|row| (row.name.clone(), row)));
        }
        checkout.observe_time(Duration::from_micros(found.now));
        Ok(found)
    }

    /// Reads the rows after a statement for several names, of which it changed `some`. If they cannot be
    /// read, the effect on each is unknown.
    pub(crate) async fn rows_after(
        &self,
        checkout: &mut Checkout<'_>,
        names: Vec<&LockName>,
        some: usize,
    ) -> Result<Found> {
        let found = self.rows(checkout, &names).await;
        found.map_err(|error| match some {
            0 => error,
            _ => error.with_effect(Effect::Unknown),
        })
    }

    /// Writes one record. A connection for each, as a statement that fails may take it away.
    pub(crate) async fn replace(&self, write: &Write, call: Call) -> Result<Written> {
        let mut checkout = self.connections.lend(call).await?;
        let statement = match write.expected {
            Expected::Absent => self.sql.insert(write),
            Expected::Version(version) => self.sql.swap(write, signed(version)),
            Expected::Damaged => match self
                .rows(&mut checkout, &[&write.name])
                .await?
                .take(&write.name)
            {
                Some(row) if row.record.is_err() => self.sql.swap(write, row.version),
                _ => return Ok(Written::Changed),
            },
        };
        let done = run(&mut checkout, statement).await?;
        Ok(match done.matched {
            1 => Written::Written,
            _ => Written::Changed,
        })
    }
}

/// The rows of some names.
#[derive(Default)]
pub(crate) struct Found {
    /// The server's time, in microseconds.
    pub(crate) now: u64,
    rows: HashMap<Vec<u8>, Row>,
}

impl Found {
    pub(crate) fn take(&mut self, name: &LockName) -> Option<Row> {
        self.rows.remove(name.as_str().as_bytes())
    }

    pub(crate) fn time(&self) -> StoreTime {
        StoreTime::wall(self.now)
    }
}

pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A statement that waits for a locked row ends after a second; this leaves time to renew the others then.
const A_LOCK_SHOWS: Duration = Duration::from_millis(1_500);

#[cfg(test)]
mod tests;
