//! Drivers that acquire wrongly.

use super::{
    Batch, Edit, FAR, Inner, Mutation, Renewals,
    memory::{PerName, Who, who},
    table,
};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    ErrorKind, HoldId, HolderInfo, Holds, Owner,
    driver::{Acquire, Acquired, Held, Release, Released, Renewed, Result},
};
use std::time::Duration;
use tokio::time::Instant;

table! {
    a_lease_nearly_over_counts_as_over
        breaks(Clause::Mutex, Clause::Lease, Clause::Renew, Clause::Indeterminate) => Impatient;
    a_lapsed_holder_refuses_the_client_that_finds_it breaks(Clause::Expiry) => Sweeper::default();
    a_reentry_sets_the_end_of_all breaks(Clause::Share, Clause::Lease) => LastLease::default();
    a_repeat_is_one_hold_more breaks(Clause::Share, Clause::Indeterminate) => Counter {
        repeats: true,
        inside: PerName::default(),
    };
    lapsed_holds_are_counted breaks(Clause::Expiry) => Counter {
        repeats: false,
        inside: PerName::default(),
    };
    a_repeat_promises_the_whole_lease breaks(Clause::Indeterminate) => Edit {
        acquired: |req, mut answer| {
            if let Ok(Acquired::Granted(grant)) = &mut answer {
                grant.valid_for = req.lease.length();
            }
            answer
        },
        ..Edit::NONE
    };
    // Sends no not-after.
    late_is_not_looked_at breaks(Clause::Indeterminate, Clause::Late, Clause::Error) => Edit {
        acquire: |req| req.give_up = req.give_up + FAR,
        renew: |batch| batch.give_up = batch.give_up + FAR,
        ..Edit::NONE
    };
    a_floor_is_not_looked_at breaks(Clause::Fencing) needs(Raises) => Edit {
        acquire: |req| req.floor = None,
        ..Edit::NONE
    };
    a_restored_hold_is_one_to_join breaks(Clause::Fencing) needs(Raises) => Edit {
        acquire: |req| req.floor = req.floor.filter(|_| !req.restores()),
        ..Edit::NONE
    };
    a_refusal_says_nothing_of_the_holder breaks(Clause::Presence) => Edit {
        acquired: |_, mut answer| {
            if let Ok(Acquired::Held(held)) = &mut answer
                && let Some(by) = &mut held.by
            {
                by.info = HolderInfo::default();
            }
            answer
        },
        ..Edit::NONE
    };
    // Tells a holder to wait for itself.
    one_hold_too_many_is_refused_as_held breaks(Clause::Error) => Edit {
        acquired: |_, answer| match answer {
            Err(error) if error.kind() == ErrorKind::Overloaded => Ok(Acquired::Held(Held::default())),
            answer => answer,
        },
        ..Edit::NONE
    };
}

/// Takes a lock with less than [`NEARLY`] left of its lease.
#[derive(Debug)]
struct Impatient;

/// Half of the shortest lease whose end a case in real time waits for: with less, a busy machine may
/// not send a request between that and the end.
const NEARLY: Duration = Duration::from_millis(250);

#[async_trait]
impl Mutation for Impatient {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) {
            let seen = inner.inspect(&req.name).await?;
            let rest = seen.holders.iter().filter_map(|holder| holder.rest).max();
            if rest.is_some_and(|rest| rest < NEARLY) {
                inner.break_lock(&req.name, None).await?;
                return inner.acquire(req).await;
            }
        }
        Ok(answer)
    }
}

/// An acquire that finds a lapsed holder only cleans up, and is refused.
#[derive(Debug, Default)]
struct Sweeper {
    ends: PerName<(Owner, Instant)>,
}

#[async_trait]
impl Mutation for Sweeper {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let now = Instant::now();
        if let Some((owner, end)) = self.ends.get(&req.name)
            && owner != req.owner
            && end <= now
        {
            self.ends.take(&req.name);
            return Ok(Acquired::Held(Held::default()));
        }
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.ends
                .put(&req.name, (req.owner, now + req.lease.length()));
        }
        Ok(answer)
    }
}

/// One end for the whole record: the one that was asked for last.
#[derive(Debug, Default)]
struct LastLease {
    ends: PerName<Instant>,
}

#[async_trait]
impl Mutation for LastLease {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let now = Instant::now();
        let mut answer = inner.acquire(req).await?;
        let over = self.ends.get(&req.name).is_some_and(|end| end <= now);
        let refused = matches!(answer, Acquired::Held(_));
        if refused && over && !inner.inspect(&req.name).await?.holders.is_empty() {
            inner.break_lock(&req.name, None).await?;
            answer = inner.acquire(req).await?;
        }
        if let Acquired::Granted(grant) = &answer {
            self.ends.put(&req.name, now + grant.valid_for);
        }
        Ok(answer)
    }

    async fn renew(&self, batch: Batch<'_>) -> Renewals {
        let now = Instant::now();
        let answers = batch.send().await?;
        for (entry, answer) in batch.entries.iter().zip(&answers) {
            if let Ok(Renewed::Until { valid_for }) = answer {
                let end = self.ends.get(&entry.name).unwrap_or(now);
                self.ends.put(&entry.name, end.max(now + *valid_for));
            }
        }
        Ok(answers)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        self.ends.take(&req.name);
        inner.release(req).await
    }
}

/// Counts up and down in place of a set of holds.
#[derive(Debug)]
struct Counter {
    /// Does not check its hold id; otherwise a lapse does not change the count while the record lives.
    repeats: bool,
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Mutation for Counter {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut again = req.clone();
        let raises = req.floor.is_some(); // it is no hold more
        if self.repeats && !raises && self.inside.has(&req.name, &who(req)) {
            again.hold = HoldId::from_bits(req.hold.to_bits() ^ 1);
        }
        let mut answer = inner.acquire(&again).await?;
        if let Acquired::Granted(grant) = &mut answer {
            if grant.holds.get() == 1 && !self.repeats {
                self.inside.take(&req.name);
            }
            self.inside.add(&req.name, who(req));
            if !self.repeats {
                let count = self.inside.get(&req.name).map_or(0, |inside| inside.len());
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                grant.holds = grant.holds.max(count.try_into().unwrap_or(grant.holds));
            }
        }
        Ok(answer)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        if let Holds::One(hold) = req.holds {
            self.inside.strike(&req.name, &(req.owner, hold));
        }
        inner.release(req).await
    }
}
