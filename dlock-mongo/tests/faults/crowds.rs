//! Batches: many concurrent requests share commands, and each gets the answer that it would get alone.

use crate::{
    records::{KEYS, keys},
    testbed::{SECOND, Testbed},
};
use dlock_core::{
    Effect, ErrorKind, HoldId, Lease, Owner,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Grant, Release, Released},
};
use dlock_mongo::MongoDriver;
use futures_util::future::join_all;
use mongodb::bson::{Bson, doc};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// Enough requests that most of them go in batches.
const MANY: usize = 40;

/// How many of them at least. The first ones go alone, and so do a few more if the machine pauses.
const MOST: usize = MANY / 2;

impl Testbed {
    /// Requests for names that the driver knows to be free.
    async fn crowd(&self) -> Vec<Acquire> {
        let mut crowd = Vec::new();
        for at in 0..MANY {
            let name = format!("n{at}");
            self.release_of_granted(&name).await;
            crowd.push(self.acquire(&name, SECOND * 30));
        }
        crowd
    }

    async fn acquire_all(&self, crowd: &[Acquire]) -> Vec<Result<Acquired, DriverError>> {
        join_all(crowd.iter().map(|req| self.driver.acquire(req))).await
    }

    async fn release_all(&self, crowd: &[Acquire]) -> Vec<Result<Released, DriverError>> {
        let all: Vec<_> = crowd
            .iter()
            .map(|req| Release::new(req.name.clone(), req.owner, req.hold))
            .collect();
        join_all(all.iter().map(|release| self.driver.release(release))).await
    }

    /// How many commands of that kind the server has received so far.
    async fn sent(&self, command: &str) -> i64 {
        let admin = self.raw.database("admin");
        let status = admin.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let metrics = status.get_document("metrics").unwrap();
        let commands = metrics.get_document("commands").unwrap();
        let one = commands.get_document(command).unwrap();
        one.get_i64("total").unwrap()
    }

    async fn another(&self) -> MongoDriver {
        MongoDriver::connect(&self.server.url()).await.unwrap()
    }
}

