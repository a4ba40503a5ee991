//! Errors of starting a server.

use std::{io, process::ExitStatus, time::Duration};

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The program is not on `PATH`.
    #[error("no {server}: {remedy}")]
    Missing {
        /// The program.
        server: &'static str,
        /// How to install it.
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
    /// An environment variable names a server that cannot be used.
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
        /// The operation.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The server ended before it was ready.
    #[error("{server} ended before it was ready, {status}; its log:\n{log}")]
    Ended {
        /// The program.
        server: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// Its output.
        log: String,
    },
    /// The server ran, but was not ready in time. It has been killed.
    #[error("{server} was not ready within {limit:?}; its log:\n{log}")]
    NotReady {
        /// The program.
        server: &'static str,
        /// The time limit.
        limit: Duration,
        /// Its output.
        log: String,
    },
}

impl ServerError {
    /// The operating system refused this step.
    pub(in crate::testbed) fn system(
        server: &'static str,
        step: &'static str,
    ) -> impl Fn(io::Error) -> Self {
        move |source| Self::System {
            server,
            step,
            source,
        }
    }
}
