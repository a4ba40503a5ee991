//! Errors: one table classifies the server's and the native client's errors by kind, retry class and effect.

use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{
        DriverError,
        kit::{ConnectionOutcome, ErrorClass, Failure},
    },
};
use sqlx::mysql::MySqlDatabaseError;
use std::{fmt, io};

type Class = ErrorClass<u16, ConnectionOutcome>;

/// The classification. Each statement is a transaction, so a server that refuses or interrupts it has rolled
/// it back. If the answer is lost, or the server was shutting down, the effect is unknown.
#[rustfmt::skip]
const TABLE: [Class; 52] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use ConnectionOutcome::{AllClosed, Closed, Kept};
    use RetryClass::{Later, Never, Now};
    [
        // Any error that is not listed.
        Class::new(0, Unavailable, Later, Unknown, Closed, "the server answered with an error"),
        Class::new(1020, Unavailable, Now, None, Kept, "another client changed the row at the same time"),
        Class::new(1021, Unavailable, Later, Unknown, Closed, "the server's disk is full"),
        Class::new(1040, Unavailable, Later, None, Closed, "the server has no connection left: raise max_connections, or lower dlock.connections"),
        Class::new(1042, Unavailable, Later, None, Closed, "the server cannot resolve this host's name: set skip_name_resolve there"),
        Class::new(1044, Unavailable, Never, None, Closed, "the user may not use this database: see the GRANT lines of `dlock schema`"),
        Class::new(1045, Unavailable, Never, None, Closed, "the server refused user or password"),
        Class::new(1047, Unavailable, Later, None, AllClosed, "the server takes no statements at the moment: a node of a cluster that is not synchronised, or cut off"),
        Class::new(1049, Misuse, Never, None, Closed, "there is no such database: make it, or name another one in the URL"),
        Class::new(1053, Unavailable, Later, Unknown, AllClosed, "the server is shutting down"),
        Class::new(1062, Unavailable, Now, None, Kept, "another client made the row at the same time"),
        Class::new(1064, Unsupported, Never, None, Kept, "BUG: the server does not understand a statement; please report it with the server's version"),
        Class::new(1114, Unavailable, Later, None, Kept, "the server has no room for the row: its disk or tablespace is full"),
        Class::new(1129, Unavailable, Later, None, Closed, "the server blocks this host after too many failed connections: FLUSH HOSTS there"),
        Class::new(1130, Unavailable, Never, None, Closed, "the server accepts no connection from this host: check the host part of the user's account"),
        Class::new(1142, Unavailable, Never, None, Kept, "the user lacks a right on dlock's table: see the GRANT lines of `dlock schema`"),
        Class::new(1143, Unavailable, Never, None, Kept, "the user lacks a right on a column of dlock's table: see the GRANT lines of `dlock schema`"),
        Class::new(1146, Unavailable, Never, None, Kept, "dlock's table is not there: make it with what `dlock schema` prints"),
        Class::new(1158, Unavailable, Later, Unknown, AllClosed, "the server could not read from the network"),
        Class::new(1159, Unavailable, Later, Unknown, AllClosed, "the server waited too long for the network"),
        Class::new(1160, Unavailable, Later, Unknown, AllClosed, "the server could not write to the network"),
        Class::new(1161, Unavailable, Later, Unknown, AllClosed, "the server waited too long to write to the network"),
        Class::new(1184, Unavailable, Later, None, Closed, "the server gave the connection up while it was being made"),
        Class::new(1203, Unavailable, Later, None, Closed, "the user has no connection left on the server: raise its max_user_connections, or lower dlock.connections"),
        Class::new(1205, Unavailable, Later, None, Kept, "the row or the table was locked for a second: a transaction, a backup or LOCK TABLES is open on dlock's table"),
        Class::new(1213, Unavailable, Now, None, Kept, "the server chose this statement to end a deadlock"),
        Class::new(1226, Unavailable, Later, None, Closed, "the user is over one of its limits on the server (max_user_connections, max_updates_per_hour, …)"),
        Class::new(1243, Unavailable, Now, None, Closed, "the server does not know the statement that it prepared: a proxy in between changes servers, which dlock's sessions do not survive"),
        Class::new(1290, Unavailable, Later, None, AllClosed, "the server is read-only: a failover is under way, or the URL names a replica"),
        Class::new(1317, Unavailable, Now, None, Closed, "the statement was killed on the server"),
        Class::new(1412, Unavailable, Now, None, Kept, "dlock's table was altered at the same time"),
        Class::new(1461, Unavailable, Later, None, Closed, "the server has no prepared statement left: raise max_prepared_stmt_count"),
        Class::new(1615, Unavailable, Now, None, Closed, "the server wants the statement prepared again: raise table_definition_cache"),
        Class::new(1792, Unavailable, Later, None, AllClosed, "the session is read-only: a failover is under way, or the URL names a replica"),
        Class::new(1836, Unavailable, Later, None, AllClosed, "the server is in read-only mode"),
        Class::new(1927, Unavailable, Now, Unknown, Closed, "the connection was killed on the server"),
        Class::new(1969, Unavailable, Later, None, Kept, "the statement ran for a second and was ended by the server (max_statement_time): it is overloaded, or dlock's table is locked"),
        Class::new(2006, Unavailable, Later, Unknown, AllClosed, "the server has gone away"),
        Class::new(2013, Unavailable, Later, Unknown, AllClosed, "the connection was lost during a statement"),
        Class::new(3024, Unavailable, Later, None, Kept, "the statement ran for too long and was ended by the server (max_execution_time)"),
        Class::new(3032, Unavailable, Later, None, AllClosed, "the server is in offline mode"),
        Class::new(3058, Unavailable, Later, None, Kept, "the server found a deadlock of user-level locks, which dlock does not use: check whether a proxy shares this connection"),
        Class::new(3101, Unavailable, Later, None, Kept, "the group of servers undid the statement: another primary wrote the row at the same time; write to one primary only"),
        Class::new(3118, Unavailable, Never, None, Closed, "the user's account is locked on the server"),
        Class::new(3159, Unavailable, Never, None, Closed, "the server takes only connections with TLS: turn on the feature `tls`, and see ssl-mode in the URL"),
        Class::new(4031, Unavailable, Now, None, Closed, "the server closed the connection, which was idle for too long"),
        // Not server error numbers: these stand for errors that the client reports.
        Class::new(DIAL, Unavailable, Later, None, Closed, "the server could not be reached"),
        Class::new(IO, Unavailable, Later, Unknown, AllClosed, "the connection failed before the answer came"),
        Class::new(TLS, Unavailable, Never, None, Closed, "TLS could not be set up: see ssl-mode and ssl-ca in the URL; without the feature `tls` there is none, and ssl-mode=disabled does without"),
        Class::new(CONFIG, Misuse, Never, None, Closed, "the MySQL settings cannot work"),
        Class::new(ENDED, Unavailable, Later, None, Closed, "the statement ran for two seconds and was ended: the server is overloaded, or dlock's table is locked"),
        Class::new(GARBLED, Unavailable, Never, None, Closed, "a row of dlock's table holds a value that dlock did not write: break that lock, or delete the row while it is unused"),
    ]
};

