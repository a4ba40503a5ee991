//! `dlock doctor` over each store: sound servers, and each setting that voids a lock in turn.

use crate::bed::{Desk, Out, at, dlock, program, run, start, until};
use crate::session;
use dlock_conformance::testbed::{
    EtcdCluster, EtcdServer, MariadbServer, MongoServer, MongoSet, PostgresServer, RedisServer,
    ZooKeeperEnsemble, ZooKeeperServer,
    mariadb::MariadbOptions,
    mongo::{Deployment, doc},
    postgres::PostgresOptions,
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
    run(at(url, &["doctor", "--lease", LEASE]))
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

/// Waits until a server shows this in `INFO`.
#[track_caller]
fn until_shown(server: &RedisServer, text: &str) {
    until(text, || {
        let info = server.command(&["INFO"]).unwrap();
        info.text().unwrap().contains(text)
    });
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
    let confirmed = format!("{}?dlock.fsync=true", server.url());
    let knows = server.command(&["COMMAND", "INFO", "WAITAOF"]).unwrap();
    if format!("{knows:?}").contains("waitaof") {
        let never = "appendfsync is no, and dlock.fsync waits for the disk";
        finds(&confirmed, VOID, &[never, "taking a lock fails"]);
    } else {
        let out = doctor(&confirmed).expect(64);
        let needs = "dlock.fsync=true needs WAITAOF";
        assert!(out.stderr.contains(needs), "{out:?}");
    }
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
    set("maxmemory", "1");
    finds(&server.url(), VOID, &["the server is at its maxmemory"]);
    set("maxmemory", "0");
    set("appendonly", "no");
    finds(&server.url(), WARNING, &["append-only persistence is off"]);
}

#[test]
fn redis_replicas_that_do_not_confirm_are_found() {
    let [server, replica] = [redis(&[]), redis(&[])];
    let port = server.addr().port().to_string();
    let follow = ["REPLICAOF", "127.0.0.1", &port];
    replica.command(&follow).unwrap();
    until_shown(&replica, "master_link_status:up");
    let guard = |replicas: &str| {
        let set = ["CONFIG", "SET", "min-replicas-to-write", replicas];
        server.command(&set).unwrap();
    };
    let neither = "1 replicas, and min-replicas-to-write is 0 and dlock.replicas is off";
    finds(&server.url(), WARNING, &[neither]);
    let confirmed = format!(
        "{}?dlock.replicas=1&dlock.replicas-timeout=10s",
        server.url()
    );
    finds(&confirmed, WARNING, &["and min-replicas-to-write is 0:"]);
    guard("1");
    until_shown(&server, "min_slaves_good_slaves:1");
    finds(&server.url(), WARNING, &["and dlock.replicas is off:"]);
    is_sound_and_says(&confirmed, &["1 replicas, of which 1 confirm every lock"]);
    let more = format!("{}?dlock.replicas=2", server.url());
    let few = "dlock.replicas is 2, and 1 replicas are connected";
    finds(&more, VOID, &[few, "taking a lock fails"]);
    guard("2");
    let too_few = "too few replicas are connected (min-replicas-to-write)";
    finds(&confirmed, VOID, &[too_few]);
    let refuses = "this server is a slave, which refuses every lock";
    finds(&replica.url(), VOID, &[refuses, "taking a lock fails"]);
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
    until_shown(&master, "min_slaves_good_slaves:2");
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
    let never = ["CONFIG", "SET", "replica-priority", "0"];
    replicas[0].command(&never).unwrap();
    let never = sentinel("0");
    let words = "1 of the replicas of \"locks\" have replica-priority 0";
    finds(&url(&never, 1), WARNING, &[words]);
    let hidden = ["ACL", "SETUSER", "default", "-sentinel|replicas"];
    until("the sentinel to hide them", || {
        equal.command(&hidden).is_ok()
    });
    is_sound_and_says(&url(&equal, 1), &["not checked: replica-priority"]);
}

#[test]
fn stores_of_a_quorum_that_are_weak_or_lost_or_share_a_host_are_found() {
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
    let [_, weak, lost] = &servers;
    let off = ["CONFIG", "SET", "appendonly", "no"];
    weak.command(&off).unwrap();
    let off = format!(
        "redis://{}:{}/: append-only persistence is off",
        hosts[1],
        weak.addr().port()
    );
    finds(&url(hosts), WARNING, &[&off]);
    lost.managed().unwrap().kill().unwrap();
    let lost = format!("redis://{}:{}/: not asked", hosts[2], lost.addr().port());
    finds(&url(hosts), WARNING, &[&off, &lost]);
}

/// Executes statements of an administrator, and returns what they answer: a row a line.
#[track_caller]
fn mariadb(server: &MariadbServer, statements: &str) -> String {
    let mut client = program("mariadb");
    client.args(["--no-defaults", "--skip-ssl", "-uroot", "-h127.0.0.1"]);
    client.args(["-P", &server.addr().port().to_string()]);
    client.args(["-BNe", statements, "dlock"]);
    run(client).expect(0).stdout
}

#[test]
fn mysql_settings_are_found() {
    let start = |args: &[&str]| {
        let extra_args = args.iter().map(|&arg| arg.to_owned()).collect();
        MariadbServer::start(MariadbOptions { extra_args }).unwrap()
    };
    let server = start(&[
        "--innodb-doublewrite=1", // the test bed spares its disk this
        "--server-id=1",
        "--log-bin",
        "--sync-binlog=1",
    ]);
    let url = server.url();
    let set = |name: &str, value: &str| {
        mariadb(&server, &format!("SET GLOBAL {name} = {value}"));
    };
    is_sound(&url);
    let out = doctor(&url);
    assert!(!out.stdout.contains("not checked"), "{out:?}");
    let flush = "innodb_flush_log_at_trx_commit";
    for value in ["0", "2"] {
        set(flush, value);
        finds(&url, WARNING, &[&format!("{flush} is {value}")]);
    }
    set(flush, "3");
    is_sound(&url);
    set(flush, "1");
    set("sync_binlog", "0");
    finds(&url, WARNING, &["sync_binlog is not 1"]);
    set("sync_binlog", "1");
    set("read_only", "1");
    let out = doctor(&url).expect(69);
    assert!(out.stderr.contains("(read_only = ON)"), "{out:?}");
    set("read_only", "0");

    let user = "CREATE USER locker@'%' IDENTIFIED BY 'p'; GRANT SELECT, INSERT ON dlock_locks TO locker@'%'";
    mariadb(&server, user);
    let locker = url.replace("root@", "locker:p@");
    finds(&locker, VOID, &["taking a lock fails"]);
    mariadb(&server, "GRANT UPDATE, DELETE ON dlock_locks TO locker@'%'");
    let unread = [
        "not checked: whether this server follows another one; grant REPLICA MONITOR",
        "not checked: how replicas follow; grant PROCESS",
    ];
    is_sound_and_says(&locker, &unread);

    let replica = start(&["--server-id=2", "--innodb-flush-method=nosync"]);
    let unsafe_files = ["innodb_doublewrite is off", "innodb_flush_method is nosync"];
    finds(&replica.url(), WARNING, &unsafe_files);
    let follow = format!(
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {}, MASTER_USER = 'root', \
         MASTER_SSL = 0, MASTER_SSL_VERIFY_SERVER_CERT = 0",
        server.addr().port()
    );
    mariadb(&replica, &follow);
    let [double, sync] = unsafe_files;
    finds(&replica.url(), VOID, &[double, sync, "follows another one"]);
    mariadb(&replica, "START SLAVE");
    let replicas =
        "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%'";
    until("the replica to follow", || {
        mariadb(&server, replicas) == "1\n"
    });
    finds(&url, WARNING, &["replicas follow asynchronously"]);
    mariadb(&server, "CREATE TABLE pulse (n INT)");
    set("rpl_semi_sync_master_timeout", "60000");
    set("rpl_semi_sync_master_enabled", "ON");
    let acknowledge = "STOP SLAVE; SET GLOBAL rpl_semi_sync_slave_enabled = ON; START SLAVE";
    mariadb(&replica, acknowledge);
    let commit =
        "INSERT INTO pulse VALUES (1); SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync_master_status'";
    until("a commit that was acknowledged", || {
        mariadb(&server, commit).ends_with("\tON\n")
    });
    is_sound_and_says(&url, &["replicas follow semi-synchronously"]);
}

/// Executes statements of an administrator, each in its own transaction, and returns what they answer: a row a line.
#[track_caller]
fn psql(server: &PostgresServer, statements: &[&str]) -> String {
    let mut client = program("psql");
    client.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-d", &server.url()]);
    client.args(statements.iter().flat_map(|&one| ["-c", one]));
    run(client).expect(0).stdout
}

/// Changes a setting of a PostgreSQL server for new sessions.
#[track_caller]
fn set(server: &PostgresServer, name: &str, value: &str) {
    let change = format!("ALTER SYSTEM SET {name} = '{value}'");
    psql(server, &[&change, "SELECT pg_reload_conf()"]);
    let show = format!("SHOW {name}");
    until("the setting to be read", || {
        psql(server, &[&show]).trim() == value
    });
}

#[test]
#[cfg_attr(
    not(feature = "postgres"),
    ignore = "this dlock is built without the feature postgres"
)]
fn postgres_settings_are_found() {
    let server = PostgresServer::start(&["fsync=on", "wal_level=logical"]).unwrap();
    let url = server.url();
    is_sound(&url);
    for name in ["full_page_writes", "synchronous_commit"] {
        set(&server, name, "off");
        finds(&url, WARNING, &[&format!("{name} is off")]);
        set(&server, name, "on");
    }
    psql(&server, &["ALTER TABLE dlock_locks SET UNLOGGED"]);
    finds(&url, WARNING, &["is unlogged"]);
    psql(&server, &["ALTER TABLE dlock_locks SET LOGGED"]);
    set(&server, "default_transaction_read_only", "on");
    let out = doctor(&url).expect(69);
    assert!(out.stderr.contains("connect to the primary"), "{out:?}");
    set(&server, "default_transaction_read_only", "off");

    let user = "CREATE ROLE locker LOGIN";
    psql(
        &server,
        &[user, "GRANT SELECT, INSERT ON dlock_locks TO locker"],
    );
    let locker = url.replace("postgres@", "locker@");
    finds(&locker, VOID, &["taking a lock fails"]);
    psql(&server, &["GRANT UPDATE, DELETE ON dlock_locks TO locker"]);
    is_sound(&locker);

    set(&server, "autovacuum", "off");
    let rows = "INSERT INTO dlock_locks SELECT n::text::bytea, NULL, 0, '', 0, 0, 0, 0, '', 1 \
                FROM generate_series(1, 20000) n";
    psql(&server, &[rows, "DELETE FROM dlock_locks"]);
    let many = "SELECT pg_stat_get_dead_tuples('dlock_locks'::regclass) >= 10000";
    until("the server to count the dead rows", || {
        psql(&server, &[many]) == "t\n"
    });
    finds(&url, WARNING, &["dead row versions"]);
    until("the server to remove the dead rows", || {
        psql(&server, &["VACUUM dlock_locks", many]) == "f\n"
    });

    // What reads the changes is no standby that could be promoted.
    psql(&server, &["CREATE PUBLICATION all_of_it FOR ALL TABLES"]);
    let mut reader = program("pg_recvlogical");
    reader.args(["-d", &url, "-S", "reader", "--create-slot", "--start"]);
    reader.args(["-P", "pgoutput", "-f", "-"]);
    reader.args(["-o", "proto_version=1", "-o", "publication_names=all_of_it"]);
    let _reader = start(reader);
    let reads = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
    until("the changes to be read", || {
        psql(&server, &[reads]) == "1\n"
    });
    for url in [&url, &locker] {
        is_sound_and_says(url, &["no standby follows asynchronously"]);
    }
}

