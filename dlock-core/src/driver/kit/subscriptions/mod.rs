//! Subscriptions: wake-ups over a connection on which the server publishes releases, open only while a client waits.
//!
//! A name has one of [`CHANNELS`] channels, by a hash that every client computes alike. A waiter first
//! subscribes to the channel, and then marks the record; a release that finds the mark publishes the hash of
//! the name. So no release falls between the two. A channel is left some seconds after its last waiter, and
//! the connection after its last channel. When the connection is lost, every waiter polls, and subscribes
//! again.

use super::{record_store::Waiters, wake_ups::WakeUps};
use crate::{
    driver::{Result, Ticket, WakeUp},
    error::DriverError,
    name::LockName,
};
use async_trait::async_trait;
use futures_core::stream::BoxStream;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::AbortHandle,
    time::{Instant, timeout},
};

/// A connection on which a server publishes what others say on channels.
///
/// Where the driver's own connection can subscribe, too, `Connection` is the list of its subscriptions, such as a
/// `StreamMap`: [`connect`](Self::connect) makes an empty one, [`next`](Self::next) waits while it is empty, and fails
/// when the connection is lost, also where the client subscribes again by itself, because something was missed.
pub trait Subscriber: Send + Sync + 'static {
    /// The native connection. It is closed by dropping it.
    type Connection: Send;

    /// Opens a connection that is subscribed to nothing.
    ///
    /// # Errors
    /// Where there is none to be had: waiters poll.
    fn connect(&self) -> impl Future<Output = Result<Self::Connection>> + Send;

    /// Subscribes to a channel. What is published after the answer is heard.
    ///
    /// # Errors
    /// The connection is of no more use.
    fn subscribe(
        &self,
        connection: &mut Self::Connection,
        channel: u64,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Leaves a channel.
    ///
    /// # Errors
    /// As [`subscribe`](Self::subscribe).
    fn unsubscribe(
        &self,
        connection: &mut Self::Connection,
        channel: u64,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Asks the server for an answer: a dead network path looks like a server that has nothing to say.
    ///
    /// # Errors
    /// As [`subscribe`](Self::subscribe).
    fn probe(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<()>> + Send;

    /// The next hash that was published.
    ///
    /// # Errors
    /// The connection is lost.
    ///
    /// # Cancel safety
    /// A dropped future loses nothing that was published.
    fn next(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<u64>> + Send;
}

/// The waiters of one client, and the task that hears for them.
pub struct Subscriptions<S: Subscriber>(Arc<Shared<S>>);

struct Shared<S> {
    subscriber: S,
    wake_ups: WakeUps,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the hash of the name; two names may have one.
    waiting: HashMap<u64, HashMap<LockName, HashSet<Ticket>>>,
    /// The channels that the connection is subscribed to.
    subscribed: HashSet<u64>,
    task: Option<(mpsc::Sender<Request>, AbortHandle)>,
    /// The last attempt to connect or to subscribe failed, and the next one is not due yet.
    away_until: Option<Instant>,
}

/// A channel to subscribe to, and where to say that it is done.
type Request = (u64, oneshot::Sender<()>);

impl<S: Subscriber> Subscriptions<S> {
    /// No waiter and no connection.
    #[must_use]
    pub fn new(subscriber: S) -> Self {
        Self(Arc::new(Shared {
            subscriber,
            wake_ups: WakeUps::new(),
            state: Mutex::default(),
        }))
    }

    /// What connects.
    pub fn subscriber(&self) -> &S {
        &self.0.subscriber
    }

    /// Ends the stream, the task and its connection.
    pub fn close(&self) {
        self.0.wake_ups.close();
        if let Some((_, task)) = self.0.state.lock().task.take() {
            task.abort();
        }
    }
}

#[async_trait]
impl<S: Subscriber> Waiters for Subscriptions<S> {
    fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.0.wake_ups.stream()
    }

    /// Where it takes long to subscribe to the channel, this answers `false` and goes on: the waiter polls, and its
    /// next poll finds the channel. Call it inside a runtime.
    async fn listen(&self, name: &LockName, ticket: Ticket) -> bool {
        let hash = hash_of(name.as_str());
        let requests = {
            let mut state = self.0.state.lock();
            let is_full = state.waiting.len() >= MOST && !state.waiting.contains_key(&hash);
            if self.0.wake_ups.is_closed() || is_full {
                return false;
            }
            let names = state.waiting.entry(hash).or_default();
            names.entry(name.clone()).or_default().insert(ticket);
            if state.subscribed.contains(&channel_of(hash)) {
                return true;
            }
            if state.away_until.is_some_and(|end| Instant::now() < end) {
                return false;
            }
            self.0.requests(&mut state)
        };
        let subscribing = async {
            let (done, answer) = oneshot::channel();
            requests.send((channel_of(hash), done)).await.ok()?;
            answer.await.ok()
        };
        matches!(timeout(LISTEN, subscribing).await, Ok(Some(())))
    }

    fn forget(&self, name: &LockName, ticket: Ticket) {
        let (hash, mut state) = (hash_of(name.as_str()), self.0.state.lock());
        let Some(names) = state.waiting.get_mut(&hash) else {
            return;
        };
        if let Some(tickets) = names.get_mut(name) {
            tickets.remove(&ticket);
        }
        names.retain(|_, tickets| !tickets.is_empty());
        if names.is_empty() {
            state.waiting.remove(&hash);
        }
    }
}

impl<S: Subscriber> Drop for Subscriptions<S> {
    fn drop(&mut self) {
        self.close();
    }
}

// The subscriber has the password.
impl<S: Subscriber> fmt::Debug for Subscriptions<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("Subscriptions")
            .field("waiting", &state.waiting.len())
            .field("subscribed", &state.subscribed)
            .finish_non_exhaustive()
    }
}

