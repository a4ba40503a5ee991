//! Commands: all text that goes over the wire.
//!
//! Each command changes each document in one atomic step. The only clock is the server's. `$$NOW` has one
//! value for a whole command and is fixed when the command begins, so it is never later than the moment at
//! which the step takes effect. What a user chose reaches a pipeline under `$literal`, never as the text of
//! an expression: an owner `$_id` is an owner. No command but [`swap`] of a document that was read writes to
//! a document that is not dlock's.
//!
//! A majority confirms every write, also one that found nothing to write: the server then waits until a
//! majority has what the command read.

use crate::document::{
    VERSION, batch, date, fields, last_moment, length, owner_text, shown, signed,
};
use dlock_core::{
    HoldId, LockName, Mode, Owner,
    driver::{
        Acquire, Renew,
        kit::{Class, Record, Write},
    },
};
use mongodb::bson::{Bson, DateTime, Document, doc};
use std::time::Duration;

/// A hold that is expected to be the only one of its lock.
#[derive(Clone, Debug)]
pub(crate) struct Sole {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
}

impl From<&Renew> for Sole {
    fn from(entry: &Renew) -> Self {
        Self {
            name: entry.name.clone(),
            owner: entry.owner,
            hold: entry.hold,
        }
    }
}

/// Takes a lock that is available, as a new incarnation: it answers the token. In every other case, and after
/// `last`, it answers no document. When it runs twice, the second run finds the lock held.
pub(crate) fn take(collection: &str, req: &Acquire, last: DateTime) -> Document {
    let mut query = doc! { "_id": req.name.as_str() };
    query.extend(available());
    let taken = vec![taking("$$owner".into(), "$$hold".into())];
    let shown = doc! { "_id": 0, "now": "$$NOW", "token": 1 };
    let mut command = one(collection, query, taken.into(), shown, "dlock take");
    command.insert("new", true);
    let literal = |value: String| doc! { "$literal": value };
    command.insert(
        "let",
        doc! {
            "owner": literal(owner_text(&req.owner)),
            "hold": literal(req.hold.to_string()),
            "note": literal(req.info.to_string()),
            "lease": length(req.lease.length()),
            "last": last,
        },
    );
    command
}

/// Several [`take`]s in one command, all with the lease and the note of the first. The server judges each
/// document by itself, and answers how many it took; their documents carry its mark. It makes one plan and one
/// journal flush for all of them.
pub(crate) fn take_all(collection: &str, batch: &[Acquire], last: DateTime, mark: i64) -> Document {
    let first = batch.first();
    let note = first.map_or_else(String::new, |req| req.info.to_string());
    let names: Vec<_> = batch.iter().map(|req| req.name.as_str()).collect();
    let mut query = doc! { "_id": { "$in": &names } };
    query.extend(available());
    let place = |list: &str| {
        doc! { "$arrayElemAt": [list, { "$indexOfArray": ["$$names", "$_id"] }] }.into()
    };
    let taken = vec![
        taking(place("$$owners"), place("$$holds")),
        doc! { "$set": { "mark": mark } },
    ];
    let mut command = several(collection, query, taken.into(), "dlock take");
    command.insert(
        "let",
        doc! {
            "names": { "$literal": &names },
            "owners": { "$literal": batch.iter().map(|req| owner_text(&req.owner)).collect::<Vec<_>>() },
            "holds": { "$literal": batch.iter().map(|req| req.hold.to_string()).collect::<Vec<_>>() },
            "note": { "$literal": note },
            "lease": first.map_or(0, |req| length(req.lease.length())),
            "last": last,
        },
    );
    command
}

/// Releases the only hold of a lock that no minimum hold keeps. In every other case it answers no document.
/// When it runs twice, the second run finds nothing. It has no not-after.
pub(crate) fn free(collection: &str, sole: &Sole) -> Document {
    let inside = doc! {
        "_id": sole.name.as_str(), "dlock": VERSION, "owner": owner_text(&sole.owner),
        "holds": { "$size": 1 }, "holds.0.id": sole.hold.to_string(),
        "$expr": { "$and": [{ "$gt": ["$until", "$$NOW"] }, { "$lte": ["$keep", "$$NOW"] }] },
    };
    let shown = doc! { "_id": 1 };
    one(collection, inside, freed().into(), shown, "dlock release")
}

