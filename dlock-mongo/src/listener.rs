//! Wake-ups: one change stream per client, filtered to the names that have waiters.
//!
//! The stream begins with the first waiter and ends when there has been none for a while. If the filter lacks
//! a name, the client reads that document once the stream with the name is open, so that no release falls
//! between the refusal and the stream. It reads and does not acquire: the server would execute a pending
//! acquire even after the client was killed, and the lock would be held for a lease. A filter cannot be
//! changed, so a new name needs a new stream. Where that would happen every second, the stream takes all
//! names, and the client drops the events of names without waiters.
//!
//! All waiters are notified of a release, and one of them gets the lock. [`Races`] spreads the attempts of clients that
//! keep losing.
//!
//! The native client resumes a stream without loss and without notice if its connection or its primary was
//! lost. All waiters poll all the same when a member was lost. If the stream cannot be resumed, a new one
//! begins, and all waiters poll.

use crate::{
    commands,
    connection::Connection,
    document::found,
    error,
    races::Races,
    stream::{listen, open},
};
use async_trait::async_trait;
use dlock_core::{
    LockName,
    driver::{
        Result, Ticket, WakeUp,
        kit::{Backoff, Class, Waiters, WakeUps},
    },
};
use futures_core::stream::BoxStream;
use mongodb::{bson::Document, error::Error as NativeError};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// The waiters of a client, and the tasks that listen for them.
pub(crate) struct Listener {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) connection: Connection,
    wake_ups: WakeUps,
    waiting: Mutex<Waiting>,
    /// The filter lacks a new name, or the driver was closed.
    pub(crate) changed: Arc<Notify>,
}

struct Waiting {
    names: HashMap<LockName, HashSet<Ticket>>,
    races: Races,
    /// The names of the newest stream.
    filter: Filter,
    /// Counts the streams. An older stream ends when it next reads.
    generation: u64,
    keeper: bool,
    /// The last attempt to open a stream failed.
    deaf: bool,
    /// The warning was logged.
    told: bool,
}

/// The names whose changes a stream shows; `None`: all.
type Filter = Option<HashSet<LockName>>;

fn shows(filter: &Filter, name: &LockName) -> bool {
    filter.as_ref().is_none_or(|names| names.contains(name))
}

impl Listener {
    /// With `on` false there are no wake-ups.
    pub(crate) fn new(connection: Connection, on: bool) -> Self {
        let waiting = Waiting {
            names: HashMap::new(),
            races: Races::default(),
            filter: Some(HashSet::new()),
            generation: 0,
            keeper: false,
            deaf: false,
            told: false,
        };
        let shared = Shared {
            connection,
            wake_ups: WakeUps::new(),
            waiting: Mutex::new(waiting),
            changed: Arc::default(),
        };
        if !on {
            shared.wake_ups.close();
        }
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Whether this user may have a change stream on this server.
    pub(crate) async fn can_be_had(connection: &Connection) -> Result<bool> {
        match open(connection, Some(Vec::new())).await {
            Ok(_) => Ok(true),
            Err(cause) if error::no_stream(&cause) => {
                tracing::debug!(reason = %error::failed(&cause), "mongodb: no change streams, so waiters poll");
                Ok(false)
            }
            Err(cause) => Err(error::failed(&cause)),
        }
    }

    /// Notes that the name was found held: a lost race, if this client tried because of a wake-up.
    pub(crate) fn refused(&self, name: &LockName) {
        self.shared.waiting().races.lost(name);
    }

    pub(crate) fn won(&self, name: &LockName) {
        self.shared.waiting().races.won(name);
    }

    /// Ends the wake-ups and the change stream.
    pub(crate) fn close(&self) {
        let mut waiting = self.shared.waiting();
        self.shared.wake_ups.close();
        waiting.names.clear();
        waiting.generation += 1;
        self.shared.changed.notify_one();
    }
}

#[async_trait]
impl Waiters for Listener {
    fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.shared.wake_ups.stream()
    }

    /// Answers `true` also where the name will be listened to in a moment.
    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        let mut waiting = self.shared.waiting();
        if self.shared.wake_ups.is_closed() {
            return false;
        }
        if !waiting.names.contains_key(name) && waiting.names.len() >= MOST {
            return false;
        }
        let tickets = waiting.names.entry(name.clone()).or_default();
        tickets.insert(ticket);
        if !shows(&waiting.filter, name) {
            self.shared.changed.notify_one();
        }
        if !std::mem::replace(&mut waiting.keeper, true) {
            let kept = keep(
                Arc::downgrade(&self.shared),
                Arc::clone(&self.shared.changed),
            );
            self.shared.connection.runtime().spawn(kept);
        }
        !waiting.deaf
    }

    /// The filter keeps the name until the next stream, so a waiter that comes back soon is
    /// notified at once.
    fn forget(&self, name: &LockName, ticket: Ticket) {
        let mut waiting = self.shared.waiting();
        if let Some(tickets) = waiting.names.get_mut(name) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                waiting.names.remove(name);
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({} names)", self.shared.waiting().names.len())
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn resync(&self) {
        self.wake_ups.send(WakeUp::Resync);
    }

    /// Handles a change of a document.
    pub(crate) fn changed(self: &Arc<Self>, event: &Document) {
        let key = event.get_document("documentKey");
        let name = key
            .and_then(|key| key.get_str("_id"))
            .map(str::parse::<LockName>);
        let Ok(Ok(name)) = name else { return };
        let mut waiting = self.waiting();
        if !waiting.names.contains_key(&name) {
            return;
        }
        match waiting.races.begin(&name) {
            Some(Duration::ZERO) => self.wake_ups.send(WakeUp::Free(name)),
            Some(pause) => {
                let shared = Arc::downgrade(self);
                self.connection.runtime().spawn(async move {
                    tokio::time::sleep(pause).await;
                    if let Some(here) = shared.upgrade() {
                        here.waiting().races.rested(&name);
                        here.wake_ups.send(WakeUp::Free(name));
                    }
                });
            }
            None => {}
        }
    }

    pub(crate) fn is_current(&self, generation: u64) -> bool {
        let waiting = self.waiting();
        waiting.generation == generation && !self.wake_ups.is_closed()
    }
}

