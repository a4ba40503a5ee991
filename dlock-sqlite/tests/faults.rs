//! What only a file can suffer: its names, its neighbours, its disk, and the processes that share it.
//!
//! This binary starts itself again as other processes, and inside namespaces of its own, so it has a `main` of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::worker::{self, Job, Worker};
use dlock_core::{
    Acquire, Acquired, Broken, Client, Clock, Cursor, DistributedLock, DriverError, Effect,
    ErrorKind, Grant, Held, Hint, HoldId, Holds, Lane, Lease, LockName, Owner, Release, Released,
    Renew, Renewed, Retry, Ticket, Wake,
};
use dlock_sqlite::{SqliteConfig, SqliteDriver};
use futures_util::{FutureExt, StreamExt, future::join_all};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{
    collections::HashSet,
    fs,
    io::Write,
    num::NonZeroU64,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const SECOND: Duration = Duration::from_secs(1);
/// Far longer than anything here takes on a busy machine: only a test that hangs meets it.
const LIMIT: Duration = Duration::from_secs(20);

/// A row of a table of tests: the function's name is the test's.
macro_rules! tests {
    ($kind:ident: $($name:ident),* $(,)?) => { [$($kind(stringify!($name), || $name())),*] };
}

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        return work(&job);
    }
    let mut trials = Vec::from(tests! { trial:
        every_name_of_a_file_leads_to_the_same_locks,
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
        a_record_that_somebody_else_wrote_is_an_error_of_that_name_alone,
        processes_take_turns_at_an_unprotected_file,
        processes_that_open_a_new_file_at_once_all_can,
        a_killed_holder_is_gone_with_its_lease,
        a_writer_killed_in_mid_transaction_is_rolled_back,
        a_writer_that_stands_still_makes_writes_fail_and_looks_succeed,
        a_release_touches_a_file_only_where_somebody_waits,
        a_waiter_in_another_process_is_woken,
        without_wake_ups_waiters_look_and_leave_no_files,
        many_holds_that_come_and_go_at_once_are_counted,
        a_batch_of_renewals_of_any_size_is_answered_in_order,
        a_dropped_call_is_over_before_the_next_one_begins,
        a_walk_over_more_names_than_a_page_meets_each_once,
        a_closed_driver_refuses_and_its_locks_stay,
        no_owner_is_shown,
    });
    trials.extend(tests! { isolated:
        a_full_disk_takes_nothing_and_keeps_what_is_held,
        a_read_only_file_system_is_refused,
        without_inotify_waiters_look,
        a_time_namespace_is_another_clock,
        a_file_that_is_mounted_alone_is_refused_and_its_folder_is_not,
    });
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type Outcome = Result<(), Failed>;

fn trial<F: Future<Output = ()> + Send>(
    name: &str,
    body: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        runtime().block_on(async {
            let done = tokio::time::timeout(LIMIT, body());
            done.await.map_err(|_| Failed::from("it hangs"))
        })
    })
}

/// A test that needs a kernel to itself, which the namespaces of one process are as good as.
fn isolated(name: &str, body: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        let able = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "true"])
            .output();
        match able {
            Ok(output) if output.status.success() => body().map(|()| Completion::Completed),
            refused => {
                let why = "needs unshare (util-linux) and the right to make user namespaces";
                if std::env::var_os("DLOCK_TEST_UNPRIVILEGED").is_some_and(|set| set == "1") {
                    return Ok(Completion::ignored_with(why));
                }
                Err(format!("{why}, or DLOCK_TEST_UNPRIVILEGED=1: {refused:?}").into())
            }
        }
    })
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// What a process of its own does.
fn work(job: &Job) -> ExitCode {
    let path = PathBuf::from(job.arg("file").unwrap());
    runtime().block_on(async {
        match job.name.as_str() {
            "count" => count(&path, job.arg("times").unwrap().parse().unwrap()).await,
            "open" => drop(open(&path).await),
            "hold" => hold(&path).await,
            "write" => write(&path).await,
            "wait" => wait(&path).await,
            "full" => full(&path).await,
            "readonly" => readonly(&path).await,
            "deaf" => deaf(&path).await,
            "elsewhen" => elsewhen(&path).await,
            "mounted" => mounted(&path).await,
            other => panic!("no job {other}"),
        }
    });
    ExitCode::SUCCESS
}

