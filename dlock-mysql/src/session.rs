//! What a server is asked, and told, before it is trusted with a lock.

use crate::{
    commands::{self, COLUMNS, Statements},
    config::MysqlConfig,
    error,
};
use dlock_core::{DriverError, Result};
use sqlx::{MySqlConnection, Row, mysql::MySqlRow};
use std::{collections::HashMap, time::Duration};

/// Which of the two families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    Mariadb,
    Mysql,
}

/// What a new connection's server said.
#[derive(Debug)]
pub(crate) struct Greeting {
    pub(crate) flavour: Flavour,
    /// The connection's id there: what `KILL QUERY` wants.
    pub(crate) id: u64,
    /// The server's time, read last.
    pub(crate) now: Duration,
    /// Global variables, as far as they are there.
    variables: HashMap<String, String>,
}

/// Makes a session fit for the statements, whatever the server's defaults and `init_connect` say, and refuses a server that cannot keep a lock.
pub(crate) async fn greet(native: &mut MySqlConnection) -> Result<Greeting> {
    let said = sqlx::raw_sql("SELECT VERSION(), CONNECTION_ID()");
    let row = said
        .fetch_one(&mut *native)
        .await
        .map_err(error::unreached)?;
    let (version, id) = read(&row).map_err(error::unreached)?;
    let flavour = flavour(&version)?;
    let settings = match flavour {
        Flavour::Mariadb => MARIADB,
        Flavour::Mysql => MYSQL,
    };
    let set = sqlx::raw_sql(settings).execute(&mut *native).await;
    set.map_err(error::unreached)?;
    let shown = sqlx::raw_sql(VARIABLES).fetch_all(&mut *native).await;
    let rows = shown.map_err(error::unreached)?;
    let variables: HashMap<String, String> = rows
        .iter()
        .filter_map(|row| Some((row.try_get(0).ok()?, row.try_get(1).ok()?)))
        .collect();
    if let Some(setting) = read_only(&variables) {
        return Err(DriverError::unavailable(format!(
            "the server is read-only ({setting}): it is a replica, or a failover is under way; connect to the primary"
        )));
    }
    let (now, is_set) = commands::clock(native).await.map_err(error::unreached)?;
    if is_set {
        let message = "the session has a time of its own, not the server's: see whether init_connect or a proxy sets `timestamp`";
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
    /// What of the server's settings voids a lock, in words.
    pub(crate) fn doubts(&self) -> Vec<String> {
        let on = |name: &str| self.is(name, &["ON", "1"]);
        let mut doubts = Vec::new();
        if let Some(flush) = self.variables.get("innodb_flush_log_at_trx_commit")
            && flush != "1"
        {
            doubts.push(format!(
                "innodb_flush_log_at_trx_commit is {flush}: a crash forgets locks given in its last second, and their tokens; set 1"
            ));
        }
        if on("log_bin") && !self.is("sync_binlog", &["1"]) {
            let message = "sync_binlog is not 1: after a crash a replica may lack locks that were given; set 1";
            doubts.push(message.to_owned());
        }
        if on("wsrep_on") {
            let message = "this is a Galera node: write dlock's table through one node only, as two nodes refuse each other at commit";
            doubts.push(message.to_owned());
        }
        doubts
    }

    fn is(&self, name: &str, values: &[&str]) -> bool {
        let found = self.variables.get(name);
        found.is_some_and(|value| values.contains(&&**value))
    }
}

/// Whether the server follows another one, where the user may know.
pub(crate) async fn follows(native: &mut MySqlConnection) -> bool {
    // The first is not known to MySQL before 8.0.22, the second no more since 8.4; both end where the user may not know.
    for asked in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        if let Ok(rows) = sqlx::raw_sql(asked).fetch_all(&mut *native).await {
            return !rows.is_empty();
        }
    }
    false
}

