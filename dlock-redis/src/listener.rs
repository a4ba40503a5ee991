//! Wake-ups: listens on this client's one channel, over a connection of its own.
//! Notifications hand a lock to a waiter without polling.
//!
//! The channel is subscribed before the first ticket is sent, because a ticket without a receiver is
//! removed from the queue. The subscription ends with the driver, and with the stream: a client that
//! listened without waiting would be given turns that no task takes.
//!
//! A connection may look alive and carry nothing any more: a device on the path forgot it, or it leads
//! to another server than the requests. The client sends nothing to detect that without a suspicion. An
//! answer to a waiter shows when a notification must have been missed. Then the client publishes an echo
//! to its own channel, and opens another connection if the echo does not arrive.

use crate::{
    commands, config::Prefix, connection::Connection, dialer::Dialer, error, tickets::Tickets,
};
use dlock_core::driver::{Result, WakeUp, kit::WakeUps, system_random};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use redis::{Cmd, PushInfo, PushKind, RedisError, RedisResult, Value};
use std::{
    fmt, io,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// The notifications of this client, and the task that listens for them.
pub(crate) struct Listener {
    dialer: Arc<Dialer>,
    prefix: Prefix,
    /// The channel of this client; its tickets begin with it.
    pub(crate) channel: String,
    listening: Mutex<Listening>,
    pub(crate) inbox: Inbox,
    pub(crate) tickets: Tickets,
    /// Whether the first attempt to subscribe is over, with any outcome, and whether listening is.
    stage: watch::Sender<Stage>,
    /// The connection for notifications ended, or the driver or the stream did.
    changed: Arc<Notify>,
    /// The last echo that this client sent and received.
    echo: watch::Sender<u64>,
}

/// Where the notifications of a client arrive, from one server or from all masters of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    channel: String,
    wake_ups: Arc<WakeUps>,
    /// The stream was requested twice. The first client would receive the turns of the second, and hand
    /// on those that it does not know.
    two: Arc<AtomicBool>,
}

