//! Hand-offs between processes, and the cost of many waiting processes while nothing happens.
//!
//! Each process reports when it asked for the lock, when it had it and when it began to release it, by
//! the machine's boot clock.

use super::sqlite;
use crate::{
    Result,
    clock::cpu_of,
    work::{Probe, Work, hold_time, nanos},
};
use dlock_conformance::testbed::worker::{self, Job, Worker};
use dlock_core::{Client, Clock, Instant};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    sync::{Mutex, watch},
    task::JoinSet,
};

/// Processes that contend for one name.
pub(super) struct Processes {
    workers: Vec<Arc<Mutex<Worker>>>,
    pids: Vec<u32>,
}

/// One hold of a process.
#[derive(Clone, Copy, Debug)]
struct Hold {
    asked: Instant,
    got: Instant,
    gave: Instant,
}

impl Processes {
    pub(super) async fn start(count: usize, file: &str, name: &str) -> Result<Self> {
        let mut starting = Vec::new();
        for _ in 0..count {
            starting.push(Worker::spawn(JOB, &[("file", file), ("name", name)])?);
        }
        let mut started = Self {
            workers: Vec::new(),
            pids: Vec::new(),
        };
        for mut worker in starting {
            worker.expect(READY, PATIENCE).await?;
            started.pids.extend(worker.pid());
            started.workers.push(Arc::new(Mutex::new(worker)));
        }
        Ok(started)
    }

    pub(super) fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// As [`crate::work::hand_off`], with processes.
    pub(super) async fn hand_off(&self, span: Duration) -> Result<Work> {
        let turn = Arc::new(watch::Sender::new(0));
        let over = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for worker in &self.workers {
            let (turn, over) = (Arc::clone(&turn), Arc::clone(&over));
            tasks.spawn(contend(Arc::clone(worker), turn, over));
        }
        let probe = Probe {
            servers: self.pids.clone(),
            ..Probe::default()
        };
        tokio::time::sleep(span / 5).await;
        let (since, from) = (probe.begin().await?, Clock::boot().now());
        tokio::time::sleep(span * 4 / 5).await;
        let (mut work, to) = (Work::default(), Clock::boot().now());
        probe.end(&since, &mut work).await?;
        over.store(true, SeqCst);
        turn.send_modify(|_| {});
        let mut holds = Vec::new();
        while let Some(done) = tasks.join_next().await {
            holds.extend(done??);
        }
        work.violations = overlaps(&mut holds);
        let handed = holds.windows(2).filter_map(|pair| {
            let [before, next] = pair else { return None };
            // A process that asked later than that was not waiting.
            let waited = next.asked < before.gave;
            let counts = waited && before.gave >= from && before.gave <= to;
            counts.then(|| nanos(next.got.since(before.gave)))
        });
        work.latencies = handed.collect();
        work.operations = u64::try_from(work.latencies.len())?;
        Ok(work)
    }

    /// The CPU of all waiting processes, as a share of one core, while another one holds the lock. At
    /// the end it is released, and each gets it.
    pub(super) async fn idle(&self, client: &Client, name: &str, span: Duration) -> Result<f64> {
        let guard = client.lock(name)?.acquire().await?;
        for worker in &self.workers {
            worker.lock().await.send(GO).await?;
        }
        tokio::time::sleep(SETTLE.min(span)).await;
        let (began, before) = (std::time::Instant::now(), cpu_of(&self.pids));
        tokio::time::sleep(span).await;
        let used = cpu_of(&self.pids).saturating_sub(before);
        let share = used.as_secs_f64() / began.elapsed().as_secs_f64();
        guard.release().await?;
        for worker in &self.workers {
            worker.lock().await.expect(GAVE, PATIENCE).await?;
        }
        Ok(share)
    }
}

async fn contend(
    worker: Arc<Mutex<Worker>>,
    turn: Arc<watch::Sender<u64>>,
    over: Arc<AtomicBool>,
) -> Result<Vec<Hold>> {
    let mut worker = worker.lock().await;
    let mut holds = Vec::new();
    while !over.load(SeqCst) {
        worker.send(GO).await?;
        worker.expect(GOT, PATIENCE).await?;
        let mut mine = 0;
        turn.send_modify(|turn| {
            *turn += 1;
            mine = *turn;
        });
        holds.push(read(&worker.expect(GAVE, PATIENCE).await?)?);
        let mut others = turn.subscribe();
        others
            .wait_for(|turn| *turn > mine || over.load(SeqCst))
            .await?;
    }
    Ok(holds)
}

/// Sorts the holds, and counts those that began before the previous one began to end.
fn overlaps(holds: &mut [Hold]) -> u64 {
    holds.sort_unstable_by_key(|hold| hold.got);
    let pairs = holds.windows(2);
    let inside = pairs.filter(|pair| pair[1].got < pair[0].gave).count();
    u64::try_from(inside).unwrap_or(u64::MAX)
}

fn read(line: &str) -> Result<Hold> {
    let mut times = line
        .split_ascii_whitespace()
        .map(|time| time.parse().map(Instant::from_nanos));
    let mut next = || times.next().ok_or("a worker said too little");
    Ok(Hold {
        asked: next()??,
        got: next()??,
        gave: next()??,
    })
}

/// The job of a worker process.
pub(super) async fn job(job: &Job) -> Result {
    let client = Client::new(sqlite::driver(job.arg("file")?).await?)?;
    let lock = client.lock(job.arg("name")?)?;
    let clock = Clock::boot();
    let mut commands = worker::commands();
    worker::say(READY)?;
    while commands.recv().await.is_some() {
        let asked = clock.now();
        let guard = lock.acquire().await?;
        let got = clock.now();
        worker::say(GOT)?;
        tokio::time::sleep(hold_time()).await;
        let gave = clock.now();
        guard.release().await?;
        let times = [asked, got, gave].map(Instant::as_nanos);
        worker::say(&format!("{GAVE}{} {} {}", times[0], times[1], times[2]))?;
    }
    Ok(())
}

pub(super) const JOB: &str = "hand-off";
const READY: &str = "ready";
const GO: &str = "go";
const GOT: &str = "got";
const GAVE: &str = "gave ";
/// A queue of many slow starters on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Until all processes wait, and their first polls are over.
const SETTLE: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::{overlaps, read};

    #[test]
    fn who_comes_in_before_the_other_leaves_is_seen() {
        let mut holds = ["3 20 30", "1 5 10", "4 29 40"].map(|line| read(line).unwrap());
        assert_eq!(overlaps(&mut holds), 1);
        assert_eq!(overlaps(&mut holds[..2]), 0);
        assert!(read("1 2").is_err());
    }
}
