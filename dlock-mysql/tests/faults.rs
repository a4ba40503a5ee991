//! What only a server with sessions, locks and an administrator can suffer.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
use dlock_core::{
    Acquire, Acquired, Broken, Client, Clock, DistributedLock, DriverError, Effect, ErrorKind,
    Grant, HoldId, Instant, Lane, Lease, LockName, Owner, Release, Released, Renew, Renewed, Retry,
    Snapshot,
};
use dlock_mysql::{
    MysqlConfig, MysqlDriver,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, Row,
        mysql::MySqlConnectOptions,
    },
};
use std::{
    io::Write,
    num::NonZeroU64,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tracing_subscriber::fmt::MakeWriter;

mod wire;

const SECOND: Duration = Duration::from_secs(1);
/// As the driver says.
const LATE: Duration = Duration::from_secs(3);

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
async fn a_locked_row_costs_only_its_own_renewal() {
    let t = Testbed::start(&[]).await;
    let mut asks = Vec::new();
    for at in 0..40 {
        let ask = t.ask(&format!("n{at}"), SECOND * 20);
        t.granted(&ask).await;
        asks.push(ask);
    }
    let mut blocker = t.native().await;
    run(&mut blocker, "BEGIN").await;
    run(
        &mut blocker,
        "SELECT * FROM dlock_locks WHERE name = 'n17' FOR UPDATE",
    )
    .await;
    let began = std::time::Instant::now();
    let renewed = t.renew(&asks, SECOND * 60).await;
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
            renewed => assert!(t.lasts(renewed, SECOND * 60), "{at}: {renewed:?}"),
        }
    }
    assert!(
        took < SECOND * 4,
        "{took:?}: one wait of a second, not one for each half"
    );
    run(&mut blocker, "ROLLBACK").await;
    assert!(t.lasts(&t.renew(&asks[17..18], SECOND * 60).await[0], SECOND * 60));
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_do_not_queue_behind_those_who_wait_for_a_row() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("held", SECOND * 30);
    t.granted(&held).await;
    t.release(&t.taken("stuck").await).await;
    let mut blocker = t.native().await;
    run(&mut blocker, "BEGIN").await;
    run(
        &mut blocker,
        "SELECT * FROM dlock_locks WHERE name = 'stuck' FOR UPDATE",
    )
    .await;
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let (driver, ask) = (Arc::clone(&t.driver), t.ask("stuck", SECOND * 30));
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    t.until("statements wait for the row", async |t: &Testbed| {
        t.waiting().await >= 16
    })
    .await;
    let began = std::time::Instant::now();
    let renewed = t.renew(std::slice::from_ref(&held), SECOND * 60).await;
    assert!(
        t.lasts(&renewed[0], SECOND * 60) && began.elapsed() < SECOND,
        "{renewed:?}"
    );
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
    let mut blocker = t.native().await;
    run(&mut blocker, "BEGIN").await;
    run(
        &mut blocker,
        "SELECT * FROM dlock_locks WHERE name = 'a' FOR UPDATE",
    )
    .await;
    let mut ask = t.ask("a", SECOND * 30);
    ask.give_up = t.clock.now() + SECOND * 2;
    let error = t.driver.acquire(&ask).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None),
        "{error}"
    );
    assert!(t.driver.repeats() > 0);
    let patient = t.ask("a", SECOND * 30);
    let granted = tokio::spawn({
        let (driver, ask) = (Arc::clone(&t.driver), patient.clone());
        async move { driver.acquire(&ask).await }
    });
    tokio::time::sleep(SECOND * 3 / 2).await;
    run(&mut blocker, "ROLLBACK").await;
    assert!(matches!(
        granted.await.unwrap().unwrap(),
        Acquired::Granted(_)
    ));
    assert_eq!(t.inspect("a").await.holds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_lasts_is_taken_behind_a_global_lock() {
    behind("FLUSH TABLES WITH READ LOCK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_lasts_is_taken_behind_a_locked_table() {
    behind("LOCK TABLES dlock_locks WRITE").await;
}

/// Somebody locks everything for five seconds; whoever gave up before has nothing afterwards, and what was held is lost by time, not by force.
async fn behind(lock: &'static str) {
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
    tokio::time::sleep((SECOND * 5).saturating_sub(locked.elapsed())).await;
    run(&mut blocker, "UNLOCK TABLES").await;
    tokio::time::sleep(LATE).await;
    for name in ["row", "new"] {
        assert!(t.inspect(name).await.holders.is_empty(), "{name}");
    }
    assert!(t.rest("held").await < SECOND * 30);
    t.taken("new").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced_whatever_it_was_for() {
    let t = Testbed::start(&[]).await;
    let first = t.taken("a").await;
    let second = t.again(&first, SECOND * 30);
    let steps: [&str; 8] = [
        "join",
        "inspect",
        "renew",
        "release one",
        "release",
        "insert",
        "list",
        "break",
    ];
    for step in steps {
        t.kill_all().await;
        // The one attempt that meets the closed connection says so; its repeat is harmless and is what the core does.
        let mut tries = 0;
        loop {
            let done: Result<(), DriverError> = match step {
                "join" => t.driver.acquire(&second).await.map(|acquired| {
                    assert!(matches!(acquired, Acquired::Granted(grant) if grant.holds.get() == 2));
                }),
                "inspect" => t
                    .driver
                    .inspect(&t.name("a"))
                    .await
                    .map(|shown| assert_eq!(shown.holds, 2)),
                "renew" => {
                    let give_up = t.clock.now() + SECOND * 5;
                    let entry = t.entry(&first, SECOND * 40);
                    let renewed = t.driver.renew(Lane::default(), &[entry], give_up).await;
                    renewed.map(|renewed| assert!(t.lasts(&renewed[0], SECOND * 40)))
                }
                "release one" => t.give_back(&second).await,
                "release" => t.give_back(&first).await,
                "insert" => t.driver.acquire(&t.ask("b", SECOND * 30)).await.map(drop),
                "list" => t
                    .driver
                    .list("", None, 10)
                    .await
                    .map(|page| assert_eq!(page.found.len(), 1)),
                "break" => t.driver.break_lock(&t.name("b"), None).await.map(|broken| {
                    assert!(matches!(broken, Broken::Freed { token: Some(_) }));
                }),
                _ => unreachable!("all steps are there"),
            };
            match done {
                Ok(()) => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{step}: {error}");
                    assert_ne!(error.retry(), Retry::Never, "{step}: {error}");
                }
            }
            tries += 1;
            assert!(tries < 3, "{step}: one failed attempt closes what is dead");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_killed_while_it_waits_has_done_nothing() {
    let t = Testbed::start(&[]).await;
    t.release(&t.taken("a").await).await;
    for how in ["KILL QUERY", "KILL"] {
        let mut blocker = t.native().await;
        run(&mut blocker, "BEGIN").await;
        run(
            &mut blocker,
            "SELECT * FROM dlock_locks WHERE name = 'a' FOR UPDATE",
        )
        .await;
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
    let driver = MysqlDriver::connect(&t.locker_url()).await.unwrap();
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
    // Whoever may write all the same is at a replica all the same.
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
async fn where_no_connection_is_left_requests_share_what_there_is() {
    let t = Testbed::start(&["--max-connections=10"]).await;
    t.locker().await;
    let driver = Arc::new(MysqlDriver::connect(&t.locker_url()).await.unwrap());
    let mut others = Vec::new();
    while let Ok(native) = MySqlConnection::connect(&t.locker_url()).await {
        others.push(native);
    }
    let refused = MysqlDriver::connect(&t.locker_url()).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.retry()),
        (ErrorKind::Unavailable, Retry::Later)
    );
    assert!(refused.to_string().contains("max_connections"), "{refused}");
    let asked: Vec<_> = (0..30)
        .map(|at| {
            let (driver, ask) = (Arc::clone(&driver), t.ask(&format!("n{at}"), SECOND * 30));
            tokio::spawn(async move { driver.acquire(&ask).await })
        })
        .collect();
    for asked in asked {
        let acquired = asked.await.unwrap();
        assert!(matches!(acquired, Ok(Acquired::Granted(_))), "{acquired:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_dropped_while_in_use_is_made_again_and_every_hold_is_over() {
    let t = Testbed::start(&[]).await;
    let held = t.ask("a", SECOND * 30);
    let first = t.granted(&held).await;
    t.admin("DROP TABLE dlock_locks").await;
    assert!(matches!(
        t.renew(std::slice::from_ref(&held), SECOND * 30).await[0],
        Ok(Renewed::NotHeld)
    ));
    t.admin("DROP TABLE dlock_locks").await;
    assert!(t.granted(&t.ask("a", SECOND * 30)).await.token > first.token);
    let config: MysqlConfig = t.server.url().parse().unwrap();
    let strict = MysqlDriver::open(config.with_create(false)).await.unwrap();
    t.admin("DROP TABLE dlock_locks").await;
    let error = strict.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(error.retry(), Retry::Never);
    assert!(error.to_string().contains("dlock schema"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_times_and_texts_do_not_depend_on_the_servers_settings() {
    let t = Testbed::start(&[
        "--sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,EMPTY_STRING_IS_NULL,PAD_CHAR_TO_FULL_LENGTH",
        "--default-time-zone=+09:00",
        "--character-set-server=utf8mb4",
        "--collation-server=utf8mb4_unicode_ci",
        "--transaction-isolation=READ-UNCOMMITTED",
        "--init-connect=SET autocommit = 0, time_zone = '-05:00', tx_isolation = 'SERIALIZABLE'",
    ])
    .await;
    t.locker().await;
    let driver = MysqlDriver::connect(&t.locker_url()).await.unwrap();
    let long = "ä".repeat(256);
    let names = [
        "a",
        "A",
        "a ",
        "a\t",
        "á",
        "a\u{301}",
        "ß",
        "ss",
        "it's",
        "q\"`\\",
        "%",
        "_",
        "日本",
        "\u{1f512}",
        &long,
    ];
    for name in names {
        let ask = t.ask(name, SECOND * 30);
        let Acquired::Granted(grant) = driver.acquire(&ask).await.unwrap() else {
            panic!("{name:?} is a lock of its own");
        };
        assert_eq!(grant.valid_for, SECOND * 30);
        let shown = driver.inspect(&ask.name).await.unwrap();
        let rest = shown.holders[0].rest.unwrap();
        assert!(
            rest > SECOND * 25 && rest <= SECOND * 30,
            "{name:?}: {rest:?}"
        );
    }
    // Another session, with a zone of its own, sees the same.
    let mut other = t.ask("a", SECOND);
    other.look = true;
    assert!(matches!(
        t.driver.acquire(&other).await.unwrap(),
        Acquired::Held(_)
    ));
    let mut found = Vec::new();
    let mut from = None;
    loop {
        let page = driver.list("", from.as_ref(), 4).await.unwrap();
        found.extend(page.found.into_iter().map(|shown| shown.name.to_string()));
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    let mut wanted: Vec<String> = names.map(str::to_owned).into();
    wanted.sort();
    assert_eq!(found, wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_that_are_documented_are_enough_and_fewer_are_told() {
    let t = Testbed::start(&[]).await;
    t.locker().await;
    let config: MysqlConfig = t.locker_url().parse().unwrap();
    let driver = MysqlDriver::open(config.clone().with_create(false))
        .await
        .unwrap();
    let ask = t.ask("a", SECOND * 30);
    driver.acquire(&ask).await.unwrap();
    let entry = [t.entry(&ask, SECOND * 30)];
    let give_up = t.clock.now() + SECOND * 5;
    driver
        .renew(Lane::default(), &entry, give_up)
        .await
        .unwrap();
    driver.list("", None, 10).await.unwrap();
    driver.break_lock(&ask.name, None).await.unwrap();
    // A table that is not there, and may not be made.
    let other = config.with_table("elsewhere".parse().unwrap());
    let error = MysqlDriver::open(other).await.unwrap_err();
    assert!(error.to_string().contains("dlock schema"), "{error}");
    t.admin("REVOKE UPDATE ON dlock.dlock_locks FROM locker@'%'")
        .await;
    let error = driver.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, Retry::Never)
    );
    assert!(error.to_string().contains("GRANT"), "{error}");
    for (url, word) in [
        (
            t.locker_url().replace("secret", "wrong"),
            "user or password",
        ),
        (
            t.locker_url().replace("/dlock", "/mysql"),
            "may not use this database",
        ),
        (
            t.server.url().replace("/dlock", "/nothing"),
            "no such database",
        ),
    ] {
        let error = MysqlDriver::connect(&url).await.unwrap_err();
        assert_eq!(error.retry(), Retry::Never, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_elses_table_is_refused_with_the_difference_and_left_alone() {
    let t = Testbed::start(&[]).await;
    let shedlock = "CREATE TABLE shedlock (name VARCHAR(64) NOT NULL PRIMARY KEY, lock_until TIMESTAMP(3) NOT NULL, \
        locked_at TIMESTAMP(3) NOT NULL, locked_by VARCHAR(255) NOT NULL)";
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
async fn a_socket_and_the_applications_own_options_lead_to_the_same_locks() {
    let t = Testbed::start(&[]).await;
    let held = t.taken("a").await;
    let socket = t.server.socket().unwrap();
    let options = MySqlConnectOptions::new()
        .socket(&socket)
        .username("root")
        .database("dlock");
    let by_options = MysqlDriver::open(options.into()).await.unwrap();
    let path = socket.display().to_string().replace('/', "%2F");
    let by_url = MysqlDriver::connect(&format!("mysql://root@localhost/dlock?socket={path}"))
        .await
        .unwrap();
    for driver in [by_options, by_url] {
        let shown = driver.inspect(&held.name).await.unwrap();
        assert_eq!(shown.holders[0].owner, held.owner.fingerprint());
    }
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn a_servers_identity_is_verified_as_the_url_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    // A certificate that vouches for itself and for one name.
    let wanted = "[req]\ndistinguished_name = dn\nx509_extensions = v3\nprompt = no\n[dn]\nCN = localhost\n\
        [v3]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = DNS:localhost\n";
    std::fs::write(path("wanted"), wanted).unwrap();
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args([
            "-config",
            &path("wanted"),
            "-keyout",
            &path("key.pem"),
            "-out",
            &path("cert.pem"),
        ])
        .output()
        .expect("openssl makes a certificate: apt-get install openssl");
    assert!(made.status.success(), "{made:?}");
    let t = Testbed::start(&[
        &format!("--ssl-cert={}", path("cert.pem")),
        &format!("--ssl-key={}", path("key.pem")),
    ])
    .await;
    let by = |host: &str, more: &str| {
        format!(
            "mysql://root@{host}:{}/dlock?{more}",
            t.server.addr().port()
        )
    };
    let trusted = format!("ssl-ca={}", path("cert.pem").replace('/', "%2F"));
    let verified = by("localhost", &format!("ssl-mode=verify_identity&{trusted}"));
    let driver = MysqlDriver::connect(&verified).await.unwrap();
    assert!(matches!(
        driver.acquire(&t.ask("a", SECOND)).await.unwrap(),
        Acquired::Granted(_)
    ));
    for refused in [
        // Nobody whom the system trusts vouches for it; it is not the one that was asked for.
        by("localhost", "ssl-mode=verify_identity"),
        by("127.0.0.1", &format!("ssl-mode=verify_identity&{trusted}")),
    ] {
        let error = MysqlDriver::connect(&refused).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Unavailable, Effect::None),
            "{error:?}"
        );
        assert!(
            format!("{error:?}").to_lowercase().contains("certificate"),
            "{error:?}"
        );
    }
    // Told otherwise, it is not asked who it is.
    let unasked = by("127.0.0.1", "ssl-mode=required");
    MysqlDriver::connect(&unasked).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_password_and_no_owner_is_ever_written_down() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let _ = tracing::subscriber::set_global_default(subscriber);
    let t = Testbed::start(&[]).await;
    t.locker().await;
    t.admin("SET PASSWORD FOR locker@'%' = PASSWORD('canary')")
        .await;
    let url = t.locker_url().replace("secret", "canary");
    let driver = MysqlDriver::connect(&url).await.unwrap();
    let ask = t.ask("a", SECOND * 30);
    driver.acquire(&ask).await.unwrap();
    driver.acquire(&t.again(&ask, SECOND * 30)).await.unwrap();
    let shown = driver.inspect(&ask.name).await.unwrap();
    t.kill_all().await;
    let failed = driver.inspect(&ask.name).await;
    t.admin("SET GLOBAL read_only = 1").await;
    let refused = MysqlDriver::connect(&url).await.unwrap_err();
    let wrong = MysqlDriver::connect(&url.replace("canary", "canaryx"))
        .await
        .unwrap_err();
    let texts = format!(
        "{driver:?} {driver:#?} {shown:?} {failed:?} {refused:?} {refused} {wrong:?} {wrong}"
    );
    let traced = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(!traced.is_empty(), "else this proves nothing");
    for text in [texts, traced] {
        assert!(!text.contains("canary"), "{text}");
        assert!(!text.contains(&ask.owner.expose().to_string()), "{text}");
    }
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

/// A server with a driver, and somebody to do things to it.
struct Testbed {
    server: MariadbServer,
    driver: Arc<MysqlDriver>,
    clock: Clock,
    holds: AtomicU64,
}

impl Testbed {
    async fn start(extra: &[&str]) -> Self {
        let extra_args = extra.iter().map(|arg| (*arg).to_owned()).collect();
        let server = MariadbServer::start(MariadbOptions { extra_args }).unwrap();
        let driver = Arc::new(MysqlDriver::connect(&server.url()).await.unwrap());
        Self {
            server,
            driver,
            clock: Clock::boot(),
            holds: AtomicU64::new(1),
        }
    }

    fn name(&self, name: &str) -> LockName {
        LockName::new(name).unwrap()
    }

    fn ask(&self, name: &str, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::from_seed(&format!("owner {hold}"));
        self.asked(name, owner, lease, hold)
    }

    fn again(&self, first: &Acquire, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        self.asked(first.name.as_str(), first.owner, lease, hold)
    }

    fn asked(&self, name: &str, owner: Owner, lease: Duration, hold: u64) -> Acquire {
        let hold = HoldId::from_bits(NonZeroU64::new(hold).unwrap().get());
        let lease = Lease::fixed(lease).unwrap();
        Acquire::new(self.name(name), owner, hold, lease, self.give_up())
    }

    fn give_up(&self) -> Instant {
        self.clock.now() + SECOND * 10
    }

    async fn granted(&self, ask: &Acquire) -> Grant {
        match self.driver.acquire(ask).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    async fn taken(&self, name: &str) -> Acquire {
        let ask = self.ask(name, SECOND * 30);
        self.granted(&ask).await;
        ask
    }

    async fn release(&self, ask: &Acquire) -> Released {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await.unwrap()
    }

    async fn give_back(&self, ask: &Acquire) -> Result<(), DriverError> {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await.map(drop)
    }

    fn entry(&self, ask: &Acquire, lease: Duration) -> Renew {
        Renew::new(ask.name.clone(), ask.owner, ask.hold, Some(lease))
    }

    async fn renew(&self, asks: &[Acquire], lease: Duration) -> Vec<Result<Renewed, DriverError>> {
        let batch: Vec<_> = asks.iter().map(|ask| self.entry(ask, lease)).collect();
        self.driver
            .renew(Lane::default(), &batch, self.give_up())
            .await
            .unwrap()
    }

    fn lasts(&self, renewed: &Result<Renewed, DriverError>, lease: Duration) -> bool {
        matches!(renewed, Ok(Renewed::Until { valid_for }) if *valid_for <= lease && *valid_for + SECOND * 5 > lease)
    }

    async fn inspect(&self, name: &str) -> Snapshot {
        self.driver.inspect(&self.name(name)).await.unwrap()
    }

    async fn rest(&self, name: &str) -> Duration {
        self.inspect(name).await.holders[0].rest.unwrap()
    }

    async fn native(&self) -> MySqlConnection {
        let options: MySqlConnectOptions = self.server.url().parse().unwrap();
        // It says passwords aloud.
        options.disable_statement_logging().connect().await.unwrap()
    }

    async fn admin(&self, sql: &'static str) {
        let mut native = self.native().await;
        run(&mut native, sql).await;
        native.close().await.unwrap();
    }

    /// The user of the README, for the table that is there.
    async fn locker(&self) {
        self.admin("CREATE USER locker@'%' IDENTIFIED BY 'secret'")
            .await;
        self.admin("GRANT SELECT, INSERT, UPDATE, DELETE ON dlock.dlock_locks TO locker@'%'")
            .await;
    }

    fn locker_url(&self) -> String {
        self.server.url().replace("root@", "locker:secret@")
    }

    /// What the server has been asked so far: updates, inserts, deletes, selects.
    async fn counters(&self) -> [u64; 4] {
        let mut native = self.native().await;
        let rows = sqlx::raw_sql("SHOW GLOBAL STATUS LIKE 'Com\\_%'")
            .fetch_all(&mut native)
            .await
            .unwrap();
        [
            "Com_update",
            "Com_insert_select",
            "Com_delete",
            "Com_select",
        ]
        .map(|name| {
            let row = rows
                .iter()
                .find(|row| row.get::<String, _>(0).eq_ignore_ascii_case(name))
                .unwrap();
            row.get::<String, _>(1).parse().unwrap()
        })
    }

    /// How many statements wait for the lock of a row.
    async fn waiting(&self) -> usize {
        let mut native = self.native().await;
        self.waiting_ids(&mut native).await.len()
    }

    async fn waiting_ids(&self, native: &mut MySqlConnection) -> Vec<i64> {
        let waiting = "SELECT CAST(ID AS SIGNED) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Execute' AND INFO LIKE 'UPDATE %'";
        let rows = sqlx::raw_sql(waiting).fetch_all(native).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn kill_waiting(&self, how: &str) {
        let mut native = self.native().await;
        for id in self.waiting_ids(&mut native).await {
            sqlx::raw_sql(AssertSqlSafe(format!("{how} {id}")))
                .execute(&mut native)
                .await
                .unwrap();
        }
    }

    /// Ends every session but its own.
    async fn kill_all(&self) {
        let mut native = self.native().await;
        let others = "SELECT CAST(ID AS SIGNED) FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID() AND USER IN ('root', 'locker')";
        let rows = sqlx::raw_sql(others).fetch_all(&mut native).await.unwrap();
        for row in &rows {
            let kill = format!("KILL {}", row.get::<i64, _>(0));
            // One that ended by itself in between is as good.
            drop(
                sqlx::raw_sql(AssertSqlSafe(kill))
                    .execute(&mut native)
                    .await,
            );
        }
    }

    async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        for _ in 0..1_000 {
            if holds(self).await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("not within some seconds: {what}");
    }
}

async fn run(native: &mut MySqlConnection, sql: &'static str) {
    sqlx::raw_sql(sql).execute(native).await.unwrap();
}

/// Everything that was traced.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
