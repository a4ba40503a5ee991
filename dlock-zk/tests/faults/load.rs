//! Faults under load: killed leaders, lost replies. The few of each test are many in its soak.

use crate::bed::{SESSION, client, ensemble, seats, server, until};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Direction, Fault, Reach, Trigger},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::Client;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// Counts under the lock with what a double hold would break.
struct Load {
    inside: AtomicU32,
    count: AtomicU64,
    last: AtomicU64,
}

async fn load(client: Client, name: &'static str, shared: Arc<Load>, until: Instant) {
    while Instant::now() < until {
        let lock = client.lock(name).expect("it works");
        let Ok(guard) = lock.acquire_within(Duration::from_secs(5)).await else {
            continue;
        };
        if guard.check().is_ok() {
            assert_eq!(shared.inside.fetch_add(1, SeqCst), 0, "two inside");
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

fn shared() -> Arc<Load> {
    Arc::new(Load {
        inside: AtomicU32::new(0),
        count: AtomicU64::new(0),
        last: AtomicU64::new(0),
    })
}

async fn leaders_die(kills: u32) {
    let ensemble = ensemble().await;
    let end = Instant::now() + Duration::from_secs(u64::from(kills) * 6 + 3);
    let shared = shared();
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let client = client(&ensemble.url()).await;
        tasks.push(tokio::spawn(load(client, "led", Arc::clone(&shared), end)));
    }
    for _ in 0..kills {
        sleep(Duration::from_secs(1)).await;
        let (counted, servers) = (shared.count.load(SeqCst), Arc::clone(&ensemble));
        let killed = tokio::task::spawn_blocking(move || {
            servers.until_it_serves().expect("it works");
            let leader = servers.leader().expect("one leads");
            servers.server(leader).kill().expect("it works");
            servers.until_it_serves().expect("it works");
            leader
        });
        let leader = killed.await.expect("it works");
        until(
            "it goes on under another leader",
            Duration::from_secs(15),
            || async { shared.count.load(SeqCst) > counted + 3 },
        )
        .await;
        let servers = Arc::clone(&ensemble);
        tokio::task::spawn_blocking(move || servers.server(leader).restart().expect("it works"))
            .await
            .expect("it works");
    }
    for task in tasks {
        task.await.expect("it works");
    }
    assert!(shared.count.load(SeqCst) > 0);
    let hosts = ensemble.url()["zk://".len()..].to_owned();
    until("no orphan is left", SESSION * 3, || async {
        seats(&hosts, "led").await.is_empty()
    })
    .await;
}

pub(crate) async fn two_killed_leaders_under_load_lose_nothing() {
    leaders_die(2).await;
}

pub(crate) async fn soak_twenty_killed_leaders_under_load_lose_nothing() {
    leaders_die(20).await;
}

async fn replies_are_lost(faults: u32) {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.expect("it works");
    let shared = shared();
    let end = Instant::now() + Duration::from_secs(u64::from(faults) / 2 + 4);
    let mut tasks = Vec::new();
    for at in 0..4 {
        let url = if at < 2 {
            server.url_at(proxy.addr())
        } else {
            server.url()
        };
        let client = client(&url).await;
        tasks.push(tokio::spawn(load(
            client,
            "lossy",
            Arc::clone(&shared),
            end,
        )));
    }
    for at in 0..faults {
        // Of a create, of a delete, of whatever is next.
        let needle: &[u8] = match at % 3 {
            0 => b"-lock-\0\0\0",
            1 => &[0, 0, 0, 2, 0, 0, 0],
            _ => b"/dlock/lossy",
        };
        let strike = proxy.on_next(Trigger::on(needle), Fault::CutAfterRequest);
        sleep(Duration::from_millis(400)).await;
        strike.disarm();
    }
    proxy.set_delay(Reach::All, Direction::ServerToClient, Duration::ZERO);
    for task in tasks {
        task.await.expect("it works");
    }
    assert!(shared.count.load(SeqCst) > u64::from(faults));
    let hosts = server.addr().to_string();
    until("no orphan is left", SESSION * 3, || async {
        seats(&hosts, "lossy").await.is_empty()
    })
    .await;
}

pub(crate) async fn twenty_lost_replies_under_load_lose_nothing() {
    replies_are_lost(20).await;
}

pub(crate) async fn soak_two_hundred_lost_replies_under_load_lose_nothing() {
    replies_are_lost(200).await;
}
