//! Acquire: a single attempt, or the waiting loop, for every store.
//!
//! A wish has the identity to acquire as (a fresh owner, a given one, the bearer of a pass, the current
//! scope).

mod pending;
mod trouble;
mod wait;

use crate::{
    clock::Instant,
    driver::{Held, Wake},
    error::{Error, ErrorKind, LossReason, RetryClass, TimeoutPhase, about},
    flaw::Flaw,
    guard::Guard,
    identity::{FencingToken, HoldId, Owner},
    inner::Inner,
    name::LockName,
    scope,
    terms::Terms,
};
use pending::{Answer, Pending};
use std::{panic::Location, sync::Arc, time::Duration};
use trouble::Trouble;
use wait::Wait;

/// Acquire options: what a caller asks for.
#[derive(Debug)]
pub(crate) struct Wish {
    pub(crate) name: LockName,
    pub(crate) terms: Terms,
    pub(crate) owner: Option<Owner>,
    pub(crate) join: Option<FencingToken>,
    pub(crate) at: &'static Location<'static>,
}

/// Wait policy: how long to wait for the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    Try,
    Within(Duration),
    Forever,
}

/// The identity that the store sees.
struct Identity {
    owner: Owner,
    hold: HoldId,
    join: Option<FencingToken>,
    /// The owner was not made for this acquisition alone, so it may hold the lock already.
    given: bool,
    /// The core chose to join, because the owner has a guard in this client.
    implied: bool,
    /// The owner comes from `with_owner` and may own other locks, too.
    reusable: bool,
}

