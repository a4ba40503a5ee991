//! A soak: one pattern of use for as long as wanted, by processes that are killed and stopped.

mod presence;
mod work;

use crate::{
    Result,
    storm::{
        LEASE,
        judge::{Kind as Found, LOGS, Verdict, judge_all},
        target::{END, Place, Target, look_for_leftovers},
    },
};
use clap::{Args, ValueEnum};
use dlock::{Client, Guard, MAX_SHARERS, RetryClass, driver::Wake};
use dlock_conformance::testbed::{Proxy, worker::Worker};
use fastrand::Rng;
use futures_util::future::try_join_all;
use std::{collections::HashMap, fs, time::Duration};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use work::work;

/// The options of a soak.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What the processes do.
    #[arg(value_enum)]
    pattern: Pattern,
    #[command(flatten)]
    place: Place,
    /// How long they do it; starting, cleaning up and the last check come on top.
    #[arg(long = "for", default_value = "60s", value_parser = humantime::parse_duration, value_name = "TIME")]
    span: Duration,
    /// The seed of what is killed, and when.
    #[arg(long)]
    seed: Option<u64>,
    /// A time over its goal is printed, and is no finding: for machines with other work.
    #[arg(long)]
    untimed: bool,
    /// What the pattern `presence` does to its holders, each once, instead of anything at random for some time.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "HARMS")]
    harms: Vec<presence::Harm>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Pattern {
    /// 16 readers and a writer of one name.
    Readers,
    /// 100 processes that want one of 10 permits; half of them are killed.
    Permits,
    /// 5 candidates; every two leases the leader is killed or stopped.
    Election,
    /// 5 processes with a presence and long leases; the holder is killed, stopped, cut off, or its network is lossy.
    Presence,
    /// 16 processes that want several of 8 names at once, in any order; now and then one is killed.
    Sets,
    /// As many readers of one name as it takes at once, of one client, and a writer after them.
    Crowd,
}

/// Runs a soak to its end; returns whether there was no finding.
pub(crate) async fn run(options: Options) -> Result<bool> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let folder = tempfile::Builder::new().prefix("dlock-soak-").tempdir()?;
    fs::create_dir(folder.path().join(LOGS))?;
    let target = Target::of(options.place, &folder).await?;
    let client = dlock::connect(&target.direct).await?;
    let caps = client.capabilities();
    println!(
        "{:?} over {} for {:?}, seed {seed}",
        options.pattern, caps.backend, options.span
    );
    let mut soak = Soak {
        run: format!("{seed:x}.{:x}", std::process::id()),
        seed,
        rng: Rng::with_seed(seed),
        verdict: Verdict::default(),
        workers: Vec::new(),
        started: 0,
        killed: 0,
        stopped: 0,
        networks: HashMap::new(),
        untimed: options.untimed,
        target,
        client,
        folder,
    };
    soak.begin(options.pattern).await?;
    match options.pattern {
        Pattern::Readers => sleep(options.span).await,
        Pattern::Permits => soak.kill_now_and_then(options.span, WANT / 2).await?,
        Pattern::Sets => {
            let kills = usize::try_from(options.span.as_secs() / 5)?;
            soak.kill_now_and_then(options.span, kills).await?;
        }
        Pattern::Election => soak.depose(options.span).await?,
        Pattern::Presence => soak.take_over(options.span, options.harms).await?,
        Pattern::Crowd => soak.crowd(options.span).await?,
    }
    soak.end(options.pattern).await
}

struct Soak {
    target: Target,
    /// Looks, and takes no part.
    client: Client,
    /// The prefix of all names, so that several soaks can share a store.
    run: String,
    seed: u64,
    rng: Rng,
    verdict: Verdict,
    workers: Vec<(&'static str, Worker)>,
    started: u32,
    killed: usize,
    stopped: usize,
    /// The networks of processes that have one of their own, by process id.
    networks: HashMap<u32, Proxy>,
    untimed: bool,
    folder: TempDir,
}

impl Soak {
    async fn begin(&mut self, pattern: Pattern) -> Result {
        let (role, count) = match pattern {
            Pattern::Readers => ("reader", 16),
            Pattern::Permits => ("permit", WANT),
            Pattern::Election => ("candidate", 5),
            Pattern::Presence => return self.begin_present().await,
            Pattern::Sets => ("set", 16),
            Pattern::Crowd => return Ok(()),
        };
        for _ in 0..count {
            let worker = self.start(role)?;
            self.workers.push((role, worker));
        }
        if pattern == Pattern::Readers {
            let writer = self.start("writer")?;
            self.workers.push(("writer", writer));
        }
        for (_, worker) in &mut self.workers {
            worker.expect("ready", END).await?;
        }
        Ok(())
    }

    fn start(&mut self, role: &'static str) -> Result<Worker> {
        let url = self.target.direct.clone();
        self.start_at(role, &url)
    }

