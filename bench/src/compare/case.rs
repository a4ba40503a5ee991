//! The cases, and what a contestant's answer says: the same arithmetic for every language.

use super::{
    Effort,
    peers::{Contestant, PATIENCE, Process},
    store::{Store, memory_of},
};
use crate::{
    Result,
    clock::{Meter, Seen, cpu_of},
    measure::percentile,
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

/// One kind of work.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    work: Kind,
    /// How often each contestant does it.
    pub(super) repetitions: usize,
    /// How long it takes, about.
    pub(super) span: Duration,
}

#[derive(Clone, Debug)]
enum Kind {
    Cycle { which: &'static str, tasks: usize },
    Contend { waiters: usize },
    Keep { locks: usize },
    Names { count: usize },
    Wait { tasks: usize },
    Recover,
}

/// The result of one contestant in one repetition.
#[derive(Debug, Default)]
pub(super) struct Sample {
    pub(super) metrics: BTreeMap<&'static str, f64>,
    /// Latencies in microseconds at [`PERMILLES`].
    pub(super) curve: Vec<f64>,
    pub(super) seen: Seen,
}

/// The points of a latency distribution.
pub(super) const PERMILLES: [usize; 9] = [10, 100, 250, 500, 750, 900, 950, 990, 999];

pub(super) fn all(effort: &Effort) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, work, repetitions, span| {
        cases.push(Case {
            name,
            work,
            repetitions,
            span,
        });
    };
    let cycles = [
        ("main", 1),
        ("task", 1),
        ("task", 16),
        ("task", 128),
        ("task", 1024),
        ("again", 1),
        ("read", 16),
        ("permit", 16),
    ];
    for (which, tasks) in cycles {
        let work = Kind::Cycle { which, tasks };
        add(
            format!("{which}-{tasks}"),
            work,
            effort.repetitions,
            effort.cycle,
        );
    }
    for waiters in [2, 16, 64] {
        let work = Kind::Contend { waiters };
        add(
            format!("contend-{waiters}"),
            work,
            effort.repetitions,
            if waiters == 64 {
                effort.crowd
            } else {
                effort.contend
            },
        );
    }
    for locks in effort.keep {
        let span = effort.settle + effort.watch + RESTART;
        add(
            format!("keep-{locks}"),
            Kind::Keep { locks: *locks },
            1,
            span,
        );
    }
    for count in effort.names {
        let span = Duration::from_micros(200) * u32::try_from(*count).unwrap_or(u32::MAX);
        let span = span.min(effort.names_limit);
        add(
            format!("names-{count}"),
            Kind::Names { count: *count },
            1,
            span,
        );
    }
    let work = Kind::Wait {
        tasks: effort.waiters,
    };
    let span = effort.contend + RESTART;
    add("wait".to_owned(), work, 1, span);
    add(
        "recover".to_owned(),
        Kind::Recover,
        effort.kills,
        RECOVERY_LEASE * 2,
    );
    cases
}

impl Case {
    /// Whether all contestants do it at the same time: they spend it waiting.
    pub(super) fn is_together(&self) -> bool {
        matches!(self.work, Kind::Recover)
    }

    /// The case as a server that others use can bear it, if it can.
    pub(super) fn lightened(mut self) -> Option<Self> {
        if let Kind::Wait { tasks } = &mut self.work {
            *tasks = WAITING.min(*tasks);
        }
        let is_light = match self.work {
            Kind::Cycle { tasks, .. } => tasks <= 128,
            Kind::Contend { waiters } => waiters <= WAITING,
            Kind::Keep { locks: many } | Kind::Names { count: many } => many <= 1_000,
            Kind::Wait { .. } | Kind::Recover => true,
        };
        is_light.then_some(self)
    }

    /// Whether it wants a new process: earlier work would hide how much memory this takes.
    pub(super) fn is_of_memory(&self) -> bool {
        matches!(self.work, Kind::Keep { .. } | Kind::Wait { .. })
    }

    /// Works long enough for a compiler at run time to have compiled the way.
    pub(super) async fn warm_up(&self, process: &mut Process, time: Duration) -> Result {
        let millis = time.as_millis();
        let command = match &self.work {
            Kind::Cycle { which, tasks } => format!("cycle {which} {tasks} {millis}"),
            Kind::Contend { waiters } => format!("contend {waiters} {millis}"),
            // In a new process, since these or the case before them want one.
            Kind::Names { .. } | Kind::Keep { .. } | Kind::Wait { .. } => {
                format!("cycle task 128 {millis}")
            }
            Kind::Recover => return Ok(()),
        };
        process.ask(&command, time).await?;
        Ok(())
    }