const DIAL: u16 = 1;
const IO: u16 = 2;
const TLS: u16 = 3;
const CONFIG: u16 = 4;
const ENDED: u16 = 5;
/// A column holds a value that the driver did not write.
const GARBLED: u16 = 6;
/// A statement was killed, by the driver or by another session.
const KILLED: u16 = 1317;
/// The table does not exist.
const NO_TABLE: u16 = 1146;

/// Classifies a failed statement. `by_us`: it ran for too long and the driver killed it.
pub(crate) fn failed(cause: sqlx::Error, by_us: bool) -> Failure<ConnectionOutcome> {
    if by_us && number(&cause) == Some(KILLED) {
        return by_number(ENDED).failure(Ended(cause));
    }
    classify(&cause).failure(cause)
}

/// The server's error for a statement that the driver killed.
#[derive(Debug)]
struct Ended(sqlx::Error);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Ended {}

/// Classifies a failure to connect. Whatever the reason, no request was sent, so there is no effect.
pub(crate) fn unreached(cause: sqlx::Error) -> DriverError {
    let class = match &cause {
        // The native client reports a refused certificate as invalid data.
        sqlx::Error::Io(io) if io.kind() == io::ErrorKind::InvalidData => by_number(TLS),
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) => by_number(DIAL),
        _ => classify(&cause),
    };
    class.failure(cause).error.with_effect(Effect::None)
}

/// Whether the failure is contention: the statement did nothing and may be sent again.
pub(crate) fn is_contention(error: &DriverError) -> bool {
    matches!(
        number_in(error),
        Some(1020 | 1062 | 1205 | 1213 | 1412 | 1969 | 3024 | ENDED)
    )
}

/// Whether the table is missing.
pub(crate) fn is_missing_table(error: &DriverError) -> bool {
    number_in(error) == Some(NO_TABLE)
}

/// Whether the statement failed without waiting for the conflict. The conflict may be over, so an immediate
/// retry is worthwhile.
pub(crate) fn is_brief(error: &DriverError) -> bool {
    matches!(number_in(error), Some(1020 | 1213 | 1412))
}

fn number_in(error: &DriverError) -> Option<u16> {
    let source = std::error::Error::source(error)?;
    if source.is::<Ended>() {
        return Some(ENDED);
    }
    number(source.downcast_ref()?)
}

