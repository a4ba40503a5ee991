//! The conformance suite over a real etcd server.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, Unsupported, main as suite,
    testbed::{
        EtcdServer, Home, Running,
        etcd::Etcd,
        proxy::{Fault, Trigger},
        server::ServerError,
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_etcd::{
    EtcdDriver,
    etcd_client::{Client, DeleteOptions},
};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(Remote::everywhere(OnEtcd), Mutants::Listed)
}

#[derive(Clone, Copy, Debug)]
struct OnEtcd;

#[async_trait]
impl Backend for OnEtcd {
    type Kind = Etcd;

    fn name(&self) -> &'static str {
        "etcd"
    }

    fn start(&self, home: Home) -> Result<EtcdServer, ServerError> {
        match home {
            Home::Container => EtcdServer::in_container(),
            Home::Process => Running::from_env_or(|| EtcdServer::start(&[])),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(EtcdDriver::connect(url).await?))
    }

    /// The bytes that identify the requests of a kind.
    fn request(&self, of: Call, _: Fault) -> Trigger {
        let trigger = match of {
            // The use in the value of a hold.
            Call::Acquire => Trigger::on(*b"\nheld\n"),
            // A message of ten bytes: the number of a hold's lease, whose low bits are the same.
            Call::Renew => Trigger::on([0, 0, 0, 0, 10, 8, 0xc4]),
            // The end of a range that begins with `pending/`.
            Call::Release => Trigger::on(*b"/pending0"),
        };
        trigger.in_http2()
    }

    async fn delete(&self, server: &EtcdServer, name: &LockName) -> Result<(), Failure> {
        // Names of cases contain only letters, digits and dots, which the encoding does not change.
        remove(server, &format!("/dlock/{name}/h/")).await
    }

    async fn flush(&self, server: &EtcdServer) -> Result<(), Failure> {
        remove(server, "/dlock/").await
    }

    fn is_chained(&self) -> bool {
        true
    }

    fn no_store_time(&self) -> Unsupported {
        Unsupported("leases end by the leader's monotonic clock")
    }
}

async fn remove(server: &EtcdServer, prefix: &str) -> Result<(), Failure> {
    let host = server.addr().to_string();
    let mut client = Client::connect([host], None).await.map_err(Failure::new)?;
    let all = DeleteOptions::new().with_prefix();
    let removed = client.delete(prefix, Some(all)).await;
    removed.map(drop).map_err(Failure::new)
}
