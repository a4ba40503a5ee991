//! Events of `tracing`: which there are, and that a program can read their fields without parsing text.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, Error, Lease};
use dlock_memory::{Call, Fault, Faults, MemoryConfig, MemoryDriver, MemoryStore};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};
use tokio::{runtime::Builder, task::yield_now, time};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    subscriber::DefaultGuard,
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
};

const SECOND: Duration = Duration::from_secs(1);

/// The value of a field, by the type that it was recorded with.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Number(u64),
    Flag(bool),
    Text(String),
}

#[derive(Clone, Debug)]
struct Seen {
    target: &'static str,
    level: Level,
    fields: BTreeMap<&'static str, Value>,
}

impl Seen {
    fn text(&self, field: &str) -> &str {
        match self.fields.get(field) {
            Some(Value::Text(text)) => text,
            other => panic!("{field} is {other:?} in {self:?}"),
        }
    }

    fn number(&self, field: &str) -> u64 {
        match self.fields.get(field) {
            Some(Value::Number(number)) => *number,
            other => panic!("{field} is {other:?} in {self:?}"),
        }
    }
}

impl Visit for Seen {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.insert(field.name(), Value::Number(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.fields.insert(field.name(), Value::Flag(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text = Value::Text(value.to_owned());
        self.fields.insert(field.name(), text);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = Value::Text(format!("{value:?}"));
        self.fields.insert(field.name(), text);
    }
}

/// All events of dlock on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    fn begin() -> (Self, DefaultGuard) {
        let log = Self::default();
        let here = tracing::subscriber::set_default(Registry::default().with(log.clone()));
        (log, here)
    }

    /// Those of this target with this message.
    fn of(&self, target: &str, message: &str) -> Vec<Seen> {
        let seen = self.0.lock().unwrap();
        let of = |seen: &&Seen| seen.target == target && seen.text("message").contains(message);
        seen.iter().filter(of).cloned().collect()
    }

    #[track_caller]
    fn one(&self, target: &str, message: &str) -> Seen {
        let mut found = self.of(target, message);
        assert_eq!(found.len(), 1, "{message}: {:#?}", self.0.lock().unwrap());
        found.remove(0)
    }
}

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (target, level) = (event.metadata().target(), *event.metadata().level());
        if target.starts_with("dlock::") {
            let mut seen = Seen {
                target,
                level,
                fields: BTreeMap::new(),
            };
            event.record(&mut seen);
            self.0.lock().unwrap().push(seen);
        }
    }
}

fn client(clock: Clock) -> (Client, Faults) {
    let store = MemoryStore::new(clock.clone());
    let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    let faults = driver.faults().clone();
    let client = Client::builder(Arc::new(driver)).clock(clock).build();
    (client.unwrap(), faults)
}

