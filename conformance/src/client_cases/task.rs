//! Futures that run beside a case, and futures that are dropped before they complete.

use crate::{Result, ctx::Ctx};
use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};
use tokio::task::JoinHandle;

/// A future in a task of its own, cancelled on drop.
#[derive(Debug)]
pub(crate) struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub(crate) fn spawn(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(future))
    }

    /// The same, polled once before this returns: the order in which tasks start is not fixed, and a
    /// waiter enters its queue at its first poll.
    pub(crate) async fn begun(future: impl Future<Output = T> + Send + 'static) -> Self {
        let mut future = Box::pin(future);
        let at_once = polled(&mut future, 1).await;
        Self::spawn(async move {
            match at_once {
                Some(output) => output,
                None => future.await,
            }
        })
    }

    pub(crate) fn is_done(&self) -> bool {
        self.0.is_finished()
    }

    /// Its output, within the bound.
    pub(crate) async fn done(mut self, ctx: &Ctx, what: &str, bound: Duration) -> Result<T> {
        Ok(ctx.within(what, bound, &mut self.0).await??)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Polls a future this number of times, each time it is woken, and then drops it; returns its output if
/// it completed before.
pub(crate) async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Every permutation of the numbers below `count`.
pub(crate) fn permutations(count: usize) -> Vec<Vec<usize>> {
    let mut orders = vec![Vec::new()];
    for next in 0..count {
        orders = orders
            .iter()
            .flat_map(|order: &Vec<usize>| {
                (0..=order.len()).map(|at| {
                    let mut longer = order.clone();
                    longer.insert(at, next);
                    longer
                })
            })
            .collect();
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::permutations;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_as_many_orders_as_the_factorial_says() {
        let orders: BTreeSet<_> = permutations(4).into_iter().collect();
        assert_eq!(orders.len(), 24);
        assert!(orders.iter().all(|order| order.len() == 4));
    }
}
