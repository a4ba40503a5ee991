//! Damage tests: values under the keys of a lock that dlock never writes there.

use crate::bed::{SECOND, Testbed};
use dlock_core::{
    Broken, Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, DriverError, Released, WakeUp},
};
use futures_util::{StreamExt, future::join_all};
use redis::AsyncCommands;
use std::fmt::Debug;

const COUNTER: &str = "dlock:{a}:token";

/// Values that are no number, or a number that a script cannot count on from.
fn damage() -> Vec<String> {
    let long = format!("1{}", "0".repeat(400));
    let texts = [
        "", "blank", "inf", "nan", "-5", "1e300", "0x10", "1.5", " 7",
    ];
    let numbers = [
        "9007199254740992",
        "9007199254740993",
        "18446744073709551615",
        "18446744073709551616",
    ];
    let all = texts.into_iter().chain(numbers).map(str::to_owned);
    all.chain([long]).collect()
}

fn is_damaged<T: Debug>(answer: Result<T, DriverError>, what: &str) {
    let error = answer.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Never, Effect::None),
        "{what}: {error:?}"
    );
    let said = error.to_string();
    assert!(
        said.contains("damaged") && said.contains("break"),
        "{what}: {said}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_counter_grants_nothing_until_a_break_begins_it_anew() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let req = t.acquire("a", SECOND * 30);
    let mut last = t.granted(&req).await.token;
    t.release(&req).await;
    for number in damage() {
        let _: () = raw.set_ex(COUNTER, &number, 100).await.unwrap();
        is_damaged(t.driver.acquire(&req).await, &number);
        assert_eq!(raw.get::<_, String>(COUNTER).await.unwrap(), number);
        let broken = t.breaks("a", Some(last.0)).await;
        assert_eq!(broken, Broken::WasFree, "{number}: another's business");
        is_damaged(t.driver.acquire(&req).await, &number);
        let broken = t.breaks("a", None).await;
        assert_eq!(broken, Broken::Freed { token: None }, "{number}");
        let token = t.granted(&req).await.token;
        assert!(token > last, "{number}: {token:?} after {last:?}");
        let rest: i64 = raw.ttl(COUNTER).await.unwrap();
        assert!(rest > 100_000, "{number}: {rest}");
        t.release(&req).await;
        last = token;
    }
    let _: () = raw.del(COUNTER).await.unwrap();
    let _: () = raw.hset(COUNTER, "no", "text").await.unwrap();
    is_damaged(t.driver.acquire(&req).await, "a hash");
    assert_eq!(t.breaks("a", None).await, Broken::Freed { token: None });
    assert!(t.granted(&req).await.token > last);
    t.release(&req).await;
    // The last possible token is a token like any other; there is none after it.
    let end = 1_u64 << 53;
    let _: () = raw.set_ex(COUNTER, end - 2, 100).await.unwrap();
    assert_eq!(t.granted(&req).await.token.0, end - 1);
    let again = t.again(&req, SECOND);
    assert_eq!(t.granted(&again).await.token.0, end - 1);
    t.release(&again).await;
    t.release(&req).await;
    is_damaged(t.driver.acquire(&req).await, "used up");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_break_of_a_held_lock_begins_a_damaged_counter_at_the_holders_token() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    // The clock was ahead in the past.
    let ahead = 9_000_000_000_000_000_u64;
    let _: () = raw.set_ex(COUNTER, ahead, 100).await.unwrap();
    let holder = t.acquire("a", SECOND * 30);
    assert_eq!(t.granted(&holder).await.token.0, ahead + 1);
    let _: () = raw.set_ex(COUNTER, "1e300", 100).await.unwrap();
    assert!(matches!(
        t.breaks("a", Some(7)).await,
        Broken::Changed { .. }
    ));
    assert!(matches!(
        t.breaks("a", None).await,
        Broken::Freed { token: Some(_) }
    ));
    let next = t.granted(&t.acquire("a", SECOND)).await.token;
    assert_eq!(next.0, ahead + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_counter_among_many_is_met_by_its_own_request_alone() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    for (at, number) in damage().iter().enumerate() {
        let key = format!("dlock:{{n{at}}}:token");
        let _: () = raw.set_ex(key, number, 100).await.unwrap();
    }
    let _: () = raw.hset("dlock:{n20}:token", "no", "text").await.unwrap();
    let bad = |at: usize| at < damage().len() || at == 20;
    let crowd: Vec<_> = (0..64)
        .map(|at| t.acquire(&format!("n{at}"), SECOND * 30))
        .collect();
    let answers = join_all(crowd.iter().map(|req| t.driver.acquire(req))).await;
    for (at, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(Acquired::Granted(_)) if !bad(at) => {}
            answer if bad(at) => is_damaged(answer, &format!("n{at}")),
            other => panic!("n{at}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_said_to_be_damaged_and_a_break_frees_it() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    for number in damage() {
        for field in ["hold", "~t", "~k"] {
            let what = format!("{field} {number:?}");
            let held = t.acquire("a", SECOND * 30);
            t.granted(&held).await;
            let again = t.again(&held, SECOND * 20);
            t.granted(&again).await;
            let damaged = match field {
                "hold" => format!("~h:{}", held.hold),
                other => other.to_owned(),
            };
            let _: () = raw.hset("dlock:{a}", damaged, &number).await.unwrap();
            // Every request reports the damage, and none of it stops a scan.
            match field {
                "hold" => {
                    is_damaged(t.driver.acquire(&t.acquire("a", SECOND)).await, &what);
                    is_damaged(t.driver.release(&t.release_of(&again)).await, &what);
                    assert!(t.renew(&[&held]).await[0].is_none(), "{what}");
                }
                "~t" => is_damaged(t.driver.acquire(&t.again(&held, SECOND)).await, &what),
                _ => is_damaged(t.driver.release(&t.release_of(&again)).await, &what),
            }
            assert_eq!(t.list("", 100).await, ["a"], "{what}");
            t.inspect("a").await;
            let broken = t.breaks("a", None).await;
            assert!(matches!(broken, Broken::Freed { .. }), "{what}: {broken:?}");
            assert!(matches!(
                t.release(&held).await,
                Released::NotHeld { by: None }
            ));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_greatest_and_least_numbers_that_can_stand_in_a_store_panic_nowhere() {
    let t = Testbed::start().await;
    let (mut raw, mut wake_ups) = (t.raw().await, t.driver.wake_ups());
    let held = t.acquire("a", SECOND * 30);
    t.granted(&held).await;
    let owner = format!("{}:0", held.owner.expose());
    let mut far = redis::cmd("PEXPIREAT");
    far.arg("dlock:{a}").arg(i64::MAX);
    let _: () = far.query_async(&mut raw).await.unwrap();
    let number = u64::MAX.to_string();
    for number in [&number, "9007199254740991", "0", "-1"] {
        for field in ["~s", "~k", &*owner] {
            let _: () = raw.hset("dlock:{a}", field, number).await.unwrap();
        }
        t.inspect("a").await;
        assert_eq!(t.list("", 100).await, ["a"], "{number}");
        let refused = t.held(&t.acquire("a", SECOND)).await;
        assert!(refused.poll_in.unwrap() <= SECOND * 2, "{number}");
    }
    let told = format!("F1 {number} dlock:{{a}}");
    let _: () = raw.publish(t.channel().await, told).await.unwrap();
    let wake_up = wake_ups.next().await.unwrap();
    assert!(matches!(wake_up, WakeUp::First { poll_in, .. } if poll_in <= SECOND * 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_key_beside_a_lock_hides_no_other_from_a_walk() {
    let t = Testbed::start().await;
    for name in ["a", "b", "c"] {
        t.granted(&t.acquire(name, SECOND * 30)).await;
    }
    let _: () = t.raw().await.set("dlock:{b}:line", "text").await.unwrap();
    assert_eq!(t.list("", 100).await, ["a", "b", "c"]);
    assert_eq!(t.inspect("b").await.waiters, None);
}

/// The queue heals by itself: a ticket without a client is removed, and a turn ends after a second
/// whatever is written there.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_positions_and_deadlines_in_the_queue_block_no_client() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    for place in ["inf", "-inf", "1e300", "9007199254740993"] {
        let held = t.acquire("a", SECOND * 30);
        t.granted(&held).await;
        let waiter = t.in_line("a", SECOND * 30, t.draw());
        t.held(&waiter).await;
        let _: () = raw.zadd("dlock:{a}:line", "gone:1", place).await.unwrap();
        let next = t.in_line("a", SECOND * 30, t.draw());
        t.held(&next).await;
        t.release(&held).await;
        t.granted(&waiter).await;
        t.release(&waiter).await;
        t.granted(&next).await;
        t.release(&next).await;
    }
    for ends in [
        "9 99999999999999999999",
        "inf inf",
        "99999999999999999999 99999999999999999999",
    ] {
        let held = t.acquire("b", SECOND * 30);
        t.granted(&held).await;
        let waiter = t.in_line("b", SECOND * 30, t.draw());
        t.held(&waiter).await;
        let ticket: Vec<String> = raw.zrange("dlock:{b}:line", 0, 0).await.unwrap();
        let _: () = raw.hset("dlock:{b}:ends", &ticket[0], ends).await.unwrap();
        assert!(matches!(t.release(&held).await, Released::Freed), "{ends}");
        assert_ne!(raw.pttl::<_, i64>("dlock:{b}").await.unwrap(), -1, "{ends}");
        t.granted(&waiter).await;
        t.release(&waiter).await;
    }
}
