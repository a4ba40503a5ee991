//! Locked rows and tables, a read-only server, foreign and damaged tables.

use dlock_conformance::testbed::PostgresServer;
use dlock_core::{
    Clock, Effect, ErrorKind, HoldId, HolderInfo, Lease, LockName, Owner,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Lane, Release, Released, Renew, Renewed,
        kit::{RecordBacked, RecordStore},
        system_random,
    },
};
use dlock_postgres::{
    PostgresDriver,
    sqlx::{self, AssertSqlSafe, Connection, PgConnection, Row},
};
use std::{error::Error, sync::Arc, time::Duration};

type Outcome = Result<(), Box<dyn Error>>;

/// A server with a fresh database, its URL, and a superuser's connection to it.
async fn database(name: &str) -> Result<(PostgresServer, String, PgConnection), Box<dyn Error>> {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start(&[])).await??;
    let mut connection = PgConnection::connect(&server.url()).await?;
    run(&mut connection, &format!("CREATE DATABASE {name}")).await?;
    let url = server.url();
    let (address, _) = url.rsplit_once('/').ok_or("the URL names a database")?;
    let url = format!("{address}/{name}");
    let connection = PgConnection::connect(&url).await?;
    Ok((server, url, connection))
}

async fn run(connection: &mut PgConnection, sql: &str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await?;
    Ok(())
}

fn ask(name: &str, within: Duration) -> Result<Acquire, Box<dyn Error>> {
    let (owner, hold) = (
        Owner::from_seed(&system_random()?.to_string()),
        HoldId::from_bits(system_random()?),
    );
    let lease = Lease::renewed(Duration::from_secs(30));
    Ok(Acquire::new(
        LockName::new(name)?,
        owner,
        hold,
        lease,
        Clock::boot().now() + within,
    ))
}

async fn take(driver: &PostgresDriver, name: &str) -> Result<Acquire, Box<dyn Error>> {
    let asked = ask(name, Duration::from_secs(5))?;
    match driver.acquire(&asked).await? {
        Acquired::Granted(_) => Ok(asked),
        refused => Err(format!("{refused:?}").into()),
    }
}

async fn release(driver: &PostgresDriver, held: &Acquire) -> Result<Released, DriverError> {
    driver
        .release(&Release::new(held.name.clone(), held.owner, held.hold))
        .await
}

#[tokio::test]
async fn a_locked_row_delays_its_own_renewal_only_and_nothing_is_taken_late() -> Outcome {
    let (_server, url, mut stranger) = database("locked_row").await?;
    let driver = PostgresDriver::connect(&url).await?;
    let (locked, other) = (
        take(&driver, "locked").await?,
        take(&driver, "other").await?,
    );
    run(
        &mut stranger,
        "BEGIN; SELECT 1 FROM dlock_locks WHERE name = 'locked' FOR UPDATE",
    )
    .await?;

    let entry = |held: &Acquire| {
        Renew::new(
            held.name.clone(),
            held.owner,
            held.hold,
            Some(held.lease.length()),
        )
    };
    let give_up = Clock::boot().now() + Duration::from_secs(5);
    let renewed = driver
        .renew(Lane(0), &[entry(&locked), entry(&other)], give_up)
        .await?;
    assert!(
        matches!(&renewed[0], Err(error) if error.effect() == Effect::None),
        "{:?}",
        renewed[0]
    );
    assert!(
        matches!(renewed[1], Ok(Renewed::Until { .. })),
        "{:?}",
        renewed[1]
    );

    run(&mut stranger, "ROLLBACK").await?;
    assert!(matches!(release(&driver, &locked).await?, Released::Freed));
    run(
        &mut stranger,
        "BEGIN; SELECT 1 FROM dlock_locks WHERE name = 'locked' FOR UPDATE",
    )
    .await?;
    let refused = driver
        .acquire(&ask("locked", Duration::from_secs(4))?)
        .await;
    assert!(
        matches!(&refused, Err(error) if error.effect() == Effect::None),
        "{refused:?}"
    );
    run(&mut stranger, "ROLLBACK").await?;
    assert!(driver.repeats() > 0);
    take(&driver, "locked").await?;
    Ok(())
}

