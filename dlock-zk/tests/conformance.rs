//! The conformance suite over a real ZooKeeper server.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, Unsupported, main as suite,
    testbed::{
        Home, ZooKeeperServer,
        proxy::{Fault, Trigger},
        server::ServerError,
        zookeeper::{self, ZooKeeperOptions},
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_zk::{
    ZkDriver,
    zookeeper_client::{Client, Error as Native},
};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(Remote::everywhere(ZooKeeper), Mutants::Listed)
}

#[derive(Clone, Copy)]
struct ZooKeeper;

#[async_trait]
impl Backend for ZooKeeper {
    type Kind = zookeeper::ZooKeeper;

    fn name(&self) -> &'static str {
        "zk"
    }

    fn start(&self, home: Home) -> Result<ZooKeeperServer, ServerError> {
        let start = || ZooKeeperServer::start(ZooKeeperOptions::default());
        match home {
            Home::Container => ZooKeeperServer::in_container(),
            Home::Process => ZooKeeperServer::from_env_or(start),
        }
    }

    /// The session is long enough for a busy machine, and short enough for tests that wait for its end.
    fn url(&self, server: String, home: Home) -> String {
        let session = match home {
            Home::Process => "2s",
            // A new Java behind the engine's proxy was once silent for 0.8 s, which ends a session of 2 s.
            Home::Container => "5s",
        };
        format!("{server}/dlock?dlock.session={session}")
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(ZkDriver::connect(url).await?))
    }

    /// The bytes that identify the requests of a kind.
    fn request(&self, of: Call, _: Fault) -> Trigger {
        match of {
            // The stem of a seat and the length of its data. The first such request finds no folder; the
            // second one takes the seat.
            Call::Acquire => Trigger::on(*b"-lock-\0\0\0").skip(1),
            // The number of the operation (a node's state is read) and the length of the path.
            Call::Renew => Trigger::on([0, 0, 0, 3, 0, 0, 0]),
            // The number of the operation and the length of the path. Any other request contains them only as
            // the second request of its connection.
            Call::Release => Trigger::on([0, 0, 0, 2, 0, 0, 0]),
        }
    }

    async fn delete(&self, server: &ZooKeeperServer, name: &LockName) -> Result<(), Failure> {
        // Names of cases contain only letters, digits and dots, which the encoding does not change.
        remove(server, &format!("/dlock/{name}")).await
    }

    async fn flush(&self, server: &ZooKeeperServer) -> Result<(), Failure> {
        remove(server, "/dlock").await
    }

    fn is_chained(&self) -> bool {
        true
    }

    fn no_store_time(&self) -> Unsupported {
        Unsupported("sessions end by the server's monotonic clock")
    }
}

/// Removes a node and all nodes below it, while other clients may add more.
async fn remove(server: &ZooKeeperServer, path: &str) -> Result<(), Failure> {
    let hosts = server.addr().to_string();
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
