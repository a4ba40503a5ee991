//! SQL for many names at once; see `commands` for the columns and the clock.
//!
//! Each statement is one transaction. All of them lock rows in the order of their names, so they can wait for
//! each other but never in a cycle. A list has one of a few lengths and is padded by repeating its last
//! entry, so that each statement stays prepared.

use crate::{
    commands::{Statements, read, ready},
    record::{Record, micros, written},
};
use dlock_core::{Acquire, Holds, LockName, Owner, Release, Renew};
use futures_util::TryStreamExt;
use sqlx::{MySqlConnection, Row, SqlStr, mysql::MySqlRow};
use std::{collections::HashMap, time::Duration};

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
    WHERE name IN ({list}) AND expires <= {now} AND token < {now} AND {now} <= ?";

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
    changed = LAST_INSERT_ID({now}), version = version + 1 \
    WHERE name IN ({list}) AND CONCAT(name, owner, LEFT(holds, 16)) IN ({list}) \
    AND LENGTH(holds) = 32 AND expires > {now} AND {now} <= ?";

/// Reads rows; locks nothing and waits for nothing.
const FIND: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, {now}, changed \
    FROM {table} FORCE INDEX (PRIMARY) WHERE name IN ({list})";

/// The rows that no other transaction has locked at this moment; waits for none. Its own row locks end with
/// the statement.
const UNLOCKED: &str =
    "SELECT name FROM {table} FORCE INDEX (PRIMARY) WHERE name IN ({list}) FOR UPDATE SKIP LOCKED";

/// Lengths of lists: few of them, so that each statement stays prepared.
const SIZES: [usize; 4] = [1, 8, 64, RENEW_BATCH];
/// Lengths of the lists of batched requests, which may have any number.
const GATHERED: [usize; 5] = [4, 8, 16, 32, crate::gather::MOST];
/// The most entries in one statement; more gain nothing.
pub(crate) const RENEW_BATCH: usize = 512;

/// The statements for one table.
#[derive(Debug)]
pub(crate) struct Lists {
    take_all: Lengths,
    free_all: Lengths,
    renew: Lengths,
    find: Lengths,
    unlocked: Lengths,
}

/// One statement in several lengths.
#[derive(Debug)]
struct Lengths(Vec<(usize, SqlStr)>);

impl Lists {
    /// `table` is the quoted name.
    pub(crate) fn new(table: &str) -> Self {
        let sized = |sql: &str, sizes: &[usize]| {
            let sql = sql.replace("{table}", table);
            let text = |size: &usize| {
                let list = ["?"].repeat(*size).join(", ");
                (*size, ready(sql.replace("{list}", &list)))
            };
            Lengths(sizes.iter().map(text).collect())
        };
        Self {
            take_all: sized(TAKE_ALL, &GATHERED),
            free_all: sized(FREE_ALL, &GATHERED),
            renew: sized(RENEW, &SIZES),
            find: sized(FIND, &SIZES),
            unlocked: sized(UNLOCKED, &SIZES),
        }
    }
}

impl Lengths {
    /// The text for that many entries, and the number it has room for. Batches never exceed the longest.
    fn fitting(&self, entries: usize) -> (SqlStr, usize) {
        let fits = self.0.iter().find(|(size, _)| entries <= *size);
        let (size, text) = fits.unwrap_or(&self.0[self.0.len() - 1]);
        (text.clone(), *size)
    }
}

/// Pads a list by repeating its last entry.
fn filled<T: Clone>(list: impl Iterator<Item = T> + Clone, size: usize) -> impl Iterator<Item = T> {
    let last = list.clone().last();
    list.chain(last.into_iter().cycle()).take(size)
}

/// The text by which statements compare a sole hold.
fn key(name: &LockName, owner: &Owner, hold: impl std::fmt::Display) -> Vec<u8> {
    format!("{name}{}{hold}", written(owner)).into_bytes()
}

