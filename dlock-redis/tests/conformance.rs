//! The suite over a real Redis.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Gap, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, main as suite,
    testbed::{
        Home, Proxy, RedisServer, Station,
        proxy::{Direction, Fault, Reach, Trigger},
        redis::{Aof, RedisOptions},
    },
};
use dlock_core::{DistributedLock, LockName};
use dlock_redis::RedisDriver;
use std::{process::ExitCode, sync::Arc, time::Duration};

fn main() -> ExitCode {
    suite(
        vec![
            Box::new(Redis(Home::Process)),
            Box::new(Redis(Home::Container)),
        ],
        Mutants::Listed,
    )
}

struct Redis(Home);

#[async_trait]
impl MakeFixture for Redis {
    fn name(&self) -> &str {
        match self.0 {
            Home::Process => "redis",
            Home::Container => "redis-container",
        }
    }

    fn home(&self) -> Home {
        self.0
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        // The file is written before each answer, so that what was answered outlives a kill of the process.
        let options = RedisOptions {
            aof: Aof::EverySec,
            ..RedisOptions::default()
        };
        let named = std::env::var_os(dlock_conformance::testbed::redis::VARIABLE);
        let server = match self.0 {
            Home::Container => RedisServer::in_container(options)?,
            Home::Process if named.is_some() => RedisServer::from_env_or_start()?,
            Home::Process => RedisServer::start(options)?,
        };
        Ok(Arc::new(Place { server }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(url).await
    }
}

async fn connect(url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
    Ok(Arc::new(RedisDriver::connect(url).await?))
}

/// One server. Its methods block, which costs nobody anything: cases have threads of their own.
struct Place {
    server: RedisServer,
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
            None => Err(Gap("the server is not ours to stop, kill or flush")),
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

/// The connections of one driver. Every call is one script, and cases aim at the next call that they make.
struct Wire(Proxy);

const SCRIPT: &str = "EVALSHA";

#[async_trait]
impl Faults for Wire {
    async fn lose_reply(&self, _: Call) -> Result<(), Failure> {
        drop(self.0.on_next(Trigger::on(SCRIPT), Fault::CutAfterRequest));
        Ok(())
    }

    async fn hold_back(&self, _: Call, by: Duration) -> Result<(), Failure> {
        let strike = self.0.on_next(Trigger::on(SCRIPT), Fault::HoldRequest);
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
}

#[async_trait]
impl Records for Place {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        // Names of cases are letters, digits and dots, which the encoding leaves alone.
        self.server
            .command(&["DEL", &format!("dlock:{{{name}}}")])?;
        Ok(())
    }

    async fn flush(&self) -> Result<(), Failure> {
        self.server.command(&["FLUSHALL"])?;
        Ok(())
    }
}
