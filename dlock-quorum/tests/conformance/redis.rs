//! The suite over a quorum of three Redis servers, in real time.

use async_trait::async_trait;
use dlock_conformance::{
    Call, Failure, Faults, Fixture, Keeps, MakeFixture, Network, Records, Server, StoreTime, Time,
    Unsupported,
    testbed::{
        Proxy, RedisServer,
        proxy::{Direction, Fault, Reach, Trigger},
        redis::{Aof, RedisOptions},
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
use dlock_redis::RedisDriver;
use std::{sync::Arc, time::Duration};

pub(super) struct Redis;

#[async_trait]
impl MakeFixture for Redis {
    fn name(&self) -> &'static str {
        "quorum-redis"
    }

    fn time(&self) -> Time {
        Time::Real
    }

    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure> {
        let start = || {
            RedisServer::start(RedisOptions {
                aof: Aof::EverySec,
                ..RedisOptions::default()
            })
        };
        Ok(Arc::new(Servers([start()?, start()?, start()?])))
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        let stores = url.split(' ').map(|url| {
            let at = url.to_owned();
            Store::new(url, move || {
                let url = at.clone();
                async move { Ok(Arc::new(RedisDriver::connect(&url).await?) as _) }
            })
        });
        let config = QuorumConfig::new(stores.collect())?;
        Ok(Arc::new(QuorumDriver::connect(config).await?))
    }
}

/// Three servers, of which none knows the others.
struct Servers([RedisServer; 3]);

impl Servers {
    fn urls(&self) -> String {
        self.0.each_ref().map(RedisServer::url).join(" ")
    }

    fn each(&self, what: impl Fn(&RedisServer) -> Result<(), Failure>) -> Result<(), Failure> {
        self.0.iter().try_for_each(what)
    }
}

#[async_trait]
impl Fixture for Servers {
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure> {
        Redis.connect(&self.urls()).await
    }

    fn url(&self) -> Result<String, Unsupported> {
        Ok(self.urls())
    }

    fn network(&self) -> Result<&dyn Network, Unsupported> {
        Ok(self)
    }

    fn server(&self) -> Result<&dyn Server, Unsupported> {
        Ok(self)
    }

    fn records(&self) -> Result<&dyn Records, Unsupported> {
        Ok(self)
    }

    fn store_time(&self) -> Result<&dyn StoreTime, Unsupported> {
        Err(Unsupported("the servers read the machine's clock"))
    }
}

#[async_trait]
impl Network for Servers {
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure> {
        let (mut urls, mut proxies) = (Vec::new(), Vec::new());
        for server in &self.0 {
            let proxy = Proxy::start(server.addr()).await?;
            urls.push(server.url_at(proxy.addr()));
            proxies.push(proxy);
        }
        let driver = Redis.connect(&urls.join(" ")).await?;
        Ok((driver, Box::new(Wires(proxies))))
    }
}

/// The connections of one driver. A fault strikes its next request at each server.
struct Wires(Vec<Proxy>);

#[async_trait]
impl Faults for Wires {
    async fn lose_reply(&self, _: Call) -> Result<(), Failure> {
        for proxy in &self.0 {
            drop(proxy.on_next(Trigger::on("EVALSHA"), Fault::CutAfterRequest));
        }
        Ok(())
    }

    async fn hold_back(&self, _: Call, by: Duration) -> Result<(), Failure> {
        for proxy in &self.0 {
            let armed = proxy.on_next(Trigger::on("EVALSHA"), Fault::HoldRequest);
            tokio::spawn(async move {
                tokio::time::sleep(by).await; // the fault itself
                armed.release();
            });
        }
        Ok(())
    }

    async fn cut(&self) -> Result<(), Failure> {
        for proxy in &self.0 {
            proxy.cut();
        }
        Ok(())
    }

    async fn down(&self) -> Result<(), Failure> {
        for proxy in &self.0 {
            proxy.refuse(true);
            proxy.cut();
        }
        Ok(())
    }

    async fn up(&self) -> Result<(), Failure> {
        self.0.iter().for_each(Proxy::heal);
        Ok(())
    }

    async fn delay(&self, by: Duration) -> Result<(), Failure> {
        for proxy in &self.0 {
            proxy.set_delay(Reach::All, Direction::ClientToServer, by);
        }
        Ok(())
    }
}

#[async_trait]
impl Server for Servers {
    async fn stop(&self) -> Result<(), Failure> {
        self.each(|server| Ok(server.managed().map_or(Ok(()), |it| it.stop())?))
    }

    async fn cont(&self) -> Result<(), Failure> {
        self.each(|server| Ok(server.managed().map_or(Ok(()), |it| it.cont())?))
    }

    async fn restart(&self) -> Result<(), Failure> {
        self.each(|server| Ok(server.managed().map_or(Ok(()), |it| it.restart())?))
    }

    fn keeps(&self) -> Keeps {
        Keeps::Everything
    }
}

#[async_trait]
impl Records for Servers {
    async fn delete(&self, name: &LockName) -> Result<(), Failure> {
        let key = format!("dlock:{{{name}}}");
        self.each(|server| Ok(server.command(&["DEL", &key]).map(drop)?))
    }

    async fn flush(&self) -> Result<(), Failure> {
        self.each(|server| Ok(server.command(&["FLUSHALL"]).map(drop)?))
    }
}
