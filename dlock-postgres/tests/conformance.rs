//! The conformance suite over a PostgreSQL server, directly and through a pool, as a user with the rights that the
//! schema grants.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, Unsupported, main as suite,
    testbed::{
        Home, PostgresServer, Running,
        postgres::{Postgres, PostgresOptions},
        proxy::{Fault, Trigger},
        server::ServerError,
    },
};
use dlock_core::{
    LockName,
    driver::{DistributedLock, kit::to_hex},
};
use dlock_postgres::{
    PostgresConfig, PostgresDriver,
    sqlx::{self, AssertSqlSafe, ConnectOptions, Connection, postgres::PgConnectOptions},
};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let mut all = Remote::everywhere(OnPostgres { pooled: false });
    all.push(Box::new(Remote::processes(OnPostgres { pooled: true })));
    suite(all, Mutants::Listed)
}

/// Clients connect to the server. In a container, and to a server that the environment names, they make the table
/// themselves.
#[derive(Clone, Copy, Debug)]
struct OnPostgres {
    /// Clients share the few connections of a PgBouncer in transaction mode.
    pooled: bool,
}

#[async_trait]
impl Backend for OnPostgres {
    type Kind = Postgres;

    fn name(&self) -> &'static str {
        match self.pooled {
            false => "postgres",
            true => "postgres-pgbouncer",
        }
    }

    /// The suite has some hundred drivers at a time, and the server a process for each connection.
    fn url(&self, server: String, _: Home) -> String {
        let may_create = !server.contains("//locker@");
        format!("{server}?dlock.connections=4&dlock.create={may_create}")
    }

    fn start(&self, home: Home) -> Result<PostgresServer, ServerError> {
        match home {
            _ if self.pooled => PostgresServer::behind_pgbouncer(prepared()),
            Home::Container => PostgresServer::in_container(),
            Home::Process => Running::from_env_or(|| PostgresServer::start_with(prepared())),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(PostgresDriver::connect(url).await?))
    }

    fn request(&self, of: Call, _: Fault) -> Trigger {
        Trigger::on(match of {
            Call::Acquire => "/* dlock acquire */",
            Call::Renew => "/* dlock renew */",
            Call::Release => "/* dlock release */",
        })
    }

    async fn delete(&self, server: &PostgresServer, name: &LockName) -> Result<(), Failure> {
        delete(server, Some(name)).await
    }

    async fn flush(&self, server: &PostgresServer) -> Result<(), Failure> {
        delete(server, None).await
    }

    fn no_store_time(&self) -> Unsupported {
        Unsupported("the server reads the machine's clock")
    }
}

/// A server with the table and the user that `dlock schema` prints, and nothing more.
fn prepared() -> PostgresOptions {
    let config: PostgresConfig = "postgres://locker@localhost/postgres"
        .parse()
        .expect("the URL is right");
    let schema = config.schema();
    let statements = schema.lines().map(|line| line.trim_start_matches("-- "));
    let statements = statements.filter(|line| line.ends_with(';'));
    PostgresOptions {
        script: statements.map(|line| format!("{line}\n")).collect(),
        user: Some(Postgres::LOCKER),
        ..PostgresOptions::default()
    }
}

/// Deletes one row or all, with a statement that a pool may pass to any of its connections.
async fn delete(server: &PostgresServer, name: Option<&LockName>) -> Result<(), Failure> {
    let mut sql = "DELETE FROM dlock_locks".to_owned();
    if let Some(name) = name {
        sql += &format!(" WHERE name = '\\x{}'", to_hex(name.as_str()));
    }
    // A pool refuses what sqlx asks for by default.
    let options: PgConnectOptions = server.url().parse()?;
    let mut connection = options.extra_float_digits(None).connect().await?;
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut connection)
        .await?;
    Ok(connection.close().await?)
}
