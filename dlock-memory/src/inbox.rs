//! Inbox: how a notification reaches one client.

use crate::fault::{FaultPlan, WakeUpFault};
use dlock_core::driver::WakeUp;
use futures_core::Stream;
use futures_util::stream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::{sync::mpsc, task::unconstrained};

/// One client's inbox for wake-ups. Bounded: where wake-ups do not fit, one [`WakeUp::Resync`] stands for them.
#[derive(Debug)]
pub(crate) struct Inbox(Mutex<Channel>);

#[derive(Debug)]
struct Channel {
    /// `None`: the driver is closed.
    sender: Option<mpsc::Sender<WakeUp>>,
    /// Until the stream is taken.
    receiver: Option<mpsc::Receiver<WakeUp>>,
    fault: WakeUpFault,
    plan: Option<FaultPlan>,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(CAPACITY + 1);
        Self(Mutex::new(Channel {
            sender: Some(sender),
            receiver: Some(receiver),
            fault: WakeUpFault::Deliver,
            plan: None,
        }))
    }

    /// Whether the server would find a receiver: what `PUBLISH` counts.
    pub(crate) fn listens(&self) -> bool {
        let channel = self.lock();
        let open = channel.sender.as_ref().is_some_and(|to| !to.is_closed());
        open && channel.fault != WakeUpFault::Cut
    }

    /// Puts a wake-up from the server into the inbox; the fault script may lose it.
    pub(crate) fn push(&self, wake_up: WakeUp) {
        let mut channel = self.lock();
        let fault = match (channel.fault, &mut channel.plan) {
            (WakeUpFault::Deliver, Some(plan)) => plan.draw_wake_up(),
            (standing, _) => standing,
        };
        match fault {
            WakeUpFault::Deliver => channel.put(wake_up),
            WakeUpFault::Double => {
                channel.put(wake_up.clone());
                channel.put(wake_up);
            }
            WakeUpFault::Lose | WakeUpFault::Cut => {}
        }
    }

    /// Puts a wake-up that has arrived into the inbox.
    pub(crate) fn put(&self, wake_up: WakeUp) {
        self.lock().put(wake_up);
    }

    pub(crate) fn set_fault(&self, fault: WakeUpFault) {
        let mut channel = self.lock();
        let before = std::mem::replace(&mut channel.fault, fault);
        if before == WakeUpFault::Cut && fault != WakeUpFault::Cut {
            channel.put(WakeUp::Resync);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.lock().plan = plan;
    }

    /// The client listens no more; the stream ends after the wake-ups that have arrived.
    pub(crate) fn close(&self) {
        let sender = self.lock().sender.take();
        drop(sender);
    }

    /// The stream, which can be taken once. Without it the client has no receiver.
    pub(crate) fn take(&self) -> Option<impl Stream<Item = WakeUp> + Send + use<>> {
        let receiver = self.lock().receiver.take()?;
        Some(stream::unfold(receiver, |mut receiver| async {
            // Ready whenever a wake-up is there, like the calls of a driver without faults.
            let wake_up = unconstrained(receiver.recv()).await?;
            Some((wake_up, receiver))
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Channel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel {
    /// The last free slot is for a [`WakeUp::Resync`]: what does not fit behind it comes before it is read.
    fn put(&mut self, wake_up: WakeUp) {
        let Some(sender) = &self.sender else { return };
        let wake_up = match sender.capacity() {
            0 => return,
            1 => WakeUp::Resync,
            _ => wake_up,
        };
        // Fails only when the stream was dropped: the lock keeps every other sender out.
        drop(sender.try_send(wake_up));
    }
}

/// The most unread wake-ups: several turns for each of the names for which a busy client waits.
const CAPACITY: usize = 1024;
