//! Inbox: how a notification reaches one client.

use crate::fault::{FaultPlan, HintFault};
use dlock_core::driver::Hint;
use futures_core::Stream;
use futures_util::stream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::{sync::mpsc, task::unconstrained};

/// One client's inbox for hints. Bounded: where hints do not fit, one [`Hint::Resync`] stands for them.
#[derive(Debug)]
pub(crate) struct Inbox(Mutex<Channel>);

#[derive(Debug)]
struct Channel {
    /// `None`: the driver is closed.
    sender: Option<mpsc::Sender<Hint>>,
    /// Until the stream is taken.
    receiver: Option<mpsc::Receiver<Hint>>,
    fault: HintFault,
    plan: Option<FaultPlan>,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(CAPACITY + 1);
        Self(Mutex::new(Channel {
            sender: Some(sender),
            receiver: Some(receiver),
            fault: HintFault::Deliver,
            plan: None,
        }))
    }

    /// Whether the server would find a receiver: what `PUBLISH` counts.
    pub(crate) fn listens(&self) -> bool {
        let channel = self.lock();
        let open = channel.sender.as_ref().is_some_and(|to| !to.is_closed());
        open && channel.fault != HintFault::Cut
    }

    /// Puts a hint from the server into the inbox; the fault script may lose it.
    pub(crate) fn push(&self, hint: Hint) {
        let mut channel = self.lock();
        let fault = match (channel.fault, &mut channel.plan) {
            (HintFault::Deliver, Some(plan)) => plan.draw_hint(),
            (standing, _) => standing,
        };
        match fault {
            HintFault::Deliver => channel.put(hint),
            HintFault::Double => {
                channel.put(hint.clone());
                channel.put(hint);
            }
            HintFault::Lose | HintFault::Cut => {}
        }
    }

    /// Puts a hint that has arrived into the inbox.
    pub(crate) fn put(&self, hint: Hint) {
        self.lock().put(hint);
    }

    pub(crate) fn set_fault(&self, fault: HintFault) {
        let mut channel = self.lock();
        let before = std::mem::replace(&mut channel.fault, fault);
        if before == HintFault::Cut && fault != HintFault::Cut {
            channel.put(Hint::Resync);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.lock().plan = plan;
    }

    /// The client listens no more; the stream ends after the hints that have arrived.
    pub(crate) fn close(&self) {
        let sender = self.lock().sender.take();
        drop(sender);
    }

    /// The stream, which can be taken once. Without it the client has no receiver.
    pub(crate) fn take(&self) -> Option<impl Stream<Item = Hint> + Send + use<>> {
        let receiver = self.lock().receiver.take()?;
        Some(stream::unfold(receiver, |mut receiver| async {
            // Ready whenever a hint is there, like the calls of a driver without faults.
            let hint = unconstrained(receiver.recv()).await?;
            Some((hint, receiver))
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Channel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel {
    /// The last free slot is for a [`Hint::Resync`]: what does not fit behind it comes before it is read.
    fn put(&mut self, hint: Hint) {
        let Some(sender) = &self.sender else { return };
        let hint = match sender.capacity() {
            0 => return,
            1 => Hint::Resync,
            _ => hint,
        };
        // Fails only when the stream was dropped: the lock keeps every other sender out.
        drop(sender.try_send(hint));
    }
}

/// The most unread hints: several turns for each of the names for which a busy client waits.
const CAPACITY: usize = 1024;
