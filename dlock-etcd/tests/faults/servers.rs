//! Faults of one server: compaction, a full quota, expired log-ins, certificates.

use crate::bed::{
    LEASE, LONG, SECOND, ask, client, comes, driver, granted, is_refused, native, proxied, server,
    turn, waiting,
};
use dlock_conformance::testbed::{EtcdServer, Proxy, proxy::Direction};
use dlock_core::{
    Broken, Client, Clock, Effect, ErrorKind, HoldId, Lease, Owner, Severity,
    driver::{Acquire, DistributedLock, Release},
};
use dlock_etcd::{
    EtcdDriver,
    etcd_client::{self, AlarmAction, AlarmType, ConnectOptions, Permission, PermissionType},
};
use futures_util::FutureExt;
use std::time::{Duration, Instant};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_though_the_revisions_before_are_compacted() {
    let server = server(&[]).await;
    let [holder, waiter] = [client(&server.url()).await, client(&server.url()).await];
    let guard = holder
        .lock("x")
        .expect("it works")
        .acquire()
        .await
        .expect("it works");
    let lock = waiter.lock("x").expect("it works");
    let waiting = tokio::spawn(async move { lock.acquire_timeout(Duration::from_secs(30)).await });
    let mut native = native(server.addr()).await;
    let stands = async {
        while holder.admin().inspect("x").await.expect("it works").waiters != Some(1) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(10), stands)
        .await
        .expect("it works");
    for _ in 0..20 {
        let put = native.put("other", "x", None).await.expect("it works");
        let revision = put.header().expect("it works").revision();
        native.compact(revision, None).await.expect("it works");
    }
    guard.release().await.expect("it works");
    let next = timeout(Duration::from_secs(10), waiting).await;
    next.expect("it works")
        .expect("it works")
        .expect("it works")
        .release()
        .await
        .expect("it works");
}

/// The waiter's watch is set again from a revision that is compacted by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_was_cut_off_during_a_release_and_a_compaction_gets_its_turn() {
    // Leases of six seconds at least: the waiter keeps its place.
    let (server, proxy) = proxied(&["--election-timeout", "4000"]).await;
    let mut native = native(server.addr()).await;
    let [holder, waiter] = [
        driver(&server.url()).await,
        driver(&server.url_at(proxy.addr())).await,
    ];
    let mut wake_ups = waiter.wake_ups();
    let holds = ask("x", 1, LONG, LONG);
    granted(&holder.acquire(&holds).await.unwrap());
    let told = proxy.watch(Direction::ServerToClient, *b"dlock/x/");
    let waits = waiting("x", 2);
    assert!(is_refused(&waiter.acquire(&waits).await.unwrap()));
    comes("the refusal", told.reaches(1)).await;
    proxy.refuse(true);
    proxy.cut();
    let release = Release::new(holds.name, holds.owner, holds.hold);
    holder.release(&release).await.unwrap();
    let put = native.put("other", "x", None).await.unwrap();
    let revision = put.header().unwrap().revision();
    native.compact(revision, None).await.unwrap();
    proxy.heal();
    comes("its turn", turn(&mut wake_ups)).await;
    granted(&waiter.acquire(&waits).await.unwrap());
}

/// Turns on authentication, with one user.
async fn with_root(server: &EtcdServer) {
    let mut native = native(server.addr()).await;
    native.user_add("root", "canary", None).await.unwrap();
    native.role_add("root").await.unwrap();
    native.user_grant_role("root", "root").await.unwrap();
    native.auth_enable().await.unwrap();
}

/// Ends the tokens of a user by a new password, which is the old one.
async fn end_tokens(server: &EtcdServer, user: &str) {
    let root = ConnectOptions::new().with_user("root", "canary");
    let host = server.addr().to_string();
    let native = etcd_client::Client::connect([host], Some(root)).await;
    let changed = native.unwrap().user_change_password(user, "canary").await;
    changed.unwrap();
}

