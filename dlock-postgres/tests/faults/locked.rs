//! Rows and tables that another session has locked, and the limits of roles.

use super::{
    SECOND,
    bed::{Testbed, connected, run},
};
use dlock_conformance::under_test::{granted, lasts};
use dlock_core::{
    Effect, ErrorKind,
    driver::{Acquire, Acquired, DistributedLock, Released},
};
use futures_util::future::join_all;
use std::{sync::Arc, time::Duration};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_taken_behind_a_strangers_row() {
    behind("SELECT FROM dlock_locks FOR UPDATE").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_taken_behind_a_locked_table() {
    behind("LOCK TABLE dlock_locks").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_taken_behind_a_table_that_is_altered() {
    behind("ALTER TABLE dlock_locks ADD COLUMN theirs int").await;
}

/// Another session locks everything until the server works on no request any more. What gave up before then has taken
/// nothing and takes nothing, and a lease that could not be renewed keeps its end.
async fn behind(lock: &str) {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("row").await).await;
    let held = t.taken("held").await;
    let mut blocker = t.native().await;
    run(&mut blocker, "BEGIN").await;
    run(&mut blocker, lock).await;
    let mut ask = t.ask("row", SECOND * 90);
    ask.give_up = t.clock.now() + SECOND / 2;
    let asked = tokio::spawn({
        let driver = Arc::clone(&t.driver);
        async move { driver.acquire(&ask).await }
    });
    // On a busy machine it may give up before it is seen.
    t.until("it waits", async |t: &Testbed| {
        asked.is_finished() || t.waiting().await > 0
    })
    .await;
    let renewed = t.renew(std::slice::from_ref(&held), SECOND * 600).await;
    assert!(
        !renewed.is_ok_and(|all| all.iter().any(|one| lasts(one, SECOND * 600))),
        "renewed behind {lock}"
    );
    let error = asked.await.unwrap().unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error}"
    );
    t.until("nothing is left to be executed", async |t: &Testbed| {
        t.sessions("state <> 'idle'").await == 0
    })
    .await;
    run(&mut blocker, "ROLLBACK").await;
    assert!(t.inspect("row").await.holders.is_empty());
    let rest = t.inspect("held").await.holders[0].rest.unwrap();
    assert!(rest <= SECOND * 60, "{rest:?}");
    t.taken("row").await;
}

/// The request enters beside a hold of its owner, and its write waits for the row until that hold is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_decision_about_a_living_hold_is_void_at_its_end() {
    let t = Testbed::start(&[]).await;
    let first = t.ask("row", SECOND * 2);
    let over = t.granted(&first).await.token;
    let mut blocker = t.blocker("row").await;
    let again = t.again(&first, SECOND * 60);
    let asked = tokio::spawn({
        let driver = Arc::clone(&t.driver);
        async move { granted(&*driver, &again).await }
    });
    t.until("it waits", async |t: &Testbed| t.waiting().await > 0)
        .await;
    t.until("the first is over", async |t: &Testbed| {
        t.inspect("row").await.holders.is_empty()
    })
    .await;
    run(&mut blocker, "ROLLBACK").await;
    assert!(asked.await.unwrap().token > over);
}

/// What a prepared statement sees is fixed before it waits for the table, and a rewritten table has none of the rows of
/// then.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_rewritten_while_a_request_waits_has_lost_no_lock() {
    let t = Testbed::start(&[]).await;
    let held = t.taken("held").await;
    // Their statements have been prepared on the connections that are used next.
    t.release(&t.taken("a").await).await;
    renewed(&t, &held).await;
    let mut blocker = t.native().await;
    for (is_release, rewrite) in [(false, "SET UNLOGGED"), (true, "SET LOGGED")] {
        let rewrite = format!("BEGIN; ALTER TABLE dlock_locks {rewrite}");
        run(&mut blocker, &rewrite).await;
        let request = async {
            match is_release {
                false => renewed(&t, &held).await,
                true => assert!(matches!(t.release(&held).await, Released::Freed)),
            }
        };
        let rewritten = async {
            t.until("the request waits", async |t: &Testbed| {
                t.waiting().await > 0
            })
            .await;
            run(&mut blocker, "COMMIT").await;
        };
        tokio::join!(request, rewritten);
    }
}

