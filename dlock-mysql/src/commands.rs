//! SQL commands: the table, the statements, their parameters and their answers.
//!
//! All SQL that touches locks is here, so that its atomicity can be checked in one place.
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
//! index, and locks only them, in the order of their names: statements can wait for each other but never in a
//! cycle. All text is `VARBINARY`, so no collation takes part in a comparison.
//!
//! The native client sets `CLIENT_FOUND_ROWS`, so a count is of rows matched. Every write adds 1 to
//! `version`, so matched and changed are the same here. The count of an `UPDATE`, 0 or 1, tells whether its
//! `WHERE` held. A statement with another number to return uses `LAST_INSERT_ID(expr)`, which comes in the
//! same reply.
//!
//! A list has one of a few lengths and is padded by repeating its last entry, so that each statement stays
//! prepared.

use crate::{requests::Sole, table::signed};
use dlock_core::{
    HoldId, LockName, Owner,
    driver::{
        Acquire, Renew,
        kit::{Columns, DamagedRecord, Record, Stored, TableName as Table, Write},
    },
};
use sqlx::{
    AssertSqlSafe, MySqlConnection, Row as _, SqlSafeStr, SqlStr,
    mysql::{MySql, MySqlArguments, MySqlRow},
    query::Query,
};
use std::{fmt::Display, sync::Arc, time::Duration};

/// Makes the table if it is missing; several clients may try at once. A different table of that name is left
/// alone; the check of its columns refuses it.
const CREATE: &str = "CREATE TABLE IF NOT EXISTS {table} (
  name       VARBINARY(512)  NOT NULL PRIMARY KEY,
  owner      VARBINARY(36),
  token      BIGINT          NOT NULL,
  holds      VARBINARY(32800) NOT NULL,
  expires    BIGINT          NOT NULL,
  keep_until BIGINT          NOT NULL,
  began      BIGINT          NOT NULL,
  changed    BIGINT          NOT NULL,
  note       VARBINARY(128)  NOT NULL,
  version    BIGINT          NOT NULL
) ENGINE=InnoDB";

/// The same table as the server describes it: names and types. The first column is the key.
pub(crate) const COLUMNS: [(&str, &str); 10] = [
    ("name", "VARBINARY(512) NOT NULL"),
    ("owner", "VARBINARY(36)"),
    ("token", "BIGINT NOT NULL"),
    ("holds", "VARBINARY(32800) NOT NULL"),
    ("expires", "BIGINT NOT NULL"),
    ("keep_until", "BIGINT NOT NULL"),
    ("began", "BIGINT NOT NULL"),
    ("changed", "BIGINT NOT NULL"),
    ("note", "VARBINARY(128) NOT NULL"),
    ("version", "BIGINT NOT NULL"),
];

/// Takes a name whose row exists and is free or past its end, as a new incarnation. Otherwise, or after its
/// not-after time, it changes nothing.
///
/// The token is the server's µs, or the last token plus one where the clock is behind that; a token of which
/// none is greater is left to the record driver, as is a claim (16 times `f`). A second run finds a live hold. The incarnation begins no
/// earlier than the row's last change, even if the statement began to wait for the row before that. A batched
/// release relies on this order to tell who held the lock when.
const TAKE: &str = "UPDATE {table} SET token = LAST_INSERT_ID(GREATEST(token + 1, {now})), owner = ?, \
    holds = CONCAT(?, LPAD(LOWER(HEX({now} + ?)), 16, '0')), expires = {now} + ?, keep_until = 0, \
    began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
    WHERE name = ? AND expires <= {now} AND LEFT(RIGHT(holds, 32), 16) <> 'ffffffffffffffff' \
    AND token < 9223372036854775807 AND {now} <= ?";

