//! Connections: opened when needed, lent to one request at a time, closed after a failure.

use crate::{
    commands,
    error::{Stage, classify},
};
use dlock_core::{
    Clock, Instant,
    driver::{
        DriverError, Result,
        kit::{Call, Class, ServerClock},
    },
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row,
    postgres::{PgConnectOptions, PgRow},
};
use std::{
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

/// The connections of one driver.
pub(crate) struct Connections {
    options: PgConnectOptions,
    clock: Clock,
    server: ServerClock,
    /// Grows with each failure of a connection: those opened before are not used again.
    age: AtomicU64,
    work: Slots,
    renewals: Slots,
}

/// The rows of an answer, and the server's time.
pub(crate) struct Answer {
    pub(crate) rows: Vec<PgRow>,
    /// When the server got the request.
    pub(crate) begun: u64,
    /// When it was about to answer.
    pub(crate) now: u64,
}

impl Connections {
    pub(crate) fn new(options: PgConnectOptions, most: usize) -> Self {
        Self {
            options: options.extra_float_digits(None).disable_statement_logging(),
            clock: Clock::boot(),
            server: ServerClock::new(),
            age: AtomicU64::new(0),
            work: Slots::new(most),
            renewals: Slots::new(RENEWAL_CONNECTIONS),
        }
    }

    /// What a request without a give-up of its own may use.
    pub(crate) fn patience(&self) -> Call {
        Call {
            class: Class::Work,
            give_up: self.clock.now() + ANSWER,
        }
    }

    /// Sends statements in one message, as one transaction. `body` gets the server's time at `call.give_up`.
    pub(crate) async fn run(
        &self,
        what: &str,
        call: Call,
        body: impl FnOnce(u64) -> String + Send,
    ) -> Result<Answer> {
        let mut lent = self.lend(call).await?;
        let body = body(self.server.at(call.give_up).map_or(0, micros));
        let answer = self
            .ask(&mut lent.connection, commands::framed(what, &body))
            .await?;
        lent.give_back();
        answer
    }

    /// `Err`: the connection is of no more use.
    async fn ask(&self, connection: &mut PgConnection, sql: String) -> Result<Result<Answer>> {
        let rows = timeout(
            ANSWER,
            sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection),
        )
        .await;
        let received = self.clock.now();
        let read = match rows {
            Ok(rows) => rows.and_then(|mut rows| {
                let last = rows.pop().ok_or(sqlx::Error::RowNotFound)?;
                let (begun, now) = (micros_of(&last, "begun")?, micros_of(&last, "now")?);
                Ok(Answer { rows, begun, now })
            }),
            Err(_) => {
                self.age.fetch_add(1, Ordering::Relaxed);
                return Err(DriverError::unanswered("the server did not answer in time"));
            }
        };
        match read {
            Ok(answer) => {
                self.server
                    .observe(Duration::from_micros(answer.now), received);
                Ok(Ok(answer))
            }
            Err(error) => {
                let (error, broken) = classify(error, Stage::Sent);
                if broken {
                    self.age.fetch_add(1, Ordering::Relaxed);
                    return Err(error);
                }
                Ok(Err(error))
            }
        }
    }

    /// An idle connection, or a new one; waits for either until the request's give-up.
    async fn lend(&self, call: Call) -> Result<Lent<'_>> {
        let slots = match call.class {
            Class::Renewal => &self.renewals,
            Class::Acquire | Class::Work => &self.work,
        };
        let lending = async {
            // The semaphore is never closed.
            let permit = slots.permits.acquire().await.map_err(|_| busy())?;
            let age = self.age.load(Ordering::Relaxed);
            let connection = match slots.idle(age, self.clock.now()) {
                Some(connection) => connection,
                None => self.open().await?,
            };
            Ok::<_, DriverError>(Lent {
                connection,
                age,
                clock: &self.clock,
                slots,
                _permit: permit,
            })
        };
        let rest = call.give_up.since(self.clock.now());
        let lent = timeout(rest, lending).await.map_err(|_| busy())??;
        if self.clock.now() >= call.give_up {
            return Err(busy());
        }
        Ok(lent)
    }

    /// A new connection, to a server that can be written.
    pub(crate) async fn open(&self) -> Result<PgConnection> {
        let opened = self.options.connect().await;
        let mut connection = opened.map_err(|error| classify(error, Stage::Connecting).0)?;
        let greeting = self
            .ask(
                &mut connection,
                commands::framed("greeting", commands::IS_STANDBY),
            )
            .await;
        let greeting = greeting.and_then(|answer| answer).map_err(not_sent)?;
        let standby = greeting.rows.first().map(|row| row.try_get("standby"));
        if !matches!(standby, Some(Ok(false))) {
            let refused = "the server is a standby or read-only: connect to the primary";
            return Err(DriverError::unavailable(refused));
        }
        Ok(connection)
    }

    pub(crate) async fn close(&self) {
        self.age.fetch_add(1, Ordering::Relaxed);
        for slots in [&self.work, &self.renewals] {
            let idle = std::mem::take(&mut *slots.idle_list());
            for Idle { connection, .. } in idle {
                // A connection that cannot say goodbye is closed by being dropped.
                let _closed = timeout(GOODBYE, connection.close()).await;
            }
        }
    }
}

/// The connections of one class of requests.
struct Slots {
    permits: Semaphore,
    idle: Mutex<Vec<Idle>>,
}

struct Idle {
    connection: PgConnection,
    age: u64,
    since: Instant,
}

impl Slots {
    fn new(most: usize) -> Self {
        Self {
            permits: Semaphore::new(most),
            idle: Mutex::default(),
        }
    }

    fn idle_list(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection used last, and drops those that are of no more use.
    fn idle(&self, age: u64, now: Instant) -> Option<PgConnection> {
        let mut list = self.idle_list();
        list.retain(|idle| idle.age == age && now.since(idle.since) < IDLE);
        list.pop().map(|idle| idle.connection)
    }
}

/// A connection in use. It is closed when it is dropped, because an answer may still be under way on it.
struct Lent<'a> {
    connection: PgConnection,
    age: u64,
    clock: &'a Clock,
    slots: &'a Slots,
    _permit: SemaphorePermit<'a>,
}

impl Lent<'_> {
    fn give_back(self) {
        let idle = Idle {
            connection: self.connection,
            age: self.age,
            since: self.clock.now(),
        };
        self.slots.idle_list().push(idle);
    }
}

/// The options have the password.
impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, age, .. } = self;
        f.debug_struct("Connections")
            .field("server", server)
            .field("age", age)
            .finish_non_exhaustive()
    }
}

pub(crate) fn micros_of(row: &PgRow, column: &str) -> std::result::Result<u64, sqlx::Error> {
    let micros: i64 = row.try_get(column)?;
    u64::try_from(micros).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn busy() -> DriverError {
    DriverError::unavailable("no connection to the server could be had in time")
}

/// The request itself was not sent yet.
fn not_sent(error: DriverError) -> DriverError {
    error.with_effect(dlock_core::Effect::None)
}

/// How long the answer to a request is waited for: longer than the server works on it.
const ANSWER: Duration = Duration::from_secs(4);

/// How long a connection is kept without use: shorter than firewalls forget it.
const IDLE: Duration = Duration::from_secs(60);

/// How long closing a connection may take.
const GOODBYE: Duration = Duration::from_secs(1);

/// Connections for renewals alone, which must not wait behind other requests.
const RENEWAL_CONNECTIONS: usize = 4;
