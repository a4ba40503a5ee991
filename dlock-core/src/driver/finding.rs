//! Findings: what the settings of a store mean for its locks.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Locks may be lost when something else fails, such as a server that crashes or is replaced; or waiting
    /// takes longer than it need.
    Warning,
    /// While nothing else fails, a lock may be held twice, or not be kept or taken at all.
    Void,
}

/// One thing that was found out about a store.
///
/// # Examples
/// ```
/// use dlock_core::{Finding, Severity};
///
/// let finding = Finding::warning("fsync is off: a crash may lose every lock", "set it to on");
/// assert_eq!(finding.severity, Severity::Warning);
/// assert_eq!(finding.to_string(), "fsync is off: a crash may lose every lock: set it to on");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What is so, and what follows.
    pub what: String,
    /// What to do about it; empty when nothing is to be done.
    pub remedy: String,
}

impl Finding {
    /// Something that is as it should be.
    #[must_use]
    pub fn ok(what: impl Into<String>) -> Self {
        Self::new(Severity::Ok, what, "")
    }

    /// Something that voids locks when something else fails.
    #[must_use]
    pub fn warning(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Severity::Warning, what, remedy)
    }

    /// Something that voids locks while nothing fails.
    #[must_use]
    pub fn void(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Severity::Void, what, remedy)
    }

    fn new(severity: Severity, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            severity,
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// Judges how many members there are: an even number survives no more losses than one member less. `has`: such as
    /// `"the ensemble has 3 voting members"`.
    #[must_use]
    pub fn voters(has: String, voters: usize) -> Self {
        if voters % 2 == 1 {
            return Self::ok(has);
        }
        let served = format!(
            "{has}, and serves no locks once {} of them are lost, as with one member less",
            voters / 2
        );
        Self::warning(served, "add or remove one")
    }

    /// Compares the server's clock, as time since 1970, with that of this machine.
    ///
    /// No lease depends on the difference, but the first fencing tokens of a name begin at the server's time.
    #[must_use]
    pub fn clocks(server: Duration) -> Self {
        let here = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let apart = server.abs_diff(here);
        if apart < FAR_APART {
            return Self::ok("the clocks of the server and of this machine agree");
        }
        let direction = if server > here { "ahead of" } else { "behind" };
        Self::warning(
            format!(
                "the server's clock is {} s {direction} this machine's: if the server's is wrong and is set back while its data are lost, fencing \
                 tokens fall",
                apart.as_secs()
            ),
            "let both follow a time server",
        )
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, remedy, .. } = self;
        match remedy.as_str() {
            "" => f.write_str(what),
            _ => write!(f, "{what}: {remedy}"),
        }
    }
}

/// Logs what a driver found when it connected, unless it is in order. A store that cannot be asked can be
/// used all the same.
pub fn log_findings(backend: &str, found: &super::Result<Vec<Finding>>) {
    match found {
        Ok(found) => {
            let bad = found
                .iter()
                .filter(|finding| finding.severity > Severity::Ok);
            for finding in bad {
                tracing::warn!(target: "dlock::settings", "{backend}: {finding}");
            }
        }
        Err(error) => {
            tracing::debug!(target: "dlock::settings", %error, "{backend}: the settings cannot be read");
        }
    }
}

/// Farther apart than machines are that follow any time server.
const FAR_APART: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::{Finding, Severity};
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    #[test]
    fn clocks_that_are_far_apart_are_told_with_the_direction() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        assert_eq!(Finding::clocks(now).severity, Severity::Ok);
        let minute = Duration::from_secs(60);
        for (server, words) in [(now + minute, "ahead of"), (now - minute, "behind")] {
            let found = Finding::clocks(server);
            assert_eq!(found.severity, Severity::Warning);
            assert!(found.what.contains(words), "{found}");
        }
    }
}
