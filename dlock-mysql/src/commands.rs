//! SQL for one lock: the table, the statements, their parameters and their answers.
//!
//! The SQL that touches locks is here and in `lists`, so that its atomicity can be checked in one place.
//!
//! | column | content |
//! |---|---|
//! | `name` | the lock's name, byte for byte |
//! | `owner` | the owner that holds the lock; `NULL`: none |
//! | `token` | the last fencing token |
//! | `holds` | the [`HoldSet`]; empty: no holder |
//! | `expires` | when the last hold ends, or the minimum hold if there is no holder; 0: free |
//! | `keep_until` | until when this incarnation's longest `min_hold` keeps the lock unavailable |
//! | `began` | when the incarnation began |
//! | `changed` | when the row was last written |
//! | `note` | the first holder's holder info |
//! | `version` | incremented by every change of the row |
//!
//! The clock is the server's, in microseconds UTC, whatever the session's time zone. `UTC_TIMESTAMP(6)` is
//! fixed when a statement begins. So a statement that waits for a row's lock writes an end that is too early,
//! never too late. Each statement is a transaction of its own. It finds its rows by the primary key, the only
//! index, and locks only them. All text is `VARBINARY`, so no collation takes part in a comparison.
//!
//! The native client sets `CLIENT_FOUND_ROWS`, so a count is of rows matched. Every write adds 1 to
//! `version`, so matched and changed are the same here. The count of an `UPDATE`, 0 or 1, tells whether its
//! `WHERE` held. A statement with another number to return uses `LAST_INSERT_ID(expr)`, which comes in the
//! same reply.

use crate::{
    config::Table,
    lists::Lists,
    record::{Record, inside, micros, unsigned, written},
};
use dlock_core::{Acquire, FencingToken, HoldId, LockName, Owner};
use futures_util::TryStreamExt;
use sqlx::{
    Arguments as _, AssertSqlSafe, Executor as _, MySqlConnection, Row, SqlSafeStr, SqlStr,
    error::BoxDynError,
    mysql::{MySqlArguments, MySqlQueryResult, MySqlRow},
};
use std::{sync::Arc, time::Duration};

/// Makes the table if it is missing; several clients may try at once. A different table of that name is left
/// alone; the check of its columns refuses it.
const CREATE: &str = "CREATE TABLE IF NOT EXISTS {table} (
  name       VARBINARY(512)  NOT NULL PRIMARY KEY,
  owner      VARBINARY(36),
  token      BIGINT          NOT NULL,
  holds      VARBINARY(2048) NOT NULL,
  expires    BIGINT          NOT NULL,
  keep_until BIGINT          NOT NULL,
  began      BIGINT          NOT NULL,
  changed    BIGINT          NOT NULL,
  note       VARBINARY(128)  NOT NULL,
  version    BIGINT          NOT NULL
) ENGINE=InnoDB";

/// The same table as the server describes it: name, type, bytes of text, whether nullable, whether the key.
pub(crate) const COLUMNS: [(&str, &str, Option<u64>, bool, bool); 10] = [
    ("name", "varbinary", Some(512), false, true),
    ("owner", "varbinary", Some(36), true, false),
    ("token", "bigint", None, false, false),
    ("holds", "varbinary", Some(2048), false, false),
    ("expires", "bigint", None, false, false),
    ("keep_until", "bigint", None, false, false),
    ("began", "bigint", None, false, false),
    ("changed", "bigint", None, false, false),
    ("note", "varbinary", Some(128), false, false),
    ("version", "bigint", None, false, false),
];

