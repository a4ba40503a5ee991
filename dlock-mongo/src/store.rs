//! Record store: one document per name in a collection of the server.

use crate::{
    batches::{Frees, Server, Takes, policy},
    commands::{self, A_REPLY, Before, Sole},
    config::MongoConfig,
    connection::Connection,
    deployment::Kind,
    document::{Seen, batch},
    error,
    listener::Listener,
    renewals::{ALONE, RENEW_BATCH},
};
use async_trait::async_trait;
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Capabilities, Finding, Release, Renew, Renewed, Result, Wake,
        kit::{
            Batcher, Call, Class, Expected, Freed, Listed, Read, RecordStore, Stored, Waiters,
            Write, Written, log_findings,
        },
    },
};
use futures_util::{StreamExt, stream};
use std::{iter, time::Duration};

/// The documents of a collection of locks.
#[derive(Debug)]
pub struct MongoStore {
    capabilities: Capabilities,
    server: Server,
    wake_ups: Listener,
    takes: Batcher<Takes>,
    frees: Batcher<Frees>,
}

impl MongoStore {
    pub(crate) async fn greeted(connection: Connection, config: &MongoConfig) -> Result<Self> {
        let kind = connection.greet().await?;
        let streams = match kind {
            Kind::Standalone => false,
            Kind::Replicated | Kind::Routed => Listener::can_be_had(&connection).await?,
        };
        let mut capabilities = Capabilities::new("mongo", config.store());
        capabilities.shares = true;
        capabilities.raises = true;
        capabilities.wake = if streams { Wake::Notify } else { Wake::Poll };
        capabilities.late = LATE;
        capabilities.renew_batch = RENEW_BATCH;
        let server = Server { connection, kind };
        let store = Self {
            capabilities,
            wake_ups: Listener::new(server.connection.clone(), streams),
            takes: Batcher::new(Takes(server.clone()), policy(kind)),
            frees: Batcher::new(Frees(server.clone()), policy(kind)),
            server,
        };
        log_findings("mongodb", &store.diagnose().await);
        Ok(store)
    }

    fn connection(&self) -> &Connection {
        &self.server.connection
    }

    async fn find(&self, names: &[LockName], class: Class, level: &str) -> Result<Read> {
        let connection = self.connection();
        let mut found: Vec<Seen> = Vec::new();
        for some in names.chunks(A_REPLY) {
            let find = commands::find(connection.collection(), some.iter(), level);
            let reply = connection.run(class, find).await?;
            let before = found.len();
            found.extend(batch(&reply).filter_map(Seen::read));
            if let Some(seen) = found.get(before) {
                connection.observe(seen.time);
            }
        }
        let time = match found.first() {
            // The earliest one: the write judges ends by the server's time again, and what is left of a lease counts
            // from before the request.
            Some(seen) => seen.time,
            // No document shows the time. None of these decisions is about an end, so the time may be later.
            None => connection.hello().await?.1,
        };
        Ok(Read::of(time, names, found.into_iter().map(Seen::row)))
    }

    async fn replace(&self, write: &Write, class: Class) -> Result<Written> {
        let connection = self.connection();
        let collection = connection.collection();
        let permits = connection.reserve(class).await?;
        let before = match write.expected {
            Expected::Version(version) => Before::Version(version),
            Expected::Absent => {
                let version = write.record.version.saturating_sub(1);
                let make = commands::make(collection, &write.name, version);
                let answer = connection.ask(&permits, make).await?;
                if error::is_duplicate(&answer) {
                    return Ok(Written::Changed);
                }
                error::confirmed(answer)?;
                Before::Version(version)
            }
            Expected::Damaged => {
                let find = commands::find(collection, iter::once(&write.name), "local");
                let reply = connection.send(&permits, find).await?;
                let Some(shown) = batch(&reply).next() else {
                    return Ok(Written::Changed);
                };
                match Seen::read(shown).map(|seen| seen.stored) {
                    Some(Stored::Damaged(_)) => {}
                    _ => return Ok(Written::Changed),
                }
                let damaged = shown.get_document("lock").map_err(|_| error::foreign())?;
                Before::Document(damaged.clone())
            }
        };
        let swap = commands::swap(collection, write, class, &before);
        let reply = connection.send(&permits, swap).await?;
        Ok(match error::count(&reply)? {
            0 => Written::Changed,
            _ => Written::Written,
        })
    }
}

