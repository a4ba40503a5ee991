//! Statements of PostgreSQL.
//!
//! Each request is one message of the simple protocol, and one transaction. Every literal is a number, hex digits or a
//! UUID: nothing is quoted.
//!
//! - Through a proxy that may share sessions the message is [`framed`]: it brings its limits, and needs neither a
//!   prepared statement nor a setting of the session.
//! - On a session of its own ([`SESSION`]) it is [`short`]: the session has the limits, and a statement with [`Values`]
//!   is prepared by the first message that needs it. It stays `EXECUTE` with literals, not the protocol's own prepared
//!   statement, so that both ways have the same text in one message, which can say what it is and bring a shorter
//!   limit.
//!
//! The clock is the server's `clock_timestamp()`. It is volatile, so a condition on it is judged again on the newest
//! row after a wait for another transaction. An `EXECUTE` fixes what it sees before it waits for the table, so it may
//! miss all rows of a table that was rewritten meanwhile. What is prepared changes rows or answers that it did not;
//! what says that there is no row, [`read`], is not prepared.

use dlock_core::{
    HoldId, LockName, Owner,
    driver::{
        Acquire, Release, Renew,
        kit::{Columns, Expected, Record, Stored, WAITERS_MARK, Write, from_hex, hash_of, to_hex},
    },
};
use sqlx::{Row, postgres::PgRow};
use std::{collections::HashSet, fmt::Display, time::Duration};

/// Microseconds since 1970. The operator is named in full: any role that may create in a schema of the search path
/// could define one for these types, and `pg_catalog` has none that fits them exactly.
pub(crate) const NOW: &str =
    "(extract(epoch FROM clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::bigint";

/// A last row for a reading: the server's time when the message arrived, before the snapshot that the reading sees, and
/// now.
const TIME: &str = "SELECT (extract(epoch FROM statement_timestamp()) OPERATOR(pg_catalog.*) 1000000)::bigint AS begun, \
    (extract(epoch FROM clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::bigint AS now";

/// That dlock wrote the row of this alias. The table has it as a check, too.
fn sound(row: &str) -> String {
    let numbers = ["token", "expires", "keep_until", "began", "waiters"]
        .map(|column| format!("{row}{column} >= 0 AND "));
    format!(
        "{} {row}version > 0 AND {row}version < {MAX} AND length({row}holds) <= 32800 AND {row}holds ~ '^([0-9a-f]{{32}})*$'",
        numbers.concat()
    )
}

/// The message that brings its limits: what may take how long, and the statements. READ COMMITTED judges a row again
/// after a wait for it; another default of the server would refuse it. The statement's limit counts its waits for
/// locks, too; the limit of a lock also bounds a notifying commit, which waits for the one before it.
pub(crate) fn framed(what: &str, body: &str, values: &Values) -> String {
    format!(
        "/* dlock {what} */ SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {RUN_MS}; \
         SET LOCAL lock_timeout = {}; {body}",
        values.lock_ms
    )
}

/// The message on a session that has the limits. `prepared`: the statements that it has, by their texts; `None`: not
/// known. A statement is prepared even if the message fails later, and its name says its text.
pub(crate) fn short(
    what: &str,
    body: &str,
    values: &Values,
    prepared: &mut Option<HashSet<u64>>,
) -> String {
    let mut sql = format!("/* dlock {what} */ ");
    if values.lock_ms < RUN_MS {
        sql += &format!("SET LOCAL lock_timeout = {}; ", values.lock_ms);
    }
    let prepared = prepared.get_or_insert_with(|| {
        sql += "DEALLOCATE ALL; ";
        HashSet::new()
    });
    match values.later.as_deref() {
        None | Some([]) => sql += body,
        Some(values) => {
            let hash = hash_of(body);
            if prepared.insert(hash) {
                sql += &format!("PREPARE dlock_{hash:016x} AS {body}; ");
            }
            sql += &format!("EXECUTE dlock_{hash:016x}({})", values.join(", "));
        }
    }
    sql
}

/// Collects the values of a statement: literals in its text, or the arguments of one that is prepared.
pub(crate) struct Values {
    /// The server's time after which the statement does nothing.
    last: u64,
    /// The limit of a wait for a lock, in milliseconds.
    lock_ms: u64,
    later: Option<Vec<String>>,
}

