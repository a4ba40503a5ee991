//! Error classification: one table from SQLite's codes to kind, retry class and effect.

use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{
        DriverError,
        kit::{ErrorClass, Failure},
    },
};
use std::{error::Error, io, path::Path};

/// The last column: whether the connection that returned the error must be reopened.
type Class = ErrorClass<i32, bool>;

/// A statement is a transaction: refused before its commit, it did nothing. Where the file itself failed,
/// the effect is unknown. An extended code without a row of its own has the row of its last eight bits.
#[rustfmt::skip]
const TABLE: [Class; 19] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use RetryClass::{Later, Never, Now};
    [
        Class::new(1, Unavailable, Never, Unknown, true, "SQLite refused a statement: was the schema of the lock file changed by hand?"),
        Class::new(3, Unavailable, Never, None, true, "the lock file may not be opened: see its mode and its directory's"),
        Class::new(5, Unavailable, Later, None, false, "the lock file was busy for a second: another process holds a write transaction open in it, or its disk is slow"),
        Class::new(6, Unavailable, Later, None, false, "the lock table is in use"),
        Class::new(7, Unavailable, Later, Unknown, true, "out of memory"),
        Class::new(8, Unavailable, Never, None, true, "the lock file cannot be written: it, its directory or its file system is read-only for this user"),
        Class::new(10, Unavailable, Later, Unknown, true, "the disk or the file system failed under the lock file: see the kernel's log, and the limit of file sizes (ulimit -f)"),
        Class::new(11, Unavailable, Never, Unknown, true, "the lock file is damaged: stop all processes that use it, delete it and its -wal and -shm, and start again"),
        Class::new(13, Unavailable, Later, None, false, "the disk of the lock file is full: make room; what is held stays held until its lease is over"),
        Class::new(14, Unavailable, Later, None, true, "the lock file or its -wal or -shm cannot be opened: is the directory still there, may this user write it and all three, and is a descriptor left?"),
        Class::new(15, Unavailable, Later, None, true, "the processes that use the lock file get in each other's way"),
        Class::new(17, Unavailable, Now, None, true, "the schema of the lock file has just changed"),
        Class::new(19, Unavailable, Never, None, false, "BUG: a row breaks the schema of the lock file; please report it"),
        Class::new(20, Unavailable, Never, None, false, "BUG: a value does not fit the schema of the lock file; please report it"),
        Class::new(22, Unsupported, Never, None, true, "this system has no large files"),
        Class::new(23, Unavailable, Never, None, true, "SQLite may not do this here"),
        Class::new(26, Misuse, Never, None, true, "the file is no SQLite database: name another one, it was left as it is"),
        // Extended: the open file no longer has the name by which it was opened.
        Class::new(8 | 4 << 8, Unavailable, Never, None, true, "the lock file was moved or deleted while it was in use: connect again"),
        // Extended: no room for the index of the -wal.
        Class::new(10 | 19 << 8, Unavailable, Later, None, true, "the disk of the lock file is full: make room; what is held stays held until its lease is over"),
    ]
};

/// SQLite returned an unexpected code, or its thread ended.
const OTHER: Class = Class::new(
    0,
    ErrorKind::Unavailable,
    RetryClass::Later,
    Effect::Unknown,
    true,
    "the lock file could not be used",
);

/// A column contains a value that the driver did not write.
const GARBLED: Class = Class::new(
    0,
    ErrorKind::Unavailable,
    RetryClass::Never,
    Effect::None,
    false,
    "a record in the lock file has something in it that dlock did not write: break that lock, or delete the file",
);

/// A failed statement.
pub(crate) fn failed(cause: sqlx::Error) -> Failure<bool> {
    classify(&cause).failure(cause)
}

/// A file could not be opened or prepared: nothing has been asked of it yet.
pub(crate) fn unopened(path: &Path, cause: sqlx::Error) -> DriverError {
    let class = classify(&cause);
    let message = format!("lock file {}: {}", path.display(), class.advice);
    let error = class.error(message).with_effect(Effect::None);
    error.with_source(cause)
}

/// Whether the error will pass in a moment.
pub(crate) fn is_busy(error: &DriverError) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref());
    let code = cause.and_then(code);
    matches!(code.map(|code| code & 0xff), Some(5 | 6 | 15))
}

/// The operating system's answer about a path.
pub(crate) fn no_file(what: &str, path: &Path, cause: io::Error) -> DriverError {
    let message = format!("{what} {}: {cause}", path.display());
    DriverError::new(ErrorKind::Unavailable, message).with_source(cause)
}

