//! The contestants, and how the programs that run them are built: adapters from `bench/peers`, with their
//! libraries from package registries.

use crate::Result;
use dlock_conformance::testbed::worker::Worker;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// A lock library over one store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contestant {
    pub(super) store: &'static str,
    pub(super) name: &'static str,
    pub(super) with: With,
    /// What dlock has and it has not.
    pub(super) lacks: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum With {
    /// A job of this program.
    Rust,
    Adapter(&'static Adapter),
    /// Named in the report, with the reason.
    Not(&'static str),
}

/// A program in another language.
#[derive(Debug)]
pub(super) struct Adapter {
    /// Its folder in `bench/peers`.
    pub(super) folder: &'static str,
    build: &'static [&'static [&'static str]],
    run: &'static [&'static str],
    /// How long it works before it is measured: a compiler at run time needs that.
    pub(super) warm_up: Duration,
}

const fn peer(
    store: &'static str,
    name: &'static str,
    with: With,
    lacks: &'static str,
) -> Contestant {
    Contestant {
        store,
        name,
        with,
        lacks,
    }
}

pub(super) const DLOCK: &str = "dlock";
const JAVA: With = With::Adapter(&Adapter {
    folder: "java",
    build: &[
        &[
            "mvn",
            "-q",
            "-B",
            "dependency:copy-dependencies",
            "-DoutputDirectory=lib",
        ],
        &[
            "javac",
            "-nowarn",
            "-cp",
            "lib/*",
            "-d",
            "classes",
            "Peer.java",
        ],
    ],
    run: &["java", "-Xms256m", "-Xmx2g", "-cp", "classes:lib/*", "Peer"],
    warm_up: Duration::from_secs(3),
});
const GO: With = With::Adapter(&Adapter {
    folder: "go",
    build: &[&["go", "build", "-o", "peer", "."]],
    run: &["./peer"],
    warm_up: Duration::from_millis(300),
});
const PYTHON: With = With::Adapter(&Adapter {
    folder: "python",
    build: &[&[
        "python3",
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        "lib",
        "-r",
        "requirements.txt",
    ]],
    run: &["python3", "peer.py"],
    warm_up: Duration::from_millis(300),
});
const NODE: With = With::Adapter(&Adapter {
    folder: "node",
    build: &[&[
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
    ]],
    run: &["node", "peer.js"],
    warm_up: Duration::from_secs(1),
});
const RSLOCK: With = if cfg!(feature = "peers") {
    With::Rust
} else {
    With::Not("build with `--features peers`, which compiles rustls")
};

const OLD: With = With::Not(
    "its sqlx 0.8 would make this workspace build an older SQLite; on PostgreSQL it has the advisory locks of PgAdvisoryLock",
);

/// dlock first, so that it has the same colour everywhere.
pub(super) const CONTESTANTS: &[Contestant] = &[
    peer("redis", DLOCK, With::Rust, ""),
    peer("redis", "rslock", RSLOCK, "queue, token, renewal, re-entry"),
    peer("redis", "redislock", GO, "queue, token, renewal, re-entry"),
    peer("redis", "redsync", GO, "queue, token, renewal, re-entry"),
    peer(
        "redis",
        "redsync (10 ms)",
        GO,
        "queue, token, renewal, re-entry; asks every 10 ms instead of 50 to 250",
    ),
    peer("redis", "Redisson RLock", JAVA, "queue, token"),
    peer("redis", "Redisson RFairLock", JAVA, "token"),
    peer("redis", "Redisson RFencedLock", JAVA, "queue"),
    peer(
        "redis",
        "redis-py",
        PYTHON,
        "queue, token, renewal, re-entry",
    ),
    peer(
        "redis",
        "node-redlock",
        NODE,
        "queue, token, renewal, re-entry",
    ),
    peer("redis", "distributed-lock", OLD, ""),
    peer("zk", DLOCK, With::Rust, ""),
    peer(
        "zk",
        "zookeeper-client",
        With::Rust,
        "re-entry, sharing, notice of a loss",
    ),
    peer(
        "zk",
        "Curator",
        JAVA,
        "a token of its own, notice of a loss at the guard",
    ),
    peer("etcd", DLOCK, With::Rust, ""),
    peer(
        "etcd",
        "etcd lock API",
        With::Rust,
        "re-entry, sharing, notice of a loss",
    ),
    peer("postgres", DLOCK, With::Rust, ""),
    peer(
        "postgres",
        "ShedLock on PostgreSQL",
        JAVA,
        "waiting, token, renewal, re-entry",
    ),
    peer(
        "postgres",
        "PgAdvisoryLock",
        With::Rust,
        "lease, token, record of the holder, survival of a failover",
    ),
    peer("postgres", "distributed-lock", OLD, ""),
    peer("mysql", DLOCK, With::Rust, ""),
    peer(
        "mysql",
        "ShedLock on MariaDB",
        JAVA,
        "waiting, token, renewal, re-entry",
    ),
    peer("mysql", "distributed-lock", OLD, ""),
    peer("mongodb", DLOCK, With::Rust, ""),
    peer(
        "mongodb",
        "ShedLock on MongoDB",
        JAVA,
        "waiting, token, renewal, re-entry; releases by name alone",
    ),
    peer("sqlite", DLOCK, With::Rust, ""),
];

/// A contestant at work.
#[derive(Debug)]
pub(super) struct Process {
    worker: Worker,
    /// Library and language.
    pub(super) version: String,
}

impl Process {
    /// Starts it; its locks get this lease.
    pub(super) async fn start(one: &Contestant, url: &str, lease: Duration) -> Result<Self> {
        let lease = lease.as_millis().to_string();
        let worker = match one.with {
            With::Rust => {
                let arguments = [("kind", one.name), ("url", url), ("lease", &lease)];
                Worker::spawn(super::JOB, &arguments)?
            }
            With::Adapter(adapter) => {
                let folder = adapter.place()?;
                let mut command = Command::new(adapter.run[0]);
                command
                    .args(&adapter.run[1..])
                    .args([one.name, url, &lease]);
                command.env("PYTHONPATH", "lib").current_dir(folder);
                Worker::run(one.name, &command)?
            }
            With::Not(reason) => return Err(reason.into()),
        };
        let mut process = Self {
            worker,
            version: String::new(),
        };
        let ready = process.answer(PATIENCE).await?;
        process.version = ready["ready"].as_str().unwrap_or_default().to_owned();
        Ok(process)
    }

    pub(super) async fn tell(&mut self, command: &str) -> Result {
        Ok(self.worker.send(command).await?)
    }

    pub(super) async fn answer(&mut self, limit: Duration) -> Result<Value> {
        let line = self.worker.expect("= ", limit).await?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer["error"].as_str() {
            Some(error) => Err(error.into()),
            None => Ok(answer),
        }
    }

    pub(super) async fn ask(&mut self, command: &str, span: Duration) -> Result<Value> {
        self.tell(command).await?;
        self.answer(span + PATIENCE).await
    }

    pub(super) fn pid(&self) -> u32 {
        self.worker.pid().unwrap_or_default()
    }

    pub(super) async fn kill(&mut self) -> Result {
        self.worker.kill_9().await?;
        Ok(())
    }
}

impl Adapter {
    /// Where it is built: beside this program, so that a checkout stays clean.
    fn place(&self) -> io::Result<PathBuf> {
        let program = std::env::current_exe()?;
        let beside = program.parent().unwrap_or(Path::new("."));
        Ok(beside.join("peers").join(self.folder))
    }

    /// Builds it, unless that was done from the same sources.
    pub(super) fn build(&self) -> Result {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("peers")
            .join(self.folder);
        let place = self.place()?;
        fs::create_dir_all(&place)?;
        // Another run may build it at the same time.
        let lock = fs::File::create(place.join(".lock"))?;
        lock.lock()?;
        let mut all = String::new();
        let files: io::Result<BTreeSet<PathBuf>> = fs::read_dir(&sources)?
            .map(|file| Ok(file?.path()))
            .collect();
        for file in files? {
            let text = fs::read_to_string(&file)?;
            fs::write(place.join(file.file_name().unwrap_or_default()), &text)?;
            all += &text;
        }
        let built = place.join(".built");
        if fs::read_to_string(&built).is_ok_and(|of| of == all) {
            return Ok(());
        }
        for step in self.build {
            let mut command = Command::new(step[0]);
            let output = command.args(&step[1..]).current_dir(&place).output();
            let output = output.map_err(|error| format!("{} cannot be run: {error}", step[0]))?;
            if !output.status.success() {
                let said = [output.stdout, output.stderr].concat();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().rev().find(|line| !line.trim().is_empty());
                let last = last.unwrap_or("it said nothing");
                return Err(format!("`{}` failed: {last}", step.join(" ")).into());
            }
        }
        Ok(fs::write(built, all)?)
    }
}

/// How long an answer may take beyond the work itself: waiters that poll need it to leave. Longer in a debug build, which
/// tests run beside others.
pub(super) const PATIENCE: Duration =
    Duration::from_secs(if cfg!(debug_assertions) { 300 } else { 60 });
