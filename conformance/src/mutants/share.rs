//! Drivers that let sharers in wrongly.

use super::{Inner, Mutation, table};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    ErrorKind,
    driver::{Acquire, Acquired, DriverError, Result},
};

table! {
    one_sharer_more_than_permits breaks(Clause::Share) needs(Shares) => Past { the_limit: true };
    a_sharer_passes_who_waits_alone breaks(Clause::Share) needs(Shares) => Past { the_limit: false };
    a_full_lock_is_overloaded breaks(Clause::Share) needs(Shares) => Full;
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
