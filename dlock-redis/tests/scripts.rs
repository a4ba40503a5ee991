//! The scripts by hand: what stands under the keys after each step, and what is said on the channels.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
use dlock_core::{
    Acquire, Acquired, Clock, DistributedLock, Effect, ErrorKind, Grant, Held, Hint, HoldId, Lease,
    LockName, Owner, Release, Released, Ticket,
};
use dlock_redis::RedisDriver;
use futures_util::{StreamExt, stream::BoxStream};
use redis::{AsyncCommands, aio::MultiplexedConnection, aio::PubSub};
use std::{
    collections::{BTreeMap, HashMap},
    num::NonZeroU64,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

const SECOND: Duration = Duration::from_secs(1);
const KEY: &str = "dlock:{a}";
const LINE: &str = "dlock:{a}:line";
const ENDS: &str = "dlock:{a}:ends";

#[tokio::test(flavor = "multi_thread")]
async fn an_uncontended_cycle_pays_one_exists_for_the_line_on_either_side() {
    let t = Testbed::start();
    let client = t.client().await;
    let mut req = client.waits(&t, 1);
    for next in [None, None] {
        req.next = next;
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        client.granted(&req).await;
        let taken = ["time", "exists", "set", "hset", "pexpire"].map(|name| (name.to_owned(), 1));
        assert_eq!(t.commands().await, BTreeMap::from(taken));
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        assert!(matches!(client.release(&req).await, Released::Freed));
        let freed = ["hmget", "del", "exists", "publish"].map(|name| (name.to_owned(), 1));
        assert_eq!(t.commands().await, BTreeMap::from(freed));
    }
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_is_two_scripts() {
    let t = Testbed::start();
    let [mut one, mut two] = [t.client().await, t.client().await];
    let mut inside = t.acquire(SECOND * 30);
    one.granted(&inside).await;
    two.held(&two.waits(&t, 1)).await;
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    for number in 2..12 {
        one.release(&inside).await;
        two.turn().await;
        let mut taking = two.waits(&t, number - 1);
        taking.line = Some(ticket(if number == 2 { 1 } else { number - 1 }));
        two.granted(&taking).await;
        one.held(&one.waits(&t, number)).await;
        inside = taking;
        std::mem::swap(&mut one, &mut two);
    }
    // A release, the acquire of the turn, and the first look of whoever stands next.
    assert_eq!(t.calls("evalsha").await, 3 * 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_counts_living_holds_and_keeps_no_dead_ones() {
    let t = Testbed::start();
    let client = t.client().await;
    let first = t.acquire(SECOND * 30);
    client.granted(&first).await;
    let field = format!("{}:0", first.owner.expose());
    let mut holds = vec![first.clone()];
    for length in [100, 20_000, 10_000] {
        let next = t.again(&first, Duration::from_millis(length));
        client.granted(&next).await;
        holds.push(next);
    }
    assert_eq!(t.record().await[&field], "4");
    tokio::time::sleep(Duration::from_millis(120)).await;
    // The release of another prunes the one that ran out, and writes how many are left.
    assert!(matches!(
        client.release(&holds[3]).await,
        Released::StillHeld { holds } if holds.get() == 2
    ));
    let record = t.record().await;
    assert_eq!(record[&field], "2");
    let left: Vec<_> = record.keys().filter(|it| it.starts_with("~h:")).collect();
    assert_eq!(left.len(), 2, "{record:?}");
    for hold in [&holds[0], &holds[2]] {
        assert!(
            record.contains_key(&format!("~h:{}", hold.hold)),
            "{record:?}"
        );
    }
    client.release(&holds[0]).await;
    assert_eq!(t.record().await[&field], "1");
    assert!(t.rest(KEY).await <= SECOND * 20, "the end of what is left");
    // Entered again, it is pruned and counted as well.
    let short = t.again(&first, Duration::from_millis(100));
    client.granted(&short).await;
    tokio::time::sleep(Duration::from_millis(120)).await;
    client.granted(&t.again(&first, SECOND)).await;
    let record = t.record().await;
    assert_eq!(record[&field], "2");
    assert!(
        !record.contains_key(&format!("~h:{}", short.hold)),
        "{record:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_ticket_stands_with_place_deadline_and_ttl_and_a_look_moves_the_deadline_alone() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    holder.granted(&t.acquire(SECOND * 30)).await;
    let mut req = waiter.waits(&t, 7);
    req.lease = Lease::fixed(SECOND * 3).unwrap();
    let held = waiter.held(&req).await;
    assert_eq!((held.ahead, held.look_in), (Some(0), Some(SECOND)));
    let stands = t.line().await;
    assert_eq!(stands.len(), 1);
    assert!(stands[0].0.starts_with("dlock:c:") && stands[0].0.ends_with(":7"));
    let ends = t.ends().await;
    let (deadline, accept) = ends[&stands[0].0].split_once(' ').unwrap();
    assert_eq!(accept, "1000");
    let deadline: f64 = deadline.parse().unwrap();
    assert!((deadline * 1_000.0 - stands[0].1 - 3_000_000.0).abs() < 2_000.0);
    for key in [LINE, ENDS] {
        let rest = t.rest(key).await;
        assert!(rest > SECOND * 9 && rest <= SECOND * 10, "{key} {rest:?}");
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    waiter.held(&req).await;
    assert_eq!(t.line().await, stands, "the place stays");
    let later: f64 = t.ends().await[&stands[0].0]
        .split_once(' ')
        .unwrap()
        .0
        .parse()
        .unwrap();
    assert!(later >= deadline + 20.0);
    // A shorter lease is served for less, and looks sooner.
    let mut short = waiter.waits(&t, 8);
    short.lease = Lease::fixed(Duration::from_millis(300)).unwrap();
    let held = waiter.held(&short).await;
    assert_eq!(
        (held.ahead, held.look_in),
        (Some(1), Some(Duration::from_millis(100)))
    );
    assert!(t.ends().await[&t.line().await[1].0].ends_with(" 100"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_a_record_with_nothing_but_the_ticket_and_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let mut req = waiter.waits(&t, 1);
    req.lease = Lease::fixed(SECOND).unwrap();
    waiter.held(&req).await;
    let stands = t.line().await[0].0.clone();
    holder.release(&inside).await;
    assert_eq!(waiter.turn().await, 1);
    assert_eq!(t.record().await, HashMap::from([("~r".to_owned(), stands)]));
    assert!(t.rest(KEY).await <= Duration::from_millis(333));
    assert!(!t.keys().await.iter().any(|key| key == LINE || key == ENDS));
    let shown = holder.driver.inspect(&name()).await.unwrap();
    assert!(shown.holders.is_empty() && shown.shut.is_some());
    assert_eq!(shown.waiters, Some(0));
    // Taken: the turn's end is gone with it.
    let grant = waiter.granted(&req).await;
    assert_eq!((grant.holds.get(), grant.valid_for), (1, SECOND));
    assert!(t.rest(KEY).await > Duration::from_millis(900));
    assert!(!t.record().await.contains_key("~r"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_in_line_hears_before_the_first_and_redissons_waiters_only_of_a_free_name() {
    let t = Testbed::start();
    let holder = t.client().await;
    let inside = t.acquire(SECOND * 30);
    let mut channels = t
        .listener(&["dlock:c:x", "redisson_lock__channel:dlock:{a}"])
        .await;
    holder.granted(&inside).await;
    t.put("dlock:c:x:1", 1, SECOND * 60, 700).await;
    t.put("dlock:c:gone:1", 2, SECOND * 60, 1_000).await;
    t.put("dlock:c:x:2", 3, SECOND * 60, 1_000).await;
    holder.release(&inside).await;
    assert_eq!(channels.hears().await, "F2 700 dlock:{a}");
    assert_eq!(channels.hears().await, "T1 dlock:{a}");
    let standing: Vec<_> = t.line().await.into_iter().map(|(it, _)| it).collect();
    assert_eq!(
        standing,
        ["dlock:c:x:2"],
        "who is gone was taken out on the way"
    );
    assert!(t.rest(KEY).await <= Duration::from_millis(700));
    assert_eq!(t.ends().await.len(), 1);
    // Kept shut, the first is told when it opens.
    holder.driver.break_lock(&name(), None).await.unwrap();
    assert_eq!(channels.hears().await, "T2 dlock:{a}");
    holder.driver.break_lock(&name(), None).await.unwrap();
    assert_eq!(channels.hears().await, "0", "free");
    holder.granted(&inside).await;
    t.put("dlock:c:x:3", 1, SECOND * 60, 1_000).await;
    let mut keeping = Release::new(name(), inside.owner, inside.hold);
    keeping.keep = Some(SECOND * 9);
    holder.driver.release(&keeping).await.unwrap();
    let told = channels.hears().await;
    let millis: u64 = told
        .strip_prefix("F3 ")
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!((8_000..=9_000).contains(&millis), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_lapsed_keeps_its_place_once_and_then_costs_it() {
    let t = Testbed::start();
    let [holder, sleeper, other] = [t.client().await, t.client().await, t.client().await];
    let mut inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let short = |mut req: Acquire| {
        req.lease = Lease::fixed(Duration::from_millis(300)).unwrap();
        req
    };
    let late = short(sleeper.waits(&t, 1));
    let good = short(other.waits(&t, 1));
    sleeper.held(&late).await;
    other.held(&good).await;
    let place = t.line().await[0].1;
    // It lets its turn lapse; whoever stands behind looks, and gets it.
    holder.release(&inside).await;
    assert_eq!(sleeper.turn().await, 1);
    tokio::time::sleep(Duration::from_millis(110)).await;
    other.granted(&good).await;
    // One look or several: what counts is the turns.
    for _ in 0..2 {
        sleeper.held(&late).await;
        assert_eq!(t.line().await[0].1, place, "back where it was");
    }
    other.release(&good).await;
    assert_eq!(sleeper.turn().await, 1);
    tokio::time::sleep(Duration::from_millis(110)).await;
    inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let good = short(other.waits(&t, 2));
    other.held(&good).await;
    sleeper.held(&late).await;
    let stands = t.line().await;
    assert!(
        stands[0].0.ends_with(":2") && stands[1].1 > stands[0].1,
        "at the end"
    );
    holder.release(&inside).await;
    assert_eq!(other.turn().await, 2);
    other.granted(&good).await;
    other.release(&good).await;
    assert_eq!(sleeper.turn().await, 1);
    sleeper.granted(&late).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_ticket_costs_one_hop() {
    let t = Testbed::start();
    let [holder, left, other] = [t.client().await, t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    let gone = left.waits(&t, 1);
    left.held(&gone).await;
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    // A late copy of an acquire, executed after the leave.
    left.held(&gone).await;
    other.held(&other.waits(&t, 1)).await;
    holder.release(&inside).await;
    assert_eq!(left.turn().await, 1, "the client hears of it");
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    assert_eq!(other.turn().await, 1);
    left.driver.leave(&name(), ticket(1)).await.unwrap();
    assert!(
        t.record().await.contains_key("~r"),
        "leaving twice leaves others alone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_of_dead_entries_only_is_no_line() {
    let t = Testbed::start();
    let client = t.client().await;
    for dead in [1, 40, 100] {
        // Half of them are past their deadline, half have no receiver.
        for at in 0..dead {
            let (who, rest) = if at % 2 == 0 {
                ("gone", SECOND * 60)
            } else {
                ("x", Duration::ZERO)
            };
            t.put(&format!("dlock:c:{who}:{}", at + 1), at, rest, 1_000)
                .await;
        }
        let _listens = t.listener(&["dlock:c:x"]).await;
        let req = t.acquire(SECOND * 30);
        client.granted(&req).await;
        assert!(t.line().await.is_empty());
        client.release(&req).await;
    }
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_over_a_hundred_dead_goes_on_until_somebody_has_it() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    for how in ["release", "break", "leave"] {
        let inside = t.acquire(SECOND * 30);
        holder.granted(&inside).await;
        for at in 1..=100 {
            t.put(&format!("dlock:c:gone:{at}"), at, SECOND * 60, 1_000)
                .await;
        }
        let req = waiter.waits(&t, t.draw());
        waiter.held(&req).await;
        t.raw_command(&["CONFIG", "RESETSTAT"]).await;
        let began = Instant::now();
        match how {
            "release" => assert!(matches!(holder.release(&inside).await, Released::Freed)),
            "break" => drop(holder.driver.break_lock(&name(), None).await.unwrap()),
            _ => {
                let _: u64 = t.raw().await.del(KEY).await.unwrap();
                holder.driver.leave(&name(), ticket(999)).await.unwrap();
            }
        }
        waiter.turn().await;
        let took = began.elapsed();
        assert!(took < SECOND, "{how}: {took:?}, far below any look");
        assert_eq!(t.calls("evalsha").await, 4, "{how}: 32 a script");
        waiter.granted(&req).await;
        waiter.release(&req).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_shuts_nothing_and_passes_nobody() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    // What the server wrote when its clock was an hour ahead.
    let ahead = 9_000_000_000_000_000.0;
    t.put(
        "dlock:c:gone:1",
        9_000_000_000_000_000,
        SECOND * 3_600,
        1_000,
    )
    .await;
    let inside = t.acquire(SECOND * 30);
    let _: () = t.raw().await.hset(KEY, "~k", "1").await.unwrap();
    let _: () = t.raw().await.pexpire(KEY, 30_000).await.unwrap();
    waiter.held(&waiter.waits(&t, 1)).await;
    assert_eq!(t.line().await[1].1, ahead + 1.0, "behind everybody");
    let _: u64 = t.raw().await.del((KEY, LINE, ENDS)).await.unwrap();
    // A reservation that outlasts every accept lease.
    let _: () = t
        .raw()
        .await
        .hset(KEY, "~r", "dlock:c:gone:1")
        .await
        .unwrap();
    let _: () = t.raw().await.pexpire(KEY, 3_600_000).await.unwrap();
    holder.granted(&inside).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_queued_by_what_is_refused_for_another_reason() {
    let t = Testbed::start();
    let client = t.client().await;
    let inside = t.acquire(SECOND * 30);
    let token = client.granted(&inside).await.token;
    let mut gone = client.waits(&t, 1);
    gone.join = token;
    assert!(matches!(
        client.driver.acquire(&gone).await.unwrap(),
        Acquired::Gone
    ));
    let mut late = client.waits(&t, 2);
    late.give_up = Clock::boot().now() - Duration::from_millis(200);
    client.driver.acquire(&late).await.unwrap_err();
    client.release(&inside).await;
    let _: () = t.raw().await.set(KEY, "somebody's").await.unwrap();
    let error = client
        .driver
        .acquire(&client.waits(&t, 3))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let error = client.driver.leave(&name(), ticket(3)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(t.line().await.is_empty() && t.ends().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_on_a_key_of_somebody_elses_takes_nothing_and_leaves_no_key_without_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    for foreign in [LINE, ENDS] {
        let inside = t.acquire(SECOND * 30);
        holder.granted(&inside).await;
        let mut taking = waiter.waits(&t, t.draw());
        waiter.held(&taking).await;
        holder.release(&inside).await;
        waiter.turn().await;
        let _: () = t
            .raw()
            .await
            .set_ex(foreign, "somebody's", 60)
            .await
            .unwrap();
        // Its turn is used by somebody behind whom the next one of the client stands.
        taking.next = Some(ticket(t.draw()));
        let error = waiter.driver.acquire(&taking).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.effect()),
            (ErrorKind::Misuse, Effect::None)
        );
        assert!(
            !t.record().await.contains_key("~t"),
            "{foreign}: somebody holds it"
        );
        for key in t.keys().await {
            assert!(t.rest(&key).await > Duration::ZERO, "{key} has no end");
        }
        let _: u64 = t.raw().await.del((KEY, LINE, ENDS)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_finds_its_hold_and_puts_its_next_ticket_in_line_once() {
    let t = Testbed::start();
    let [client, other] = [t.client().await, t.client().await];
    let mut req = client.waits(&t, 1);
    req.next = Some(ticket(2));
    let grant = client.granted(&req).await;
    let stands = t.line().await;
    assert_eq!(stands.len(), 1);
    assert!(stands[0].0.ends_with(":2"));
    other.held(&other.waits(&t, 1)).await;
    let again = client.granted(&req).await;
    assert_eq!((again.token, again.holds), (grant.token, grant.holds));
    assert_eq!(t.line().await[0], stands[0], "first as before");
    assert_eq!(t.line().await.len(), 2);
    // The client knows the place: forgotten by the server, its look goes back to it.
    let _: () = t.raw().await.zrem(LINE, &stands[0].0).await.unwrap();
    let mut look = client.waits(&t, 2);
    look.lease = Lease::fixed(SECOND).unwrap();
    client.held(&look).await;
    assert_eq!(t.line().await[0], stands[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_but_none_of_its_own_has_an_end() {
    let t = Testbed::start();
    let [holder, waiter] = [t.client().await, t.client().await];
    let inside = t.acquire(SECOND * 30);
    holder.granted(&inside).await;
    waiter.held(&waiter.waits(&t, 1)).await;
    waiter.held(&waiter.waits(&t, 2)).await;
    for _ in 0..2 {
        let keys = t.keys().await;
        assert_eq!(keys.len(), 4, "{keys:?}");
        for key in keys {
            assert!(t.rest(&key).await > Duration::ZERO, "{key} has no end");
        }
        holder.release(&inside).await;
    }
}

/// A server.
struct Testbed {
    server: RedisServer,
    drawn: AtomicU64,
}

/// A driver, and what it hears.
struct Client {
    driver: RedisDriver,
    /// A stream is not `Sync`, and only one task reads it.
    hints: Mutex<BoxStream<'static, Hint>>,
}

/// A connection that listens.
struct Listener(PubSub);

fn name() -> LockName {
    "a".parse().unwrap()
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}

impl Client {
    /// One that waits with that ticket.
    fn waits(&self, t: &Testbed, number: u64) -> Acquire {
        let mut req = t.acquire(SECOND * 30);
        req.line = Some(ticket(number));
        req
    }

    async fn granted(&self, req: &Acquire) -> Grant {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    async fn held(&self, req: &Acquire) -> Held {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    async fn release(&self, req: &Acquire) -> Released {
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        self.driver.release(&release).await.unwrap()
    }

    /// The number of the next ticket whose turn it is.
    async fn turn(&self) -> u64 {
        let mut hints = self.hints.lock().await;
        loop {
            let hint = tokio::time::timeout(SECOND * 5, hints.next()).await;
            if let Hint::Turn { ticket, .. } = hint.expect("a turn").expect("a stream") {
                return ticket.0.get();
            }
        }
    }
}

impl Listener {
    async fn hears(&mut self) -> String {
        let said = tokio::time::timeout(SECOND * 5, self.0.on_message().next()).await;
        said.expect("a message").unwrap().get_payload().unwrap()
    }
}

impl Testbed {
    fn start() -> Self {
        Self {
            server: RedisServer::start(RedisOptions::default()).unwrap(),
            drawn: AtomicU64::new(1),
        }
    }

    async fn client(&self) -> Client {
        let driver = RedisDriver::connect(&self.server.url()).await.unwrap();
        let hints = driver.hints();
        Client {
            driver,
            hints: Mutex::new(hints),
        }
    }

    async fn listener(&self, channels: &[&str]) -> Listener {
        let client = redis::Client::open(self.server.url()).unwrap();
        let mut listener = client.get_async_pubsub().await.unwrap();
        for channel in channels {
            listener.subscribe(channel).await.unwrap();
        }
        Listener(listener)
    }

    fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    fn acquire(&self, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        let hold = HoldId::from_bits(self.draw());
        let give_up = Clock::boot().now() + SECOND * 5;
        Acquire::new(name(), owner, hold, Lease::fixed(lease).unwrap(), give_up)
    }

    /// The same owner's next hold.
    fn again(&self, of: &Acquire, lease: Duration) -> Acquire {
        let mut again = self.acquire(lease);
        again.owner = of.owner;
        again
    }

    /// Puts somebody in line behind everybody's back.
    async fn put(&self, ticket: &str, place: u64, rest: Duration, accept: u64) {
        let mut raw = self.raw().await;
        let (seconds, micros): (u128, u128) =
            redis::cmd("TIME").query_async(&mut raw).await.unwrap();
        let deadline = seconds * 1_000 + micros / 1_000 + rest.as_millis();
        let _: () = raw.zadd(LINE, ticket, place).await.unwrap();
        let _: () = raw
            .hset(ENDS, ticket, format!("{deadline} {accept}"))
            .await
            .unwrap();
    }

    async fn raw(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.server.url()).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    async fn raw_command(&self, words: &[&str]) {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        let () = cmd.query_async(&mut self.raw().await).await.unwrap();
    }

    async fn record(&self) -> HashMap<String, String> {
        self.raw().await.hgetall(KEY).await.unwrap()
    }

    async fn line(&self) -> Vec<(String, f64)> {
        self.raw()
            .await
            .zrange_withscores(LINE, 0, -1)
            .await
            .unwrap()
    }

    async fn ends(&self) -> HashMap<String, String> {
        self.raw().await.hgetall(ENDS).await.unwrap()
    }

    async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.raw().await.keys("*").await.unwrap();
        keys.sort();
        keys
    }

    async fn rest(&self, key: &str) -> Duration {
        let rest: i64 = self.raw().await.pttl(key).await.unwrap();
        Duration::from_millis(u64::try_from(rest).expect("it is there and has an end"))
    }

    /// How often scripts ran each command since the last reset.
    async fn commands(&self) -> BTreeMap<String, u64> {
        let mut raw = self.raw().await;
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut raw)
            .await
            .unwrap();
        let counted = info.lines().filter_map(|line| {
            let (name, counts) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), counts.split(',').next()?.parse().ok()?))
        });
        let ours = |name: &str| {
            !["config", "client", "hello", "evalsha", "info"]
                .iter()
                .any(|other| name.starts_with(other))
        };
        counted.filter(|(name, _)| ours(name)).collect()
    }

    async fn calls(&self, command: &str) -> u64 {
        let mut raw = self.raw().await;
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut raw)
            .await
            .unwrap();
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|counts| counts.split(',').next()?.parse().ok())
            .unwrap_or(0)
    }
}