pub(crate) fn unfit(path: &Path, why: &str) -> DriverError {
    let message = format!("{} cannot be the lock file: {why}", path.display());
    DriverError::misuse(message)
}

pub(crate) fn unsupported(path: &Path, why: &str) -> DriverError {
    let message = format!("{} cannot be the lock file: {why}", path.display());
    DriverError::new(ErrorKind::Unsupported, message)
}

/// The path leads to another file than the open one.
pub(crate) fn replaced(path: &Path) -> DriverError {
    let message = format!(
        "the lock file {} was moved, deleted or replaced while it was in use: connect again, and keep cleaners of old files away from it",
        path.display()
    );
    DriverError::new(ErrorKind::Unavailable, message)
}

/// A record was written after this machine booted, by a machine that booted at another time.
pub(crate) fn other_kernel(path: &Path, theirs: &str, ours: &str) -> DriverError {
    let message = format!(
        "another kernel (boot {theirs}) writes the lock file {}, this one is boot {ours}: a file's locks hold within one machine, \
         so nothing was changed. If no other machine, virtual machine or time namespace uses it, the clock was set back since: \
         stop all processes that use the file and delete it",
        path.display()
    );
    DriverError::misuse(message)
}

/// The request's turn came after its give-up: nothing was done.
pub(crate) fn late() -> DriverError {
    DriverError::unavailable("the request came to the lock file after its time and was dropped")
        .with_retry(RetryClass::Now)
}

pub(crate) fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver was closed")
}

fn classify(cause: &sqlx::Error) -> &'static Class {
    match cause {
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } => &GARBLED,
        _ => code(cause).map_or(&OTHER, by_code),
    }
}

fn by_code(code: i32) -> &'static Class {
    let row = |code| TABLE.iter().find(|class| class.code == code);
    row(code).or_else(|| row(code & 0xff)).unwrap_or(&OTHER)
}

/// SQLite's extended result code.
fn code(cause: &sqlx::Error) -> Option<i32> {
    cause.as_database_error()?.code()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{GARBLED, OTHER, TABLE, by_code, classify};
    use dlock_core::{Effect, ErrorKind, RetryClass};
    use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
    use std::collections::HashSet;

    #[test]
    fn codes_have_the_row_that_was_meant() {
        for (code, row) in [
            (5, 5),       // BUSY
            (261, 5),     // BUSY_RECOVERY
            (517, 5),     // BUSY_SNAPSHOT
            (8, 8),       // READONLY
            (1032, 1032), // READONLY_DBMOVED
            (1544, 8),    // READONLY_DIRECTORY
            (778, 10),    // IOERR_WRITE
            (4874, 4874), // IOERR_SHMSIZE
            (11, 11),     // CORRUPT
            (267, 11),    // CORRUPT_VTAB
            (13, 13),     // FULL
            (14, 14),     // CANTOPEN
            (270, 14),    // CANTOPEN_NOTEMPDIR
            (26, 26),     // NOTADB
            (3091, 19),   // CONSTRAINT_DATATYPE
            (99, 0),      // unknown to the table
        ] {
            assert_eq!(by_code(code).code, row, "{code}");
        }
        assert_eq!(classify(&sqlx::Error::WorkerCrashed), &OTHER);
        assert_eq!(classify(&sqlx::Error::Decode("x".into())), &GARBLED);
    }

    #[test]
    fn only_a_failing_file_leaves_the_effect_open() {
        let open: Vec<_> = TABLE
            .iter()
            .filter(|class| class.effect == Effect::Unknown)
            .map(|class| class.code)
            .collect();
        assert_eq!(open, [1, 7, 10, 11]);
        assert_eq!(OTHER.effect, Effect::Unknown);
        let busy = by_code(5);
        assert_eq!(
            (busy.kind, busy.retry, busy.link),
            (ErrorKind::Unavailable, RetryClass::Later, false)
        );
    }

    #[test]
    fn each_code_has_one_row() {
        let codes: HashSet<_> = TABLE.iter().map(|class| class.code).collect();
        assert_eq!(codes.len(), TABLE.len());
    }

    #[tokio::test]
    async fn the_native_client_tells_the_code() {
        let options = SqliteConnectOptions::new().in_memory(true);
        let mut native = options.connect().await.unwrap();
        let error = sqlx::query("SELECT * FROM nothing")
            .fetch_all(&mut native)
            .await
            .unwrap_err();
        assert_eq!(classify(&error).code, 1);
        native.close().await.unwrap();
    }
}
