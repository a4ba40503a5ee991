//! Tests of acknowledgements: a server with one replica, which can be stopped, and with a disk.

use dlock_conformance::testbed::{
    RedisServer, ServerProcess,
    redis::{Aof, RedisOptions},
};
use dlock_core::{
    Client, Clock, Effect, ErrorKind, HoldId, Lease, LossReason, Owner, RetryClass,
    driver::{Acquire, Acquired, DistributedLock, Lane, Renew, Renewed},
};
use dlock_redis::RedisDriver;
use futures_util::future::join_all;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SECOND: Duration = Duration::from_secs(1);

/// A master and its one replica.
struct Pair {
    master: RedisServer,
    replica: RedisServer,
}

impl Pair {
    async fn start() -> Self {
        let [master, replica] =
            [(); 2].map(|()| RedisServer::start(RedisOptions::default()).unwrap());
        let pair = Self { master, replica };
        pair.follow().await;
        pair
    }

    /// Makes the replica follow, and waits until it has everything.
    async fn follow(&self) {
        let port = self.master.addr().port().to_string();
        self.replica
            .command(&["REPLICAOF", "127.0.0.1", &port])
            .unwrap();
        self.until(&self.master, "state=online").await;
        self.until(&self.replica, "master_link_status:up").await;
    }

    async fn until(&self, server: &RedisServer, line: &str) {
        let began = Instant::now();
        while !info(server).contains(line) {
            assert!(began.elapsed() < 60 * SECOND, "it never says {line}");
            tokio::time::sleep(Duration::from_millis(5)).await; // between two polls
        }
    }

    fn replica(&self) -> &ServerProcess {
        self.replica.process().unwrap()
    }

    fn url(&self, query: &str) -> String {
        format!("{}?{query}", self.master.url())
    }

    async fn driver(&self, query: &str) -> RedisDriver {
        RedisDriver::connect(&self.url(query)).await.unwrap()
    }

    async fn client(&self, query: &str, lease: Duration) -> Client {
        client(self.driver(query).await, lease)
    }
}

fn client(driver: RedisDriver, lease: Duration) -> Client {
    let builder = Client::builder(Arc::new(driver)).lease(Lease::renewed(lease));
    builder.build().unwrap()
}

fn info(server: &RedisServer) -> String {
    server.command(&["INFO"]).unwrap().text().unwrap()
}

pub(crate) fn acquire(name: &str) -> Acquire {
    let give_up = Clock::boot().now() + 10 * SECOND;
    let owner = Owner::from_seed(name);
    Acquire::new(
        name.parse().unwrap(),
        owner,
        HoldId::from_bits(7),
        Lease::fixed(30 * SECOND),
        give_up,
    )
}

/// Renews what these requests acquired.
pub(crate) async fn renew(driver: &RedisDriver, held: &[Acquire]) {
    let entry = |req: &Acquire| {
        let lease = Some(req.lease.length());
        Renew::new(req.name.clone(), req.owner, req.hold, lease)
    };
    let batch: Vec<_> = held.iter().map(entry).collect();
    let give_up = Clock::boot().now() + 10 * SECOND;
    for renewed in driver.renew(Lane(0), &batch, give_up).await.unwrap() {
        assert!(matches!(renewed, Ok(Renewed::Until { .. })), "{renewed:?}");
    }
}

/// Acquires locks of these names.
pub(crate) async fn acquire_all(driver: &RedisDriver, names: usize) -> Vec<Acquire> {
    let held: Vec<_> = (0..names).map(|it| acquire(&format!("n{it}"))).collect();
    for answer in join_all(held.iter().map(|req| driver.acquire(req))).await {
        assert!(matches!(answer, Ok(Acquired::Granted(_))), "{answer:?}");
    }
    held
}

