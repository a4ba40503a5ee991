//! `redis:7`.

use std::net::SocketAddr;

use super::Image;
use crate::testbed::redis::{self, RedisOptions};

/// Redis in a container. [`RedisServer`](crate::testbed::RedisServer) wraps it.
#[derive(Clone, Debug, Default)]
pub struct Redis(pub RedisOptions);

impl Image for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn tag(&self) -> &'static str {
        "7"
    }

    fn port(&self, _: u16) -> u16 {
        6379
    }

    fn command(&self, _: u16) -> Vec<String> {
        let mut command = vec!["redis-server".to_owned()];
        command.extend(self.0.arguments());
        // The client comes from the engine's bridge, which is not the container's loopback.
        command.extend(["--enable-debug-command", "yes"].map(str::to_owned));
        command.extend(self.0.extra_args.iter().cloned());
        command
    }

    fn ready(&self, addr: SocketAddr) -> bool {
        redis::answers(addr, |_| true)
    }
}
