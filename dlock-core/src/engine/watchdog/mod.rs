//! Watchdog: one task per client that renews every renewed lease, proves every fixed one, and declares
//! holds lost.
//!
//! This is the I/O shell round the pure [`machine`]. It sleeps until the machine has something to do, sends
//! the requests that the machine decides on, and feeds the answers back. Renewals run beside it, one task
//! per batch: no timer ever waits for one.

pub(crate) mod machine;
#[cfg(test)]
mod tests;

use crate::{
    clock::Instant,
    driver::{Lane, Renew, Renewed},
    engine::{
        Engine,
        call::Call,
        hold::{GuardState, Hold},
        metrics::Op,
    },
    error::{DriverError, LossReason, micros},
    lease::Lease,
};
use machine::{Action, Answer, Batch, Key, Machine, Renewal, Watched};
use parking_lot::Mutex;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Watchdog {
    state: Mutex<Watch>,
    /// A timer is earlier than the end of the task's sleep.
    earlier: Notify,
}

#[derive(Debug)]
struct Watch {
    machine: Machine<Arc<Hold>>,
    /// Until when the task sleeps. A hold that comes and goes meanwhile does not wake it.
    armed: Instant,
    /// A hold was added since the task last ran.
    used: bool,
    /// Renewing has stopped.
    stopped: bool,
}

impl Watch {
    /// Returns whether the task has to be woken, and moves its wake-up time forward if so.
    fn rearm(&mut self) -> bool {
        match self.machine.next() {
            Some(next) if next < self.armed => {
                self.armed = next;
                true
            }
            _ => false,
        }
    }
}

impl Watchdog {
    pub(crate) fn new(batch: usize) -> Self {
        Self {
            state: Mutex::new(Watch {
                machine: Machine::new(batch),
                armed: Instant::FAR,
                used: false,
                stopped: false,
            }),
            earlier: Notify::new(),
        }
    }

    pub(crate) fn watch(&self, watched: Watched<Arc<Hold>>) -> Key {
        let mut state = self.state.lock();
        let key = state.machine.watch(watched);
        state.used = true;
        if state.stopped {
            state.machine.forget(key);
        } else if state.rearm() {
            self.earlier.notify_one();
        }
        key
    }

    pub(crate) fn forget(&self, key: Key) {
        self.state.lock().machine.forget(key);
    }

    /// A session ended: asks for its holds at once.
    pub(crate) fn over(&self, lane: Lane, now: Instant) {
        let mut state = self.state.lock();
        state.machine.over(lane, now);
        if state.rearm() {
            self.earlier.notify_one();
        }
    }

    /// Stops renewing.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        state.machine.clear();
    }
}

/// The watchdog's task. It ends with the client.
pub(crate) async fn run(client: Weak<Engine>) {
    loop {
        let Some(engine) = client.upgrade() else {
            return;
        };
        let (actions, next, late) = {
            let mut state = engine.watchdog.state.lock();
            let now = engine.clock.now();
            let late = now.since(state.armed);
            let actions = state.machine.tick(now, &mut || engine.random.jitter());
            let used = std::mem::take(&mut state.used);
            state.armed = rests_until(state.machine.next(), used, now);
            (actions, state.armed, late)
        };
        perform(&engine, actions, late);
        let clock = engine.clock.clone();
        let watchdog = Arc::clone(&engine.watchdog);
        drop(engine); // a sleeping watchdog must not keep the client alive
        tokio::select! {
            biased;
            () = watchdog.earlier.notified() => {}
            () = clock.sleep_until(next) => {}
        }
    }
}

/// Until when the task sleeps after it has done what was due.
///
/// A hold may already be released when its wake-up arrives, which leaves nothing to watch. If the task then
/// slept for ever, the next hold would wake it again. In a loop of short holds, each would cost the wake-up
/// of a thread.
fn rests_until(next: Option<Instant>, used: bool, now: Instant) -> Instant {
    let idle = if used { now + LINGER } else { Instant::FAR };
    next.unwrap_or(idle)
}

/// How long an idle task sleeps after a hold. It is shorter than the renewal interval of all but the
/// shortest leases, so that their holds need not wake the task meanwhile.
const LINGER: Duration = Duration::from_secs(1);

