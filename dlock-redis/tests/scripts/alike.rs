//! Property test of batches: requests in one script leave the keys as if each had been sent alone,
//! whatever the keys hold before.

use crate::{
    bed::{Client, SECOND, Testbed},
    several::{A_SCRIPT, release},
    shares::sharers,
};
use dlock_core::{
    Clock,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, Result},
};
use fastrand::Rng;
use futures_util::future::join_all;
use redis::AsyncCommands;
use std::collections::{BTreeMap, HashMap};

#[tokio::test]
async fn whatever_stands_there_a_script_of_several_does_what_each_alone_would() {
    for seed in 0..16 {
        let mut left = Vec::new();
        for together in [true, false] {
            left.push(Side::begin().await.runs(seed, together).await);
        }
        assert_eq!(left[0], left[1], "seed {seed}");
    }
}

/// A server and its client. Both sides draw the same owners and holds.
struct Side {
    t: Testbed,
    client: Client,
}

/// The answers and the keys after each step.
type Left = Vec<(Vec<String>, BTreeMap<String, String>)>;

impl Side {
    async fn begin() -> Self {
        let t = Testbed::start();
        let client = t.client().await;
        Self { t, client }
    }

    async fn runs(&self, seed: u64, together: bool) -> Left {
        let mut rng = Rng::with_seed(seed);
        let _listens = self.t.listener(&["dlock:c:there"]).await;
        let mut wanted = self.t.of_many_names(4 + A_SCRIPT);
        if seed & 4 == 0 {
            wanted.iter_mut().for_each(|req| req.owner = sharers(2));
        }
        // Where none of the locks is held, or none has waiters, one command does much for all.
        let (held, waited) = (seed & 1 == 0, seed & 2 == 0);
        for req in &wanted[4..] {
            self.prepare(&mut rng, req, held, waited).await;
        }
        let mut left = Vec::new();
        let driver = &self.client.driver;
        for releases in [rng.bool(), true, false, true] {
            self.t.raw_command(&["CONFIG", "RESETSTAT"]).await;
            for req in &mut wanted {
                req.give_up = Clock::boot().now() + SECOND * 20;
            }
            let ask = async |req: &Acquire| match releases {
                true => released(release(driver, req).await),
                false => acquired(driver.acquire(req).await),
            };
            let answers = if together {
                let answers = join_all(wanted.iter().map(&ask)).await;
                assert!(self.t.calls("evalsha").await < 4 + 8, "not in one script");
                answers
            } else {
                let mut answers = Vec::new();
                for req in &wanted {
                    answers.push(ask(req).await);
                }
                answers
            };
            left.push((answers, self.shown().await));
        }
        left
    }

    /// Puts some value in the place of each key, or none.
    async fn prepare(&self, rng: &mut Rng, req: &Acquire, held: bool, waited: bool) {
        let t = &self.t;
        let key = format!("dlock:{{{}}}", req.name);
        let named = |mut other: Acquire| {
            other.name = req.name.clone();
            other
        };
        let other = named(t.acquire(SECOND * 60));
        let again = named(t.again(req, SECOND * 60));
        let (kind, line, counter) = (rng.u8(0..14), rng.u8(0..6), rng.u8(0..8));
        match kind {
            _ if !held => {}
            0 => drop(self.client.granted(&other).await),
            1 | 2 => drop(self.client.granted(req).await),
            3 => drop(self.client.granted(&again).await),
            4 => {
                self.client.granted(&again).await;
                self.client.granted(req).await;
            }
            5 => {
                self.client.granted(&other).await;
                self.keeps_shut(&other).await;
            }
            6 | 7 => {
                self.client.granted(&again).await;
                self.client.granted(req).await;
                self.keeps_shut(&again).await;
            }
            8 => t.raw_command(&["SET", &key, "foreign"]).await,
            9 => t.raw_command(&["HSET", &key, "some:1", "1"]).await,
            _ => {}
        }
        if waited && line == 0 {
            let line = format!("{key}:line");
            t.raw_command(&["SET", &line, "foreign"]).await;
        } else if waited && line < 4 {
            for place in 1..=rng.u64(1..4) {
                let client = rng.choice(["there", "gone"]).unwrap();
                let ticket = format!("dlock:c:{client}:{place}");
                t.put_in_line_of(&key, &ticket, place, SECOND * 60, 60_000)
                    .await;
            }
        }
        let key = format!("{key}:token");
        match counter {
            0 => {
                // A hold has left its counter there.
                t.raw_command(&["DEL", &key]).await;
                t.raw_command(&["HSET", &key, "some", "body's"]).await;
            }
            1 => t.raw_command(&["SET", &key, "blank"]).await,
            2 => t.raw_command(&["SET", &key, "8000000000000000"]).await,
            3 => t.raw_command(&["SET", &key, "1000000000000000"]).await,
            _ => {}
        }
    }

    async fn keeps_shut(&self, held: &Acquire) {
        let mut keeping = Release::new(held.name.clone(), held.owner, held.hold);
        keeping.min_hold = Some(SECOND * 60);
        self.client.driver.release(&keeping).await.unwrap();
    }

    /// All keys, with a mark for each number that is a time.
    async fn shown(&self) -> BTreeMap<String, String> {
        let mut raw = self.t.raw().await;
        let mut shown = BTreeMap::new();
        for key in self.t.keys().await {
            let kind: String = redis::cmd("TYPE")
                .arg(&key)
                .query_async(&mut raw)
                .await
                .unwrap();
            let inside = match &*kind {
                "hash" => {
                    let fields: HashMap<String, String> = raw.hgetall(&key).await.unwrap();
                    let fields = fields.into_iter().map(|(name, it)| (name, timeless(&it)));
                    format!("{:?}", fields.collect::<BTreeMap<_, _>>())
                }
                "zset" => format!(
                    "{:?}",
                    raw.zrange::<_, Vec<String>>(&key, 0, -1).await.unwrap()
                ),
                _ => timeless(&raw.get::<_, String>(&key).await.unwrap()),
            };
            let ends = raw.pttl::<_, i64>(&key).await.unwrap() > 0;
            shown.insert(key, format!("{kind} {inside}, ends: {ends}"));
        }
        shown
    }
}

/// Whether the number is a time of this day. A number that the test wrote stays as it was, or grows by
/// one.
fn timeless(value: &str) -> String {
    let words = value.split(' ').map(|word| {
        let time = [13, 16].contains(&word.len())
            && word.bytes().all(|byte| byte.is_ascii_digit())
            && !word.ends_with("00000000")
            && !word.starts_with("800000");
        if time { "TIME" } else { word }
    });
    words.collect::<Vec<_>>().join(" ")
}

fn acquired(answer: Result<Acquired>) -> String {
    match answer {
        Ok(Acquired::Granted(grant)) => {
            let token = timeless(&grant.token.0.to_string());
            format!("granted {token} {}", grant.holds)
        }
        Ok(Acquired::Held(held)) => {
            format!("held by {:?}", held.by.map(|by| by.owner))
        }
        other => failed(other),
    }
}

fn released(answer: Result<Released>) -> String {
    match answer {
        Ok(Released::NotHeld { by }) => format!("held by {:?}", by.map(|by| by.owner)),
        Ok(Released::MinHold { .. }) => "kept".to_owned(),
        Ok(other) => format!("{other:?}"),
        other => failed(other),
    }
}

fn failed<T: std::fmt::Debug>(answer: Result<T>) -> String {
    match answer {
        Err(error) => format!("{:?} {:?} {error}", error.kind(), error.effect()),
        other => format!("{other:?}"),
    }
}
