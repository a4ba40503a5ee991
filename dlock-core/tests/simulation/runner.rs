//! Runner: many seeds on two threads, or one seed with its trace.

use crate::{
    plan::Plan,
    world::{self, Verdict},
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// A world that takes longer than this in real time loops at one simulated instant.
const STUCK: Duration = Duration::from_secs(60);

const THREADS: usize = 2;

pub(crate) fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable} must be a number, not {text:?}")))
}

pub(crate) fn replay(plan: Plan) {
    println!("{plan:#?}");
    let verdict = world::run(plan, true);
    println!(
        "{} calls, {} of them failed or late, {:?}",
        verdict.calls, verdict.faults, verdict.time
    );
    assert!(verdict.breaches.is_empty(), "{:#?}", verdict.breaches);
}

/// Runs all seeds. Fails with the first seeds that broke something and the command that replays them.
pub(crate) fn run_all(seeds: Range<u64>) {
    let began = Instant::now();
    let mut sum = Sum::default();
    each(seeds.clone(), Plan::drawn, |seed, verdict| {
        sum.add(seed, verdict);
        true
    });
    println!("{sum:?}, {:?}", began.elapsed());
    let Some((first, _)) = sum.failed.first() else {
        let is_soak = seeds.end - seeds.start >= 1_000;
        assert!(!is_soak || sum.evictions > 0, "no world evicted a client");
        return;
    };
    panic!(
        "{} of {} seeds broke something:\n{}replay with: DLOCK_SIM_SEED={first} \
         cargo test -p dlock-core --test simulation no_seed -- --nocapture",
        sum.failed.len(),
        seeds.end - seeds.start,
        kinds(&sum.failed),
    );
}

/// Groups breaches that differ only in their numbers: how often each occurred, with the first seed and
/// text.
fn kinds(failed: &[(u64, Vec<String>)]) -> String {
    let mut kinds: BTreeMap<String, (usize, u64, &str)> = BTreeMap::new();
    for (seed, breaches) in failed {
        for breach in breaches {
            let what = breach.split_once(": ").map_or("", |(_, what)| what);
            let kind = what
                .chars()
                .filter(|c| !c.is_ascii_digit())
                .take(40)
                .collect();
            kinds.entry(kind).or_insert((0, *seed, breach)).0 += 1;
        }
    }
    let line = |(count, seed, breach): &_| format!("{count} times, as in seed {seed} {breach}\n");
    kinds.values().map(line).collect()
}

/// Runs seeds on all threads and passes each verdict to `judge` until it has seen enough.
pub(crate) fn each(
    seeds: Range<u64>,
    plan: impl Fn(u64) -> Plan + Sync,
    mut judge: impl FnMut(u64, Verdict) -> bool,
) {
    let next = AtomicU64::new(seeds.start);
    let running = Mutex::new([None; THREADS]);
    let (sender, verdicts) = mpsc::channel();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (next, running, plan, sender) = (&next, &running, &plan, sender.clone());
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    running.lock().unwrap()[thread] = Some((seed, Instant::now()));
                    if seed >= seeds.end
                        || sender.send((seed, world::run(plan(seed), false))).is_err()
                    {
                        running.lock().unwrap()[thread] = None;
                        return;
                    }
                }
            });
        }
        drop(sender);
        loop {
            match verdicts.recv_timeout(Duration::from_secs(1)) {
                Ok((seed, verdict)) => {
                    if !judge(seed, verdict) {
                        break;
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => give_up_on_stuck(*running.lock().unwrap()),
            }
        }
        next.store(seeds.end, Relaxed);
    });
}

fn give_up_on_stuck(running: [Option<(u64, Instant)>; THREADS]) {
    for (seed, since) in running.into_iter().flatten() {
        if since.elapsed() > STUCK {
            // The thread cannot be stopped: the process has to end for the failure to be seen.
            eprintln!("seed {seed} goes round in circles: DLOCK_SIM_SEED={seed}");
            std::process::exit(101);
        }
    }
}

#[derive(Default)]
struct Sum {
    seeds: u64,
    calls: u64,
    faults: u64,
    grants: u64,
    evictions: u64,
    time: Duration,
    busiest: u64,
    failed: Vec<(u64, Vec<String>)>,
}

impl Sum {
    fn add(&mut self, seed: u64, verdict: Verdict) {
        self.seeds += 1;
        self.calls += verdict.calls;
        self.faults += verdict.faults;
        self.grants += verdict.grants;
        self.evictions += verdict.evictions;
        self.time += verdict.time;
        self.busiest = self.busiest.max(verdict.busiest);
        if !verdict.breaches.is_empty() {
            self.failed.push((seed, verdict.breaches));
            self.failed.sort();
        }
    }
}

impl std::fmt::Debug for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            seeds,
            calls,
            faults,
            grants,
            evictions,
            time,
            busiest,
            ..
        } = self;
        write!(
            f,
            "{seeds} worlds, {time:?} of their time, {calls} calls of which {faults} failed or came late, \
             {grants} grants, {evictions} of locks whose holder's presence was over, at most {busiest} calls in one second"
        )
    }
}