    fn start_at(&mut self, role: &'static str, url: &str) -> Result<Worker> {
        let number = self.started;
        self.started += 1;
        let folder = self.folder.path().to_str().ok_or("a path is no text")?;
        Ok(Worker::spawn(
            JOB,
            &[
                ("url", url),
                ("run", &self.run),
                ("role", role),
                ("seed", &number.to_string()),
                ("log", &format!("{folder}/{LOGS}/{number}")),
            ],
        )?)
    }

    /// Kills processes at random moments, and starts others instead while they are to go on.
    async fn kill_now_and_then(&mut self, span: Duration, kills: usize) -> Result {
        let end = Instant::now() + span;
        let mut moments: Vec<_> = (0..kills).map(|_| span.mul_f64(self.rng.f64())).collect();
        moments.sort_unstable();
        for moment in moments {
            tokio::time::sleep_until(end - span + moment).await;
            let at = self.rng.usize(..self.workers.len());
            let (role, mut victim) = self.workers.swap_remove(at);
            victim.kill_9().await?;
            self.killed += 1;
            if role == "set" {
                let worker = self.start(role)?;
                self.workers.push((role, worker));
            }
        }
        tokio::time::sleep_until(end).await;
        Ok(())
    }

    /// Kills or stops each leader two leases after it was seen, and measures how long no other leads.
    async fn depose(&mut self, span: Duration) -> Result {
        let end = Instant::now() + span;
        let lease = self.lease()?;
        let (mut longest, mut last, mut held_up) = (Duration::ZERO, 0, 0);
        let is_a_file = self.client.capabilities().backend == "sqlite";
        let mut since = Instant::now();
        while Instant::now() < end {
            let (pid, term, continued) = self.next_leader(last).await?;
            if last > 0 {
                if continued && is_a_file {
                    held_up += 1;
                } else {
                    longest = longest.max(since.elapsed());
                }
                self.go_on()?;
            }
            last = term;
            sleep(lease * 2).await;
            let at = self
                .workers
                .iter()
                .position(|(_, worker)| worker.pid() == Some(pid));
            let at = at.ok_or("the leader is no process of ours")?;
            since = Instant::now();
            if self.rng.bool() {
                self.workers[at].1.stop()?;
                self.stopped += 1;
            } else {
                self.workers[at].1.kill_9().await?;
                self.killed += 1;
                let worker = self.start("candidate")?;
                self.workers[at].1 = worker;
            }
        }
        self.next_leader(last).await?;
        println!(
            "take-overs: {} killed, {} stopped",
            self.killed, self.stopped
        );
        if held_up > 0 {
            println!(
                "of them behind a process stopped inside a write, which locks the file: {held_up}"
            );
        }
        self.recovers("until another leads", longest)
    }

    /// Fills a name with readers, as many as it takes: one more is refused, and after them a writer enters.
    async fn crowd(&mut self, span: Duration) -> Result {
        let end = Instant::now() + span;
        let lock = self.client.rw_lock(work::name(&self.run, 0))?;
        let (mut rounds, mut longest) = (0, Duration::ZERO);
        while Instant::now() < end {
            let began = Instant::now();
            let readers = (0..MAX_SHARERS).map(|_| lock.read().acquire_timeout(END));
            let guards = try_join_all(readers).await?;
            longest = longest.max(began.elapsed());
            if lock.read().try_acquire().await?.is_some() {
                self.verdict
                    .find(Found::TooMany, "a reader more was let in");
            }
            for lost in guards.iter().filter_map(|guard| guard.check().err()) {
                self.verdict.find(Found::Worker, lost);
            }
            try_join_all(guards.into_iter().map(Guard::release)).await?;
            let writer = lock.write().acquire_timeout(END).await?;
            writer.release().await?;
            rounds += 1;
        }
        println!("{rounds} times {MAX_SHARERS} readers, all inside after {longest:.1?} at most");
        Ok(())
    }

    /// The process of the first leader after this term, its term, and whether what was stopped had to be continued
    /// first: a process that is stopped inside a transaction keeps the file of SQLite locked.
    async fn next_leader(&self, last: u64) -> Result<(u32, u64, bool)> {
        let name = work::name(&self.run, 0);
        let began = Instant::now();
        while began.elapsed() < END {
            let continues = began.elapsed() > 3 * LEASE;
            if continues {
                self.go_on()?;
            }
            let shown = match self.client.admin().inspect(&name).await {
                Ok(shown) => shown,
                // A busy machine: the store had no time for this request.
                Err(error) if error.retry() != RetryClass::Never => continue,
                Err(error) => return Err(error.into()),
            };
            let leader = shown.holders.first();
            let token = leader
                .and_then(|leader| leader.token)
                .map_or(0, |token| token.0);
            if let Some(leader) = leader.filter(|_| token > last) {
                return Ok((leader.info.pid, token, continues));
            }
            sleep(LOOK).await;
        }
        Err(format!("no candidate led within {END:?} after term {last}").into())
    }

