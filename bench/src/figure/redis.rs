//! What every figure over Redis begins with.

use crate::Result;
use dlock_conformance::testbed::redis::{RedisOptions, RedisServer};
use dlock_core::Client;
use dlock_redis::RedisDriver;
use std::sync::Arc;

/// A Redis server of our own, without persistence, and its process id.
pub(super) async fn server() -> Result<(Arc<RedisServer>, u32)> {
    let start = || RedisServer::start(RedisOptions::default());
    let server = tokio::task::spawn_blocking(start).await??;
    let pid = server
        .process()
        .ok_or("a server of ours without a process")?
        .pid();
    Ok((Arc::new(server), pid))
}

pub(super) async fn driver(url: &str) -> Result<RedisDriver> {
    Ok(RedisDriver::connect(url).await?)
}

/// A client of ours with connections of its own.
pub(super) async fn client(url: &str) -> Result<Client> {
    Ok(Client::new(driver(url).await?)?)
}