    pub(super) async fn run(
        &self,
        process: &mut Process,
        store: &Store,
        effort: &Effort,
    ) -> Result<Sample> {
        match self.work {
            Kind::Cycle { which, tasks } => {
                let command = format!("cycle {which} {tasks} {}", self.span.as_millis());
                let cost = Cost::start(process, store).await?;
                let answer = process.ask(&command, self.span).await?;
                let mut sample = Sample::default();
                let operations = number(&answer, "ops");
                sample.latencies(&numbers(&answer["q"]));
                sample.is("per s", operations / number(&answer, "nanos") * 1e9);
                cost.stop(process, store)
                    .await?
                    .each(operations, &mut sample);
                Ok(sample)
            }
            Kind::Contend { waiters } => self.contend(waiters, process, store).await,
            Kind::Keep { locks } => keep(locks, process, store, effort).await,
            Kind::Names { count } => {
                let before = memory_of(&store.pids);
                let limit = effort.names_limit;
                let answer = process
                    .ask(&format!("names {count} {}", limit.as_millis()), limit)
                    .await?;
                let mut sample = Sample::default();
                let seconds = number(&answer, "nanos") / 1e9;
                let visited = number(&answer, "ops");
                sample.is("visited", visited);
                sample.is("per s", visited / seconds);
                sample.memory("server bytes", &store.pids, before, visited);
                Ok(sample)
            }
            Kind::Wait { tasks } => {
                let pids = [process.pid()];
                connect(process).await?;
                let before = [memory_of(&pids), memory_of(&store.pids)];
                process.ask(&format!("wait {tasks}"), self.span).await?;
                let mut sample = Sample::default();
                sample.memory("client bytes", &pids, before[0], tasks as f64);
                sample.memory("server bytes", &store.pids, before[1], tasks as f64);
                let cost = Cost::start(process, store).await?;
                tokio::time::sleep(effort.contend).await;
                let spent = cost.stop(process, store).await?;
                spent.per_second(&mut sample);
                process.kill().await?; // it would take long to let them all through
                Ok(sample)
            }
            Kind::Recover => Err("BUG: recovery needs processes of its own".into()),
        }
    }

    async fn contend(
        &self,
        waiters: usize,
        process: &mut Process,
        store: &Store,
    ) -> Result<Sample> {
        let lead_in = self.span.mul_f64(LEAD_IN);
        process
            .tell(&format!("contend {waiters} {}", self.span.as_millis()))
            .await?;
        tokio::time::sleep(lead_in).await;
        let cost = Cost::start(process, store).await?;
        tokio::time::sleep(self.span - lead_in).await;
        let spent = cost.stop(process, store).await?;
        let answer = process.answer(self.span + PATIENCE).await?;
        let turns = Turns::read(&answer["turns"])?;
        let mut sample = turns.between(lead_in, self.span, waiters + 1);
        let count = sample.metrics.get("hand-offs").copied().unwrap_or_default();
        spent.each(count, &mut sample);
        Ok(sample)
    }
}

/// Clients or tasks that wait on a server of the user's.
const WAITING: usize = 16;

/// Holds many locks for a while.
async fn keep(
    locks: usize,
    process: &mut Process,
    store: &Store,
    effort: &Effort,
) -> Result<Sample> {
    let pids = [process.pid()];
    connect(process).await?;
    let before = [memory_of(&pids), memory_of(&store.pids)];
    process
        .ask(&format!("keep {locks}"), for_many(locks))
        .await?;
    tokio::time::sleep(effort.settle).await; // until each was renewed in its turn
    let mut sample = Sample::default();
    sample.memory("client bytes", &pids, before[0], locks as f64);
    sample.memory("server bytes", &store.pids, before[1], locks as f64);
    let cost = Cost::start(process, store).await?;
    tokio::time::sleep(effort.watch).await;
    let spent = cost.stop(process, store).await?;
    spent.per_second(&mut sample);
    let freed = process.ask("free", for_many(locks)).await?;
    sample.is("lost", number(&freed, "lost"));
    Ok(sample)
}

/// What a client takes once, for its connections and its code, is no part of what each lock takes.
async fn connect(process: &mut Process) -> Result {
    let span = Duration::from_millis(50);
    process
        .ask(&format!("cycle task 16 {}", span.as_millis()), span)
        .await?;
    Ok(())
}

/// The most that work on so many names may take, beside the patience with every answer.
fn for_many(count: usize) -> Duration {
    Duration::from_millis(3) * u32::try_from(count).unwrap_or(u32::MAX)
}

