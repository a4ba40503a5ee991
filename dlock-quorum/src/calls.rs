//! Calls: one request to several stores at once, of which the caller awaits as many answers as it needs.

use crate::connection::Stores;
use dlock_core::{
    Instant,
    driver::{DistributedLock, Result},
};
use futures_core::future::BoxFuture;
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Requests under way, each to one store.
pub(crate) struct Calls<T> {
    stores: Arc<Stores>,
    under_way: FuturesUnordered<BoxFuture<'static, (usize, Result<T>)>>,
    asked: BTreeSet<usize>,
    /// The stores that have not answered.
    pub(crate) open: Vec<usize>,
}

impl<T: Send + 'static> Calls<T> {
    pub(crate) fn new(stores: &Arc<Stores>) -> Self {
        Self {
            stores: Arc::clone(stores),
            under_way: FuturesUnordered::new(),
            asked: BTreeSet::new(),
            open: Vec::new(),
        }
    }

    /// Asks every store that is connected.
    pub(crate) fn to_all<F>(
        stores: &Arc<Stores>,
        call: impl Fn(Arc<dyn DistributedLock>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut calls = Self::new(stores);
        for at in 0..stores.nodes.len() {
            calls.ask(at, &call);
        }
        calls
    }

    /// Asks one store.
    pub(crate) fn ask<F>(&mut self, at: usize, call: impl FnOnce(Arc<dyn DistributedLock>) -> F)
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let stores = Arc::clone(&self.stores);
        let call = stores.nodes[at].driver().cloned().map(call);
        self.asked.insert(at);
        self.open.push(at);
        self.under_way.push(Box::pin(async move {
            let answer = match call {
                Ok(call) => stores.nodes[at].ask(async |_| call.await).await,
                Err(error) => Err(error),
            };
            (at, answer)
        }));
    }

    pub(crate) fn has_asked(&self, at: usize) -> bool {
        self.asked.contains(&at)
    }

    /// The next answer; `None`: all have answered.
    pub(crate) async fn next(&mut self) -> Option<(usize, Result<T>)> {
        let (at, answer) = self.under_way.next().await?;
        if let Some(open) = self.open.iter().position(|open| *open == at) {
            self.open.swap_remove(open);
        }
        Some((at, answer))
    }

    /// The next answer that comes in time.
    pub(crate) async fn next_within(&mut self, within: Duration) -> Option<(usize, Result<T>)> {
        timeout(within, self.next()).await.ok().flatten()
    }

    pub(crate) async fn next_by(&mut self, end: Instant) -> Option<(usize, Result<T>)> {
        let within = end.since(self.stores.clock.now());
        self.next_within(within).await
    }

    /// What is still under way runs to its end in a task: some clients break when one of their requests is dropped.
    pub(crate) fn run_on(mut self) {
        if !self.open.is_empty() {
            tokio::spawn(async move { while self.next().await.is_some() {} });
        }
    }

    /// The same, with something to do for each answer.
    pub(crate) fn run_on_with<F: Future<Output = ()> + Send>(
        mut self,
        each: impl Fn(Arc<Stores>, usize, T) -> F + Send + Sync + 'static,
    ) {
        if !self.open.is_empty() {
            tokio::spawn(async move {
                while let Some((at, answer)) = self.next().await {
                    if let Ok(answer) = answer {
                        each(Arc::clone(&self.stores), at, answer).await;
                    }
                }
            });
        }
    }
}

/// How long an answer that has its quorum waits for the other stores, where it tells of them, too.
pub(crate) const LINGER: Duration = Duration::from_millis(50);