#[test]
#[cfg_attr(
    not(feature = "postgres"),
    ignore = "this dlock is built without the feature postgres"
)]
fn a_standby_of_postgres_that_no_commit_waits_for_is_found() {
    let primary = PostgresServer::start(&["fsync=on"]).unwrap();
    let options = PostgresOptions {
        primary: Some(primary.addr()),
        ..PostgresOptions::default()
    };
    let standby = PostgresServer::start_with(options).unwrap();
    let follows = |state: &str| {
        let sql = "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'";
        until("the standby to follow", || {
            psql(&primary, &[sql]).trim() == state
        });
    };
    let asynchronous = "a standby follows asynchronously";
    follows("async");
    finds(&primary.url(), WARNING, &[asynchronous]);
    set(&primary, "synchronous_standby_names", "*");
    follows("sync");
    is_sound(&primary.url());
    set(&primary, "synchronous_commit", "local");
    finds(&primary.url(), WARNING, &[asynchronous]);
    let out = doctor(&standby.url()).expect(69);
    assert!(out.stderr.contains("connect to the primary"), "{out:?}");
    assert_eq!(psql(&standby, &["SELECT pg_promote()"]), "t\n");
    finds(&standby.url(), WARNING, &["fsync is off"]); // the test bed's default
}

#[test]
#[cfg_attr(
    not(feature = "mongo"),
    ignore = "this dlock is built without the feature mongo"
)]
fn mongodb_deployments_are_found() {
    let alone = MongoServer::start(Deployment::Standalone).unwrap();
    finds(&alone.url(), WARNING, &["a standalone server"]);
    drop(alone);
    let set = MongoServer::start(Deployment::ReplicaSet).unwrap();
    is_sound(&set.url());
    // Without a vote it is not missed.
    let mute = doc! {"_id": 1, "host": "127.0.0.1:1", "votes": 0, "priority": 0};
    let answer = set.command("admin", doc! {"replSetGetConfig": 1}).unwrap();
    let mut config = answer.get_document("config").unwrap().clone();
    let version = config.get("version").unwrap();
    let version = version.as_i64().or(version.as_i32().map(i64::from));
    config.insert("version", version.unwrap() + 1);
    config.get_array_mut("members").unwrap().push(mute.into());
    let reconfigure = doc! {"replSetReconfig": config};
    set.command("admin", reconfigure).unwrap();
    is_sound_and_says(&set.url(), &["the replica set has 1 voting members"]);
    drop(set);
    let two = MongoSet::start(2).unwrap();
    let even = "the replica set has 2 voting members";
    finds(&two.url(), WARNING, &[even]);
    drop(two);
    let set = MongoSet::start_with_arbiter(1).unwrap();
    let arbiter = "1 members with data and 1 without";
    finds(&set.url(), WARNING, &[arbiter]);
}

