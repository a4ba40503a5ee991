//! What breaks between a client and its servers: on one real server, and on an ensemble of three.

use dlock_conformance::testbed::{
    Proxy, ZooKeeperEnsemble, ZooKeeperServer,
    proxy::{Direction, Fault, Reach, Trigger},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::{Client, ErrorKind, Guard, LossReason, Outcome, State};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

const SESSION: Duration = Duration::from_secs(3);

async fn client(url: &str) -> Client {
    let url = format!("{url}/dlock?dlock.session=3s");
    let driver = ZkDriver::connect(&url).await.expect("it connects");
    Client::builder(Arc::new(driver)).build().expect("a client")
}

async fn server(options: ZooKeeperOptions) -> ZooKeeperServer {
    let start = move || ZooKeeperServer::start(options).expect("a server");
    tokio::task::spawn_blocking(start).await.expect("it starts")
}

async fn ensemble() -> Arc<ZooKeeperEnsemble> {
    let start = || ZooKeeperEnsemble::start(&ZooKeeperOptions::default()).expect("an ensemble");
    Arc::new(tokio::task::spawn_blocking(start).await.expect("it starts"))
}

async fn take(client: &Client, name: &str) -> Guard {
    let lock = client.lock(name).expect("a name");
    let taken = timeout(Duration::from_secs(20), lock.acquire()).await;
    taken.expect("in time").expect("granted")
}

/// The nodes below a name, as anybody sees them.
async fn seats(hosts: &str, name: &str) -> Vec<String> {
    let client = native::Client::connect(hosts).await.expect("it connects");
    client
        .list_children(&format!("/dlock/{name}"))
        .await
        .unwrap_or_default()
}

/// Within the bound the condition holds.
async fn until<F: Future<Output = bool>>(
    what: &str,
    bound: Duration,
    mut condition: impl FnMut() -> F,
) {
    let end = Instant::now() + bound;
    while !condition().await {
        assert!(Instant::now() < end, "not within {bound:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_sessions_and_say_so() {
    let server = server(ZooKeeperOptions::default()).await;
    let (client, other) = (client(&server.url()).await, client(&server.url()).await);
    let short = client
        .lock("short")
        .unwrap()
        .kept_lease(Duration::from_secs(1));
    let error = match short {
        Ok(lock) => lock.try_acquire().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("(1s)") && text.contains("(3s)"), "{text}");
    // A shorter fixed one ends by itself, while the guard is still there.
    let fixed = client
        .lock("fixed")
        .unwrap()
        .lease(Duration::from_millis(400))
        .unwrap();
    let guard = fixed.try_acquire().await.unwrap().expect("free");
    let next = timeout(
        Duration::from_secs(2),
        other.lock("fixed").unwrap().acquire(),
    );
    let next = next.await.expect("it ended").unwrap();
    assert_eq!(guard.state(), State::Lost(LossReason::Deadline));
    next.release().await.unwrap();
    let detached = take(&client, "bound").await.detach().unwrap_err();
    assert_eq!(detached.error.kind(), ErrorKind::Unsupported);
    assert_eq!(detached.guard.release().await.unwrap(), Outcome::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_one_incarnation_go_in_any_order_while_three_wait() {
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
        let hosts = server.addr().to_string();
        until("three stand in line", Duration::from_secs(10), || async {
            seats(&hosts, "shared").await.len() == 4
        })
        .await;
        let pass = outer.pass();
        let inner = two.lock("shared").unwrap().join(&pass).await.unwrap();
        assert_eq!(inner.token(), outer.token());
        let (first, last) = if outer_first {
            (outer, inner)
        } else {
            (inner, outer)
        };
        assert_eq!(
            first.release().await.unwrap(),
            Outcome::StillHeld { holds: 1 }
        );
        sleep(Duration::from_millis(300)).await;
        assert!(
            waiting.iter().all(|waiter| !waiter.is_finished()),
            "somebody got in beside a hold"
        );
        last.check().unwrap();
        assert_eq!(last.release().await.unwrap(), Outcome::Released);
        for waiter in waiting {
            waiter.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stands_still_past_the_session_costs_the_lock_in_time() {
    let server = server(ZooKeeperOptions::default()).await;
    let client = client(&server.url()).await;
    let guard = take(&client, "still").await;
    let process = server.process().expect("ours");
    process.stop().unwrap();
    sleep(SESSION / 6).await;
    process.cont().unwrap();
    guard.check().unwrap();
    sleep(SESSION / 2).await;
    guard.check().unwrap();
    process.stop().unwrap();
    let stopped = Instant::now();
    let reason = timeout(SESSION, guard.lost()).await.expect("lost in time");
    assert_eq!(reason, LossReason::Deadline);
    assert!(stopped.elapsed() < SESSION);
    process.cont().unwrap();
    drop(guard);
    let again = take(&client, "still").await;
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cut_off_past_its_session_is_lost_before_another_holds() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let (cut_off, other) = (
        client(&server.url_at(proxy.addr())).await,
        client(&server.url()).await,
    );
    let guard = take(&cut_off, "cut").await;
    let waiting = tokio::spawn(async move { (take(&other, "cut").await, Instant::now()) });
    sleep(SESSION / 3).await;
    proxy.blackhole(Reach::All, true);
    guard.lost().await;
    let lost = Instant::now();
    let (next, taken) = timeout(SESSION * 3, waiting)
        .await
        .expect("the session ends")
        .unwrap();
    assert!(lost < taken, "another was inside before the first one knew");
    proxy.heal();
    next.release().await.unwrap();
    let again = take(&cut_off, "cut").await;
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_the_cleaner_removed_is_made_again_and_tokens_grow() {
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
        "the cleaner has been here",
        Duration::from_secs(10),
        || async { raw.check_stat("/dlock/cleaned").await.unwrap().is_none() },
    )
    .await;
    let guard = take(&client, "cleaned").await;
    assert!(guard.token() > token);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seat_that_somebody_removed_is_taken_anew_by_its_waiter() {
    let server = server(ZooKeeperOptions::default()).await;
    let (holder, waiter) = (client(&server.url()).await, client(&server.url()).await);
    let hosts = server.addr().to_string();
    let guard = take(&holder, "removed").await;
    let waiting = tokio::spawn(async move { take(&waiter, "removed").await });
    until("it waits", Duration::from_secs(5), || async {
        seats(&hosts, "removed").await.len() == 2
    })
    .await;
    let raw = native::Client::connect(&hosts).await.unwrap();
    let mut line = seats(&hosts, "removed").await;
    line.sort_by_key(|file| file.split("lock-").last().map(str::to_owned));
    raw.delete(&format!("/dlock/removed/{}", line[1]), None)
        .await
        .unwrap();
    // Told by the watch on the seat itself: nobody ahead of it has moved.
    until("it stands in line anew", Duration::from_secs(1), || async {
        seats(&hosts, "removed").await.len() == 2
    })
    .await;
    guard.release().await.unwrap();
    let guard = timeout(Duration::from_secs(5), waiting)
        .await
        .expect("it is served")
        .unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_is_refused_by_the_nodes_acl() {
    let server = server(ZooKeeperOptions::default()).await;
    let owner = format!("zk://me:secret@{}/own?dlock.acl=creator", server.addr());
    let owner = Client::builder(Arc::new(ZkDriver::connect(&owner).await.unwrap()))
        .build()
        .unwrap();
    let guard = take(&owner, "mine").await;
    let stranger = format!("zk://{}/own", server.addr());
    let stranger = Client::builder(Arc::new(ZkDriver::connect(&stranger).await.unwrap()))
        .build()
        .unwrap();
    let error = stranger
        .lock("mine")
        .unwrap()
        .try_acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("right") || format!("{error:?}").contains("right"),
        "{error:?}"
    );
    guard.check().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_waiters_are_served_in_order_with_one_watch_fired_each() {
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

#[tokio::test(flavor = "multi_thread")]
async fn two_killed_leaders_under_load_lose_nothing() {
    leaders_die(2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: two minutes"]
async fn soak_twenty_killed_leaders_under_load_lose_nothing() {
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

#[tokio::test(flavor = "multi_thread")]
async fn twenty_lost_replies_under_load_lose_nothing() {
    replies_are_lost(20).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: two minutes"]
async fn soak_two_hundred_lost_replies_under_load_lose_nothing() {
    replies_are_lost(200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_a_holder_is_lost_in_time_and_nobody_gets_in() {
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
        .acquire_within(Duration::from_secs(1))
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

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_on_a_follower_that_stands_still_is_lost_before_another_holds() {
    let ensemble = ensemble().await;
    let follower = ensemble.follower().expect("one follows");
    let holder = client(&format!("zk://{}", ensemble.addr(follower))).await;
    let rest: Vec<_> = (0..3)
        .filter(|at| *at != follower)
        .map(|at| ensemble.addr(at).to_string())
        .collect();
    let other = client(&format!("zk://{}", rest.join(","))).await;
    let guard = take(&holder, "follower").await;
    let waiting = tokio::spawn(async move { (take(&other, "follower").await, Instant::now()) });
    sleep(SESSION / 3).await;
    ensemble.server(follower).stop().unwrap();
    guard.lost().await;
    let lost = Instant::now();
    let (next, taken) = timeout(SESSION * 3, waiting)
        .await
        .expect("the session ends")
        .unwrap();
    assert!(lost < taken, "another was inside before the first one knew");
    ensemble.server(follower).cont().unwrap();
    next.release().await.unwrap();
}
