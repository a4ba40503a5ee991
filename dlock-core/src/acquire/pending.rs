//! One acquisition before anybody knows whether it is one: made before the first byte is sent, and undone when it is dropped.

use super::Identity;
use crate::{
    book::Queue,
    call::{ATTEMPT, Call},
    clock::Instant,
    driver::{Acquire, Acquired, Grant, Held},
    error::{DriverError, Effect},
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
    /// The join is the core's idea, not the caller's.
    implied: bool,
    terms: Terms,
    at: &'static Location<'static>,
    under_way: Option<Asked>,
    /// Until when an unanswered attempt may still take hold.
    unsettled: Option<Instant>,
}

/// What one attempt brought.
pub(super) enum Answer {
    Granted(Grant, Instant),
    Held(Held),
    Gone,
    Failed(DriverError),
    Unanswered,
}

impl Answer {
    /// Whether the store gave it.
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
            terms,
            at,
            under_way: None,
            unsettled: None,
        }
    }

    pub(super) fn name(&self) -> &LockName {
        &self.name
    }

    /// Whose, and of what name.
    pub(super) fn of(&self) -> (&Inner, &LockName) {
        (&self.inner, &self.name)
    }

    fn lease(&self) -> Lease {
        let lease = self.terms.lease();
        if self.inner.flawed(Flaw::LeaseTooLong) {
            return Lease::kept(lease.length() * 10).unwrap_or(lease);
        }
        lease
    }

    /// The most one attempt may take.
    pub(super) fn attempt_within(&self) -> Duration {
        (self.terms.lease().length() / 3).min(ATTEMPT)
    }

    /// Asks the store once, with the same hold each time: a repeat finds what an unanswered attempt did. The time that it was sent at is at
    /// most that of a moment ago.
    pub(super) async fn attempt(
        &mut self,
        (line, next): (Option<Ticket>, Option<Ticket>),
        look: bool,
        sent: Instant,
        end: Instant,
    ) -> Answer {
        if self.unsettled.is_some() && self.inner.flawed(Flaw::FreshHoldOnRepeat) {
            self.hold = self.inner.hold_id();
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
        // It stays here while it runs: whoever drops this value meanwhile leaves it to the janitor.
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

    /// Whether the store may have something of it that nobody knows of.
    pub(super) fn is_open(&self) -> bool {
        self.under_way.is_some() || self.unsettled.is_some()
    }

    /// Makes a guard of a grant; `None`: it came too late to be worth anything, or when the client was already shutting down, and the
    /// janitor gives it back. `arrive` is told of it while the book is open.
    pub(super) fn succeed(
        &mut self,
        grant: Grant,
        (sent, now): (Instant, Instant),
        ticket: Option<Ticket>,
        arrive: impl FnOnce(&mut Queue),
    ) -> Option<Guard> {
        let start = Start {
            name: self.name.clone(),
            owner: self.owner,
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
            self.give_back();
        }
        guard
    }

    /// A grant that nobody can use goes back, and what follows is another acquisition.
    fn give_back(&mut self) {
        let mut job = Job::new(self.name.clone());
        job.hold = Some(self.identity());
        job.unsettled = self.unsettled.take();
        self.inner.settle(job);
        self.hold = self.inner.hold_id();
    }

    fn identity(&self) -> (Owner, HoldId, Duration) {
        (self.owner, self.hold, self.terms.lease().length())
    }

    /// The guard whose incarnation was to be entered, and whose end was found by asking, stands for nothing; says whether it was only
    /// implied, so that the owner may acquire afresh.
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

    /// Gives up: whatever the store may have of it, and these tickets, are the janitor's now.
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
