//! Presence: one short renewed lease of a client, on which its long holds depend.
//!
//! A presence is a lock of its own, `~alive:ID`. The client acquires it before the first hold that depends on it. The
//! id is fresh for each presence and never used again. A hold that depends on it carries the id in its holder info, and
//! a waiter that finds the presence over breaks the hold instead of waiting for its long lease.
//!
//! # Why two owners never hold the lock
//! - A guard that depends on a presence is lost when the presence is: its deadline is the earlier of the two
//!   ([`Hold::deadline`]). The deadline of a presence is counted from before its request, less [`Lease::margin`], as for
//!   any lock. So when the store lets another owner take `~alive:ID`, the client has known the loss already.
//! - The waiter does not trust a reading. It *acquires* `~alive:ID`, and only a grant counts. The proof is the
//!   store's own mutual exclusion, and an answer that is missing, late or an error breaks nothing.
//! - A presence that is over stays over: no client acquires its id again, and a lease that ended is not renewed. So
//!   the break is right at any later time.
//! - The break names the token of the incarnation, so it changes nothing once another owner has the lock.
//! - All holds of that incarnation depend on that presence. Its owner was made for one acquisition, is sent with one
//!   presence only, and does not leave the client: no pass, no detached hold, no `with_owner`. A hold that re-enters
//!   inherits the presence.

use crate::{
    clock::{Clock, Instant},
    driver::{Acquire, Acquired, Capabilities, kit::in_runtime},
    engine::{
        Engine,
        call::Call,
        hold::{Hold, Presence, Start},
    },
    error::{DriverError, Error, ErrorKind, LossReason, RetryClass},
    lease::{Lease, MIN_LEASE},
    name::LockName,
    options::Terms,
    owner::{HoldId, Owner},
    token::FencingToken,
};
use parking_lot::Mutex;
use std::{panic::Location, sync::Arc, time::Duration};

/// What the name of a presence begins with. Users cannot lock such a name.
pub(crate) const RESERVED: &str = "~alive:";

/// A client's presences, one after the other.
#[derive(Debug)]
pub(crate) struct Presences {
    lease: Lease,
    current: Mutex<Option<Arc<Presence>>>,
    /// Locked while the next one is being acquired.
    acquiring: tokio::sync::Mutex<()>,
}

/// Why there is no presence.
pub(crate) enum Absent {
    Failed(DriverError),
    Unanswered,
}

impl Presences {
    pub(crate) fn new(length: Duration, caps: &Capabilities) -> Result<Self, Error> {
        if caps.session_bound {
            let message = "holds of this store end with the client's session, which is a presence already: leave the \
                 presence out, and set the length of the session";
            return Err(Error::new(ErrorKind::Unsupported, message).of(caps.backend));
        }
        let lease = Lease::renewed(length)
            .checked()
            .map_err(|error| Error::misuse(format!("presence: {error}")))?;
        let lease = lease.on(caps).map_err(|error| {
            Error::new(error.kind(), format!("presence: {error}")).of(caps.backend)
        })?;
        Ok(Self {
            lease,
            current: Mutex::default(),
            acquiring: tokio::sync::Mutex::default(),
        })
    }

    /// Whether an exclusive hold of these terms, by an owner made for it, depends on the presence.
    pub(crate) fn covers(&self, terms: &Terms) -> bool {
        let lease = terms.lease();
        lease.is_renewed() && terms.least().is_none() && lease.length() > self.lease.length()
    }

    fn live(&self, clock: &Clock) -> Option<Arc<Presence>> {
        self.current()
            .filter(|presence| presence.hold.is_live(clock))
    }

    fn current(&self) -> Option<Arc<Presence>> {
        self.current.lock().clone()
    }
}

impl Engine {
    /// The client's presence, acquired now if there is none.
    pub(crate) async fn presence(
        self: &Arc<Self>,
        presences: &Presences,
        give_up: Instant,
    ) -> Result<Arc<Presence>, Absent> {
        if let Some(presence) = presences.live(&self.clock) {
            return Ok(presence);
        }
        // In a task: a caller that is not polled any more must not keep the others from it.
        let engine = Arc::clone(self);
        let acquiring = in_runtime(&self.calls.handle, async move {
            match &engine.presences {
                Some(presences) => engine.appear_once(presences, give_up).await,
                None => Err(Absent::Unanswered),
            }
        });
        tokio::select! {
            biased;
            acquired = acquiring => acquired.unwrap_or_else(|| {
                let error = DriverError::unavailable("the client's runtime has ended");
                Err(Absent::Failed(error.with_retry(RetryClass::Later)))
            }),
            () = self.calls.deadlines.at(give_up) => Err(Absent::Unanswered),
        }
    }

    /// Acquires the client's presence, unless another task just did.
    async fn appear_once(
        self: &Arc<Self>,
        presences: &Presences,
        give_up: Instant,
    ) -> Result<Arc<Presence>, Absent> {
        let _acquiring = presences.acquiring.lock().await;
        if let Some(presence) = presences.live(&self.clock) {
            return Ok(presence);
        }
        if self.clock.now() >= give_up {
            return Err(Absent::Unanswered);
        }
        let presence = Arc::new(self.appear(presences.lease, give_up).await?);
        let mut current = presences.current.lock();
        Ok(Arc::clone(current.insert(presence)))
    }

