//! Sessions that end, and replies that are lost.

use super::{SECOND, UnderTest, lasts, named};
use dlock_core::{
    Broken, Effect, ErrorKind, RetryClass,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Release, Released},
};
use std::fmt;

/// Ends all sessions of the driver before each kind of request. The request that meets a dead one fails, and
/// its repeat does not.
///
/// # Panics
/// When a kind of request fails again and again, or does something else.
pub async fn ended_sessions_are_replaced<D: DistributedLock>(
    t: &UnderTest<D>,
    end_all: impl AsyncFn(),
) {
    const LEASE: std::time::Duration = SECOND.saturating_mul(90);
    let first = t.taken("a").await;
    let second = t.again(&first, LEASE);
    let steps = [
        "join",
        "inspect",
        "renew",
        "release one",
        "release",
        "insert",
        "list",
        "break",
    ];
    for step in steps {
        end_all().await;
        // The one attempt that meets the closed connection reports it; repeating it is harmless, and the core does so.
        let mut tries = 0;
        loop {
            let done: Result<(), DriverError> = match step {
                "join" => t.driver.acquire(&second).await.map(|acquired| {
                    assert!(matches!(acquired, Acquired::Granted(grant) if grant.holds.get() == 2));
                }),
                "inspect" => {
                    let shown = t.driver.inspect(&named("a")).await;
                    shown.map(|shown| assert_eq!(shown.holds, 2))
                }
                "renew" => {
                    let renewed = t.renew(std::slice::from_ref(&first), LEASE).await;
                    renewed
                        .and_then(|mut one| one.remove(0))
                        .map(|renewed| assert!(lasts(&Ok(renewed), LEASE), "{renewed:?}"))
                }
                "release one" => t.give_back(&second).await.map(drop),
                "release" => t.give_back(&first).await.map(drop),
                "insert" => t.driver.acquire(&t.ask("b", LEASE)).await.map(drop),
                "list" => {
                    let page = t.driver.list("", None, 10).await;
                    page.map(|page| assert_eq!(page.found.len(), 1))
                }
                _ => t.driver.break_lock(&named("b"), None).await.map(|broken| {
                    assert!(matches!(broken, Broken::Freed { token: Some(_) }));
                }),
            };
            match done {
                Ok(()) => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{step}: {error}");
                    assert_ne!(error.retry(), RetryClass::Never, "{step}: {error}");
                }
            }
            tries += 1;
            assert!(tries < 3, "{step}: one failed attempt closes what is dead");
        }
    }
}

/// Checks that the repeat, by this driver, of a release whose reply was lost finds the next holder, and
/// leaves it alone.
///
/// # Panics
/// When it does not.
pub async fn finds_the_next_holder<D: DistributedLock>(
    t: &UnderTest<D>,
    driver: &D,
    released: &Acquire,
) {
    let name = released.name.as_str();
    let next = t.taken(name).await;
    let release = Release::new(released.name.clone(), released.owner, released.hold);
    match driver.release(&release).await {
        Ok(Released::NotHeld { by }) => {
            assert_eq!(by.map(|by| by.owner), Some(next.owner.fingerprint()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(t.inspect(name).await.holds, 1);
}

/// Checks that a request whose reply was lost says that its effect is not known.
///
/// # Panics
/// When it does not.
#[track_caller]
pub fn unknown<T: fmt::Debug>(answer: Result<T, DriverError>) {
    let error = answer.expect_err("its reply was lost");
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::Unknown),
        "{error}"
    );
}
