//! All wire text: the commands, their pipelines and what they answer.
//!
//! One document per name:
//!
//! | field | what |
//! |---|---|
//! | `_id` | the name, as it is |
//! | `dlock` | 1: the version of this shape |
//! | `owner` | its UUID as text, or null: nobody is inside |
//! | `token` | the fencing token given last, a long |
//! | `holds` | `{id, end, note}` each: 16 hex digits, the server's time, `PID HOST` |
//! | `since` | when it was taken, or became free |
//! | `keep` | kept shut until then, or null; while somebody is inside, what an earlier release asked for |
//!
//! Every command touches each document in one atomic step. The only clock is the server's: `$$NOW` has one value for a whole command and is
//! fixed when that begins, so it is never later than the moment at which the step takes effect. What a user chose reaches a pipeline as a
//! variable under `$literal`, never as text of an expression: an owner `$_id` is an owner. No pipeline writes to a document that is not
//! ours, and a refusal writes nothing: the server leaves a document alone that a pipeline gives back as it was.
//!
//! Writes are confirmed by a majority, also those that found nothing to write: the server then waits for what it has read.

use crate::record::{length, owner_text};
use dlock_core::{Acquire, FencingToken, Holds, LockName, Release, Renew};
use mongodb::bson::{Bson, DateTime, Document, RawBson, RawDocumentBuf, doc, rawdoc};
use std::sync::LazyLock;

/// A command, as bytes where it is sent often.
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

/// Takes the lock or re-enters it. Run twice it finds its own hold and changes nothing; run after `$$last` likewise.
///
/// A document that was made by this upsert has no field but `_id`; refused, it stays as a free one.
static ACQUIRE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let hold = doc! { "id": "$$hold", "end": { "$add": ["$$NOW", "$$lease"] }, "note": "$$note" };
    let taken = doc! {
        "_id": "$_id", "dlock": VERSION, "owner": "$$owner", "token": next_token(), "holds": [hold.clone()],
        "since": "$$NOW", "keep": null,
    };
    let entered = doc! { "$mergeObjects": ["$$ROOT", { "holds": { "$concatArrays": ["$$living", [hold]] } }] };
    let may_enter = doc! { "$and": [
        { "$not": [{ "$in": ["$$hold", "$$living.id"] }] },
        { "$lt": [{ "$size": "$$living" }, dlock_core::MAX_HOLDS] },
        { "$or": [{ "$eq": ["$$join", null] }, { "$eq": ["$$join", "$token"] }] },
    ] };
    let made_now = doc! { "$eq": ["$$ROOT", { "_id": "$_id" }] };
    let ours = doc! { "$or": ["$$made", { "$eq": ["$dlock", VERSION] }] };
    let may_take = doc! { "$and": [
        { "$eq": [{ "$size": "$$living" }, 0] },
        { "$eq": ["$$join", null] },
        { "$not": [{ "$and": [{ "$eq": ["$owner", null] }, { "$gt": ["$keep", "$$NOW"] }] }] },
    ] };
    let as_it_was = doc! { "$cond": ["$$made", free(doc! { "$literal": 0_i64 }), "$$ROOT"] };
    let decided = doc! { "$switch": {
        "branches": [
            { "case": { "$not": [ours] }, "then": "$$ROOT" },
            { "case": { "$gt": ["$$NOW", "$$last"] }, "then": "$$before" },
            { "case": { "$and": [is_inside(), may_enter] }, "then": entered },
            { "case": may_take, "then": taken },
        ],
        "default": "$$before",
    } };
    let decided = with(doc! { "before": as_it_was }, decided);
    let root = with(doc! { "living": living(), "made": made_now }, decided);
    constant(doc! { "$replaceWith": root }, true, "dlock acquire")
});

