//! Configuration of the SQLite driver: the file, and how waiters are woken.

use dlock_core::driver::{DriverError, Result, kit::unknown_setting};
use percent_encoding::percent_decode_str;
use sqlx::SqlitePool;
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};
use url::form_urlencoded;

/// Which file the locks are in and how dlock uses it.
///
/// Read from a URL as the native client's: `sqlite:PATH` or `sqlite://PATH`, percent-encoded where needed.
///
/// ```
/// use dlock_sqlite::SqliteConfig;
/// let config: SqliteConfig = "sqlite:/run/billing/locks.db".parse()?;
/// assert_eq!(config.path(), "/run/billing/locks.db");
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SqliteConfig {
    pub(crate) path: PathBuf,
    pub(crate) create: bool,
    pub(crate) wake: WakeBy,
}

impl SqliteConfig {
    /// A file, made with mode 0600 if it is missing, in a directory that is made with mode 0700 if it is
    /// missing.
    ///
    /// # Examples
    /// ```
    /// use dlock_sqlite::SqliteConfig;
    ///
    /// let config = SqliteConfig::new("/run/billing/locks.db");
    /// assert_eq!(config.path(), "/run/billing/locks.db");
    /// ```
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            create: true,
            wake: WakeBy::Notify,
        }
    }

    /// Where the file is.
    ///
    /// # Examples
    /// ```
    /// use dlock_sqlite::SqliteConfig;
    ///
    /// let config: SqliteConfig = "sqlite:/run/billing/locks.db?mode=rw&dlock.wake=poll".parse()?;
    /// assert_eq!(config.path(), "/run/billing/locks.db");
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets whether the file is made if it is missing. Default `true`. URL: `mode=rwc`, or `mode=rw` for `false`.
    ///
    /// # Examples
    /// ```
    /// use dlock_sqlite::SqliteConfig;
    ///
    /// let config: SqliteConfig = "sqlite:/run/billing/locks.db?mode=rw&dlock.wake=poll".parse()?;
    /// let config = config.with_create(true);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Sets how waiters are woken. Default [`WakeBy::Notify`]. URL: `dlock.wake=notify` or `dlock.wake=poll`.
    ///
    /// # Examples
    /// ```
    /// use dlock_sqlite::SqliteConfig;
    ///
    /// let config: SqliteConfig = "sqlite:/run/billing/locks.db?mode=rw&dlock.wake=poll".parse()?;
    /// let config = config.with_wake(dlock_sqlite::WakeBy::Notify);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_wake(mut self, wake: WakeBy) -> Self {
        self.wake = wake;
        self
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match (key, value) {
            ("dlock.wake", _) => self.wake = value.parse()?,
            ("mode", "rwc") => self.create = true,
            ("mode", "rw") => self.create = false,
            ("mode" | "cache" | "immutable" | "vfs", _) => {
                return Err(DriverError::misuse(format!(
                    "{key}={value} in the SQLite URL: locks need a file that every process reads and writes as it is; \
                     only mode=rwc and mode=rw can be said"
                )));
            }
            _ => return Err(unknown_setting("SQLite", key, &KNOWN)),
        }
        Ok(())
    }
}

/// Settings that a URL may carry.
const KNOWN: [&str; 2] = ["dlock.wake", "mode"];

/// A file beside the database of the application's own pool, with `.dlock` behind its name: see
/// [`SqliteDriver::from_pool`](crate::SqliteDriver::from_pool).
impl TryFrom<&SqlitePool> for SqliteConfig {
    type Error = DriverError;

    fn try_from(pool: &SqlitePool) -> Result<Self> {
        let options = pool.connect_options();
        let database = options.get_filename();
        // What sqlx calls a database without a file.
        if database.to_string_lossy().starts_with("file:") || database == Path::new(":memory:") {
            let message = "the pool's database is in memory, and locks need a file that every process can open";
            return Err(DriverError::misuse(message));
        }
        let mut path = database.as_os_str().to_owned();
        path.push(".dlock");
        Ok(Self::new(path))
    }
}

