//! What breaks between a client and its servers: on one real server, and on an ensemble of three.
//!
//! This binary starts itself again as another process, so it has a `main` of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::{
    Proxy, ZooKeeperEnsemble, ZooKeeperServer,
    proxy::{Direction, Fault, Reach, Trigger},
    worker::{self, Job, Worker},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::{Client, DistributedLock, ErrorKind, Guard, LossReason, Outcome, Retry, State};
use dlock_zk::{ZkConfig, ZkDriver, zookeeper_client as native};
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    runtime::{Handle, Runtime},
    time::{sleep, timeout},
};

const SESSION: Duration = Duration::from_secs(3);
/// Only a test that hangs meets it.
const LIMIT: Duration = Duration::from_secs(600);

/// A row of a table of tests: the function's name is the test's.
macro_rules! tests {
    ($($name:ident),* $(,)?) => { [$(trial(stringify!($name), || $name())),*] };
}

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        runtime().block_on(hold(&job));
        return ExitCode::SUCCESS;
    }
    let mut trials = Vec::from(tests! {
        leases_are_sessions_and_say_so,
        holds_of_one_incarnation_go_in_any_order_while_three_wait,
        a_server_that_stands_still_past_the_session_costs_the_lock_in_time,
        a_client_cut_off_past_its_session_is_lost_before_another_holds,
        a_folder_that_the_cleaner_removed_is_made_again_and_tokens_grow,
        a_seat_that_somebody_removed_is_taken_anew_by_its_waiter,
        another_user_is_refused_by_the_nodes_acl,
        two_hundred_waiters_are_served_in_order_with_one_watch_fired_each,
        two_killed_leaders_under_load_lose_nothing,
        twenty_lost_replies_under_load_lose_nothing,
        without_a_quorum_a_holder_is_lost_in_time_and_nobody_gets_in,
        a_holder_on_a_follower_that_stands_still_is_lost_before_another_holds,
        a_second_process_keeps_the_name_when_the_first_is_killed,
        a_holder_whose_follower_was_cut_off_is_lost_before_another_holds,
        the_applications_own_session_carries_locks_as_long_as_it_lasts,
        a_client_that_was_given_a_chroot_meets_the_others_there,
    });
    // Two minutes each.
    let soaks = tests! {
        soak_twenty_killed_leaders_under_load_lose_nothing,
        soak_two_hundred_lost_replies_under_load_lose_nothing,
    };
    trials.extend(soaks.map(|soak| soak.with_ignored_flag(true)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial<F: Future<Output = ()> + Send>(
    name: &str,
    body: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        runtime().block_on(async {
            let done = timeout(LIMIT, body());
            done.await.map_err(|_| Failed::from("it hangs"))
        })
    })
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

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
    // Nor may it remove what it did not make, by whichever way.
    let other = format!("zk://you:other@{}/own", server.addr());
    let other = ZkDriver::connect(&other).await.unwrap();
    let name = guard.name();
    let error = other.break_lock(name, None).await.unwrap_err();
    assert_eq!(error.retry(), Retry::Never);
    let hosts = server.addr().to_string();
    let user = async |login: &str| {
        let user = native::Client::connector().with_auth("digest", login.as_bytes());
        user.connect(&hosts).await.unwrap()
    };
    let (me, you) = (user("me:secret").await, user("you:other").await);
    let line = me.list_children("/own/mine").await.unwrap();
    let seat = format!("/own/mine/{}", line[0]);
    assert_eq!(you.delete(&seat, None).await, Err(native::Error::NoAuth));
    assert_eq!(
        you.get_data(&seat).await.map(drop),
        Err(native::Error::NoAuth)
    );
    guard.check().unwrap();
    guard.release().await.unwrap();
}

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

async fn two_killed_leaders_under_load_lose_nothing() {
    leaders_die(2).await;
}

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

async fn twenty_lost_replies_under_load_lose_nothing() {
    replies_are_lost(20).await;
}

async fn soak_two_hundred_lost_replies_under_load_lose_nothing() {
    replies_are_lost(200).await;
}

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

