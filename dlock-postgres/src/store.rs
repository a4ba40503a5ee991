//! Record store: one row per name in a table.

use crate::{
    PostgresConfig, checks, commands,
    connection::{Connections, Dialer, micros_of},
    error,
    listener::Listener,
    requests::{Frees, Server, Takes, by_name},
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Capabilities, DriverError, Finding, Release, Renew, Renewed, Result, Wake,
        kit::{
            BatchPolicy, Batcher, Call, Class, Freed, Listed, Read, RecordStore, StoreTime, Stored,
            Subscriptions, Waiters, Write, Written, hash_of, log_findings, renewed,
        },
    },
};
use futures_util::future::join_all;
use sqlx::{Row, postgres::PgRow};
use std::{collections::HashMap, sync::Arc, time::Duration};

/// The table of locks of one server.
#[derive(Debug)]
pub struct Table {
    server: Arc<Server>,
    takes: Batcher<Takes>,
    frees: Batcher<Frees>,
    may_create: bool,
    capabilities: Capabilities,
    listener: Subscriptions<Listener>,
    dead: checks::Dead,
}

impl Table {
    pub(crate) async fn open(mut config: PostgresConfig) -> Result<Self> {
        let most = config.table.connections as usize;
        let connections = Connections::new(Dialer::new(config.options.clone()), most, CONNECT);
        drop(connections.first().await?);
        let call = connections.default_call();
        let mut server = Server {
            connections,
            table: config.table.name.quoted('"'),
        };
        if config.table.name.schema().is_none() {
            // No session's search path shall redirect a statement.
            let place = server.ask("place", call, |_| commands::place(&server.table));
            let schema: Option<String> =
                one(&place.await?)?.try_get("schema").map_err(unreadable)?;
            let schema = schema.ok_or_else(|| DriverError::misuse(NO_SCHEMA))?;
            config.table.name = config.table.name.within(schema);
            server.table = config.table.name.quoted('"');
        }
        let mut capabilities = Capabilities::new("postgres", config.store());
        capabilities.shares = true;
        capabilities.raises = true;
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        let dialer = server.connections.dialer();
        let listener = Subscriptions::new(Listener {
            options: dialer.direct(),
            table: hash_of(&server.table),
        });
        let is_direct = dialer.is_direct();
        if is_direct {
            capabilities.wake = Wake::Notify;
        } else {
            capabilities.wake = Wake::Poll;
            listener.close();
        }
        let server = Arc::new(server);
        let takes = Takes {
            server: Arc::clone(&server),
            marks: is_direct,
        };
        let table = Self {
            takes: Batcher::new(takes, POLICY),
            frees: Batcher::new(Frees(Arc::clone(&server)), POLICY),
            server,
            may_create: config.table.create,
            capabilities,
            listener,
            dead: checks::Dead::default(),
        };
        let server = &*table.server;
        let probe = server.ask("probe", call, |_| commands::probe(&server.table));
        if let Err(error) = probe.await
            && !error::is_contention(&error)
            && !table.repair(&error, call.give_up).await
        {
            return Err(error);
        }
        log_findings("postgres", &table.diagnose().await);
        Ok(table)
    }

    async fn replace(&self, write: &Write, call: Call) -> Result<Written> {
        let what = match call.class {
            Class::Renewal => RENEW,
            Class::Work if write.record.owner.is_none() => RELEASE,
            Class::Acquire | Class::Work => ACQUIRE,
        };
        let replacing = self.server.ask(what, call, |values| {
            if let Class::Renewal = call.class {
                // Rows that others have locked must not use up the connections of the renewals. The core asks again.
                values.wait_at_most(RENEWAL_MS);
            }
            commands::replace(&self.server.table, write, values)
        });
        Ok(match replacing.await?.is_empty() {
            false => Written::Written,
            true => Written::Changed,
        })
    }
}

/// How long a renewal waits for a locked row, in milliseconds.
const RENEWAL_MS: u64 = 50;

#[async_trait]
impl RecordStore for Table {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> Result<Read> {
        let reading = self
            .server
            .ask("read", call, |_| commands::read(&self.server.table, names));
        let (time, rows) = reading_of(&reading.await?)?;
        Ok(Read::of(time, names, rows))
    }

    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>> {
        if let [write] = writes {
            return Ok(vec![self.replace(write, call).await?]);
        }
        // Each in a transaction of its own: a row that is locked delays only its own write.
        let written = join_all(writes.iter().map(|write| self.replace(write, call))).await;
        let written = written.into_iter();
        Ok(written
            .map(|written| written.unwrap_or_else(Written::Failed))
            .collect())
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let (call, sql) = (
            self.server.connections.default_call(),
            commands::list(&self.server.table, prefix, after, limit),
        );
        let listing = self.server.ask("list", call, |_| sql);
        let (time, rows) = reading_of(&listing.await?)?;
        Ok(Listed::of(time, rows, limit))
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let call = self.server.connections.default_call();
        let forgetting = self.server.ask("forget", call, |_| {
            commands::forget(&self.server.table, after)
        });
        let rows = forgetting.await?;
        let row = one(&rows)?;
        let dead = row.try_get("dead").map_err(unreadable)?;
        self.dead.warn(&self.server.table, dead);
        let last: Option<&str> = row.try_get("name").map_err(unreadable)?;
        let last = last.map(|_| commands::name_of(row)).transpose();
        last.map_err(unreadable)
    }

