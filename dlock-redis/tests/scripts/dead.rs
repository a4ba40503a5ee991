//! Tests of batched releases with waiters, some of them dead.

use crate::{
    bed::{SECOND, Testbed},
    several::{A_SCRIPT, MANY, granted, release},
};
use dlock_core::driver::{DistributedLock, Released};
use futures_util::future::join_all;
use redis::AsyncCommands;

#[tokio::test]
async fn the_dead_of_all_names_in_a_script_share_a_budget_and_each_waiter_is_served() {
    let t = Testbed::start();
    let [client, other] = [t.client().await, t.client().await];
    let wanted = t.of_many_names(MANY);
    for answer in join_all(wanted.iter().map(|req| client.driver.acquire(req))).await {
        granted(answer);
    }
    let waited = 5..8;
    for at in waited.clone() {
        let line = format!("dlock:{{{}}}:line", wanted[at].name);
        let dead = (1..=20).map(|place| (place, format!("dlock:c:gone:{place}")));
        let dead: Vec<(u64, String)> = dead.collect();
        let _: () = t.raw().await.zadd_multiple(&line, &dead).await.unwrap();
        let mut waiting = other.waits(&t, at as u64);
        waiting.name = wanted[at].name.clone();
        other.held(&waiting).await;
    }
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    for answer in join_all(wanted.iter().map(|req| release(&client.driver, req))).await {
        assert!(matches!(answer, Ok(Released::Freed)));
    }
    let mut turns = [other.turn().await, other.turn().await, other.turn().await];
    turns.sort_unstable();
    assert!(waited.eq(turns.map(|turn| usize::try_from(turn).unwrap())));
    // One script touches 21 entries of the first name, 11 of the second and 8 of the third. One leave each
    // serves the waiters behind them.
    assert_eq!(t.calls("evalsha").await, 4 + 3 + 2);
    // An acquire that finds so many dead is refused though the lock is free, and repeats until it is
    // granted.
    let wanted = &wanted[20..];
    for req in wanted {
        let line = format!("dlock:{{{}}}:line", req.name);
        let dead = (1..=10).map(|place| (place, format!("dlock:c:gone:{place}")));
        let dead: Vec<(u64, String)> = dead.collect();
        let _: () = t.raw().await.zadd_multiple(&line, &dead).await.unwrap();
    }
    for answer in join_all(wanted.iter().map(|req| client.driver.acquire(req))).await {
        granted(answer);
    }
}

/// The ticket with the turn may be dead and still have a receiver. The ticket behind it is told at once
/// that it is first; otherwise it would notice only when it polls.
#[tokio::test]
async fn who_becomes_first_is_told_for_every_name_of_a_script() {
    // Tickets without a receiver, before the one with the turn and behind it.
    for (before, behind) in [(0, 0), (1, 0), (0, 1), (3, 3)] {
        let t = Testbed::start();
        let driver = t.client().await.driver;
        let wanted = t.of_many_names(4 + A_SCRIPT);
        for answer in join_all(wanted.iter().map(|req| driver.acquire(req))).await {
            granted(answer);
        }
        for req in &wanted {
            let key = format!("dlock:{{{}}}", req.name);
            let gone = |count| std::iter::repeat_n("gone", count);
            let line = gone(before).chain(["served"]).chain(gone(behind));
            for (place, client) in line.chain(["first", "second"]).enumerate() {
                let ticket = format!("dlock:c:{client}:{place}");
                t.put_in_line_of(&key, &ticket, place as u64, SECOND * 60, 700)
                    .await;
            }
        }
        let mut served = t.listener(&["dlock:c:served"]).await;
        let mut first = t.listener(&["dlock:c:first", "dlock:c:second"]).await;
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        for answer in join_all(wanted.iter().map(|req| release(&driver, req))).await {
            assert!(matches!(answer, Ok(Released::Freed)));
        }
        assert_eq!(t.calls("evalsha").await, 4 + 1);
        let (place, next) = (before, before + 1 + behind);
        for _ in &wanted {
            let mut turn = served.hears().await;
            if before > 0 {
                // Each ticket without a receiver had its turn first.
                assert!(turn.starts_with(&format!("F{place} ")), "{turn}");
                turn = served.hears().await;
            }
            let key = turn.strip_prefix(&format!("T{place} ")).expect(&turn);
            assert_eq!(first.hears().await, format!("F{next} 700 {key}"));
        }
    }
}
