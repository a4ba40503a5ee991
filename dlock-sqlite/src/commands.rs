//! SQL commands: the schema, the statements, their parameters and their answers. All text that SQLite sees
//! stands here.
//!
//! | column | what |
//! |---|---|
//! | `name` | the lock's name, byte for byte |
//! | `owner` | the holder's owner; `NULL`: not held |
//! | `token` | the fencing token given last |
//! | `holds` | the [`HoldSet`]; empty: not held |
//! | `until` | when the last hold ends; if not held, until when the lock stays unavailable; 0: free |
//! | `keep` | when the longest `min_hold` of this incarnation ends |
//! | `boot` | the boot whose clock the times of this row are counted by |
//! | `written` | the wall clock when the row was last changed |
//! | `since` | when the incarnation began |
//! | `note` | the holder info of the first holder |
//! | `waiters` | until when a waiter may expect a wake-up |
//! | `version` | grows by one with every change of the row; a new row begins with its token, so no version comes twice |
//!
//! Times are in microseconds, by the boot clock; `token` and `written` are by the wall clock. The caller
//! reads both clocks once, before a statement waits for the file: see [`Moment`]. A statement that reads
//! and writes does so under SQLite's one write lock, so it is atomic for every process. Each statement is a
//! transaction of its own, committed when its last row was read, so every statement is read to its end.
//! With `synchronous = NORMAL` a commit survives the end of a process, not a loss of power, which frees
//! every lock anyway.

use crate::{
    machine::Moment,
    store::{signed, unsigned},
};
use dlock_core::{
    HoldId, HolderInfo, LockName, Owner,
    driver::{
        Acquire, Renew,
        kit::{DamagedRecord, HoldSet, Record, WAITERS_MARK, Write},
    },
};
use sqlx::{
    AssertSqlSafe, Row as _, SqliteConnection,
    query::Query,
    sqlite::{Sqlite, SqliteArguments, SqliteRow},
};
use std::{collections::HashMap, time::Duration};

/// `dlck`: tells dlock's files from other databases.
pub(crate) const APPLICATION_ID: i64 = 0x646c_636b;
/// The schema below. A file with another schema is refused.
pub(crate) const SCHEMA_VERSION: i64 = 1;

/// Asks what a file is. It writes nothing, so a foreign file stays as it is.
const IDENTIFY: &str = "
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
FROM pragma_application_id, pragma_user_version";

/// Makes the schema, in one transaction that begins as a writer: of several processes one makes it, and the
/// others find it made.
const CREATE: &str = "
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS locks (
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
PRAGMA application_id = 0x646c636b;
PRAGMA user_version = 1;
COMMIT;";

/// Takes a name that is absent, free, or past its end, as a new incarnation; changes nothing else, nor a record
/// with a claim (16 times `f`).
///
/// The token is the wall clock's µs. Where that is not greater than the last token, the row is left alone,
/// and [`SWAP`] writes it with the last token + 1. So the common case needs no answer but the number of
/// rows. Run twice, the second run finds a living hold and does nothing.
const TAKE: &str = "
INSERT INTO locks VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6, ?3, ?7, ?8, ?9, ?3)
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner, token = excluded.token, holds = excluded.holds, until = excluded.until, keep = 0, boot = excluded.boot,
  written = excluded.written, since = excluded.since, note = excluded.note,
  waiters = max(excluded.waiters, iif(boot = excluded.boot, waiters, 0)), version = version + 1
WHERE token < excluded.token AND substr(holds, -32, 16) <> 'ffffffffffffffff'
  AND iif(boot = excluded.boot, until <= excluded.since, written < ?10)";

/// Releases the only hold of a name, if no minimum hold is left and no waiter is recorded beyond `?7`.
/// Changes nothing in any other case.
///
/// Run twice, the second run finds no hold.
const FREE: &str = "
UPDATE locks SET owner = NULL, holds = '', until = 0, note = '', written = ?5, version = version + 1
WHERE name = ?1 AND owner = ?2 AND length(holds) = 32 AND substr(holds, 1, 16) = ?3 AND boot = ?6
  AND until > ?4 AND keep <= ?4 AND waiters <= ?7";

