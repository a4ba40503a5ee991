//! `compare`: every store and its peers on the same work, as a report that people can look at.

mod case;
mod contestant;
mod difference;
pub(crate) mod failovers;
mod page;
mod peers;
mod plot;
mod results;
mod store;

pub(crate) use contestant::job;

use crate::{
    Result,
    measure::{Quiet, order},
};
use case::{Case, Sample};
use clap::Parser;
use peers::{CONTESTANTS, Contestant, DLOCK, Process, With};
use results::{Results, Row};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};
use store::{STORES, Store};
use tokio::task::JoinSet;

/// Measures dlock over every store, and other lock libraries beside it, on the same work.
///
/// Prints tables, and writes `results.jsonl`, `report.html` and its plots into a folder.
#[derive(Debug, Parser)]
#[command(name = "dlock-bench compare")]
pub(crate) struct Arguments {
    /// Only these stores, by the scheme of their URLs, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = STORES.map(|(scheme, _)| scheme))]
    backends: Vec<String>,
    /// Only these libraries beside dlock, separated by commas; `none`: dlock alone.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// Few and short measurements: at most 10 minutes in all.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// More of them, up to 100,000 held locks and a million names: an hour and a quarter.
    #[arg(long)]
    full: bool,
    /// Only these cases, as `results.jsonl` calls them, separated by commas.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Every case once, with next to no work: the numbers mean nothing.
    #[arg(long, hide = true)]
    smoke: bool,
    /// A server of yours, instead of one that is started here; its scheme says for which store. It gets at
    /// most 128 tasks, 16 waiting clients, 1,000 held locks and 1,000 names, and keeps the records of the locks.
    #[arg(long, value_name = "URL")]
    url: Vec<String>,
    /// The folder for the report.
    #[arg(long, value_name = "DIR", required_unless_present = "diff")]
    out: Option<PathBuf>,
    /// Measures nothing, and makes one report of the results in these folders: of one store each, say.
    #[arg(long, num_args = 1.., value_name = "DIR", conflicts_with_all = ["diff", "url", "backends", "peers"])]
    join: Vec<PathBuf>,
    /// Compares the results of two runs, by their folders: what differs by more than the noise.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["out", "url"])]
    diff: Vec<PathBuf>,
}

/// How much is measured.
#[derive(Debug)]
struct Effort {
    cycle: Duration,
    contend: Duration,
    /// With 64 waiting clients: each should have its turn.
    crowd: Duration,
    repetitions: usize,
    kills: usize,
    keep: &'static [usize],
    /// How long held locks are left alone, and then watched: a third of the lease or more.
    settle: Duration,
    watch: Duration,
    names: &'static [usize],
    /// After that, a contestant uses no more new names.
    names_limit: Duration,
    waiters: usize,
    /// Of the adapters' time to warm up: before the first case, and before each other one.
    warm_up: [f64; 2],
    /// What is not measured by then is left out.
    limit: Option<Duration>,
}

const QUICK: Effort = Effort {
    cycle: Duration::from_millis(200),
    contend: Duration::from_millis(600),
    crowd: Duration::from_millis(1_000),
    repetitions: 2,
    kills: 2,
    keep: &[1_000],
    settle: Duration::from_millis(200),
    watch: Duration::from_secs(4),
    names: &[1_000],
    names_limit: Duration::from_secs(10),
    waiters: 500,
    warm_up: [0.7, 0.07],
    limit: Some(Duration::from_secs(570)),
};
const STANDARD: Effort = Effort {
    cycle: Duration::from_millis(500),
    contend: Duration::from_millis(2_000),
    crowd: Duration::from_millis(6_000),
    repetitions: 3,
    kills: 5,
    keep: &[1_000, 10_000],
    settle: Duration::from_secs(4),
    watch: Duration::from_secs(12),
    names: &[1_000, 10_000],
    names_limit: Duration::from_secs(60),
    waiters: 1_000,
    warm_up: [1.6, 1.0],
    limit: None,
};
const FULL: Effort = Effort {
    keep: &[1_000, 10_000, 100_000],
    names: &[1_000, 10_000, 100_000, 1_000_000],
    ..STANDARD
};
const SMOKE: Effort = Effort {
    cycle: Duration::from_millis(20),
    contend: Duration::from_millis(100),
    crowd: Duration::from_millis(100),
    repetitions: 1,
    kills: 1,
    keep: &[20],
    settle: Duration::ZERO,
    watch: Duration::from_millis(100),
    names: &[100],
    names_limit: Duration::from_secs(10),
    waiters: 5,
    warm_up: [0.0; 2],
    limit: None,
};
/// The lease of every lock, but where a holder is killed.
const LEASE: Duration = Duration::from_secs(12);
/// Why a case was left out.
const TIME_IS_UP: &str = "the time was up; run it alone with --backends and --peers";
/// Seconds of the plan after which its pace is known rather by what was measured.
const PLAN_COUNTS: f64 = 20.0;
/// What holds each lock by a session of its own.
const SESSIONS: &str = "PgAdvisoryLock";
/// The job of this program's own contestants.
pub(crate) const JOB: &str = "compare";

