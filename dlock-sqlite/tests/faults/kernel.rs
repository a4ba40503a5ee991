//! Effects of the kernel on a file: a full disk, another clock, a mount.

use super::bed::{Bed, acquire, frees, granted, held, open, refused, renew, ticket};
use super::{Outcome, SECOND, alone, isolated, runtime};
use dlock_core::{
    Client, Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock},
};
use libtest_mimic::Trial;
use std::{fs, io::Write, path::Path, sync::Arc};

pub(super) fn trials() -> Vec<Trial> {
    Vec::from(tests! { isolated:
        a_full_disk_takes_nothing_and_keeps_what_is_held,
        a_read_only_file_system_is_refused,
        without_inotify_waiters_poll,
        a_time_namespace_is_another_clock,
        a_file_that_is_mounted_alone_is_refused_and_its_folder_is_not,
    })
}

/// On a disk of a few pages: what is not written was not taken.
pub(super) async fn full(file: &Path) {
    let driver = open(file).await;
    let kept = acquire("kept", SECOND * 60);
    granted(&driver, &kept).await;
    let ballast = file.with_file_name("ballast");
    let mut rest = fs::File::create(&ballast).unwrap();
    while rest.write_all(&[0; 1_024]).is_ok() {}
    drop(rest);
    let mut failures = 0;
    for at in 0..200 {
        let req = acquire(&format!("{at:0500}"), SECOND * 60);
        match driver.acquire(&req).await {
            Ok(Acquired::Granted(_)) => {
                assert_eq!(driver.inspect(&req.name).await.unwrap().holds, 1);
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                failures += 1;
                assert_eq!(
                    (error.kind(), error.retry()),
                    (ErrorKind::Unavailable, RetryClass::Later)
                );
                assert_eq!(error.effect(), Effect::None, "{error:?}");
                assert!(error.to_string().contains("full"), "{error}");
                assert_eq!(driver.inspect(&req.name).await.unwrap().holds, 0);
            }
        }
    }
    assert!(failures > 0, "the disk was not full");
    held(&driver, &acquire("kept", SECOND)).await;
    fs::remove_file(ballast).unwrap();
    granted(&driver, &acquire("room again", SECOND)).await;
    renew(&driver, &kept).await.unwrap();
    frees(&driver, &kept).await;
}

fn a_full_disk_takes_nothing_and_keeps_what_is_held() -> Outcome {
    let bed = Bed::new();
    let small = "mount -t tmpfs -o size=512k tmpfs \"$FOLDER\"";
    alone(&["--mount"], small, "full", &bed.file)
}

pub(super) async fn readonly(file: &Path) {
    let error = refused(file).await;
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, RetryClass::Never)
    );
    assert!(
        error.to_string().contains("cannot read and write"),
        "{error}"
    );
}

fn a_read_only_file_system_is_refused() -> Outcome {
    let bed = Bed::new();
    drop(runtime().block_on(bed.driver()));
    let script = "mount --bind \"$FOLDER\" \"$FOLDER\" && mount -o remount,bind,ro \"$FOLDER\"";
    alone(&["--mount"], script, "readonly", &bed.file)
}

pub(super) async fn deaf(file: &Path) {
    let driver = open(file).await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut waiting = acquire("a", SECOND);
    waiting.ticket = Some(ticket());
    let refusal = held(&driver, &waiting).await;
    assert_eq!(refusal.poll_in, Some(SECOND / 10));
    let other = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let waiter = tokio::spawn(async move { other.lock("a").unwrap().acquire().await });
    // It polls a few times in vain: a waiter that only polls leaves no trace of that.
    tokio::time::sleep(SECOND / 4).await;
    frees(&driver, &first).await;
    let soon = tokio::time::timeout(SECOND * 10, waiter).await;
    drop(soon.unwrap().unwrap().unwrap());
}

fn without_inotify_waiters_poll() -> Outcome {
    let none = "echo 0 > /proc/sys/user/max_inotify_instances";
    alone(&[], none, "deaf", &Bed::new().file)
}

pub(super) async fn elsewhen(file: &Path) {
    let driver = open(file).await;
    let error = driver.acquire(&acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("time:["), "{error}");
    let own = acquire("b", SECOND * 30);
    granted(&driver, &own).await;
    held(&driver, &acquire("b", SECOND)).await;
}

fn a_time_namespace_is_another_clock() -> Outcome {
    let bed = Bed::new();
    runtime().block_on(async {
        granted(&bed.driver().await, &acquire("a", SECOND * 30)).await;
    });
    alone(
        &["--time", "--boottime", "1000000", "--fork"],
        "",
        "elsewhen",
        &bed.file,
    )
}

/// `alone/locks.db` is a mount of the file, `folder` one of its folder.
pub(super) async fn mounted(file: &Path) {
    let error = refused(&file.with_file_name("alone/locks.db")).await;
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("mount its folder"), "{error}");
    let driver = open(&file.with_file_name("folder/locks.db")).await;
    held(&driver, &acquire("a", SECOND)).await;
}

fn a_file_that_is_mounted_alone_is_refused_and_its_folder_is_not() -> Outcome {
    let bed = Bed::new();
    runtime().block_on(async {
        granted(&bed.driver().await, &acquire("a", SECOND * 30)).await;
    });
    let script = "cd \"$FOLDER\"; mkdir alone folder; : > alone/locks.db
        mount --bind locks.db alone/locks.db; mount --bind . folder";
    alone(&["--mount"], script, "mounted", &bed.file)
}
