//! Presence: one short renewed lease of a client, on which its long holds depend.
//!
//! The presence of a client is a lock of its own, `~alive:ID`, that the client acquires before the first hold that
//! depends on it. The id is fresh for each presence and never used again. A hold that depends on it carries the id in
//! its holder info. A waiter that finds the presence gone breaks the hold and need not wait for its long lease.
//!
//! # Why two owners never hold the lock
//! - A guard that depends on a presence is lost when the presence is: its deadline is the earlier of the two
//!   ([`Hold::deadline`]). The client's deadline for the presence is counted from before the request, less
//!   [`Lease::margin`], as for any lock. At the instant at which the store lets another owner take `~alive:ID`, the
//!   client has therefore known the loss already, however fast its clock runs within that margin.
//! - The waiter does not trust a reading. It first sees the presence gone. One poll interval later it *acquires*
//!   `~alive:ID`. Only a grant counts, so the proof is the store's own mutual exclusion. Clocks of different servers
//!   are never compared, and an answer that is missing, late or an error breaks nothing.
//! - A presence that is over stays over: no client acquires its id again, and a lease that ended is not renewed. The
//!   break may therefore be executed at any later time.
//! - The break names the token of the incarnation, so it changes nothing once another owner has the lock.
//! - All holds of that incarnation depend on that presence. Its owner was made for one acquisition, is only ever sent
//!   with one presence, and leaves the client in no way: no pass, no detached hold, no `with_owner`. A hold that
//!   re-enters inherits the presence.
//!
//! What is not covered keeps its lease as if there were no presence: shared holds and permits, owners from
//! `with_owner` and passes, holds with a minimum hold, fixed leases, which are meant to outlive their client, and leases
//! no longer than the presence.

use crate::{
    clock::Instant,
    driver::{Acquire, Acquired, Capabilities, DistributedLock, HolderInfo, Release},
    engine::{
        Engine,
        call::{ATTEMPT, Call},
        hold::{Hold, Start},
        watchdog::{Renewal, Watched},
    },
    error::{DriverError, Error, ErrorKind, LossReason, RetryClass},
    lease::{Lease, MIN_LEASE},
    name::LockName,
    options::Terms,
    owner::HoldId,
    token::FencingToken,
};
use std::{panic::Location, sync::Arc, time::Duration};
use tokio::sync::Mutex;

/// What the name of a presence begins with. Users cannot lock such a name.
pub(crate) const RESERVED: &str = "~alive:";

/// The setting of a client, and its present presence.
#[derive(Debug)]
pub(crate) struct Presence {
    lease: Lease,
    current: Mutex<Option<Arc<Present>>>,
}

/// A presence that was granted.
#[derive(Debug)]
pub(crate) struct Present {
    pub(crate) hold: Arc<Hold>,
    /// The holder info of the holds that depend on it.
    pub(crate) info: Arc<HolderInfo>,
}

impl Presence {
    pub(crate) fn new(length: Duration, caps: &Capabilities) -> Result<Self, Error> {
        if caps.session_bound {
            let message = "a presence is of no use here: holds end with the client's session, whose length is the recovery \
                 time already; leave the presence out and set the session's length";
            return Err(Error::new(ErrorKind::Unsupported, message).of(caps.backend));
        }
        let lease = Lease::renewed(length).checked().map_err(|_| {
            Error::misuse(format!(
                "the presence ({length:?}) must be a legal lease, so at least {MIN_LEASE:?}"
            ))
        })?;
        Ok(Self {
            lease: lease.on(caps)?,
            current: Mutex::default(),
        })
    }

    /// Whether a hold of these terms by an owner that is used for nothing else depends on the presence.
    pub(crate) fn covers(&self, terms: &Terms) -> bool {
        let lease = terms.lease();
        lease.is_renewed() && terms.least().is_none() && lease.length() > self.lease.length()
    }

    fn is_current(&self, present: &Arc<Present>) -> bool {
        // While it is locked, a new one is being acquired, so the last one is over.
        self.current
            .try_lock()
            .is_ok_and(|current| current.as_ref().is_some_and(|it| Arc::ptr_eq(it, present)))
    }
}

pub(crate) fn name(id: HoldId) -> LockName {
    LockName::new(format!("{RESERVED}{id}")).expect("a short text without NUL is a legal name")
}

