//! `dlock doctor` over each store: sound servers, and each setting that voids a lock in turn.

use crate::bed::{Desk, Out, at, dlock, run, start, until};
use crate::session;
use dlock_conformance::testbed::{
    EtcdServer, MariadbServer, MongoServer, PostgresServer, RedisServer, ZooKeeperServer,
    mariadb::MariadbOptions,
    mongo::Deployment,
    redis::{Aof, RedisOptions, Reply},
    redis_cluster::RedisCluster,
    redis_set::{NAME, SentinelServer},
    zookeeper::ZooKeeperOptions,
};
use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

/// A lease with which a step may take a while on a loaded machine.
const LEASE: &str = "10m";

#[track_caller]
fn is_sound(url: &str) {
    is_sound_and_says(url, &[]);
}

/// The same, with these words in what is found.
#[track_caller]
fn is_sound_and_says(url: &str, words: &[&str]) {
    let out = doctor(url).expect(0);
    assert!(out.stdout.contains("ok       a step took up to"), "{out:?}");
    // The settings of the store, not the trial alone.
    assert!(out.stdout.lines().count() > 1, "{out:?}");
    assert_eq!(out.stderr, "");
    for word in words {
        assert!(out.stdout.contains(word), "{word}: {out:?}");
    }
}

/// Fails unless exactly this is found, with the words and what to do.
#[track_caller]
fn finds(url: &str, code: i32, words: &[&str]) {
    let out = doctor(url).expect(code);
    let bad: Vec<_> = out
        .stdout
        .lines()
        .filter(|line| line.starts_with("warning") || line.starts_with("void"))
        .collect();
    assert_eq!(bad.len(), words.len(), "{out:?}");
    for word in words {
        assert!(
            bad.iter().any(|line| line.contains(word)),
            "{word}: {out:?}"
        );
    }
    assert_eq!(
        out.stdout.matches("\n         -> ").count(),
        bad.len(),
        "{out:?}"
    );
}

fn doctor(url: &str) -> Out {
    let lease = if url.starts_with("zk") { "30s" } else { LEASE };
    run(at(url, &["doctor", "--lease", lease]))
}

const WARNING: i32 = 1;
const VOID: i32 = 78;

/// A Redis that keeps its locks, with these options.
fn redis(options: &[&str]) -> RedisServer {
    let options = RedisOptions {
        aof: Aof::EverySec,
        extra_args: options.iter().map(|&option| option.to_owned()).collect(),
        ..RedisOptions::default()
    };
    RedisServer::start(options).unwrap()
}

/// Gives a server the user `weak`, which may do all but this.
fn without(server: &RedisServer, rights: &str) {
    let user = format!("ACL SETUSER weak on >p allkeys allchannels +@all {rights}");
    let words: Vec<_> = user.split(' ').collect();
    server.command(&words).unwrap();
}

#[test]
fn redis_settings_are_found() {
    let server = redis(&[]);
    let set = |key: &str, value: &str| {
        server.command(&["CONFIG", "SET", key, value]).unwrap();
    };
    is_sound_and_says(&server.url(), &["appendfsync is everysec"]);
    set("appendfsync", "always");
    is_sound_and_says(&server.url(), &["appendfsync is always"]);
    set("appendfsync", "no");
    finds(&server.url(), WARNING, &["appendfsync is no"]);
    without(&server, "-config");
    let weak = server.url().replace("redis://", "redis://weak:p@");
    is_sound_and_says(&weak, &["unless appendfsync is always"]);
    without(&server, "-info");
    is_sound_and_says(&weak, &["grant +info to have them checked"]);
    set("appendfsync", "everysec");
    set("maxmemory-policy", "allkeys-lru");
    finds(&server.url(), WARNING, &["once maxmemory is set"]);
    set("maxmemory", "100mb");
    finds(
        &server.url(),
        VOID,
        &["allkeys-lru: a full server may evict"],
    );
    set("maxmemory-policy", "noeviction");
    set("appendonly", "no");
    finds(&server.url(), WARNING, &["append-only persistence is off"]);
    let port = server.addr().port().to_string();
    let replica = RedisServer::start(RedisOptions::default()).unwrap();
    let follow = ["REPLICAOF", "127.0.0.1", &port];
    replica.command(&follow).unwrap();
    until("the replica to follow", || {
        let info = server.command(&["INFO"]).unwrap();
        info.text().unwrap().contains("connected_slaves:1")
    });
    finds(&server.url(), WARNING, &["1 replicas", "append-only"]);
    set("min-replicas-to-write", "1");
    until("the replica to count", || {
        let info = server.command(&["INFO"]).unwrap();
        info.text().unwrap().contains("min_slaves_good_slaves:1")
    });
    finds(
        &server.url(),
        WARNING,
        &["dlock.replicas is off", "append-only"],
    );
}

