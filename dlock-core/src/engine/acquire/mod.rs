//! Acquire: a single attempt, or the waiting loop, for every store.
//!
//! The options say the identity to acquire as (a fresh owner, a given one, the bearer of a pass, the current
//! scope).

mod attempt;
mod retry;
mod wait_loop;

use crate::{
    clock::Instant,
    driver::{Held, Wake},
    engine::{Engine, lock_table::Tickets, scope},
    error::{Error, ErrorKind, LossReason, RetryClass, TimeoutPhase, about},
    guard::Guard,
    name::LockName,
    options::{AcquireOptions, WaitPolicy},
    owner::{HoldId, Owner},
    token::FencingToken,
};
use attempt::{Answer, Attempt};
use retry::RetryState;
use std::{sync::Arc, time::Duration};
use wait_loop::Wait;

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

/// Acquires the lock. `None` only from [`WaitPolicy::Try`], when another owner holds it.
// A block, because an async function stores its arguments twice.
#[expect(clippy::manual_async_fn)]
pub(crate) fn acquire(
    engine: Arc<Engine>,
    options: AcquireOptions,
    wait_policy: WaitPolicy,
) -> impl Future<Output = Result<Option<Guard>, Error>> + Send {
    async move {
        let began = engine.clock.now();
        let _active = Engine::active(&*engine);
        engine.admit()?;
        let identity = engine.identify(&options)?;
        let (name, at) = (options.name.clone(), options.at);
        // Made in the arms, so that an arm takes no room for what only the others use: this future is moved
        // before its first poll.
        let attempt = || Attempt::new(&engine, name, &identity, options.terms, at);
        let acquired = match wait_policy {
            WaitPolicy::Try => {
                let mut attempt = attempt();
                let tried = once(&engine, &mut attempt, identity.given, began).await;
                tried.map(Result::ok)
            }
            // A caller without any time still asks once.
            WaitPolicy::Within(Duration::ZERO) => {
                let mut attempt = attempt();
                let tried = once(&engine, &mut attempt, identity.given, began).await;
                tried.and_then(|guard| match guard {
                    Ok(guard) => Ok(Some(guard)),
                    Err(by) => Err(engine.not_acquired(&options.name, Duration::ZERO, by.as_ref())),
                })
            }
            wait_policy => {
                let end = match wait_policy {
                    WaitPolicy::Within(limit) => began + limit,
                    _ => Instant::FAR,
                };
                let mut wait = Wait::new(attempt(), identity.given, options.terms.lease(), end);
                wait.granted(&engine, &options.name).await.map(Some)
            }
        };
        match &acquired {
            Ok(Some(guard)) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend,
                owner = %identity.owner, token = %guard.token(), took = ?engine.clock.now().since(began),
                "acquired"
            ),
            Ok(None) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend, "held by another"
            ),
            Err(error) => tracing::debug!(
                target: "dlock::acquire", lock = %options.name, backend = engine.caps.backend, %error, "not acquired"
            ),
        }
        acquired.map_err(|error| error.at(engine.caps.backend, &options.name))
    }
}

/// Gets one answer of the store, whatever it is, and asks again only while there is none. If another owner
/// holds the lock, it returns what the store told about the holder.
async fn once(
    engine: &Arc<Engine>,
    attempt: &mut Attempt,
    given: bool,
    began: Instant,
) -> Result<Result<Guard, Option<Held>>, Error> {
    let end = began + attempt.attempt_limit();
    let within = attempt.attempt_limit();
    // Its end comes first: however the store failed, a caller without time to wait is told of a timeout.
    let mut retry = RetryState::new(Duration::MAX, within);
    // On a store without a queue, this attempt would overtake the waiters of this client.
    if !given && engine.caps.wake != Wake::Queue && engine.has_waiters(attempt.name()) {
        return Ok(Err(None));
    }
    let mut now = began;
    loop {
        if engine.is_closing() {
            return Err(closing());
        }
        let answer = tokio::select! {
            biased;
            answer = attempt.send(Tickets::default(), false, now, end) => answer,
            () = engine.shutting_down_meanwhile() => return Err(closing()),
        };
        if answer.is_one() {
            engine.store_answers(attempt.name());
        }
        now = engine.clock.now();
        match answer {
            Answer::Granted(grant, sent) => match attempt.succeed(grant, sent, now, None)? {
                Some(guard) => return Ok(Ok(guard)),
                None => retry.too_late(now)?,
            },
            Answer::Held(held) => return Ok(Err(Some(held))),
            Answer::Gone if attempt.unjoin() => continue,
            Answer::Gone => return Err(gone()),
            Answer::Failed(error) => retry.failed(error, now)?,
            Answer::Unanswered => retry.unanswered(now)?,
        }
        let again = now + retry.pause(engine.jitter());
        if again >= end {
            // An attempt begun at its own give-up has no answer, only an unknown effect.
            return Err(retry.timeout(end.since(began)));
        }
        engine.clock.sleep_until(again).await;
        now = engine.clock.now();
    }
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the incarnation to re-enter is over, so the work that ran under it has lost the lock; \
         stop that work, or acquire the lock afresh",
    )
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
        let hold = self.hold_id()?;
        let enters = |owner, join| Identity {
            owner,
            hold,
            join,
            given: true,
            implied: false,
            reusable: false,
        };
        if let Some(owner) = options.owner {
            return Ok(match options.join {
                Some(token) => enters(owner, Some(token)),
                None => Identity {
                    implied: true,
                    reusable: true,
                    ..enters(owner, self.live_token(&options.name, owner))
                },
            });
        }
        Ok(match scope::entered(&self.store, &options.name) {
            Some(outer) => Identity {
                reusable: outer.reusable,
                ..enters(outer.owner, Some(outer.token))
            },
            None => Identity {
                given: false,
                ..enters(self.fresh_owner()?, None)
            },
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

    /// The error for a wait that timed out, with what is known of the holder.
    fn not_acquired(&self, name: &LockName, waited: Duration, held: Option<&Held>) -> Error {
        let mut message = match waited {
            Duration::ZERO => "not acquired at once".to_owned(),
            _ => format!("not acquired within {}", about(waited)),
        };
        let own = (self.table().find(name)).and_then(|entry| entry.live(&self.clock));
        match held.map(|held| held.by.as_ref()) {
            Some(Some(by)) => {
                message.push_str(&format!("; held by owner #{}", by.owner));
                if !by.info.host.is_empty() {
                    message.push_str(&format!(" (process {} on {})", by.info.pid, by.info.host));
                }
            }
            Some(None) => message.push_str(
                "; the store names no holder: the lock may be reserved for another waiter, or unavailable for its minimum hold",
            ),
            None if own.is_none() => message.push_str("; other tasks of this client wait for it"),
            None => {}
        }
        match held.and_then(|held| held.ahead) {
            None | Some(0) => {}
            Some(1) => message.push_str("; 1 waiter stands before this one"),
            Some(ahead) => message.push_str(&format!("; {ahead} waiters stand before this one")),
        }
        if let Some(own) = own {
            message.push_str(&format!(
                "; {}",
                wait_loop::describe_own_holder(&own, self.clock.now())
            ));
        }
        let phase = TimeoutPhase::Wait;
        Error::new(ErrorKind::Timeout { phase }, message).with_retry(RetryClass::Later)
    }
}

pub(super) fn closing() -> Error {
    Error::new(
        ErrorKind::ShuttingDown,
        "the client is shutting down and takes no new locks; connect another client if this program goes on",
    )
}
