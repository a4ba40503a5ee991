//! States of a file: reached by two names, replaced, damaged, foreign, from another time.

use super::bed::{
    Bed, acquire, again, bytes, frees, granted, held, mode, native, open, refused, release, renew,
    ticket,
};
use super::{SECOND, trial};
use dlock_core::{
    Broken, Effect, ErrorKind, FencingToken, RetryClass,
    driver::{DistributedLock, Released, Renewed},
};
use dlock_sqlite::{
    SqliteDriver,
    sqlx::{SqlitePool, sqlite::SqliteConnectOptions},
};
use libtest_mimic::Trial;
use std::{fs, os::unix::fs::symlink};

pub(super) fn trials() -> Vec<Trial> {
    Vec::from(tests! { trial:
        every_name_of_a_file_leads_to_the_same_locks,
        the_locks_of_a_pool_stand_beside_its_database_and_do_not_wait_for_it,
        what_is_made_is_for_its_user_alone,
        a_file_that_must_be_there_is_not_made,
        what_cannot_carry_locks_is_refused_and_left_as_it_is,
        a_newer_schema_is_refused_and_left_as_it_is,
        a_damaged_file_is_an_error_that_says_so,
        a_file_that_was_replaced_gives_no_locks_any_more,
        a_file_without_its_content_gives_no_locks_while_its_log_is_there,
        a_record_of_an_earlier_boot_is_free,
        a_younger_record_of_another_boot_is_another_kernel,
        a_wall_clock_that_was_set_back_gives_greater_tokens_still,
        a_foreign_record_is_an_error_of_that_name_alone,
        a_walk_shows_a_damaged_record_and_goes_on_and_break_frees_it,
        no_number_in_a_row_is_too_great_or_too_small_and_a_break_mends_each,
    })
}

async fn every_name_of_a_file_leads_to_the_same_locks() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    symlink(&bed.file, bed.at("link.db")).unwrap();
    symlink(bed.folder.path(), bed.at("folder")).unwrap();
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let crooked = bed.at("folder/./folder/locks.db");
    for path in [bed.at("link.db"), bed.at("folder/link.db"), crooked] {
        let other = open(&path).await;
        assert_eq!(other.capabilities().store, driver.capabilities().store);
        held(&other, &acquire("a", SECOND)).await;
    }
    assert!(!bed.at("link.db.wake").exists() && !bed.at("link.db-wal").exists());
    let another = open(&bed.at("another.db")).await;
    assert_ne!(another.capabilities().store, driver.capabilities().store);
    granted(&another, &acquire("a", SECOND)).await;
}

async fn the_locks_of_a_pool_stand_beside_its_database_and_do_not_wait_for_it() {
    let bed = Bed::new();
    let options = SqliteConnectOptions::new().filename(bed.at("app.db"));
    let pool = SqlitePool::connect_with(options.create_if_missing(true)).await;
    let pool = pool.unwrap();
    let writing = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let driver = SqliteDriver::from_pool(&pool).await.unwrap();
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    frees(&driver, &first).await;
    drop(writing);
    let same = open(&bed.at("app.db.dlock")).await;
    assert_eq!(same.capabilities().store, driver.capabilities().store);

    let memory = SqlitePool::connect("sqlite::memory:").await.unwrap();
    let refused = SqliteDriver::from_pool(&memory).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misuse);
}

async fn what_is_made_is_for_its_user_alone() {
    let bed = Bed::new();
    let file = bed.at("new/deep/locks.db");
    let driver = open(&file).await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut waiter = acquire("a", SECOND);
    waiter.ticket = Some(ticket());
    held(&driver, &waiter).await;
    for folder in ["new", "new/deep", "new/deep/locks.db.wake"] {
        assert_eq!(mode(&bed.at(folder)), 0o700, "{folder}");
    }
    for file in [
        "new/deep/locks.db",
        "new/deep/locks.db-wal",
        "new/deep/locks.db-shm",
    ] {
        assert_eq!(mode(&bed.at(file)), 0o600, "{file}");
    }
    let wake = fs::read_dir(bed.at("new/deep/locks.db.wake")).unwrap();
    let wake: Vec<_> = wake.map(|file| file.unwrap().path()).collect();
    assert_eq!(wake.len(), 1);
    assert_eq!(mode(&wake[0]), 0o600);
}

async fn a_file_that_must_be_there_is_not_made() {
    let bed = Bed::new();
    let url = format!("sqlite:{}?mode=rw", bed.file.display());
    let error = SqliteDriver::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("locks.db"), "{error}");
    assert!(!bed.file.exists());
    drop(bed.driver().await);
    SqliteDriver::connect(&url).await.unwrap();
}

