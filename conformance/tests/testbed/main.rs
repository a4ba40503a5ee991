//! Tests of the testbed itself.

mod fault;
mod proxy;
mod redis;
mod server;

use std::time::Duration;

use tokio::time::timeout;

/// Far longer than anything here takes on a busy machine: only a hang reaches it.
const LIMIT: Duration = Duration::from_secs(10);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(LIMIT, what).await.expect("this did not happen")
}
