//! Wake-ups: a connection of its own, subscribed to the one channel of this client.
//!
//! The channel is subscribed before the first ticket is sent, because a ticket of whom nobody hears is taken out of the line.
//! It ends with the driver, and with the stream: whoever listened without waiting would be given turns that nobody takes.
//!
//! A connection may look alive and carry nothing any more: something on the way forgot it, or the server behind it is not the one
//! that is asked. Nothing is sent to find that out while nothing is amiss. But an answer to a waiter shows when something must have
//! been said that was not heard, and then the client says something to itself and opens another connection if that stays unheard.

use crate::{
    commands::{self, Push},
    config::Prefix,
    connection::Connection,
    dialer::{Dialer, STEADY, jitter},
    tickets::Tickets,
};
use dlock_core::Hint;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use std::{
    fmt,
    future::Future,
    hash::{BuildHasher, RandomState},
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

/// What is pushed to this client, and the task that listens for it.
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
    /// Whether the first attempt to subscribe is over, whatever came of it, and whether all is.
    stage: watch::Sender<Stage>,
    /// The connection ended, or all did.
    changed: Arc<Notify>,
    /// A hint found the stream full.
    missed: AtomicBool,
    /// The last that this client said to itself and heard.
    echo: watch::Sender<u64>,
    /// The stream was asked for twice.
    two: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Tried,
    Over,
}

struct Waiting {
    /// Gone when closed, or when the server lets us not listen.
    hints: Option<mpsc::Sender<Hint>>,
    /// Set, it ends the connection that is listened on.
    gone: Option<Arc<AtomicBool>>,
    doubt: Doubt,
}

/// Whether it is being found out that pushes come, and once more after that.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    No,
    Asked,
    Again,
}

