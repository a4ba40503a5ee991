//! Settings of servers and users, what the environment says, and secrets.

use super::{
    SECOND,
    bed::{Testbed, one, run, started, warnings_of_connecting},
};
use dlock_conformance::{
    testbed::{PostgresServer, postgres::PostgresOptions},
    under_test::{Log, granted},
};
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock},
};
use dlock_postgres::{
    PostgresConfig, PostgresDriver,
    sqlx::{self, Connection, PgConnection},
};
use std::{env, error::Error, fs, os::unix::fs::PermissionsExt, process::Command};

const GOOD: [&str; 3] = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];

#[tokio::test]
async fn settings_that_forget_are_warned_about() {
    let t = Testbed::start(&GOOD).await;
    t.admin(
        "CREATE ROLE locker LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_locks TO locker",
    )
    .await;
    // A user without any other right sees it all.
    let url = t.server.url().replace("postgres@", "locker@");
    let text = warnings_of_connecting(&url).await;
    assert!(!text.contains("WARN"), "{text}");
    for (change, back, words) in [
        (
            "ALTER ROLE locker SET synchronous_commit = off",
            "ALTER ROLE locker RESET synchronous_commit",
            ["synchronous_commit is off", "ALTER ROLE .. SET"],
        ),
        (
            "ALTER TABLE dlock_locks SET UNLOGGED",
            "ALTER TABLE dlock_locks SET LOGGED",
            ["is unlogged", "\"dlock_locks\" SET LOGGED"],
        ),
    ] {
        t.admin(change).await;
        let text = warnings_of_connecting(&url).await;
        assert_eq!(text.matches("WARN").count(), 1, "{text}");
        for word in words {
            assert!(text.contains(word), "{text}");
        }
        t.admin(back).await;
    }
    let t = Testbed::start(&["fsync=off", "full_page_writes=off"]).await;
    let text = warnings_of_connecting(&t.server.url()).await;
    for word in ["fsync is off", "full_page_writes is off", "set it to on"] {
        assert!(text.contains(word), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_the_schema_are_enough_and_fewer_are_told() {
    let server = started(PostgresOptions::default()).await;
    let url = |user: &str| server.url().replace("postgres@", &format!("{user}@"));
    let config: PostgresConfig = format!("{}?dlock.table=ops.locks", url("locker"))
        .parse()
        .unwrap();
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let mut admin = async |sql: &str| run(&mut admin, sql).await;
    admin("CREATE SCHEMA ops").await;
    // As it is printed, and then what it leaves to the administrator.
    let schema = config.schema();
    admin(&schema).await;
    admin(&schema).await;
    let missing = PostgresDriver::open(config.clone()).await.unwrap_err();
    assert_eq!(missing.retry(), RetryClass::Never, "{missing}");
    for line in schema.lines().filter_map(|line| line.strip_prefix("-- ")) {
        if line.ends_with(';') {
            admin(line).await;
        }
    }
    let driver = PostgresDriver::open(config.clone().with_create(false))
        .await
        .unwrap();
    let t = Testbed::start(&[]).await; // makes requests
    let ask = t.ask("a", SECOND * 60);
    granted(&driver, &ask).await;
    driver.list("", None, 10).await.unwrap();
    driver.break_lock(&ask.name, None).await.unwrap();
    admin("REVOKE UPDATE ON ops.locks FROM locker").await;
    let refused = driver.acquire(&t.ask("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.effect()),
        (ErrorKind::Misuse, Effect::None),
        "{refused}"
    );
    assert!(
        refused
            .to_string()
            .contains("grant it SELECT, INSERT, UPDATE")
    );
    let stranger = PostgresDriver::connect(&url("stranger")).await.unwrap_err();
    assert_eq!(stranger.retry(), RetryClass::Never, "{stranger}");
}

/// A self-signed certificate for `localhost`, and its key.
#[cfg(feature = "tls")]
fn certificate(folder: &std::path::Path, name: &str) -> (String, String) {
    let path = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
    let wanted = "[req]\ndistinguished_name = dn\nx509_extensions = v3\nprompt = no\n[dn]\nCN = localhost\n\
        [v3]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = DNS:localhost\n";
    fs::write(path("wanted"), wanted).unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"])
        .args(["-pkeyopt", "ec_paramgen_curve:prime256v1"])
        .args(["-config", &path("wanted")])
        .args(["-keyout", &path("key"), "-out", &path("crt")])
        .output()
        .expect("openssl makes a certificate: apt-get install openssl");
    assert!(made.status.success(), "{made:?}");
    (path("crt"), path("key"))
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn a_servers_identity_is_verified_as_the_url_says() {
    let folder = tempfile::tempdir().unwrap();
    let (trusted, key) = certificate(folder.path(), "trusted");
    let (other, _) = certificate(folder.path(), "other");
    let read = |path: &str| fs::read_to_string(path).unwrap();
    let t = Testbed::start_with(PostgresOptions {
        settings: vec!["ssl=on".to_owned()],
        files: vec![("server.crt", read(&trusted)), ("server.key", read(&key))],
        ..PostgresOptions::default()
    })
    .await;
    let by = |host: &str, more: &str| {
        let port = t.server.addr().port();
        format!("postgres://postgres@{host}:{port}/postgres?application_name=secure&{more}")
    };
    let with = |authority: &str| format!("sslrootcert={}", authority.replace('/', "%2F"));
    let verified = by(
        "localhost",
        &format!("sslmode=verify-full&{}", with(&trusted)),
    );
    let driver = PostgresDriver::connect(&verified).await.unwrap();
    granted(&driver, &t.ask("a", SECOND)).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'secure' AND ssl";
    assert!(one(&mut t.native().await, encrypted).await > 0);
    for refused in [
        by("localhost", "sslmode=verify-full"), // the system trusts it not
        by(
            "localhost",
            &format!("sslmode=verify-full&{}", with(&other)),
        ),
        by(
            "127.0.0.1",
            &format!("sslmode=verify-full&{}", with(&trusted)),
        ), // another name
    ] {
        let error = PostgresDriver::connect(&refused).await.unwrap_err();
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
    let half = by(
        "localhost",
        &format!("sslmode=verify-ca&{}", with(&trusted)),
    );
    let error = PostgresDriver::connect(&half).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert!(error.to_string().contains("verify-full"), "{error}");
    // With `require`, the certificate is not verified.
    let unverified = by("127.0.0.1", "sslmode=require");
    PostgresDriver::connect(&unverified).await.unwrap();
    // A server without TLS gets no password and no request.
    let plain = Testbed::start(&[]).await;
    let port = plain.server.addr().port();
    let url = format!("postgres://postgres@localhost:{port}/postgres?sslmode=require");
    let error = PostgresDriver::connect(&url).await.unwrap_err();
    assert_eq!(error.effect(), Effect::None, "{error}");
}

/// A server that asks `postgres` for the password `right`.
async fn asking(word: &str) -> PostgresServer {
    started(PostgresOptions {
        files: vec![(
            "pg_hba.conf",
            "host all all 127.0.0.1/32 scram-sha-256\n".to_owned(),
        )],
        script: format!("ALTER ROLE postgres PASSWORD '{word}'\n"),
        ..PostgresOptions::default()
    })
    .await
}

fn with_password(server: &PostgresServer, word: &str) -> String {
    server
        .url()
        .replace("postgres@", &format!("postgres:{word}@"))
}

const CHILD: &str = "DLOCK_TEST_CHILD_URL";

/// Runs itself again, as the environment of a process is what it starts with.
#[tokio::test(flavor = "multi_thread")]
async fn neither_the_environment_nor_pgpass_changes_a_connection() {
    if let Ok(url) = env::var(CHILD) {
        return in_another_environment(&url).await;
    }
    let server = asking("right").await;
    let folder = tempfile::tempdir().unwrap();
    let pgpass = folder.path().join(".pgpass");
    fs::write(&pgpass, "*:*:*:*:right\n").unwrap();
    fs::set_permissions(&pgpass, fs::Permissions::from_mode(0o600)).unwrap();
    let this = "settings::neither_the_environment_nor_pgpass_changes_a_connection";
    let again = |more: Option<&str>| {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", this, "--nocapture"])
            .env(CHILD, with_password(&server, "right"))
            .env("HOME", folder.path())
            .env("PGPASSFILE", &pgpass)
            .env("PGPASSWORD", "right")
            .env("PGHOST", "host.invalid")
            .env("PGHOSTADDR", "192.0.2.1")
            .env("PGPORT", "1")
            .env("PGUSER", "stranger")
            .env("PGDATABASE", "elsewhere")
            .env("PGAPPNAME", "theirs")
            .env("PGSSLMODE", "verify-full");
        if let Some(variable) = more {
            command.env(variable, "canary");
        }
        command.output().unwrap()
    };
    let variables = [
        None,
        Some("PGOPTIONS"),
        Some("PGSSLROOTCERT"),
        Some("PGSSLCERT"),
        Some("PGSSLKEY"),
    ];
    for more in variables {
        let output = tokio::task::block_in_place(|| again(more));
        let words =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && words.contains("1 passed"),
            "{more:?}: {words}"
        );
    }
}

async fn in_another_environment(url: &str) {
    let refusing = ["PGOPTIONS", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"];
    if let Some(variable) = refusing.iter().find(|name| env::var_os(name).is_some()) {
        let error = PostgresDriver::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let words = format!("{error} {error:?}");
        assert!(
            words.contains(variable) && !words.contains("canary"),
            "{words}"
        );
        return;
    }
    let driver = PostgresDriver::connect(url).await.unwrap();
    driver.list("", None, 1).await.unwrap();
    let mut native = PgConnection::connect(&format!("{url}?sslmode=disable"))
        .await
        .unwrap();
    let ours: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock' AND usename = 'postgres' AND datname = 'postgres'",
    )
    .fetch_one(&mut native)
    .await
    .unwrap();
    assert!(ours > 0, "the driver's sessions have its own name");
    // Neither a variable nor the file says the password that the URL does not say.
    let error = PostgresDriver::connect(&url.replace(":right@", "@"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    let config: PostgresConfig = "postgres://me@db.internal/orders".parse().unwrap();
    let shown = format!("{config:?}");
    assert!(
        shown.contains("5432") && shown.contains("db.internal"),
        "{shown}"
    );
    for incomplete in [
        "postgres://",
        "postgres://h/d",
        "postgres://u@h",
        "postgres://u@/d",
    ] {
        let error = incomplete.parse::<PostgresConfig>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{incomplete}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_password_and_no_owner_is_ever_written_down() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.writer())
        .finish();
    // Also of other threads; other tests of this process have other words.
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let server = asking("canary").await;
    let url = with_password(&server, "canary");
    let t = Testbed::start(&[]).await; // makes requests
    let config: PostgresConfig = url.parse().unwrap();
    let driver = PostgresDriver::open(config.clone()).await.unwrap();
    let ask = t.ask("a", SECOND * 60);
    granted(&driver, &ask).await;
    granted(&driver, &t.again(&ask, SECOND * 60)).await;
    let held = driver.acquire(&t.ask("a", SECOND)).await.unwrap();
    assert!(matches!(held, Acquired::Held(_)), "{held:?}");
    let shown = driver.inspect(&ask.name).await.unwrap();
    let mut native = PgConnection::connect(&url).await.unwrap();
    let refuse = "ALTER TABLE dlock_locks ADD CHECK (note = 'x') NOT VALID";
    run(&mut native, refuse).await;
    let quoted = driver.acquire(&t.again(&ask, SECOND)).await.unwrap_err();
    let kill = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'dlock'";
    run(&mut native, kill).await;
    let failed = driver.inspect(&ask.name).await.unwrap_err();
    let mut refused = vec![quoted, failed];
    for wrong in [
        url.replace("canary", "canaryx"),
        url.replace("/postgres", "/elsewhere"),
        format!("{url}?dlock.no=1"),
        url.replace("127.0.0.1", "host.invalid"),
        url.replace("postgres:canary", ":canary"),
        format!("{url}?sslmode=no"),
        format!("{url}?dlock.table=no%20"),
        url.replace("postgres://", "other://"),
        url.replace("postgres://", "postgres//"),
    ] {
        refused.push(PostgresDriver::connect(&wrong).await.unwrap_err());
    }
    let mut texts = format!("{config:?} {config:#?} {driver:?} {driver:#?} {shown:?} {held:?}");
    for error in &refused {
        texts += &format!(" {error} {error:?} {error:#?}");
        let mut source = error.source();
        while let Some(error) = source {
            texts += &format!(" {error} {error:?}");
            source = error.source();
        }
    }
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
    let options = sqlx::postgres::PgPoolOptions::new().max_connections(1);
    let pool = options.connect(&t.server.url()).await.unwrap();
    let _in_use = pool.acquire().await.unwrap();
    t.driver.close().await;
    t.until("dlock has no session", async |t| {
        t.sessions("true").await == 0
    })
    .await;
    let driver = PostgresDriver::from_pool(&pool).await.unwrap();
    granted(&driver, &t.ask("a", SECOND)).await;
    assert_eq!(pool.size(), 1);
    assert!(
        t.sessions("true").await > 0,
        "named as dlock's, since the pool has no name"
    );
    let own = t.driver.capabilities();
    assert_eq!(own.store, driver.capabilities().store);
}
