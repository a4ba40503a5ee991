//! Connection pool: opens connections, checks them out, and discards those in an unknown state.
//!
//! The native client's pool pings at each checkout and return, which costs much of its throughput. It also
//! hands out a connection whose last answer was never read. Here a [`Turn`] is a checked-out connection. A
//! statement whose answer was not fully read closes its connection hard, since the rest of the answer may
//! still arrive on it. The pool reuses the last returned connection first, so a quiet client keeps one
//! connection warm and the others end. Renewals have permits and connections of their own and never wait
//! behind waiters.

use crate::{
    commands::{self, Statement, Statements},
    config::MysqlConfig,
    error::{self, Fate},
    limit::{Deadline, Limit},
    session,
    settings::Flavour,
};
use dlock_core::{
    Clock, Effect, Instant, RetryClass,
    driver::{
        DriverError, Result,
        kit::{Backoff, Call, Class, ServerClock},
    },
};
use futures_util::TryStreamExt;
use sqlx::{
    ConnectOptions, Connection as _, Executor as _, MySqlConnection,
    mysql::{MySqlConnectOptions, MySqlQueryResult, MySqlRow},
};
use std::{
    fmt,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// Opens connections, all with the same options.
pub(crate) struct Dialer {
    options: MySqlConnectOptions,
    within: Duration,
    clock: Clock,
    trouble: Mutex<Trouble>,
}

/// The current run of failed attempts to connect, shared by all tasks.
#[derive(Default)]
struct Trouble {
    backoff: Option<Backoff>,
    until: Instant,
    why: Option<Arc<str>>,
}

/// One open connection and what the driver knows of its server.
struct Link {
    native: MySqlConnection,
    /// The connection's id on the server.
    id: u64,
    flavour: Flavour,
    server: ServerClock,
    /// When the server's time was read last.
    timed: Instant,
    used: Instant,
    deadline: Arc<Deadline>,
}

impl Dialer {
    async fn dial(&self) -> Result<Link> {
        Ok(self.greeted().await?.0)
    }

    async fn greeted(&self) -> Result<(Link, session::Greeting)> {
        let dialling = async {
            let mut native = self.options.connect().await.map_err(error::unreached)?;
            let greeting = session::greet(&mut native).await?;
            let now = self.clock.now();
            let server = ServerClock::new();
            server.observe(greeting.now, now);
            let link = Link {
                native,
                id: greeting.id,
                flavour: greeting.flavour,
                server,
                timed: now,
                used: now,
                deadline: Arc::default(),
            };
            Ok((link, greeting))
        };
        match tokio::time::timeout(self.within, dialling).await {
            Ok(dialled) => dialled,
            Err(_) => Err(error::unreachable(Some("no answer while connecting"))),
        }
    }

    /// Ends a statement that ran for too long, from a separate connection. The killed connection is not used
    /// again, so a late kill hits no other statement.
    pub(crate) async fn kill(self: Arc<Self>, id: u64) {
        let killing = async {
            let mut native = self.options.connect().await?;
            commands::kill(&mut native, id).await?;
            native.close().await
        };
        if let Ok(Err(error)) = tokio::time::timeout(self.within, killing).await {
            tracing::debug!(%error, "mysql: ending a statement that runs for too long");
        }
    }

    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failure and delays the next attempt: each failure doubles the pause, from 10 ms to one
    /// second.
    fn failed(&self, error: &DriverError) {
        let now = self.clock.now();
        let mut trouble = self.trouble();
        if now >= trouble.until {
            let first = || Backoff::new(SHORTEST_PAUSE, LONGEST_PAUSE);
            trouble.until = now + trouble.backoff.get_or_insert_with(first).pause();
        }
        trouble.why = Some(said(error).into());
    }
}

/// The connections for one purpose.
struct Set {
    seats: Semaphore,
    idle: Mutex<Vec<Link>>,
    /// Notified when a connection was returned.
    back: Notify,
}

impl Set {
    fn new(most: u32) -> Self {
        Self {
            seats: Semaphore::new(most as usize),
            idle: Mutex::default(),
            back: Notify::new(),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Link>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connection used last, and drops those idle for so long that the server is about to end them.
    fn pop(&self, now: Instant) -> Option<Link> {
        let mut idle = self.idle();
        let is_old = |link: &&Link| now.since(link.used) > IDLE;
        let old = idle.iter().take_while(is_old).count();
        drop(idle.drain(..old));
        idle.pop()
    }

    fn push(&self, link: Link) {
        self.idle().push(link);
        self.back.notify_one();
    }
}

/// All connections of a driver.
pub(crate) struct Connections {
    dialer: Arc<Dialer>,
    clock: Clock,
    work: Set,
    renewals: Set,
    closed: AtomicBool,
}

impl Connections {
    /// Opens the first connection, warns about server settings, and checks the table.
    pub(crate) async fn open(config: &MysqlConfig, sql: &Statements) -> Result<Self> {
        let clock = Clock::boot();
        let dialer = Arc::new(Dialer {
            options: config.options(),
            within: config.connect_within(),
            clock: clock.clone(),
            trouble: Mutex::default(),
        });
        let (mut link, greeting) = dialer.greeted().await?;
        for doubt in greeting.doubts() {
            tracing::warn!("mysql: {doubt}");
        }
        let checking = async {
            if session::follows(&mut link.native).await {
                tracing::warn!(
                    "mysql: this server follows another one: locks taken here are not seen there; connect to the primary"
                );
            }
            session::check_table(&mut link.native, config, sql).await
        };
        match tokio::time::timeout(dialer.within, checking).await {
            Ok(checked) => checked?,
            Err(_) => return Err(error::unreachable(Some("no answer about the table"))),
        }
        let connections = Self {
            dialer,
            clock,
            work: Set::new(config.connections()),
            renewals: Set::new(RENEWALS),
            closed: AtomicBool::new(false),
        };
        connections.work.push(link);
        Ok(connections)
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Waits for a permit and a connection, at most until the call's give-up. A request that fails here was never
    /// sent.
    pub(crate) async fn turn(&self, call: Call) -> Result<Turn<'_>> {
        let give_up = call.give_up;
        let set = match call.class {
            Class::Acquire | Class::Work => &self.work,
            Class::Renewal => &self.renewals,
        };
        // The rare waits are boxed, to keep the future of each request small.
        let seat = match set.seats.try_acquire() {
            Ok(seat) => seat,
            Err(_) => Box::pin(self.seat(set, give_up)).await?,
        };
        let now = self.clock.now();
        let link = match self.idle(set, now)? {
            Some(link) => link,
            None => Box::pin(self.link(set, give_up)).await?,
        };
        let is_known = now.since(link.timed) <= TIMED;
        let mut turn = Turn {
            all: self,
            set,
            link: Some(link),
            began: now,
            unheard: false,
            killed: None,
            _seat: seat,
        };
        if !is_known {
            Box::pin(turn.know_the_time()).await?;
        }
        Ok(turn)
    }

    async fn seat<'a>(&self, set: &'a Set, give_up: Instant) -> Result<SemaphorePermit<'a>> {
        tokio::select! {
            seat = set.seats.acquire() => seat.map_err(|_| error::closed()),
            () = self.clock.sleep_until(give_up) => Err(error::no_turn()),
        }
    }

    fn idle(&self, set: &Set, now: Instant) -> Result<Option<Link>> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(error::closed());
        }
        Ok(set.pop(now))
    }

    async fn link(&self, set: &Set, give_up: Instant) -> Result<Link> {
        loop {
            let now = self.clock.now();
            if let Some(link) = self.idle(set, now)? {
                return Ok(link);
            }
            let (until, why) = {
                let trouble = self.dialer.trouble();
                (trouble.until, trouble.why.clone())
            };
            if now >= give_up {
                return Err(error::unreachable(why.as_deref()));
            }
            if until > now {
                tokio::select! {
                    () = set.back.notified() => {}
                    () = self.clock.sleep_until(until.min(give_up)) => {}
                }
                continue;
            }
            let dialled = tokio::select! {
                dialled = self.dialer.dial() => dialled,
                () = self.clock.sleep_until(give_up) => return Err(error::unreachable(why.as_deref())),
            };
            match dialled {
                Ok(link) => {
                    *self.dialer.trouble() = Trouble::default();
                    return Ok(link);
                }
                Err(error) if error.retry() == RetryClass::Never => return Err(error),
                Err(error) => self.dialer.failed(&error),
            }
        }
    }

    /// Stops handing out connections. Idle ones are closed now, and those in use when they are returned.
    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for set in [&self.work, &self.renewals] {
            set.seats.close();
            set.back.notify_waiters();
            let idle = std::mem::take(&mut *set.idle());
            for link in idle {
                if let Err(error) = link.native.close().await {
                    tracing::debug!(%error, "mysql: closing");
                }
            }
        }
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = (self.work.idle().len(), self.renewals.idle().len());
        f.debug_struct("Connections")
            .field("idle", &idle.0)
            .field("idle_for_renewals", &idle.1)
            .field("closed", &self.closed)
            .finish()
    }
}