/// The request was sent, and the state found now may be older or newer than its effect.
pub(crate) fn overtaken() -> DriverError {
    DriverError::unanswered("others have used the lock since").with_retry(RetryClass::Now)
}

/// Another transaction has locked the row, and the rest of the batch does not wait for it.
pub(crate) fn locked() -> DriverError {
    DriverError::unavailable("the row is locked: another transaction is open on dlock's table")
}

/// No answer within the time in which the server itself would have ended the statement: the network path is
/// dead, or the server hangs.
pub(crate) fn silent() -> sqlx::Error {
    let message = "the server did not answer within 4 s";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, message))
}

pub(crate) fn garbled() -> DriverError {
    let class = by_number(GARBLED);
    class.error(class.advice)
}

pub(crate) fn unsupported(message: String) -> DriverError {
    DriverError::new(ErrorKind::Unsupported, message)
}

fn classify(cause: &sqlx::Error) -> &'static Class {
    match cause {
        sqlx::Error::Database(_) => by_number(number(cause).unwrap_or(0)),
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) => by_number(IO),
        sqlx::Error::Tls(_) => by_number(TLS),
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => by_number(CONFIG),
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } => by_number(GARBLED),
        _ => by_number(0),
    }
}

fn by_number(number: u16) -> &'static Class {
    let known = TABLE.iter().find(|class| class.code == number);
    known.unwrap_or(&TABLE[0])
}

/// The server's error number.
fn number(cause: &sqlx::Error) -> Option<u16> {
    let native = cause.as_database_error()?;
    Some(native.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

#[cfg(test)]
mod tests {
    use super::{
        CONFIG, ConnectionOutcome, GARBLED, IO, TABLE, TLS, by_number, classify, unreached,
    };
    use dlock_core::{Effect, ErrorKind, RetryClass};
    use std::{collections::HashSet, io};

    /// The known error numbers of current servers.
    const KNOWN: [u16; 45] = [
        1020, 1021, 1040, 1042, 1044, 1045, 1047, 1049, 1053, 1062, 1064, 1114, 1129, 1130, 1142,
        1143, 1146, 1158, 1159, 1160, 1161, 1184, 1203, 1205, 1213, 1226, 1243, 1290, 1317, 1412,
        1461, 1615, 1792, 1836, 1927, 1969, 2006, 2013, 3024, 3032, 3058, 3101, 3118, 3159, 4031,
    ];

    #[test]
    fn each_number_has_one_row() {
        let numbers: HashSet<_> = TABLE.iter().map(|class| class.code).collect();
        assert_eq!(numbers.len(), TABLE.len());
        for number in KNOWN {
            assert_eq!(by_number(number).code, number);
        }
        assert_eq!(by_number(9_999).code, 0);
    }

    #[test]
    fn only_lost_answers_and_a_server_going_down_leave_the_effect_open() {
        let open: Vec<_> = TABLE
            .iter()
            .filter(|class| class.effect == Effect::Unknown)
            .map(|class| class.code)
            .collect();
        assert_eq!(
            open,
            [0, 1021, 1053, 1158, 1159, 1160, 1161, 1927, 2006, 2013, IO]
        );
    }

    #[test]
    fn what_cannot_get_better_is_not_repeated_and_a_read_only_server_is_left() {
        let never: Vec<_> = TABLE
            .iter()
            .filter(|class| class.retry == RetryClass::Never)
            .map(|class| class.code)
            .collect();
        assert_eq!(
            never,
            [
                1044, 1045, 1049, 1064, 1130, 1142, 1143, 1146, 3118, 3159, TLS, CONFIG, GARBLED
            ]
        );
        for number in [1047, 1290, 1792, 1836, 3032] {
            assert_eq!(by_number(number).link, ConnectionOutcome::AllClosed);
        }
        for number in [1020, 1062, 1205, 1213, 1412] {
            assert_eq!(by_number(number).link, ConnectionOutcome::Kept);
        }
    }

    #[test]
    fn what_the_client_reports_has_a_row_too() {
        let broken = || sqlx::Error::Io(io::Error::from(io::ErrorKind::BrokenPipe));
        for (cause, number) in [
            (broken(), IO),
            (sqlx::Error::Protocol("x".into()), IO),
            (sqlx::Error::Tls("x".into()), TLS),
            (sqlx::Error::Configuration("x".into()), CONFIG),
            (sqlx::Error::Decode("x".into()), GARBLED),
        ] {
            assert_eq!(classify(&cause).code, number, "{cause}");
        }
        let error = unreached(broken());
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, RetryClass::Later, Effect::None)
        );
        assert_eq!(error.to_string(), "the server could not be reached");
    }
}