/// How often a server was asked to wait for its replicas.
pub(crate) fn waits(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).unwrap();
    let stats = stats.text().unwrap();
    let mut fields = stats.split([',', '\r', '\n']);
    let calls = fields.find_map(|field| field.strip_prefix("cmdstat_wait:calls="));
    calls.map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_wait_behind_no_acquire_and_a_batch_of_them_waits_once() {
    let pair = Pair::start().await;
    let driver = pair.driver("dlock.replicas=1&dlock.replicas-timeout=60s");
    let driver = Arc::new(driver.await);
    let held = acquire_all(&driver, 250).await;
    let before = waits(&pair.master);
    renew(&driver, &held).await;
    assert_eq!(waits(&pair.master), before + 1);
    pair.replica().stop().unwrap();
    let acquires = Arc::clone(&driver);
    let acquires = tokio::spawn(async move { acquires.acquire(&acquire("other")).await });
    pair.until(&pair.master, "blocked_clients:1").await;
    let renews = tokio::spawn(async move { renew(&driver, &held).await });
    // The renewals were executed, and wait themselves.
    pair.until(&pair.master, "blocked_clients:2").await;
    pair.replica().cont().unwrap();
    renews.await.unwrap();
    assert!(matches!(acquires.await.unwrap(), Ok(Acquired::Granted(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_no_replica_confirms_does_not_count_alone_or_in_a_batch_until_its_repeat() {
    let pair = Pair::start().await;
    let driver = pair
        .driver("dlock.replicas=1&dlock.replicas-timeout=50ms")
        .await;
    let confirmed = async |req: &Acquire| {
        // A new replica says what it has once a second.
        let began = Instant::now();
        while driver.acquire(req).await.is_err() {
            assert!(began.elapsed() < 30 * SECOND, "the replica is there");
        }
    };
    confirmed(&acquire("kept")).await;
    pair.replica().stop().unwrap();
    let requests: Vec<_> = (0..60)
        .map(|number| acquire(&format!("n{number}")))
        .collect();
    for asked in [&requests[..1], &requests] {
        for answer in join_all(asked.iter().map(|req| driver.acquire(req))).await {
            let error = answer.unwrap_err();
            assert_eq!(
                (error.kind(), error.retry(), error.effect()),
                (ErrorKind::Unavailable, RetryClass::Later, Effect::Unknown),
                "{error:?}"
            );
            let text = error.to_string();
            assert!(
                text.contains("0 of 1 replicas confirmed within 50ms"),
                "{text}"
            );
        }
    }
    // A release here could end what a repeat is granted: that is the core's, which sends no repeat after it.
    let page = driver.list("", None, 1_000).await.unwrap();
    assert_eq!(page.found.len(), 1 + requests.len(), "{page:?}");
    pair.replica().cont().unwrap();
    pair.until(&pair.master, "state=online").await;
    confirmed(&requests[0]).await;
}

/// What is not confirmed is asked for again and again, and each repeat may be the last: none of the attempts before may
/// take away what it was granted.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_is_confirmed_late_is_held_and_one_that_is_not_is_released() {
    let pair = Pair::start().await;
    let lease = 3 * SECOND;
    // The replica is late in the first attempt, whose time is up while it waits.
    let client = pair
        .client("dlock.replicas=1&dlock.replicas-timeout=999ms", lease)
        .await;
    let lock = client.lock("a").unwrap();
    for _ in 0..3 {
        let began = Instant::now();
        pair.replica().stop().unwrap();
        let acquiring = lock.acquire_timeout(30 * SECOND);
        let confirming = async {
            tokio::time::sleep(SECOND * 21 / 20).await; // into the second attempt
            pair.replica().cont().unwrap();
        };
        let guard = tokio::join!(acquiring, confirming).0.unwrap();
        if let Err(error) = guard.release().await {
            assert!(began.elapsed() > lease, "{error}");
        }
    }
    pair.replica().stop().unwrap();
    let lock = lock.lease(Lease::renewed(20 * lease));
    let failed = lock.acquire_timeout(SECOND).await;
    assert!(failed.is_err(), "{failed:?}");
    let plain = pair.client("", lease).await;
    let free = plain.lock("a").unwrap().acquire_timeout(10 * lease).await;
    free.unwrap().release().await.unwrap();
}

/// Newer servers wait for the last write of the connection only.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_that_finds_its_hold_is_not_confirmed_by_having_nothing_to_write() {
    let pair = Pair::start().await;
    let plain = pair.driver("").await;
    let confirmed = pair
        .driver("dlock.replicas=1&dlock.replicas-timeout=50ms")
        .await;
    pair.replica().stop().unwrap();
    // As if its answer had been lost.
    assert!(matches!(
        plain.acquire(&acquire("a")).await.unwrap(),
        Acquired::Granted(_)
    ));
    let error = confirmed.acquire(&acquire("a")).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_whose_replica_stopped_is_lost_in_time_and_others_are_renewed() {
    let pair = Pair::start().await;
    let lease = 5 * SECOND;
    let confirmed = pair
        .client("dlock.replicas=1&dlock.replicas-timeout=50ms", lease)
        .await;
    let plain = pair.client("", lease).await;
    let other = plain.lock("plain").unwrap().acquire().await.unwrap();
    let guard = confirmed
        .lock("confirmed")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    pair.replica().stop().unwrap();
    let stopped = Instant::now();
    let lost = async {
        while guard.check().is_ok() {
            let until = Instant::now() + guard.remaining();
            assert!(until <= stopped + lease, "a renewal counts unconfirmed");
            tokio::time::sleep(Duration::from_millis(10)).await; // the watchdog renews meanwhile
        }
        guard.lost().await
    };
    let reason = tokio::time::timeout(10 * lease, lost).await.unwrap();
    // The master answers each renewal: what it says is no proof that the lock is gone.
    assert!(!matches!(reason, LossReason::NotHeld), "{reason:?}");
    drop(guard); // its release makes the lock free sooner
    // Only a renewal that is sent a lease after the stop has a later deadline.
    let renewed = stopped + 2 * lease - Lease::margin(lease);
    loop {
        let until = Instant::now() + other.remaining();
        other.check().unwrap();
        if until > renewed {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // the watchdog renews meanwhile
    }
    pair.replica().cont().unwrap();
    let again = confirmed
        .lock("confirmed")
        .unwrap()
        .acquire_timeout(30 * SECOND)
        .await;
    again.unwrap().release().await.unwrap();
}

/// What a failover loses: the limit L2, with and without acknowledgement.
#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_grants_again_what_it_lacks_and_nothing_that_it_confirmed() {
    let pair = Pair::start().await;
    let lease = 6 * SECOND;
    let confirmed = pair.client("dlock.replicas=1", lease).await;
    let plain = pair.client("", lease).await;
    let kept = confirmed.lock("kept").unwrap().acquire().await.unwrap();
    // A dead link between the two, which neither notices for a while.
    pair.replica.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let lost = plain.lock("lost").unwrap().acquire().await.unwrap();
    // No replica confirms it, so it fails at the end of its time: a third of its lease.
    let refused = confirmed.lock("refused").unwrap();
    let failed = refused
        .lease(Lease::renewed(3 * SECOND))
        .try_acquire()
        .await;
    pair.master.process().unwrap().kill().unwrap();
    let died = Instant::now();
    assert!(lost.remaining() <= lease, "{:?}", lost.remaining());
    let driver = RedisDriver::connect(&pair.replica.url()).await.unwrap();
    // Requests that are not repeated have a third of that time, or 5 s.
    let promoted = client(driver, 30 * SECOND);
    assert!(
        promoted
            .lock("kept")
            .unwrap()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let second = promoted
        .lock("lost")
        .unwrap()
        .try_acquire()
        .await
        .unwrap()
        .unwrap();
    lost.check().unwrap();
    assert!(second.token() > lost.token());
    let ended = tokio::time::timeout(10 * lease, lost.lost()).await;
    ended.expect("its lease ends");
    let overlap = died.elapsed();
    println!(
        "without acknowledgement: two holders for {overlap:?} after the kill, of a lease of {lease:?}"
    );
    // It was granted by a master without replicas.
    assert!(failed.is_err(), "{failed:?}");
    kept.lost().await;
    let free = promoted
        .lock("kept")
        .unwrap()
        .acquire_timeout(2 * lease)
        .await;
    free.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_confirms_where_the_server_can_tell_and_else_connect_is_refused() {
    let [off, always] = [Aof::Off, Aof::Always].map(|aof| {
        let options = RedisOptions {
            aof,
            ..RedisOptions::default()
        };
        RedisServer::start(options).unwrap()
    });
    let connect = async |server: &RedisServer| {
        RedisDriver::connect(&format!("{}?dlock.fsync=true", server.url())).await
    };
    let mut refused = vec![connect(&off).await.unwrap_err()];
    match connect(&always).await {
        Err(error) => refused.push(error),
        Ok(driver) => {
            let answer = driver.acquire(&acquire("a")).await.unwrap();
            assert!(matches!(answer, Acquired::Granted(_)));
        }
    }
    for error in &refused {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains("WAITAOF") && text.contains("appendonly"),
            "{text}"
        );
    }
    let knows = always.command(&["COMMAND", "INFO", "WAITAOF"]).unwrap();
    let knows = format!("{knows:?}").contains("waitaof");
    assert_eq!(refused.len(), if knows { 1 } else { 2 }, "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_may_not_wait_is_told_which_right_is_missing() {
    let server = RedisServer::start(RedisOptions::default()).unwrap();
    let user = [
        "ACL", "SETUSER", "locker", "on", ">pw", "~*", "&*", "+@all", "-wait",
    ];
    server.command(&user).unwrap();
    let url = format!("redis://locker:pw@{}/?dlock.replicas=1", server.addr());
    let error = RedisDriver::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("+wait"), "{error}");
}
