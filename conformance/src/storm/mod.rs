//! A storm: workers that compete for a few names, an attack on them and on their store, and a verdict.

mod judge;
mod log;
mod plan;
mod work;

use clap::{Args, ValueEnum};
use dlock::{Client, ErrorKind, Lock};
use dlock_conformance::testbed::{
    EtcdServer, Kind, ManagedServer, MariadbServer, MongoServer, PostgresServer, Proxy,
    RedisServer, Running, ZooKeeperServer,
    mariadb::MariadbOptions,
    mongo::Deployment,
    proxy::Reach,
    redis::{Aof, RedisOptions},
    worker::Worker,
    zookeeper::ZooKeeperOptions,
};
use judge::{Kind as Found, Verdict, judge};
use plan::{Attack, plan};
use std::{
    collections::BTreeMap, error::Error, fs, net::SocketAddr, path::PathBuf, time::Duration,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub(crate) use work::work;

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// The options of a storm: store, duration and seed.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The URL of a running store: its server and its network are left alone.
    #[arg(long, required_unless_present = "store")]
    url: Option<String>,
    /// The kind of a store to start: its server is killed, stopped, restarted and cut off as well.
    #[arg(long, conflicts_with = "url")]
    store: Option<Store>,
    /// How long the attack lasts; cleaning up and the last check come on top.
    #[arg(long = "for", default_value = "2m", value_parser = humantime::parse_duration, value_name = "TIME")]
    span: Duration,
    /// The seed: the same number gives the same plan. Without it, a random one is used and printed.
    #[arg(long)]
    seed: Option<u64>,
    /// How many processes contend.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(2..))]
    workers: u8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Store {
    Redis,
    Sqlite,
    Mysql,
    Postgres,
    Mongo,
    Etcd,
    Zk,
}

/// Runs a storm to its end; returns whether there was no finding.
pub(crate) async fn run(options: Options) -> Result<bool> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let folder = tempfile::Builder::new().prefix("dlock-storm-").tempdir()?;
    let target = Target::of(&options, &folder).await?;
    let workers = usize::from(options.workers);
    println!(
        "storm for {:?}, seed {seed}, {workers} processes",
        options.span
    );
    let mut storm = Storm::begin(target, seed, workers, folder)?;
    storm
        .attack(plan(
            seed,
            options.span,
            workers,
            storm.target.server.is_some(),
        ))
        .await?;
    let mut verdict = storm.end().await?;
    storm.look_for_leftovers(&mut verdict).await?;
    Ok(storm.tell(&verdict))
}

struct Storm {
    target: Target,
    seed: u64,
    /// The prefix of all names of this storm, so that several can share a store.
    run: String,
    workers: Vec<Worker>,
    /// How many processes were started.
    started: u64,
    attacks: BTreeMap<&'static str, usize>,
    /// How workers ended that were not killed.
    ends: Vec<String>,
    folder: TempDir,
}

impl Storm {
    fn begin(target: Target, seed: u64, workers: usize, folder: TempDir) -> Result<Self> {
        fs::create_dir(folder.path().join(LOGS))?;
        fs::create_dir(folder.path().join(PASSES))?;
        let mut storm = Self {
            target,
            seed,
            run: format!("{seed:x}.{:x}", std::process::id()),
            workers: Vec::new(),
            started: 0,
            attacks: BTreeMap::new(),
            ends: Vec::new(),
            folder,
        };
        for _ in 0..workers {
            let worker = storm.start()?;
            storm.workers.push(worker);
        }
        Ok(storm)
    }

    fn start(&mut self) -> Result<Worker> {
        let number = self.started;
        self.started += 1;
        let seed = self.seed.wrapping_add(number) % u64::from(u32::MAX);
        let text = |path: PathBuf| {
            path.into_os_string()
                .into_string()
                .map_err(|_| "a path is no text")
        };
        let log = self.folder.path().join(LOGS).join(number.to_string());
        Ok(Worker::spawn(
            "storm",
            &[
                ("url", &self.target.through),
                ("run", &self.run),
                ("seed", &seed.to_string()),
                ("log", &text(log)?),
                ("passes", &text(self.folder.path().join(PASSES))?),
            ],
        )?)
    }

