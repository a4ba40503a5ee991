//! Acquiring: one attempt, or the one waiting loop for every store.
//!
//! A wish knows who asks (a fresh owner, one that was given, the bearer of a pass, the scope it runs in) and for how long.

mod pending;
mod trouble;
mod wait;

use crate::{
    client::Inner,
    clock::Instant,
    error::{Error, ErrorKind, LossReason},
    flaw::Flaw,
    guard::Guard,
    identity::{FencingToken, Owner},
    name::LockName,
    scope,
    terms::Terms,
};
use pending::{Outcome, Pending};
use std::{panic::Location, sync::Arc, time::Duration};
use trouble::Trouble;
use wait::Wait;

/// What somebody wants.
#[derive(Debug)]
pub(crate) struct Wish {
    pub(crate) name: LockName,
    pub(crate) terms: Terms,
    pub(crate) owner: Option<Owner>,
    pub(crate) join: Option<FencingToken>,
    pub(crate) at: &'static Location<'static>,
}

/// How long he waits for it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    Try,
    Within(Duration),
    Forever,
}

/// Who asks, as the store will see it.
struct Identity {
    owner: Owner,
    join: Option<FencingToken>,
    /// Not made for this acquisition alone, so perhaps inside already.
    given: bool,
}

/// Acquires as wished; `None` only from [`Patience::Try`], when somebody else holds it.
pub(crate) async fn acquire(
    inner: Arc<Inner>,
    wish: Wish,
    patience: Patience,
) -> Result<Option<Guard>, Error> {
    let began = inner.clock.now();
    inner.admit()?;
    let identity = inner.identify(&wish);
    let pending = Pending::new(
        &inner,
        wish.name.clone(),
        identity.owner,
        identity.join,
        wish.terms,
        wish.at,
    );
    let end = match patience {
        Patience::Try => began + pending.attempt_within(),
        Patience::Within(limit) => began + limit,
        Patience::Forever => Instant::FAR,
    };
    let acquired = match patience {
        Patience::Try => once(&inner, pending, end).await,
        _ => Wait::new(pending, identity.given, wish.terms.lease(), end)
            .granted(&inner, &wish.name)
            .await
            .map(Some),
    };
    match &acquired {
        Ok(Some(guard)) => tracing::debug!(
            target: "dlock::acquire", lock = %wish.name, backend = inner.caps.backend,
            owner = %identity.owner, token = %guard.token(), took = ?inner.clock.now().since(began),
            "acquired"
        ),
        Ok(None) => tracing::debug!(
            target: "dlock::acquire", lock = %wish.name, backend = inner.caps.backend, "held by another"
        ),
        Err(error) => tracing::debug!(
            target: "dlock::acquire", lock = %wish.name, backend = inner.caps.backend, %error, "not acquired"
        ),
    }
    acquired.map_err(|error| inner.explain(error, &wish.name, &identity.owner))
}

/// One answer of the store, whatever it is; asked again only while there is none.
async fn once(
    inner: &Arc<Inner>,
    mut pending: Pending,
    end: Instant,
) -> Result<Option<Guard>, Error> {
    let mut trouble = Trouble::new(pending.attempt_within());
    loop {
        if inner.is_closing() {
            return Err(closing());
        }
        match pending.attempt(None, None, false, end).await {
            Outcome::Granted(grant, sent) => match pending.succeed(grant, sent) {
                Some(guard) => return Ok(Some(guard)),
                None => trouble.too_late(),
            },
            Outcome::Held(_) if inner.flawed(Flaw::ContentionIsError) => {
                return Err(Error::new(ErrorKind::Unavailable, "held"));
            }
            Outcome::Held(_) => return Ok(None),
            Outcome::Gone => return Err(gone()),
            Outcome::Failed(error) => trouble.failed(error, inner.clock.now())?,
            Outcome::Unanswered => trouble.unanswered(inner.clock.now())?,
        }
        let now = inner.clock.now();
        if now >= end {
            return Err(trouble.timeout());
        }
        let again = now + trouble.pause(inner.jitter());
        inner.clock.sleep_until(again.min(end)).await;
    }
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the incarnation that was to be entered again is over: whoever ran under it has lost the lock; \
         stop that work, or acquire the lock afresh",
    )
}

impl Inner {
    /// Whether a new acquire may begin.
    fn admit(&self) -> Result<(), Error> {
        if self.is_closing() {
            return Err(closing());
        }
        if self.janitor.is_full() {
            return Err(Error::new(
                ErrorKind::Overloaded,
                format!(
                    "{} acquisitions without a known end are being settled: the store has not answered for long; \
                     see that it does, then try again",
                    self.janitor.len()
                ),
            )
            .with_retry(crate::error::Retry::Later));
        }
        Ok(())
    }

    fn identify(&self, wish: &Wish) -> Identity {
        if self.flawed(Flaw::NoReentry) {
            return Identity {
                owner: self.fresh_owner(),
                join: None,
                given: false,
            };
        }
        if let (Some(owner), Some(_)) = (wish.owner, wish.join) {
            return Identity {
                owner,
                join: wish.join,
                given: true,
            };
        }
        if wish.owner.is_none()
            && let Some((owner, join)) = scope::entered(&self.store, &wish.name)
        {
            return Identity {
                owner,
                join,
                given: true,
            };
        }
        match wish.owner {
            Some(owner) => Identity {
                owner,
                join: self.live_token(&wish.name, &owner),
                given: true,
            },
            None => Identity {
                owner: self.fresh_owner(),
                join: None,
                given: false,
            },
        }
    }

    /// The incarnation that a guard of this owner and name in this client stands for.
    fn live_token(&self, name: &LockName, owner: &Owner) -> Option<FencingToken> {
        let mut book = self.book();
        let hold = book.find(name)?.of(owner)?;
        if hold.is_live(&self.clock) {
            hold.token
        } else {
            None
        }
    }

    /// Completes an error with what only the client knows, and draws its conclusions.
    fn explain(self: &Arc<Self>, error: Error, name: &LockName, owner: &Owner) -> Error {
        if error.kind() == ErrorKind::Gone {
            let stale = {
                let mut book = self.book();
                let page = book.find(name);
                page.and_then(|page| page.of(owner)).map(Arc::clone)
            };
            if let Some(hold) = stale {
                self.lose(&hold, LossReason::NotHeld);
            }
        }
        if self.flawed(Flaw::OwnerShown) {
            return Error::new(error.kind(), format!("{error} {}", owner.expose()));
        }
        error.at(self.caps.backend, name)
    }
}

pub(super) fn closing() -> Error {
    Error::new(
        ErrorKind::ShuttingDown,
        "the client is shutting down and takes no new locks; connect another client if this program goes on",
    )
}
