//! Every answer, compared with that of a log from which it is computed without deleting anything; and what is
//! forgotten.

mod log;

use super::name;
use dlock_core::{
    Broken, Clock, ErrorKind, FencingToken, HoldId, Holds, Instant, Lease, LockName, Owner,
    driver::{Acquire, Acquired, Cursor, DistributedLock, Lane, Release, Released, Renew, Renewed},
};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use futures_util::FutureExt;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn numbered(number: u32) -> LockName {
    format!("n{number:05}").parse().unwrap()
}

fn wanted(name: LockName, owner: u8, hold: u64, lease: Duration) -> Acquire {
    let (owner, hold) = (
        Owner::from_seed(&owner.to_string()),
        HoldId::from_bits(hold),
    );
    let lease = Lease::fixed(lease);
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
            Acquired::Granted(grant) => grant.token.0,
            other => panic!("{other:?}"),
        }
    }

    fn acquire(&self, (owner, hold, lease, join): (u8, u64, Duration, Option<u64>)) -> String {
        let mut req = wanted(name(), owner, hold, lease);
        req.join = join.map(FencingToken);
        match self.driver.acquire(&req).now_or_never().unwrap().unwrap() {
            Acquired::Granted(grant) => {
                let token = grant.token;
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
        req.min_hold = keep;
        match self.driver.release(&req).now_or_never().unwrap().unwrap() {
            Released::Freed => "freed".to_owned(),
            Released::StillHeld { holds } => format!("still held {holds}"),
            Released::MinHold { rest } => format!("kept {rest:?}"),
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
        format!(
            "{} {token:?} {rest:?} {:?}",
            shown.holds, shown.unavailable_for
        )
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_counter_is_forgotten_a_day_after_its_last_token() {
    let store = Store::new();
    store.take(numbered(0));
    store.clock.jump(DAY - Duration::from_nanos(1));
    // The walk visits two names for each new one.
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