/// A checked-out connection, returned to the pool on drop.
pub(crate) struct Turn<'a> {
    all: &'a Connections,
    set: &'a Set,
    /// `None`: the connection was discarded.
    link: Option<Link>,
    /// When the connection was checked out.
    began: Instant,
    /// A statement was sent and its answer was not fully read.
    unheard: bool,
    /// Whether a statement was killed, for servers without a limit of their own.
    killed: Option<Arc<AtomicBool>>,
    _seat: SemaphorePermit<'a>,
}

/// What a statement without rows tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    /// How many rows its `WHERE` matched.
    pub(crate) matched: usize,
    /// What it gave to `LAST_INSERT_ID`.
    pub(crate) number: u64,
}

impl Turn<'_> {
    /// Runs a statement that returns no rows.
    pub(crate) async fn run(&mut self, statement: Statement) -> Result<Done> {
        let limit = self.limit();
        let native = self.native();
        // The client's own `execute` does the same with two more boxes and another stream.
        let answer = {
            let running = pin!(async {
                let mut answer = native.fetch_many(statement);
                let mut done = MySqlQueryResult::default();
                while let Some(part) = answer.try_next().await? {
                    done.extend(part.left());
                }
                Ok(done)
            });
            limit.of(running).await
        };
        let done = self.heard(answer)?;
        Ok(Done {
            matched: usize::try_from(done.rows_affected()).unwrap_or(usize::MAX),
            number: done.last_insert_id(),
        })
    }

    /// Runs a statement that returns rows.
    pub(crate) async fn rows(&mut self, statement: Statement) -> Result<Vec<MySqlRow>> {
        let limit = self.limit();
        let answer = limit.of(self.native().fetch_all(statement)).await;
        self.heard(answer)
    }

    /// The connection for one statement. It must run under [`limit`](Self::limit), and its answer must go to
    /// [`heard`](Self::heard).
    pub(crate) fn native(&mut self) -> &mut MySqlConnection {
        self.unheard = true;
        &mut self.open().native
    }

    /// The timeout for one statement.
    pub(crate) fn limit(&mut self) -> Limit {
        let Some(link) = &self.link else {
            return Limit::default();
        };
        let kill = (link.flavour == Flavour::Mysql).then(|| {
            let killed = Arc::clone(self.killed.get_or_insert_default());
            (Arc::clone(&self.all.dialer), link.id, killed)
        });
        Limit::new(Arc::clone(&link.deadline), kill)
    }

    /// Classifies the statement's answer, and discards connections where the error requires it.
    pub(crate) fn heard<T>(&mut self, answer: sqlx::Result<T>) -> Result<T> {
        let cause = match answer {
            Ok(answer) => {
                self.unheard = false;
                return Ok(answer);
            }
            Err(cause) => cause,
        };
        let failure = error::failed(cause, self.was_killed());
        match failure.link {
            Fate::Kept => self.unheard = false,
            Fate::Closed => self.leave(),
            Fate::AllClosed => {
                self.leave();
                for set in [&self.all.work, &self.all.renewals] {
                    set.idle().clear();
                }
            }
        }
        Err(failure.error)
    }

    fn was_killed(&self) -> bool {
        let killed = self.killed.as_ref();
        killed.is_some_and(|killed| killed.load(Ordering::Relaxed))
    }

    /// Discards the connection.
    pub(crate) fn leave(&mut self) {
        self.link = None;
    }

    /// Records the server's time from a reply.
    pub(crate) fn told(&mut self, server: Duration) {
        let now = self.all.clock.now();
        if let Some(link) = &mut self.link {
            link.server.observe(server, now);
            link.timed = now;
        }
    }

    /// The next checkout reads the server's time anew.
    #[cfg(test)]
    pub(crate) fn forget_the_time(&mut self) {
        if let Some(link) = &mut self.link {
            link.timed = Instant::ORIGIN;
        }
    }

    /// The server's time at `give_up`. A request carries it so that it takes nothing when it runs later.
    pub(crate) fn not_after(&self, give_up: Instant) -> i64 {
        let known = self.link.as_ref().and_then(|link| link.server.at(give_up));
        let micros = known.unwrap_or_default().as_micros();
        i64::try_from(micros).unwrap_or(i64::MAX)
    }

    /// Reads the server's time, which is needed when no reply has told it for a while, because clocks drift
    /// apart.
    async fn know_the_time(&mut self) -> Result<()> {
        let limit = self.limit();
        let told = limit.of(commands::clock(self.native())).await;
        let told = self.heard(told);
        let now = told.map_err(|error| error.with_effect(Effect::None))?;
        self.told(now);
        Ok(())
    }

    fn open(&mut self) -> &mut Link {
        self.link
            .as_mut()
            .expect("a turn begins with a connection, and ends with the error that takes it away")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let usable =
            !self.unheard && !self.was_killed() && !self.all.closed.load(Ordering::Relaxed);
        if let Some(mut link) = self.link.take()
            && usable
        {
            // An early time is safe here, and saves a reading of the clock.
            link.used = self.began;
            self.set.push(link);
        }
    }
}

