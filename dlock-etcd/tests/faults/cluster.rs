//! Faults of a cluster of three: lost leaders, and a holder that is cut off.

use crate::bed::{LEASE, client, comes, driver, native, until, warnings};
use dlock_conformance::testbed::{EtcdCluster, Proxy, proxy::Reach};
use dlock_core::{Client, Guard, Lease};
use dlock_etcd::etcd_client;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};

/// What the guards of one lock claim.
#[derive(Default)]
struct Load {
    /// Until when the last guard to say so is held.
    claimed: Mutex<Option<Instant>>,
    count: AtomicU64,
    last: AtomicU64,
    over: AtomicBool,
}

impl Load {
    /// Waits until that many more holds were granted.
    async fn goes_on(&self, by: u64) {
        let counted = self.count.load(SeqCst);
        let go_on = async {
            while self.count.load(SeqCst) < counted + by {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), go_on)
            .await
            .expect("it goes on");
    }
}

/// Takes the lock again and again, and keeps it for so long or until it is lost.
async fn load(client: Client, shared: Arc<Load>, keep: Duration) {
    while !shared.over.load(SeqCst) {
        let lock = client
            .lock("led")
            .expect("it works")
            .lease(Lease::renewed(LEASE));
        let Ok(guard) = lock.acquire_timeout(Duration::from_secs(5)).await else {
            continue;
        };
        let claims = |first: bool| {
            let mut claimed = shared.claimed.lock().unwrap();
            let (now, remaining) = (Instant::now(), guard.remaining());
            if remaining.is_zero() {
                return false;
            }
            let before = claimed.replace(now + remaining);
            assert!(!first || before.is_none_or(|end| end <= now), "two inside");
            true
        };
        let until = Instant::now() + keep;
        if claims(true) {
            let before = shared.last.swap(guard.token().0, SeqCst);
            assert!(guard.token().0 > before, "a token that does not grow");
            while Instant::now() < until && claims(false) {
                sleep(keep / 100).await;
            }
            if claims(false) {
                *shared.claimed.lock().unwrap() = None;
                shared.count.fetch_add(1, SeqCst);
            }
        }
        drop(guard.release().await);
    }
}

/// What happens to a leader.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Killed,
    Stopped,
}

/// Three servers of which one after the other is lost.
#[derive(Clone)]
struct Cluster(Arc<EtcdCluster>);

impl Cluster {
    async fn start() -> Self {
        let started = spawn_blocking(|| EtcdCluster::start().unwrap()).await;
        Self(Arc::new(started.unwrap()))
    }

    async fn with<T: Send + 'static>(
        &self,
        run: impl FnOnce(&EtcdCluster) -> T + Send + 'static,
    ) -> T {
        let cluster = Arc::clone(&self.0);
        spawn_blocking(move || run(&cluster)).await.unwrap()
    }

    async fn leader(&self) -> usize {
        let leader = self.with(|cluster| {
            loop {
                if let Some(leader) = cluster.leader() {
                    break leader;
                }
            }
        });
        comes("a leader", leader).await
    }

    async fn lose(&self, at: usize, loss: Loss) {
        self.with(move |cluster| match loss {
            Loss::Killed => drop(cluster.server(at).kill().unwrap()),
            Loss::Stopped => cluster.server(at).stop().unwrap(),
        })
        .await;
    }

    async fn regain(&self, at: usize, loss: Loss) {
        self.with(move |cluster| match loss {
            Loss::Killed => cluster.server(at).restart().unwrap(),
            Loss::Stopped => cluster.server(at).cont().unwrap(),
        })
        .await;
    }
}

/// A proxy before each server, and the URL of a client that reaches the cluster only through them.
async fn proxies(cluster: &EtcdCluster) -> (Vec<Proxy>, String) {
    let mut proxies = Vec::new();
    for at in 0..3 {
        proxies.push(Proxy::start(cluster.server(at).addr()).await.unwrap());
    }
    let hosts: Vec<_> = proxies
        .iter()
        .map(|proxy| proxy.addr().to_string())
        .collect();
    (proxies, format!("etcd://{}", hosts.join(",")))
}

