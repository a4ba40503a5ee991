//! Calls to one driver: concurrent, in batches, and dropped.

use super::bed::{Bed, acquire, again, frees, granted, held, release, renew};
use super::{LIMIT, SECOND, trial};
use dlock_core::{
    Clock, ErrorKind, HoldId, Holds,
    driver::{Acquired, Cursor, DistributedLock, Lane, Release, Released, Renew, Renewed},
};
use futures_util::{FutureExt, future::join_all};
use libtest_mimic::Trial;
use std::collections::HashSet;
use tokio::runtime::Handle;

pub(super) fn trials() -> Vec<Trial> {
    Vec::from(tests! { trial:
        many_holds_that_come_and_go_at_once_are_counted,
        who_joins_what_is_over_by_the_second_try_is_told_that_it_is_gone,
        a_batch_of_renewals_of_any_size_is_answered_in_order,
        a_dropped_call_is_over_before_the_next_one_begins,
        a_walk_over_more_names_than_a_page_meets_each_once,
        a_closed_driver_refuses_and_its_locks_stay,
        no_owner_is_shown,
    })
}

async fn many_holds_that_come_and_go_at_once_are_counted() {
    let bed = Bed::new();
    let drivers = join_all((0..4).map(|_| bed.driver())).await;
    let first = acquire("a", SECOND * 30);
    let token = granted(&drivers[0], &first).await.token;
    let joins = drivers.iter().enumerate().map(|(which, driver)| {
        let mut holds: Vec<_> = (0..6).map(|_| again(&first)).collect();
        if which % 2 == 0 {
            holds.iter_mut().for_each(|hold| hold.join = Some(token));
        }
        async move {
            for hold in &holds {
                assert_eq!(granted(driver, hold).await.token, token);
                assert_eq!(granted(driver, hold).await.token, token, "repeated");
                assert!(matches!(
                    renew(driver, hold).await,
                    Ok(Renewed::Until { .. })
                ));
            }
            holds
        }
    });
    let holds: Vec<_> = join_all(joins).await.into_iter().flatten().collect();
    assert_eq!(drivers[1].inspect(&first.name).await.unwrap().holds, 25);
    let releases = holds
        .chunks(6)
        .zip(&drivers)
        .map(|(holds, driver)| async move {
            for hold in holds {
                let released = release(driver, hold).await;
                assert!(
                    matches!(released, Released::StillHeld { .. }),
                    "{released:?}"
                );
            }
        });
    join_all(releases).await;
    frees(&drivers[3], &first).await;
}

async fn who_joins_what_is_over_by_the_second_try_is_told_that_it_is_gone() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    let mut joining = again(&first);
    joining.join = Some(granted(&driver, &first).await.token);
    // A release that comes between the reading of the record and the writing of the second hold.
    bed.sql(
        "CREATE TRIGGER meanwhile BEFORE UPDATE ON locks WHEN old.holds <> '' AND length(new.holds) > length(old.holds) BEGIN \
         UPDATE locks SET owner = NULL, holds = '', until = 0, version = version + 1; SELECT RAISE(IGNORE); END",
    )
    .await;
    let joined = driver.acquire(&joining).await.unwrap();
    assert!(matches!(joined, Acquired::Gone), "{joined:?}");
}

async fn a_batch_of_renewals_of_any_size_is_answered_in_order() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let most = driver.capabilities().renew_batch;
    for size in [1, 2, 8, 9, most, most + 3] {
        let mut batch = Vec::new();
        for at in 0..size {
            let req = acquire(&format!("{size}/{at}"), SECOND * 10);
            granted(&driver, &req).await;
            let hold = if at % 3 == 1 {
                HoldId::from_bits(0)
            } else {
                req.hold
            };
            let mut lease = Some(SECOND * 60);
            if at % 3 == 2 {
                lease = None; // only to be proven
            }
            batch.push(Renew::new(req.name.clone(), req.owner, hold, lease));
        }
        let answers = driver.renew(Lane::default(), &batch, Clock::boot().now() + LIMIT);
        let answers = answers.await.unwrap();
        assert_eq!(answers.len(), size);
        for (at, answer) in answers.into_iter().enumerate() {
            match (at % 3, answer.unwrap()) {
                (0, Renewed::Until { valid_for }) => assert_eq!(valid_for, SECOND * 60),
                (1, Renewed::NotHeld) => {}
                (2, Renewed::Until { valid_for }) => assert!(valid_for <= SECOND * 10),
                (_, other) => panic!("{at} of {size}: {other:?}"),
            }
        }
    }
}

