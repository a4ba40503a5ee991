//! All wire text: the schema, the statements, what they are given and what they answer.
//!
//! | column | what |
//! |---|---|
//! | `name` | the lock's name, byte for byte |
//! | `owner` | who is inside; `NULL`: nobody |
//! | `token` | the fencing token given last |
//! | `holds` | the [`HoldSet`]; empty: nobody is inside |
//! | `until` | when the last hold ends; with nobody inside, until when it stays shut; 0: free |
//! | `keep` | until when the longest `at_least_for` of this incarnation wants it shut |
//! | `boot` | whose boot clock the times of this row are counted by |
//! | `written` | the wall clock when the row was last changed |
//! | `since` | when the incarnation began |
//! | `note` | what its first holder said of itself |
//! | `waiters` | until when somebody may be waiting for a wake-up |
//! | `version` | one more with every change of the row |
//!
//! Times are the boot clock's, `token` and `written` the wall clock's, all in microseconds. The caller reads both once, before a statement
//! waits for the file: see [`Moment`]. A statement that reads and writes does so under SQLite's one write lock, so it is atomic
//! for every process; each is a transaction of its own, committed when its last row was read, so all are read to their end.
//! With `synchronous = NORMAL` a commit survives the end of a process, not a loss of power, which frees every lock anyway.

use crate::{
    machine::Moment,
    record::{Record, unsigned, written},
};
use dlock_core::{Acquire, HoldId, HoldSet, LockName, Owner, Renew};
use futures_util::TryStreamExt;
use sqlx::{
    Row, SqliteConnection,
    query::Query,
    sqlite::{Sqlite, SqliteArguments, SqliteRow},
};
use std::{collections::HashMap, fmt::Write as _, sync::LazyLock, time::Duration};

/// `dlck`: tells a file of ours from everybody else's.
pub(crate) const APPLICATION_ID: i64 = 0x646c_636b;
/// The schema below. A file with another one is refused.
pub(crate) const SCHEMA_VERSION: i64 = 1;

/// Asks what a file is; writes nothing, so a file that is not ours stays as it is.
const IDENTIFY: &str = "
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
FROM pragma_application_id, pragma_user_version";

/// Makes the schema, in one transaction that begins as a writer: of several processes one makes it, the others find it made.
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

/// Takes a name that is absent, free, or past its end, as a new incarnation; changes nothing else.
///
/// The token is the wall clock's µs. Where that is no greater than the last one the row is left alone, and written by [`SWAP`] with the
/// last one + 1: so the common case needs no answer but the number of rows. Run twice, the second finds a living hold and does nothing.
const TAKE: &str = "
INSERT INTO locks VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6, ?3, ?7, ?8, ?9, 1)
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner, token = excluded.token, holds = excluded.holds, until = excluded.until, keep = 0, boot = excluded.boot,
  written = excluded.written, since = excluded.since, note = excluded.note,
  waiters = max(excluded.waiters, iif(boot = excluded.boot, waiters, 0)), version = version + 1
WHERE token < excluded.token
  AND iif(boot = excluded.boot, until <= excluded.since, written < ?10)";

/// Gives back the only hold of a name that nothing keeps shut, and that nobody waits for beyond `?7`; changes nothing in any other case.
///
/// Run twice, the second finds no hold.
const FREE: &str = "
UPDATE locks SET owner = NULL, holds = '', until = 0, note = '', written = ?5, version = version + 1
WHERE name = ?1 AND owner = ?2 AND length(holds) = 32 AND substr(holds, 1, 16) = ?3 AND boot = ?6
  AND until > ?4 AND keep <= ?4 AND waiters <= ?7";

/// Shows one name at one moment; writes nothing.
const LOOK: &str = "SELECT * FROM locks WHERE name = ?1";

/// Writes a row that was read before, if it is still the same. Run twice, the second finds another version.
const SWAP: &str = "
UPDATE locks SET owner = ?3, token = ?4, holds = ?5, until = ?6, keep = ?7, boot = ?8, written = ?9, since = ?10, note = ?11,
  waiters = ?12, version = version + 1
WHERE name = ?1 AND version = ?2";

/// Says that somebody waits, if there is still something to wait for; many may say so at once. Run twice it says the same.
const AWAIT: &str = "
UPDATE locks SET waiters = max(waiters, ?3), written = ?4, version = version + 1 WHERE name = ?1 AND boot = ?2 AND until > ?5";

/// Ends the incarnation with that token, or what it keeps shut. Run twice, the second finds it free.
const BREAK: &str = "
UPDATE locks SET owner = NULL, holds = '', until = 0, keep = 0, note = '', written = ?5, version = version + 1
WHERE name = ?1 AND token = ?2 AND until > ?3 AND boot = ?4";

/// One step over the names in their order, free ones too: as many rows as the page may have, whatever they are.
const LIST: &str = "SELECT * FROM locks WHERE name >= ?1 AND name > ?2 AND (?3 IS NULL OR name < ?3) ORDER BY name LIMIT ?4";

