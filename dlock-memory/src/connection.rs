//! Client connection: the client's identity at the server, the positions of its tickets, and the faults that
//! its calls meet.

use crate::{
    error::MemoryError,
    fault::{Fault, Faults},
    inbox::Inbox,
    line::{ClientId, QueuePosition},
    store::{MemoryStore, Request, Submitted, Work},
};
use dlock_core::driver::{Result, Ticket, WakeUp};
use futures_core::Stream;
use futures_util::StreamExt;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::oneshot;

/// Connected until it is closed or dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) store: MemoryStore,
    pub(crate) client: ClientId,
    pub(crate) faults: Faults,
    pub(crate) positions: Arc<QueuePositions>,
    inbox: Arc<Inbox>,
    closed: AtomicBool,
}

impl Connection {
    pub(crate) fn open(store: &MemoryStore) -> Self {
        let inbox = Arc::<Inbox>::default();
        Self {
            store: store.clone(),
            client: store.connect(Arc::clone(&inbox)),
            faults: Faults::new(Arc::clone(&inbox)),
            positions: Arc::default(),
            inbox,
            closed: AtomicBool::new(false),
        }
    }

    /// Makes one call, with the fault that the script has for it. Without a fault, and while the server
    /// runs, it never yields.
    ///
    /// The server executes every request it was given, also when this future is dropped.
    pub(crate) async fn call<A: Send + 'static>(
        &self,
        request: Request,
        work: impl Work<A>,
    ) -> Result<A> {
        if self.closed.load(Ordering::Acquire) {
            return Err(MemoryError::Closed.into());
        }
        match self.faults.next(request.call) {
            Fault::Ok => self.store.submit(request, work).answer().await,
            Fault::ErrorBefore => Err(MemoryError::NotSent.into()),
            Fault::ErrorAfter => {
                drop(self.store.submit(request, work));
                Err(MemoryError::AnswerLost.into())
            }
            Fault::Slow(span) => {
                let answer = self.store.submit(request, work).answer().await;
                let clock = self.store.clock();
                clock.sleep_until(clock.now() + span).await;
                answer
            }
            Fault::Never => {
                drop(self.store.submit(request, work));
                std::future::pending().await
            }
            Fault::NeverExecuted => std::future::pending().await,
            Fault::Late(span) => {
                drop(self.later(span, request, work));
                Err(MemoryError::AnswerLost.into())
            }
            Fault::Delayed(span) => match self.later(span, request, work).await {
                Ok(submitted) => submitted.answer().await,
                Err(_) => Err(MemoryError::ServerLost.into()),
            },
        }
    }

    /// Gives the request to the server after that delay, even if its sender is gone.
    fn later<A: Send + 'static>(
        &self,
        span: Duration,
        request: Request,
        work: impl Work<A>,
    ) -> oneshot::Receiver<Submitted<A>> {
        let (sender, submitted) = oneshot::channel();
        let store = self.store.clone();
        let at = store.clock().now() + span;
        tokio::spawn(async move {
            store.clock().sleep_until(at).await;
            // Its sender may have given up; that the request was executed is the point.
            drop(sender.send(store.submit(request, work)));
        });
        submitted
    }

    /// The wake-ups, which can be taken once.
    pub(crate) fn wake_ups(&self) -> Option<impl Stream<Item = WakeUp> + Send + use<>> {
        let positions = Arc::clone(&self.positions);
        let wake_ups = self.inbox.take()?;
        Some(wake_ups.inspect(move |wake_up| {
            if let WakeUp::Turn { ticket, .. } = wake_up {
                positions.turned(*ticket);
            }
        }))
    }

    /// The server has no receiver for this client any more; its holds stay.
    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.store.disconnect(self.client);
            self.inbox.close();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

/// The positions of a client's tickets, remembered by the client so that the server need not. A ticket that
/// was removed from the queue comes back where it was; after a second turn that lapsed, it goes to the end.
#[derive(Debug, Default)]
pub(crate) struct QueuePositions(Mutex<HashMap<Ticket, Remembered>>);

#[derive(Debug, Default)]
struct Remembered {
    position: Option<QueuePosition>,
    /// A turn came, and the ticket has not answered since.
    turned: bool,
    /// An earlier turn ended in a refusal.
    lapsed: bool,
}

impl QueuePositions {
    /// Where the ticket is to be queued in the next request; `None`: at the end. It is remembered from now
    /// on.
    pub(crate) fn of(&self, ticket: Ticket) -> Option<QueuePosition> {
        let mut positions = self.0.lock();
        let remembered = positions.entry(ticket).or_default();
        if remembered.turned && remembered.lapsed {
            return None;
        }
        remembered.position
    }

    /// The ticket was refused, and is queued there. Ignored for a ticket that has left meanwhile.
    pub(crate) fn refused(&self, ticket: Ticket, position: Option<QueuePosition>) {
        if let (Some(position), Some(remembered)) = (position, self.0.lock().get_mut(&ticket)) {
            remembered.position = Some(position);
            remembered.lapsed |= std::mem::take(&mut remembered.turned);
        }
    }

    /// The ticket is queued there for the first time.
    pub(crate) fn queued(&self, ticket: Ticket, position: QueuePosition) {
        self.0.lock().entry(ticket).or_default().position = Some(position);
    }

    /// The ticket got a turn.
    pub(crate) fn turned(&self, ticket: Ticket) {
        if let Some(remembered) = self.0.lock().get_mut(&ticket) {
            remembered.turned = true;
        }
    }

    /// The ticket is used up, or has left.
    pub(crate) fn forget(&self, ticket: Ticket) {
        self.0.lock().remove(&ticket);
    }
}

#[cfg(test)]
mod tests {
    use crate::{MemoryConfig, MemoryDriver, MemoryStore};
    use dlock_core::{
        Clock, HoldId, Instant, Lease, Owner,
        driver::{Acquire, DistributedLock, Ticket},
    };
    use std::num::NonZeroU64;

    #[tokio::test(start_paused = true)]
    async fn nothing_is_remembered_of_a_ticket_that_is_over() {
        let store = MemoryStore::new(Clock::simulated());
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        let (one, two) = (Ticket(NonZeroU64::MIN), Ticket(NonZeroU64::MAX));
        let ask = |owner: &str, line, next| {
            let owner = Owner::from_seed(owner);
            let name = "n".parse().unwrap();
            let mut req = Acquire::new(
                name,
                owner,
                HoldId::from_bits(1),
                Lease::default(),
                Instant::FAR,
            );
            (req.ticket, req.next_ticket) = (line, next);
            req
        };
        let known = || driver.connection.positions.0.lock().len();
        driver
            .acquire(&ask("a", Some(one), Some(two)))
            .await
            .unwrap();
        assert_eq!(known(), 1, "the next one is queued");
        driver.acquire(&ask("b", Some(two), None)).await.unwrap();
        driver.leave(&ask("b", None, None).name, two).await.unwrap();
        assert_eq!(known(), 0);
    }
}
