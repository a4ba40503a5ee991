//! Holds without a guard: detached, carried about as a value, and taken up again.

use crate::{
    call::Call,
    client::{Client, Inner},
    driver::{Renew, Renewed},
    error::{Error, ErrorKind},
    guard::Guard,
    hold::{Hold, Start},
    identity::HoldId,
    lease::Lease,
    pass::Pass,
    terms::Terms,
};
use std::{
    fmt,
    panic::Location,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

/// A hold that no guard stands for: see [`Guard::detach`]. A bearer secret, as a [`Pass`] is: whoever has it may keep or end this hold.
///
/// It lasts what its lease had left when it was detached. Nothing renews it, and dropping the value gives nothing back.
#[derive(Clone, Debug)]
#[must_use = "the lock stays held until its lease is over, unless this is attached again"]
pub struct Detached {
    pass: Pass,
    hold: HoldId,
    terms: Terms,
}

impl Detached {
    /// Puts one together from what was written down of it: the pass, the hold, and the lease it is to have when it is taken up again.
    pub fn new(pass: Pass, hold: HoldId, lease: Lease) -> Self {
        Self {
            pass,
            hold,
            terms: lease.into(),
        }
    }

    pub(crate) fn of(hold: &Hold, pass: Pass) -> Self {
        Self {
            pass,
            hold: hold.id,
            terms: hold.terms,
        }
    }

    /// The incarnation it belongs to.
    #[must_use]
    pub fn pass(&self) -> &Pass {
        &self.pass
    }

    /// The hold itself.
    #[must_use]
    pub fn hold(&self) -> HoldId {
        self.hold
    }

    /// The lease it has.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.terms.lease()
    }
}

/// A guard that could not be detached, and why.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct NotDetached {
    /// The guard, as it was.
    pub guard: Guard,
    /// Why.
    #[source]
    pub error: Error,
}

impl Client {
    /// Takes a detached hold up again: renews it first, so that the guard is worth something.
    ///
    /// # Errors
    /// `Gone` when it is over; `Misuse` when it is of another store; `Unavailable` when the store does not answer within a third of the
    /// lease or 5 s: the hold is untouched then, and may be attached later.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the hold detached, perhaps renewed once.
    #[track_caller]
    pub fn attach(
        &self,
        detached: &Detached,
    ) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let at = Location::caller();
        let inner = Arc::clone(&self.inner);
        let detached = detached.clone();
        async move {
            let name = detached.pass.name().clone();
            let attached = attach(&inner, detached, at).await;
            attached.map_err(|error| error.at(inner.caps.backend, &name))
        }
    }
}

async fn attach(
    inner: &Arc<Inner>,
    detached: Detached,
    at: &'static Location<'static>,
) -> Result<Guard, Error> {
    if detached.pass.store() != &*inner.store {
        return Err(Error::misuse(format!(
            "the hold is of the store {}, this one is {}",
            detached.pass.store(),
            inner.store
        )));
    }
    if inner.is_closing() {
        return Err(Inner::closed());
    }
    let pass = &detached.pass;
    let lease = detached.lease();
    let sent = inner.clock.now();
    let give_up = sent + (lease.length() / 3).min(ATTEMPT);
    match renewed(inner, &detached, give_up).await? {
        Renewed::Until { valid_for } => {
            let guard = inner.begin(Start {
                name: pass.name().clone(),
                owner: *pass.owner(),
                id: detached.hold,
                token: Some(pass.token()).filter(|token| token.0 > 0),
                terms: detached.terms,
                sent,
                valid_for,
                at,
                unsettled: None,
            });
            let _ = inner
                .detached
                .fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
            guard.ok_or_else(gone)
        }
        Renewed::NotHeld => Err(gone()),
    }
}

async fn renewed(
    inner: &Arc<Inner>,
    detached: &Detached,
    give_up: crate::Instant,
) -> Result<Renewed, Error> {
    let lease = detached.lease();
    let name = detached.pass.name().clone();
    let ask = lease.is_kept().then(|| lease.length());
    let entry = Renew::new(name.clone(), *detached.pass.owner(), detached.hold, ask);
    let lane = inner.driver.lane(&name);
    let driver = Arc::clone(&inner.driver);
    let mut call = Call::new(&inner.adrift, give_up, async move {
        driver.renew(lane, &[entry], give_up).await
    });
    let answers = call.answer().await.ok_or_else(unanswered)??;
    let answer = answers.into_iter().next().ok_or_else(unanswered)?;
    Ok(answer?)
}

/// The most an attempt may take.
const ATTEMPT: Duration = Duration::from_secs(5);

fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the detached hold is over: its lease ran out, or it was released or broken; acquire the lock afresh",
    )
}

fn unanswered() -> Error {
    let message = "the store did not answer in time; the hold is as it was, attach it again before its lease is over";
    Error::new(ErrorKind::Unavailable, message).with_retry(crate::Retry::Later)
}

impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hold {} of {:?}", self.hold, self.pass.name())
    }
}
