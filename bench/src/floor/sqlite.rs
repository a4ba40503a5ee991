//! SQLite floor: the two statements of a cycle, alone on a connection with the driver's settings.
//!
//! These are the driver's own statements, on its table. So the difference is the work of the driver
//! around them: reading clocks, checking that the file still exists, building texts. Beside it stands
//! the least that a lock could be.

use crate::{Result, work::Contender};
use sqlx::{
    ConnectOptions, Connection, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteSynchronous},
};
use std::{path::Path, time::Duration};
use tokio::sync::Mutex;

/// The statements of the floor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Statements {
    /// The driver's statements.
    Same,
    /// A name, a holder and an end: no fencing, holds, boots or waiters.
    Textbook,
}

/// One name in a file of its own.
pub(crate) struct TwoStatements {
    connection: Mutex<SqliteConnection>,
    statements: Statements,
}

impl TwoStatements {
    pub(crate) async fn open(path: &Path, statements: Statements) -> Result<Self> {
        let mut connection = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .busy_timeout(Duration::from_millis(900))
            .synchronous(SqliteSynchronous::Normal)
            .disable_statement_logging()
            .connect()
            .await?;
        sqlx::raw_sql(TABLES).execute(&mut connection).await?;
        connection.ping().await?;
        Ok(Self {
            connection: Mutex::new(connection),
            statements,
        })
    }
}

impl Contender for TwoStatements {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        let mut connection = self.connection.lock().await;
        let owner = format!("{:036x}", fastrand::u128(..));
        let query = match self.statements {
            // Constants stand for what the driver computes: reading the clocks is its work, not the
            // statement's.
            Statements::Same => sqlx::query(TAKE)
                .bind(NAME)
                .bind(&owner)
                .bind(WALL)
                .bind(HOLDS)
                .bind(NOW + LEASE)
                .bind(BOOT)
                .bind(NOW)
                .bind(NOTE)
                .bind(0)
                .bind(BOOTED),
            Statements::Textbook => sqlx::query(TEXTBOOK_TAKE)
                .bind(NAME)
                .bind(&owner)
                .bind(NOW)
                .bind(NOW + LEASE),
        };
        let done = query.execute(&mut *connection).await?;
        one(done.rows_affected())?;
        Ok(owner)
    }

    async fn release(&self, owner: String) -> Result {
        let mut connection = self.connection.lock().await;
        let query = match self.statements {
            Statements::Same => sqlx::query(FREE)
                .bind(NAME)
                .bind(&owner)
                .bind(&HOLDS[..16])
                .bind(NOW)
                .bind(WALL)
                .bind(BOOT)
                .bind(NOW),
            Statements::Textbook => sqlx::query(TEXTBOOK_FREE).bind(NAME).bind(&owner),
        };
        let done = query.execute(&mut *connection).await?;
        one(done.rows_affected())
    }
}

fn one(rows: u64) -> Result {
    match rows {
        1 => Ok(()),
        _ => Err("a statement of the floor changed nothing".into()),
    }
}

const TABLES: &str = "
PRAGMA journal_mode = WAL;
CREATE TABLE locks (
  name    BLOB    NOT NULL PRIMARY KEY,
  owner   TEXT,
  token   INTEGER NOT NULL,
  holds   TEXT    NOT NULL,
  until   INTEGER NOT NULL,
  keep    INTEGER NOT NULL,
  boot    TEXT    NOT NULL,
  written INTEGER NOT NULL,
  since   INTEGER NOT NULL,
  note    TEXT    NOT NULL,
  waiters INTEGER NOT NULL,
  version INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE textbook (
  name  BLOB NOT NULL PRIMARY KEY,
  owner TEXT,
  until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;";

/// The driver's statement, except for the token, which grows by one each time: this floor does not read
/// the clock that the driver makes it from.
const TAKE: &str = "
INSERT INTO locks VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6, ?3, ?7, ?8, ?9, 1)
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner, token = token + 1, holds = excluded.holds, until = excluded.until, keep = 0, boot = excluded.boot,
  written = excluded.written, since = excluded.since, note = excluded.note,
  waiters = max(excluded.waiters, iif(boot = excluded.boot, waiters, 0)), version = version + 1
WHERE token < excluded.token + 1000000000000
  AND iif(boot = excluded.boot, until <= excluded.since, written < ?10)";

const FREE: &str = "
UPDATE locks SET owner = NULL, holds = '', until = 0, note = '', written = ?5, version = version + 1
WHERE name = ?1 AND owner = ?2 AND length(holds) = 32 AND substr(holds, 1, 16) = ?3 AND boot = ?6
  AND until > ?4 AND keep <= ?4 AND waiters <= ?7";

const TEXTBOOK_TAKE: &str = "
INSERT INTO textbook VALUES (?1, ?2, ?4)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, until = excluded.until WHERE until <= ?3";

const TEXTBOOK_FREE: &str =
    "UPDATE textbook SET owner = NULL, until = 0 WHERE name = ?1 AND owner = ?2";

/// Texts as long as those of dlock.
const NAME: &[u8] = b"orders:42";
const HOLDS: &str = "0123456789abcdef000059f0a1b2c3d4";
const BOOT: &str = "6f1c2d3e-4b5a-6978-8796-a5b4c3d2e1f0";
const NOTE: &str = "123456 localhost";
/// In microseconds, of about the size that clocks show.
const WALL: i64 = 1_790_000_000_000_000;
const NOW: i64 = 12_000_000_000;
const BOOTED: i64 = WALL - NOW;
const LEASE: i64 = 30_000_000;
