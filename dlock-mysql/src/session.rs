//! Session set-up: configures each new session and checks the server before it may keep a lock.

use crate::{
    commands::{self, COLUMNS},
    config::MysqlConfig,
    connection::Session,
    error,
    settings::Flavour,
};
use dlock_core::driver::{DriverError, Finding, Result, kit::Dialed};
use sqlx::{AssertSqlSafe, MySqlConnection, Row, mysql::MySqlRow};
use std::{collections::HashMap, time::Duration};

/// Sets up a session for the statements, whatever the server's defaults and `init_connect` say. It refuses a
/// server that cannot keep a lock.
///
/// The settings are read back, because a proxy may have applied the `SET` to another session.
pub(crate) async fn greet(mut native: MySqlConnection) -> Result<Dialed<Session>> {
    let said = sqlx::raw_sql(commands::ready(HELLO.to_owned()));
    let row = said.fetch_one(&mut native).await;
    let row = row.map_err(error::unreached)?;
    let (version, id, before) = read(&row).map_err(error::unreached)?;
    let flavour = Flavour::of(&version)?;
    let set = sqlx::raw_sql(AssertSqlSafe(flavour.set()));
    set.execute(&mut native).await.map_err(error::unreached)?;
    let shown = sqlx::raw_sql(AssertSqlSafe(flavour.show()));
    let rows = shown.fetch_all(&mut native).await;
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
    let time = commands::clock(&mut native).await;
    let time = time.map_err(error::unreached)?;
    if time == before {
        let message = "the time of the session stands still: see whether a proxy sets `timestamp`";
        return Err(DriverError::unavailable(message));
    }
    let session = Session {
        native,
        id,
        flavour,
        findings: findings(&variables),
    };
    Ok(Dialed { session, time })
}

/// What the server's settings mean for a lock, by the variables that exist.
fn findings(variables: &HashMap<String, String>) -> Vec<Finding> {
    let is = |name: &str, values: &[&str]| {
        let found = variables.get(name);
        found.is_some_and(|value| values.contains(&&**value))
    };
    let mut found = vec![
        Finding::ok("the server takes writes, and sessions keep dlock's settings"),
        match variables.get("innodb_flush_log_at_trx_commit") {
            // MariaDB's 3 flushes twice.
            Some(flush) if !["1", "3"].contains(&&**flush) => Finding::warning(
                format!(
                    "innodb_flush_log_at_trx_commit is {flush}: a crash forgets locks given in its last second, and their tokens"
                ),
                "set 1",
            ),
            _ => Finding::ok("each commit is written to the redo log"),
        },
    ];
    if is("innodb_flush_method", &["nosync"]) {
        found.push(Finding::warning(
            "innodb_flush_method is nosync: a crash of the machine may lose every lock",
            "set it to fsync or O_DIRECT",
        ));
    }
    if is("innodb_doublewrite", &["OFF", "0", "DETECT_ONLY"]) {
        found.push(Finding::warning(
            "innodb_doublewrite is off or only detects: a crash may damage the table of locks",
            "set it to ON",
        ));
    }
    if is("log_bin", &["ON", "1"]) {
        found.push(if is("sync_binlog", &["1"]) {
            Finding::ok("each commit is flushed to the binary log")
        } else {
            Finding::warning(
                "sync_binlog is not 1: a crash of the machine may forget the last locks, or a replica may lack them",
                "set 1",
            )
        });
    }
    if is("wsrep_on", &["ON", "1"]) {
        found.push(Finding::warning(
            "this is a Galera node: two nodes refuse each other at commit",
            "write dlock's table through one node only",
        ));
    }
    found
}

/// What the server's settings and its replicas mean for a lock.
pub(crate) async fn diagnose(session: &mut Session) -> Vec<Finding> {
    let mut found = session.findings.clone();
    let native = &mut session.native;
    match follows(native).await {
        Some(true) => found.push(Finding::void(
            "this server follows another one: locks taken here are not seen there",
            "connect to the primary",
        )),
        Some(false) => {}
        None => {
            let right = match session.flavour {
                Flavour::Mariadb => "REPLICA MONITOR",
                Flavour::Mysql => "REPLICATION CLIENT",
            };
            found.push(unread("whether this server follows another one", right));
        }
    }
    match followers(native).await {
        Some(0) => {}
        Some(_) => found.push(match is_acknowledged(native).await {
            true => Finding::ok("replicas follow semi-synchronously"),
            false => Finding::warning(
                "replicas follow asynchronously: one that is promoted lacks the last locks and grants them again",
                "use semi-synchronous replication, and if it is on, see why no replica acknowledges \
                 (Rpl_semi_sync_master_status or Rpl_semi_sync_source_status is OFF); or let the resource check the \
                 fencing token",
            ),
        }),
        None => found.push(unread("how replicas follow", "PROCESS")),
    }
    if let Ok(time) = commands::clock(native).await {
        found.push(Finding::clocks(time));
    }
    found
}

