//! Quorum driver: implements the contract of `DistributedLock` over a majority of stores.
//!
//! Each call asks several stores and answers what a quorum of them said. A store that did not answer in time runs on in a
//! task, and delays no call.

use crate::{
    acquires::Attempt,
    calls::{Calls, LINGER},
    config::QuorumConfig,
    connection::Stores,
    error::Failures,
    renewals, snapshots,
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Effect, Error, ErrorKind, FencingToken, Holds, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, Wake, WakeUp,
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
}

#[async_trait]
impl DistributedLock for QuorumDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.stores.capabilities
    }

    /// All names share the fate of the same stores.
    fn lane(&self, _: &LockName) -> Lane {
        Lane::default()
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        Attempt::new(&self.stores, req).run().await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        let (mut failures, mut left) = (Failures::default(), 0);
        let mut calls = Calls::to_all(&self.stores, |driver| {
            let name = name.clone();
            async move { driver.leave(&name, ticket).await }
        });
        while left < self.stores.quorum() {
            match calls.next().await {
                Some((_, Ok(()))) => left += 1,
                Some((at, Err(error))) => failures.add(at, error),
                None => {
                    return Err(failures.into_error(
                        &self.stores.nodes,
                        Effect::Unknown,
                        self.stores.quorum(),
                    ));
                }
            }
        }
        calls.run_on();
        Ok(())
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
        let mut calls = Calls::to_all(stores, |driver| {
            let req = req.clone();
            async move { driver.release(&req).await }
        });
        let (mut found, mut not_held, mut failures) = (Vec::new(), Vec::new(), Failures::default());
        let answer = loop {
            match calls.next().await {
                Some((_, Ok(Released::NotHeld { by }))) => not_held.push(by),
                Some((_, Ok(released))) => found.push(released),
                Some((at, Err(error))) => failures.add(at, error),
                // A store that lost the hold says so; the others may not have released it yet.
                None => break Err(failures.into_error(&stores.nodes, Effect::Unknown, quorum)),
            }
            if found.len() >= quorum {
                // Where stores differ, one had lost a hold that the others know.
                break Ok(found
                    .into_iter()
                    .max_by_key(rank)
                    .unwrap_or(Released::Freed));
            }
            if stores.outweighs(not_held.len()) {
                break Ok(Released::NotHeld {
                    by: not_held.into_iter().flatten().next(),
                });
            }
        };
        calls.run_on();
        answer
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        let stream = self.stores.wake_ups.take();
        match stream.filter(|_| self.stores.capabilities.wake != Wake::Poll) {
            Some(wake_ups) => wake_ups,
            None => stream::empty().boxed(),
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        Ok(snapshots::seen(&self.stores, name).await?.0)
    }

    /// Walks so many stores, one after the other, that a lock which a quorum holds is on one of them.
    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let bad = || DriverError::new(ErrorKind::Misuse, "that cursor is none of a quorum");
        let (mut at, walked, inner) = match from.map(|cursor| &cursor.0[..]) {
            None => (0, 0, None),
            Some([at, walked, rest @ ..]) => (
                *at,
                *walked,
                (!rest.is_empty()).then(|| Cursor(rest.to_vec())),
            ),
            Some(_) => return Err(bad()),
        };
        let (nodes, quorum) = (&self.stores.nodes, self.stores.quorum());
        let mut failures = Failures::default();
        let page = loop {
            let number = usize::from(at);
            let Some(node) = nodes.get(number) else {
                return Err(match failures.len() {
                    0 => bad(),
                    _ => failures.into_error(nodes, Effect::None, quorum),
                });
            };
            match node
                .ask(async |driver| driver.list(prefix, inner.as_ref(), limit).await)
                .await
            {
                Ok(page) => break page,
                Err(error) => failures.add(number, error),
            }
            // A walk that has begun is not continued elsewhere.
            at = if inner.is_some() { u8::MAX } else { at + 1 };
        };
        let seen = page
            .found
            .iter()
            .map(|found| snapshots::seen(&self.stores, &found.name));
        let seen: Vec<_> = stream::iter(seen.collect::<Vec<_>>())
            .buffered(INSPECTED_AT_ONCE)
            .try_collect()
            .await?;
        let is_walked = |at: usize| walked >> at & 1 == 1;
        let found = seen.into_iter().filter_map(|(snapshot, marks)| {
            let is_held = !snapshot.holders.is_empty()
                || snapshot.unavailable_for.is_some()
                || snapshot.damaged.is_some();
            let was_shown = marks
                .iter()
                .enumerate()
                .any(|(at, marked)| *marked && is_walked(at));
            (is_held && !was_shown).then_some(snapshot)
        });
        let found = found.collect();
        let done = walked | 1 << at;
        let next = match page.next {
            Some(Cursor(inner)) => Some([&[at, walked], &inner[..]].concat()),
            None if self
                .stores
                .outweighs(usize::try_from(done.count_ones()).unwrap_or(0)) =>
            {
                None
            }
            None => Some(vec![at + 1, done]),
        };
        Ok(Page::new(found, next.map(Cursor)))
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let (stores, quorum) = (&self.stores, self.stores.quorum());
        let mut calls = Calls::to_all(stores, |driver| {
            let name = name.clone();
            async move { driver.break_lock(&name, only).await }
        });
        let (mut freed, mut was_free, mut changed, mut failures) =
            (Vec::new(), 0, Vec::new(), Failures::default());
        while let Some((at, answer)) =
            match freed.len() + was_free < quorum && !stores.outweighs(changed.len()) {
                true => calls.next().await,
                false => calls.next_within(LINGER).await,
            }
        {
            match answer {
                Ok(Broken::Freed { token }) => freed.push(token),
                Ok(Broken::Changed { token }) => changed.push(token),
                Ok(_) => was_free += 1,
                Err(error) => failures.add(at, error),
            }
        }
        calls.run_on();
        let most = |tokens: Vec<Option<FencingToken>>| {
            let count = |wanted| tokens.iter().filter(|token| **token == wanted).count();
            tokens
                .iter()
                .copied()
                .max_by_key(|token| count(*token))
                .flatten()
        };
        if freed.len() + was_free >= quorum {
            return Ok(match freed.is_empty() {
                true => Broken::WasFree,
                false => Broken::Freed { token: most(freed) },
            });
        }
        if stores.outweighs(changed.len()) {
            return Ok(Broken::Changed {
                token: most(changed),
            });
        }
        Err(failures.into_error(&stores.nodes, Effect::Unknown, quorum))
    }

    async fn close(&self) {
        self.stores.close().await;
    }
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