/// Removes one hold (`$$hold`) or all of them (null). Run twice the second finds nothing and changes nothing. Never late.
static RELEASE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let left = doc! { "$cond": [
        { "$eq": ["$$hold", null] }, [],
        { "$filter": { "input": "$$living", "as": "one", "cond": { "$ne": ["$$one.id", "$$hold"] } } },
    ] };
    let keep = doc! { "$max": ["$keep", { "$cond": [
        { "$eq": ["$$keep", null] }, null, { "$add": ["$$NOW", "$$keep"] },
    ] }] };
    let named = doc! { "$or": [{ "$eq": ["$$hold", null] }, { "$in": ["$$hold", "$$living.id"] }] };
    let kept = doc! { "$cond": [{ "$gt": ["$$until", "$$NOW"] }, "$$until", null] };
    let freed = doc! { "$mergeObjects": [free("$token"), { "keep": kept }] };
    let others = doc! { "$mergeObjects": ["$$ROOT", { "holds": "$$left", "keep": "$$until" }] };
    let gone = doc! { "$cond": [{ "$eq": ["$$left", []] }, freed, others] };
    let decided = doc! { "$cond": [
        { "$and": [{ "$eq": ["$dlock", VERSION] }, is_inside(), named] },
        with(doc! { "left": left, "until": keep }, gone),
        "$$ROOT",
    ] };
    let root = with(doc! { "living": living() }, decided);
    constant(doc! { "$replaceWith": root }, false, "dlock release")
});

/// Frees a name whoever holds it, if its token is `$$only` or that is null. Run twice the second finds it free, or another token.
static BREAK: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let inside = doc! { "$gt": [{ "$size": "$$living" }, 0] };
    let shut = doc! { "$and": [{ "$eq": ["$owner", null] }, { "$gt": ["$keep", "$$NOW"] }] };
    let meant = doc! { "$or": [
        { "$and": [inside.clone(), { "$eq": ["$$only", "$token"] }] },
        { "$and": [{ "$eq": ["$$only", null] }, { "$or": [inside, shut] }] },
    ] };
    let decided = doc! { "$cond": [
        { "$and": [{ "$eq": ["$dlock", VERSION] }, meant] }, free("$token"), "$$ROOT",
    ] };
    let root = with(doc! { "living": living() }, decided);
    constant(doc! { "$replaceWith": root }, false, "dlock break")
});

/// Whether the document has the living hold that the batch names for it. A lapsed one is no match, so it is neither prolonged nor counted.
static NAMED: LazyLock<Bson> = LazyLock::new(|| {
    let same = doc! { "$eq": ["$$one.id", at("$$holds")] };
    let lives = doc! { "$gt": ["$$one.end", "$$NOW"] };
    let found = doc! { "$anyElementTrue": [{ "$map": {
        "input": "$holds", "as": "one", "in": { "$and": [same, lives] },
    } }] };
    let owned = doc! { "$eq": ["$owner", at("$$owners")] };
    let decided = with(entry(), doc! { "$and": [owned, found] });
    Bson::Document(doc! { "$and": [{ "$lte": ["$$NOW", "$$last"] }, decided] })
});

/// Moves the end of the hold that the batch names for the document, never back. Run twice it lasts from the second on.
static PROLONG: LazyLock<Bson> = LazyLock::new(|| {
    let end = doc! { "$max": ["$$one.end", { "$add": ["$$NOW", at("$$leases")] }] };
    let moved = doc! { "$cond": [
        { "$eq": ["$$one.id", at("$$holds")] }, { "$mergeObjects": ["$$one", { "end": end }] }, "$$one",
    ] };
    let holds = doc! { "$map": { "input": "$holds", "as": "one", "in": moved } };
    Bson::Array(vec![Bson::Document(
        doc! { "$set": { "holds": with(entry(), holds) } },
    )])
});

/// The same for the only document there is, which a filter has not judged.
static PROLONG_ONE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let held =
        doc! { "$and": [{ "$eq": ["$dlock", VERSION] }, { "$isArray": "$holds" }, NAMED.clone()] };
    let holds = doc! { "$cond": [held, prolonged(), "$holds"] };
    constant(doc! { "$set": { "holds": holds } }, true, "dlock renew")
});

/// What every command shows of a document: the server's time, and the record, or of one that is not ours its fields and their types.
pub(crate) static SHOWN: LazyLock<Bson> = LazyLock::new(|| {
    let field = doc! { "$concat": ["$$one.k", ": ", { "$type": "$$one.v" }] };
    let fields = doc! { "$map": {
        "input": { "$slice": [{ "$objectToArray": "$$ROOT" }, MOST_SHOWN] }, "as": "one", "in": field,
    } };
    Bson::Document(doc! {
        "_id": 1,
        "now": "$$NOW",
        "lock": { "$cond": [{ "$eq": ["$dlock", VERSION] }, "$$ROOT", null] },
        "shape": { "$cond": [{ "$eq": ["$dlock", VERSION] }, null, fields] },
    })
});

