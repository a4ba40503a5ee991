//! Streaming replication: what a standby refuses, and what a promoted one knows.

use super::{
    SECOND,
    bed::{Testbed, connected, native, one, run, started, warnings_of_connecting},
};
use dlock_conformance::{
    testbed::{PostgresServer, Proxy, postgres::PostgresOptions, proxy::Reach},
    under_test::{granted, named},
};
use dlock_core::{
    Client, Effect, ErrorKind, Lease, LossReason,
    driver::{Acquire, Acquired, DistributedLock, DriverError},
};
use dlock_postgres::PostgresDriver;
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

/// A primary with the driver under test, and its standby behind a proxy.
struct Pair {
    t: Testbed,
    standby: PostgresServer,
    /// Between the two.
    link: Proxy,
}

impl Pair {
    async fn start() -> Self {
        let t = Testbed::start(&["fsync=on"]).await;
        let link = Proxy::start(t.server.addr()).await.unwrap();
        let standby = started(PostgresOptions {
            primary: Some(link.addr()),
            ..PostgresOptions::default()
        })
        .await;
        let pair = Self { t, standby, link };
        pair.follows("async").await;
        pair
    }

    /// Waits until the primary says of the standby that it follows in this way.
    async fn follows(&self, state: &str) {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = '{state}'"
        );
        self.t
            .until("the standby follows", async |t: &Testbed| {
                one(&mut t.native().await, &sql).await == 1
            })
            .await;
    }

    /// Every commit waits for the standby from now on.
    async fn synchronous(&self) {
        for sql in [
            "ALTER SYSTEM SET synchronous_standby_names = '*'",
            "SELECT pg_reload_conf()",
        ] {
            self.t.admin(sql).await;
        }
        self.follows("sync").await;
    }

    /// Waits until the standby shows what the primary has committed.
    async fn has_caught_up(&self) {
        let sql =
            "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()";
        self.t
            .until("the standby has caught up", async |t: &Testbed| {
                one(&mut t.native().await, sql).await == 1
            })
            .await;
    }

    /// The standby's driver, once it is a primary.
    async fn promoted(&self) -> PostgresDriver {
        run(&mut native(&self.standby).await, "SELECT pg_promote()").await;
        connected(&self.standby.url()).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_refuses_to_connect_and_serves_once_it_is_promoted() {
    let pair = Pair::start().await;
    pair.t.taken("a").await;
    pair.has_caught_up().await;
    let error = PostgresDriver::connect(&pair.standby.url())
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None),
        "{error}"
    );
    assert!(
        error.to_string().contains("connect to the primary"),
        "{error}"
    );
    let driver = pair.promoted().await;
    let refused = driver.acquire(&pair.t.ask("a", SECOND)).await.unwrap();
    assert!(matches!(refused, Acquired::Held(_)), "{refused:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_standby_that_no_commit_waits_for_is_warned_about() {
    let pair = Pair::start().await;
    pair.t
        .admin("CREATE ROLE locker LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_locks TO locker")
        .await;
    let urls = ["postgres", "locker"].map(|user| {
        let user = format!("{user}@");
        pair.t.server.url().replace("postgres@", &user)
    });
    for url in &urls {
        let text = warnings_of_connecting(url).await;
        assert!(text.contains("a standby follows asynchronously"), "{text}");
        assert!(text.contains("synchronous_standby_names"), "{text}");
    }
    pair.synchronous().await;
    for url in &urls {
        let text = warnings_of_connecting(url).await;
        assert!(!text.contains("WARN"), "{text}");
    }
}

