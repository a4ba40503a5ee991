//! Drivers that release wrongly.

use super::{
    Edit, FAR, Inner, Mutation,
    memory::{PerName, Who, address, who},
    table,
};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    Holds, Instant, Owner,
    driver::{Acquire, Acquired, Release, Released, Renew, Result},
};
use std::time::Duration;

table! {
    release_goes_by_the_owner breaks(Clause::Owner) => ByOwner;
    release_of_nothing_is_freed breaks(Clause::Owner) => Edit {
        released: |answer| match answer {
            Ok(Released::NotHeld { .. }) => Ok(Released::Freed),
            answer => answer,
        },
        ..Edit::NONE
    };
    the_first_hold_takes_the_others_with_it
        breaks(Clause::Owner, Clause::Reentry, Clause::Share, Clause::Lease, Clause::Keep)
        => FirstEndsAll::default();
    what_is_left_lasts_as_long_as_what_went breaks(Clause::Lease) => Heirs::default();
    a_keep_is_forgotten_while_a_hold_is_left breaks(Clause::Keep) => KeepOfTheLast;
    a_keep_is_for_others_only breaks(Clause::Keep) => KeepForOthers::default();
    close_gives_back_what_it_held breaks(Clause::Shutdown) needs(Detached) => Close {
        renews: false,
        held: PerName::default(),
    };
    close_renews_a_last_time breaks(Clause::Crash) => Close {
        renews: true,
        held: PerName::default(),
    };
}

/// Where the hold does not exist, releases all holds of the owner.
#[derive(Debug)]
struct ByOwner;

#[async_trait]
impl Mutation for ByOwner {
    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        if matches!(answer, Released::NotHeld { .. }) {
            let mut all = req.clone();
            all.holds = Holds::All;
            return inner.release(&all).await;
        }
        Ok(answer)
    }
}

/// The hold that began the incarnation is its owner; the others only count.
#[derive(Debug, Default)]
struct FirstEndsAll {
    first: PerName<Who>,
}

#[async_trait]
impl Mutation for FirstEndsAll {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &answer
            && grant.holds.get() == 1
        {
            self.first.put(&req.name, who(req));
        }
        Ok(answer)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
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
impl Mutation for Heirs {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
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

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
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
impl Mutation for KeepOfTheLast {
    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let mut req = req.clone();
        if req.min_hold.is_some() && inner.inspect(&req.name).await?.holds > 1 {
            req.min_hold = None;
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
impl Mutation for KeepForOthers {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) && self.last.get(&req.name) == Some(req.owner) {
            self.last.take(&req.name);
            inner.break_lock(&req.name, None).await?;
            return inner.acquire(req).await;
        }
        Ok(answer)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        if matches!(answer, Released::MinHold { .. }) {
            self.last.put(&req.name, req.owner);
        }
        Ok(answer)
    }
}

/// Releases the locks of code that still runs before it closes, or renews them for a long lease.
#[derive(Debug)]
struct Close {
    renews: bool,
    /// The latest hold of each name, and the driver that acquired it.
    held: PerName<(usize, Acquire)>,
}

#[async_trait]
impl Mutation for Close {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.held.put(&req.name, (address(inner), req.clone()));
        }
        Ok(answer)
    }

    async fn close(&self, inner: &Inner) {
        let all: Vec<_> = self.held.all().values().cloned().collect();
        for (_, req) in all.into_iter().filter(|(at, _)| *at == address(inner)) {
            let Acquire {
                name, owner, hold, ..
            } = req;
            if self.renews {
                let lane = inner.lane(&name);
                let entry = Renew::new(name, owner, hold, Some(FAR));
                inner.renew(lane, &[entry], req.give_up + FAR).await.ok();
            } else {
                inner.release(&Release::new(name, owner, hold)).await.ok();
            }
        }
        inner.close().await;
    }
}