fn said(error: &DriverError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Renewals are batched, so one connection is enough while the server answers; the others are for when it is
/// slow.
const RENEWALS: u32 = 4;
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Half of the session's `wait_timeout`.
const IDLE: Duration = Duration::from_secs(60);
/// Two clocks that differ by 100 ppm drift apart by 3 ms in this time.
const TIMED: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::{Call, Class, Connections, Effect, Flavour};
    use crate::{commands::Statements, error, limit::RUNS};
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use std::time::{Duration, Instant};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_without_a_limit_is_told_to_end_a_statement_and_its_connection_is_left() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let config = server.url().parse().unwrap();
        let all = Connections::open(&config, &Statements::new(&config.qualified().unwrap()))
            .await
            .unwrap();
        let call = Call {
            class: Class::Work,
            give_up: all.clock().now() + Duration::from_secs(20),
        };
        let mut turn = all.turn(call).await.unwrap();
        // Either family is made to behave like a server that ends no write.
        let unbound = match turn.open().flavour {
            Flavour::Mariadb => "SET SESSION max_statement_time = 0",
            Flavour::Mysql => "SET SESSION max_execution_time = 0",
        };
        let unbound = sqlx::raw_sql(unbound).execute(turn.native()).await;
        turn.heard(unbound).unwrap();
        turn.open().flavour = Flavour::Mysql;
        let (began, id) = (Instant::now(), turn.open().id);
        let limit = turn.limit();
        let slept =
            sqlx::raw_sql("SELECT COUNT(*) FROM information_schema.COLUMNS WHERE SLEEP(0.1) = 0");
        let slept = limit.of(slept.execute(turn.native())).await;
        let error = turn.heard(slept).unwrap_err();
        assert!(error.to_string().contains("two seconds"), "{error:?}");
        assert!(error::is_contention(&error) && error.effect() == Effect::None);
        assert!(began.elapsed() >= RUNS, "{:?}", began.elapsed());
        drop(turn);
        let mut turn = all.turn(call).await.unwrap();
        assert_ne!(turn.open().id, id);
    }
}
