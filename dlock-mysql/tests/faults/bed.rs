//! Test bed: a server, a driver under test, requests, and an administrator's session that disturbs them.

use super::SECOND;
use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
use dlock_core::{
    Clock, Guard, HoldId, Instant, Lease, Lock, LockName, Owner, RetryClass, Snapshot,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Lane, Release, Released, Renew,
        Renewed,
    },
};
use dlock_mysql::{
    MysqlDriver,
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

/// A server with a driver under test and an administrator's access.
pub(super) struct Testbed {
    pub(super) server: MariadbServer,
    pub(super) driver: Arc<MysqlDriver>,
    pub(super) clock: Clock,
    holds: AtomicU64,
}

impl Testbed {
    pub(super) async fn start(extra: &[&str]) -> Self {
        let extra_args = extra.iter().map(|arg| (*arg).to_owned()).collect();
        let server = MariadbServer::start(MariadbOptions { extra_args }).unwrap();
        let driver = Arc::new(connected(&server.url()).await);
        Self {
            server,
            driver,
            clock: Clock::boot(),
            holds: AtomicU64::new(1),
        }
    }

    pub(super) fn name(&self, name: &str) -> LockName {
        LockName::new(name).unwrap()
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

    pub(super) fn asked(&self, name: &str, owner: Owner, lease: Duration, hold: u64) -> Acquire {
        let hold = HoldId::from_bits(NonZeroU64::new(hold).unwrap().get());
        let lease = Lease::fixed(lease);
        Acquire::new(self.name(name), owner, hold, lease, self.give_up())
    }

    pub(super) fn give_up(&self) -> Instant {
        self.clock.now() + SECOND * 10
    }

    pub(super) async fn granted(&self, ask: &Acquire) -> Grant {
        match self.driver.acquire(ask).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn taken(&self, name: &str) -> Acquire {
        let ask = self.ask(name, SECOND * 30);
        self.granted(&ask).await;
        ask
    }

    pub(super) async fn release(&self, ask: &Acquire) -> Released {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await.unwrap()
    }

    pub(super) async fn give_back(&self, ask: &Acquire) -> Result<(), DriverError> {
        let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
        self.driver.release(&release).await.map(drop)
    }

    pub(super) fn entry(&self, ask: &Acquire, lease: Duration) -> Renew {
        Renew::new(ask.name.clone(), ask.owner, ask.hold, Some(lease))
    }

    pub(super) async fn renew(
        &self,
        asks: &[Acquire],
        lease: Duration,
    ) -> Vec<Result<Renewed, DriverError>> {
        self.renew_once(asks, lease).await.unwrap()
    }

    pub(super) async fn renew_once(
        &self,
        asks: &[Acquire],
        lease: Duration,
    ) -> Result<Vec<Result<Renewed, DriverError>>, DriverError> {
        let batch: Vec<_> = asks.iter().map(|ask| self.entry(ask, lease)).collect();
        self.driver
            .renew(Lane::default(), &batch, self.give_up())
            .await
    }

    pub(super) fn lasts(&self, renewed: &Result<Renewed, DriverError>, lease: Duration) -> bool {
        matches!(renewed, Ok(Renewed::Until { valid_for }) if *valid_for <= lease && *valid_for + SECOND * 5 > lease)
    }

    pub(super) async fn inspect(&self, name: &str) -> Snapshot {
        self.driver.inspect(&self.name(name)).await.unwrap()
    }

    pub(super) async fn rest(&self, name: &str) -> Duration {
        self.inspect(name).await.holders[0].rest.unwrap()
    }

    pub(super) async fn native(&self) -> MySqlConnection {
        let options: MySqlConnectOptions = self.server.url().parse().unwrap();
        // The statement log would show passwords.
        options.disable_statement_logging().connect().await.unwrap()
    }

    /// A session that keeps the row of a name locked until it rolls back.
    pub(super) async fn blocker(&self, name: &str) -> MySqlConnection {
        let mut native = self.native().await;
        run(&mut native, "BEGIN").await;
        sqlx::query("SELECT * FROM dlock_locks WHERE name = ? FOR UPDATE")
            .bind(name.as_bytes())
            .fetch_one(&mut native)
            .await
            .unwrap();
        native
    }

    pub(super) async fn admin(&self, sql: &'static str) {
        let mut native = self.native().await;
        run(&mut native, sql).await;
        native.close().await.unwrap();
    }

    pub(super) async fn is_mariadb(&self) -> bool {
        let version: String = sqlx::query_scalar("SELECT VERSION()")
            .fetch_one(&mut self.native().await)
            .await
            .unwrap();
        version.contains("MariaDB")
    }

    /// Makes the user of the README, with rights on the existing table.
    pub(super) async fn locker(&self) {
        self.admin("CREATE USER locker@'%' IDENTIFIED BY 'secret'")
            .await;
        self.admin("GRANT SELECT, INSERT, UPDATE, DELETE ON dlock.dlock_locks TO locker@'%'")
            .await;
    }

    pub(super) fn locker_url(&self) -> String {
        self.server.url().replace("root@", "locker:secret@")
    }

    /// The server's statement counters: updates, inserts, deletes, selects.
    pub(super) async fn counters(&self) -> [u64; 4] {
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

    /// How many statements wait for a row lock.
    pub(super) async fn waiting(&self) -> usize {
        let mut native = self.native().await;
        self.waiting_ids(&mut native).await.len()
    }

    pub(super) async fn waiting_ids(&self, native: &mut MySqlConnection) -> Vec<i64> {
        let waiting = "SELECT CAST(ID AS SIGNED) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Execute' AND INFO LIKE 'UPDATE %'";
        let rows = sqlx::raw_sql(waiting).fetch_all(native).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub(super) async fn kill_waiting(&self, how: &str) {
        let mut native = self.native().await;
        for id in self.waiting_ids(&mut native).await {
            sqlx::raw_sql(AssertSqlSafe(format!("{how} {id}")))
                .execute(&mut native)
                .await
                .unwrap();
        }
    }

    /// Ends every session but its own.
    pub(super) async fn kill_all(&self) {
        let mut native = self.native().await;
        let others = "SELECT CAST(ID AS SIGNED) FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID() AND USER IN ('root', 'locker')";
        let rows = sqlx::raw_sql(others).fetch_all(&mut native).await.unwrap();
        for row in &rows {
            let kill = format!("KILL {}", row.get::<i64, _>(0));
            // A session that ended by itself in between is fine.
            drop(
                sqlx::raw_sql(AssertSqlSafe(kill))
                    .execute(&mut native)
                    .await,
            );
        }
    }

    pub(super) async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        for _ in 0..6_000 {
            if holds(self).await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("not within half a minute: {what}");
    }
}

/// The resource that one lock guards: it checks that there are never two holders and that tokens grow.
#[derive(Default)]
pub(super) struct Room {
    inside: AtomicBool,
    last: AtomicU64,
    cycles: AtomicU64,
}

impl Room {
    /// Enters and leaves once.
    pub(super) async fn visit(&self, guard: &Guard) {
        assert!(!self.inside.swap(true, Ordering::SeqCst), "two were inside");
        let token = guard.token().0;
        assert!(
            self.last.swap(token, Ordering::SeqCst) < token,
            "tokens grow"
        );
        tokio::task::yield_now().await;
        self.inside.store(false, Ordering::SeqCst);
        self.cycles.fetch_add(1, Ordering::Relaxed);
    }

    /// Enters and leaves until `over`, whatever happens to the server. The client's cleanup releases requests
    /// that got no answer.
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

/// Connects a driver, with retries, since on a busy machine making the table may exceed a statement's time
/// limit.
pub(super) async fn connected(url: &str) -> MysqlDriver {
    let mut tries = 0;
    loop {
        match MysqlDriver::connect(url).await {
            Err(error) if error.retry() == RetryClass::Later && tries < 10 => tries += 1,
            connected => return connected.unwrap(),
        }
    }
}

pub(super) async fn run(native: &mut MySqlConnection, sql: &'static str) {
    sqlx::raw_sql(sql).execute(native).await.unwrap();
}

/// Collects all traces.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
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