/// Runs one job of this binary after a script, in namespaces that end with it.
fn alone(namespaces: &[&str], script: &str, job: &str, file: &Path) -> Outcome {
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user"])
        .args(namespaces)
        .args(["sh", "-ec", &format!("{script}\nexec \"$0\"")])
        .arg(std::env::current_exe().unwrap())
        .env("DLOCK_WORKER", job)
        .env("DLOCK_WORKER_FILE", file)
        .env("FOLDER", file.parent().unwrap())
        .output()
        .unwrap();
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(said.into())
}

struct Bed {
    folder: TempDir,
    file: PathBuf,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("locks.db");
        Self { folder, file }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn driver(&self) -> SqliteDriver {
        open(&self.file).await
    }

    /// Behind the driver's back.
    async fn sql(&self, sql: &'static str) {
        let mut native = native(&self.file).await;
        sqlx::raw_sql(sql).execute(&mut native).await.unwrap();
        native.close().await.unwrap();
    }

    fn worker(&self, job: &str, more: &[(&str, &str)]) -> Worker {
        let file = self.file.to_str().unwrap();
        Worker::spawn(job, &[&[("file", file)], more].concat()).unwrap()
    }
}

async fn open(file: &Path) -> SqliteDriver {
    SqliteDriver::open(SqliteConfig::new(file)).await.unwrap()
}

async fn refused(file: &Path) -> DriverError {
    let opened = SqliteDriver::open(SqliteConfig::new(file)).await;
    opened.unwrap_err()
}

async fn native(file: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(file);
    options.create_if_missing(true).connect().await.unwrap()
}

fn name(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

fn acquire(lock: &str, lease: Duration) -> Acquire {
    static HOLDS: AtomicU64 = AtomicU64::new(1);
    let hold = HoldId::from_bits(HOLDS.fetch_add(1, Ordering::Relaxed));
    let owner = Owner::from_seed(&format!("{hold} {}", std::process::id()));
    let lease = Lease::fixed(lease).unwrap();
    let give_up = Clock::boot().now() + LIMIT;
    Acquire::new(name(lock), owner, hold, lease, give_up)
}

fn again(first: &Acquire) -> Acquire {
    let mut again = acquire(first.name.as_str(), first.lease.length());
    again.owner = first.owner;
    again
}

async fn granted(driver: &SqliteDriver, req: &Acquire) -> Grant {
    match driver.acquire(req).await.unwrap() {
        Acquired::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

async fn held(driver: &SqliteDriver, req: &Acquire) -> Held {
    match driver.acquire(req).await.unwrap() {
        Acquired::Held(held) => held,
        other => panic!("{other:?}"),
    }
}

async fn release(driver: &SqliteDriver, req: &Acquire) -> Released {
    let released = Release::new(req.name.clone(), req.owner, req.hold);
    driver.release(&released).await.unwrap()
}

async fn frees(driver: &SqliteDriver, req: &Acquire) {
    let released = release(driver, req).await;
    assert!(matches!(released, Released::Freed), "{released:?}");
}

async fn renew(driver: &SqliteDriver, req: &Acquire) -> Result<Renewed, DriverError> {
    let lease = Some(req.lease.length());
    let entry = [Renew::new(req.name.clone(), req.owner, req.hold, lease)];
    let answers = driver.renew(Lane::default(), &entry, Clock::boot().now() + LIMIT);
    answers.await?.pop().unwrap()
}

fn ticket() -> Ticket {
    Ticket(NonZeroU64::MIN)
}

/// All of a file and what stands beside it.
fn bytes(file: &Path) -> Vec<u8> {
    fs::read(file).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
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

async fn what_is_made_is_for_its_user_alone() {
    let bed = Bed::new();
    let file = bed.at("new/deep/locks.db");
    let driver = open(&file).await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut waiter = acquire("a", SECOND);
    waiter.line = Some(ticket());
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
        ("foreign", ErrorKind::Misuse, "somebody else's"),
        ("tagged", ErrorKind::Misuse, "somebody else's"),
        ("linked", ErrorKind::Misuse, "hard links"),
        ("directory", ErrorKind::Misuse, "no regular file"),
        ("dangling", ErrorKind::Unavailable, "cannot make"),
    ] {
        let file = bed.at(file);
        let before = fs::read(&file).ok();
        let error = refused(&file).await;
        assert_eq!(
            (error.kind(), error.retry()),
            (kind, Retry::Never),
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
        (ErrorKind::Unavailable, Retry::Never)
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
        for error in [
            driver.acquire(&acquire("b", SECOND)).await.unwrap_err(),
            renew(&driver, &first).await.unwrap_err(),
        ] {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::None)
            );
            assert!(error.to_string().contains("connect again"), "{error}");
        }
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
    assert!(free.holders.is_empty() && free.shut.is_none());
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
        assert_eq!(grant.token.unwrap().0, token);
        assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND * 30));
        held(&driver, &acquire("a", SECOND)).await;
        frees(&driver, &next).await;
    }
}

