//! Pipelines: the expressions that the server evaluates, each defined once.
//!
//! What a user chose is a variable here (`$$owner`, `$$hold`, `$$join`, …). Each command carries the values.

use mongodb::bson::{Bson, Document, RawDocumentBuf, doc};
use std::sync::LazyLock;

/// Takes the lock or re-enters it, in one atomic step on the server's clock. When it runs twice, the second
/// run finds its own hold and changes nothing. When it runs after `$$last`, it changes nothing either.
///
/// A document that this upsert has just created has no field but `_id`. If the request is refused, the
/// document stays as a free one.
pub(crate) static ACQUIRE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let taken = doc! {
        "_id": "$_id", "dlock": VERSION, "owner": "$$owner", "token": next_token(), "holds": [hold()],
        "since": "$$NOW", "keep": null,
    };
    let entered = doc! { "$mergeObjects": ["$$ROOT", { "holds": { "$concatArrays": ["$$living", [hold()]] } }] };
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

/// What [`ACQUIRE`] does to a free document. The filter has checked that the document is free, so this costs
/// the server much less work.
pub(crate) static TAKE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let stage = doc! { "$set": {
        "owner": "$$owner", "token": next_token(), "holds": [hold()], "since": "$$NOW",
    } };
    let shown = doc! { "_id": 1, "now": "$$NOW", "lock": "$$ROOT" };
    command(vec![stage].into(), shown, true, "dlock acquire")
});

/// The same as [`TAKE`] in a command for several names.
pub(crate) static TAKE_ALL: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let hold = doc! { "id": "$$one.hold", "end": { "$add": ["$$NOW", "$$one.lease"] }, "note": "$$one.note" };
    let taken = doc! {
        "owner": "$$one.owner", "token": next_token(), "holds": [hold], "since": "$$NOW",
    };
    let taken = of_several(doc! { "$mergeObjects": ["$$ROOT", taken] });
    raw(&doc! { "$replaceWith": taken })
});

/// Whether the not-after of the document's entry has not passed yet.
pub(crate) static IN_TIME: LazyLock<RawDocumentBuf> =
    LazyLock::new(|| raw(&of_several(doc! { "$lte": ["$$NOW", "$$one.last"] })));

/// Whether the first hold of the document is the one to release, and lives.
pub(crate) static INSIDE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let first = |field: &str| doc! { "$arrayElemAt": [format!("$holds.{field}"), 0] };
    raw(&of_several(doc! { "$and": [
        { "$eq": ["$owner", "$$one.owner"] },
        { "$eq": [first("id"), "$$one.hold"] },
        { "$gt": [first("end"), "$$NOW"] },
    ] }))
});

/// What [`RELEASE`] does to a document with one hold. The filter has checked that it is the hold to release.
pub(crate) static GIVE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let freed = doc! {
        "$set": { "owner": null, "holds": [] },
        "$currentDate": { "since": true },
    };
    command(freed.into(), doc! { "_id": 1 }, false, "dlock release")
});

/// Removes one hold (`$$hold`) or all of them (null), in one atomic step on the server's clock. When it runs
/// twice, the second run finds nothing and changes nothing. It has no not-after.
pub(crate) static RELEASE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
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

/// Frees the lock without its owner, if `$$only` is its token or null. When it runs twice, the second run
/// finds the lock free, or another token.
pub(crate) static BREAK: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
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

/// Whether the not-after has not passed and a hold of the document lives. A batch's filter checks no more.
pub(crate) static LIVES: LazyLock<Bson> = LazyLock::new(|| {
    let alive = doc! { "$gt": [{ "$max": "$holds.end" }, "$$NOW"] };
    Bson::Document(doc! { "$and": [in_time(), alive] })
});

/// Moves the end of each living hold whose document, owner and hold the batch names together, and never moves
/// it back. Other holds stay as they are. When it runs twice, the lease counts from the second run.
///
/// The server finds a constant of the pipeline through a hash table. It would scan a list in a variable, or
/// the positions of a list, from the beginning for each document.
pub(crate) fn prolong(batch: Vec<[Bson; 3]>, lease: Lasts) -> Bson {
    let named = batch.into_iter().map(|entry| Bson::from(entry.to_vec()));
    let named = doc! { "$literal": named.collect::<Vec<_>>() };
    let meant = doc! { "$in": [["$_id", "$owner", "$$one.id"], named] };
    let lease = match lease {
        Lasts::All(lease) => lease.into(),
        Lasts::Each(names, leases) => {
            let at = doc! { "$indexOfArray": [{ "$literal": names }, "$_id"] };
            doc! { "$arrayElemAt": [leases, at] }.into()
        }
    };
    Bson::Array(vec![Bson::Document(
        doc! { "$set": { "holds": prolonged(meant, lease) } },
    )])
}

/// The leases of the entries of a batch, in ms.
pub(crate) enum Lasts {
    All(i64),
    Each(Vec<Bson>, Vec<i64>),
}

