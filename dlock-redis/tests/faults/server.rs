//! Tests of servers that forget, stop, restart or refuse, and of network paths that die.

use crate::bed::{SECOND, Testbed};
use dlock_conformance::{
    testbed::{RedisServer, redis::RedisOptions},
    under_test::lasts,
};
use dlock_core::{
    Effect, ErrorKind, Owner, RetryClass,
    driver::{Acquired, DistributedLock, Lane, Released, Renew},
};
use dlock_redis::RedisDriver;
use std::{
    fmt::{Debug, Write},
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_were_flushed_are_loaded_again_unseen() {
    let t = Testbed::start().await;
    for _ in 0..3 {
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        let req = t.acquire("a", SECOND * 30);
        t.granted(&req).await;
        let () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut t.raw().await)
            .await
            .unwrap();
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced_before_the_next_request() {
    let t = Testbed::start().await;
    for _ in 0..5 {
        t.kill("normal").await;
        let req = t.acquire("a", SECOND * 30);
        // The client may notice the kill only with this request in flight. Then the effect is unknown,
        // and the repeat shows it.
        if let Err(error) = t.driver.acquire(&req).await {
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::Unknown),
                "{error:?}"
            );
        }
        t.granted(&req).await;
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_restarted_server_until_its_give_up() {
    let t = Testbed::start().await;
    t.process().kill().unwrap();
    let mut hasty = t.acquire("a", SECOND);
    t.ends(&mut hasty, 200);
    // The first request may still find the old connection; the second finds none.
    t.driver.acquire(&hasty).await.unwrap_err();
    t.ends(&mut hasty, 200);
    let error = t.driver.acquire(&hasty).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Later, Effect::None),
        "{error:?}"
    );
    let mut patient = t.acquire("a", SECOND);
    t.ends(&mut patient, 10_000);
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let (driver, req) = (t.driver.clone(), patient.clone());
            tokio::spawn(async move { driver.acquire(&req).await })
        })
        .collect();
    t.process().restart().unwrap();
    for waiting in waiting {
        assert!(matches!(
            waiting.await.unwrap().unwrap(),
            Acquired::Granted(_)
        ));
    }
    let raw = t.raw().await;
    let ask = async |what: [&str; 2]| -> redis::Value {
        let mut cmd = redis::cmd(what[0]);
        cmd.arg(what[1])
            .query_async(&mut raw.clone())
            .await
            .unwrap()
    };
    // The connection for notifications reconnects in its own time, and looks like a command connection
    // until it is subscribed.
    t.until(async || ask(["PUBSUB", "CHANNELS"]).await != redis::Value::Array(Vec::new()))
        .await;
    let clients: String = redis::from_redis_value(ask(["CLIENT", "LIST"]).await).unwrap();
    let commands = clients.lines().filter(|line| line.contains(" sub=0 "));
    assert_eq!(commands.count(), 2, "one reconnect for all:\n{clients}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lay_in_a_stopped_server_is_refused_when_it_goes_on() {
    let t = Testbed::start().await;
    let mut req = t.acquire("a", SECOND * 30);
    let held = t.acquire("b", SECOND * 10);
    t.granted(&held).await;
    t.process().stop().unwrap();
    t.ends(&mut req, 100);
    let entry = [Renew::new(
        held.name.clone(),
        held.owner,
        held.hold,
        Some(SECOND * 30),
    )];
    let acquired = tokio::time::timeout(Duration::from_millis(150), t.driver.acquire(&req));
    let renewed = tokio::time::timeout(
        Duration::from_millis(150),
        t.driver.renew(Lane(0), &entry, req.give_up),
    );
    let (acquired, renewed) = tokio::join!(acquired, renewed);
    assert!(acquired.is_err() && renewed.is_err());
    t.sleep(200).await;
    t.process().cont().unwrap();
    // Answers come in the order of requests, so both requests are over when this one is.
    t.inspect("a").await;
    assert!(!t.exists("dlock:{a}").await && !t.exists("dlock:{a}:token").await);
    assert!(t.rest("b").await <= SECOND * 10);
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deaf_connection_is_left_and_a_stopped_server_goes_on() {
    let t = Testbed::start().await;
    t.process().stop().unwrap();
    let mut req = t.acquire("a", SECOND * 30);
    t.ends(&mut req, 1_200);
    tokio::time::timeout(Duration::from_millis(1_200), t.driver.acquire(&req))
        .await
        .unwrap_err();
    t.process().cont().unwrap();
    t.granted(&t.acquire("b", SECOND)).await;
    t.granted(&t.acquire("c", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_refuses_without_effect_until_it_is_a_master_again() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let () = redis::cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(1)
        .query_async(&mut raw)
        .await
        .unwrap();
    for _ in 0..3 {
        let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, RetryClass::Later, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains("replica"), "{error}");
    }
    let () = redis::cmd("REPLICAOF")
        .arg("NO")
        .arg("ONE")
        .query_async(&mut raw)
        .await
        .unwrap();
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_a_cluster_is_unsupported_at_connect() {
    let mut tries = 0;
    let server = loop {
        tries += 1;
        // The default port of the cluster bus is so far above the other one that it may not exist. This
        // one may be taken.
        let bus = fastrand::u16(12_000..21_000).to_string();
        let words = ["--cluster-enabled", "yes", "--cluster-port", &bus];
        let started = RedisServer::start(RedisOptions {
            extra_args: words.map(str::to_owned).to_vec(),
            ..RedisOptions::default()
        });
        match started {
            Err(_) if tries < 5 => {}
            started => break started.unwrap(),
        }
    };
    // Both for a node that serves all slots and one that serves none.
    for step in ["alone", "with all slots"] {
        let error = RedisDriver::connect(&server.url()).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unsupported, RetryClass::Never, Effect::None),
            "{step}: {error:?}"
        );
        assert!(error.to_string().contains("cluster"), "{step}: {error}");
        let slots = ["CLUSTER", "ADDSLOTSRANGE", "0", "16383"];
        drop(server.command(&slots));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_without_effect_and_renews_what_is_held() {
    let t = Testbed::start().await;
    let alone = t.acquire("alone", SECOND * 30);
    let mut permit = t.acquire("permit", SECOND * 30);
    permit.owner = Owner::permits(NonZeroU32::MIN.saturating_add(1));
    let first = t.acquire("entered", SECOND * 30);
    t.granted(&first).await;
    let entered = t.again(&first, SECOND * 30);
    for req in [&alone, &permit, &entered] {
        t.granted(req).await;
    }
    let () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory")
        .arg(1)
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let error = t.driver.acquire(&t.acquire("a", SECOND)).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Later, Effect::None),
        "{error:?}"
    );
    assert!(error.to_string().contains("maxmemory"), "{error}");
    // The first one needs the most: what a script may do depends on its first write.
    let held = [&entered, &permit, &alone].map(|req| {
        let lease = Some(SECOND * 60);
        Renew::new(req.name.clone(), req.owner, req.hold, lease)
    });
    let renewed = t.driver.renew(Lane::default(), &held, t.soon()).await;
    for renewed in renewed.unwrap() {
        assert!(lasts(&renewed, SECOND * 60), "{renewed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_requests_without_a_server_are_each_told_so_and_none_is_kept() {
    let t = Testbed::start().await;
    t.process().kill().unwrap();
    t.until(async || format!("{:?}", t.driver).contains("Connection(down)"))
        .await;
    let asked: Vec<_> = (0..10_000)
        .map(|number| {
            let mut req = t.acquire(&format!("n{number}"), SECOND);
            t.ends(&mut req, 500);
            let driver = t.driver.clone();
            tokio::spawn(async move { driver.acquire(&req).await.unwrap_err() })
        })
        .collect();
    for asked in asked {
        let error = asked.await.unwrap();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, RetryClass::Later, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains("connection"), "{error}");
    }
    t.process().restart().unwrap();
    t.granted(&t.acquire("a", SECOND)).await;
    // Requests that gave up are not sent when the server is back: it runs only one script, and for the
    // right name.
    let stats = t.server.command(&["INFO", "commandstats"]).unwrap();
    let stats = stats.text().unwrap();
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "{stats}");
    assert_eq!(t.list("", 100).await, ["a"]);
}

#[tokio::test]
async fn what_voids_a_lock_is_warned_about_once_in_the_life_of_a_client() {
    // One thread, so that this subscriber receives all events of the client.
    let heard = Arc::<Mutex<Vec<String>>>::default();
    let _hears = tracing::subscriber::set_default(Hears(heard.clone()));
    let [master, replica] = [(); 2].map(|()| RedisServer::start(RedisOptions::default()).unwrap());
    let port = master.addr().port().to_string();
    let words = ["REPLICAOF", "127.0.0.1", &port];
    replica.command(&words).unwrap();
    let words = ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"];
    master.command(&words).unwrap();
    let says = |server: &RedisServer, what: &str| {
        let info = server.command(&["INFO"]).unwrap();
        info.text().unwrap().contains(what)
    };
    // A replica counts once it has its copy.
    let began = Instant::now();
    while !says(&master, "connected_slaves:1") || !says(&replica, "master_link_status:up") {
        assert!(began.elapsed() < SECOND * 60, "no replica");
        tokio::time::sleep(Duration::from_millis(10)).await; // between two polls
    }
    for (server, words) in [
        (&master, &["allkeys-lru", "1 replicas", "append-only"][..]),
        (&replica, &["slave", "append-only"]),
    ] {
        heard.lock().unwrap().clear();
        // Another test may have registered an event's place just before this subscriber was there.
        tracing::callsite::rebuild_interest_cache();
        let driver = RedisDriver::connect(&server.url()).await.unwrap();
        // A reconnect logs nothing more.
        for kind in ["normal", "pubsub"] {
            let words = ["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"];
            server.command(&words).unwrap();
        }
        let name = "a".parse().unwrap();
        let again = async { while driver.inspect(&name).await.is_err() {} };
        tokio::time::timeout(SECOND * 60, again).await.unwrap();
        let heard = heard.lock().unwrap().clone();
        for word in words {
            let said = heard.iter().filter(|said| said.contains(word));
            assert_eq!(said.count(), 1, "{word}: {heard:?}");
        }
        assert_eq!(heard.len(), words.len(), "{heard:?}");
    }
}

/// Collects warnings as text.
struct Hears(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Hears {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut words = Words(String::new());
        event.record(&mut words);
        self.0.lock().unwrap().push(words.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

struct Words(String);

impl tracing::field::Visit for Words {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "{field}={value:?} ");
    }
}