async fn a_record_that_somebody_else_wrote_is_an_error_of_that_name_alone() {
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

/// Adds to a number in a file that nothing but the lock protects.
async fn count(file: &Path, times: u32) {
    let client = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let lock = client.lock("counter").unwrap();
    let counter = file.with_extension("counter");
    let mut last = 0;
    for _ in 0..times {
        let guard = lock.acquire().await.unwrap();
        let token = guard.token().0;
        assert!(token > last);
        last = token;
        let number: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
        tokio::task::yield_now().await;
        fs::write(&counter, (number + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
    worker::say("done").unwrap();
}

async fn processes_take_turns_at_an_unprotected_file() {
    let bed = Bed::new();
    fs::write(bed.file.with_extension("counter"), "0").unwrap();
    let mut workers: Vec<_> = (0..4)
        .map(|_| bed.worker("count", &[("times", "50")]))
        .collect();
    join_all(
        workers
            .iter_mut()
            .map(|worker| worker.expect("done", LIMIT)),
    )
    .await
    .into_iter()
    .for_each(|done| drop(done.unwrap()));
    let counter = fs::read_to_string(bed.file.with_extension("counter"));
    assert_eq!(counter.unwrap(), "200");
}

async fn processes_that_open_a_new_file_at_once_all_can() {
    let bed = Bed::new();
    let mut workers: Vec<_> = (0..12).map(|_| bed.worker("open", &[])).collect();
    for ended in join_all(workers.iter_mut().map(Worker::wait)).await {
        assert!(ended.unwrap().success());
    }
}

async fn hold(file: &Path) {
    let driver = open(file).await;
    granted(&driver, &acquire("a", SECOND)).await;
    worker::say("held").unwrap();
    std::future::pending().await
}

async fn a_killed_holder_is_gone_with_its_lease() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let mut holder = bed.worker("hold", &[]);
    holder.expect("held", LIMIT).await.unwrap();
    holder.kill_9().await.unwrap();
    let refusal = held(&driver, &acquire("a", SECOND)).await;
    tokio::time::sleep(refusal.look_in.unwrap()).await;
    granted(&driver, &acquire("a", SECOND)).await;
}

/// Holds the file's one write lock, half-way through.
async fn write(file: &Path) {
    let mut native = native(file).await;
    let half = "BEGIN IMMEDIATE; UPDATE locks SET owner = 'half', token = token + 1000, version = version + 1";
    sqlx::raw_sql(half).execute(&mut native).await.unwrap();
    worker::say("half-way").unwrap();
    std::future::pending().await
}

async fn a_writer_killed_in_mid_transaction_is_rolled_back() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    let token = granted(&driver, &first).await.token;
    let mut writer = bed.worker("write", &[]);
    writer.expect("half-way", LIMIT).await.unwrap();
    writer.kill_9().await.unwrap();
    let shown = driver.inspect(&first.name).await.unwrap();
    assert_eq!(shown.holders[0].token, token);
    assert_eq!(shown.holders[0].owner, first.owner.fingerprint());
    frees(&driver, &first).await;
    granted(&driver, &acquire("a", SECOND)).await;
}

async fn a_writer_that_stands_still_makes_writes_fail_and_looks_succeed() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut writer = bed.worker("write", &[]);
    writer.expect("half-way", LIMIT).await.unwrap();
    writer.stop().unwrap();
    let began = Clock::boot().now();
    let error = driver.acquire(&acquire("b", SECOND)).await.unwrap_err();
    let waited = Clock::boot().now().since(began);
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, Retry::Later, Effect::None)
    );
    assert!(error.to_string().contains("busy"), "{error}");
    assert!(waited > SECOND / 2 && waited < SECOND * 3, "{waited:?}");
    let mut look = acquire("a", SECOND);
    look.look = true;
    held(&driver, &look).await;
    assert_eq!(driver.inspect(&first.name).await.unwrap().holds, 1);
    writer.kill_9().await.unwrap();
    granted(&driver, &acquire("b", SECOND)).await;
}

