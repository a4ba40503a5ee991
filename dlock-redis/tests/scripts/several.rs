//! Tests of batches: each request in a shared script is answered as if it had been sent alone.
//!
//! They run on one thread: concurrent requests are made before any is sent, so the contents of each
//! script are known.

use crate::bed::{SECOND, Testbed, ticket};
use dlock_core::{
    Clock, Effect, Lease,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, Result},
};
use dlock_redis::RedisDriver;
use futures_util::future::join_all;
use redis::AsyncCommands;
use std::time::Duration;

/// The first four requests are sent alone at once; so many others fit into one script.
pub(crate) const A_SCRIPT: usize = 32;
pub(crate) const MANY: usize = 4 + 3 * A_SCRIPT;

#[tokio::test]
async fn requests_that_are_alike_go_in_one_script_and_leave_what_each_alone_would() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let mut wanted = t.of_many_names(MANY);
    // A request that would wait carries a ticket, and some would wait.
    for (req, number) in wanted.iter_mut().step_by(3).zip(1..) {
        req.ticket = Some(ticket(number));
    }
    for _ in 0..2 {
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        let answers = join_all(wanted.iter().map(|req| driver.acquire(req))).await;
        let scripts = t.calls("evalsha").await;
        assert!(scripts <= 4 + 3, "{scripts}");
        for (req, token) in wanted.iter().zip(answers.into_iter().map(granted)) {
            let key = format!("dlock:{{{}}}", req.name);
            let shown: u64 = t.raw().await.hget(&key, "~t").await.unwrap();
            assert_eq!(shown, token);
            let fields: usize = t.raw().await.hlen(&key).await.unwrap();
            assert_eq!(fields, 3, "owner, hold and token");
            let lease = token / 1_000 + 30_000..token / 1_000 + 35_000;
            let end = t.end(&key).await;
            assert!(lease.contains(&end), "{end}, began {token}");
            let counter: u64 = t.raw().await.get(format!("{key}:token")).await.unwrap();
            assert_eq!(counter, token);
        }
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        let released = join_all(wanted.iter().map(|req| release(&driver, req))).await;
        assert!(released.iter().all(|it| matches!(it, Ok(Released::Freed))));
        let scripts = t.calls("evalsha").await;
        assert!(scripts <= 4 + 3, "{scripts}");
        assert!(t.keys().await.iter().all(|key| key.ends_with(":token")));
    }
}

#[tokio::test]
async fn leases_that_differ_do_not_go_in_one_script() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let mut wanted = t.of_many_names(4 + 2 * A_SCRIPT);
    for (at, req) in wanted.iter_mut().enumerate().skip(4) {
        req.lease = Lease::fixed(SECOND * [30, 60][at % 2]);
    }
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    for (req, answer) in wanted
        .iter()
        .zip(join_all(wanted.iter().map(|req| driver.acquire(req))).await)
    {
        granted(answer);
        let rest = t.rest(&format!("dlock:{{{}}}", req.name)).await;
        assert!(rest > req.lease.length() - SECOND * 5 && rest <= req.lease.length());
    }
    assert_eq!(t.calls("evalsha").await, 4 + 2);
}

#[tokio::test]
async fn tokens_grow_in_a_script_of_several_whatever_their_counters_say() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let wanted = t.of_many_names(4 + 20);
    let counter = |at: usize| format!("dlock:{{{}}}:token", wanted[at].name);
    let (mut raw, blank, foreign) = (t.raw().await, 8, 9);
    let now = granted(driver.acquire(&wanted[0]).await);
    release(&driver, &wanted[0]).await.unwrap();
    // From before the clock was set back (by much, and by an hour), from long ago, one that is no number
    // and one that is no text.
    let set_back = [(5, 8_000_000_000_000_000), (6, now + 3_600_000_000)];
    let span = 100_000_000_000;
    let spans_ago = [(10, now - span), (12, now - 10 * span)];
    let of_old = [(7, 1_000_000), (11, now / 10)];
    let earlier = of_old.into_iter().chain(spans_ago);
    for (at, before) in earlier.chain(set_back) {
        let _: () = raw.set_ex(counter(at), before, 1_000).await.unwrap();
    }
    let _: () = raw.set_ex(counter(blank), "blank", 1_000).await.unwrap();
    let _: () = raw.hset(counter(foreign), "some", "body's").await.unwrap();
    let answers = join_all(wanted.iter().map(|req| driver.acquire(req))).await;
    for (at, answer) in answers.into_iter().enumerate() {
        if at == blank || at == foreign {
            let error = answer.unwrap_err();
            assert!(error.to_string().contains("damaged"), "{at}: {error}");
            continue;
        }
        let token = granted(answer);
        let ahead = set_back.iter().find(|(it, _)| *it == at);
        assert_eq!(token, ahead.map_or(token.max(now), |it| it.1 + 1), "{at}");
        assert_eq!(raw.get::<_, u64>(counter(at)).await.unwrap(), token);
        let ahead = Duration::from_micros(token.saturating_sub(now + 600_000_000));
        let rest = t.rest(&counter(at)).await;
        assert!(rest > SECOND * 100_000 + ahead, "{at}: {rest:?}"); // 28 hours
    }
    let left: (String, String) = (
        raw.get(counter(blank)).await.unwrap(),
        raw.hget(counter(foreign), "some").await.unwrap(),
    );
    assert_eq!(left, ("blank".into(), "body's".into()), "as it was");
}

