//! Commands: all text that goes over the wire, except the pipelines, and what each command answers.
//!
//! The collection has one document per lock name:
//!
//! | field | content |
//! |---|---|
//! | `_id` | the lock name, unchanged |
//! | `dlock` | 1: the version of this shape |
//! | `owner` | the owner's UUID as text, or null: the lock has no holder |
//! | `token` | the fencing token that was given last, a long |
//! | `holds` | `{id, end, note}` each: 16 hex digits, the server's time, `PID HOST` |
//! | `since` | when the lock was taken, or became free |
//! | `keep` | end of the minimum hold, or null; while the lock is held, what an earlier release asked for |
//! | `mark` | only where a batched release freed the lock: its random number, to find its documents by |
//!
//! Each command changes each document in one atomic step. The only clock is the server's. `$$NOW` has one
//! value for a whole command and is fixed when the command begins, so it is never later than the moment at
//! which the step takes effect. What a user chose reaches a pipeline under `$literal`, never as the text of
//! an expression: an owner `$_id` is an owner. No pipeline writes to a document that is not dlock's. A
//! refusal writes nothing, because the server skips the write when a pipeline returns the document unchanged.
//!
//! A majority confirms every write, also one that found nothing to write: the server then waits until a
//! majority has what the command read.

use crate::{
    pipelines::{
        ACQUIRE, AT_MOST, BREAK, GIVE, IN_TIME, INSIDE, LIVES, Lasts, PROLONG_ONE, RELEASE, SHOWN,
        TAKE, TAKE_ALL, VERSION, concern, prolong, simple, unused,
    },
    record::{length, owner_text},
};
use dlock_core::{
    FencingToken, HoldId, Holds, LockName, Owner,
    driver::{Acquire, Release, Renew},
};
use mongodb::bson::{Bson, DateTime, Document, RawArrayBuf, RawBson, RawDocumentBuf, doc, rawdoc};

/// A command, encoded already where it is sent often.
pub(crate) enum Command {
    Written(RawDocumentBuf),
    Document(Document),
}

impl From<RawDocumentBuf> for Command {
    fn from(command: RawDocumentBuf) -> Self {
        Self::Written(command)
    }
}

impl From<Document> for Command {
    fn from(command: Document) -> Self {
        Self::Document(command)
    }
}

/// The short acquire, for a name that was free by the last news. It takes the lock if it is still free and
/// its `keep` is null; in that case it decides as [`acquire`] does. In every other case it answers no
/// document. The test and the write are one atomic step on the server's clock. When it runs twice, the second
/// run finds the lock held. When it runs after `last`, it finds nothing.
pub(crate) fn take(collection: &str, req: &Acquire, last: DateTime) -> RawDocumentBuf {
    let free = rawdoc! {
        "_id": req.name.as_str(), "dlock": VERSION, "owner": RawBson::Null, "keep": RawBson::Null,
        "$expr": { "$lte": ["$$NOW", "$$last"] },
    };
    let variables = rawdoc! {
        "owner": literal(owner_text(&req.owner)),
        "hold": literal(req.hold.to_string()),
        "note": literal(req.note.to_string()),
        "lease": length(req.lease.length()),
        "last": last,
    };
    one(collection, free, Some(variables), &TAKE)
}

/// The short release, for a lock with one hold and a null `keep`. It frees the lock if the given hold is that
/// one and lives; in that case it decides as [`release`] does. In every other case it answers no document.
/// When it runs twice, the second run finds nothing. It has no not-after.
pub(crate) fn give(collection: &str, given: &Given) -> RawDocumentBuf {
    let inside = rawdoc! {
        "_id": given.name.as_str(), "dlock": VERSION, "owner": owner_text(&given.owner), "keep": RawBson::Null,
        "holds": { "$size": 1 }, "holds.0.id": given.hold.to_string(),
        "$expr": { "$gt": [{ "$arrayElemAt": ["$holds.end", 0] }, "$$NOW"] },
    };
    one(collection, inside, None, &GIVE)
}

