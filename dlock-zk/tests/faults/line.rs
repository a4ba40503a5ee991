//! Queue: the order of waiters, and processes that die in it.

use crate::bed::{SESSION, client, client_for, seats, server, take, until_in_line, waiting};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Direction, Fault, Reach, Trigger},
    worker::{self, Job, Worker},
    zookeeper::{TICK, ZooKeeperOptions},
};
use dlock_core::{
    Broken, ErrorKind, HoldId, Instant, Lease, LockName, Owner, ReleaseOutcome,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, Ticket},
};
use dlock_zk::ZkDriver;
use std::{
    iter,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant as Moment},
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
                // Holds the lock for a moment: by then the watch on its own seat is cancelled.
                sleep(Duration::from_millis(10)).await;
                guard.release().await.unwrap();
                (place, token, at)
            }));
        }
        // The first waiter of this client has its seat.
        until_in_line(&hosts, "long", at + 2).await;
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
    // One task of each client was queued when the first holder left.
    let clients_first: Vec<_> = order.iter().take(20).map(|(.., at)| *at).collect();
    assert_eq!(
        clients_first,
        (0..20).collect::<Vec<_>>(),
        "waiters are served first in, first out"
    );
    let fired = fired() - before;
    assert!(
        (releases / 2..=releases).contains(&fired),
        "{fired} watches fired at {releases} releases"
    );
}

/// The next waiter knows of all seats ahead without a request, including holds that enter while it receives
/// nothing.
pub(crate) async fn the_next_waiter_waits_for_holds_that_joined_beside_the_holder() {
    let server = server(ZooKeeperOptions::default()).await;
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let (hosts, name) = (server.addr().to_string(), "beside");
    // Repeated, because it is chance whether the waiter polls again or is notified first.
    for cut_off in iter::once(false).chain([true; 8]) {
        let first = take(&two, name).await;
        let outer = waiting(one.clone(), name);
        until_in_line(&hosts, name, 2).await;
        let mut line = seats(&hosts, name).await;
        line.sort_by_key(|file| file.split("lock-").last().map(str::to_owned));
        let ahead = line.remove(1);
        let proxy = Proxy::start(server.addr()).await.unwrap();
        // The data of the holder's seat, and that of the seat ahead, which is read with its watch.
        let data = proxy.watch(Direction::ServerToClient, "dlock 1\n");
        let next = client_for(&server.url_at(proxy.addr()), SESSION * 5).await;
        let mut next = waiting(next, name);
        let watched = timeout(SESSION * 5, data.reaches(2)).await;
        watched.expect("it queues and watches");
        let told = proxy.watch(Direction::ServerToClient, ahead.as_bytes());
        assert_eq!(first.release().await.unwrap(), ReleaseOutcome::Released);
        let (outer, _) = outer.await.unwrap();
        // The notification that the seat ahead holds the lock, and the listing that follows.
        let told = timeout(SESSION * 5, told.reaches(2)).await;
        told.expect("it lists the seats");
        // Later notifications get lost with the connection.
        proxy.blackhole(Reach::All, cut_off);
        let inner = two
            .lock(name)
            .unwrap()
            .join(&outer.pass().unwrap())
            .await
            .unwrap();
        let beside = seats(&hosts, name).await;
        let beside = beside.iter().find(|seat| seat.contains('.')).unwrap();
        let watched = proxy.watch(Direction::ClientToServer, beside.as_bytes());
        let left = ReleaseOutcome::StillHeld { holds: 1 };
        assert_eq!(outer.release().await.unwrap(), left);
        if cut_off {
            proxy.cut();
            proxy.heal();
        }
        tokio::select! {
            _ = &mut next => panic!("granted beside a live hold"),
            watched = timeout(SESSION * 5, watched.reaches(1)) => watched.expect("it polls"),
        }
        // Real time must pass: nothing may happen, even after the waiter has handled all notifications.
        sleep(SESSION / 10).await;
        assert!(!next.is_finished(), "granted beside a live hold");
        inner.check().unwrap();
        assert_eq!(inner.release().await.unwrap(), ReleaseOutcome::Released);
        let next = timeout(SESSION * 5, next).await.expect("it is served");
        next.unwrap().0.release().await.unwrap();
    }
}

