//! A document that is in a foreign open transaction or cannot be written: it does not affect the other
//! requests of its batch.

use crate::testbed::{SECOND, Testbed};
use dlock_core::{
    Clock, Effect, ErrorKind,
    driver::{Acquire, Acquired, DistributedLock, Lane, Release, Released, Renew, Renewed},
};
use futures_util::future::join_all;
use mongodb::{
    ClientSession,
    bson::{Bson, Document, doc},
};
use std::{sync::Arc, time::Duration};
use tokio::task::JoinHandle;

impl Testbed {
    /// An open transaction that has written that document.
    async fn blocker(&self, name: &str) -> ClientSession {
        self.blocker_of(doc! { "_id": name }).await
    }

    /// An open transaction that has written several documents.
    async fn blocker_of(&self, documents: Document) -> ClientSession {
        let mut session = self.raw.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        let touched = doc! { "$set": { "blocked": true } };
        let locks = self.locks();
        let update = locks.update_many(documents, touched);
        update.session(&mut session).await.unwrap();
        session
    }

    /// Requests for names that the driver knows to be free, with a late give-up.
    async fn crowd_of(&self, count: usize) -> Vec<Acquire> {
        for req in self.taken(count).await {
            self.release(&req).await;
        }
        let wanted = |at| {
            let mut req = self.acquire(&format!("n{at}"), SECOND * 60);
            req.give_up = Clock::boot().now() + SECOND * 60;
            req
        };
        (0..count).map(wanted).collect()
    }

    async fn taken(&self, count: usize) -> Vec<Acquire> {
        let taken: Vec<_> = (0..count)
            .map(|at| self.acquire(&format!("n{at}"), SECOND * 30))
            .collect();
        for req in &taken {
            self.granted(req).await;
        }
        taken
    }

    /// The positions of the holds that are not renewed within that time.
    async fn not_renewed(&self, held: &[Acquire], within: Duration) -> Vec<usize> {
        let give_up = Clock::boot().now() + within;
        let answers = self
            .driver
            .renew(Lane(0), &for_a_minute(held), give_up)
            .await;
        let Ok(answers) = answers else {
            return (0..held.len()).collect();
        };
        let answers = answers.into_iter().enumerate();
        let not = answers.filter(|(_, answer)| !matches!(answer, Ok(Renewed::Until { .. })));
        not.map(|(at, _)| at).collect()
    }

    /// Renews the holds for a minute. Only the one at `spoilt` fails, with an error of that kind.
    async fn all_but_one_last(&self, held: &[Acquire], spoilt: usize, kind: ErrorKind) {
        let batch = for_a_minute(held);
        let answers = self.driver.renew(Lane(0), &batch, self.soon()).await;
        for (at, answer) in answers.unwrap().into_iter().enumerate() {
            match answer {
                Err(error) => assert_eq!((at, error.kind()), (spoilt, kind), "{error:?}"),
                Ok(Renewed::Until { valid_for }) => {
                    assert!(
                        at != spoilt && valid_for > SECOND * 40,
                        "{at}: {valid_for:?}"
                    );
                }
                Ok(other) => panic!("{at}: {other:?}"),
            }
        }
        // The server has renewed them, too.
        let looks: Vec<_> = batch
            .iter()
            .map(|entry| Renew::new(entry.name.clone(), entry.owner, entry.hold, None))
            .collect();
        let seen = self.driver.renew(Lane(0), &looks, self.soon()).await;
        for (at, seen) in seen.unwrap().into_iter().enumerate() {
            let Ok(Renewed::Until { valid_for }) = seen else {
                panic!("{at}: {seen:?}")
            };
            assert_eq!(valid_for > SECOND * 30, at != spoilt, "{at}: {valid_for:?}");
        }
    }
}