/// When the wake files were touched last.
fn touched(bed: &Bed) -> Vec<SystemTime> {
    let files = fs::read_dir(bed.at("locks.db.wake")).into_iter().flatten();
    files
        .map(|file| file.unwrap().metadata().unwrap().modified().unwrap())
        .collect()
}

async fn a_release_touches_a_file_only_where_somebody_waits() {
    let bed = Bed::new();
    let (holder, waiter) = (bed.driver().await, bed.driver().await);
    let first = acquire("a", SECOND * 30);
    granted(&holder, &first).await;
    held(&waiter, &acquire("a", SECOND)).await;
    frees(&holder, &first).await;
    assert!(
        touched(&bed).is_empty(),
        "without a ticket no trace is left"
    );

    let mut hints = waiter.hints();
    let second = acquire("a", SECOND * 30);
    granted(&holder, &second).await;
    let mut waiting = acquire("a", SECOND);
    waiting.line = Some(ticket());
    assert_eq!(held(&waiter, &waiting).await.look_in, Some(SECOND * 2));
    let before = touched(&bed);
    assert_eq!(before.len(), 1);
    assert_eq!(hints.next().now_or_never(), None);
    frees(&holder, &second).await;
    assert_eq!(hints.next().await, Some(Hint::Free(name("a"))));
    assert!(touched(&bed) > before);
    // A name that nobody waits for.
    let before = touched(&bed);
    let other = acquire("b", SECOND * 30);
    granted(&holder, &other).await;
    frees(&holder, &other).await;
    assert_eq!(touched(&bed), before);
    // What breaks it and what frees it by force wakes too.
    let third = acquire("a", SECOND * 30);
    granted(&holder, &third).await;
    holder.break_lock(&third.name, None).await.unwrap();
    assert_eq!(hints.next().await, Some(Hint::Free(name("a"))));
    waiter.leave(&name("a"), ticket()).await.unwrap();
}

async fn wait(file: &Path) {
    let client = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let lock = client.lock("a").unwrap();
    worker::say("waits").unwrap();
    let guard = lock.acquire().await.unwrap();
    let at = Clock::boot().now().as_nanos();
    guard.release().await.unwrap();
    worker::say(&format!("entered {at}")).unwrap();
}

async fn a_waiter_in_another_process_is_woken() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let mut quickest = LIMIT;
    for _ in 0..5 {
        let first = acquire("a", SECOND * 30);
        granted(&driver, &first).await;
        let mut waiter = bed.worker("wait", &[]);
        waiter.expect("waits", LIMIT).await.unwrap();
        while touched(&bed).is_empty() {
            tokio::time::sleep(SECOND / 100).await;
        }
        tokio::time::sleep(SECOND / 20).await;
        let freed = Clock::boot().now();
        frees(&driver, &first).await;
        let entered = waiter.expect("entered ", LIMIT).await.unwrap();
        let entered = dlock_core::Instant::from_nanos(entered.parse().unwrap());
        quickest = quickest.min(entered.since(freed));
    }
    // Looking alone would take two seconds.
    assert!(quickest < SECOND / 4, "{quickest:?}");
}

