//! Real servers, broken networks and dying processes, for tests and benchmarks.
//!
//! Nothing here knows what a lock is. [`Proxy`] stands between a client and its server and loses, holds, delays or cuts
//! what passes; [`ServerProcess`] is a real server on a free port that can be stopped, killed and started again;
//! [`worker`] lets a test binary run parts of itself in other processes and kill them.
//!
//! Dropping any of them ends what it started. If the test process itself is killed, `setpriv` (util-linux) sees to that
//! where it is installed.

mod process;
pub mod proxy;
pub mod redis;
pub mod server;
pub mod worker;

pub use proxy::Proxy;
pub use redis::RedisServer;
pub use server::ServerProcess;
pub use worker::Worker;
