//! Connection list: opens the connections of a store's client, lends each to one request at a time, and
//! discards those in an unknown state.
//!
//! A client's own pool pings at each checkout and return, which costs much of its throughput. It also hands
//! out a connection whose last answer was never read. Here a statement whose answer was not fully read closes
//! its connection, since the rest of the answer may still arrive on it. The connection returned last is used
//! first, so a quiet client keeps one connection warm and the others end. Renewals have permits and
//! connections of their own and never wait behind waiters.

pub(super) mod dialer;

pub use dialer::{ConnectionOutcome, Dialed, Dialer};

use super::{
    answer_limit::{AnswerLimit, Timer},
    backoff::Backoff,
    record_store::{Call, Class},
    server_clock::ServerClock,
};
use crate::{
    clock::{Clock, Instant},
    driver::Result,
    error::{DriverError, Effect, ErrorKind, RetryClass},
};
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    task::JoinHandle,
};

/// All connections of a driver.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::driver::{
///     DriverError, Result,
///     kit::{ConnectionOutcome, Connections, Dialed, Dialer, Failure},
/// };
/// use std::{io, time::Duration};
///
/// /// Opens connections that echo; a real one keeps the native client's options.
/// struct Echoes;
///
/// impl Dialer for Echoes {
///     type Session = String;
///     type Error = io::Error;
///
///     async fn dial(&self) -> Result<Dialed<String>> {
///         Ok(Dialed { session: String::new(), time: Duration::from_secs(1_700_000_000) })
///     }
///
///     async fn time(&self, _: &mut String) -> io::Result<Duration> {
///         Ok(Duration::from_secs(1_700_000_000))
///     }
///
///     fn failure(&self, error: io::Error, _ended: bool) -> Failure<ConnectionOutcome> {
///         let error = DriverError::unanswered("the server did not answer").with_source(error);
///         Failure { error, link: ConnectionOutcome::Closed }
///     }
///
///     fn silent() -> io::Error {
///         io::ErrorKind::TimedOut.into()
///     }
///
///     async fn hang_up(&self, _: String) {}
/// }
///
/// let all = Connections::new(Echoes, 4, Duration::from_secs(5));
/// let mut lent = all.lend(all.default_call()).await?;
/// let limit = lent.limit();
/// let session = lent.session();
/// let answer = limit.of(async {
///     session.push_str("hello");
///     Ok(session.len())
/// });
/// let answer = answer.await;
/// assert_eq!(lent.settle(answer)?, 5);
/// # Ok(()) }
/// ```
pub struct Connections<D: Dialer> {
    dialer: Arc<D>,
    within: Duration,
    clock: Clock,
    trouble: Mutex<Trouble>,
    /// Grows with each failure that closes all connections.
    age: AtomicU64,
    work: List<D>,
    renewals: List<D>,
    closed: AtomicBool,
}

/// The current run of failed attempts to connect, shared by all tasks.
#[derive(Default)]
struct Trouble {
    backoff: Option<Backoff>,
    until: Instant,
    why: Option<Arc<str>>,
}

/// One open connection.
struct Link<D: Dialer> {
    session: D::Session,
    age: u64,
    server: ServerClock,
    /// When the server's time was read last.
    timed: Instant,
    used: Instant,
    timer: Arc<Timer>,
}

/// The connections for one purpose.
struct List<D: Dialer> {
    permits: Semaphore,
    idle: Mutex<Vec<Link<D>>>,
    /// Notified when a connection was returned.
    back: Notify,
    /// One that a request began to open and had no time to wait for. The next request does, so that those whose time is
    /// shorter than a log-in get a connection in the end.
    dialing: Mutex<Option<JoinHandle<Result<Link<D>>>>>,
}

impl<D: Dialer> List<D> {
    fn new(most: usize) -> Self {
        Self {
            permits: Semaphore::new(most),
            idle: Mutex::default(),
            back: Notify::new(),
            dialing: Mutex::default(),
        }
    }

    /// Takes the connection used last, and drops those idle for so long that the server or a firewall is
    /// about to end them.
    fn pop(&self, now: Instant) -> Option<Link<D>> {
        let mut idle = self.idle.lock();
        let is_old = |link: &&Link<D>| now.since(link.used) > IDLE;
        let old = idle.iter().take_while(is_old).count();
        drop(idle.drain(..old));
        idle.pop()
    }

