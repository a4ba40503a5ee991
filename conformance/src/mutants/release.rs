//! Drivers that release wrongly.

use super::{
    FAR, Mutant, Twist,
    memory::{PerName, Who, who},
};
use crate::{clause::Clause, fixture::Need};
use async_trait::async_trait;
use dlock_core::{
    Holds, Instant, Owner,
    driver::{Acquire, Acquired, DistributedLock, Release, Released, Renew, Result},
};
use std::{sync::Arc, time::Duration};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "release_goes_by_the_owner",
        breaks: &[Clause::Owner],
        needs: &[],
        twist: || Arc::new(ByOwner),
    },
    Mutant {
        name: "release_of_nothing_is_freed",
        breaks: &[Clause::Owner],
        needs: &[],
        twist: || Arc::new(AlwaysFreed),
    },
    Mutant {
        name: "the_first_hold_takes_the_others_with_it",
        breaks: &[Clause::Owner, Clause::Reentry, Clause::Lease, Clause::Keep],
        needs: &[],
        twist: || Arc::new(FirstEndsAll::default()),
    },
    Mutant {
        name: "what_is_left_lasts_as_long_as_what_went",
        breaks: &[Clause::Lease],
        needs: &[],
        twist: || Arc::new(Heirs::default()),
    },
    Mutant {
        name: "a_keep_is_forgotten_while_a_hold_is_left",
        breaks: &[Clause::Keep],
        needs: &[],
        twist: || Arc::new(KeepOfTheLast),
    },
    Mutant {
        name: "a_keep_is_for_others_only",
        breaks: &[Clause::Keep],
        needs: &[],
        twist: || Arc::new(KeepForOthers::default()),
    },
    Mutant {
        name: "close_gives_back_what_it_held",
        breaks: &[Clause::Shutdown],
        needs: &[Need::Detached],
        twist: || Arc::new(CloseReleases::default()),
    },
    Mutant {
        name: "close_renews_a_last_time",
        breaks: &[Clause::Crash],
        needs: &[],
        twist: || Arc::new(CloseRenews::default()),
    },
];

/// Where the hold does not exist, releases all holds of the owner.
#[derive(Debug)]
struct ByOwner;

#[async_trait]
impl Twist for ByOwner {
    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        if matches!(answer, Released::NotHeld { .. }) {
            let mut all = req.clone();
            all.holds = Holds::All;
            return inner.release(&all).await;
        }
        Ok(answer)
    }
}

/// Does not check whether there was a hold.
#[derive(Debug)]
struct AlwaysFreed;

#[async_trait]
impl Twist for AlwaysFreed {
    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        Ok(match inner.release(req).await? {
            Released::NotHeld { .. } => Released::Freed,
            answer => answer,
        })
    }
}

/// The hold that began the incarnation is its owner; the others only count.
#[derive(Debug, Default)]
struct FirstEndsAll {
    first: PerName<Who>,
}

#[async_trait]
impl Twist for FirstEndsAll {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &answer
            && grant.holds.get() == 1
        {
            self.first.put(&req.name, who(req));
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let mut req = req.clone();
        if let Holds::One(hold) = req.holds
            && self.first.get(&req.name) == Some((req.owner, hold))
        {
            req.holds = Holds::All;
        }
        inner.release(&req).await
    }
}

/// Leaves the record's end unchanged when a hold is released.
#[derive(Debug, Default)]
struct Heirs {
    inside: PerName<Vec<(Who, Duration, Instant)>>,
}

#[async_trait]
impl Twist for Heirs {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &answer {
            if grant.holds.get() == 1 {
                self.inside.take(&req.name);
            }
            let entry = (who(req), req.lease.length(), req.give_up + FAR);
            self.inside.add(&req.name, entry);
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        let inside = self.inside.get(&req.name).unwrap_or_default();
        let longest = inside.iter().map(|(_, lease, _)| *lease).max();
        if matches!(answer, Released::StillHeld { .. }) {
            let lane = inner.lane(&req.name);
            for ((owner, hold), _, give_up) in inside {
                let entry = Renew::new(req.name.clone(), owner, hold, longest);
                inner.renew(lane, &[entry], give_up).await.ok();
            }
        }
        Ok(answer)
    }
}

/// Reads `keep` only from the last release.
#[derive(Debug)]
struct KeepOfTheLast;

#[async_trait]
impl Twist for KeepOfTheLast {
    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let mut req = req.clone();
        if req.keep.is_some() && inner.inspect(&req.name).await?.holds > 1 {
            req.keep = None;
        }
        inner.release(&req).await
    }
}

/// Lets the owner that asked for the minimum hold come back.
#[derive(Debug, Default)]
struct KeepForOthers {
    last: PerName<Owner>,
}

#[async_trait]
impl Twist for KeepForOthers {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) && self.last.get(&req.name) == Some(req.owner) {
            self.last.take(&req.name);
            inner.break_lock(&req.name, None).await?;
            return inner.acquire(req).await;
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        if matches!(answer, Released::Kept { .. }) {
            self.last.put(&req.name, req.owner);
        }
        Ok(answer)
    }
}

/// The latest hold of each name, and the driver that acquired it.
type Holdings = PerName<(usize, Acquire)>;

fn note(held: &Holdings, inner: &dyn DistributedLock, req: &Acquire, answer: &Acquired) {
    if matches!(answer, Acquired::Granted(_)) {
        held.put(&req.name, (address(inner), req.clone()));
    }
}

fn held_by(held: &Holdings, inner: &dyn DistributedLock) -> Vec<Acquire> {
    let all = held.all();
    let mine = all.values().filter(|(at, _)| *at == address(inner));
    mine.map(|(_, req)| req.clone()).collect()
}

fn address(inner: &dyn DistributedLock) -> usize {
    std::ptr::from_ref(inner).cast::<()>().addr()
}

/// Releases locks of code that still runs.
#[derive(Debug, Default)]
struct CloseReleases {
    held: Holdings,
}

#[async_trait]
impl Twist for CloseReleases {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        note(&self.held, inner, req, &answer);
        Ok(answer)
    }

    async fn close(&self, inner: &dyn DistributedLock) {
        for req in held_by(&self.held, inner) {
            inner
                .release(&Release::new(req.name, req.owner, req.hold))
                .await
                .ok();
        }
        inner.close().await;
    }
}

/// Renews all holds for a long lease before closing.
#[derive(Debug, Default)]
struct CloseRenews {
    held: Holdings,
}

#[async_trait]
impl Twist for CloseRenews {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        note(&self.held, inner, req, &answer);
        Ok(answer)
    }

    async fn close(&self, inner: &dyn DistributedLock) {
        for req in held_by(&self.held, inner) {
            let lane = inner.lane(&req.name);
            let entry = Renew::new(req.name, req.owner, req.hold, Some(FAR));
            inner.renew(lane, &[entry], req.give_up + FAR).await.ok();
        }
        inner.close().await;
    }
}