/// Does what the machine decided on. `late`: how much later the task ran than it asked for, because its runtime did
/// not poll it.
fn perform(engine: &Arc<Engine>, actions: Vec<Action<Arc<Hold>>>, late: Duration) {
    let stalled = |hold: &Hold| late > Lease::renew_within(hold.lease().length()) / 8;
    for action in actions {
        match action {
            Action::Send(batch) => {
                let renewing = renew(Arc::downgrade(engine), engine.renewal(batch));
                engine.calls.handle.spawn(renewing);
            }
            Action::Doubt(hold) => {
                let stalled = stalled(&hold);
                hold.stalled(stalled);
                let Some(first) = hold.doubt() else {
                    continue;
                };
                // One failure may be a connection that was cut: the next attempt has another one.
                if (stalled || !first) && hold.is_untold() {
                    doubted(engine, &hold, stalled, late);
                }
            }
            Action::Renewed(key, hold, deadline) => {
                let (before, lease) = (hold.own_deadline(), hold.lease().length());
                hold.class.renewed(before, lease, &engine.clock);
                if !hold.renewed(deadline) {
                    engine.watchdog.forget(key);
                    // The user's timer fired first, by less than a tick: no deadline comes any more that
                    // would end the hold here.
                    if let GuardState::Lost(
                        reason @ (LossReason::Deadline | LossReason::Presence),
                    ) = hold.state(&engine.clock)
                    {
                        engine.lose(&hold, reason);
                    }
                    continue;
                }
                tracing::trace!(
                    target: "dlock::renew", lock = %hold.name, backend = engine.caps.backend, "renewed"
                );
            }
            Action::Lost(hold, reason) => {
                if stalled(&hold) {
                    hold.stalled(true);
                }
                engine.lose(&hold, reason);
            }
        }
    }
}

fn doubted(engine: &Engine, hold: &Hold, stalled: bool, late: Duration) {
    let why = match stalled {
        true => {
            "the client's runtime did not run in time (it was not polled, its workers were blocked, or the process was \
             paused)"
        }
        false => "renewals fail, or are not answered within a sixth of the lease",
    };
    let rest = hold.deadline().since(engine.clock.now());
    tracing::warn!(
        target: "dlock::renew", lock = %hold.name, backend = engine.caps.backend, owner = %hold.owner,
        rest_us = micros(rest), late_us = micros(late), stalled, "{why}; held until the deadline"
    );
}

/// A batch of renewals in flight.
struct Renewing {
    id: machine::BatchId,
    sent: Instant,
    count: usize,
    call: Call<Result<Vec<Result<Renewed, DriverError>>, DriverError>>,
}

impl Engine {
    /// Has the hold renewed, or proven, until `end` or its release.
    pub(crate) fn watch(&self, hold: &Arc<Hold>, sent: Instant, end: Option<Instant>) {
        let (lease, length) = (hold.lease(), hold.lease().length());
        let renewal = match lease.is_renewed() {
            true => Renewal {
                ask: Some(length),
                length,
            },
            // The record may be lost before the lease ends. On a session store it also lasts no longer than
            // the session.
            false => Renewal {
                ask: None,
                length: length.min(*self.caps.leases.end()),
            },
        };
        hold.watched_as(self.watchdog.watch(Watched {
            what: Arc::clone(hold),
            name: hold.name.clone(),
            lane: self.driver.lane(&hold.name),
            sent,
            deadline: hold.own_deadline(),
            renewal,
            end,
        }));
    }

    pub(crate) fn stop_renewing(&self, hold: &Hold) {
        if let Some(key) = hold.key() {
            self.watchdog.forget(key);
        }
    }

    fn renewal(&self, batch: Batch<Arc<Hold>>) -> Renewing {
        let (driver, lane, give_up) = (Arc::clone(&self.driver), batch.lane, batch.give_up);
        let asked: Vec<_> = (batch.entries.iter())
            .map(|(hold, lease)| Renew {
                token: Some(hold.token),
                ..Renew::new(hold.name.clone(), hold.owner, hold.id, *lease)
            })
            .collect();
        Renewing {
            id: batch.id,
            sent: self.clock.now(),
            count: asked.len(),
            call: Call::new(&self.calls, give_up, async move {
                driver.renew(lane, &asked, give_up).await
            }),
        }
    }
}

/// Waits for the answer, even past its give-up: a late one can only help, or prove a loss early.
async fn renew(client: Weak<Engine>, mut renewing: Renewing) {
    let mut answer = renewing.call.answer().await;
    {
        let Some(engine) = client.upgrade() else {
            return;
        };
        let Engine { classes, clock, .. } = &*engine;
        let store = &classes.store;
        store.request_ends(Op::Renew, answer.as_ref(), renewing.sent, clock);
    }
    if answer.is_none() {
        answer = renewing.call.late_answer().await;
    }
    let Some(engine) = client.upgrade() else {
        return;
    };
    let answers: Vec<_> = match answer {
        None => {
            engine.watchdog.state.lock().machine.abandon(renewing.id);
            return;
        }
        Some(Ok(answers)) => answers
            .into_iter()
            .map(|answer| answer.map_or_else(|error| failed(&engine, &error), Answer::Renewed))
            .collect(),
        Some(Err(error)) => vec![failed(&engine, &error); renewing.count],
    };
    let (actions, earlier) = {
        let mut state = engine.watchdog.state.lock();
        let now = engine.clock.now();
        let actions = state
            .machine
            .answered(renewing.id, answers, now, &mut || engine.random.jitter());
        (actions, state.rearm())
    };
    perform(&engine, actions, Duration::ZERO);
    if earlier {
        engine.watchdog.earlier.notify_one();
    }
}

fn failed(engine: &Engine, error: &DriverError) -> Answer {
    tracing::debug!(target: "dlock::renew", backend = engine.caps.backend, %error, "a renewal failed");
    Answer::Failed
}