/// Runs `TAKE_ALL` for at most [`MOST`](crate::gather::MOST) names: how many were taken, and the server's
/// time if any was, which is the token of each. All requests have the same lease and holder info.
pub(crate) async fn take_all(
    native: &mut MySqlConnection,
    sql: &Statements,
    batch: &[Acquire],
    not_after: i64,
) -> sqlx::Result<(usize, u64)> {
    let (text, size) = sql.lists.take_all.fitting(batch.len());
    let first = batch.first();
    let lease = first.map_or(0, |req| micros(req.lease.length()));
    let note = first.map_or_else(String::new, |req| req.note.to_string());
    let holds: String = batch.iter().map(|req| req.hold.to_string()).collect();
    let owners: String = batch.iter().map(|req| written(&req.owner)).collect();
    let names = || filled(batch.iter().map(|req| req.name.as_str().as_bytes()), size);
    let mut query = sqlx::query(text).bind(lease).bind(holds.into_bytes());
    for name in names() {
        query = query.bind(name);
    }
    query = query.bind(lease).bind(owners.into_bytes());
    for name in names() {
        query = query.bind(name);
    }
    query = query.bind(note.into_bytes());
    for name in names() {
        query = query.bind(name);
    }
    let done = query.bind(not_after).execute(native).await?;
    let matched = usize::try_from(done.rows_affected()).unwrap_or(usize::MAX);
    Ok((matched, done.last_insert_id()))
}

/// Runs `FREE_ALL` for at most [`MOST`](crate::gather::MOST) sole holds: how many were released, and the
/// server's time if any was.
pub(crate) async fn free_all(
    native: &mut MySqlConnection,
    sql: &Statements,
    batch: &[Release],
) -> sqlx::Result<(usize, u64)> {
    let (text, size) = sql.lists.free_all.fitting(batch.len());
    let mut query = sqlx::query(text);
    for req in filled(batch.iter(), size) {
        query = query.bind(req.name.as_str().as_bytes());
    }
    for req in filled(batch.iter(), size) {
        let hold = match req.holds {
            Holds::One(hold) => hold.to_string(),
            Holds::All => String::new(), // matches nothing
        };
        query = query.bind(key(&req.name, &req.owner, hold));
    }
    let done = query.execute(native).await?;
    let matched = usize::try_from(done.rows_affected()).unwrap_or(usize::MAX);
    Ok((matched, done.last_insert_id()))
}

/// Runs `RENEW` for at most [`RENEW_BATCH`] sole holds: how many were renewed, and the server's time if any
/// was.
pub(crate) async fn renew(
    native: &mut MySqlConnection,
    sql: &Statements,
    batch: &[&Renew],
    (lease, not_after): (Duration, i64),
) -> sqlx::Result<(usize, Duration)> {
    let (text, size) = sql.lists.renew.fitting(batch.len());
    let lease = micros(lease);
    let mut query = sqlx::query(text).bind(lease).bind(lease);
    for entry in filled(batch.iter(), size) {
        query = query.bind(entry.name.as_str().as_bytes());
    }
    for entry in filled(batch.iter(), size) {
        query = query.bind(key(&entry.name, &entry.owner, entry.hold));
    }
    let done = query.bind(not_after).execute(native).await?;
    let matched = usize::try_from(done.rows_affected()).unwrap_or(usize::MAX);
    Ok((matched, Duration::from_micros(done.last_insert_id())))
}

/// Runs `FIND` for at most [`RENEW_BATCH`] names: the rows by name, without those that do not exist.
pub(crate) async fn find(
    native: &mut MySqlConnection,
    sql: &Statements,
    names: &[&LockName],
) -> sqlx::Result<HashMap<Vec<u8>, Record>> {
    let (text, size) = sql.lists.find.fitting(names.len());
    let mut query = sqlx::query(text);
    for name in filled(names.iter(), size) {
        query = query.bind(name.as_str().as_bytes());
    }
    let rows: Vec<MySqlRow> = query.fetch(native).try_collect().await?;
    rows.iter().map(read).collect()
}

/// Runs `UNLOCKED` for at most [`RENEW_BATCH`] names: those with a row that no other transaction has locked.
pub(crate) async fn unlocked(
    native: &mut MySqlConnection,
    sql: &Statements,
    names: &[&LockName],
) -> sqlx::Result<Vec<Vec<u8>>> {
    let (text, size) = sql.lists.unlocked.fitting(names.len());
    let mut query = sqlx::query(text);
    for name in filled(names.iter(), size) {
        query = query.bind(name.as_str().as_bytes());
    }
    let rows: Vec<MySqlRow> = query.fetch(native).try_collect().await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Lists, filled};

    #[test]
    fn a_list_is_filled_up_by_its_last_entry() {
        let list = [1, 2];
        assert_eq!(filled(list.iter(), 4).collect::<Vec<_>>(), [&1, &2, &2, &2]);
        let sql = Lists::new("t");
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
