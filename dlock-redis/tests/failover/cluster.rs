//! Tests over a cluster of three masters with a replica each.

use crate::{
    acks::{acquire, acquire_all, renew, waits},
    judge::{Judge, Verdict},
};
use dlock_conformance::testbed::{RedisServer, redis::RedisOptions, redis_cluster::RedisCluster};
use dlock_core::{
    Client, Effect, ErrorKind, Lease, Lock,
    driver::{Acquired, DistributedLock, WakeUp},
};
use dlock_redis::{RedisConfig, RedisDriver};
use futures_util::StreamExt;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::timeout,
};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);
/// After which a node calls another one down.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

async fn cluster() -> Arc<RedisCluster> {
    let started = spawn_blocking(|| RedisCluster::start(3, true, NODE_TIMEOUT)).await;
    Arc::new(started.unwrap().unwrap())
}

async fn client(cluster: &RedisCluster) -> Client {
    let driver = RedisDriver::connect(&cluster.url()).await.unwrap();
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
    let driver = RedisDriver::connect(&cluster.url()).await.unwrap();
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
        shards.fail_over_to(3).unwrap();
        shards.process(1).unwrap().kill().unwrap();
        shards.becomes(4, "master").unwrap();
    })
    .await
    .unwrap();
    // Each is renewed at the masters that are there now.
    let renewed = Instant::now() + LEASE * 98 / 100;
    for guard in &guards {
        until(async || Instant::now() + guard.remaining() > renewed).await;
    }
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
        let again = two.lock(&name).unwrap();
        let again = again.acquire_timeout(10 * SECOND).await.unwrap();
        assert!(again.token() > token, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_of_the_other_topology_is_refused_with_the_right_one() {
    let started = spawn_blocking(|| RedisCluster::start(1, false, NODE_TIMEOUT)).await;
    let cluster = started.unwrap().unwrap();
    let node = cluster.nodes()[0].addr();
    let server = RedisServer::start(RedisOptions::default()).unwrap();
    for (url, kind, words) in [
        (
            format!("redis://{node}/"),
            ErrorKind::Unsupported,
            "redis+cluster://",
        ),
        (
            format!("redis+cluster://{}/", server.addr()),
            ErrorKind::Unsupported,
            "redis://",
        ),
        (
            format!("redis+cluster://{node}/1"),
            ErrorKind::Misuse,
            "a cluster has one",
        ),
        (
            format!("redis+cluster://{node},/"),
            ErrorKind::Misuse,
            "host 2 of the URL",
        ),
        (
            "redis+cluster://127.0.0.1:1/".to_owned(),
            ErrorKind::Unavailable,
            "could not be reached",
        ),
    ] {
        let error = RedisDriver::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{url}: {error}");
        assert!(error.to_string().contains(words), "{url}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_a_cluster_are_enough_to_wait_and_to_list_and_no_right_is_missed_later() {
    let started = spawn_blocking(|| RedisCluster::start(3, false, NODE_TIMEOUT)).await;
    let cluster = started.unwrap().unwrap();
    let line = RedisConfig::RIGHTS_IN_CLUSTER.replace('\\', " ");
    let words: Vec<_> = line.split_whitespace().collect();
    for node in cluster.nodes() {
        node.command(&words).unwrap();
    }
    let url = cluster.url().replace("//", "//locker:secret@");
    let [one, two] = [over(&url, LEASE).await, over(&url, LEASE).await];
    for number in 0..6 {
        let name = format!("n{number}");
        let (mut took, mut tries) = (Duration::MAX, 0);
        // Sooner than a poll: it was notified. A time that is too long is measured again.
        while took >= SECOND {
            tries += 1;
            assert!(tries <= 3, "{name}: {took:?}");
            let guard = one.lock(name.clone()).unwrap().acquire().await.unwrap();
            let waits = two.lock(name.clone()).unwrap();
            let waiter = tokio::spawn(async move { waits.acquire_timeout(20 * SECOND).await });
            until(async || one.admin().inspect(&name).await.unwrap().waiters == Some(1)).await;
            let released = Instant::now();
            guard.release().await.unwrap();
            let guard = waiter.await.unwrap().unwrap();
            took = released.elapsed();
            guard.release().await.unwrap();
        }
    }
    let driver = RedisDriver::connect(&url).await.unwrap();
    assert!(driver.list("n", None, 10).await.is_ok());
    let found = driver.diagnose().await.unwrap();
    let bare = found
        .iter()
        .filter(|it| it.what.contains("this master has no replica"));
    assert_eq!(bare.count(), 3, "{found:?}");
    for node in cluster.nodes() {
        node.command(&["ACL", "SETUSER", "locker", "-spublish", "-ssubscribe"])
            .unwrap();
    }
    let error = RedisDriver::connect(&url).await.unwrap_err();
    assert!(error.to_string().contains("README"), "{error}");
}

/// A lock with the steps of its slot's move from master to master.
struct Moved {
    cluster: Arc<RedisCluster>,
    name: String,
    from: usize,
    slot: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begin,
    Keys,
    End,
}

impl Moved {
    async fn new(cluster: &Arc<RedisCluster>, name: &str) -> Self {
        let (asked, key) = (Arc::clone(cluster), format!("dlock:{{{name}}}"));
        let slot = spawn_blocking(move || asked.slot(&key).unwrap())
            .await
            .unwrap();
        Self {
            cluster: Arc::clone(cluster),
            name: name.to_owned(),
            from: usize::from(slot) * 3 / 16_384,
            slot,
        }
    }

    async fn go(&self, step: Step) {
        let (cluster, from, slot) = (Arc::clone(&self.cluster), self.from, self.slot);
        let (to, slots) = ((from + 1) % 3, slot..slot + 1);
        let done = spawn_blocking(move || match step {
            Step::Begin => cluster.begin_move(from, to, slots),
            Step::Keys => cluster.move_keys(from, to, slots),
            Step::End => cluster.end_move(to, slots),
        });
        done.await.unwrap().unwrap();
    }
}

/// While its slot moves, a lock is renewed, also where a replica confirms it, and it is handed on whenever it is released:
/// before the keys move, while the other master has them, or after the move.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_whose_slot_moves_is_renewed_at_every_step_and_handed_on() {
    let cluster = cluster().await;
    let lease = 9 * SECOND;
    for (number, (query, released)) in [
        ("", Step::End),
        ("dlock.replicas=1", Step::End),
        ("", Step::Begin),
        ("", Step::Keys),
    ]
    .into_iter()
    .enumerate()
    {
        let one = connected(&cluster, query, lease).await;
        let two = connected(&cluster, query, lease).await;
        let moved = Moved::new(&cluster, &format!("moved{number}")).await;
        let lock = |client: &Client| client.lock(moved.name.clone()).unwrap();
        let mut guard = Some(lock(&one).acquire().await.unwrap());
        let (waits, token) = (lock(&two), guard.as_ref().unwrap().token());
        let waiter = tokio::spawn(async move { waits.acquire_timeout(30 * SECOND).await });
        let admin = one.admin();
        until(async || admin.inspect(&moved.name).await.unwrap().waiters == Some(1)).await;
        let mut at = Instant::now();
        for step in [Step::Begin, Step::Keys, Step::End] {
            moved.go(step).await;
            // Only a renewal that is sent after the step has a later deadline.
            let renewed = Instant::now() + lease - Lease::margin(lease);
            while let Some(guard) = guard.as_ref() {
                let until = Instant::now() + guard.remaining();
                let good = guard.check();
                good.unwrap_or_else(|lost| panic!("{query} {step:?}: {lost:?}"));
                if until > renewed {
                    break;
                }
                tokio::time::sleep(SECOND / 100).await; // the watchdog renews meanwhile
            }
            if step == released {
                at = Instant::now();
                let released = guard.take().unwrap().release();
                // Where a step needs keys of both masters, it is refused until the move is over.
                tokio::spawn(async move { drop(released.await) });
            }
        }
        let next = waiter.await.unwrap().unwrap();
        println!(
            "{query} released at {released:?}: handed on in {:?}",
            at.elapsed()
        );
        assert!(next.token() > token, "{query} {released:?}");
        next.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_renewals_waits_once_at_each_master() {
    let cluster = cluster().await;
    let url = format!(
        "{}?dlock.replicas=1&dlock.replicas-timeout=60s",
        cluster.url()
    );
    let driver = RedisDriver::connect(&url).await.unwrap();
    let held = acquire_all(&driver, 30).await;
    let before: Vec<_> = cluster.nodes()[..3].iter().map(waits).collect();
    renew(&driver, &held).await;
    for (node, before) in cluster.nodes().iter().zip(before) {
        assert_eq!(waits(node), before + 1);
    }
}

/// The node that has the slot sends a request for keys of which it has none to the other one, which refuses it as long as
/// it may lack some.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_refused_where_its_slot_is_moved_to_pauses_there_before_it_fails() {
    let started = spawn_blocking(|| RedisCluster::start(3, false, NODE_TIMEOUT)).await;
    let cluster = Arc::new(started.unwrap().unwrap());
    let driver = RedisDriver::connect(&cluster.url()).await.unwrap();
    let moved = Moved::new(&cluster, "free").await;
    moved.go(Step::Begin).await;
    let refused = driver.acquire(&acquire(&moved.name)).await.unwrap_err();
    assert_eq!(refused.effect(), Effect::None, "{refused:?}");
    let at = |node: usize, error: &str| {
        let errors = cluster.nodes()[node].command(&["INFO", "errorstats"]);
        let errors = errors.unwrap().text().unwrap();
        let count = errors.lines().find_map(|line| {
            line.strip_prefix(&format!("errorstat_{error}:count="))?
                .parse()
                .ok()
        });
        count.unwrap_or(0)
    };
    let (from, to) = (moved.from, (moved.from + 1) % 3);
    assert_eq!((at(from, "ASK"), at(to, "TRYAGAIN")), (1, 20));
    moved.go(Step::End).await;
    let granted = driver.acquire(&acquire(&moved.name)).await.unwrap();
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
}

/// The old master does not answer, so it tells no waiter that the slot of its lock moved.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_again_when_another_master_takes_over_all_slots_of_theirs() {
    let started = spawn_blocking(|| RedisCluster::start(3, false, NODE_TIMEOUT)).await;
    let cluster = started.unwrap().unwrap();
    let driver = RedisDriver::connect(&cluster.url()).await.unwrap();
    let mut wake_ups = driver.wake_ups();
    cluster.process(0).unwrap().stop().unwrap();
    for verb in ["DELSLOTSRANGE", "ADDSLOTSRANGE"] {
        let words = ["CLUSTER", verb, "0", "5460"];
        cluster.nodes()[1].command(&words).unwrap();
    }
    let told = timeout(20 * SECOND, wake_ups.next()).await.unwrap();
    assert!(matches!(told, Some(WakeUp::Resync)), "{told:?}");
    cluster.process(0).unwrap().cont().unwrap();
}

async fn until(is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < 60 * SECOND);
        tokio::time::sleep(SECOND / 200).await; // between two polls
    }
}

