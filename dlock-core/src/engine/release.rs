//! Release of a guard: the one path by which a guard ends its hold.
//!
//! A release that is dropped, refused or not answered goes on in the [cleanup](super::cleanup).

use crate::{
    clock::Instant,
    driver::{Release, Released},
    engine::{
        Active, Engine,
        call::{ATTEMPT_LIMIT, Call},
        cleanup::{CleanupJob, PROMPT},
        hold::{GuardState, Hold},
        metrics::{HoldEnd, Op, ReleaseEnd},
    },
    error::{DriverError, Effect, Error, ErrorKind, LossReason, RetryClass, micros},
};
use std::{future::poll_fn, pin::pin, sync::Arc, time::Duration};

/// The outcome of a release.
///
/// # Examples
/// ```
/// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
/// use dlock_core::ReleaseOutcome;
///
/// match guard.release().await? {
///     ReleaseOutcome::StillHeld { holds } => println!("{holds} more holds of this owner"),
///     ReleaseOutcome::MinHold { rest } => println!("unavailable for another {rest:?}"),
///     _ => println!("free"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The name is free, or was handed to the next waiter.
    Released,
    /// Other holds of the same incarnation are left.
    StillHeld {
        /// How many. It is 1, too, when a lost answer leaves only the fact that some are left.
        holds: u32,
    },
    /// No hold is left, and the lock stays unavailable for its minimum hold.
    MinHold {
        /// For how long.
        rest: Duration,
    },
}

impl ReleaseOutcome {
    /// The outcome of a release that found its hold.
    pub(crate) fn of(released: &Released) -> Self {
        match released {
            Released::StillHeld { holds } => Self::StillHeld { holds: holds.get() },
            Released::MinHold { rest } => Self::MinHold { rest: *rest },
            Released::Freed | Released::NotHeld { .. } => Self::Released,
        }
    }
}

/// A release in flight. When it is dropped, the cleanup finishes it in the background.
pub(crate) struct Releasing {
    engine: Active<Arc<Engine>>,
    hold: Arc<Hold>,
    began: Instant,
    /// The state in which it found the hold.
    pub(crate) before: GuardState,
    open: bool,
    /// It was sent once at least.
    sent: bool,
    /// The hold was in the lock table, so this release ends it for its client.
    ends: bool,
    end: HoldEnd,
    counted_as: ReleaseEnd,
}

impl Releasing {
    /// Begins the release of a hold. Renewing stops first: whatever the outcome, nothing is renewed after it.
    pub(crate) fn begin(engine: &Arc<Engine>, hold: &Arc<Hold>) -> Self {
        let active = Engine::active(Arc::clone(engine));
        let began = engine.clock.now();
        let before = hold.releasing(began);
        let (end, counted_as) = match before {
            GuardState::Lost(reason) => (HoldEnd::Lost(reason), ReleaseEnd::Lost),
            GuardState::Held | GuardState::Uncertain => (HoldEnd::Released, ReleaseEnd::Dropped),
        };
        engine.stop_renewing(hold);
        let ends = engine.strike(hold);
        if let (true, GuardState::Lost(reason)) = (ends, before) {
            engine.tell_lost(hold, reason); // the watchdog will not, since this came first
        }
        Self {
            engine: active,
            hold: Arc::clone(hold),
            began,
            before,
            open: is_needed(hold, before, began),
            sent: false,
            ends,
            end,
            counted_as,
        }
    }

    /// Sends the release, and repeats it until it is answered or its time is over.
    pub(crate) async fn answered(&mut self) -> Result<ReleaseOutcome, Error> {
        let answer = self.answer().await;
        self.counted_as = match &answer {
            Ok(ReleaseOutcome::Released) => ReleaseEnd::Released,
            Ok(ReleaseOutcome::StillHeld { .. }) => ReleaseEnd::StillHeld,
            Ok(ReleaseOutcome::MinHold { .. }) => ReleaseEnd::MinHold,
            Err(error) if error.is_lost() => ReleaseEnd::Lost,
            Err(_) => ReleaseEnd::Indeterminate,
        };
        answer
    }

