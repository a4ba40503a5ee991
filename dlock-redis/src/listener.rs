//! Wake-ups: listens on this client's channel, over a connection of its own.
//! Notifications hand a lock to a waiter without polling.
//!
//! The channel is subscribed before the first ticket is sent, because a ticket without a receiver is
//! removed from the queue. The subscription ends with the driver, and with the stream: a client that
//! listened without waiting would be given turns that no task takes.
//!
//! In a cluster a client has a channel for each lock that it waits for, in the lock's slot: only there a script can count
//! the receivers. It is subscribed at the master of the slot, before the ticket is sent. When the slot moves, the server
//! ends the subscription and says so; the waiters then poll at the new master.
//!
//! A connection may look alive and carry nothing any more: a device on the path forgot it, or it leads
//! to another server than the requests. The client sends nothing to detect that without a suspicion. An
//! answer to a waiter shows when a notification must have been missed. Then the client publishes an echo
//! to its own channel, and opens another connection if the echo does not arrive.

use crate::{
    commands,
    config::{Keys, Prefix},
    connection::{Connection, Link},
    dialer::Dialer,
    error,
    tickets::Tickets,
};
use dlock_core::{
    Effect,
    driver::{
        Result, WakeUp,
        kit::{WakeUps, in_runtime},
        system_random,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, future::join_all, stream};
use parking_lot::Mutex;
use redis::{Cmd, PushInfo, PushKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use std::{
    borrow::Cow,
    collections::HashMap,
    fmt, io,
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::Instant,
};

/// The tickets of a client, and the stream of its notifications, from one server or from the masters of a cluster.
#[derive(Clone)]
pub(crate) struct Inbox {
    prefix: Prefix,
    in_cluster: bool,
    /// The channel of this client; in a cluster the end of all its channels.
    channel: String,
    pub(crate) tickets: Arc<Tickets>,
    pub(crate) wake_ups: Arc<WakeUps>,
    /// The stream was requested twice. The first client would receive the turns of the second, and hand
    /// on those that it does not know.
    two: Arc<AtomicBool>,
}

impl Inbox {
    pub(crate) fn new(prefix: Prefix, in_cluster: bool) -> Result<Self> {
        // Two clients with one channel would have the same tickets.
        let channel = format!(":c:{:016x}", system_random()?);
        Ok(Self {
            channel: match in_cluster {
                true => channel,
                false => [prefix.as_str(), &channel].concat(),
            },
            prefix,
            in_cluster,
            tickets: Arc::default(),
            wake_ups: Arc::default(),
            two: Arc::default(),
        })
    }

    /// The channel on which this client is notified of a lock; its tickets for the lock begin with it.
    pub(crate) fn channel(&self, keys: &Keys) -> Cow<'_, str> {
        match self.in_cluster {
            true => [keys.record(), &self.channel].concat().into(),
            false => Cow::Borrowed(&self.channel),
        }
    }

    /// An error where two clients use this driver.
    pub(crate) fn allowed(&self) -> Result<()> {
        match self.two.load(Ordering::Relaxed) {
            true => Err(error::two_clients()),
            false => Ok(()),
        }
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.wake_ups.take().unwrap_or_else(|| {
            self.two.store(true, Ordering::Relaxed);
            stream::empty().boxed()
        })
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tickets, {:?}", self.tickets.len(), self.wake_ups)
    }
}

/// The notifications from one server, and the task that listens for them.
pub(crate) struct Listener {
    dialer: Arc<Dialer>,
    inbox: Inbox,
    listening: Mutex<Listening>,
    /// In a cluster, one subscription at a time: `ASKING` counts for the next command of a connection.
    subscribing: tokio::sync::Mutex<()>,
    /// Whether the first attempt to subscribe is over, with any outcome, and whether listening is.
    stage: watch::Sender<Stage>,
    /// The connection for notifications ended, or the driver or the stream did.
    changed: Arc<Notify>,
    /// The last echo that arrived.
    echo: watch::Sender<u64>,
    /// That of the client.
    runtime: Handle,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Tried,
    Over,
}

/// The connection that listens.
#[derive(Clone)]
struct Open {
    native: MultiplexedConnection,
    /// When set, it ends.
    gone: Arc<AtomicBool>,
}

#[derive(Default)]
struct Listening {
    open: Option<Open>,
    /// The server's answer where the user may not subscribe.
    refused: Option<RedisError>,
    /// A check of the notifications is running, and whether another one follows it.
    doubt: Option<bool>,
    /// The link of the last refusal of a ticket.
    link: Option<Weak<Link>>,
    /// In a cluster the channels that are subscribed, and when each was needed last.
    channels: HashMap<String, Instant>,
    swept: Option<Instant>,
}

impl Listening {
    /// Removes the channels of tickets that must be over: a ticket is polled more often.
    fn idle(&mut self) -> Vec<String> {
        let now = Instant::now();
        if self.swept.is_some_and(|at| now - at < IDLE) {
            return Vec::new();
        }
        self.swept = Some(now);
        let idle = self.channels.extract_if(|_, needed| now - *needed > IDLE);
        idle.map(|(channel, _)| channel).collect()
    }

    /// Whether the channel is subscribed; it is needed now.
    fn hears(&mut self, channel: &str) -> bool {
        let needed = self.channels.get_mut(channel);
        needed.map(|at| *at = Instant::now()).is_some()
    }
}

impl Listener {
    /// Starts to listen. Needs a runtime.
    pub(crate) fn new(dialer: Arc<Dialer>, inbox: Inbox) -> Arc<Self> {
        let wake_ups = Arc::new(Self {
            dialer,
            inbox,
            listening: Mutex::default(),
            subscribing: tokio::sync::Mutex::default(),
            stage: watch::Sender::new(Stage::New),
            changed: Arc::default(),
            echo: watch::Sender::new(0),
            runtime: Handle::current(),
        });
        let (weak, stage) = (Arc::downgrade(&wake_ups), wake_ups.stage.clone());
        let changed = wake_ups.changed.clone();
        tokio::spawn(async move {
            listen(weak, changed).await;
            stage.send_replace(Stage::Over);
        });
        wake_ups
    }

    /// Resolves when the subscription succeeded or failed, and the user has the rights that turns need.
    pub(crate) async fn ready(&self, connection: &Arc<Connection>) -> Result<()> {
        self.reaches(Stage::Tried, self.dialer.within()).await;
        self.allowed()?;
        // Without the right to publish, this client would take every waiter for dead: each release would
        // empty the queue.
        match connection.command(echo_of(&self.any_channel(), 0)).await {
            Err(error) if error::native(&error).is_some_and(error::is_elsewhere) => Ok(()),
            // No request of a lock was sent.
            said => said
                .map(drop)
                .map_err(|error| error.with_effect(Effect::None)),
        }
    }

    /// A channel to try out what the user may do.
    fn any_channel(&self) -> Cow<'_, str> {
        self.inbox.channel(&Keys::none(&self.inbox.prefix))
    }

    /// An error where the user may not subscribe. Without notifications a ticket is removed from the
    /// queue at each release, so all others would pass its client again and again.
    pub(crate) fn allowed(&self) -> Result<()> {
        self.inbox.allowed()?;
        match &self.listening.lock().refused {
            Some(cause) => Err(error::may_not_subscribe(&self.inbox.prefix, cause.clone())),
            None => Ok(()),
        }
    }

    /// Subscribes to the channel of a lock in a cluster, unless that is done. The server refuses it where it does not
    /// have the slot, nor is asked to take it for one that is being moved to it.
    pub(crate) async fn subscribe(
        self: &Arc<Self>,
        channel: &str,
        asking: bool,
    ) -> RedisResult<()> {
        if self.listening.lock().hears(channel) {
            return Ok(());
        }
        // In a task: a caller that is not polled any more must keep no other from it.
        let (listener, channel) = (Arc::clone(self), channel.to_owned());
        let subscribing = async move { listener.subscribe_in_turn(&channel, asking).await };
        let subscribed = in_runtime(&self.runtime, subscribing).await;
        subscribed.unwrap_or(Ok(()))
    }

    async fn subscribe_in_turn(&self, channel: &str, asking: bool) -> RedisResult<()> {
        let _one = self.subscribing.lock().await;
        let (native, idle) = {
            let mut listening = self.listening.lock();
            let hears = listening.hears(channel);
            match listening.open.clone().filter(|_| !hears) {
                Some(open) => (open.native, listening.idle()),
                // Without a connection every notification is lost, and the waiters poll when there is one.
                None => return Ok(()),
            }
        };
        let subscribed = async {
            let idle = idle.iter().map(|it| shard(&native, "SUNSUBSCRIBE", it));
            drop(join_all(idle).await);
            if asking {
                native
                    .clone()
                    .send_packed_command(&redis::cmd("ASKING"))
                    .await?;
            }
            shard(&native, "SSUBSCRIBE", channel).await
        };
        match tokio::time::timeout(self.dialer.within(), subscribed).await {
            Ok(Err(error)) if !error.is_io_error() => return Err(error),
            Ok(Ok(())) if self.listening.lock().hears(channel) => {}
            // Silence, or the answer to another request: the native client takes the end of a subscription for one,
            // which the server tells on its own. Over the next connection the waiters poll.
            _ => self.replace(),
        }
        Ok(())
    }

    /// Ends the connection that listens. Another one follows.
    fn replace(&self) {
        if let Some(open) = &self.listening.lock().open {
            open.gone.store(true, Ordering::SeqCst);
        }
        self.changed.notify_one();
    }

    /// Whether a ticket was refused over another link than the one before it.
    pub(crate) fn is_another(&self, link: &Arc<Link>) -> bool {
        let link = Arc::downgrade(link);
        let before = self.listening.lock().link.replace(link.clone());
        before.is_some_and(|before| !before.ptr_eq(&link))
    }

    /// Waits for at most `bound`: a silent path must not block the caller.
    async fn reaches(&self, wanted: Stage, bound: Duration) {
        let mut stage = self.stage.subscribe();
        let reached = stage.wait_for(|stage| *stage >= wanted);
        drop(tokio::time::timeout(bound, reached).await);
    }

    /// Checks that messages on that channel arrive here, and subscribes anew if they do not. At most once a poll
    /// interval.
    pub(crate) fn doubt(self: &Arc<Self>, connection: &Arc<Connection>, channel: String) {
        let mut listening = self.listening.lock();
        let runs = listening.doubt.is_some();
        listening.doubt = Some(runs);
        drop(listening);
        if !runs {
            let asked = Arc::downgrade(connection);
            let checks = check_notifications(Arc::downgrade(self), asked, channel);
            // The caller's runtime may end at once.
            self.runtime.spawn(checks);
        }
    }

    /// Ends the stream, the subscription and its connection. Then no lock waits for a turn of this
    /// client.
    pub(crate) async fn close(&self) {
        self.inbox.wake_ups.close();
        self.changed.notify_one();
        self.reaches(Stage::Over, FAREWELL).await;
    }

    fn is_over(&self) -> bool {
        self.inbox.wake_ups.is_closed()
    }

    /// Publishes an echo over the command connection and waits until it arrives over the one for
    /// notifications. When the publish fails, nothing is known. Running twice is harmless: a second echo
    /// has no meaning.
    async fn hears_itself(&self, connection: &Arc<Connection>, channel: &str) -> bool {
        let mut echo = self.echo.subscribe();
        let number = *echo.borrow() + 1;
        match connection.command(echo_of(channel, number)).await {
            // The server has no subscription of this client, or the subscription is on another server.
            Ok(Value::Int(0)) => false,
            Ok(_) => {
                let heard = echo.wait_for(|heard| *heard >= number);
                tokio::time::timeout(ECHOES_WITHIN, heard).await.is_ok()
            }
            Err(_) => true,
        }
    }

    /// Runs inside the connection's task.
    fn pushed(&self, push: &PushInfo) {
        if !matches!(push.kind, PushKind::Message | PushKind::SMessage) {
            return self.subscribed(push);
        }
        let Some(Value::BulkString(message)) = push.data.get(1) else {
            return;
        };
        let said = std::str::from_utf8(message).unwrap_or_default();
        let Some(push) = commands::read_push(said) else {
            return match said.strip_prefix(ECHO).map(str::parse) {
                Some(Ok(number)) => drop(self.echo.send_replace(number)),
                _ => tracing::debug!("redis: unknown message on a client's channel"),
            };
        };
        let (Some(name), ticket) = (self.inbox.prefix.name(push.record), push.ticket) else {
            return;
        };
        // A turn of a ticket without a waiting task is reported too: the core hands it on.
        self.inbox.tickets.told(ticket, push.first_for.is_none());
        self.inbox.wake_ups.send(match push.first_for {
            // The holder may have let others in beside it. A turn is what the answer to an earlier poll does not undo.
            None | Some(Duration::ZERO) => WakeUp::Turn { name, ticket },
            Some(rest) => WakeUp::First {
                name,
                ticket,
                poll_in: poll_at_end(rest),
            },
        });
    }

    /// Keeps note of the channels of a cluster.
    fn subscribed(&self, push: &PushInfo) {
        let Some(channel) = push.data.first().and_then(commands::text) else {
            return;
        };
        let channels = &mut self.listening.lock().channels;
        if push.kind == PushKind::SSubscribe {
            channels.insert(channel.to_owned(), Instant::now());
        } else if push.kind == PushKind::SUnsubscribe && channels.remove(channel).is_some() {
            // The slot moved.
            self.inbox.wake_ups.send(WakeUp::Resync);
        }
    }

    /// An attempt to subscribe is over, or a subscription. `open` is the connection of one that is in place;
    /// `refused` is the answer of a server that does not allow it.
    fn tried(&self, open: Option<Open>, refused: Option<RedisError>) {
        let mut listening = self.listening.lock();
        if open.is_none() {
            listening.channels.clear();
        }
        (listening.open, listening.refused) = (open, refused);
        drop(listening);
        self.stage.send_replace(Stage::Tried);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({:?})", self.inbox)
    }
}

