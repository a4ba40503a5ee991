//! Acquire: a single attempt, or the waiting loop, for every store.
//!
//! The options say the identity to acquire as (a fresh owner, a given one, the bearer of a pass, the current
//! scope).

mod attempt;
mod refusal;
mod retry;
mod wait_loop;

use crate::{
    clock::Instant,
    driver::{Held, Wake},
    engine::{Engine, lock_table::Tickets, presence::Presences, scope},
    error::{Error, ErrorKind, LossReason, RetryClass, micros},
    guard::Guard,
    name::LockName,
    options::{AcquireOptions, WaitPolicy},
    owner::{Mode, Owner},
    token::FencingToken,
};
use attempt::{Answer, Attempt, Dependence, Identity};
use refusal::{closing, gone};
use retry::RetryState;
use std::{sync::Arc, time::Duration};
use wait_loop::Wait;

/// Acquires the lock. `None` only from [`WaitPolicy::Try`], when another owner holds it.
// A block, because an async function stores its arguments twice.
#[expect(clippy::manual_async_fn)]
pub(crate) fn acquire(
    engine: Arc<Engine>,
    options: AcquireOptions,
    wait_policy: WaitPolicy,
    began: Instant,
) -> impl Future<Output = Result<Option<Guard>, Error>> + Send {
    async move {
        let _active = Engine::active(&*engine);
        engine.admit()?;
        let identity = engine.identify(&options)?;
        // Made in the arms, so that an arm takes no room for what only the others use: this future is moved
        // before its first poll.
        let attempt = || Attempt::new(&engine, &identity, &options);
        let acquired = match wait_policy {
            // A caller without any time still asks once.
            WaitPolicy::Try | WaitPolicy::Within(Duration::ZERO) => {
                let mut attempt = attempt();
                match try_until_answered(&engine, &mut attempt, began).await {
                    Ok(Tried::Acquired(guard)) => Ok(Some(guard)),
                    Ok(Tried::Refused(_)) if wait_policy == WaitPolicy::Try => Ok(None),
                    Ok(Tried::Refused(held)) => {
                        Err(engine.not_acquired(&options.name, Duration::ZERO, held.as_ref()))
                    }
                    Err(error) => Err(error),
                }
            }
            wait_policy => {
                let end = match wait_policy {
                    WaitPolicy::Within(limit) => began + limit,
                    _ => Instant::FAR,
                };
                let mut wait = Wait::new(attempt(), end);
                wait.until_granted(&engine).await.map(Some)
            }
        };
        match &acquired {
            Ok(Some(guard)) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend,
                owner = %identity.owner, token = guard.token().0,
                took_us = micros(engine.clock.now().since(began)), "acquired"
            ),
            Ok(None) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend, "held by another"
            ),
            Err(error) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend,
                kind = error.kind().as_str(), %error, "not acquired"
            ),
        }
        acquired.map_err(|error| error.at(engine.caps.backend, &options.name))
    }
}

/// The outcome of a try.
enum Tried {
    Acquired(Guard),
    /// Another owner holds the lock, and what the store told of it, if it was asked.
    Refused(Option<Held>),
}

/// Gets one answer of the store, whatever it is, and asks again only while there is none.
async fn try_until_answered(
    engine: &Arc<Engine>,
    attempt: &mut Attempt,
    began: Instant,
) -> Result<Tried, Error> {
    let end = began + attempt.attempt_limit();
    let within = attempt.attempt_limit();
    // Its end comes first: however the store failed, a caller without time to wait is told of a timeout.
    let mut retry = RetryState::new(Duration::MAX, within);
    // On a store without a queue, this attempt would overtake the waiters of this client.
    if !attempt.who.given && engine.caps.wake != Wake::Queue && engine.has_waiters(&attempt.name) {
        return Ok(Tried::Refused(None));
    }
    let (mut now, mut looked) = (began, false);
    loop {
        if engine.is_closing() {
            return Err(closing());
        }
        let answer = tokio::select! {
            biased;
            answer = attempt.send(Tickets::default(), false, now, end) => answer,
            () = engine.shutting_down_meanwhile() => return Err(closing()),
        };
        if let Answer::Granted(..) | Answer::Held(_) | Answer::Gone = answer {
            engine.store_answers(&attempt.name);
        }
        now = engine.clock.now();
        match answer {
            Answer::Granted(grant, sent) => match attempt.succeed(grant, sent, now, None)? {
                Some(guard) => return Ok(Tried::Acquired(guard)),
                None => retry.too_late(now)?,
            },
            Answer::Held(held) => match held.dependence().filter(|_| !looked) {
                Some(dependence) => {
                    looked = true;
                    let looks = Box::pin(engine.evict(&attempt.name, dependence, end));
                    if !looks.await.is_zero() {
                        return Ok(Tried::Refused(Some(held)));
                    }
                    now = engine.clock.now();
                    continue;
                }
                None => return Ok(Tried::Refused(Some(held))),
            },
            Answer::Gone if attempt.unjoin() => continue,
            Answer::Gone => return Err(gone()),
            Answer::Failed(error) => retry.failed(error, now)?,
            Answer::Unanswered => retry.unanswered(now)?,
        }
        let again = now + retry.pause(engine.random.jitter());
        if again >= end {
            // An attempt begun at its own give-up has no answer, only an unknown effect.
            return Err(retry.timeout(end.since(began)));
        }
        engine.clock.sleep_until(again).await;
        now = engine.clock.now();
    }
}