/// Shows one name at one moment; writes nothing.
const FIND: &str = "SELECT * FROM locks WHERE name = ?1";

/// Writes the first row of a name. Run twice, the second run finds a row.
const INSERT: &str = "
INSERT INTO locks (name, version, owner, token, holds, until, keep, boot, written, since, note, waiters)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12) ON CONFLICT (name) DO NOTHING";

/// Writes a row that was read before, if it is unchanged. Run twice, the second run finds another version.
const SWAP: &str = "
UPDATE locks SET owner = ?3, token = ?4, holds = ?5, until = ?6, keep = ?7, boot = ?8, written = ?9, since = ?10, note = ?11,
  waiters = ?12, version = ?13
WHERE name = ?1 AND version = ?2";

/// One step over the names in their order, including free ones: as many rows as the page may have, whatever
/// their state.
const LIST: &str = "SELECT * FROM locks WHERE name >= ?1 AND name > ?2 AND (?3 IS NULL OR name < ?3) ORDER BY name LIMIT ?4";

/// Where the next [`PAGE`] names after a name end; no row: the end of the table.
const PAGE_END: &str = "SELECT name FROM locks WHERE name > ?1 ORDER BY name LIMIT 1 OFFSET ?2";

/// Forgets names between two that have been free for a day by both clocks, or for a day and before this
/// boot.
///
/// The next token of a forgotten name is the wall clock's. So it is greater, unless that clock was set back
/// by more than a day.
const PURGE: &str = "
DELETE FROM locks WHERE name > ?1 AND (?2 IS NULL OR name <= ?2) AND max(written, token) <= ?3 - 86400000000
  AND iif(boot = ?4, until <= ?5 - 86400000000, written < ?6)";

/// Renews sole holds, each judged alone. A hold that is absent, or is not the only one, is left as it is
/// and not answered.
///
/// One write transaction covers all of them. Run twice it renews twice, never past the lease after the
/// second run. Holds are of fixed width and begin with the same id, so the greater text is the later end.
///
/// Each number of entries has a text of its own. sqlx keeps a hundred statements prepared, so all of them.
fn renewal(entries: usize) -> String {
    let batch = vec!["(?, ?, ?, ?, ?)"; entries].join(", ");
    format!(
        "
WITH batch (name, owner, hold, text, until) AS (VALUES {batch})
UPDATE locks SET holds = max(locks.holds, batch.text), until = max(locks.until, batch.until), written = ?, version = version + 1
FROM batch
WHERE locks.name = batch.name AND locks.owner = batch.owner AND length(locks.holds) = 32
  AND substr(locks.holds, 1, 16) = batch.hold AND locks.boot = ? AND locks.until > ?
RETURNING locks.name, locks.until"
    )
}

/// Entries of one renewal: some 0.5 ms, for which every other writer of the file waits.
pub(crate) const RENEW_BATCH: usize = 64;
/// Names that one [`PURGE`] visits: some 0.2 ms.
pub(crate) const PAGE: i64 = 256;

/// What a file says it is: its application, its schema, and how many tables it has.
pub(crate) async fn identify(native: &mut SqliteConnection) -> sqlx::Result<(i64, i64, i64)> {
    sqlx::query_as(IDENTIFY).fetch_one(native).await
}

/// Turns on the write-ahead log, which lets readers run beside the writer: [`FIND`] never waits. Returns
/// the mode that the file then has.
pub(crate) async fn journal(native: &mut SqliteConnection) -> sqlx::Result<String> {
    let query = sqlx::query_scalar("PRAGMA journal_mode = WAL");
    query.fetch_one(native).await
}

pub(crate) async fn create(native: &mut SqliteConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(CREATE).execute(native).await.map(drop)
}

