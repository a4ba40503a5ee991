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
    commands::{self, Push},
    config::Prefix,
    connection::Connection,
    dialer::{Dialer, STEADY, jitter},
    error,
    tickets::Tickets,
};
use dlock_core::driver::{Hint, Result, system_random};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use redis::{Cmd, PushInfo, PushKind, RedisError, RedisResult, Value};
use std::{
    fmt,
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::Instant,
};

/// The notifications of this client, and the task that listens for them.
pub(crate) struct Hints {
    shared: Arc<Shared>,
    stream: Mutex<Option<mpsc::Receiver<Hint>>>,
}

struct Shared {
    dialer: Arc<Dialer>,
    prefix: Prefix,
    channel: String,
    waiting: Mutex<Waiting>,
    tickets: Tickets,
    /// Whether the first attempt to subscribe is over, with any outcome, and whether listening is.
    stage: watch::Sender<Stage>,
    /// The connection for notifications ended, or the driver or the stream did.
    changed: Arc<Notify>,
    /// A notification found the stream full.
    missed: AtomicBool,
    /// The last echo that this client sent and received.
    echo: watch::Sender<u64>,
    /// The stream was requested twice.
    two: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Tried,
    Over,
}

struct Waiting {
    /// `None` once closed.
    hints: Option<mpsc::Sender<Hint>>,
    /// When set, it ends the connection that listens.
    gone: Option<Arc<AtomicBool>>,
    /// The server's answer where the user may not subscribe.
    refused: Option<RedisError>,
    doubt: Doubt,
}

/// Whether a check of the notifications is running, and whether another one follows it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    No,
    Asked,
    Again,
}

impl Hints {
    /// Starts to listen. Needs a runtime.
    pub(crate) fn new(dialer: Arc<Dialer>, prefix: Prefix) -> Result<Self> {
        // Two clients with one channel would have the same tickets.
        let channel = prefix.channel(system_random()?);
        let (hints, stream) = mpsc::channel(UNREAD);
        let waiting = Waiting {
            hints: Some(hints),
            gone: None,
            refused: None,
            doubt: Doubt::No,
        };
        let shared = Arc::new(Shared {
            dialer,
            channel,
            prefix,
            waiting: Mutex::new(waiting),
            tickets: Tickets::default(),
            stage: watch::Sender::new(Stage::New),
            changed: Arc::default(),
            missed: AtomicBool::new(false),
            echo: watch::Sender::new(0),
            two: AtomicBool::new(false),
        });
        let (weak, changed, stage) = (
            Arc::downgrade(&shared),
            shared.changed.clone(),
            shared.stage.clone(),
        );
        tokio::spawn(async move {
            listen(weak, changed).await;
            stage.send_replace(Stage::Over);
        });
        Ok(Self {
            shared,
            stream: Mutex::new(Some(stream)),
        })
    }

    /// Resolves when the subscription succeeded or failed, and the user has the rights that turns need.
    pub(crate) async fn ready(&self, connection: &Connection) -> Result<()> {
        self.reaches(Stage::Tried, self.shared.dialer.within())
            .await;
        self.allowed()?;
        // Without the right to publish, this client would take every waiter for dead: each release would
        // empty the queue.
        connection.command(self.shared.echo_of(0)).await.map(drop)
    }

    /// An error where the user may not subscribe. Without notifications a ticket is removed from the
    /// queue at each release, so all others would pass its client again and again.
    pub(crate) fn allowed(&self) -> Result<()> {
        match &self.shared.waiting().refused {
            Some(cause) => Err(error::may_not_subscribe(&self.shared.prefix, cause.clone())),
            None => Ok(()),
        }
    }

    /// Waits for at most `bound`: a silent path must not block the caller.
    async fn reaches(&self, wanted: Stage, bound: Duration) {
        let mut stage = self.shared.stage.subscribe();
        let reached = stage.wait_for(|stage| *stage >= wanted);
        drop(tokio::time::timeout(bound, reached).await);
    }

    /// The channel of this client; its tickets begin with it.
    pub(crate) fn channel(&self) -> &str {
        &self.shared.channel
    }

    /// The client's state of its tickets.
    pub(crate) fn tickets(&self) -> &Tickets {
        &self.shared.tickets
    }

