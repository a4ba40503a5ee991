//! The suite over a real MariaDB.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Gap, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, main as suite,
    testbed::{
        Home, MariadbServer, Proxy, Station,
        mariadb::{MariadbOptions, VARIABLE},
        proxy::{Direction, Fault, Reach, Trigger},
    },
};
use dlock_core::{DistributedLock, LockName};
use dlock_mysql::{
    MysqlDriver,
    sqlx::{self, Connection, MySqlConnection},
};
use std::{process::ExitCode, sync::Arc, time::Duration};

fn main() -> ExitCode {
    let homes = [Home::Process, Home::Container];
    let suites = homes.map(|home| Box::new(Mysql(home)) as Box<dyn MakeFixture>);
    suite(suites.into(), Mutants::Listed)
}

struct Mysql(Home);

#[async_trait]
impl MakeFixture for Mysql {
    fn name(&self) -> &str {
        match self.0 {
            Home::Process => "mysql",
            Home::Container => "mysql-container",
        }
    }

    fn home(&self) -> Home {
        self.0
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let options = MariadbOptions {
            extra_args: vec!["--max-connections=2000".to_owned()],
        };
        let server = match self.0 {
            Home::Container => MariadbServer::in_container(options)?,
            Home::Process if std::env::var_os(VARIABLE).is_some() => {
                MariadbServer::from_env_or_start()?
            }
            Home::Process => MariadbServer::start(options)?,
        };
        Ok(Arc::new(Place { server }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(url).await
    }
}

async fn connect(url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
    Ok(Arc::new(MysqlDriver::connect(url).await?))
}

/// One server. Its methods block, which costs nobody anything: cases have threads of their own.
struct Place {
    server: MariadbServer,
}

#[async_trait]
impl Fixture for Place {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(&self.server.url()).await
    }

    fn url(&self) -> Result<String, Gap> {
        Ok(self.server.url())
    }

    fn network(&self) -> Result<&dyn Network, Gap> {
        Ok(self)
    }

    fn server(&self) -> Result<&dyn Server, Gap> {
        match self.server.station() {
            Some(_) => Ok(self),
            None => Err(Gap("the server is not ours to stop or kill")),
        }
    }

    fn records(&self) -> Result<&dyn Records, Gap> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, Gap> {
        Err(Gap("the server reads the machine's clock"))
    }
}

#[async_trait]
impl Network for Place {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let proxy = Proxy::start(self.server.addr()).await?;
        let driver = connect(&self.server.url_at(proxy.addr())).await?;
        Ok((driver, Box::new(Wire(proxy))))
    }
}

/// The connections of one driver.
struct Wire(Proxy);

/// A prepared statement is executed by its number, which says nothing. But each execution is sent with the types of its parameters, and
/// those tell the statements apart: `1` (types follow), then two bytes each, `fc 00` for bytes and `08 00` for a number.
fn needle(call: Call, first: bool) -> Vec<u8> {
    const TEXT: [u8; 2] = [0xfc, 0];
    const NUMBER: [u8; 2] = [8, 0];
    const LENGTH_OF_AN_OWNER: [u8; 1] = [36];
    let types: &[&[u8]] = match call {
        // name, owner, hold, lease
        Call::Acquire if first => &[&TEXT, &TEXT, &TEXT, &NUMBER],
        // owner, hold, lease
        Call::Acquire => &[&TEXT, &TEXT, &NUMBER],
        // lease, lease, name
        Call::Renew => &[&NUMBER, &NUMBER, &TEXT],
        // owner, hold, name, and the first value
        Call::Release => &[&TEXT, &TEXT, &TEXT, &LENGTH_OF_AN_OWNER],
    };
    [&[1], types.concat().as_slice()].concat()
}

#[async_trait]
impl Faults for Wire {
    /// Cases lose the first acquire of a name, which is the one that makes its row.
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        drop(
            self.0
                .on_next(Trigger::on(needle(of, true)), Fault::CutAfterRequest),
        );
        Ok(())
    }

    /// Every acquire begins with the statement that takes a row, also where there is none.
    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        let strike = self
            .0
            .on_next(Trigger::on(needle(of, false)), Fault::HoldRequest);
        tokio::spawn(async move {
            tokio::time::sleep(by).await;
            strike.release();
        });
        Ok(())
    }

    async fn cut(&self) -> Result<(), Failure> {
        self.0.cut();
        Ok(())
    }

    async fn down(&self) -> Result<(), Failure> {
        self.0.refuse(true);
        self.0.cut();
        Ok(())
    }

    async fn up(&self) -> Result<(), Failure> {
        self.0.heal();
        Ok(())
    }

    async fn delay(&self, by: Duration) -> Result<(), Failure> {
        self.0.set_delay(Reach::All, Direction::ClientToServer, by);
        Ok(())
    }
}

#[async_trait]
impl Server for Place {
    async fn stop(&self) -> Result<(), Failure> {
        Ok(self.station()?.stop()?)
    }

    async fn cont(&self) -> Result<(), Failure> {
        Ok(self.station()?.cont()?)
    }

    async fn restart(&self) -> Result<(), Failure> {
        Ok(self.station()?.restart()?)
    }

    fn keeps(&self) -> Keeps {
        Keeps::Everything
    }
}

impl Place {
    fn station(&self) -> Result<&dyn Station, Failure> {
        let station = self.server.station();
        station.ok_or_else(|| Failure::new("the server is not ours"))
    }

    async fn native(&self) -> Result<MySqlConnection, Failure> {
        let native = MySqlConnection::connect(&self.server.url()).await;
        native.map_err(Failure::new)
    }
}

#[async_trait]
impl Records for Place {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        let mut native = self.native().await?;
        let gone = sqlx::query(
            "UPDATE dlock_locks SET owner = NULL, holds = '', expires = 0, version = version + 1 WHERE name = ?",
        );
        let gone = gone.bind(name.as_str().as_bytes());
        gone.execute(&mut native).await.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }

    async fn flush(&self) -> Result<(), Failure> {
        let mut native = self.native().await?;
        let gone = sqlx::query("DELETE FROM dlock_locks")
            .execute(&mut native)
            .await;
        gone.map_err(Failure::new)?;
        native.close().await.map_err(Failure::new)
    }
}
