//! Wake-ups: one change stream per client, filtered to the names that have waiters.
//!
//! The stream begins with the first waiter and ends when there has been none for a while. If the filter lacks
//! a name, the client reads that document once the stream with the name is open, so that no release falls
//! between the refusal and the stream. It reads and does not acquire: the server would execute a pending
//! acquire even after the client was killed, and the lock would be held for a lease. A filter cannot be
//! changed, so a new name needs a new stream. Where that would happen every second, the stream takes all
//! names, and the client drops the events of names without waiters.
//!
//! All waiters are notified of a release, and one of them gets the lock. [`Heard`] decides which try at once
//! and which back off. While no waiter of this client has to be notified, the client does not read the
//! stream, and the server keeps the events.
//!
//! The native client resumes a stream without loss and without notice if its connection or its primary was
//! lost. All waiters poll all the same when a member was lost. If the stream cannot be resumed, a new one
//! begins, and all waiters poll.

use crate::{
    commands,
    connection::Connection,
    deployment::Kind,
    document::found,
    error,
    heard::{Heard, Later, Wake},
    stream::{listen, open},
};
use dlock_core::{
    LockName,
    driver::{
        Result, Ticket, WakeUp,
        kit::{Class, Record, StoreTime},
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
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
use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};

/// The waiters of a client, and the tasks that listen for them.
pub(crate) struct Listener {
    shared: Arc<Shared>,
    stream: Mutex<Option<mpsc::Receiver<WakeUp>>>,
}

pub(crate) struct Shared {
    pub(crate) connection: Connection,
    kind: Kind,
    waiting: Mutex<Waiting>,
    /// The filter lacks a new name, or the driver was closed.
    pub(crate) changed: Arc<Notify>,
    /// The waiters or the newest stream changed.
    pub(crate) stirred: Notify,
    /// A wake-up did not fit into the channel.
    missed: AtomicBool,
}

struct Waiting {
    names: HashMap<LockName, HashSet<Ticket>>,
    heard: Heard,
    /// The names of the newest stream.
    filter: Filter,
    /// Counts the streams. An older stream ends when it next reads.
    generation: u64,
    keeper: bool,
    /// The last attempt to open a stream failed.
    deaf: bool,
    /// The warning was logged.
    told: bool,
    /// `None` when the driver was closed, or when it offers no wake-ups.
    wake_ups: Option<mpsc::Sender<WakeUp>>,
}

#[derive(Debug)]
enum Filter {
    Names(HashSet<LockName>),
    All,
}

impl Filter {
    fn has(&self, name: &LockName) -> bool {
        match self {
            Self::Names(names) => names.contains(name),
            Self::All => true,
        }
    }
}

impl Listener {
    /// With `on` false there are no wake-ups.
    pub(crate) fn new(connection: Connection, on: bool, kind: Kind) -> Self {
        let (wake_ups, stream) = mpsc::channel(UNREAD);
        let waiting = Waiting {
            names: HashMap::new(),
            heard: Heard::default(),
            filter: Filter::Names(HashSet::new()),
            generation: 0,
            keeper: false,
            deaf: false,
            told: false,
            wake_ups: on.then_some(wake_ups),
        };
        let shared = Shared {
            connection,
            kind,
            waiting: Mutex::new(waiting),
            changed: Arc::default(),
            stirred: Notify::new(),
            missed: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            stream: Mutex::new(Some(stream)),
        }
    }

    /// Whether this user may have a change stream on this server. Logs a warning if not.
    pub(crate) async fn can_be_had(connection: &Connection) -> Result<bool> {
        match open(connection, Some(Vec::new())).await {
            Ok(_) => Ok(true),
            Err(cause) if error::no_stream(&cause) => {
                tracing::warn!(reason = %error::failed(&cause), "mongodb: no change streams, so waiters poll");
                Ok(false)
            }
            Err(cause) => Err(error::failed(&cause)),
        }
    }

    /// Registers a ticket that waits for a name. Answers whether the name is listened to, or will be in a moment.
    pub(crate) fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        let mut waiting = self.shared.waiting();
        if waiting.wake_ups.is_none() {
            return false;
        }
        if !waiting.names.contains_key(name) && waiting.names.len() >= MOST {
            return false;
        }
        let tickets = waiting.names.entry(name.clone()).or_default();
        tickets.insert(ticket);
        if !waiting.filter.has(name) {
            self.shared.changed.notify_one();
        }
        self.shared.stirred.notify_waiters();
        if !std::mem::replace(&mut waiting.keeper, true) {
            let kept = keep(
                Arc::downgrade(&self.shared),
                Arc::clone(&self.shared.changed),
            );
            self.shared.connection.runtime().spawn(kept);
        }
        !waiting.deaf
    }

    /// Removes a ticket. The filter keeps the name until the next stream, so a waiter that comes back soon is
    /// notified at once.
    pub(crate) fn forget(&self, name: &LockName, ticket: Ticket) {
        let mut waiting = self.shared.waiting();
        if let Some(tickets) = waiting.names.get_mut(name) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                waiting.names.remove(name);
            }
        }
    }

    /// Notes a refusal with the record that the server showed: a lost race, if the name was free by the last news.
    pub(crate) fn refused(&self, name: &LockName, record: &Record, time: StoreTime) {
        // A primary whose clock is behind its predecessor's may read the document before that time.
        let since = record.began.min(time.now) / 1_000;
        let later = {
            let mut waiting = self.shared.waiting();
            let has_lost = waiting.heard.is_free(name) && record.owner.is_some();
            let later = has_lost.then(|| waiting.heard.lost(name, record.token));
            let since = i64::try_from(since).unwrap_or(i64::MAX);
            waiting.heard.refused(name, record.token, since);
            later.flatten()
        };
        if let Some(later) = later {
            self.shared.later(name.clone(), later);
        }
    }

    pub(crate) fn won(&self, name: &LockName) {
        self.shared.waiting().heard.won(name);
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, WakeUp> {
        let taken = self
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(wake_ups) = taken else {
            return stream::empty().boxed();
        };
        let shared = Arc::downgrade(&self.shared);
        let next = |(mut wake_ups, shared): (mpsc::Receiver<WakeUp>, Weak<Shared>)| async move {
            // A wake-up that did not fit was dropped while the channel was full, so this is read before the
            // channel is empty.
            let missed = shared
                .upgrade()
                .is_some_and(|shared| shared.missed.swap(false, Ordering::Relaxed));
            let wake_up = if missed {
                WakeUp::Resync
            } else {
                wake_ups.recv().await?
            };
            Some((wake_up, (wake_ups, shared)))
        };
        stream::unfold((wake_ups, shared), next).boxed()
    }

    /// Ends the wake-ups and the change stream.
    pub(crate) fn close(&self) {
        let mut waiting = self.shared.waiting();
        waiting.wake_ups = None;
        waiting.names.clear();
        waiting.generation += 1;
        self.shared.changed.notify_one();
        self.shared.stirred.notify_waiters();
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

    fn emit(&self, waiting: &Waiting, wake_up: WakeUp) {
        if let Some(wake_ups) = &waiting.wake_ups
            && wake_ups.try_send(wake_up).is_err()
        {
            self.missed.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn look_again(&self) {
        self.emit(&self.waiting(), WakeUp::Resync);
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
        match waiting.heard.release(&name, time_of(event, self.kind)) {
            Wake::Now => self.emit(&waiting, WakeUp::Free(name)),
            Wake::Later(later) => self.later(name, later),
            Wake::None => {}
        }
    }

    fn later(self: &Arc<Self>, name: LockName, later: Later) {
        let shared = Arc::downgrade(self);
        self.connection.runtime().spawn(async move {
            tokio::time::sleep(later.pause).await;
            let Some(here) = shared.upgrade() else { return };
            let mut waiting = here.waiting();
            if waiting.names.contains_key(&name) && waiting.heard.is_due(&name, later) {
                here.emit(&waiting, WakeUp::Free(name));
            }
        });
    }

    /// How long the newest stream need not be read. Events of that time stay in the stream.
    pub(crate) fn pause(&self, generation: u64) -> Option<Duration> {
        let waiting = self.waiting();
        if waiting.generation != generation || waiting.wake_ups.is_none() {
            return None;
        }
        if waiting.names.len() > RESTING {
            return None;
        }
        let now = std::time::Instant::now();
        let pause = |name| waiting.heard.pause(name, now);
        let mut names = waiting.names.keys();
        names.try_fold(IDLE, |least, name| Some(least.min(pause(name)?)))
    }

    /// The newest stream was not read for so long that its events are outdated, so another one begins. An
    /// older stream is still read, because no other stream has its remaining events.
    pub(crate) fn outdated(&self, generation: u64) -> bool {
        let mut waiting = self.waiting();
        let is_newest = waiting.generation == generation;
        if is_newest {
            waiting.filter = Filter::Names(HashSet::new());
            self.changed.notify_one();
        }
        is_newest
    }

    pub(crate) fn is_current(&self, generation: u64) -> bool {
        let waiting = self.waiting();
        waiting.generation == generation && waiting.wake_ups.is_some()
    }
}

/// When a lock became free, by the clock that also told since when it is held. Not behind routers, where
/// routers and shards each have their own clock.
fn time_of(event: &Document, kind: Kind) -> Option<i64> {
    if kind == Kind::Routed {
        return None;
    }
    let changed = event.get_document("updateDescription").ok()?;
    let fields = changed.get_document("updatedFields").ok()?;
    Some(fields.get_datetime("since").ok()?.timestamp_millis())
}

/// Reads names that the previous stream lacked: a release may have come before the new stream.
async fn look(shared: Weak<Shared>, connection: Connection, names: Vec<LockName>) {
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
            .for_each(|name| here.emit(&waiting, WakeUp::Free(name.clone())));
    }
}

/// Keeps a stream open that covers every name with waiters, until there are none or the driver is gone.
async fn keep(shared: Weak<Shared>, changed: Arc<Notify>) {
    let mut opened: Option<Instant> = None;
    let mut pause = SHORTEST;
    let ended = Arc::new(AtomicBool::new(false));
    loop {
        let Some(here) = shared.upgrade() else { return };
        let lost = ended.swap(false, Ordering::Relaxed);
        let wanted = {
            let mut waiting = here.waiting();
            if waiting.wake_ups.is_none() {
                waiting.keeper = false;
                return;
            }
            let lacking = waiting.names.keys().any(|name| !waiting.filter.has(name));
            if lost {
                waiting.filter = Filter::Names(HashSet::new());
            }
            if waiting.names.is_empty() && opened.is_none_or(|opened| opened.elapsed() > IDLE) {
                waiting.keeper = false;
                waiting.filter = Filter::Names(HashSet::new());
                waiting.generation += 1;
                here.stirred.notify_waiters();
                return;
            }
            let busy = !lost && opened.is_some_and(|opened| opened.elapsed() < OFTEN);
            (lost || lacking).then(|| match busy || waiting.names.len() > LISTED {
                true => Filter::All,
                false => Filter::Names(waiting.names.keys().cloned().collect()),
            })
        };
        if let Some(filter) = wanted {
            let names = match &filter {
                Filter::Names(names) => {
                    Some(names.iter().map(|name| name.as_str().into()).collect())
                }
                Filter::All => None,
            };
            // Not in a `select!`: a future of the native client must run to completion.
            match open(&here.connection, names).await {
                Ok(stream) => {
                    opened = Some(Instant::now());
                    pause = SHORTEST;
                    let (generation, new) = here.opened(filter, lost);
                    let (runtime, connection) = (here.connection.runtime(), &here.connection);
                    runtime.spawn(look(Arc::downgrade(&here), connection.clone(), new));
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
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST);
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
        self.stirred.notify_waiters();
        let was_deaf = std::mem::take(&mut waiting.deaf);
        if lost || was_deaf {
            self.emit(&waiting, WakeUp::Resync);
            return (waiting.generation, Vec::new());
        }
        let heard = |name: &&LockName| !before.has(name) && waiting.filter.has(name);
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
/// A client that waits for more names than this always listens.
const RESTING: usize = 16;
/// The most unread wake-ups. Further ones become one `Resync`.
const UNREAD: usize = 1_024;
/// The most names that one client listens to. Waiters for further names poll.
const MOST: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::time_of;
    use crate::deployment::Kind;
    use mongodb::bson::{DateTime, doc};

    #[test]
    fn a_change_has_a_time_where_one_clock_tells_all_times() {
        let since = doc! { "since": DateTime::from_millis(7) };
        let event = doc! { "updateDescription": { "updatedFields": since } };
        assert_eq!(time_of(&event, Kind::Replicated), Some(7));
        assert_eq!(time_of(&event, Kind::Routed), None);
        let gone = doc! { "operationType": "delete" };
        assert_eq!(time_of(&gone, Kind::Replicated), None);
    }
}
