//! Drivers that let sharers in wrongly.

use super::{Inner, Mutation, memory::PerName, table};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    ErrorKind,
    driver::{Acquire, Acquired, DriverError, Release, Released, Result},
};
use std::num::NonZeroU32;

table! {
    one_sharer_more_than_permits breaks(Clause::Share) needs(Shares) => Past { the_limit: true };
    a_sharer_passes_who_waits_alone breaks(Clause::Share) needs(Shares) => Past { the_limit: false };
    a_full_lock_is_overloaded breaks(Clause::Share) needs(Shares) => Full;
    a_lapsed_sharer_takes_the_others_with_it
        breaks(Clause::Share) needs(Shares, Detached) => OneEndForAll::default();
}

/// Lets a sharer in where it must wait.
#[derive(Debug)]
struct Past {
    /// Beyond the number of permits; otherwise past who waits.
    the_limit: bool,
}

#[async_trait]
impl Mutation for Past {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        let (Some(most), Acquired::Held(_)) = (req.share(), &answer) else {
            return Ok(answer);
        };
        let shown = inner.inspect(&req.name).await?;
        let is_full = shown.holds >= most;
        match shown.holders.first() {
            Some(by) if by.owner == req.owner.fingerprint() && is_full == self.the_limit => {
                let mut joining = req.clone();
                joining.join = by.token;
                match inner.acquire(&joining).await? {
                    Acquired::Gone => Ok(answer),
                    entered => Ok(entered),
                }
            }
            _ => Ok(answer),
        }
    }
}

/// Takes a lock that is full for a failure.
#[derive(Debug)]
struct Full;

#[async_trait]
impl Mutation for Full {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if req.share().is_some() && matches!(answer, Acquired::Held(_)) {
            return Err(DriverError::new(ErrorKind::Overloaded, "the lock is full"));
        }
        Ok(answer)
    }
}

/// Ends all who share a lock when the lease of one of them is over.
#[derive(Debug, Default)]
struct OneEndForAll {
    inside: PerName<NonZeroU32>,
}

#[async_trait]
impl Mutation for OneEndForAll {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let before = self.inside.get(&req.name).map_or(0, NonZeroU32::get);
        if inner.inspect(&req.name).await?.holds < before {
            inner.break_lock(&req.name, None).await?;
            self.inside.take(&req.name);
        }
        let answer = inner.acquire(req).await?;
        if let (Some(_), Acquired::Granted(grant)) = (req.share(), &answer) {
            self.inside.put(&req.name, grant.holds);
        }
        Ok(answer)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await?;
        self.inside.take(&req.name);
        if let Released::StillHeld { holds } = &answer {
            self.inside.put(&req.name, *holds);
        }
        Ok(answer)
    }
}