/// Takes the names whose rows exist and are free or past their end, each as a new incarnation. It leaves the
/// others as they are, and all of them after its not-after time.
///
/// The token of each is the server's µs, returned in the reply. A row whose last token is not below that is
/// left as it is, so that one number is the token of all. Owners and holds have a fixed width each, in the
/// order of the list. A second run finds live holds.
const TAKE_ALL: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET expires = {now} + ?, \
    holds = CONCAT(SUBSTRING(?, 16 * FIELD(name, {list}) - 15, 16), LPAD(LOWER(HEX({now} + ?)), 16, '0')), \
    owner = SUBSTRING(?, 36 * FIELD(name, {list}) - 35, 36), token = LAST_INSERT_ID({now}), keep_until = 0, \
    began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
    WHERE name IN ({list}) AND expires <= {now} AND LEFT(RIGHT(holds, 32), 16) <> 'ffffffffffffffff' \
    AND token < {now} AND {now} <= ?";

/// Releases the only hold of a name without a pending minimum hold; changes nothing otherwise. A second run
/// finds no hold.
const FREE: &str = "UPDATE {table} SET owner = NULL, holds = '', expires = 0, note = '', changed = GREATEST(LAST_INSERT_ID({now}), changed), \
    version = version + 1 WHERE owner = ? AND LENGTH(holds) = 32 AND LEFT(holds, 16) = ? AND name = ? AND expires > {now} AND keep_until <= {now}";

/// Releases sole holds of names without a pending minimum hold. Each row is judged alone; any other is left
/// as it is and not counted.
///
/// Entries of the second list end in fixed-width parts, so no two are equal. A second run finds no hold.
const FREE_ALL: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET owner = NULL, holds = '', expires = 0, note = '', \
    changed = GREATEST(LAST_INSERT_ID({now}), changed), version = version + 1 \
    WHERE name IN ({list}) AND CONCAT(name, owner, LEFT(holds, 16)) IN ({list}) \
    AND LENGTH(holds) = 32 AND expires > {now} AND keep_until <= {now}";

/// Renews sole holds. Each row is judged alone; one without that hold, or with several, is left as it is and
/// not counted.
///
/// A second run renews again, never past one lease after that run. Entries of the second list end in
/// fixed-width parts, so no two are equal. Both texts begin with the same hold id, so the greater text is the
/// later end.
const RENEW: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET \
    holds = GREATEST(holds, CONCAT(LEFT(holds, 16), LPAD(LOWER(HEX({now} + ?)), 16, '0'))), expires = GREATEST(expires, {now} + ?), \
    changed = GREATEST(LAST_INSERT_ID({now}), changed), version = version + 1 \
    WHERE name IN ({list}) AND CONCAT(name, owner, LEFT(holds, 16)) IN ({list}) \
    AND LENGTH(holds) = 32 AND expires > {now} AND {now} <= ?";

/// Writes the first row of a name; after its not-after time, it inserts none. Of several at once one wins, and
/// the others get error 1062. So does a second run.
const INSERT: &str = "INSERT INTO {table} (name, owner, holds, token, expires, keep_until, began, changed, note, version) \
    SELECT ?, ?, ?, ?, ?, ?, ?, {now}, ?, ? FROM DUAL WHERE {now} <= ?";

/// Writes a row that was read before, if it is unchanged. A second run finds another version. A name's first
/// version is the time at which its row was made, so a row that was deleted and made again has another one.
///
/// A new incarnation has a new token, and begins as in [`TAKE`]; `changed` never goes back.
const SWAP: &str = "UPDATE {table} SET began = IF(token = ?, began, GREATEST({now}, changed)), token = ?, expires = ?, keep_until = ?, \
    owner = ?, holds = ?, note = ?, version = ?, changed = GREATEST({now}, changed) WHERE name = ? AND version = ? AND {now} <= ?";

/// Reads rows and the server's time, in a row without a name if there is no other; locks nothing and waits
/// for nothing.
const FIND: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, changed, micros \
    FROM (SELECT {now} AS micros) AS clock LEFT JOIN {table} FORCE INDEX (PRIMARY) ON name IN ({list})";

