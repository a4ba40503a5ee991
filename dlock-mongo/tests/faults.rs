//! What only a MongoDB server can do or suffer: its documents, its settings, its errors. Elections are in `failover.rs`.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::{
    MongoServer,
    mongo::{Deployment, Value, document},
};
use dlock_core::{
    Acquire, Acquired, Clock, DistributedLock, DriverError, Effect, ErrorKind, FencingToken, Grant,
    Held, Hint, HoldId, Lane, Lease, LockName, Note, Owner, Release, Released, Renew, Renewed,
    Retry, Ticket, Wake,
};
use dlock_mongo::{MongoConfig, MongoDriver};
use futures_util::StreamExt;
use mongodb::{
    Client, Collection,
    bson::{Bson, DateTime, Document, doc},
};
use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn the_document_is_pinned_while_held_and_when_free() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a.$b", SECOND * 30);
    req.note = Arc::new(Note::new("$_id", 4711));
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
        grant.token.unwrap().0
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
        req.note = Arc::new(Note::new("$$ROOT.owner", 1));
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
        doc! { "_id": "a", "lockedBy": "somebody", "until": DateTime::now() },
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
            assert!(!error.to_string().contains("somebody"), "{error}");
        }
        assert_eq!(&t.document(name).await, theirs);
    }
    assert!(t.driver.list("", None, 100).await.unwrap().found.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lapsed_hold_never_counts_as_matched() {
    let t = Testbed::start().await;
    let (short, long, gone) = (
        t.acquire("a", SECOND / 5),
        t.acquire("b", SECOND * 30),
        t.acquire("c", SECOND),
    );
    t.granted(&short).await;
    t.granted(&long).await;
    t.sleep(230).await;
    let before = t.document("a").await;
    let answers = t.renew(&[&short, &long, &gone]).await;
    assert_eq!(answers[0], Some(Renewed::NotHeld));
    assert!(matches!(answers[1], Some(Renewed::Until { valid_for }) if valid_for > SECOND * 29));
    assert_eq!(answers[2], Some(Renewed::NotHeld));
    assert_eq!(t.document("a").await, before);
    assert!(
        t.locks()
            .find_one(doc! { "_id": "c" })
            .await
            .unwrap()
            .is_none(),
        "renewing creates nothing"
    );
    // A hold of the batch that stands under another of its names is not that name's.
    let crossed = [
        Renew::new(long.name.clone(), short.owner, short.hold, Some(SECOND)),
        Renew::new(short.name.clone(), long.owner, long.hold, Some(SECOND)),
    ];
    let answers = t.driver.renew(Lane(0), &crossed, t.soon()).await.unwrap();
    assert!(
        answers
            .iter()
            .all(|answer| matches!(answer, Ok(Renewed::NotHeld)))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_renewals_answer_in_order() {
    let t = Testbed::start().await;
    let held: Vec<_> = (0..1_000)
        .map(|at| t.acquire(&format!("n{at}"), SECOND * 20))
        .collect();
    let taken: Vec<_> = held
        .iter()
        .step_by(2)
        .map(|req| t.driver.acquire(req))
        .collect();
    for taken in futures_util::future::join_all(taken).await {
        assert!(matches!(taken.unwrap(), Acquired::Granted(_)));
    }
    let answers = t.renew(&held.iter().collect::<Vec<_>>()).await;
    assert_eq!(answers.len(), 1_000);
    for (at, answer) in answers.into_iter().enumerate() {
        assert_eq!(
            matches!(answer, Some(Renewed::Until { .. })),
            at % 2 == 0,
            "{at}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_after_its_time_takes_nothing() {
    let t = Testbed::start().await;
    let late = Clock::boot().now() - SECOND / 5;
    let held = [t.acquire("a", SECOND * 2), t.acquire("b", SECOND * 2)];
    for req in &held {
        t.granted(req).await;
    }
    let mut req = t.acquire("c", SECOND);
    req.give_up = late;
    let batch: Vec<_> = held
        .iter()
        .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 30)))
        .collect();
    let errors = [
        t.driver.acquire(&req).await.map(drop).unwrap_err(),
        t.driver
            .renew(Lane(0), &batch[..1], late)
            .await
            .map(drop)
            .unwrap_err(),
        t.driver
            .renew(Lane(0), &batch, late)
            .await
            .map(drop)
            .unwrap_err(),
    ];
    for error in errors {
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, Retry::Now, Effect::None),
            "{error:?}"
        );
    }
    assert!(
        t.driver
            .inspect(&req.name)
            .await
            .unwrap()
            .holders
            .is_empty()
    );
    for req in &held {
        let rest = t.driver.inspect(&req.name).await.unwrap().holders[0]
            .rest
            .unwrap();
        assert!(rest <= SECOND * 2, "{rest:?}");
    }
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
    assert_eq!(token, Some(FencingToken(ahead.cast_unsigned() + 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_first_acquires_of_a_name_have_one_winner_and_no_error() {
    let t = Testbed::start().await;
    for round in 0..50 {
        let name = format!("fresh-{round}");
        let all: Vec<_> = (0..8).map(|_| t.acquire(&name, SECOND * 30)).collect();
        let answers =
            futures_util::future::join_all(all.iter().map(|req| t.driver.acquire(req))).await;
        let won = answers
            .into_iter()
            .filter(|answer| matches!(answer.as_ref().unwrap(), Acquired::Granted(_)));
        assert_eq!(won.count(), 1);
    }
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

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_would_weaken_a_lock_is_refused_with_the_reason() {
    let t = Testbed::start().await;
    let unfit = [
        (
            doc! { "create": "x1", "capped": true, "size": 4096 },
            "capped",
        ),
        (
            doc! { "create": "x2", "collation": { "locale": "en", "strength": 2 } },
            "collation",
        ),
        (
            doc! { "create": "x3", "viewOn": "locks", "pipeline": [] },
            "view",
        ),
        (
            doc! { "createIndexes": "x4", "indexes": [{ "key": { "since": 1 }, "name": "t", "expireAfterSeconds": 60 }] },
            "TTL",
        ),
    ];
    for (at, (command, why)) in unfit.into_iter().enumerate() {
        t.database().run_command(command).await.unwrap();
        let url = format!("{}&dlock.collection=x{}", t.server.url(), at + 1);
        let error = MongoDriver::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error:?}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_was_executed_and_not_confirmed_is_unknown_and_found_by_the_repeat() {
    let t = Testbed::start().await;
    for (at, code) in [64, 50, 91, 189, 11600, 11602, 10107, 79]
        .into_iter()
        .enumerate()
    {
        let req = t.acquire(&format!("n{at}"), SECOND * 30);
        t.fail(
            "findAndModify",
            doc! { "writeConcernError": { "code": code, "errmsg": "later" } },
        )
        .await;
        let error = t.driver.acquire(&req).await.map(drop).unwrap_err();
        assert_eq!(error.effect(), Effect::Unknown, "{code}: {error:?}");
        let grant = t.granted(&req).await;
        assert_eq!(grant.holds.get(), 1, "{code}");
        t.fail(
            "findAndModify",
            doc! { "writeConcernError": { "code": code, "errmsg": "later" } },
        )
        .await;
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        assert_eq!(
            t.driver
                .release(&release)
                .await
                .map(drop)
                .unwrap_err()
                .effect(),
            Effect::Unknown
        );
        assert!(matches!(
            t.driver.release(&release).await.unwrap(),
            Released::NotHeld { by: None }
        ));
    }
    let held = [t.acquire("x", SECOND * 5), t.acquire("y", SECOND * 5)];
    for req in &held {
        t.granted(req).await;
    }
    t.fail(
        "update",
        doc! { "writeConcernError": { "code": 64, "errmsg": "later" } },
    )
    .await;
    let batch: Vec<_> = held
        .iter()
        .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 9)))
        .collect();
    let error = t
        .driver
        .renew(Lane(0), &batch, t.soon())
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!(error.effect(), Effect::Unknown, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_server_has_the_class_that_was_meant_and_did_nothing() {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use Retry::{Later, Never, Now};
    let t = Testbed::start().await;
    let table = [
        (6, Unavailable, Later, Unknown),
        (7, Unavailable, Later, Unknown),
        (11, Unavailable, Never, None),
        (13, Unavailable, Never, None),
        (18, Unavailable, Never, None),
        (26, Unavailable, Later, None),
        (43, Unavailable, Now, None),
        (50, Unavailable, Now, Unknown),
        (59, Unsupported, Never, None),
        (64, Unavailable, Now, Unknown),
        (79, Misuse, Never, Unknown),
        (89, Unavailable, Later, Unknown),
        (91, Unavailable, Later, Unknown),
        (112, Unavailable, Now, None),
        (189, Unavailable, Later, Unknown),
        (262, Unavailable, Later, Unknown),
        (280, Unavailable, Now, None),
        (286, Unavailable, Now, None),
        (10107, Unavailable, Later, None),
        (11600, Unavailable, Later, Unknown),
        (11602, Unavailable, Later, Unknown),
        (13435, Unavailable, Later, None),
        (13436, Unavailable, Later, None),
        (4711, Unavailable, Later, Unknown),
    ];
    for (code, kind, retry, effect) in table {
        t.fail("findAndModify", doc! { "errorCode": code }).await;
        let error = t
            .driver
            .acquire(&t.acquire("a", SECOND))
            .await
            .map(drop)
            .unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (kind, retry, effect),
            "{code}: {error:?}"
        );
    }
    t.fail(
        "findAndModify",
        doc! { "errorCode": 11600, "errorLabels": ["NoWritesPerformed", "RetryableWriteError"] },
    )
    .await;
    let error = t
        .driver
        .acquire(&t.acquire("a", SECOND))
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!((error.retry(), error.effect()), (Later, None), "{error:?}");
    assert!(t.locks().find_one(doc! {}).await.unwrap().is_none());
    // A meeting of two upserts is not shown to anybody.
    let met = doc! { "keyPattern": { "_id": 1 }, "keyValue": { "_id": "a" } };
    t.fail(
        "findAndModify",
        doc! { "errorCode": 11000, "errorExtraInfo": met },
    )
    .await;
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_closed_before_the_answer_leaves_the_outcome_open() {
    let t = Testbed::start().await;
    t.fail("findAndModify", doc! { "closeConnection": true })
        .await;
    let req = t.acquire("a", SECOND * 30);
    let error = t.driver.acquire(&req).await.map(drop).unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::Unknown),
        "{error:?}"
    );
    assert_eq!(t.granted(&req).await.holds.get(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_leaves_the_client_whole() {
    let t = Testbed::start().await;
    t.fail_times(
        "findAndModify",
        200,
        doc! { "blockConnection": true, "blockTimeMS": 30 },
    )
    .await;
    for at in 0..200 {
        let req = t.acquire(&format!("n{at}"), SECOND * 30);
        let driver = Arc::clone(&t.driver);
        let call = tokio::spawn(async move { driver.acquire(&req).await.map(drop) });
        t.sleep(at % 3).await;
        call.abort();
    }
    t.heal().await;
    let all: Vec<_> = (0..200)
        .map(|at| t.acquire(&format!("m{at}"), SECOND * 30))
        .collect();
    for answer in futures_util::future::join_all(all.iter().map(|req| t.driver.acquire(req))).await
    {
        assert!(matches!(answer.unwrap(), Acquired::Granted(_)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_a_release_and_by_a_break_and_not_by_a_renewal() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    assert!(t.driver.hints().next().await.is_none(), "taken once");
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.waits("a", 1).await;
    let free = Hint::Free("a".parse().unwrap());
    assert_eq!(hints.next().await, Some(free.clone()), "heard from now on");
    t.renew(&[&holder]).await;
    t.granted(&t.acquire("elsewhere", SECOND)).await;
    let quiet = tokio::time::timeout(SECOND / 3, hints.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    t.release(&holder).await;
    assert_eq!(hints.next().await, Some(free.clone()));
    t.granted(&waiter).await;
    t.waits("a", 2).await;
    t.driver.break_lock(&waiter.name, None).await.unwrap();
    assert_eq!(
        hints.next().await,
        Some(free),
        "the name was heard of still"
    );
    t.driver.close().await;
    assert_eq!(hints.next().await, None);
    let error = t.driver.acquire(&waiter).await.map(drop).unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::ShuttingDown, Effect::None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_look_again_when_the_change_stream_was_lost() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    t.waits("a", 1).await;
    hints.next().await.unwrap();
    for lost in [286, 280] {
        t.fail("getMore", doc! { "errorCode": lost }).await;
        assert_eq!(hints.next().await, Some(Hint::LookAgain), "{lost}");
    }
    t.release(&holder).await;
    assert_eq!(hints.next().await, Some(Hint::Free("a".parse().unwrap())));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_no_stream_can_be_opened_waiters_look_often() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    t.granted(&t.acquire("a", SECOND * 30)).await;
    t.fail_times("aggregate", 1_000, doc! { "errorCode": 13 })
        .await;
    t.waits("a", 1).await;
    let looks = async || t.held(&t.asks("a", 1)).await.look_in.unwrap();
    t.until(async || looks().await <= SECOND / 10).await;
    t.heal().await;
    assert_eq!(hints.next().await, Some(Hint::LookAgain));
    assert_eq!(looks().await, SECOND * 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standalone_server_works_and_its_waiters_look() {
    let t = Testbed::on(Deployment::Standalone).await;
    assert_eq!(t.driver.capabilities().wake, Wake::Poll);
    let mut hints = t.driver.hints();
    let held = [t.acquire("a", SECOND * 30), t.acquire("b", SECOND * 30)];
    for req in &held {
        t.granted(req).await;
    }
    let waiter = t.waits("a", 1).await;
    assert!(
        t.held(&waiter).await.look_in.unwrap() > SECOND * 29,
        "the core's own pace"
    );
    let missing = t.acquire("c", SECOND);
    let answers = t.renew(&[&held[0], &missing, &held[1]]).await;
    assert!(matches!(
        answers[..],
        [
            Some(Renewed::Until { .. }),
            Some(Renewed::NotHeld),
            Some(Renewed::Until { .. })
        ]
    ));
    assert_eq!(t.driver.list("", None, 100).await.unwrap().found.len(), 2);
    assert!(matches!(t.release(&held[0]).await, Released::Freed));
    t.granted(&waiter).await;
    t.driver.close().await;
    assert_eq!(hints.next().await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_applications_own_client_is_enough_and_its_weak_concerns_do_not_count() {
    let t = Testbed::start().await;
    let client = Client::with_uri_str(format!("{}&w=1&readPreference=secondary", t.server.url()))
        .await
        .unwrap();
    let config = MongoConfig::default().with_database("app").unwrap();
    let driver = MongoDriver::from_client(client.clone(), config)
        .await
        .unwrap();
    let asked = doc! { "configureFailPoint": "failCommand", "mode": "off" };
    client.database("admin").run_command(asked).await.unwrap();
    client
        .database("admin")
        .run_command(doc! { "profile": -1 })
        .await
        .unwrap();
    client
        .database("app")
        .run_command(doc! { "profile": 2 })
        .await
        .unwrap();
    assert!(matches!(
        driver.acquire(&t.acquire("a", SECOND)).await.unwrap(),
        Acquired::Granted(_)
    ));
    let profiled: Collection<Document> = client.database("app").collection("system.profile");
    let seen = profiled
        .find_one(doc! { "command.comment": "dlock acquire" })
        .await
        .unwrap()
        .unwrap();
    let concern = seen
        .get_document("command")
        .unwrap()
        .get_document("writeConcern")
        .unwrap();
    assert_eq!(
        (
            concern.get_str("w").unwrap(),
            concern.get_bool("j").unwrap()
        ),
        ("majority", true)
    );
    driver.close().await;
    client
        .database("app")
        .run_command(doc! { "ping": 1 })
        .await
        .unwrap();
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_readme_are_enough_and_no_secret_is_shown() {
    assert!(include_str!("../README.md").contains(MongoConfig::RIGHTS));
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "a".repeat(64)).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    let args = ["--auth", "--keyFile", key.to_str().unwrap()];
    let server = MongoServer::start_with(Deployment::ReplicaSet, &args).unwrap();
    let root = [
        ("createUser", "root".into()),
        ("pwd", "root".into()),
        ("roles", Value::Array(vec!["root".into()])),
    ];
    server.command("admin", document(root)).unwrap();
    let bare_url = server.url();
    let url = |who: &str| bare_url.replace("mongodb://", &format!("mongodb://{who}@"));
    let admin = Client::with_uri_str(url("root:root"))
        .await
        .unwrap()
        .database("admin");
    let privileges: Vec<Document> = MongoConfig::RIGHTS
        .split("resource:")
        .skip(1)
        .map(|privilege| {
            let quoted: Vec<_> = privilege.split('"').skip(1).step_by(2).collect();
            let of_both = |at: usize| quoted[at].to_owned();
            let actions = privilege
                .split("actions:")
                .nth(1)
                .unwrap()
                .split(']')
                .next()
                .unwrap();
            let actions: Vec<_> = actions.split('"').skip(1).step_by(2).collect();
            doc! { "resource": { "db": of_both(0), "collection": of_both(1) }, "actions": actions }
        })
        .collect();
    assert_eq!(privileges.len(), 2);
    admin
        .run_command(doc! { "createRole": "dlock", "privileges": &privileges, "roles": [] })
        .await
        .unwrap();
    admin
        .run_command(doc! { "createUser": "locker", "pwd": "secret", "roles": ["dlock"] })
        .await
        .unwrap();
    let bare = doc! { "resource": { "db": "dlock", "collection": "locks" }, "actions": ["find", "insert", "update"] };
    admin
        .run_command(doc! { "createRole": "bare", "privileges": [bare], "roles": [] })
        .await
        .unwrap();
    admin
        .run_command(doc! { "createUser": "looker", "pwd": "secret", "roles": ["bare"] })
        .await
        .unwrap();

    let mut t = Testbed::around(server, &url("locker:secret")).await;
    assert!(!format!("{:?}", t.driver).contains("secret"));
    assert_eq!(t.driver.capabilities().wake, Wake::Hints);
    let mut hints = t.driver.hints();
    let held = [t.acquire("a", SECOND * 30), t.acquire("b", SECOND * 30)];
    for req in &held {
        t.granted(req).await;
    }
    t.waits("a", 1).await;
    hints.next().await.unwrap();
    t.renew(&[&held[0], &held[1], &t.acquire("c", SECOND)])
        .await;
    assert_eq!(t.driver.list("", None, 100).await.unwrap().found.len(), 2);
    t.driver.break_lock(&held[0].name, None).await.unwrap();
    assert_eq!(hints.next().await, Some(Hint::Free("a".parse().unwrap())));
    t.release(&held[1]).await;

    t.driver = Arc::new(MongoDriver::connect(&url("looker:secret")).await.unwrap());
    assert_eq!(
        t.driver.capabilities().wake,
        Wake::Poll,
        "no right to a change stream"
    );
    t.granted(&t.acquire("a", SECOND)).await;

    for who in ["locker:canary", "nobody:canary"] {
        let error = MongoDriver::connect(&url(who)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, Retry::Never, Effect::None),
            "{error:?}"
        );
        assert!(
            !format!("{error:?} {error}").contains("canary"),
            "{error:?}"
        );
    }
    let gone = "mongodb://u:canary@127.0.0.1:1/?serverSelectionTimeoutMS=200&directConnection=true";
    let error = MongoDriver::connect(gone).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error:?}"
    );
    assert!(
        !format!("{error:?} {error}").contains("canary"),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_quotes_a_record_shows_no_owner() {
    let t = Testbed::start().await;
    let validator = doc! { "collMod": "locks", "validator": { "owner": { "$type": "int" } } };
    t.release_of_granted("b").await;
    t.database().run_command(validator).await.unwrap();
    let req = t.acquire("a", SECOND);
    let error = t.driver.acquire(&req).await.map(drop).unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Misuse, Effect::None),
        "{error:?}"
    );
    let secret = req.owner.expose().to_string();
    assert!(!format!("{error:?} {error}").contains(&secret), "{error:?}");
}

/// A server and a driver of its own.
struct Testbed {
    driver: Arc<MongoDriver>,
    raw: Client,
    server: MongoServer,
    drawn: AtomicU64,
}

impl Testbed {
    async fn start() -> Self {
        Self::on(Deployment::ReplicaSet).await
    }

    async fn on(deployment: Deployment) -> Self {
        let server = MongoServer::start(deployment).unwrap();
        let url = server.url();
        Self::around(server, &url).await
    }

    async fn around(server: MongoServer, url: &str) -> Self {
        Self {
            driver: Arc::new(MongoDriver::connect(url).await.unwrap()),
            raw: Client::with_uri_str(url).await.unwrap(),
            server,
            drawn: AtomicU64::new(1),
        }
    }

    fn database(&self) -> mongodb::Database {
        self.raw.database("dlock")
    }

    fn locks(&self) -> Collection<Document> {
        self.database().collection("locks")
    }

    async fn document(&self, name: &str) -> Document {
        self.locks()
            .find_one(doc! { "_id": name })
            .await
            .unwrap()
            .unwrap()
    }

    /// The next command of the driver with that name fails as `data` says.
    async fn fail(&self, command: &str, data: Document) {
        self.fail_times(command, 1, data).await;
    }

    async fn fail_times(&self, command: &str, times: i32, mut data: Document) {
        data.insert("failCommands", vec![command]);
        data.insert("appName", "dlock");
        let point =
            doc! { "configureFailPoint": "failCommand", "mode": { "times": times }, "data": data };
        self.raw.database("admin").run_command(point).await.unwrap();
    }

    async fn heal(&self) {
        let point = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        self.raw.database("admin").run_command(point).await.unwrap();
    }

    fn soon(&self) -> dlock_core::Instant {
        Clock::boot().now() + SECOND * 5
    }

    fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    fn acquire(&self, name: &str, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        let hold = HoldId::from_bits(self.draw());
        let name: LockName = name.parse().unwrap();
        Acquire::new(name, owner, hold, Lease::fixed(lease).unwrap(), self.soon())
    }

    fn asks(&self, name: &str, ticket: u64) -> Acquire {
        let mut req = self.acquire(name, SECOND * 30);
        req.line = Some(Ticket(NonZeroU64::new(ticket).unwrap()));
        req
    }

    /// Somebody who was refused and waits.
    async fn waits(&self, name: &str, ticket: u64) -> Acquire {
        let req = self.asks(name, ticket);
        self.held(&req).await;
        req
    }

    async fn granted(&self, req: &Acquire) -> Grant {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    async fn held(&self, req: &Acquire) -> Held {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    async fn release(&self, req: &Acquire) -> Released {
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        self.driver.release(&release).await.unwrap()
    }

    async fn release_of_granted(&self, name: &str) {
        let req = self.acquire(name, SECOND * 30);
        self.granted(&req).await;
        self.release(&req).await;
    }

    async fn renew(&self, held: &[&Acquire]) -> Vec<Option<Renewed>> {
        let entries: Vec<_> = held
            .iter()
            .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 5)))
            .collect();
        let answers: Vec<Result<Renewed, DriverError>> = self
            .driver
            .renew(Lane(0), &entries, self.soon())
            .await
            .unwrap();
        answers.into_iter().map(Result::ok).collect()
    }

    #[expect(clippy::future_not_send, reason = "awaited where it is made")]
    async fn until(&self, condition: impl AsyncFn() -> bool) {
        let waited = async {
            while !condition().await {
                self.sleep(5).await;
            }
        };
        tokio::time::timeout(SECOND * 20, waited)
            .await
            .expect("it did not come about within 20 s");
    }

    /// For leases to run out on the server, whose clock nobody can pause.
    async fn sleep(&self, millis: u64) {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
}
