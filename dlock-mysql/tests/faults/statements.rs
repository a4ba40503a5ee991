//! How many statements requests take, and what happens under contention.

use super::{
    SECOND,
    bed::{Testbed, connected},
};
use dlock_conformance::under_test::{Room, lasts};
use dlock_core::{
    Client, Owner,
    driver::{DistributedLock, Released, Renewed},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_cycle_is_two_statements_and_neither_reads() {
    let t = Testbed::start(&[]).await;
    let ask = t.ask("a", SECOND * 30);
    t.granted(&ask).await;
    t.release(&ask).await;
    // A sweep in the background reads too, on a connection that it may open. It begins at one grant in 1,024,
    // so it may fall into the first hundred, and its end into the next.
    for last in [false, false, true] {
        let before = t.counters().await;
        for _ in 0..100 {
            let ask = t.ask("a", SECOND * 30);
            t.granted(&ask).await;
            assert!(matches!(t.release(&ask).await, Released::Freed));
        }
        let after = t.counters().await;
        let spent: Vec<u64> = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect();
        assert_eq!(spent[..3], [200, 0, 0], "updates, inserts, deletes");
        match spent[3] {
            0 => break,
            reads => assert!(!last, "{reads} reads in each of three hundred cycles"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_of_many_is_one_statement_and_each_is_judged_alone() {
    let t = Testbed::start(&[]).await;
    let mut asks = Vec::new();
    for at in 0..70 {
        let ask = t.ask(&format!("n{at}"), SECOND * 30);
        t.granted(&ask).await;
        asks.push(ask);
    }
    let before = t.counters().await;
    let all = t.renew(&asks, SECOND * 40).await.unwrap();
    assert!(all.iter().all(|renewed| lasts(renewed, SECOND * 40)));
    assert_eq!(t.counters().await[0] - before[0], 1);
    // One lock was released, one has a second hold, one belongs to another owner.
    t.release(&asks[3]).await;
    t.granted(&t.again(&asks[5], SECOND * 90)).await;
    asks[7].owner = Owner::from_seed("stranger");
    let mixed = t.renew(&asks, SECOND * 60).await.unwrap();
    for (at, renewed) in mixed.iter().enumerate() {
        match at {
            3 | 7 => assert!(matches!(renewed, Ok(Renewed::NotHeld)), "{at}: {renewed:?}"),
            _ => assert!(lasts(renewed, SECOND * 60), "{at}: {renewed:?}"),
        }
    }
    assert!(t.rest("n5").await > SECOND * 80 && t.rest("n6").await > SECOND * 55);
    assert!(
        t.rest("n7").await < SECOND * 41,
        "a stranger's renewal changed nothing"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_deadlock_reaches_one_of_twelve_clients_at_one_name() {
    twelve(SECOND * 5).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a soak of 30 s: the same with 5 s runs always; `cargo test -p dlock-mysql --test faults -- --ignored`"]
async fn no_deadlock_reaches_one_of_twelve_clients_at_one_name_for_long() {
    twelve(SECOND * 30).await;
}

async fn twelve(span: Duration) {
    let t = Testbed::start(&[]).await;
    let (room, over) = (Arc::new(Room::default()), Arc::new(AtomicBool::new(false)));
    let mut workers = Vec::new();
    for _ in 0..12 {
        let driver = Arc::new(connected(&t.server.url()).await);
        let client = Client::builder(Arc::clone(&driver) as Arc<dyn DistributedLock>);
        let lock = client.build().unwrap().lock("one").unwrap();
        let (room, over) = (Arc::clone(&room), Arc::clone(&over));
        workers.push(tokio::spawn(async move {
            while !over.load(Ordering::Relaxed) {
                let guard = lock.acquire().await.expect("no deadlock reaches a caller");
                room.visit(&guard).await;
                guard.release().await.expect("no deadlock reaches a caller");
            }
            driver.repeats()
        }));
    }
    tokio::time::sleep(span).await; // the clients contend meanwhile
    over.store(true, Ordering::Relaxed);
    let mut repeats = 0;
    for worker in workers {
        repeats += worker.await.unwrap();
    }
    let cycles = room.cycles();
    println!("{cycles} cycles of 12 clients in {span:?}, {repeats} statements sent again");
    assert!(cycles > 50);
}
