//! A driver's call that is always driven to its end.
//!
//! It is polled in place, by whoever waits for it. Dropped unfinished, by a caller that was cancelled or ran out of time, what is
//! left of it moves into a task: some clients (MongoDB, sqlx) break when a future of theirs is never polled again.

use crate::{
    alarm::Alarms,
    clock::{Clock, Instant},
};
use futures_util::FutureExt;
use std::{
    fmt,
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::runtime::Handle;

/// How long after its give-up a call is abandoned: the store's client has long run into its own time-outs by then.
const ABANDON_AFTER: Duration = Duration::from_secs(30);

/// The most one request may take before it is repeated or given up, however long the lease: nobody should hang on one lost packet.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(5);

/// Where calls run that nobody waits for any more, and what times the others.
#[derive(Debug)]
pub(crate) struct Adrift {
    pub(crate) handle: Handle,
    pub(crate) clock: Clock,
    pub(crate) alarms: Arc<Alarms>,
    abandoned: AtomicU64,
}

impl Adrift {
    pub(crate) fn new(handle: Handle, clock: Clock, alarms: Arc<Alarms>) -> Self {
        Self {
            handle,
            clock,
            alarms,
            abandoned: AtomicU64::new(0),
        }
    }

    /// How many calls were never answered.
    pub(crate) fn abandoned(&self) -> u64 {
        self.abandoned.load(Relaxed)
    }
}

/// What is left of a call.
type Rest<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(crate) struct Call<T: Send + 'static> {
    rest: Option<Rest<T>>,
    begun: bool,
    give_up: Instant,
    adrift: Arc<Adrift>,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(
        adrift: &Arc<Adrift>,
        give_up: Instant,
        call: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self {
            rest: Some(Box::pin(call)),
            begun: false,
            give_up,
            adrift: Arc::clone(adrift),
        }
    }

    /// Waits for the answer, at most until the give-up; `None`: it is still under way.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the call where it is; dropping the call moves it into a task.
    pub(crate) async fn answer(&mut self) -> Option<T> {
        self.answer_by(self.give_up).await
    }

    /// As [`answer`](Self::answer), of a call that began on another runtime: what the driver had there may be gone with it, which is no reason to
    /// forget what was asked. Nobody knows then what became of it.
    pub(crate) async fn answer_elsewhere(&mut self) -> Option<T> {
        let answer = AssertUnwindSafe(self.answer()).catch_unwind().await;
        answer.unwrap_or_else(|_| {
            self.rest = None;
            tracing::error!("a call panicked that was waited for in the place of who made it; it is settled as one without an answer");
            None
        })
    }

    /// Waits for an answer that is still worth something when nobody counts on it any more.
    pub(crate) async fn late_answer(&mut self) -> Option<T> {
        self.answer_by(self.give_up + ABANDON_AFTER).await
    }

    async fn answer_by(&mut self, end: Instant) -> Option<T> {
        let Self {
            rest,
            begun,
            adrift,
            ..
        } = self;
        tokio::select! {
            biased;
            answer = poll_fn(|cx| poll(rest, begun, cx)) => Some(answer),
            () = adrift.alarms.at(end) => None,
        }
    }

    pub(crate) fn give_up(&self) -> Instant {
        self.give_up
    }
}

fn poll<T>(rest: &mut Option<Rest<T>>, begun: &mut bool, cx: &mut Context<'_>) -> Poll<T> {
    let Some(call) = rest else {
        return Poll::Pending; // answered before: nobody asks twice
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
        let adrift = Arc::clone(&self.adrift);
        let end = self.give_up + ABANDON_AFTER;
        self.adrift.handle.spawn(async move {
            tokio::select! {
                biased;
                _ = rest => {}
                () = adrift.clock.sleep_until(end) => {
                    adrift.abandoned.fetch_add(1, Relaxed);
                    tracing::debug!("a call was not answered {ABANDON_AFTER:?} after its give-up and is abandoned");
                }
            }
        });
    }
}

impl<T: Send + 'static> fmt::Debug for Call<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("begun", &self.begun)
            .field("give_up", &self.give_up)
            .finish_non_exhaustive()
    }
}
