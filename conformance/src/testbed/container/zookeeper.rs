//! `zookeeper:3.8`.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use super::{Image, connect};

/// A single ZooKeeper in a container, with sessions as short as tests need them.
#[derive(Clone, Debug, Default)]
pub struct ZooKeeper {
    /// Lines of `zoo.cfg`, without blanks, such as `maxClientCnxns=5`.
    pub extra_lines: Vec<String>,
}

impl Image for ZooKeeper {
    fn name(&self) -> &'static str {
        "zookeeper"
    }

    fn tag(&self) -> &'static str {
        "3.8"
    }

    fn port(&self, _: u16) -> u16 {
        2181
    }

    fn command(&self, _: u16) -> Vec<String> {
        Vec::new() // the image's own
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        // The shortest session is two ticks, and a session is checked once a tick.
        let extra = ["minSessionTimeout=400", "maxSessionTimeout=60000"].map(str::to_owned);
        let extra: Vec<_> = extra.into_iter().chain(self.extra_lines.clone()).collect();
        [
            ("ZOO_TICK_TIME", "200"),
            ("ZOO_INIT_LIMIT", "25"),
            ("ZOO_SYNC_LIMIT", "10"),
            ("ZOO_MAX_CLIENT_CNXNS", "0"),
            ("ZOO_ADMINSERVER_ENABLED", "false"),
            ("ZOO_4LW_COMMANDS_WHITELIST", "*"),
            // Its disk is shared with every other test; written data survives the process all the same.
            ("JVMFLAGS", "-Dzookeeper.forceSync=no"),
            ("ZOO_CFG_EXTRA", &extra.join(" ")),
        ]
        .map(|(key, value)| (key, value.to_owned()))
        .into()
    }

    fn ready(&self, addr: SocketAddr) -> bool {
        // A server that does not serve yet says so instead.
        srvr(addr).is_ok_and(|answer| answer.contains("Zookeeper version"))
    }
}

fn srvr(addr: SocketAddr) -> io::Result<String> {
    let mut stream = connect(addr)?;
    stream.write_all(b"srvr")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
