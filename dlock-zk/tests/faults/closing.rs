//! Closing clients: what they must leave behind, and what they must not remove.

use crate::bed::{SESSION, client, seats, server, take, until};
use dlock_conformance::testbed::{Proxy, proxy::Reach, zookeeper::ZooKeeperOptions};
use dlock_core::{
    Clock, ErrorKind, GuardState, HoldId, Lease, LockName, LossReason, Owner, ShutdownOutcome,
    driver::{Acquire, Acquired, DistributedLock, Ticket},
};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use std::{
    future::poll_fn,
    num::NonZeroU64,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// A request that queues when it is refused.
fn waiting(name: &LockName, hold: u64) -> Acquire {
    let owner = Owner::from_seed(&format!("waits {hold}"));
    let give_up = Clock::boot().now() + Duration::from_secs(30);
    let hold = HoldId::from_bits(hold);
    let lease = Lease::renewed(SESSION);
    let mut wish = Acquire::new(name.clone(), owner, hold, lease, give_up);
    wish.ticket = Some(Ticket(NonZeroU64::MIN));
    wish
}

/// The session stays alive and proven while it has seats: a forgotten seat would stay for ever.
pub(crate) async fn a_client_that_closes_leaves_no_seat_whatever_was_under_way() {
    let server = server(ZooKeeperOptions::default()).await;
    let (hosts, holder) = (server.addr().to_string(), client(&server.url()).await);
    for asked_before in [true, false] {
        let name = LockName::new(format!("closing-{asked_before}")).unwrap();
        let guard = take(&holder, name.as_str()).await;
        let proxy = Proxy::start(server.addr()).await.unwrap();
        // One session, so that it is already open. A long one, so that closing gives up before the connection
        // does.
        let url = format!(
            "{}/dlock?dlock.session=12s&dlock.sessions=1",
            server.url_at(proxy.addr())
        );
        let driver = Arc::new(ZkDriver::connect(&url).await.unwrap());
        if asked_before {
            let answer = driver.acquire(&waiting(&name, 1)).await.unwrap();
            assert!(matches!(answer, Acquired::Held(_)), "{answer:?}");
        }
        // No packet arrives, and no connection is known to be broken.
        proxy.blackhole(Reach::All, true);
        let mut under_way = None;
        if !asked_before {
            let (driver, wish) = (Arc::clone(&driver), waiting(&name, 2));
            let mut asking = Box::pin(async move { driver.acquire(&wish).await });
            // Its first poll begins a task, which records the seat and sends the request.
            let first = poll_fn(|cx| Poll::Ready(asking.as_mut().poll(cx))).await;
            assert!(first.is_pending());
            for _ in 0..100 {
                tokio::task::yield_now().await; // the task gets there
            }
            under_way = Some(tokio::spawn(asking));
        }
        timeout(Duration::from_secs(20), driver.close())
            .await
            .expect("closing waits for no server for long");
        let late = driver.acquire(&waiting(&name, 3)).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::ShuttingDown);
        if asked_before {
            // The requests of closing are lost: the session has to end the seats.
            proxy.cut();
        }
        proxy.heal();
        if let Some(under_way) = under_way {
            let answer = timeout(SESSION * 10, under_way).await.expect("an answer");
            let answer = answer.unwrap();
            assert!(!matches!(answer, Ok(Acquired::Granted(_))), "{answer:?}");
        }
        until("only the holder's seat is left", SESSION * 10, || async {
            seats(&hosts, name.as_str()).await.len() == 1
        })
        .await;
        guard.release().await.unwrap();
    }
}

pub(crate) async fn a_holder_that_ignores_the_shutdown_keeps_its_session() {
    let server = server(ZooKeeperOptions::default()).await;
    let (leaving, other) = (client(&server.url()).await, client(&server.url()).await);
    let hosts = server.addr().to_string();
    let guard = take(&leaving, "ignored").await;
    let report = leaving.shutdown(SESSION / 10).await.unwrap();
    let rest = match report.locks.as_slice() {
        [(_, ShutdownOutcome::Left { rest })] => *rest,
        other => panic!("it should be left, is {other:?}"),
    };
    assert_eq!(guard.state(), GuardState::Lost(LossReason::Shutdown));
    // The session stays even when the client is dropped: the holder may be in the middle of its work.
    drop((guard, leaving));
    let raw = native::Client::connect(&hosts).await.unwrap();
    let seat = seats(&hosts, "ignored").await;
    assert_eq!(seat.len(), 1, "{seat:?}");
    let path = format!("/dlock/ignored/{}", seat[0]);
    let began = Instant::now();
    let session = raw.check_stat(&path).await.unwrap().expect("it is there");
    assert!(session.ephemeral_owner != 0);
    let next = take(&other, "ignored").await;
    let after = began.elapsed();
    assert!(
        after + SESSION / 10 >= rest,
        "another got in after {after:?}, {rest:?} were left"
    );
    next.release().await.unwrap();
}
