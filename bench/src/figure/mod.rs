//! The figures, in the order they are printed.

mod handoff;
mod memory_cycle;
#[cfg(feature = "peers")]
mod peer;
pub(crate) mod recovery;
mod redis_cycle;
mod redis_throughput;
mod renewals;

use crate::{Result, measure::Plan, report::Table};
use dlock_conformance::testbed::redis::{RedisOptions, RedisServer};
use dlock_core::Client;
use dlock_redis::RedisDriver;
use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

/// Something to find out.
pub(crate) struct Figure {
    /// As on the command line.
    pub(crate) name: &'static str,
    /// How long it measures unless told otherwise.
    pub(crate) seconds: Duration,
    pub(crate) run: fn(Plan) -> Running,
}

pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Table>> + Send>>;

pub(crate) fn all() -> [Figure; 6] {
    [
        figure("memory-cycle", 8, |plan| Box::pin(memory_cycle::run(plan))),
        figure("redis-cycle", 30, |plan| Box::pin(redis_cycle::run(plan))),
        figure("redis-throughput", 30, |plan| {
            Box::pin(redis_throughput::run(plan))
        }),
        figure("redis-recovery", 30, |plan| Box::pin(recovery::run(plan))),
        figure("handoff", 60, |plan| Box::pin(handoff::run(plan))),
        figure("renewals", 20, |plan| Box::pin(renewals::run(plan))),
    ]
}

fn figure(name: &'static str, seconds: u64, run: fn(Plan) -> Running) -> Figure {
    let seconds = Duration::from_secs(seconds);
    Figure { name, seconds, run }
}

/// A Redis server of our own, without persistence, and its process id.
async fn redis_server() -> Result<(Arc<RedisServer>, u32)> {
    let start = || RedisServer::start(RedisOptions::default());
    let server = tokio::task::spawn_blocking(start).await??;
    let pid = server
        .process()
        .ok_or("a server of ours without a process")?
        .pid();
    Ok((Arc::new(server), pid))
}

/// A client of ours with connections of its own.
async fn redis_client(url: &str) -> Result<Client> {
    Ok(Client::new(RedisDriver::connect(url).await?)?)
}
