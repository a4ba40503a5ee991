//! Memory driver: the contract over a [`MemoryStore`].

use crate::{
    commands::{self, Answer, Attempt},
    config::MemoryConfig,
    connection::Connection,
    error::MemoryError,
    fault::{Call, Faults},
    line::{ClientTicket, Terms},
    store::{MemoryStore, Request},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Error, FencingToken, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Lane, Page, Release, Released,
        Renew, Renewed, Result, Ticket, Wake, WakeUp,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use std::time::Duration;

/// One client's driver over a [`MemoryStore`].
///
/// Calls complete without waiting unless the server is stopped or the fault script says otherwise.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Client, Clock};
/// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
///
/// let store = MemoryStore::new(Clock::boot());
/// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
/// let guard = Client::new(driver)?.lock("orders:42")?.acquire().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MemoryDriver {
    pub(crate) connection: Connection,
    config: MemoryConfig,
    capabilities: Capabilities,
}

impl MemoryDriver {
    /// Connects to that store. It never fails, not even while the store is down. The config's name is
    /// ignored.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let other = MemoryDriver::connect(&store, MemoryConfig::default()); // another client of that server
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn connect(store: &MemoryStore, config: MemoryConfig) -> Self {
        let mut capabilities = Capabilities::new("memory", store.label());
        capabilities.shares = true;
        capabilities.raises = true;
        capabilities.renew_batch = 1_000;
        capabilities.wake = config.wake;
        capabilities.ordered = config.wake == Wake::Queue;
        Self {
            connection: Connection::open(store),
            config,
            capabilities,
        }
    }

    /// Connects to the process's store of a URL, `memory:NAME?dlock.wake=queue|notify|poll`: see
    /// [`MemoryConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL is not that of a memory store, or has an unknown parameter.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// let driver = dlock_memory::MemoryDriver::from_url("memory:orders")?;
    /// # Ok(()) }
    /// ```
    pub fn from_url(url: &str) -> Result<Self, Error> {
        let config: MemoryConfig = url.parse()?;
        Ok(Self::connect(&MemoryStore::named(&config.name), config))
    }

    /// The fault script between this driver and its store.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().once(Call::Release, Fault::ErrorAfter);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.connection.faults
    }

    /// The server.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.store().flush(); // as if the server had lost its memory
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn store(&self) -> &MemoryStore {
        &self.connection.store
    }

    /// A request about that name, which is never too late.
    fn request(&self, call: Call, name: &LockName) -> Request {
        Request {
            call,
            lane: Some(self.lane(name)),
            not_after: Duration::MAX,
        }
    }

    fn ticket(&self, ticket: Ticket) -> ClientTicket {
        let client = self.connection.client;
        ClientTicket { client, ticket }
    }

    /// Remembers the tickets' present positions: the server may forget a ticket at any time.
    fn remember(&self, req: &Acquire, answer: &Answer) {
        let positions = &self.connection.positions;
        match (req.ticket, &answer.acquired) {
            (Some(ticket), Acquired::Granted(_)) => positions.forget(ticket),
            (Some(ticket), _) => positions.refused(ticket, answer.position),
            (None, _) => {}
        }
        if let (Some(ticket), Some(position)) = (req.next_ticket, answer.next) {
            positions.queued(ticket, position);
        }
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
        let attempt = Attempt {
            line: req.ticket.map(|ticket| self.ticket(ticket)),
            next: req.next_ticket.map(|ticket| self.ticket(ticket)),
            terms: Terms::new(&self.config, req.lease),
            position: req
                .ticket
                .and_then(|line| self.connection.positions.of(line)),
            req: req.clone(),
        };
        let request = Request {
            not_after: self.store().time_at(req.give_up),
            ..self.request(Call::Acquire, &req.name)
        };
        let work = move |state: &mut _, now| commands::acquire(state, now, &attempt);
        let answer = self.connection.call(request, work).await?;
        self.remember(req, &answer);
        Ok(answer.acquired)
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.connection.positions.forget(ticket);
        let request = self.request(Call::Leave, name);
        let (name, ticket) = (name.clone(), self.ticket(ticket));
        let work = move |state: &mut _, now| {
            commands::leave(state, now, &name, ticket);
            Ok(())
        };
        self.connection.call(request, work).await
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
        let request = Request {
            call: Call::Renew,
            lane: Some(lane),
            not_after: self.store().time_at(give_up),
        };
        let stuck = self.connection.faults.stuck();
        let batch = batch.to_vec();
        let work = move |state: &mut _, now| {
            let one = |entry: &Renew| match stuck.contains(&entry.name) {
                true => Err(MemoryError::Stuck.into()),
                false => Ok(commands::renew(state, now, entry)),
            };
            Ok(batch.iter().map(one).collect())
        };
        self.connection.call(request, work).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let request = self.request(Call::Release, &req.name);
        let req = req.clone();
        let work = move |state: &mut _, now| Ok(commands::release(state, now, &req));
        self.connection.call(request, work).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        match self.connection.wake_ups() {
            Some(wake_ups) if self.config.wake != Wake::Poll => wake_ups.boxed(),
            _ => stream::empty().boxed(),
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let request = self.request(Call::Inspect, name);
        let (name, wake) = (name.clone(), self.config.wake);
        let work = move |state: &mut _, now| Ok(commands::inspect(state, now, &name, wake));
        self.connection.call(request, work).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let request = Request {
            call: Call::List,
            // A walk crosses every lane, so it belongs to none.
            lane: None,
            not_after: Duration::MAX,
        };
        let (prefix, from, wake) = (prefix.to_owned(), from.cloned(), self.config.wake);
        let work = move |state: &mut _, now| {
            commands::list(state, now, wake, (&prefix, from.as_ref(), limit))
        };
        self.connection.call(request, work).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let request = self.request(Call::Break, name);
        let name = name.clone();
        let work = move |state: &mut _, now| Ok(commands::break_lock(state, now, &name, only));
        self.connection.call(request, work).await
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
