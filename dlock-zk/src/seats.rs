//! Seat table: the seats of one session, with their phases and deadlines.
//!
//! The servers store the nodes, but neither the ends of holds nor tickets.

use crate::commands::{Record, Use};
use dlock_core::{
    FencingToken, HoldId, HolderInfo, Instant, LockName, Owner,
    driver::{Acquire, Ticket},
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::{sync::Notify, task::AbortHandle};

/// One seat of this client, from before its request is sent until it is known to be gone.
#[derive(Clone, Debug)]
pub(crate) struct Mine {
    pub(crate) id: u64,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    pub(crate) info: Arc<HolderInfo>,
    /// The prefix of its node's name, or the whole name.
    pub(crate) stem: String,
    /// `None`: it is not known whether the node exists.
    pub(crate) node: Option<Node>,
    pub(crate) phase: Phase,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) token: Option<FencingToken>,
    /// The node's data says that it waits.
    pub(crate) waits: bool,
    /// The write that says it is held was not answered.
    pub(crate) unsaid: bool,
    /// Its hold ended with its lease.
    pub(crate) lapsed: bool,
    /// The watch on it, and the one on the seat ahead.
    pub(crate) own: Option<Arc<Watch>>,
    pub(crate) ahead: Option<Arc<Watch>>,
    /// The watch on the folder, of a sharer for which there is no room.
    pub(crate) room: Option<Arc<Watch>>,
    /// When it was notified that no seat is ahead any more.
    pub(crate) first: Option<Instant>,
    /// A cleanup of it is in progress.
    pub(crate) swept: bool,
}

/// A node that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) file: String,
    pub(crate) number: i64,
    /// How often this client wrote to it. `None`: not known. When the server counts more writes, another hold
    /// entered through the seat.
    pub(crate) version: Option<i32>,
}

/// A watch on the server, until it fires or is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) file: String,
    pub(crate) task: AbortHandle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The phase of a seat, and its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Requested, with an unknown outcome. No task wants it after that instant.
    Asked(Instant),
    /// In the queue. After that instant its turn was not taken.
    Waits(Option<Instant>),
    /// Holds the lock until then.
    Held(Instant),
    /// A minimum hold: keeps the lock unavailable until then.
    Kept(Instant),
    /// To be removed; the next attempt is then.
    Doomed(Instant),
}

impl Phase {
    pub(crate) fn due(self) -> Instant {
        match self {
            Self::Asked(at) | Self::Held(at) | Self::Kept(at) | Self::Doomed(at) => at,
            Self::Waits(turn) => turn.unwrap_or(Instant::FAR),
        }
    }

    /// Waits, or may have been left behind by a request: no hold, and not yet to be removed.
    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Self::Waits(_) | Self::Asked(_))
    }

    /// No task of the client counts on it any more.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Doomed(_) | Self::Kept(_))
    }
}

impl Mine {
    /// The seat as recorded before the request is sent.
    pub(crate) fn asked(req: &Acquire, stem: String) -> Self {
        Self {
            id: 0,
            name: req.name.clone(),
            owner: req.owner,
            hold: req.hold,
            info: Arc::clone(&req.info),
            stem,
            node: None,
            phase: Phase::Asked(req.give_up),
            ticket: None,
            token: None,
            waits: false,
            unsaid: false,
            lapsed: false,
            own: None,
            ahead: None,
            room: None,
            first: None,
            swept: false,
        }
    }

    pub(crate) fn record(&self, used: Use) -> Record {
        Record {
            used,
            owner: self.owner,
            hold: self.hold,
            token: self.token.filter(|_| !self.is_sequential()),
            info: HolderInfo::clone(&self.info),
        }
    }

    /// Whether its node is the sequential one of its number.
    pub(crate) fn is_sequential(&self) -> bool {
        self.stem.ends_with('-')
    }

    pub(crate) fn is_hold(&self, hold: HoldId, owner: Owner) -> bool {
        self.hold == hold && self.owner == owner
    }

    /// Whether its node is that one.
    pub(crate) fn is_at(&self, file: &str) -> bool {
        self.node.as_ref().is_some_and(|node| node.file == file)
    }

