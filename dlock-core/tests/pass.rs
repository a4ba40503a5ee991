//! Passes: a pass opens the incarnation that it stands for, and nothing else.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock_core::{Client, Clock, Error, ErrorKind, Guard, Lock, Pass};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};

fn client() -> Client {
    let store = MemoryStore::new(Clock::boot());
    let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    Client::new(driver).unwrap()
}

fn is_refused<T: std::fmt::Debug>(pass: Result<T, Error>) {
    let error = pass.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("with_owner"), "{error}");
}

async fn entered(guard: &Guard, lock: &Lock) -> Guard {
    guard.scope(lock.acquire()).await.unwrap()
}

/// The bearer would be that owner in each of the owner's locks.
#[tokio::test]
async fn an_owner_that_was_given_is_not_handed_on_by_a_pass() {
    let client = client();
    let owner = client.owner();
    let lock = client.lock("one").unwrap();
    let guard = lock.clone().with_owner(&owner).acquire().await.unwrap();
    is_refused(guard.pass());
    is_refused(entered(&guard, &lock).await.pass());
    let detached = guard.detach().unwrap();
    is_refused(detached.pass());
    is_refused(client.attach(detached).await.unwrap().pass());
}

#[tokio::test]
async fn the_owner_of_one_acquisition_is_handed_on_by_a_pass() {
    let client = client();
    let lock = client.lock("one").unwrap();
    let guard = lock.acquire().await.unwrap();
    let pass = guard.pass().unwrap();
    assert_eq!(entered(&guard, &lock).await.pass().unwrap(), pass);
    let joined = lock.join(&pass).await.unwrap();
    assert_eq!(joined.pass().unwrap(), pass);
    let detached = guard.detach().unwrap();
    assert_eq!(*detached.pass().unwrap(), pass);
    assert_eq!(client.attach(detached).await.unwrap().pass().unwrap(), pass);
    // In another store it is of no use.
    let other = client.lock("two").unwrap();
    let taken = other.acquire().await.unwrap();
    let forged = Pass::new(
        pass.store(),
        taken.name().clone(),
        *pass.owner(),
        taken.token(),
    );
    assert_eq!(
        other.join(&forged).await.unwrap_err().kind(),
        ErrorKind::Gone
    );
}
