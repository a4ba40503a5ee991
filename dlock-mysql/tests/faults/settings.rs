//! Settings of servers, sessions and users.

use super::{
    SECOND,
    bed::{Testbed, connected},
};
use dlock_conformance::under_test::{Log, lasts};
#[cfg(feature = "tls")]
use dlock_core::Effect;
use dlock_core::{
    ErrorKind, Owner, RetryClass,
    driver::{Acquired, DistributedLock, Lane, Release},
};
use dlock_mysql::{
    MysqlConfig, MysqlDriver,
    sqlx::{self, mysql::MySqlConnectOptions},
};

#[tokio::test(flavor = "multi_thread")]
async fn names_times_and_texts_do_not_depend_on_the_servers_settings() {
    let t = Testbed::start(&[
        "--sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,PAD_CHAR_TO_FULL_LENGTH",
        "--default-time-zone=+09:00",
        "--character-set-server=utf8mb4",
        "--collation-server=utf8mb4_unicode_ci",
        "--transaction-isolation=READ-UNCOMMITTED",
        "--init-connect=SET autocommit = 0, time_zone = '-05:00', sql_select_limit = 1, sql_safe_updates = 1; \
            SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    ])
    .await;
    if t.is_mariadb().await {
        t.admin("SET GLOBAL sql_mode = CONCAT(@@GLOBAL.sql_mode, ',EMPTY_STRING_IS_NULL')")
            .await;
    }
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
    let mut asks = Vec::new();
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
        asks.push(ask);
    }
    // No row is missing where several are read.
    asks[2].owner = Owner::from_seed("stranger");
    let batch: Vec<_> = asks.iter().map(|ask| t.entry(ask, SECOND * 30)).collect();
    let renewed = driver.renew(Lane::default(), &batch, t.give_up()).await;
    for (at, renewed) in renewed.unwrap().iter().enumerate() {
        let lasts = lasts(renewed, SECOND * 30);
        assert_eq!(lasts, at != 2, "{:?}: {renewed:?}", names[at]);
    }
    // Another session, with a zone of its own, sees the same.
    let mut other = t.ask("a", SECOND);
    other.retry = true;
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

#[tokio::test]
async fn settings_that_forget_are_warned_about_and_a_follower_too() {
    let t = Testbed::start(&[
        "--innodb-flush-log-at-trx-commit=2",
        "--server-id=7",
        "--skip-slave-start",
    ])
    .await;
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.writer()).finish();
    let _here = tracing::subscriber::set_default(subscriber);
    MysqlDriver::connect(&t.server.url()).await.unwrap();
    let text = log.text();
    assert!(
        text.contains("innodb_flush_log_at_trx_commit is 2"),
        "{text}"
    );
    assert!(!text.contains("follows another one"), "{text}");
    t.admin("CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_USER = 'missing'")
        .await;
    MysqlDriver::connect(&t.server.url()).await.unwrap();
    let text = log.text();
    assert!(text.contains("follows another one"), "{text}");
}

/// What `init_connect` may set in each new session of a user without `SUPER`.
const LEFT: [&str; 11] = [
    "SET autocommit = 0",
    "SET autocommit = 0; SELECT COUNT(*) FROM dlock_locks",
    "BEGIN",
    "START TRANSACTION READ ONLY",
    "SET completion_type = 'CHAIN'; BEGIN",
    "SET TRANSACTION READ ONLY",
    "SET SESSION TRANSACTION READ ONLY",
    "SET timestamp = UNIX_TIMESTAMP() - 3",
    "SET timestamp = 1000000000",
    "SET sql_big_selects = 0, max_join_size = 1",
    "USE elsewhere",
];

#[tokio::test(flavor = "multi_thread")]
async fn what_init_connect_leaves_in_a_session_changes_no_lock() {
    let t = Testbed::start(&[]).await;
    t.locker().await;
    t.admin("CREATE DATABASE elsewhere").await;
    t.admin("CREATE TABLE elsewhere.dlock_locks LIKE dlock.dlock_locks")
        .await;
    t.admin("GRANT ALL ON elsewhere.* TO locker@'%'").await;
    let root = &t.driver; // an administrator's session skips `init_connect`
    for left in LEFT {
        let mut native = t.native().await;
        let set = sqlx::query("SET GLOBAL init_connect = ?").bind(left);
        set.execute(&mut native).await.unwrap();
        let driver = connected(&t.locker_url()).await;
        // In the second round the row exists.
        for _ in 0..2 {
            let ask = t.ask(left, SECOND * 30);
            let began = t.clock.now();
            let taken = driver.acquire(&ask).await;
            assert!(
                matches!(taken, Ok(Acquired::Granted(_))),
                "{left}: {taken:?}"
            );
            let refused = root.acquire(&t.ask(left, SECOND)).await.unwrap();
            assert!(matches!(refused, Acquired::Held(_)), "{left}: {refused:?}");
            let least = |lease| lease - t.clock.now().since(began);
            assert!(t.rest(left).await >= least(SECOND * 30), "{left}");
            let entry = [t.entry(&ask, SECOND * 60)];
            let renewed = driver.renew(Lane::default(), &entry, t.give_up()).await;
            assert!(lasts(&renewed.unwrap()[0], SECOND * 60), "{left}");
            assert!(t.rest(left).await >= least(SECOND * 60), "{left}");
            let second = t.again(&ask, SECOND * 60);
            let entered = driver.acquire(&second).await.unwrap();
            assert!(
                matches!(entered, Acquired::Granted(grant) if grant.holds.get() == 2),
                "{left}"
            );
            for hold in [&second, &ask] {
                let release = Release::new(hold.name.clone(), hold.owner, hold.hold);
                driver.release(&release).await.expect(left);
            }
            let next = t.taken(left).await;
            t.release(&next).await;
        }
        driver.close().await;
    }
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
    // The table is missing, and the user may not make it.
    let other = config.with_table("elsewhere".parse().unwrap());
    let error = MysqlDriver::open(other).await.unwrap_err();
    assert!(error.to_string().contains("dlock schema"), "{error}");
    t.admin("REVOKE UPDATE ON dlock.dlock_locks FROM locker@'%'")
        .await;
    let error = driver.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, RetryClass::Never)
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
        assert_eq!(error.retry(), RetryClass::Never, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
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
    // A self-signed certificate for one name.
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
        // The first certificate is not trusted by the system; the second is for another name.
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
    // With `required`, the certificate is not verified.
    let unasked = by("127.0.0.1", "ssl-mode=required");
    MysqlDriver::connect(&unasked).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_password_and_no_owner_is_ever_written_down() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.writer())
        .finish();
    let _ = tracing::subscriber::set_global_default(subscriber);
    let t = Testbed::start(&[]).await;
    t.locker().await;
    t.admin("ALTER USER locker@'%' IDENTIFIED BY 'canary'")
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
    let traced = log.text();
    assert!(!traced.is_empty(), "else this proves nothing");
    for text in [texts, traced] {
        assert!(!text.contains("canary"), "{text}");
        assert!(!text.contains(&ask.owner.expose().to_string()), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_the_application_names_the_server_and_lends_no_connection() {
    let t = Testbed::start(&[]).await;
    t.locker().await;
    let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(1);
    let pool = options.connect(&t.locker_url()).await.unwrap();
    let in_use = pool.acquire().await.unwrap();
    let driver = MysqlDriver::from_pool(&pool).await.unwrap();
    let ask = t.ask("a", SECOND);
    let granted = driver.acquire(&ask).await.unwrap();
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
    assert_eq!(pool.size(), 1);
    drop(in_use);
    let own = MysqlDriver::connect(&t.locker_url()).await.unwrap();
    assert_eq!(own.capabilities().store, driver.capabilities().store);
}
