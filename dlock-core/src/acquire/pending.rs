//! Acquire attempt: an acquisition in progress. It exists before the first byte is sent, and dropping it
//! undoes it.

use super::Identity;
use crate::{
    book::Queue,
    call::{ATTEMPT, Call},
    clock::Instant,
    driver::{Acquire, Acquired, Grant, Held},
    error::{DriverError, Effect, Error},
    flaw::Flaw,
    guard::Guard,
    hold::Start,
    identity::{FencingToken, HoldId, Owner, Ticket},
    inner::Inner,
    janitor::{Asked, Job},
    lease::Lease,
    name::LockName,
    terms::Terms,
};
use std::{panic::Location, sync::Arc, time::Duration};

pub(super) struct Pending {
    inner: Arc<Inner>,
    name: LockName,
    owner: Owner,
    hold: HoldId,
    join: Option<FencingToken>,
    /// The core chose to join, not the caller.
    implied: bool,
    reusable: bool,
    terms: Terms,
    at: &'static Location<'static>,
    under_way: Option<Asked>,
    /// Until when an unanswered attempt may still take the lock.
    unsettled: Option<Instant>,
}

/// The outcome of one attempt.
pub(super) enum Answer {
    Granted(Grant, Instant),
    Held(Held),
    Gone,
    Failed(DriverError),
    Unanswered,
}

impl Answer {
    /// Whether the store answered.
    pub(super) fn is_one(&self) -> bool {
        matches!(self, Self::Granted(..) | Self::Held(_) | Self::Gone)
    }
}

impl Pending {
    pub(super) fn new(
        inner: &Arc<Inner>,
        name: LockName,
        identity: &Identity,
        terms: Terms,
        at: &'static Location<'static>,
    ) -> Self {
        Self {
            inner: Arc::clone(inner),
            name,
            owner: identity.owner,
            hold: identity.hold,
            join: identity.join,
            implied: identity.implied,
            reusable: identity.reusable,
            terms,
            at,
            under_way: None,
            unsettled: None,
        }
    }

    pub(super) fn name(&self) -> &LockName {
        &self.name
    }

    /// The client and the lock name.
    pub(super) fn of(&self) -> (&Inner, &LockName) {
        (&self.inner, &self.name)
    }

    fn lease(&self) -> Lease {
        let lease = self.terms.lease();
        if self.inner.flawed(Flaw::LeaseTooLong) {
            return Lease::renewed(lease.length() * 10);
        }
        lease
    }

    /// The most time that one attempt may take.
    pub(super) fn attempt_within(&self) -> Duration {
        (self.terms.lease().length() / 3).min(ATTEMPT)
    }

    /// Asks the store once, with the same hold id each time, so that a repeat finds what an unanswered
    /// attempt did. `sent` is an instant shortly before the call, never after it.
    pub(super) async fn attempt(
        &mut self,
        (line, next): (Option<Ticket>, Option<Ticket>),
        look: bool,
        sent: Instant,
        end: Instant,
    ) -> Answer {
        if self.unsettled.is_some() && self.inner.flawed(Flaw::FreshHoldOnRepeat) {
            self.hold = self.inner.hold_id().unwrap_or(self.hold);
        }
        let give_up = (sent + self.attempt_within()).min(end);
        let request = Acquire {
            name: self.name.clone(),
            owner: self.owner,
            hold: self.hold,
            lease: self.lease(),
            line,
            next,
            join: self.join,
            look,
            give_up,
            note: Arc::clone(&self.inner.note),
        };
        let driver = Arc::clone(&self.inner.driver);
        let call = Call::new(&self.inner.adrift, give_up, async move {
            driver.acquire(&request).await
        });
        // The call stays here while it runs: if this value is dropped meanwhile, the cleanup takes the call
        // over.
        let answer = self.under_way.insert(call).answer().await;
        self.under_way = None;
        match answer {
            Some(Ok(Acquired::Granted(grant))) => Answer::Granted(grant, sent),
            Some(Ok(Acquired::Held(held))) => Answer::Held(held),
            Some(Ok(Acquired::Gone)) => Answer::Gone,
            Some(Err(error)) => {
                if error.effect() == Effect::Unknown {
                    self.unanswered(give_up);
                }
                Answer::Failed(error)
            }
            None => {
                self.unanswered(give_up);
                Answer::Unanswered
            }
        }
    }

    fn unanswered(&mut self, give_up: Instant) {
        self.unsettled = self.unsettled.max(Some(give_up + self.inner.caps.late));
    }

    /// Whether the store may have executed an attempt without the client knowing.
    pub(super) fn is_open(&self) -> bool {
        self.under_way.is_some() || self.unsettled.is_some()
    }

    /// Makes a guard of a grant. `None` when the grant came too late to be of use, or after the shutdown
    /// began; the cleanup then releases it. `arrive` runs under the lock table's mutex.
    ///
    /// # Errors
    ///
    /// `Unavailable` when there is no hold id for the next attempt.
    pub(super) fn succeed(
        &mut self,
        grant: Grant,
        (sent, now): (Instant, Instant),
        ticket: Option<Ticket>,
        arrive: impl FnOnce(&mut Queue),
    ) -> Result<Option<Guard>, Error> {
        let start = Start {
            name: self.name.clone(),
            owner: self.owner,
            reusable: self.reusable,
            id: self.hold,
            token: grant.token,
            terms: self.terms,
            sent,
            valid_for: grant.valid_for,
            first: None,
            at: self.at,
            unsettled: self.unsettled,
            ticket,
        };
        let guard = self.inner.begin(start, now, arrive);
        if guard.is_some() {
            self.unsettled = None;
        } else {
            self.give_back()?;
        }
        Ok(guard)
    }

    /// Releases a grant that is of no use. The next attempt is another acquisition.
    fn give_back(&mut self) -> Result<(), Error> {
        let mut job = Job::new(self.name.clone());
        job.hold = Some(self.identity());
        job.unsettled = self.unsettled.take();
        self.inner.settle(job);
        self.hold = self.inner.hold_id()?;
        Ok(())
    }

    fn identity(&self) -> (Owner, HoldId, Duration) {
        (self.owner, self.hold, self.terms.lease().length())
    }

    /// The store reported that the incarnation to join is over, so its guards are lost. Returns whether the
    /// join was only implied, in which case the owner may acquire afresh.
    pub(super) fn unjoin(&mut self) -> bool {
        let Some(token) = self.join else {
            return false;
        };
        self.inner.forgotten(&self.name, self.owner, token);
        if self.implied {
            self.join = None;
        }
        std::mem::take(&mut self.implied)
    }

    /// Gives up: the cleanup undoes whatever the store may have executed, and removes these tickets.
    pub(super) fn abandon(&mut self, tickets: Vec<Ticket>) {
        let under_way = self.under_way.take();
        let unsettled = self.unsettled.take();
        let open = under_way.is_some() || unsettled.is_some();
        if open || !tickets.is_empty() {
            let mut job = Job::new(self.name.clone());
            job.hold = open.then_some(self.identity());
            job.unsettled = unsettled;
            job.tickets = tickets;
            self.inner.settle_after(job, under_way);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.abandon(Vec::new());
    }
}