/// Answers the document as it is afterwards: whose hold is inside has won.
pub(crate) fn acquire(collection: &str, req: &Acquire, last: DateTime) -> RawDocumentBuf {
    let variables = rawdoc! {
        "owner": literal(owner_text(&req.owner)),
        "hold": literal(req.hold.to_string()),
        "note": literal(req.note.to_string()),
        "lease": length(req.lease.length()),
        "last": last,
        "join": literal(req.join.map_or(RawBson::Null, token)),
    };
    let mut command = one(collection, &req.name, &ACQUIRE, variables);
    command.append("upsert", req.join.is_none());
    command
}

/// Answers the document as it was before.
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
    one(collection, &req.name, &RELEASE, variables)
}

/// Answers the document as it was before.
pub(crate) fn break_lock(
    collection: &str,
    name: &LockName,
    only: Option<FencingToken>,
) -> RawDocumentBuf {
    let variables = rawdoc! { "only": literal(only.map_or(RawBson::Null, token)) };
    one(collection, name, &BREAK, variables)
}

/// Answers how many documents matched: as many as the batch has entries when all of them are held.
pub(crate) fn renew(collection: &str, batch: &[Renew], last: DateTime) -> Document {
    let listed =
        |of: fn(&Renew) -> Bson| doc! { "$literal": batch.iter().map(of).collect::<Vec<_>>() };
    let variables = doc! {
        "names": listed(|entry| entry.name.as_str().into()),
        "owners": listed(|entry| owner_text(&entry.owner).into()),
        "holds": listed(|entry| entry.hold.to_string().into()),
        "leases": listed(|entry| length(entry.lease.unwrap_or_default()).into()),
        "last": last,
    };
    let update = doc! {
        "q": { "_id": { "$in": names(batch) }, "dlock": VERSION, "$expr": NAMED.clone() },
        "u": PROLONG.clone(),
        "multi": true,
        "collation": simple(),
    };
    doc! {
        "update": collection,
        "updates": [update],
        "let": variables,
        "comment": "dlock renew",
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    }
}

/// The same for one entry: answers the document as it is afterwards, so that no second command is needed to see what came of it.
pub(crate) fn renew_one(collection: &str, entry: &Renew, last: DateTime) -> RawDocumentBuf {
    let variables = rawdoc! {
        "names": { "$literal": [entry.name.as_str()] },
        "owners": { "$literal": [owner_text(&entry.owner)] },
        "holds": { "$literal": [entry.hold.to_string()] },
        "leases": { "$literal": [length(entry.lease.unwrap_or_default())] },
        "last": last,
    };
    one(collection, &entry.name, &PROLONG_ONE, variables)
}

/// Looks at documents by their names. See [`reading`].
pub(crate) fn find(collection: &str, wanted: Vec<Bson>, level: &str) -> Document {
    let most = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
    let filter = match &wanted[..] {
        [name] => doc! { "_id": name.clone() },
        _ => doc! { "_id": { "$in": wanted } },
    };
    reading(collection, filter, most, level, "dlock look")
}

/// Looks at the next names in their order, free ones too: a step's work is bounded, what it finds is not.
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

/// Names behind `after` in their order, and whether nothing of them has been used for a day.
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

/// Removes them, each only if that is still so. The counter goes with the document: the clock is a day past it by then.
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

/// What kind of server this is, and its time.
pub(crate) fn hello() -> Document {
    doc! { "hello": 1, "comment": "dlock hello", "maxTimeMS": AT_MOST }
}

/// How the collection was made, if it was.
pub(crate) fn collection_of(name: &str) -> Document {
    doc! {
        "listCollections": 1, "filter": { "name": name }, "nameOnly": false, "authorizedCollections": false,
        "maxTimeMS": AT_MOST,
    }
}

/// Its indexes.
pub(crate) fn indexes_of(name: &str) -> Document {
    doc! { "listIndexes": name, "maxTimeMS": AT_MOST }
}

/// Which changes wake a waiter: a name that became free or shut, or whose document was replaced or removed by somebody. A renewal,
/// a hold more, a hold less do not. Of the event only the name is sent.
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
        doc! { "$project": { "_id": 1, "operationType": 1, "ns": 1, "documentKey": 1 } },
    ]
}

/// Names as `_id`s.
pub(crate) fn names(batch: &[Renew]) -> Vec<Bson> {
    batch
        .iter()
        .map(|entry| entry.name.as_str().into())
        .collect()
}

