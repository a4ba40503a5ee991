//! The stored documents, and foreign documents in the collection.

use crate::testbed::{SECOND, Testbed};
use dlock_core::{
    Effect, ErrorKind, FencingToken, HoldId, HolderInfo,
    driver::{Acquired, DistributedLock, Lane, Release, Released, Renew, Renewed},
};
use dlock_mongo::MongoDriver;
use futures_util::StreamExt;
use mongodb::bson::{Bson, DateTime, Document, doc};
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread")]
async fn the_document_is_pinned_while_held_and_when_free() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a.$b", SECOND * 30);
    req.note = Arc::new(HolderInfo::new("$_id", 4711));
    let grant = t.granted(&req).await;
    let held = t.document("a.$b").await;
    let keys: Vec<_> = held.keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        ["_id", "dlock", "owner", "token", "holds", "since", "keep"]
    );
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
    assert_eq!(hold.get_str("id").unwrap(), req.hold.to_string());
    assert_eq!(hold.get_str("note").unwrap(), "4711 $_id");
    assert!(hold.get_datetime("end").is_ok() && held.get("keep") == Some(&Bson::Null));
    assert!(matches!(t.release(&req).await, Released::Freed));
    let free = t.document("a.$b").await;
    assert_eq!(free.keys().collect::<Vec<_>>(), keys);
    assert_eq!(free.get("owner"), Some(&Bson::Null));
    assert_eq!(free.get_i64("token"), held.get_i64("token"));
    assert!(free.get_array("holds").unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_short_way_in_and_out_leaves_the_same_record() {
    let t = Testbed::start().await;
    let mut last = 0;
    // The first request upserts, and the others find a free document. Requests other than the simplest need
    // the full command.
    for round in 0..4 {
        let mut req = t.acquire("a", SECOND * 30);
        req.note = Arc::new(HolderInfo::new("host", round));
        let grant = t.granted(&req).await;
        let held = t.document("a").await;
        let keys: Vec<_> = held.keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            ["_id", "dlock", "owner", "token", "holds", "since", "keep"]
        );
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
        assert_eq!(
            hold.keys().collect::<Vec<_>>(),
            ["id", "end", "note"],
            "{hold}"
        );
        assert_eq!(hold.get_str("id").unwrap(), req.hold.to_string());
        assert_eq!(
            hold.get_str("note").unwrap(),
            format!("{round} host").as_str()
        );
        let since = held.get_datetime("since").unwrap().timestamp_millis();
        let end = hold.get_datetime("end").unwrap().timestamp_millis();
        assert_eq!(end - since, 30_000);
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
        assert_eq!(free.keys().collect::<Vec<_>>(), keys);
        assert_eq!(
            (free.get("owner"), free.get("keep")),
            (Some(&Bson::Null), Some(&Bson::Null))
        );
        assert_eq!(free.get_i64("token"), Ok(last));
        assert!(free.get_array("holds").unwrap().is_empty());
        assert!(free.get_datetime("since").is_ok());
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
    kept.keep = Some(SECOND * 30);
    assert!(matches!(
        other.release(&kept).await.unwrap(),
        Released::Kept { .. }
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
        req.note = Arc::new(HolderInfo::new("$$ROOT.owner", 1));
        t.granted(&req).await;
        let by = t
            .held(&t.acquire(req.name.as_str(), SECOND))
            .await
            .by
            .unwrap();
        assert_eq!(
            (by.owner, by.note.host.as_str()),
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
        let req = t.acquire(name, SECOND);
        let entry = Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND));
        let batch = [
            entry.clone(),
            Renew::new("z".parse().unwrap(), req.owner, req.hold, Some(SECOND)),
        ];
        let errors = [
            t.driver.acquire(&req).await.map(drop).unwrap_err(),
            t.driver
                .release(&Release::new(req.name.clone(), req.owner, req.hold))
                .await
                .map(drop)
                .unwrap_err(),
            t.driver
                .break_lock(&req.name, None)
                .await
                .map(drop)
                .unwrap_err(),
            t.driver.inspect(&req.name).await.map(drop).unwrap_err(),
            t.driver
                .renew(Lane(0), &[entry], t.soon())
                .await
                .unwrap()
                .remove(0)
                .unwrap_err(),
            t.driver
                .renew(Lane(0), &batch, t.soon())
                .await
                .unwrap()
                .remove(0)
                .unwrap_err(),
        ];
        for error in errors {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Misuse, Effect::None),
                "{error:?}"
            );
            let field = theirs.keys().nth(1).unwrap();
            assert!(error.to_string().contains(&format!("{field}: ")), "{error}");
            assert!(!error.to_string().contains("batch-7"), "{error}");
        }
        assert_eq!(&t.document(name).await, theirs);
    }
    assert!(t.driver.list("", None, 100).await.unwrap().found.is_empty());
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
async fn what_nobody_used_for_a_day_is_purged_and_nothing_else() {
    let t = Testbed::start().await;
    let old = DateTime::from_millis(DateTime::now().timestamp_millis() - 25 * 3_600_000);
    let micros = old.timestamp_millis() * 1_000;
    let free = |id: &str| {
        doc! { "_id": id, "dlock": 1, "owner": Bson::Null, "token": micros, "holds": [], "since": old, "keep": Bson::Null }
    };
    let changed = |id: &str, change: Document| {
        let mut made = free(id);
        made.extend(change);
        made
    };
    let soon = DateTime::from_millis(DateTime::now().timestamp_millis() + 60_000);
    let hold = |end| doc! { "id": "0000000000000001", "end": end, "note": "1 h" };
    let documents = [
        free("old"),
        changed("lapsed", doc! { "owner": "x", "holds": [hold(old)] }),
        changed("held", doc! { "owner": "x", "holds": [hold(soon)] }),
        changed("shut", doc! { "keep": soon }),
        changed("ahead", doc! { "token": i64::MAX }),
        changed("young", doc! { "since": DateTime::now() }),
        doc! { "_id": "foreign", "since": old },
    ];
    t.locks().insert_many(documents).await.unwrap();
    t.release_of_granted("z").await;
    t.sleep(10_100).await;
    t.release_of_granted("z").await;
    t.until(async || t.locks().count_documents(doc! {}).await.unwrap() == 6)
        .await;
    let mut left = t
        .locks()
        .find(doc! {})
        .sort(doc! { "_id": 1 })
        .await
        .unwrap();
    let mut names = Vec::new();
    while let Some(one) = left.next().await {
        names.push(one.unwrap().get_str("_id").unwrap().to_owned());
    }
    assert_eq!(names, ["ahead", "foreign", "held", "shut", "young", "z"]);
}