    async fn attack(&mut self, plan: Vec<(Duration, Attack)>) -> Result {
        let began = Instant::now();
        for (at, attack) in plan {
            sleep_until(began + at).await;
            if let Some(word) = self.strike(attack).await? {
                *self.attacks.entry(word).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Executes the attack, and returns its kind if it is to be counted.
    async fn strike(&mut self, attack: Attack) -> Result<Option<&'static str>> {
        let target = &self.target;
        Ok(match (attack, &target.server) {
            (Attack::KillWorker(at), _) => {
                let status = self.workers[at].kill_9().await?;
                if status.code().is_some() {
                    self.ends.push(format!("a worker had ended with {status}"));
                }
                self.workers[at] = self.start()?;
                Some("workers killed")
            }
            (Attack::StopWorker(at), _) => {
                self.workers[at].stop()?;
                Some("workers stopped")
            }
            (Attack::ContinueWorker(at), _) => {
                self.workers[at].cont()?;
                None
            }
            (_, None) => None,
            (Attack::KillServer, Some(server)) => {
                server.managed()?.kill()?;
                Some("server killed")
            }
            (Attack::StartServer, Some(server)) => {
                let managed = server.managed()?;
                tokio::task::block_in_place(|| managed.restart())?;
                None
            }
            (Attack::StopServer, Some(server)) => {
                server.managed()?.stop()?;
                Some("server stopped")
            }
            (Attack::ContinueServer, Some(server)) => {
                server.managed()?.cont()?;
                None
            }
            (Attack::Cut, Some(server)) => {
                server.proxy.cut();
                Some("connections cut")
            }
            (Attack::Silence, Some(server)) => {
                server.proxy.blackhole(Reach::All, true);
                Some("network silent")
            }
            (Attack::EndSilence, Some(server)) => {
                server.proxy.blackhole(Reach::All, false);
                None
            }
        })
    }

    /// Lets all workers end, and judges their logs.
    async fn end(&mut self) -> Result<Verdict> {
        let mut words = std::mem::take(&mut self.ends);
        for mut worker in self.workers.drain(..) {
            worker.cont()?;
            worker.close();
            match timeout(END, worker.wait()).await.map(Result::ok) {
                Ok(Some(status)) if status.success() => {}
                Ok(status) => words.push(format!("a worker failed: {status:?}")),
                Err(_) => words.push(format!("a worker did not end within {END:?}")),
            }
        }
        let mut logs = Vec::new();
        for entry in fs::read_dir(self.folder.path().join(LOGS))? {
            logs.push(fs::read_to_string(entry?.path())?);
        }
        let mut verdict = judge(&logs)?;
        for words in words {
            verdict.find(Found::Worker, words);
        }
        Ok(verdict)
    }

    /// When all leases are over, every name must be available, and free afterwards.
    async fn look_for_leftovers(&self, verdict: &mut Verdict) -> Result {
        let client = dlock::connect(&self.target.direct).await?;
        let locks = (0..work::NAMES).map(|number| client.lock(work::name(&self.run, number)));
        let locks = locks.collect::<Result<Vec<_>, _>>()?;
        let longest = locks[0]
            .effective_lease()?
            .length()
            .clamp(work::LEASE, LONGEST_SESSION);
        sleep(longest + client.capabilities().late).await;
        for lock in locks {
            if let Some(words) = leftover(&client, &lock, longest).await? {
                verdict.find(Found::Leftover, words);
            }
        }
        drop(client.shutdown(END).await);
        Ok(())
    }

    /// Prints counts, findings and the verdict; on a finding the logs are kept.
    fn tell(self, verdict: &Verdict) -> bool {
        let Verdict {
            findings,
            grants,
            joins,
            ends,
            failures,
        } = verdict;
        println!(
            "{grants} grants, {joins} of them by a pass, {} processes",
            self.started
        );
        println!("holds ended: {}", counts(ends));
        println!("acquires without a lock: {}", counts(failures));
        println!("attacks: {}", counts(&self.attacks));
        for finding in findings.iter().take(FINDINGS_SHOWN) {
            println!("FINDING {finding}");
        }
        if findings.is_empty() {
            println!("no finding");
        } else {
            let logs = self.folder.keep().join(LOGS);
            println!(
                "{} findings, seed {}; the logs are in {}",
                findings.len(),
                self.seed,
                logs.display()
            );
        }
        findings.is_empty()
    }
}

/// Why this name is not free when no client uses it any more.
async fn leftover(client: &Client, lock: &Lock, longest: Duration) -> Result<Option<String>> {
    let name = lock.name();
    match timeout(END, acquired(lock, longest)).await {
        // A dead client that was first in the queue may cost the time reserved for its turn.
        Ok(Err(error)) if matches!(error.kind(), ErrorKind::Timeout { .. }) => {
            let seen = client.admin().inspect(name.as_str()).await?;
            return Ok(Some(format!("{name} cannot be acquired: {seen:?}")));
        }
        Ok(done) => done?,
        Err(_) => return Ok(Some(format!("{name} was not acquired within {END:?}"))),
    }
    let seen = client.admin().inspect(name.as_str()).await?;
    Ok((!seen.holders.is_empty()).then(|| format!("{name} is held: {seen:?}")))
}

async fn acquired(lock: &Lock, limit: Duration) -> Result<(), dlock::Error> {
    loop {
        match lock.acquire_timeout(limit).await {
            Ok(guard) => return guard.release().await.map(drop),
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                sleep(Duration::from_millis(100)).await
            }
            Err(error) => return Err(error),
        }
    }
}

fn counts<W: std::fmt::Display>(of: &BTreeMap<W, usize>) -> String {
    let words: Vec<_> = of
        .iter()
        .map(|(word, count)| format!("{count} {word}"))
        .collect();
    words.join(", ")
}

/// The store of a storm.
struct Target {
    /// The URL that the workers use.
    through: String,
    direct: String,
    server: Option<Server>,
}

/// A server that the storm started, and the network in front of it.
struct Server {
    running: Box<dyn Ours>,
    proxy: Proxy,
}

impl Server {
    fn managed(&self) -> Result<&dyn ManagedServer> {
        self.running
            .managed()
            .ok_or_else(|| "the server is not ours".into())
    }
}

trait Ours: Send + Sync {
    fn managed(&self) -> Option<&dyn ManagedServer>;
    fn addr(&self) -> SocketAddr;
    fn url_at(&self, addr: SocketAddr) -> String;
}

impl<K: Kind> Ours for Running<K> {
    fn managed(&self) -> Option<&dyn ManagedServer> {
        self.managed()
    }