/// Takes it, hands the pass to whoever started it, and stays.
async fn hold(job: &Job) {
    let client = client(job.arg("url").unwrap()).await;
    let guard = take(&client, job.arg("name").unwrap()).await;
    worker::say(&format!("holds {}", guard.pass())).unwrap();
    worker::commands().recv().await;
}

async fn a_second_process_keeps_the_name_when_the_first_is_killed() {
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

async fn a_holder_whose_follower_was_cut_off_is_lost_before_another_holds() {
    let links: Arc<Mutex<Vec<(usize, usize, Proxy)>>> = Arc::default();
    let (made, runtime) = (Arc::clone(&links), Handle::current());
    // Servers that hear nothing of each other for 8 s find nothing in it: the session ends long before.
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
    let guard = take(&holder, "follower").await;
    let waiting = tokio::spawn(async move { (take(&other, "follower").await, Instant::now()) });
    sleep(SESSION / 3).await;
    guard.check().unwrap();
    let cut_off = |on: bool| {
        for (who, whom, link) in &*links.lock().unwrap() {
            if [*who, *whom].contains(&follower) {
                link.blackhole(Reach::All, on);
            }
        }
    };
    cut_off(true);
    let reason = timeout(SESSION, guard.lost()).await.expect("lost in time");
    let lost = Instant::now();
    assert_eq!(reason, LossReason::Deadline);
    let (next, taken) = timeout(SESSION * 3, waiting)
        .await
        .expect("the session ends")
        .unwrap();
    assert!(lost < taken, "another was inside before the first one knew");
    // All the while its server answers as if it were still inside.
    let seen = timeout(SESSION / 3, reader.list_children("/dlock/follower"));
    let seen = seen.await.expect("it answers reads").unwrap();
    assert_eq!(seen.len(), 2, "{seen:?}");
    cut_off(false);
    next.release().await.unwrap();
    drop(guard);
    take(&holder, "follower").await.release().await.unwrap();
}

async fn the_applications_own_session_carries_locks_as_long_as_it_lasts() {
    let server = server(ZooKeeperOptions::default()).await;
    let (hosts, other) = (server.addr().to_string(), client(&server.url()).await);
    let own = native::Client::connector().with_session_timeout(SESSION);
    let own = own.connect(&hosts).await.unwrap();
    let driver = ZkDriver::from_client(own.clone(), ZkConfig::new(&*hosts)).await;
    let given = Client::builder(Arc::new(driver.unwrap())).build().unwrap();
    let guard = take(&given, "given").await;
    let seat = format!("/dlock/given/{}", seats(&hosts, "given").await[0]);
    let stat = own.check_stat(&seat).await.unwrap().expect("it is there");
    assert_eq!(stat.ephemeral_owner, own.session_id().0);
    let refused = other.lock("given").unwrap().try_acquire().await.unwrap();
    assert!(refused.is_none(), "held twice");
    sleep(SESSION * 4 / 3).await;
    guard.check().unwrap();
    assert_eq!(guard.release().await.unwrap(), Outcome::Released);
    // Who has it can end it, and nothing that it carried is held.
    let guard = take(&given, "given").await;
    let same = native::Client::connector().with_session(own.session().clone());
    drop(same.connect(&hosts).await.unwrap());
    let reason = timeout(SESSION, guard.lost()).await.expect("it is told");
    assert_eq!(reason, LossReason::Session);
    take(&other, "given").await.release().await.unwrap();
    let lock = given.lock("given").unwrap();
    let refused = lock.acquire_within(Duration::from_secs(1)).await;
    assert!(refused.is_err(), "granted on a session that is over");
}

async fn a_client_that_was_given_a_chroot_meets_the_others_there() {
    let server = server(ZooKeeperOptions::default()).await;
    let hosts = server.addr().to_string();
    let open = async |root: &str| {
        let driver = ZkDriver::connect(&format!("zk://{hosts}{root}?dlock.session=3s")).await;
        Client::builder(Arc::new(driver.unwrap())).build().unwrap()
    };
    let (billing, shop) = (open("/apps/billing").await, open("/apps/shop").await);
    // Roots are places of their own.
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