impl Inbox {
    pub(crate) fn new(prefix: &Prefix) -> Result<Self> {
        Ok(Self {
            // Two clients with one channel would have the same tickets.
            channel: prefix.channel(system_random()?),
            wake_ups: Arc::default(),
            two: Arc::default(),
        })
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.wake_ups.take().unwrap_or_else(|| {
            self.two.store(true, Ordering::Relaxed);
            stream::empty().boxed()
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Tried,
    Over,
}

#[derive(Default)]
struct Listening {
    /// When set, it ends the connection that listens.
    gone: Option<Arc<AtomicBool>>,
    /// The server's answer where the user may not subscribe.
    refused: Option<RedisError>,
    /// A check of the notifications is running, and whether another one follows it.
    doubt: Option<bool>,
}

impl Listener {
    /// Starts to listen. Needs a runtime.
    pub(crate) fn new(dialer: Arc<Dialer>, prefix: Prefix, inbox: Inbox) -> Arc<Self> {
        // The echoes of the listeners of a cluster arrive at all of them: their numbers must not meet.
        let echo = match dialer.slots {
            Some(_) => fastrand::u64(1 << 32..1 << 62),
            None => 0,
        };
        let wake_ups = Arc::new(Self {
            dialer,
            channel: inbox.channel.clone(),
            inbox,
            prefix,
            listening: Mutex::default(),
            tickets: Tickets::default(),
            stage: watch::Sender::new(Stage::New),
            changed: Arc::default(),
            echo: watch::Sender::new(echo),
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
        connection.command(self.echo_of(0)).await.map(drop)
    }

    /// An error where the user may not subscribe. Without notifications a ticket is removed from the
    /// queue at each release, so all others would pass its client again and again. Also an error where
    /// two clients use this driver.
    pub(crate) fn allowed(&self) -> Result<()> {
        if self.inbox.two.load(Ordering::Relaxed) {
            return Err(error::two_clients());
        }
        match &self.listening().refused {
            Some(cause) => Err(error::may_not_subscribe(&self.prefix, cause.clone())),
            None => Ok(()),
        }
    }

    /// Waits for at most `bound`: a silent path must not block the caller.
    async fn reaches(&self, wanted: Stage, bound: Duration) {
        let mut stage = self.stage.subscribe();
        let reached = stage.wait_for(|stage| *stage >= wanted);
        drop(tokio::time::timeout(bound, reached).await);
    }

    /// Checks that messages on this client's channel arrive here, and subscribes anew if they do not. At
    /// most once a poll interval.
    pub(crate) fn doubt(self: &Arc<Self>, connection: &Arc<Connection>) {
        let mut listening = self.listening();
        let runs = listening.doubt.is_some();
        listening.doubt = Some(runs);
        drop(listening);
        if !runs {
            let asked = Arc::downgrade(connection);
            connection.spawn(check_notifications(Arc::downgrade(self), asked));
        }
    }

    /// Ends the stream, the subscription and its connection. Then no lock waits for a turn of this
    /// client.
    pub(crate) async fn close(&self) {
        self.inbox.wake_ups.close();
        self.changed.notify_one();
        self.reaches(Stage::Over, FAREWELL).await;
    }

    fn listening(&self) -> MutexGuard<'_, Listening> {
        self.listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes an echo over the command connection and waits until it arrives over the one for
    /// notifications. When the publish fails, nothing is known. Running twice is harmless: a second echo
    /// has no meaning.
    async fn hears_itself(&self, connection: &Arc<Connection>) -> bool {
        let mut echo = self.echo.subscribe();
        let number = *echo.borrow() + 1;
        match connection.command(self.echo_of(number)).await {
            // The server has no subscription of this client, or the subscription is on another server.
            Ok(Value::Int(0)) => false,
            Ok(_) => {
                let heard = echo.wait_for(|heard| *heard >= number);
                tokio::time::timeout(ECHOES_WITHIN, heard).await.is_ok()
            }
            Err(_) => true,
        }
    }

    fn echo_of(&self, number: u64) -> Cmd {
        let mut said = redis::cmd("PUBLISH");
        said.arg(&self.channel).arg(format!("{ECHO}{number}"));
        said
    }

    /// Runs inside the connection's task.
    fn pushed(&self, push: &PushInfo) {
        if push.kind != PushKind::Message {
            return;
        }
        let Some(Value::BulkString(message)) = push.data.get(1) else {
            return;
        };
        let said = std::str::from_utf8(message).unwrap_or_default();
        let Some(push) = commands::read_push(said) else {
            return match said.strip_prefix(ECHO).map(str::parse::<u64>) {
                Some(Ok(number)) => {
                    self.echo.send_if_modified(|last| {
                        let is_next = number == *last + 1;
                        *last += u64::from(is_next);
                        is_next
                    });
                }
                _ => tracing::debug!("redis: unknown message on a client's channel"),
            };
        };
        let (Some(name), ticket) = (self.prefix.name(push.record), push.ticket) else {
            return;
        };
        // The masters of a cluster push to each other's subscribers.
        let slots = self.dialer.slots.as_ref();
        if slots.is_some_and(|slots| !slots.is_at(push.record, self.dialer.at())) {
            return;
        }
        // A turn of a ticket without a waiting task is reported too: the core hands it on.
        self.tickets.told(ticket, push.first_for.is_none());
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

    /// An attempt to subscribe is over, or a subscription. `gone` ends the connection of one that is in
    /// place; `refused` is the answer of a server that does not allow it.
    fn tried(&self, gone: Option<Arc<AtomicBool>>, refused: Option<RedisError>) {
        let mut listening = self.listening();
        (listening.gone, listening.refused) = (gone, refused);
        drop(listening);
        let moved = |stage: &mut Stage| std::mem::replace(stage, Stage::Tried) != Stage::Tried;
        self.stage.send_if_modified(moved);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Listener({} tickets), {:?}",
            self.tickets.len(),
            self.inbox
        )
    }
}

/// The remaining time is in whole milliseconds, rounded down, so one more has to pass.
pub(crate) fn poll_at_end(rest: Duration) -> Duration {
    (rest + Duration::from_millis(1)).min(POLL_INTERVAL)
}

/// Ends the connection that listens if no echo arrives over it. Then pauses for a poll interval before
/// the next check.
async fn check_notifications(shared: Weak<Listener>, connection: Weak<Connection>) {
    loop {
        if let (Some(shared), Some(connection)) = (shared.upgrade(), connection.upgrade()) {
            // While another connection is being opened there is nothing to check.
            let gone = shared.listening().gone.clone();
            if let Some(gone) = gone
                && !shared.hears_itself(&connection).await
            {
                tracing::debug!("redis: the connection for wake-ups carries nothing");
                gone.store(true, Ordering::SeqCst);
                shared.changed.notify_one();
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut listening = shared.listening();
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
            if shared
                .upgrade()
                .is_none_or(|it| it.inbox.wake_ups.is_closed())
            {
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
    let (dialer, channel) = (strong.dialer.clone(), strong.channel.clone());
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
        .await
        .inspect_err(|_| dialer.tried(false))?;
    let subscribed = tokio::time::timeout(dialer.within(), native.subscribe(&channel)).await;
    let subscribed =
        subscribed.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
    dialer.tried(subscribed.is_ok());
    subscribed?;
    if let Some(strong) = shared.upgrade() {
        strong.tried(Some(gone.clone()), None);
        // All earlier notifications are lost.
        if gap || strong.tickets.len() > 0 {
            strong.inbox.wake_ups.send(WakeUp::Resync);
        }
    }
    while let Some(shared) = shared.upgrade().filter(|it| !it.inbox.wake_ups.is_closed()) {
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
    drop(tokio::time::timeout(FAREWELL, native.unsubscribe(channel)).await);
    Ok(())
}

/// The pause after a refusal: rights can be granted while a service runs.
const REFUSED: Duration = Duration::from_secs(5);
/// The longest poll interval: the most that a lost notification costs.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The beginning of an echo; its number follows.
const ECHO: char = 'E';
/// An echo arrives right after the answer to its publish, however slow the path is: both connections
/// share the path.
const ECHOES_WITHIN: Duration = Duration::from_millis(500);
/// How long to wait for the end of the subscription.
const FAREWELL: Duration = Duration::from_millis(500);