#[tokio::test]
async fn a_locked_table_is_waited_for_and_taken_when_it_is_free() -> Outcome {
    let (_server, url, mut stranger) = database("locked_table").await?;
    let driver = PostgresDriver::connect(&url).await?;
    run(&mut stranger, "BEGIN; LOCK TABLE dlock_locks").await?;
    let asked = ask("a", Duration::from_secs(10))?;
    let acquire = tokio::spawn(async move { driver.acquire(&asked).await });
    // Until its statement waits for the lock.
    let mut watcher = PgConnection::connect(&url).await?;
    let waits = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    while !sqlx::query_scalar::<_, bool>(waits)
        .fetch_one(&mut watcher)
        .await?
    {
        tokio::task::yield_now().await;
    }
    run(&mut stranger, "ROLLBACK").await?;
    assert!(matches!(acquire.await??, Acquired::Granted(_)));
    Ok(())
}

#[tokio::test]
async fn a_dropped_table_is_made_again_and_tokens_grow() -> Outcome {
    let (_server, url, mut stranger) = database("dropped").await?;
    let driver = PostgresDriver::connect(&url).await?;
    let held = take(&driver, "a").await?;
    let token = async |driver: &PostgresDriver| {
        let snapshot = driver.inspect(&LockName::new("a")?).await?;
        Ok::<_, Box<dyn Error>>(snapshot.holders.first().and_then(|holder| holder.token))
    };
    let first = token(&driver).await?;
    run(&mut stranger, "DROP TABLE dlock_locks").await?;
    assert!(matches!(
        release(&driver, &held).await?,
        Released::NotHeld { .. }
    ));
    take(&driver, "a").await?;
    assert!(token(&driver).await? > first);
    Ok(())
}