#[test]
fn rights_that_are_missing_are_found() {
    let server = redis(&[]);
    without(&server, "-pexpire -del -hset");
    let url = server.url().replace("redis://", "redis://weak:p@");
    finds(&url, VOID, &["taking a lock fails"]);
}

#[test]
fn settings_of_a_redis_cluster_are_found_and_judged_by_the_lease() {
    let cluster = RedisCluster::start(1, false, Duration::from_secs(5)).unwrap();
    let master = &cluster.nodes()[0];
    let set = |key: &str, value: &str| {
        master.command(&["CONFIG", "SET", key, value]).unwrap();
    };
    let alone = "this master has no replica";
    finds(&cluster.url(), WARNING, &[alone]);
    // Too long for the default lease, and not for this one.
    set("cluster-node-timeout", "15000");
    finds(&cluster.url(), WARNING, &[alone]);
    set("cluster-node-timeout", "201000");
    let slow = "cluster-node-timeout is 201s";
    finds(&cluster.url(), WARNING, &[alone, slow]);
    set("cluster-node-timeout", "200000");
    set("cluster-require-full-coverage", "yes");
    let whole = "cluster-require-full-coverage is yes";
    finds(&cluster.url(), WARNING, &[alone, whole]);
    without(master, "-config");
    let weak = cluster.url().replace("//", "//weak:p@");
    finds(&weak, WARNING, &[alone]);
    let out = doctor(&weak);
    let unread = "ok       not checked: cluster-node-timeout";
    assert!(out.stdout.contains(unread), "{out:?}");
}