#[tokio::test(start_paused = true)]
async fn a_hold_tells_how_long_it_took_and_lasted_in_numbers() -> Result<(), Error> {
    let (client, _) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let lock = client.lock("orders:42")?;
    let guard = lock.acquire().await?;
    time::sleep(SECOND).await;
    let token = guard.token();
    guard.release().await?;

    let acquired = log.one("dlock::acquire", "acquired");
    assert_eq!(acquired.text("lock"), "orders:42");
    assert_eq!(acquired.text("backend"), "memory");
    assert_eq!(acquired.number("token"), token.0);
    assert!(acquired.number("took_us") < 1_000_000);
    let released = log.one("dlock::release", "released");
    assert!(released.number("held_us") >= 1_000_000);
    assert_eq!(log.of("dlock::release", "dropped").len(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_guard_released_by_drop_has_an_event() -> Result<(), Error> {
    let (client, _) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let guard = client.lock("orders:42")?.acquire().await?;
    time::sleep(SECOND).await;
    drop(guard);
    let dropped = log.one("dlock::release", "dropped");
    assert_eq!(dropped.level, Level::DEBUG);
    assert!(dropped.number("held_us") >= 1_000_000);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn contention_between_tasks_is_an_event_and_no_self_deadlock() -> Result<(), Error> {
    let (client, _) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let lock = client.lock("orders:42")?;
    let guard = lock.acquire().await?;
    let waiter = tokio::spawn(lock.acquire_timeout(SECOND));
    let refused = waiter.await.unwrap().unwrap_err();

    assert_eq!(log.one("dlock::acquire", "waiting").level, Level::DEBUG);
    let not_acquired = log.one("dlock::acquire", "not acquired");
    assert_eq!(not_acquired.text("kind"), "timeout");
    assert!(
        !refused.to_string().contains("waits for itself"),
        "{refused}"
    );
    let loud = |seen: &&Seen| seen.level <= Level::INFO;
    let seen = log.0.lock().unwrap().clone();
    assert_eq!(seen.iter().filter(loud).count(), 0, "{seen:#?}");
    guard.release().await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_task_that_waits_for_itself_is_told_once_at_info() -> Result<(), Error> {
    let (client, _) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let lock = client.lock("orders:42")?;
    let _guard = lock.acquire().await?;
    lock.acquire_timeout(SECOND * 10).await.unwrap_err();
    let told = log.one("dlock::acquire", "this very task");
    assert_eq!(told.level, Level::INFO);

    let (config, pool) = (client.rw_lock("config")?, client.semaphore("pool", 1)?);
    let _reading = config.read().acquire().await?;
    let refused = config.write().acquire_timeout(SECOND).await.unwrap_err();
    assert!(
        refused.to_string().contains("release it first"),
        "{refused}"
    );
    let _permit = pool.acquire().await?;
    let refused = pool.acquire_timeout(SECOND).await.unwrap_err();
    assert!(
        refused.to_string().contains("acquired a permit at"),
        "{refused}"
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_loss_has_its_reason_as_a_word() -> Result<(), Error> {
    let (client, faults) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let guard = client.lock("orders:42")?.acquire().await?;
    faults.always(Call::Renew, Fault::ErrorBefore);
    guard.lost().await;
    time::sleep(SECOND).await;
    let doubted = log.one("dlock::renew", "held until the deadline");
    assert_eq!(doubted.fields["stalled"], Value::Flag(false));
    assert!(doubted.number("rest_us") > 0);
    let lost = log.one("dlock::lost", "lock lost");
    assert_eq!(lost.text("reason"), "deadline");
    assert_eq!(lost.fields["unattended"], Value::Flag(false));
    assert!(lost.number("held_us") > 0);
    Ok(())
}

/// Nothing ran between the deadline and the release.
#[tokio::test(start_paused = true)]
async fn a_loss_that_a_release_notices_first_is_told_once() -> Result<(), Error> {
    let clock = Clock::simulated();
    let (client, _) = client(clock.clone());
    let (log, _here) = Log::begin();
    let guard = client.lock("orders:42")?.acquire().await?;
    clock.jump(guard.remaining());
    guard.release().await.unwrap_err();
    time::sleep(SECOND).await; // the watchdog comes, too
    assert_eq!(log.one("dlock::lost", "").text("reason"), "deadline");
    Ok(())
}

/// A connection that was cut costs one attempt, and the next has another one.
#[tokio::test(start_paused = true)]
async fn one_renewal_that_fails_is_no_warning_and_the_next_of_them_is_one() -> Result<(), Error> {
    let (client, faults) = client(Clock::simulated());
    let (log, _here) = Log::begin();
    let guard = client.lock("orders:42")?.acquire().await?;
    for _ in 0..2 {
        faults.once(Call::Renew, Fault::ErrorBefore);
        time::sleep(Lease::default().length()).await;
        guard.check()?;
    }
    assert!(log.of("dlock::renew", "held until the deadline").is_empty());
    for _ in 0..3 {
        faults.once(Call::Renew, Fault::ErrorBefore);
    }
    time::sleep(Lease::default().length()).await;
    guard.check()?;
    log.one("dlock::renew", "held until the deadline");
    Ok(())
}

/// The runtime runs for a moment only, so that the answer to a renewal, which takes half a lease, is never seen, and
/// the watchdog comes late to its give-up.
#[test]
fn a_runtime_that_is_polled_now_and_then_is_blamed_for_the_loss_and_not_the_store() {
    let (log, _here) = Log::begin();
    let lease = Duration::from_millis(600);
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let moment = || {
        runtime.block_on(async {
            for _ in 0..8 {
                yield_now().await;
            }
        });
    };
    let (guard, _client) = runtime.block_on(async {
        let (client, faults) = client(Clock::boot());
        faults.always(Call::Renew, Fault::Slow(lease / 2));
        let lock = client.lock("orders:42").unwrap();
        let guard = lock.lease(Lease::renewed(lease)).acquire().await.unwrap();
        (guard, client)
    });
    // The sleeps are what is tested: a thread that does not run its runtime. A longer one changes nothing.
    for _ in 0..2 {
        thread::sleep(lease * 2 / 5);
        moment();
    }
    thread::sleep(guard.remaining());
    let error = guard.check().unwrap_err().to_string();
    assert!(error.contains("runtime did not run"), "{error}");
    assert!(!error.contains("store"), "{error}");
    moment();
    for target in ["dlock::renew", "dlock::lost"] {
        for seen in log.of(target, "") {
            let message = seen.text("message");
            assert!(
                seen.level > Level::WARN || message.contains("runtime did not run"),
                "{seen:?}"
            );
        }
    }
}
