//! The suite over a real MongoDB: a replica set of one, and a standalone server.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Gap, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, main as suite,
    testbed::{
        Home, MongoServer, Proxy, Station,
        mongo::Deployment,
        proxy::{Direction, Fault, Reach, Trigger},
    },
};
use dlock_core::{DistributedLock, LockName};
use dlock_mongo::MongoDriver;
use std::{process::ExitCode, sync::Arc, time::Duration};

fn main() -> ExitCode {
    let homes = [Home::Process, Home::Container];
    let suites = homes.map(|home| Box::new(Mongo(home)) as Box<dyn MakeFixture>);
    suite(suites.into(), Mutants::Listed)
}

struct Mongo(Home);

#[async_trait]
impl MakeFixture for Mongo {
    fn name(&self) -> &str {
        match self.0 {
            Home::Process => "mongo",
            Home::Container => "mongo-container",
        }
    }

    fn home(&self) -> Home {
        self.0
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let server = match self.0 {
            Home::Container => MongoServer::in_container()?,
            Home::Process => MongoServer::from_env_or_start(Deployment::ReplicaSet)?,
        };
        Ok(Arc::new(Place { server }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(url).await
    }
}

async fn connect(url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
    Ok(Arc::new(MongoDriver::connect(url).await?))
}

/// One server. Its methods block, which costs nobody anything: cases have threads of their own.
struct Place {
    server: MongoServer,
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

/// The connections of one driver. Each command names itself in its comment.
struct Wire(Proxy);

fn comment(of: Call) -> &'static str {
    match of {
        Call::Acquire => "dlock acquire",
        Call::Renew => "dlock renew",
        Call::Release => "dlock release",
    }
}

#[async_trait]
impl Faults for Wire {
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        drop(
            self.0
                .on_next(Trigger::on(comment(of)), Fault::CutAfterRequest),
        );
        Ok(())
    }

    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        let strike = self.0.on_next(Trigger::on(comment(of)), Fault::HoldRequest);
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
        Ok(self.server.restart()?)
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
        Ok(self.server.delete("dlock", "locks", name.as_str())?)
    }

    async fn flush(&self) -> Result<(), Failure> {
        Ok(self.server.drop_collection("dlock", "locks")?)
    }
}
