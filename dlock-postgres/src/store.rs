//! Record store: one row per name in a table.

use crate::{
    PostgresConfig, checks, commands,
    config::TableName,
    connection::{Answer, Connections, micros_of},
    error,
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, Holds, Instant, LockName,
    driver::{
        Acquire, Capabilities, DriverError, Release, Renew, Renewed, Result,
        kit::{Call, Class, Freed, Listed, Read, RecordStore, StoreTime, Stored, Write, Written},
    },
};
use futures_util::future::join_all;
use sqlx::Row;
use std::{collections::HashMap, time::Duration};

/// The table of locks of one server.
#[derive(Debug)]
pub struct Table {
    connections: Connections,
    name: TableName,
    may_create: bool,
    capabilities: Capabilities,
}

impl Table {
    pub(crate) async fn open(config: PostgresConfig) -> Result<Self> {
        let mut capabilities = Capabilities::new("postgres", config.store());
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        let table = Self {
            connections: Connections::new(config.options, config.connections),
            name: config.table,
            may_create: config.create,
            capabilities,
        };
        let call = table.connections.patience();
        if let Err(error) = table
            .ask("probe", call, |_| commands::probe(&table.name))
            .await
            && !table.repair(&error, call.give_up).await
        {
            return Err(error);
        }
        let call = table.connections.patience();
        let asked = table.ask("settings", call, |_| checks::settings(&table.name));
        checks::warn(&table.name, asked.await);
        Ok(table)
    }

    async fn ask(
        &self,
        what: &str,
        call: Call,
        body: impl FnOnce(u64) -> String + Send,
    ) -> Result<Answer> {
        self.connections.run(what, call, body).await
    }

    async fn replace(&self, write: &Write, call: Call) -> Result<Written> {
        let what = match call.class {
            Class::Renewal => RENEW,
            Class::Work if write.record.owner.is_none() => RELEASE,
            Class::Acquire | Class::Work => ACQUIRE,
        };
        let answer = self
            .ask(what, call, |_| commands::replace(&self.name, write))
            .await?;
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
        let answer = self
            .ask("read", call, |_| commands::read(&self.name, names))
            .await?;
        let mut found = rows(&answer)?.into_iter().collect::<HashMap<_, _>>();
        let records = names.iter().map(|name| {
            found
                .remove(name.as_str().as_bytes())
                .unwrap_or(Stored::Absent)
        });
        Ok(Read {
            time: StoreTime::wall(answer.begun),
            records: records.collect(),
        })
    }

    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>> {
        if let [write] = writes {
            return Ok(vec![self.replace(write, call).await?]);
        }
        // Each in a transaction of its own: a row that is locked delays only its own write.
        let written = join_all(writes.iter().map(|write| self.replace(write, call))).await;
        Ok(written
            .into_iter()
            .map(|written| written.unwrap_or_else(Written::Failed))
            .collect())
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let call = self.connections.patience();
        let answer = self
            .ask("list", call, |_| {
                commands::list(&self.name, prefix, after, limit)
            })
            .await?;
        let rows = rows(&answer)?;
        let next = rows
            .last()
            .filter(|_| rows.len() == limit)
            .map(|(name, _)| name.clone());
        // A row whose name is none of dlock's is no lock.
        let records = rows.into_iter().filter_map(|(name, stored)| {
            let name = LockName::new(String::from_utf8(name).ok()?).ok()?;
            Some((name, stored))
        });
        Ok(Listed {
            time: StoreTime::wall(answer.begun),
            records: records.collect(),
            next,
        })
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let call = self.connections.patience();
        let answer = self
            .ask("forget", call, |_| commands::forget(&self.name, after))
            .await?;
        answer
            .rows
            .first()
            .map(commands::name_of)
            .transpose()
            .map_err(unreadable)
    }

    fn grants_per_sweep(&self) -> u32 {
        256
    }

    fn is_contention(&self, error: &DriverError) -> bool {
        error::is_contention(error)
    }

    async fn repair(&self, error: &DriverError, give_up: Instant) -> bool {
        let call = Call {
            class: Class::Work,
            give_up,
        };
        self.may_create
            && error::is_missing(error)
            && match self
                .ask("create", call, |_| commands::create(&self.name))
                .await
            {
                Ok(_) => true,
                Err(error) => error::is_made(&error),
            }
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        if req.join.is_some() || req.next_ticket.is_some() {
            return Ok(None);
        }
        let call = Call {
            class: Class::Work,
            give_up: req.give_up,
        };
        let answer = self
            .ask(ACQUIRE, call, |last| commands::take(&self.name, req, last))
            .await?;
        let Some(row) = answer.rows.first() else {
            return Ok(None);
        };
        Ok(Some(FencingToken(
            micros_of(row, "token").map_err(unreadable)?,
        )))
    }

    async fn free(&self, req: &Release) -> Result<Freed> {
        let (Holds::One(hold), None) = (req.holds, req.min_hold) else {
            return Ok(Freed::Undecided);
        };
        let (call, sql) = (
            self.connections.patience(),
            commands::free(&self.name, &req.name, &req.owner, hold),
        );
        let answer = self.ask(RELEASE, call, |_| sql).await?;
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
        let asked: Vec<_> = batch
            .iter()
            .filter_map(|entry| Some((entry, entry.lease?)))
            .collect();
        if asked.is_empty() {
            return Ok(batch.iter().map(|_| None).collect());
        }
        let call = Call {
            class: Class::Renewal,
            give_up,
        };
        let answer = self
            .ask(RENEW, call, |last| {
                commands::extend(&self.name, &asked, last)
            })
            .await?;
        let rests = answer
            .rows
            .iter()
            .map(|row| Ok((commands::name_of(row)?, micros_of(row, "rest")?)));
        let rests: HashMap<_, _> = rests
            .collect::<std::result::Result<_, _>>()
            .map_err(unreadable)?;
        let renewed = batch.iter().map(|entry| {
            let rest = *rests.get(entry.name.as_str().as_bytes())?;
            Some(Ok(Renewed::Until {
                valid_for: Duration::from_micros(rest),
            }))
        });
        Ok(renewed.collect())
    }

    async fn close(&self) {
        self.connections.close().await;
    }
}

fn rows(answer: &Answer) -> Result<Vec<(Vec<u8>, Stored)>> {
    let rows = answer.rows.iter().map(commands::stored);
    rows.collect::<std::result::Result<_, _>>()
        .map_err(unreadable)
}

fn unreadable(error: sqlx::Error) -> DriverError {
    DriverError::unanswered("the server's answer could not be read").with_source(error)
}

/// What a message says of itself.
const ACQUIRE: &str = "acquire";
const RENEW: &str = "renew";
const RELEASE: &str = "release";

/// A statement runs for a second at most after it judged the clock; its commit may wait for the disk.
const LATE: Duration = Duration::from_secs(2);

/// Renewals of one statement.
const RENEW_BATCH: usize = 128;
