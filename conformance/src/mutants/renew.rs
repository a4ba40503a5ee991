//! Drivers that renew wrongly.

use super::{
    Batch, Edit, FAR, Inner, Mutation, Renewals,
    memory::{PerName, Who, who},
    table,
};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    Lease,
    driver::{Acquire, Acquired, DriverError, Renew, Renewed, Result},
};
use std::time::Duration;

table! {
    renew_revives breaks(Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin) => Revives;
    // A lock that was held once stays held, unless the store is asked to free it.
    renew_believes_what_it_was_told_before
        breaks(Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin) => Edit {
            renewed: |entry, answer| match answer {
                Ok(Renewed::NotHeld) => Ok(Renewed::Until {
                    valid_for: entry.lease.unwrap_or(Duration::from_millis(1)),
                }),
                answer => answer,
            },
            ..Edit::NONE
        };
    a_batch_ends_at_its_first_failure breaks(Clause::Owner) => StopsEarly;
    renew_prolongs_every_hold_of_the_owner breaks(Clause::Share, Clause::Renew) => AllOfThem::default();
    // Cannot check a hold without prolonging it.
    a_proof_is_a_renewal breaks(Clause::Renew) => Edit {
        renew: |batch| {
            for entry in &mut batch.entries {
                entry.lease = entry.lease.or(Some(FAR));
            }
        },
        ..Edit::NONE
    };
    // The core retries, and learns of the loss only when its lease is over.
    a_hold_that_is_lost_is_an_error
        breaks(Clause::Owner, Clause::Renew, Clause::Loss, Clause::Admin) => Edit {
            renewed: |_, answer| match answer {
                Ok(Renewed::NotHeld) => Err(DriverError::unavailable("no such record")),
                answer => answer,
            },
            ..Edit::NONE
        };
    // Checks whether the holds exist, and promises the lease asked for.
    renew_answers_before_it_is_done breaks(Clause::Renew) => Edit {
        renew: |batch| {
            for entry in &mut batch.entries {
                entry.lease = None;
            }
        },
        renewed: |entry, answer| match (answer, entry.lease) {
            (Ok(Renewed::Until { .. }), Some(lease)) => Ok(Renewed::Until { valid_for: lease }),
            (answer, _) => answer,
        },
        ..Edit::NONE
    };
}

/// Acquires the lock again where the hold is gone.
#[derive(Debug)]
struct Revives;

#[async_trait]
impl Mutation for Revives {
    async fn renew(&self, batch: Batch<'_>) -> Renewals {
        let mut answers = batch.send().await?;
        for (entry, answer) in batch.entries.iter().zip(&mut answers) {
            if matches!(answer, Ok(Renewed::NotHeld)) {
                let lease = Lease::renewed(entry.lease.unwrap_or_default());
                let name = entry.name.clone();
                let take = Acquire::new(name, entry.owner, entry.hold, lease, batch.give_up);
                if let Acquired::Granted(grant) = batch.inner.acquire(&take).await? {
                    *answer = Ok(Renewed::Until {
                        valid_for: grant.valid_for,
                    });
                }
            }
        }
        Ok(answers)
    }
}

/// Entries after the first missing hold are not sent.
#[derive(Debug)]
struct StopsEarly;

#[async_trait]
impl Mutation for StopsEarly {
    async fn renew(&self, batch: Batch<'_>) -> Renewals {
        let mut answers = Vec::new();
        for entry in &batch.entries {
            if matches!(answers.last(), Some(Ok(Renewed::NotHeld))) {
                answers.push(Ok(Renewed::NotHeld));
            } else {
                answers.extend(batch.renew(std::slice::from_ref(entry)).await?);
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
impl Mutation for AllOfThem {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.taken.add(&req.name, who(req));
        }
        Ok(answer)
    }

    async fn renew(&self, batch: Batch<'_>) -> Renewals {
        for entry in &batch.entries {
            for (owner, hold) in self.taken.get(&entry.name).unwrap_or_default() {
                if owner == entry.owner {
                    let beside = Renew::new(entry.name.clone(), owner, hold, entry.lease);
                    batch.renew(&[beside]).await?;
                }
            }
        }
        batch.send().await
    }
}