/// Several [`free`]s in one command, each judged by itself. It answers how many locks it freed; their
/// documents carry its mark.
pub(crate) fn free_all(collection: &str, batch: &[Sole], mark: i64) -> Document {
    let query = inside(batch, doc! { "$lte": ["$keep", "$$NOW"] });
    let mut freed = freed();
    if let Ok(set) = freed.get_document_mut("$set") {
        set.insert("mark", mark);
    }
    several(collection, query, freed.into(), "dlock release")
}

/// Moves the ends of sole holds forward, never back: it answers how many it found. Each document is judged by
/// itself; other documents stay as they are. When it runs twice, the lease counts from the second run.
pub(crate) fn extend(
    collection: &str,
    batch: &[Sole],
    lease: Duration,
    last: DateTime,
    at_most: i64,
) -> Document {
    let query = inside(batch, doc! { "$lte": ["$$NOW", last] });
    let end = doc! { "$max": ["$until", { "$add": ["$$NOW", length(lease)] }] };
    let longer = doc! { "$set": {
        "holds": [{ "id": { "$arrayElemAt": ["$holds.id", 0] }, "end": end.clone() }],
        "until": end,
        "version": { "$add": ["$version", 1_i64] },
    } };
    let mut command = several(collection, query, vec![longer].into(), "dlock renew");
    command.insert("maxTimeMS", at_most);
    command
}

/// Creates a free document, which [`swap`] then replaces. The write is not confirmed by a majority: the one
/// that follows is.
pub(crate) fn make(collection: &str, name: &LockName, version: u64) -> Document {
    let free = Record {
        version,
        ..Record::default()
    };
    let mut made = doc! { "_id": name.as_str(), "since": date(0) };
    made.extend(fields(&free));
    doc! {
        "insert": collection,
        "documents": [made],
        "comment": "dlock make",
        "writeConcern": { "w": 1 },
        "maxTimeMS": AT_MOST,
    }
}

/// Replaces a record that is still what `before` says, unless it comes too late: it answers how many it
/// replaced. When it runs twice, the second run finds another record.
pub(crate) fn swap(collection: &str, write: &Write, class: Class, before: &Before) -> Document {
    let mut query = doc! { "_id": write.name.as_str() };
    let mut expected = Vec::new();
    match before {
        Before::Version(version) => {
            query.insert("dlock", VERSION);
            query.insert("version", signed(*version));
        }
        Before::Document(document) => {
            expected.push(doc! { "$eq": ["$$ROOT", { "$literal": document }] });
        }
    }
    if write.not_after < u64::MAX {
        expected.push(doc! { "$lte": ["$$NOW", last_moment(write.not_after)] });
    }
    if !expected.is_empty() {
        query.insert("$expr", doc! { "$and": expected });
    }
    let mut set = fields(&write.record);
    let mut update = doc! {};
    if let Some(owner) = write.record.owner {
        set.insert("since", date(write.record.began));
        if class == Class::Work && matches!(owner.mode(), Mode::Permit { .. }) {
            set.insert("returned", signed(write.record.version));
        }
    } else {
        update.insert("$currentDate", doc! { "since": true });
    }
    update.insert("$set", set);
    let comment = match class {
        Class::Acquire => "dlock acquire",
        Class::Renewal => "dlock renew",
        Class::Work => "dlock swap",
    };
    several(collection, query, update.into(), comment)
}

/// What [`swap`] replaces.
pub(crate) enum Before {
    /// A record of that version.
    Version(u64),
    /// This document, which is no record that can be read.
    Document(Document),
}

/// Reads documents by their names.
pub(crate) fn find<'a>(
    collection: &str,
    names: impl Iterator<Item = &'a LockName>,
    level: &str,
) -> Document {
    let names: Vec<Bson> = names.map(|name| name.as_str().into()).collect();
    let most = names.len();
    let filter = match &names[..] {
        [name] => doc! { "_id": name.clone() },
        _ => doc! { "_id": { "$in": names } },
    };
    reading(collection, filter, (most, level), "dlock look")
}

/// Reads the next names in their order, free ones too, so the work of one step is bounded even where few
/// locks are held.
pub(crate) fn page(
    collection: &str,
    (prefix, after): (&str, &str),
    most: usize,
    level: &str,
) -> Document {
    let filter = doc! { "_id": { "$gte": prefix, "$gt": after } };
    let mut command = reading(collection, filter, (most, level), "dlock list");
    command.insert("sort", doc! { "_id": 1 });
    command
}

