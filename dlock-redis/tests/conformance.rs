//! The suite over a real Redis.

use async_trait::async_trait;
use dlock_conformance::{
    Backend, Call, Failure, Mutants, Remote, main as suite,
    testbed::{
        Home, RedisServer,
        proxy::{Fault, Trigger},
        redis::{self, Aof, RedisOptions},
        server::ServerError,
    },
};
use dlock_core::{DistributedLock, LockName};
use dlock_redis::RedisDriver;
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    suite(Remote::everywhere(Redis), Mutants::Listed)
}

#[derive(Clone, Copy)]
struct Redis;

#[async_trait]
impl Backend for Redis {
    type Kind = redis::Redis;

    fn name(&self) -> &'static str {
        "redis"
    }

    fn start(&self, home: Home) -> Result<RedisServer, ServerError> {
        // The file is written before each answer, so that what was answered outlives a kill of the process.
        let options = RedisOptions {
            aof: Aof::EverySec,
            ..RedisOptions::default()
        };
        match home {
            Home::Container => RedisServer::in_container(options),
            Home::Process => RedisServer::from_env_or(|| RedisServer::start(options)),
        }
    }

    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Ok(Arc::new(RedisDriver::connect(url).await?))
    }

    fn is_proxied(&self) -> bool {
        true
    }

    /// Every call is one script, and cases aim at the next call that they make.
    fn request(&self, _: Call, _: Fault) -> Trigger {
        Trigger::on("EVALSHA")
    }

    async fn delete(&self, server: &RedisServer, name: &LockName) -> Result<(), Failure> {
        // Names of cases are letters, digits and dots, which the encoding leaves alone.
        server.command(&["DEL", &format!("dlock:{{{name}}}")])?;
        Ok(())
    }

    async fn flush(&self, server: &RedisServer) -> Result<(), Failure> {
        server.command(&["FLUSHALL"])?;
        Ok(())
    }
}