    /// Returns a connection, unless all were closed, or all of its age: what closes them takes out the idle
    /// ones after saying so.
    fn push(&self, link: Link<D>, closed: &AtomicBool, age: &AtomicU64) {
        let mut idle = self.idle.lock();
        if !closed.load(Ordering::Relaxed) && link.age == age.load(Ordering::Relaxed) {
            idle.push(link);
            self.back.notify_one();
        }
    }
}

impl<D: Dialer> Connections<D> {
    /// An empty list. `most`: how many requests that are no renewals may have a connection at the same time.
    /// `within`: how long one attempt to connect may take. A connection lives in the runtime of the request that began to
    /// open it: so requests run in tasks of the client, as those of a
    /// [`RecordDriver`](super::RecordDriver) do.
    #[must_use]
    pub fn new(dialer: D, most: usize, within: Duration) -> Self {
        Self {
            dialer: Arc::new(dialer),
            within,
            clock: Clock::boot(),
            trouble: Mutex::default(),
            age: AtomicU64::new(0),
            work: List::new(most),
            renewals: List::new(RENEWALS),
            closed: AtomicBool::new(false),
        }
    }

    /// What opens the connections.
    pub fn dialer(&self) -> &Arc<D> {
        &self.dialer
    }

    /// The clock of the give-ups.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// What a request without a give-up of its own may use.
    pub fn default_call(&self) -> Call {
        Call {
            class: Class::Work,
            give_up: self.clock.now() + PATIENCE,
        }
    }

