//! An open transaction that keeps old versions of rows, beside many renewals.

use super::{
    SECOND,
    bed::{Testbed, one, run, warnings, warnings_of_connecting},
};
use dlock_conformance::under_test::lasts;
use dlock_core::driver::{
    Acquired, DistributedLock,
    kit::{RecordBacked, RecordStore},
};
use futures_util::future::join_all;
use std::time::{Duration, Instant};

const LOCKS: usize = 1000;
const ROUNDS: usize = 40;
/// The driver's renewals of one statement.
const BATCH: usize = 128;
const LEASE: Duration = SECOND.saturating_mul(600);

#[tokio::test]
async fn a_thousand_leases_are_renewed_beside_an_old_snapshot_and_it_is_warned_about() {
    let t = Testbed::start(&["fsync=on"]).await;
    let asks: Vec<_> = (0..LOCKS)
        .map(|at| t.patient(&format!("n{at}"), LEASE))
        .collect();
    for some in asks.chunks(16) {
        for acquired in join_all(some.iter().map(|ask| t.driver.acquire(ask))).await {
            assert!(matches!(acquired, Ok(Acquired::Granted(_))), "{acquired:?}");
        }
    }
    let mut forgotten = t.native().await;
    run(
        &mut forgotten,
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM dlock_locks",
    )
    .await;
    let mut slowest = Vec::new();
    for _ in 0..ROUNDS {
        let mut longest = Duration::ZERO;
        for batch in asks.chunks(BATCH) {
            let began = Instant::now();
            let renewed = t.renew(batch, LEASE).await.unwrap();
            longest = longest.max(began.elapsed());
            for (ask, renewed) in batch.iter().zip(&renewed) {
                assert!(lasts(renewed, LEASE), "{}: {renewed:?}", ask.name);
            }
        }
        slowest.push(longest);
    }
    let (early, late) = slowest.split_at(ROUNDS / 2);
    println!(
        "slowest batch of {BATCH}: {:?} in the first {} rounds, {:?} in the last",
        early.iter().max(),
        early.len(),
        late.iter().max()
    );
    // None of the old versions can be removed.
    run(&mut t.native().await, "VACUUM dlock_locks").await;
    t.until("the server has counted them", async |t: &Testbed| {
        dead(t).await >= 10_000
    })
    .await;
    // Each new client is warned, and an earlier one when its grants sweep the table; once.
    let sweep = || async {
        let store = t.driver.record_driver().store();
        store.forget(b"").await.unwrap();
    };
    let text = warnings_of_connecting(&t.server.url()).await;
    assert!(is_warning(&text), "{text}");
    let text = warnings(sweep()).await;
    assert!(is_warning(&text), "{text}");
    let text = warnings(sweep()).await;
    assert!(!is_warning(&text), "{text}");
    run(&mut forgotten, "ROLLBACK").await;
    t.until("they are removed", async |t: &Testbed| {
        run(&mut t.native().await, "VACUUM dlock_locks").await;
        dead(t).await < 10_000
    })
    .await;
    let text = warnings_of_connecting(&t.server.url()).await;
    assert!(!is_warning(&text), "{text}");
    let renewed = t.renew(&asks[..BATCH], LEASE).await.unwrap();
    assert!(renewed.iter().all(|one| lasts(one, LEASE)));
}

fn is_warning(text: &str) -> bool {
    text.contains("dead row versions") && text.contains("pg_stat_activity")
}

async fn dead(t: &Testbed) -> i64 {
    let sql = "SELECT pg_stat_get_dead_tuples('dlock_locks'::regclass)";
    one(&mut t.native().await, sql).await
}
