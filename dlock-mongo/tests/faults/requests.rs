//! Single requests: late, repeated, concurrent with others, or with a cancelled caller.

use crate::testbed::{SECOND, Testbed};
use dlock_core::{
    Clock, Effect, ErrorKind, Owner, RetryClass,
    driver::{Acquire, Acquired, DistributedLock, Lane, Renew, Renewed},
};
use dlock_mongo::MongoDriver;
use futures_util::future::join_all;
use mongodb::{
    Client,
    bson::doc,
    event::{EventHandler, command::CommandEvent},
    options::ClientOptions,
};
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

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
    assert!(matches!(answers[1], Some(Renewed::Until { valid_for }) if valid_for > SECOND * 20));
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
    // A hold of the batch that is listed under another name of the batch is not renewed.
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
async fn a_batch_prolongs_the_holds_it_names_and_no_others() {
    let t = Testbed::start().await;
    let short = t.acquire("a", SECOND / 5);
    let [mut beside, mut other] = ["a", "b"].map(|name| t.acquire(name, SECOND * 30));
    (beside.owner, other.owner) = (short.owner, short.owner);
    // The short lease comes last: however long the requests take, the other hold of its document lives.
    for req in [&beside, &short, &other] {
        t.granted(req).await;
    }
    // One of the document's two holds has expired.
    let look = [Renew::new(
        short.name.clone(),
        short.owner,
        short.hold,
        None,
    )];
    t.until(async || {
        let seen = t.driver.renew(Lane(0), &look, t.soon()).await.unwrap();
        matches!(seen[0], Ok(Renewed::NotHeld))
    })
    .await;
    let before = [t.document("a").await, t.document("b").await];
    assert_eq!(before[0].get_array("holds").unwrap().len(), 2);
    let stray = t.acquire("c", SECOND);
    let stranger = stray.owner;
    let named = |name: &Acquire, owner: Owner, hold: &Acquire| {
        Renew::new(name.name.clone(), owner, hold.hold, Some(SECOND * 60))
    };
    let not_held = [
        // Expired, and without a document; each with the other's hold; with another owner.
        [
            named(&short, short.owner, &short),
            named(&stray, stranger, &short),
        ],
        [
            named(&beside, short.owner, &other),
            named(&other, short.owner, &beside),
        ],
        [
            named(&beside, stranger, &beside),
            named(&other, stranger, &other),
        ],
    ];
    for batch in not_held {
        for answer in t.driver.renew(Lane(0), &batch, t.soon()).await.unwrap() {
            assert_eq!(answer.unwrap(), Renewed::NotHeld, "{batch:?}");
        }
        assert_eq!(
            [t.document("a").await, t.document("b").await],
            before,
            "{batch:?}"
        );
    }
    let batch = [
        named(&short, short.owner, &short),
        named(&other, other.owner, &other),
    ];
    let answers = t.driver.renew(Lane(0), &batch, t.soon()).await.unwrap();
    assert!(matches!(answers[0], Ok(Renewed::NotHeld)), "{answers:?}");
    assert!(
        matches!(answers[1], Ok(Renewed::Until { valid_for }) if valid_for > SECOND * 50),
        "{answers:?}"
    );
    assert_eq!(t.document("a").await, before[0]);
    // Each hold lasts as long as its entry asks.
    let mut batch = [
        named(&other, other.owner, &other),
        named(&beside, beside.owner, &beside),
    ];
    batch[1].lease = Some(SECOND * 90);
    for answer in t.driver.renew(Lane(0), &batch, t.soon()).await.unwrap() {
        assert!(matches!(answer, Ok(Renewed::Until { .. })), "{answer:?}");
    }
    let looks = batch.map(|entry| Renew::new(entry.name, entry.owner, entry.hold, None));
    let seen = t.driver.renew(Lane(0), &looks, t.soon()).await.unwrap();
    for (seen, lease) in seen.into_iter().zip([60, 90]) {
        let Ok(Renewed::Until { valid_for }) = seen else {
            panic!("{seen:?}")
        };
        assert!(
            valid_for > SECOND * (lease - 10) && valid_for <= SECOND * lease,
            "{valid_for:?}"
        );
    }
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
    for taken in join_all(taken).await {
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
    let held = [t.acquire("a", SECOND * 20), t.acquire("b", SECOND * 20)];
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
            (ErrorKind::Unavailable, RetryClass::Now, Effect::None),
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
        assert!(rest <= SECOND * 20, "{rest:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_first_acquires_of_a_name_have_one_winner_and_no_error() {
    let t = Testbed::start().await;
    for round in 0..50 {
        let name = format!("fresh-{round}");
        let all: Vec<_> = (0..8).map(|_| t.acquire(&name, SECOND * 30)).collect();
        let answers = join_all(all.iter().map(|req| t.driver.acquire(req))).await;
        let won = answers
            .into_iter()
            .filter(|answer| matches!(answer.as_ref().unwrap(), Acquired::Granted(_)));
        assert_eq!(won.count(), 1);
    }
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
    for answer in join_all(all.iter().map(|req| t.driver.acquire(req))).await {
        assert!(matches!(answer.unwrap(), Acquired::Granted(_)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_polls_of_a_slow_server_do_not_hold_up_a_renewal() {
    let mut t = Testbed::start().await;
    let url = format!("{}&maxPoolSize=8", t.server.url());
    t.driver = Arc::new(MongoDriver::connect(&url).await.unwrap());
    let held = [t.acquire("a", SECOND * 300), t.acquire("b", SECOND * 300)];
    for req in &held {
        t.granted(req).await;
    }
    let slow = doc! { "blockConnection": true, "blockTimeMS": 50 };
    t.fail_times("findAndModify", 1_000_000, slow).await;
    let answered = Arc::new(AtomicUsize::new(0));
    let looks: Vec<_> = (0..1_000)
        .map(|at| {
            let mut req = t.asks("a", at + 1);
            req.give_up = t.soon() + SECOND * 60;
            let (driver, answered) = (Arc::clone(&t.driver), Arc::clone(&answered));
            tokio::spawn(async move {
                let answer = driver.acquire(&req).await;
                answered.fetch_add(1, Ordering::Relaxed);
                answer
            })
        })
        .collect();
    let looked = || answered.load(Ordering::Relaxed);
    t.until(async || looked() > 0).await;
    for round in 1..=3 {
        let before = looked();
        let answers = t.renew(&[&held[0], &held[1]]).await;
        let is_renewed = |answer: &_| matches!(answer, Some(Renewed::Until { .. }));
        assert!(answers.iter().all(is_renewed), "{answers:?}");
        let beside = looked() - before;
        assert!(beside < 500, "{beside} looks came before renewal {round}");
    }
    // A request that was not sent in time is not sent later.
    let mut late = t.asks("a", 2_000);
    late.give_up = Clock::boot().now();
    let (late, ()) = tokio::join!(t.driver.acquire(&late), t.heal());
    let error = late.map(drop).unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error:?}"
    );
    for look in looks {
        assert!(matches!(look.await.unwrap().unwrap(), Acquired::Held(_)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_has_a_time_limit_and_every_write_a_majority() {
    let mut t = Testbed::start().await;
    // The settings are also read of a collection that exists.
    t.granted(&t.acquire("z", SECOND * 30)).await;
    // The commands as the client sends them. The server's own profile shows the statements of an update
    // without the options of its command.
    let sent = Arc::new(Mutex::new(Vec::new()));
    let mut options = ClientOptions::parse(t.server.url()).await.unwrap();
    let seen = Arc::clone(&sent);
    options.command_event_handler = Some(EventHandler::callback(move |event| {
        if let CommandEvent::Started(started) = event {
            seen.lock().unwrap().push(started.command);
        }
    }));
    let client = Client::with_options(options).unwrap();
    let config = t.server.url().parse().unwrap();
    t.driver = Arc::new(MongoDriver::from_client(client, config).await.unwrap());
    let held = [t.acquire("a", SECOND * 30), t.acquire("b", SECOND * 30)];
    for _ in 0..2 {
        for req in &held {
            t.granted(req).await; // a write of the record, then the short command
        }
        let mut looks = t.waits("a", 1).await;
        looks.retry = true;
        t.held(&looks).await;
        t.renew(&[&held[0]]).await;
        t.renew(&[&held[0], &held[1]]).await;
        t.renew(&[&held[0], &held[1], &t.acquire("c", SECOND)])
            .await;
        t.driver.inspect(&held[0].name).await.unwrap();
        t.driver.list("", None, 10).await.unwrap();
        t.release(&held[0]).await;
        t.release(&held[0]).await;
        t.driver.break_lock(&held[1].name, None).await.unwrap();
    }
    // Many requests at once, for new and for existing names. If the machine pauses, all go alone for two seconds.
    for round in 0..4 {
        let crowd: Vec<_> = (0..40)
            .map(|at| t.acquire(&format!("n{at}"), SECOND * 30))
            .collect();
        let taken = crowd.iter().map(|req| t.driver.acquire(req));
        for taken in join_all(taken).await {
            assert!(matches!(taken.unwrap(), Acquired::Granted(_)));
        }
        join_all(crowd.iter().map(|req| t.release(req))).await;
        let went_together = |what: &str| {
            let sent = sent.lock().unwrap();
            sent.iter().any(|command| {
                command.contains_key("update") && command.get_str("comment") == Ok(what)
            })
        };
        if round > 0 {
            if went_together("dlock take") && went_together("dlock release") {
                break;
            }
            t.sleep(2_000).await;
        }
    }
    let sent = std::mem::take(&mut *sent.lock().unwrap());
    let mut seen = BTreeSet::new();
    for command in &sent {
        let name = command.keys().next().unwrap();
        // A change stream waits for the next event, and the native client ends it.
        if ["aggregate", "getMore", "killCursors"].contains(&&**name) {
            continue;
        }
        let what = command.get_str("comment").unwrap_or_default();
        seen.insert(format!("{name} {what}").trim().to_owned());
        assert_eq!(
            command.get_i64("maxTimeMS").map_err(drop),
            Ok(1_000),
            "{command}"
        );
        let concern = command.get_document("writeConcern").ok().cloned();
        let majority = doc! { "w": "majority", "j": true, "wtimeout": 1_000_i64 };
        let wanted = match &**name {
            // Free documents need no majority: the command that takes one confirms it.
            "insert" => Some(doc! { "w": 1 }),
            "findAndModify" | "update" | "delete" => Some(majority),
            _ => None,
        };
        assert_eq!(concern, wanted, "{command}");
    }
    // A sweep comes about by chance.
    seen.remove("find dlock purge");
    seen.remove("delete dlock purge");
    let all = [
        "find dlock list",
        "find dlock look",
        "findAndModify dlock release",
        "findAndModify dlock take",
        "hello dlock hello",
        "insert dlock make",
        "listCollections",
        "listIndexes",
        "replSetGetConfig dlock config",
        "update dlock acquire",
        "update dlock release",
        "update dlock renew",
        "update dlock swap",
        "update dlock take",
    ];
    assert!(seen.iter().eq(all), "{seen:?}");
}
