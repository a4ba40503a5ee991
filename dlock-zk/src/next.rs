//! Follow-up of a grant: queues the client's next waiter, and removes the ticket that is used up.
//!
//! The next waiter then has its seat before the holder can release.

use crate::{
    acquire::{Step, accept_lease, printed, unanswered},
    commands::{self, Use},
    connection::Session,
    error::{failed, is_open},
    line::stem,
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    HoldId, Instant, Owner,
    driver::{Acquire, Acquired, Hint, Result, Ticket},
};
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;

impl Session {
    /// Removes the seat of a ticket whose request was granted without that seat.
    pub(crate) fn used_up(&self, req: &Acquire) {
        let Some(ticket) = req.line else {
            return;
        };
        if let Some(mine) = self.seats.find(&req.name, |mine| {
            mine.ticket == Some(ticket) && mine.held_until().is_none()
        }) {
            self.doom(mine.id);
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
        let stands =
            |mine: &Mine| mine.ticket == Some(ticket) && !matches!(mine.phase, Phase::Doomed(_));
        if self.seats.find(&req.name, stands).is_some() {
            return;
        }
        let mut next = req.clone();
        (next.line, next.next, next.join) = (Some(ticket), None, None);
        // Not yet assigned: the poll that takes the seat writes the waiter's owner and hold to it.
        next.owner = Owner::from_seed(&format!("{} {ticket}", req.hold));
        next.hold = HoldId::from_bits(next.hold.to_bits().rotate_left(1) ^ ticket.0.get());
        let session = Arc::clone(self);
        let mut standing = Box::pin(async move {
            let _gate = gate;
            let entered = session.clock.now();
            let stood = session.stand_behind(&next, entered).await;
            if !matches!(stood, Ok(Step::Done(Acquired::Held(_)))) {
                // Its turn, or no seat: the core has to ask.
                let name = next.name.clone();
                session.hints.say(Hint::Turn { name, ticket });
            }
        });
        // Its first poll sends the request.
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        if standing.as_mut().poll(&mut context).is_pending() {
            tokio::spawn(standing);
        }
    }

    /// As [`stand`](Self::stand), for a waiter that does not ask yet: the seat waits, even with none before
    /// it.
    async fn stand_behind(self: &Arc<Self>, req: &Acquire, entered: Instant) -> Result<Step> {
        let mut mine = Mine::asked(req, stem(req.hold.to_bits()), req.line);
        mine.waits = true;
        let data = mine.record(Use::Waits).encode();
        let (folder, first) = (self.root.folder(&req.name), mine.stem.clone());
        let id = self.seats.insert(mine);
        let (made, line) = commands::stand(&self.client, &folder, &first, &data, self.acls()).await;
        let (stat, number) = match made {
            Ok(made) => made,
            Err(error) => {
                if !is_open(&error) {
                    self.seats.remove(id);
                }
                return Err(failed(error));
            }
        };
        let file = format!("{first}{}", printed(number));
        let (token, until) = (
            self.token(&stat),
            entered + accept_lease(req.lease.length()),
        );
        self.seats.change(id, |mine| {
            mine.node = Some(Node {
                file,
                number,
                version: Some(0),
            });
            mine.token = token;
            mine.phase = Phase::Waits(Some(until));
            mine.accept = accept_lease(req.lease.length());
        });
        let line = line.map_err(unanswered)?;
        if line.ahead_of(number).is_none() {
            return Ok(Step::Again);
        }
        self.judge(req, id, &line, entered).await
    }
}