fn grant(answer: Result<Acquired, DriverError>) -> Grant {
    match answer.unwrap() {
        Acquired::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_is_judged_as_if_it_came_alone() {
    let t = Testbed::start().await;
    let other = t.another().await;
    let mut crowd = t.crowd().await;
    // Unknown to the driver: another client holds one name, held another one, and left a minimum hold on a
    // third. One name has no document, and one has a foreign document.
    let theirs = t.acquire("n10", SECOND * 30);
    grant(other.acquire(&theirs).await);
    grant(other.acquire(&t.acquire("n11", SECOND / 5)).await);
    t.locks().delete_one(doc! { "_id": "n12" }).await.unwrap();
    let keeps = t.acquire("n13", SECOND * 30);
    grant(other.acquire(&keeps).await);
    let mut kept = Release::new(keeps.name.clone(), keeps.owner, keeps.hold);
    kept.min_hold = Some(SECOND * 30);
    other.release(&kept).await.unwrap();
    let foreign = doc! { "owner": Bson::Null, "keep": Bson::Null, "holds": "many" };
    t.locks()
        .replace_one(doc! { "_id": "n14" }, &foreign)
        .await
        .unwrap();
    t.until(async || {
        let seen = t.driver.inspect(&"n11".parse().unwrap()).await;
        seen.unwrap().holders.is_empty()
    })
    .await;
    // The same request twice, and a note that looks like an expression.
    crowd.push(crowd[20].clone());
    crowd[21].info = Arc::new(dlock_core::HolderInfo::new("$$ROOT", 7));
    // The lease of this one will have ended at its release.
    crowd[30].lease = Lease::fixed(SECOND);
    let before = (t.sent("findAndModify").await, t.sent("update").await);
    let answers = t.acquire_all(&crowd).await;
    let alone = t.sent("findAndModify").await - before.0;
    assert!(alone < MOST as i64, "{alone} of {MANY} went alone");
    assert!(t.sent("update").await > before.1);
    let mut tokens = Vec::new();
    for (at, answer) in answers.into_iter().enumerate() {
        match at {
            10 => {
                let Acquired::Held(held) = answer.unwrap() else {
                    panic!("it is held")
                };
                assert_eq!(held.by.unwrap().owner, theirs.owner.fingerprint());
            }
            13 => assert!(matches!(answer, Ok(Acquired::Held(held)) if held.by.is_none())),
            14 => assert_eq!(answer.map(drop).unwrap_err().effect(), Effect::None),
            _ => {
                let grant = grant(answer);
                assert_eq!(grant.holds.get(), 1, "{at}");
                assert!(grant.valid_for <= crowd[at].lease.length(), "{at}");
                tokens.push((at, grant.token));
            }
        }
    }
    // The short lease may have ended before it is read.
    for (at, token) in tokens.iter().filter(|(at, _)| *at != 30) {
        let shown = t.driver.inspect(&crowd[*at].name).await.unwrap();
        assert_eq!(shown.holders[0].token, Some(*token), "{at}");
        assert_eq!(shown.holders[0].owner, crowd[*at].owner.fingerprint());
    }
    let noted = t.document("n21").await;
    assert_eq!(noted.get_str("note"), Ok("7 $$ROOT"));

    // One lock was broken, one was broken and taken by another client, one has a second hold, one has
    // expired.
    let mut more = crowd[33].clone();
    more.hold = HoldId::from_bits(99);
    assert_eq!(t.granted(&more).await.holds.get(), 2);
    for at in [31, 32] {
        other.break_lock(&crowd[at].name, None).await.unwrap();
    }
    let taker = t.acquire("n32", SECOND * 30);
    grant(other.acquire(&taker).await);
    let over = async || t.driver.inspect(&crowd[30].name).await.unwrap().holds == 0;
    t.until(over).await;
    let mine: Vec<_> = (0..MANY).filter(|at| ![10, 13, 14].contains(at)).collect();
    let crowd: Vec<_> = mine.iter().map(|at| crowd[*at].clone()).collect();
    for (at, answer) in mine.iter().zip(t.release_all(&crowd).await) {
        let answer = answer.unwrap();
        let meant = match at {
            30 | 31 => matches!(answer, Released::NotHeld { by: None }),
            32 => {
                matches!(&answer, Released::NotHeld { by: Some(by) } if by.owner == taker.owner.fingerprint())
            }
            33 => matches!(answer, Released::StillHeld { holds } if holds.get() == 1),
            _ => matches!(answer, Released::Freed),
        };
        assert!(meant, "{at}: {answer:?}");
    }
    let free = t.document("n20").await;
    assert_eq!(free.get("owner"), Some(&Bson::Null));
    assert!(free.get_array("holds").unwrap().is_empty());
    // Most went in batches, though no one knows which.
    let marked = doc! { "mark": { "$exists": true }, "owner": Bson::Null };
    let marked = t.locks().find_one(marked).await.unwrap().unwrap();
    assert_eq!(keys(&marked), [&KEYS[..], &["mark"]].concat());
    // By each kind of release and acquire.
    let name = marked.get_str("_id").unwrap();
    for _ in 0..2 {
        let req = t.acquire(name, SECOND * 30);
        t.granted(&req).await;
        assert!(matches!(t.release(&req).await, Released::Freed));
    }
    let req = t.acquire(name, SECOND * 30);
    grant(other.acquire(&req).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_without_an_answer_is_in_doubt_and_its_repeats_find_what_was_done() {
    let t = Testbed::start().await;
    let executed = doc! { "writeConcernError": { "code": 64, "errmsg": "later" } };
    let cut = doc! { "closeConnection": true };
    let refused = doc! { "errorCode": 13436 };
    // The command that fails, how it fails, and whether it was executed.
    let table = [
        ("update", executed, true),
        ("update", cut, false),
        ("update", refused.clone(), false),
        ("find", refused, true),
    ];
    for (command, how, done) in table {
        let crowd = t.crowd().await;
        t.fail_times(command, 1_000, how.clone()).await;
        let answers = t.acquire_all(&crowd).await;
        t.heal().await;
        let doubted = |effect: Option<Effect>| effect == Some(Effect::Unknown);
        let effects = answers
            .iter()
            .map(|one| one.as_ref().err().map(DriverError::effect));
        let count = effects.filter(|effect| doubted(*effect)).count();
        let failed = answers.iter().filter(|one| one.is_err()).count();
        assert!(
            count == failed && count >= MOST,
            "{command} {how}: {answers:?}"
        );
        for req in &crowd {
            assert_eq!(t.granted(req).await.holds.get(), 1);
        }
        // If all releases succeed, no release reads the outcome.
        if command == "find" {
            t.release_all(&crowd).await;
            continue;
        }
        t.fail_times(command, 1_000, how.clone()).await;
        let answers = t.release_all(&crowd).await;
        t.heal().await;
        let mut doubts = 0;
        for (answer, req) in answers.into_iter().zip(&crowd) {
            let Err(error) = answer else { continue };
            doubts += 1;
            assert_eq!(error.effect(), Effect::Unknown, "{error:?}");
            let again = t.release(req).await;
            match done {
                true => assert!(matches!(again, Released::NotHeld { by: None })),
                false => assert!(matches!(again, Released::Freed)),
            }
        }
        assert!(doubts >= MOST, "{command} {how}");
    }
    // Half of the locks were lost before. A read finds that out; where the read fails, no outcome is known of
    // those that went together, and what went alone and met nothing did nothing. If the machine pauses, all go
    // alone for two seconds.
    let other = t.another().await;
    let lost = |at: usize| at.is_multiple_of(2);
    let mut open = 0;
    for _ in 0..3 {
        let crowd = t.crowd().await;
        for answer in t.acquire_all(&crowd).await {
            grant(answer);
        }
        for (at, req) in crowd.iter().enumerate() {
            if lost(at) {
                other.break_lock(&req.name, None).await.unwrap();
            }
        }
        t.fail_times("find", 1_000, doc! { "errorCode": 13436 })
            .await;
        let answers = t.release_all(&crowd).await;
        t.heal().await;
        for (at, answer) in answers.into_iter().enumerate() {
            match answer.map_err(|error| error.effect()) {
                Err(Effect::Unknown) => open += 1,
                Err(Effect::None) if lost(at) => (),
                Ok(Released::Freed) if !lost(at) => (),
                other => panic!("{at}: {other:?}"),
            }
        }
        if open > 0 {
            break;
        }
        t.sleep(2_000).await;
    }
    assert!(open > 0, "none went together");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_cannot_be_written_spoils_no_other() {
    let t = Testbed::start().await;
    let crowd = t.crowd().await;
    let valid = doc! { "$or": [{ "_id": { "$ne": "n20" } }, { "owner": Bson::Null }] };
    let validator = doc! { "collMod": "locks", "validator": valid };
    t.database().run_command(validator).await.unwrap();
    for (at, answer) in t.acquire_all(&crowd).await.into_iter().enumerate() {
        if at == 20 {
            let error = answer.map(drop).unwrap_err();
            let told = (error.kind(), error.effect());
            assert_eq!(told, (ErrorKind::Misuse, Effect::None), "{error:?}");
        } else {
            assert_eq!(grant(answer).holds.get(), 1, "{at}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crowds_of_several_clients_never_share_a_name_and_tokens_rise() {
    let t = Arc::new(Testbed::start().await);
    let drivers = [t.another().await, t.another().await, t.another().await].map(Arc::new);
    // Whether the lock is held, and the last token.
    let names: Arc<Mutex<HashMap<String, (bool, u64)>>> = Arc::default();
    let before = t.sent("update").await;
    let mut tasks = Vec::new();
    for task in 0..36 {
        let (t, names) = (Arc::clone(&t), Arc::clone(&names));
        let driver = Arc::clone(&drivers[task % 3]);
        tasks.push(tokio::spawn(async move {
            let mut taken = 0;
            for turn in 0..40 {
                // Mostly a name that this client had last, now and then one of another client's.
                let name = format!("n{}", (task + turn / 8) % 36);
                let mut req = t.acquire(&name, SECOND * 30);
                req.owner = Owner::from_seed(&format!("{task} {turn}"));
                req.hold = HoldId::from_bits(u64::try_from(task * 1_000 + turn).unwrap());
                let Acquired::Granted(grant) = driver.acquire(&req).await.unwrap() else {
                    continue;
                };
                let token = grant.token.0;
                {
                    let mut names = names.lock().unwrap();
                    let (inside, last) = names.entry(name.clone()).or_default();
                    assert!(!*inside, "two holders of {name}");
                    assert!(token > *last, "{name}: {token} after {last}");
                    (*inside, *last) = (true, token);
                }
                tokio::task::yield_now().await;
                names.lock().unwrap().get_mut(&name).unwrap().0 = false;
                let release = Release::new(req.name.clone(), req.owner, req.hold);
                let released = driver.release(&release).await.unwrap();
                assert!(matches!(released, Released::Freed), "{name}: {released:?}");
                taken += 1;
            }
            taken
        }));
    }
    let mut taken = 0;
    for task in tasks {
        taken += task.await.unwrap();
    }
    assert!(taken > 36 * 10, "{taken} were taken");
    assert!(t.sent("update").await > before, "none went together");
}
