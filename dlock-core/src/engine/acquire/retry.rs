//! Store failures: how long an acquire goes on while the store fails or does not answer, and the error at
//! the end.

use crate::{
    clock::Instant,
    engine::call::ATTEMPT_LIMIT,
    error::{DriverError, Effect, Error, ErrorKind, RetryClass, TimeoutPhase, about},
};
use std::time::Duration;

/// The pause between failed attempts: doubling from the first value to the last, jittered 50–100 %.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

#[derive(Debug)]
pub(super) struct RetryState {
    /// How long the store may fail before the acquire fails.
    patience: Duration,
    /// The most time that one attempt may take.
    within: Duration,
    since: Option<Instant>,
    last: Option<DriverError>,
    /// How many attempts failed in a row.
    pub(super) attempts: u32,
    at_once: bool,
    unknown: bool,
}

impl RetryState {
    pub(super) fn new(patience: Duration, within: Duration) -> Self {
        Self {
            patience,
            within,
            since: None,
            last: None,
            attempts: 0,
            at_once: false,
            unknown: false,
        }
    }

    /// The store answered.
    pub(super) fn over(&mut self) {
        self.since = None;
        self.last = None;
        self.attempts = 0;
        self.at_once = false;
    }

    /// Takes over the time since which the store has failed all waiters of the queue. An answer to one of
    /// them ended what this one saw before.
    pub(super) fn inherit(&mut self, since: Instant) {
        self.since = Some(since);
    }

    /// A grant came after its lease was over, which counts as no answer.
    pub(super) fn too_late(&mut self, now: Instant) -> Result<(), Error> {
        self.at_once = self.attempts == 0;
        self.goes_on(now)
    }

    /// An attempt failed. Returns the error if going on is pointless.
    pub(super) fn failed(&mut self, error: DriverError, now: Instant) -> Result<(), Error> {
        self.unknown |= error.effect() == Effect::Unknown;
        if error.retry() == RetryClass::Never || error.kind() == ErrorKind::Overloaded {
            return Err(error.into());
        }
        self.at_once = error.retry() == RetryClass::Now && self.attempts == 0;
        self.last = Some(error);
        self.goes_on(now)
    }

    /// An attempt was not answered in time. Returns the error if going on is pointless.
    pub(super) fn unanswered(&mut self, now: Instant) -> Result<(), Error> {
        self.unknown = true;
        self.at_once = true; // it took its time already
        self.goes_on(now)
    }

    fn goes_on(&mut self, now: Instant) -> Result<(), Error> {
        self.attempts += 1;
        let since = *self.since.get_or_insert(now);
        if now.since(since) < self.patience {
            return Ok(());
        }
        let message = format!(
            "the store has failed for {} (attempts: {}): check that it runs, can be reached, and answers within {}",
            about(now.since(since)),
            self.attempts,
            self.in_time(self.within)
        );
        Err(self.named(ErrorKind::Unavailable, message))
    }

    /// The pause before the next attempt.
    pub(super) fn pause(&mut self, jitter: f64) -> Duration {
        if std::mem::take(&mut self.at_once) {
            return Duration::ZERO;
        }
        let doubled = PAUSE.0 * (1 << (self.attempts.clamp(1, 10) - 1));
        doubled.min(PAUSE.1).mul_f64(0.5 + jitter / 2.0)
    }

    /// The error when the caller's time is up because of the store.
    pub(super) fn timeout(&mut self, waited: Duration) -> Error {
        let phase = TimeoutPhase::Request;
        let message = format!(
            "not acquired within {}, and the store had not answered (attempts: {}): check that it runs, can be reached, and answers \
             within {}; a lock that it may still have granted is being given back",
            about(waited),
            self.attempts,
            self.in_time(waited)
        );
        self.named(ErrorKind::Timeout { phase }, message)
    }

    /// The time that an attempt has, and how to give it more.
    fn in_time(&self, waited: Duration) -> String {
        match self.within {
            within if waited < within => about(waited),
            within if within < ATTEMPT_LIMIT => {
                let within = about(within);
                format!("{within} (a third of the lease: a longer one leaves it more)")
            }
            within => about(within),
        }
    }

    fn named(&mut self, kind: ErrorKind, message: String) -> Error {
        let error = Error::new(kind, message)
            .with_retry(RetryClass::Later)
            .with_effect(if self.unknown {
                Effect::Unknown
            } else {
                Effect::None
            });
        match self.last.take() {
            Some(last) => error.after(last),
            None => error,
        }
    }
}
