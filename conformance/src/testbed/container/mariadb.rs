//! `mariadb:10.11`.

use std::io::{self, Read};
use std::net::SocketAddr;

use super::{Image, connect};

/// MariaDB in a container: user `root`, password [`PASSWORD`](Self::PASSWORD), an empty database [`DATABASE`](Self::DATABASE).
#[derive(Clone, Debug, Default)]
pub struct MariaDb {
    /// Options of `mariadbd`, such as `--max-connections=5`.
    pub extra_args: Vec<String>,
}

impl MariaDb {
    /// The password of `root`.
    pub const PASSWORD: &str = "dlock";
    /// The database, which exists from the start.
    pub const DATABASE: &str = "dlock";
}

impl Image for MariaDb {
    fn name(&self) -> &'static str {
        "mariadb"
    }

    fn tag(&self) -> &'static str {
        "10.11"
    }

    fn port(&self, _: u16) -> u16 {
        3306
    }

    fn command(&self, _: u16) -> Vec<String> {
        // Its disk is shared with every other test; written data survives the process all the same.
        let mut command = ["mariadbd", "--innodb-flush-log-at-trx-commit=2"]
            .map(str::to_owned)
            .to_vec();
        command.extend(self.extra_args.iter().cloned());
        command
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("MARIADB_ROOT_PASSWORD", Self::PASSWORD.to_owned()),
            ("MARIADB_DATABASE", Self::DATABASE.to_owned()),
        ]
    }

    fn ready(&self, addr: SocketAddr) -> bool {
        greeting(addr).is_ok()
    }
}

/// A server that listens greets. While it initialises itself it does not listen, and the engine's proxy
/// sends no greeting.
fn greeting(addr: SocketAddr) -> io::Result<()> {
    let mut packet = [0; 5]; // three bytes of length, a number, the protocol
    connect(addr)?.read_exact(&mut packet)?;
    match packet[4] {
        PROTOCOL => Ok(()),
        _ => Err(io::Error::other("a refusal instead of a greeting")),
    }
}

const PROTOCOL: u8 = 10;