/// Kills a holder again and again while another process waits for its lock.
pub(super) async fn recover(one: &Contestant, url: &str, kills: usize) -> Result<Vec<Sample>> {
    let mut waiter = Process::start(one, url, RECOVERY_LEASE).await?;
    let mut samples = Vec::new();
    for kill in 0..kills {
        let take = format!("take recovered:{kill}");
        let mut holder = Process::start(one, url, RECOVERY_LEASE).await?;
        holder.ask(&take, RECOVERY_LEASE).await?;
        waiter.tell(&take).await?;
        // At any moment between two renewals, with the waiter in the queue; before the lease of one that renews nothing ends.
        tokio::time::sleep(RECOVERY_LEASE.mul_f64(0.4 + fastrand::f64() / 3.0)).await;
        let killed = wall();
        holder.kill().await?;
        let got = waiter.answer(RECOVERY_LEASE + PATIENCE).await?;
        waiter.ask("free", RECOVERY_LEASE).await?;
        let mut sample = Sample::default();
        let after = number(&got, "got") / 1e3 - killed.as_secs_f64() * 1e3;
        if after < 0.0 {
            return Err("the lock of a living holder was given to another".into());
        }
        sample.is("ms", after);
        samples.push(sample);
    }
    Ok(samples)
}

/// Who had the lock, from when to when.
struct Turns(Vec<Turn>);

#[derive(Clone, Copy)]
struct Turn {
    client: u64,
    asked: u64,
    got: u64,
    freed: u64,
}

impl Turns {
    fn read(answer: &Value) -> Result<Self> {
        let turns = answer.as_array().ok_or("an answer without turns")?;
        let turn = |turn: &Value| {
            let at = |at: usize| turn[at].as_u64();
            let (client, asked, got, freed) = (at(0)?, at(1)?, at(2)?, at(3)?);
            Some(Turn {
                client,
                asked,
                got,
                freed,
            })
        };
        let turns: Option<Vec<Turn>> = turns.iter().map(turn).collect();
        let mut turns = turns.ok_or("a turn without its four numbers")?;
        turns.sort_unstable_by_key(|turn| turn.got);
        Ok(Self(turns))
    }

    /// A hand-off lasts from before a release to the moment when the next one has the lock. It counts only if
    /// that one waited already.
    fn between(&self, from: Duration, to: Duration, clients: usize) -> Sample {
        let window = from.as_nanos()..to.as_nanos();
        let mut sample = Sample::default();
        let (mut latencies, mut longest) = (Vec::new(), 0);
        // A wait that outlasts the time counts for what is seen of it; who never got the lock has waited all the time.
        let (end, mut served) = (
            u64::try_from(to.as_nanos()).unwrap_or(u64::MAX),
            BTreeSet::new(),
        );
        for turn in &self.0 {
            served.insert(turn.client);
            if u128::from(turn.got) >= window.start && turn.asked < end {
                longest = longest.max(turn.got.min(end).saturating_sub(turn.asked));
            }
        }
        if served.len() < clients {
            longest = end;
        }
        let (mut violations, mut turns) = (0.0, BTreeMap::<u64, f64>::new());
        for pair in self.0.windows(2) {
            let (before, after) = (pair[0], pair[1]);
            if after.got < before.freed {
                violations += 1.0; // at any time, also at the end
            } else if after.asked < before.freed && window.contains(&u128::from(after.got)) {
                latencies.push(after.got - before.freed);
            }
            if window.contains(&u128::from(after.got)) {
                *turns.entry(after.client).or_default() += 1.0;
            }
        }
        latencies.sort_unstable();
        sample.is("hand-offs", latencies.len() as f64);
        sample.latencies(&latencies);
        sample.is("longest wait ms", longest as f64 / 1e6);
        sample.is("violations", violations);
        sample.is("Jain", jain(turns.values().copied(), clients));
        sample
    }
}

/// Jain's index of fairness: 1 when all have the same, 1/n when one has all.
fn jain(shares: impl Iterator<Item = f64>, of: usize) -> f64 {
    let (mut sum, mut squares) = (0.0, 0.0);
    for share in shares {
        sum += share;
        squares += share * share;
    }
    sum * sum / (squares * of as f64)
}

impl Sample {
    pub(super) fn is(&mut self, metric: &'static str, value: f64) {
        if value.is_finite() {
            self.metrics.insert(metric, value);
        }
    }