#[test]
#[cfg_attr(
    not(feature = "mongo"),
    ignore = "this dlock is built without the feature mongo"
)]
fn rights_that_are_missing_in_mongodb_are_found() {
    let desk = Desk::new();
    let settings = |text: &str| fs::write(desk.path("settings"), text).unwrap();
    // Users are made before a log-in is asked for.
    settings("security: {javascriptEnabled: false}\n");
    let file = desk.text("settings");
    let args = ["--config", &*file];
    let server = MongoServer::start_with(Deployment::ReplicaSet, &args).unwrap();
    for (user, actions) in [
        ("reader", &["find", "changeStream"][..]),
        ("deaf", &["find", "insert", "update", "remove"]),
        (
            "whole",
            &["find", "insert", "update", "remove", "changeStream"],
        ),
    ] {
        let locks = doc! {"resource": {"db": "dlock", "collection": "locks"}, "actions": actions};
        let role = doc! {"createRole": user, "privileges": [locks], "roles": []};
        server.command("admin", role).unwrap();
        let user = doc! {"createUser": user, "pwd": "p", "roles": [user]};
        server.command("admin", user).unwrap();
    }
    let key = desk.path("key");
    fs::write(&key, "a".repeat(64)).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
    settings(&format!(
        "security: {{authorization: enabled, keyFile: '{}'}}\n",
        desk.text("key")
    ));
    server.restart().unwrap();
    let url = |user: &str| server.url().replace("//", &format!("//{user}:p@"));
    is_sound(&url("whole"));
    let polls = "the user may open no change streams";
    finds(&url("deaf"), WARNING, &[polls]);
    finds(&url("reader"), VOID, &["the user lacks a right"]);
}