/// A user that only takes locks may not ask for replication.
fn unread(what: &str, right: &str) -> Finding {
    Finding::ok(format!(
        "not checked: {what}; grant {right} to have it checked"
    ))
}

/// Whether the server is a replica; `None`: the user lacks the right to ask.
async fn follows(native: &mut MySqlConnection) -> Option<bool> {
    // MySQL has the first since 8.0.22 and dropped the second in 8.4. Both fail without the right to ask.
    for asked in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        if let Ok(rows) = sqlx::raw_sql(asked).fetch_all(&mut *native).await {
            return Some(!rows.is_empty());
        }
    }
    None
}

/// How many replicas follow; `None`: the user lacks the right to ask.
async fn followers(native: &mut MySqlConnection) -> Option<i64> {
    // Without the right, the list of threads has only those of the user, and says nothing of the others.
    count(native, RIGHT).await.filter(|rows| *rows > 0)?;
    count(native, FOLLOWERS).await
}

async fn count(native: &mut MySqlConnection, sql: &'static str) -> Option<i64> {
    let row = sqlx::raw_sql(sql).fetch_one(native).await;
    row.ok()?.try_get(0).ok()
}

/// Whether commits wait for a replica. The status says so, not the variable: where no replica acknowledges in time,
/// they go on without.
async fn is_acknowledged(native: &mut MySqlConnection) -> bool {
    let rows = sqlx::raw_sql(SEMI_SYNC).fetch_all(native).await;
    rows.is_ok_and(|rows| {
        let mut values = rows.iter().map(|row| row.try_get::<String, _>(1));
        values.any(|value| value.is_ok_and(|value| value == "ON"))
    })
}

/// Checks the table's columns, and makes a missing table if the configuration allows it.
pub(crate) async fn check_table(native: &mut MySqlConnection, config: &MysqlConfig) -> Result<()> {
    let place = config.place()?;
    let mut found = columns(native, place).await?;
    if found.is_empty() && config.table.create {
        let create = commands::ready(commands::ddl(&config.qualified()?));
        let made = sqlx::raw_sql(create).execute(&mut *native).await;
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
            kind: text(1)?.to_uppercase(),
            key: text(2)?,
            engine: text(3)?,
        })
    };
    let read: sqlx::Result<Vec<Column>> = rows.iter().map(read).collect();
    read.map_err(error::unreached)
}