async fn connected(cluster: &RedisCluster, query: &str, lease: Duration) -> Client {
    let url = format!("{}?{query}", cluster.url());
    over(&url, lease).await
}

async fn over(url: &str, lease: Duration) -> Client {
    let driver = RedisDriver::connect(url).await.unwrap();
    let builder = Client::builder(Arc::new(driver)).lease(Lease::renewed(lease));
    builder.build().unwrap()
}

/// Clients whose tasks take a few locks from each other all the time.
struct Load {
    judge: Arc<Judge>,
    figures: Arc<Mutex<Figures>>,
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Figures {
    granted: usize,
    failed: usize,
    lost: usize,
    errors: BTreeMap<String, usize>,
    /// When each lock was released last.
    released: HashMap<String, Instant>,
    /// From there to the next grant, where its task waited already.
    hand_offs: Vec<Duration>,
}

impl Load {
    /// Starts so many tasks over four clients, which wait for as many locks as there are tasks in each.
    async fn start(url: &str, tasks: usize, lease: Duration) -> Self {
        let mut load = Self {
            judge: Arc::default(),
            figures: Arc::default(),
            over: Arc::default(),
            tasks: JoinSet::new(),
        };
        for _ in 0..4 {
            let client = over(url, lease).await;
            for task in 0..tasks / 4 {
                let (judge, figures) = (Arc::clone(&load.judge), Arc::clone(&load.figures));
                let (over, lock) = (Arc::clone(&load.over), client.lock(format!("n{task}")));
                let work = work(lock.unwrap(), judge, figures, over);
                load.tasks.spawn(work);
            }
        }
        load
    }

