//! All wire text: the table, the statements, what they are given and what they answer.
//!
//! | column | what |
//! |---|---|
//! | `name` | the lock's name, byte for byte |
//! | `owner` | who is inside; `NULL`: nobody |
//! | `token` | the fencing token given last |
//! | `holds` | the [`HoldSet`]; empty: nobody is inside |
//! | `expires` | when the last hold ends; with nobody inside, until when it stays shut; 0: free |
//! | `keep_until` | until when the longest `at_least_for` of this incarnation wants it shut |
//! | `began` | when the incarnation began |
//! | `changed` | when the row was last written |
//! | `note` | what its first holder said of itself |
//! | `version` | one more with every change of the row |
//!
//! The clock is the server's, in microseconds UTC whatever the session's zone: `UTC_TIMESTAMP(6)` is fixed when a statement begins, so what
//! waits for a row's lock writes an end that is too early, never too late. Each statement is a transaction of its own and finds its rows by the
//! primary key, the only index there is, so it locks nothing but them. All text is `VARBINARY`: no collation ever compares.
//!
//! The native client sets `CLIENT_FOUND_ROWS`: a count is of rows matched. Every write adds 1 to `version`, so matched and changed are the same
//! here, and who won is told by 0 or 1 of an `UPDATE` whose `WHERE` is the question. Where a statement has another number to tell it comes
//! through `LAST_INSERT_ID(expr)`, in the same reply.

use crate::{
    config::Table,
    lists::Lists,
    record::{Record, inside, micros, written},
};
use dlock_core::{Acquire, FencingToken, HoldId, LockName, Owner};
use futures_util::TryStreamExt;
use sqlx::{
    Arguments as _, AssertSqlSafe, Executor as _, MySqlConnection, Row, SqlSafeStr, SqlStr,
    error::BoxDynError,
    mysql::{MySqlArguments, MySqlQueryResult, MySqlRow},
};
use std::{sync::Arc, time::Duration};

/// Makes the table where it is not there; several may try at once. A table of that name that looks otherwise is left alone and refused by a
/// look at its columns.
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

/// The same as the server tells it: name, type, bytes of text, whether it may be `NULL`, whether it is the key.
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

/// Takes a name whose row is there and free or past its end, as a new incarnation; changes nothing else, nor anything after its not-after.
///
/// The token is the server's µs, or one more than the last where the clock is behind that. Run twice, the second finds a living hold. It begins
/// no earlier than the row was changed, though it may have begun to wait for the row before: a release of many tells by that who was inside when.
const TAKE: &str = "UPDATE {table} SET token = LAST_INSERT_ID(GREATEST(token + 1, {now})), owner = ?, \
    holds = CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), expires = {now} + ?, keep_until = 0, \
    began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
    WHERE name = ? AND expires <= {now} AND {now} <= ?";

/// Takes a name that has no row, unless it is past its not-after: no row then. Of several at once one wins, the others get error 1062.
const INSERT: &str = "INSERT INTO {table} (name, owner, token, holds, expires, keep_until, began, changed, note, version) \
    SELECT ?, ?, LAST_INSERT_ID({now}), CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), {now} + ?, 0, {now}, {now}, ?, 1 \
    FROM DUAL WHERE {now} <= ?";

/// Gives back the only hold of a name that nothing keeps shut; changes nothing in any other case. Run twice, the second finds no hold.
const FREE: &str = "UPDATE {table} SET owner = NULL, holds = '', expires = 0, note = '', changed = GREATEST(LAST_INSERT_ID({now}), changed), \
    version = version + 1 WHERE owner = ? AND LENGTH(holds) = 32 AND LEFT(holds, 16) = ? AND name = ? AND expires > {now} AND keep_until <= {now}";

/// Writes a row that was read before, if it is still the same and still closed. Run twice, the second finds another version. A row that somebody
/// deleted and the next holder made again has a version that may have been there before, but never such a token.
const SWAP: &str = "UPDATE {table} SET owner = ?, holds = ?, expires = ?, keep_until = ?, note = ?, \
    changed = GREATEST(LAST_INSERT_ID({now}), changed), \
    version = version + 1 \
    WHERE name = ? AND version = ? AND token = ? AND expires > {now} AND {now} <= ?";

/// Ends whatever incarnation there is, or the one with that token, and answers its token, 0 where it was only shut. Run twice, the second
/// finds it free. The token is read before the owner goes: a server assigns from left to right. Nothing is changed before the last change.
const BREAK: &str = "UPDATE {table} SET token = token + 0 * LAST_INSERT_ID(IF(owner IS NULL, 0, token)), owner = NULL, holds = '', expires = 0, \
    keep_until = 0, note = '', changed = GREATEST({now}, changed), version = version + 1 \
    WHERE name = ? AND expires > {now} AND (? OR (token = ? AND owner IS NOT NULL))";

