//! Statement timeout: bounds how long one statement may go unanswered.
//!
//! A timer set and cancelled for each statement would wake the thread that waits for the network, twice a
//! cycle, while the server needs the processor. So each connection keeps one timer, which is moved only when
//! it fires.

use crate::{connection::Dialer, error};
use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    runtime,
    time::{Instant, Sleep, sleep_until},
};

/// The timeout of one statement.
#[derive(Default)]
pub(crate) struct Limit {
    deadline: Arc<Deadline>,
    kill: Option<(Arc<Dialer>, u64, Arc<AtomicBool>)>,
}

impl Limit {
    /// `kill`: for a server without a limit of its own, the connection whose statement to end after [`RUNS`],
    /// and the flag that records it.
    pub(crate) fn new(
        deadline: Arc<Deadline>,
        kill: Option<(Arc<Dialer>, u64, Arc<AtomicBool>)>,
    ) -> Self {
        Self { deadline, kill }
    }

    /// The answer, or a timeout error after [`SILENCE`]. Time counts from when the statement first has to
    /// wait, which is when it has been sent.
    pub(crate) async fn of<T>(
        self,
        answer: impl Future<Output = sqlx::Result<T>> + Send,
    ) -> sqlx::Result<T> {
        let mut began = None;
        let mut answer = pin!(answer);
        if let Some((dialer, id, killed)) = self.kill {
            let answered = self.deadline.before(RUNS, &mut began, answer.as_mut());
            if let Some(answer) = answered.await {
                return answer;
            }
            killed.store(true, Ordering::Relaxed);
            tokio::spawn(dialer.kill(id));
        }
        let answer = self.deadline.before(SILENCE, &mut began, answer).await;
        answer.unwrap_or_else(|| Err(error::silent()))
    }
}

/// A timer that one statement after another uses, and the runtime that it belongs to.
#[derive(Default)]
pub(crate) struct Deadline(Mutex<Option<(runtime::Id, Pin<Box<Sleep>>)>>);

impl Deadline {
    /// The future's output, or `None` if it took longer than `within` since it first had to wait. The timer
    /// is only touched then, while the server works.
    async fn before<F: Future>(
        &self,
        within: Duration,
        began: &mut Option<Instant>,
        mut future: Pin<&mut F>,
    ) -> Option<F::Output> {
        poll_fn(|cx| {
            if let Poll::Ready(come) = future.as_mut().poll(cx) {
                return Poll::Ready(Some(come));
            }
            let end = *began.get_or_insert_with(Instant::now) + within;
            self.rings(end, cx).map(|()| None)
        })
        .await
    }

    /// Ready once `end` has passed; until then the calling task is woken at `end`. It may be woken early,
    /// because an earlier statement may have set the timer.
    fn rings(&self, end: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let here = runtime::Handle::current().id();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_at_home = kept.as_ref().is_some_and(|(home, _)| *home == here);
        if !is_at_home {
            *kept = None;
        }
        let (_, sleep) = kept.get_or_insert_with(|| (here, Box::pin(sleep_until(end))));
        if sleep.deadline() > end {
            sleep.as_mut().reset(end);
        }
        while sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= end {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(end);
        }
        Poll::Pending
    }
}

/// A server's own limits on one statement add up to 3 s. A longer silence means a dead network path or a hung
/// server.
const SILENCE: Duration = Duration::from_secs(4);
/// A server that waits one second for a row reports it within two, with a better error than a kill gives.
pub(crate) const RUNS: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::{Deadline, Instant};
    use std::{
        future::{pending, ready},
        pin::pin,
        time::Duration,
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_end_of_each_whatever_was_before() {
        let deadline = Deadline::default();
        let mut began = None;
        let answered = deadline
            .before(SECOND * 4, &mut began, pin!(ready(7)))
            .await;
        assert_eq!((answered, began), (Some(7), None));
        // The timer was left set later, then earlier, and then it has fired.
        for (after, lasts) in [(1, 2), (1, 4), (1, 4), (9, 4)] {
            tokio::time::sleep(SECOND * after).await;
            let slow = pin!(tokio::time::sleep(SECOND * (lasts - 1)));
            let answered = deadline.before(SECOND * lasts, &mut None, slow).await;
            assert_eq!(answered, Some(()));
            let (end, mut began) = (Instant::now() + SECOND * lasts, None);
            // The second wait gets the rest of the same statement's time.
            for _ in 0..2 {
                let silent = pin!(pending::<()>());
                let silent = deadline.before(SECOND * lasts, &mut began, silent).await;
                assert_eq!(silent, None);
                let late = Instant::now() - end;
                assert!(late < Duration::from_millis(10), "{late:?}");
            }
        }
    }

    #[test]
    fn a_runtime_that_has_ended_takes_its_timer_along() {
        let deadline = Deadline::default();
        for _ in 0..2 {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let slow = pin!(tokio::time::sleep(SECOND * 9));
                assert_eq!(deadline.before(SECOND, &mut None, slow).await, None);
            });
        }
    }
}
