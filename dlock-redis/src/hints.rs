//! Wake-ups: a connection of its own, subscribed to the channel of each name that a ticket waits on.
//!
//! A release publishes on Redisson's channel of the name. Whoever waits subscribes first and looks once more when that is
//! confirmed, so that no release falls between the refusal and the subscription.

use crate::{
    config::Prefix,
    connection::{Dialer, jitter, longer},
};
use dlock_core::{Hint, LockName, Ticket};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    future::Future,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc},
    time::Instant,
};

/// Who waits, and the task that listens for them. The task begins with the first who waits.
pub(crate) struct Hints {
    shared: Arc<Shared>,
    stream: Mutex<Option<mpsc::Receiver<Hint>>>,
}

struct Shared {
    dialer: Arc<Dialer>,
    /// The client's: whoever waits may do so in another one, which may end before the client does.
    runtime: Handle,
    prefix: Prefix,
    waiting: Mutex<Waiting>,
    /// Something is to be done: a wish changed, the connection ended, or all did.
    changed: Arc<Notify>,
    /// A hint found the stream full.
    missed: AtomicBool,
}

struct Waiting {
    /// By channel.
    names: HashMap<Arc<str>, (LockName, HashSet<Ticket>)>,
    /// Channels to be subscribed or unsubscribed, as `names` has them or not.
    touched: HashSet<Arc<str>>,
    /// Gone when closed, or when the server lets us not listen.
    hints: Option<mpsc::Sender<Hint>>,
    listening: bool,
}

impl Hints {
    pub(crate) fn new(dialer: Arc<Dialer>, prefix: Prefix) -> Self {
        let (hints, stream) = mpsc::channel(UNREAD);
        let waiting = Waiting {
            names: HashMap::new(),
            touched: HashSet::new(),
            hints: Some(hints),
            listening: false,
        };
        let shared = Shared {
            dialer,
            runtime: Handle::current(),
            prefix,
            waiting: Mutex::new(waiting),
            changed: Arc::default(),
            missed: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            stream: Mutex::new(Some(stream)),
        }
    }

    /// A ticket waits on a name from now on.
    pub(crate) fn listen(&self, name: &LockName, ticket: Ticket) {
        let keys = self.shared.prefix.keys(name);
        let mut waiting = self.shared.waiting();
        if let Some((_, tickets)) = waiting.names.get_mut(keys.channel()) {
            tickets.insert(ticket);
            return;
        }
        if waiting.hints.is_none() || waiting.names.len().max(waiting.touched.len()) >= MOST {
            return;
        }
        let channel: Arc<str> = keys.channel().into();
        waiting
            .names
            .insert(channel.clone(), (name.clone(), HashSet::from([ticket])));
        waiting.touched.insert(channel);
        if !std::mem::replace(&mut waiting.listening, true) {
            let listening = listen(Arc::downgrade(&self.shared), self.shared.changed.clone());
            self.shared.runtime.spawn(listening);
        }
        self.shared.changed.notify_one();
    }

