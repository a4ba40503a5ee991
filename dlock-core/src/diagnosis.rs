//! Diagnosis of a store: what its driver finds in the settings, and a trial of each step.

use crate::{
    admin::Admin,
    driver::{Acquire, Acquired, Finding, Release, Released, Renew, Renewed},
    engine::{Engine, call::ATTEMPT_LIMIT},
    error::{Effect, Error},
    lease::Lease,
    name::LockName,
};
use std::{sync::Arc, time::Duration};

impl Admin {
    /// Looks for what may void a lock in this store, by the settings that its driver knows of, as far as the
    /// user may read them, and by a trial. The trial takes, renews and releases a lock of a name that is used
    /// once, and compares the time that this takes with the client's lease.
    ///
    /// # Errors
    /// When the store did not answer the questions about its settings. A step of the trial that fails is a
    /// finding.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may hold the lock of the trial until the lease ends.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
    /// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:doctor")?)?;
    /// use dlock_core::Severity;
    ///
    /// let found = client.admin().diagnose().await?;
    /// assert!(found.iter().all(|finding| finding.severity == Severity::Ok));
    /// # Ok(()) }
    /// ```
    pub async fn diagnose(&self) -> Result<Vec<Finding>, Error> {
        let engine = &self.engine;
        let lease = engine.lease.checked()?.on(&engine.caps)?;
        // Before the driver is asked: it then knows the lease, and the server's time by a write.
        let tried = trial(engine, lease).await;
        let driver = Arc::clone(&engine.driver);
        let asked = async move { driver.diagnose().await };
        let answer = engine.ask(Effect::None, asked).await;
        let mut found = answer.map_err(|error| error.of(engine.caps.backend))?;
        found.push(match tried {
            Ok(longest) => judge(longest, lease.length()),
            Err((step, error)) => Finding::void(
                format!("{step} a lock fails: {error}"),
                "give the user the rights that `dlock schema` prints, and see whether the store is full or read-only",
            ),
        });
        Ok(found)
    }
}

/// Takes, renews and releases a lock, several times: the longest time that a step took.
async fn trial(engine: &Engine, lease: Lease) -> Result<Duration, (&'static str, Error)> {
    let mut longest = Duration::ZERO;
    for _ in 0..ROUNDS {
        let drawn = engine.random.owner_and_hold();
        let (owner, hold) = drawn.map_err(|error| ("taking", error.into()))?;
        let name = LockName::new(format!("dlock-doctor:{}", owner.fingerprint()));
        let name = name.map_err(|error| ("taking", error.into()))?;
        let mut since = engine.clock.now();
        let mut took = || {
            let (before, now) = (since, engine.clock.now());
            since = now;
            longest = longest.max(now.since(before));
        };

        let give_up = engine.clock.now() + ATTEMPT_LIMIT;
        let acquire = Acquire::new(name.clone(), owner, hold, lease, give_up);
        let driver = Arc::clone(&engine.driver);
        let acquired = async move { driver.acquire(&acquire).await };
        let acquired = engine.ask(Effect::Unknown, acquired).await;
        took();
        let acquired = match acquired {
            Ok(Acquired::Granted(_)) => Ok(()),
            Ok(_) => Err(Error::misuse("a new name is not free")),
            Err(error) => Err(error),
        };
        let release = Release::new(name.clone(), owner, hold);
        if acquired.is_ok() {
            let driver = Arc::clone(&engine.driver);
            let (lane, give_up) = (driver.lane(&name), engine.clock.now() + ATTEMPT_LIMIT);
            let entry = Renew::new(name, owner, hold, Some(lease.length()));
            let renewed = async move { driver.renew(lane, &[entry], give_up).await };
            let renewed = engine.ask(Effect::Unknown, renewed).await;
            took();
            let outcome = match renewed.map(|answers| answers.into_iter().next()) {
                Ok(Some(Ok(Renewed::Until { .. }))) => Ok(()),
                Ok(Some(Err(error))) => Err(error.into()),
                Ok(_) => Err(Error::misuse("a lock that was just taken is not there")),
                Err(error) => Err(error),
            };
            release_now(engine, release)
                .await
                .map_err(|error| ("releasing", error))?;
            took();
            outcome.map_err(|error| ("renewing", error))?;
        } else {
            // It may have been executed all the same.
            drop(release_now(engine, release).await);
        }
        acquired.map_err(|error| ("taking", error))?;
    }
    Ok(longest)
}

async fn release_now(engine: &Engine, release: Release) -> Result<(), Error> {
    let driver = Arc::clone(&engine.driver);
    let released = async move { driver.release(&release).await };
    match engine.ask(Effect::Unknown, released).await? {
        Released::NotHeld { .. } => Err(Error::misuse("a lock that was just taken is not there")),
        _ => Ok(()),
    }
}

/// Compares the longest time that a step took with what a renewal has.
fn judge(longest: Duration, lease: Duration) -> Finding {
    let limit = Lease::renew_within(lease);
    let words = format!(
        "a step took up to {longest:.1?}; a renewal of a lease of {lease:?} has {limit:.1?}"
    );
    let longer = longest
        .saturating_mul(MARGIN * 6)
        .as_secs()
        .max(lease.as_secs())
        + 1;
    let remedy = format!(
        "use a lease of {longer} s or more (dlock.lease in the URL, or --lease), or a store that is nearer"
    );
    if longest >= limit {
        Finding::void(words, remedy)
    } else if longest.saturating_mul(MARGIN) > limit {
        Finding::warning(words, remedy)
    } else {
        Finding::ok(words)
    }
}

/// Enough to see more than the first request, which may open connections.
const ROUNDS: usize = 3;
/// How many times as long a renewal should have as a step takes now: a store is slower under load.
const MARGIN: u32 = 4;

#[cfg(test)]
mod tests {
    use super::judge;
    use crate::driver::Severity;
    use std::time::Duration;

    #[test]
    fn a_step_is_judged_by_the_time_that_a_renewal_has() {
        let lease = Duration::from_secs(6);
        for (millis, severity) in [
            (1, Severity::Ok),
            (250, Severity::Ok),
            (300, Severity::Warning),
            (1_000, Severity::Void),
        ] {
            let found = judge(Duration::from_millis(millis), lease);
            assert_eq!(found.severity, severity, "{found}");
        }
    }
}
