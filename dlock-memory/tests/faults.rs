//! What goes wrong between a driver and its store, each fault proven; then the line and the records under whatever can happen to them.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, which clippy takes for code"
)]

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

/// The line: who is served, who is told, and what the dead cost.
mod line {
    use dlock_core::{
        Acquire, Acquired, Clock, DistributedLock, Held, Hint, HoldId, Instant, Lease, LockName,
        Owner, Release, Released, Ticket, Wake,
    };
    use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    use futures_core::stream::BoxStream;
    use futures_util::{FutureExt, StreamExt};
    use std::{collections::VecDeque, num::NonZeroU64, time::Duration};

    const ACCEPT: Duration = Duration::from_secs(1);
    /// How many hints one client may leave unread.
    const CAPACITY: usize = 1024;
    const INTERVAL: Duration = Duration::from_secs(2);

    fn name() -> LockName {
        "n".parse().unwrap()
    }

    fn ticket(number: u64) -> Ticket {
        Ticket(NonZeroU64::new(number).unwrap())
    }

    /// A client with at most one hold and one ticket. Its calls must be done when polled once: the store never makes them wait.
    struct Waiter {
        driver: MemoryDriver,
        hints: BoxStream<'static, Hint>,
        owner: Owner,
        next: u64,
        lease: Lease,
    }

    impl Waiter {
        fn new(store: &MemoryStore, number: u64, wake: Wake) -> Self {
            let driver = MemoryDriver::connect(store, MemoryConfig::new(wake));
            Self {
                hints: driver.hints(),
                driver,
                owner: Owner::from_seed(&number.to_string()),
                next: 1,
                lease: Lease::default(),
            }
        }

        fn ask(&self) -> Acquire {
            let hold = HoldId::from_bits(self.next);
            Acquire::new(name(), self.owner, hold, self.lease, Instant::FAR)
        }

        fn acquire(&self, req: &Acquire) -> Acquired {
            self.driver.acquire(req).now_or_never().unwrap().unwrap()
        }

        /// Takes it without standing in line.
        fn takes(&self) -> bool {
            matches!(self.acquire(&self.ask()), Acquired::Granted(_))
        }

        /// Looks with its ticket: `None` is granted.
        fn looks(&self) -> Option<Held> {
            let mut req = self.ask();
            req.line = Some(ticket(self.next));
            match self.acquire(&req) {
                Acquired::Granted(_) => None,
                Acquired::Held(held) => Some(held),
                Acquired::Gone => panic!("nothing was joined"),
                other => panic!("{other:?}"),
            }
        }

        fn ahead(&self) -> Option<u32> {
            self.looks().and_then(|held| held.ahead)
        }

        fn leaves(&mut self) {
            let name = name();
            let left = self.driver.leave(&name, ticket(self.next));
            left.now_or_never().unwrap().unwrap();
            self.next += 1;
        }

        fn releases(&mut self, keep: Option<Duration>) -> Released {
            let mut req = Release::new(name(), self.owner, HoldId::from_bits(self.next));
            req.keep = keep;
            self.next += 1;
            self.driver.release(&req).now_or_never().unwrap().unwrap()
        }

        fn heard(&mut self) -> Vec<Hint> {
            let mut heard = Vec::new();
            while let Some(Some(hint)) = self.hints.next().now_or_never() {
                heard.push(hint);
            }
            heard
        }

        fn turn(&self) -> Hint {
            let (name, ticket) = (name(), ticket(self.next));
            Hint::Turn { name, ticket }
        }

        fn first(&self, look_in: Duration) -> Hint {
            let (name, ticket) = (name(), ticket(self.next));
            Hint::First {
                name,
                ticket,
                look_in,
            }
        }
    }

