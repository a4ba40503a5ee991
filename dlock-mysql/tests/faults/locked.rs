//! Rows, tables and whole servers that another session has locked.

use super::{
    LATE, SECOND,
    bed::{Testbed, run},
};
use dlock_conformance::under_test::{Waiting, lasts};
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, Lane, Renew, Renewed},
};
use std::{sync::Arc, time::Duration};

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_costs_only_its_own_renewal() {
    let t = Testbed::start(&[]).await;
    let mut asks = Vec::new();
    for at in 0..40 {
        let ask = t.ask(&format!("n{at}"), SECOND * 20);
        t.granted(&ask).await;
        asks.push(ask);
    }
    let mut blocker = t.blocker("n17").await;
    let began = std::time::Instant::now();
    let renewed = t.renew(&asks, SECOND * 60).await.unwrap();
    let took = began.elapsed();
    for (at, renewed) in renewed.iter().enumerate() {
        match renewed {
            Err(error) if at == 17 => {
                assert_eq!(
                    (error.kind(), error.effect()),
                    (ErrorKind::Unavailable, Effect::None),
                    "{error}"
                );
            }
            renewed => assert!(lasts(renewed, SECOND * 60), "{at}: {renewed:?}"),
        }
    }
    assert!(
        took < SECOND * 8,
        "{took:?}: one wait of a second, not one for each half"
    );
    run(&mut blocker, "ROLLBACK").await;
    assert!(lasts(
        &t.renew(&asks[17..18], SECOND * 60).await.unwrap()[0],
        SECOND * 60
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_costs_only_its_own_renewal_of_a_short_lease_too() {
    let t = Testbed::start(&[]).await;
    let lock = async |name: &str| t.blocker(name).await;
    let (left, mut blocker) = t.renews_all_but_the_locked(lock).await;
    // One that has no row is no locked one.
    let gone = [
        t.entry(&left, SECOND * 60),
        t.entry(&t.ask("gone", SECOND), SECOND * 60),
    ];
    let give_up = t.clock.now() + SECOND * 5 / 4;
    let renewed = t
        .driver
        .renew(Lane::default(), &gone, give_up)
        .await
        .unwrap();
    assert!(matches!(renewed[1], Ok(Renewed::NotHeld)), "{renewed:?}");
    run(&mut blocker, "ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_do_not_queue_behind_those_who_wait_for_a_row() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("held", SECOND * 30);
    t.granted(&held).await;
    // A hold that is only proven is read, over the same connections.
    let fixed = t.taken("fixed").await;
    let proof = Renew::new(fixed.name.clone(), fixed.owner, fixed.hold, None);
    let batch = [t.entry(&held, SECOND * 60), proof];
    t.release(&t.taken("stuck").await).await;
    let mut blocker = t.blocker("stuck").await;
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let (driver, ask) = (Arc::clone(&t.driver), t.patient("stuck", SECOND * 30));
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    t.until("statements wait for the row", async |t: &Testbed| {
        t.waiting().await >= 16
    })
    .await;
    // Without separate connections each would queue for seconds; on a busy machine, one quick answer is
    // enough.
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let began = std::time::Instant::now();
        let renewed = t.driver.renew(Lane::default(), &batch, t.give_up()).await;
        let renewed = renewed.unwrap();
        assert!(lasts(&renewed[0], SECOND * 60), "{renewed:?}");
        assert!(
            matches!(renewed[1], Ok(Renewed::Until { .. })),
            "{renewed:?}"
        );
        quickest = quickest.min(began.elapsed());
    }
    assert!(quickest < SECOND, "{quickest:?}");
    run(&mut blocker, "ROLLBACK").await;
    let mut granted = 0;
    for waiting in waiting {
        granted += u32::from(matches!(waiting.await.unwrap(), Ok(Acquired::Granted(_))));
    }
    assert_eq!(granted, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_row_is_repeated_while_there_is_time_and_then_refused() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    let mut blocker = t.blocker("a").await;
    let mut ask = t.ask("a", SECOND * 30);
    ask.give_up = t.clock.now() + SECOND * 4;
    let error = t.driver.acquire(&ask).await.unwrap_err();
    // After a stall the last attempt may come too late to wait for the row.
    let text = error.to_string();
    let is_late = text.contains("too late") || text.contains("at every attempt");
    let retry = if is_late {
        RetryClass::Now
    } else {
        RetryClass::Later
    };
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, retry, Effect::None),
        "{text}"
    );
    assert!(t.driver.repeats() > 0);
    let (patient, before) = (t.ask("a", SECOND * 30), t.driver.repeats());
    let granted = tokio::spawn({
        let (driver, ask) = (Arc::clone(&t.driver), patient.clone());
        async move { driver.acquire(&ask).await }
    });
    t.until("it was refused and is sent again", async |t: &Testbed| {
        t.driver.repeats() > before
    })
    .await;
    run(&mut blocker, "ROLLBACK").await;
    assert!(matches!(
        granted.await.unwrap().unwrap(),
        Acquired::Granted(_)
    ));
    assert_eq!(t.inspect("a").await.holds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_joins_what_is_over_by_the_second_try_is_told_that_it_is_gone() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("a", SECOND * 30);
    let token = t.granted(&held).await.token;
    let mut blocker = t.blocker("a").await;
    let mut joining = t.again(&held, SECOND * 30);
    joining.join = Some(token);
    let joined = tokio::spawn({
        let driver = Arc::clone(&t.driver);
        async move { driver.acquire(&joining).await }
    });
    t.until("it has found the row held", async |t: &Testbed| {
        t.waiting().await == 1
    })
    .await;
    // As a release does.
    run(
        &mut blocker,
        "UPDATE dlock_locks SET expires = 0, version = version + 1 WHERE name = 'a'",
    )
    .await;
    run(&mut blocker, "COMMIT").await;
    let joined = joined.await.unwrap().unwrap();
    assert!(matches!(joined, Acquired::Gone), "{joined:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_with_a_foreign_transaction_is_reported_as_a_locked_row_and_ends_soon() {
    let t = Testbed::start(&[]).await;
    let held = [t.taken("a").await, t.taken("b").await];
    let mut blocker = t.native().await;
    run(&mut blocker, "CREATE TABLE weight (id INT PRIMARY KEY)").await;
    run(&mut blocker, "BEGIN").await;
    // The server ends the transaction that changed least, so it is not this one.
    run(
        &mut blocker,
        "INSERT INTO weight VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9)",
    )
    .await;
    run(
        &mut blocker,
        "UPDATE dlock_locks SET note = 'x' WHERE name = 'b'",
    )
    .await;
    // It waits for a second, in which there may be no time to log in.
    let mut watcher = t.native().await;
    let renewing = t.renew(&held, SECOND * 60);
    let closing = async {
        let waiting = Waiting::new("the renewal waits for the second row");
        loop {
            waiting.pause().await;
            if t.waiting_ids(&mut watcher).await.len() == 1 {
                break;
            }
        }
        run(
            &mut blocker,
            "UPDATE dlock_locks SET note = 'x' WHERE name = 'a'",
        )
        .await;
    };
    let (renewed, ()) = tokio::join!(renewing, closing);
    let error = renewed.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error}"
    );
    assert!(error.to_string().contains("locked"), "{error}");
    assert!(t.driver.repeats() > 0);
    run(&mut blocker, "ROLLBACK").await;
    for renewed in t.renew(&held, SECOND * 60).await.unwrap() {
        assert!(lasts(&renewed, SECOND * 60), "{renewed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_lasts_is_taken_behind_a_global_lock() {
    behind("FLUSH TABLES WITH READ LOCK", "UNLOCK TABLES").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_lasts_is_taken_behind_a_locked_table() {
    behind("LOCK TABLES dlock_locks WRITE", "UNLOCK TABLES").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_lasts_is_taken_behind_locked_rows() {
    behind("BEGIN; SELECT * FROM dlock_locks FOR UPDATE", "ROLLBACK").await;
}

/// Another session locks everything for five seconds. Acquires that gave up before then take nothing
/// afterwards, and a held lease ends by time alone.
async fn behind(lock: &'static str, unlock: &'static str) {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("row").await).await;
    let held = t.taken("held").await;
    let mut blocker = t.native().await;
    run(&mut blocker, lock).await;
    let locked = std::time::Instant::now();
    let mut asked = Vec::new();
    for name in ["row", "new"] {
        let mut ask = t.ask(name, SECOND * 60);
        ask.give_up = t.clock.now() + SECOND / 2;
        let driver = Arc::clone(&t.driver);
        asked.push(tokio::spawn(async move { driver.acquire(&ask).await }));
    }
    for asked in asked {
        let error = asked.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    let give_up = t.clock.now() + SECOND;
    let renewed = t
        .driver
        .renew(Lane::default(), &[t.entry(&held, SECOND * 90)], give_up)
        .await;
    assert!(renewed.is_err(), "{renewed:?}");
    // The lock lasts this long, and any statement of the given-up acquires that the server still has would
    // run by then.
    tokio::time::sleep((SECOND * 5).saturating_sub(locked.elapsed())).await;
    run(&mut blocker, unlock).await;
    tokio::time::sleep(LATE).await;
    for name in ["row", "new"] {
        assert!(t.inspect(name).await.holders.is_empty(), "{name}");
    }
    assert!(t.rest("held").await < SECOND * 30);
    t.taken("new").await;
}
