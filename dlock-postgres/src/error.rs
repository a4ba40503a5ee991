//! Errors: one table classifies the server's SQLSTATEs by kind, retry class, effect and fate of the connection.

use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{
        DriverError,
        kit::{ErrorClass, Failure, Fate},
    },
};
use std::error::Error;

type Class = ErrorClass<&'static str, Fate>;

/// The classification, by the longest code that begins the SQLSTATE. A message is one transaction, so a server that refuses or interrupts
/// it has rolled it back. If the answer is lost, or the server was shutting down, the effect is unknown.
#[rustfmt::skip]
const TABLE: [Class; 23] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use Fate::{AllClosed, Closed, Kept};
    use RetryClass::{Later, Never, Now};
    [
        // A shutdown, a crash, an internal error: it may have come after the commit.
        Class::new("", Unavailable, Later, Unknown, AllClosed, "the server ended the request or the connection"),
        Class::new("0A", Unsupported, Never, None, Kept, REFUSED),
        Class::new("21", Unsupported, Never, None, Kept, REFUSED),
        Class::new("22", Unsupported, Never, None, Kept, REFUSED),
        Class::new("23", Unsupported, Never, None, Kept, REFUSED),
        Class::new("25", Unsupported, Never, None, Kept, REFUSED),
        Class::new("25006", Unavailable, Later, None, AllClosed, "the server is read-only: connect to the primary"),
        Class::new("28", Misuse, Never, None, Closed, "the server refused the user or the password"),
        Class::new("3D000", Misuse, Never, None, Closed, "the database does not exist"),
        Class::new("3F000", Misuse, Never, None, Kept, "the schema of the table is missing: create it, or name another one with `dlock.table`"),
        Class::new("40001", Unavailable, Now, None, Kept, LOCKED),
        Class::new("40P01", Unavailable, Now, None, Kept, LOCKED),
        Class::new("42", Unsupported, Never, None, Kept, REFUSED),
        Class::new("42501", Misuse, Never, None, Kept, "the user may not do this: grant it SELECT, INSERT, UPDATE and DELETE on the table of locks"),
        Class::new("42703", Misuse, Never, None, Kept, FOREIGN),
        Class::new("42804", Misuse, Never, None, Kept, FOREIGN),
        Class::new("42809", Misuse, Never, None, Kept, FOREIGN),
        Class::new("42883", Misuse, Never, None, Kept, FOREIGN),
        Class::new("42P01", Misuse, Never, None, Kept, "the table of locks is missing: create it, or allow dlock to"),
        Class::new("44", Unsupported, Never, None, Kept, REFUSED),
        Class::new("53", Unavailable, Later, None, Kept, "the server has no room for the request"),
        Class::new("55P03", Unavailable, Now, None, Kept, LOCKED),
        Class::new("57014", Unavailable, Now, None, Kept, LOCKED),
    ]
};

const REFUSED: &str = "BUG: the server refused a statement of dlock";
const LOCKED: &str = "another transaction has locked the row or the table";
const FOREIGN: &str = "the table is not dlock's: name another one with `dlock.table`";

/// What the server said. The details of its message are left out: they may show a row, and with it an owner.
#[derive(Debug, thiserror::Error)]
#[error("{message} (SQLSTATE {code})")]
struct ServerError {
    code: String,
    message: String,
}

/// Classifies a request that failed after it was sent.
pub(crate) fn failure(error: sqlx::Error) -> Failure<Fate> {
    let sqlx::Error::Database(error) = error else {
        let lost = DriverError::unanswered("the connection failed before the server answered");
        return Failure {
            error: lost.with_source(error),
            link: Fate::AllClosed,
        };
    };
    let error = ServerError {
        code: error.code().unwrap_or_default().into_owned(),
        message: error.message().to_owned(),
    };
    by_code(&error.code).failure(error)
}

/// Classifies a failure to connect. Whatever the reason, no request was sent.
pub(crate) fn unreached(error: sqlx::Error) -> DriverError {
    if let sqlx::Error::Database(_) = error {
        return failure(error).error.with_effect(Effect::None);
    }
    DriverError::unavailable("the server could not be reached").with_source(error)
}

/// Whether a proxy refused what the connection asks for when it begins.
pub(crate) fn is_refused_start(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    matches!(code.as_deref(), Some("08P01" | "0A000"))
}

fn by_code(code: &str) -> &'static Class {
    let fitting = TABLE.iter().filter(|class| code.starts_with(class.code));
    fitting
        .max_by_key(|class| class.code.len())
        .unwrap_or(&TABLE[0])
}

/// Whether another client's transaction was in the way; nothing was done.
pub(crate) fn is_contention(error: &DriverError) -> bool {
    code(error).is_some_and(|code| by_code(code).advice == LOCKED)
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

#[cfg(test)]
mod tests {
    use super::{Fate, LOCKED, TABLE, by_code};
    use dlock_core::{Effect, ErrorKind, RetryClass};

    #[test]
    fn the_longest_code_counts_and_what_is_not_listed_may_have_been_done() {
        for (code, row) in [
            ("42P01", "42P01"),
            ("42601", "42"),
            ("25006", "25006"),
            ("53300", "53"),
            ("40003", ""),
            ("57P01", ""),
            ("08006", ""),
            ("XX000", ""),
            ("", ""),
        ] {
            assert_eq!(by_code(code).code, row, "{code}");
        }
        let unknown = TABLE
            .iter()
            .filter(|class| class.effect == Effect::Unknown)
            .map(|class| (class.code, class.link));
        assert!(unknown.eq([("", Fate::AllClosed)]));
    }

    #[test]
    fn what_was_locked_is_repeated_at_once_and_misuse_never() {
        for class in &TABLE {
            let wanted = match (class.advice == LOCKED, class.kind) {
                (true, _) => RetryClass::Now,
                (_, ErrorKind::Unavailable) => RetryClass::Later,
                _ => RetryClass::Never,
            };
            assert_eq!(class.retry, wanted, "{}", class.code);
        }
    }
}