impl<S: Subscriber> Shared<S> {
    /// Where to ask for channels. The task begins with the first waiter, and anew if its runtime has ended.
    fn requests(self: &Arc<Self>, state: &mut State) -> mpsc::Sender<Request> {
        match &state.task {
            Some((requests, _)) if !requests.is_closed() => requests.clone(),
            _ => {
                let (requests, asked) = mpsc::channel(UNREAD);
                let task = tokio::spawn(follow(Arc::clone(self), asked));
                state.task = Some((requests.clone(), task.abort_handle()));
                requests
            }
        }
    }

    /// Serves one connection until it is lost, or no waiter needs it.
    async fn serve(&self, first: Request, asked: &mut mpsc::Receiver<Request>) -> Result<()> {
        let subscriber = &self.subscriber;
        let mut connection = answered(subscriber.connect()).await?;
        let mut request = Some(first);
        let mut tick = tokio::time::interval(TICK);
        tick.reset();
        loop {
            if let Some((channel, done)) = request.take() {
                if !self.state.lock().subscribed.contains(&channel) {
                    answered(subscriber.subscribe(&mut connection, channel)).await?;
                    self.state.lock().subscribed.insert(channel);
                }
                let _left = done.send(());
            }
            tokio::select! {
                asked = asked.recv() => match asked {
                    Some(asked) => request = Some(asked),
                    None => return Ok(()),
                },
                published = subscriber.next(&mut connection) => self.published(published?),
                _ = tick.tick() => {
                    for channel in self.unwanted() {
                        answered(subscriber.unsubscribe(&mut connection, channel)).await?;
                    }
                    if self.state.lock().subscribed.is_empty() {
                        return Ok(());
                    }
                    answered(subscriber.probe(&mut connection)).await?;
                }
            }
        }
    }

    fn published(&self, hash: u64) {
        for name in self.state.lock().waiting.get(&hash).into_iter().flatten() {
            self.wake_ups.send(WakeUp::Free(name.0.clone()));
        }
    }

    /// Takes out the channels without a waiter.
    fn unwanted(&self) -> Vec<u64> {
        let state = &mut *self.state.lock();
        let wanted: HashSet<_> = state.waiting.keys().map(|hash| channel_of(*hash)).collect();
        let unwanted = state
            .subscribed
            .extract_if(|channel| !wanted.contains(channel));
        unwanted.collect()
    }
}

async fn follow<S: Subscriber>(shared: Arc<Shared<S>>, mut asked: mpsc::Receiver<Request>) {
    while let Some(request) = asked.recv().await {
        let away_until = shared.state.lock().away_until;
        if away_until.is_some_and(|end| Instant::now() < end) {
            continue; // asked before the failure
        }
        let lost = Lost(&shared);
        if let Err(error) = shared.serve(request, &mut asked).await {
            tracing::debug!(%error, "wake-ups are missed: waiters poll");
            let state = &mut *shared.state.lock();
            if state.subscribed.is_empty() {
                state.away_until = Some(Instant::now() + AWAY);
            }
        }
        drop(lost);
    }
}

/// On drop, also where the task is aborted: no channel is subscribed to any more, and waiters poll.
struct Lost<'a, S>(&'a Shared<S>);

impl<S> Drop for Lost<'_, S> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if !std::mem::take(&mut state.subscribed).is_empty() {
            self.0.wake_ups.send(WakeUp::Resync);
        }
    }
}

async fn answered<T>(answer: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let answer = timeout(ANSWER, answer).await;
    answer.unwrap_or_else(|_| Err(DriverError::unavailable("no answer about wake-ups")))
}

/// What is published of a name: the first eight bytes of its SHA-256. Fixed for good: clients of different
/// versions meet by it.
#[must_use]
pub fn hash_of(name: &str) -> u64 {
    let first = Sha256::digest(name).into_iter().take(8);
    first.fold(0, |hash, byte| hash << 8 | u64::from(byte))
}

/// The channel of a hash.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::{channel_of, hash_of};
///
/// // A release of this name is published on this channel, with the hash as text.
/// assert!(channel_of(hash_of("orders:42")) < 64);
/// ```
#[must_use]
pub const fn channel_of(hash: u64) -> u64 {
    hash % CHANNELS
}

/// With fewer channels a client hears more releases of names that it does not wait for; with more the server
/// keeps a longer list.
const CHANNELS: u64 = 64;
/// Names waited for. Waiters of further names poll.
const MOST: usize = 10_000;
/// Waiters that ask for a channel at the same time; more wait for their turn.
const UNREAD: usize = 64;
/// How long an acquire waits for its channel: it has yet to read the record, in the time of one attempt.
const LISTEN: Duration = Duration::from_millis(250);
/// How long the server may take for one step.
const ANSWER: Duration = Duration::from_secs(4);
/// How often channels without waiters are left, and the server is asked for an answer.
const TICK: Duration = Duration::from_secs(5);
/// How long waiters poll after a failure to connect.
const AWAY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