    /// A ticket is used up or left: with the last one of a name its subscription ends.
    pub(crate) fn forget(&self, name: &LockName, ticket: Ticket) {
        let keys = self.shared.prefix.keys(name);
        let mut waiting = self.shared.waiting();
        let Some((_, tickets)) = waiting.names.get_mut(keys.channel()) else {
            return;
        };
        if tickets.remove(&ticket) && tickets.is_empty() {
            waiting.names.remove(keys.channel());
            // Left out, a subscription lasts until the next connection: messages without a name are dropped.
            if waiting.touched.len() < MOST {
                waiting.touched.insert(keys.channel().into());
            }
            self.shared.changed.notify_one();
        }
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, Hint> {
        let taken = self
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(hints) = taken else {
            return stream::empty().boxed();
        };
        let shared = Arc::downgrade(&self.shared);
        stream::unfold((hints, shared), |(mut hints, shared)| async move {
            // What did not fit was dropped while the stream was full, so this is read before it runs dry.
            let missed = shared
                .upgrade()
                .is_some_and(|shared| shared.missed.swap(false, Ordering::Relaxed));
            let hint = if missed {
                Hint::LookAgain
            } else {
                hints.recv().await?
            };
            Some((hint, (hints, shared)))
        })
        .boxed()
    }

    /// Ends the stream, the subscriptions and their connection.
    pub(crate) fn close(&self) {
        self.shared.mute();
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Hints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hints({} names)", self.shared.waiting().names.len())
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mute(&self) {
        let mut waiting = self.waiting();
        waiting.hints = None;
        waiting.names.clear();
        waiting.touched.clear();
        self.changed.notify_one();
    }

    fn emit(&self, waiting: &Waiting, hint: Hint) {
        if let Some(hints) = &waiting.hints
            && hints.try_send(hint).is_err()
        {
            self.missed.store(true, Ordering::Relaxed);
        }
    }

    /// Runs inside the connection's task.
    fn pushed(&self, push: &PushInfo) {
        if push.kind == PushKind::Message
            && let Some(Value::BulkString(channel)) = push.data.first()
            && let Ok(channel) = std::str::from_utf8(channel)
        {
            let waiting = self.waiting();
            if let Some((name, _)) = waiting.names.get(channel) {
                self.emit(&waiting, Hint::Free(name.clone()));
            }
        }
    }

    /// What is to be unsubscribed and subscribed; a fresh connection begins with every name.
    fn wishes(&self, fresh: bool) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        let mut waiting = self.waiting();
        let touched = std::mem::take(&mut waiting.touched);
        if fresh {
            return (Vec::new(), waiting.names.keys().cloned().collect());
        }
        touched
            .into_iter()
            .partition(|channel| !waiting.names.contains_key(channel))
    }

    /// These names are listened to from now on: look once more for what came before.
    fn confirmed(&self, channels: &[Arc<str>]) {
        let waiting = self.waiting();
        for (name, _) in channels
            .iter()
            .filter_map(|channel| waiting.names.get(channel))
        {
            self.emit(&waiting, Hint::Free(name.clone()));
        }
    }
}

/// Keeps a connection while somebody waits; ends with the driver.
async fn listen(shared: Weak<Shared>, changed: Arc<Notify>) {
    let (mut pause, mut again) = (Duration::ZERO, false);
    loop {
        let Some(strong) = shared.upgrade() else {
            return;
        };
        let (over, idle) = {
            let waiting = strong.waiting();
            (waiting.hints.is_none(), waiting.names.is_empty())
        };
        drop(strong);
        if over {
            return;
        }
        if idle {
            changed.notified().await;
            continue;
        }
        let began = Instant::now();
        let Err(error) = follow(&shared, &changed, again).await else {
            return;
        };
        if error.code() == Some("NOPERM") {
            tracing::warn!(%error, "redis: may not subscribe, so waiters only look; see the ACL lines in the README of dlock-redis");
            return shared
                .upgrade()
                .map(|shared| shared.mute())
                .unwrap_or_default();
        }
        tracing::debug!(%error, "redis: the connection for wake-ups ended");
        again = true;
        pause = if began.elapsed() > Duration::from_secs(1) {
            Duration::ZERO
        } else {
            longer(pause)
        };
        tokio::time::sleep(jitter(pause)).await;
    }
}

/// One connection's life. `Ok`: the driver is over.
async fn follow(shared: &Weak<Shared>, changed: &Notify, again: bool) -> RedisResult<()> {
    let Some(strong) = shared.upgrade() else {
        return Ok(());
    };
    let dialer = strong.dialer.clone();
    drop(strong);
    let gone = Arc::new(AtomicBool::new(false));
    let (listener, flag) = (shared.clone(), gone.clone());
    let mut native = dialer
        .dial(move |push| {
            let Some(shared) = listener.upgrade() else {
                return;
            };
            if push.kind == PushKind::Disconnection {
                flag.store(true, Ordering::SeqCst);
                shared.changed.notify_one();
            }
            shared.pushed(&push);
        })
        .await?;
    let mut fresh = true;
    loop {
        let Some(strong) = shared.upgrade() else {
            return Ok(());
        };
        if strong.waiting().hints.is_none() {
            return Ok(());
        }
        let (ended, begun) = strong.wishes(fresh);
        for channels in ended.chunks(AT_ONCE) {
            within(&dialer, native.unsubscribe(names(channels))).await?;
        }
        for channels in begun.chunks(AT_ONCE) {
            within(&dialer, native.subscribe(names(channels))).await?;
            strong.confirmed(channels);
        }
        if fresh && again {
            strong.emit(&strong.waiting(), Hint::LookAgain);
        }
        fresh = false;
        drop(strong);
        if gone.load(Ordering::SeqCst) {
            return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
        }
        changed.notified().await;
    }
}

fn names(channels: &[Arc<str>]) -> Vec<&str> {
    channels.iter().map(|channel| &**channel).collect()
}

async fn within(dialer: &Dialer, step: impl Future<Output = RedisResult<()>>) -> RedisResult<()> {
    let answer = tokio::time::timeout(dialer.within(), step).await;
    answer.unwrap_or_else(|_| Err(RedisError::from(io::Error::from(io::ErrorKind::TimedOut))))
}

/// Hints that the core has not read yet. More are one [`Hint::LookAgain`].
const UNREAD: usize = 1_024;
/// Names listened to. Waiters of more only look: a client that waits on that many at once is not bound by wake-ups.
const MOST: usize = 10_000;
/// Channels in one command: some 10 µs of the server's time.
const AT_ONCE: usize = 100;