/// Reads names that the previous stream lacked: a release may have come before the new stream.
async fn read_missed(shared: Weak<Shared>, connection: Connection, names: Vec<LockName>) {
    for some in names.chunks(LISTED) {
        let find = commands::find(connection.collection(), some.iter(), "local");
        // A document that cannot be read may be free.
        let reply = connection.run(Class::Work, find).await;
        let found = reply.map(|reply| found(&reply)).unwrap_or_default();
        let held = |name: &LockName| found.get(name).and_then(|seen| seen.unavailable());
        let Some(here) = shared.upgrade() else { return };
        let waiting = here.waiting();
        let free = some.iter().filter(|name| held(name).is_none());
        free.filter(|name| waiting.names.contains_key(*name))
            .for_each(|name| here.wake_ups.send(WakeUp::Free(name.clone())));
    }
}

/// Keeps a stream open that covers every name with waiters, until there are none or the driver is gone.
async fn keep(shared: Weak<Shared>, changed: Arc<Notify>) {
    let mut opened: Option<Instant> = None;
    let mut backoff = Backoff::new(SHORTEST, LONGEST);
    let ended = Arc::new(AtomicBool::new(false));
    loop {
        let Some(here) = shared.upgrade() else { return };
        let lost = ended.swap(false, Ordering::Relaxed);
        let wanted = {
            let mut waiting = here.waiting();
            if here.wake_ups.is_closed() {
                waiting.keeper = false;
                return;
            }
            let lacking = waiting
                .names
                .keys()
                .any(|name| !shows(&waiting.filter, name));
            if lost {
                waiting.filter = Some(HashSet::new());
            }
            if waiting.names.is_empty() && opened.is_none_or(|opened| opened.elapsed() > IDLE) {
                waiting.keeper = false;
                waiting.filter = Some(HashSet::new());
                waiting.generation += 1;
                return;
            }
            let busy = !lost && opened.is_some_and(|opened| opened.elapsed() < OFTEN);
            (lost || lacking).then(|| -> Filter {
                match busy || waiting.names.len() > LISTED {
                    true => None,
                    false => Some(waiting.names.keys().cloned().collect()),
                }
            })
        };
        if let Some(filter) = wanted {
            let listed = |names: &HashSet<LockName>| -> Vec<_> {
                names.iter().map(|name| name.as_str().into()).collect()
            };
            let names = filter.as_ref().map(listed);
            // Not in a `select!`: a future of the native client must run to completion.
            match open(&here.connection, names).await {
                Ok(stream) => {
                    opened = Some(Instant::now());
                    backoff = Backoff::new(SHORTEST, LONGEST);
                    let (generation, new) = here.opened(filter, lost);
                    let (runtime, connection) = (here.connection.runtime(), &here.connection);
                    runtime.spawn(read_missed(Arc::downgrade(&here), connection.clone(), new));
                    let listening = listen(
                        Arc::downgrade(&here),
                        generation,
                        stream,
                        Arc::clone(&ended),
                    );
                    runtime.spawn(listening);
                }
                Err(cause) => {
                    here.failed(&cause);
                    ended.store(lost, Ordering::Relaxed);
                    drop(here);
                    tokio::time::sleep(backoff.pause()).await;
                    changed.notify_one();
                }
            }
            continue;
        }
        drop(here);
        drop(tokio::time::timeout(IDLE, changed.notified()).await);
    }
}

impl Shared {
    /// Notes that a new stream is open; the one before it ends. Answers the number of the stream, and the
    /// names that the one before it lacked.
    fn opened(&self, filter: Filter, lost: bool) -> (u64, Vec<LockName>) {
        let mut waiting = self.waiting();
        let before = std::mem::replace(&mut waiting.filter, filter);
        waiting.generation += 1;
        let was_deaf = std::mem::take(&mut waiting.deaf);
        if lost || was_deaf {
            self.resync();
            return (waiting.generation, Vec::new());
        }
        let heard = |name: &&LockName| !shows(&before, name) && shows(&waiting.filter, name);
        let new = waiting.names.keys().filter(heard).cloned().collect();
        (waiting.generation, new)
    }

    fn failed(&self, cause: &NativeError) {
        let mut waiting = self.waiting();
        waiting.deaf = true;
        if !std::mem::replace(&mut waiting.told, true) {
            tracing::warn!(reason = %error::failed(cause), "mongodb: no change stream for now, so waiters poll every 100 ms");
        }
    }
}

/// If streams would be opened more often than this, the next one takes all names.
const OFTEN: Duration = Duration::from_secs(1);
/// More names than this are not listed: the server compares each change with each of them.
const LISTED: usize = 1_000;
/// A stream without waiters is closed after this long.
const IDLE: Duration = Duration::from_secs(10);
/// Pauses between attempts to open a stream.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// The most names that one client listens to. Waiters for further names poll.
const MOST: usize = 10_000;