    fn granted(&self) -> usize {
        self.figures.lock().unwrap().granted
    }

    async fn end(self, what: &str) -> (Verdict, Figures) {
        self.over.store(true, Relaxed);
        self.tasks.join_all().await;
        let verdict = self.judge.verdict();
        let mut figures = std::mem::take(&mut *self.figures.lock().unwrap());
        figures.hand_offs.sort();
        println!(
            "{what}: {} granted, {} failed {:?}, {} lost, {} handed on: p50 {:?}, p99 {:?}, longest {:?}; {} double for {:?}, {} tokens back",
            figures.granted,
            figures.failed,
            figures.errors,
            figures.lost,
            figures.hand_offs.len(),
            figures.percentile(50),
            figures.percentile(99),
            figures.percentile(100),
            verdict.double,
            verdict.longest,
            verdict.backwards
        );
        (verdict, figures)
    }
}

impl Figures {
    fn percentile(&self, percent: usize) -> Duration {
        let last = self.hand_offs.len().saturating_sub(1);
        let at = self.hand_offs.get(last * percent / 100);
        at.copied().unwrap_or_default()
    }
}

async fn work(lock: Lock, judge: Arc<Judge>, figures: Arc<Mutex<Figures>>, over: Arc<AtomicBool>) {
    let name = lock.name().to_string();
    while !over.load(Relaxed) {
        let began = Instant::now();
        let guard = match lock.acquire_timeout(10 * SECOND).await {
            Ok(guard) => guard,
            Err(error) => {
                let mut figures = figures.lock().unwrap();
                figures.failed += 1;
                *figures.errors.entry(error.to_string()).or_default() += 1;
                continue;
            }
        };
        {
            let mut figures = figures.lock().unwrap();
            figures.granted += 1;
            let waited = figures.released.remove(&name).filter(|at| *at > began);
            figures.hand_offs.extend(waited.map(|at| at.elapsed()));
        }
        let lost = judge.hold(&guard, SECOND / 100).await;
        figures.lock().unwrap().lost += usize::from(lost.is_some());
        figures
            .lock()
            .unwrap()
            .released
            .insert(name.clone(), Instant::now());
        drop(guard.release().await);
    }
}

/// Moves all slots of each master to the next one, and on, until the time is over. Returns how many were moved.
async fn reshard(cluster: &Arc<RedisCluster>, some: u16, until: Instant) -> usize {
    let cluster = Arc::clone(cluster);
    let moved = spawn_blocking(move || {
        let mut moved = 0;
        for round in 0.. {
            for shard in 0..3_usize {
                // A third of the slots, of which each master has one at the start.
                let (from, to) = ((shard + round) % 3, (shard + round + 1) % 3);
                let first = u16::try_from(16_384 * shard / 3).unwrap();
                let end = u16::try_from(16_384 * (shard + 1) / 3)
                    .unwrap()
                    .min(first.saturating_add(some));
                cluster.move_slots(from, to, first..end).unwrap();
                moved += usize::from(end - first);
                if Instant::now() > until {
                    return moved;
                }
            }
        }
        moved
    });
    moved.await.unwrap()
}

/// A few hundred slots move on and on under the locks of some tasks, which are held and waited for.
#[tokio::test(flavor = "multi_thread")]
async fn slots_that_move_under_load_give_no_lock_twice_and_take_none_away() {
    let cluster = cluster().await;
    let load = Load::start(&cluster.url(), 40, 3 * SECOND).await;
    // Those of the ten names are among them or not, in each shard.
    let moved = reshard(&cluster, u16::MAX, Instant::now() + 4 * SECOND).await;
    let (verdict, figures) = load.end(&format!("{moved} slots moved")).await;
    assert!(
        moved > 1_000 && figures.granted > 100,
        "{moved} {figures:?}"
    );
    assert_eq!((verdict.double, verdict.backwards, figures.lost), (0, 0, 0));
}

/// All slots are moved on and on for a minute under two hundred tasks. Before it, the same load over one server.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes: cargo test -p dlock-redis --test failover -- --ignored --nocapture reshard"]
async fn a_minute_of_resharding_costs_no_lock_and_little_time() {
    let seconds = std::env::var("DLOCK_SECONDS").ok();
    let seconds: u32 = seconds.map_or(60, |text| text.parse().unwrap());
    let server = RedisServer::start(RedisOptions::default()).unwrap();
    let load = Load::start(&server.url(), 200, 3 * SECOND).await;
    tokio::time::sleep(seconds * SECOND / 4).await; // as long as that is measured
    let (_, alone) = load.end("one server").await;
    let cluster = cluster().await;
    let load = Load::start(&cluster.url(), 200, 3 * SECOND).await;
    tokio::time::sleep(seconds * SECOND / 4).await;
    let (_, still) = load.end("a cluster whose slots stay").await;
    let load = Load::start(&cluster.url(), 200, 3 * SECOND).await;
    let moved = reshard(&cluster, u16::MAX, Instant::now() + seconds * SECOND).await;
    let (verdict, figures) = load.end(&format!("{moved} slots moved")).await;
    assert_eq!((verdict.double, verdict.backwards, figures.lost), (0, 0, 0));
    assert!(figures.failed * 100 <= figures.granted, "{figures:?}");
    println!(
        "p99 of a hand-off: {:?} alone, {:?} still, {:?} moving",
        alone.percentile(99),
        still.percentile(99),
        figures.percentile(99)
    );
}

/// Kills the master of the first shard again and again under load, and starts it again once its replica is the master.
/// Returns for each time how long no lock of that shard was granted.
async fn kill(
    cluster: &Arc<RedisCluster>,
    load: &Load,
    prober: &Client,
    count: usize,
) -> Vec<Duration> {
    let mut away = Vec::new();
    for number in 0..count {
        let (dead, next) = if number % 2 == 0 { (0, 3) } else { (3, 0) };
        let nodes = Arc::clone(cluster);
        let before = load.granted();
        let killed = spawn_blocking(move || {
            nodes.process(dead).unwrap().kill().unwrap();
            let killed = Instant::now();
            nodes.becomes(next, "master").unwrap();
            nodes.process(dead).unwrap().restart().unwrap();
            killed
        });
        let killed = killed.await.unwrap();
        let probe = prober.lock("probe").unwrap();
        let guard = probe.acquire_timeout(30 * SECOND).await.unwrap();
        away.push(killed.elapsed());
        guard.release().await.unwrap();
        let nodes = Arc::clone(cluster);
        spawn_blocking(move || nodes.is_settled(dead).unwrap())
            .await
            .unwrap();
        until(async || load.granted() > before + 10).await;
        println!(
            "{}/{count}: locks again after {:?}",
            number + 1,
            away[number]
        );
    }
    away.sort();
    away
}

/// The name of a lock in the slots of the first shard.
async fn prober(cluster: &Arc<RedisCluster>, query: &str) -> Client {
    assert_eq!(Moved::new(cluster, "probe").await.from, 0);
    connected(cluster, query, 3 * SECOND).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_is_killed_under_load_gives_no_confirmed_lock_twice() {
    let cluster = cluster().await;
    let query = "dlock.replicas=1";
    let load = Load::start(&format!("{}?{query}", cluster.url()), 40, 3 * SECOND).await;
    let prober = prober(&cluster, query).await;
    let away = kill(&cluster, &load, &prober, 2).await;
    let (verdict, _) = load.end("killed").await;
    assert!(away[1] < NODE_TIMEOUT + 20 * SECOND, "{away:?}");
    assert_eq!((verdict.double, verdict.backwards), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes: cargo test -p dlock-redis --test failover -- --ignored --nocapture killed"]
async fn masters_killed_fifty_times_give_no_confirmed_lock_twice() {
    let count = std::env::var("DLOCK_FAILOVERS").ok();
    let count: usize = count.map_or(50, |text| text.parse().unwrap());
    for query in ["", "dlock.replicas=1"] {
        let cluster = cluster().await;
        let load = Load::start(&format!("{}?{query}", cluster.url()), 40, 3 * SECOND).await;
        let prober = prober(&cluster, query).await;
        let away = kill(&cluster, &load, &prober, count).await;
        let (verdict, _) = load.end(&format!("{count} kills {query:?}")).await;
        println!(
            "locks again after p50 {:?}, longest {:?}",
            away[count / 2],
            away[count - 1]
        );
        assert_eq!(verdict.backwards, 0, "{query}");
        assert!(query.is_empty() || verdict.double == 0, "{verdict:?}");
    }
}
