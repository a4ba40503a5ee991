//! The log, and the comparison.

use super::Store;
use crate::name;
use proptest::{collection::vec, option, prelude::*};
use std::{collections::BTreeSet, time::Duration};

/// An operation on one name. Owners, holds and leases are few, so that operations collide.
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

/// The other implementation: it deletes nothing, and computes its answers from the whole history.
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
            Some((holder, token)) if holder == owner && join.is_none_or(|join| join == token) => {
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

    fn renew(&mut self, now: Duration, owner: u8, hold: u64, lease: Option<Duration>) -> String {
        let Some(one) = self.find(now, owner, hold) else {
            return "not held".to_owned();
        };
        one.end = one.end.max(now + lease.unwrap_or_default());
        format!("until {:?}", one.end - now)
    }

    fn release(&mut self, now: Duration, owner: u8, hold: Option<u64>, keep: Duration) -> String {
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

/// A runtime whose time only the test moves, entered.
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
                    // The present incarnation's token, or the next one, which no hold has.
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