/// Why there is no presence.
pub(crate) enum Absent {
    Failed(DriverError),
    Unanswered,
}

/// What a waiter learned of a presence.
pub(crate) enum Sighting {
    /// It is there, for this long if the store told.
    Present(Option<Duration>),
    Gone,
    /// No answer, or one that says nothing: never a reason to break.
    Unknown,
    /// It was gone for good, and the hold was broken or is over.
    Broken,
}

impl Engine {
    /// The client's presence, acquired now if there is none.
    pub(crate) async fn present(
        self: &Arc<Self>,
        presence: &Presence,
        give_up: Instant,
    ) -> Result<Arc<Present>, Absent> {
        let mut current = tokio::select! {
            biased;
            current = presence.current.lock() => current,
            () = self.calls.deadlines.at(give_up) => return Err(Absent::Unanswered),
        };
        if let Some(present) = &*current
            && present.hold.is_live(&self.clock)
        {
            return Ok(Arc::clone(present));
        }
        *current = None;
        let present = self.appear(presence.lease, give_up).await?;
        Ok(Arc::clone(current.insert(present)))
    }

    /// Acquires a presence of a fresh id. What an unanswered request may have taken ends with its short lease, and
    /// nothing depends on it.
    async fn appear(
        self: &Arc<Self>,
        lease: Lease,
        give_up: Instant,
    ) -> Result<Arc<Present>, Absent> {
        let random = self.random.owner_and_hold();
        let (owner, id) = random.map_err(|error| Absent::Failed(error.into()))?;
        let mut request = Acquire::new(name(id), owner, id, lease, give_up);
        request.info = Arc::clone(&self.note);
        let sent = self.clock.now();
        let (driver, asked) = (Arc::clone(&self.driver), request.clone());
        let call = async move { driver.acquire(&asked).await };
        let grant = match Call::new(&self.calls, give_up, call).answer().await {
            Some(Ok(Acquired::Granted(grant))) => grant,
            Some(Ok(_)) => {
                let message = "the store refused the client's presence, whose name is new";
                let error = DriverError::new(ErrorKind::Unavailable, message);
                return Err(Absent::Failed(error.with_retry(RetryClass::Later)));
            }
            Some(Err(error)) => return Err(Absent::Failed(error)),
            None => return Err(Absent::Unanswered),
        };
        let length = lease.length();
        let deadline = sent + grant.valid_for.min(length) - Lease::margin(length);
        let now = self.clock.now();
        if deadline <= now {
            return Err(Absent::Unanswered); // it came too late to be of use
        }
        let start = Start {
            name: request.name.clone(),
            owner,
            reusable: false,
            id,
            token: grant.token,
            terms: lease.into(),
            sent,
            valid_for: grant.valid_for,
            first: None,
            at: Location::caller(),
            indeterminate_until: None,
            ticket: None,
            class: self.classes.unnamed(),
            presence: None,
        };
        let hold = Arc::new(Hold::new(&start, now, deadline));
        // It is in no table: it is no lock of the user, and a shutdown leaves it to its lease.
        let key = self.watchdog.watch(Watched {
            what: Arc::clone(&hold),
            name: request.name.clone(),
            lane: self.driver.lane(&request.name),
            sent,
            deadline,
            renewal: Renewal {
                ask: Some(length),
                length,
            },
            end: None,
        });
        hold.watched_as(key);
        let info = Arc::new(self.note.depending_on(id));
        Ok(Arc::new(Present { hold, info }))
    }