    fn grants_per_sweep(&self) -> u32 {
        256
    }

    fn is_contention(&self, error: &DriverError) -> bool {
        error::is_contention(error)
    }

    async fn repair(&self, error: &DriverError, give_up: Instant) -> bool {
        let class = Class::Work;
        self.may_create
            && error::is_missing(error)
            && match self
                .server
                .ask("create", Call { class, give_up }, |_| {
                    commands::create(&self.server.table)
                })
                .await
            {
                Ok(_) => true,
                Err(error) => error::is_made(&error),
            }
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
        let leases = batch.iter().filter_map(|entry| Some((entry, entry.lease?)));
        let leases: Vec<_> = leases.collect();
        if leases.is_empty() {
            return Ok(renewed(batch, &HashMap::new()));
        }
        let class = Class::Renewal;
        let extend = async |skips| {
            let extending = self.server.ask(RENEW, Call { class, give_up }, |values| {
                commands::extend(&self.server.table, &leases, skips, values)
            });
            extending.await
        };
        let extended = match extend(false).await {
            Err(error) if error::is_contention(&error) => extend(true).await,
            extended => extended,
        };
        let rest = |row: &PgRow| micros_of(row, "rest").map(Duration::from_micros);
        Ok(renewed(batch, &by_name(&extended?, rest)?))
    }

    fn waiters(&self) -> Option<&dyn Waiters> {
        Some(&self.listener)
    }

    async fn notify(&self, name: &LockName) {
        let sql = self.listener.subscriber().notify(name);
        let call = self.server.connections.default_call();
        if let Err(error) = self.server.ask("notify", call, |_| sql).await {
            tracing::debug!(%error, "postgres: waiters are not woken");
        }
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (server, call) = (&self.server, self.server.connections.default_call());
        let asked = server.ask("settings", call, |_| checks::settings(&server.table));
        checks::findings(&server.table, &self.dead, one(&asked.await?)?)
    }

    async fn close(&self) {
        self.listener.close();
        self.server.connections.close().await;
    }
}

/// The rows of a reading, and when it began.
type Reading = (StoreTime, Vec<(Vec<u8>, Stored)>);

fn reading_of(rows: &[PgRow]) -> Result<Reading> {
    let read = || {
        let (last, rows) = rows.split_last().ok_or(sqlx::Error::RowNotFound)?;
        let time = StoreTime::wall(micros_of(last, "begun")?);
        let rows: sqlx::Result<_> = rows.iter().map(commands::stored).collect();
        Ok((time, rows?))
    };
    read().map_err(unreadable)
}

/// The row of an answer that has one.
fn one(rows: &[PgRow]) -> Result<&PgRow> {
    rows.first()
        .ok_or_else(|| unreadable(sqlx::Error::RowNotFound))
}

pub(crate) fn unreadable(error: sqlx::Error) -> DriverError {
    DriverError::unanswered("the server's answer could not be read").with_source(error)
}

const NO_SCHEMA: &str =
    "the search path has no schema for the table: name one in `dlock.table`, as `schema.table`";

/// What a message says of itself.
pub(crate) const ACQUIRE: &str = "acquire";
const RENEW: &str = "renew";
pub(crate) const RELEASE: &str = "release";

/// A statement runs for a second at most after it judged the clock; its commit may wait for the disk.
const LATE: Duration = Duration::from_secs(2);

/// How long one attempt to connect may take, including name resolution, TLS and log-in.
const CONNECT: Duration = Duration::from_secs(5);

/// More statements of a kind in flight use the server's time for a commit; more requests in one gain little, and lock
/// rows for longer. A batch waits for a connection, and for its answer: at most 5 s and 4 s.
const POLICY: BatchPolicy = BatchPolicy {
    alone: 2,
    in_flight: 2,
    most: 64,
    least: Duration::from_millis(2 * commands::RUN_MS),
    waiting: 1_024,
    unanswered: Duration::from_secs(15),
};

/// Renewals of one statement.
const RENEW_BATCH: usize = 128;