/// Where the next [`PAGE`] names after one end; no row: the table does.
const PAGE_END: &str = "SELECT name FROM locks WHERE name > ?1 ORDER BY name LIMIT 1 OFFSET ?2";

/// Forgets names between two that have been free for a day by both clocks, or for a day and before this boot.
///
/// The next token of a forgotten name is the wall clock's, so greater, unless that was set back by more than a day.
const PURGE: &str = "
DELETE FROM locks WHERE name > ?1 AND (?2 IS NULL OR name <= ?2) AND written <= ?3 - 86400000000
  AND iif(boot = ?4, until <= ?5 - 86400000000, written < ?6)";

/// Prolongs sole holds, each judged alone; one that is not there, or not alone, is left as it is and not answered.
///
/// One write transaction for all of them. Run twice it prolongs twice, never past lease after the second run. Holds are of fixed width and
/// begin with the same id, so the greater text is the later end.
fn renewal(entries: usize) -> String {
    let mut sql = String::from("WITH batch (name, owner, hold, text, until) AS (VALUES ");
    for entry in 0..entries {
        let (comma, at) = (if entry == 0 { "" } else { ", " }, 4 + 5 * entry);
        // Writing to a string cannot fail.
        let _ = write!(
            sql,
            "{comma}(?{}, ?{}, ?{}, ?{}, ?{})",
            at,
            at + 1,
            at + 2,
            at + 3,
            at + 4
        );
    }
    sql.push_str(
        ")
UPDATE locks SET holds = max(locks.holds, batch.text), until = max(locks.until, batch.until), written = ?3, version = version + 1
FROM batch
WHERE locks.name = batch.name AND locks.owner = batch.owner AND length(locks.holds) = 32
  AND substr(locks.holds, 1, 16) = batch.hold AND locks.boot = ?1 AND locks.until > ?2
RETURNING locks.name, locks.until",
    );
    sql
}

/// Few texts, so that each stays prepared; the rest of one is filled up with entries that no row has.
static RENEWALS: LazyLock<[(usize, String); 3]> =
    LazyLock::new(|| [1, 8, RENEW_BATCH].map(|entries| (entries, renewal(entries))));

/// Entries of one renewal: some 0.5 ms, for which every other writer of the file waits.
pub(crate) const RENEW_BATCH: usize = 64;
/// How long a record says that somebody waits: several looks, and a release that touches a file for nobody costs a microsecond.
pub(crate) const WAITERS: Duration = Duration::from_secs(10);
/// Names that one [`PURGE`] looks at: some 0.2 ms.
const PAGE: i64 = 256;

/// What a file says it is.
pub(crate) struct Identity {
    pub(crate) application: i64,
    pub(crate) schema: i64,
    pub(crate) tables: i64,
}

pub(crate) async fn identify(native: &mut SqliteConnection) -> sqlx::Result<Identity> {
    let row = sqlx::query(IDENTIFY).fetch_one(native).await?;
    Ok(Identity {
        application: row.try_get(0)?,
        schema: row.try_get(1)?,
        tables: row.try_get(2)?,
    })
}

/// Readers beside the writer: [`LOOK`] never waits. Answers the mode that the file has then.
pub(crate) async fn journal(native: &mut SqliteConnection) -> sqlx::Result<String> {
    let row = sqlx::query("PRAGMA journal_mode = WAL")
        .fetch_one(native)
        .await?;
    row.try_get(0)
}

pub(crate) async fn create(native: &mut SqliteConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(CREATE).execute(native).await.map(drop)
}

/// Whether a statement about one row found it as it is to be.
async fn changes(
    native: &mut SqliteConnection,
    query: Query<'_, Sqlite, SqliteArguments>,
) -> sqlx::Result<bool> {
    Ok(query.execute(native).await?.rows_affected() == 1)
}

/// Whether it was taken; then its token is the wall clock's of that moment.
pub(crate) async fn take(
    native: &mut SqliteConnection,
    req: &Acquire,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let end = at.after(req.lease.length());
    let waiters = req.next.map_or(0, |_| at.after(WAITERS));
    let query = sqlx::query(TAKE)
        .bind(req.name.as_str().as_bytes())
        .bind(written(&req.owner))
        .bind(at.wall)
        .bind(HoldSet::one(req.hold, unsigned(end)).to_string())
        .bind(end)
        .bind(at.boot)
        .bind(at.now)
        .bind(req.note.to_string())
        .bind(waiters)
        .bind(at.booted());
    changes(native, query).await
}

/// Whether it was given back; with `waiters` whoever may wait has yet to be woken.
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

pub(crate) async fn look(
    native: &mut SqliteConnection,
    name: &LockName,
) -> sqlx::Result<Option<Record>> {
    let row = sqlx::query(LOOK)
        .bind(name.as_str().as_bytes())
        .fetch_optional(native)
        .await?;
    row.as_ref().map(read).transpose()
}