#[test]
#[cfg_attr(
    not(feature = "etcd"),
    ignore = "this dlock is built without the feature etcd"
)]
fn etcd_clusters_are_found() {
    let full = EtcdServer::start(&["--quota-backend-bytes", "1"]).unwrap();
    let out = doctor(&full.url()).expect(69);
    let words = "quota is used up: compact, defragment and disarm";
    assert!(out.stderr.contains(words), "{out:?}");
    drop(full);
    let two = EtcdCluster::of(2).unwrap();
    finds(&two.url(), WARNING, &["the cluster has 2 voting members"]);
}

#[test]
#[cfg_attr(
    not(feature = "etcd"),
    ignore = "this dlock is built without the feature etcd"
)]
fn a_corrupt_etcd_cluster_and_missing_rights_are_found() {
    let server = EtcdServer::start(&[]).unwrap();
    let call = |what: &str, json: &str| server.call(what, json).unwrap();
    is_sound(&server.url());
    let alarm = |action: &str| {
        let json = format!(r#"{{"action": "{action}", "alarm": "CORRUPT"}}"#);
        call("maintenance/alarm", &json);
    };
    alarm("ACTIVATE");
    let out = doctor(&server.url()).expect(69);
    let words = "(alarm CORRUPT): replace the damaged one";
    assert!(out.stderr.contains(words), "{out:?}");
    alarm("DEACTIVATE");
    is_sound(&server.url());

    for user in ["root", "weak"] {
        let json = format!(r#"{{"name": "{user}", "password": "p"}}"#);
        call("auth/user/add", &json);
    }
    call("auth/role/add", r#"{"name": "root"}"#);
    call("auth/user/grant", r#"{"user": "root", "role": "root"}"#);
    call("auth/enable", "{}");
    let url = |user: &str| server.url().replace("//", &format!("//{user}:p@"));
    is_sound(&url("root"));
    finds(&url("weak"), VOID, &["grant its role readwrite"]);
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
fn an_even_ensemble_of_zookeeper_is_found() {
    let two = ZooKeeperEnsemble::of(2, &session::long_sessions()).unwrap();
    finds(&two.url(), WARNING, &["the ensemble has 2 voting members"]);
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
fn a_right_that_is_missing_in_zookeeper_is_found() {
    let url = |user: &str| {
        let url = format!("{}/theirs?dlock.acl=creator", session::url());
        url.replace("zk://", &format!("zk://{user}:secret@"))
    };
    // An empty root is removed after a while.
    let desk = Desk::new();
    let text = format!("echo in >'{}'; exec sleep 600", desk.text("in"));
    let _holder = start(at(&url("me"), &["exec", "held", "-c", &text]));
    desk.line("in");
    finds(&url("you"), VOID, &["the user lacks a right on a node"]);
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
