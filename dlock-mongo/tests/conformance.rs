//! The conformance suite over a real MongoDB: a replica set of one.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, main as suite,
    testbed::{
        Home, MongoServer,
        mongo::{self, Deployment},
        proxy::{Fault, Trigger},
        server::ServerError,
    },
};
use dlock_core::{LockName, driver::DistributedLock};
use dlock_mongo::MongoDriver;
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(Remote::everywhere(Mongo), Mutants::Listed)
}

#[derive(Clone, Copy)]
struct Mongo;

#[async_trait]
impl Backend for Mongo {
    type Kind = mongo::Mongo;

    fn name(&self) -> &'static str {
        "mongo"
    }

    fn start(&self, home: Home) -> Result<MongoServer, ServerError> {
        let set = Deployment::ReplicaSet;
        match home {
            Home::Container => MongoServer::in_container(),
            Home::Process => MongoServer::from_env_or(|| MongoServer::start(set)),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(MongoDriver::connect(url).await?))
    }

    /// Each command names itself in its comment.
    fn request(&self, of: Call, _: Fault) -> Trigger {
        Trigger::on(match of {
            Call::Acquire => "dlock acquire",
            Call::Renew => "dlock renew",
            Call::Release => "dlock release",
        })
    }

    async fn restart(&self, server: &MongoServer) -> Result<(), Failure> {
        Ok(server.restart()?)
    }

    async fn delete(&self, server: &MongoServer, name: &LockName) -> Result<(), Failure> {
        Ok(server.delete("dlock", "locks", name.as_str())?)
    }

    async fn flush(&self, server: &MongoServer) -> Result<(), Failure> {
        Ok(server.drop_collection("dlock", "locks")?)
    }
}
