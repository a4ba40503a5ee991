//! The MongoDB driver: implements `DistributedLock` with one command for each step.
//!
//! The answer to a command decides the step. Acquire and release each have a short command for the usual
//! case. The driver sends the short command first where it is enough, and batches it when many requests are
//! in flight.

use crate::{
    commands::{self, Given},
    config::MongoConfig,
    connection::Connection,
    error,
    gather::{Gather, Turn},
    hints::{Ear, Hints},
    record::{Kind, Record, batch},
    renewals::{RENEW_BATCH, Renewals},
    sending::{Aim, Place},
    several::{Beside, Gives, Takes},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Holds, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Grant, Held, Hint, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, Wake, check_runtime,
    },
};
use futures_core::stream::BoxStream;
use mongodb::bson::DateTime;
use std::{num::NonZeroU32, sync::Arc, time::Duration};

/// Locks in a MongoDB collection.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_mongo::MongoDriver::connect("mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MongoDriver {
    capabilities: Capabilities,
    connection: Connection,
    hints: Hints,
    kind: Kind,
    takes: Gather<Takes>,
    gives: Gather<Gives>,
}

impl MongoDriver {
    /// Connects to the servers that a URL names: see [`MongoConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL or one of its settings cannot be read, or when the URL or the collection would
    /// weaken a lock. `Unavailable` when no primary can be reached or the primary refuses the log-in.
    /// `Unsupported` when the server is too old. The driver connects once and does not retry.
    ///
    /// # Cancel safety
    /// A dropped future leaves nothing behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_mongo::MongoDriver::connect("mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with settings that are made in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_mongo::{MongoConfig, MongoDriver};
    ///
    /// let config: MongoConfig = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let driver = MongoDriver::open(config.with_collection("billing")?).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        let connection = Connection::open(&config).await?;
        let greeted = Self::greeted(connection.clone(), &config).await;
        if greeted.is_err() {
            connection.close();
        }
        greeted
    }

    /// Uses the application's own client with its servers, log-in, pool and time-outs. The read and write
    /// concerns of that client do not count: each command carries dlock's own.
    ///
    /// The servers in `config` are only used to name the store, by which a `Pass` is matched. Make `config`
    /// from the URL that the client was made from.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: mongodb::Client) -> dlock_core::driver::Result<()> {
    /// let config = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let driver = dlock_mongo::MongoDriver::from_client(client, config).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_client(client: mongodb::Client, config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        Self::greeted(Connection::of(client, &config), &config).await
    }

    async fn greeted(connection: Connection, config: &MongoConfig) -> Result<Self> {
        let kind = connection.greet().await?;
        let streams = match kind {
            Kind::Standalone => {
                tracing::warn!(
                    "mongodb: a standalone server keeps locks no longer than its disk does, and waiters poll; use a replica set"
                );
                false
            }
            Kind::Replicated | Kind::Routed => Hints::can_be_had(&connection).await?,
        };
        let mut capabilities = Capabilities::new("mongodb", config.store());
        capabilities.wake = if streams { Wake::Hints } else { Wake::Poll };
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        let takes = Takes {
            connection: connection.clone(),
            kind,
        };
        Ok(Self {
            hints: Hints::new(connection.clone(), streams, kind),
            takes: Gather::new(takes, connection.runtime()),
            gives: Gather::new(Gives(connection.clone()), connection.runtime()),
            capabilities,
            connection,
            kind,
        })
    }

    fn renewals(&self) -> Renewals<'_> {
        Renewals {
            connection: &self.connection,
            kind: self.kind,
        }
    }

    /// Whether requests for several names may share a command. Behind routers the names may live on several
    /// shards, and a document that moves between shards may be counted on both.
    fn gathers(&self) -> bool {
        self.kind != Kind::Routed
    }

    /// Reads the document and answers it if another owner holds the lock or the lock is unavailable. A read
    /// takes nothing: the server executes it even after the client was killed, and it then blocks no other
    /// client.
    async fn seen_held(&self, req: &Acquire, place: &Arc<Place>) -> Result<Option<Record>> {
        let wanted = vec![req.name.as_str().into()];
        let find = commands::find(self.connection.collection(), wanted, "local");
        let found = batch(&self.connection.send(place, find).await?);
        let record = found
            .first()
            .map(|shown| self.connection.seen(shown))
            .transpose()?;
        Ok(record.filter(|record| record.is_shut_to(&req.owner)))
    }

    /// Tries the short acquire in a batch with others. `None`: the request has to be sent alone. The flag
    /// says whether the batch may have taken the lock all the same.
    async fn take_beside(&self, req: &Acquire) -> Result<(Option<Acquired>, bool)> {
        let last = self.connection.not_after(req.give_up).await?;
        let record = match self.takes.ask((req.clone(), last)).await? {
            Beside::Found(record) => record,
            Beside::Alone => return Ok((None, false)),
            Beside::Doubtful => return Ok((None, true)),
        };
        if let Some(rest) = record.rest_of(&req.owner, req.hold) {
            let granted = self.granted(req, &record, rest)?;
            return Ok((Some(granted), false));
        }
        let is_shut = record.is_shut_to(&req.owner);
        Ok((is_shut.then(|| self.lost(req, &record)), false))
    }

    /// The short acquire. `None`: the lock was not free, which needs the full command.
    async fn take(
        &self,
        req: &Acquire,
        last: DateTime,
        place: &Arc<Place>,
    ) -> Result<Option<Acquired>> {
        let take = commands::take(self.connection.collection(), req, last);
        let reply = self.connection.send(place, take).await?;
        let Some(record) = self.connection.answered(&reply)? else {
            return Ok(None);
        };
        let rest = record.rest_of(&req.owner, req.hold);
        let granted = self.granted(req, &record, rest.ok_or_else(error::garbled)?);
        granted.map(Some)
    }

    /// Acquires with a command of its own, or with as many commands as the decision needs.
    async fn acquire_alone(
        &self,
        req: &Acquire,
        free: bool,
        beside: bool,
        turn: Option<Turn<'_, Takes>>,
    ) -> Result<Acquired> {
        let place = self.connection.place(Aim::Acquire).await?;
        if (place.waited || beside) && self.connection.now() > req.give_up {
            return Err(error::unsent());
        }
        let last = self.connection.not_after(req.give_up).await?;
        let collection = self.connection.collection();
        if free
            && !beside
            && let Some(answer) = self.take(req, last, &place).await?
        {
            return Ok(answer);
        }
        drop(turn);
        if (free || req.look)
            && !beside
            && req.join.is_none()
            && let Some(record) = self.seen_held(req, &place).await?
        {
            return Ok(match free {
                true => self.lost(req, &record),
                false => Acquired::Held(self.refused(req, &record)),
            });
        }
        let command = commands::acquire(collection, req, last);
        let reply = self.connection.upsert(&place, &command).await?;
        // Only a join creates no document.
        let Some(record) = self.connection.answered(&reply)? else {
            return Ok(Acquired::Gone);
        };
        if let Some(rest) = record.rest_of(&req.owner, req.hold) {
            return self.granted(req, &record, rest);
        }
        let mine = record.is_of(&req.owner);
        if record.now > last.timestamp_millis() {
            return Err(error::late());
        }
        match req.join {
            Some(token) if !mine || token.0 != record.token => Ok(Acquired::Gone),
            _ if mine => Err(error::full()),
            _ => Ok(Acquired::Held(self.refused(req, &record))),
        }
    }

    /// The name was reported free, and the lock is held or unavailable all the same. An unavailable lock is
    /// no lost race.
    fn lost(&self, req: &Acquire, record: &Record) -> Acquired {
        if req.look && record.holds() > 0 {
            self.hints.lost(&req.name, record);
        }
        Acquired::Held(self.refused(req, record))
    }

    fn granted(&self, req: &Acquire, record: &Record, rest: Duration) -> Result<Acquired> {
        self.waits_no_more(req);
        self.connection.purge_a_little();
        let holds = NonZeroU32::new(record.holds()).ok_or_else(error::garbled)?;
        let token = FencingToken(record.token);
        let grant = Grant::new(token, holds, rest.min(req.lease.length()));
        Ok(Acquired::Granted(grant))
    }

    fn refused(&self, req: &Acquire, record: &Record) -> Held {
        let mut held = Held::default();
        held.by = record.holder();
        // The end is a whole millisecond, which has to be over.
        let rest = record.rest().unwrap_or_default() + TICK;
        let waits = |ticket| self.hints.refused(&req.name, ticket, record);
        let ear = req.line.map_or(Ear::Open, waits);
        let look = match (self.capabilities.wake, ear) {
            (Wake::Hints, Ear::Open) => LOOK,
            (Wake::Hints, Ear::Deaf) => LOOK_DEAF,
            _ => Duration::MAX,
        };
        held.poll_in = Some(rest.min(look));
        held
    }
}

