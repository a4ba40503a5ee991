//! Sessions that are killed, refused, or on a read-only server.

use super::{
    SECOND,
    bed::{Testbed, connected, run},
};
use dlock_conformance::under_test::ended_sessions_are_replaced;
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, Lane, Renewed},
};
use dlock_mysql::{
    MysqlDriver,
    sqlx::{Connection, MySqlConnection},
};
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced_whatever_it_was_for() {
    let t = Testbed::start(&[]).await;
    ended_sessions_are_replaced(&t, async || t.kill_all().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_killed_again_and_again_admit_one_holder_at_a_time() {
    let t = Testbed::start(&[]).await;
    let crowd = t.crowd(6, 1, 1).await;
    for _ in 0..20 {
        crowd.goes_on(5).await;
        t.kill_all().await;
    }
    crowd.ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_killed_while_it_waits_has_done_nothing() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    for how in ["KILL QUERY", "KILL"] {
        let mut blocker = t.blocker("a").await;
        let ask = t.ask("a", SECOND * 30);
        let asked = tokio::spawn({
            let (driver, ask) = (Arc::clone(&t.driver), ask.clone());
            async move { driver.acquire(&ask).await }
        });
        t.until("the statement waits", async |t: &Testbed| {
            t.waiting().await == 1
        })
        .await;
        t.kill_waiting(how).await;
        let error = asked.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{how}: {error}");
        run(&mut blocker, "ROLLBACK").await;
        assert!(t.inspect("a").await.holders.is_empty(), "{how}");
        let taken = t.taken("a").await;
        t.release(&taken).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_becomes_read_only_refuses_and_serves_again_later() {
    let t = Testbed::start(&[]).await;
    t.locker().await;
    let driver = connected(&t.locker_url()).await;
    let ask = t.ask("a", SECOND * 30);
    driver.acquire(&ask).await.unwrap();
    t.admin("SET GLOBAL read_only = 1").await;
    let mut late = t.ask("b", SECOND * 30);
    late.give_up = t.clock.now() + SECOND;
    let error = driver.acquire(&late).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error}"
    );
    assert!(error.to_string().contains("read-only"), "{error}");
    let refused = MysqlDriver::connect(&t.locker_url()).await.unwrap_err();
    assert!(refused.to_string().contains("read_only = ON"), "{refused}");
    // A user that may write despite `read_only` is refused too, since the server is still a replica.
    let refused = MysqlDriver::connect(&t.server.url()).await.unwrap_err();
    assert!(
        refused.to_string().contains("connect to the primary"),
        "{refused}"
    );
    t.admin("SET GLOBAL read_only = 0").await;
    assert!(matches!(
        driver.acquire(&t.ask("b", SECOND)).await.unwrap(),
        Acquired::Granted(_)
    ));
    assert!(
        matches!(driver.acquire(&ask).await.unwrap(), Acquired::Granted(grant) if grant.holds.get() == 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_says_of_a_user_it_limits_is_understood() {
    let t = Testbed::start(&[]).await;
    t.locker().await;
    for (limit, lift, retry, word) in [
        (
            "ALTER USER locker@'%' WITH MAX_QUERIES_PER_HOUR 2",
            "ALTER USER locker@'%' WITH MAX_QUERIES_PER_HOUR 0",
            RetryClass::Later,
            "over one of its limits",
        ),
        (
            "SET GLOBAL max_prepared_stmt_count = 0",
            "SET GLOBAL max_prepared_stmt_count = 16382",
            RetryClass::Later,
            "no prepared statement left",
        ),
        (
            "SET GLOBAL init_connect = 'SET nonsense = 1'",
            "SET GLOBAL init_connect = ''",
            RetryClass::Later,
            "while it was being made",
        ),
        (
            "REVOKE ALL ON dlock.dlock_locks FROM locker@'%'",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON dlock.dlock_locks TO locker@'%'",
            RetryClass::Never,
            "dlock schema",
        ),
    ] {
        t.admin(limit).await;
        let tried = async {
            let driver = MysqlDriver::connect(&t.locker_url()).await?;
            let first = t.ask("a", SECOND * 30);
            driver.acquire(&first).await.map(drop)
        };
        let error = tried.await.expect_err(limit);
        assert!(error.to_string().contains(word), "{limit}: {error:?}");
        assert_eq!(
            (error.retry(), error.effect()),
            (retry, Effect::None),
            "{limit}"
        );
        t.admin(lift).await;
        let driver = connected(&t.locker_url()).await;
        let ask = t.ask(limit, SECOND * 30);
        assert!(matches!(
            driver.acquire(&ask).await.unwrap(),
            Acquired::Granted(_)
        ));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_connection_is_left_requests_share_what_there_is() {
    let t = Testbed::start(&["--max-connections=10"]).await;
    t.locker().await;
    let driver = Arc::new(connected(&t.locker_url()).await);
    let mut others = Vec::new();
    while let Ok(native) = MySqlConnection::connect(&t.locker_url()).await {
        others.push(native);
    }
    let refused = MysqlDriver::connect(&t.locker_url()).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.retry()),
        (ErrorKind::Unavailable, RetryClass::Later)
    );
    assert!(refused.to_string().contains("max_connections"), "{refused}");
    let asked: Vec<_> = (0..30)
        .map(|at| {
            let ask = t.patient(&format!("n{at}"), SECOND * 30);
            let driver = Arc::clone(&driver);
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    for asked in asked {
        let acquired = asked.await.unwrap();
        assert!(matches!(acquired, Ok(Acquired::Granted(_))), "{acquired:?}");
    }
    let held = t.ask("held", SECOND * 30);
    let acquired = driver.acquire(&held).await;
    assert!(matches!(acquired, Ok(Acquired::Granted(_))), "{acquired:?}");
    // No other session that ended meanwhile leaves room for one more.
    while let Ok(native) = MySqlConnection::connect(&t.locker_url()).await {
        others.push(native);
    }
    let batch = [t.entry(&held, SECOND * 60)];
    let renewed = driver.renew(Lane::default(), &batch, t.give_up()).await;
    assert!(matches!(renewed.unwrap()[0], Ok(Renewed::Until { .. })));
}
