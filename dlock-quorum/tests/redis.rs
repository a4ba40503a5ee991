//! A quorum of three Redis servers, of which one after the other is killed under load.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::redis::{Aof, RedisOptions, RedisServer};
use dlock_core::{Client, Clock, FencingToken, Lease};
use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
use dlock_redis::RedisDriver;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_every_two_seconds_costs_no_lock_and_little_time() {
    soak(Duration::from_secs(6), 16).await;
}

/// The figures of the goal: run it alone, in a release build.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute: cargo test --release -p dlock-quorum --test redis -- --ignored --nocapture"]
async fn soak_of_a_minute_with_128_tasks() {
    soak(Duration::from_secs(60), 128).await;
}

async fn soak(length: Duration, tasks: usize) {
    let start = || {
        RedisServer::start(RedisOptions {
            aof: Aof::Always,
            ..RedisOptions::default()
        })
        .unwrap()
    };
    let servers: Vec<_> = (0..3).map(|_| Arc::new(start())).collect();
    let clients = [connect(&servers).await, connect(&servers).await];
    let judge = Arc::new(Judge::default());
    let over = Arc::new(AtomicBool::new(false));
    let names = tasks / 2;
    let workers: Vec<_> = (0..tasks)
        .map(|task| {
            let (client, judge, over) = (
                clients[task % 2].clone(),
                Arc::clone(&judge),
                Arc::clone(&over),
            );
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let name = format!("orders:{}", task / 2 % names);
                    let began = Instant::now();
                    let acquired = client
                        .lock(&*name)
                        .unwrap()
                        .acquire_timeout(Duration::from_secs(5))
                        .await;
                    let Ok(guard) = acquired else {
                        judge.failed();
                        continue;
                    };
                    let waited = began.elapsed();
                    judge.enters(&name, guard.token());
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    judge.leaves(&name, guard.check().is_ok());
                    drop(guard.release().await);
                    judge.took(waited);
                }
            })
        })
        .collect();
    let began = Instant::now();
    let mut kills = 0;
    while began.elapsed() < length {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let server = Arc::clone(&servers[kills % 3]);
        tokio::task::spawn_blocking(move || server.managed().unwrap().restart().unwrap())
            .await
            .unwrap();
        kills += 1;
        eprintln!(
            "{:>4.0} s: {kills} kills, {}",
            began.elapsed().as_secs_f64(),
            judge.summary()
        );
    }
    over.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.unwrap();
    }
    let seen = judge.seen();
    assert_eq!(
        (seen.violations, seen.regressions),
        (0, 0),
        "{}",
        judge.summary()
    );
    assert!(seen.waits.len() > 100, "{}", judge.summary());
    assert_eq!(seen.failed, 0, "{}", judge.summary());
}

async fn connect(servers: &[Arc<RedisServer>]) -> Client {
    let stores = servers.iter().map(|server| {
        let url = server.url();
        Store::new(url.clone(), move || {
            let url = url.clone();
            async move { Ok(Arc::new(RedisDriver::connect(&url).await?) as _) }
        })
    });
    let config = QuorumConfig::new(stores.collect()).unwrap();
    let driver = QuorumDriver::connect(config).await.unwrap();
    let lease = Lease::renewed(Duration::from_secs(3));
    Client::builder(Arc::new(driver))
        .lease(lease)
        .clock(Clock::boot())
        .build()
        .unwrap()
}

/// What the workers saw.
#[derive(Default)]
struct Judge(Mutex<Seen>);

#[derive(Clone, Default)]
struct Seen {
    inside: BTreeMap<String, u32>,
    last: BTreeMap<String, FencingToken>,
    violations: u32,
    regressions: u32,
    failed: u32,
    lost: u32,
    waits: Vec<Duration>,
}

impl Judge {
    fn enters(&self, name: &str, token: FencingToken) {
        let mut seen = self.0.lock().unwrap();
        let inside = seen.inside.entry(name.to_owned()).or_default();
        *inside += 1;
        let two = *inside > 1;
        seen.violations += u32::from(two);
        let last = seen.last.insert(name.to_owned(), token);
        seen.regressions += u32::from(last.is_some_and(|last| last >= token));
    }

    fn leaves(&self, name: &str, is_held: bool) {
        let mut seen = self.0.lock().unwrap();
        *seen.inside.get_mut(name).unwrap() -= 1;
        seen.lost += u32::from(!is_held);
    }

    fn took(&self, waited: Duration) {
        self.0.lock().unwrap().waits.push(waited);
    }

    fn failed(&self) {
        self.0.lock().unwrap().failed += 1;
    }

    fn seen(&self) -> Seen {
        self.0.lock().unwrap().clone()
    }

    fn summary(&self) -> String {
        let mut seen = self.seen();
        seen.waits.sort_unstable();
        let at = |share: f64| {
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "an index"
            )]
            let at = (seen.waits.len() as f64 * share) as usize;
            seen.waits
                .get(at.min(seen.waits.len().saturating_sub(1)))
                .copied()
                .unwrap_or_default()
        };
        format!(
            "{} acquires, p50 {:?}, p99 {:?}, max {:?}, {} failed, {} lost, {} violations, {} token regressions",
            seen.waits.len(),
            at(0.5),
            at(0.99),
            at(1.0),
            seen.failed,
            seen.lost,
            seen.violations,
            seen.regressions
        )
    }
}
