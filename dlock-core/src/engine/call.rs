//! Driver call: a request that runs to completion even when its caller is gone.
//!
//! The waiter polls it in place. When a cancelled or timed-out caller drops it unfinished, the rest of it
//! moves into a task: some clients (MongoDB, sqlx) break when one of their futures is never polled again.

use crate::{
    clock::{Clock, Instant},
    driver::kit::Deadlines,
    engine::metrics::StoreMetrics,
};
use futures_util::FutureExt;
use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::runtime::Handle;

/// How long after its give-up a call is abandoned. The store's client has long reached its own time-outs by
/// then.
const ABANDON_AFTER: Duration = Duration::from_secs(30);

/// The most time that one request may take before it is repeated or given up, however long the lease: one
/// lost packet should not block a caller.
pub(crate) const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);

/// The place where calls run that have lost their waiter, with the deadlines of all calls.
#[derive(Debug)]
pub(crate) struct CallContext {
    pub(crate) handle: Handle,
    pub(crate) clock: Clock,
    pub(crate) deadlines: Arc<Deadlines>,
    pub(crate) metrics: StoreMetrics,
}

/// The unfinished rest of a call.
type Rest<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(crate) struct Call<T: Send + 'static> {
    rest: Option<Rest<T>>,
    begun: bool,
    pub(crate) give_up: Instant,
    calls: Arc<CallContext>,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(
        calls: &Arc<CallContext>,
        give_up: Instant,
        call: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self {
            rest: Some(Box::pin(call)),
            begun: false,
            give_up,
            calls: Arc::clone(calls),
        }
    }

    /// Waits for the answer, at most until the give-up; `None`: the call is still in flight.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the call where it is; dropping the call moves it into a task.
    pub(crate) async fn answer(&mut self) -> Option<T> {
        self.answer_by(self.give_up).await
    }

    /// As [`answer`](Self::answer), for a call that began on another runtime. What the driver had on that
    /// runtime may be gone with it, and the call may panic. Its outcome is then unknown, but the request
    /// still has to be cleaned up.
    pub(crate) async fn answer_elsewhere(&mut self) -> Option<T> {
        let answer = AssertUnwindSafe(self.answer()).catch_unwind().await;
        answer.unwrap_or_else(|_| {
            self.rest = None;
            tracing::error!(
                "a call panicked after its caller was gone; it is cleaned up as an unanswered one"
            );
            None
        })
    }

    /// Waits past the give-up for an answer that is useful even when it comes late.
    pub(crate) async fn late_answer(&mut self) -> Option<T> {
        self.answer_by(self.give_up + ABANDON_AFTER).await
    }

    async fn answer_by(&mut self, end: Instant) -> Option<T> {
        let Self {
            rest, begun, calls, ..
        } = self;
        tokio::select! {
            biased;
            answer = poll_fn(|cx| poll(rest, begun, cx)) => Some(answer),
            () = calls.deadlines.at(end) => None,
        }
    }
}

fn poll<T>(rest: &mut Option<Rest<T>>, begun: &mut bool, cx: &mut Context<'_>) -> Poll<T> {
    let Some(call) = rest else {
        return Poll::Pending; // answered before: no caller asks twice
    };
    *begun = true;
    let answer = std::task::ready!(call.as_mut().poll(cx));
    *rest = None;
    Poll::Ready(answer)
}

impl<T: Send + 'static> Drop for Call<T> {
    fn drop(&mut self) {
        // A call that was never polled has not been sent.
        let Some(rest) = self.rest.take().filter(|_| self.begun) else {
            return;
        };
        let calls = Arc::clone(&self.calls);
        let end = self.give_up + ABANDON_AFTER;
        self.calls.handle.spawn(async move {
            tokio::select! {
                biased;
                _ = rest => {}
                () = calls.clock.sleep_until(end) => {
                    calls.metrics.abandoned();
                    tracing::debug!("a call was not answered {ABANDON_AFTER:?} after its give-up and is abandoned");
                }
            }
        });
    }
}
