//! Quorum driver: implements the contract of `DistributedLock` over a majority of stores.
//!
//! Each call asks several stores and answers what a quorum of them said. A store that did not answer in time runs on in a
//! task, and delays no call.

use crate::{
    acquires::Attempt,
    calls::{Awaited, Calls},
    config::QuorumConfig,
    connection::{ABANDON_AFTER, Stores},
    error::Failures,
    renewals,
    snapshots::{Seen, seen},
    votes::most,
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Effect, Error, FencingToken, Holds, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Finding, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, Wake, WakeUp,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{sync::Arc, time::Duration};

/// The driver for locks on a majority of several stores.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::Client;
/// use dlock_memory::MemoryDriver;
/// use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
/// use std::sync::Arc;
///
/// let store = |name: &'static str| {
///     Store::new(name, move || async move { Ok(Arc::new(MemoryDriver::from_url(name)?) as _) })
/// };
/// let config = QuorumConfig::new(["memory:a", "memory:b", "memory:c"].map(store).to_vec())?;
/// let client = Client::new(QuorumDriver::connect(config).await?)?;
/// let guard = client.lock("orders:42")?.acquire().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct QuorumDriver {
    stores: Arc<Stores>,
}

impl QuorumDriver {
    /// Connects to the stores. It begins when a majority is connected, and tries the others again in the background.
    ///
    /// # Errors
    /// - `Misuse` when the settings of a store are wrong, or two of them are one.
    /// - `Unsupported` when a store cannot raise fencing tokens (etcd, ZooKeeper), or is not built in.
    /// - `Unavailable` when no majority can be reached; the message says why for each store.
    ///
    /// # Cancel safety
    /// A dropped call leaves nothing behind.
    ///
    /// # Examples
    /// See [`QuorumDriver`].
    pub async fn connect(config: QuorumConfig) -> Result<Self, Error> {
        let stores = Stores::connect(config).await?;
        Ok(Self { stores })
    }

    /// Too few stores answered to say what became of a request.
    fn open<T>(&self, failures: Failures) -> Result<T> {
        Err(failures.into_error(&self.stores.nodes, Effect::Unknown))
    }
}

