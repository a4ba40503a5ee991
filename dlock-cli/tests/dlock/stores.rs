//! The same commands over every store that has a server.

use crate::bed::{DLOCK, Desk, Out, Running, at, is_alive, name, run, server, start, until};
use crate::session;
use dlock_conformance::testbed::{
    EtcdServer, MariadbServer, MongoServer, PostgresServer, RedisServer, mariadb::MariadbOptions,
    mongo::Deployment, redis::RedisOptions,
};
use nix::sys::signal::Signal;
use std::fs;

/// One backend: the tests below are the same for all of them.
struct Store {
    backend: &'static str,
    url: String,
    /// Whether a hold outlives the `dlock` that took it.
    outlives: bool,
}

#[test]
fn redis() {
    over(&Store {
        backend: "redis",
        url: server().url(),
        outlives: true,
    });
}

#[test]
#[cfg_attr(
    not(feature = "mongo"),
    ignore = "this dlock is built without the feature mongo"
)]
fn mongodb() {
    let server = MongoServer::start(Deployment::ReplicaSet).unwrap();
    over(&Store {
        backend: "mongo",
        url: server.url(),
        outlives: true,
    });
}

#[test]
fn mysql() {
    let server = MariadbServer::start(MariadbOptions::default()).unwrap();
    over(&Store {
        backend: "mysql",
        url: server.url(),
        outlives: true,
    });
}

#[test]
#[cfg_attr(
    not(feature = "postgres"),
    ignore = "this dlock is built without the feature postgres"
)]
fn postgres() {
    let server = PostgresServer::start(&[]).unwrap();
    over(&Store {
        backend: "postgres",
        url: server.url(),
        outlives: true,
    });
}

#[test]
#[cfg_attr(
    not(feature = "etcd"),
    ignore = "this dlock is built without the feature etcd"
)]
fn etcd() {
    let server = EtcdServer::start(&[]).unwrap();
    let store = Store {
        backend: "etcd",
        url: server.url(),
        outlives: true,
    };
    over(&store);
    // The store counts leases in seconds.
    let hold = "7d444840-9dc0-41d1-b245-5ffdce74fad2/00000000000000ff";
    for args in [
        &["exec", "short", "--", "true"][..],
        &["lead", "short", "--", "true"],
        &["acquire", "short"],
        &["renew", "short", hold],
        &["doctor"],
    ] {
        let (command, rest) = args.split_first().unwrap();
        let args = [&[*command, "--lease", "500ms"][..], rest].concat();
        let out = store.run(&args).expect(64);
        let told = format!("{}{}", out.stdout, out.stderr);
        assert!(told.contains("--lease (500ms) must be between"), "{told}");
    }
    for setting in ["dlock.lease", "dlock.presence"] {
        let url = format!("{}?{setting}=500ms", store.url);
        let out = run(at(&url, &["exec", "short", "--", "true"])).expect(64);
        let words = format!("{setting} (500ms) must be between");
        assert!(out.stderr.contains(&words), "{out:?}");
    }
}

#[test]
fn zookeeper() {
    over(&Store {
        backend: "zk",
        url: session::url(),
        outlives: false,
    });
}

#[test]
fn quorum() {
    let servers = [(); 3].map(|()| RedisServer::start(RedisOptions::default()).unwrap());
    let urls = servers.each_ref().map(|server| server.url());
    let store = Store {
        backend: "quorum",
        url: format!("quorum:{}", urls.join(" ")),
        outlives: true,
    };
    over(&store);
    a_release_reaches_a_store_that_answers_late(&store, &servers[0]);
    // The lease is one with which a step may take a while on a loaded machine.
    let found = store.run(&["doctor", "--lease", "10m"]).expect(1);
    let shared = "3 of 3 stores are on the host 127.0.0.1";
    for words in urls.iter().map(String::as_str).chain([shared]) {
        assert!(found.stdout.contains(words), "{words}: {found:?}");
    }
}

/// The others answer at once, and dlock does not wait for this one to report the release. A dlock that does not close its
/// client ends long before this store goes on; one that does waits a second at most, so a machine that stands still for that
/// long has another trial.
fn a_release_reaches_a_store_that_answers_late(store: &Store, late: &RedisServer) {
    let reaches = || {
        let (lock, desk) = (name("late"), Desk::new());
        let (holder, ..) = store.holding(&desk, &lock);
        late.command(&["CLIENT", "PAUSE", "300", "ALL"]).unwrap();
        fs::write(desk.path("go"), "").unwrap();
        holder.wait().expect(0);
        let next = run(at(&late.url(), &["exec", "-n", &lock, "--", "true"]));
        next.code() == 0
    };
    assert!((0..5).any(|_| reaches()), "the release did not reach it");
}

fn over(store: &Store) {
    exec_shuts_others_out_and_hands_over(store);
    a_break_ends_the_command(store);
    another_leads_when_dlock_is_killed(store);
    a_command_runs_under_several_locks(store);
    if store.outlives {
        a_hold_passes_from_one_dlock_to_the_next(store);
    }
}