#[tokio::test]
async fn who_listens_for_redissons_releases_hears_one_for_each_in_a_script() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let wanted = t.of_many_names(MANY);
    let mut channels: Vec<_> = wanted
        .iter()
        .map(|req| format!("redisson_lock__channel:dlock:{{{}}}", req.name))
        .collect();
    channels.sort();
    let words: Vec<_> = channels.iter().map(String::as_str).collect();
    let mut one = t.listener(&words).await;
    let mut all = t.listener_to_all("redisson_lock__channel:*").await;
    for answer in join_all(wanted.iter().map(|req| driver.acquire(req))).await {
        granted(answer);
    }
    // A second release of a hold frees nothing.
    let twice = wanted.iter().chain(&wanted[4..4 + A_SCRIPT]);
    join_all(twice.map(|req| release(&driver, req))).await;
    t.raw_command(&["PUBLISH", "redisson_lock__channel:end", "1"])
        .await;
    for listener in [&mut one, &mut all] {
        let mut heard = Vec::new();
        for _ in 0..MANY {
            let (channel, said) = listener.hears_from().await;
            assert_eq!(said, "0");
            heard.push(channel);
        }
        heard.sort();
        assert_eq!(heard, channels);
    }
    assert_eq!(all.hears().await, "1", "and nothing more");
}

#[tokio::test]
async fn a_late_request_in_a_script_of_several_makes_no_other_late() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let mut wanted = t.of_many_names(MANY);
    let late = 9;
    wanted[late].ticket = Some(ticket(1));
    wanted[late].give_up = Clock::boot().now() - SECOND;
    let answers = join_all(wanted.iter().map(|req| driver.acquire(req))).await;
    for (at, answer) in answers.into_iter().enumerate() {
        match answer {
            Err(error) => assert_eq!((at, error.effect()), (late, Effect::None), "{error}"),
            answer => {
                granted(answer);
                assert_ne!(at, late);
            }
        }
    }
    let key = format!("dlock:{{{}}}", wanted[late].name);
    assert!(!t.keys().await.iter().any(|it| it.starts_with(&key)));
}

#[tokio::test]
async fn a_name_that_is_not_this_users_costs_the_others_nothing() {
    let t = Testbed::start();
    let wanted = t.of_many_names(MANY);
    t.raw_command(&[
        "ACL",
        "SETUSER",
        "some",
        "on",
        ">secret",
        "~dlock:{1*",
        "&*",
        "+@all",
    ])
    .await;
    let url = t.server.url().replace("redis://", "redis://some:secret@");
    let driver = RedisDriver::connect(&url).await.unwrap();
    let answers = join_all(wanted.iter().map(|req| driver.acquire(req))).await;
    for (req, answer) in wanted.iter().zip(answers) {
        if req.name.as_str().starts_with('1') {
            granted(answer);
        } else {
            let error = answer.unwrap_err();
            assert!(error.to_string().contains("lacks a right"), "{error}");
            assert_eq!(error.effect(), Effect::None);
        }
    }
}

#[tokio::test]
async fn what_a_server_has_forgotten_is_told_to_it_again_also_for_several() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let wanted = t.of_many_names(MANY);
    for forgets in [true, false] {
        if forgets {
            t.raw_command(&["SCRIPT", "FLUSH"]).await;
        }
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        for answer in join_all(wanted.iter().map(|req| driver.acquire(req))).await {
            granted(answer);
        }
        for answer in join_all(wanted.iter().map(|req| release(&driver, req))).await {
            assert!(matches!(answer, Ok(Released::Freed)));
        }
        if !forgets {
            let scripts = t.calls("evalsha").await;
            assert!(scripts <= 2 * (4 + 3), "{scripts}");
        }
    }
}

#[tokio::test]
async fn a_dropped_request_cancels_no_other() {
    let t = Testbed::start();
    let driver = t.client().await.driver;
    let wanted = t.of_many_names(MANY);
    t.raw_command(&["CLIENT", "PAUSE", "200", "ALL"]).await;
    let asked = wanted.iter().enumerate().map(async |(at, req)| {
        let within = if at % 2 == 0 { 20 } else { 10_000 };
        tokio::time::timeout(Duration::from_millis(within), driver.acquire(req)).await
    });
    for (at, answer) in join_all(asked).await.into_iter().enumerate() {
        match answer {
            Ok(answer) => drop(granted(answer)),
            Err(_) => assert_eq!(at % 2, 0, "{at}"),
        }
    }
}

pub(crate) fn granted(answer: Result<Acquired>) -> u64 {
    match answer.unwrap() {
        Acquired::Granted(grant) => grant.token.0,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn release(driver: &RedisDriver, req: &Acquire) -> Result<Released> {
    driver
        .release(&Release::new(req.name.clone(), req.owner, req.hold))
        .await
}

impl Testbed {
    /// When a key ends, in the server's ms.
    async fn end(&self, key: &str) -> u64 {
        // Both in one millisecond; otherwise the end would be too early by the time in between.
        let text = "local function now()
                      local time = redis.call('TIME')
                      return time[1] * 1000 + math.floor(time[2] / 1000)
                    end
                    local at, rest
                    repeat at, rest = now(), redis.call('PTTL', KEYS[1]) until now() == at
                    return at + rest";
        let end = redis::Script::new(text);
        end.key(key)
            .invoke_async(&mut self.raw().await)
            .await
            .unwrap()
    }

    pub(crate) fn of_many_names(&self, count: usize) -> Vec<Acquire> {
        let wanted = (0..count).map(|at| {
            let mut req = self.acquire(SECOND * 30);
            req.name = at.to_string().parse().unwrap();
            req
        });
        wanted.collect()
    }
}
