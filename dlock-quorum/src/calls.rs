//! Calls: one request to several stores at once, of which the caller awaits as many answers as it needs.

use crate::{connection::Stores, error::Failures};
use dlock_core::driver::{DistributedLock, Result};
use futures_core::future::BoxFuture;
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{mem, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Requests under way, each to one store. What is still under way when the value is dropped runs to its end in a task:
/// some clients break when one of their requests is dropped.
pub(crate) struct Calls<T: Send + 'static> {
    stores: Arc<Stores>,
    under_way: FuturesUnordered<BoxFuture<'static, (usize, Result<T>)>>,
    /// The stores that have not answered.
    pub(crate) open: Vec<usize>,
}

impl<T: Send + 'static> Calls<T> {
    pub(crate) fn new(stores: &Arc<Stores>) -> Self {
        Self {
            stores: Arc::clone(stores),
            under_way: FuturesUnordered::new(),
            open: Vec::new(),
        }
    }

    /// Asks every store.
    pub(crate) fn to_all<F>(
        stores: &Arc<Stores>,
        call: impl Fn(Arc<dyn DistributedLock>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut calls = Self::new(stores);
        (0..stores.nodes.len()).for_each(|at| calls.ask(at, &call));
        calls
    }

    /// Asks one store.
    pub(crate) fn ask<F>(&mut self, at: usize, call: impl FnOnce(Arc<dyn DistributedLock>) -> F)
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let stores = Arc::clone(&self.stores);
        let call = stores.nodes[at].driver().cloned().map(call);
        self.open.push(at);
        self.under_way.push(Box::pin(async move {
            let answer = match call {
                Ok(call) => stores.nodes[at].answer(call).await,
                Err(error) => Err(error),
            };
            (at, answer)
        }));
    }

    /// The next answer; `None`: all have answered.
    pub(crate) async fn next(&mut self) -> Option<(usize, Result<T>)> {
        let (at, answer) = self.under_way.next().await?;
        self.open.retain(|open| *open != at);
        Some((at, answer))
    }

    /// Hears the answers until they decide, and then, for [`LINGER`], those of the stores that are still awaited, if they
    /// work.
    pub(crate) async fn hear(
        mut self,
        within: Duration,
        mut decide: impl FnMut(usize, T) -> Option<Awaited>,
    ) -> Failures {
        let (mut failures, mut decided) = (Failures::default(), None);
        let hearing = async {
            loop {
                let next = match decided {
                    None => self.next().await,
                    Some(awaited) if !self.awaits(awaited) => None,
                    Some(_) => timeout(LINGER, self.next()).await.ok().flatten(),
                };
                match next {
                    Some((at, Ok(answer))) => decided = decide(at, answer),
                    Some((at, Err(error))) => failures.add(at, error),
                    None => return,
                }
            }
        };
        let _in_time = timeout(within, hearing).await;
        failures.add_slow(&self.open);
        failures
    }

    /// Whether one of these stores has not answered, and works.
    fn awaits(&self, awaited: Awaited) -> bool {
        self.open.iter().any(|at| {
            let is_awaited = match awaited {
                Awaited::None => false,
                Awaited::One(one) => *at == one,
                Awaited::All => true,
            };
            is_awaited && !self.stores.nodes[*at].is_down()
        })
    }
}

impl<T: Send + 'static> Drop for Calls<T> {
    fn drop(&mut self) {
        let mut rest = mem::take(&mut self.under_way);
        if !rest.is_empty() {
            let ending = async move { while rest.next().await.is_some() {} };
            self.stores.in_background(ending);
        }
    }
}

/// The stores whose answers are of use after the others decided.
#[derive(Clone, Copy)]
pub(crate) enum Awaited {
    None,
    One(usize),
    All,
}

/// How long an answer that has its quorum waits for each awaited store.
const LINGER: Duration = Duration::from_millis(50);
