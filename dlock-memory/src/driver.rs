//! Memory driver: the contract over a [`MemoryStore`].

use crate::{
    commands::{self, Ask},
    config::MemoryConfig,
    connection::Connection,
    error::MemoryError,
    fault::{Call, Faults},
    store::MemoryStore,
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Error, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Hint, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, Wake,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};

/// One client's driver over a [`MemoryStore`].
///
/// Calls complete without waiting unless the server is stopped or the fault script says otherwise.
#[derive(Debug)]
pub struct MemoryDriver {
    connection: Connection,
    config: MemoryConfig,
    capabilities: Capabilities,
}

impl MemoryDriver {
    /// Connects to that store. It never fails, not even while the store is down. The config's name is
    /// ignored.
    #[must_use]
    pub fn connect(store: &MemoryStore, config: MemoryConfig) -> Self {
        let mut capabilities = Capabilities::new("memory", store.label());
        capabilities.wake = config.wake;
        Self {
            connection: Connection::open(store),
            config,
            capabilities,
        }
    }

    /// Connects to the process's store of a URL, `memory:NAME?dlock.wake=line|hints|poll`: see
    /// [`MemoryConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL is not that of a memory store, or has an unknown parameter.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        let config: MemoryConfig = url.parse()?;
        Ok(Self::connect(&MemoryStore::named(&config.name), config))
    }

    /// The fault script between this driver and its store.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.connection.faults
    }

    /// The server.
    #[must_use]
    pub fn store(&self) -> &MemoryStore {
        &self.connection.store
    }

    /// Remembers the tickets' present places: the server may forget a ticket at any time.
    fn remember(&self, req: &Acquire, asked: &commands::Asked) {
        let places = &self.connection.places;
        if let Some(ticket) = req.line {
            match (&asked.acquired, asked.place) {
                (Acquired::Granted(_), _) => places.forget(ticket),
                (_, Some(place)) => places.refused(ticket, place),
                (_, None) => {}
            }
        }
        if let (Some(ticket), Some(place)) = (req.next, asked.next) {
            places.queued(ticket, place);
        }
    }

    #[cfg(test)]
    pub(crate) fn places(&self) -> &crate::connection::Places {
        &self.connection.places
    }
}

#[async_trait]
impl DistributedLock for MemoryDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn lane(&self, name: &LockName) -> Lane {
        match self.config.lanes.get() {
            1 => Lane(0),
            lanes => Lane(fnv1a(name.as_str().as_bytes()) % lanes),
        }
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let ask = Ask {
            client: self.connection.client,
            terms: self.config.terms(req.lease),
            place: req
                .line
                .and_then(|ticket| self.connection.places.of(ticket)),
            not_after: self.store().time_at(req.give_up),
            req: req.clone(),
        };
        let lane = Some(self.lane(&req.name));
        let work = move |state: &mut _, now| commands::acquire(state, now, &ask);
        let asked = self.connection.call(Call::Acquire, lane, work).await?;
        self.remember(req, &asked);
        Ok(asked.acquired)
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.connection.places.forget(ticket);
        let client = self.connection.client;
        let (lane, name) = (Some(self.lane(name)), name.clone());
        let work = move |state: &mut _, now| {
            commands::leave(state, now, &name, client, ticket);
            Ok(())
        };
        Ok(self.connection.call(Call::Leave, lane, work).await?)
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        if batch.iter().any(|entry| self.lane(&entry.name) != lane) {
            return Err(MemoryError::MixedLanes.into());
        }
        let not_after = self.store().time_at(give_up);
        let stuck = self.connection.faults.stuck();
        let batch = batch.to_vec();
        let work = move |state: &mut _, now| {
            commands::in_time(now, not_after)?;
            let one = |entry: &Renew| {
                if stuck.contains(&entry.name) {
                    return Err(MemoryError::Stuck.into());
                }
                Ok(commands::renew(state, now, entry))
            };
            Ok(batch.iter().map(one).collect())
        };
        Ok(self.connection.call(Call::Renew, Some(lane), work).await?)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let lane = Some(self.lane(&req.name));
        let req = req.clone();
        let work = move |state: &mut _, now| Ok(commands::release(state, now, &req));
        Ok(self.connection.call(Call::Release, lane, work).await?)
    }

    fn hints(&self) -> BoxStream<'static, Hint> {
        match self.connection.hints() {
            Some(hints) if self.config.wake != Wake::Poll => hints.boxed(),
            _ => stream::empty().boxed(),
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let (lane, wake) = (Some(self.lane(name)), self.config.wake);
        let name = name.clone();
        let work = move |state: &mut _, now| Ok(commands::inspect(state, now, &name, wake));
        Ok(self.connection.call(Call::Inspect, lane, work).await?)
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let (prefix, from, wake) = (prefix.to_owned(), from.cloned(), self.config.wake);
        let work = move |state: &mut _, now| {
            commands::list(state, now, wake, (&prefix, from.as_ref(), limit))
        };
        // A walk crosses every lane, so it belongs to none.
        Ok(self.connection.call(Call::List, None, work).await?)
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let (lane, name) = (Some(self.lane(name)), name.clone());
        let work = move |state: &mut _, now| Ok(commands::break_lock(state, now, &name, only));
        Ok(self.connection.call(Call::Break, lane, work).await?)
    }

    async fn close(&self) {
        self.connection.close();
    }
}

/// FNV-1a of 32 bits: short, and the same on every machine and version.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}