fn exec_shuts_others_out_and_hands_over(store: &Store) {
    let (lock, desk) = (name("handed"), Desk::new());
    let (holder, token, _) = store.holding(&desk, &lock);
    store.run(&["exec", "-n", &lock, "--", "true"]).expect(1);
    let out = store.run(&["exec", "-w", "2", &lock, "--", "true"]);
    let words = format!("(process {} on ", holder.pid());
    assert!(out.expect(1).stderr.contains(&words), "{words}");

    for words in [["inspect", &lock], ["list", &lock]] {
        let seen = store.run(&["--json", words[0], words[1]]).expect(0).json();
        assert_eq!(seen["name"], lock.as_str(), "{seen}");
        assert_eq!(seen["backend"], store.backend, "{seen}");
        assert_eq!(seen["held"], true, "{seen}");
        assert_eq!(seen["holds"], 1, "{seen}");
        assert_eq!(seen["token"], token.to_string(), "{seen}");
        assert_eq!(seen["metadata"]["pid"], holder.pid().as_raw(), "{seen}");
    }

    let waiter = start(at(&store.url, &["exec", &lock, "-c", "echo $DLOCK_TOKEN"]));
    waiter.listens();
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(holder.wait().expect(0).stdout, "done\n");
    let out = waiter.wait().expect(0);
    assert!(out.stdout.trim().parse::<u64>().unwrap() > token, "{out:?}");
    store.is_free(&lock);
}

fn a_break_ends_the_command(store: &Store) {
    let (lock, desk) = (name("broken"), Desk::new());
    let (holder, token, pid) = store.holding(&desk, &lock);
    let another = (token + 1).to_string();
    store.run(&["break", &lock, "--token", &another]).expect(77);
    assert!(is_alive(&pid));
    let token = token.to_string();
    let out = store.run(&["break", &lock, "--token", &token]).expect(0);
    assert!(out.stdout.contains(&token), "{out:?}");
    let out = holder.wait().expect(75);
    assert!(out.stdout.is_empty(), "{out:?}");
    assert!(out.stderr.contains("is lost"), "{out:?}");
    assert!(!is_alive(&pid));
    store.is_free(&lock);
}

fn another_leads_when_dlock_is_killed(store: &Store) {
    let (lock, desk) = (name("led"), Desk::new());
    let text = format!(
        "echo $DLOCK_TOKEN $PPID >>'{}'; while :; do sleep 0.02; done",
        desk.text("terms")
    );
    let lead = || {
        start(at(
            &store.url,
            &["lead", "--lease", LEASE, &lock, "-c", &text],
        ))
    };
    let terms = |count| {
        let read = || fs::read_to_string(desk.path("terms")).unwrap_or_default();
        until("the next term", || read().matches('\n').count() >= count);
        let words: Vec<u64> = read()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        (words[count * 2 - 2], words[count * 2 - 1])
    };
    let mut candidates = vec![lead(), lead()];
    let (mut token, mut leader) = terms(1);
    for term in 2..=3 {
        let at = |running: &Running| u64::try_from(running.pid().as_raw()).unwrap() == leader;
        let killed = candidates.remove(candidates.iter().position(at).unwrap());
        killed.signal(Signal::SIGKILL);
        killed.wait().expect(137);
        candidates.push(lead());
        let next = terms(term);
        assert!(next.0 > token && next.1 != leader, "{next:?}");
        (token, leader) = next;
    }
    for candidate in candidates {
        candidate.listens();
        candidate.signal(Signal::SIGTERM);
        candidate.wait().expect(143);
    }
    store.is_free(&lock);
}

fn a_command_runs_under_several_locks(store: &Store) {
    let [a, b] = [(); 2].map(|()| name("both"));
    let inner = format!("'{DLOCK}' exec -n '{b}' -- true; echo $? $DLOCK_TOKENS");
    let both = [
        "-q",
        "exec",
        "--pass-url",
        "--no-pass",
        "--also",
        &b,
        &a,
        "-c",
        &inner,
    ];
    let out = store.run(&both).expect(0);
    let words: Vec<_> = out.stdout.split_whitespace().collect();
    assert_eq!(words[0], "1", "{out:?}");
    for (lock, word) in [&a, &b].into_iter().zip(&words[1..]) {
        assert!(word.starts_with(&format!("{lock}=")), "{out:?}");
        store.is_free(lock);
    }
}

fn a_hold_passes_from_one_dlock_to_the_next(store: &Store) {
    let lock = name("passed");
    let taken = store.run(&["acquire", &lock]).expect(0).stdout;
    let hold = taken.trim();
    store.run(&["acquire", "-n", &lock]).expect(1);
    store
        .run(&["renew", "--lease", "10m", &lock, hold])
        .expect(0);
    let seen = store.run(&["--json", "inspect", &lock]).expect(0).json();
    assert!(seen["remaining_ms"].as_u64() > Some(500_000), "{seen}");
    store.run(&["release", &lock, hold]).expect(0);
    store.run(&["release", &lock, hold]).expect(77);
    store.is_free(&lock);
}

impl Store {
    /// Runs `dlock` with these arguments to its end.
    fn run(&self, args: &[&str]) -> Out {
        run(at(&self.url, args))
    }

    /// Fails unless no owner holds the lock, and it can be acquired.
    #[track_caller]
    fn is_free(&self, lock: &str) {
        let seen = self.run(&["--json", "inspect", lock]).expect(0).json();
        assert_eq!(seen["held"], false, "{seen}");
        self.run(&["exec", "-n", lock, "--", "true"]).expect(0);
    }

    /// A command that runs under the lock until the file `go` is there, the token it was told, and its process id.
    fn holding(&self, desk: &Desk, lock: &str) -> (Running, u64, String) {
        let text = format!(
            "echo $DLOCK_BACKEND $DLOCK_NAME $DLOCK_TOKEN $$ >'{}'; while [ ! -e '{}' ]; do sleep 0.02; done; echo done",
            desk.text("told"),
            desk.text("go")
        );
        let lease = ["exec", "--lease", LEASE, lock, "-c", &text];
        let running = start(at(&self.url, &lease));
        let told = desk.line("told");
        let told: Vec<_> = told.split(' ').collect();
        assert_eq!(told[..2], [self.backend, lock]);
        (running, told[2].parse().unwrap(), told[3].to_owned())
    }
}

/// A lease that a loaded machine can renew, and whose loss is seen soon.
const LEASE: &str = "6s";
