//! A table that is dropped, emptied, renamed, rebuilt, or foreign.

use super::{SECOND, bed::Testbed};
use dlock_conformance::under_test::{lasts, named};
use dlock_core::{
    Broken, Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, Released, Renewed},
};
use dlock_mysql::{MysqlConfig, MysqlDriver, sqlx};
use std::sync::atomic::{AtomicBool, Ordering};

#[tokio::test(flavor = "multi_thread")]
async fn a_table_dropped_while_in_use_is_made_again_and_every_hold_is_over() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("a", SECOND * 30);
    let first = t.granted(&held).await;
    t.admin("DROP TABLE dlock_locks").await;
    assert!(matches!(
        t.renew(std::slice::from_ref(&held), SECOND * 30)
            .await
            .unwrap()[0],
        Ok(Renewed::NotHeld)
    ));
    t.admin("DROP TABLE dlock_locks").await;
    assert!(t.granted(&t.ask("a", SECOND * 30)).await.token > first.token);
    let config: MysqlConfig = t.server.url().parse().unwrap();
    let strict = MysqlDriver::open(config.with_create(false)).await.unwrap();
    t.admin("DROP TABLE dlock_locks").await;
    let error = strict.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(error.retry(), RetryClass::Never);
    assert!(error.to_string().contains("dlock schema"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_rebuilt_while_in_use_loses_nothing_and_reaches_no_caller() {
    let t = Testbed::start(&[]).await;
    let held = t.taken("held").await;
    let rebuilding = async {
        for _ in 0..5 {
            t.admin("ALTER TABLE dlock_locks ENGINE = InnoDB").await;
        }
    };
    let over = AtomicBool::new(false);
    let cycles = async {
        while !over.load(Ordering::Relaxed) {
            let ask = t.taken("cycle").await;
            assert!(matches!(t.release(&ask).await, Released::Freed));
            // A renewal that had to wait for a second did nothing, and the core sends it again.
            match t.renew(std::slice::from_ref(&held), SECOND * 30).await {
                Ok(renewed) => assert!(lasts(&renewed[0], SECOND * 30), "{renewed:?}"),
                Err(error) => assert_eq!(error.effect(), Effect::None, "{error}"),
            }
        }
    };
    tokio::join!(cycles, async {
        rebuilding.await;
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(t.inspect("held").await.holds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_away_for_a_while_keeps_its_locks() {
    let t = Testbed::start(&[]).await;
    let held = t.taken("a").await;
    let config: MysqlConfig = t.server.url().parse().unwrap();
    let strict = MysqlDriver::open(config.with_create(false)).await.unwrap();
    t.admin("RENAME TABLE dlock_locks TO elsewhere").await;
    let error = strict.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error}"
    );
    t.admin("RENAME TABLE elsewhere TO dlock_locks").await;
    let shown = strict.inspect(&held.name).await.unwrap();
    assert_eq!(shown.holders[0].owner, held.owner.fingerprint());
    assert!(matches!(
        strict.acquire(&t.ask("a", SECOND)).await.unwrap(),
        Acquired::Held(_)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_emptied_while_in_use_holds_nothing_and_tokens_grow() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("a", SECOND * 30);
    let first = t.granted(&held).await;
    t.admin("TRUNCATE TABLE dlock_locks").await;
    assert!(matches!(
        t.renew(std::slice::from_ref(&held), SECOND * 30)
            .await
            .unwrap()[0],
        Ok(Renewed::NotHeld)
    ));
    assert!(matches!(
        t.release(&held).await,
        Released::NotHeld { by: None }
    ));
    assert!(t.granted(&t.ask("a", SECOND * 30)).await.token > first.token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_table_is_refused_with_the_difference_and_left_alone() {
    let t = Testbed::start(&[]).await;
    let shedlock = "CREATE TABLE shedlock (name VARCHAR(64) NOT NULL PRIMARY KEY, lock_until TIMESTAMP(3) NOT NULL, \
        locked_at TIMESTAMP(3) NOT NULL, locked_by VARCHAR(255) NOT NULL) CHARACTER SET latin1";
    t.admin(shedlock).await;
    t.admin("ALTER TABLE dlock_locks ADD UNIQUE (owner)").await;
    for (table, word) in [
        (
            "shedlock",
            "name is VARCHAR(64) NOT NULL instead of VARBINARY(512) NOT NULL",
        ),
        ("shedlock", "locked_by is not ours"),
        ("dlock_locks", "owner has an index"),
    ] {
        let url = format!("{}?dlock.table={table}", t.server.url());
        let error = MysqlDriver::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains(word), "{error}");
    }
    let mut native = t.native().await;
    let columns = sqlx::query("SHOW COLUMNS FROM shedlock")
        .fetch_all(&mut native)
        .await
        .unwrap();
    assert_eq!(columns.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_shows_a_damaged_row_and_goes_on_and_break_frees_it() {
    let t = Testbed::start(&[]).await;
    for name in ["a", "b", "c", "d", "e"] {
        t.taken(name).await;
    }
    for sql in [
        "UPDATE dlock_locks SET holds = 'zzz' WHERE name = 'b'",
        "UPDATE dlock_locks SET note = x'ff' WHERE name = 'c'",
        // A row past its end is free, whatever else it says; a row without a legal name is no lock.
        "UPDATE dlock_locks SET holds = 'zzz', expires = 1 WHERE name = 'd'",
        "UPDATE dlock_locks SET name = x'64ff' WHERE name = 'e'",
    ] {
        t.admin(sql).await;
    }
    for limit in [1, 2, 100] {
        let (mut found, mut from) = (Vec::new(), None);
        loop {
            let page = t.driver.list("", from.as_ref(), limit).await.unwrap();
            found.extend(page.found);
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        let damaged = found
            .iter()
            .map(|one| (one.name.as_str(), one.damaged.is_some(), one.holds));
        let wanted = [("a", false, 1), ("b", true, 0), ("c", true, 0)];
        assert_eq!(damaged.collect::<Vec<_>>(), wanted);
    }
    let broken = t.driver.break_lock(&named("b"), None).await.unwrap();
    assert!(matches!(broken, Broken::Freed { .. }), "{broken:?}");
    t.taken("b").await;
}