/// The rows that no other transaction has locked at this moment; waits for none. Its own row locks end with
/// the statement.
const UNLOCKED: &str =
    "SELECT name FROM {table} FORCE INDEX (PRIMARY) WHERE name IN ({list}) FOR UPDATE SKIP LOCKED";

/// One page of names in order, free ones included: as many rows as the page may have. Locks nothing.
const LIST: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, changed, {now} AS micros FROM {table} \
    WHERE name >= ? AND name > ? AND name < ? ORDER BY name LIMIT ?";

/// The names after a given one, and whether each was free for a day, for a sweep. Locks nothing.
const UNUSED: &str = "SELECT name, GREATEST(changed, expires) <= {now} - 86400000000 FROM {table} WHERE name > ? ORDER BY name LIMIT ?";

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

/// Lengths of lists: few of them, so that each statement stays prepared.
const SIZES: [usize; 4] = [1, 8, 64, LIST_BATCH];
/// Lengths of the lists of batched requests, which may have any number.
const BATCHES: [usize; 5] = [4, 8, 16, 32, GATHERED];
/// The most entries in one statement; more gain nothing.
pub(crate) const LIST_BATCH: usize = 512;
/// The most acquires or releases in one statement.
pub(crate) const GATHERED: usize = 64;

/// A statement and its values.
pub(crate) type Statement = Query<'static, MySql, MySqlArguments>;

/// The statements for one table.
#[derive(Debug)]
pub(crate) struct Statements {
    take: SqlStr,
    free: SqlStr,
    insert: SqlStr,
    swap: SqlStr,
    list: SqlStr,
    unused: SqlStr,
    forget: SqlStr,
    take_all: Lengths,
    free_all: Lengths,
    renew: Lengths,
    find: Lengths,
    unlocked: Lengths,
}

/// One statement in several lengths.
#[derive(Debug)]
struct Lengths(Vec<(usize, SqlStr)>);

impl Lengths {
    /// The text for that many entries, and the number it has room for. Batches never exceed the longest.
    fn fitting(&self, entries: usize) -> (SqlStr, usize) {
        let fits = self.0.iter().find(|(size, _)| entries <= *size);
        let (size, text) = fits.unwrap_or(&self.0[self.0.len() - 1]);
        (text.clone(), *size)
    }
}

impl Statements {
    /// The table's name is checked and quoted; no other input is ever put into the SQL text.
    pub(crate) fn new(table: &Table) -> Self {
        let table = table.quoted('`');
        let text = |sql: &str| ready(sql.replace("{table}", &table));
        let sized = |sql: &str, sizes: &[usize]| {
            let one = |size: &usize| {
                let list = ["?"].repeat(*size).join(", ");
                (*size, text(&sql.replace("{list}", &list)))
            };
            Lengths(sizes.iter().map(one).collect())
        };
        Self {
            take: text(TAKE),
            free: text(FREE),
            insert: text(INSERT),
            swap: text(SWAP),
            list: text(LIST),
            unused: text(UNUSED),
            forget: text(FORGET),
            take_all: sized(TAKE_ALL, &BATCHES),
            free_all: sized(FREE_ALL, &BATCHES),
            renew: sized(RENEW, &SIZES),
            find: sized(FIND, &SIZES),
            unlocked: sized(UNLOCKED, &SIZES),
        }
    }

    /// `TAKE`: it matches one row if it took the lock, and tells the token.
    pub(crate) fn take(&self, req: &Acquire, not_after: u64) -> Statement {
        let lease = micros(req.lease.length());
        sqlx::query(self.take.clone())
            .bind(&written(&req.owner)[..])
            .bind(bytes(req.hold))
            .bind(lease)
            .bind(lease)
            .bind(bytes(&req.info))
            .bind(req.name.as_str().as_bytes())
            .bind(signed(not_after))
    }

