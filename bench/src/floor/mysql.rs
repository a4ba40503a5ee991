//! MySQL and MariaDB floor: the two statements of a cycle, alone, on the driver's client crate with its
//! default settings.
//!
//! These are the driver's own statements, on its table. So the difference is the work of the driver
//! around them: permits, clocks, limits, texts. Beside it stands the least that a lock could be: the
//! server's clock counts and the row stays there too, but there are no holds, no versions and no
//! not-after.

use crate::{Result, work::Contender};
use dlock_mysql::MysqlConfig;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, MySqlPool, SqlSafeStr, SqlStr,
    mysql::{MySqlConnectOptions, MySqlPoolOptions},
};
use std::sync::{Arc, LazyLock};
use tokio::{sync::Mutex, task::JoinSet};

/// The statements of the floor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Statements {
    /// The driver's statements.
    Same,
    /// A name, a holder, an end and a token.
    Thin,
}

/// One name, over any source of connections.
#[derive(Clone)]
pub(crate) struct TwoStatements {
    over: Over,
    name: String,
    statements: Statements,
}

/// The source of the connection.
#[derive(Clone)]
pub(crate) enum Over {
    One(Arc<Mutex<MySqlConnection>>),
    /// The crate's own pool, which checks a connection before it hands it out.
    Pool(MySqlPool),
}

impl Over {
    pub(crate) async fn one(url: &str) -> Result<Self> {
        Ok(Self::One(Arc::new(Mutex::new(connect(url).await?))))
    }

    pub(crate) async fn pool(url: &str, connections: u32) -> Result<Self> {
        let options: MySqlConnectOptions = url.parse()?;
        let pool = MySqlPoolOptions::new()
            .max_connections(connections)
            .connect_with(options.disable_statement_logging())
            .await?;
        Ok(Self::Pool(pool))
    }
}

pub(crate) async fn connect(url: &str) -> Result<MySqlConnection> {
    let options: MySqlConnectOptions = url.parse()?;
    Ok(options.disable_statement_logging().connect().await?)
}

/// Creates both tables, with a free row for each name.
pub(crate) async fn prepare(url: &str, names: &[String]) -> Result {
    let mut connection = connect(url).await?;
    let config: MysqlConfig = url.parse()?;
    let ours = config.with_table("floor_same".parse()?).schema();
    let ours = ours.split(';').next().unwrap_or_default();
    for (made, table, row) in [
        (THIN_TABLE, "floor_locks", "(?, NULL, 0, 0)"),
        (ours, "floor_same", "(?, NULL, 0, '', 0, 0, 0, 0, '', 0)"),
    ] {
        let made = AssertSqlSafe(made.to_owned());
        sqlx::raw_sql(made).execute(&mut connection).await?;
        for some in names.chunks(500) {
            let rows = vec![row; some.len()].join(", ");
            let sql = format!("INSERT IGNORE INTO {table} VALUES {rows}");
            let mut query = sqlx::query(AssertSqlSafe(sql));
            for name in some {
                query = query.bind(name.as_bytes().to_vec());
            }
            query.execute(&mut connection).await?;
        }
    }
    connection.close().await?;
    Ok(())
}

impl TwoStatements {
    pub(crate) fn new(over: &Over, name: &str, statements: Statements) -> Self {
        Self {
            over: over.clone(),
            name: name.to_owned(),
            statements,
        }
    }

    async fn changes_one(
        &self,
        query: sqlx::query::Query<'_, sqlx::MySql, sqlx::mysql::MySqlArguments>,
    ) -> Result {
        let done = match &self.over {
            Over::One(connection) => query.execute(&mut *connection.lock().await).await?,
            Over::Pool(pool) => query.execute(pool).await?,
        };
        match done.rows_affected() {
            1 => Ok(()),
            _ => Err("a statement of the floor changed nothing".into()),
        }
    }
}

impl Contender for TwoStatements {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        let owner = format!("{:036x}", fastrand::u128(..));
        let name = self.name.as_bytes();
        let taking = match self.statements {
            Statements::Same => sqlx::query(TAKE.clone())
                .bind(owner.as_bytes())
                .bind(HOLD)
                .bind(LEASE)
                .bind(LEASE)
                .bind(NOTE)
                .bind(name)
                .bind(i64::MAX),
            Statements::Thin => sqlx::query(THIN_TAKE)
                .bind(owner.as_bytes())
                .bind(LEASE)
                .bind(name),
        };
        self.changes_one(taking).await?;
        Ok(owner)
    }

    async fn release(&self, owner: String) -> Result {
        let name = self.name.as_bytes();
        let freeing = match self.statements {
            Statements::Same => sqlx::query(FREE.clone())
                .bind(owner.as_bytes())
                .bind(HOLD)
                .bind(name),
            Statements::Thin => sqlx::query(THIN_FREE).bind(name).bind(owner.as_bytes()),
        };
        self.changes_one(freeing).await
    }
}

