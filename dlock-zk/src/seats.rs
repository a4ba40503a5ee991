//! Seat table: the seats of one session, with their phases and deadlines.
//!
//! The servers store the nodes, but neither the ends of holds nor tickets.

use crate::{
    commands::{Record, Use, look},
    line::Line,
};
use dlock_core::{FencingToken, HoldId, HolderInfo, Instant, LockName, Owner, driver::Ticket};
use futures_util::{
    FutureExt,
    future::{AbortHandle, BoxFuture},
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Waker},
    time::Duration,
};
use tokio::sync::Notify;
use zookeeper_client::{Client, Error as Native};

/// One seat of this client, from before its request is sent until it is known to be gone.
#[derive(Clone, Debug)]
pub(crate) struct Mine {
    pub(crate) id: u64,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    pub(crate) note: Arc<HolderInfo>,
    /// The prefix of its node's name, or the whole name.
    pub(crate) stem: String,
    /// `None`: it is not known whether the node exists.
    pub(crate) node: Option<Node>,
    pub(crate) phase: Phase,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) token: Option<FencingToken>,
    /// How long the lock stays reserved for it.
    pub(crate) accept: Duration,
    /// No hold entered through it, as far as known.
    pub(crate) alone: bool,
    /// The node's data says that it waits.
    pub(crate) waits: bool,
    /// The watch on it, and the one on the seat ahead.
    pub(crate) own: Option<Watch>,
    pub(crate) ahead: Option<Watch>,
    /// The listing that was sent when the seat ahead left.
    pub(crate) early: Option<Arc<Early>>,
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
    /// The version of its data; `None`: not known.
    pub(crate) version: Option<i32>,
}

/// A watch on the server, until it fires or is cancelled.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub(crate) file: String,
    pub(crate) handle: AbortHandle,
}

/// An early listing: sent before a task asks for it, so that its answer travels at the same time as the
/// wake-up.
pub(crate) struct Early {
    sent: Instant,
    line: Mutex<Option<BoxFuture<'static, Result<Line, Native>>>>,
}

impl Early {
    /// Sends the listing now.
    pub(crate) fn send(now: Instant, client: &Client, folder: String) -> Arc<Self> {
        let client = client.clone();
        let mut looking = async move { look(&client, &folder).await }.boxed();
        // Its first poll sends the request.
        let mut context = Context::from_waker(Waker::noop());
        let line = looking.as_mut().poll(&mut context).is_pending();
        Arc::new(Self {
            sent: now,
            line: Mutex::new(line.then_some(looking)),
        })
    }

    /// The answer, once, and only while it is recent. No later seat gets a smaller number. So a seat that was
    /// the first stays the first for as long as it exists, which its session and the watch on it show.
    pub(crate) fn take(&self, now: Instant) -> Option<BoxFuture<'static, Result<Line, Native>>> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        line.take().filter(|_| now.since(self.sent) <= SOON)
    }

    /// A listing that is answered already.
    pub(crate) fn known(now: Instant, line: Line) -> Arc<Self> {
        Arc::new(Self {
            sent: now,
            line: Mutex::new(Some(std::future::ready(Ok(line)).boxed())),
        })
    }
}

impl fmt::Debug for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Early")
            .field("sent", &self.sent)
            .finish_non_exhaustive()
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
    fn due(self) -> Instant {
        match self {
            Self::Asked(at) | Self::Held(at) | Self::Kept(at) | Self::Doomed(at) => at,
            Self::Waits(turn) => turn.unwrap_or(Instant::FAR),
        }
    }
}

impl Mine {
    pub(crate) fn record(&self, used: Use) -> Record {
        Record {
            used,
            owner: self.owner,
            hold: self.hold,
            token: if self.is_sequential() {
                None
            } else {
                self.token
            },
            note: HolderInfo::clone(&self.note),
        }
    }

    /// Whether its node is the sequential one of its number.
    pub(crate) fn is_sequential(&self) -> bool {
        self.stem.ends_with('-')
    }

    /// When the hold ends; `None`: the seat is no hold.
    pub(crate) fn held_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Held(end) => Some(end),
            _ => None,
        }
    }

    pub(crate) fn version(&self) -> Option<i32> {
        self.node.as_ref().and_then(|node| node.version)
    }

    /// Whether `ahead` is the only seat ahead of it.
    pub(crate) fn is_behind(&self, ahead: &str, line: &Line) -> bool {
        let node = self.node.as_ref();
        let only = node.and_then(|node| line.only_ahead_of(&node.file));
        only.is_some_and(|seat| seat.file == ahead)
    }

    /// Whether it was notified just now that no seat is ahead. As with [`Early`], that stays true for as long
    /// as the seat exists.
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

