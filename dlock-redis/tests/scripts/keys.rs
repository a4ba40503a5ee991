//! Tests of the keys of a lock, and of the number of commands in each step.

use crate::bed::{Client, ENDS, KEY, LINE, SECOND, Testbed, name, ticket};
use dlock_core::{
    Clock, Effect, ErrorKind, FencingToken, Lease,
    driver::{Acquire, Acquired, DistributedLock, Released},
};
use redis::AsyncCommands;
use std::{collections::BTreeMap, time::Duration};

#[tokio::test(flavor = "multi_thread")]
async fn an_uncontended_cycle_pays_one_command_for_the_queue_on_either_side() {
    let t = Testbed::start();
    let client = t.client().await;
    let mut req = client.waits(&t, 1);
    // The first grant of 28 hours gives the counter a TTL.
    client.granted(&req).await;
    client.release(&req).await;
    for next in [None, None] {
        req.next_ticket = next;
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        client.granted(&req).await;
        let taken = ["time", "exists", "set", "hset", "pexpire"].map(|name| (name.to_owned(), 1));
        assert_eq!(t.commands().await, BTreeMap::from(taken));
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        assert!(matches!(client.release(&req).await, Released::Freed));
        let freed = ["hmget", "del", "zrange", "publish"].map(|name| (name.to_owned(), 1));
        assert_eq!(t.commands().await, BTreeMap::from(freed));
    }
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
    let info = redis::cmd("INFO").arg("memory").to_owned();
    let info: String = info.query_async(&mut t.raw().await).await.unwrap();
    let few = info.contains("number_of_cached_scripts:6\r\n");
    assert!(
        few,
        "who asks for one at a time has no scripts of several loaded: {info}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_greater_than_its_counter_which_gets_its_end_once_in_28_hours() {
    let t = Testbed::start();
    let client = t.client().await;
    let (mut raw, counter, span) = (t.raw().await, format!("{KEY}:token"), 100_000_000_000);
    let req = t.acquire(SECOND * 30);
    let now = client.granted(&req).await.token.0;
    client.release(&req).await;
    // In this span: a second ago, and its first µs. In the one before: its last µs, and a whole span
    // ago; ten spans ago. Then long ago, and in the future.
    let first = now - now % span;
    let long_ago = [now / 10, 9, 999_999_999_999_999];
    let ten_ago = now - 10 * span;
    let numbers = [now - 1_000_000, first, first - 1, now - span, ten_ago];
    let ahead = [now + 3_600_000_000, 9_000_000_000_000_000];
    for before in numbers.into_iter().chain(long_ago).chain(ahead) {
        let _: () = raw.set_ex(&counter, before, 1_000).await.unwrap();
        let token = client.granted(&req).await.token.0;
        client.release(&req).await;
        let next = token == before + 1;
        assert!(
            token > before && next == ahead.contains(&before),
            "{before}: {token}"
        );
        // A clock that was ahead may reach that time again.
        let ahead = Duration::from_micros(token.saturating_sub(now + 600_000_000));
        let renewed = t.rest(&counter).await > SECOND * 100_000 + ahead;
        assert_eq!(renewed, next || before / span != token / span, "{before}");
        assert_eq!(raw.get::<_, u64>(&counter).await.unwrap(), token);
    }
}

/// Of a quorum whose first server has a clock that is ahead by ten spans.
#[tokio::test(flavor = "multi_thread")]
async fn a_counter_outlives_a_token_whose_floor_is_eleven_days_ahead_of_the_clock() {
    let t = Testbed::start();
    let client = t.client().await;
    let mut req = t.acquire(SECOND * 30);
    let now = client.granted(&req).await.token.0;
    client.release(&req).await;
    let ahead = 10 * 100_000_000_000;
    req.floor = Some(FencingToken(now + ahead));
    assert_eq!(client.granted(&req).await.token.0, now + ahead);
    client.release(&req).await;
    let rest = t.rest(&format!("{KEY}:token")).await;
    let least = Duration::from_micros(ahead) + SECOND * 100_000;
    assert!(rest > least, "{rest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_is_two_scripts() {
    let t = Testbed::start();
    let [mut one, mut two] = [t.client().await, t.client().await];
    let mut inside = t.acquire(SECOND * 30);
    one.granted(&inside).await;
    two.held(&two.waits(&t, 1)).await;
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    for number in 2..12 {
        one.release(&inside).await;
        two.turn().await;
        let mut taking = two.waits(&t, number - 1);
        taking.ticket = Some(ticket(if number == 2 { 1 } else { number - 1 }));
        two.granted(&taking).await;
        one.held(&one.waits(&t, number)).await;
        inside = taking;
        std::mem::swap(&mut one, &mut two);
    }
    // A release, the acquire of the turn, and the first poll of the next waiter.
    assert_eq!(t.calls("evalsha").await, 3 * 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_had_a_turn_is_answered_after_the_next_turn_is_pushed() {
    let t = Testbed::start();
    let [first, second] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    first.granted(&inside).await;
    let taking = second.waits(&t, 1);
    second.held(&taking).await;
    let commands = async |client: &Client, req: &Acquire| {
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        assert!(matches!(client.release(req).await, Released::Freed));
        t.commands().await
    };
    // One command before the release makes its answer the last one that the server writes.
    let handed = commands(&first, &inside).await;
    assert_eq!((handed["time"], handed["publish"]), (1, 1));
    assert_eq!(second.turn().await, 1);
    second.granted(&taking).await;
    let freed = commands(&second, &taking).await;
    let wanted = ["time", "hmget", "del", "zrange", "publish"];
    assert_eq!(freed, wanted.map(|name| (name.to_owned(), 1)).into());
    // A lock without waiters costs nothing more.
    second.granted(&inside).await;
    assert!(!commands(&second, &inside).await.contains_key("time"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_counts_living_holds_and_keeps_no_dead_ones() {
    let t = Testbed::start();
    let client = t.client().await;
    let first = t.acquire(SECOND * 30);
    client.granted(&first).await;
    let field = format!("{}:0", first.owner.expose());
    let mut holds = vec![first.clone()];
    for length in [20_000, 10_000, 100] {
        let next = t.again(&first, Duration::from_millis(length));
        client.granted(&next).await;
        holds.push(next);
    }
    assert_eq!(t.record().await[&field], "4");
    // The shortest lease runs out on the server, whose clock a test cannot pause.
    tokio::time::sleep(Duration::from_millis(120)).await;
    // The release of another hold removes the expired one, and writes how many are left.
    assert!(matches!(
        client.release(&holds[2]).await,
        Released::StillHeld { holds } if holds.get() == 2
    ));
    let record = t.record().await;
    assert_eq!(record[&field], "2");
    let left: Vec<_> = record.keys().filter(|it| it.starts_with("~h:")).collect();
    assert_eq!(left.len(), 2, "{record:?}");
    for hold in [&holds[0], &holds[1]] {
        assert!(
            record.contains_key(&format!("~h:{}", hold.hold)),
            "{record:?}"
        );
    }
    client.release(&holds[0]).await;
    assert_eq!(t.record().await[&field], "1");
    assert!(t.rest(KEY).await <= SECOND * 20, "the end of what is left");
    // A re-entry removes the expired hold and counts too.
    let short = t.again(&first, Duration::from_millis(100));
    client.granted(&short).await;
    // As above.
    tokio::time::sleep(Duration::from_millis(120)).await;
    client.granted(&t.again(&first, SECOND)).await;
    let record = t.record().await;
    assert_eq!(record[&field], "2");
    assert!(
        !record.contains_key(&format!("~h:{}", short.hold)),
        "{record:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_queued_by_what_is_refused_for_another_reason() {
    let t = Testbed::start();
    let client = t.client().await;
    let inside = t.acquire(SECOND * 30);
    let token = client.granted(&inside).await.token;
    let mut gone = client.waits(&t, 1);
    gone.join = Some(token);
    assert!(matches!(
        client.driver.acquire(&gone).await.unwrap(),
        Acquired::Gone
    ));
    let mut late = client.waits(&t, 2);
    late.give_up = Clock::boot().now() - Duration::from_millis(200);
    client.driver.acquire(&late).await.unwrap_err();
    client.release(&inside).await;
    let _: () = t.raw().await.set(KEY, "foreign").await.unwrap();
    let error = client
        .driver
        .acquire(&client.waits(&t, 3))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let error = client.driver.leave(&name(), ticket(3)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(t.line().await.is_empty() && t.ends().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_on_a_foreign_key_takes_nothing_and_leaves_no_key_without_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    for foreign in [LINE, ENDS] {
        let inside = t.acquire(SECOND * 30);
        holder.granted(&inside).await;
        let mut taking = waiter.waits(&t, t.draw());
        waiter.held(&taking).await;
        holder.release(&inside).await;
        waiter.turn().await;
        let _: () = t.raw().await.set_ex(foreign, "foreign", 60).await.unwrap();
        // A waiter uses its turn, with the client's next ticket behind it.
        taking.next_ticket = Some(ticket(t.draw()));
        let error = waiter.driver.acquire(&taking).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Misuse, Effect::None)
        );
        assert!(
            !t.record().await.contains_key("~t"),
            "{foreign}: the lock is held"
        );
        for key in t.keys().await {
            assert!(t.rest(&key).await > Duration::ZERO, "{key} has no end");
        }
        let _: u64 = t.raw().await.del((KEY, LINE, ENDS)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_a_foreign_key_no_ticket_is_lost_and_no_turn_stays() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    waiter.held(&waiter.waits(&t, 1)).await;
    let _: () = t.raw().await.set(ENDS, "foreign").await.unwrap();
    assert!(matches!(holder.release(&inside).await, Released::Freed));
    let request = t.acquire(SECOND * 30);
    let error = holder.driver.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let stands = t.line().await[0].0.clone();
    let _: () = t.raw().await.hset(KEY, "~r", stands).await.unwrap();
    let left = waiter.driver.leave(&name(), ticket(1)).await;
    assert_eq!(left.unwrap_err().kind(), ErrorKind::Misuse);
    assert!(t.record().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_finds_its_hold_and_queues_its_next_ticket_once() {
    let t = Testbed::start();
    let [client, other] = [t.client().await, t.client().await];
    let mut req = client.waits(&t, 1);
    req.next_ticket = Some(ticket(2));
    let grant = client.granted(&req).await;
    let stands = t.line().await;
    assert_eq!(stands.len(), 1);
    assert!(stands[0].0.ends_with(":2"));
    other.held(&other.waits(&t, 1)).await;
    let again = client.granted(&req).await;
    assert_eq!((again.token, again.holds), (grant.token, grant.holds));
    assert_eq!(t.line().await[0], stands[0], "first as before");
    assert_eq!(t.line().await.len(), 2);
    // The client remembers the place: if the server forgets it, the next poll restores it.
    let _: () = t.raw().await.zrem(LINE, &stands[0].0).await.unwrap();
    let mut poll = client.waits(&t, 2);
    poll.lease = Lease::fixed(SECOND);
    client.held(&poll).await;
    assert_eq!(t.line().await[0], stands[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_but_none_of_its_own_has_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    waiter.held(&waiter.waits(&t, 1)).await;
    waiter.held(&waiter.waits(&t, 2)).await;
    for _ in 0..2 {
        let keys = t.keys().await;
        assert_eq!(keys.len(), 4, "{keys:?}");
        for key in keys {
            assert!(t.rest(&key).await > Duration::ZERO, "{key} has no end");
        }
        holder.release(&inside).await;
    }
}
