//! Checks of the server: settings that may void a lock, with their remedies; and dead rows, also later.

use crate::{
    commands::{self, NOW},
    connection::now,
    store::unreadable,
};
use dlock_core::driver::{Finding, Result, kit::log_findings};
use sqlx::{Row, postgres::PgRow};
use std::sync::atomic::{AtomicI64, Ordering};

/// What is asked: one row. It needs no right but those of a user that takes locks; a standby's state that this user may
/// not see counts as asynchronous where no standby is waited for. A reader of a logical slot cannot be promoted.
pub(crate) fn settings(table: &str) -> String {
    format!(
        "SELECT current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes, \
         current_setting('synchronous_commit') AS synchronous_commit, \
         (SELECT relpersistence = 'u' FROM pg_class WHERE oid = {}::regclass::oid) AS unlogged, \
         EXISTS (SELECT FROM pg_stat_replication r WHERE state IS DISTINCT FROM 'backup' \
         AND NOT EXISTS (SELECT FROM pg_replication_slots WHERE active_pid = r.pid AND slot_type = 'logical') \
         AND (sync_state IN ('async', 'potential') OR current_setting('synchronous_commit') IN ('off', 'local') \
         OR sync_state IS NULL AND current_setting('synchronous_standby_names') = '')) AS asynchronous, \
         {} AS dead, (SELECT max(extract(epoch FROM clock_timestamp() - xact_start))::bigint FROM pg_stat_activity \
         WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()) AS oldest, {NOW} AS now",
        commands::literal(table),
        commands::dead(table)
    )
}

/// What the row means for a lock.
pub(crate) fn findings(table: &str, dead: &Dead, row: &PgRow) -> Result<Vec<Finding>> {
    let settings = Settings::read(row).map_err(unreadable)?;
    let mut found = settings.findings(table);
    found.extend(many_dead(table, settings.dead));
    dead.tell(settings.dead);
    found.push(Finding::clocks(now(row).map_err(unreadable)?));
    Ok(found)
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
    /// The age of the oldest transaction with a snapshot, in seconds, of those that this user may see.
    oldest: Option<i64>,
}

impl Settings {
    fn read(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            fsync: row.try_get("fsync")?,
            full_page_writes: row.try_get("full_page_writes")?,
            synchronous_commit: row.try_get("synchronous_commit")?,
            is_unlogged: row.try_get("unlogged")?,
            is_asynchronous: row.try_get("asynchronous")?,
            dead: row.try_get("dead")?,
            oldest: row.try_get("oldest")?,
        })
    }

    fn findings(&self, table: &str) -> Vec<Finding> {
        let judge = |is_bad: bool, good: &str, bad: &str, remedy: &str| {
            if is_bad {
                Finding::warning(bad, remedy)
            } else {
                Finding::ok(good)
            }
        };
        let oldest = self.oldest.unwrap_or_default();
        vec![
            judge(
                self.fsync == "off",
                "fsync is on",
                "fsync is off: a crash of the machine may lose every lock",
                "set it to on",
            ),
            judge(
                self.full_page_writes == "off",
                "full_page_writes is on",
                "full_page_writes is off: a crash of the machine may damage the table of locks",
                "set it to on",
            ),
            judge(
                self.synchronous_commit == "off",
                &format!("synchronous_commit is {}", self.synchronous_commit),
                "synchronous_commit is off: a crash of the server loses its last locks and grants them again",
                "set it to on, for this user at least (ALTER ROLE .. SET synchronous_commit = on)",
            ),
            judge(
                self.is_unlogged,
                &format!("the table {table} is logged"),
                &format!(
                    "the table {table} is unlogged: a crash of the server empties it, and every lock is free"
                ),
                &format!("run ALTER TABLE {table} SET LOGGED"),
            ),
            judge(
                self.is_asynchronous,
                "no standby follows asynchronously, as far as this user may see",
                "a standby follows asynchronously: if it is promoted, it lacks the last locks and grants them again",
                "name it in synchronous_standby_names, or let the resource check the fencing token",
            ),
            judge(
                oldest > LONG,
                "no old transaction keeps dead rows, as far as this user may see",
                &format!(
                    "a transaction is open for {oldest} s: each request reads the rows that it keeps from being removed"
                ),
                "end it: see backend_xmin and xact_start in pg_stat_activity",
            ),
        ]
    }
}

/// Versions of rows that PostgreSQL cannot remove, which slow each request down: how many were warned of last.
#[derive(Debug, Default)]
pub(crate) struct Dead(AtomicI64);

impl Dead {
    /// Logs that there are many, and again when they have doubled.
    pub(crate) fn warn(&self, table: &str, dead: i64) {
        let warned = self.0.load(Ordering::Relaxed);
        let found = many_dead(table, dead);
        if found.is_none() || dead / 2 >= warned {
            self.tell(dead);
            log_findings("postgres", &Ok(found.into_iter().collect()));
        }
    }

    /// Notes that so many were told.
    fn tell(&self, dead: i64) {
        let told = if dead < MANY_DEAD { 0 } else { dead };
        self.0.store(told, Ordering::Relaxed);
    }
}

fn many_dead(table: &str, dead: i64) -> Option<Finding> {
    (dead >= MANY_DEAD).then(|| {
        Finding::warning(
            format!("the table {table} has {dead} dead row versions, and each request reads some of them"),
            "see that autovacuum is on, and end the transaction or drop the replication slot with the oldest backend_xmin in \
             pg_stat_activity, or xmin in pg_replication_slots",
        )
    })
}

/// Longer than a request of an application takes, in seconds: renewals of many leases would slow down.
const LONG: i64 = 600;
/// Ten times what makes PostgreSQL clean the table, so something prevents it.
const MANY_DEAD: i64 = 10_000;

#[cfg(test)]
mod tests {
    use super::Settings;
    use dlock_core::driver::Severity;

    fn good() -> Settings {
        Settings {
            fsync: "on".to_owned(),
            full_page_writes: "on".to_owned(),
            synchronous_commit: "on".to_owned(),
            is_unlogged: false,
            is_asynchronous: false,
            dead: 0,
            oldest: None,
        }
    }

    #[test]
    fn settings_that_void_a_lock_are_named_with_their_remedy() {
        let table = "\"ops\".\"locks\"";
        let bad = |settings: Settings| {
            let found = settings.findings(table).into_iter();
            let found = found.filter(|finding| finding.severity > Severity::Ok);
            found.collect::<Vec<_>>()
        };
        assert!(bad(good()).is_empty());
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
            (
                Settings {
                    oldest: Some(601),
                    ..good()
                },
                "601 s",
                "end it",
            ),
        ];
        for (settings, word, remedy) in cases {
            let found = bad(settings);
            assert!(
                found.len() == 1
                    && found[0].what.contains(word)
                    && found[0].remedy.contains(remedy),
                "{found:?}"
            );
        }
    }
}
