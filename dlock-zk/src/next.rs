//! Follow-up of a grant: queues the client's next waiter, and removes the ticket that is used up.
//!
//! The next waiter then has its seat before the holder can release.

use crate::{connection::Session, seats::Mine};
use dlock_core::{
    HoldId, Mode, Owner,
    driver::{Acquire, Acquired, Ticket, WakeUp},
};
use std::{
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};
use tokio::sync::OwnedMutexGuard;

impl Session {
    /// Removes the seat of a ticket whose request was granted without that seat.
    pub(crate) fn used_up(&self, req: &Acquire) {
        let is_idle = |mine: &Mine| mine.ticket == req.ticket && mine.phase.is_idle();
        if let Some(mine) = req.ticket.and_then(|_| self.seats.find(&req.name, is_idle)) {
            self.doom(mine.id, Duration::ZERO);
        }
    }

    /// Creates the seat of the client's next waiter. The request is sent before the caller learns of the
    /// grant, so the caller cannot release before it. No task awaits it.
    pub(crate) fn stand_next(
        self: &Arc<Self>,
        req: &Acquire,
        ticket: Ticket,
        gate: OwnedMutexGuard<()>,
    ) {
        let stands = |mine: &Mine| mine.ticket == Some(ticket) && !mine.phase.is_over();
        if self.seats.find(&req.name, stands).is_some() {
            return;
        }
        let mut next = req.clone();
        (next.ticket, next.next_ticket, next.join) = (Some(ticket), None, None);
        // Not yet assigned: the poll that takes the seat writes the waiter's owner and hold to it.
        next.owner = Owner::from_seed(&format!("{} {ticket}", req.hold));
        next.hold = HoldId::from_bits(next.hold.to_bits().rotate_left(1) ^ ticket.0.get());
        // The seat watches for room once it is a sharer's.
        let may_share = matches!(req.owner.mode(), Mode::Permit { .. });
        let session = Arc::clone(self);
        let mut standing = Box::pin(async move {
            let _gate = gate;
            let stood = session.stand(&next, session.clock.now(), true).await;
            if may_share || !matches!(stood, Ok(Some(Acquired::Held(_)))) {
                // Its turn, or no seat: the core has to ask.
                let name = next.name.clone();
                session.wake_ups.send(WakeUp::Turn { name, ticket });
            }
        });
        // Its first poll sends the request.
        let mut context = Context::from_waker(Waker::noop());
        if standing.as_mut().poll(&mut context).is_pending() {
            self.runtime.spawn(standing);
        }
    }
}
