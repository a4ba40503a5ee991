//! SQLite driver: the record driver over the rows of a file.

use crate::{config::SqliteConfig, machine::Machine, store::SqliteStore};
use dlock_core::{
    Clock,
    driver::{
        Result,
        kit::{RecordBacked, RecordDriver},
    },
};
use sqlx::SqlitePool;

/// Locks in a file of this machine, shared by its processes.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_sqlite::SqliteDriver::connect("sqlite:/run/billing/locks.db").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SqliteDriver(RecordDriver<SqliteStore>);

impl SqliteDriver {
    /// Opens the file of a URL: see [`SqliteConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL or one of its settings cannot be read, or the file belongs to another program.
    /// `Unsupported` on a file system that several machines can see, or with a newer schema. `Unavailable`
    /// when the file cannot be made, read or written.
    ///
    /// # Cancel safety
    /// Dropped, it may leave an empty lock file behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_sqlite::SqliteDriver::connect("sqlite:/run/billing/locks.db").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Opens a file with settings made in code. Call it inside a tokio runtime with timers and I/O.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_sqlite::{SqliteConfig, SqliteDriver};
    ///
    /// let driver = SqliteDriver::open(SqliteConfig::new("/run/billing/locks.db")).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        Self::open_on(config, Machine::here(Clock::boot())?).await
    }

    /// Keeps the locks in a file beside the database of the application's own pool: its name with `.dlock` behind it.
    ///
    /// File and connection are dlock's own. SQLite lets one transaction write to a file at a time: in the database
    /// itself, a renewal would wait for the application's transactions, and the lock could be lost.
    ///
    /// # Errors
    /// `Misuse` when the pool's database is in memory; otherwise as [`open`](Self::open).
    ///
    /// # Cancel safety
    /// As [`open`](Self::open).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(pool: dlock_sqlite::sqlx::SqlitePool) -> dlock_core::driver::Result<()> {
    /// let driver = dlock_sqlite::SqliteDriver::from_pool(&pool).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_pool(pool: &SqlitePool) -> Result<Self> {
        Self::open(pool.try_into()?).await
    }

    async fn open_on(config: SqliteConfig, machine: Machine) -> Result<Self> {
        let store = SqliteStore::open_on(config, machine).await?;
        Ok(Self(RecordDriver::new(store)))
    }
}

impl RecordBacked for SqliteDriver {
    type Store = SqliteStore;

    fn record_driver(&self) -> &RecordDriver<SqliteStore> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::SqliteDriver;
    use crate::{
        commands::{PAGE, RENEW_BATCH},
        config::SqliteConfig,
        connection::Checkout,
        machine::Machine,
    };
    use dlock_core::{
        Clock, HoldId, Lease, LockName, Owner,
        driver::{
            Acquire, Acquired, DistributedLock, Release, Renew,
            kit::{Class, RecordStore},
        },
    };
    use std::{future::poll_fn, path::Path, sync::mpsc::channel, task::Poll, time::Duration};

    const SECOND: Duration = Duration::from_secs(1);
    const DAY: Duration = Duration::from_secs(86_400);

    async fn on(clock: &Clock, folder: &Path) -> SqliteDriver {
        let machine = Machine::here(clock.clone()).unwrap();
        let config = SqliteConfig::new(folder.join("locks.db"));
        SqliteDriver::open_on(config, machine).await.unwrap()
    }

    fn acquire(name: &str, lease: Duration) -> Acquire {
        let (name, lease) = (LockName::new(name).unwrap(), Lease::fixed(lease));
        let owner = Owner::from_seed(&fastrand::u64(..).to_string());
        let (hold, give_up) = (HoldId::from_bits(7), Clock::boot().now() + DAY * 30);
        Acquire::new(name, owner, hold, lease, give_up)
    }