/// Whether the row was still the one that was read.
pub(crate) async fn swap(
    native: &mut SqliteConnection,
    name: &LockName,
    record: Record,
) -> sqlx::Result<bool> {
    let query = sqlx::query(SWAP)
        .bind(name.as_str().as_bytes())
        .bind(record.version)
        .bind(record.owner)
        .bind(record.token)
        .bind(record.holds.to_string())
        .bind(record.until)
        .bind(record.keep)
        .bind(record.boot)
        .bind(record.written)
        .bind(record.since)
        .bind(record.note)
        .bind(record.waiters);
    changes(native, query).await
}

/// Whether there is still something to wait for.
pub(crate) async fn await_release(
    native: &mut SqliteConnection,
    name: &LockName,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let query = sqlx::query(AWAIT)
        .bind(name.as_str().as_bytes())
        .bind(at.boot)
        .bind(at.after(WAITERS))
        .bind(at.wall)
        .bind(at.now);
    changes(native, query).await
}

/// Whether that incarnation, or what it kept shut, was there.
pub(crate) async fn break_lock(
    native: &mut SqliteConnection,
    name: &LockName,
    token: i64,
    at: &Moment<'_>,
) -> sqlx::Result<bool> {
    let query = sqlx::query(BREAK)
        .bind(name.as_str().as_bytes())
        .bind(token)
        .bind(at.now)
        .bind(at.boot)
        .bind(at.wall);
    changes(native, query).await
}

/// The ends of the sole holds among at most [`RENEW_BATCH`] that are there.
pub(crate) async fn renew(
    native: &mut SqliteConnection,
    batch: &[(&Renew, Duration)],
    at: &Moment<'_>,
) -> sqlx::Result<HashMap<Vec<u8>, i64>> {
    let (size, sql) = RENEWALS
        .iter()
        .find(|(size, _)| batch.len() <= *size)
        .unwrap_or(&RENEWALS[2]);
    let mut query = sqlx::query(sql.as_str())
        .bind(at.boot)
        .bind(at.now)
        .bind(at.wall);
    for (entry, lease) in batch {
        let end = at.after(*lease);
        query = query
            .bind(entry.name.as_str().as_bytes())
            .bind(written(&entry.owner))
            .bind(entry.hold.to_string())
            .bind(HoldSet::one(entry.hold, unsigned(end)).to_string())
            .bind(end);
    }
    for _ in batch.len()..*size {
        query = query
            .bind(None::<Vec<u8>>)
            .bind(None::<String>)
            .bind(None::<String>)
            .bind(None::<String>)
            .bind(None::<i64>);
    }
    let rows: Vec<SqliteRow> = query.fetch(native).try_collect().await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}

/// Rows in the order of their names.
pub(crate) async fn list(
    native: &mut SqliteConnection,
    (prefix, after): (&str, Vec<u8>),
    limit: usize,
) -> sqlx::Result<Vec<(Vec<u8>, Record)>> {
    let rows: Vec<SqliteRow> = sqlx::query(LIST)
        .bind(prefix.as_bytes())
        .bind(after)
        .bind(past(prefix.as_bytes()))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch(native)
        .try_collect()
        .await?;
    rows.iter()
        .map(|row| Ok((row.try_get("name")?, read(row)?)))
        .collect()
}

/// Forgets what has long been free among the [`PAGE`] names after one.
pub(crate) async fn purge(
    native: &mut SqliteConnection,
    after: &[u8],
    at: &Moment<'_>,
) -> sqlx::Result<u64> {
    let end = sqlx::query(PAGE_END).bind(after).bind(PAGE - 1);
    let end = end.fetch_optional(&mut *native).await?;
    let end: Option<Vec<u8>> = end.map(|row| row.try_get(0)).transpose()?;
    let done = sqlx::query(PURGE)
        .bind(after)
        .bind(end)
        .bind(at.wall)
        .bind(at.boot)
        .bind(at.now)
        .bind(at.booted())
        .execute(native)
        .await?;
    Ok(done.rows_affected())
}

/// The first text that is greater than all that begin with this one; `None`: there is none.
fn past(prefix: &[u8]) -> Option<Vec<u8>> {
    let kept = prefix.iter().rposition(|byte| *byte < u8::MAX)?;
    let mut past = prefix[..=kept].to_vec();
    past[kept] += 1;
    Some(past)
}

fn read(row: &SqliteRow) -> sqlx::Result<Record> {
    let holds: &str = row.try_get("holds")?;
    Ok(Record {
        owner: row.try_get("owner")?,
        token: row.try_get("token")?,
        holds: holds
            .parse()
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
        until: row.try_get("until")?,
        keep: row.try_get("keep")?,
        boot: row.try_get("boot")?,
        written: row.try_get("written")?,
        since: row.try_get("since")?,
        note: row.try_get("note")?,
        waiters: row.try_get("waiters")?,
        version: row.try_get("version")?,
    })
}
