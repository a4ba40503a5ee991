//! `dlock::blocking`: the locks of the async API from plain threads.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock::{
    Error, ErrorKind, Lease, LossReason, ReleaseOutcome,
    blocking::{self, Client},
};
use std::{
    convert::Infallible,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

const SHORT: Duration = Duration::from_secs(3);

/// What a busy machine may add.
const PATIENCE: Duration = Duration::from_secs(30);

fn client(store: &str) -> Client {
    blocking::connect(&format!("memory:blocking-{store}")).unwrap()
}

fn short(client: &Client, name: &str) -> blocking::Lock {
    client.lock(name).unwrap().lease(Lease::renewed(SHORT))
}

#[test]
fn a_lock_stays_held_while_its_thread_sleeps_for_two_leases() -> Result<(), Error> {
    let (ours, theirs) = (client("sleep"), client("sleep"));
    let guard = short(&ours, "a").acquire()?;
    thread::sleep(SHORT * 2);
    guard.check()?;
    assert!(theirs.lock("a")?.try_acquire()?.is_none());
    assert_eq!(guard.release()?, ReleaseOutcome::Released);
    Ok(())
}

#[test]
fn threads_exclude_each_other() -> Result<(), Error> {
    let client = client("threads");
    let inside = Mutex::new(());
    let rounds = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let guard = client.lock("a").unwrap().acquire().unwrap();
                    let alone = inside.try_lock().expect("one thread at a time");
                    rounds.fetch_add(1, SeqCst);
                    drop(alone);
                    guard.release().unwrap();
                }
            });
        }
    });
    assert_eq!(rounds.into_inner(), 100);
    Ok(())
}

#[test]
fn a_guard_that_is_dropped_has_released_its_lock() -> Result<(), Error> {
    let (ours, theirs) = (client("drop"), client("drop"));
    for _ in 0..20 {
        drop(ours.lock("a")?.acquire()?);
        assert!(theirs.lock("a")?.try_acquire()?.is_some());
        drop(ours.lock_all(["a", "b"])?.acquire()?);
        assert!(theirs.lock_all(["a", "b"])?.try_acquire()?.is_some());
    }
    Ok(())
}

#[test]
fn a_loss_ends_the_wait_for_it_and_the_release() -> Result<(), Error> {
    let client = client("loss");
    let guard = short(&client, "a").acquire()?;
    assert_eq!(guard.wait_lost(Duration::from_millis(1))?, None);
    client.block_on(client.admin().break_lock("a", None))??;
    assert_eq!(guard.wait_lost(PATIENCE)?, Some(LossReason::NotHeld));
    assert!(guard.check().unwrap_err().is_lost());
    assert!(guard.release().unwrap_err().is_lost());
    Ok(())
}

#[test]
fn waits_are_bounded_and_say_who_holds_the_lock() -> Result<(), Error> {
    let client = client("bounded");
    let guard = client.lock("a")?.acquire()?;
    let wait = Duration::from_millis(200);
    let error = client.lock("a")?.acquire_timeout(wait).unwrap_err();
    assert!(error.is_contended(), "{error}");
    assert!(
        error.to_string().contains(file!()),
        "the place of the call: {error}"
    );
    let inner = client.lock("a")?.join(&guard.pass()?)?;
    assert_eq!(inner.token(), guard.token());
    assert_eq!(inner.release()?, ReleaseOutcome::StillHeld { holds: 1 });
    Ok(())
}

#[test]
fn a_detached_hold_becomes_a_blocking_guard_and_a_refusal_returns_it() -> Result<(), Error> {
    let (ours, theirs) = (client("attach"), client("attach"));
    let guard = ours.lock("a")?.acquire()?;
    let token = guard.token();
    let detached = guard.into_async().detach()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let refused = runtime.block_on(async { theirs.attach(detached) });
    let not = refused.unwrap_err();
    assert_eq!(not.error.kind(), ErrorKind::Misuse, "{not}");

    let guard: blocking::Guard = theirs.attach(not.detached)?;
    assert_eq!(guard.token(), token);
    guard.check()?;
    assert!(ours.lock("a")?.try_acquire()?.is_none());
    assert_eq!(guard.release()?, ReleaseOutcome::Released);
    Ok(())
}

