//! How many statements there are, and what happens where they meet.

use super::{SECOND, bed::Testbed};
use dlock_core::{Client, DistributedLock, Owner, Released, Renewed};
use dlock_mysql::MysqlDriver;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_cycle_is_two_statements_and_neither_reads() {
    let t = Testbed::start(&[]).await;
    let ask = t.ask("a", SECOND * 30);
    t.granted(&ask).await;
    t.release(&ask).await;
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
    assert_eq!(spent, [200, 0, 0, 0], "updates, inserts, deletes, selects");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_of_many_is_one_statement_and_each_is_judged_alone() {
    let t = Testbed::start(&[]).await;
    let mut asks = Vec::new();
    for at in 0..70 {
        let ask = t.ask(&format!("n{at}"), SECOND * 5);
        t.granted(&ask).await;
        asks.push(ask);
    }
    let before = t.counters().await;
    let all = t.renew(&asks, SECOND * 40).await;
    assert!(all.iter().all(|renewed| t.lasts(renewed, SECOND * 40)));
    assert_eq!(t.counters().await[0] - before[0], 1);
    // One is gone, one has a second hold, one is somebody else's.
    t.release(&asks[3]).await;
    t.granted(&t.again(&asks[5], SECOND * 90)).await;
    asks[7].owner = Owner::from_seed("stranger");
    let mixed = t.renew(&asks, SECOND * 60).await;
    for (at, renewed) in mixed.iter().enumerate() {
        match at {
            3 | 7 => assert!(matches!(renewed, Ok(Renewed::NotHeld)), "{at}: {renewed:?}"),
            _ => assert!(t.lasts(renewed, SECOND * 60), "{at}: {renewed:?}"),
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
    let (inside, over) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let last = Arc::new(AtomicU64::new(0));
    let mut workers = Vec::new();
    for _ in 0..12 {
        let driver = Arc::new(MysqlDriver::connect(&t.server.url()).await.unwrap());
        let client = Client::builder(Arc::clone(&driver) as Arc<dyn DistributedLock>)
            .build()
            .unwrap();
        let (inside, over, last) = (Arc::clone(&inside), Arc::clone(&over), Arc::clone(&last));
        workers.push(tokio::spawn(async move {
            let mut cycles = 0_u32;
            while !over.load(Ordering::Relaxed) {
                let guard = client
                    .lock("one")
                    .unwrap()
                    .acquire()
                    .await
                    .expect("no deadlock reaches a caller");
                assert!(!inside.swap(true, Ordering::SeqCst), "two were inside");
                let token = guard.token().0;
                assert!(last.swap(token, Ordering::SeqCst) < token, "tokens grow");
                inside.store(false, Ordering::SeqCst);
                guard.release().await.expect("no deadlock reaches a caller");
                cycles += 1;
            }
            (cycles, driver.repeats())
        }));
    }
    tokio::time::sleep(span).await;
    over.store(true, Ordering::Relaxed);
    let (mut cycles, mut repeats) = (0, 0);
    for worker in workers {
        let (own, again) = worker.await.unwrap();
        cycles += own;
        repeats += again;
    }
    println!("{cycles} cycles of 12 clients in {span:?}, {repeats} statements sent again");
    assert!(cycles > 50);
}
