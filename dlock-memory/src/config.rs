//! Configuration of a driver over a memory store.

use crate::error::MemoryError;
use dlock_core::{Error, Lease, driver::Wake};
use std::{num::NonZeroU32, str::FromStr, time::Duration};

/// The settings of one driver, and the name of the store for URLs.
///
/// As a URL: `memory:NAME?dlock.wake=line&dlock.accept=1s&dlock.lanes=1`. The name is used as it is, byte
/// for byte.
///
/// ```
/// use dlock_core::driver::Wake;
/// use dlock_memory::MemoryConfig;
/// let config: MemoryConfig = "memory:orders?dlock.wake=poll".parse()?;
/// assert_eq!((config.name.as_str(), config.wake), ("orders", Wake::Poll));
/// # Ok::<(), dlock_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// Which of the process's stores [`MemoryDriver::from_url`](crate::MemoryDriver::from_url) connects to.
    /// Default: the empty name.
    pub name: String,
    /// How waiters are woken (`dlock.wake`: `line`, `hints` or `poll`). Default: [`Wake::Line`].
    pub wake: Wake,
    /// The accept lease (`dlock.accept`, as `250ms` or `1s`): how long a turn stays reserved, at least 1
    /// ms, and at most a third of the lease for which the ticket waits. Default: 1 s.
    pub accept: Duration,
    /// The number of lanes over which names are spread (`dlock.lanes`). Default: 1.
    pub lanes: NonZeroU32,
}

impl MemoryConfig {
    /// The defaults with another wake-up mode.
    #[must_use]
    pub fn new(wake: Wake) -> Self {
        Self {
            wake,
            ..Self::default()
        }
    }

    /// The times of a ticket that waits for such a lease.
    pub(crate) fn terms(&self, lease: Lease) -> Terms {
        let third = lease.length() / 3;
        let interval = third.min(LONGEST_LOOK);
        Terms {
            wake: self.wake,
            accept: self.accept.max(SHORTEST_ACCEPT).min(third),
            interval,
            entry: interval * 3,
        }
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            wake: Wake::Line,
            accept: Duration::from_secs(1),
            lanes: NonZeroU32::MIN,
        }
    }
}

impl FromStr for MemoryConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self, Error> {
        let Some(rest) = url.strip_prefix("memory:") else {
            return Err(refuse("a memory store's URL is memory:NAME"));
        };
        let (name, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut config = Self {
            name: name.to_owned(),
            ..Self::default()
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            config.set(pair)?;
        }
        Ok(config)
    }
}

impl MemoryConfig {
    fn set(&mut self, pair: &str) -> Result<(), Error> {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let wrong = |wanted: &str| refuse(format!("{key} must be {wanted}, not {value:?}"));
        match key {
            "dlock.wake" => self.wake = wake(value).ok_or_else(|| wrong("line, hints or poll"))?,
            "dlock.accept" => {
                self.accept =
                    span(value).ok_or_else(|| wrong("a time of 1ms or more, as 250ms or 1s"))?;
            }
            "dlock.lanes" => self.lanes = value.parse().map_err(|_| wrong("a number from 1 on"))?,
            _ => {
                return Err(refuse(format!(
                    "unknown parameter {key:?}: a memory store knows dlock.wake, dlock.accept and dlock.lanes"
                )));
            }
        }
        Ok(())
    }
}

fn wake(value: &str) -> Option<Wake> {
    Some(match value {
        "line" => Wake::Line,
        "hints" => Wake::Hints,
        "poll" => Wake::Poll,
        _ => return None,
    })
}

fn span(value: &str) -> Option<Duration> {
    let span = match value.strip_suffix("ms") {
        Some(number) => Duration::from_millis(number.parse().ok()?),
        None => Duration::from_secs(value.strip_suffix('s')?.parse().ok()?),
    };
    (span >= SHORTEST_ACCEPT).then_some(span)
}

fn refuse(message: impl Into<String>) -> Error {
    MemoryError::Url(message.into()).into()
}

/// The times of one ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) wake: Wake,
    /// How long its turn stays reserved.
    pub(crate) accept: Duration,
    /// Its poll interval.
    pub(crate) interval: Duration,
    /// How long its entry counts after a poll: three polls, so one may be lost and another late.
    pub(crate) entry: Duration,
}

/// The longest poll interval of a waiter of a long lease: a flushed store costs it no more. Makes the entry
/// deadline 6 s at most.
pub(crate) const LONGEST_LOOK: Duration = Duration::from_secs(2);

/// With a shorter time no turn could be taken.
const SHORTEST_ACCEPT: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::MemoryConfig;
    use dlock_core::{Lease, driver::Wake};
    use std::{num::NonZeroU32, time::Duration};

    fn parse(url: &str) -> MemoryConfig {
        url.parse().unwrap()
    }

    #[test]
    fn a_url_says_what_it_says_and_the_rest_is_default() {
        assert_eq!(parse("memory:"), MemoryConfig::default());
        let config = parse("memory:a/b c?dlock.wake=hints&dlock.accept=250ms&dlock.lanes=3");
        assert_eq!((config.name.as_str(), config.wake), ("a/b c", Wake::Hints));
        assert_eq!(config.accept, Duration::from_millis(250));
        assert_eq!(config.lanes, NonZeroU32::new(3).unwrap());
        assert_eq!(parse("memory:x?dlock.wake=line").wake, Wake::Line);
        assert_eq!(
            parse("memory:x?dlock.accept=2s").accept,
            Duration::from_secs(2)
        );
    }

    #[test]
    fn anything_else_is_refused_with_what_would_be_right() {
        for (url, wanted) in [
            ("redis://x", "memory:NAME"),
            (
                "memory:x?dlock.weak=line",
                "dlock.wake, dlock.accept and dlock.lanes",
            ),
            (
                "memory:x?other=1",
                "dlock.wake, dlock.accept and dlock.lanes",
            ),
            ("memory:x?dlock.wake=never", "line, hints or poll"),
            ("memory:x?dlock.wake", "line, hints or poll"),
            ("memory:x?dlock.accept=0ms", "1ms or more"),
            ("memory:x?dlock.accept=5", "1ms or more"),
            ("memory:x?dlock.lanes=0", "from 1 on"),
        ] {
            let error = url.parse::<MemoryConfig>().unwrap_err().to_string();
            assert!(error.contains(wanted), "{url}: {error}");
        }
    }

    #[test]
    fn terms_follow_the_lease_up_to_their_bounds() {
        let of = |millis| {
            let lease = Lease::renewed(Duration::from_millis(millis));
            let terms = MemoryConfig::default().terms(lease);
            [terms.accept, terms.interval, terms.entry].map(|span| span.as_millis())
        };
        assert_eq!(of(300), [100, 100, 300]);
        assert_eq!(of(4_500), [1_000, 1_500, 4_500]);
        assert_eq!(of(3_600_000), [1_000, 2_000, 6_000]);
    }
}