/// One step over the names in their order, free ones too: as many rows as the page may have, whatever they are. Locks nothing.
const LIST: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, {now}, changed FROM {table} \
    WHERE name >= ? AND name > ? AND name < ? ORDER BY name LIMIT ?";

/// Names after one, and since when nobody has wanted them: what a sweep looks at. Locks nothing.
const STALE: &str = "SELECT name, GREATEST(changed, expires), {now} FROM {table} WHERE name > ? ORDER BY name LIMIT ?";

/// Forgets one name that has been free for a day, and whose last token is as old. The next token of a forgotten name is the server's time:
/// greater, unless that is set back by more than a day.
const FORGET: &str = "DELETE FROM {table} \
    WHERE name = ? AND GREATEST(changed, expires, token) <= {now} - 86400000000";

/// The server's time, and whether the session has another: `UTC_TIMESTAMP` obeys `SET timestamp`, `SYSDATE` does not (the session's zone is UTC).
const TIME: &str = "SELECT {now}, ABS(TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), SYSDATE(6))) > 5";

/// Microseconds since 1970; the difference of two `DATETIME`s knows no zone. A `DATE`, because a MariaDB reads a text again for each row and
/// each time it stands in a statement: a fifth of what a renewed row costs it.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6))";

/// The least text that no name begins with.
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
    /// The table's name is checked and quoted; nothing else is ever put into a text.
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

/// With the server's time put in. Kept where it can be handed out without being copied.
pub(crate) fn ready(sql: String) -> SqlStr {
    AssertSqlSafe(Arc::<str>::from(sql.replace("{now}", NOW))).into_sql_str()
}

/// The server's time, and whether the session was given one of its own.
pub(crate) async fn clock(native: &mut MySqlConnection) -> sqlx::Result<(Duration, bool)> {
    let row = sqlx::raw_sql(ready(TIME.to_owned()))
        .fetch_one(native)
        .await?;
    let (now, is_set): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    Ok((Duration::from_micros(now.unsigned_abs()), is_set != 0))
}

/// The token it was taken with; `None`: it was not.
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

/// The same for a name without a row; `None`: it is past its not-after.
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

/// The server's time, if it was given back.
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

/// Whether the row was still the one that was read.
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

/// The token that it had, if it was ended; `Some(None)`: it was shut.
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

/// Rows in the order of their names.
pub(crate) async fn list(
    native: &mut MySqlConnection,
    sql: &Statements,
    (prefix, after): (&str, Vec<u8>),
    limit: usize,
) -> sqlx::Result<Vec<(Vec<u8>, Record)>> {
    // No name has a byte above 0xf4, so all that begin with the prefix are below this.
    let end = [prefix.as_bytes(), PAST].concat();
    let rows: Vec<MySqlRow> = sqlx::query(sql.list.clone())
        .bind(prefix.as_bytes())
        .bind(after)
        .bind(end)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch(native)
        .try_collect()
        .await?;
    rows.iter().map(read).collect()
}

/// The next names after one, and for how long nobody has wanted each.
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

/// Whether it was there and long free.
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

/// So many values of a statement, in the order of its marks: room is made for them once.
fn values(
    count: usize,
    add: impl FnOnce(&mut MySqlArguments) -> Result<(), BoxDynError>,
) -> sqlx::Result<MySqlArguments> {
    let mut values = MySqlArguments::default();
    values.reserve(count, ROOM);
    add(&mut values).map_err(sqlx::Error::Encode)?;
    Ok(values)
}

/// What a statement did that shows no rows. The client's own `execute` does the same in two more boxes and a stream on top of this one.
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

/// Bytes of the values of one lock, but for a long name.
const ROOM: usize = 256;

/// Ends whatever that connection runs; only a number is put into the text.
pub(crate) async fn kill(native: &mut MySqlConnection, id: u64) -> sqlx::Result<()> {
    let sql = AssertSqlSafe(format!("KILL QUERY {id}"));
    sqlx::raw_sql(sql).execute(native).await.map(drop)
}

/// A token of ours, as it is bound; one that no row can have: `None`.
pub(crate) fn bound(token: FencingToken) -> Option<i64> {
    i64::try_from(token.0).ok()
}

/// A row as statements show it.
pub(crate) fn read(row: &MySqlRow) -> sqlx::Result<(Vec<u8>, Record)> {
    let text = |bytes: Vec<u8>| {
        String::from_utf8(bytes).map_err(|cause| sqlx::Error::Decode(Box::new(cause)))
    };
    let holds = text(row.try_get(3)?)?;
    let owner: Option<Vec<u8>> = row.try_get(1)?;
    let record = Record {
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
    };
    Ok((row.try_get(0)?, record))
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