impl Values {
    pub(crate) fn new(last: u64, lock_ms: u64, are_arguments: bool) -> Self {
        Self {
            last,
            lock_ms,
            later: are_arguments.then(Vec::new),
        }
    }

    fn add(&mut self, literal: String, kind: &str) -> String {
        match &mut self.later {
            None => format!("{literal}::{kind}"),
            Some(later) => {
                later.push(literal);
                format!("${}::{kind}", later.len())
            }
        }
    }

    fn name(&mut self, name: &LockName) -> String {
        self.add(bytes(name.as_str()), "bytea")
    }

    fn owner(&mut self, owner: Option<&Owner>) -> String {
        let owner = owner.map(|owner| format!("'{}'", owner.expose()));
        self.add(owner.unwrap_or_else(|| "NULL".to_owned()), "uuid")
    }

    /// Hex digits.
    fn digits(&mut self, digits: impl Display) -> String {
        self.add(format!("'{digits}'"), "text")
    }

    fn text(&mut self, text: &str) -> String {
        let bytes = bytes(text);
        self.add(format!("pg_catalog.convert_from({bytes}, 'UTF8')"), "text")
    }

    fn number(&mut self, value: u64) -> String {
        self.add(number(value).to_string(), "bigint")
    }

    /// An array of what needs no quotes.
    fn array(&mut self, items: impl Iterator<Item = impl ToString>, kind: &str) -> String {
        let items: Vec<_> = items.map(|item| item.to_string()).collect();
        self.add(format!("'{{{}}}'", items.join(",")), kind)
    }

    fn names<'a>(&mut self, names: impl Iterator<Item = &'a LockName>) -> String {
        self.array(names.map(|name| to_hex(name.as_str())), "text[]")
    }

    /// Bounds the wait for a locked row.
    pub(crate) fn wait_at_most(&mut self, ms: u64) {
        self.lock_ms = self.lock_ms.min(ms);
    }

    /// The last moment for the statement.
    fn last(&mut self) -> String {
        self.number(self.last)
    }
}

/// How long one statement may take, its waits for locks included, in milliseconds.
pub(crate) const RUN_MS: u64 = 1000;

/// Longer than most transactions of other clients have a row locked.
const MOMENT_MS: u64 = 20;

/// Whether the server can be written, whether the connection is to the server itself, and its time.
pub(crate) fn greeting() -> String {
    format!(
        "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean AS standby, {IS_DIRECT} AS direct, \
         {NOW} AS now"
    )
}

/// That the session has [`SESSION`], so that it is no pool's and can listen. A database without an encoding may show
/// text that is none.
pub(crate) const IS_DIRECT: &str = "coalesce(current_setting('dlock.direct', true), '') = 'on' \
     AND current_setting('server_encoding') <> 'SQL_ASCII'";

/// What a session gets when it begins; a proxy that shares sessions refuses or drops it. Each statement finds its rows
/// by the key, so a plan that was made for a small table is right for a large one.
pub(crate) const SESSION: [(&str, &str); 6] = [
    ("dlock.direct", "on"),
    ("default_transaction_isolation", "read committed"),
    ("statement_timeout", "1000"), // RUN_MS
    ("lock_timeout", "1000"),
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
];

/// The schema that the table is in, or would be made in.
pub(crate) fn place(table: &str) -> String {
    format!(
        "SELECT coalesce((SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace \
         WHERE c.oid = to_regclass('{table}')), current_schema())::text AS schema"
    )
}

/// Runs twice without harm. HOT updates need the free half of each page, and no index on what changes.
pub(crate) fn create(table: &str) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS {table} (name bytea PRIMARY KEY, owner uuid, token bigint NOT NULL, holds text NOT NULL, \
         expires bigint NOT NULL, keep_until bigint NOT NULL, began bigint NOT NULL, waiters bigint NOT NULL, note text NOT NULL, \
         version bigint NOT NULL, CHECK ({})) \
         WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)",
        sound("")
    )
}

/// Whether the table has the columns and a unique index on the name, and can be read and inserted into: no row.
pub(crate) fn probe(table: &str) -> String {
    format!(
        "INSERT INTO {table} ({COLUMNS}) SELECT {COLUMNS} FROM {table} WHERE false ON CONFLICT (name) DO NOTHING"
    )
}