/// Acquires the lock. `None` only from [`Patience::Try`], when another owner holds it.
// A block, because an async function stores its arguments twice.
#[expect(clippy::manual_async_fn)]
pub(crate) fn acquire(
    inner: Arc<Inner>,
    wish: Wish,
    patience: Patience,
) -> impl Future<Output = Result<Option<Guard>, Error>> + Send {
    async move {
        let began = inner.clock.now();
        let _active = Inner::active(&*inner);
        inner.admit()?;
        let identity = inner.identify(&wish)?;
        let (name, at) = (wish.name.clone(), wish.at);
        // Made in the arms, so that an arm takes no room for what only the others use: this future is moved
        // before its first poll.
        let pending = || Pending::new(&inner, name, &identity, wish.terms, at);
        let acquired = match patience {
            Patience::Try => {
                let mut pending = pending();
                let tried = once(&inner, &mut pending, identity.given, began).await;
                tried.map(Result::ok)
            }
            // A caller without any time still asks once.
            Patience::Within(Duration::ZERO) => {
                let mut pending = pending();
                let tried = once(&inner, &mut pending, identity.given, began).await;
                tried.and_then(|guard| match guard {
                    Ok(guard) => Ok(Some(guard)),
                    Err(by) => Err(inner.not_acquired(&wish.name, Duration::ZERO, by.as_ref())),
                })
            }
            patience => {
                let end = match patience {
                    Patience::Within(limit) => began + limit,
                    _ => Instant::FAR,
                };
                let mut wait = Wait::new(pending(), identity.given, wish.terms.lease(), end);
                wait.granted(&inner, &wish.name).await.map(Some)
            }
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
}

/// Gets one answer of the store, whatever it is, and asks again only while there is none. If another owner
/// holds the lock, it returns what the store told about the holder.
async fn once(
    inner: &Arc<Inner>,
    pending: &mut Pending,
    given: bool,
    began: Instant,
) -> Result<Result<Guard, Option<Held>>, Error> {
    let end = began + pending.attempt_within();
    let within = pending.attempt_within();
    let mut trouble = Trouble::new(within, within);
    // On a store without a queue, this attempt would overtake the waiters of this client.
    if !given && inner.caps.wake != Wake::Line && inner.has_waiters(pending.name()) {
        return Ok(Err(None));
    }
    let mut now = began;
    loop {
        if inner.is_closing() {
            return Err(closing());
        }
        let answer = tokio::select! {
            biased;
            answer = pending.attempt((None, None), false, now, end) => answer,
            () = inner.shutting_down_meanwhile() => return Err(closing()),
        };
        if answer.is_one() {
            inner.store_answers(pending.name());
        }
        now = inner.clock.now();
        match answer {
            Answer::Granted(grant, sent) => {
                match pending.succeed(grant, (sent, now), None, |_| {})? {
                    Some(guard) => return Ok(Ok(guard)),
                    None => trouble.too_late(now)?,
                }
            }
            Answer::Held(_) if inner.flawed(Flaw::ContentionIsError) => {
                return Err(Error::new(ErrorKind::Unavailable, "held"));
            }
            Answer::Held(held) => return Ok(Err(Some(held))),
            Answer::Gone if pending.unjoin() => continue,
            Answer::Gone => return Err(gone()),
            Answer::Failed(error) => trouble.failed(error, now)?,
            Answer::Unanswered => trouble.unanswered(now)?,
        }
        let again = now + trouble.pause(inner.jitter());
        if again >= end {
            // An attempt begun at its own give-up has no answer, only an unknown effect.
            return Err(trouble.timeout(end.since(began)));
        }
        inner.clock.sleep_until(again).await;
        now = inner.clock.now();
    }
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the incarnation to re-enter is over, so the work that ran under it has lost the lock; \
         stop that work, or acquire the lock afresh",
    )
}

impl Inner {
    /// Whether a new acquire may begin.
    fn admit(&self) -> Result<(), Error> {
        self.check_runtime()?;
        if self.is_closing() {
            return Err(closing());
        }
        if self.janitor.is_full() {
            return Err(Error::new(
                ErrorKind::Overloaded,
                format!(
                    "{} acquisitions with an unknown outcome are pending: the store has not answered for a long time; \
                     check that it does, then try again",
                    self.janitor.len()
                ),
            )
            .with_retry(RetryClass::Later));
        }
        Ok(())
    }

    fn identify(&self, wish: &Wish) -> Result<Identity, Error> {
        let hold = self.hold_id()?;
        let fresh = || {
            Ok(Identity {
                owner: self.fresh_owner()?,
                hold,
                join: None,
                given: false,
                implied: false,
                reusable: false,
            })
        };
        if self.flawed(Flaw::NoReentry) {
            return fresh();
        }
        let scoped = || scope::entered(&self.store, &wish.name);
        let enters = |owner, join| Identity {
            owner,
            hold,
            join,
            given: true,
            implied: false,
            reusable: false,
        };
        Ok(match (wish.owner, wish.join) {
            (Some(owner), Some(token)) => enters(owner, Some(token)),
            (Some(owner), None) => Identity {
                implied: true,
                reusable: true,
                ..enters(owner, self.live_token(&wish.name, owner))
            },
            (None, _) => match scoped() {
                Some(outer) => Identity {
                    reusable: outer.reusable,
                    ..enters(outer.owner, outer.token)
                },
                None => fresh()?,
            },
        })
    }

    /// The incarnation of a live guard of this owner and name in this client.
    fn live_token(&self, name: &LockName, owner: Owner) -> Option<FencingToken> {
        let mut book = self.book();
        let mut holds = book.find(name)?.of(owner);
        holds.find(|hold| hold.is_live(&self.clock))?.token
    }

    fn has_waiters(&self, name: &LockName) -> bool {
        self.book()
            .find(name)
            .is_some_and(|page| page.queue.len() > 0)
    }

    /// The store reported that an incarnation is over: its guards are lost.
    fn forgotten(self: &Arc<Self>, name: &LockName, owner: Owner, token: FencingToken) {
        let stale: Vec<_> = {
            let mut book = self.book();
            let holds = book.find(name).into_iter().flat_map(|page| page.of(owner));
            holds
                .filter(|hold| hold.token == Some(token))
                .map(Arc::clone)
                .collect()
        };
        for hold in stale {
            self.lose(&hold, LossReason::NotHeld);
        }
    }

    /// The error for a wait that timed out, with what is known of the holder.
    fn not_acquired(&self, name: &LockName, waited: Duration, held: Option<&Held>) -> Error {
        let mut message = match waited {
            Duration::ZERO => "not acquired at once".to_owned(),
            _ => format!("not acquired within {}", about(waited)),
        };
        let own = (self.book().find(name)).and_then(|page| page.live(&self.clock));
        match held.map(|held| held.by.as_ref()) {
            Some(Some(by)) => {
                message.push_str(&format!("; held by owner #{}", by.owner));
                if !by.note.host.is_empty() {
                    message.push_str(&format!(" (process {} on {})", by.note.pid, by.note.host));
                }
            }
            Some(None) => message.push_str(
                "; the store names no holder: the lock may be reserved for another waiter, or unavailable for its minimum hold",
            ),
            None if own.is_none() => message.push_str("; other tasks of this client wait for it"),
            None => {}
        }
        if let Some(own) = own {
            message.push_str(&format!("; {}", wait::itself(&own, self.clock.now())));
        }
        let phase = TimeoutPhase::Wait;
        Error::new(ErrorKind::Timeout { phase }, message).with_retry(RetryClass::Later)
    }

    /// Adds to an error what only the client knows.
    fn explain(&self, error: Error, name: &LockName, owner: &Owner) -> Error {
        if self.flawed(Flaw::OwnerShown) {
            return Error::new(error.kind(), format!("{error} {}", owner.expose()))
                .with_retry(error.retry())
                .with_effect(error.effect());
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
