//! Inbox: how a notification reaches one client.

use crate::fault::{FaultPlan, WakeUpFault};
use dlock_core::driver::{WakeUp, kit::WakeUps};
use futures_core::Stream;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::task::unconstrained;

/// One client's inbox for wake-ups, and what a test does to them on their way.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    arrived: WakeUps,
    way: Mutex<Way>,
}

#[derive(Debug, Default)]
struct Way {
    fault: WakeUpFault,
    plan: Option<FaultPlan>,
}

impl Inbox {
    /// Whether the server would find a receiver: what `PUBLISH` counts.
    pub(crate) fn listens(&self) -> bool {
        !self.arrived.is_closed() && self.way.lock().fault != WakeUpFault::Cut
    }

    /// Puts a wake-up from the server into the inbox; the fault script may lose it.
    pub(crate) fn push(&self, wake_up: WakeUp) {
        let mut way = self.way.lock();
        let fault = match (way.fault, &mut way.plan) {
            (WakeUpFault::Deliver, Some(plan)) => plan.draw_wake_up(),
            (standing, _) => standing,
        };
        match fault {
            WakeUpFault::Deliver => self.put(wake_up),
            WakeUpFault::Double => {
                self.put(wake_up.clone());
                self.put(wake_up);
            }
            WakeUpFault::Lose | WakeUpFault::Cut => {}
        }
    }

    /// Puts a wake-up that has arrived into the inbox.
    pub(crate) fn put(&self, wake_up: WakeUp) {
        self.arrived.send(wake_up);
    }

    pub(crate) fn set_fault(&self, fault: WakeUpFault) {
        let before = std::mem::replace(&mut self.way.lock().fault, fault);
        if before == WakeUpFault::Cut && fault != WakeUpFault::Cut {
            self.put(WakeUp::Resync);
        }
    }

    pub(crate) fn plan(&self, plan: Option<FaultPlan>) {
        self.way.lock().plan = plan;
    }

    /// The client listens no more; the stream ends after the wake-ups that have arrived.
    pub(crate) fn close(&self) {
        self.arrived.close();
    }

    /// The stream, which can be taken once. Without it the client has no receiver.
    pub(crate) fn take(&self) -> Option<impl Stream<Item = WakeUp> + Send + use<>> {
        let arrived = self.arrived.take()?;
        Some(stream::unfold(arrived, |mut arrived| async {
            // Ready whenever a wake-up is there, like the calls of a driver without faults.
            let wake_up = unconstrained(arrived.next()).await?;
            Some((wake_up, arrived))
        }))
    }
}