#[test]
fn readers_permits_and_sets_are_those_of_the_async_client() -> Result<(), Error> {
    let client = client("shapes");
    let catalog = client.rw_lock("catalog")?;
    let readers = [catalog.read().acquire()?, catalog.read().acquire()?];
    assert!(catalog.write().try_acquire()?.is_none());
    drop(readers);
    catalog.write().acquire()?.release()?;

    let uploads = client.semaphore("uploads", 2)?;
    let permits = [uploads.acquire()?, uploads.acquire()?];
    assert!(uploads.try_acquire()?.is_none());
    drop(permits);

    let set = client.lock_all(["a", "b"])?.acquire_timeout(PATIENCE)?;
    assert!(client.lock_all(["b", "c"])?.try_acquire()?.is_none());
    let any = client.lock_any(["a", "c"])?.acquire()?;
    assert_eq!(any.name().as_str(), "c");
    let released = set.release()?;
    assert!(
        released.iter().all(|(_, outcome)| outcome.is_ok()),
        "{released:?}"
    );

    client.ping()?;
    any.release()?;
    let report = client.shutdown(Duration::from_secs(1))?;
    assert!(report.locks.is_empty(), "{report:?}");
    let refused = client.lock("a")?.acquire().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ShuttingDown);
    Ok(())
}

#[test]
fn a_leader_uses_locks_and_a_term_that_was_lost_is_followed_by_another() -> Result<(), Error> {
    let (client, breaker) = (client("leader"), client("leader"));
    let mut terms = Vec::new();
    let election = client.election("a")?.lease(Lease::renewed(SHORT));
    let led = election.run(|term| {
        let other = client.lock("other").unwrap().acquire().unwrap();
        other.release().unwrap();
        terms.push(term.token());
        if terms.len() == 1 {
            breaker
                .block_on(breaker.admin().break_lock("a", None))
                .unwrap()
                .unwrap();
            while term.check().is_ok() {
                thread::yield_now();
            }
        }
        ControlFlow::Break(terms.len())
    })?;
    assert_eq!(led, 2, "the first term was lost");
    assert!(terms[1] > terms[0]);
    Ok(())
}

#[test]
fn a_term_that_is_lost_before_the_thread_is_free_is_not_led() -> Result<(), Error> {
    let (client, breaker) = (client("late leader"), client("late leader"));
    let (mut led, mut granted) = (Vec::new(), Vec::new());
    let election = client.election("a")?.lease(Lease::renewed(SHORT));
    election.run(|term| {
        led.push(term.token());
        if led.len() > 1 {
            return ControlFlow::Break(());
        }
        granted.push(term.token());
        while granted.len() < 3 {
            breaker
                .block_on(breaker.admin().break_lock("a", granted.last().copied()))
                .unwrap()
                .unwrap();
            let next = loop {
                let shown = breaker.block_on(breaker.admin().inspect("a")).unwrap();
                match shown.unwrap().holders.first() {
                    Some(holder) => break holder.token.unwrap(),
                    None => thread::yield_now(),
                }
            };
            granted.push(next);
        }
        ControlFlow::Continue(())
    })?;
    assert_eq!(led, [granted[0], granted[2]], "of {granted:?}");
    Ok(())
}

#[test]
fn a_leader_that_panics_gives_the_lead_up() -> Result<(), Error> {
    let client = client("panic");
    let election = client.election("a")?;
    let led = catch_unwind(AssertUnwindSafe(|| {
        election.run(|_| -> ControlFlow<()> { panic!("of the leader") })
    }));
    assert!(led.is_err());
    client.lock("a")?.acquire_timeout(PATIENCE)?.release()?;
    Ok(())
}

#[test]
fn a_job_runs_on_its_thread_until_the_client_is_shut_down() -> Result<(), Error> {
    let client = client("job");
    let job = client.job("a")?.every(Duration::from_secs(1));
    let mut ran = 0;
    let here = thread::current().id();
    let ended = job.run(|term| {
        assert_eq!(thread::current().id(), here);
        term.check().unwrap();
        ran += 1;
        if ran == 2 {
            client.shutdown(Duration::ZERO).unwrap();
        }
        Ok::<_, Infallible>(())
    });
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ShuttingDown);
    assert_eq!(ran, 2);
    Ok(())
}