fn for_a_minute(held: &[Acquire]) -> Vec<Renew> {
    let renew =
        |req: &Acquire| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 60));
    held.iter().map(renew).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_in_a_transaction_costs_only_its_own_renewal() {
    let t = Testbed::start().await;
    let held = t.taken(40).await;
    let mut blocker = t.blocker("n17").await;
    t.all_but_one_last(&held, 17, ErrorKind::Unavailable).await;
    blocker.abort_transaction().await.unwrap();
    let answers = t.renew(&[&held[17], &held[18]]).await;
    assert!(
        answers
            .iter()
            .all(|answer| matches!(answer, Some(Renewed::Until { .. }))),
        "{answers:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_cannot_be_written_costs_only_its_own_renewal() {
    let t = Testbed::start().await;
    let held = t.taken(40).await;
    // A validator refuses every change of this document.
    let valid = doc! { "$or": [{ "_id": { "$ne": "n17" } }, { "owner": Bson::Null }] };
    let validator = doc! { "collMod": "locks", "validator": valid };
    t.database().run_command(validator).await.unwrap();
    t.all_but_one_last(&held, 17, ErrorKind::Misuse).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_in_a_transaction_costs_only_its_own_renewal_of_a_short_lease_too() {
    let t = Testbed::start().await;
    let held = t.taken(40).await;
    let mut blocker = t.blocker("n17").await;
    // The give-up is as short as with a lease of six seconds, and equals the server's time limit for a
    // command. A batch that waited for the limit would never renew any hold. On a busy disk the remaining
    // time is not enough for all others, so the test sends the rest again, as a watchdog does.
    let mut left = held.clone();
    for _ in 0..held.len() {
        let not = t.not_renewed(&left, SECOND).await;
        left = not.into_iter().map(|at| left[at].clone()).collect();
        if left.len() == 1 {
            break;
        }
    }
    let names: Vec<_> = left.iter().map(|req| req.name.as_str()).collect();
    assert_eq!(names, ["n17"]);
    blocker.abort_transaction().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn however_many_batches_are_held_up_few_renewals_go_alone_at_a_time() {
    let t = Testbed::start().await;
    let held = t.taken(40).await;
    let mut blocker = t.blocker_of(doc! {}).await;
    let batches = held.chunks(10).map(|some| {
        let batch = for_a_minute(some);
        let (driver, give_up) = (Arc::clone(&t.driver), t.soon());
        tokio::spawn(async move { driver.renew(Lane(0), &batch, give_up).await })
    });
    let batches: Vec<_> = batches.collect();
    let pipeline = vec![
        doc! { "$currentOp": {} },
        doc! { "$match": { "op": "update", "ns": "dlock.locks" } },
    ];
    let look = doc! { "aggregate": 1, "pipeline": pipeline, "cursor": {} };
    let names = |running: &Bson| {
        let command = running.as_document()?.get_document("command").ok()?;
        let names = command.get_document("q").ok()?.get_document("_id").ok()?;
        Some(names.get_array("$in").ok()?.len())
    };
    let mut most = 0;
    while !batches.iter().all(JoinHandle::is_finished) {
        let seen = t.raw.database("admin").run_command(look.clone()).await;
        let seen = seen.unwrap();
        let cursor = seen.get_document("cursor").unwrap();
        let running = cursor.get_array("firstBatch").unwrap().iter();
        most = most.max(running.filter(|one| names(one) == Some(1)).count());
    }
    assert!((9..=16).contains(&most), "{most} at a time");
    blocker.abort_transaction().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_in_a_transaction_keeps_no_other_name_from_being_taken_and_freed() {
    let t = Testbed::start().await;
    let crowd = t.crowd_of(40).await;
    let mut blocker = t.blocker("n17").await;
    let answers = join_all(crowd.iter().map(|req| t.driver.acquire(req))).await;
    for (at, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(Acquired::Granted(grant)) => assert!(at != 17 && grant.holds.get() == 1, "{at}"),
            Err(error) => assert_eq!((at, error.effect()), (17, Effect::Unknown), "{error:?}"),
            other => panic!("{at}: {other:?}"),
        }
    }
    blocker.abort_transaction().await.unwrap();
    t.granted(&crowd[17]).await;
    let mut blocker = t.blocker("n18").await;
    let all: Vec<_> = crowd
        .iter()
        .map(|req| Release::new(req.name.clone(), req.owner, req.hold))
        .collect();
    let answers = join_all(all.iter().map(|release| t.driver.release(release))).await;
    blocker.abort_transaction().await.unwrap();
    for (at, answer) in answers.into_iter().enumerate() {
        match answer {
            // It was freed, or went in a batch whose outcome is unknown.
            Ok(Released::Freed) => assert_ne!(at, 18),
            Err(error) => assert_eq!(error.effect(), Effect::Unknown, "{at}: {error:?}"),
            other => panic!("{at}: {other:?}"),
        }
        let left = t.driver.inspect(&crowd[at].name).await.unwrap().holds;
        assert_eq!(left, u32::from(at == 18), "{at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_possibly_taken_with_a_failed_one_have_an_unknown_outcome() {
    let t = Testbed::start().await;
    let crowd = t.crowd_of(40).await;
    let mut blocker = t.blocker("n30").await;
    // What became of a batch cannot be read, and the requests that are sent alone meet a primary that steps
    // down.
    t.fail_all_of(&["findAndModify", "find"], doc! { "errorCode": 10107 })
        .await;
    let answers = join_all(crowd.iter().map(|req| t.driver.acquire(req))).await;
    t.heal().await;
    blocker.abort_transaction().await.unwrap();
    let mut taken = 0;
    for (at, answer) in answers.into_iter().enumerate() {
        let error = answer.map(drop).unwrap_err();
        let holds = t.driver.inspect(&crowd[at].name).await.unwrap().holds;
        assert!(
            holds == 0 || error.effect() == Effect::Unknown,
            "{at}: {error:?}"
        );
        taken += holds;
    }
    assert!(
        taken > 0,
        "the server came to some of them before it was held up"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_taken_with_a_failed_one_are_granted() {
    let t = Testbed::start().await;
    let crowd = t.crowd_of(40).await;
    let mut blocker = t.blocker("n30").await;
    // The requests that are sent alone fail.
    t.fail_times("findAndModify", 1_000, doc! { "errorCode": 10107 })
        .await;
    let answers = join_all(crowd.iter().map(|req| t.driver.acquire(req))).await;
    t.heal().await;
    blocker.abort_transaction().await.unwrap();
    let mut taken = 0;
    for (at, answer) in answers.into_iter().enumerate() {
        let holds = t.driver.inspect(&crowd[at].name).await.unwrap().holds;
        match answer {
            Ok(Acquired::Granted(_)) => assert_eq!(holds, 1, "{at}"),
            Err(error) => assert_eq!(holds, 0, "{at}: {error:?}"),
            other => panic!("{at}: {other:?}"),
        }
        taken += holds;
    }
    assert!(
        taken > 0,
        "the server came to some of them before it was held up"
    );
}
