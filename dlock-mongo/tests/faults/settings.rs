//! Deployments, clients, collections and rights.

use crate::{
    testbed::{SECOND, Testbed},
    warnings,
};
use dlock_conformance::testbed::{MongoServer, mongo::Deployment};
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, Released, Renewed, Wake, WakeUp},
};
use dlock_mongo::{MongoConfig, MongoDriver};
use futures_util::StreamExt;
use mongodb::{
    Client, Collection,
    bson::{Document, doc},
};
use std::sync::Arc;

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
async fn a_standalone_server_works_and_its_waiters_poll() {
    warnings::listen();
    let t = Testbed::on(Deployment::Standalone).await;
    assert_eq!(warnings::count(["a standalone server"]), 1);
    assert_eq!(t.driver.capabilities().wake, Wake::Poll);
    let mut wake_ups = t.driver.wake_ups();
    let held = [t.acquire("a", SECOND * 30), t.acquire("b", SECOND * 30)];
    for req in &held {
        t.granted(req).await;
    }
    let waiter = t.waits("a", 1).await;
    assert!(
        t.held(&waiter).await.poll_in.unwrap() > SECOND * 29,
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
    assert_eq!(wake_ups.next().await, None);
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
        .find_one(doc! { "command.comment": "dlock take" })
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
    assert!(include_str!("../../README.md").contains(MongoConfig::RIGHTS));
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "a".repeat(64)).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    let args = ["--auth", "--keyFile", key.to_str().unwrap()];
    let server = MongoServer::start_with(Deployment::ReplicaSet, &args).unwrap();
    let root = doc! {"createUser": "root", "pwd": "root", "roles": ["root"]};
    server.command("admin", root).unwrap();
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
    assert_eq!(t.driver.capabilities().wake, Wake::Notify);
    let mut wake_ups = t.driver.wake_ups();
    let held = [t.acquire("a", SECOND * 30), t.acquire("b", SECOND * 30)];
    for req in &held {
        t.granted(req).await;
    }
    t.waits("a", 1).await;
    t.renew(&[&held[0], &held[1], &t.acquire("c", SECOND)])
        .await;
    assert_eq!(t.driver.list("", None, 100).await.unwrap().found.len(), 2);
    t.driver.break_lock(&held[0].name, None).await.unwrap();
    assert_eq!(
        wake_ups.next().await,
        Some(WakeUp::Free("a".parse().unwrap()))
    );
    t.release(&held[1]).await;

    t.driver = Arc::new(MongoDriver::connect(&url("looker:secret")).await.unwrap());
    assert_eq!(
        t.driver.capabilities().wake,
        Wake::Poll,
        "no right to a change stream"
    );
    t.granted(&t.acquire("a", SECOND)).await;

    for who in ["locker:canary", "unknown:canary"] {
        let error = MongoDriver::connect(&url(who)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, RetryClass::Never, Effect::None),
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