#[test]
fn replicas_of_a_sentinel_that_differ_in_priority_are_found_unless_all_confirm() {
    let master = redis(&["--min-replicas-to-write", "1"]);
    let replicas = [redis(&[]), redis(&[])];
    let port = master.addr().port().to_string();
    for replica in &replicas {
        replica.command(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
    }
    until("the replicas to count", || {
        let info = master.command(&["INFO"]).unwrap();
        info.text().unwrap().contains("min_slaves_good_slaves:2")
    });
    // A new one, since a sentinel asks for priorities when it begins, and then seldom.
    let sentinel = |priority: &str| {
        let sentinel = SentinelServer::start(master.addr(), Duration::from_secs(600), 1).unwrap();
        let knows = format!("Text(\"slave-priority\"), Text({priority:?})");
        until("the sentinel to know the priorities", || {
            match sentinel.command(&["SENTINEL", "REPLICAS", NAME]) {
                Ok(Reply::Array(all)) => all.len() == 2 && format!("{all:?}").contains(&knows),
                _ => false,
            }
        });
        sentinel
    };
    let url = |sentinel: &SentinelServer, confirming: u32| {
        let settings = format!("dlock.replicas={confirming}&dlock.replicas-timeout=10s");
        format!("redis+sentinel://{}/{NAME}?{settings}", sentinel.addr())
    };
    let equal = sentinel("100");
    let words = ["no two replicas that", "2 replicas, of which 1 confirm"];
    is_sound_and_says(&url(&equal, 1), &words);
    let less = ["CONFIG", "SET", "replica-priority", "50"];
    replicas[0].command(&less).unwrap();
    let unequal = sentinel("50");
    let words = "differ in replica-priority";
    finds(&url(&unequal, 1), WARNING, &[words]);
    is_sound_and_says(&url(&unequal, 2), &["all 2 replicas confirm every lock"]);
    let hidden = ["ACL", "SETUSER", "default", "-sentinel|replicas"];
    until("the sentinel to hide them", || {
        equal.command(&hidden).is_ok()
    });
    is_sound_and_says(&url(&equal, 1), &["not checked: replica-priority"]);
}

#[test]
fn stores_of_a_quorum_on_one_host_are_found() {
    let hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"];
    let servers = hosts.map(|host| redis(&["--bind", "127.0.0.1", host]));
    let url = |hosts: [&str; 3]| {
        let stores = servers.iter().zip(hosts);
        let stores = stores.map(|(it, host)| format!("redis://{host}:{}/", it.addr().port()));
        format!("quorum:{}", stores.collect::<Vec<_>>().join(" "))
    };
    is_sound(&url(hosts));
    let all = "3 of 3 stores are on the host 127.0.0.1";
    finds(&url(["127.0.0.1"; 3]), WARNING, &[all]);
    let two = "2 of 3 stores are on the host 127.0.0.1";
    finds(&url(["127.0.0.1", "127.0.0.1", hosts[2]]), WARNING, &[two]);
}

#[test]
fn mysql_settings_are_found() {
    let start = |args: &[&str]| {
        let extra_args = args.iter().map(|&arg| arg.to_owned()).collect();
        MariadbServer::start(MariadbOptions { extra_args }).unwrap()
    };
    let desk = Desk::new();
    let rights = "CREATE USER locker@'%' IDENTIFIED BY 'p';\n\
                  GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON dlock.* TO locker@'%';\n";
    fs::write(desk.path("rights"), rights).unwrap();
    let sound = start(&[
        "--innodb-doublewrite=1", // the test bed spares its disk this
        &format!("--init-file={}", desk.text("rights")),
    ]);
    is_sound(&sound.url());
    let out = doctor(&sound.url());
    assert!(!out.stdout.contains("not checked"), "{out:?}");
    let unread = [
        "not checked: whether this server follows another one; grant REPLICA MONITOR",
        "not checked: how replicas follow; grant PROCESS",
    ];
    is_sound_and_says(&sound.url().replace("root@", "locker:p@"), &unread);
    let double = "--innodb-doublewrite=1";
    for (options, found) in [
        (&["--innodb-doublewrite=0"][..], "innodb_doublewrite is off"),
        (
            &[double, "--innodb-flush-log-at-trx-commit=2"],
            "innodb_flush_log_at_trx_commit is 2",
        ),
        (
            &[double, "--log-bin", "--sync-binlog=0"],
            "sync_binlog is not 1",
        ),
    ] {
        finds(&start(options).url(), WARNING, &[found]);
    }
    let follows = "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_USER = 'missing';";
    fs::write(desk.path("init"), follows).unwrap();
    let follower = start(&[
        "--innodb-doublewrite=1",
        "--server-id=7",
        "--skip-slave-start",
        &format!("--init-file={}", desk.text("init")),
    ]);
    finds(&follower.url(), VOID, &["follows another one"]);
}

#[test]
#[cfg_attr(
    not(feature = "postgres"),
    ignore = "this dlock is built without the feature postgres"
)]
fn postgres_settings_are_found() {
    let names = ["fsync", "full_page_writes", "synchronous_commit"];
    let start = |off: &str| {
        let value = |name| if name == off { "off" } else { "on" };
        let settings = names.map(|name| format!("{name}={}", value(name)));
        PostgresServer::start(&settings.each_ref().map(String::as_str)).unwrap()
    };
    is_sound(&start("none").url());
    for name in names {
        finds(&start(name).url(), WARNING, &[&format!("{name} is off")]);
    }
}

