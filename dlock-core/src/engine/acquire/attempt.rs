//! Acquire attempt: an acquisition in progress. It exists before the first byte is sent, and dropping it
//! undoes it.

use crate::{
    clock::Instant,
    driver::{Acquire, Acquired, Grant, Held, Ticket},
    engine::{
        Engine,
        call::{ATTEMPT_LIMIT, Call},
        cleanup::{AcquireCall, CleanupJob, Target},
        hold::{Presence, Start},
        lock_table::{Granted, Tickets},
        metrics::{Class, Op},
        presence::Absent,
    },
    error::{DriverError, Effect, Error, ErrorKind},
    guard::Guard,
    lease::Lease,
    name::LockName,
    options::{AcquireOptions, Terms},
    owner::{HoldId, MAX_SHARERS, Mode, Owner},
    token::FencingToken,
};
use std::{panic::Location, sync::Arc, time::Duration};

/// The identity that the store sees.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) owner: Owner,
    pub(super) hold: HoldId,
    pub(super) join: Option<FencingToken>,
    /// The owner was not made for this acquisition alone, so it may hold the lock already.
    pub(super) given: bool,
    /// The core chose to join, because the owner has a guard in this client.
    pub(super) implied: bool,
    /// The owner comes from `with_owner` and may own other locks, too.
    pub(super) reusable: bool,
    pub(super) presence: Dependence,
}

/// What a hold depends on besides its lease.
#[derive(Clone, Debug)]
pub(super) enum Dependence {
    None,
    /// The client's presence at the time of the request.
    OnCurrent,
    /// This presence. The owner, and with it all that was sent in its name, depends on no other.
    On(Arc<Presence>),
}

pub(super) struct Attempt {
    pub(super) engine: Arc<Engine>,
    pub(super) name: LockName,
    pub(super) who: Identity,
    terms: Terms,
    at: &'static Location<'static>,
    pub(super) class: Class,
    call: Option<AcquireCall>,
    /// Until when an unanswered attempt may still take the lock.
    indeterminate_until: Option<Instant>,
}

/// The outcome of one attempt.
pub(super) enum Answer {
    Granted(Grant, Instant),
    Held(Held),
    Gone,
    Failed(DriverError),
    Unanswered,
}

impl Attempt {
    pub(super) fn new(engine: &Arc<Engine>, identity: &Identity, options: &AcquireOptions) -> Self {
        Self {
            engine: Arc::clone(engine),
            name: options.name.clone(),
            who: identity.clone(),
            terms: options.terms,
            at: options.at,
            class: options.class.clone(),
            call: None,
            indeterminate_until: None,
        }
    }

    pub(super) fn lease(&self) -> Lease {
        self.terms.lease()
    }

    /// The most time that one attempt may take.
    pub(super) fn attempt_limit(&self) -> Duration {
        (self.lease().length() / 3).min(ATTEMPT_LIMIT)
    }