/// Takes a name whose row exists and is free or past its end, as a new incarnation. Otherwise, or after its
/// not-after time, it changes nothing.
///
/// The token is the server's µs, or the last token plus one where the clock is behind that. A second run
/// finds a live hold. The incarnation begins no earlier than the row's last change, even if the statement
/// began to wait for the row before that. A batched release relies on this order to tell who held the lock
/// when.
const TAKE: &str = "UPDATE {table} SET token = LAST_INSERT_ID(GREATEST(token + 1, {now})), owner = ?, \
    holds = CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), expires = {now} + ?, keep_until = 0, \
    began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
    WHERE name = ? AND expires <= {now} AND {now} <= ?";

/// Takes a name that has no row; after its not-after time, it inserts none. Of several at once one wins, and
/// the others get error 1062. So does a second run.
const INSERT: &str = "INSERT INTO {table} (name, owner, token, holds, expires, keep_until, began, changed, note, version) \
    SELECT ?, ?, LAST_INSERT_ID({now}), CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), {now} + ?, 0, {now}, {now}, ?, 1 \
    FROM DUAL WHERE {now} <= ?";

/// Releases the only hold of a name without a pending minimum hold; changes nothing otherwise. A second run
/// finds no hold.
const FREE: &str = "UPDATE {table} SET owner = NULL, holds = '', expires = 0, note = '', changed = GREATEST(LAST_INSERT_ID({now}), changed), \
    version = version + 1 WHERE owner = ? AND LENGTH(holds) = 32 AND LEFT(holds, 16) = ? AND name = ? AND expires > {now} AND keep_until <= {now}";

/// Writes a row that was read before, if it is unchanged and still held or unavailable. A second run finds
/// another version. A row that was deleted and made again by the next holder may repeat a version, but never
/// a token.
const SWAP: &str = "UPDATE {table} SET owner = ?, holds = ?, expires = ?, keep_until = ?, note = ?, \
    changed = GREATEST(LAST_INSERT_ID({now}), changed), \
    version = version + 1 \
    WHERE name = ? AND version = ? AND token = ? AND expires > {now} AND {now} <= ?";

/// Ends the current incarnation, or only the one with the given token. It answers that incarnation's token,
/// or 0 for a lock that only its minimum hold kept unavailable. A second run finds the lock free. The token
/// is read before the owner is cleared, since a server assigns from left to right. `changed` never goes back.
const BREAK: &str = "UPDATE {table} SET token = token + 0 * LAST_INSERT_ID(IF(owner IS NULL, 0, token)), owner = NULL, holds = '', expires = 0, \
    keep_until = 0, note = '', changed = GREATEST({now}, changed), version = version + 1 \
    WHERE name = ? AND expires > {now} AND (? OR (token = ? AND owner IS NOT NULL))";

/// One page of names in order, free ones included: as many rows as the page may have. Locks nothing.
const LIST: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, {now}, changed FROM {table} \
    WHERE name >= ? AND name > ? AND name < ? ORDER BY name LIMIT ?";

/// The names after a given one, and since when each is unused, for a sweep. Locks nothing.
const STALE: &str = "SELECT name, GREATEST(changed, expires), {now} FROM {table} WHERE name > ? ORDER BY name LIMIT ?";

/// Deletes one name that has been free for a day, and whose last token is as old. The name's next token is
/// the server's time, which is greater unless the clock is set back by more than a day.
const FORGET: &str = "DELETE FROM {table} \
    WHERE name = ? AND GREATEST(changed, expires, token) <= {now} - 86400000000";

/// The server's time.
const TIME: &str = "SELECT {now}";

/// Microseconds since 1970. The difference of two `DATETIME`s is independent of the time zone. The epoch is a
/// `DATE` literal, because MariaDB parses a text again for each row and for each use in a statement.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6))";

/// A byte above all bytes of names.
const PAST: &[u8] = &[0xff];

/// The statements for one table.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) create: SqlStr,
    take: SqlStr,
    insert: SqlStr,
    free: SqlStr,
    swap: SqlStr,
    break_lock: SqlStr,
    list: SqlStr,
    stale: SqlStr,
    forget: SqlStr,
    pub(crate) lists: Lists,
}

