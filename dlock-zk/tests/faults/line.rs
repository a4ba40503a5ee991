//! Those who wait, and a process that dies before them.

use crate::bed::{SESSION, client, seats, server, take, until};
use dlock_conformance::testbed::{
    worker::{self, Job, Worker},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::{ErrorKind, Outcome};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{sleep, timeout};

pub(crate) async fn two_hundred_waiters_are_served_in_order_with_one_watch_fired_each() {
    let server = server(ZooKeeperOptions::default()).await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(client(&server.url()).await);
    }
    let first = take(&clients[0], "long").await;
    let (served, hosts) = (Arc::new(AtomicU32::new(0)), server.addr().to_string());
    let mut tasks = Vec::new();
    for (at, client) in clients.iter().enumerate() {
        for _ in 0..10 {
            let (client, served) = (client.clone(), Arc::clone(&served));
            tasks.push(tokio::spawn(async move {
                let guard = client.lock("long").unwrap().acquire().await.unwrap();
                let place = served.fetch_add(1, SeqCst);
                let token = guard.token();
                // As somebody who does something: its watch on its own seat is taken back by then.
                sleep(Duration::from_millis(10)).await;
                guard.release().await.unwrap();
                (place, token, at)
            }));
        }
        until(
            "its first one stands in line",
            Duration::from_secs(10),
            || async { seats(&hosts, "long").await.len() == at + 2 },
        )
        .await;
    }
    let fired = || server.figure("zk_sum_node_deleted_watch_count").unwrap();
    let before = fired();
    first.release().await.unwrap();
    let mut order = Vec::new();
    for task in tasks {
        order.push(
            timeout(Duration::from_secs(60), task)
                .await
                .expect("all are served")
                .unwrap(),
        );
    }
    let releases = u64::try_from(order.len()).unwrap() + 1;
    order.sort_unstable();
    assert!(
        order.is_sorted_by_key(|(_, token, _)| *token),
        "tokens grow in the order of service"
    );
    // One task of each client stood in line when the first one left.
    let clients_first: Vec<_> = order.iter().take(20).map(|(.., at)| *at).collect();
    assert_eq!(
        clients_first,
        (0..20).collect::<Vec<_>>(),
        "first come, first served"
    );
    let fired = fired() - before;
    assert!(
        (releases / 2..=releases).contains(&fired),
        "{fired} watches fired at {releases} releases"
    );
}

/// Takes it, hands the pass to whoever started it, and stays.
pub(crate) async fn hold(job: &Job) {
    let client = client(job.arg("url").unwrap()).await;
    let guard = take(&client, job.arg("name").unwrap()).await;
    worker::say(&format!("holds {}", guard.pass())).unwrap();
    worker::commands().recv().await;
}

pub(crate) async fn a_second_process_keeps_the_name_when_the_first_is_killed() {
    let server = server(ZooKeeperOptions::default()).await;
    let (second, third) = (client(&server.url()).await, client(&server.url()).await);
    let (hosts, name) = (server.addr().to_string(), "killed");
    let arguments = [("url", &*server.url()), ("name", name)];
    let mut first = Worker::spawn("hold", &arguments).unwrap();
    let pass = first.expect("holds ", SESSION * 3).await.unwrap();
    let pass = pass.parse().unwrap();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let waiter = client(&server.url()).await;
        waiting.push(tokio::spawn(async move {
            let guard = take(&waiter, name).await;
            guard.release().await.unwrap();
        }));
    }
    let inner = second.lock(name).unwrap().join(&pass).await.unwrap();
    until("all stand in line", SESSION * 3, || async {
        seats(&hosts, name).await.len() == 5
    })
    .await;
    first.kill_9().await.unwrap();
    // Its seat ends with its session: what is left is the one beside it, and the three.
    until("the first one's seat is gone", SESSION * 3, || async {
        seats(&hosts, name).await.len() == 4
    })
    .await;
    sleep(SESSION / 3).await;
    let nobody = |waiting: &[tokio::task::JoinHandle<()>]| waiting.iter().all(|w| !w.is_finished());
    assert!(nobody(&waiting), "somebody got in beside a hold");
    inner.check().unwrap();
    // The door is open as long as one of them is inside, whichever.
    let last = third.lock(name).unwrap().join(&pass).await.unwrap();
    assert_eq!(last.token(), inner.token());
    assert_eq!(
        inner.release().await.unwrap(),
        Outcome::StillHeld { holds: 1 }
    );
    sleep(SESSION / 6).await;
    assert!(nobody(&waiting), "somebody got in beside a hold");
    assert_eq!(last.release().await.unwrap(), Outcome::Released);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    let late = second.lock(name).unwrap().join(&pass).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Gone);
}