/// Looks at the table's columns, and makes it when it is not there and may be made.
pub(crate) async fn check_table(
    native: &mut MySqlConnection,
    config: &MysqlConfig,
    sql: &Statements,
) -> Result<()> {
    let place = config.place()?;
    let mut found = columns(native, place).await?;
    if found.is_empty() && config.creates() {
        let made = sqlx::raw_sql(sql.create.clone())
            .execute(&mut *native)
            .await;
        made.map_err(|cause| {
            let refused = error::unreached(cause);
            let message = format!(
                "dlock's table {} is not there and cannot be made ({refused}): {REMEDY}",
                config.table()
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
            config.table()
        );
        return Err(error::misuse(message));
    }
    let differs = difference(&found);
    if differs.is_empty() {
        return Ok(());
    }
    Err(error::misuse(format!(
        "the table {} is not dlock's, or an older dlock's, and was left as it is: {}. Name another one with dlock.table, or drop it while nobody uses it",
        config.table(),
        differs.join("; ")
    )))
}

/// A column as the server tells it.
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

/// How the columns differ from ours, in words.
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

fn read(row: &MySqlRow) -> sqlx::Result<(String, u64)> {
    Ok((row.try_get(0)?, row.try_get(1)?))
}

/// `10.11.19-MariaDB-…`, perhaps behind `5.5.5-`, or `8.0.36`.
fn flavour(version: &str) -> Result<Flavour> {
    let is_mariadb = version.to_ascii_lowercase().contains("mariadb");
    let number = version
        .strip_prefix("5.5.5-")
        .filter(|_| is_mariadb)
        .unwrap_or(version);
    let mut parts = number
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let found = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let (flavour, name, least) = if is_mariadb {
        (Flavour::Mariadb, "MariaDB", (10, 6))
    } else {
        (Flavour::Mysql, "MySQL", (8, 0))
    };
    if found >= least {
        return Ok(flavour);
    }
    Err(error::unsupported(format!(
        "the server is {name} {version:?}: dlock needs MariaDB 10.6 or MySQL 8.0, or newer"
    )))
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

/// What is not there is not shown, so one text serves every server.
const VARIABLES: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', 'innodb_read_only', \
    'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'wsrep_on')";

/// A wait for a row's lock ends after 1 s, one for the table's or a global lock after 1 s, and the statement as a whole after 1 s: together they
/// are what makes an acquire late. A mode of SQL of our own, as others change what `''`, `||` or an assignment mean. An idle session ends after
/// two minutes; the client leaves it after one. Rows left out of an answer (`sql_select_limit`) would read as locks that are not there.
const MARIADB: &str = "SET SESSION sql_mode = 'STRICT_TRANS_TABLES', time_zone = '+00:00', autocommit = 1, innodb_lock_wait_timeout = 1, \
    lock_wait_timeout = 1, wait_timeout = 120, sql_select_limit = 18446744073709551615, sql_safe_updates = 0, tx_isolation = 'REPEATABLE-READ', max_statement_time = 1";

/// The same; `max_execution_time` ends only reading statements, so a write that runs on is ended by `KILL QUERY` from another connection.
const MYSQL: &str = "SET SESSION sql_mode = 'STRICT_TRANS_TABLES', time_zone = '+00:00', autocommit = 1, innodb_lock_wait_timeout = 1, \
    lock_wait_timeout = 1, wait_timeout = 120, sql_select_limit = 18446744073709551615, sql_safe_updates = 0, transaction_isolation = 'REPEATABLE-READ', max_execution_time = 1000";

const REMEDY: &str = "run what `dlock schema` prints, or grant CREATE on it";

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Column, Flavour, Greeting, difference, flavour, read_only};
    use dlock_core::ErrorKind;
    use std::{collections::HashMap, time::Duration};

    fn variables(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn servers_are_told_apart_and_old_ones_refused() {
        for (version, wanted) in [
            ("10.11.19-MariaDB-0+deb12u1", Some(Flavour::Mariadb)),
            ("5.5.5-10.6.1-MariaDB", Some(Flavour::Mariadb)),
            ("12.0.2-MariaDB", Some(Flavour::Mariadb)),
            ("8.0.36", Some(Flavour::Mysql)),
            ("8.4.0-commercial", Some(Flavour::Mysql)),
            ("9.1.0", Some(Flavour::Mysql)),
            ("10.5.9-MariaDB", None),
            ("5.7.44-log", None),
            ("", None),
        ] {
            match (flavour(version), wanted) {
                (Ok(found), Some(wanted)) => assert_eq!(found, wanted, "{version}"),
                (Err(error), None) => assert_eq!(error.kind(), ErrorKind::Unsupported),
                (found, wanted) => panic!("{version}: {found:?} instead of {wanted:?}"),
            }
        }
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
        let doubts = |pairs: &[(&str, &str)]| {
            let greeting = Greeting {
                flavour: Flavour::Mysql,
                id: 1,
                now: Duration::ZERO,
                variables: variables(pairs),
            };
            greeting.doubts()
        };
        let good = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("log_bin", "ON"),
            ("sync_binlog", "1"),
            ("wsrep_on", "OFF"),
        ];
        assert!(doubts(&good).is_empty());
        assert!(doubts(&[("log_bin", "OFF"), ("sync_binlog", "0")]).is_empty());
        for (pairs, word) in [
            (
                &[("innodb_flush_log_at_trx_commit", "2")][..],
                "innodb_flush_log_at_trx_commit is 2",
            ),
            (&[("log_bin", "ON"), ("sync_binlog", "0")], "sync_binlog"),
            (&[("wsrep_on", "ON")], "Galera"),
        ] {
            let said = doubts(pairs);
            assert!(said.len() == 1 && said[0].contains(word), "{said:?}");
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
