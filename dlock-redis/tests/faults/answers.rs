//! Contract tests: the driver's answer to each request, bullet by bullet.

use crate::bed::{SECOND, Testbed};
use dlock_core::{
    Broken, Clock, Effect, ErrorKind, FencingToken, HolderInfo, Holds, RetryClass,
    driver::{Acquired, DistributedLock, Lane, Released, Renew, Renewed},
};
use redis::AsyncCommands;
use std::{sync::Arc, time::Duration};

/// The end of a sole hold is rounded up when a second hold makes the script write it down.
const TICK: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_free_lock_is_granted_and_a_held_one_refused_with_its_holder() {
    let t = Testbed::start().await;
    let mut first = t.acquire("a", SECOND * 30);
    first.info = Arc::new(HolderInfo::new("host", 4711));
    let grant = t.granted(&first).await;
    assert_eq!(grant.holds.get(), 1);
    assert_eq!(grant.valid_for, SECOND * 30);
    let held = t.held(&t.acquire("a", SECOND)).await;
    let by = held.by.unwrap();
    assert_eq!(by.owner, first.owner.fingerprint());
    assert_eq!(by.token, Some(grant.token));
    assert_eq!(by.info, HolderInfo::new("host", 4711));
    assert!(by.rest.unwrap() > SECOND * 20 && by.rest.unwrap() <= SECOND * 30);
    assert_eq!(held.poll_in, Some(SECOND * 2));
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
    assert!(again.valid_for <= grant.valid_for && again.valid_for > SECOND * 5);
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
    assert!(t.rest("a").await > SECOND * 20, "re-entry never shortens");
    let longer = t.again(&long, SECOND * 60);
    assert_eq!(t.granted(&longer).await.holds.get(), 3);
    assert!(t.rest("a").await > SECOND * 40, "re-entry prolongs");
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
async fn a_hold_past_its_end_is_gone_for_every_client() {
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
    t.breaks("a", None).await;
    let lapsing = t.acquire("a", Duration::from_millis(100));
    let lapsed = t.granted(&lapsing).await;
    assert!(lapsed.token > first.token);
    t.sleep(120).await;
    let mut join = t.again(&lapsing, SECOND);
    join.join = Some(lapsed.token);
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
    join.join = Some(token);
    assert_eq!(t.granted(&join).await.holds.get(), 2);
    let before = t.dump("a").await;
    let mut stranger = t.acquire("a", SECOND);
    stranger.join = Some(token);
    let mut past = t.again(&first, SECOND);
    past.join = Some(FencingToken(token.0 - 1));
    let mut free = t.acquire("b", SECOND);
    free.join = Some(token);
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
    assert_eq!(grant.token, FencingToken(ahead + 1));
    assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 30));
    assert_eq!(t.granted(&req).await.token, grant.token);
    assert!(t.inspect("a").await.age.unwrap() < SECOND * 20);
    t.release(&req).await;
    assert_eq!(
        t.granted(&t.acquire("a", SECOND)).await.token,
        FencingToken(ahead + 2)
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
        (ErrorKind::Unavailable, RetryClass::Now, Effect::None)
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
        t.acquire("a", SECOND * 9),
        t.acquire("b", SECOND * 90),
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
        .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 30)))
        .into();
    let answers = t.driver.renew(Lane(0), &entries, t.soon()).await.unwrap();
    assert!(matches!(answers[0], Ok(Renewed::Until { valid_for }) if valid_for == SECOND * 30));
    assert!(matches!(answers[1], Ok(Renewed::Until { valid_for }) if valid_for > SECOND * 60));
    assert!(matches!(answers[2], Ok(Renewed::NotHeld)));
    assert!(matches!(answers[3], Ok(Renewed::NotHeld)));
    let error = answers[4].as_ref().unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Misuse, Effect::None)
    );
    assert!(!t.exists("dlock:{c}").await);
    assert!(
        t.rest("a").await > SECOND * 20
            && t.rest("b").await > SECOND * 60
            && t.rest("d").await <= SECOND * 9
    );
    let only_look = Renew::new(a.name.clone(), a.owner, a.hold, None);
    let answers = t
        .driver
        .renew(Lane(0), &[only_look], t.soon())
        .await
        .unwrap();
    assert!(
        matches!(answers[0], Ok(Renewed::Until { valid_for }) if valid_for <= SECOND * 30 && valid_for > SECOND * 20)
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
    keeping.min_hold = Some(SECOND * 20);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::StillHeld { .. }
    ));
    let mut shorter = t.release_of(&second);
    shorter.min_hold = Some(SECOND);
    let Released::MinHold { rest } = t.driver.release(&shorter).await.unwrap() else {
        panic!()
    };
    assert!(rest > SECOND * 10 && rest <= SECOND * 20);
    assert!(t.rest("a").await <= SECOND * 20);
    let held = t.held(&t.again(&first, SECOND)).await;
    assert!(held.by.is_none() && held.poll_in == Some(SECOND * 2));
    t.held(&t.acquire("a", SECOND)).await;
    assert!(matches!(
        t.driver.release(&shorter).await.unwrap(),
        Released::NotHeld { by: None }
    ));
    let shown = t.inspect("a").await;
    assert!(shown.holders.is_empty() && shown.unavailable_for.unwrap() > SECOND * 10);
    assert!(matches!(
        t.breaks("a", Some(1)).await,
        Broken::Changed { token: None }
    ));
    assert!(matches!(
        t.breaks("a", None).await,
        Broken::Freed { token: None }
    ));
    let crashed = t.acquire("a", SECOND * 5);
    t.granted(&crashed).await;
    let inner = t.again(&crashed, SECOND * 4);
    t.granted(&inner).await;
    let mut keeping = t.release_of(&inner);
    keeping.min_hold = Some(SECOND * 20);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::StillHeld { .. }
    ));
    let granted = async || {
        let next = t.acquire("a", SECOND);
        let acquired = t.driver.acquire(&next).await.unwrap();
        matches!(acquired, Acquired::Granted(_))
    };
    let soon = tokio::time::timeout(SECOND * 10, t.until(granted)).await;
    soon.expect("the minimum hold ends with the last lease");
}