    async fn answer(&mut self) -> Result<ReleaseOutcome, Error> {
        let mut sent = self.began;
        let end = (sent + ATTEMPT_LIMIT).min(self.hold.deadline() + ATTEMPT_LIMIT / 5);
        let mut unanswered = false;
        let mut pause = Duration::from_millis(5);
        loop {
            let mut request = Release::new(self.hold.name.clone(), self.hold.owner, self.hold.id);
            request.min_hold = self.engine.rest(self.hold.min_hold_until());
            match self.send(request, sent, end).await {
                Some(Ok(released)) => return self.finish(released, unanswered, sent),
                Some(Err(error)) => {
                    unanswered |= error.effect() == Effect::Unknown;
                    if error.retry() == RetryClass::Never && !unanswered {
                        return Err(
                            Error::from(error).at(self.engine.caps.backend, &self.hold.name)
                        );
                    }
                    if error.retry() == RetryClass::Never || self.engine.clock.now() + pause >= end
                    {
                        return Err(self.unknown().after(error));
                    }
                }
                None => return Err(self.unknown()),
            }
            let clock = &self.engine.clock;
            clock.sleep_until(clock.now() + pause).await;
            pause *= 2;
            sent = self.engine.clock.now();
        }
    }

    /// Sends the release once. Its next local waiter need not wait for the answer.
    async fn send(
        &mut self,
        request: Release,
        sent: Instant,
        end: Instant,
    ) -> Option<Result<Released, DriverError>> {
        self.sent = true;
        let mut answer = pin!(self.engine.release_once(request, sent, end));
        let mut is_sent = false;
        poll_fn(|cx| {
            let answer = answer.as_mut().poll(cx);
            if answer.is_pending() && !is_sent {
                is_sent = true;
                self.engine.wake_behind(&self.hold);
            }
            answer
        })
        .await
    }

    fn finish(
        &mut self,
        released: Released,
        unanswered: bool,
        sent: Instant,
    ) -> Result<ReleaseOutcome, Error> {
        self.open = false;
        let found = unanswered || !matches!(released, Released::NotHeld { .. });
        if found {
            self.hold.released();
        } else {
            self.hold.not_found();
        }
        self.engine.wake(&self.hold.name);
        self.clean_up_late_copies(sent);
        let Engine { caps, .. } = &**self.engine;
        let outcome = match released {
            // An earlier copy released it and its answer was lost; `by` shows what is left.
            Released::NotHeld { by: Some(by) } if found && by.token == Some(self.hold.token) => {
                ReleaseOutcome::StillHeld { holds: 1 }
            }
            Released::NotHeld { .. } if found => {
                let kept = self.engine.rest(self.hold.min_hold_until());
                kept.map_or(ReleaseOutcome::Released, |rest| ReleaseOutcome::MinHold {
                    rest,
                })
            }
            Released::NotHeld { .. } => {
                // Its lease may have ended while the release was under way.
                let reason = match self.engine.clock.now() < self.hold.deadline() {
                    true => LossReason::NotHeld,
                    false => LossReason::Deadline,
                };
                self.end = HoldEnd::Lost(reason);
                tracing::warn!(
                    target: "dlock::lost", lock = %self.hold.name, backend = caps.backend,
                    owner = %self.hold.owner, reason = reason.as_str(), held_us = micros(self.held()),
                    "the lock was no longer held when it was released"
                );
                return Err(Error::lost(reason).at(caps.backend, &self.hold.name));
            }
            released => ReleaseOutcome::of(&released),
        };
        tracing::debug!(
            target: "dlock::release", lock = %self.hold.name, backend = caps.backend, owner = %self.hold.owner,
            ?outcome, held_us = micros(self.held()), "released"
        );
        Ok(outcome)
    }

