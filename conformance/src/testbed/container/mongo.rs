//! `mongo:6`.

use std::net::SocketAddr;

use super::Image;
use crate::testbed::mongo;

/// MongoDB in a container: a replica set of one, [`REPLICA_SET`](Self::REPLICA_SET), which is its own primary when it is ready.
#[derive(Clone, Debug, Default)]
pub struct Mongo {
    /// Options of `mongod`, such as `--setParameter` and `enableTestCommands=1`.
    pub extra_args: Vec<String>,
}

impl Mongo {
    /// Its name.
    pub const REPLICA_SET: &str = mongo::SET;
}

impl Image for Mongo {
    fn name(&self) -> &'static str {
        "mongo"
    }

    fn tag(&self) -> &'static str {
        "6"
    }

    /// The same inside and outside: a member of a replica set calls itself, and is called, by one address.
    fn port(&self, outside: u16) -> u16 {
        outside
    }

    fn command(&self, outside: u16) -> Vec<String> {
        let port = outside.to_string();
        let mut command: Vec<_> = [
            "mongod",
            "--port",
            &port,
            "--replSet",
            Self::REPLICA_SET,
            "--oplogSize",
            "64",
            "--wiredTigerCacheSizeGB",
            "0.25",
        ]
        .map(str::to_owned)
        .into();
        command.extend(self.extra_args.iter().cloned());
        command
    }

    fn ready(&self, addr: SocketAddr) -> bool {
        let Ok(hello) = mongo::hello(addr) else {
            return false;
        };
        if !mongo::is_member(&hello) {
            drop(mongo::begin(&[addr], addr));
        }
        mongo::is_primary(&hello)
    }
}