#[derive(Debug)]
struct Table {
    seats: HashMap<u64, Mine>,
    names: HashMap<LockName, Vec<u64>>,
    count: u64,
    /// What `next_due` returned last: a seat that is due later need not notify.
    armed: Instant,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            seats: HashMap::new(),
            names: HashMap::new(),
            count: 0,
            armed: Instant::FAR,
        }
    }
}

impl Seats {
    /// Inserts a seat and gives it an id.
    pub(crate) fn insert(&self, mut mine: Mine) -> u64 {
        let mut table = self.table();
        table.count += 1;
        mine.id = table.count;
        let id = mine.id;
        table.names.entry(mine.name.clone()).or_default().push(id);
        let earlier = mine.phase.due() < table.armed;
        table.seats.insert(id, mine);
        drop(table);
        if earlier {
            self.earlier.notify_one();
        }
        id
    }

    pub(crate) fn get(&self, id: u64) -> Option<Mine> {
        self.table().seats.get(&id).cloned()
    }

    /// Changes a seat. `None`: it is gone.
    pub(crate) fn change<T>(&self, id: u64, change: impl FnOnce(&mut Mine) -> T) -> Option<T> {
        let mut table = self.table();
        let armed = table.armed;
        let mine = table.seats.get_mut(&id)?;
        let done = change(mine);
        let earlier = !mine.swept && mine.phase.due() < armed;
        drop(table);
        if earlier {
            self.earlier.notify_one();
        }
        Some(done)
    }

    /// Removes a seat and cancels its watches.
    pub(crate) fn remove(&self, id: u64) -> Option<Mine> {
        let mut table = self.table();
        let mine = table.seats.remove(&id)?;
        if let Some(ids) = table.names.get_mut(&mine.name) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                table.names.remove(&mine.name);
            }
        }
        drop(table);
        for watch in [&mine.own, &mine.ahead].into_iter().flatten() {
            watch.handle.abort();
        }
        Some(mine)
    }

    /// The first seat of that lock name for which the condition holds.
    pub(crate) fn find(&self, name: &LockName, is: impl Fn(&Mine) -> bool) -> Option<Mine> {
        let table = self.table();
        let ids = table.names.get(name)?;
        ids.iter()
            .filter_map(|id| table.seats.get(id))
            .find(|mine| is(mine))
            .cloned()
    }

    /// All seats of that lock name.
    pub(crate) fn of(&self, name: &LockName) -> Vec<Mine> {
        let table = self.table();
        let ids = table.names.get(name).map_or(&[][..], Vec::as_slice);
        ids.iter()
            .filter_map(|id| table.seats.get(id))
            .cloned()
            .collect()
    }

    /// All seats for which the condition holds.
    pub(crate) fn all(&self, is: impl Fn(&Mine) -> bool) -> Vec<Mine> {
        self.table()
            .seats
            .values()
            .filter(|mine| is(mine))
            .cloned()
            .collect()
    }

    /// When the next seat is due.
    pub(crate) fn next_due(&self) -> Instant {
        let mut table = self.table();
        let idle = table.seats.values().filter(|mine| !mine.swept);
        table.armed = idle
            .map(|mine| mine.phase.due())
            .min()
            .unwrap_or(Instant::FAR);
        table.armed
    }

    /// The seats that are due, marked as being cleaned up.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<u64> {
        let mut table = self.table();
        let mut due = Vec::new();
        for (id, mine) in &mut table.seats {
            if !mine.swept && mine.phase.due() <= now {
                mine.swept = true;
                due.push(*id);
            }
        }
        due
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table().seats.is_empty()
    }

    /// Removes all seats, because the session is over.
    pub(crate) fn clear(&self) {
        let mut table = self.table();
        let seats = std::mem::take(&mut *table);
        drop(table);
        for mine in seats.seats.values() {
            for watch in [&mine.own, &mine.ahead].into_iter().flatten() {
                watch.handle.abort();
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How old an early listing may be. A wake-up takes far less, and a turn taken later lists anew.
const SOON: Duration = Duration::from_millis(100);
