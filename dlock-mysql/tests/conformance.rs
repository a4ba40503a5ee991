//! The conformance suite over a real MariaDB.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, main as suite,
    testbed::{
        Home, MariadbServer,
        mariadb::{Mariadb, MariadbOptions},
        proxy::{Fault, Trigger},
        server::ServerError,
    },
};
use dlock_core::{
    LockName,
    driver::{DistributedLock, DriverError},
};
use dlock_mysql::{
    MysqlDriver,
    sqlx::{self, Connection, MySqlConnection},
};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(Remote::everywhere(Mysql), Mutants::Listed)
}

#[derive(Clone, Copy)]
struct Mysql;

#[async_trait]
impl Backend for Mysql {
    type Kind = Mariadb;

    fn name(&self) -> &'static str {
        "mysql"
    }

    fn start(&self, home: Home) -> Result<MariadbServer, ServerError> {
        let options = MariadbOptions {
            extra_args: vec!["--max-connections=2000".to_owned()],
        };
        match home {
            Home::Container => MariadbServer::in_container(options),
            Home::Process => MariadbServer::from_env_or(|| MariadbServer::start(options)),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        // On a starved machine the server's limit of a second ends the checks at connect. No case is about that.
        let is_starved = |error: &DriverError| error.to_string().contains("max_statement_time");
        let mut driver = MysqlDriver::connect(url).await;
        while driver.as_ref().is_err_and(is_starved) {
            driver = MysqlDriver::connect(url).await;
        }
        Ok(Arc::new(driver?))
    }

    /// A prepared statement is executed by its number, which says nothing. But each execution is sent with
    /// the types of its parameters, and those tell the statements apart: `1` (types follow), then two bytes
    /// each, `fc 00` for bytes and `08 00` for a number.
    fn request(&self, of: Call, fault: Fault) -> Trigger {
        const TEXT: [u8; 2] = [0xfc, 0];
        const NUMBER: [u8; 2] = [8, 0];
        const LENGTH_OF_AN_OWNER: [u8; 1] = [36];
        let types: &[&[u8]] = match of {
            // Every acquire begins with the statement that takes a row, even if there is none: owner, hold,
            // lease.
            Call::Acquire if fault == Fault::HoldRequest => &[&TEXT, &TEXT, &NUMBER],
            // Cases lose a name's first acquire, which makes its row: name, owner, hold, lease.
            Call::Acquire => &[&TEXT, &TEXT, &TEXT, &NUMBER],
            // lease, lease, name
            Call::Renew => &[&NUMBER, &NUMBER, &TEXT],
            // owner, hold, name, and the first value
            Call::Release => &[&TEXT, &TEXT, &TEXT, &LENGTH_OF_AN_OWNER],
        };
        Trigger::on([&[1], types.concat().as_slice()].concat())
    }

    async fn delete(&self, server: &MariadbServer, name: &LockName) -> Result<(), Failure> {
        let gone = sqlx::query(
            "UPDATE dlock_locks SET owner = NULL, holds = '', expires = 0, version = version + 1 WHERE name = ?",
        );
        let mut native = native(server).await?;
        let gone = gone.bind(name.as_str().as_bytes());
        gone.execute(&mut native).await.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }

    async fn flush(&self, server: &MariadbServer) -> Result<(), Failure> {
        let gone = sqlx::query("DELETE FROM dlock_locks");
        let mut native = native(server).await?;
        gone.execute(&mut native).await.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }
}

async fn native(server: &MariadbServer) -> Result<MySqlConnection, Failure> {
    let native = MySqlConnection::connect(&server.url()).await;
    native.map_err(Failure::new)
}
