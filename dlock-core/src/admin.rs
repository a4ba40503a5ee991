//! Administration of locks without guards, for operators and the command line: inspect, list and break
//! locks, renew or release a hold that was written down.

use crate::{
    client::Client,
    driver::{Broken, Cursor, Holds, Page, Release, Released, Renew, Renewed, Snapshot},
    engine::{
        Engine,
        call::{ATTEMPT, Call},
    },
    error::{DriverError, Effect, Error, ErrorKind, RetryClass, TimeoutPhase},
    guard::ReleaseOutcome,
    lease::Lease,
    name::LockName,
    owner::{HoldId, Owner},
    token::FencingToken,
};
use std::{sync::Arc, time::Duration};

impl Client {
    /// Shows the holders of a name without changing anything.
    ///
    /// # Errors
    /// When the name is not legal, or the store did not answer.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<Snapshot, Error> {
        let name = LockName::new(name)?;
        let (driver, asked) = (Arc::clone(&self.engine.driver), name.clone());
        let answer = self
            .engine
            .ask(Effect::None, async move { driver.inspect(&asked).await });
        answer
            .await
            .map_err(|error| error.at(self.engine.caps.backend, &name))
    }

    /// Returns one page of the held and unavailable names that begin with `prefix`: up to about `limit` of
    /// them, perhaps none, and the cursor to go on with. `next: None` is the only end.
    ///
    /// # Errors
    /// When the store did not answer, or `from` came from another backend.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn list(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page, Error> {
        let driver = Arc::clone(&self.engine.driver);
        let (prefix, from) = (prefix.to_owned(), from.cloned());
        let listed = async move { driver.list(&prefix, from.as_ref(), limit).await };
        let answer = self.engine.ask(Effect::None, listed).await;
        answer.map_err(|error| error.of(self.engine.caps.backend))
    }

    /// Frees a name, whatever owner holds it. With `only`, it does so only if that is the name's token. The
    /// holders notice at their next renewal, and until then they run beside the next holder. Break only
    /// locks whose holder is known to be dead.
    ///
    /// # Errors
    /// When the name is not legal, or the store did not answer; the effect is then unknown.
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    pub async fn break_lock(
        &self,
        name: impl AsRef<str>,
        only: Option<FencingToken>,
    ) -> Result<Broken, Error> {
        let name = LockName::new(name)?;
        let (driver, asked) = (Arc::clone(&self.engine.driver), name.clone());
        let broken = async move { driver.break_lock(&asked, only).await };
        let answer = self.engine.ask(Effect::Unknown, broken).await;
        answer.map_err(|error| error.at(self.engine.caps.backend, &name))
    }

    /// Renews, once, a hold that has no guard. The hold then lasts `length` from now, and never less than
    /// before. Returns how long it is certain to last.
    ///
    /// # Errors
    /// `NotHeld` when the hold is no longer there. `Misuse` for an illegal name or length. Otherwise as
    /// [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    pub async fn renew(
        &self,
        name: impl AsRef<str>,
        owner: &Owner,
        hold: HoldId,
        length: Duration,
    ) -> Result<Duration, Error> {
        let name = LockName::new(name)?;
        let engine = &self.engine;
        let lease = Lease::renewed(length).checked()?.on(&engine.caps)?.length();
        let (driver, lane) = (Arc::clone(&engine.driver), engine.driver.lane(&name));
        let entry = Renew::new(name.clone(), *owner, hold, Some(lease));
        let sent = engine.clock.now();
        let give_up = sent + ATTEMPT;
        let asked = async move { driver.renew(lane, &[entry], give_up).await };
        let renewed = async {
            let answers = engine.ask(Effect::Unknown, asked).await?;
            let answer = answers.into_iter().next();
            match answer.ok_or_else(|| unanswered(Effect::Unknown))?? {
                Renewed::Until { valid_for } => {
                    let end = sent + valid_for.min(lease) - Lease::margin(lease);
                    Ok(end.since(engine.clock.now()))
                }
                Renewed::NotHeld => Err(not_held()),
            }
        };
        renewed
            .await
            .map_err(|error: Error| error.at(engine.caps.backend, &name))
    }

    /// Releases holds that have no guard: one, or all of an owner. Guards of that owner elsewhere notice at
    /// their next renewal.
    ///
    /// # Errors
    /// `NotHeld` when there is no such hold. `Misuse` for an illegal name. Otherwise as
    /// [`inspect`](Self::inspect), with unknown effect.
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    pub async fn release(
        &self,
        name: impl AsRef<str>,
        owner: &Owner,
        holds: Holds,
    ) -> Result<ReleaseOutcome, Error> {
        let name = LockName::new(name)?;
        let engine = &self.engine;
        let mut request = Release::new(name.clone(), *owner, HoldId::from_bits(0));
        request.holds = holds;
        let driver = Arc::clone(&engine.driver);
        let released = engine.ask(
            Effect::Unknown,
            async move { driver.release(&request).await },
        );
        let outcome = match released.await {
            Ok(Released::NotHeld { .. }) => Err(not_held()),
            Ok(released) => Ok(ReleaseOutcome::of(&released)),
            Err(error) => Err(error),
        };
        outcome.map_err(|error| error.at(engine.caps.backend, &name))
    }
}

impl Engine {
    /// Sends one request with a time limit. It is not repeated.
    async fn ask<T: Send + 'static>(
        &self,
        effect: Effect,
        request: impl Future<Output = Result<T, DriverError>> + Send + 'static,
    ) -> Result<T, Error> {
        self.check_runtime()?;
        let give_up = self.clock.now() + ATTEMPT;
        let answer = Call::new(&self.calls, give_up, request).answer().await;
        answer.map_or_else(|| Err(unanswered(effect)), |answer| Ok(answer?))
    }
}

fn unanswered(effect: Effect) -> Error {
    let phase = TimeoutPhase::Request;
    let message = format!(
        "the store did not answer within {ATTEMPT:?}: check that it runs and can be reached"
    );
    Error::new(ErrorKind::Timeout { phase }, message)
        .with_retry(RetryClass::Later)
        .with_effect(effect)
}

fn not_held() -> Error {
    Error::new(
        ErrorKind::NotHeld,
        "the hold does not exist: it was released, expired, broken or taken over, or it never existed",
    )
}