async fn without_wake_ups_waiters_look_and_leave_no_files() {
    let bed = Bed::new();
    let url = format!("sqlite:{}?dlock.wake=poll", bed.file.display());
    let polling = SqliteDriver::connect(&url).await.unwrap();
    assert_eq!(polling.capabilities().wake, Wake::Poll);
    assert_eq!(polling.hints().next().await, None);
    let first = acquire("a", SECOND * 30);
    granted(&polling, &first).await;
    let mut waiting = acquire("a", SECOND);
    waiting.line = Some(ticket());
    let rest = held(&polling, &waiting).await.look_in.unwrap();
    assert!(rest > SECOND * 29, "{rest:?}");
    let client = Client::builder(Arc::new(polling)).build().unwrap();
    let waiter = tokio::spawn(async move { client.lock("a").unwrap().acquire().await });
    tokio::time::sleep(SECOND / 4).await;
    frees(&bed.driver().await, &first).await;
    let soon = tokio::time::timeout(SECOND, waiter).await;
    drop(soon.unwrap().unwrap().unwrap());
    assert!(!bed.at("locks.db.wake").exists());
}

async fn many_holds_that_come_and_go_at_once_are_counted() {
    let bed = Bed::new();
    let drivers = join_all((0..4).map(|_| bed.driver())).await;
    let first = acquire("a", SECOND * 30);
    let token = granted(&drivers[0], &first).await.token;
    let joins = drivers.iter().enumerate().map(|(which, driver)| {
        let mut holds: Vec<_> = (0..6).map(|_| again(&first)).collect();
        if which % 2 == 0 {
            holds.iter_mut().for_each(|hold| hold.join = token);
        }
        async move {
            for hold in &holds {
                assert_eq!(granted(driver, hold).await.token, token);
                assert_eq!(granted(driver, hold).await.token, token, "repeated");
                assert!(matches!(
                    renew(driver, hold).await,
                    Ok(Renewed::Until { .. })
                ));
            }
            holds
        }
    });
    let holds: Vec<_> = join_all(joins).await.into_iter().flatten().collect();
    assert_eq!(drivers[1].inspect(&first.name).await.unwrap().holds, 25);
    let releases = holds
        .chunks(6)
        .zip(&drivers)
        .map(|(holds, driver)| async move {
            for hold in holds {
                let released = release(driver, hold).await;
                assert!(
                    matches!(released, Released::StillHeld { .. }),
                    "{released:?}"
                );
            }
        });
    join_all(releases).await;
    frees(&drivers[3], &first).await;
}

async fn a_batch_of_renewals_of_any_size_is_answered_in_order() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let most = driver.capabilities().renew_batch;
    for size in [1, 2, 8, 9, most, most + 3] {
        let mut batch = Vec::new();
        for at in 0..size {
            let req = acquire(&format!("{size}/{at}"), SECOND * 10);
            granted(&driver, &req).await;
            let hold = if at % 3 == 1 {
                HoldId::from_bits(0)
            } else {
                req.hold
            };
            let mut lease = Some(SECOND * 60);
            if at % 3 == 2 {
                lease = None; // only to be proven
            }
            batch.push(Renew::new(req.name.clone(), req.owner, hold, lease));
        }
        let answers = driver.renew(Lane::default(), &batch, Clock::boot().now() + LIMIT);
        let answers = answers.await.unwrap();
        assert_eq!(answers.len(), size);
        for (at, answer) in answers.into_iter().enumerate() {
            match (at % 3, answer.unwrap()) {
                (0, Renewed::Until { valid_for }) => assert_eq!(valid_for, SECOND * 60),
                (1, Renewed::NotHeld) => {}
                (2, Renewed::Until { valid_for }) => assert!(valid_for <= SECOND * 10),
                (_, other) => panic!("{at} of {size}: {other:?}"),
            }
        }
    }
}

