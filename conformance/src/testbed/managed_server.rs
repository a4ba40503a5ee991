//! Managed server, as a process or in a container.

use super::server::{ServerError, ServerProcess};
use std::{env, fmt, io, net::SocketAddr};

/// A running server that tests may stop, continue and kill: a [`ServerProcess`] or a container.
///
/// All methods block; see [`ServerProcess`].
pub trait ManagedServer: fmt::Debug + Send + Sync + 'static {
    /// The address where it listens, also after a restart.
    fn addr(&self) -> SocketAddr;

    /// Suspends it. Connections stay open, and no request is answered.
    ///
    /// # Errors
    /// When it is not running.
    fn stop(&self) -> io::Result<()>;

    /// Resumes it.
    ///
    /// # Errors
    /// When it is not running.
    fn cont(&self) -> io::Result<()>;

    /// Kills it, suspended or not. A second call does nothing.
    ///
    /// # Errors
    /// When the operating system or the engine refuses.
    fn kill(&self) -> io::Result<()>;

    /// Kills it if it runs, suspended or not, and starts it again at the same address; returns when it answers.
    ///
    /// # Errors
    /// [`ServerError`]; the server is then not running.
    fn restart(&self) -> Result<(), ServerError>;

    /// The process of the server, if it is one.
    fn process(&self) -> Option<&ServerProcess> {
        None
    }
}

impl ManagedServer for ServerProcess {
    fn addr(&self) -> SocketAddr {
        self.addr()
    }

    fn stop(&self) -> io::Result<()> {
        self.stop()
    }

    fn cont(&self) -> io::Result<()> {
        self.cont()
    }

    fn kill(&self) -> io::Result<()> {
        self.kill().map(drop)
    }

    fn restart(&self) -> Result<(), ServerError> {
        self.restart()
    }

    fn process(&self) -> Option<&ServerProcess> {
        Some(self)
    }
}

/// Where a started server runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// A child process.
    #[default]
    Process,
    /// A container, with the feature `containers`.
    Container,
}

impl Home {
    /// Checks that servers can be started there.
    ///
    /// # Errors
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

/// `1` marks trials that need root, or an engine that only root can start, as ignored where that is
/// missing. Without it, they fail.
pub const UNPRIVILEGED: &str = "DLOCK_TEST_UNPRIVILEGED";

/// Whether [`UNPRIVILEGED`] is set to `1`.
#[must_use]
pub fn is_unprivileged() -> bool {
    env::var_os(UNPRIVILEGED).is_some_and(|value| value == "1")
}
