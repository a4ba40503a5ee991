//! Tests over a cluster of three masters with a replica each.

use crate::judge::Judge;
use dlock_conformance::testbed::redis_cluster::RedisCluster;
use dlock_core::{Client, ErrorKind, Lease, driver::DistributedLock};
use dlock_redis::{ClusterDriver, RedisDriver};
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::task::{JoinSet, spawn_blocking};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(10);

async fn cluster() -> Arc<RedisCluster> {
    let started = spawn_blocking(|| RedisCluster::start(3, true)).await;
    Arc::new(started.unwrap().unwrap())
}

async fn client(cluster: &RedisCluster) -> Client {
    let driver = ClusterDriver::connect(&cluster.url()).await.unwrap();
    let builder = Client::builder(Arc::new(driver)).lease(Lease::renewed(LEASE));
    builder.build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_all_masters_are_waited_for_listed_and_kept_through_failovers() {
    let cluster = cluster().await;
    let (one, two) = (client(&cluster).await, client(&cluster).await);
    let names: Vec<_> = (0..30).map(|number| format!("n{number}")).collect();

    // Handed from client to client, each by one notification or a poll.
    let judge = Arc::new(Judge::default());
    let mut tasks = JoinSet::new();
    for client in [&one, &two, &one, &two] {
        for name in &names {
            let (lock, judge) = (client.lock(name.clone()).unwrap(), Arc::clone(&judge));
            tasks.spawn(async move {
                let guard = lock.acquire_timeout(20 * SECOND).await.unwrap();
                judge.hold(&guard, SECOND / 100).await;
                guard.release().await.unwrap();
            });
        }
    }
    tasks.join_all().await;
    let verdict = judge.verdict();
    assert_eq!(
        (verdict.holds, verdict.double, verdict.backwards),
        (120, 0, 0)
    );

    let mut guards = Vec::new();
    for name in &names {
        guards.push(one.lock(name.clone()).unwrap().acquire().await.unwrap());
    }
    let driver = ClusterDriver::connect(&cluster.url()).await.unwrap();
    let (mut listed, mut from) = (HashSet::new(), None);
    loop {
        let page = driver.list("n", from.as_ref(), 10).await.unwrap();
        listed.extend(page.found.iter().map(|it| it.name.to_string()));
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(listed, names.iter().cloned().collect());

    // One shard fails over by hand, one after its master was killed.
    let shards = Arc::clone(&cluster);
    spawn_blocking(move || {
        shards.nodes()[3].command(&["CLUSTER", "FAILOVER"]).unwrap();
        shards.becomes(3, "master").unwrap();
        shards.process(1).unwrap().kill().unwrap();
        shards.becomes(4, "master").unwrap();
    })
    .await
    .unwrap();
    for (name, guard) in names.iter().zip(&guards) {
        let found = two
            .lock(name.clone())
            .unwrap()
            .acquire_timeout(20 * SECOND / 1000)
            .await;
        assert!(found.is_err(), "{name} is held");
        assert!(guard.check().is_ok(), "{name} is lost");
    }
    for guard in guards {
        let name = guard.name().clone();
        let token = guard.token();
        guard.release().await.unwrap();
        let again = two.lock(name.to_string()).unwrap();
        let again = again.acquire_timeout(10 * SECOND).await.unwrap();
        assert!(again.token() > token, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_driver_refuses_the_other_topology_and_says_which_url_to_use() {
    let started = spawn_blocking(|| RedisCluster::start(1, false)).await;
    let cluster = started.unwrap().unwrap();
    let addr = cluster.nodes()[0].addr();
    for (error, kind, words) in [
        (
            RedisDriver::connect(&format!("redis://{addr}/"))
                .await
                .unwrap_err(),
            ErrorKind::Unsupported,
            "redis+cluster://",
        ),
        (
            RedisDriver::connect(&cluster.url()).await.unwrap_err(),
            ErrorKind::Misuse,
            "ClusterDriver",
        ),
        (
            ClusterDriver::connect(&format!("redis://{addr}/"))
                .await
                .unwrap_err(),
            ErrorKind::Misuse,
            "redis+cluster://",
        ),
        (
            ClusterDriver::connect(&format!("redis+cluster://{addr}/1"))
                .await
                .unwrap_err(),
            ErrorKind::Misuse,
            "a cluster has one",
        ),
    ] {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}