const COLUMNS: &str =
    "name, owner, token, holds, expires, keep_until, began, waiters, note, version";

/// What [`stored`] reads: text whatever the session says of the output of bytes.
fn shown() -> String {
    format!(
        "encode(name, 'hex') AS name, owner::text AS owner, token, holds, expires, keep_until, began, waiters, note, version, \
         ({}) AS sound",
        sound("")
    )
}

/// The rows of these names, and the time; of names without a row nothing.
pub(crate) fn read(table: &str, names: &[LockName]) -> String {
    let names: Vec<_> = names.iter().map(|name| bytes(name.as_str())).collect();
    format!(
        "SELECT {} FROM {table} WHERE name IN ({}); {TIME}",
        shown(),
        names.join(", ")
    )
}

/// A page of names, and the time. Names are compared by bytes, and no byte of UTF-8 is 255, so the end of a prefix is its last byte
/// and one.
pub(crate) fn list(table: &str, prefix: &str, after: &[u8], limit: usize) -> String {
    let mut end = prefix.as_bytes().to_vec();
    let before = end
        .last_mut()
        .map(|last| *last += 1)
        .map(|()| format!("AND name < {}", bytes(&end)));
    format!(
        "SELECT {} FROM {table} WHERE name > {} AND name >= {} {} ORDER BY name LIMIT {limit}; {TIME}",
        shown(),
        bytes(after),
        bytes(prefix),
        before.unwrap_or_default()
    )
}

/// Deletes what is unused for a day among the next names; answers the last name looked at if more may follow, and how
/// many versions of rows were not removed yet. The delete judges the newest row.
pub(crate) fn forget(table: &str, after: &[u8]) -> String {
    format!(
        "WITH page AS (SELECT name FROM {table} WHERE name > {} ORDER BY name LIMIT {PAGE}), \
         gone AS (DELETE FROM {table} l USING page WHERE l.name = page.name AND expires <= {NOW} AND token <= {NOW} - {DAY} AND {}) \
         SELECT encode((SELECT name FROM page ORDER BY name OFFSET {PAGE} - 1), 'hex') AS name, {} AS dead",
        bytes(after),
        sound("l."),
        dead(table)
    )
}

/// How many versions of rows were not removed yet.
pub(crate) fn dead(table: &str) -> String {
    format!("pg_stat_get_dead_tuples({}::regclass)", literal(table))
}

/// A text as a literal: the schema of a table may have any character.
pub(crate) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The number of names that one sweep checks.
const PAGE: usize = 1024;

/// A day in microseconds, as in `Record::is_forgettable`.
const DAY: u64 = 24 * 60 * 60 * 1_000_000;

/// Replaces a row if it is as expected and it is not late: a row comes back. Run twice, the second changes nothing. The
/// time is read when the row is locked: the wait for that may outlast the hold on which the write relies.
pub(crate) fn replace(table: &str, write: &Write, values: &mut Values) -> String {
    let name = values.name(&write.name);
    let row = row(&write.record, values);
    let last = values.number(write.not_after);
    let condition = match write.expected {
        Expected::Absent => {
            return format!(
                "INSERT INTO {table} ({COLUMNS}) SELECT {name}, {row} WHERE {NOW} <= {last} ON CONFLICT (name) DO NOTHING RETURNING 1"
            );
        }
        Expected::Version(version) => format!("l.version = {}", values.number(version)),
        Expected::Damaged => format!("NOT ({})", sound("l.")),
    };
    let (_, columns) = COLUMNS.split_once(", ").unwrap_or_default();
    format!(
        "WITH locked AS MATERIALIZED (SELECT name, version FROM {table} WHERE name = {name} FOR UPDATE) \
         UPDATE {table} l SET ({columns}) = ROW({row}) FROM locked \
         WHERE l.name = locked.name AND {condition} AND {NOW} + 0 * locked.version <= {last} RETURNING 1"
    )
}

