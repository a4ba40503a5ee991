//! Test bed: a server, a driver under test, requests, and an administrator's session that disturbs them.

use super::SECOND;
use dlock_conformance::testbed::{PostgresServer, postgres::PostgresOptions};
use dlock_core::{
    Clock, Guard, HoldId, Instant, Lease, Lock, LockName, Owner, RetryClass, Snapshot,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Lane, Release, Released, Renew,
        Renewed,
    },
};
use dlock_postgres::{
    PostgresDriver,
    sqlx::{self, AssertSqlSafe, ConnectOptions, PgConnection, postgres::PgConnectOptions},
};
use std::{
    io::Write,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tracing_subscriber::fmt::MakeWriter;

/// A server with a driver under test and an administrator's access.
pub(super) struct Testbed {
    pub(super) server: PostgresServer,
    pub(super) driver: Arc<PostgresDriver>,
    pub(super) clock: Clock,
    holds: AtomicU64,
}

impl Testbed {
    pub(super) async fn start(settings: &[&str]) -> Self {
        let settings = settings.iter().map(|&one| one.to_owned()).collect();
        Self::start_with(PostgresOptions {
            settings,
            ..PostgresOptions::default()
        })
        .await
    }

    pub(super) async fn start_with(options: PostgresOptions) -> Self {
        let server = started(options).await;
        let driver = Arc::new(connected(&server.url()).await);
        Self {
            server,
            driver,
            clock: Clock::boot(),
            holds: AtomicU64::new(1),
        }
    }

    pub(super) fn ask(&self, name: &str, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::from_seed(&format!("owner {hold}"));
        self.asked(name, owner, lease, hold)
    }

    pub(super) fn again(&self, first: &Acquire, lease: Duration) -> Acquire {
        let hold = self.holds.fetch_add(1, Ordering::Relaxed);
        self.asked(first.name.as_str(), first.owner, lease, hold)
    }

    fn asked(&self, name: &str, owner: Owner, lease: Duration, hold: u64) -> Acquire {
        let (hold, lease) = (HoldId::from_bits(hold), Lease::fixed(lease));
        Acquire::new(named(name), owner, hold, lease, self.give_up())
    }

    pub(super) fn give_up(&self) -> Instant {
        self.clock.now() + SECOND * 10
    }

    pub(super) async fn granted(&self, ask: &Acquire) -> Grant {
        granted(&self.driver, ask).await
    }

    pub(super) async fn taken(&self, name: &str) -> Acquire {
        let ask = self.ask(name, SECOND * 60);
        self.granted(&ask).await;
        ask
    }

    pub(super) async fn release(&self, ask: &Acquire) -> Released {
        self.give_back(ask).await.unwrap()
    }

    pub(super) async fn give_back(&self, ask: &Acquire) -> Result<Released, DriverError> {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await
    }

    pub(super) async fn renew(
        &self,
        asks: &[Acquire],
        lease: Duration,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        self.renew_within(asks, lease, SECOND * 10).await
    }

    pub(super) async fn renew_within(
        &self,
        asks: &[Acquire],
        lease: Duration,
        within: Duration,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        let entry = |ask: &Acquire| Renew::new(ask.name.clone(), ask.owner, ask.hold, Some(lease));
        let batch: Vec<_> = asks.iter().map(entry).collect();
        let give_up = self.clock.now() + within;
        self.driver.renew(Lane::default(), &batch, give_up).await
    }

    pub(super) async fn inspect(&self, name: &str) -> Snapshot {
        self.driver.inspect(&named(name)).await.unwrap()
    }

    /// An administrator's session.
    pub(super) async fn native(&self) -> PgConnection {
        native(&self.server).await
    }

    /// A session that keeps the row of a name locked until it rolls back.
    pub(super) async fn blocker(&self, name: &str) -> PgConnection {
        let mut native = self.native().await;
        run(&mut native, "BEGIN").await;
        let locked = sqlx::query("SELECT FROM dlock_locks WHERE name = $1 FOR UPDATE")
            .bind(name.as_bytes())
            .fetch_all(&mut native)
            .await
            .unwrap();
        assert_eq!(locked.len(), 1, "{name} has a row");
        native
    }

    pub(super) async fn admin(&self, sql: &str) {
        run(&mut self.native().await, sql).await;
    }

    /// How many sessions of dlock are in this condition.
    pub(super) async fn sessions(&self, condition: &str) -> i64 {
        let sql = format!("SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND {condition}");
        one(&mut self.native().await, &sql).await
    }

    /// How many statements wait for a row or a table.
    pub(super) async fn waiting(&self) -> i64 {
        self.sessions(WAITS).await
    }

    /// Ends what waits: `pg_cancel_backend` its statement, `pg_terminate_backend` its session.
    pub(super) async fn end_waiting(&self, how: &str) {
        self.admin(&format!(
            "SELECT {how}(pid) FROM pg_stat_activity WHERE {OURS} AND {WAITS}"
        ))
        .await;
    }

    /// Ends every session of dlock, and waits until they have ended.
    pub(super) async fn end_all(&self) {
        self.admin(&format!(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {OURS}"
        ))
        .await;
    }

    pub(super) async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        let begun = self.clock.now();
        while !holds(self).await {
            // Only a hang reaches it.
            assert!(
                self.clock.now().since(begun) < SECOND * 60,
                "{what}: not soon"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

const OURS: &str = "application_name = 'dlock'";
const WAITS: &str = "wait_event_type = 'Lock'";

/// The resource that one lock guards: it checks that there are never two holders and that tokens grow.
#[derive(Default)]
pub(super) struct Room {
    is_taken: AtomicBool,
    last: AtomicU64,
    cycles: AtomicU64,
}

impl Room {
    async fn visit(&self, guard: &Guard) {
        assert!(
            !self.is_taken.swap(true, Ordering::SeqCst),
            "two are inside"
        );
        let token = guard.token().0;
        let last = self.last.swap(token, Ordering::SeqCst);
        assert!(last < token, "{token} after {last}");
        tokio::task::yield_now().await;
        self.is_taken.store(false, Ordering::SeqCst);
        self.cycles.fetch_add(1, Ordering::Relaxed);
    }

    /// Enters and leaves until `over`, whatever happens to the server. The client's cleanup releases requests that got no answer.
    pub(super) async fn besiege(self: Arc<Self>, lock: Lock, over: Arc<AtomicBool>) {
        while !over.load(Ordering::Relaxed) {
            let Ok(guard) = lock.acquire().await else {
                continue;
            };
            self.visit(&guard).await;
            drop(guard.release().await);
        }
    }

    pub(super) fn cycles(&self) -> u64 {
        self.cycles.load(Ordering::Relaxed)
    }
}

pub(super) fn named(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

pub(super) async fn started(options: PostgresOptions) -> PostgresServer {
    let start = || PostgresServer::start_with(options);
    tokio::task::spawn_blocking(start).await.unwrap().unwrap()
}

pub(super) async fn native(server: &PostgresServer) -> PgConnection {
    let options: PgConnectOptions = server.url().parse().unwrap();
    // The statement log would show owners.
    options.disable_statement_logging().connect().await.unwrap()
}

pub(super) async fn granted(driver: &PostgresDriver, ask: &Acquire) -> Grant {
    match driver.acquire(ask).await.unwrap() {
        Acquired::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

pub(super) fn lasts(renewed: &Result<Renewed, DriverError>, lease: Duration) -> bool {
    matches!(renewed, Ok(Renewed::Until { valid_for }) if *valid_for <= lease && *valid_for + SECOND * 10 > lease)
}

/// Connects a driver; on a busy machine, making the table may exceed a statement's time limit.
pub(super) async fn connected(url: &str) -> PostgresDriver {
    let mut tries = 0;
    loop {
        match PostgresDriver::connect(url).await {
            Err(error) if error.retry() != RetryClass::Never && tries < 10 => tries += 1,
            connected => return connected.unwrap(),
        }
    }
}

pub(super) async fn run(native: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(native)
        .await
        .unwrap();
}

/// The one number that a statement answers.
pub(super) async fn one(native: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(native)
        .await
        .unwrap()
}

/// Collects all traces.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// What a driver that connects to this URL warns of.
    pub(super) async fn of_connecting(url: &str) -> String {
        Self::of(async { drop(connected(url).await) }).await
    }

    /// What a future warns of on this thread.
    pub(super) async fn of(done: impl Future<Output = ()>) -> String {
        let log = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(log.clone())
            .finish();
        let here = tracing::subscriber::set_default(subscriber);
        done.await;
        drop(here);
        log.text()
    }
}

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
