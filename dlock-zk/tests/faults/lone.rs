//! Faults of one server: of its process, its network and its nodes.

use crate::bed::{
    SESSION, client, client_for, lost_before_another_holds, seats, server, take, until,
    until_in_line, waiting_behind,
};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Fault, Reach, Trigger},
    zookeeper::ZooKeeperOptions,
};
use dlock_conformance::under_test::granted;
use dlock_core::{
    Client, Clock, Effect, ErrorKind, GuardState, HoldId, Lease, LockName, LossReason, Owner,
    ReleaseOutcome,
    driver::{Acquire, DistributedLock, Release, Released},
};
use dlock_zk::{ZkConfig, ZkDriver, zookeeper_client as native};
use futures_util::TryStreamExt;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

pub(crate) async fn leases_are_sessions_and_say_so() {
    let server = server(ZooKeeperOptions::default()).await;
    let (client, other) = (client(&server.url()).await, client(&server.url()).await);
    let short = client
        .lock("short")
        .unwrap()
        .lease(Lease::renewed(Duration::from_secs(1)));
    let error = short.try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("(1s)") && text.contains("(3s)"), "{text}");
    // A shorter fixed lease ends by itself, while the guard still exists.
    let fixed = client
        .lock("fixed")
        .unwrap()
        .lease(Lease::fixed(Duration::from_millis(400)));
    let guard = fixed.acquire().await.unwrap();
    let next = timeout(
        Duration::from_secs(20),
        other.lock("fixed").unwrap().acquire(),
    );
    let next = next.await.expect("it ended").unwrap();
    // After a stall, the driver may report the end before the client's timer does.
    let state = guard.state();
    let ended = [LossReason::Deadline, LossReason::NotHeld].map(GuardState::Lost);
    assert!(ended.contains(&state), "{state:?}");
    next.release().await.unwrap();
    let detached = take(&client, "bound").await.detach().unwrap_err();
    assert_eq!(detached.error.kind(), ErrorKind::Unsupported);
    assert_eq!(
        detached.guard.release().await.unwrap(),
        ReleaseOutcome::Released
    );
}

pub(crate) async fn holds_of_one_incarnation_go_in_any_order_while_three_wait() {
    let server = server(ZooKeeperOptions::default()).await;
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    for outer_first in [true, false] {
        let outer = take(&one, "shared").await;
        let mut waiting = Vec::new();
        for _ in 0..3 {
            let waiter = client(&server.url()).await;
            waiting.push(tokio::spawn(async move {
                let guard = take(&waiter, "shared").await;
                guard.release().await.unwrap();
            }));
        }
        until_in_line(&server.addr().to_string(), "shared", 4).await;
        let pass = outer.pass().unwrap();
        let inner = two.lock("shared").unwrap().join(&pass).await.unwrap();
        assert_eq!(inner.token(), outer.token());
        let (first, last) = if outer_first {
            (outer, inner)
        } else {
            (inner, outer)
        };
        assert_eq!(
            first.release().await.unwrap(),
            ReleaseOutcome::StillHeld { holds: 1 }
        );
        // Real time must pass: nothing may happen.
        sleep(SESSION / 10).await;
        assert!(
            waiting.iter().all(|waiter| !waiter.is_finished()),
            "granted beside a live hold"
        );
        last.check().unwrap();
        assert_eq!(last.release().await.unwrap(), ReleaseOutcome::Released);
        for waiter in waiting {
            waiter.await.unwrap();
        }
    }
}

pub(crate) async fn a_hold_whose_making_was_not_answered_is_found_again() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    // A long session: a client that joins has only a third of it, which must also cover the reconnection.
    let url = server.url_at(proxy.addr());
    let (one, two) = (
        client_for(&url, SESSION * 5).await,
        client_for(&url, SESSION * 5).await,
    );
    let hosts = server.addr().to_string();
    for round in 0..6 {
        let outer = take(&one, "found").await;
        // The transaction that adds a hold: the numbers of its operation and of its first write.
        let multi = Trigger::on([0, 0, 0, 14, 0, 0, 0, 5]);
        let fault = [Fault::CutAfterRequest, Fault::CutBeforeRequest][round % 2];
        let armed = proxy.on_next(multi, fault);
        let pass = outer.pass().unwrap();
        let inner = timeout(SESSION * 10, two.lock("found").unwrap().join(&pass)).await;
        let inner = inner.expect("an answer").unwrap();
        assert!(armed.has_struck(), "it was another request");
        assert_eq!(inner.token(), outer.token());
        let seen = one.admin().inspect("found").await.unwrap();
        assert_eq!((seen.holds, seats(&hosts, "found").await.len()), (2, 2));
        let left = ReleaseOutcome::StillHeld { holds: 1 };
        assert_eq!(outer.release().await.unwrap(), left);
        inner.check().unwrap();
        assert_eq!(inner.release().await.unwrap(), ReleaseOutcome::Released);
        // The request with an unknown outcome is settled, and its seat is gone.
        until_in_line(&hosts, "found", 0).await;
        proxy.heal();
    }
}

