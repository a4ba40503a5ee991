//! Tests of the queue: the places, the turns, and the notification of the first waiter.

use crate::bed::{ENDS, KEY, LINE, SECOND, Testbed, name, ticket};
use dlock_core::{
    Lease,
    driver::{Acquire, DistributedLock, Release, Released},
};
use redis::AsyncCommands;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_ticket_has_position_deadline_and_ttl_and_a_poll_moves_its_deadline() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    holder.granted(&t.acquire(SECOND * 30)).await;
    let mut req = waiter.waits(&t, 7);
    req.lease = Lease::fixed(SECOND * 3);
    let held = waiter.held(&req).await;
    assert_eq!((held.ahead, held.poll_in), (Some(0), Some(SECOND)));
    let stands = t.line().await;
    assert_eq!(stands.len(), 1);
    assert!(stands[0].0.starts_with("dlock:c:") && stands[0].0.ends_with(":7"));
    let ends = t.ends().await;
    let (deadline, accept) = ends[&stands[0].0].split_once(' ').unwrap();
    assert_eq!(accept, "1000");
    let deadline: f64 = deadline.parse().unwrap();
    assert!((deadline * 1_000.0 - stands[0].1 - 3_000_000.0).abs() < 2_000.0);
    for key in [LINE, ENDS] {
        let rest = t.rest(key).await;
        assert!(rest > SECOND * 5 && rest <= SECOND * 10, "{key} {rest:?}");
    }
    // Lets the server's clock advance, so that a later deadline differs.
    tokio::time::sleep(Duration::from_millis(20)).await;
    waiter.held(&req).await;
    assert_eq!(t.line().await, stands, "the place stays");
    let later: f64 = t.ends().await[&stands[0].0]
        .split_once(' ')
        .unwrap()
        .0
        .parse()
        .unwrap();
    assert!(later >= deadline + 20.0);
    // A shorter lease gets a shorter turn, and polls sooner.
    let mut short = waiter.waits(&t, 8);
    short.lease = Lease::fixed(Duration::from_millis(300));
    let held = waiter.held(&short).await;
    assert_eq!(
        (held.ahead, held.poll_in),
        (Some(1), Some(Duration::from_millis(100)))
    );
    assert!(t.ends().await[&t.line().await[1].0].ends_with(" 100"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_a_record_with_nothing_but_the_ticket_and_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let req = waiter.waits(&t, 1);
    waiter.held(&req).await;
    let stands = t.line().await[0].0.clone();
    // A long turn, so that a slow machine has time for the rest.
    t.put(&stands, 1, SECOND * 60, 60_000).await;
    holder.release(&inside).await;
    let rest = t.rest(KEY).await;
    assert!(rest > SECOND * 40 && rest <= SECOND * 60, "{rest:?}");
    assert_eq!(waiter.turn().await, 1);
    assert_eq!(t.record().await, HashMap::from([("~r".to_owned(), stands)]));
    assert!(!t.keys().await.iter().any(|key| key == LINE || key == ENDS));
    let shown = holder.driver.inspect(&name()).await.unwrap();
    assert!(shown.holders.is_empty() && shown.unavailable_for.is_some());
    assert_eq!(shown.waiters, Some(0));
    // The turn is taken, and its expiry is gone with it.
    let grant = waiter.granted(&req).await;
    assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 30));
    assert!(t.rest(KEY).await > SECOND * 20);
    assert_eq!(t.record().await["~r"], "", "no reservation");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_waiter_hears_before_the_first_and_redisson_only_of_a_free_name() {
    let t = Testbed::start();
    let holder = t.client().await;
    let inside = t.acquire(SECOND * 30);
    let mut channels = t
        .listener(&["dlock:c:x", "redisson_lock__channel:dlock:{a}"])
        .await;
    holder.granted(&inside).await;
    t.put("dlock:c:x:1", 1, SECOND * 60, 30_000).await;
    t.put("dlock:c:gone:1", 2, SECOND * 60, 1_000).await;
    t.put("dlock:c:x:2", 3, SECOND * 60, 1_000).await;
    holder.release(&inside).await;
    assert_eq!(channels.hears().await, "F2 30000 dlock:{a}");
    assert_eq!(channels.hears().await, "T1 dlock:{a}");
    let standing: Vec<_> = t.line().await.into_iter().map(|(it, _)| it).collect();
    assert_eq!(
        standing,
        ["dlock:c:x:2"],
        "who is gone was taken out on the way"
    );
    assert!(t.rest(KEY).await <= SECOND * 30);
    assert_eq!(t.ends().await.len(), 1);
    // During a minimum hold the first waiter is told when it ends.
    holder.driver.break_lock(&name(), None).await.unwrap();
    assert_eq!(channels.hears().await, "T2 dlock:{a}");
    holder.driver.break_lock(&name(), None).await.unwrap();
    assert_eq!(channels.hears().await, "0", "free");
    holder.granted(&inside).await;
    t.put("dlock:c:x:3", 1, SECOND * 60, 1_000).await;
    let mut keeping = Release::new(name(), inside.owner, inside.hold);
    keeping.min_hold = Some(SECOND * 9);
    holder.driver.release(&keeping).await.unwrap();
    let told = channels.hears().await;
    let millis: u64 = told
        .strip_prefix("F3 ")
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!((8_000..=9_000).contains(&millis), "{told}");
}

