//! What the driver answers for each bullet of the contract, and what only a Redis server can suffer.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::{RedisServer, ServerProcess, redis::RedisOptions};
use dlock_core::{
    Acquire, Acquired, Broken, Clock, DistributedLock, DriverError, Effect, ErrorKind,
    FencingToken, Fingerprint, Grant, Held, Hint, HoldId, Holds, Lane, Lease, LockName, Note,
    Owner, Release, Released, Renew, Renewed, Retry, Snapshot, Ticket,
};
use dlock_redis::{RedisConfig, RedisDriver};
use futures_util::StreamExt;
use redis::{AsyncCommands, aio::MultiplexedConnection};
use std::{
    net::TcpListener,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const SECOND: Duration = Duration::from_secs(1);
/// A sole hold's end is rounded up when it is written down for a second one.
const TICK: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_free_lock_is_granted_and_a_held_one_refused_with_its_holder() {
    let t = Testbed::start().await;
    let mut first = t.acquire("a", SECOND * 30);
    first.note = Arc::new(Note::new("host", 4711));
    let grant = t.granted(&first).await;
    assert_eq!(grant.holds.get(), 1);
    assert_eq!(grant.valid_for, SECOND * 30);
    let held = t.held(&t.acquire("a", SECOND)).await;
    let by = held.by.unwrap();
    assert_eq!(by.owner, first.owner.fingerprint());
    assert_eq!(by.token, grant.token);
    assert_eq!(by.note, Note::new("host", 4711));
    assert!(by.rest.unwrap() > SECOND * 29 && by.rest.unwrap() <= SECOND * 30);
    assert_eq!(held.look_in, Some(SECOND * 2));
    assert!(matches!(t.release(&first).await, Released::Freed));
    assert!(t.granted(&t.acquire("a", SECOND)).await.token > grant.token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_changes_nothing_and_answers_the_same_with_what_is_left() {
    let t = Testbed::start().await;
    let first = t.acquire("a", SECOND * 10);
    let grant = t.granted(&first).await;
    let before = t.dump("a").await;
    let again = t.granted(&first).await;
    assert_eq!((again.token, again.holds), (grant.token, grant.holds));
    assert!(again.valid_for <= grant.valid_for && again.valid_for > SECOND * 9);
    assert_eq!(t.dump("a").await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_re_enters_and_the_record_lasts_until_its_latest_living_hold() {
    let t = Testbed::start().await;
    let long = t.acquire("a", SECOND * 30);
    let grant = t.granted(&long).await;
    let short = t.again(&long, SECOND * 5);
    let second = t.granted(&short).await;
    assert_eq!((second.token, second.holds.get()), (grant.token, 2));
    assert_eq!(second.valid_for, SECOND * 5);
    assert!(t.rest("a").await > SECOND * 29, "re-entry never shortens");
    let longer = t.again(&long, SECOND * 60);
    assert_eq!(t.granted(&longer).await.holds.get(), 3);
    assert!(t.rest("a").await > SECOND * 59, "re-entry prolongs");
    assert!(matches!(t.release(&longer).await, Released::StillHeld { holds } if holds.get() == 2));
    assert!(
        t.rest("a").await <= SECOND * 30 + TICK,
        "back to what the others asked for"
    );
    assert!(matches!(t.release(&long).await, Released::StillHeld { holds } if holds.get() == 1));
    assert!(t.rest("a").await <= SECOND * 5);
    assert!(
        matches!(t.release(&long).await, Released::NotHeld { by: Some(by) } if by.owner == long.owner.fingerprint())
    );
    assert!(matches!(t.release(&short).await, Released::Freed));
    assert!(matches!(
        t.release(&short).await,
        Released::NotHeld { by: None }
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_past_its_end_is_gone_for_everybody() {
    let t = Testbed::start().await;
    let short = t.acquire("a", Duration::from_millis(150));
    let first = t.granted(&short).await;
    let other = t.again(&short, SECOND * 30);
    t.granted(&other).await;
    t.sleep(170).await;
    assert!(matches!(t.release(&short).await, Released::NotHeld { .. }));
    assert_eq!(t.renew(&[&short]).await, [Some(Renewed::NotHeld)]);
    assert_eq!(t.inspect("a").await.holds, 1);
    assert_eq!(
        t.granted(&t.again(&short, SECOND)).await.holds.get(),
        2,
        "the ghost is not counted"
    );
    t.driver.break_lock(&t.name("a"), None).await.unwrap();
    let lapsing = t.acquire("a", Duration::from_millis(100));
    let lapsed = t.granted(&lapsing).await;
    assert!(lapsed.token > first.token);
    t.sleep(120).await;
    let mut join = t.again(&lapsing, SECOND);
    join.join = lapsed.token;
    assert!(matches!(
        t.driver.acquire(&join).await.unwrap(),
        Acquired::Gone
    ));
    assert!(t.granted(&t.acquire("a", SECOND)).await.token > lapsed.token);
    assert_eq!(t.renew(&[&lapsing]).await, [Some(Renewed::NotHeld)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn join_enters_only_the_incarnation_it_names() {
    let t = Testbed::start().await;
    let first = t.acquire("a", SECOND * 30);
    let token = t.granted(&first).await.token;
    let mut join = t.again(&first, SECOND);
    join.join = token;
    assert_eq!(t.granted(&join).await.holds.get(), 2);
    let before = t.dump("a").await;
    let mut stranger = t.acquire("a", SECOND);
    stranger.join = token;
    let mut past = t.again(&first, SECOND);
    past.join = token.map(|token| FencingToken(token.0 - 1));
    let mut free = t.acquire("b", SECOND);
    free.join = token;
    for req in [&stranger, &past, &free] {
        assert!(matches!(
            t.driver.acquire(req).await.unwrap(),
            Acquired::Gone
        ));
    }
    assert_eq!(t.dump("a").await, before);
    assert!(!t.exists("dlock:{b}").await && !t.exists("dlock:{b}:token").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_grows_over_a_counter_that_is_ahead_of_the_clock() {
    let t = Testbed::start().await;
    let ahead = 9_007_199_254_740_000_u64;
    let () = t.raw().await.set("dlock:{a}:token", ahead).await.unwrap();
    let req = t.acquire("a", SECOND * 30);
    let grant = t.granted(&req).await;
    assert_eq!(grant.token, Some(FencingToken(ahead + 1)));
    assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 30));
    assert_eq!(t.granted(&req).await.token, grant.token);
    assert!(t.inspect("a").await.age.unwrap() < SECOND);
    t.release(&req).await;
    assert_eq!(
        t.granted(&t.acquire("a", SECOND)).await.token,
        Some(FencingToken(ahead + 2))
    );
    let kept: i64 = t.raw().await.pttl("dlock:{a}:token").await.unwrap();
    assert!(kept > 86_000_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_after_its_time_takes_nothing() {
    let t = Testbed::start().await;
    let mut late = t.acquire("a", SECOND);
    late.give_up = Clock::boot().now() - Duration::from_millis(200);
    let error = t.driver.acquire(&late).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Now, Effect::None)
    );
    assert!(!t.exists("dlock:{a}").await);
    let held = t.acquire("a", SECOND * 2);
    t.granted(&held).await;
    let entry = Renew::new(held.name.clone(), held.owner, held.hold, Some(SECOND * 30));
    let error = t
        .driver
        .renew(Lane(0), &[entry], late.give_up)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(t.rest("a").await <= SECOND * 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_has_at_most_64_holds() {
    let t = Testbed::start().await;
    let first = t.acquire("a", SECOND * 30);
    t.granted(&first).await;
    for holds in 2..=64 {
        assert_eq!(
            t.granted(&t.again(&first, SECOND * 30)).await.holds.get(),
            holds
        );
    }
    let before = t.dump("a").await;
    let error = t
        .driver
        .acquire(&t.again(&first, SECOND))
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Overloaded, Effect::None)
    );
    assert_eq!(t.dump("a").await, before);
    assert_eq!(
        t.granted(&first).await.holds.get(),
        64,
        "a repeat is no new hold"
    );
    let mut all = t.release_of(&first);
    all.holds = Holds::All;
    assert!(matches!(
        t.driver.release(&all).await.unwrap(),
        Released::Freed
    ));
    assert!(matches!(
        t.driver.release(&all).await.unwrap(),
        Released::NotHeld { by: None }
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_are_judged_one_by_one_and_never_create_or_shorten() {
    let t = Testbed::start().await;
    let (a, b, c, d) = (
        t.acquire("a", SECOND),
        t.acquire("b", SECOND * 60),
        t.acquire("c", SECOND),
        t.acquire("d", SECOND),
    );
    t.granted(&a).await;
    t.granted(&b).await;
    t.granted(&d).await;
    t.release(&d).await;
    t.granted(&t.acquire("d", SECOND * 9)).await;
    let () = t.raw().await.set("dlock:{e}", "x").await.unwrap();
    let e = t.acquire("e", SECOND);
    let entries: Vec<_> = [&a, &b, &c, &d, &e]
        .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 10)))
        .into();
    let answers = t.driver.renew(Lane(0), &entries, t.soon()).await.unwrap();
    assert!(matches!(answers[0], Ok(Renewed::Until { valid_for }) if valid_for == SECOND * 10));
    assert!(matches!(answers[1], Ok(Renewed::Until { valid_for }) if valid_for > SECOND * 59));
    assert!(matches!(answers[2], Ok(Renewed::NotHeld)));
    assert!(matches!(answers[3], Ok(Renewed::NotHeld)));
    let error = answers[4].as_ref().unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Misuse, Effect::None)
    );
    assert!(!t.exists("dlock:{c}").await);
    assert!(
        t.rest("a").await > SECOND * 9
            && t.rest("b").await > SECOND * 59
            && t.rest("d").await < SECOND * 9
    );
    let only_look = Renew::new(a.name.clone(), a.owner, a.hold, None);
    let answers = t
        .driver
        .renew(Lane(0), &[only_look], t.soon())
        .await
        .unwrap();
    assert!(
        matches!(answers[0], Ok(Renewed::Until { valid_for }) if valid_for <= SECOND * 10 && valid_for > SECOND * 9)
    );
    assert!(
        t.driver
            .renew(Lane(0), &[], t.soon())
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_renewals_answer_in_order() {
    let t = Testbed::start().await;
    let held: Vec<_> = (0..1_000)
        .map(|at| t.acquire(&format!("n{at}"), SECOND * 5))
        .collect();
    for req in held.iter().step_by(2) {
        t.granted(req).await;
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
async fn a_kept_name_is_shut_for_all_until_the_longest_keep_of_its_incarnation() {
    let t = Testbed::start().await;
    let first = t.acquire("a", SECOND * 30);
    t.granted(&first).await;
    let second = t.again(&first, SECOND * 30);
    t.granted(&second).await;
    let mut keeping = t.release_of(&first);
    keeping.keep = Some(SECOND * 20);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::StillHeld { .. }
    ));
    let mut shorter = t.release_of(&second);
    shorter.keep = Some(SECOND);
    let Released::Kept { rest } = t.driver.release(&shorter).await.unwrap() else {
        panic!()
    };
    assert!(rest > SECOND * 19 && rest <= SECOND * 20);
    assert!(t.rest("a").await <= SECOND * 20);
    let held = t.held(&t.again(&first, SECOND)).await;
    assert!(held.by.is_none() && held.look_in == Some(SECOND * 2));
    t.held(&t.acquire("a", SECOND)).await;
    assert!(matches!(
        t.driver.release(&shorter).await.unwrap(),
        Released::NotHeld { by: None }
    ));
    let shown = t.inspect("a").await;
    assert!(shown.holders.is_empty() && shown.shut.unwrap() > SECOND * 19);
    assert!(matches!(
        t.driver
            .break_lock(&t.name("a"), Some(FencingToken(1)))
            .await
            .unwrap(),
        Broken::Changed { token: None }
    ));
    assert!(matches!(
        t.driver.break_lock(&t.name("a"), None).await.unwrap(),
        Broken::Freed { token: None }
    ));
    let crashed = t.acquire("a", Duration::from_millis(150));
    t.granted(&crashed).await;
    let inner = t.again(&crashed, Duration::from_millis(100));
    t.granted(&inner).await;
    let mut keeping = t.release_of(&inner);
    keeping.keep = Some(SECOND * 20);
    t.driver.release(&keeping).await.unwrap();
    t.sleep(170).await;
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn break_frees_the_incarnation_named_or_nothing() {
    let t = Testbed::start().await;
    assert!(matches!(
        t.driver.break_lock(&t.name("a"), None).await.unwrap(),
        Broken::WasFree
    ));
    let req = t.acquire("a", SECOND * 30);
    let token = t.granted(&req).await.token;
    let other = token.map(|token| FencingToken(token.0 + 1));
    assert_eq!(
        t.driver.break_lock(&req.name, other).await.unwrap(),
        Broken::Changed { token }
    );
    assert_eq!(
        t.driver.break_lock(&req.name, token).await.unwrap(),
        Broken::Freed { token }
    );
    assert_eq!(t.renew(&[&req]).await, [Some(Renewed::NotHeld)]);
    assert!(t.granted(&t.acquire("a", SECOND)).await.token > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn list_walks_every_held_or_shut_name_of_a_prefix_and_decodes_it() {
    let t = Testbed::start().await;
    let names = ["x:1", "x:{2}", "x:%", "x:*", "x:é\u{1}", "y", "x"];
    for name in names {
        t.granted(&t.acquire(name, SECOND * 30)).await;
    }
    let shut = t.acquire("x:shut", SECOND * 30);
    t.granted(&shut).await;
    let mut keeping = t.release_of(&shut);
    keeping.keep = Some(SECOND * 30);
    t.driver.release(&keeping).await.unwrap();
    let gone = t.acquire("x:gone", SECOND);
    t.granted(&gone).await;
    t.release(&gone).await;
    let () = t.raw().await.set("dlock:{x:string}", "1").await.unwrap();
    assert_eq!(
        t.list("x:", 3).await,
        ["x:%", "x:*", "x:1", "x:shut", "x:{2}", "x:é\u{1}"]
    );
    assert_eq!(t.list("x:*", 100).await, ["x:*"]);
    assert_eq!(t.list("", 100).await.len(), 8);
    let error = t
        .driver
        .list("", Some(&dlock_core::Cursor(b"x".to_vec())), 1)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let free = t.inspect("never").await;
    assert!(free.holders.is_empty() && free.shut.is_none() && free.holds == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_differ_in_a_byte_are_two_locks() {
    let t = Testbed::start().await;
    for name in [
        "a", "A", "a ", "{a}", "%7Ba%7D", "a/", "\u{1}", "%01", "a:token", "á", "a\u{301}",
    ] {
        t.granted(&t.acquire(name, SECOND * 30)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redisson_holder_excludes_and_is_excluded() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let theirs = "6f0ad3ce-5df0-4b9a-a26e-3b1d2b3e6b0f:77";
    let () = raw.hset("dlock:{a}", theirs, 2).await.unwrap();
    let () = raw.pexpire("dlock:{a}", 5_000).await.unwrap();
    let by = t.held(&t.acquire("a", SECOND)).await.by.unwrap();
    assert_eq!(by.owner, Fingerprint::of(theirs.as_bytes()));
    assert!(by.token.is_none() && by.rest.unwrap() > SECOND * 4);
    let shown = t.inspect("a").await;
    assert_eq!((shown.holders.len(), shown.holds, shown.age), (1, 2, None));
    assert!(matches!(
        t.driver
            .break_lock(&t.name("a"), Some(FencingToken(1)))
            .await
            .unwrap(),
        Broken::Changed { token: None }
    ));
    assert!(matches!(
        t.release(&t.acquire("a", SECOND)).await,
        Released::NotHeld { by: Some(_) }
    ));
    let () = raw.persist("dlock:{a}").await.unwrap();
    assert_eq!(
        t.held(&t.acquire("a", SECOND)).await.look_in,
        Some(SECOND * 2),
        "without an end"
    );
    assert!(matches!(
        t.driver.break_lock(&t.name("a"), None).await.unwrap(),
        Broken::Freed { token: None }
    ));
    // What Redisson looks at: the key exists and has no field of its own; its end is the key's.
    let ours = t.acquire("a", SECOND * 5);
    t.granted(&ours).await;
    let owner = format!("{}:0", ours.owner.expose());
    let count: String = raw.hget("dlock:{a}", owner).await.unwrap();
    assert_eq!(count, "1");
    let fields: Vec<String> = raw.hkeys("dlock:{a}").await.unwrap();
    assert_eq!(
        fields
            .iter()
            .filter(|field| !field.starts_with('~'))
            .count(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn something_else_under_the_key_is_a_clear_error() {
    let t = Testbed::start().await;
    let () = t.raw().await.set("dlock:{a}", "token").await.unwrap();
    let req = t.acquire("a", SECOND);
    let errors = [
        t.driver.acquire(&req).await.map(drop).unwrap_err(),
        t.driver
            .release(&t.release_of(&req))
            .await
            .map(drop)
            .unwrap_err(),
        t.driver.inspect(&req.name).await.map(drop).unwrap_err(),
        t.driver
            .break_lock(&req.name, None)
            .await
            .map(drop)
            .unwrap_err(),
    ];
    for error in errors {
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Misuse, Retry::Never, Effect::None)
        );
        assert!(error.to_string().contains("SET NX"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failing_command_among_many_fails_alone() {
    let t = Testbed::start().await;
    let keys = ["dlock:{wrong-0}", "dlock:{wrong-7}"];
    for key in keys {
        let _: () = t.raw().await.set(key, "text").await.unwrap();
    }
    // Many at once share a pipeline; the scripts are gone, so that each has to load them again.
    let _: () = redis::cmd("SCRIPT")
        .arg("FLUSH")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let names = (0..64).map(|n| {
        if n % 7 == 0 {
            format!("wrong-{n}")
        } else {
            format!("right-{n}")
        }
    });
    let asked: Vec<_> = names.map(|name| t.acquire(&name, SECOND * 30)).collect();
    let answers =
        futures_util::future::join_all(asked.iter().map(|ask| t.driver.acquire(ask))).await;
    for (ask, answer) in asked.iter().zip(answers) {
        let wrong = ["wrong-0", "wrong-7"].contains(&ask.name.as_str());
        match answer {
            Err(error) if wrong => assert_eq!(error.effect(), Effect::None, "{error}"),
            Ok(Acquired::Granted(_)) if !wrong => {}
            other => panic!("{}: {other:?}", ask.name),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_were_flushed_are_loaded_again_unseen() {
    let t = Testbed::start().await;
    for _ in 0..3 {
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        let req = t.acquire("a", SECOND);
        t.granted(&req).await;
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced_before_the_next_request() {
    let t = Testbed::start().await;
    for _ in 0..5 {
        t.kill("normal").await;
        let req = t.acquire("a", SECOND);
        // The kill may be noticed only with this request on its way; then nobody knows, and the repeat tells.
        if let Err(error) = t.driver.acquire(&req).await {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::Unknown),
                "{error:?}"
            );
        }
        t.granted(&req).await;
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_restarted_server_until_its_give_up() {
    let t = Testbed::start().await;
    t.process().kill().unwrap();
    let mut hasty = t.acquire("a", SECOND);
    t.ends(&mut hasty, 200);
    // The first may still find the old connection; the second finds none.
    t.driver.acquire(&hasty).await.unwrap_err();
    t.ends(&mut hasty, 200);
    let error = t.driver.acquire(&hasty).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None),
        "{error:?}"
    );
    let mut patient = t.acquire("a", SECOND);
    t.ends(&mut patient, 10_000);
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let (driver, req) = (t.driver.clone(), patient.clone());
            tokio::spawn(async move { driver.acquire(&req).await })
        })
        .collect();
    t.process().restart().unwrap();
    for waiting in waiting {
        assert!(matches!(
            waiting.await.unwrap().unwrap(),
            Acquired::Granted(_)
        ));
    }
    let clients: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    // Beside the one for pushes, which comes back in its own time.
    let commands = clients.lines().filter(|line| line.contains(" sub=0 "));
    assert_eq!(commands.count(), 2, "one reconnect for all:\n{clients}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lay_in_a_stopped_server_is_refused_when_it_goes_on() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a", SECOND * 30);
    let held = t.acquire("b", SECOND * 2);
    t.granted(&held).await;
    t.process().stop().unwrap();
    t.ends(&mut req, 100);
    let entry = [Renew::new(
        held.name.clone(),
        held.owner,
        held.hold,
        Some(SECOND * 30),
    )];
    let acquired = tokio::time::timeout(Duration::from_millis(150), t.driver.acquire(&req));
    let renewed = tokio::time::timeout(
        Duration::from_millis(150),
        t.driver.renew(Lane(0), &entry, req.give_up),
    );
    let (acquired, renewed) = tokio::join!(acquired, renewed);
    assert!(acquired.is_err() && renewed.is_err());
    t.sleep(200).await;
    t.process().cont().unwrap();
    // Answers come in the order of requests, so both are over when this one is.
    t.inspect("a").await;
    assert!(!t.exists("dlock:{a}").await && !t.exists("dlock:{a}:token").await);
    assert!(t.rest("b").await <= SECOND * 2);
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deaf_connection_is_left_and_a_stopped_server_goes_on() {
    let t = Testbed::start().await;
    t.process().stop().unwrap();
    let mut req = t.acquire("a", SECOND * 30);
    t.ends(&mut req, 1_200);
    tokio::time::timeout(Duration::from_millis(1_200), t.driver.acquire(&req))
        .await
        .unwrap_err();
    t.process().cont().unwrap();
    t.granted(&t.acquire("b", SECOND)).await;
    t.granted(&t.acquire("c", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_refuses_without_effect_until_it_is_a_master_again() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let () = redis::cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(1)
        .query_async(&mut raw)
        .await
        .unwrap();
    for _ in 0..3 {
        let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, Retry::Later, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains("replica"), "{error}");
    }
    let () = redis::cmd("REPLICAOF")
        .arg("NO")
        .arg("ONE")
        .query_async(&mut raw)
        .await
        .unwrap();
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_without_effect() {
    let t = Testbed::start().await;
    let () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory")
        .arg(1)
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None),
        "{error:?}"
    );
    assert!(error.to_string().contains("maxmemory"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_has_one_channel_whatever_it_waits_for() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    assert!(t.driver.hints().next().await.is_none(), "taken once");
    assert_eq!(t.listeners().await, 1, "before any ticket");
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        let holder = t.acquire(name, SECOND * 30);
        t.granted(&holder).await;
        let waiter = t.in_line(name, SECOND * 30, at as u64 + 1);
        assert_eq!(t.held(&waiter).await.ahead, Some(0));
        t.release(&holder).await;
        let (name, ticket) = (t.name(name), ticket(at as u64 + 1));
        assert_eq!(hints.next().await, Some(Hint::Turn { name, ticket }));
        t.granted(&waiter).await;
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.close().await;
    assert_eq!(hints.next().await, None);
    t.until(async || t.listeners().await == 0).await;
    let error = t.driver.acquire(&t.acquire("c", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::ShuttingDown, Effect::None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stopped_reading_hints_is_given_no_turns() {
    let t = Testbed::start().await;
    let hints = t.driver.hints();
    drop(hints);
    t.until(async || t.listeners().await == 0).await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    t.held(&t.in_line("a", SECOND * 30, 1)).await;
    t.release(&holder).await;
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_look_again_when_their_connection_was_cut() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    for _ in 0..3 {
        t.kill("pubsub").await;
        assert_eq!(hints.next().await, Some(Hint::LookAgain));
        assert_eq!(t.listeners().await, 1);
    }
    t.driver.break_lock(&holder.name, None).await.unwrap();
    let (name, ticket) = (t.name("a"), ticket(1));
    assert_eq!(hints.next().await, Some(Hint::Turn { name, ticket }));
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_that_nobody_reads_are_bounded_and_end_in_one_look() {
    let t = Testbed::start().await;
    let mut hints = t.driver.hints();
    let channel = t.channel().await;
    let mut raw = t.raw().await;
    for ticket in 1..=3_000 {
        let said = format!("T{ticket} dlock:{{a}}");
        let _: u64 = raw.publish(&channel, said).await.unwrap();
    }
    // Neither what nobody understands nor a name that nobody has ends the connection.
    for said in [
        "",
        "T",
        "Tx dlock:{a}",
        "T0 dlock:{a}",
        "T1 other",
        "F1 x dlock:{a}",
        "Z1 1 1",
        "\u{e9}1 2",
    ] {
        let heard: u64 = raw.publish(&channel, said).await.unwrap();
        assert_eq!(heard, 1);
    }
    t.sleep(200).await;
    assert_eq!(hints.next().await, Some(Hint::LookAgain));
    let mut read = 0;
    while let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(100), hints.next()).await {
        read += 1;
    }
    assert!(read <= 1_100, "{read}");
    assert_eq!(t.listeners().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cannot_log_in_learns_why_and_no_secret_is_shown() {
    let t = Testbed::start().await;
    let () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("requirepass")
        .arg("right")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let at = t.server.addr().port();
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for (url, word) in [
        (format!("redis://127.0.0.1:{at}/"), "log-in"),
        (format!("redis://:canary@127.0.0.1:{at}/"), "password"),
        (format!("redis://:canary@127.0.0.1:{closed}/"), "reached"),
    ] {
        let error = RedisDriver::connect(&url).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Unavailable, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains(word), "{error}");
        let port = if word == "reached" { closed } else { at };
        let address = format!("127.0.0.1:{port}: ");
        assert!(error.to_string().starts_with(&address), "{error}");
        assert!(
            !format!("{error:?} {error}").contains("canary"),
            "{error:?}"
        );
    }
    let driver = RedisDriver::connect(&format!("redis://:right@127.0.0.1:{at}/"))
        .await
        .unwrap();
    assert!(!format!("{driver:?}").contains("right"));
}

/// A library that installed one would choose for everybody in the process, and rustls panics without one.
#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn tls_without_a_provider_is_an_error_that_says_what_to_install() {
    let error = RedisDriver::connect("rediss://127.0.0.1:1/")
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Misuse, Retry::Never),
        "{error:?}"
    );
    assert!(error.to_string().contains("install_default"), "{error}");
}

#[cfg(not(feature = "tls"))]
#[tokio::test(flavor = "multi_thread")]
async fn tls_without_the_feature_is_an_error() {
    let error = RedisDriver::connect("rediss://127.0.0.1:1/")
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_applications_own_client_is_enough() {
    let t = Testbed::start().await;
    let client = redis::Client::open(t.server.url()).unwrap();
    let config = RedisConfig::default().with_prefix("other".parse().unwrap());
    let driver = RedisDriver::from_client(&client, config).await.unwrap();
    assert!(matches!(
        driver.acquire(&t.acquire("a", SECOND)).await.unwrap(),
        Acquired::Granted(_)
    ));
    assert!(t.exists("other:{a}").await);
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_the_channels_waiters_only_look() {
    let mut t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| *word != "&dlock:c:*");
    t.server.command(&rights).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    assert_eq!(t.held(&waiter).await.ahead, Some(0));
    assert!(matches!(t.release(&holder).await, Released::Freed));
    assert_eq!(t.inspect("a").await.shut, None, "reserved for nobody");
    t.granted(&waiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_redissons_channels_what_is_done_is_done() {
    let mut t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| !word.starts_with("&redisson"));
    t.server.command(&rights).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    assert!(matches!(t.release(&holder).await, Released::Freed));
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    assert!(matches!(
        t.driver.break_lock(&holder.name, None).await.unwrap(),
        Broken::Freed { .. }
    ));
    // A leave that finds the name free and only the dead in line.
    let _: u64 = t
        .raw()
        .await
        .zadd("dlock:{a}:line", "gone:1", 1)
        .await
        .unwrap();
    t.driver.leave(&holder.name, ticket(1)).await.unwrap();
    assert_eq!(t.inspect("a").await.waiters, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_a_script_lacks_is_named_and_what_it_had_done_can_be_given_back() {
    let mut t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| *word != "+pexpire");
    t.server.command(&rights).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let req = t.acquire("a", SECOND * 30);
    let error = t.driver.acquire(&req).await.unwrap_err();
    assert!(error.to_string().contains("ACL"), "{error}");
    assert_eq!(
        (error.retry(), error.effect()),
        (Retry::Never, Effect::Unknown)
    );
    // The record was written, and the refused command was to give it an end.
    assert!(matches!(t.release(&req).await, Released::Freed));
    assert!(!t.exists("dlock:{a}").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_subscribe_waiters_look_and_a_close_waits_for_nothing() {
    let mut t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| *word != "+subscribe");
    t.server.command(&rights).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    // Nobody hears a turn, so it is given to nobody, and asking is enough.
    t.release(&holder).await;
    t.granted(&waiter).await;
    // The pause before the next try to subscribe is no reason to wait, nor is what is tried meanwhile a storm.
    let tried = t.server.command(&["INFO", "stats"]).unwrap().text();
    let of = |text: &Option<String>| {
        let text = text.clone().unwrap_or_default();
        let line = text.lines().find_map(|line| {
            line.strip_prefix("total_connections_received:")
                .map(str::to_owned)
        });
        line.unwrap().parse::<u64>().unwrap()
    };
    tokio::time::sleep(SECOND / 2).await;
    let later = t.server.command(&["INFO", "stats"]).unwrap().text();
    assert!(of(&later) - of(&tried) <= 2, "{tried:?} {later:?}");
    let began = std::time::Instant::now();
    t.driver.close().await;
    assert!(began.elapsed() < SECOND / 4, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_readme_are_enough_for_everything() {
    let mut t = Testbed::start().await;
    t.server.command(&rights()).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    let mut hints = t.driver.hints();
    let first = t.acquire("a", SECOND * 30);
    t.granted(&first).await;
    let second = t.again(&first, SECOND * 60);
    t.granted(&second).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    t.held(&waiter).await;
    t.held(&t.in_line("a", SECOND * 30, 2)).await;
    assert!(matches!(
        t.renew(&[&first]).await[..],
        [Some(Renewed::Until { .. })]
    ));
    t.release(&second).await;
    assert_eq!(t.list("", 100).await, ["a"]);
    let mut keeping = t.release_of(&first);
    keeping.keep = Some(SECOND);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::Kept { .. }
    ));
    assert!(matches!(
        t.driver.break_lock(&first.name, None).await.unwrap(),
        Broken::Freed { .. }
    ));
    let told = |hint: &Hint| matches!(hint, Hint::First { name, .. } | Hint::Turn { name, .. } if *name == first.name);
    for _ in 0..3 {
        let hint = hints.next().await.unwrap();
        assert!(told(&hint), "{hint:?}");
    }
    t.granted(&waiter).await;
    t.driver.leave(&waiter.name, ticket(2)).await.unwrap();
    assert_eq!(t.inspect("a").await.waiters, Some(0));
}

/// The line of the README, in words.
fn rights() -> Vec<&'static str> {
    let readme = include_str!("../README.md");
    let line = readme.split("```text\n").nth(1).unwrap();
    let line = line.split("```").next().unwrap();
    let words = line.split_whitespace();
    words.filter(|word| *word != "\\").collect()
}

/// A server and a driver of its own.
struct Testbed {
    driver: Arc<RedisDriver>,
    server: RedisServer,
    drawn: AtomicU64,
}

impl Testbed {
    async fn start() -> Self {
        let server = RedisServer::start(RedisOptions::default()).unwrap();
        let driver = Arc::new(RedisDriver::connect(&server.url()).await.unwrap());
        Self {
            driver,
            server,
            drawn: AtomicU64::new(1),
        }
    }

    fn process(&self) -> &ServerProcess {
        self.server.process().unwrap()
    }

    fn name(&self, name: &str) -> LockName {
        name.parse().unwrap()
    }

    fn soon(&self) -> dlock_core::Instant {
        Clock::boot().now() + SECOND * 5
    }

    fn ends(&self, req: &mut Acquire, millis: u64) {
        req.give_up = Clock::boot().now() + Duration::from_millis(millis);
    }

    fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    fn acquire(&self, name: &str, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        Acquire::new(
            self.name(name),
            owner,
            HoldId::from_bits(self.draw()),
            Lease::fixed(lease).unwrap(),
            self.soon(),
        )
    }

    /// One that waits.
    fn in_line(&self, name: &str, lease: Duration, number: u64) -> Acquire {
        let mut req = self.acquire(name, lease);
        req.line = Some(ticket(number));
        req
    }

    /// The same owner's next hold.
    fn again(&self, of: &Acquire, lease: Duration) -> Acquire {
        let hold = HoldId::from_bits(self.draw());
        Acquire::new(
            of.name.clone(),
            of.owner,
            hold,
            Lease::fixed(lease).unwrap(),
            self.soon(),
        )
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

    fn release_of(&self, req: &Acquire) -> Release {
        Release::new(req.name.clone(), req.owner, req.hold)
    }

    async fn release(&self, req: &Acquire) -> Released {
        self.driver.release(&self.release_of(req)).await.unwrap()
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

    async fn inspect(&self, name: &str) -> Snapshot {
        self.driver.inspect(&self.name(name)).await.unwrap()
    }

    async fn list(&self, prefix: &str, limit: usize) -> Vec<String> {
        let (mut found, mut from) = (Vec::new(), None);
        loop {
            let page = self
                .driver
                .list(prefix, from.as_ref(), limit)
                .await
                .unwrap();
            found.extend(page.found.into_iter().map(|shown| shown.name.to_string()));
            from = page.next;
            if from.is_none() {
                found.sort();
                found.dedup();
                return found;
            }
        }
    }

    async fn raw(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.server.url()).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    async fn exists(&self, key: &str) -> bool {
        self.raw().await.exists(key).await.unwrap()
    }

    async fn rest(&self, name: &str) -> Duration {
        let rest: u64 = self
            .raw()
            .await
            .pttl(format!("dlock:{{{name}}}"))
            .await
            .unwrap();
        Duration::from_millis(rest)
    }

    /// The record, its end and the token.
    async fn dump(&self, name: &str) -> (Vec<(String, String)>, u64, String) {
        let (mut raw, key) = (self.raw().await, format!("dlock:{{{name}}}"));
        let fields: Vec<(String, String)> = raw.hgetall(&key).await.unwrap();
        (
            fields,
            raw.pexpire_time(&key).await.unwrap(),
            raw.get(format!("{key}:token")).await.unwrap(),
        )
    }

    async fn channels(&self) -> Vec<String> {
        let mut raw = self.raw().await;
        let mut asked = redis::cmd("PUBSUB");
        asked.arg("CHANNELS").arg("dlock:c:*");
        asked.query_async(&mut raw).await.unwrap()
    }

    /// The only one.
    async fn channel(&self) -> String {
        let mut channels = self.channels().await;
        assert_eq!(channels.len(), 1);
        channels.remove(0)
    }

    async fn listeners(&self) -> usize {
        self.channels().await.len()
    }

    async fn kill(&self, kind: &str) {
        let killed: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("TYPE")
            .arg(kind)
            .query_async(&mut self.raw().await)
            .await
            .unwrap();
        assert!(killed > 0);
    }

    async fn until(&self, condition: impl AsyncFn() -> bool) {
        while !condition().await {
            self.sleep(1).await;
        }
    }

    /// For leases to run out on the server, whose clock nobody can pause.
    async fn sleep(&self, millis: u64) {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}