impl Statements {
    /// The table's name is checked and quoted; no other input is ever put into the SQL text.
    pub(crate) fn new(table: &Table) -> Self {
        let table = table.quoted();
        let text = |sql: &str| ready(sql.replace("{table}", &table));
        Self {
            create: text(CREATE),
            take: text(TAKE),
            insert: text(INSERT),
            free: text(FREE),
            swap: text(SWAP),
            break_lock: text(BREAK),
            list: text(LIST),
            stale: text(STALE),
            forget: text(FORGET),
            lists: Lists::new(&table),
        }
    }
}

/// What `dlock schema` prints.
pub(crate) fn ddl(table: &Table) -> String {
    CREATE.replace("{table}", &table.quoted())
}

/// The SQL with the expression for the server's time put in, shared so that handing it out copies nothing.
pub(crate) fn ready(sql: String) -> SqlStr {
    AssertSqlSafe(Arc::<str>::from(sql.replace("{now}", NOW))).into_sql_str()
}

/// The server's time.
pub(crate) async fn clock(native: &mut MySqlConnection) -> sqlx::Result<Duration> {
    let row = sqlx::raw_sql(ready(TIME.to_owned()))
        .fetch_one(native)
        .await?;
    time(&row, 0)
}

/// Reads a time column.
pub(crate) fn time(row: &MySqlRow, at: usize) -> sqlx::Result<Duration> {
    let micros: i64 = row.try_get(at)?;
    Ok(Duration::from_micros(unsigned(micros)))
}

/// Runs `TAKE`: the token, or `None` if the lock was not taken.
pub(crate) async fn take(
    native: &mut MySqlConnection,
    sql: &Statements,
    req: &Acquire,
    not_after: i64,
) -> sqlx::Result<Option<FencingToken>> {
    let lease = micros(req.lease.length());
    let (whose, hold) = inside(&req.owner, req.hold);
    let values = values(7, |all| {
        all.add(&whose[..])?;
        all.add(&hold[..])?;
        all.add(lease)?;
        all.add(lease)?;
        all.add(req.note.to_string().into_bytes())?;
        all.add(req.name.as_str().as_bytes())?;
        all.add(not_after)
    })?;
    let done = changes(native, &sql.take, values).await?;
    Ok((done.rows_affected() == 1).then(|| FencingToken(done.last_insert_id())))
}

/// Runs `INSERT`, for a name without a row: the token, or `None` after its not-after time.
pub(crate) async fn insert(
    native: &mut MySqlConnection,
    sql: &Statements,
    req: &Acquire,
    not_after: i64,
) -> sqlx::Result<Option<FencingToken>> {
    let lease = micros(req.lease.length());
    let done = sqlx::query(sql.insert.clone())
        .bind(req.name.as_str().as_bytes())
        .bind(written(&req.owner).into_bytes())
        .bind(req.hold.to_string().into_bytes())
        .bind(lease)
        .bind(lease)
        .bind(req.note.to_string().into_bytes())
        .bind(not_after)
        .execute(native)
        .await?;
    Ok((done.rows_affected() == 1).then(|| FencingToken(done.last_insert_id())))
}

/// Runs `FREE`: the server's time, or `None` if no hold was released.
pub(crate) async fn free(
    native: &mut MySqlConnection,
    sql: &Statements,
    (name, whose, hold): (&LockName, &Owner, HoldId),
) -> sqlx::Result<Option<Duration>> {
    let (whose, hold) = inside(whose, hold);
    let values = values(3, |all| {
        all.add(&whose[..])?;
        all.add(&hold[..])?;
        all.add(name.as_str().as_bytes())
    })?;
    let done = changes(native, &sql.free, values).await?;
    Ok((done.rows_affected() == 1).then(|| Duration::from_micros(done.last_insert_id())))
}

