//! Record store: one row per name in a table.

use crate::{
    PostgresConfig, checks,
    commands::{self, RUN_MS, Values},
    config::misuse,
    connection::{Answer, Connections, Dialer, micros_of},
    error,
    listener::Listener,
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Capabilities, DriverError, Release, Renew, Renewed, Result, Ticket, Wake, WakeUp,
        kit::{
            Call, Class, Freed, Listed, Read, RecordStore, StoreTime, Stored, Subscriptions, Write,
            Written, hash_of, renewed,
        },
    },
};
use futures_util::{future::join_all, stream::BoxStream};
use sqlx::{Row, postgres::PgRow};
use std::{collections::HashMap, time::Duration};

/// The table of locks of one server.
#[derive(Debug)]
pub struct Table {
    connections: Connections,
    /// Quoted, with its schema.
    name: String,
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
        if config.table.name.schema().is_none() {
            // No session's search path shall redirect a statement.
            let name = config.table.name.quoted('"');
            let call = connections.default_call();
            let answer = send(&connections, "place", call, |_| commands::place(&name)).await?;
            let schema = answer
                .rows
                .first()
                .and_then(|row| row.try_get("schema").ok());
            let schema: Option<String> = schema.flatten();
            let schema = schema.ok_or_else(|| misuse(NO_SCHEMA))?;
            config.table.name = config.table.name.within(schema);
        }
        let name = config.table.name.quoted('"');
        let mut capabilities = Capabilities::new("postgres", config.store());
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        let dialer = connections.dialer();
        let listener = Subscriptions::new(Listener {
            options: dialer.direct(),
            table: hash_of(&name),
        });
        if dialer.is_direct() {
            capabilities.wake = Wake::Notify;
        } else {
            capabilities.wake = Wake::Poll;
            listener.close();
        }
        let table = Self {
            connections,
            name,
            may_create: config.table.create,
            capabilities,
            listener,
            dead: checks::Dead::default(),
        };
        let call = table.connections.default_call();
        let probe = table.ask("probe", call, |_| commands::probe(&table.name));
        if let Err(error) = probe.await
            && !error::is_contention(&error)
            && !table.repair(&error, call.give_up).await
        {
            return Err(error);
        }
        let asked = table.ask("settings", call, |_| checks::settings(&table.name));
        checks::warn(&table.name, &table.dead, asked.await);
        Ok(table)
    }

    async fn ask(
        &self,
        what: &str,
        call: Call,
        body: impl FnOnce(&mut Values) -> String + Send,
    ) -> Result<Answer> {
        send(&self.connections, what, call, body).await
    }

    async fn replace(&self, write: &Write, call: Call) -> Result<Written> {
        let what = match call.class {
            Class::Renewal => RENEW,
            Class::Work if write.record.owner.is_none() => RELEASE,
            Class::Acquire | Class::Work => ACQUIRE,
        };
        let replacing = self.ask(what, call, |values| {
            commands::replace(&self.name, write, values)
        });
        let answer = replacing.await?;
        Ok(match answer.rows.is_empty() {
            false => Written::Written,
            true if answer.now > write.not_after => Written::Late,
            true => Written::Changed,
        })
    }
}