    fn addr(&self) -> SocketAddr {
        self.addr()
    }

    fn url_at(&self, addr: SocketAddr) -> String {
        self.url_at(addr)
    }
}

impl Target {
    async fn of(options: &Options, folder: &TempDir) -> Result<Self> {
        let Some(store) = options.store else {
            let url = options.url.clone().ok_or("neither a URL nor a store")?;
            if url.starts_with("memory:") {
                return Err(
                    "a memory store lives in one process, and the storm's workers are several"
                        .into(),
                );
            }
            return Ok(Self::at(url));
        };
        let running: Box<dyn Ours> = match store {
            Store::Sqlite => {
                let file = folder.path().join("locks.db");
                return Ok(Self::at(format!("sqlite:{}", file.display())));
            }
            // Each of these keeps every answered change when its process is killed.
            Store::Redis => Box::new(RedisServer::start(RedisOptions {
                aof: Aof::Always,
                ..RedisOptions::default()
            })?),
            Store::Mysql => Box::new(MariadbServer::start(MariadbOptions::default())?),
            Store::Postgres => Box::new(PostgresServer::start(&[])?),
            Store::Mongo => Box::new(MongoServer::start(Deployment::ReplicaSet)?),
            Store::Etcd => Box::new(EtcdServer::start(&[])?),
            Store::Zk => Box::new(ZooKeeperServer::start(ZooKeeperOptions::default())?),
        };
        let proxy = Proxy::start(running.addr()).await?;
        let url = |addr| match store {
            Store::Zk => format!(
                "{}/storm?dlock.session={:?}",
                running.url_at(addr),
                work::LEASE
            ),
            _ => running.url_at(addr),
        };
        Ok(Self {
            through: url(proxy.addr()),
            direct: url(running.addr()),
            server: Some(Server { running, proxy }),
        })
    }

    fn at(url: String) -> Self {
        Self {
            through: url.clone(),
            direct: url,
            server: None,
        }
    }
}

const LOGS: &str = "logs";
const PASSES: &str = "passes";
/// Far longer than any call takes: only a hang reaches it.
const END: Duration = Duration::from_secs(60);
/// The longest wait for a store whose leases are sessions.
const LONGEST_SESSION: Duration = Duration::from_secs(40);
const FINDINGS_SHOWN: usize = 20;