/// Kills and stops leaders by turns, while clients take one lock. One of them is cut off meanwhile.
async fn leaders_are_lost(times: u32) {
    let cluster = Cluster::start().await;
    let (proxies, cut_off) = proxies(&cluster.0).await;
    let (shared, mut tasks) = (Arc::new(Load::default()), JoinSet::new());
    let url = cluster.0.url();
    // The one that is cut off is mostly inside when it is.
    let moment = Duration::from_millis(2);
    for (url, keep) in [
        (&url, moment),
        (&url, moment),
        (&url, moment),
        (&cut_off, LEASE),
    ] {
        tasks.spawn(load(client(url).await, Arc::clone(&shared), keep));
    }
    for time in 0..times {
        shared.goes_on(6).await;
        let loss = [Loss::Killed, Loss::Stopped][time as usize % 2];
        let leader = cluster.leader().await;
        proxies
            .iter()
            .for_each(|proxy| proxy.blackhole(Reach::All, true));
        cluster.lose(leader, loss).await;
        // The others elect a leader, and it goes on with that.
        shared.goes_on(4).await;
        cluster.regain(leader, loss).await;
        proxies.iter().for_each(Proxy::heal);
    }
    shared.goes_on(20).await;
    shared.over.store(true, SeqCst);
    println!("{} holds, {times} leaders lost", shared.count.load(SeqCst));
    tasks.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn four_lost_leaders_under_load_lose_nothing() {
    leaders_are_lost(4).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a soak of minutes: --ignored soak_twenty runs it"]
async fn soak_twenty_lost_leaders_under_load_lose_nothing() {
    leaders_are_lost(20).await;
}

/// Takes the lock once the holder cannot be heard any more; the holder has to know of its loss before.
async fn is_lost_before_another_gets_in(holder: Guard, waiter: &Client, cut: impl AsyncFnOnce()) {
    let lock = waiter.lock("cut").unwrap().lease(Lease::renewed(LEASE));
    let holder = Arc::new(holder);
    let before = Arc::clone(&holder);
    let next = tokio::spawn(async move {
        let next = lock.acquire().await.unwrap();
        let knew = before.check().is_err();
        assert!(knew, "granted before the holder knew of its loss");
        next
    });
    until("it waits", async || {
        waiter.admin().inspect("cut").await.unwrap().waiters == Some(1)
    })
    .await;
    cut().await;
    comes("the loss", holder.lost()).await;
    let next = comes("the next holder", next).await.unwrap();
    assert!(next.token() > holder.token());
    drop(holder);
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_cut_off_while_the_leader_changes_is_lost_before_another_gets_in() {
    let cluster = Cluster::start().await;
    let (proxies, cut_off) = proxies(&cluster.0).await;
    let [holder, waiter] = [client(&cut_off).await, client(&cluster.0.url()).await];
    for loss in [Loss::Killed, Loss::Stopped] {
        let lock = holder.lock("cut").unwrap().lease(Lease::renewed(LEASE));
        let guard = comes("the lock", lock.acquire()).await.unwrap();
        let leader = cluster.leader().await;
        let cut = async || {
            proxies
                .iter()
                .for_each(|proxy| proxy.blackhole(Reach::All, true));
            cluster.lose(leader, loss).await;
        };
        is_lost_before_another_gets_in(guard, &waiter, cut).await;
        cluster.regain(leader, loss).await;
        proxies.iter().for_each(Proxy::heal);
    }
}

/// The member that the holder uses leads, stands still, and goes on when another one leads.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_member_stands_still_is_lost_before_another_gets_in() {
    let cluster = Cluster::start().await;
    let waiter = client(&cluster.0.url()).await;
    for _ in 0..2 {
        let leader = cluster.leader().await;
        let holder = client(&format!("etcd://{}", cluster.0.server(leader).addr())).await;
        let lock = holder.lock("cut").unwrap().lease(Lease::renewed(LEASE));
        let guard = comes("the lock", lock.acquire()).await.unwrap();
        let cut = async || cluster.lose(leader, Loss::Stopped).await;
        is_lost_before_another_gets_in(guard, &waiter, cut).await;
        cluster.regain(leader, Loss::Stopped).await;
    }
}

#[tokio::test]
async fn an_even_number_of_members_is_warned_about() {
    let cluster = Cluster::start().await;
    let connecting = async |at: usize| {
        let url = format!("etcd://{}", cluster.0.server(at).addr());
        warnings(async { drop(driver(&url).await) }).await
    };
    assert_eq!(connecting(0).await, "");
    let mut native = native(cluster.0.server(0).addr()).await;
    let members = native.member_list().await.unwrap();
    let status = native.status().await.unwrap();
    let stay = [status.header().unwrap().member_id(), status.leader()];
    let mut members = members.members().iter().map(etcd_client::Member::id);
    let other = members.find(|id| !stay.contains(id)).unwrap();
    // Accepted once all members are connected to each other.
    until("it is removed", async || {
        native.member_remove(other).await.is_ok()
    })
    .await;
    let warned = connecting(0).await;
    assert!(warned.contains("2 voting members"), "{warned}");
    assert!(warned.contains("add or remove one"), "{warned}");
}