#[tokio::test]
async fn a_missing_or_foreign_table_is_misuse_and_left_alone() -> Outcome {
    let (_server, url, mut stranger) = database("foreign_table").await?;
    let missing = PostgresDriver::connect(&format!("{url}?dlock.create=false")).await;
    assert!(
        matches!(&missing, Err(error) if error.kind() == ErrorKind::Misuse),
        "{missing:?}"
    );
    run(
        &mut stranger,
        "CREATE TABLE dlock_locks (name text); INSERT INTO dlock_locks VALUES ('theirs')",
    )
    .await?;
    let foreign = PostgresDriver::connect(&url).await;
    assert!(
        matches!(&foreign, Err(error) if error.kind() == ErrorKind::Misuse),
        "{foreign:?}"
    );
    let theirs: String = sqlx::query_scalar("SELECT name FROM dlock_locks")
        .fetch_one(&mut stranger)
        .await?;
    assert_eq!(theirs, "theirs");
    let beside = PostgresDriver::connect(&format!("{url}?dlock.table=public.Locks_2")).await?;
    take(&beside, "a").await?;
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM \"public\".\"Locks_2\"")
        .fetch_one(&mut stranger)
        .await?;
    assert_eq!(rows, 1);
    // The columns without the index: two clients could each make a row of a name.
    run(&mut stranger, "CREATE TABLE by_hand (LIKE \"Locks_2\")").await?;
    let by_hand = PostgresDriver::connect(&format!("{url}?dlock.table=by_hand")).await;
    assert!(
        matches!(&by_hand, Err(error) if error.kind() == ErrorKind::Misuse && error.to_string().contains("unique index")),
        "{by_hand:?}"
    );
    // A constraint that is checked at commit decides nothing either.
    run(
        &mut stranger,
        "ALTER TABLE by_hand ADD UNIQUE (name) DEFERRABLE",
    )
    .await?;
    let refused = match PostgresDriver::connect(&format!("{url}?dlock.table=by_hand")).await {
        Ok(driver) => driver
            .acquire(&ask("a", Duration::from_secs(5))?)
            .await
            .map(drop),
        Err(error) => Err(error),
    };
    assert!(
        matches!(&refused, Err(error) if error.kind() == ErrorKind::Misuse && error.effect() == Effect::None),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_server_without_free_connections_is_unavailable_and_serves_those_who_have_one() -> Outcome
{
    let (_server, url, mut stranger) = database("crowded").await?;
    let driver = PostgresDriver::connect(&url).await?;
    // A limit of the database counts for users without rights.
    run(
        &mut stranger,
        "CREATE ROLE locker LOGIN; GRANT ALL ON dlock_locks TO locker; ALTER DATABASE crowded CONNECTION LIMIT 0",
    )
    .await?;
    let refused = PostgresDriver::connect(&url.replace("postgres@", "locker@")).await;
    assert!(
        matches!(&refused, Err(error) if (error.kind(), error.effect()) == (ErrorKind::Unavailable, Effect::None)
            && error.to_string().contains("no room")),
        "{refused:?}"
    );
    take(&driver, "a").await?;
    Ok(())
}

#[tokio::test]
async fn a_read_only_server_is_refused_and_serves_again_later() -> Outcome {
    let (_server, url, mut stranger) = database("read_only").await?;
    let driver = PostgresDriver::connect(&url).await?;
    run(
        &mut stranger,
        "ALTER DATABASE read_only SET default_transaction_read_only = on",
    )
    .await?;
    let refused = PostgresDriver::connect(&url).await;
    assert!(
        matches!(&refused, Err(error) if error.kind() == ErrorKind::Unavailable),
        "{refused:?}"
    );
    run(
        &mut stranger,
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await?;
    for _ in 0..2 {
        let failed = driver.acquire(&ask("a", Duration::from_secs(5))?).await;
        assert!(
            matches!(&failed, Err(error) if error.kind() == ErrorKind::Unavailable || error.effect() == Effect::Unknown),
            "{failed:?}"
        );
    }
    run(
        &mut stranger,
        "ALTER DATABASE read_only RESET default_transaction_read_only",
    )
    .await?;
    take(&driver, "a").await?;
    Ok(())
}

#[tokio::test]
async fn a_row_that_dlock_did_not_write_is_shown_as_damaged_and_broken() -> Outcome {
    let (_server, url, mut stranger) = database("damaged").await?;
    let driver = PostgresDriver::connect(&url).await?;
    for name in ["a", "b"] {
        let held = take(&driver, name).await?;
        release(&driver, &held).await?;
    }
    let refused = run(
        &mut stranger,
        "UPDATE dlock_locks SET holds = 'theirs' WHERE name = 'a'",
    )
    .await;
    assert!(refused.is_err(), "the check refuses it");
    run(
        &mut stranger,
        "ALTER TABLE dlock_locks DROP CONSTRAINT dlock_locks_check; UPDATE dlock_locks SET holds = 'theirs' WHERE name = 'a'",
    )
    .await?;
    let page = driver.list("", None, 10).await?;
    assert!(
        page.found
            .iter()
            .any(|found| found.name.as_str() == "a" && found.damaged.is_some()),
        "{page:?}"
    );
    let refused = driver.acquire(&ask("a", Duration::from_secs(5))?).await;
    assert!(
        matches!(&refused, Err(error) if error.effect() == Effect::None),
        "{refused:?}"
    );
    take(&driver, "b").await?;
    driver.break_lock(&LockName::new("a")?, None).await?;
    take(&driver, "a").await?;
    Ok(())
}

#[tokio::test]
async fn a_name_unused_for_a_day_is_forgotten_and_nothing_else() -> Outcome {
    let (_server, url, mut stranger) = database("forgotten").await?;
    let driver = PostgresDriver::connect(&url).await?;
    for name in ["held", "new", "old"] {
        let held = take(&driver, name).await?;
        if name != "held" {
            release(&driver, &held).await?;
        }
    }
    run(
        &mut stranger,
        "UPDATE dlock_locks SET token = token - 86400000001 WHERE name IN ('held', 'old')",
    )
    .await?;
    let store = driver.record_driver().store();
    assert_eq!(store.forget(b"p").await?, None, "fewer names than a page");
    let left =
        sqlx::query("SELECT convert_from(name, 'UTF8') AS name FROM dlock_locks ORDER BY name");
    let names = |rows: Vec<sqlx::postgres::PgRow>| -> Vec<String> {
        rows.iter().map(|row| row.get("name")).collect()
    };
    assert_eq!(
        names(left.fetch_all(&mut stranger).await?),
        ["held", "new", "old"],
        "`old` is before `p`"
    );
    assert_eq!(store.forget(b"").await?, None);
    let left =
        sqlx::query("SELECT convert_from(name, 'UTF8') AS name FROM dlock_locks ORDER BY name");
    assert_eq!(names(left.fetch_all(&mut stranger).await?), ["held", "new"]);

    run(
        &mut stranger,
        "INSERT INTO dlock_locks SELECT decode(lpad(to_hex(n), 8, '0'), 'hex'), NULL, 1, '', 0, 0, 0, 0, '', 1 FROM generate_series(1, 1500) n",
    )
    .await?;
    let next = store.forget(b"").await?.expect("more than a page of names");
    assert_eq!(next, 1024_u32.to_be_bytes());
    assert_eq!(store.forget(&next).await?, None);
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM dlock_locks")
        .fetch_one(&mut stranger)
        .await?;
    assert_eq!(rows, 2);
    Ok(())
}

#[tokio::test]
async fn names_of_all_characters_are_locks_in_a_database_of_few() -> Outcome {
    let (_server, url, mut stranger) = database("other").await?;
    run(
        &mut stranger,
        "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
    )
    .await?;
    let driver = PostgresDriver::connect(&url.replace("/other", "/latin")).await?;
    let held = take(&driver, "\u{6771}caf\u{e9}").await?;
    let page = driver.list("\u{6771}", None, 10).await?;
    let found = page.found.first().map(|found| found.name.clone());
    assert_eq!(found, Some(held.name.clone()));
    assert!(matches!(release(&driver, &held).await?, Released::Freed));
    // What people read has the encoding of the database.
    let mut asked = ask("a", Duration::from_secs(5))?;
    asked.info = Arc::new(HolderInfo::new("caf\u{e9}", 1));
    assert!(matches!(
        driver.acquire(&asked).await?,
        Acquired::Granted(_)
    ));
    let seen = driver.inspect(&asked.name).await?;
    assert_eq!(seen.holders[0].info.host, asked.info.host);
    let mut asked = ask("b", Duration::from_secs(5))?;
    asked.info = Arc::new(HolderInfo::new("\u{6771}", 1));
    let refused = driver.acquire(&asked).await;
    assert!(
        matches!(&refused, Err(error) if (error.kind(), error.effect()) == (ErrorKind::Unsupported, Effect::None)
            && error.to_string().contains("encoding")),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test]
async fn settings_of_the_server_change_no_lock() -> Outcome {
    let (_server, url, mut stranger) = database("settings").await?;
    run(
        &mut stranger,
        "ALTER DATABASE settings SET bytea_output = 'escape'; ALTER DATABASE settings SET standard_conforming_strings = off; \
         ALTER DATABASE settings SET default_transaction_isolation = 'serializable'; ALTER DATABASE settings SET timezone = 'Asia/Kolkata'",
    )
    .await?;
    let driver = PostgresDriver::connect(&url).await?;
    let held = take(&driver, "caf\u{e9} 'quoted' \\ %").await?;
    let page = driver.list("caf\u{e9} 'q", None, 10).await?;
    assert_eq!(
        page.found.first().map(|found| found.name.clone()),
        Some(held.name.clone())
    );
    assert!(matches!(release(&driver, &held).await?, Released::Freed));
    Ok(())
}
