//! Futures that run beside a case, and futures that are dropped before they complete.

use crate::{
    Ctx,
    expect::{Expected, seen_from_here},
};
use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};
use tokio::task::JoinHandle;

/// A future in a task of its own, cancelled on drop.
#[derive(Debug)]
pub(crate) struct Task<T> {
    handle: JoinHandle<T>,
    pub(super) ctx: Ctx,
}

impl Ctx {
    /// Runs a future beside the case.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Task<T> {
        let (handle, ctx) = (tokio::spawn(future), self.clone());
        Task { handle, ctx }
    }

    /// The same, polled once before this returns: the order in which tasks start is not fixed, and a
    /// waiter enters its queue at its first poll.
    pub(crate) async fn begin<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Task<T> {
        let mut future = Box::pin(future);
        let at_once = polled(&mut future, 1).await;
        self.spawn(async move {
            match at_once {
                Some(output) => output,
                None => future.await,
            }
        })
    }
}

impl<T: Send + 'static> Task<T> {
    pub(crate) fn is_done(&self) -> bool {
        self.handle.is_finished()
    }

    /// Its output, within the bound.
    #[track_caller]
    pub(crate) fn done(mut self, bound: Duration) -> Expected<'static, T> {
        let ctx = self.ctx.clone();
        seen_from_here(
            async move { Ok(ctx.within("a task ends", bound, &mut self.handle).await??) },
        )
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.handle.abort();
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