/// The values of a record in the order of the columns after the name.
fn row(record: &Record, values: &mut Values) -> String {
    let row = [
        values.owner(record.owner.as_ref()),
        values.number(record.token),
        values.digits(&record.holds),
        values.number(record.unavailable_until),
        values.number(record.min_hold_until),
        values.number(record.began),
        values.number(record.waiters_until),
        values.text(&record.holder_info.to_string()),
        values.number(record.version),
    ];
    row.join(", ")
}

/// Takes locks that are available, each by its row and in the order of their names, so that two batches cannot
/// deadlock: their names and tokens come back, with the time. The condition is judged when the row is locked, and the
/// end is counted from then. One that is seen to be held is not locked, so a refusal writes nothing and delays no other
/// request. A new row's version is the time, so that it is greater than that of a row that was
/// forgotten. All requests have the same holder info, and all have a next ticket that is to be marked, or none.
pub(crate) fn take(table: &str, batch: &[Acquire], marks: bool, values: &mut Values) -> String {
    let asked = batch.iter().map(|req| {
        let lease = span(req.lease.length());
        (&req.name, req.owner, req.hold, lease)
    });
    let asked = asked_for(asked, values);
    let mark = match batch.first().and_then(|req| req.next_ticket) {
        Some(_) if marks => span(WAITERS_MARK),
        _ => 0,
    };
    let mark = values.number(mark);
    let note = batch.first().map(|req| req.info.to_string());
    let note = values.text(&note.unwrap_or_default());
    let last = values.last();
    let first = one("a.hold", "n.now + a.lease");
    let lease = "excluded.expires - excluded.began";
    let again = one("left(excluded.holds, 16)", &format!("n.now + {lease}"));
    format!(
        "INSERT INTO {table} AS l ({COLUMNS}) SELECT a.name, a.owner, n.now, {first}, n.now + a.lease, 0, n.now, \
         CASE {mark} WHEN 0 THEN 0 ELSE n.now + {mark} END, {note}, n.now \
         FROM (SELECT {NOW} AS now OFFSET 0) n, {asked} WHERE n.now <= {last} \
         AND coalesce((SELECT h.expires FROM {table} h WHERE h.name = a.name), 0) <= n.now ORDER BY a.name \
         ON CONFLICT (name) DO UPDATE SET (owner, token, holds, expires, keep_until, began, waiters, note, version) = \
         (SELECT excluded.owner, greatest(l.token + 1, n.now), {again}, n.now + {lease}, 0, n.now, \
         greatest(l.waiters, excluded.waiters), excluded.note, l.version + 1 \
         FROM (SELECT {NOW} + 0 * l.version AS now OFFSET 0) n) \
         WHERE l.expires <= {NOW} AND left(right(l.holds, 32), 16) <> 'ffffffffffffffff' AND {NOW} <= {last} AND l.token < {MAX} AND {} \
         RETURNING encode(name, 'hex') AS name, token, {NOW} AS now",
        sound("l.")
    )
}

/// Ends holds that are the only one, if no minimum hold keeps the lock: the names of those come back. Never late. One
/// row is waited for; of several, locked ones are left out.
pub(crate) fn free(table: &str, batch: &[(Release, HoldId)], values: &mut Values) -> String {
    let asked = batch
        .iter()
        .map(|(req, hold)| (&req.name, req.owner, *hold, 0));
    let [with, from, is_sole] = rows_of(table, asked_for(asked, values), batch.len() > 1);
    format!(
        "{with}UPDATE {table} l SET owner = NULL, holds = '', expires = 0, keep_until = 0, note = '', version = version + 1 FROM {from} \
         WHERE {is_sole} AND keep_until <= {NOW} RETURNING encode(l.name, 'hex') AS name, waiters > {NOW} AS waited"
    )
}

/// Renews sole holds; a row comes back for each. `skips`: those whose rows are locked are left out. Otherwise they are
/// waited for, for a moment: that takes a third less time, and rows are seldom locked.
pub(crate) fn extend(
    table: &str,
    batch: &[(&Renew, Duration)],
    skips: bool,
    values: &mut Values,
) -> String {
    if !skips {
        values.wait_at_most(MOMENT_MS);
    }
    let asked = batch.iter();
    let asked = asked.map(|(entry, lease)| (&entry.name, entry.owner, entry.hold, span(*lease)));
    let asked = asked_for(asked, values);
    let asked = format!("(SELECT a.*, {NOW} + lease AS until FROM {asked} OFFSET 0) a");
    let [with, from, is_sole] = rows_of(table, asked, skips);
    let until = "greatest(l.expires, a.until)";
    format!(
        "{with}UPDATE {table} l SET expires = {until}, holds = {}, version = version + 1 FROM {from} WHERE {is_sole} AND {NOW} <= {} \
         RETURNING encode(l.name, 'hex') AS name, l.expires - {NOW} AS rest",
        one("a.hold", until),
        values.last()
    )
}

