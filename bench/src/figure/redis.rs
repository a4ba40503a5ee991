//! Setup that all figures over Redis share.

use crate::{Result, measure::Plan, report::Table};
use dlock_conformance::testbed::redis::{RedisOptions, RedisServer};
use dlock_core::Client;
use dlock_redis::RedisDriver;
use std::sync::Arc;

/// Shared locks: see [`share`](super::share).
pub(super) async fn share(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(Client::new(driver(&server.url()).await?)?);
    }
    super::share::run(&plan, &[pid], ("redis-share", "Redis"), clients).await
}

/// A Redis server without persistence, started for the figure, and its process id.
pub(super) async fn server() -> Result<(Arc<RedisServer>, u32)> {
    let start = || RedisServer::start(RedisOptions::default());
    let server = tokio::task::spawn_blocking(start).await??;
    let pid = server
        .process()
        .ok_or("the started server has no process")?
        .pid();
    Ok((Arc::new(server), pid))
}

pub(super) async fn driver(url: &str) -> Result<RedisDriver> {
    Ok(RedisDriver::connect(url).await?)
}

/// A dlock client with connections of its own.
pub(super) async fn client(url: &str) -> Result<Client> {
    Ok(Client::new(driver(url).await?)?)
}