async fn a_dropped_call_is_over_before_the_next_one_begins() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for polls in 0..6 {
        let req = acquire("a", SECOND * 30);
        let mut call = driver.acquire(&req);
        for _ in 0..polls {
            if (&mut call).now_or_never().is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(call);
        // Its task goes on to its next await, on a busy machine maybe after the next call.
        while Handle::current().metrics().num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
        let left = driver.inspect(&req.name).await.unwrap().holds;
        // What came after the answer would come by then: nothing else shows that nothing does.
        tokio::time::sleep(SECOND / 50).await;
        let later = driver.inspect(&req.name).await.unwrap().holds;
        assert_eq!(left, later, "nothing comes after the next answer");
        release(&driver, &req).await;
        assert_eq!(driver.inspect(&req.name).await.unwrap().holds, 0);
    }
}

async fn a_walk_over_more_names_than_a_page_meets_each_once() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    for lock in ["a", "a%", "a\u{10ffff}", "a_", "b", "A", "é", "a/1", "a/2"] {
        let req = acquire(lock, SECOND * 30);
        granted(&driver, &req).await;
        if lock == "a/2" {
            let mut kept = Release::new(req.name.clone(), req.owner, req.hold);
            (kept.holds, kept.min_hold) = (Holds::All, Some(SECOND * 30));
            driver.release(&kept).await.unwrap();
        }
    }
    let free = acquire("a/free", SECOND);
    granted(&driver, &free).await;
    frees(&driver, &free).await;
    for (prefix, wanted) in [("", 9), ("a", 6), ("a/", 2), ("a\u{10ffff}", 1), ("z", 0)] {
        for limit in [1, 2, 100] {
            let (mut seen, mut from) = (Vec::new(), None::<Cursor>);
            loop {
                let page = driver.list(prefix, from.as_ref(), limit).await.unwrap();
                assert!(page.found.len() <= limit);
                seen.extend(page.found.into_iter().map(|shown| shown.name));
                from = page.next;
                if from.is_none() {
                    break;
                }
            }
            assert!(seen.iter().all(|name| name.as_str().starts_with(prefix)));
            let distinct: HashSet<_> = seen.iter().collect();
            assert_eq!(
                (seen.len(), distinct.len()),
                (wanted, wanted),
                "{prefix:?} by {limit}"
            );
        }
    }
    let wrong = Cursor(vec![0xff]);
    let error = driver.list("", Some(&wrong), 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

async fn a_closed_driver_refuses_and_its_locks_stay() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    driver.close().await;
    let error = driver.acquire(&acquire("b", SECOND)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShuttingDown);
    assert!(
        !bed.at("locks.db-wal").exists(),
        "the last one puts the file in order"
    );
    let driver = bed.driver().await;
    held(&driver, &acquire("a", SECOND)).await;
    frees(&driver, &first).await;
}

async fn no_owner_is_shown() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let first = acquire("a", SECOND * 30);
    granted(&driver, &first).await;
    let refusal = held(&driver, &acquire("a", SECOND)).await;
    let shown = driver.inspect(&first.name).await.unwrap();
    bed.sql("UPDATE locks SET boot = 'another boot'").await;
    let error = driver.inspect(&first.name).await.unwrap_err();
    let said = format!("{driver:?} {refusal:?} {shown:?} {error:?} {error}");
    assert!(
        !said.contains(&first.owner.expose().to_string()[..8]),
        "{said}"
    );
}
