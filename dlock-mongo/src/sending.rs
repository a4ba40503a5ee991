//! What is on its way: who may send how much at a time, and that it comes to its end.
//!
//! The native client's pool serves whoever asks first. A thousand waiters that look would stand there before a renewal, so they wait here, and
//! some connections are left to what keeps locks alive.

use crate::{error, renewals::ALONE};
use dlock_core::Result;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// What a command is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// Taking a lock, or looking whether that can be done.
    Acquire,
    /// Keeping locks, and what that needs to know.
    Renew,
    /// Keeping one that was to be kept together with others.
    Alone,
    /// Giving back, showing, cleaning up.
    Other,
}

/// The places of a pool of connections.
pub(crate) struct Places {
    acquiring: Arc<Semaphore>,
    /// Of all but renewals.
    sending: Arc<Semaphore>,
    /// Of renewals that go alone because others are held up: where many batches are, the server may be overloaded.
    alone: Arc<Semaphore>,
    unanswered: AtomicUsize,
}

/// One of them, until everything is answered that it was taken for.
pub(crate) struct Place {
    places: Arc<Places>,
    permits: [Option<OwnedSemaphorePermit>; 2],
    /// It was not to be had at once.
    pub(crate) waited: bool,
}

impl Places {
    pub(crate) fn new(connections: u32) -> Arc<Self> {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        let kept = (connections / SHARE).max(1);
        let sending = connections.saturating_sub(STREAMS + kept).clamp(1, MOST);
        let acquiring = sending.saturating_sub(kept).max(1);
        Arc::new(Self {
            acquiring: Arc::new(Semaphore::new(acquiring)),
            sending: Arc::new(Semaphore::new(sending)),
            alone: Arc::new(Semaphore::new(ALL_ALONE)),
            unanswered: AtomicUsize::new(0),
        })
    }

    /// A place, as soon as there is one; for a batch of renewals that is at once.
    pub(crate) async fn one(self: &Arc<Self>, aim: Aim) -> Result<Place> {
        let before = self.unanswered.fetch_add(1, Ordering::Relaxed);
        let mut place = Place {
            places: Arc::clone(self),
            permits: [None, None],
            waited: false,
        };
        if before >= UNANSWERED {
            return Err(error::crowded(UNANSWERED));
        }
        let wanted = match aim {
            Aim::Acquire => [Some(&self.acquiring), Some(&self.sending)],
            Aim::Other => [None, Some(&self.sending)],
            Aim::Renew => [None, None],
            Aim::Alone => [None, Some(&self.alone)],
        };
        for (permit, from) in place.permits.iter_mut().zip(wanted) {
            let Some(from) = from else { continue };
            *permit = Arc::clone(from).try_acquire_owned().ok();
            if permit.is_none() {
                place.waited = true;
                *permit = Arc::clone(from).acquire_owned().await.ok();
            }
        }
        Ok(place)
    }

    pub(crate) fn unanswered(&self) -> usize {
        self.unanswered.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.unanswered.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A future of the native client, which its documentation wants to be driven to its end: by whoever waits for it, as long as somebody does, and
/// then by a task.
pub(crate) struct Carried<T: Send + 'static> {
    rest: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    runtime: Handle,
}

impl<T: Send + 'static> Carried<T> {
    pub(crate) fn new(runtime: &Handle, call: impl Future<Output = T> + Send + 'static) -> Self {
        Self {
            rest: Some(Box::pin(call)),
            runtime: runtime.clone(),
        }
    }
}

/// `None`: it has no end, because the runtime of the client is gone.
impl<T: Send + 'static> Future for Carried<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let Self { rest, runtime } = self.get_mut();
        let Some(call) = rest else {
            return Poll::Ready(None);
        };
        // Whoever waits may do so in another runtime, or in none: timers and tasks are the client's.
        let _inside = runtime.enter();
        // A timer of a runtime that has ended panics.
        let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
        let answer = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(answer)) => Some(answer),
            Err(_) => None,
        };
        *rest = None;
        Poll::Ready(answer)
    }
}

impl<T: Send + 'static> Drop for Carried<T> {
    fn drop(&mut self) {
        if let Some(rest) = self.rest.take() {
            self.runtime.spawn(rest);
        }
    }
}

/// Requests that hang somewhere hold a connection or wait for one: more of them help nobody.
const UNANSWERED: usize = 20_000;
/// Change streams at a time: one, and the one that it replaces.
const STREAMS: usize = 2;
/// One connection in so many is left to renewals, and as many more to all but acquires.
const SHARE: usize = 8;
/// Of a pool without a limit.
const MOST: usize = 1 << 16;
/// Renewals that go alone, of all batches together: two of them have theirs at a time.
const ALL_ALONE: usize = 2 * ALONE;
