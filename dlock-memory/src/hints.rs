//! Hints on their way from the server to one client.

use crate::{
    connection::Places,
    fault::{FaultPlan, HintFault},
};
use dlock_core::Hint;
use futures_core::Stream;
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

/// Where the server puts one client's hints. Bounded: what does not fit is dropped, and one [`Hint::LookAgain`] says so.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    hints: VecDeque<Hint>,
    /// Something was dropped since the last `LookAgain`.
    missed: bool,
    /// The stream was taken.
    taken: bool,
    /// The driver is closed, or the stream was dropped: no receivers.
    closed: bool,
    fault: HintFault,
    plan: Option<FaultPlan>,
    waker: Option<Waker>,
}

impl Inbox {
    /// Whether the server would find a receiver: what `PUBLISH` counts.
    pub(crate) fn listens(&self) -> bool {
        let queue = self.lock();
        !queue.closed && queue.fault != HintFault::Cut
    }

    /// A hint from the server, which may be lost on the way.
    pub(crate) fn push(&self, hint: Hint) {
        let fault = {
            let mut queue = self.lock();
            match (queue.fault, &mut queue.plan) {
                (HintFault::Deliver, Some(plan)) => plan.draw_hint(),
                (standing, _) => standing,
            }
        };
        match fault {
            HintFault::Deliver => self.put(hint),
            HintFault::Double => {
                self.put(hint.clone());
                self.put(hint);
            }
            HintFault::Lose | HintFault::Cut => {}
        }
    }

    /// A hint that has arrived.
    pub(crate) fn put(&self, hint: Hint) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        if hint == Hint::LookAgain || queue.hints.len() >= CAPACITY {
            queue.missed = true;
        } else {
            queue.hints.push_back(hint);
        }
        wake(queue);
    }

    pub(crate) fn set_fault(&self, fault: HintFault) {
        let before = std::mem::replace(&mut self.lock().fault, fault);
        if before == HintFault::Cut && fault != HintFault::Cut {
            self.put(Hint::LookAgain);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.lock().plan = plan;
    }

    /// Nobody listens any more; the stream ends after what has arrived.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        wake(queue);
    }

    /// The stream, once.
    pub(crate) fn take(self: &Arc<Self>, places: &Arc<Places>) -> Option<Hints> {
        let first = !std::mem::replace(&mut self.lock().taken, true);
        first.then(|| Hints {
            inbox: Arc::clone(self),
            places: Arc::clone(places),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the reader when the lock is given back: what it runs may want the inbox, or drop it.
fn wake(mut queue: MutexGuard<'_, Queue>) {
    let waker = queue.waker.take();
    drop(queue);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The stream of one client. Dropping it leaves the client without receivers: its tickets are taken out of every line.
#[derive(Debug)]
pub(crate) struct Hints {
    inbox: Arc<Inbox>,
    places: Arc<Places>,
}

impl Stream for Hints {
    type Item = Hint;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Hint>> {
        let mut queue = self.inbox.lock();
        if let Some(hint) = queue.hints.pop_front() {
            drop(queue);
            if let Hint::Turn { ticket, .. } = &hint {
                self.places.turned(*ticket);
            }
            return Poll::Ready(Some(hint));
        }
        if std::mem::take(&mut queue.missed) {
            return Poll::Ready(Some(Hint::LookAgain));
        }
        if queue.closed {
            return Poll::Ready(None);
        }
        queue.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// How many hints may lie unread: several turns for each of the names a busy client waits for.
pub(crate) const CAPACITY: usize = 1024;