    async fn token(driver: &SqliteDriver, req: &Acquire) -> u64 {
        match driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant.token.0,
            other => panic!("{other:?}"),
        }
    }

    async fn checkout(driver: &SqliteDriver) -> Checkout<'_> {
        let connection = &driver.0.store().connection;
        connection.checkout(Class::Work).await.unwrap()
    }

    /// Time passes by both clocks: the boot clock jumps, and the wall clock's times in the file move back.
    async fn pass(driver: &SqliteDriver, clock: &Clock, time: Duration) {
        clock.jump(time);
        let past = "UPDATE locks SET token = token - ?1, written = written - ?1";
        let past = sqlx::query(past).bind(i64::try_from(time.as_micros()).unwrap());
        let mut checkout = checkout(driver).await;
        past.execute(checkout.native()).await.unwrap();
    }

    async fn names(driver: &SqliteDriver) -> i64 {
        let mut checkout = checkout(driver).await;
        let names = sqlx::query_scalar("SELECT count(*) FROM locks");
        names.fetch_one(checkout.native()).await.unwrap()
    }

    #[tokio::test]
    async fn names_long_free_are_forgotten_and_their_tokens_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::simulated();
        let today = on(&clock, folder.path()).await;
        let free = acquire("free", SECOND);
        let last = token(&today, &free).await;
        let freed = Release::new(free.name.clone(), free.owner, free.hold);
        today.release(&freed).await.unwrap();
        token(&today, &acquire("lapsed", SECOND)).await;
        token(&today, &acquire("held", DAY * 9)).await;
        pass(&today, &clock, DAY + SECOND * 2).await;
        let tomorrow = on(&clock, folder.path()).await;
        // Sweeps are rare: this takes some hundred grants.
        let mut grants = 0;
        while names(&tomorrow).await > 1 + grants {
            token(&tomorrow, &acquire(&format!("used {grants}"), SECOND)).await;
            grants += 1;
            assert!(grants < 10_000, "it is swept");
        }
        assert!(token(&tomorrow, &acquire("free", SECOND)).await > last);
        let held = tomorrow.inspect(&LockName::new("held").unwrap()).await;
        assert_eq!(held.unwrap().holds, 1);
    }

    /// A name that is in use for the whole test, before all others.
    fn used(number: u32) -> Acquire {
        acquire(&format!("job-a{number:05}"), DAY * 6)
    }

    async fn used_up(driver: &SqliteDriver, name: &str) {
        let once = acquire(name, SECOND);
        token(driver, &once).await;
        let freed = Release::new(once.name.clone(), once.owner, once.hold);
        driver.release(&freed).await.unwrap();
    }

    #[tokio::test]
    async fn names_behind_a_crowd_in_use_are_forgotten_by_a_bounded_number_of_sweeps() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::simulated();
        let today = on(&clock, folder.path()).await;
        for number in 0..1_000 {
            token(&today, &used(number)).await;
        }
        for number in 0..5_000 {
            used_up(&today, &format!("job-b{number:05}")).await;
        }
        pass(&today, &clock, DAY + SECOND * 2).await;
        let later = on(&clock, folder.path()).await;
        let pages = 6_000_u64.div_ceil(PAGE.unsigned_abs());
        let mut after = Vec::new();
        for _ in 0..pages {
            let end = later.0.store().forget(&after).await.unwrap();
            assert_ne!(end.as_ref(), Some(&after), "it goes on");
            after = end.unwrap_or_default();
        }
        assert_eq!(names(&later).await, 1_000);
    }

    #[tokio::test]
    async fn a_table_does_not_grow_over_days_of_names_that_are_used_once() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::simulated();
        let today = on(&clock, folder.path()).await;
        for number in 0..300 {
            token(&today, &used(number)).await;
        }
        for day in 0..20 {
            // Real holders of the first names would renew them; the test takes them for long instead.
            let driver = on(&clock, folder.path()).await;
            for number in 0..400 {
                used_up(&driver, &format!("job-b{day:02}-{number:05}")).await;
            }
            pass(&driver, &clock, DAY / 4).await;
        }
        // Four quarters of a day wait for their day to be over; as many again are found late.
        let left = names(&today).await;
        assert!(left < 300 + 10 * 400, "{left}");
    }

    #[tokio::test]
    async fn at_most_one_request_is_served_before_a_renewal() {
        let folder = tempfile::tempdir().unwrap();
        let driver = on(&Clock::simulated(), folder.path()).await;
        let connection = &driver.0.store().connection;
        let order = std::cell::RefCell::new(Vec::new());
        let ask = async |class: Class| {
            let checkout = connection.checkout(class).await.unwrap();
            order.borrow_mut().push(class);
            drop(checkout);
        };
        let first = connection.checkout(Class::Work).await.unwrap();
        // Each queues when it is polled first, in this order.
        tokio::join!(
            ask(Class::Acquire),
            ask(Class::Work),
            ask(Class::Acquire),
            ask(Class::Renewal),
            async { drop(first) },
        );
        assert_eq!(order.borrow()[1], Class::Renewal, "{order:?}");
    }

    /// SQLite commits a statement when its last row is read, and sqlx reads rows ahead up to a limit.
    #[tokio::test]
    async fn a_client_that_stands_still_keeps_the_file_from_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::simulated();
        let [driver, other] = [
            on(&clock, folder.path()).await,
            on(&clock, folder.path()).await,
        ];
        let mut batch = Vec::new();
        for at in 0..RENEW_BATCH {
            let req = acquire(&format!("n{at}"), SECOND * 30);
            token(&driver, &req).await;
            batch.push(Renew::new(req.name, req.owner, req.hold, Some(SECOND * 60)));
        }
        // The thread of SQLite stops in the middle of the statement, and goes on while nothing reads the rows.
        let (middle, (begun, has_begun), (go_on, goes_on)) = (200, channel(), channel::<()>());
        let mut steps = 0;
        let stop = move || {
            steps += 1;
            if steps == middle {
                begun.send(()).unwrap();
                goes_on.recv().unwrap();
            }
            true
        };
        let mut checkout = checkout(&driver).await;
        let handle = checkout.native().lock_handle().await;
        handle.unwrap().set_progress_handler(1, stop);
        checkout.settle(Ok(())).unwrap();
        drop(checkout);
        let store = driver.0.store();
        let mut renewing = std::pin::pin!(store.extend(&batch, Clock::boot().now() + DAY));
        let polled = poll_fn(|cx| Poll::Ready(renewing.as_mut().poll(cx))).await;
        assert!(polled.is_pending());
        has_begun.recv().unwrap();
        go_on.send(()).unwrap();
        let free = acquire("other", SECOND);
        let served = async { while other.acquire(&free).await.is_err() {} };
        tokio::time::timeout(SECOND * 20, served).await.unwrap();
        let renewed = renewing.await.unwrap();
        assert!(renewed.iter().all(Option::is_some), "{renewed:?}");
    }
}
