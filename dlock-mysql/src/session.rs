//! Session set-up: configures each new session and checks the server before it may keep a lock.

use crate::{
    commands::{self, COLUMNS, Statements},
    config::MysqlConfig,
    connection::Session,
    error,
    settings::{Flavour, SEMI_SYNC},
};
use dlock_core::driver::{DriverError, Finding, Result};
use sqlx::{AssertSqlSafe, MySqlConnection, Row, mysql::MySqlRow};
use std::{collections::HashMap, time::Duration};

/// What the server reported on a new connection.
#[derive(Debug)]
pub(crate) struct Greeting {
    pub(crate) flavour: Flavour,
    /// The connection's id on the server, for `KILL QUERY`.
    pub(crate) id: u64,
    /// The server's time, read last.
    pub(crate) now: Duration,
    /// Variables of the session and of the server, without those that do not exist.
    variables: HashMap<String, String>,
}

/// Sets up a session for the statements, whatever the server's defaults and `init_connect` say. It refuses a
/// server that cannot keep a lock.
///
/// The settings are read back, because a proxy may have applied the `SET` to another session.
pub(crate) async fn greet(native: &mut MySqlConnection) -> Result<Greeting> {
    let said = sqlx::raw_sql(commands::ready(HELLO.to_owned()));
    let row = said
        .fetch_one(&mut *native)
        .await
        .map_err(error::unreached)?;
    let (version, id, before) = read(&row).map_err(error::unreached)?;
    let flavour = Flavour::of(&version)?;
    let set = sqlx::raw_sql(AssertSqlSafe(flavour.set()));
    set.execute(&mut *native).await.map_err(error::unreached)?;
    let shown = sqlx::raw_sql(AssertSqlSafe(flavour.show()));
    let rows = shown.fetch_all(&mut *native).await;
    let variables: HashMap<String, String> = rows
        .map_err(error::unreached)?
        .iter()
        .filter_map(|row| Some((row.try_get(0).ok()?, row.try_get(1).ok()?)))
        .collect();
    if let Some(setting) = read_only(&variables) {
        return Err(DriverError::unavailable(format!(
            "the server is read-only ({setting}): it is a replica, or a failover is under way; connect to the primary"
        )));
    }
    if let Some(setting) = flavour.unfit(&variables) {
        return Err(DriverError::unavailable(format!(
            "the session did not keep its settings ({setting}): connect to the server itself, or through a proxy that leaves each session to one client"
        )));
    }
    let now = commands::clock(native).await.map_err(error::unreached)?;
    if now == before {
        let message = "the time of the session stands still: see whether a proxy sets `timestamp`";
        return Err(DriverError::unavailable(message));
    }
    Ok(Greeting {
        flavour,
        id,
        now,
        variables,
    })
}

impl Greeting {
    /// What the server's settings mean for a lock.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let on = |name: &str| self.is(name, &["ON", "1"]);
        let mut found = vec![
            Finding::ok("the server takes writes, and sessions keep dlock's settings"),
            match self.variables.get("innodb_flush_log_at_trx_commit") {
                Some(flush) if flush != "1" => Finding::warning(
                    format!(
                        "innodb_flush_log_at_trx_commit is {flush}: a crash forgets locks given in its last second, and their tokens"
                    ),
                    "set 1",
                ),
                _ => Finding::ok("each commit is flushed to the redo log"),
            },
        ];
        if self.is("innodb_doublewrite", &["OFF", "0"]) {
            found.push(Finding::warning(
                "innodb_doublewrite is off: a crash may damage the table of locks",
                "set it to ON",
            ));
        }
        if on("log_bin") {
            found.push(if self.is("sync_binlog", &["1"]) {
                Finding::ok("each commit is flushed to the binary log")
            } else {
                Finding::warning(
                    "sync_binlog is not 1: after a crash a replica may lack locks that were given",
                    "set 1",
                )
            });
        }
        if on("wsrep_on") {
            found.push(Finding::warning(
                "this is a Galera node: two nodes refuse each other at commit",
                "write dlock's table through one node only",
            ));
        }
        found
    }

    /// Whether commits wait for a replica.
    pub(crate) fn is_confirmed(&self) -> bool {
        SEMI_SYNC.iter().any(|name| self.is(name, &["ON", "1"]))
    }

    fn is(&self, name: &str, values: &[&str]) -> bool {
        let found = self.variables.get(name);
        found.is_some_and(|value| values.contains(&&**value))
    }
}

/// What the server's settings and its replicas mean for a lock.
pub(crate) async fn diagnose(session: &mut Session) -> Vec<Finding> {
    let mut found = session.findings.clone();
    let native = &mut session.native;
    if follows(native).await {
        found.push(Finding::void(
            "this server follows another one: locks taken here are not seen there",
            "connect to the primary",
        ));
    }
    let asked = sqlx::raw_sql(FOLLOWERS).fetch_one(&mut *native).await;
    let followers = asked.and_then(|row| row.try_get::<i64, _>(0));
    if followers.is_ok_and(|followers| followers > 0) {
        found.push(if session.is_confirmed {
            Finding::ok("replicas follow semi-synchronously")
        } else {
            Finding::warning(
                "replicas follow asynchronously: one that is promoted lacks the last locks and grants them again",
                "use semi-synchronous replication, or let the resource check the fencing token",
            )
        });
    }
    if let Ok(time) = commands::clock(native).await {
        found.push(Finding::clocks(time));
    }
    found
}

