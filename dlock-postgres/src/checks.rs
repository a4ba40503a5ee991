//! Checks of the server: settings that may void a lock, each told when a driver connects, with its remedy; and dead
//! rows, also later.

use crate::{commands, connection::Answer};
use dlock_core::driver::Result;
use sqlx::{Row, postgres::PgRow};
use std::sync::atomic::{AtomicI64, Ordering};

/// What is asked: one row. It needs no right but those of a user that takes locks; a standby's state that this user may
/// not see counts as asynchronous where no standby is waited for.
pub(crate) fn settings(table: &str) -> String {
    format!(
        "SELECT current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes, \
         current_setting('synchronous_commit') AS synchronous_commit, \
         (SELECT relpersistence = 'u' FROM pg_class WHERE oid = {}::regclass::oid) AS unlogged, \
         EXISTS (SELECT FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup' \
         AND (sync_state IN ('async', 'potential') OR current_setting('synchronous_commit') IN ('off', 'local') \
         OR sync_state IS NULL AND current_setting('synchronous_standby_names') = '')) AS asynchronous, \
         {} AS dead",
        commands::literal(table),
        commands::dead(table)
    )
}

/// Warns of what was answered. A server that does not answer this can be used all the same.
pub(crate) fn warn(table: &str, dead: &Dead, asked: Result<Answer>) {
    let found = asked.map(|answer| answer.rows.first().map(Settings::read));
    match found {
        Ok(Some(Ok(settings))) => {
            for doubt in settings.doubts(table) {
                tracing::warn!("postgres: {doubt}");
            }
            dead.warn(table, settings.dead);
        }
        other => tracing::debug!(?other, "postgres: the server's settings could not be read"),
    }
}

#[derive(Clone, Debug)]
struct Settings {
    fsync: String,
    full_page_writes: String,
    synchronous_commit: String,
    is_unlogged: bool,
    /// A standby follows that no commit waits for.
    is_asynchronous: bool,
    /// Versions of rows that were not removed yet.
    dead: i64,
}

impl Settings {
    fn read(row: &PgRow) -> std::result::Result<Self, sqlx::Error> {
        Ok(Self {
            fsync: row.try_get("fsync")?,
            full_page_writes: row.try_get("full_page_writes")?,
            synchronous_commit: row.try_get("synchronous_commit")?,
            is_unlogged: row.try_get("unlogged")?,
            is_asynchronous: row.try_get("asynchronous")?,
            dead: row.try_get("dead")?,
        })
    }

    /// What may void a lock, and what to do about it.
    fn doubts(&self, table: &str) -> Vec<String> {
        let unlogged = format!(
            "the table {table} is unlogged: a crash of the server empties it, and every lock is free: run ALTER TABLE {table} SET LOGGED"
        );
        let doubts = [
            (
                self.fsync == "off",
                "fsync is off: a crash of the machine may lose every lock: set it to on",
            ),
            (
                self.full_page_writes == "off",
                "full_page_writes is off: a crash of the machine may damage the table of locks: set it to on",
            ),
            (
                self.synchronous_commit == "off",
                "synchronous_commit is off: a crash of the server loses its last locks and grants them again: set it to on, for this \
                 user at least (ALTER ROLE .. SET synchronous_commit = on)",
            ),
            (self.is_unlogged, &unlogged),
            (
                self.is_asynchronous,
                "a standby follows asynchronously: if it is promoted, it lacks the last locks and grants them again: name it in \
                 synchronous_standby_names, or let the resource check the fencing token",
            ),
        ];
        let doubts = doubts.into_iter().filter(|(holds, _)| *holds);
        doubts.map(|(_, words)| words.to_owned()).collect()
    }
}

/// Versions of rows that PostgreSQL cannot remove, which slow each request down: how many were warned of last.
#[derive(Debug, Default)]
pub(crate) struct Dead(AtomicI64);

impl Dead {
    /// Warns of many, and again when they have doubled.
    pub(crate) fn warn(&self, table: &str, dead: i64) {
        let warned = self.0.load(Ordering::Relaxed);
        if dead < MANY_DEAD {
            self.0.store(0, Ordering::Relaxed);
        } else if dead / 2 >= warned {
            self.0.store(dead, Ordering::Relaxed);
            tracing::warn!(
                "postgres: the table {table} has {dead} dead row versions, and each request reads some of them: end the transaction or \
                 drop the replication slot with the oldest backend_xmin in pg_stat_activity, or xmin in pg_replication_slots"
            );
        }
    }
}

/// Ten times what makes PostgreSQL clean the table, so something prevents it.
const MANY_DEAD: i64 = 10_000;

#[cfg(test)]
mod tests {
    use super::Settings;

    fn good() -> Settings {
        Settings {
            fsync: "on".to_owned(),
            full_page_writes: "on".to_owned(),
            synchronous_commit: "on".to_owned(),
            is_unlogged: false,
            is_asynchronous: false,
            dead: 0,
        }
    }

    #[test]
    fn settings_that_void_a_lock_are_named_with_their_remedy() {
        let table = "\"ops\".\"locks\"";
        assert!(good().doubts(table).is_empty());
        let off = || "off".to_owned();
        let cases = [
            (
                Settings {
                    fsync: off(),
                    ..good()
                },
                "fsync",
                "set it to on",
            ),
            (
                Settings {
                    full_page_writes: off(),
                    ..good()
                },
                "full_page_writes",
                "set it to on",
            ),
            (
                Settings {
                    synchronous_commit: off(),
                    ..good()
                },
                "synchronous_commit",
                "ALTER ROLE",
            ),
            (
                Settings {
                    is_unlogged: true,
                    ..good()
                },
                "unlogged",
                "ALTER TABLE \"ops\".\"locks\" SET LOGGED",
            ),
            (
                Settings {
                    is_asynchronous: true,
                    ..good()
                },
                "asynchronously",
                "synchronous_standby_names",
            ),
        ];
        for (settings, word, remedy) in cases {
            let doubts = settings.doubts(table);
            assert!(
                doubts.len() == 1 && doubts[0].contains(word) && doubts[0].contains(remedy),
                "{doubts:?}"
            );
        }
    }
}