/// The removal of what an unanswered request may have left is repeated, and meets the seat of the same hold asked again.
pub(crate) async fn the_removal_of_a_lost_request_leaves_the_seat_of_its_repeat() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = format!("{}/dlock?dlock.session=15s", server.url_at(proxy.addr()));
    let driver = ZkDriver::connect(&url).await.unwrap();
    let name: LockName = "swept".parse().unwrap();
    let ask = |hold, span| {
        let give_up = Clock::boot().now() + span;
        let (owner, hold) = (Owner::from_seed("swept"), HoldId::from_bits(hold));
        Acquire::new(
            name.clone(),
            owner,
            hold,
            Lease::renewed(SESSION * 5),
            give_up,
        )
    };
    let first = ask(1, SESSION * 10);
    granted(&driver, &first).await;
    let release = Release::new(name.clone(), first.owner, first.hold);
    let released = driver.release(&release).await.unwrap();
    assert!(matches!(released, Released::Freed), "{released:?}");

    let create = proxy.on_next(Trigger::on(b"-lock-\0\0\0"), Fault::CutBeforeRequest);
    let error = driver.acquire(&ask(2, SESSION / 30)).await.unwrap_err();
    assert!(
        create.has_struck() && error.effect() == Effect::Unknown,
        "{error}"
    );
    let removal = proxy.on_next(Trigger::on(b"/dlock/swept"), Fault::CutBeforeRequest);
    timeout(SESSION * 5, removal.struck())
        .await
        .expect("a removal to cut");
    granted(&driver, &ask(2, SESSION * 10)).await;
    // Real time must pass: nothing may happen.
    sleep(SESSION / 5).await;
    assert_eq!(driver.inspect(&name).await.unwrap().holds, 1);
}

pub(crate) async fn a_server_that_stands_still_past_the_session_costs_the_lock_in_time() {
    let server = server(ZooKeeperOptions::default()).await;
    // So long that the short stop loses no lock on a busy machine either.
    let session = SESSION * 2;
    let client = client_for(&server.url(), session).await;
    let guard = take(&client, "still").await;
    let process = server.process().expect("ours");
    // Real time must pass: so short a stop loses no lock, neither at once nor later.
    process.stop().unwrap();
    sleep(session / 12).await;
    process.cont().unwrap();
    guard.check().unwrap();
    sleep(session / 2).await;
    guard.check().unwrap();
    process.stop().unwrap();
    // No write that proves the session was sent after the stop.
    let rest = guard.remaining();
    assert!(rest <= session, "{rest:?}");
    let reason = timeout(session * 3, guard.lost()).await.expect("a loss");
    assert_eq!(reason, LossReason::Deadline);
    process.cont().unwrap();
    drop(guard);
    let again = take(&client, "still").await;
    again.release().await.unwrap();
}

pub(crate) async fn a_client_cut_off_past_its_session_is_lost_before_another_holds() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let (cut_off, other) = (
        client(&server.url_at(proxy.addr())).await,
        client(&server.url()).await,
    );
    let guard = Arc::new(take(&cut_off, "cut").await);
    let other = waiting_behind(&guard, other, "cut");
    until_in_line(&server.addr().to_string(), "cut", 2).await;
    proxy.blackhole(Reach::All, true);
    let (_, next) = lost_before_another_holds(&guard, other).await;
    proxy.heal();
    next.release().await.unwrap();
    let again = take(&cut_off, "cut").await;
    again.release().await.unwrap();
}

pub(crate) async fn a_folder_that_the_cleaner_removed_is_made_again_and_tokens_grow() {
    let server = server(ZooKeeperOptions {
        java_args: vec!["-Dznode.container.checkIntervalMs=100".into()],
        ..ZooKeeperOptions::default()
    })
    .await;
    let client = client(&server.url()).await;
    let guard = take(&client, "cleaned").await;
    let token = guard.token();
    guard.release().await.unwrap();
    let raw = native::Client::connect(&server.addr().to_string())
        .await
        .unwrap();
    until(
        "the cleaner removed the folder",
        Duration::from_secs(10),
        || async { raw.check_stat("/dlock/cleaned").await.unwrap().is_none() },
    )
    .await;
    let guard = take(&client, "cleaned").await;
    assert!(guard.token() > token);
    guard.release().await.unwrap();
}

pub(crate) async fn a_seat_that_was_removed_is_taken_anew_by_its_waiter() {
    let server = server(ZooKeeperOptions::default()).await;
    // With a long session a waiter polls every two seconds.
    let (holder, waiter) = (
        client_for(&server.url(), SESSION * 5).await,
        client_for(&server.url(), SESSION * 5).await,
    );
    let hosts = server.addr().to_string();
    let guard = take(&holder, "removed").await;
    let waiting = tokio::spawn(async move { take(&waiter, "removed").await });
    let raw = native::Client::connect(&hosts).await.unwrap();
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        until_in_line(&hosts, "removed", 2).await;
        let mut line = seats(&hosts, "removed").await;
        line.sort_by_key(|file| file.split("lock-").last().map(str::to_owned));
        let removed = line.remove(1);
        raw.delete(&format!("/dlock/removed/{removed}"), None)
            .await
            .unwrap();
        let began = Instant::now();
        until("it queues anew", SESSION * 10, || async {
            let line = seats(&hosts, "removed").await;
            line.len() == 2 && !line.contains(&removed)
        })
        .await;
        quickest = quickest.min(began.elapsed());
    }
    // Notified by the watch on the seat itself: no seat ahead of it has changed. On a busy machine, one quick
    // time is enough.
    assert!(quickest < SESSION / 3, "{quickest:?}");
    guard.release().await.unwrap();
    let guard = timeout(Duration::from_secs(5), waiting)
        .await
        .expect("it is served")
        .unwrap();
    guard.release().await.unwrap();
}