/// Whether the server is a replica; `false` if the user lacks the right to ask.
async fn follows(native: &mut MySqlConnection) -> bool {
    // MySQL has the first since 8.0.22 and dropped the second in 8.4. Both fail without the right to ask.
    for asked in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        if let Ok(rows) = sqlx::raw_sql(asked).fetch_all(&mut *native).await {
            return !rows.is_empty();
        }
    }
    false
}

/// Checks the table's columns, and makes a missing table if the configuration allows it.
pub(crate) async fn check_table(
    native: &mut MySqlConnection,
    config: &MysqlConfig,
    sql: &Statements,
) -> Result<()> {
    let place = config.place()?;
    let mut found = columns(native, place).await?;
    if found.is_empty() && config.table.create {
        let made = sqlx::raw_sql(sql.create.clone())
            .execute(&mut *native)
            .await;
        made.map_err(|cause| {
            let refused = error::unreached(cause);
            let message = format!(
                "dlock's table {} is not there and cannot be made ({refused}): {REMEDY}",
                config.table.name
            );
            DriverError::new(refused.kind(), message)
                .with_retry(refused.retry())
                .with_source(refused)
        })?;
        found = columns(native, place).await?;
    }
    if found.is_empty() {
        let message = format!(
            "dlock's table {} is not there, or its user may not see it: {REMEDY}",
            config.table.name
        );
        return Err(DriverError::misuse(message));
    }
    let differs = difference(&found);
    if differs.is_empty() {
        return Ok(());
    }
    Err(DriverError::misuse(format!(
        "the table {} is not dlock's, or an older dlock's, and was left as it is: {}. Name another one with dlock.table, or drop it while it is unused",
        config.table.name,
        differs.join("; ")
    )))
}

/// A column as the server describes it.
#[derive(Debug, PartialEq, Eq)]
struct Column {
    name: String,
    kind: String,
    bytes: Option<u64>,
    nullable: bool,
    key: String,
    engine: String,
}

