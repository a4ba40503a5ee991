//! Drivers that renew wrongly.

use super::{
    FAR, Mutant, Twist,
    memory::{PerName, Who, who},
};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    Instant, Lease,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Lane, Renew, Renewed, Result},
};
use std::{sync::Arc, time::Duration};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "renew_revives",
        breaks: &[Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin],
        needs: &[],
        twist: || Arc::new(Revives),
    },
    Mutant {
        name: "renew_believes_what_it_was_told_before",
        breaks: &[Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin],
        needs: &[],
        twist: || Arc::new(Believes),
    },
    Mutant {
        name: "a_batch_ends_at_its_first_failure",
        breaks: &[Clause::Owner],
        needs: &[],
        twist: || Arc::new(StopsEarly),
    },
    Mutant {
        name: "renew_prolongs_every_hold_of_the_owner",
        breaks: &[Clause::Renew],
        needs: &[],
        twist: || Arc::new(AllOfThem::default()),
    },
    Mutant {
        name: "a_proof_is_a_renewal",
        breaks: &[Clause::Renew],
        needs: &[],
        twist: || Arc::new(ProofProlongs),
    },
    Mutant {
        name: "a_hold_that_is_lost_is_an_error",
        breaks: &[Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin],
        needs: &[],
        twist: || Arc::new(NotHeldIsTrouble),
    },
    Mutant {
        name: "renew_answers_before_it_is_done",
        breaks: &[Clause::Renew],
        needs: &[],
        twist: || Arc::new(AnswersOnly),
    },
];

/// Acquires the lock again where the hold is gone.
#[derive(Debug)]
struct Revives;

#[async_trait]
impl Twist for Revives {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut answers = inner.renew(lane, batch, give_up).await?;
        for (entry, answer) in batch.iter().zip(&mut answers) {
            if matches!(answer, Ok(Renewed::NotHeld)) {
                let Renew {
                    name,
                    owner,
                    hold,
                    lease,
                    ..
                } = entry.clone();
                let lease = Lease::renewed(lease.unwrap_or_default());
                let take = Acquire::new(name, owner, hold, lease, give_up);
                if let Acquired::Granted(grant) = inner.acquire(&take).await? {
                    *answer = Ok(Renewed::Until {
                        valid_for: grant.valid_for,
                    });
                }
            }
        }
        Ok(answers)
    }
}

/// A lock that was held once stays held, unless the store is asked to free it.
#[derive(Debug)]
struct Believes;

#[async_trait]
impl Twist for Believes {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut answers = inner.renew(lane, batch, give_up).await?;
        for (entry, answer) in batch.iter().zip(&mut answers) {
            if matches!(answer, Ok(Renewed::NotHeld)) {
                let valid_for = entry.lease.unwrap_or(Duration::from_millis(1));
                *answer = Ok(Renewed::Until { valid_for });
            }
        }
        Ok(answers)
    }
}

/// Reports `NotHeld` as trouble: the core retries, and learns of the loss only when its lease is over.
#[derive(Debug)]
struct NotHeldIsTrouble;

#[async_trait]
impl Twist for NotHeldIsTrouble {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let answers = inner.renew(lane, batch, give_up).await?;
        let trouble = || Err(DriverError::unavailable("no such record"));
        let told = |answer| match answer {
            Ok(Renewed::NotHeld) => trouble(),
            answer => answer,
        };
        Ok(answers.into_iter().map(told).collect())
    }
}

/// Entries after the first missing hold are not sent.
#[derive(Debug)]
struct StopsEarly;

#[async_trait]
impl Twist for StopsEarly {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut answers = Vec::new();
        for entry in batch {
            if matches!(answers.last(), Some(Ok(Renewed::NotHeld))) {
                answers.push(Ok(Renewed::NotHeld));
            } else {
                answers.extend(
                    inner
                        .renew(lane, std::slice::from_ref(entry), give_up)
                        .await?,
                );
            }
        }
        Ok(answers)
    }
}

/// Renews by owner: all its holds get the same lease.
#[derive(Debug, Default)]
struct AllOfThem {
    taken: PerName<Vec<Who>>,
}

#[async_trait]
impl Twist for AllOfThem {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.taken.add(&req.name, who(req));
        }
        Ok(answer)
    }

    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        for entry in batch {
            for (owner, hold) in self.taken.get(&entry.name).unwrap_or_default() {
                if owner == entry.owner {
                    let beside = Renew::new(entry.name.clone(), owner, hold, entry.lease);
                    inner.renew(lane, &[beside], give_up).await?;
                }
            }
        }
        inner.renew(lane, batch, give_up).await
    }
}

/// Cannot check a hold without prolonging it.
#[derive(Debug)]
struct ProofProlongs;

#[async_trait]
impl Twist for ProofProlongs {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut batch = batch.to_vec();
        for entry in &mut batch {
            entry.lease = entry.lease.or(Some(FAR));
        }
        inner.renew(lane, &batch, give_up).await
    }
}

/// Checks whether the holds exist, and promises the lease asked for.
#[derive(Debug)]
struct AnswersOnly;

#[async_trait]
impl Twist for AnswersOnly {
    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let mut looks = batch.to_vec();
        for entry in &mut looks {
            entry.lease = None;
        }
        let mut answers = inner.renew(lane, &looks, give_up).await?;
        for (entry, answer) in batch.iter().zip(&mut answers) {
            if let (Ok(Renewed::Until { valid_for }), Some(lease)) = (answer, entry.lease) {
                *valid_for = lease;
            }
        }
        Ok(answers)
    }
}
