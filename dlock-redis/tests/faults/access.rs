//! Access tests: log-in, TLS, addresses and the rights of a user.

use crate::bed::{SECOND, Testbed, connection, ticket};
use dlock_conformance::testbed::redis::Reply;
use dlock_core::{
    Broken, Effect, ErrorKind, RetryClass,
    driver::{Acquired, DistributedLock, DriverError, Released, Renewed, WakeUp},
};
use dlock_redis::{RedisConfig, RedisDriver};
use futures_util::{StreamExt, future::join_all};
use redis::{AsyncCommands, RedisResult};
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tokio::net::TcpSocket;

#[tokio::test(flavor = "multi_thread")]
async fn who_cannot_log_in_learns_why_and_no_secret_is_shown() {
    let t = Testbed::start().await;
    let () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("requirepass")
        .arg("right")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let at = t.server.addr().port();
    // It does not listen, so it refuses connections, and no other program gets its port.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = socket.local_addr().unwrap().port();
    for (url, word) in [
        (format!("redis://127.0.0.1:{at}/"), "log-in"),
        (format!("redis://:canary@127.0.0.1:{at}/"), "password"),
        (format!("redis://:canary@127.0.0.1:{closed}/"), "reached"),
    ] {
        let error = RedisDriver::connect(&url).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Unavailable, Effect::None),
            "{error:?}"
        );
        assert!(error.to_string().contains(word), "{error}");
        let port = if word == "reached" { closed } else { at };
        let address = format!("127.0.0.1:{port}: ");
        assert!(error.to_string().starts_with(&address), "{error}");
        assert!(
            !format!("{error:?} {error}").contains("canary"),
            "{error:?}"
        );
    }
    let driver = RedisDriver::connect(&format!("redis://:right@127.0.0.1:{at}/"))
        .await
        .unwrap();
    assert!(!format!("{driver:?}").contains("right"));
}

/// A library that installed a provider would choose for the whole process, and rustls panics without
/// one.
#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn tls_without_a_provider_is_an_error_that_says_what_to_install() {
    let error = RedisDriver::connect("rediss://127.0.0.1:1/")
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Misuse, RetryClass::Never),
        "{error:?}"
    );
    assert!(error.to_string().contains("install_default"), "{error}");
}