    /// Opens the first connection: one attempt, so that a program that connects at its start learns of a failure.
    ///
    /// # Errors
    /// When the server cannot be reached or used.
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened.
    pub async fn first(&self) -> Result<Lent<'_, D>> {
        let permit = self.permit(&self.work, self.clock.now() + self.within);
        let permit = permit.await?;
        let link = self.dial().await?;
        Ok(self.lent(&self.work, link, self.clock.now(), permit))
    }

    /// Waits for a permit and a connection, at most until the call's give-up.
    ///
    /// # Errors
    /// Of effect none: the request was not sent.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn lend(&self, call: Call) -> Result<Lent<'_, D>> {
        let list = match call.class {
            Class::Acquire | Class::Work => &self.work,
            Class::Renewal => &self.renewals,
        };
        // The rare waits are boxed, to keep the future of each request small.
        let permit = match list.permits.try_acquire() {
            Ok(permit) => permit,
            Err(_) => Box::pin(self.permit(list, call.give_up)).await?,
        };
        let now = self.clock.now();
        let link = match self.idle(list, now)? {
            Some(link) => link,
            None => Box::pin(self.link(list, call.give_up)).await?,
        };
        let is_known = now.since(link.timed) <= TIMED;
        let mut lent = self.lent(list, link, now, permit);
        if !is_known {
            Box::pin(lent.know_the_time()).await?;
        }
        Ok(lent)
    }

    fn lent<'a>(
        &'a self,
        list: &'a List<D>,
        link: Link<D>,
        began: Instant,
        permit: SemaphorePermit<'a>,
    ) -> Lent<'a, D> {
        Lent {
            all: self,
            list,
            link: Some(link),
            began,
            unsettled: false,
            ended: None,
            _permit: permit,
        }
    }

    async fn permit<'a>(&self, list: &'a List<D>, give_up: Instant) -> Result<SemaphorePermit<'a>> {
        tokio::select! {
            permit = list.permits.acquire() => permit.map_err(|_| closed()),
            () = self.clock.sleep_until(give_up) => Err(busy()),
        }
    }

    fn idle(&self, list: &List<D>, now: Instant) -> Result<Option<Link<D>>> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        Ok(list.pop(now))
    }

    async fn link(&self, list: &List<D>, give_up: Instant) -> Result<Link<D>> {
        loop {
            let now = self.clock.now();
            if let Some(link) = self.idle(list, now)? {
                return Ok(link);
            }
            let (until, why) = {
                let trouble = self.trouble.lock();
                (trouble.until, trouble.why.clone())
            };
            if now >= give_up {
                return Err(unreachable(why.as_deref()));
            }
            if until > now {
                // A server that has no room for one more connection serves over those of the other list.
                let both = [&self.work, &self.renewals];
                if let Some(link) = both.into_iter().find_map(|list| list.pop(now)) {
                    return Ok(link);
                }
                tokio::select! {
                    () = self.work.back.notified() => {}
                    () = self.renewals.back.notified() => {}
                    () = self.clock.sleep_until(until.min(give_up)) => {}
                }
                continue;
            }
            let begun = list.dialing.lock().take();
            let is_begun = begun.is_some();
            let mut dialing = begun.unwrap_or_else(|| tokio::spawn(self.dial()));
            let dialled = tokio::select! {
                dialled = &mut dialing => dialled,
                () = self.clock.sleep_until(give_up) => {
                    list.dialing.lock().get_or_insert(dialing);
                    return Err(unreachable(why.as_deref()));
                }
            };
            match dialled.unwrap_or_else(|_| Err(unreachable(None))) {
                Ok(link) if self.is_stale(&link) => {}
                Ok(link) => {
                    *self.trouble.lock() = Trouble::default();
                    return Ok(link);
                }
                // It may have failed long ago.
                Err(_) if is_begun => {}
                Err(error) if error.retry() == RetryClass::Never => return Err(error),
                Err(error) => self.failed(&error),
            }
        }
    }

    /// Whether a connection was opened before all were closed, or so long ago that the server may have ended it.
    fn is_stale(&self, link: &Link<D>) -> bool {
        link.age != self.age.load(Ordering::Relaxed) || self.clock.now().since(link.used) > IDLE
    }

    fn dial(&self) -> impl Future<Output = Result<Link<D>>> + Send + 'static {
        let (dialer, clock, within) = (Arc::clone(&self.dialer), self.clock.clone(), self.within);
        let age = self.age.load(Ordering::Relaxed);
        async move {
            let dialled = tokio::time::timeout(within, dialer.dial()).await;
            let Dialed { session, time } = match dialled {
                Ok(dialled) => dialled?,
                Err(_) => return Err(unreachable(Some("no answer while connecting"))),
            };
            let (server, now) = (ServerClock::new(), clock.now());
            server.observe(time, now);
            Ok(Link {
                session,
                age,
                server,
                timed: now,
                used: now,
                timer: Arc::default(),
            })
        }
    }

    /// Records a failure and delays the next attempt: each failure doubles the pause.
    fn failed(&self, error: &DriverError) {
        let now = self.clock.now();
        let mut trouble = self.trouble.lock();
        if now >= trouble.until {
            let first = || Backoff::new(SHORTEST_PAUSE, LONGEST_PAUSE);
            trouble.until = now + trouble.backoff.get_or_insert_with(first).pause();
        }
        trouble.why = Some(error.chain().into());
    }

    /// Stops lending connections. Idle ones are closed now, and those in use when they are returned.
    ///
    /// # Cancel safety
    /// Dropping the future leaves some idle connections open until the list is dropped; none is lent.
    pub async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for list in [&self.work, &self.renewals] {
            list.permits.close();
            list.back.notify_waiters();
            drop(list.dialing.lock().take().inspect(JoinHandle::abort));
            let idle = std::mem::take(&mut *list.idle.lock());
            for link in idle {
                // A connection that cannot say goodbye is closed by being dropped.
                let hanging_up = self.dialer.hang_up(link.session);
                drop(tokio::time::timeout(GOODBYE, hanging_up).await);
            }
        }
    }
}

// A dialer has the password.
impl<D: Dialer> fmt::Debug for Connections<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = (self.work.idle.lock().len(), self.renewals.idle.lock().len());
        f.debug_struct("Connections")
            .field("idle", &idle.0)
            .field("idle_for_renewals", &idle.1)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

/// A connection lent to one request. It goes back to the list on drop, unless a statement was sent whose
/// answer was not read.
pub struct Lent<'a, D: Dialer> {
    all: &'a Connections<D>,
    list: &'a List<D>,
    /// `None`: the connection was discarded.
    link: Option<Link<D>>,
    /// When the connection was lent.
    began: Instant,
    /// A statement was sent and its answer was not fully read.
    unsettled: bool,
    /// Whether a statement was ended, for servers without a limit of their own.
    ended: Option<Arc<AtomicBool>>,
    _permit: SemaphorePermit<'a>,
}