impl Engine {
    /// Whether a new acquire may begin.
    fn admit(&self) -> Result<(), Error> {
        self.check_runtime()?;
        if self.is_closing() {
            return Err(closing());
        }
        if self.cleanup.is_full() {
            return Err(Error::new(
                ErrorKind::Overloaded,
                format!(
                    "{} acquisitions with an unknown outcome are pending: the store has not answered for a long time; \
                     check that it does, then try again",
                    self.cleanup.len()
                ),
            )
            .with_retry(RetryClass::Later));
        }
        Ok(())
    }

    fn identify(&self, options: &AcquireOptions) -> Result<Identity, Error> {
        let enters = |owner, hold, join| Identity {
            owner,
            hold,
            join,
            given: true,
            implied: false,
            reusable: false,
            presence: Dependence::None,
        };
        if let Some(owner) = options.owner {
            let hold = self.random.hold()?;
            return Ok(match options.join {
                Some(token) => enters(owner, hold, Some(token)),
                None => Identity {
                    implied: true,
                    reusable: true,
                    ..enters(owner, hold, self.live_token(&options.name, owner))
                },
            });
        }
        if let Some(outer) = scope::entered(&self.store, &options.name) {
            // The incarnation may outlive the sharer's own hold.
            if outer.owner.mode() != Mode::Exclusive {
                return Err(Error::shared());
            }
            let presence = match &outer.presence {
                Some(presence) => {
                    self.may_depend_on(presence, &options.terms)?;
                    Dependence::On(Arc::clone(presence))
                }
                None => Dependence::None,
            };
            return Ok(Identity {
                reusable: outer.reusable,
                presence,
                ..enters(outer.owner, self.random.hold()?, Some(outer.token))
            });
        }
        let (owner, hold) = match options.mode {
            Mode::Exclusive => self.random.owner_and_hold()?,
            Mode::Shared => (Owner::SHARED, self.random.hold()?),
            Mode::Permit { of } => (Owner::permits(of), self.random.hold()?),
        };
        let depends = |presences: &Presences| presences.covers(&options.terms);
        Ok(Identity {
            given: false,
            presence: match options.mode {
                Mode::Exclusive if self.presences.as_ref().is_some_and(depends) => {
                    Dependence::OnCurrent
                }
                _ => Dependence::None,
            },
            ..enters(owner, hold, None)
        })
    }

    /// The incarnation of a live guard of this owner and name in this client.
    fn live_token(&self, name: &LockName, owner: Owner) -> Option<FencingToken> {
        let mut table = self.table();
        let mut holds = table.find(name)?.of(owner);
        holds
            .find(|hold| hold.is_live(&self.clock))
            .map(|hold| hold.token)
    }

    fn has_waiters(&self, name: &LockName) -> bool {
        self.table()
            .find(name)
            .is_some_and(|entry| entry.queue.len() > 0)
    }

    /// The store reported that an incarnation is over: its guards are lost.
    fn forgotten(self: &Arc<Self>, name: &LockName, owner: Owner, token: FencingToken) {
        let stale: Vec<_> = {
            let mut table = self.table();
            let holds = table
                .find(name)
                .into_iter()
                .flat_map(|entry| entry.of(owner));
            holds
                .filter(|hold| hold.token == token)
                .map(Arc::clone)
                .collect()
        };
        for hold in stale {
            self.lose(&hold, LossReason::NotHeld);
        }
    }
}
