//! Faults of a server, its lanes, its wake-ups and its clients.

use super::{Bench, SECOND, is_none, is_unknown, name, release};
use dlock_core::{
    Clock, ErrorKind, HoldId, Instant, Lease, LockName, Owner, RetryClass,
    driver::{Acquire, Acquired, DistributedLock, Lane, Renew, Renewed, Ticket, Wake, WakeUp},
};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore, WakeUpFault};
use futures_util::{FutureExt, StreamExt};
use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

#[tokio::test(start_paused = true)]
async fn a_stopped_server_executes_later_in_order_also_dropped_requests() {
    let bench = Bench::new();
    bench.store.stop();
    let give_up = bench.acquire("a").now_or_never();
    assert!(give_up.is_none(), "and it is dropped");
    let mut other = Box::pin(bench.acquire("b"));
    assert!(other.as_mut().now_or_never().is_none());
    assert_eq!(bench.store.unexecuted(), 2);
    bench.clock.jump(2 * SECOND);
    bench.store.cont();
    assert!(!other.await.unwrap(), "a came first");
    assert!(bench.acquire("a").await.unwrap());
    assert_eq!(bench.holds().await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_lay_too_long_in_a_stopped_server_takes_nothing() {
    let bench = Bench::new();
    bench.store.stop();
    let mut acquire = Box::pin(bench.acquire("a"));
    assert!(acquire.as_mut().now_or_never().is_none());
    bench.clock.jump(6 * SECOND);
    bench.store.cont();
    assert!(is_none(&acquire.await.unwrap_err()));
    assert_eq!(bench.holds().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_killed_while_stopped_loses_what_it_did_not_execute() {
    let bench = Bench::new();
    bench.store.stop();
    let mut acquire = Box::pin(bench.acquire("a"));
    assert!(acquire.as_mut().now_or_never().is_none());
    bench.store.restart(true);
    assert!(is_unknown(&acquire.await.unwrap_err()));
    assert_eq!(bench.holds().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_down_refuses_and_keeps_what_it_has() {
    let bench = Bench::new();
    let mut wake_ups = bench.driver.wake_ups();
    assert!(bench.acquire("a").await.unwrap());
    bench.store.down();
    bench.store.stop();
    bench.store.cont();
    assert!(is_none(&bench.acquire("a").await.unwrap_err()));
    bench.store.up();
    assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
    assert!(!bench.acquire("b").await.unwrap());
    assert_eq!(bench.holds().await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_restart_keeps_everything_or_nothing() {
    let bench = Bench::new();
    let mut wake_ups = bench.driver.wake_ups();
    assert!(bench.acquire("a").await.unwrap());
    bench.store.restart(true);
    assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
    assert!(!bench.acquire("b").await.unwrap());
    bench.store.restart(false);
    assert_eq!(bench.store.names(), 0);
    assert!(bench.acquire("b").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_flushed_store_gives_greater_tokens_unless_its_clock_is_behind() {
    let bench = Bench::new();
    let mut last = 0;
    for (step, grows) in [
        (Duration::ZERO, true),
        (SECOND, true),
        (3600 * SECOND, false),
    ] {
        bench.store.flush();
        bench.store.step_clock_back(step);
        bench.clock.jump(2 * SECOND);
        let Acquired::Granted(grant) = bench.driver.acquire(&bench.ask("a")).await.unwrap() else {
            panic!("a flushed store holds nothing");
        };
        let token = grant.token.0;
        assert_eq!(token > last, grows, "{step:?}");
        last = token;
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_stepped_forward_ends_leases_early() {
    let bench = Bench::new();
    assert!(bench.acquire("a").await.unwrap());
    bench.store.step_clock(29 * SECOND);
    assert!(!bench.acquire("b").await.unwrap());
    bench.store.step_clock(SECOND);
    assert!(bench.acquire("b").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn what_is_over_stays_over_though_the_clock_is_set_back() {
    let bench = Bench::new();
    for (hold, lease) in [(1, 30), (2, 40)] {
        let mut request = bench.ask("a");
        (request.hold, request.lease) = (HoldId::from_bits(hold), Lease::fixed(lease * SECOND));
        bench.driver.acquire(&request).await.unwrap();
    }
    let renewed = async |hold| {
        let (owner, hold) = (Owner::from_seed("a"), HoldId::from_bits(hold));
        let batch = [Renew::new(name(), owner, hold, None)];
        let renewed = bench.driver.renew(Lane(0), &batch, Instant::FAR).await;
        matches!(renewed.unwrap()[..], [Ok(Renewed::Until { .. })])
    };
    for hold in [1, 2] {
        assert!(renewed(hold).await);
        bench.store.step_clock(30 * SECOND);
        assert!(!renewed(hold).await);
        bench.store.step_clock_back(30 * SECOND);
        assert!(!renewed(hold).await);
        bench.store.step_clock(10 * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stalled_lane_delays_no_other() {
    let clock = Clock::simulated();
    let store = MemoryStore::new(clock.clone());
    let mut config = MemoryConfig::new(Wake::Poll);
    config.lanes = NonZeroU32::new(4).unwrap();
    let driver = MemoryDriver::connect(&store, config);
    let named = |number: u32| LockName::new(format!("n{number}")).unwrap();
    let stalled = driver.lane(&named(0));
    let other = (1..).map(named).find(|name| driver.lane(name) != stalled);
    store.stall_lane(stalled);
    let stuck = named(0);
    let mut look = driver.inspect(&stuck);
    assert!(look.as_mut().now_or_never().is_none());
    driver.inspect(&other.unwrap()).await.unwrap();
    driver.list("", None, 10).await.unwrap();
    store.resume_lane(stalled);
    look.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_stuck_fails_alone() {
    let bench = Bench::new();
    assert!(bench.acquire("a").await.unwrap());
    let stuck: LockName = "stuck".parse().unwrap();
    let entry = |name| {
        let (owner, hold) = (Owner::from_seed("a"), HoldId::from_bits(1));
        Renew::new(name, owner, hold, Some(SECOND))
    };
    let batch = [entry(stuck.clone()), entry(name())];
    let give_up = bench.clock.now();
    bench.driver.faults().stick(stuck);
    let renewed = bench.driver.renew(Lane(0), &batch, give_up).await.unwrap();
    assert!(is_none(renewed[0].as_ref().unwrap_err()));
    assert!(matches!(renewed[1], Ok(Renewed::Until { .. })));
    bench.driver.faults().clear();
    let renewed = bench.driver.renew(Lane(0), &batch, give_up).await.unwrap();
    assert!(matches!(renewed[0], Ok(Renewed::NotHeld)));
}

#[tokio::test(start_paused = true)]
async fn a_batch_of_two_lanes_is_a_bug_of_the_core() {
    let bench = Bench::new();
    let batch = [Renew::new(
        name(),
        Owner::from_seed("a"),
        HoldId::from_bits(1),
        None,
    )];
    let renewed = bench.driver.renew(Lane(1), &batch, bench.clock.now());
    assert_eq!(renewed.await.unwrap_err().kind(), ErrorKind::Misuse);
}

#[tokio::test(start_paused = true)]
async fn wake_ups_are_lost_doubled_or_cut() {
    let bench = Bench::new();
    let mut wake_ups = bench.driver.wake_ups();
    let waiter = bench.driver.faults();
    let holder = MemoryDriver::connect(&bench.store, MemoryConfig::default());
    let mut look = bench.ask("b");
    let mut heard = Vec::new();
    for (number, fault) in [
        (1, WakeUpFault::Deliver),
        (2, WakeUpFault::Lose),
        (3, WakeUpFault::Double),
        (4, WakeUpFault::Cut),
    ] {
        holder.acquire(&bench.ask("a")).await.unwrap();
        look.ticket = Some(Ticket(NonZeroU64::new(number).unwrap()));
        bench.driver.acquire(&look).await.unwrap();
        waiter.wake_ups(fault);
        holder.release(&release("a")).await.unwrap();
        let shown = bench.driver.inspect(&name()).await.unwrap();
        // The server knows that a client without receivers cannot be served.
        assert_eq!(
            shown.unavailable_for.is_some(),
            fault != WakeUpFault::Cut,
            "{fault:?}"
        );
        waiter.wake_ups(WakeUpFault::Deliver);
        let mut came = 0;
        while let Some(Some(wake_up)) = wake_ups.next().now_or_never() {
            assert_eq!(wake_up == WakeUp::Resync, fault == WakeUpFault::Cut);
            came += 1;
        }
        heard.push(came);
        bench
            .driver
            .leave(&name(), look.ticket.unwrap())
            .await
            .unwrap();
    }
    assert_eq!(heard, [1, 0, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_closed_driver_leaves_its_holds_and_refuses_calls() {
    let bench = Bench::new();
    assert!(bench.acquire("a").await.unwrap());
    bench.driver.close().await;
    bench.driver.close().await;
    let error = bench.acquire("a").await.unwrap_err();
    assert!(is_none(&error));
    assert_eq!(error.retry(), RetryClass::Never);
    assert_eq!(bench.holds().await, 1);
}

#[test]
fn a_named_store_is_the_processes_own() {
    let [one, two, other] = ["memory:x?dlock.wake=poll", "memory:x", "memory:y"]
        .map(|url| MemoryDriver::from_url(url).unwrap());
    assert_eq!(one.capabilities().wake, Wake::Poll);
    assert_eq!(one.capabilities().store, "memory:x");
    assert_eq!(one.capabilities().store, two.capabilities().store);
    assert_ne!(one.capabilities().store, other.capabilities().store);
    let clock = one.store().clock();
    let (owner, hold) = (Owner::from_seed("a"), HoldId::from_bits(1));
    let request = Acquire::new(name(), owner, hold, Lease::default(), clock.now() + SECOND);
    one.acquire(&request).now_or_never().unwrap().unwrap();
    let name = name();
    drop(one);
    let shown = two.inspect(&name).now_or_never().unwrap().unwrap();
    assert_eq!(shown.holds, 1, "it outlives the client that took it");
    let shown = other.inspect(&name).now_or_never().unwrap().unwrap();
    assert_eq!(shown.holds, 0);
}
