//! Those who wait, and a process that dies before them.

use crate::bed::{SESSION, client, client_for, seats, server, take, until_in_line, waiting};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Direction, Reach},
    worker::{self, Job, Worker},
    zookeeper::ZooKeeperOptions,
};
use dlock_core::{
    Acquire, Acquired, Broken, DistributedLock, ErrorKind, HoldId, Instant, Lease, LockName,
    Outcome, Owner, Release, Ticket,
};
use dlock_zk::ZkDriver;
use std::{
    iter,
    num::NonZeroU64,
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
        // Its first one stands there.
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

/// The one who is next knows of everybody ahead without asking: also of whoever comes in while it hears nothing.
pub(crate) async fn whoever_is_next_waits_for_those_who_came_in_beside_the_holder() {
    let server = server(ZooKeeperOptions::default()).await;
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let (hosts, name) = (server.addr().to_string(), "beside");
    // More often than once: whether it looks again or is told first is chance.
    for cut_off in iter::once(false).chain([true; 8]) {
        let outer = take(&one, name).await;
        let proxy = Proxy::start(server.addr()).await.unwrap();
        let ahead = seats(&hosts, name).await.remove(0);
        let listed = proxy.watch(Direction::ServerToClient, ahead);
        let next = client_for(&server.url_at(proxy.addr()), SESSION * 5).await;
        let mut next = waiting(next, name);
        // Once when it stands there, and once when it is told from then on.
        let told = timeout(SESSION * 5, listed.reaches(2)).await;
        told.expect("it stands and waits");
        // What it is told from here on gets lost with the connection.
        proxy.blackhole(Reach::All, cut_off);
        let inner = two.lock(name).unwrap().join(&outer.pass()).await.unwrap();
        let beside = seats(&hosts, name).await;
        let beside = beside.iter().find(|seat| seat.contains('.')).unwrap();
        let watched = proxy.watch(Direction::ClientToServer, beside.as_bytes());
        let left = Outcome::StillHeld { holds: 1 };
        assert_eq!(outer.release().await.unwrap(), left);
        if cut_off {
            proxy.cut();
            proxy.heal();
        }
        tokio::select! {
            _ = &mut next => panic!("somebody got in beside a hold"),
            watched = timeout(SESSION * 5, watched.reaches(1)) => watched.expect("it looks"),
        }
        // Time itself must pass: what is looked at is that nothing happens, also when it has acted on all that it was told.
        sleep(SESSION / 10).await;
        assert!(!next.is_finished(), "somebody got in beside a hold");
        inner.check().unwrap();
        assert_eq!(inner.release().await.unwrap(), Outcome::Released);
        let next = timeout(SESSION * 5, next).await.expect("it is served");
        next.unwrap().0.release().await.unwrap();
    }
}

/// What it was told of the line when one left is past when the next one leaves.
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
        wish.line = Some(Ticket(NonZeroU64::MIN));
        let held = waiter.acquire(&wish).await.unwrap();
        assert!(matches!(held, Acquired::Held(_)), "{held:?}");
        // What the waiter's server says comes late, and so do the answers that it waits for.
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

/// The incarnation that is broken is being released, and the next one begins.
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
            // Now before the break, now behind it, and now in its midst.
            sleep(Duration::from_millis(u64::from(round % 6))).await;
            guard.release().await
        };
        let breaking = breaker.break_lock("broken", Some(token));
        let (released, answer) = tokio::join!(releasing, breaking);
        let answer = answer.unwrap();
        let freed = answer == Broken::Freed { token: Some(token) };
        broken += u32::from(freed);
        let released = matches!(released, Ok(Outcome::Released));
        assert_ne!(freed, released, "one of them ended it: {answer:?}");
        let (next, _) = next.await.unwrap();
        assert!(next.token() > token);
        assert_eq!(next.release().await.unwrap(), Outcome::Released);
    }
    println!("{broken} of {ROUNDS} were broken, the others released");
}

/// Of a race.
const ROUNDS: u32 = 100;

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
    until_in_line(&hosts, name, 5).await;
    first.kill_9().await.unwrap();
    // Its seat ends with its session: what is left is the one beside it, and the three.
    until_in_line(&hosts, name, 4).await;
    // Time itself must pass, here and below: what is looked at is that nothing happens.
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
