//! Connections: how they are opened, checked and ended, and how statements run on them.

use crate::{
    commands::{self, Statement},
    config::MysqlConfig,
    error, session,
    settings::Flavour,
};
use dlock_core::driver::{
    Finding, Result,
    kit::{self, ConnectionOutcome, Dialed, Failure, Lent},
};
use futures_util::TryStreamExt;
use sqlx::{
    ConnectOptions, Connection as _, Executor as _, MySqlConnection,
    mysql::{MySqlConnectOptions, MySqlQueryResult, MySqlRow},
};
use std::{pin::pin, sync::Arc, time::Duration};

/// The connections of a driver.
pub(crate) type Connections = kit::Connections<Dialer>;

/// A connection lent to one request.
pub(crate) type Checkout<'a> = Lent<'a, Dialer>;

/// Opens connections, all with the same options.
pub(crate) struct Dialer {
    options: MySqlConnectOptions,
    within: Duration,
    /// The table, as the statements name it.
    table: String,
}

/// One open connection and what the driver knows of its server.
pub(crate) struct Session {
    pub(crate) native: MySqlConnection,
    /// The connection's id on the server.
    pub(crate) id: u64,
    pub(crate) flavour: Flavour,
    /// What the server's settings mean for a lock.
    pub(crate) findings: Vec<Finding>,
}

impl Dialer {
    pub(crate) fn new(config: &MysqlConfig) -> Self {
        Self {
            options: config.options(),
            within: config.connect_within,
            table: config.table.name.quoted('`'),
        }
    }

    /// Where the server is, for errors.
    fn address(&self) -> String {
        match self.options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", self.options.get_host(), self.options.get_port()),
        }
    }
}

impl kit::Dialer for Dialer {
    type Session = Session;
    type Error = sqlx::Error;

    async fn dial(&self) -> Result<Dialed<Session>> {
        let refused = |cause| error::unreached(cause).with_address(self.address());
        let native = self.options.connect().await.map_err(refused)?;
        session::greet(native).await
    }

    async fn time(&self, session: &mut Session) -> sqlx::Result<Duration> {
        commands::clock(&mut session.native).await
    }

    fn failure(&self, error: sqlx::Error, ended: bool) -> Failure<ConnectionOutcome> {
        error::failed(error, ended)
    }

    fn silent() -> sqlx::Error {
        error::silent()
    }

    async fn hang_up(&self, session: Session) {
        if let Err(error) = session.native.close().await {
            tracing::debug!(%error, "mysql: closing");
        }
    }

    fn endless(session: &Session) -> Option<u64> {
        (session.flavour == Flavour::Mysql).then_some(session.id)
    }

    async fn end(self: Arc<Self>, id: u64) {
        let ending = async {
            let mut native = self.options.connect().await?;
            commands::kill(&mut native, id, &self.table).await?;
            native.close().await
        };
        if let Ok(Err(error)) = tokio::time::timeout(self.within, ending).await {
            tracing::debug!(%error, "mysql: ending a statement that runs for too long");
        }
    }
}

/// What a statement without rows tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    /// How many rows its `WHERE` matched.
    pub(crate) matched: usize,
    /// What it gave to `LAST_INSERT_ID`.
    pub(crate) number: u64,
}

/// Runs a statement that returns no rows.
pub(crate) async fn run(checkout: &mut Checkout<'_>, statement: Statement) -> Result<Done> {
    let limit = checkout.limit();
    let native = &mut checkout.session().native;
    // The client's own `execute` does the same with two more boxes and another stream.
    let answer = {
        let running = pin!(async {
            let mut answer = native.fetch_many(statement);
            let mut done = MySqlQueryResult::default();
            while let Some(part) = answer.try_next().await? {
                done.extend(part.left());
            }
            Ok(done)
        });
        limit.of(running).await
    };
    let done = checkout.settle(answer)?;
    Ok(Done {
        matched: usize::try_from(done.rows_affected()).unwrap_or(usize::MAX),
        number: done.last_insert_id(),
    })
}

/// Runs a statement that returns rows.
pub(crate) async fn rows(
    checkout: &mut Checkout<'_>,
    statement: Statement,
) -> Result<Vec<MySqlRow>> {
    let limit = checkout.limit();
    let answer = limit
        .of(checkout.session().native.fetch_all(statement))
        .await;
    checkout.settle(answer)
}

#[cfg(test)]
mod tests {
    use super::{Connections, Dialer, Flavour};
    use crate::{config::MysqlConfig, error};
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{
        Effect,
        driver::kit::{Call, Class, Dialer as _},
    };
    use sqlx::{AssertSqlSafe, ConnectOptions as _, MySqlConnection, Row as _};
    use std::{
        sync::Arc,
        time::{Duration, Instant},
    };

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_without_a_limit_is_told_to_end_a_statement_and_its_connection_is_left() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let config = server.url().parse().unwrap();
        let all = Connections::new(Dialer::new(&config), 1, config.connect_within);
        let call = Call {
            class: Class::Work,
            give_up: all.clock().now() + Duration::from_secs(20),
        };
        let mut checkout = all.lend(call).await.unwrap();
        // Either family is made to behave like a server that ends no write.
        let session = checkout.session();
        let unbound = match session.flavour {
            Flavour::Mariadb => "SET SESSION max_statement_time = 0",
            Flavour::Mysql => "SET SESSION max_execution_time = 0",
        };
        let unbound = sqlx::raw_sql(unbound).execute(&mut session.native).await;
        session.flavour = Flavour::Mysql;
        let id = session.id;
        checkout.settle(unbound).unwrap();
        let began = Instant::now();
        let limit = checkout.limit();
        let slept = sqlx::raw_sql(
            "SELECT COUNT(*), '`dlock_locks`' FROM information_schema.COLUMNS WHERE SLEEP(0.1) = 0",
        );
        let slept = limit
            .of(slept.execute(&mut checkout.session().native))
            .await;
        let error = checkout.settle(slept).unwrap_err();
        assert!(error.to_string().contains("two seconds"), "{error:?}");
        assert!(error::is_contention(&error) && error.effect() == Effect::None);
        assert!(
            began.elapsed() >= Duration::from_secs(2),
            "{:?}",
            began.elapsed()
        );
        drop(checkout);
        let mut checkout = all.lend(call).await.unwrap();
        assert_ne!(checkout.session().id, id);
    }

    /// After a failover, that number may be of a stranger's connection to another server.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_statement_that_does_not_name_the_table_is_not_ended() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let config: MysqlConfig = server.url().parse().unwrap();
        let mut holder = config.options().connect().await.unwrap();
        let mut stranger = config.options().connect().await.unwrap();
        let lock = "SELECT GET_LOCK('report', 60)";
        assert_eq!(number(&mut holder, lock).await, Some(1));
        let id = number(&mut stranger, "SELECT CONNECTION_ID()").await;
        let id = u64::try_from(id.unwrap()).unwrap();
        let waiting = tokio::spawn(async move { number(&mut stranger, lock).await });
        let waits = format!(
            "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID = {id} AND INFO LIKE '%GET_LOCK%'"
        );
        while number(&mut holder, &waits).await != Some(1) {
            assert!(!waiting.is_finished(), "it got the lock");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Arc::new(Dialer::new(&config)).end(id).await;
        let released = number(&mut holder, "SELECT RELEASE_LOCK('report')").await;
        assert_eq!((released, waiting.await.unwrap()), (Some(1), Some(1)));
    }

    async fn number(native: &mut MySqlConnection, sql: &str) -> Option<i64> {
        let asked = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(native);
        asked.await.unwrap().try_get_unchecked(0).unwrap()
    }
}
