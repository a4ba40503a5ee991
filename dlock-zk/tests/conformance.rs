//! The suite over a real ZooKeeper.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Gap, Keeps, MakeFixture, Mutants, Network, Records, Server,
    StoreTime, Time, main as suite,
    testbed::{
        Home, Proxy, Station, ZooKeeperServer,
        proxy::{Direction, Fault, Reach, Trigger},
    },
};
use dlock_core::{DistributedLock, LockName};
use dlock_zk::{
    ZkDriver,
    zookeeper_client::{Client, Error as Native},
};
use std::{process::ExitCode, sync::Arc, time::Duration};

fn main() -> ExitCode {
    let homes = [Home::Process, Home::Container];
    let suites = homes.map(|home| Box::new(ZooKeeper(home)) as Box<dyn MakeFixture>);
    suite(suites.into(), Mutants::Listed)
}

struct ZooKeeper(Home);

/// Long enough for a busy machine, short enough to see the end of.
const SESSION: &str = "dlock.session=2s";

#[async_trait]
impl MakeFixture for ZooKeeper {
    fn name(&self) -> &str {
        match self.0 {
            Home::Process => "zookeeper",
            Home::Container => "zookeeper-container",
        }
    }

    fn home(&self) -> Home {
        self.0
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let start = match self.0 {
            Home::Container => ZooKeeperServer::in_container,
            Home::Process => ZooKeeperServer::from_env_or_start,
        };
        let server = tokio::task::spawn_blocking(start).await??;
        Ok(Arc::new(Place { server }))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(url).await
    }
}

async fn connect(url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
    Ok(Arc::new(ZkDriver::connect(url).await?))
}

/// One server.
struct Place {
    server: ZooKeeperServer,
}

#[async_trait]
impl Fixture for Place {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        connect(&self.url().map_err(Failure::new)?).await
    }

    fn url(&self) -> Result<String, Gap> {
        Ok(format!("{}/dlock?{SESSION}", self.server.url()))
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
        Err(Gap("sessions end by the server's monotonic clock"))
    }
}

#[async_trait]
impl Network for Place {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let proxy = Proxy::start(self.server.addr()).await?;
        let url = format!("{}/dlock?{SESSION}", self.server.url_at(proxy.addr()));
        let driver = connect(&url).await?;
        Ok((driver, Box::new(Wire(proxy))))
    }
}

/// The connections of one driver.
struct Wire(Proxy);

/// What each request of a kind has and no other.
fn needle(of: Call) -> Trigger {
    match of {
        // A seat's stem and the length of its data. The first one finds no folder; the second one takes the seat.
        Call::Acquire => Trigger::on(*b"-lock-\0\0\0").skip(1),
        // The read that a batch waits for.
        Call::Renew => Trigger::on("/~renew"),
        // The operation's number and the length of the path. Another request has it only as the second one of its connection.
        Call::Release => Trigger::on([0, 0, 0, 2, 0, 0, 0]),
    }
}

#[async_trait]
impl Faults for Wire {
    async fn lose_reply(&self, of: Call) -> Result<(), Failure> {
        drop(self.0.on_next(needle(of), Fault::CutAfterRequest));
        Ok(())
    }

    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure> {
        let strike = self.0.on_next(needle(of), Fault::HoldRequest);
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

    /// Removes a node and all that is below it; others may add to it meanwhile.
    async fn remove(&self, path: &str) -> Result<(), Failure> {
        let hosts = self.server.addr().to_string();
        let client = Client::connect(&hosts).await.map_err(Failure::new)?;
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            match client.delete(&path, None).await {
                Ok(()) | Err(Native::NoNode) => {}
                Err(Native::NotEmpty) => {
                    let children = client.list_children(&path).await.unwrap_or_default();
                    left.push(path.clone());
                    left.extend(children.iter().map(|child| format!("{path}/{child}")));
                }
                Err(error) => return Err(Failure::new(error)),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Records for Place {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        // Names of cases are letters, digits and dots, which the encoding leaves alone.
        self.remove(&format!("/dlock/{name}")).await
    }

    async fn flush(&self) -> Result<(), Failure> {
        self.remove("/dlock").await
    }
}