/// Waits for the end of a turn that was not taken: a third of a lease, on the server.
async fn turn_lapses(t: &Testbed) {
    let (mut raw, patience) = (t.raw().await, Instant::now() + SECOND * 20);
    while raw.exists(KEY).await.unwrap() {
        assert!(Instant::now() < patience, "a turn without an end");
        tokio::time::sleep(SECOND / 100).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_lapsed_keeps_its_place_once_and_then_costs_it() {
    let t = Testbed::start();
    let [holder, sleeper, other] = [t.client().await, t.client().await, t.client().await];
    let mut inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let short = |mut req: Acquire| {
        req.lease = Lease::fixed(SECOND * 3);
        req
    };
    let late = short(sleeper.waits(&t, 1));
    let good = short(other.waits(&t, 1));
    sleeper.held(&late).await;
    other.held(&good).await;
    let place = t.line().await[0].1;
    // It lets its turn lapse; the waiter behind it polls, and is granted.
    holder.release(&inside).await;
    assert_eq!(sleeper.turn().await, 1);
    turn_lapses(&t).await;
    other.granted(&good).await;
    // The number of polls does not matter, only that of the turns.
    for _ in 0..2 {
        sleeper.held(&late).await;
        assert_eq!(t.line().await[0].1, place, "back where it was");
    }
    other.release(&good).await;
    assert_eq!(sleeper.turn().await, 1);
    turn_lapses(&t).await;
    inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let good = short(other.waits(&t, 2));
    other.held(&good).await;
    sleeper.held(&late).await;
    let stands = t.line().await;
    assert!(
        stands[0].0.ends_with(":2") && stands[1].1 > stands[0].1,
        "at the end"
    );
    holder.release(&inside).await;
    assert_eq!(other.turn().await, 2);
    other.granted(&good).await;
    other.release(&good).await;
    assert_eq!(sleeper.turn().await, 1);
    sleeper.granted(&late).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_ticket_costs_one_hop() {
    let t = Testbed::start();
    let [holder, left, other] = [t.client().await, t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let gone = left.waits(&t, 1);
    left.held(&gone).await;
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    // A late copy of an acquire, executed after the leave.
    left.held(&gone).await;
    other.held(&other.waits(&t, 1)).await;
    holder.release(&inside).await;
    assert_eq!(left.turn().await, 1, "the client hears of it");
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    assert_eq!(other.turn().await, 1);
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    assert!(
        t.record().await.contains_key("~r"),
        "leaving twice leaves others alone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_dead_entries_only_is_empty() {
    let t = Testbed::start();
    let client = t.client().await;
    for dead in [1, 40, 100] {
        // Half of the tickets are past their deadline, half have no receiver.
        for at in 0..dead {
            let (who, rest) = if at % 2 == 0 {
                ("gone", SECOND * 60)
            } else {
                ("x", Duration::ZERO)
            };
            t.put(&format!("dlock:c:{who}:{}", at + 1), at, rest, 1_000)
                .await;
        }
        let _listens = t.listener(&["dlock:c:x"]).await;
        let req = t.acquire(SECOND * 30);
        client.granted(&req).await;
        assert!(t.line().await.is_empty());
        client.release(&req).await;
    }
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_past_a_hundred_dead_waiters_reaches_the_living_one() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    for how in ["release", "break", "leave"] {
        let inside = t.acquire(SECOND * 30);
        holder.granted(&inside).await;
        for at in 1..=100 {
            t.put(&format!("dlock:c:gone:{at}"), at, SECOND * 60, 1_000)
                .await;
        }
        let req = waiter.waits(&t, t.draw());
        waiter.held(&req).await;
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        match how {
            "release" => assert!(matches!(holder.release(&inside).await, Released::Freed)),
            "break" => drop(holder.driver.break_lock(&name(), None).await.unwrap()),
            _ => {
                let _: u64 = t.raw().await.del(KEY).await.unwrap();
                holder.driver.leave(&name(), ticket(999)).await.unwrap();
            }
        }
        // The waiter does not poll by itself.
        waiter.turn().await;
        assert_eq!(t.calls("evalsha").await, 4, "{how}: 32 a script");
        waiter.granted(&req).await;
        waiter.release(&req).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_blocks_no_lock_and_passes_no_waiter() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    // The place that the server gave when its clock was ahead.
    let ahead = 9_000_000_000_000_000.0;
    t.put(
        "dlock:c:gone:1",
        9_000_000_000_000_000,
        SECOND * 3_600,
        1_000,
    )
    .await;
    let inside = t.acquire(SECOND * 30);
    let _: () = t.raw().await.hset(KEY, "~k", "1").await.unwrap();
    let _: () = t.raw().await.pexpire(KEY, 30_000).await.unwrap();
    waiter.held(&waiter.waits(&t, 1)).await;
    assert_eq!(t.line().await[1].1, ahead + 1.0, "at the end of the queue");
    let _: u64 = t.raw().await.del((KEY, LINE, ENDS)).await.unwrap();
    // A reservation that outlasts every accept lease.
    let _: () = t
        .raw()
        .await
        .hset(KEY, "~r", "dlock:c:gone:1")
        .await
        .unwrap();
    let _: () = t.raw().await.pexpire(KEY, 3_600_000).await.unwrap();
    holder.granted(&inside).await;
}