/// Many leases of one holder, renewed in statements of `size` leases, over a few connections.
pub(crate) struct Leases {
    connections: Vec<Arc<Mutex<MySqlConnection>>>,
    names: Arc<Vec<String>>,
    size: usize,
}

impl Leases {
    pub(crate) async fn take(
        url: &str,
        count: u32,
        size: usize,
        connections: usize,
    ) -> Result<Self> {
        let names: Vec<String> = (0..count)
            .map(|at| format!("floor:lease:{at:06}"))
            .collect();
        prepare(url, &names).await?;
        let mut all = Vec::new();
        for _ in 0..connections {
            all.push(Arc::new(Mutex::new(connect(url).await?)));
        }
        let mut first = all[0].lock().await;
        let taken = sqlx::query("UPDATE floor_locks SET owner = ? WHERE name LIKE 'floor:lease:%'")
            .bind(HOLDER)
            .execute(&mut *first)
            .await?;
        drop(first);
        if taken.rows_affected() != u64::from(count) {
            return Err("the floor's leases were not all taken".into());
        }
        Ok(Self {
            connections: all,
            names: Arc::new(names),
            size,
        })
    }

    /// Renews each lease once.
    pub(crate) async fn renew(&self) -> Result {
        let mut lanes: JoinSet<Result> = JoinSet::new();
        for (at, connection) in self.connections.iter().enumerate() {
            let (names, connection) = (Arc::clone(&self.names), Arc::clone(connection));
            let (size, lanes_of_all) = (self.size, self.connections.len());
            lanes.spawn(async move {
                let mut connection = connection.lock().await;
                for some in names.chunks(size).skip(at).step_by(lanes_of_all) {
                    let list = vec!["?"; some.len()].join(", ");
                    let sql = format!(
                        "UPDATE floor_locks SET expires = {NOW} + ?, token = token + 1 WHERE name IN ({list}) AND owner = ?"
                    );
                    let mut query = sqlx::query(AssertSqlSafe(sql)).bind(LEASE);
                    for name in some {
                        query = query.bind(name.as_bytes());
                    }
                    let done = query.bind(HOLDER).execute(&mut *connection).await?;
                    if done.rows_affected() != u64::try_from(some.len())? {
                        return Err("a lease of the floor was not there".into());
                    }
                }
                Ok(())
            });
        }
        while let Some(lane) = lanes.join_next().await {
            lane??;
        }
        Ok(())
    }
}

/// Inserts the server's time into the statement.
fn ready(sql: &str) -> SqlStr {
    AssertSqlSafe(Arc::<str>::from(sql.replace("{now}", NOW))).into_sql_str()
}

/// The number of statements sent to the server so far, this query included.
pub(crate) async fn questions(connection: &Mutex<MySqlConnection>) -> Result<u64> {
    let mut connection = connection.lock().await;
    let shown: (String, String) = sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Questions'")
        .fetch_one(&mut *connection)
        .await?;
    Ok(shown.1.parse()?)
}

static TAKE: LazyLock<SqlStr> = LazyLock::new(|| {
    ready(
        "UPDATE floor_same SET token = LAST_INSERT_ID(GREATEST(token + 1, {now})), owner = ?, \
        holds = CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), expires = {now} + ?, keep_until = 0, \
        began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
        WHERE name = ? AND expires <= {now} AND token < 9223372036854775807 AND {now} <= ?",
    )
});
static FREE: LazyLock<SqlStr> = LazyLock::new(|| {
    ready(
        "UPDATE floor_same SET owner = NULL, holds = '', expires = 0, note = '', changed = GREATEST(LAST_INSERT_ID({now}), changed), \
        version = version + 1 \
        WHERE owner = ? AND LENGTH(holds) = 32 AND LEFT(holds, 16) = ? AND name = ? AND expires > {now} AND keep_until <= {now}",
    )
});

const THIN_TABLE: &str = "CREATE TABLE IF NOT EXISTS floor_locks (
  name    VARBINARY(512) NOT NULL PRIMARY KEY,
  owner   VARBINARY(36),
  token   BIGINT NOT NULL,
  expires BIGINT NOT NULL
) ENGINE=InnoDB";
const THIN_TAKE: &str = "UPDATE floor_locks SET owner = ?, token = LAST_INSERT_ID(token + 1), \
    expires = TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6)) + ? \
    WHERE name = ? AND expires <= TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6))";
const THIN_FREE: &str =
    "UPDATE floor_locks SET owner = NULL, expires = 0 WHERE name = ? AND owner = ?";
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6))";
/// In microseconds.
const LEASE: i64 = 30_000_000;
/// As long as an owner of dlock.
const HOLDER: &[u8] = b"0123456789abcdef0123456789abcdef0123";
/// As long as a hold id of dlock.
const HOLD: &[u8] = b"0123456789abcdef";
const NOTE: &[u8] = b"123456 localhost";
