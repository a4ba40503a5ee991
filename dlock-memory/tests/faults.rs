//! What goes wrong between a driver and its store, each fault proven.

use dlock_core::{
    Acquire, Acquired, Clock, DistributedLock, DriverError, Effect, ErrorKind, Hint, HoldId, Lane,
    Lease, LockName, Owner, Release, Released, Renew, Renewed, Retry, Ticket, Wake,
};
use dlock_memory::{
    Call, Fault, FaultPlan, HintFault, MemoryConfig, MemoryDriver, MemoryStore, Rates,
};
use futures_util::{FutureExt, StreamExt};
use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

const SECOND: Duration = Duration::from_secs(1);

/// A store under a simulated clock, and one client of it.
struct Bench {
    clock: Clock,
    store: MemoryStore,
    driver: MemoryDriver,
}

impl Bench {
    fn new() -> Self {
        let clock = Clock::simulated();
        let store = MemoryStore::new(clock.clone());
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        Self {
            clock,
            store,
            driver,
        }
    }

    /// An acquire that gives up in five seconds.
    fn ask(&self, owner: &str) -> Acquire {
        let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(1));
        let give_up = self.clock.now() + 5 * SECOND;
        Acquire::new(name(), owner, hold, Lease::default(), give_up)
    }

    async fn acquire(&self, owner: &str) -> Result<bool, DriverError> {
        let acquired = self.driver.acquire(&self.ask(owner)).await?;
        Ok(matches!(acquired, Acquired::Granted(_)))
    }

    /// How many holds the store has, seen past the faults of the driver.
    async fn holds(&self) -> u32 {
        let observer = MemoryDriver::connect(&self.store, MemoryConfig::default());
        let shown = observer.inspect(&name()).await;
        shown.expect("the observer has no faults").holds
    }
}

fn name() -> LockName {
    "orders:42".parse().expect("it is a legal name")
}

fn release(owner: &str) -> Release {
    Release::new(name(), Owner::from_seed(owner), HoldId::from_bits(1))
}

fn is_none(error: &DriverError) -> bool {
    (error.kind(), error.effect()) == (ErrorKind::Unavailable, Effect::None)
}

fn is_unknown(error: &DriverError) -> bool {
    (error.kind(), error.effect()) == (ErrorKind::Unavailable, Effect::Unknown)
}

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
    queued.line = Some(Ticket(NonZeroU64::MIN));
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
    assert_eq!(bench.store.tickets(&name()), 0, "nobody was queued");
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
    assert_eq!(error.retry(), Retry::Now);
    let now = format!("{:?}", bench.store.server_time());
    assert!(error.to_string().contains(&now), "{error}");
}

#[tokio::test(start_paused = true)]
async fn delayed_executes_and_answers_later_also_when_nobody_listens() {
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

#[tokio::test(start_paused = true)]
async fn a_stopped_server_executes_later_in_order_whoever_is_left() {
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
    let mut hints = bench.driver.hints();
    assert!(bench.acquire("a").await.unwrap());
    bench.store.down();
    bench.store.stop();
    bench.store.cont();
    assert!(is_none(&bench.acquire("a").await.unwrap_err()));
    bench.store.up();
    assert_eq!(hints.next().await, Some(Hint::LookAgain));
    assert!(!bench.acquire("b").await.unwrap());
    assert_eq!(bench.holds().await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_restart_keeps_everything_or_nothing() {
    let bench = Bench::new();
    let mut hints = bench.driver.hints();
    assert!(bench.acquire("a").await.unwrap());
    bench.store.restart(true);
    assert_eq!(hints.next().await, Some(Hint::LookAgain));
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
        let token = grant.token.unwrap().0;
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
async fn hints_are_lost_doubled_or_cut() {
    let bench = Bench::new();
    let mut hints = bench.driver.hints();
    let waiter = bench.driver.faults();
    let holder = MemoryDriver::connect(&bench.store, MemoryConfig::default());
    let mut look = bench.ask("b");
    let mut heard = Vec::new();
    for (number, fault) in [
        (1, HintFault::Deliver),
        (2, HintFault::Lose),
        (3, HintFault::Double),
        (4, HintFault::Cut),
    ] {
        holder.acquire(&bench.ask("a")).await.unwrap();
        look.line = Some(Ticket(NonZeroU64::new(number).unwrap()));
        bench.driver.acquire(&look).await.unwrap();
        waiter.hints(fault);
        holder.release(&release("a")).await.unwrap();
        let shown = bench.driver.inspect(&name()).await.unwrap();
        // The server knows that a client without receivers cannot be served.
        assert_eq!(shown.shut.is_some(), fault != HintFault::Cut, "{fault:?}");
        waiter.hints(HintFault::Deliver);
        let mut came = 0;
        while let Some(Some(hint)) = hints.next().now_or_never() {
            assert_eq!(hint == Hint::LookAgain, fault == HintFault::Cut);
            came += 1;
        }
        heard.push(came);
        bench
            .driver
            .leave(&name(), look.line.unwrap())
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
    assert_eq!(error.retry(), Retry::Never);
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