/// A script has 100 entries, and the user may not access the key of the last lock, which is in the
/// second script.
#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_fails_does_not_fail_the_other_renewals_of_its_batch() {
    let t = Testbed::start().await;
    let names = (0..100).map(|at| format!("a{at}")).chain(["b".to_owned()]);
    let held: Vec<_> = names.map(|name| t.acquire(&name, SECOND * 30)).collect();
    for req in &held {
        t.granted(req).await;
    }
    let bounds = ["ACL", "SETUSER", "default", "resetkeys", "~dlock:{a*"];
    t.server.command(&bounds).unwrap();
    let mut answers = t.renew(&held.iter().collect::<Vec<_>>()).await;
    assert_eq!(answers.pop(), Some(None));
    let renewed = |answer: &_| matches!(answer, Some(Renewed::Until { .. }));
    assert!(answers.iter().all(renewed), "{answers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn break_frees_the_incarnation_named_or_nothing() {
    let t = Testbed::start().await;
    assert!(matches!(t.breaks("a", None).await, Broken::WasFree));
    let req = t.acquire("a", SECOND * 30);
    let token = t.granted(&req).await.token;
    let other = Some(FencingToken(token.0 + 1));
    assert_eq!(
        t.driver.break_lock(&req.name, other).await.unwrap(),
        Broken::Changed { token: Some(token) }
    );
    assert_eq!(
        t.driver.break_lock(&req.name, Some(token)).await.unwrap(),
        Broken::Freed { token: Some(token) }
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
    keeping.min_hold = Some(SECOND * 30);
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
    // The cursor of another server means nothing, so not that of another connection.
    let page = t.driver.list("", None, 1).await.unwrap();
    assert!(page.next.is_some());
    t.kill("normal").await;
    let error = t.driver.list("", page.next.as_ref(), 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let error = t
        .driver
        .list("", Some(&dlock_core::driver::Cursor(b"x".to_vec())), 1)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let free = t.inspect("never").await;
    assert!(free.holders.is_empty() && free.unavailable_for.is_none() && free.holds == 0);
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