/// The requests of a batch as rows of `a`: names, owners, holds, leases.
fn asked_for<'a>(
    asked: impl ExactSizeIterator<Item = (&'a LockName, Owner, HoldId, u64)> + Clone,
    values: &mut Values,
) -> String {
    let rows = match (asked.len(), asked.clone().next()) {
        (1, Some((name, owner, hold, lease))) => format!(
            "SELECT {}, {}, {}, {}",
            values.name(name),
            values.owner(Some(&owner)),
            values.digits(hold),
            values.number(lease)
        ),
        _ => format!(
            "SELECT decode(name, 'hex'), owner, hold, lease FROM unnest({}, {}, {}, {}) a (name, owner, hold, lease)",
            values.names(asked.clone().map(|(name, ..)| name)),
            values.array(asked.clone().map(|(_, owner, ..)| owner.expose()), "uuid[]"),
            values.array(asked.clone().map(|(_, _, hold, _)| hold), "text[]"),
            values.array(asked.map(|(.., lease)| lease), "bigint[]")
        ),
    };
    format!("({rows}) a (name, owner, hold, lease)")
}

/// The beginning, the source and the condition of an update of sole holds that live. `skips`: their rows are locked
/// first, and one that another transaction has locked is left out, so no request waits for another lock's row, and two
/// batches cannot deadlock.
fn rows_of(table: &str, asked: String, skips: bool) -> [String; 3] {
    let is_sole = format!(
        "l.name = a.name AND l.owner = a.owner AND l.holds = {} AND l.expires > {NOW}",
        one("a.hold", "l.expires")
    );
    if !skips {
        return [String::new(), asked, is_sole];
    }
    let with = format!(
        "WITH a AS (SELECT a.* FROM {asked} JOIN {table} l ON {is_sole} FOR UPDATE OF l SKIP LOCKED) "
    );
    let is_locked = format!("l.name = a.name AND l.expires > {NOW}");
    [with, "a".to_owned(), is_locked]
}

/// The bytes of a row's name, and its record.
pub(crate) fn stored(row: &PgRow) -> sqlx::Result<(Vec<u8>, Stored)> {
    let is_sound: bool = row.try_get("sound")?;
    let columns = Columns {
        owner: Some(row.try_get::<Option<_>, _>("owner")?.unwrap_or_default()),
        token: row.try_get("token")?,
        holds: row
            .try_get("holds")
            .map(|holds| is_sound.then_some(holds))?,
        expires: row.try_get("expires")?,
        keep_until: row.try_get("keep_until")?,
        began: row.try_get("began")?,
        waiters: row.try_get("waiters")?,
        note: Some(row.try_get("note")?),
        version: row.try_get("version")?,
    };
    let stored = columns.record();
    Ok((
        name_of(row)?,
        stored.map_or_else(Stored::Damaged, Stored::Record),
    ))
}

/// The column `name`, which is in hex.
pub(crate) fn name_of(row: &PgRow) -> sqlx::Result<Vec<u8>> {
    let hex: &str = row.try_get("name")?;
    from_hex(hex).ok_or_else(|| sqlx::Error::Decode("a name is not in hex".into()))
}

/// The text of one hold, with its end as an expression.
fn one(hold: &str, end: &str) -> String {
    format!("{hold} || lpad(to_hex({end}), 16, '0')")
}

fn bytes(bytes: impl AsRef<[u8]>) -> String {
    format!("decode('{}', 'hex')", to_hex(bytes))
}

/// A number that PostgreSQL can hold.
fn number(value: u64) -> u64 {
    value.min(MAX)
}

fn span(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).map_or(MAX, number)
}

/// The greatest `bigint`.
const MAX: u64 = i64::MAX.unsigned_abs();