/// No panic and no hang, whatever the flavour of the runtime.
#[test]
fn every_call_inside_a_runtime_is_misuse_and_says_what_to_do() {
    let client = client("inside");
    let guard = client.lock("a").unwrap().acquire().unwrap();
    let set = client.lock_all(["b", "c"]).unwrap().acquire().unwrap();
    let (dropped, pass) = (
        client.lock("d").unwrap().acquire().unwrap(),
        guard.pass().unwrap(),
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let errors = runtime.block_on(async {
        let lock = client.lock("a").unwrap();
        drop(dropped); // in the background, then
        [
            blocking::connect("memory:x").unwrap_err(),
            lock.acquire().unwrap_err(),
            lock.acquire_timeout(SHORT).unwrap_err(),
            lock.try_acquire().unwrap_err(),
            lock.join(&pass).unwrap_err(),
            guard.wait_lost(SHORT).unwrap_err(),
            guard.release().unwrap_err(),
            set.release().unwrap_err(),
            client.lock_all(["b"]).unwrap().acquire().unwrap_err(),
            client.lock_any(["b"]).unwrap().acquire().unwrap_err(),
            client.election("e").unwrap().campaign().unwrap_err(),
            client
                .election("e")
                .unwrap()
                .run(|_| ControlFlow::Break(()))
                .unwrap_err(),
            client
                .job("e")
                .unwrap()
                .run(|_| Ok::<_, Infallible>(()))
                .unwrap_err(),
            client.ping().unwrap_err(),
            client.shutdown(SHORT).unwrap_err(),
            client.block_on(async {}).unwrap_err(),
        ]
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.to_string().contains("async API"), "{error}");
    }
    for name in ["a", "b", "c", "d"] {
        let next = client.lock(name).unwrap().acquire_timeout(PATIENCE);
        next.unwrap_or_else(|error| panic!("released in the background: {error}"))
            .release()
            .unwrap();
    }
}

#[cfg(feature = "redis")]
#[test]
fn threads_use_the_locks_of_a_redis_server() -> Result<(), Error> {
    use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
    over(&RedisServer::start(RedisOptions::default()).unwrap())
}

#[cfg(feature = "postgres")]
#[test]
fn threads_use_the_locks_of_a_postgres_server() -> Result<(), Error> {
    use dlock_conformance::testbed::PostgresServer;
    over(&PostgresServer::start(&[]).unwrap())
}

#[cfg(any(feature = "redis", feature = "postgres"))]
fn over<K: dlock_conformance::testbed::Kind>(
    server: &dlock_conformance::testbed::Running<K>,
) -> Result<(), Error> {
    let [ours, theirs] = [(); 2].map(|()| blocking::connect(&server.url()).unwrap());

    // Only the lock keeps an addition from being lost.
    const ROUNDS: u32 = 5;
    let counter = &AtomicU32::new(0);
    thread::scope(|scope| {
        for client in [&ours, &theirs].repeat(4) {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let lock = client.lock("counter").unwrap();
                    let guard = lock.acquire_timeout(PATIENCE).unwrap();
                    let before = counter.load(SeqCst);
                    thread::sleep(Duration::from_millis(1)); // the work, in which no other may take part
                    counter.store(before + 1, SeqCst);
                    guard.release().unwrap();
                }
            });
        }
    });
    assert_eq!(counter.load(SeqCst), 8 * ROUNDS);

    let guard = short(&ours, "a").acquire_timeout(PATIENCE)?;
    let wait = Duration::from_millis(200);
    let refused = theirs.lock("a")?.acquire_timeout(wait).unwrap_err();
    assert!(
        matches!(refused.kind(), ErrorKind::Timeout { .. }),
        "{refused}"
    );
    thread::sleep(SHORT * 2);
    guard.check()?;
    assert!(theirs.lock("a")?.try_acquire()?.is_none());
    assert_eq!(guard.release()?, ReleaseOutcome::Released);

    let guard = short(&theirs, "a").acquire_timeout(PATIENCE)?;
    server.managed().unwrap().kill().unwrap();
    assert_eq!(guard.wait_lost(PATIENCE)?, Some(LossReason::Deadline));
    assert!(guard.release().unwrap_err().is_lost());
    Ok(())
}