async fn what_cannot_carry_locks_is_refused_and_left_as_it_is() {
    let bed = Bed::new();
    fs::write(
        bed.at("text"),
        "not a database, and longer than its header: ".repeat(9),
    )
    .unwrap();
    bed.sql("CREATE TABLE orders (id); INSERT INTO orders VALUES (7)")
        .await;
    fs::rename(&bed.file, bed.at("foreign")).unwrap();
    bed.sql("PRAGMA application_id = 77").await;
    fs::rename(&bed.file, bed.at("tagged")).unwrap();
    drop(bed.driver().await);
    fs::hard_link(&bed.file, bed.at("linked")).unwrap();
    fs::create_dir(bed.at("directory")).unwrap();
    symlink(bed.at("nothing"), bed.at("dangling")).unwrap();
    for (file, kind, words) in [
        ("text", ErrorKind::Misuse, "no SQLite database"),
        ("foreign", ErrorKind::Misuse, "another application's"),
        ("tagged", ErrorKind::Misuse, "another application's"),
        ("linked", ErrorKind::Misuse, "hard links"),
        ("directory", ErrorKind::Misuse, "no regular file"),
        ("dangling", ErrorKind::Unavailable, "cannot make"),
    ] {
        let file = bed.at(file);
        let before = fs::read(&file).ok();
        let error = refused(&file).await;
        assert_eq!(
            (error.kind(), error.retry()),
            (kind, RetryClass::Never),
            "{error}"
        );
        for words in [words, &file.display().to_string()] {
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(fs::read(&file).ok(), before);
    }
}

async fn a_newer_schema_is_refused_and_left_as_it_is() {
    let bed = Bed::new();
    drop(bed.driver().await);
    bed.sql("PRAGMA user_version = 2").await;
    let before = bytes(&bed.file);
    let error = refused(&bed.file).await;
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("schema 2"), "{error}");
    assert_eq!(bytes(&bed.file), before);
}

async fn a_damaged_file_is_an_error_that_says_so() {
    let bed = Bed::new();
    bed.driver().await.close().await;
    let mut damaged = bytes(&bed.file);
    let page = damaged.len() / 2;
    damaged[page..].fill(0xa5);
    fs::write(&bed.file, &damaged).unwrap();
    let driver = bed.driver().await;
    let error = driver.acquire(&acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, RetryClass::Never)
    );
    assert!(error.to_string().contains("damaged"), "{error}");
    driver.close().await;
    assert_eq!(bytes(&bed.file), damaged);
}

async fn a_file_that_was_replaced_gives_no_locks_any_more() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    for file in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        fs::remove_file(bed.at(file)).unwrap();
    }
    for made_again in [false, true] {
        if made_again {
            granted(&bed.driver().await, &acquire("b", SECOND * 30)).await;
        }
        let error = driver.acquire(&acquire("b", SECOND)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Unavailable, Effect::None)
        );
        assert!(error.to_string().contains("connect again"), "{error}");
        assert_eq!(renew(&driver, &first).await.unwrap(), Renewed::NotHeld);
    }
    held(&bed.driver().await, &acquire("b", SECOND)).await;
}

async fn a_file_without_its_content_gives_no_locks_while_its_log_is_there() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    granted(&driver, &acquire("a", SECOND * 30)).await;
    for emptied in [true, false] {
        if emptied {
            fs::write(&bed.file, "").unwrap();
        } else {
            fs::remove_file(&bed.file).unwrap();
        }
        let error = refused(&bed.file).await;
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(
            error.to_string().contains("delete its -wal and -shm"),
            "{error}"
        );
    }
    for log in ["locks.db-wal", "locks.db-shm"] {
        fs::remove_file(bed.at(log)).unwrap();
    }
    granted(&bed.driver().await, &acquire("a", SECOND)).await;
}

async fn a_record_of_an_earlier_boot_is_free() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    let before = granted(&driver, &first).await.token;
    // Written a century of boots ago.
    bed.sql("UPDATE locks SET boot = 'an earlier boot', written = 1")
        .await;
    let free = driver.inspect(&first.name).await.unwrap();
    assert!(free.holders.is_empty() && free.unavailable_for.is_none());
    assert!(matches!(renew(&driver, &first).await, Ok(Renewed::NotHeld)));
    assert!(matches!(
        release(&driver, &first).await,
        Released::NotHeld { by: None }
    ));
    let broken = driver.break_lock(&first.name, None).await.unwrap();
    assert_eq!(broken, Broken::WasFree);
    let second = granted(&driver, &acquire("a", SECOND)).await;
    assert!(second.token > before);
}

