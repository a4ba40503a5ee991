//! Table: this client's holds, waiters and spare leases, with their deadlines.
//!
//! The server ends a lease only after whole seconds; what this client asked for ends by its own request, in time. The server's end counts when
//! the client is gone.

use dlock_core::{FencingToken, HoldId, Instant, LockName, Owner, driver::Ticket};
use std::{collections::HashMap, time::Duration};

/// A lease of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) id: i64,
    /// How long a keep-alive makes it last.
    pub(crate) length: Duration,
    /// The server has not ended it before that, unless it was revoked. It counts from before a request that was answered.
    pub(crate) until: Instant,
}

/// A hold of this client, from before its request is sent.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) owner: Owner,
    pub(crate) lease: Lease,
    /// Other leases on which its key may hang, because a move was not confirmed.
    pub(crate) others: Vec<Lease>,
    /// `None`: the outcome is not known.
    pub(crate) held: Option<Held>,
    /// A request that needs the lease was not answered: it may be executed later, for as long as the lease lasts.
    pub(crate) open: bool,
    /// When the sender gave up.
    pub(crate) give_up: Instant,
}

/// A hold that was granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// The revision at which its key was created.
    pub(crate) created: i64,
    pub(crate) token: FencingToken,
    /// What was promised: the server does not end it before.
    pub(crate) promised: Instant,
    /// When this client ends it.
    pub(crate) end: Instant,
}

impl Hold {
    /// It is over; or its outcome is not known, and its sender gave up by then.
    pub(crate) fn is_undone(&self, now: Instant, by: Instant) -> bool {
        match self.held {
            Some(held) => held.end <= now,
            None => self.give_up <= by,
        }
    }

    /// Its key hangs on that lease now.
    pub(crate) fn hangs_on(&mut self, lease: i64) {
        let mut others = self.others.iter_mut();
        if let Some(other) = others.find(|other| other.id == lease) {
            std::mem::swap(other, &mut self.lease);
        }
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = i64> {
        self.others
            .iter()
            .chain([&self.lease])
            .map(|lease| lease.id)
    }
}

/// A waiting client's position in a queue.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) key: String,
    pub(crate) lease: Lease,
    /// When its next keep-alive is due.
    pub(crate) refresh: Instant,
    /// The revision at which its key was created; `None`: it is not known whether there is one.
    pub(crate) created: Option<i64>,
    /// How long its turn may stay unused.
    pub(crate) turn_length: Duration,
    /// When its turn is over; far away: it is, if nothing is in the way.
    pub(crate) turn: Option<Instant>,
    pub(crate) watch: Option<Watch>,
}

/// What a waiter watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Watch {
    pub(crate) id: i64,
    /// The waiter before it; `None`: it is the first, and watches the holds.
    pub(crate) ahead: Option<Vec<u8>>,
    /// The first revision that it has not seen.
    pub(crate) from: i64,
}

pub(crate) type HoldKey = (LockName, HoldId);
pub(crate) type WaiterKey = (LockName, Ticket);

/// What this client has in the store.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) holds: HashMap<HoldKey, Hold>,
    pub(crate) waiters: HashMap<WaiterKey, Waiter>,
    /// The waiter of each watch.
    pub(crate) watches: HashMap<i64, WaiterKey>,
    /// Leases without a key.
    pub(crate) spares: Vec<Lease>,
    /// Leases of minimum holds, and when they end.
    pub(crate) min_holds: Vec<(Instant, i64)>,
}

/// What is due.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// Leases to end.
    pub(crate) ended: Vec<i64>,
    /// Waiters whose turn was not used.
    pub(crate) unused: Vec<WaiterKey>,
    /// Waiters to keep alive, and their leases.
    pub(crate) waiting: Vec<(WaiterKey, Lease)>,
}

impl Table {
    /// When the next deadline is.
    pub(crate) fn next(&self) -> Instant {
        let holds = self.holds.values();
        let ends = holds.filter_map(|hold| hold.held.map(|held| held.end));
        let min_holds = self.min_holds.iter().map(|(end, _)| *end);
        let waiters = self
            .waiters
            .values()
            .filter(|waiter| waiter.created.is_some());
        let waits = waiters.map(|waiter| {
            let turn = waiter.turn.unwrap_or(Instant::FAR);
            turn.min(waiter.refresh)
        });
        ends.chain(min_holds)
            .chain(waits)
            .min()
            .unwrap_or(Instant::FAR)
    }

    /// Takes out what is over, and marks what is to be kept alive.
    pub(crate) fn due(&mut self, now: Instant) -> Due {
        let mut due = Due::default();
        self.holds.retain(|_, hold| {
            let over = hold.held.is_some_and(|held| held.end <= now);
            if over {
                due.ended.extend(hold.leases());
            }
            !over
        });
        self.min_holds.retain(|(end, lease)| {
            if *end <= now {
                due.ended.push(*lease);
            }
            *end > now
        });
        let waiters = self.waiters.iter_mut();
        for (key, waiter) in waiters.filter(|(_, waiter)| waiter.created.is_some()) {
            if waiter.turn.is_some_and(|turn| turn <= now) {
                due.unused.push(key.clone());
                waiter.turn = Some(Instant::FAR);
            } else if waiter.refresh <= now {
                due.waiting.push((key.clone(), waiter.lease));
                waiter.refresh = now + waiter.lease.length / 3;
            }
        }
        due
    }

    /// Takes out a hold that [is to be undone](Hold::is_undone).
    pub(crate) fn take_undone(&mut self, key: &HoldKey, now: Instant, by: Instant) -> Option<Hold> {
        let is_undone = |hold: &Hold| hold.is_undone(now, by);
        let is_undone = self.holds.get(key).is_some_and(is_undone);
        is_undone.then(|| self.holds.remove(key)).flatten()
    }

    /// Begins the turn of a waiter, anew with each end of a hold: the one before may have left others in the way.
    pub(crate) fn begin_turn(&mut self, key: &WaiterKey, now: Instant) {
        if let Some(waiter) = self.waiters.get_mut(key) {
            waiter.turn = Some(now + waiter.turn_length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Lease, Table, Waiter};
    use dlock_core::{Instant, driver::Ticket};
    use std::{num::NonZeroU64, time::Duration};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_turn_begins_anew_with_each_end_of_a_hold() {
        let (mut table, begin) = (Table::default(), Instant::ORIGIN);
        let key = ("x".parse().unwrap(), Ticket(NonZeroU64::MIN));
        let waiter = Waiter {
            key: "w/1".into(),
            lease: Lease {
                id: 1,
                length: SECOND * 60,
                until: begin + SECOND * 60,
            },
            refresh: begin + SECOND * 20,
            created: Some(1),
            turn_length: SECOND,
            turn: None,
            watch: None,
        };
        table.waiters.insert(key.clone(), waiter);
        let half = SECOND / 2;
        // The hold ends, and then its minimum hold.
        table.begin_turn(&key, begin);
        table.begin_turn(&key, begin + half);
        assert_eq!(table.next(), begin + half + SECOND);
        assert!(table.due(begin + SECOND).unused.is_empty());
        assert_eq!(table.due(begin + half + SECOND).unused, [key]);
    }
}