impl<D: Dialer> Lent<'_, D> {
    /// The connection for one statement. It must run under [`limit`](Self::limit), and its answer must go to
    /// [`settle`](Self::settle).
    ///
    /// # Panics
    /// After an error that closed the connection, or [`discard`](Self::discard).
    pub fn session(&mut self) -> &mut D::Session {
        self.unsettled = true;
        let link = self.link.as_mut();
        let link =
            link.expect("it begins with a connection, and ends with the error that takes it away");
        &mut link.session
    }

    /// The time limit for one statement.
    pub fn limit(&mut self) -> AnswerLimit<D> {
        let link = self.link.as_ref();
        let endless = link.and_then(|link| D::endless(&link.session));
        let end = endless.map(|id| {
            let ended = Arc::clone(self.ended.get_or_insert_default());
            (Arc::clone(&self.all.dialer), id, ended)
        });
        AnswerLimit {
            timer: link.map(|link| Arc::clone(&link.timer)).unwrap_or_default(),
            end,
        }
    }

    /// Classifies the statement's answer, and discards connections where the error requires it.
    ///
    /// # Errors
    /// What [`Dialer::failure`] makes of the error.
    pub fn settle<T>(&mut self, answer: Result<T, D::Error>) -> Result<T> {
        let error = match answer {
            Ok(answer) => {
                self.unsettled = false;
                return Ok(answer);
            }
            Err(error) => error,
        };
        let failure = self.all.dialer.failure(error, self.was_ended());
        match failure.link {
            ConnectionOutcome::Kept => self.unsettled = false,
            ConnectionOutcome::Closed => self.discard(),
            ConnectionOutcome::AllClosed => {
                self.discard();
                self.all.age.fetch_add(1, Ordering::Relaxed);
                for list in [&self.all.work, &self.all.renewals] {
                    list.idle.lock().clear();
                }
            }
        }
        Err(failure.error)
    }

    fn was_ended(&self) -> bool {
        let ended = self.ended.as_ref();
        ended.is_some_and(|ended| ended.load(Ordering::Relaxed))
    }

    /// Closes the connection instead of giving it back.
    pub fn discard(&mut self) {
        self.link = None;
    }

    /// Records the server's time from an answer.
    pub fn observe_time(&mut self, server: Duration) {
        let now = self.all.clock.now();
        if let Some(link) = &mut self.link {
            link.server.observe(server, now);
            link.timed = now;
        }
    }

    /// The server's time at `give_up`, in microseconds. A request carries it so that it takes nothing when it
    /// runs later.
    #[must_use]
    pub fn not_after(&self, give_up: Instant) -> u64 {
        let known = self.link.as_ref().and_then(|link| link.server.at(give_up));
        u64::try_from(known.unwrap_or_default().as_micros()).unwrap_or(u64::MAX)
    }

    /// Reads the server's time, which is needed when no answer has told it for a while, because clocks drift apart.
    async fn know_the_time(&mut self) -> Result<()> {
        let (dialer, limit) = (&self.all.dialer, self.limit());
        let time = limit.of(dialer.time(self.session())).await;
        let time = self.settle(time);
        // The request itself was not sent yet.
        self.observe_time(time.map_err(|error| error.with_effect(Effect::None))?);
        Ok(())
    }
}

impl<D: Dialer> Drop for Lent<'_, D> {
    fn drop(&mut self) {
        let usable = !self.unsettled && !self.was_ended();
        if let Some(mut link) = self.link.take()
            && usable
        {
            // An early time is safe here, and saves a reading of the clock.
            link.used = self.began;
            self.list.push(link, &self.all.closed, &self.all.age);
        }
    }
}

impl<D: Dialer> fmt::Debug for Lent<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent")
            .field("unsettled", &self.unsettled)
            .finish_non_exhaustive()
    }
}

fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver was closed")
}

fn busy() -> DriverError {
    DriverError::unavailable(
        "all connections were busy: raise dlock.connections, or see why the server answers slowly",
    )
}

fn unreachable(why: Option<&str>) -> DriverError {
    DriverError::unavailable(match why {
        Some(why) => format!("the server could not be reached: {why}"),
        None => "the server could not be reached".to_owned(),
    })
}

/// Renewals are batched, so one connection is enough while the server answers; the others are for when it is slow.
const RENEWALS: usize = 4;
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a connection is kept without use.
const IDLE: Duration = Duration::from_secs(60);
/// Two clocks that differ by 100 ppm drift apart by 3 ms in this time.
const TIMED: Duration = Duration::from_secs(30);
/// How long a request may take that has no give-up of its own.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long closing one connection may take.
const GOODBYE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