    /// A store where the first client holds the name and the others stand in line in their order.
    fn line<const N: usize>() -> (Clock, MemoryStore, [Waiter; N]) {
        let clock = Clock::simulated();
        let store = MemoryStore::new(clock.clone());
        let waiters = std::array::from_fn(|at| {
            let at = u32::try_from(at).unwrap();
            let waiter = Waiter::new(&store, at.into(), Wake::Line);
            assert_eq!(waiter.ahead(), at.checked_sub(1));
            waiter
        });
        (clock, store, waiters)
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_reserves_for_the_head_and_tells_the_one_behind_it() {
        let (_clock, store, [mut a, mut b, mut c]) = line();
        assert!(matches!(a.releases(None), Released::Freed));
        assert_eq!(b.heard(), [b.turn()]);
        assert_eq!(c.heard(), [c.first(ACCEPT)]);
        let shown = b.driver.inspect(&name()).await.unwrap();
        assert_eq!(
            (shown.holds, shown.shut, shown.waiters),
            (0, Some(ACCEPT), Some(1))
        );
        assert!(!a.takes(), "nobody barges");
        let held = c.looks().unwrap();
        assert_eq!((held.ahead, held.look_in), (Some(0), Some(ACCEPT)));
        assert!(b.looks().is_none());
        assert_eq!(store.tickets(&name()), 1);
        // The rest of the lease is far away, so it looks at its interval.
        assert_eq!(c.looks().unwrap().look_in, Some(INTERVAL));
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_are_gone_are_passed_over_at_once() {
        let (_clock, _store, [mut a, b, c, mut d, e]) = line();
        drop((b, c));
        e.driver.close().await;
        a.releases(None);
        assert_eq!(d.heard(), [d.turn()]);
        assert!(d.looks().is_none());
        d.releases(None);
        // Only the dead are left in line.
        assert!(a.takes());
    }

    #[tokio::test(start_paused = true)]
    async fn a_plain_acquire_takes_what_only_the_dead_wait_for() {
        let (clock, store, [a, b, c]) = line();
        drop((b, c));
        clock.jump(a.lease.length());
        assert_eq!(store.tickets(&name()), 2);
        assert!(a.takes());
        assert_eq!(store.tickets(&name()), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_plain_acquire_of_a_lapsed_lock_serves_the_line() {
        let (clock, store, [a, mut b]) = line();
        clock.jump(a.lease.length() - Duration::from_secs(1));
        b.looks();
        clock.jump(Duration::from_secs(1));
        let late = Waiter::new(&store, 9, Wake::Poll);
        assert!(!late.takes());
        assert_eq!(b.heard(), [b.turn()]);
        assert!(b.looks().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_behind_is_told_past_the_dead() {
        let (_clock, store, [mut a, mut b, c, mut d]) = line();
        drop(c);
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        assert_eq!(d.heard(), [d.first(ACCEPT)]);
        assert_eq!(store.tickets(&name()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_at_a_free_name_goes_by_its_old_place() {
        let (clock, _store, [mut a, b, c]) = line();
        a.releases(None);
        clock.jump(ACCEPT);
        assert!(b.looks().is_none(), "it looked before c did");
        assert_eq!(c.ahead(), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_leaves_a_free_name_serves_the_next() {
        let (clock, _store, [a, mut b, mut c]) = line();
        clock.jump(a.lease.length() - Duration::from_secs(1));
        assert!(b.looks().is_some() && c.looks().is_some());
        clock.jump(Duration::from_secs(1));
        b.leaves();
        assert_eq!(c.heard(), [c.turn()]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_keeps_its_place_over_one_lapsed_turn_and_not_over_two() {
        let (clock, _store, [mut a, mut b, mut c, mut d]) = line();
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        clock.jump(ACCEPT);
        assert!(d.looks().is_some(), "the one before it is served first");
        assert_eq!(c.heard(), [c.first(ACCEPT), c.turn()]);
        assert_eq!(b.ahead(), Some(0), "back at its old place");
        assert_eq!(d.ahead(), Some(1));
        assert!(c.looks().is_none());
        c.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        clock.jump(ACCEPT);
        assert!(d.looks().is_none(), "b is in no line until it looks");
        assert_eq!(c.ahead(), Some(0));
        assert_eq!(b.ahead(), Some(1), "two turns lapsed");
        d.releases(None);
        assert_eq!(c.heard(), [c.turn()]);
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_clients_together_cost_one_entry_deadline() {
        let (clock, _store, [mut a, b, c, d, e, f, g, h, mut last]) = line();
        a.releases(None);
        let start = clock.now();
        while last.looks().is_some() {
            last.heard();
            clock.jump(ACCEPT);
        }
        assert_eq!(clock.now().since(start), 3 * INTERVAL);
        drop((b, c, d, e, f, g, h));
    }

    #[tokio::test(start_paused = true)]
    async fn leave_hands_on_what_was_reserved() {
        let (_clock, store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        b.leaves();
        assert_eq!(c.heard(), [c.first(ACCEPT), c.turn()]);
        b.leaves();
        assert!(c.looks().is_none());
        assert_eq!(store.tickets(&name()), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_uses_up_the_ticket_and_puts_the_next_at_the_end() {
        let (_clock, _store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        let mut req = b.ask();
        (req.line, req.next) = (Some(ticket(1)), Some(ticket(2)));
        assert!(matches!(b.acquire(&req), Acquired::Granted(_)));
        assert!(matches!(b.acquire(&req), Acquired::Granted(_)), "a repeat");
        b.releases(None);
        assert_eq!(c.heard().last(), Some(&c.turn()));
        assert_eq!(b.heard().last(), Some(&b.first(ACCEPT)));
        assert!(c.looks().is_none());
        assert_eq!(b.ahead(), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn reentry_goes_past_the_line() {
        let (_clock, store, [mut a, b]) = line();
        a.next += 1;
        assert!(a.looks().is_none());
        assert_eq!(b.ahead(), Some(0));
        // Its own ticket may stand there too, and is used up then.
        let mut strange = a.ask();
        strange.owner = Owner::from_seed("another of the same client");
        strange.line = Some(ticket(7));
        assert!(matches!(a.acquire(&strange), Acquired::Held(_)));
        assert_eq!(store.tickets(&name()), 2);
        a.next = 7;
        assert!(a.looks().is_none());
        assert_eq!(store.tickets(&name()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_kept_release_tells_the_head_when_to_look() {
        let (clock, _store, [mut a, mut b]) = line();
        let keep = Duration::from_millis(1500);
        assert!(matches!(a.releases(Some(keep)), Released::Kept { rest } if rest == keep));
        assert_eq!(b.heard(), [b.first(keep)]);
        assert!(!a.takes(), "its last owner is shut out too");
        clock.jump(keep - Duration::from_nanos(1));
        assert!(b.looks().is_some());
        clock.jump(Duration::from_nanos(1));
        assert!(b.looks().is_none());
        assert!(a.looks().is_some());
        b.releases(Some(10 * INTERVAL));
        assert_eq!(
            a.heard(),
            [a.first(INTERVAL)],
            "its entry must not run out meanwhile"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_break_opens_a_reservation_and_serves_the_next() {
        let (_clock, _store, [mut a, mut b, mut c]) = line();
        a.releases(None);
        assert_eq!(b.heard(), [b.turn()]);
        a.driver.break_lock(&name(), None).await.unwrap();
        assert_eq!(c.heard().last(), Some(&c.turn()));
        assert_eq!(b.ahead(), Some(0));
        assert!(c.looks().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flushed_line_comes_back_with_the_looks() {
        let (_clock, store, [a, b, c]) = line();
        store.flush();
        assert!(b.looks().is_none(), "whoever looks first has it");
        assert_eq!(c.ahead(), Some(0));
        assert!(a.looks().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn free_is_said_once_to_each_client_that_waits() {
        let store = MemoryStore::new(Clock::simulated());
        let mut holder = Waiter::new(&store, 0, Wake::Hints);
        let mut waiters: Vec<_> = (1..4)
            .map(|at| Waiter::new(&store, at, Wake::Hints))
            .collect();
        assert!(holder.looks().is_none());
        for waiter in &mut waiters {
            assert_eq!(waiter.looks().unwrap().look_in, Some(INTERVAL));
            waiter.next += 1;
            waiter.looks();
        }
        waiters[1].leaves();
        waiters[1].next -= 2;
        waiters[1].leaves();
        holder.releases(None);
        assert_eq!(waiters[0].heard(), [Hint::Free(name())]);
        assert_eq!(waiters[1].heard(), []);
        assert_eq!(waiters[2].heard(), [Hint::Free(name())]);
        assert_eq!(holder.heard(), []);
        assert!(waiters[2].looks().is_none(), "no line: whoever is first");
    }

    #[tokio::test(start_paused = true)]
    async fn polling_drivers_hear_nothing_and_learn_the_rest() {
        let store = MemoryStore::new(Clock::simulated());
        let mut holder = Waiter::new(&store, 0, Wake::Poll);
        let mut waiter = Waiter::new(&store, 1, Wake::Poll);
        assert!(holder.looks().is_none());
        let held = waiter.looks().unwrap();
        assert_eq!(
            (held.look_in, held.ahead),
            (Some(waiter.lease.length()), None)
        );
        holder.releases(None);
        assert_eq!(waiter.hints.next().await, None);
        assert!(waiter.looks().is_none());
        assert_eq!(waiter.heard(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn hints_are_taken_once_and_end_with_close() {
        let store = MemoryStore::new(Clock::simulated());
        let mut waiter = Waiter::new(&store, 0, Wake::Line);
        assert_eq!(waiter.driver.hints().next().await, None);
        assert_eq!(waiter.hints.next().now_or_never(), None);
        waiter.driver.close().await;
        assert_eq!(waiter.hints.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn hints_that_do_not_fit_become_one_look_again() {
        let store = MemoryStore::new(Clock::simulated());
        let mut waiter = Waiter::new(&store, 0, Wake::Line);
        for _ in 0..CAPACITY + 5 {
            waiter.driver.faults().inject(Hint::Free(name()));
        }
        let heard = waiter.heard();
        assert_eq!(heard.len(), CAPACITY + 1);
        assert_eq!(heard.last(), Some(&Hint::LookAgain));
        assert_eq!(waiter.heard(), []);
    }

    /// Whatever is released, left, killed or tried in between: those who are still there go in the order they came.
    #[tokio::test(start_paused = true)]
    async fn the_line_is_first_come_first_served() {
        for seed in 0..60 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let store = MemoryStore::new(Clock::simulated());
            let mut holder = Waiter::new(&store, 0, Wake::Line);
            assert!(holder.takes());
            let mut waiting = VecDeque::new();
            for number in 1..300 {
                match rng.u8(0..10) {
                    0..4 => {
                        let waiter = Waiter::new(&store, number, Wake::Line);
                        assert_eq!(waiter.ahead().unwrap() as usize, store.tickets(&name()) - 1);
                        waiting.push_back(waiter);
                    }
                    4 if !waiting.is_empty() => {
                        let mut waiter: Waiter =
                            waiting.remove(rng.usize(..waiting.len())).unwrap();
                        if rng.bool() {
                            waiter.leaves();
                        }
                    }
                    5 if !waiting.is_empty() => {
                        assert!(waiting[rng.usize(..waiting.len())].looks().is_some());
                    }
                    6 => assert!(!Waiter::new(&store, number, Wake::Line).takes()),
                    _ => {
                        let Some(mut next) = waiting.pop_front() else {
                            continue;
                        };
                        holder.releases(None);
                        assert_eq!(next.heard().last(), Some(&next.turn()), "seed {seed}");
                        assert!(waiting.iter().all(|other| other.looks().is_some()));
                        assert!(next.looks().is_none(), "seed {seed}");
                        holder = next;
                    }
                }
            }
        }
    }

    /// Whatever lapses, is lost or is stopped for a while: whoever goes on looking gets it, and one at a time.
    #[tokio::test(start_paused = true)]
    async fn whoever_goes_on_looking_gets_it() {
        for seed in 0..60 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let clock = Clock::simulated();
            let store = MemoryStore::new(clock.clone());
            let mut waiters: Vec<_> = (0..8)
                .map(|at| Waiter::new(&store, at, Wake::Line))
                .collect();
            let mut inside: Option<(usize, Instant)> = None;
            for _ in 0..400 {
                clock.jump(Duration::from_millis(rng.u64(..900)));
                let at = rng.usize(..waiters.len());
                inside = inside.filter(|(_, end)| *end > clock.now());
                let is_inside = inside.is_some_and(|(holder, _)| holder == at);
                match rng.u8(..10) {
                    0 if !is_inside => waiters[at].leaves(),
                    1 if rng.u8(..8) == 0 => {
                        store.flush();
                        inside = None;
                    }
                    2 => drop(waiters[at].heard()),
                    3..6 => {
                        let Some((holder, _)) = inside.take() else {
                            continue;
                        };
                        assert!(matches!(waiters[holder].releases(None), Released::Freed));
                    }
                    _ if is_inside => {}
                    _ => {
                        if waiters[at].looks().is_none() {
                            assert!(inside.is_none(), "seed {seed}");
                            inside = Some((at, clock.now() + waiters[at].lease.length()));
                        }
                    }
                }
            }
            if let Some((holder, _)) = inside {
                waiters[holder].releases(None);
            }
            let mut left = waiters;
            for round in 0.. {
                assert!(round < 40, "seed {seed}: {} still wait", left.len());
                clock.jump(INTERVAL);
                left.retain_mut(|waiter| {
                    waiter.heard();
                    let granted = waiter.looks().is_none();
                    if granted {
                        waiter.releases(None);
                    }
                    !granted
                });
                if left.is_empty() {
                    break;
                }
            }
        }
    }
}

/// Every answer, compared with that of a log from which it is computed without deleting anything; and what is forgotten.
mod model {
    use super::name;
    use dlock_core::{
        Acquire, Acquired, Broken, Clock, Cursor, DistributedLock, ErrorKind, FencingToken, HoldId,
        Holds, Instant, Lane, Lease, LockName, Owner, Release, Released, Renew, Renewed,
    };
    use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    use futures_util::FutureExt;
    use proptest::{collection::vec, option, prelude::*};
    use std::{collections::BTreeSet, time::Duration};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn numbered(number: u32) -> LockName {
        format!("n{number:05}").parse().unwrap()
    }

    fn wanted(name: LockName, owner: u8, hold: u64, lease: Duration) -> Acquire {
        let (owner, hold) = (
            Owner::from_seed(&owner.to_string()),
            HoldId::from_bits(hold),
        );
        let lease = Lease::fixed(lease).unwrap();
        Acquire::new(name, owner, hold, lease, Instant::FAR)
    }

    /// The same operations on the store as on the log, and their answers in the same words. Nothing here ever waits.
    struct Store {
        clock: Clock,
        driver: MemoryDriver,
    }

    impl Store {
        /// Inside a paused runtime.
        fn new() -> Self {
            let clock = Clock::simulated();
            let store = MemoryStore::new(clock.clone());
            let driver = MemoryDriver::connect(&store, MemoryConfig::default());
            Self { clock, driver }
        }

        fn kept(&self) -> usize {
            self.driver.store().names()
        }

        /// Takes a name that must be free for a second; its token.
        fn take(&self, name: LockName) -> u64 {
            let req = wanted(name, 0, 0, Duration::from_secs(1));
            match self.driver.acquire(&req).now_or_never().unwrap().unwrap() {
                Acquired::Granted(grant) => grant.token.unwrap().0,
                other => panic!("{other:?}"),
            }
        }

        fn acquire(&self, (owner, hold, lease, join): (u8, u64, Duration, Option<u64>)) -> String {
            let mut req = wanted(name(), owner, hold, lease);
            req.join = join.map(FencingToken);
            match self.driver.acquire(&req).now_or_never().unwrap().unwrap() {
                Acquired::Granted(grant) => {
                    let token = grant.token.unwrap();
                    format!("granted {token} {} {:?}", grant.holds, grant.valid_for)
                }
                Acquired::Held(_) => "held".to_owned(),
                other => format!("{other:?}").to_lowercase(),
            }
        }

        fn renew(&self, owner: u8, hold: u64, lease: Option<Duration>) -> String {
            let owner = Owner::from_seed(&owner.to_string());
            let batch = [Renew::new(name(), owner, HoldId::from_bits(hold), lease)];
            let renewed = self.driver.renew(Lane(0), &batch, Instant::FAR);
            match &renewed.now_or_never().unwrap().unwrap()[..] {
                [Ok(Renewed::Until { valid_for })] => format!("until {valid_for:?}"),
                [Ok(Renewed::NotHeld)] => "not held".to_owned(),
                other => panic!("{other:?}"),
            }
        }

        fn release(&self, owner: u8, hold: Option<u64>, keep: Option<Duration>) -> String {
            let owner = Owner::from_seed(&owner.to_string());
            let mut req = Release::new(name(), owner, HoldId::from_bits(0));
            req.holds = hold.map_or(Holds::All, |hold| Holds::One(HoldId::from_bits(hold)));
            req.keep = keep;
            match self.driver.release(&req).now_or_never().unwrap().unwrap() {
                Released::Freed => "freed".to_owned(),
                Released::StillHeld { holds } => format!("still held {holds}"),
                Released::Kept { rest } => format!("kept {rest:?}"),
                _ => "not held".to_owned(),
            }
        }

        fn break_lock(&self, only: Option<u64>) -> String {
            let number = |token: Option<FencingToken>| token.map(|token| token.0);
            let name = name();
            let broken = self.driver.break_lock(&name, only.map(FencingToken));
            match broken.now_or_never().unwrap().unwrap() {
                Broken::Freed { token } => format!("freed {:?}", number(token)),
                Broken::Changed { token } => format!("changed {:?}", number(token)),
                _ => "was free".to_owned(),
            }
        }

        fn look(&self) -> String {
            let name = name();
            let shown = self.driver.inspect(&name).now_or_never().unwrap().unwrap();
            let holder = shown.holders.first();
            let token = holder.and_then(|holder| holder.token).map(|token| token.0);
            let rest = holder.and_then(|holder| holder.rest);
            format!("{} {token:?} {rest:?} {:?}", shown.holds, shown.shut)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_counter_is_forgotten_a_day_after_its_name_was_last_busy() {
        let store = Store::new();
        store.take(numbered(0));
        // Its lease is a second.
        store
            .clock
            .jump(DAY + Duration::from_secs(1) - Duration::from_nanos(1));
        // The walk looks at two names for each new one.
        (1..10).for_each(|number| {
            store.take(numbered(number));
        });
        assert_eq!(store.kept(), 10);
        store.clock.jump(Duration::from_nanos(1));
        (10..20).for_each(|number| {
            store.take(numbered(number));
        });
        assert_eq!(store.kept(), 19);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_ahead_of_the_clock_is_not_forgotten() {
        let store = Store::new();
        let token = store.take(name());
        store.driver.store().step_clock_back(10 * DAY);
        assert_eq!(store.release(0, Some(0), None), "freed");
        store.clock.jump(2 * DAY);
        (1..10).for_each(|number| {
            store.take(numbered(number));
        });
        assert_eq!(store.take(name()), token + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn names_are_bounded_by_those_of_about_a_day() {
        let store = Store::new();
        for number in 0..2_000 {
            store.take(numbered(number));
            store.clock.jump(DAY / 100);
            assert!(store.kept() <= 400, "{} at {number}", store.kept());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_walk_shows_each_held_name_once_in_bounded_steps() {
        let store = Store::new();
        (0..25).for_each(|number| {
            store.take(numbered(number));
        });
        let list = |prefix: &str, from: Option<&Cursor>, limit| {
            store
                .driver
                .list(prefix, from, limit)
                .now_or_never()
                .unwrap()
        };
        let walk = |prefix: &str, limit: usize| {
            let (mut seen, mut from) = (Vec::new(), None);
            loop {
                let page = list(prefix, from.as_ref(), limit).unwrap();
                assert!(page.found.len() <= limit.max(1));
                seen.extend(page.found.into_iter().map(|shown| shown.name));
                let Some(next) = page.next else { return seen };
                from = Some(next);
            }
        };
        for limit in [0, 1, 7, 25, usize::MAX] {
            let (all, some) = ((0..25).map(numbered), (20..25).map(numbered));
            assert_eq!(walk("", limit), all.collect::<Vec<_>>());
            assert_eq!(walk("n0002", limit), some.collect::<Vec<_>>());
        }
        let stranger = Cursor(b"n00003".to_vec());
        let error = list("", Some(&stranger), 25).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        // Of a walk over more: what stands before the prefix is skipped, not walked.
        let other = list("", None, 1).unwrap().next;
        assert_eq!(list("n0002", other.as_ref(), 25).unwrap().found.len(), 5);
        store.clock.jump(Duration::from_secs(1));
        assert!(list("", None, 25).unwrap().found.is_empty());
    }

    /// What is done to one name. Owners, holds and leases are few, so that they meet.
    #[derive(Clone, Debug)]
    enum Op {
        Acquire {
            owner: u8,
            hold: u64,
            lease: u64,
            join: Option<u64>,
        },
        Renew {
            owner: u8,
            hold: u64,
            lease: Option<u64>,
        },
        Release {
            owner: u8,
            hold: Option<u64>,
            keep: Option<u64>,
        },
        Break {
            back: Option<u64>,
        },
        Pass {
            millis: u64,
        },
    }

    fn op() -> impl Strategy<Value = Op> {
        let lease = || 100..400_u64;
        prop_oneof![
            6 => (0..2_u8, 0..4_u64, lease(), option::weighted(0.2, 0..2_u64))
                .prop_map(|(owner, hold, lease, join)| Op::Acquire { owner, hold, lease, join }),
            2 => (0..2_u8, 0..4_u64, option::of(lease()))
                .prop_map(|(owner, hold, lease)| Op::Renew { owner, hold, lease }),
            4 => (0..2_u8, option::weighted(0.9, 0..4_u64), option::weighted(0.3, 0..500_u64))
                .prop_map(|(owner, hold, keep)| Op::Release { owner, hold, keep }),
            1 => option::of(0..2_u64).prop_map(|back| Op::Break { back }),
            4 => (0..250_u64).prop_map(|millis| Op::Pass { millis }),
        ]
    }

    /// A hold that was ever taken, in a log from which everything else is computed.
    #[derive(Debug)]
    struct Taken {
        token: u64,
        owner: u8,
        hold: u64,
        end: Duration,
        given_back: bool,
        keep: Duration,
    }

    /// The other implementation: it deletes nothing, and knows what is true by looking through all that ever happened.
    #[derive(Debug, Default)]
    struct Log {
        taken: Vec<Taken>,
        /// The incarnation whose keep counts, since its last hold was given back; broken open: none.
        kept: Option<u64>,
    }

    impl Log {
        fn living(&self, now: Duration) -> impl Iterator<Item = &Taken> {
            self.taken
                .iter()
                .filter(move |one| !one.given_back && one.end > now)
        }

        fn token(&self) -> u64 {
            self.taken.last().map_or(0, |one| one.token)
        }

        fn shut_until(&self) -> Duration {
            let kept = self.taken.iter().filter(|one| Some(one.token) == self.kept);
            kept.map(|one| one.keep).max().unwrap_or_default()
        }

        fn find(&mut self, now: Duration, owner: u8, hold: u64) -> Option<&mut Taken> {
            let lives = |one: &&mut Taken| !one.given_back && one.end > now;
            let mut named = self
                .taken
                .iter_mut()
                .filter(|one| (one.owner, one.hold) == (owner, hold));
            named.find(lives)
        }

        fn acquire(&mut self, now: Duration, ask: (u8, u64, Duration, Option<u64>)) -> String {
            let (owner, hold, lease, join) = ask;
            let holds = self.living(now).count();
            let inside = self.living(now).next().map(|one| (one.owner, one.token));
            let token = match inside {
                Some((holder, token))
                    if holder == owner && join.is_none_or(|join| join == token) =>
                {
                    token
                }
                _ if join.is_some() => return "gone".to_owned(),
                Some(_) => return "held".to_owned(),
                None if self.shut_until() > now => return "held".to_owned(),
                None => u64::try_from(now.as_micros())
                    .unwrap()
                    .max(self.token() + 1),
            };
            if let Some(again) = self.find(now, owner, hold) {
                return format!("granted {token} {holds} {:?}", again.end - now);
            }
            let (end, keep) = (now + lease, Duration::ZERO);
            self.taken.push(Taken {
                token,
                owner,
                hold,
                end,
                given_back: false,
                keep,
            });
            format!("granted {token} {} {lease:?}", holds + 1)
        }

        fn renew(
            &mut self,
            now: Duration,
            owner: u8,
            hold: u64,
            lease: Option<Duration>,
        ) -> String {
            let Some(one) = self.find(now, owner, hold) else {
                return "not held".to_owned();
            };
            one.end = one.end.max(now + lease.unwrap_or_default());
            format!("until {:?}", one.end - now)
        }

        fn release(
            &mut self,
            now: Duration,
            owner: u8,
            hold: Option<u64>,
            keep: Duration,
        ) -> String {
            let token = self.token();
            let mut found = false;
            for one in &mut self.taken {
                let named = one.owner == owner && hold.is_none_or(|hold| one.hold == hold);
                if named && !one.given_back && one.end > now {
                    (one.given_back, one.keep, found) = (true, now + keep, true);
                }
            }
            match self.living(now).count() {
                _ if !found => return "not held".to_owned(),
                0 => self.kept = Some(token),
                holds => return format!("still held {holds}"),
            }
            match self.shut_until().saturating_sub(now) {
                Duration::ZERO => "freed".to_owned(),
                rest => format!("kept {rest:?}"),
            }
        }

        fn break_lock(&mut self, now: Duration, only: Option<u64>) -> String {
            let token = self.living(now).next().map(|one| one.token);
            if token.is_none() && self.shut_until() <= now {
                return "was free".to_owned();
            }
            if only.is_some() && only != token {
                return format!("changed {token:?}");
            }
            self.taken.iter_mut().for_each(|one| one.given_back = true);
            self.kept = None;
            format!("freed {token:?}")
        }

        fn look(&self, now: Duration) -> String {
            let holds = self.living(now).count();
            let rest = self.living(now).map(|one| one.end - now).max();
            let shut = Some(self.shut_until().saturating_sub(now))
                .filter(|rest| holds == 0 && !rest.is_zero());
            let token = rest.map(|_| self.token());
            format!("{holds} {token:?} {rest:?} {shut:?}")
        }
    }

    /// A runtime whose time only we move, entered.
    fn paused() -> tokio::runtime::Runtime {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn answers_are_those_of_a_log_of_all_that_ever_happened(ops in vec(op(), 1..120)) {
            let runtime = paused();
            let _inside = runtime.enter();
            let (store, mut log) = (Store::new(), Log::default());
            for op in ops {
                let now = store.driver.store().server_time();
                let (told, true_) = match op.clone() {
                    Op::Pass { millis } => {
                        store.clock.jump(Duration::from_millis(millis));
                        (String::new(), String::new())
                    }
                    Op::Acquire { owner, hold, lease, join } => {
                        // The present incarnation's token, or the one after it, which nobody has.
                        let join = join.map(|off| log.token() + off);
                        let ask = (owner, hold, Duration::from_millis(lease), join);
                        (store.acquire(ask), log.acquire(now, ask))
                    }
                    Op::Renew { owner, hold, lease } => {
                        let lease = lease.map(Duration::from_millis);
                        (store.renew(owner, hold, lease), log.renew(now, owner, hold, lease))
                    }
                    Op::Release { owner, hold, keep } => {
                        let keep = keep.map(Duration::from_millis);
                        let true_ = log.release(now, owner, hold, keep.unwrap_or_default());
                        (store.release(owner, hold, keep), true_)
                    }
                    Op::Break { back } => {
                        let only = back.map(|back| log.token().saturating_sub(back));
                        (store.break_lock(only), log.break_lock(now, only))
                    }
                };
                let now = store.driver.store().server_time();
                prop_assert_eq!(told, true_, "{:?}", op);
                prop_assert_eq!(store.look(), log.look(now), "after {:?}", op);
                let owners: BTreeSet<_> = log.living(now).map(|one| one.owner).collect();
                prop_assert!(owners.len() <= 1);
            }
        }

        #[test]
        fn tokens_grow_though_the_clock_is_set_back(steps in vec((0..2_000_000_u64, any::<bool>()), 1..60)) {
            let runtime = paused();
            let _inside = runtime.enter();
            let (store, mut last) = (Store::new(), 0);
            for (millis, back) in steps {
                let by = Duration::from_millis(millis);
                if back {
                    store.driver.store().step_clock_back(by);
                } else {
                    store.driver.store().step_clock(by);
                }
                store.break_lock(None);
                let token = store.take(name());
                prop_assert!(token > last);
                last = token;
            }
        }
    }
}