pub(crate) async fn the_applications_own_session_carries_locks_as_long_as_it_lasts() {
    let server = server(ZooKeeperOptions::default()).await;
    let (hosts, other) = (server.addr().to_string(), client(&server.url()).await);
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let own = native::Client::connector().with_session_timeout(SESSION * 2);
    let own = own.connect(&proxy.addr().to_string()).await.unwrap();
    let driver = ZkDriver::from_client(own.clone(), ZkConfig::new(&*hosts)).await;
    let given = Client::builder(Arc::new(driver.unwrap())).build().unwrap();
    let guard = take(&given, "given").await;
    let seat = format!("/dlock/given/{}", seats(&hosts, "given").await[0]);
    let stat = own.check_stat(&seat).await.unwrap().expect("it is there");
    assert_eq!(stat.ephemeral_owner, own.session_id().0);
    let refused = other.lock("given").unwrap().try_acquire().await.unwrap();
    assert!(refused.is_none(), "held twice");
    // Real time must pass: the session is the application's, twice as long, and proven all the while.
    sleep(SESSION * 8 / 3).await;
    guard.check().unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    // The owner of the session can end it, and then all its locks are lost. The two connections would compete
    // for the session.
    let guard = take(&given, "given").await;
    proxy.refuse(true);
    proxy.cut();
    let same = native::Client::connector().with_session(own.session().clone());
    drop(same.connect(&hosts).await.expect("the session goes on"));
    until("its seat is gone", SESSION, || async {
        seats(&hosts, "given").await.is_empty()
    })
    .await;
    proxy.heal();
    let reason = timeout(SESSION, guard.lost()).await.expect("it is lost");
    assert_eq!(reason, LossReason::Session);
    take(&other, "given").await.release().await.unwrap();
    let lock = given.lock("given").unwrap();
    let refused = lock.acquire_timeout(Duration::from_secs(1)).await;
    assert!(refused.is_err(), "granted on a session that is over");
}

pub(crate) async fn a_client_that_was_given_a_chroot_meets_the_others_there() {
    let server = server(ZooKeeperOptions::default()).await;
    let hosts = server.addr().to_string();
    let open = async |root: &str| {
        let driver = ZkDriver::connect(&format!("zk://{hosts}{root}?dlock.session=3s")).await;
        Client::builder(Arc::new(driver.unwrap())).build().unwrap()
    };
    let (billing, shop) = (open("/apps/billing").await, open("/apps/shop").await);
    // Different roots do not share locks.
    let (one, two) = (take(&billing, "n").await, take(&shop, "n").await);
    two.release().await.unwrap();
    let own = native::Client::connect(&hosts).await.unwrap();
    assert_eq!(own.list_children("/apps/billing/n").await.unwrap().len(), 1);
    let own = own.chroot("/apps").expect("a path");
    let config: ZkConfig = format!("zk://{hosts}/billing").parse().unwrap();
    let driver = ZkDriver::from_client(own, config).await.unwrap();
    let inside = Client::builder(Arc::new(driver)).build().unwrap();
    let lock = inside.lock("n").unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none(), "held twice");
    one.release().await.unwrap();
    take(&inside, "n").await.release().await.unwrap();
}

pub(crate) async fn roots_below_one_another_share_folders_and_no_locks() {
    let server = server(ZooKeeperOptions::default()).await;
    let open = async |root: &str| {
        let url = format!("{}{root}?dlock.session=3s", server.url());
        let driver = ZkDriver::connect(&url).await.unwrap();
        Client::builder(Arc::new(driver)).build().unwrap()
    };
    // The root of the inner client is the folder of the name `b` of the outer one.
    let (outer, inner) = (open("/a").await, open("/a/b").await);
    let seat = "x-lock-0000000000";
    let below = take(&inner, seat).await;
    // Neither queues behind the other.
    let lock = outer.lock("b").unwrap();
    let beside = lock.try_acquire().await.unwrap().expect("free");
    let shown = async |client: &Client| {
        let names = client.admin().list("").map_ok(|seen| seen.name.to_string());
        names.try_collect::<Vec<_>>().await.unwrap()
    };
    assert_eq!(shown(&outer).await, ["b"]);
    assert_eq!(shown(&inner).await, [seat]);
    assert!(lock.try_acquire().await.unwrap().is_none(), "held twice");
    beside.release().await.unwrap();
    below.check().unwrap();
    let again = inner.lock(seat).unwrap();
    assert!(again.try_acquire().await.unwrap().is_none(), "held twice");
    below.release().await.unwrap();
}
