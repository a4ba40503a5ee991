//! The stored documents, and foreign documents in the collection.

use crate::testbed::{SECOND, Testbed};
use dlock_core::{
    Broken, Effect, ErrorKind, FencingToken, HoldId, HolderInfo, MAX_SHARERS,
    driver::{Acquired, DistributedLock, DriverError, Lane, Release, Released, Renew, Renewed},
};
use dlock_mongo::MongoDriver;
use futures_util::{StreamExt, future::join_all};
use mongodb::bson::{Bson, DateTime, Document, doc};
use std::sync::Arc;

/// The fields of a document.
pub(crate) const KEYS: [&str; 10] = [
    "_id", "dlock", "owner", "token", "holds", "until", "keep", "since", "note", "version",
];

/// The fields of a document, in the order of [`KEYS`].
pub(crate) fn keys(document: &Document) -> Vec<&str> {
    let mut keys: Vec<_> = document.keys().map(String::as_str).collect();
    let place = |key: &&str| KEYS.iter().position(|known| known == key);
    keys.sort_by_key(|key| place(key).unwrap_or(KEYS.len()));
    keys
}

fn ended(document: &Document) -> bool {
    let never = DateTime::from_millis(0);
    document.get("owner") == Some(&Bson::Null)
        && document.get_array("holds").unwrap().is_empty()
        && document.get_datetime("until").unwrap() == &never
        && document.get_datetime("keep").unwrap() == &never
        && document.get_str("note").unwrap().is_empty()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_is_pinned_while_held_and_when_free() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a.$b", SECOND * 30);
    req.info = Arc::new(HolderInfo::new("$_id", 4711));
    let grant = t.granted(&req).await;
    let held = t.document("a.$b").await;
    assert_eq!(keys(&held), KEYS);
    assert_eq!(held.get_i32("dlock"), Ok(1));
    assert_eq!(
        held.get_str("owner").unwrap(),
        req.owner.expose().to_string()
    );
    assert_eq!(
        held.get_i64("token").unwrap().cast_unsigned(),
        grant.token.0
    );
    let hold = held.get_array("holds").unwrap()[0].as_document().unwrap();
    assert_eq!(hold.keys().collect::<Vec<_>>(), ["id", "end"]);
    assert_eq!(hold.get_str("id").unwrap(), req.hold.to_string());
    assert_eq!(hold.get_datetime("end"), held.get_datetime("until"));
    assert_eq!(held.get_str("note").unwrap(), "4711 $_id");
    assert!(matches!(t.release(&req).await, Released::Freed));
    let free = t.document("a.$b").await;
    assert_eq!(keys(&free), KEYS);
    assert!(ended(&free), "{free}");
    assert_eq!(free.get_i64("token"), held.get_i64("token"));
    assert!(free.get_i64("version").unwrap() > held.get_i64("version").unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_short_way_in_and_out_leaves_the_same_record() {
    let t = Testbed::start().await;
    let (mut last, mut version) = (0, 0);
    // The first request makes the document, and the others find a free one. Requests other than the simplest
    // read the record and write it.
    for round in 0..4 {
        let mut req = t.acquire("a", SECOND * 30);
        req.info = Arc::new(HolderInfo::new("host", round));
        let grant = t.granted(&req).await;
        let held = t.document("a").await;
        assert_eq!(keys(&held), KEYS);
        let token = held.get_i64("token").unwrap();
        assert_eq!(grant.token, FencingToken(token.cast_unsigned()));
        assert!(token > last, "{token} after {last}");
        last = token;
        assert_eq!(
            held.get_str("owner").unwrap(),
            req.owner.expose().to_string()
        );
        let holds = held.get_array("holds").unwrap();
        let hold = holds[0].as_document().unwrap();
        assert_eq!(hold.keys().collect::<Vec<_>>(), ["id", "end"], "{hold}");
        assert_eq!(hold.get_str("id").unwrap(), req.hold.to_string());
        assert_eq!(
            held.get_str("note").unwrap(),
            format!("{round} host").as_str()
        );
        let since = held.get_datetime("since").unwrap().timestamp_millis();
        let end = hold.get_datetime("end").unwrap().timestamp_millis();
        assert_eq!(end - since, 30_000);
        assert_eq!(held.get_datetime("until"), hold.get_datetime("end"));
        assert_eq!(t.granted(&req).await.holds.get(), 1, "a repeat");
        let mut more = req.clone();
        more.hold = HoldId::from_bits(1_000 + u64::from(round));
        if round % 2 == 1 {
            assert_eq!(t.granted(&more).await.holds.get(), 2);
            assert!(matches!(
                t.release(&more).await,
                Released::StillHeld { holds } if holds.get() == 1
            ));
        }
        assert!(matches!(t.release(&req).await, Released::Freed));
        let free = t.document("a").await;
        assert_eq!(keys(&free), KEYS);
        assert!(ended(&free), "{free}");
        assert_eq!(free.get_i64("token"), Ok(last));
        let before = std::mem::replace(&mut version, free.get_i64("version").unwrap());
        assert!(version > before, "{version} after {before}");
        assert!(matches!(
            t.release(&req).await,
            Released::NotHeld { by: None }
        ));
    }
    // This client freed the lock, and another client has taken it since.
    let other = MongoDriver::connect(&t.server.url()).await.unwrap();
    let theirs = t.acquire("a", SECOND * 30);
    assert!(matches!(
        other.acquire(&theirs).await.unwrap(),
        Acquired::Granted(_)
    ));
    let by = t.held(&t.acquire("a", SECOND)).await.by.unwrap();
    assert_eq!(by.owner, theirs.owner.fingerprint());
    let mut kept = Release::new(theirs.name.clone(), theirs.owner, theirs.hold);
    kept.min_hold = Some(SECOND * 30);
    assert!(matches!(
        other.release(&kept).await.unwrap(),
        Released::MinHold { .. }
    ));
    assert!(t.held(&t.acquire("a", SECOND)).await.by.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lapsed_hold_is_not_given_back() {
    let t = Testbed::start().await;
    let req = t.acquire("a", SECOND / 5);
    t.granted(&req).await;
    t.sleep(230).await; // the lease has to be over
    let before = t.document("a").await;
    assert!(matches!(
        t.release(&req).await,
        Released::NotHeld { by: None }
    ));
    assert_eq!(t.document("a").await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_looks_like_an_expression_is_a_name_or_a_word() {
    let t = Testbed::start().await;
    let names = [
        "$_id",
        "$$NOW",
        "$$ROOT",
        "{\"$gt\":\"\"}",
        "a.b.c",
        "$owner",
        ".",
        "$",
        "$where",
    ];
    let held: Vec<_> = names
        .iter()
        .map(|name| t.acquire(name, SECOND * 30))
        .collect();
    for req in &held {
        let mut req = req.clone();
        req.info = Arc::new(HolderInfo::new("$$ROOT.owner", 1));
        t.granted(&req).await;
        let by = t
            .held(&t.acquire(req.name.as_str(), SECOND))
            .await
            .by
            .unwrap();
        assert_eq!(
            (by.owner, by.info.host.as_str()),
            (req.owner.fingerprint(), "$$ROOT.owner")
        );
    }
    let batch: Vec<_> = held.iter().collect();
    assert!(
        t.renew(&batch)
            .await
            .iter()
            .all(|answer| matches!(answer, Some(Renewed::Until { .. })))
    );
    for req in &held {
        assert_eq!(t.driver.inspect(&req.name).await.unwrap().holds, 1);
        assert!(
            matches!(t.release(req).await, Released::Freed),
            "{}",
            req.name
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_is_not_ours_is_left_as_it_is_and_told_apart() {
    let t = Testbed::start().await;
    let theirs = [
        doc! { "_id": "a", "lockedBy": "batch-7", "until": DateTime::now() },
        doc! { "_id": "b", "dlock": 2, "owner": Bson::Null, "holds": [] },
        doc! { "_id": "c", "owner": "x", "holds": "many", "token": 1_i64 },
    ];
    for theirs in &theirs {
        t.locks().insert_one(theirs).await.unwrap();
        let name = theirs.get_str("_id").unwrap();
        for error in each_request_of(&t, name).await {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::None),
                "{error:?}"
            );
            assert!(error.to_string().contains("field `dlock`"), "{error}");
            assert!(!error.to_string().contains("batch-7"), "{error}");
        }
        let broken = t.driver.break_lock(&name.parse().unwrap(), None).await;
        let error = broken.map(drop).unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Misuse, Effect::None),
            "{error:?}"
        );
        assert_eq!(&t.document(name).await, theirs);
    }
    let listed = t.driver.list("", None, 100).await.unwrap().found;
    assert_eq!(listed.len(), 3);
    assert!(listed.iter().all(|one| one.damaged.is_some()));
}

/// The errors of all requests for a name but a break.
async fn each_request_of(t: &Testbed, name: &str) -> Vec<DriverError> {
    let req = t.acquire(name, SECOND);
    let entry = Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND));
    let other = Renew::new("z".parse().unwrap(), req.owner, req.hold, Some(SECOND));
    let release = Release::new(req.name.clone(), req.owner, req.hold);
    let mut errors = vec![
        t.driver.acquire(&req).await.map(drop).unwrap_err(),
        t.driver.release(&release).await.map(drop).unwrap_err(),
        t.driver.inspect(&req.name).await.map(drop).unwrap_err(),
    ];
    for batch in [vec![entry.clone()], vec![entry, other]] {
        let answers = t.driver.renew(Lane(0), &batch, t.soon()).await;
        errors.push(answers.unwrap().remove(0).unwrap_err());
    }
    errors
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_document_is_told_and_a_break_replaces_it() {
    let t = Testbed::start().await;
    for (field, wrong) in [("holds", "many"), ("until", "soon"), ("version", "one")] {
        let req = t.acquire(field, SECOND * 30);
        let token = t.granted(&req).await.token;
        let damage = doc! { "$set": { field: wrong } };
        let locks = t.locks();
        locks
            .update_one(doc! { "_id": field }, damage)
            .await
            .unwrap();
        for error in each_request_of(&t, field).await {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            let named = format!("field `{field}`");
            assert!(error.to_string().contains(&named), "{error}");
        }
        let listed = t.driver.list(field, None, 100).await.unwrap().found;
        assert!(listed[0].damaged.is_some(), "{listed:?}");
        let broken = t.driver.break_lock(&req.name, None).await.unwrap();
        assert!(matches!(broken, Broken::Freed { .. }), "{broken:?}");
        let next = t.granted(&t.acquire(field, SECOND)).await.token;
        assert!(next > token, "{next:?} after {token:?}");
    }
}

/// The server ends a reply at 16 MiB, and says nothing of the documents that it leaves out.
#[tokio::test(flavor = "multi_thread")]
async fn locks_of_which_no_single_reply_can_tell_are_all_renewed_and_listed() {
    let t = Testbed::start().await;
    let first = t.acquire("n000", SECOND * 300);
    t.granted(&first).await;
    let mut large = t.document("n000").await;
    let end = *large.get_datetime("until").unwrap();
    let mut holds = large.get_array("holds").unwrap().clone();
    for hold in 1..u64::from(MAX_SHARERS) {
        holds.push(doc! { "id": format!("{:016x}", hold << 32), "end": end }.into());
    }
    large.insert("holds", holds);
    // Of 50 KB each.
    let names: Vec<_> = (1..350).map(|at| format!("n{at:03}")).collect();
    for some in names.chunks(50) {
        let some = some.iter().map(|name| {
            let mut one = large.clone();
            one.insert("_id", name);
            one
        });
        t.locks().insert_many(some).await.unwrap();
    }
    let proof = |name: &String| Renew::new(name.parse().unwrap(), first.owner, first.hold, None);
    let proofs: Vec<_> = names.iter().map(proof).collect();
    let give_up = t.soon() + SECOND * 60;
    let answers = t.driver.renew(Lane(0), &proofs, give_up).await.unwrap();
    for (name, answer) in names.iter().zip(answers) {
        let is_held = matches!(answer, Ok(Renewed::Until { .. }));
        assert!(is_held, "{name}: {answer:?}");
    }
    let (mut listed, mut from) = (0, None);
    loop {
        let page = t.driver.list("n", from.as_ref(), 1_000).await.unwrap();
        listed += page.found.len();
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(listed, 350);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_grows_over_a_counter_that_is_ahead_of_the_clock() {
    let t = Testbed::start().await;
    t.release_of_granted("a").await;
    let ahead = 9_007_199_254_740_993_i64;
    t.locks()
        .update_one(doc! { "_id": "a" }, doc! { "$set": { "token": ahead } })
        .await
        .unwrap();
    let token = t.granted(&t.acquire("a", SECOND)).await.token;
    assert_eq!(token, FencingToken(ahead.cast_unsigned() + 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_unused_for_a_day_are_purged_and_nothing_else() {
    let t = Testbed::start().await;
    let old = DateTime::from_millis(DateTime::now().timestamp_millis() - 25 * 3_600_000);
    let micros = old.timestamp_millis() * 1_000;
    let never = DateTime::from_millis(0);
    let free = |id: &str| {
        doc! {
            "_id": id, "dlock": 1, "owner": Bson::Null, "token": micros, "holds": [], "until": never, "keep": never,
            "since": old, "note": "", "version": 7_i64,
        }
    };
    let changed = |id: &str, change: Document| {
        let mut made = free(id);
        made.extend(change);
        made
    };
    let soon = DateTime::from_millis(DateTime::now().timestamp_millis() + 60_000);
    let held = |until: DateTime| {
        let hold = doc! { "id": "0000000000000001", "end": until };
        doc! { "owner": "x", "holds": [hold], "until": until }
    };
    let documents = [
        free("old"),
        changed("lapsed", held(old)),
        changed("held", held(soon)),
        changed("shut", doc! { "until": soon }),
        changed("ahead", doc! { "token": i64::MAX }),
        changed("young", doc! { "since": DateTime::now() }),
        doc! { "_id": "foreign", "since": old, "until": old },
    ];
    t.locks().insert_many(documents).await.unwrap();
    // Sweeps are rare: this takes some hundred grants.
    let used: Vec<_> = (0..64).map(|at| format!("z{at}")).collect();
    t.until(async || {
        join_all(used.iter().map(|name| t.release_of_granted(name))).await;
        t.locks().count_documents(doc! {}).await.unwrap() == 5 + 64
    })
    .await;
    let mut left = t
        .locks()
        .find(doc! { "_id": { "$lt": "z" } })
        .sort(doc! { "_id": 1 })
        .await
        .unwrap();
    let mut names = Vec::new();
    while let Some(one) = left.next().await {
        names.push(one.unwrap().get_str("_id").unwrap().to_owned());
    }
    assert_eq!(names, ["ahead", "foreign", "held", "shut", "young"]);
}
