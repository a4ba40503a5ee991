//! Faults of a cluster of three: lost leaders, and a holder that is cut off.

use crate::bed::{LEASE, client};
use dlock_conformance::testbed::EtcdCluster;
use dlock_core::{Client, Lease};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};

/// A counter under the lock that a double hold would break.
#[derive(Default)]
struct Load {
    inside: AtomicU32,
    count: AtomicU64,
    last: AtomicU64,
    over: AtomicBool,
}

impl Load {
    /// Waits until that many more holds were granted.
    async fn goes_on(&self, by: u64) {
        let counted = self.count.load(SeqCst);
        let go_on = async {
            while self.count.load(SeqCst) < counted + by {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), go_on)
            .await
            .expect("it goes on");
    }
}

async fn load(client: Client, shared: Arc<Load>) {
    while !shared.over.load(SeqCst) {
        let lock = client
            .lock("led")
            .expect("it works")
            .lease(Lease::renewed(LEASE));
        let Ok(guard) = lock.acquire_timeout(Duration::from_secs(5)).await else {
            continue;
        };
        if guard.check().is_ok() {
            assert_eq!(shared.inside.fetch_add(1, SeqCst), 0, "two inside");
            // Holds the lock for a moment: a second holder would be seen.
            sleep(Duration::from_millis(2)).await;
            let held = guard.check().is_ok();
            shared.inside.fetch_sub(1, SeqCst);
            if held {
                let before = shared.last.swap(guard.token().0, SeqCst);
                assert!(guard.token().0 > before, "a token that does not grow");
                shared.count.fetch_add(1, SeqCst);
            }
        }
        drop(guard.release().await);
    }
}

/// Kills and stops leaders by turns, while clients take one lock.
async fn leaders_are_lost(times: u32) {
    let cluster = spawn_blocking(|| EtcdCluster::start().expect("it works")).await;
    let cluster = Arc::new(cluster.expect("it works"));
    let (shared, mut tasks) = (Arc::new(Load::default()), JoinSet::new());
    for _ in 0..4 {
        let client = client(&cluster.url()).await;
        tasks.spawn(load(client, Arc::clone(&shared)));
    }
    for time in 0..times {
        shared.goes_on(20).await;
        let servers = Arc::clone(&cluster);
        let lost = spawn_blocking(move || {
            let leader = loop {
                if let Some(leader) = servers.leader() {
                    break leader;
                }
            };
            match time % 2 {
                0 => drop(servers.server(leader).kill().expect("it works")),
                _ => servers.server(leader).stop().expect("it works"),
            }
            leader
        });
        let lost = lost.await.expect("it works");
        // The others elect a leader, and it goes on with that.
        shared.goes_on(4).await;
        let servers = Arc::clone(&cluster);
        let back = spawn_blocking(move || match time % 2 {
            0 => servers.server(lost).restart().expect("it works"),
            _ => servers.server(lost).cont().expect("it works"),
        });
        back.await.expect("it works");
    }
    shared.goes_on(20).await;
    shared.over.store(true, SeqCst);
    println!("{} holds, {times} leaders lost", shared.count.load(SeqCst));
    tasks.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn four_lost_leaders_under_load_lose_nothing() {
    leaders_are_lost(4).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a soak of minutes: --ignored soak_twenty runs it"]
async fn soak_twenty_lost_leaders_under_load_lose_nothing() {
    leaders_are_lost(20).await;
}