    /// When the hold ends; `None`: the seat is no hold.
    pub(crate) fn held_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Held(end) => Some(end),
            _ => None,
        }
    }

    /// Records the outcome of a write to its node.
    pub(crate) fn wrote(&mut self, confirmed: bool) {
        if let Some(node) = &mut self.node {
            node.version = node.version.filter(|_| confirmed).map(|count| count + 1);
        }
    }

    /// Whether it was notified just now that no seat is ahead. No later seat gets a smaller number. So that
    /// stays true for as long as the seat exists, which its session and the watch on it show.
    pub(crate) fn is_first(&self, now: Instant) -> bool {
        self.own.is_some() && self.first.is_some_and(|told| now.since(told) <= SOON)
    }
}

/// All seats of a session.
#[derive(Debug, Default)]
pub(crate) struct Seats {
    table: Mutex<Table>,
    /// A seat became due earlier than `next_due` returned.
    pub(crate) earlier: Notify,
}

#[derive(Debug, Default)]
struct Table {
    seats: HashMap<u64, Mine>,
    names: HashMap<LockName, Vec<u64>>,
    count: u64,
    /// What `next_due` returned last: a seat that is due later need not notify.
    armed: Option<Instant>,
}

impl Seats {
    /// Inserts a seat and gives it an id.
    pub(crate) fn insert(&self, mut mine: Mine) -> u64 {
        let mut table = self.table.lock();
        table.count += 1;
        mine.id = table.count;
        let (id, due) = (mine.id, mine.phase.due());
        table.names.entry(mine.name.clone()).or_default().push(id);
        table.seats.insert(id, mine);
        self.arm(&table, due);
        id
    }

    pub(crate) fn get(&self, id: u64) -> Option<Mine> {
        self.table.lock().seats.get(&id).cloned()
    }

    /// Changes a seat. `None`: it is gone.
    pub(crate) fn change<T>(&self, id: u64, change: impl FnOnce(&mut Mine) -> T) -> Option<T> {
        let mut table = self.table.lock();
        let mine = table.seats.get_mut(&id)?;
        let done = change(mine);
        if !mine.swept {
            let due = mine.phase.due();
            self.arm(&table, due);
        }
        Some(done)
    }

    /// Moves a seat to another phase, if it is not gone.
    pub(crate) fn set(&self, id: u64, phase: Phase) {
        self.change(id, |mine| mine.phase = phase);
    }

    fn arm(&self, table: &Table, due: Instant) {
        if table.armed.is_none_or(|armed| due < armed) {
            self.earlier.notify_one();
        }
    }

    /// Removes a seat and cancels its watches.
    pub(crate) fn remove(&self, id: u64) {
        let mut table = self.table.lock();
        let Some(mine) = table.seats.remove(&id) else {
            return;
        };
        if let Some(ids) = table.names.get_mut(&mine.name) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                table.names.remove(&mine.name);
            }
        }
    }

    /// The first seat of that lock name for which the condition holds.
    pub(crate) fn find(&self, name: &LockName, is: impl Fn(&Mine) -> bool) -> Option<Mine> {
        let table = self.table.lock();
        let mut seats = table.names.get(name)?.iter().map(|id| &table.seats[id]);
        seats.find(|mine| is(mine)).cloned()
    }

    /// The seat of that node, if it is this client's.
    pub(crate) fn at(&self, name: &LockName, file: &str) -> Option<Mine> {
        self.find(name, |mine| mine.is_at(file))
    }

    /// All seats for which the condition holds.
    pub(crate) fn all(&self, is: impl Fn(&Mine) -> bool) -> Vec<Mine> {
        let table = self.table.lock();
        let seats = table.seats.values().filter(|mine| is(mine));
        seats.cloned().collect()
    }

    /// When the next seat is due.
    pub(crate) fn next_due(&self) -> Instant {
        let mut table = self.table.lock();
        let idle = table.seats.values().filter(|mine| !mine.swept);
        let due = idle.map(|mine| mine.phase.due()).min();
        *table.armed.insert(due.unwrap_or(Instant::FAR))
    }

    /// The seats that are due, marked as being cleaned up.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<u64> {
        let mut table = self.table.lock();
        let is_due = |mine: &&mut Mine| !mine.swept && mine.phase.due() <= now;
        let due = table.seats.values_mut().filter(is_due);
        due.map(|mine| {
            mine.swept = true;
            mine.id
        })
        .collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.lock().seats.is_empty()
    }

    /// Removes all seats, because the session is over.
    pub(crate) fn clear(&self) {
        let mut table = self.table.lock();
        table.seats.clear();
        table.names.clear();
    }
}

/// How old a notification may be. A wake-up takes far less, and a turn taken later lists anew.
const SOON: Duration = Duration::from_millis(100);
