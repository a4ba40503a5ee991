//! Configuration of a driver over a memory store.

use dlock_core::{Error, driver::Wake};
use std::{num::NonZeroU32, str::FromStr, time::Duration};

/// The settings of one driver, and the name of the store for URLs.
///
/// As a URL: `memory:NAME?dlock.wake=queue`. The name is used as it is, byte for byte.
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
    /// How waiters are woken (`dlock.wake`: `queue`, `notify` or `poll`). Default: [`Wake::Queue`].
    pub wake: Wake,
    /// How long a turn stays reserved: at least 1 ms, and at most a third of the lease for which the ticket waits. Not
    /// in URLs: for tests of waiters that are late. Default: 1 s.
    pub accept: Duration,
    /// The number of lanes over which names are spread. Not in URLs: for tests of what happens when a lane
    /// [stalls](crate::MemoryStore::stall_lane). Default: 1.
    pub lanes: NonZeroU32,
}

impl MemoryConfig {
    /// The defaults with another wake-up mode.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::driver::Wake;
    /// use dlock_memory::MemoryConfig;
    ///
    /// assert_eq!(MemoryConfig::new(Wake::Poll).wake, Wake::Poll);
    /// ```
    #[must_use]
    pub fn new(wake: Wake) -> Self {
        Self {
            name: String::new(),
            wake,
            accept: Duration::from_secs(1),
            lanes: NonZeroU32::MIN,
        }
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self::new(Wake::Queue)
    }
}

impl FromStr for MemoryConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self, Error> {
        let rest = url.strip_prefix("memory:");
        let rest = rest.ok_or_else(|| Error::misuse("a memory store's URL is memory:NAME"))?;
        let (name, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut config = Self::default();
        name.clone_into(&mut config.name);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            config.wake = match (key, value) {
                ("dlock.wake", "queue") => Wake::Queue,
                ("dlock.wake", "notify") => Wake::Notify,
                ("dlock.wake", "poll") => Wake::Poll,
                ("dlock.wake", _) => {
                    return Err(Error::misuse(format!(
                        "dlock.wake must be queue, notify or poll, not {value:?}"
                    )));
                }
                _ => {
                    return Err(Error::misuse(format!(
                        "unknown parameter {key:?}: a memory store knows dlock.wake"
                    )));
                }
            };
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::MemoryConfig;
    use dlock_core::{ErrorKind, driver::Wake};

    fn parse(url: &str) -> MemoryConfig {
        url.parse().unwrap()
    }

    #[test]
    fn a_url_says_what_it_says_and_the_rest_is_default() {
        assert_eq!(parse("memory:"), MemoryConfig::default());
        let config = parse("memory:a/b c?dlock.wake=notify");
        assert_eq!((config.name.as_str(), config.wake), ("a/b c", Wake::Notify));
        assert_eq!(parse("memory:x?dlock.wake=queue").wake, Wake::Queue);
    }

    #[test]
    fn anything_else_is_refused_with_what_would_be_right() {
        for (url, wanted) in [
            ("redis://x", "memory:NAME"),
            ("memory:x?dlock.weak=line", "dlock.wake"),
            ("memory:x?other=1", "dlock.wake"),
            ("memory:x?dlock.lanes=2", "dlock.wake"),
            ("memory:x?dlock.accept=1s", "dlock.wake"),
            ("memory:x?dlock.wake=never", "queue, notify or poll"),
            ("memory:x?dlock.wake", "queue, notify or poll"),
        ] {
            let error = url.parse::<MemoryConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().contains(wanted), "{url}: {error}");
        }
    }
}