async fn a_younger_record_of_another_boot_is_another_kernel() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND);
    granted(&driver, &first).await;
    bed.sql("UPDATE locks SET boot = 'another boot', until = 1, version = 70")
        .await;
    let errors = [
        driver.acquire(&acquire("a", SECOND)).await.err(),
        driver.acquire(&again(&first)).await.err(),
        driver.inspect(&first.name).await.err(),
        driver.break_lock(&first.name, None).await.err(),
        renew(&driver, &first).await.err(),
    ];
    let ours = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for error in errors.map(Option::unwrap) {
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Misuse, Effect::None)
        );
        let words = error.to_string();
        assert!(
            words.contains("another boot") && words.contains(ours.trim()),
            "{words}"
        );
    }
    let row = "SELECT version, until, boot FROM locks";
    let row: (i64, i64, String) = sqlx::query_as(row)
        .fetch_one(&mut native(&bed.file).await)
        .await
        .unwrap();
    assert_eq!(row, (70, 1, "another boot".to_owned()));
    granted(&driver, &acquire("b", SECOND)).await;
}

async fn a_wall_clock_that_was_set_back_gives_greater_tokens_still() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    frees(&driver, &first).await;
    bed.sql("UPDATE locks SET token = 9000000000000000").await;
    for token in [9_000_000_000_000_001, 9_000_000_000_000_002] {
        let next = acquire("a", SECOND * 30);
        let grant = granted(&driver, &next).await;
        assert_eq!(grant.token.0, token);
        assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 30));
        held(&driver, &acquire("a", SECOND)).await;
        frees(&driver, &next).await;
    }
}

async fn a_foreign_record_is_an_error_of_that_name_alone() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    granted(&driver, &acquire("a", SECOND * 30)).await;
    bed.sql("UPDATE locks SET holds = 'zzz'").await;
    let error = driver.acquire(&acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::None)
    );
    assert!(error.to_string().contains("did not write"), "{error}");
    granted(&driver, &acquire("b", SECOND)).await;
}

async fn no_number_in_a_row_is_too_great_or_too_small_and_a_break_mends_each() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for column in ["token", "until", "keep", "since", "waiters", "version"] {
        for number in [i64::MIN, -1, i64::MAX] {
            let name = format!("{column} {number}");
            granted(&driver, &acquire(&name, SECOND * 30)).await;
            let set =
                format!("UPDATE locks SET {column} = {number} WHERE name = CAST('{name}' AS BLOB)");
            bed.sql(&set).await;
            let other = acquire(&name, SECOND * 30);
            drop(driver.inspect(&other.name).await);
            driver.list("", None, 100).await.unwrap();
            drop(driver.acquire(&other).await);
            driver.break_lock(&other.name, None).await.unwrap();
            granted(&driver, &other).await;
            frees(&driver, &other).await;
        }
    }
}

async fn a_walk_shows_a_damaged_record_and_goes_on_and_break_frees_it() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for name in ["a", "b", "c", "d", "e"] {
        granted(&driver, &acquire(name, SECOND * 30)).await;
    }
    for sql in [
        "UPDATE locks SET holds = 'zzz' WHERE name = CAST('b' AS BLOB)",
        "UPDATE locks SET note = CAST(x'ff' AS TEXT) WHERE name = CAST('c' AS BLOB)",
        // What is over is free, whatever else the row says; and what is no name is no lock.
        "UPDATE locks SET holds = 'zzz', until = 1 WHERE name = CAST('d' AS BLOB)",
        "UPDATE locks SET name = x'64ff' WHERE name = CAST('e' AS BLOB)",
    ] {
        bed.sql(sql).await;
    }
    for limit in [1, 2, 100] {
        let (mut found, mut from) = (Vec::new(), None);
        loop {
            let page = driver.list("", from.as_ref(), limit).await.unwrap();
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
    let b = acquire("b", SECOND * 30);
    let wrong = driver.break_lock(&b.name, Some(FencingToken(1))).await;
    assert!(wrong.unwrap_err().to_string().contains("did not write"));
    let broken = driver.break_lock(&b.name, None).await.unwrap();
    assert_eq!(broken, Broken::Freed { token: None });
    granted(&driver, &b).await;
}