/// The declared limit: nothing of dlock's bounds how long both hold while the old primary lives, and the holder's lease
/// does once it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_asynchronous_standby_grants_again_what_it_lacks() {
    const LEASE: std::time::Duration = SECOND.saturating_mul(8);
    let pair = Pair::start().await;
    let known = pair.t.taken("known").await;
    pair.has_caught_up().await;
    pair.link.blackhole(Reach::All, true);
    let client = Client::builder(Arc::clone(&pair.t.driver) as Arc<dyn DistributedLock>)
        .build()
        .unwrap();
    let lock = client.lock("late").unwrap().lease(Lease::renewed(LEASE));
    let guard = lock.acquire().await.unwrap();

    let next = pair.promoted().await;
    let refused = next.acquire(&pair.t.ask("known", SECOND)).await.unwrap();
    assert!(matches!(refused, Acquired::Held(_)), "{refused:?}");
    let second = granted(&next, &pair.t.ask("late", SECOND * 600)).await;
    let both = Instant::now();
    // The resource refuses the first holder's writes: the second token is greater by the clock.
    assert!(second.token > guard.token());
    // The old primary renews on.
    let renewed = pair.t.renew(std::slice::from_ref(&known), LEASE).await;
    renewed.unwrap().remove(0).unwrap();
    guard.check().unwrap();
    pair.t.server.managed().unwrap().kill().unwrap();
    let killed = Instant::now();
    assert_eq!(guard.lost().await, LossReason::Deadline);
    let (alone, together) = (killed.elapsed(), both.elapsed());
    assert!(alone <= LEASE + SECOND, "{alone:?}");
    println!("two holders for {together:?}, {alone:?} of it after the old primary was killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_synchronous_standby_has_every_lock_that_was_granted() {
    let pair = Pair::start().await;
    pair.synchronous().await;
    let taken: Arc<Mutex<Vec<(Acquire, u64)>>> = Arc::default();
    let mut workers = Vec::new();
    for worker in 0..8 {
        let asks: Vec<_> = (0..2000)
            .map(|at| pair.t.ask(&format!("{worker}.{at}"), SECOND * 600))
            .collect();
        let (driver, taken) = (Arc::clone(&pair.t.driver), Arc::clone(&taken));
        workers.push(tokio::spawn(async move {
            for ask in asks {
                match driver.acquire(&ask).await {
                    Ok(Acquired::Granted(grant)) => {
                        taken.lock().unwrap().push((ask, grant.token.0));
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => return,
                }
            }
            panic!("the server was not killed in time");
        }));
    }
    pair.t
        .until("a hundred locks are taken", async |_: &Testbed| {
            taken.lock().unwrap().len() >= 100
        })
        .await;
    pair.t.server.managed().unwrap().kill().unwrap();
    for worker in workers {
        worker.await.unwrap();
    }
    let next = pair.promoted().await;
    let taken = std::mem::take(&mut *taken.lock().unwrap());
    println!("{} locks were granted", taken.len());
    for (ask, token) in taken {
        let shown = next.inspect(&ask.name).await.unwrap();
        assert_eq!(shown.holders.len(), 1, "{shown:?}");
        assert_eq!(shown.holders[0].owner, ask.owner.fingerprint());
        assert_eq!(shown.holders[0].token.map(|token| token.0), Some(token));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_its_standby_takes_effect_with_its_old_end() {
    let pair = Pair::start().await;
    let t = &pair.t;
    pair.synchronous().await;
    t.release(&t.taken("row").await).await;
    pair.link.blackhole(Reach::All, true);
    let ask = t.ask("row", SECOND * 120);
    // Its commit waits without a limit; the client gives it up.
    let error = t.driver.acquire(&ask).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::Unknown),
        "{error}"
    );
    t.until("it still waits", async |t: &Testbed| {
        t.sessions("wait_event = 'SyncRep'").await == 1
    })
    .await;
    let time = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
    let given_up = one(&mut t.native().await, time).await;
    // Meanwhile no other owner gets in.
    let mut other = t.ask("row", SECOND);
    other.give_up = t.clock.now() + SECOND * 2;
    let error = t.driver.acquire(&other).await.unwrap_err();
    assert_eq!(error.effect(), Effect::None, "{error}");
    pair.link.blackhole(Reach::All, false);
    t.until("it has taken effect", async |t: &Testbed| {
        let shown = t.driver.inspect(&named("row")).await;
        shown.is_ok_and(|shown| !shown.holders.is_empty())
    })
    .await;
    let shown = t.inspect("row").await;
    assert_eq!(shown.holders[0].owner, ask.owner.fingerprint());
    let of_row = "SELECT $ FROM dlock_locks WHERE name = 'row'";
    let mut native = t.native().await;
    let began = one(&mut native, &of_row.replace('$', "began")).await;
    let lease = one(&mut native, &of_row.replace('$', "expires - began")).await;
    assert!(began < given_up, "{began} is after {given_up}");
    assert_eq!(lease, 120_000_000, "its end is counted from then");
}

/// The declared limit: an administrator who cancels the wait has the server confirm what the standby lacks.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_wait_for_a_standby_is_confirmed_without_it() {
    let pair = Pair::start().await;
    let t = &pair.t;
    pair.synchronous().await;
    t.release(&t.taken("row").await).await;
    pair.has_caught_up().await;
    pair.link.blackhole(Reach::All, true);
    let ask = t.ask("row", SECOND * 600);
    let asked: tokio::task::JoinHandle<Result<Acquired, DriverError>> = tokio::spawn({
        let driver = Arc::clone(&t.driver);
        async move { driver.acquire(&ask).await }
    });
    t.until("its commit waits", async |t: &Testbed| {
        t.sessions("wait_event = 'SyncRep'").await == 1
    })
    .await;
    t.admin("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        .await;
    let first = match asked.await.unwrap().unwrap() {
        Acquired::Granted(grant) => grant,
        other => panic!("{other:?}"),
    };
    let next = pair.promoted().await;
    let second = granted(&next, &t.ask("row", SECOND)).await;
    assert!(second.token > first.token);
}
