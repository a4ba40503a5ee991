//! Real servers, broken networks and dying processes, for tests and benchmarks.
//!
//! Nothing here knows locks. [`Proxy`] stands between a client and its server and loses, holds, delays
//! or cuts what passes. [`ServerProcess`] is a real server on a free port that can be stopped, killed
//! and started again; so is `Container`, with the feature `containers`. Each of the two is a
//! [`ManagedServer`]. [`worker`] lets a test binary run parts of itself in other processes and kill them.
//!
//! Dropping any of them ends what it started. If the test process itself is killed, `setpriv`
//! (util-linux) ends them where it is installed.

#[cfg(feature = "containers")]
pub mod container;
pub mod etcd;
mod managed_server;
pub mod mariadb;
pub mod mongo;
mod pgbouncer;
pub mod postgres;
mod process;
pub mod proxy;
pub mod redis;
pub mod redis_cluster;
pub mod redis_set;
mod running;
pub mod server;
pub mod worker;
pub mod zookeeper;

#[cfg(feature = "containers")]
pub use container::Container;
pub use etcd::{EtcdCluster, EtcdServer};
pub use managed_server::{Home, ManagedServer, UNPRIVILEGED, is_unprivileged};
pub use mariadb::MariadbServer;
pub use mongo::{MongoServer, MongoSet};
pub use postgres::PostgresServer;
pub use proxy::Proxy;
pub use redis::RedisServer;
pub use redis_set::RedisSet;
pub use running::{Kind, Running};
pub use server::ServerProcess;
pub use worker::Worker;
pub use zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};