async fn columns(
    native: &mut MySqlConnection,
    (database, table): (&str, &str),
) -> Result<Vec<Column>> {
    let asked = sqlx::query(DESCRIBE).bind(database).bind(table);
    let rows = asked.fetch_all(native).await.map_err(error::unreached)?;
    let read = |row: &MySqlRow| -> sqlx::Result<Column> {
        let text = |at: usize| -> sqlx::Result<String> {
            let bytes: Vec<u8> = row.try_get_unchecked(at)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok(Column {
            name: text(0)?.to_lowercase(),
            kind: text(1)?.to_lowercase(),
            bytes: text(2)?.parse().ok(),
            nullable: text(3)? == "YES",
            key: text(4)?,
            engine: text(5)?,
        })
    };
    let read: sqlx::Result<Vec<Column>> = rows.iter().map(read).collect();
    read.map_err(error::unreached)
}

/// How the columns differ from those of dlock's table, in words.
fn difference(found: &[Column]) -> Vec<String> {
    let mut differs = Vec::new();
    for (name, kind, bytes, nullable, is_key) in COLUMNS {
        let wanted = described(kind, bytes, nullable);
        match found.iter().find(|column| column.name == name) {
            None => differs.push(format!("{name} is missing")),
            Some(column) => {
                let has = described(
                    &column.kind,
                    column.bytes.filter(|_| column.kind != "bigint"),
                    column.nullable,
                );
                if has != wanted {
                    differs.push(format!("{name} is {has} instead of {wanted}"));
                }
                match (is_key, &*column.key) {
                    (true, "PRI") | (false, "") => {}
                    (true, _) => differs.push(format!("{name} is not the primary key")),
                    (false, _) => {
                        differs.push(format!("{name} has an index, which makes deadlocks"))
                    }
                }
            }
        }
    }
    for column in found {
        if !COLUMNS.iter().any(|(name, ..)| *name == column.name) {
            differs.push(format!("{} is not ours", column.name));
        }
    }
    if let Some(column) = found.first()
        && !column.engine.eq_ignore_ascii_case("InnoDB")
    {
        differs.push(format!("its engine is {} instead of InnoDB", column.engine));
    }
    differs
}

fn described(kind: &str, bytes: Option<u64>, nullable: bool) -> String {
    let bytes = bytes.map_or_else(String::new, |bytes| format!("({bytes})"));
    let null = if nullable { "" } else { " NOT NULL" };
    format!("{}{bytes}{null}", kind.to_uppercase())
}

fn read(row: &MySqlRow) -> sqlx::Result<(String, u64, Duration)> {
    Ok((row.try_get(0)?, row.try_get(1)?, commands::time(row, 2)?))
}

fn read_only(variables: &HashMap<String, String>) -> Option<String> {
    let off = |value: &str| matches!(value, "OFF" | "0" | "");
    let names = ["read_only", "super_read_only", "innodb_read_only"];
    names.into_iter().find_map(|name| {
        let value = variables.get(name)?;
        (!off(value)).then(|| format!("{name} = {value}"))
    })
}

const DESCRIBE: &str = "SELECT c.COLUMN_NAME, c.DATA_TYPE, COALESCE(CAST(c.CHARACTER_OCTET_LENGTH AS CHAR), ''), c.IS_NULLABLE, \
    c.COLUMN_KEY, COALESCE(t.ENGINE, '') \
    FROM information_schema.COLUMNS c JOIN information_schema.TABLES t ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME \
    WHERE c.TABLE_SCHEMA = ? AND c.TABLE_NAME = ? ORDER BY c.ORDINAL_POSITION";

/// `UTC_TIMESTAMP` obeys `SET timestamp`: if two readings are equal, the session's time stands still.
const HELLO: &str = "SELECT VERSION(), CONNECTION_ID(), {now}";

/// Only replicas that this user may see.
const FOLLOWERS: &str =
    "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%'";

const REMEDY: &str = "run what `dlock schema` prints, or grant CREATE on it";

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Column, Flavour, Greeting, difference, read_only};
    use dlock_core::driver::Severity;
    use std::{collections::HashMap, time::Duration};

    fn variables(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn a_server_that_takes_no_writes_is_known_by_any_of_its_settings() {
        assert_eq!(read_only(&variables(&[("read_only", "OFF")])), None);
        assert_eq!(read_only(&variables(&[])), None);
        for (name, value) in [
            ("read_only", "ON"),
            ("super_read_only", "ON"),
            ("innodb_read_only", "1"),
            ("read_only", "NO_LOCK"),
        ] {
            assert_eq!(
                read_only(&variables(&[(name, value)])),
                Some(format!("{name} = {value}"))
            );
        }
    }

    #[test]
    fn settings_that_void_a_lock_are_named() {
        let bad = |pairs: &[(&str, &str)]| {
            let greeting = Greeting {
                flavour: Flavour::Mysql,
                id: 1,
                now: Duration::ZERO,
                variables: variables(pairs),
            };
            let found = greeting.findings().into_iter();
            let found = found.filter(|finding| finding.severity > Severity::Ok);
            found.collect::<Vec<_>>()
        };
        let good = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("innodb_doublewrite", "ON"),
            ("log_bin", "ON"),
            ("sync_binlog", "1"),
            ("wsrep_on", "OFF"),
        ];
        assert!(bad(&good).is_empty());
        assert!(bad(&[("log_bin", "OFF"), ("sync_binlog", "0")]).is_empty());
        for (pairs, word) in [
            (
                &[("innodb_flush_log_at_trx_commit", "2")][..],
                "innodb_flush_log_at_trx_commit is 2",
            ),
            (&[("innodb_doublewrite", "OFF")], "doublewrite"),
            (&[("log_bin", "ON"), ("sync_binlog", "0")], "sync_binlog"),
            (&[("wsrep_on", "ON")], "Galera"),
        ] {
            let found = bad(pairs);
            assert!(
                found.len() == 1 && found[0].what.contains(word),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_table_that_is_not_ours_is_told_apart_column_by_column() {
        let ours = || -> Vec<Column> {
            let column = |(name, kind, bytes, nullable, key): (&str, &str, _, _, bool)| Column {
                name: name.to_owned(),
                kind: kind.to_owned(),
                bytes,
                nullable,
                key: if key { "PRI" } else { "" }.to_owned(),
                engine: "InnoDB".to_owned(),
            };
            COLUMNS.map(column).into()
        };
        assert_eq!(difference(&ours()), [""; 0]);
        let changed = |change: &dyn Fn(&mut Vec<Column>)| {
            let mut columns = ours();
            change(&mut columns);
            difference(&columns).join("; ")
        };
        let said = changed(&|all| all[0].bytes = Some(64));
        assert_eq!(
            said,
            "name is VARBINARY(64) NOT NULL instead of VARBINARY(512) NOT NULL"
        );
        assert_eq!(changed(&|all| drop(all.remove(9))), "version is missing");
        assert_eq!(
            changed(&|all| all[0].key.clear()),
            "name is not the primary key"
        );
        assert_eq!(
            changed(&|all| all[1].key.push_str("UNI")),
            "owner has an index, which makes deadlocks"
        );
        assert_eq!(
            changed(&|all| all[0].engine = "MyISAM".to_owned()),
            "its engine is MyISAM instead of InnoDB"
        );
        let said = changed(&|all| {
            let mut extra = ours().remove(2);
            extra.name = "locked_by".to_owned();
            all.push(extra);
        });
        assert_eq!(said, "locked_by is not ours");
    }
}
