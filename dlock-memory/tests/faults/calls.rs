//! The outcome of one call, under each fault that its script can name.

use super::{Bench, SECOND, is_none, is_unknown, name, release};
use dlock_core::{
    HoldId, Owner, RetryClass,
    driver::{DistributedLock, Lane, Released, Renew, Renewed, Ticket},
};
use dlock_memory::{Call, Fault, FaultPlan, Rates};
use futures_util::FutureExt;
use std::{num::NonZeroU64, time::Duration};

#[tokio::test(start_paused = true)]
async fn without_a_fault_no_call_waits() {
    let bench = Bench::new();
    let renew = [Renew::new(
        name(),
        Owner::from_seed("a"),
        HoldId::from_bits(1),
        Some(SECOND),
    )];
    let give_up = bench.clock.now();
    let ticket = Ticket(NonZeroU64::MIN);
    assert!(bench.acquire("a").now_or_never().unwrap().unwrap());
    let renewed = bench.driver.renew(Lane(0), &renew, give_up);
    assert!(matches!(
        renewed.now_or_never().unwrap().unwrap()[..],
        [Ok(Renewed::Until { .. })]
    ));
    let last = release("a");
    let released = bench.driver.release(&last);
    assert!(matches!(
        released.now_or_never().unwrap(),
        Ok(Released::Freed)
    ));
    let name = name();
    assert!(bench.driver.leave(&name, ticket).now_or_never().is_some());
    assert!(bench.driver.inspect(&name).now_or_never().is_some());
    assert!(bench.driver.list("", None, 10).now_or_never().is_some());
    let broken = bench.driver.break_lock(&name, None);
    assert!(broken.now_or_never().is_some());
    for call in Call::ALL {
        assert_eq!(bench.driver.faults().made(call), 1, "{call:?}");
        assert_eq!(bench.store.executed(call), 1, "{call:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn error_before_executes_nothing_and_says_so() {
    let bench = Bench::new();
    bench
        .driver
        .faults()
        .once(Call::Acquire, Fault::ErrorBefore);
    assert!(is_none(&bench.acquire("a").await.unwrap_err()));
    assert_eq!(bench.holds().await, 0);
    assert!(bench.acquire("a").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn error_after_executes_and_does_not_know() {
    let bench = Bench::new();
    bench.driver.faults().once(Call::Acquire, Fault::ErrorAfter);
    assert!(is_unknown(&bench.acquire("a").await.unwrap_err()));
    assert_eq!(bench.holds().await, 1);
    assert!(bench.acquire("a").await.unwrap());
    assert_eq!(bench.holds().await, 1, "the repeat counts once");
}

#[tokio::test(start_paused = true)]
async fn slow_executes_at_once_and_answers_later() {
    let bench = Bench::new();
    bench
        .driver
        .faults()
        .once(Call::Acquire, Fault::Slow(3 * SECOND));
    let start = bench.clock.now();
    let mut acquire = Box::pin(bench.acquire("a"));
    assert!(acquire.as_mut().now_or_never().is_none());
    assert_eq!(bench.holds().await, 1);
    assert!(acquire.await.unwrap());
    assert!(bench.clock.now().since(start) >= 3 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn never_executes_and_never_answers() {
    let bench = Bench::new();
    bench.driver.faults().once(Call::Acquire, Fault::Never);
    let waited = tokio::time::timeout(3600 * SECOND, bench.acquire("a")).await;
    waited.unwrap_err();
    assert_eq!(bench.store.executed(Call::Acquire), 1);
}

#[tokio::test(start_paused = true)]
async fn never_executed_does_nothing_at_all() {
    let bench = Bench::new();
    bench
        .driver
        .faults()
        .once(Call::Acquire, Fault::NeverExecuted);
    let waited = tokio::time::timeout(3600 * SECOND, bench.acquire("a")).await;
    waited.unwrap_err();
    assert_eq!(bench.store.executed(Call::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn late_answers_at_once_and_executes_in_time() {
    let bench = Bench::new();
    let late = Fault::Late(5 * SECOND);
    bench.driver.faults().once(Call::Acquire, late);
    assert!(is_unknown(&bench.acquire("a").await.unwrap_err()));
    assert_eq!(bench.holds().await, 0);
    tokio::time::sleep(5 * SECOND).await;
    tokio::task::yield_now().await;
    // Exactly at its not-after it is not too late yet.
    assert_eq!(bench.holds().await, 1);
}

#[tokio::test(start_paused = true)]
async fn late_is_refused_after_its_not_after() {
    let bench = Bench::new();
    assert!(bench.acquire("a").await.unwrap());
    let late = Fault::Late(5 * SECOND + Duration::from_millis(2));
    bench.driver.faults().once(Call::Acquire, late);
    bench.driver.faults().once(Call::Renew, late);
    bench.driver.faults().once(Call::Release, late);
    let mut queued = bench.ask("b");
    queued.ticket = Some(Ticket(NonZeroU64::MIN));
    bench.driver.acquire(&queued).await.unwrap_err();
    let renew = [Renew::new(
        name(),
        Owner::from_seed("a"),
        HoldId::from_bits(1),
        Some(3600 * SECOND),
    )];
    let renewed = bench.driver.renew(Lane(0), &renew, queued.give_up).await;
    renewed.unwrap_err();
    tokio::time::sleep(6 * SECOND).await;
    assert_eq!(bench.store.refused_late(), 2);
    assert_eq!(bench.store.tickets(&name()), 0, "no ticket was queued");
    let shown = bench.driver.inspect(&name()).await.unwrap();
    assert!(
        shown.holders[0].rest.unwrap() < 25 * SECOND,
        "nothing was prolonged"
    );
    // A release carries no not-after.
    bench.driver.release(&release("a")).await.unwrap_err();
    tokio::time::sleep(6 * SECOND).await;
    assert_eq!(bench.holds().await, 0);
}

#[tokio::test(start_paused = true)]
async fn late_is_said_with_the_servers_time_and_is_worth_repeating() {
    let bench = Bench::new();
    let request = bench.ask("a");
    bench.clock.jump(6 * SECOND);
    let error = bench.driver.acquire(&request).await.unwrap_err();
    assert!(is_none(&error));
    assert_eq!(error.retry(), RetryClass::Now);
    let now = format!("{:?}", bench.store.server_time());
    assert!(error.to_string().contains(&now), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_delayed_request_executes_and_answers_later_also_when_dropped() {
    let bench = Bench::new();
    let delayed = Fault::Delayed(2 * SECOND);
    bench.driver.faults().once(Call::Acquire, delayed);
    bench.driver.faults().once(Call::Release, delayed);
    let start = bench.clock.now();
    assert!(bench.acquire("a").await.unwrap());
    assert!(bench.clock.now().since(start) >= 2 * SECOND);
    let last = release("a");
    let released = bench.driver.release(&last);
    assert!(released.now_or_never().is_none(), "and it is dropped");
    assert_eq!(bench.holds().await, 1);
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(bench.holds().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_takes_its_queued_fault_before_its_standing_one_before_the_plan() {
    let bench = Bench::new();
    let faults = bench.driver.faults();
    let rates = Rates {
        error_before: 1.0,
        ..Rates::default()
    };
    faults.plan(FaultPlan::seeded(1, rates).only(&[Call::Release, Call::Acquire]));
    faults.always(Call::Acquire, Fault::ErrorAfter);
    faults.once(Call::Acquire, Fault::Ok);
    assert!(bench.acquire("a").await.unwrap());
    assert!(is_unknown(&bench.acquire("a").await.unwrap_err()));
    assert!(is_unknown(&bench.acquire("a").await.unwrap_err()));
    faults.always(Call::Acquire, Fault::Ok);
    assert!(is_none(&bench.acquire("a").await.unwrap_err()));
    assert!(is_none(
        &bench.driver.release(&release("a")).await.unwrap_err()
    ));
    bench.driver.inspect(&name()).await.unwrap();
    faults.always_all(Fault::ErrorBefore);
    bench.driver.inspect(&name()).await.unwrap_err();
    faults.clear();
    assert!(bench.acquire("a").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_draws_the_same_faults() {
    let rates = Rates {
        error_before: 0.2,
        error_after: 0.2,
        slow: 0.2,
        longest: SECOND,
        ..Rates::default()
    };
    let mut runs = Vec::new();
    for seed in [7, 7, 8] {
        let bench = Bench::new();
        bench.driver.faults().plan(FaultPlan::seeded(seed, rates));
        let mut run = Vec::new();
        for _ in 0..100 {
            let effect = bench.acquire("a").await.err().map(|error| error.effect());
            run.push((effect, bench.store.server_time()));
        }
        runs.push(run);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}