/// Several [`take`]s in one command. The server judges each document by itself and by its own not-after.
/// [`find`] then tells which locks were taken. The server makes one plan and one journal flush for all of
/// them.
pub(crate) fn take_all(collection: &str, batch: &[&Taken]) -> RawDocumentBuf {
    let names: RawArrayBuf = batch.iter().map(|(req, _)| req.name.as_str()).collect();
    let asked = batch.iter().map(|(req, last)| {
        rawdoc! {
            "owner": owner_text(&req.owner),
            "hold": req.hold.to_string(),
            "note": req.note.to_string(),
            "lease": length(req.lease.length()),
            "last": *last,
        }
    });
    let free = rawdoc! {
        "_id": { "$in": names.clone() }, "dlock": VERSION, "owner": RawBson::Null, "keep": RawBson::Null,
        "$expr": IN_TIME.clone(),
    };
    let taken = rawdoc! { "q": free, "u": [TAKE_ALL.clone()], "multi": true };
    several(collection, taken, names, asked.collect(), "dlock acquire")
}

/// Creates free documents for names that have none. Their token is 0, so the first acquire gets its token
/// from the clock. An existing document stays as it is; the error for it is ignored. The write is not
/// confirmed by a majority: the command that takes the locks is.
pub(crate) fn make<'a>(
    collection: &str,
    names: impl Iterator<Item = &'a LockName>,
) -> RawDocumentBuf {
    let never = DateTime::from_millis(0);
    let free: RawArrayBuf = names
        .map(|name| {
            rawdoc! {
                "_id": name.as_str(), "dlock": VERSION, "owner": RawBson::Null, "token": 0_i64, "holds": [],
                "since": never, "keep": RawBson::Null,
            }
        })
        .collect();
    rawdoc! {
        "insert": collection,
        "documents": free,
        "ordered": false,
        "comment": "dlock make",
        "writeConcern": { "w": 1 },
        "maxTimeMS": AT_MOST,
    }
}

/// Several [`give`]s in one command, each judged by itself. It answers how many locks it freed; their
/// documents carry its mark.
pub(crate) fn give_all(collection: &str, batch: &[Given], mark: i64) -> RawDocumentBuf {
    let names: RawArrayBuf = batch.iter().map(|one| one.name.as_str()).collect();
    let asked = batch.iter().map(|one| {
        rawdoc! { "owner": owner_text(&one.owner), "hold": one.hold.to_string() }
    });
    let inside = rawdoc! {
        "_id": { "$in": names.clone() }, "dlock": VERSION, "keep": RawBson::Null, "holds": { "$size": 1 },
        "$expr": INSIDE.clone(),
    };
    let freed = rawdoc! {
        "$set": { "owner": RawBson::Null, "holds": [], "mark": mark },
        "$currentDate": { "since": true },
    };
    let freed = rawdoc! { "q": inside, "u": freed, "multi": true };
    several(collection, freed, names, asked.collect(), "dlock release")
}

/// A request for a lock, and the server's time at its not-after.
pub(crate) type Taken = (Acquire, DateTime);

/// A hold to release, of a lock that is expected to have no other hold.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
}

/// Answers the document after the command: the request won if its hold is in it.
pub(crate) fn acquire(collection: &str, req: &Acquire, last: DateTime) -> RawDocumentBuf {
    let variables = rawdoc! {
        "owner": literal(owner_text(&req.owner)),
        "hold": literal(req.hold.to_string()),
        "note": literal(req.note.to_string()),
        "lease": length(req.lease.length()),
        "last": last,
        "join": literal(req.join.map_or(RawBson::Null, token)),
    };
    let mut command = one(collection, named(&req.name), Some(variables), &ACQUIRE);
    command.append("upsert", req.join.is_none());
    command
}

/// Answers the document before the command.
pub(crate) fn release(collection: &str, req: &Release) -> RawDocumentBuf {
    let hold = match req.holds {
        Holds::One(hold) => RawBson::String(hold.to_string()),
        Holds::All => RawBson::Null,
    };
    let variables = rawdoc! {
        "owner": literal(owner_text(&req.owner)),
        "hold": literal(hold),
        "keep": literal(req.keep.map_or(RawBson::Null, |keep| RawBson::Int64(length(keep)))),
    };
    one(collection, named(&req.name), Some(variables), &RELEASE)
}

/// Answers the document before the command.
pub(crate) fn break_lock(
    collection: &str,
    name: &LockName,
    only: Option<FencingToken>,
) -> RawDocumentBuf {
    let variables = rawdoc! { "only": literal(only.map_or(RawBson::Null, token)) };
    one(collection, named(name), Some(variables), &BREAK)
}