    /// Asks the store once, with the same hold id each time, so that a repeat finds what an unanswered
    /// attempt did. `sent` is an instant shortly before the call, never after it.
    pub(super) async fn send(
        &mut self,
        tickets: Tickets,
        retry: bool,
        sent: Instant,
        end: Instant,
    ) -> Answer {
        let give_up = (sent + self.attempt_limit()).min(end);
        if let Dependence::OnCurrent | Dependence::On(_) = self.who.presence {
            // Boxed, because most clients have no presence, and this future is moved.
            if let Err(answer) = Box::pin(self.appear(give_up)).await {
                return answer;
            }
        }
        let request = Acquire {
            name: self.name.clone(),
            owner: self.who.owner,
            hold: self.who.hold,
            lease: self.lease(),
            ticket: tickets.current,
            next_ticket: tickets.next,
            join: self.who.join,
            floor: None,
            retry,
            give_up,
            info: match &self.who.presence {
                Dependence::On(present) => Arc::clone(&present.info),
                _ => Arc::clone(&self.engine.info),
            },
        };
        let driver = Arc::clone(&self.engine.driver);
        let call = Call::new(&self.engine.calls, give_up, async move {
            driver.acquire(&request).await
        });
        // The call stays here while it runs: if this value is dropped meanwhile, the cleanup takes the call
        // over.
        let answer = self.call.insert(call).answer().await;
        self.call = None;
        let Engine { classes, clock, .. } = &*self.engine;
        let store = &classes.store;
        store.request_ends(Op::Acquire, answer.as_ref(), sent, clock);
        match answer {
            Some(Ok(Acquired::Granted(grant))) => Answer::Granted(grant, sent),
            Some(Ok(Acquired::Held(held))) if held.doubt => {
                self.unanswered(give_up);
                match self.abandon_hold() {
                    Ok(()) => Answer::Held(held),
                    Err(error) => Answer::Failed(error),
                }
            }
            Some(Ok(Acquired::Held(held))) => match self.disagreement(&held) {
                Some(error) => Answer::Failed(error),
                None => Answer::Held(held),
            },
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

    /// Makes sure of a presence that the next request can depend on.
    async fn appear(&mut self, give_up: Instant) -> Result<(), Answer> {
        if let Dependence::On(presence) = &self.who.presence {
            if presence.hold.is_live(&self.engine.clock) {
                return Ok(());
            }
            if self.who.join.is_some() {
                return Err(Answer::Gone);
            }
            self.start_afresh().map_err(Answer::Failed)?;
        }
        if let Some(presences) = &self.engine.presences {
            match self.engine.presence(presences, give_up).await {
                Ok(presence) => self.who.presence = Dependence::On(presence),
                Err(Absent::Failed(error)) => return Err(Answer::Failed(error)),
                Err(Absent::Unanswered) => return Err(Answer::Unanswered),
            }
        }
        Ok(())
    }

    /// The presence is over that this owner was sent with. The next one gets an owner of its own, and the cleanup
    /// what this one may have taken.
    fn start_afresh(&mut self) -> Result<(), DriverError> {
        let (owner, hold) = self.engine.random.owner_and_hold()?;
        self.abandon(Vec::new());
        (self.who.owner, self.who.hold) = (owner, hold);
        self.who.presence = Dependence::OnCurrent;
        Ok(())
    }

    /// Two users of a semaphore disagree about its number of permits: neither would ever be let in beside the
    /// other.
    fn disagreement(&self, held: &Held) -> Option<DriverError> {
        let (theirs, ours) = (held.by.as_ref()?.owner.mode(), self.who.owner.mode());
        let (Mode::Permit { of: theirs }, Mode::Permit { of: ours }) = (theirs, ours) else {
            return None;
        };
        let message = format!(
            "the semaphore has {theirs} permits for its present holders, and {ours} here: all its users must name the same number"
        );
        (theirs != ours)
            .then(|| DriverError::new(ErrorKind::Misuse, message).with_effect(Effect::None))
    }

    pub(super) fn shares(&self) -> bool {
        self.who.owner.mode() != Mode::Exclusive
    }

    /// How many may share the lock; 0: it is wanted alone.
    pub(super) fn most(&self) -> u32 {
        match self.who.owner.mode() {
            Mode::Permit { of } => of.get(),
            Mode::Shared => MAX_SHARERS,
            Mode::Exclusive => 0,
        }
    }

    fn unanswered(&mut self, give_up: Instant) {
        self.indeterminate_until = self
            .indeterminate_until
            .max(Some(give_up + self.engine.caps.late));
    }

    /// Whether the store may yet execute an attempt without the client knowing.
    pub(super) fn is_open(&self) -> bool {
        self.call.is_some() || self.indeterminate_until > Some(self.engine.clock.now())
    }

    /// Whether the store may have executed an attempt of this acquisition without the client knowing.
    pub(super) fn was_unanswered(&self) -> bool {
        self.call.is_some() || self.indeterminate_until.is_some()
    }

    /// Makes a guard of a grant. `None` when the grant came too late to be of use, or after the shutdown
    /// began; the cleanup then releases it. `waiter` is what the local queue has to know of it.
    ///
    /// # Errors
    ///
    /// `Unavailable` when there is no hold id for the next attempt.
    pub(super) fn succeed(
        &mut self,
        grant: Grant,
        sent: Instant,
        now: Instant,
        waiter: Option<Granted>,
    ) -> Result<Option<Guard>, Error> {
        let start = Start {
            name: self.name.clone(),
            owner: self.who.owner,
            reusable: self.who.reusable,
            id: self.who.hold,
            token: grant.token,
            terms: self.terms,
            sent,
            valid_for: grant.valid_for,
            first: None,
            at: self.at,
            indeterminate_until: self.indeterminate_until,
            ticket: waiter.as_ref().and_then(|waiter| waiter.tickets.current),
            class: self.class.clone(),
            presence: match &self.who.presence {
                Dependence::On(present) => Some(Arc::clone(present)),
                _ => None,
            },
        };
        let Some(hold) = self.engine.begin(start, now, waiter) else {
            self.abandon_hold()?;
            return Ok(None);
        };
        self.indeterminate_until = None;
        Ok(Some(Guard::new(Arc::clone(&self.engine), hold)))
    }

    /// Releases what an attempt without an answer may have taken. The next attempt is another acquisition.
    pub(super) fn give_back(&mut self) -> Result<(), DriverError> {
        match self.indeterminate_until {
            Some(_) => self.abandon_hold(),
            None => Ok(()),
        }
    }

    /// Releases a hold that is of no use, or that only a part of the store may have. The next attempt is another
    /// acquisition.
    fn abandon_hold(&mut self) -> Result<(), DriverError> {
        let mut job = CleanupJob::new(self.name.clone());
        job.hold = Some(self.target());
        job.indeterminate_until = self.indeterminate_until.take();
        self.engine.clean_up(job);
        self.who.hold = self.engine.random.hold()?;
        Ok(())
    }

    fn target(&self) -> Target {
        Target {
            owner: self.who.owner,
            hold: self.who.hold,
            lease: self.lease().length(),
        }
    }

    /// The store reported that the incarnation to join is over, so its guards are lost. Returns whether the
    /// join was only implied, in which case the owner may acquire afresh.
    pub(super) fn unjoin(&mut self) -> bool {
        let Some(token) = self.who.join else {
            return false;
        };
        self.engine.forgotten(&self.name, self.who.owner, token);
        if self.who.implied {
            self.who.join = None;
        }
        std::mem::take(&mut self.who.implied)
    }

    /// Gives up: the cleanup undoes whatever the store may have executed, and removes these tickets.
    pub(super) fn abandon(&mut self, tickets: Vec<Ticket>) {
        let call = self.call.take();
        let indeterminate_until = self.indeterminate_until.take();
        let open = call.is_some() || indeterminate_until.is_some();
        if open || !tickets.is_empty() {
            let mut job = CleanupJob::new(self.name.clone());
            job.hold = open.then_some(self.target());
            job.indeterminate_until = indeterminate_until;
            job.tickets = tickets;
            self.engine.clean_up_after(job, call);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.abandon(Vec::new());
    }
}