    /// Sorted, in nanoseconds.
    fn latencies(&mut self, sorted: &[u64]) {
        if sorted.is_empty() {
            return;
        }
        let at = |permille| percentile(sorted, permille) as f64 / 1e3;
        self.is("p50 µs", at(500));
        self.is("p99 µs", at(990));
        self.curve = PERMILLES.map(at).to_vec();
    }

    fn memory(&mut self, metric: &'static str, pids: &[u32], before: u64, of: f64) {
        if !pids.is_empty() {
            let more = memory_of(pids).saturating_sub(before);
            self.is(metric, more as f64 / of);
        }
    }
}

/// What a client and its server spend, from now on.
struct Cost {
    meter: Meter,
    client: Duration,
    commands: Option<u64>,
}

/// CPU, and commands where they are counted.
struct Spent {
    seen: Seen,
    client: Duration,
    server: Option<Duration>,
    commands: Option<u64>,
}

impl Cost {
    async fn start(process: &Process, store: &Store) -> Result<Self> {
        let commands = asked(store).await?;
        let mut all = store.pids.clone();
        all.push(process.pid());
        Ok(Self {
            commands,
            meter: Meter::start(&all),
            client: cpu_of(&[process.pid()]),
        })
    }

    async fn stop(self, process: &Process, store: &Store) -> Result<Spent> {
        let client = cpu_of(&[process.pid()]).saturating_sub(self.client);
        let seen = self.meter.stop();
        let server = seen.server_cpu.saturating_sub(client);
        let commands = match (asked(store).await?, self.commands) {
            (Some(now), Some(before)) => Some(now.saturating_sub(before)),
            _ => None,
        };
        Ok(Spent {
            seen,
            client,
            server: (!store.pids.is_empty()).then_some(server),
            commands,
        })
    }
}

async fn asked(store: &Store) -> Result<Option<u64>> {
    match &store.commands {
        Some(counter) => Ok(Some(counter().await?)),
        None => Ok(None),
    }
}

impl Spent {
    fn each(&self, operations: f64, sample: &mut Sample) {
        sample.is("client µs", self.client.as_secs_f64() * 1e6 / operations);
        if let Some(server) = self.server {
            sample.is("server µs", server.as_secs_f64() * 1e6 / operations);
        }
        if let Some(commands) = self.commands {
            sample.is("commands", commands as f64 / operations);
        }
        sample.seen = self.seen;
    }

    fn per_second(&self, sample: &mut Sample) {
        let took = self.seen.took.as_secs_f64();
        sample.is("client %", self.client.as_secs_f64() * 100.0 / took);
        if let Some(server) = self.server {
            sample.is("server %", server.as_secs_f64() * 100.0 / took);
        }
        if let Some(commands) = self.commands {
            sample.is("commands/s", commands as f64 / took);
        }
        sample.seen = self.seen;
    }
}

fn number(answer: &Value, key: &str) -> f64 {
    answer[key].as_f64().unwrap_or(f64::NAN)
}

fn numbers(answer: &Value) -> Vec<u64> {
    let numbers = answer.as_array().map_or(&[][..], Vec::as_slice);
    numbers.iter().filter_map(Value::as_u64).collect()
}

fn wall() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// The part of the time of hand-offs in which all contenders enter the queue.
const LEAD_IN: f64 = 0.2;
/// The lease where a holder is killed: the shortest that every contestant keeps.
const RECOVERY_LEASE: Duration = Duration::from_secs(3);
/// What a new process takes, about.
const RESTART: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::{Turns, jain};
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn a_hand_off_counts_when_the_next_one_waited() {
        let millis = |numbers: [u64; 4]| {
            json!([
                numbers[0],
                numbers[1] * 1_000_000,
                numbers[2] * 1_000_000,
                numbers[3] * 1_000_000
            ])
        };
        let turns = [[0, 0, 0, 5], [1, 1, 7, 9], [0, 10, 11, 12], [1, 2, 11, 13]].map(millis);
        let turns = Turns::read(&json!(turns)).unwrap();
        let sample = turns.between(Duration::ZERO, Duration::from_secs(1), 2);
        let of = |metric| sample.metrics[metric];
        assert_eq!(
            (of("hand-offs"), of("p50 µs"), of("violations")),
            (1.0, 2000.0, 1.0)
        );
        assert_eq!(of("longest wait ms"), 9.0);
    }

    #[test]
    fn jain_is_one_for_equal_shares_and_small_for_a_monopoly() {
        assert_eq!(jain([3.0, 3.0].into_iter(), 2), 1.0);
        assert_eq!(jain([3.0].into_iter(), 4), 0.25);
    }
}
