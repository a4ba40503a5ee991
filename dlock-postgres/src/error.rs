//! Errors of PostgreSQL: SQLSTATE to kind, retry class and effect.

use dlock_core::driver::DriverError;
use dlock_core::{ErrorKind, RetryClass};
use std::error::Error;

/// What the server said. The details of its message are left out: they may show a row, and with it an owner.
#[derive(Debug, thiserror::Error)]
#[error("{message} (SQLSTATE {code})")]
struct ServerError {
    code: String,
    message: String,
}

/// When a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// While connecting: nothing was sent.
    Connecting,
    /// After it was sent.
    Sent,
}

/// What a failure means, and whether its connection, and those opened before it, are of no more use.
pub(crate) fn classify(error: sqlx::Error, stage: Stage) -> (DriverError, bool) {
    let sqlx::Error::Database(error) = error else {
        let failed = match stage {
            Stage::Connecting => DriverError::unavailable("the server could not be reached"),
            Stage::Sent => {
                DriverError::unanswered("the connection failed before the server answered")
            }
        };
        return (failed.with_source(error), true);
    };
    let error = ServerError {
        code: error.code().unwrap_or_default().into_owned(),
        message: error.message().to_owned(),
    };
    let (failed, broken) = meaning(&error.code, stage);
    (failed.with_source(error), broken)
}

fn meaning(code: &str, stage: Stage) -> (DriverError, bool) {
    let (kind, message) = match code {
        "40001" | "40P01" | "55P03" | "57014" => {
            let retry =
                DriverError::unavailable("another transaction has locked the row or the table");
            return (retry.with_retry(RetryClass::Now), false);
        }
        "25006" => {
            return (
                DriverError::unavailable("the server is read-only: connect to the primary"),
                true,
            );
        }
        "42P01" | "3F000" => (
            ErrorKind::Misuse,
            "the table of locks is missing: create it, or allow dlock to",
        ),
        "42501" => (
            ErrorKind::Misuse,
            "the user may not do this: grant it SELECT, INSERT, UPDATE and DELETE on the table of locks",
        ),
        "42703" | "42804" | "42883" | "42809" => (
            ErrorKind::Misuse,
            "the table is not dlock's: name another one with `dlock.table`",
        ),
        "3D000" => (ErrorKind::Misuse, "the database does not exist"),
        _ => match (&code[..code.len().min(2)], stage) {
            ("28", _) => (
                ErrorKind::Misuse,
                "the server refused the user or the password",
            ),
            ("53", _) => {
                return (
                    DriverError::unavailable("the server has no room for the request"),
                    stage == Stage::Connecting,
                );
            }
            (_, Stage::Connecting) => {
                return (
                    DriverError::unavailable("the server refused the connection"),
                    true,
                );
            }
            // The transaction was aborted: the statement or a value was refused.
            ("0A" | "21" | "22" | "23" | "25" | "42" | "44", _) => (
                ErrorKind::Unsupported,
                "BUG: the server refused a statement of dlock",
            ),
            // A shutdown, a crash, an internal error: it may have come after the commit.
            _ => {
                return (
                    DriverError::unanswered("the server ended the request"),
                    true,
                );
            }
        },
    };
    (DriverError::new(kind, message), false)
}

/// Whether another client's transaction was in the way; nothing was done.
pub(crate) fn is_contention(error: &DriverError) -> bool {
    code(error).is_some_and(|code| matches!(code, "40001" | "40P01" | "55P03" | "57014"))
}

/// Whether the table does not exist.
pub(crate) fn is_missing(error: &DriverError) -> bool {
    code(error) == Some("42P01")
}

/// Whether another client made the same table at the same moment.
pub(crate) fn is_made(error: &DriverError) -> bool {
    code(error).is_some_and(|code| matches!(code, "42P07" | "23505" | "42710"))
}

fn code(error: &DriverError) -> Option<&str> {
    let server = error.source()?.downcast_ref::<ServerError>()?;
    Some(&server.code)
}
