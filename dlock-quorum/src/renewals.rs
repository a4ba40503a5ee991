//! Renewals: a hold lasts as long as a quorum of the stores says. A store that lost it gets it back.

use crate::{
    calls::{Calls, LINGER},
    connection::Stores,
    error::Failures,
    holds::Watched,
    snapshots,
    votes::reached,
};
use dlock_core::{
    Effect, Instant, Lease, MIN_LEASE,
    driver::{Acquire, Acquired, Release, Renew, Renewed, Result, kit::again},
};
use futures_util::{StreamExt, stream};
use std::{sync::Arc, time::Duration};

/// What the stores say of one entry.
#[derive(Default)]
struct Entry {
    until: Vec<Duration>,
    lost: Vec<usize>,
    failures: Failures,
}

pub(crate) async fn renew(
    stores: &Arc<Stores>,
    batch: &[Renew],
    give_up: Instant,
) -> Vec<Result<Renewed>> {
    let quorum = stores.quorum();
    let watched: Vec<_> = batch
        .iter()
        .map(|entry| stores.holds.watch(entry.hold))
        .collect();
    let mut entries: Vec<_> = batch.iter().map(|_| Entry::default()).collect();
    let (all, asked) = (Arc::new(batch.to_vec()), Arc::clone(stores));
    let mut calls = Calls::new(stores);
    for at in 0..stores.nodes.len() {
        let (all, stores) = (Arc::clone(&all), Arc::clone(&asked));
        calls.ask(at, |_| async move {
            stores.nodes[at].renew(&all, give_up).await
        });
    }
    loop {
        let decided = entries
            .iter()
            .all(|entry| entry.until.len() >= quorum || stores.outweighs(entry.lost.len()));
        // Only a store that works is worth waiting for.
        let waits = calls.open.iter().any(|at| !stores.nodes[*at].is_down());
        let answer = match decided {
            false => calls.next_by(give_up).await,
            true if waits => calls.next_within(LINGER).await,
            true => None,
        };
        let Some((at, answer)) = answer else {
            break;
        };
        match answer {
            Ok(answers) => {
                for (entry, answer) in entries.iter_mut().zip(answers) {
                    match answer {
                        Ok(Renewed::Until { valid_for }) => entry.until.push(valid_for),
                        Ok(_) => entry.lost.push(at),
                        Err(error) => entry.failures.add(at, error),
                    }
                }
            }
            Err(error) => {
                for entry in &mut entries {
                    entry.failures.add(at, again(&error));
                }
            }
        }
    }
    calls.run_on();
    let mut repairs = Vec::new();
    let mut answers = Vec::with_capacity(batch.len());
    for ((entry, watched), renew) in entries.into_iter().zip(watched).zip(batch) {
        answers.push(match reached(entry.until, quorum) {
            Some(valid_for) => {
                let lease = renew.lease.unwrap_or(valid_for).max(MIN_LEASE);
                let watched = Arc::new(watched);
                repairs.extend(entry.lost.into_iter().map(|at| Repair {
                    at,
                    renew: renew.clone(),
                    lease,
                    watched: Arc::clone(&watched),
                }));
                Ok(Renewed::Until { valid_for })
            }
            None if stores.outweighs(entry.lost.len()) => Ok(Renewed::NotHeld),
            None => Err(entry
                .failures
                .into_error(&stores.nodes, Effect::Unknown, quorum)),
        });
    }
    if !repairs.is_empty() {
        let stores = Arc::clone(stores);
        tokio::spawn(async move {
            let repairing = repairs.iter().map(|repair| repair.run(&stores));
            let repairing =
                stream::iter(repairing.collect::<Vec<_>>()).buffer_unordered(REPAIRED_AT_ONCE);
            repairing.collect::<()>().await;
        });
    }
    answers
}

/// A hold that one store lost, while a quorum has it.
struct Repair {
    at: usize,
    renew: Renew,
    lease: Duration,
    watched: Arc<Watched>,
}

impl Repair {
    /// Takes the hold at that store again, with the token that it has at the others.
    async fn run(&self, stores: &Arc<Stores>) {
        let (
            node,
            Renew {
                name, owner, hold, ..
            },
        ) = (&stores.nodes[self.at], &self.renew);
        let seen = snapshots::seen(stores, name).await.ok();
        let holder = seen.and_then(|(seen, _)| seen.holders.into_iter().next());
        let Some(holder) = holder.filter(|it| it.owner == owner.fingerprint()) else {
            return;
        };
        let give_up = stores.clock.now() + (self.lease / 3).min(REPAIR_WITHIN);
        let mut req = Acquire::new(
            name.clone(),
            *owner,
            *hold,
            Lease::fixed(self.lease),
            give_up,
        );
        req.floor = holder.token;
        req.info = Arc::new(holder.info);
        if self.watched.is_released() {
            return;
        }
        let repaired = node.ask(async |driver| driver.acquire(&req).await).await;
        tracing::debug!(target: "dlock::quorum", lock = %name, store = node.label, ?repaired, "a store had lost the hold");
        if matches!(repaired, Ok(Acquired::Granted(_))) && self.watched.is_released() {
            let release = Release::new(name.clone(), *owner, *hold);
            drop(
                node.ask(async |driver| driver.release(&release).await)
                    .await,
            );
        }
    }
}

/// Repairs of one batch at once: a store that restarted empty has lost every hold.
const REPAIRED_AT_ONCE: usize = 16;
/// How long a repair may take; the next renewal finds out again.
const REPAIR_WITHIN: Duration = Duration::from_secs(5);