/// One `findAndModify`. What is the same each time was written once, and is copied as bytes.
fn one(
    collection: &str,
    name: &LockName,
    constant: &RawDocumentBuf,
    variables: RawDocumentBuf,
) -> RawDocumentBuf {
    let query = rawdoc! { "_id": name.as_str() };
    let mut command = rawdoc! { "findAndModify": collection, "query": query, "let": variables };
    for (key, value) in constant.iter().flatten() {
        command.append_ref(key, value);
    }
    command
}

/// All of a `findAndModify` but its name and its variables. `new`: it answers the document as it is afterwards.
fn constant(stage: Document, new: bool, comment: &str) -> RawDocumentBuf {
    let command = doc! {
        "update": [stage],
        "fields": SHOWN.clone(),
        "new": new,
        "collation": simple(),
        "comment": comment,
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    };
    RawDocumentBuf::from_document(&command).expect("its keys are those above")
}

/// A read. `linearizable` where there is a set: the primary proves afterwards, by a write that a majority confirms, that it still was one, so
/// neither a primary that was cut off nor a direct connection to another member shows what is no longer so, and what was read stays.
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

/// Whatever the URL or the application's client says.
fn concern() -> Document {
    doc! { "w": "majority", "j": true, "wtimeout": AT_MOST }
}

/// Names differ in every byte, whatever the collection's own collation.
fn simple() -> Document {
    doc! { "locale": "simple" }
}

fn with(variables: Document, expression: Document) -> Document {
    doc! { "$let": { "vars": variables, "in": expression } }
}

/// A free document; its name is that of the one it replaces.
fn free(token: impl Into<Bson>) -> Document {
    doc! {
        "_id": "$_id", "dlock": VERSION, "owner": null, "token": token.into(), "holds": [],
        "since": "$$NOW", "keep": null,
    }
}

fn living() -> Document {
    doc! { "$filter": {
        "input": { "$cond": [{ "$isArray": "$holds" }, "$holds", []] },
        "as": "one",
        "cond": { "$gt": ["$$one.end", "$$NOW"] },
    } }
}

fn is_inside() -> Document {
    doc! { "$and": [{ "$gt": [{ "$size": "$$living" }, 0] }, { "$eq": ["$owner", "$$owner"] }] }
}

/// The last one + 1, or the server's time in µs where that is more. `$$NOW` counts in ms.
fn next_token() -> Document {
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    doc! { "$max": [{ "$add": ["$token", 1_i64] }, micros] }
}

/// Where in the batch this document stands.
fn entry() -> Document {
    doc! { "at": { "$indexOfArray": ["$$names", "$_id"] } }
}

/// What the batch has there.
fn at(list: &str) -> Document {
    doc! { "$arrayElemAt": [list, "$$at"] }
}

fn prolonged() -> Bson {
    let stage = PROLONG
        .as_array()
        .and_then(|stages| stages.first()?.as_document());
    let set = stage.and_then(|stage| stage.get_document("$set").ok());
    set.and_then(|set| set.get("holds"))
        .cloned()
        .unwrap_or(Bson::Null)
}

/// Nobody inside for a day, nothing keeps it shut, and its counter is a day old: whoever takes the name then gets a greater one from the clock.
fn unused() -> Document {
    let day = doc! { "$subtract": ["$$NOW", UNUSED] };
    let micros = doc! { "$multiply": [{ "$toLong": day.clone() }, 1000_i64] };
    doc! { "$and": [
        { "$lt": ["$since", day.clone()] },
        { "$lt": ["$keep", day.clone()] },
        { "$lt": ["$token", micros] },
        { "$not": [{ "$anyElementTrue": [{ "$map": { "input": "$holds", "as": "one", "in": { "$gte": ["$$one.end", day] } } }] }] },
    ] }
}

fn literal(value: impl Into<RawBson>) -> RawDocumentBuf {
    rawdoc! { "$literal": value.into() }
}

fn token(token: FencingToken) -> RawBson {
    RawBson::Int64(i64::try_from(token.0).unwrap_or(i64::MAX))
}

/// Of the document's shape.
const VERSION: i32 = 1;
/// No command runs longer on the server, so none takes effect later than this after its `$$NOW`; and none waits longer for a majority.
const AT_MOST: i64 = 1_000;
/// A foreign document may have any number of fields.
const MOST_SHOWN: i32 = 20;
/// Documents looked at in one step of purging.
pub(crate) const PURGED: i64 = 500;
/// How long a free name's document, and the counter in it, is kept at least.
const UNUSED: i64 = 24 * 60 * 60 * 1_000;