    /// Whether a hold may re-enter an incarnation that depends on this presence.
    pub(crate) fn shares_presence(
        &self,
        present: &Arc<Present>,
        terms: &Terms,
    ) -> Result<(), Error> {
        let is_ours = (self.presence.as_ref()).is_some_and(|own| own.is_current(present));
        let message = if !is_ours && present.hold.is_live(&self.clock) {
            "the lock depends on the presence of another client, and only that client may re-enter it"
        } else if terms.least().is_some() {
            "the lock depends on its client's presence, and cannot be re-entered with a minimum hold"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// A presence is over: with it go the holds that depend on it.
    pub(crate) fn disappeared(self: &Arc<Self>, presence: &Arc<Hold>) {
        if !presence.name.as_str().starts_with(RESERVED) {
            return;
        }
        let held = self.table().holds();
        for hold in held.iter().filter(|hold| hold.depends_on(presence)) {
            self.lose(hold, LossReason::Presence);
        }
    }

    /// Reads whether a presence is there.
    pub(crate) async fn sight(&self, id: HoldId) -> Sighting {
        let (driver, name) = (Arc::clone(&self.driver), name(id));
        let give_up = self.clock.now() + ATTEMPT;
        let call = async move { driver.inspect(&name).await };
        match Call::new(&self.calls, give_up, call).answer().await {
            Some(Ok(shown)) if shown.damaged.is_some() => Sighting::Unknown,
            Some(Ok(shown)) => match shown.holders.first() {
                Some(holder) => Sighting::Present(holder.rest),
                None => Sighting::Gone,
            },
            Some(Err(_)) | None => Sighting::Unknown,
        }
    }

    /// Proves that a presence is gone, by taking its place for a moment, and breaks the incarnation that depends on
    /// it.
    pub(crate) async fn evict(&self, lock: &LockName, token: FencingToken, id: HoldId) -> Sighting {
        let Ok((owner, hold)) = self.random.owner_and_hold() else {
            return Sighting::Unknown;
        };
        let give_up = self.clock.now() + ATTEMPT;
        let lease = Lease::fixed(MIN_LEASE.max(*self.caps.leases.start()));
        let mut request = Acquire::new(name(id), owner, hold, lease, give_up);
        request.info = Arc::clone(&self.note);
        let (driver, broken) = (Arc::clone(&self.driver), lock.clone());
        let call = async move { prove_and_break(&*driver, &request, &broken, token).await };
        let sighting = Call::new(&self.calls, give_up, call).answer().await;
        let sighting = sighting.unwrap_or(Sighting::Unknown);
        if matches!(sighting, Sighting::Broken) {
            tracing::warn!(
                target: "dlock::presence", %lock, backend = self.caps.backend, %token, presence = %id,
                "the presence of the lock's holder is over: its lock was broken"
            );
        }
        sighting
    }
}

async fn prove_and_break(
    driver: &dyn DistributedLock,
    request: &Acquire,
    lock: &LockName,
    token: FencingToken,
) -> Sighting {
    match driver.acquire(request).await {
        Ok(Acquired::Granted(_)) => {}
        Ok(Acquired::Held(held)) => return Sighting::Present(held.poll_in),
        Ok(Acquired::Gone) | Err(_) => return Sighting::Unknown,
    }
    let broken = driver.break_lock(lock, Some(token)).await;
    // Without an answer its lease ends it.
    let release = Release::new(request.name.clone(), request.owner, request.hold);
    drop(driver.release(&release).await);
    broken.map_or(Sighting::Unknown, |_| Sighting::Broken)
}

/// A waiter's watch over the presence on which the present holder depends.
#[derive(Debug)]
pub(crate) struct PresenceWatch {
    token: FencingToken,
    id: HoldId,
    was_gone: bool,
    next: Instant,
}

impl PresenceWatch {
    pub(crate) fn begin(token: FencingToken, id: HoldId, now: Instant) -> Self {
        Self {
            token,
            id,
            was_gone: false,
            next: now,
        }
    }

    pub(crate) fn is_of(&self, token: FencingToken, id: HoldId) -> bool {
        (self.token, self.id) == (token, id)
    }

    /// Looks at the presence if it is time to. Returns when to look again; `None`: the lock is to be asked for.
    ///
    /// # Cancel safety
    /// A break that was sent is executed or not; it is right either way.
    pub(crate) async fn look(
        &mut self,
        engine: &Engine,
        lock: &LockName,
        interval: Duration,
    ) -> Option<Instant> {
        if engine.clock.now() < self.next {
            return Some(self.next);
        }
        let sighting = match self.was_gone {
            false => engine.sight(self.id).await,
            true => engine.evict(lock, self.token, self.id).await,
        };
        let pause = match sighting {
            Sighting::Present(rest) => rest.map_or(interval, |rest| rest.min(interval)),
            Sighting::Gone | Sighting::Unknown => engine.poll_interval,
            Sighting::Broken => return None,
        };
        self.was_gone = matches!(sighting, Sighting::Gone);
        self.next = engine.clock.now() + pause.max(SHORTEST);
        Some(self.next)
    }
}

/// The shortest pause between two looks.
const SHORTEST: Duration = Duration::from_millis(1);
