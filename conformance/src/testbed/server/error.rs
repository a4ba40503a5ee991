//! Why a server could not be had.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

/// Why a server is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The program is not on `PATH`.
    #[error("no {server}: {remedy}")]
    Missing {
        /// The program.
        server: &'static str,
        /// What to do about it.
        remedy: &'static str,
    },
    /// No container engine answers.
    #[error(
        "no container engine: {reason}; start Docker, or a private one with conformance/images/engine.sh up, and make the \
         images with conformance/images/build.sh; or set DLOCK_TEST_UNPRIVILEGED=1 to leave such tests out"
    )]
    NoEngine {
        /// What happened when it was asked.
        reason: String,
    },
    /// A server was named by an environment variable that cannot be used.
    #[error("{variable}: {reason}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// What is wrong; never the value, which may hold a password.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot {step} {server}: {source}")]
    System {
        /// The program.
        server: &'static str,
        /// What was being done.
        step: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// It ended before it was ready.
    #[error("{server} ended before it was ready, {status}; its log:\n{log}")]
    Ended {
        /// The program.
        server: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it printed.
        log: String,
    },
    /// It ran, and was not ready in time. It has been killed.
    #[error("{server} was not ready within {limit:?}; its log:\n{log}")]
    NotReady {
        /// The program.
        server: &'static str,
        /// The time it had.
        limit: Duration,
        /// What it printed.
        log: String,
    },
}