pub(crate) async fn run(arguments: Arguments) -> Result {
    if let [before, after] = &arguments.diff[..] {
        print!(
            "{}",
            difference::between(&Results::read(before)?, &Results::read(after)?)
        );
        return Ok(());
    }
    let out = arguments.out.clone().ok_or("--out is missing")?;
    if !arguments.join.is_empty() {
        let mut joined = Results::default();
        for folder in &arguments.join {
            joined.add(Results::read(folder)?);
        }
        std::fs::create_dir_all(&out)?;
        joined.write(&out)?;
        println!("report: {}", out.join("report.html").display());
        return Ok(());
    }
    let mut comparison = Comparison::new(&arguments)?;
    std::fs::create_dir_all(&out)?;
    let mut results = Results::new(&arguments.mode());
    for (scheme, title) in STORES {
        if !arguments.wants(scheme) {
            continue;
        }
        match comparison.of_store(scheme, &mut results).await {
            Ok(()) => println!("{}", results.tables(scheme, title)),
            Err(error) => {
                eprintln!("{title}: {error}");
                for one in comparison.contestants(scheme) {
                    let missing = Row::missing(scheme, "", one.name, &error.to_string());
                    results.rows.push(missing);
                }
            }
        }
        results.write(&out)?; // also what there is so far
    }
    results.write(&out)?;
    let violations = results.violations();
    println!("report: {}", out.join("report.html").display());
    if violations > 0.0 {
        return Err(
            format!("dlock was held twice, or lost while it was kept: {violations} times").into(),
        );
    }
    match results.failures() {
        failed if failed.is_empty() => Ok(()),
        failed => Err(format!("dlock failed: {}", failed.join("; ")).into()),
    }
}

impl Arguments {
    fn effort(&self) -> &'static Effort {
        match (self.smoke, self.quick, self.full) {
            (true, _, _) => &SMOKE,
            (_, true, _) => &QUICK,
            (_, _, true) => &FULL,
            _ => &STANDARD,
        }
    }

    fn mode(&self) -> String {
        let all = [
            (self.smoke, "smoke"),
            (self.quick, "quick"),
            (self.full, "full"),
        ];
        let mode = all.into_iter().find(|(is_it, _)| *is_it);
        mode.map_or("standard", |(_, name)| name).to_owned()
    }

    /// The user's servers alone, when some are named and no stores are.
    fn wants(&self, scheme: &str) -> bool {
        match &self.backends[..] {
            [] if !self.url.is_empty() => self.url_of(scheme).is_some(),
            [] => true,
            some => some.iter().any(|one| one == scheme),
        }
    }

    fn url_of(&self, scheme: &str) -> Option<&str> {
        let of = |url: &str| {
            let named = url.split(':').next().unwrap_or_default();
            match named {
                "mariadb" => "mysql".to_owned(),
                "postgresql" => "postgres".to_owned(),
                other => other.to_owned(),
            }
        };
        self.url
            .iter()
            .map(String::as_str)
            .find(|url| of(url) == scheme)
    }
}

/// A run under way.
struct Comparison<'a> {
    arguments: &'a Arguments,
    effort: &'static Effort,
    cases: Vec<Case>,
    /// Whether an adapter was built, by its folder in `bench/peers`, or why not.
    built: BTreeMap<&'static str, Result<(), String>>,
    began: Instant,
    /// Seconds that the plan asks for, how many of them are done, and how long those took.
    planned: f64,
    done: f64,
    spent: f64,
}

impl<'a> Comparison<'a> {
    fn new(arguments: &'a Arguments) -> Result<Self> {
        for url in &arguments.url {
            let is_known = STORES
                .iter()
                .any(|(scheme, _)| arguments.url_of(scheme) == Some(url));
            if !is_known {
                return Err(
                    "a --url of a scheme that no store has, or a second one of a store".into(),
                );
            }
        }
        for peer in &arguments.peers {
            if peer != "none" && !CONTESTANTS.iter().any(|one| one.name == peer) {
                let known: BTreeSet<&str> = CONTESTANTS.iter().map(|one| one.name).collect();
                let known = Vec::from_iter(known);
                return Err(format!("no peer {peer:?}; there are: {}", known.join(", ")).into());
            }
        }
        let effort = arguments.effort();
        let cases = chosen(case::all(effort), &arguments.cases)?;
        let mut comparison = Self {
            arguments,
            effort,
            cases,
            built: BTreeMap::new(),
            began: Instant::now(),
            planned: 0.0,
            done: 0.0,
            spent: 0.0,
        };
        for (scheme, _) in STORES {
            if arguments.wants(scheme) {
                let of = |case: &Case| comparison.seconds(scheme, case);
                comparison.planned += comparison.cases(scheme).iter().map(of).sum::<f64>();
            }
        }
        Ok(comparison)
    }

