//! Errors: one table classifies the server's SQLSTATEs by kind, retry class, effect and outcome for the connection.

use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{
        DriverError,
        kit::{ConnectionOutcome, ErrorClass, Failure},
    },
};
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use std::error::Error;

type Class = ErrorClass<&'static str, ConnectionOutcome>;

/// The classification, by the longest code that begins the SQLSTATE. A message is one transaction, so a server that
/// refuses or interrupts it has rolled it back. If the answer is lost, or the server was shutting down, the effect is
/// unknown.
#[rustfmt::skip]
const TABLE: [Class; 27] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use ConnectionOutcome::{AllClosed, Closed, Kept};
    use RetryClass::{Later, Never, Now};
    [
        // A shutdown, a crash, an internal error: it may have come after the commit.
        Class::new("", Unavailable, Later, Unknown, AllClosed, "the server ended the request or the connection"),
        Class::new("0A", Unsupported, Never, None, Kept, REFUSED),
        Class::new("21", Unsupported, Never, None, Kept, REFUSED),
        Class::new("22", Unsupported, Never, None, Kept, REFUSED),
        Class::new("22P05", Unsupported, Never, None, Kept, "the encoding of the database lacks a character of the holder's host name: use UTF8"),
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
        Class::new("42P10", Misuse, Never, None, Kept, NOT_UNIQUE),
        Class::new("44", Unsupported, Never, None, Kept, REFUSED),
        Class::new("53", Unavailable, Later, None, Kept, "the server has no room for the request"),
        Class::new("54", Unavailable, Later, None, Kept, "a limit of the server is reached, such as that of its queue of notifications"),
        Class::new("55000", Misuse, Never, None, Kept, NOT_UNIQUE),
        Class::new("55P03", Unavailable, Now, None, Kept, LOCKED),
        Class::new("57014", Unavailable, Now, None, Kept, LOCKED),
    ]
};

const REFUSED: &str = "BUG: the server refused a statement of dlock";
const LOCKED: &str = "another transaction has locked the row or the table";
const NOT_UNIQUE: &str = "the table has no unique index on `name` that is checked at once: make it as `dlock schema` prints it";
const FOREIGN: &str = "the table is not dlock's: name another one with `dlock.table`";

/// What the server said. The details of its message are left out: they may show a row, and with it an owner.
#[derive(Debug, thiserror::Error)]
#[error("{message} (SQLSTATE {code})")]
struct ServerError {
    code: String,
    message: String,
}

/// Classifies a request that failed after it was sent.
pub(crate) fn failure(error: sqlx::Error) -> Failure<ConnectionOutcome> {
    let (error, is_fatal) = match said(error) {
        Ok(said) => said,
        Err(error) => {
            let lost = DriverError::unanswered("the connection failed before the server answered");
            return Failure {
                error: lost.with_source(error),
                link: ConnectionOutcome::AllClosed,
            };
        }
    };
    class_of(&error.code, is_fatal).failure(error)
}

/// Classifies a failure to connect. Whatever the reason, no request was sent.
pub(crate) fn unreached(error: sqlx::Error) -> DriverError {
    match said(error) {
        Ok((error, _)) => {
            // Of a table it says that an index is deferrable, of a database that it takes no connections just now.
            let class = match &*error.code {
                "55000" => &TABLE[0],
                code => by_code(code),
            };
            class.failure(error).error.with_effect(Effect::None)
        }
        Err(error) => {
            DriverError::unavailable("the server could not be reached").with_source(error)
        }
    }
}

/// What the server said, and whether it ended the connection with it.
fn said(error: sqlx::Error) -> Result<(ServerError, bool), sqlx::Error> {
    let sqlx::Error::Database(error) = error else {
        return Err(error);
    };
    let severity = error
        .try_downcast_ref::<PgDatabaseError>()
        .map(PgDatabaseError::severity);
    let said = ServerError {
        code: error.code().unwrap_or_default().into_owned(),
        message: error.message().to_owned(),
    };
    let is_fatal = matches!(severity, Some(PgSeverity::Fatal | PgSeverity::Panic));
    Ok((said, is_fatal))
}

/// The class of a request's error. One that ends the connection, such as a disk that is full at a commit, may have come
/// after the commit, whatever its code; a log-in that is refused is none of these.
fn class_of(code: &str, is_fatal: bool) -> &'static Class {
    match by_code(code) {
        class if is_fatal && class.link == ConnectionOutcome::Kept => &TABLE[0],
        class => class,
    }
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
    error.effect() == Effect::None && code(error).is_some_and(|code| by_code(code).advice == LOCKED)
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
    use super::{ConnectionOutcome, LOCKED, TABLE, by_code, class_of};
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
        assert!(unknown.eq([("", ConnectionOutcome::AllClosed)]));
    }

    #[test]
    fn what_ends_the_connection_may_have_been_done_unless_it_is_a_refused_log_in() {
        for (code, row) in [
            ("25P03", ""),
            ("25P04", ""),
            ("53100", ""),
            ("53300", ""),
            ("57014", ""),
            ("57P01", ""),
            ("57P03", ""),
            ("57P05", ""),
            ("25006", "25006"),
            ("28000", "28"),
            ("28P01", "28"),
            ("3D000", "3D000"),
        ] {
            assert_eq!(class_of(code, true).code, row, "{code}");
        }
        assert_eq!(class_of("53100", false).code, "53");
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