#[async_trait]
impl DistributedLock for QuorumDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.stores.capabilities
    }

    /// Names that differ in their lanes at a store differ here, too.
    fn lane(&self, name: &LockName) -> Lane {
        let each = self
            .stores
            .nodes
            .iter()
            .filter_map(|node| node.driver().ok());
        let lanes = each.map(|driver| driver.lane(name).0);
        Lane(lanes.fold(0, |all: u32, lane| {
            all.wrapping_mul(0x0100_0193).wrapping_add(lane)
        }))
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        Attempt::new(&self.stores, req).run().await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        let (quorum, mut left) = (self.stores.quorum(), 0);
        let calls = Calls::to_all(&self.stores, |driver| {
            let name = name.clone();
            async move { driver.leave(&name, ticket).await }
        });
        let leaving = calls.hear(ABANDON_AFTER, |_, ()| {
            left += 1;
            (left >= quorum).then_some(Awaited::None)
        });
        let failures = leaving.await;
        if left >= quorum {
            return Ok(());
        }
        self.open(failures)
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        Ok(renewals::renew(&self.stores, batch, give_up).await)
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let (stores, quorum) = (&self.stores, self.stores.quorum());
        if let Holds::One(hold) = req.holds {
            stores.holds.release(hold);
        }
        let calls = Calls::to_all(stores, |driver| {
            let req = req.clone();
            async move { driver.release(&req).await }
        });
        let (mut found, mut not_held) = (Vec::new(), Vec::new());
        // The next acquire asks this one first, and would find there what it still has.
        let first = stores.candidates().first().copied();
        let awaited = first.map_or(Awaited::None, Awaited::One);
        let releasing = calls.hear(ABANDON_AFTER, |_, released| {
            match released {
                Released::NotHeld { by } => not_held.push(by),
                released => found.push(released),
            }
            let freed = freed(&found);
            let is_clear = stores.outweighs(freed) || found.len() - freed >= quorum;
            match found.len() >= quorum {
                // Where two differ, the others tell which of them has lost or kept a hold.
                true if !is_clear => Some(Awaited::All),
                is_quorum => (is_quorum || stores.outweighs(not_held.len())).then_some(awaited),
            }
        });
        let failures = releasing.await;
        if stores.outweighs(not_held.len()) {
            let by = not_held.into_iter().flatten().next();
            return Ok(Released::NotHeld { by });
        }
        // A store that lost the hold says so; the others may not have released it yet.
        if found.len() < quorum {
            return self.open(failures);
        }
        // A hold that no quorum can have is left over from a request that came late; its own client releases it.
        if stores.outweighs(freed(&found)) {
            return Ok(Released::Freed);
        }
        // Where stores differ, one had lost a hold that the others know.
        let most_left = found.into_iter().max_by_key(rank);
        Ok(most_left.unwrap_or(Released::Freed))
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        let stream = self.stores.wake_ups.take();
        match stream.filter(|_| self.stores.capabilities.wake != Wake::Poll) {
            Some(wake_ups) => wake_ups,
            None => stream::empty().boxed(),
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        Ok(seen(&self.stores, name).await?.agreed)
    }

    /// Walks so many stores, one after the other, that a lock which a quorum holds is on one of them.
    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let bad = || DriverError::misuse("that cursor is none of a quorum");
        let (mut at, walked, inner) = match from.map(|cursor| &cursor.0[..]) {
            None => (0, 0, None),
            Some([at, walked]) => (*at, *walked, None),
            Some([at, walked, rest @ ..]) => (*at, *walked, Some(Cursor(rest.to_vec()))),
            Some(_) => return Err(bad()),
        };
        let nodes = &self.stores.nodes;
        let mut failures = Failures::default();
        let page = loop {
            let number = usize::from(at);
            let Some(node) = nodes.get(number) else {
                let is_bad = failures.0.is_empty();
                let failed = || failures.into_error(nodes, Effect::None);
                return Err(if is_bad { bad() } else { failed() });
            };
            let listing = async { node.driver()?.list(prefix, inner.as_ref(), limit).await };
            match node.answer(listing).await {
                Ok(page) => break page,
                // A walk that has begun is not continued elsewhere.
                Err(error) if inner.is_some() => return Err(error),
                Err(error) => failures.add(number, error),
            }
            at += 1;
        };
        let looking = page
            .found
            .iter()
            .map(|found| seen(&self.stores, &found.name));
        let looking = stream::iter(looking.collect::<Vec<_>>()).buffered(INSPECTED_AT_ONCE);
        let shown: Vec<_> = looking.try_collect().await?;
        let is_walked = |at: &usize| walked >> at & 1 == 1;
        let is_new = |seen: &Seen| {
            !(0..nodes.len())
                .filter(is_walked)
                .any(|at| seen.is_taken_at(at))
        };
        let new = shown.into_iter().filter(is_new).map(|seen| seen.agreed);
        let found = new.filter(|seen| !seen.is_free()).collect();
        let done = walked | 1 << at;
        let covered = usize::try_from(done.count_ones()).unwrap_or(0);
        let next = match page.next {
            Some(Cursor(inner)) => Some([&[at, walked], &inner[..]].concat()),
            None if self.stores.outweighs(covered) => None,
            None => Some(vec![at + 1, done]),
        };
        Ok(Page::new(found, next.map(Cursor)))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let (stores, quorum) = (&self.stores, self.stores.quorum());
        let calls = Calls::to_all(stores, |driver| {
            let name = name.clone();
            async move { driver.break_lock(&name, only).await }
        });
        let (mut freed, mut was_free, mut changed) = (Vec::new(), 0, Vec::new());
        let breaking = calls.hear(ABANDON_AFTER, |_, broken| {
            match broken {
                Broken::Freed { token } => freed.push(token),
                Broken::Changed { token } => changed.push(token),
                _ => was_free += 1,
            }
            (freed.len() + was_free >= quorum || stores.outweighs(changed.len()))
                .then_some(Awaited::All)
        });
        let failures = breaking.await;
        if freed.len() + was_free >= quorum {
            let token = most(&freed);
            return Ok(token.map_or(Broken::WasFree, |(token, _)| Broken::Freed { token }));
        }
        if stores.outweighs(changed.len()) {
            let token = most(&changed).and_then(|(token, _)| token);
            return Ok(Broken::Changed { token });
        }
        self.open(failures)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.stores.diagnose().await
    }

    async fn close(&self) {
        self.stores.close().await;
    }
}

/// How many stores have nothing left of it.
fn freed(found: &[Released]) -> usize {
    let freed = found.iter().filter(|it| matches!(it, Released::Freed));
    freed.count()
}

/// How much of an incarnation a release left.
fn rank(released: &Released) -> (u8, u32, Duration) {
    match released {
        Released::StillHeld { holds } => (2, holds.get(), Duration::ZERO),
        Released::MinHold { rest } => (1, 0, *rest),
        _ => (0, 0, Duration::ZERO),
    }
}

/// Names of a listing that are inspected at once.
const INSPECTED_AT_ONCE: usize = 16;
