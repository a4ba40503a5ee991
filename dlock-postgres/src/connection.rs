//! Connections: how they are opened and checked, and how one message is sent on them.

use crate::{
    commands::{self, RUN_MS, Values},
    error::{failure, is_refused_start, unreached},
};
use dlock_core::driver::{
    DriverError, Result,
    kit::{self, ConnectionOutcome, Dialed, Failure},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row,
    postgres::{PgConnectOptions, PgRow},
};
use std::{
    collections::HashSet,
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The connections of a driver.
pub(crate) type Connections = kit::Connections<Dialer>;

/// Opens connections, all with the same options.
pub(crate) struct Dialer {
    options: PgConnectOptions,
    /// No proxy is in between, as far as is known.
    direct: AtomicBool,
}

/// A connection, and what is known of its session.
pub(crate) struct Session {
    connection: PgConnection,
    /// It is no pool's, and has the [settings](commands::SESSION) of dlock.
    is_direct: bool,
    /// The statements that it has; `None`: not known.
    prepared: Option<HashSet<u64>>,
}

impl Dialer {
    pub(crate) fn new(options: PgConnectOptions) -> Self {
        let options = options.extra_float_digits(None);
        Self {
            options: options.disable_statement_logging(),
            direct: AtomicBool::new(true),
        }
    }

    /// Whether the last connection was one to the server itself.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// The options for a connection to the server itself.
    pub(crate) fn direct(&self) -> PgConnectOptions {
        self.options.clone().options(commands::SESSION)
    }

    async fn connect(&self) -> sqlx::Result<PgConnection> {
        if self.is_direct() {
            match self.direct().connect().await {
                Err(error) if is_refused_start(&error) => {}
                connected => return connected,
            }
        }
        self.options.connect().await
    }
}

impl kit::Dialer for Dialer {
    type Session = Session;
    type Error = sqlx::Error;

    /// A new connection, to a server that can be written.
    async fn dial(&self) -> Result<Dialed<Session>> {
        let (host, port) = (self.options.get_host(), self.options.get_port());
        let unreached = |error| unreached(error).with_address(format_args!("{host}:{port}"));
        let mut session = Session {
            connection: self.connect().await.map_err(unreached)?,
            is_direct: false,
            prepared: None,
        };
        let greeting = session.greet().await.map_err(unreached)?;
        let told = |column| greeting.try_get(column);
        session.is_direct = matches!(told("direct"), Ok(true));
        self.direct.store(session.is_direct, Ordering::Relaxed);
        if !matches!(told("standby"), Ok(false)) {
            let refused = "the server is a standby or read-only: connect to the primary";
            return Err(DriverError::unavailable(refused));
        }
        let time = now(&greeting).map_err(unreached)?;
        Ok(Dialed { session, time })
    }

    async fn time(&self, session: &mut Session) -> sqlx::Result<Duration> {
        now(&session.greet().await?)
    }

    fn failure(&self, error: sqlx::Error, _ended: bool) -> Failure<ConnectionOutcome> {
        failure(error)
    }

    fn silent() -> sqlx::Error {
        sqlx::Error::Io(io::ErrorKind::TimedOut.into())
    }

    async fn hang_up(&self, session: Session) {
        // One that cannot say goodbye is closed by being dropped.
        let _closed = session.connection.close().await;
    }
}

impl Session {
    async fn greet(&mut self) -> sqlx::Result<PgRow> {
        let greeting = self.ask("greeting", RUN_MS, 0, |_| commands::greeting());
        greeting.await?.pop().ok_or(sqlx::Error::RowNotFound)
    }

    /// Sends statements in one message, as one transaction.
    pub(crate) async fn ask(
        &mut self,
        what: &str,
        lock_ms: u64,
        last: u64,
        body: impl FnOnce(&mut Values) -> String,
    ) -> sqlx::Result<Vec<PgRow>> {
        let mut values = Values::new(last, lock_ms, self.is_direct);
        let body = body(&mut values);
        let sql = match self.is_direct {
            true => commands::short(what, &body, &values, &mut self.prepared),
            false => commands::framed(what, &body, &values),
        };
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        let answered = sql.fetch_all(&mut self.connection).await;
        answered.inspect_err(|_| self.prepared = None)
    }
}

/// The server's time in an answer.
pub(crate) fn now(row: &PgRow) -> sqlx::Result<Duration> {
    micros_of(row, "now").map(Duration::from_micros)
}

pub(crate) fn micros_of(row: &PgRow, column: &str) -> sqlx::Result<u64> {
    let micros: i64 = row.try_get(column)?;
    u64::try_from(micros).map_err(|error| sqlx::Error::Decode(error.into()))
}