/// Answers how many documents it changed: as many as the batch has entries if each had a hold to prolong.
pub(crate) fn renew(collection: &str, batch: &[Renew], last: DateTime) -> Document {
    let hold = |entry: &Renew| Bson::from(entry.hold.to_string());
    let entry = |entry: &Renew| {
        let owner = owner_text(&entry.owner);
        [entry.name.as_str().into(), owner.into(), hold(entry)]
    };
    let lease = |entry: &Renew| length(entry.lease.unwrap_or_default());
    let alike = batch.windows(2).all(|two| two[0].lease == two[1].lease);
    let lasts = match batch.first() {
        Some(first) if alike => Lasts::All(lease(first)),
        _ => Lasts::Each(names(batch), batch.iter().map(lease).collect()),
    };
    let holds: Vec<_> = batch.iter().map(hold).collect();
    let update = doc! {
        "q": {
            "_id": { "$in": names(batch) }, "dlock": VERSION, "holds.id": { "$in": holds }, "$expr": LIVES.clone(),
        },
        "u": prolong(batch.iter().map(entry).collect(), lasts),
        "multi": true,
        "collation": simple(),
    };
    doc! {
        "update": collection,
        "updates": [update],
        "let": { "last": last },
        "comment": "dlock renew",
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    }
}

/// The same for one entry. It answers the document after the command, so no second command has to read the
/// outcome.
pub(crate) fn renew_one(collection: &str, entry: &Renew, last: DateTime) -> RawDocumentBuf {
    let variables = rawdoc! {
        "owner": literal(owner_text(&entry.owner)),
        "hold": literal(entry.hold.to_string()),
        "lease": length(entry.lease.unwrap_or_default()),
        "last": last,
    };
    one(
        collection,
        named(&entry.name),
        Some(variables),
        &PROLONG_ONE,
    )
}

/// Reads documents by their names. See [`reading`].
pub(crate) fn find(collection: &str, wanted: Vec<Bson>, level: &str) -> Document {
    let most = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
    let filter = match &wanted[..] {
        [name] => doc! { "_id": name.clone() },
        _ => doc! { "_id": { "$in": wanted } },
    };
    reading(collection, filter, most, level, "dlock look")
}

/// Reads the next names in their order, free ones too, so the work of one step is bounded even where few
/// locks are held.
pub(crate) fn page(
    collection: &str,
    from: &str,
    inclusive: bool,
    most: i64,
    level: &str,
) -> Document {
    let bound = if inclusive { "$gte" } else { "$gt" };
    let mut command = reading(
        collection,
        doc! { "_id": { bound: from } },
        most,
        level,
        "dlock list",
    );
    command.insert("sort", doc! { "_id": 1 });
    command
}

/// The names after `after` in their order, and whether each was unused for a day.
pub(crate) fn old(collection: &str, after: &str) -> Document {
    let mut command = reading(
        collection,
        doc! { "_id": { "$gt": after } },
        PURGED,
        "local",
        "dlock purge",
    );
    command.insert("sort", doc! { "_id": 1 });
    command.insert(
        "projection",
        doc! { "_id": 1, "old": { "$and": [{ "$eq": ["$dlock", VERSION] }, unused()] } },
    );
    command
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

/// The changes that wake a waiter: a lock became free or unavailable (its owner became null), or its document
/// was replaced or removed. A renewal, an added hold and a released hold that was not the last do not wake.
/// The server sends only the name and the time of the event.
pub(crate) fn freed(names: Option<Vec<Bson>>) -> Vec<Document> {
    let freed = doc! { "$or": [
        { "updateDescription.updatedFields.owner": { "$type": "null" } },
        { "operationType": { "$in": ["delete", "replace"] } },
    ] };
    let mut wanted = doc! { "$and": [freed] };
    if let Some(names) = names {
        wanted.insert("documentKey._id", doc! { "$in": names });
    }
    vec![
        doc! { "$match": wanted },
        doc! { "$project": {
            "_id": 1, "operationType": 1, "ns": 1, "documentKey": 1, "updateDescription.updatedFields.since": 1,
        } },
    ]
}

/// The names of a batch as `_id`s.
pub(crate) fn names(batch: &[Renew]) -> Vec<Bson> {
    batch
        .iter()
        .map(|entry| entry.name.as_str().into())
        .collect()
}

/// One `findAndModify`. Its constant part is encoded once and copied as bytes.
fn one(
    collection: &str,
    query: RawDocumentBuf,
    variables: Option<RawDocumentBuf>,
    constant: &RawDocumentBuf,
) -> RawDocumentBuf {
    let mut command = rawdoc! { "findAndModify": collection, "query": query };
    if let Some(variables) = variables {
        command.append("let", variables);
    }
    // A BSON document is its length, its elements and a zero byte.
    let (own, more) = (command.as_bytes(), constant.as_bytes());
    let length = own.len() - ZERO + more.len() - LENGTH;
    let mut bytes = Vec::with_capacity(length + MORE);
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&own[LENGTH..own.len() - ZERO]);
    bytes.extend_from_slice(&more[LENGTH..]);
    RawDocumentBuf::from_bytes(bytes).expect("BUG: two documents make one")
}