/// The same for a single document, which no filter has checked.
pub(crate) static PROLONG_ONE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let ours =
        doc! { "$and": [{ "$eq": ["$dlock", VERSION] }, { "$isArray": "$holds" }, in_time()] };
    let meant =
        doc! { "$and": [{ "$eq": ["$owner", "$$owner"] }, { "$eq": ["$$one.id", "$$hold"] }] };
    let holds = doc! { "$cond": [ours, prolonged(meant, "$$lease".into()), "$holds"] };
    constant(doc! { "$set": { "holds": holds } }, true, "dlock renew")
});

/// What every command shows of a document: the server's time and the record. Of a foreign document it shows
/// the fields and their types.
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

/// The parts of a `findAndModify` other than its name, its filter and its variables. With `new` it answers
/// the document after the command.
fn constant(stage: Document, new: bool, comment: &str) -> RawDocumentBuf {
    let shown = SHOWN.as_document().cloned().unwrap_or_default();
    command(vec![stage].into(), shown, new, comment)
}

fn command(update: Bson, shown: Document, new: bool, comment: &str) -> RawDocumentBuf {
    let command = doc! {
        "update": update,
        "fields": shown,
        "new": new,
        "collation": simple(),
        "comment": comment,
        "writeConcern": concern(),
        "maxTimeMS": AT_MOST,
    };
    raw(&command)
}

fn raw(constant: &Document) -> RawDocumentBuf {
    RawDocumentBuf::from_document(constant).expect("its keys are those above")
}

/// The write concern of every write, whatever the URL or the application's client says.
pub(crate) fn concern() -> Document {
    doc! { "w": "majority", "j": true, "wtimeout": AT_MOST }
}

/// The collation that compares names byte by byte, whatever the collection's own collation is.
pub(crate) fn simple() -> Document {
    doc! { "locale": "simple" }
}

fn with(variables: Document, expression: Document) -> Document {
    doc! { "$let": { "vars": variables, "in": expression } }
}

/// A free document with the name of the one that it replaces.
fn free(token: impl Into<Bson>) -> Document {
    doc! {
        "_id": "$_id", "dlock": VERSION, "owner": null, "token": token.into(), "holds": [],
        "since": "$$NOW", "keep": null,
    }
}

/// The requested hold.
fn hold() -> Document {
    doc! { "id": "$$hold", "end": { "$add": ["$$NOW", "$$lease"] }, "note": "$$note" }
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

/// The next token: the last token + 1, or the server's time in µs if that is greater. `$$NOW` counts in ms.
fn next_token() -> Document {
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    doc! { "$max": [{ "$add": ["$token", 1_i64] }, micros] }
}

/// Evaluates an expression with the entry of this document as `$$one`.
fn of_several(expression: Document) -> Document {
    let place = doc! { "$indexOfArray": ["$$names", "$_id"] };
    with(
        doc! { "one": { "$arrayElemAt": ["$$asked", place] } },
        expression,
    )
}

fn in_time() -> Document {
    doc! { "$lte": ["$$NOW", "$$last"] }
}

/// The holds of a document. Each hold that is meant and lives now ends `lease` from now, or later if it did.
fn prolonged(meant: Document, lease: Bson) -> Document {
    let lives = doc! { "$gt": ["$$one.end", "$$NOW"] };
    let end = doc! { "$max": ["$$one.end", { "$add": ["$$NOW", lease] }] };
    let moved = doc! { "$mergeObjects": ["$$one", { "end": end }] };
    let one = doc! { "$cond": [{ "$and": [lives, meant] }, moved, "$$one"] };
    doc! { "$map": { "input": "$holds", "as": "one", "in": one } }
}

/// Whether the lock had no holder and no minimum hold for a day, and its counter is a day old. The next
/// acquire of the name then gets a greater token from the clock.
pub(crate) fn unused() -> Document {
    let day = doc! { "$subtract": ["$$NOW", UNUSED] };
    let micros = doc! { "$multiply": [{ "$toLong": day.clone() }, 1000_i64] };
    doc! { "$and": [
        { "$lt": ["$since", day.clone()] },
        { "$lt": ["$keep", day.clone()] },
        { "$lt": ["$token", micros] },
        { "$not": [{ "$anyElementTrue": [{ "$map": { "input": "$holds", "as": "one", "in": { "$gte": ["$$one.end", day] } } }] }] },
    ] }
}

/// The version of the document's shape.
pub(crate) const VERSION: i32 = 1;
/// The server runs no lock command longer than this, in ms. So no command takes effect later than this after
/// its `$$NOW`, and none waits longer for a majority.
pub(crate) const AT_MOST: i64 = 1_000;
/// The most fields shown of a foreign document, which may have any number.
const MOST_SHOWN: i32 = 20;
/// The minimum time in ms for which the document of an unused name stays, with the counter in it.
const UNUSED: i64 = 24 * 60 * 60 * 1_000;