/// A listing from before the watch was set is out of date as well.
pub(crate) async fn who_came_in_before_the_watch_stood_is_waited_for() {
    let server = server(ZooKeeperOptions::default()).await;
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let (hosts, name) = (server.addr().to_string(), "before");
    let outer = take(&one, name).await;
    let ahead = seats(&hosts, name).await.remove(0);
    let proxy = Proxy::start(server.addr()).await.unwrap();
    // The client first reads the seat ahead, and then watches it.
    let watch = Trigger::on(ahead).skip(1);
    let held = proxy.on_next(watch, Fault::HoldRequest);
    let next = client_for(&server.url_at(proxy.addr()), SESSION * 5).await;
    let next = waiting(next, name);
    let struck = timeout(SESSION * 5, held.struck()).await;
    struck.expect("it asks for the watch");
    let inner = two
        .lock(name)
        .unwrap()
        .join(&outer.pass().unwrap())
        .await
        .unwrap();
    let beside = seats(&hosts, name).await;
    let beside = beside.iter().find(|seat| seat.contains('.')).unwrap();
    let told = proxy.watch(Direction::ServerToClient, beside.as_bytes());
    let watched = proxy.watch(Direction::ClientToServer, beside.as_bytes());
    held.release();
    let told = timeout(SESSION * 5, told.reaches(1)).await;
    told.expect("it sees the second hold");
    let left = ReleaseOutcome::StillHeld { holds: 1 };
    assert_eq!(outer.release().await.unwrap(), left);
    let watched = timeout(SESSION * 5, watched.reaches(1)).await;
    watched.expect("it polls");
    assert!(!next.is_finished(), "granted beside a live hold");
    inner.check().unwrap();
    assert_eq!(inner.release().await.unwrap(), ReleaseOutcome::Released);
    next.await.unwrap().0.release().await.unwrap();
}

/// The listing from the end of one seat is out of date when the next seat ends.
pub(crate) async fn who_asks_after_the_release_is_not_told_of_before() {
    let server = server(ZooKeeperOptions::default()).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let connect = async |url: String| {
        let url = format!("{url}/dlock?dlock.session=12s&dlock.sessions=1");
        ZkDriver::connect(&url).await.unwrap()
    };
    let holder = connect(server.url()).await;
    let waiter = connect(server.url_at(proxy.addr())).await;
    for at in 0..10 {
        let name = LockName::new(format!("past-{at}")).unwrap();
        let ask = |owner: &str, hold| {
            let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(hold));
            Acquire::new(name.clone(), owner, hold, Lease::default(), Instant::FAR)
        };
        let release = |of: &Acquire| Release::new(name.clone(), of.owner, of.hold);
        let (first, second) = (ask("holder", 1), ask("holder", 2));
        for hold in [&first, &second] {
            let taken = holder.acquire(hold).await.unwrap();
            assert!(matches!(taken, Acquired::Granted(_)), "{taken:?}");
        }
        let mut wish = ask("waiter", 3);
        wish.ticket = Some(Ticket(NonZeroU64::MIN));
        let held = waiter.acquire(&wish).await.unwrap();
        assert!(matches!(held, Acquired::Held(_)), "{held:?}");
        // Notifications of the waiter's server come late, and so do its answers.
        let late = Duration::from_millis(10);
        proxy.set_delay(Reach::All, Direction::ServerToClient, late);
        holder.release(&release(&second)).await.unwrap();
        let held = waiter.acquire(&wish).await.unwrap();
        assert!(matches!(held, Acquired::Held(_)), "{held:?}");
        holder.release(&release(&first)).await.unwrap();
        let taken = waiter.acquire(&wish).await.unwrap();
        assert!(matches!(taken, Acquired::Granted(_)), "{taken:?}");
        proxy.heal();
    }
}

/// The broken incarnation is being released at the same time, and the next one begins.
pub(crate) async fn a_break_ends_the_incarnation_it_names_and_no_other() {
    let server = server(ZooKeeperOptions::default()).await;
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let (breaker, hosts) = (client(&server.url()).await, server.addr().to_string());
    let mut broken = 0;
    for round in 0..ROUNDS {
        let guard = take(&one, "broken").await;
        let token = guard.token();
        let next = waiting(two.clone(), "broken");
        until_in_line(&hosts, "broken", 2).await;
        let releasing = async {
            // The release comes before, during or after the break.
            sleep(Duration::from_millis(u64::from(round % 6))).await;
            guard.release().await
        };
        let admin = breaker.admin();
        let breaking = admin.break_lock("broken", Some(token));
        let (released, answer) = tokio::join!(releasing, breaking);
        let answer = answer.unwrap();
        let freed = answer == Broken::Freed { token: Some(token) };
        broken += u32::from(freed);
        let released = matches!(released, Ok(ReleaseOutcome::Released));
        assert_ne!(freed, released, "one of them ended it: {answer:?}");
        let (next, _) = next.await.unwrap();
        assert!(next.token() > token);
        assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
    }
    println!("{broken} of {ROUNDS} were broken, the others released");
}

/// The answer was lost, for example, and meanwhile the lock was broken and acquired again.
pub(crate) async fn a_repeat_of_what_was_broken_is_not_granted_beside_the_next() {
    let server = server(ZooKeeperOptions::default()).await;
    let url = format!("{}/dlock", server.url());
    let (one, two) = (
        ZkDriver::connect(&url).await.unwrap(),
        ZkDriver::connect(&url).await.unwrap(),
    );
    let name = LockName::new("repeated").unwrap();
    let ask = |hold| {
        let (owner, hold) = (
            Owner::from_seed(&format!("{hold}")),
            HoldId::from_bits(hold),
        );
        Acquire::new(name.clone(), owner, hold, Lease::default(), Instant::FAR)
    };
    let taken = one.acquire(&ask(1)).await.unwrap();
    assert!(matches!(taken, Acquired::Granted(_)), "{taken:?}");
    let broken = two.break_lock(&name, None).await.unwrap();
    assert!(matches!(broken, Broken::Freed { .. }), "{broken:?}");
    let taken = two.acquire(&ask(2)).await.unwrap();
    assert!(matches!(taken, Acquired::Granted(_)), "{taken:?}");
    let repeated = one.acquire(&ask(1)).await.unwrap();
    assert!(matches!(repeated, Acquired::Held(_)), "{repeated:?}");
}