    /// `TAKE_ALL` for at most [`GATHERED`] names: it tells the server's time, which is the token of each row
    /// that it matched. All requests have the same lease and holder info.
    pub(crate) fn take_all(&self, batch: &[Acquire], not_after: u64) -> Statement {
        let (text, size) = self.take_all.fitting(batch.len());
        let first = batch.first();
        let lease = first.map_or(0, |req| micros(req.lease.length()));
        let note = first.map_or_else(Vec::new, |req| bytes(&req.info));
        let holds: String = batch.iter().map(|req| req.hold.to_string()).collect();
        let owners: Vec<u8> = batch.iter().flat_map(|req| written(&req.owner)).collect();
        let names = || filled(batch.iter().map(|req| req.name.as_str().as_bytes()), size);
        let statement = sqlx::query(text).bind(lease).bind(holds.into_bytes());
        let statement = all(statement, names()).bind(lease).bind(owners);
        let statement = all(statement, names()).bind(note);
        all(statement, names()).bind(signed(not_after))
    }

    /// `FREE`: it matches one row if it released the hold, and tells the server's time.
    pub(crate) fn free(&self, (req, hold): &Sole) -> Statement {
        sqlx::query(self.free.clone())
            .bind(&written(&req.owner)[..])
            .bind(bytes(hold))
            .bind(req.name.as_str().as_bytes())
    }

    /// `FREE_ALL` for at most [`GATHERED`] sole holds: it tells the server's time if it released any.
    pub(crate) fn free_all(&self, batch: &[Sole]) -> Statement {
        let (text, size) = self.free_all.fitting(batch.len());
        let names = batch.iter().map(|(req, _)| req.name.as_str().as_bytes());
        let names = filled(names, size);
        let keys = batch
            .iter()
            .map(|(req, hold)| key(&req.name, &req.owner, *hold));
        all(all(sqlx::query(text), names), filled(keys, size))
    }

    /// `RENEW` for at most [`LIST_BATCH`] sole holds: it tells the server's time if it renewed any.
    pub(crate) fn renew(&self, batch: &[&Renew], lease: Duration, not_after: u64) -> Statement {
        let (text, size) = self.renew.fitting(batch.len());
        let lease = micros(lease);
        let names = filled(
            batch.iter().map(|entry| entry.name.as_str().as_bytes()),
            size,
        );
        let keys = batch
            .iter()
            .map(|entry| key(&entry.name, &entry.owner, entry.hold));
        let statement = sqlx::query(text).bind(lease).bind(lease);
        all(all(statement, names), filled(keys, size)).bind(signed(not_after))
    }

    /// `INSERT`: it matches one row if it came in time.
    pub(crate) fn insert(&self, write: &Write) -> Statement {
        let record = &write.record;
        sqlx::query(self.insert.clone())
            .bind(write.name.as_str().as_bytes())
            .bind(record.owner.map(|owner| written(&owner).to_vec()))
            .bind(bytes(&record.holds))
            .bind(signed(record.token))
            .bind(signed(record.unavailable_until))
            .bind(signed(record.min_hold_until))
            .bind(signed(record.began))
            .bind(bytes(&record.holder_info))
            .bind(signed(record.version))
            .bind(signed(write.not_after))
    }

    /// `SWAP`: it matches one row if that still had the version, and it came in time.
    pub(crate) fn swap(&self, write: &Write, version: i64) -> Statement {
        let record = &write.record;
        sqlx::query(self.swap.clone())
            .bind(signed(record.token))
            .bind(signed(record.token))
            .bind(signed(record.unavailable_until))
            .bind(signed(record.min_hold_until))
            .bind(record.owner.map(|owner| written(&owner).to_vec()))
            .bind(bytes(&record.holds))
            .bind(bytes(&record.holder_info))
            .bind(signed(record.version))
            .bind(write.name.as_str().as_bytes())
            .bind(version)
            .bind(signed(write.not_after))
    }

    /// `FIND` for at most [`LIST_BATCH`] names.
    pub(crate) fn find(&self, names: &[&LockName]) -> Statement {
        let (text, size) = self.find.fitting(names.len());
        let names = names.iter().map(|name| name.as_str().as_bytes());
        all(sqlx::query(text), filled(names, size))
    }

