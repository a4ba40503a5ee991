//! Session costs: the number of sessions, and the requests they send.

use crate::bed::{SESSION, client, server, take, until};
use dlock_conformance::testbed::{Proxy, ZooKeeperServer, zookeeper::ZooKeeperOptions};
use dlock_core::{
    Client, LockName,
    driver::{DistributedLock, Lane},
};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use futures_util::{StreamExt, stream};
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

fn figure(server: &ZooKeeperServer, name: &str) -> u64 {
    server.figure(name).unwrap()
}

pub(crate) async fn sessions_are_opened_when_needed_and_last_as_long_as_granted() {
    let server = server(ZooKeeperOptions {
        extra_lines: vec!["maxSessionTimeout=8000".into()],
        ..ZooKeeperOptions::default()
    })
    .await;
    let connections = || figure(&server, "zk_num_alive_connections");
    // A connection that was made anew may be counted twice for a while.
    let settle = async |count: u64| {
        let what = format!("{count} connections");
        until(&what, SESSION * 10, || async { connections() == count }).await;
    };
    let before = connections();
    let url = format!("{}/dlock?dlock.session=30s&dlock.sessions=4", server.url());
    let driver = Arc::new(ZkDriver::connect(&url).await.unwrap());
    let granted = Duration::from_secs(8);
    assert_eq!(*driver.capabilities().leases.end(), granted);
    settle(before + 1).await;
    let name = |at: u32| LockName::new(format!("spread-{at}")).unwrap();
    let first = driver.lane(&name(0));
    let same: Vec<_> = (0..64)
        .filter(|at| driver.lane(&name(*at)) == first)
        .collect();
    let lanes: BTreeSet<_> = (0..64).map(|at| driver.lane(&name(at))).collect();
    assert_eq!(lanes.len(), 4, "64 names are spread over all of them");
    let client = Client::builder(driver).build().unwrap();
    let mut guards = Vec::new();
    for at in same {
        guards.push(take(&client, name(at).as_str()).await);
    }
    // The lock names of one lane have one session, besides the first one.
    let open = u64::from(first != Lane(0)) + 1;
    settle(before + open).await;
    for at in 0..64 {
        if !guards.iter().any(|guard| *guard.name() == name(at)) {
            guards.push(take(&client, name(at).as_str()).await);
        }
    }
    settle(before + 4).await;
    for guard in guards {
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
}

/// As by a program that limits the time of its start and tries again.
pub(crate) async fn a_connect_that_is_dropped_leaves_no_session() {
    let server = server(ZooKeeperOptions::default()).await;
    let before = figure(&server, "zk_num_alive_connections");
    for after in (0..60).step_by(2).map(Duration::from_millis) {
        if let Ok(driver) = timeout(after, ZkDriver::connect(&server.url())).await {
            driver.unwrap().close().await;
        }
    }
    until("no connection more than before", SESSION * 10, || async {
        figure(&server, "zk_num_alive_connections") <= before
    })
    .await;
}

pub(crate) async fn one_write_proves_a_session_for_all_that_it_carries() {
    let server = server(ZooKeeperOptions::default()).await;
    let url = format!("{}/dlock?dlock.session=12s&dlock.sessions=1", server.url());
    let driver = ZkDriver::connect(&url).await.unwrap();
    let client = Client::builder(Arc::new(driver)).build().unwrap();
    let mut guards = Vec::new();
    for at in 0..50 {
        guards.push(take(&client, &format!("carried-{at}")).await);
    }
    let raw = native::Client::connect(&server.addr().to_string())
        .await
        .unwrap();
    let versions = async || {
        let nodes = raw.list_children("/dlock").await.unwrap();
        let proof = nodes.iter().find(|node| node.starts_with('~'));
        let proof = match proof {
            Some(node) => raw.check_stat(&format!("/dlock/{node}")).await.unwrap(),
            None => None,
        };
        let seat = raw
            .list_children("/dlock/carried-0")
            .await
            .unwrap()
            .remove(0);
        let seat = raw
            .check_stat(&format!("/dlock/carried-0/{seat}"))
            .await
            .unwrap();
        (
            proof.map_or(0, |stat| stat.version + 1),
            seat.unwrap().version,
        )
    };
    let (before, _) = versions().await;
    // Real time must pass: the test measures a rate.
    sleep(SESSION * 2).await;
    let (after, of_seat) = versions().await;
    // Proofs come four times per session time-out. One write per lock would be a hundred.
    let writes = after - before;
    assert!((1..=20).contains(&writes), "{writes} writes");
    assert_eq!(of_seat, 0, "a held node is not written to");
    for guard in guards {
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
}

pub(crate) async fn a_cycle_asks_three_times() {
    let server = server(ZooKeeperOptions::default()).await;
    let client = client(&server.url()).await;
    // The folder exists, the session is open.
    take(&client, "cycle").await.release().await.unwrap();
    let packets = || figure(&server, "zk_packets_received");
    let (before, began) = (packets(), Instant::now());
    for _ in 0..200 {
        take(&client, "cycle").await.release().await.unwrap();
    }
    let asked = packets() - before;
    // At most two sessions, each with its proofs and its pings, and the query itself. A fourth request per
    // cycle would add two hundred.
    let beside = 100 + began.elapsed().as_millis() / (SESSION / 4).as_millis() * 8;
    let most = 600 + u64::try_from(beside).unwrap();
    assert!((600..=most).contains(&asked), "{asked}, {most} at most");
}

pub(crate) async fn sessions_with_thousands_of_locks_outlive_their_connections() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = server.url_at(proxy.addr());
    let url = format!("{url}/dlock?dlock.session=12s&dlock.sessions=1");
    let connect = async || {
        let driver = ZkDriver::connect(&url).await.unwrap();
        Client::builder(Arc::new(driver)).build().unwrap()
    };
    // Paths of some 100 bytes: twice what one request of the native client can register after a broken
    // connection.
    let name = |at| format!("one-of-thousands-{at:040}");
    let holder = connect().await;
    let holder = &holder;
    let taken = (0..THOUSANDS).map(|at| async move { take(holder, &name(at)).await });
    let guards: Vec<_> = stream::iter(taken).buffered(64).collect().await;
    let other = connect().await;
    let waiting: Vec<_> = (0..THOUSAND)
        .map(|at| other.lock(name(at)).unwrap())
        .map(|lock| tokio::spawn(async move { lock.acquire().await }))
        .collect();
    // Polls set the watches of waiters; holds have none.
    let watched = || async { server.figure("zk_watch_count").unwrap() >= SOME };
    until("as many are watched as may be", SESSION * 10, watched).await;
    for _ in 0..3 {
        let before = proxy.counters().accepted;
        assert!(proxy.cut() >= 2, "connections were cut");
        let are_back = proxy.until(|counters| counters.accepted >= before + 2);
        timeout(SESSION * 4, are_back)
            .await
            .expect("they come back");
        until("they are watched again", SESSION * 10, watched).await;
    }
    for guard in guards {
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
    // Waiters are served with a watch and without one.
    for waiting in waiting {
        let guard = timeout(SESSION * 20, waiting).await.unwrap().unwrap();
        guard.unwrap().release().await.unwrap();
    }
}

const THOUSANDS: u64 = 2_500;
const THOUSAND: u64 = 1_000;
/// There is room for some 1,100 watches of waiters: of a seat, and of the one ahead of it.
const SOME: u64 = 1_000;