/// How the columns differ from those of dlock's table, in words.
fn difference(found: &[Column]) -> Vec<String> {
    let mut differs = Vec::new();
    for (name, kind) in COLUMNS {
        let Some(column) = found.iter().find(|column| column.name == name) else {
            differs.push(format!("{name} is missing"));
            continue;
        };
        if column.kind != kind {
            differs.push(format!("{name} is {} instead of {kind}", column.kind));
        }
        match (name == COLUMNS[0].0, &*column.key) {
            (true, "PRI") | (false, "") => {}
            (true, _) => differs.push(format!("{name} is not the primary key")),
            (false, _) => differs.push(format!("{name} has an index, which makes deadlocks")),
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

/// Names, types as in a `CREATE TABLE` (numbers have no length there), kinds of index, and the engine.
const DESCRIBE: &str = "SELECT c.COLUMN_NAME, \
    CONCAT(c.DATA_TYPE, COALESCE(CONCAT('(', c.CHARACTER_OCTET_LENGTH, ')'), ''), IF(c.IS_NULLABLE = 'YES', '', ' NOT NULL')), \
    c.COLUMN_KEY, COALESCE(t.ENGINE, '') \
    FROM information_schema.COLUMNS c JOIN information_schema.TABLES t ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME \
    WHERE c.TABLE_SCHEMA = ? AND c.TABLE_NAME = ? ORDER BY c.ORDINAL_POSITION";

/// `UTC_TIMESTAMP` obeys `SET timestamp`: if two readings are equal, the session's time stands still.
const HELLO: &str = "SELECT VERSION(), CONNECTION_ID(), {now}";

/// Shows rows to a user with the right `PROCESS` only, as the threads of others.
const RIGHT: &str = "SELECT COUNT(*) FROM information_schema.INNODB_CMP";

const FOLLOWERS: &str =
    "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%'";

/// By its old name and its new one.
const SEMI_SYNC: &str = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_status')";

const REMEDY: &str = "run what `dlock schema` prints, or grant CREATE on it";

#[cfg(test)]
mod tests {
    use super::{
        COLUMNS, Column, Finding, Flavour, MysqlConfig, Session, diagnose, difference, findings,
        followers, is_acknowledged, read_only,
    };
    use crate::connection::Dialer;
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::driver::{Severity, kit::Dialer as _};
    use sqlx::{AssertSqlSafe, ConnectOptions, MySqlConnection};
    use std::{
        collections::HashMap,
        time::{Duration, Instant},
    };

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
            let found = findings(&variables(pairs)).into_iter();
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
        assert!(bad(&[("innodb_flush_log_at_trx_commit", "3")]).is_empty());
        for (pairs, word) in [
            (
                &[("innodb_flush_log_at_trx_commit", "2")][..],
                "innodb_flush_log_at_trx_commit is 2",
            ),
            (&[("innodb_flush_method", "nosync")], "nosync"),
            (&[("innodb_doublewrite", "OFF")], "doublewrite"),
            (&[("innodb_doublewrite", "DETECT_ONLY")], "doublewrite"),
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

    /// Semi-synchronous replication is on throughout; first no replica acknowledges, then one does.
    #[tokio::test(flavor = "multi_thread")]
    async fn replicas_that_acknowledge_nothing_are_found_though_semi_sync_is_on() {
        let start = |args: &[&str]| {
            let extra_args = args.iter().map(|&arg| arg.to_owned()).collect();
            MariadbServer::start(MariadbOptions { extra_args }).unwrap()
        };
        let primary = start(&[
            "--server-id=1",
            "--log-bin",
            "--loose-rpl-semi-sync-master-enabled=ON",
            "--loose-rpl-semi-sync-master-timeout=1",
        ]);
        let config: MysqlConfig = primary.url().parse().unwrap();
        let dialed = Dialer::new(&config).dial().await.unwrap();
        let mut session = dialed.session;
        if session.flavour == Flavour::Mysql {
            return; // its semi-synchronous replication is a plugin
        }
        let replica = start(&["--server-id=2"]);
        let mut native = config.options().connect().await.unwrap();
        run(&mut native, "CREATE TABLE pulse (n INT)").await;

        let config: MysqlConfig = replica.url().parse().unwrap();
        let mut follower = config.options().connect().await.unwrap();
        let port = primary.addr().port();
        let source = format!(
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = 'root', \
             MASTER_SSL = 0, MASTER_SSL_VERIFY_SERVER_CERT = 0"
        );
        run(&mut follower, &source).await;
        run(&mut follower, "START SLAVE").await;
        until("a replica", async || followers(&mut native).await > Some(0)).await;
        until("a commit without acknowledgement", async || {
            run(&mut native, "INSERT INTO pulse VALUES (1)").await;
            !is_acknowledged(&mut native).await
        })
        .await;
        let found = replication(&mut session).await;
        assert_eq!(found.severity, Severity::Warning, "{found}");
        assert!(found.what.contains("asynchronously"), "{found}");

        let longer = "SET GLOBAL rpl_semi_sync_master_timeout = 60000";
        run(&mut native, longer).await;
        run(&mut follower, "STOP SLAVE").await;
        run(&mut follower, "SET GLOBAL rpl_semi_sync_slave_enabled = ON").await;
        run(&mut follower, "START SLAVE").await;
        until("an acknowledgement", async || {
            run(&mut native, "INSERT INTO pulse VALUES (1)").await;
            is_acknowledged(&mut native).await
        })
        .await;
        let found = replication(&mut session).await;
        assert_eq!(found.severity, Severity::Ok, "{found}");
    }

    /// What is found about the replicas.
    async fn replication(session: &mut Session) -> Finding {
        let found = diagnose(session).await.into_iter();
        let found = found.filter(|finding| finding.what.contains("replicas follow"));
        let found: Vec<_> = found.collect();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    }

    async fn run(native: &mut MySqlConnection, sql: &str) {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(native);
        done.await.unwrap();
    }

    /// Polls a condition until it holds.
    async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition().await {
            assert!(Instant::now() < end, "waited in vain for {what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[test]
    fn a_table_that_is_not_ours_is_told_apart_column_by_column() {
        let ours = || -> Vec<Column> {
            let column = |(name, kind): (&str, &str)| Column {
                name: name.to_owned(),
                kind: kind.to_owned(),
                key: if name == "name" { "PRI" } else { "" }.to_owned(),
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
        let said = changed(&|all| all[0].kind = "VARBINARY(64) NOT NULL".to_owned());
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