#[async_trait]
impl RecordStore for MongoStore {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], call: Call) -> Result<Read> {
        self.find(names, call.class, self.server.kind.proven())
            .await
    }

    /// What the primary has at this moment, perhaps not for good.
    async fn glance(&self, name: &LockName, call: Call) -> Result<Option<Read>> {
        let read = self.find(std::slice::from_ref(name), call.class, "local");
        let read = read.await?;
        if let [Stored::Record(record)] = &read.records[..]
            && record.is_unavailable(read.time)
        {
            self.wake_ups.refused(name);
        }
        Ok(Some(read))
    }

    async fn write(&self, writes: &[Write], call: Call) -> Result<Vec<Written>> {
        let each: Vec<_> = writes
            .iter()
            .map(|write| self.replace(write, call.class))
            .collect();
        let written = stream::iter(each).buffered(ALONE);
        let written = written.map(|written| written.unwrap_or_else(Written::Failed));
        let written: Vec<_> = written.collect().await;
        if let (Class::Acquire, [write], [Written::Written]) = (call.class, writes, &written[..]) {
            self.wake_ups.won(&write.name);
        }
        Ok(written)
    }

    async fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Result<Listed> {
        let (after, limit) = (String::from_utf8_lossy(after), limit.min(A_REPLY));
        let connection = self.connection();
        let level = self.server.kind.proven();
        let page = commands::page(connection.collection(), (prefix, &after), limit, level);
        let reply = connection.run(Class::Work, page).await?;
        // The names that follow in their order may have another prefix.
        let looked_at = batch(&reply).filter_map(Seen::read);
        let here = looked_at.take_while(|seen| seen.name.starts_with(prefix));
        let here: Vec<Seen> = here.collect();
        let time = here.first().map(|seen| seen.time).unwrap_or_default();
        let rows = here.into_iter().map(Seen::row);
        Ok(Listed::of(time, rows.collect(), limit))
    }

    async fn forget(&self, after: &[u8]) -> Result<Option<Vec<u8>>> {
        let connection = self.connection();
        let after = String::from_utf8_lossy(after);
        let old = commands::old(connection.collection(), &after);
        let looked_at = connection.run(Class::Work, old).await?;
        let (last, old) = commands::purgeable(&looked_at);
        if !old.is_empty() {
            let purge = commands::purge(connection.collection(), old);
            connection.run(Class::Work, purge).await?;
        }
        Ok(last.map(String::into_bytes))
    }

    fn grants_per_sweep(&self) -> u32 {
        SWEEP_GRANTS
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let taken = self.takes.ask(req).await?;
        if taken.is_some() && req.ticket.is_some() {
            self.wake_ups.won(&req.name);
        }
        Ok(taken)
    }

    async fn free(&self, req: &Release, hold: HoldId) -> Result<Freed> {
        let (name, owner) = (req.name.clone(), req.owner);
        self.frees.ask(&Sole { name, owner, hold }).await
    }

    async fn extend(
        &self,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Option<Result<Renewed>>>> {
        self.server.extend_all(batch, give_up).await
    }

    fn waiters(&self) -> Option<&dyn Waiters> {
        Some(&self.wake_ups)
    }

    /// The change stream tells of releases.
    fn marks(&self) -> bool {
        false
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (hello, time) = self.connection().hello().await?;
        let voters = match self.server.kind {
            Kind::Replicated => self.connection().voters().await,
            Kind::Standalone | Kind::Routed => None,
        };
        let mut found = self.server.kind.findings(&hello, voters);
        if self.server.kind != Kind::Standalone {
            found.push(match self.capabilities.wake {
                Wake::Notify => Finding::ok("the user may open change streams, which wake waiters"),
                _ => Finding::warning(
                    "the user may open no change streams, so waiters poll",
                    "give it find and changeStream on the collection",
                ),
            });
        }
        found.push(Finding::clocks(Duration::from_micros(time.now)));
        Ok(found)
    }

    /// Requests in flight run to completion. The driver accepts no new ones.
    async fn close(&self) {
        self.wake_ups.close();
        self.connection().close();
    }
}

/// `maxTimeMS` of every command that may take a lock.
const LATE: Duration = Duration::from_secs(1);
/// A sweep looks at four times as many names, so deletion keeps up even if every grant is of a new name.
const SWEEP_GRANTS: u32 = 256;