/// Whether a statement about one row changed it.
async fn changes(
    native: &mut SqliteConnection,
    query: Query<'_, Sqlite, SqliteArguments>,
) -> sqlx::Result<bool> {
    Ok(query.execute(native).await?.rows_affected() == 1)
}

/// Whether the lock was taken; its token is then the wall clock's at that moment.
pub(crate) async fn take(
    native: &mut SqliteConnection,
    req: &Acquire,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let end = at.after(req.lease.length());
    let waiters = req.next_ticket.map_or(0, |_| at.after(WAITERS_MARK));
    let query = sqlx::query(TAKE)
        .bind(req.name.as_str().as_bytes())
        .bind(written(&req.owner))
        .bind(at.wall)
        .bind(HoldSet::one(req.hold, unsigned(end)).to_string())
        .bind(end)
        .bind(at.boot)
        .bind(at.now)
        .bind(req.info.to_string())
        .bind(waiters)
        .bind(at.booted());
    changes(native, query).await
}

/// Whether the hold was released. With `waiters` the caller has yet to wake those who may wait.
pub(crate) async fn free(
    native: &mut SqliteConnection,
    (name, whose, hold): (&LockName, &Owner, HoldId),
    waiters: bool,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let query = sqlx::query(FREE)
        .bind(name.as_str().as_bytes())
        .bind(written(whose))
        .bind(hold.to_string())
        .bind(at.now)
        .bind(at.wall)
        .bind(at.boot)
        .bind(if waiters { i64::MAX } else { at.now });
    changes(native, query).await
}

/// A row, whether its record can be read or not.
pub(crate) struct Row {
    /// The boot that wrote it.
    pub(crate) boot: String,
    pub(crate) written: i64,
    pub(crate) until: i64,
    pub(crate) version: i64,
    pub(crate) record: Result<Record, DamagedRecord>,
}

pub(crate) async fn find(
    native: &mut SqliteConnection,
    name: &LockName,
) -> sqlx::Result<Option<Row>> {
    let row = sqlx::query(FIND)
        .bind(name.as_str().as_bytes())
        .fetch_optional(native)
        .await?;
    row.as_ref().map(read).transpose()
}

/// Whether there was no row.
pub(crate) async fn insert(
    native: &mut SqliteConnection,
    write: &Write,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let version = signed(write.record.version);
    changes(native, bound(sqlx::query(INSERT), write, version, at)).await
}

/// Whether the row still had that version.
pub(crate) async fn swap(
    native: &mut SqliteConnection,
    write: &Write,
    expected: i64,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let swap = bound(sqlx::query(SWAP), write, expected, at);
    changes(native, swap.bind(signed(write.record.version))).await
}

fn bound<'q>(
    query: Query<'q, Sqlite, SqliteArguments>,
    write: &Write,
    version: i64,
    at: &Moment<'_>,
) -> Query<'q, Sqlite, SqliteArguments> {
    let record = &write.record;
    query
        .bind(write.name.as_str().as_bytes().to_vec())
        .bind(version)
        .bind(record.owner.as_ref().map(written))
        .bind(signed(record.token))
        .bind(record.holds.to_string())
        .bind(signed(record.unavailable_until))
        .bind(signed(record.min_hold_until))
        .bind(at.boot.to_owned())
        .bind(at.wall)
        .bind(signed(record.began))
        .bind(record.holder_info.to_string())
        .bind(signed(record.waiters_until))
}

/// What is left of the sole holds that exist, by their names.
pub(crate) async fn renew(
    native: &mut SqliteConnection,
    batch: &[(&Renew, Duration)],
    at: &Moment<'_>,
) -> sqlx::Result<HashMap<Vec<u8>, Duration>> {
    let sql = AssertSqlSafe(renewal(batch.len()));
    let mut query = sqlx::query_as::<Sqlite, (Vec<u8>, i64)>(sql);
    for (entry, lease) in batch {
        let end = at.after(*lease);
        query = query
            .bind(entry.name.as_str().as_bytes())
            .bind(written(&entry.owner))
            .bind(entry.hold.to_string())
            .bind(HoldSet::one(entry.hold, unsigned(end)).to_string())
            .bind(end);
    }
    let query = query.bind(at.wall).bind(at.boot).bind(at.now);
    let rows = query.fetch_all(native).await?.into_iter();
    Ok(rows.map(|(name, end)| (name, at.until(end))).collect())
}