/// The names after `after` in their order, and whether each was unused for a day.
pub(crate) fn old(collection: &str, after: &str) -> Document {
    let filter = doc! { "_id": { "$gt": after } };
    let mut command = reading(collection, filter, (PURGED, "local"), "dlock purge");
    command.insert("sort", doc! { "_id": 1 });
    let old = doc! { "$and": [{ "$eq": ["$dlock", VERSION] }, unused()] };
    command.insert("projection", doc! { "_id": 1, "old": old });
    command
}

/// The last name that [`old`] looked at, if there may be more, and the names that can be removed.
pub(crate) fn purgeable(reply: &Document) -> (Option<String>, Vec<Bson>) {
    let looked_at: Vec<_> = batch(reply).collect();
    let last = looked_at.last().filter(|_| looked_at.len() == PURGED);
    let last = last.and_then(|one| one.get_str("_id").ok());
    let old = looked_at
        .iter()
        .filter(|one| one.get_bool("old").unwrap_or_default());
    let old = old.filter_map(|one| one.get("_id").cloned()).collect();
    (last.map(str::to_owned), old)
}

/// Removes these documents, each only if it is still unused for a day. The token counter goes with the
/// document: the clock is a day ahead of the counter by then.
pub(crate) fn purge(collection: &str, names: Vec<Bson>) -> Document {
    doc! {
        "delete": collection,
        "deletes": [{
            "q": { "_id": { "$in": names }, "dlock": VERSION, "$expr": unused() },
            "limit": 0,
            "collation": simple(),
        }],
        "comment": "dlock purge",
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    }
}

/// Asks for the kind of the server, and its time.
pub(crate) fn hello() -> Document {
    doc! { "hello": 1, "comment": "dlock hello", "maxTimeMS": AT_MOST }
}

/// Asks for the configuration of the replica set, of the database `admin`.
pub(crate) fn set_config() -> Document {
    doc! { "replSetGetConfig": 1, "comment": "dlock config", "maxTimeMS": AT_MOST }
}

/// The options with which the collection was created, if it exists.
pub(crate) fn collection_of(name: &str) -> Document {
    doc! {
        "listCollections": 1, "filter": { "name": name }, "nameOnly": false, "authorizedCollections": false,
        "maxTimeMS": AT_MOST,
    }
}

/// The indexes of the collection.
pub(crate) fn indexes_of(name: &str) -> Document {
    doc! { "listIndexes": name, "maxTimeMS": AT_MOST }
}

/// The changes that wake a waiter: a lock became free or unavailable, or its document was replaced or
/// removed. A renewal, an added hold and a released hold that was not the last do not wake, but for a permit
/// that was returned. The server sends only the name.
pub(crate) fn freed_names() -> Vec<Document> {
    let freed = doc! { "$or": [
        { "updateDescription.updatedFields.owner": { "$type": "null" } },
        { "updateDescription.updatedFields.until": date(0) },
        { "updateDescription.updatedFields.returned": { "$exists": true } },
        { "operationType": { "$in": ["delete", "replace"] } },
    ] };
    vec![
        doc! { "$match": freed },
        doc! { "$project": { "_id": 1, "operationType": 1, "ns": 1, "documentKey": 1 } },
    ]
}

/// The rest of the filter of [`take`]. A document of which a token or a version cannot be counted on is left
/// to the record driver, as is one with a claim (16 times `f`).
fn available() -> Document {
    doc! {
        "dlock": VERSION,
        "token": { "$type": "long", "$lt": i64::MAX },
        "version": { "$type": "long" },
        "until": { "$type": "date" },
        "holds.id": { "$ne": "ffffffffffffffff" },
        "$expr": { "$and": [{ "$lte": ["$until", "$$NOW"] }, { "$lte": ["$$NOW", "$$last"] }] },
    }
}