    /// Continues what was stopped.
    fn go_on(&self) -> Result {
        Ok((self.workers.iter()).try_for_each(|(_, worker)| worker.cont())?)
    }

    /// The lease of every hold.
    fn lease(&self) -> Result<Duration> {
        let lock = self.client.lock(work::name(&self.run, 0))?;
        Ok(crate::storm::renewed(lock, LEASE)
            .effective_lease()?
            .length())
    }

    /// Ends all processes, judges their logs, and looks whether all is free.
    async fn end(mut self, pattern: Pattern) -> Result<bool> {
        let mut longest: HashMap<&str, [Duration; 2]> = HashMap::new();
        self.go_on()?;
        for (_, worker) in &mut self.workers {
            worker.close();
        }
        let ended = Instant::now();
        for (role, mut worker) in std::mem::take(&mut self.workers) {
            match worker.expect("longest ", END).await {
                Ok(words) => {
                    let spans = words
                        .split(' ')
                        .map(|span| span.parse().map(Duration::from_nanos));
                    let known = longest.entry(role).or_default();
                    for (known, span) in known.iter_mut().zip(spans) {
                        *known = (*known).max(span?);
                    }
                }
                Err(error) => self.verdict.find(Found::Worker, format!("{role}: {error}")),
            }
            if timeout(END, worker.wait()).await.is_err() {
                let words = format!("{role}: it did not end within {END:?}");
                self.verdict.find(Found::Worker, words);
            }
        }
        match pattern {
            Pattern::Permits => self.permits_are_back(ended).await?,
            Pattern::Presence => self.no_presence_is_left().await?,
            _ => {}
        }
        let judged = judge_all(self.folder.path())?;
        let found = std::mem::replace(&mut self.verdict, judged);
        self.verdict.findings.extend(found.findings);
        if pattern == Pattern::Readers {
            let of = |role| longest.get(role).copied().unwrap_or_default();
            let ([waited, _], [_, read]) = (of("writer"), of("reader"));
            let poll = match self.client.capabilities().wake {
                Wake::Queue => Duration::ZERO,
                _ => WRITER_POLL,
            };
            let goal = "3 longest reads, and 3 polls where there is no queue";
            self.times("the writer's longest wait", waited, goal, (read + poll) * 3);
        }
        for (role, [waited, held]) in longest {
            println!("{role}: waited {waited:.1?} at most, held {held:.1?} at most");
        }
        let names = (0..work::NAMES).map(|number| work::name(&self.run, number));
        look_for_leftovers(&self.target, names, &mut self.verdict).await?;
        Ok(self.tell())
    }

    /// All permits can be taken within a lease of the last process's end, and not one more.
    async fn permits_are_back(&mut self, since: Instant) -> Result {
        let permits = self
            .client
            .semaphore(work::name(&self.run, 0), work::PERMITS)?;
        let mut guards = Vec::new();
        for _ in 0..work::PERMITS {
            match permits.acquire_timeout(END).await {
                Ok(guard) => guards.push(guard),
                Err(error) => self.verdict.find(Found::Leftover, error),
            }
        }
        self.recovers("until all permits are back", since.elapsed())?;
        if permits.try_acquire().await?.is_some() {
            self.verdict
                .find(Found::TooMany, "a permit more was granted");
        }
        for guard in guards {
            guard.release().await?;
        }
        Ok(())
    }

    /// How long it took until other processes had what a dead one held: its lease, and a poll.
    fn recovers(&mut self, what: &str, took: Duration) -> Result {
        let (lease, caps) = (self.lease()?, self.client.capabilities());
        let dead = if caps.session_bound {
            lease / 4
        } else {
            Duration::ZERO
        };
        let bound = lease + dead + caps.lapse + POLL;
        self.times(what, took, "lease + poll", bound);
        Ok(())
    }

    /// Prints a time beside its goal; a longer one is a finding.
    fn times(&mut self, what: &str, took: Duration, goal: &str, bound: Duration) {
        let ratio = took.as_secs_f64() / bound.as_secs_f64();
        let words = format!("{what}: {took:.1?}, {ratio:.2} of the goal ({goal}: {bound:.1?})");
        println!("{words}");
        if took > bound && !self.untimed {
            self.verdict.find(Found::Slow, words);
        }
    }

    fn tell(self) -> bool {
        let (started, killed, stopped) = (self.started, self.killed, self.stopped);
        let processes = format!("{started} processes, {killed} killed, {stopped} stopped");
        self.verdict.tell(&processes, self.seed, self.folder)
    }
}

pub(crate) const JOB: &str = "soak";
/// How many want a permit.
const WANT: usize = 100;
/// The longest poll interval of clients that are woken.
const POLL: Duration = Duration::from_secs(2);
/// The poll interval of the stores that only answer.
const WRITER_POLL: Duration = Duration::from_millis(100);
/// How often the next leader is looked for.
const LOOK: Duration = Duration::from_millis(10);
