//! What a session knows of its own seats: the servers keep nodes, and neither ends of holds nor tickets.

use crate::{
    commands::{Record, Use, look},
    line::Line,
};
use dlock_core::{FencingToken, HoldId, Instant, LockName, Note, Owner, Ticket};
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

/// One seat of ours, from before its request is sent until it is known to be gone.
#[derive(Clone, Debug)]
pub(crate) struct Mine {
    pub(crate) id: u64,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    pub(crate) note: Arc<Note>,
    /// What its node's name begins with, or is.
    pub(crate) stem: String,
    /// `None`: not known whether it is there.
    pub(crate) node: Option<Node>,
    pub(crate) phase: Phase,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) token: Option<FencingToken>,
    /// How long its turn is kept for it.
    pub(crate) accept: Duration,
    /// Nobody came in through it, as far as we know.
    pub(crate) alone: bool,
    /// The node's data says that it waits.
    pub(crate) waits: bool,
    /// The watch on it, and the one on the seat ahead.
    pub(crate) own: Option<Watch>,
    pub(crate) ahead: Option<Watch>,
    /// Sent when the one ahead left.
    pub(crate) early: Option<Arc<Early>>,
    /// When it was told that nobody is ahead any more.
    pub(crate) first: Option<Instant>,
    /// Somebody is tidying it up.
    pub(crate) swept: bool,
}

/// A node that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) file: String,
    pub(crate) number: i64,
    /// Of its data; `None`: not known.
    pub(crate) version: Option<i32>,
}

/// A watch that stands on the server until it fires or is taken back.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub(crate) file: String,
    pub(crate) handle: AbortHandle,
}

/// A look that was sent before anybody asked for it: its answer travels while the wake-up does.
pub(crate) struct Early {
    sent: Instant,
    line: Mutex<Option<BoxFuture<'static, Result<Line, Native>>>>,
}

impl Early {
    /// Sends it now.
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

    /// The answer, once, and only soon: what it shows is past. Nobody comes in before a seat later, so that it is the first stays true for as
    /// long as the seat is there, which its session and the watch on it say.
    pub(crate) fn take(&self, now: Instant) -> Option<BoxFuture<'static, Result<Line, Native>>> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        line.take().filter(|_| now.since(self.sent) <= SOON)
    }

    /// One that is answered already.
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

/// What a seat of ours is for, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Asked for, and not known whether granted. Nobody wants it after that instant.
    Asked(Instant),
    /// In line; after that instant its turn was not taken.
    Waits(Option<Instant>),
    /// Inside until then.
    Held(Instant),
    /// Keeps the name shut until then.
    Kept(Instant),
    /// To be removed, and the removal to be repeated then.
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
            note: Note::clone(&self.note),
        }
    }

    /// Whether its node is the sequential one of its number.
    pub(crate) fn is_sequential(&self) -> bool {
        self.stem.ends_with('-')
    }

    /// When the hold is over; `None`: it is none.
    pub(crate) fn held_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Held(end) => Some(end),
            _ => None,
        }
    }

    pub(crate) fn version(&self) -> Option<i32> {
        self.node.as_ref().and_then(|node| node.version)
    }

    /// Whether there is nobody but that seat ahead of it.
    pub(crate) fn is_behind(&self, ahead: &str, line: &Line) -> bool {
        let node = self.node.as_ref();
        let only = node.and_then(|node| line.only_ahead_of(&node.file));
        only.is_some_and(|seat| seat.file == ahead)
    }

    /// Whether it was told just now that nobody is ahead; as with [`Early`], that stays true for as long as the seat is there.
    pub(crate) fn is_first(&self, now: Instant) -> bool {
        self.own.is_some() && self.first.is_some_and(|told| now.since(told) <= SOON)
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Seats {
    table: Mutex<Table>,
    /// Something is due earlier than was said.
    pub(crate) earlier: Notify,
}

#[derive(Debug)]
struct Table {
    seats: HashMap<u64, Mine>,
    names: HashMap<LockName, Vec<u64>>,
    count: u64,
    /// What `next_due` said last: whoever is due later need not say so.
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
    /// Takes one in, with an id of its own.
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

    /// Changes one; says whether it is there.
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

    /// Forgets one, whose watches are taken back.
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

    /// The first of that name for which the condition holds.
    pub(crate) fn find(&self, name: &LockName, is: impl Fn(&Mine) -> bool) -> Option<Mine> {
        let table = self.table();
        let ids = table.names.get(name)?;
        ids.iter()
            .filter_map(|id| table.seats.get(id))
            .find(|mine| is(mine))
            .cloned()
    }

    /// All of that name.
    pub(crate) fn of(&self, name: &LockName) -> Vec<Mine> {
        let table = self.table();
        let ids = table.names.get(name).map_or(&[][..], Vec::as_slice);
        ids.iter()
            .filter_map(|id| table.seats.get(id))
            .cloned()
            .collect()
    }

    /// Those for which the condition holds.
    pub(crate) fn all(&self, is: impl Fn(&Mine) -> bool) -> Vec<Mine> {
        self.table()
            .seats
            .values()
            .filter(|mine| is(mine))
            .cloned()
            .collect()
    }

    /// When the next one is due.
    pub(crate) fn next_due(&self) -> Instant {
        let mut table = self.table();
        let idle = table.seats.values().filter(|mine| !mine.swept);
        table.armed = idle
            .map(|mine| mine.phase.due())
            .min()
            .unwrap_or(Instant::FAR);
        table.armed
    }

    /// Those that are due, marked as being swept.
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

    /// The session is over: there are none.
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

/// How old a look may be that was sent when the one ahead left: a wake-up takes far less, and a turn that is taken later looks anew.
const SOON: Duration = Duration::from_millis(100);