    /// Checks that messages on this client's channel arrive here, and subscribes anew if they do not. At
    /// most once a poll interval.
    pub(crate) fn doubt(&self, connection: &Arc<Connection>) {
        let mut waiting = self.shared.waiting();
        let before = waiting.doubt;
        waiting.doubt = match before {
            Doubt::No => Doubt::Asked,
            Doubt::Asked | Doubt::Again => Doubt::Again,
        };
        drop(waiting);
        if before == Doubt::No {
            let asked = Arc::downgrade(connection);
            connection.spawn(find_out(Arc::downgrade(&self.shared), asked));
        }
    }

    /// Whether the stream was requested a second time. The first client would receive the turns of the
    /// second, and hand on those that it does not know.
    pub(crate) fn serve_two(&self) -> bool {
        self.shared.two.load(Ordering::Relaxed)
    }

    pub(crate) fn stream(&self) -> BoxStream<'static, Hint> {
        let taken = self
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(hints) = taken else {
            self.shared.two.store(true, Ordering::Relaxed);
            return stream::empty().boxed();
        };
        let shared = Arc::downgrade(&self.shared);
        stream::unfold((hints, shared), |(mut hints, shared)| async move {
            // Dropped notifications date from when the stream was full, so this is read before it runs
            // dry.
            let missed = shared
                .upgrade()
                .is_some_and(|shared| shared.missed.swap(false, Ordering::Relaxed));
            let hint = if missed {
                Hint::Resync
            } else {
                hints.recv().await?
            };
            Some((hint, (hints, shared)))
        })
        .boxed()
    }

    /// Ends the stream, the subscription and its connection. Then no lock waits for a turn of this
    /// client.
    pub(crate) async fn close(&self) {
        self.shared.mute();
        self.reaches(Stage::Over, FAREWELL).await;
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.shared.mute();
    }
}

impl fmt::Debug for Hints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missed = self.shared.missed.load(Ordering::Relaxed);
        let missed = if missed { ", some missed" } else { "" };
        write!(f, "Hints({} tickets{missed})", self.tickets().len())
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mute(&self) {
        self.waiting().hints = None;
        self.changed.notify_one();
    }

    fn emit(&self, waiting: &Waiting, hint: Hint) {
        if let Some(hints) = &waiting.hints
            && hints.try_send(hint).is_err()
        {
            self.missed.store(true, Ordering::Relaxed);
        }
    }

    /// Publishes an echo over the command connection and waits until it arrives over the one for
    /// notifications. When the publish fails, nothing is known. Running twice is harmless: a second echo
    /// has no meaning.
    async fn hears_itself(&self, connection: &Connection) -> bool {
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
        let said = std::str::from_utf8(message).ok();
        match said.and_then(commands::read_push) {
            Some(Push::Turn { ticket, record }) => {
                let Some(name) = self.prefix.name(record) else {
                    return;
                };
                self.tickets.turned(ticket);
                // A turn of a ticket without a waiting task is reported too: the core hands it on.
                self.emit(&self.waiting(), Hint::Turn { name, ticket });
            }
            Some(Push::First {
                ticket,
                rest,
                record,
            }) => {
                let Some(name) = self.prefix.name(record) else {
                    return;
                };
                let poll_in = look_at_end(rest);
                let hint = Hint::First {
                    name,
                    ticket,
                    poll_in,
                };
                self.tickets.told(ticket);
                self.emit(&self.waiting(), hint);
            }
            None => match said.and_then(|said| said.strip_prefix(ECHO)?.parse().ok()) {
                Some(number) => drop(self.echo.send_replace(number)),
                None => tracing::debug!("redis: unknown message on a client's channel"),
            },
        }
    }

    /// The subscription is in place. All earlier notifications are lost.
    fn begin(&self, gap: bool, gone: Arc<AtomicBool>) {
        let mut waiting = self.waiting();
        waiting.gone = Some(gone);
        waiting.refused = None;
        if gap || self.tickets.len() > 0 {
            self.emit(&waiting, Hint::Resync);
        }
        self.tried();
    }

    /// The subscription is gone; `refused` is the answer of a server that does not allow it.
    fn unheard(&self, refused: Option<RedisError>) {
        let mut waiting = self.waiting();
        waiting.gone = None;
        waiting.refused = refused;
        drop(waiting);
        self.tried();
    }

    fn tried(&self) {
        let moved = |stage: &mut Stage| std::mem::replace(stage, Stage::Tried) != Stage::Tried;
        self.stage.send_if_modified(moved);
    }

    /// To see the end of the stream; `None` once it is closed.
    fn sender(&self) -> Option<mpsc::Sender<Hint>> {
        self.waiting().hints.clone()
    }
}