#[cfg(not(feature = "tls"))]
#[tokio::test(flavor = "multi_thread")]
async fn tls_without_the_feature_is_an_error() {
    let error = RedisDriver::connect("rediss://127.0.0.1:1/")
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_active_replication_is_refused() {
    let url = fake_server("active-replica");
    let error = connect_within_30_s(&url).await;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("active replication"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_after_the_greeting_is_an_error() {
    let error = connect_within_30_s(&fake_server("master")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("did not answer in time"), "{text}");
}

async fn connect_within_30_s(url: &str) -> DriverError {
    let config: RedisConfig = url.parse().unwrap();
    let config = config.with_connect_within(Duration::from_millis(500));
    let connected = tokio::time::timeout(Duration::from_secs(30), RedisDriver::open(config)).await;
    connected.expect("an answer").unwrap_err()
}

/// The URL of a fake server of that role, which answers a greeting and nothing else.
fn fake_server(role: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    // It ends with the process.
    thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            let lines = BufReader::new(socket.try_clone().unwrap()).lines();
            thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    let answer = match &*line {
                        "HELLO" => format!("%2\r\n+mode\r\n+standalone\r\n+role\r\n+{role}\r\n"),
                        "TIME" => "*2\r\n:1\r\n:1\r\n".to_owned(),
                        "SCRIPT" => "+OK\r\n".to_owned(),
                        _ => continue,
                    };
                    if socket.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    format!("redis://{at}/")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_applications_own_client_is_enough() {
    let t = Testbed::start().await;
    let client = redis::Client::open(t.server.url()).unwrap();
    let config = RedisConfig::default().with_prefix("other".parse().unwrap());
    let driver = RedisDriver::from_client(&client, config).await.unwrap();
    assert!(matches!(
        driver.acquire(&t.acquire("a", SECOND)).await.unwrap(),
        Acquired::Granted(_)
    ));
    assert!(t.exists("other:{a}").await);
    t.granted(&t.acquire("a", SECOND)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_a_right_that_turns_need_is_refused_at_connect() {
    for (right, word) in [
        ("&dlock:c:*", "&dlock:c:*"),
        ("+subscribe", "+subscribe"),
        ("+publish", "ACL lines"),
    ] {
        let (_t, connected) = connect_without(right).await;
        let error = connected.map(drop).unwrap_err();
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Unavailable, RetryClass::Never, Effect::None),
            "{right}: {error:?}"
        );
        assert!(error.to_string().contains(word), "{right}: {error}");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("permission"), "{right}: {source}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_right_to_subscribe_is_taken_away_no_waiter_is_queued_unheard() {
    let t = without("").await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    take_channels_away(&t).await;
    let error = t.driver.acquire(&waiter).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.retry(), error.effect()),
        (ErrorKind::Unavailable, RetryClass::Never, Effect::None),
        "{error:?}"
    );
    assert!(error.to_string().contains("&dlock:c:*"), "{error}");
    // Requests that wait for no turn still work.
    t.held(&t.acquire("a", SECOND)).await;
    assert!(matches!(t.release(&holder).await, Released::Freed));
    t.server
        .command(&["ACL", "SETUSER", "locker", "&dlock:c:*"])
        .unwrap();
    // The driver subscribes again by itself; a request has five seconds.
    let again = async || t.driver.acquire(&t.in_line("a", SECOND * 30, 2)).await;
    t.until(async || matches!(again().await, Ok(Acquired::Granted(_))))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_redissons_channels_what_is_done_is_done() {
    let t = without("&redisson_lock__channel:dlock:*").await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    assert!(matches!(t.release(&holder).await, Released::Freed));
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    assert!(matches!(
        t.driver.break_lock(&holder.name, None).await.unwrap(),
        Broken::Freed { .. }
    ));
    // A leave that finds the lock free and only dead tickets in the queue.
    let _: u64 = t
        .raw()
        .await
        .zadd("dlock:{a}:line", "gone:1", 1)
        .await
        .unwrap();
    t.driver.leave(&holder.name, ticket(1)).await.unwrap();
    assert_eq!(t.inspect("a").await.waiters, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_a_script_lacks_is_named_and_what_it_had_done_can_be_given_back() {
    let t = without("+pexpire").await;
    let req = t.acquire("a", SECOND * 30);
    let error = t.driver.acquire(&req).await.unwrap_err();
    assert!(error.to_string().contains("ACL"), "{error}");
    assert_eq!(
        (error.retry(), error.effect()),
        (RetryClass::Never, Effect::Unknown)
    );
    // The record was written; the refused command would have set its expiry.
    assert!(matches!(t.release(&req).await, Released::Freed));
    assert!(!t.exists("dlock:{a}").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_subscribing_is_refused_there_is_no_storm_and_a_close_waits_for_nothing() {
    let mut t = without("").await;
    take_channels_away(&t).await;
    // The pause before the next subscription delays no request, and the attempts meanwhile are no storm.
    let tried = t.server.command(&["INFO", "stats"]).unwrap().text();
    let of = |text: &Option<String>| {
        let text = text.clone().unwrap_or_default();
        let line = text.lines().find_map(|line| {
            line.strip_prefix("total_connections_received:")
                .map(str::to_owned)
        });
        line.unwrap().parse::<u64>().unwrap()
    };
    // Long enough for a storm to show: the pause is some seconds.
    tokio::time::sleep(SECOND / 2).await;
    let later = t.server.command(&["INFO", "stats"]).unwrap().text();
    assert!(of(&later) - of(&tried) <= 2, "{tried:?} {later:?}");
    // A close waits for the end of the subscription for at most half a second. A time that is too long
    // is measured again.
    for tries in 1.. {
        let began = Instant::now();
        t.driver.close().await;
        let took = began.elapsed();
        if took < SECOND * 9 / 20 {
            break;
        }
        assert!(tries < 3, "{took:?}");
        t = without("").await;
        take_channels_away(&t).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_readme_are_enough_for_everything() {
    let t = without("").await;
    let mut wake_ups = t.driver.wake_ups();
    let first = t.acquire("a", SECOND * 30);
    t.granted(&first).await;
    let second = t.again(&first, SECOND * 60);
    t.granted(&second).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    t.held(&waiter).await;
    t.held(&t.in_line("a", SECOND * 30, 2)).await;
    assert!(matches!(
        t.renew(&[&first]).await[..],
        [Some(Renewed::Until { .. })]
    ));
    t.release(&second).await;
    assert_eq!(t.list("", 100).await, ["a"]);
    let mut keeping = t.release_of(&first);
    keeping.min_hold = Some(SECOND);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::MinHold { .. }
    ));
    assert!(matches!(
        t.driver.break_lock(&first.name, None).await.unwrap(),
        Broken::Freed { .. }
    ));
    let told = |wake_up: &WakeUp| matches!(wake_up, WakeUp::First { name, .. } | WakeUp::Turn { name, .. } if *name == first.name);
    for _ in 0..3 {
        let wake_up = wake_ups.next().await.unwrap();
        assert!(told(&wake_up), "{wake_up:?}");
    }
    t.granted(&waiter).await;
    t.driver.leave(&waiter.name, ticket(2)).await.unwrap();
    assert_eq!(t.inspect("a").await.waiters, Some(0));
    // Enough requests at a time that they share scripts.
    let crowd: Vec<_> = (0..64)
        .map(|number| t.acquire(&format!("n{number}"), SECOND * 30))
        .collect();
    join_all(crowd.iter().map(|req| t.granted(req))).await;
    join_all(crowd.iter().map(|req| t.release(req))).await;
    let refused = t.server.command(&["ACL", "LOG"]).unwrap();
    assert_eq!(refused, Reply::Array(Vec::new()));
    let errors = t.server.command(&["INFO", "errorstats"]).unwrap();
    let errors = errors.text().unwrap();
    // The scripts for several requests are loaded when the first batch needs them.
    let known = |line: &&str| line.starts_with("errorstat_") && !line.contains("NOSCRIPT");
    assert_eq!(errors.lines().find(known), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_readme_reach_no_other_client() {
    let (t, connected) = connect_without("").await;
    connected.unwrap();
    let client = redis::Client::open(as_locker(&t)).unwrap();
    let mut raw = connection(&client).await;
    for words in [
        "CLIENT LIST",
        "CLIENT KILL TYPE normal",
        "CLIENT PAUSE 1000",
        "CLIENT NO-EVICT on",
        "CLIENT REPLY OFF",
        "FLUSHALL",
        "CONFIG GET *",
    ] {
        let mut words = words.split(' ');
        let mut cmd = redis::cmd(words.next().unwrap());
        cmd.arg(words.collect::<Vec<_>>());
        let answer: RedisResult<redis::Value> = cmd.query_async(&mut raw).await;
        assert_eq!(answer.unwrap_err().code(), Some("NOPERM"), "{cmd:?}");
    }
    // A URL with a database needs one more right.
    let at = format!("{}/1", as_locker(&t).trim_end_matches('/'));
    assert!(RedisDriver::connect(&at).await.is_err());
    t.server
        .command(&["ACL", "SETUSER", "locker", "+select"])
        .unwrap();
    RedisDriver::connect(&at).await.unwrap();
}

/// A driver whose user has the rights in the README except that one.
async fn without(right: &str) -> Testbed {
    let (mut t, driver) = connect_without(right).await;
    t.driver = Arc::new(driver.unwrap());
    t
}

async fn connect_without(right: &str) -> (Testbed, Result<RedisDriver, DriverError>) {
    let t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| *word != right);
    t.server.command(&rights).unwrap();
    t.server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    let driver = RedisDriver::connect(&as_locker(&t)).await;
    (t, driver)
}

fn as_locker(t: &Testbed) -> String {
    t.server.url().replace("redis://", "redis://locker:secret@")
}

/// Waits until the driver knows: the server ends subscribed connections whose user loses the channel.
async fn take_channels_away(t: &Testbed) {
    t.server
        .command(&["ACL", "SETUSER", "locker", "resetchannels"])
        .unwrap();
    let refused = async || {
        let req = t.in_line("unheard", SECOND, t.draw());
        let answer = t.driver.acquire(&req).await;
        answer.is_err_and(|error| error.to_string().contains("subscribe"))
    };
    t.until(refused).await;
}

/// The ACL line of the README, as words.
fn rights() -> Vec<&'static str> {
    let readme = include_str!("../../README.md");
    let line = readme.split("```text\n").nth(1).unwrap();
    let line = line.split("```").next().unwrap();
    let words = line.split_whitespace();
    words.filter(|word| *word != "\\").collect()
}