/// Rows in the order of their names.
pub(crate) async fn list(
    native: &mut SqliteConnection,
    (prefix, after): (&str, &[u8]),
    limit: usize,
) -> sqlx::Result<Vec<(Vec<u8>, Row)>> {
    let rows: Vec<SqliteRow> = sqlx::query(LIST)
        .bind(prefix.as_bytes())
        .bind(after)
        .bind(past(prefix))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(native)
        .await?;
    rows.iter()
        .map(|row| Ok((row.try_get("name")?, read(row)?)))
        .collect()
}

/// Forgets names that have long been free among the [`PAGE`] names after one, and returns where these end;
/// `None`: at the end of the table.
pub(crate) async fn purge(
    native: &mut SqliteConnection,
    after: &[u8],
    at: &Moment<'_>,
) -> sqlx::Result<Option<Vec<u8>>> {
    let end = sqlx::query_scalar(PAGE_END).bind(after).bind(PAGE - 1);
    let end: Option<Vec<u8>> = end.fetch_optional(&mut *native).await?;
    sqlx::query(PURGE)
        .bind(after)
        .bind(end.as_deref())
        .bind(at.wall)
        .bind(at.boot)
        .bind(at.now)
        .bind(at.booted())
        .execute(native)
        .await?;
    Ok(end)
}

/// The first bytes that are greater than all texts with this prefix; `None`: there are none. No byte of UTF-8 is
/// 255.
fn past(prefix: &str) -> Option<Vec<u8>> {
    let mut past = prefix.as_bytes().to_vec();
    *past.last_mut()? += 1;
    Some(past)
}

fn read(row: &SqliteRow) -> sqlx::Result<Row> {
    let boot: &[u8] = row.try_get_unchecked("boot")?;
    Ok(Row {
        boot: String::from_utf8_lossy(boot).into_owned(),
        written: row.try_get("written")?,
        until: row.try_get("until")?,
        version: row.try_get("version")?,
        record: record(row),
    })
}

fn record(row: &SqliteRow) -> Result<Record, DamagedRecord> {
    let token = row.try_get::<i64, _>("token").map_or(0, unsigned);
    fields(row).map_err(|field| DamagedRecord::new(field).with_token(token))
}

/// The record, or the column that cannot be read.
fn fields(row: &SqliteRow) -> Result<Record, &'static str> {
    let time = |column| match row.try_get::<i64, _>(column) {
        Ok(time) if time >= 0 => Ok(unsigned(time)),
        _ => Err(column),
    };
    let text = |column| {
        let text = row.try_get::<Option<&str>, _>(column);
        text.map_err(|_| column)
    };
    let owner = text("owner")?.map(str::parse::<Owner>).transpose();
    let holds = text("holds")?.unwrap_or_default().parse();
    Ok(Record {
        token: time("token")?,
        owner: owner.map_err(|_| "owner")?,
        holds: holds.map_err(|_| "holds")?,
        unavailable_until: time("until")?,
        min_hold_until: time("keep")?,
        began: time("since")?,
        waiters_until: time("waiters")?,
        holder_info: HolderInfo::parse(text("note")?.unwrap_or_default()),
        version: match time("version")? {
            // One more does not fit.
            LAST_VERSION => return Err("version"),
            version => version,
        },
    })
}

const LAST_VERSION: u64 = i64::MAX.unsigned_abs();

/// An owner as the row stores it.
fn written(owner: &Owner) -> String {
    owner.expose().hyphenated().to_string()
}
