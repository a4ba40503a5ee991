//! The wire text of what is asked about many names at once; see `commands` for the columns and the clock.
//!
//! Each is one transaction, which locks the rows in the order of their names, as every other one does: they wait for each other and never
//! in a circle. Lists have a few lengths and are filled up by repeating their last entry, so that each text stays prepared.

use crate::{
    commands::{Statements, read, ready},
    record::{Record, micros, written},
};
use dlock_core::{Acquire, Holds, LockName, Owner, Release, Renew};
use futures_util::TryStreamExt;
use sqlx::{MySqlConnection, Row, SqlStr, mysql::MySqlRow};
use std::{collections::HashMap, time::Duration};

/// Takes names whose rows are there and free or past their end, each as a new incarnation; leaves the others as they are, and all of them after
/// its not-after.
///
/// The token of each is the server's µs, told in the reply; a row whose last token is not below that is left, so that one number tells all. Owners
/// and holds are of one width each, in the order of the list. Run twice, the second finds living holds.
const TAKE_ALL: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET expires = {now} + ?, \
    holds = CONCAT(SUBSTRING(?, 16 * FIELD(name, {list}) - 15, 16), LPAD(LOWER(HEX({now} + ?)), 16, '0')), \
    owner = SUBSTRING(?, 36 * FIELD(name, {list}) - 35, 36), token = LAST_INSERT_ID({now}), keep_until = 0, \
    began = GREATEST({now}, changed), changed = began, note = ?, version = version + 1 \
    WHERE name IN ({list}) AND expires <= {now} AND token < {now} AND {now} <= ?";

/// Gives back sole holds of names that nothing keeps shut, each judged alone; any other is left as it is and not counted.
///
/// The second list ends in fixed widths, so no two entries read the same. Run twice, the second finds no hold.
const FREE_ALL: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET owner = NULL, holds = '', expires = 0, note = '', \
    changed = GREATEST(LAST_INSERT_ID({now}), changed), version = version + 1 \
    WHERE name IN ({list}) AND CONCAT(name, owner, LEFT(holds, 16)) IN ({list}) \
    AND LENGTH(holds) = 32 AND expires > {now} AND keep_until <= {now}";

/// Prolongs sole holds, each judged alone; one that is not there, or not alone, is left as it is and not counted.
///
/// Run twice it prolongs twice, never past lease after the second run. The second list ends in fixed widths, so no two entries read the same.
/// Holds begin with the same id, so the greater text is the later end.
const RENEW: &str = "UPDATE {table} FORCE INDEX (PRIMARY) SET \
    holds = GREATEST(holds, CONCAT(LEFT(holds, 16), LPAD(LOWER(HEX({now} + ?)), 16, '0'))), expires = GREATEST(expires, {now} + ?), \
    changed = LAST_INSERT_ID({now}), version = version + 1 \
    WHERE name IN ({list}) AND CONCAT(name, owner, LEFT(holds, 16)) IN ({list}) \
    AND LENGTH(holds) = 32 AND expires > {now} AND {now} <= ?";

/// Shows rows; locks and waits for nothing.
const FIND: &str = "SELECT name, owner, token, holds, expires, keep_until, began, note, version, {now}, changed \
    FROM {table} FORCE INDEX (PRIMARY) WHERE name IN ({list})";

/// Which of these rows nobody has locked at this moment; waits for none. The locks are its own until it is answered.
const UNLOCKED: &str =
    "SELECT name FROM {table} FORCE INDEX (PRIMARY) WHERE name IN ({list}) FOR UPDATE SKIP LOCKED";

/// Lengths of lists: few texts, so that each stays prepared.
const SIZES: [usize; 4] = [1, 8, 64, RENEW_BATCH];
/// And of those that were gathered, which come in any length.
const GATHERED: [usize; 5] = [4, 8, 16, 32, crate::gather::MOST];
/// Entries of one statement: longer ones gain nothing.
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
    /// For a table whose name is quoted.
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
    /// The text for so many entries, and how many it has room for. Batches are cut to fit.
    fn fitting(&self, entries: usize) -> (SqlStr, usize) {
        let fits = self.0.iter().find(|(size, _)| entries <= *size);
        let (size, text) = fits.unwrap_or(&self.0[self.0.len() - 1]);
        (text.clone(), *size)
    }
}

/// Fills a list up by repeating its last entry.
fn filled<T: Clone>(list: impl Iterator<Item = T> + Clone, size: usize) -> impl Iterator<Item = T> {
    let last = list.clone().last();
    list.chain(last.into_iter().cycle()).take(size)
}

/// A sole hold as statements compare it.
fn key(name: &LockName, owner: &Owner, hold: impl std::fmt::Display) -> Vec<u8> {
    format!("{name}{}{hold}", written(owner)).into_bytes()
}

/// How many of at most [`MOST`](crate::gather::MOST) names were taken, and the server's time if any was, which is the token of each. All want the
/// same lease and say the same of themselves.
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

/// How many of at most [`MOST`](crate::gather::MOST) sole holds were given back, and the server's time if any was.
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

/// How many of at most [`RENEW_BATCH`] sole holds were prolonged, and the server's time if any was.
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

/// The rows of at most [`RENEW_BATCH`] names, by name; one that is missing has none.
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

/// Which of at most [`RENEW_BATCH`] names have a row that nobody has locked.
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
