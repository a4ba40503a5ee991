//! A storm: workers that compete for a few names, an attack on them and on their store, and a verdict.

pub(crate) mod judge;
pub(crate) mod log;
mod plan;
pub(crate) mod target;
mod work;

use crate::Result;
use clap::Args;
use dlock_conformance::testbed::{proxy::Reach, worker::Worker};
use judge::{Kind as Found, LOGS, Verdict, counts, judge_all};
use plan::{Attack, plan};
use std::{collections::BTreeMap, fs, time::Duration};
use target::{END, Place, Target, look_for_leftovers};
use tempfile::TempDir;
use tokio::time::{Instant, sleep_until, timeout};

pub(crate) use work::{LEASE, ending, failed, millis, released, renewed, word, work};

/// The options of a storm: store, duration and seed.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    place: Place,
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

/// Runs a storm to its end; returns whether there was no finding.
pub(crate) async fn run(options: Options) -> Result<bool> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let folder = tempfile::Builder::new().prefix("dlock-storm-").tempdir()?;
    let target = Target::of(options.place, &folder).await?;
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
    let names = (0..work::NAMES).map(|number| work::name(&storm.run, number));
    look_for_leftovers(&storm.target, names, &mut verdict).await?;
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
        let folder = self.folder.path().to_str().ok_or("a path is no text")?;
        Ok(Worker::spawn(
            "storm",
            &[
                ("url", &self.target.through),
                ("run", &self.run),
                ("seed", &seed.to_string()),
                ("log", &format!("{folder}/{LOGS}/{number}")),
                ("passes", &format!("{folder}/{PASSES}")),
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
        let mut verdict = judge_all(self.folder.path())?;
        for words in words {
            verdict.find(Found::Worker, words);
        }
        Ok(verdict)
    }

    /// Prints attacks, counts and findings.
    fn tell(self, verdict: &Verdict) -> bool {
        println!("attacks: {}", counts(&self.attacks));
        let processes = format!("{} processes", self.started);
        verdict.tell(&processes, self.seed, self.folder)
    }
}

const PASSES: &str = "passes";