/// One `update` of several documents. A document finds its entry by the position of its name in `names`.
fn several(
    collection: &str,
    mut statement: RawDocumentBuf,
    names: RawArrayBuf,
    asked: RawArrayBuf,
    comment: &str,
) -> RawDocumentBuf {
    statement.append("collation", rawdoc! { "locale": "simple" });
    rawdoc! {
        "update": collection,
        "updates": [statement],
        "let": { "names": { "$literal": names }, "asked": { "$literal": asked } },
        "comment": comment,
        "writeConcern": { "w": "majority", "j": true, "wtimeout": AT_MOST },
        "maxTimeMS": AT_MOST,
    }
}

fn named(name: &LockName) -> RawDocumentBuf {
    rawdoc! { "_id": name.as_str() }
}

/// A read. Its level is `linearizable` where there is a replica set: after the read the primary proves, by a
/// write that a majority confirms, that it still is the primary. So neither a cut-off primary nor a direct
/// connection to another member shows an outdated document, and what was read cannot be rolled back.
fn reading(collection: &str, filter: Document, most: i64, level: &str, comment: &str) -> Document {
    doc! {
        "find": collection,
        "filter": filter,
        "projection": SHOWN.clone(),
        "batchSize": most,
        "limit": most,
        "singleBatch": true,
        "collation": simple(),
        "readConcern": { "level": level },
        "comment": comment,
        "maxTimeMS": AT_MOST,
    }
}

fn literal(value: impl Into<RawBson>) -> RawDocumentBuf {
    rawdoc! { "$literal": value.into() }
}

fn token(token: FencingToken) -> RawBson {
    RawBson::Int64(i64::try_from(token.0).unwrap_or(i64::MAX))
}

/// Documents that one step of the purge reads.
pub(crate) const PURGED: i64 = 500;
/// Bytes of a BSON document before and after its elements.
const LENGTH: usize = 4;
const ZERO: usize = 1;
/// Room for what the native client adds.
const MORE: usize = 128;

#[cfg(test)]
mod tests {
    use super::{Given, concern, give_all, purge, renew, take_all};
    use dlock_core::{
        Clock, HoldId, Lease, LockName, Owner,
        driver::{Acquire, Renew},
    };
    use mongodb::bson::{DateTime, doc};

    #[test]
    fn batches_have_a_time_limit_and_a_majority() {
        let name: LockName = "a".parse().unwrap();
        let (owner, hold) = (Owner::from_seed("o"), HoldId::from_bits(1));
        let entry = Renew::new(name.clone(), owner, hold, None);
        let now = Clock::boot().now();
        let acquire = Acquire::new(name.clone(), owner, hold, Lease::default(), now);
        let commands = [
            renew("locks", &[entry.clone(), entry], DateTime::now()),
            purge("locks", vec!["a".into()]),
            take_all("locks", &[&(acquire, DateTime::now())])
                .to_document()
                .unwrap(),
            give_all("locks", &[Given { name, owner, hold }], 7)
                .to_document()
                .unwrap(),
        ];
        for command in commands {
            assert_eq!(command.get_i64("maxTimeMS"), Ok(1_000));
            let majority = doc! { "w": "majority", "j": true, "wtimeout": 1_000_i64 };
            assert_eq!(command.get_document("writeConcern"), Ok(&majority));
            assert_eq!(concern(), majority);
        }
    }
}
