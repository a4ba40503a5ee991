//! Snapshots: what a quorum of the stores shows of a lock.

use crate::{
    calls::{Awaited, Calls},
    connection::{ABANDON_AFTER, Stores},
    votes::{most, reached},
};
use dlock_core::{Effect, LockName, Snapshot, driver::Result};
use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

/// What the stores show of a name.
pub(crate) struct Seen {
    pub(crate) agreed: Snapshot,
    each: BTreeMap<usize, Snapshot>,
}

impl Seen {
    /// Whether that store has something to show.
    pub(crate) fn is_taken_at(&self, at: usize) -> bool {
        self.each.get(&at).is_some_and(|seen| !seen.is_free())
    }
}

pub(crate) async fn seen(stores: &Arc<Stores>, name: &LockName) -> Result<Seen> {
    let (quorum, mut each) = (stores.quorum(), BTreeMap::new());
    let calls = Calls::to_all(stores, |driver| {
        let name = name.clone();
        async move { driver.inspect(&name).await }
    });
    let failures = calls
        .hear(ABANDON_AFTER, |at, snapshot| {
            each.insert(at, snapshot);
            (each.len() >= quorum).then_some(Awaited::All)
        })
        .await;
    if each.len() < quorum {
        return Err(failures.into_error(&stores.nodes, Effect::None));
    }
    let agreed = agree(name, &each, quorum);
    Ok(Seen { agreed, each })
}

/// The state that a quorum of the stores shows.
fn agree(name: &LockName, each: &BTreeMap<usize, Snapshot>, quorum: usize) -> Snapshot {
    let mut agreed = Snapshot::free(name.clone());
    agreed.waiters = each.values().filter_map(|seen| seen.waiters).max();
    let damages = each.values().filter_map(|seen| seen.damaged.clone());
    agreed.damaged = reached(damages, quorum);
    let owners = each.values().filter_map(|seen| seen.holders.first());
    let owners: Vec<_> = owners.map(|holder| holder.owner).collect();
    if agreed.damaged.is_some() {
        return agreed;
    }
    let owner = most(&owners).map(|(owner, _)| owner);
    let mut held: Vec<_> = each
        .values()
        .filter_map(|seen| Some((seen.holders.first()?, seen)))
        .filter(|(holder, _)| Some(holder.owner) == owner)
        .collect();
    held.sort_by_key(|(holder, _)| Reverse(holder.rest));
    let Some((holder, _)) = held.get(quorum - 1) else {
        // The store that is asked first reserves turns.
        let rests = each.values().map(|seen| seen.unavailable_for);
        let first = each.values().next().and_then(|seen| seen.unavailable_for);
        agreed.unavailable_for = reached(rests.flatten(), quorum).or(first);
        return agreed;
    };
    let mut holder = (*holder).clone();
    let tokens: Vec<_> = held.iter().filter_map(|(holder, _)| holder.token).collect();
    // That of the incarnation: a store that lost it may have a greater one.
    holder.token = reached(tokens, quorum);
    agreed.holders.push(holder);
    // A store outside of the quorum may not have a hold yet that all of it granted.
    let holds = held.iter().map(|(_, seen)| seen.holds);
    agreed.holds = holds.max().unwrap_or_default();
    agreed.age = held.iter().filter_map(|(_, seen)| seen.age).max();
    agreed
}

#[cfg(test)]
mod tests {
    use super::agree;
    use dlock_core::{Holder, LockName, Owner, Snapshot};
    use std::{collections::BTreeMap, time::Duration};

    #[test]
    fn a_store_that_lags_hides_no_hold() {
        let name: LockName = "x".parse().unwrap();
        let shows = |holds, rest| {
            let mut holder = Holder::new(Owner::from_seed("us").fingerprint());
            holder.rest = Some(Duration::from_secs(rest));
            let mut seen = Snapshot::free(name.clone());
            (seen.holders, seen.holds) = (vec![holder], holds);
            seen
        };
        // The greatest rest that a quorum shows is the lagging store's.
        let each = BTreeMap::from([(0, shows(2, 30)), (1, shows(1, 29))]);
        let agreed = agree(&name, &each, 2);
        assert_eq!(agreed.holds, 2);
        assert_eq!(agreed.holders[0].rest, Some(Duration::from_secs(29)));
    }
}