/// The stage that makes a new incarnation. The next token is the last one + 1, or the server's time in µs if
/// that is greater; `$$NOW` counts in ms.
fn taking(owner: Bson, hold: Bson) -> Document {
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    let end = doc! { "$add": ["$$NOW", "$$lease"] };
    doc! { "$set": {
        "owner": owner,
        "token": { "$max": [{ "$add": ["$token", 1_i64] }, micros] },
        "holds": [{ "id": hold, "end": end.clone() }],
        "until": end,
        "keep": date(0),
        "since": "$$NOW",
        "note": "$$note",
        "version": { "$add": ["$version", 1_i64] },
    } }
}

/// The update that ends an incarnation.
fn freed() -> Document {
    doc! {
        "$set": { "owner": null, "holds": [], "until": date(0), "keep": date(0), "note": "" },
        "$inc": { "version": 1_i64 },
        "$currentDate": { "since": true },
    }
}

/// The documents of which one of these holds is the only one, and lives. The server finds a constant of the
/// expression through a hash table.
fn inside(batch: &[Sole], and: Document) -> Document {
    let names: Vec<_> = batch.iter().map(|sole| sole.name.as_str()).collect();
    let meant = |sole: &Sole| -> Bson {
        let (name, owner) = (sole.name.as_str(), owner_text(&sole.owner));
        vec![name.to_owned(), owner, sole.hold.to_string()].into()
    };
    let meant: Vec<_> = batch.iter().map(meant).collect();
    let found = vec![
        Bson::from("$_id"),
        "$owner".into(),
        doc! { "$arrayElemAt": ["$holds.id", 0] }.into(),
    ];
    doc! {
        "_id": { "$in": names }, "dlock": VERSION, "holds": { "$size": 1 },
        "$expr": { "$and": [
            { "$gt": ["$until", "$$NOW"] },
            { "$in": [found, { "$literal": meant }] },
            and,
        ] },
    }
}

/// One `findAndModify`.
fn one(
    collection: &str,
    query: Document,
    update: Bson,
    shown: Document,
    comment: &str,
) -> Document {
    doc! {
        "findAndModify": collection,
        "query": query,
        "update": update,
        "fields": shown,
        "collation": simple(),
        "comment": comment,
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    }
}

/// One `update`, of as many documents as the query finds.
fn several(collection: &str, query: Document, update: Bson, comment: &str) -> Document {
    doc! {
        "update": collection,
        "updates": [{ "q": query, "u": update, "multi": true, "collation": simple() }],
        "comment": comment,
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    }
}

fn reading(
    collection: &str,
    filter: Document,
    (most, level): (usize, &str),
    comment: &str,
) -> Document {
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    doc! {
        "find": collection,
        "filter": filter,
        "projection": shown(),
        "batchSize": most,
        "limit": most,
        "singleBatch": true,
        "collation": simple(),
        "readConcern": { "level": level },
        "comment": comment,
        "maxTimeMS": AT_MOST,
    }
}

/// Whether the lock is available and its last end and its token are a day old. The next acquire of the name
/// then gets a greater token from the clock.
fn unused() -> Document {
    let day = doc! { "$subtract": ["$$NOW", UNUSED] };
    let micros = doc! { "$multiply": [{ "$toLong": day.clone() }, 1000_i64] };
    doc! { "$and": [
        { "$eq": [{ "$type": "$until" }, "date"] },
        { "$lt": ["$until", day.clone()] },
        { "$lt": ["$since", day] },
        { "$lt": ["$token", micros] },
    ] }
}

/// The write concern of every write, whatever the URL or the application's client says.
fn concern() -> Document {
    doc! { "w": "majority", "j": true, "wtimeout": AT_MOST }
}

/// The collation that compares names byte by byte, whatever the collection's own collation is.
fn simple() -> Document {
    doc! { "locale": "simple" }
}

/// The server runs no lock command longer than this, in ms. So no command takes effect later than this after
/// its `$$NOW`, and none waits longer for a majority.
pub(crate) const AT_MOST: i64 = 1_000;
/// Most lock documents of one reply. The server ends a reply at 16 MiB without a word, and a document that is left out
/// would read as a lock that is free; one with [`MAX_SHARERS`](dlock_core::MAX_SHARERS) holds has 52 KB.
pub(crate) const A_REPLY: usize = 256;
/// Documents that one step of the purge reads, which shows little of each.
const PURGED: usize = 1_000;
/// The minimum time in ms for which the document of an unused name stays, with the counter in it.
const UNUSED: i64 = 24 * 60 * 60 * 1_000;
