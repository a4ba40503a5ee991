//! What a quorum of three memory stores survives, through clients, in simulated time.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{
    Client, Clock, Effect, Error, ErrorKind, FencingToken, Guard, HoldId, Lease, LockName, Owner,
    driver::{Acquire, Acquired, DistributedLock, Release, Released},
};
use dlock_memory::{Call, Fault, Faults, MemoryConfig, MemoryDriver, MemoryStore};
use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

/// Three stores.
struct Bed {
    clock: Clock,
    stores: [MemoryStore; 3],
}

impl Bed {
    fn new() -> Self {
        let clock = Clock::simulated();
        let stores = [(); 3].map(|()| MemoryStore::new(clock.clone()));
        Self { clock, stores }
    }

    async fn client(&self) -> Client {
        self.client_with_faults().await.unwrap().0
    }

    /// A client, and the networks between it and the stores.
    async fn client_with_faults(&self) -> Result<(Client, Vec<Faults>), Error> {
        let (driver, faults) = self.driver_with_faults().await?;
        let client = Client::builder(Arc::new(driver))
            .clock(self.clock.clone())
            .lease(Lease::renewed(LEASE))
            .build()?;
        Ok((client, faults))
    }

    async fn driver_with_faults(&self) -> Result<(QuorumDriver, Vec<Faults>), Error> {
        let faults: Arc<Mutex<Vec<Faults>>> = Arc::default();
        let stores = self
            .stores
            .iter()
            .zip(["a", "b", "c"])
            .map(|(store, label)| {
                let (store, faults) = (store.clone(), Arc::clone(&faults));
                Store::new(label, move || {
                    let driver = MemoryDriver::connect(&store, MemoryConfig::default());
                    faults.lock().unwrap().push(driver.faults().clone());
                    async move { Ok(Arc::new(driver) as _) }
                })
            });
        let config = QuorumConfig::new(stores.collect())?.with_clock(self.clock.clone());
        let driver = QuorumDriver::connect(config).await?;
        let faults = faults.lock().unwrap().clone();
        Ok((driver, faults))
    }

    fn store(&self, at: usize) -> MemoryDriver {
        MemoryDriver::connect(&self.stores[at], MemoryConfig::default())
    }

    /// A guard of a client of its own.
    async fn held(&self) -> Guard {
        let lock = self.client().await.lock(NAME).unwrap();
        lock.acquire().await.unwrap()
    }

    /// Tasks of so many clients that wait for the lock, each in the queue of the first store or behind one that is. Each
    /// ends when it has had the lock.
    async fn waiting(&self, clients: usize, tasks: usize) -> JoinSet<()> {
        let mut waiting = JoinSet::new();
        for _ in 0..clients {
            let client = self.client().await;
            for _ in 0..tasks {
                let acquiring = client.lock(NAME).unwrap().acquire();
                waiting.spawn(async move {
                    acquiring.await.unwrap().release().await.unwrap();
                });
            }
        }
        while self.stores[0].tickets(&name()) < clients {
            sleep(Duration::from_millis(1)).await;
        }
        waiting
    }

    /// How many holds one store has of a lock.
    async fn holds(&self, at: usize) -> u32 {
        let driver = self.store(at);
        driver.inspect(&name()).await.unwrap().holds
    }

    /// The token that one store shows.
    async fn token(&self, at: usize) -> Option<FencingToken> {
        let driver = self.store(at);
        driver
            .inspect(&name())
            .await
            .unwrap()
            .holders
            .first()?
            .token
    }
}

const NAME: &str = "orders:42";
const LEASE: Duration = Duration::from_secs(6);

fn name() -> LockName {
    NAME.parse().unwrap()
}

async fn within<T>(limit: Duration, what: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let done = what.await;
    assert!(began.elapsed() <= limit, "it took {:?}", began.elapsed());
    done
}

async fn lives_for(guard: &Guard, span: Duration) {
    let end = Instant::now() + span;
    while Instant::now() < end {
        guard.check().unwrap();
        sleep(Duration::from_millis(100)).await;
    }
}