/// Runs `SWAP`: whether the row was still the one that was read.
pub(crate) async fn swap(
    native: &mut MySqlConnection,
    sql: &Statements,
    (name, record): (&LockName, Record),
    not_after: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query(sql.swap.clone())
        .bind(record.owner.map(String::into_bytes))
        .bind(record.holds.to_string().into_bytes())
        .bind(record.expires)
        .bind(record.keep_until)
        .bind(record.note.into_bytes())
        .bind(name.as_str().as_bytes())
        .bind(record.version)
        .bind(record.token)
        .bind(not_after)
        .execute(native)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// Runs `BREAK`: the token of the ended incarnation. `Some(None)`: only a minimum hold was ended; `None`:
/// nothing was.
pub(crate) async fn break_lock(
    native: &mut MySqlConnection,
    sql: &Statements,
    name: &LockName,
    only: Option<i64>,
) -> sqlx::Result<Option<Option<FencingToken>>> {
    let done = sqlx::query(sql.break_lock.clone())
        .bind(name.as_str().as_bytes())
        .bind(i64::from(only.is_none()))
        .bind(only.unwrap_or(0))
        .execute(native)
        .await?;
    let had = done.last_insert_id();
    Ok((done.rows_affected() == 1).then(|| (had > 0).then_some(FencingToken(had))))
}

/// Runs `LIST`: rows in name order.
pub(crate) async fn list(
    native: &mut MySqlConnection,
    sql: &Statements,
    (prefix, after): (&str, Vec<u8>),
    limit: usize,
) -> sqlx::Result<Vec<Listed>> {
    // No name has a byte above 0xf4, so all names with this prefix are below this.
    let end = [prefix.as_bytes(), PAST].concat();
    let rows: Vec<MySqlRow> = sqlx::query(sql.list.clone())
        .bind(prefix.as_bytes())
        .bind(after)
        .bind(end)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch(native)
        .try_collect()
        .await?;
    let listed = |row: &MySqlRow| -> sqlx::Result<_> {
        let (expires, now): (i64, i64) = (row.try_get(4)?, row.try_get(9)?);
        Ok(Listed {
            name: row.try_get(0)?,
            is_closed: expires > now,
            record: record(row),
        })
    };
    rows.iter().map(listed).collect()
}

/// A row of a listing; an unreadable one does not stop the listing.
pub(crate) struct Listed {
    pub(crate) name: Vec<u8>,
    pub(crate) is_closed: bool,
    pub(crate) record: sqlx::Result<Record>,
}

/// Runs `STALE`: the next names after a given one, and how long each has been unused.
pub(crate) async fn stale(
    native: &mut MySqlConnection,
    sql: &Statements,
    after: &[u8],
    limit: i64,
) -> sqlx::Result<Vec<(Vec<u8>, Duration)>> {
    let rows: Vec<MySqlRow> = sqlx::query(sql.stale.clone())
        .bind(after)
        .bind(limit)
        .fetch(native)
        .try_collect()
        .await?;
    let idle = |row: &MySqlRow| -> sqlx::Result<_> {
        let (last, now): (i64, i64) = (row.try_get(1)?, row.try_get(2)?);
        let span = u64::try_from(now.saturating_sub(last)).unwrap_or(0);
        Ok((row.try_get(0)?, Duration::from_micros(span)))
    };
    rows.iter().map(idle).collect()
}

/// Runs `FORGET`: whether the row existed and had been free long enough.
pub(crate) async fn forget(
    native: &mut MySqlConnection,
    sql: &Statements,
    name: &[u8],
) -> sqlx::Result<bool> {
    let done = sqlx::query(sql.forget.clone())
        .bind(name)
        .execute(native)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// Encodes `count` values of a statement, in the order of its placeholders, with one reservation of memory.
fn values(
    count: usize,
    add: impl FnOnce(&mut MySqlArguments) -> Result<(), BoxDynError>,
) -> sqlx::Result<MySqlArguments> {
    let mut values = MySqlArguments::default();
    values.reserve(count, ROOM);
    add(&mut values).map_err(sqlx::Error::Encode)?;
    Ok(values)
}

/// Runs a statement that returns no rows. The client's own `execute` does the same with two more boxes and
/// another stream.
async fn changes(
    native: &mut MySqlConnection,
    sql: &SqlStr,
    values: MySqlArguments,
) -> sqlx::Result<MySqlQueryResult> {
    let mut answer = native.fetch_many(sqlx::query_with(sql.clone(), values));
    let mut done = MySqlQueryResult::default();
    while let Some(part) = answer.try_next().await? {
        done.extend(part.left());
    }
    Ok(done)
}

/// Bytes for the values of one lock, unless its name is long.
const ROOM: usize = 256;

/// Ends the statement that connection `id` runs; only a number is put into the SQL text.
pub(crate) async fn kill(native: &mut MySqlConnection, id: u64) -> sqlx::Result<()> {
    let sql = AssertSqlSafe(format!("KILL QUERY {id}"));
    sqlx::raw_sql(sql).execute(native).await.map(drop)
}

/// A token as a bound value; `None` for one that no row can have.
pub(crate) fn bound(token: FencingToken) -> Option<i64> {
    i64::try_from(token.0).ok()
}

/// Reads a row in the column order of `LIST` and `FIND`: its name and its record.
pub(crate) fn read(row: &MySqlRow) -> sqlx::Result<(Vec<u8>, Record)> {
    Ok((row.try_get(0)?, record(row)?))
}

fn record(row: &MySqlRow) -> sqlx::Result<Record> {
    let text = |bytes: Vec<u8>| {
        String::from_utf8(bytes).map_err(|cause| sqlx::Error::Decode(Box::new(cause)))
    };
    let holds = text(row.try_get(3)?)?;
    let owner: Option<Vec<u8>> = row.try_get(1)?;
    Ok(Record {
        owner: owner.map(text).transpose()?,
        token: row.try_get(2)?,
        holds: holds
            .parse()
            .map_err(|cause| sqlx::Error::Decode(Box::new(cause)))?,
        expires: row.try_get(4)?,
        keep_until: row.try_get(5)?,
        began: row.try_get(6)?,
        note: text(row.try_get(7)?)?,
        version: row.try_get(8)?,
        now: row.try_get(9)?,
        changed: row.try_get(10)?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Statements, bound, ddl};
    use dlock_core::{FencingToken, MAX_HOLDS};

    #[test]
    fn nothing_is_left_open_in_a_text() {
        let sql = Statements::new(&"a.b".parse().unwrap());
        let all = format!("{sql:?}");
        assert!(
            !all.contains('{')
                || !all.contains("{now}") && !all.contains("{table}") && !all.contains("{list}")
        );
        assert!(sql.take.as_str().starts_with("UPDATE `a`.`b` SET"), "{all}");
        assert_eq!(sql.take.as_str().matches('?').count(), 7);
    }

    #[test]
    fn the_columns_are_those_of_the_table() {
        let made = ddl(&"t".parse().unwrap()).to_lowercase();
        for (name, kind, bytes, ..) in super::COLUMNS {
            let line = made
                .lines()
                .find(|line| line.trim_start().starts_with(&format!("{name} ")))
                .unwrap();
            let kind = bytes.map_or(kind.to_owned(), |bytes| format!("{kind}({bytes})"));
            assert!(line.contains(&kind), "{line}");
        }
        assert_eq!(made.matches(" not null").count(), super::COLUMNS.len() - 1);
        assert!(made.contains(&format!("holds      varbinary({})", MAX_HOLDS * 32)));
    }

    #[test]
    fn a_token_that_no_row_has_is_not_bound() {
        assert_eq!(bound(FencingToken(7)), Some(7));
        assert_eq!(bound(FencingToken(u64::MAX)), None);
    }
}