    fn contestants(&self, scheme: &str) -> Vec<&'static Contestant> {
        let peers = &self.arguments.peers;
        let is_wanted = |one: &&Contestant| {
            let is_named = peers.is_empty() || peers.iter().any(|peer| peer == one.name);
            one.store == scheme && (one.name == DLOCK || is_named)
        };
        CONTESTANTS.iter().filter(is_wanted).collect()
    }

    /// A server of the user's gets a bounded load.
    fn cases(&self, scheme: &str) -> Vec<Case> {
        let all = self.cases.iter().cloned();
        match self.arguments.url_of(scheme) {
            None => all.collect(),
            Some(_) => all.filter_map(Case::lightened).collect(),
        }
    }

    /// How long a case takes, about.
    fn seconds(&self, scheme: &str, case: &Case) -> f64 {
        let span = case.span.as_secs_f64();
        if case.is_together() {
            return span * case.repetitions as f64;
        }
        let of = |one: &&Contestant| {
            let warm_up = warm_up(one, self.effort.warm_up[1]).as_secs_f64();
            span * case.repetitions as f64 * 1.2 + warm_up
        };
        self.contestants(scheme).iter().map(of).sum()
    }

    fn is_over(&self) -> bool {
        let limit = self.effort.limit;
        limit.is_some_and(|limit| self.began.elapsed() > limit)
    }

    async fn of_store(&mut self, scheme: &str, results: &mut Results) -> Result {
        if self.is_over() {
            return Err(TIME_IS_UP.into());
        }
        let store = match self.arguments.url_of(scheme) {
            Some(url) => Store::of_the_user(url),
            None => Store::start(scheme).await?,
        };
        results
            .versions
            .insert(scheme.to_owned(), store.version.clone());
        let mut present = Vec::new();
        for one in self.contestants(scheme) {
            match self.start(one, &store).await {
                Ok(process) => {
                    let version = format!("{}/{}", one.store, one.name);
                    results.versions.insert(version, process.version.clone());
                    present.push((one, process));
                }
                Err(error) => {
                    eprintln!("{}: not measured: {error}", one.name);
                    results
                        .rows
                        .push(Row::missing(scheme, "", one.name, &error.to_string()));
                }
            }
        }
        if let Some((_, ours)) = present.iter_mut().find(|(one, _)| one.name == DLOCK) {
            // Some peers ask a server that is not there again and again.
            ours.ask("cycle main 1 1", Duration::ZERO).await?;
        }
        let mut warm = BTreeSet::new();
        for (at, case) in self.cases(scheme).into_iter().enumerate() {
            self.say(scheme, &case);
            let began = Instant::now();
            let rows: Vec<Row> = if self.is_over() {
                let left_out = present
                    .iter()
                    .map(|(one, _)| Row::missing(scheme, &case.name, one.name, TIME_IS_UP));
                left_out.collect()
            } else if case.is_together() {
                recovered(&present, &store, &case).await
            } else {
                let all = &mut present;
                self.measure(all, &store, (at, &case), &mut warm).await
            };
            results.rows.extend(rows);
            self.done += self.seconds(scheme, &case);
            self.spent += began.elapsed().as_secs_f64();
        }
        Ok(())
    }

    async fn start(&mut self, one: &'static Contestant, store: &Store) -> Result<Process> {
        if one.name == SESSIONS && self.arguments.url_of(one.store).is_some() {
            return Err("each of its locks takes a session, too many for a server of yours".into());
        }
        if let With::Adapter(adapter) = one.with {
            if !self.built.contains_key(adapter.folder) {
                eprintln!("building what runs {} ..", one.name);
                let built = tokio::task::spawn_blocking(|| {
                    adapter.build().map_err(|error| error.to_string())
                });
                self.built.insert(adapter.folder, built.await?);
            }
            if let Some(Err(reason)) = self.built.get(adapter.folder) {
                return Err(reason.clone().into());
            }
        }
        Process::start(one, &store.url, LEASE).await
    }

    fn say(&self, scheme: &str, case: &Case) {
        let percent = self.done * 100.0 / self.planned.max(1e-9);
        // What was planned is a guess; the first cases do not say how wrong it is.
        let pace = (self.spent + PLAN_COUNTS) / (self.done + PLAN_COUNTS);
        let mut left = (self.planned - self.done) * pace;
        if let Some(limit) = self.effort.limit {
            left = left.min(limit.saturating_sub(self.began.elapsed()).as_secs_f64());
        }
        let (minutes, seconds) = ((left / 60.0).floor(), left % 60.0);
        eprintln!(
            "{scheme:>9} {:<14} {percent:>3.0} % done, about {minutes:.0} min {seconds:.0} s left",
            case.name
        );
    }

    /// All contestants once a repetition, in another order each time, also from case to case.
    async fn measure(
        &self,
        present: &mut [(&'static Contestant, Process)],
        store: &Store,
        (at, case): (usize, &Case),
        warm: &mut BTreeSet<&'static str>,
    ) -> Vec<Row> {
        let mut samples: Vec<Vec<Sample>> = present.iter().map(|_| Vec::new()).collect();
        let mut failed: Vec<Option<String>> = present.iter().map(|_| None).collect();
        for repetition in 0..case.repetitions {
            for at in order(at + repetition, present.len()) {
                let (one, process) = &mut present[at];
                if failed[at].is_some() {
                    continue;
                }
                let [first, other] = self.effort.warm_up;
                let warm_up = match (repetition, warm.insert(one.name)) {
                    (_, true) => warm_up(one, first),
                    (0, false) => warm_up(one, other),
                    _ => Duration::ZERO,
                };
                match sample(one, process, store, case, self.effort, warm_up).await {
                    Ok(sample) => samples[at].push(sample),
                    Err(error) => failed[at] = Some(error.to_string()),
                }
            }
        }
        let mut rows = Vec::new();
        for ((one, _), (samples, failed)) in present.iter().zip(samples.into_iter().zip(failed)) {
            rows.push(match failed {
                Some(reason) => Row::missing(one.store, &case.name, one.name, &reason),
                None => Row::of(one.store, &case.name, one.name, &samples),
            });
        }
        rows
    }
}

/// All cases, or those of these names.
fn chosen(all: Vec<Case>, names: &[String]) -> Result<Vec<Case>> {
    if let Some(unknown) = names
        .iter()
        .find(|name| all.iter().all(|case| case.name != **name))
    {
        let known: Vec<&str> = all.iter().map(|case| case.name.as_str()).collect();
        return Err(format!(
            "no case {unknown:?} at this length; there are: {}",
            known.join(", ")
        )
        .into());
    }
    let is_wanted = |case: &Case| names.is_empty() || names.contains(&case.name);
    Ok(all.into_iter().filter(is_wanted).collect())
}

/// This share of the time that a contestant takes to be at its full speed.
fn warm_up(one: &Contestant, share: f64) -> Duration {
    let whole = match one.with {
        With::Adapter(adapter) => adapter.warm_up,
        _ => Duration::from_millis(100),
    };
    whole.mul_f64(share)
}

/// One measurement. A process that was killed, on purpose or since it failed, is started again.
async fn sample(
    one: &'static Contestant,
    process: &mut Process,
    store: &Store,
    case: &Case,
    effort: &Effort,
    warm_up: Duration,
) -> Result<Sample> {
    if case.is_of_memory() {
        process.kill().await?;
    }
    if process.pid() == 0 {
        *process = Process::start(one, &store.url, LEASE).await?;
    }
    let mut measured = async || {
        if !warm_up.is_zero() {
            case.warm_up(process, warm_up).await?;
        }
        case.run(process, store, effort).await
    };
    let sample = measured().await;
    if let Err(error) = &sample
        && !error.to_string().starts_with("it has no ")
    {
        process.kill().await?; // it may still be at it
    }
    sample
}

async fn recovered(
    present: &[(&'static Contestant, Process)],
    store: &Store,
    case: &Case,
) -> Vec<Row> {
    let mut all = JoinSet::new();
    for (one, _) in present {
        let (one, url, case) = (*one, store.url.clone(), case.clone());
        all.spawn(async move {
            match case::recover(one, &url, case.repetitions).await {
                Ok(samples) => Row::of(one.store, &case.name, one.name, &samples),
                Err(error) => Row::missing(one.store, &case.name, one.name, &error.to_string()),
            }
        });
    }
    let mut rows = all.join_all().await;
    rows.sort_by_key(|row| {
        CONTESTANTS
            .iter()
            .position(|one| one.name == row.contestant)
    });
    rows
}

/// Judges the conditions of the samples of a contestant.
fn quiet(samples: &[Sample]) -> Quiet {
    let steal: Vec<f64> = samples.iter().map(|one| one.seen.steal).collect();
    let foreign: Vec<f64> = samples.iter().map(|one| one.seen.foreign).collect();
    Quiet::of(&steal, &foreign)
}
