//! Images of the servers, as data.

use crate::testbed::{etcd, mariadb, mongo, postgres, redis, zookeeper};
use std::{net::SocketAddr, time::Duration};

/// The description of a kind of server that [`Container`](super::Container) runs.
#[derive(Clone, Debug)]
pub struct Image {
    /// The name of the image without its tag, also for messages.
    pub name: &'static str,
    /// Its tag.
    pub tag: &'static str,
    /// The port where it listens in the container; `None`: the one that clients see, for a server that
    /// tells its clients its address.
    pub port: Option<u16>,
    /// Its command line; none: the image's own. `{port}` stands for the port that clients see.
    pub command: Vec<String>,
    /// Its environment.
    pub environment: Vec<(&'static str, String)>,
    /// Whether it answers there; called every few milliseconds, so it must not wait long.
    ///
    /// The engine accepts connections before the server does, so only an answer of the server itself
    /// counts.
    pub ready: fn(SocketAddr) -> bool,
    /// How long a start may take.
    pub start_limit: Duration,
}

impl Image {
    fn new(name: &'static str, tag: &'static str, ready: fn(SocketAddr) -> bool) -> Self {
        Self {
            name,
            tag,
            port: None,
            command: Vec::new(),
            environment: Vec::new(),
            ready,
            start_limit: Duration::from_secs(60),
        }
    }

    /// Redis.
    #[must_use]
    pub fn redis(options: &redis::RedisOptions) -> Self {
        let mut command = vec!["redis-server".to_owned()];
        command.extend(options.arguments());
        // The client comes from the engine's bridge, which is not the container's loopback.
        command.extend(["--enable-debug-command", "yes"].map(str::to_owned));
        command.extend(options.extra_args.iter().cloned());
        Self {
            port: Some(6379),
            command,
            ..Self::new("redis", "7", |addr| redis::answers(addr, |_| true))
        }
    }

    /// MariaDB: user `root`, password [`PASSWORD`](Self::PASSWORD), an empty database
    /// [`DATABASE`](Self::DATABASE).
    #[must_use]
    pub fn mariadb(options: &mariadb::MariadbOptions) -> Self {
        // Its disk is shared with every other test; written data survives the process all the same.
        let command = ["mariadbd", "--innodb-flush-log-at-trx-commit=2"].map(str::to_owned);
        let command = command.into_iter().chain(options.extra_args.clone());
        Self {
            port: Some(3306),
            command: command.collect(),
            environment: vec![
                ("MARIADB_ROOT_PASSWORD", Self::PASSWORD.to_owned()),
                ("MARIADB_DATABASE", Self::DATABASE.to_owned()),
            ],
            // While it initialises itself it does not listen, and the engine's proxy greets no one.
            ..Self::new("mariadb", "10.11", mariadb::greets)
        }
    }

    /// The password of `root` in MariaDB.
    pub const PASSWORD: &str = "dlock";
    /// The database in MariaDB, which exists from the start.
    pub const DATABASE: &str = "dlock";

    /// PostgreSQL: user `postgres`, whose password is not asked for, and an empty database `postgres`.
    #[must_use]
    pub fn postgres() -> Self {
        // Its disk is shared with every other test; written data survives the process all the same.
        let settings = ["max_connections=2000", "fsync=off"];
        let command = settings.into_iter().flat_map(|one| ["-c", one]);
        Self {
            port: Some(5432),
            command: std::iter::once("postgres")
                .chain(command)
                .map(str::to_owned)
                .collect(),
            environment: vec![("POSTGRES_HOST_AUTH_METHOD", "trust".to_owned())],
            // While it initialises itself it does not listen.
            ..Self::new("postgres", "15", postgres::answers)
        }
    }

    /// MongoDB: a replica set of one, which is its own primary when it is ready. Its port is the same
    /// inside and outside: a member calls itself, and is called, by one address.
    #[must_use]
    pub fn mongo() -> Self {
        let words = "mongod --port {port} --oplogSize 64 --wiredTigerCacheSizeGB 0.25 --replSet";
        let words = words.split(' ').chain([mongo::SET]);
        let ready = |addr| {
            let Ok(hello) = mongo::hello(addr) else {
                return false;
            };
            if !mongo::is_member(&hello) {
                drop(mongo::begin(&[addr], None, addr));
            }
            mongo::is_primary(&hello)
        };
        Self {
            command: words.map(str::to_owned).collect(),
            ..Self::new("mongo", "6", ready)
        }
    }

    /// etcd: a cluster of one, whose shortest lease is a second. The registry has no image of this name:
    /// `images/build.sh` makes it, or the project's own is tagged so.
    #[must_use]
    pub fn etcd() -> Self {
        let words = "/usr/local/bin/etcd --data-dir /etcd-data --listen-client-urls http://0.0.0.0:2379 \
                     --advertise-client-urls http://127.0.0.1:{port}";
        let words = words.split_whitespace().chain(etcd::OPTIONS.split(' '));
        Self {
            port: Some(2379),
            command: words.map(str::to_owned).collect(),
            ..Self::new("etcd", "3.6", etcd::answers)
        }
    }

    /// A single ZooKeeper, with sessions as short as tests need them.
    #[must_use]
    pub fn zookeeper() -> Self {
        let environment = [
            // The shortest session is two ticks, and a session is checked once a tick.
            ("ZOO_TICK_TIME", "200"),
            ("ZOO_INIT_LIMIT", "25"),
            ("ZOO_SYNC_LIMIT", "10"),
            ("ZOO_MAX_CLIENT_CNXNS", "0"),
            ("ZOO_ADMINSERVER_ENABLED", "false"),
            ("ZOO_4LW_COMMANDS_WHITELIST", "*"),
            // Its disk is shared with every other test; written data survives the process all the same.
            ("JVMFLAGS", "-Dzookeeper.forceSync=no"),
            (
                "ZOO_CFG_EXTRA",
                "minSessionTimeout=400 maxSessionTimeout=60000",
            ),
        ];
        let ready = |addr| {
            // A server that does not serve yet says so instead.
            zookeeper::ask(addr, "srvr").is_ok_and(|text| text.contains("Zookeeper version"))
        };
        Self {
            port: Some(2181),
            environment: environment
                .map(|(key, value)| (key, value.to_owned()))
                .into(),
            ..Self::new("zookeeper", "3.8", ready)
        }
    }
}