impl FromStr for SqliteConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let rest = match url.split_once(':') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("sqlite") => rest,
            _ => {
                let message = "a SQLite URL is sqlite:PATH, such as sqlite:/run/billing/locks.db";
                return Err(DriverError::misuse(message));
            }
        };
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        if rest.contains('#') {
            let message = "a # in the SQLite URL is written as %23";
            return Err(DriverError::misuse(message));
        }
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if path.trim() != path || path.contains(" dlock.") {
            let message = "a blank beside the path in the SQLite URL is written as %20, and settings follow a ?, such as sqlite:PATH?dlock.lease=5s";
            return Err(DriverError::misuse(message));
        }
        let path = percent_decode_str(path).decode_utf8().map_err(|cause| {
            DriverError::misuse("the path in the SQLite URL is no UTF-8").with_source(cause)
        })?;
        if path.is_empty() || path == ":memory:" {
            return Err(DriverError::misuse(format!(
                "sqlite:{path} names no file; for locks inside one process there is memory:NAME"
            )));
        }
        if path == "~" || path.starts_with("~/") {
            let message = "sqlite:~ would be a folder of that name, in whatever directory one stands: write the path in full, or ./~ if it is meant";
            return Err(DriverError::misuse(message));
        }
        if path.contains('\0') {
            return Err(DriverError::misuse("the path in the SQLite URL has a NUL"));
        }
        let mut config = Self::new(path.as_ref());
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            config.set(&key, &value)?;
        }
        Ok(config)
    }
}

/// How a waiter learns that a name may be free.
///
/// # Examples
/// ```
/// use dlock_sqlite::{SqliteConfig, WakeBy};
///
/// let config = SqliteConfig::new("/run/billing/locks.db").with_wake(WakeBy::Poll);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WakeBy {
    /// A release touches a file beside the database that waiters watch (`inotify`).
    Notify,
    /// Waiters poll: for machines where inotify instances are scarce.
    Poll,
}

impl FromStr for WakeBy {
    type Err = DriverError;

    fn from_str(wake: &str) -> Result<Self> {
        match wake {
            "notify" => Ok(Self::Notify),
            "poll" => Ok(Self::Poll),
            _ => Err(DriverError::misuse(format!(
                "dlock.wake must be notify or poll, not {wake:?}"
            ))),
        }
    }
}

impl fmt::Display for WakeBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Notify => "notify",
            Self::Poll => "poll",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{SqliteConfig, WakeBy};
    use dlock_core::ErrorKind;

    fn path(url: &str) -> String {
        let config: SqliteConfig = url.parse().unwrap();
        config.path().to_str().unwrap().to_owned()
    }

    #[test]
    fn paths_are_read_as_the_native_client_reads_them() {
        for (url, wanted) in [
            ("sqlite:locks.db", "locks.db"),
            ("sqlite://locks.db", "locks.db"),
            ("sqlite:/run/locks.db", "/run/locks.db"),
            ("sqlite:///run/locks.db", "/run/locks.db"),
            ("sqlite:/a%20b%3Fc.db?mode=rw", "/a b?c.db"),
        ] {
            assert_eq!(path(url), wanted);
            let native: sqlx::sqlite::SqliteConnectOptions = url.parse().unwrap();
            assert_eq!(native.get_filename().to_str(), Some(wanted));
        }
    }

    #[test]
    fn a_scheme_is_known_in_any_case() {
        assert_eq!(path("SQLite:/run/locks.db"), "/run/locks.db");
    }

    #[test]
    fn settings_have_their_defaults_and_their_names() {
        let config: SqliteConfig = "sqlite:a".parse().unwrap();
        assert!(config.create);
        assert_eq!(config.wake, WakeBy::Notify);
        let config: SqliteConfig = "sqlite:a?mode=rw&dlock.wake=poll".parse().unwrap();
        assert!(!config.create);
        assert_eq!(config.wake, WakeBy::Poll);
        assert_eq!(
            config.wake.to_string().parse::<WakeBy>().unwrap(),
            WakeBy::Poll
        );
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_can() {
        for (url, advice) in [
            ("sqlite:a?dlock.wak=poll", "known: dlock.wake, mode"),
            ("sqlite:a?dlock.wake=push", "notify or poll"),
            ("sqlite:a?mode=memory", "mode=rwc and mode=rw"),
            ("sqlite:a?immutable=true", "mode=rwc and mode=rw"),
            ("sqlite::memory:", "memory:NAME"),
            ("sqlite:", "memory:NAME"),
            ("sqlite:~/locks.db", "in full"),
            ("sqlite:a%00", "NUL"),
            ("sqlite:%ff", "UTF-8"),
            ("sqlit:a", "sqlite:PATH"),
        ] {
            let error = url.parse::<SqliteConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().contains(advice), "{url}: {error}");
        }
    }
}