#[async_trait]
impl RecordStore for Table {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> Result<Read> {
        let reading = self.ask("read", call, |_| commands::read(&self.name, names));
        let answer = reading.await?;
        Ok(Read::of(
            StoreTime::wall(answer.begun),
            names,
            rows(&answer)?,
        ))
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
            self.connections.default_call(),
            commands::list(&self.name, prefix, after, limit),
        );
        let answer = self.ask("list", call, |_| sql).await?;
        Ok(Listed::of(
            StoreTime::wall(answer.begun),
            rows(&answer)?,
            limit,
        ))
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let call = self.connections.default_call();
        let forgetting = self.ask("forget", call, |_| commands::forget(&self.name, after));
        let answer = forgetting.await?;
        let swept = |row: &PgRow| {
            self.dead.warn(&self.name, row.try_get("dead")?);
            let last: Option<&str> = row.try_get("name")?;
            last.map(|_| commands::name_of(row)).transpose()
        };
        let last = answer.rows.first().map(swept).transpose();
        last.map(Option::flatten).map_err(unreadable)
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
                .ask("create", Call { class, give_up }, |_| {
                    commands::create(&self.name)
                })
                .await
            {
                Ok(_) => true,
                Err(error) => error::is_made(&error),
            }
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let (class, give_up) = (Class::Work, req.give_up);
        let marks = req.next_ticket.is_some() && self.capabilities.wake == Wake::Notify;
        let taking = self.ask(ACQUIRE, Call { class, give_up }, |values| {
            commands::take(&self.name, req, marks, values)
        });
        let answer = taking.await?;
        let token = answer.rows.first().map(|row| micros_of(row, "token"));
        Ok(token.transpose().map_err(unreadable)?.map(FencingToken))
    }

    async fn free(&self, req: &Release, hold: HoldId) -> Result<Freed> {
        let call = self.connections.default_call();
        let freeing = self.ask(RELEASE, call, |values| {
            commands::free(&self.name, req, hold, values)
        });
        let answer = freeing.await?;
        Ok(match answer.rows.first().map(|row| row.try_get("waited")) {
            None => Freed::Undecided,
            Some(Ok(false)) => Freed::Free,
            Some(_) => Freed::WaitedFor,
        })
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
        let extending = self.ask(RENEW, Call { class, give_up }, |values| {
            commands::extend(&self.name, &leases, values)
        });
        let answer = extending.await?;
        let rest = |row| {
            let rest = Duration::from_micros(micros_of(row, "rest")?);
            Ok((commands::name_of(row)?, rest))
        };
        let rests: sqlx::Result<HashMap<_, _>> = answer.rows.iter().map(rest).collect();
        Ok(renewed(batch, &rests.map_err(unreadable)?))
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.listener.stream()
    }

    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        self.listener.listen(name, ticket).await
    }

    fn forget_ticket(&self, name: &LockName, ticket: Ticket) {
        self.listener.forget(name, ticket);
    }

    async fn notify(&self, name: &LockName) {
        let sql = self.listener.subscriber().notify(name);
        let call = self.connections.default_call();
        if let Err(error) = self.ask("notify", call, |_| sql).await {
            tracing::debug!(%error, "postgres: waiters are not woken");
        }
    }

    async fn close(&self) {
        self.listener.close();
        self.connections.close().await;
    }
}

/// Sends statements in one message, as one transaction. `body` gets the server's time at `call.give_up`, with the values.
async fn send(
    connections: &Connections,
    what: &str,
    call: Call,
    body: impl FnOnce(&mut Values) -> String + Send,
) -> Result<Answer> {
    let mut lent = connections.lend(call).await?;
    let last = lent.not_after(call.give_up);
    // A batch of renewals is answered as a whole: a row that a stranger has locked must not take its time away from the others.
    let rest = call.give_up.since(connections.clock().now()).as_millis() / 2;
    let lock_ms = u64::try_from(rest).map_or(RUN_MS, |rest| rest.clamp(1, RUN_MS));
    let limit = lent.limit();
    let asking = lent.session().ask(what, lock_ms, last, body);
    let answer = limit.of(asking).await;
    let answer = lent.heard(answer)?;
    lent.told(Duration::from_micros(answer.now));
    Ok(answer)
}

fn rows(answer: &Answer) -> Result<Vec<(Vec<u8>, Stored)>> {
    let rows: sqlx::Result<_> = answer.rows.iter().map(commands::stored).collect();
    rows.map_err(unreadable)
}

fn unreadable(error: sqlx::Error) -> DriverError {
    DriverError::unanswered("the server's answer could not be read").with_source(error)
}

const NO_SCHEMA: &str =
    "the search path has no schema for the table: name one in `dlock.table`, as `schema.table`";

/// What a message says of itself.
const ACQUIRE: &str = "acquire";
const RENEW: &str = "renew";
const RELEASE: &str = "release";

/// A statement runs for a second at most after it judged the clock; its commit may wait for the disk.
const LATE: Duration = Duration::from_secs(2);

/// How long one attempt to connect may take, including name resolution, TLS and log-in.
const CONNECT: Duration = Duration::from_secs(5);

/// Renewals of one statement.
const RENEW_BATCH: usize = 128;