    /// `UNLOCKED` for at most [`LIST_BATCH`] names.
    pub(crate) fn unlocked(&self, names: &[&LockName]) -> Statement {
        let (text, size) = self.unlocked.fitting(names.len());
        let names = names.iter().map(|name| name.as_str().as_bytes());
        all(sqlx::query(text), filled(names, size))
    }

    /// `LIST`.
    pub(crate) fn list(&self, prefix: &str, after: &[u8], limit: usize) -> Statement {
        // No name has a byte above 0xf4, so all names with this prefix are below this.
        let end = [prefix.as_bytes(), PAST].concat();
        sqlx::query(self.list.clone())
            .bind(prefix.as_bytes())
            .bind(after)
            .bind(end)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
    }

    /// `UNUSED`.
    pub(crate) fn unused(&self, after: &[u8], limit: usize) -> Statement {
        sqlx::query(self.unused.clone())
            .bind(after)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
    }

    /// `FORGET`.
    pub(crate) fn forget(&self, name: &[u8]) -> Statement {
        sqlx::query(self.forget.clone()).bind(name)
    }
}

/// A row as it was read.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: Vec<u8>,
    /// The server's time.
    pub(crate) now: u64,
    /// When the row was last written.
    pub(crate) changed: u64,
    pub(crate) version: i64,
    pub(crate) expires: u64,
    pub(crate) record: Result<Record, DamagedRecord>,
}

impl Row {
    /// A row of `FIND` or `LIST`; `None`: it has only the time.
    pub(crate) fn read(row: &MySqlRow) -> Option<Self> {
        Some(Self {
            name: row.try_get::<Option<Vec<u8>>, _>("name").ok()??,
            now: Self::time(row).ok()?,
            changed: number(row, "changed"),
            version: row.try_get("version").ok()?,
            expires: number(row, "expires"),
            record: record(row),
        })
    }

    /// The server's time in a row of `FIND` or `LIST`.
    pub(crate) fn time(row: &MySqlRow) -> sqlx::Result<u64> {
        let micros: i64 = row.try_get("micros")?;
        Ok(micros.unsigned_abs())
    }

    /// The name in a row of `UNLOCKED` or `UNUSED`.
    pub(crate) fn name(row: &MySqlRow) -> Option<Vec<u8>> {
        row.try_get(0).ok()
    }

    /// Whether a row of `UNUSED` was free for a day.
    pub(crate) fn is_unused(row: &MySqlRow) -> bool {
        row.try_get::<i64, _>(1).is_ok_and(|unused| unused == 1)
    }

    /// The record. A damaged row past its end is free, whatever else it says.
    pub(crate) fn stored(self) -> Stored {
        match self.record {
            Err(damaged) if self.expires <= self.now && (0..i64::MAX).contains(&self.version) => {
                Stored::Record(Record {
                    token: damaged.token,
                    version: self.version.unsigned_abs(),
                    ..Record::default()
                })
            }
            Err(damaged) => Stored::Damaged(damaged),
            Ok(record) => Stored::Record(record),
        }
    }
}

/// The record, or the column that something other than dlock wrote.
fn record(row: &MySqlRow) -> Result<Record, DamagedRecord> {
    let text = |column: &str| {
        let bytes = row.try_get::<Option<&[u8]>, _>(column).ok()?;
        std::str::from_utf8(bytes.unwrap_or_default()).ok()
    };
    let number = |column: &str| row.try_get(column).unwrap_or(i64::MIN);
    let columns = Columns {
        owner: text("owner"),
        token: number("token"),
        holds: text("holds"),
        expires: number("expires"),
        keep_until: number("keep_until"),
        began: number("began"),
        waiters: 0,
        note: text("note"),
        version: number("version"),
    };
    columns.record()
}

/// A time; dlock writes none below zero.
fn number(row: &MySqlRow, column: &str) -> u64 {
    let number = row.try_get::<i64, _>(column).unwrap_or(0);
    u64::try_from(number).unwrap_or(0)
}

