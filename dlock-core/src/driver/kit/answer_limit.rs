//! Answer limit: bounds how long one statement may go unanswered.
//!
//! A timer set and cancelled for each statement would wake the thread that waits for the network, twice a
//! cycle, while the server needs the processor. So each connection keeps one timer, which is moved only when
//! it fires.

use super::connections::dialer::Dialer;
use parking_lot::Mutex;
use std::{
    fmt,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    runtime,
    time::{Instant, Sleep, sleep_until},
};

/// The time limit of one statement: see [`Lent::limit`](super::Lent::limit).
pub struct AnswerLimit<D> {
    pub(super) timer: Arc<Timer>,
    /// For a server without a limit of its own: the connection whose statement to end after [`RUNS`], and the
    /// flag that records it.
    pub(super) end: Option<(Arc<D>, u64, Arc<AtomicBool>)>,
}

impl<D: Dialer> AnswerLimit<D> {
    /// The answer, or [`Dialer::silent`] after four seconds. Time counts from when the statement first has to
    /// wait, which is when it has been sent.
    ///
    /// # Errors
    /// What the statement failed with, or that it was not answered.
    ///
    /// # Cancel safety
    /// A dropped statement may be executed, and its answer may still arrive: its connection must not be used
    /// again. [`Lent`](super::Lent) sees to it.
    pub async fn of<T>(
        self,
        answer: impl Future<Output = Result<T, D::Error>> + Send,
    ) -> Result<T, D::Error> {
        let mut began = None;
        let mut answer = pin!(answer);
        if let Some((dialer, id, ended)) = self.end {
            let answered = self.timer.before(RUNS, &mut began, answer.as_mut());
            if let Some(answer) = answered.await {
                return answer;
            }
            ended.store(true, Ordering::Relaxed);
            tokio::spawn(dialer.end(id));
        }
        let answer = self.timer.before(SILENCE, &mut began, answer).await;
        answer.unwrap_or_else(|| Err(D::silent()))
    }
}

// A timer and a dialer are of no use in output.
impl<D> fmt::Debug for AnswerLimit<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerLimit")
            .field("ends", &self.end.is_some())
            .finish_non_exhaustive()
    }
}

/// A timer that one statement after another uses, and the runtime that it belongs to.
#[derive(Default)]
pub(super) struct Timer(Mutex<Option<(runtime::Id, Pin<Box<Sleep>>)>>);

impl Timer {
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
        let mut kept = self.0.lock();
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
pub(super) const RUNS: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::{Instant, Timer};
    use std::{
        future::{pending, ready},
        pin::pin,
        time::Duration,
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_end_of_each_whatever_was_before() {
        let timer = Timer::default();
        let mut began = None;
        let answered = timer.before(SECOND * 4, &mut began, pin!(ready(7))).await;
        assert_eq!((answered, began), (Some(7), None));
        // The timer was left set later, then earlier, and then it has fired.
        for (after, lasts) in [(1, 2), (1, 4), (1, 4), (9, 4)] {
            tokio::time::sleep(SECOND * after).await;
            let slow = pin!(tokio::time::sleep(SECOND * (lasts - 1)));
            let answered = timer.before(SECOND * lasts, &mut None, slow).await;
            assert_eq!(answered, Some(()));
            let (end, mut began) = (Instant::now() + SECOND * lasts, None);
            // The second wait gets the rest of the same statement's time.
            for _ in 0..2 {
                let silent = pin!(pending::<()>());
                let silent = timer.before(SECOND * lasts, &mut began, silent).await;
                assert_eq!(silent, None);
                let late = Instant::now() - end;
                assert!(late < Duration::from_millis(10), "{late:?}");
            }
        }
    }

    #[test]
    fn a_runtime_that_has_ended_takes_its_timer_along() {
        let timer = Timer::default();
        for _ in 0..2 {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let slow = pin!(tokio::time::sleep(SECOND * 9));
                assert_eq!(timer.before(SECOND, &mut None, slow).await, None);
            });
        }
    }
}
