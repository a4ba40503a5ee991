//! Many concurrent tasks of a few clients, whose requests are batched.

use super::{
    SECOND,
    bed::{Testbed, run},
};
use dlock_core::driver::{Acquired, DistributedLock, Release, Released};
use std::{sync::Arc, time::Instant};

#[tokio::test(flavor = "multi_thread")]
async fn those_who_ask_at_the_same_time_share_statements() {
    let t = Testbed::start(&[]).await;
    for at in 0..128 {
        t.release(&t.taken(&format!("n{at}")).await).await;
    }
    let before = t.counters().await;
    let cycles: Vec<_> = (0..128)
        .map(|at| {
            let driver = Arc::clone(&t.driver);
            let asks: Vec<_> = (0..20)
                .map(|_| t.patient(&format!("n{at}"), SECOND * 30))
                .collect();
            tokio::spawn(async move {
                for ask in asks {
                    let acquired = driver.acquire(&ask).await.unwrap();
                    assert!(matches!(acquired, Acquired::Granted(_)), "{acquired:?}");
                    let released = driver
                        .release(&Release::new(ask.name.clone(), ask.owner, ask.hold))
                        .await
                        .unwrap();
                    assert!(matches!(released, Released::Freed), "{released:?}");
                }
            })
        })
        .collect();
    for cycle in cycles {
        cycle.await.unwrap();
    }
    let after = t.counters().await;
    let updates = after[0] - before[0];
    assert!(updates < 2 * 128 * 20, "{updates} updates");
    println!("{updates} updates for {} cycles", 128 * 20);
    for at in 0..128 {
        assert!(t.inspect(&format!("n{at}")).await.holders.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_delays_those_who_ask_for_others_by_a_second_or_so() {
    let t = Testbed::start(&[]).await;
    for at in 0..40 {
        t.release(&t.taken(&format!("n{at}")).await).await;
    }
    let mut blocker = t.blocker("n7").await;
    let began = Instant::now();
    let asked: Vec<_> = (0..40)
        .map(|at| {
            let (driver, ask) = (Arc::clone(&t.driver), t.ask(&format!("n{at}"), SECOND * 30));
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    for (at, asked) in asked.into_iter().enumerate() {
        if at == 7 {
            continue;
        }
        let acquired = asked.await.unwrap().unwrap();
        assert!(
            matches!(acquired, Acquired::Granted(_)),
            "{at}: {acquired:?}"
        );
    }
    // One batch waits for the row once; not each request that shared a batch with it.
    assert!(began.elapsed() < SECOND * 8, "{:?}", began.elapsed());
    run(&mut blocker, "ROLLBACK").await;
    t.until("its own acquire gets through", async |t: &Testbed| {
        !t.inspect("n7").await.holders.is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_at_shared_names_is_never_two_inside_though_server_and_sessions_are_killed() {
    let t = Testbed::start(&[]).await;
    let crowd = t.crowd(3, 40, 70).await;
    for round in 1..=6 {
        crowd.goes_on(400).await;
        if round == 3 {
            tokio::task::block_in_place(|| t.server.managed().unwrap().restart()).unwrap();
        } else {
            t.kill_all().await;
        }
    }
    crowd.ends().await;
}