async fn a_dropped_call_is_over_before_the_next_one_begins() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for polls in 0..6 {
        let req = acquire("a", SECOND * 30);
        let mut call = driver.acquire(&req);
        for _ in 0..polls {
            if (&mut call).now_or_never().is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(call);
        let left = driver.inspect(&req.name).await.unwrap().holds;
        tokio::time::sleep(SECOND / 50).await;
        let later = driver.inspect(&req.name).await.unwrap().holds;
        assert_eq!(left, later, "nothing comes after the next answer");
        release(&driver, &req).await;
        assert_eq!(driver.inspect(&req.name).await.unwrap().holds, 0);
    }
}

async fn a_walk_over_more_names_than_a_page_meets_each_once() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for lock in ["a", "a%", "a\u{10ffff}", "a_", "b", "A", "é", "a/1", "a/2"] {
        let req = acquire(lock, SECOND * 30);
        granted(&driver, &req).await;
        if lock == "a/2" {
            let mut kept = Release::new(req.name.clone(), req.owner, req.hold);
            (kept.holds, kept.keep) = (Holds::All, Some(SECOND * 30));
            driver.release(&kept).await.unwrap();
        }
    }
    let free = acquire("a/free", SECOND);
    granted(&driver, &free).await;
    frees(&driver, &free).await;
    for (prefix, wanted) in [("", 9), ("a", 6), ("a/", 2), ("a\u{10ffff}", 1), ("z", 0)] {
        for limit in [1, 2, 100] {
            let (mut seen, mut from) = (Vec::new(), None::<Cursor>);
            loop {
                let page = driver.list(prefix, from.as_ref(), limit).await.unwrap();
                assert!(page.found.len() <= limit);
                seen.extend(page.found.into_iter().map(|shown| shown.name));
                from = page.next;
                if from.is_none() {
                    break;
                }
            }
            assert!(seen.iter().all(|name| name.as_str().starts_with(prefix)));
            let distinct: HashSet<_> = seen.iter().collect();
            assert_eq!(
                (seen.len(), distinct.len()),
                (wanted, wanted),
                "{prefix:?} by {limit}"
            );
        }
    }
    let wrong = Cursor(vec![0xff]);
    let error = driver.list("", Some(&wrong), 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

async fn a_closed_driver_refuses_and_its_locks_stay() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    driver.close().await;
    let error = driver.acquire(&acquire("b", SECOND)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShuttingDown);
    assert!(
        !bed.at("locks.db-wal").exists(),
        "the last one puts the file in order"
    );
    let driver = bed.driver().await;
    held(&driver, &acquire("a", SECOND)).await;
    frees(&driver, &first).await;
}

async fn no_owner_is_shown() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let refusal = held(&driver, &acquire("a", SECOND)).await;
    let shown = driver.inspect(&first.name).await.unwrap();
    bed.sql("UPDATE locks SET boot = 'another boot'").await;
    let error = driver.inspect(&first.name).await.unwrap_err();
    let said = format!("{driver:?} {refusal:?} {shown:?} {error:?} {error}");
    assert!(
        !said.contains(&first.owner.expose().to_string()[..8]),
        "{said}"
    );
}

/// On a disk of a few pages: what is not written was not taken.
async fn full(file: &Path) {
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
                    (ErrorKind::Unavailable, Retry::Later)
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

async fn readonly(file: &Path) {
    let error = refused(file).await;
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, Retry::Never)
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

async fn deaf(file: &Path) {
    let driver = open(file).await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let mut waiting = acquire("a", SECOND);
    waiting.line = Some(ticket());
    let refusal = held(&driver, &waiting).await;
    assert_eq!(refusal.look_in, Some(SECOND / 10));
    let other = Client::builder(Arc::new(open(file).await)).build().unwrap();
    let waiter = tokio::spawn(async move { other.lock("a").unwrap().acquire().await });
    tokio::time::sleep(SECOND / 4).await;
    frees(&driver, &first).await;
    let soon = tokio::time::timeout(SECOND, waiter).await;
    drop(soon.unwrap().unwrap().unwrap());
}

fn without_inotify_waiters_look() -> Outcome {
    let none = "echo 0 > /proc/sys/user/max_inotify_instances";
    alone(&[], none, "deaf", &Bed::new().file)
}

async fn elsewhen(file: &Path) {
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
async fn mounted(file: &Path) {
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
