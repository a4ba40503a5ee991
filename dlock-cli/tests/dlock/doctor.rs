//! `dlock doctor` over each store: sound servers, and each setting that voids a lock in turn.

use crate::bed::{Desk, Out, at, dlock, run};
use crate::session;
use dlock_conformance::testbed::{
    EtcdServer, MariadbServer, MongoServer, PostgresServer, RedisServer, ZooKeeperServer,
    mariadb::MariadbOptions,
    mongo::Deployment,
    redis::{Aof, RedisOptions},
    zookeeper::ZooKeeperOptions,
};
use std::{fs, os::unix::fs::PermissionsExt};

/// A lease with which a step may take a while on a loaded machine.
const LEASE: &str = "10m";

#[track_caller]
fn is_sound(url: &str) {
    let out = doctor(url).expect(0);
    assert!(out.stdout.contains("ok       a step took up to"), "{out:?}");
    // The settings of the store, not the trial alone.
    assert!(out.stdout.lines().count() > 1, "{out:?}");
    assert_eq!(out.stderr, "");
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

#[test]
fn redis_settings_are_found() {
    let server = RedisServer::start(RedisOptions {
        aof: Aof::EverySec,
        ..RedisOptions::default()
    });
    let server = server.unwrap();
    let set = |key: &str, value: &str| {
        server.command(&["CONFIG", "SET", key, value]).unwrap();
    };
    is_sound(&server.url());
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
    crate::bed::until("the replica to follow", || {
        let info = server.command(&["INFO"]).unwrap();
        info.text().unwrap().contains("connected_slaves:1")
    });
    finds(&server.url(), WARNING, &["1 replicas", "append-only"]);
    set("min-replicas-to-write", "1");
    crate::bed::until("the replica to count", || {
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
    let server = RedisServer::start(RedisOptions {
        aof: Aof::EverySec,
        ..RedisOptions::default()
    });
    let server = server.unwrap();
    let user = [
        "ACL",
        "SETUSER",
        "weak",
        "on",
        ">p",
        "allkeys",
        "allchannels",
        "+@all",
        "-pexpire",
        "-del",
        "-hset",
    ];
    server.command(&user).unwrap();
    let url = server.url().replace("redis://", "redis://weak:p@");
    finds(&url, VOID, &["taking a lock fails"]);
}

#[test]
fn mysql_settings_are_found() {
    let start = |args: &[&str]| {
        let extra_args = args.iter().map(|&arg| arg.to_owned()).collect();
        MariadbServer::start(MariadbOptions { extra_args }).unwrap()
    };
    // The test bed spares its disk this.
    is_sound(&start(&["--innodb-doublewrite=1"]).url());
    let weak = start(&[
        "--innodb-flush-log-at-trx-commit=2",
        "--log-bin",
        "--sync-binlog=0",
        "--innodb-doublewrite=0",
    ]);
    let words = [
        "innodb_flush_log_at_trx_commit is 2",
        "sync_binlog",
        "innodb_doublewrite",
    ];
    finds(&weak.url(), WARNING, &words);
    let desk = Desk::new();
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
    let on = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];
    is_sound(&PostgresServer::start(&on).unwrap().url());
    let weak = [
        "fsync=off",
        "full_page_writes=off",
        "synchronous_commit=off",
    ];
    let words = [
        "fsync is off",
        "full_page_writes is off",
        "synchronous_commit is off",
    ];
    finds(
        &PostgresServer::start(&weak).unwrap().url(),
        WARNING,
        &words,
    );
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
