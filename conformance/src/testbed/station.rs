//! A server of ours, wherever it runs.

use std::env;
use std::fmt;
use std::io;
use std::net::SocketAddr;

use super::server::{ServerError, ServerProcess};

/// A running server that tests may stop, continue and kill: a [`ServerProcess`] or a container.
///
/// All methods block; see [`ServerProcess`].
pub trait Station: fmt::Debug + Send + Sync + 'static {
    /// Where it listens, also after a restart.
    fn addr(&self) -> SocketAddr;

    /// Suspends it. Connections stay open, and nobody answers.
    ///
    /// # Errors
    ///
    /// When it is not running.
    fn stop(&self) -> io::Result<()>;

    /// Lets it run on.
    ///
    /// # Errors
    ///
    /// When it is not running.
    fn cont(&self) -> io::Result<()>;

    /// Kills it, suspended or not, and starts it again in the same place; returns when it answers.
    ///
    /// # Errors
    ///
    /// [`ServerError`]; the server is then not running.
    fn restart(&self) -> Result<(), ServerError>;

    /// The last of what it printed.
    fn log(&self) -> String;

    /// The process that it is, if it is one.
    fn process(&self) -> Option<&ServerProcess> {
        None
    }
}

impl Station for ServerProcess {
    fn addr(&self) -> SocketAddr {
        self.addr()
    }

    fn stop(&self) -> io::Result<()> {
        self.stop()
    }

    fn cont(&self) -> io::Result<()> {
        self.cont()
    }

    fn restart(&self) -> Result<(), ServerError> {
        self.restart()
    }

    fn log(&self) -> String {
        self.log()
    }

    fn process(&self) -> Option<&ServerProcess> {
        Some(self)
    }
}

/// What a server of ours runs in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// A child process.
    #[default]
    Process,
    /// A container, with the feature `containers`.
    Container,
}

impl Home {
    /// Whether servers can be started there at all.
    ///
    /// # Errors
    ///
    /// [`ServerError::NoEngine`] for containers when no engine answers.
    pub fn check(self) -> Result<(), ServerError> {
        match self {
            Self::Process => Ok(()),
            Self::Container => container_engine(),
        }
    }
}

#[cfg(feature = "containers")]
fn container_engine() -> Result<(), ServerError> {
    super::container::check_engine()
}

#[cfg(not(feature = "containers"))]
fn container_engine() -> Result<(), ServerError> {
    Err(ServerError::NoEngine {
        reason: "dlock-conformance is built without its feature `containers`".to_owned(),
    })
}

/// `1` marks what needs root, or an engine that only root can start, as ignored where it cannot be had. Without it, it fails.
pub const UNPRIVILEGED: &str = "DLOCK_TEST_UNPRIVILEGED";

/// Whether [`UNPRIVILEGED`] is set to `1`.
#[must_use]
pub fn is_unprivileged() -> bool {
    env::var_os(UNPRIVILEGED).is_some_and(|value| value == "1")
}
