//! Test bed: a server, a driver under test, and an administrator's session that disturbs them.

use dlock_conformance::{
    testbed::{MariadbServer, mariadb::MariadbOptions},
    under_test::{Crowd, UnderTest, Waiting},
};
use dlock_core::{Client, RetryClass};
use dlock_mysql::{
    MysqlDriver,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, Row,
        mysql::MySqlConnectOptions,
    },
};
use std::ops::Deref;

/// A server with a driver under test and an administrator's access.
pub(super) struct Testbed {
    pub(super) server: MariadbServer,
    tested: UnderTest<MysqlDriver>,
}

impl Deref for Testbed {
    type Target = UnderTest<MysqlDriver>;

    fn deref(&self) -> &Self::Target {
        &self.tested
    }
}

impl Testbed {
    pub(super) async fn start(extra: &[&str]) -> Self {
        let extra_args = extra.iter().map(|arg| (*arg).to_owned()).collect();
        let server = MariadbServer::start(MariadbOptions { extra_args }).unwrap();
        let tested = UnderTest::new(connected(&server.url()).await);
        Self { server, tested }
    }

    /// Tasks of several clients.
    pub(super) async fn crowd(&self, clients: usize, names: usize, tasks: usize) -> Crowd {
        let mut all = Vec::new();
        for _ in 0..clients {
            all.push(Client::new(connected(&self.server.url()).await).unwrap());
        }
        Crowd::of(all, names, tasks)
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
        let waiting = Waiting::new(what);
        while !holds(self).await {
            waiting.pause().await;
        }
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
