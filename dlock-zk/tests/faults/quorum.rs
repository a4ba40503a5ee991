//! Quorum faults: an ensemble of three with members missing or cut off.

use crate::bed::{
    SESSION, client, ensemble, lost_before_another_holds, take, until_in_line, waiting_behind,
};
use dlock_conformance::testbed::{
    Proxy, ZooKeeperEnsemble, proxy::Reach, zookeeper::ZooKeeperOptions,
};
use dlock_core::LossReason;
use dlock_zk::zookeeper_client as native;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{runtime::Handle, time::timeout};

pub(crate) async fn without_a_quorum_a_holder_is_lost_in_time_and_no_client_acquires() {
    let ensemble = ensemble().await;
    let (client, other) = (client(&ensemble.url()).await, client(&ensemble.url()).await);
    let guard = take(&client, "quorum").await;
    let leader = ensemble.leader().expect("one leads");
    let rest: Vec<_> = (0..3).filter(|at| *at != leader).collect();
    for at in &rest {
        ensemble.server(*at).kill().unwrap();
    }
    let reason = timeout(SESSION * 2, guard.lost())
        .await
        .expect("lost in time");
    assert_eq!(reason, LossReason::Deadline);
    let refused = other
        .lock("quorum")
        .unwrap()
        .acquire_timeout(Duration::from_secs(1))
        .await;
    assert!(refused.is_err(), "granted without a quorum");
    let servers = Arc::clone(&ensemble);
    tokio::task::spawn_blocking(move || {
        for at in rest {
            servers.server(at).restart().unwrap();
        }
        servers.until_it_serves().unwrap();
    })
    .await
    .unwrap();
    drop(guard);
    let next = take(&other, "quorum").await;
    next.release().await.unwrap();
}

pub(crate) async fn a_holder_on_a_follower_that_stands_still_is_lost_before_another_holds() {
    let ensemble = ensemble().await;
    let follower = ensemble.follower().expect("one follows");
    let holder = client(&format!("zk://{}", ensemble.addr(follower))).await;
    let rest: Vec<_> = (0..3)
        .filter(|at| *at != follower)
        .map(|at| ensemble.addr(at).to_string())
        .collect();
    let other = client(&format!("zk://{}", rest.join(","))).await;
    let guard = Arc::new(take(&holder, "follower").await);
    let other = waiting_behind(&guard, other, "follower");
    until_in_line(&rest[0], "follower", 2).await;
    ensemble.server(follower).stop().unwrap();
    let (_, next) = lost_before_another_holds(&guard, other).await;
    ensemble.server(follower).cont().unwrap();
    next.release().await.unwrap();
}

pub(crate) async fn a_holder_whose_follower_was_cut_off_is_lost_before_another_holds() {
    let links: Arc<Mutex<Vec<(usize, usize, Proxy)>>> = Arc::default();
    let (made, runtime) = (Arc::clone(&links), Handle::current());
    // Servers tolerate 8 s without contact: the session ends long before that.
    let options = ZooKeeperOptions {
        extra_lines: vec!["syncLimit=40".into()],
        ..ZooKeeperOptions::default()
    };
    let ensemble = tokio::task::spawn_blocking(move || {
        ZooKeeperEnsemble::start_seen_as(&options, |who, whom, port| {
            let proxy = runtime.block_on(Proxy::start(([127, 0, 0, 1], port).into()))?;
            let seen = proxy.addr().port();
            made.lock().unwrap().push((who, whom, proxy));
            Ok(seen)
        })
    });
    let ensemble = ensemble.await.unwrap().expect("an ensemble");
    let follower = ensemble.follower().expect("one follows");
    let near = format!("zk://{}", ensemble.addr(follower));
    let rest: Vec<_> = (0..3)
        .filter(|at| *at != follower)
        .map(|at| ensemble.addr(at).to_string())
        .collect();
    let (holder, other) = (
        client(&near).await,
        client(&format!("zk://{}", rest.join(","))).await,
    );
    let hosts = ensemble.addr(follower).to_string();
    let reader = native::Client::connect(&hosts).await.unwrap();
    let guard = Arc::new(take(&holder, "follower").await);
    let other = waiting_behind(&guard, other, "follower");
    until_in_line(&hosts, "follower", 2).await;
    guard.check().unwrap();
    let cut_off = |on: bool| {
        for (who, whom, link) in &*links.lock().unwrap() {
            if [*who, *whom].contains(&follower) {
                link.blackhole(Reach::All, on);
            }
        }
    };
    cut_off(true);
    let (reason, next) = lost_before_another_holds(&guard, other).await;
    assert_eq!(reason, LossReason::Deadline);
    // Meanwhile its server still answers as if the client held the lock.
    let seen = timeout(SESSION, reader.list_children("/dlock/follower"));
    let seen = seen.await.expect("it answers reads").unwrap();
    assert_eq!(seen.len(), 2, "{seen:?}");
    cut_off(false);
    next.release().await.unwrap();
    drop(guard);
    take(&holder, "follower").await.release().await.unwrap();
}