#[async_trait]
impl DistributedLock for MongoDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// There is one primary, so all names share its fate. Behind routers a batch may touch several shards,
    /// and fails with the slowest.
    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        // The last news of the name was that it is free, so most likely it still is.
        let free = req.join.is_none() && self.hints.is_free(&req.name);
        let plain = req.join.is_none() && (free || !req.look);
        let turn = (plain && self.gathers()).then(|| self.takes.turn(&req.name));
        let beside = turn.as_ref().is_some_and(Turn::is_beside);
        let mut doubtful = false;
        if beside {
            let answer;
            (answer, doubtful) = self.take_beside(req).await?;
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
        let alone = self.acquire_alone(req, free, beside, turn).await;
        alone.map_err(|error| {
            if doubtful {
                return error::open(error);
            }
            error
        })
    }

    /// There is no queue: a ticket is only an entry in the filter of the change stream.
    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.hints.forget(name, ticket);
        Ok(())
    }

    async fn renew(
        &self,
        _: Lane,
        entries: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.renewals().all(entries, give_up).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        if let (Holds::One(hold), None, true) = (req.holds, req.keep, self.gathers()) {
            let (name, owner) = (req.name.clone(), req.owner);
            if self.gives.give(Given { name, owner, hold }).await? {
                self.hints.freed(&req.name);
                return Ok(Released::Freed);
            }
        }
        let command = commands::release(self.connection.collection(), req);
        let reply = self.connection.run(Aim::Other, command).await?;
        let Some(before) = self.connection.answered(&reply)? else {
            return Ok(Released::NotHeld { by: None });
        };
        let found = match req.holds {
            Holds::One(hold) => before.rest_of(&req.owner, hold).is_some(),
            Holds::All => before.is_of(&req.owner),
        };
        if !found {
            return Ok(Released::NotHeld {
                by: before.holder(),
            });
        }
        let left = match req.holds {
            Holds::One(_) => before.holds() - 1,
            Holds::All => 0,
        };
        if let Some(holds) = NonZeroU32::new(left) {
            return Ok(Released::StillHeld { holds });
        }
        Ok(match before.kept(req.keep) {
            Some(rest) => Released::Kept { rest },
            None => Released::Freed,
        })
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        self.hints.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let wanted = vec![name.as_str().into()];
        let find = commands::find(self.connection.collection(), wanted, self.kind.level());
        match batch(&self.connection.run(Aim::Other, find).await?).first() {
            Some(shown) => Ok(self.connection.seen(shown)?.snapshot(name.clone())),
            None => Ok(Snapshot::free(name.clone())),
        }
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = from
            .map(|from| read_cursor(from).ok_or_else(error::bad_cursor))
            .transpose()?;
        let behind = after.filter(|after| *after >= prefix);
        let most = limit.clamp(1, LONGEST_PAGE);
        let collection = self.connection.collection();
        let page = commands::page(
            collection,
            behind.unwrap_or(prefix),
            behind.is_none(),
            i64::try_from(most).unwrap_or(1),
            self.kind.level(),
        );
        let looked_at = batch(&self.connection.run(Aim::Other, page).await?);
        let mut found = Vec::new();
        for shown in &looked_at {
            let name = shown.get_str("_id").unwrap_or_default();
            if !name.starts_with(prefix) {
                return Ok(Page::new(found, None));
            }
            // A foreign document, or one whose `_id` is no lock name, is no lock.
            if let (Ok(name), Ok(record)) = (name.parse(), self.connection.seen(shown)) {
                let snapshot = record.snapshot(name);
                found.extend(
                    Some(snapshot).filter(|one| !one.holders.is_empty() || one.shut.is_some()),
                );
            }
        }
        let last = looked_at.last().filter(|_| looked_at.len() == most);
        let next = last.and_then(|shown| shown.get_str("_id").ok());
        Ok(Page::new(
            found,
            next.map(|name| Cursor([CURSOR, name.as_bytes()].concat())),
        ))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let command = commands::break_lock(self.connection.collection(), name, only);
        let reply = self.connection.run(Aim::Other, command).await?;
        let Some(before) = self.connection.answered(&reply)? else {
            return Ok(Broken::WasFree);
        };
        let token = (before.holds() > 0).then_some(FencingToken(before.token));
        if token.is_none() && before.shut().is_none() {
            return Ok(Broken::WasFree);
        }
        if only.is_some() && only != token {
            return Ok(Broken::Changed { token });
        }
        Ok(Broken::Freed { token })
    }

    /// Requests in flight run to completion. The driver accepts no new ones.
    async fn close(&self) {
        self.hints.close();
        self.connection.close();
    }
}

impl MongoDriver {
    /// The ticket is used up. The next ticket is registered before this one is removed, so that a name with
    /// waiters stays in the filter.
    fn waits_no_more(&self, req: &Acquire) {
        let used = req.line.inspect(|_| self.hints.won(&req.name));
        if let Some(next) = req.next {
            self.hints.listen(&req.name, next);
        }
        if let Some(ticket) = used {
            self.hints.forget(&req.name, ticket);
        }
    }
}

fn read_cursor(cursor: &Cursor) -> Option<&str> {
    std::str::from_utf8(cursor.0.strip_prefix(CURSOR)?).ok()
}

/// `maxTimeMS` of every command that may take a lock.
const LATE: Duration = Duration::from_secs(1);
/// Poll interval while the change stream works: a lost event delays a waiter by this much at most.
const LOOK: Duration = Duration::from_secs(2);
/// Poll interval while there is no change stream.
const LOOK_DEAF: Duration = Duration::from_millis(100);
const TICK: Duration = Duration::from_millis(1);
/// The most documents that one step of a listing reads.
const LONGEST_PAGE: usize = 1_000;
/// The first bytes of a cursor. The name after which the next page begins follows.
const CURSOR: &[u8] = b"name:";