/// A stream of watches keeps the token with which it was opened.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_refused_because_the_token_is_over_is_set_again() {
    let server = server(&[]).await;
    with_root(&server).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = format!("etcd://root:canary@{}", proxy.addr());
    let [holder, waiter] = [driver(&url).await, driver(&url).await];
    let mut wake_ups = waiter.wake_ups();
    for (hold, name) in [(1, "first"), (2, "second")] {
        granted(&holder.acquire(&ask(name, hold, LONG, LONG)).await.unwrap());
    }
    let first = waiting("first", 3);
    assert!(is_refused(&waiter.acquire(&first).await.unwrap()));
    let log_ins = proxy.watch(Direction::ClientToServer, *b"canary");
    end_tokens(&server, "root").await;
    let second = waiting("second", 4);
    assert!(is_refused(&waiter.acquire(&second).await.unwrap()));
    assert!(log_ins.seen() > 0, "the token is over");
    let held = ask("second", 2, LONG, LONG);
    let release = Release::new(held.name, held.owner, held.hold);
    holder.release(&release).await.unwrap();
    comes("its turn", turn(&mut wake_ups)).await;
    granted(&waiter.acquire(&second).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_break_removes_keys_that_are_no_text() {
    let server = server(&[]).await;
    let mut native = native(server.addr()).await;
    let driver = driver(&server.url()).await;
    for part in ["h", "w"] {
        let key = [format!("/dlock/x/{part}/").as_bytes(), b"\xff"].concat();
        native.put(key, "x", None).await.unwrap();
        let request = ask("x", 1, LONG, LONG);
        assert!(is_refused(&driver.acquire(&request).await.unwrap()));
        let broken = driver.break_lock(&request.name, None).await.unwrap();
        assert!(
            matches!(broken, Broken::Freed { token: None }),
            "{broken:?}"
        );
        granted(&driver.acquire(&request).await.unwrap());
        let release = Release::new(request.name, request.owner, request.hold);
        driver.release(&release).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_goes_on_behind_keys_that_are_no_text() {
    let server = server(&[]).await;
    let mut native = native(server.addr()).await;
    let driver = driver(&server.url()).await;
    for last in 0..5 {
        let key = [&b"/dlock/a\xff"[..], &[last]].concat();
        native.put(key, "x", None).await.unwrap();
    }
    let request = ask("b", 1, LONG, LONG);
    granted(&driver.acquire(&request).await.unwrap());
    let (mut names, mut from) = (Vec::new(), None);
    loop {
        let page = driver.list("", from.as_ref(), 1).await.unwrap();
        names.extend(page.found.into_iter().map(|shown| shown.name));
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(names, [request.name]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_an_alarm_is_refused_and_the_error_says_what_to_do() {
    for (alarm, words) in [
        (AlarmType::Nospace, "auto-compaction"),
        (AlarmType::Corrupt, "replace the damaged one"),
    ] {
        let server = server(&[]).await;
        let mut native = native(server.addr()).await;
        let raised = native.alarm(AlarmAction::Activate, alarm, None).await;
        raised.unwrap();
        let error = EtcdDriver::connect(&server.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// A waiter that did not use its turn is looked for again and again, at intervals.
#[tokio::test(flavor = "multi_thread")]
async fn an_unused_turn_on_a_server_that_cannot_be_reached_is_looked_at_now_and_then() {
    // Leases of six seconds at least: the waiter is not given up before.
    let (server, proxy) = proxied(&["--election-timeout", "4000"]).await;
    let [holder, waiter] = [
        driver(&server.url()).await,
        driver(&server.url_at(proxy.addr())).await,
    ];
    let mut wake_ups = waiter.wake_ups();
    let holds = ask("x", 1, LONG, LONG);
    granted(&holder.acquire(&holds).await.unwrap());
    assert!(is_refused(&waiter.acquire(&waiting("x", 2)).await.unwrap()));
    let release = Release::new(holds.name, holds.owner, holds.hold);
    holder.release(&release).await.unwrap();
    comes("its turn", turn(&mut wake_ups)).await;
    proxy.refuse(true);
    proxy.cut();
    // Its turn is over after a second.
    let begin = Instant::now();
    comes("attempts", proxy.until(|counters| counters.refused >= 150)).await;
    assert!(begin.elapsed() > SECOND * 2, "it spins");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_and_keeps_what_is_held() {
    let server = server(&["--quota-backend-bytes", "1048576"]).await;
    let driver = EtcdDriver::connect(&server.url()).await.expect("it works");
    let client = client(&server.url()).await;
    let lock = client
        .lock("held")
        .expect("it works")
        .lease(Lease::renewed(LEASE));
    let guard = lock.acquire().await.expect("it works");
    let mut native = native(server.addr()).await;
    let mut count = 0;
    while native
        .put(format!("fill{count}"), vec![0; 100_000], None)
        .await
        .is_ok()
    {
        count += 1;
        assert!(count < 1_000, "the quota does not count");
    }
    let clock = Clock::boot();
    let give_up = clock.now() + Duration::from_secs(5);
    let hold = HoldId::from_bits(1);
    let lease = Lease::renewed(LEASE);
    let request = Acquire::new(
        "new".parse().expect("it works"),
        Owner::from_seed("x"),
        hold,
        lease,
        give_up,
    );
    let error = driver.acquire(&request).await.expect_err("it is refused");
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::Unknown),
        "{error}"
    );
    assert!(error.to_string().contains("quota"), "{error}");
    let found = driver.diagnose().await.expect("it works");
    let mut void = found.iter().filter(|it| it.severity == Severity::Void);
    assert!(
        void.any(|it| it.what.contains("the alarm NOSPACE is raised")),
        "{found:?}"
    );
    // Renewals write nothing.
    sleep(LEASE * 2).await;
    guard.check().expect("it works");
    guard.release().await.expect("it works");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_rights_below_the_prefix_holds_past_the_end_of_its_tokens() {
    let server = server(&["--auth-token-ttl", "1"]).await;
    let mut native = native(server.addr()).await;
    native.role_add("locker").await.expect("it works");
    let below = Permission::new(PermissionType::Readwrite, "/dlock/").with_prefix();
    native
        .role_grant_permission("locker", below)
        .await
        .expect("it works");
    for (user, role) in [("root", "root"), ("me", "locker")] {
        native
            .user_add(user, "canary", None)
            .await
            .expect("it works");
        if user == "root" {
            native.role_add("root").await.expect("it works");
        }
        native.user_grant_role(user, role).await.expect("it works");
    }
    native.auth_enable().await.expect("it works");
    let at = |login: &str| server.url().replace("etcd://", &format!("etcd://{login}@"));
    for wrong in [server.url(), at("me:wrong"), at("nobody:canary")] {
        let error = EtcdDriver::connect(&wrong)
            .await
            .expect_err("it is refused");
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    }
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let [holder, waiter] = [
        client(&format!("etcd://me:canary@{}", proxy.addr())).await,
        client(&at("me:canary")).await,
    ];
    let lock = holder
        .lock("x")
        .expect("it works")
        .lease(Lease::renewed(LEASE));
    let guard = lock.acquire().await.expect("it works");
    let lock = waiter.lock("x").expect("it works");
    let waiting = tokio::spawn(async move { lock.acquire_timeout(Duration::from_secs(30)).await });
    let log_ins = proxy.watch(Direction::ClientToServer, *b"canary");
    end_tokens(&server, "me").await;
    comes("another log-in of the holder", log_ins.reaches(1)).await;
    // Real time must pass: without renewals the hold would end.
    sleep(LEASE * 2).await;
    guard.check().expect("it works");
    guard.release().await.expect("it works");
    let next = timeout(Duration::from_secs(10), waiting).await;
    next.expect("it works")
        .expect("it works")
        .expect("it works")
        .release()
        .await
        .expect("it works");
    let elsewhere = EtcdDriver::connect(&format!("{}/elsewhere", at("me:canary"))).await;
    let elsewhere = Client::new(elsewhere.expect("it works")).expect("it works");
    let error = elsewhere
        .lock("x")
        .expect("it works")
        .acquire()
        .await
        .expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert!(!format!("{error:?}").contains("canary"), "{error:?}");
}

/// A token lasts longer with each request, so none is sent meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_was_idle_for_longer_than_its_token_lasts_logs_in_again() {
    let server = server(&["--auth-token-ttl", "1"]).await;
    with_root(&server).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let idle = driver(&format!("etcd://root:canary@{}", proxy.addr())).await;
    let mut wake_ups = idle.wake_ups();
    let root = ConnectOptions::new().with_user("root", "canary");
    let host = server.addr().to_string();
    let native = etcd_client::Client::connect([host], Some(root)).await;
    let log_ins = proxy.watch(Direction::ClientToServer, *b"canary");
    // Real time must pass. A token lasts a second, and the server looks once a second.
    sleep(SECOND * 4).await;
    let error = native.unwrap().get("x", None).await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains("invalid auth token"), "it lasts: {error}");
    let request = ask("x", 1, LONG, LONG);
    granted(&comes("the grant", idle.acquire(&request)).await.unwrap());
    assert!(log_ins.seen() > 0, "the token is over");
    let waits = waiting("x", 2);
    assert!(is_refused(&idle.acquire(&waits).await.unwrap()));
    let release = Release::new(request.name, request.owner, request.hold);
    idle.release(&release).await.unwrap();
    comes("its turn", turn(&mut wake_ups)).await;
    granted(&idle.acquire(&waits).await.unwrap());
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn both_sides_show_certificates_and_strangers_are_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates");
    let path = |file: &str| format!("{folder}/{file}");
    let (ca, cert, key) = (path("ca.pem"), path("cert.pem"), path("key.pem"));
    let options = [
        "--cert-file",
        &cert,
        "--key-file",
        &key,
        "--client-cert-auth",
        "--trusted-ca-file",
        &ca,
    ];
    let options: Vec<_> = options.iter().map(|&option| option.to_owned()).collect();
    let secure = spawn_blocking(move || {
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        EtcdServer::start(&options).expect("it works")
    });
    let secure = secure.await.expect("it works");
    let url = secure.url().replace("etcd://", "etcd+tls://");
    let url = |settings: &str| format!("{url}/dlock?{settings}");
    let known = url(&format!("dlock.ca={ca}&dlock.cert={cert}&dlock.key={key}"));
    let connected = timeout(Duration::from_secs(30), async {
        loop {
            match EtcdDriver::connect(&known).await {
                Ok(driver) => return driver,
                // It accepts connections before it has a leader.
                Err(error) => println!("{error:?}"),
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    let client = Client::new(connected.await.expect("it works")).expect("it works");
    let guard = client
        .lock("x")
        .expect("it works")
        .acquire()
        .await
        .expect("it works");
    guard.release().await.expect("it works");
    let missing = format!("dlock.ca={}", path("none.pem"));
    for (settings, kind) in [
        (format!("dlock.ca={ca}"), ErrorKind::Unavailable),
        (
            format!("dlock.cert={cert}&dlock.key={key}"),
            ErrorKind::Unavailable,
        ),
        (missing, ErrorKind::Misuse),
    ] {
        let error = EtcdDriver::connect(&url(&settings))
            .await
            .expect_err("it is refused");
        assert_eq!(error.kind(), kind, "{settings}: {error}");
    }
}

/// As in a `select!` that went elsewhere: it began to connect, and keeps its future.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_not_polled_any_more_keeps_no_other_from_the_connection() {
    let (server, proxy) = proxied(&[]).await;
    let driver = driver(&server.url_at(proxy.addr())).await;
    let name = "x".parse().unwrap();
    for _ in 0..3 {
        proxy.refuse(true);
        proxy.cut();
        driver.inspect(&name).await.unwrap_err();
        proxy.heal();
        let lasts = ask("asleep", 1, LONG, LONG);
        let mut asleep = driver.acquire(&lasts);
        assert!((&mut asleep).now_or_never().is_none());
        let others = timeout(4 * SECOND, driver.inspect(&name)).await;
        others.expect("it is answered").unwrap();
    }
}
