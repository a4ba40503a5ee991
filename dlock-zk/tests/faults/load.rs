//! Faults under load: killed leaders, lost replies. Each test has a soak with many more faults.

use crate::bed::{client, ensemble, server, until, until_in_line};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Fault, Trigger},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::Client;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

/// A counter under the lock that a hold too many would break.
#[derive(Default)]
struct Load {
    inside: AtomicU32,
    count: AtomicU64,
    last: AtomicU64,
    over: AtomicBool,
    /// The permits; 0: the lock is exclusive.
    permits: u32,
}

impl Load {
    /// Waits until that many more holds were granted.
    async fn goes_on(&self, by: u64) {
        let counted = self.count.load(SeqCst);
        until("it goes on", Duration::from_secs(60), || async {
            self.count.load(SeqCst) >= counted + by
        })
        .await;
    }

    /// Stops all tasks, and checks that no seat is left.
    async fn ends(&self, tasks: JoinSet<()>, hosts: &str, name: &str) {
        self.over.store(true, SeqCst);
        tasks.join_all().await;
        until_in_line(hosts, name, 0).await;
    }
}

async fn load(client: Client, name: &'static str, shared: Arc<Load>) {
    while !shared.over.load(SeqCst) {
        let lock = match shared.permits {
            0 => client.lock(name),
            permits => client.semaphore(name, permits),
        };
        let lock = lock.expect("it works");
        let Ok(guard) = lock.acquire_timeout(Duration::from_secs(5)).await else {
            continue;
        };
        if guard.check().is_ok() {
            let inside = shared.inside.fetch_add(1, SeqCst);
            assert!(inside < shared.permits.max(1), "{inside} others inside");
            // Holds the lock for a moment: a second holder would be seen.
            sleep(Duration::from_millis(2)).await;
            let held = guard.check().is_ok();
            shared.inside.fetch_sub(1, SeqCst);
            if held {
                let before = shared.last.swap(guard.token().0, SeqCst);
                let grows = guard.token().0 > before || shared.permits > 0;
                assert!(grows, "a token that does not grow");
                shared.count.fetch_add(1, SeqCst);
            }
        }
        drop(guard.release().await);
    }
}

async fn leaders_die(kills: u32) {
    let ensemble = ensemble().await;
    let (shared, mut tasks) = (Arc::new(Load::default()), JoinSet::new());
    for _ in 0..4 {
        let client = client(&ensemble.url()).await;
        tasks.spawn(load(client, "led", Arc::clone(&shared)));
    }
    for _ in 0..kills {
        shared.goes_on(50).await;
        let servers = Arc::clone(&ensemble);
        let killed = tokio::task::spawn_blocking(move || {
            servers.until_it_serves().expect("it works");
            let leader = servers.leader().expect("one leads");
            servers.server(leader).kill().expect("it works");
            servers.until_it_serves().expect("it works");
            leader
        });
        let leader = killed.await.expect("it works");
        shared.goes_on(4).await;
        let servers = Arc::clone(&ensemble);
        tokio::task::spawn_blocking(move || servers.server(leader).restart().expect("it works"))
            .await
            .expect("it works");
    }
    println!(
        "{} holds, {kills} leaders killed",
        shared.count.load(SeqCst)
    );
    let hosts = ensemble.url()["zk://".len()..].to_owned();
    shared.ends(tasks, &hosts, "led").await;
}

pub(crate) async fn two_killed_leaders_under_load_lose_nothing() {
    leaders_die(2).await;
}

pub(crate) async fn soak_twenty_killed_leaders_under_load_lose_nothing() {
    leaders_die(20).await;
}

async fn replies_are_lost(faults: u32, permits: u32) {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.expect("it works");
    let load_of = Load {
        permits,
        ..Load::default()
    };
    let (shared, mut tasks) = (Arc::new(load_of), JoinSet::new());
    for at in 0..4 {
        let url = if at < 2 {
            server.url_at(proxy.addr())
        } else {
            server.url()
        };
        let client = client(&url).await;
        tasks.spawn(load(client, "lossy", Arc::clone(&shared)));
    }
    for at in 0..faults {
        // The reply to a create, to a delete, to an entry (a transaction that begins with a write), or to the next
        // request of any kind.
        let needle: &[u8] = match at % 4 {
            0 => b"-lock-\0\0\0",
            1 => &[0, 0, 0, 2, 0, 0, 0],
            2 if permits > 1 => &[0, 0, 0, 14, 0, 0, 0, 5],
            _ => b"/dlock/lossy",
        };
        let armed = proxy.on_next(Trigger::on(needle), Fault::CutAfterRequest);
        let struck = timeout(Duration::from_secs(60), armed.struck()).await;
        struck.expect("a reply to lose");
        shared.goes_on(10).await;
    }
    println!("{} holds, {faults} replies lost", shared.count.load(SeqCst));
    let hosts = server.addr().to_string();
    shared.ends(tasks, &hosts, "lossy").await;
}

pub(crate) async fn twenty_lost_replies_under_load_lose_nothing() {
    replies_are_lost(20, 0).await;
}

pub(crate) async fn soak_two_hundred_lost_replies_under_load_lose_nothing() {
    replies_are_lost(200, 0).await;
}

pub(crate) async fn twenty_lost_replies_give_no_permit_too_many() {
    replies_are_lost(20, 2).await;
}

pub(crate) async fn soak_two_hundred_lost_replies_give_no_permit_too_many() {
    replies_are_lost(200, 2).await;
}