/// Acquires, renews and releases go on, and take little time after the first that met the failure.
async fn goes_on(bed: &Bed, client: &Client) {
    let lock = client.lock(NAME).unwrap();
    drop(lock.acquire().await.unwrap().release().await);
    for _ in 0..3 {
        let guard = within(Duration::from_millis(100), lock.acquire())
            .await
            .unwrap();
        lives_for(&guard, LEASE * 2).await;
        within(Duration::from_millis(100), guard.release())
            .await
            .unwrap();
    }
    let other = bed.client().await;
    other
        .lock(NAME)
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_stops_no_call() {
    for at in 0..3 {
        let bed = Bed::new();
        let client = bed.client().await;
        bed.stores[at].down();
        goes_on(&bed, &client).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stands_still_stops_no_call() {
    for at in 0..3 {
        let bed = Bed::new();
        let client = bed.client().await;
        bed.stores[at].stop();
        goes_on(&bed, &client).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_majority_nothing_is_granted_and_the_holder_learns_it_in_time() {
    for stands_still in [false, true] {
        let bed = Bed::new();
        let client = bed.client().await;
        let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
        for store in &bed.stores[1..] {
            if stands_still {
                store.stop()
            } else {
                store.down()
            }
        }
        let began = Instant::now();
        let lost = guard.lost().await;
        assert!(began.elapsed() <= LEASE, "{:?}: {lost:?}", began.elapsed());
        drop(guard);
        let refused = client
            .lock("other")
            .unwrap()
            .acquire_timeout(Duration::from_secs(3))
            .await
            .unwrap_err();
        assert!(
            matches!(
                refused.kind(),
                ErrorKind::Timeout { .. } | ErrorKind::Unavailable
            ),
            "{refused:?}"
        );
        assert!(
            refused.to_string().contains("stores did not answer"),
            "{refused}"
        );
        for store in &bed.stores[1..] {
            if stands_still {
                store.cont()
            } else {
                store.up()
            }
        }
        let _guard = within(LEASE * 2, client.lock("other").unwrap().acquire())
            .await
            .unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_restarts_empty_has_the_hold_again_within_one_renewal() {
    for at in 0..3 {
        let bed = Bed::new();
        let client = bed.client().await;
        let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
        bed.stores[at].restart(false);
        assert_eq!(bed.holds(at).await, 0);
        lives_for(&guard, LEASE / 3 + Duration::from_millis(500)).await;
        assert_eq!(
            (bed.holds(at).await, bed.token(at).await),
            (1, Some(guard.token()))
        );
        guard.release().await.unwrap();
        sleep(Duration::from_millis(100)).await;
        assert_eq!(bed.holds(at).await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn three_empty_restarts_in_turn_do_not_end_a_hold() {
    let bed = Bed::new();
    let (client, other) = (bed.client().await, bed.client().await);
    let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
    for store in &bed.stores {
        store.restart(false);
        lives_for(&guard, Duration::from_secs(5)).await;
    }
    assert!(
        other
            .lock(NAME)
            .unwrap()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let token = guard.token();
    guard.release().await.unwrap();
    let next = other.lock(NAME).unwrap().acquire().await.unwrap();
    assert!(next.token() > token);
}

/// Otherwise that store is lost to the holder for good, and one failure more, whenever it comes, makes two holders.
#[tokio::test(start_paused = true)]
async fn waiters_do_not_keep_a_store_that_lost_the_hold_from_having_it_again() {
    for (clients, tasks) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let bed = Bed::new();
        let guard = bed.held().await;
        let waiting = bed.waiting(clients, tasks).await;
        bed.store(0).break_lock(&name(), None).await.unwrap();
        lives_for(&guard, LEASE * 2).await;
        let shown = bed.store(0).inspect(&name()).await.unwrap();
        let owners: Vec<_> = shown.holders.iter().map(|holder| holder.owner).collect();
        assert_eq!(owners, [guard.owner()], "{clients} {tasks}");
        guard.release().await.unwrap();
        waiting.join_all().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_away_for_a_lease_has_the_token_of_the_others_again() {
    let bed = Bed::new();
    let (client, faults) = bed.client_with_faults().await.unwrap();
    let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
    for (at, fault) in faults.iter().enumerate().take(2) {
        fault.always_all(Fault::ErrorBefore);
        lives_for(&guard, LEASE * 2).await;
        assert_eq!(bed.holds(at).await, 0);
        fault.always_all(Fault::Ok);
        lives_for(&guard, LEASE).await;
        assert_eq!(bed.token(at).await, Some(guard.token()));
    }
    let pass = guard.pass().unwrap();
    let joined = client.lock(NAME).unwrap().join(&pass).await.unwrap();
    assert_eq!(joined.token(), guard.token());
    guard.check().unwrap();
}

/// The first two stores have the guard's token, and the third a smaller one. Two stores show what the first is to have
/// again, the third among them.
#[tokio::test(start_paused = true)]
async fn a_repaired_store_has_the_token_of_the_guard_though_another_has_a_smaller_one() {
    for counter_is_lost in [false, true] {
        let bed = Bed::new();
        // Only the second store has given a token that is ahead of the others' clocks.
        bed.stores[1].step_clock(Duration::from_secs(600));
        let (owner, hold) = (Owner::from_seed("earlier"), HoldId::from_bits(1));
        let give_up = bed.clock.now() + LEASE;
        let ask = Acquire::new(name(), owner, hold, Lease::fixed(LEASE), give_up);
        bed.store(1).acquire(&ask).await.unwrap();
        let release = Release::new(name(), owner, hold);
        bed.store(1).release(&release).await.unwrap();

        let (client, faults) = bed.client_with_faults().await.unwrap();
        // It is answered when the token of the others was raised.
        faults[2].once(Call::Acquire, Fault::Slow(Duration::from_millis(20)));
        let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
        let token = guard.token();
        let raised = [bed.token(0).await, bed.token(1).await];
        assert_eq!(raised, [Some(token); 2]);
        assert!(bed.token(2).await.is_some_and(|its| its < token));

        if counter_is_lost {
            bed.stores[0].restart(false);
        } else {
            bed.store(0).break_lock(&name(), None).await.unwrap();
        }
        lives_for(&guard, LEASE / 3 + Duration::from_millis(500)).await;
        let repaired = (bed.holds(0).await, bed.token(0).await);
        assert_eq!(repaired, (1, Some(token)), "{counter_is_lost}");
        let pass = guard.pass().unwrap();
        let joined = client.lock(NAME).unwrap().join(&pass).await.unwrap();
        assert_eq!(joined.token(), token);
        joined.release().await.unwrap();
        guard.release().await.unwrap();

        // The majority of the other two.
        let (other, faults) = bed.client_with_faults().await.unwrap();
        faults[1].always_all(Fault::ErrorBefore);
        let next = other.lock(NAME).unwrap().acquire().await.unwrap();
        assert!(next.token() > token, "{} after {token}", next.token());
    }
}

/// Without it the store would have the hold until its lease ends.
#[tokio::test(start_paused = true)]
async fn a_close_waits_a_moment_for_a_release_that_runs_on_at_a_slow_store() {
    let late = Fault::Delayed(Duration::from_millis(500));
    for (slow, cut_short, left) in [
        (late, false, 0),
        (late, true, 0),
        (Fault::NeverExecuted, false, 1),
    ] {
        let bed = Bed::new();
        let (driver, faults) = bed.driver_with_faults().await.unwrap();
        let (owner, hold) = (Owner::from_seed("us"), HoldId::from_bits(1));
        let give_up = bed.clock.now() + LEASE;
        let ask = Acquire::new(name(), owner, hold, Lease::fixed(LEASE), give_up);
        driver.acquire(&ask).await.unwrap();
        sleep(Duration::from_millis(1)).await; // now all stores have it
        faults[2].once(Call::Release, slow);
        let release = Release::new(name(), owner, hold);
        driver.release(&release).await.unwrap();
        assert_eq!(bed.holds(2).await, 1, "the release waited for it");
        if cut_short {
            // The request goes on, as without a close.
            let closing = timeout(Duration::from_millis(1), driver.close());
            closing.await.unwrap_err();
            sleep(Duration::from_secs(1)).await;
        }
        within(Duration::from_secs(2), driver.close()).await;
        assert_eq!(bed.holds(2).await, left, "{slow:?}, {cut_short}");
    }
}

/// Its caller had no time, which says nothing about the store.
#[tokio::test(start_paused = true)]
async fn a_caller_with_little_time_does_not_take_a_store_for_down() {
    let bed = Bed::new();
    let (client, faults) = bed.client_with_faults().await.unwrap();
    let held = bed.held().await;
    // It answers long after.
    faults[0].always_all(Fault::Slow(Duration::from_secs(2)));
    let lock = client.lock(NAME).unwrap();
    let error = lock.acquire_timeout(Duration::from_millis(40)).await;
    error.unwrap_err();
    faults[0].always(Call::Acquire, Fault::Ok);
    let before = bed.stores[0].executed(Call::Acquire);
    assert!(lock.try_acquire().await.unwrap().is_none());
    assert_eq!(bed.stores[0].executed(Call::Acquire), before + 1);
    held.release().await.unwrap();
}

/// Each client reaches another two of the stores.
#[tokio::test(start_paused = true)]
async fn two_partitions_of_clients_never_have_two_holders_and_tokens_rise() {
    let bed = Bed::new();
    bed.stores[1].step_clock_back(Duration::from_secs(3600));
    bed.stores[2].step_clock(Duration::from_secs(60));
    let (inside, last) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(Mutex::new(FencingToken(0))),
    );
    let mut tasks = Vec::new();
    for without in [0, 1, 2] {
        let (client, faults) = bed.client_with_faults().await.unwrap();
        faults[without].always_all(Fault::ErrorBefore);
        let (inside, last) = (Arc::clone(&inside), Arc::clone(&last));
        tasks.push(tokio::spawn(async move {
            for _ in 0..40 {
                let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                {
                    let mut last = last.lock().unwrap();
                    assert!(guard.token() > *last, "{} after {last}", guard.token());
                    *last = guard.token();
                }
                sleep(Duration::from_millis(3)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// Every lock is taken over another two stores than the one before.
#[tokio::test(start_paused = true)]
async fn tokens_rise_over_every_choice_of_quorums() {
    let bed = Bed::new();
    bed.stores[0].step_clock(Duration::from_secs(600));
    let mut last = FencingToken(0);
    for turn in 0..30 {
        let without = (turn * turn + turn / 3) % 3;
        let (client, faults) = bed.client_with_faults().await.unwrap();
        faults[without].always_all(Fault::ErrorBefore);
        let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
        assert!(guard.token() > last, "{} after {last}", guard.token());
        last = guard.token();
        guard.release().await.unwrap();
    }
}

/// The next acquire asks the first store first.
#[tokio::test(start_paused = true)]
async fn what_a_slow_store_has_to_release_is_free_for_the_next_client() {
    let bed = Bed::new();
    let (one, faults) = bed.client_with_faults().await.unwrap();
    let other = bed.client().await;
    for slow in faults {
        slow.always(Call::Release, Fault::Delayed(Duration::from_millis(20)));
        let guard = one.lock(NAME).unwrap().acquire().await.unwrap();
        sleep(Duration::from_millis(1)).await; // now all stores have it
        guard.release().await.unwrap();
        let next = other.lock(NAME).unwrap().try_acquire().await.unwrap();
        next.unwrap().release().await.unwrap();
        slow.always(Call::Release, Fault::Ok);
    }
}

/// The release reaches the first store, whose queue is the order, a moment before the others.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_served_before_the_other_stores_are_free_is_served_soon() {
    // The turn of a client with two tasks must not be that of the second one.
    for tasks in [1, 2] {
        let bed = Bed::new();
        let (holder, faults) = bed.client_with_faults().await.unwrap();
        let guard = holder.lock(NAME).unwrap().acquire().await.unwrap();
        let waiting = bed.waiting(1, tasks).await;
        for slow in &faults[1..] {
            slow.always(Call::Release, Fault::Delayed(Duration::from_millis(20)));
        }
        within(Duration::from_millis(500), async {
            guard.release().await.unwrap();
            waiting.join_all().await;
        })
        .await;
    }
}

/// After the give-up the core asks again for the same hold, which a release under way could end.
#[tokio::test(start_paused = true)]
async fn what_a_minority_granted_is_taken_back_before_the_give_up_or_given_up() {
    let bed = Bed::new();
    let (driver, faults) = bed.driver_with_faults().await.unwrap();
    let ask = |owner: &str, hold, span| {
        let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(hold));
        let give_up = bed.clock.now() + span;
        Acquire::new(name(), owner, hold, Lease::fixed(LEASE), give_up)
    };
    let (span, late) = (Duration::from_millis(50), Duration::from_millis(70));
    for at in [1, 2] {
        bed.store(at)
            .acquire(&ask("other", 1, LEASE))
            .await
            .unwrap();
    }
    faults[0].once(Call::Release, Fault::Delayed(late));
    let request = ask("us", 2, span);
    let answer = driver.acquire(&request).await.unwrap();
    assert!(bed.clock.now() < request.give_up);
    assert!(matches!(answer, Acquired::Held(held) if held.doubt));
    sleep(late).await;
    assert_eq!(bed.holds(0).await, 0);

    // Refused too late to take anything back.
    faults[1].once(Call::Acquire, Fault::Slow(span - Duration::from_millis(2)));
    faults[2].once(Call::Acquire, Fault::ErrorBefore);
    let error = driver.acquire(&ask("us", 3, span)).await.unwrap_err();
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
    sleep(late).await;
    assert_eq!(bed.holds(0).await, 1, "the core asks again for this hold");
}

/// What a slow store took late of an earlier hold is no hold, until its client has released it there.
#[tokio::test(start_paused = true)]
async fn a_release_counts_only_holds_that_a_quorum_may_have() {
    let bed = Bed::new();
    let (driver, faults) = bed.driver_with_faults().await.unwrap();
    let owner = Owner::from_seed("us");
    let ask = |hold| {
        let (hold, give_up) = (HoldId::from_bits(hold), bed.clock.now() + LEASE);
        Acquire::new(name(), owner, hold, Lease::fixed(LEASE), give_up)
    };
    let release = |hold| Release::new(name(), owner, HoldId::from_bits(hold));
    for left_at in [&[2][..], &[1, 2]] {
        for at in left_at {
            bed.store(*at).acquire(&ask(1)).await.unwrap();
        }
        // The store that tells most answers before one of the others.
        faults[0].once(Call::Release, Fault::Slow(Duration::from_millis(20)));
        driver.acquire(&ask(2)).await.unwrap();
        sleep(Duration::from_millis(1)).await; // now all stores have it
        let answer = driver.release(&release(2)).await.unwrap();
        match left_at.len() {
            1 => assert!(matches!(answer, Released::Freed), "{answer:?}"),
            _ => assert!(matches!(answer, Released::StillHeld { .. }), "{answer:?}"),
        }
        for at in left_at {
            bed.store(*at).release(&release(1)).await.unwrap();
        }
    }
    // One that is silent is not waited for.
    bed.store(2).acquire(&ask(1)).await.unwrap();
    faults[0].once(Call::Release, Fault::Never);
    driver.acquire(&ask(2)).await.unwrap();
    sleep(Duration::from_millis(1)).await; // now all stores have it
    let last = release(2);
    let releasing = within(LEASE / 6, driver.release(&last));
    let answer = releasing.await.unwrap();
    assert!(matches!(answer, Released::StillHeld { .. }), "{answer:?}");
}

/// A store may execute an acquire long after it was refused elsewhere.
#[tokio::test(start_paused = true)]
async fn a_refusal_in_doubt_is_cleaned_up_before_its_lease_ends() {
    let bed = Bed::new();
    let holder = bed.client().await;
    let guard = holder.lock(NAME).unwrap().acquire().await.unwrap();
    // The first store has lost the hold, and stands still.
    bed.stores[0].restart(false);
    bed.stores[0].stop();
    let waiter = bed.client().await;
    assert!(
        waiter
            .lock(NAME)
            .unwrap()
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    bed.stores[0].cont();
    guard.release().await.unwrap();
    sleep(LEASE / 2).await;
    assert_eq!(bed.holds(0).await, 0, "the refused hold is still there");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_in_doubt_that_no_caller_awaits_is_cleaned_up_as_well() {
    let bed = Bed::new();
    let holder = bed.client().await;
    let guard = holder.lock(NAME).unwrap().acquire().await.unwrap();
    // The first store has lost the hold, grants another one, and its answer is lost.
    bed.stores[0].restart(false);
    let (waiter, faults) = bed.client_with_faults().await.unwrap();
    faults[0].once(Call::Acquire, Fault::ErrorAfter);
    faults[1].once(Call::Acquire, Fault::Slow(Duration::from_millis(100)));
    let lock = waiter.lock(NAME).unwrap();
    let given_up = timeout(Duration::from_millis(50), lock.try_acquire()).await;
    assert!(given_up.is_err());
    assert_eq!(bed.holds(0).await, 1);
    guard.release().await.unwrap();
    sleep(LEASE / 2).await;
    assert_eq!(bed.holds(0).await, 0, "the refused hold is still there");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_comes_late_takes_part() {
    let bed = Bed::new();
    let there = Arc::new(AtomicU32::new(0));
    let stores = bed
        .stores
        .iter()
        .zip(["a", "b", "c"])
        .map(|(store, label)| {
            let (store, there) = (store.clone(), Arc::clone(&there));
            Store::new(label, move || {
                let comes = label != "b" || there.load(Ordering::SeqCst) == 1;
                let driver = MemoryDriver::connect(&store, MemoryConfig::default());
                async move {
                    let down =
                        || dlock_core::driver::DriverError::unavailable("nothing listens there");
                    comes
                        .then(|| Arc::new(driver) as _)
                        .ok_or_else(|| down().into())
                }
            })
        });
    let config = QuorumConfig::new(stores.collect())
        .unwrap()
        .with_clock(bed.clock.clone());
    let driver = QuorumDriver::connect(config).await.unwrap();
    let client = Client::builder(Arc::new(driver))
        .clock(bed.clock.clone())
        .build()
        .unwrap();
    client
        .lock(NAME)
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    there.store(1, Ordering::SeqCst);
    sleep(Duration::from_secs(3)).await;
    let guard = client.lock(NAME).unwrap().acquire().await.unwrap();
    sleep(Duration::from_millis(10)).await;
    assert_eq!(bed.holds(1).await, 1);
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_quorum_that_is_none_is_refused_with_the_reason() {
    let store = |label: &str| {
        let memory = MemoryStore::new(Clock::boot());
        Store::new(label, move || {
            let driver = MemoryDriver::connect(&memory, MemoryConfig::default());
            async move { Ok(Arc::new(driver) as _) }
        })
    };
    for (labels, reason) in [
        (&["a", "b"][..], "3, 5 or 7"),
        (&["a", "b", "a"], "the store a is in the quorum twice"),
    ] {
        let refused =
            QuorumConfig::new(labels.iter().map(|label| store(label)).collect()).unwrap_err();
        assert!(refused.to_string().contains(reason), "{refused}");
    }
    let one = store("a");
    let same = MemoryStore::new(Clock::boot());
    let again = |label: &str| {
        let same = same.clone();
        Store::new(label, move || {
            let driver = MemoryDriver::connect(&same, MemoryConfig::default());
            async move { Ok(Arc::new(driver) as _) }
        })
    };
    let config = QuorumConfig::new(vec![one, again("b"), again("c")]).unwrap();
    let refused = QuorumDriver::connect(config).await.unwrap_err();
    assert!(refused.to_string().contains("are one store"), "{refused}");
}
