//! Renewals: a hold lasts as long as a quorum of the stores says. A store that lost it gets it back.

use crate::{
    calls::{Awaited, Calls},
    connection::Stores,
    error::Failures,
    holds, snapshots,
    votes::reached,
};
use dlock_core::{
    Effect, Instant, Lease, MIN_LEASE,
    driver::{Acquire, Renew, Renewed, Result, kit::again},
};
use futures_util::{StreamExt, stream};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

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
    // A release from now on is later than the renewal, whatever the repair finds.
    let released: Vec<_> = batch
        .iter()
        .map(|renew| stores.holds.watch(renew.hold))
        .collect();
    let mut entries: Vec<_> = batch.iter().map(|_| Entry::default()).collect();
    let all: Arc<[Renew]> = batch.into();
    let calls = Calls::to_all(stores, |driver| {
        let all = Arc::clone(&all);
        let lane = all.first().map(|renew| driver.lane(&renew.name));
        async move { driver.renew(lane.unwrap_or_default(), &all, give_up).await }
    });
    // One entry that stays open must not cost the others their answers.
    let within = give_up.since(stores.clock.now()).mul_f64(PART);
    let failures = calls
        .hear(within, |at, answers| {
            for (entry, answer) in entries.iter_mut().zip(answers) {
                match answer {
                    Ok(Renewed::Until { valid_for }) => entry.until.push(valid_for),
                    Ok(_) => entry.lost.push(at),
                    Err(error) => entry.failures.add(at, error),
                }
            }
            let mut all = entries.iter();
            all.all(|entry| entry.until.len() >= quorum || stores.outweighs(entry.lost.len()))
                .then_some(Awaited::All)
        })
        .await;
    let (mut repairs, mut answers) = (Vec::new(), Vec::with_capacity(batch.len()));
    for ((mut entry, released), renew) in entries.into_iter().zip(released).zip(batch) {
        let lost = entry.lost.len();
        answers.push(match reached(entry.until, quorum) {
            Some(valid_for) => {
                repairs.extend(entry.lost.into_iter().map(|at| Repair {
                    at,
                    renew: renew.clone(),
                    lease: renew.lease.unwrap_or(valid_for).max(MIN_LEASE),
                    released: Arc::clone(&released),
                }));
                Ok(Renewed::Until { valid_for })
            }
            None if stores.outweighs(lost) => Ok(Renewed::NotHeld),
            None => {
                for (at, error) in &failures.0 {
                    entry.failures.add(*at, again(error));
                }
                Err(entry.failures.into_error(&stores.nodes, Effect::Unknown))
            }
        });
    }
    if !repairs.is_empty() {
        let its = Arc::clone(stores);
        stores.in_background(async move {
            let repairing: Vec<_> = repairs.iter().map(|repair| repair.run(&its)).collect();
            let repairing = stream::iter(repairing).buffer_unordered(REPAIRED_AT_ONCE);
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
    released: Arc<AtomicBool>,
}

impl Repair {
    /// Takes the hold at that store again, with the token of its guard, so that a majority has no smaller one.
    async fn run(&self, stores: &Arc<Stores>) {
        let (node, renew) = (&stores.nodes[self.at], &self.renew);
        let shown = snapshots::seen(stores, &renew.name).await;
        let holder = shown
            .ok()
            .and_then(|seen| seen.agreed.holders.into_iter().next());
        let is_ours = |owner| owner == renew.owner.fingerprint();
        let (Some(holder), Ok(driver)) = (holder.filter(|it| is_ours(it.owner)), node.driver())
        else {
            return;
        };
        if self.released.load(Ordering::SeqCst) {
            return;
        }
        let mut req = Acquire::new(
            renew.name.clone(),
            renew.owner,
            renew.hold,
            Lease::fixed(self.lease),
            stores.clock.now() + (self.lease / 3).min(REPAIR_WITHIN),
        );
        // Stores may have smaller tokens than the guard, and of a quorum that answers the smallest is shown.
        let token = renew.token.or(holder.token);
        // Restores: waiters of that store must not keep it from its vote.
        (req.join, req.floor) = (token, token);
        req.info = Arc::new(holder.info);
        let repaired = node
            .answer(holds::acquire(&**driver, &req, &self.released))
            .await;
        tracing::info!(
            target: "dlock::quorum", lock = %renew.name, store = node.label, ?repaired,
            "a store lacked a hold that a majority has"
        );
    }
}

/// The part of the time for a renewal after which it is answered.
const PART: f64 = 0.875;
/// Repairs of one batch at once: a store that restarted empty has lost every hold.
const REPAIRED_AT_ONCE: usize = 16;
/// How long a repair may take; the next renewal finds out again.
const REPAIR_WITHIN: Duration = Duration::from_secs(5);
