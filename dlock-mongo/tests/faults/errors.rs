//! Errors that the server reports, and outcomes that it leaves unknown.

use crate::testbed::{SECOND, Testbed};
use dlock_conformance::testbed::{MongoServer, mongo::Deployment};
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{DistributedLock, Lane, Release, Released, Renew},
};
use futures_util::future::join_all;
use mongodb::bson::doc;

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_was_executed_and_not_confirmed_is_unknown_and_found_by_the_repeat() {
    let t = Testbed::start().await;
    for (at, code) in [64, 50, 91, 189, 11600, 11602, 10107, 79]
        .into_iter()
        .enumerate()
    {
        // The first acquire of a name, by a write of its record; and one by the short command.
        let name = format!("n{at}");
        let fresh = t.acquire(&name, SECOND * 30);
        let doubt = doc! { "writeConcernError": { "code": code, "errmsg": "later" } };
        t.fail("update", doubt).await;
        let error = t.driver.acquire(&fresh).await.map(drop).unwrap_err();
        assert_eq!(error.effect(), Effect::Unknown, "{code}: {error:?}");
        assert_eq!(t.granted(&fresh).await.holds.get(), 1, "{code}");
        t.release(&fresh).await;
        let req = t.acquire(&name, SECOND * 30);
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
    use RetryClass::{Later, Never, Now};
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
    // A label says that a retry may work soon, whatever the code is.
    t.fail(
        "findAndModify",
        doc! { "errorCode": 13, "errorLabels": ["TransientTransactionError"] },
    )
    .await;
    let req = t.acquire("a", SECOND);
    let error = t.driver.acquire(&req).await.map(drop).unwrap_err();
    assert_eq!((error.retry(), error.effect()), (Later, None), "{error:?}");
    assert!(t.locks().find_one(doc! {}).await.unwrap().is_none());
    // Two clients that create a document at the same time are not reported to the caller.
    let met = doc! { "keyPattern": { "_id": 1 }, "keyValue": { "_id": "a" } };
    t.fail("insert", doc! { "errorCode": 11000, "errorExtraInfo": met })
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
async fn a_request_without_a_connection_when_all_are_given_up_may_be_repeated_at_once() {
    let server = MongoServer::start(Deployment::ReplicaSet).unwrap();
    let url = format!("{}&maxPoolSize=4", server.url());
    let t = Testbed::around(server, &url).await;
    let held = t.acquire("a", SECOND * 30);
    t.granted(&held).await;
    let slow = doc! { "blockConnection": true, "blockTimeMS": 800, "closeConnection": true };
    t.fail_times("update", 4, slow).await;
    let lease = Some(SECOND * 30);
    let renew = [Renew::new(held.name.clone(), held.owner, held.hold, lease)];
    let renew = || t.driver.renew(Lane(0), &renew, t.soon());
    // More than there are connections: the others wait for one when the first is closed.
    let answers = join_all((0..8).map(|_| renew())).await;
    let mut errors = answers.into_iter().filter_map(Result::err);
    let error = errors
        .find(|error| error.to_string().contains("connections were given up"))
        .expect("some waited");
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Now, Effect::Unknown),
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
