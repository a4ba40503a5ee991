//! Wake-ups: one change stream per client, of the releases of all names.
//!
//! The stream begins with the first waiter and ends when there has been none for a while. The names that wait when it is
//! open are read once, so that no release falls between the refusal and the stream. They are read and not acquired: the
//! server would execute a pending acquire even after the client was killed, and the lock would be held for a lease. A
//! filter to the names that wait would need a new stream for each new name, and the server looks at each change for each
//! stream in any case.
//!
//! All waiters are notified of a release, and one of them gets the lock. [`Races`] spreads the attempts of clients that
//! keep losing.
//!
//! The native client resumes a stream without loss and without notice if its connection or its primary was
//! lost. All waiters poll all the same when a member was lost. If the stream cannot be resumed, a new one
//! begins, and all waiters poll.

use crate::{
    commands::{self, A_REPLY},
    connection::Connection,
    document::{Seen, found},
    error,
    races::Races,
    stream::{open, read},
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
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

/// The waiters of a client, and the task that listens for them.
pub(crate) struct Listener {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) connection: Connection,
    wake_ups: WakeUps,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    names: HashMap<LockName, HashSet<Ticket>>,
    races: Races,
    /// Since when there has been no waiter.
    idle: Option<Instant>,
    /// The task that keeps a stream open runs.
    keeper: bool,
    /// The last attempt to open a stream failed.
    deaf: bool,
    /// The warning was logged.
    told: bool,
}

impl Listener {
    /// With `on` false there are no wake-ups.
    pub(crate) fn new(connection: Connection, on: bool) -> Self {
        let shared = Shared {
            connection,
            wake_ups: WakeUps::new(),
            waiting: Mutex::default(),
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
        match open(connection).await {
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
        self.shared.waiting.lock().races.lost(name);
    }

    pub(crate) fn won(&self, name: &LockName) {
        self.shared.waiting.lock().races.won(name);
    }

    /// Ends the wake-ups and the change stream.
    pub(crate) fn close(&self) {
        let mut waiting = self.shared.waiting.lock();
        self.shared.wake_ups.close();
        waiting.names.clear();
    }
}

#[async_trait]
impl Waiters for Listener {
    fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.shared.wake_ups.stream()
    }

    /// Answers `true` also where the stream will be open in a moment.
    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        let mut waiting = self.shared.waiting.lock();
        if self.shared.wake_ups.is_closed() {
            return false;
        }
        let tickets = waiting.names.entry(name.clone()).or_default();
        tickets.insert(ticket);
        waiting.idle = None;
        if !std::mem::replace(&mut waiting.keeper, true) {
            let kept = keep(Arc::downgrade(&self.shared));
            self.shared.connection.runtime().spawn(kept);
        }
        !waiting.deaf
    }

    fn forget(&self, name: &LockName, ticket: Ticket) {
        let mut waiting = self.shared.waiting.lock();
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
        write!(
            f,
            "Listener({} names)",
            self.shared.waiting.lock().names.len()
        )
    }
}

impl Shared {
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
        let mut waiting = self.waiting.lock();
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
                        here.waiting.lock().races.rested(&name);
                        here.wake_ups.send(WakeUp::Free(name));
                    }
                });
            }
            None => {}
        }
    }

    /// Whether there is a waiter, or was one a while ago. If not, the task ends that asked.
    pub(crate) fn wants_a_stream(&self) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.names.is_empty() {
            waiting.idle.get_or_insert_with(Instant::now);
        }
        let is_idle = waiting.idle.is_some_and(|since| since.elapsed() > IDLE);
        if self.wake_ups.is_closed() || is_idle {
            (waiting.keeper, waiting.deaf, waiting.idle) = (false, false, None);
        }
        waiting.keeper
    }
}

/// Reads the names that waited before the stream was open: a release may have come before it.
async fn read_missed(shared: Weak<Shared>, connection: Connection, names: Vec<LockName>) {
    for some in names.chunks(A_REPLY) {
        let find = commands::find(connection.collection(), some.iter(), "local");
        // What cannot be read may be free.
        let reply = connection.run(Class::Work, find).await;
        let found = reply.map(|reply| found(&reply)).unwrap_or_default();
        let is_held = |name: &LockName| found.get(name).is_some_and(Seen::is_unavailable);
        let Some(here) = shared.upgrade() else { return };
        let waiting = here.waiting.lock();
        let free = some.iter().filter(|name| !is_held(name));
        free.filter(|name| waiting.names.contains_key(*name))
            .for_each(|name| here.wake_ups.send(WakeUp::Free(name.clone())));
    }
}

/// Keeps a stream open until there are no waiters or the driver is gone.
async fn keep(shared: Weak<Shared>) {
    let mut backoff = Backoff::new(SHORTEST, LONGEST);
    let mut lost = false;
    while let Some(here) = shared.upgrade().filter(|here| here.wants_a_stream()) {
        match open(&here.connection).await {
            Ok(stream) => {
                let opened = Instant::now();
                here.opened(lost);
                drop(here);
                lost = read(&shared, stream).await;
                if !lost {
                    return;
                }
                if opened.elapsed() > LONGEST {
                    backoff = Backoff::new(SHORTEST, LONGEST);
                }
            }
            Err(cause) => {
                here.failed(&cause);
                drop(here);
            }
        }
        tokio::time::sleep(backoff.pause()).await;
    }
}

impl Shared {
    /// Notes that a stream is open. If one before it was lost, or none could be had, all waiters poll.
    fn opened(self: &Arc<Self>, lost: bool) {
        let mut waiting = self.waiting.lock();
        if std::mem::take(&mut waiting.deaf) || lost {
            return self.resync();
        }
        let names = waiting.names.keys().cloned().collect();
        let reading = read_missed(Arc::downgrade(self), self.connection.clone(), names);
        self.connection.runtime().spawn(reading);
    }

    fn failed(&self, cause: &NativeError) {
        let mut waiting = self.waiting.lock();
        waiting.deaf = true;
        if !std::mem::replace(&mut waiting.told, true) {
            tracing::warn!(reason = %error::failed(cause), "mongodb: no change stream for now, so waiters poll every 100 ms");
        }
    }
}

/// A stream without waiters is closed after this long.
const IDLE: Duration = Duration::from_secs(10);
/// Pauses between attempts to open a stream.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
