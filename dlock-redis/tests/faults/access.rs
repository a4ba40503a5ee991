//! Who may come in, how, and with which rights.

use crate::bed::{SECOND, Testbed, ticket};
use dlock_core::{
    Acquired, Broken, DistributedLock, Effect, ErrorKind, Hint, Released, Renewed, Retry,
};
use dlock_redis::{RedisConfig, RedisDriver};
use futures_util::StreamExt;
use redis::AsyncCommands;
use std::{net::TcpListener, sync::Arc};

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
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
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

/// A library that installed one would choose for everybody in the process, and rustls panics without one.
#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn tls_without_a_provider_is_an_error_that_says_what_to_install() {
    let error = RedisDriver::connect("rediss://127.0.0.1:1/")
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Misuse, Retry::Never),
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
async fn without_the_right_to_the_channels_waiters_only_look() {
    let t = without("&dlock:c:*").await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    assert_eq!(t.held(&waiter).await.ahead, Some(0));
    assert!(matches!(t.release(&holder).await, Released::Freed));
    assert_eq!(t.inspect("a").await.shut, None, "reserved for nobody");
    t.granted(&waiter).await;
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
    // A leave that finds the name free and only the dead in line.
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
        (Retry::Never, Effect::Unknown)
    );
    // The record was written, and the refused command was to give it an end.
    assert!(matches!(t.release(&req).await, Released::Freed));
    assert!(!t.exists("dlock:{a}").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_subscribe_waiters_look_and_a_close_waits_for_nothing() {
    let t = without("+subscribe").await;
    let holder = t.acquire("a", SECOND * 30);
    t.granted(&holder).await;
    let waiter = t.in_line("a", SECOND * 30, 1);
    t.held(&waiter).await;
    // Nobody hears a turn, so it is given to nobody, and asking is enough.
    t.release(&holder).await;
    t.granted(&waiter).await;
    // The pause before the next try to subscribe is no reason to wait, nor is what is tried meanwhile a storm.
    let tried = t.server.command(&["INFO", "stats"]).unwrap().text();
    let of = |text: &Option<String>| {
        let text = text.clone().unwrap_or_default();
        let line = text.lines().find_map(|line| {
            line.strip_prefix("total_connections_received:")
                .map(str::to_owned)
        });
        line.unwrap().parse::<u64>().unwrap()
    };
    // Time for a storm: the pause is half a minute.
    tokio::time::sleep(SECOND / 2).await;
    let later = t.server.command(&["INFO", "stats"]).unwrap().text();
    assert!(of(&later) - of(&tried) <= 2, "{tried:?} {later:?}");
    let began = std::time::Instant::now();
    t.driver.close().await;
    assert!(began.elapsed() < SECOND / 4, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_readme_are_enough_for_everything() {
    let t = without("").await;
    let mut hints = t.driver.hints();
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
    keeping.keep = Some(SECOND);
    assert!(matches!(
        t.driver.release(&keeping).await.unwrap(),
        Released::Kept { .. }
    ));
    assert!(matches!(
        t.driver.break_lock(&first.name, None).await.unwrap(),
        Broken::Freed { .. }
    ));
    let told = |hint: &Hint| matches!(hint, Hint::First { name, .. } | Hint::Turn { name, .. } if *name == first.name);
    for _ in 0..3 {
        let hint = hints.next().await.unwrap();
        assert!(told(&hint), "{hint:?}");
    }
    t.granted(&waiter).await;
    t.driver.leave(&waiter.name, ticket(2)).await.unwrap();
    assert_eq!(t.inspect("a").await.waiters, Some(0));
}

/// A driver of a user who has the rights in the README but that one.
async fn without(right: &str) -> Testbed {
    let mut t = Testbed::start().await;
    let mut rights = rights();
    rights.retain(|word| *word != right);
    t.server.command(&rights).unwrap();
    let url = t.server.url().replace("redis://", "redis://locker:secret@");
    t.driver = Arc::new(RedisDriver::connect(&url).await.unwrap());
    t
}

/// The line of the README, in words.
fn rights() -> Vec<&'static str> {
    let readme = include_str!("../../README.md");
    let line = readme.split("```text\n").nth(1).unwrap();
    let line = line.split("```").next().unwrap();
    let words = line.split_whitespace();
    words.filter(|word| *word != "\\").collect()
}
