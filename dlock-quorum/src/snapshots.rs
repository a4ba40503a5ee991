//! Snapshots: what a quorum of the stores shows of a lock.

use crate::{
    calls::{Calls, LINGER},
    connection::Stores,
    error::Failures,
    votes::reached,
};
use dlock_core::{Effect, Holder, LockName, Snapshot, driver::Result};
use std::{collections::BTreeMap, sync::Arc};

/// What a quorum shows of a name, and whether each store shows it held or unavailable.
pub(crate) async fn seen(stores: &Arc<Stores>, name: &LockName) -> Result<(Snapshot, Vec<bool>)> {
    let quorum = stores.quorum();
    let (mut failures, mut shown) = (Failures::default(), BTreeMap::new());
    let mut calls = Calls::to_all(stores, |driver| {
        let name = name.clone();
        async move { driver.inspect(&name).await }
    });
    while let Some((at, answer)) = match shown.len() < quorum {
        true => calls.next().await,
        false => calls.next_within(LINGER).await,
    } {
        match answer {
            Ok(snapshot) => drop(shown.insert(at, snapshot)),
            Err(error) => failures.add(at, error),
        }
    }
    calls.run_on();
    if shown.len() < quorum {
        return Err(failures.into_error(&stores.nodes, Effect::None, quorum));
    }
    let shows = |at: usize| {
        shown
            .get(&at)
            .is_some_and(|seen| !seen.holders.is_empty() || seen.unavailable_for.is_some())
    };
    let marks = (0..stores.nodes.len()).map(shows).collect();
    let shown: Vec<_> = shown.into_values().collect();
    Ok((agreed(name, &shown, quorum), marks))
}

/// The state that a quorum of the snapshots, in the order of the stores, shows.
fn agreed(name: &LockName, shown: &[Snapshot], quorum: usize) -> Snapshot {
    let mut all = Snapshot::free(name.clone());
    all.waiters = shown.iter().filter_map(|seen| seen.waiters).max();
    let damaged: Vec<_> = shown
        .iter()
        .filter_map(|seen| seen.damaged.as_ref())
        .collect();
    if damaged.len() >= quorum {
        all.damaged = damaged.first().map(|why| (*why).clone());
        return all;
    }
    let holders = || {
        shown
            .iter()
            .filter_map(|seen| Some((seen, seen.holders.first()?)))
    };
    let of = |owner| holders().filter(move |(_, holder)| holder.owner == owner);
    let owner = holders()
        .map(|(_, holder)| holder.owner)
        .find(|owner| of(*owner).count() >= quorum);
    let Some(owner) = owner else {
        // The store that is asked first reserves turns.
        let first = shown.first().and_then(|seen| seen.unavailable_for);
        all.unavailable_for =
            reached(shown.iter().filter_map(|seen| seen.unavailable_for), quorum).or(first);
        return all;
    };
    let mut holder = Holder::new(owner);
    let tokens: Vec<_> = of(owner).filter_map(|(_, holder)| holder.token).collect();
    let count = |wanted| tokens.iter().filter(|token| **token == wanted).count();
    holder.token = tokens
        .iter()
        .copied()
        .max_by_key(|token| (count(*token), *token));
    holder.rest = reached(of(owner).filter_map(|(_, holder)| holder.rest), quorum);
    let first = of(owner).max_by_key(|(seen, _)| seen.age);
    holder.info = first
        .map(|(_, holder)| holder.info.clone())
        .unwrap_or_default();
    all.age = first.and_then(|(seen, _)| seen.age);
    all.holds = reached(of(owner).map(|(seen, _)| seen.holds), quorum).unwrap_or(0);
    all.holders.push(holder);
    all
}