/// Pads a list by repeating its last entry.
fn filled<T: Clone>(list: impl Iterator<Item = T> + Clone, size: usize) -> impl Iterator<Item = T> {
    let last = list.clone().last();
    list.chain(last.into_iter().cycle()).take(size)
}

fn all<'t, T>(statement: Statement, list: impl Iterator<Item = T>) -> Statement
where
    T: sqlx::Encode<'t, MySql> + sqlx::Type<MySql>,
{
    list.fold(statement, |statement, value| statement.bind(value))
}

/// The text by which statements compare a sole hold.
fn key(name: &LockName, owner: &Owner, hold: HoldId) -> Vec<u8> {
    [name.as_str().as_bytes(), &written(owner), &bytes(hold)].concat()
}

/// An owner in the form of the row.
fn written(owner: &Owner) -> [u8; 36] {
    let mut text = [0; 36];
    owner.expose().hyphenated().encode_lower(&mut text);
    text
}

fn bytes(text: impl Display) -> Vec<u8> {
    text.to_string().into_bytes()
}

/// A span in the unit of the row's times.
fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// What makes the table, and what `dlock schema` prints.
pub(crate) fn ddl(table: &Table) -> String {
    CREATE.replace("{table}", &table.quoted('`'))
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
    Ok(Duration::from_micros(micros.unsigned_abs()))
}

/// Ends the statement that connection `id` runs, if it names dlock's table. After a failover another server answers, where
/// a stranger's connection may have that number; one that names the table is a driver's, which repeats it. Only a number is
/// put into the SQL text.
pub(crate) async fn kill(native: &mut MySqlConnection, id: u64, table: &str) -> sqlx::Result<()> {
    let shown = format!("SELECT INFO FROM information_schema.PROCESSLIST WHERE ID = {id}");
    let shown = sqlx::raw_sql(AssertSqlSafe(shown));
    let runs: Option<Vec<u8>> = match shown.fetch_optional(&mut *native).await? {
        Some(row) => row.try_get_unchecked(0)?,
        None => None,
    };
    if runs.is_some_and(|sql| String::from_utf8_lossy(&sql).contains(table)) {
        let sql = AssertSqlSafe(format!("KILL QUERY {id}"));
        sqlx::raw_sql(sql).execute(native).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Statements, ddl, filled};
    use dlock_core::MAX_SHARERS;

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
        let made = ddl(&"t".parse().unwrap());
        let columns = made.lines().filter(|line| line.starts_with("  "));
        let columns: Vec<_> = columns
            .map(|line| {
                line.replace(',', " ")
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .collect();
        let (name, kind) = super::COLUMNS[0];
        assert_eq!(columns[0], format!("{name} {kind} PRIMARY KEY"));
        let others = super::COLUMNS[1..].iter();
        let others: Vec<_> = others
            .map(|(name, kind)| format!("{name} {kind}"))
            .collect();
        assert_eq!(columns[1..], others);
        assert!(made.contains(&format!("holds      VARBINARY({})", (MAX_SHARERS + 1) * 32)));
    }

    #[test]
    fn a_list_is_filled_up_by_its_last_entry() {
        let list = [1, 2];
        assert_eq!(filled(list.iter(), 4).collect::<Vec<_>>(), [&1, &2, &2, &2]);
        let sql = Statements::new(&"t".parse().unwrap());
        for (entries, room) in [(1, 1), (2, 8), (8, 8), (9, 64), (65, 512), (512, 512)] {
            let (text, size) = sql.renew.fitting(entries);
            assert_eq!(
                (size, text.as_str().matches('?').count()),
                (room, 2 * room + 3)
            );
        }
        for (entries, room) in [(2, 4), (5, 8), (33, 64), (64, 64)] {
            for (sized, lists, others) in [(&sql.take_all, 3, 6), (&sql.free_all, 2, 0)] {
                let (text, size) = sized.fitting(entries);
                let places = text.as_str().matches('?').count();
                assert_eq!((size, places), (room, lists * room + others));
            }
        }
    }
}