/// Renews a hold; again if it took too long.
async fn renewed(t: &Testbed, held: &Acquire) {
    let renewed = async || {
        let renewed = t.renew(std::slice::from_ref(held), SECOND * 60).await;
        renewed.and_then(|mut all| all.remove(0))
    };
    let mut answer = renewed().await;
    for _ in 0..10 {
        if answer.is_ok() {
            break;
        }
        answer = renewed().await;
    }
    assert!(lasts(&answer, SECOND * 60), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_costs_only_its_own_renewal_of_a_short_lease_too() {
    let t = Testbed::start(&[]).await;
    let lock = async |name: &str| t.blocker(name).await;
    let (_, mut blocker) = t.renews_all_but_the_locked(lock).await;
    run(&mut blocker, "ROLLBACK").await;
}

/// Of many requests at a time some go together.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_keeps_no_other_lock_from_being_taken_and_released() {
    let t = Testbed::start(&[]).await;
    let stuck = t.patient("stuck", SECOND * 60);
    let others: Vec<_> = (0..40)
        .map(|at| t.patient(&format!("n{at}"), SECOND * 60))
        .collect();
    let taken = || join_all(others.iter().map(|ask| t.granted(ask)));
    let released = || join_all(others.iter().map(|ask| t.release(ask)));
    t.granted(&stuck).await;
    t.release(&stuck).await;
    let mut blocker = t.blocker("stuck").await;
    let ends = async {
        taken().await;
        run(&mut blocker, "ROLLBACK").await;
    };
    tokio::join!(ends, t.granted(&stuck));
    let mut blocker = t.blocker("stuck").await;
    let ends = async {
        for released in released().await {
            assert!(matches!(released, Released::Freed), "{released:?}");
        }
        run(&mut blocker, "ROLLBACK").await;
    };
    let ((), freed) = tokio::join!(ends, t.release(&stuck));
    assert!(matches!(freed, Released::Freed), "{freed:?}");
    // Their rows are there now.
    let mut blocker = t.blocker("stuck").await;
    let ends = async {
        taken().await;
        run(&mut blocker, "ROLLBACK").await;
    };
    tokio::join!(ends, t.granted(&stuck));
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_do_not_queue_behind_acquires_of_a_locked_row() {
    let t = Testbed::start(&[]).await;
    let held = t.taken("held").await;
    t.release(&t.taken("stuck").await).await;
    let mut blocker = t.blocker("stuck").await;
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let (driver, ask) = (Arc::clone(&t.driver), t.patient("stuck", SECOND * 60));
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    t.until(
        "every connection for acquires waits",
        async |t: &Testbed| t.waiting().await >= 16,
    )
    .await;
    // Behind the others each would take seconds; on a busy machine, one quick answer is enough.
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let began = std::time::Instant::now();
        let renewed = t.renew(std::slice::from_ref(&held), SECOND * 90).await;
        assert!(lasts(&renewed.unwrap()[0], SECOND * 90));
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
async fn limits_of_a_role_end_requests_sooner_and_change_no_lock() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    for (limit, name) in [
        ("lock_timeout = '50ms'", "locks"),
        ("statement_timeout = '200ms'", "statements"),
        ("idle_in_transaction_session_timeout = '1ms'", "idle"),
    ] {
        t.admin(&format!(
            "CREATE ROLE {name} LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_locks TO {name}; ALTER ROLE {name} SET {limit}"
        ))
        .await;
        let url = t.server.url().replace("postgres@", &format!("{name}@"));
        let driver = Arc::new(connected(&url).await);
        let mut blocker = t.blocker("a").await;
        let ask = t.ask("a", SECOND * 60);
        let asked = tokio::spawn({
            let (driver, ask) = (Arc::clone(&driver), ask.clone());
            async move { driver.acquire(&ask).await }
        });
        t.until("it was refused and is sent again", async |_: &Testbed| {
            driver.repeats() > 0
        })
        .await;
        run(&mut blocker, "ROLLBACK").await;
        let acquired = asked.await.unwrap();
        assert!(
            matches!(acquired, Ok(Acquired::Granted(_))),
            "{limit}: {acquired:?}"
        );
        assert_eq!(t.inspect("a").await.holds, 1, "{limit}");
        t.release(&ask).await;
    }
}