/// The remaining time is in whole milliseconds, rounded down, so one more has to pass.
pub(crate) fn poll_at_end(rest: Duration) -> Duration {
    (rest + Duration::from_millis(1)).min(POLL_INTERVAL)
}

/// Ends the connection that listens if no echo arrives over it. Then pauses for a poll interval before
/// the next check.
async fn check_notifications(
    shared: Weak<Listener>,
    connection: Weak<Connection>,
    channel: String,
) {
    loop {
        if let (Some(shared), Some(connection)) = (shared.upgrade(), connection.upgrade()) {
            // While another connection is being opened there is nothing to check.
            let open = shared.listening.lock().open.clone();
            if let Some(open) = open
                && !shared.hears_itself(&connection, &channel).await
            {
                tracing::debug!("redis: the connection for wake-ups carries nothing");
                open.gone.store(true, Ordering::SeqCst);
                shared.changed.notify_one();
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut listening = shared.listening.lock();
        listening.doubt = listening.doubt.filter(|again| *again).map(|_| false);
        if listening.doubt.is_none() {
            return;
        }
    }
}

/// Keeps one subscription alive until the driver or the stream ends.
async fn listen(shared: Weak<Listener>, changed: Arc<Notify>) {
    let (mut pause, mut gap, mut told) = (Duration::ZERO, false, false);
    loop {
        let began = Instant::now();
        let Err(error) = follow(&shared, &changed, gap).await else {
            return;
        };
        let Some(strong) = shared.upgrade() else {
            return;
        };
        let refused = error.code() == Some("NOPERM");
        strong.tried(None, refused.then(|| error.clone()));
        let dialer = strong.dialer.clone();
        pause = dialer.pause_after(began.elapsed(), pause);
        drop(strong);
        gap = true;
        if refused && !std::mem::replace(&mut told, true) {
            tracing::warn!(%error, "redis: the user may not subscribe, so acquires that wait fail; see the ACL lines in the README of dlock-redis");
        }
        tracing::debug!(%error, "redis: the connection for wake-ups ended");
        if refused {
            pause = REFUSED;
        }
        let again = dialer.rest(pause);
        let mut again = pin!(again);
        loop {
            // Closed during the pause.
            if shared.upgrade().is_none_or(|it| it.is_over()) {
                return;
            }
            tokio::select! {
                () = &mut again => break,
                () = changed.notified() => {}
            }
        }
    }
}

/// The life of one connection. `Ok`: the driver or its stream has ended.
async fn follow(shared: &Weak<Listener>, changed: &Notify, gap: bool) -> RedisResult<()> {
    let Some(strong) = shared.upgrade() else {
        return Ok(());
    };
    let (dialer, channel) = (strong.dialer.clone(), strong.any_channel().into_owned());
    drop(strong);
    let gone = Arc::new(AtomicBool::new(false));
    let (listener, flag) = (shared.clone(), gone.clone());
    let native = dialer
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
        .await
        .inspect_err(|_| dialer.tried(false))?;
    let mut named = native.clone();
    let hello = commands::hello("dlock-wake-ups");
    let subscribed = async {
        let (_, subscribed) = tokio::join!(named.send_packed_command(&hello), async {
            match dialer.in_cluster {
                // The right to subscribe, if nothing else.
                true => match shard(&native, "SSUBSCRIBE", &channel).await {
                    Err(error) if error::is_elsewhere(&error) => Ok(()),
                    subscribed => subscribed,
                },
                false => native.clone().subscribe(&channel).await,
            }
        });
        subscribed
    };
    let subscribed = tokio::time::timeout(dialer.within(), subscribed).await;
    let subscribed =
        subscribed.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
    dialer.tried(subscribed.is_ok());
    subscribed?;
    if let Some(strong) = shared.upgrade() {
        let (native, gone) = (native.clone(), gone.clone());
        strong.tried(Some(Open { native, gone }), None);
        // All earlier notifications are lost.
        if gap || strong.inbox.tickets.len() > 0 {
            strong.inbox.wake_ups.send(WakeUp::Resync);
        }
    }
    while let Some(shared) = shared.upgrade().filter(|it| !it.is_over()) {
        let abandoned = shared.inbox.wake_ups.abandoned();
        drop(shared);
        if gone.load(Ordering::SeqCst) {
            return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
        }
        tokio::select! {
            () = changed.notified() => {}
            () = abandoned => break,
        }
    }
    // An explicit unsubscribe, so that a waiting `close` knows that the server has no receiver any more.
    let channels = shared
        .upgrade()
        .map(|it| std::mem::take(&mut it.listening.lock().channels));
    let channels = channels.unwrap_or_default();
    let leave = async {
        let leave = channels.keys().map(|it| shard(&native, "SUNSUBSCRIBE", it));
        drop(join_all(leave).await);
        if !dialer.in_cluster {
            drop(native.clone().unsubscribe(channel).await);
        }
    };
    drop(tokio::time::timeout(FAREWELL, leave).await);
    Ok(())
}

/// Subscribes to a channel of a slot, or ends that.
async fn shard(native: &MultiplexedConnection, verb: &str, channel: &str) -> RedisResult<()> {
    let cmd = commands::words(&[verb, channel]);
    let answer = native.clone().send_packed_command(&cmd).await?;
    commands::read_error(answer).map(drop)
}

/// A message to this client that has no meaning. The right one for the channel: see `tell.lua`.
fn echo_of(channel: &str, number: u64) -> Cmd {
    let verb = match channel.contains('{') {
        true => "SPUBLISH",
        false => "PUBLISH",
    };
    commands::words(&[verb, channel, &format!("{ECHO}{number}")])
}

/// The pause after a refusal: rights can be granted while a service runs.
const REFUSED: Duration = Duration::from_secs(5);
/// The longest poll interval: the most that a lost notification costs.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// As long as the server keeps a queue that no client polls.
const IDLE: Duration = Duration::from_secs(10);
/// The beginning of an echo; its number follows.
const ECHO: char = 'E';
/// An echo arrives right after the answer to its publish, however slow the path is: both connections
/// share the path.
const ECHOES_WITHIN: Duration = Duration::from_millis(500);
/// How long to wait for the end of the subscription.
const FAREWELL: Duration = Duration::from_millis(500);
