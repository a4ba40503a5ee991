//! Conformance suite: runs all cases over a real Redis server.

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
use dlock_core::{LockName, driver::DistributedLock};
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
        // A fast fsync, and this one is in memory, means that the file is written before each answer:
        // what was answered survives a kill of the process.
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

    /// Every call is one script, and a case aims at the next call that it makes.
    fn request(&self, _: Call, _: Fault) -> Trigger {
        Trigger::on("EVALSHA")
    }

    async fn delete(&self, server: &RedisServer, name: &LockName) -> Result<(), Failure> {
        // Names in cases are letters, digits and dots, which the encoding leaves unchanged.
        server.command(&["DEL", &format!("dlock:{{{name}}}")])?;
        Ok(())
    }

    async fn flush(&self, server: &RedisServer) -> Result<(), Failure> {
        server.command(&["FLUSHALL"])?;
        Ok(())
    }
}
