//! What the store shows to a client that holds nothing itself.

use crate::{
    Ctx,
    expect::{Expected, is_free, seen_from_here},
    same,
};
use dlock_core::LockName;
use std::time::Duration;

impl Ctx {
    /// The store shows a free name.
    #[track_caller]
    pub(crate) fn sees_free<'a>(&'a self, name: &'a LockName) -> Expected<'a> {
        seen_from_here(async move { self.observer().await?.sees_free(name).await })
    }

    /// The store shows this number of holds.
    #[track_caller]
    pub(crate) fn sees_holds<'a>(&'a self, name: &'a LockName, holds: u32) -> Expected<'a> {
        seen_from_here(async move { self.observer().await?.sees_holds(name, holds).await })
    }

    /// The store shows this number of queued waiters, if it knows it.
    #[track_caller]
    pub(crate) fn sees_waiters<'a>(&'a self, name: &'a LockName, count: u32) -> Expected<'a> {
        seen_from_here(async move {
            let waiters = self.observer().await?.inspect(name).await?.waiters;
            same(
                "the number of queued waiters",
                waiters.unwrap_or(count),
                count,
            )
        })
    }

    /// Waits until the store shows a hold.
    #[track_caller]
    pub(crate) fn until_granted<'a>(&'a self, name: &'a LockName) -> Expected<'a> {
        seen_from_here(async move {
            let observer = self.observer().await?;
            let granted = || async { Ok(observer.inspect(name).await?.holds > 0) };
            self.eventually("the store has it", self.answer(), granted)
                .await
        })
    }

    /// Waits until no client holds the lock, and none queues for it as far as the store can tell.
    #[track_caller]
    pub(crate) fn left_untouched<'a>(
        &'a self,
        name: &'a LockName,
        bound: Duration,
    ) -> Expected<'a> {
        seen_from_here(async move {
            let observer = self.observer().await?;
            let untouched = || async {
                let seen = observer.inspect(name).await?;
                Ok(is_free(&seen) && seen.waiters.unwrap_or(0) == 0)
            };
            let what = format!("no client holds {name:?} or waits for it");
            self.eventually(&what, bound, untouched).await
        })
    }
}