#[test]
#[cfg_attr(
    not(feature = "mongo"),
    ignore = "this dlock is built without the feature mongo"
)]
fn mongodb_deployments_are_found() {
    is_sound(&MongoServer::start(Deployment::ReplicaSet).unwrap().url());
    let alone = MongoServer::start(Deployment::Standalone).unwrap();
    finds(&alone.url(), WARNING, &["a standalone server"]);
}

#[test]
#[cfg_attr(
    not(feature = "etcd"),
    ignore = "this dlock is built without the feature etcd"
)]
fn an_etcd_cluster_without_space_is_found_and_a_sound_one_is_not() {
    is_sound(&EtcdServer::start(&[]).unwrap().url());
    let full = EtcdServer::start(&["--quota-backend-bytes", "1"]).unwrap();
    let out = doctor(&full.url()).expect(69);
    let words = "quota is used up: compact, defragment and disarm";
    assert!(out.stderr.contains(words), "{out:?}");
}

#[test]
fn zookeeper_sessions_that_are_cut_are_found() {
    is_sound(&session::url());
    let options = ZooKeeperOptions {
        extra_lines: vec!["maxSessionTimeout=20000".to_owned()],
        ..ZooKeeperOptions::default()
    };
    let server = ZooKeeperServer::start(options).unwrap();
    let url = format!("{}?dlock.session=60s", server.url());
    let out = run(at(&url, &["doctor"]));
    assert!(
        out.stdout.contains("cut the session from 60s to 20s"),
        "{out:?}"
    );
}

#[test]
fn zookeeper_nodes_that_are_open_although_a_user_logs_in_are_found() {
    let with_user = |url: &str| url.replace("zk://", "zk://me:secret@");
    let open = format!("{}/open", session::url());
    is_sound_and_says(&open, &["no user logs in", "the clocks of the server"]);
    finds(&with_user(&open), WARNING, &["dlock.acl is open"]);
    // An empty root is removed after a while.
    let desk = Desk::new();
    let text = format!("echo in >'{}'; exec sleep 600", desk.text("in"));
    let _holder = start(at(&open, &["exec", "held", "-c", &text]));
    desk.line("in");
    let creator = |url: &str| format!("{}?dlock.acl=creator", with_user(url));
    finds(&creator(&open), WARNING, &["/open is open to anyone"]);
    let own = format!("{}/own", session::url());
    is_sound_and_says(&creator(&own), &["/own is not open to anyone"]);
}

#[test]
fn a_lock_file_that_every_user_may_change_is_found() {
    let desk = Desk::new();
    let url = format!("sqlite:{}", desk.text("locks.db"));
    is_sound(&url);
    let mode = |path: &str, mode| {
        fs::set_permissions(desk.path(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    mode("locks.db", 0o666);
    finds(&url, WARNING, &["every user may write"]);
    mode("locks.db", 0o600);
    mode(".", 0o777);
    finds(&url, WARNING, &["every user may delete"]);
    mode(".", 0o1777);
    is_sound(&url);
}

#[test]
fn findings_are_json_for_programs_and_a_store_out_of_reach_has_its_own_code() {
    let out = run(dlock(&["--json", "doctor", "--lease", LEASE]));
    let lines = out.stdout.lines();
    for line in lines.clone() {
        let finding: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(finding["backend"], "redis", "{line}");
        assert!(
            finding["what"].is_string() && finding["remedy"].is_string(),
            "{line}"
        );
    }
    // The shared server has no append-only file.
    assert!(
        lines
            .clone()
            .any(|line| line.contains("\"severity\":\"warning\"")),
        "{out:?}"
    );
    run(at("redis://127.0.0.1:1/", &["doctor"])).expect(69);
}