    /// Acquires a presence of a fresh id. What an unanswered request may have taken ends with its short lease, and
    /// nothing depends on it.
    async fn appear(self: &Arc<Self>, lease: Lease, give_up: Instant) -> Result<Presence, Absent> {
        let (owner, id) = self.random.owner_and_hold().map_err(Absent::Failed)?;
        let name = name(id);
        let mut request = Acquire::new(name.clone(), owner, id, lease, give_up);
        request.info = Arc::clone(&self.info);
        let (driver, sent) = (Arc::clone(&self.driver), self.clock.now());
        let call = async move { driver.acquire(&request).await };
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
            name,
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
        self.watch(&hold, sent, None);
        let info = Arc::new(self.info.depending_on(id));
        Ok(Presence { hold, info })
    }

    /// Whether a hold of these terms may re-enter an incarnation that depends on this presence.
    pub(crate) fn may_depend_on(
        &self,
        presence: &Arc<Presence>,
        terms: &Terms,
    ) -> Result<(), Error> {
        let current = self.presences.as_ref().and_then(Presences::current);
        let is_own = current.is_some_and(|current| Arc::ptr_eq(&current, presence));
        let message = if !is_own && presence.hold.is_live(&self.clock) {
            "the lock depends on the presence of another client, and only that client may re-enter it"
        } else if terms.least().is_some() {
            "the lock depends on its client's presence, and cannot be re-entered with a minimum hold"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// A hold is lost: if it was a presence, the holds that depend on it are, too.
    pub(crate) fn lose_dependents(self: &Arc<Self>, lost: &Arc<Hold>) {
        if !lost.name.as_str().starts_with(RESERVED) {
            return;
        }
        let held = self.table().holds();
        for hold in held.iter().filter(|hold| hold.depends_on(lost)) {
            self.lose(hold, LossReason::Presence);
        }
    }

    /// Breaks the incarnation of a lock that depends on a presence, if that is proven to be over: takes its place for a
    /// moment. Returns after what time to look again; zero: the lock is broken, or its holder is another by now.
    ///
    /// # Cancel safety
    /// What was sent is executed or not; a break is right either way.
    pub(crate) async fn evict(
        &self,
        lock: &LockName,
        (token, id): (FencingToken, HoldId),
        give_up: Instant,
    ) -> Duration {
        let name = name(id);
        // Waiters for several locks of the dead client are one owner with one hold, and all of them are granted.
        let (owner, hold) = (
            Owner::from_seed(name.as_str()),
            HoldId::from_bits(!id.to_bits()),
        );
        let lease = Lease::fixed(MIN_LEASE.max(*self.caps.leases.start()));
        let mut request = Acquire::new(name, owner, hold, lease, give_up);
        request.info = Arc::clone(&self.info);
        let (driver, broken) = (Arc::clone(&self.driver), lock.clone());
        // In one call, which runs to its end. It is not released, because its lease is short.
        let call = async move {
            match driver.acquire(&request).await {
                Ok(Acquired::Granted(_)) => driver
                    .break_lock(&broken, Some(token))
                    .await
                    .ok()
                    .map(|_| Duration::ZERO),
                Ok(Acquired::Held(held)) => {
                    Some(held.poll_in.unwrap_or(Duration::MAX).max(SHORTEST))
                }
                Ok(Acquired::Gone) | Err(_) => None,
            }
        };
        let answer = Call::new(&self.calls, give_up, call).answer().await;
        if answer == Some(Some(Duration::ZERO)) {
            tracing::warn!(
                target: "dlock::presence", %lock, backend = self.caps.backend, %token, presence = %id,
                "the presence of the lock's holder is over: its lock was broken"
            );
        }
        answer.flatten().unwrap_or(self.poll_interval)
    }
}

fn name(id: HoldId) -> LockName {
    LockName::new(format!("{RESERVED}{id}")).expect("a short text without NUL is a legal name")
}

/// The shortest pause between two looks at a presence that is there.
const SHORTEST: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::{Capabilities, Duration, Error, ErrorKind, Presences};

    #[test]
    fn a_presence_that_a_store_cannot_give_is_named() {
        let mut caps = Capabilities::new("slow", "slow://host");
        caps.leases = Duration::from_secs(2)..=Duration::from_secs(60);
        let refused = |length| -> Error { Presences::new(length, &caps).unwrap_err() };
        let error = refused(Duration::from_secs(1));
        assert_eq!(
            (error.kind(), error.backend()),
            (ErrorKind::Unsupported, "slow")
        );
        assert_eq!(
            error.to_string(),
            "presence: the lease (1s) must be between 2s and 60s here"
        );
        let error = refused(Duration::from_millis(1));
        assert!(error.to_string().starts_with("presence: "), "{error}");
    }
}
