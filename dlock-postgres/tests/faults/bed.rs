//! Test bed: a server, a driver under test, and an administrator's session that disturbs them.

use dlock_conformance::{
    testbed::{PostgresServer, postgres::PostgresOptions},
    under_test::{Crowd, Log, UnderTest, Waiting},
};
use dlock_core::{Client, RetryClass};
use dlock_postgres::{
    PostgresDriver,
    sqlx::{self, AssertSqlSafe, ConnectOptions, PgConnection, postgres::PgConnectOptions},
};
use std::ops::Deref;

/// A server with a driver under test and an administrator's access.
pub(super) struct Testbed {
    pub(super) server: PostgresServer,
    pub(super) tested: UnderTest<PostgresDriver>,
}

impl Deref for Testbed {
    type Target = UnderTest<PostgresDriver>;

    fn deref(&self) -> &Self::Target {
        &self.tested
    }
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
        let tested = UnderTest::new(connected(&server.url()).await);
        Self { server, tested }
    }

    /// Tasks of three clients.
    pub(super) async fn crowd(&self, names: usize, tasks: usize) -> Crowd {
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(Client::new(connected(&self.server.url()).await).unwrap());
        }
        Crowd::of(clients, names, tasks)
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
        let waiting = Waiting::new(what);
        while !holds(self).await {
            waiting.pause().await;
        }
    }
}

const OURS: &str = "application_name = 'dlock'";
const WAITS: &str = "wait_event_type = 'Lock'";

pub(super) async fn started(options: PostgresOptions) -> PostgresServer {
    let start = || PostgresServer::start_with(options);
    tokio::task::spawn_blocking(start).await.unwrap().unwrap()
}

pub(super) async fn native(server: &PostgresServer) -> PgConnection {
    let options: PgConnectOptions = server.url().parse().unwrap();
    // The statement log would show owners.
    options.disable_statement_logging().connect().await.unwrap()
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

/// What a driver that connects to this URL warns of.
pub(super) async fn warnings_of_connecting(url: &str) -> String {
    warnings(async { drop(connected(url).await) }).await
}

/// What a future warns of on this thread.
pub(super) async fn warnings(of: impl Future<Output = ()>) -> String {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log.writer())
        .finish();
    let here = tracing::subscriber::set_default(subscriber);
    of.await;
    drop(here);
    log.text()
}