    /// How long the lock was held until its release began.
    fn held(&self) -> Duration {
        self.began.since(self.hold.since)
    }

    /// An unanswered copy of the acquire may still run and revive the hold. A second release follows,
    /// unless this one was sent when the copy no longer could run, and was answered fast enough to prove
    /// that it ran then.
    fn clean_up_late_copies(&self, sent: Instant) {
        let Some(until) = self.hold.indeterminate_until else {
            return;
        };
        let now = self.engine.clock.now();
        if until > sent || now.since(sent) > PROMPT {
            let mut job = CleanupJob::of(&self.hold);
            (job.sent, job.indeterminate_until) = (true, Some(until.max(now)));
            self.engine.clean_up(job);
        }
    }

    fn unknown(&self) -> Error {
        Error::new(
            ErrorKind::Indeterminate,
            "the store did not confirm the release: it goes on in the background, and the lease ends the hold at the latest",
        )
        .with_effect(Effect::Unknown)
        .with_retry(RetryClass::Never)
        .at(self.engine.caps.backend, &self.hold.name)
    }
}

/// Whether a release is needed. A hold that another owner has taken over, or that ended with its session,
/// needs none, unless a late copy of its acquire may yet revive it, or has done so unnoticed. A hold that
/// shutdown left to its lease is not released.
fn is_needed(hold: &Hold, before: GuardState, now: Instant) -> bool {
    let lease = hold.lease().length();
    match before {
        GuardState::Held
        | GuardState::Uncertain
        | GuardState::Lost(LossReason::Deadline | LossReason::Presence) => true,
        GuardState::Lost(LossReason::NotHeld | LossReason::Session) => {
            let copy = hold.indeterminate_until;
            copy.is_some_and(|until| until + lease > now)
        }
        GuardState::Lost(LossReason::Shutdown) => false,
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if self.ends {
            self.hold.class.ended(self.end, self.held());
        }
        self.hold.class.release(self.counted_as);
        if matches!(self.counted_as, ReleaseEnd::Dropped) {
            tracing::debug!(
                target: "dlock::release", lock = %self.hold.name, backend = self.engine.caps.backend,
                owner = %self.hold.owner, held_us = micros(self.held()), "dropped: released in the background"
            );
        }
        if self.open {
            let mut job = CleanupJob::of(&self.hold);
            job.sent = self.sent;
            self.engine.clean_up(job);
        }
    }
}

impl Engine {
    /// The release of this hold is on its way. Where the store keeps the order of requests, the next local waiter
    /// attempts at once, so that one round trip hands the lock over. The store still decides who is first: the
    /// attempt names the waiter's ticket, and is refused while another client's is ahead.
    fn wake_behind(&self, hold: &Hold) {
        if self.caps.ordered
            && hold.min_hold_until().is_none()
            && let Some(entry) = self.table().find(&hold.name)
            && entry.holds.is_empty()
        {
            entry.queue.wake_behind_release();
        }
    }

    /// The rest of a minimum hold.
    pub(crate) fn rest(&self, min_hold_until: Option<Instant>) -> Option<Duration> {
        min_hold_until
            .map(|until| until.since(self.clock.now()))
            .filter(|rest| !rest.is_zero())
    }

    /// Sends one release, now; `None`: it was not answered by `give_up`.
    pub(crate) async fn release_once(
        self: &Arc<Self>,
        request: Release,
        sent: Instant,
        give_up: Instant,
    ) -> Option<Result<Released, DriverError>> {
        let driver = Arc::clone(&self.driver);
        let mut call = Call::new(&self.calls, give_up, async move {
            driver.release(&request).await
        });
        let answer = call.answer().await;
        let store = &self.classes.store;
        store.request_ends(Op::Release, answer.as_ref(), sent, &self.clock);
        answer
    }
}