impl Hints {
    /// Begins to listen. Needs a runtime.
    pub(crate) fn new(dialer: Arc<Dialer>, prefix: Prefix) -> Self {
        let (hints, stream) = mpsc::channel(UNREAD);
        let waiting = Waiting {
            hints: Some(hints),
            gone: None,
            doubt: Doubt::No,
        };
        let shared = Arc::new(Shared {
            dialer,
            channel: prefix.channel(number()),
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
        Self {
            shared,
            stream: Mutex::new(Some(stream)),
        }
    }

    /// Resolves when the channel is subscribed, or could not be: then whoever waits only looks.
    pub(crate) async fn ready(&self) {
        self.reaches(Stage::Tried, self.shared.dialer.within())
            .await;
    }

    /// Waits no longer than that: a path that says nothing holds nobody up.
    async fn reaches(&self, wanted: Stage, bound: Duration) {
        let mut stage = self.shared.stage.subscribe();
        let reached = stage.wait_for(|stage| *stage >= wanted);
        drop(tokio::time::timeout(bound, reached).await);
    }

    /// Where this client listens: what its tickets begin with.
    pub(crate) fn channel(&self) -> &str {
        &self.shared.channel
    }

    /// What is kept of this client's tickets.
    pub(crate) fn tickets(&self) -> &Tickets {
        &self.shared.tickets
    }

    /// Finds out whether what is said on this client's channel is heard here, and listens anew if it is not. Once in a look.
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

    /// Whether somebody asked for the stream who could not have it: turns of a second client would be heard by the first,
    /// which hands on what it does not want.
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

    /// Ends the stream, the subscription and its connection. Then nobody waits for a turn that this client would be given.
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

    /// Says something to this client over the connection for commands, and waits until it comes over the one for pushes. Where
    /// it cannot be said, nothing is known. Run twice it is heard twice, which means nothing.
    async fn hears_itself(&self, connection: &Connection) -> bool {
        let mut echo = self.echo.subscribe();
        let number = *echo.borrow() + 1;
        let mut said = redis::cmd("PUBLISH");
        said.arg(&self.channel).arg(format!("{ECHO}{number}"));
        match connection.command(said).await {
            // The server has no subscription of ours, or not this server.
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
                // One of a ticket that nobody waits with is told too: the core hands it on.
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
                let look_in = look_at_end(rest);
                let hint = Hint::First {
                    name,
                    ticket,
                    look_in,
                };
                self.tickets.told(ticket);
                self.emit(&self.waiting(), hint);
            }
            None => match said.and_then(|said| said.strip_prefix(ECHO)?.parse().ok()) {
                Some(number) => drop(self.echo.send_replace(number)),
                None => tracing::debug!("redis: something else was said on a client's channel"),
            },
        }
    }

    /// Listens from now on. Whatever was pushed before is lost.
    fn begin(&self, gap: bool, gone: Arc<AtomicBool>) {
        let mut waiting = self.waiting();
        waiting.gone = Some(gone);
        if gap || self.tickets.len() > 0 {
            self.emit(&waiting, Hint::LookAgain);
        }
        self.tried();
    }

    fn tried(&self) {
        let moved = |stage: &mut Stage| std::mem::replace(stage, Stage::Tried) != Stage::Tried;
        self.stage.send_if_modified(moved);
    }

    /// For the end of the stream; nothing when it has been closed.
    fn sender(&self) -> Option<mpsc::Sender<Hint>> {
        self.waiting().hints.clone()
    }
}

/// A rest is what is left of whole milliseconds, and the last one has to be over too.
pub(crate) fn look_at_end(rest: Duration) -> Duration {
    (rest + Duration::from_millis(1)).min(LOOK)
}

/// Ends the connection that is listened on if nothing comes over it, and rests for a look before it is doubted again.
async fn find_out(shared: Weak<Shared>, connection: Weak<Connection>) {
    loop {
        if let (Some(shared), Some(connection)) = (shared.upgrade(), connection.upgrade()) {
            // While another connection is opened there is nothing to doubt.
            let gone = shared.waiting().gone.clone();
            if let Some(gone) = gone
                && !shared.hears_itself(&connection).await
            {
                tracing::debug!("redis: nothing comes over the connection for wake-ups");
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

/// Keeps a connection until the driver or the stream ends.
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
        strong.waiting().gone = None;
        strong.tried();
        let longer = strong.dialer.longer(pause);
        drop(strong);
        gap = true;
        let refused = error.code() == Some("NOPERM");
        if refused && !std::mem::replace(&mut told, true) {
            tracing::warn!(%error, "redis: may not subscribe, so waiters only look; see the ACL lines in the README of dlock-redis");
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
            // Closed meanwhile.
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

/// One connection's life. `Ok`: the driver or its stream is over.
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
    // Said and not only done, so that whoever waits for it knows that the server has no receiver any more.
    drop(tokio::time::timeout(FAREWELL, native.unsubscribe(channel)).await);
    Ok(())
}

async fn within(dialer: &Dialer, step: impl Future<Output = RedisResult<()>>) -> RedisResult<()> {
    let answer = tokio::time::timeout(dialer.within(), step).await;
    answer.unwrap_or_else(|_| Err(RedisError::from(io::Error::from(io::ErrorKind::TimedOut))))
}

/// What no other client has. From the system's randomness: what `fastrand` begins with are a clock and a thread's number, which two
/// machines started alike may share, and tickets of two clients with one channel would be the same.
fn number() -> u64 {
    RandomState::new().hash_one(())
}

/// Rights are given while a service runs, too.
const REFUSED: Duration = Duration::from_secs(30);
/// The longest time between two looks: what a lost message costs at most.
pub(crate) const LOOK: Duration = Duration::from_secs(2);
/// What a client says to itself begins with this, and a number follows.
const ECHO: char = 'E';
/// Said and answered, it comes at once, however slow the way is: both connections have the same one.
const ECHOES_WITHIN: Duration = Duration::from_millis(500);
/// How long the end of a subscription is waited for.
const FAREWELL: Duration = Duration::from_millis(500);
/// Hints that the core has not read yet. More are one [`Hint::LookAgain`].
const UNREAD: usize = 1_024;