/// One hold is released early with a minimum hold, and the last one by another client.
pub(crate) async fn a_release_for_another_client_says_how_long_the_name_is_unavailable() {
    let server = server(ZooKeeperOptions::default()).await;
    let url = format!("{}/dlock", server.url());
    let (one, two) = (
        ZkDriver::connect(&url).await.unwrap(),
        ZkDriver::connect(&url).await.unwrap(),
    );
    let (name, owner) = (LockName::new("kept").unwrap(), Owner::from_seed("kept"));
    for hold in [1, 2] {
        let hold = HoldId::from_bits(hold);
        let ask = Acquire::new(name.clone(), owner, hold, Lease::default(), Instant::FAR);
        let taken = one.acquire(&ask).await.unwrap();
        assert!(matches!(taken, Acquired::Granted(_)), "{taken:?}");
    }
    let mut first = Release::new(name.clone(), owner, HoldId::from_bits(1));
    first.min_hold = Some(SESSION * 100);
    let left = one.release(&first).await.unwrap();
    assert!(matches!(left, Released::StillHeld { .. }), "{left:?}");
    let last = Release::new(name.clone(), owner, HoldId::from_bits(2));
    let left = two.release(&last).await.unwrap();
    assert!(
        matches!(left, Released::MinHold { rest } if rest > SESSION),
        "{left:?}"
    );
}

/// The rounds of a race.
const ROUNDS: u32 = 100;

/// A process that acquires a lock, or a permit. The test kills it while it waits, or while it holds and has printed its
/// pass, which a permit does not have.
pub(crate) async fn hold(job: &Job) {
    let client = client(job.arg("url").unwrap()).await;
    let name = job.arg("name").unwrap();
    let lock = match job.arg("permits") {
        Ok(permits) => client.semaphore(name, permits.parse().unwrap()).unwrap(),
        Err(_) => client.lock(name).unwrap(),
    };
    let guard = lock.acquire().await.unwrap();
    let pass = guard
        .pass()
        .map_or_else(|_| String::new(), |pass| pass.expose());
    worker::say(&format!("holds {pass}")).unwrap();
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
    until_in_line(&hosts, name, 5).await;
    first.kill_9().await.unwrap();
    // Its seat ends with its session. Left are the seat beside it and the three waiters.
    until_in_line(&hosts, name, 4).await;
    // Real time must pass, here and below: nothing may happen.
    sleep(SESSION / 3).await;
    let none_granted =
        |waiting: &[tokio::task::JoinHandle<()>]| waiting.iter().all(|w| !w.is_finished());
    assert!(none_granted(&waiting), "granted beside a live hold");
    inner.check().unwrap();
    // A pass is valid as long as any hold of the incarnation lives.
    let last = third.lock(name).unwrap().join(&pass).await.unwrap();
    assert_eq!(last.token(), inner.token());
    assert_eq!(
        inner.release().await.unwrap(),
        ReleaseOutcome::StillHeld { holds: 1 }
    );
    sleep(SESSION / 6).await;
    assert!(none_granted(&waiting), "granted beside a live hold");
    assert_eq!(last.release().await.unwrap(), ReleaseOutcome::Released);
    for waiter in waiting {
        waiter.await.unwrap();
    }
    let late = second.lock(name).unwrap().join(&pass).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Gone);
}

/// The bound of limit L16 in GUARANTEES.md.
pub(crate) async fn killed_waiters_cost_one_session_and_two_ticks_together() {
    let server = server(ZooKeeperOptions::default()).await;
    let (hosts, name) = (server.addr().to_string(), "behind");
    let guard = take(&client(&server.url()).await, name).await;
    let arguments = [("url", &*server.url()), ("name", name)];
    let mut waiters = Vec::new();
    for at in 0..3 {
        waiters.push(Worker::spawn("hold", &arguments).unwrap());
        until_in_line(&hosts, name, at + 2).await;
    }
    let living = waiting(client(&server.url()).await, name);
    until_in_line(&hosts, name, 5).await;
    for waiter in &mut waiters {
        waiter.kill_9().await.unwrap();
    }
    let killed = Moment::now();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    let (living, taken) = living.await.unwrap();
    let (cost, bound) = (taken - killed, SESSION + 2 * TICK);
    // A busy machine gets one session more. Three sessions one after the other take longer than that.
    assert!(cost <= bound + SESSION, "{cost:?}, not {bound:?}");
    living.release().await.unwrap();
}