/// The remaining time is in whole milliseconds, rounded down, so one more has to pass.
pub(crate) fn look_at_end(rest: Duration) -> Duration {
    (rest + Duration::from_millis(1)).min(LOOK)
}

/// Ends the connection that listens if no echo arrives over it. Then pauses for a poll interval before
/// the next check.
async fn find_out(shared: Weak<Shared>, connection: Weak<Connection>) {
    loop {
        if let (Some(shared), Some(connection)) = (shared.upgrade(), connection.upgrade()) {
            // While another connection is being opened there is nothing to check.
            let gone = shared.waiting().gone.clone();
            if let Some(gone) = gone
                && !shared.hears_itself(&connection).await
            {
                tracing::debug!("redis: the connection for wake-ups carries nothing");
                gone.store(true, Ordering::SeqCst);
                shared.changed.notify_one();
            }
        }
        tokio::time::sleep(LOOK).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut waiting = shared.waiting();
        if waiting.doubt != Doubt::Again {
            waiting.doubt = Doubt::No;
            return;
        }
        waiting.doubt = Doubt::Asked;
    }
}

/// Keeps one subscription alive until the driver or the stream ends.
async fn listen(shared: Weak<Shared>, changed: Arc<Notify>) {
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
        strong.unheard(refused.then(|| error.clone()));
        let longer = strong.dialer.longer(pause);
        drop(strong);
        gap = true;
        if refused && !std::mem::replace(&mut told, true) {
            tracing::warn!(%error, "redis: the user may not subscribe, so acquires that wait fail; see the ACL lines in the README of dlock-redis");
        }
        tracing::debug!(%error, "redis: the connection for wake-ups ended");
        pause = match () {
            () if refused => REFUSED,
            () if began.elapsed() > STEADY => Duration::ZERO,
            () => longer,
        };
        let again = tokio::time::sleep(jitter(pause));
        let mut again = pin!(again);
        loop {
            // Closed during the pause.
            if shared.upgrade().is_none_or(|it| it.sender().is_none()) {
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
async fn follow(shared: &Weak<Shared>, changed: &Notify, gap: bool) -> RedisResult<()> {
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
    let subscribed = within(&dialer, native.subscribe(&channel)).await;
    dialer.tried(subscribed.is_ok());
    subscribed?;
    if let Some(strong) = shared.upgrade() {
        strong.begin(gap, gone.clone());
    }
    while let Some(hints) = shared.upgrade().and_then(|shared| shared.sender()) {
        if gone.load(Ordering::SeqCst) {
            return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
        }
        tokio::select! {
            () = changed.notified() => {}
            () = hints.closed() => break,
        }
    }
    // An explicit unsubscribe, so that a waiting `close` knows that the server has no receiver any more.
    drop(tokio::time::timeout(FAREWELL, native.unsubscribe(channel)).await);
    Ok(())
}

async fn within(dialer: &Dialer, step: impl Future<Output = RedisResult<()>>) -> RedisResult<()> {
    let answer = tokio::time::timeout(dialer.within(), step).await;
    answer.unwrap_or_else(|_| Err(RedisError::from(io::Error::from(io::ErrorKind::TimedOut))))
}

/// The pause after a refusal: rights can be granted while a service runs.
const REFUSED: Duration = Duration::from_secs(5);
/// The longest poll interval: the most that a lost notification costs.
pub(crate) const LOOK: Duration = Duration::from_secs(2);
/// The beginning of an echo; its number follows.
const ECHO: char = 'E';
/// An echo arrives right after the answer to its publish, however slow the path is: both connections
/// share the path.
const ECHOES_WITHIN: Duration = Duration::from_millis(500);
/// How long to wait for the end of the subscription.
const FAREWELL: Duration = Duration::from_millis(500);
/// Notifications that the core has not read yet. Further ones become one [`Hint::Resync`].
const UNREAD: usize = 1_024;
