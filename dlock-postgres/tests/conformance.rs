//! The conformance suite over a PostgreSQL server.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Gap, Mutants, Remote, main as suite,
    testbed::{
        Home, PostgresServer, Running,
        postgres::Postgres,
        proxy::{Fault, Trigger},
        server::ServerError,
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_postgres::{
    PostgresDriver,
    sqlx::{self, Connection, PgConnection},
};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(
        vec![Box::new(Remote::processes(OnPostgres))],
        Mutants::Listed,
    )
}

#[derive(Clone, Copy, Debug)]
struct OnPostgres;

#[async_trait]
impl Backend for OnPostgres {
    type Kind = Postgres;

    fn name(&self) -> &'static str {
        "postgres"
    }

    /// The suite has some hundred drivers at a time, and the server a process for each connection.
    fn url(&self, server: String) -> String {
        format!("{server}?dlock.connections=4")
    }

    fn start(&self, _: Home) -> Result<PostgresServer, ServerError> {
        Running::from_env_or(|| PostgresServer::start(&[]))
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
        let mut connection = PgConnection::connect(&server.url()).await?;
        let delete =
            sqlx::query("DELETE FROM dlock_locks WHERE name = $1").bind(name.as_str().as_bytes());
        delete.execute(&mut connection).await?;
        Ok(connection.close().await?)
    }

    async fn flush(&self, server: &PostgresServer) -> Result<(), Failure> {
        let mut connection = PgConnection::connect(&server.url()).await?;
        sqlx::query("TRUNCATE dlock_locks")
            .execute(&mut connection)
            .await?;
        Ok(connection.close().await?)
    }

    fn no_store_time(&self) -> Gap {
        Gap("the server reads the machine's clock")
    }
}
